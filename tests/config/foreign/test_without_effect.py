"""Settings that have a key here are carried over or reported, and never listed as without effect."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from mtrain.base.errors import ConfigError
from mtrain.config.foreign.axolotl import from_axolotl
from mtrain.config.foreign.keys import OURS
from mtrain.config.foreign.ms_swift import from_ms_swift
from mtrain.config.foreign.translation import Translation
from mtrain.config.foreign.verl import from_verl
from mtrain.config.schema import bounds
from mtrain.config.tables import table
from tests.config.foreign import test_same_run
from tests.config.foreign.programs import PROGRAMS, head
from tests.config.yaml_files import write
from tests.messages import refuses

TABLES = ("axolotl", "llamafactory", "ms_swift", "torchtitan", "transformers", "trl", "verl")
_SAME_RUN = ("model.backend", "model.experts.implementation", "model.experts.dispatcher")
"""Keys that choose between kernels with the same result."""
_OTHERS = {
    "llamafactory": ("max_length", "mixed_precision"),  # of generation, and of an engine that computes in bf16 only
    "torchtitan": ("validation.local_batch_size",),  # validation has the batch of training here
    "trl": ("chat_template_path",),  # only writes the template into the tokenizer of a trainer of pairs
    "verl": ("optim",),  # a word of Hydra, which chooses a group of defaults
    "axolotl": ("fsdp_version",),
}
"""Names that mean something else in the program."""


def unused(content: Mapping[str, Any]) -> Iterator[str]:
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from unused(value)
        elif key == "unused":
            yield from value.split()


@pytest.mark.parametrize("name", TABLES)
def test_what_has_no_effect_has_no_key_here(name: str) -> None:
    """No name that the hints for unknown keys translate to one of our keys."""
    known = {each: OURS.get(each.rpartition(".")[2]) for each in unused(table(name))}
    wrong = {each: key for each, key in known.items() if key is not None and key not in _SAME_RUN}
    assert [each for each in wrong if each not in _OTHERS.get(name, ())] == []


WAYS = {name: (way.translate, way.base) for name, way in PROGRAMS.items()} | {
    name: (way.translate, way.base) for name, way in test_same_run.PROGRAMS.items()
}


@pytest.mark.parametrize(
    ("program", "given", "key", "value"),
    [
        ("trl sft", {"torch_compile": True}, "train.compile", "regions"),
        ("axolotl", {"torch_compile": "auto"}, "train.compile", "auto"),
        ("axolotl", {"torch_compile": False}, "train.compile", None),
        ("LLaMA-Factory", {"ddp_timeout": 180000000}, "train.process_group_timeout_s", bounds.MAX_SECONDS),
        ("transformers", {}, "train.process_group_timeout_s", 1800),
        ("axolotl", {"ddp_timeout": 900}, "train.process_group_timeout_s", 900),
        ("swift sft", {"ddp_timeout": "900"}, "train.process_group_timeout_s", 900),
        ("transformers", {"no_cuda": True}, "train.device", "cpu"),
        ("axolotl", {"profiler_steps": 5, "profiler_steps_start": 10}, "metrics.profile_steps", [11, 15]),
        ("megatron sft", {"cp_comm_type": "a2a", "context_parallel_size": 2}, "layout.cp_comm", "ulysses"),
        (
            "megatron sft",
            {"recompute_modules": ["core_attn", "mlp"]},
            "train.recompute_modules",
            ["core_attn", "mlp"],
        ),
        ("verl sft_trainer", {"trainer.resume_mode": "disable"}, "checkpoint.resume", "never"),
        ("verl sft_trainer", {"data.tokenizer": "T"}, "data.tokenizer", "T"),
        ("swift sft", {"val_dataset": "b", "eval_strategy": "no"}, "valid.interval_steps", None),
    ],
)
def test_a_setting_sets_its_key(program: str, given: Mapping[str, Any], key: str, value: Any, tmp_path: Path) -> None:
    translate, base = WAYS[program]
    found: Translation = translate({**base, **given}, tmp_path)
    assert found.get(key) == value
    assert [name for name in given if name not in head(found)] == []


@pytest.mark.parametrize("program", ["trl sft", "transformers", "LLaMA-Factory", "axolotl", "swift sft"])
@pytest.mark.parametrize(("value", "is_lost"), [("runs/x/checkpoint-500", True), (True, False), ("false", False)])
def test_a_checkpoint_to_continue_from_is_named(program: str, value: Any, is_lost: bool, tmp_path: Path) -> None:
    translate, base = WAYS[program]
    found: Translation = translate({**base, "resume_from_checkpoint": value}, tmp_path)
    assert any(line.startswith("resume_from_checkpoint") for line in found.lost) == is_lost
    assert ("resume_from_checkpoint" in found.without_effect) != is_lost


def test_arguments_after_a_file_of_axolotl(tmp_path: Path) -> None:
    """Arguments take precedence, as in `axolotl train`; a value that the file refers to is not guessed."""
    file = str(write(tmp_path / "a.yml", {**WAYS["axolotl"][1], "learning_rate": 1e-3, "output_dir": "${oc.env:OUT}"}))
    words = ["axolotl", "train", file, "--learning-rate", "1e-5", "--sample-packing", "--num_epochs=2"]
    found = from_axolotl(words)
    assert (found.get("optimizer.lr"), found.get("data.packing")) == (1e-5, {"batch": "rows"})
    assert found.get("train.num_epochs") == 2
    assert any(line.startswith("output_dir=${oc.env:OUT}") for line in found.lost)
    with refuses(ConfigError, "neither a file nor an argument of axolotl"):
        from_axolotl([])


def test_anchors_and_merges_of_yaml(tmp_path: Path) -> None:
    (tmp_path / "a.yml").write_text("x: &x {lora_r: 4, lora_alpha: 8}\nadapter: lora\nbase_model: M\n<<: *x\n")
    found = from_axolotl([str(tmp_path / "a.yml")])
    assert found.content["adapter"] == {"kind": "lora", "rank": 4, "alpha": 8.0, "dropout": 0.0}


def test_files_that_a_file_of_verl_includes(tmp_path: Path) -> None:
    """Files in its folder are read in Hydra's order; verl's own are its defaults, and others are named."""
    for order, size in ((["mine", "_self_"], 8), (["_self_", "mine"], 7), (["mine"], 8)):
        write(tmp_path / "mine.yaml", {"data": {"train_files": "a.parquet", "train_batch_size": 7}})
        file = write(tmp_path / "v.yaml", {"defaults": order, "data": {"train_batch_size": 8}})
        assert from_verl([str(file)]).get("train.global_batch_size") == size
    for entry in ("elsewhere", "ppo_trainer", {"actor@actor_rollout_ref.actor": "dp_actor"}):
        file = write(tmp_path / "v.yaml", {"defaults": [entry], "data": {"train_files": "a.parquet"}})
        assert [line.split(":")[1] for line in from_verl([str(file)]).lost if "defaults" in line] == (
            [" elsewhere"] if entry == "elsewhere" else []
        )
    actor = {"actor_rollout_ref": {"model": {"path": "M"}}}
    for base, decays in (("ppo_trainer", True), ("ppo_megatron_trainer", None)):
        found = from_verl([str(write(tmp_path / "v.yaml", {"defaults": [base], **actor}))])
        assert found.get("optimizer.decay_norms_and_biases") is decays


def test_variables_in_a_file_of_ms_swift(tmp_path: Path) -> None:
    """`ENV` sets variables that the shell does not set."""
    given = {"model": "Qwen/Qwen3-VL-8B", "dataset": ["a"], "ENV": {"MAX_PIXELS": 602112, "NPROC_PER_NODE": 4}}
    file = str(write(tmp_path / "s.yaml", given))
    assert from_ms_swift(["swift", "sft", file]).get("data.images.max_pixels") == 588 * 1024
    assert from_ms_swift(["MAX_PIXELS=65536", "swift", "sft", file]).get("data.images.max_pixels") == 65536
    assert from_ms_swift(["swift", "sft", file]).lost == []


@pytest.mark.parametrize(
    ("program", "name", "changing", "neutral"),
    [
        ("transformers", "sortish_sampler", True, False),
        ("transformers", "per_gpu_train_batch_size", 4, None),
        ("LLaMA-Factory", "ignore_pad_token_for_loss", False, True),
        ("LLaMA-Factory", "media_dir", "pictures", None),
        ("axolotl", "plugins", ["axolotl.integrations.kd.KDPlugin"], ["axolotl.integrations.liger.LigerPlugin"]),
        ("swift sft", "external_plugins", "plugin.py", None),
        ("swift sft", "callbacks", "mine", None),
        ("verl sft_trainer", "optim.zero_indexed_step", False, True),
        ("verl main_ppo", "trainer.critic_warmup", 20, 0),
    ],
)
def test_what_changes_a_run_is_said_to(program: str, name: str, changing: Any, neutral: Any, tmp_path: Path) -> None:
    """A setting that changes what is trained is in the list of what is not carried over, and its neutral value not."""
    translate, base = WAYS[program]
    for value, is_lost in ((changing, True), (neutral, False)):
        if value is not None:
            found = translate({**base, name: value}, tmp_path)
            assert any(line.startswith(f"{name}=") for line in found.lost) == is_lost, value
