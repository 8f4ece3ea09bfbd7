"""Reading, merging and saving of configurations, and messages about bad ones."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrain.base.errors import ConfigError
from mtrain.config import Config
from mtrain.config.load import save_config
from mtrain.config.schema.bounds import FLOAT32_LARGEST, FLOAT32_SMALLEST
from mtrain.config.schema.data import IndexedSection
from mtrain.config.schema.loss import wrong_options
from mtrain.config.schema.train import MuonSection
from mtrain.hf.configuration import load_config
from tests.config.samples import INDEXED, config, content
from tests.config.yaml_files import write
from tests.fault_table import Notice
from tests.messages import check_message, refuses


def message(paths: list[Path], overrides: list[str]) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(paths, overrides)
    return str(error.value)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write(tmp_path / "base.yaml", content(data=INDEXED))


def test_later_files_win_key_by_key_and_overrides_win_over_files(base: Path, tmp_path: Path) -> None:
    later = write(tmp_path / "later.yaml", {"train": {"num_steps": 20, "seed": 5}, "layout": {"tp": 2}})
    read = load_config([base, later], ["train.seed=6", "optimizer.beta1=0.8"])
    assert (read.train.num_steps, read.train.seed, read.train.global_batch_size) == (20, 6, 16)
    assert (read.layout.tp, read.optimizer.beta1) == (2, 0.8)
    assert load_config([later, base], []).train.num_steps == 10


def own_loss(inputs: object, gamma: float = 2.0, scale: float = 1.0) -> object:
    return inputs, gamma, scale


@pytest.mark.parametrize(
    ("loss", "options"),
    [
        ({"function": own_loss}, {}),
        ({"function": own_loss, "options": {"gamma": 1.5}}, {"gamma": 1.5}),
        ({"function": partial(own_loss, gamma=1.5)}, {"gamma": 1.5}),
        (
            {"function": partial(partial(own_loss, scale=3.0), gamma=1.5), "options": {"gamma": 1}},
            {"gamma": 1, "scale": 3},
        ),
    ],
    ids=["plain", "options", "bound", "both"],
)
def test_a_mapping_takes_a_loss_function_itself(base: Path, loss: dict[str, Any], options: dict[str, float]) -> None:
    named = {"function": f"{__name__}:own_loss", "options": options}
    assert load_config([base, {"loss": loss}]) == load_config([base, {"loss": named}])
    assert load_config([base, {"loss": {"side_terms": {"own": loss}}}]).loss.side_terms["own"].options == options


def test_values_of_a_loss_function_are_bound_by_keyword(base: Path) -> None:
    with refuses(ConfigError, "function", "None", "keyword"):
        load_config([base, {"loss": {"function": partial(own_loss, None)}}])


def test_a_configuration_shows_what_was_given(base: Path) -> None:
    config = load_config([base, {"run": {"name": "<b>"}, "loss": {"function": own_loss, "options": {"gamma": 1.5}}}])
    assert re.search(r"^loss\.options\.gamma +1\.5$", repr(config), re.MULTILINE)
    assert str(config) == repr(config)
    assert "loss.chunk_tokens" not in repr(config), "a default"
    page = config._repr_html_()
    assert page.count("<tr>") == len(repr(config).splitlines())
    assert "&lt;b&gt;" in page


def test_files_and_mappings_mix(base: Path, tmp_path: Path) -> None:
    later = write(tmp_path / "later.yaml", {"train": {"num_steps": 20, "seed": 5}})
    mapping = {"train": {"num_steps": 30}, "layout": {"tp": 2}, "run": {"dir": tmp_path}}
    assert load_config([str(base), mapping, later]).train.num_steps == 20
    read = load_config((base, later, mapping), "train.seed=6")
    assert (read.train.num_steps, read.train.seed, read.layout.tp, read.run.dir) == (30, 6, 2, str(tmp_path))
    assert mapping == {"train": {"num_steps": 30}, "layout": {"tp": 2}, "run": {"dir": tmp_path}}
    assert load_config(base) == load_config(str(base)) == load_config([base])
    alone = content(data={**INDEXED, "split": (0.8, 0.1, 0.1)})
    assert load_config(alone) == load_config([base, {"data": {"split": (0.8, 0.1, 0.1)}}])


@pytest.mark.parametrize(
    ("parts", "overrides", "facts"),
    [
        (None, [], ("paths and mappings", "NoneType")),
        (5, [], ("paths and mappings", "int")),
        ([{}, 5], [], ("part 2", "int", "YAML file", "mapping")),
        ([b"a.yaml"], [], ("part 1", "bytes")),
        ([[{}]], [], ("part 1", "list")),
        ({"train": {"num_steps": "many"}}, [], ("train.num_steps", "mapping 1", "many")),
        ([{}, {"train": {"steps": 5}}], [], ("train.steps", "mapping 2")),
        ({"train": 5}, [], ("train", "mapping 1")),
        ({}, {"train.num_steps": 5}, ("overrides in a list", "dict")),
        ({}, [5], ("override", "int")),
    ],
    ids=str,
)
def test_a_part_of_another_type_is_named(parts: Any, overrides: Any, facts: tuple[str, ...]) -> None:
    with refuses(ConfigError, *facts):
        load_config(parts, overrides)


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("optimizer.lr=1e-4", "optimizer", "lr", 1e-4),
        ("train.num_steps=1e3", "train", "num_steps", 1000),
        ("layout.sp=false", "layout", "sp", False),
        ("model.megatron={deterministic_mode: true}", "model", "megatron", {"deterministic_mode": True}),
        ("model.megatron.deterministic_mode=true", "model", "megatron", {"deterministic_mode": True}),
        ("data.split=[0.8, 0.1, 0.1]", "data", "split", (0.8, 0.1, 0.1)),
        ("data.tokenizer=null", "data", "tokenizer", None),
        ("data.tokenizer=a=b", "data", "tokenizer", "a=b"),
        ("run.dir='12'", "run", "dir", "12"),
    ],
)
def test_override_values_are_yaml(base: Path, override: str, section: str, key: str, value: object) -> None:
    read = getattr(getattr(load_config([base], [override]), section), key)
    assert read == value
    assert type(read) is type(value)


def test_an_optimizer_without_a_kind_is_adamw(base: Path) -> None:
    assert load_config([base], []) == load_config([base], ["optimizer.kind=adamw"])
    assert load_config([base], []).optimizer.kind == "adamw"


def test_muon_has_the_keys_of_adamw_and_its_own(base: Path) -> None:
    found = load_config([base], ["optimizer.kind=muon", "optimizer.momentum=0.9", "optimizer.beta2=0.99"]).optimizer
    assert isinstance(found, MuonSection)
    assert (found.momentum, found.nesterov, found.newton_schulz_steps, found.update_rms) == (0.9, True, 5, 0.2)
    assert (found.lr, found.beta2) == (load_config([base], []).optimizer.lr, 0.99)


def test_lists_are_replaced_as_a_whole(base: Path, tmp_path: Path) -> None:
    sources = write(tmp_path / "a.yaml", {"data": {"train": [{"path": "a"}, {"path": "b"}]}})
    read = load_config([base, sources], ["data.train=[{path: c, weight: 2}]"])
    assert isinstance(read.data, IndexedSection)
    assert [(source.path, source.weight) for source in read.data.train] == [("c", 2.0)]
    assert "complete list" in message([base, sources], ["data.train.0.path=c"])


@pytest.mark.parametrize(
    "override",
    [
        "layout.tpp=2",
        "lay_out.tp=2",
        "model.seq_length=2",
        "model.rope.bas=2",
        "data.train=[{pth: x, path: y}]",
        "loss.side_terms.tp.coeficient=1",
        "run.zzz=2",
        "train.num_steps=ten",
        "train.num_steps=1.5",
        "train.num_steps=0",
        "train.num_steps=yes",
        "train.num_steps=null",
        "optimizer.kind=adam",
        "optimizer.momentum=0.9",
        "optimizer.lr=.nan",
        "train.precision=fp8",
        "model=3",
        "model.rope=3",
        "run.dir=${oc.env:HOME}",
        "run.dir=${",
        "run.dir=???",
        "run.dir",
        "=3",
        "run..dir=3",
        "run.dir=[1",
    ],
)
@pytest.mark.fault(
    "input",
    "an unknown key, a value of another type, NaN as a learning rate",
    happens="refused with the key, the value and the nearest valid name",
    exit_code=2,
)
def test_a_bad_override_is_named(base: Path, override: str, notice: Notice) -> None:
    with notice:
        found = message([base], [override])
    check_message(found)
    assert len(found.splitlines()) == 1


def test_a_missing_section_is_reported_with_the_keys_that_it_needs(tmp_path: Path) -> None:
    alone = tmp_path / "alone.yaml"
    alone.write_text("model: {mla: {kv_lora_rank: 4}}")
    lines = message([alone], []).splitlines()
    assert "train: no value is given; set train.global_batch_size, train.num_steps" in lines
    assert "model.num_layers: no value is given; set it" in lines


@pytest.mark.parametrize(
    ("written", "fact"),
    [
        (b"", "bad.yaml"),
        (b"# only a comment\n", "bad.yaml"),
        (b"3", "bad.yaml"),
        (b"- 1\n- 2\n", "bad.yaml"),
        (b"run:\n  dir: x\nrun:\n  dir: y\n", "bad.yaml:3"),
        (b"run: {dir: x\nmodel: [\n", "bad.yaml:2"),
        (b"run:\n\tdir: x\n", "bad.yaml:2"),
        (b"run: {dir: \xff}", "bad.yaml"),
        (b"run: {dir: \x01}", "bad.yaml:1"),
        (
            b"run: {dir: !!python/object:os.system x}",
            "bad.yaml:1",
        ),
        (b"run: {dir: '${oc.env:HOME}'}", "run.dir"),
        (b"run: {dir: '${'}", "run.dir"),
        (b"data: {train: [{path: '${x}'}]}", "data.train[0].path"),
        (b"1: x\n", "1"),
    ],
)
@pytest.mark.fault(
    "input",
    "a configuration that is empty, no YAML, of another encoding, or has a key twice",
    happens="refused with file and line",
    exit_code=2,
)
def test_a_bad_file_is_named(base: Path, written: bytes, fact: str, notice: Notice) -> None:
    bad = base.with_name("bad.yaml")
    bad.write_bytes(written)
    with notice:
        found = message([base, bad], [])
    check_message(found, fact)
    assert len(found.splitlines()) == 1


def test_a_wrong_value_is_named_with_its_file_and_line(base: Path, tmp_path: Path) -> None:
    later = tmp_path / "later.yaml"
    later.write_text("# a comment\nlayout:\n  tp: two\n  cpp: 2\ndata:\n  train:\n    - path: x\n      wait: 1\n")
    lines = message([base, later], ["train.num_steps=ten"]).splitlines()
    assert any(line.startswith("layout.tp: input should be") and line.endswith(f"(in {later}:3)") for line in lines)
    assert any(line.startswith("layout.cpp: there is no") and line.endswith(f"(in {later}:4)") for line in lines)
    assert any(line.startswith("data.train[0].wait: there is") and line.endswith(f"(in {later}:8)") for line in lines)
    assert any(line.startswith("train.num_steps: ") and line.endswith("(in the command line)") for line in lines)
    assert len(lines) == 4


@pytest.mark.parametrize(("key", "line"), [("kv_lora_rank", 3), ("kv_rank", 2)])
@pytest.mark.filterwarnings("ignore::mtrain.config.renamed.RenamedKeyWarning")
def test_a_renamed_key_is_named_with_the_line_of_its_section(key: str, line: int, base: Path, tmp_path: Path) -> None:
    old = tmp_path / "old.yaml"
    old.write_text(f"model:\n  mla:\n    {key}: many\n")
    (found,) = (each for each in message([base, old], []).splitlines() if "kv_lora_rank: input should" in each)
    assert found.endswith(f"(in {old}:{line})")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("run: {a: [1]}", "run: {a: {b: 1}}"),
        ("run: {a: {b: 1}}", "run:\n  a: [1]"),
    ],
)
def test_lists_and_mappings_do_not_mix(first: str, second: str, tmp_path: Path) -> None:
    paths = [tmp_path / "1.yaml", tmp_path / "2.yaml"]
    for path, text in zip(paths, (first, second)):
        path.write_text(text)
    check_message(message(paths, []), "run.a")


def test_a_section_comes_and_goes_with_null(base: Path) -> None:
    assert load_config([base], ["loss.teacher={checkpoint: x}", "loss.teacher=null"]).loss.teacher is None
    teacher = load_config([base], ["loss.teacher=null", "loss.teacher.checkpoint=x"]).loss.teacher
    assert teacher is not None
    assert teacher.checkpoint == "x"


def test_missing_files_and_folders_are_all_named(base: Path, tmp_path: Path) -> None:
    found = message([tmp_path / "none.yaml", base, tmp_path], ["x"])
    assert [line.partition(":")[0] for line in found.splitlines()] == [str(tmp_path / "none.yaml"), str(tmp_path), "x"]


def test_a_byte_order_mark_is_no_part_of_the_first_key(base: Path) -> None:
    base.write_bytes(b"\xef\xbb\xbf" + base.read_bytes())
    assert load_config([base], []) == config(data=INDEXED)


def test_the_environment_is_not_read(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "swordfish")
    assert "swordfish" not in message([base], ["run.dir=${oc.env:SECRET}"])


def test_a_text_that_could_not_be_read_back_is_not_saved(tmp_path: Path) -> None:
    with refuses(ConfigError, "run.dir"):
        save_config(config(run__dir="${x}"), tmp_path / "config.yaml")
    assert not (tmp_path / "config.yaml").exists()


texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12).filter(
    lambda text: "${" not in text and text != "???"
)
tricky = st.sampled_from(
    ["1e-4", "no", "null", "12:30", "010", "1_000", "=", "~", "", " x ", "a: b", "0o17", "{}", "#"]
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts | tricky,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts | tricky, inner, max_size=3),
    max_leaves=6,
)


def has_no_rule(option: str) -> bool:
    """Says whether an option may have any value; hypothesis takes texts out of the source, names of options too."""
    return not wrong_options({option: "of no rule"})


@st.composite
def configs(draw: st.DrawFn) -> Config:
    changes: dict[str, Any] = {
        "run__dir": draw((texts | tricky).filter(bool)),
        "optimizer__lr": draw(st.floats(FLOAT32_SMALLEST, FLOAT32_LARGEST / 16)),
        "train__seed": draw(st.integers(0, 2**64 - 1)),
        "train__recompute": draw(st.sampled_from(["none", "selective", "full"])),
        "loss__options": draw(st.dictionaries((texts | tricky).filter(has_no_rule), values, max_size=3)),
        "loss__side_terms": draw(st.dictionaries(texts.filter(lambda name: name != "main"), st.just({}), max_size=2)),
        "data__kind": "indexed",
        "data__train": draw(
            st.lists(st.fixed_dictionaries({"path": (texts | tricky).filter(bool)}), min_size=1, max_size=2)
        ),
        "data__split": draw(st.sampled_from([None, [0.9, 0.1, 0], [1, 0, 0]])),
    }
    return config(**changes)


@settings(deadline=None, max_examples=25)
@given(saved=configs())
def test_a_saved_configuration_loads_equal(saved: Config, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "roundtrip.yaml"
    save_config(saved, path)
    assert load_config([path], []) == saved
