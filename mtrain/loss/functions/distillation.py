"""Divergence from a frozen teacher: learns from its whole distribution, or keeps the model near a reference."""

from typing import Literal, assert_never

from mtrain.loss.pair import LossPair, TermInputs, needs_teacher, per_token, weigh


@per_token
@needs_teacher
def distillation_loss(
    inputs: TermInputs, direction: Literal["forward", "reverse"] = "forward", temperature: float = 1.0
) -> LossPair:
    """Weighs and sums the divergence between the teacher's and the model's distribution of each token, in nats.

    Two all-reduces over the tensor-parallel group. Labels play no role, but the weights do.

    Args:
        inputs: One microbatch, with the teacher's logits.
        direction: Direction of the divergence. forward is KL(teacher || model), which covers all that the teacher would
            say; reverse is KL(model || teacher), which stays within it.
        temperature: Divisor of both logits. The gradient shrinks with its square; where that is unwanted, give the term
            a coefficient of temperature squared.

    Source: Hinton et al. 2015; the reverse direction as in Gu et al. 2023 (MiniLLM).
    """
    # no mask is needed here: `weigh` drops masked tokens, and backward sets their gradient to 0
    teacher = inputs.teacher
    assert teacher is not None, "the objective is refused without a teacher"
    logits = inputs.logits
    match direction:
        case "forward":
            return weigh(logits.kl_divergence(teacher, temperature), inputs)
        case "reverse":
            return weigh(logits.reverse_kl_divergence(teacher, temperature), inputs)
        case _:
            assert_never(direction)
