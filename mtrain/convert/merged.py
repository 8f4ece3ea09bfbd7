"""Merges adapters into their frozen base: W + scale B A, computed matrix by matrix on access."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mtrain.arch import adapters as plan
from mtrain.arch.features.feature import EMBEDDING
from mtrain.arch.features.outside import KEY
from mtrain.base.errors import ConfigError, DataError
from mtrain.base.tensor_slice import TensorSlice
from mtrain.checkpoint.format.fingerprint import hash_of, shown
from mtrain.checkpoint.format.reader import CheckpointTensors
from mtrain.checkpoint.state.start_weights import STACKED_EXPERTS, STACKED_LAYERS
from mtrain.checkpoint.store.directory import checkpoint_at, verify_files
from mtrain.checkpoint.store.megatron_checkpoint import megatron_folder
from mtrain.config import Config
from mtrain.config.adapters import has_merged_form
from mtrain.config.schema.adapter import AdapterSection
from mtrain.convert.adapters import SavedAdapter, main_key
from mtrain.core.layers.adapters.adapter import LORA_A, LORA_B, MAGNITUDE
from mtrain.core.layers.adapters.linear import Fusion
from mtrain.core.layers.layer_spec import global_name, spelled_name
from mtrain.core.layers.transformer_config import DTYPES
from mtrain.hf.io.source import FolderTensors, GlobalTensorInfo, source_for
from mtrain.hf.schema.table import Table

TensorOf = Callable[[str], Tensor]
"""Maps a global name, with the numbers of layer and expert, to an adapter's whole parameter."""


@dataclass(frozen=True)
class Merging:
    """Computes how a run's adapters change each matrix."""

    config: Config
    adapter: AdapterSection

    def __post_init__(self) -> None:
        if not has_merged_form(self.config.model, self.adapter):
            raise ConfigError(
                "adapter.targets=embedding cannot be merged: with model.tied_embeddings=true the output layer uses the "
                "same table, without the adapter; export the adapter alone (mtrain convert export --adapter)"
            )

    def sources(self, name: str) -> list[str]:
        """Returns the adapter parameters that change a matrix; its name has the numbers of layer and expert."""
        module, kinds = _module(name), [LORA_A, LORA_B, *([MAGNITUDE] if self.adapter.has_magnitudes else [])]
        parts = self._parts_of(name)
        if parts == ("experts",):
            return [f"{module}.{kind}" for kind in kinds]
        return [f"{module}.{part}_{kind}" for part in parts if part in self.adapter.parts for kind in kinds]

    def merged(self, name: str, weight: Tensor, tensor_of: TensorOf) -> Tensor:
        """Returns a matrix with its adapters added, in float32, or as it is without any. `tensor_of` returns tables
        with padding."""
        parts = self._parts_of(name)
        if not parts:
            return weight
        adapter, wide, module = self.adapter, weight.float(), _module(name)
        if parts == ("experts",):
            down, up = (tensor_of(f"{module}.{kind}").float() for kind in (LORA_A, LORA_B))
            return wide + adapter.scale_of("experts") * (up @ down)
        if parts == ("embedding",):
            down, up = _pair(module, "embedding", tensor_of)
            return wide + adapter.scale_of("embedding") * (down[: len(wide)] @ up.T)
        changes = [self._product(module, part, tensor_of) if part in adapter.parts else None for part in parts]
        sizes = plan.fused_rows(self.config.model, adapter, name.removesuffix(".weight"), len(wide))
        fusion = Fusion(len(wide) // sum(sizes), sizes)
        new = wide + fusion.joined(changes, 0.0, wide.T).T
        if not adapter.has_magnitudes:
            return new
        norms = new.norm(dim=1)
        ratios = [
            tensor_of(f"{module}.{part}_{MAGNITUDE}").float() / norm if part in adapter.parts else None
            for part, norm in zip(parts, fusion.split(norms), strict=True)
        ]
        return new * fusion.joined(ratios, 1.0, norms)[:, None]

    def _product(self, module: str, part: str, tensor_of: TensorOf) -> Tensor:
        """Computes scale (B A)^T, [inputs, outputs], without vocabulary padding."""
        down, up = _pair(module, part, tensor_of)
        product = up[: self.config.model.vocab_size] @ down if part == "output" else up @ down
        return self.adapter.scale_of(part) * product.T

    def _parts_of(self, name: str) -> tuple[str, ...]:
        """Returns the parts of a tensor if any of them has an adapter; empty if none has."""
        adapted = self.adapter.parts
        tables = {f"{EMBEDDING}.weight": "embedding", f"{plan.OUTPUT}.weight": "output"}
        if name in tables:
            return (tables[name],) if tables[name] in adapted else ()
        if not name.endswith(".weight") or name.startswith(_UNADAPTED):
            return ()
        if ".mlp.experts." in name:
            return ("experts",) if "experts" in adapted else ()
        parts = plan.fused_parts(self.config.model, self.adapter, name.removesuffix(".weight"))
        return parts if adapted.intersection(parts) else ()


def _module(name: str) -> str:
    return f"{name.removesuffix('.weight')}_adapter"


def _pair(module: str, part: str, tensor_of: TensorOf) -> tuple[Tensor, Tensor]:
    down, up = (tensor_of(f"{module}.{part}_{kind}").float() for kind in (LORA_A, LORA_B))
    return down, up


_UNADAPTED = ("mtp.", KEY)
"""Prefixes of names of MTP depths and the vision tower, which have no adapters."""
_KEEPS_FLOAT32 = "router.expert_bias"


class MergedTensors:
    """The merged model's tensors, in the run's precision or in float32."""

    def __init__(self, saved: SavedAdapter, table: Table) -> None:
        """Opens the base, and compares its fingerprint with that of the model that the adapters were trained on."""
        self.folder = saved.entry.path
        self._saved, self._config = saved, saved.config
        self._merging = Merging(saved.config, saved.adapter)
        self._base = _opened(saved.config)
        out = torch.float32 if saved.main else DTYPES[saved.config.train.precision]
        self.tensors = {key: GlobalTensorInfo(dtype_outside(key, out), shape) for key, shape in table.shapes.items()}
        """Key -> facts of each tensor of the merged model."""
        self._last: tuple[str, Tensor] | None = None
        self._check()

    def read(self, key: str, region: TensorSlice) -> Tensor:
        return slice_of(key, region, self.tensors[key].dtype, lambda index: self._matrix(key, index))

    def _matrix(self, key: str, index: tuple[int, ...]) -> Tensor:
        """Returns one layer's or expert's merged tensor; caches the last one, whose slices are read in a row."""
        name = global_name(key, index)
        if self._is_whole(name):
            return self._saved.tensor(spelled_name(key, index)).to(self.tensors[key].dtype)
        if self._last is None or self._last[0] != name:
            self._last = None
            merged = self._merging.merged(name, self._frozen(key, index), self._saved.tensor)
            self._last = name, merged.to(self.tensors[key].dtype)
        return self._last[1]

    def _is_whole(self, name: str) -> bool:
        return plan.is_learned_whole(self._config.model, self._saved.adapter, name)

    def _frozen(self, key: str, index: tuple[int, ...]) -> Tensor:
        """Reads the frozen tensor, in the dtype in which the run keeps it in memory."""
        shape = self.tensors[key].shape[len(index) :]
        region = TensorSlice((*index, *[0] * len(shape)), (*[1] * len(index), *shape))
        run = self._config.train.precision
        is_narrow = plan.holds_narrow(self._config.adapter, run) and plan.is_matrix(key, len(shape))
        dtype = dtype_outside(key, torch.bfloat16 if is_narrow else DTYPES[run])
        return self._base.read(main_key(self._base.tensors, key), region).reshape(shape).to(dtype)

    def _check(self) -> None:
        total = 0
        for key, facts in self.tensors.items():
            if self._is_whole(key):  # trained, and maybe missing from the base
                continue
            for index in stacked_places(key, TensorSlice.whole(facts.shape)):
                values = self._frozen(key, index)
                at = TensorSlice.whole(tuple(values.shape))
                total += int(hash_of(global_name(key, index), values, at, values.shape))
        base = self._saved.entry.manifest.base
        assert base is not None, "open_adapter refuses a whole model"
        if shown(total) != base.fingerprint:
            raise DataError(
                f"the frozen model ({base.origin}) is not the one that the adapters of {self.folder} were trained "
                f"on (fingerprint {shown(total)}, not {base.fingerprint}); restore it"
            )


def _opened(config: Config) -> CheckpointTensors | FolderTensors:
    if config.model.hf is not None:
        return FolderTensors(source_for(Path(config.model.hf), config.model))
    start = config.checkpoint.initialize_from
    if start is None or megatron_folder(Path(start)) is not None:
        origin = "was drawn from train.seed" if start is None else f"is a checkpoint of Megatron-LM ({start})"
        raise DataError(f"the frozen model {origin}, so adapters cannot be merged into it; export them with --adapter")
    entry = checkpoint_at(Path(start)).entry
    assert entry is not None, "checkpoint_at raises without one"
    verify_files(entry, entry.manifest.files, 1)
    return CheckpointTensors(entry.path)


def dtype_outside(key: str, precision: torch.dtype) -> torch.dtype:
    """Returns the dtype of a tensor in a model of this precision; router biases stay in float32."""
    return torch.float32 if key.endswith(_KEEPS_FLOAT32) else precision


def slice_of(key: str, region: TensorSlice, dtype: torch.dtype, matrix: Callable[[tuple[int, ...]], Tensor]) -> Tensor:
    """Assembles a slice of a global tensor from `matrix`, which returns the tensor of one layer and expert."""
    axes = _num_stacked(key)
    inner = TensorSlice(region.offset[axes:], region.shape[axes:])
    result: Tensor | None = None
    for position in stacked_places(key, region):
        part = inner.of(matrix(position))
        if result is None:
            result = part.new_empty(region.shape, dtype=dtype)
        result[tuple(index - first for index, first in zip(position, region.offset))] = part
    assert result is not None, key
    return result


def stacked_places(key: str, region: TensorSlice) -> list[tuple[int, ...]]:
    """Returns the layer and expert numbers of each tensor in a slice of a global tensor, if the key stacks them."""
    positions: list[tuple[int, ...]] = [()]
    for first, size in list(zip(region.offset, region.shape))[: _num_stacked(key)]:
        positions = [(*position, index) for position in positions for index in range(first, first + size)]
    return positions


def _num_stacked(key: str) -> int:
    """Counts a tensor's leading axes of layers and experts."""
    return sum(pattern.search(key) is not None for pattern in (STACKED_LAYERS, STACKED_EXPERTS))
