"""Configurations whose architecture may come from a Hugging Face folder; loads no torch."""

from collections.abc import Sequence
from typing import Any

from mtrain.config import Config
from mtrain.config.adapters import all_linear_in
from mtrain.config.load import Part, read_merged
from mtrain.hf.hub import revision_of, with_snapshots


def load_config(parts: Part | Sequence[Part], overrides: str | Sequence[str] = ()) -> Config:
    """Builds a configuration from `parts`, merged left to right, and `overrides`.

    Args:
        parts: One or more YAML paths and mappings such as `{"train": {"num_steps": 5}}`; later ones take precedence. A
            mapping may give your own loss function itself, `{"loss": {"function": focal_loss}}`, also with keywords
            bound by `functools.partial`.
        overrides: One or more texts of the form `section.key=value`.

    Raises:
        ConfigError: Values are wrong; the message has one line per fault, which starts with the dotted key or the file.
        DataError: The folder in model.hf cannot be read.
    """
    return read_merged(parts, overrides).config(resolved)


def notes_on(config: Config) -> list[str]:
    """Returns notes on the folder in `model.hf`.

    Raises:
        ConfigError: The run asks for exports that are impossible.
        DataError: The folder is damaged.
    """
    if config.checkpoint.export_hf_every_steps:
        from mtrain.hf.schema.registry import refuse_unexportable  # loads all families, which other runs do not need

        refuse_unexportable(config)
    if config.model.hf is None:
        return []
    from mtrain.hf.schema.description import notes_on_folder  # likewise

    revision = revision_of(config.model.hf)
    of_cache = [] if revision is None else [f"model.hf is {revision}, in the hub's cache"]
    return [*of_cache, *notes_on_folder(config.model.hf)]


def resolved(content: dict[Any, Any]) -> dict[Any, Any]:
    """Replaces names on the Hub by their snapshots in the cache; fills in the architecture from `model.hf`, and adapter
    targets that depend on the family.

    Raises:
        ConfigError: A key contradicts the folder.
        DataError: The folder cannot be read.
    """
    content = with_snapshots(content)
    if isinstance(model := content.get("model"), dict) and "hf" in model:
        from mtrain.hf.schema.description import with_architecture  # loads all families, which other runs do not need

        content = with_architecture(content)
    if all_linear_in(content) is not None:
        from mtrain.hf.schema.peft import with_fused_targets  # likewise

        content = with_fused_targets(content)
    return content
