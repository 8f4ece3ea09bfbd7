"""Ways to give settings to `mtrain from`, and the fields of the programs' own argument classes."""

import dataclasses
import importlib
import json
import os
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from mtrain.config.foreign.llamafactory import LLAMAFACTORY, from_llamafactory
from mtrain.config.foreign.megatron_bridge import MEGATRON_BRIDGE, from_megatron_bridge
from mtrain.config.foreign.torchtitan import TORCHTITAN, from_torchtitan
from mtrain.config.foreign.translation import Row, Translation
from mtrain.config.foreign.trl import from_trl, rows_of_kind
from tests.config.yaml_files import write

FACTS: dict[str, dict[str, Any]] = {
    program: {name: json.loads(value) for value, names in facts["by_default"].items() for name in names.split()}
    for program, facts in yaml.safe_load((Path(__file__).parent / "fields.yaml").read_text()).items()
}
TRAINERS = {"sft": "SFTConfig", "dpo": "DPOConfig", "kto": "KTOConfig", "reward": "RewardConfig", "grpo": "GRPOConfig"}
EXPERIMENTAL = {"orpo": "ORPOConfig", "cpo": "CPOConfig"}


class Program(NamedTuple):
    """A program, or one of its trainers."""

    translate: Callable[[Mapping[str, Any], Path], Translation]
    base: Mapping[str, Any]
    """Arguments of every call."""
    rows: Mapping[str, Row]
    fields: Callable[[], dict[str, Any]]
    """Names and defaults of the fields of its argument classes."""


def _of_llamafactory(given: Mapping[str, Any], folder: Path) -> Translation:
    return from_llamafactory([str(write(folder / "lf.yaml", dict(given)))])


def _of_trl(kind: str) -> Callable[[Mapping[str, Any], Path], Translation]:
    return lambda given, folder: from_trl([kind, str(write(folder / "trl.yaml", dict(given)))])


def _of_torchtitan(given: Mapping[str, Any], folder: Path) -> Translation:
    lines = [f"{name} = {json.dumps(value)}" for name, value in given.items()]
    (folder / "titan.toml").write_text("\n".join(lines))
    return from_torchtitan([str(folder / "titan.toml")])


def nested(given: Mapping[str, Any]) -> dict[str, Any]:
    """Turns dotted names into sections."""
    content: dict[str, Any] = {}
    for name, value in given.items():
        *parents, last = name.split(".")
        section = content
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    return content


def _of_bridge(*words: str) -> Callable[[Mapping[str, Any], Path], Translation]:
    return lambda given, folder: from_megatron_bridge([*words, str(write(folder / "mb.yaml", nested(given)))])


def of_class(kind: type[Any], prefix: str = "") -> dict[str, Any]:
    """Returns names and defaults of a data class's fields; no default is None."""
    found = {}
    for field in dataclasses.fields(kind):
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        found[f"{prefix}{field.name}"] = None if default is dataclasses.MISSING else default
    return found


@cache
def _of_transformers() -> dict[str, Any]:
    from transformers import Seq2SeqTrainingArguments

    return of_class(Seq2SeqTrainingArguments)


def _fields_of_llamafactory() -> dict[str, Any]:
    return {**_of_transformers(), **FACTS["llamafactory"]}


def _fields_of_trl(kind: str) -> Callable[[], dict[str, Any]]:
    def fields() -> dict[str, Any]:
        os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
        import trl

        module = trl if kind in TRAINERS else importlib.import_module(f"trl.experimental.{kind}")
        config = getattr(module, {**TRAINERS, **EXPERIMENTAL}[kind])
        return {**of_class(config), **of_class(trl.ModelConfig), **of_class(trl.ScriptArguments)}

    return fields


def _fields_of_bridge() -> dict[str, Any]:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    return {
        **of_class(DistributedDataParallelConfig, "ddp."),
        **of_class(OptimizerConfig, "optimizer."),
        **of_class(TransformerConfig, "model."),
        **FACTS["megatron-bridge"],
    }


_RECORDS = {"model_name_or_path": "M", "dataset_name": "a.jsonl"}
PROGRAMS = {
    "LLaMA-Factory": Program(
        _of_llamafactory,
        {"model_name_or_path": "M", "dataset": "a", "output_dir": "runs/x", "template": "qwen"},
        LLAMAFACTORY,
        _fields_of_llamafactory,
    ),
    "torchtitan": Program(
        _of_torchtitan,
        {"model.name": "llama3", "model.flavor": "8B", "checkpoint.enable": True},
        TORCHTITAN,
        lambda: FACTS["torchtitan"],
    ),
    "Megatron-Bridge": Program(
        _of_bridge(),
        {"train.train_iters": 100, "train.global_batch_size": 8, "optimizer.lr": 1e-4, "checkpoint.save": "runs/x"}
        | {"model.seq_length": 64, "dataset.blend": ["c4"]},
        MEGATRON_BRIDGE,
        _fields_of_bridge,
    ),
    "Megatron-Bridge with an adapter": Program(
        _of_bridge("qwen3_8b_peft_config"),
        {"peft._target_": "megatron.bridge.peft.lora.LoRA", "dataset.dataset_root": "data"},
        MEGATRON_BRIDGE,
        lambda: {name: value for name, value in FACTS["megatron-bridge"].items() if name.startswith("peft.")},
    ),
    "transformers": Program(_of_trl("trainer"), {"output_dir": "runs/x"}, rows_of_kind("trainer"), _of_transformers),
    **{
        f"trl {kind}": Program(_of_trl(kind), _RECORDS, rows_of_kind(kind), _fields_of_trl(kind))
        for kind in (*TRAINERS, *EXPERIMENTAL)
    },
}
PROGRAMS["trl cpo"] = PROGRAMS["trl cpo"]._replace(base={**_RECORDS, "loss_type": "simpo"})


def head(found: Translation) -> str:
    """Returns all lines on settings, and the origins of keys."""
    return "\n".join([*found.origins.values(), *found.lost, *found.notes, *found.wrong, *found.without_effect])
