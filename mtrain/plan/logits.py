"""How many tokens have logits at the same time."""

from __future__ import annotations

from typing import assert_never

from mtrain.config import Config
from mtrain.config.schema.loss import LossSection, own_functions

FEWEST_TOKENS = 1024
"""Of an automatic chunk: below, matrix products of GPUs wait for memory."""
LOGITS_AT_A_TIME = 2**26
"""Of an automatic chunk where that is more tokens: 256 MiB in float32."""


def chunk_tokens(section: LossSection, vocab_local: int) -> int | None:
    """Most tokens of a chunk; None where logits are to be whole.

    Args:
        section: Says which.
        vocab_local: Columns of the padded vocabulary on one rank.
    """
    match section.chunk_tokens:
        case int(tokens):
            return tokens
        case "auto":
            return max(FEWEST_TOKENS, LOGITS_AT_A_TIME // vocab_local)
        case "whole":
            return None
        case _:
            assert_never(section.chunk_tokens)


def tokens_at_once(config: Config, tokens: int, vocab_local: int) -> int:
    """Tokens of a microbatch whose logits exist at the same time, at most.

    Args:
        config: A function of the user's own counts as one that needs them whole.
        tokens: Of the microbatch on one rank.
        vocab_local: Columns of the padded vocabulary on one rank.
    """
    chunk = chunk_tokens(config.loss, vocab_local)
    needs_whole = config.loss.chunk_tokens == "auto" and bool(own_functions(config.loss))
    return tokens if chunk is None or needs_whole else min(tokens, chunk)
