"""An offline step of a policy through the command line: rollouts in a file, as a program hands them over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from tokenizers import Tokenizer, models, pre_tokenizers

from mtrain import Datum
from mtrain.arch.layout import Layout
from mtrain.arch.lr import learning_rate
from mtrain.base.errors import ConfigError
from mtrain.config import Config
from mtrain.core.batch.datum import sample_of
from mtrain.data.loader import StepLoader
from mtrain.verify.core.worker import run_objective
from mtrain.verify.parity import refuse_without_reference
from tests.config.samples import config
from tests.fault_table import Notice
from tests.messages import refuses
from tests.parity.cases import case
from tests.parity.compare import TOLERANCE, relative, without_padding, worst
from tests.parity.expert_models import DEEPSEEK
from tests.parity.replay import drawn_routes
from tests.pool import Pool
from tests.reference import exact_steps
from tests.training import replay_ranks
from tests.training.extras_ranks import steps_of_config
from tests.training.one_process import train_fresh

VOCAB, STEPS = 40, 2
NAMES = ("advantages", "old_logprobs", "ref_logprobs")
GRPO: dict[str, Any] = {
    "loss__function": "ppo",
    "loss__options": {"clip_high": 0.28},
    "loss__aggregation": "seq-mean-token-mean",
    "loss__side_terms": {"kl": {"function": "kl", "coefficient": 0.05, "aggregation": "seq-mean-token-mean"}},
}


def rollouts() -> list[dict[str, Any]]:
    """Makes rollouts, of which some have one loss token."""
    rng, records = np.random.default_rng(3), []
    for number in range(8):
        size = 2 + 2 * number
        mask = [0.0] * (size // 2) + [1.0] * (size - size // 2)
        near = {name: (-3.7 + rng.normal(0, 0.3, size)).tolist() for name in NAMES[1:]}
        ids = rng.integers(3, VOCAB, size).tolist()
        records.append({"input_ids": ids, "loss_mask": mask, "advantages": rng.normal(), "weight": 1.0, **near})
    return records


def of_teacher() -> list[dict[str, Any]]:
    """Makes the same texts with a teacher's three likeliest tokens at each position."""
    rng, records = np.random.default_rng(4), []
    for each in rollouts():
        logits = rng.normal(0, 2, (len(each["input_ids"]), VOCAB))
        best = np.argsort(-logits, axis=1)[:, :3]
        given = np.take_along_axis(logits, best, axis=1) - np.log(np.exp(logits).sum(1, keepdims=True))
        kept = {name: each[name] for name in ("input_ids", "loss_mask")}
        records.append(kept | {"topk_ids": best.tolist(), "topk_logprobs": given.tolist()})
    return records


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes rollouts and a tokenizer."""
    path = tmp_path_factory.mktemp("policy")
    (path / "rollouts.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rollouts()))
    (path / "teacher.jsonl").write_text("".join(json.dumps(each) + "\n" for each in of_teacher()))
    words = {word: number for number, word in enumerate(["<unk>", "<s>", "</s>", *map(str, range(VOCAB - 3))])}
    model = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    model.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    return path


def small(folder: Path, **changes: Any) -> Config:
    given: dict[str, Any] = {
        "run__dir": str(folder / "run"),
        "model__num_layers": 1,
        "model__hidden_size": 32,
        "model__ffn_hidden_size": 32,
        "model__vocab_size": VOCAB,
        "train__global_batch_size": 8,
        "train__num_steps": STEPS,
        "train__precision": "fp32",
        "optimizer__lr": 0.01,
        "metrics__tensorboard": False,
        "checkpoint__self_test": False,
        "data": {"kind": "sft", "seq_length": 16},
        "data__train": [{"path": str(folder / "rollouts.jsonl")}],
        "data__tokenizer": str(folder),
        "data__cache_dir": str(folder / "cache"),
        "data__extras": NAMES,
    }
    return config(**given | GRPO | changes)


def test_rollouts_of_a_file_are_those_of_a_program(pool: Pool, folder: Path) -> None:
    """Two steps over all rollouts, packed and cut for cp, and alone, agree in loss, norm, each term and diagnostics."""
    cut = small(folder, layout__cp=2, data__packing={})
    pool.run(train_fresh, Layout(cp=2), cut, seed=cut.train.seed)
    lines = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    records = [line for line in lines if line["kind"] == "step"]
    data = [
        Datum(each["input_ids"], each["loss_mask"], extras={name: each[name] for name in NAMES}) for each in rollouts()
    ]
    alone = small(folder)
    (steps,) = pool.run(steps_of_config, Layout(), alone, data, STEPS, seed=alone.train.seed)
    assert len(records) == len(steps) == STEPS
    for record, step in zip(records, steps, strict=True):
        found = {**record["diagnostics"], "loss": record["loss"], "grad_norm": record["grad_norm"]}
        wanted = {**step.diagnostics, "loss": step.loss, "grad_norm": step.grad_norm}
        assert found == pytest.approx(wanted, rel=1e-5)
        assert record["objective"] == pytest.approx(step.objective, rel=1e-5)
        assert set(step.diagnostics) == {"clip_fraction", "approximate_kl", "ratio", "ratio_max"}
    assert steps[0].loss != steps[1].loss


@pytest.mark.nightly  # tests/parity/objectives/test_top_k.py; files with extras: below
def test_a_teacher_s_likeliest_tokens_are_learned_from(pool: Pool, folder: Path) -> None:
    """A file under cp, packed, gives what a program gives on one rank; a file with too few tokens is refused."""
    given: dict[str, Any] = {
        "run__dir": str(folder / "distilled"),
        "data__train": [{"path": str(folder / "teacher.jsonl")}],
        "data__extras": ["topk_ids:3", "topk_logprobs:3"],
        "loss__function": "topk_distillation",
        "loss__options": {"k": 3},
        "loss__side_terms": {},
    }
    cut = small(folder, **given, layout__cp=2, data__packing={})
    pool.run(train_fresh, Layout(cp=2), cut, seed=cut.train.seed)
    lines = map(json.loads, (folder / "distilled" / "metrics.jsonl").read_text().splitlines())
    losses = [line["loss"] for line in lines if line["kind"] == "step"]
    names = ("topk_ids", "topk_logprobs")
    data = [
        Datum(each["input_ids"], each["loss_mask"], extras={name: each[name] for name in names})
        for each in of_teacher()
    ]
    alone = small(folder, **given)
    (steps,) = pool.run(steps_of_config, Layout(), alone, data, STEPS, seed=alone.train.seed)
    assert losses == pytest.approx([step.loss for step in steps], rel=1e-5)
    assert losses[1] < losses[0]
    with refuses(ConfigError, "data.extras=[topk_ids:4,topk_logprobs:4]"):
        pool.run(
            train_fresh,
            Layout(),
            small(folder, **given | {"loss__options": {"k": 4}, "run__dir": str(folder / "more")}),
        )


@pytest.mark.fault(
    "input",
    "a loss that reads numbers which the records do not bring along",
    happens="refused before data and model are opened, with the keys to name",
    exit_code=2,
)
def test_what_a_loss_reads_has_to_be_named(pool: Pool, folder: Path, notice: Notice) -> None:
    lacking = small(folder, data__extras=["advantages"], run__dir=str(folder / "refused"))
    with notice, refuses(ConfigError, "old_logprobs", "ref_logprobs", "data.extras=[advantages,") as refused:
        pool.run(train_fresh, Layout(), lacking)
    assert refused.value.exit_code == notice.exit_code


def test_records_of_pairs_have_no_such_numbers(folder: Path) -> None:
    dpo: dict[str, Any] = {"loss__options": {}, "loss__side_terms": {}, "loss__aggregation": "seq-mean-token-sum"}
    with pytest.raises(
        ValidationError, match=r"data\.extras=\['advant.* but loss\.function=dpo compares several answers"
    ):
        small(folder, loss__function="dpo", **dpo)


def test_verify_says_that_it_has_no_such_numbers(folder: Path) -> None:
    """Ranks refuse it, and `verify resume` and `hf` do before they start any, instead of reporting a failed run."""
    for refuse in (run_objective, refuse_without_reference):
        with refuses(ConfigError, "old_logprobs"):
            refuse(small(folder))


EXPERTS: dict[str, Any] = {
    **DEEPSEEK,
    "model__num_layers": 2,
    "data__extras": [*NAMES, "routed_experts:2x4"],
    "optimizer__epsilon": 1e-3,  # as in tests/parity/cases.py
}


def routed(folder: Path, layout: dict[str, Any], **changes: Any) -> Config:
    """Returns a run on rollouts of a model with experts, which name them; writes its file."""
    name = "-".join(f"{key}{value}" for key, value in layout.items())
    given = {**EXPERTS, **{f"layout__{key}": value for key, value in layout.items() if key != "dp"}}
    given |= {"run__dir": str(folder / name), "data__train": [{"path": str(folder / "routed.jsonl")}]}
    found = small(folder, **given, **changes)
    rng, records = np.random.default_rng(8), rollouts()
    for number, each in enumerate(records):
        routes = drawn_routes(rng, len(each["input_ids"]) - number % 2, found.model)
        routes[: len(routes) // 3] = -1  # as of a prompt of which nobody knows the experts
        each["routed_experts"] = routes.tolist()
    (folder / "routed.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    return found


def as_datum(record: dict[str, Any]) -> Datum:
    extras = {name: record[name] for name in NAMES}
    return Datum(record["input_ids"], record["loss_mask"], extras=extras, routed_experts=record["routed_experts"])


def batches_of(config: Config, records: list[dict[str, Any]]) -> list[list[Datum]]:
    """Returns the records of each step in the order in which the run has them."""
    loader, data = StepLoader(config, 0, 1), {tuple(each["input_ids"][:-1]): as_datum(each) for each in records}
    steps = [loader.samples(step) for step in range(config.train.num_steps)]
    return [
        [data[tuple(sample.tokens.tolist())] for slot in range(8) if (sample := step.sample(slot)) is not None]
        for step in steps
    ]


PACKED: dict[str, Any] = {"data__packing": {}}


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ({"tp": 2, "sp": True, "ep": 2}, PACKED),
        # by day tests/verify/parity/test_run.py replays experts of records under cp
        pytest.param({"cp": 2, "ep": 2}, PACKED, marks=pytest.mark.nightly),
        pytest.param({"dp": 2, "ep": 2}, {}, marks=pytest.mark.nightly),
        pytest.param({"pp": 2}, PACKED, marks=pytest.mark.nightly),
        pytest.param({"cp": 2, "cp_comm": "ulysses"}, {}, marks=pytest.mark.nightly),
    ],
    ids=["tp2sp ep2 packed", "cp2 ep2 packed", "dp2 ep2", "pp2 packed", "ulysses"],
)
@pytest.mark.nightly  # test_routing_replay.py; records of a file: tests/verify/parity/test_run.py
def test_experts_of_a_file_are_replayed(
    pool: Pool, folder: Path, layout: dict[str, Any], changes: dict[str, Any]
) -> None:
    """Three steps are those of an `Engine` that is given data with experts, to the bit, and those of the oracle."""
    cut = routed(folder, layout, **changes, train__num_steps=3)
    of_ranks = case(**layout).resolved(cut)
    pool.run(train_fresh, of_ranks, cut, seed=cut.train.seed)
    lines = map(json.loads, (Path(cut.run.dir) / "metrics.jsonl").read_text().splitlines())
    records = [line for line in lines if line["kind"] == "step"]
    batches = batches_of(cut, [*map(json.loads, (folder / "routed.jsonl").read_text().splitlines())])
    found = pool.run(replay_ranks.steps_of, of_ranks, cut, batches, seed=cut.train.seed)[0]
    assert [each["loss"] for each in records] == [each.loss for each in found.steps]
    assert [each["grad_norm"] for each in records] == [each.grad_norm for each in found.steps]
    samples = [[sample_of(datum, "sample", cut) for datum in batch] for batch in batches]
    before = without_padding(found.before, VOCAB)
    rates = [learning_rate(step, cut.optimizer, cut.train.num_steps) for step in range(3)]
    exact = exact_steps(cut, before, rates, samples)
    for record, wanted in zip(records, exact, strict=True):
        assert relative(record["objective"], wanted.loss) < TOLERANCE
        assert relative(record["grad_norm"], wanted.grad_norm) < TOLERANCE
    weights = {name: value.numpy() for name, value in exact[-1].parameters.items()}
    assert worst(found.after, weights, cut) < TOLERANCE
