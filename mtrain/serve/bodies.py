"""What clients send as JSON. Keys that the service does not read are left out: newer clients may send more."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

Id = Annotated[str, Field(min_length=1, max_length=200)]
Number = Annotated[int, Field(ge=0, lt=2**63)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Ttl = Annotated[int, Field(ge=3600, le=10 * 365 * 24 * 3600)]
"""Lifetime of a checkpoint, in seconds: an hour to ten years, as the SDK has it."""
StopText = Annotated[str, Field(min_length=1, max_length=1000)]
_MOST_TOKENS = 10_000_000
_MOST_METADATA = 2**16
"""Most characters of what a client keeps with a run or a checkpoint."""


def _bounded(given: dict[str, Any]) -> dict[str, Any]:
    if len(json.dumps(given, allow_nan=False)) > _MOST_METADATA:  # nan could not be listed again
        raise ValueError(f"is longer than {_MOST_METADATA} characters; send less")
    return given


Metadata = Annotated[dict[str, Any], AfterValidator(_bounded)]


class Body(BaseModel):
    """Body of a request."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=(), allow_inf_nan=False, strict=False)


class Nothing(Body):
    """A body of which nothing is read."""


class OfSession(Body):
    """Body that names a session."""

    session_id: Id


class LoraConfig(Body):
    """Adapter; rank 0: the whole model is trained."""

    rank: int = Field(ge=0, le=65536)
    seed: int | None = Field(None, ge=0, lt=2**63)
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerConfig(Body):
    """Kind of the optimizer."""

    type: str = "adamw"


class CreateModelBody(Body):
    """Body of create_model."""

    session_id: Id
    model_seq_id: Number
    base_model: str
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfig = OptimizerConfig()
    user_metadata: Metadata | None = None


class AdamParams(Body):
    """Options of one update."""

    learning_rate: float = Field(0.0001, ge=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-12, ge=0)
    weight_decay: float = Field(0.0, ge=0)
    grad_clip_norm: float = 0.0


class OptimStepBody(Body):
    """Body of optim_step."""

    model_id: Id
    seq_id: Number
    adam_params: AdamParams | None = None
    optimizer_params: dict[str, Any] | None = None


class SaveBody(Body):
    """Body of save_weights, save_weights_for_sampler and save_weights_external."""

    model_id: Id
    seq_id: Number
    path: str | None = None
    overwrite: bool = False
    sampling_session_seq_id: Number | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: Ttl | None = None
    user_metadata: Annotated[dict[str, str], AfterValidator(_bounded)] | None = None
    age_encryption_recipients: list[str] | None = None


class TtlBody(Body):
    """Body that gives a checkpoint a lifetime from now, or none."""

    ttl_seconds: Ttl | None


class LoadBody(Body):
    """Body of load_weights: onto a model, or as the beginning of one."""

    path: str
    optimizer: bool
    model_id: Id | None = None
    seq_id: Number | None = None
    session_id: Id | None = None
    model_seq_id: Number | None = None
    user_metadata: Metadata | None = None


class OfModel(Body):
    """Body that names a model."""

    model_id: Id


class OfPath(Body):
    """Body that names a checkpoint."""

    tinker_path: str


class SamplingSessionBody(Body):
    """Body of create_sampling_session."""

    session_id: Id
    sampling_session_seq_id: Number
    base_model: str | None = None
    model_path: str | None = None


class Chunk(Body):
    """Part of a prompt."""

    type: str = "encoded_text"
    tokens: list[TokenId] = Field(default_factory=list, max_length=_MOST_TOKENS)


class Prompt(Body):
    """Prompt in parts."""

    chunks: list[Chunk] = Field(max_length=100_000)


class SamplingBody(Body):
    """Rules for drawing."""

    max_tokens: int | None = Field(None, ge=1)
    seed: int | None = Field(None, ge=0, lt=2**63)
    stop: StopText | Annotated[list[StopText], Field(max_length=64)] | list[TokenId] | None = None
    temperature: float = Field(1.0, ge=0)
    top_k: int = -1
    top_p: float = Field(1.0, gt=0, le=1)


class SampleBody(Body):
    """Body of asample."""

    sampling_session_id: Id
    seq_id: Number
    prompt: Prompt
    sampling_params: SamplingBody
    num_samples: int = Field(1, ge=1, le=1024)
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: int | None = Field(None, ge=1)
    topk_prompt_logprobs: int = Field(0, ge=0, le=128)
    topk_sample_logprobs: int = Field(0, ge=0, le=128)
    target_prompt_logprobs: Any = None
    prompt_alt_tokens_k: int = 0


class RetrieveBody(Body):
    """Body of retrieve_future."""

    request_id: Id
