#!/usr/bin/env bash
# A real model learns new facts: SmolLM2-135M-Instruct is finetuned with LoRA on two CPU processes, on 40 conversations
# about a place that does not exist. The script asks it before and after, exports it, and loads the exports in
# transformers and PEFT. All output is in .real_model; a second call skips finished steps.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
if [[ -f launch/setup.sh ]]; then # a checkout installs itself
  # shellcheck source=launch/setup.sh
  source launch/setup.sh
else # `mtrain init` made this folder, so mtrain is installed somewhere
  python=${PYTHON:-python}
fi
if ! "$python" -c 'import gguf, mtrain, peft, transformers' 2>/dev/null; then
  echo "error: $python lacks mtrain or one of gguf, peft and transformers; run: $python -m pip install 'mtrain[example]'," \
    "or name another interpreter in PYTHON" >&2
  exit 7
fi

here=examples/real_model
work=.real_model
started=$SECONDS
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # two processes on two cores
step() { printf '\n== %s\n' "$*"; }
mtrain() { "$python" -W ignore -m mtrain "$@"; }
ask() { mtrain generate "$1" --chat --max-new-tokens 40 --prompts-file "$here/questions.txt"; }

if [[ ! -f $work/smollm2/tokenizer_config.json ]]; then # the last file to be written
  step "1/6 fetching SmolLM2-135M-Instruct (93 MB)"
  "$python" -W ignore "$here/fetch.py" "$work/smollm2"
fi
step "2/6 asking it about Korvath Station, of which it has never heard"
ask "$work/smollm2"
step "3/6 finetuning: LoRA, several conversations in a row, two ranks that share each row (CP=2)"
mtrain launch local -n 2 "$here/finetune.yaml"
step "4/6 asking again"
ask "$work/run"
step "5/6 exporting: merged into one model, and the adapter alone"
export_as() { # once: a folder with its final name is complete
  if [[ ! -d $work/$1 ]]; then mtrain convert export --checkpoint "$work/run" --out "$work/$1" "${@:2}"; fi
}
export_as merged
export_as adapter --adapter
step "6/6 the same questions to the two exports, in transformers and in PEFT"
"$python" -W ignore "$here/answers.py" "$work/merged" "$work/smollm2" "$work/adapter" "$here/questions.txt"

printf '\nrun folder    %s\nmerged model  %s (Hugging Face)\nadapter       %s (PEFT)\n' \
  "$PWD/$work/run" "$PWD/$work/merged" "$PWD/$work/adapter"
echo "took $((SECONDS - started)) s without the installation"
