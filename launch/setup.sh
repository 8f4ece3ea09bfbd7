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
# from where pip's own settings find it, and a Python that has such a wheel. With a GPU, or where there is no such wheel, pip takes the
# newest that is allowed.
cpu_torch=2.13.0

python_facts() { # of an interpreter that can make an environment: its rank among others, version, torch or -, path
  "$1" -c '
import ensurepip, importlib.metadata, sys, venv
major, minor = sys.version_info[:2]
(major, minor) >= (3, 11) or sys.exit(1)
rank = minor if minor <= 13 else 0  # the newest one that megatron-core has wheels for
torch = [found.version for found in importlib.metadata.distributions(name="torch")][:1] or ["-"]
print(rank, sys.version.split()[0], *torch, sys.executable)' 2>/dev/null
}

has_cpu_torch() { # whether pip offers an interpreter torch's wheel for CPUs; downloads nothing
  [[ $("$1" -m pip --disable-pip-version-check index versions torch ${index:+"$index"} 2>/dev/null) == *" $cpu_torch+cpu"* ]]
}

# Sets $base to the interpreter of a new environment, and says which one it is and why:
# 1. $MTRAIN_PYTHON, where it is set; `newest` means 4;
# 2. python3, where it has a torch, as in a container: that torch is to stay;
# 3. without a GPU, the newest one for which pip offers torch's wheel for CPUs;
# 4. the newest one.
# Candidates are on PATH or in pyenv's folder. One that megatron-core has no wheels for yet comes last.
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
    if [[ -f $stamp ]]; then # it was chosen here; pip goes on with it as long as pyproject.toml allows it
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
