"""Rules for drawing tokens, without torch."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mtrain.core.batch.numbers import whole_number


@dataclass(frozen=True)
class SamplingParams:
    """Rules for drawing tokens and ending an answer."""

    max_new_tokens: int = 64
    """Largest number of tokens to add."""
    temperature: float = 1.0
    """Divisor of the logits; 0 selects the likeliest token."""
    top_p: float = 1.0
    """Probability that the likeliest tokens must reach together; only these are drawn."""
    top_k: int = 0
    """Number of the likeliest tokens that can be drawn; 0: all."""
    seed: int = 0
    """Seed of the random numbers."""
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end the answer, each as its last token."""
    is_complete: Callable[[Sequence[int]], bool] | None = None
    """Function of an answer's token ids so far that says whether it is complete, for instance if it contains a stop
    text; the same on all ranks. None: only tokens end an answer."""
    num_likeliest: int = 0
    """Number of the likeliest tokens that are returned at each token's position."""
    log_probs_of_draw: bool = False
    """Whether log-probabilities are those of the distribution that tokens are drawn from, after temperature, top_k and
    top_p, instead of the model's own. At temperature 0, where nothing is drawn, they are always the model's."""

    def __post_init__(self) -> None:
        """Raises ValueError if a value is out of range."""
        rules = {
            "max_new_tokens must be a whole number of at least 1": _is_whole(self.max_new_tokens, 1),
            "temperature must be 0 or above": math.isfinite(self.temperature) and self.temperature >= 0,
            "top_p must be above 0 and at most 1": 0 < self.top_p <= 1,
            "top_k must be a whole number, 0 or above": _is_whole(self.top_k),
            "seed must be a whole number, 0 or above": _is_whole(self.seed),
            "num_likeliest must be a whole number, 0 or above": _is_whole(self.num_likeliest),
            "stop_token_ids must be whole numbers, 0 or above": all(map(_is_whole, self.stop_token_ids)),
        }
        broken = [f"{rule}, but is {getattr(self, rule.split()[0])}" for rule, holds in rules.items() if not holds]
        if broken:
            raise ValueError("; ".join(broken))
        # plain numbers, since a tensor equals its number but has another hash
        object.__setattr__(self, "stop_token_ids", frozenset(map(whole_number, self.stop_token_ids)))

    def ends(self, ids: Sequence[int]) -> bool:
        """Says whether the latest token ends an answer before it has max_new_tokens."""
        return ids[-1] in self.stop_token_ids or (self.is_complete is not None and self.is_complete(ids))


def _is_whole(value: object, least: int = 0) -> bool:
    number = whole_number(value)
    return number is not None and number >= least
