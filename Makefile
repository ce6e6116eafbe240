# Everything sets itself up: the first `make demo` or `make test` needs Python 3.11+, git, make and some minutes.
# PYTHON=... chooses the interpreter, TORCH_INDEX=... where to find a CPU build of torch, ARGS=... what pytest gets,
# PAIR=... the channel of the demo's two nodes (tcp, nixl, ucx, shm or auto), MODEL=smollm2 one with real weights.

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# The GPU targets set nothing up: they need what `pip install '.[gpu,testing]'` installs, no more. They find `pdx` here
# without being installed, and what `pip install --target .site …` has added to a machine that has the rest.
GPU_PYTHON := $(or $(PYTHON),$(if $(wildcard $(BIN)/python),$(BIN)/python,python3))
GPU_PATH := $(CURDIR)/.site:$(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
gpu-test gpu-bench: export PYTHONPATH := $(GPU_PATH)

.PHONY: help setup demo test test-long releases check format docs bench gpu-test gpu-bench clean
.DEFAULT_GOAL := help

help:  ## show this
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY)  ## create .venv with vLLM, PDX and the tools (the other targets do it when needed)

$(READY): pyproject.toml .ci/setup
	@.ci/setup $(VENV)
	@touch $@

demo: $(READY)  ## prefill and decode on this machine, compared token by token with plain vLLM (PAIR=tcp, MODEL=smollm2)
	@$(BIN)/python -P -m pdx.bench.demo $(if $(PAIR),--pair "$(PAIR)") $(if $(MODEL),--model "$(MODEL)")

# ARGS may leave nothing of a part, which pytest calls 5.
pytest = $(BIN)/pytest --durations=40 $(ARGS) --ignore-glob='tests/transports/test_ucx*.py' $(1) || [ $$? = 5 ]

# Tests start hundreds of interpreters. Each would compile all it imports if the environment forbade to keep bytecode.
test test-long: export PYTHONDONTWRITEBYTECODE :=
test: check  ## what a change needs: lint, types, and the tests that say the same on any machine; one pair of engines
	$(call pytest,--part=beside -n 2 --dist loadscope)
	$(call pytest,--part=engines tests/end_to_end)

test-long: $(READY)  ## all other tests: engines in other settings, storms, kills, benches, UCX, more examples; an issue ends with them
	$(call pytest,--part=long)
	$(BIN)/pytest tests/transports/test_ucx*.py  # in a process without NIXL's UCX, see docs/adr/0018

releases: $(READY)  ## the connector on the sources of each supported vLLM, downloaded (ARGS=0.31.0: that one)
	.ci/releases $(BIN)/python $(ARGS)

check: $(READY)  ## lint, format, types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy -p pdx

format: $(READY)  ## rewrite the files as ruff likes them
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: $(READY)  ## the site, into build/site (a broken link or anchor is an error)
	$(BIN)/sphinx-build -E -W --keep-going -n -q -c docs -d build/doctrees . build/site

bench: $(READY)  ## measure
	@$(BIN)/python -m pdx.bench

gpu-test:  ## the tests that need an NVIDIA GPU, and the kernels under compute-sanitizer where it is installed
	$(GPU_PYTHON) -m pytest tests/gpu --ignore=tests/gpu/test_real_ucx.py $(ARGS)
	$(GPU_PYTHON) -m pytest tests/gpu/test_real_ucx.py $(ARGS)  # in a process without NIXL's UCX, see docs/adr/0018
	$(GPU_PYTHON) -m pdx.bench.gpu.sanitizer

gpu-bench:  ## measure what needs an NVIDIA GPU (ARGS="--only kernels,pinned" for a part)
	@$(GPU_PYTHON) -m pdx.bench.gpu $(ARGS)

clean:  ## remove what the targets made, but for .venv
	rm -rf .demo build dist *.egg-info pdx-logs .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
