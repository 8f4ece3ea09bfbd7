"""Images in the data of a run: what loaders give to training, what people see of it, and what a start says."""

from __future__ import annotations

import base64
import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pydantic import ValidationError

from mtrain.base.errors import ConfigError
from mtrain.config import Config
from mtrain.data.loader import StepLoader
from mtrain.data.shown import as_text, headline
from mtrain.data.sources import Epochs, Sources
from mtrain.hf.images import for_browser
from mtrain.preflight.files import look_at_files
from mtrain.preflight.findings import Findings
from mtrain.preflight.sizes import look_at_sizes
from mtrain.report.pages.html import render
from tests.data.images.cases import picture, processor_of, vision_of
from tests.data.images.conftest import MakeEncoder
from tests.elements import read_html
from tests.messages import refuses

MakeRun = Callable[..., Config]


@pytest.fixture
def records(tmp_path: Path) -> list[dict[str, Any]]:
    """Writes six records with no, one or two images, and returns them."""
    draw, records = random.Random(0), list[dict[str, Any]]()
    for number in range(6):
        names = [f"{number}-{index}.image" for index in range(number % 3)]
        for name in names:
            (tmp_path / name).write_bytes(picture(draw, size=(8 * draw.randint(4, 6), 8 * draw.randint(2, 5))))
        question = "".join(f"<image> {index}, " for index in range(len(names))) + f"number {number}?"
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": f"It is {number}."}]
        records.append({"messages": messages, **({"images": names} if names else {})})
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return records


@pytest.fixture
def make_run(
    records: list[dict[str, Any]], make_config: Callable[..., Config], vision_folder: Path, tmp_path: Path
) -> MakeRun:
    """Returns a function that builds the configuration of a run on the records."""
    vision = vision_of(vision_folder)

    def make(model: dict[str, Any] | None = None, **data: Any) -> Config:
        given = {"kind": "sft", "train": [{"path": str(tmp_path / "a.jsonl")}], "tokenizer": str(vision_folder)}
        sections = {"model": {"vision": vision} if model is None else model, "train": {"global_batch_size": 3}}
        sections["train"] |= {"micro_batch_size": 1}
        cache = str(tmp_path / "cache")
        return make_config({**given, "seq_length": 128, "cache_dir": cache, **data}, **sections)

    return make


def test_a_loader_gives_the_images_of_the_records(
    make_run: MakeRun, records: list[dict[str, Any]], encoder: MakeEncoder, vision_folder: Path, tmp_path: Path
) -> None:
    loader, processor = StepLoader(make_run(), 0, 1), processor_of(vision_folder)
    read = 0
    for step in range(2):
        samples = loader.samples(step)
        for slot in range(3):
            sample, number = samples.sample(slot), loader.stream.locate(int(samples.numbers[slot])).index
            expected = encoder().encode(records[number], tmp_path)
            assert sample.tokens.tolist() == expected.ids[:-1].tolist()
            assert (sample.images is None) == (not expected.images)
            if sample.images is not None:
                assert sample.images.grids.tolist() == [list(image.grid) for image in expected.images]
                pixels = [processor.patches(image.content).pixels for image in expected.images]
                assert np.array_equal(sample.images.pixels, np.concatenate(pixels))
                read += len(pixels)
    assert read == 6, "an epoch has all images"


def test_batches_hold_the_images_of_their_samples(make_run: MakeRun) -> None:
    loader = StepLoader(make_run(), 0, 1)
    with loader.iterate(0) as steps:
        for step in range(3):
            batches, samples = next(steps), loader.samples(step)
            for slot, batch in enumerate(batches):
                sample = samples.sample(slot)
                width = len(sample.tokens)
                assert batch.tokens[0, :width].tolist() == sample.tokens.tolist()
                assert (batch.images is None) == (sample.images is None)
                if batch.images is not None and sample.images is not None:
                    assert np.array_equal(batch.images.pixels.numpy(), sample.images.pixels)
                    assert np.array_equal(batch.images.places[0, :width].numpy(), sample.images.places)
                    assert np.array_equal(batch.images.axes[0, :width].numpy(), sample.images.axes)
            entry = loader.next_entry(step + 1)
            assert entry == samples.entry(step + 1), "whatever the order in which threads read them"


def test_packed_rows_count_the_tokens_of_images(make_run: MakeRun) -> None:
    loader = StepLoader(make_run(packing={"batch": "sequences"}), 0, 1)
    samples = loader.samples(0)
    assert [samples.width(slot) for slot in range(3)] == [len(samples.sample(slot).tokens) for slot in range(3)]
    assert max(samples.width(slot) for slot in range(3)) > 30


def test_sizes_of_images_are_other_data(make_run: MakeRun) -> None:
    prints = [StepLoader(make_run(**how), 0, 1).fingerprint for how in ({}, {"images": {"max_pixels": 900}}, {})]
    assert prints[0] == prints[2] != prints[1]


def test_sizes_of_images_need_a_model_that_reads_them(make_run: MakeRun) -> None:
    with refuses(ConfigError, "data.images.max_pixels=900", "model.vision"):
        StepLoader(make_run(model={}, images={"max_pixels": 900}), 0, 1)
    with pytest.raises(ValidationError, match="min_pixels=9 must be at most max_pixels=8"):
        make_run(images={"min_pixels": 9, "max_pixels": 8})


def test_images_are_shown_at_their_places(make_run: MakeRun, tmp_path: Path) -> None:
    shown = StepLoader(make_run(), 0, 1).shown(1, 3)
    page, text = render("batch.html", shown=shown, headline=headline), as_text(shown)
    pictures = [image.attributes for image in read_html(page).all("img")]
    files = {path.read_bytes() for path in tmp_path.glob("*.image")}
    decoded = [base64.b64decode(str(each["src"]).removeprefix("data:image/png;base64,")) for each in pictures]
    assert len(decoded) == len(set(decoded)) > 0
    assert set(decoded) <= files
    assert "img-src data:" in page
    for sample in shown.samples:
        counts = [int(token.text.split()[2]) for token in sample.tokens if token.picture is not None]
        assert sum(counts) == sum(token.text == "" or token.picture is not None for token in sample.tokens)
        assert all(f"[image of {count} tokens]" in written for count in counts for written in (page, text))
    assert "<|image_pad|>" not in text


def test_a_page_has_only_images_that_browsers_show(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = {name: picture(random.Random(0), "RGB", (40, 20), format=name) for name in ("PNG", "JPEG", "GIF", "WEBP")}
    assert [for_browser(content) for content in shown.values()] == [*shown.values()]
    exif = Image.Exif()
    exif[0x0112] = 6
    monkeypatch.setattr("mtrain.hf.images._MOST_SHOWN_BYTES", 20_000)
    large = {"TIFF": (40, 20), "JPEG2000": (40, 20), "PNG": (2000, 1000), "JPEG": (2000, 1000)}
    for name, size in large.items():
        options = {"exif": exif} if name == "JPEG" else {}
        with Image.open(
            io.BytesIO(for_browser(picture(random.Random(0), "RGB", size, format=name, **options)))
        ) as image:
            assert image.format in ("PNG", "JPEG")
            assert image.size == {"JPEG": (512, 1024), "PNG": (1024, 512)}.get(name, size)


def test_a_start_counts_the_images(make_run: MakeRun, vision_folder: Path, tmp_path: Path) -> None:
    config, findings = make_run(), Findings()
    look_at_files(config, findings)
    look_at_sizes(Epochs(config, Sources(config).training()), findings)
    assert findings.faults == []
    grids = [processor_of(vision_folder).patches(path.read_bytes()).grid for path in tmp_path.glob("*.image")]
    sizes = [int(grid.prod()) for grid in grids]
    expected = f"tokens ({sum(sizes) // 4} of 6 images, the largest of {max(sizes)} patches)"
    assert any(expected in fact for _, fact in findings.facts), findings.facts
