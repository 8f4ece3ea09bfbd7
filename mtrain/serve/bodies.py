"""JSON bodies of clients: every key of the protocol is acted upon, refused, or marked `Unread` with the reason."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, model_validator

from mtrain.base.errors import DataError

Id = Annotated[str, Field(min_length=1, max_length=200)]
Number = Annotated[int, Field(ge=0, lt=2**63)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Ttl = Annotated[int, Field(ge=3600, le=10 * 365 * 24 * 3600)]
"""Lifetime of a checkpoint, in seconds: an hour to ten years, as in the SDK."""
StopText = Annotated[str, Field(min_length=1, max_length=1000)]
SMALLEST_EPS = 2.0**-126
"""Smallest normal float32; an epsilon of AdamW that float32 flushes to 0 turns zero gradients into nan."""
_MOST_TOKENS = 10_000_000
_MOST_METADATA = 2**16
"""Most characters of metadata that a client keeps with a run or a checkpoint."""


def _bounded(given: dict[str, Any]) -> dict[str, Any]:
    if len(json.dumps(given, allow_nan=False)) > _MOST_METADATA:  # nan could not be listed again
        raise ValueError(f"is longer than {_MOST_METADATA} characters; send less")
    return given


def _absent(given: Any, info: ValidationInfo) -> None:
    if given is not None and given is not False and given != 0:
        raise DataError(f"{info.field_name} is not offered here; leave it out")


def _adamw(given: dict[str, Any] | None) -> None:
    if given not in (None, {}, {"type": "adamw"}):
        raise DataError(f"optimizer {str(given.get('type', given))[:80]!r} is not offered here; take adamw")


# texts only, as the SDK declares it: it could not list a run with anything else
Metadata = Annotated[dict[str, str], AfterValidator(_bounded)]
NotOffered = Annotated[Any, AfterValidator(_absent)]
"""Asks for what the service does not offer; absent, null, false and 0 ask for nothing."""
Optimizer = Annotated[dict[str, Any] | None, AfterValidator(_adamw)]


@dataclass(frozen=True)
class Unread:
    """Marks a key that is accepted but not read, since it cannot change a number."""

    reason: str


OfPeople = Annotated[Any, Unread("describes a session to people, and sessions are not listed here")]
Version = Annotated[Any, Unread("every version of the SDK is answered alike")]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=(), allow_inf_nan=False, strict=True)


class Numbered(BaseModel):
    """Calls that run in order."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=(), strict=True)
    model_id: Id
    seq_id: Number


class ClientBody(Body):
    """Body of client/config and client/dynamic_config."""

    sdk_version: Version = None


class SessionBody(Body):
    tags: OfPeople = None
    user_metadata: OfPeople = None
    display_name: OfPeople = None
    sdk_version: Version = None
    project_id: NotOffered = None
    type: Literal["create_session"] = "create_session"


class HeartbeatBody(Body):
    """Body of session_heartbeat."""

    session_id: Id
    type: Literal["session_heartbeat"] = "session_heartbeat"


class LoraConfig(Body):
    """Adapter; rank 0 trains the whole model."""

    rank: int = Field(ge=0, le=65536)
    seed: int | None = Field(None, ge=0, lt=2**63)
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True

    @model_validator(mode="after")
    def _trains_all_without_an_adapter(self) -> LoraConfig:
        if self.rank == 0 and not (self.train_unembed and self.train_mlp and self.train_attn):
            raise DataError("rank=0 trains the whole model; leave train_unembed, train_mlp and train_attn as they are")
        return self


class CreateModelBody(Body):
    session_id: Id
    model_seq_id: Number
    base_model: str
    lora_config: LoraConfig | None = None
    optimizer_config: Optimizer = None
    user_metadata: Metadata | None = None
    type: Literal["create_model"] = "create_model"


class AdamParams(Body):
    """Options of one update."""

    learning_rate: float = Field(0.0001, ge=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-12, ge=SMALLEST_EPS)
    weight_decay: float = Field(0.0, ge=0)
    grad_clip_norm: float = 0.0


class OptimStepBody(Body):
    model_id: Id
    seq_id: Number
    adam_params: AdamParams | None = None
    optimizer_params: dict[str, Any] | None = None
    type: Literal["optim_step"] = "optim_step"


class NamedBody(Body):
    """Fields of the calls that save."""

    model_id: Id
    seq_id: Number
    path: str | None = None
    ttl_seconds: Ttl | None = None


class SaveBody(NamedBody):
    """Body of save_weights."""

    overwrite: bool = False
    user_metadata: Metadata | None = None
    type: Literal["save_weights"] = "save_weights"


class SaveSamplerBody(NamedBody):
    """Body of save_weights_for_sampler."""

    sampling_session_seq_id: Number | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    user_metadata: Metadata | None = None
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"


class SaveExternalBody(NamedBody):
    """Body of save_weights_external."""

    age_encryption_recipients: NotOffered = None
    type: Literal["save_weights_external"] = "save_weights_external"


class TtlBody(Body):
    """Lifetime of a checkpoint from now; None: for ever."""

    ttl_seconds: Ttl | None


class LoadBody(Body):
    """Body of load_weights: into a model, or as the start of one."""

    path: str
    optimizer: bool
    model_id: Id | None = None
    seq_id: Number | None = None
    session_id: Id | None = None
    model_seq_id: Number | None = None
    base_model: str | None = None
    user_metadata: Metadata | None = None
    optimizer_config: Optimizer = None
    weights_access_token: NotOffered = None
    type: Literal["load_weights"] = "load_weights"


class InfoBody(Body):
    model_id: Id
    type: Literal["get_info"] = "get_info"


class OfPath(Body):
    """Names a checkpoint."""

    tinker_path: str


class SamplingSessionBody(Body):
    session_id: Id
    sampling_session_seq_id: Number
    base_model: str | None = None
    model_path: str | None = None
    type: Literal["create_sampling_session"] = "create_sampling_session"


class Chunk(Body):
    """Part of a prompt."""

    type: Literal["encoded_text"] = "encoded_text"
    tokens: list[TokenId] = Field(max_length=_MOST_TOKENS)

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("type", "encoded_text") != "encoded_text":
            raise DataError("the prompt has an image or a sound, which no model here reads; send tokens")
        return given


class Prompt(Body):
    chunks: list[Chunk] = Field(max_length=100_000)


class SamplingBody(Body):
    max_tokens: int | None = Field(None, ge=1)
    seed: int | None = Field(None, ge=0, lt=2**63)
    stop: StopText | Annotated[list[StopText], Field(max_length=64)] | list[TokenId] | None = None
    temperature: float = Field(1.0, ge=0)
    top_k: int = Field(-1, ge=-1, lt=2**31)
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
    target_prompt_logprobs: NotOffered = None
    prompt_alt_tokens_k: NotOffered = None
    record_stability_info: NotOffered = None
    base_model: NotOffered = None
    model_path: NotOffered = None
    type: Literal["sample"] = "sample"


class RetrieveBody(Body):
    request_id: Id
    allow_metadata_only: Annotated[Any, Unread("allows what the service does not do: each result is sent whole")] = None
