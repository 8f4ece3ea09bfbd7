"""Finetuning as a plain loop does it: eight conversations a forward pass, padded to the longest of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from mtrain import Datum
from tools.bench.one_gpu.reference import Llama
from tools.bench.one_gpu.shapes import Bench, Model

BATCH_SIZE = 8


def padded_loop(bench: Bench, model: Model, data: Sequence[Datum]) -> Callable[[], None]:
    """A step on all conversations; the reference is not compiled, since every batch has another length."""
    place, judge = bench.torch_device, Llama(model).to(bench.torch_device)
    optimizer = torch.optim.AdamW(judge.parameters(), lr=1e-4, fused=True)
    supervised = sum(sum(list(datum.weights or ())[1:]) for datum in data)

    def step() -> None:
        for start in range(0, len(data), BATCH_SIZE):
            part = data[start : start + BATCH_SIZE]
            longest = max(len(datum.input_ids) for datum in part)
            # behind the causal mask padding at the end is seen by padding alone
            ids, labels = (torch.full((len(part), longest), fill) for fill in (0, -100))
            for row, datum in enumerate(part):
                given = torch.tensor(datum.input_ids)
                ids[row, : len(given)] = given
                labels[row, : len(given)] = torch.where(torch.tensor(datum.weights) > 0, given, -100)
            ids, labels = ids.to(place), labels.to(place)
            with torch.autocast(bench.device, torch.bfloat16):
                loss = judge(ids[:, :-1], labels[:, 1:]) / supervised
            torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(judge.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()

    return step
