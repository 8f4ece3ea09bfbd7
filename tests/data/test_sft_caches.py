"""Finetuning sources from a configuration: bad records, names of earlier versions, and what a second start costs."""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtrain.base.errors import DataError
from mtrain.config import Config
from mtrain.data.loader import StepLoader
from mtrain.data.sft_caches import SftCaches
from mtrain.data.sources import Sources
from mtrain.hf.tokenizer.tokenizer import Tokenizer, load_tokenizer
from tests.fault_table import Notice
from tests.messages import refuses

GOOD = [{"prompt": "a", "response": word} for word in "bcdefghij"]


@pytest.fixture
def configured(tmp_path: Path, word_tokenizer: Path, make_config: Callable[..., Config]) -> Callable[..., Config]:
    """Returns a function that builds a configuration whose source is the given lines."""

    def make(lines: list[Any], **data: Any) -> Config:
        path = tmp_path / "samples.jsonl"
        path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
        source = {"kind": "sft", "train": [{"path": str(path)}], "tokenizer": str(word_tokenizer)}
        return make_config({**source, "cache_dir": str(tmp_path / "cache"), **data})

    return make


@pytest.mark.fault(
    "input",
    "bad records in finetuning data with data.on_bad=skip",
    happens="left out up to data.max_bad, counted, and the first ones named",
    exit_code=None,
)
def test_bad_records_are_left_out_and_named(configured: Callable[..., Config], notice: Notice) -> None:
    lines = [*GOOD[:3], '{"prompt": ', *GOOD[3:], {"prompt": "a", "response": 7}]
    with notice:
        loader = StepLoader(configured(lines, on_bad="skip", max_bad=2), 0, 1)
    (note,) = loader.notes
    assert "2 of 11 records are bad and left out: " in note
    assert "samples.jsonl line 4: not JSON" in note
    assert "samples.jsonl line 11: 'response' is of type int" in note
    assert loader.fingerprint == StepLoader(configured(GOOD), 0, 1).fingerprint, "the same samples are the same data"
    assert notice.exit_code is None


@pytest.mark.fault(
    "input",
    "more bad records in finetuning data than data.max_bad allows",
    happens="refused with their number and the first ones by file and line",
    exit_code=3,
)
@pytest.mark.parametrize("max_bad", [0, 0.15, 1])
def test_too_many_bad_records_are_refused(configured: Callable[..., Config], max_bad: float, notice: Notice) -> None:
    config = configured([*GOOD, "{", "[]"], on_bad="skip", max_bad=max_bad)
    with (
        notice,
        refuses(DataError, "data.max_bad", "line 10") as e,
    ):
        Sources(config).training()
    assert e.value.exit_code == notice.exit_code


def test_an_entry_with_bad_records_is_refused_where_none_are_wanted(configured: Callable[..., Config]) -> None:
    Sources(configured([*GOOD, "{"], on_bad="skip", max_bad=1)).training()
    with refuses(DataError, "line 10", "samples.jsonl"):
        Sources(configured([*GOOD, "{"])).training()


@pytest.mark.parametrize("too_long", ["drop", "refuse", "end", "split"])
def test_a_second_start_tokenises_nothing(
    configured: Callable[..., Config], too_long: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(GOOD, too_long=too_long, split=[0.5, 0.5, 0])
    before = Sources(config).training().sample(0)

    def encode(self: Tokenizer, text: str) -> list[int]:
        raise AssertionError("tokenised again")

    monkeypatch.setattr(type(load_tokenizer(str(config.data.tokenizer))), "encode", encode)
    sources = Sources(config)
    assert sources.training().sample(0).tokens.tolist() == before.tokens.tolist()
    assert [len(each) for each in sources.held_out("valid").values()] == [5]


def test_the_data_do_not_depend_on_the_form_of_the_file(configured: Callable[..., Config], tmp_path: Path) -> None:
    plain = StepLoader(configured(GOOD), 0, 1)
    packed = tmp_path / "samples.jsonl.gz"
    packed.write_bytes(gzip.compress((tmp_path / "samples.jsonl").read_bytes()))
    for path in (packed, tmp_path / "*.jsonl"):
        other = StepLoader(configured(GOOD, train=[{"path": str(path)}]), 0, 1)
        assert other.fingerprint == plain.fingerprint
        assert other.batches(3)[0].tokens.tolist() == plain.batches(3)[0].tokens.tolist()


@pytest.mark.parametrize(("too_long", "old"), [("end", "truncate"), ("drop", "drop"), ("split", None)])
def test_data_are_known_by_the_fingerprint_of_version_0_1_0(
    configured: Callable[..., Config], word_tokenizer: Path, tmp_path: Path, too_long: str, old: str | None
) -> None:
    loader = StepLoader(configured(GOOD, too_long=too_long, split=[0.5, 0.5, 0]), 0, 1)
    text = hashlib.sha256((tmp_path / "samples.jsonl").read_bytes()).hexdigest()
    tokenizer = hashlib.sha256((word_tokenizer / "tokenizer.json").read_bytes()).hexdigest()
    # as mtrain/data/samples/sft.py made it in version 0.1.0
    assert loader.earlier_fingerprints == (() if old is None else (f"1*{text}-{tokenizer}-0-4-8-{old}",))


def test_data_that_lack_the_bos_of_version_0_1_0_are_other_data(
    configured: Callable[..., Config], word_tokenizer: Path, tmp_path: Path
) -> None:
    """Version 0.1.0 put any bos that a tokenizer names before a sample; now the tokenizer itself has to."""
    folder = shutil.copytree(word_tokenizer, tmp_path / "without_bos")
    content = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(content | {"post_processor": None}))
    assert StepLoader(configured(GOOD), 0, 1).earlier_fingerprints
    assert StepLoader(configured(GOOD, tokenizer=str(folder)), 0, 1).earlier_fingerprints == ()


def test_an_empty_file_among_many_is_left_out_and_named(configured: Callable[..., Config], tmp_path: Path) -> None:
    alone = StepLoader(configured(GOOD), 0, 1)
    (tmp_path / "shards").mkdir()
    config = configured(GOOD, train=[{"path": str(tmp_path / "shards")}])
    for name in ("a.jsonl", "c.jsonl"):
        (tmp_path / "shards" / name).touch()
    with refuses(DataError, "shards", "2 files"):
        StepLoader(config, 0, 1)
    (tmp_path / "samples.jsonl").rename(tmp_path / "shards" / "b.jsonl")
    loader = StepLoader(config, 0, 1)
    (note,) = loader.notes
    assert "2 file(s) hold no records and are left out: " in note
    assert f"{tmp_path}/shards/a.jsonl, {tmp_path}/shards/c.jsonl" in note
    assert loader.fingerprint == alone.fingerprint, "the same samples are the same data"


def test_tokens_beyond_the_model_are_refused(configured: Callable[..., Config]) -> None:
    config = configured(GOOD)
    assert config.data.kind == "sft"
    model = config.model.model_copy(update={"vocab_size": 13})
    with refuses(DataError, "model.vocab_size"):
        SftCaches(config.data, load_tokenizer(str(config.data.tokenizer)), model).open(config.data.train[0].path)


def test_what_is_lost_of_a_file_is_said_once_however_many_sets_name_it(configured: Callable[..., Config]) -> None:
    lines = [*GOOD, {"prompt": "a", "response": " ".join("abcdefghij")}]
    config = configured(lines)
    path = config.data.train[0].path  # type: ignore[union-attr]
    config = configured(lines, valid={"one": [{"path": path}], "two": [{"path": path}]})
    (note,) = StepLoader(config, 0, 1).notes
    assert "1 of 10 samples has more than 9 tokens: cut at the end by 4 tokens in all" in note
