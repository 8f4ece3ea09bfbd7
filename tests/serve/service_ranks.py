"""What ranks do in the tests of the service; the functions for `Pool.run`."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from mtrain import Engine
from mtrain.base.errors import MachineError
from mtrain.config import Config
from mtrain.core.engine.generation import PassTokens, cached_model
from mtrain.core.engine.rank_model import build_model
from mtrain.core.ranks.groups import Groups
from mtrain.serve.link import Link, framed
from mtrain.serve.losses import Batch
from mtrain.serve.operations import (
    AdamParams,
    CreateModel,
    CreateSampler,
    Done,
    Failed,
    Lora,
    OptimStep,
    SampleBody,
    SaveForSampler,
    Unload,
)
from mtrain.serve.protocol import SentBatch, SentDatum
from mtrain.serve.room import Sizes
from mtrain.serve.run import _work, serve
from mtrain.serve.served import Served
from mtrain.serve.store import Store
from mtrain.serve.work import Worker
from tests.training.engine_ranks import free


def created(session: str, rank: int, seed: int = 1) -> CreateModel:
    """Returns the operation that makes the first model of a session."""
    lora = Lora(rank=rank, seed=seed)
    return CreateModel(session_id=session, model_seq_id=0, base_model="base", lora_config=lora)


def served(groups: Groups, config: Config, stop: str) -> None:
    """Serves until there is a file `stop`."""
    if groups.rank == 0:
        threading.Thread(target=_ended, args=(Path(stop),), daemon=True).start()
    with free(groups):
        serve(Served(config), "127.0.0.1", 0, None)


def shapes(groups: Groups, config: Config, folder: str) -> list[int]:
    """Counts the sets of adapters in addition to the first one, while models and samplers come and go."""
    found = []
    with free(groups):
        worker = Worker(Served(config), Store(Path(folder)))
        for operation in (
            created("a", 2),
            created("b", 3),
            created("c", 4),
            SaveForSampler(model_id="c:train:0", seq_id=1, sampling_session_seq_id=0),
            Unload(("b:train:0", "c:train:0"), ()),
            Unload((), ("c:sample:0",)),
        ):
            assert isinstance(worker.run(operation), Done)
            found.append(len(worker._shapes))
        worker.close()
    return found


class Step(NamedTuple):
    """What a step of a client's data gives."""

    log_probs: list[NDArray[np.float32]]
    loss: float
    grad_norm: float


def step_of(groups: Groups, config: Config, sent: Sequence[SentDatum], loss: str, save_to: str) -> Step:
    """Saves the weights, and makes a step."""
    with free(groups), Engine(config) as engine:
        engine.save(save_to)
        batch = Batch.of(sent, loss, {}, config.model.vocab_size)
        engine.forward_backward(batch.data, batch.function)
        return Step(*batch.outputs(engine.device), engine.optim_step().grad_norm)


class _LastCall(Link):
    """An engine's end that asks the service to stop after the third call."""

    def finish(self, request_id: str, result: Done | Failed) -> None:
        super().finish(request_id, result)
        if request_id == "2":
            os.kill(os.getpid(), signal.SIGTERM)


def broadcasts(groups: Groups, config: Config, folder: str) -> int:
    """Counts the broadcasts by which ranks agree on each of three calls, and on the end."""
    with free(groups), mock.patch.object(dist, "broadcast_object_list", wraps=dist.broadcast_object_list) as sent:
        worker, (own, other) = Worker(Served(config), Store(Path(folder))), socket.socketpair()
        with own, other:
            for number in range(3):
                other.sendall(framed((f"{number}", Unload((), ()))))
            before = sent.call_count
            assert _work(worker, _LastCall(own) if groups.rank == 0 else None, 60) is signal.SIGTERM
            found = sent.call_count - before
        worker.close()
    return found


def lost(groups: Groups, config: Config, folder: str) -> tuple[str, bool]:
    """Returns the error of a rank where the process that speaks HTTP has ended, and whether every rank has it."""
    with free(groups):
        worker, (own, other) = Worker(Served(config), Store(Path(folder))), socket.socketpair()
        other.close()
        with own, closing(worker):
            try:
                _work(worker, Link(own) if groups.rank == 0 else None, 60)
            except MachineError as error:
                return str(error), error.on_every_rank
    raise AssertionError("the service goes on without its clients")


def drawn_steps(
    groups: Groups,
    config: Config,
    folder: str,
    tokens: Sequence[Sequence[int]],
    draws: Sequence[tuple[float, dict[str, float]]],
) -> dict[str, int]:
    """Makes steps with drawn options, each after one gradient; counts those that were made, and those refused."""
    counts = {"made": 0, "refused": 0}
    data = [SentDatum(np.array(each[:-1], np.int32), {"target_tokens": np.array(each[1:])}) for each in tokens]
    with free(groups):
        worker = Worker(Served(config), Store(Path(folder)))
        with closing(worker):
            for number, (lr, options) in enumerate(draws):
                if number % 10 == 0:  # weights that are very large make every gradient infinite
                    assert isinstance(worker.run(created(f"{number}", 2, number)), Done)
                model_id = f"{number - number % 10}:train:0"
                engine = worker._turn_to(model_id).engine
                worker.run(SentBatch(model_id, 1, "cross_entropy", {}, data, False))
                before = [each.clone() for each in _trained(engine)]
                drawn: dict[str, Any] = {**options, "learning_rate": lr, "grad_clip_norm": options["clip_grad"]}
                # also what no client can send
                params = AdamParams.model_construct(None, **drawn)
                asked = OptimStep.model_construct(model_id=model_id, seq_id=1, adam_params=params)
                done = isinstance(worker.run(asked), Done)
                after = _trained(engine)
                assert all(bool(each.isfinite().all()) for each in after), (lr, options)
                assert done or all(map(torch.equal, before, after)), (lr, options)
                counts["made" if done else "refused"] += 1
    return counts


def short_of_memory(groups: Groups, config: Config, folder: str) -> list[str]:
    """Returns what comes of calls before, while and after one rank has no memory left; "" where they are done."""
    adapter, same, larger = (created(str(number), rank) for number, rank in enumerate((2, 2, 3)))
    with free(groups):
        worker, found = Worker(Served(config), Store(Path(folder))), []
        with closing(worker):
            for operation, is_short in (
                (adapter, False),
                (same, True),
                (larger, True),
                (SaveForSampler(model_id="0:train:0", seq_id=1, sampling_session_seq_id=0), True),
                (same, False),
                (larger, False),
            ):
                free_bytes = 0 if is_short and groups.rank == 1 else 10**12
                with mock.patch("mtrain.serve.room._free_on_host", lambda left=free_bytes: left):
                    result = worker.run(operation)
                found.append(result.message if isinstance(result, Failed) else "")
    return found


class Remembered(NamedTuple):
    """Bytes that this rank keeps of a sequence while it generates: as the service counts them, and as they are."""

    counted: int
    found: int


def remembered(groups: Groups, configs: Sequence[Config], length: int) -> list[Remembered]:
    """Measures the caches of each model after a pass over three prompts."""
    found, num_sequences = [], 3
    for config in configs:
        chunks = build_model(config, groups).chunks
        with cached_model(config, groups, chunks, num_sequences, length) as cached:
            cached.next_logits([PassTokens(place, 0, [1, 2, 3]) for place in range(num_sequences)], of_prompts=True)
            held = [vars(module).get(name) for chunk in chunks for module in chunk.modules() for name in _CACHES]
            kept = [each for cache in held if cache is not None for each in vars(cache).values()]
            size = sum(each.nbytes for each in kept if isinstance(each, torch.Tensor))
        scores = 2 * 4 * length * config.model.num_attention_heads // groups.layout.tp
        counted = Sizes(config).sequence_bytes(length) - scores
        found.append(Remembered(counted, size // (num_sequences + 1)))
    return found


_CACHES = ("cached", "memory")


def sampled(
    groups: Groups, config: Config, folder: str, free_bytes: Sequence[int]
) -> list[tuple[Done | Failed, list[int]]]:
    """Returns the answers to one request while rank 1 has so much memory left, with the number of sequences whose keys
    and values were held at a time."""
    prompt = {"chunks": [{"tokens": [1, 2, 3]}]}
    rules = {"max_tokens": 5, "seed": 4}
    body = {"sampling_session_id": "base:sample:0", "seq_id": 0, "prompt": prompt, "sampling_params": rules}
    asked = Served(config).sample(SampleBody.model_validate({**body, "num_samples": 9}))
    with free(groups):
        worker, found = Worker(Served(config), Store(Path(folder))), []
        with closing(worker):
            assert isinstance(worker.run(CreateSampler(session_id="base", sampling_session_seq_id=0)), Done)
            for each in free_bytes:
                left = each if groups.rank == 1 else 10**12
                with (
                    mock.patch("mtrain.serve.room._free_on_host", lambda left=left: left),
                    mock.patch("mtrain.training.sampling.sampler.cached_model", wraps=cached_model) as seen,
                ):
                    found.append((worker.run(asked), [call.args[3] for call in seen.call_args_list]))
    return found


def _trained(engine: Engine) -> list[torch.Tensor]:
    parameters = (each for chunk in engine._built().model.chunks for each in chunk.parameters())
    return [each.detach() for each in parameters if each.requires_grad]


def _ended(stop: Path) -> None:
    while not stop.exists():
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGTERM)
