# make demo   set up and decide the practice claim: needs Python >= 3.11, pip and make
# make test   set up and run the tests
# make lint   formatting, lint, types, import contracts
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet

.PHONY: demo test lint clean

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit("kbench needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

$(VENV)/run.stamp: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --constraint constraints.txt --editable .
	touch $@

$(VENV)/dev.stamp: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --constraint constraints.txt --editable '.[dev]'
	touch $@ $(VENV)/run.stamp

# A verdict of any kind is a successful demo (0 enable, 1 disable, 3 inconclusive, 4 missing); anything else is not.
demo: $(VENV)/run.stamp
	@$(BIN)/kbench run suites/practice.toml; code=$$?; \
	echo "kbench ended with $$code; the report is in results/practice/report.md"; \
	case $$code in 0|1|3|4) exit 0;; *) exit $$code;; esac

test: $(VENV)/dev.stamp
	$(BIN)/python -m pytest -q -n 2 -m "not gpu and not slow and not browser and not vllm"

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
