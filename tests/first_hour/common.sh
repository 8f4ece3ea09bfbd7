# shellcheck shell=bash
# To be sourced by the scripts of this folder: installs what a checkout needs, makes an empty folder to work in, and times
# every step. A user would type the commands after `step`; nothing here is known to the program.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
root=$PWD
begun=$(date +%s%N)
work=${FIRST_HOUR:-$(mktemp -d)}
mkdir -p "$work"

timed() { # name, command...
  local start name=$1
  shift
  start=$(date +%s%N)
  "$@"
  printf '%8.1f s  %s\n' "$((($(date +%s%N) - start) / 100000000))e-1" "$name" | tee -a "$work/times"
}
step() { # command...
  printf '\n$ %s\n' "$*"
  timed "$*" "$@"
}
install() { # shellcheck source=launch/setup.sh
  source "$root/launch/setup.sh"
}
# shellcheck disable=SC2154 # launch/setup.sh sets python
mtrain() { "$python" -W ignore -m mtrain "$@"; }
python() { "$python" -W ignore "$@"; }
finish() { printf '\n%s\n' "took $((($(date +%s%N) - begun) / 1000000000)) s"; cat "$work/times"; }

: >"$work/times"
timed "installation" install
cd "$work"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
if [[ ! -f models/smollm2/tokenizer_config.json ]]; then
  step python "$root/examples/real_model/fetch.py" models/smollm2
fi
