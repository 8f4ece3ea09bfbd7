"""Configurations that no person means to write: each is refused by one message, none hangs or takes the memory."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtrain.base.errors import ConfigError
from mtrain.config.schema import bounds
from mtrain.config.schema.data import IndexedSection
from mtrain.hf.configuration import load_config
from mtrain.plan.summary import plan_lines
from tests.config.samples import INDEXED, config, content
from tests.config.yaml_files import write
from tests.fault_table import Notice
from tests.messages import check_message, refuses

DIGITS = "1" * 5000


def fault(what: str, happens: str) -> pytest.MarkDecorator:
    return pytest.mark.fault("input", what, happens=happens, exit_code=2)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write(tmp_path / "base.yaml", content(data=INDEXED))


def refusal(paths: list[Path], overrides: list[str], notice: Notice) -> str:
    """Returns the one line that refuses the input."""
    with notice, pytest.raises(ConfigError) as error:
        load_config(paths, overrides)
    assert error.value.exit_code == notice.exit_code
    (line,) = str(error.value).splitlines()
    assert len(line) < 2000
    return line


def pipe(path: Path) -> Path:
    os.mkfifo(path)  # no program writes: opening it would wait forever
    return path


def sparse(path: Path) -> Path:
    with path.open("wb") as file:
        file.truncate(2**30)
    return path


FILES: dict[str, Callable[[Path], Path]] = {
    "a pipe": pipe,
    "a device": lambda path: Path("/dev/zero"),
    "a folder": lambda path: path.parent,
    "a GiB": sparse,
    "a long name": lambda path: path.with_name("x" * 300),
    "a file in a file": lambda path: path / "x",
    "NUL in the name": lambda path: Path("a\0b"),
    "half a character in the name": lambda path: Path("a\ud800b"),
}


@pytest.mark.parametrize("make", FILES.values(), ids=FILES)
@fault("a pipe, a device, a folder or 1 GiB in the place of a configuration", "refused unread")
def test_what_is_no_configuration_is_not_read(
    make: Callable[[Path], Path], base: Path, tmp_path: Path, notice: Notice
) -> None:
    check_message(refusal([base, make(tmp_path / "odd.yaml")], [], notice))


PROGRAMS = {
    "train.sh": "torchrun pretrain_gpt.py\n",
    "job.sbatch": "#!/bin/bash\n#SBATCH --nodes=2\nmodel: x\n",
    "job": "#!/bin/bash\nARGS=(\n\t--lr 1e-3\n)\n",
    "train.py": "import mtrain\n",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_no_configuration(name: str, base: Path, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(PROGRAMS[name])
    way = f"mtrain launch local -n RANKS {path}" if name.endswith(".py") else f"$(bash {path})"
    with refuses(ConfigError, way):
        load_config([base, path])


def bomb(levels: int) -> str:
    """Returns aliases of which every level repeats the one before nine times."""
    lines = ["a0: &a0 [x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, levels)]
    return "\n".join(lines)


def chain(links: int) -> str:
    """Returns aliases one inside the other: short, and deep when they are followed."""
    return "\n".join(["a0: &a0 [x]", *(f"a{n}: &a{n} [[[[[*a{n - 1}]]]]]" for n in range(1, links))])


TEXTS = {
    "nested lists": "run: " + "[" * 3000,
    "nested mappings": "run: " + "{a: " * 3000,
    "aliases that multiply": bomb(30),
    "aliases in a row": chain(40),
    "an alias of itself": "run: &a [*a]",
    "an alias of nothing": "run: *a",
    "too many values": "run: [" + "1," * 20_000 + "]",
    "digits": f"train: {{num_steps: {DIGITS}}}",
    "tagged digits": f"train: {{num_steps: !!int {DIGITS}}}",
    "quoted tagged digits": f"train: {{num_steps: !!int '{DIGITS}'}}",
    "hexadecimal digits": f"train: {{num_steps: 0x{DIGITS}}}",
    "a quoted text": "'true'",
    "YAML in a quoted text": "'" + "[" * 3000 + "'",
    "a plain text": "x",
    "two documents": "run: {dir: x}\n---\nrun: {dir: y}",
    "a timestamp": "run: {dir: !!timestamp x}",
    "a wrong bool": "layout: {sp: !!bool x}",
    "a tagged list": "run: !x [1]",
    "NUL": 'run: {dir: "a\\0b"}',
    "half a character": 'run: {dir: "a\\ud800b"}',
    "NUL in a key": 'loss: {options: {"a\\0b": 1}}',
    "not UTF-8": "run: {dir: \udcff}",
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@fault(
    "YAML that is deep, multiplies by aliases, or holds 5,000-digit numbers, NUL or broken UTF-8",
    "refused with the line",
)
def test_a_hostile_text_is_refused(text: str, base: Path, notice: Notice) -> None:
    odd = base.with_name("odd.yaml")
    odd.write_bytes(text.encode("utf-8", "surrogateescape"))
    check_message(refusal([base, odd], [], notice))


OVERRIDES = {
    "digits": f"train.num_steps={DIGITS}",
    "nested": "loss.options.x=" + "[" * 3000,
    "a key of many parts": ".".join("a" * 3000) + "=1",
    "half a character": "run.dir=a\ud800b",
    "NUL": "run.dir=a\0b",
    "empty": "run.dir=",
    "long text": "run.zzz=" + "x" * 70_000,
    "long key": "run." + "z" * 70_000 + "=1",
}


@pytest.mark.parametrize("override", OVERRIDES.values(), ids=OVERRIDES)
@fault("an override with NUL, half a character, 5,000 digits or 3,000 levels", "refused in one line")
def test_a_hostile_override_is_refused(override: str, base: Path, notice: Notice) -> None:
    check_message(refusal([base], [override], notice))


@pytest.mark.parametrize("value", ["12:30", "-1:00", "190:20:30", "1:30.5", "010", "0777", "-017"])
@fault("12:30 or 010 for a number, which YAML reads in base 60 or 8", "refused with the base in which YAML reads it")
def test_numbers_in_other_bases_are_refused(value: str, base: Path, notice: Notice) -> None:
    check_message(refusal([base], [f"model.num_layers={value}"], notice), value)


def test_texts_and_numbers_like_them_pass(base: Path) -> None:
    read = load_config([base], ["run.dir='12:30'", "train.seed=0x10", "train.num_steps=1_000", "optimizer.min_lr=0"])
    assert (read.run.dir, read.train.seed, read.train.num_steps, read.optimizer.min_lr) == ("12:30", 16, 1000, 0.0)
    assert load_config([base], ["run.dir=a:12:30"]).run.dir == "a:12:30"


def test_aliases_and_merge_keys_pass(base: Path) -> None:
    odd = base.with_name("odd.yaml")
    odd.write_text("data: {train: [&a {path: x, weight: 2}, {<<: *a, path: y}]}")
    data = load_config([base, odd], []).data
    assert isinstance(data, IndexedSection)
    assert [(each.path, each.weight) for each in data.train] == [("x", 2.0), ("y", 2.0)]


HUGE = 10**30
OUT_OF_RANGE: list[tuple[str, Any]] = [
    ("model.hidden_size", HUGE),
    ("model.ffn_hidden_size", 2**63),
    ("model.head_dim", HUGE),
    ("model.num_layers", 2**63),
    ("model.mtp_depths", 2**63),
    ("model.vocab_size", 2**63),
    ("model.sliding_window", HUGE),
    ("data.seq_length", 10**12),
    ("data.prefetch_steps", 10**6),
    ("train.global_batch_size", HUGE),
    ("train.num_steps", HUGE),
    ("train.seed", 2**64),
    ("train.process_group_timeout_s", 10**15),
    ("checkpoint.save_timeout_s", 10**15),
    ("checkpoint.keep_last", HUGE),
    ("valid.max_samples", 10**23),
    ("optimizer.lr", 1e39),
    ("optimizer.epsilon", 1e-46),
    ("optimizer.clip_grad", 1e300),
    ("model.norm_epsilon", 1e-50),
    ("data.split", [1e-300, 1e-300, 1e-300]),
    ("train.initial_loss_scale", 0.5),
]


@pytest.mark.parametrize(("key", "value"), OUT_OF_RANGE, ids=[key for key, _ in OUT_OF_RANGE])
@fault("numbers beyond any run: hidden_size=10^30, num_layers=2^63, lr=1e39", "refused with the largest and why")
def test_a_number_beyond_any_run_is_refused(key: str, value: Any, base: Path, notice: Notice) -> None:
    line = refusal([base], [f"{key}={value}"], notice)
    assert line.startswith(f"{key}: ")
    check_message(line)


def test_the_largest_numbers_have_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """Numbers on which the plan's time and digits could depend are set to their largest values, all at once."""
    largest = config(
        model__num_layers=4096,
        model__hidden_size=2**20,
        model__ffn_hidden_size=2**20,
        model__head_dim=2**20,
        model__vocab_size=2**31 - 1,
        model__vocab_multiple=2**20,
        data__seq_length=2**24,
        train__global_batch_size=2**24,
        train__num_steps=2**31 - 1,
        train__seed=2**64 - 1,
        train__recompute="full",
        layout__pp=128,
        layout__vpp=4,
        optimizer__lr=bounds.FLOAT32_LARGEST / 16,
        optimizer__epsilon=bounds.FLOAT32_SMALLEST,
    )
    assert "pp128vpp4" in "\n".join(plan_lines(largest, world_size=128))


@pytest.mark.parametrize("changes", [["optimizer.lr=3e38"], ["optimizer.lr=1e30", "optimizer.weight_decay=1e10"]])
@fault("a learning rate whose first update does not fit float32", "refused with the factors that are too large")
def test_updates_beyond_float32_are_refused(changes: list[str], base: Path, notice: Notice) -> None:
    check_message(refusal([base], changes, notice), "optimizer.lr=")


PATHS = ["run.dir", "model.hf", "data.tokenizer", "checkpoint.initialize_from", "data.train", "loss.teacher"]


@pytest.mark.parametrize("text", ["x" * 256, "é" * 128, "d/" * 2000])
@pytest.mark.parametrize("key", PATHS)
@fault("a path in the configuration that no file can have", "refused in one line")
def test_a_path_that_cannot_be_is_refused(key: str, text: str, base: Path, notice: Notice) -> None:
    value = {"data.train": f"[{{path: {text}}}]", "loss.teacher": f"{{checkpoint: {text}}}"}.get(key, text)
    line = refusal([base], [f"{key}={value}"], notice)
    assert line.startswith(key)
    assert "no file or folder can have this name" in line


def test_a_path_that_can_be_passes(base: Path) -> None:
    for text in ("x" * 255, "é" * 127, "d/" * 1400):
        assert load_config([base], [f"run.dir={text}"]).run.dir == text


def test_yarn_needs_a_base_above_one(base: Path) -> None:
    with refuses(ConfigError, "model.rope.base=1.0", "scaling=yarn"):
        load_config([base], ["model.rope={base: 1.0, scaling: yarn, factor: 2}"])


def test_a_message_holds_no_control_characters(base: Path) -> None:
    odd = base.with_name("odd.yaml")
    odd.write_text('run: {"a\\e[31mb\\nc": 1}')
    with pytest.raises(ConfigError) as error:
        load_config([base, odd], [])
    (line,) = str(error.value).splitlines()
    assert line.startswith("run.a\\x1b[31mb\\nc: there is no such key")


def test_a_message_stays_readable(base: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load_config([base], [f"data.train=[{', '.join(['{pth: x}'] * 600)}]"])
    lines = str(error.value).splitlines()
    assert len(lines) == 51
    assert lines[-1].startswith("and 1150 more like these")
