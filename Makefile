# Each target is one line that works by hand too. `python3` is reused where it already has torch; else .venv is made.

ACTIVE := $(shell python3 -c "import importlib.util as u; print(u.find_spec('torch') is not None)" 2>/dev/null)
PY := $(if $(filter True,$(ACTIVE)),python3,.venv/bin/python)
# without an NVIDIA GPU the CPU build of torch, which is far smaller
TORCH_INDEX := $(if $(shell command -v nvidia-smi),,--retries 1 --extra-index-url https://download.pytorch.org/whl/cpu)
# what each set of extras brings, by import name
NEEDED_cli := radio_triton click tqdm PIL
NEEDED_dev := $(NEEDED_cli) pytest hypothesis transformers matplotlib ruff mypy build setuptools

.PHONY: help demo test lint type aot bench build clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    encode the sample photos and a clip, leave features and pictures in out/"
	@echo "make test    every test that this machine can run"
	@echo "make lint    ruff check, ruff format --check, mypy      (make type: mypy alone)"
	@echo "make aot     compile the kernels offline for every GPU known, and check what came out; needs none"
	@echo "make bench   time the encoder and the ops here, count what they move, write the tables of the READMEs"
	@echo "make build   sdist and wheel in dist/"
	@echo "make clean   remove what these made, and .venv"

demo: env-cli
	$(PY) -c "from radio_triton.cli import main; main(prog_name='radio-triton')" demo --out out
	@$(if $(filter .venv/%,$(PY)),echo "      after: . .venv/bin/activate")

test: env-dev
	$(PY) -m pytest

lint: type
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

type: env-dev
	$(PY) -m mypy

aot: env-dev
	$(PY) -m bench.static --check

bench: env-dev
	$(PY) -m bench.encoder --json
	$(PY) -m bench.kernels --json
	$(PY) -m bench.roofline --json
	$(PY) -m bench.report

build: env-dev
	$(PY) -m build

clean:
	rm -rf .venv build dist out *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

ifeq ($(PY),python3)
# a reused environment keeps the torch it has; only what is missing is added
env-%:
	@cd / && python3 -c "import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, sys.argv[1:])))" $(NEEDED_$*) \
	|| python3 -m pip install -e '$(CURDIR)[$*]'
else
env-%: .venv/.ready-% ;

.venv/.ready-%: pyproject.toml constraints.txt .venv/.ready
	.venv/bin/python -m pip install -c constraints.txt -e '.[$*]'
	@touch $@

# torch first and alone, so that nothing that depends on it chooses another build
.venv/.ready:
	@python3 -c "import sys; v = sys.version_info; sys.exit(v < (3, 10) and f'Python 3.10 or newer is needed, python3 is {v[0]}.{v[1]}')"
	python3 -m venv .venv
	.venv/bin/python -m pip install $(TORCH_INDEX) -c constraints.txt --no-deps torch
	@touch $@

.PRECIOUS: .venv/.ready-%
endif
