# spdp. `make help` lists the targets.
#
#   CUDA=auto|0|1   build the CUDA backend: auto = where nvcc is found
#   ARCH=...        CUDA architectures, default 80 86 89 90a
#   BUILD=dir       where objects go

MAKEFLAGS += --no-builtin-rules

comma := ,

BUILD ?= build
BIN ?= .
CUDA ?= auto
CC = gcc
CXX = g++
AR = ar
OPT ?= -O3
SANITIZE ?=

WARN = -Wall -Wextra -Wshadow -Wvla -Werror
CFLAGS = -std=c11 -D_GNU_SOURCE $(OPT) -g -fopenmp $(SANITIZE) $(WARN) -Wstrict-prototypes -Wmissing-prototypes
CXXFLAGS = -std=c++17 $(OPT) -g $(SANITIZE) $(WARN)
LDFLAGS = -fopenmp $(SANITIZE) $(if $(RPATH),-Wl$(comma)-rpath$(comma)'$$ORIGIN/lib:$$ORIGIN/../lib')
LDLIBS = -lsentencepiece -lcjson -ledit -lxxhash -llapacke -llapack -lblas -lstdc++ -lm $(CUDA_LIBS)

# ---- what is here -----------------------------------------------------------------------------------

MACHINE := $(shell $(CC) -dumpmachine)
VERSION := $(shell git describe --always --dirty 2>/dev/null || echo unknown)

# CPU kernels are built once for each instruction set and chosen at run time.
ISAS = portable
ifneq (,$(findstring x86_64,$(MACHINE)))
ISAS += avx2 avx512 avx512vbmi2
endif
FLAGS_portable =
FLAGS_avx2 = -mavx2 -mfma -mf16c -mpopcnt
FLAGS_avx512 = $(FLAGS_avx2) -mavx512f -mavx512bw -mavx512vl -mavx512dq -mprefer-vector-width=512
FLAGS_avx512vbmi2 = $(FLAGS_avx512) -mavx512vbmi2

# The CUDA backend, where there is a compiler for it.
NVCC ?= $(or $(shell command -v nvcc),$(wildcard /usr/local/cuda/bin/nvcc))
ifeq ($(CUDA),auto)
USE_CUDA := $(if $(NVCC),1,0)
else
USE_CUDA := $(CUDA)
endif
ifeq ($(filter 0 1,$(USE_CUDA)),)
$(error CUDA=$(CUDA): must be auto, 0 or 1)
endif
ifeq ($(USE_CUDA),1)
ifeq ($(NVCC),)
$(error CUDA=1, but nvcc was not found: install the CUDA Toolkit, put nvcc on PATH, or build with CUDA=0)
endif
CUDA_HOME := $(patsubst %/bin/,%,$(dir $(realpath $(NVCC))))
CUDA_SOURCES = $(wildcard kernels/*.cu)
# ARCH: numbers (machine code for each, and PTX of the first), or compute_NN for that PTX alone
ARCH ?= 80 86 89 90a
GENCODE = $(if $(findstring compute_,$(ARCH)),-gencode arch=$(ARCH)$(comma)code=$(ARCH),$(foreach a,$(ARCH),-gencode arch=compute_$(a)$(comma)code=sm_$(a)) \
	$(if $(filter 80,$(ARCH)),-gencode arch=compute_80$(comma)code=compute_80))
NVCCFLAGS = -std=c++17 -O3 -lineinfo $(GENCODE) -Xfatbin=-compress-all -Xptxas=--warn-on-spills $(CUDA_DEFINES) -Xcompiler -Wall,-Wextra,-fopenmp
CUDA_LIBS = -L$(CUDA_HOME)/lib64 -lcudart_static -lpthread -ldl -lrt
endif

# Every source but the programs' own makes one library, which programs and tests link.
PROGRAMS = run.c export/convert.c
SOURCES = $(filter-out $(PROGRAMS) kernels/cpu_kernels.c, $(wildcard kernels/*.c model/*.c export/*.c tokenizer/*.c chat/*.c))
OBJECTS = $(SOURCES:%=$(BUILD)/%.o) $(BUILD)/tokenizer/tokenizer.cc.o $(ISAS:%=$(BUILD)/kernels/cpu_kernels.%.o) \
	$(CUDA_SOURCES:%=$(BUILD)/%.o)
LIBRARY = $(BUILD)/libspdp.a
TESTS = $(patsubst tests/%.c,$(BUILD)/tests/%,$(wildcard tests/test_*.c))

.PHONY: all banner deps demo test test-debug debug clean help packages format test-golden bench quality best install uninstall lint
.DEFAULT_GOAL := all

all: banner $(BIN)/run $(BIN)/convert

banner:
	@echo "C      $(shell $(CC) -dumpversion) for $(MACHINE); CPU kernels: $(ISAS)"
ifeq ($(USE_CUDA),1)
	@echo "CUDA   $(NVCC), architectures $(ARCH)"
else
	@echo "CUDA   no ($(if $(NVCC),CUDA=0 was asked for,nvcc not found)): CPU backend only"
endif

help:
	@echo "make              build ./run and ./convert"
	@echo "make deps         install the Debian packages of packages.txt"
	@echo "make demo         build, convert the demo model at 50 % sparsity, print a story"
	@echo "make test         build and run every test that needs no GPU"
	@echo "make debug        build with ASan and UBSan into build/debug"
	@echo "make test-debug   the tests with that build"
	@echo "make test-clang   build with clang, its unit tests; test-tsan: races between threads (clang)"
	@echo "make test-aarch64 unit tests of an AArch64 build, under qemu (cross compiler)"
	@echo "make coverage     lines that make test reaches, file by file"
	@echo "make fuzz         build the fuzz targets and replay their corpora (clang)"
	@echo "make bench        CPU figures: encoder, decode"
	@echo "make test-gpu     tests on a GPU; test-gpu-sanitize, gpu-bundle: see tests/gpu/gpu.mk"
	@echo "make bench-decode times of whole models on a GPU; bench-kernels: of the decode kernels"
	@echo "make test-golden  the whole perplexity check against reference figures (minutes)"
	@echo "make quality      perplexity over static and dynamic ratios (minutes to hours); make best: the best pair"
	@echo "make format       clang-format"
	@echo "make lint         clang-tidy and cppcheck"
	@echo "make install      spdp-run, spdp-convert, their man pages and bash completion: PREFIX=, DESTDIR=; uninstall"
	@echo "make clean"

# ---- packages -----------------------------------------------------------------------------------------

deps:
	./setup

# One line that names the package instead of a page of compiler errors.
need = @printf '\043include <$(1)>\n' | $(CXX) -E -x c++ - >/dev/null 2>&1 || \
	{ echo "$(1) is missing: install $(2), or run 'make deps' for all packages" >&2; exit 1; }
packages:
	$(call need,sentencepiece_processor.h,libsentencepiece-dev)
	$(call need,cjson/cJSON.h,libcjson-dev)
	$(call need,histedit.h,libedit-dev)
	$(call need,xxhash.h,libxxhash-dev)
	$(call need,lapacke.h,liblapacke-dev)

# ---- build ------------------------------------------------------------------------------------------------

$(BIN)/run: $(BUILD)/run.c.o $(LIBRARY)
	$(CC) $(LDFLAGS) -o $@ $^ $(LDLIBS)

$(BIN)/convert: $(BUILD)/export/convert.c.o $(LIBRARY)
	$(CC) $(LDFLAGS) -o $@ $^ $(LDLIBS)

$(LIBRARY): $(OBJECTS)
	@rm -f $@
	$(AR) rcs $@ $^

$(BUILD)/%.c.o: %.c | packages
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -DVERSION='"$(VERSION)"' -MMD -MP -c -o $@ $<

$(BUILD)/%.cc.o: %.cc | packages
	@mkdir -p $(@D)
	$(CXX) $(CXXFLAGS) -MMD -MP -c -o $@ $<

$(BUILD)/%.cu.o: %.cu
	@mkdir -p $(@D)
	$(NVCC) $(NVCCFLAGS) -MMD -MP -c -o $@ $<

# The shipped calibration text is in the program.
$(BUILD)/export/calibration_text.c.o: export/calibration.txt

# Objects of a build with CUDA and of one without are not the same.
$(BUILD)/kernels/backend.c.o: CFLAGS += $(if $(filter 1,$(USE_CUDA)),-DUSE_CUDA)
$(BUILD)/kernels/backend.c.o: $(BUILD)/cuda_$(USE_CUDA)
$(BUILD)/cuda_$(USE_CUDA):
	@mkdir -p $(@D)
	@rm -f $(BUILD)/cuda_0 $(BUILD)/cuda_1
	@touch $@

$(ISAS:%=$(BUILD)/kernels/cpu_kernels.%.o): $(BUILD)/kernels/cpu_kernels.%.o: kernels/cpu_kernels.c
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) $(FLAGS_$*) -DCPU_KERNELS=cpu_kernels_$* -DCPU_KERNELS_NAME='"$*"' -MMD -MP -c -o $@ $<

# The product that calibration spends its time in: multiply and add in one instruction.
$(BUILD)/export/rank_update.c.o: CFLAGS += -ffp-contract=fast

DEBUG_BUILD = BUILD=build/debug BIN=build/debug OPT="-O1 -fno-omit-frame-pointer" CUDA_DEFINES=-DCUDA_SYNCHRONISE \
	SANITIZE="-fsanitize=address,undefined -fno-sanitize-recover=undefined"

debug:
	$(MAKE) $(DEBUG_BUILD)

# ---- install -------------------------------------------------------------------------------------------------

# The names are longer than here: a plain convert would hide ImageMagick's.
PREFIX ?= /usr/local
INSTALL_BIN = $(DESTDIR)$(PREFIX)/bin
INSTALL_MAN = $(DESTDIR)$(PREFIX)/share/man/man1
INSTALL_COMPLETION = $(DESTDIR)$(PREFIX)/share/bash-completion/completions

install: all
	install -d $(INSTALL_BIN) $(INSTALL_MAN) $(INSTALL_COMPLETION)
	for program in run convert; do \
	    install -m 755 $(BIN)/$$program $(INSTALL_BIN)/spdp-$$program && \
	    install -m 644 man/$$program.1 $(INSTALL_MAN)/spdp-$$program.1 && \
	    install -m 644 completion/spdp.bash $(INSTALL_COMPLETION)/spdp-$$program || exit 1; \
	done

uninstall:
	for program in run convert; do \
	    rm -f $(INSTALL_BIN)/spdp-$$program $(INSTALL_MAN)/spdp-$$program.1 $(INSTALL_COMPLETION)/spdp-$$program; \
	done

# ---- demo and tests -------------------------------------------------------------------------------------------

demo: all
	./convert demo $(BUILD)/demo.bin --sp 0.5 --calib-tokens 8192 --force
	./run $(BUILD)/demo.bin -p "Once upon a time" -n 128 --seed 1

$(BUILD)/tests/%: tests/%.c $(LIBRARY)
	$(call need,cmocka.h,libcmocka-dev)
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -MMD -MP $(LDFLAGS) -o $@ $< $(LIBRARY) -lcmocka $(LDLIBS)

# A library that makes system calls fail: preloaded, and so without any sanitizer.
FAULT = $(BUILD)/tests/fault/fault.so
$(FAULT): tests/fault/fault.c
	@mkdir -p $(@D)
	$(CC) $(filter-out -fopenmp $(SANITIZE),$(CFLAGS)) -shared -fPIC -o $@ $< -ldl

test: all $(TESTS) $(FAULT)
	BIN=$(BIN) BUILD=$(BUILD) tests/run.sh $(TESTS)

test-debug: debug
	$(MAKE) $(DEBUG_BUILD) test

# The whole perplexity check against transformers' figures; minutes.
test-golden: all
	BIN=$(BIN) BUILD=$(BUILD) tests/check_golden.sh

$(BUILD)/tests/bench/bench_cpu: tests/bench/bench_cpu.c $(LIBRARY)
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -MMD -MP $(LDFLAGS) -o $@ $< $(LIBRARY) $(LDLIBS)

bench: $(BUILD)/tests/bench/bench_cpu
	$<

# What pruning costs in perplexity: see tests/quality/quality.sh for the settings (MODEL=, TEXT=, ...). Hours of one
# core for a real model.
quality best: all
	BIN=$(BIN) tests/quality/quality.sh $(if $(filter best,$@),best,sweep)

include tests/fuzz/fuzz.mk
include tests/gpu/gpu.mk
include tests/analysis.mk

# Static analysis: .clang-tidy says which checks and why; tests/cppcheck.txt what cppcheck is wrong about.
LINT_FLAGS = -std=c11 -D_GNU_SOURCE -fopenmp -DUSE_CUDA -DVERSION='"lint"'
LINT_KERNELS = -DCPU_KERNELS=cpu_kernels_portable -DCPU_KERNELS_NAME='"portable"'
lint:
	@command -v clang-tidy cppcheck >/dev/null || { echo "install clang-tidy and cppcheck" >&2; exit 1; }
	printf '%s\n' $(filter-out kernels/util.c,$(PROGRAMS) $(SOURCES)) | \
	    xargs -P $(or $(JOBS),2) -I FILE clang-tidy --quiet FILE -- $(LINT_FLAGS) -include tests/lint.h
	clang-tidy --quiet kernels/util.c -- $(LINT_FLAGS)
	clang-tidy --quiet kernels/cpu_kernels.c -- $(LINT_FLAGS) $(LINT_KERNELS)
	clang-tidy --quiet tokenizer/tokenizer.cc -- -std=c++17
	cppcheck --quiet --error-exitcode=1 --enable=warning,performance,portability --std=c11 -D_GNU_SOURCE \
	    -DVERSION='"lint"' --suppressions-list=tests/cppcheck.txt $(PROGRAMS) $(SOURCES)

format:
	clang-format -i $(wildcard *.c kernels/*.[ch] model/*.[ch] export/*.[ch] tokenizer/*.[ch] tokenizer/*.cc chat/*.[ch] tests/*.[ch])

clean:
	rm -rf build run convert

-include $(OBJECTS:.o=.d) $(PROGRAMS:%=$(BUILD)/%.d) $(TESTS:=.d)
