"""Configurations whose architecture a folder in Hugging Face's layout may describe; loads no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mtrain.config import Config
from mtrain.config.adapters import all_linear_in
from mtrain.config.load import Part, read_given


def load_config(parts: Part | Sequence[Part], overrides: str | Sequence[str] = ()) -> Config:
    """Builds the configuration that `parts`, merged left to right, and then `overrides` describe.

    Args:
        parts: Paths of YAML files and mappings such as `{"train": {"num_steps": 5}}`, in any mixture, of which later
            ones take precedence; or one alone.
        overrides: Texts of the form `section.key=value`, as `read_given` takes them.

    Raises:
        ConfigError: A value is wrong; the message has one line for each fault, starting with the dotted key or the
            file.
        DataError: The folder that model.hf names cannot be understood.
    """
    return read_given(parts, overrides).config(resolved)


def notes_on(config: Config) -> list[str]:
    """Returns notes on the folder that `model.hf` names; empty where it names none.

    Raises:
        ConfigError: Exports are asked for that cannot be made.
        DataError: The folder is damaged.
    """
    if config.checkpoint.export_hf_every_steps:
        from mtrain.hf.schema.registry import refuse_unexportable  # all families, which other runs do without

        refuse_unexportable(config)
    if config.model.hf is None:
        return []
    from mtrain.hf.schema.description import notes_on_folder  # likewise

    return notes_on_folder(config.model.hf)


def resolved(content: dict[Any, Any]) -> dict[Any, Any]:
    """Fills in the architecture that `model.hf` names, and the adapter's targets that follow from the family.

    Raises:
        ConfigError: A key does not agree with the folder.
        DataError: The folder cannot be understood.
    """
    if isinstance(model := content.get("model"), dict) and "hf" in model:
        from mtrain.hf.schema.description import with_architecture  # all families, which other runs do without

        content = with_architecture(content)
    if all_linear_in(content) is not None:
        from mtrain.hf.schema.peft import with_fused_targets  # likewise

        content = with_fused_targets(content)
    return content
