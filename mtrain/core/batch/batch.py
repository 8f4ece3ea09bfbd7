"""Batches that the loader passes to the training step.

Only this module lists the fields of a batch. Operations on all fields (moving to a device, slicing for context
parallelism, packing for a broadcast) use `Microbatch.tensors`, `Microbatch.of` or `Microbatch.map`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from mtrain.core.batch.images import MicrobatchImages
from mtrain.core.loss.preference.member import GroupMember

FieldPath = tuple[str, ...]
"""Path of a tensor in a batch: a field, then its loss term, extra, choice or part of the images, or for MTP the depth
and its field."""
DOCUMENT_STARTS: FieldPath = ("document_starts",)
IMAGE_ROWS: tuple[FieldPath, ...] = (("images", "places"), ("images", "axes"))
IMAGE_AHEAD: FieldPath = ("images", "ahead")
IMAGE_PARTS: tuple[FieldPath, ...] = (("images", "pixels"), ("images", "grids"))
IMAGE_ENDS: FieldPath = ("images", "ends")
_WHOLE_ON_HOST = (DOCUMENT_STARTS, *IMAGE_PARTS, IMAGE_ENDS)
_PLAIN_FIELDS = (
    "tokens",
    "labels",
    "positions",
    "document_starts",
    "sequence_ids",
    "is_padding",
    "sources",
)
_DEPTH_FIELDS = ("tokens", "labels", "is_padding")
_COUNTS = ("num_padding_tokens", "num_loss_tokens", "num_pairs", "num_window_pairs", "num_output_rows", "members")


@dataclass(frozen=True)
class MtpTargets:
    """Inputs and labels of one MTP depth."""

    tokens: Tensor
    """[batch, seq] int64: the token `depth` positions ahead in the document; 0 beyond its end."""
    labels: Tensor
    """[batch, seq] int64: the token after that; 0 beyond the end."""
    is_padding: Tensor | None
    """[batch, seq] bool: positions without a token `depth` positions ahead, which routers do not count; None without
    routers."""


@dataclass(frozen=True)
class PlacedMember:
    """Facts about one sequence of a microbatch."""

    slot: int
    """Position of the sample in the global batch."""
    member: GroupMember | None
    """Membership of the sample in a group; None outside a group."""
    length: float
    """Sum of the token weights of the sample."""
    weight: float


@dataclass(frozen=True)
class Microbatch:
    """Samples of one forward pass: full rows from the loader, or a context-parallel rank's slice of each row.

    `slice_for_context_parallel` makes slices from full rows; seq is the width of either.
    """

    tokens: Tensor
    """[batch, seq] int64: token ids."""
    labels: Tensor
    """[batch, seq] int64, already shifted: the token to predict at each position; 0 if none."""
    positions: Tensor
    """[batch, seq] int64: position inside the document, for the rotary embedding."""
    weights: dict[str, Tensor]
    """Loss term -> [batch, seq] float32: factor of each token's loss."""
    denominator_weights: dict[str, Tensor]
    """Loss term -> [batch, seq] float64: share of each token in the denominator of the term."""
    document_starts: Tensor | None
    """[batch, seq] int32, on the CPU: index in the row at which the token's document begins; attention does not reach
    below it. None: each row is one document."""
    is_padding: Tensor | None
    """[batch, seq] bool: positions without text, which routers do not count; None without routers."""
    sequence_ids: Tensor | None = None
    """[batch, seq] int64: the sample of each position, counted from 0 in the microbatch; padding belongs to the sample
    before it. None: each row is one sequence."""
    sources: Tensor | None = None
    """[batch, seq] int64: index in data.train of the source of each position, -1 if unknown; None if losses are not
    reported by source."""
    mtp: tuple[MtpTargets, ...] = ()
    """Inputs and labels of the MTP depths, in order."""
    extras: dict[str, Tensor] = field(default_factory=dict)
    """Name -> [batch, seq] float32: values that loss functions read in addition to the weights, aligned with the
    labels; 0 at padding."""
    choices: dict[str, Tensor] = field(default_factory=dict)
    """Name -> [batch, seq, layers, k] int32: choices that layers replay (choices.py); -1 where the layer chooses
    itself, as at padding."""
    images: MicrobatchImages | None = None
    """Images among the tokens; None if the rows hold text alone."""
    num_sequences: int = 0
    """Number of sequences in `sequence_ids`, or the number of rows if that is None."""
    num_padding_tokens: int = 0
    """Positions without text; like all counts below, 0 on ranks that receive their rows by broadcast."""
    num_loss_tokens: int = 0
    """Positions that the main term counts."""
    num_pairs: int = 0
    """Pairs of a text query and a text key that it attends to in layers without a window."""
    num_window_pairs: int = 0
    """Such pairs in layers with a window."""
    num_output_rows: int = 0
    """Positions with logits that at least one term counts, plus those of the MTP depths."""
    members: tuple[PlacedMember | None, ...] = ()
    """Facts about each sequence, None for a row without a sample; empty on ranks that receive rows by broadcast."""

    def tensors(self) -> dict[FieldPath, Tensor]:
        """Returns all tensors of the batch by path."""
        fields: dict[FieldPath, Tensor | None] = {(name,): getattr(self, name) for name in _PLAIN_FIELDS}
        fields |= {("weights", term): weights for term, weights in self.weights.items()}
        fields |= {("denominator_weights", term): weights for term, weights in self.denominator_weights.items()}
        fields |= {("extras", name): extra for name, extra in self.extras.items()}
        fields |= {("choices", name): choice for name, choice in self.choices.items()}
        for depth, targets in enumerate(self.mtp):
            fields |= {("mtp", str(depth), name): getattr(targets, name) for name in _DEPTH_FIELDS}
        if self.images is not None:
            fields |= {
                path: getattr(self.images, path[1]) for path in (*IMAGE_ROWS, IMAGE_AHEAD, *IMAGE_PARTS, IMAGE_ENDS)
            }
        return {path: tensor for path, tensor in fields.items() if tensor is not None}

    @classmethod
    def of(cls, tensors: Mapping[FieldPath, Tensor], num_sequences: int | None = None) -> Microbatch:
        """Builds a batch from the tensors that `tensors` returns; its counts are 0."""
        num_depths = sum(path[0] == "mtp" and path[2] == "tokens" for path in tensors)
        ids = tensors.get(("sequence_ids",))
        if num_sequences is None:
            num_sequences = len(tensors["tokens",]) if ids is None else int(ids.max()) + 1
        images = {path[1]: tensor for path, tensor in tensors.items() if path[0] == "images"}
        depths = [[("mtp", str(depth), name) for name in _DEPTH_FIELDS] for depth in range(num_depths)]
        return cls(
            # even a path of one element is a tuple, hence the comma
            tokens=tensors["tokens",],
            labels=tensors["labels",],
            positions=tensors["positions",],
            weights={path[1]: tensor for path, tensor in tensors.items() if path[0] == "weights"},
            denominator_weights={
                path[1]: tensor for path, tensor in tensors.items() if path[0] == "denominator_weights"
            },
            document_starts=tensors.get(DOCUMENT_STARTS),
            is_padding=tensors.get(("is_padding",)),
            sequence_ids=ids,
            sources=tensors.get(("sources",)),
            mtp=tuple(MtpTargets(tensors[tokens], tensors[labels], tensors.get(pad)) for tokens, labels, pad in depths),
            extras={path[1]: extra for path, extra in tensors.items() if path[0] == "extras"},
            choices={path[1]: choice for path, choice in tensors.items() if path[0] == "choices"},
            images=MicrobatchImages(**images) if images else None,
            num_sequences=num_sequences,
        )

    def map(self, change: Callable[[Tensor], Tensor]) -> Microbatch:
        """Applies `change` to every tensor except `document_starts` and pixels, grids and ends of images, which stay
        whole and on the CPU."""
        changed = {
            path: tensor if path in _WHOLE_ON_HOST else change(tensor) for path, tensor in self.tensors().items()
        }
        return self._with(changed)

    def with_vocabulary(self, size: int) -> Microbatch:
        """Takes token ids and labels modulo `size`, for a model with a smaller vocabulary."""

        def folded(path: FieldPath, rows: Tensor) -> Tensor:
            name = path[2] if path[0] == "mtp" else path[0]
            return rows % size if name in ("tokens", "labels") else rows

        return self._with({path: folded(path, rows) for path, rows in self.tensors().items()})

    def _with(self, tensors: Mapping[FieldPath, Tensor]) -> Microbatch:
        counts = {name: getattr(self, name) for name in _COUNTS}
        return replace(Microbatch.of(tensors, self.num_sequences), **counts)
