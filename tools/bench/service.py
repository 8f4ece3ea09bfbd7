"""What a training service adds to `Engine` alone, and its requests per second: `python tools/bench/service.py`.

A step is a forward_backward of 8 sequences of 250 tokens and an optim_step, of an adapter of rank 8 on one rank. Four
ways to make steps take turns on one machine, in rounds that each begin with another way: `Engine` in this process; the
same calls over HTTP, with requests that were written beforehand, which is what the service itself costs; the tinker
SDK, which writes the requests, waits for both futures and reads the answers, as `sl_loop` of tinker_cookbook does; and
the SDK where the next step is sent before the answers of the last one are waited for, as `supervised.train` does. What
a way adds is the median of its differences from `Engine` in the same round, with the standard error of that median.
Processor seconds are of client and service together. Requests per second are those of 1, 8 and 64 clients, each a
thread with the SDK, that send one request after the other to a model of one layer, each client of forward_backward to
an adapter of its own.

The service is a process of its own, and shares the cores with its clients. Both compute with one thread, and keep what
they have freed: how much of a pass glibc gives back to the system, to be fetched and cleared again in the next, depends
on where the heap of a process happens to end, and was seen to cost 2 to 18 ms of processor time a step.
"""

from __future__ import annotations

import http.client
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from sys import path as import_path
from tempfile import TemporaryDirectory
from typing import Annotated, Any
from urllib.parse import urlsplit

import numpy as np
import psutil
import tinker
import typer
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto

if __name__ == "__main__":
    import_path.insert(0, str(Path(__file__).parents[2]))

from mtrain.api.engine import Engine
from mtrain.config import Config
from mtrain.config.load import save_config
from mtrain.core.batch.datum import Datum
from mtrain.hf.configuration import load_config

ROOT = Path(__file__).parents[2]
KEY = "tml-of-the-benchmark"
RANK, NUM_SEQUENCES, NUM_TOKENS, LR = 8, 8, 250, 1e-3
STEPS = 4
"""Number of steps of a round."""
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": str(2**25),
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
}
"""Environment of both processes."""
CLIENTS = (1, 8, 64)


def config_of(folder: Path, num_layers: int, hidden_size: int, vocab_size: int) -> Config:
    """Returns a model of this size, with its run folder."""
    model = {
        "num_layers": num_layers,
        "hidden_size": hidden_size,
        "ffn_hidden_size": 2 * hidden_size,
        "num_attention_heads": 4,
        "vocab_size": vocab_size,
    }
    train = {"device": "cpu", "precision": "fp32", "global_batch_size": 8, "micro_batch_size": 8, "num_steps": 1}
    return load_config(
        {
            "model": model,
            "data": {"kind": "mock", "seq_length": 256},
            "train": train,
            "optimizer": {"lr": LR},
            "loss": {"aggregation": "sum"},
            "run": {"dir": str(folder / "base")},
            # what the SDK asks for
            "adapter": {"kind": "lora", "rank": RANK, "targets": ["qkv", "proj", "fc1", "fc2", "output"]},
        }
    )


@contextmanager
def served(config: Config, folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    """Runs a service in a process and a folder of its own; yields its address, and the process."""
    folder.mkdir(exist_ok=True)
    config = config.model_copy(update={"run": config.run.model_copy(update={"dir": str(folder / "base")})})
    save_config(config, folder / "config.yaml")
    found = folder / "base" / "service.json"
    given = [sys.executable, "-m", "mtrain", "serve", str(folder / "config.yaml"), "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(given, env=environment, stdout=subprocess.DEVNULL) as service:
        try:
            while not found.exists():
                assert service.poll() is None, "the service has ended"
                time.sleep(0.1)
            yield json.loads(found.read_text())["address"], psutil.Process(service.pid)
        finally:
            service.terminate()


def data_of(seed: int, vocab_size: int, num_sequences: int, num_tokens: int) -> list[types.Datum]:
    """Draws sequences whose targets are the next tokens."""
    drawn = np.random.default_rng(seed).integers(0, vocab_size, (num_sequences, num_tokens + 1))
    weights = np.ones(num_tokens, np.float32)
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(row[:-1].tolist()),
            loss_fn_inputs={"target_tokens": row[1:], "weights": weights},
        )
        for row in drawn
    ]


class Plain:
    """The protocol over one connection, with a batch that was written beforehand."""

    def __init__(self, address: str, data: list[types.Datum]) -> None:
        """Makes a session and a model.

        Args:
            address: Address of the service.
            data: Batch of every step.
        """
        there = urlsplit(address)
        self._connection = http.client.HTTPConnection(there.hostname or "", there.port)
        session = self._post("create_session", {})["session_id"]
        asked = {"session_id": session, "model_seq_id": 0, "base_model": "base", "lora_config": {"rank": RANK}}
        made = self._post("create_model", asked)
        self._model, self._number = made["model_id"], 0
        self._wait(made["request_id"])
        self._given = types.ForwardBackwardInput(data=data, loss_fn="cross_entropy")
        self._bodies: list[bytes] = []

    def prepare(self, num_steps: int) -> None:
        """Writes the batches of some steps."""
        first = self._number
        for number in range(num_steps):
            request = types.ForwardBackwardRequest(
                forward_backward_input=self._given, model_id=self._model, seq_id=first + 2 * number + 1
            )
            self._bodies.append(forward_backward_request_to_proto(request).SerializeToString())

    def step(self) -> None:
        """Makes a step, as the SDK does: the update is asked for before the gradient is there."""
        self._number += 2
        passed = self._post("forward_backward", self._bodies.pop(0))["request_id"]
        asked = {"model_id": self._model, "seq_id": self._number, "adam_params": {"learning_rate": LR}}
        updated = self._post("optim_step", asked)["request_id"]
        self._wait(passed)
        self._wait(updated)

    def _wait(self, request_id: str) -> None:
        self._post("retrieve_future", {"request_id": request_id})

    def _post(self, call: str, body: bytes | dict[str, Any]) -> Any:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self._connection.request("POST", f"/api/v1/{call}", content, {"x-api-key": KEY})
        answer = self._connection.getresponse()
        text = answer.read()
        assert answer.status == 200, text
        return json.loads(text) if answer.headers["content-type"] == "application/json" else None


def added(rounds: int) -> None:
    """Prints what the service adds to a step."""
    with TemporaryDirectory() as name:
        folder, vocab_size = Path(name), 1024
        config = config_of(folder, 4, 128, vocab_size)
        data = data_of(0, vocab_size, NUM_SEQUENCES, NUM_TOKENS)
        # of their own: on one service the two models would take turns
        with served(config, folder / "http") as (one, first), served(config, folder / "sdk") as (other, second):
            plain = Plain(one, data)
            plain.prepare(rounds * STEPS)
            service = tinker.ServiceClient(base_url=other, api_key=KEY)
            client = service.create_lora_training_client("base", rank=RANK).result()
            engine = Engine(config)
            batch = [Datum([*each.model_input.to_ints(), 0]) for each in data]

            def alone() -> None:
                for _ in range(STEPS):
                    engine.forward_backward(batch)
                    engine.optim_step(LR)

            def over_http() -> None:
                for _ in range(STEPS):
                    plain.step()

            def with_sdk() -> None:
                for _ in range(STEPS):
                    _wait(_sent(client, data))

            def with_sdk_ahead() -> None:
                last = _sent(client, data)
                for _ in range(STEPS - 1):
                    last, before = _sent(client, data), last
                    _wait(before)
                _wait(last)

            ways: dict[str, Callable[[], None]] = {
                "Engine alone": alone,
                "HTTP": over_http,
                "tinker SDK": with_sdk,
                "tinker SDK, next step sent ahead": with_sdk_ahead,
            }
            found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
            for number in range(rounds):
                order = list(ways)[number % len(ways) :] + list(ways)[: number % len(ways)]
                for way in order:
                    start, before = time.perf_counter(), _processor_s(first, second)
                    ways[way]()
                    if number:  # the first round builds what is built once
                        taken = time.perf_counter() - start, _processor_s(first, second) - before
                        found[way].append((taken[0] / STEPS, taken[1] / STEPS))
            engine.close()
    _print_steps(found)


def _sent(client: tinker.TrainingClient, data: list[types.Datum]) -> tuple[Any, Any]:
    passed = client.forward_backward(data, "cross_entropy")
    return passed, client.optim_step(types.AdamParams(learning_rate=LR))


def _wait(futures: tuple[Any, Any]) -> None:
    for each in futures:
        each.result()


def _print_steps(found: dict[str, list[tuple[float, float]]]) -> None:
    """Prints the milliseconds of a step and what each way adds to those of `Engine` in the same round."""
    print("| a step by | median ms | added ms | processor ms | added ms |\n" + "|---" * 5 + "|")
    for way, times in found.items():
        columns = []
        for column in (0, 1):
            added = [
                1e3 * (own[column] - alone[column]) for own, alone in zip(times, found["Engine alone"], strict=True)
            ]
            middle = statistics.median(added)
            deviation = statistics.median(abs(each - middle) for each in added)
            # of a median, where deviations are normal
            error = 1.2533 * 1.4826 * deviation / len(added) ** 0.5
            columns += [f"{1e3 * statistics.median(each[column] for each in times):.1f}", f"{middle:.1f} ± {error:.1f}"]
        print(f"| {way} | {' | '.join(columns)} |")


def _processor_s(*services: psutil.Process) -> float:
    """Returns the processor seconds of this process and of services, whose HTTP is a process of its own."""
    times = [each.cpu_times() for service in services for each in (service, *service.children(recursive=True))]
    return float(time.process_time() + sum(each.user + each.system for each in times))


def per_second(seconds: float) -> None:
    """Prints the requests per second of each number of clients."""
    print("\n| clients | sample, 4 tokens | forward_backward, 8 tokens |\n|---|---|---|")
    with TemporaryDirectory() as name:
        folder, vocab_size = Path(name), 64
        data = data_of(0, vocab_size, 1, 8)
        prompt, rule = types.ModelInput.from_ints([1, 2, 3]), types.SamplingParams(max_tokens=4)
        with served(config_of(folder, 1, 32, vocab_size), folder) as (address, _):
            for num_clients in CLIENTS:
                services = [tinker.ServiceClient(base_url=address, api_key=KEY) for _ in range(num_clients)]
                samplers = [each.create_sampling_client(base_model="base").result() for each in services]
                trained = [each.create_lora_training_client("base", rank=RANK).result() for each in services]
                answers = _rate([partial(_sample, each, prompt, rule) for each in samplers], seconds)
                gradients = _rate([partial(_pass, each, data) for each in trained], seconds)
                print(f"| {num_clients} | {answers:.0f} | {gradients:.0f} |", flush=True)
                for each in services:
                    each.close("success").result()


def _sample(client: tinker.SamplingClient, prompt: types.ModelInput, rule: types.SamplingParams) -> None:
    client.sample(prompt, 1, rule).result()


def _pass(client: tinker.TrainingClient, data: list[types.Datum]) -> None:
    client.forward_backward(data, "cross_entropy").result()


def _rate(calls: list[Callable[[], object]], seconds: float) -> float:
    """Returns the calls per second of threads that each make one after the other."""

    def work(call: Callable[[], object]) -> int:
        count = 0
        while time.perf_counter() < end:
            call()
            count += 1
        return count

    with ThreadPoolExecutor(len(calls)) as pool:
        list(pool.map(lambda call: call(), calls))  # what is built once
        start = time.perf_counter()
        end = start + seconds
        total = sum(pool.map(work, calls))
        return total / (time.perf_counter() - start)


def main(
    rounds: Annotated[int, typer.Option(min=2, help=f"of {STEPS} steps by each way")] = 48,
    seconds: Annotated[float, typer.Option(min=0, help="for each number of clients and call; 0: none")] = 5.0,
) -> None:
    """Prints both tables."""
    if any(os.environ.get(name) != value for name, value in ENVIRONMENT.items()):  # read when a process starts
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | ENVIRONMENT)
    added(rounds)
    if seconds:
        per_second(seconds)


if __name__ == "__main__":
    typer.run(main)
