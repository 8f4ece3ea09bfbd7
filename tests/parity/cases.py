"""Layouts and configurations of the parity tests."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from mtrain.arch.layout import Layout
from mtrain.config import Config
from tests.config.samples import content
from tests.parity.batches import BATCH, SEQ, VOCAB

_BASE: dict[str, Any] = {
    "model__hidden_size": 32,
    "model__ffn_hidden_size": 48,
    "model__num_attention_heads": 8,
    "model__num_query_groups": 4,
    "model__vocab_size": VOCAB,
    "model__vocab_multiple": 5,  # tables of 65, 70 and 80 rows under tp 1, 2 and 4
    "train__global_batch_size": BATCH,
    "train__num_steps": 3,
    "train__precision": "fp32",
    "data__seq_length": SEQ,
    "optimizer__lr": 0.01,
    "optimizer__min_lr": 0.002,
    # Adam divides by sqrt(v) + epsilon. With the usual 1e-8 an element whose true gradient is below the rounding of its
    # tensor (1e-7 of the largest) moves by the learning rate in a random direction, in ANY float32 run: the weights of
    # two correct layouts would differ by lr / |w|, 1e-2. With 1e-3 the rounding of such an element moves its weight by
    # lr x 1e-7 / 1e-3 = 1e-6, while an element of a typical gradient (1e-2 and more here) moves as usual.
    "optimizer__epsilon": 1e-3,
}


@dataclass(frozen=True)
class Case:
    """Layout under which the run has to be the same."""

    layout: dict[str, Any] = field(default_factory=dict)
    """Keys of the section `layout`, and `dp`."""
    micro_batch_size: int = 1
    num_layers: int = 4

    def config(self, **changes: Any) -> Config:
        """Returns the base configuration under this layout; `loss__aggregation="sum"` changes loss.aggregation."""
        section = {f"layout__{key}": value for key, value in self.layout.items() if key != "dp"}
        size = {"train__micro_batch_size": self.micro_batch_size, "model__num_layers": self.num_layers}
        return Config.model_validate(content(**{**_BASE, **section, **size, **changes}))

    def resolved(self, config: Config) -> Layout:
        """Returns the legal layout of the configuration on this case's number of ranks."""
        ranks = [self.layout.get(axis, 1) for axis in ("tp", "pp", "cp", "dp")]
        return Layout.from_config(config, ranks[0] * ranks[1] * ranks[2] * ranks[3])

    def __str__(self) -> str:
        return f"{self.resolved(self.config())}-mbs{self.micro_batch_size}"


def case(micro_batch_size: int = 1, num_layers: int = 4, **layout: Any) -> Case:
    """Makes a case from keywords."""
    return Case(layout, micro_batch_size, num_layers)


def lean(one: Case, num_layers: int = 2) -> Case:
    """Returns the same layout with the fewest layers and microbatches that can still go wrong.

    There are several microbatches, at least as many as pipeline stages; an uneven division keeps its layers.

    Args:
        one: Case to shrink.
        num_layers: Number of layers at least, where the architecture is a pattern of layers.
    """
    degrees = {axis: one.layout.get(axis, 1) for axis in ("pp", "vpp", "dp")}
    is_uneven = any(key.endswith("_layers") for key in one.layout)
    return replace(
        one,
        num_layers=one.num_layers if is_uneven else max(num_layers, degrees["pp"] * degrees["vpp"]),
        micro_batch_size=BATCH // (degrees["dp"] * max(2, degrees["pp"] if degrees["pp"] != 3 else 4)),
    )


def affordable(one: Case) -> Case:
    """Returns the same layout without layers or microbatches that would only repeat something.

    It has two layers or one for each chunk of a pipeline; uneven stages keep theirs. It has few microbatches where each
    of them costs collectives."""
    degrees = {axis: one.layout.get(axis, 1) for axis in ("tp", "pp", "vpp", "cp", "dp")}
    has_collectives = degrees["tp"] * degrees["cp"] > 1
    count = 2 if degrees["pp"] == 1 else 4
    is_uneven = any(key.endswith("_layers") for key in one.layout)
    return replace(
        one,
        num_layers=one.num_layers if is_uneven else max(2, degrees["pp"] * degrees["vpp"]),
        micro_batch_size=max(one.micro_batch_size, BATCH // (count * degrees["dp"]) if has_collectives else 1),
    )


SINGLE = case()

LAYOUTS = [
    SINGLE,
    case(2),
    case(4),
    case(dp=2),
    case(2, dp=2),
    case(4, dp=2),
    case(dp=4),
    case(4, dp=4),
    case(tp=2),
    case(2, tp=2, sp=True),
    case(2, tp=4),
    case(4, tp=4, sp=True),
    case(2, tp=4, sp=True, dp=2),
    case(pp=2),
    case(4, pp=2),
    case(pp=2, vpp=2),
    case(2, pp=2, vpp=2),
    case(pp=4),
    case(pp=2, first_stage_layers=1),
    case(2, pp=2, last_stage_layers=1),
    case(2, num_layers=6, pp=2, vpp=2, stage_layers=(2, 1, 1, 2)),
    case(4, num_layers=8, pp=4, vpp=2),
    case(2, num_layers=8, tp=2, sp=True, pp=2, vpp=4),
    case(pp=3, stage_layers=(1, 1, 2)),
    case(2, pp=3, stage_layers=(2, 1, 1), dp=2),
    case(pp=2, vpp=2, dp=2),
    case(2, pp=4, dp=2),
    case(cp=2),
    case(2, cp=2, cp_comm="ulysses"),
    case(2, cp=4),
    case(cp=4, cp_comm="ulysses"),
    case(2, cp=4, cp_comm="ring"),
    case(cp=2, dp=2),
    case(2, cp=2, cp_comm="ulysses", dp=2),
    case(cp=2, dp=4),
    case(2, cp=4, dp=2),
    case(2, tp=2, cp=2),
    case(2, tp=2, sp=True, cp=2, cp_comm="ulysses"),
    case(2, tp=2, sp=True, cp=2, cp_comm="ring"),
    case(4, tp=2, sp=True, cp=4),
    case(4, tp=2, cp=4, cp_comm="ulysses"),
    case(4, tp=4, sp=True, cp=2, cp_comm="ulysses"),
    case(2, tp=2, sp=True, pp=2),
    case(2, tp=2, sp=True, pp=2, vpp=2, dp=2),
    case(4, tp=4, pp=2),
    case(2, tp=2, sp=True, pp=4),
    case(2, pp=2, cp=2),
    case(pp=2, vpp=2, cp=2, cp_comm="ulysses"),
    case(2, pp=2, cp=2, dp=2),
    case(2, pp=2, cp=4),
    case(2, tp=2, sp=True, pp=2, cp=2),
    case(2, tp=2, pp=2, vpp=2, cp=2, cp_comm="ulysses"),
    case(2, tp=2, sp=True, cp=2, dp=2),
]
"""Layouts of up to eight ranks."""
