# Tests and benchmarks on a GPU. Included by the Makefile; needs a build with CUDA.
#
#   make test-gpu            build and run them here
#   make gpu-bundle          collect what a run needs in build/gpu-bundle, for a machine with a GPU and nothing else;
#                            there: build/gpu-bundle/tests/gpu/run.sh
#   make bench-kernels       times of the decode kernels as CSV
#
# ARCH=compute_80 builds our kernels as that PTX alone: the device's driver compiles it, and the paths of sm_80 run.

GPU_BUILD = $(BUILD)/gpu$(if $(findstring compute_,$(ARCH)),-$(ARCH))
BUNDLE = $(BUILD)/gpu-bundle$(if $(findstring compute_,$(ARCH)),-$(ARCH))
GPU_PROGRAMS = $(patsubst tests/gpu/%.cu,%,$(wildcard tests/gpu/*_test.cu))
GPU_TESTS = test_kernels test_forward

.PHONY: test-gpu test-gpu-sanitize gpu-bundle gpu-programs bench-kernels
test-gpu: gpu-bundle
	$(BUNDLE)/tests/gpu/run.sh

test-gpu-sanitize: gpu-bundle
	$(BUNDLE)/tests/gpu/run.sh --sanitize

bench-kernels: gpu-bundle
	$(BUNDLE)/build/bench_kernels $(BUILD)/kernels.csv

# The bundle is laid out like the repository, so that its tests find what they read.
gpu-bundle:
ifneq ($(USE_CUDA),1)
	@echo "gpu-bundle needs nvcc (the CUDA Toolkit)" >&2; exit 1
endif
	$(MAKE) BUILD=$(GPU_BUILD) BIN=$(GPU_BUILD) ARCH="$(ARCH)" CUDA=1 RPATH=1 gpu-programs
	rm -rf $(BUNDLE)
	mkdir -p $(BUNDLE)/build $(BUNDLE)/lib $(BUNDLE)/tests
	cp -r demo $(BUNDLE)/demo
	cp -r tests/gpu tests/golden $(BUNDLE)/tests/
	for f in run convert; do cp $(GPU_BUILD)/$$f $(BUNDLE)/; done
	for f in $(GPU_TESTS) $(GPU_PROGRAMS) bench_kernels bench_cpu; do cp $(GPU_BUILD)/bin/$$f $(BUNDLE)/build/; done
	for so in `ldd $(GPU_BUILD)/bin/test_forward | sed -n 's/.*=> \(.*\(sentencepiece\|cjson\|xxhash\|cmocka\|gomp\)[^ ]*\) .*/\1/p'`; \
		do cp -L $$so $(BUNDLE)/lib/; done
	if [ -d ../shared/data/stories260K ]; then cp -r ../shared/data/stories260K $(BUNDLE)/; fi
	if [ -r ../shared/data/demo-8M/golden.json ]; then cp ../shared/data/demo-8M/golden.json $(BUNDLE)/demo/; fi
	@if cuobjdump --list-elf $(BUNDLE)/run 2>/dev/null | grep -q . ; then echo "machine code: `cuobjdump --list-elf $(BUNDLE)/run | sed 's/.*\.\(sm_[0-9a]*\)\..*/\1/' | sort -u | xargs`"; \
		else echo "machine code: none, PTX only"; fi

gpu-programs: all $(GPU_TESTS:%=$(BUILD)/bin/%) $(GPU_PROGRAMS:%=$(BUILD)/bin/%) $(BUILD)/bin/bench_kernels $(BUILD)/bin/bench_cpu

$(GPU_TESTS:%=$(BUILD)/bin/%): $(BUILD)/bin/%: tests/%.c $(LIBRARY)
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -MMD -MP $(LDFLAGS) -o $@ $< $(LIBRARY) -lcmocka $(LDLIBS)
$(BUILD)/bin/bench_cpu: tests/bench/bench_cpu.c $(LIBRARY)
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -MMD -MP $(LDFLAGS) -o $@ $< $(LIBRARY) $(LDLIBS)
$(GPU_PROGRAMS:%=$(BUILD)/bin/%): $(BUILD)/bin/%: $(BUILD)/tests/gpu/%.cu.o $(LIBRARY)
	@mkdir -p $(@D)
	$(CC) $(LDFLAGS) -o $@ $^ $(LDLIBS)
$(BUILD)/bin/bench_kernels: $(BUILD)/tests/bench/bench_kernels.cu.o $(LIBRARY)
	@mkdir -p $(@D)
	$(CC) $(LDFLAGS) -o $@ $^ $(LDLIBS)

-include $(GPU_PROGRAMS:%=$(BUILD)/tests/gpu/%.cu.d) $(BUILD)/tests/bench/bench_kernels.cu.d
