"""Activations moved to the host: the same bits under every layout, and their device memory is free meanwhile."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from mtrain.core.layers.offload import activations
from mtrain.core.layers.offload.activations import move_activations
from mtrain.core.state.host_memory import PIECE_BYTES
from tests.core.offload.copies import Copies
from tests.core.offload.offload_ranks import Moved, train_each
from tests.parity import images
from tests.parity.batches import documents_steps, two_steps
from tests.parity.cases import case, lean
from tests.parity.compare import initial_parameters
from tests.parity.expert_models import MIXTRAL
from tests.parity.models import test_images
from tests.parity.ranks import Run
from tests.pool import Pool

SELECTIVE = {"train__recompute": "selective", "train__recompute_modules": ["core_attn"]}
BLOCKS = {"train__recompute": "full", "train__recompute_layers": 1}
DOCUMENTS = {"data__isolate_documents": True}
DROPOUT = {"model__hidden_dropout": 0.1, "model__attention_dropout": 0.1}
ADAPTER = {"adapter": {"rank": 4}}
ROWS: list[Any] = [
    ({}, [{}, SELECTIVE | MIXTRAL, BLOCKS | DROPOUT, DOCUMENTS, ADAPTER]),
    ({"pp": 2, "vpp": 2}, [{}]),
    # what a layer keeps moves, whatever divides it: pipelines alone change when
    pytest.param({"tp": 2, "sp": True}, [MIXTRAL], marks=pytest.mark.nightly),
    pytest.param({"pp": 2}, [{"train__recompute": "full"}], marks=pytest.mark.nightly),
    pytest.param({"cp": 2}, [{}], marks=pytest.mark.nightly),
    pytest.param({"cp": 2, "cp_comm": "ring"}, [{}], marks=pytest.mark.nightly),
    pytest.param({"dp": 2, "ep": 2}, [MIXTRAL], marks=pytest.mark.nightly),
]


@pytest.mark.parametrize(("layout", "models"), ROWS, ids=str)
def test_moved_activations_change_no_bit(pool: Pool, layout: dict[str, Any], models: list[dict[str, Any]]) -> None:
    one = lean(case(**layout))
    runs = []
    for model in models:
        for num_layers in (None, 2):
            # layers that move do not add their gradients themselves, which rounds otherwise
            apart = {"model__megatron": {"gradient_accumulation_fusion": False}}
            config = one.config(**apart | model, train__offload_layers=num_layers)
            batches = documents_steps() if config.data.isolate_documents else two_steps()
            parameters = {} if config.adapter else initial_parameters(config)
            runs.append(Run(config, parameters, batches))
    ranks = pool.run(train_each, one.resolved(runs[0].config), runs)
    for rank in ranks:
        for plain, moved in zip(rank[::2], rank[1::2], strict=True):
            assert plain.num_gone == 0
            assert moved.num_back <= moved.num_gone
            assert_same(plain, moved)
    assert all(sum(rank[place].num_back for rank in ranks) for place in range(1, len(runs), 2))


def test_activations_of_layers_with_deeper_features_move_to_the_host(pool: Pool) -> None:
    each = case(4, num_layers=3, pp=2, first_stage_layers=2)
    changes: list[dict[str, Any]] = [{}, {"train__offload_layers": 1}, {"train__offload_layers": 2} | BLOCKS]
    configs = [test_images.config_of(each, "deepstack", test_images.TRAINED, **change) for change in changes]
    runs = [Run(config, images.initial("deepstack"), test_images.steps()) for config in configs]
    ranks = pool.run(train_each, each.resolved(configs[0]), runs)
    for plain, *others in ranks:
        assert plain.num_gone == 0
        assert {moved.outcome.steps[0].loss for moved in others} == {plain.outcome.steps[0].loss}
    assert all(sum(rank[place].num_gone for rank in ranks) for place in (1, 2))
    oracle = test_images.reference("deepstack", tuple(test_images.TRAINED.items()))
    for moved, config in zip(ranks[0], configs, strict=True):
        test_images.measured(moved.outcome, oracle, config).assert_below()


def assert_same(plain: Moved, moved: Moved) -> None:
    """Compares both runs bit for bit."""
    assert [(each.loss, each.grad_norm) for each in plain.outcome.steps] == [
        (each.loss, each.grad_norm) for each in moved.outcome.steps
    ]
    found = [
        [outcome.parameters or {}, *(step.gradients or {} for step in outcome.steps)]
        for outcome in (plain.outcome, moved.outcome)
    ]
    for one, other in zip(*found, strict=True):
        assert one.keys() == other.keys()
        assert [name for name in one if not np.array_equal(one[name], other[name])] == []


ROWS_OF_INPUT = 1024


class Layer(nn.Module):
    """Keeps its input, a block of memory with two views that are multiplied, and a few numbers."""

    def __init__(self, width: int, next_width: int) -> None:
        super().__init__()
        self.inner = nn.Parameter(torch.randn(width, 2 * width, dtype=torch.float64))
        self.outer = nn.Parameter(torch.randn(width, next_width, dtype=torch.float64))
        self.storages: list[StorageWeakRef] = []

    def forward(self, hidden: Tensor) -> Tensor:
        made: Any = StorageWeakRef
        both = hidden @ self.inner
        first, second = both.chunk(2, dim=-1)
        product = first * second.t().t()
        self.storages = [made(both.untyped_storage()), made(product.untyped_storage())]
        scale = product.mean(0, keepdim=True).tanh()  # small
        return (product * scale) @ self.outer


class Block(nn.Module):
    """Has as much of a transformer block as the code reads."""

    pre_process, final_layernorm = True, None
    input_tensor: Tensor | None = None

    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(*pair) for pair in itertools.pairwise(widths))

    def forward(self, hidden_states: Tensor) -> Tensor:
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        return hidden_states


WIDTHS = [40, 48, 56, 64, 72]
CPU = torch.device("cpu")


@pytest.fixture
def block() -> Iterator[Block]:
    """Yields four layers with the same weights in each test."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield Block(WIDTHS)


def rows() -> Tensor:
    """Returns the input; nothing else holds it."""
    return torch.linspace(-1, 1, ROWS_OF_INPUT * WIDTHS[0], dtype=torch.float64).view(ROWS_OF_INPUT, WIDTHS[0]).clone()


def gradients(block: Block) -> list[Tensor]:
    found = [parameter.grad for parameter in block.parameters()]
    for parameter in block.parameters():
        parameter.grad = None
    assert all(each is not None for each in found)
    return [each for each in found if each is not None]


def test_memory_moves_once_and_weights_and_small_tensors_stay(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "SMALLEST_MOVED_BYTES", 2**14)  # a weight is larger
    block(hidden_states=rows()).sum().backward()
    expected = gradients(block)
    place = move_activations([block], 3, CPU)
    with Copies() as copies:
        output = block(hidden_states=rows())
        # the input, both factors in one block, their product, and that scaled; 8 bytes each
        sizes = [8 * ROWS_OF_INPUT * part for width in WIDTHS[:3] for part in (width, 2 * width, width, width)]
        assert sorted(copies.gone) == sorted(sizes)
        assert copies.back == []
        # the third layer had time to move during the fourth, which stays
        alive = [[not each.expired() for each in layer.storages] for layer in block.layers]  # type: ignore[union-attr]
        assert alive == [[False, False]] * 3 + [[True, True]]
        output.sum().backward()
    assert sorted(copies.back) == sorted(sizes)
    assert all(torch.equal(*pair) for pair in zip(gradients(block), expected, strict=True))
    # all of it is free again, so another pass takes no more memory
    size = place.host.size_bytes
    block(hidden_states=rows()).sum().backward()
    assert place.host.size_bytes == size
    assert len(place.host._free) * PIECE_BYTES == size


def test_two_passes_at_a_time_do_not_mix(block: Block) -> None:
    inputs = [rows(), rows().flip(0)]
    for each in inputs:
        block(hidden_states=each).sum().backward()
    expected = gradients(block)
    move_activations([block], 4, CPU)
    outputs = [block(hidden_states=each) for each in inputs]
    for each in outputs:
        each.sum().backward()
    assert all(torch.equal(*pair) for pair in zip(gradients(block), expected, strict=True))


def test_a_layer_comes_back_while_the_one_after_it_is_in_backward(
    block: Block, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    wanted = activations.KeptByLayer.want

    def want(self: activations.KeptByLayer) -> None:
        if not self._is_wanted and self._known:
            seen.append("comes back")
        wanted(self)

    monkeypatch.setattr(activations.KeptByLayer, "want", want)
    for number, layer in enumerate(block.layers):
        layer.register_full_backward_hook(lambda *given, number=number: seen.append(f"layer {number} is done"))
    move_activations([block], 3, CPU)
    block(hidden_states=rows().requires_grad_()).sum().backward()
    assert seen == [
        "comes back",  # layer 2, when the backward pass of layer 3 begins
        "layer 3 is done",
        "comes back",
        "layer 2 is done",
        "comes back",
        "layer 1 is done",
        "layer 0 is done",
    ]


def test_without_gradients_and_after_a_failed_pass_nothing_moves(block: Block) -> None:
    move_activations([block], 4, CPU)
    with Copies() as copies:
        with torch.no_grad():
            block(hidden_states=rows())
        with pytest.raises(RuntimeError, match="shapes"):
            block(hidden_states=rows()[:, :7])
        before = len(copies.gone)
        weight = torch.ones(ROWS_OF_INPUT, WIDTHS[0], dtype=torch.float64, requires_grad=True)
        (weight * rows()).sum().backward()
        assert len(copies.gone) == before
    block(hidden_states=rows()).sum().backward()


def test_what_a_stage_received_stays(block: Block) -> None:
    """The schedule holds the received tensor for its gradient, so moving it would free nothing."""
    block.pre_process = False
    received = rows().requires_grad_()
    block.input_tensor = received
    move_activations([block], 1, CPU)
    with Copies() as copies:
        block(hidden_states=received)
    assert sorted(copies.gone) == [8 * ROWS_OF_INPUT * WIDTHS[0] * part for part in (1, 1, 2)]
