"""Requests that no client sends: every field of every call with values of other types, sizes and forms."""

from __future__ import annotations

import copy
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import httpx
import numpy as np
import pyarrow as pa
from tinker.proto import tinker_public_pb2

HOSTILE_HEADS: list[dict[str, str]] = [
    {"host": "attacker.example"},
    {"host": "127.0.0.1.attacker.example:8000"},
    {"host": ""},
    {"origin": "http://attacker.example"},
    {"origin": "null"},
    {"origin": "http://127.0.0.1:8000"},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
    {"sec-fetch-site": "same-origin"},
    {"content-type": "text/plain"},
    {"content-type": "text/plain; application/json"},
    {"content-type": "application/x-www-form-urlencoded"},
    {"content-type": "multipart/form-data; boundary=x"},
    {"content-type": ""},
]
"""What a browser sends for a page, or for a name that an attack on DNS has led here."""
DEEP = "\0deep"
"""Stands for brackets that are nested 5,000 deep, which JSON's own writer refuses."""
VALUES: list[Any] = [None, True, False, -1, 0, 1, 7, 2**31, 2**63, 2**64, 10**400, 0.5, -0.0, 1e308, -1e308, 5e-324]
VALUES += [float("nan"), float("inf"), float("-inf"), "", "x", "\0", "../..", "x" * 5000, "\ud800", "NaN", "1"]
VALUES += [[], [[]], [None], [1] * 5000, ["x"], [2**63], {}, {"a": 1}, {"a": None}, {"type": "x"}, {"": ""}, DEEP]


def written(body: Any) -> bytes:
    """Writes JSON, also of what JSON has no word for."""
    return json.dumps(body).replace(json.dumps(DEEP), "[" * 5000).encode()


def whole_batch(model_id: str, number: int) -> Any:
    """Makes a batch that is right."""
    sent = tinker_public_pb2.ForwardBackwardRequest(model_id=model_id, seq_id=number, loss_fn="cross_entropy")
    datum = sent.data.add()
    datum.model_input.add().encoded_text.tokens = np.array([1, 2, 3], np.int32).tobytes()
    tensor = datum.loss_fn_inputs["target_tokens"]
    tensor.dtype, tensor.dense = tinker_public_pb2.DTYPE_INT64, np.array([2, 3, 4]).tobytes()
    tensor.shape.append(3)
    weights = datum.loss_fn_inputs["weights"]
    weights.dtype, weights.dense = tinker_public_pb2.DTYPE_FLOAT32, np.ones(3, np.float32).tobytes()
    return sent


def _spoiled(change: Callable[[Any], object]) -> Callable[[str, int], dict[str, Any]]:
    def made(model_id: str, number: int) -> dict[str, Any]:
        sent = whole_batch(model_id, number)
        change(sent)
        return {"content": sent.SerializeToString()}

    return made


def _shape(*sizes: int, data: bytes | None = b"") -> Callable[[str, int], dict[str, Any]]:
    def change(sent: Any) -> None:
        tensor = sent.data[0].loss_fn_inputs["target_tokens"]
        del tensor.shape[:]
        tensor.shape.extend(sizes)
        if data is not None:
            tensor.dense = data

    return _spoiled(change)


def _sparse(shape: Sequence[int], rows: Sequence[int], columns: Sequence[int]) -> Callable[[str, int], dict[str, Any]]:
    def change(sent: Any) -> None:
        tensor = sent.data[0].loss_fn_inputs["target_tokens"]
        del tensor.shape[:]
        tensor.shape.extend(shape)
        tensor.sparse_csr.crow_indices = np.array(rows, np.int64).tobytes()
        tensor.sparse_csr.col_indices = np.array(columns, np.int64).tobytes()
        tensor.sparse_csr.values = np.ones(len(columns), np.int64).tobytes()

    return _spoiled(change)


def _cut(model_id: str, number: int) -> dict[str, Any]:
    return {"content": whole_batch(model_id, number).SerializeToString()[:-3]}


def _huge(model_id: str, number: int) -> dict[str, Any]:
    return {"content": whole_batch(model_id, number).SerializeToString() + bytes(2**26)}


def _bomb(model_id: str, number: int) -> dict[str, Any]:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(_huge(model_id, number)["content"])
    return {"content": bytes(sink.getvalue()), "headers": {"content-encoding": "zstd"}}


def _cut_stream(model_id: str, number: int) -> dict[str, Any]:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(whole_batch(model_id, number).SerializeToString() + random.Random(0).randbytes(2**20))
    return {"content": bytes(sink.getvalue())[:-9], "headers": {"content-encoding": "zstd"}}


HOSTILE_BATCHES: list[Callable[[str, int], dict[str, Any]]] = [
    _shape(0, 2**62),
    _shape(2**62, 0),
    _shape(2**62, 2**62, data=None),
    _shape(*[0] * 65),
    _shape(3, 1, 1, data=None),
    _shape(-1, -3, data=None),
    _shape(3, 0),
    _sparse((-1, 5), (), ()),
    _sparse((0, 5), (0,), ()),
    _sparse((3, 2**62), (0, 1, 1, 1), (0,)),
    _sparse((3, -1), (0, 1, 1, 1), (0,)),
    _sparse((3, 2), (0, 1, 1, 2**40), (0,)),
    _sparse((3, 2), (0, 3, -1, 1), (0,)),
    _sparse((), (), ()),
    _sparse((2**18, 1024), [0] * (2**18 + 1), ()),
    _spoiled(lambda sent: sent.data[0].model_input[0].image.SetInParent()),
    _spoiled(lambda sent: sent.data[0].model_input[0].dmel.SetInParent()),
    _spoiled(lambda sent: sent.data[0].model_input.add()),
    _spoiled(lambda sent: setattr(sent.data[0].model_input[0].encoded_text, "tokens", b"123")),
    _spoiled(lambda sent: setattr(sent.data[0].loss_fn_inputs["weights"], "dtype", 4)),
    _spoiled(lambda sent: sent.MergeFromString(b"\xa0\x06\x01")),
    _spoiled(lambda sent: sent.MergeFromString(b"\x1a\x00" * 2**18)),
    _spoiled(lambda sent: sent.data[0].MergeFromString(b"\x0a\x00" * 2**18)),
    _spoiled(lambda sent: sent.loss_fn_config.update({f"{number}": 1.0 for number in range(100)})),
    _cut,
    _huge,
    _bomb,
    _cut_stream,
]
"""Batches that are refused when they arrive, by the model's name and the call's number."""
_LATER: list[Callable[[Any], object]] = [
    lambda sent: setattr(sent, "loss_fn", "dro"),
    lambda sent: setattr(sent, "loss_fn", ""),
    lambda sent: setattr(sent, "loss_fn", "ppo"),
    lambda sent: sent.ClearField("data"),
    lambda sent: sent.data[0].ClearField("model_input"),
    lambda sent: sent.data[0].ClearField("loss_fn_inputs"),
    lambda sent: sent.loss_fn_config.update({"x": 1.0}),
    lambda sent: _tokens(sent, [2**31 - 1] * 3),
    lambda sent: _tokens(sent, [-1] * 3),
    lambda sent: _tokens(sent, [1] * 5000),
    lambda sent: _targets(sent, [-(2**63)] * 3),
    lambda sent: _targets(sent, [2**63 - 1] * 3),
    *[
        (lambda sent, value=value: _weights(sent, [value] * 3))
        for value in (np.nan, np.inf, -np.inf, 3.4e38, -3.4e38, 1e19, 0.0, 1e-45)
    ],
]
"""Batches that can only be judged in their turn."""


def _tokens(sent: Any, values: Sequence[int]) -> None:
    sent.data[0].model_input[0].encoded_text.tokens = np.array(values, np.int32).tobytes()


def _targets(sent: Any, values: Sequence[int]) -> None:
    sent.data[0].loss_fn_inputs["target_tokens"].dense = np.array(values, np.int64).tobytes()


def _weights(sent: Any, values: Sequence[float]) -> None:
    sent.data[0].loss_fn_inputs["weights"].dense = np.array(values, np.float32).tobytes()


class Client:
    """A client with a session, a model and a sampler, which counts its calls as the SDK does."""

    def __init__(self, address: str) -> None:
        self.http = httpx.Client(base_url=f"{address}/api/v1/", timeout=120)

    def __enter__(self) -> Self:
        self.session_id = self.http.post("create_session", json={"tags": []}).json()["session_id"]
        lora = {"rank": 2, "seed": 3}
        body = {"session_id": self.session_id, "model_seq_id": 0, "base_model": "base", "lora_config": lora}
        self.model_id, self.number = self.http.post("create_model", json=body).json()["model_id"], 0
        sampler = {"session_id": self.session_id, "sampling_session_seq_id": 0, "base_model": "base"}
        self.sampler_id = self.http.post("create_sampling_session", json=sampler).json()["sampling_session_id"]
        self.path = self.finished("save_weights", {"path": "first"})["path"]
        return self

    def __exit__(self, *args: object) -> None:
        self.http.post(f"sessions/{self.session_id}/finish", json={})
        self.http.close()

    def next(self) -> int:
        """Returns the number of the next call."""
        self.number += 1
        return self.number

    def finished(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        """Makes a call of the model, and returns what came of it."""
        answer = self.http.post(route, json={"model_id": self.model_id, "seq_id": self.next(), **body})
        assert answer.status_code == 200, answer.text
        return self.result(answer.json()["request_id"])

    def result(self, request_id: str) -> dict[str, Any]:
        """Waits for a result."""
        end = time.monotonic() + 60
        while True:
            answer = self.http.post("retrieve_future", json={"request_id": request_id})
            assert time.monotonic() < end, "the client is blocked"
            if answer.headers["content-type"] != "application/json":
                return {"type": "forward_backward"}
            found: dict[str, Any] = answer.json()
            if found.get("type") != "try_again":
                return found

    def step(self, tokens: Sequence[int]) -> None:
        """Makes a step that is right, after one that ends whatever was begun."""
        self.finished("optim_step", {"adam_params": {"learning_rate": 0.0}})
        sent = whole_batch(self.model_id, self.next())
        _tokens(sent, tokens[:3])
        answer = self.http.post("forward_backward", content=sent.SerializeToString())
        assert self.result(answer.json()["request_id"]) == {"type": "forward_backward"}
        found = self.finished("optim_step", {"adam_params": {"learning_rate": 1e-4}})
        assert found.get("metrics"), found


def _usual(client: Client) -> dict[str, dict[str, Any]]:
    """Returns a body of each call that would be right."""
    numbered = {"model_id": client.model_id, "seq_id": 0}
    of_session = {"session_id": client.session_id}
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
    sampling = {"seed": 1, "max_tokens": 3, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "stop": [3]}
    lora = {"rank": 2, "seed": 1, "train_attn": True, "train_mlp": True, "train_unembed": True}
    adam = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.9, "eps": 1e-8, "weight_decay": 0.0, "grad_clip_norm": 0.0}
    saved = {**numbered, "path": "x", "ttl_seconds": 3600}
    return {
        "client/config": {"sdk_version": "1"},
        "client/dynamic_config": {"sdk_version": "1"},
        "telemetry": {"events": []},
        "create_session": {"tags": [], "user_metadata": {}, "sdk_version": "1", "project_id": None},
        "session_heartbeat": of_session,
        "create_model": {
            **of_session,
            "model_seq_id": 5,
            "base_model": "base",
            "lora_config": lora,
            "user_metadata": {"a": "b"},
            "optimizer_config": {"type": "adamw"},
        },
        "optim_step": {**numbered, "adam_params": adam},
        "save_weights": {**saved, "overwrite": True, "user_metadata": {"a": "b"}},
        "save_weights_for_sampler": {**saved, "kind": "snapshot", "sampling_session_seq_id": None},
        "save_weights_external": {**saved, "age_encryption_recipients": None},
        "load_weights": {**numbered, "path": client.path, "optimizer": True, "base_model": "base"},
        "get_info": {"model_id": client.model_id},
        "weights_info": {"tinker_path": client.path},
        "create_sampling_session": {**of_session, "sampling_session_seq_id": 7, "model_path": client.path},
        "asample": {
            "sampling_session_id": client.sampler_id,
            "seq_id": 9,
            "prompt": prompt,
            "sampling_params": sampling,
            "num_samples": 1,
            "prompt_logprobs": True,
            "prompt_logprobs_last_n": 1,
            "topk_prompt_logprobs": 2,
            "topk_sample_logprobs": 2,
        },
        "retrieve_future": {"request_id": f"{client.model_id}:1", "allow_metadata_only": True},
    }


ORDERED = ["optim_step", "save_weights", "save_weights_for_sampler", "save_weights_external", "load_weights"]


def _paths(body: Any) -> Iterator[list[Any]]:
    items: Any = body.items() if isinstance(body, dict) else enumerate(body) if isinstance(body, list) else ()
    for key, value in items:
        yield [key]
        yield from ([key, *rest] for rest in _paths(value))


def hostile_bodies(client: Client, rng: random.Random, count: int) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Draws requests: method, path, and the rest for httpx. Each call of the model spends a number, as in the SDK."""
    usual = _usual(client)
    one = f"training_runs/{client.model_id}/checkpoints/weights"
    for _ in range(count):
        kind = rng.random()
        if kind < 0.2:
            number = client.next()
            if rng.random() < 0.5:
                yield "POST", "forward_backward", rng.choice(HOSTILE_BATCHES)(client.model_id, number)
            else:
                sent = whole_batch(client.model_id, number)
                rng.choice(_LATER)(sent)
                yield "POST", "forward_backward", {"content": sent.SerializeToString()}
        elif kind < 0.3:
            name = rng.choice(["x", "%00", "..", "%2e%2e", "x" * 300, "%ff", "first%2f.."])
            query = rng.choice(["", "?limit=-1", "?limit=1e3", "?offset=" + "9" * 50, "?x=1", "?limit=%ff", "?limit="])
            path = rng.choice(["training_runs", "checkpoints", f"training_runs/{name}", f"samplers/{name}", name])
            yield rng.choice(["GET", "DELETE", "PUT", "PATCH", "OPTIONS", "HEAD"]), f"{path}{query}", {}
            yield rng.choice(["DELETE", "PUT"]), f"{one}/{name}{rng.choice(['', '/ttl', '/publish'])}", {}
        else:
            route = rng.choice(list(usual))
            body = copy.deepcopy(usual[route])
            spends = route in ORDERED
            *way, last = rng.choice(list(_paths(body)))
            if spends and last not in ("model_id", "seq_id"):
                body["seq_id"] = client.next()
            place: Any = body
            for step in way:
                place = place[step]
            place[last] = rng.choice(VALUES)
            yield "POST", route, _headed(rng, written(body), spends)


def _headed(rng: random.Random, content: bytes, spends: bool) -> dict[str, Any]:
    """Sends some bodies as others than JSON; such a request is no call, and spends nothing."""
    if spends or rng.random() < 0.9:
        return {"content": content, "headers": {"content-type": "application/json"}}
    return {"content": content, "headers": rng.choice(HOSTILE_HEADS) | {"x-filler": "x" * 1000}}
