"""Checkpoints of a service: how long they stay, what clients keep with them, and how their weights leave it."""

from __future__ import annotations

import json
import threading
import urllib.request
from pathlib import Path

import pytest
import tinker
from safetensors.torch import load_file
from starlette.testclient import TestClient
from tinker import types
from tinker.lib.api_future_impl import RequestFailedError

from mtrain.base.errors import DataError
from mtrain.serve.app import App
from mtrain.serve.desk import Desk
from mtrain.serve.operations import Kind, TinkerPath
from mtrain.serve.store import Described, Store
from tests.messages import refuses
from tests.pool import Pool
from tests.serve.service import KEY, rest_client, running, served_model, session
from tests.serve.test_clients import ADAM, LAYOUTS, batch

RUN = "0" * 32 + ":train:0"
HOUR = 3600


def put(store: Store, name: str, kind: Kind = "weights", ends: float | None = None) -> TinkerPath:
    """Writes a checkpoint of no weights."""
    place = TinkerPath.parsed(f"tinker://{RUN}/{kind}/{name}")
    folder = store.fresh(place) / "model"
    folder.mkdir(parents=True)
    (folder / "part").write_bytes(b"12345")
    store.publish(Described(RUN, kind, name, "base", None, store.clock(), None, ends))
    return place


def test_a_checkpoint_expires_when_its_time_is_over(tmp_path: Path) -> None:
    now = [1000.0]
    store = Store(tmp_path, lambda: now[0])
    first, second, third = put(store, "first", ends=1100.0), put(store, "second", ends=1200.0), put(store, "third")
    store.expire()
    now[0] = 1099.0
    store.expire()
    assert [each.name for each in store.all()] == ["first", "second", "third"]
    now[0] = 1100.0
    assert [each.name for each in store.all()] == ["second", "third"]  # gone at once, before its files are
    with refuses(DataError, "there is no checkpoint"):
        store.described(first)
    with refuses(DataError, "there is no checkpoint"):
        store.set_lifetime(first, HOUR)
    store.expire()
    assert not store.folder(first).exists()
    store.set_lifetime(second, None)
    store.set_lifetime(third, 50)
    now[0] = 1200.0
    again = Store(tmp_path, lambda: now[0])  # as after a restart
    again.expire()
    assert [each.name for each in again.all()] == ["second"]
    assert not again.folder(third).exists()


def test_a_disk_that_refuses_keeps_a_checkpoint_until_the_next_look(tmp_path: Path) -> None:
    now = [1000.0]
    store = Store(tmp_path, lambda: now[0])
    place = put(store, "first", ends=1100.0)
    in_the_way = store.folder(place).parent / ".gone.first"
    in_the_way.touch()
    now[0] = 1100.0
    store.expire()
    assert store.folder(place).exists()
    in_the_way.unlink()
    store.expire()
    assert not store.folder(place).exists()


def test_two_processes_share_a_folder(tmp_path: Path) -> None:
    """Lifetimes of one hold in the other, and what one reads or saves the other does not remove."""
    now = [1000.0]
    engine = Store(tmp_path, lambda: now[0])
    clients = Store(tmp_path, lambda: now[0], engine.lock)
    clients.expire()
    place = put(engine, "first", ends=1100.0)
    clients.set_lifetime(place, 200)
    now[0] = 1150.0
    clients.expire()
    assert not engine.is_free(place)
    now[0] = 1200.0
    assert engine.is_free(place)
    place = put(engine, "first")
    half = engine.fresh(place) / "half"  # a save over it
    half.mkdir(parents=True)
    clients.remove(place)
    assert half.exists()
    place = put(engine, "second")
    removal = threading.Thread(target=clients.remove, args=(place,))
    with engine.reading(place):
        removal.start()
        removal.join(0.2)
        assert engine.folder(place).exists()
    removal.join(60)
    assert engine.is_free(place)


def test_a_checkpoint_is_there_while_it_is_replaced(tmp_path: Path) -> None:
    """Readers wait between the two moves of a save over an older one."""
    engine = Store(tmp_path)
    clients, place = Store(tmp_path, lock=engine.lock), put(engine, "first")
    folder, found = engine.folder(place), []
    looks = [
        lambda: found.append(clients.described(place).name),
        lambda: found.extend(clients.files(place)),
        lambda: found.extend(each.name for each in clients.all()),
    ]
    threads = [threading.Thread(target=each) for each in looks]
    with engine._locked():
        away = folder.rename(folder.with_name(".old.first"))
        for each in threads:
            each.start()
        threads[0].join(0.2)
        away.rename(folder)
    for each in threads:
        each.join(60)
    assert sorted(found) == ["first", "first", "model/part"]


def test_a_file_has_an_address_of_its_own_and_none_leads_out(tmp_path: Path) -> None:
    store = Store(tmp_path)
    place = put(store, "out", "external_weights")
    (tmp_path / "secret").write_text("secret")
    (store.folder(place) / "link").symlink_to(tmp_path / "secret")
    app = App(served_model(), Desk(lambda request: None), store, KEY)
    with TestClient(app.asgi(), headers={"x-api-key": KEY}) as client:
        asked = client.get(f"/api/v1/training_runs/{RUN}/checkpoints/external_weights/out/external_weights_urls")
        assert list(asked.json()["urls"]) == ["model/part"]
        address = asked.json()["urls"]["model/part"]
        del client.headers["x-api-key"]
        assert client.get(address).content == b"12345"
        for wrong in (
            address.replace("model/part", "link"),
            address.replace("model/part", "checkpoint.json"),
            address.replace("model/part", "..%2F..%2F..%2F..%2F..%2Fsecret"),
            address.replace("signature=", "signature=0"),
            address.replace("expires=", "expires=1"),
            address.partition("?")[0],
        ):
            assert client.get(wrong).status_code == 403, wrong
        client.headers["x-api-key"] = KEY
        kept = put(store, "kept")
        refused = client.get(f"/api/v1/training_runs/{RUN}/checkpoints/weights/{kept.name}/external_weights_urls")
        assert "save_weights_external" in refused.json()["detail"]
        for seconds in (HOUR - 1, 10 * 365 * 24 * HOUR + 1, "soon"):
            body = {"ttl_seconds": seconds}
            assert client.put(f"/api/v1/training_runs/{RUN}/checkpoints/weights/kept/ttl", json=body).status_code == 422


def downloaded(rest: tinker.RestClient, path: str, folder: Path) -> Path:
    """Fetches all files of exported weights, without the key, as the SDK's command line does."""
    for name, address in rest.get_external_weights_urls(path).result().urls.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with urllib.request.urlopen(address, timeout=60) as answer:
            target.write_bytes(answer.read())
    return folder


def test_clients_keep_checkpoints_for_a_time_and_take_weights_away(pool: Pool, tmp_path: Path) -> None:
    one = LAYOUTS[1]
    config = one.config()
    with running(pool, one, config, tmp_path / "base") as address, rest_client(address) as rest:
        with session(address) as service:
            given = {"renderer_name": "role_colon"}
            client = service.create_lora_training_client("base", rank=2, seed=3, user_metadata=given).result()
            client.forward_backward(batch(1), "cross_entropy")
            client.optim_step(types.AdamParams(**ADAM)).result()
            path = client.save_state("one", ttl_seconds=HOUR).result().path
            sampler = client.save_weights_for_sampler("two", ttl_seconds=2 * HOUR).result().path
            away = client.save_weights_external("three", ttl_seconds=3 * HOUR).result().path
            found = rest.list_checkpoints(client.model_id).result().checkpoints
            lives = {each.checkpoint_type: each.expires_at - each.time for each in found if each.expires_at}
            seconds = {kind: round(each.total_seconds()) for kind, each in lives.items()}
            assert seconds == {"training": HOUR, "sampler": 2 * HOUR, "external": 3 * HOUR}
            rest.set_checkpoint_ttl_from_tinker_path(path, None).result()
            (kept,) = [each for each in rest.list_user_checkpoints().result().checkpoints if each.tinker_path == path]
            assert kept.expires_at is None
            run = rest.get_training_run_by_tinker_path(path).result()
            assert (run.user_metadata, run.last_checkpoint and run.last_checkpoint.tinker_path) == (given, path)
            for refused, words in (
                (lambda: rest.publish_checkpoint_from_tinker_path(path).result(), "publish is not offered"),
                (
                    lambda: client.save_weights_external("x", age_encryption_recipients=["age1x"]).result(),
                    "age_encryption",
                ),
                (lambda: service.create_training_client_from_state(away).result(), "for other programs"),
                (lambda: service.create_sampling_client(model_path=away).result(), "for other programs"),
            ):
                with pytest.raises((tinker.BadRequestError, RequestFailedError), match=words):
                    refused()
            folder = downloaded(rest, away, tmp_path / "peft")
            tensors = load_file(folder / "adapter_model.safetensors")
            assert json.loads((folder / "adapter_config.json").read_text())["r"] == 2
            assert any("lora_B" in name and bool(each.any()) for name, each in tensors.items())
            rest.delete_checkpoint_from_tinker_path(away).result()
            with pytest.raises(tinker.BadRequestError, match="there is no checkpoint"):
                rest.get_external_weights_urls(away).result()
        described = tmp_path / "base" / "served" / sampler.removeprefix("tinker://") / "checkpoint.json"
        described.write_text(json.dumps(json.loads(described.read_text()) | {"expires_at": 1.0}))
    with (
        running(pool, one, config, tmp_path / "base") as address,
        session(address) as service,
        rest_client(address) as rest,
    ):
        assert rest.get_training_run_by_tinker_path(path).result().user_metadata == given
        service.create_training_client_from_state(path).result()
        assert not described.parent.exists()
