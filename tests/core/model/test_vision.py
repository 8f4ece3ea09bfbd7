"""The vision tower's own parts: the division of work, exact buffers, and rotary positions on three axes."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from mtrain.arch import Work, flops_of_step
from mtrain.arch.features.outside import num_frozen_parameters, num_tower_parameters
from mtrain.base.errors import DataError
from mtrain.config.schema.loss import LossSection
from mtrain.config.schema.vision import VisionSection
from mtrain.config.towers import description_of
from mtrain.core.batch.collate import RowForm, collate, loss_terms
from mtrain.core.batch.images import MicrobatchImages, SampleImages
from mtrain.core.batch.sample import Sample
from mtrain.core.layers.attention.rotary import Rotary, ThreeAxesRotary
from mtrain.core.layers.vision import built_tower, divided
from mtrain.core.step.totals import token_counts
from tests.config.samples import config
from tests.messages import refuses

VISION = VisionSection(
    num_layers=2,
    hidden_size=16,
    ffn_hidden_size=24,
    num_attention_heads=2,
    patch_size=4,
    num_positions=16,
    rope_sections=(4, 2, 2),
    image_token=5,
)


GEMMA3 = VISION.model_copy(update={"kind": "gemma3", "frames_per_patch": 1, "num_positions": 36, "rope_sections": None})


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=30), st.integers(1, 9))
def test_every_image_has_one_rank_and_no_rank_much_more_work(patches: list[int], num_ranks: int) -> None:
    shares = divided(patches, num_ranks)
    assert len(shares) == num_ranks
    assert sorted(image for share in shares for image in share) == list(range(len(patches)))
    assert [sorted(share) for share in shares] == shares
    loads = [sum(patches[image] for image in share) for share in shares]
    # without its smallest image, the rank with most has no more than the one with least
    heaviest = loads.index(max(loads))
    assert max(loads) - min(patches[image] for image in shares[heaviest]) <= min(loads)


MISTRAL3 = VisionSection.model_validate(
    VISION.model_dump() | {"kind": "mistral3", "rope_sections": None, "num_positions": 1, "frames_per_patch": 1}
)


GEMMA4 = MISTRAL3.model_copy(update={"kind": "gemma4", "num_positions": 9, "standardize": True})


def test_norms_of_mistral_3_begin_at_one() -> None:
    tower = built_tower(MISTRAL3, 32, 1e-5)
    assert description_of(MISTRAL3).shapes(MISTRAL3, 32) == {
        name: tuple(each.shape) for name, each in tower.named_parameters()
    }
    norms = [each for each in tower.parameters() if each.ndim == 1]
    assert len(norms) == 2 + 2 * MISTRAL3.num_layers
    assert all(torch.equal(each, torch.ones_like(each)) for each in norms)


@pytest.mark.parametrize("vision", [VISION, GEMMA3, MISTRAL3, GEMMA4], ids=lambda each: each.kind)
def test_shapes_are_those_of_the_tower_of_transformers(vision: VisionSection) -> None:
    tower = built_tower(vision, 32, 1e-5)
    assert description_of(vision).shapes(vision, 32) == {
        name: tuple(each.shape) for name, each in tower.named_parameters()
    }
    assert num_tower_parameters(vision, 32) == sum(each.numel() for each in tower.parameters())
    assert num_tower_parameters(None, 32) == num_frozen_parameters(None, 32) == 0
    learns = vision.model_copy(update={"freeze_projector": False})
    assert num_frozen_parameters(vision, 32) - num_frozen_parameters(learns, 32) == sum(
        each.numel()
        for name, each in tower.named_parameters()
        if name.startswith(("merger.", "multi_modal_projector.", "embed_vision."))
    )
    scales = {name: each for name, each in tower.named_parameters() if "norm" in name and name.endswith("weight")}
    assert scales
    for name, each in scales.items():  # the projector of Gemma 3 multiplies by 1 + weight
        assert set(each.tolist()) == {0.0 if name.startswith("multi_modal_projector.mm_") else 1.0}, name


def test_equal_axes_are_one_position_to_the_bit() -> None:
    frequencies = torch.rand(8)
    positions = torch.randint(0, 1000, (3, 7))
    rotary = ThreeAxesRotary(frequencies, (4, 2, 2))
    one = Rotary(frequencies)(positions)
    assert torch.equal(rotary(positions), one)
    assert torch.equal(rotary(positions.unsqueeze(-1).repeat(1, 1, 3)), one)


@pytest.mark.parametrize(("sections", "axes"), [((4, 2, 2), [0, 1, 2, 0, 1, 2, 0, 0]), ((5, 1, 0), [0, 1, 0, 0, 0, 0])])
def test_pairs_take_axes_in_turn(sections: tuple[int, int, int], axes: list[int]) -> None:
    rotary = ThreeAxesRotary(torch.ones(len(axes)), sections)
    angles = rotary(torch.tensor([[[3, 5, 7]]]))
    assert angles.flatten().tolist() == [[3.0, 5.0, 7.0][axis] for axis in axes] * 2


TERMS = loss_terms(LossSection())
FORM = RowForm(8, TERMS, is_packed=True, isolates_documents=True, patches_per_feature=4)


def with_images(first: int, places: list[int], num_features: int) -> Sample:
    """Builds a sample whose tokens, pixels and axes differ from those of other samples."""
    length = len(places)
    images = SampleImages(
        pixels=np.full((4 * num_features, 2), first, np.float32),
        grids=np.array([[1, 2, 2 * num_features]]),
        places=np.array(places),
        axes=np.arange(3 * length).reshape(length, 3) + 100 * first,
    )
    ids = np.arange(first, first + length)
    return Sample(ids, ids, np.ones(length), images=images)


def test_features_are_counted_over_the_samples_of_a_microbatch() -> None:
    text = Sample(np.arange(2), np.arange(2), np.ones(2))
    rows = [[with_images(1, [-1, 0, 1], 2), text, with_images(2, [0, -1], 3)], [with_images(3, [-1, 1, -1, 0], 2)]]
    images = collate(rows, FORM, None).images
    assert images is not None
    assert images.places.tolist() == [[-1, 0, 1, -1, -1, 2, -1, -1], [-1, 6, -1, 5, -1, -1, -1, -1]]
    assert images.axes[0, :, 1].tolist() == [101, 104, 107, 0, 1, 201, 204, 0], "padding begins anew as well"
    assert images.axes[1, :, 2].tolist() == [302, 305, 308, 311, 0, 1, 2, 3]
    assert images.pixels[:, 0].tolist() == [1] * 8 + [2] * 12 + [3] * 8
    assert images.grids.tolist() == [[1, 2, 4], [1, 2, 6], [1, 2, 4]]
    assert collate([[text]], FORM, None).images is None


def test_tokens_of_an_image_see_its_end_and_their_pairs_are_counted() -> None:
    rng = np.random.default_rng(5)
    form = RowForm(40, TERMS, is_packed=True, isolates_documents=True, patches_per_feature=4, bidirectional_images=True)
    for window in (None, 3, 7):
        rows, seen = [], []
        for _ in range(3):
            samples, pairs, end = list[Sample](), list[tuple[int, int]](), 0
            for _ in range(int(rng.integers(1, 4))):
                counts = rng.integers(1, 5, rng.integers(0, 3)).tolist()
                starts, places = list[int](), list[int]()
                for count in counts:
                    places += [-1] * int(rng.integers(0, 2))
                    starts.append(len(places))
                    places += range(sum(each >= 0 for each in places), sum(each >= 0 for each in places) + count)
                places += [-1] * int(rng.integers(1, 3))
                whole = with_images(1, places, sum(counts))
                images = SampleImages(
                    whole.images.pixels,  # type: ignore[union-attr]
                    np.array([[1, 2, 2 * count] for count in counts]).reshape(-1, 3),
                    whole.images.places,  # type: ignore[union-attr]
                    whole.images.axes,  # type: ignore[union-attr]
                )
                samples.append(replace(whole, images=images if counts else None))
                for query in range(len(places)):
                    last = max([query, *(s + n - 1 for s, n in zip(starts, counts, strict=True) if s <= query < s + n)])
                    first = 0 if window is None else max(0, query - window + 1)
                    pairs.append((end + last + 1, last - first + 1))
                end += len(places)
            rows.append(samples)
            seen.append(pairs)
        batch = collate(rows, replace(form, window=window), None)
        assert batch.num_window_pairs == sum(count for pairs in seen for _, count in pairs)
        assert batch.num_window_pairs <= batch.num_pairs
        if batch.images is not None:
            assert batch.images.ends is not None
            for row, pairs in zip(batch.images.ends.tolist(), seen, strict=True):
                assert row == [*(stop for stop, _ in pairs), *range(len(pairs) + 1, 41)]


def test_a_model_of_text_refuses_images() -> None:
    form = RowForm(8, TERMS)
    with refuses(DataError, "model.vision"):
        collate([[with_images(1, [0], 1)]], form, None)


@pytest.mark.parametrize("frozen", [(), ("freeze_tower",), ("freeze_projector",)])
def test_flops_of_the_tower_of_gemma_3_are_those_that_torch_counts(frozen: tuple[str, ...]) -> None:
    update = {name: name in frozen for name in ("freeze_tower", "freeze_projector")}
    vision = GEMMA3.model_copy(update=update)
    tower: Any = built_tower(vision, 32, 1e-5)
    tower.vision_tower.set_attn_implementation("eager")
    for name, parameter in tower.named_parameters():
        is_projector = name.startswith("multi_modal_projector.")
        parameter.requires_grad_(not update["freeze_projector" if is_projector else "freeze_tower"])
    with FlopCounterMode(display=False) as counter:
        tower(torch.zeros(72, 48), grid_thw=torch.tensor([[1, 6, 6]] * 2)).pooler_output.sum().backward()
    model = config(model__hidden_size=32, model__vision=vision).model
    assert flops_of_step(model, Work(0, 0, 0, 0, 72, 2 * 36**2)) == counter.get_total_flops() > 0


@pytest.mark.parametrize("given", [{}, {"deepstack": (0,)}, MISTRAL3.model_dump()], ids=["one", "deeper", "mistral3"])
@pytest.mark.parametrize("frozen", [(), ("freeze_tower",), ("freeze_projector",), ("freeze_tower", "freeze_projector")])
def test_flops_of_the_tower_are_those_that_torch_counts(frozen: tuple[str, ...], given: dict[str, Any]) -> None:
    names = ("freeze_tower", "freeze_projector")
    update = {name: name in frozen for name in names}
    vision = VISION.model_copy(update=given | update)
    tower: Any = built_tower(vision, 32, 1e-5)
    for module in tower.modules():
        if hasattr(module, "set_attn_implementation"):
            module.set_attn_implementation("eager")  # of whose products torch counts every one
    for name, parameter in tower.named_parameters():
        parameter.requires_grad_(description_of(vision).is_trained(name, vision))
    grids = [[1, 4, 6], [1, 2, 2], [1, 8, 4]]
    images = MicrobatchImages(
        torch.zeros(60, vision.patch_elements), torch.tensor(grids), torch.zeros(1, 1), torch.zeros(1, 1, 3)
    )
    with FlopCounterMode(display=False) as counter:
        output = tower(images.pixels, grid_thw=images.grids)
        features = sum(each.sum() for each in (output.pooler_output, *output.deepstack_features))
        if features.requires_grad:
            features.backward()
    counts = token_counts([replace(collate([[Sample(*np.ones((3, 4)))]], FORM, None), images=images)])
    sections = {"rope_sections": None if vision.kind == "mistral3" else (1, 1, 0)}
    model = config(model__hidden_size=32, model__vision=vision.model_copy(update=sections)).model
    work = Work(0, 0, 0, 0, counts.patches, counts.patch_pairs)
    assert flops_of_step(model, work) == counter.get_total_flops() > 0
