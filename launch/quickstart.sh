#!/usr/bin/env bash
# Pretrains and finetunes a small language model on this machine, from nothing, through the real Megatron-Core.
# All output is in .quickstart; a second call skips finished steps.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ -f launch/setup.sh ]]; then # a checkout installs itself
  # shellcheck source=launch/setup.sh
  source launch/setup.sh
else # `mtrain init` made this folder, so mtrain is installed somewhere
  python=${PYTHON:-python}
  if ! "$python" -c 'import mtrain' 2>/dev/null; then
    echo "error: $python has no mtrain; activate the environment that has it, or name its interpreter in PYTHON" >&2
    exit 7
  fi
fi

work=.quickstart
started=$SECONDS
export CUDA_VISIBLE_DEVICES= # CPUs train so small a model in minutes; two ranks would need two GPUs
step() { printf '\n== %s\n' "$*"; }
mtrain() { "$python" -W ignore -m mtrain "$@"; }

if [[ ! -f $work/chat-valid.jsonl ]]; then
  step "1/7 building a corpus from the sources of Python's standard library"
  mtrain stdlib-corpus --output "$work"
fi
if [[ ! -f $work/tokenizer/tokenizer.json ]]; then
  step "2/7 training a tokenizer with the chat template ChatML"
  mtrain train-tokenizer "$work/text-train.jsonl" --kind hf --chat-template chatml \
    --output "$work/tokenizer" --vocab-size 4096
fi
for part in train valid; do
  if [[ ! -f $work/text-$part.idx ]]; then
    step "3/7 tokenising the $part part"
    mtrain tokenize "$work/text-$part.jsonl" --tokenizer "$work/tokenizer" \
      --output-prefix "$work/text-$part" --workers 2
  fi
done

step "4/7 pretraining under tensor parallelism (TP=2, sequence parallel)"
mtrain launch local -n 2 configs/model/quickstart.yaml configs/layout/tp2sp.yaml configs/run/quickstart_pretrain.yaml
if [[ ! -d $work/base ]]; then
  step "5/7 exporting the model as a folder of Hugging Face"
  mtrain convert export --checkpoint "$work/pretrain" --out "$work/base"
fi

step "6/7 finetuning that folder on dialogues under context parallelism (CP=2), packed"
mtrain launch local -n 2 configs/layout/cp2.yaml configs/run/quickstart_finetune.yaml
if [[ ! -d $work/chat ]]; then
  mtrain convert export --checkpoint "$work/finetune" --out "$work/chat"
fi

step "7/7 a look at the result: questions in the model's chat template"
# shellcheck disable=SC2016 # backquotes are part of the questions
mtrain generate "$work/finetune" --chat --max-new-tokens 40 \
  --prompt 'What does `def os.path.join(a, *p)` do?' --prompt 'What is `class json.JSONEncoder(object)`?'
picture=$(mtrain plot "$work/pretrain" "$work/finetune" --output "$work/losses.png")

printf '\nrun folders   %s\n              %s\nchat model    %s (Hugging Face)\nloss curves   %s\n' \
  "$PWD/$work/pretrain" "$PWD/$work/finetune" "$PWD/$work/chat" "$PWD/$picture"
echo "took $((SECONDS - started)) s without the installation"
if [[ -f examples/real_model/run.sh ]]; then
  echo "next: a real model learns something new on this machine, in minutes: bash examples/real_model/run.sh"
fi
