"""Checkpoints of Megatron-LM to folders of Hugging Face and back, judged by transformers and megatron-core."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
from torch.nn import functional

from mtrain.arch.layout import Layout
from mtrain.base.errors import ConfigError, DataError
from mtrain.config import Config
from mtrain.convert.exporting import export_hf
from mtrain.convert.verifying import verify_hf
from mtrain.data.loader import StepLoader
from tests.cli.command_line import call
from tests.config.samples import config
from tests.core.state.megatron_ranks import save_like_megatron_lm, tensors_by_megatron
from tests.core.state.test_import_megatron import QWEN_MOE, SMALL, TIED_QWEN3
from tests.hf.folders import save
from tests.messages import check_message, refuses
from tests.parity.expert_models import MIXTRAL
from tests.pool import Pool

FORMS: dict[str, tuple[dict[str, Any], dict[str, Any], str, bool]] = {
    "llama, layers in one tensor": ({}, {"layout__tp": 2}, "", True),
    "qwen3, tied, layers by name": (TIED_QWEN3, {}, "model.", False),
    "mixtral, layers and experts": ({**MIXTRAL, "model__ffn_hidden_size": 24}, {"layout__ep": 2}, "", False),
    "qwen3-moe, in one tensor": (QWEN_MOE, {"layout__ep": 2}, "model0.module.", True),
}


def sample(**changes: Any) -> Config:
    return config(**(SMALL | changes))


def described(path: Path, user: Config) -> Path:
    """Writes the file that --model takes."""
    path.write_text(yaml.safe_dump({"model": user.model.model_dump(exclude_defaults=True, mode="json")}))
    return path


def loss_of_transformers(folder: Path, user: Config) -> float:
    """Returns the mean loss over the tokens of the first global batch, as `save_like_megatron_lm` does."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    numerator = denominator = 0.0
    for batch in StepLoader(user, 0, 1).batches(0):
        with torch.no_grad():
            logits = model(batch.tokens).logits
        losses = functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="none")
        weights = batch.weights["main"].flatten()
        numerator, denominator = numerator + float((losses * weights).sum()), denominator + float(weights.sum())
    return numerator / denominator


@pytest.mark.parametrize("form", FORMS)
def test_an_export_of_megatron_lms_weights_has_their_loss(pool: Pool, tmp_path: Path, form: str) -> None:
    model, saving, prefix, stacked = FORMS[form]
    user = sample(**model, **saving)
    layout = Layout.from_config(user, 2 if saving else 1)
    theirs = pool.run(save_like_megatron_lm, layout, user, tmp_path / "theirs", prefix, stacked)
    export_hf(tmp_path / "theirs", tmp_path / "out", described(tmp_path / "model.yaml", sample(**model)), None, 1)
    assert loss_of_transformers(tmp_path / "out", user) == pytest.approx(theirs[0], rel=2e-6)
    # with the folder itself to say what the model is, and as an oracle of every tensor
    verify_hf(tmp_path / "theirs", tmp_path / "out", 1)
    export_hf(tmp_path / "theirs", tmp_path / "again", tmp_path / "out", None, 1)
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (tmp_path / "out/model.safetensors").read_bytes()


def test_a_checkpoint_without_its_model_or_with_another_is_refused(pool: Pool, tmp_path: Path) -> None:
    user = sample()
    pool.run(save_like_megatron_lm, Layout(), user, tmp_path / "theirs", "", True)
    out = tmp_path / "out"
    with refuses(ConfigError, "--like", "--model"):
        export_hf(tmp_path / "theirs", out, None, None, 1)
    with refuses(DataError, "linear_fc1.weight"):
        other = described(tmp_path / "other.yaml", sample(model__ffn_hidden_size=40))
        export_hf(tmp_path / "theirs", out, other, None, 1)
    (tmp_path / "empty.yaml").write_text("layout: {tp: 2}\n")
    with refuses(ConfigError, "section `model`"):
        export_hf(tmp_path / "theirs", out, tmp_path / "empty.yaml", None, 1)
    assert not out.exists()
    code, text = call("convert", "inspect", tmp_path / "theirs")
    assert code == 2
    check_message(text, "--like", "--model")
    code, text = call("convert", "inspect", tmp_path / "theirs", "--model", described(tmp_path / "model.yaml", user))
    assert (code, "family: llama" in text, "linear_fc1" in text) == (0, True, True)


@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_an_import_for_megatron_lm_is_read_by_megatron_cores_reader(pool: Pool, tmp_path: Path, name: str) -> None:
    save(name, tmp_path / "hf")
    code, text = call("convert", "import", tmp_path / "hf", tmp_path / "out", "--to", "megatron-lm")
    assert code == 0, text
    assert f"--load {tmp_path / 'out'} --finetune" in text
    (found,) = pool.run(tensors_by_megatron, Layout(), tmp_path / "out" / "release")
    assert found
    export_hf(tmp_path / "out", tmp_path / "back", tmp_path / "hf", None, 1)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").state_dict()
    embeddings = found["embedding.word_embeddings.weight"]
    assert torch.equal(embeddings, theirs["model.embed_tokens.weight"])
    norms = torch.stack([theirs[f"model.layers.{layer}.post_attention_layernorm.weight"] for layer in range(2)])
    (key,) = (key for key in found if key.endswith(("pre_mlp_layernorm.weight", "linear_fc1.layer_norm_weight")))
    assert torch.equal(found[key][:2], norms)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").state_dict()
    assert all(torch.equal(value, back[key]) for key, value in theirs.items())


def test_a_checkpoint_of_megatron_fsdp_is_refused_by_name(tmp_path: Path) -> None:
    save("llama", tmp_path / "hf")
    halves = {f"decoder.layers.0.mlp.linear_fc1.weight_{half}": torch.zeros(4, 4) for half in "wv"}
    saved = {"model": {"module": {"embedding.word_embeddings.weight": torch.zeros(4, 4), **halves}}}
    save_distributed(saved, checkpoint_id=tmp_path / "iter_0000100", no_dist=True)
    with refuses(DataError, "linear_fc1.weight_", "--ckpt-format torch_dist"):
        export_hf(tmp_path / "iter_0000100", tmp_path / "out", tmp_path / "hf", None, 1)


def test_folders_are_named_once(tmp_path: Path) -> None:
    save("llama", tmp_path / "hf")
    code, text = call("convert", "import", tmp_path / "hf", tmp_path / "out", "--hf", tmp_path / "hf")
    assert code == 2
    assert "are both given" in text
    code, text = call("convert", "import", tmp_path / "hf")
    assert code == 2
    assert "OUT or --out: is missing" in text
    code, text = call("convert", "import", "--hf", tmp_path / "hf", "--out", tmp_path / "out")
    assert code == 0, text
