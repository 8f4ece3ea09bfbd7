"""Every key of a configuration as its schema states it: type, default, unit and meaning.

docs/reference/configuration.md is generated from it.
"""

import ast
import inspect
import textwrap
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import Tag
from pydantic.fields import FieldInfo

from mtrain.config.schema import bounds
from mtrain.config.schema.root import Config
from mtrain.config.schema.section import Section, sections_in

_UNIT_OF_BOUND = (
    (bounds.POSITIONS, "tokens"),
    (bounds.STEPS, "steps"),
    (bounds.SAMPLES, "samples"),
    (bounds.SECONDS, "seconds"),
    (bounds.LAYERS, "layers"),
    (bounds.EXPERTS, "experts"),
    (bounds.PATH, "path"),
    (bounds.BATCH, "samples"),
    (bounds.BATCHES_AHEAD, "global batches"),
)
"""Bound of a field, found by identity, and its unit."""
_UNIT_OF_SUFFIX = {
    "_s": "seconds",
    "_steps": "steps",
    "_tokens": "tokens",
    "_percent": "percent",
    "_layers": "layers",
}
_PLAIN = {int: "integer", float: "number", bool: "true or false", str: "text", type(None): "null"}


@dataclass(frozen=True)
class Key:
    """One key, or one section of keys."""

    name: str
    """Path from the root, such as `train.num_steps`; `[]` means a list element, NAME a user's own name."""
    type: str
    """Legal values in words."""
    default: Any
    """Default value; meaningless for a required key."""
    is_required: bool
    unit: str
    """What a number counts, or `path`; empty without a unit."""
    text: str
    kinds: tuple[str, ...] = ()
    """Kinds of its section that have it; empty: all."""
    is_section: bool = False
    field: FieldInfo | None = None
    """Field of the schema, which validates values."""


def described_keys() -> list[Key]:
    """Lists all keys in the schema's order; a key that several kinds of a section share appears once."""
    found: dict[str, Key] = {}
    for key in _keys_of(Config, "", ()):
        seen = found.get(key.name)
        if seen is None:
            found[key.name] = key
        elif key.kinds != seen.kinds:
            found[key.name] = replace(_merged(seen, key), kinds=(*seen.kinds, *key.kinds))
    return [_without_all_kinds(key, found) for key in found.values()]


def _merged(one: Key, other: Key) -> Key:
    """Joins the values of `kind`, which each kind of a section names for itself."""
    if one.name.endswith(".kind"):
        return replace(one, type=f"{one.type} | {other.type}", is_required=one.is_required and other.is_required)
    return one


def _without_all_kinds(key: Key, found: Mapping[str, Key]) -> Key:
    """Clears the kinds of a key that belongs to all of them."""
    kind = found.get(f"{key.name.partition('.')[0]}.kind")
    return replace(key, kinds=()) if kind is not None and len(kind.kinds) == len(key.kinds) else key


def _keys_of(section: type[Section], prefix: str, kinds: tuple[str, ...]) -> Iterator[Key]:
    texts = texts_of(section)
    for name, info in section.model_fields.items():
        inner = sections_in(info.annotation)
        text = texts.get(name) or (inspect.getdoc(inner[0]) if inner else None) or ""
        yield Key(
            prefix + name,
            _type(info.annotation, info.metadata) if not inner else _type_of_sections(info.annotation),
            None if info.is_required() else info.get_default(call_default_factory=True),
            info.is_required(),
            _unit(name, info),
            " ".join(text.split()),
            kinds,
            bool(inner),
            info,
        )
        for each in inner:
            of_kind = (_kind(each),) if len(inner) > 1 and "kind" in each.model_fields else ()
            yield from _keys_of(each, f"{prefix}{name}{separator(info.annotation)}", of_kind or kinds)


def texts_of(section: type[Section]) -> dict[str, str]:
    """Returns the docstring below each field, including inherited ones."""
    texts = {}
    for owner in reversed(section.__mro__):
        if issubclass(owner, Section) and owner is not Section:
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
            assert isinstance(tree, ast.ClassDef)
            for field, after in zip(tree.body, tree.body[1:]):
                if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr):
                    texts[ast.unparse(field.target)] = str(ast.literal_eval(after.value))
    return {name: text for name, text in texts.items() if name in section.model_fields}


def _kind(section: type[Section]) -> str:
    (kind,) = get_args(section.model_fields["kind"].annotation)
    return str(kind)


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """Returns the members of a union, else the annotation alone; ignores type names and notes."""
    if get_origin(annotation) is Annotated:
        return alternatives(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(each for argument in get_args(annotation) for each in alternatives(argument))
    return (annotation,)


def separator(annotation: Any) -> str:
    """Returns the text between a section's name and one of its keys."""
    origins = {get_origin(each) for each in alternatives(annotation)}
    if tuple in origins:
        return "[]."
    return ".NAME." if dict in origins else "."


def _type(annotation: Any, metadata: list[Any]) -> str:
    parts = []
    for each in alternatives(annotation):
        origin = get_origin(each)
        if origin is Literal:
            parts += [str(value) for value in get_args(each)]
        elif origin in (tuple, list):
            parts.append(f"list of {_type(get_args(each)[0], [])}")
        elif origin is dict:
            parts.append("mapping")
        else:
            parts.append(_PLAIN.get(each, "any value") + (_limits(metadata) if each in (int, float) else ""))
    return " | ".join(dict.fromkeys(parts))


def _limits(metadata: list[Any]) -> str:
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    found = [
        f"{sign} {getattr(each, name):g}"
        for each in metadata
        for name, sign in signs.items()
        if isinstance(each, annotated_types.BaseMetadata) and hasattr(each, name)
    ]
    return f" {', '.join(found)}" if found else ""


def _type_of_sections(annotation: Any) -> str:
    parts = []
    for each in alternatives(annotation):
        origin = get_origin(each)
        if origin in (tuple, list):
            parts.append("list of sections")
        elif origin is dict:
            parts.append("sections by name")
        else:
            parts.append("null" if each is type(None) else "section")
    return " | ".join(dict.fromkeys(parts))


def _unit(name: str, info: FieldInfo) -> str:
    marks = [mark for mark in info.metadata if not isinstance(mark, Tag)]
    for bound, unit in _UNIT_OF_BOUND:
        if any(mark is bound for mark in marks):
            return unit
    if _type(info.annotation, info.metadata).startswith("list of text"):
        return ""  # add_tokens counts nothing
    return next((unit for suffix, unit in _UNIT_OF_SUFFIX.items() if name.endswith(suffix)), "")


def editor_schema() -> dict[str, Any]:
    """Returns the schema of one YAML file; nothing is required, because files are merged."""
    schema: dict[str, Any] = Config.model_json_schema()
    classes = {each.__name__: each for each in _sections(Config)}
    for name, part in (("Config", schema), *schema["$defs"].items()):
        if name not in classes:
            continue
        # a kind stays required: it tells sections of one name apart
        part["required"] = [key for key in part.pop("required", []) if key == "kind"]
        for key, text in texts_of(classes[name]).items():
            part["properties"][key]["description"] = " ".join(text.split())
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "mtrain"}


def _sections(section: type[Section]) -> set[type[Section]]:
    inner = {each for field in section.model_fields.values() for each in sections_in(field.annotation)}
    return {section, *(found for each in inner for found in _sections(each))}
