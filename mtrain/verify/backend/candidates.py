"""Candidates: other ways to build a run's layers, each compared with our torch layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from mtrain.base.errors import MachineError, MtrainError
from mtrain.config import Config
from mtrain.mcore.distributed.groups import Groups
from mtrain.mcore.model.build import build_with
from mtrain.mcore.model.compiled import compile_layers, try_compiler
from mtrain.mcore.model.layer_spec import absent, unbuildable
from mtrain.verify.backend.kernels import (
    use_apex_norms,
    use_flash_attention,
    without_apex,
    without_flash_attention,
)


@dataclass(frozen=True)
class Place:
    """What layers are built for."""

    config: Config
    """Configuration from `few_layers`."""
    groups: Groups


def _never(place: Place) -> str | None:
    return None


@dataclass(frozen=True)
class Candidate:
    """One way to build the layers; its functions are found by their names in the ranks."""

    name: str
    title: str
    """Name for readers."""
    build: Callable[[Place], nn.Module]
    """Function that builds the chunk of a rank, in the run's precision, weights still to be set."""
    absent: Callable[[Place], str | None] = _never
    """Function that says why the layers cannot be built here; None where they can."""


def torch_layers(place: Place) -> nn.Module:
    """Builds our own layers."""
    return build_with("torch", place.config, place.groups)


def _transformer_engine(place: Place) -> nn.Module:
    return build_with("te", place.config, place.groups)


def _with_its_experts(place: Place) -> nn.Module:
    return build_with("te", _with_implementation(place).config, place.groups)


def _without_its_experts(place: Place) -> str | None:
    if place.config.model.experts is None:
        return "the model has no experts"
    return _without_transformer_engine(_with_implementation(place))


def _with_implementation(place: Place) -> Place:
    config = place.config
    assert config.model.experts is not None
    experts = config.model.experts.model_copy(update={"implementation": "te"})
    model = config.model.model_copy(update={"experts": experts})
    return Place(config.model_copy(update={"model": model}), place.groups)


def _without_transformer_engine(place: Place) -> str | None:
    return "; ".join((*absent(place.groups.device), *unbuildable(place.config))) or None


def _compiled(place: Place) -> nn.Module:
    chunk = torch_layers(place)
    compile_layers([chunk], _with_compilation(place), place.groups)
    return chunk


def _without_compiler(place: Place) -> str | None:
    if place.config.train.fp8 is not None:
        return "train.fp8 needs TransformerEngine's layers, and torch.compile compiles ours"
    try:
        Config.model_validate(_with_compilation(place).model_dump())
        try_compiler(place.groups.device)
    except (MachineError, MtrainError, ValueError) as error:
        return str(error).splitlines()[0]
    return None


def _with_compilation(place: Place) -> Config:
    config = place.config
    return config.model_copy(update={"train": config.train.model_copy(update={"compile": "layers"})})


def _by_flash_attention(place: Place) -> nn.Module:
    chunk = torch_layers(place)
    use_flash_attention(chunk)
    return chunk


def _without_flash_attention(place: Place) -> str | None:
    return without_flash_attention(place.config, place.groups.device)


def _by_apex(place: Place) -> nn.Module:
    chunk = torch_layers(place)
    use_apex_norms(chunk)
    return chunk


def _without_apex(place: Place) -> str | None:
    return without_apex(place.config, place.groups.device)


CANDIDATES = (
    Candidate("te", "TransformerEngine", _transformer_engine, _without_transformer_engine),
    Candidate("te-experts", "TransformerEngine, experts as well", _with_its_experts, _without_its_experts),
    Candidate("compile", "torch.compile (train.compile=layers)", _compiled, _without_compiler),
    Candidate("flash-attn", "our layers with flash-attn's attention", _by_flash_attention, _without_flash_attention),
    Candidate("apex", "our layers with apex's norms", _by_apex, _without_apex),
)
NO_CANDIDATES = {"flash-linear-attention": "the delta rule of model.delta_net is ours alone, in torch"}
"""Packages that the layers take nothing from, with the reason."""
