"""Images in the token cache: stored once, read back, and tokenised again if an image has changed."""

from __future__ import annotations

import base64
import json
import random
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mtrain.base.errors import DataError
from mtrain.config.schema.data import SftSection
from mtrain.data.cache.encoding_workers import EncodingJob
from mtrain.data.cache.entry import TokenCache
from mtrain.data.cache.opening import CacheOptions, token_cache
from mtrain.data.encoding.encoder import RecordEncoder
from mtrain.data.formats.record_files import record_files
from mtrain.hf.tokenizer.tokenizer import load_tokenizer
from tests.data.images.cases import picture, processor_of
from tests.messages import refuses


def encoder_of(folder: Path) -> RecordEncoder:
    """Builds the encoder of a folder, in any process."""
    section = SftSection.model_validate(
        {"kind": "sft", "seq_length": 64, "tokenizer": str(folder), "train": [{"path": "a"}]}
    )
    return RecordEncoder(section, load_tokenizer(folder), processor_of(folder))


@pytest.fixture(autouse=True)
def hour_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets files that a test has just written count as settled; their real times stay."""
    real = time.time_ns
    monkeypatch.setattr("mtrain.data.cache.opening.time.time_ns", lambda: real() + 3600 * 10**9)


def record(*images: object) -> dict[str, Any]:
    """Returns a record with these images."""
    question = "<image> and ".join(["Look: "] * (len(images) > 0) + ["."] * len(images)) or "Hello"
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": f"{len(images)}."}]
    return {"messages": messages, **({"images": list(images)} if images else {})}


def write(folder: Path, seed: int = 0) -> Path:
    """Writes records with images in files, in the records, and with none; some twice."""
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    names = [f"pictures/{number}" for number in range(3)]
    contents = [picture(random.Random(seed + number)) for number in range(3)]
    for name, content in zip(names, contents):
        (folder / name).write_bytes(content)
    inside = [{"bytes": base64.b64encode(picture(random.Random(9 + number))).decode()} for number in range(2)]
    records = [
        record(),
        record(names[0]),
        record(inside[0], names[1], inside[1]),
        record(names[1], inside[0]),
        record(),
    ]
    path = folder / "a.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    return path


def opened(path: Path | str, cache: Path, vision_folder: Path, say: Any = print, **how: Any) -> TokenCache:
    """Opens the cache of a source."""
    job = EncodingJob(tuple(record_files(str(path))), partial(encoder_of, vision_folder))
    return token_cache(job, "", CacheOptions(cache, say=say, **how))


def contents(cache: TokenCache) -> list[list[bytes]]:
    """Returns the images of each sample."""
    return [[image.content for image in cache.read(index).images] for index in range(len(cache))]


def test_images_are_read_back(tmp_path: Path, vision_folder: Path) -> None:
    path = write(tmp_path / "data")
    cache = opened(path, tmp_path / "cache", vision_folder)
    encoder = encoder_of(vision_folder)
    given = [encoder.encode(json.loads(line), path.parent) for line in path.read_text().splitlines()]
    assert contents(cache) == [[image.content for image in sample.images] for sample in given]
    assert [[image.grid for image in cache.read(index).images] for index in range(5)] == [
        [image.grid for image in sample.images] for sample in given
    ]
    assert cache.images is not None
    stored = (cache.folder / "image_bytes").stat().st_size
    inside = {image.content for sample in given for image in sample.images if image.file is None}
    assert (len(inside), stored) == (2, sum(map(len, inside))), "equal images are stored once, and files are not"


def test_the_number_of_workers_changes_nothing(tmp_path: Path, vision_folder: Path) -> None:
    path = write(tmp_path / "data")
    one, two = (opened(path, tmp_path / str(count), vision_folder, num_workers=count) for count in (1, 2))
    assert one.fingerprint == two.fingerprint
    files = sorted(file.name for file in one.folder.iterdir())
    assert files == sorted(file.name for file in two.folder.iterdir())
    assert "image_files" in files
    for name in set(files) - {"image_files"}:  # which has the clock's word on whether a file's state can be trusted
        assert (one.folder / name).read_bytes() == (two.folder / name).read_bytes() or name == "entry.json"


@pytest.mark.parametrize("reads_all", [False, True])
def test_a_changed_picture_is_tokenised_anew(reads_all: bool, tmp_path: Path, vision_folder: Path) -> None:
    path, said = write(tmp_path / "data"), list[str]()
    first = opened(path, tmp_path / "cache", vision_folder)
    again = opened(path, tmp_path / "cache", vision_folder, said.append, reads_all=reads_all)
    assert (again.fingerprint, said) == (first.fingerprint, [])
    changed = picture(random.Random(77))
    (tmp_path / "data" / "pictures" / "1").write_bytes(changed)
    anew = opened(path, tmp_path / "cache", vision_folder, said.append, reads_all=reads_all)
    assert "pictures/1 was changed" in said[0]
    assert anew.fingerprint != first.fingerprint
    assert contents(anew)[2][1] == contents(anew)[3][0] == changed


def test_a_picture_that_was_only_touched_is_known(tmp_path: Path, vision_folder: Path) -> None:
    path, said = write(tmp_path / "data"), list[str]()
    opened(path, tmp_path / "cache", vision_folder)
    for picture_path in (tmp_path / "data" / "pictures").iterdir():
        picture_path.touch()
    opened(path, tmp_path / "cache", vision_folder, said.append)
    assert said == []


def test_data_may_be_moved_with_their_pictures(tmp_path: Path, vision_folder: Path) -> None:
    first = opened(write(tmp_path / "data"), tmp_path / "cache", vision_folder)
    said, before = list[str](), contents(first)
    shutil.move(tmp_path / "data", tmp_path / "elsewhere")
    moved = opened(tmp_path / "elsewhere" / "a.jsonl", tmp_path / "cache", vision_folder, said.append)
    assert (said, contents(moved), moved.fingerprint) == ([], before, first.fingerprint)


def test_where_an_image_is_changes_no_fingerprint(tmp_path: Path, vision_folder: Path) -> None:
    content, prints = picture(random.Random(0)), set()
    for number, source in enumerate([{"bytes": base64.b64encode(content).decode()}, {"path": "b"}, "c/d"]):
        folder = tmp_path / str(number)
        (folder / "c").mkdir(parents=True)
        for name in ("b", "c/d"):
            (folder / name).write_bytes(content)
        (folder / "a.jsonl").write_text(json.dumps(record(source)) + "\n")
        prints.add(opened(folder / "a.jsonl", tmp_path / "cache", vision_folder).fingerprint)
    assert len(prints) == 1


def test_a_missing_picture_is_refused_by_its_record(tmp_path: Path, vision_folder: Path) -> None:
    path = write(tmp_path / "data")
    opened(path, tmp_path / "cache", vision_folder)
    (tmp_path / "data" / "pictures" / "0").unlink()
    with refuses(DataError, "a.jsonl line 2", "pictures/0"):
        opened(path, tmp_path / "cache", vision_folder, list[str]().append)


def test_a_picture_that_changes_during_the_run_ends_it(tmp_path: Path, vision_folder: Path) -> None:
    path = write(tmp_path / "data")
    cache = opened(path, tmp_path / "cache", vision_folder)
    (tmp_path / "data" / "pictures" / "0").write_bytes(picture(random.Random(5)))
    with refuses(DataError, "pictures/0"):
        cache.read(1)
    (tmp_path / "data" / "pictures" / "0").unlink()
    with refuses(DataError, "pictures/0"):
        cache.read(1)


@pytest.mark.parametrize(
    "name", ["image_bytes", "image_grids", "image_digests", "image_spots", "image_samples", "image_files"]
)
def test_flipped_bits_are_noticed(name: str, tmp_path: Path, vision_folder: Path) -> None:
    path, said = write(tmp_path / "data"), list[str]()
    cache = opened(path, tmp_path / "cache", vision_folder)
    before = contents(cache)
    data = bytearray((cache.folder / name).read_bytes())
    data[len(data) // 2] ^= 4
    (cache.folder / name).write_bytes(data)
    again = opened(path, tmp_path / "cache", vision_folder, said.append)
    if name != "image_bytes":
        assert name in said[0]
        assert contents(again) == before
        return
    with refuses(DataError, str(cache.folder.parent)):
        contents(again)


def test_text_alone_has_no_arrays_of_images(tmp_path: Path, vision_folder: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(record()) + "\n")
    cache = opened(tmp_path / "a.jsonl", tmp_path / "cache", vision_folder)
    assert cache.images is None
    assert not list(cache.folder.glob("image*"))
