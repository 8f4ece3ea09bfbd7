"""`mtrain verify hf`: steps in transformers and here, from the same weights on the same samples."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from mtrain.arch.layout import Layout
from mtrain.base.errors import ConfigError
from mtrain.cli.main import app
from mtrain.config import Config
from mtrain.config.schema.train import AdamWSection
from mtrain.hf.configuration import load_config
from mtrain.verify.core.result import HfReport
from mtrain.verify.core.samples import SamplePlan
from mtrain.verify.core.texts import texts_of
from mtrain.verify.hf import comparable, run_from_hf, verify_hf
from mtrain.verify.parity import Request
from tests.hf.folders import save
from tests.messages import refuses
from tests.pool import Pool
from tests.verify.hf import waiting_ranks
from tests.verify.reports import read_back

RUN = """
run: {dir: RUN}
model: {hf: HF}
train: {global_batch_size: 4, micro_batch_size: 2, num_steps: 6, precision: bf16, device: cpu}
optimizer: {lr: 1.0e-2, schedule: cosine, warmup_steps: 1, clip_grad: 0.1}
data: {kind: mock, seq_length: 16}
"""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Uses one thread, as threads of tiny products wait for each other longer than they compute."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


def configured(folder: Path, *overrides: str) -> Config:
    path = folder / "run.yaml"
    path.write_text(RUN.replace("RUN", str(folder / "run")).replace("HF", str(folder / "hf")))
    return load_config([path], overrides)


NUM_STEPS = 2
"""Number of steps; the second one has moments and another learning rate."""
CASES: list[tuple[str, dict[str, Any], list[str], str | None]] = [
    ("llama-tied", {}, ["layout.pp=2", "layout.stage_layers=[2,1]"], None),
    ("qwen3", {}, [], "tp2sp,cp2"),
    ("deepseek", {}, ["layout.ep=2"], None),
    ("gpt-oss", {}, ["train.micro_batch_size=4"], "dp1-mbs4"),
    ("glm4-moe", {}, ["layout.ep=2"], None),
    ("minimax", {"num_key_value_heads": 4}, [], "cp2"),
]


@pytest.mark.parametrize(
    ("name", "changes", "overrides", "layouts"),
    # the last two have the rotary embedding of their own alone, by day in tests/parity/models
    [pytest.param(*case, id=case[0], marks=[pytest.mark.nightly] * (case in CASES[-2:])) for case in CASES],
)
def test_steps_are_those_of_transformers(
    pool: Pool, tmp_path: Path, name: str, changes: dict[str, Any], overrides: list[str], layouts: str | None
) -> None:
    save(name, tmp_path / "hf", **changes)
    config = configured(tmp_path, *overrides)
    report = verify_hf(config, Request(layouts, NUM_STEPS, 4, None, "test"), print, pool)
    deviations = [(each.kind, each.step, each.value) for layout in report.layouts for each in layout.deviations]
    assert report.passed, deviations
    assert {len(layout.steps) for layout in report.layouts} == {NUM_STEPS}
    assert len(report.layouts) == 1 + (layouts or "").count(",")
    assert all(step.grad_norm > config.optimizer.clip_grad for step in report.reference.steps), "nothing was clipped"


@pytest.mark.parametrize("name", ["llama-tied", "qwen3"], ids=["tied", "untied"])
def test_a_token_that_pads_elsewhere_learns_as_text_and_that_is_said(pool: Pool, tmp_path: Path, name: str) -> None:
    """transformers leaves out the gradient of its embedding."""
    save(name, tmp_path / "hf", pad_token_id=3)
    config = configured(tmp_path)
    said = list[str]()
    report = verify_hf(config, Request(None, NUM_STEPS, 4, None, "test"), said.append, pool)
    deviations = [(each.kind, each.step, each.value) for layout in report.layouts for each in layout.deviations]
    assert report.passed, deviations
    (note,) = [line for line in report.changes if line.startswith("transformers: padding_idx=3 -> None")]
    assert note in said
    texts = texts_of(comparable(config)[0], SamplePlan(NUM_STEPS, 0, config.model.vocab_size)).steps
    assert any(3 in text.ids[:-1] for step in texts for text in step), "the token does not occur"


class _OtherScale:
    """Pool whose ranks attend with another scale."""

    def __init__(self, pool: Pool) -> None:
        self._pool, self.device = pool, pool.device

    def run(self, function: object, layout: Layout, *arguments: Any) -> list[Any]:
        """Runs a function like the pool of the suite."""
        assert function is run_from_hf
        return self._pool.run(waiting_ranks.run_with_another_scale, layout, *arguments)


@pytest.mark.parametrize(
    ("fault", "axis", "reported"),
    [
        pytest.param(  # by day tests/verify/planted/test_shared_faults.py
            None, "every layout", "even one process: the layout is not at fault", marks=pytest.mark.nightly
        ),
        ("positions-not-zigzag", "cp", "cp alone breaks the run"),
    ],
    ids=["softmax-scale-off", "positions-not-zigzag"],
)
def test_one_process_is_run_where_layouts_fail(
    pool: Pool, tmp_path: Path, fault: str | None, axis: str, reported: str
) -> None:
    save("qwen3", tmp_path / "hf")
    ranks: Any = _OtherScale(pool) if fault is None else pool
    report = verify_hf(configured(tmp_path), Request("cp2", 1, 4, fault, "test"), print, ranks)
    assert [layout.num_ranks for layout in report.layouts] == [1, 2]
    assert [layout.passed for layout in report.layouts] == [axis == "cp", False]
    assert report.diagnosis is not None
    assert report.diagnosis.axis == axis
    assert reported in report.diagnosis.lines[0]


def test_the_command_writes_its_report_and_tells_the_verdict(tmp_path: Path) -> None:
    save("qwen2", tmp_path / "hf")
    configured(tmp_path)
    arguments = ["verify", "hf", str(tmp_path / "run.yaml"), "--hf", str(tmp_path / "hf"), "--steps", "2"]
    good = CliRunner().invoke(app, [*arguments, "--layouts", "tp1"])
    assert good.exit_code == 0, good.output
    report = read_back(HfReport, (tmp_path / "run" / "hf" / "hf.json").read_text())
    assert report.changes == ("train.precision: bf16 -> fp32",)
    page = (tmp_path / "run" / "hf" / "hf.html").read_text()
    assert "The layout is the run of transformers" in page
    assert "gradient norm" in page
    wrong = CliRunner().invoke(app, [*arguments, "--layouts", "cp2", "--inject", "positions-not-zigzag"])
    assert wrong.exit_code == 1, wrong.output
    assert "FAIL: 1 of 2 layouts is not the run of transformers" in wrong.output
    assert json.loads((tmp_path / "run" / "hf" / "hf.json").read_text())["diagnosis"]["step"] == 1


@pytest.mark.parametrize(
    ("override", "fact"),
    [
        ("model.hidden_dropout=0.1", "hidden_dropout"),
        ("loss.options={label_smoothing: 0.1}", "loss.options"),
        ("loss.router.z_coefficient=0.1", "router"),
        ("loss.side_terms={z: {function: 'z_loss'}}", "loss.side_terms"),
        ("adapter={kind: lora, rank: 2, targets: [proj]}", "adapter"),
    ],
)
def test_what_transformers_does_not_compute_is_refused(tmp_path: Path, override: str, fact: str) -> None:
    save("mixtral", tmp_path / "hf")
    with refuses(ConfigError, fact):
        comparable(configured(tmp_path, override))


def test_muon_is_compared_under_adamw_and_that_is_said(tmp_path: Path) -> None:
    save("mixtral", tmp_path / "hf")
    given = configured(tmp_path, "optimizer.kind=muon", "optimizer.beta2=0.9")
    found, lines = comparable(given)
    assert found.optimizer == AdamWSection.model_validate(
        {name: getattr(given.optimizer, name) for name in AdamWSection.model_fields} | {"kind": "adamw"}
    )
    assert found.optimizer.beta2 == 0.9
    assert "optimizer.kind: muon -> adamw" in lines


def test_ranks_wait_for_one_that_opens_its_data_late(pool: Pool, tmp_path: Path) -> None:
    """The late rank may tokenize for all: no collective, and so no timeout, may begin before it is done."""
    save("llama", tmp_path / "hf")
    config, seen = configured(tmp_path, "layout.tp=1"), tmp_path / "seen"
    seen.mkdir()
    assert pool.run(waiting_ranks.num_open, Layout(dp=2), config, str(seen)) == [2, 2]
