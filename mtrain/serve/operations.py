"""What clients ask of the ranks, and the answers; sent between processes, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mtrain.serve.protocol import SentBatch
from mtrain.serve.store import Lora, Place
from mtrain.training.sampling.params import SamplingParams


@dataclass(frozen=True)
class CreateModel:
    """A new model, initial or from a checkpoint."""

    model_id: str
    lora: Lora
    source: Place | None = None
    with_optimizer: bool = False


@dataclass(frozen=True)
class LoadWeights:
    """Loads a checkpoint into a model."""

    model_id: str
    source: Place
    with_optimizer: bool


@dataclass(frozen=True)
class OptimStep:
    model_id: str
    lr: float
    options: Mapping[str, float]
    """Options of AdamW by name."""


@dataclass(frozen=True)
class Save:
    place: Place
    overwrite: bool = False
    ttl_seconds: int | None = None
    user_metadata: dict[str, str] | None = None
    run_metadata: dict[str, Any] | None = None


@dataclass(frozen=True)
class KeepSampler:
    """Weights to sample from: those of a model now, of a checkpoint, or of the base model."""

    sampler_id: str
    model_id: str | None = None
    source: Place | None = None


@dataclass(frozen=True)
class Sample:
    """Answers to one prompt."""

    sampler_id: str
    prompt: list[int]
    num_samples: int
    sampling: SamplingParams
    stop_texts: tuple[str, ...] = ()
    num_likeliest: int = 0
    """Likeliest tokens in the place of each token of an answer."""
    with_prompt_log_probs: bool = False
    num_likeliest_of_prompt: int = 0
    last_n: int | None = None
    """Last tokens of the prompt that are scored; None: all."""


@dataclass(frozen=True)
class Refuse:
    """A refused call, in its place among the calls of its model."""

    model_id: str
    message: str
    is_of_step: bool
    """Whether it may be part of a step, which is incomplete without it."""


@dataclass(frozen=True)
class Unload:
    """Models and samplers that nobody uses any more."""

    model_ids: tuple[str, ...]
    sampler_ids: tuple[str, ...]


Operation = CreateModel | LoadWeights | OptimStep | Save | KeepSampler | Sample | Refuse | Unload | SentBatch


@dataclass(frozen=True)
class Done:
    """Result of an operation."""

    content: bytes | dict[str, Any]
    """Protobuf, or JSON."""


@dataclass(frozen=True)
class Failed:
    """An operation that changed nothing, and why."""

    message: str
    category: Literal["user", "server"]
