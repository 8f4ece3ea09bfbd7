"""What ranks do in the tests of conversions."""

from pathlib import Path
from typing import Any

from mtrain.checkpoint.directory import load_entry
from mtrain.config import Config
from mtrain.convert.logits import our_logits, random_tokens
from mtrain.convert.target import source_of
from mtrain.mcore.checkpoint import load_frozen_weights
from mtrain.mcore.gather import gather_whole, parameter_shards
from mtrain.mcore.groups import Groups
from mtrain.mcore.model import build_frozen_model


def logits(groups: Groups, checkpoint: Path) -> Any:
    """[batch, seq, vocab_size] of an imported checkpoint, as numpy."""
    model = source_of(checkpoint).model
    return our_logits(load_entry(checkpoint), model, groups, random_tokens(model.vocab_size)).numpy()


def weights(groups: Groups, checkpoint: Path, config: Config) -> dict[str, Any]:
    """All weights by global name after loading; on rank 0, else empty."""
    chunks = build_frozen_model(config, groups)
    load_frozen_weights(load_entry(checkpoint), chunks, groups, config)
    whole = gather_whole(parameter_shards(chunks, groups)) or {}
    return {name: value.float().numpy() for name, value in whole.items()}
