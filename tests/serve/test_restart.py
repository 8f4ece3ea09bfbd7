"""`mtrain serve` as a program: its key, its messages, and what is left of it after kill -9."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import psutil
import pytest
import tinker
from tinker import types

from mtrain.base.errors import MachineError
from mtrain.config.load import save_config
from mtrain.serve.link import Setup, linked
from mtrain.serve.run import listener_at
from mtrain.serve.store import Store
from tests import warm
from tests.fault_table import Notice
from tests.messages import check_message, refuses
from tests.parity.cases import case
from tests.serve.oracle import Oracle
from tests.serve.service import KEY, address_of, served_model, session
from tests.serve.test_clients import ADAM, batch, run_steps, saved, seen

ONE = case(2, num_layers=1)


def started(folder: Path, config: Path, key: Path) -> tuple[warm.Command, str]:
    """Starts a service; returns its address."""
    (folder / "service.json").unlink(missing_ok=True)
    given = [sys.executable, "-m", "mtrain", "serve", str(config), "--port", "0", "--token-file", str(key)]
    command = warm.Command(given, folder.parent, warm.program_environment())
    return command, address_of(folder / "service.json")


@pytest.mark.waits
@pytest.mark.fault(
    "clients",
    "kill -9 of a service between two steps of a client",
    happens="every checkpoint that was acknowledged is there after the next start, and goes on from it to the bit; "
    "calls of the old session fail with the reason",
    exit_code=None,
)
def test_a_killed_service_loses_nothing_that_it_acknowledged(tmp_path: Path, notice: Notice) -> None:
    folder, key, file = tmp_path / "base", tmp_path / "key", tmp_path / "config.yaml"
    key.write_text(KEY + "\n")
    save_config(ONE.config(run__dir=str(folder), train__device="cpu"), file)
    command, address = started(folder, file, key)
    try:
        with pytest.raises(tinker.AuthenticationError, match="the key does not match"):
            tinker.ServiceClient(base_url=address, api_key=KEY + "x").create_lora_training_client("base").result()
        service = tinker.ServiceClient(base_url=address, api_key=KEY)
        client = service.create_lora_training_client("base", rank=2, seed=3).result()
        whole = []
        for step in range(3):
            whole.append(seen(client.forward_backward(batch(step), "cross_entropy")))
            client.optim_step(types.AdamParams(**ADAM)).result()
            if step == 0:
                path = client.save_state("first").result().path
                client.save_state("first", overwrite=True).result()
        client.forward_backward(batch(9), "cross_entropy").result()
    finally:
        command.kill()
    client.holder.close()  # else its threads look for the service for minutes, next to other tests
    assert command.wait() == -signal.SIGKILL
    command, address = started(folder, file, key)
    try:
        with session(address) as again:
            with notice:
                resumed = again.create_training_client_from_state_with_optimizer(path).result()
            for step in (1, 2):
                assert seen(resumed.forward_backward(batch(step), "cross_entropy")) == whole[step]
                resumed.optim_step(types.AdamParams(**ADAM)).result()
            fresh = again.create_training_client_from_state(path).result()
            assert seen(fresh.forward(batch(1), "cross_entropy")) == whole[1]
            fresh.forward_backward(batch(1), "cross_entropy")
            assert fresh.optim_step(types.AdamParams(**ADAM)).result().metrics["step"] == 1
        command.send_signal(signal.SIGTERM)
        assert command.wait() == 0
    finally:
        command.kill()


def http_process_of(command: warm.Command) -> psutil.Process:
    """Returns the process that speaks HTTP for a service."""
    (found,) = (
        each for each in psutil.Process(command.pid).children() if "mtrain.serve.http_process" in each.cmdline()
    )
    return found


@pytest.mark.waits
@pytest.mark.fault(
    "clients",
    "the process that speaks HTTP is killed",
    happens="the service ends with the reason; every checkpoint that was acknowledged is there after the next start",
    exit_code=7,
)
def test_a_service_without_its_process_of_http_ends(tmp_path: Path, notice: Notice) -> None:
    """Neither signals to a whole job nor a module of its name in the user's folder end it; kill -9 does."""
    (tmp_path / "h11.py").write_text("raise SystemExit(9)")
    folder, key, file = tmp_path / "base", tmp_path / "key", tmp_path / "config.yaml"
    key.write_text(KEY)
    save_config(ONE.config(run__dir=str(folder), train__device="cpu"), file)
    command, address = started(folder, file, key)
    try:
        process = http_process_of(command)
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
        with session(address) as service:
            client = service.create_lora_training_client("base", rank=2, seed=3).result()
            path = client.save_state("first").result().path
        process.kill()
        with notice:
            assert command.wait() == 7
        check_message(command.errors(), "HTTP", "start the service again")
        command, address = started(folder, file, key)
        process = http_process_of(command)
        with session(address) as service:
            service.create_training_client_from_state(path).result()
    finally:
        command.kill()
    process.wait(30)


def test_a_process_that_does_not_start_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with listener_at("127.0.0.1", 0) as listener:
        setup = Setup(served_model(), tmp_path, None, Store(tmp_path).lock, listener.fileno())
        for program, fact in (("/bin/false", "exit code 1"), (str(tmp_path / "none"), "cannot start the HTTP process")):
            monkeypatch.setattr(sys, "executable", program)
            with refuses(MachineError, fact), linked(setup):
                pass


@pytest.mark.waits
def test_clients_that_wait_are_answered_at_the_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """One waits for a result, and one has sent half a body."""
    answers: list[httpx.Response] = []
    with listener_at("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()) as slow:
        base = served_model()
        setup = Setup(base, tmp_path, None, Store(tmp_path).lock, listener.fileno())
        with linked(setup) as link:
            slow.sendall(b"POST /api/v1/asample HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99\r\n\r\na few")
            client = httpx.Client(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}/api/v1/")
            session_id = client.post("create_session", json={}).json()["session_id"]
            model = {"session_id": session_id, "model_seq_id": 0, "base_model": "base"}
            asked = {"request_id": client.post("create_model", json=model).json()["request_id"]}
            thread = threading.Thread(target=lambda: answers.append(client.post("retrieve_future", json=asked)))
            thread.start()
            assert link.take(30) is not None
            time.sleep(0.5)  # until both are there
        thread.join()
        assert slow.recv(10_000).startswith(b"HTTP/1.1 503 ")
    assert "was stopped" in answers[0].json()["error"]
    assert "Traceback" not in capfd.readouterr().err


def test_the_process_of_http_needs_no_torch() -> None:
    program = "import sys, mtrain.serve.http_process; print(*sorted({'torch', 'megatron'} & sys.modules.keys()))"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == ""


def test_a_second_service_in_a_folder_and_a_used_port_are_refused(tmp_path: Path) -> None:
    folder, key, file = tmp_path / "base", tmp_path / "key", tmp_path / "config.yaml"
    key.write_text(KEY)
    save_config(ONE.config(run__dir=str(folder), train__device="cpu"), file)
    command, address = started(folder, file, key)
    try:
        port = address.rpartition(":")[2]
        other = tmp_path / "other.yaml"
        save_config(ONE.config(run__dir=str(tmp_path / "other"), train__device="cpu"), other)
        for given, facts, code in (([str(file)], ["base"], 6), ([str(other), "--port", port], [port, "--port"], 7)):
            found = warm.completed([sys.executable, "-m", "mtrain", "serve", *given])
            assert found.returncode == code, found.stderr
            assert "Traceback" not in found.stderr
            assert all(fact in found.stderr for fact in facts), found.stderr
        assert json.loads((folder / "service.json").read_text())["address"] == address
    finally:
        command.kill()


def test_a_key_file_that_is_missing_is_named(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    save_config(ONE.config(run__dir=str(tmp_path / "base"), train__device="cpu"), file)
    found = warm.completed([sys.executable, "-m", "mtrain", "serve", str(file), "--token-file", str(tmp_path / "no")])
    assert found.returncode == 2
    check_message(found.stderr, "--token-file")


@pytest.mark.nightly  # new interpreters; by day ranks of the pool serve
@pytest.mark.waits
def test_ranks_that_torchrun_starts_serve_as_one(tmp_path: Path) -> None:
    """The user's own torchrun, in new interpreters: rank 0 listens, and the numbers of tp=2 are the oracle's."""
    folder, file = tmp_path / "base", tmp_path / "config.yaml"
    config = ONE.config(run__dir=str(folder), train__device="cpu")
    save_config(config, file)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    given = [*torchrun, "-m", "mtrain", "serve", str(file), "layout.tp=2", "--port", "0"]
    with subprocess.Popen(given, env=warm.program_environment(), stdout=subprocess.DEVNULL) as ranks:
        try:
            with session(address_of(folder / "service.json")) as service:
                client = service.create_lora_training_client("base", rank=0).result()
                first = saved(folder, client.save_state("start").result().path, config)
                run_steps(client, Oracle(config, first), ["cross_entropy"])
        finally:
            ranks.send_signal(signal.SIGTERM)
            ranks.wait(60)
