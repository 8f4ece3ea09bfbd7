"""Raw samples of the user's own data, and the message about an impossible order."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mtrain.config import Config
from mtrain.core.batch import order
from mtrain.data.formats.megatron_indexed import writing_corpus
from mtrain.data.loader import StepLoader
from mtrain.data.samples import pretrain
from mtrain.verify.core.compare import expected_fields, sample_deviations
from mtrain.verify.core.samples import SamplePlan
from mtrain.verify.core.shrink import has_files
from mtrain.verify.core.texts import texts_of
from tests.config.samples import config

PLAN = SamplePlan(3, 1, user_vocab_size=300)


@pytest.fixture
def corpora(tmp_path: Path) -> dict[str, Any]:
    """Writes two sources of short documents, an eighth of which is held out."""
    sources: list[dict[str, Any]] = []
    rng = np.random.default_rng(0)
    for name in ("one", "two"):
        with writing_corpus(str(tmp_path / name), vocab_size=300) as writer:
            for length in rng.integers(1, 60, 40):
                writer.add(rng.integers(0, 300, length).astype(np.int64))
        sources.append({"path": str(tmp_path / name), "weight": 1.0 + len(sources)})
    return {"data__kind": "indexed", "data__train": sources, "data__split": [0.875, 0.125, 0.0]}


def user(changes: dict[str, Any], **more: Any) -> Config:
    sizes = {"model__vocab_size": 300, "data__seq_length": 32, "train__micro_batch_size": 4}
    return config(**sizes, **changes, **more)


def assert_rows_are_the_trainers(given: Config) -> None:
    found = texts_of(given, PLAN)
    assert found.order_faults == ()
    assert [len(step) for step in found.steps] == [16] * 4
    loader = StepLoader(given, 0, 1)
    for step in range(3):
        expected = expected_fields(found.steps[step], given)
        for each in sample_deviations(step + 1, loader.batches(step), expected):
            assert each.passed, each


@pytest.mark.parametrize("isolate", [False, True])
def test_windows_of_corpora_are_read_as_the_trainer_reads_them(corpora: dict[str, Any], isolate: bool) -> None:
    assert_rows_are_the_trainers(user(corpora, data__isolate_documents=isolate))


def test_answers_are_read_as_the_trainer_reads_them(word_tokenizer: Path, tmp_path: Path) -> None:
    lines = [
        {"prompt": "a b " * number, "response": "c d", "weight": 0.5 * number}
        if number % 2
        else {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b c " * number + "d"}]}
        for number in range(20)
    ]
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    sections = {"data__kind": "sft", "data__train": [{"path": str(path)}], "data__tokenizer": str(word_tokenizer)}
    plain = {**sections, "data__chat_template": "plain"}
    assert_rows_are_the_trainers(user(plain, data__split=[0.9, 0.1, 0.0]))


def test_what_a_chat_template_makes_is_read_as_the_trainer_reads_it(word_tokenizer: Path, tmp_path: Path) -> None:
    template = tmp_path / "own.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.role }} {{ m.content }} {{ eos_token }} {% endfor %}"
        "{% if add_generation_prompt %}assistant {% endif %}"
    )
    path = tmp_path / "lines.jsonl"
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0.5}]
    lines = [{"messages": messages, "weight": number} for number in range(1, 21)]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    sections = {"data__kind": "sft", "data__train": [{"path": str(path)}], "data__tokenizer": str(word_tokenizer)}
    assert_rows_are_the_trainers(user({**sections, "data__chat_template": str(template)}))


def test_answers_of_several_packed_files_with_bad_records_are_read(word_tokenizer: Path, tmp_path: Path) -> None:
    for number, name in enumerate(("a.jsonl.gz", "b.jsonl.gz")):
        lines = [{"prompt": "a " * (number + 1), "response": letter} for letter in "abcdefghij"]
        text = (
            "".join(f"{json.dumps(line)}\n" for line in lines[:4])
            + "{\n"
            + "".join(f"{json.dumps(line)}\n" for line in lines[4:])
        )
        (tmp_path / name).write_bytes(gzip.compress(text.encode()))
    sections = {"data__kind": "sft", "data__train": [{"path": f"{tmp_path}/*.gz"}], "data__on_bad": "skip"}
    given = user({**sections, "data__tokenizer": str(word_tokenizer)}, data__max_bad=2)
    assert has_files(given.data)
    assert_rows_are_the_trainers(given)


def test_random_tokens_are_taken_as_they_are_drawn() -> None:
    assert_rows_are_the_trainers(user({}))


def test_an_order_that_repeats_samples_is_reported(corpora: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    original = order.SampleOrder.locate
    monkeypatch.setattr(order.SampleOrder, "locate", lambda self, number: original(self, number - number % 2))
    assert any("appears twice in an epoch" in fault for fault in texts_of(user(corpora), PLAN).order_faults)


@pytest.mark.parametrize(
    ("plant", "said"),
    [
        (lambda count, key: np.arange(count), "documents of source 0: the first epoch is in file order"),
        (
            lambda count, key: np.arange(count)[::-1].copy(),
            "source 0: the second epoch has the same order as the first",
        ),
    ],
)
def test_documents_that_are_not_shuffled_are_reported(
    corpora: dict[str, Any], monkeypatch: pytest.MonkeyPatch, plant: Callable[[int, int], Any], said: str
) -> None:
    monkeypatch.setattr(pretrain, "permutation", plant)
    assert any(said in fault for fault in texts_of(user(corpora), PLAN).order_faults)


@pytest.mark.parametrize(
    ("plant", "said"),
    [
        (lambda index, size, key: index, "source 0: the first epoch is in file order"),
        (lambda index, size, key: size - 1 - index, "source 0: the second epoch has the same order as the first"),
    ],
)
def test_samples_that_are_not_shuffled_are_reported(
    corpora: dict[str, Any], monkeypatch: pytest.MonkeyPatch, plant: Callable[[int, int, int], int], said: str
) -> None:
    monkeypatch.setattr(order, "permuted", plant)
    assert any(each.startswith(said) for each in texts_of(user(corpora), PLAN).order_faults)


def test_documents_that_come_twice_are_reported(corpora: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrain, "permutation", lambda count, key: np.arange(count) // 2)
    assert any("each of its 35 documents once" in fault for fault in texts_of(user(corpora), PLAN).order_faults)


def test_a_row_that_the_trainer_leaves_out_is_missed() -> None:
    given = user({})
    (step, *_) = texts_of(given, PLAN).steps
    (first, *others) = StepLoader(given, 0, 1).batches(0)
    expected = expected_fields(step, given)
    message = {each.name: each.value for each in sample_deviations(1, others, expected)}
    assert message["tokens"] == 4 / 16
    assert not any(value for name, value in message.items() if name != "tokens")
    twice = {each.name: each.value for each in sample_deviations(1, [first, first, *others], expected)}
    assert twice["tokens"] == 4 / 16
    assert torch.equal(first.tokens, StepLoader(given, 0, 1).batches(0)[0].tokens)
