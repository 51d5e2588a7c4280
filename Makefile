# `make run` trains a small GPT in eager, minicompile and torch.compile and compares them. `make test` runs the test suite.
# Both create the environment first. A test that takes five minutes has hung: it fails, with the stacks of its threads. Override with e.g. `make run PYTHON=python3.12 TORCH=torch==2.12.0`.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
BIN := $(VENV)/bin

# Hundreds of processes import the compiler here: without files of bytecode, which some images turn off, each compiles its text anew.
unexport PYTHONDONTWRITEBYTECODE

run: $(VENV)/installed
	$(BIN)/python -m minicompile bench nanogpt

PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 -o faulthandler_timeout=300 -o faulthandler_exit_on_timeout=true

test: $(VENV)/installed
	$(PYTEST) -m "not processes" $(PYTEST_ARGS)

# Faults, scripts, commands, packages, bisection, Triton's interpreter: tests that start processes, which import PyTorch each.
test-processes: $(VENV)/installed
	$(PYTEST) -m processes $(PYTEST_ARGS)

# Unused and undefined names, import order, line length: the rules are in pyproject.toml.
lint: $(VENV)/installed
	$(BIN)/ruff check .

# Looks for differences by itself for some time, on other seeds each time: random programs, models, threads, memory.
MINUTES ?= 30
soak: $(VENV)/installed
	$(BIN)/python -m tests.soak --minutes $(MINUTES)

# `make site` builds the book into site/ (open site/index.html); `make serve` also serves it and follows changes.
site: $(VENV)/installed-site
	$(BIN)/python -m tools.site build

serve: $(VENV)/installed-site
	$(BIN)/python -m tools.site serve

# Looks at the finished site in headless Chromium. Exit status 3 of the tool: there is no Chromium.
check-site: site
	$(BIN)/python -m tools.site.browser

# Starters fail, originals pass, wrong variants and cheats earn nothing.
check-exercises: $(VENV)/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m exercises.validate

# Both C extensions under a debug allocator and under AddressSanitizer: a soak of objects that live shortly, and the tests of chapters 2 to 4.
# SANITIZE="20 none": 20 seconds of each, and no tests.
sanitize: $(VENV)/installed
	tools/sanitize $(BIN)/python $(SANITIZE)

# Everything that the other targets need.
install: $(VENV)/installed-site

$(VENV)/installed-site: $(VENV)/installed
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[site]'
	touch $@

$(VENV)/installed: pyproject.toml setup.py minicompile/ch03_capture/frame_hook.c minicompile/ch02_guards/unchanged.c
	$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v <= (3, 13) else "minicompile needs Python 3.11 to 3.13, but $(PYTHON) is %d.%d. Name another: make PYTHON=python3.12" % v)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[bench,test]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info minicompile/*/*.so bench-results site .site

.PHONY: run test test-processes soak sanitize lint site serve check-site check-exercises install clean
