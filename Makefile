# make demo       set up what is missing, convert the built-in model with every method, print the table
# make test       set up what is missing, run ruff, mypy and the quick tests (what CI runs)
# make test-all   the same, the slow tests, the fuzzer and the mutations
# make docs       build the documentation as a static site in build/site
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PACKAGES := $(VENV)/.packages
RUNS   := $(VENV)/.runs
STAMP  := $(VENV)/.ready

# llama.cpp is compiled on this machine, once, for this processor but without AMX: with some compilers
# the AMX code crashes. The wheel is kept in the user's cache, one for each set of flags. llama.cmake makes it quick.
CPU    := $(shell cat /proc/cpuinfo 2>/dev/null)
has     = $(if $(findstring $(1),$(CPU)),ON,OFF)
LLAMA_VERSION := $(shell sed -n 's/^llama-cpp-python==//p' constraints.txt)
LLAMA_FLAGS := -DGGML_NATIVE=OFF -DMTMD_BUILD=OFF -DLLAVA_BUILD=OFF -DGGML_AVX512=$(call has,avx512f) \
  -DGGML_AVX512_VBMI=$(call has,avx512vbmi) -DGGML_AVX512_VNNI=$(call has,avx512_vnni) \
  -DGGML_AVX512_BF16=$(call has,avx512_bf16)
CACHE  ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/quantkit
LLAMA_WHEELS := $(CACHE)/wheels/llama-cpp-$(LLAMA_VERSION)-$(shell $(PYTHON) -c "import sys; print('py%d%d' % sys.version_info[:2])")-$(shell (echo "$(LLAMA_FLAGS)"; cat llama.cmake) | cksum | cut -d' ' -f1)

.PHONY: setup demo test test-all types tests slow-tests bench-peers bench-kill bench-fuzz bench-mutants bench-memory bench-decode bench-gguf bench-judge bench-ranks bench-speed bench-vllm interop gpu-kit dist docs docs-generate format clean
setup:
	@$(MAKE) --no-print-directory -j2 $(STAMP)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(LLAMA_WHEELS): | $(BIN)/python
	@echo "Compiling llama.cpp once (about a minute and a half on two cores) ..."
	@rm -rf $@.partial
	@CMAKE_ARGS="$(LLAMA_FLAGS) '-DCMAKE_PROJECT_llama.cpp_INCLUDE=$(CURDIR)/llama.cmake'" \
	  $(BIN)/pip wheel -qq --no-cache-dir --no-deps -w $@.partial llama-cpp-python==$(LLAMA_VERSION)
	@mv $@.partial $@
	@echo "Compiled llama.cpp."

# torch goes first: without its pin other packages would bring several GB of CUDA libraries. Modules are compiled when
# they are used, since most never are; so Python must be let write what it compiles.
unexport PYTHONDONTWRITEBYTECODE
$(PACKAGES): pyproject.toml constraints.txt quantkit/formats/gguf/ggml/search.c | $(BIN)/python
	@echo "Installing packages ..."
	@$(BIN)/pip install -qq --no-compile -c constraints.txt torch
	@$(BIN)/pip install -qq --no-compile -c constraints.txt -e '.[bitsandbytes,ctranslate2]'
	@touch $@
	@echo "Installed packages."

$(RUNS): $(PACKAGES) | $(LLAMA_WHEELS)
	@$(BIN)/pip install -qq -c constraints.txt --find-links $(LLAMA_WHEELS) llama-cpp-python==$(LLAMA_VERSION)
	@touch $@

# The other extras without quantkit itself, whose C code would be compiled once more.
EXTRAS := import tomllib; of = tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']; \
  print(*(line for name in of if name not in ('all', 'ray') for line in of[name]), sep='\n')
$(STAMP): $(RUNS)
	@$(BIN)/python -c "$(EXTRAS)" > $(VENV)/extras.txt
	@$(BIN)/pip install -qq --no-compile -c constraints.txt -r $(VENV)/extras.txt
	@$(BIN)/pip check
	@touch $@

demo:
	@$(MAKE) --no-print-directory -j2 $(RUNS)
	$(BIN)/quantkit run recipes/demo.yaml

# mypy runs alongside the tests, which wait for processes now and then.
test: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(MAKE) --no-print-directory -j2 types tests

types: $(STAMP)
	$(BIN)/mypy

tests: $(STAMP)
	$(BIN)/pytest -n 2 --dist worksteal -m "not slow"

test-all: test
	@$(MAKE) --no-print-directory slow-tests bench-fuzz
	@$(MAKE) --no-print-directory bench-mutants ARGS="--record --per-room 3"

slow-tests: $(STAMP)
	$(BIN)/pytest -n 2 --dist worksteal -m slow

# 40 SIGKILLs at random moments of conversions, an evaluation and a comparison of the demo model, each one resumed:
# are the bytes and the figures the same?
bench-kill: $(STAMP)
	$(BIN)/python -m bench.kill_test $(ARGS)

# Small errors made in the code on purpose: how many does a test notice, room by room? See bench/README.md.
bench-mutants: $(STAMP)
	$(BIN)/python -m bench.mutants $(ARGS)

# 3,000 damaged inputs of every kind, and what became of each; ARGS="--seed 2 --kinds recipe". See docs/contributing/testing.md.
bench-fuzz: $(STAMP)
	$(BIN)/python -m bench.fuzz $(ARGS)

# Against other tools, hours: see bench/README.md. ARGS="--models f --rows ..." chooses.
bench-peers: $(STAMP)
	$(BIN)/python -m bench.run_peers $(ARGS)

# Peak memory on a checkpoint with Llama-2-7B's shapes, 4 and 8 blocks, and what 8 and all 32 blocks take under a hard
# limit of 6 GB, with 20 GB of disk: some hours. LIMITED="--blocks 8" goes to the second.
bench-memory: $(STAMP)
	$(BIN)/python -m bench.memory $(ARGS)
	$(BIN)/python -m bench.limited $(LIMITED)

# ms/token of the int4 decoder beside bfloat16 transformers, one thread.
bench-decode: $(STAMP)
	$(BIN)/python -m bench.decode $(ARGS)

# K-quants against llama.cpp's own: bytes, time, memory, quality at the same size. Hours; ARGS="--models k --presets Q3_K_M".
bench-gguf: $(STAMP)
	$(BIN)/python -m bench.gguf_rows $(ARGS)

# Figures of quality beside those of each native tool, divergences, throughput.
bench-judge: $(STAMP)
	$(BIN)/python -m bench.judging $(ARGS)

# Two processes that share one model beside one process: time, quality, bytes, digits, a kill. Both cores must be idle.
bench-ranks: $(STAMP)
	$(BIN)/python -m bench.ranks $(ARGS)

# Tokens/s, time to first token and memory of every engine, in process and behind llama.cpp's server.
bench-speed: $(STAMP)
	$(BIN)/python -m bench.speed $(ARGS)

# The same of vLLM's server, in an environment of its own.
bench-vllm: $(STAMP)
	$(BIN)/python -m bench.speed --vllm $(ARGS)

# Whether transformers + gptqmodel and vLLM compute what quantkit's own reader computes.
interop: $(STAMP)
	$(BIN)/python -m bench.interop $(ARGS)

# What a machine with torch, transformers and a GPU may lack for `python -m bench.gpu`: wheels in the versions of this
# environment for its Python, and a small model. See bench/README.md.
GPU_PYTHON := 3.12
GPU_WHEELS := pydantic pydantic_core annotated-types typing-inspection platformdirs greenlet gguf libggml-python typer rich
GPU_MODEL  ?= demo
gpu-kit: $(STAMP)
	rm -rf $@
	$(BIN)/pip freeze | grep -iE "^($$(echo $(GPU_WHEELS) | tr ' ' '|'))==" > $(VENV)/gpu.txt
	$(BIN)/pip download -qq --no-deps --only-binary=:all: --python-version $(GPU_PYTHON) --implementation cp -d $@ \
	  $(foreach n,manylinux_2_28 manylinux_2_27 manylinux_2_24 manylinux2014,--platform $(n)_x86_64) -r $(VENV)/gpu.txt
	test $(GPU_MODEL) = demo || cp -r $(GPU_MODEL) $@/model
	@du -sh $@

# sdist and wheel; the wheel, in an environment that has nothing else, converts and checks what it made.
DIST := dist
dist: $(STAMP)
	rm -rf $(DIST)
	$(BIN)/python -m build -q --outdir $(DIST)
	$(PYTHON) -m venv $(DIST)/venv
	$(DIST)/venv/bin/pip install -qq --no-compile -c constraints.txt torch
	$(DIST)/venv/bin/pip install -qq --no-compile -c constraints.txt $(DIST)/*.whl
	cd $(DIST) && venv/bin/python -c "from quantkit.formats.gguf.ggml.packing import available; assert available()"
	cd $(DIST) && venv/bin/quantkit convert demo --method gguf --bits Q4_K_M --out converted
	cd $(DIST) && venv/bin/quantkit verify converted && venv/bin/quantkit eval-ppl converted --engine reference --limit 4
	@ls -l $(DIST)/*.whl $(DIST)/*.tar.gz

# The documentation as a static site: open build/site/index.html. A link that does not resolve is an error.
docs: docs-generate
	$(BIN)/sphinx-build -q -W --keep-going -j auto -b html -c docs -d build/doctrees . build/site

# What is made from the code: the Python API, the commands, the tables of engines and of the methods' options.
docs-generate: $(STAMP)
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/make_options.py

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache demo-output
