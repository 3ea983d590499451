# The tests in builds that find what the ordinary one does not. Included by the Makefile.
#
#   make test-clang     clang's warnings on all of C and C++, and the unit tests
#   make test-tsan      races between threads: unit tests, a conversion, a generation and a chat under clang's
#                       thread sanitizer
#   make test-aarch64   the portable kernels on another machine: cross-compiled, unit tests under qemu
#   make coverage       lines that the tests reach, file by file; fails below COVERAGE_MIN percent

CLANG ?= clang
CLANGXX ?= clang++
COVERAGE_MIN ?= 90
UNIT_TESTS = $(patsubst tests/%.c,%,$(wildcard tests/test_*.c))

.PHONY: test-clang clang-packages test-tsan test-aarch64 aarch64-packages coverage

clang-packages:
	@echo 'int main(void) { return 0; }' | $(CLANG) -fopenmp -fsanitize=thread -include omp.h -x c -o /dev/null - \
		2>/dev/null || { echo "install clang, libclang-rt-14-dev and libomp-dev" >&2; exit 1; }

CLANG_BUILD = CC=$(CLANG) CXX=$(CLANGXX) CUDA=0 BUILD=build/clang BIN=build/clang

test-clang: clang-packages
	$(MAKE) $(CLANG_BUILD) all $(UNIT_TESTS:%=build/clang/tests/%)
	SPDP_TEST_SHORT=1 BIN=build/clang BUILD=build/clang tests/run.sh $(UNIT_TESTS:%=build/clang/tests/%)

# ---- races ----------------------------------------------------------------------------------------------------

# Programs that share work among threads. Those that only parse are left out.
TSAN = build/tsan
TSAN_TESTS = $(addprefix $(TSAN)/tests/test_,chat checkpoint damping forward kernels prune resume score source \
	static synthetic thresholds tiled_cbc)
TSAN_BUILD = CC=$(CLANG) CXX=$(CLANGXX) CUDA=0 BUILD=$(TSAN) BIN=$(TSAN) SANITIZE=-fsanitize=thread \
	OPT="-O2 -fno-omit-frame-pointer"

test-tsan: clang-packages
	$(MAKE) $(TSAN_BUILD) all $(TSAN_TESTS) $(TSAN)/tests/race
	LIBARCHER=$(dir $(realpath $(shell $(CLANG) -print-file-name=libomp.so.5)))libarcher.so \
		BIN=$(TSAN) BUILD=$(TSAN) tests/races.sh $(TSAN_TESTS)

$(TSAN)/tests/race: tests/race.c
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) $(LDFLAGS) -o $@ $<

# ---- AArch64 --------------------------------------------------------------------------------------------------

# The libraries come as Debian's packages for arm64 into a folder of their own; this machine's packages stay as
# they are. libc, libstdc++ and libgomp are the cross compiler's.
ARM = build/aarch64
ARM_SYSROOT = $(ARM)/sysroot
ARM_TRIPLET = aarch64-linux-gnu
ARM_PACKAGES = $(addprefix libcmocka,-dev 0) $(addprefix libcjson,-dev 1) $(addprefix libxxhash,-dev 0) \
	$(addprefix libsentencepiece,-dev 0) $(addprefix libedit,-dev 2) libbsd0 libmd0 libtinfo6 liblapacke-dev \
	liblapacke liblapack-dev liblapack3 libblas-dev libblas3 libtmglib-dev libtmglib3 libgfortran5
ARM_APT = apt-get -qq -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o APT::Sandbox::User= \
	-o Dir::State=$(abspath $(ARM))/apt -o Dir::State::status=/dev/null -o Dir::Cache=$(abspath $(ARM))/apt \
	-o Dir::Etc::sourceparts=- \
	-o Dir::Etc::sourcelist=$(firstword $(wildcard /etc/apt/sources.list.d/debian.sources) /etc/apt/sources.list)
ARM_USR = $(abspath $(ARM_SYSROOT))/usr
ARM_LIB = $(ARM_USR)/lib/$(ARM_TRIPLET)
ARM_PATH = $(ARM_LIB):$(ARM_LIB)/blas:$(ARM_LIB)/lapack:$(abspath $(ARM_SYSROOT))/lib/$(ARM_TRIPLET)
ARM_FLAGS = -isystem $(ARM_USR)/include -isystem $(ARM_USR)/include/$(ARM_TRIPLET) \
	$(patsubst %,-L%,$(subst :, ,$(ARM_PATH))) -Wl$(comma)-rpath-link=$(ARM_PATH)
ARM_BUILD = CC="$(ARM_TRIPLET)-gcc $(ARM_FLAGS)" CXX="$(ARM_TRIPLET)-g++ $(ARM_FLAGS)" AR=$(ARM_TRIPLET)-ar \
	CUDA=0 BUILD=$(ARM) BIN=$(ARM)
ARM_PROGRAMS = run convert $(UNIT_TESTS:%=tests/%)

test-aarch64: aarch64-packages $(ARM_SYSROOT)
	$(MAKE) $(ARM_BUILD) all $(UNIT_TESTS:%=$(ARM)/tests/%)
	@mkdir -p $(ARM)/qemu/tests
	@for program in $(ARM_PROGRAMS); do \
		printf '#!/bin/sh\nexec qemu-aarch64 -L /usr/$(ARM_TRIPLET) -E LD_LIBRARY_PATH=%s %s "$$@"\n' \
			$(ARM_PATH) $(abspath $(ARM))/$$program >$(ARM)/qemu/$$program && \
		chmod +x $(ARM)/qemu/$$program || exit 1; done
	SPDP_TEST_SHORT=1 BIN=$(ARM)/qemu BUILD=$(ARM) tests/run.sh $(UNIT_TESTS:%=$(ARM)/qemu/tests/%)

aarch64-packages:
	@missing=; for need in $(ARM_TRIPLET)-gcc:gcc-$(ARM_TRIPLET) $(ARM_TRIPLET)-g++:g++-$(ARM_TRIPLET) \
		qemu-aarch64:qemu-user dpkg:dpkg apt-get:apt; do \
		command -v $${need%:*} >/dev/null || missing="$$missing $${need#*:}"; done; \
	[ -z "$$missing" ] || { echo "packages are missing: install$$missing" >&2; exit 1; }

$(ARM_SYSROOT):
	@rm -rf $(ARM)/apt && mkdir -p $(ARM)/apt/lists/partial $(ARM)/apt/archives/partial $(ARM)/apt/debs
	$(ARM_APT) update
	cd $(ARM)/apt/debs && $(ARM_APT) download $(ARM_PACKAGES)
	for package in $(ARM)/apt/debs/*.deb; do dpkg -x $$package $(ARM)/apt/sysroot || exit 1; done
	mv $(ARM)/apt/sysroot $@

# ---- coverage -------------------------------------------------------------------------------------------------

# A line counts when any build of it ran: the CPU kernels are built once for each instruction set. Programs that
# the tests start count too; processes that are killed or leave by _exit do not. Long tests are left out: counting
# makes kernels many times slower, and what they do is done by shorter ones as well.
COVERAGE = build/coverage
COVERAGE_BUILD = CUDA=0 BUILD=$(COVERAGE) BIN=$(COVERAGE) OPT=-O1 SANITIZE=--coverage

coverage:
	@mkdir -p $(COVERAGE) && find $(COVERAGE) -name '*.gcda' -delete
	$(MAKE) $(COVERAGE_BUILD) all $(UNIT_TESTS:%=$(COVERAGE)/tests/%)
	@status=0; SPDP_TEST_SHORT=1 BIN=$(COVERAGE) BUILD=$(COVERAGE) \
		tests/run.sh tests/test_*.sh $(UNIT_TESTS:%=$(COVERAGE)/tests/%) || status=1; \
		find $(COVERAGE) -name '*.gcno' ! -path '*/tests/*' -exec gcov -t {} + | \
		awk -v minimum=$(COVERAGE_MIN) -f tests/coverage.awk && exit $$status
