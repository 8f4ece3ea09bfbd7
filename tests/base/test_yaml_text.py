"""Reading and writing YAML. The oracle is OmegaConf on PyYAML, with which version 0.1.0 read and wrote."""

import io
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from mtrain.base.yaml_text import MAX_DEPTH, MAX_NODES, NotYamlError, YamlTextError, read_yaml, yaml_text
from tests.paths import ROOT

ARCHIVE = ROOT / "tests" / "compatibility" / "runs_of_0.1.0.tar.xz"


def as_0_1_0(text: str) -> Any:
    return OmegaConf.to_container(OmegaConf.load(io.StringIO(text)), resolve=False)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").rglob("*.yaml")), ids=lambda path: path.stem)
def test_the_configurations_of_the_project_read_as_in_0_1_0(path: Path) -> None:
    text = path.read_text()
    assert repr(read_yaml(text).content) == repr(as_0_1_0(text))  # repr: 1, 1.0 and True are equal, but not the same


def test_runs_of_0_1_0_read_as_they_were_written() -> None:
    with tarfile.open(ARCHIVE) as archive:
        files = [archive.extractfile(each) for each in archive if each.name.endswith(".yaml")]
        texts = [file.read().decode() for file in files if file is not None]
    assert len(texts) >= 4, "of each run what a person wrote, and config.yaml"
    for text in texts:
        assert repr(read_yaml(text).content) == repr(as_0_1_0(text))


SCALARS = """
1 -1 +1 0 -0 1_000 1__0 0x1F -0xff 0x1_f 0b101 1. 1.5 -1.5 +1.5 .5 -.5 1e3 1e-3 1E5 -1e+3 1.e3 1.5e-5 1.5e5 .5e3 .5e-3
1_0.5 1_0e3 .inf -.inf +.inf .Inf .INF .nan .NaN .NAN inf nan infinity e5 1e 1e- 0o17 0o8 08 09.5 00.5 1a a1 1-2 1,2
yes Yes YES yEs no No NO on On ON off Off OFF true True TRUE tRue false False FALSE y Y n N
~ null Null NULL nUll none None '' "" '1' "1e-3" 'yes' "null" 1:2x a:1 x=y == 2020-01-01 2001-12-14
2001-12-14t21:59:43.10-05:00 [] {} [1,a] {a:1} "é\\t\\x41" '''a''' a#b a/b.c ../x C:\\x %x" - -- --- ... @a `a $a * <<
"""


@pytest.mark.parametrize(
    "scalar", [*SCALARS.split(), "", " 1 ", "a b", "'a' # c", "| \n  x\n  y", ">\n  x\n  y", "a\n  b"]
)
def test_scalars_have_the_types_of_0_1_0(scalar: str) -> None:
    assert_same_as_0_1_0(f"key: {scalar}\n")


@settings(deadline=None, max_examples=300)
@given(st.text("0123456789+-._eExXob:~ynsf ", min_size=1, max_size=8))
def test_whatever_looks_like_a_number_is_what_it_was_in_0_1_0(scalar: str) -> None:
    assert_same_as_0_1_0(f"key: {scalar}\n")


def assert_same_as_0_1_0(text: str) -> None:
    """Checks that both read the same value, or refuse it; numbers in base 8 and 60 are refused."""
    try:
        wanted = as_0_1_0(text)
    except (yaml.YAMLError, ValueError):
        wanted = None
    try:
        found = read_yaml(text).content
    except YamlTextError as fault:
        is_misread = "in base" in str(fault) and isinstance(wanted["key"], int | float) if wanted else True
        found = wanted if is_misread else fault
    assert repr(found) == repr(wanted)


def test_a_sign_of_equality_is_text() -> None:
    assert read_yaml("a: =").content == {"a": "="}


def test_every_key_and_item_has_its_line() -> None:
    text = "# first\na:\n  b: 1\n  c:\n    - x\n    - d: 2\n\ne: {f: 3,\n  g: 4}\n"
    lines = read_yaml(text).lines
    assert lines["a",] == 2
    assert (lines["a", "b"], lines["a", "c"], lines["a", "c", 0], lines["a", "c", 1]) == (3, 4, 5, 6)
    assert (lines["a", "c", 1, "d"], lines["e",], lines["e", "f"], lines["e", "g"]) == (6, 8, 8, 9)


MERGED = "p: &p {x: 1, y: 1}\nq: &q {y: 2, z: 2}\n"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("r: {<<: *p, x: 3}", {"x": 3, "y": 1}),
        ("r: {x: 3, <<: *p}", {"x": 3, "y": 1}),
        ("r: {<<: [*p, *q]}", {"x": 1, "y": 1, "z": 2}),
        ("r: {<<: {<<: *q, y: 4}}", {"y": 4, "z": 2}),
    ],
)
def test_merge_keys_take_over_what_is_not_given(text: str, wanted: dict[str, int]) -> None:
    assert read_yaml(MERGED + text).content["r"] == wanted == as_0_1_0(MERGED + text)["r"]


def test_aliases_are_values_of_their_own() -> None:
    read = read_yaml("a: &a [1]\nb: *a\n").content
    assert read == {"a": [1], "b": [1]}
    assert read["a"] is not read["b"]


def test_an_anchor_may_be_given_anew() -> None:
    assert read_yaml("a: &x 1\nb: *x\nc: &x 2\nd: *x\n").content == {"a": 1, "b": 1, "c": 2, "d": 2}


def test_floats_are_written_as_json_writes_them() -> None:
    assert yaml_text({"lr": 1e-5, "epsilon": 1.5e-8, "large": 1e16}) == "lr: 1e-05\nepsilon: 1.5e-08\nlarge: 1e+16\n"


REFUSED = [
    ("a: 1\nb: 2\na: 3\n", 3, "found duplicate key a"),
    ("a: {b: 1, b: 2}\n", 1, "found duplicate key b"),
    ("a: 1\n? [x]\n: 2\n", 2, "a list or mapping cannot be a key"),
    ("a: 1\n<<: x\n", 2, "<< needs a mapping"),
    ("a: 1\nb: *c\n", 2, "undefined alias"),
    ("a: 1\nb: !!python/object:os.system x\n", 2, "python/object:os.system is not supported"),
    ("a: 1\nb: !!null x\n", 2, "'x' is not a null"),
    ("a: 1\nb: !!float x\n", 2, "'x' is not a number"),
    ("a: 1\nb: 0x_\n", 2, "'0x_' is not a number"),
    ("a: 1\nb: \x07\n", 2, "unacceptable character"),
    ("a: 1\nb: [\n", 3, "expected the node content"),
    ("a: 1\n--- x\n", 2, "another document"),
    ("a: " + "[" * 2**17, 1, f"nested more than {MAX_DEPTH} levels deep"),
    ("a: [" + "1," * 2**17, 1, f"more than {MAX_NODES:,} values"),
    ("a: &a\n  b: *a\n", 2, f"nested more than {MAX_DEPTH} levels deep"),
]


@pytest.mark.parametrize(("text", "line", "words"), REFUSED, ids=[words for _, _, words in REFUSED])
def test_what_is_refused_is_refused_with_its_line(text: str, line: int, words: str) -> None:
    with pytest.raises(YamlTextError, match=words) as caught:
        read_yaml(text)
    assert caught.value.line == line


def test_no_yaml_and_unwanted_yaml_are_distinguished() -> None:
    with pytest.raises(NotYamlError):
        read_yaml("a: [")
    with pytest.raises(YamlTextError) as caught:
        read_yaml("a: 010")
    assert not isinstance(caught.value, NotYamlError)


@pytest.mark.parametrize("text", ["", "# only this\n", "---\n", "~"])
def test_an_empty_text_is_nothing(text: str) -> None:
    assert read_yaml(text).content is None


texts = (st.text(st.characters(codec="utf-8", exclude_characters="\0")) | st.sampled_from(SCALARS.split())).filter(
    lambda text: "${" not in text and text != "???"  # OmegaConf means something else by them
)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, max_examples=100)
@given(st.dictionaries(texts, plain, max_size=4))
@example({"a": "\x85\u2028\ufeff", "b": " lead", "c": "trail ", "d": "two\nlines\n", "e": "x" * 300, "f": "a b " * 100})
def test_what_is_written_is_read_back_here_and_by_0_1_0(content: dict[str, Any]) -> None:
    text = yaml_text(content)
    assert repr(read_yaml(text).content) == repr(content)
    assert repr(as_0_1_0(text)) == repr(content)


def test_a_text_that_was_read_before_gives_values_of_its_own() -> None:
    read_yaml("a: [1]\n").content["a"].append(2)
    assert read_yaml("a: [1]\n").content == {"a": [1]}
