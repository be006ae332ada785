PYTHON ?= python3
VENV := .venv

# The model lies on the disk, and the engine has nobody to report to.
export HF_HUB_OFFLINE ?= 1
export VLLM_NO_USAGE_STATS ?= 1
# Engines start faster from compiled modules.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help env model llama sources demo test test-fast test-models test-engines soak check docs wheels bench bench-full clean

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 16

env:  ## virtual environment with the pinned engine, in .venv
	@$(PYTHON) tools/setup_env.py --venv $(VENV)

model: env  ## SmolLM2-135M-Instruct as a folder, in .models
	@$(VENV)/bin/python tools/make_model.py

llama: model  ## llama.cpp's server from its sources, and the model for it, in .llama.cpp
	@$(VENV)/bin/python tools/make_llama_cpp.py

sources: env  ## Python files of the oldest and the newest CUDA engine, and an older Triton, in .engines
	@$(VENV)/bin/python tools/engine_sources.py

demo: env model  ## serve the model stock and with relay, compare answers and speed
	$(VENV)/bin/python benchmarks/demo.py

test: env model sources  ## all tests
	$(VENV)/bin/python tools/run_tests.py

test-fast: env model  ## unit tests but those that run a compiler
	$(VENV)/bin/python tools/run_tests.py fast

test-models: env  ## parity of a small model of every architecture, and docs/models.md
	$(VENV)/bin/python -m tests.engine.models

test-engines: env model sources  ## what must hold on every engine release, one after another (ENGINE=0.29.0: on this one)
	$(VENV)/bin/python tools/test_engines.py $(ENGINE)

soak: env  ## long tests by parts; a run that was ended goes on (PART=copies, CHUNKS=0:50)
	$(VENV)/bin/python -m tests.soak $(if $(PART),--part $(PART)) $(if $(CHUNKS),--chunks $(CHUNKS))

check: env  ## lint, formatting, types, import rules
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check vllm_relay tests benchmarks tools setup.py
	$(VENV)/bin/mypy
	$(VENV)/bin/python tools/check_imports.py

docs: env  ## documentation site, in build/docs; a broken link fails
	$(VENV)/bin/python -m pip install -q --no-deps -r requirements/docs.txt
	$(VENV)/bin/python -m sphinx -q -E -b html -W --keep-going docs build/docs

wheels:  ## manylinux wheel with the CPU kernels and source distribution, in dist
	@$(PYTHON) -m venv .venv-wheels
	.venv-wheels/bin/python -m pip install -q --no-deps -r requirements/wheels.txt
	.venv-wheels/bin/python tools/make_wheels.py

bench: env model  ## what relay brings, and where it does not: all benchmarks on a small grid, and REPORT.md
	$(VENV)/bin/python benchmarks/run_all.py

bench-full: env model  ## the same on the whole grid: hours
	-@$(MAKE) llama
	$(VENV)/bin/python benchmarks/run_all.py --full

clean:  ## remove caches and build output; environments and model stay
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find vllm_relay tests benchmarks tools -type d -name __pycache__ -prune -exec rm -rf {} +
