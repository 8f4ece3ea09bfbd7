"""Exports: fields of training are left out, fields that change the function are refused in time."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml

from mtrain.arch.layout import Layout
from mtrain.base.errors import ConfigError, DataError, RunFolderError
from mtrain.config import Config
from mtrain.config.load import config_yaml
from mtrain.config.schema.model import ModelSection
from mtrain.convert.importing import import_hf
from mtrain.convert.verifying import random_tokens, verify_hf
from mtrain.hf.configuration import load_config
from mtrain.hf.io.training import transformers_logits
from mtrain.hf.schema.description import disagreements
from mtrain.hf.schema.registry import FAMILIES, refuse_unexportable
from mtrain.runs.continuation import continued
from tests.fault_table import Notice
from tests.hf import hf_ranks
from tests.hf.folders import save
from tests.messages import refuses
from tests.pool import Pool
from tests.training.test_start_from_hf import command, configured

EXPORTS = ("checkpoint.interval_steps=2", "checkpoint.export_hf_every_steps=2")
OTHER_CHOICE: dict[str, Any] = {"n_group": 3, "topk_group": 2, "num_experts_per_tok": 2}
"""Groups that the family ranks by 2 experts and 0.1.0 by 1."""


def test_experts_are_exported_whatever_they_are_trained_with(pool: Pool, tmp_path: Path) -> None:
    save("deepseek", tmp_path / "hf")
    configured(tmp_path)
    training = ("bias_update_rate=0.001", "dispatcher=allgather", "implementation=sequential")
    result = command("train", tmp_path / "run.yaml", *EXPORTS, *(f"model.experts.{one}" for one in training))
    assert result.returncode == 0, result.stderr
    exported = tmp_path / "run" / "exports" / "step_00000002"
    said = [json.loads((folder / "config.json").read_text()) for folder in (exported, tmp_path / "hf")]
    older = {"rope_theta", "rope_scaling", "torch_dtype"}  # fields of transformers 4, which the folder lacks
    assert said[0].keys() - said[1].keys() == older
    assert {name: value for name, value in said[0].items() if name not in older | {"dtype"}} == {
        name: value for name, value in said[1].items() if name != "dtype"
    }
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    first, last = (transformers.AutoModelForCausalLM.from_pretrained(f) for f in (tmp_path / "hf", exported))
    assert not torch.equal(first.state_dict()[bias], last.state_dict()[bias]), "no bias has moved"
    checkpoint = tmp_path / "run" / "checkpoints" / "step_00000002"
    ours = torch.from_numpy(pool.run(hf_ranks.logits, Layout(), checkpoint)[0])
    torch.testing.assert_close(
        ours, transformers_logits(exported, random_tokens(57)), rtol=0, atol=2e-5 * float(ours.abs().max())
    )


REFUSED: list[tuple[str, tuple[str, ...], str]] = [
    ("llama", ("model.megatron.no_rope_freq=3",), "model.megatron.no_rope_freq=3, which changes what is computed"),
    (
        "mixtral",
        ("model.experts.capacity_factor=1.0", "loss.allow_layout_dependent=true"),
        "model.experts.capacity_factor=1.0 would become None",
    ),
]


@pytest.mark.fault(
    "input",
    "exports asked of a run whose model config.json cannot describe",
    happens="refused before the run starts, and by `mtrain check`",
    exit_code=2,
)
@pytest.mark.parametrize(("name", "keys", "reported"), REFUSED, ids=[name for name, *_ in REFUSED])
def test_a_run_that_could_never_export_does_not_start(
    tmp_path: Path, name: str, keys: tuple[str, ...], reported: str, notice: Notice
) -> None:
    save(name, tmp_path / "hf")
    configured(tmp_path)
    with notice:
        result = command("train", tmp_path / "run.yaml", *EXPORTS, *keys)
    assert result.returncode == notice.exit_code
    assert reported in result.stderr
    assert "Traceback" not in result.stderr
    assert command("check", tmp_path / "run.yaml", "--world-size", 1, *EXPORTS, *keys).returncode == notice.exit_code


def test_fields_of_megatron_that_change_the_function_are_never_dropped(tmp_path: Path) -> None:
    save("llama", tmp_path / "hf")
    config = configured(tmp_path, *EXPORTS)
    refuse_unexportable(config)
    assert FAMILIES["llama"].config(_with_megatron(config, batch_p2p_comm=True).model, None)
    changed = _with_megatron(config, no_rope_freq=2)
    with refuses(DataError, "model.megatron.no_rope_freq=2"):
        FAMILIES["llama"].config(changed.model, None)
    with refuses(ConfigError, "export_hf_every_steps=2", "model.megatron.no_rope_freq=2"):
        refuse_unexportable(changed)
    refuse_unexportable(changed.model_copy(update={"checkpoint": configured(tmp_path).checkpoint}))  # exports nothing


def _with_megatron(config: Config, **fields: Any) -> Config:
    return config.model_copy(update={"model": config.model.model_copy(update={"megatron": fields})})


@pytest.mark.fault(
    "folders",
    "an import that ranks groups of experts by another number than its family",
    happens="it trains on as it was; export and verification name the field",
    exit_code=3,
)
def test_an_import_that_computed_another_choice_is_not_called_the_same(tmp_path: Path, notice: Notice) -> None:
    save("deepseek", tmp_path / "hf", **OTHER_CHOICE)
    import_hf(tmp_path / "hf", tmp_path / "ours", None, num_workers=1)
    verify_hf(tmp_path / "ours", tmp_path / "hf", num_workers=1)
    said = yaml.safe_load((tmp_path / "ours" / "model.yaml").read_text())["model"]
    assert said["experts"].pop("group_score_top_k") == 2
    old, now = ModelSection.model_validate(said), configured(tmp_path).model  # old: as 0.1.0 wrote it
    template = json.loads((tmp_path / "hf" / "config.json").read_text())
    with notice, refuses(DataError, "model.experts.group_score_top_k=1") as refused:
        FAMILIES["deepseek_v3"].config(old, template)
    assert refused.value.exit_code == notice.exit_code
    assert disagreements(now, old) == [("experts.group_score_top_k", 2, 1)]


def test_a_run_of_the_old_choice_goes_on_with_it_and_not_with_another(tmp_path: Path) -> None:
    save("deepseek", tmp_path / "hf", **OTHER_CHOICE)
    run = tmp_path / "run"
    sections = yaml.safe_load(config_yaml(configured(tmp_path)))
    assert sections["model"]["experts"].pop("group_score_top_k") == 2
    run.mkdir()
    saved = yaml.safe_dump(sections)
    (run / "config.yaml").write_text(saved)
    with refuses(RunFolderError, "model.experts.group_score_top_k"):
        continued(configured(tmp_path), saved, run, 2)
    as_it_was = load_config([run / "config.yaml"], ["model.hf=null"])
    assert as_it_was.model.experts is not None
    assert as_it_was.model.experts.num_scored == 1
    assert continued(as_it_was, saved, run, 2).model == as_it_was.model


def test_a_run_of_published_groups_goes_on_from_its_folder(tmp_path: Path) -> None:
    """Nothing has changed since 0.1.0 where the family's number equals the default."""
    save("deepseek", tmp_path / "hf")
    sections = yaml.safe_load(config_yaml(configured(tmp_path)))
    assert sections["model"]["experts"].pop("group_score_top_k") is None
    continued(configured(tmp_path), yaml.safe_dump(sections), tmp_path / "run", 2)


def test_a_model_without_groups_is_exported_as_one_group(tmp_path: Path) -> None:
    save("deepseek-direct-queries", tmp_path / "hf")
    model = configured(tmp_path).model
    assert model.experts is not None
    no_groups = {"num_groups": None, "group_top_k": None, "group_score_top_k": None}
    ungrouped = model.model_copy(update={"experts": model.experts.model_copy(update=no_groups)})
    said = FAMILIES["deepseek_v3"].config(ungrouped, None)
    assert (said["n_group"], said["topk_group"]) == (1, 1)
    template = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert FAMILIES["deepseek_v3"].config(ungrouped, template) == template


def test_a_folder_with_another_function_of_the_same_tensors_is_not_verified(tmp_path: Path) -> None:
    save("llama", tmp_path / "hf")
    import_hf(tmp_path / "hf", tmp_path / "ours", None, num_workers=1)
    shutil.copytree(tmp_path / "hf", tmp_path / "other")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}))
    with refuses(DataError, "model.norm_epsilon=1e-06", "0.1"):
        verify_hf(tmp_path / "ours", tmp_path / "other", num_workers=1)


def test_a_refusal_names_the_file(tmp_path: Path) -> None:
    save("llama", tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"hidden_size": "32"}))
    with pytest.raises(DataError) as refused:
        configured(tmp_path)
    assert str(refused.value) == f"{path}: hidden_size='32' is a string, but an integer is needed; correct the file"


def test_fields_that_nobody_knows_are_named(tmp_path: Path) -> None:
    save("llama", tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"a_field_of_tomorrow": 1}))
    configured(tmp_path)
    checked = command("check", tmp_path / "run.yaml", "--world-size", 1)
    assert checked.returncode == 0, checked.stderr
    assert "has fields that mtrain does not know, a_field_of_tomorrow" in checked.stdout
