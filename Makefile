# kvbook: `make book` builds the book, `make test` checks it. Each target makes what it needs, once, and can be
# interrupted and run again. GNU make, Linux and macOS.

PYTHON ?= python3
VENV ?= .venv

PY = $(VENV)/bin/python
STAMP = $(VENV)/.kvbook-installed
ENV_KEY = $$(cat requirements.txt settings.ini setup.py | cksum)
BOOK_TESTS = tests/test_notebooks.py tests/test_live.py tests/test_book.py tests/test_browser.py
CHROMIUM = chromium chromium-browser google-chrome google-chrome-stable

.PHONY: help book pages test test-all hello serve gpu bench clean env install vendor browser

help:  ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

book: env  ## a first answer from the model, then the notebooks and the pages into _build/html
	@$(PY) book/_ext/build_book.py --is-current || $(VENV)/bin/kvbook hello
	@$(PY) book/_ext/build_book.py

pages: env
	@$(PY) book/_ext/build_book.py

# The notebooks and the book measure and are measured, so they run alone; everything else takes all cores.
test: env vendor browser  ## all tests but the slow ones
	$(PY) -m pytest -n auto --maxprocesses 8 --dist loadgroup $(BOOK_TESTS:%=--ignore=%)
	$(PY) -m pytest $(BOOK_TESTS)

test-all: export KVBOOK_TEST = all
test-all: test  ## all tests, minutes-long ones included

hello: env  ## stream an answer of the default model and say what it kept in memory
	@$(VENV)/bin/kvbook hello

serve: pages  ## serve the built book on this machine and print its address
	@$(VENV)/bin/kvbook book

gpu: env vendor  ## the tests and notebook cells that need a GPU; the kernels' table comes last
	@if $(PY) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then \
	  { $(PY) -m pytest -m gpu || test $$? = 5; } && KVBOOK_RUN=gpu $(PY) book/_ext/execute.py && \
	  $(PY) benchmarks/gpu_kernels.py --recorded gpu_kernels; \
	else \
	  echo "torch finds no GPU here: there is nothing to do."; \
	fi

bench: env  ## measure the kernels on this machine, beside what could be used instead
	@set -e; for file in benchmarks/paged_attention.py benchmarks/gpu_kernels.py; do echo "$$file"; $(PY) "$$file"; done

clean:  ## remove what was built (the environment stays)
	rm -rf _build book/_static/vendor .pytest_cache .ruff_cache .hypothesis .import_linter_cache

# The environment: exactly requirements.txt, then this checkout. Nothing is done while the stamp names the same files.

env:
	@[ "$$(cat $(STAMP) 2>/dev/null)" = "$(ENV_KEY)" ] || $(MAKE) --no-print-directory install

install:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "kvbook needs Python 3.11 or newer; '$(PYTHON)' is not. Name one: make PYTHON=/path/to/python3"; exit 1; }
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@echo "Installing requirements.txt into $(VENV) (about 2 GB on disk) …"
	@$(PY) -m pip install --disable-pip-version-check -r requirements.txt
	@$(PY) -m pip install --disable-pip-version-check --no-deps --no-build-isolation -e .
	@echo "$(ENV_KEY)" > $(STAMP)

vendor: env
	@$(PY) book/_ext/vendor.py

browser:
	@for name in $(CHROMIUM); do command -v $$name >/dev/null 2>&1 && exit 0; done; \
	[ -n "$$KVBOOK_CHROMIUM" ] && exit 0; \
	[ -d "/Applications/Google Chrome.app" ] && exit 0; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then \
	  echo "Installing Debian's chromium for the browser tests …"; \
	  export DEBIAN_FRONTEND=noninteractive; \
	  { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; } </dev/null >/dev/null 2>&1 && exit 0; \
	fi; \
	echo "No Chromium here, and none could be installed: the browser tests are skipped."
