"""Who may call a service without a key: programs of its machine, and no page in a browser; and how many at once."""

from __future__ import annotations

import resource
import socket
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from starlette.testclient import TestClient
from tinker.proto.tinker_public_pb2 import SampleResponse

from mtrain.base.errors import ConfigError
from mtrain.serve.app import App
from mtrain.serve.desk import Desk
from mtrain.serve.http_process import _allow_files
from mtrain.serve.operations import Done, Lora, TinkerPath
from mtrain.serve.served import Served
from mtrain.serve.store import Described, Store
from tests.fault_table import Notice
from tests.messages import refuses
from tests.parity.cases import case
from tests.parity.families import DEEPSEEK_ATTENTION, GEMMA4, HYBRID, MAMBA
from tests.pool import Pool
from tests.serve import service_ranks
from tests.serve.hostile import HOSTILE_HEADS
from tests.serve.service import KEY, served_model
from tests.serve.test_app import listening
from tests.serve.test_clients import LAYOUTS
from tests.serve.test_fields import MODEL, SAVED, SESSION, service


def app_of(folder: Path, token: str | None) -> App:
    return App(served_model(), Desk(lambda request: None), Store(folder), token)


@pytest.mark.fault(
    "clients",
    "a web page that calls a service without a key on loopback, also by an attack on DNS",
    happens="each call is refused by 403 or 415 with the reason; it neither reads, samples, trains nor deletes",
    exit_code=None,
)
def test_no_page_in_a_browser_may_call(tmp_path: Path, notice: Notice) -> None:
    """Every route, with each head that a browser could send for a page."""
    place = TinkerPath.parsed(SAVED)
    with service(tmp_path) as (client, begun):
        routes = {(method, each.path) for each in client.app.routes for method in each.methods or ()}  # type: ignore[attr-defined]
        values = {"session_id": SESSION, "sampler_id": "x", "model_id": MODEL, "kind": "weights", "name": "one"}
        assert len(routes) > 30
        with notice:
            for method, path in sorted(routes):
                for key, value in {**values, "file:path": "x", "path:path": "x"}.items():
                    path = path.replace(f"{{{key}}}", value)
                for head in HOSTILE_HEADS:
                    if "content-type" in head and method in ("GET", "HEAD"):
                        continue
                    answer = client.request(method, path, headers=head, content=b"{}")
                    assert answer.status_code in (403, 415), (method, path, head, answer.text)
                    assert answer.headers.get("access-control-allow-origin") is None
        assert begun == []
        assert client.get("/api/v1/checkpoints").json()["checkpoints"][0]["tinker_path"] == str(place)


def test_programs_of_the_machine_may_call_by_any_of_its_names(tmp_path: Path) -> None:
    with TestClient(app_of(tmp_path, None).asgi()) as client:
        for host in (
            "127.0.0.1",
            "127.0.0.1:8000",
            "localhost:8000",
            "LOCALHOST",
            "[::1]:8000",
            "127.8.8.8:1",
            "[::1]",
        ):
            assert client.get("/api/v1/healthz", headers={"host": host}).status_code == 200, host
        for host in (
            "testserver",
            "0.0.0.0",
            "10.0.0.1:8000",
            "[::2]",
            "localhost.evil.com",
            "127.0.0.1@evil",
            "a:b:c",
        ):
            assert client.get("/api/v1/healthz", headers={"host": host}).status_code == 403, host
        local = {"host": "localhost"}
        for kind in ("application/json", "Application/JSON; charset=utf-8", "application/x-protobuf"):
            answer = client.post("/api/v1/create_session", content=b"{}", headers=local | {"content-type": kind})
            assert answer.status_code == 200, kind
        assert client.get("/api/v1/healthz", headers=local | {"sec-fetch-site": "none"}).status_code == 200
    with TestClient(app_of(tmp_path, KEY).asgi(), headers={"x-api-key": KEY}) as client:
        for host in ("testserver", "node17:8000"):  # a key is more than a page can have
            assert client.get("/api/v1/healthz", headers={"host": host}).status_code == 200


@pytest.mark.fault(
    "clients",
    "user_metadata of a training run that is not text, in a checkpoint of an older version",
    happens="listed as JSON; a client that sends such is refused",
    exit_code=None,
)
def test_what_is_kept_with_a_run_is_text(tmp_path: Path, notice: Notice) -> None:
    """The SDK could not list a run with anything else, nor any other run then."""
    kept = {"a": 1, "b": [1, None], "c": "text", "d": {"e": 1.5}}
    place = TinkerPath.of(MODEL, "weights", "old")
    app = app_of(tmp_path, None)
    app.store.fresh(place).mkdir(parents=True)
    app.store.publish(Described(MODEL, "weights", "old", "base", None, 0.0, run_metadata=kept))
    with TestClient(app.asgi(), base_url="http://localhost") as client, notice:
        (run,) = client.get("/api/v1/training_runs").json()["training_runs"]
        assert run["user_metadata"] == {"a": "1", "b": "[1, null]", "c": "text", "d": '{"e": 1.5}'}
        session_id = client.post("/api/v1/create_session", json={}).json()["session_id"]
        for given in ({"a": 1}, {"a": None}, {"a": ["x"]}, ["a"], "a", {"a": "x" * 70_000}):
            body = {"session_id": session_id, "model_seq_id": 0, "base_model": "base", "user_metadata": given}
            answer = client.post("/api/v1/create_model", json=body)
            assert answer.status_code == 422, given
            assert "user_metadata" in answer.json()["detail"]
        text = '{"session_id": "%s", "model_seq_id": 0, "base_model": "base", "user_metadata": {"a": "\\ud800"}}'
        assert client.post("/api/v1/create_model", content=text % session_id).status_code == 422
        assert len(client.get("/api/v1/training_runs").json()["training_runs"]) == 1


@pytest.mark.fault(
    "clients",
    "more connections than there may be open files, which say nothing, half a head or half a body",
    happens="those that have been silent for longest are closed; clients that wait for an answer keep theirs",
    exit_code=None,
)
@pytest.mark.waits
def test_connections_that_wait_for_their_client_give_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notice: Notice
) -> None:
    monkeypatch.setattr("mtrain.serve.http_process._MOST_CONNECTIONS", 20)
    head = b"POST /api/v1/create_session HTTP/1.1\r\nhost: localhost\r\n"
    beginnings = [
        b"",
        head,
        head + b"content-length: 9\r\n\r\n{",
        b"GET /api/v1/healthz HTTP/1.1\r\nhost: localhost\r\n\r\n",
    ]
    with ExitStack() as held:
        app = app_of(tmp_path, None)
        address = held.enter_context(listening(app))
        port = address.port or 0
        with httpx.Client(base_url=address) as client:
            session_id = client.post("/api/v1/create_session", json={}).json()["session_id"]
            body = {"session_id": session_id, "model_seq_id": 0, "base_model": "base"}
            asked = {"request_id": client.post("/api/v1/create_model", json=body).json()["request_id"]}
            answers: list[httpx.Response] = []
            thread = threading.Thread(target=lambda: answers.append(client.post("/api/v1/retrieve_future", json=asked)))
            thread.start()
            with notice:
                for number in range(100):
                    one = held.enter_context(socket.create_connection(("127.0.0.1", port)))
                    one.sendall(beginnings[number % len(beginnings)])
                    if number % 20 == 0:
                        assert httpx.get(address.join("/api/v1/healthz"), timeout=30).is_success
            app.desk.end()
            thread.join(30)
            assert "was stopped" in answers[0].json()["error"]


def test_a_service_takes_as_many_open_files_as_it_may() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1024), hard))
        _allow_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(hard, 2**15)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _sequences(answer: Done) -> Sequence[Any]:
    found: Sequence[Any] = SampleResponse.FromString(answer.content).sequences
    return found


def test_an_adapter_is_bounded_by_the_model() -> None:
    config = case().config()
    sizes = (config.model.hidden_size, config.model.ffn_hidden_size)
    assert Served(config).adapted(Lora(rank=max(sizes))).adapter is not None
    for rank in (65536, 10**6):
        with refuses(ConfigError, f"rank={rank}", "at most"):
            Served(config).adapted(Lora.model_construct(rank=rank))


@pytest.mark.fault(
    "clients",
    "an adapter, or one more model, that memory does not hold",
    happens="the call fails with its size; the service and its other models go on",
    exit_code=None,
)
def test_what_memory_does_not_hold_is_refused(pool: Pool, tmp_path: Path, notice: Notice) -> None:
    """Two ranks share a service, and one of them has too little."""
    one = LAYOUTS[2]
    with notice:
        found = pool.run(service_ranks.short_of_memory, one.resolved(one.config()), one.config(), str(tmp_path))
    for results in found:
        assert ["there is not enough memory" in each for each in results] == [False, True, True, True, False, False]


@pytest.mark.fault(
    "clients",
    "samples whose keys and values memory does not hold together, or not even one of them",
    happens="they are drawn a few at a time, and are the same; or the call fails with the size of one",
    exit_code=None,
)
def test_samples_are_drawn_as_many_at_a_time_as_memory_holds(pool: Pool, tmp_path: Path, notice: Notice) -> None:
    one = LAYOUTS[1]
    with notice:
        given = (one.config(), str(tmp_path), [10**12, 10_000, 4_000, 0])
        everyone = pool.run(service_ranks.sampled, one.resolved(one.config()), *given)
    assert everyone[0] == everyone[1]
    (plenty, at_once), (few, few_at_once), *none = everyone[0]
    assert isinstance(plenty, Done)
    assert isinstance(few, Done)
    for one, other in zip(_sequences(plenty), _sequences(few), strict=True):
        assert one.tokens == other.tokens
        # a product of fewer rows may add in another order
        drawn, expected = np.frombuffer(one.logprobs, np.float32), np.frombuffer(other.logprobs, np.float32)
        np.testing.assert_allclose(drawn, expected, rtol=1e-5)
    assert (at_once, few_at_once) == ([9], [3])
    assert all("request fewer tokens" in failed.message and not drawn for failed, drawn in none)


MODELS = {
    "grouped": {},
    "latents": DEEPSEEK_ATTENTION,
    "two kinds of heads": GEMMA4,
    "delta nets": HYBRID,
    "mamba": MAMBA,
}


def test_the_size_of_a_sequence_is_what_its_caches_hold(pool: Pool) -> None:
    one = case(8, tp=2)
    configs = [one.config(**changes) for changes in MODELS.values()]
    for found in pool.run(service_ranks.remembered, one.resolved(configs[0]), configs, 40):
        assert [each.found for each in found] == [each.counted for each in found], list(MODELS)
