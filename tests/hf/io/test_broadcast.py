"""Buckets of tensors from one process to another, without an engine."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mtrain import DataError, receive_hf_tensors
from mtrain.base.background import started
from mtrain.hf.io.broadcast import NamedKind, TensorKind, send_tensors
from tests.messages import refuses
from tests.training.engine_parts.hf_ranks import group_pair

TENSORS = {
    "odd": torch.arange(3, dtype=torch.bfloat16),  # six bytes: the next one has to begin at a multiple of four
    "scalar": torch.tensor(2.5),
    "turned": torch.arange(6, dtype=torch.float64).view(2, 3).t(),
    "empty": torch.zeros(0, 4),
    "minus zero": torch.tensor([-0.0, float("nan"), float("inf")]),
}
ENOUGH_S = 600.0
KINDS = [NamedKind(name, TensorKind(each.dtype, tuple(each.shape))) for name, each in TENSORS.items()]


def received(send: Callable[[dist.ProcessGroup], Any]) -> list[tuple[str, torch.Tensor]]:
    sender, receiver = group_pair()
    # a daemon: where sending fails, the receiver waits for bytes that never come, and nothing waits for it
    found = started(lambda: list(receive_hf_tensors(receiver)), "receiver")
    send(sender)
    return found.result(ENOUGH_S)


@pytest.mark.parametrize("buckets", [[KINDS], [KINDS[:2], KINDS[2:]], [[each] for each in KINDS]], ids=len)
def test_every_bit_arrives_under_its_name_and_in_its_shape(buckets: list[list[NamedKind]]) -> None:
    found = received(lambda group: send_tensors(TENSORS.items(), buckets, group, torch.device("cpu")))
    assert [name for name, _ in found] == list(TENSORS)
    for name, values in found:
        sent = TENSORS[name]
        assert (values.dtype, values.shape) == (sent.dtype, sent.shape)
        bits, theirs = (each.contiguous().flatten().view(torch.uint8) for each in (values, sent))
        assert torch.equal(bits, theirs), name


def test_a_sender_of_another_version_is_refused() -> None:
    def send(group: dist.ProcessGroup) -> None:
        text = torch.frombuffer(bytearray(json.dumps({"version": 9, "buckets": []}).encode()), dtype=torch.uint8)
        for each in (torch.tensor([len(text)]), text):
            group.broadcast(each, 0).wait()

    with refuses(DataError):
        received(send)
