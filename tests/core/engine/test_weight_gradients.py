"""Weight gradients that are added where they are computed; tests/parity compares the numbers."""

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mtrain.arch.layout import Layout
from mtrain.core.kernels import add_product, add_rows
from mtrain.core.loss.vocab_parallel.chunks import Table, sum_over_chunks
from mtrain.core.ranks.deterministic import deterministic
from tests.core.engine.weight_gradient_ranks import Fused, step
from tests.core.loss.vocab_parallel.counting import Kernels
from tests.core.state.test_save_and_load import BF16, TIED, configured
from tests.pool import Pool

APART = {"model.megatron": {"gradient_accumulation_fusion": False}}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_added(dtype: torch.dtype) -> None:
    inputs, gradients = torch.randn(7, 3).to(dtype), torch.randn(7, 5).to(dtype)
    total = before = torch.randn(5, 3)
    expected = before.double() + gradients.double().t() @ inputs.double()
    add_product(inputs, gradients, total)
    assert total.dtype == torch.float32
    torch.testing.assert_close(total.double(), expected, rtol=1e-5 if dtype == torch.float32 else 0.01, atol=1e-2)


@pytest.mark.parametrize("is_ordered", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_added(dtype: torch.dtype, is_ordered: bool) -> None:
    rows, gradients = torch.tensor([3, 0, 3, 3, 1]), torch.randn(5, 4).to(dtype)
    total = before = torch.randn(6, 4)
    expected = before.double()
    for row, gradient in zip(rows, gradients.double(), strict=True):
        expected[row] += gradient
    with deterministic(is_ordered):
        add_rows(rows, gradients, total)
    assert total.dtype == torch.float32
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_ordered", [False, True])
def test_rows_are_added_on_a_gpu_in_a_fixed_order(is_ordered: bool) -> None:
    """The kernels alone, as there is no GPU: index_add_ has no fixed order there outside deterministic runs."""
    with FakeTensorMode(), torch.device("cuda"), deterministic(is_ordered):
        total, gradients, rows = torch.empty(6, 4), torch.empty(5, 4, dtype=torch.bfloat16), torch.empty(5).long()
        with Kernels(1) as kernels:
            add_rows(rows, gradients, total)
    assert ("index_add_" in kernels.names) is is_ordered
    assert ("embedding_dense_backward" in kernels.names) is not is_ordered


def assert_close(one: Fused, other: Fused, precision: dict[str, Any]) -> None:
    """Compares all gradients of a rank."""
    assert one.gradients.keys() == other.gradients.keys()
    rtol, atol = (0.05, 1e-3) if precision else (1e-5, 1e-6)
    for name, gradient in one.gradients.items():
        torch.testing.assert_close(gradient, other.gradients[name], rtol=rtol, atol=atol, msg=f"{name}: {{}}".format)


@pytest.mark.parametrize("precision", [{}, BF16], ids=["fp32", "bf16"])
def test_every_linear_layer_adds_its_own(pool: Pool, precision: dict[str, str]) -> None:
    """The table, which is also the output layer's weight, has both gradients once."""
    changes = TIED | precision | {"train.micro_batch_size": 2}
    given = [configured(**changes, **APART), configured(**changes)]
    plain, fused = (pool.run(step, Layout(), config)[0] for config in given)
    assert (plain.shapes, plain.added) == ([], set())
    # two microbatches of four layers: queries, keys and values; their projection; gate and up; down; then the output
    assert Counter(fused.shapes) == {(96, 32): 2 * 8, (32, 32): 8, (32, 48): 8, (58, 32): 2}
    assert fused.added == {name for name, gradient in fused.gradients.items() if gradient.dim() > 1}
    assert_close(plain, fused, precision)


LOSSES: dict[str, dict[str, Any]] = {
    "whole": {"loss.chunk_tokens": "whole"},
    "chunks": {"loss.chunk_tokens": 3},
    "smoothed": {"loss.chunk_tokens": 5, "loss.options": {"label_smoothing": 0.1}},
    "two terms": {"loss.chunk_tokens": 4, "loss.side_terms": {"z": {"function": "z_loss", "coefficient": 0.01}}},
}
LAYOUTS = {
    "alone": Layout(),
    "tp": Layout(tp=2),
    "sp": Layout(tp=2, sp=True),
    "pp": Layout(pp=2),
    "vpp": Layout(pp=2, vpp=2),
    "cp": Layout(cp=2),
}


# by night every loss on every layout
BY_DAY = {("chunks", layout) for layout in LAYOUTS} | {(loss, "alone") for loss in LOSSES}


@pytest.mark.parametrize(
    ("loss", "layout"),
    [
        pytest.param(*each, marks=[] if each in BY_DAY else pytest.mark.nightly)
        for each in itertools.product(LOSSES, LAYOUTS)
    ],
)
@pytest.mark.parametrize("model", [{}, TIED, TIED | {"model.mtp_depths": 2}], ids=["untied", "tied", "tied depths"])
def test_tables_have_each_gradient_once(pool: Pool, model: dict[str, Any], loss: str, layout: str) -> None:
    """The table has gradients of tokens, and of the output and the depths if they share it; in half of the cases the
    logits of every other microbatch are whole."""
    changes = model | LOSSES[loss] | {"train.micro_batch_size": 1}
    alternates = loss != "whole" and layout in ("alone", "sp")
    given = [configured(**changes, **APART), configured(**changes)]
    for plain, fused in zip(*(pool.run(step, LAYOUTS[layout], config, alternates) for config in given), strict=True):
        tables = {name for name in fused.gradients if "word_embeddings" in name or "output_layer" in name}
        assert tables <= fused.added
        assert not plain.added
        assert_close(plain, fused, {})


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_hook_runs_once_for_all_uses_of_a_table(pool: Pool, overlaps: bool) -> None:
    """Overlapped reductions count the parameters of a bucket, and refuse one without a gradient."""
    changes = TIED | {"model.mtp_depths": 1, "train.overlap_grad_reduce": overlaps}
    given = [configured(**changes, **APART), configured(**changes)]
    for plain, fused in zip(*(pool.run(step, Layout(dp=2), config) for config in given), strict=True):
        assert_close(plain, fused, {})


def test_another_gradient_than_the_expected_one_is_an_error() -> None:
    """What was added to the buffer cannot be multiplied any more."""
    weight, hidden = torch.randn(6, 4).requires_grad_(), torch.randn(5, 4).requires_grad_()
    buffer = torch.zeros(6, 4)
    total = sum_over_chunks(
        Table(weight, buffer), [hidden], lambda number, rows, logits: logits.square().sum(), 2, torch.tensor(4.0)
    )
    with pytest.raises(RuntimeError, match="was another one"):
        torch.autograd.grad(total * 2, hidden, retain_graph=True)


MODELS: dict[str, dict[str, Any]] = {
    "adapter": {"adapter.rank": 4},
    "depths": {"model.mtp_depths": 2},
    "fp8": {"model.backend": "torch", "train.fp8": "hybrid"},
    "latent attention": {
        "model.mla": {
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 8,
        },
        "model.num_query_groups": None,
        "model.qk_norm": False,
        "model.qkv_bias": False,
    },
    "shared experts": {
        "model.experts": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 24, "shared_ffn_hidden_size": 16}
    },
    "computed again": {
        "train.recompute": "selective",
        "train.recompute_modules": ["core_attn", "mlp"],
    },
}


@pytest.mark.parametrize("name", MODELS)
def test_other_layers_have_the_same_gradients(pool: Pool, name: str) -> None:
    given = [configured(**MODELS[name], **APART), configured(**MODELS[name])]
    plain, fused = (pool.run(step, Layout(), config)[0] for config in given)
    assert (len(fused.shapes) == 0) == (name == "adapter")  # what is frozen has none, and adapters are no such layers
    assert_close(plain, fused, {})


@pytest.mark.parametrize("precision", [{}, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("implementation", ["auto", "sequential", "grouped"])
def test_experts_add_their_own_one_after_another(pool: Pool, implementation: str, precision: dict[str, str]) -> None:
    """The case leaves some experts without tokens: eight tokens choose two of sixteen."""
    experts = {"num_experts": 16, "top_k": 2, "ffn_hidden_size": 24, "implementation": implementation}
    changes = {"model.experts": experts} | precision
    given = [configured(**changes, **APART), configured(**changes)]
    plain, fused = (pool.run(step, Layout(), config)[0] for config in given)
    stacks = {name for name in fused.gradients if "experts.linear" in name}
    assert len(stacks) == 2 * 4
    assert (stacks <= fused.added) is (implementation != "grouped")
    assert_close(plain, fused, precision)
