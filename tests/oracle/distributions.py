"""Token losses of whole distributions, straight from their definitions, in float64."""

import torch
import torch.nn.functional as F
from torch import Tensor


def smoothed_cross_entropy(logits: Tensor, labels: Tensor, label_smoothing: float) -> Tensor:
    """Returns the cross entropy with a target distribution that is written out: [length, vocab_size] -> [length]."""
    num_tokens = logits.shape[-1]
    target = torch.full_like(logits, label_smoothing / num_tokens)
    target = target + (1 - label_smoothing) * F.one_hot(labels, num_tokens).to(logits.dtype)
    return -(target * logits.log_softmax(-1)).sum(-1)


def entropy(logits: Tensor) -> Tensor:
    """Returns the entropy of each token's distribution: [length, vocab_size] logits -> [length]."""
    probabilities = logits.softmax(-1)
    return -(probabilities * probabilities.log()).sum(-1)


def top_k_divergence(
    logits: Tensor, extras: dict[str, Tensor], is_counted: Tensor, k: int, remainder: str = "bucket"
) -> Tensor:
    """Returns KL from k given probabilities and, as one more outcome, the rest: [length, vocab_size] -> [length]."""
    losses = []
    for place, log_probs in enumerate(logits.log_softmax(-1)):
        if not is_counted[place]:
            losses.append(logits.new_zeros(()))
            continue
        ids = [int(extras[f"topk_ids[{number}]"][place]) for number in range(k)]
        teacher = torch.stack([extras[f"topk_logprobs[{number}]"][place] for number in range(k)]).exp()
        others = [each for each in range(len(log_probs)) if each not in ids]
        model = log_probs[ids]
        if remainder == "bucket":
            teacher = torch.cat([teacher, 1 - teacher.sum()[None]])
            model = torch.cat([model, log_probs[others].logsumexp(0)[None]])
        target = torch.distributions.Categorical(probs=teacher).probs
        losses.append((target * (target.log() - model)).sum())
    return torch.stack(losses) if losses else logits.sum(-1)


def divergence(logits: Tensor, teacher_logits: Tensor, direction: str = "forward", temperature: float = 1.0) -> Tensor:
    """Returns KL(teacher || model), or the reverse: [length, vocab_size] logits each -> [length]."""
    model, teacher = (each / temperature for each in (logits, teacher_logits))
    first, second = (teacher, model) if direction == "forward" else (model, teacher)
    return (first.softmax(-1) * (first.softmax(-1).log() - second.softmax(-1).log())).sum(-1)
