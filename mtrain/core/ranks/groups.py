"""Process groups; no other module uses megatron-core's global parallel state."""

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from mtrain.arch.layout import Layout
from mtrain.base.errors import ConfigError, MachineError
from mtrain.core.ranks import patience


@dataclass(frozen=True)
class Groups:
    """The process groups of this rank for one layout."""

    layout: Layout
    device: torch.device
    collection: ProcessGroupCollection
    """The groups as megatron-core's functions take them."""
    tp_host: dist.ProcessGroup
    """Group of the tensor-parallel ranks for tensors on the CPU: a gloo group on GPUs, `tp` itself on CPUs."""
    rank: int
    tp_rank: int
    pp_rank: int
    cp_rank: int
    dp_rank: int

    @property
    def tp(self) -> dist.ProcessGroup:
        """Tensor-parallel group."""
        return self.collection.tp

    @property
    def cp(self) -> dist.ProcessGroup:
        """Context-parallel group."""
        return self.collection.cp

    @property
    def dp_cp(self) -> dist.ProcessGroup:
        """DP x CP group, over which gradients are summed."""
        return self.collection.dp_cp

    def replicas_of(self, parameter: torch.Tensor) -> dist.ProcessGroup:
        """Returns the group over which the gradient of a parameter is summed: DP x CP, or, for an expert's parameter,
        the ranks that hold the same expert."""
        return self.collection.expt_dp if is_of_experts(parameter) else self.dp_cp

    @property
    def stage(self) -> dist.ProcessGroup:
        """Ranks of the same pipeline stage; together they hold every row of the global batch."""
        return self.collection.tp_dp_cp

    @property
    def counts_loss(self) -> bool:
        """Says whether this rank's loss pairs count: on one rank per tensor-parallel group of the last stage."""
        return self.pp_rank == self.layout.pp - 1 and self.tp_rank == 0

    @property
    def counts_planned(self) -> bool:
        """Says whether this rank's planned denominators count: on one of the ranks that share a batch."""
        return self.pp_rank == 0 and self.tp_rank == 0 and self.cp_rank == 0


def is_of_experts(parameter: torch.Tensor) -> bool:
    """Says whether a parameter belongs to routed experts, by the attribute that DistributedDataParallel reads."""
    return not getattr(parameter, "allreduce", True)


@contextlib.contextmanager
def opened_groups(layout: Layout, device: torch.device, seed: int, timeout_s: float) -> Iterator[Groups]:
    """Opens all groups of the layout in an open torch.distributed world, and seeds the random states of dropout.

    Collective over the world. The groups are closed after the block.

    Raises:
        ConfigError: This process already has megatron-core's groups.
        MachineError: Hosts of a tensor-parallel group cannot reach each other.
    """
    if parallel_state.is_initialized():
        raise ConfigError(
            "this process already has megatron-core's process groups, from another Engine or your own program; close "
            "that first, with mtrain.close_all() if you no longer have a reference"
        )
    # groups of the user's program keep their timeouts
    earlier_groups = set(dist.distributed_c10d._world.pg_map)
    try:
        with patience.opening(), connecting_on_first_use():
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=layout.tp,
                pipeline_model_parallel_size=layout.pp,
                virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
                context_parallel_size=layout.cp,
                expert_model_parallel_size=layout.ep,
                expert_tensor_parallel_size=layout.etp,
                distributed_timeout_minutes=timeout_s / 60,  # a float is fine, since it is passed to timedelta
                # only needed to gather DistributedOptimizer's checkpoints, but ranks here write their own shards
                create_gloo_process_groups=False,
            )
            collection, timeout = ProcessGroupCollection.use_mpu_process_groups(), timedelta(seconds=timeout_s)
            is_apart = device.type != "cpu" and layout.tp > 1
            tp_host = open_host_group(collection.tp, timeout) if is_apart else collection.tp
            # parallel_state.py does not apply the timeout to all of its groups
            patience.set_timeouts(set(dist.distributed_c10d._world.pg_map) - earlier_groups, timeout)
        groups = Groups(
            layout=layout,
            device=device,
            collection=collection,
            tp_host=tp_host,
            rank=dist.get_rank(),
            tp_rank=parallel_state.get_tensor_model_parallel_rank(),
            pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
            cp_rank=parallel_state.get_context_parallel_rank(),
            dp_rank=parallel_state.get_data_parallel_rank(),
        )
        seed_generators(seed, 0, groups)
        yield groups
    finally:
        # only forgets the groups; init.py closes them together with the world
        parallel_state.destroy_model_parallel()


def open_host_group(tp: dist.ProcessGroup, timeout: timedelta) -> dist.ProcessGroup:
    """Opens a gloo group of the same ranks, whose hosts exchange values in it without NCCL (ADR 53).

    Collective over the world. Raises MachineError if the ranks cannot reach each other.
    """
    ranks = dist.get_process_group_ranks(tp)
    try:
        group, _ = dist.new_subgroups(  # type: ignore[no-untyped-call]
            len(ranks), timeout=timeout, backend="gloo", group_desc="HOSTS_OF_TENSOR_PARALLEL"
        )
    except RuntimeError as error:
        raise MachineError(
            f"rank {dist.get_rank()} cannot connect to the hosts of its tensor-parallel group, ranks {ranks}: "
            f"{error}; set GLOO_SOCKET_IFNAME to the network interface by which their machines reach each other"
        ) from error
    assert dist.get_process_group_ranks(group) == ranks, "tensor-parallel ranks are neighbours"
    return group


@contextlib.contextmanager
def connecting_on_first_use() -> Iterator[None]:
    """Delays the NCCL connections of groups opened inside the block until their first collective.

    megatron-core opens about twenty groups, most of which a layout never uses. If the world is bound to a GPU, torch
    connects each of them at once: on an H100 every communicator took 0.4 GiB of GPU memory, and 0.4 s to close. torch
    also splits the world's communicator for ranks outside a new group, even a gloo group.
    """
    world = dist.group.WORLD
    assert world is not None, "torch.distributed is open"
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        yield
    finally:
        world.bound_device_id = bound


def seed_generators(seed: int, step: int, groups: Groups) -> None:
    """Sets the random states of dropout from the seed of the run, the step and the coordinates of this rank.

    Ranks of a tensor-parallel group share the state for replicated activations; all other states differ.
    """
    # without tp_rank, which megatron-core itself adds to the seed for activations that TP divides
    digest = hashlib.sha256(f"{seed}:{step}:{groups.pp_rank}:{groups.dp_rank}:{groups.cp_rank}".encode()).digest()
    derived = int.from_bytes(digest[:4], "little") >> 1
    # the default generator only, since torch.manual_seed() records a stack trace for every missing kind of device; the
    # next call seeds the device
    torch.default_generator.manual_seed(derived)
    tensor_parallel.model_parallel_cuda_manual_seed(derived, force_reset_rng=True)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a CPU tensor to the device, queued after the device's earlier work; returns it unchanged on a CPU."""
    # pinned, since a copy from pageable memory blocks the host
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
