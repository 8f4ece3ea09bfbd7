"""A gated delta net is that of the definition on one process, whatever ranks hold its heads and tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from mtrain.arch.layout import Layout
from mtrain.config.schema.delta_net import DeltaNetSection
from mtrain.config.schema.mamba import MambaSection
from tests.core.model import delta_net_ranks
from tests.core.model.delta_net_ranks import Example, Found
from tests.pool import Pool
from tests.verify.backend.delta_rule_semantics import chunk_gated_delta_rule, without_documents, without_scale

SEQ, ROWS, HIDDEN, EPSILON = 12, 2, 10, 1e-3
NET = DeltaNetSection(num_key_heads=2, num_value_heads=4, key_head_dim=3, value_head_dim=5, conv_kernel=3)
SHARED = NET.num_value_heads // NET.num_key_heads
STARTS = torch.tensor([[0] * 5 + [5] * 6 + [11], [0] * 1 + [1] * 9 + [10] * 2], dtype=torch.int32)
LAYOUTS = [Layout(), Layout(tp=2), Layout(tp=2, sp=True)]


def example(dtype: torch.dtype = torch.float64, documents: bool = True, recompute: bool = False) -> Example:
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(*shape, dtype=torch.float64, generator=generator)).to(dtype)

    channels = 2 * NET.key_width + NET.value_width
    rows = channels + NET.value_width + 2 * NET.num_value_heads
    parameters = {
        "in_proj.weight": draw(rows, HIDDEN),
        "conv1d.weight": draw(channels, 1, NET.conv_kernel),
        "A_log": draw(NET.num_value_heads, scale=0.3),
        "dt_bias": draw(NET.num_value_heads),
        "out_norm.weight": 1 + draw(NET.value_head_dim, scale=0.1),
        "out_proj.weight": draw(HIDDEN, NET.value_width),
    }
    hidden, gradient = draw(SEQ, ROWS, HIDDEN), draw(SEQ, ROWS, HIDDEN)
    return Example(NET, parameters, hidden, STARTS if documents else None, gradient, recompute)


@dataclass(frozen=True)
class Definition:
    """The layer token by token, in float64, with what tests plant in it."""

    carries_state: bool = False
    carries_window: bool = False
    gates_before_norm: bool = False
    rounds_decay: bool = False

    def output(self, given: Example) -> Tensor:
        """Returns [seq, batch, hidden] with a graph to the parameters and the hidden states."""
        starts = given.document_starts
        rows = [
            self._row(given.parameters, given.hidden[:, row], [0] * SEQ if starts is None else starts[row].tolist())
            for row in range(ROWS)
        ]
        return torch.stack(rows, 1)

    def _row(self, weights: dict[str, Tensor], hidden: Tensor, starts: list[int]) -> Tensor:
        size, width = NET.key_head_dim, SHARED * NET.value_head_dim
        grouped = (hidden @ weights["in_proj.weight"].T).view(SEQ, NET.num_key_heads, -1)
        mixed, gate, step, decay = grouped.split([2 * size + width, width, SHARED, SHARED], -1)
        log_decay = -weights["A_log"].exp() * torch.log(1 + (decay.flatten(1) + weights["dt_bias"]).exp())
        if self.rounds_decay:
            log_decay = log_decay.to(torch.bfloat16).to(hidden.dtype)
        outputs, state = [], hidden.new_zeros(NET.num_value_heads, size, NET.value_head_dim)
        for token in range(SEQ):
            query, key, value = self._convolved(mixed.flatten(1), weights["conv1d.weight"][:, 0], token, starts[token])
            if token == starts[token] and not self.carries_state:
                state = torch.zeros_like(state)
            state = state * log_decay[token].exp()[:, None, None]
            error = value - (state * key[:, :, None]).sum(1)
            state = state + key[:, :, None] * (step[token].flatten().sigmoid()[:, None] * error)[:, None]
            outputs.append((state * query[:, :, None]).sum(1))
        heads, opened = torch.stack(outputs), torch.nn.functional.silu(gate.reshape(SEQ, NET.num_value_heads, -1))
        if self.gates_before_norm:
            heads = heads * opened
        normed = heads / (heads.square().mean(-1, keepdim=True) + EPSILON).sqrt() * weights["out_norm.weight"]
        return (normed if self.gates_before_norm else normed * opened).flatten(1) @ weights["out_proj.weight"].T

    def _convolved(self, mixed: Tensor, kernel: Tensor, token: int, start: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns unit-length queries and keys of every value head, and the values."""
        first = 0 if self.carries_window else start
        total = torch.zeros_like(mixed[0])
        for back in range(min(NET.conv_kernel, token - first + 1)):
            total = total + mixed[token - back] * kernel[:, -1 - back]
        heads = torch.nn.functional.silu(total).view(NET.num_key_heads, -1)
        query, key = (self._unit(heads[:, at : at + NET.key_head_dim]) for at in (0, NET.key_head_dim))
        value = heads[:, 2 * NET.key_head_dim :].reshape(NET.num_value_heads, -1)
        return query / NET.key_head_dim**0.5, key, value

    @staticmethod
    def _unit(heads: Tensor) -> Tensor:
        unit = heads / (heads.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        return unit.repeat_interleave(SHARED, 0)


def expected(given: Example, definition: Definition) -> Found:
    """Computes the results from the definition, by autograd, in float64 on one process."""
    parameters = {name: value.double().requires_grad_() for name, value in given.parameters.items()}
    hidden = given.hidden.double().requires_grad_()
    output = definition.output(given._replace(parameters=parameters, hidden=hidden))
    output.backward(given.gradient.double())
    assert hidden.grad is not None
    gradients = {name: value.grad for name, value in parameters.items() if value.grad is not None}
    return Found(output.detach(), hidden.grad, gradients, frozenset(), [])


def together(found: list[Found], layout: Layout) -> Found:
    """Returns the results of all ranks as one process has them."""
    ranks = found[: layout.tp]
    output, hidden = (
        torch.cat([getattr(each, name) for each in ranks]) if layout.sp else getattr(ranks[0], name)
        for name in ("output", "input_gradient")
    )
    gradients = {
        name: torch.cat([each.gradients[name] for each in ranks], 1 if name == "out_proj.weight" else 0)
        if name in ranks[0].divided
        else ranks[-1].gradients[name]
        for name in ranks[0].gradients
    }
    return Found(output, hidden, gradients, ranks[0].divided, ranks[0].reduced)


def deviation(found: Found, exact: Found) -> float:
    """Returns the largest difference of a result, by the largest number of its tensor."""
    pairs = [(found.output, exact.output), (found.input_gradient, exact.input_gradient)]
    pairs += [(found.gradients[name], exact.gradients[name]) for name in exact.gradients]
    return max(float((ours.double() - theirs).abs().max() / theirs.abs().max()) for ours, theirs in pairs)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_it_is_the_layer_of_one_process(pool: Pool, layout: Layout, documents: bool, recompute: bool) -> None:
    given = example(documents=documents, recompute=recompute)
    found = together(pool.run(delta_net_ranks.computed, layout, given), layout)
    assert deviation(found, expected(given, Definition())) < 1e-11
    assert found.divided == given.parameters.keys() - {"out_norm.weight"}


@pytest.mark.parametrize(
    ("layout", "documents", "recompute"),
    [(Layout(), False, False), (Layout(), True, True), (Layout(tp=2, sp=True), True, False)],
    ids=str,
)
def test_with_the_rule_of_flash_linear_attention_it_is_that_layer(
    pool: Pool, layout: Layout, documents: bool, recompute: bool
) -> None:
    given = example(documents=documents, recompute=recompute)._replace(kernel=chunk_gated_delta_rule)
    found = together(pool.run(delta_net_ranks.computed, layout, given), layout)
    assert deviation(found, expected(given, Definition())) < 1e-11


@pytest.mark.parametrize("kernel", [without_documents, without_scale])
def test_a_wrong_rule_is_far_off(pool: Pool, kernel: Callable[..., Any]) -> None:
    given = example()._replace(kernel=kernel)
    found = together(pool.run(delta_net_ranks.computed, Layout(), given), Layout())
    # the norm after it divides most of a scale out again
    assert deviation(found, expected(given, Definition())) > 1e-5


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_backward_pass_sums_one_weight_more_than_that_of_attention(pool: Pool, layout: Layout) -> None:
    """Counts the norm's weight and, without sequence parallelism, the gradient of the input."""
    of_input = [] if layout.sp else [SEQ * ROWS * HIDDEN]
    for found in pool.run(delta_net_ranks.computed, layout, example()):
        assert sorted(found.reduced) == (sorted([NET.value_head_dim, *of_input]) if layout.tp > 1 else [])


@pytest.mark.parametrize(
    "fault",
    [
        Definition(carries_state=True),
        Definition(carries_window=True),
        Definition(gates_before_norm=True),
        Definition(rounds_decay=True),
    ],
    ids=str,
)
def test_a_planted_fault_is_far_off(pool: Pool, fault: Definition) -> None:
    given = example()
    found = together(pool.run(delta_net_ranks.computed, Layout(), given), Layout())
    assert deviation(found, expected(given, fault)) > 1e-4


def test_decays_of_a_run_in_bfloat16_are_float32(pool: Pool) -> None:
    """Decays near 1 would be 1 in bfloat16, and a state would never fade."""
    given = example(torch.bfloat16)
    slow = {"A_log": torch.full_like(given.parameters["A_log"], -9.0)}
    (found,) = pool.run(delta_net_ranks.computed, Layout(), given._replace(parameters=given.parameters | slow))
    assert found.decay is not None
    assert found.decay.dtype == torch.float32
    assert 0.99 < float(found.decay.exp().min()) < float(found.decay.exp().max()) < 1


def test_decays_and_steps_of_mamba_in_bfloat16_are_float32(pool: Pool) -> None:
    section = MambaSection(num_heads=4, head_dim=3, num_groups=2, state_dim=5, step_min=0.6)
    hidden = torch.randn(SEQ, ROWS, HIDDEN, generator=torch.Generator().manual_seed(4)).bfloat16()
    ((log_decay, step),) = pool.run(delta_net_ranks.mamba_rates, Layout(), section, hidden)
    assert log_decay.dtype == step.dtype == torch.float32
    assert 0.999 < float(log_decay.exp().min()) <= float(log_decay.exp().max()) < 1
    # a part is the smallest
    assert float(step.min()) == pytest.approx(0.6)
    assert float(step.max()) > 0.61
