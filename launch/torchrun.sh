#!/usr/bin/env bash
# Trains with all GPUs of this node, or of several nodes: bash launch/torchrun.sh CONFIG... [section.key=value...]
#
#   NPROC_PER_NODE   ranks on this node; one a GPU by default
#   NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT   for several nodes: the same call on each, with its own NODE_RANK
#
# Stopped by a signal at any time, also while programs load, the ranks save and leave the marker REQUEUE in the run
# folder; torchrun itself then exits with 1.
set -euo pipefail

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1} # communication is queued in the order it was issued
export PET_SIGNALS_TO_HANDLE=${PET_SIGNALS_TO_HANDLE:-SIGTERM,SIGINT,SIGUSR1,SIGHUP} # passed on to the ranks,
export PET_SHUTDOWN_TIMEOUT=${PET_SHUTDOWN_TIMEOUT:-300}                             # which get so many seconds to save

exec python -m mtrain.launch.torchrun \
  --nproc-per-node "${NPROC_PER_NODE:-gpu}" \
  --nnodes "${NNODES:-1}" \
  --node-rank "${NODE_RANK:-0}" \
  --master-addr "${MASTER_ADDR:-127.0.0.1}" \
  --master-port "${MASTER_PORT:-29500}" \
  -m mtrain train "$@"
