"""Muon on whole matrices, under any layout.

An update needs a whole matrix, but tensor parallelism divides it, the distributed optimizer cuts it anywhere, and fused
projections contain several. So every tensor has an owner among the ranks of its pipeline stage. All ranks send their
pieces of the momentum to the owner, which orthogonalizes each matrix like a single process, and sends the update back
to the ranks with the float32 main weights. The state is sharded like AdamW's; checkpoints store it as global tensors
that do not depend on the layout.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mtrain.arch.features import outside as tower
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
"""Coefficients of X, (X X^T) X and (X X^T)^2 X; five steps bring singular values from 0.01 to 1 close to 1."""
_ROW_TABLES = ("embedding.word_embeddings.weight", "output_layer.weight", "router.weight")
"""Endings of the keys of matrices that AdamW updates, since each row belongs to a token or an expert."""


class MatrixSlice(NamedTuple):
    """A rank's slice of a global tensor, as plain numbers that ranks exchange."""

    at: TensorSlice
    is_sent: bool
    """Whether this rank sends the elements; other ranks with the same elements are replicas."""


class _Piece(NamedTuple):
    """A slice on this rank, with its tensors."""

    where: MatrixSlice
    main: Tensor
    """Main weights of the optimizer, with gradients, that contain the piece."""
    start: int
    """Index of the first element of the piece in the flattened main weights."""
    momentum: Tensor
    """Momentum of the piece, [num_elements], a view of the optimizer's state."""

    def of(self, values: Tensor) -> Tensor:
        """Returns the piece, [num_elements], of a tensor laid out like the main weights, as a view."""
        return values.view(-1)[self.start : self.start + self.where.at.num_elements]


_Slices = dict[str, list[MatrixSlice]]
"""Slices of a rank, by global name of the tensor."""


class Muon:
    """Updates matrices by their orthogonalized momentum; AdamW updates embeddings, output layer, routers, norms and
    biases, and patch embeddings and positions of a vision tower.

    In a round every rank of the stage (TP x CP x DP) owns at most one tensor. Two all-to-alls per round over the stage,
    in float32, send each element to the owner and back once. Besides its state, a rank needs memory for a few copies of
    one tensor.

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
        """Gives matrices a momentum, and plans the rounds. One all-gather of short objects over the stage."""
        self._section, self._model, self._groups = section, model, groups
        self._rank, self._num_ranks = groups.stage.rank(), groups.stage.size()
        self._pieces: dict[str, list[_Piece]] = {}
        shapes: dict[str, Sizes] = {}
        # in the order of the optimizer's parameters, on which `_split` relies at both ends of an exchange
        for name, shape, piece in _pieces(state, sharded, groups):
            self._pieces.setdefault(name, []).append(piece)
            shapes[name] = shape
        local_slices = {name: [piece.where for piece in pieces] for name, pieces in self._pieces.items()}
        everyone: list[tuple[dict[str, Sizes], _Slices]] = [({}, {})] * self._num_ranks
        # once, so that all ranks know who sends how much to whom, and steps exchange no sizes
        dist.all_gather_object(everyone, (shapes, local_slices), group=groups.stage)
        self._slices = [slices for _, slices in everyone]
        self._shapes = {name: shape for shapes, _ in everyone for name, shape in shapes.items()}
        # from gathered values, so that every rank calls the same collectives in the same order
        self._rounds = list(_rounds(self._shapes, self._slices))

    @torch.no_grad()
    def update(self, lr: float) -> None:
        """Updates all matrices, and removes their gradients so that AdamW skips them."""
        for names in self._rounds:
            whole = self._collect(names)
            if whole is not None:
                self._orthogonalize(names[self._rank], whole)
            self._apply(names, self._return(names, whole), lr)
        for piece in (piece for pieces in self._pieces.values() for piece in pieces):
            piece.main.grad = None  # Adam skips parameters without a gradient and does not touch their momentum

    def _collect(self, names: Sequence[str]) -> Tensor | None:
        """Returns the direction of the tensor that this rank owns in a round, [rows, columns]; None if it owns none."""
        # before the early return, since every rank updates its momentum and takes part in the exchange
        sent = [self._directions(name) for name in names]
        if self._rank >= len(names):
            self._exchange(sent, [0] * self._num_ranks)
            return None
        name = names[self._rank]
        slices = [[piece for piece in rank_slices.get(name, ()) if piece.is_sent] for rank_slices in self._slices]
        received = self._exchange(sent, [_num_elements(pieces) for pieces in slices])
        # filled completely below, since each element has exactly one sender, as `_rounds` asserts
        whole = torch.empty(self._shapes[name], device=self._groups.device)
        # a sender concatenates its slices in the order that it announced
        for rank_slices, values in zip(slices, received, strict=True):
            for piece, part in zip(rank_slices, _split(values, rank_slices), strict=True):
                piece.at.of(whole).copy_(part.view(piece.at.shape))
        return whole

    def _directions(self, name: str) -> list[Tensor]:
        """Updates the momentum of a tensor; returns the directions that this rank sends to its owner."""
        # computed even for replicas, whose momentum must stay equal to that of the piece that is sent
        directions = [(self._direction(piece), piece.where.is_sent) for piece in self._pieces.get(name, ())]
        return [direction for direction, is_sent in directions if is_sent]

    def _direction(self, piece: _Piece) -> Tensor:
        """Returns the moving mean of gradients, [num_elements]; Nesterov moves it towards the last gradient again."""
        assert piece.main.grad is not None, "every matrix has a gradient"
        gradient, beta = piece.of(piece.main.grad), self._section.momentum
        # the gradient has been summed, divided and clipped, like the one for Adam
        piece.momentum.lerp_(gradient, 1 - beta)
        return gradient.lerp(piece.momentum, beta) if self._section.nesterov else piece.momentum

    def _orthogonalize(self, name: str, whole: Tensor) -> None:
        """Orthogonalizes every matrix of a tensor, [rows, columns], in place, scaled to the size of AdamW's updates."""
        columns, sizes = whole.shape[1], self._segments(name, whole.shape[0])
        # fused rows repeat in blocks, [blocks, rows, columns]: in linear_qkv queries, key and value of a head group
        for block in torch.split(whole.view(-1, sum(sizes), columns), sizes, dim=1):
            matrix = block.reshape(-1, columns)  # the rows of one matrix, which are spread over a fused tensor
            # the elements of an orthogonal a x b matrix have a root mean square of 1 / sqrt(max(a, b))
            scale = self._section.update_rms * math.sqrt(max(matrix.shape))
            # into `whole`, since the split returns views
            block.copy_(orthogonalized(matrix, self._section.newton_schulz_steps).mul_(scale).view(block.shape))

    def _segments(self, name: str, num_rows: int) -> list[int]:
        if name.startswith(tower.KEY):
            return tower.matrix_rows(name, num_rows)
        return list(segments(self._model, name.split(".")[-2], num_rows))

    def _return(self, names: Sequence[str], whole: Tensor | None) -> list[Tensor]:
        """Sends the update back: returns this rank's elements of the tensor of each owner."""
        sent: list[list[Tensor]] = []
        if whole is not None:
            name = names[self._rank]
            # even to replicas, since all of them update their own main weights
            sent = [
                [piece.at.of(whole).reshape(-1) for piece in rank_slices.get(name, ())] for rank_slices in self._slices
            ]
        return self._exchange(sent, [_num_elements(self._slices[self._rank].get(name, ())) for name in names])

    def _apply(self, names: Sequence[str], updates: Sequence[Tensor], lr: float) -> None:
        for name, values in zip(names, updates):  # ranks that own no tensor have sent nothing
            rate = lr * self._share(name)
            # decoupled weight decay, before the update, as in AdamW
            decay = 1 - rate * self._section.weight_decay
            pieces = self._pieces.get(name, [])
            for piece, update in zip(pieces, _split(values, [piece.where for piece in pieces]), strict=True):
                piece.of(piece.main.data).mul_(decay).add_(update, alpha=-rate)

    def _share(self, name: str) -> float:
        """Returns a tensor's learning rate, as a share of that of the language model."""
        if not name.startswith(tower.KEY):
            return 1.0
        key = "projector_lr" if name.removeprefix(tower.KEY).startswith(tower.PROJECTOR) else "tower_lr"
        return self._section.lr_of_parts.get(key, self._section.lr) / self._section.lr

    def _exchange(self, sent: Sequence[Sequence[Tensor]], sizes: Sequence[int]) -> list[Tensor]:
        """Makes one all-to-all over the stage; returns the elements received from each rank.

        Args:
            sent: Tensors for each receiving rank; ranks beyond its end get nothing.
            sizes: Number of elements from each sending rank; ranks beyond its end send nothing.
        """
        # torch.cat refuses an empty list
        nothing, idle = torch.empty(0, device=self._groups.device), [0] * self._num_ranks
        messages = [torch.cat([nothing, *values]) for values in sent]
        outgoing = [*map(Tensor.numel, messages), *idle][: self._num_ranks]
        incoming = [*sizes, *idle][: self._num_ranks]
        received = torch.empty(sum(incoming), device=self._groups.device)
        # even ranks that send and receive nothing must call it
        dist.all_to_all_single(received, torch.cat([nothing, *messages]), incoming, outgoing, group=self._groups.stage)
        return list(torch.split(received, incoming))


def _num_elements(slices: Sequence[MatrixSlice]) -> int:
    return sum(piece.at.num_elements for piece in slices)


def _split(values: Tensor, slices: Sequence[MatrixSlice]) -> Sequence[Tensor]:
    return torch.split(values, [piece.at.num_elements for piece in slices])


def orthogonalized(matrix: Tensor, num_steps: int) -> Tensor:
    """Returns the matrix with all singular values brought close to 1, by Newton-Schulz; zero for a zero matrix.

    Unlike in the published code, nothing is added to the norm, so the update does not depend on the scale of the loss.
    """
    # transposed if tall, so that X X^T is the smaller of the two products
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    norm = torch.linalg.vector_norm(x, dtype=torch.float64)  # its squares may leave the range of float32
    # The Frobenius norm bounds every singular value, so all start at or below 1, where the iteration converges.
    # Dividing by the 0-dimensional float64 norm leaves x float32.
    x = torch.where(norm > 0, x / norm, 0.0)
    a, b, c = COEFFICIENTS
    for _ in range(num_steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def _pieces(state: OptimizerState, sharded: ShardedModel, groups: Groups) -> Iterator[tuple[str, Sizes, _Piece]]:
    """Yields the pieces of matrices that this rank updates, with global name and shape of their tensors."""
    parameters = {
        sharded_parameter.data: sharded_parameter
        for sharded_parameter in sharded_parameters(map(unwrap, sharded.chunks), groups)
    }
    for flat_slice, momentum in state.momenta(lambda parameter: is_matrix(parameters[parameter])):
        sharded_parameter = parameters[flat_slice.parameter]
        # with a distributed optimizer only TP ranks have copies; without it one of all replicas sends
        is_sent = has_own_shard(sharded_parameter) if sharded.is_divided else is_written_here(sharded_parameter)
        # leading axes stack layers and experts; the axes after them are those of the matrix
        axes = next(shards(sharded_parameter, sharded_parameter.key, sharded_parameter.data)).prepend_axis_num
        for shard in run_of(
            sharded_parameter, sharded_parameter.key, momentum.view(-1), flat_slice.start, flat_slice.end
        ):
            where = MatrixSlice(TensorSlice(shard.at.offset[axes:], shard.at.shape[axes:]), is_sent)
            # a shard is a view of the momentum, which is laid out like the main weights
            start = int(shard.data.storage_offset() - momentum.storage_offset())
            name, shape = global_name(shard.key, shard.at.offset[:axes]), shard.global_shape[axes:]
            yield name, shape, _Piece(where, flat_slice.main, start, shard.data)


def is_matrix(parameter: ShardedParameter) -> bool:
    """Says whether a parameter is a matrix, or matrices stacked along axes of layers and experts."""
    shape = next(shards(parameter, parameter.key, parameter.data)).local_shape
    if parameter.key.startswith(tower.KEY):
        return tower.is_matrix(parameter.key, shape)
    return len(shape) == 2 and parameter.key.endswith(".weight") and not parameter.key.endswith(_ROW_TABLES)


def _rounds(shapes: Mapping[str, Sizes], everyone: Sequence[_Slices]) -> Iterator[list[str]]:
    """Yields the tensors of each round, one per owner and of similar sizes, the same on all ranks."""
    for name, shape in shapes.items():
        sent = _num_elements([piece for slices in everyone for piece in slices.get(name, ()) if piece.is_sent])
        assert sent == math.prod(shape), f"only {sent} of the {math.prod(shape)} elements of {name} have a sender"
    # by size, so that the owners of a round work about equally long; then by name, for the same order on all ranks
    names = sorted(shapes, key=lambda name: (-math.prod(shapes[name]), name))
    for first in range(0, len(names), len(everyone)):
        yield names[first : first + len(everyone)]
