"""Conversion of YAML files and `key=value` overrides to a `Config`, and back.

Files are merged left to right, then the overrides; sections are merged key by key, lists are replaced. Relative paths
start at the working directory. No value comes from the environment, so the saved configuration repeats the run
anywhere.
"""

import hashlib
import stat
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any, TypeAlias

from pydantic import ValidationError

from mtrain.base.errors import ConfigError
from mtrain.base.files import write_atomically
from mtrain.base.steady_files import retried
from mtrain.base.yaml_text import (
    MAX_BYTES,
    MAX_DEPTH,
    Location,
    NotYamlError,
    YamlText,
    YamlTextError,
    read_yaml,
    yaml_text,
)
from mtrain.config.kinds import before_another_kind, of_one_kind
from mtrain.config.messages import SCRIPTS, dotted, joined, not_a_script, readable, without_kinds
from mtrain.config.renamed import with_current_names
from mtrain.config.schema.root import Config
from mtrain.config.schema.section import BrokenRulesError

COMMAND_LINE = "the command line"


@dataclass(frozen=True)
class Source:
    """Content of one file or one override."""

    name: str
    content: dict[Any, Any]
    lines: Mapping[Location, int] = field(default_factory=dict)
    """Line, counted from 1, of each key in a file; empty for an override."""

    def origin(self, location: Location) -> str:
        """Returns `FILE:LINE` of a value, or of the nearest enclosing section if the key was renamed."""
        known = (location[:size] for size in range(len(location), 0, -1) if location[:size] in self.lines)
        return next((f"{self.name}:{self.lines[nearest]}" for nearest in known), self.name)


Resolve: TypeAlias = Callable[[dict[Any, Any]], dict[Any, Any]]
"""Fills in keys that follow from folders named in the sections, such as `model.hf`."""


def whole(content: dict[Any, Any]) -> dict[Any, Any]:
    """Returns the sections unchanged; a `Resolve` for content that names no folder."""
    return content


@dataclass(frozen=True)
class MergedContent:
    """Merged content of files and overrides, without defaults."""

    content: dict[Any, Any]
    """Sections with the values of the YAML texts."""
    sources: tuple[Source, ...]

    def origin(self, location: Location) -> str | None:
        """Returns the origin of the effective value, FILE:LINE or the command line; None if no source has the key."""
        return _origin(self.sources, location)

    def config(self, resolve: Resolve) -> Config:
        """Builds the configuration that the content describes.

        Args:
            resolve: Fills in keys from folders that the content names; `whole` for complete content.

        Raises:
            ConfigError: A value is wrong or missing; one line per error.
            DataError: A folder that the content names cannot be interpreted.
        """
        try:
            return Config.model_validate(resolve(self.content))
        except ValidationError as error:
            raise ConfigError(joined(_messages(error, self.sources))) from None


Part: TypeAlias = Path | str | Mapping[str, Any]
"""Path of a YAML file, or sections with their keys."""


def read_merged(parts: Part | Sequence[Part], overrides: str | Sequence[str] = ()) -> MergedContent:
    """Reads `parts`, merges them left to right, and then applies `overrides`.

    Args:
        parts: One or more paths of YAML files and mappings; a mapping may give a loss function itself as `function`.
        overrides: Texts of the form `section.key=value`; the value is YAML, so it may be a number, list or mapping.

    Raises:
        ConfigError: A file or an override cannot be read; one line per error.
    """
    sources: list[Source] = []
    faults: list[str] = []
    files = [parts] if isinstance(parts, str | Path | Mapping) else _listed(parts, "paths and mappings")
    texts = [overrides] if isinstance(overrides, str) else _listed(overrides, "overrides in a list")
    readers = [partial(_read_part, number, part) for number, part in enumerate(files, start=1)]
    readers += [partial(read_override, text) for text in texts]
    for read in readers:
        try:
            sources.append(read())
        except ConfigError as fault:
            faults.append(str(fault))
    faults += [line for source in sources for line in _placeholders(source)]
    if faults:
        raise ConfigError(joined(faults))
    return MergedContent(_merged(sources), tuple(sources))


def with_overrides(sections: dict[Any, Any], overrides: Sequence[str]) -> MergedContent:
    """Applies `overrides`, of the form `section.key=value`, to sections that no file contains.

    Raises:
        ConfigError: An override cannot be read.
    """
    sources = (Source("the model", sections), *(read_override(text) for text in overrides))
    return MergedContent(_merged(sources), sources)


def _listed(value: Any, needed: str) -> list[Any]:
    if isinstance(value, Sequence):
        return list(value)
    raise ConfigError(f"a configuration is read from {needed}, but this is of type {type(value).__name__}")


def _read_part(number: int, part: Any) -> Source:
    if isinstance(part, Mapping):
        return Source(f"mapping {number}", _plain(part))
    if isinstance(part, str | Path):
        return read_file(Path(part))
    raise ConfigError(
        f"part {number} of the configuration is of type {type(part).__name__}, but must be the path of a YAML file, or "
        "a mapping such as {'train': {'num_steps': 5}}"
    )


def _plain(value: Any) -> Any:
    """Returns what a YAML file would hold: functions by their names, the keywords of a partial as its options."""
    if isinstance(value, Mapping):
        plain = {key: _plain(item) for key, item in value.items()}
        if isinstance(bound := value.get("function"), partial):
            if bound.args:
                raise ConfigError(
                    f"function: functools.partial binds {bound.args[0]!r} by position, but the first argument is the "
                    "microbatch; bind options by keyword"
                )
            plain |= {"function": _plain(bound.func), "options": {**_plain(bound.keywords), **plain.get("options", {})}}
        return plain
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, FunctionType):
        return f"{value.__module__}:{value.__qualname__}"
    return str(value) if isinstance(value, Path) else value


def config_yaml(config: Config) -> str:
    """Writes every key as YAML text, which `load_config` reads back as an equal configuration.

    Raises:
        ConfigError: A text contains `${` or is `???`, which `load_config` refuses.
    """
    content = config.model_dump()
    if faults := list(_placeholders(Source("the configuration", content))):
        raise ConfigError(joined(faults))
    return yaml_text(content)


def config_hash(config: Config) -> str:
    """Returns the SHA-256 of `config_yaml` as a hexadecimal string."""
    return hashlib.sha256(config_yaml(config).encode()).hexdigest()


def save_config(config: Config, path: Path) -> None:
    """Writes `config_yaml` to a file.

    Raises:
        ConfigError: A text contains `${` or is `???`, which `load_config` refuses.
        MachineError: The file cannot be written.
    """
    write_atomically(path, config_yaml(config))


def read_file(path: Path) -> Source:
    """Reads one YAML file.

    Raises:
        ConfigError: The file cannot be read, is not YAML, is empty or is not a mapping.
    """
    if path.suffix == ".toml":
        _refuse_foreign(path, read_mapping(path))
        raise ConfigError(
            f"{path}: this is TOML, but a YAML file is needed; `mtrain from torchtitan` translates torchtitan's"
        )
    read = _read_mapping(path)
    _refuse_foreign(path, read.content)
    content = of_one_kind(with_current_names(read.content, str(path)))
    return Source(str(path), content, read.lines)


def _refuse_foreign(path: Path, content: Mapping[Any, Any]) -> None:
    if set(content) <= Config.model_fields.keys():
        return
    from mtrain.config.foreign.keys import refuse_foreign  # here, because its tables take time to read

    if (message := refuse_foreign(path, content)) is not None:
        raise ConfigError(message)


def read_mapping(path: Path) -> dict[Any, Any]:
    """Reads another program's YAML, JSON or TOML file as it is.

    Raises:
        ConfigError: The file cannot be read, is empty or is not a mapping.
    """
    if path.suffix != ".toml":
        return dict(_read_mapping(path).content)
    try:
        content = tomllib.loads(_text_of(path))
    except tomllib.TOMLDecodeError as fault:
        raise ConfigError(f"{path}: {fault}; fix the TOML") from None
    if not content:
        raise ConfigError(f"{path}: the file is empty; fill it or leave it out")
    return content


def _read_mapping(path: Path) -> YamlText:
    text = _text_of(path)
    if path.suffix in SCRIPTS:
        raise ConfigError(not_a_script(str(path)))
    if path.suffix == ".py":
        raise ConfigError(
            f"{path}: this is a Python program, but a YAML file is needed; run the program with: "
            f"mtrain launch local -n RANKS {path}"
        )
    try:
        read = read_yaml(text)
    except YamlTextError as fault:
        if text.startswith("#!"):
            raise ConfigError(not_a_script(str(path))) from None
        line = "" if fault.line is None else f":{fault.line}"
        remedy = "; fix the YAML" if isinstance(fault, NotYamlError) else ""
        raise ConfigError(f"{path}{line}: {fault}{remedy}") from None
    if read.content is None or read.content == {}:
        raise ConfigError(f"{path}: the file is empty; fill it or leave it out")
    if not isinstance(read.content, dict):
        raise ConfigError(
            f"{path}: sections with keys are needed (section: {{key: value}}), but it holds something else"
        )
    return read


def _first_bytes(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MAX_BYTES + 1)


def _text_of(path: Path) -> str:
    """Returns the text of a file up to MAX_BYTES; refuses pipes and devices, which may never end."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise ConfigError(f"{path}: this is a folder, but a YAML file is needed; name a file in it")
        if not stat.S_ISREG(mode):
            raise ConfigError(f"{path}: this is a pipe or a device, but a YAML file is needed; save it in a file")
        data = retried(lambda: _first_bytes(path), path)
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file; fix the path") from None
    except OSError as fault:
        raise ConfigError(f"{path}: the file cannot be read ({fault.strerror}); fix its name or permissions") from None
    except ValueError:  # NUL, or half a character
        raise ConfigError(f"{path}: no file can have such a name; fix the path") from None
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{path}: the file is larger than {MAX_BYTES:,} bytes; name a configuration file")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as fault:
        raise ConfigError(f"{path}: byte {fault.start} is not UTF-8; save the file as UTF-8") from None


def read_override(text: str) -> Source:
    """Reads one `section.key=value`.

    Raises:
        ConfigError: The text has another form, or the value is not YAML.
    """
    if not isinstance(text, str):
        raise ConfigError(f"an override is of type {type(text).__name__}, but must be a text such as train.num_steps=5")
    key, separator, value = text.partition("=")
    parts = key.strip().replace("[", ".").replace("]", "").split(".")
    if not separator or not all(parts):
        raise ConfigError(f"{text}: an override has the form section.key=value; fix it")
    if len(parts) > MAX_DEPTH:
        raise ConfigError(f"{text}: no configuration key has {len(parts)} parts; fix it")
    try:
        content = read_yaml(value).content
    except NotYamlError as fault:
        raise ConfigError(f"{text}: the value cannot be read as YAML ({fault}); quote or fix it") from None
    except YamlTextError as fault:
        raise ConfigError(f"{text}: {fault}") from None
    for part in reversed(parts):
        content = {part: content}
    return Source(COMMAND_LINE, with_current_names(content, COMMAND_LINE))


_SETS = ("data", "valid")
"""Key with two forms, one set as a list and several by name; a later form replaces an earlier one."""


def _merged(sources: Sequence[Source]) -> dict[Any, Any]:
    merged: dict[Any, Any] = {}
    for source in sources:
        merged = _over(before_another_kind(merged, source.content), source.content, source, ())
    return merged


def _over(under: Mapping[Any, Any], over: Mapping[Any, Any], source: Source, location: Location) -> dict[Any, Any]:
    both = dict(under)
    for key, new in over.items():
        old, here = under.get(key), (*location, key)
        if isinstance(old, dict) and isinstance(new, dict):
            both[key] = _over(old, new, source, here)
        elif {type(old), type(new)} == {dict, list} and here != _SETS:
            one, other = ("mapping", "list") if isinstance(new, dict) else ("list", "mapping")
            raise ConfigError(
                f"{dotted(here)}: this is a {one} here (in {source.origin(here)}), but a {other} elsewhere; lists are "
                "replaced as a whole, so give the complete list"
            )
        else:
            both[key] = new
    return both


def _messages(error: ValidationError, sources: Sequence[Source]) -> Iterator[str]:
    for detail in error.errors(include_url=False):
        origin = _origin(sources, without_kinds(detail["loc"]))
        is_rule = isinstance(detail.get("ctx", {}).get("error"), BrokenRulesError)  # may involve several files
        suffix = "" if is_rule or origin is None else f" (in {origin})"
        yield from (line + suffix for line in readable(detail))


def _origin(sources: Sequence[Source], location: Location) -> str | None:
    return next((source.origin(location) for source in reversed(sources) if _holds(source.content, location)), None)


def _holds(content: Any, location: tuple[int | str, ...]) -> bool:
    for part in location:
        try:
            content = content[part]
        except (KeyError, IndexError, TypeError):
            return False
    return bool(location)


def _placeholders(source: Source) -> Iterator[str]:
    """Yields a message for `${...}` and `???`, which OmegaConf and Hydra would replace, and for unstorable texts."""
    for location, text in _texts(source.content, ()):
        if "${" in text:
            yield (
                f"{dotted(location)}: interpolation (${{...}}) would not repeat the run elsewhere "
                f"(in {source.origin(location)}); write the value itself"
            )
        elif text == "???":
            yield f"{dotted(location)}: ??? marks a missing value (in {source.origin(location)}); give the value"
        elif not _is_text(text):
            yield f"{dotted(location)}: {text!r} contains NUL or half a surrogate pair, which no text may; rewrite it"


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
