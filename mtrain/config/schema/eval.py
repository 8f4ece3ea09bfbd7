"""`eval.*`: what a run is asked while it trains."""

from typing import Annotated

from pydantic import Field

from mtrain.config.schema import bounds
from mtrain.config.schema.section import Section, rule


class EvalSection(Section):
    """Prompts that the model continues while it trains; samples.jsonl in the run folder gets the answers.

    The run stays the same, bit for bit.
    """

    prompts: tuple[Annotated[str, Field(min_length=1)], ...] = Field((), max_length=1000)
    """Texts to continue, or what a user says."""
    prompts_file: Annotated[str | None, bounds.PATH] = Field(None, min_length=1)
    """Further ones: a line each; in a file that ends in .jsonl objects with `prompt`, or with `messages`."""
    chat: bool | None = None
    """Whether the run's chat template writes each text as what a user says; null: where the run has one."""
    interval_steps: Annotated[int | None, bounds.STEPS] = Field(None, gt=0)
    """null: whenever the run validates, as `valid` says."""
    max_new_tokens: Annotated[int, bounds.POSITIONS] = Field(64, gt=0)
    """Most tokens of an answer; it ends earlier at the end token."""
    temperature: float = Field(0.0, ge=0)
    """Logits are divided by it; 0 takes the likeliest token."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Only the likeliest tokens that together reach this probability are drawn from."""
    top_k: Annotated[int, bounds.VOCABULARY] = Field(0, ge=0)
    """Only so many of the likeliest tokens are drawn from; 0: all."""
    seed: Annotated[int, bounds.SEED] = Field(0, ge=0)
    """Of the drawing; the same numbers at every step."""

    @property
    def is_on(self) -> bool:
        """Whether something is asked."""
        return bool(self.prompts) or self.prompts_file is not None

    @rule
    def an_interval_has_prompts(self) -> str | None:
        if self.interval_steps is None or self.is_on:
            return None
        return f"interval_steps={self.interval_steps}, but there are no prompts; set eval.prompts or eval.prompts_file"
