"""What the certificates of `mtrain verify backend` say about the layers of a run on this machine."""

import functools
import importlib.metadata
import platform
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from mtrain.base.certificate import NVIDIA_DRIVER, Certificate, Comparison, certificate_folder, certificates
from mtrain.base.environment import program_versions
from mtrain.base.errors import MachineError
from mtrain.config.schema.sections import Sections

_OTHER_PACKAGES = (
    *("transformer-engine-torch", "flash-attn", "fla-core", "flash-linear-attention", "flash-qla", "tilelang"),
    *("apex", "triton"),
)
_IRRELEVANT_PACKAGES = ("python", "numpy")
"""Packages in `program_versions` that no layer uses."""
_UNREAD_KEYS = {
    *("hf", "num_layers", "vocab_size", "vocab_multiple", "tied_embeddings", "scale_embeddings", "num_labels"),
    *("mtp_depths", "init_std", "backend"),
}
"""Keys of `model.*` that no layer reads."""


class Finding(NamedTuple):
    """What the certificates say about one candidate."""

    comparison: Comparison | None
    """Comparison of these layers on this machine, if a certificate has one."""
    certificate: str
    """File name of the certificate, or of the one from the most similar machine; "" if none exists."""
    differs: str
    """Differences between that machine and this one; "" if they are equal."""


def finding(config: Sections, device: torch.device, candidate: str) -> Finding:
    """Looks up a candidate in the certificates of this user."""
    layers = layers_of(config)
    try:
        matching = [certificate for certificate in certificates(certificate_folder()) if certificate.layers == layers]
    except MachineError:  # no home folder, hence no certificates
        matching = []
    here = machine_of(device) if matching else {}
    for certificate in matching:
        if certificate.machine == here and candidate in certificate.candidates:
            return Finding(certificate.candidates[candidate], certificate.name, "")
    other_machines = [(_differences(other, here), other.name) for other in matching if other.machine != here]
    if not other_machines:
        return Finding(None, "", "")
    differences, name = min(other_machines, key=lambda other: (len(other[0]), other[1]))
    return Finding(None, name, ", ".join(differences))


def _differences(certificate: Certificate, here: Mapping[str, str]) -> list[str]:
    names = sorted(certificate.machine.keys() | here.keys())
    return [
        f"{name} {certificate.machine.get(name, 'none')} and not {here.get(name, 'none')}"
        for name in names
        if certificate.machine.get(name) != here.get(name)
    ]


def candidate_of(config: Sections) -> str:
    """Returns the candidate whose comparison decides which layers a run uses; TransformerEngine has no delta nets."""
    if config.model.delta_net is not None:
        return "fla"
    return "te-experts" if config.model.has_transformer_engine_experts else "te"


def layers_of(config: Sections) -> dict[str, Any]:
    """Returns the part of a configuration on which single layers depend, as JSON, without the candidate.

    Tensor, expert and pipeline parallelism divide the same layers; context parallelism changes their attention.
    """
    model = config.model.model_dump(mode="json", exclude=_UNREAD_KEYS)
    if config.model.has_transformer_engine_experts:
        model["experts"]["implementation"] = "auto"  # the key selects a candidate for the same layers
    adapter = None if config.adapter is None else config.adapter.model_dump(mode="json", exclude={"path"})
    own_fp8 = {"backend": "torch"} if config.has_own_fp8 else {}
    return own_fp8 | {
        "model": model,
        "adapter": adapter,
        "precision": config.train.precision,
        "fp8": config.train.fp8,
        "fp8_recipe": config.train.fp8_recipe,
        "isolate_documents": config.data.isolate_documents,
        "cp": config.layout.cp,
        "cp_comm": config.layout.cp_comm if config.layout.cp > 1 else None,
    }


def machine_of(device: torch.device) -> dict[str, str]:
    """Returns the GPU, the driver, and all versions that can change the results or the speed of a layer."""
    return dict(_machine(device.type, device.index or 0))


@functools.cache
def _machine(kind: str, index: int) -> Mapping[str, str]:
    versions = {name: version for name, version in program_versions().items() if name not in _IRRELEVANT_PACKAGES}
    for name in _OTHER_PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    if kind != "cuda":
        return versions | {"gpu": f"none, {platform.machine()}"}
    return versions | {
        "gpu": torch.cuda.get_device_name(index),
        "driver": _driver_version(),
        "cuda": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]
    }


def _driver_version() -> str:
    with suppress(OSError):
        if (match := re.search(r"Module\s+([\d.]+)", NVIDIA_DRIVER.read_text())) is not None:
            return match[1]
    return "unknown"
