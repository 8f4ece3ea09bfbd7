"""What ranks do in the tests of several runs in one process."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from mtrain.base.errors import MachineError
from mtrain.base.signals import StopSignal
from mtrain.checkpoint.format import writer
from mtrain.config import Config
from mtrain.core.layers import init_weights
from mtrain.core.loss.functions.likelihood import next_token_loss
from mtrain.core.loss.pair import LossPair, TermInputs
from mtrain.core.ranks.deterministic import deterministic
from mtrain.core.ranks.groups import Groups
from mtrain.training.trainer import train, train_on


def train_fresh(groups: Groups, config: Config) -> None:
    """Trains one run in a process that has made none."""
    train_on(groups, config, StopSignal())


def count_drawn(groups: Groups, configs: Sequence[Config]) -> list[int]:
    """Returns the number of tensors that each run draws."""
    found = []
    for config in configs:
        with mock.patch.object(init_weights, "draw", wraps=init_weights.draw) as draw:
            train_on(groups, config, StopSignal())
        found.append(draw.call_count)
    return found


def memory_of_saves(groups: Groups, config: Config) -> list[str]:
    """Returns the threads in which a run takes memory for its saves, in order."""
    found, taking = list[str](), writer._memory

    def noted(size_bytes: int, on_gpu: bool) -> Tensor:
        found.append(threading.current_thread().name)
        return taking(size_bytes, on_gpu)

    with mock.patch.object(writer, "_memory", noted):
        train_on(groups, config, StopSignal())
    return found


def train_all(groups: Groups, configs: Sequence[Config], port: int, store: str) -> None:
    """Trains one run after the other as a user's program calls them, the second one in a thread."""
    rank, size = str(groups.rank), str(groups.layout.world_size)
    dist.barrier()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for number, config in enumerate(configs):
        if number == 1:
            in_a_thread(functools.partial(train, config))
        else:
            train(config)
    assert not parallel_state.is_initialized()
    assert not dist.is_initialized()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(size))  # to be closed
    dist.barrier()  # else the first rank to finish closes connections that the other still makes


def in_a_thread(action: Callable[[], object]) -> None:
    """Runs the action in another thread and waits; its errors are raised here."""
    raised: list[BaseException] = []

    def work() -> None:
        try:
            action()
        except BaseException as error:  # shown in the thread that waits
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


def stirred(inputs: TermInputs) -> LossPair:
    """Computes the usual loss, after an operation of which torch has no deterministic form on any device."""
    torch.zeros(3).put_(torch.tensor([0, 1]), torch.ones(2))
    return next_token_loss(inputs)


def switch_after(groups: Groups, config: Config) -> tuple[bool, bool]:
    """Trains, and returns whether torch's switch is on afterwards where it was off, and where it was on."""
    found = []
    for was_on in (False, True):
        torch.use_deterministic_algorithms(was_on)
        train_on(groups, config, StopSignal())
        found.append(torch.are_deterministic_algorithms_enabled())
    torch.use_deterministic_algorithms(False)
    return found[0], found[1]


def refusal(groups: Groups, given: Mapping[str, str], has_cuda_started: bool) -> str:
    """Returns the message that a deterministic run ends with in an environment."""
    os.environ.update(given)
    with mock.patch.object(torch.cuda, "is_initialized", return_value=has_cuda_started):
        try:
            with deterministic(is_wanted=True):
                return ""
        except MachineError as error:
            return str(error)
