"""`model.hf`: a Hugging Face folder gives the architecture and the weights that a run starts from."""

import json
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtrain.arch.layout import Layout
from mtrain.base.errors import ConfigError, DataError
from mtrain.config import Config
from mtrain.config.load import config_yaml
from mtrain.convert.exporting import export_hf
from mtrain.convert.importing import import_hf
from mtrain.hf.configuration import load_config
from tests.convert.test_round_trips import names
from tests.hf import hf_ranks
from tests.hf.folders import save
from tests.messages import refuses
from tests.pool import Pool
from tests.warm import completed

RUN = """
run: {dir: RUN}
model: {hf: HF}
train: {global_batch_size: 4, num_steps: 2, precision: fp32, device: cpu}
optimizer: {lr: 1.0e-3, schedule: constant}
data: {kind: mock, seq_length: 16}
metrics: {tensorboard: false}
"""


def configured(folder: Path, *overrides: str) -> Config:
    path = folder / "run.yaml"
    path.write_text(RUN.replace("RUN", str(folder / "run")).replace("HF", str(folder / "hf")))
    return load_config([path], overrides)


def command(*arguments: object) -> "subprocess.CompletedProcess[str]":
    return completed([sys.executable, "-m", "mtrain", *arguments])


LAYOUTS = [
    ("llama-tied", {"num_hidden_layers": 4}, "{pp: 2, vpp: 2}", 2),
    # the day covers tp, ep and pp by the others, families in tests/hf and tests/core/state
    ("mistral", {}, "{tp: 2, sp: true, pp: 2, stage_layers: [1, 2]}", 4),
    ("deepseek", {}, "{ep: 2, pp: 2, stage_layers: [2, 1]}", 4),
    ("gpt-oss", {"num_local_experts": 4, "num_key_value_heads": 2}, "{tp: 2, sp: true, etp: 1, ep: 2}", 2),
]


@pytest.mark.parametrize(
    ("name", "changes", "layout", "ranks"),
    [pytest.param(*row, id=row[0], marks=[pytest.mark.nightly] * (row[3] > 2)) for row in LAYOUTS],
)
def test_a_start_has_the_weights_of_an_import_on_any_layout(
    pool: Pool, tmp_path: Path, name: str, changes: dict[str, Any], layout: str, ranks: int
) -> None:
    save(name, tmp_path / "hf", **changes)
    import_hf(tmp_path / "hf", tmp_path / "ours", None, num_workers=1)
    config = configured(tmp_path, f"layout={layout}", "train.precision=bf16")
    alone = configured(tmp_path, "train.precision=bf16")
    found = pool.run(hf_ranks.started_weights, Layout.from_config(config, ranks), config)[0]
    expected = pool.run(hf_ranks.weights, Layout(), tmp_path / "ours", alone)[0]
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        rows = 57 if value.shape[0] > 57 and "layers" not in key else value.shape[0]
        np.testing.assert_array_equal(found[key][:rows], value[:rows], err_msg=key)
    assert not any(value[57:].any() for key, value in found.items() if value.shape[0] > 57 and "layers" not in key)


def test_weights_of_the_parameters_dtype_are_read_where_they_belong(pool: Pool, tmp_path: Path) -> None:
    """A second copy of a rank's weights would cost as much time and memory as reading them."""
    save("llama-tied", tmp_path / "hf")
    held, rounded = (
        pool.run(hf_ranks.read_outside_parameters, Layout(), configured(tmp_path, f"train.precision={precision}"))[0]
        for precision in ("bf16", "fp32")
    )
    assert held.shards == 0
    assert rounded.shards > 10, "bfloat16 on disk"
    assert 0 <= rounded.most < rounded.largest, "a second copy of more than a parameter"


def test_the_next_tensor_is_on_its_way_while_one_is_copied(pool: Pool, tmp_path: Path) -> None:
    save("llama-tied", tmp_path / "hf")
    asked = pool.run(hf_ranks.reads_of_a_start, Layout(), configured(tmp_path, "train.precision=bf16"))[0]
    turns = [(name, key, wanted.offset) for name, key, wanted in asked if name != "set"]
    places = [each[1:] for each in turns if each[0] == "read"]
    assert len(places) > 10
    for previous, place in pairwise(places):
        assert turns.index(("expect", *place)) < turns.index(("read", *previous)), place
    names = [each[0] for each in asked]
    last_read = len(names) - 1 - names[::-1].index("read")
    assert names[last_read:].count("set") == 1, "main weights are set after each parameter"
    assert names.count("set") > 10


def test_a_run_starts_from_a_folder_and_goes_on_without_it(tmp_path: Path) -> None:
    """The teacher is a run from an import of the same folder; both agree until the first update."""
    save("qwen2", tmp_path / "hf")
    import_hf(tmp_path / "hf", tmp_path / "ours", None, num_workers=1)
    configured(tmp_path)
    checked = command("check", tmp_path / "run.yaml", "--world-size", 2, "layout.pp=2", "layout.stage_layers=[1,2]")
    assert checked.returncode == 0, checked.stderr
    split = ("layout.pp=2", "layout.stage_layers=[1,2]")
    teacher = (
        f"loss.teacher.checkpoint={tmp_path / 'ours'}",
        "loss.side_terms.kl.function=distillation",
    )
    first = command("launch", "local", "-n", 2, tmp_path / "run.yaml", *split, *teacher)
    assert first.returncode == 0, first.stderr
    assert f"loading {tmp_path / 'hf'}" in first.stdout
    export_hf(tmp_path / "run", tmp_path / "back", None, None, num_workers=1)
    assert names(tmp_path / "back") == names(tmp_path / "hf")
    shutil.rmtree(tmp_path / "hf")
    again = command(
        "train", tmp_path / "run" / "config.yaml", "layout.pp=1", "layout.stage_layers=null", "train.num_steps=3"
    )
    assert again.returncode == 0, again.stderr
    assert "step_00000002" in again.stdout
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    one, two, three = (step["terms"]["kl"]["loss"] for step in steps)
    assert abs(one) < 1e-7 < two < three
    gone = command("train", tmp_path / "run.yaml")
    assert gone.returncode == 2
    assert "has no config.json" in gone.stderr


def test_the_resolved_configuration_says_the_architecture_and_repeats_itself(tmp_path: Path) -> None:
    save("deepseek", tmp_path / "hf")
    config = configured(tmp_path, "model.experts.dispatcher=allgather", "model.vocab_multiple=8", "model.num_layers=3")
    assert config.model.experts is not None
    assert (config.model.hf, config.model.mla is None) == (str(tmp_path / "hf"), False)
    assert (config.model.experts.num_experts, config.model.experts.dispatcher) == (6, "allgather")
    (tmp_path / "again.yaml").write_text(config_yaml(config))
    assert load_config([tmp_path / "again.yaml"], []) == config


@pytest.mark.parametrize(
    ("override", "fact"),
    [
        ("model.num_layers=5", "model.num_layers=5"),
        ("model.rope.base=1", "model.rope.base=1.0"),
        ("model.num_layer=5", "model.num_layer"),
        ("model.mtp_depths=1", "model.mtp_depths=1"),
        ("checkpoint.initialize_from=elsewhere", "checkpoint.initialize_from"),
        ("model.hf=elsewhere", "model.hf=elsewhere"),
    ],
)
def test_what_does_not_agree_with_the_folder_is_refused_by_name(tmp_path: Path, override: str, fact: str) -> None:
    save("llama", tmp_path / "hf")
    with refuses(ConfigError, fact):
        configured(tmp_path, override)


def test_a_folder_that_changed_meanwhile_is_refused_on_every_rank(pool: Pool, tmp_path: Path) -> None:
    save("mistral", tmp_path / "hf")
    config = configured(tmp_path, "layout.tp=2")
    said = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**said, "rope_parameters": {"rope_theta": 7.0}}))
    with refuses(DataError, "model.rope"):
        pool.run(hf_ranks.started_weights, Layout.from_config(config, 2), config)
