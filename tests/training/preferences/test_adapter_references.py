"""Preference losses of a run that starts from an adapter: its reference is what the run begins from.

TRL's own loss functions judge, on transformers' model in float64 with the adapter of PEFT and a frozen one named "ref",
which is a copy of the first, as TRL's trainers make one, or another adapter.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from mtrain.arch.layout import Layout
from mtrain.base.errors import DataError
from mtrain.checkpoint.store.manifest import read_manifest
from mtrain.config import Config
from mtrain.config.load import config_yaml
from mtrain.config.schema.train import AdamWSection
from mtrain.convert.adapters import export_adapter
from mtrain.hf.schema.description import with_architecture
from tests.cli.command_line import call
from tests.fault_table import Notice
from tests.messages import refuses
from tests.pool import Pool
from tests.training.one_process import train_fresh
from tests.training.preferences.test_preference_runs import records
from tests.training.preferences.words import TEXTS, WORDS, save_tokenizer
from tests.trl_losses import Answer, Trl

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 16}
TARGETS = ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LORA: dict[str, Any] = {"rank": 3, "alpha": 6.0, "targets": ["q_proj", "v_proj", "proj", "fc1", "fc2"]}
NUM_STEPS = 3
NUMBERS = {word: number for number, word in enumerate(["<unk>", "</s>", *WORDS])}
FIRST = {"dpo": math.log(2), "ipo": 25.0, "kto": 0.5}
"""Losses of a model that is its own reference, with beta 0.1."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A frozen model, two adapters of it with other matrices, a tokenizer, pairs and answers."""
    folder = tmp_path_factory.mktemp("adapters")
    torch.manual_seed(0)
    described = LlamaConfig(**SIZES, num_attention_heads=4, rms_norm_eps=1e-5, initializer_range=0.3)
    LlamaForCausalLM(described).save_pretrained(folder / "hf")
    save_tokenizer(folder)
    for seed, (name, rank) in enumerate({"adapter": 3, "other": 2}.items(), start=1):
        save_adapter(folder, name, seed, rank)
    pairs = [
        {"prompt": f"{prompt} ", "chosen": f"{answer} yes", "rejected": f"no {answer} no"} for prompt, answer in TEXTS
    ]
    answers = [{"prompt": f"{p} ", "completion": f"{a} yes", "label": i % 3 > 0} for i, (p, a) in enumerate(TEXTS)]
    for name, lines in (("pairs", pairs), ("answers", answers)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    return folder


def save_adapter(folder: Path, name: str | Path, seed: int, rank: int = 3, **changes: Any) -> None:
    """Saves a trained adapter: neither of its matrices is zero."""
    torch.manual_seed(seed)
    base = LlamaForCausalLM.from_pretrained(folder / "hf", dtype=torch.float32)
    settings = {"r": rank, "lora_alpha": 2 * rank, "target_modules": TARGETS, "task_type": "CAUSAL_LM"}
    model = peft.get_peft_model(base, peft.LoraConfig(**(settings | changes), init_lora_weights=False))
    model.save_pretrained(folder / name)


def config(folder: Path, run: str, kind: str, **changes: Any) -> Config:
    sections: dict[str, Any] = {
        "run": {"dir": str(folder / run)},
        "model": {"hf": str(folder / "hf")},
        "train": {"global_batch_size": 8, "num_steps": NUM_STEPS, "precision": "fp32"},
        "optimizer": {"lr": 0.01, "min_lr": 0.01, "clip_grad": 0.5},
        "loss": {"function": kind},
        "checkpoint": {"interval_steps": 1},
        "metrics": {"tensorboard": False},
        "adapter": {**LORA, "path": str(folder / "adapter")},
        "data": {
            "kind": "sft",
            "seq_length": 16,
            "tokenizer": str(folder),
            "cache_dir": str(folder / "cache"),
            "train": [{"path": str(folder / ("answers.jsonl" if kind == "kto" else "pairs.jsonl"))}],
        },
    }
    for key, value in changes.items():
        *parents, name = key.split("__")
        place = sections
        for parent in parents:
            place = place[parent]
        place[name] = value
    return Config.model_validate(with_architecture(sections))


class Oracle:
    """The adapter that learns and a frozen one, both on the same frozen model, in float64."""

    def __init__(self, folder: Path, reference: str | None) -> None:
        base = LlamaForCausalLM.from_pretrained(folder / "hf", dtype=torch.float64)
        self.model = peft.PeftModel.from_pretrained(base, folder / "adapter", is_trainable=True).double()
        if reference is not None:
            self.model.load_adapter(folder / reference, "ref")
            self.model.double()
        self.model.set_adapter("default")
        self.learned = {name: each for name, each in self.model.named_parameters() if ".default." in name}
        self.trl = Trl(self.policy, self.reference)
        self._has_reference = reference is not None

    def policy(self, ids: Tensor) -> Tensor:
        """Returns the logits of the adapter that learns."""
        logits: Tensor = self.model(ids).logits
        return logits

    def reference(self, ids: Tensor) -> Tensor:
        """Returns the logits of the frozen adapter."""
        if not self._has_reference:
            with self.model.disable_adapter():
                return self.policy(ids)
        self.model.set_adapter("ref")
        try:
            return self.policy(ids)
        finally:
            self.model.set_adapter("default")

    def loss(self, kind: str, folder: Path) -> Tensor:
        """Returns TRL's loss over all records."""
        if kind == "kto":
            lines = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
            answers = [answer_of(each["prompt"], each["completion"]) for each in lines]
            others = lines[len(lines) // 2 :] + lines[: len(lines) // 2]
            moved = [answer_of(one["prompt"], other["completion"]) for one, other in zip(lines, others, strict=True)]
            weights = {"desirable_weight": 1.0, "undesirable_weight": 1.0}
            return self.trl.kto(answers, [each["label"] for each in lines], moved, beta=0.1, **weights)
        lines = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
        chosen, rejected = (
            [answer_of(each["prompt"], each[role]) for each in lines] for role in ("chosen", "rejected")
        )
        types = {"dpo": "sigmoid", "ipo": "ipo"}
        return self.trl.pairs("dpo", chosen, rejected, loss_types=[types[kind]], beta=0.1, label_smoothing=0.0)

    def steps(self, kind: str, folder: Path, config: Config) -> list[tuple[float, float]]:
        """Returns loss and gradient norm of each update."""
        section, learned, found = config.optimizer, list(self.learned.values()), []
        assert isinstance(section, AdamWSection)
        constants: dict[str, Any] = {"betas": (section.beta1, section.beta2), "eps": section.epsilon}
        adam = torch.optim.AdamW(learned, section.lr, weight_decay=section.weight_decay, **constants)
        for _ in range(NUM_STEPS):
            adam.zero_grad()
            loss = self.loss(kind, folder)
            loss.backward()
            found.append((loss.item(), torch.nn.utils.clip_grad_norm_(learned, section.clip_grad).item()))
            adam.step()
        return found


def answer_of(prompt: str, answer: str) -> Answer:
    """Encodes as the tokenizer of whole words does: prompt, answer and the end."""
    first, second = ([NUMBERS[word] for word in text.split()] for text in (prompt, answer))
    return Answer([*first, *second, 1], [*[0] * len(first), *[1] * (len(second) + 1)])


def steps_of(run: Path) -> list[tuple[float, float]]:
    return [(each["loss"], each["grad_norm"]) for each in records(run)]


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("dpo", Layout(tp=2)),
        # they read the same scores
        pytest.param("ipo", Layout(pp=2), marks=pytest.mark.nightly),
        pytest.param("kto", Layout(dp=2), marks=pytest.mark.nightly),
        pytest.param("dpo", Layout(dp=2, shard="weights"), marks=pytest.mark.nightly),
    ],
)
def test_a_run_from_an_adapter_compares_with_it(pool: Pool, folder: Path, kind: str, layout: Layout) -> None:
    """Each update has TRL's loss and gradient norm; the first loss is that of a model that is its own reference."""
    run = config(folder, kind, kind, layout={"tp": layout.tp, "pp": layout.pp, "shard": layout.shard})
    pool.run(train_fresh, layout, run)
    found, expected = steps_of(folder / kind), Oracle(folder, "adapter").steps(kind, folder, run)
    assert found[0][0] == pytest.approx(FIRST[kind], rel=1e-5)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=2e-5)
    # compared with the frozen model alone, the loss differs
    assert abs(Oracle(folder, None).loss(kind, folder).item() / FIRST[kind] - 1) > 1e-2


@pytest.mark.parametrize(
    "is_gone", [pytest.param(True, marks=pytest.mark.nightly), False], ids=["gone", "another"]
)  # another one would be compared with, where it were looked at
@pytest.mark.nightly  # by day other scores than those of the first start are refused, below
def test_a_run_keeps_the_reference_of_its_first_start(pool: Pool, folder: Path, is_gone: bool) -> None:
    """The reference stays, whatever became of the first adapter, and whether or not the run still names it."""
    here = folder / f"resumed {is_gone}"
    shutil.copytree(folder / "adapter", here / "start")
    run = config(folder, f"resumed {is_gone}/run", "dpo", adapter__path=str(here / "start"))
    pool.run(train_fresh, Layout(), run)
    before = records(here / "run")
    shutil.rmtree(here / "run" / "checkpoints" / "step_00000003")
    shutil.rmtree(here / "start")
    if not is_gone:
        save_adapter(folder, here / "start", seed=7)
    again = config(folder, f"resumed {is_gone}/run", "dpo", adapter__path=None if is_gone else str(here / "start"))
    pool.run(train_fresh, Layout(), again)
    assert records(here / "run") == before


@pytest.mark.nightly  # by day other scores are refused, below
def test_a_run_that_begins_again_looks_at_the_adapter(pool: Pool, folder: Path) -> None:
    """A start that reached no checkpoint left scores of older weights, which are not used."""
    here = folder / "again"
    for seed in (7, 8):
        shutil.rmtree(here / "start", ignore_errors=True)
        save_adapter(folder, here / "start", seed)
        run = config(folder, "again/run", "dpo", adapter__path=str(here / "start"), train__num_steps=1)
        pool.run(train_fresh, Layout(), run)
        assert records(here / "run")[0]["loss"] == pytest.approx(math.log(2), rel=1e-6)
        assert len(list((here / "run" / "references").iterdir())) == 1
        shutil.rmtree(here / "run" / "checkpoints")


@pytest.mark.parametrize(
    "reference",
    [
        pytest.param("adapter", marks=pytest.mark.nightly),  # by day as the start of a run, above
        # by day a run of adapters, below
        pytest.param("other", marks=pytest.mark.nightly),
    ],
    ids=["of the run's form", "of another form"],
)
def test_a_folder_of_peft_is_compared_with(pool: Pool, folder: Path, reference: str) -> None:
    run = config(folder, f"peft {reference}", "dpo", loss__reference=str(folder / reference))
    pool.run(train_fresh, Layout(dp=2), run)
    found, expected = steps_of(folder / f"peft {reference}"), Oracle(folder, reference).steps("dpo", folder, run)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=2e-5)


def test_a_run_of_adapters_serves_as_reference_with_its_own_frozen_model(pool: Pool, folder: Path) -> None:
    """The reference is a run of adapters, the policy another whole model: the first loss is DPO's, in float64."""
    torch.manual_seed(5)
    described = LlamaConfig(**SIZES, num_attention_heads=4, rms_norm_eps=1e-5, initializer_range=0.3)
    LlamaForCausalLM(described).save_pretrained(folder / "whole")
    pool.run(train_fresh, Layout(), config(folder, "sft", "orpo"))
    export_adapter(folder / "sft", folder / "exported", None)
    keys = {"model__hf": str(folder / "whole"), "adapter": None, "loss__reference": str(folder / "sft")}
    run = config(folder, "beside", "dpo", **keys, train__num_steps=1)
    pool.run(train_fresh, Layout(), run)
    oracle = Oracle(folder, "exported")
    whole = LlamaForCausalLM.from_pretrained(folder / "whole", dtype=torch.float64)
    oracle.trl = Trl(lambda ids: whole(ids).logits, oracle.reference)
    assert records(folder / "beside")[0]["loss"] == pytest.approx(oracle.loss("dpo", folder).item(), rel=1e-5)
    assert read_manifest(folder / "beside" / "checkpoints" / "step_00000001").reference == str(folder / "sft")


@pytest.mark.fault(
    "input",
    "loss.reference names an adapter that is none of this model, or whose settings have no form here",
    happens="a DataError names loss.reference, the folder and what does not fit, before the first step",
    exit_code=3,
)
@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({"target_modules": ["q_proj"], "rank_pattern": {"0.self_attn.q_proj": 4}}, "rank_pattern"),
        ({"target_modules": ["q_proj"], "layers_to_transform": [1]}, "layers_to_transform"),
    ],
    ids=["ranks", "layers"],
)
def test_an_adapter_that_cannot_be_compared_with_is_named(
    pool: Pool, folder: Path, notice: Notice, changes: dict[str, Any], fact: str
) -> None:
    save_adapter(folder, "odd", 3, **changes)
    with notice, refuses(DataError, "loss.reference", fact):
        pool.run(train_fresh, Layout(), config(folder, "refused", "dpo", loss__reference=str(folder / "odd")))
    assert notice.exit_code == DataError.exit_code


@pytest.mark.fault(
    "disk",
    "scores of the reference model are removed, and the adapter that the run began from is another one",
    happens="a DataError says that the scores are others and what to restore, before the next step",
    exit_code=3,
)
def test_other_scores_of_the_reference_are_refused(pool: Pool, folder: Path, notice: Notice) -> None:
    here = folder / "removed"
    shutil.copytree(folder / "adapter", here / "start")
    run = config(folder, "removed/run", "dpo", adapter__path=str(here / "start"), train__num_steps=1)
    pool.run(train_fresh, Layout(), run)
    shutil.rmtree(here / "run" / "references")
    save_adapter(folder, here / "start", seed=7)
    with notice, refuses(DataError):
        pool.run(train_fresh, Layout(), run)
    assert notice.exit_code == DataError.exit_code


def test_check_finds_every_form_of_a_reference(pool: Pool, folder: Path) -> None:
    pool.run(train_fresh, Layout(), config(folder, "short", "orpo", train__num_steps=1))
    for name, code in (("hf", 0), ("other", 0), ("short", 0), ("nowhere", 3)):
        given = config(folder, "checked", "dpo", loss__reference=str(folder / name))
        (folder / "checked.yaml").write_text(config_yaml(given))
        found, text = call("check", folder / "checked.yaml", "--world-size", 1)
        assert (found, f"{folder / name}" in text) == (code, True), text
