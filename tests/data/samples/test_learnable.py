"""A run is refused only where no sample has anything to learn; expected values by hand."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrain.base.errors import DataError
from mtrain.config import Config
from mtrain.data.sources import Sources
from tests.config.samples import content
from tests.fault_table import Notice

SEQ_LENGTH = 5
WEIGHTS = st.sampled_from([0, 0, 0, 1, 0.5])
COUNTS = st.integers(0, 8)


def made(folder: Path, records: Sequence[dict[str, Any]], tokenizer: Path, **changes: Any) -> Config:
    path = folder / "samples.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    data = {"kind": "sft", "seq_length": SEQ_LENGTH, "tokenizer": str(tokenizer), "train": [{"path": str(path)}]}
    return Config.model_validate(content(data={**data, "cache_dir": str(folder)}, **changes))


def refusal(config: Config) -> str | None:
    try:
        Sources(config).training()
    except DataError as fault:
        return str(fault)
    return None


def kept(prompt: int, answer: int, too_long: str) -> list[bool]:
    """Says, for bos, prompt, answer and eos, whether each token in a row is trained; the first one never is."""
    whole = [False] * (1 + prompt) + [True] * (answer + 1)
    if len(whole) > SEQ_LENGTH + 1:
        if too_long == "drop":
            return []
        whole = whole[-SEQ_LENGTH - 1 :] if too_long == "start" else whole[: SEQ_LENGTH + 1]
    return whole[1:]


@settings(max_examples=60, deadline=None)
@given(
    records=st.lists(st.tuples(COUNTS, COUNTS.map(lambda count: count + 1), WEIGHTS), min_size=1, max_size=4),
    too_long=st.sampled_from(["end", "start", "drop", "split"]),
    is_packed=st.booleans(),
)
def test_questions_and_answers(
    word_tokenizer: Path, records: list[tuple[int, int, float]], too_long: str, is_packed: bool
) -> None:
    given_records = [{"prompt": "a " * p, "response": "b " * r, "weight": weight} for p, r, weight in records]
    changes: dict[str, Any] = {"data__packing": {}} if is_packed else {}
    with tempfile.TemporaryDirectory() as folder:
        found = refusal(made(Path(folder), given_records, word_tokenizer, data__too_long=too_long, **changes))
    # split keeps each answer somewhere
    learns = any(weight and (too_long == "split" or any(kept(p, r, too_long))) for p, r, weight in records)
    assert (found is None) == learns, found


@settings(max_examples=40, deadline=None)
@given(
    records=st.lists(st.tuples(COUNTS, COUNTS.map(lambda count: count + 1), WEIGHTS), min_size=1, max_size=4),
    too_long=st.sampled_from(["end", "start", "drop"]),
    kind=st.sampled_from(["dpo", "simpo", "kto"]),
)
def test_preferences(word_tokenizer: Path, records: list[tuple[int, int, float]], too_long: str, kind: str) -> None:
    """Pairs have answers of one length here, so that both are cut alike."""
    if kind == "kto":
        given_records = [
            {"prompt": "a " * (p + 1), "completion": "b " * r, "label": bool(r % 2), "weight": weight}
            for p, r, weight in records
        ]
        # KTO drops a group also where the mismatched sequence is too long
        too_long = "end" if too_long == "drop" else too_long
    else:
        given_records = [
            {"prompt": "a " * (p + 1), "chosen": "b " * r, "rejected": "c " * r, "weight": weight}
            for p, r, weight in records
        ]
    with tempfile.TemporaryDirectory() as folder:
        changes: dict[str, Any] = {"loss__function": kind, "train__global_batch_size": 2, "data__too_long": too_long}
        found = refusal(made(Path(folder), given_records, word_tokenizer, **changes))
    assert (found is None) == any(weight and any(kept(p + 1, r, too_long)) for p, r, weight in records), found


@pytest.mark.parametrize("head", [{"num_labels": 2}, {"num_labels": 1}])
@settings(max_examples=15, deadline=None)
@given(records=st.lists(st.tuples(COUNTS.map(lambda count: count + 1), WEIGHTS), min_size=1, max_size=3))
def test_heads(word_tokenizer: Path, head: dict[str, int], records: list[tuple[int, float]]) -> None:
    """No cut takes a label away, so the weight alone decides."""
    kind = "classification" if head["num_labels"] > 1 else "regression"
    given_records = [{"text": "a " * count, "label": 1, "weight": weight} for count, weight in records]
    with tempfile.TemporaryDirectory() as folder:
        found = refusal(
            made(Path(folder), given_records, word_tokenizer, loss__function=kind, model__num_labels=head["num_labels"])
        )
    assert (found is None) == any(weight for _, weight in records), found


def test_documents_of_one_token(
    write_corpus: Callable[[str, Sequence[Sequence[int]]], str], make_config: Callable[..., Config]
) -> None:
    for documents, isolated, learns in (
        ([[5]] * 20, True, False),
        ([[5]] * 20, False, True),
        ([[5]] * 9 + [[5, 6]], True, True),
    ):
        prefix = write_corpus(f"{len(documents)}-{isolated}", documents)
        data = {"kind": "indexed", "seq_length": 4, "train": [{"path": prefix}], "isolate_documents": isolated}
        found = refusal(make_config(data))
        assert (found is None) == learns, found
        assert found is None or "one token at most" in found


def test_a_source_that_changes_nothing_is_named_where_another_one_does(tmp_path: Path, word_tokenizer: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text('{"prompt": "a", "response": "b", "weight": 0}\n')
    config = made(tmp_path, [{"prompt": "a", "response": "b"}], word_tokenizer)
    both = [{"path": str(other), "weight": 1}, *(each.model_dump() for each in config.data.train)]  # type: ignore[union-attr]
    config = Config.model_validate({**config.model_dump(), "data": {**config.data.model_dump(), "train": both}})
    sources = Sources(config)
    sources.training()
    assert f"{other}: no token in it is trained: of 1 sequence 1 has weight 0" in sources.notes()


@pytest.mark.fault(
    "input",
    "training data in which no sample has anything to learn: weights of 0, or answers that a cut takes away",
    happens="refused before the first step, with the number of sequences and the reasons",
    exit_code=3,
)
def test_the_refusal_says_how_many_and_why(tmp_path: Path, word_tokenizer: Path, notice: Notice) -> None:
    records = [{"prompt": "a " * 9, "response": "b"}] * 3 + [{"prompt": "a", "response": "b", "weight": 0}]
    with notice, pytest.raises(DataError) as caught:
        Sources(made(tmp_path, records, word_tokenizer)).training()
    assert str(caught.value) == (
        f"no training sample has a token to train ({tmp_path}/samples.jsonl: of 4 sequences 1 has weight 0 "
        "and 3 lose all their loss tokens by a cut), so no step would change the model; give records with answers "
        "in the loss, or raise data.seq_length if they are cut"
    )
    assert caught.value.exit_code == notice.exit_code
