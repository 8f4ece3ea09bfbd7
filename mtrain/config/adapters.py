"""What adapters can be combined with, and the targets that all-linear means."""

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
    is_there = isinstance(named, list | tuple) and ALL_LINEAR in named
    return [each for each in named if each != ALL_LINEAR] if is_there else None


def with_linear_targets(content: Any) -> Any:
    """Replaces all-linear by the targets of the model.

    Args:
        content: Sections by name, not validated yet.
    """
    others = all_linear_in(content)
    if others is None:
        return content
    try:
        model = ModelSection.model_validate(content.get("model"))
    except ValidationError:  # reported with everything else that is wrong
        return content
    return {**content, "adapter": {**content["adapter"], "targets": [*_linear_targets(model, others), *others]}}


def _linear_targets(model: ModelSection, named: Collection[Any]) -> Iterator[str]:
    """Yields the targets that are linear layers in PEFT's sense, without parts of those in `named`."""
    kinds = {model.attention(layer) for layer in range(model.num_layers)}
    found = ["qkv", "proj"] if kinds - {*RECURRENT, "none"} else []
    found += ["in_proj"] if kinds & RECURRENT.keys() else []
    # PEFT refuses that of Mamba-2, whose kernels read the weight
    found += ["out_proj"] if kinds & RECURRENT.keys() - {"mamba"} else []
    found += ["fc1", "fc2"] if _has_networks(model) else []
    taken = {part for target, parts in JOINED.items() if target in named for part in parts}
    for target in found:
        parts = GROUPS.get(target, (target,))
        if taken.isdisjoint(parts):
            yield target
        else:
            yield from (part for part in DELTA_NET_PARTS if part in parts and part not in taken)


def notes(config: Sections) -> list[str]:
    """Returns a note on what all-linear omits, if anything."""
    model, adapter = config.model, config.adapter
    if adapter is None or "targets" in adapter.model_fields_set:
        return []
    left = ["out_proj of Mamba-2, which PEFT refuses (name it as well, and export merged)"] * (
        model.mamba is not None and "out_proj" not in adapter.parts
    )
    if model.experts is not None:
        unnamed = "routers and the gate of shared experts" if model.experts.shared_gate else "routers"
        left += ["routed experts (name experts as well)"] * ("experts" not in adapter.parts)
        left.append(f"{unnamed}, which have no target")
    if not left:
        return []
    return [f"adapter.targets=all-linear means {', '.join(adapter.targets)} here, and leaves out {'; '.join(left)}"]


def broken_rules(config: Sections, adapter: AdapterSection) -> Iterator[str]:
    """Yields a message for every broken rule."""
    yield from _targets(config.model, adapter)
    yield from _learned_whole(config.model, adapter)
    yield from _run(config, adapter)


def _targets(model: ModelSection, adapter: AdapterSection) -> Iterator[str]:
    there = model.query_projections | (
        {"qkv_proj"} if model.query_projections.issuperset(JOINED["qkv_proj"]) else set()
    )
    if missing := [target for target in adapter.targets if target in _ATTENTION - there]:
        yield (
            f"adapter.targets={', '.join(missing)}: the attention of this model has no such projection; name "
            f"{', '.join(sorted(model.query_projections))}, or qkv for all of them"
        )
    if adapter.dropout > 0 and "kv_b_proj" in adapter.parts & model.query_projections:
        yield (
            f"adapter.dropout={adapter.dropout} does not work with kv_b_proj (a part of qkv), whose matrix multiplies "
            "latents after the context-parallel exchange; set it to 0, or name the other projections"
        )
    own = frozenset().union(*(section.projections for section in model.recurrent))
    if missing := [target for target in adapter.targets if target in _RECURRENT - own]:
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
            f"adapter.targets={_given(adapter, 'fc1', 'fc2')}: every layer has experts and none a shared one; name "
            "experts, or remove it"
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


def _learned_whole(model: ModelSection, adapter: AdapterSection) -> Iterator[str]:
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


def _given(adapter: AdapterSection, *groups: str) -> str:
    names = [name for group in groups for name in (group, *GROUPS.get(group, ()))] + ["gate_up_proj"]
    return ", ".join(target for target in adapter.targets if target in names)


def _has_networks(model: ModelSection) -> bool:
    is_shared = model.experts is not None and model.experts.shared_ffn_hidden_size > 0
    return is_shared or any(model.has_dense(layer) for layer in range(model.num_layers))


def has_merged_form(model: ModelSection, adapter: AdapterSection) -> bool:
    """Says whether a model without adapters can compute the same; not if one table gets two values."""
    return not (model.tied_embeddings and "embedding" in adapter.parts)


def _run(config: Sections, adapter: AdapterSection) -> Iterator[str]:
    model = config.model
    if model.add_tokens or model.add_special_tokens:
        needed = ["embedding", "output"] if model.output.has_table else ["embedding"]
        learned = adapter.parts | {*adapter.modules_to_save}
        if missing := [part for part in needed if part not in learned]:
            yield (
                f"model.add_tokens with adapter.targets={', '.join(adapter.targets)}: the rows of new tokens would "
                f"stay the mean of the others; add {', '.join(missing)} to adapter.modules_to_save, or to the targets"
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
            "adapter.targets=embedding and model.tied_embeddings=true the embedding and the output layer, which are "
            "one table there, differ; set it to 0, and export the adapter with mtrain convert export --adapter"
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
            f"adapter.base_dtype={adapter.base_dtype} holds the frozen model below a run in fp32 or bf16, not "
            "train.precision=fp16; remove it, or set train.precision=bf16"
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
