"""Batches that the loader passes to the training step.

The fields of a batch are listed here alone: what all of them go through (to a device, cut for context parallelism,
packed for a broadcast) uses `Microbatch.tensors`, `Microbatch.of` or `Microbatch.map`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from mtrain.core.loss.preference.member import GroupMember

FieldPath = tuple[str, ...]
"""Path of a tensor in a batch: a field, and inside it the loss term, extra, choice, or the depth and its field."""
DOCUMENT_STARTS: FieldPath = ("document_starts",)
_ALONE = (
    "tokens",
    "labels",
    "positions",
    "document_starts",
    "sequence_ids",
    "is_padding",
    "sources",
)
_OF_DEPTH = ("tokens", "labels", "is_padding")
_COUNTS = ("num_padding_tokens", "num_loss_tokens", "num_pairs", "num_window_pairs", "num_output_rows", "members")


@dataclass(frozen=True)
class MtpTargets:
    """Inputs and labels of one depth of multi-token prediction."""

    tokens: Tensor
    """[batch, seq] int64: the token `depth` positions further in the document; 0 where there is none."""
    labels: Tensor
    """[batch, seq] int64: the token after it; 0 where there is none."""
    is_padding: Tensor | None
    """[batch, seq] bool: positions without a token `depth` positions further, which routers do not count; None without
    routers."""


@dataclass(frozen=True)
class PlacedMember:
    """Identity of one sequence of a microbatch."""

    slot: int
    """Position of the sample in the global batch."""
    member: GroupMember | None
    """Part of the sample in a group; None outside a group."""
    length: float
    """Sum of its token weights."""
    weight: float


@dataclass(frozen=True)
class Microbatch:
    """Samples of one forward pass: full rows from the loader, or what a context-parallel rank holds of each row.

    `slice_for_context_parallel` makes the second from the first; seq is the width of either.
    """

    tokens: Tensor
    """[batch, seq] int64: token ids."""
    labels: Tensor
    """[batch, seq] int64, already shifted: the token to predict at each position; 0 where there is none."""
    positions: Tensor
    """[batch, seq] int64: position inside the document, for the rotary embedding."""
    weights: dict[str, Tensor]
    """Loss term -> [batch, seq] float32: factor of each token's loss."""
    denominator_weights: dict[str, Tensor]
    """Loss term -> [batch, seq] float64: each token's share of the term's denominator."""
    document_starts: Tensor | None
    """[batch, seq] int32, on the CPU: index in the row of the first token of the token's document; attention does not
    reach below it. None: each row is one document."""
    is_padding: Tensor | None
    """[batch, seq] bool: positions without text, which routers do not count; None without routers."""
    sequence_ids: Tensor | None = None
    """[batch, seq] int64: the sample of each position, counted from 0 in the microbatch; padding belongs to the one
    before it. None: each row is one sequence."""
    sources: Tensor | None = None
    """[batch, seq] int64: number in data.train of the source of each position, -1 if not known; None if losses are not
    reported by source."""
    mtp: tuple[MtpTargets, ...] = ()
    """Inputs and labels of the depths of multi-token prediction, the first depth first."""
    extras: dict[str, Tensor] = field(default_factory=dict)
    """Name -> [batch, seq] float32: values that loss functions read in addition to the weights, aligned with the
    labels; 0 at padding."""
    choices: dict[str, Tensor] = field(default_factory=dict)
    """Name -> [batch, seq, layers, k] int32: choices that layers replay (choices.py); -1 where they choose themselves,
    as at padding."""
    num_sequences: int = 0
    """Number of sequences in `sequence_ids`; the number of rows where `sequence_ids` is None."""
    num_padding_tokens: int = 0
    """Positions without text; like all counts below, 0 on ranks that receive their rows."""
    num_loss_tokens: int = 0
    """Positions that the main term counts."""
    num_pairs: int = 0
    """Pairs (query, key) of text that attend to each other in layers without a window."""
    num_window_pairs: int = 0
    """Pairs (query, key) of text that attend to each other in layers with a window."""
    num_output_rows: int = 0
    """Positions whose logits at least one term counts, plus those of the depths of multi-token prediction."""
    members: tuple[PlacedMember | None, ...] = ()
    """Identity of each sequence, None for a row without a sample; empty on ranks that receive their rows."""

    def tensors(self) -> dict[FieldPath, Tensor]:
        """Returns every tensor that the batch has, by its field."""
        found: dict[FieldPath, Tensor | None] = {(name,): getattr(self, name) for name in _ALONE}
        found |= {("weights", term): weights for term, weights in self.weights.items()}
        found |= {("denominator_weights", term): weights for term, weights in self.denominator_weights.items()}
        found |= {("extras", name): extra for name, extra in self.extras.items()}
        found |= {("choices", name): choice for name, choice in self.choices.items()}
        for depth, targets in enumerate(self.mtp):
            found |= {("mtp", str(depth), name): getattr(targets, name) for name in _OF_DEPTH}
        return {path: tensor for path, tensor in found.items() if tensor is not None}

    @classmethod
    def of(cls, tensors: Mapping[FieldPath, Tensor], num_sequences: int | None = None) -> Microbatch:
        """Builds a batch from tensors as `tensors` returns them; its counts are 0."""
        num_depths = sum(path[0] == "mtp" and path[2] == "tokens" for path in tensors)
        ids = tensors.get(("sequence_ids",))
        if num_sequences is None:
            num_sequences = len(tensors["tokens",]) if ids is None else int(ids.max()) + 1
        depths = [[("mtp", str(depth), name) for name in _OF_DEPTH] for depth in range(num_depths)]
        return cls(
            # one-element paths are tuples too, hence the comma
            tokens=tensors["tokens",],
            labels=tensors["labels",],
            positions=tensors["positions",],
            weights={path[1]: tensor for path, tensor in tensors.items() if path[0] == "weights"},
            denominator_weights={path[1]: each for path, each in tensors.items() if path[0] == "denominator_weights"},
            document_starts=tensors.get(DOCUMENT_STARTS),
            is_padding=tensors.get(("is_padding",)),
            sequence_ids=ids,
            sources=tensors.get(("sources",)),
            mtp=tuple(MtpTargets(tensors[tokens], tensors[labels], tensors.get(pad)) for tokens, labels, pad in depths),
            extras={path[1]: extra for path, extra in tensors.items() if path[0] == "extras"},
            choices={path[1]: choice for path, choice in tensors.items() if path[0] == "choices"},
            num_sequences=num_sequences,
        )

    def map(self, change: Callable[[Tensor], Tensor]) -> Microbatch:
        """Applies `change` to every tensor but `document_starts`, which stays whole and on the CPU."""
        changed = {path: each if path == DOCUMENT_STARTS else change(each) for path, each in self.tensors().items()}
        return self._with(changed)

    def with_vocabulary(self, size: int) -> Microbatch:
        """Takes token ids and labels modulo `size`, for a model of a smaller vocabulary."""

        def folded(path: FieldPath, rows: Tensor) -> Tensor:
            name = path[2] if path[0] == "mtp" else path[0]
            return rows % size if name in ("tokens", "labels") else rows

        return self._with({path: folded(path, rows) for path, rows in self.tensors().items()})

    def _with(self, tensors: Mapping[FieldPath, Tensor]) -> Microbatch:
        counts = {name: getattr(self, name) for name in _COUNTS}
        return replace(Microbatch.of(tensors, self.num_sequences), **counts)
