#!/usr/bin/env bash
# First hour of a user who comes with the configuration of another program: translates it, reads what could not be
# carried over, checks it and trains.
# shellcheck source=tests/first_hour/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
mkdir -p data
cp "$root/examples/real_model/korvath.jsonl" data/train.jsonl

cat >axolotl.yaml <<'EOF'
base_model: models/smollm2
datasets:
  - path: data/train.jsonl
    type: chat_template
    field_messages: messages
sequence_len: 128
sample_packing: true
micro_batch_size: 4
gradient_accumulation_steps: 2
num_epochs: 1
learning_rate: 2.0e-3
lr_scheduler: cosine
warmup_ratio: 0.1
adapter: lora
lora_r: 16
lora_alpha: 32
lora_target_linear: true
output_dir: runs/from-axolotl
EOF
cat >verl.yaml <<'EOF'
data:
  train_files: data/train.jsonl
  train_batch_size: 8
  max_length: 128
  multiturn: {enable: true, messages_key: messages}
model: {partial_pretrain: models/smollm2}
optim: {lr: 1.0e-4}
trainer: {total_epochs: 1, default_local_dir: runs/from-verl}
EOF
step mtrain from axolotl axolotl.yaml --output from-axolotl.yaml
step cat from-axolotl.yaml
step mtrain from verl verl.yaml --output from-verl.yaml
step mtrain from ms-swift --output from-swift.yaml --model models/smollm2 --dataset data/train.jsonl --max_length 128 --train_type lora
step mtrain from megatron-lm --output from-megatron.yaml --num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 256 \
  --max-position-embeddings 256 --micro-batch-size 2 --global-batch-size 16 --train-iters 100 --lr 3e-4 --mock-data \
  --tokenizer-type NullTokenizer --vocab-size 1024 --tensor-model-parallel-size 2
# its precision is that of a GPU where nothing is said
step mtrain check from-axolotl.yaml train.precision=fp32 --world-size 2
step mtrain launch local -n 2 from-axolotl.yaml train.precision=fp32
step mtrain status runs/from-axolotl
finish
