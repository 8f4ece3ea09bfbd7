"""Answers that are compared or judged have the ids of the whole text, and the tokenizer decides how a text begins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer
from trl.data_utils import common_prefix_length

from mtrain.config.schema.data import SftSection
from mtrain.config.schema.output import HeadOutput
from mtrain.data.encoding.compared import source_encoder
from mtrain.hf.tokenizer.tokenizer import load_tokenizer
from tests.hf.tokenizer.folders import NAMES, trained, written

PIECES = st.sampled_from(["the", " reader", "rea", "der", " ", "  ", "\n", "index", "ind", "ex", "é", "日", ".", "x1"])
TEXTS = st.lists(PIECES, min_size=1, max_size=6).map("".join)
BEGINS = {"type": "TemplateProcessing", "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}}} | {
    "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
}


@pytest.fixture(scope="module", params=["byte_level", "metaspace", "unigram", "with bos"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind = "byte_level" if request.param == "with bos" else request.param
    content = json.loads(trained(kind, 6)) | ({"post_processor": BEGINS} if request.param == "with bos" else {})
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": NAMES[0], "eos_token": NAMES[1]}
    files = {"tokenizer.json": content, "tokenizer_config.json": named}
    return written(files, tmp_path_factory.mktemp("whole") / "tokenizer")


def encoded(folder: Path, record: dict[str, Any], **more: Any) -> list[tuple[list[int], list[float]]]:
    section = SftSection(kind="sft", seq_length=64, train=[{"path": "x"}], tokenizer=str(folder), format=more["form"])
    encoder = source_encoder(section, load_tokenizer(folder), more.get("compares"), more.get("head"))
    found = encoder.encode(record)
    samples = found if isinstance(found, tuple) else (found,)
    return [(each.ids.tolist(), each.loss_weights.tolist()) for each in samples]


@settings(max_examples=30, suppress_health_check=list(HealthCheck), deadline=None)
@given(prompt=TEXTS, chosen=TEXTS, rejected=TEXTS)
def test_texts_that_are_compared_are_those_of_trl(folder: Path, prompt: str, chosen: str, rejected: str) -> None:
    theirs = AutoTokenizer.from_pretrained(str(folder))
    alone = theirs(prompt)["input_ids"]
    wholes = [theirs(prompt + each + theirs.eos_token)["input_ids"] for each in (chosen, rejected)]
    start = min(common_prefix_length(alone, each) for each in wholes)
    expected = [(each, [0.0] * start + [1.0] * (len(each) - start)) for each in wholes]
    record = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    assert encoded(folder, record, form="preference", compares="pairs") == expected
    start = common_prefix_length(alone, wholes[0])
    answer = {"prompt": prompt, "completion": chosen, "label": True}
    assert encoded(folder, answer, form="unpaired_preference", compares="answers") == [
        (wholes[0], [0.0] * start + [1.0] * (len(wholes[0]) - start))
    ]
    judged = encoded(folder, record, form="preference", compares="pairs", head=HeadOutput(1))
    assert [ids[:-1] for ids, _ in judged] == wholes, "as RewardTrainer has them"
    labelled = {"prompt": prompt, "response": chosen, "label": 1}
    assert [ids[:-1] for ids, _ in encoded(folder, labelled, form="auto", head=HeadOutput(2))] == wholes[:1]


def test_a_text_that_holds_its_prompt_is_not_cut(folder: Path) -> None:
    """The common beginning ends inside a word."""
    theirs = AutoTokenizer.from_pretrained(str(folder))
    texts = ["the reader", "the reading"]
    found = encoded(folder, {"chosen": texts[0], "rejected": texts[1]}, form="preference", compares="pairs")
    assert [ids for ids, _ in found] == [theirs(text + theirs.eos_token)["input_ids"] for text in texts]


def test_a_sample_begins_as_the_tokenizer_begins_a_text(folder: Path) -> None:
    """A bos that no post-processor adds, such as SmolLM2's <|im_start|>, begins nothing."""
    theirs = AutoTokenizer.from_pretrained(str(folder))
    ((ids, _),) = encoded(folder, {"prompt": "the", "response": " reader"}, form="prompt_response")
    begins = theirs("the")["input_ids"]
    assert ids[: len(begins)] == begins
    assert (ids[0] == theirs.bos_token_id) == (theirs("the")["input_ids"][0] == theirs.bos_token_id)
