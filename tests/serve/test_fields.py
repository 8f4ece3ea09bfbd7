"""Every field that the SDK can send is acted upon, refused, or on the list of docs/training/serve.md of those that
change no number. Fields are found in the SDK itself, so that one of a newer SDK cannot be forgotten."""

from __future__ import annotations

import copy
import queue
import random
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
import tinker.types
from pydantic import BaseModel as PydanticModel
from starlette.testclient import TestClient
from tinker.proto import tinker_public_pb2

from mtrain.base.errors import DataError
from mtrain.serve import operations
from mtrain.serve.app import App
from mtrain.serve.checkpoints import Run
from mtrain.serve.desk import Desk, Request
from mtrain.serve.operations import Done, Lora, TinkerPath
from mtrain.serve.protocol import read_batch
from mtrain.serve.store import Described, Store
from tests.data.images.cases import picture
from tests.paths import ROOT
from tests.serve.service import served_model

SESSION = "0" * 32
MODEL, SAMPLER = f"{SESSION}:train:0", f"{SESSION}:sample:0"
SAVED = f"tinker://{MODEL}/weights/one"
NUMBERED = {"model_id": MODEL, "seq_id": 1}
PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}

OFFERED: dict[str, tuple[str, dict[str, Any]]] = {
    "ClientConfigRequest": ("client/config", {"sdk_version": "1"}),
    "CreateSessionRequest": ("create_session", {"tags": [], "sdk_version": "1", "user_metadata": None}),
    "SessionHeartbeatRequest": ("session_heartbeat", {"session_id": SESSION}),
    "CreateModelRequest": (
        "create_model",
        {"session_id": SESSION, "model_seq_id": 1, "base_model": "base", "lora_config": {"rank": 2, "seed": 1}},
    ),
    "OptimStepRequest": ("optim_step", {**NUMBERED, "adam_params": {}}),
    "SaveWeightsRequest": ("save_weights", NUMBERED),
    "SaveWeightsForSamplerRequest": ("save_weights_for_sampler", {**NUMBERED, "path": "one"}),
    "SaveWeightsExternalRequest": ("save_weights_external", {**NUMBERED, "path": "one"}),
    "LoadWeightsRequest": (
        "load_weights",
        {"session_id": SESSION, "model_seq_id": 1, "path": SAVED, "optimizer": False},
    ),
    "GetInfoRequest": ("get_info", {"model_id": MODEL}),
    "CreateSamplingSessionRequest": (
        "create_sampling_session",
        {"session_id": SESSION, "sampling_session_seq_id": 1, "base_model": "base"},
    ),
    "SampleRequest": (
        "asample",
        {
            "sampling_session_id": SAMPLER,
            "seq_id": 1,
            "prompt": PROMPT,
            "sampling_params": {"seed": 1, "max_tokens": 9},
            "prompt_logprobs": True,
        },
    ),
    "FutureRetrieveRequest": ("retrieve_future", {"request_id": "done"}),
}
"""Route and body of each request that the service answers."""
NOT_OFFERED = {
    "CopyWeightsRequest": "copy_weights",
    "CreateCustomLossRequest": "create_custom_loss",
    "ForwardRequest": "forward",
    "FuturesRetrieveRequest": "retrieve_futures",
    "GetBillingUsageRequest": "billing/usage/events",
    "GetCurrentCheckpointStorageUsageRequest": "billing/usage/checkpoints/current",
    "JoinSamplingSessionRequest": "join_sampling_session",
    "SessionSearchRequest": "sessions/search",
    "UnloadModelRequest": "unload_model",
}
"""Routes that the service does not have."""
OTHERWISE = {"ForwardBackwardRequest": "protobuf, below", "TelemetrySendRequest": "of which nothing is read"}
ACTED_UPON: dict[str, dict[str, Any]] = {
    "CreateModelRequest": {
        "model_seq_id": 2,
        "base_model": "owner/base",
        "lora_config": {"rank": 0},
        "lora_config.rank": 3,
        "lora_config.seed": 2,
        "lora_config.train_unembed": False,
        "lora_config.train_mlp": False,
        "lora_config.train_attn": False,
        "user_metadata": {"a": "b"},
        "optimizer_config": {"type": "adamw"},
    },
    "OptimStepRequest": {
        f"adam_params.{name}": value
        for name, value in {
            "learning_rate": 0.5,
            "beta1": 0.5,
            "beta2": 0.5,
            "eps": 1e-3,
            "weight_decay": 0.5,
            "grad_clip_norm": 0.5,
        }.items()
    },
    "SaveWeightsRequest": {"path": "two", "ttl_seconds": 3600, "overwrite": True, "user_metadata": {"a": "b"}},
    "SaveWeightsForSamplerRequest": {"path": "two", "ttl_seconds": 3600, "user_metadata": {"a": "b"}},
    "SaveWeightsExternalRequest": {"path": "two", "ttl_seconds": 3600},
    "LoadWeightsRequest": {"optimizer": True, "user_metadata": {"a": "b"}, "base_model": "base"},
    "CreateSamplingSessionRequest": {"sampling_session_seq_id": 2, "model_path": SAVED},
    "SampleRequest": {
        "num_samples": 2,
        "seq_id": 2,
        "prompt.chunks.0.tokens": [1, 2],
        "sampling_params.max_tokens": 8,
        "sampling_params.seed": 2,
        "sampling_params.stop": [3],
        "sampling_params.temperature": 0.5,
        "sampling_params.top_k": 2,
        "sampling_params.top_p": 0.5,
        "prompt_logprobs": False,
        "topk_prompt_logprobs": 1,
        "topk_sample_logprobs": 1,
        "prompt_logprobs_last_n": 1,
    },
}
"""Other values that are not refused, and are not without effect, by the path of the field."""
SAME_VALUE = {"CreateModelRequest.base_model", "CreateModelRequest.optimizer_config", "LoadWeightsRequest.base_model"}
"""Fields whose only accepted values mean the same."""


def requests() -> dict[str, Any]:
    return {name: each for name, each in vars(tinker.types).items() if name.endswith("Request")}


def members(annotation: Any) -> Iterator[type]:
    """Yields the classes of an annotation, also those of what a list or a union holds."""
    if get_origin(annotation) is not None:
        for each in get_args(annotation):
            yield from members(each)
    elif isinstance(annotation, type):
        yield annotation


def fields(kind: Any, start: str = "") -> dict[str, Any]:
    """Returns the annotation of each field, also of nested ones, by its path in JSON."""
    found = {}
    for name, field in kind.model_fields.items():
        path, annotation = start + name, field.annotation
        found[path] = annotation
        is_list = any(get_origin(each) is list for each in (annotation, *get_args(annotation)))
        for each in members(annotation):
            if issubclass(each, PydanticModel):
                found |= fields(each, f"{path}.0." if is_list else f"{path}.")
    return found


def otherwise(annotation: Any) -> Any:
    """Returns a value of a type that is no default."""
    for kind, value in ((bool, True), (int, 7), (float, 0.5), (str, "other"), (dict, {"a": "b"}), (list, ["a"])):
        if any(each is kind or get_origin(each) is kind for each in (annotation, *get_args(annotation))):
            return value
    return {"a": "b"}


def put(body: Any, path: str, value: Any) -> None:
    """Sets the value at a path; what is on the way there and absent is made."""
    *way, last = path.split(".")
    for step in way:
        body = body[int(step)] if step.isdigit() else body.setdefault(step, {})
    body[last] = value


@contextmanager
def service(folder: Path) -> Iterator[tuple[TestClient, list[Any]]]:
    """Opens an application with a session, a model, a sampler and a checkpoint; all that it begins is done at once."""
    asked: queue.Queue[Request | None] = queue.Queue()
    begun: list[Any] = []
    base = served_model(data__tokenizer="letters")
    app = App(base, Desk(asked.put), Store(folder, lambda: 0.0), None)

    def work() -> None:
        while (request := asked.get()) is not None:
            begun.append((request.id, request.operation))
            app.desk.finish(request, Done({}))

    thread = threading.Thread(target=work, daemon=True)  # set-up may fail before the end of the queue
    thread.start()
    app.sessions[SESSION] = time.monotonic()
    app.desk.open_line(MODEL)
    app._runs[MODEL], app._samplers[SAMPLER] = Run(Lora(rank=2), None), None
    done, _ = app.desk._request(None, "done")  # type: ignore[arg-type]
    app.desk.finish(done, Done({}))
    place = TinkerPath.parsed(SAVED)
    if not app.store.folder(place).exists():
        app.store.fresh(place).mkdir(parents=True)
        app.store.publish(Described(MODEL, "weights", "one", "base", None, 0.0))
    try:
        with TestClient(app.asgi(), base_url="http://127.0.0.1") as client:
            yield client, begun
    finally:
        asked.put(None)
        thread.join()


def outcome(folder: Path, route: str, body: dict[str, Any]) -> tuple[int, Any]:
    """Sends a request; returns the status, and all that came of it."""
    with service(folder) as (client, begun):
        answer = client.post(f"/api/v1/{route}", json=body)
        assert answer.status_code < 500, answer.text
        runs = client.get("/api/v1/training_runs").json()
        said = re.sub(r"[0-9a-f]{32}", "", answer.text) if answer.is_success else ""
    return answer.status_code, (repr(begun), said, runs)


def test_every_request_of_the_sdk_is_known_here() -> None:
    assert requests().keys() == OFFERED.keys() | NOT_OFFERED.keys() | OTHERWISE.keys()


def test_what_is_not_offered_is_refused_as_a_whole(tmp_path: Path) -> None:
    with service(tmp_path) as (client, _):
        for route in NOT_OFFERED.values():
            answer = client.post(f"/api/v1/{route}", json={})
            assert answer.status_code == 404
            assert route in answer.json()["detail"]


UNREAD = {
    "ClientConfigRequest": {"sdk_version"},
    "CreateSessionRequest": {"tags", "user_metadata", "sdk_version", "display_name"},
    "FutureRetrieveRequest": {"allow_metadata_only"},
}
"""Fields that are accepted and not read."""


def marked(kind: Any) -> set[str]:
    is_unread = [(name, isinstance(each, operations.Unread)) for name, field in kind.items() for each in field.metadata]
    return {name for name, each in is_unread if each}


def test_what_is_not_read_is_marked_and_nothing_else() -> None:
    kinds = [each for each in vars(operations).values() if isinstance(each, type) and issubclass(each, operations.Body)]
    found = [marked(each.model_fields) for each in kinds]
    assert sorted(map(sorted, filter(None, found))) == sorted(map(sorted, UNREAD.values()))


@pytest.mark.parametrize("name", OFFERED)
def test_every_field_is_acted_upon_or_refused_or_on_the_list(name: str, tmp_path: Path) -> None:
    route, body = OFFERED[name]
    request = requests()[name]
    sent = (
        body if name == "OptimStepRequest" else request.model_validate(body).model_dump(mode="json", exclude_none=True)
    )
    status, usual = outcome(tmp_path, route, sent)
    assert status == 200, usual
    found = fields(request)
    found |= {path.replace("optim_params", "adam_params"): each for path, each in found.items()}
    for path, annotation in (found | dict.fromkeys(ACTED_UPON.get(name, {}))).items():
        is_known = path in ACTED_UPON.get(name, {})
        changed = copy.deepcopy(sent)
        put(changed, path, ACTED_UPON[name][path] if is_known else otherwise(annotation))
        status, other = outcome(tmp_path, route, changed)
        where = f"{name}.{path}: {status}"
        assert status == 200 or not is_known, where
        if path in UNREAD.get(name, ()):
            assert (status, other) == (200, usual), where
        elif f"{name}.{path}" not in SAME_VALUE:
            assert status >= 400 or other != usual, f"{where} is accepted, and changes nothing"


@pytest.mark.parametrize("name", OFFERED)
def test_keys_that_no_sdk_sends_are_refused(name: str, tmp_path: Path) -> None:
    """Adds a key at every depth, also one whose value asks for nothing."""
    route, body = OFFERED[name]
    found = [path.rpartition(".")[0] for path in fields(requests()[name]) | ACTED_UPON.get(name, {})]
    for path in {each for each in found if not each.startswith(("optim_params", "optimizer_config"))}:
        changed = copy.deepcopy(body)
        put(changed, f"{path}.min_p".removeprefix("."), None)
        status, _ = outcome(tmp_path, route, changed)
        assert status >= 400, path


def test_the_page_lists_what_is_not_read() -> None:
    page = (ROOT / "docs" / "training" / "serve.md").read_text()
    section = page[page.index("## Fields that are not read") :].partition("\n## ")[0]
    listed = set(re.findall(r"`([a-z_]+)`", section.partition("|---|---|")[2]))
    routes = {
        "create_session",
        "client",
        "config",
        "dynamic_config",
        "retrieve_future",
        "forward_backward",
        "telemetry",
    }
    routes |= {"stable_reinforce"}
    spans = {"model_input_spans", "loss_fn_input_spans"}
    assert listed - routes == set().union(*UNREAD.values()) | spans | {"access_scope", "reason", "detail"}


def messages(descriptor: Any, seen: dict[str, Any]) -> dict[str, Any]:
    """Returns the descriptors of a message and of all that it holds."""
    if descriptor.full_name not in seen:
        seen[descriptor.full_name] = descriptor
        for field in descriptor.fields:
            if field.message_type is not None:
                messages(field.message_type, seen)
    return seen


def test_every_field_of_a_batch_is_acted_upon_or_refused_or_on_the_list() -> None:
    """The protobuf of the SDK, field by field, and one that it does not have in each of its messages."""
    sent = tinker_public_pb2.ForwardBackwardRequest(model_id=MODEL, seq_id=1, loss_fn="cross_entropy")
    datum = sent.data.add()
    datum.model_input.add().encoded_text.tokens = b"\1\0\0\0"
    image = datum.model_input.add().image
    image.data, image.format = picture(random.Random(1), format="PNG"), "png"
    tensor = datum.loss_fn_inputs["target_tokens"]
    tensor.dtype, tensor.dense = tinker_public_pb2.DTYPE_INT64, b"\1" + bytes(7)
    tensor.shape.append(1)
    sent.loss_fn_config_v2["clip_low_threshold"].number = 0.5
    sparse = tinker_public_pb2.Tensor(dtype=tinker_public_pb2.DTYPE_INT64, shape=[1, 2])
    sparse.sparse_csr.values, sparse.sparse_csr.col_indices = b"\1" + bytes(7), bytes(8)
    sparse.sparse_csr.crow_indices = bytes(8) + b"\1" + bytes(7)
    datum.loss_fn_inputs["weights"].CopyFrom(sparse)
    usual = repr(read_batch(sent.SerializeToString(deterministic=True)))
    whole = messages(tinker_public_pb2.ForwardBackwardRequest.DESCRIPTOR, {})
    places = {
        "ForwardBackwardRequest": lambda message: message,
        "Datum": lambda message: message.data[0],
        "Chunk": lambda message: message.data[0].model_input[0],
        "EncodedTextChunk": lambda message: message.data[0].model_input[0].encoded_text,
        "ImageChunk": lambda message: message.data[0].model_input[1].image,
        "Tensor": lambda message: message.data[0].loss_fn_inputs["target_tokens"],
        "SparseCsr": lambda message: message.data[0].loss_fn_inputs["weights"].sparse_csr,
        "LossConfigValue": lambda message: message.loss_fn_config_v2["clip_low_threshold"],
    }
    of_maps = {each.name for each in whole.values() if each.GetOptions().map_entry}
    refused = {"ImageDimensions", "DmelChunk"}  # as a whole
    not_read = {"ProvenanceSpan", "PromptProvenanceSpan", "SampledProvenanceSpan"}
    assert {each.name for each in whole.values()} == places.keys() | of_maps | refused | not_read
    for name, place in places.items():
        for field in whole[f"tinker_public.{name}"].fields:
            other = tinker_public_pb2.ForwardBackwardRequest.FromString(sent.SerializeToString(deterministic=True))
            if field.message_type is not None and not field.is_repeated and place(other).HasField(field.name):
                continue  # its own fields are changed
            change(place(other), field)
            is_read = field.name not in ("model_input_spans", "loss_fn_input_spans")
            assert (outcome_of(other) != usual) == is_read, field.full_name
        other = tinker_public_pb2.ForwardBackwardRequest.FromString(sent.SerializeToString(deterministic=True))
        place(other).MergeFromString(b"\xa0\x06\x01")  # number 100, a varint
        assert outcome_of(other) == "refused", name


def change(message: Any, field: Any) -> None:
    """Gives a field another value than it has."""
    value = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        inner = field.message_type.fields_by_name["value"]
        if inner.message_type is None:
            value["other"] = 1.0
        else:
            value["other"].SetInParent()
    elif field.message_type is not None:
        (value.add() if field.is_repeated else value).SetInParent()
    elif field.is_repeated:
        value.append(1)
    else:
        zero = field.default_value
        setattr(
            message, field.name, {str: "other", bytes: bytes(16), bool: True}.get(type(zero), 2 if value != 2 else 1)
        )


def outcome_of(message: Any) -> str:
    try:
        return repr(read_batch(message.SerializeToString(deterministic=True)))
    except DataError:
        return "refused"
