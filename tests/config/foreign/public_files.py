"""Published configuration files of other programs, translated; `python -m tests.config.foreign.public_files` writes
docs/start/translated-files.md, and a test compares."""

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from mtrain.base.errors import ConfigError
from mtrain.config import Config
from mtrain.config.foreign.axolotl import from_axolotl
from mtrain.config.foreign.llamafactory import from_llamafactory
from mtrain.config.foreign.megatron_bridge import from_megatron_bridge
from mtrain.config.foreign.torchtitan import from_torchtitan
from mtrain.config.foreign.translation import Translation
from mtrain.config.foreign.trl import from_trl
from mtrain.hf.configuration import resolved
from tests.config.samples import content
from tests.paths import DOCS

FOLDER = Path(__file__).parent / "public"
PAGE = DOCS / "start" / "translated-files.md"
COMMAND = "python -m tests.config.foreign.public_files"
_VERBS: dict[str, Callable[[Sequence[str]], Translation]] = {
    "axolotl": from_axolotl,
    "llamafactory": from_llamafactory,
    "megatron-bridge": from_megatron_bridge,
    "torchtitan": from_torchtitan,
    "trl": from_trl,
}
_MISSING = ("model", "run", "train.num_steps", "data", "optimizer.lr")
"""Keys that a translation may leave to the user."""


class PublicFile(NamedTuple):
    """A published file, and the words before it on the command line."""

    verb: str
    name: str
    settings: Mapping[str, Any]
    words: Sequence[str]

    def write(self, folder: Path) -> Path:
        """Writes the file in the program's format."""
        path = folder / Path(self.name).name
        if path.suffix == ".toml":
            path.write_text("\n".join(_toml(self.settings, "")))
        else:
            path.write_text(yaml.safe_dump(dict(self.settings)))
        return path

    def translated(self, folder: Path) -> Translation:
        """Translates the file.

        Raises:
            ConfigError: The program or `mtrain check` refuses it.
        """
        return _VERBS[self.verb]([*self.words, str(self.write(folder))]).checked(resolved)


def _toml(section: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for name, value in section.items():
        if isinstance(value, Mapping):
            yield from _toml(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name} = {json.dumps(value)}"


def public_files() -> list[PublicFile]:
    """Reads the files of all programs."""
    return [
        PublicFile(verb, name, entry["settings"], entry.get("words", ()))
        for verb in _VERBS
        for name, entry in yaml.safe_load((FOLDER / f"{verb}.yaml").read_text()).items()
    ]


def completed(found: Translation) -> Config:
    """Returns the configuration in the written file, completed with the keys that it leaves to the user.

    Raises:
        ConfigError: It leaves more to the user than names of places and a model.
    """
    read: dict[str, Any] = yaml.safe_load("\n".join(found.lines()))
    if more := [line for line in found.missing if not line.startswith(_MISSING)]:
        raise ConfigError("\n".join(more))
    for section, keys in (content(data__kind="mock") | {"model": _model(read.get("layout", {}))}).items():
        if section == "model" and (read.get("model", {}).pop("hf", None) or "num_layers" not in read.get("model", {})):
            read["model"] = keys | read.get("model", {})
        elif section not in read:
            read[section] = keys
    read["model"].pop("vision", None)  # sizes of its tower come from a folder
    read["data"].pop("images", None)
    read["run"].setdefault("dir", "runs/x")
    read["data"].setdefault("seq_length", 64)
    if read["data"].get("kind") == "sft":
        read["data"] = {"tokenizer": "tokenizer", "train": [{"path": "a.jsonl"}]} | read["data"]
    if "num_epochs" not in read["train"]:
        read["train"].setdefault("num_steps", 1000)
    return Config.model_validate(read)


def _model(layout: Mapping[str, int]) -> dict[str, Any]:
    """Returns a model that fits the layout, with experts if the layout divides experts."""
    heads = 8 * layout.get("tp", 1)
    model = {"num_layers": 64, "hidden_size": 64 * heads, "ffn_hidden_size": 128 * heads, "num_attention_heads": heads}
    experts = {"num_experts": 8 * layout.get("ep", 1), "top_k": 2, "ffn_hidden_size": 64 * layout.get("etp", 1)}
    has_experts = layout.get("ep", 1) > 1 or layout.get("etp", 1) > 1
    return {**model, "vocab_size": 1024, **({"experts": experts} if has_experts else {})}


def lines() -> Iterator[str]:
    """Yields the lines of the page."""
    yield "# Published files, translated"
    yield ""
    yield f"<!-- Written by `{COMMAND}`; a test compares. Change that, not this page. -->"
    yield ""
    yield (
        "What `mtrain from` makes of published configurations: how many settings are carried over, which ones cannot "
        "be, and how many mean something else here or do not affect training. The header of a translated file names "
        "them all."
    )
    verb = None
    for file in public_files():
        if file.verb != verb:
            verb = file.verb
            yield from ("", f"## `mtrain from {verb}`", "")
            yield "| file | carried over | not carried over | differs | without effect |"
            yield "|---|---|---|---|---|"
        with tempfile.TemporaryDirectory() as folder:
            try:
                found = file.translated(Path(folder))
            except ConfigError as refusal:
                yield f"| `{file.name}` | refused: {str(refusal).splitlines()[0]} | | | |"
                continue
        lost = ", ".join(dict.fromkeys(line.split("=")[0].split(":")[0] for line in found.lost))
        counts = (len(found.carried()), lost or "nothing", len(found.notes), len(found.without_effect))
        yield f"| `{file.name}` | {counts[0]} | {counts[1]} | {counts[2]} | {counts[3]} |"


if __name__ == "__main__":
    PAGE.write_text("\n".join(lines()) + "\n")
