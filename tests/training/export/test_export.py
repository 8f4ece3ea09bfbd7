"""`checkpoint.export_hf_every_steps`: Hugging Face folders that appear while a run trains."""

import contextlib
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import transformers

from mtrain.base.errors import ConfigError, DataError
from mtrain.base.tensor_slice import TensorSlice
from mtrain.checkpoint.format.reader import CheckpointTensors
from mtrain.checkpoint.store.directory import delete_checkpoint, load_entry
from mtrain.runs.folder import RunFolder
from mtrain.training.export import Exporter
from mtrain.training.resume import claim
from tests.config.samples import config
from tests.hf.folders import save
from tests.messages import refuses
from tests.training.test_start_from_hf import command, configured


def test_a_sharded_run_exports_what_transformers_loads(tmp_path: Path) -> None:
    save("qwen3", tmp_path / "hf")
    for name, content in {"tokenizer_config.json": "{}", "generation_config.json": '{"temperature": 0.5}'}.items():
        (tmp_path / "hf" / name).write_text(content)
    configured(tmp_path)
    split = ("layout.pp=2", "layout.stage_layers=[1,2]", "train.num_steps=5", "train.precision=bf16")
    saves = ("checkpoint.interval_steps=1", "checkpoint.export_hf_every_steps=2", "checkpoint.keep_last=1")
    result = command("launch", "local", "-n", 2, tmp_path / "run.yaml", *split, *saves)
    assert result.returncode == 0, result.stderr
    exports = tmp_path / "run" / "exports"
    assert sorted(path.name for path in exports.iterdir()) == ["step_00000002", "step_00000004"]
    last = exports / "step_00000004"
    assert (last / "generation_config.json").read_text() == '{"temperature": 0.5}'
    assert (last / "tokenizer_config.json").exists()
    model = transformers.AutoModelForCausalLM.from_pretrained(last, dtype="auto")
    first = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto")
    assert (model.dtype, model.config.vocab_size) == (torch.bfloat16, 57)
    assert not torch.equal(model.model.norm.weight, first.model.norm.weight), "nothing was trained"
    said, source = (json.loads((folder / "config.json").read_text()) for folder in (last, tmp_path / "hf"))
    assert {name: value for name, value in said.items() if name in source} == source
    assert said.keys() - source.keys() == {"rope_theta", "rope_scaling", "torch_dtype"}  # for transformers 4


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a run that saved at step 2 and exported nothing."""
    folder = tmp_path_factory.mktemp("finished")
    save("llama", folder / "hf")
    configured(folder)
    assert command("train", folder / "run.yaml").returncode == 0
    return folder / "run"


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> RunFolder:
    """Copies that run."""
    return RunFolder(Path(shutil.copytree(finished, tmp_path / "run")))


def test_the_next_start_exports_what_was_left_to_do_and_keeps_it_until_then(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    exporter = Exporter(run, 2)
    exporter.poll()
    assert not delete_checkpoint(run.checkpoints, 2), "it is being exported"
    exporter.finish()
    model = transformers.AutoModelForCausalLM.from_pretrained(run.exports / "step_00000002", dtype="auto")
    tensors = CheckpointTensors(load_entry(run.checkpoints / "step_00000002").path)
    assert torch.equal(
        model.model.norm.weight, tensors.read("decoder.final_layernorm.weight", TensorSlice((0,), (32,)))
    )
    Exporter(run, 2).finish()
    assert capsys.readouterr().out.count("exported") == 1
    assert delete_checkpoint(run.checkpoints, 2)


def test_an_export_that_fails_is_reported_and_leaves_nothing(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    text = run.config.read_text()
    run.config.write_text(re.sub(r"(?m)^  hf: .*", "  hf: null", text).replace("num_layers: 3", "num_layers: 4"))
    exporter = Exporter(run, 1)
    with refuses(DataError, "step 2"):
        exporter.finish()
    assert "training continues" in capsys.readouterr().err
    assert not run.exports.exists()
    assert delete_checkpoint(run.checkpoints, 2)


def test_exports_need_checkpoints(tmp_path: Path) -> None:
    save("llama", tmp_path / "hf")
    with refuses(ConfigError, "export_hf_every_steps=3", "interval_steps=2"):
        configured(tmp_path, "checkpoint.interval_steps=2", "checkpoint.export_hf_every_steps=3")


def test_the_chat_templates_of_a_run_are_kept_for_its_exports(tmp_path: Path) -> None:
    template = tmp_path / "own.jinja"
    template.write_text("T")
    (tmp_path / "tokenizer.json").write_text("{}")
    data = {"data__kind": "sft", "data__train": [{"path": "x"}], "data__tokenizer": str(tmp_path)}
    folder = RunFolder(tmp_path / "run")
    with contextlib.ExitStack() as held:
        claim(folder, config(run__dir=str(folder.path), **data, data__chat_template=str(template)), held)
    template.unlink()
    assert folder.saved_chat_templates() == {"chat_template.jinja": "T"}
    with contextlib.ExitStack() as held:
        claim(folder, config(run__dir=str(folder.path)), held)
    assert folder.saved_chat_templates() == {}
