#!/usr/bin/env bash
# First hour of a user who only converts: a Hugging Face folder becomes a checkpoint, one for Megatron-LM too, and comes back
# from each as the bytes that it was.
# shellcheck source=tests/first_hour/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

same_weights() { cmp models/smollm2/model.safetensors "$1/model.safetensors" && echo "$1 has the bytes of models/smollm2"; }

step mtrain convert inspect models/smollm2
step mtrain convert import models/smollm2 ckpt/smollm2 --check-logits
step mtrain convert inspect ckpt/smollm2
step mtrain convert verify --checkpoint ckpt/smollm2 --hf models/smollm2
step mtrain convert export --checkpoint ckpt/smollm2 --out back/from-mtrain
step same_weights back/from-mtrain
step mtrain convert import models/smollm2 ckpt/megatron --to megatron-lm
step mtrain convert export --checkpoint ckpt/megatron --like models/smollm2 --out back/from-megatron
step same_weights back/from-megatron
finish
