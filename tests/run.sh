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
day=("$python" -m pytest -n 3 --dist worksteal -m "not slurm and not nightly")
(($#)) && exec "${day[@]}" "$@"
# at the same time as the others, since its jobs wait most of their time
said=$(mktemp)
"$python" -m pytest -m slurm tests/slurm &>"$said" &
slurm=$!
trap 'kill -INT "$slurm" 2>/dev/null || true; wait; rm "$said"' EXIT # however this ends, no cluster stays
failed=0 # all three parts run and say what they found
"${day[@]}" || failed=$?
other=$("$python" -m tests.tools.wheels)
"$other" -m pytest -n 2 --dist worksteal -m "not nightly" @tests/other_megatron.txt || failed=$?
wait "$slurm" || failed=$?
cat "$said"
exit "$failed"
