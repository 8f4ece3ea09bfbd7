"""Outputs of modules in forward order, and log-probabilities of tokens, assembled from all ranks: they show where two
forward passes diverge."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mtrain.config import Config
from mtrain.core.batch.batch import Microbatch
from mtrain.core.batch.zigzag import zigzag_index
from mtrain.core.engine.rank_model import RankModel
from mtrain.core.layers.build import unwrap
from mtrain.core.layers.output_layer import Logits
from mtrain.core.ranks.groups import Groups
from mtrain.core.step.loss import label_log_probs
from mtrain.verify.core.samples import SamplePositions

IN_LAYER = ("input_layernorm", "self_attention.core_attention", "self_attention", "pre_mlp_layernorm", "mlp")
"""Modules of a layer in forward order; the layer itself follows."""
OUTPUT_LAYER = "output_layer"
LOG_PROBS = "log_probs"
"""Name of recorded log-probabilities."""
_COLUMNS_OVER_TP = ("self_attention.core_attention", OUTPUT_LAYER)


@dataclass(frozen=True)
class RecordedOutput:
    """One rank's part of a module's output over the global batch."""

    module: str
    slots: NDArray[np.int64]
    """Slot of the sample at each position, [seq_local, batch]; -1 for padding."""
    positions: NDArray[np.int64]
    """Position in that sample, [seq_local, batch]."""
    first_column: int
    values: NDArray[Any]


@contextmanager
def recorded_outputs(
    chunks: Sequence[nn.Module], groups: Groups, config: Config, positions: SamplePositions | None
) -> Iterator[list[RecordedOutput]]:
    """Yields a list that collects module outputs while the block runs; it stays empty if `positions` is None."""
    recorder, handles = _Recorder(groups, config, positions, []), []
    for model in () if positions is None else map(unwrap, chunks):
        chunk = _ChunkHooks(recorder)
        handles.append(model.register_forward_pre_hook(chunk.begin))
        for name, module in named_modules(model):
            if type(module).__name__ != "IdentityOp":  # TransformerEngine's norms are inside the projections
                handles.append(module.register_forward_hook(chunk.hook(name)))
        handles.append(model.register_forward_hook(chunk.end))
    try:
        yield recorder.pieces
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def recorded_log_probs(model: RankModel, positions: SamplePositions | None) -> Iterator[list[RecordedOutput]]:
    """Yields a list that collects the log-probability of each label, [seq_local, batch, 1], while the block trains.

    On ranks of the last stage, with two all-reduces over TP for each chunk of tokens; only one rank of a TP group,
    which needs `positions`, records them.
    """
    groups, config = model.groups, model.config
    recorder = _Recorder(groups, config, positions, [])

    def hook(numbers: Iterator[int]) -> Callable[[nn.Module, tuple[Microbatch], object], None]:
        def note(module: nn.Module, inputs: tuple[Microbatch], output: object) -> None:
            if not isinstance(output, Logits):  # of an earlier stage
                return
            (log_probs,) = label_log_probs(output, inputs[0], config, groups)
            if groups.counts_loss:
                recorder.add(LOG_PROBS, next(numbers), log_probs.t().unsqueeze(-1))

        return note

    handles = [chunk.register_forward_hook(hook(itertools.count())) for chunk in map(unwrap, model.chunks)]
    try:
        yield recorder.pieces
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class _Recorder:
    groups: Groups
    config: Config
    positions: SamplePositions | None
    pieces: list[RecordedOutput]

    def add(self, module: str, microbatch: int, output: Tensor) -> None:
        """Records this rank's part of an output."""
        assert self.positions is not None, "nothing is watched"
        groups, layout, length = self.groups, self.groups.layout, self.config.row_width
        positions = zigzag_index(length, layout.cp, groups.cp_rank).numpy() if layout.cp > 1 else np.arange(length)
        if layout.sp and len(output) < len(positions):
            positions = positions[groups.tp_rank * len(output) : (groups.tp_rank + 1) * len(output)]
        first = groups.tp_rank * output.shape[-1] if module.endswith(_COLUMNS_OVER_TP) else 0
        # [2, seq_local, batch]
        slots, in_samples = self.positions.of(microbatch, groups.dp_rank, length)[..., positions].transpose(0, 2, 1)
        values = output.detach().to("cpu", copy=True).numpy()
        self.pieces.append(RecordedOutput(module, slots, in_samples, first, values))


class _ChunkHooks:
    """Hooks of one model chunk; they count its forward passes, but not recomputation in backward."""

    def __init__(self, recorder: _Recorder) -> None:
        self._recorder, self._microbatch, self._is_forward = recorder, -1, False
        self._noted: set[str] = set()

    def begin(self, module: nn.Module, inputs: object) -> None:
        self._microbatch += 1
        self._noted = set()
        self._is_forward = True

    def end(self, module: nn.Module, inputs: object, output: object) -> None:
        self._is_forward = False
        if isinstance(output, Logits):  # deferred: the loss computes them a few tokens at a time
            with torch.no_grad():
                self._recorder.add(OUTPUT_LAYER, self._microbatch, output.main.whole())

    def hook(self, name: str) -> Callable[[nn.Module, object, Any], None]:
        def note(module: nn.Module, inputs: object, output: Any) -> None:
            value = output[0] if isinstance(output, tuple) else output
            is_first = name not in self._noted  # MTP depths use the embedding again
            if self._is_forward and is_first and isinstance(value, Tensor) and value.ndim == 3:
                self._noted.add(name)
                self._recorder.add(name, self._microbatch, value)

        return note


def named_modules(model: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yields the watched modules of a chunk except the output layer, in forward order, by global name."""
    if model.pre_process:
        yield "embedding", model.embedding
    for layer in model.decoder.layers:
        for name in IN_LAYER:
            if name == "self_attention.core_attention" and not hasattr(layer.self_attention, "core_attention"):
                continue  # a layer without attention
            yield f"layer {layer.layer_number - 1} {name}", layer.get_submodule(name)
        yield f"layer {layer.layer_number - 1}", layer
    if model.post_process:
        yield "final_layernorm", model.decoder.final_layernorm


def module_order(num_layers: int) -> list[str]:
    """Returns the names of all watched modules in forward order."""
    layers = [f"layer {number}{name and ' '}{name}" for number in range(num_layers) for name in (*IN_LAYER, "")]
    return ["embedding", *layers, "final_layernorm", OUTPUT_LAYER]


def assemble_outputs(pieces: Iterable[RecordedOutput], config: Config) -> dict[str, NDArray[Any]]:
    """Assembles outputs by module, [seq, global batch, columns], without vocabulary padding; nan where missing."""
    recorded = list(pieces)
    whole: dict[str, NDArray[Any]] = {}
    columns: dict[str, int] = {}
    for piece in recorded:
        columns[piece.module] = max(columns.get(piece.module, 0), piece.first_column + piece.values.shape[-1])
    for piece in recorded:
        if piece.module not in whole:
            shape = (config.data.seq_length, config.train.global_batch_size, columns[piece.module])
            whole[piece.module] = np.full(shape, np.nan)
        part = whole[piece.module][..., piece.first_column : piece.first_column + piece.values.shape[-1]]
        is_text = piece.slots >= 0
        part[piece.positions[is_text], piece.slots[is_text]] = piece.values[is_text]
    if OUTPUT_LAYER in whole:
        whole[OUTPUT_LAYER] = whole[OUTPUT_LAYER][..., : config.model.vocab_size]
    return whole


def first_deviating(
    outputs: Mapping[str, NDArray[Any]], exact: Mapping[str, NDArray[Any]], order: Sequence[str], tolerance: float
) -> str | None:
    """Returns the first module that differs by more than `tolerance` x its largest exact element; None if none does."""
    for module in order:
        if module not in outputs or module not in exact:
            continue
        difference = float(np.abs(outputs[module] - exact[module]).max())
        if not difference <= tolerance * float(np.abs(exact[module]).max()):
            return module
    return None
