"""Images in Qwen, Gemma and Mistral 3: samples, and the oracle, transformers in float64, one sample at a time."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from mtrain.arch.lr import learning_rate
from mtrain.config import Config
from mtrain.core.batch.images import SampleImages
from mtrain.core.batch.sample import shifted
from mtrain.hf.schema.registry import family_of
from tests.parity import images_ahead
from tests.parity.batches import BATCH, SEQ, GlobalBatch
from tests.parity.cases import case
from tests.parity.image_models import END, IMAGE, KINDS, MERGE, PATCH, START, WITH_AXES, Kind
from tests.parity.ranks import Arrays

_OF_TOWER = {
    "model.visual.": "vision.",
    "model.vision_tower.": "vision.vision_tower.",
    "model.multi_modal_projector.": "vision.multi_modal_projector.",
    "model.embed_vision.": "vision.embed_vision.",
}
"""Prefixes of transformers' names, and ours."""


def _own_name(name: str) -> str | None:
    """Returns our name of a parameter of the tower; None for one of the language model."""
    return next(
        (ours + name.removeprefix(theirs) for theirs, ours in _OF_TOWER.items() if name.startswith(theirs)), None
    )


def _is_projector(name: str) -> bool:
    return any(part in name for part in ("merger", "multi_modal_projector", "embed_vision"))


_CONSTANTS = {"layer_scalar": 1.0, "std_bias": 0.0, "std_scale": 1.0}
"""Buffers that files hold, which no run trains, and the means from which they are drawn."""


def tensors_of(model: Any) -> dict[str, Tensor]:
    """Returns the parameters and constants of transformers' model."""
    constants = {name: each for name, each in model.named_buffers() if name.endswith(tuple(_CONSTANTS))}
    return dict(model.named_parameters()) | constants


@cache
def model_of(kind: Kind) -> Any:
    """Draws a model of transformers in float64; callers must not change it."""
    torch.manual_seed(11)
    of_kind, described = KINDS[kind]
    model = of_kind(described()).double()
    model.get_input_embeddings().padding_idx = None  # whose embedding would have no gradient
    for name, parameter in model.named_parameters():
        is_scale = ("norm" in name or "ln_pre" in name) and name.endswith("weight")
        # the others are stored minus 1
        plain = ("visual", "linear_attn", "vision_tower")
        is_scale &= kind.startswith(("deepstack", "mistral3", "gemma4")) or any(part in name for part in plain)
        # scores are not divided, which Gemma 4 leaves to the weights of these norms; a steep softmax has fewer digits
        mean = 0.4 if kind.startswith("gemma4") and name.endswith(("q_norm.weight", "k_norm.weight")) else 1.0
        torch.nn.init.normal_(parameter, mean=mean if is_scale else 0.0, std=0.1)
    for ending, mean in _CONSTANTS.items():
        for name, buffer in model.named_buffers():
            if name.endswith(ending):
                torch.nn.init.normal_(buffer, mean=mean, std=0.2)
    return model


def knobs(kind: Kind, **vision: bool) -> dict[str, Any]:
    """Returns changes of the configuration that describe the model, as they are read from its config.json."""
    described = json.loads(model_of(kind).config.to_json_string(use_diff=False))
    family = family_of(described)
    model = family.with_vision(family.model(described), described)[1]
    assert model.vision is not None
    depths = int(kind.startswith("ahead"))
    model = model.model_copy(update={"vision": model.vision.model_copy(update=vision), "mtp_depths": depths})
    return {f"model__{key}": value for key, value in model.model_dump(exclude={"vocab_multiple"}).items()}


class Picture(NamedTuple):
    """An image in a sample."""

    start: int
    """Position of its first token."""
    rows: int
    columns: int
    """Height and width in patches."""

    @property
    def num_tokens(self) -> int:
        """Number of features, and so of tokens."""
        return self.rows * self.columns // MERGE**2


Layout = Sequence[Sequence[Picture]]
"""Images of each sample."""

MIXED: Layout = [
    [Picture(5, 4, 8)],  # 8 features over the border of two chunks of cp=2, and of cp=4
    [],
    [Picture(1, 2, 2), Picture(10, 4, 4)],
    [Picture(2, 6, 4), Picture(14, 4, 6)],
    [],
    [Picture(20, 2, 4)],
    [],
    [Picture(0, 4, 4)],  # a sample that begins with an image
    [Picture(3, 2, 2)],
    [],
    [],
    [Picture(12, 8, 4)],
    [],
    [Picture(4, 4, 2), Picture(8, 2, 6), Picture(13, 2, 2)],
    [],
    [Picture(6, 6, 6)],
]
"""Images of different sizes; some samples have none."""
SQUARES: Layout = [
    [Picture(5, 6, 6)],  # 9 features over the border of two chunks of cp=2, and of cp=4
    [],
    [Picture(0, 6, 6), Picture(10, 6, 6)],  # a sample that begins with an image
    [Picture(2, 6, 6), Picture(12, 6, 6), Picture(22, 6, 6)],
    [],
    [Picture(22, 6, 6)],  # up to the last token that is read
    *[[]] * 5,
    [Picture(12, 6, 6)],
    *[[]] * 3,
    [Picture(13, 6, 6)],
]
"""Images of one size."""
ONE_SQUARE: Layout = [[Picture(11, 6, 6)], *[[]] * (BATCH - 1)]
ONE: Layout = [[Picture(13, 4, 6)], *[[]] * (BATCH - 1)]
"""One image in the step: all other ranks have none, neither of data nor of work."""


def drawn(layout: Layout, seed: int, lengths: Sequence[int] = (SEQ,), kind: Kind = "dense") -> GlobalBatch:
    """Draws the samples of a step.

    Args:
        lengths: Numbers of positions, at least as many as the images need; taken in turn.
        kind: Model whose images they are.
    """
    rng = np.random.default_rng(seed)
    return [_sample(rng, pictures, lengths[slot % len(lengths)], kind) for slot, pictures in enumerate(layout)]


def _tokens(picture: Picture, kind: Kind) -> NDArray[np.int64]:
    """Returns the token ids of an image."""
    rows, columns = picture.rows // MERGE, picture.columns // MERGE
    if kind != "mistral3":
        return np.full(rows * columns, IMAGE)
    # a token after each row of features, and another after the last
    tokens = np.full((rows, columns + 1), IMAGE)
    tokens[:, -1], tokens[-1, -1] = START, END
    return tokens.reshape(-1)


def _sample(rng: np.random.Generator, pictures: Sequence[Picture], length: int, kind: Kind) -> Any:
    length = max([length, *(picture.start + len(_tokens(picture, kind)) + 1 for picture in pictures)])
    ids = rng.integers(0, IMAGE, length + 1)
    axes = np.repeat(np.arange(length + 1)[:, None], 3, axis=1)
    for picture in pictures:
        tokens = _tokens(picture, kind)
        start, end = picture.start, picture.start + len(tokens)
        assert not (ids[start:end] == IMAGE).any(), "images overlap"
        ids[start:end] = tokens
        if kind not in WITH_AXES:
            continue  # tokens of an image count like text
        # rows and columns of an image count from the position after the text, and so does the text after the longer one
        at = axes[start, 0]
        grid = np.indices((1, picture.rows // MERGE, picture.columns // MERGE)).reshape(3, -1).T
        axes[start:end] = at + grid
        following = at + max(picture.rows, picture.columns) // MERGE
        axes[end:] = (following + np.arange(length + 1 - end))[:, None]
    places = np.where(ids == IMAGE, np.cumsum(ids == IMAGE) - 1, -1)
    mask = (rng.random(length) < 0.6) * rng.choice([1.0, 0.5], length)
    mask[places[1:] >= 0] = 0.0  # no placeholder is predicted
    sample = shifted(ids, mask)
    if not pictures:
        return sample
    num_patches = sum(picture.rows * picture.columns for picture in pictures)
    return replace(
        sample,
        images=SampleImages(
            pixels=rng.normal(size=(num_patches, 3 * (2 if kind in WITH_AXES else 1) * PATCH**2)).astype(np.float32),
            grids=np.array([[1, picture.rows, picture.columns] for picture in pictures]),
            places=places[:-1],
            axes=axes[:-1],
        ),
    )


class Exact(NamedTuple):
    """Results of the oracle."""

    losses: list[float]
    norms: list[float]
    gradients: list[Arrays]
    parameters: Arrays


def initial(kind: Kind) -> Arrays:
    """Returns the parameters by our names."""
    return ours_of(tensors_of(model_of(kind)), kind)


def ours_of(tensors: dict[str, Tensor], kind: Kind) -> Arrays:
    """Returns parameters of transformers by our names."""
    section = case(num_layers=2).config(**knobs(kind)).model
    tower = {own: value.detach().clone() for name, value in tensors.items() if (own := _own_name(name)) is not None}
    text = {name: value for name, value in tensors.items() if _own_name(name) is None}
    return {name: value.numpy() for name, value in (images_ahead.parameters(text, section) | tower).items()}


def exact(kind: Kind, config: Config, batches: Sequence[GlobalBatch]) -> Exact:
    """Trains transformers' model, one sample at a time: numerators are added, and divided once by the step's weights of
    tokens."""
    vision = config.model.vision
    assert vision is not None
    model = copy.deepcopy(model_of(kind))
    model.requires_grad_(not vision.freeze_language_model)
    for name, parameter in model.named_parameters():
        if _own_name(name) is not None:
            is_frozen = vision.freeze_projector if _is_projector(name) else vision.freeze_tower
            parameter.requires_grad_(not is_frozen)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    section = config.optimizer
    adam = torch.optim.AdamW(groups_of(trained, section), betas=(section.beta1, section.beta2), eps=section.epsilon)
    losses, norms, gradients = [], [], []
    for step, batch in enumerate(batches):
        adam.zero_grad()
        losses.append(differentiated_batch(model, batch, config.loss.mtp_coefficient))
        gradients.append(
            ours_of(
                {
                    name: torch.zeros_like(each) if each.grad is None else each.grad
                    for name, each in model.named_parameters()
                },
                kind,
            )
        )
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained.values(), section.clip_grad)))
        for group in adam.param_groups:
            group["lr"] = learning_rate(step, section, config.train.num_steps) * group["share"]
        adam.step()
    learning = {_own_name(name) for name in trained}
    found = [
        {
            name: value
            for name, value in each.items()
            if (name in learning if name.startswith("vision.") else not vision.freeze_language_model)
        }
        for each in gradients
    ]
    return Exact(losses, norms, found, ours_of(tensors_of(model), kind))


def groups_of(trained: dict[str, Any], section: Any) -> list[dict[str, Any]]:
    """Returns a group for each parameter, with its weight decay and its share of the language model's rate."""
    groups = []
    for name, each in trained.items():
        own = None
        if any(part in name for part in ("visual", "vision_tower", "multi_modal_projector", "embed_vision")):
            own = section.projector_lr if _is_projector(name) else section.tower_lr
        decay = section.weight_decay if each.ndim > 1 else 0.0
        groups.append({"params": [each], "weight_decay": decay, "share": 1.0 if own is None else own / section.lr})
    return groups


def differentiated_batch(model: Any, batch: GlobalBatch, coefficient: float = 0.0) -> float:
    """Adds the gradients of a batch, and returns its loss; `coefficient` is the weight of a depth's loss."""
    # a depth has one label less
    denominators = [sum(float(sample.mask[depth:].sum()) for sample in batch) for depth in (0, 1)]
    total = 0.0
    for sample in batch:
        parts = zip(scores(model, sample), denominators, (1.0, coefficient))
        loss = -torch.stack([factor * part / whole for part, whole, factor in parts]).sum()
        if loss.requires_grad:  # else the sample is a text, of whose model nothing is trained
            loss.backward()
        total += loss.item()
    return total


def score(model: Any, sample: Any) -> Any:
    """Sums the log-probabilities of a sample's labels, times their weights."""
    return scores(model, sample)[0]


def scores(model: Any, sample: Any) -> list[Tensor]:
    """Returns `score` of the next token, and of the one after it if the model predicts that."""
    ids, labels, mask = map(torch.from_numpy, (sample.tokens, sample.labels, sample.mask))
    given = {"input_ids": ids[None], "use_cache": False, **seen(model.config.model_type, sample.images, len(ids))}
    found = images_ahead.both_logits(model, given) if hasattr(model, "mtp") else [model(**given).logits[0]]
    losses = [F.cross_entropy(each, labels[depth:], reduction="none") for depth, each in enumerate(found)]
    return [-(each * mask[depth:]).sum() for depth, each in enumerate(losses)]


def seen(kind: str, images: SampleImages | None, length: int) -> dict[str, Any]:
    """Returns what a model of this type reads besides ids."""
    is_image = np.zeros(length, np.bool_) if images is None else images.places >= 0
    given: dict[str, Any] = {}
    if kind != "mistral3":
        given["token_type_ids" if kind == "gemma3" else "mm_token_type_ids"] = torch.from_numpy(is_image).int()[None]
    if images is not None and kind in ("gemma3", "mistral3"):
        given["pixel_values"] = _whole(torch.from_numpy(images.pixels).double(), images.grids[:, 1:].tolist())
        given |= {"image_sizes": torch.from_numpy(images.grids[:, 1:] * PATCH)} if kind == "mistral3" else {}
    elif images is not None and kind == "gemma4":
        given |= _padded(torch.from_numpy(images.pixels).double(), images.grids[:, 1:].tolist())
    elif images is not None:
        given["pixel_values"] = torch.from_numpy(images.pixels).double()
        given["image_grid_thw"] = torch.from_numpy(images.grids)
    return given


def differentiated(kind: Kind, loss_of: Callable[[Any], Tensor]) -> tuple[float, Arrays]:
    """Returns a loss of transformers' model, and its gradients by our names."""
    model = copy.deepcopy(model_of(kind))
    loss = loss_of(model)
    loss.backward()
    return loss.item(), ours_of({name: each.grad for name, each in model.named_parameters()}, kind)


def _padded(patches: Tensor, grids: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Returns the patches of images, padded to the largest, and the column and row of each, -1 for padding."""
    own = torch.split(patches, [rows * columns for rows, columns in grids])
    places = [torch.tensor([[x, y] for y in range(rows) for x in range(columns)]) for rows, columns in grids]
    pad = functools.partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    return {"pixel_values": pad(list(own)), "image_position_ids": pad(places, padding_value=-1)}


def _whole(patches: Tensor, grids: Sequence[Sequence[int]]) -> Tensor:
    """Joins images, [images, 3, height, width], from their patches, row by row; pads the smaller ones."""
    height, width = (max(sizes) * PATCH for sizes in zip(*grids, strict=True))
    images = torch.zeros(len(grids), 3, height, width, dtype=patches.dtype)
    for image, (_, columns), own in zip(images, grids, torch.split(patches, [r * c for r, c in grids]), strict=True):
        for number, patch in enumerate(own):
            top, left = PATCH * (number // columns), PATCH * (number % columns)
            image[:, top : top + PATCH, left : left + PATCH] = patch.view(3, PATCH, PATCH)
    return images
