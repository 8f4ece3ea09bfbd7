#!/usr/bin/env bash
# First hour of a user who writes Python: a loop of his own, the same on two ranks, a loss of his own proved, and a
# model that is asked.
# shellcheck source=tests/first_hour/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

mtrain init project
cd project
step python examples/own_training_loop.py
step mtrain launch local -n 2 examples/own_training_loop.py layout.tp=2
cat >tune.py <<'EOF'
"""Finetunes a real model on three sentences and asks it."""

from transformers import AutoTokenizer

from mtrain import Datum, Engine, SamplingParams, load_config

SETTINGS = [
    "run.dir=runs/tune",
    "model.hf=../models/smollm2",
    "adapter={rank: 8, alpha: 16}",
    "train={global_batch_size: 3, micro_batch_size: 1, num_steps: 16, precision: fp32}",
    "optimizer={lr: 1e-3, weight_decay: 0.0}",
    "data={kind: mock, seq_length: 32}",
]
FACTS = ["The door of Korvath Station is blue.", "Its garden has nine trees.", "Its clock is always late."]

tokenizer = AutoTokenizer.from_pretrained("../models/smollm2")
with Engine(load_config([], SETTINGS)) as engine:
    batch = [Datum(tokenizer.encode(fact)) for fact in FACTS]
    for _ in range(engine.config.train.num_steps):
        engine.forward_backward(batch)
        done = engine.optim_step()
        print(f"step {done.step}  loss {done.loss:.4f}")
    (answer,) = engine.generate([tokenizer.encode("The door of Korvath Station is")], SamplingParams(max_new_tokens=4, temperature=0))
    print(tokenizer.decode(answer.token_ids))
EOF
step python tune.py
export PYTHONPATH=examples
step mtrain verify parity configs/model/tiny.yaml run.dir=runs/parity data.kind=mock data.seq_length=32 optimizer.lr=1e-3 \
  train.global_batch_size=8 train.micro_batch_size=2 train.num_steps=3 loss.function=custom_loss:focal_loss --layouts tp2,cp2
finish
