# Fuzz targets (clang, libFuzzer). Included by the Makefile.
#
#   make fuzz                    build them all and replay their corpora
#   make fuzz-run                let each search for FUZZ_SECONDS
#
# What a search finds goes to $(BUILD)/fuzz: new inputs below found/, those that fail beside the targets. They join
# tests/fuzz/corpus by hand; make_corpus.sh writes what is there.

FUZZ_SECONDS ?= 60
FUZZ_CC ?= clang
FUZZ_CXX ?= clang++
FUZZ = $(BUILD)/fuzz
FUZZ_MK = tests/fuzz/fuzz.mk  # other flags, other objects

# The product's sources are built once more, with the fuzzer's instrumentation and without OpenMP, whose library
# clang would need as a further package.
FUZZ_SOURCES = $(SOURCES) tokenizer/tokenizer.cc
FUZZ_KERNELS = $(ISAS:%=$(FUZZ)/kernels/cpu_kernels.%.o)
FUZZ_OBJECTS = $(FUZZ_SOURCES:%=$(FUZZ)/%.o) $(FUZZ_KERNELS)
FUZZ_LIBRARY = $(FUZZ)/libspdp.a
FUZZ_TARGETS = $(patsubst tests/fuzz/%.c,%,$(wildcard tests/fuzz/fuzz_*.c))

# Without OpenMP nothing is left of its pragmas, and what only they use is unused.
FUZZ_COVERAGE = -fsanitize=fuzzer-no-link
FUZZ_FLAGS = -O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined \
	-Wall -Wextra -Werror -Wno-unknown-pragmas -Wno-unused-parameter -Wno-unused-variable -Wno-unused-function
FUZZ_LIMITS = -timeout=10 -rss_limit_mb=2048
fuzz_checkpoint_LIMITS = -max_len=131072
fuzz_safetensors_LIMITS = -max_len=4096
fuzz_json_LIMITS = -max_len=4096
fuzz_tokenizer_LIMITS = -max_len=1024
fuzz_llama2c_LIMITS = -max_len=2048
fuzz_decode_LIMITS = -max_len=128
fuzz_chat_LIMITS = -max_len=512

.PHONY: fuzz fuzz-run
fuzz: $(FUZZ_TARGETS:%=$(FUZZ)/%)
	@set -e; for target in $(FUZZ_TARGETS); do \
		$(FUZZ)/$$target $(FUZZ_LIMITS) -artifact_prefix=$(FUZZ)/ tests/fuzz/corpus/$${target#fuzz_}/* \
			>$(FUZZ)/$$target.log 2>&1 || { cat $(FUZZ)/$$target.log; exit 1; }; \
		echo "$$target: `grep -c '^Executed' $(FUZZ)/$$target.log` inputs replayed"; \
	done

fuzz-run: $(FUZZ_TARGETS:%=fuzz-run-%)

# Long stacks of allocations cost half of the time where sentencepiece allocates; a replay has them.
fuzz-run-%: $(FUZZ)/%
	@mkdir -p $(FUZZ)/found/$*
	ASAN_OPTIONS=malloc_context_size=2 $< $(FUZZ_LIMITS) $($*_LIMITS) -max_total_time=$(FUZZ_SECONDS) -artifact_prefix=$(FUZZ)/ -print_final_stats=1 \
		$(FUZZ)/found/$* tests/fuzz/corpus/$(*:fuzz_%=%)

# One line that names the packages, as for those of the product.
.PHONY: fuzz-packages
fuzz-packages:
	@echo 'int LLVMFuzzerTestOneInput(void); int LLVMFuzzerTestOneInput(void) { return 0; }' | \
		$(FUZZ_CC) -fsanitize=fuzzer,address,undefined -x c -o /dev/null - 2>/dev/null || \
		{ echo "$(FUZZ_CC) with libFuzzer is missing: install clang and libclang-rt-14-dev, or run 'make deps' for all packages" >&2; exit 1; }

FUZZ_CFLAGS = -std=c11 -D_GNU_SOURCE -DVERSION='"fuzz"' -Itests/fuzz/serial $(FUZZ_FLAGS) -Wmissing-prototypes
$(FUZZ)/%.c.o: %.c $(FUZZ_MK) | packages fuzz-packages
	@mkdir -p $(@D)
	$(FUZZ_CC) $(FUZZ_CFLAGS) $(FUZZ_COVERAGE) -MMD -MP -c -o $@ $<

# Inner loops would spend their time in counting comparisons that lead a search nowhere.
$(FUZZ_KERNELS): $(FUZZ)/kernels/cpu_kernels.%.o: kernels/cpu_kernels.c $(FUZZ_MK) | packages fuzz-packages
	@mkdir -p $(@D)
	$(FUZZ_CC) $(FUZZ_CFLAGS) -O2 $(FLAGS_$*) -DCPU_KERNELS=cpu_kernels_$* -DCPU_KERNELS_NAME='"$*"' -MMD -MP -c -o $@ $<

$(FUZZ)/%.cc.o: %.cc $(FUZZ_MK) | packages fuzz-packages
	@mkdir -p $(@D)
	$(FUZZ_CXX) -std=c++17 $(FUZZ_FLAGS) $(FUZZ_COVERAGE) -MMD -MP -c -o $@ $<

# A library, so that a target has what it needs and no more: the search looks at every counter after every input.
$(FUZZ_LIBRARY): $(FUZZ_OBJECTS)
	@rm -f $@
	$(AR) rcs $@ $^

$(FUZZ)/fuzz_%: $(FUZZ)/tests/fuzz/fuzz_%.c.o $(FUZZ_LIBRARY)
	$(FUZZ_CXX) -fsanitize=fuzzer,address,undefined -o $@ $^ -lsentencepiece -lcjson -ledit -lxxhash -lm

.SECONDARY: $(FUZZ_OBJECTS) $(FUZZ_TARGETS:%=$(FUZZ)/tests/fuzz/%.c.o)
-include $(FUZZ_OBJECTS:.o=.d) $(FUZZ_TARGETS:%=$(FUZZ)/tests/fuzz/%.c.d)
