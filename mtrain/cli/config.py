"""`mtrain config`: explains keys, and merges files and values."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mtrain.cli.arguments import split_arguments
from mtrain.cli.messages import one_message

if TYPE_CHECKING:
    from mtrain.config.keys import Key
    from mtrain.config.load import MergedContent


def config(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY... | CONFIG... [section.key=value...]",
            help="Keys or sections to explain, or YAML files and individual values to merge.",
            show_default=False,
        ),
    ] = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema, for completion in editors.")] = False,
) -> None:
    """Explains keys, or prints the merged configuration of files and values with the origin of each value."""
    with one_message():
        from mtrain.base.errors import ConfigError

        if schema:
            from mtrain.config.keys import editor_schema

            typer.echo(json.dumps(editor_schema(), indent=1))
            return
        if not arguments:
            raise ConfigError("no argument is given; name a key such as train.num_steps, or YAML files")
        if any(
            "=" in argument or Path(argument).suffix in (".yaml", ".yml") or Path(argument).exists()
            for argument in arguments
        ):
            from mtrain.config.load import read_merged

            lines = _resolved(read_merged(*split_arguments(arguments)))
        else:
            lines = iter([line for argument in arguments for line in _explained(argument)])
        for line in lines:
            typer.echo(line)


def _explained(name: str) -> list[str]:
    """Returns the lines on all keys with this name or ending, and on the keys inside a section."""
    from mtrain.base.errors import ConfigError
    from mtrain.config.keys import described_keys
    from mtrain.config.messages import unknown_key

    keys = {key.name: key for key in described_keys()}
    matches = [key for key in keys.values() if key.name == name or key.name.endswith(f".{name}")]
    if not matches:
        raise ConfigError(unknown_key(name))
    lines = [line for key in matches for line in (key.name, f"  {_facts(key)}", f"  {key.text}", "")]
    inside = [key for key in keys.values() for match in matches if match.is_section and key.name.startswith(match.name)]
    return lines + [f"  {key.name:<44}{_facts(key)}" for key in inside if key not in matches]


def _facts(key: "Key") -> str:
    unit = f", {key.unit}" if key.unit else ""
    if key.is_required:
        default = "required"
    else:
        default = "" if key.is_section else f"default {json.dumps(key.default)}"
    kinds = f"kind {' or '.join(key.kinds)} only" if key.kinds else ""
    return "; ".join(part for part in (f"{key.type}{unit}", default, kinds) if part)


def _resolved(merged: "MergedContent") -> Iterator[str]:
    from mtrain.config.keys import described_keys
    from mtrain.hf.configuration import resolved

    keys = {key.name: key for key in described_keys()}

    def origin(location: tuple[str, ...], value: Any) -> str:
        if (source := merged.origin(location)) is not None:
            return source
        key = keys.get(".".join(location))
        if location[0] == "model" and "hf" in merged.content.get("model", {}):
            return "model.hf, or the default"
        if key is None:
            return "default"
        default = list(key.default) if isinstance(key.default, tuple) else key.default
        return "default" if default == value else "follows from other keys"

    def lines(section: Mapping[str, Any], location: tuple[str, ...]) -> Iterator[str]:
        indent = "  " * len(location)
        for name, value in section.items():
            here = (*location, name)
            key = keys.get(".".join(here))
            if value and isinstance(value, dict) and key is not None and key.is_section:
                yield f"{indent}{name}:"
                yield from lines(value, here)
            else:
                yield f"{indent}{name}: {json.dumps(value, ensure_ascii=False)}  # {origin(here, value)}"

    yield from lines(merged.config(resolved).model_dump(mode="json"), ())
