# shellcheck shell=bash
# To be sourced from the repository root: sets $python to an interpreter that has the package and its tools installed.
#
# The virtual environment is .venv, or $MTRAIN_VENV. It is made where it is missing and installed into where
# pyproject.toml has changed since the last time; otherwise this takes a moment.

find_python() { # the first interpreter on PATH that is new enough
  local candidate
  for candidate in python3 python3.14 python3.13 python3.12 python3.11; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  echo "error: no Python 3.11 or newer is on PATH; install one" >&2
  return 7
}

torch_index() { # without a GPU the wheels for CPUs: a tenth of the size. Where that index is out of reach: the usual ones
  local index=https://download.pytorch.org/whl/cpu
  if ! command -v nvidia-smi >/dev/null &&
    "$1" -c "import urllib.request as u; u.urlopen('$index/torch/', timeout=5)" 2>/dev/null; then
    echo "--extra-index-url=$index"
  fi
}

setup_environment() {
  local venv=${MTRAIN_VENV:-$PWD/.venv} base stamp now index
  if [[ ! -x $venv/bin/python ]]; then
    base=$(find_python)
    echo "making the virtual environment $venv"
    "$base" -m venv "$venv"
  fi
  python=$venv/bin/python
  stamp=$venv/.installed
  now="$PWD $("$python" -c 'import hashlib; print(hashlib.sha256(open("pyproject.toml", "rb").read()).hexdigest())')"
  if [[ ! -f $stamp || $(<"$stamp") != "$now" ]]; then
    echo "installing into $venv (minutes the first time)"
    index=$(torch_index "$python")
    "$python" -m pip install --quiet --disable-pip-version-check ${index:+"$index"} --editable '.[test,docs]'
    echo "$now" >"$stamp"
  fi
}

install_commit_hook() { # in a clone with no commit-msg hook of its own: the one that keeps CONTRIBUTING.md's form
  local hook
  hook=$(git rev-parse --git-path hooks/commit-msg 2>/dev/null) || return 0
  [[ -e $hook || -n $(git config core.hooksPath) || ! -w $(dirname "$hook") ]] && return 0
  # an older commit has no such check, and can be worked on without it
  printf '#!/bin/sh\n[ ! -x tests/commit_message.sh ] || exec tests/commit_message.sh "$1"\n' >"$hook"
  chmod +x "$hook"
}

setup_environment
install_commit_hook
