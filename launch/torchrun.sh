#!/usr/bin/env bash
# Trains with all GPUs of this node, or of several nodes: bash launch/torchrun.sh CONFIG... [section.key=value...]
#
#   NPROC_PER_NODE   ranks on this node; one a GPU by default
#   NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT   for several nodes: the same call on each, with its own NODE_RANK
#
# Stopped by a signal at any time, also while programs load, the ranks save and leave the marker REQUEUE in the run
# folder, and this exits with 75; else with the code of the rank that failed first. `mtrain launch torchrun` checks the
# configuration and prints these commands for every node.
set -euo pipefail

exec python -m mtrain.launch.torchrun \
  --nproc-per-node "${NPROC_PER_NODE:-gpu}" \
  --nnodes "${NNODES:-1}" \
  --node-rank "${NODE_RANK:-0}" \
  --master-addr "${MASTER_ADDR:-127.0.0.1}" \
  --master-port "${MASTER_PORT:-29500}" \
  -m mtrain train "$@"
