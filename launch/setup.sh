# shellcheck shell=bash
# Source this from the repository root: it sets $python to an interpreter with the package and its tools installed.
#
# The virtual environment is .venv, or $MTRAIN_VENV. It is created if it is missing, and updated if pyproject.toml has
# changed since the last call; otherwise this takes a moment.
#
# Torch is chosen once. If the interpreter or the environment already has torch, as in NVIDIA's containers, it stays: it
# is built for its CUDA, and other packages are built for it. Without torch and without a GPU, the newest torch that
# pyproject.toml allows would bring 3 to 6 GB of CUDA libraries that nothing can use; the CPU wheel has 0.2 GB. So in
# that case this installs $cpu_torch, the version of the daily tests, from the index of CPU wheels or from wherever
# pip's settings find it, with a Python that has such a wheel. With a GPU, or if no such wheel exists, pip takes the
# newest version that is allowed.
cpu_torch=2.13.0

python_facts() { # prints rank, version, torch or -, and path of an interpreter that can create an environment
  "$1" -c '
import ensurepip, importlib.metadata, sys, venv
major, minor = sys.version_info[:2]
(major, minor) >= (3, 11) or sys.exit(1)
rank = minor if minor <= 13 else 0  # the newest one with megatron-core wheels
torch = [found.version for found in importlib.metadata.distributions(name="torch")][:1] or ["-"]
print(rank, sys.version.split()[0], *torch, sys.executable)' 2>/dev/null
}

has_cpu_torch() { # whether pip offers torch's CPU wheel to an interpreter; downloads nothing
  [[ $("$1" -m pip --disable-pip-version-check index versions torch ${index:+"$index"} 2>/dev/null) == *" $cpu_torch+cpu"* ]]
}

# Sets $base to the interpreter of a new environment, and prints which one it is and why:
# 1. $MTRAIN_PYTHON, if it is set; `newest` means 4;
# 2. python3, if it has torch, as in a container: that torch must stay;
# 3. without a GPU, the newest one for which pip offers torch's CPU wheel;
# 4. the newest one.
# Candidates are on PATH or in pyenv's folder. Interpreters without megatron-core wheels come last.
find_python() {
  local rank version torch candidate facts why found=()
  if [[ ${MTRAIN_PYTHON:-newest} != newest ]]; then
    if ! read -r rank version torch base < <(python_facts "$MTRAIN_PYTHON"); then
      echo "error: MTRAIN_PYTHON=$MTRAIN_PYTHON is no Python 3.11 or newer with the modules venv and ensurepip; name" \
        "another one, or unset it" >&2
      return 7
    fi
    echo "Python $version ($base), named by MTRAIN_PYTHON"
    return
  fi
  if [[ -z ${MTRAIN_PYTHON:-} ]] && read -r rank version torch base < <(python_facts python3) && [[ $torch != - ]]; then
    echo "Python $version ($base), whose torch $torch stays; MTRAIN_PYTHON can name another one"
    return
  fi
  mapfile -t found < <(
    for candidate in python3 python3.{11..14} "${PYENV_ROOT:-$HOME/.pyenv}"/versions/*/bin/python3; do
      python_facts "$candidate" || true
    done | sort --stable --numeric-sort --reverse --key=1,1
  )
  if ((!${#found[@]})); then
    echo "error: no Python 3.11 or newer with the modules venv and ensurepip is on PATH or in pyenv's folder; install" \
      "one" >&2
    return 7
  fi
  why="the newest one here"
  read -r rank version torch base <<<"${found[0]}"
  if [[ -z ${MTRAIN_PYTHON:-} ]] && ! command -v nvidia-smi >/dev/null; then
    index=$(torch_index "$base")
    for facts in "${found[@]}"; do
      read -r rank version torch candidate <<<"$facts"
      if has_cpu_torch "$candidate"; then
        base=$candidate why="the newest one that has a wheel of torch $cpu_torch for CPUs, since there is no GPU"
        break
      fi
    done
  fi
  read -r rank version torch base < <(python_facts "$base")
  echo "Python $version ($base), $why; MTRAIN_PYTHON can name another one"
}

torch_index() { # pip's option for the index of CPU wheels, if it can be reached
  local index=https://download.pytorch.org/whl/cpu
  if "$1" -c "import urllib.request as u; u.urlopen('$index/torch/', timeout=5)" 2>/dev/null; then
    echo "--extra-index-url=$index"
  fi
}

version_of_torch() { # torch's version in an interpreter; empty without torch
  "$1" -c 'import importlib.metadata as m; print(*[found.version for found in m.distributions(name="torch")][:1])'
}

setup_environment() {
  local venv=${MTRAIN_VENV:-$PWD/.venv} base stamp now index torch kept
  if [[ ! -x $venv/bin/python ]]; then
    find_python
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
    if [[ -f $stamp ]]; then # this script chose it; pip keeps it as long as pyproject.toml allows it
      torch=
    elif [[ -z $torch ]] && ! command -v nvidia-smi >/dev/null; then
      index=${index:-$(torch_index "$python")}
      if has_cpu_torch "$python"; then torch=$cpu_torch; fi
    fi
    echo "${torch:+torch==$torch}" >"$venv/.constraints.txt"
    "$python" -m pip install --quiet --disable-pip-version-check ${index:+"$index"} \
      --constraint "$venv/.constraints.txt" --editable '.[test,docs]'
    echo "$now" >"$stamp"
  fi
}

install_commit_hook() { # in a clone without a commit-msg hook: installs the one that checks CONTRIBUTING.md's form
  local hook
  hook=$(git rev-parse --git-path hooks/commit-msg 2>/dev/null) || return 0
  [[ -e $hook || -n $(git config core.hooksPath) || ! -w $(dirname "$hook") ]] && return 0
  # older commits have no such check, and work without it
  printf '#!/bin/sh\n[ ! -x tests/commit_message.sh ] || exec tests/commit_message.sh "$1"\n' >"$hook"
  chmod +x "$hook"
}

setup_environment
install_commit_hook
