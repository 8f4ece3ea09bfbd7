"""Published GPT-OSS: MXFP4 is read as the numbers that transformers makes of it, bit for bit, and written again."""

import filecmp
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from mtrain.arch.layout import Layout
from mtrain.base.errors import DataError
from mtrain.base.tensor_slice import TensorSlice
from mtrain.checkpoint.format.reader import CheckpointTensors
from mtrain.checkpoint.store.manifest import MANIFEST_NAME, parsed_manifest, write_manifest
from mtrain.config.load import save_config
from mtrain.convert.exporting import export_hf
from mtrain.convert.importing import import_hf
from mtrain.convert.verifying import random_tokens, verify_hf
from mtrain.hf.io.folder import HfFolder
from mtrain.hf.io.mxfp4 import Mxfp4, packed, rounding_error, unpacked
from mtrain.hf.io.safetensors import same_bits
from mtrain.hf.io.source import FolderTensors, open_source
from mtrain.hf.io.training import transformers_logits
from tests.cli.command_line import call
from tests.core.state import checkpoint_ranks
from tests.hf import hf_ranks
from tests.hf.folders import run_of_folder, save
from tests.messages import check_message, refuses
from tests.pool import Pool

FORMAT = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
FILE = "model.safetensors"
FIRST = "model.layers.0.mlp.experts.gate_up_proj"


def save_published(folder: Path) -> dict[str, Tensor]:
    """Saves a model with its experts in MXFP4, and returns its tensors as transformers reads them."""
    save("gpt-oss", folder, max_shard_size="1GB")
    stored = load_file(folder / FILE)
    meant = dict(stored)
    for name in [name for name in stored if name.endswith("_proj") and ".experts." in name]:
        num_experts, inputs, outputs = stored.pop(name).shape
        blocks = torch.randint(256, (num_experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        blocks[0] &= 0x33  # small codes, whose numbers smaller scales express, too
        scales = torch.randint(120, 126, blocks.shape[:-1], dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        meant[name] = convert_moe_packed_tensors(blocks, scales)
    save_file(stored, folder / FILE, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": FORMAT}))
    return meant


def test_every_code_under_every_scale_is_that_of_transformers(tmp_path: Path) -> None:
    save_published(tmp_path)
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).repeat(1, 256, 1, 1)
    scales = torch.arange(256, dtype=torch.uint8).view(1, 256, 1).repeat(1, 1, 16)
    save_file({"w_blocks": blocks, "w_scales": scales}, tmp_path / FILE)
    weights = Mxfp4(HfFolder(tmp_path))
    assert (weights.names(), weights.facts("w")) == ({"w"}, (torch.bfloat16, (1, 512, 256)))
    for dtype in (torch.bfloat16, torch.float32):
        assert same_bits(weights.tensor("w").to(dtype), convert_moe_packed_tensors(blocks, scales, dtype=dtype))


def test_published_weights_come_back_as_what_they_mean(pool: Pool, tmp_path: Path) -> None:
    theirs, ours, back = tmp_path / "theirs", tmp_path / "ours", tmp_path / "back"
    meant = save_published(theirs)
    import_hf(theirs, ours, None, num_workers=2)
    export_hf(ours, back, None, None, num_workers=1)
    verify_hf(ours, theirs, num_workers=1)
    found = load_file(back / FILE)
    assert found.keys() == meant.keys()
    assert all(same_bits(found[name], value) for name, value in meant.items())
    said = json.loads((back / "config.json").read_text())
    assert "quantization_config" not in said
    assert said["dtype"] == "bfloat16"
    tokens = random_tokens(57)
    expected = transformers_logits(theirs, tokens)
    assert torch.equal(transformers_logits(back, tokens), expected)
    np.testing.assert_allclose(
        pool.run(hf_ranks.logits, Layout(), ours)[0], expected, rtol=0, atol=2e-5 * float(expected.abs().max())
    )


def test_a_run_starts_from_the_same_numbers_as_from_an_import(tmp_path: Path) -> None:
    save_published(tmp_path / "theirs")
    import_hf(tmp_path / "theirs", tmp_path / "ours", None, num_workers=1)
    started, imported = FolderTensors(open_source(tmp_path / "theirs")), CheckpointTensors(tmp_path / "ours")
    assert started.tensors.keys() == imported.tensors.keys()
    for key, (dtype, shape) in started.tensors.items():
        for part in TensorSlice.whole(shape).cut(1000):
            assert same_bits(started.read(key, part).contiguous(), imported.read(key, part).contiguous()), key
        assert dtype == torch.bfloat16


@pytest.mark.parametrize("fault", ["no scales", "no blocks", "scales of another shape", "scales as numbers", "twice"])
def test_blocks_and_scales_that_do_not_fit_are_refused(tmp_path: Path, fault: str) -> None:
    save_published(tmp_path / "theirs")
    stored = load_file(tmp_path / "theirs" / FILE)
    scales = stored[f"{FIRST}_scales"]
    match fault:
        case "no scales":
            del stored[f"{FIRST}_scales"]
        case "no blocks":
            del stored[f"{FIRST}_blocks"]
        case "scales of another shape":
            stored[f"{FIRST}_scales"] = scales[:, 1:].contiguous()
        case "scales as numbers":
            stored[f"{FIRST}_scales"] = scales.float()
        case "twice":
            stored[FIRST] = torch.zeros(3, 32, 64, dtype=torch.bfloat16)
    save_file(stored, tmp_path / "theirs" / FILE)
    with refuses(DataError, FIRST):
        import_hf(tmp_path / "theirs", tmp_path / "ours", None, num_workers=1)


CODES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
EXTREMES = (0.0, -0.0, 1e-45, -1e-40, 2.0**-128, 2.0**-127 * 6, -(2.0**127) * 1.75, 3.3895e38)


def nearest(number: float, scale: int) -> float:
    """Returns the number that a scale and the nearest code mean; in the middle of two codes, the even one."""
    factor = 2.0 ** (scale - 127)
    code = min(range(8), key=lambda each: (abs(abs(number) / factor - CODES[each]), each % 2))
    return math.copysign(CODES[code] * factor, number)


def scale_of(block: list[float]) -> int:
    """Returns the scale that the specification gives a block: floor(log2(largest)) - 2, with a bias of 127."""
    largest = max(map(abs, block))
    return min(max(math.floor(math.log2(largest)) - 2 + 127, 0), 254)


@st.composite
def blocks(draw: st.DrawFn) -> list[float]:
    """Draws 32 numbers: of any kind, or near codes and in the middle of them, under one power of two."""
    factor = 2.0 ** draw(st.integers(-126, 120))
    near_codes = st.integers(-32, 32).map(lambda quarters: quarters / 4 * factor)
    anything = st.floats(width=32, allow_nan=False, allow_infinity=False)
    return draw(
        st.lists(draw(st.sampled_from((near_codes, anything, near_codes | anything))), min_size=32, max_size=32)
    )


@given(blocks(), st.integers(0, 255), st.sampled_from((torch.bfloat16, torch.float32, torch.float64)))
def test_numbers_become_the_nearest_codes_under_the_scale_of_the_specification(
    block: list[float], before: int, dtype: torch.dtype
) -> None:
    weight = torch.tensor(block, dtype=torch.float64).to(dtype).view(1, 32, 1)
    if not weight.isfinite().all():  # rounded up to infinity by bfloat16
        return
    given = weight.flatten().double().tolist()
    made = packed("w", weight, torch.tensor([[[before]]], dtype=torch.uint8))
    is_kept = all(nearest(number, before) == number for number in given)
    scale = before if is_kept else scale_of(given)
    assert made.scales.item() == scale
    expected = torch.tensor([nearest(number, scale) for number in given], dtype=torch.float64)
    found = unpacked(*made)
    assert same_bits(found.flatten().double(), expected)
    assert same_bits(found, convert_moe_packed_tensors(*made))
    largest = max(map(abs, given))
    errors = [abs(theirs - mine) for theirs, mine in zip(expected.tolist(), given)]
    assert rounding_error(weight, found) == (max(errors) / largest if largest else 0.0)
    # a scale below the smallest one does not exist, so tiny numbers may be lost
    if largest >= 2.0**-125:
        assert max(errors) <= largest / 4


def test_every_pattern_of_bits_comes_back_under_the_scale_that_it_had() -> None:
    # larger scales make some codes infinite
    values = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).repeat(1, 253, 1, 1)
    scales = torch.arange(253, dtype=torch.uint8).view(1, 253, 1).repeat(1, 1, 16)
    for dtype in (torch.bfloat16, torch.float32):
        made = packed("w", unpacked(values, scales).to(dtype), scales)
        assert torch.equal(made.blocks, values)
        assert torch.equal(made.scales, scales)


def test_extreme_numbers_are_the_nearest_that_exist() -> None:
    block = [*EXTREMES, *[0.0] * 24]
    for number in EXTREMES:
        alone = [number, *[0.0] * 31]
        weight = torch.tensor([alone, block]).T.reshape(1, 32, 2)
        made = packed("w", weight, torch.full((1, 2, 1), 254, dtype=torch.uint8))
        for found, numbers, scale in zip(unpacked(*made)[0].T, (alone, block), made.scales.flatten().tolist()):
            exact = torch.tensor(numbers).double().tolist()
            assert found.double().tolist() == [nearest(each, scale) for each in exact]


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_refused(number: float) -> None:
    weight = torch.ones(2, 32, 3)
    weight[1, 7, 2] = number
    with refuses(DataError, "experts.w"):
        packed("experts.w", weight, torch.full((2, 3, 1), 127, dtype=torch.uint8))


def same_files(one: Path, other: Path) -> bool:
    """Says whether two folders hold the same files, byte for byte."""
    names = [{path.relative_to(each) for path in each.rglob("*")} for each in (one, other)]
    return names[0] == names[1] and all(filecmp.cmp(one / name, other / name, shallow=False) for name in names[0])


@pytest.mark.parametrize("shards", ["one", "several"])
def test_an_import_becomes_the_published_folder_again(shards: str, tmp_path: Path) -> None:
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    save_published(theirs)
    (theirs / "tokenizer_config.json").write_text("{}\n")
    if shards == "several":
        in_shards(theirs)
    import_hf(theirs, ours, None, num_workers=1)
    shutil.move(theirs, tmp_path / "elsewhere")
    proof = export_hf(ours, tmp_path / "back", None, "mxfp4", num_workers=2)
    assert (proof.num_in_mxfp4, proof.rounding) == (6, {})
    assert same_files(tmp_path / "back", tmp_path / "elsewhere")


def test_the_verb_says_how_many_tensors_were_rounded(tmp_path: Path) -> None:
    save_published(tmp_path / "theirs")
    import_hf(tmp_path / "theirs", tmp_path / "ours", None, num_workers=1)
    arguments = ("convert", "export", "--checkpoint", tmp_path / "ours", "--out", tmp_path / "back")
    code, text = call(*arguments, "--dtype", "mxfp4")
    assert code == 0, text
    assert "mxfp4: 0 of 6 tensors were rounded, by at most 0 of the largest number in a block" in text
    code, text = call(*arguments, "--dtype", "mxfp4", "--adapter")
    assert code == 2
    check_message(text, "--dtype mxfp4", "--adapter")


def in_shards(folder: Path) -> None:
    """Distributes the tensors of a folder over two files, the scales apart from their blocks."""
    stored = load_file(folder / FILE)
    (folder / FILE).unlink()
    parts = {
        "model-00001-of-00002.safetensors": {name: each for name, each in stored.items() if "scales" in name},
        "model-00002-of-00002.safetensors": {name: each for name, each in stored.items() if "scales" not in name},
    }
    for name, part in parts.items():
        save_file(part, folder / name, {"format": "pt"})
    size = sum(tensor.nbytes for tensor in stored.values())
    places = sorted((tensor, name) for name, part in parts.items() for tensor in part)
    index = {"metadata": {"total_size": size}, "weight_map": dict(places)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def test_what_changed_is_rounded_and_the_rest_keeps_its_bytes(tmp_path: Path) -> None:
    theirs, plain = tmp_path / "theirs", tmp_path / "plain"
    save_published(theirs)
    import_hf(theirs, tmp_path / "ours", None, num_workers=1)
    export_hf(tmp_path / "ours", plain, None, None, num_workers=1)
    changed = load_file(plain / FILE)
    changed[FIRST][1] += torch.randn(32, 64).bfloat16() / 8
    save_file(changed, plain / FILE, {"format": "pt"})
    import_hf(plain, tmp_path / "changed", None, num_workers=1)
    proof = export_hf(tmp_path / "changed", tmp_path / "back", theirs, "mxfp4", num_workers=1)
    before, after = load_file(theirs / FILE), load_file(tmp_path / "back" / FILE)
    assert before.keys() == after.keys()
    differing = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert differing == {f"{FIRST}_blocks", f"{FIRST}_scales"}
    for part in differing:  # other experts of the same tensor, too
        assert torch.equal(before[part][[0, 2]], after[part][[0, 2]])
    read = convert_moe_packed_tensors(after[f"{FIRST}_blocks"], after[f"{FIRST}_scales"]).double()
    exact = changed[FIRST].double().view(3, 1, 32, 64)
    error = float(((read.view(3, 1, 32, 64) - exact).abs().amax(2) / exact.abs().amax(2)).max())
    assert proof.rounding == {FIRST: error}
    assert 0 < error <= 0.25


@pytest.mark.parametrize("start", ["folder", "import"])
def test_a_run_is_written_in_the_published_form(start: str, pool: Pool, tmp_path: Path) -> None:
    theirs, run = tmp_path / "theirs", tmp_path / "run"
    save_published(theirs)
    import_hf(theirs, tmp_path / "ours", None, num_workers=1)
    config = run_of_folder(theirs, run, 1, tmp_path / "ours" if start == "import" else None)
    run.mkdir()
    save_config(config, run / "config.yaml")
    pool.run(checkpoint_ranks.train, Layout(), config, run / "checkpoints", None, 1, 1)
    export_hf(run, tmp_path / "plain", None, None, num_workers=1)
    proof = export_hf(run, tmp_path / "back", None, "mxfp4", num_workers=1)
    assert len(proof.rounding) == proof.num_in_mxfp4 == 6
    before, plain, after = (load_file(tmp_path / name / FILE) for name in ("theirs", "plain", "back"))
    assert list(before) == list(after)
    for name in plain.keys() & after.keys():
        assert same_bits(plain[name], after[name]), name
    said, expected = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("back", "theirs"))
    assert said["quantization_config"] == expected["quantization_config"]
    # transformers makes the model of the rounded numbers
    rounded = {
        name: after[name]
        if name in after
        else convert_moe_packed_tensors(after[f"{name}_blocks"], after[f"{name}_scales"])
        for name in plain
    }
    save_file(rounded, tmp_path / "plain" / FILE, {"format": "pt"})
    tokens = random_tokens(57)
    assert torch.equal(transformers_logits(tmp_path / "back", tokens), transformers_logits(tmp_path / "plain", tokens))


@pytest.mark.parametrize("origin", ["plain", "earlier import", "other sizes"])
def test_a_model_without_its_published_form_is_refused(origin: str, tmp_path: Path) -> None:
    save_published(tmp_path / "theirs")
    import_hf(tmp_path / "theirs", tmp_path / "ours", None, num_workers=1)
    like: Path | None = None
    words: tuple[str, ...] = ("--dtype mxfp4", "--like")
    match origin:
        case "plain":
            export_hf(tmp_path / "ours", tmp_path / "plain", None, None, num_workers=1)
            like = tmp_path / "plain"
        case "earlier import":
            shutil.rmtree(tmp_path / "ours" / "hf" / "mxfp4")
            manifest = parsed_manifest((tmp_path / "ours" / MANIFEST_NAME).read_bytes())
            files = {name: facts for name, facts in manifest.files.items() if "mxfp4" not in name}
            write_manifest(tmp_path / "ours", manifest.model_copy(update={"files": files}))
        case "other sizes":
            stored = load_file(tmp_path / "theirs" / FILE)
            stored[f"{FIRST}_scales"] = stored[f"{FIRST}_scales"][:, 1:].contiguous()
            save_file(stored, tmp_path / "theirs" / FILE, {"format": "pt"})
            like, words = tmp_path / "theirs", (f"{FIRST}_scales", "--like")
    with refuses(DataError, *words):
        export_hf(tmp_path / "ours", tmp_path / "back", like, "mxfp4", num_workers=1)


def test_damaged_scales_of_an_import_are_found(tmp_path: Path) -> None:
    save_published(tmp_path / "theirs")
    import_hf(tmp_path / "theirs", tmp_path / "ours", None, num_workers=1)
    path = tmp_path / "ours" / "hf" / "mxfp4" / "scales.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x00")
    with refuses(DataError, "scales.safetensors"):
        export_hf(tmp_path / "ours", tmp_path / "back", None, "mxfp4", num_workers=1)
