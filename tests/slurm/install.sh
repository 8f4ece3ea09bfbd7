#!/usr/bin/env bash
# Sees to a Slurm for tests/slurm: what is there, or Debian's packages, which root installs here without starting them.
# Where there can be none it says so, and the tests say that they did not run; with MTRAIN_REQUIRE_ALL_TESTS=1, as in CI,
# it ends with 7.
set -euo pipefail

is_there() { command -v slurmctld >/dev/null && command -v slurmd >/dev/null && command -v sbatch >/dev/null; }
is_there && exit
if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
  echo "installing Slurm (half a minute, once)"
  export DEBIAN_FRONTEND=noninteractive
  policy=/usr/sbin/policy-rc.d # else the packages would start daemons
  [[ -e $policy ]] || { printf '#!/bin/sh\nexit 101\n' >$policy && chmod +x $policy; made_policy=1; }
  log=$(mktemp)
  if apt-get update -qq >"$log" 2>&1 &&
    apt-get install -y -qq --no-install-recommends slurmctld slurmd slurm-client >>"$log" 2>&1 && is_there; then
    [[ -z ${made_policy:-} ]] || rm $policy
    rm "$log"
    exit
  fi
  [[ -z ${made_policy:-} ]] || rm $policy
  tail -n 5 "$log" >&2
fi
none="no Slurm is on PATH and none could be installed here; install Debian's slurmctld, slurmd and slurm-client"
if [[ ${MTRAIN_REQUIRE_ALL_TESTS:-} == 1 ]]; then
  echo "error: $none" >&2
  exit 7
fi
echo "note: $none; the tests on a real Slurm do not run" >&2
