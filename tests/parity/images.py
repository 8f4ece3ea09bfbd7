"""Images in Qwen, Gemma 3, Mistral 3: samples, and the oracle, transformers in float64, one sample at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from numpy.typing import NDArray
from torch import Tensor

from mtrain.arch.lr import learning_rate
from mtrain.config import Config
from mtrain.core.batch.images import SampleImages
from mtrain.core.batch.sample import shifted
from mtrain.hf.schema.registry import family_of
from tests.parity import images_ahead
from tests.parity.batches import BATCH, SEQ, VOCAB, GlobalBatch
from tests.parity.cases import case
from tests.parity.ranks import Arrays

_IMAGE, _VIDEO, _START, _END = 57, 58, 59, 60
_PATCH, _MERGE = 4, 2
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 3,
    "layer_types": ["linear_attention", "full_attention"],
    "rms_norm_eps": 1e-2,  # norms of small outputs amplify rounding
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    # six of a head's eight pairs alternate, and the last two turn with time
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 300.0,
        "partial_rotary_factor": 1.0,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
}
_TOWER: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": _PATCH,
    "spatial_merge_size": _MERGE,
    "temporal_patch_size": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}
_IDS = {
    "image_token_id": _IMAGE,
    "video_token_id": _VIDEO,
    "vision_start_token_id": _START,
    "vision_end_token_id": _END,
}
_EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
}


def dense_config() -> Any:
    return transformers.Qwen3_5Config(text_config=_TEXT, vision_config=_TOWER, **_IDS, attn_implementation="eager")


def experts_config() -> Any:
    text = {name: value for name, value in _TEXT.items() if name != "intermediate_size"} | _EXPERTS
    config = transformers.Qwen3_5MoeConfig(text_config=text, vision_config=_TOWER, **_IDS, attn_implementation="eager")
    config.text_config._experts_implementation = "eager"  # the grouped one does not support float64
    return config


_OF_NETS = ("linear_", "layer_types", "tie_word", "num_hidden_layers")
_ATTENTION = {name: value for name, value in _TEXT.items() if not name.startswith(_OF_NETS)}


def deepstack_config() -> Any:
    tower = _TOWER | {"depth": 3, "deepstack_visual_indexes": [0, 2]}
    return transformers.Qwen3VLConfig(
        text_config=_ATTENTION | {"num_hidden_layers": 3},
        vision_config=tower,
        **_IDS,
        attn_implementation="eager",
        tie_word_embeddings=False,
    )


def deepstack_experts_config() -> Any:
    routed = {name: value for name, value in _EXPERTS.items() if "shared" not in name}
    config = transformers.Qwen3VLMoeConfig(
        text_config=_ATTENTION | routed | {"num_hidden_layers": 2, "tie_word_embeddings": False},
        vision_config=_TOWER | {"deepstack_visual_indexes": [0]},
        **_IDS,
        attn_implementation="eager",
        tie_word_embeddings=False,
    )
    config.text_config._experts_implementation = "eager"
    return config


def gemma3_config() -> Any:
    text = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "query_pre_attn_scalar": 20,
        "sliding_window": 7,  # ends inside an image
        "layer_types": ["sliding_attention", "full_attention"],
        "rms_norm_eps": 1e-2,
        "pad_token_id": None,  # whose embedding would have no gradient
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
    }
    tower = {
        "model_type": "siglip_vision_model",
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 6 * _PATCH,
        "patch_size": _PATCH,
        "vision_use_head": False,
    }
    ids = {"image_token_index": _IMAGE, "boi_token_index": _START, "eoi_token_index": _END}
    # eager attention would round weights to float32
    return transformers.Gemma3Config(
        text_config=text, vision_config=tower, mm_tokens_per_image=9, **ids, attn_implementation="sdpa"
    )


def mistral3_config() -> Any:
    text = {name: value for name, value in _ATTENTION.items() if name != "rope_parameters"} | {
        "model_type": "ministral3",
        "pad_token_id": None,  # its row would have no gradient
        "num_hidden_layers": 2,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 300.0,
            "factor": 4.0,
            "original_max_position_embeddings": 7,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.3,
        },
    }
    tower = {
        "model_type": "pixtral",
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "patch_size": _PATCH,
    }
    return transformers.Mistral3Config(
        text_config=text,
        vision_config=tower,
        spatial_merge_size=_MERGE,
        image_token_index=_IMAGE,
        attn_implementation="eager",
        tie_word_embeddings=False,
    )


Kind = Literal["dense", "experts", "ahead", "ahead experts", "deepstack", "deepstack experts", "gemma3", "mistral3"]
"""Qwen3.5, Qwen3.5 with experts, both with a prediction further ahead, Qwen3-VL, Qwen3-VL with experts, Gemma 3,
Ministral 3."""
WITH_AXES = ("dense", "experts", "ahead", "ahead experts", "deepstack", "deepstack experts")
"""Kinds whose images have positions on three axes, and patches of two frames."""
KINDS: dict[Kind, tuple[Any, Any]] = {
    "dense": (transformers.Qwen3_5ForConditionalGeneration, dense_config),
    "experts": (transformers.Qwen3_5MoeForConditionalGeneration, experts_config),
    "ahead": (images_ahead.of_class(transformers.Qwen3_5ForConditionalGeneration), dense_config),
    "ahead experts": (images_ahead.of_class(transformers.Qwen3_5MoeForConditionalGeneration), experts_config),
    "deepstack": (transformers.Qwen3VLForConditionalGeneration, deepstack_config),
    "deepstack experts": (transformers.Qwen3VLMoeForConditionalGeneration, deepstack_experts_config),
    "gemma3": (transformers.Gemma3ForConditionalGeneration, gemma3_config),
    "mistral3": (transformers.Mistral3ForConditionalGeneration, mistral3_config),
}
"""Classes of transformers, and their configurations."""
_OF_TOWER = {
    "model.visual.": "vision.",
    "model.vision_tower.": "vision.vision_tower.",
    "model.multi_modal_projector.": "vision.multi_modal_projector.",
}
"""Prefixes of transformers' names, and ours."""


def _own_name(name: str) -> str | None:
    """Returns our name of a parameter of the tower; None for one of the language model."""
    return next(
        (ours + name.removeprefix(theirs) for theirs, ours in _OF_TOWER.items() if name.startswith(theirs)), None
    )


def _is_projector(name: str) -> bool:
    return "merger" in name or "multi_modal_projector" in name


@cache
def model_of(kind: Kind) -> Any:
    """Draws a model of transformers in float64; callers must not change it."""
    torch.manual_seed(11)
    of_kind, described = KINDS[kind]
    model = of_kind(described()).double()
    for name, parameter in model.named_parameters():
        is_scale = ("norm" in name or "ln_pre" in name) and name.endswith("weight")
        # the others are stored minus 1
        plain = ("visual", "linear_attn", "vision_tower")
        is_scale &= kind.startswith(("deepstack", "mistral3")) or any(part in name for part in plain)
        torch.nn.init.normal_(parameter, mean=1.0 if is_scale else 0.0, std=0.1)
    return model


def knobs(kind: Kind, **vision: bool) -> dict[str, Any]:
    """Returns changes of the configuration that describe the model, as they are read from its config.json."""
    described = model_of(kind).config.to_dict()
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
        return self.rows * self.columns // _MERGE**2


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
    rows, columns = picture.rows // _MERGE, picture.columns // _MERGE
    if kind != "mistral3":
        return np.full(rows * columns, _IMAGE)
    # a token after each row of features, and another after the last
    tokens = np.full((rows, columns + 1), _IMAGE)
    tokens[:, -1], tokens[-1, -1] = _START, _END
    return tokens.reshape(-1)


def _sample(rng: np.random.Generator, pictures: Sequence[Picture], length: int, kind: Kind) -> Any:
    length = max([length, *(picture.start + len(_tokens(picture, kind)) + 1 for picture in pictures)])
    ids = rng.integers(0, _IMAGE, length + 1)
    axes = np.repeat(np.arange(length + 1)[:, None], 3, axis=1)
    for picture in pictures:
        tokens = _tokens(picture, kind)
        start, end = picture.start, picture.start + len(tokens)
        assert not (ids[start:end] == _IMAGE).any(), "images overlap"
        ids[start:end] = tokens
        if kind not in WITH_AXES:
            continue  # tokens of an image count like text
        # rows and columns of an image count from the position after the text, and so does the text after the longer one
        at = axes[start, 0]
        grid = np.indices((1, picture.rows // _MERGE, picture.columns // _MERGE)).reshape(3, -1).T
        axes[start:end] = at + grid
        following = at + max(picture.rows, picture.columns) // _MERGE
        axes[end:] = (following + np.arange(length + 1 - end))[:, None]
    places = np.where(ids == _IMAGE, np.cumsum(ids == _IMAGE) - 1, -1)
    mask = (rng.random(length) < 0.6) * rng.choice([1.0, 0.5], length)
    mask[places[1:] >= 0] = 0.0  # no placeholder is predicted
    sample = shifted(ids, mask)
    if not pictures:
        return sample
    num_patches = sum(picture.rows * picture.columns for picture in pictures)
    return replace(
        sample,
        images=SampleImages(
            pixels=rng.normal(size=(num_patches, 3 * (2 if kind in WITH_AXES else 1) * _PATCH**2)).astype(np.float32),
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
    return ours_of(dict(model_of(kind).named_parameters()), kind)


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
    return Exact(losses, norms, found, ours_of(dict(model.named_parameters()), kind))


def groups_of(trained: dict[str, Any], section: Any) -> list[dict[str, Any]]:
    """Returns a group for each parameter, with its weight decay and its share of the language model's rate."""
    groups = []
    for name, each in trained.items():
        own = None
        if any(part in name for part in ("visual", "vision_tower", "multi_modal_projector")):
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
        given |= {"image_sizes": torch.from_numpy(images.grids[:, 1:] * _PATCH)} if kind == "mistral3" else {}
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


def _whole(patches: Tensor, grids: Sequence[Sequence[int]]) -> Tensor:
    """Joins images, [images, 3, height, width], from their patches, row by row; pads the smaller ones."""
    height, width = (max(sizes) * _PATCH for sizes in zip(*grids, strict=True))
    images = torch.zeros(len(grids), 3, height, width, dtype=patches.dtype)
    for image, (_, columns), own in zip(images, grids, torch.split(patches, [r * c for r, c in grids]), strict=True):
        for number, patch in enumerate(own):
            top, left = _PATCH * (number // columns), _PATCH * (number % columns)
            image[:, top : top + _PATCH, left : left + _PATCH] = patch.view(3, _PATCH, _PATCH)
    return images
