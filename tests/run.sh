#!/usr/bin/env bash
# The one test command: set-up on a fresh machine (a browser and Slurm too), then tests/check.sh and the tests, and a part of them once
# more on the other proven megatron-core (tests/other_megatron.txt). Arguments go to pytest, which then runs once.
# What is marked `nightly` has a command of its own: make test-nightly.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/setup.sh
source launch/setup.sh
launch/browser.sh
tests/slurm/install.sh

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
unset PYTHONDONTWRITEBYTECODE  # images set it; hundreds of processes would compile the package and the tests anew
tests/check.sh "$python"
crossing=tests/compatibility/test_other_megatron.py
"$python" -m pytest -n 3 --dist worksteal -m "not slurm and not nightly" --ignore "$crossing" "$@"
(($#)) && exit
other=$("$python" -m tests.tools.wheels)
"$other" -m pytest -n 3 --dist worksteal -m "not nightly" @tests/other_megatron.txt
"$python" -m pytest "$crossing"
# alone: one cluster at a time, and its jobs have time limits
"$python" -m pytest -m slurm tests/slurm
