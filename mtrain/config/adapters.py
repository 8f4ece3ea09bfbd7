"""Rules between adapters and other sections, and the targets that all-linear stands for."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from mtrain.config.schema.adapter import ALL_LINEAR, DELTA_NET_PARTS, GROUPS, JOINED, AdapterSection
from mtrain.config.schema.model import RECURRENT, ModelSection
from mtrain.config.schema.sections import Sections

_ATTENTION = frozenset((*GROUPS["qkv"], "qkv_proj"))
_RECURRENT = frozenset().union(*(kind.projections for kind in RECURRENT.values()))
_FEED_FORWARD = {*GROUPS["fc1"], "fc2", "gate_up_proj"}
_GATED = {"gate_proj", "gate_up_proj"}


def all_linear_in(content: Any) -> list[Any] | None:
    """Returns the other targets next to all-linear in `adapter.targets`; None without all-linear.

    Args:
        content: Sections by name, not validated yet.
    """
    adapter = content.get("adapter") if isinstance(content, Mapping) else None
    if not isinstance(adapter, Mapping):
        return None
    targets = adapter.get("targets", ALL_LINEAR)
    named = [targets] if isinstance(targets, str) else targets
    if not isinstance(named, list | tuple) or ALL_LINEAR not in named:
        return None
    return [target for target in named if target != ALL_LINEAR]


def with_linear_targets(content: Any) -> Any:
    """Replaces all-linear with the targets of the model.

    Args:
        content: Sections by name, not validated yet.
    """
    other_targets = all_linear_in(content)
    if other_targets is None:
        return content
    try:
        model = ModelSection.model_validate(content.get("model"))
    except ValidationError:  # Config reports it together with all other errors
        return content
    return {
        **content,
        "adapter": {**content["adapter"], "targets": [*_linear_targets(model, other_targets), *other_targets]},
    }


def _linear_targets(model: ModelSection, named: Collection[Any]) -> Iterator[str]:
    """Yields the targets that PEFT counts as linear layers, without parts that a target in `named` joins."""
    kinds = {model.attention(layer) for layer in range(model.num_layers)}
    targets = ["qkv", "proj"] if kinds - {*RECURRENT, "none"} else []
    targets += ["in_proj"] if kinds & RECURRENT.keys() else []
    # PEFT refuses out_proj of Mamba-2, whose kernels read the weight
    targets += ["out_proj"] if kinds & RECURRENT.keys() - {"mamba"} else []
    targets += ["fc1", "fc2"] if _has_networks(model) else []
    joined = {part for target, parts in JOINED.items() if target in named for part in parts}
    for target in targets:
        parts = GROUPS.get(target, (target,))
        if joined.isdisjoint(parts):
            yield target
        else:
            yield from (part for part in DELTA_NET_PARTS if part in parts and part not in joined)


def notes(config: Sections) -> list[str]:
    """Returns a note on the modules that all-linear omits, if any."""
    model, adapter = config.model, config.adapter
    if adapter is None or "targets" in adapter.model_fields_set:
        return []
    omitted = []
    if model.mamba is not None and "out_proj" not in adapter.parts:
        omitted.append("out_proj of Mamba-2, which PEFT refuses (name it as well, and export merged)")
    if model.experts is not None:
        unnamed = "routers and the gate of shared experts" if model.experts.shared_gate else "routers"
        if "experts" not in adapter.parts:
            omitted.append("routed experts (name experts as well)")
        omitted.append(f"{unnamed}, which have no target")
    if not omitted:
        return []
    return [f"adapter.targets=all-linear means {', '.join(adapter.targets)} here, and leaves out {'; '.join(omitted)}"]


def broken_rules(config: Sections, adapter: AdapterSection) -> Iterator[str]:
    """Yields a message for every broken rule between `adapter` and other sections."""
    yield from _targets(config.model, adapter)
    yield from _full_training(config.model, adapter)
    yield from _run(config, adapter)


def _targets(model: ModelSection, adapter: AdapterSection) -> Iterator[str]:
    available = set(model.query_projections)
    if available.issuperset(JOINED["qkv_proj"]):
        available.add("qkv_proj")
    if missing := [target for target in adapter.targets if target in _ATTENTION - available]:
        yield (
            f"adapter.targets={', '.join(missing)}: the attention of this model has no such projection; name "
            f"{', '.join(sorted(model.query_projections))}, or qkv for all of them"
        )
    if adapter.dropout > 0 and "kv_b_proj" in adapter.parts & model.query_projections:
        yield (
            f"adapter.dropout={adapter.dropout} does not work with kv_b_proj (a part of qkv), whose matrix multiplies "
            "latents after the context-parallel exchange; set it to 0, or name the other projections"
        )
    recurrent = frozenset().union(*(section.projections for section in model.recurrent))
    if missing := [target for target in adapter.targets if target in _RECURRENT - recurrent]:
        owners = (key for key, kind in RECURRENT.items() if kind.projections.issuperset(missing))
        needed = next(owners, " and model.".join(RECURRENT))
        yield f"adapter.targets={', '.join(missing)} needs model.{needed}; remove it"
    if not model.is_gated and (missing := [target for target in adapter.targets if target in _GATED]):
        yield (
            f"adapter.targets={', '.join(missing)} needs a gate, but model.activation={model.activation} has none; "
            "remove it"
        )
    if "experts" in adapter.parts and model.experts is None:
        yield "adapter.targets=experts needs model.experts; remove it"
    if adapter.parts & _FEED_FORWARD and not _has_networks(model):
        yield (
            f"adapter.targets={_named_targets(adapter, 'fc1', 'fc2')}: the model has neither dense layers nor shared "
            "experts; name experts, or remove it"
        )
    if model.output.is_new and "output" in adapter.parts:
        yield (
            f"adapter.targets=output: the head of {model.output} replaces the output layer, and is trained in full; "
            "remove it"
        )
    elif model.tied_embeddings and "output" in adapter.parts:
        yield (
            "adapter.targets=output: with model.tied_embeddings=true the output layer has no separate table; remove "
            "it, or name embedding, which leaves the output layer on the frozen table, as in PEFT"
        )


def _full_training(model: ModelSection, adapter: AdapterSection) -> Iterator[str]:
    saved = adapter.modules_to_save
    if "head" in saved and not model.output.is_new:
        yield "adapter.modules_to_save=head needs model.num_labels; set it, or remove head"
    if "output" not in saved:
        return
    if model.output.is_new:
        yield (
            f"adapter.modules_to_save=output: the head of {model.output} replaces the output layer, and is trained in "
            "full; remove it"
        )
    elif model.tied_embeddings and "embedding" not in saved:
        yield (
            "adapter.modules_to_save=output: with model.tied_embeddings=true the output layer has no separate table; "
            "name embedding, which is both"
        )


def _named_targets(adapter: AdapterSection, *groups: str) -> str:
    names = [name for group in groups for name in (group, *GROUPS.get(group, ()))] + ["gate_up_proj"]
    return ", ".join(target for target in adapter.targets if target in names)


def _has_networks(model: ModelSection) -> bool:
    is_shared = model.experts is not None and model.experts.shared_ffn_hidden_size > 0
    return is_shared or any(model.has_dense(layer) for layer in range(model.num_layers))


def has_merged_form(model: ModelSection, adapter: AdapterSection) -> bool:
    """Says whether a model without adapters can compute the same function; not if one table would need two values."""
    return not (model.tied_embeddings and "embedding" in adapter.parts)


def _run(config: Sections, adapter: AdapterSection) -> Iterator[str]:
    model = config.model
    if model.add_tokens or model.add_special_tokens:
        needed = ["embedding", "output"] if model.output.has_table else ["embedding"]
        trained = adapter.parts | {*adapter.modules_to_save}
        if missing := [part for part in needed if part not in trained]:
            yield (
                f"model.add_tokens with adapter.targets={', '.join(adapter.targets)}: the rows of new tokens would "
                f"stay the mean of the other rows; add {', '.join(missing)} to adapter.modules_to_save, or to the "
                "targets"
            )
        elif not has_merged_form(model, adapter):
            yield (
                "model.add_tokens with adapter.targets=embedding needs tables that can be merged into the model, and "
                "with model.tied_embeddings=true one table would get two values; name embedding in "
                "adapter.modules_to_save instead, which trains the one table in full"
            )
    every = config.checkpoint.export_hf_every_steps
    if every and not has_merged_form(model, adapter):
        yield (
            f"checkpoint.export_hf_every_steps={every} writes merged models, but with "
            "adapter.targets=embedding and model.tied_embeddings=true the embedding and the output layer differ, and "
            "a merged model has one table for both; set it to 0, and export the adapter with mtrain convert export "
            "--adapter"
        )
    if model.mtp_depths and "embedding" in adapter.parts:
        yield (
            f"adapter.targets=embedding with model.mtp_depths={model.mtp_depths}: the depths also read the table on "
            "the last pipeline stage, where it has no adapter; remove it, or set mtp_depths to 0"
        )
    if config.optimizer.kind == "muon":
        yield (
            "adapter with optimizer.kind=muon would orthogonalize A and B separately instead of their product; use "
            "optimizer.kind=adamw"
        )
    if adapter.base_dtype is not None and config.train.precision == "fp16":
        yield (
            f"adapter.base_dtype={adapter.base_dtype} supports runs in fp32 or bf16, but train.precision=fp16; remove "
            "it, or set train.precision=bf16"
        )
    if model.backend == "te":
        yield (
            "adapter needs the inputs of projections, which model.backend=te fuses with the norms before them; use "
            "model.backend=auto or torch"
        )
    if config.layout.etp > 1 and "experts" in adapter.parts:
        yield (
            f"adapter.targets=experts cannot be divided over layout.etp={config.layout.etp}; set it to 1 and raise "
            "layout.ep"
        )
    if model.experts is not None and model.experts.bias_update_rate > 0:
        yield (
            f"model.experts.bias_update_rate={model.experts.bias_update_rate} moves a part of the frozen model; set it "
            "to 0"
        )
