#!/usr/bin/env bash
# A small Qwen3-VL of random weights learns to read bar charts, vision tower and all, on one CPU process. The script asks
# transformers what the exported model reads in charts that it has not seen, before and after, and repeats the first
# steps on two ranks. All output is in .charts; a second call skips finished steps.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
if [[ -f launch/setup.sh ]]; then # a checkout installs itself
  # shellcheck source=launch/setup.sh
  source launch/setup.sh
else # `mtrain init` made this folder, so mtrain is installed somewhere
  python=${PYTHON:-python}
fi
if ! "$python" -c 'import mtrain, PIL, transformers' 2>/dev/null; then
  echo "error: $python lacks mtrain, Pillow or transformers; run: $python -m pip install 'mtrain[vision]', or name" \
    "another interpreter in PYTHON" >&2
  exit 7
fi

here=examples/charts
work=.charts
started=$SECONDS
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
step() { printf '\n== %s\n' "$*"; }
mtrain() { "$python" -W ignore -m mtrain "$@"; }
ask() { "$python" -W ignore "$here/answers.py" "$1" "$work/held_out.jsonl"; }

if [[ ! -f $work/untrained/preprocessor_config.json ]]; then # the last file to be written
  step "1/5 drawing 4,200 charts, and making an untrained model"
  "$python" -W ignore "$here/make.py" "$work"
fi
step "2/5 training on 4,000 of them"
mtrain train "$here/train.yaml"
step "3/5 exporting"
if [[ ! -d $work/exported ]]; then # a folder with its final name is complete
  mtrain convert export --checkpoint "$work/run" --out "$work/exported"
fi
step "4/5 asking transformers about the other 200 charts, before and after"
ask "$work/untrained"
ask "$work/exported"
step "5/5 the first 40 steps again, on two ranks that share each row (CP=2) or each matrix (TP=2)"
for layout in cp=2 tp=2; do
  mtrain launch local -n 2 "$here/train.yaml" "run.dir=$work/$layout" "layout.$layout" train.num_steps=40
  mtrain compare "$work/run" "$work/$layout" --output "$work/$layout"
done

printf '\nrun folder      %s\nexported model  %s (Hugging Face)\n' "$PWD/$work/run" "$PWD/$work/exported"
echo "took $((SECONDS - started)) s without the installation"
