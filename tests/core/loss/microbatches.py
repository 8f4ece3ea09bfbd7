"""Small term inputs on one process."""

import torch
from torch import Tensor

from mtrain.core.loss.pair import Extras, TermInputs
from mtrain.core.loss.vocab_parallel.logits import VocabParallelLogits

VOCAB = 11


def top_k_extras(teacher: Tensor, k: int) -> Extras:
    """Returns the likeliest tokens of [seq, batch, vocab] logits, as cached."""
    found = teacher.log_softmax(-1).topk(k).values, teacher.topk(k).indices.float()
    names = "topk_logprobs", "topk_ids"
    return Extras({f"{name}[{j}]": each[..., j].t() for name, each in zip(names, found, strict=True) for j in range(k)})


def term_inputs(
    weights: Tensor, seed: int = 0, denominator_weights: Tensor | None = None, top_k: int = 3
) -> TermInputs:
    """Draws float32 logits of a model and a teacher (and its likeliest tokens), and labels; without denominator
    weights, both kinds of weights are the same."""
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
        extras=top_k_extras(teacher, top_k),
    )
