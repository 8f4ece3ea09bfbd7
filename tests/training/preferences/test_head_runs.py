"""Runs of models with a head from files, made like `mtrain train`, and their folders in transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mtrain import Datum, GroupMember
from mtrain.arch.layout import Layout
from mtrain.base.errors import ConfigError, DataError
from mtrain.checkpoint.format.reader import CheckpointTensors
from mtrain.config import Config
from mtrain.convert.exporting import export_hf
from mtrain.convert.verifying import compare_logits
from mtrain.hf.io.source import open_source
from mtrain.hf.schema.description import with_architecture
from tests.config.samples import content
from tests.fault_table import Notice
from tests.messages import refuses
from tests.pool import Pool
from tests.training.one_process import train_fresh
from tests.training.preferences import preference_ranks
from tests.training.preferences.preference_ranks import rewards
from tests.training.preferences.test_preference_runs import records
from tests.training.preferences.words import TEXTS, WORDS, save_tokenizer

SIZES = {"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 48, "vocab_size": 16, "num_attention_heads": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a language model with a tied table, its tokenizer, pairs with margins, and texts with a class."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("heads")
    torch.manual_seed(3)
    described = LlamaConfig(
        intermediate_size=48,
        num_hidden_layers=2,
        num_key_value_heads=4,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        pad_token_id=15,
        **{name: SIZES[name] for name in ("hidden_size", "vocab_size", "num_attention_heads")},
    )
    LlamaForCausalLM(described).save_pretrained(folder / "tokens")
    save_tokenizer(folder)
    pairs = [
        {"prompt": f"{p} ", "chosen": f"{a} yes", "rejected": f"no {a} no", "margin": i / 10}
        for i, (p, a) in enumerate(TEXTS)
    ]
    classes = [{"text": f"{p} {WORDS[i % 3]}", "label": i % 3} for i, (p, _) in enumerate(TEXTS)]
    for name, lines in (("pairs", pairs), ("classes", classes)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    return folder


def config(folder: Path, run: str, kind: str, model: dict[str, Any], **changes: Any) -> Config:
    source = [{"path": str(folder / ("pairs.jsonl" if kind == "reward_model" else "classes.jsonl"))}]
    data = {"kind": "sft", "seq_length": 16, "tokenizer": str(folder), "train": source, "valid": source}
    given = content(
        run__dir=str(folder / run),
        data={**data, "cache_dir": str(folder / "cache")},
        loss__function=kind,
        train__global_batch_size=8,
        train__num_steps=2,
        train__precision="fp32",
        optimizer__lr=0.01,
        valid__at_end=True,
        checkpoint__interval_steps=100,
        metrics__tensorboard=False,
        **changes,
    )
    return Config.model_validate(with_architecture({**given, "model": model}))


def rewards_in_transformers(folder: Path, sequences: list[list[int]]) -> list[float]:
    from transformers import AutoModelForSequenceClassification

    model, seen = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    assert not any(seen.values()), "every tensor is there, and no other"
    assert model.config.num_labels == 1
    with torch.no_grad():
        return [model(torch.tensor([ids])).logits.item() for ids in sequences]


@pytest.fixture(scope="module")
def packed(pool: Pool, folder: Path) -> list[dict[str, Any]]:
    """Returns records of a reward model trained on packed rows by two tensor-parallel ranks."""
    model = {"hf": str(folder / "tokens"), "num_labels": 1}
    made = config(folder, "packed", "reward_model", model, data__packing={}, layout__tp=2, layout__sp=True)
    pool.run(train_fresh, Layout(tp=2, sp=True), made)
    return records(folder / "packed")


@pytest.mark.nightly  # names without a prefix are read by day in tests/hf/io/test_storage.py, heads in the test below
def test_a_reward_model_begins_at_a_base_model_that_was_saved_without_an_output_layer(pool: Pool, folder: Path) -> None:
    from transformers import LlamaForCausalLM

    whole = LlamaForCausalLM.from_pretrained(folder / "tokens", tie_word_embeddings=False)
    whole.save_pretrained(folder / "untied")
    whole.model.save_pretrained(folder / "base")  # names without `model.`
    losses = []
    for name in ("untied", "base"):
        model = {"hf": str(folder / name), "num_labels": 1}
        pool.run(train_fresh, Layout(), config(folder, f"of-{name}", "reward_model", model))
        losses.append([each["loss"] for each in records(folder / f"of-{name}") if "loss" in each])
        export_hf(folder / f"of-{name}", folder / f"{name}-back", None, None, num_workers=1)
        assert len(rewards_in_transformers(folder / f"{name}-back", [[1, 2, 3]])) == 1
    assert losses[0] == losses[1] != []
    with refuses(DataError, "lm_head.weight"):
        open_source(folder / "base")


@pytest.mark.nightly  # tests/parity covers the loss on layouts and packed
def test_a_reward_model_has_the_same_numbers_alone(pool: Pool, folder: Path, packed: list[dict[str, Any]]) -> None:
    model = {"hf": str(folder / "tokens"), "num_labels": 1}
    pool.run(train_fresh, Layout(), config(folder, "alone", "reward_model", model))
    for ours, theirs in zip(packed, records(folder / "alone"), strict=True):
        assert ours.get("loss", 0) == pytest.approx(theirs.get("loss", 0), rel=1e-5)
        assert ours.get("grad_norm", 0) == pytest.approx(theirs.get("grad_norm", 0), rel=1e-5)
        assert ours["diagnostics"] == pytest.approx(theirs["diagnostics"], rel=1e-4, abs=1e-5)


def test_a_reward_model_begins_at_a_model_of_tokens_and_goes_to_transformers_and_back(
    pool: Pool, folder: Path, packed: list[dict[str, Any]]
) -> None:
    first, second, valid = packed
    assert first["denominator"] == 8, "pairs, not sequences"
    assert second["loss"] < first["loss"]
    assert valid["diagnostics"]["reward_accuracy"] > 0.5
    assert first["diagnostics"].keys() == {"reward_margin", "reward_accuracy", "chosen_reward", "rejected_reward"}
    export_hf(folder / "packed", folder / "rewards", None, None, 1)
    with refuses(ConfigError):
        compare_logits(folder / "packed", folder / "rewards")
    described = json.loads((folder / "rewards" / "config.json").read_text())
    assert described["architectures"] == ["LlamaForSequenceClassification"]
    sequences = [[5, 6, 7], [3], [8, 2, 9, 10, 4]]
    again = config(folder, "again", "reward_model", {"hf": str(folder / "rewards")})
    assert again.model.num_labels == 1, "read from the folder"
    (found, *_) = pool.run(rewards, Layout(), again, sequences)
    assert found == pytest.approx(rewards_in_transformers(folder / "rewards", sequences), rel=1e-5, abs=1e-7)


@pytest.mark.nightly  # tests/core/adapters/test_peft.py saves both and starts from them
def test_a_run_with_adapters_and_a_head_goes_on_on_other_ranks(pool: Pool, folder: Path) -> None:
    """The run resumes bit for bit on its own layout; checkpoints hold both, no frozen tensor; losing the head fails."""
    model = {"hf": str(folder / "tokens"), "num_labels": 1}
    adapter = {"rank": 2, "alpha": 4.0}
    saving = config(folder, "adapted", "reward_model", model, adapter=adapter, layout__tp=2)
    batch = [
        Datum([5, 6, 7, 3], member=GroupMember(0, "chosen", margin=0.5)),
        Datum([5, 6, 9], member=GroupMember(0, "rejected")),
        Datum([4, 2, 8], member=GroupMember(1, "chosen")),
        Datum([4, 2], member=GroupMember(1, "rejected")),
    ]
    path = str(folder / "adapted")
    ((straight, again), *_) = pool.run(preference_ranks.gone_on, Layout(tp=2), saving, batch, path)
    assert again == straight
    other = config(folder, "other", "reward_model", model, adapter=adapter)
    (found, *_) = pool.run(preference_ranks.loaded_elsewhere, Layout(), other, batch, path)
    assert found.loss == pytest.approx(straight.loss, rel=1e-6)
    assert found.grad_norm == pytest.approx(straight.grad_norm, rel=1e-5)
    held = CheckpointTensors(folder / "adapted" / "checkpoints" / "step_00000001").tensors
    weights = {name for name in held if not name.startswith(("optimizer", "rng"))}
    assert {name for name in weights if "_adapter." not in name} == {"output_layer.weight"}
    with refuses(ConfigError, "model.num_labels=1"):
        pool.run(preference_ranks.bare, Layout(), other)
    with refuses(ValueError, "targets=output", "model.num_labels=1"):
        config(folder, "output", "reward_model", model, adapter={"targets": ["output"]})


@pytest.mark.nightly  # tests/parity/objectives/test_heads.py has the loss; texts with labels: below
def test_classes_are_learned_from_texts(pool: Pool, folder: Path) -> None:
    """A text longer than a row, whose end is cut, keeps its class."""
    model = {**SIZES, "num_query_groups": 4, "num_labels": 3}
    run = config(folder, "classes", "classification", model, optimizer__min_lr=0.01, data__seq_length=4)
    run = run.model_copy(update={"train": run.train.model_copy(update={"num_steps": 12})})
    pool.run(train_fresh, Layout(), run)
    *steps, valid = records(folder / "classes")
    assert steps[0]["denominator"] == 8
    assert steps[0]["loss"] == pytest.approx(1.0986, rel=0.05), "log 3"
    assert steps[-1]["loss"] < 0.7 * steps[0]["loss"]
    assert valid["diagnostics"]["accuracy"] > steps[0]["diagnostics"]["accuracy"]


def test_numbers_are_learned_from_texts_and_by_an_engine(pool: Pool, folder: Path) -> None:
    """Texts are packed and cut; the first loss is that of a program; a bad target is refused with its line."""
    texts = [" ".join(WORDS[i % 5 : i % 5 + 1 + i % 4]) for i in range(8)]
    numbers = [0.5 * (i % 5) - 1 for i in range(8)]
    lines = [{"text": text, "label": number} for text, number in zip(texts, numbers, strict=True)]
    (folder / "numbers.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))

    def made(run: str, source: str, **changes: Any) -> Config:
        model = {**SIZES, "num_query_groups": 4, "num_labels": 1}
        found = config(folder, run, "regression", model, data__seq_length=8, optimizer__min_lr=0.01, **changes)
        sources = [{"path": str(folder / source)}]
        given = found.model_dump()
        given["data"] |= {"train": sources, "valid": sources}
        given["train"]["num_steps"] = 12
        return Config.model_validate(given)

    pool.run(train_fresh, Layout(), made("numbers", "numbers.jsonl", data__packing={}))
    *steps, valid = records(folder / "numbers")
    assert steps[0]["denominator"] == 8
    assert steps[-1]["loss"] < 0.5 * steps[0]["loss"]
    assert valid["diagnostics"]["absolute_error"] < steps[0]["diagnostics"]["absolute_error"]
    ids = [[*(2 + WORDS.index(word) for word in text.split()), 1] for text in texts]
    batch = [Datum(each, label=number) for each, number in zip(ids, numbers, strict=True)]
    (found, *_) = pool.run(preference_ranks.evaluated, Layout(), made("engine", "numbers.jsonl"), batch)
    assert found.loss == pytest.approx(steps[0]["loss"], rel=1e-6)
    (folder / "words.jsonl").write_text('{"text": "red", "label": "high"}\n')
    with refuses(DataError, "line 1", "words.jsonl", "'label'", "'high'"):
        pool.run(train_fresh, Layout(), made("wrong-numbers", "words.jsonl"))
    with refuses(DataError, "sample 0", "label=None", "Datum.label"):
        pool.run(preference_ranks.evaluated, Layout(), made("engine", "numbers.jsonl"), [Datum(ids[0])])
    with refuses(ValueError, "model.num_labels=3", "loss.function=regression"):
        config(folder, "three", "regression", {**SIZES, "num_query_groups": 4, "num_labels": 3})


@pytest.mark.fault(
    "input",
    "a class beyond model.num_labels in a record",
    happens="a DataError names the file, the line and what a label may be, before the first step",
    exit_code=3,
)
def test_a_class_that_the_head_has_not_is_refused(pool: Pool, folder: Path, notice: Notice) -> None:
    (folder / "bad").mkdir()
    (folder / "bad" / "classes.jsonl").write_text('{"text": "red", "label": 2}\n')
    model = {**SIZES, "num_query_groups": 4, "num_labels": 2}
    wrong = config(folder, "wrong", "classification", model)
    source = [{"path": str(folder / "bad" / "classes.jsonl")}]
    wrong = Config.model_validate({**wrong.model_dump(), "data": {**wrong.data.model_dump(), "train": source}})
    with (
        notice,
        refuses(DataError, "line 1", "classes.jsonl", "'label'", "model.num_labels=2"),
    ):
        pool.run(train_fresh, Layout(), wrong)
    assert DataError.exit_code == notice.exit_code
