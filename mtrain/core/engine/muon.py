"""Muon on matrices, however the layout divides them.

An update needs the whole matrix, while tensor parallelism divides it, the distributed optimizer cuts it anywhere, and
fused projections hold several. So every tensor has one owner among the ranks of its pipeline stage. Pieces of the
momentum are sent to the owner, which orthogonalizes each matrix of the model as a single process would, and the update
is sent back to the owners of the float32 main weights. The state is sharded like AdamW's, and a checkpoint stores it as
layout-independent global tensors.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mtrain.arch.features import segments
from mtrain.base.tensor_slice import Sizes, TensorSlice
from mtrain.config.schema.model import ModelSection
from mtrain.config.schema.train import MuonSection
from mtrain.core.engine.optimizer_state import OptimizerState
from mtrain.core.engine.sharded_model import ShardedModel
from mtrain.core.layers.build import unwrap
from mtrain.core.layers.layer_spec import global_name
from mtrain.core.layers.sharded_parameters import (
    ShardedParameter,
    has_own_shard,
    is_written_here,
    run_of,
    sharded_parameters,
    shards,
)
from mtrain.core.ranks.groups import Groups

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of X, (X X^T) X and (X X^T)^2 X: five steps bring singular values between 0.01 and 1 near 1."""
_OF_ROWS = ("embedding.word_embeddings.weight", "output_layer.weight", "router.weight")
"""Endings of the keys of tables that AdamW updates: a row belongs to one token or one expert."""


class MatrixSlice(NamedTuple):
    """Elements of a global tensor that a rank holds: plain numbers, which ranks exchange."""

    at: TensorSlice
    is_sent: bool
    """Whether this rank sends them; the other ranks that hold them have replicas."""


class _Piece(NamedTuple):
    """A slice on this rank, with views of its numbers."""

    where: MatrixSlice
    main: Tensor
    """Main weights of the optimizer that hold the piece; their gradient is there."""
    start: int
    """Index of the piece's first element in the flattened main weights."""
    momentum: Tensor
    """[num_elements] of the optimizer's state: a view."""

    def of(self, values: Tensor) -> Tensor:
        """Returns [num_elements] of a tensor laid out like the main weights: a view."""
        return values.view(-1)[self.start : self.start + self.where.at.num_elements]


_Slices = dict[str, list[MatrixSlice]]
"""Slices that a rank holds, by global name of the tensor."""


class Muon:
    """Momentum, orthogonalized matrix by matrix; AdamW updates embeddings, output layer, routers, norms and biases.

    In a round every rank of the stage (TP x CP x DP) owns at most one tensor. Two all-to-alls over the stage per round,
    in float32, carry each element to the owner and back once. In addition to its state, a rank needs memory for a few
    copies of one tensor.

    Source: Jordan et al. 2024, kellerjordan.github.io/posts/muon; scale and decay of Liu et al. 2025, arXiv 2502.16982,
    section 2.2, with which one learning rate and one weight decay fit matrices and AdamW's parameters.
    """

    def __init__(
        self,
        section: MuonSection,
        model: ModelSection,
        state: OptimizerState,
        sharded: ShardedModel,
        groups: Groups,
    ) -> None:
        """Gives matrices a momentum instead of moments, and plans the rounds.

        Collective over the stage: one gather of short objects.
        """
        self._section, self._model, self._groups = section, model, groups
        self._rank, self._num_ranks = groups.stage.rank(), groups.stage.size()
        self._pieces: dict[str, list[_Piece]] = {}
        shapes: dict[str, Sizes] = {}
        # Pieces come in the order of the optimizer's parameters, which `_split` relies on at both ends of an exchange.
        for name, shape, piece in _pieces(state, sharded, groups):
            self._pieces.setdefault(name, []).append(piece)
            shapes[name] = shape
        own = {name: [piece.where for piece in pieces] for name, pieces in self._pieces.items()}
        everyone: list[tuple[dict[str, Sizes], _Slices]] = [({}, {})] * self._num_ranks
        # Once, at the start: each rank then knows who sends how much to whom, so steps exchange no sizes.
        dist.all_gather_object(everyone, (shapes, own), group=groups.stage)
        self._slices = [slices for _, slices in everyone]
        self._shapes = {name: shape for shapes, _ in everyone for name, shape in shapes.items()}
        # From what all have gathered, so every rank calls the same collectives in the same order.
        self._rounds = list(_rounds(self._shapes, self._slices))

    @torch.no_grad()
    def update(self, lr: float) -> None:
        """Makes one step of all matrices and removes their gradients, so that AdamW skips them."""
        for names in self._rounds:
            whole = self._collect(names)
            if whole is not None:
                self._orthogonalize(names[self._rank], whole)
            self._apply(names, self._return(names, whole), lr)
        for piece in (piece for pieces in self._pieces.values() for piece in pieces):
            piece.main.grad = None  # Adam skips parameters without a gradient, and leaves their momentum alone

    def _collect(self, names: Sequence[str]) -> Tensor | None:
        """Returns the directions of the tensor that this rank owns in a round, [rows, columns]; None if it owns
        none."""
        # before the early return: every rank moves its momentum and takes part in the exchange, owner or not
        sent = [self._directions(name) for name in names]
        if self._rank >= len(names):
            self._exchange(sent, [0] * self._num_ranks)
            return None
        name = names[self._rank]
        slices = [[piece for piece in held.get(name, ()) if piece.is_sent] for held in self._slices]
        received = self._exchange(sent, [_num_elements(pieces) for pieces in slices])
        # filled completely: each element has exactly one sender, which `_rounds` asserts
        whole = torch.empty(self._shapes[name], device=self._groups.device)
        # the sender has laid its slices one after the other in the order that it announced
        for held, values in zip(slices, received, strict=True):
            for piece, part in zip(held, _split(values, held), strict=True):
                piece.at.of(whole).copy_(part.view(piece.at.shape))
        return whole

    def _directions(self, name: str) -> list[Tensor]:
        """Returns what this rank sends to the owner of a tensor; replicas update their momentum and send nothing."""
        # Computed for unsent pieces too: the momentum of a replica has to move with that of the piece that is sent.
        found = [(self._direction(piece), piece.where.is_sent) for piece in self._pieces.get(name, ())]
        return [direction for direction, is_sent in found if is_sent]

    def _direction(self, piece: _Piece) -> Tensor:
        """Returns [num_elements]: the moving mean of the gradients, with Nesterov moved towards the last one again."""
        assert piece.main.grad is not None, "every matrix has a gradient"
        gradient, beta = piece.of(piece.main.grad), self._section.momentum
        # the gradient is summed, divided and clipped already, like the one that Adam gets
        piece.momentum.lerp_(gradient, 1 - beta)
        return gradient.lerp(piece.momentum, beta) if self._section.nesterov else piece.momentum

    def _orthogonalize(self, name: str, whole: Tensor) -> None:
        """Orthogonalizes every matrix of a tensor [rows, columns], in place, scaled to the size of AdamW's updates."""
        columns, sizes = whole.shape[1], self._segments(name, whole.shape[0])
        # Fused rows repeat in blocks, [blocks, rows, columns]: linear_qkv as queries, key, value of each group of
        # heads.
        for block in torch.split(whole.view(-1, sum(sizes), columns), sizes, dim=1):
            matrix = block.reshape(-1, columns)  # the rows of one matrix, which fused tensors keep apart
            # The elements of an orthogonal a x b matrix have a root mean square of 1 / sqrt(max(a, b)).
            scale = self._section.update_rms * math.sqrt(max(matrix.shape))
            # Back into `whole`: the split gives views.
            block.copy_(orthogonalized(matrix, self._section.newton_schulz_steps).mul_(scale).view(block.shape))

    def _segments(self, name: str, num_rows: int) -> list[int]:
        return list(segments(self._model, name.split(".")[-2], num_rows))

    def _return(self, names: Sequence[str], whole: Tensor | None) -> list[Tensor]:
        """Reverses `_collect`: returns, owner by owner, the elements that this rank holds of the owner's tensor."""
        sent: list[list[Tensor]] = []
        if whole is not None:
            name = names[self._rank]
            # To replicas as well, unlike on the way there: all of them apply the update to their own main weights.
            sent = [[piece.at.of(whole).reshape(-1) for piece in held.get(name, ())] for held in self._slices]
        return self._exchange(sent, [_num_elements(self._slices[self._rank].get(name, ())) for name in names])

    def _apply(self, names: Sequence[str], updates: Sequence[Tensor], lr: float) -> None:
        # decoupled, before the update, as in AdamW
        decay = 1 - lr * self._section.weight_decay
        for name, values in zip(names, updates):  # ranks after the last owner have sent nothing
            pieces = self._pieces.get(name, [])
            for piece, update in zip(pieces, _split(values, [piece.where for piece in pieces]), strict=True):
                piece.of(piece.main.data).mul_(decay).add_(update, alpha=-lr)

    def _exchange(self, sent: Sequence[Sequence[Tensor]], sizes: Sequence[int]) -> list[Tensor]:
        """Makes one all-to-all over the stage of tensors by receiving rank; `sizes` counts elements by sending rank.
        Ranks beyond the ends of both get and send nothing."""
        # torch.cat refuses an empty list
        nothing, idle = torch.empty(0, device=self._groups.device), [0] * self._num_ranks
        given = [torch.cat([nothing, *values]) for values in sent]
        outgoing = [*map(Tensor.numel, given), *idle][: self._num_ranks]
        incoming = [*sizes, *idle][: self._num_ranks]
        received = torch.empty(sum(incoming), device=self._groups.device)
        # Ranks that send and receive nothing call it too: it is collective over the stage.
        dist.all_to_all_single(received, torch.cat([nothing, *given]), incoming, outgoing, group=self._groups.stage)
        return list(torch.split(received, incoming))


def _num_elements(slices: Sequence[MatrixSlice]) -> int:
    return sum(piece.at.num_elements for piece in slices)


def _split(values: Tensor, slices: Sequence[MatrixSlice]) -> Sequence[Tensor]:
    return torch.split(values, [piece.at.num_elements for piece in slices])


def orthogonalized(matrix: Tensor, num_steps: int) -> Tensor:
    """Returns U S V^T with all singular values brought near 1, by Newton-Schulz; zero for zero.

    Unlike the published code it adds nothing to the norm, so that the update does not depend on the size of the loss.
    """
    # The smaller of X X^T and X^T X: three products per step with the square of the short side.
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    norm = torch.linalg.vector_norm(x, dtype=torch.float64)  # its squares may leave the range of float32
    # The Frobenius norm bounds every singular value, so all start at 1 or below, where the iteration converges.
    # Dividing by the 0-dimensional float64 norm leaves x float32.
    x = torch.where(norm > 0, x / norm, 0.0)
    a, b, c = COEFFICIENTS
    for _ in range(num_steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def _pieces(state: OptimizerState, sharded: ShardedModel, groups: Groups) -> Iterator[tuple[str, Sizes, _Piece]]:
    """Yields global name and shape of every matrix of which this rank updates something, piece by piece."""
    places = {place.data: place for place in sharded_parameters(map(unwrap, sharded.chunks), groups)}
    for flat_slice, momentum in state.momenta(lambda parameter: is_matrix(places[parameter])):
        place = places[flat_slice.parameter]
        # With a distributed optimizer there are no copies over DP x CP, only over TP; without it one of all replicas
        # sends.
        is_sent = has_own_shard(place) if sharded.is_divided else is_written_here(place)
        # leading axes stack layers and experts: the axes after them are the matrix
        axes = next(shards(place, place.key, place.data)).prepend_axis_num
        for shard in run_of(place, place.key, momentum.view(-1), flat_slice.start, flat_slice.end):
            where = MatrixSlice(TensorSlice(shard.at.offset[axes:], shard.at.shape[axes:]), is_sent)
            # a shard is a view of the momentum, which is laid out like the main weights
            start = int(shard.data.storage_offset() - momentum.storage_offset())
            name, shape = global_name(shard.key, shard.at.offset[:axes]), shard.global_shape[axes:]
            yield name, shape, _Piece(where, flat_slice.main, start, shard.data)


def is_matrix(place: ShardedParameter) -> bool:
    """Says whether a parameter is a matrix, or matrices stacked along axes of layers and experts."""
    is_weight = place.key.endswith(".weight") and not place.key.endswith(_OF_ROWS)
    return is_weight and len(next(shards(place, place.key, place.data)).local_shape) == 2


def _rounds(shapes: Mapping[str, Sizes], everyone: Sequence[_Slices]) -> Iterator[list[str]]:
    """Yields the tensors of a stage by round and owner, the same on all ranks; those of a round have similar sizes."""
    for name, shape in shapes.items():
        sent = _num_elements([piece for slices in everyone for piece in slices.get(name, ()) if piece.is_sent])
        assert sent == math.prod(shape), f"{sent} of the {math.prod(shape)} elements of {name} have a rank to speak"
    # By size, so that owners of a round work about equally long; by name where sizes agree, for one order on all ranks.
    names = sorted(shapes, key=lambda name: (-math.prod(shapes[name]), name))
    for first in range(0, len(names), len(everyone)):
        yield names[first : first + len(everyone)]
