"""A key that there is not names the key that is meant, or none: never one with another meaning."""

import dataclasses
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrain.base.errors import ConfigError
from mtrain.config.foreign.axolotl import AXOLOTL
from mtrain.config.foreign.keys import OURS, SYNONYMS
from mtrain.config.foreign.megatron_arguments import REFUSED, WITHOUT_EFFECT
from mtrain.config.foreign.megatron_lm import from_megatron_lm
from mtrain.config.foreign.ms_swift import MEGATRON, MS_SWIFT
from mtrain.config.foreign.translation import Row, Translation, try_put
from mtrain.config.foreign.verl import VERL
from mtrain.config.keys import described_keys
from mtrain.config.kinds import sections_at
from mtrain.config.megatron_fields import TYPED_KNOBS
from mtrain.config.messages import readable, unknown_key
from mtrain.hf.configuration import load_config
from tests.config.samples import INDEXED, content
from tests.messages import refuses

KEYS = {key.name: key for key in described_keys()}
SECTIONS = ["", *(name for name, key in KEYS.items() if key.is_section and "[]" not in name)]
"""Dotted sections; the root is empty."""
LETTERS = "aceklnoprstvxz"


@cache
def fields(section: str) -> frozenset[str]:
    """Returns the keys that a section has, of whatever kind."""
    place = tuple(section.replace("NAME", "name").split(".")) if section else ()
    return frozenset(name for each in sections_at(place) for name in each.model_fields)


def answer(section: str, name: str) -> str:
    if section:
        text = unknown_key(f"{section}.{name}".replace("NAME", "name"))
    else:
        (text,) = readable({"type": "extra_forbidden", "loc": (name,), "msg": "", "input": 1})
    assert "there is no such key" in text
    return text.partition("there is no such key; ")[2]


def named(section: str, name: str) -> set[str]:
    """Returns the keys that the answer to an unknown key offers."""
    text = answer(section, name)
    found = re.fullmatch(r"did you mean (.*)\?|it is (.*) here", text)
    return set(re.split(", | or ", found[1] or found[2])) if found else set()


def test_a_key_in_another_section_names_its_place() -> None:
    for key in KEYS:
        own, _, last = key.rpartition(".")
        for section in SECTIONS:
            if last not in fields(section) and section + "." != own:
                assert key in named(section, last), (key, section)


def test_a_key_in_another_section_of_a_file() -> None:
    """The same, by the whole way of a configuration."""
    for wrong, right in (("train.lr", "optimizer.lr"), ("model.tp", "layout.tp"), ("num_steps", "train.num_steps")):
        with refuses(ConfigError, wrong, right):
            load_config(content(), [f"{wrong}=2"])


@cache
def slips(name: str, letters: str = LETTERS) -> frozenset[str]:
    """Returns a name with one slip of the finger, and in other spellings; wrong letters are one of `letters`."""
    found = {name.replace("_", "-"), name.upper(), "".join(part.title() for part in name.split("_"))}
    for at in range(len(name)):
        found |= {name[:at] + name[at + 1 :], name[: at + 1] + name[at:]}
        found.add(name[:at] + name[at + 1 : at + 2] + name[at] + name[at + 2 :])
        for letter in letters:
            found |= {name[:at] + letter + name[at + 1 :], name[:at] + letter + name[at:]}
    return frozenset(found)


@pytest.mark.parametrize("letters", ["s", pytest.param(LETTERS, marks=pytest.mark.nightly)])
def test_a_slip_names_the_key_or_none(letters: str) -> None:
    """A slip that makes the name of another key, or another program's, is answered by that."""
    others = {each.rpartition(".")[2] for each in KEYS} | OURS.keys() | set().union(*SYNONYMS.values())
    for name in (each for each in KEYS if not each.endswith("NAME") and "[]" not in each):
        section, _, last = name.rpartition(".")
        shown = name.replace("NAME", "name")
        place = shown.removesuffix(last)
        for wrong in slips(last, letters) - others - {""}:
            keys = {place + each for each in fields(section) if wrong in slips(each)}
            assert named(section, wrong) <= keys, (name, wrong)
        for spelled in (last.upper(), last.replace("_", "-")):
            assert spelled == last or named(section, spelled) == {shown}, name
        assert len(last) <= 6 or named(section, last + last[-1]) == {shown}, name


def lines(name: str, value: Any) -> list[str]:
    """Returns the messages about one key of a small configuration that is given a value."""
    kinds = KEYS[name].kinds
    sft = {**INDEXED, "kind": "sft", "tokenizer": "t", "train": [{"path": "x"}]}
    data = sft if "indexed" not in kinds and "sft" in kinds else {**INDEXED, "train": [{"path": "x"}]}
    sections = content(**({"data": data} if name.startswith("data") else {}))
    sections["optimizer"] |= {"kind": "muon"} if "muon" in kinds else {}
    sections |= {"adapter": {"kind": "lora", "rank": 4}} if name.startswith("adapter") else {}
    place, parts = sections, name.replace("NAME", "name").split(".")
    for part in parts[:-1]:
        place = place.setdefault(part.removesuffix("[]"), [{}] if part.endswith("[]") else {})
        place = place[0] if isinstance(place, list) else place
    place[parts[-1]] = value
    with pytest.raises(ConfigError) as error:
        load_config(sections)
    shown = name.replace("NAME", "name").replace("[]", "[0]")
    return [line for line in str(error.value).splitlines() if re.match(rf"{re.escape(shown)}\b(?!\.)", line)]


def test_another_shape_of_a_value_gets_one_message() -> None:
    for name, key in KEYS.items():
        if name.endswith("kind"):
            continue
        if not key.type.startswith(("mapping", "section", "any", "null | section")):
            assert len(lines(name, {"a": 1})) == 1 or name in ("data.valid", "data.test", "data.extras"), name
        if "list" not in key.type and key.type != "any value":
            assert len(lines(name, [1])) == 1, name
        if "text" not in key.type and key.type != "any value" and "|" not in key.type:
            assert len(lines(name, "words")) == 1, name


@given(st.sampled_from(SECTIONS), st.text("abcdefghijklmnopqrstuvwxyz_-ABCö0123456789", min_size=1, max_size=20))
@settings(deadline=None)
def test_no_name_breaks_the_answer(section: str, name: str) -> None:
    if name not in fields(section):
        assert answer(section, name)


@pytest.mark.parametrize(
    "wrong",
    [
        "checkpoint.every_steps",
        "checkpoint.interval",
        "eval.every_n_steps",
        "train.steps",
        "train.gradient_accumulation_steps",
        "train.batch_size",
        "layout.dp",
        "layout.TP",
        "train.num-steps",
        "train.numSteps",
        "optimizer.beta3",
        "data.text",
        "data.to_long",
        "model.num_heads",
        "model.num_hidden_layers",
        "optimizer.name",
        "adapter.layers_pattern",
        "valid.steps",
        "optimiser",
    ],
)
def test_what_is_answered(wrong: str) -> None:
    with refuses(ConfigError, wrong):
        raise ConfigError(unknown_key(wrong))


def offered(name: str) -> set[str]:
    """Returns all that is offered for a name in any section of the first level that does not have it."""
    first = [section for section in SECTIONS if "." not in section and name not in fields(section)]
    return {key for section in first for key in named(section, name)}


def in_its_section(name: str) -> set[str]:
    """Returns the keys that have this name, or this slip, in their own section only, such as checkpoint.every_steps."""
    last = {key: key.rpartition(".")[2] for key in KEYS}
    return {key for key in KEYS if name in SYNONYMS.get(last[key], ()) or name in slips(last[key])}


def same_name(name: str) -> set[str]:
    return {key for key in KEYS if key.rpartition(".")[2] == name}


def test_an_argument_of_megatron_that_has_no_key_offers_none() -> None:
    """But for those that megatron-core's configuration has, too, of which a key of ours decides."""
    for name in (each.replace("-", "_") for each in sorted(REFUSED | WITHOUT_EFFECT)):
        by_knob = {TYPED_KNOBS[name]} if name in TYPED_KNOBS else set()
        assert offered(name) <= by_knob | same_name(name) | REVIEWED.get(name, set()), name


REVIEWED = {
    name: set(keys.split())
    for name, keys in {
        "attention_backend": "model.backend",
        "metric_for_best_model": "valid.metric",
        "use_flash_attn": "model.backend",
        "flash_attention": "model.backend",
        "batch_size": "train.global_batch_size train.micro_batch_size",
        "adam_epsilon": "optimizer.epsilon",
        "output_dir": "run.dir",
        "per_device_train_batch_size": "train.micro_batch_size",
        "num_train_epochs": "train.num_epochs",
        "max_steps": "train.num_steps",
        "learning_rate": "optimizer.lr",
        "lr_scheduler_type": "optimizer.schedule",
        "lr_scheduler": "optimizer.schedule",
        "datasets": "data.train",
        "test_datasets": "data.valid",
        "optim": "optimizer",
        "max_grad_norm": "optimizer.clip_grad",
        "adam_beta1": "optimizer.beta1",
        "adam_beta2": "optimizer.beta2",
        "bf16": "train.precision",
        "fp16": "train.precision",
        "activation_checkpointing": "train.recompute",
        "gradient_checkpointing": "train.recompute",
        "torch_compile": "train.compile",
        "logging_steps": "metrics.console_interval_steps",
        "report_to": "metrics.trackers",
        "run_name": "run.name",
        "eval_steps": "valid.interval_steps",
        "save_steps": "checkpoint.interval_steps",
        "save_total_limit": "checkpoint.keep_last",
        "data_seed": "data.seed",
        "resume_from_checkpoint": "checkpoint.resume",
        "chat_template_path": "data.chat_template",
        "max_length": "data.seq_length",
        "r": "adapter.rank",
        "target_modules": "adapter.targets",
        "lora_alpha": "adapter.alpha",
        "lora_dropout": "adapter.dropout",
        "use_rslora": "adapter.scaling",
        "lr": "optimizer.lr",
        **dict.fromkeys(("deepspeed", "fsdp", "fsdp_config", "fsdp_version", "use_megatron_fsdp"), "layout.shard"),
        **dict.fromkeys(("data_parallel_sharding_strategy", "reshard_after_forward"), "layout.shard"),
    }.items()
}
"""Name in another program -> the only keys that mean it, judged by reading its documentation."""


def arguments_of_trainers() -> list[str]:
    """Lists the fields of the settings of transformers, TRL and PEFT."""
    from peft import LoraConfig
    from transformers import TrainingArguments
    from trl import DPOConfig, SFTConfig

    settings_of: tuple[Any, ...] = (TrainingArguments, SFTConfig, DPOConfig, LoraConfig)
    return sorted({field.name for each in settings_of for field in dataclasses.fields(each)})


def test_settings_of_transformers_trl_and_peft_offer_what_they_mean_or_nothing() -> None:
    names = arguments_of_trainers()
    assert len(names) > 150
    meant = {name: same_name(name) | in_its_section(name) | REVIEWED.get(name, set()) for name in names}
    wrong = {name: offered(name) for name in names if not offered(name) <= meant[name]}
    assert wrong == {}
    assert {name for name in names if name in REVIEWED and not offered(name)} == set()


def put_by(table: Mapping[str, Row], name: str) -> set[str]:
    """Returns the keys under which the translator of a program puts what has this name there."""
    found: set[str] = set()
    for value in (
        2,
        0.5,
        "x",
        True,
        ["x"],
        "lm_head",
        "wandb",
        "lora",
        "cosine",
        "drop",
        "delete",
        "error",
        "bfloat16",
    ):
        before = Translation("another program")
        before.content = {"optimizer": {"lr": 1.0}, "adapter": {"kind": "lora"}}
        try_put(before, table[name].put, value, name)
        found |= {f"{section}.{key}" for section, keys in before.content.items() for key in keys}
        found |= set(before.content)
    return found


@pytest.mark.parametrize("table", [AXOLOTL, MEGATRON, MS_SWIFT, VERL], ids=["axolotl", "megatron", "ms-swift", "verl"])
def test_an_answer_agrees_with_the_translator(table: Mapping[str, Row]) -> None:
    """The translators were written from the sources of the programs, key by key."""
    wrong = {}
    for full in table:
        name = full.rpartition(".")[2]
        agreed = put_by(table, full) | same_name(name) | REVIEWED.get(name, set()) | in_its_section(name)
        agreed |= ALSO.get(name, set()) | {TYPED_KNOBS.get(name, "")}
        if not offered(name) <= agreed:
            wrong[full] = offered(name) - agreed
    assert wrong == {}


ALSO = {
    "train_batch_size": {"train.micro_batch_size"},
    "dtype": {"adapter.base_dtype"},
    "resume_mode": {"checkpoint.resume"},
    "torch_dtype": {"train.precision"},
    "optimizer_cpu_offload": {"train.offload_optimizer"},
    "moe_aux_loss_coeff": {"loss.router.sequence_balance_coefficient"},
    **{
        name: {key}
        for key, names in {
            "train.num_steps": "train_iters total_training_steps",
            "train.num_epochs": "max_epochs total_epochs num_train_epochs num_epochs",
            "train.tokens_per_micro_batch": "ppo_max_token_len_per_gpu max_token_len_per_gpu",
            "data.packing": "use_dynamic_bsz",
            "optimizer.warmup_steps": "lr_warmup_iters lr_warmup_steps",
            "optimizer.warmup_ratio": "lr_warmup_fraction lr_warmup_steps_ratio warmup_steps_ratio",
            "model.backend": "attn_implementation",
            "checkpoint.interval_steps": "save_interval",
            "valid.interval_steps": "eval_interval",
            "valid.patience": "early_stopping_patience",
            "model.vision.freeze_tower": "freeze_vit freeze_vision_tower",
            "model.vision.freeze_projector": "freeze_aligner",
            "model.vision.freeze_language_model": "freeze_llm",
            "optimizer.tower_lr": "vit_lr",
            "optimizer.projector_lr": "aligner_lr",
        }.items()
        for name in names.split()
    },
}
"""Names with one meaning in a program whose translator knows it, and with another one in others; and names that it
reads together with others."""


def test_an_answer_agrees_with_the_translator_of_megatron_lm() -> None:
    found = from_megatron_lm(MEGATRON_LM.split()).content
    given = {name.removeprefix("--").replace("-", "_") for name in MEGATRON_LM.split() if name.startswith("--")}
    put = {f"{section}.{key}" for section, keys in found.items() for key in keys}
    wrong = {name: offered(name) - put - same_name(name) for name in given}
    assert {name: keys for name, keys in wrong.items() if keys} == {}
    assert {name for name in given if not offered(name)} == set()


MEGATRON_LM = (
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --context-parallel-size 2 --sequence-parallel "
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --kv-channels 16 --seq-length 64 --micro-batch-size 1 "
    "--global-batch-size 8 --vocab-size 100 --train-iters 20 --lr 1e-3 --lr-warmup-iters 2 --lr-decay-iters 20 "
    "--min-lr 1e-5 --weight-decay 0.1 --clip-grad 1.0 --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --bf16 "
    "--save-interval 5 --eval-interval 5 --log-interval 1 --data-path x --split 98,1,1 --wandb-project p "
    "--wandb-exp-name n --save runs/x --normalization RMSNorm --init-method-std 0.01 --save-retain-interval 10 "
    "--recompute-granularity selective --lr-decay-style cosine"
)
