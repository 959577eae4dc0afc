# make train      install what is missing and train ds_configs/omni.json
# make test       install what is missing and run the tests
# make help       all targets and variables
#
# Installed once into .venv; again when requirements.txt changes. `make train VENV=` uses the current environment
# instead and keeps its torch when that is in range.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
# Another index of torch wheels (for an older GPU driver, or the CPU-only ones).
TORCH_INDEX ?=
CONFIG ?= ds_configs/omni.json
# Where the ranks of `make train` meet; by default a free port.
PORT ?= $(shell $(PYTHON) -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
# More arguments for run.py, pytest or the benchmark.
ARGS ?=
GPUS := $(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU')
NPROC ?= $(if $(filter-out 0,$(GPUS)),$(GPUS),2)

# The wheels of torch on the default index are built for CUDA 13.
MIN_DRIVER := 580
TORCH_IN_RANGE := from importlib.metadata import version; \
	assert (2, 11) <= tuple(map(int, version("torch").split(".")[:2])) < (2, 14)

ifeq ($(strip $(VENV)),)
PREFIX := $(shell $(PYTHON) -c 'import sys; print(sys.prefix)')
PY := $(PYTHON)
STAMP := .cache/installed$(subst /,-,$(PREFIX))
export PATH := $(PREFIX)/bin:$(PATH)
else
PY := $(CURDIR)/$(VENV)/bin/python
STAMP := $(VENV)/.installed
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
endif

.PHONY: help train test test-unit test-full lint format bench docs install

help:
	@cat <<'END'
	make train      train CONFIG (ds_configs/omni.json) on all GPUs, or on NPROC=2 CPU processes
	make test       all tests but the rare combinations
	make test-unit  those without processes, in seconds
	make test-full  all tests
	make lint       ruff; make format applies it
	make bench      the benchmarks
	make docs       write docs/config.md and ds_configs/schema.json anew
	make install    only install

	CONFIG=file NPROC=n PORT=n ARGS='--set omni.train.max_steps=10'
	VENV=           use the current environment
	PYTHON=python3  the Python (3.11 or newer) that makes .venv
	TORCH_INDEX=url another index of torch wheels
	END

train: $(STAMP)
	@args=($(ARGS))
	if [ "$(CONFIG)" = ds_configs/omni.json ] && [ $$(( $(NPROC) % 2 )) = 1 ]; then
		echo "$(NPROC) processes cannot form two pipeline stages: one stage"
		args=(--set pipeline.stages=1 "$${args[@]}")
	fi
	if [ "$(GPUS)" = 0 ]; then
		threads=$$(( $$(nproc) / $(NPROC) ))
		export OMP_NUM_THREADS="$${OMP_NUM_THREADS:-$$(( threads > 0 ? threads : 1 ))}"
	fi
	deepspeed --master_port $(PORT) --num_accelerators $(NPROC) run.py --deepspeed_config $(CONFIG) "$${args[@]}"

test: $(STAMP)
	OMP_NUM_THREADS="$${OMP_NUM_THREADS:-1}" $(PY) -m pytest -m "not full and not gpu" $(ARGS)

test-unit: $(STAMP)
	OMP_NUM_THREADS="$${OMP_NUM_THREADS:-1}" $(PY) -m pytest tests/unit -m "not slow and not full and not gpu" $(ARGS)

test-full: $(STAMP)
	OMP_NUM_THREADS="$${OMP_NUM_THREADS:-1}" $(PY) -m pytest $(ARGS)

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

format: $(STAMP)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench: $(STAMP)
	@for file in benchmarks/*.py; do
		[ -e "$$file" ] || { echo "there is no benchmark"; exit 1; }
		$(PY) "$$file" $(ARGS)
	done

docs: $(STAMP)
	$(PY) -m omni_ds.config

install: $(STAMP)
	@echo "requirements.txt is installed"

$(STAMP): requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
		echo "Python 3.11 or newer is needed, $(PYTHON) is $$($(PYTHON) --version); give PYTHON=python3.12"
		exit 1
	}
	if [ -n "$(VENV)" ] && [ ! -x "$(PY)" ]; then
		$(PYTHON) -m venv "$(VENV)"
	fi
	if $(PY) -c '$(TORCH_IN_RANGE)' 2>/dev/null
	then
		echo "keeping the torch that is installed"
	else
		if [ "$(GPUS)" != 0 ] && [ -z "$(TORCH_INDEX)" ]; then
			driver="$$(nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -n 1)"
			if [ "$${driver%%.*}" -lt $(MIN_DRIVER) ]; then
				echo "The GPU driver is $$driver; the default torch wheels (CUDA 13) need $(MIN_DRIVER) or newer."
				echo "Update the driver, or give TORCH_INDEX=<index of torch wheels for an older CUDA>."
				exit 1
			fi
		fi
		echo "installing torch: this takes minutes"
		$(PY) -m pip install --disable-pip-version-check -q $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) \
			"$$(grep '^torch==' requirements.txt)"
	fi
	echo "installing the other requirements: this takes minutes the first time"
	grep -v '^torch==' requirements.txt | $(PY) -m pip install --disable-pip-version-check -q -r /dev/stdin
	mkdir -p "$(dir $(STAMP))"
	touch "$(STAMP)"
