"""Fields of model.megatron under the layout of the run, and under other layouts that share its model."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mtrain.arch.layout import Layout
from mtrain.core.engine.sharded_model import ddp_config, optimizer_config
from mtrain.core.layers.language_model import scaled
from mtrain.core.layers.transformer_config import transformer_config
from tests.config.samples import config

FLUSH = {"overlap_p2p_comm": True, "overlap_p2p_comm_warmup_flush": True}
WIDE = {"model__hidden_size": 256, "model__ffn_hidden_size": 256, "train__micro_batch_size": 1, "data__seq_length": 128}
EXPERTS = {"model__experts": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 32}}
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
    """Expects (overlap, overlap in warm-up and flush, batched) for a reference, a teacher or a generator of the run."""
    found = transformer_config(config(layout=run, model__megatron=fields), other, torch.device("cpu"))
    assert (found.overlap_p2p_comm, found.overlap_p2p_comm_warmup_flush, found.batch_p2p_comm) == expected


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_outputs_are_kept_while_gloo_may_be_sending_them(device: str) -> None:
    found = transformer_config(config(layout={"pp": 2}), Layout(pp=2), torch.device(device))
    assert found.deallocate_pipeline_outputs is (device == "cuda")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (None, "delayed")),  # megatron-core's default, which nothing reads
        ({"train__fp8": "hybrid"}, ("hybrid", "tensorwise")),
        ({"train__fp8": "e4m3", "train__fp8_recipe": "mxfp8"}, ("e4m3", "mxfp8")),
        ({"train__fp8": "e4m3", "model__backend": "torch"}, (None, "delayed")),  # ours, which it does not know
    ],
    ids=str,
)
def test_products_in_8_bits_are_asked_for(changes: dict[str, Any], expected: tuple[str | None, str]) -> None:
    found = transformer_config(config(**WIDE, **changes), Layout(), torch.device("cpu"))
    assert (found.fp8, found.fp8_recipe) == expected


@pytest.mark.parametrize(
    ("layout", "changes", "expected"),
    [
        (Layout(tp=2, sp=True), {}, False),  # every rank has its only copy of a part of each matrix
        (Layout(tp=2, sp=True), EXPERTS, True),  # each rank has whole experts
        (Layout(tp=2, sp=True, ep=2), EXPERTS, False),
        (Layout(tp=2, sp=True), {"train__overlap_grad_reduce": True, "train__overlap_param_gather": True}, True),
        (Layout(cp=2), {}, True),
        (Layout(dp=2), {}, True),
        (Layout(dp=2), {"train__distributed_optimizer": False}, False),
    ],
    ids=str,
)
def test_replicas_alone_share_the_work_of_an_optimizer(layout: Layout, changes: dict[str, Any], expected: bool) -> None:
    given = config(**changes)
    ddp = ddp_config(given, layout)
    optimizer = optimizer_config(given.optimizer, given.train, ddp)
    assert ddp.use_distributed_optimizer == optimizer.use_distributed_optimizer == expected


def test_other_fields_are_passed_on_under_every_layout() -> None:
    run = config(model__megatron={"deterministic_mode": True, "no_rope_freq": 4})
    for layout in (Layout(), Layout(pp=2, vpp=2)):
        found = transformer_config(run, layout, torch.device("cpu"))
        assert (found.deterministic_mode, found.no_rope_freq) == (True, [0, 0, 0, 1] * 2)


def test_no_transfer_between_stages_waits_for_the_whole_gpu() -> None:
    for layout in (Layout(pp=2), Layout(pp=2, vpp=2)):
        run = config(layout={"pp": layout.pp, "vpp": layout.vpp})
        assert not transformer_config(run, layout, torch.device("cpu")).batch_p2p_sync


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [48, 2560])
def test_scaled_embeddings_bring_nothing_to_the_device(dtype: torch.dtype, size: int) -> None:
    """Their factor is rounded as before, but is no tensor: a tensor would be copied to a GPU in each forward pass."""
    rows = torch.randn(3, 1, size, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = rows * torch.tensor(size**0.5, dtype=dtype)
    scaled(rows)
    seen = []

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function.name())
            return function(*args, **(kwargs or {}))

    with Operations():
        found = scaled(rows)
    assert torch.equal(found, expected)
    assert seen == ["aten::mul.Tensor"]
