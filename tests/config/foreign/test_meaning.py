"""What settings of LLaMA-Factory, TRL, torchtitan and Megatron-Bridge mean here, and what their programs compute."""

import json
import math
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from mtrain.arch.lr import learning_rate
from mtrain.base.errors import ConfigError
from mtrain.config import Config
from mtrain.config.foreign.axolotl import from_axolotl
from mtrain.config.foreign.llamafactory import from_llamafactory
from mtrain.config.foreign.megatron_bridge import from_megatron_bridge
from mtrain.config.foreign.megatron_lm import from_megatron_lm
from mtrain.config.foreign.ms_swift import from_ms_swift
from mtrain.config.foreign.torchtitan import from_torchtitan
from mtrain.config.foreign.trl import from_trl
from mtrain.config.foreign.verl import from_verl
from mtrain.hf.configuration import resolved
from tests.cli.command_line import call
from tests.config.foreign.programs import PROGRAMS, head
from tests.config.foreign.public_files import completed
from tests.config.foreign.test_same_run import Carried, means, number, truth
from tests.config.samples import content
from tests.config.yaml_files import write
from tests.messages import refuses

_SWITCH = (True, False)
CARRIED = (
    Carried("weight_decay optimizer.weight_decay", "optimizer.weight_decay", number, (0, 0.0, 0.3, "1e-3")),
    Carried("adam_beta1 optimizer.beta1 optimizer.adam_beta1", "optimizer.beta1", number, (0, 0.8)),
    Carried("adam_beta2 optimizer.beta2 optimizer.adam_beta2", "optimizer.beta2", number, (0, 0.8)),
    Carried("adam_epsilon optimizer.eps optimizer.adam_eps", "optimizer.epsilon", number, (1e-5, 1e-6)),
    Carried("max_grad_norm training.max_norm optimizer.clip_grad", "optimizer.clip_grad", number, (0, 0.5)),
    Carried("learning_rate optimizer.lr", "optimizer.lr", number, (1e-3, "3e-5")),
    Carried("seed rng.seed", "train.seed", int, (0, 7)),
    Carried("full_determinism debug.deterministic", "train.deterministic", truth, _SWITCH),
    Carried("per_device_train_batch_size", "train.micro_batch_size", int, (2, 4)),
    Carried("disable_gradient_checkpointing", "train.recompute", lambda value: "none" if value else "full", _SWITCH),
    Carried("cutoff_len training.seq_len model.seq_length", "data.seq_length", int, (32, 128)),
    Carried("beta", "loss.options.beta", number, (0.2, "0.5")),
    Carried("lora_dropout", "adapter.dropout", number, (0, 0.25)),
    Carried("lora_rank lora_r", "adapter.rank", int, (4, 64)),
    Carried("training.steps train.train_iters", "train.num_steps", int, (300, 40)),
    Carried("parallelism.tensor_parallel_degree model.tensor_model_parallel_size", "layout.tp", int, (1, 2)),
    Carried("save_steps", "checkpoint.interval_steps", int, (0, 10)),
    Carried("checkpoint.keep_latest_k", "checkpoint.keep_last", lambda value: value or 2, (0, 3)),
    Carried("ddp.use_distributed_optimizer", "train.distributed_optimizer", truth, _SWITCH),
    Carried("ddp.overlap_grad_reduce", "train.overlap_grad_reduce", truth, _SWITCH),
    Carried("metrics.enable_tensorboard", "metrics.tensorboard", truth, _SWITCH),
    Carried("checkpoint.async_save", "checkpoint.async_save", truth, _SWITCH),
    Carried("activation_checkpoint.mode", "train.recompute", str, ("none", "selective", "full")),
    Carried("packing", "data.packing", truth, _SWITCH),
    Carried("bf16", "train.precision", lambda value: "bf16" if truth(value) else "fp32", (True, False)),
)


@pytest.mark.parametrize("program", [name for name in PROGRAMS if name not in ("transformers", "trl grpo", "trl cpo")])
def test_a_drawn_file_means_the_same(program: str, tmp_path: Path) -> None:
    """Each key has the value of the setting or of the program's default, unless the header names it."""
    way, fields = PROGRAMS[program], PROGRAMS[program].fields()
    known = {name: row for row in CARRIED for name in row.names.split() if name in fields}
    for seed in range(8):
        source = random.Random(f"{program}{seed}")
        given: dict[str, Any] = dict(way.base)
        given |= {name: source.choice(row.values) for name, row in known.items() if source.random() < 0.5}
        found = way.translate(given, tmp_path).checked(resolved)
        config, said = completed(found), "\n".join(found.lost + found.notes)
        for name, row in known.items():
            value = given.get(name, fields[name])
            is_used = not row.ours.startswith("adapter.") or config.adapter is not None
            if is_used and value is not None and name not in said and name not in found.without_effect:
                assert means(config, row, value), (seed, name, value)


SCHEDULES: dict[str, Mapping[str, Any]] = {
    "linear": {},
    "cosine": {},
    "constant": {},
    "constant_with_warmup": {},
    "cosine_with_min_lr": {"min_lr_rate": 0.1},
    "polynomial": {"lr_end": 1e-5, "power": 1.0},
    "warmup_stable_decay": {"num_decay_steps": 20, "decay_type": "linear"},
}


@pytest.mark.parametrize("warmup", [0, 7, 0.1])
@pytest.mark.parametrize("kind", SCHEDULES)
def test_learning_rates_are_those_of_transformers(kind: str, warmup: float, tmp_path: Path) -> None:
    from transformers import TrainingArguments, get_scheduler

    steps, options = 60, dict(SCHEDULES[kind])
    given = {"max_steps": steps, "learning_rate": 1e-3, "lr_scheduler_type": kind, "lr_scheduler_kwargs": options}
    found = PROGRAMS["transformers"].translate({"output_dir": "x", "warmup_steps": warmup, **given}, tmp_path)
    config = completed(found.checked(resolved))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))], lr=1e-3)
    count = TrainingArguments.get_warmup_steps(TrainingArguments(output_dir=str(tmp_path), warmup_steps=warmup), steps)
    scheduler = get_scheduler(kind, optimizer, count, steps, options or None)
    for step in range(steps):
        assert learning_rate(step, config.optimizer, steps) == pytest.approx(
            scheduler.get_last_lr()[0], rel=1e-9, abs=1e-15
        )
        optimizer.step()
        scheduler.step()


def titan_rate(step: int, steps: int, warmup: int, share: float | None, least: float, kind: str) -> float:
    """Returns torchtitan's factor of the learning rate after the warm-up, from its documentation: the rate is stable,
    and falls in the last `share` of the steps, with one virtual step at the end."""
    length = steps - warmup if share is None else min(round(steps * share), steps - warmup)
    done = (step - (steps - length)) / length
    if done <= 0:
        return 1.0
    height = 1 - done if kind == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return least + (1 - least) * height


@pytest.mark.parametrize(
    ("share", "least", "kind"),
    [(None, 0.0, "linear"), (None, 0.1, "cosine"), (0.25, 0.1, "linear"), (0.9, 0.0, "cosine"), (0.5, 0.0, "linear")],
)
def test_the_learning_rates_are_those_of_torchtitan(
    share: float | None, least: float, kind: str, tmp_path: Path
) -> None:
    given: dict[str, Any] = {"training.steps": 40, "lr_scheduler.warmup_steps": 6, "lr_scheduler.min_lr_factor": least}
    given |= {"optimizer.lr": 1e-3, "lr_scheduler.decay_type": kind}
    given |= {} if share is None else {"lr_scheduler.decay_ratio": share}
    found = PROGRAMS["torchtitan"].translate(given, tmp_path).checked(resolved)
    config = completed(found)
    assert any("warm-up" in line for line in found.notes)  # is one update ahead there
    for step in range(7, 40):
        rate = 1e-3 * titan_rate(step, 40, 6, share, least, kind)
        assert learning_rate(step, config.optimizer, 40) == pytest.approx(rate, rel=1e-9)


def test_what_torchtitan_does_besides_its_settings() -> None:
    """Torchtitan moves a bias of every router, and puts the weight decay of Adam into the gradient."""
    hf = "--checkpoint.initial_load_in_hf --checkpoint.initial_load_path M"
    for words, is_moved, is_lost in (
        ("--model.name deepseek_v3 --model.flavor 671B", True, False),
        (f"--model.name deepseek_v3 --model.flavor 671B {hf}", True, False),
        ("--model.name qwen3 --model.flavor 30B-A3B", False, True),
        (f"--model.name qwen3 --model.flavor 30B-A3B {hf}", False, True),
        ("--model.name qwen3 --model.flavor 8B", False, False),
    ):
        found = from_torchtitan(words.split()).checked(resolved)
        assert ((found.get("model.experts") or {}).get("bias_update_rate") == 0.001) == is_moved, words
        assert any("load_balance_coeff" in line for line in found.lost) == is_lost, words
    for words, is_lost in (("Adam", True), ("AdamW", False), ("Adam --optimizer.weight_decay 0", False)):
        found = from_torchtitan(f"--model.name llama3 --model.flavor 8B --optimizer.name {words}".split())
        assert any(line.startswith("optimizer.name=Adam") for line in found.lost) == is_lost


def test_an_overlap_that_does_not_run_here_is_left_out() -> None:
    """Overlapping communication changes no result."""
    words = "--model_name_or_path M --dataset a --max_steps 9 --overlap_param_gather true"
    found = from_llamafactory(words.split()).checked(resolved)
    assert found.get("train.overlap_param_gather") is None
    assert any(line.startswith("overlap_param_gather") for line in found.lost)


def test_weight_decay_of_a_recipe_is_that_of_its_scheduler() -> None:
    """megatron-core's scheduler overwrites the optimizer's weight decay in every step."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    weights = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0, weight_decay=0.5)
    styles: dict[str, Any] = {"lr_decay_style": "constant", "wd_incr_style": "constant", "wd_incr_steps": 10}
    scheduler = OptimizerParamScheduler(weights, 0.0, 1.0, 0.0, 1, 10, start_wd=0.033, end_wd=0.033, **styles)
    scheduler.step(1)
    found = from_megatron_bridge(["llama3_8b_pretrain_config", "optimizer.weight_decay=0.5"]).checked(resolved)
    assert completed(found).optimizer.weight_decay == weights.param_groups[0]["weight_decay"] == 0.033
    assert any("optimizer.weight_decay=0.5" in line for line in found.notes)


def config_of(text: str) -> Config:
    return completed(from_trl(text.split()).checked(resolved))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", ("ppo", "token-mean", {"clip_low": 0.2, "clip_high": 0.2})),
        ("--epsilon_high 0.28 --delta 4", ("ppo", "token-mean", {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 4})),
        ("--loss_type grpo", ("ppo", "seq-mean-token-mean", {"clip_low": 0.2, "clip_high": 0.2})),
        (
            "--loss_type grpo --importance_sampling_level sequence --epsilon 3e-4",
            ("gspo", "seq-mean-token-mean", {"clip_low": 3e-4, "clip_high": 3e-4}),
        ),
        ("--loss_type cispo --epsilon_high 5", ("cispo", "token-mean", {"clip_low": 1.0, "clip_high": 4.0})),
        ("--loss_type dr_grpo", ("ppo", "seq-mean-token-sum-norm", {"clip_low": 0.2, "clip_high": 0.2})),
    ],
)
def test_the_loss_of_grpo(words: str, expected: tuple[str, str, dict[str, float]]) -> None:
    config = config_of(f"trl grpo --model_name_or_path M --max_steps 9 {words}")
    assert (config.loss.function, config.loss.aggregation, config.loss.options) == expected
    assert config.data.kind == "mock"
    assert config.loss.norm_length == (512 if "dr_grpo" in words else None)


def test_terms_of_grpo_beside_the_loss() -> None:
    words = "trl grpo --model_name_or_path M --beta 0.04 --entropy_coef 0.01 --max_prompt_length 100"
    found = from_trl(words.split())
    terms = found.content["loss"]["side_terms"]
    assert terms["kl"] == {"function": "kl", "coefficient": 0.04, "options": {"estimator": "k3"}}
    assert terms["entropy"] == {"function": "entropy", "coefficient": -0.01}
    assert found.get("data.seq_length") == 100 + 512
    # TRL adds the divergence to each token's loss, and the entropy as a mean over tokens
    terms = config_of(f"{words} --loss_type dr_grpo --max_steps 9").loss.side_terms
    assert (terms["kl"].aggregation, terms["kl"].norm_length) == ("seq-mean-token-sum-norm", 512)
    assert terms["entropy"].aggregation == "token-mean"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", {}),
        ("--use_vllm", {"rollout_cap": 3.0, "rollout_correction": "sequence-mask"}),
        ("--use_vllm --vllm_importance_sampling_correction false", {}),
        (
            "--use_vllm --vllm_importance_sampling_mode token_truncate --vllm_importance_sampling_clip_min 0.5",
            {"rollout_cap": 3.0, "rollout_floor": 0.5, "rollout_correction": "token-truncate"},
        ),
        (
            "--use_vllm --vllm_importance_sampling_cap 2",
            {"rollout_cap": 2, "rollout_correction": "sequence-mask"},
        ),
    ],
)
def test_weights_for_the_probabilities_of_vllm(words: str, expected: dict[str, Any]) -> None:
    options = config_of(f"trl grpo --model_name_or_path M --max_steps 9 {words}").loss.options
    assert {name: value for name, value in options.items() if name.startswith("rollout")} == expected


def test_targets_of_trl_replace_those_of_peft() -> None:
    words = "sft --model_name_or_path M --dataset_name a.jsonl --use_peft"
    for given, targets in (("", ["q_proj", "v_proj"]), ("--lora_target_modules o_proj k_proj", ["o_proj", "k_proj"])):
        assert from_trl(f"{words} {given}".split()).get("adapter.targets") == targets


@pytest.mark.parametrize(
    ("words", "function"),
    [
        ("dpo --loss_type ipo", "ipo"),
        ("dpo", "dpo"),
        ("kto", "kto"),
        ("orpo", "orpo"),
        ("cpo --loss_type simpo", "simpo"),
        ("reward", "reward_model"),
        ("sft --loss_type dft", "dft"),
        ("sft", "next_token"),
    ],
)
def test_losses_of_trl(words: str, function: str) -> None:
    config = config_of(f"{words} --model_name_or_path M --dataset_name a.jsonl")
    assert config.loss.function == function
    assert config.train.precision == "bf16"


STAGES = {
    "sft": "next_token",
    "pt": "next_token",
    "rm": "reward_model",
    "kto": "kto",
    "dpo": "dpo",
    "dpo ipo": "ipo",
    "dpo orpo": "orpo",
    "dpo simpo": "simpo",
}


@pytest.mark.parametrize("words", STAGES)
def test_stages_of_llamafactory(words: str, tmp_path: Path) -> None:
    stage, _, loss = words.partition(" ")
    given = {**PROGRAMS["LLaMA-Factory"].base, "stage": stage, **({"pref_loss": loss} if loss else {})}
    config = completed(PROGRAMS["LLaMA-Factory"].translate(given, tmp_path).checked(resolved))
    assert config.loss.function == STAGES[words]
    assert (config.data.packing is not None) == (stage == "pt")


def test_datasets_of_llamafactory(tmp_path: Path) -> None:
    info = {
        "chat": {"file_name": "chat.json", "formatting": "sharegpt", "columns": {"messages": "conversations"}},
        "ours": {"file_name": "ours.json", "columns": {"prompt": "question", "response": "output"}},
        "pairs": {"hf_hub_url": "org/pairs", "ranking": True, "formatting": "sharegpt", "split": "train[:10]"},
    }
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    words = f"--model_name_or_path M --dataset_dir {tmp_path} --dataset"
    found = from_llamafactory([*words.split(), "chat"])
    assert (found.get("data.train"), found.get("data.format")) == ([{"path": f"{tmp_path}/chat.json"}], "sharegpt")
    found = from_llamafactory([*words.split(), "ours", "--eval_dataset", "ours", "--eval_strategy", "steps"])
    assert (found.get("data.format"), found.get("data.columns")) == ("alpaca", {"question": "instruction"})
    assert found.get("data.valid") == [{"path": f"{tmp_path}/ours.json"}]
    found = from_llamafactory([*words.split(), "pairs", "--stage", "dpo"])
    assert found.get("data.train") == [{"path": "org/pairs"}]
    assert any("split=train[:10]" in line for line in found.lost)
    held_out = from_llamafactory([*words.split(), "ours", "--val_size", "0.25"])
    assert (held_out.get("data.split"), held_out.get("valid")) == ([0.75, 0.25, 0.0], None)  # without evaluation, too
    found = from_llamafactory([*words.split(), "chat,ours"])
    assert any("formats" in line for line in found.lost)


def test_accelerate_beside_the_arguments(tmp_path: Path) -> None:
    zero = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "DEEPSPEED", "num_processes": 8}
    zero |= {"deepspeed_config": {"zero_stage": 3, "offload_optimizer_device": "none"}, "mixed_precision": "bf16"}
    file, base = write(tmp_path / "zero3.yaml", zero), "--model_name_or_path M --dataset_name a.jsonl"
    for found in (
        from_trl(["sft", str(file), *base.split()]),
        from_trl(["accelerate", "launch", "--config_file", str(file), "trl/scripts/sft.py", *base.split()]),
    ):
        assert found.get("layout.shard") == "weights"
        assert found.get("train.global_batch_size") == 8 * 8
    assert from_trl(f"sft --accelerate_config zero2 {base}".split()).get("layout.shard") == "optimizer"
    context = {**zero, "parallelism_config": {"parallelism_config_cp_size": 2, "parallelism_config_sp_size": 1}}
    layout = from_trl(["sft", str(write(tmp_path / "cp.yaml", context)), *base.split()]).content["layout"]
    assert layout == {"cp": 2, "shard": "weights"}
    sizes = {f"parallelism_config_{kind}_size": 2 for kind in ("tp", "cp", "dp_replicate", "dp_shard")}
    for known, ranks in (({}, 2), ({"num_processes": -1}, 4)):  # data-parallel ranks see different samples
        given = {**zero, "parallelism_config": sizes, **known}
        found = from_trl(["sft", str(write(tmp_path / "dp.yaml", given)), *base.split()])
        assert found.get("train.global_batch_size") == 8 * ranks
        assert any("dp_replicate_size=2" in line for line in found.notes)
    with refuses(ConfigError, "num_processes=6"):
        given = {**zero, "parallelism_config": sizes, "num_processes": 6}
        from_trl(["sft", str(write(tmp_path / "dp.yaml", given)), *base.split()])
    ulysses = {**zero, "parallelism_config": {"parallelism_config_sp_size": 4}, "num_machines": 1}
    found = from_trl(["sft", str(write(tmp_path / "sp.yaml", ulysses)), *base.split()])
    assert found.content["layout"] == {"cp": 4, "cp_comm": "ulysses", "shard": "weights"}
    assert "num_machines" in found.without_effect
    clipped = {**zero, "deepspeed_config": {"zero_stage": 2, "gradient_clipping": 0.5, "zero3_init_flag": False}}
    found = from_trl(["sft", str(write(tmp_path / "clip.yaml", clipped)), *base.split()])
    assert any("gradient_clipping=0.5" in line for line in found.lost)
    assert "deepspeed_config.zero3_init_flag" in found.without_effect


@pytest.mark.parametrize(
    ("translate", "words", "fact"),
    [
        (from_llamafactory, "--stage ppo --model_name_or_path M --dataset a", "docs/training/rl.md"),
        (from_llamafactory, "--stage dpo --pref_loss hinge --model_name_or_path M --dataset a", "pref_loss=hinge"),
        (from_trl, "grpo --loss_type vespo", "loss_type=vespo"),
        (from_trl, "cpo --model_name_or_path M", "CPO's own loss"),
        (from_trl, "dpo --model_name_or_path M --loss_type robust", "loss_type=robust"),
        (from_trl, "dpo --model_name_or_path M --loss_type sigmoid bco_pair", "loss_type=sigmoid, bco_pair"),
        (from_trl, "kto --model_name_or_path M --loss_type apo_zero_unpaired", "loss_type=apo_zero_unpaired"),
        (from_trl, "rloo --model_name_or_path M", "trl rloo"),
        (from_trl, "--model_name_or_path M --dataset_name a --beta 0.1 --padding_free", "several trainers of TRL"),
        (from_trl, "sft --learning_rate $LR", "shell variable"),
        (from_trl, "nonsense", "nonsense"),
        (from_megatron_bridge, "llama3_8b_pretrian_pretrain_config", "this recipe of Megatron-Bridge is not known"),
        (from_megatron_bridge, "llama3_8b_finetune_config", "llama3_8b_sft or llama3_8b_peft"),
        (from_torchtitan, "", "neither a file nor an argument of torchtitan"),
        # without the objective a run would minimise another one
        (from_axolotl, "--base_model M --datasets a --learning_rate 1e-5 --rl grpo", "rl=grpo"),
        (from_axolotl, "--base_model M --datasets a --learning_rate 1e-5 --rl dpo --dpo_loss_type hinge", "=hinge"),
        (from_ms_swift, "swift rlhf --model M --dataset a --max_length 9 --loss_type hinge", "loss_type=hinge"),
        (from_ms_swift, "swift rlhf --model M --dataset a --max_length 9 --rlhf_type grpo", "rlhf_type=grpo"),
        (from_ms_swift, "megatron rlhf --model M --dataset a --max_length 9 --rlhf_type gkd", "rlhf_type=gkd"),
        (
            from_verl,
            "python3 -m verl.trainer.main_ppo actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov",
            "loss_mode=clip_cov",
        ),
        (from_megatron_lm, "--num-layers 2 --perform-rl-step", "--perform-rl-step"),
    ],
)
def test_what_is_refused(translate: Callable[[list[str]], Any], words: str, fact: str) -> None:
    with refuses(ConfigError, fact):
        translate(words.split()).checked(resolved)


@pytest.mark.parametrize(
    ("translate", "one", "other"),
    [
        (from_llamafactory, "llamafactory-cli train --dataset a --no_bf16", "--dataset a --bf16 false"),
        (from_llamafactory, "--dataset a learning_rate=1e-5", "--dataset=a --learning-rate 1e-5"),
        (from_trl, "trl sft --packing", "sft --packing true"),
        (from_trl, "python run_sft.py --packing", "sft --packing yes"),
        (from_torchtitan, "torchrun -m torchtitan.train --training.steps 5", "training.steps=5"),
        (from_torchtitan, "training.tensor_parallel_degree=2", "--parallelism.tensor_parallel_degree 2"),
        (from_torchtitan, "experimental.context_parallel_degree=2", "--parallelism.context_parallel_degree 2"),
        (from_torchtitan, "--checkpoint.enable", "--checkpoint.enable True"),
        (from_megatron_bridge, "--recipe qwen3_8b_sft_config rng.seed=1", "qwen3_8b_sft ++rng.seed=1"),
        (from_megatron_bridge, "rng.seed=1 logger.log_interval=${rng.seed}", "rng.seed=1 logger.log_interval=1"),
    ],
)
def test_ways_to_write_an_argument(translate: Callable[[list[str]], Any], one: str, other: str) -> None:
    assert translate(one.split()).content == translate(other.split()).content


def test_null_is_no_default(tmp_path: Path) -> None:
    """null turns a feature off as in the program; otherwise the header says that the default is used."""
    base = PROGRAMS["trl sft"].base
    found = PROGRAMS["trl sft"].translate({**base, "max_length": None, "max_grad_norm": None, "seed": None}, tmp_path)
    assert (found.get("data.seq_length"), found.get("optimizer.clip_grad"), found.get("train.seed")) == (None, 0, 42)
    assert any(line.startswith("max_length=null") for line in found.notes)
    assert any(line.startswith("seed=null") for line in found.notes)
    recipe = ["llama31_405b_pretrain_config", "model.virtual_pipeline_model_parallel_size=null"]
    assert from_megatron_bridge(recipe).get("layout.vpp") is None
    assert from_megatron_bridge(recipe[:1]).get("layout.vpp") == 2


def test_a_whole_container_of_megatron_bridge(tmp_path: Path) -> None:
    """A file that a run of Megatron-Bridge saved has every field of every class, and the names of the classes."""
    fields = PROGRAMS["Megatron-Bridge"].fields()
    kept = (str, int, float, list, dict, type(None))
    given = {name: value for name, value in fields.items() if isinstance(value, kept) and not name.startswith("peft.")}
    given |= {f"{section}._target_": "megatron.bridge.X" for section in ("model", "train", "optimizer", "scheduler")}
    given |= {"dataset._target_": "megatron.bridge.training.config.GPTDatasetConfig", "dataset.blend": [["c4"], None]}
    given |= {"dataset.split": "9,1,0", "dataset.seq_length": 4096, "mixed_precision.bf16": True, "peft": None}
    given |= {"model.activation_func._target_": "torch.nn.functional.silu", "model.activation_func._call_": False}
    given |= {"model.num_layers": 32, "model.hidden_size": 4096, "model.ffn_hidden_size": 14336}
    given |= {"model.num_attention_heads": 32, "model.num_query_groups": 8, "model.vocab_size": 128256}
    given |= {"model.normalization": "RMSNorm", "model.add_bias_linear": False, "model.gated_linear_unit": True}
    given |= {"model.hidden_dropout": 0.0, "model.attention_dropout": 0.0, "model.rope_scaling": True}
    given |= {"model.share_embeddings_and_output_weights": False, "model.position_embedding_type": "rope"}
    given |= {"model.rope_scaling_factor": 8.0, "model.rotary_base": 500000, "model.seq_length": 4096}
    given |= {"train.train_iters": 10, "train.global_batch_size": 8, "train.micro_batch_size": 1, "optimizer.lr": 1e-4}
    given |= {"checkpoint.save": "runs/x", "optimizer.exp_avg_dtype._target_": "torch.float32"}
    given |= {"optimizer.exp_avg_dtype._call_": False, "scheduler.start_weight_decay": 0.05}
    found = PROGRAMS["Megatron-Bridge"].translate(given, tmp_path).checked(resolved)
    assert found.missing == []
    config = completed(found)
    llama = Config.model_validate(content() | {"model": LLAMA})
    assert config.model.model_copy(update={"megatron": {}}) == llama.model
    assert (config.optimizer.weight_decay, config.train.precision, config.data.kind) == (0.05, "bf16", "indexed")
    assert found.lost == [], found.lost


LLAMA = {
    "num_layers": 32,
    "hidden_size": 4096,
    "ffn_hidden_size": 14336,
    "num_attention_heads": 32,
    "num_query_groups": 8,
    "vocab_size": 128256,
    "rope": {"base": 500000, "scaling": "llama3", "factor": 8},
}


def test_the_verb_and_its_file(tmp_path: Path) -> None:
    """--output may follow the file; the header lists what is carried over first."""
    file = write(tmp_path / "lf.yaml", {**PROGRAMS["LLaMA-Factory"].base, "learning_rate": 1e-4, "use_unsloth": True})
    code, text = call("from", "llamafactory", file, "--output", tmp_path / "ours.yaml")
    assert code == 0, text
    lines = (tmp_path / "ours.yaml").read_text().splitlines()
    assert lines[1] == "# Carried over: dataset, learning_rate, model_name_or_path, output_dir"
    assert "use_unsloth=True" in head(from_llamafactory([str(file)]))
    assert yaml.safe_load("\n".join(lines))["optimizer"]["lr"] == 1e-4
    (tmp_path / "bad.toml").write_text("[training\n")
    code, text = call("from", "torchtitan", tmp_path / "bad.toml")
    assert code == 2
    assert "fix the TOML" in text
