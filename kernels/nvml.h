/* nvml.h: what energy a device takes and at which clocks it runs, from the driver's management library, loaded where it
 * is there. */
#ifndef SPDP_NVML_H
#define SPDP_NVML_H

/* A device under observation. */
typedef struct Nvml Nvml;

/* pci_bus_id: as cudaDeviceGetPCIBusId() gives it, since the library counts devices in another order than CUDA
 * may. NULL where there is no library or it does not know this device. */
Nvml *nvml_open(const char *pci_bus_id);
void nvml_close(Nvml *nvml);  // NULL is fine

/* Joules since the driver was loaded, which the driver brings up to date every 20 to 100 ms; NAN where nvml is
 * NULL or the library does not say. */
double nvml_energy_joules(const Nvml *nvml);

/* A clock of this moment, and the most that it can be, MHz; NAN as above. */
enum NvmlClock { NVML_SM = 1, NVML_MEMORY = 2 };
double nvml_clock_mhz(const Nvml *nvml, enum NvmlClock clock);
double nvml_most_clock_mhz(const Nvml *nvml, enum NvmlClock clock);

#endif
