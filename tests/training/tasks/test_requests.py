"""Requests of tasks on any layout, against transformers in float32."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, processors

from mtrain.arch.layout import Layout
from mtrain.base.errors import ConfigError, DataError
from mtrain.config import Config
from mtrain.hf.configuration import load_config
from mtrain.hf.tokenizer.tokenizer import load_tokenizer
from mtrain.training.tasks.model import Drawing, ScoredRow
from mtrain.training.tasks.requests import TextModel
from tests.hf.folders import save
from tests.messages import refuses
from tests.pool import Pool
from tests.training.tasks import task_ranks

LETTERS = "abcdef "
UNUSED: Any = None
"""Model of requests that never reach it."""
MAX_LENGTH = 14
LAYOUTS = [Layout(), Layout(tp=2, sp=True), Layout(pp=2), Layout(cp=2), Layout(dp=2)]


def letter_tokenizer(folder: Path) -> None:
    """Writes a tokenizer of letters and a few pairs, whose tokens span the border of context and continuation."""
    pieces = ["<unk>", "<s>", "</s>", *LETTERS, "ab", "cd", " a", "abc"]
    merges = [("a", "b"), ("c", "d"), (" ", "a"), ("ab", "c")]
    model = Tokenizer(models.BPE({piece: id_ for id_, piece in enumerate(pieces)}, merges, unk_token="<unk>"))
    model.decoder = decoders.Fuse()
    model.add_special_tokens([AddedToken(text, special=True) for text in ("<unk>", "<s>", "</s>")])
    model.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    model.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | special))


def text(draw: random.Random, most: int) -> str:
    return "".join(draw.choices(LETTERS, k=draw.randint(1, most)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tasks") / "hf"
    save("llama", path, dtype=torch.float32, vocab_size=14, num_key_value_heads=2, num_hidden_layers=2)
    letter_tokenizer(path)
    return path


def config_of(folder: Path) -> Config:
    sections = f"""
    run: {{dir: unused}}
    model: {{hf: {folder}}}
    train: {{global_batch_size: 2, num_steps: 1, precision: fp32, device: cpu}}
    optimizer: {{lr: 1.0}}
    data: {{kind: mock, seq_length: 16}}
    """
    (folder / "run.yaml").write_text("\n".join(line.strip() for line in sections.splitlines()))
    return load_config([folder / "run.yaml"])


class Oracle:
    """transformers, with the conventions that lm-eval documents for causal models."""

    def __init__(self, folder: Path) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=not text.startswith("<s>"))
        return ids

    @torch.no_grad()
    def scored(self, ids: list[int], count: int) -> tuple[float, bool]:
        logits = self.model(torch.tensor([ids[:-1]])).logits[0].double()
        labels = torch.tensor(ids[1:])
        each = logits.log_softmax(-1).gather(-1, labels[:, None])[:, 0]
        return float(each[-count:].sum()), bool((logits.argmax(-1) == labels)[-count:].all())

    def cut(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        if context == "":
            return [1], self.tokenizer.encode(continuation, add_special_tokens=False)
        before = self.encode(context.rstrip())
        return before, self.encode(context + continuation)[len(before) :]

    def log_likelihood(self, context: str, continuation: str) -> tuple[float, bool]:
        before, after = self.cut(context, continuation)
        return self.scored((before + after)[-MAX_LENGTH - 1 :], len(after))

    def rolling(self, text: str) -> float:
        ids, total, begin = self.encode(text), 0.0, 0
        while begin < len(ids):
            end = min(begin + MAX_LENGTH, len(ids))
            row = ([1, *ids])[max(0, end - MAX_LENGTH) : end + 1]
            total += self.scored(row, end - begin)[0]
            begin = end
        return total

    def answer(self, context: str, until: list[str], count: int) -> str:
        prompt = torch.tensor([self.encode(context)[-(MAX_LENGTH - count) :]])
        ids = self.model.generate(prompt, max_new_tokens=count, do_sample=False, eos_token_id=2, pad_token_id=2)
        answer: str = self.tokenizer.decode(ids[0, prompt.shape[1] :], skip_special_tokens=True)
        for end in until:
            answer = answer.split(end)[0]
        return answer


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_requests_are_answered_as_transformers_answers_them(pool: Pool, folder: Path, layout: Layout) -> None:
    """Contexts are empty, end with spaces, hold special tokens or are too long; texts take several windows."""
    draw, oracle = random.Random(str(layout)), Oracle(folder)
    contexts = ["", "a ", "<s>ab", "a</s>b", "abcdef" * 4, *(text(draw, 12) for _ in range(7))]
    pairs = [(context, text(draw, 6)) for context in contexts]
    # the greedy continuations of some contexts
    pairs += [(context, oracle.answer(context, [], 3)) for context in contexts[1:4]]
    # a continuation that is one token with the end of its context has none of its own, which lm-eval refuses as well
    pairs = [pair for pair in pairs if pair[1] and oracle.cut(*pair)[1]]
    texts = ["a", text(draw, 12), "abc def" * 9]
    until = [["b"], ["fe", "ab"], []]
    asked: list[tuple[str, dict[str, Any]]] = [
        (context, {"until": ends, "max_gen_toks": count, "do_sample": False})
        for context, ends, count in zip(contexts[1:], until * 4, [5, 2, 7, 5] * 3)
    ]
    found = pool.run(task_ranks.answers, layout, config_of(folder), MAX_LENGTH, pairs, texts, asked)
    assert all(each == found[0] for each in found), "every rank has the results"
    scores, rolling, answers = found[0]
    expected = [oracle.log_likelihood(*pair) for pair in pairs]
    assert [score for score, _ in scores] == pytest.approx([score for score, _ in expected], abs=2e-4)
    assert [is_greedy for _, is_greedy in scores] == [is_greedy for _, is_greedy in expected]
    assert {is_greedy for _, is_greedy in scores} == {True, False}
    assert rolling == pytest.approx([oracle.rolling(each) for each in texts], abs=1e-3)
    assert answers == [oracle.answer(each, options["until"], options["max_gen_toks"]) for each, options in asked]


def test_a_fault_of_the_first_rank_ends_all_ranks(pool: Pool, folder: Path) -> None:
    found = pool.run(task_ranks.faults, Layout(dp=2), config_of(folder))
    assert found[0] == found[1]
    alone, together = found[0]
    assert alone == "DataError: a fault of the task"
    assert together.startswith("DataError: sample 0")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {}),
        ({"do_sample": True}, {"temperature": 1.0}),
        (
            {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 5},
            {"temperature": 0.7, "top_p": 0.9, "top_k": 5},
        ),
        ({"do_sample": False, "temperature": 0.7}, {}),
        ({"temperature": 0.7}, {"temperature": 0.7}),
        ({"top_k": -1, "top_p": None}, {}),
        ({"until": "b", "max_new_tokens": 4}, {"max_new_tokens": 4, "stop_texts": ("b",)}),
        ({"until": ["b", ""], "max_gen_toks": 3, "max_tokens": 4}, {"max_new_tokens": 3, "stop_texts": ("b",)}),
    ],
)
def test_options_of_generation_have_the_meaning_of_lm_eval(
    folder: Path, options: dict[str, Any], expected: dict[str, Any]
) -> None:
    found = TextModel(UNUSED, load_tokenizer(folder), 512, frozenset({9}))._drawing(options)
    assert found == Drawing(**{"max_new_tokens": 256, "stop_token_ids": frozenset({2, 9}), **expected})


@pytest.mark.parametrize(
    ("options", "fact"), [({"num_beams": 4}, "num_beams"), ({"max_gen_toks": MAX_LENGTH}, str(MAX_LENGTH)), ({}, "256")]
)
def test_an_answer_that_cannot_be_generated_is_refused(folder: Path, options: dict[str, Any], fact: str) -> None:
    with refuses(ConfigError, fact):
        TextModel(UNUSED, load_tokenizer(folder), MAX_LENGTH, frozenset()).generate_until([("a", options)])


@pytest.mark.parametrize("continuation", ["", "f" * (MAX_LENGTH + 1)])
def test_a_continuation_that_cannot_be_scored_is_refused(folder: Path, continuation: str) -> None:
    with refuses(DataError, "max-length"):
        TextModel(UNUSED, load_tokenizer(folder), MAX_LENGTH, frozenset()).loglikelihood([("a", continuation)])


def test_each_row_is_read_once(folder: Path) -> None:
    """A window scores each token once."""
    model = TextModel(UNUSED, load_tokenizer(folder), 5, frozenset())
    for length in range(12):
        ids = list(range(100, 100 + length))
        rows = list(model._windows(ids))
        assert [id_ for row in rows for id_ in row.ids[len(row.ids) - row.num_scored :]] == ids
        assert all(isinstance(row, ScoredRow) and 1 < len(row.ids) <= 6 for row in rows)
