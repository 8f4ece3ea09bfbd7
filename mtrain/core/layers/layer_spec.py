"""Layer specs, which name the modules of megatron-core's transformer, and the choice between libraries of layers."""

import dataclasses
from typing import NamedTuple, assert_never

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.transformer import ModuleSpec
from megatron.core.transformer.transformer_block import LayerNormImpl, TransformerBlockSubmodules

from mtrain.arch.features import FEATURES
from mtrain.base.certificate import Comparison
from mtrain.base.errors import ConfigError
from mtrain.base.imports import faulty_gpu_packages, release_beyond_bounds
from mtrain.config.known_issues import beyond_transformer_engine
from mtrain.config.schema.model import ModelSection
from mtrain.config.schema.sections import Sections
from mtrain.core.layers.attention import flash_linear_attention
from mtrain.core.layers.certified import Finding, candidate_of, finding
from mtrain.core.layers.layer_parts import (
    FUSED_NAMES,
    LATENT_NORM_NAMES,
    Backend,
    latent_attention_spec,
    layer_spec,
)
from mtrain.core.layers.moe.layer import experts_spec
from mtrain.core.layers.norm import Norm

_STACKED_EXPERTS = "mlp.experts.experts."
"""Part of the keys of tensors that stack all experts along an axis."""


def global_name(key: str, indices: tuple[int, ...]) -> str:
    """Returns the name of a parameter in the whole model, the same for every layout and backend.

    Args:
        key: Checkpoint key, with TransformerEngine's names and layers stacked (no number) or spelled out.
        indices: Indices along the stacked axes: the layer, then the expert.
    """
    return spelled_name(canonical_name(key), indices)


def spelled_name(key: str, indices: tuple[int, ...]) -> str:
    """Returns a checkpoint key with the numbers of layer and expert; `global_name` also renames norms."""
    if _STACKED_EXPERTS in key:
        # experts are the last stacked axis, and the only one if the layer is spelled out
        key, indices = key.replace(_STACKED_EXPERTS, f"mlp.experts.{indices[-1]}."), indices[:-1]
    return key.replace(".layers.", f".layers.{indices[0]}.", 1) if indices else key


def canonical_name(key: str) -> str:
    """Returns a checkpoint key with norms named like the modules of our layers."""
    for ours, theirs in FUSED_NAMES.items():
        key = key.replace(theirs, ours)
    return key


def has_transformer_engine() -> bool:
    """Says whether TransformerEngine can be imported, by megatron-core's check."""
    from megatron.core.models.gpt import gpt_layer_specs

    return bool(gpt_layer_specs.HAVE_TE)


class Choice(NamedTuple):
    """The layers that a run uses."""

    backend: Backend
    certificate: str = ""
    """Name of the certificate that decided, or ""."""
    note: str = ""
    """Note for the output of the run on what a certificate decided, or why none did; may be ""."""


def absent(device: torch.device) -> list[str]:
    """Returns the reasons why this machine cannot use TransformerEngine's layers under any configuration."""
    fault = faulty_gpu_packages().get("transformer_engine")
    reasons = {
        "there is no GPU": device.type != "cuda",
        f"transformer_engine cannot be used ({fault or 'it is not installed'})": not has_transformer_engine(),
    }
    return [reason for reason, holds in reasons.items() if holds]


def unbuildable(config: Sections) -> list[str]:
    """Returns the reasons why a configuration cannot use TransformerEngine's layers on any machine.

    TransformerEngine fuses norms into the following projections, whose inputs adapters need, and under context
    parallelism it cuts every document, while we cut rows.
    """
    documents = "documents in rows (data.isolate_documents, data.packing) need torch layers"
    is_in_8_bits = config.train.fp8 is not None and config.model.experts is not None
    reasons = {
        f"{documents} under layout.cp={config.layout.cp}": config.data.isolate_documents and config.layout.cp > 1,
        "adapter needs the torch backend": config.adapter is not None,
        "model.experts needs model.experts.implementation=te under train.fp8": (
            is_in_8_bits and not config.model.has_transformer_engine_experts
        ),
        "eval.prompts need torch layers, which generate": config.eval.has_prompts,
        "train.fp8 with model.backend=torch is of our own layers": config.has_own_fp8,
    }
    unmet = [reason for reason, holds in reasons.items() if holds]
    ours = (feature.needs_torch_layers(config.model) for feature in FEATURES)
    unmet += [f"{keys} needs the torch backend" for keys in ours if keys is not None]
    return [*unmet, *beyond_transformer_engine(config)]


def uncertified(config: Sections) -> list[str]:
    """Returns the reasons why a run needs a certificate to use TransformerEngine's layers."""
    beyond = release_beyond_bounds()
    reasons = {
        f"transformer_engine cannot be used ({beyond})": beyond is not None,
        "documents in rows (data.isolate_documents, data.packing) need torch layers without a certificate": (
            config.data.isolate_documents
        ),
    }
    unmet = [reason for reason, holds in reasons.items() if holds]
    keys = (feature.needs_certificate(config.model) for feature in FEATURES)
    return [*unmet, *(f"{key} needs the torch backend without a certificate" for key in keys if key is not None)]


def choose(config: Sections, device: torch.device) -> Choice:
    """Resolves `model.backend` on this rank.

    `auto` means te if it can be built and needs no certificate, or if a certificate says that it is correct and faster
    here. For delta nets, which te lacks, `auto` means fla if a certificate says that it is correct and faster.

    Raises:
        ConfigError: The run needs TransformerEngine's layers, but they are not usable.
    """
    choice = _modules_of(config, device)
    is_open = config.model.backend == "auto" and choice.backend == "torch" and config.model.delta_net is not None
    return choice if not is_open or flash_linear_attention.lacking(device) else _delta_rule_of(config, device)


def _delta_rule_of(config: Sections, device: torch.device) -> Choice:
    """Chooses between our delta rule and that of flash-linear-attention."""
    unmet = flash_linear_attention.unable(config)
    certified = Finding(None, "", "") if unmet else finding(config, device, candidate_of(config))
    if certified.comparison is None:
        needed = unmet or ["flash-linear-attention's delta rule needs a certificate"]
        return Choice("torch", note=_without_certificate(certified, needed, "torch", not unmet, _DELTA_RULE))
    chosen: Backend = "fla" if certified.comparison.passed and certified.comparison.is_faster else "torch"
    return Choice(
        chosen,
        certified.certificate,
        _with_certificate(certified.comparison, certified.certificate, chosen, _DELTA_RULE),
    )


def _modules_of(config: Sections, device: torch.device) -> Choice:
    """Chooses between TransformerEngine's modules and ours; see `choose`."""
    backend = config.model.backend
    if backend == "torch":
        return _own_fp8_of(config, device) if config.has_own_fp8 else Choice("torch")
    lacking, open_reasons, required_key = absent(device), uncertified(config), only_by_transformer_engine(config)
    unmet = lacking + unbuildable(config)
    certified = Finding(None, "", "") if unmet else finding(config, device, candidate_of(config))
    is_wrong = certified.comparison is not None and not certified.comparison.passed
    if certified.comparison is None:
        unmet += open_reasons
    elif is_wrong:
        unmet.append(f"transformer_engine failed `mtrain verify backend` ({certified.certificate})")
    match backend:
        case "te":
            if unmet:
                raise ConfigError(f"model.backend=te cannot be used: {'; '.join(unmet)}; use model.backend=auto")
            return Choice("te", certified.certificate if open_reasons else "")
        case "auto":
            if unmet and required_key:
                raise ConfigError(
                    f"{required_key} needs TransformerEngine's layers, which cannot be used: {'; '.join(unmet)}; "
                    f"remove {required_key.split('=')[0]}"
                )
            if certified.comparison is None:
                chosen: Backend = "torch" if unmet else "te"
                return Choice(
                    chosen,
                    note="" if lacking else _without_certificate(certified, unmet, chosen, unmet == open_reasons),
                )
            chosen = "te" if not unmet and (certified.comparison.is_faster or required_key) else "torch"
            return Choice(
                chosen, certified.certificate, _with_certificate(certified.comparison, certified.certificate, chosen)
            )
        case _:
            assert_never(backend)


def _own_fp8_of(config: Sections, device: torch.device) -> Choice:
    """Refuses fp8 in our own layers where a certificate says that it is wrong."""
    found, key = finding(config, device, "fp8"), f"train.fp8={config.train.fp8}"
    if found.comparison is None:
        note = f"{key} multiplies without a certificate of this machine; `mtrain verify backend` makes one"
        return Choice("torch", note="" if device.type == "cpu" else note)
    if not found.comparison.passed:
        raise ConfigError(f"{key} failed `mtrain verify backend` ({found.certificate}); remove train.fp8")
    return Choice("torch", found.certificate)


def only_by_transformer_engine(config: Sections) -> str:
    """Returns a configured key, with its value, that only TransformerEngine's layers support; "" if none is set."""
    if config.train.fp8 is not None and not config.has_own_fp8:
        return f"train.fp8={config.train.fp8}"
    return "model.experts.implementation=te" if config.model.has_transformer_engine_experts else ""


_LAYERS = {
    "te": "TransformerEngine's layers",
    "torch": "torch layers",
    "fla": "torch layers with flash-linear-attention's delta rule",
}
_DELTA_RULE = "flash-linear-attention"


def _with_certificate(comparison: Comparison, name: str, chosen: Backend, library: str = "TransformerEngine") -> str:
    """Returns a note on the decision of a certificate."""
    times = f"{comparison.ms:.3g} ms a pass, torch layers {comparison.own_ms:.3g} ms"
    verdict = times if comparison.passed else "its results are wrong"
    return f"model.backend=auto takes {_LAYERS[chosen]} by the certificate {name} of {library} ({verdict})"


def _without_certificate(
    certified: Finding, unmet: list[str], chosen: Backend, is_openable: bool, library: str = "TransformerEngine"
) -> str:
    """Returns a note on why no certificate decided; "" if the library's layers are usable without one.

    Args:
        unmet: Reasons why the library's layers are not usable.
        is_openable: Whether a certificate would remove these reasons.
    """
    if certified.certificate:
        return (
            f"model.backend=auto takes {_LAYERS[chosen]} without the certificate {certified.certificate}, which is of "
            f"{certified.differs}; `mtrain verify backend` measures this machine"
        )
    if not unmet:
        return ""
    measure = f"; `mtrain verify backend` says whether this machine can take {library}'s" if is_openable else ""
    return f"model.backend=auto takes torch layers: {'; '.join(unmet)}{measure}"


def chosen_backend(config: Sections, device: torch.device) -> Backend:
    """Returns the backend that `choose` chooses."""
    return choose(config, device).backend


def block_spec(model: ModelSection, backend: Backend, layers: range) -> TransformerBlockSubmodules:
    """Builds the spec of a stage's transformer block; `layers` are numbers in the whole model, from 0."""
    match backend:
        case "te":
            layer_specs = [transformer_engine_layer(model, layer) for layer in layers]
            return TransformerBlockSubmodules(layer_specs=layer_specs, layer_norm=LayerNormImpl)
        case "torch" | "fla":
            layer_specs = [layer_spec(model, layer) for layer in layers]
            return TransformerBlockSubmodules(layer_specs=layer_specs, layer_norm=Norm)
        case _:
            assert_never(backend)


def transformer_engine_layer(model: ModelSection, layer: int) -> ModuleSpec:
    """Builds the spec of layer `layer`, counted from 0, with TransformerEngine's modules.

    Router, dispatcher, and the norms before experts and before latent attention are ours.
    """
    from mtrain.core.layers.transformer_engine import (
        DocumentAttention,  # imports TransformerEngine
        TransformerEngineLatentAttention,
    )

    spec: ModuleSpec = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=model.qk_norm)
    modules = spec.submodules
    if model.attention(layer) == "latent":
        latent = latent_attention_spec(model, TransformerEngineLatentAttention)
        names = {"sharded_state_dict_keys_map": dict(LATENT_NORM_NAMES)}
        modules = dataclasses.replace(modules, input_layernorm=Norm, self_attention=latent, **names)
    else:
        modules.self_attention.submodules.core_attention = DocumentAttention
    if model.has_experts(layer):
        assert model.experts is not None
        modules = dataclasses.replace(modules, pre_mlp_layernorm=Norm, mlp=experts_spec(model.experts))
    return dataclasses.replace(spec, submodules=modules)
