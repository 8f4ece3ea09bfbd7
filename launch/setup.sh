# shellcheck shell=bash
# To be sourced from the repository root: sets $python to an interpreter that has the package and its tools installed.
#
# The virtual environment is .venv, or $MTRAIN_VENV. It is made where it is missing and installed into where
# pyproject.toml has changed since the last time; otherwise this takes a moment.
#
# Torch is chosen once. Where the interpreter, or the environment, has one already, as in NVIDIA's containers, that one
# stays: it is built for its CUDA, and other packages there for it. Where there is none and no GPU either, the newest one
# that pyproject.toml allows would bring 3 to 6 GB of CUDA libraries that nothing can use; the wheel for CPUs has 0.2 GB.
# So $cpu_torch is taken there, the version that the tests run with day by day, from the index of CPU wheels or
# from where pip's own settings find it. With a GPU pip takes the newest that is allowed.
cpu_torch=2.13.0

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

torch_index() { # of the wheels for CPUs, unless it is out of reach
  local index=https://download.pytorch.org/whl/cpu
  if "$1" -c "import urllib.request as u; u.urlopen('$index/torch/', timeout=5)" 2>/dev/null; then
    echo "--extra-index-url=$index"
  fi
}

version_of_torch() { # of an interpreter; empty where it has none
  "$1" -c 'import importlib.metadata as m; print(*[found.version for found in m.distributions(name="torch")][:1])'
}

setup_environment() {
  local venv=${MTRAIN_VENV:-$PWD/.venv} base stamp now index torch kept
  if [[ ! -x $venv/bin/python ]]; then
    base=$(find_python)
    echo "making the virtual environment $venv"
    kept=$(version_of_torch "$base")
    "$base" -m venv ${kept:+--system-site-packages} "$venv"
  fi
  python=$venv/bin/python
  stamp=$venv/.installed
  now="$PWD $("$python" -c 'import hashlib; print(hashlib.sha256(open("pyproject.toml", "rb").read()).hexdigest())')"
  if [[ ! -f $stamp || $(<"$stamp") != "$now" ]]; then
    echo "installing into $venv (minutes the first time)"
    torch=$(version_of_torch "$python")
    if [[ -f $stamp ]]; then # it was chosen here; pip goes on with it as long as pyproject.toml allows it
      torch=
    elif [[ -z $torch ]] && ! command -v nvidia-smi >/dev/null; then
      torch=$cpu_torch
      index=$(torch_index "$python")
    fi
    echo "${torch:+torch==$torch}" >"$venv/.constraints.txt"
    "$python" -m pip install --quiet --disable-pip-version-check ${index:+"$index"} \
      --constraint "$venv/.constraints.txt" --editable '.[test,docs]'
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
