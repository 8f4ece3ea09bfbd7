"""YAML text -> plain values with the line of each, and back.

Values have the types of YAML 1.1, with the floats of 1.2 (`1e-3`), as version 0.1.0 read them; nothing is interpolated.
Anything that no configuration needs is refused: depth, aliases that multiply, tags, and numbers that YAML 1.1 misreads.
"""

from __future__ import annotations

import copy
import io
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import filterfalse
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.composer import Composer
from ruamel.yaml.error import MarkedYAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError
from ruamel.yaml.representer import SafeRepresenter
from ruamel.yaml.resolver import BaseResolver
from ruamel.yaml.tag import Tag

MAX_BYTES = 2**20
MAX_NODES = 10_000
"""Number of values and keys of a text at most; those that aliases repeat count each time."""
MAX_DEPTH = 50

Location = tuple[int | str, ...]

_STANDARD = "tag:yaml.org,2002:"
_MERGE = _STANDARD + "merge"
_BASE_60 = re.compile(r"[-+]?\d[\d_]*(:[0-5]?\d)+(\.[\d_]*)?")
_BASE_8 = re.compile(r"[-+]?0[0-7_]+")
_FORMS = {
    "null": re.compile(r"~|null|Null|NULL|"),
    "bool": re.compile(r"yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF"),
    "int": re.compile(
        rf"[-+]?(0b[01_]+|0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)|{_BASE_8.pattern}|[-+]?[1-9][0-9_]*(:[0-5]?[0-9])+"
    ),
    "float": re.compile(
        r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+|[-+]?[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*([eE][-+][0-9]+)?"
        r"|[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+\.[0-9_]*|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
    ),
    "merge": re.compile("<<"),
}
"""Forms of plain scalars that are not text, by tag."""
_OTHER_VERSIONS = (re.compile(r"[yYnN]|0o[0-7_]+|[-+]?[0-9_]+|[-+]?\.[0-9_]+([eE][-+]?[0-9]+)?|\d{4}-\d\d?-\d.*|="),)
"""Forms of plain scalars that are text here, but not for readers of other versions of YAML."""
_TRUE = ("yes", "true", "on")
_SHOWN = 20
_LONG = re.compile(r"[-+]?(0x|0b)?[\da-fA-F_]{41,}")
_MISREAD: tuple[tuple[re.Pattern[str], Callable[[str], str]], ...] = (
    (_BASE_60, lambda text: f"YAML reads {text} as a number in base 60; write the number, or quote a text"),
    (_BASE_8, lambda text: f"YAML reads {text} as a number in base 8; leave the first 0 out, or quote a text"),
    (
        _LONG,
        lambda text: f"{text[:_SHOWN]}... is a number of {len(text):,} digits; write a smaller one, or quote a text",
    ),
)
_TAGS: dict[type[Node], tuple[str, ...]] = {
    ScalarNode: tuple(_STANDARD + name for name in ("str", "int", "float", "bool", "null")),
    SequenceNode: (_STANDARD + "seq",),
    MappingNode: (_STANDARD + "map",),
}
"""Tags that a configuration may use, by kind of node."""


class YamlTextError(ValueError):
    """The text holds something that no configuration should."""

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line
        """Line of the fault, counted from 1; None where it is unknown."""


class NotYamlError(YamlTextError):
    """The text is not YAML."""


@dataclass(frozen=True)
class YamlText:
    """Content of a YAML text and the lines on which it stands."""

    content: Any
    """Dicts, lists, str, int, float, bool and None; None for an empty text."""
    lines: Mapping[Location, int]
    """Line of each value's key, or of each list item, counted from 1."""


def read_yaml(text: str) -> YamlText:
    """Reads one document into plain values.

    Raises:
        NotYamlError: The text is not YAML.
        YamlTextError: The text holds something that no configuration should.
    """
    read = _read(text)
    return YamlText(copy.deepcopy(read.content), read.lines)


@lru_cache(maxsize=4)
def _read(text: str) -> YamlText:
    """Reads a text once: a start reads the configuration of a run several times, and a resolved one takes 40 ms."""
    yaml = _yaml()
    yaml.Composer = _LimitedComposer
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warns of anchors with the same name, which YAML allows
            root = yaml.compose(io.StringIO(text))
    except MarkedYAMLError as fault:
        line = fault.problem_mark.line + 1 if fault.problem_mark else None
        raise NotYamlError(str(fault.problem), line) from None
    except ReaderError as fault:
        raise NotYamlError(f"unacceptable character {chr(fault.character)!r}", _line_at(text, fault.position)) from None
    values = _Values()
    return YamlText(None if root is None else values.of(root, (), 1), values.lines)


def yaml_text(content: Mapping[str, Any]) -> str:
    """Writes nested mappings, sequences and plain values as text that any reader of YAML reads back."""
    yaml = _yaml()
    yaml.Representer = _Representer
    yaml.default_flow_style = False
    yaml.allow_unicode = True
    yaml.representer.sort_base_mapping_type_on_output = False
    yaml.width = 2**20  # never wraps: a path is searched for by its whole text
    stream = io.StringIO()
    yaml.dump(content, stream)
    return stream.getvalue()


def _yaml() -> YAML:
    yaml = YAML(typ="safe", pure=True)
    yaml.Resolver = _Resolver
    return yaml


def _line_at(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


class _Resolver(BaseResolver):
    """Resolver that decides which plain scalars are not text; a %YAML directive changes nothing."""

    def __init__(self, version: object = None, loader: Any = None) -> None:
        super().__init__(loader)

    @property
    def processing_version(self) -> tuple[int, int]:
        return 1, 1

    def resolve(self, kind: type[Node], value: Any, implicit: Any) -> Tag:
        if kind is ScalarNode and implicit[0]:
            return Tag(suffix=_STANDARD + next((name for name, form in _FORMS.items() if form.fullmatch(value)), "str"))
        tag: Tag = super().resolve(kind, value, (False, False))
        return tag


class _LimitedComposer(Composer):
    """Composer that stops at the limits while it reads; repetitions by aliases are counted later, by `_Values`."""

    num_nodes = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.num_nodes += 1
        _refuse_excess(self.num_nodes, self.depth + 1, self.parser.peek_event().start_mark.line + 1)
        return super().compose_node(parent, index)


def _refuse_excess(num_nodes: int, depth: int, line: int) -> None:
    if num_nodes > MAX_NODES:
        raise YamlTextError(f"more than {MAX_NODES:,} values and keys, repeated ones counted", line)
    if depth > MAX_DEPTH:
        raise YamlTextError(f"values are nested more than {MAX_DEPTH} deep", line)


@dataclass
class _Values:
    """Builder of plain values from nodes; each alias becomes a value of its own."""

    lines: dict[Location, int] = field(default_factory=dict)
    num_values: int = 0

    def of(self, node: Node, location: Location, depth: int) -> Any:
        """Converts a node; `depth` counts from 1."""
        line = _line(node)
        self.num_values += 1
        _refuse_excess(self.num_values, depth, line)
        if str(node.tag) not in _TAGS[type(node)]:
            raise YamlTextError(f"no configuration needs the tag {node.tag}; remove it", line)
        self.lines.setdefault(location, line)
        match node:
            case MappingNode():
                return self._mapping(node, location, depth)
            case SequenceNode():
                return [self.of(each, (*location, n), depth + 1) for n, each in enumerate(node.value)]
            case ScalarNode():
                return _scalar(node)
        raise AssertionError("there are three kinds of nodes")

    def _mapping(self, node: MappingNode, location: Location, depth: int) -> dict[Any, Any]:
        merged: dict[Any, Any] = {}
        for _, value_node in filter(_is_merge, node.value):
            merged = self._merged(value_node, location, depth) | merged
        own: dict[Any, Any] = {}
        for key_node, value_node in filterfalse(_is_merge, node.value):
            if not isinstance(key_node, ScalarNode):
                raise YamlTextError("a list or mapping cannot be a key; quote a text", _line(key_node))
            key = self.of(key_node, (), depth + 1)
            if key in own:
                raise YamlTextError(f"found duplicate key {key}", _line(key_node))
            own[key] = self.of(value_node, (*location, key), depth + 1)
            self.lines[(*location, key)] = _line(key_node)
        return merged | own

    def _merged(self, node: Node, location: Location, depth: int) -> dict[Any, Any]:
        """Returns what `<<` takes over from one mapping, or from several, of which the first takes precedence."""
        merged: dict[Any, Any] = {}
        for each in node.value if isinstance(node, SequenceNode) else [node]:
            if not isinstance(each, MappingNode):
                raise YamlTextError("<< needs a mapping or a list of mappings", _line(each))
            merged = self.of(each, location, depth + 1) | merged
        return merged


def _is_merge(pair: tuple[Node, Node]) -> bool:
    return str(pair[0].tag) == _MERGE


def _line(node: Node) -> int:
    line: int = node.start_mark.line
    return line + 1


def _scalar(node: ScalarNode) -> str | bool | int | float | None:
    text: str = node.value
    kind = str(node.tag).removeprefix(_STANDARD)
    if kind in ("int", "float"):
        return _number(text, kind, _line(node))
    if kind == "str":
        return text
    if not _FORMS[kind].fullmatch(text):  # an explicit tag contradicts the text
        raise YamlTextError(f"{text[:_SHOWN]!r} is no {kind}", _line(node))
    return text.lower() in _TRUE if kind == "bool" else None


def _number(text: str, kind: str, line: int) -> int | float:
    """Converts a number; raises YamlTextError where readers of YAML take it for another number than it looks like."""
    for form, meaning in _MISREAD:
        if form.fullmatch(text):
            raise YamlTextError(meaning(text), line)
    digits = text.replace("_", "")
    try:
        return int(digits, 0) if kind == "int" else float(re.sub(r"\.(inf|nan)$", r"\1", digits.lower()))
    except ValueError:
        raise YamlTextError(f"{text[:_SHOWN]!r} is no number", line) from None


class _Representer(SafeRepresenter):
    """Representer that quotes texts which some version of YAML would not read back as text; it writes no aliases."""

    def represent_text(self, text: str) -> ScalarNode:
        style = None
        if not text.isprintable():
            style = '"'  # the only style that escapes; in others, readers change some line breaks
        elif any(form.fullmatch(text) for form in (*_FORMS.values(), *_OTHER_VERSIONS)):
            style = "'"
        node: ScalarNode = self.represent_scalar(_STANDARD + "str", text, style=style)
        return node

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Representer.add_representer(str, _Representer.represent_text)
_Representer.add_representer(tuple, _Representer.represent_list)
