#!/usr/bin/env bash
# Pretrains and finetunes a small language model on this machine, from nothing, through the real Megatron-Core.
# Everything it makes lies in .quickstart; a second call skips what is done.
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
step() { printf '\n== %s\n' "$*"; }
mtrain() { "$python" -W ignore -m mtrain "$@"; }

if [[ ! -f $work/qa-valid.jsonl ]]; then
  step "1/6 building a corpus from the sources of Python's standard library"
  mtrain stdlib-corpus --output "$work"
fi
if [[ ! -f $work/tokenizer.model ]]; then
  step "2/6 training a sentencepiece tokenizer"
  mtrain train-tokenizer "$work/text-train.jsonl" --output "$work/tokenizer.model" --vocab-size 4096
fi
for part in train valid; do
  if [[ ! -f $work/text-$part.idx ]]; then
    step "3/6 tokenising the $part part"
    mtrain tokenize "$work/text-$part.jsonl" --tokenizer "$work/tokenizer.model" \
      --output-prefix "$work/text-$part" --workers 2
  fi
done

step "4/6 pretraining under tensor parallelism (TP=2, sequence parallel)"
mtrain launch local -n 2 configs/model/quickstart.yaml configs/layout/tp2sp.yaml configs/run/quickstart_pretrain.yaml

step "5/6 finetuning on question/answer pairs under context parallelism (CP=2)"
mtrain launch local -n 2 configs/model/quickstart.yaml configs/layout/cp2.yaml configs/run/quickstart_finetune.yaml

step "6/6 a look at the result"
mtrain generate "$work/finetune" --max-new-tokens 40 \
  --prompt "def os.path.join(a, *p)" --prompt "def json.dumps(obj, *, skipkeys=False)"
picture=$(mtrain plot "$work/pretrain" "$work/finetune" --output "$work/losses.png")

printf '\nrun folders   %s\n              %s\nloss curves   %s\n' "$PWD/$work/pretrain" "$PWD/$work/finetune" "$PWD/$picture"
echo "took $((SECONDS - started)) s without the installation"
