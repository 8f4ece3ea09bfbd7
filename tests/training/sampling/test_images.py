"""Answers to prompts with images are those of transformers, under every layout and from every kind of folder."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from mtrain.arch.layout import Layout
from mtrain.base.errors import ConfigError
from mtrain.cli.main import app
from mtrain.config import Config
from mtrain.convert.exporting import export_hf
from mtrain.convert.importing import import_hf
from mtrain.core.batch.images import SampleImages
from mtrain.hf.schema.description import with_architecture
from mtrain.hf.tokenizer.tokenizer import load_tokenizer
from mtrain.training.sampling.generate import generate_text
from mtrain.training.sampling.params import SamplingParams
from mtrain.training.sampling.prompts import after_images, has_images, read_prompts, shown
from mtrain.training.sampling.sampler import Completion
from tests.data.images.cases import picture
from tests.data.images.models import judge_of_kind, loaded, write_model, write_records
from tests.messages import refuses
from tests.parity.cases import Case, case
from tests.parity.image_models import Kind
from tests.parity.images import SQUARES, Picture, drawn, initial, knobs, model_of, seen
from tests.pool import Pool
from tests.training.one_process import train_fresh
from tests.training.sampling import image_ranks

NEW = 6
GREEDY = SamplingParams(max_new_tokens=NEW, temperature=0.0)
PICTURES = [
    [Picture(5, 4, 8)],
    [],
    [Picture(1, 2, 2), Picture(10, 4, 4)],
    [Picture(0, 4, 4)],  # begins with an image
    [Picture(3, 8, 4), Picture(16, 2, 12)],  # another direction each
]
LENGTHS = (14, 7, 17, 9, 20)


@cache
def prompts(kind: Kind = "dense") -> tuple[list[list[int]], list[SampleImages | None]]:
    drawings = enumerate(zip(SQUARES if kind == "gemma3" else PICTURES, LENGTHS))
    samples = [drawn([pictures], seed, [length], kind)[0] for seed, (pictures, length) in drawings]
    return [sample.tokens.tolist() for sample in samples], [sample.images for sample in samples]


@cache
def expected(kind: Kind) -> list[tuple[list[int], list[float]]]:
    """Answers greedily by transformers in float64: tokens and their log-probabilities."""
    found, model = [], model_of(kind)
    for ids, images in zip(*prompts(kind)):
        theirs = model.generate(
            torch.tensor([ids]),
            **seen(model.config.model_type, images, len(ids)),
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        new = theirs.sequences[0, len(ids) :].tolist()
        likely = [float(logits[0].double().log_softmax(-1)[token]) for logits, token in zip(theirs.logits, new)]
        found.append((new, likely))
    return found


def config_of(each: Case, kind: Kind, **changes: Any) -> Config:
    return each.config(**knobs(kind) | changes)


def assert_as_expected(found: Sequence[Completion], kind: Kind) -> None:
    for ours, (tokens, likely) in zip(found, expected(kind), strict=True):
        assert ours.token_ids == tokens
        np.testing.assert_allclose(ours.log_probs, likely, rtol=0, atol=1e-5)


LAYOUTS: list[tuple[Case, Kind, int]] = [
    (case(4, num_layers=2), "dense", 64),
    (case(4, num_layers=2, tp=2, sp=True), "dense", 64),
    (case(4, num_layers=2, tp=2), "dense", 64),
    (case(4, num_layers=2, pp=2), "dense", 2),  # prompts wait for a place
    (case(4, num_layers=2, cp=2), "dense", 64),  # each rank reads other prompts
    (case(4, num_layers=2, tp=2, sp=True, cp=2), "dense", 1),
    (case(4, num_layers=2, tp=2, sp=True, ep=2), "experts", 64),
    (case(4, num_layers=2, dp=2, ep=2), "experts", 3),
    (case(4, num_layers=2, tp=2, sp=True, cp=2), "mistral3", 64),
    (case(4, num_layers=2, tp=2, sp=True, pp=2), "gemma3", 2),
    (case(4, num_layers=4, tp=2, sp=True, cp=2), "gemma4", 64),
    (case(4, num_layers=3), "deepstack", 64),
    (case(4, num_layers=2, dp=2, ep=2), "deepstack experts", 64),
    (case(4, num_layers=2, dp=2, shard="weights"), "dense", 2),
    (case(4, num_layers=3, pp=2, first_stage_layers=2, tp=2, sp=True), "deepstack", 64),
]


@pytest.mark.parametrize(
    ("each", "kind", "slots"),
    LAYOUTS,
    ids=[f"{kind}-{'-'.join(each.layout) or 'one process'}" for each, kind, _ in LAYOUTS],
)
def test_greedy_answers_to_images_are_those_of_transformers(pool: Pool, each: Case, kind: Kind, slots: int) -> None:
    config = config_of(each, kind)
    found = pool.run(image_ranks.answers, each.resolved(config), config, initial(kind), prompts(kind), GREEDY, slots)
    assert all(one == found[0] for one in found)
    assert_as_expected(found[0], kind)


def test_positions_that_continue_behind_the_tokens_of_images_are_found(pool: Pool) -> None:
    each = LAYOUTS[0][0]
    config = config_of(each, "dense")
    arguments = (config, initial("dense"), prompts(), GREEDY)
    (found,) = pool.run(image_ranks.answers_without_shift, each.resolved(config), *arguments)
    gaps = [
        abs(np.array(ours.log_probs[1:]) - likely[1:]).max() > 1e-3 or ours.token_ids != tokens
        for ours, (tokens, likely) in zip(found, expected("dense"), strict=True)
    ]
    # an image of one row or column has as many positions as tokens
    assert gaps == [any(min(each.rows, each.columns) > 2 for each in pictures) for pictures in PICTURES]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """Writes a file of prompts with images in several forms; returns it with their messages for transformers."""
    data, draw = tmp_path_factory.mktemp("prompts"), random.Random(4)
    for number in range(3):
        (data / f"{number}.png").write_bytes(picture(draw, size=(8 * draw.randint(3, 6), 8 * draw.randint(2, 5))))
    text = [{"role": "user", "content": "number 1?"}]
    parts = [{"type": "image", "path": "0.png"}, {"type": "text", "text": "what?"}, {"type": "image", "path": "1.png"}]
    records = [
        {"messages": [{"role": "user", "content": parts}]},
        {"prompt": [{"role": "user", "content": "a <image> b"}], "images": ["2.png"]},
        {"messages": text},
    ]
    theirs = [
        [{"role": "user", "content": [absolute(part, data) for part in parts]}],
        [{"role": "user", "content": [{"type": "text", "text": "a "}, image_at(data / "2.png"), text_of(" b")]}],
        text,
    ]
    path = data / "prompts.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path, theirs


def image_at(path: Path) -> dict[str, str]:
    return {"type": "image", "path": str(path)}


def text_of(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def absolute(part: dict[str, str], data: Path) -> dict[str, str]:
    return image_at(data / part["path"]) if "path" in part else part


def texts_of_transformers(
    model: Path, tokenizer: Path, conversations: Sequence[Any], kind: Kind = "dense"
) -> list[str]:
    """Answers greedily, in float64, as transformers loads the folder."""
    judge, theirs, found = judge_of_kind(tokenizer, kind), loaded(model, kind), []
    own = load_tokenizer(tokenizer)
    # others end a turn by the token that ends a text
    ends = [] if kind in ("gemma3", "mistral3", "gemma4") else [judge.tokenizer.convert_tokens_to_ids("<|im_end|>")]
    how = {"tokenize": True, "return_dict": True, "return_tensors": "pt", "add_generation_prompt": True}
    for messages in conversations:
        inputs = judge.apply_chat_template(messages, **how)
        seen = {name: each.double() if each.is_floating_point() else each for name, each in inputs.items()}
        stops = [*ends, own.eos_id]
        ids = theirs.generate(**seen, max_new_tokens=NEW, do_sample=False, eos_token_id=stops, pad_token_id=0)
        new = ids[0, seen["input_ids"].shape[1] :].tolist()
        found.append(own.decode(new[:-1] if new[-1] in stops else new))
    return found


def run_config(folder: Path, run: Path, **sections: Any) -> Config:
    content = {
        "run": {"dir": str(run)},
        "model": {"hf": str(folder), "vision": {"freeze_tower": False, "freeze_projector": False}},
        "train": {"global_batch_size": 2, "micro_batch_size": 1, "num_steps": 4, "precision": "fp32"},
        "optimizer": {"lr": 1e-2, "schedule": "constant"},
        "data": {"kind": "sft", "seq_length": 64, "tokenizer": str(folder), "train": [{"path": "x"}]},
        **sections,
    }
    return Config.model_validate(with_architecture(content))


@pytest.mark.parametrize("kind", ["dense", "gemma3", "mistral3", "gemma4"])
def test_folders_and_runs_answer_as_transformers_does_with_their_exports(
    pool: Pool, asked: tuple[Path, list[Any]], tmp_path: Path, kind: Kind
) -> None:
    """Answers of a Hugging Face folder, and of a run whose tower was trained, which transformers reads after export."""
    prompts, conversations = asked
    run, folder = tmp_path / "run", tmp_path / "model"
    folder.mkdir()
    write_model(folder, kind)
    run.mkdir()
    content = {"kind": "sft", "seq_length": 160, "tokenizer": str(folder), "train": [{"path": "x"}]}
    config = run_config(folder, run, layout={"pp": 2}, data=content)
    images = [[prompts.parent / name for name in names] for names in (["0.png", "1.png"], ["2.png"], [])]
    (before,) = pool.run(image_ranks.texts_of_folder, Layout(), folder, read_prompts(prompts), GREEDY, prompts.parent)
    assert before == texts_of_transformers(folder, folder, conversations, kind)
    after, other = pool.run(image_ranks.texts_of_run, Layout(pp=2), config, prompts, images, GREEDY)
    assert after == other != before
    export_hf(run, tmp_path / "back", None, None, num_workers=1)
    assert after == texts_of_transformers(tmp_path / "back", folder, conversations, kind)


def test_an_image_of_the_command_line_comes_before_the_question(
    folder: Path, asked: tuple[Path, list[Any]], pool: Pool
) -> None:
    image = asked[0].parent / "1.png"
    (question,) = after_images(["what?"], [image])
    assert has_images(question)
    assert shown(question) == "[image] what?"
    (found,) = pool.run(image_ranks.texts_of_folder, Layout(), folder, [question, "what?"], GREEDY, Path())
    theirs = [{"role": "user", "content": [image_at(image), text_of("what?")]}], [{"role": "user", "content": "what?"}]
    assert found == texts_of_transformers(folder, folder, theirs)
    answer = CliRunner().invoke(app, ["generate", str(folder), "--image", str(image)])
    assert answer.exit_code == 2
    assert "--prompt" in answer.output


def test_a_run_of_text_names_its_way_to_images(folder: Path, asked: tuple[Path, list[Any]], tmp_path: Path) -> None:
    import_hf(folder, tmp_path / "ours", None, num_workers=1)
    with refuses(ConfigError, "model.vision", "export"):
        generate_text(tmp_path / "ours", read_prompts(asked[0]), GREEDY)


def test_a_run_answers_prompts_with_images_while_it_trains(
    pool: Pool, folder: Path, asked: tuple[Path, list[Any]], tmp_path: Path
) -> None:
    """Answers after the first step are those of a step made alone; images count from the folder of the file."""
    prompts, run = asked[0], tmp_path / "run"
    write_records(tmp_path)
    config = run_config(
        folder,
        run,
        train={"global_batch_size": 2, "micro_batch_size": 1, "num_steps": 1, "precision": "fp32", "device": "cpu"},
        data={
            "kind": "sft",
            "seq_length": 80,
            "tokenizer": str(folder),
            "train": [{"path": str(tmp_path / "a.jsonl")}],
            "cache_dir": str(tmp_path / "cache"),
        },
        eval={"prompts_file": str(prompts), "max_new_tokens": NEW, "interval_steps": 1},
        metrics={"data_ledger": False},
    )
    pool.run(train_fresh, Layout(), config)
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert [each["step"] for each in samples] == [1, 1, 1]
    export_hf(run, tmp_path / "back", None, None, num_workers=1)
    assert [each["answer"] for each in samples] == texts_of_transformers(tmp_path / "back", folder, asked[1])
