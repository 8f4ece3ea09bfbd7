"""A running service for tests, and its clients."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tinker
from tinker import types

from mtrain.config import Config
from mtrain.serve.served import Served
from tests.parity.cases import Case, case
from tests.pool import Pool
from tests.serve import service_ranks

KEY = "tml-of-the-tests-0123456789"


def served_model(seq_length: int = 32, stops: Sequence[int] = (), **changes: Any) -> Served:
    """Returns a small model that clients call "base"."""
    config = case().config(run__dir="base", data__seq_length=seq_length, **changes)
    return Served(config, frozenset(stops))


@contextlib.contextmanager
def running(pool: Pool, one: Case, config: Config, folder: Path) -> Iterator[str]:
    """Serves on the case's ranks, with the folder's name for the model's; yields the address."""
    stop, found = folder / "STOP", folder / "service.json"
    found.unlink(missing_ok=True)
    stop.unlink(missing_ok=True)
    faults: list[BaseException] = []
    served = config.model_copy(update={"run": config.run.model_copy(update={"dir": str(folder)})})

    def work() -> None:
        try:
            pool.run(service_ranks.served, one.resolved(config), served, str(stop))
        except BaseException as error:
            faults.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield address_of(found, thread)
    finally:
        stop.touch()
        thread.join(60)
    assert not faults, faults


@contextlib.contextmanager
def session(address: str, key: str = KEY) -> Iterator[tinker.ServiceClient]:
    """Opens a session of the SDK; its models are freed at the end."""
    client = tinker.ServiceClient(base_url=address, api_key=key)
    try:
        yield client
    finally:
        client.close("success").result()


@contextlib.contextmanager
def rest_client(address: str) -> Iterator[tinker.RestClient]:
    """Makes a client for lists of runs and checkpoints; it looks for the service until the end."""
    client = tinker.RestClient(base_url=address, api_key=KEY)
    try:
        yield client
    finally:
        client.holder.close()


def address_of(file: Path, thread: threading.Thread | None = None) -> str:
    """Waits until a service says where it listens."""
    end = time.monotonic() + 120
    while not file.exists():
        assert time.monotonic() < end, "the service has not started"
        assert thread is None or thread.is_alive(), "the service has ended"
        time.sleep(0.05)
    found: str = json.loads(file.read_text())["address"]
    return found


def sequences(seed: int, lengths: Sequence[int], vocab_size: int) -> list[list[int]]:
    """Draws tokens, one more than each length."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab_size, length + 1).tolist() for length in lengths]


def datum(tokens: Sequence[int], inputs: Mapping[str, Any]) -> types.Datum:
    """Makes a datum whose targets are the next tokens."""
    given = {"target_tokens": np.array(tokens[1:]), **inputs}
    return types.Datum(model_input=types.ModelInput.from_ints(list(tokens[:-1])), loss_fn_inputs=given)
