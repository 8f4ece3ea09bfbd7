"""Inputs that are refused, by name, before anything is converted."""

import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from mtrain.base.errors import DataError
from mtrain.checkpoint.format.reader import CheckpointTensors
from mtrain.cli.convert import convert_app
from mtrain.convert.exporting import export_hf
from mtrain.convert.importing import import_hf
from mtrain.convert.verifying import verify_hf
from tests.fault_table import Notice
from tests.hf.folders import save
from tests.messages import refuses
from tests.paths import ROOT
from tests.warm import completed

FIRST = "model-00001-of-00003.safetensors"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good") / "hf"
    save("llama", folder)
    assert (folder / FIRST).exists()
    return folder


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_map(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    path = folder / "model.safetensors.index.json"
    content = json.loads(path.read_text())
    change(content["weight_map"])
    path.write_text(json.dumps(content))


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / FIRST)
    names = set(tensors)
    change(tensors)
    save_file(tensors, folder / FIRST)
    added, gone = set(tensors) - names, names - set(tensors)
    edit_map(folder, lambda places: places.update(dict.fromkeys(added, FIRST)))
    edit_map(folder, lambda places: [places.pop(name) for name in gone])


def cut_file(folder: Path) -> None:
    with (folder / FIRST).open("r+b") as file:
        file.truncate(300)


def link_out(folder: Path) -> None:
    elsewhere = folder.parent / f"{folder.name}-elsewhere"
    shutil.move(folder / FIRST, elsewhere)
    (folder / FIRST).symlink_to(elsewhere)


def point_to(name: str) -> Callable[[Path], None]:
    return lambda folder: edit_map(folder, lambda places: places.update({"lm_head.weight": name}))


def overlap(folder: Path) -> None:
    content = (folder / FIRST).read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["model.embed_tokens.weight"]["data_offsets"][0] += 64
    text = json.dumps(header).encode().ljust(length)
    (folder / FIRST).write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def pipe_for(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


INDEX = "model.safetensors.index.json"
NORM = "model.layers.0.input_layernorm.weight"
FAULTS: dict[str, Callable[[Path], object]] = {
    "unknown family": lambda f: edit_json(f / "config.json", model_type="mamba"),
    "no config": lambda f: (f / "config.json").unlink(),
    "unsupported rope": lambda f: edit_json(
        f / "config.json", rope_parameters={"rope_type": "longrope", "rope_theta": 1.0}
    ),
    "unsupported activation": lambda f: edit_json(f / "config.json", hidden_act="relu"),
    "missing tensor": lambda f: edit_tensors(f, lambda t: t.pop(NORM)),
    "unexpected tensor": lambda f: edit_tensors(f, lambda t: t.update({"model.extra": torch.zeros(2)})),
    "one layer too many": lambda f: edit_json(f / "config.json", num_hidden_layers=2),
    "mistyped number of layers": lambda f: edit_json(f / "config.json", num_hidden_layers=4000),
    "codes instead of numbers": lambda f: edit_tensors(
        f, lambda t: t.update({NORM: torch.zeros(32, dtype=torch.int8)})
    ),
    "other shape": lambda f: edit_tensors(f, lambda t: t.update({NORM: torch.zeros(31, dtype=torch.bfloat16)})),
    "mixed dtypes": lambda f: edit_tensors(f, lambda t: t.update({NORM: torch.zeros(32)})),
    "parent folder": point_to("../x.safetensors"),
    "absolute path": point_to("/etc/passwd"),
    "link to elsewhere": link_out,
    "file missing": lambda f: (f / FIRST).unlink(),
    "cut header": cut_file,
    "overlapping tensors": overlap,
    "index of another file": lambda f: edit_map(
        f, lambda places: places.update({NORM: "model-00002-of-00003.safetensors"})
    ),
    "deep config": lambda f: (f / "config.json").write_bytes(b"[" * 10**6),
    "number of 5,000 digits": lambda f: (f / "config.json").write_text('{"hidden_size": ' + "1" * 5000 + "}"),
    "key twice": lambda f: (f / "config.json").write_text('{"a": 1, "a": 2}'),
    "pipe as config": lambda f: pipe_for(f / "config.json"),
    "deep index": lambda f: (f / INDEX).write_bytes(b'{"weight_map":' * 10**6),
    "index of 40 GiB": lambda f: os.truncate(f / INDEX, 40 * 2**30),
    "NUL in the name of a file": point_to("a\0b"),
    "endless name of a file": point_to("x" * 5000),
    "NUL in the name of a tensor": lambda f: edit_map(f, lambda places: places.update({"a\0b": FIRST})),
    "index without map": lambda f: (f / "model.safetensors.index.json").write_text("{}"),
}


@pytest.mark.fault(
    "folders",
    "folder of Hugging Face that is damaged, misses or repeats something, leads elsewhere or is of another model",
    happens="refused by one message that names file, tensor or field; nothing is left behind",
    exit_code=3,
)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_folder_is_refused_by_name_and_nothing_is_left(
    good: Path, tmp_path: Path, fault: str, notice: Notice
) -> None:
    folder = tmp_path / "hf"
    shutil.copytree(good, folder)
    FAULTS[fault](folder)
    with notice, refuses(DataError) as error:
        import_hf(folder, tmp_path / "out", None, num_workers=1)
    assert error.value.exit_code == notice.exit_code
    assert sorted(path.name for path in tmp_path.iterdir() if "out" in path.name) == []


def test_links_inside_a_download_cache_are_followed(good: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0123"
    shutil.copytree(good, blobs)
    snapshot.mkdir(parents=True)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(os.path.relpath(path, snapshot))
    import_hf(snapshot, tmp_path / "out", None, num_workers=1)
    assert verify_hf(tmp_path / "out", good, num_workers=1).num_tensors == 30


def test_weights_that_are_linked_one_by_one_are_read(good: Path, tmp_path: Path) -> None:
    """Weights from any folder; other files from a cache of the hub alone, since a conversion copies them."""
    blobs, folder = tmp_path / "models--owner--name" / "blobs", tmp_path / "mine"
    blobs.mkdir(parents=True)
    folder.mkdir()
    for path in good.iterdir():
        target = path
        if path.suffix != ".safetensors":
            target = blobs / hashlib.sha256(path.read_bytes()).hexdigest()
            shutil.copyfile(path, target)
        (folder / path.name).symlink_to(target)
    import_hf(folder, tmp_path / "out", None, num_workers=1)
    assert verify_hf(tmp_path / "out", good, num_workers=1).num_tensors == 30
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to(good / "config.json")
    with refuses(DataError, "config.json", "copy the file into it"):
        import_hf(folder, tmp_path / "other", None, num_workers=1)


@pytest.mark.fault(
    "folders",
    "a clone in which Git LFS has not fetched the weights",
    happens="refused with the files that are pointers, and the command that fetches them",
    exit_code=3,
)
def test_pointers_of_git_lfs_are_named(good: Path, tmp_path: Path, notice: Notice) -> None:
    shutil.copytree(good, tmp_path / "hf")
    names = [FIRST, "model-00003-of-00003.safetensors"]
    for name in names:
        (tmp_path / "hf" / name).write_text(
            f"version https://git-lfs.github.com/spec/v1\noid sha256:{64 * 'a'}\nsize 9\n"
        )
    with notice, refuses(DataError, *names, "lfs pull") as error:
        import_hf(tmp_path / "hf", tmp_path / "out", None, num_workers=1)
    assert error.value.exit_code == notice.exit_code


def test_the_commands_end_with_one_line_and_a_code(good: Path, tmp_path: Path) -> None:
    def call(*arguments: object) -> tuple[int, str]:
        result = CliRunner().invoke(convert_app, [str(argument) for argument in arguments])
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result.exit_code, result.output

    ours, back, broken = tmp_path / "ours", tmp_path / "back", tmp_path / "broken"
    code, text = call("import", "--hf", good, "--out", ours, "--workers", 2)
    assert (code, "proven: 30 tensors" in text) == (0, True)
    code, text = call("export", "--checkpoint", ours, "--out", back)
    assert (code, "proven: 30 tensors" in text) == (0, True)
    assert call("verify", "--checkpoint", ours, "--hf", back)[0] == 0
    assert call("import", "--hf", good, "--out", ours)[0] == 2  # not overwritten
    shutil.copytree(good, broken)
    point_to("../x")(broken)
    code, text = call("import", "--hf", broken, "--out", tmp_path / "new")
    assert (code, text.count("\n")) == (3, 1)
    for folder, said in ((good, "30 tensors"), (ours, "9 tensors")):
        code, text = call("inspect", folder)
        assert (code, said in text, "family: llama" in text) == (0, True, True)


def test_logits_above_the_threshold_are_reported_and_refused(good: Path, tmp_path: Path) -> None:
    import_hf(good, tmp_path / "ours", None, num_workers=1)
    tool = [sys.executable, str(ROOT / "tools" / "convert_checkpoint.py"), "verify", "--check-logits"]
    given = ["--checkpoint", str(tmp_path / "ours"), "--hf", str(good), "--threshold", "-1"]
    ended = completed(tool + given)
    assert ended.returncode == 3, ended.stderr
    (difference,) = re.findall(r"logits: largest difference (\S+) of the largest logit", ended.stdout)
    assert float(difference) < 1e-5
    assert ended.stderr.splitlines()[-1].startswith("error: the logits of")


def test_verification_names_the_tensor_that_differs(good: Path, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    shutil.copytree(good, folder)
    import_hf(good, tmp_path / "ours", None, num_workers=1)
    edit_tensors(folder, lambda tensors: tensors[NORM].view(torch.int16).bitwise_xor_(1))
    with refuses(DataError, NORM):
        verify_hf(tmp_path / "ours", folder, num_workers=1)


def test_a_damaged_checkpoint_is_not_exported(good: Path, tmp_path: Path) -> None:
    import_hf(good, tmp_path / "ours", None, num_workers=1)
    tensors = CheckpointTensors(tmp_path / "ours")
    saved = max(tensors.tensors["output_layer.weight"].slices)
    with (tmp_path / "ours" / saved.file).open("r+b") as file:
        file.seek(saved.start_bytes + 10)
        file.write(b"\0" * 60)
    with refuses(DataError):
        export_hf(tmp_path / "ours", tmp_path / "back", None, None, num_workers=1)
    with refuses(DataError, "output_layer.weight"):
        CheckpointTensors(tmp_path / "ours").read("output_layer.weight", saved.at)
