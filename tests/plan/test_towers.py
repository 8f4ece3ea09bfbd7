"""Memory, FLOPs and time of vision towers in `mtrain check` and `mtrain plan`, compared with transformers' modules."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from mtrain import arch
from mtrain.arch.layout import Layout
from mtrain.config import Config
from mtrain.config.schema.vision import VisionSection
from mtrain.config.towers import description_of
from mtrain.core.layers.vision import built_tower
from mtrain.plan.search.cost import Workload, step_cost
from mtrain.plan.search.hardware import GIB, USABLE_MEMORY, Cluster, gpu_named
from mtrain.plan.search.search import search
from tests.config.samples import config
from tests.config.test_vision import GEMMA3, GEMMA4, MISTRAL3, VISION
from tests.parity.images import Picture, drawn
from tests.plan.allocations import Allocations
from tests.plan.memory_ranks import measured_with
from tests.plan.search.test_search import all_that_fit
from tests.plan.test_memory_of_families import WIDE
from tests.pool import Pool

TOWER: dict[str, Any] = VISION | {
    "num_layers": 3,
    "hidden_size": 96,
    "ffn_hidden_size": 256,
    "rope_sections": (4, 2, 2),
    "freeze_tower": False,
    "freeze_projector": False,
}
HIDDEN = 64
"""Width of the language model."""
FROZEN = {"freeze_tower": True, "freeze_projector": True}
LORA = {"adapter__kind": "lora", "adapter__rank": 4}
CASES: dict[str, tuple[Layout, dict[str, Any], dict[str, Any]]] = {
    "all": (Layout(), TOWER | {"deepstack": (0, 1)}, {}),
    "all, bf16": (Layout(), TOWER, {"train__precision": "bf16"}),
    "all, recomputed": (Layout(), TOWER | {"deepstack": (0, 1)}, {"train__recompute": "full"}),
    "tower, recomputed": (Layout(), TOWER | {"freeze_projector": True}, {"train__recompute": "full"}),
    "all, recomputed, bf16": (
        Layout(),
        TOWER | {"deepstack": (0, 1)},
        {"train__recompute": "full", "train__precision": "bf16"},
    ),
    "projector": (Layout(), TOWER | {"freeze_tower": True, "deepstack": (2,)}, {}),
    "none": (Layout(), TOWER | FROZEN, {"model__num_layers": 1}),
    "tower alone": (Layout(pp=2), TOWER | {"freeze_language_model": True}, {"layout__pp": 2}),
    "shared": (Layout(tp=2, sp=True), TOWER, {"layout__tp": 2, "layout__sp": True}),
    "with adapters": (Layout(), TOWER, LORA | {"train__precision": "bf16"}),
    "projector with adapters": (Layout(), TOWER | {"freeze_tower": True}, LORA | {"adapter__base_dtype": "bf16"}),
    "muon": (Layout(), TOWER | {"freeze_projector": True}, {"optimizer__kind": "muon"}),
    "muon, alone": (Layout(), TOWER | {"freeze_language_model": True}, {"optimizer__kind": "muon"}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_memory_of_a_tower_is_what_its_patches_take(name: str, pool: Pool) -> None:
    """Every microbatch has an image of 24 x 16 patches and one of 4 x 4, which ranks that share the work divide."""
    layout, vision, changes = CASES[name]
    # whole logits, which the estimate assumes: image tokens have none in a chunk
    given = config(
        **{"train__precision": "fp32", "loss__chunk_tokens": "whole", **WIDE, "model__vision": vision, **changes}
    )
    batch = drawn([[Picture(2, 24, 16), Picture(110, 4, 4)]] * 4, 0, (128,))
    ((found,), *_) = pool.run(measured_with, layout, [given], batch)
    estimate = arch.memory_per_rank(given, layout, 0, 24 * 16 + (4 * 4 if layout.tp == 1 else 0))
    states = (estimate.weights_bytes, estimate.gradients_bytes, estimate.optimizer_bytes)
    assert (found.weights_bytes, found.gradients_bytes, found.optimizer_bytes) == states
    whole = sum(states) + max(found.forward_backward_bytes, found.update_bytes)
    assert estimate.total_bytes == pytest.approx(whole, rel=0.1)
    text = arch.memory_per_rank(given, layout, 0)
    assert text.activations_bytes < estimate.activations_bytes or vision["freeze_tower"], "random tokens have no images"


def test_a_stage_holds_the_features_that_it_passes_on(pool: Pool) -> None:
    """The second of three stages has two microbatches in flight, each with features of 128 tokens for two depths."""
    layout, batch = Layout(pp=3), drawn([[Picture(2, 24, 16)]] * 4, 0, (128,))
    changes = {"train__precision": "fp32", **WIDE, "model__vision": TOWER, "layout__pp": 3, "model__num_layers": 3}
    configs = [config(**changes, model__mtp_depths=depths) for depths in (0, 2)]
    without, ahead = pool.run(measured_with, layout, configs, batch)[1]
    estimates = [arch.memory_per_rank(each, layout, 1).activations_bytes for each in configs]
    assert estimates[1] - estimates[0] == 2 * 2 * 128 * 128 * 4
    assert ahead.forward_backward_bytes - without.forward_backward_bytes >= estimates[1] - estimates[0]


KINDS: dict[str, dict[str, Any]] = {
    "qwen3_vl": VISION,
    "gemma3": GEMMA3 | {"num_positions": 144},
    "mistral3": MISTRAL3,
    "gemma4": GEMMA4 | {"standardize": True},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(6))
def test_a_patch_takes_what_transformers_saves_for_it(seed: int, kind: str) -> None:
    draw = random.Random(seed)
    num_layers, heads, head_dim = draw.randint(1, 4), draw.randint(2, 4), draw.choice((48, 64))
    layers = sorted(draw.sample(range(num_layers - 1), draw.randint(0, num_layers - 1)))
    section = VisionSection.model_validate(
        KINDS[kind]
        | {
            "num_layers": num_layers,
            "hidden_size": heads * head_dim,
            "ffn_hidden_size": draw.randint(100, 999),
            "num_attention_heads": heads,
            "deepstack": layers if kind == "qwen3_vl" else (),
            "freeze_tower": seed % 3 == 1,
            "freeze_projector": seed % 3 == 2,
        }
    )
    dtype = draw.choice((torch.float32, torch.bfloat16))
    tower, is_half = built_tower(section, HIDDEN, 1e-5).to(dtype), dtype.itemsize < 4
    description = description_of(section)
    for name, parameter in tower.named_parameters():
        parameter.requires_grad_(description.is_trained(name, section))
    uncounted = (
        saved_bytes(tower, section) / len(inputs(section)[0])
        - description.kept_patch_elements(section, HIDDEN, is_half) * dtype.itemsize
    )
    # both cosines in float32; statistics of norms and attention, and weights of positions; a mask of each image
    mask = (96**2 + 64**2) / 160 * dtype.itemsize if kind == "mistral3" else 0
    if kind == "gemma4":  # weights of averages, statistics of norms of heads, and weights of norms in float32
        mask += 4 * 24 + num_layers * (28 * heads + (24 * section.hidden_size / 160 if is_half else 0))
    assert 0 <= uncounted <= 2 * head_dim * 4 + 40 * (num_layers + 2) + mask
    tower.requires_grad_(False)
    with Allocations() as passing:
        tower(*inputs(section))
    # others have one image at a time
    num_passing = len(inputs(section)[0]) if kind in ("qwen3_vl", "gemma3") else 96
    expected = num_passing * description.passing_patch_elements(section, is_half) * dtype.itemsize
    assert passing.peak == pytest.approx(expected, rel=0.25)


def inputs(section: VisionSection) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns patches and grids: of two images of 160 patches together, or of one of a fixed size."""
    if section.kind == "gemma3":
        return torch.randn(144, section.patch_elements), torch.tensor([[1, 12, 12]])
    return torch.randn(160, section.patch_elements), torch.tensor([[1, 8, 12], [1, 4, 16]])


def saved_bytes(tower: torch.nn.Module, section: VisionSection) -> int:
    """Returns the bytes that autograd saves in a forward pass, without parameters."""
    own = {parameter.untyped_storage()._cdata for parameter in tower.parameters()}
    saved: dict[int, Any] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = tower(*inputs(section))
    assert output.pooler_output.requires_grad
    return sum(tensor.untyped_storage().nbytes() for place, tensor in saved.items() if place not in own)


def with_images(
    vision: dict[str, Any] | None, max_pixels: int | None = None, seq_length: int = 1024, **changes: Any
) -> Config:
    """Configures a run on records, which may have images in every token."""
    images = {} if max_pixels is None else {"max_pixels": max_pixels}
    data = {"kind": "sft", "seq_length": seq_length, "train": [{"path": "a.jsonl"}], "tokenizer": "t", "images": images}
    return config(model__hidden_size=512, data=data, model__vision=vision, **changes)


LARGE = TOWER | {
    "rope_sections": (16, 8, 8),
    "hidden_size": 512,
    "ffn_hidden_size": 2048,
    "num_layers": 12,
    "num_attention_heads": 8,
}
CLUSTER = Cluster(gpu_named("h100"))


def seconds(given: Config, layout: Layout) -> float:
    return step_cost(Workload(given, layout, CLUSTER)).time.total


@pytest.mark.parametrize(
    "vision", [LARGE, LARGE | {"freeze_tower": True}, LARGE | FROZEN], ids=["all", "projector", "none"]
)
def test_the_time_of_a_step_counts_the_products_of_the_tower(vision: dict[str, Any]) -> None:
    given, text = with_images(vision), with_images(None)
    flops = arch.run_flops_per_token(given) - arch.run_flops_per_token(text)
    least = flops * 1024 * given.train.global_batch_size / CLUSTER.gpu.flops
    added = seconds(given, Layout()) - seconds(text, Layout())
    assert least < added < 4 * least


def test_a_tower_that_is_recomputed_takes_another_forward_pass() -> None:
    once, again = (
        {
            vision["freeze_tower"]: seconds(with_images(vision, train__recompute=recompute), Layout())
            - seconds(with_images(None, train__recompute=recompute), Layout())
            for vision in (LARGE, LARGE | {"freeze_tower": True})
        }
        for recompute in ("none", "full")
    )
    assert again[True] == pytest.approx(once[True])  # a frozen tower
    forward = seconds(with_images(LARGE | FROZEN), Layout()) - seconds(with_images(None), Layout())
    assert again[False] - once[False] == pytest.approx(forward, rel=0.1)


def test_ranks_that_see_the_same_rows_share_the_time_of_the_tower() -> None:
    def of_tower(layout: Layout) -> float:
        return seconds(with_images(LARGE | FROZEN), layout) - seconds(with_images(None), layout)

    alone = of_tower(Layout())
    assert of_tower(Layout(tp=2)) == pytest.approx(alone, rel=0.01)
    for shared in (Layout(tp=2, sp=True), Layout(cp=2)):
        assert of_tower(shared) == pytest.approx(alone / 2, rel=0.1)


def test_stages_send_the_features_that_depths_read() -> None:
    def num_bytes(given: Config) -> float:
        sent = step_cost(Workload(given, Layout(pp=2), CLUSTER)).sent
        return sent.nvlink_bytes + sent.network_bytes

    of_text, with_depths = (num_bytes(with_images(vision, model__mtp_depths=2)) for vision in (None, LARGE))
    assert with_depths == 3 * num_bytes(with_images(LARGE)) == 3 * of_text > 0


def test_smaller_images_attend_to_fewer_patches() -> None:
    given, small = with_images(LARGE | FROZEN), with_images(LARGE | FROZEN, max_pixels=64 * 4**2)
    pairs = (arch.run_flops_per_token(given) - arch.run_flops_per_token(small)) * 1024
    patches = 4 * 1024
    assert pairs == pytest.approx(12 * 4 * 512 * patches * (4096 - 64))


def test_a_plan_divides_patches_where_memory_is_short_and_overlooks_nothing_faster() -> None:
    given, memory = with_images(LARGE, seq_length=8192), int(1.6 * GIB)
    found = search(given, 2, CLUSTER, memory, 1)
    fastest, *_ = all_that_fit(given, 2, int(memory * USABLE_MEMORY))
    assert found.choices[0].cost.time.total == pytest.approx(fastest)
    assert found.choices[0].layout.num_sharing_images > 1
    text = search(with_images(None, seq_length=8192), 2, CLUSTER, memory, 1)
    assert text.choices[0].layout.num_sharing_images == 1
