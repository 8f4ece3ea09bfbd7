"""Display of a step: expected texts by hand, and the same content as the loader gives to training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from mtrain.cli.show_batch import coloured, styles_of
from mtrain.config import Config
from mtrain.data.loader import StepLoader
from mtrain.data.shown import as_text, headline
from mtrain.hf.tokenizer.tokenizer import load_tokenizer
from mtrain.report.pages.html import render

WriteJsonl = Callable[[Sequence[dict[str, Any]]], Path]
LINES: list[dict[str, Any]] = [{"prompt": "a <x>", "response": "c d", "weight": 2}, {"prompt": "b", "response": "e"}]


@pytest.fixture
def loader(write_jsonl: WriteJsonl, word_tokenizer: Path, make_config: Callable[..., Config]) -> StepLoader:
    """Builds a loader of two samples a step; a <x> -> c d has three trained tokens, as each end is one."""
    data = {"kind": "sft", "train": [{"path": str(write_jsonl(LINES))}], "tokenizer": str(word_tokenizer)}
    sections = {"loss": {"aggregation": "seq-mean-token-mean"}, "train": {"global_batch_size": 2}}
    return StepLoader(make_config(data, **sections), 0, 1)


def test_every_token_is_shown_with_what_it_weighs(loader: StepLoader) -> None:
    step = loader.shown(1, 8)
    by_place = {sample.origin.split("line ")[1]: sample for sample in step.samples}
    first = by_place["1, epoch 1"]
    assert [token.id for token in first.tokens] == [1, 4, 0, 6, 7, 2]
    assert [token.text for token in first.tokens] == ["<s>", "a", " <unk>", " c", " d", "</s>"]
    assert [token.weight for token in first.tokens] == pytest.approx([0, 0, 0, 2 / 3, 2 / 3, 2 / 3])
    assert [token.begins_document for token in first.tokens] == [True] + [False] * 5
    assert (step.denominator, step.num_samples, first.weight, first.num_trained) == (3.0, 2, 2.0, 3)
    assert headline(first).endswith("6 tokens, 3 trained, each weighs 0.666667; sequence weight 2")
    assert "┃<s>a <unk>⟦ c d</s>⟧\n" in as_text(step)
    assert len(loader.shown(1, 1).samples) == 1
    assert loader.shown(1, 1).denominator == 3.0, "of the whole step"


@pytest.mark.parametrize("step", [1, 4])
def test_weights_are_those_of_the_training_step(loader: StepLoader, step: int) -> None:
    shown, batches = loader.shown(step, 8), loader.batches(step - 1)
    trained = sorted(token.weight for sample in shown.samples for token in sample.tokens if token.weight > 0)
    used = sorted(float(each) for batch in batches for each in batch.weights["main"].flatten() if each > 0)
    assert trained == used
    assert shown.denominator == sum(float(batch.denominator_weights["main"].sum()) for batch in batches)


def test_documents_of_a_row_are_distinguished(
    make_config: Callable[..., Config], write_corpus: Callable[[str, Sequence[Sequence[int]]], str]
) -> None:
    prefix = write_corpus("a", [[7, 8, 9], [5, 6]] * 20)
    loader = StepLoader(make_config({"train": [{"path": prefix}], "isolate_documents": True}), 0, 1)
    (sample, *_) = loader.shown(1, 1).samples
    edges = [token.begins_document for token in sample.tokens]
    # the last token is only predicted, so it is not known whether a document begins there
    assert edges[1:-1] == [token.id in (7, 5) for token in sample.tokens[1:-1]]
    assert [token.text for token in sample.tokens] == [str(token.id) for token in sample.tokens]
    starts = [token for token in sample.tokens[1:-1] if token.begins_document]
    assert starts
    assert all(token.weight == 0 for token in starts), "nothing is predicted across an edge"


def test_colours_follow_the_weights(loader: StepLoader) -> None:
    step = loader.shown(1, 8)
    styles = styles_of(step)
    assert len(styles) == len({token.weight for sample in step.samples for token in sample.tokens} - {0.0})
    text = coloured(next(sample for sample in step.samples if sample.weight == 2), styles)
    assert text.plain == "┃<s>a <unk> c d</s>"
    assert [str(span.style) for span in text.spans][1:4] == ["dim"] * 3
    assert str(text.spans[4].style) in styles.values()


def test_the_page_escapes_what_tokens_hold_and_names_weights(loader: StepLoader) -> None:
    page = render("batch.html", shown=loader.shown(1, 8), headline=headline)
    assert "&lt;unk&gt;" in page
    assert "<unk>" not in page
    assert 'title="id 6, weight 0.666667, share 0.222"' in page
    assert 'class="document" title="id 1, not trained"' in page


def test_control_characters_do_not_reach_the_terminal(
    write_jsonl: WriteJsonl, tmp_path: Path, make_config: Callable[..., Config]
) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    model = Tokenizer(models.WordLevel({"</s>": 0, "\x1b[31m": 1, "a": 2}, unk_token="a"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    model.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    path = write_jsonl([{"prompt": "a", "response": "\x1b[31m"}])
    data = {"kind": "sft", "train": [{"path": str(path)}], "tokenizer": str(tmp_path)}
    shown = StepLoader(make_config(data), 0, 1).shown(1, 1)
    assert "\x1b" not in as_text(shown)
    assert "\\x1b[31m" in as_text(shown)


def test_tokens_have_names(word_tokenizer: Path) -> None:
    tokenizer = load_tokenizer(word_tokenizer)
    assert [tokenizer.name(id_) for id_ in (2, 4, 999)] == ["</s>", "a", "999"]
