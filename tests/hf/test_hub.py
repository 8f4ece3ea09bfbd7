"""Names on the Hugging Face Hub, which are read from its cache as huggingface_hub lays it out."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants, scan_cache_dir

from mtrain.arch.layout import Layout
from mtrain.base.errors import ConfigError, DataError
from mtrain.data.formats.record_files import record_files
from mtrain.hf.configuration import load_config
from mtrain.hf.hub import cached, how_to_download, is_same_repository, revision_of
from mtrain.training.sampling.generate import model_at
from tests.config.samples import content
from tests.hf.folders import save
from tests.messages import refuses
from tests.pool import Pool
from tests.training.one_process import train_fresh

OLD, NEW = "0123456789abcdef" * 2 + "01234567", "f" * 40


def put(home: Path, name: str, commit: str, files: Mapping[str, bytes], kind: str = "model", ref: str = "main") -> Path:
    """Puts a snapshot into the cache of `home`, with blobs and links as a download leaves them."""
    repository = home / "hub" / f"{kind}s--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / commit
    for number, (path, data) in enumerate(files.items()):
        blob = repository / "blobs" / f"{commit[:20]}{number:020x}"
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(data)
        (snapshot / path).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / path).symlink_to(blob)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / ref).write_text(commit)
    return snapshot


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes an empty cache, and the folder from which names are looked up."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "home"


def test_a_name_is_the_snapshot_of_its_revision(home: Path) -> None:
    old = put(home, "Some-Org/A.model_1", OLD, {"config.json": b"{}"}, ref="v1.0")
    new = put(home, "Some-Org/A.model_1", NEW, {"config.json": b"{}"})
    assert cached("Some-Org/A.model_1") == str(new)
    found = {name: cached(f"Some-Org/A.model_1@{name}") for name in ("v1.0", OLD, NEW, "main")}
    assert found == {"v1.0": str(old), OLD: str(old), NEW: str(new), "main": str(new)}
    assert revision_of(str(old)) == f"Some-Org/A.model_1@{OLD}"
    assert is_same_repository(str(old), str(new))
    assert [repo.repo_id for repo in scan_cache_dir(home / "hub").repos] == ["Some-Org/A.model_1"], "a cache of theirs"


def test_what_is_not_in_the_cache_stays_as_it_is(home: Path) -> None:
    """Random texts, an existing folder of the same name, and a revision and a kind that the cache lacks."""
    put(home, "org/name", OLD, {"config.json": b"{}"})
    draw = random.Random(3)
    texts = ["".join(draw.choices("ab/@.-_ é*", k=draw.randint(1, 12))) for _ in range(300)]
    texts += ["org/name@v2", "org/name/", "/org/name", "org/name@", "name", "org/name/config.json", "", "org/name\0"]
    assert [cached(text) for text in texts] == texts
    assert cached("org/name", "dataset") == "org/name"
    Path("org/name").mkdir(parents=True)
    assert cached("org/name") == "org/name"
    assert revision_of("org/name") is None
    assert not is_same_repository("org/name", "org/name")


def test_the_cache_is_where_the_variables_say(home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variables, folder in (
        ({"HF_HUB_CACHE": str(tmp_path / "a" / "hub")}, tmp_path / "a"),
        ({"XDG_CACHE_HOME": str(tmp_path / "b")}, tmp_path / "b" / "huggingface"),
        ({"HOME": str(tmp_path / "c")}, tmp_path / "c" / ".cache" / "huggingface"),
    ):
        with monkeypatch.context() as patch:
            patch.delenv("HF_HOME")
            patch.delenv("XDG_CACHE_HOME", raising=False)
            for name, value in variables.items():
                patch.setenv(name, value)
            snapshot = put(folder, "org/name", OLD, {"config.json": b"{}"})
            assert cached("org/name") == str(snapshot)
    assert constants.HF_HUB_CACHE.endswith("/hub")


def test_a_command_fetches_what_is_missing(home: Path) -> None:
    assert "run hf download org/name --local-dir models/name)" in how_to_download("org/name")
    assert "run hf download org/name --revision v2 --local-dir models/name)" in how_to_download("org/name@v2")
    assert "hf download org/name --repo-type dataset --local-dir datasets/name)" in how_to_download(
        "org/name", "dataset"
    )
    assert "hf download ORG/Qwen3-8B --local-dir models/Qwen3-8B)" in how_to_download("models/Qwen3-8B")
    assert "hf download ORG/x --repo-type dataset --local-dir datasets/x)" in how_to_download("datasets/x", "dataset")
    Path("data").mkdir()
    for path in ("data/chats", "corpora/train.jsonl", "corpora/a.parquet", "corpora/b.jsonl.gz", "../name", "a/b/c"):
        assert how_to_download(path, "dataset") == "", "a local path"
        with pytest.raises(DataError) as caught:
            record_files(path)
        assert "hf download" not in str(caught.value)
    with refuses(ConfigError, "hf download org/name --revision v2 --local-dir models/name"):
        load_config(content(model={"hf": "org/name@v2"}))
    with refuses(DataError, "hf download org/name --repo-type dataset --local-dir datasets/name"):
        record_files("org/name")
    with refuses(ConfigError, "hf download org/name --local-dir models/name"):
        model_at(Path("org/name"))


def test_records_of_a_dataset_are_those_of_one_split(home: Path) -> None:
    line = json.dumps({"prompt": "a", "response": "b"}).encode() + b"\n"
    files = {"README.md": b"#", "data/train-0.jsonl": line, "data/train-1.jsonl": line, "data/test-0.jsonl": line}
    snapshot = put(home, "org/chats", OLD, files, "dataset")
    put(home, "org/one", OLD, {"data/train-0.jsonl": line}, "dataset")
    data = {"kind": "sft", "seq_length": 8, "tokenizer": "x", "train": [{"path": "org/chats/data/train-*"}]}
    data["valid"] = {"chats": [{"path": "org/chats"}], "one": [{"path": "org/one"}], "local": [{"path": "a.jsonl"}]}
    sources = load_config(content(data=data)).data
    assert sources.train[0].path == f"{snapshot}/data/train-*"  # type: ignore[union-attr]
    assert [file.path.name for file in record_files(sources.train[0].path)] == ["train-0.jsonl", "train-1.jsonl"]  # type: ignore[union-attr]
    chats, one, local = (part[0].path for part in sources.valid_sets.values())  # type: ignore[union-attr]
    assert [file.path.name for file in record_files(one)] == ["train-0.jsonl"]
    assert local == "a.jsonl"
    with refuses(DataError, "test, train"):
        record_files(chats)


def test_a_run_keeps_the_revision_that_it_started_from(home: Path, pool: Pool, tmp_path: Path) -> None:
    """The manifest names it; `main` moves between two starts."""
    sizes: dict[str, Any] = {"num_hidden_layers": 1, "vocab_size": 64}
    save("llama", tmp_path / "old", dtype=torch.float32, **sizes)
    old = put(home, "org/name", OLD, files_of(tmp_path / "old"))
    sections = content(model={"hf": "org/name"}, run__dir=str(tmp_path / "run"), data__seq_length=8)
    sections["train"] |= {"num_steps": 1, "global_batch_size": 2, "precision": "fp32", "device": "cpu"}
    sections["metrics"] = {"tensorboard": False}
    sections["optimizer"]["schedule"] = "constant"
    pool.run(train_fresh, Layout(), load_config(sections))
    put(home, "org/name", NEW, files_of(tmp_path / "old") | {"README.md": b"new"})
    sections["train"]["num_steps"] = 2
    again = load_config({**sections, "model": {"hf": "org/name"}})
    assert again.model.hf != str(old)
    pool.run(train_fresh, Layout(), load_config({**sections, "model": {"hf": "org/name"}}))
    for step in (1, 2):
        folder = tmp_path / "run" / "checkpoints" / f"step_{step:08d}"
        assert json.loads((folder / "mtrain.json").read_text())["inputs"]["model.hf"] == f"org/name@{OLD}"
    assert load_config([tmp_path / "run" / "config.yaml"]).model.hf == str(old)
