# Tests and benchmarks on a GPU. Included by the Makefile; needs a build with CUDA.
#
#   make test-gpu            build and run them here
#   make gpu-bundle          collect what a run needs in build/gpu-bundle, for a machine with a GPU and nothing else;
#                            there: build/gpu-bundle/spdp/tests/gpu/run.sh
#   make test-gpu-sanitize   the same in short forms under compute-sanitizer
#   make bench-kernels       times of the decode kernels as CSV and, where there is gnuplot, as a picture;
#                            MODELS=1: the shapes of more models
#   make bench-decode        times of whole models of random weights, the same way; QUICK=1: one shape and
#                            a short context
#
# ARCH=compute_80 builds our kernels as that PTX alone: the device's driver compiles it, and the paths of sm_80 run.

GPU_BUILD = $(BUILD)/gpu$(if $(findstring compute_,$(ARCH)),-$(ARCH))
BUNDLE = $(BUILD)/gpu-bundle$(if $(findstring compute_,$(ARCH)),-$(ARCH))
GPU_PROGRAMS = $(patsubst tests/gpu/%.cu,%,$(wildcard tests/gpu/*_test.cu))
GPU_TESTS = test_kernels test_forward test_synthetic
GPU_TOOLS = compare_models

.PHONY: test-gpu test-gpu-sanitize gpu-bundle gpu-programs bench-kernels bench-decode
test-gpu: gpu-bundle
	$(BUNDLE)/spdp/tests/gpu/run.sh

test-gpu-sanitize: gpu-bundle
	$(BUNDLE)/spdp/tests/gpu/run.sh --sanitize

bench-kernels: gpu-bundle
	$(BUNDLE)/spdp/build/bench_kernels $(BUILD)/kernels.csv $(if $(MODELS),--models)
	$(call plot,tests/bench/kernels.gp,$(BUILD)/kernels)

bench-decode: gpu-bundle
	$(BUNDLE)/spdp/tests/bench/bench_decode.sh $(abspath $(BUILD))/decode.csv $(if $(QUICK),--quick)
	$(call plot,tests/bench/decode.gp,$(BUILD)/decode)

# $(call plot,SCRIPT,NAME): NAME.png from NAME.csv
plot = @if command -v gnuplot >/dev/null; then gnuplot -c $(1) $(2).csv $(2).png && echo $(2).png; \
	else echo "no picture: gnuplot is not installed"; fi

# The bundle is laid out like the repository, so that its tests find what they read.
gpu-bundle:
ifneq ($(USE_CUDA),1)
	@echo "gpu-bundle needs nvcc (the CUDA Toolkit)" >&2; exit 1
endif
	$(MAKE) BUILD=$(GPU_BUILD) BIN=$(GPU_BUILD) ARCH="$(ARCH)" CUDA=1 RPATH=1 gpu-programs
	rm -rf $(BUNDLE)
	mkdir -p $(addprefix $(BUNDLE)/,spdp/build spdp/lib spdp/tests spdp/export shared/data/demo-8M shared/data/text)
	ln -s ../../../demo $(BUNDLE)/spdp/demo  # the repository travels with the bundle
	cp -r tests/gpu tests/golden tests/bench $(BUNDLE)/spdp/tests/
	cp export/calibration.txt $(BUNDLE)/spdp/export/
	for f in run convert; do strip -o $(BUNDLE)/spdp/$$f $(GPU_BUILD)/$$f; done
	for f in $(GPU_TESTS) $(GPU_PROGRAMS) $(GPU_TOOLS) bench_kernels; do \
		strip -o $(BUNDLE)/spdp/build/$$f $(GPU_BUILD)/bin/$$f; done
	for so in `ldd $(GPU_BUILD)/bin/test_forward $(GPU_BUILD)/convert | sed -n 's/.*=> \(.*\(sentencepiece\|cjson\|xxhash\|cmocka\|gomp\|lapack\|blas\|gfortran\|quadmath\)[^ ]*\) .*/\1/p'`; \
		do cp -L $$so $(BUNDLE)/spdp/lib/; done
	for f in stories260K demo-8M/golden.json demo-8M/config.json demo-8M/tokenizer.model text/heldout-32769.tok; do \
		if [ -e ../shared/data/$$f ]; then cp -r ../shared/data/$$f $(BUNDLE)/shared/data/$$f; fi; done
	@du -sh $(BUNDLE)

gpu-programs: all $(GPU_TESTS:%=$(BUILD)/bin/%) $(GPU_PROGRAMS:%=$(BUILD)/bin/%) $(GPU_TOOLS:%=$(BUILD)/bin/%) \
	$(BUILD)/bin/bench_kernels

$(GPU_TESTS:%=$(BUILD)/bin/%): $(BUILD)/bin/%: tests/%.c $(LIBRARY)
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -MMD -MP $(LDFLAGS) -o $@ $< $(LIBRARY) -lcmocka $(LDLIBS)
$(GPU_TOOLS:%=$(BUILD)/bin/%): $(BUILD)/bin/%: tests/gpu/%.c $(LIBRARY)
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -MMD -MP $(LDFLAGS) -o $@ $< $(LIBRARY) $(LDLIBS)
$(GPU_PROGRAMS:%=$(BUILD)/bin/%): $(BUILD)/bin/%: $(BUILD)/tests/gpu/%.cu.o $(LIBRARY)
	@mkdir -p $(@D)
	$(CC) $(LDFLAGS) -o $@ $^ $(LDLIBS)
$(BUILD)/bin/bench_kernels: $(BUILD)/tests/bench/bench_kernels.cu.o $(LIBRARY)
	@mkdir -p $(@D)
	$(CC) $(LDFLAGS) -o $@ $^ $(LDLIBS)

-include $(GPU_PROGRAMS:%=$(BUILD)/tests/gpu/%.cu.d) $(BUILD)/tests/bench/bench_kernels.cu.d \
	$(GPU_TESTS:%=$(BUILD)/bin/%.d) $(GPU_TOOLS:%=$(BUILD)/bin/%.d)
