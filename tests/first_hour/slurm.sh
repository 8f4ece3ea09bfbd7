#!/usr/bin/env bash
# First hour of a user who finetunes a large model under Slurm: plans and checks 32B on 64 GPUs, reads the job's script, tries the same
# configuration small on this machine, interrupts it, goes on, and looks at the result.
# shellcheck source=tests/first_hour/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
large=("$root/configs/model/qwen3_32b.yaml" "$root/configs/start/qwen3_32b_sft_32k.yaml")

step mtrain plan "$root/configs/model/qwen3_32b.yaml" --gpus 64 --seq-length 32768 --global-batch-size 128 --top 3
step mtrain check "${large[@]}" --world-size 64 --gpu-memory 80GiB --without-files

mkdir -p data
head -n 32 "$root/examples/real_model/korvath.jsonl" >data/train.jsonl
tail -n 8 "$root/examples/real_model/korvath.jsonl" >data/valid.jsonl
cat >my-run.yaml <<'EOF'
run: {dir: runs/support}
model: {hf: models/smollm2}
layout: {cp: 2}
adapter: {rank: 16, alpha: 32}
train: {global_batch_size: 16, tokens_per_micro_batch: 512, num_steps: 20, precision: fp32}
optimizer: {lr: 2.0e-3, schedule: cosine, warmup_steps: 2, weight_decay: 0.0}
data:
  kind: sft
  seq_length: 128
  packing: {batch: sequences}
  tokenizer: models/smollm2
  train: [{path: data/train.jsonl}]
  valid: [{path: data/valid.jsonl}]
valid: {interval_steps: 10}
checkpoint: {interval_steps: 10}
EOF
interrupted() { # a run that gets a Ctrl-C after its third step
  local launcher code=0
  set -m # a group of its own, which the terminal's Ctrl-C reaches as a whole
  mtrain launch local -n 2 my-run.yaml &
  launcher=$!
  set +m
  until [[ -f runs/support/metrics.jsonl ]] && (($(grep -c . runs/support/metrics.jsonl) >= 3)); do
    kill -0 "$launcher" # it must not have ended by itself
    sleep 0.2
  done
  kill -INT -- "-$launcher"
  wait "$launcher" || code=$?
  echo "ended with $code"
}
step mtrain check my-run.yaml --world-size 2
step mtrain launch slurm my-run.yaml --nodes 1 --gpus-per-node 2 --time 12:00:00 --dry-run
step mtrain show-batch my-run.yaml --samples 1
step interrupted
step mtrain launch local -n 2 my-run.yaml
step mtrain status runs/support
step mtrain report runs/support
step mtrain generate runs/support --chat --max-new-tokens 20 --prompt "Where does the water of Korvath Station come from?"
step mtrain convert export --checkpoint runs/support --out support-model
step python -c "import transformers; print(transformers.AutoModelForCausalLM.from_pretrained('support-model').num_parameters())"
finish
