#include "nvml.h"

#include <dlfcn.h>
#include <math.h>

#include <new>

// The few declarations of the library that are used: its header does not come with every toolkit.
typedef struct nvmlDevice_st *nvmlDevice_t;
typedef int nvmlReturn_t;  // 0 = success

struct Nvml {
    void *library;
    nvmlDevice_t device;
    nvmlReturn_t (*init)();
    nvmlReturn_t (*shutdown)();
    nvmlReturn_t (*device_by_bus_id)(const char *pci_bus_id, nvmlDevice_t *device);
    nvmlReturn_t (*total_energy)(nvmlDevice_t device, unsigned long long *millijoules);
    nvmlReturn_t (*clock)(nvmlDevice_t device, int which, unsigned *mhz);
    nvmlReturn_t (*most_clock)(nvmlDevice_t device, int which, unsigned *mhz);
};

/* Fill *function with a symbol; false if the library has none of that name. */
template <typename F> static bool find(F *function, void *library, const char *name) {
    *function = reinterpret_cast<F>(dlsym(library, name));
    return *function != nullptr;
}

/* Start the library and find the device; false, with the library stopped, where that fails. */
static bool start(Nvml *n, const char *pci_bus_id) {
    if (!find(&n->init, n->library, "nvmlInit_v2") || !find(&n->shutdown, n->library, "nvmlShutdown") ||
        !find(&n->device_by_bus_id, n->library, "nvmlDeviceGetHandleByPciBusId_v2") ||
        !find(&n->total_energy, n->library, "nvmlDeviceGetTotalEnergyConsumption") ||
        !find(&n->clock, n->library, "nvmlDeviceGetClockInfo") ||
        !find(&n->most_clock, n->library, "nvmlDeviceGetMaxClockInfo") || n->init() != 0) {
        return false;
    }
    if (n->device_by_bus_id(pci_bus_id, &n->device) != 0) {
        n->shutdown();
        return false;
    }
    return true;
}

Nvml *nvml_open(const char *pci_bus_id) {
    Nvml n = {};
    n.library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!n.library) {
        return nullptr;
    }
    if (!start(&n, pci_bus_id)) {
        dlclose(n.library);
        return nullptr;
    }
    Nvml *opened = new (std::nothrow) Nvml(n);
    if (!opened) {
        n.shutdown();
        dlclose(n.library);
    }
    return opened;
}

void nvml_close(Nvml *nvml) {
    if (nvml) {
        nvml->shutdown();
        dlclose(nvml->library);
        delete nvml;
    }
}

double nvml_energy_joules(const Nvml *nvml) {
    unsigned long long millijoules;
    return nvml && nvml->total_energy(nvml->device, &millijoules) == 0 ? (double)millijoules * 1e-3 : NAN;
}

double nvml_clock_mhz(const Nvml *nvml, enum NvmlClock clock) {
    unsigned mhz;
    return nvml && nvml->clock(nvml->device, clock, &mhz) == 0 ? mhz : NAN;
}

double nvml_most_clock_mhz(const Nvml *nvml, enum NvmlClock clock) {
    unsigned mhz;
    return nvml && nvml->most_clock(nvml->device, clock, &mhz) == 0 ? mhz : NAN;
}
