"""Finetuning in a plain loop: eight conversations per forward pass, padded to the longest of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from mtrain import Datum
from tools.bench.one_gpu.reference import Llama
from tools.bench.one_gpu.shapes import Bench, Model
from tools.bench.peers.padding import batched, padded


def padded_loop(bench: Bench, model: Model, data: Sequence[Datum]) -> Callable[[], None]:
    """Builds a step on all conversations; the reference is not compiled, since every batch has another length."""
    place, judge = bench.torch_device, Llama(model).to(bench.torch_device)
    optimizer = torch.optim.AdamW(judge.parameters(), lr=1e-4, fused=True)
    supervised = sum(sum(list(datum.weights or ())[1:]) for datum in data)

    def step() -> None:
        for part in batched(data):
            # no mask: under the causal one, only padding attends to padding at the end
            ids, labels = (each.to(place) for each in padded(part))
            with torch.autocast(bench.device, torch.bfloat16):
                loss = judge(ids[:, :-1], labels[:, 1:]) / supervised
            torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(judge.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()

    return step
