"""`data.*`: where samples come from."""

from typing import Literal

from pydantic import Field

from mtrain.config.section import Section


class SourceSection(Section):
    """One corpus of a blend."""

    path: str
    """indexed: the prefix of the .bin/.idx pair. jsonl: the file."""
    weight: float = Field(1.0, gt=0)
    """Share of the samples, relative to the other sources."""


class DataSection(Section):
    """Pretraining on Megatron's .bin/.idx corpora, finetuning on JSONL, or random tokens."""

    kind: Literal["indexed", "jsonl", "mock"] = "indexed"
    seq_length: int = Field(gt=1)
    """Tokens in a sample."""
    train: tuple[SourceSection, ...] = ()
    valid: tuple[SourceSection, ...] = ()
    test: tuple[SourceSection, ...] = ()
    split: tuple[float, float, float] | None = None
    """Instead of valid and test: the shares of train, valid and test, by documents in file order (e.g. [0.9, 0.1, 0])."""
    tokenizer: str | None = None
    """A sentencepiece `.model`, a `tokenizer.json`, or a directory that holds one of them. jsonl needs it."""
    isolate_documents: bool = False
    """indexed: attention and positions start again at each document, and no token is predicted across an edge."""
    too_long: Literal["truncate", "drop", "refuse"] = "truncate"
    """jsonl: what happens to a sample of more than seq_length tokens."""
    prefetch_steps: int = Field(2, ge=0)
    """Global batches read ahead by a thread; 0 reads in the training loop."""
