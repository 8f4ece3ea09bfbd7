"""A service on an adapter of PEFT (`adapter.path`): every model starts from it, and is that of PEFT in float64."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from tinker import RequestFailedError, types

from mtrain.base.errors import ConfigError
from mtrain.config import Config
from mtrain.convert.adapters import export_adapter
from mtrain.hf.configuration import load_config
from mtrain.serve.operations import Lora
from mtrain.serve.served import Served
from tests.hf.folders import save
from tests.messages import refuses
from tests.parity.cases import Case, case
from tests.parity.compare import at_night, relative
from tests.pool import Pool
from tests.serve.service import datum, running, sequences, session
from tests.serve.test_clients import ADAM, LENGTHS, named

TOKENS = sequences(8, LENGTHS, 57)
PATTERN = {"v_proj": 5}
"""A rank that no client could name."""


def written(folder: Path, one: Case) -> Config:
    """Writes a model, and an adapter of which neither matrix is zero."""
    base = save("llama", folder / "hf", torch.float32, num_key_value_heads=2)
    torch.manual_seed(4)
    settings = peft.LoraConfig(
        r=3, lora_alpha=6, target_modules=["q_proj", "v_proj", "down_proj"], rank_pattern=PATTERN, task_type="CAUSAL_LM"
    )
    settings.init_lora_weights = False
    peft.get_peft_model(base, settings).save_pretrained(folder / "adapter")
    section = f"{{rank: 3, alpha: 6, targets: [q_proj, v_proj, fc2], rank_pattern: {{v_proj: {PATTERN['v_proj']}}}"
    keys = [f"model.hf={folder / 'hf'}", f"adapter={section}, path: {folder / 'adapter'}}}", "optimizer={lr: 1.0}"]
    keys += ["train={global_batch_size: 8, num_steps: 1, precision: fp32, device: cpu, micro_batch_size: 2}"]
    keys += ["data={kind: mock, seq_length: 33}", f"layout.tp={one.layout.get('tp', 1)}", f"run.dir={folder / 'run'}"]
    return load_config([], keys)


def of_peft(base: Path, adapter: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    return peft.PeftModel.from_pretrained(model, adapter, is_trainable=True).double()


def log_probs(model: Any) -> list[torch.Tensor]:
    found = []
    for each in TOKENS:
        ids = torch.tensor(each)
        likely = model(ids[None]).logits[0, :-1].log_softmax(-1)
        found.append(likely.gather(-1, ids[1:, None])[:, 0])
    return found


def assert_near(found: Sequence[Any], exact: Sequence[torch.Tensor]) -> None:
    for ours, theirs in zip(found, exact, strict=True):
        np.testing.assert_allclose(ours, theirs.detach().numpy(), rtol=0, atol=1e-5)


def forward(client: Any) -> list[Any]:
    output = client.forward([datum(each, {}) for each in TOKENS], "cross_entropy").result()
    return [each["logprobs"].to_numpy() for each in output.loss_fn_outputs]


def scored(sampler: Any) -> list[list[float]]:
    asked = [sampler.compute_logprobs(types.ModelInput.from_ints(each)) for each in TOKENS]
    return [each.result()[1:] for each in asked]


@pytest.mark.waits
@pytest.mark.parametrize("one", [at_night(case(2)), case(2, tp=2)], ids=named)
@pytest.mark.nightly  # tests/core/adapters/test_peft.py starts from such a folder; refusals: below
def test_models_start_from_the_adapter_of_a_folder(pool: Pool, tmp_path: Path, one: Case) -> None:
    """Passes, an update, the base model's answers, another client's model and a checkpoint are those of PEFT."""
    config = written(tmp_path, one)
    exact = of_peft(tmp_path / "hf", tmp_path / "adapter")
    start = [each.detach() for each in log_probs(exact)]
    with exact.disable_adapter():
        bare = log_probs(exact)
    assert max(float((a - b).detach().abs().max()) for a, b in zip(bare, start, strict=True)) > 0.1
    with running(pool, one, config, tmp_path / "run") as address, session(address) as service:
        client = service.create_lora_training_client("hf", rank=3, seed=1).result()
        base = service.create_sampling_client(base_model="hf").result()
        assert_near(forward(client), start)
        assert_near(scored(base), start)
        client.forward_backward([datum(each, {}) for each in TOKENS], "cross_entropy")
        norm = client.optim_step(types.AdamParams(**ADAM)).result().metrics["grad_norm"]
        assert relative(norm, step(exact)) < 1e-5
        assert_near(forward(client), log_probs(exact))
        assert_near(scored(base), start)
        other = service.create_lora_training_client("hf", rank=3, seed=2).result()
        assert_near(forward(other), start)
        path = client.save_state("one").result().path
        again = service.create_training_client_from_state_with_optimizer(path).result()
        assert_near(forward(again), log_probs(exact))
        with pytest.raises(RequestFailedError, match="start from adapters of rank 3 on q_proj, v_proj, fc2"):
            service.create_lora_training_client("hf", rank=4).result()
    (saved,) = (tmp_path / "run" / "served" / path.removeprefix("tinker://") / "checkpoints").glob("step_*")
    export_adapter(saved, tmp_path / "one", None)
    ours, theirs = of_peft(tmp_path / "hf", tmp_path / "one").state_dict(), exact.state_dict()
    adapters = [name for name in theirs if "lora_" in name]
    assert adapters
    for name in adapters:
        assert (ours[name] - theirs[name]).norm() < 1e-5 * theirs[name].norm(), name


@pytest.mark.parametrize(
    "asked", [Lora(rank=4), Lora(rank=0), Lora(rank=3, train_mlp=False), Lora(rank=3, train_attn=False)], ids=repr
)
def test_another_shape_than_that_of_the_folder_is_refused(tmp_path: Path, asked: Lora) -> None:
    served = Served(written(tmp_path, case(2)))
    assert served.adapted(Lora(rank=3, seed=7, train_unembed=False)) == served.config
    with refuses(ConfigError, "adapter.path"):
        served.adapted(asked)


def step(exact: Any) -> float:
    """Makes a step by torch: a sum over tokens, clipping, AdamW; returns the norm."""
    trained = [each for each in exact.parameters() if each.requires_grad]
    (-torch.cat(log_probs(exact)).sum()).backward()
    norm = float(torch.nn.utils.clip_grad_norm_(trained, ADAM["grad_clip_norm"]))
    betas = (ADAM["beta1"], ADAM["beta2"])
    torch.optim.AdamW(trained, ADAM["learning_rate"], betas, ADAM["eps"], ADAM["weight_decay"]).step()
    return norm
