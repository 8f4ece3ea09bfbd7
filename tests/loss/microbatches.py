"""Small term inputs on one process."""

import torch
from torch import Tensor

from mtrain.loss.pair import TermInputs
from mtrain.loss.vocab_parallel.logits import VocabParallelLogits

VOCAB = 11


def term_inputs(weights: Tensor, seed: int = 0, denominator_weights: Tensor | None = None) -> TermInputs:
    """Random float32 logits of a model and a teacher, and labels; both kinds of weights are alike by default."""
    generator = torch.Generator().manual_seed(seed)
    batch, seq = weights.shape
    logits = torch.randn(seq, batch, VOCAB, generator=generator).requires_grad_()
    tokens = torch.randint(VOCAB, (batch, seq), generator=generator)
    teacher = torch.randn(seq, batch, VOCAB, generator=torch.Generator().manual_seed(seed + 1000))
    return TermInputs(
        logits=VocabParallelLogits(logits, None, 0, VOCAB),
        labels=torch.randint(VOCAB, (batch, seq), generator=generator),
        weights=weights.float(),
        denominator_weights=(weights if denominator_weights is None else denominator_weights).double(),
        tokens=tokens,
        teacher=VocabParallelLogits(teacher, None, 0, VOCAB),
    )
