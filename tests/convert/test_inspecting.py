"""Inspection of checkpoints: their content, the differences of two, whether every byte is as it was saved."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from mtrain.arch.layout import Layout
from mtrain.base.tensor_slice import slices_of_run
from mtrain.checkpoint.format.writer import write_metadata, write_shards
from mtrain.checkpoint.store.diff import contents_of, differences
from mtrain.cli.inspect import inspect_app
from mtrain.core.state.shard import Shard
from tests.config.samples import config
from tests.core.state.checkpoint_ranks import save
from tests.pool import Pool

SMALL: dict[str, Any] = {"model__num_layers": 2, "model__vocab_size": 117, "model__vocab_multiple": 8}


@pytest.fixture(scope="module")
def runs(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Creates `one` and `two`: the same state, saved on one rank and on two; the padding of the vocabulary differs."""
    folder = tmp_path_factory.mktemp("runs")
    for name, tp in (("one", 1), ("two", 2)):
        user = config(**SMALL, layout__tp=tp, layout__sp=tp > 1)
        pool.run(save, Layout.from_config(user, tp), user, folder / name / "checkpoints", [1, 2])
    return folder


def said(*arguments: object) -> tuple[int, str]:
    """Returns exit code and output of the tool."""
    result = CliRunner().invoke(inspect_app, [str(argument) for argument in arguments])
    return result.exit_code, result.output


def changed(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """Creates a checkpoint in Megatron's format, each tensor in several slices."""
    folder.mkdir()
    parts = [
        Shard(key, tuple(values.shape), at, values.flatten()[start : start + at.num_elements])
        for key, values in tensors.items()
        for run in ((0, values.numel() // 3), (values.numel() // 3, values.numel()))
        for start, at in slices_of_run(values.shape, *run)
    ]
    write_metadata(folder, write_shards(folder / "__0_0.distcp", parts).tensors)
    return folder


def test_what_is_inside_is_reported_without_reading_tensors(runs: Path, tmp_path: Path) -> None:
    step = runs / "two" / "checkpoints" / "step_00000002"
    code, text = said("show", runs / "two")
    assert code == 0, text
    lines = text.splitlines()
    facts = {line[:15].strip(): line[15:] for line in lines[:12]}
    assert facts["checkpoint"] == str(step)
    assert (facts["step"], facts["layout"], facts["vocabulary"]) == ("2", "tp2sp-pp1-cp1-dp1", "117")
    assert "megatron-core" in facts["versions"]
    (row,) = (line.split() for line in lines if line.startswith("decoder.layers.mlp.linear_fc2.weight "))
    assert row == ["decoder.layers.mlp.linear_fc2.weight", "bfloat16", "2", "x", "64", "x", "128", "32.8", "kB", "4"]
    weights = next(line for line in lines if line.startswith("weights"))
    assert "bfloat16: " in weights
    blind = tmp_path / step.name
    shutil.copytree(step, blind)
    for file in blind.glob("*.distcp"):
        file.write_bytes(bytes(file.stat().st_size))
    assert said("show", blind)[1].splitlines()[1:] == lines[1:], "the tensors were read"


def test_layouts_do_not_make_checkpoints_differ_and_changes_are_named(runs: Path, tmp_path: Path) -> None:
    code, text = said("diff", runs / "one", runs / "two")
    assert code == 0, text
    assert "equal: " in text.splitlines()[-1]
    assert "not compared: rng.cpu" in text


def test_differences_are_reported_by_key_the_worst_first(tmp_path: Path) -> None:
    large, small = torch.arange(24.0).view(4, 6), torch.ones(5)
    wide = torch.zeros(7)
    a = changed(tmp_path / "a", {"same": wide, "large": large, "small": small, "gone": wide, "shape": wide})
    other, nan = large.clone(), small.clone()
    other[3, 5] += 2.3
    nan[2] = float("nan")
    b = changed(tmp_path / "b", {"same": wide, "large": other, "small": nan, "new": wide, "shape": wide[:3]})
    found = differences(contents_of(a), contents_of(b))
    assert (found.missing, found.extra) == (("gone",), ("new",))
    assert found.misshaped == (("shape", (7,), (3,)),)
    assert [each.key for each in found.compared] == ["small", "large", "same"]
    worst, second, third = found.compared
    assert (worst.num_differing, worst.largest_difference) == (1, float("inf"))
    assert second.num_differing == 1
    assert second.largest_difference == pytest.approx(2.3, rel=1e-6)
    assert second.relative == pytest.approx(0.1, rel=1e-6)
    assert third.num_differing == 0
    code, text = said("diff", a, b)
    assert code == 1
    assert all(words in text for words in (f"only in {a}: gone", "shapes differ: shape: [7] and [3]", "1 of 24"))
    assert text.splitlines()[-1] == "different: 1 of 3 common tensors is equal"


def test_equal_numbers_of_other_precision_are_a_difference(tmp_path: Path) -> None:
    values = torch.arange(6.0)
    a, b = changed(tmp_path / "a", {"w": values}), changed(tmp_path / "b", {"w": values.bfloat16()})
    found = differences(contents_of(a), contents_of(b))
    assert (found.compared[0].num_differing, found.compared[0].dtypes) == (0, ("float32", "bfloat16"))
    assert not found.is_equal


def test_a_changed_byte_is_found_and_what_has_no_checksums_is_not_called_good(runs: Path, tmp_path: Path) -> None:
    code, text = said("verify", runs / "one")
    assert code == 0, text
    assert "every byte as saved" in text
    copy = tmp_path / "step_00000002"
    shutil.copytree(runs / "one" / "checkpoints" / "step_00000002", copy)
    file = copy / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    code, text = said("verify", copy)
    assert code == 3
    assert "__0_0.distcp has changed since it was saved (BLAKE3 differs)" in text
    code, text = said("verify", changed(tmp_path / "theirs", {"w": torch.zeros(2)}))
    assert code == 3
    assert "has no checksums" in text
    assert said("show", tmp_path / "nowhere")[0] == 3
