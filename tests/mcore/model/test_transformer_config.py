"""Fields of model.megatron under the layout of the run, and under others that share its model."""

from typing import Any

import pytest
import torch

from mtrain.mcore.model.transformer_config import transformer_config
from mtrain.plan.layout import Layout
from tests.config.samples import config

FLUSH = {"overlap_p2p_comm": True, "overlap_p2p_comm_warmup_flush": True}
BATCHED = {"batch_p2p_comm": True, "overlap_p2p_comm": False}


@pytest.mark.parametrize(
    ("fields", "run", "other", "expected"),
    [
        (FLUSH, {"pp": 2, "vpp": 2}, Layout(pp=2, vpp=2), (True, True, False)),
        (FLUSH, {"pp": 2, "vpp": 2}, Layout(pp=2), (False, False, True)),
        (FLUSH, {"pp": 2, "vpp": 2}, Layout(), (False, False, True)),
        (BATCHED, {"pp": 4, "vpp": 2}, Layout(pp=4, vpp=2), (False, False, True)),
        (BATCHED, {"pp": 4, "vpp": 2}, Layout(pp=2, vpp=2), (False, False, False)),
        ({"batch_p2p_comm": True}, {"pp": 2}, Layout(pp=4, vpp=2), (True, False, False)),
        ({"batch_p2p_comm": False}, {"pp": 2}, Layout(pp=2), (False, False, False)),
    ],
    ids=str,
)
def test_fields_of_transfers_belong_to_a_layout(
    fields: dict[str, Any], run: dict[str, int], other: Layout, expected: tuple[bool, bool, bool]
) -> None:
    """(overlap, overlap in warm-up and flush, batched) of a reference, a teacher or a generator of the run."""
    found = transformer_config(config(layout=run, model__megatron=fields), other, torch.device("cpu"))
    assert (found.overlap_p2p_comm, found.overlap_p2p_comm_warmup_flush, found.batch_p2p_comm) == expected


def test_other_fields_are_passed_on_under_every_layout() -> None:
    run = config(model__megatron={"deterministic_mode": True, "no_rope_freq": 4})
    for layout in (Layout(), Layout(pp=2, vpp=2)):
        found = transformer_config(run, layout, torch.device("cpu"))
        assert (found.deterministic_mode, found.no_rope_freq) == (True, [0, 0, 0, 1] * 2)
