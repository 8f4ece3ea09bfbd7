"""Number of tokens whose logits exist at the same time."""

from __future__ import annotations

from typing import assert_never

from mtrain.config import Config
from mtrain.config.schema.loss import LossSection, own_functions

FEWEST_TOKENS = 1024
"""Fewest tokens of an automatic chunk: below, matrix products of GPUs wait for memory."""
LOGITS_AT_A_TIME = 2**26
"""Number of logits in an automatic chunk where that gives more tokens: 256 MiB in float32."""

LOGITS_AT_A_TIME_ON_CPU = 2**21
"""Number of logits in an automatic chunk on a CPU, 8 MiB in float32: malloc reuses such memory, while a larger piece is
new, and zeroed by the kernel, each time."""
FEWEST_TOKENS_ON_CPU = 256
"""Fewest tokens of a chunk on a CPU; below, chunks are those of GPUs, since each chunk reads and writes the table's
whole gradient."""


def chunk_tokens(section: LossSection, vocab_local: int, on_cpu: bool) -> int | None:
    """Returns the most tokens of a chunk; None where all logits are made at once.

    Args:
        section: Section of the loss, which has the choice.
        vocab_local: Columns of the padded vocabulary on one rank.
        on_cpu: Whether the run computes on a CPU.
    """
    match section.chunk_tokens:
        case int(tokens):
            return tokens
        case "auto" if on_cpu and LOGITS_AT_A_TIME_ON_CPU // vocab_local >= FEWEST_TOKENS_ON_CPU:
            return LOGITS_AT_A_TIME_ON_CPU // vocab_local
        case "auto":
            return max(FEWEST_TOKENS, LOGITS_AT_A_TIME // vocab_local)
        case "whole":
            return None
        case _:
            assert_never(section.chunk_tokens)


def tokens_at_once(config: Config, tokens: int, vocab_local: int) -> int:
    """Returns the most tokens of a microbatch whose logits exist at the same time.

    Args:
        config: Configuration of the run; a loss function of the user's own counts as one that needs all logits at once.
        tokens: Number of tokens of the microbatch on one rank.
        vocab_local: Columns of the padded vocabulary on one rank.
    """
    chunk = chunk_tokens(config.loss, vocab_local, on_cpu=config.train.device == "cpu")
    needs_whole = config.loss.chunk_tokens == "auto" and bool(own_functions(config.loss))
    if chunk is None or needs_whole or chunk >= tokens:
        return tokens
    num_chunks = -(-tokens // chunk)  # of about equal length (mtrain/loss/vocab_parallel/chunks.py)
    return -(-tokens // num_chunks)
