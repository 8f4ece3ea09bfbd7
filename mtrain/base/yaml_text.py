"""Conversion of YAML text to plain values with line numbers, and back.

Values have the types of YAML 1.1 with the floats of 1.2 (`1e-3`), as in version 0.1.0; nothing is interpolated.
Features that no configuration needs are refused: deep nesting, aliases that multiply, tags, and numbers that YAML 1.1
misreads.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import yaml
from yaml.events import AliasEvent
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from yaml.reader import ReaderError

MAX_BYTES = 2**20
MAX_NODES = 10_000
"""Limit of values and keys in a text, including repetitions by aliases."""
MAX_DEPTH = 50

Location = tuple[int | str, ...]

_STANDARD = "tag:yaml.org,2002:"
_MERGE = _STANDARD + "merge"
_BASE_60 = re.compile(r"[-+]?\d[\d_]*(:[0-5]?\d)+(\.[\d_]*)?")
_BASE_8 = re.compile(r"[-+]?0[0-7_]+")
_OTHER_VERSIONS = re.compile(r"[yYnN]|0o[0-7_]+|[-+]?[0-9_]+|[-+]?\.[0-9_]+([eE][-+]?[0-9]+)?|\d{4}-\d\d?-\d.*|=")
"""Plain scalars that are text here, but not to readers of other YAML versions."""
_FORMS = {
    first: [(tag, form) for tag, form in forms if tag not in (_STANDARD + "timestamp", _STANDARD + "value")]
    for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
"""First character -> tags and patterns of plain scalars that are not text."""
for _first in "-+0123456789":
    _FORMS[_first].append((_STANDARD + "float", re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$")))
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
_KINDS = {
    ScalarNode: ("str", "int", "float", "bool", "null"),
    SequenceNode: ("seq",),
    MappingNode: ("map",),
}
"""Kind of node -> allowed tags, without their prefix."""


class YamlTextError(ValueError):
    """The text contains something that no configuration may."""

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line
        """Line of the fault, counted from 1; None if unknown."""


class NotYamlError(YamlTextError):
    """The text is not YAML."""


@dataclass(frozen=True)
class YamlText:
    """Content of a YAML text and its line numbers."""

    content: Any
    """Dicts, lists, str, int, float, bool and None; None for an empty text."""
    lines: Mapping[Location, int]
    """Line of each value's key, or of each list item, counted from 1."""


def read_yaml(text: str) -> YamlText:
    """Reads one document into plain values.

    Raises:
        NotYamlError: The text is not YAML.
        YamlTextError: The text contains something that no configuration may.
    """
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
    except yaml.MarkedYAMLError as fault:
        line = fault.problem_mark.line + 1 if fault.problem_mark else None
        raise NotYamlError(str(fault.problem), line) from None
    except ReaderError as fault:
        line = text.count("\n", 0, fault.position) + 1
        raise NotYamlError(f"unacceptable character {chr(fault.character)!r}", line) from None
    return YamlText(None if root is None else loader.value(root, (), 1), loader.lines)


def yaml_text(content: Mapping[str, Any]) -> str:
    """Writes nested mappings, sequences and plain values as YAML that any reader reads back as the same values."""
    # without line breaks in values, so that searches find whole paths
    return str(yaml.dump(content, Dumper=_Dumper, allow_unicode=True, sort_keys=False, width=2**20))


class _Loader(yaml.SafeLoader):
    """Loads plain values within limits and records their lines; each alias becomes a separate value."""

    yaml_implicit_resolvers = _FORMS

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lines: dict[Location, int] = {}
        self._depth = self._num_nodes = self._num_values = 0

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        """Checks the limits while the text is parsed; `value` also counts repetitions by aliases."""
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        self._num_nodes += 1
        self._depth += 1
        _refuse_excess(self._num_nodes, self._depth, event.start_mark.line + 1)
        if not isinstance(event, AliasEvent):
            self.anchors.pop(event.anchor, None)  # YAML allows several anchors with the same name
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def value(self, node: Node, location: Location, depth: int) -> Any:
        """Converts a node; `depth` counts from 1."""
        line = _line(node)
        self._num_values += 1
        _refuse_excess(self._num_values, depth, line)
        if node.tag.removeprefix(_STANDARD) not in _KINDS[type(node)]:
            raise YamlTextError(f"the tag {node.tag} is not supported; remove it", line)
        self.lines.setdefault(location, line)
        match node:
            case MappingNode():
                return self._mapping(node, location, depth)
            case SequenceNode():
                return [self.value(item, (*location, n), depth + 1) for n, item in enumerate(node.value)]
            case ScalarNode():
                return self._scalar(node)
        raise AssertionError("a node is a mapping, sequence or scalar")

    def _mapping(self, node: MappingNode, location: Location, depth: int) -> dict[Any, Any]:
        merged: dict[Any, Any] = {}
        explicit: dict[Any, Any] = {}
        for key_node, value_node in sorted(node.value, key=lambda pair: pair[0].tag != _MERGE):
            if key_node.tag == _MERGE:
                for source in _sources(value_node):
                    merged = self.value(source, location, depth + 1) | merged
                continue
            if not isinstance(key_node, ScalarNode):
                raise YamlTextError("a list or mapping cannot be a key; quote a text", _line(key_node))
            key = self.value(key_node, (), depth + 1)
            if key in explicit:
                raise YamlTextError(f"found duplicate key {key}", _line(key_node))
            explicit[key] = self.value(value_node, (*location, key), depth + 1)
            self.lines[(*location, key)] = _line(key_node)
        return merged | explicit

    def _scalar(self, node: ScalarNode) -> str | bool | int | float | None:
        """Converts a scalar; refuses numbers whose YAML value differs from what they look like."""
        text, kind = node.value, node.tag.removeprefix(_STANDARD)
        if kind in ("int", "float"):
            for form, meaning in _MISREAD:
                if form.fullmatch(text):
                    raise YamlTextError(meaning(text), _line(node))
        elif kind != "str":
            tag_of_form = self.resolve(ScalarNode, text, (True, False))  # type: ignore[no-untyped-call]
            if tag_of_form != node.tag:
                raise YamlTextError(f"{text[:_SHOWN]!r} is not a {kind}", _line(node))
        try:
            value: str | bool | int | float | None = self.construct_object(node)
            return value
        except (ValueError, IndexError):  # an empty text has no first character
            raise YamlTextError(f"{text[:_SHOWN]!r} is not a number", _line(node)) from None


def _refuse_excess(num_nodes: int, depth: int, line: int) -> None:
    if num_nodes > MAX_NODES:
        raise YamlTextError(f"more than {MAX_NODES:,} values and keys, including repetitions", line)
    if depth > MAX_DEPTH:
        raise YamlTextError(f"values are nested more than {MAX_DEPTH} levels deep", line)


def _sources(node: Node) -> list[MappingNode]:
    """Returns the mappings that `<<` names; the first takes precedence."""
    sources: list[Any] = node.value if isinstance(node, SequenceNode) else [node]
    for source in sources:
        if not isinstance(source, MappingNode):
            raise YamlTextError("<< needs a mapping or a list of mappings", _line(source))
    return sources


def _line(node: Node) -> int:
    return node.start_mark.line + 1


class _Dumper(yaml.SafeDumper):
    """Quotes texts that some YAML version would not read back as text; writes no aliases."""

    yaml_implicit_resolvers = _FORMS

    def represent_text(self, text: str) -> ScalarNode:
        style = None
        if not text.isprintable():
            style = '"'  # the only style with escapes; in other styles readers change some line breaks
        elif _OTHER_VERSIONS.fullmatch(text):
            style = "'"
        return self.represent_scalar(_STANDARD + "str", text, style=style)

    def represent_float(self, data: float) -> ScalarNode:
        node = super().represent_float(data)
        node.value = node.value.replace(".0e", "e")  # as Python and JSON write floats
        return node

    def ignore_aliases(self, data: object) -> bool:
        return True


_Dumper.add_representer(float, _Dumper.represent_float)
_Dumper.add_representer(str, _Dumper.represent_text)
_Dumper.add_representer(tuple, _Dumper.represent_list)
