"""Arithmetic of a layout: the ranks' coordinates, layers and microbatches.

Ranks are numbered in Megatron's default order tp-cp-ep-dp-pp: tensor-parallel neighbours are adjacent, then context,
then data, then pipeline. All functions are pure; process groups are created elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from mtrain.base.errors import ConfigError
from mtrain.base.spelling import counted
from mtrain.config import Config, rules
from mtrain.config.schema.layout import CpComm, LayoutSection, Shard

GIVEN_DEGREES = ("tp", "sp", "pp", "vpp", "cp", "cp_comm", "shard", "ep", "etp")
"""Fields of a layout that are keys of the section `layout`; the others follow from them and the world size."""
_GROUP_KEY = "microbatch_group_size_per_vp_stage"


class Coordinate(NamedTuple):
    """Position of a rank on the axes of the dense model."""

    tp: int
    cp: int
    dp: int
    pp: int


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism of a run."""

    tp: int = 1
    sp: bool = False
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int = 1
    cp_comm: CpComm = "allgather"
    shard: Shard = "optimizer"
    stage_layers: tuple[int, ...] | None = None
    """Number of layers of every (virtual) stage in model order; None if they divide evenly."""

    @classmethod
    def from_config(cls, config: Config, world_size: int) -> Layout:
        """Builds the configured layout on `world_size` ranks.

        Raises:
            ConfigError: Rules are broken; the message lists all broken rules.
        """
        if broken := broken_rules(config, world_size):
            raise ConfigError("\n".join(broken))
        section = config.layout
        return cls(
            **{name: getattr(section, name) for name in GIVEN_DEGREES},
            dp=world_size // model_parallel_size(section),
            stage_layers=uneven_stages(section, config.model.num_layers),
        )

    @property
    def num_sharing_images(self) -> int:
        """Number of ranks that divide the images of a microbatch: those that see the same rows."""
        return self.cp * (self.tp if self.sp else 1)

    def __str__(self) -> str:
        names = [f"tp{self.tp}{'sp' if self.sp else ''}", f"pp{self.pp}"]
        if self.vpp > 1:
            names[1] += f"vpp{self.vpp}"
        if self.stage_layers is not None:
            names[1] += f"[{'+'.join(map(str, self.stage_layers))}]"
        names.append(f"cp{self.cp}{self.cp_comm if self.cp > 1 and self.cp_comm != 'allgather' else ''}")
        names.append(f"dp{self.dp}")
        if self.ep > 1 or self.etp > 1:
            names.append(f"ep{self.ep}etp{self.etp}")
        if self.shard == "weights":
            names.append("weights")
        return "-".join(names)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages, including virtual ones."""
        return self.pp * self.vpp

    def coordinate(self, rank: int) -> Coordinate:
        """Returns the position of `rank` on the axes of the dense model."""
        assert 0 <= rank < self.world_size, f"rank {rank} of {self.world_size}"
        rank, tp = divmod(rank, self.tp)
        rank, cp = divmod(rank, self.cp)
        pp, dp = divmod(rank, self.dp)
        return Coordinate(tp=tp, cp=cp, dp=dp, pp=pp)

    def rank(self, coordinate: Coordinate) -> int:
        """Returns the rank at `coordinate`."""
        tp, cp, dp, pp = coordinate
        return tp + self.tp * (cp + self.cp * (dp + self.dp * pp))

    @property
    def edp(self) -> int:
        """Number of replicas of an expert within a pipeline stage."""
        return self.tp * self.cp * self.dp // (self.etp * self.ep)

    def num_microbatches(self, global_batch_size: int, micro_batch_size: int) -> int:
        """Returns the number of forward passes of a data-parallel rank in one step."""
        num, remainder = divmod(global_batch_size, self.dp * micro_batch_size)
        assert not remainder, "broken_rules refuses a global batch that does not divide"
        return num

    def stage(self, pp_rank: int, vpp_rank: int) -> int:
        """Returns the index, in model order, of the stage that chunk `vpp_rank` of pipeline rank `pp_rank` holds."""
        return vpp_rank * self.pp + pp_rank

    def layers_per_stage(self, num_layers: int) -> tuple[int, ...]:
        """Returns the number of layers of every stage, in model order; adds up to `num_layers`."""
        if self.stage_layers is not None:
            return self.stage_layers
        return (num_layers // self.num_stages,) * self.num_stages

    def layers(self, num_layers: int, pp_rank: int, vpp_rank: int) -> range:
        """Returns the indices, from 0, of the layers that chunk `vpp_rank` of pipeline rank `pp_rank` holds."""
        counts = self.layers_per_stage(num_layers)
        stage = self.stage(pp_rank, vpp_rank)
        first = sum(counts[:stage])
        return range(first, first + counts[stage])

    def layers_of_rank(self, num_layers: int, pp_rank: int) -> list[int]:
        """Returns the indices of the layers that all chunks of pipeline rank `pp_rank` hold."""
        return [layer for chunk in range(self.vpp) for layer in self.layers(num_layers, pp_rank, chunk)]


def model_parallel_size(section: LayoutSection) -> int:
    """Returns the number of ranks that hold one copy of the model and work on the same sequences: tp x pp x cp."""
    return section.tp * section.pp * section.cp


def broken_rules(config: Config, world_size: int) -> list[str]:
    """Returns a message for every rule that `config` breaks on `world_size` ranks."""
    section = config.layout
    return [
        *rules.tensor_parallel(config.model, section),
        *rules.pipeline(config.model, section),
        *rules.sequence(section, config.train, config.data),
        *_ranks(config, world_size),
    ]


def _ranks(config: Config, world_size: int) -> Iterator[str]:
    """Checks that ranks divide into copies of the model, and the global batch into their microbatches."""
    section, train = config.layout, config.train
    dp, remainder = divmod(world_size, model_parallel_size(section))
    if world_size < 1 or remainder:
        yield (
            f"world size {world_size} must be a multiple of {model_parallel_size(section)} = layout.tp={section.tp} x "
            f"layout.pp={section.pp} x layout.cp={section.cp}; start more ranks or shrink the layout"
        )
        return
    yield from _experts(section, world_size)
    if config.data.packing is not None:
        # the rows of a step follow from its samples; every rank gets a number of rows that the schedule accepts
        yield from _interleaved_schedule(config, microbatches_come_in(config))
    elif config.sequences_per_step % (dp * train.micro_batch_size):
        sequences = (
            f" of {counted(config.sequences_per_sample, 'sequence')} each" if config.sequences_per_sample > 1 else ""
        )
        yield (
            f"train.global_batch_size={train.global_batch_size}{sequences} must be a multiple of "
            f"{dp * train.micro_batch_size} = dp={dp} (world size {world_size}) x train.micro_batch_size="
            f"{train.micro_batch_size}; change one of them"
        )
    else:
        yield from _interleaved_schedule(config, config.sequences_per_step // (dp * train.micro_batch_size))


def microbatches_come_in(config: Config) -> int:
    """Returns the group size that must divide a packed step's number of microbatches, if interleaved; 1 otherwise."""
    if config.layout.vpp == 1:
        return 1
    group = config.model.megatron.get(_GROUP_KEY)
    return group if isinstance(group, int) and group > 0 else config.layout.pp


def most_microbatches(config: Config, layout: Layout) -> int:
    """Returns the most forward passes of a data-parallel rank in a step; each packed sample may need its own row."""
    train = config.train
    if config.data.packing is None:
        return layout.num_microbatches(config.sequences_per_step, train.micro_batch_size)
    per_group = layout.dp * train.micro_batch_size * microbatches_come_in(config)
    return -(-config.sequences_per_step // per_group) * microbatches_come_in(config)


def _experts(section: LayoutSection, world_size: int) -> Iterator[str]:
    if (world_size // section.pp) % (section.ep * section.etp):
        yield (
            f"world size {world_size} / layout.pp={section.pp} must be a multiple of layout.ep={section.ep} x "
            f"layout.etp={section.etp}; start more ranks or shrink the layout"
        )


def _interleaved_schedule(config: Config, num_microbatches: int) -> Iterator[str]:
    """Checks that the groups in which microbatches pass a virtual stage are at least as large as the pipeline.

    Source: megatron-core 0.16.1, pipeline_parallel/schedules.py, forward_backward_pipelining_with_interleaving.
    """
    section = config.layout
    if section.vpp == 1:
        return
    setting = config.model.megatron.get(_GROUP_KEY)
    group = setting if isinstance(setting, int) else section.pp
    last = num_microbatches % group if group > 0 else 0
    if not section.pp <= group <= num_microbatches or 0 < last < section.pp:
        name = f"model.megatron.{_GROUP_KEY}={group}" if isinstance(setting, int) else f"layout.pp={group}"
        yield (
            f"layout.vpp={section.vpp} passes microbatches on in groups of {name}, but a step has "
            f"{counted(num_microbatches, 'microbatch')}, and no group may be smaller than layout.pp={section.pp}; "
            "change train.global_batch_size or train.micro_batch_size, or set layout.vpp to 1"
        )


def uneven_stages(section: LayoutSection, num_layers: int) -> tuple[int, ...] | None:
    """Returns the number of layers of every stage of an uneven split, in model order; None if layers divide evenly."""
    first, last = section.first_stage_layers, section.last_stage_layers
    if section.stage_layers is not None or (first is None and last is None):
        return section.stage_layers
    ends = [count for count in (first, last) if count is not None]
    num_middle = section.pp * section.vpp - len(ends)
    middle_layers = (num_layers - sum(ends)) // num_middle if num_middle else 0
    return (*([] if first is None else [first]), *[middle_layers] * num_middle, *([] if last is None else [last]))
