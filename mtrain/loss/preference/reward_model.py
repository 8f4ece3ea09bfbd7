"""Reward models: a head that rates an answer with one number."""

from torch.nn.functional import logsigmoid

from mtrain.loss.preference.scores import PreferenceValue, ScoredSequences, preference_loss


@preference_loss(needs_reference=False, scores_by_head=True)
def reward_model_loss(sequences: ScoredSequences, center_rewards_coefficient: float = 0.0) -> PreferenceValue:
    """Computes -log sigmoid(chosen - rejected - margin) of each pair.

    This is the negative log-likelihood of the preferences under the model of Bradley and Terry, with the head's numbers
    as strengths.

    Args:
        sequences: Chosen and rejected sequences, in pairs.
        center_rewards_coefficient: Coefficient of the additional summand (chosen + rejected)^2, which pulls the rewards
            of a pair to a mean of 0: the likelihood depends on their difference alone.

    Source: Ouyang et al. 2022, equation 1; margins as in Touvron et al. 2023 (Llama 2), equation 2; centering as in
    Eisenstein et al. 2023, equation 2. Names as in TRL's RewardTrainer.
    """
    pairs = sequences.pairs()
    chosen, rejected = pairs.chosen.scores, pairs.rejected.scores
    losses = -logsigmoid(chosen - rejected - pairs.chosen.margins)
    losses = losses + center_rewards_coefficient * (chosen + rejected) ** 2
    return sequences.value_of_pairs(losses, pairs, (chosen, rejected))
