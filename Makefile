# Each target sets up what it needs by itself: Python >= 3.11 and pip are enough. See scripts/dev.py.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
RUN = $(if $(PYTHON),$(PYTHON),$(error no Python >= 3.11 found: set PYTHON=/path/to/python3.11)) scripts/dev.py

.PHONY: help demo test lint bench setup clean

help:
	@echo "make demo    a small trained DeepSeek with MTP in the vLLM CPU engine, with the plugin and without; then the op's own table"
	@echo "make test    lint, types and all tests that need no GPU"
	@echo "make lint    ruff and mypy alone"
	@echo "make bench   the op against its peers; on a GPU, with the Python in PYTHON (ARGS=... are passed on to flashmap bench)"
	@echo "make setup   all environments, without running anything"
	@echo "make clean   remove the environments and caches"

demo test lint bench:
	@$(RUN) $@ $(ARGS)

setup clean:
	@$(RUN) $@
