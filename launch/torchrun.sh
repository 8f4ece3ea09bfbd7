#!/usr/bin/env bash
# Trains with all GPUs of this node, or of several nodes: bash launch/torchrun.sh CONFIG... [section.key=value...]
#
#   NPROC_PER_NODE   ranks on this node; by default one per GPU
#   NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT   for several nodes: make the same call on each, with its NODE_RANK
#
# If a signal stops the ranks at any time, even while programs load, they save and leave the marker REQUEUE in the run
# folder, and this script exits with 75; otherwise it exits with the code of the rank that failed first.
# `mtrain launch torchrun` checks the configuration and prints these commands for every node.
set -euo pipefail

exec python -m mtrain.launch.torchrun \
  --nproc-per-node "${NPROC_PER_NODE:-gpu}" \
  --nnodes "${NNODES:-1}" \
  --node-rank "${NODE_RANK:-0}" \
  --master-addr "${MASTER_ADDR:-127.0.0.1}" \
  --master-port "${MASTER_PORT:-29500}" \
  -m mtrain train "$@"
