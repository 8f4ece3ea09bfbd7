"""What is refused in a YAML text before it becomes values: depth, aliases, tags, and numbers that YAML 1.1 misreads.

The text is looked at as a stream of events, so that neither depth nor aliases cost more than the text is long.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

import yaml

MAX_BYTES = 2**20
MAX_NODES = 10_000
"""Values and keys of a text, those that aliases repeat counted each time; OmegaConf takes no more."""
MAX_DEPTH = 50
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_TAGS = (None, "!", "tag:yaml.org,2002:str", *_NUMBERS)
"""All that a configuration needs; PyYAML's readers of others raise whatever comes (`!!timestamp x`, `!!bool x`)."""
_NOTHING = ("", "~", "null", "Null", "NULL")
_BASE_60 = re.compile(r"[-+]?\d[\d_]*(:[0-5]?\d)+(\.[\d_]*)?")
_BASE_8 = re.compile(r"[-+]?0[0-7_]+")
_LONG = re.compile(r"[-+]?(0x|0b)?[\da-fA-F_]{41,}")


class RefusedTextError(ValueError):
    """The text is YAML, but no configuration should hold it."""

    def __init__(self, message: str, event: yaml.Event) -> None:
        super().__init__(message)
        self.line = event.start_mark.line + 1 if event.start_mark else 1


@dataclass
class _Open:
    """A mapping or list whose end has not come yet, or a finished one that an anchor names."""

    anchor: str | None
    num_nodes: int = 1
    """With all that stands in it."""
    height: int = 1
    """Of the nested mappings and lists."""


@dataclass
class _Reader:
    """Counts nodes and depth, aliases as what they repeat."""

    parents: list[_Open] = field(default_factory=lambda: [_Open(None, 0, 0)])
    named: dict[str, _Open] = field(default_factory=dict)

    def add(self, node: _Open, event: yaml.Event) -> None:
        """Adds a finished node to the one that holds it."""
        holder = self.parents[-1]
        holder.num_nodes += node.num_nodes
        holder.height = max(holder.height, node.height + 1)
        if node.anchor is not None:
            self.named[node.anchor] = node
        if sum(parent.num_nodes for parent in self.parents) > MAX_NODES:
            raise RefusedTextError(f"more than {MAX_NODES:,} values and keys, repeated ones counted", event)

    def begin(self, event: yaml.CollectionStartEvent) -> None:
        """Goes into a mapping or list."""
        self.parents.append(_Open(event.anchor))
        self.refuse_depth(0, event)

    def end(self, event: yaml.Event) -> None:
        """Leaves it."""
        self.add(self.parents.pop(), event)

    def repeat(self, event: yaml.AliasEvent) -> None:
        """Adds what an alias names."""
        if any(parent.anchor == event.anchor for parent in self.parents):
            raise RefusedTextError(f"*{event.anchor} stands inside of what it repeats", event)
        known = self.named.get(event.anchor or "", _Open(None))  # an unknown one is refused by the loader
        self.refuse_depth(known.height, event)
        self.add(_Open(None, known.num_nodes, known.height), event)

    def refuse_depth(self, height: int, event: yaml.Event) -> None:
        """Raises RefusedTextError where `height` more levels are too many here."""
        if len(self.parents) + height > MAX_DEPTH:
            raise RefusedTextError(f"values are nested more than {MAX_DEPTH} deep", event)


def refuse(text: str) -> bool:
    """Refuses what no configuration should hold.

    Returns:
        Whether the text is a mapping, or nothing: OmegaConf would read a single quoted text as YAML once more, unseen.

    Raises:
        RefusedTextError: as this module's first line says.
        yaml.YAMLError: the text is no YAML.
    """
    reader, is_mapping = _Reader(), True
    for event in yaml.parse(text, Loader=_LOADER):
        tag = getattr(event, "tag", None)  # of the start of a value; ends and aliases have none
        if tag not in _TAGS:
            raise RefusedTextError(f"no configuration needs the tag {tag}; remove it", event)
        if len(reader.parents) == 1 and isinstance(event, yaml.ScalarEvent | yaml.SequenceStartEvent):
            is_mapping = isinstance(event, yaml.ScalarEvent) and event.implicit[0] and event.value in _NOTHING
        match event:
            case yaml.ScalarEvent():
                refuse_scalar(event)
                reader.add(_Open(event.anchor, 1, 0), event)
            case yaml.CollectionStartEvent():
                reader.begin(event)
            case yaml.CollectionEndEvent():
                reader.end(event)
            case yaml.AliasEvent():
                reader.repeat(event)
    return is_mapping


def refuse_scalar(event: yaml.ScalarEvent) -> None:
    """Refuses numbers that are not what they look like.

    Raises:
        RefusedTextError: YAML 1.1 reads the value in base 60 or 8, or it has more digits than any number needs.
    """
    is_number = event.implicit[0] if event.tag is None else event.tag in _NUMBERS
    if not is_number:
        return
    for form, meaning in _MISREAD:
        if form.fullmatch(event.value):
            raise RefusedTextError(meaning(event.value), event)


_MISREAD: tuple[tuple[re.Pattern[str], Callable[[str], str]], ...] = (
    (_BASE_60, lambda value: f"YAML reads {value} as a number in base 60; write the number, or quote a text"),
    (_BASE_8, lambda value: f"YAML reads {value} as a number in base 8; leave the first 0 out, or quote a text"),
    (
        _LONG,
        lambda value: f"{value[:20]}... is a number of {len(value):,} digits; write a smaller one, or quote a text",
    ),
)
