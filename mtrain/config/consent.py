"""Rules of `checkpoint.allow_changed`: keys that a resumed run may change with consent, and keys that never change.

Keys that decide which samples a step reads, or what the numbers in a checkpoint mean, never change: the run would not
continue its earlier steps. Keys of NEUTRAL_KEYS need no consent.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import get_origin

from mtrain.config.schema.section import Section, sections_in

NEUTRAL_KEYS = (
    "run",
    "layout",
    "valid",
    "eval",
    "checkpoint",
    "metrics",
    "watch",
    "train.num_steps",
    "train.micro_batch_size",
    "train.tokens_per_micro_batch",
    "train.device",
    "train.recompute",
    "train.recompute_layers",
    "train.compile",
    "train.deterministic",
    "train.recompute_modules",
    "train.offload_layers",
    "train.offload_optimizer",
    "train.distributed_optimizer",
    "train.overlap_grad_reduce",
    "train.overlap_param_gather",
    "train.process_group_timeout_s",
    "train.max_skipped_steps",
    "train.on_nonfinite",
    "train.on_spike",
    "train.rollback_margin_steps",
    "train.max_bad_steps",
    "train.check_replicas_every_steps",
    "model.backend",
    "model.hf",
    "adapter.path",
    "data.allow_other_tokenizer",
    "data.prefetch_steps",
    "data.packing",
    "data.ignore_keys",
    "data.on_bad",  # the fingerprint of the data identifies the samples
    "data.max_bad",
    "data.cache_dir",
    "data.cache_check",
    "data.valid",
    "data.test",
)
"""Sections and keys that may change between two starts, such as length, layout and reports of the run."""

_WITH_CONSENT = (
    "optimizer",
    "loss",
    "data",
    "train",
    "model.attention_dropout",
    "model.hidden_dropout",
    "model.rope",
    "model.sliding_window",
    "model.experts.bias_update_rate",
    "model.experts.capacity_factor",
)
_STATE = "the state in the checkpoint belongs to this kind of optimizer"
_ORDER = "it decides which samples a step reads, so samples would be repeated or left out"
_NEVER = {
    "optimizer.kind": _STATE,
    "train.precision": "the optimizer keeps other state in another precision",
    "train.global_batch_size": _ORDER,
    "train.seed": _ORDER,
    "data.seed": _ORDER,
}
_OTHER_MODEL = "the weights in the checkpoint belong to this model"


def lies_in(key: str, sections: Iterable[str]) -> bool:
    """Says whether a dotted key is one of `sections`, or inside one."""
    return any(key == section or key.startswith(f"{section}.") for section in sections)


def is_permitted(key: str, allow_changed: Sequence[str]) -> bool:
    """Says whether `checkpoint.allow_changed` lets a key change; a section permits all its keys that can change."""
    return lies_in(key, allow_changed) and key not in _NEVER and lies_in(key, _WITH_CONSENT)


def broken_rules(root: type[Section], allow_changed: Sequence[str]) -> Iterator[str]:
    """Yields a message for every entry of `checkpoint.allow_changed` that cannot change, or need not be listed."""
    for key in allow_changed:
        entry = f"checkpoint.allow_changed names {key!r}"
        if not _exists(root, key.split(".")):
            yield f"{entry}, but there is no such key; write a key as section.key, such as optimizer.lr, or remove it"
        elif lies_in(key, NEUTRAL_KEYS):
            hint = (
                " (to change the learning rate with it, name optimizer.decay_steps)" if key == "train.num_steps" else ""
            )
            yield f"{entry}, which may change without consent{hint}; remove it"
        elif key in _NEVER or not lies_in(key, _WITH_CONSENT):
            yield (
                f"{entry}, which cannot change in a run: {_NEVER.get(key, _OTHER_MODEL)}; remove it, and start a new "
                "run from the weights with checkpoint.initialize_from and another run.dir"
            )


def _exists(root: type[Section], parts: Sequence[str]) -> bool:
    """Says whether a configuration can have the key; mappings of plain values accept any name."""
    sections: tuple[type[Section], ...] = (root,)
    names = iter(parts)
    for name in names:
        fields = [section.model_fields[name] for section in sections if name in section.model_fields]
        if not fields:
            return False
        annotation = fields[0].annotation
        sections = sections_in(annotation)
        if get_origin(annotation) is dict:
            if not sections:
                return True
            next(names, None)  # a section's name in a mapping of sections
        elif get_origin(annotation) is tuple:
            sections = ()  # a list is one value
    return True
