"""Predictions further ahead of Qwen3-Next and Qwen3.5: trained where they are asked for, else carried along."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mtrain.arch.layout import Layout
from mtrain.base.errors import ConfigError, DataError
from mtrain.checkpoint.format.reader import CheckpointTensors
from mtrain.config import Config
from mtrain.config.load import save_config
from mtrain.convert.exporting import export_hf
from mtrain.convert.importing import import_hf
from mtrain.convert.verifying import verify_hf
from mtrain.hf.schema.description import described_model, with_architecture
from tests.cli.command_line import call
from tests.core.state import checkpoint_ranks
from tests.hf.ahead import CONFIGS, FILE, save_ahead
from tests.messages import check_message, refuses
from tests.pool import Pool


@pytest.mark.parametrize("depths", [0, 1])
@pytest.mark.parametrize(  # qwen3.5 has the names of qwen3-next in a model with a tower, as qwen3.5-moe has
    "name", [pytest.param(name, marks=[pytest.mark.nightly] if name == "qwen3.5" else []) for name in CONFIGS]
)
def test_a_folder_comes_back_with_and_without_the_layer(name: str, depths: int, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    save_ahead(name, theirs)
    import_hf(theirs, tmp_path / "ours", None, num_workers=1, depths=depths)
    keys = [key for key in CheckpointTensors(tmp_path / "ours").tensors if key.startswith("mtp.")]
    assert bool(keys) == bool(depths)
    assert (tmp_path / "ours" / "hf" / "carried.safetensors").exists() == (not depths)
    proof = export_hf(tmp_path / "ours", tmp_path / "back", None, None, num_workers=1)
    assert (tmp_path / "back" / FILE).read_bytes() == (theirs / FILE).read_bytes()
    assert (tmp_path / "back" / "config.json").read_bytes() == (theirs / "config.json").read_bytes()
    assert verify_hf(tmp_path / "ours", theirs, num_workers=1) == proof


@pytest.mark.parametrize("start", ["folder", "import"])
@pytest.mark.parametrize("depths", [0, 1])
def test_a_run_trains_the_layer_or_keeps_it(depths: int, start: str, pool: Pool, tmp_path: Path) -> None:
    theirs, run = tmp_path / "theirs", tmp_path / "run"
    save_ahead("qwen3-next", theirs)
    import_hf(theirs, tmp_path / "ours", None, num_workers=1, depths=depths)
    model: dict[str, Any] = {"hf": str(theirs)} | ({"mtp_depths": 1} if depths else {})
    named = {"model": model, "checkpoint": {}}
    if start == "import":
        named = {
            "model": described_model(theirs, depths).model_dump(),
            "checkpoint": {"initialize_from": str(tmp_path / "ours")},
        }
    config = Config.model_validate(
        with_architecture(
            {
                "run": {"dir": str(run)},
                "train": {"global_batch_size": 2, "num_steps": 1, "precision": "bf16"},
                "optimizer": {"lr": 1e-2, "schedule": "constant"},
                "data": {"kind": "mock", "seq_length": 8},
                **named,
            }
        )
    )
    assert config.model.mtp_depths == depths
    run.mkdir()
    save_config(config, run / "config.yaml")
    pool.run(checkpoint_ranks.train, Layout(), config, run / "checkpoints", None, 1, 1)
    proof = export_hf(run, tmp_path / "back", None, None, num_workers=1)
    before, after = load_file(theirs / FILE), load_file(tmp_path / "back" / FILE)
    assert before.keys() == after.keys()
    same = {key for key, value in before.items() if torch.equal(value, after[key])}
    ahead = {key for key in before if key.startswith("mtp.")}
    assert same & ahead == (set() if depths else ahead)
    assert verify_hf(run, tmp_path / "back", num_workers=1) == proof


def test_what_a_folder_lacks_is_refused(tmp_path: Path) -> None:
    save_ahead("qwen3-next", tmp_path)
    tensors = load_file(tmp_path / FILE)
    without = {key: value for key, value in tensors.items() if not key.startswith("mtp.")}
    content = {"model": {"hf": str(tmp_path), "mtp_depths": 2}}
    with refuses(ConfigError, "model.mtp_depths=2", "has 1"):
        with_architecture(content)
    del tensors["mtp.fc.weight"]
    save_file(tensors | {"mtp.embed_tokens.weight": torch.zeros(61, 32)}, tmp_path / FILE, {"format": "pt"})
    with refuses(DataError, "lacks mtp.fc.weight", "unexpected mtp.embed_tokens.weight"):
        import_hf(tmp_path, tmp_path / "ours", None, num_workers=1, depths=1)
    save_file(without, tmp_path / FILE, {"format": "pt"})
    with refuses(DataError, "--mtp-depths=1", "has 0"):
        import_hf(tmp_path, tmp_path / "ours", None, num_workers=1, depths=1)
    content["model"]["mtp_depths"] = 1
    with refuses(ConfigError, "model.mtp_depths=1", "has 0"):
        with_architecture(content)


def test_megatron_lm_gets_no_layer_ahead(tmp_path: Path) -> None:
    save_ahead("qwen3.5", tmp_path / "hf")
    arguments = ("convert", "import", tmp_path / "hf", tmp_path / "out", "--mtp-depths", "1")
    code, text = call(*arguments, "--to", "megatron-lm")
    assert code == 2
    check_message(text, "--mtp-depths", "--to")
    code, text = call(*arguments)
    assert code == 0, text
    assert "mtp_depths: 1" in (tmp_path / "out" / "model.yaml").read_text()
