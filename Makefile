# What a contributor does every day. Each target sets up .venv first where it is missing (launch/setup.sh).
SHELL := /bin/bash
setup := set -euo pipefail; source launch/setup.sh; export OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1}; unset PYTHONDONTWRITEBYTECODE;
.DEFAULT_GOAL := help
.PHONY: help check fix test test-fast test-nightly test-newest update-messages docs clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

check: ## format, lint, types, documentation: a minute
	@$(setup) tests/check.sh "$$python"

fix: ## formats, and repairs what the linter can repair
	@$(setup) "$$python" -m ruff check --fix .; "$$python" -m ruff format .

test: ## all that CI runs: check and every test
	@bash tests/run.sh

test-fast: ## the tests of tests/fast.txt: what breaks first, in under 90 s on two idle cores
	@$(setup) "$$python" -m pytest -n 2 --dist worksteal @tests/fast.txt

test-nightly: ## rows of many ranks and other programs' evaluation: what cheaper tests show already
	@$(setup) "$$python" -m pytest -n 2 --dist worksteal -m "nightly or hypothesis"

test-newest: ## every test but Slurm's, the nightly ones too, on the newest Python, torch and megatron-core, in .venv-newest (5 GB)
	@MTRAIN_VENV=$$PWD/.venv-newest MTRAIN_PYTHON=newest bash tests/run.sh -m "not slurm"

update-messages: ## after a message was reworded: tests/messages.yaml anew; TESTS=tests/data for those of a folder
	@$(setup) "$$python" -m tests.messages $(TESTS)

docs: ## the site, into site/; fails on a broken link
	@$(setup) NO_MKDOCS_2_WARNING=1 "$$python" -m mkdocs build --strict && echo "open site/index.html"

clean: ## what building and testing left behind; runs, checkpoints and .venv stay
	@rm -rf build site dist .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	@find mtrain tests tools -name __pycache__ -type d -prune -exec rm -rf {} +
