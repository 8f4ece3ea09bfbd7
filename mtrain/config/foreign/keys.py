"""Keys of other programs: the counterparts of each here, and the program that a file's keys belong to, for messages."""

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from mtrain.config.kinds import sections_at
from mtrain.config.megatron_fields import TYPED_KNOBS
from mtrain.config.schema.root import Config
from mtrain.config.tables import by_name, table

_MEGATRON_LM, _HINTS = table("megatron_lm"), table("hints")
_ROWS = {
    name: row if isinstance(row, str) else row["to"]
    for section in ("switches", "rows", "rope", "yarn", "latent_attention", "delta_net", "experts")
    for name, row in _MEGATRON_LM[section].items()
}
OURS = {
    **TYPED_KNOBS,
    **{name.replace("-", "_"): key for name, key in _ROWS.items()},
    **by_name(_HINTS["ours"]),
}
"""Name in another program -> our equivalent, in any section."""
SYNONYMS = {key: frozenset(names.split()) for key, names in _HINTS["synonyms"].items()}
"""Our key -> its synonyms, in sections that have the key."""
FOLLOWING = by_name(_HINTS["following"])
"""Name in another program without an equivalent -> our keys that its value follows from."""
MISSING = by_name(_HINTS["missing"])
"""Name of something that nothing here does -> what to do instead."""
_TABLES: Mapping[str, tuple[str, ...]] = {
    "trl": ("trl", "transformers"),  # first, so that files of transformers' Trainer count as its own
    "axolotl": ("axolotl",),
    "llamafactory": ("llamafactory", "transformers"),
    "megatron-bridge": ("megatron_bridge",),
    "ms-swift": ("ms_swift",),
    "torchtitan": ("torchtitan",),
    "verl": ("verl",),
}
"""Verb of `mtrain from` -> tables of the program's keys."""
NAMES = {
    "axolotl": "axolotl",
    "llamafactory": "LLaMA-Factory",
    "megatron-bridge": "Megatron-Bridge",
    "ms-swift": "ms-swift",
    "torchtitan": "torchtitan",
    "trl": "TRL",
    "verl": "verl",
}
"""Verb of `mtrain from` -> name of the program."""
_OF_ACCELERATE = frozenset(("compute_environment", "distributed_type"))
_CLEARLY = 1.5
"""Factor by which the evidence for another program must be larger."""
_LEAST = 1.5
"""Least evidence for a program: the sum over its keys of 1 / programs that have the key."""


def refuse_foreign(path: Path, content: Mapping[Any, Any]) -> str | None:
    """Returns the refusal of another program's file where a configuration is needed; None if it is not recognised."""
    if _OF_ACCELERATE & content.keys():
        return (
            f"{path}: this is an accelerate file; give it together with the trainer's file: mtrain from trl FILE {path}"
        )
    evidence, ours = _evidence(content)
    best = max(evidence, key=lambda verb: evidence[verb])
    if evidence[best] < max(_LEAST, ours):
        return None
    return f"{path}: this is {_article(best)} {NAMES[best]} file; translate it: mtrain from {best} {path}"


def refuse_other(path: Path, content: Mapping[Any, Any], program: str) -> str | None:
    """Returns the refusal of a file that is probably another program's, not `program`'s; None otherwise."""
    evidence, ours = _evidence(content)
    best = max(evidence, key=lambda verb: evidence[verb])
    expected = next(verb for verb, name in NAMES.items() if name == program)
    if ours > evidence[best] and set(content) <= Config.model_fields.keys():
        return f"{path}: this is a configuration of mtrain, not of {program}; run: mtrain check {path} --world-size N"
    if evidence[best] < max(_LEAST, _CLEARLY * evidence[expected]):
        return None
    kind = f"{_article(best)} {NAMES[best]} file"
    return f"{path}: this is {kind}, not one of {program}; translate it: mtrain from {best} {path}"


def _article(verb: str) -> str:
    return "an" if verb in ("axolotl", "ms-swift") else "a"


def _evidence(content: Mapping[Any, Any]) -> tuple[dict[str, float], int]:
    """Returns each program's number of keys by verb, and the number of mtrain's keys, which count for no program.

    A key of n programs counts 1 / n for each.
    """
    evidence, ours = dict.fromkeys(_TABLES, 0.0), 0
    for key in _keys(content, ""):
        *parents, last = key.split(".")
        if any(last in section.model_fields for section in sections_at(tuple(parents))):
            ours += bool(parents)  # names of sections, such as model and train, are too common
            continue
        verbs = [verb for verb in _TABLES if key in _names(verb) or key.startswith(_prefixes(verb))]
        for verb in verbs:
            evidence[verb] += 1 / len(verbs)
    return evidence, ours


def _keys(section: Mapping[Any, Any], prefix: str) -> Iterator[str]:
    for name, value in section.items():
        yield f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _keys(value, f"{prefix}{name}.")


@cache
def _names(verb: str) -> frozenset[str]:
    """Returns the keys that the program's tables name."""
    return frozenset(name for file in _TABLES[verb] for name in _names_in(table(file)))


def _names_in(content: Mapping[str, Any]) -> Iterator[str]:
    for key, value in content.items():
        match key, value:
            case (("rows" | "neutral" | "any_of"), dict()):
                yield from value
            case (("unused" | "names"), str()):
                yield from value.split()
            case "read", dict():
                yield from (name for names in value.values() for name in names.split())
            case "lost", list():
                yield from (name for group in value for name in _names_in(group))
            case (("defaults" | "models" | "recipes" | "kinds" | "short"), dict()):
                pass
            case _, dict():
                yield from _names_in(value)


def _prefixes(verb: str) -> tuple[str, ...]:
    """Returns the beginnings of keys that only this program has."""
    return ("actor_rollout_ref.", "algorithm.", "critic.") if verb == "verl" else ()
