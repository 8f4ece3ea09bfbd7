#!/usr/bin/env bash
# Everything that is checked without running the project: format, lint, types, and the documentation's links.
# usage: tests/check.sh PYTHON
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
"$1" -m ruff format --check .
"$1" -m ruff check .
"$1" -m tests.tools.docstrings mtrain tools tests examples
NO_MKDOCS_2_WARNING=1 "$1" -m mkdocs build --strict & # while the types are checked, which takes one core as long
documentation=$!
trap 'kill "$documentation" 2>/dev/null || true' EXIT
"$1" -m mypy --strict mtrain tools tests examples
wait "$documentation" || { echo "mkdocs failed: its messages stand above, before those of mypy" >&2; exit 1; }
