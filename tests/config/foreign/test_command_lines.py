"""Ways to write a command line or a file of another program that mean the same are read as the same."""

import itertools
import subprocess
from pathlib import Path
from typing import Any

import pytest

from mtrain.base.errors import ConfigError
from mtrain.config.foreign.axolotl import from_axolotl
from mtrain.config.foreign.megatron_lm import from_megatron_lm
from mtrain.config.foreign.ms_swift import from_ms_swift
from mtrain.config.foreign.reading import after_launcher
from mtrain.config.foreign.translation import Translation
from mtrain.config.foreign.verl import from_verl
from tests.cli.command_line import call
from tests.config.yaml_files import write
from tests.messages import refuses


def said(found: Translation) -> tuple[Any, ...]:
    return found.content, [line.lower() for line in found.lost], found.notes, sorted(found.without_effect), found.wrong


SWIFT = "--model M --dataset a.jsonl --max_length 64 --train_iters 100 --lr 1e-5"
STARTS = [
    "megatron sft",
    "NPROC_PER_NODE=8 CUDA_VISIBLE_DEVICES=0,1 megatron sft \\",
    "srun --ntasks=8 megatron sft",
    "torchrun --nproc_per_node 8 /opt/ms-swift/swift/cli/_megatron/sft.py",
    "python -m torch.distributed.run --nproc_per_node 8 -m swift.cli._megatron.sft",
]


@pytest.mark.parametrize("start", STARTS)
def test_what_starts_a_program_is_left_out(start: str) -> None:
    assert said(from_ms_swift(f"{start} {SWIFT}".split())) == said(from_ms_swift(f"megatron sft {SWIFT}".split()))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("--weight-decay 0.5", "--weight_decay 0.5"),
        ("--weight_decay=0.5", "--weight_decay 0.5"),
        ("--weight_decay 3 --weight-decay 0.5", "--weight_decay 0.5"),
        ("--packing", "--packing true"),
        ("--packing yes", "--packing True"),
        ("--packing false", "--packing 0"),
        ("--no_dataset_shuffle", "--dataset_shuffle false"),
        ("--dataset a.jsonl b.jsonl", "--dataset c.jsonl --dataset a.jsonl b.jsonl"),
        ("--recompute-granularity full \\", "--recompute_granularity full"),
    ],
)
def test_ways_to_write_an_argument_of_ms_swift(one: str, other: str) -> None:
    assert said(from_ms_swift(f"{SWIFT} {one}".split())) == said(from_ms_swift(f"{SWIFT} {other}".split()))


def test_arguments_of_ms_swift_in_a_file(tmp_path: Path) -> None:
    """Arguments after the file take precedence, as in `swift sft FILE ...`."""
    given = {"model": "M", "dataset": ["a.jsonl"], "max_length": 32, "train_iters": 100, "lr": 1e-5}
    file = str(write(tmp_path / "swift.yaml", given))
    found = from_ms_swift(["megatron", "sft", file, "--max_length", "64"])
    assert said(found) == said(from_ms_swift(f"megatron sft {SWIFT}".split()))


VERL = "data.train_files=a.parquet model.path=M optim.lr=1e-5"


@pytest.mark.parametrize(
    "start",
    [
        "torchrun --standalone --nproc_per_node=8 -m verl.trainer.sft_trainer",
        "HYDRA_FULL_ERROR=1 python3 -m verl.trainer.sft_trainer \\",
        "python3 verl/trainer/sft_trainer.py --config-path=config --config-name sft_trainer_engine",
    ],
)
def test_what_starts_verl_is_left_out(start: str) -> None:
    assert said(from_verl(f"{start} {VERL}".split())) == said(from_verl(VERL.split()))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("model.lora_rank=4 ~model.lora_rank", ""),
        ("+optim.weight_decay=0.5", "optim.weight_decay=0.5"),
        ("optim.weight_decay=3 ++optim.weight_decay=5e-1", "optim.weight_decay=0.5"),
        ("data.use_dynamic_bsz=false", "data.use_dynamic_bsz=False"),
        ("hydra.run.dir=x", ""),
        ("trainer.seed=7 data.max_length=${trainer.seed}", "trainer.seed=7 data.max_length=7"),
    ],
)
def test_ways_to_write_an_argument_of_verl(one: str, other: str) -> None:
    assert said(from_verl(f"{VERL} {one}".split())) == said(from_verl(f"{VERL} {other}".split()))


MEGATRON = "--num-layers 8 --hidden-size 64 --lr 1e-3 --data-path c4 --save runs/x"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("--weight-decay=0.5", "--weight-decay 0.5"),
        ("--weight-decay 3 --weight-decay 0.5", "--weight-decay 0.5"),
        ("--swiglu \\ --bf16", "--swiglu --bf16"),
    ],
)
def test_ways_to_write_an_argument_of_megatron_lm(one: str, other: str) -> None:
    start = "torchrun --nproc_per_node 8 -m torch.distributed.run pretrain_gpt.py"
    assert said(from_megatron_lm(f"{start} {MEGATRON} {one}".split())) == said(
        from_megatron_lm(f"{MEGATRON} {other}".split())
    )


FALSE = ("false", "False", "no", "off", '"false"', "n")
TRUE = ("true", "True", "yes", "on", '"true"', "y")


@pytest.mark.parametrize(("words", "chosen"), [(FALSE, "fp32"), (TRUE, "bf16")])
@pytest.mark.parametrize("rest", ["", "learning_rate: 1.0e-4", "learning_rate: '1e-4'", "val_set_size: null"])
def test_ways_of_yaml_to_say_false(words: tuple[str, ...], chosen: str, rest: str, tmp_path: Path) -> None:
    file = tmp_path / "a.yml"
    for word, flag in itertools.product(words, ("sample_packing", "gradient_checkpointing")):
        file.write_text(f"base_model: M\ndatasets: a.jsonl\nbf16: {word}\n{flag}: {word}\n{rest}\n")
        found = from_axolotl([str(file)])
        assert found.wrong == []
        assert found.get("train.precision") == chosen
        assert bool(found.get("data.packing")) == (flag == "sample_packing" and words == TRUE)
        assert found.get("train.recompute") == ("full" if flag != "sample_packing" and words == TRUE else "none")


def test_what_stands_for_nothing(tmp_path: Path) -> None:
    file = tmp_path / "a.yml"
    file.write_text("base_model: M\ndatasets: a.jsonl\nadapter: \nlora_r: ~\nwandb_project: ''\nspecial_tokens: {}\n")
    found = from_axolotl([str(file)])
    assert found.content.keys() & {"adapter", "metrics"} == set()
    assert found.without_effect == ["adapter", "lora_r", "wandb_project", "special_tokens"]
    null = from_verl(f"{VERL} trainer.total_training_steps=null".split())
    assert (null.content, null.without_effect) == (from_verl(VERL.split()).content, ["trainer.total_training_steps"])


@pytest.mark.parametrize(
    ("program", "words", "fact"),
    [
        ("megatron-lm", f"{MEGATRON} --lr ${{LR}}", "--lr"),
        ("ms-swift", f"{SWIFT} --lr $LR", "--lr"),
        ("verl", f"{VERL} trainer.default_local_dir=$HOME/x", "trainer.default_local_dir"),
        ("verl", f"{VERL} $@", "$@"),
    ],
)
def test_variables_of_a_shell_are_refused(program: str, words: str, fact: str) -> None:
    code, text = call("from", program, *words.split())
    assert code == 2
    assert fact in text
    assert "shell variable" in text


SCRIPT = """#!/bin/bash
#SBATCH --nodes=2
GPUS=8
LAUNCH=(--nproc_per_node $GPUS --nnodes ${SLURM_NNODES:-2})
MODEL_ARGS=(
    --num-layers 8
    --hidden-size 64
)
REST="--lr 1e-3 --data-path c4"
srun torchrun ${LAUNCH[@]} pretrain_gpt.py \\
    ${MODEL_ARGS[@]} \\
    $REST --save runs/x
"""


@pytest.mark.parametrize("line", ["run{}", "bash run{}", "sbatch --nodes=2 run{}", "srun ./run{} a.yaml"])
@pytest.mark.parametrize("ending", [".sh", ".sbatch"])
@pytest.mark.parametrize(
    "program", ["megatron-lm", "ms-swift", "verl", "llamafactory", "trl", "megatron-bridge", "torchtitan"]
)
def test_a_shell_script_is_refused_with_the_way_to_its_arguments(program: str, line: str, ending: str) -> None:
    code, text = call("from", program, *line.format(ending).split())
    assert (code, f"run{ending}: this is a shell script" in text, "`echo`" in text) == (2, True, True), text
    assert text.count("\n") == 1


def test_what_a_script_prints_is_translated(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(SCRIPT.replace("srun torchrun", "echo srun torchrun"))
    printed = subprocess.run(["bash", str(script)], capture_output=True, text=True, check=True).stdout
    assert said(from_megatron_lm(printed.split())) == said(from_megatron_lm(MEGATRON.split()))


def test_a_refused_translation_writes_nothing(tmp_path: Path) -> None:
    code, text = call(
        "from", "ms-swift", "--output", tmp_path / "o.yaml", *SWIFT.split(), "--min_lr", "-1", "--seed", "x"
    )
    assert code == 2
    assert "seed='x'" in text
    assert "(from min_lr)" in text
    assert not (tmp_path / "o.yaml").exists()


def test_a_word_of_no_program_is_no_file() -> None:
    with refuses(ConfigError, "nowhere.yaml"):
        from_verl(["nowhere.yaml"])


@pytest.mark.parametrize(
    ("words", "rest"),
    [
        ("python -m verl.trainer.main_ppo a.b=c.py", "a.b=c.py"),
        ("a.b=c.py d=e", "a.b=c.py d=e"),
        ("--external_plugins plugin.py --lr 1", "--external_plugins plugin.py --lr 1"),
        ("sft --external_plugins plugin.py", "--external_plugins plugin.py"),
        ("sft --lr 1 2>&1 | tee log", "--lr 1"),
        ("--lr 1 > log", "--lr 1"),
        ("", ""),
    ],
)
def test_where_arguments_begin(words: str, rest: str) -> None:
    assert after_launcher(words.split(), ("sft",))[1] == rest.split()
