"""Fields of megatron-core's TransformerConfig that `model.megatron` accepts, and the reasons against the others.

Only fields that a parity test compares with the oracle are accepted (PROVEN). Defaults are read from the source of the
installed package, because importing it would load torch.
"""

import ast
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

from mtrain.base.ground import source_of
from mtrain.base.spelling import meant
from mtrain.config.tables import by_name, table

_TABLE = table("megatron_fields")
TYPED_KNOBS = by_name(_TABLE["typed"])
"""Field of megatron-core -> our key."""
OURS = by_name(_TABLE["ours"])
"""Field that mtrain sets -> why."""
EXPERTS = by_name(_TABLE["experts"])
"""Field of experts that stays at its default -> why, or what to use."""
SILENT = tuple(_TABLE["silent"].split())
"""Fields that megatron-core accepts and silently computes wrongly; `mtrain/config/known_issues.py` refuses them."""
REFUSED = by_name(_TABLE["refused"])
"""Field without a parity test -> why."""


class Proven(NamedTuple):
    """A field that `tests/parity/models/` compares with the oracle, and its legal values."""

    is_legal: Callable[[Any], bool]
    needed: str
    """Legal values in words."""
    changes_the_function: bool = False
    """Whether the field changes the function that the same weights compute."""


def _is_count(value: object) -> bool:
    return type(value) is int and 0 < value <= _LARGEST_COUNT


def _is_pattern(value: object) -> bool:
    return _is_count(value) or (isinstance(value, list) and {0, 1} >= set(map(_bit, value)))


def _bit(value: object) -> int:
    return value if type(value) is int else -1


_LARGEST_COUNT = 2**31 - 1
_SWITCH = Proven(lambda value: isinstance(value, bool), "true or false")
PROVEN = {
    "batch_p2p_comm": _SWITCH,
    "bias_activation_fusion": _SWITCH,
    "bias_dropout_fusion": _SWITCH,
    "clone_scatter_output_in_embedding": _SWITCH,
    "deterministic_mode": _SWITCH,
    "fp32_residual_connection": _SWITCH,
    "gradient_accumulation_fusion": _SWITCH,
    "microbatch_group_size_per_vp_stage": Proven(_is_count, "a number above 0"),
    "no_rope_freq": Proven(_is_pattern, "a number above 0, or a list of 0 and 1", changes_the_function=True),
    "overlap_p2p_comm": _SWITCH,
    "overlap_p2p_comm_warmup_flush": _SWITCH,
}
"""Accepted field -> its legal values; `mtrain/config/known_issues.py` refuses some combinations."""


def broken_rules(fields: Mapping[str, Any]) -> Iterator[str]:
    """Yields a message for every field that may not pass, starting with `megatron.<field>`."""
    for name, value in fields.items():
        if name in TYPED_KNOBS:
            yield f"megatron.{name} is set by {TYPED_KNOBS[name]}; use that key instead"
        elif reason := (OURS | EXPERTS).get(name):
            yield f"megatron.{name} cannot be set ({reason}); remove it"
        elif name in PROVEN:
            if not PROVEN[name].is_legal(value):
                yield f"megatron.{name}: {PROVEN[name].needed} is needed, but {value!r} was given; change it"
        elif name in REFUSED:
            if not is_default(name, value):
                yield f"megatron.{name} {REFUSED[name]}; remove it"
        elif name not in SILENT:
            yield f"megatron.{name} is not a field of megatron-core's TransformerConfig; {_nearest(name)}"


def is_default(name: str, value: Any) -> bool:
    """Says whether a value is the field's default in megatron-core."""
    default = field_defaults().get(name, UNREADABLE)
    return type(value) is type(default) and bool(value == default)


def _nearest(name: str) -> str:
    near = meant(name, field_defaults())
    return "remove it" if near is None else f"did you mean {TYPED_KNOBS.get(near, f'megatron.{near}')}?"


_CLASSES = {
    "megatron.core.model_parallel_config": "ModelParallelConfig",
    "megatron.core.transformer.transformer_config": "TransformerConfig",
}

UNREADABLE = object()
"""Marker for a default that is not a plain value, such as a member of an enumeration."""


@cache
def field_defaults() -> dict[str, Any]:
    """Returns every public field, including inherited ones -> its default, or UNREADABLE.

    Raises:
        ValueError: megatron-core is not installed.
    """
    return {
        name: default
        for module, class_name in _CLASSES.items()
        for name, default in _annotated(_source(module), class_name)
        if not name.startswith("_")
    }


def _source(module: str) -> str:
    source = source_of(module)
    if source is None:
        raise ValueError(
            "megatron cannot be checked, since megatron-core is not installed; install it or remove the key"
        )
    return source


def _annotated(source: str, class_name: str) -> Iterator[tuple[str, Any]]:
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            for statement in node.body:
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                    yield statement.target.id, _plain(statement.value)


def _plain(default: ast.expr | None) -> Any:
    if isinstance(default, ast.Call):  # field(default=...)
        default = next((keyword.value for keyword in default.keywords if keyword.arg == "default"), None)
    try:
        return UNREADABLE if default is None else ast.literal_eval(default)
    except ValueError:
        return UNREADABLE
