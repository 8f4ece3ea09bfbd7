"""The world of ranks: how it opens, the device of each rank, and how ranks agree on failures."""

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
    # NCCL, from ProcessGroupNCCL and ncclGetErrorString
    "remote process exited",
    "remote process exiting",
    "ncclRemoteError",
    "NCCL communicator was aborted",
    "Watchdog caught collective operation timeout",
)
"""Parts of torch's error messages for a rank that has exited or does not respond in time."""

_SIGN_OF_LACKING_MEMORY = "DefaultCPUAllocator: can't allocate memory"
"""Part of the RuntimeError that torch raises on CPUs; CUDA and numpy raise errors of their own classes."""

_ERRORS_OF_THE_STORE = (dist.DistStoreError, dist.DistNetworkError)
"""Errors of the store where ranks meet, which NCCL uses to open connections."""

_ARRIVED = "mtrain/arrived"
_ARRIVAL_POLL_S = 0.05

_meeting_places: dict[tuple[str, int], MeetingPlace] = {}
"""Meeting places of this process by (address, port)."""


def choose_device(device: Device, local_rank: int) -> torch.device:
    """Returns the device for a value of `train.device`; `auto` means this rank's GPU if torch sees one, else the CPU.

    Raises MachineError if a GPU is required but missing, or if this machine has fewer GPUs than ranks.
    """
    match device:
        case "auto":
            on_cpu = not torch.cuda.is_available()
        case "cpu" | "cuda":
            on_cpu = device == "cpu"
        case _:
            assert_never(device)
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
    """Returns the index of this rank's GPU among those that torch sees; raises MachineError if they are too few."""
    # with srun --gpus-per-task each rank sees only its own GPU, as number 0
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
    """Opens torch.distributed with NCCL on GPUs or gloo on CPUs; yields this rank's device.

    Ranks with another `purpose` are refused.

    Raises:
        MachineError: The device is missing, other ranks cannot be reached, ranks of several launches meet, or memory
            runs out inside the block.
        RankLostError: Inside the block, the connection to another rank broke or a rank did not answer in time.
    """
    patience.install()
    device = choose_device(wanted_device, environment.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # torch starts one thread per core in every process, so ranks on one machine would compete for cores
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
                if dist.is_initialized():  # vLLM in this process may have closed it
                    dist.destroy_process_group()


def _open_world(environment: RankEnvironment, device: torch.device, timeout_s: float, purpose: Purpose) -> None:
    # with device_id torch connects NCCL now, inside the `try`
    options: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
    backend, timeout = "nccl" if device.type == "cuda" else "gloo", timedelta(seconds=timeout_s)
    try:
        rendezvous = _rendezvous(environment, timeout_s, purpose)
        with patience.opening():
            dist.init_process_group(backend, timeout=timeout, **rendezvous, **options)
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise MachineError(
            f"rank {environment.rank} of {environment.world_size} cannot meet the others at "
            f"{environment.master_addr}:{environment.master_port}: {error}"
        ) from error


@contextlib.contextmanager
def joined_distributed(wanted_device: Device, timeout_s: float, purpose: Purpose) -> Iterator[torch.device]:
    """Opens the world like `init_distributed`, or joins the world that the user's program has opened.

    A joined world stays open, but groups opened inside the block are closed with it. Joining takes one all-gather of
    digests.

    Raises:
        ConfigError: torch.distributed was opened with a backend that does not support the device.
        MachineError: See `init_distributed`.
        RankLostError: See `init_distributed`.
    """
    if not dist.is_initialized():
        environment = RankEnvironment.from_environ(os.environ)
        with init_distributed(environment, wanted_device, timeout_s, purpose) as device:
            yield device
        return
    device = choose_device(wanted_device, torch.cuda.current_device() if torch.cuda.is_available() else 0)
    needed_backend, backend = "nccl" if device.type == "cuda" else "gloo", dist.get_backend()
    if needed_backend not in backend:
        raise ConfigError(
            f"torch.distributed was opened with the backend {backend}, but train.device={wanted_device} computes on "
            f"{device.type} and needs {needed_backend}; open it with {needed_backend}, or set train.device"
        )
    # destroy_process_group() without a group would close the program's world as well
    earlier_groups = set(dist.distributed_c10d._world.pg_map)
    try:
        with naming_lost_ranks(lambda: ""), naming_lack_of_memory():
            _refuse_other_purposes(purpose)
            yield device
            dist.barrier()  # no rank may close connections that another rank still reads
    finally:
        for group in set(dist.distributed_c10d._world.pg_map) - earlier_groups:
            dist.destroy_process_group(group)


def _rendezvous(environment: RankEnvironment, timeout_s: float, purpose: Purpose) -> dict[str, Any]:
    """Waits until all ranks have met; returns arguments for `init_process_group` with a store for this world."""
    rank, size = environment.rank, environment.world_size
    # a single rank needs no port
    if size == 1:
        return {"store": HashStore(), "rank": 0, "world_size": 1}
    address = environment.master_addr, environment.master_port
    if address not in _meeting_places:
        _meeting_places[address] = MeetingPlace(environment, timeout_s, os.environ)
    store = _meeting_places[address].meet(Member.of(environment, purpose, os.environ), timeout_s)
    return {"store": store, "rank": rank, "world_size": size}


def _refuse_other_purposes(purpose: Purpose) -> None:
    """Raises MachineError unless all ranks of a world opened by the user's program have the same purpose."""
    rank, size = dist.get_rank(), dist.get_world_size()
    # without variables of launchers, since the program is responsible for the launch
    member = Member.of(RankEnvironment(rank, size, 0, 1, "", 0), purpose, {})
    digests: list[Any] = [None] * size
    dist.all_gather_object(digests, (member.digest, member.folders))
    if len({digest for digest, _ in digests}) == 1 and all(set(digests[0][1]) & set(folders) for _, folders in digests):
        return
    texts: list[Any] = [None] * size
    dist.all_gather_object(texts, member.text)
    first, *further_members = map(Member.parsed, texts)
    for other in further_members:
        if differences(first, other):
            fault = MachineError(explained(first, other))
            fault.on_every_rank = True
            raise fault


@contextlib.contextmanager
def naming_lost_ranks(missing: Callable[[], str]) -> Iterator[None]:
    """Replaces torch's error about a rank that has exited or does not respond in time by one message.

    `missing` is called after the error; it returns the names of the missing ranks, or "" if they are unknown.

    Raises:
        RankLostError: Inside the block, the connection to another rank broke or a rank did not answer in time.
    """
    try:
        yield
    except RuntimeError as error:  # includes torch's DistError and the plain errors of gloo
        # gloo and NCCL also raise RuntimeError for wrong arguments, so only the text tells
        is_sign = any(sign in str(error) for sign in _SIGNS_OF_A_LOST_RANK)
        if not is_sign and not isinstance(error, _ERRORS_OF_THE_STORE):
            raise
        line = str(error).splitlines()[0].partition(" This is typically")[0]  # without gloo's advice
        reason, names = re.sub(r"^\[/[^\]]*\] ", "", line), missing()  # without file and line number
        message = f"rank {dist.get_rank()} lost the connection to another rank"
        raise RankLostError(f"{message}; {names} ({reason})" if names else f"{message}: {reason}") from error


@contextlib.contextmanager
def naming_lack_of_memory() -> Iterator[None]:
    """Replaces the error of a failed allocation inside the block by a MachineError."""
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
    """Runs `action` on rank 0; one broadcast brings its result, or the MtrainError that it raised, to every rank.

    Any other exception is a bug: it ends rank 0, and the other ranks report that they lost it.
    """
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = action()
        except MtrainError as error:
            error.on_every_rank = True  # so that one rank prints the message, not all of them
            outcome[1] = error
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def with_the_slowest(action: Callable[[], Result]) -> Result:
    """Runs `action` on every rank; ranks that finish early wait for the others without a timeout.

    For work that one rank may do for all, such as tokenizing, and that takes longer than the timeout of a collective.
    Ranks count themselves in the store where they met. If a rank dies meanwhile, only its launcher can end the run.
    """
    store, size = dist.distributed_c10d._get_default_store(), dist.get_world_size()
    try:
        return action()
    finally:
        turn = store.add(_ARRIVED, 1)  # also after an error
        # one counter serves all calls: no rank starts the next one before all ranks have finished this one
        all_of_round = -(-turn // size) * size
        while store.add(_ARRIVED, 0) < all_of_round:
            time.sleep(_ARRIVAL_POLL_S)


def any_rank(flag: bool, device: torch.device) -> bool:
    """Says whether the flag is true on any rank. One all-reduce of a number over the world; the host waits for it."""
    flags = torch.tensor([flag], dtype=torch.int32, device=device)
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    return bool(flags.item())


def on_all_ranks(action: Callable[[], Result]) -> Result:
    """Runs `action` on every rank; if ranks raise MtrainError, all ranks raise the error of the lowest of them.

    One all-gather of small objects, which also is a barrier.
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
