"""Continuing a prompt."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from mtrain.arch.layout import Layout
from mtrain.base.errors import ConfigError, DataError
from mtrain.config import Config
from mtrain.convert.importing import import_hf
from mtrain.hf.configuration import load_config
from mtrain.hf.tokenizer.tokenizer import load_tokenizer
from mtrain.training.sampling.params import SamplingParams
from mtrain.training.sampling.prompts import questions_of, read_prompts, shown
from tests.config.samples import config
from tests.config.yaml_files import write
from tests.hf.folders import save
from tests.messages import refuses
from tests.pool import Pool
from tests.training.sampling import sampling_ranks

WORDS = ["<unk>", "<s>", "</s>", "<end>", "a", "user", "assistant"]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {{ m.content }} <end> {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


def word_tokenizer(folder: Path) -> None:
    """Writes a tokenizer of a few words."""
    model = Tokenizer(models.WordLevel({word: id_ for id_, word in enumerate(WORDS)}, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    model.add_special_tokens(["<s>", "</s>", "<end>"])
    model.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    model.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    word_tokenizer(tmp_path)
    return tmp_path


def finetuning(tokenizer: Path, **data: Any) -> Config:
    given = {"kind": "sft", "seq_length": 8, "train": [{"path": "x"}], "tokenizer": str(tokenizer), **data}
    return config(data=given)


def test_a_prompt_may_be_a_question_in_the_chat_template_of_the_run(tokenizer: Path) -> None:
    (tokenizer / "chat_template.jinja").write_text(TEMPLATE)
    run, model = finetuning(tokenizer), load_tokenizer(tokenizer)
    text, question = questions_of(run, model, ["a"], as_chat=False)[0], questions_of(run, model, ["a"], as_chat=True)[0]
    assert (text.ids, text.stop_ids) == ([1, 4], frozenset({2}))
    assert (question.ids, question.stop_ids) == ([5, 4, 3, 6], frozenset({2, 3}))


def test_a_run_without_a_chat_template_asks_nothing(tokenizer: Path) -> None:
    for run in (finetuning(tokenizer), finetuning(tokenizer, chat_template="plain"), config()):
        with refuses(ConfigError):
            questions_of(run, load_tokenizer(tokenizer), ["a"], as_chat=True)


@pytest.mark.parametrize(  # test_sampler.py shows that no layout changes an answer
    "ranks", [1, pytest.param(2, marks=pytest.mark.nightly)]
)
def test_a_model_answers_alike_from_every_kind_of_folder(pool: Pool, tmp_path: Path, ranks: int) -> None:
    """The folders are: Hugging Face, imported, and the run and checkpoint that started from it."""
    hf, run = tmp_path / "hf", tmp_path / "run"
    model = save("llama", hf, dtype=torch.float32, vocab_size=len(WORDS), num_key_value_heads=2, num_hidden_layers=1)
    word_tokenizer(hf)
    (hf / "chat_template.jinja").write_text(TEMPLATE)
    import_hf(hf, tmp_path / "ours", None, num_workers=1)
    data = {"kind": "sft", "seq_length": 16, "train": [{"path": "x"}], "tokenizer": str(hf)}
    train = {"global_batch_size": 1, "num_steps": 1, "precision": "fp32", "device": "cpu"}
    sections = {"model": {"hf": str(hf)}, "train": train, "optimizer": {"lr": 1.0}, "data": data}
    config = load_config(
        [write(tmp_path / "run.yaml", {"run": {"dir": str(run)}, "layout": {"tp": ranks}, **sections})]
    )
    asked = (["a user", "a a assistant"], SamplingParams(max_new_tokens=5, temperature=0.0))
    pool.run(sampling_ranks.engine_answers, Layout(tp=ranks), config, [[5, 4]], asked[1], str(run))
    paths = [hf, tmp_path / "ours", run, run / "checkpoints" / "step_00000000"]
    (text, chat), *_ = pool.run(sampling_ranks.texts, Layout(), [(paths, False), (paths[:1], True)], *asked)
    if ranks > 1:
        spread = pool.run(sampling_ranks.texts, Layout(tp=ranks), [([run], False)], *asked)
        assert spread == ranks * [[text[:1]]]
    for as_chat, found in ((False, text), (True, chat)):
        assert all(each == found[0] for each in found)
        ids = [5, 4, 5, 3, 6] if as_chat else [1, 4, 5]  # user a user <end> assistant, or <s> a user
        stops = [WORDS.index("<end>"), WORDS.index("</s>")] if as_chat else [WORDS.index("</s>")]
        theirs = model.generate(
            torch.tensor([ids]), max_new_tokens=5, do_sample=False, eos_token_id=stops, pad_token_id=0
        )
        answer = [int(each) for each in theirs[0, len(ids) :] if int(each) not in stops]
        assert found[0][0] == load_tokenizer(hf).decode(answer)


def test_prompts_come_from_lines_or_objects(tmp_path: Path) -> None:
    (tmp_path / "plain.txt").write_text("one two\n\nthree\n")
    assert read_prompts(tmp_path / "plain.txt") == ["one two", "three"]
    said = [{"role": "user", "content": "hello"}]
    lines = [json.dumps({"prompt": "one"}), json.dumps({"messages": said})]
    (tmp_path / "both.jsonl").write_text("\n".join(lines))
    assert read_prompts(tmp_path / "both.jsonl") == ["one", said]
    assert [shown(each) for each in read_prompts(tmp_path / "both.jsonl")] == ["one", "hello"]


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{",
        '{"text": "a"}',
        '{"prompt": "a", "messages": []}',
        '{"messages": []}',
    ],
)
def test_a_file_of_prompts_that_cannot_be_understood_is_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "prompts.jsonl").write_text(line)
    with refuses(DataError):
        read_prompts(tmp_path / "prompts.jsonl")
