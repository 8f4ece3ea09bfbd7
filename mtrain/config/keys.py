"""Description of every configuration key, from the schema: type, default, unit and meaning.

docs/reference/configuration.md is generated from it.
"""

import ast
import inspect
import textwrap
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
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
"""Bound of a field, compared by identity -> unit."""
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
    """Path from the root, such as `train.num_steps`; `[]` stands for a list element, NAME for a name of the user's."""
    type: str
    """Legal values in words."""
    default: Any
    """Default value; meaningless for a required key."""
    is_required: bool
    unit: str
    """Unit of a number, or `path` for a text that is one; empty without a unit."""
    text: str
    kinds: tuple[str, ...] = ()
    """Kinds of its section that have the key; empty: all kinds."""
    is_section: bool = False
    field: FieldInfo | None = None
    """Field of the schema, which validates values."""


def described_keys() -> list[Key]:
    """Lists all keys in the schema's order; a key that several kinds of a section share appears once."""
    keys: dict[str, Key] = {}
    for key in _keys_of(Config, "", ()):
        seen = keys.get(key.name)
        if seen is None:
            keys[key.name] = key
        elif key.kinds != seen.kinds:
            keys[key.name] = replace(_merged(seen, key), kinds=(*seen.kinds, *key.kinds))
    return [_without_all_kinds(key, keys) for key in keys.values()]


def _merged(one: Key, other: Key) -> Key:
    """Joins the legal values of `kind`, since each kind of a section only allows its own."""
    if one.name.endswith(".kind"):
        return replace(one, type=f"{one.type} | {other.type}", is_required=one.is_required and other.is_required)
    return one


def _without_all_kinds(key: Key, keys: Mapping[str, Key]) -> Key:
    """Clears the kinds of a key that all kinds of its section have."""
    kind = keys.get(f"{key.name.partition('.')[0]}.kind")
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
        for subsection in inner:
            is_one_kind = len(inner) > 1 and "kind" in subsection.model_fields
            subkinds = (_kind(subsection),) if is_one_kind else kinds
            yield from _keys_of(subsection, f"{prefix}{name}{separator(info.annotation)}", subkinds)


@cache
def texts_of(section: type[Section]) -> dict[str, str]:
    """Returns field -> the docstring below it, including inherited fields."""
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
    """Returns the members of a union, or the annotation alone; strips `Annotated`."""
    if get_origin(annotation) is Annotated:
        return alternatives(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(member for argument in get_args(annotation) for member in alternatives(argument))
    return (annotation,)


def separator(annotation: Any) -> str:
    """Returns the text between the name of a section, of this annotation, and one of its keys."""
    origins = {get_origin(member) for member in alternatives(annotation)}
    if tuple in origins:
        return "[]."
    return ".NAME." if dict in origins else "."


def _type(annotation: Any, metadata: list[Any]) -> str:
    parts = []
    for member in alternatives(annotation):
        origin = get_origin(member)
        if origin is Literal:
            parts += [str(value) for value in get_args(member)]
        elif origin in (tuple, list):
            parts.append(f"list of {_type(get_args(member)[0], [])}")
        elif origin is dict:
            parts.append("mapping")
        else:
            parts.append(_PLAIN.get(member, "any value") + (_limits(metadata) if member in (int, float) else ""))
    return " | ".join(dict.fromkeys(parts))


def _limits(metadata: list[Any]) -> str:
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    limits = [
        f"{sign} {getattr(constraint, name):g}"
        for constraint in metadata
        for name, sign in signs.items()
        if isinstance(constraint, annotated_types.BaseMetadata) and hasattr(constraint, name)
    ]
    return f" {', '.join(limits)}" if limits else ""


def _type_of_sections(annotation: Any) -> str:
    parts = []
    for member in alternatives(annotation):
        origin = get_origin(member)
        if origin in (tuple, list):
            parts.append("list of sections")
        elif origin is dict:
            parts.append("sections by name")
        else:
            parts.append("null" if member is type(None) else "section")
    return " | ".join(dict.fromkeys(parts))


def _unit(name: str, info: FieldInfo) -> str:
    marks = [mark for mark in info.metadata if not isinstance(mark, Tag)]
    for bound, unit in _UNIT_OF_BOUND:
        if any(mark is bound for mark in marks):
            return unit
    if _type(info.annotation, info.metadata).startswith("list of text"):
        return ""  # such as add_tokens, despite its suffix
    return next((unit for suffix, unit in _UNIT_OF_SUFFIX.items() if name.endswith(suffix)), "")


def editor_schema() -> dict[str, Any]:
    """Returns the JSON schema of one YAML file; it requires no key, because several files are merged."""
    schema: dict[str, Any] = Config.model_json_schema()
    classes = {section.__name__: section for section in _sections(Config)}
    for name, part in (("Config", schema), *schema["$defs"].items()):
        if name not in classes:
            continue
        # kind stays required: it distinguishes the kinds of a section
        part["required"] = [key for key in part.pop("required", []) if key == "kind"]
        for key, text in texts_of(classes[name]).items():
            part["properties"][key]["description"] = " ".join(text.split())
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "mtrain"}


def _sections(section: type[Section]) -> set[type[Section]]:
    inner = {child for field in section.model_fields.values() for child in sections_in(field.annotation)}
    return {section}.union(*map(_sections, inner))
