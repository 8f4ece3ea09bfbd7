"""The model that adapters and their frozen base are together: its global tensors, made when they are read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from mtrain.base.errors import DataError
from mtrain.base.tensor_slice import TensorSlice
from mtrain.checkpoint.format.fingerprint import hash_of, shown
from mtrain.checkpoint.format.reader import CheckpointTensors
from mtrain.checkpoint.store.directory import checkpoint_at
from mtrain.checkpoint.store.megatron_checkpoint import megatron_folder
from mtrain.checkpoint.store.verification import verify_files
from mtrain.config import Config
from mtrain.convert.adapters import SavedAdapter
from mtrain.hf.io.source import FolderTensors, GlobalTensorInfo, open_source
from mtrain.hf.schema.table import Table
from mtrain.mcore.model.adapters.fusion import Fusion
from mtrain.mcore.model.layer_spec import global_name
from mtrain.mcore.model.transformer_config import DTYPES
from mtrain.plan import adapters as plan

_MAIN = "optimizer.state.param."
_STACKED_LAYERS, _STACKED_EXPERTS = "decoder.layers.", ".mlp.experts.experts."
_LINEARS = tuple(
    f".{name}.weight" for name in ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", *plan.LATENT_LINEARS)
)
_KEEPS_FLOAT32 = "router.expert_bias"


class MergedTensors:
    """Slices of W + scale B A, in the precision that the run computed in, or in float32."""

    def __init__(self, saved: SavedAdapter, table: Table) -> None:
        """Opens the base and compares it with the one that the adapters were trained beside.

        Raises:
            DataError: It is missing, damaged or another one.
        """
        self.folder = saved.entry.path
        self._saved, self._config = saved, saved.config
        self._base = _opened(saved.config)
        out = torch.float32 if saved.main else DTYPES[saved.config.train.precision]
        self._vocab_size = saved.config.model.vocab_size
        self.tensors = {key: GlobalTensorInfo(self._dtype(key, out), shape) for key, shape in table.shapes.items()}
        """Key -> facts, of the merged model."""
        self._last: tuple[str, Tensor] | None = None
        self._check()

    def read(self, key: str, wanted: TensorSlice) -> Tensor:
        """One slice of a merged tensor."""
        axes = _num_stacked(key)
        result = torch.empty(wanted.shape, dtype=self.tensors[key].dtype)
        for place in _places(wanted, axes):
            whole = self._matrix(key, place)
            part = TensorSlice(wanted.offset[axes:], wanted.shape[axes:]).of(whole)
            result[tuple(index - first for index, first in zip(place, wanted.offset))] = part
        return result

    def _matrix(self, key: str, place: tuple[int, ...]) -> Tensor:
        """One layer's or expert's tensor, merged; the last one is kept, as slices of it are read in a row."""
        name = global_name(key, place)
        if self._last is None or self._last[0] != name:
            self._last = None
            self._last = name, self._merged(name, self._frozen(key, place)).to(self.tensors[key].dtype)
        return self._last[1]

    def _merged(self, name: str, weight: Tensor) -> Tensor:
        pairs = _pairs_of(name, self._config)
        if not pairs:
            return weight
        adapter, wide = self._saved.adapter, weight.float()
        module = name.removesuffix(".weight")
        if pairs == ("experts",):
            down, up = (self._saved.tensor(f"{module}_adapter.{kind}").float() for kind in ("lora_a", "lora_b"))
            return wide + adapter.scale * (up @ down)
        if pairs == ("embedding",):
            down, up = self._pair(module, "embedding")
            return wide + adapter.scale * (down[: len(wide)] @ up.T)
        changes = [self._product(module, part) if part in adapter.parts else None for part in pairs]
        fusion = _fusion(pairs, wide, self._config)
        new = wide + adapter.scale * fusion.joined(changes, 0.0, wide.T).T
        if not adapter.has_magnitudes:
            return new
        norms = new.norm(dim=1)
        ratios = [
            self._saved.tensor(f"{module}_adapter.{part}_magnitude").float() / norm if part in adapter.parts else None
            for part, norm in zip(pairs, fusion.split(norms), strict=True)
        ]
        return new * fusion.joined(ratios, 1.0, norms)[:, None]

    def _product(self, module: str, part: str) -> Tensor:
        """(B A)^T: [inputs, outputs], without rows of the padded vocabulary."""
        down, up = self._pair(module, part)
        return (up[: self._vocab_size] @ down).T if part == "output" else (up @ down).T

    def _pair(self, module: str, part: str) -> tuple[Tensor, Tensor]:
        down, up = (self._saved.tensor(f"{module}_adapter.{part}_{kind}").float() for kind in ("lora_a", "lora_b"))
        return down, up

    def _frozen(self, key: str, place: tuple[int, ...]) -> Tensor:
        """As the run holds it."""
        shape = self.tensors[key].shape[len(place) :]
        wanted = TensorSlice((*place, *[0] * len(shape)), (*[1] * len(place), *shape))
        source = _MAIN + key if _MAIN + key in self._base.tensors else key
        run = self._config.train.precision
        is_narrow = plan.holds_narrow(self._config) and plan.is_matrix(key, len(shape))
        held = self._dtype(key, torch.bfloat16 if is_narrow else DTYPES[run])
        return self._base.read(source, wanted).reshape(shape).to(held)

    @staticmethod
    def _dtype(key: str, wanted: torch.dtype) -> torch.dtype:
        return torch.float32 if key.endswith(_KEEPS_FLOAT32) else wanted

    def _check(self) -> None:
        total = 0
        for key, facts in self.tensors.items():
            axes = _num_stacked(key)
            for place in _places(TensorSlice.whole(facts.shape), axes):
                values = self._frozen(key, place)
                at = TensorSlice.whole(tuple(values.shape))
                total += int(hash_of(global_name(key, place), values, at, values.shape))
        base = self._saved.entry.manifest.base
        assert base is not None, "open_adapter refuses others"
        if shown(total) != base.fingerprint:
            raise DataError(
                f"the frozen model ({base.origin}) is not the one that the adapters of {self.folder} were trained "
                f"beside (fingerprint {shown(total)}, not {base.fingerprint}); restore it"
            )


def _opened(config: Config) -> CheckpointTensors | FolderTensors:
    if config.model.hf is not None:
        return FolderTensors(open_source(Path(config.model.hf)))
    start = config.checkpoint.initialize_from
    if start is None or megatron_folder(Path(start)) is not None:
        origin = "was drawn from train.seed" if start is None else f"is a checkpoint of Megatron-LM ({start})"
        raise DataError(f"the frozen model {origin}, which cannot be merged with; export the adapter with --adapter")
    entry = checkpoint_at(Path(start)).entry
    assert entry is not None, "checkpoint_at raises where there is none"
    verify_files(entry, entry.manifest.files, 1)
    return CheckpointTensors(entry.path)


def _pairs_of(name: str, config: Config) -> tuple[str, ...]:
    """Parts of a tensor of which some have adapters; none where it is as it was."""
    adapter = config.adapter
    assert adapter is not None, "open_adapter refuses others"
    tables = {f"{plan.EMBEDDING}.weight": "embedding", f"{plan.OUTPUT}.weight": "output"}
    if name in tables:
        return (tables[name],) if tables[name] in adapter.parts else ()
    if not name.endswith(_LINEARS):
        return ()
    if ".mlp.experts." in name:
        return ("experts",) if "experts" in adapter.parts else ()
    parts = plan.fused_parts(config.model, name.removesuffix(".weight"))
    return parts if adapter.parts.intersection(parts) else ()


def _fusion(parts: Sequence[str], weight: Tensor, config: Config) -> Fusion:
    if len(parts) != 3:  # queries, keys and values by group
        return Fusion(1, (len(weight) // len(parts),) * len(parts))
    size = config.model.head_size
    return Fusion(config.model.query_groups, (len(weight) // config.model.query_groups - 2 * size, size, size))


def _num_stacked(key: str) -> int:
    """Leading axes of a tensor that number layers and experts."""
    is_layered = key.startswith(_STACKED_LAYERS) and not key.removeprefix(_STACKED_LAYERS)[0].isdigit()
    return is_layered + (_STACKED_EXPERTS in key)


def _places(wanted: TensorSlice, axes: int) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()]
    for first, size in list(zip(wanted.offset, wanted.shape))[:axes]:
        found = [(*place, index) for place in found for index in range(first, first + size)]
    return found
