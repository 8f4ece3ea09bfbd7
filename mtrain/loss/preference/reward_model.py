"""Reward models: a head whose one number says how good an answer is."""

from torch.nn.functional import logsigmoid

from mtrain.loss.preference.scores import PreferenceValue, ScoredSequences, preference_loss


@preference_loss(needs_reference=False, scores_by_head=True)
def reward_model_loss(sequences: ScoredSequences, center_rewards_coefficient: float = 0.0) -> PreferenceValue:
    """-log sigmoid(chosen - rejected - margin): the likelihood of the preferences under the model of Bradley and Terry,
    with the head's numbers as strengths.

    Args:
        sequences: Pairs.
        center_rewards_coefficient: Of (chosen + rejected)^2 beside it, which pulls the rewards of a pair to a mean of
            0: the likelihood knows their difference alone.

    Source: Ouyang et al. 2022, equation 1; margins as in Touvron et al. 2023 (Llama 2), equation 2; centering as in
    Eisenstein et al. 2023, equation 2. Names as in TRL's RewardTrainer.
    """
    pairs = sequences.pairs()
    chosen, rejected = pairs.chosen.scores, pairs.rejected.scores
    losses = -logsigmoid(chosen - rejected - pairs.chosen.margins)
    losses = losses + center_rewards_coefficient * (chosen + rejected) ** 2
    return sequences.value_of_pairs(losses, pairs, (chosen, rejected))
