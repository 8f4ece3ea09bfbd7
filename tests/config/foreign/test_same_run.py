"""A translated file trains what the original trains, or its head says what differs.

`defaults.yaml` has the defaults of the programs' own argument classes and files, of the versions that it names.
"""

import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from mtrain.base.errors import ConfigError
from mtrain.config import Config
from mtrain.config.foreign.axolotl import from_axolotl
from mtrain.config.foreign.megatron_lm import from_megatron_lm
from mtrain.config.foreign.ms_swift import from_ms_swift
from mtrain.config.foreign.translation import Translation
from mtrain.config.foreign.verl import from_verl
from mtrain.hf.configuration import resolved
from tests.config.samples import content
from tests.config.yaml_files import write

DEFAULTS: dict[str, dict[str, Any]] = {
    name: each["defaults"]
    for name, each in yaml.safe_load((Path(__file__).parent / "defaults.yaml").read_text()).items()
}
ABSENT = object()


def as_option(name: str, value: Any) -> list[str]:
    """Writes an argument as ms-swift and Megatron-LM take it."""
    values = value if isinstance(value, list) else [value]
    return [f"--{name}", *map(str, values)]


@dataclass(frozen=True)
class Program:
    """One way in, and what it always gets."""

    translate: Callable[[Mapping[str, Any], Path], Translation]
    base: Mapping[str, Any]


def of_axolotl(given: Mapping[str, Any], folder: Path) -> Translation:
    return from_axolotl([str(write(folder / "a.yml", dict(given)))])


def of_command(*command: str) -> Callable[[Mapping[str, Any], Path], Translation]:
    return lambda given, _: from_ms_swift(
        [*command, *(word for name, value in given.items() for word in as_option(name, value))]
    )


def of_verl(module: str) -> Callable[[Mapping[str, Any], Path], Translation]:
    return lambda given, _: from_verl(
        ["python3", "-m", module, *(f"{name}={yaml_word(value)}" for name, value in given.items())]
    )


def yaml_word(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("\n...\n").strip()


def of_megatron_lm(given: Mapping[str, Any], _: Path) -> Translation:
    return from_megatron_lm(
        [word for name, value in given.items() for word in ([f"--{name}"] if value is None else as_option(name, value))]
    )


_ACTOR = "actor_rollout_ref.actor."
PROGRAMS = {
    "axolotl": Program(
        of_axolotl,
        {"base_model": "M", "datasets": [{"path": "a.jsonl", "type": "chat_template"}], "learning_rate": 1e-4},
    ),
    "axolotl with an adapter": Program(
        of_axolotl,
        {
            "base_model": "M",
            "datasets": "a.jsonl",
            "learning_rate": "1e-4",
            "adapter": "lora",
            "lora_r": 8,
            "lora_alpha": 8,
        }
        | {"max_steps": 200},
    ),
    "megatron sft": Program(
        of_command("megatron", "sft"), {"model": "M", "dataset": "a.jsonl", "max_length": 64, "train_iters": 300}
    ),
    "megatron sft with an adapter": Program(
        of_command("megatron", "sft"),
        {"model": "M", "dataset": "a.jsonl", "max_length": 64, "num_train_epochs": 2, "tuner_type": "lora"}
        | {"val_dataset": "b.jsonl"},
    ),
    "swift sft": Program(of_command("swift", "sft"), {"model": "M", "dataset": "a.jsonl", "max_length": 64}),
    "verl sft_trainer": Program(
        of_verl("verl.trainer.sft_trainer"), {"data.train_files": "a.parquet", "model.path": "M"}
    ),
    "verl fsdp_sft_trainer": Program(
        of_verl("verl.trainer.fsdp_sft_trainer"), {"data.train_files": "a.parquet", "model.partial_pretrain": "M"}
    ),
    "verl main_ppo": Program(
        of_verl("verl.trainer.main_ppo"),
        {"actor_rollout_ref.model.path": "M", f"{_ACTOR}ppo_micro_batch_size_per_gpu": 1},
    ),
}
_MEGATRON: dict[str, Any] = {"num-layers": 8, "hidden-size": 64, "num-attention-heads": 8, "seq-length": 64}
_MEGATRON |= {"position-embedding-type": "rope", "vocab-size": 1000, "micro-batch-size": 1, "global-batch-size": 8}
_MEGATRON |= {"train-iters": 1000, "lr": 1e-3, "data-path": "c4", "save": "runs/x"}
_EXPERTS = {"num-experts": 8, "disable-bias-linear": None, "swiglu": None}
PROGRAMS |= {
    "Megatron-LM": Program(of_megatron_lm, _MEGATRON),
    "Megatron-LM with experts": Program(of_megatron_lm, _MEGATRON | _EXPERTS),
    "Megatron-LM with latent attention": Program(
        of_megatron_lm, {**_MEGATRON, **_EXPERTS, "multi-latent-attention": None, "qk-layernorm": None}
    ),
    "Megatron-LM with YaRN": Program(
        of_megatron_lm, {**_MEGATRON, "position-embedding-type": "yarn", "rotary-scaling-factor": 4}
    ),
    "Megatron-LM in fp8 and WSD": Program(
        of_megatron_lm, {**_MEGATRON, "bf16": None, "fp8-format": "hybrid", "lr-decay-style": "WSD", "profile": None}
    ),
}


def defaults_of(program: str) -> dict[str, Any]:
    return DEFAULTS[program.partition(" with")[0].partition(" in ")[0]]


def configuration(found: Translation) -> Config:
    """Returns the configuration that the written file is, with a small model in place of the one that it names."""
    read = yaml.safe_load("\n".join(found.checked(resolved).lines()))
    assert set(found.missing) <= {
        "model.hf=M has no config.json; name a Hugging Face folder with config.json and *.safetensors",
        "train.num_steps: no value is given; set it, or num_epochs",
    }
    if read["model"].pop("hf", None):
        read["model"] = content()["model"] | read["model"]
    if "num_epochs" not in read["train"]:
        read["train"].setdefault("num_steps", 1000)
    return Config.model_validate(read)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_default_that_is_given_changes_nothing(program: str, tmp_path: Path) -> None:
    """Every default that differs from ours is written where the key is absent, as where it is given."""
    way = PROGRAMS[program]
    absent = way.translate(way.base, tmp_path).checked(resolved)
    wrong = {}
    for name, value in defaults_of(program).items():
        if name not in way.base:
            given = way.translate({**way.base, name: value}, tmp_path)
            given.drop_same_defaults()
            mine = given.content | {"metrics": {}, "run": {}}
            theirs = absent.content | {"metrics": {}, "run": {}}
            says_more = len(read_by_none(given)) > len(read_by_none(absent)) and program != "verl main_ppo"
            if without_ours(mine) != without_ours(theirs) or says_more:
                wrong[name] = (value, given.lost)
    assert wrong == {}


def read_by_none(found: Translation) -> list[str]:
    """Returns the lines on what is not carried over, but for arguments that Megatron-LM itself would not read."""
    return [line for line in found.lost if "no other argument uses it" not in line]


def without_ours(sections: Mapping[str, Any]) -> dict[str, Any]:
    """Returns all keys of sections that have another value than the default."""
    found = Translation("another program", content={})
    for key, value in leaves(sections):
        found.put(key, value, "another program's default")
    found.drop_same_defaults()
    return {section: keys for section, keys in found.content.items() if keys}


def leaves(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        if isinstance(value, dict) and name != "packing":
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def number(value: Any) -> float:
    return float(value)


def truth(value: Any) -> bool:
    return value if isinstance(value, bool) else {"true": True, "false": False, "none": False}[str(value).lower()]


@dataclass(frozen=True)
class Carried:
    """One key of a program, and what it means."""

    names: str
    """Name of the key in each program that has it, with spaces between them."""
    ours: str
    """Key of ours, or an expression of it."""
    meaning: Callable[[Any], Any]
    """Function from the program's value to that of our key."""
    values: tuple[Any, ...]
    """Values to draw from, apart from the default and none."""


_SWITCH = (False, True)
CARRIED = (
    Carried("weight_decay optim.weight_decay weight-decay", "optimizer.weight_decay", number, (0, 0.0, 0.3, "1e-3")),
    Carried("adam_beta1 adam-beta1", "optimizer.beta1", number, (0, 0.8)),
    Carried("adam_beta2 adam-beta2", "optimizer.beta2", number, (0, 0.8)),
    Carried("adam_epsilon adam_eps adam-eps", "optimizer.epsilon", number, (1e-5, "1e-6")),
    Carried("max_grad_norm clip_grad optim.clip_grad clip-grad", "optimizer.clip_grad", number, (0, 0.5)),
    Carried(
        "optim.betas",
        "optimizer.beta1, optimizer.beta2",
        lambda value: tuple(map(float, value)),
        ([0.9, 0.95], [0, 0.5]),
    ),
    Carried("seed trainer.seed", "train.seed", int, (0, 7)),
    Carried("sequence_len max_length data.max_length seq-length", "data.seq_length", int, (32, "128")),
    Carried("sample_packing packing", "data.packing", truth, _SWITCH),
    Carried("data.use_dynamic_bsz", "data.packing", truth, _SWITCH),
    Carried(
        "gradient_checkpointing model.enable_gradient_checkpointing",
        "train.recompute",
        lambda value: "full" if truth(value) else "none",
        _SWITCH,
    ),
    Carried("recompute_granularity", "train.recompute", str, ("none", "selective", "full")),
    Carried(
        "excess_length_strategy",
        "data.too_long",
        lambda value: {None: "drop", "drop": "drop", "truncate": "end", "raise": "refuse"}[value],
        ("drop", "truncate", "raise"),
    ),
    Carried(
        "truncation_strategy",
        "data.too_long",
        lambda value: {None: "drop", "delete": "drop", "left": "start", "right": "end", "split": "split"}[value],
        ("delete", "left", "right", "split"),
    ),
    Carried(
        "data.truncation",
        "data.too_long",
        lambda value: {"error": "refuse", "left": "start", "right": "end"}[value],
        ("error", "left", "right"),
    ),
    Carried(
        "lr_scheduler lr_scheduler_type lr_decay_style optim.lr_scheduler_type lr-decay-style",
        "optimizer.schedule",
        str,
        ("constant", "linear", "cosine"),
    ),
    Carried(
        "bf16", "train.precision", lambda value: "bf16" if value in (None, "auto") or truth(value) else "fp32", _SWITCH
    ),
    Carried("micro_batch_size per_device_train_batch_size micro-batch-size", "train.micro_batch_size", int, (2, 4)),
    Carried("global_batch_size data.train_batch_size global-batch-size", "train.global_batch_size", int, (4, 32)),
    Carried("lora_dropout", "adapter.dropout", number, (0, 0.25)),
    Carried("lora_alpha", "adapter.alpha", number, (4, "64")),
    Carried("save_total_limit", "checkpoint.keep_last", lambda value: value, (3, 5)),
    Carried("min_lr min-lr", "optimizer.min_lr", number, (0, "1e-6")),
    Carried("use_distributed_optimizer", "train.distributed_optimizer", truth, _SWITCH),
    Carried("split_dataset_ratio val_set_size", "data.split", lambda value: number(value) > 0, (0, 0.0, 0.25)),
    Carried("attention-dropout", "model.attention_dropout", number, (0, 0.2)),
    Carried("hidden-dropout", "model.hidden_dropout", number, (0, 0.2)),
    Carried("norm-epsilon", "model.norm_epsilon", number, (1e-6, 1e-3)),
    Carried("init-method-std", "model.init_std", number, (0.01,)),
    Carried(f"{_ACTOR}optim.lr", "optimizer.lr", number, (1e-3, "3e-7")),
    Carried(f"{_ACTOR}optim.weight_decay", "optimizer.weight_decay", number, (0, 0.2)),
    Carried(f"{_ACTOR}clip_ratio_c", "loss.options.dual_clip", number, (2, 4.5)),
    Carried(f"{_ACTOR}clip_ratio_high", "loss.options.clip_high", number, (0, 0.28)),
    Carried(f"{_ACTOR}use_kl_loss", "loss.side_terms.kl", truth, _SWITCH),
    Carried(f"{_ACTOR}entropy_coeff", "loss.side_terms.entropy", lambda value: number(value) != 0, (0, 0.01)),
    Carried(f"{_ACTOR}loss_agg_mode", "loss.aggregation", str, ("token-mean", "seq-mean-token-sum-norm")),
    Carried(f"{_ACTOR}optim.lr_scheduler_type", "optimizer.schedule", str, ("constant", "cosine")),
    Carried("data.max_response_length", "data.seq_length", lambda value: int(value) + 512, (64, 1024)),
)
SWITCHED_OFF = {
    "dataset_shuffle train_dataloader_shuffle shuffle_merged_datasets": False,
    "calculate_per_token_loss": False,
    "use_chat_template": False,
    "train_on_inputs": True,
    "load_in_8bit": True,
    "group_by_length": True,
    "sample_packing_sequentially": True,
    "lora_bias": "all",
    "roles_to_train": ["user", "assistant"],
    "neftune_noise_alpha": 5,
    "unheard_of": False,
    "lr_warmup_init": 1e-6,
    "optim.num_cycles": 2,
    "engine.model_dtype": "bf16",
}
"""Keys without a counterpart -> a value that changes what is trained: the head has to name it."""


def value_of(config: Config, expression: str) -> Any:
    """Returns the value of a dotted key, or of several with commas between them."""
    found = []
    for key in expression.split(", "):
        place: Any = config
        for part in key.split("."):
            place = place.get(part) if isinstance(place, dict) else getattr(place, part)
        found.append(place)
    return found[0] if len(found) == 1 else tuple(found)


def means(config: Config, row: Carried, value: Any) -> bool:
    """Says whether a configuration has what a value of a program means; a switch stands for a section that is there."""
    expected, actual = row.meaning(value), value_of(config, row.ours)
    if isinstance(expected, bool) and not isinstance(actual, bool):
        return expected == bool(actual)
    return bool(actual == expected) or (expected is None and actual is not None)


def drawn(program: str, seed: int) -> dict[str, Any]:
    """Draws values of the keys that a program has: false, 0, an empty text, its default, none, and others."""
    source = random.Random(f"{program}{seed}")
    known = {**defaults_of(program), **dict.fromkeys(NULLS)}
    given: dict[str, Any] = dict(PROGRAMS[program].base)
    for row in CARRIED:
        for name in row.names.split():
            if name in known and name not in given and source.random() < 0.5:
                default = known[name]
                value = source.choice([*row.values, ABSENT, "" if program.startswith("axolotl") else ABSENT, default])
                if value is not ABSENT and value is not None:
                    given[name] = value
    for names, value in SWITCHED_OFF.items():
        for name in names.split():
            is_there = name in known or (name == "unheard_of" and not program.startswith("Megatron"))
            if is_there and source.random() < 0.3:
                given[name] = value
    return given


NULLS = ("excess_length_strategy", "sample_packing", "save_total_limit", "truncation_strategy", "bf16")
"""Keys whose default is null, which the file of defaults leaves out, in all programs that have them."""


@pytest.mark.parametrize("seeds", [range(8), pytest.param(range(8, 25), marks=pytest.mark.nightly)], ids=str)
@pytest.mark.parametrize("program", [name for name in PROGRAMS if " in " not in name])
def test_a_drawn_file_trains_the_same(program: str, seeds: range, tmp_path: Path) -> None:
    for seed in seeds:
        given = {name: value for name, value in drawn(program, seed).items() if has(program, name)}
        found = PROGRAMS[program].translate(given, tmp_path)
        assert differing(program, given, found) == {}, seed


def differing(program: str, given: Mapping[str, Any], found: Translation) -> dict[str, Any]:
    """Returns what a translation neither carries over nor names in the head of the file, with the value in its
    place."""
    config = configuration(found)
    head = "\n".join(found.lost + found.notes)
    wrong: dict[str, Any] = {}
    for row in CARRIED:
        for name in (each for each in row.names.split() if has(program, each)):
            value = given.get(name) if given.get(name) not in (None, "") else defaults_of(program).get(name)
            is_adapted = not row.ours.startswith("adapter.") or config.adapter is not None
            is_one_of_two = row.ours == "train.micro_batch_size" and config.train.tokens_per_micro_batch
            if is_adapted and not is_one_of_two and not means(config, row, value) and name not in head:
                wrong[name] = (value, value_of(config, row.ours))
    for names, value in SWITCHED_OFF.items():
        wrong |= {name: value for name in names.split() if name in given and name not in head}
    return wrong


def has(program: str, name: str) -> bool:
    """Says whether a program has a key of the tables above."""
    if name in PROGRAMS[program].base:
        return True
    if name == "split_dataset_ratio" and "val_dataset" in PROGRAMS[program].base:
        return False
    of_adapters = ("lora_dropout", "lora_alpha", "lora_bias")
    if name in of_adapters and "adapter" not in program and program != "swift sft":
        return False
    if program == "verl main_ppo" and name.startswith("data.") and name != "data.max_response_length":
        return False  # a loop reads prompts
    if name == "bf16":
        return not program.startswith(("verl", "Megatron"))
    if name in NULLS:
        return name in {
            "axolotl": ("excess_length_strategy", "sample_packing"),
            "megatron sft": ("truncation_strategy", "save_total_limit"),
            "swift sft": ("truncation_strategy", "save_total_limit"),
        }.get(program.partition(" with")[0], ())
    extra = {"axolotl": ("neftune_noise_alpha", "roles_to_train"), "megatron sft": ("calculate_per_token_loss",)}
    names = (*extra.get(program.partition(" with")[0], ()), *([] if program.startswith("Megatron") else ["unheard_of"]))
    return name in (*defaults_of(program), *PROGRAMS[program].base, *names)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_comment_agrees_with_its_value(program: str, tmp_path: Path) -> None:
    """A comment names what was given where anything was, with its own value; else a default of what was not."""
    for seed in range(10):
        given = {name: value for name, value in drawn(program, seed).items() if has(program, name)}
        found = PROGRAMS[program].translate(given, tmp_path).checked(resolved)
        for origin in found.origins.values():
            for name in given:
                if re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w.-])", origin) and given[name] != "":
                    assert "default" not in origin or "folder of" in origin or " x " in origin, origin
            for name, said in re.findall(r"([\w.-]+)=([^,;]+)", origin):
                assert str(given[name]) == said, origin


FAULTS = {
    "axolotl": {"learning_rate": "fast", "adam_beta1": 2, "num_epochs": -1, "micro_batch_size": "x", "lora_r": -3}
    | {"tensor_parallel_size": -2, "sequence_len": 1, "adapter": "full", "bf16": "maybe", "weight_decay": [1]},
    "megatron sft": {"lr": "fast", "adam_beta1": 2, "micro_batch_size": "x", "tensor_model_parallel_size": 0}
    | {"max_length": 1, "packing": "maybe", "weight_decay": "${WD}", "moe_aux_loss_coeff": "x", "min_lr": -1},
    "verl sft_trainer": {"optim.lr": "fast", "optim.betas": [2], "data.max_length": 1, "trainer.total_epochs": "x"}
    | {"data.use_dynamic_bsz": "maybe", "optim.weight_decay": -1, "data.train_batch_size": 0},
    "Megatron-LM": {"lr": "fast", "adam-beta1": 2, "seq-length": "x", "swiglu": "true", "no-such": 1, "split": "a,b"}
    | {"tensor-model-parallel-size": 3, "weight-decay": "-1", "train-iters": 1.5, "min-lr": "$MIN"},
}


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("program", FAULTS)
def test_all_faults_come_at_once(program: str, seed: int, tmp_path: Path) -> None:
    source = random.Random(f"{program}{seed}")
    chosen = source.sample(sorted(FAULTS[program]), source.randint(2, 5))
    given = {**PROGRAMS[program].base, **{name: FAULTS[program][name] for name in chosen}}
    if "lora_r" in chosen:
        given["adapter"] = "lora"
        chosen = [name for name in chosen if name != "adapter"]
    with pytest.raises(ConfigError) as error:
        PROGRAMS[program].translate(given, tmp_path).checked(resolved)
    named = str(error.value)
    assert [name for name in chosen if not re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", named)] == []
