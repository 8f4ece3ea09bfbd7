"""Steps of samples and steps of packed rows, from a file to microbatches."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from mtrain.config import Config
from mtrain.data.loader import StepLoader
from mtrain.data.sources import Sources
from mtrain.data.steps import known_until, windows_in
from tests.data.step_contents import contents
from tests.messages import refuses

LETTERS = "abcdefghij"
NUM_SAMPLES = 60


@pytest.fixture
def config_of(
    make_config: Callable[..., Config],
    write_jsonl: Callable[[Sequence[dict[str, Any]]], Path],
    word_tokenizer: Path,
) -> Callable[..., Config]:
    """Writes 60 samples of 3 to 8 positions, for rows of 8."""
    answers = [" ".join(LETTERS[(i // 10**n) % 10] for n in range(2 + i % 6)) for i in range(NUM_SAMPLES)]
    path = write_jsonl([{"prompt": "a", "response": answer} for answer in answers])
    assert len(set(answers)) > NUM_SAMPLES / 2

    def config(packing: dict[str, Any] | None, **train: Any) -> Config:
        data = {"kind": "sft", "train": [{"path": str(path)}], "tokenizer": str(word_tokenizer), "packing": packing}
        made = make_config(data)
        return made.model_copy(update={"train": made.train.model_copy(update=train)})

    return config


def rows_of(config: Config, dp: int, step: int) -> Counter[tuple[tuple[int, ...], ...]]:
    """Counts tokens and labels of all rows of a step over all ranks, except rows without text."""
    found: Counter[tuple[tuple[int, ...], ...]] = Counter()
    for rank in range(dp):
        for batch in StepLoader(config, rank, dp).batches(step):
            pairs = zip(batch.tokens.tolist(), batch.labels.tolist(), strict=True)
            found.update((tuple(tokens), tuple(labels)) for tokens, labels in pairs if any(tokens))
    return found


ROWS = {"batch": "rows", "window": 20}


def test_what_data_are_called_tells_the_windows_of_the_past_from_those_to_come(
    config_of: Callable[..., Config],
) -> None:
    def called(**more: Any) -> str:
        return StepLoader(config_of({**ROWS, **more}, global_batch_size=6, micro_batch_size=1), 0, 1).fingerprint

    plain, later = called(), called(later=[{"from_step": 3, "window": 12}, {"from_step": 9, "window": 30}])
    assert windows_in(later) == (6, 8, 20, ((3, 12), (9, 30)), False)
    assert plain != later
    assert known_until(later, 3) == known_until(plain, 3) == plain
    assert known_until(later, 4) == known_until(later, 9) == called(later=[{"from_step": 3, "window": 12}])
    assert known_until(later, 10) == later
    for wrong in ([{"from_step": 3, "window": 12}] * 2, [{"from_step": 4, "window": 1}, {"from_step": 3, "window": 1}]):
        with refuses(ValueError):
            config_of({**ROWS, "later": wrong})
    with refuses(ValueError, "batch=sequences"):
        config_of({"batch": "sequences", "later": [{"from_step": 3, "window": 12}]})
    with refuses(ValueError, "across_epochs=true", "batch=sequences"):
        config_of({"batch": "sequences", "across_epochs": True})


@pytest.mark.parametrize("packing", [{"batch": "sequences"}, ROWS], ids=str)
def test_ranks_and_microbatches_change_no_row(config_of: Callable[..., Config], packing: dict[str, Any]) -> None:
    for step in (0, 3):
        alone = rows_of(config_of(packing, global_batch_size=6, micro_batch_size=1), 1, step)
        assert rows_of(config_of(packing, global_batch_size=6, micro_batch_size=2), 2, step) == alone
        assert rows_of(config_of(packing, global_batch_size=6, micro_batch_size=1), 4, step) == alone


@pytest.mark.parametrize("window", [7, 20, 65536])
def test_steps_of_rows_hold_so_many_rows_and_each_sample_once_an_epoch(
    config_of: Callable[..., Config], window: int
) -> None:
    config = config_of({**ROWS, "window": window}, global_batch_size=4, micro_batch_size=1)
    loader = StepLoader(config, 0, 1)
    per_step = [rows_of(config, 1, step) for step in range(4)]
    assert [rows.total() for rows in per_step] == [4] * 4
    placed = [each for step in range(20) for each in contents(loader, step)]
    positions = [each.position for each in placed]
    assert len(set(positions)) == len(placed)
    assert {each.index for each in positions if each.epoch == 0} == set(range(NUM_SAMPLES))
    assert max(each.epoch for each in positions) == 1


@pytest.mark.parametrize("packing", [None, {"batch": "sequences"}, ROWS], ids=str)
def test_contents_say_who_computes_which_sample(config_of: Callable[..., Config], packing: dict[str, Any]) -> None:
    """The microbatches of every rank have the samples that the plan assigns to it."""
    config = config_of(packing, global_batch_size=8, micro_batch_size=2)
    loaders = [StepLoader(config, rank, 2) for rank in range(2)]
    stream = Sources(config).training()
    for step in (0, 2):
        rows: dict[tuple[int, int, int], list[int]] = defaultdict(list)
        placed = list(contents(loaders[0], step, 2))
        assert placed == list(contents(loaders[1], step, 2))
        for each in placed:
            row = rows[each.microbatch, each.dp_rank, each.row]
            assert len(row) == 0 if each.place == 0 else len(row) > 0
            assert stream.locate(each.number) == each.position
            row += stream.sample(each.number).tokens.tolist()
        for rank, loader in enumerate(loaders):
            for number, batch in enumerate(loader.batches(step)):
                for row_number, tokens in enumerate(batch.tokens.tolist()):
                    expected = rows.pop((number, rank, row_number), [])
                    assert tokens == expected + [0] * (8 - len(expected))
        assert not rows


def test_what_decides_the_samples_of_a_step_is_in_the_fingerprint(config_of: Callable[..., Config]) -> None:
    def fingerprint(packing: dict[str, Any] | None, **train: Any) -> str:
        return StepLoader(config_of(packing, **train), 0, 1).fingerprint

    unpacked = fingerprint(None)
    assert fingerprint({"batch": "sequences"}, tokens_per_micro_batch=64) == unpacked
    rows = fingerprint(ROWS, global_batch_size=4)
    assert rows == f"{unpacked} (4 rows of 8 a step, from windows of 20, each in one epoch)"
    across = fingerprint({**ROWS, "across_epochs": True}, global_batch_size=4)
    assert across == f"{unpacked} (4 rows of 8 a step, from windows of 20)"
    assert windows_in(across) == (4, 8, 20, (), True)
    assert known_until(across, 3) == across
    others = [
        fingerprint(ROWS, global_batch_size=4, tokens_per_micro_batch=64),
        fingerprint({**ROWS, "window": 21}, global_batch_size=4),
    ]
    assert len({rows, *others}) == 3
    assert fingerprint(ROWS, global_batch_size=4, micro_batch_size=2) == rows
