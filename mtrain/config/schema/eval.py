"""`eval.*`: prompts that a run answers while it trains."""

from typing import Annotated

from pydantic import Field

from mtrain.config.schema import bounds
from mtrain.config.schema.section import Section, rule


class EvalSection(Section):
    """Prompts that the model continues while it trains; the answers go to samples.jsonl in the run folder.

    Training is not affected, bit for bit.
    """

    prompts: tuple[Annotated[str, Field(min_length=1)], ...] = Field((), max_length=1000)
    """Texts to continue, or messages of a user."""
    prompts_file: Annotated[str | None, bounds.PATH] = Field(None, min_length=1)
    """Path of a file with further prompts: one a line; in a .jsonl file, objects with `prompt` or `messages`. null: no
    file."""
    chat: bool | None = None
    """Whether the run's chat template writes each text as a message of the user; null: where the run has a template."""
    interval_steps: Annotated[int | None, bounds.STEPS] = Field(None, gt=0)
    """Number of steps between two answers; null: whenever the run validates, as `valid` says."""
    max_new_tokens: Annotated[int, bounds.POSITIONS] = Field(64, gt=0)
    """Largest number of tokens in an answer; it ends earlier at the end token."""
    temperature: float = Field(0.0, ge=0)
    """Number by which logits are divided; 0 takes the likeliest token."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Probability that the likeliest tokens to draw from reach together; 1 draws from all."""
    top_k: Annotated[int, bounds.VOCABULARY] = Field(0, ge=0)
    """Number of the likeliest tokens to draw from; 0 draws from all."""
    seed: Annotated[int, bounds.SEED] = Field(0, ge=0)
    """Seed of the drawing; the same numbers are drawn at every step."""

    @property
    def is_on(self) -> bool:
        """Says whether there are prompts."""
        return bool(self.prompts) or self.prompts_file is not None

    @rule
    def an_interval_has_prompts(self) -> str | None:
        if self.interval_steps is None or self.is_on:
            return None
        return f"interval_steps={self.interval_steps}, but there are no prompts; set eval.prompts or eval.prompts_file"
