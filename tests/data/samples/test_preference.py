"""Pairs and answers as samples: what belongs together, what is cut, dropped or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from mtrain.base.errors import ConfigError, DataError
from mtrain.config import Config
from mtrain.core.loss.preference.member import GroupMember
from mtrain.data.loader import StepLoader
from mtrain.data.samples.preference import PreferenceDataset
from mtrain.data.sources import Sources
from tests.config.samples import content
from tests.messages import refuses


def config(folder: Path, tokenizer: Path, kind: str, records: list[dict[str, Any]], **changes: Any) -> Config:
    path = folder / f"{kind}.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    data = {"kind": "sft", "seq_length": 5, "tokenizer": str(tokenizer), "train": [{"path": str(path)}]}
    return Config.model_validate(
        content(data={**data, "cache_dir": str(folder)}, loss__function=kind, train__global_batch_size=2, **changes)
    )


def pair(prompt: str, chosen: str, rejected: str) -> dict[str, Any]:
    return {"prompt": f"{prompt} ", "chosen": chosen, "rejected": rejected}


PAIRS = [pair("a", "b", "c"), pair("a", "b b", "c b"), pair("a", "b c", "d d d d d"), pair("d", "c", "b b")]


def dataset(given: Config) -> PreferenceDataset:
    sources = Sources(given)
    sources.training()
    (found,) = sources.preferences.values()
    return found


def answers(found: PreferenceDataset, index: int) -> list[int]:
    sample = found.sample(0, index)
    labels: list[int] = sample.labels[sample.mask > 0].tolist()
    return labels


def test_a_pair_is_dropped_whole_cut_or_refused(tmp_path: Path, word_tokenizer: Path) -> None:
    """The text bos a | d d d d d eos does not fit into six tokens."""
    cut = dataset(config(tmp_path, word_tokenizer, "dpo", PAIRS))
    assert len(cut) == 8
    assert [answers(cut, index) for index in (4, 5)] == [[5, 6, 2], [7, 7, 7, 7]]
    assert cut.widths(np.arange(8)).tolist() == [3, 3, 4, 4, 4, 5, 3, 4]
    assert [len(cut.sample(0, index).tokens) for index in range(8)] == [3, 3, 4, 4, 4, 5, 3, 4]
    assert "1 of 4 records has a sequence of more than 6 tokens: cut at the end" in next(cut.notes())
    dropped = dataset(config(tmp_path, word_tokenizer, "dpo", PAIRS, data__too_long="drop"))
    assert len(dropped) == 6
    assert answers(dropped, 5) == [5, 5, 2]
    assert dropped.location(5).endswith("line 4")
    assert dropped.sample(0, 5).member == GroupMember(2, "rejected")
    late = dataset(config(tmp_path, word_tokenizer, "dpo", PAIRS, data__too_long="start"))
    assert answers(late, 5) == [7, 7, 7, 7, 2]
    with refuses(DataError, "line 3", "data.seq_length=5"):
        dataset(config(tmp_path, word_tokenizer, "dpo", PAIRS, data__too_long="refuse"))
    with refuses(ValueError, "data.too_long=split"):
        config(tmp_path, word_tokenizer, "dpo", PAIRS, data__too_long="split")


def test_an_answer_comes_with_one_under_another_prompt(tmp_path: Path, word_tokenizer: Path) -> None:
    records = [
        {"prompt": f"{prompt} ", "completion": answer, "label": label}
        for prompt, answer, label in [("a", "b", True), ("a a", "c", False), ("d", "d", True), ("c", "a a", True)]
    ]
    found = dataset(config(tmp_path, word_tokenizer, "kto", records))
    roles = [member.role for index in range(8) if (member := found.sample(0, index).member) is not None]
    assert roles == ["chosen", "mismatched", "rejected", *["mismatched", "chosen"] * 2, "mismatched"]
    assert found.sample(0, 3).tokens.tolist() == [1, 4, 4, 4, 4], "the second prompt with the last answer"
    assert answers(found, 3) == [4, 4, 2]
    assert found.widths(np.arange(8)).tolist() == [len(found.sample(0, index).tokens) for index in range(8)]


def test_the_two_of_a_pair_are_in_the_same_step_and_no_other_loss_reads_pairs(
    tmp_path: Path, word_tokenizer: Path
) -> None:
    given = config(tmp_path, word_tokenizer, "dpo", PAIRS)
    loaders = [StepLoader(given, rank, 2) for rank in range(2)]
    for step in range(3):
        members = [
            each.member for loader in loaders for batch in loader.batches(step) for each in batch.members if each
        ]
        groups = sorted(member.group for member in members if member is not None)
        assert groups == [2 * step, 2 * step, 2 * step + 1, 2 * step + 1]
    with refuses(DataError, "'response'"):
        StepLoader(config(tmp_path, word_tokenizer, "next_token", PAIRS), 0, 1)
    with refuses(ValueError, "data.format=preference"):
        config(tmp_path, word_tokenizer, "next_token", PAIRS, data__format="preference")
    with refuses(ConfigError, "loss.function=simpo", "data.kind=mock"):
        StepLoader(Config.model_validate(content(loss__function="simpo")), 0, 1)
