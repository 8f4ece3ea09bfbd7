"""Packed rows hold the samples of the step, whatever ranks and widths there are."""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtrain.config import Config
from mtrain.core.batch.batch import Microbatch
from mtrain.data.loader import StepLoader

MakeConfig = Callable[..., Config]
WriteJsonl = Callable[[Sequence[dict[str, Any]]], Path]
Sequences = Counter[tuple[Any, ...]]

LETTERS = "abcdefghij"
TERMS = {"aggregation": "seq-mean-token-mean", "side_terms": {"all": {"aggregation": "sum"}}}


@pytest.fixture
def packed(make_config: MakeConfig, write_jsonl: WriteJsonl, word_tokenizer: Path) -> Callable[..., Config]:
    """Writes conversations of 3 to 11 positions, five of them held out; returns a function that builds a
    configuration."""
    lines = [
        {"prompt": letter, "response": " ".join(LETTERS[:count])} for letter in LETTERS for count in (1, 9, 3, 2, 5, 8)
    ]
    path = str(write_jsonl(lines))

    def make(packing: bool = True, **train: Any) -> Config:
        data = {
            "kind": "sft",
            "seq_length": 16,
            "train": [{"path": path}],
            "split": [0.8, 0.2, 0.0],
            "tokenizer": str(word_tokenizer),
            "packing": {} if packing else None,
        }
        return make_config(data, train={"global_batch_size": 8, "micro_batch_size": 1} | train, loss=TERMS)

    return make


def sequences(batches: Sequence[Microbatch]) -> Sequences:
    """Returns tokens, labels, positions, weights and shares of each sequence, without padding."""
    found: Sequences = Counter()
    for batch in batches:
        ids = np.arange(len(batch.tokens))[:, None] if batch.sequence_ids is None else batch.sequence_ids.numpy()
        is_text = (batch.tokens.numpy() > 0) & (np.ones_like(ids) > 0)
        for number in np.unique(np.broadcast_to(ids, is_text.shape)[is_text]):
            own = (ids == number) & is_text
            fields = [batch.tokens, batch.labels, batch.positions, *batch.weights.values()]
            fields += batch.denominator_weights.values()
            found[tuple(tuple(field.numpy()[own].tolist()) for field in fields)] += 1
    return found


@pytest.mark.parametrize("dp", [1, 2, 3, 4])
@pytest.mark.parametrize("train", [{}, {"micro_batch_size": 2}, {"tokens_per_micro_batch": 48}], ids=str)
def test_a_step_holds_the_samples_that_it_holds_unpacked(
    packed: Callable[..., Config], dp: int, train: dict[str, Any]
) -> None:
    alone, config = StepLoader(packed(packing=False), 0, 1), packed(**train)
    ranks = [StepLoader(config, rank, dp) for rank in range(dp)]
    for step in (0, 3, 9):
        parts = [rank.batches(step) for rank in ranks]
        assert len({len(part) for part in parts}) == 1, "every rank takes part in as many passes"
        batches = [batch for part in parts for batch in part]
        assert sequences(batches) == sequences(alone.batches(step))
        assert {tuple(batch.tokens.shape) for batch in batches} == {(config.train.micro_batch_size, config.row_width)}
        assert sum(batch.num_loss_tokens for batch in batches) == sum(b.num_loss_tokens for b in alone.batches(step))


def test_steps_have_as_many_rows_as_their_samples_need(packed: Callable[..., Config]) -> None:
    loader = StepLoader(packed(), 0, 1)
    counts = {step: len(loader.batches(step)) for step in range(12)}
    assert all(3 <= count < 8 for count in counts.values())
    assert len(set(counts.values())) > 1, "one step needs more than another"
    assert counts == {step: loader.plan(step).num_microbatches for step in counts}


@pytest.mark.parametrize("dp", [1, 2])
def test_validation_meets_every_sample_once(packed: Callable[..., Config], dp: int) -> None:
    sets = [StepLoader(packed(), rank, dp).held_out() for rank in range(dp)]
    alone = StepLoader(packed(packing=False), 0, 1).held_out()
    assert alone is not None
    passes = [list(held_out.batches()) for held_out in sets if held_out is not None]
    assert {len(own) for own in passes} == {alone.num_passes}
    for number, unpacked in enumerate(alone.batches()):
        assert len({len(own[number]) for own in passes}) == 1
        assert sequences([batch for own in passes for batch in own[number]]) == sequences(unpacked)
