"""Files of axolotl and verl and arguments of ms-swift become configurations that load."""

import random
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from mtrain.base.errors import ConfigError
from mtrain.config.foreign.axolotl import AXOLOTL as AXOLOTL_KEYS
from mtrain.config.foreign.axolotl import from_axolotl
from mtrain.config.foreign.keys import OURS
from mtrain.config.foreign.ms_swift import MEGATRON, MS_SWIFT, from_ms_swift
from mtrain.config.foreign.translation import Row, Translation, translated
from mtrain.config.foreign.verl import VERL as VERL_KEYS
from mtrain.config.foreign.verl import from_verl
from mtrain.config.kinds import sections_at
from mtrain.config.megatron_fields import PROVEN
from mtrain.hf.configuration import load_config, resolved
from tests.cli.command_line import call
from tests.config.samples import content
from tests.config.yaml_files import write
from tests.messages import refuses

AXOLOTL = {
    "base_model": "models/llama",
    "datasets": [{"path": "data/a.jsonl", "type": "chat_template", "field_messages": "messages", "roles": ["x"]}],
    "val_set_size": 0.05,
    "sequence_len": 4096,
    "sample_packing": True,
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "num_epochs": 3,
    "learning_rate": "2e-4",
    "lr_scheduler": "cosine",
    "warmup_ratio": 0.03,
    "optimizer": "adamw_torch_fused",
    "bf16": "auto",
    "adapter": "lora",
    "lora_r": 16,
    "lora_alpha": 32,
    "lora_target_linear": True,
    "gradient_checkpointing": True,
    "flash_attention": True,
    "output_dir": "runs/a",
    "neftune_noise_alpha": 5,
    "load_in_8bit": False,
}
VERL = {
    "model": {"partial_pretrain": "models/qwen", "lora_rank": 0, "lora_alpha": 16},
    "data": {
        "train_files": ["a.parquet"],
        "val_files": "b.parquet",
        "messages_key": "chat",
        "train_batch_size": 64,
        "micro_batch_size_per_gpu": 4,
        "max_length": 2048,
        "truncation": "error",
        "use_dynamic_bsz": True,
        "max_token_len_per_gpu": 8192,
    },
    "ulysses_sequence_parallel_size": 2,
    "optim": {"lr": 1e-5, "betas": [0.9, 0.95], "lr_warmup_steps_ratio": 0.1, "clip_grad": 1.0},
    "trainer": {"total_epochs": 4, "save_freq": -1, "default_local_dir": "runs/v", "logger": ["console", "wandb"]},
}
SWIFT = (
    "megatron sft --model Qwen/Qwen3-8B --dataset a.jsonl b.jsonl --split_dataset_ratio 0.01 --max_length 8192 "
    "--truncation_strategy delete --packing true --global_batch_size 16 --micro_batch_size 1 --num_train_epochs 2 "
    "--tensor_model_parallel_size 2 --sequence_parallel true --recompute_granularity full --lr 1e-5 --min_lr 1e-6 "
    "--lr_warmup_fraction 0.05 --finetune true --save runs/s --tuner_type full --lora_rank 8 --unheard_of 3"
)


def section(found: Translation, name: str) -> dict[str, Any]:
    """Reads a section back from the file that is written."""
    read: dict[str, dict[str, Any]] = yaml.safe_load("\n".join(found.lines()))
    return read[name]


def test_a_file_of_axolotl(tmp_path: Path) -> None:
    found = from_axolotl([str(write(tmp_path / "a.yml", AXOLOTL))]).checked(resolved)
    assert section(found, "adapter") == {"kind": "lora", "rank": 16, "alpha": 32.0, "targets": ["all-linear"]}
    assert section(found, "train") == {
        "micro_batch_size": 2,
        "num_epochs": 3,
        "precision": "bf16",
        "recompute": "full",
        "global_batch_size": 8,
        "seed": 42,
    }
    assert section(found, "optimizer") == {
        "lr": 2e-4,
        "schedule": "cosine",
        "warmup_ratio": 0.03,
        "kind": "adamw",
        "weight_decay": 0.0,
        "beta2": 0.999,
    }
    data = section(found, "data")
    assert data["train"] == [{"path": "data/a.jsonl"}]
    assert (data["format"], data["packing"], data["split"]) == ("messages", {"batch": "rows"}, [0.95, 0.05, 0.0])
    assert [line.split("=")[0] for line in found.lost] == ["neftune_noise_alpha", "datasets: roles"]
    assert set(found.without_effect) == {"load_in_8bit", "flash_attention"}


def test_a_file_of_verl(tmp_path: Path) -> None:
    found = from_verl([str(write(tmp_path / "v.yaml", VERL))]).checked(resolved)
    assert "adapter" not in found.content
    assert section(found, "layout") == {"cp": 2, "cp_comm": "ulysses", "shard": "weights"}
    assert section(found, "data")["columns"] == {"chat": "messages"}
    assert section(found, "train")["tokens_per_micro_batch"] == 2 * 8192
    assert section(found, "metrics") == {"trackers": ["wandb"]}
    assert found.lost == []


@pytest.mark.parametrize(
    ("keys", "columns"),
    [
        ({"prompt_key": "question", "response_key": "answer"}, {"question": "prompt", "answer": "response"}),
        ({"prompt_key": "prompt", "response_key": "answer"}, {"answer": "response"}),
        ({"multiturn": {"enable": True, "messages_key": "chat", "tools_key": "functions"}}, None),
        ({"multiturn": {"enable": True, "messages_key": "messages"}}, {}),
    ],
)
def test_columns_of_verl(tmp_path: Path, keys: dict[str, Any], columns: dict[str, str] | None) -> None:
    found = from_verl([str(write(tmp_path / "v.yaml", {"data": {"train_files": "a.parquet", **keys}}))])
    data = section(found, "data")
    assert data.get("columns", {}) == ({"chat": "messages", "functions": "tools"} if columns is None else columns)
    assert data.get("format") == ("messages" if "multiturn" in keys else None)
    assert found.lost == []


PPO = (
    "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=a.parquet "
    "+data.max_prompt_length=512 "
    "data.max_response_length=1024 actor_rollout_ref.model.path=Q actor_rollout_ref.actor.optim.lr=1e-6 "
    "actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32 "
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 actor_rollout_ref.actor.kl_loss_coef=0.001 "
    "actor_rollout_ref.actor.entropy_coeff=0.01 actor_rollout_ref.actor.clip_ratio_high=0.28 "
    "actor_rollout_ref.rollout.n=5 actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.temperature=0.7 "
    "trainer.total_epochs=15 trainer.save_freq=20"
)


def test_the_actor_of_a_loop_of_verl() -> None:
    found = from_verl(PPO.split()).checked(resolved)
    bonus = {"function": "entropy", "coefficient": -0.01}
    assert section(found, "loss") == {
        "function": "ppo",
        "side_terms": {"entropy": bonus},
        "options": {"clip_high": 0.28, "clip_low": 0.2, "dual_clip": 3.0},
    }
    assert section(found, "train") == {
        "global_batch_size": 1280,
        "micro_batch_size": 32,
        "seed": 42,
    }
    assert section(found, "data") == {"kind": "mock", "seq_length": 1536, "tokenizer": "Q"}
    assert section(found, "layout") == {"tp": 2, "sp": True}
    assert [line.split("=")[0] for line in found.lost] == [
        "algorithm.adv_estimator",
        "data.train_files",
        "actor_rollout_ref.rollout.name",
        "trainer.total_epochs",
    ]
    assert any("temperature=T" in line for line in found.notes)
    divergence = [*PPO.split(), "actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.kl_loss_type=mse"]
    assert from_verl(divergence).content["loss"]["side_terms"]["kl"] == {
        "function": "kl",
        "coefficient": 0.001,
        "options": {"estimator": "k2"},
    }


def test_the_engine_of_a_loop_of_verl() -> None:
    """FSDP decays all parameters, Megatron-Core none of norms and biases; sizes of an inference engine say nothing."""
    words = [word for word in PPO.split() if "megatron" not in word]
    rollouts = "actor_rollout_ref.rollout.tensor_model_parallel_size=2"
    found = from_verl([*words, rollouts, "actor_rollout_ref.actor.fsdp_config.param_offload=True"])
    assert found.get("optimizer.decay_norms_and_biases") is True
    assert "actor_rollout_ref.actor.fsdp_config.param_offload" in found.without_effect
    for start in (PPO, " ".join([*words, "actor_rollout_ref.actor.strategy=megatron"])):
        assert from_verl(start.split()).get("optimizer.decay_norms_and_biases") is None


def test_terms_of_a_loop_of_verl_are_aggregated_as_its_loss() -> None:
    actor = "actor_rollout_ref.actor."
    terms = [f"{actor}use_kl_loss=True", "trainer.total_training_steps=9"]
    for mode, length in (("seq-mean-token-mean", None), ("seq-mean-token-sum-norm", 1024)):
        loss = from_verl([*PPO.split(), *terms, f"{actor}loss_agg_mode={mode}"]).content["loss"]
        for each in (loss, *loss["side_terms"].values()):
            assert (each["aggregation"], each.get("norm_length")) == (mode, length)
    # GSPO's loss too, from 0.9 on
    found = from_verl([*PPO.split(), *terms, f"{actor}policy_loss.loss_mode=gspo", f"{actor}loss_agg_mode=token-sum"])
    assert (found.get("loss.aggregation"), found.get("loss.side_terms.kl.aggregation")) == ("sum", "sum")
    assert any("before 0.9" in line for line in found.notes)


@pytest.mark.parametrize(("kind", "estimator"), [("low_var_kl", "k3"), ("k1", "k1"), ("k3+", "k2"), ("kl+", "k2")])
def test_estimators_of_verl(kind: str, estimator: str) -> None:
    """A plus sign means the gradient of k2, whatever the value."""
    actor = "actor_rollout_ref.actor."
    found = from_verl([*PPO.split(), f"{actor}use_kl_loss=True", f"{actor}kl_loss_type={kind}"])
    assert (found.get("loss.side_terms.kl.options.estimator"), found.wrong) == (estimator, [])
    assert any("gradient of k2" in line for line in found.notes) == ("+" in kind)
    assert from_verl([*PPO.split(), f"{actor}use_kl_loss=True", f"{actor}kl_loss_type=abs"]).wrong
    assert not from_verl([*PPO.split(), f"{actor}kl_loss_type=abs"]).wrong


def test_weights_of_a_loop_of_verl_for_the_probabilities_of_its_sampler() -> None:
    correction = "algorithm.rollout_correction."
    assert "rollout_cap" not in from_verl(PPO.split()).content["loss"]["options"]
    for level, cap in (("token", 2.0), ("sequence", 5.0)):
        given = [f"{correction}rollout_is={level}", *([f"{correction}rollout_is_threshold=5"] if cap == 5 else [])]
        options = from_verl([*PPO.split(), *given]).content["loss"]["options"]
        assert (options["rollout_cap"], options["rollout_correction"]) == (cap, f"{level}-truncate")
    for bounds, expected in (("0.5_5.0", (0.5, 5, "token-mask")), ("2", (None, 2, "token-truncate"))):
        given = [f"{correction}rollout_is=token", f"{correction}rollout_is_threshold={bounds}"]
        options = from_verl([*PPO.split(), *given]).content["loss"]["options"]
        names = ("rollout_floor", "rollout_cap", "rollout_correction")
        assert tuple(options.get(name) for name in names) == expected
    found = from_verl([*PPO.split(), f"{correction}rollout_rs=token_k1", f"{correction}bypass_mode=true"])
    assert [line.split("=")[0] for line in found.lost if "correction" in line] == [
        f"{correction}rollout_rs",
        f"{correction}bypass_mode",
    ]


HEADS = [
    ("megatron rlhf --rlhf_type rm", "reward_model", 1),
    ("megatron sft --task_type seq_cls --num_labels 3", "classification", 3),
    ("swift sft --task_type seq_cls --num_labels 1", "regression", 1),
    ("swift sft --task_type seq_cls --num_labels 2 --problem_type regression", "regression", 2),
    ("megatron sft --num_labels 3", None, None),
    ("megatron sft --task_type embedding", None, None),
]


@pytest.mark.parametrize(("start", "function", "labels"), HEADS)
def test_heads_of_ms_swift(start: str, function: str | None, labels: int | None) -> None:
    found = from_ms_swift(f"{start} --model M --dataset a.jsonl --max_length 64 --train_iters 9".split())
    assert (found.get("loss.function"), found.get("model.num_labels")) == (function, labels)
    assert any(line.startswith("task_type=embedding") for line in found.lost) == ("embedding" in start)


@pytest.mark.parametrize(
    ("given", "interval", "lost"),
    [
        ({"save_steps": 0.25, "max_steps": 40}, 10, []),
        ({"save_steps": 0.25}, None, ["save_steps"]),
        ({"save_steps": 7}, 7, []),
        ({"save_steps": False}, 0, []),
    ],
)
def test_a_share_of_the_run_as_an_interval(given: Any, interval: int | None, lost: list[str], tmp_path: Path) -> None:
    found = from_axolotl([str(write(tmp_path / "a.yml", {"base_model": "M", "datasets": "a", **given}))])
    assert found.get("checkpoint.interval_steps") == interval
    assert [line.split("=")[0] for line in found.lost] == lost


def test_pairs_of_axolotl(tmp_path: Path) -> None:
    """TRL's defaults of SimPO are not ours; a key is in one list of the head only."""
    given = {"base_model": "M", "datasets": "a", "learning_rate": 1, "adapter": "lora", "lora_dropout": 0.1}
    file = str(write(tmp_path / "a.yml", given | {"rl": "simpo", "sample_packing": True}))
    found = from_axolotl([file]).checked(resolved)
    assert found.get("loss.options.beta") == 0.1
    assert found.get("adapter.dropout") is found.get("data.packing") is None
    assert [re.split("[=:]", line)[0] for line in found.lost] == ["axolotl's default of cpo_alpha", "lora_dropout"]
    assert "lora_dropout" not in found.without_effect
    assert (
        from_ms_swift(["megatron", "sft", "--model", "M", "--eval_iters", "0", "--val_dataset", "b"]).get("valid")
        is None
    )


DATASETS: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
    ({"datasets": [{"path": "a", "type": "completion", "field": "body"}]}, {"columns": {"body": "text"}}, []),
    ({"pretraining_dataset": [{"path": "a", "text_column": "body"}]}, {"columns": {"body": "text"}}, []),
    ({"pretraining_dataset": "a"}, {}, []),
    ({"pretraining_dataset": [{"path": "a", "type": "pretrain", "skip": 9}]}, {}, ["skip"]),
]


@pytest.mark.parametrize(("given", "expected", "lost"), DATASETS)
def test_texts_of_axolotl(given: Any, expected: Any, lost: list[str], tmp_path: Path) -> None:
    """Long texts are cut into pieces there, whatever becomes of other long samples."""
    file = write(tmp_path / "a.yml", {"base_model": "M", "learning_rate": 1, "max_steps": 9, **given})
    found = from_axolotl([str(file), "--excess_length_strategy", "drop"]).checked(resolved)
    kept = {"kind": "sft", "format": "text", "too_long": "split", "train": [{"path": "a"}]}
    assert section(found, "data") == {**kept, "seq_length": 512, "tokenizer": "M", **expected}
    assert [line.split(": ")[1].split("=")[0] for line in found.lost] == lost


@pytest.mark.parametrize(
    ("rl", "dataset", "columns", "lost"),
    [
        ("dpo", {"type": "chat_template.default"}, {"messages": "prompt"}, []),
        (
            "dpo",
            {
                "type": "chat_template.default",
                "field_messages": "chat",
                "field_chosen": "good",
                "roles": {"user": "user"},
            },
            {"chat": "prompt", "good": "chosen"},
            [],
        ),
        ("ipo", {"type": "chat_template.argilla_chat", "field_rejected": "bad"}, {"bad": "rejected"}, []),
        ("orpo", {"type": "chat_template.argilla"}, None, []),
        ("dpo", {"type": "chatml.intel"}, None, ["type=chatml.intel"]),
        (
            "dpo",
            {"type": "chat_template.default", "message_property_mappings": {"role": "from"}},
            {"messages": "prompt"},
            ["type=chat_template.default"],
        ),
    ],
)
def test_records_of_pairs_of_axolotl(rl: str, dataset: Any, columns: Any, lost: list[str], tmp_path: Path) -> None:
    given = {"base_model": "M", "datasets": [{"path": "a", **dataset}], "learning_rate": 1, "rl": rl}
    found = from_axolotl([str(write(tmp_path / "a.yml", given))])
    assert (found.get("data.columns"), found.get("data.format")) == (columns, None)
    assert [line.split(": ")[1] for line in found.lost if line.startswith("datasets")] == lost


def test_what_axolotl_says_of_a_conversation(tmp_path: Path) -> None:
    """What equals the behaviour here is no loss; a template of its own name is said to differ."""
    same: dict[str, Any] = {
        "field_tools": "tools",
        "field_thinking": "reasoning_content",
        "message_field_training": "train",
    }
    same |= {"train_on_eos": "turn", "train_on_eot": "turn", "roles": {"assistant": ["gpt", "assistant"]}}
    other = {"field_tools": "functions", "roles": {"user": ["customer"]}, "train_on_eos": "all"}
    given = {"base_model": "M", "learning_rate": 1, "chat_template": "qwen3_5"}
    for dataset, lost in ((same, []), (other, list(other))):
        entry = {"path": "a", "type": "chat_template", **dataset}
        found = from_axolotl([str(write(tmp_path / "a.yml", {**given, "datasets": [entry]}))])
        assert [line.split(": ")[1].split("=")[0] for line in found.lost] == lost
        assert any(line.startswith("chat_template=qwen3_5") for line in found.notes)


@pytest.mark.parametrize("program", ["axolotl", "swift"])
def test_schedules_are_those_of_transformers(program: str, tmp_path: Path) -> None:
    options = {"lr_scheduler_kwargs": {"min_lr": 1e-6}, "learning_rate": 1e-4}
    if program == "axolotl":
        given = {"base_model": "M", "datasets": "a", "lr_scheduler": "cosine_with_min_lr", **options}
        found = from_axolotl([str(write(tmp_path / "a.yml", given))])
    else:
        words = "swift sft --model M --dataset a --max_length 9 --lr_scheduler_type cosine_with_min_lr"
        found = from_ms_swift([*words.split(), "--lr_scheduler_kwargs", '{"min_lr": 1e-6}'])
    assert (found.get("optimizer.schedule"), found.get("optimizer.min_lr"), found.lost) == ("cosine", 1e-6, [])


def test_pretraining_of_ms_swift_has_no_template() -> None:
    for start in ("swift pt", "megatron pt"):
        found = from_ms_swift(f"{start} --model M --dataset a.jsonl --max_length 9 --packing true".split())
        assert (found.get("data.format"), found.get("data.loss_on"), found.lost) == ("text", None, [])
        assert from_ms_swift(f"{start[:-2]}sft --model M --dataset a".split()).get("data.format") is None


def test_a_model_that_is_not_here_is_not_judged(tmp_path: Path) -> None:
    """Modules and sizes are those of the folder, which may be downloaded later."""
    given = {"base_model": "M", "datasets": "a", "learning_rate": 1, "adapter": "lora", "tensor_parallel_size": 7}
    file = write(tmp_path / "a.yml", given | {"lora_target_modules": ["in_proj", "down_proj"]})
    assert [line.partition("=")[0] for line in from_axolotl([str(file)]).checked(resolved).missing] == ["model.hf"]


def test_later_words_of_verl_hold(tmp_path: Path) -> None:
    found = from_verl([str(write(tmp_path / "v.yaml", VERL)), "optim.lr=3e-5", "++data.max_length=64"])
    assert (found.content["optimizer"]["lr"], found.content["data"]["seq_length"]) == (3e-5, 64)
    found = from_verl([*PPO.split(), "trainer.default_local_dir=ck/${trainer.project_name}"])
    assert found.lost[0].startswith("trainer.default_local_dir=ck/${trainer.project_name}: ")
    parallel = "actor_rollout_ref.actor.megatron.sequence_parallel=True"
    assert from_verl([*PPO.split(), parallel]).content["layout"] == {"tp": 2, "sp": True}
    assert from_verl([parallel]).without_effect == [parallel.split("=")[0]]
    with refuses(ConfigError, "KEY=VALUE"):
        from_verl(["python3"][:0])


def test_arguments_of_ms_swift() -> None:
    found = from_ms_swift(SWIFT.split()).checked(resolved)
    assert section(found, "layout") == {"tp": 2, "sp": True}
    assert section(found, "data")["train"] == [{"path": "a.jsonl"}, {"path": "b.jsonl"}]
    assert "adapter" not in found.content
    assert found.lost == ["unheard_of=3: no key here corresponds"]
    with refuses(ConfigError, "--"):
        from_ms_swift(["megatron", "sft"])


def leaves(program: str, table: dict[str, Row], seed: int) -> dict[str, Any]:
    """Draws keys of a program with values of any type."""
    drawn = random.Random(f"{program}{seed}")
    values = [True, 3, 0.5, "lora", "dpo", ["a", "b"], {"pad_token": "x"}, {"eos_token": "x"}, "3e-4", [{"path": "p"}]]
    return {name: drawn.choice(values) for name in drawn.sample(sorted(table), 20)}


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(
    ("program", "table"),
    [("axolotl", AXOLOTL_KEYS), ("megatron", MEGATRON), ("ms-swift", MS_SWIFT), ("verl", VERL_KEYS)],
)
def test_no_key_of_a_drawn_file_is_dropped(program: str, table: dict[str, Row], seed: int) -> None:
    """Each key is named as the origin of one of ours, or in a line on what was not carried over."""
    given = leaves(program, table, seed)
    found = Translation(program)
    found.report_unmentioned(translated(found, given, table).explicit)
    text = "\n".join([*found.origins.values(), *found.lost, *found.notes, *found.wrong, *found.without_effect])
    assert [name for name in given if not re.search(rf"(?<![\w.]){re.escape(name)}(?![\w.])", text)] == []


def test_ways_of_axolotl_to_say_a_thing(tmp_path: Path) -> None:
    sharegpt = {"role": "from", "content": "value"}
    dataset = {"path": "a", "field_messages": "conversations", "message_property_mappings": sharegpt}
    given = {
        "datasets": [{**dataset, "split": "train[:20%]"}],
        "rl": "kto",
        "rl_beta": 0.3,
        "tokens": ["<think>"],
        "sequence_parallel_degree": 4,
        "learning_rate": "1e-3",
        "cosine_min_lr_ratio": 0.1,
        "max_steps": 10,
        "num_epochs": 2,
        "special_tokens": {"pad_token": "<pad>", "eos_token": "</s>"},
    }
    found = from_axolotl([str(write(tmp_path / "a.yml", given))]).checked(resolved)
    assert found.content["loss"] == {"function": "kto", "options": {"beta": 0.3}}
    assert "format" not in found.content["data"]
    assert found.content["model"]["add_tokens"] == ["<think>"]
    assert found.content["layout"] == {"cp": 4}
    assert found.content["optimizer"] == {"lr": 1e-3, "min_lr": 1e-4, "weight_decay": 0.0, "beta2": 0.999}
    assert found.content["train"]["num_steps"] == 10
    assert "num_epochs" in found.without_effect
    assert [line.split(":")[0] for line in found.lost] == ["special_tokens={'eos_token'", "datasets", "datasets"]


def test_the_verb_writes_a_file_once(tmp_path: Path) -> None:
    code, text = call("from", "axolotl", write(tmp_path / "a.yml", AXOLOTL), "--output", tmp_path / "ours.yaml")
    assert code == 0, text
    assert "note: neftune_noise_alpha=5: no key here corresponds" in text
    assert yaml.safe_load((tmp_path / "ours.yaml").read_text())["run"] == {"dir": "runs/a"}
    code, text = call("from", "megatron-lm", "--output", tmp_path / "ours.yaml", "--num-layers", "2")
    assert code == 2
    assert "exists" in text
    code, text = call("from", "ms-swift", "--lr", "1e-5")
    assert code == 0
    assert "  lr: 1e-05  # lr" in text


@pytest.mark.parametrize("name", ["tensor_model_parallel_size", "max_grad_norm", "num_train_epochs", "num_moe_experts"])
def test_a_key_of_another_program_names_ours(name: str, tmp_path: Path) -> None:
    with refuses(ConfigError, f"it is {OURS[name]} here"):
        load_config([write(tmp_path / "config.yaml", content(**{f"train__{name}": 2}))])


def test_keys_of_other_programs_are_none_of_ours_in_their_sections() -> None:
    """Each names a key that there is, or two."""
    for name, keys in OURS.items():
        for key in keys.split(" or "):
            *place, last = key.split(".")
            fields = (
                [PROVEN]
                if place == ["model", "megatron"]
                else [each.model_fields for each in sections_at(tuple(place))]
            )
            assert any(last in each for each in fields), (name, key)
