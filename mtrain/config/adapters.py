"""Rules on what an adapter can be combined with."""

from __future__ import annotations

from collections.abc import Iterator

from mtrain.config.schema.adapter import GROUPS, JOINED, AdapterSection
from mtrain.config.schema.model import ModelSection
from mtrain.config.schema.sections import Sections

_ATTENTION = frozenset((*GROUPS["qkv"], "qkv_proj"))
_INTO_MAMBA = "in_proj_zxbcdt"
_OF_STATES = {*GROUPS["in_proj"], "in_proj", "out_proj", "in_proj_qkvz", "in_proj_ba"}
_FEED_FORWARD = {*GROUPS["fc1"], "fc2", "gate_up_proj"}
_GATED = {"gate_proj", "gate_up_proj"}


def broken_rules(config: Sections, adapter: AdapterSection) -> Iterator[str]:
    """Yields a message for every broken rule: what was given, what is needed, what to change."""
    yield from _targets(config.model, adapter)
    yield from _learned_whole(config.model, adapter)
    yield from _run(config, adapter)


def _targets(model: ModelSection, adapter: AdapterSection) -> Iterator[str]:
    """Checks that every target exists, and that it can have the form that PEFT gives it."""
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
            f"adapter.dropout={adapter.dropout} cannot be had with kv_b_proj (a part of qkv), whose matrix multiplies "
            "latents after the exchange of context parallelism; set it to 0, or name the other projections"
        )
    own = {_INTO_MAMBA, "in_proj", "out_proj"} if model.mamba is not None else set()
    if model.delta_net is not None:
        own |= _OF_STATES - {_INTO_MAMBA}
    if missing := [target for target in adapter.targets if target in _OF_STATES - own]:
        needed = "model.mamba" if missing == [_INTO_MAMBA] else "model.delta_net"
        yield f"adapter.targets={', '.join(missing)} needs {needed}; remove it"
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
            f"adapter.targets=output: the head of {model.output} is in the place of the output layer, and learns "
            "whole; remove it"
        )
    elif model.tied_embeddings and "output" in adapter.parts:
        yield (
            "adapter.targets=output: with model.tied_embeddings=true the output layer has no table of its own; remove "
            "it, or name embedding, which leaves the output layer on the frozen table, as in PEFT"
        )


def _learned_whole(model: ModelSection, adapter: AdapterSection) -> Iterator[str]:
    """Checks that the model has every module that learns whole."""
    saved = adapter.modules_to_save
    if "head" in saved and not model.output.is_new:
        yield "adapter.modules_to_save=head needs model.num_labels; set it, or remove head"
    if "output" not in saved:
        return
    if model.output.is_new:
        yield (
            f"adapter.modules_to_save=output: the head of {model.output} is in the place of the output "
            "layer, and learns whole; remove it"
        )
    elif model.tied_embeddings and "embedding" not in saved:
        yield (
            "adapter.modules_to_save=output: with model.tied_embeddings=true the output layer has no table of its own; "
            "name embedding, which is both"
        )


def _given(adapter: AdapterSection, *groups: str) -> str:
    names = [name for group in groups for name in (group, *GROUPS.get(group, ()))] + ["gate_up_proj"]
    return ", ".join(target for target in adapter.targets if target in names)


def _has_networks(model: ModelSection) -> bool:
    is_shared = model.experts is not None and model.experts.shared_ffn_hidden_size > 0
    return is_shared or any(model.has_dense(layer) for layer in range(model.num_layers))


def has_merged_form(model: ModelSection, adapter: AdapterSection) -> bool:
    """Says whether a model without adapters can compute the same: not where one table gets two values."""
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
                "adapter.modules_to_save instead, where the one table learns whole"
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
            f"adapter.targets=embedding with model.mtp_depths={model.mtp_depths}: the depths read the table on the "
            "last stage of a pipeline as well, where it has no adapter; remove it, or set mtp_depths to 0"
        )
    if config.optimizer.kind == "muon":
        yield (
            "adapter with optimizer.kind=muon would orthogonalize A and B apart, and not what they make together; use "
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
