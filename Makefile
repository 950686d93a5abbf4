# Every target sets up what it needs: a virtual environment inside the clone, made once, remade when the pins change.
VENV ?= .venv
GPU_VENV ?= .venv-gpu
RUN := $(VENV)/bin
# Three tests at a time, of which one mostly waits; tests/units.py says what one process runs, and in which order.
PYTEST := $(RUN)/python -m pytest --numprocesses 3 --no-loadscope-reorder
export HF_HUB_OFFLINE ?= 1
export PYTHONUNBUFFERED := 1
# Hundreds of processes start: each module is compiled once.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: venv demo demo-pretrained test test-all test-gpu-set check bench docs clean

venv:
	@requirements/install.sh $(VENV)

demo: venv models/tiny/config.json  ## a tiny model learns to copy, asynchronously: make demo ARGS="replay.max_staleness=0"
	$(RUN)/streamrl train configs/quickstart.yaml $(ARGS) --fresh

demo-pretrained: venv models/smollm2/config.json  ## SmolLM2-135M learns one-digit sums
	$(RUN)/streamrl train configs/pretrained.yaml $(ARGS) --fresh

models/tiny/config.json: | venv
	$(RUN)/python -m launch.tiny_model models/tiny

models/smollm2/config.json: | venv
	$(RUN)/python -m launch.smollm2 models/smollm2

# Two processes of tests leave each other the cores while torch's threads wait.
test test-all: export OMP_WAIT_POLICY := PASSIVE

test: venv  ## the tests, with the real SGLang, ZeroMQ and Megatron-Core
	$(PYTEST) -m "not slow"

test-all: venv  ## the slow ones too
	$(PYTEST)

test-gpu-set:  ## what needs the GPU requirements installed, on a machine without a GPU
	@requirements/test-gpu-set.sh $(GPU_VENV)

check: venv  ## lint, format, types, these for Python 3.12 too, on which nothing is run
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy
	$(RUN)/mypy --python-version 3.12

bench: venv models/tiny/config.json  ## every benchmark in its quick form, compared with what is stored: make bench ARGS="--store"
	$(RUN)/python -m benchmarks.suite --quick $(ARGS)

docs: venv  ## the documentation site, in dist/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(RUN)/mkdocs build --strict --quiet

clean:  ## everything that was made here, except run folders
	rm -rf $(VENV) $(GPU_VENV) .venv-envs models
