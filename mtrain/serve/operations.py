"""Operations of a service: the JSON bodies of clients, which the ranks run, and results; no torch.

Every key of the protocol has an effect, is refused, or is marked `Unread` with the reason.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, get_args

import numpy as np
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

from mtrain.base.errors import DataError
from mtrain.serve.images import Interleaved, checked_image
from mtrain.serve.protocol import SentBatch
from mtrain.training.sampling.params import SamplingParams

Kind = Literal["weights", "sampler_weights", "external_weights"]
KINDS: Mapping[str, Kind] = {name: name for name in get_args(Kind)}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_MODEL = re.compile(r"[0-9a-f]{32}:train:[0-9]{1,9}")
_PATH = re.compile(r"tinker://([^/]{1,64})/([a-z_]{1,32})/([^/]{1,128})")

Id = Annotated[str, Field(min_length=1, max_length=200)]
Number = Annotated[int, Field(ge=0, lt=2**63)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Ttl = Annotated[int, Field(ge=3600, le=10 * 365 * 24 * 3600)]
"""Lifetime of a checkpoint, in seconds: an hour to ten years, as in the SDK."""
StopText = Annotated[str, Field(min_length=1, max_length=1000)]
SMALLEST_EPS = 2.0**-126
"""Smallest normal float32: with an epsilon that float32 flushes to 0, AdamW turns zero gradients into nan."""
_MOST_TOKENS = 10_000_000
_MOST_METADATA = 2**16
"""Most characters of metadata that a client may store with a run or a checkpoint."""


@dataclass(frozen=True)
class TinkerPath:
    """Checked path of a checkpoint, tinker://RUN/KIND/NAME."""

    model_id: str
    kind: Kind
    name: str

    @classmethod
    def of(cls, model_id: str, kind: Kind, name: str) -> TinkerPath:
        if not _MODEL.fullmatch(model_id):
            raise DataError(
                f"{model_id[:80]!r} is not a training run of this service; use the model_id from create_model"
            )
        if not _NAME.fullmatch(name):
            raise DataError(
                f"{name[:140]!r} cannot be the name of a checkpoint; use up to 128 letters, digits, dots, dashes and "
                "underscores, a letter or digit first"
            )
        return cls(model_id, kind, name)

    @classmethod
    def parsed(cls, path: str) -> TinkerPath:
        match = _PATH.fullmatch(path)
        if match is None or match[2] not in KINDS:
            raise DataError(f"{path[:200]!r} must be tinker://RUN/KIND/NAME, where KIND is one of {', '.join(KINDS)}")
        return cls.of(match[1], KINDS[match[2]], match[3])

    def __str__(self) -> str:
        return f"tinker://{self.model_id}/{self.kind}/{self.name}"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> CoreSchema:
        return core_schema.no_info_after_validator_function(cls.parsed, core_schema.str_schema())


def _bounded(metadata: dict[str, Any]) -> dict[str, Any]:
    if len(json.dumps(metadata, allow_nan=False)) > _MOST_METADATA:  # nan could not be listed again
        raise ValueError(f"is longer than {_MOST_METADATA} characters; send less")
    return metadata


def _absent(value: Any, info: ValidationInfo) -> None:
    if value is not None and value is not False and value != 0:
        raise DataError(f"{info.field_name} is not offered here; leave it out")


def _adamw(optimizer: dict[str, Any] | None) -> None:
    if optimizer not in (None, {}, {"type": "adamw"}):
        raise DataError(f"optimizer {str(optimizer.get('type', optimizer))[:80]!r} is not offered here; take adamw")


def _loadable(path: TinkerPath) -> TinkerPath:
    if path.kind == "external_weights":
        raise DataError(f"{path} is in a format for other programs; name a checkpoint of weights or sampler_weights")
    return path


def _decoded(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    try:
        return base64.b64decode(value, validate=True)
    except (TypeError, ValueError) as fault:
        raise DataError(f"the data of an image are not base64 ({fault}); send the content of its file so") from None


Base64 = Annotated[bytes, BeforeValidator(_decoded)]
# texts only, as the SDK declares; it could not list a run with other values
Metadata = Annotated[dict[str, str], AfterValidator(_bounded)]
NotOffered = Annotated[Any, AfterValidator(_absent)]
"""Key for a feature that the service lacks: only null, false and 0 are accepted."""
Loadable = Annotated[TinkerPath, AfterValidator(_loadable)]
Optimizer = Annotated[dict[str, Any] | None, AfterValidator(_adamw)]


@dataclass(frozen=True)
class Unread:
    """Marks a key that is accepted but not read, since it cannot change a number."""

    reason: str


OfPeople = Annotated[Any, Unread("describes a session for people, and this service does not list sessions")]
Version = Annotated[Any, Unread("the service answers every version of the SDK alike")]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=(), allow_inf_nan=False, strict=True)


class Numbered(BaseModel):
    """Fields of calls that run in order."""

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


class Lora(Body):
    """Options of an adapter; rank 0 trains the whole model."""

    rank: int = Field(ge=0, le=65536)
    seed: int | None = Field(None, ge=0, lt=2**63)
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True

    @model_validator(mode="after")
    def _trains_all_without_an_adapter(self) -> Self:
        if self.rank == 0 and not (self.train_unembed and self.train_mlp and self.train_attn):
            raise DataError("rank=0 trains the whole model; leave train_unembed, train_mlp and train_attn as they are")
        return self

    @property
    def facts(self) -> dict[str, Any]:
        """Returns the description that clients get of a model with this adapter."""
        return {"is_lora": self.rank > 0, "lora_rank": self.rank or None}


class CreateModel(Body):
    """Creates a model with initial weights."""

    session_id: Id
    model_seq_id: Number
    base_model: str
    lora_config: Lora | None = None
    optimizer_config: Optimizer = None
    user_metadata: Metadata | None = None
    type: Literal["create_model"] = "create_model"

    @property
    def new_model_id(self) -> str:
        return f"{self.session_id}:train:{self.model_seq_id}"


class AdamParams(Body):
    """Options of one update."""

    learning_rate: float = Field(0.0001, ge=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-12, ge=SMALLEST_EPS)
    weight_decay: float = Field(0.0, ge=0)
    grad_clip_norm: float = 0.0


class OptimStep(Body):
    model_id: Id
    seq_id: Number
    adam_params: AdamParams | None = None
    optimizer_params: dict[str, Any] | None = None
    type: Literal["optim_step"] = "optim_step"

    @model_validator(mode="after")
    def _is_of_adamw(self) -> Self:
        if self.adam_params is None or self.optimizer_params is not None:
            raise DataError("optim_step needs adam_params; the optimizer of this service is AdamW")
        return self


class Save(Body):
    """Fields of the calls that save."""

    saved_as: ClassVar[Kind]
    model_id: Id
    seq_id: Number
    path: str | None = None
    ttl_seconds: Ttl | None = None
    overwrite: bool = True
    user_metadata: Metadata | None = None
    type: str

    @property
    def tinker_path(self) -> TinkerPath:
        return TinkerPath.of(self.model_id, self.saved_as, f"{self.seq_id:08d}" if self.path is None else self.path)

    @model_validator(mode="after")
    def _has_a_good_name(self) -> Self:
        if self.path is not None:
            TinkerPath.of(self.model_id, self.saved_as, self.path)
        return self


class SaveWeights(Save):
    """Saves weights and optimizer under a name."""

    saved_as = "weights"
    overwrite: bool = False
    type: Literal["save_weights"] = "save_weights"


class SaveForSampler(Save):
    """Saves weights to sample from, under a name or for this session only."""

    saved_as = "sampler_weights"
    sampling_session_seq_id: Number | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"

    @property
    def sampler_id(self) -> str:
        return f"{self.model_id.partition(':')[0]}:sample:{self.sampling_session_seq_id}"

    @model_validator(mode="after")
    def _is_one_of_both(self) -> Self:
        if self.kind == "inflight":
            raise DataError("kind=inflight is not offered here; use snapshot, one per step")
        if (self.path is None) == (self.sampling_session_seq_id is None):
            raise DataError("save_weights_for_sampler needs path or sampling_session_seq_id; send one of the two")
        if self.path is None and (self.ttl_seconds is not None or self.user_metadata is not None):
            raise DataError("ttl_seconds and user_metadata belong to a checkpoint; give path, or leave them out")
        return self


class SaveExternal(Save):
    """Saves weights for other programs: adapters as PEFT does, a whole model as transformers does."""

    saved_as = "external_weights"
    age_encryption_recipients: NotOffered = None
    type: Literal["save_weights_external"] = "save_weights_external"

    @model_validator(mode="after")
    def _is_named(self) -> Self:
        if self.path is None:
            raise DataError("save_weights_external needs path; give a name")
        return self


class TtlBody(Body):
    """Lifetime of a checkpoint from now on; None: forever."""

    ttl_seconds: Ttl | None


class LoadWeights(Body):
    """Loads a checkpoint into a model, or as the start of a new one."""

    path: Loadable
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

    @property
    def new_model_id(self) -> str | None:
        """Returns the name of the new model; None if the checkpoint is loaded into an existing one."""
        return None if self.session_id is None else f"{self.session_id}:train:{self.model_seq_id}"

    @model_validator(mode="after")
    def _is_one_of_both(self) -> Self:
        of_model, of_new = (self.model_id, self.seq_id), (self.session_id, self.model_seq_id)
        if of_new == (None, None) and None not in of_model:
            if self.user_metadata is not None:
                raise DataError("user_metadata belongs to a new model; give it to create_training_client_from_state")
        elif None in of_new or of_model != (None, None):
            raise DataError(
                "load_weights needs model_id and seq_id, or session_id and model_seq_id; send one of the two"
            )
        return self


class InfoBody(Body):
    model_id: Id
    type: Literal["get_info"] = "get_info"


class OfPath(Body):
    """Names a checkpoint."""

    tinker_path: TinkerPath


class CreateSampler(Body):
    """Prepares weights to sample from: those of a checkpoint, or of the base model."""

    session_id: Id
    sampling_session_seq_id: Number
    base_model: str | None = None
    model_path: Loadable | None = None
    type: Literal["create_sampling_session"] = "create_sampling_session"

    @property
    def sampler_id(self) -> str:
        return f"{self.session_id}:sample:{self.sampling_session_seq_id}"


class TextChunk(Body):
    """Tokens of a prompt."""

    type: Literal["encoded_text"] = "encoded_text"
    tokens: list[TokenId] = Field(max_length=_MOST_TOKENS)


class ImageChunk(Body):
    """Image in a prompt."""

    type: Literal["image"]
    data: Base64
    format: Literal["png", "jpeg"]
    expected_tokens: int | None = None


def _kind_of_chunk(value: Any) -> str:
    kind = value.get("type", "encoded_text") if isinstance(value, dict) else getattr(value, "type", None)
    if kind == "image_asset_pointer":
        raise DataError("the prompt names an image by its location, but nothing is downloaded here; send its content")
    if kind not in ("encoded_text", "image"):
        raise DataError("the prompt has audio or an unknown chunk, which no model here reads; send tokens and images")
    return str(kind)


Chunk = Annotated[
    Annotated[TextChunk, Tag("encoded_text")] | Annotated[ImageChunk, Tag("image")], Discriminator(_kind_of_chunk)
]
"""Part of a prompt."""


class Prompt(Body):
    chunks: list[Chunk] = Field(max_length=100_000)

    @cached_property
    def parts(self) -> Interleaved:
        """Returns the prompt's text with its images; raises DataError for an image that is none."""
        tokens: list[int] = []
        images = []
        for chunk in self.chunks:
            if isinstance(chunk, TextChunk):
                tokens += chunk.tokens
            else:
                image = checked_image(chunk.data, chunk.format, chunk.expected_tokens, len(tokens), "the prompt")
                images.append(image)
        return Interleaved(np.array(tokens, np.int32), images)


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
    allow_metadata_only: Annotated[Any, Unread("the service always sends whole results")] = None


class Sample(NamedTuple):
    """Request for answers to one prompt, with the sampling rules that follow from it."""

    body: SampleBody
    sampling: SamplingParams
    stop_texts: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        """Returns the size of its images; all else is small."""
        return sum(map(len, self.body.prompt.parts.contents))


@dataclass(frozen=True)
class Refuse:
    """A refused call, which still takes its turn among the calls of its model."""

    model_id: str
    message: str
    is_of_step: bool
    """Whether it may belong to a step, which is then incomplete."""


@dataclass(frozen=True)
class Unload:
    """Frees models and samplers that are no longer in use."""

    model_ids: tuple[str, ...]
    sampler_ids: tuple[str, ...]


Operation = CreateModel | LoadWeights | SentBatch | OptimStep | Save | CreateSampler | Sample | Refuse | Unload


@dataclass(frozen=True)
class Done:
    """Result of an operation."""

    content: bytes | dict[str, Any]
    """Protobuf, or JSON."""


@dataclass(frozen=True)
class Failed:
    """Failure of an operation, which changed nothing."""

    message: str
    category: Literal["user", "server"]
