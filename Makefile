# Needs Python 3.10 or newer and make; everything else goes into .venv. Inductor also wants a C++
# compiler: the tests that need it are skipped without one.

PYTHON ?= python3
WORKERS ?= 2
BIN := .venv/bin
READY := .venv/.ready
PIP_INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt

.PHONY: lock demo check test lint slow bench gpu notebooks docs pictures torch-env test-torch newest-env test-newest \
	test-cuda-code test-gpu-emulated clean

# A small language model trains and writes with and without amp_fx; `make demo ARGS="--steps 50"`.
demo: $(READY)
	$(BIN)/python docs/examples/demo.py $(ARGS)

# Lint, types and every fast test; tests/test_package.py builds the wheel and imports it elsewhere.
# A worker per core, with one thread each: more of either only makes them wait for each other.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) $(ARGS)

# Lint, types and some tests of every part, in three minutes: what to run between two edits.
CHECK := tables policies/test_calls.py policies/test_policy.py eager/test_region.py graphs/test_decompose.py \
	graphs/test_checker.py passes/test_insert_casts.py passes/test_fold_casts.py passes/test_hoist_casts.py \
	passes/test_wrap_opaque_nodes.py weights/test_sharing.py \
	weights/test_write_signals.py weights/test_gradients.py test_backend.py \
	test_pipeline.py test_options.py test_layout.py \
	grad_scaler/test_parity.py grad_scaler/test_clip.py \
	exporting/test_parity.py integrations/test_blocks.py explanation/test_table.py \
	explanation/test_kept_values.py numerics/test_programs.py drawing/test_draw.py \
	commands/test_explain.py commands/test_policy.py
check: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) $(CHECK:%=tests/%) $(ARGS)

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# The tests that `make test` has no time for.
slow: $(READY)
	$(BIN)/python -m pytest -m slow $(ARGS)

# Timings next to torch.autocast; wants a quiet machine.
bench: $(READY)
	$(BIN)/python -m benchmarks $(ARGS)

# The tests for a GPU, with the machine's own Python, torch, pytest, pytest-timeout and pytest-xdist;
# nothing is installed. Ends after nine minutes at most, and keeps the results so far. Prints a report and
# writes it to gpu-report.md, from gpu-report.xml. `make gpu ARGS="-k 'writes or scaler'"` runs parts.
GPU_WORKERS ?= 8
gpu:
	@$(PYTHON) -c 'import torch, pytest_timeout, xdist' || { echo "choose another: make gpu PYTHON=..."; exit 1; }
	@rm -f gpu-report.md gpu-report.xml
	@export PYTHONPATH=.:tests/gpu/uninstalled; status=0; \
	timeout --signal=INT --kill-after=10 520 $(PYTHON) -m pytest tests/gpu -n $(GPU_WORKERS) \
		--dist worksteal --timeout=150 --tb=short -q -rfE -p no:cacheprovider -o filterwarnings=default \
		--junitxml=gpu-report.xml $(ARGS) || status=$$?; \
	$(PYTHON) -m tests.gpu.summary gpu-report.xml > gpu-report.md; cat gpu-report.md; exit $$status

# Writes constraints.txt: what pyproject.toml allows, on every Python; versions that are there stay.
# To move one: make lock ARGS="--upgrade-package torch". uv does it, in an environment of its own.
lock:
	@test -x build/uv/bin/uv || { $(PYTHON) -m venv build/uv && build/uv/bin/pip install -qq uv; }
	build/uv/bin/uv pip compile pyproject.toml --all-extras --universal --python-version 3.10 --no-annotate \
		--custom-compile-command "make lock" --quiet --output-file constraints.txt $(ARGS)

# Runs the notebooks and writes what they show into them.
notebooks: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python notebooks/run.py $(ARGS)

# The site of the documentation, in build/site; a broken link or reference is an error. To look at
# it: `python -m http.server -d build/site`.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# The pictures in docs/assets; wants Graphviz.
pictures: $(READY)
	$(BIN)/python docs/pictures.py

# Another torch, in an environment beside the tree: `make torch-env TORCH=2.15.0`, then
# `make test-torch TORCH=2.15.0 ARGS=tests/policies`. TORCH=nightly takes the newest, if PIP_PRE=1 and
# PIP_EXTRA_INDEX_URL is PyTorch's index of nightly builds.
TORCH ?= 2.15.0
OTHER := ../torch-$(TORCH)

torch-env:
	$(PYTHON) -m venv $(OTHER)
	grep -Ev '^(torch|triton|setuptools|nvidia-.*|cuda-.*)==' constraints.txt > $(OTHER)/constraints.txt
	$(OTHER)/bin/pip install -qq --disable-pip-version-check -c $(OTHER)/constraints.txt torch$(if $(filter nightly,$(TORCH)),,==$(TORCH)) -e ".[dev,test]"

test-torch:
	OMP_NUM_THREADS=1 $(OTHER)/bin/python -m pytest -n $(WORKERS) $(ARGS)

# The newest release of each library that amp_fx is tested with, and the pinned torch, in an
# environment beside the tree.
NEWEST := ../newest-libraries
newest-env:
	$(PYTHON) -m venv $(NEWEST)
	grep -E '^(torch|triton|numpy)==' constraints.txt > $(NEWEST)/constraints.txt
	$(NEWEST)/bin/pip install -qq --disable-pip-version-check --upgrade -c $(NEWEST)/constraints.txt -e ".[dev,test]"

test-newest:
	OMP_NUM_THREADS=1 $(NEWEST)/bin/python -m pytest -n $(WORKERS) $(ARGS)

# CUDA's code on a machine without a GPU: generated, and executed on the CPU. Wants a torch that was
# built with CUDA; `make test-cuda-code ARGS="-m slow"` runs what takes long.
test-cuda-code:
	@test -x $(OTHER)/bin/python || $(MAKE) torch-env
	TRITON_INTERPRET=1 CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 \
		$(OTHER)/bin/python -m pytest tests/cuda $(ARGS)

# The tests for a GPU, on the same emulated device, but for those of streams, inductor's CUDA graphs and
# the allocator.
test-gpu-emulated:
	@test -x $(OTHER)/bin/python || $(MAKE) torch-env
	AMP_FX_GPU_TRIAL=emulated TRITON_INTERPRET=1 CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 \
		$(OTHER)/bin/python -m pytest -o filterwarnings=default \
		$(or $(ARGS),$(addprefix tests/gpu/test_,$(addsuffix .py,captures frozen grad_scaler parity_models parity_ops writes)))

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# setuptools comes first, so that the editable install can use the pinned one and needs no
# isolated build environment of its own.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("amp_fx needs Python 3.10 or newer" if sys.version_info < (3, 10) else 0)'
	@echo "Installing into .venv (a few minutes the first time)"
	@$(PYTHON) -m venv .venv
	@$(PIP_INSTALL) setuptools
	@$(PIP_INSTALL) --no-build-isolation -e ".[dev,docs,notebooks,test]"
	@touch $@
