"""Merging of adapters into the matrices that they belong to: W + scale B A, one matrix of the model at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from mtrain.base.errors import ConfigError
from mtrain.config import Config
from mtrain.config.adapters import has_merged_form
from mtrain.config.schema.adapter import AdapterSection
from mtrain.config.schema.model import ModelSection
from mtrain.mcore.model.adapters.adapter import LORA_A, LORA_B, MAGNITUDE
from mtrain.mcore.model.adapters.linear import Fusion
from mtrain.plan import adapters as plan
from mtrain.plan.features import segments
from mtrain.plan.features.adapted import EMBEDDING

TensorOf = Callable[[str], Tensor]
"""Function that returns an adapter's whole parameter by its global name, with layers and experts spelled out."""


@dataclass(frozen=True)
class Merging:
    """Rule by which a run's adapters change each matrix."""

    config: Config
    """Configuration of the run."""
    adapter: AdapterSection

    def __post_init__(self) -> None:
        """
        Raises:
            ConfigError: The merged model cannot be expressed.
        """
        if not has_merged_form(self.config.model, self.adapter):
            raise ConfigError(
                "adapter.targets=embedding cannot be merged: with model.tied_embeddings=true the output layer has the "
                "same table, which stays as it was; export the adapter alone (mtrain convert export --adapter)"
            )

    def sources(self, name: str) -> list[str]:
        """Returns the names of the adapter's parameters that change a matrix; empty where it stays unchanged.

        Args:
            name: Global name of the matrix, with layers and experts spelled out; also in the other methods.
        """
        module, kinds = _module(name), [LORA_A, LORA_B, *([MAGNITUDE] if self.adapter.has_magnitudes else [])]
        parts = self._parts_of(name)
        if parts == ("experts",):
            return [f"{module}.{kind}" for kind in kinds]
        return [f"{module}.{part}_{kind}" for part in parts if part in self.adapter.parts for kind in kinds]

    def merged(self, name: str, weight: Tensor, tensor_of: TensorOf) -> Tensor:
        """Returns a matrix with its adapters added, in float32; unchanged where it has none.

        Args:
            name: Global name of the matrix.
            weight: Frozen matrix, without rows that only pad the vocabulary.
            tensor_of: Function that returns the parameters that `sources` names; tables include padding.
        """
        parts = self._parts_of(name)
        if not parts:
            return weight
        adapter, wide, module = self.adapter, weight.float(), _module(name)
        if parts == ("experts",):
            down, up = (tensor_of(f"{module}.{kind}").float() for kind in (LORA_A, LORA_B))
            return wide + adapter.scale * (up @ down)
        if parts == ("embedding",):
            down, up = _pair(module, "embedding", tensor_of)
            return wide + adapter.scale * (down[: len(wide)] @ up.T)
        changes = [self._product(module, part, tensor_of) if part in adapter.parts else None for part in parts]
        fusion = _fusion(name, parts, wide, self.config.model)
        new = wide + adapter.scale * fusion.joined(changes, 0.0, wide.T).T
        if not adapter.has_magnitudes:
            return new
        norms = new.norm(dim=1)
        ratios = [
            tensor_of(f"{module}.{part}_{MAGNITUDE}").float() / norm if part in adapter.parts else None
            for part, norm in zip(parts, fusion.split(norms), strict=True)
        ]
        return new * fusion.joined(ratios, 1.0, norms)[:, None]

    def _product(self, module: str, part: str, tensor_of: TensorOf) -> Tensor:
        """Computes (B A)^T, [inputs, outputs], without rows that only pad the vocabulary."""
        down, up = _pair(module, part, tensor_of)
        return (up[: self.config.model.vocab_size] @ down).T if part == "output" else (up @ down).T

    def _parts_of(self, name: str) -> tuple[str, ...]:
        """Returns the parts of a tensor if one of them has an adapter; empty where the tensor stays unchanged."""
        own = self.adapter.parts
        tables = {f"{EMBEDDING}.weight": "embedding", f"{plan.OUTPUT}.weight": "output"}
        if name in tables:
            return (tables[name],) if tables[name] in own else ()
        if not name.endswith(".weight") or name.startswith("mtp."):  # depths of multi-token prediction stay frozen
            return ()
        if ".mlp.experts." in name:
            return ("experts",) if "experts" in own else ()
        parts = plan.fused_parts(self.config.model, name.removesuffix(".weight"))
        return parts if own.intersection(parts) else ()


def _module(name: str) -> str:
    """Returns the name of the adapter module that belongs to a matrix."""
    return f"{name.removesuffix('.weight')}_adapter"


def _pair(module: str, part: str, tensor_of: TensorOf) -> tuple[Tensor, Tensor]:
    down, up = (tensor_of(f"{module}.{part}_{kind}").float() for kind in (LORA_A, LORA_B))
    return down, up


def _fusion(name: str, parts: Sequence[str], weight: Tensor, model: ModelSection) -> Fusion:
    sizes = segments(model, name.split(".")[-2], len(weight)) if len(parts) > 1 else (len(weight),)
    return Fusion(len(weight) // sum(sizes), sizes)
