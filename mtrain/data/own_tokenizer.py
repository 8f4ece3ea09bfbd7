"""Checks that a run uses the tokenizer that came with its initial weights."""

from __future__ import annotations

from pathlib import Path

from mtrain.base.errors import DataError
from mtrain.config import Config
from mtrain.hf.schema.registry import ORIGIN
from mtrain.hf.tokenizer.tokenizer import AddedTokens, Tokenizer, load_tokenizer


def check_own_tokenizer(config: Config, tokenizer: Tokenizer) -> None:
    """Refuses a tokenizer that gives other ids than the one stored with the weights: the model would read other words.

    Nothing is compared if no readable tokenizer lies with the weights, if `data.allow_other_tokenizer` is set, or in a
    run that resumes from its own checkpoint.
    """
    if config.data.allow_other_tokenizer or any(Path(config.run.dir, "checkpoints").glob("step_*")):
        return
    start = config.checkpoint.initialize_from
    places = [*([Path(config.model.hf)] if config.model.hf is not None else [])]
    places += [Path(start) / ORIGIN] if start is not None else []
    for place in places:
        own = _tokenizer_at(place, tokenizer.added)
        if own is not None and own.path.resolve() != tokenizer.path.resolve() and not own.encodes_like(tokenizer):
            raise DataError(
                f"data.tokenizer={config.data.tokenizer} gives other ids than {own.path}, which came with the weights, "
                f"so the model would read other words than it has learned; set data.tokenizer={place}, or "
                "data.allow_other_tokenizer=true to train with the other one"
            )


def _tokenizer_at(folder: Path, added: AddedTokens) -> Tokenizer | None:
    try:
        return load_tokenizer(folder, added) if folder.is_dir() else None
    except DataError:  # there is no tokenizer, or one that no run could use
        return None
