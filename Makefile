# The commands of a newcomer (demo, test) and of a developer (lint, results). All work in .venv.
MAKEFLAGS += --no-print-directory
BIN := $(CURDIR)/.venv/bin
# DeepSpeed looks for ninja on PATH when it compiles its ops.
export PATH := $(BIN):$(PATH)
# Otherwise each of a hundred processes compiles our sources again, and pytest rewrites every test again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo serve test lint compat wheel results schema clean
.DEFAULT_GOAL := help

help: ## list the commands
	@grep -E '^[a-z]+:.*##' Makefile | sed -E 's/^([a-z]+):[^#]*## /  make \1\t/' | expand -t 18

# A newcomer's first command needs less than a developer's: two stamps, the second on top of the first.
setup: .venv/.ready-dev ## make .venv with everything in it (Python 3.11 or 3.12 and a C++ compiler needed)

.venv/.ready: pyproject.toml constraints-cpu.txt scripts/setup_venv.sh
	@sh scripts/setup_venv.sh

.venv/.ready-dev: .venv/.ready
	@sh scripts/setup_venv.sh dev

demo: .venv/.ready ## measure, plan, train and compare on this machine; leaves runs/demo/
	@python -m studies.demo

.venv/.ready-serve: .venv/.ready
	@sh scripts/setup_venv.sh serve

serve: .venv/.ready-serve ## the what-if page at http://127.0.0.1:8377, with the demo's run if there is one
	@mkdir -p runs
	@tune serve --db runs/service.db --show demo

test: setup ## all tests
	@python -m pytest -n 4 --dist loadfile --no-loadscope-reorder --durations=25 --junit-xml=build/tests.xml

lint: setup ## ruff, mypy and plain words
	ruff check .
	ruff format --check .
	mypy
	@python scripts/plain_words.py

compat: setup ## bits, checkpoints and front door on the oldest DeepSpeed and on 0.19.6
	@sh scripts/compat.sh 0.18.6 0.19.6

wheel: setup ## build the wheel into dist/
	@sh scripts/build_wheel.sh dist $(BIN)/python && ls dist/*.whl

results: setup ## rewrite the README's table from studies/results/
	@python -m studies.readme_table

schema: setup ## rewrite docs/plan.schema.json, plan-file.md and cli.md from the code
	@python -c "import json; from ebbtide.simulator.plan import json_schema as s; print(json.dumps(s(), indent=1))" > docs/plan.schema.json
	@python scripts/reference.py

clean: ## remove .venv, caches and runs/
	rm -rf .venv runs build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
