"""Runs of preference losses from files, made like `mtrain train`."""

from __future__ import annotations

import hashlib
import io
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mtrain import Datum, GroupMember
from mtrain.arch.layout import Layout
from mtrain.base.errors import DataError
from mtrain.checkpoint.store.manifest import read_manifest
from mtrain.config import Config
from mtrain.hf.schema.description import with_architecture
from tests.config.samples import content
from tests.fault_table import Notice
from tests.messages import refuses
from tests.pool import Pool
from tests.training.one_process import train_fresh
from tests.training.preferences.preference_ranks import scores
from tests.training.preferences.words import TEXTS, WORDS, save_tokenizer

ONE_STEP = {"train__num_steps": 1, "valid__at_end": False}
OF_THE_MACHINE = ("seconds", "waited_seconds", "tokens_per_second", "memory_bytes", "time_s")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a tokenizer of whole words, pairs of answers and answers."""
    folder = tmp_path_factory.mktemp("preferences")
    save_tokenizer(folder)
    pairs = [
        {"prompt": f"{prompt} ", "chosen": f"{answer} yes", "rejected": f"no {answer} no"} for prompt, answer in TEXTS
    ]
    answers = [{"prompt": f"{p} ", "completion": f"{a} yes", "label": i % 3 > 0} for i, (p, a) in enumerate(TEXTS)]
    for name, records in (("pairs", pairs), ("answers", answers)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    return folder


def config(folder: Path, run: str, kind: str, size: int = 4, **changes: Any) -> Config:
    source = [{"path": str(folder / ("answers.jsonl" if kind == "kto" else "pairs.jsonl"))}]
    data = {"kind": "sft", "seq_length": 16, "tokenizer": str(folder), "train": source, "valid": [*source, *source]}
    sizes = {"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 48, "vocab_size": 16}
    return Config.model_validate(
        content(
            run__dir=str(folder / run),
            data={**data, "cache_dir": str(folder / "cache")},
            loss__function=kind,
            train__global_batch_size=size,
            train__precision="fp32",
            optimizer__lr=0.01,
            checkpoint__interval_steps=1,
            metrics__tensorboard=False,
            **{f"model__{name}": size for name, size in sizes.items()},
            **({"train__num_steps": 2, "valid__at_end": True} | changes),
        )
    )


def records(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in OF_THE_MACHINE} for line in lines]


def test_a_run_of_pairs_learns_and_goes_on_bit_for_bit(pool: Pool, folder: Path) -> None:
    alone = config(folder, "alone", "dpo")
    pool.run(train_fresh, Layout(), alone)
    first, second, valid = records(folder / "alone")
    assert first["loss"] == pytest.approx(0.6931471805599453, abs=1e-6)
    assert first["denominator"] == 4, "pairs, not sequences"
    assert second["loss"] < first["loss"]
    assert second["diagnostics"]["reward_margin"] > 0
    assert valid["denominator"] == 16
    assert valid["valid_loss"] < second["loss"]
    assert valid["diagnostics"]["reward_accuracy"] > 0.5
    shutil.rmtree(folder / "alone" / "checkpoints" / "step_00000002")
    scores = list((folder / "alone" / "references").iterdir())
    written = scores[0].stat().st_mtime_ns
    pool.run(train_fresh, Layout(), alone)
    assert records(folder / "alone") == [first, second, valid]
    assert [scores[0].stat().st_mtime_ns] == [each.stat().st_mtime_ns for each in scores] == [written]


@pytest.mark.nightly  # the day shows it by the runs of test_head_runs.py, and scores by test_engine_preferences.py
def test_pairs_give_the_same_numbers_spread_and_packed(pool: Pool, folder: Path) -> None:
    """Pairs are read on two data-parallel ranks, and from packed rows on two tensor-parallel ones."""
    pool.run(train_fresh, Layout(dp=2), config(folder, "spread", "dpo"))
    pool.run(train_fresh, Layout(tp=2), config(folder, "packed", "dpo", data__packing={}, layout__tp=2))
    for ours, theirs in zip(records(folder / "packed"), records(folder / "spread"), strict=True):
        for name, value in ours["diagnostics"].items():
            assert value == pytest.approx(theirs["diagnostics"][name], rel=1e-4, abs=1e-5)
        assert ours.get("loss", 0) == pytest.approx(theirs.get("loss", 0), rel=1e-5)
        assert ours.get("grad_norm", 0) == pytest.approx(theirs.get("grad_norm", 0), rel=1e-5)


@pytest.mark.nightly  # test_adapter_references.py and tests/parity/objectives/test_preferences.py
def test_adapters_compare_with_the_frozen_model_and_kto_with_mismatched_answers(pool: Pool, folder: Path) -> None:
    pool.run(train_fresh, Layout(), config(folder, "adapters", "dpo", adapter={"rank": 2}))
    first, second, _ = records(folder / "adapters")
    assert first["loss"] == pytest.approx(0.6931471805599453, abs=1e-6)
    assert second["loss"] < first["loss"]
    pool.run(train_fresh, Layout(), config(folder, "kto", "kto"))
    first, second, valid = records(folder / "kto")
    assert first["loss"] == pytest.approx(0.5, abs=1e-6)
    assert first["diagnostics"]["kl"] == pytest.approx(0, abs=1e-5)
    assert first["denominator"] == 4
    assert valid["denominator"] == 16
    assert second["diagnostics"]["kl"] > 0
    assert valid["valid_loss"] < 0.5


@pytest.mark.nightly  # losses of users: tests/docs/test_extending.py; pairs of the files: above
def test_a_loss_of_the_users_own_trains_from_the_same_files(pool: Pool, folder: Path) -> None:
    """Steps and passes hold every pair twice."""
    own = "tests.training.preferences.preference_ranks:hinge"
    keys = {"data__format": "preference", "loss__aggregation": "seq-mean-token-sum", "loss__options": {"beta": 0.5}}
    pool.run(train_fresh, Layout(), config(folder, "own", own, 16, **keys))
    first, second, valid = records(folder / "own")
    assert first["loss"] == pytest.approx(1, abs=1e-6)
    assert first["denominator"] == 16
    assert valid["valid_loss"] < second["loss"] < 1


@pytest.mark.nightly  # a saving of time; which scores belong to a run: test_adapter_references.py
def test_scores_of_another_model_serve_other_runs_and_damaged_ones_are_computed_again(pool: Pool, folder: Path) -> None:
    """A model compared with itself has the loss log 2; changed kept scores show in the loss."""
    pool.run(train_fresh, Layout(), config(folder, "kept", "orpo", 8, **ONE_STEP))
    keys = {"loss__reference": str(folder / "kept"), "checkpoint__initialize_from": str(folder / "kept")}

    def first_loss(run: str) -> float:
        pool.run(train_fresh, Layout(), config(folder, run, "dpo", 8, **keys, **ONE_STEP))
        return float(records(folder / run)[0]["loss"])

    shared = folder / "cache" / "references"
    known = set(shared.iterdir()) if shared.exists() else set()
    assert first_loss("computing") == pytest.approx(math.log(2), rel=1e-6)
    (path,) = set(shared.iterdir()) - known
    found = np.load(io.BytesIO(path.read_bytes()[32:]))
    found[::2] += 1  # chosen answers: seen in the loss where the scores are used
    content = io.BytesIO()
    np.save(content, found)
    path.write_bytes(hashlib.sha256(content.getvalue()).digest() + content.getvalue())
    assert first_loss("taking") == pytest.approx(math.log1p(math.exp(0.1)), rel=1e-6)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert first_loss("computing again") == pytest.approx(math.log(2), rel=1e-6)


@pytest.mark.nightly  # the day shows the formula by a Hugging Face folder, and the handling of scores above
def test_another_model_is_compared_with_and_gone_on_without(pool: Pool, folder: Path) -> None:
    """The first loss follows from the scores of both models by the formula; other weights have other scores."""
    for number, name in enumerate(("reference", "start")):
        pool.run(train_fresh, Layout(), config(folder, name, "orpo", 8, train__seed=number, **ONE_STEP))

    def named(run: str, **changes: Any) -> Config:
        keys = {"loss__reference": str(folder / "reference"), "checkpoint__initialize_from": str(folder / "start")}
        return config(folder, run, "dpo", 8, **{**keys, **changes})

    batch = _batch_of(folder / "pairs.jsonl")
    ours, theirs = (
        pool.run(
            scores, Layout(), named("scores", loss__reference=None, checkpoint__initialize_from=str(folder / at)), batch
        )[0]
        for at in ("start", "reference")
    )
    ratios = [one - other for one, other in zip(ours, theirs, strict=True)]
    margins = [0.1 * (chosen - rejected) for chosen, rejected in zip(ratios[::2], ratios[1::2], strict=True)]
    expected = sum(math.log1p(math.exp(-margin)) for margin in margins) / len(margins)
    assert abs(expected - math.log(2)) > 1e-3, "the two models differ"
    pool.run(train_fresh, Layout(dp=2), named("compared"))
    assert records(folder / "compared")[0]["loss"] == pytest.approx(expected, rel=1e-6)
    shutil.rmtree(folder / "reference")  # a run that goes on has the scores
    shutil.rmtree(folder / "compared" / "checkpoints" / "step_00000002")
    before = records(folder / "compared")
    pool.run(train_fresh, Layout(dp=2), named("compared"))
    assert records(folder / "compared") == before
    shutil.copytree(folder / "start", folder / "reference")  # other weights under the same name
    pool.run(train_fresh, Layout(), named("others", **ONE_STEP))
    assert records(folder / "others")[0]["loss"] == pytest.approx(math.log(2), rel=1e-6)


def test_a_folder_of_hugging_face_is_compared_with_and_named(pool: Pool, folder: Path) -> None:
    """The first loss is DPO's by transformers' two models in float64; a folder that is no model is refused by name."""
    from transformers import LlamaConfig, LlamaForCausalLM

    models = {}
    for number, name in enumerate(("hf-policy", "hf-reference")):
        torch.manual_seed(number)
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 16}
        described = LlamaConfig(**sizes, num_attention_heads=4, rms_norm_eps=1e-5, initializer_range=0.3)
        LlamaForCausalLM(described).save_pretrained(folder / name)
        models[name] = LlamaForCausalLM.from_pretrained(folder / name, dtype=torch.float64)

    def named(run: str, reference: Path, shard: str = "optimizer") -> Config:
        made = config(folder, run, "dpo", 8, layout__shard=shard).model_dump()
        made["train"]["num_steps"], made["loss"]["reference"] = 1, str(reference)
        made["model"] = {"hf": str(folder / "hf-policy")}
        return Config.model_validate(with_architecture(made))

    batch = _batch_of(folder / "pairs.jsonl")
    policy, reference = (torch.stack([_log_prob(each, datum) for datum in batch]) for each in models.values())
    ratios = policy - reference
    expected = -torch.nn.functional.logsigmoid(0.1 * (ratios[::2] - ratios[1::2])).mean()
    assert abs(expected - math.log(2)) > 1e-3, "the two models differ"
    sharded = Layout(dp=2, shard="weights")  # frees the tables of the reference before it takes the run's weights
    pool.run(train_fresh, sharded, named("hf-compared", folder / "hf-reference", sharded.shard))
    assert records(folder / "hf-compared")[0]["loss"] == pytest.approx(float(expected), rel=1e-5)
    manifest = read_manifest(folder / "hf-compared" / "checkpoints" / "step_00000001")
    assert manifest.reference == str(folder / "hf-reference")
    assert manifest.dataset is not None
    assert "(reference scores " in manifest.dataset
    with refuses(DataError, "loss.reference"):
        pool.run(train_fresh, Layout(), named("hf-empty", folder / "hf-empty"))


@pytest.mark.fault(
    "input",
    "loss.reference names a copy of the reference model, and then another model",
    happens="a copy changes nothing; another model is refused until checkpoint.allow_changed names loss.reference",
    exit_code=3,
)
def test_a_reference_may_move_and_another_one_needs_consent(pool: Pool, folder: Path, notice: Notice) -> None:
    for number, name in enumerate(("policy", "here", "another")):
        pool.run(train_fresh, Layout(), config(folder, name, "orpo", train__seed=number, **ONE_STEP))

    def go_on(named: str, num_steps: int, layout: Layout, **more: Any) -> dict[str, Any]:
        keys: dict[str, Any] = {"loss__reference": str(folder / named), "train__num_steps": num_steps, **more}
        keys |= {"checkpoint__initialize_from": str(folder / "policy"), "optimizer__schedule": "constant"}
        pool.run(train_fresh, layout, config(folder, "moving", "dpo", valid__at_end=False, **keys))
        shutil.rmtree(folder / "cache" / "references", ignore_errors=True)  # other layouts would find the same bits
        changes = read_manifest(folder / "moving" / "checkpoints" / f"step_{num_steps:08d}").changes
        scores = {path.read_bytes() for path in (folder / "moving" / "references").iterdir()}
        return {"changes": [each.key for each in changes], "scores": scores}

    begun = go_on("here", 1, Layout())
    (folder / "here").rename(folder / "there")
    assert begun == go_on("there", 2, Layout(dp=2)) == go_on("there", 3, Layout())
    assert begun["changes"] == []
    with notice, refuses(DataError, "checkpoint.allow_changed=[loss.reference]"):
        go_on("another", 4, Layout())
    assert DataError.exit_code == notice.exit_code
    changed = go_on("another", 4, Layout(), checkpoint__allow_changed=["loss.reference"])
    assert changed["changes"] == ["loss.reference"]
    assert changed["scores"] > begun["scores"]
    assert go_on("another", 5, Layout())["changes"] == ["loss.reference"]


@torch.no_grad()
def _log_prob(model: Any, datum: Datum) -> torch.Tensor:
    """Returns the log-probability of the answer, by the definition."""
    ids, weights = torch.tensor(datum.input_ids), torch.tensor(datum.weights)
    logs = model(ids[None, :-1]).logits[0].log_softmax(-1)
    found: torch.Tensor = (weights[1:] * logs.gather(-1, ids[1:, None])[:, 0]).sum()
    return found


def _batch_of(path: Path) -> list[Datum]:
    """Encodes as the tokenizer of whole words does: prompt, answer and the end."""
    ids = {word: number for number, word in enumerate(["<unk>", "</s>", *WORDS])}
    found = []
    for group, record in enumerate(map(json.loads, path.read_text().splitlines())):
        prompt = [ids[word] for word in record["prompt"].split()]
        for role in ("chosen", "rejected"):
            answer = [*(ids[word] for word in record[role].split()), 1]
            weights = [*[0.0] * len(prompt), *[1.0] * len(answer)]
            found.append(Datum([*prompt, *answer], weights, member=GroupMember(group, role)))
    return found


@pytest.mark.fault(
    "disk",
    "kept scores of the reference model with a flipped bit",
    happens="a DataError names the file and that it may be removed, before the first step",
    exit_code=3,
)
def test_scores_with_a_flipped_bit_are_refused(pool: Pool, folder: Path, notice: Notice) -> None:
    broken = config(folder, "broken", "ipo", **ONE_STEP)
    pool.run(train_fresh, Layout(), broken)
    (path,) = (folder / "broken" / "references").iterdir()
    content = bytearray(path.read_bytes())
    content[-3] ^= 4
    path.write_bytes(content)
    with notice, refuses(DataError):
        pool.run(train_fresh, Layout(), broken)
    assert DataError.exit_code == notice.exit_code


def test_side_terms_count_chosen_answers_alone(pool: Pool, folder: Path) -> None:
    """Side terms count each token and the end of chosen answers, none of the rejected ones, as long or longer."""
    terms = {name: {"function": name, "coefficient": 0.2} for name in ("next_token", "z_loss")}
    pool.run(train_fresh, Layout(), config(folder, "side", "dpo", 8, loss__side_terms=terms, **ONE_STEP))
    (first,) = records(folder / "side")
    chosen = sum(len(f"{answer} yes".split()) + 1 for _, answer in TEXTS)
    assert {name: first["terms"][name]["denominator"] for name in terms} == dict.fromkeys(terms, chosen)
