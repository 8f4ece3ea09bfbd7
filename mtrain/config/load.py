"""YAML files and `key=value` overrides -> Config, and back.

Files are merged left to right, then the overrides; sections are merged key by key, lists are replaced. Relative paths
inside a configuration are relative to the working directory. Nothing is read from the environment, so the saved
configuration repeats the run anywhere.
"""

from __future__ import annotations

import hashlib
import io
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import GrammarParseError, OmegaConfBaseException
from pydantic import ValidationError

from mtrain.base.errors import ConfigError
from mtrain.base.files import write_atomically
from mtrain.config.kinds import before_another_kind, of_one_kind
from mtrain.config.messages import dotted, joined, readable, without_kinds
from mtrain.config.renamed import with_current_names
from mtrain.config.schema.root import Config
from mtrain.config.schema.section import BrokenRulesError
from mtrain.config.yaml_text import MAX_BYTES, MAX_DEPTH, RefusedTextError, refuse
from mtrain.hf.schema.description import with_architecture

COMMAND_LINE = "the command line"


@dataclass(frozen=True)
class Source:
    """What one file or one override says."""

    name: str
    content: dict[Any, Any]


def load_config(paths: Sequence[Path], overrides: Sequence[str]) -> Config:
    """The configuration that `paths`, merged left to right, and then `overrides` describe.

    Args:
        paths: YAML files.
        overrides: `section.key=value`; the value is YAML, so numbers, lists and mappings are possible.

    Raises:
        ConfigError: with everything that is wrong, one line each, starting with the dotted key or the file.
        DataError: the folder that model.hf names cannot be understood.
    """
    sources: list[Source] = []
    faults: list[str] = []
    readers = [partial(read_file, path) for path in paths] + [partial(read_override, text) for text in overrides]
    for read in readers:
        try:
            sources.append(read())
        except ConfigError as fault:
            faults.append(str(fault))
    faults += [line for source in sources for line in _placeholders(source)]
    if faults:
        raise ConfigError(joined(faults))
    content = with_architecture(_merged(sources))
    try:
        return Config.model_validate(content)
    except ValidationError as error:
        raise ConfigError(joined(_messages(error, sources))) from None


def config_yaml(config: Config) -> str:
    """Every knob as YAML text, from which `load_config` makes an equal configuration.

    Raises:
        ConfigError: a text holds `${` or is `???`, which could not be read back.
    """
    content = config.model_dump()
    if faults := list(_placeholders(Source("the configuration", content))):
        raise ConfigError(joined(faults))
    text: str = OmegaConf.to_yaml(OmegaConf.create(content))
    return text


def config_hash(config: Config) -> str:
    """SHA-256 of `config_yaml`, in hexadecimal digits."""
    return hashlib.sha256(config_yaml(config).encode()).hexdigest()


def save_config(config: Config, path: Path) -> None:
    """Writes `config_yaml` to a file.

    Raises:
        ConfigError: as `config_yaml`.
        MachineError: the file cannot be written.
    """
    write_atomically(path, config_yaml(config))


def read_file(path: Path) -> Source:
    """One YAML file.

    Raises:
        ConfigError: it cannot be read, is no YAML, is empty or is not a mapping.
    """
    text = _text_of(path)
    content = _parse(text, str(path))
    if not content:
        raise ConfigError(f"{path}: the file is empty; fill it or leave it out")
    return Source(str(path), of_one_kind(with_current_names(content, str(path))))


def _text_of(path: Path) -> str:
    """The text of a file of a size that a person writes; neither a pipe nor a device, which may never end."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise ConfigError(f"{path}: this is a folder, but a YAML file is needed; name a file in it")
        if not stat.S_ISREG(mode):
            raise ConfigError(f"{path}: this is a pipe or a device, but a YAML file is needed; save it in a file")
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file; fix the path") from None
    except OSError as fault:
        raise ConfigError(f"{path}: the file cannot be read ({fault.strerror}); fix its name or permissions") from None
    except ValueError:  # NUL, or half a character
        raise ConfigError(f"{path}: no file can have such a name; fix the path") from None
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{path}: the file is larger than {MAX_BYTES:,} bytes; name a file that is a configuration")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as fault:
        raise ConfigError(f"{path}: byte {fault.start} is not UTF-8; save the file as UTF-8") from None


def read_override(text: str) -> Source:
    """One `section.key=value`.

    Raises:
        ConfigError: it has another form, or the value is no YAML.
    """
    key, separator, value = text.partition("=")
    parts = key.strip().split(".")
    if not separator or not all(parts):
        raise ConfigError(f"{text}: an override has the form section.key=value; fix it")
    if len(parts) > MAX_DEPTH:
        raise ConfigError(f"{text}: a key of {len(parts)} parts is none of a configuration; fix it")
    try:
        refuse(value)
        content = OmegaConf.to_container(OmegaConf.from_dotlist([f"{key.strip()}={value}"]), resolve=False)
    except RefusedTextError as fault:
        raise ConfigError(f"{text}: {fault}") from None
    except GrammarParseError:
        raise ConfigError(_no_interpolation(key, COMMAND_LINE)) from None
    except (yaml.YAMLError, OmegaConfBaseException, ValueError) as fault:  # ValueError: digits, surrogates
        raise ConfigError(f"{text}: the value cannot be read as YAML ({_first_line(fault)}); quote or fix it") from None
    assert isinstance(content, dict)
    return Source(COMMAND_LINE, with_current_names(content, COMMAND_LINE))


def _parse(text: str, name: str) -> dict[Any, Any]:
    try:
        is_mapping = refuse(text)
        content = OmegaConf.to_container(OmegaConf.load(io.StringIO(text)), resolve=False) if is_mapping else None
    except RefusedTextError as fault:
        raise ConfigError(f"{name}:{fault.line}: {fault}") from None
    except GrammarParseError as fault:
        raise ConfigError(_no_interpolation(str(fault.full_key), name)) from None
    except yaml.MarkedYAMLError as fault:
        line = f":{fault.problem_mark.line + 1}" if fault.problem_mark else ""
        raise ConfigError(f"{name}{line}: {fault.problem}; fix the YAML") from None
    except (yaml.YAMLError, OmegaConfBaseException, ValueError) as fault:  # ValueError: digits, surrogates
        raise ConfigError(f"{name}: {_first_line(fault)}; fix the YAML") from None
    if not isinstance(content, dict):
        raise ConfigError(
            f"{name}: sections with keys are needed (section: {{key: value}}), but it holds something else"
        )
    return content


def _merged(sources: Sequence[Source]) -> dict[Any, Any]:
    merged = DictConfig({})
    for source in sources:
        try:
            kept = before_another_kind(OmegaConf.to_container(merged, resolve=False), source.content)
            merged = OmegaConf.merge(DictConfig(kept), source.content)
        except (TypeError, OmegaConfBaseException) as fault:
            raise ConfigError(
                f"{source.name}: a key holds a mapping here and a list elsewhere ({_first_line(fault)}); lists are "
                "replaced as a whole, so give the complete list"
            ) from None
    content = OmegaConf.to_container(merged, resolve=False)
    assert isinstance(content, dict)
    return content


def _messages(error: ValidationError, sources: Sequence[Source]) -> Iterator[str]:
    for detail in error.errors(include_url=False):
        location = without_kinds(detail["loc"])
        origin = next((source.name for source in reversed(sources) if _holds(source.content, location)), None)
        is_rule = isinstance(detail.get("ctx", {}).get("error"), BrokenRulesError)  # may involve several files
        place = "" if is_rule or origin is None else f" (in {origin})"
        yield from (line + place for line in readable(detail))


def _holds(content: Any, location: tuple[int | str, ...]) -> bool:
    for part in location:
        try:
            content = content[part]
        except (KeyError, IndexError, TypeError):
            return False
    return bool(location)


def _placeholders(source: Source) -> Iterator[str]:
    """Yields a message for every text that OmegaConf would replace or take as missing, or that no file can hold."""
    for location, text in _texts(source.content, ()):
        if "${" in text:
            yield _no_interpolation(dotted(location), source.name)
        elif text == "???":
            yield f"{dotted(location)}: ??? stands for a missing value (in {source.name}); give the value"
        elif not _is_text(text):
            yield f"{dotted(location)}: {text!r} holds what no text can (NUL, or half a character); write it anew"


def _texts(content: object, location: tuple[int | str, ...]) -> Iterator[tuple[tuple[int | str, ...], str]]:
    match content:
        case str():
            yield location, content
        case dict():
            for key, value in content.items():
                if isinstance(key, str) and not _is_text(key):
                    yield (*location, key), key
                yield from _texts(value, (*location, key))
        case list() | tuple():
            for index, value in enumerate(content):
                yield from _texts(value, (*location, index))


def _is_text(text: str) -> bool:
    return "\0" not in text and not any("\ud800" <= character <= "\udfff" for character in text)


def _no_interpolation(key: str, name: str) -> str:
    return f"{key}: interpolation (${{...}}) would not repeat the run elsewhere (in {name}); write the value itself"


def _first_line(fault: Exception) -> str:
    return str(fault).strip().partition("\n")[0]
