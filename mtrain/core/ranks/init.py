"""The world of ranks: the device of each, how it opens, and how ranks agree that something failed."""

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any, TypeVar, assert_never

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from mtrain.base.environment import RankEnvironment
from mtrain.base.errors import ConfigError, MachineError, MtrainError, RankLostError
from mtrain.config.schema.train import Device
from mtrain.core.ranks import patience
from mtrain.core.ranks.meeting import MeetingPlace
from mtrain.core.ranks.party import Member, Purpose, differences, explained

Result = TypeVar("Result")

_SIGNS_OF_A_LOST_RANK = (
    # gloo
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    # NCCL, in the words of ProcessGroupNCCL and ncclGetErrorString
    "remote process exited",
    "remote process exiting",
    "ncclRemoteError",
    "NCCL communicator was aborted",
    "Watchdog caught collective operation timeout",
)
"""Parts of torch's error messages for a rank that has exited or does not respond in time."""

_SIGN_OF_LACKING_MEMORY = "DefaultCPUAllocator: can't allocate memory"
"""Message of torch on CPUs, in a plain RuntimeError; CUDA's and numpy's errors have their own classes."""

_ERRORS_OF_THE_STORE = (dist.DistStoreError, dist.DistNetworkError)
"""Errors raised where ranks meet through the store, as NCCL does when it opens a connection."""

_ARRIVED = "mtrain/arrived"
_ARRIVAL_POLL_S = 0.05

_places: dict[tuple[str, int], MeetingPlace] = {}
"""(address, port) -> the meeting place of this process's ranks there."""


def choose_device(wanted: Device, local_rank: int) -> torch.device:
    """Returns the device of `train.device`; `auto` means this rank's GPU if there is one, else the CPU.

    Raises MachineError if a GPU is required but missing, or there are fewer GPUs than ranks.
    """
    match wanted:
        case "auto":
            on_cpu = not torch.cuda.is_available()
        case "cpu" | "cuda":
            on_cpu = wanted == "cpu"
        case _:
            assert_never(wanted)
    if on_cpu:
        if torch.cuda.is_available():
            raise MachineError(
                "train.device=cpu on a machine with a GPU: hide it with CUDA_VISIBLE_DEVICES= (empty) before the "
                "program starts, as the commands of mtrain do, because megatron-core uses any visible GPU"
            )
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise MachineError("train.device=cuda needs a GPU that torch can use, but it sees none; use train.device=auto")
    return torch.device("cuda", gpu_index(local_rank, torch.cuda.device_count(), os.environ))


def gpu_index(local_rank: int, num_gpus: int, environ: Mapping[str, str]) -> int:
    """Returns the index of this rank's GPU among those that torch sees; raises MachineError if there are too few."""
    # with srun --gpus-per-task each rank sees only its own, as number 0
    if num_gpus == 1 and environ.get("SLURM_GPUS_PER_TASK"):
        return 0
    if local_rank >= num_gpus:
        raise MachineError(
            f"local rank {local_rank} needs its own GPU, but torch sees {num_gpus}; start fewer ranks on this "
            "machine, or compute on its CPUs with train.device=cpu"
        )
    return local_rank


@contextlib.contextmanager
def init_distributed(
    environment: RankEnvironment, wanted_device: Device, timeout_s: float, purpose: Purpose
) -> Iterator[torch.device]:
    """Opens torch.distributed, NCCL on GPUs and gloo on CPUs; yields this rank's device.

    Ranks with another `purpose` are refused.

    Raises:
        MachineError: The device is missing, the other ranks cannot be reached, ranks of several launches meet, or
            memory runs out inside the block.
        RankLostError: Inside the block, the connection to another rank broke or the rank did not answer in time.
    """
    patience.install()
    device = choose_device(wanted_device, environment.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # torch starts a thread for each core in every process: ranks of one machine would compete for cores
    elif "OMP_NUM_THREADS" not in os.environ and environment.local_world_size > 1:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // environment.local_world_size))
    is_over_gloo = device.type == "cpu" and environment.world_size > 1
    with patience.limited(timeout_s) if is_over_gloo else contextlib.nullcontext():
        _open_world(environment, device, timeout_s, purpose)
        try:
            with naming_lost_ranks(lambda: ""), naming_lack_of_memory():
                yield device
        finally:
            with patience.counted():
                if dist.is_initialized():  # vLLM in this process may have ended it
                    dist.destroy_process_group()


def _open_world(environment: RankEnvironment, device: torch.device, timeout_s: float, purpose: Purpose) -> None:
    # given the device, torch connects NCCL now, inside the `try`
    options: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
    backend, timeout = "nccl" if device.type == "cuda" else "gloo", timedelta(seconds=timeout_s)
    try:
        place = _rendezvous(environment, timeout_s, purpose)
        with patience.opening():
            dist.init_process_group(backend, timeout=timeout, **place, **options)
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise MachineError(
            f"rank {environment.rank} of {environment.world_size} cannot meet the others at "
            f"{environment.master_addr}:{environment.master_port}: {error}"
        ) from error


@contextlib.contextmanager
def joined_distributed(wanted_device: Device, timeout_s: float, purpose: Purpose) -> Iterator[torch.device]:
    """Opens the world like `init_distributed`, or uses the one that the program has opened, which stays open.

    Groups that are opened inside the block are closed with it. In a world of the program's own, this costs one
    all-gather of digests.

    Raises:
        ConfigError: torch.distributed was opened with a backend that cannot serve the device.
        MachineError: See `init_distributed`.
        RankLostError: See `init_distributed`.
    """
    if not dist.is_initialized():
        environment = RankEnvironment.from_environ(os.environ)
        with init_distributed(environment, wanted_device, timeout_s, purpose) as device:
            yield device
        return
    device = choose_device(wanted_device, torch.cuda.current_device() if torch.cuda.is_available() else 0)
    wanted, backend = "nccl" if device.type == "cuda" else "gloo", dist.get_backend()
    if wanted not in backend:
        raise ConfigError(
            f"torch.distributed was opened with the backend {backend}, but train.device={wanted_device} computes on "
            f"{device.type} and needs {wanted}; open it with {wanted}, or set train.device"
        )
    # destroy_process_group() without a group would close the program's world as well
    others = set(dist.distributed_c10d._world.pg_map)
    try:
        with naming_lost_ranks(lambda: ""), naming_lack_of_memory():
            _refuse_other_purposes(purpose)
            yield device
            dist.barrier()  # no rank closes connections that another one still reads
    finally:
        for group in set(dist.distributed_c10d._world.pg_map) - others:
            dist.destroy_process_group(group)


def _rendezvous(environment: RankEnvironment, timeout_s: float, purpose: Purpose) -> dict[str, Any]:
    """Returns the arguments of `init_process_group` with a store for this world, once its ranks have met."""
    rank, size = environment.rank, environment.world_size
    # a single rank needs no port
    if size == 1:
        return {"store": HashStore(), "rank": 0, "world_size": 1}
    address = environment.master_addr, environment.master_port
    if address not in _places:
        _places[address] = MeetingPlace(environment, timeout_s, os.environ)
    store = _places[address].meet(Member.of(environment, purpose, os.environ), timeout_s)
    return {"store": store, "rank": rank, "world_size": size}


def _refuse_other_purposes(purpose: Purpose) -> None:
    """Raises unless all ranks of a world that a program has opened have one purpose."""
    rank, size = dist.get_rank(), dist.get_world_size()
    # without the launcher, which the program has checked
    own = Member.of(RankEnvironment(rank, size, 0, 1, "", 0), purpose, {})
    digests: list[Any] = [None] * size
    dist.all_gather_object(digests, (own.digest, own.folders))
    if len({digest for digest, _ in digests}) == 1 and all(set(digests[0][1]) & set(folders) for _, folders in digests):
        return
    texts: list[Any] = [None] * size
    dist.all_gather_object(texts, own.text)
    first, *others = map(Member.parsed, texts)
    for other in others:
        if differences(first, other):
            fault = MachineError(explained(first, other))
            fault.on_every_rank = True
            raise fault


@contextlib.contextmanager
def naming_lost_ranks(missing: Callable[[], str]) -> Iterator[None]:
    """Replaces torch's error about a rank that has exited, or does not respond in time, by one message.

    `missing` returns the names of the missing ranks, empty if they are unknown; it is called after the error.

    Raises:
        RankLostError: The connection to another rank broke inside the block, or the rank did not answer in time.
    """
    try:
        yield
    except RuntimeError as error:  # torch's DistError is one, and gloo raises plain ones
        # gloo and NCCL raise RuntimeError for wrong arguments as well, so only the text tells
        is_sign = any(sign in str(error) for sign in _SIGNS_OF_A_LOST_RANK)
        if not is_sign and not isinstance(error, _ERRORS_OF_THE_STORE):
            raise
        line = str(error).splitlines()[0].partition(" This is typically")[0]  # without gloo's advice
        reason, names = re.sub(r"^\[/[^\]]*\] ", "", line), missing()  # without the line of its source
        message = f"rank {dist.get_rank()} lost the connection to another rank"
        raise RankLostError(f"{message}; {names} ({reason})" if names else f"{message}: {reason}") from error


@contextlib.contextmanager
def naming_lack_of_memory() -> Iterator[None]:
    """Replaces the error of a failed allocation inside the block by one message, a MachineError."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
        is_known = isinstance(error, torch.OutOfMemoryError | MemoryError) or _SIGN_OF_LACKING_MEMORY in str(error)
        if not is_known:
            raise
        line = (str(error).splitlines() or ["no more memory"])[0].rpartition("DefaultCPUAllocator: ")[2]
        raise MachineError(
            f"there is not enough memory ({line}); lower train.micro_batch_size, data.seq_length or the sizes of the "
            "model, or divide them over more ranks (mtrain check prints what a rank needs)"
        ) from error


def on_first_rank(action: Callable[[], Result]) -> Result:
    """Runs `action` on rank 0; its result, or the MtrainError it raised, reaches every rank by one broadcast.

    Any other exception is a defect: it ends rank 0, and the others report the lost rank.
    """
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = action()
        except MtrainError as error:
            error.on_every_rank = True  # makes one rank print the message, not each of them
            outcome[1] = error
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def with_the_slowest(action: Callable[[], Result]) -> Result:
    """Runs `action` on every rank; ranks that finish early wait for the others, however long that takes.

    For work that one rank may do for all, such as tokenizing, for which a collective would not wait: ranks count
    themselves in the store where they met. A rank that dies meanwhile ends the run through its launcher only.
    """
    store, size = dist.distributed_c10d._get_default_store(), dist.get_world_size()
    try:
        return action()
    finally:
        turn = store.add(_ARRIVED, 1)  # also after an error
        # one counter serves all rounds: none begins before the last rank of the round before has come
        all_of_round = -(-turn // size) * size
        while store.add(_ARRIVED, 0) < all_of_round:
            time.sleep(_ARRIVAL_POLL_S)


def any_rank(flag: bool, device: torch.device) -> bool:
    """Says whether the flag is true on any rank. One all-reduce of one number over the world; the host waits for it."""
    flags = torch.tensor([flag], dtype=torch.int32, device=device)
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    return bool(flags.item())


def on_all_ranks(action: Callable[[], Result]) -> Result:
    """Runs `action` on every rank; an MtrainError of any rank is raised on all of them, the lowest rank's if several.

    One all-gather of small objects, which is a barrier as well.
    """
    result, fault = None, None
    try:
        result = action()
    except MtrainError as error:
        fault = error
    faults: list[MtrainError | None] = [None] * dist.get_world_size()
    dist.all_gather_object(faults, fault)
    first = next((error for error in faults if error is not None), None)
    if first is not None:
        first.on_every_rank = True
        raise first
    return result  # type: ignore[return-value]
