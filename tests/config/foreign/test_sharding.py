"""FSDP and ZeRO-3 of other programs become layout.shard=weights."""

import itertools
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import TrainingArguments

from mtrain.config.foreign.axolotl import from_axolotl
from mtrain.config.foreign.megatron_lm import from_megatron_lm
from mtrain.config.foreign.ms_swift import from_ms_swift
from mtrain.config.foreign.sharding import put_sharding
from mtrain.config.foreign.translation import Settings, Translation
from mtrain.config.foreign.verl import from_verl
from mtrain.hf.configuration import resolved
from tests.config.yaml_files import write

AXOLOTL: dict[str, Any] = {"base_model": "M", "datasets": "a.jsonl", "learning_rate": 1e-5, "max_steps": 9}
SWIFT = "--model M --dataset a.jsonl --max_length 64"
OPTIONS = [
    ({"fsdp": ["full_shard", "auto_wrap"]}, "weights"),
    ({"fsdp": ["shard_grad_op", "auto_wrap"]}, "optimizer"),
    ({"fsdp_version": 2, "fsdp_config": {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}}, "weights"),
    ({"fsdp_version": 2, "fsdp_config": {"reshard_after_forward": False}}, "optimizer"),
    ({"fsdp_config": {"fsdp_sharding_strategy": "HYBRID_SHARD"}}, "weights"),
    ({"fsdp_config": {"fsdp_sharding_strategy": 2}}, "optimizer"),
    ({"deepspeed": "deepspeed_configs/zero3_bf16_cpuoffload_all.json"}, "weights"),
    ({"deepspeed": "deepspeed_configs/zero2.json"}, "optimizer"),
    ({"deepspeed": {"zero_optimization": {"stage": 3}}}, "weights"),
    ({"deepspeed": {"bf16": {"enabled": True}}}, "optimizer"),
    ({"fsdp": False, "fsdp_version": 2}, None),
    ({}, None),
]


@pytest.mark.parametrize(("given", "shard"), OPTIONS, ids=[str(given) for given, _ in OPTIONS])
def test_what_ranks_of_axolotl_divide(given: dict[str, Any], shard: str | None, tmp_path: Path) -> None:
    found = from_axolotl([str(write(tmp_path / "a.yml", AXOLOTL | given))])
    assert found.get("layout.shard") == shard
    assert found.lost == []
    assert found.checked(resolved).get("layout.shard") == shard


WORDS = [
    (f"swift sft {SWIFT} --deepspeed zero3", "weights"),
    (f"swift sft {SWIFT} --deepspeed zero2_offload", "optimizer"),
    (f"swift sft {SWIFT} --deepspeed examples/deepspeed/ds_z3_config.json", "weights"),
    (f"swift sft {SWIFT} --fsdp fsdp2", "weights"),
    (f"swift sft {SWIFT} --fsdp_config fsdp.json", None),
    (f"megatron sft {SWIFT} --use_megatron_fsdp true --overlap_grad_reduce true", "weights"),
    (f"megatron sft {SWIFT} --use_megatron_fsdp true --data_parallel_sharding_strategy optim_grads", "optimizer"),
    (f"megatron sft {SWIFT} --data_parallel_sharding_strategy optim_grads_params", None),
    ("verl.trainer.sft_trainer data.train_files=a engine=fsdp", "weights"),
    ("verl.trainer.sft_trainer data.train_files=a engine.strategy=fsdp2 engine.fsdp_size=8", "weights"),
    ("verl.trainer.sft_trainer data.train_files=a engine.fsdp_size=1", "optimizer"),
    ("verl.trainer.sft_trainer data.train_files=a engine.reshard_after_forward=false", "optimizer"),
    ("verl.trainer.sft_trainer data.train_files=a engine=megatron", None),
    ("verl.trainer.sft_trainer data.train_files=a engine=megatron engine.use_megatron_fsdp=true", "weights"),
    ("verl.trainer.main_ppo actor_rollout_ref.actor.fsdp_config.fsdp_size=-1", "weights"),
    ("verl.trainer.main_ppo actor_rollout_ref.actor.strategy=megatron", None),
    ("pretrain_gpt.py --num-layers 2 --use-torch-fsdp2", "weights"),
    ("pretrain_gpt.py --num-layers 2 --use-megatron-fsdp --overlap-param-gather "
     "--data-parallel-sharding-strategy optim_grads_params", "weights"),
    ("pretrain_gpt.py --num-layers 2 --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", None),
    ("pretrain_gpt.py --num-layers 2 --use-distributed-optimizer", None),
]  # fmt: skip


@pytest.mark.parametrize(("line", "shard"), WORDS, ids=[line for line, _ in WORDS])
def test_what_ranks_of_other_programs_divide(line: str, shard: str | None) -> None:
    words = ["python3", *(["-m"] if "verl" in line else []), *line.split()]
    translate = {"v": from_verl, "p": from_megatron_lm}.get(line[0], from_ms_swift)
    found = translate(words if translate is not from_ms_swift else words[1:])
    assert (found.get("layout.shard") or "optimizer") == (shard or "optimizer")
    assert not any("fsdp" in text.lower() or "shard" in text or "overlap" in text for text in found.lost)
    if shard == "weights":
        assert found.get("train.overlap_grad_reduce") is found.get("train.overlap_param_gather") is None
        assert found.get("train.distributed_optimizer") is not False


def test_files_are_read_and_missing_ones_named(tmp_path: Path) -> None:
    three = tmp_path / "mine.json"
    three.write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    swift = tmp_path / "options.json"
    swift.write_text(json.dumps({"fsdp": "full_shard", "fsdp_config": {"fsdp_reshard_after_forward": False}}))
    for given, shard in (({"deepspeed": str(three)}, "weights"), ({"fsdp": str(swift)}, "optimizer")):
        words = [word for name, value in given.items() for word in (f"--{name}", value)]
        assert from_ms_swift(["swift", "sft", *SWIFT.split(), *words]).get("layout.shard") == shard
    found = from_axolotl([str(write(tmp_path / "a.yml", AXOLOTL | {"deepspeed": "absent/mine.json"}))])
    assert found.get("layout.shard") is None
    assert [line.partition(":")[0] for line in found.lost] == ["deepspeed=absent/mine.json"]


def test_activations_that_fsdp_recomputes(tmp_path: Path) -> None:
    given = {"fsdp_config": {"activation_checkpointing": True}, "gradient_checkpointing": False}
    assert from_axolotl([str(write(tmp_path / "a.yml", AXOLOTL | given))]).get("train.recompute") == "full"


def test_what_does_not_run_with_divided_weights_keeps_the_run() -> None:
    """The layout does not change the run, so the header says why weights are whole."""
    words = ["data.train_files=a", "optim.lr=1e-5", "engine.fsdp_size=-1", "engine.optimizer_offload=true"]
    found = from_verl(["python3", "-m", "verl.trainer.sft_trainer", *words]).checked(resolved)
    assert found.get("layout") is None
    assert found.get("train.offload_optimizer") is True
    (line,) = [line for line in found.lost if "layout.shard" in line]
    assert line.startswith("engine.fsdp_size: train.offload_optimizer=true ")


WAYS = list(
    itertools.product(
        (True, "full_shard auto_wrap", ["shard_grad_op", "offload"], "auto_wrap"),
        ({}, {"fsdp_reshard_after_forward": True}, {"reshard_after_forward": False}, {"min_num_params": 1}),
    )
)


@pytest.mark.parametrize(("fsdp", "options"), WAYS, ids=str)
def test_transformers_reshard_where_weights_are_divided(fsdp: Any, options: dict[str, Any]) -> None:
    """The oracle is the code with which transformers reads the same two settings, in either order."""
    read = SimpleNamespace(fsdp=fsdp, fsdp_config=dict(options), activation_checkpointing=False)
    read.gradient_checkpointing = False  # its name before transformers 5.20
    read._apply_legacy_fsdp_to_config = TrainingArguments._apply_legacy_fsdp_to_config
    plugin: Any = TrainingArguments._process_fsdp_args(read)
    given = list({"fsdp": fsdp, "fsdp_config": options}.items())
    random.Random(str(given)).shuffle(given)
    found = Translation("transformers")
    put_sharding(found, Settings("transformers", dict(given), {}))
    assert found.get("layout.shard") == ("weights" if plugin["reshard_after_forward"] else "optimizer")
