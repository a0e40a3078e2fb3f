PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
PIP_LOG := .venv/pip.log
UNIT := tests/common tests/plan tests/accelerator tests/sharding tests/data tests/adapters tests/execution tests/observe \
	tests/preparation tests/offline tests/test_floors.py tests/test_documents.py

.PHONY: train test slow unit lint format figures performance gpu-check floor

train: $(INSTALLED)
	$(BIN)/python examples/train.py

# several tests at the same time; the workers that are done take over from the others
PARALLEL ?= -n auto --maxprocesses 8 --dist worksteal

test: $(INSTALLED)
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow"

# the same promises for more cases, for longer, or in interpreters of their own
slow: $(INSTALLED)
	$(BIN)/python -m pytest $(PARALLEL) -m slow

# no test here starts a process
unit: $(INSTALLED)
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow and not processes" $(UNIT)

# nothing runs benchmarks every day: at least they call what is there
UNCHECKED := arg-type assignment import-not-found method-assign misc no-untyped-def operator return-value \
	union-attr var-annotated
lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy benchmarks $(addprefix --disable-error-code=,$(UNCHECKED))

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# what docs/ and the records say of the planner; PROFILES is the paper's release of profiles
PROFILES ?= ../shared/data/cephalo-profiles
figures: $(INSTALLED)
	$(BIN)/python benchmarks/planner.py
	$(BIN)/python benchmarks/planner.py --published $(PROFILES)
	$(BIN)/python benchmarks/estimates.py $(PROFILES)

# what docs/performance.md and the records say of speed, memory and predictions; about 30 minutes,
# and only of use on a machine that does nothing else
performance: $(INSTALLED)
	$(BIN)/python benchmarks/visits.py
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/predictions.py
	$(BIN)/python benchmarks/throughput.py

# what only hardware can show; one GPU is enough, two are better
gpu-check: $(INSTALLED)
	$(BIN)/python benchmarks/gpu_check.py

# the oldest versions that pyproject.toml promises, and the newest; needs python3.10 and python3.13
floor: $(INSTALLED)
	$(BIN)/python benchmarks/versions.py

# torch goes first and alone: resolved together with its dependants, pip may prefer a newer CUDA build.
$(INSTALLED): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing into .venv, which takes minutes. What pip says is in $(PIP_LOG)."
	@{ $(BIN)/pip install "$$(grep '^torch==' constraints.txt)" -c constraints.txt && \
		$(BIN)/pip install -e '.[dev,plot]' -c constraints.txt; } > $(PIP_LOG) 2>&1 || \
		{ tail -n 20 $(PIP_LOG); echo "The installation failed. All of it is in $(PIP_LOG)."; exit 1; }
	@touch $@
