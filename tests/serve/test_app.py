"""What the service answers to anybody: keys, sizes, and bodies that no client would send."""

from __future__ import annotations

import contextlib
import queue
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient
from tinker import types
from tinker.proto import tinker_public_pb2
from tinker.proto.request_conv import forward_backward_request_to_proto

from mtrain.base.errors import ConfigError, DataError
from mtrain.serve.app import App
from mtrain.serve.checked import check_token
from mtrain.serve.desk import Desk, Request
from mtrain.serve.http import MOST_BYTES
from mtrain.serve.http_process import server_of
from mtrain.serve.losses import Batch
from mtrain.serve.operations import CreateModel, Done, Lora, TinkerPath, Unload
from mtrain.serve.protocol import SentDatum, read_batch
from mtrain.serve.run import listener_at
from mtrain.serve.served import Served
from mtrain.serve.store import Store
from tests.fault_table import Notice
from tests.messages import refuses
from tests.parity.cases import case
from tests.parity.expert_models import MIXTRAL
from tests.serve.service import served_model

KEY = "tml-of-the-tests-0123456789"


def app_of(folder: Path, begin: Callable[[Request], object] = lambda request: None) -> App:
    """Returns an application without an engine: what it accepts waits, unless `begin` does something."""
    return App(served_model(), Desk(begin), Store(folder), KEY)


@contextlib.contextmanager
def listening(app: App) -> Iterator[httpx.URL]:
    """Serves in a thread; yields the address."""
    with listener_at("127.0.0.1", 0) as listener:
        server = server_of(app)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield httpx.URL(f"http://127.0.0.1:{listener.getsockname()[1]}")
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    app = app_of(tmp_path_factory.mktemp("service"))
    with TestClient(app.asgi(), headers={"x-api-key": KEY}, raise_server_exceptions=False) as found:
        yield found


def session_of(client: TestClient) -> str:
    found: str = client.post("/api/v1/create_session", json={"tags": []}).json()["session_id"]
    return found


def model_of(client: TestClient) -> str:
    body = {"session_id": session_of(client), "model_seq_id": 0, "base_model": "base", "lora_config": {"rank": 2}}
    found: str = client.post("/api/v1/create_model", json=body).json()["model_id"]
    return found


@pytest.mark.fault(
    "clients",
    "a client without the key of the service, or with another",
    happens="each call is answered by 401 with the reason; nothing is read of the body",
    exit_code=None,
)
@pytest.mark.parametrize("key", [b"", b"tml-another-key-0123456789", KEY[:-1].encode(), "ключ".encode()], ids=str)
def test_every_call_needs_the_key(client: TestClient, key: bytes, notice: Notice) -> None:
    with notice:
        for path in ("client/config", "create_session", "no/such/call"):
            answer = client.post(f"/api/v1/{path}", content=b"{", headers={b"x-api-key": key})
            assert answer.status_code == 401
            assert "TINKER_API_KEY" in answer.json()["detail"]


def test_without_a_key_only_this_machine_is_served() -> None:
    check_token("127.0.0.1", None)
    check_token("0.0.0.0", KEY)
    with refuses(ConfigError, "--token-file"):
        check_token("0.0.0.0", None)
    with refuses(ConfigError, "tml-"):
        check_token("127.0.0.1", "short")


def compressed(body: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(body)
    return bytes(sink.getvalue())


def sent(model_id: str, **changes: Any) -> bytes:
    datum = types.Datum(model_input=types.ModelInput.from_ints([1, 2]), loss_fn_inputs={"target_tokens": [2, 3]})
    given = types.ForwardBackwardInput(data=[datum], loss_fn="cross_entropy")
    request = types.ForwardBackwardRequest(forward_backward_input=given, model_id=model_id, seq_id=1)
    message = forward_backward_request_to_proto(request)
    for name, value in changes.items():
        setattr(message, name, value)
    return bytes(message.SerializeToString())


@pytest.mark.fault(
    "clients",
    "a body that is too large, a zstd bomb, a damaged message, a call of no model or out of any order",
    happens="refused with the reason and a status of 4xx; at most the allowed size is ever held, the service goes on",
    exit_code=None,
)
def test_bodies_that_no_client_sends_are_refused(client: TestClient, notice: Notice) -> None:
    model_id = model_of(client)
    zstd = {"content-encoding": "zstd"}
    bomb = compressed(bytes(MOST_BYTES + 1))
    assert len(bomb) < MOST_BYTES / 1000
    with notice:
        for body, headers, status in [
            (b"x" * (MOST_BYTES + 1), {}, 413),
            (bomb, zstd, 413),
            (b"no zstd", zstd, 400),
            (compressed(sent(model_id))[:-5], zstd, 400),
            (b"\xff\xff\xff", {}, 400),
            (sent(model_id), {"content-encoding": "br"}, 415),
            (sent("no model"), {}, 404),
            (sent(model_id, seq_id=0), {}, 400),
            (sent(model_id), {}, 200),
            (compressed(sent(model_id)), zstd, 200),
        ]:
            answer = client.post("/api/v1/forward_backward", content=body, headers=headers)
            assert answer.status_code == status, (body[:20], answer.text)
            assert status == 200 or len(answer.json()["detail"]) < 400
    assert client.get("/api/v1/healthz").json() == {"status": "ok"}


META = '{"session_id": "SESSION", "model_seq_id": 0, "base_model": "base", "user_metadata": {"x": [1, NaN]}}'
ASKED = '"prompt": {"chunks": []}, "sampling_params": {}}'


@pytest.mark.fault(
    "clients",
    "a name of a checkpoint that leads out of the run folder, nan or a number out of range in JSON, a name of nothing",
    happens="refused with the reason and a status of 4xx; nothing outside the run folder is read or written",
    exit_code=None,
)
@pytest.mark.parametrize(
    ("call", "body", "status"),
    [
        ("optim_step", '{"model_id": "MODEL", "seq_id": 1, "adam_params": {"learning_rate": NaN}}', 422),
        ("optim_step", '{"model_id": "MODEL", "seq_id": 1, "adam_params": {"beta1": 1e999}}', 422),
        ("optim_step", '{"model_id": "MODEL", "seq_id": 1, "optimizer_params": {"type": "dimuon"}}', 400),
        ("optim_step", '{"model_id": "MODEL", "seq_id": 99999999999999999999}', 422),
        ("create_model", '{"session_id": "SESSION", "model_seq_id": 0, "base_model": "other"}', 400),
        ("create_model", '{"session_id": "nobody", "model_seq_id": 0, "base_model": "base"}', 404),
        ("save_weights", '{"model_id": "MODEL", "seq_id": 1, "path": "../../etc/passwd"}', 400),
        ("save_weights", '{"model_id": "MODEL", "seq_id": 1, "path": ".new.one"}', 400),
        ("save_weights", '{"model_id": "../x", "seq_id": 1, "path": "one"}', 400),
        ("load_weights", '{"path": "tinker://../../etc/weights/passwd", "optimizer": true}', 400),
        ("load_weights", '{"path": "/etc/passwd", "optimizer": true}', 400),
        ("weights_info", '{"tinker_path": "tinker://MODEL/weights/none"}', 400),
        ("create_sampling_session", '{"session_id": "SESSION", "sampling_session_seq_id": 0, "base_model": "x"}', 400),
        ("create_model", META, 422),
        # the number that the SDK gives the first call of a client that was pickled
        ("asample", '{"sampling_session_id": "x", "seq_id": 999999999000000000, ' + ASKED, 404),
        ("asample", '{"sampling_session_id": "x", "seq_id": 0, "prompt": {"chunks": []}, "sampling_params": {}}', 404),
        ("retrieve_future", '{"request_id": "nothing"}', 410),
        ("session_heartbeat", '{"session_id": "nobody"}', 404),
        ("session_heartbeat", "[" * 100_000, 422),
        ("billing/usage/events", "{}", 404),
    ],
)
def test_each_fault_of_a_body_has_a_sentence(
    client: TestClient, call: str, body: str, status: int, notice: Notice
) -> None:
    model_id = model_of(client)
    given = body.replace("MODEL", model_id).replace("SESSION", model_id.partition(":")[0])
    with notice:
        answer = client.post(f"/api/v1/{call}", content=given)
    assert answer.status_code == status, answer.text
    assert 10 < len(answer.json()["detail"]) < 400


CALLS = ["create_session", "create_model", "forward_backward", "optim_step", "save_weights", "load_weights", "asample"]
CALLS += ["save_weights_for_sampler", "get_info", "weights_info", "create_sampling_session", "session_heartbeat", "x"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)
FIELDS = st.sampled_from(["session_id", "model_id", "seq_id", "path", "lora_config", "adam_params", "prompt", "rank"])


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(call=st.sampled_from(CALLS), body=st.binary(max_size=200) | st.dictionaries(FIELDS, JSON, max_size=6))
def test_anything_is_answered_and_nothing_ends_the_service(client: TestClient, call: str, body: Any) -> None:
    try:
        answer = client.post(f"/api/v1/{call}", **({"content": body} if isinstance(body, bytes) else {"json": body}))
    except ValueError:  # what JSON has no word for cannot be sent
        return
    assert answer.status_code < 500, answer.text


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_damaged_batch_is_read_or_refused(data: st.DataObject) -> None:
    """Bytes of a batch are cut or changed: what is read has the shapes that it claims."""
    whole = bytearray(sent("model"))
    for _ in range(data.draw(st.integers(0, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    body = bytes(whole[: data.draw(st.integers(0, len(whole)))])
    with contextlib.suppress(DataError):  # any other error would be a 500
        found = read_batch(body)
        Batch.of(found.data, found.loss, found.options, 61)


@pytest.mark.fault(
    "clients",
    "a few bytes that claim a tensor of 2^60 columns, or of a negative size",
    happens="refused with the shape; nothing of that size is made",
    exit_code=None,
)
def test_a_matrix_of_any_claimed_size_is_not_made(notice: Notice) -> None:
    message = tinker_public_pb2.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="cross_entropy")
    tensor = message.data.add().loss_fn_inputs["target_tokens"]
    tensor.dtype = tinker_public_pb2.DTYPE_INT64
    tensor.shape.extend([1, 2**60])
    tensor.sparse_csr.crow_indices = np.array([0, 0]).tobytes()
    with notice, refuses(DataError, "not a sparse matrix of shape [1, 1152921504606846976]"):
        read_batch(message.SerializeToString())
    tensor.dense = b"\0" * 16
    del tensor.shape[:]
    tensor.shape.extend([-1, -2])
    with refuses(DataError, "the shape [-1, -2]"):
        read_batch(message.SerializeToString())


def test_columns_and_lengths_have_to_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, targets = np.array([1, 2, 3], np.int32), np.array([2, 3, 4])
    for inputs, fact in [
        ({"target_tokens": targets[:2]}, "target_tokens of shape [2]"),
        ({"target_tokens": targets, "weights": np.ones(2, np.float32)}, "weights of shape [2]"),
        ({"target_tokens": targets.reshape(1, 3)}, "shape [1, 3]"),
        ({"target_tokens": targets - 5}, "beyond the vocabulary"),
        ({"target_tokens": targets, "route": targets}, "route"),
    ]:
        with refuses(DataError, fact):
            Batch.of([SentDatum(tokens, inputs)], "cross_entropy", {}, 61)
    with refuses(DataError, "temperature"):
        Batch.of([SentDatum(tokens, {"target_tokens": targets})], "ppo", {"temperature": 1.0}, 61)
    monkeypatch.setattr("mtrain.serve.losses._MOST_TOKENS", 5)
    with refuses(DataError, "6 tokens"):
        Batch.of([SentDatum(tokens, {"target_tokens": targets})] * 2, "cross_entropy", {}, 61)


def test_modules_of_an_adapter_are_those_that_the_model_has(tmp_path: Path) -> None:
    """What a default client names fits models with experts alone and with tied tables, too."""
    experts = case().config(**MIXTRAL)
    assert Served(experts).adapted(Lora(rank=4)).adapter.targets == ("qkv", "proj", "experts", "output")  # type: ignore[union-attr]
    with refuses(ConfigError, "rank=0"):
        Served(experts).adapted(Lora(rank=4, train_attn=False, train_mlp=False, train_unembed=False))
    begun: list[Request] = []
    app = app_of(tmp_path, begun.append)
    tied = case().config(run__dir="base", model__tied_embeddings=True)
    app.base = Served(tied)
    with TestClient(app.asgi(), headers={"x-api-key": KEY}) as client:
        model_of(client)
    (made,) = begun
    assert isinstance(made.operation, CreateModel)
    assert all(app.base.is_called(name) for name in ("base", "owner/base"))
    assert not any(app.base.is_called(name) for name in ("other", "a/b/base", "base/other", ""))
    assert made.operation.lora_config is not None
    assert app.base.adapted(made.operation.lora_config).adapter.targets == ("qkv", "proj", "fc1", "fc2")  # type: ignore[union-attr]


def test_what_a_killed_service_had_moved_comes_back(tmp_path: Path) -> None:
    """A save over an older one is killed between its two moves; another and a removal are not finished."""
    store, place = Store(tmp_path), TinkerPath.of("0" * 32 + ":train:0", "weights", "one")
    folder = store.folder(place)
    (folder.parent / ".old.one").mkdir(parents=True)
    (folder.parent / ".old.one" / "checkpoint.json").write_text("{}")
    (folder.parent / ".new.two").mkdir()
    (folder.parent / ".gone.three").mkdir()
    store.restore()
    assert [each.name for each in folder.parent.iterdir()] == ["one"]


def test_answers_do_not_wait_for_an_acknowledgement() -> None:
    with listener_at("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.fault(
    "clients",
    "a client whose body does not arrive",
    happens="answered by 408 after 60 s (here 0.3 s); others are served meanwhile",
    exit_code=None,
)
@pytest.mark.waits
def test_a_body_that_does_not_arrive_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notice: Notice
) -> None:
    monkeypatch.setattr("mtrain.serve.http._BODY_TIMEOUT_S", 0.3)
    with listening(app_of(tmp_path)) as address, socket.create_connection(("127.0.0.1", address.port or 0)) as slow:
        head = f"POST /api/v1/forward_backward HTTP/1.1\r\nhost: x\r\nx-api-key: {KEY}\r\ncontent-length: 99\r\n\r\n"
        slow.sendall(head.encode() + b"a few")
        with notice:
            assert httpx.get(address.join("/api/v1/healthz"), headers={"x-api-key": KEY}).is_success
            answer = b""
            while b"}" not in answer and (part := slow.recv(10_000)):  # head and body may come one after the other
                answer += part
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"did not arrive in 0.3 s" in answer


def test_a_session_that_ends_frees_the_sampler_that_is_being_made(tmp_path: Path) -> None:
    begun: queue.Queue[Request] = queue.Queue()
    app = app_of(tmp_path, begun.put)
    with TestClient(app.asgi(), headers={"x-api-key": KEY}) as client, ThreadPoolExecutor(1) as thread:
        session_id = session_of(client)
        body = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": "base"}
        answer = thread.submit(client.post, "/api/v1/create_sampling_session", json=body)
        made = begun.get(timeout=30)
        client.post(f"/api/v1/sessions/{session_id}/finish")
        app.desk.finish(made, Done({}))
        assert answer.result(30).is_success
    assert begun.get(timeout=1).operation == Unload((), (f"{session_id}:sample:0",))


@pytest.mark.waits
def test_a_client_that_goes_leaves_no_traceback(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with listening(app_of(tmp_path)) as address:
        with socket.create_connection(("127.0.0.1", address.port or 0)) as client:
            head = f"POST /api/v1/asample HTTP/1.1\r\nhost: x\r\nx-api-key: {KEY}\r\ncontent-length: 99\r\n\r\n"
            client.sendall(head.encode() + b"a few")
        assert httpx.get(address.join("/api/v1/healthz"), headers={"x-api-key": KEY}).is_success
    assert capfd.readouterr().err == ""


@pytest.mark.fault(
    "clients",
    "a client whose headers do not end",
    happens="answered by 400 after 64 KiB of them",
    exit_code=None,
)
@pytest.mark.waits
def test_headers_that_do_not_end_are_refused(tmp_path: Path, notice: Notice) -> None:
    with (
        listening(app_of(tmp_path)) as address,
        socket.create_connection(("127.0.0.1", address.port or 0), timeout=30) as client,
        notice,
    ):
        client.sendall(b"GET /api/v1/healthz HTTP/1.1\r\nhost: x\r\nx-filler: " + b"x" * 100_000)
        assert client.recv(10_000).startswith(b"HTTP/1.1 400 ")


@pytest.mark.fault(
    "clients",
    "1,000 connections that say half a request and wait",
    happens="another client is answered; the number of open files (ulimit -n) is the limit",
    exit_code=None,
)
@pytest.mark.waits
def test_a_thousand_connections_leave_room_for_a_client(tmp_path: Path, notice: Notice) -> None:
    """Opens connections that say half a request and wait."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    held = []
    try:
        with listening(app_of(tmp_path)) as address:
            for _ in range(1000):
                held.append(socket.create_connection(("127.0.0.1", address.port or 0)))
                held[-1].sendall(b"POST /api/v1/forward_backward HTTP/1.1\r\nhost: x\r\ncontent-le")
            with notice:
                answer = httpx.get(address.join("/api/v1/healthz"), headers={"x-api-key": KEY}, timeout=30)
            assert answer.json() == {"status": "ok"}
    finally:
        for each in held:
            each.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
