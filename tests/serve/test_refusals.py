"""A call that is refused takes its place: neither its client's later calls nor other clients wait for it."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker
from hypothesis import given, settings
from hypothesis import strategies as st
from tinker import RequestFailedError, types
from tinker.proto import tinker_public_pb2

from mtrain.base.errors import DataError
from mtrain.serve.desk import Desk, Request
from mtrain.serve.operations import Refuse, Unload
from tests.fault_table import Notice
from tests.messages import refuses
from tests.pool import Pool
from tests.serve import service_ranks
from tests.serve.hostile import HOSTILE_BATCHES, HOSTILE_HEADS, Client, hostile_bodies
from tests.serve.service import datum, running, sequences, session
from tests.serve.test_clients import ADAM, LAYOUTS, VOCAB, batch, seen
from tests.serve.test_fields import MODEL, service

NOTHING = Unload((), ())


@settings(max_examples=50, deadline=None)
@given(
    ahead=st.lists(st.integers(2, 30), min_size=1, max_size=6, unique=True),
    waits=st.lists(st.floats(0, 59), max_size=4),
)
def test_a_number_that_never_comes_fails_those_behind_it_after_a_minute(ahead: list[int], waits: list[float]) -> None:
    """A minute after the latest call of the model; the next calls run, and the missing one is too late."""
    now, begun = [0.0], deque[Request]()
    desk = Desk(begun.append, lambda: now[0])
    for model in ("one", "two"):
        desk.open_line(model)
    desk.submit_in_order(NOTHING, "two", 1)
    for number, wait in zip(ahead, [*waits, *[0.0] * len(ahead)], strict=False):
        now[0] += wait
        desk.give_up()
        desk.submit_in_order(NOTHING, "one", number)
    assert [each.id for each in begun] == ["two:1"]
    now[0] += 59.9
    desk.give_up()
    assert len(begun) == 1
    now[0] += 0.2
    desk.give_up()
    given_up = list(begun)[1:]
    assert [each.id for each in given_up] == [f"one:{number}" for number in sorted(ahead)]
    for each in given_up:
        assert isinstance(each.operation, Refuse)
        assert each.operation.is_of_step, "half a batch must not be applied"
        assert "call 1 of this model did not arrive in 60 s" in each.operation.message
    with pytest.raises(KeyError):
        desk.submit_in_order(NOTHING, "one", 1)
    last = desk.submit_in_order(NOTHING, "one", max(ahead) + 1)
    assert begun[-1] is last
    assert last.operation == NOTHING
    desk.submit_in_order(NOTHING, "two", 2)
    assert begun[-1].id == "two:2"


def test_a_number_that_is_far_ahead_takes_no_place() -> None:
    """Where it did, later calls would be too late after a minute."""
    desk = Desk(lambda request: None)
    desk.open_line("one")
    with refuses(DataError, "too far ahead", "1"):
        desk.submit_in_order(NOTHING, "one", 2**62)
    desk.submit_in_order(NOTHING, "one", 1)


def test_waiting_batches_are_bounded_by_their_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("mtrain.serve.desk._MOST_BYTES", 100)
    message = tinker_public_pb2.ForwardBackwardRequest(model_id=MODEL, loss_fn="cross_entropy")
    message.data.add().model_input.add().encoded_text.tokens = bytes(60)
    with service(tmp_path) as (client, begun):
        answers = []
        for number in (3, 4, 2):
            message.seq_id = number
            answers.append(client.post("/api/v1/forward_backward", content=message.SerializeToString()).status_code)
        assert answers == [200, 429, 429]  # nothing of 1 has come
        answers = [client.post("/api/v1/optim_step", json=numbered(1)).status_code]
        assert answers == [200]
    assert [each for each, _ in begun] == [f"{MODEL}:1"]


def numbered(number: int) -> dict[str, Any]:
    return {"model_id": MODEL, "seq_id": number, "adam_params": {}}


def test_a_refused_call_takes_its_place(tmp_path: Path) -> None:
    """Whatever is wrong with its body, if it has the model and the number, the next one runs."""
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("optim_step", {"adam_params": {"learning_rate": "NaN"}}),
        ("optim_step", {"adam_params": None}),
        ("save_weights", {"path": "../../x"}),
        ("save_weights", {"ttl_seconds": 5}),
        ("save_weights_for_sampler", {"kind": "inflight"}),
        ("save_weights_for_sampler", {}),
        ("save_weights_external", {"age_encryption_recipients": ["age1x"]}),
        ("load_weights", {"path": f"tinker://{MODEL}/weights/none", "optimizer": True}),
        ("load_weights", {"path": "/etc/passwd", "optimizer": True}),
        ("optim_step", {"unknown": 1}),
    ]
    with service(tmp_path) as (client, begun):
        number = 0
        for route, body in bodies:
            number += 1
            answer = client.post(f"/api/v1/{route}", json={"model_id": MODEL, "seq_id": number, **body})
            assert 400 <= answer.status_code < 500, (route, body)
        nested = "[" * 10_000
        damaged = [
            ("optim_step", f'{{"model_id": "{MODEL}", "seq_id": NUMBER, "adam_params": {nested}'),
            ("save_weights", f'{{"user_metadata": {{"a": NaN}}, "seq_id":NUMBER , "model_id" :"{MODEL}"}}'),
            ("optim_step", f'{{"model_id": "{MODEL}", "seq_id": NUMBER, "x": "{"x" * 2**26}"}}'),
        ]
        for route, text in damaged:
            number += 1
            answer = client.post(f"/api/v1/{route}", content=text.replace("NUMBER", str(number)))
            assert 400 <= answer.status_code < 500, text[:100]
        for spoil in HOSTILE_BATCHES:
            number += 1
            answer = client.post("/api/v1/forward_backward", **spoil(MODEL, number))
            assert answer.status_code < 500, answer.text
        client.post("/api/v1/optim_step", json=numbered(number + 1))
    assert [each for each, _ in begun] == [f"{MODEL}:{place}" for place in range(1, number + 2)]
    kinds = [operation.is_of_step for _, operation in begun if isinstance(operation, Refuse)]
    assert kinds[: len(bodies) + len(damaged)] == [False] * (len(bodies) + len(damaged))
    assert kinds[len(bodies) + len(damaged) :] == [True] * (len(kinds) - len(bodies) - len(damaged))


def test_what_is_no_call_of_a_client_takes_no_place(tmp_path: Path) -> None:
    """A page in a browser, say, could else keep the place of a call that comes later."""
    with service(tmp_path) as (client, begun):
        for headers in HOSTILE_HEADS:
            assert client.post("/api/v1/optim_step", json=numbered(1), headers=headers).status_code in (403, 415)
        with pytest.raises(httpx.HTTPError):
            client.post("/api/v1/optim_step", content=broken(b'{"model_id": "' + MODEL.encode() + b'", "seq_id": 1}'))
        assert client.post("/api/v1/optim_step", json=numbered(1)).status_code == 200
    assert [type(operation).__name__ for _, operation in begun] == ["OptimStep"]


def broken(start: bytes) -> Any:
    yield start
    raise httpx.WriteError("the client has gone")


CALLS: list[tuple[Callable[[Any], Any], str]] = [
    (lambda client: client.save_state("../x"), "cannot be the name"),
    (lambda client: client.save_state("x", ttl_seconds=5), "ttl_seconds"),
    (lambda client: client.save_weights_for_sampler("x/y"), "cannot be the name"),
    (lambda client: client.save_weights_external("x", age_encryption_recipients=["age1x"]), "age_encryption"),
    (lambda client: client.optim_step(types.AdamParams(learning_rate=float("nan"))), "learning_rate"),
    (lambda client: client.optim_step(types.AdamParams(learning_rate=-1.0)), "learning_rate"),
    (lambda client: client.optim_step(types.AdamParams(beta1=1.0)), "beta1"),
    (lambda client: client.optim_step(types.AdamParams(eps=0.0)), "eps"),
    (lambda client: client.optim_step(types.DimuonParams(learning_rate=0.1)), "AdamW"),
    (lambda client: client.load_state("tinker://nowhere"), "must be tinker"),
    (lambda client: client.load_state(f"tinker://{client.model_id}/weights/none"), "there is no checkpoint"),
    (lambda client: client.load_state(f"tinker://{client.model_id}/weights/a", "token"), "weights_access_token"),
    (lambda client: client.forward([datum([1, 2], {})], "dro"), "dro"),
    (lambda client: client.forward([picture()], "cross_entropy"), "image"),
    (lambda client: client.forward_backward([picture()], "cross_entropy"), "image"),
]


def picture() -> types.Datum:
    chunk = types.ImageChunk(data=b"x", format="png", expected_tokens=1)
    return types.Datum(model_input=types.ModelInput(chunks=[chunk]), loss_fn_inputs={"target_tokens": [1]})


@pytest.mark.fault(
    "clients",
    "a call that is refused, of any kind",
    happens="it takes its place as a failed call, so the client's next calls run; a refused part of a batch fails its "
    "optim_step",
    exit_code=None,
)
@pytest.mark.waits
@pytest.mark.filterwarnings("ignore:DEPRECATED:FutureWarning")
def test_a_client_goes_on_after_each_refusal(pool: Pool, tmp_path: Path, notice: Notice) -> None:
    """No refusal blocks or changes what the SDK sends next, and half a batch is not applied."""
    one = LAYOUTS[0]
    errors = (tinker.APIStatusError, RequestFailedError)
    with running(pool, one, one.config(), tmp_path / "base") as address, session(address) as service:
        clients = [service.create_lora_training_client("base", rank=2, seed=3).result() for _ in range(2)]
        with notice:
            for call, reason in CALLS:
                with pytest.raises(errors, match=reason):
                    call(clients[0]).result(60)
        with pytest.raises(RequestFailedError, match="image"):
            clients[0].optim_step(types.AdamParams()).result(60)  # of the batch that was refused last
        found = []
        for client in clients:
            client.forward_backward(batch(1), "cross_entropy")
            if client is clients[0]:  # refused, the gradient stays
                for wrong in ({"learning_rate": 1e308}, {"learning_rate": 1.0, "weight_decay": 1e300}):
                    with pytest.raises(RequestFailedError, match="lr"):
                        client.optim_step(types.AdamParams(**wrong)).result(60)
            found.append(client.optim_step(types.AdamParams(**ADAM)).result(60).metrics["grad_norm"])
            found.append(seen(client.forward(batch(2), "cross_entropy")))
        assert found[:2] == found[2:]
        smaller = service.holder._client_config.model_copy(update={"fwdbwd_max_chunk_len": 1})
        service.holder._client_config = smaller
        with pytest.raises(errors, match="image"):
            clients[0].forward_backward([*batch(1)[:2], picture()], "cross_entropy").result(60)
        with pytest.raises(RequestFailedError, match="image"):
            clients[0].optim_step(types.AdamParams(**ADAM)).result(60)
        assert seen(clients[0].forward(batch(2)[:1], "cross_entropy"))[0] == pytest.approx(found[1][0], abs=1e-6)


@pytest.mark.parametrize("num_draws", [40, pytest.param(200, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("one", [LAYOUTS[0]], ids=["one"])
def test_no_option_of_adamw_leaves_nan_in_a_weight(pool: Pool, tmp_path: Path, one: Any, num_draws: int) -> None:
    """Draws options over all of float64: a step is refused, with nothing changed, or its weights are finite."""
    rng = random.Random(0)

    def number(*special: float) -> float:
        if rng.random() < 0.4:
            return rng.choice(special)
        return 10 ** rng.uniform(-320, 308) if rng.random() < 0.2 else 10 ** rng.uniform(-12, 1)

    def below_one() -> float:
        return rng.choice([0.0, 0.9, 0.5, 0.999, 1 - 2.0**-53, 2.0**-1074, rng.random()])

    draws = [
        (
            number(1e-4, 0.1, 1e308, 1e30, 0.0),
            {
                "beta1": below_one(),
                "beta2": below_one(),
                "eps": number(1e-12, 1e-8, 0.0, 2.0**-126, 2.0**-149, 1e300),
                "weight_decay": number(0.0, 0.0, 0.1, 1e308),
                "clip_grad": number(0.0, 0.0, 1.0, 2.0**-1074, 1e308),
            },
        )
        for _ in range(num_draws)
    ]
    config = one.config()
    tokens = sequences(1, (4, 7), VOCAB)
    (counts,) = pool.run(service_ranks.drawn_steps, one.resolved(config), config, str(tmp_path), tokens, draws)
    assert counts["refused"] > num_draws / 10
    assert counts["made"] > num_draws / 10


@pytest.mark.fault(
    "clients",
    "values that no client sends in any field of any call: other types, nan, huge, negative, deep, empty",
    happens="answered by a status below 500 or a failed future; the same client and others go on, and no weight is nan",
    exit_code=None,
)
@pytest.mark.waits
@pytest.mark.parametrize("num_requests", [60, pytest.param(350, marks=pytest.mark.nightly)])
def test_no_value_of_any_field_stops_the_service(pool: Pool, tmp_path: Path, notice: Notice, num_requests: int) -> None:
    one = LAYOUTS[0]
    with running(pool, one, one.config(), tmp_path / "base") as address, notice:
        with Client(address) as victim, Client(address) as other:
            drawn = hostile_bodies(victim, random.Random(1), num_requests)
            for place, (method, path, given) in enumerate(drawn):
                answer = victim.http.request(method, path, **given)
                assert answer.status_code < 500, (path, given, answer.text)
                if place % 50 == 49:
                    for client in (victim, other):
                        client.step(sequences(place, (4,), VOCAB)[0])
            for client in (victim, other):
                client.step(sequences(1, (4,), VOCAB)[0])
                assert client.finished("save_weights", {"path": "last"})["type"] == "save_weights"  # refused of nan
            assert other.http.get("training_runs").status_code == 200
        with session(address) as service:
            assert service.create_sampling_client(base_model="base").result() is not None
