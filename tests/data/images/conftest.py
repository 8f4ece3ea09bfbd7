"""The folder of a small model that reads images, and its oracle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtrain.config.schema.data import SftSection
from mtrain.data.encoding.encoder import RecordEncoder
from mtrain.hf.tokenizer.tokenizer import load_tokenizer
from tests.data.images.cases import JudgeOfImages, judge_of, processor_of, write_vision_folder

MakeEncoder = Callable[..., RecordEncoder]


@pytest.fixture(scope="session")
def vision_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes tokenizer, template and image processor of a model."""
    return write_vision_folder(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="session")
def judge(vision_folder: Path) -> JudgeOfImages:
    """Opens transformers' processor."""
    return judge_of(vision_folder)


@pytest.fixture
def encoder(vision_folder: Path) -> MakeEncoder:
    """Returns a function that builds the encoder of records, by options of `data`."""

    def make(**options: Any) -> RecordEncoder:
        section = SftSection.model_validate(
            {"kind": "sft", "seq_length": 64, "tokenizer": str(vision_folder), "train": [{"path": "a"}], **options}
        )
        processor = processor_of(vision_folder, section.images.model_dump())
        return RecordEncoder(section, load_tokenizer(vision_folder), processor)

    return make
