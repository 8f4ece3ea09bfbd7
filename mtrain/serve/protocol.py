"""Protobuf messages of the Tinker protocol: the batch of a forward_backward, its outputs, and answers.

Field numbers and types are those of the SDK of tinker 0.38. Fields that are not listed here are refused. The messages
are in a separate pool, so that a process may load the SDK as well.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from mtrain.base.errors import DataError
from mtrain.serve.images import SentImage, checked_image

if TYPE_CHECKING:  # loads torch, which the HTTP process does not need
    from mtrain.training.sampling.sampler import Completion

_PACKAGE = "mtrain_serve"
_FIELD = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "string": _FIELD.TYPE_STRING,
    "bytes": _FIELD.TYPE_BYTES,
    "int32": _FIELD.TYPE_INT32,
    "int64": _FIELD.TYPE_INT64,
    "uint32": _FIELD.TYPE_UINT32,
    "bool": _FIELD.TYPE_BOOL,
    "double": _FIELD.TYPE_DOUBLE,
}
# name: (number, type); type[] is a list, {type} a map with text keys, type? a number that may be absent
_MESSAGES: dict[str, dict[str, tuple[int, str]]] = {
    "SparseCsr": {"values": (1, "bytes"), "crow_indices": (2, "bytes"), "col_indices": (3, "bytes")},
    "Tensor": {"dense": (1, "bytes"), "sparse_csr": (2, "SparseCsr"), "dtype": (3, "int32"), "shape": (4, "int64[]")},
    "Text": {"tokens": (1, "bytes")},
    "Other": {},
    "Size": {"width": (1, "uint32"), "height": (2, "uint32")},
    "Image": {
        "data": (1, "bytes"),
        "format": (2, "string"),
        "expected_tokens": (3, "int32?"),
        "override_dimensions": (4, "Size"),
    },
    "Chunk": {"encoded_text": (1, "Text"), "image": (2, "Image"), "dmel": (3, "Other")},
    "Span": {"sequence_id": (1, "string"), "offset": (2, "int64"), "length": (3, "int64")},
    "Provenance": {"prompt_tokens": (1, "Span"), "sampled_tokens": (2, "Span")},
    # spans say where tokens came from; only stable_reinforce reads them, a loss that is not offered
    "Datum": {
        "model_input": (1, "Chunk[]"),
        "loss_fn_inputs": (2, "{Tensor}"),
        "model_input_spans": (3, "Provenance[]"),
        "loss_fn_input_spans": (4, "Provenance[]"),
    },
    "ConfigValue": {"number": (1, "double"), "text": (2, "string")},
    "ForwardBackwardRequest": {
        "model_id": (1, "string"),
        "seq_id": (2, "int32"),
        "data": (3, "Datum[]"),
        "loss_fn": (4, "string"),
        "loss_fn_config": (5, "{double}"),
        "forward_only": (6, "bool"),
        "loss_fn_config_v2": (7, "{ConfigValue}"),
    },
    "BatchedTensor": {
        "data": (1, "bytes"),
        "offsets": (2, "bytes"),
        "dtype": (3, "int32"),
        "trailing_shape": (4, "int64[]"),
    },
    "ArrayRecord": {"type_tag": (1, "string"), "fields": (2, "{BatchedTensor}"), "num_datums": (3, "int64")},
    "ForwardBackwardOutput": {
        "loss_fn_output_type": (1, "string"),
        "loss_fn_outputs": (2, "ArrayRecord[]"),
        "metrics": (3, "{double}"),
    },
    "TopK": {"token_ids": (1, "bytes"), "logprobs": (2, "bytes"), "k": (3, "uint32"), "length": (4, "uint32")},
    "SampledSequence": {
        "stop_reason": (1, "int32"),
        "tokens": (2, "bytes"),
        "logprobs": (3, "bytes"),
        "topk_sampled_logprobs": (4, "TopK"),
    },
    "SampleResponse": {
        "sequences": (1, "SampledSequence[]"),
        "prompt_logprobs": (2, "bytes"),
        "topk_prompt_logprobs": (3, "TopK"),
    },
}
_FLOAT32, _INT64 = 1, 2
_REASONS = {"stop": 0, "length": 1}
"""Number of each finish reason."""
NO_LOG_PROB = -99999.0
"""Log-probability that, with token 0, fills positions without likeliest tokens."""
_NO_TOKENS = np.empty(0, np.int32)
_DTYPES: Mapping[int, type[np.generic]] = {_FLOAT32: np.float32, _INT64: np.int64}


def _classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="mtrain_serve.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            _add_field(message, field, number, kind)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in _MESSAGES
    }


def _add_field(message: Any, name: str, number: int, kind: str) -> None:
    repeats, inner = kind.endswith("[]") or kind.startswith("{"), kind.removesuffix("[]").strip("{}?")
    label = _FIELD.LABEL_REPEATED if repeats else _FIELD.LABEL_OPTIONAL
    if kind.startswith("{"):
        entry = message.nested_type.add(name=f"{name.title().replace('_', '')}Entry")
        entry.options.map_entry = True
        _add_field(entry, "key", 1, "string")
        _add_field(entry, "value", 2, inner)
        inner = f"{message.name}.{entry.name}"
    field = message.field.add(name=name, number=number, label=label)
    if kind.endswith("?"):  # protobuf's form of a number whose absence differs from 0
        field.proto3_optional, field.oneof_index = True, len(message.oneof_decl)
        message.oneof_decl.add(name=f"_{name}")
    if inner in _SCALARS:
        field.type = _SCALARS[inner]
    else:
        field.type, field.type_name = _FIELD.TYPE_MESSAGE, f".{_PACKAGE}.{inner}"


_CLASS = _classes()


@dataclass(frozen=True)
class SentDatum:
    """A sequence with the inputs of its loss."""

    tokens: NDArray[np.int32]
    """Tokens of the text alone."""
    inputs: dict[str, NDArray[Any]]
    """Arrays by name, [positions] or [positions, k], where each image takes as many positions as it has features."""
    images: tuple[SentImage, ...] = ()

    @property
    def num_bytes(self) -> int:
        arrays = sum(array.nbytes for array in self.inputs.values())
        return self.tokens.nbytes + arrays + sum(len(image.content) for image in self.images)


@dataclass(frozen=True)
class SentBatch:
    """Request for a forward pass, with or without a backward pass."""

    model_id: str
    seq_id: int
    loss: str
    options: dict[str, float | str]
    data: list[SentDatum]
    forward_only: bool

    @property
    def is_of_step(self) -> bool:
        """Says whether a step is incomplete without it."""
        return not self.forward_only

    @property
    def num_bytes(self) -> int:
        return sum(datum.num_bytes for datum in self.data)


@dataclass(frozen=True)
class Call:
    """Model and number of a call."""

    model_id: str
    number: int
    is_of_step: bool
    """Whether a step is incomplete without it."""


_HEAD = re.compile(rb"\n([\x01-\x7f])")
_VARINT = re.compile(rb"\x10[\x80-\xff]{0,9}[\x00-\x7f]")


def call_of_batch(body: bytes) -> Call | None:
    """Returns the call of a forward_backward request, which may be damaged or truncated; None if unknown."""
    parts, message = [body], _CLASS["ForwardBackwardRequest"]()
    if head := _HEAD.match(body):  # the model's name comes first, then the number
        match = _VARINT.match(body, 2 + head[1][0])
        parts += [body[: match.end()]] if match else []
    for part in parts:
        try:
            message.ParseFromString(part)
        except DecodeError:
            continue
        is_named = bool(message.model_id) and message.seq_id > 0
        return Call(message.model_id, message.seq_id, not message.forward_only) if is_named else None
    return None


def read_batch(body: bytes) -> SentBatch:
    """Parses a request for forward_backward; refuses damaged bytes, and arrays whose size is not the one they claim."""
    message = _CLASS["ForwardBackwardRequest"]()
    try:
        message.ParseFromString(body)
    except DecodeError as fault:
        raise DataError(f"the body is not a ForwardBackwardRequest ({fault}); send what the SDK sends") from None
    parts = (len(message.data), *(len(datum.model_input) + len(datum.loss_fn_inputs) for datum in message.data))
    if sum(parts) > _MOST_PARTS or len(message.loss_fn_config) + len(message.loss_fn_config_v2) > _MOST_OPTIONS:
        raise DataError(f"the request has more than {_MOST_PARTS} parts, or {_MOST_OPTIONS} options; send less at once")
    written_out = sum(_written_out(tensor) for datum in message.data for tensor in datum.loss_fn_inputs.values())
    if written_out > _MOST_NUMBERS:
        raise DataError(
            f"the sparse arrays have {written_out} numbers when unpacked; send at most {_MOST_NUMBERS} at once"
        )
    options: dict[str, float | str] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        options[name] = value.number if value.text == "" else value.text
    data = [_datum(datum, f"datum {number}") for number, datum in enumerate(message.data)]
    size = message.ByteSize()
    message.DiscardUnknownFields()
    if message.ByteSize() != size:
        raise DataError("the request has a field that this service does not know; send only the fields of tinker 0.38")
    return SentBatch(message.model_id, message.seq_id, message.loss_fn, options, data, message.forward_only)


def _datum(message: Any, name: str) -> SentDatum:
    tokens, images, length = [], [], 0
    for chunk in message.model_input:
        kinds = [kind for kind in ("encoded_text", "image", "dmel") if chunk.HasField(kind)]
        if kinds == ["encoded_text"]:
            tokens.append(_array(chunk.encoded_text.tokens, np.int32, f"{name}: model_input"))
            length += len(tokens[-1])
        elif kinds == ["image"]:
            images.append(_image(chunk.image, length, name))
        else:
            raise DataError(f"{name} has audio or an empty chunk, which no model here reads; send tokens and images")
    inputs = {key: _tensor(tensor, f"{name}: {key}") for key, tensor in message.loss_fn_inputs.items()}
    return SentDatum(np.concatenate([*tokens, _NO_TOKENS]), inputs, tuple(images))


def _image(message: Any, before: int, name: str) -> SentImage:
    if message.HasField("override_dimensions"):
        raise DataError(f"{name} has override_dimensions, which are not read here; scale the image instead")
    expected = message.expected_tokens if message.HasField("expected_tokens") else None
    return checked_image(message.data, message.format, expected, before, name)


def _tensor(message: Any, name: str) -> NDArray[Any]:
    if message.dtype not in _DTYPES:
        raise DataError(f"{name} has the data type {message.dtype}; send float32 or int64")
    dtype, shape = _DTYPES[message.dtype], tuple(message.shape)
    if message.HasField("sparse_csr"):
        return _from_sparse(message.sparse_csr, dtype, shape, name)
    values = _array(message.dense, dtype, name)
    if not shape:
        return values
    # an array without numbers could claim any shape
    is_matrix = len(shape) <= 2 and min(shape) >= 0 and max(shape) <= max(MOST_COLUMNS, len(values))
    if not is_matrix or math.prod(shape) != len(values):
        raise DataError(f"{name} has {len(values)} numbers, but the shape {list(shape)}; send that many")
    return values.reshape(shape)


def _written_out(message: Any) -> int:
    """Returns the most numbers that a sparse matrix can have when unpacked, up to a thousand times as many as sent."""
    num_rows = len(message.sparse_csr.crow_indices) // np.dtype(np.int64).itemsize
    return num_rows * min(max(message.shape, default=0), MOST_COLUMNS)


def _from_sparse(message: Any, dtype: type[np.generic], shape: tuple[int, ...], name: str) -> NDArray[Any]:
    values = _array(message.values, dtype, name)
    rows, columns = (_array(indices, np.int64, name) for indices in (message.crow_indices, message.col_indices))
    # a few bytes may claim any shape, so the rows must exist, and columns are bounded as in dense arrays
    is_whole = len(shape) == 2 and len(rows) == shape[0] + 1 > 0 and 0 <= shape[1] <= MOST_COLUMNS
    is_whole = (
        is_whole and len(columns) == len(values) == rows[-1] and rows[0] == 0 and bool((np.diff(rows) >= 0).all())
    )
    if not is_whole or (len(columns) and not 0 <= columns.min() <= columns.max() < shape[1]):
        raise DataError(f"{name} is not a sparse matrix of shape {list(shape)}; send CSR indices that fit it")
    whole = np.zeros(shape, dtype)
    whole[np.repeat(np.arange(shape[0]), np.diff(rows)), columns] = values
    return whole


MOST_COLUMNS = 1024
"""Most numbers per token."""
_MOST_PARTS = 2**18
"""Most data, chunks and arrays of a request, since a body could hold millions of empty ones."""
_MOST_OPTIONS = 64
_MOST_NUMBERS = 2**26
"""Most numbers of a request's sparse matrices, half a GiB."""


def _array(data: bytes, dtype: type[np.generic], name: str) -> NDArray[Any]:
    if len(data) % np.dtype(dtype).itemsize:
        raise DataError(f"{name} has {len(data)} bytes; send a multiple of the size of {np.dtype(dtype)}")
    return np.frombuffer(data, dtype=dtype)


def written_outputs(fields: Mapping[str, Sequence[NDArray[np.float32]]], metrics: Mapping[str, float]) -> bytes:
    """Returns a ForwardBackwardOutput: arrays by name, one per datum, and metrics."""
    message = _CLASS["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord")
    record = message.loss_fn_outputs.add(type_tag="ArrayRecord")
    for name, arrays in fields.items():
        record.num_datums = len(arrays)
        ends = np.cumsum([0, *(array.nbytes for array in arrays)], dtype=np.int64)
        batched = record.fields[name]
        batched.data = b"".join(np.ascontiguousarray(array, np.float32).tobytes() for array in arrays)
        batched.offsets, batched.dtype = ends.tobytes(), _FLOAT32
        batched.trailing_shape.extend(arrays[0].shape[1:])
    for key, value in metrics.items():
        message.metrics[key] = value
    written: bytes = message.SerializeToString()
    return written


Likeliest = tuple[NDArray[np.int32], NDArray[Any]]
"""Likeliest tokens at each position and their log-probabilities, [positions, k]."""


def written_answers(
    answers: Sequence[Completion], prompt_log_probs: NDArray[np.float32] | None, of_prompt: Likeliest | None = None
) -> bytes:
    """Returns a SampleResponse. `prompt_log_probs`, [prompt tokens], are nan if unknown; `of_prompt` has the likeliest
    tokens at each prompt token's position. Either is None if not requested."""
    message = _CLASS["SampleResponse"]()
    for answer in answers:
        sequence = message.sequences.add(
            stop_reason=_REASONS[answer.finish_reason],
            tokens=np.asarray(answer.token_ids, np.int32).tobytes(),
            logprobs=np.asarray(answer.log_probs, np.float32).tobytes(),
        )
        if answer.likeliest:
            pairs = np.asarray(answer.likeliest)
            can_be_drawn = np.isfinite(pairs[..., 1])
            ids = np.where(can_be_drawn, pairs[..., 0], 0).astype(np.int32)
            likeliest = ids, np.where(can_be_drawn, pairs[..., 1], NO_LOG_PROB)
            _write_likeliest(sequence.topk_sampled_logprobs, likeliest)
    if prompt_log_probs is not None:
        message.prompt_logprobs = prompt_log_probs.astype(np.float32).tobytes()
    if of_prompt is not None:
        _write_likeliest(message.topk_prompt_logprobs, of_prompt)
    written: bytes = message.SerializeToString()
    return written


def _write_likeliest(message: Any, likeliest: Likeliest) -> None:
    ids, log_probs = likeliest
    message.length, message.k = ids.shape
    message.token_ids, message.logprobs = ids.tobytes(), log_probs.astype(np.float32).tobytes()
