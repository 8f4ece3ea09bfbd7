"""Images of Mistral 3: ids and pixels are those of transformers' processor, which writes a token after each row."""

from __future__ import annotations

import json
import random
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import AutoImageProcessor, AutoTokenizer
from transformers.models.pixtral import image_processing_pil_pixtral as of_pillow

from mtrain.base.errors import DataError
from mtrain.config.schema.data import ImagesSection, SftSection
from mtrain.config.schema.vision import VisionSection
from mtrain.core.batch.sample import HERE, TokenizedSample
from mtrain.data.chat.encoder import with_features
from mtrain.data.encoding.encoder import RecordEncoder
from mtrain.data.samples.images import images_of
from mtrain.data.samples.preference import PreferenceDataset
from mtrain.data.samples.sft import RowLimit, SftDataset, TooLong
from mtrain.hf.images import ImageProcessor
from mtrain.hf.tokenizer.tokenizer import load_tokenizer
from mtrain.serve.images import Interleaved, SentImage, written_out
from mtrain.training.given_images import GivenImages
from tests.config.samples import config
from tests.data.chat.cases import write_folder
from tests.data.images.cases import drawn_turns, picture
from tests.data.images.test_image_samples import PARTS, Part, PartsEncoder, cache_of
from tests.messages import refuses

PATCH, MERGE, LONGEST = 4, 2, 40
IMAGE, BREAK, END = "[IMG]", "[IMG_BREAK]", "[IMG_END]"
TEMPLATE = """{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}[INST]
{%- if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}
{%- if part.type == 'image' %}[IMG]{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}[/INST]
{%- else %}{{ message.content }}{{ eos_token }}{% endif %}{% endfor %}"""
PROCESSOR = {
    "image_processor_type": "PixtralImageProcessorFast",
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.5, 0.6, 0.7],
    "size": {"longest_edge": LONGEST},
    "patch_size": PATCH,
}
SAID = {"processor_class": "PixtralProcessor", "patch_size": PATCH, "spatial_merge_size": MERGE}


def judge_of(folder: Path) -> Any:
    """Opens transformers' processor, whose module imports torchvision for a function that Pillow's has as well."""
    name = "transformers.models.pixtral.image_processing_pixtral"
    with mock.patch.dict(sys.modules, {name: of_pillow} if find_spec("torchvision") is None else {}):
        from transformers.models.pixtral.processing_pixtral import PixtralProcessor

    class Judge(PixtralProcessor):
        """Processor without the check for torchvision."""

        def __init__(self, image_processor: Any, tokenizer: Any, chat_template: str) -> None:
            super().__init__(image_processor, tokenizer, PATCH, MERGE, chat_template=chat_template)

    return Judge(AutoImageProcessor.from_pretrained(folder), AutoTokenizer.from_pretrained(folder), TEMPLATE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mistral3(tmp_path_factory.mktemp("mistral3"))


def write_mistral3(folder: Path) -> Path:
    """Writes tokenizer, template and processor as Mistral Small is published."""
    write_folder(folder, TEMPLATE)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([IMAGE, BREAK, END])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "bos_token": "<s>"}))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    (folder / "processor_config.json").write_text(json.dumps(SAID))
    return folder


def encoder_of(folder: Path, **limits: int) -> tuple[RecordEncoder, ImageProcessor]:
    """Opens the folder as a run does."""
    section = SftSection.model_validate(
        {"kind": "sft", "seq_length": 64, "tokenizer": str(folder), "train": [{"path": "a"}]}
    )
    images = ImageProcessor(folder, vision_of(folder), ImagesSection.model_validate(limits))
    return RecordEncoder(section, load_tokenizer(folder), images), images


def vision_of(folder: Path) -> VisionSection:
    return VisionSection(
        kind="mistral3",
        num_layers=1,
        hidden_size=8,
        ffn_hidden_size=8,
        num_attention_heads=2,
        num_positions=1,
        patch_size=PATCH,
        merge_size=MERGE,
        frames_per_patch=1,
        image_token=Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id(IMAGE),
    )


def drawn(draw: random.Random, folder: Path) -> dict[str, Any]:
    """Draws a conversation of texts and images in any order; some have none."""
    messages: list[dict[str, Any]] = []
    for parts, answer in drawn_turns(draw, folder):
        messages.append({"role": "user", "content": parts})
        messages.append({"role": "assistant", "content": answer})
    return {"messages": messages}


@pytest.mark.parametrize("seed", range(8))
def test_a_conversation_is_that_of_transformers(seed: int, folder: Path, tmp_path: Path) -> None:
    judge = judge_of(folder)
    record = drawn(random.Random(seed), tmp_path)
    expected = judge.apply_chat_template(record["messages"], tokenize=True, return_dict=True, return_tensors="pt")
    encoder, processor = encoder_of(folder)
    sample = encoder.encode(record, tmp_path)
    assert sample.ids.tolist() == expected["input_ids"][0].tolist()
    of_images = [judge.tokenizer.convert_tokens_to_ids(each) for each in (IMAGE, BREAK, END)]
    assert not sample.loss_weights[np.isin(sample.ids, of_images)].any()
    found = images_of(sample, 0, len(sample.ids), processor)
    sizes = expected["image_sizes"].tolist() if "image_sizes" in expected else []
    assert [list(image.grid[1:]) for image in sample.images] == [[h // PATCH, w // PATCH] for h, w in sizes]
    if found is None:
        assert not sizes
        return
    assert (found.places >= 0).tolist() == (sample.ids[:-1] == of_images[0]).tolist()
    assert found.places[found.places >= 0].tolist() == list(range(len(found.pixels) // MERGE**2))
    first = 0
    for (height, width), whole in zip(sizes, expected["pixel_values"].numpy(), strict=True):
        columns = width // PATCH
        for number, patch in enumerate(found.pixels[first : first + height * width // PATCH**2]):
            top, left = PATCH * (number // columns), PATCH * (number % columns)
            np.testing.assert_array_equal(
                patch.reshape(3, PATCH, PATCH), whole[:, top : top + PATCH, left : left + PATCH]
            )
        first += height * width // PATCH**2


@pytest.mark.parametrize("seed", range(4))
def test_programs_and_clients_give_images_in_the_tokens_of_transformers(
    seed: int, folder: Path, tmp_path: Path
) -> None:
    record = drawn(random.Random(seed), tmp_path)
    encoder, processor = encoder_of(folder)
    sample = encoder.encode(record, tmp_path)
    data = {"kind": "sft", "seq_length": 256, "train": [{"path": "a"}], "tokenizer": str(folder)}
    run = config(model__vision=vision_of(folder).model_dump(), data=data)
    given_images = GivenImages(run.model, run.data)
    contents = [image.content for image in sample.images]
    (found,) = given_images.of_prompts([sample.ids.tolist()], [contents])
    expected = images_of(sample, 0, len(sample.ids) + 1, processor)
    assert (found is None) == (expected is None)
    if found is None or expected is None:
        return
    for name in ("pixels", "grids", "places", "axes"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
    wrong = sample.ids.copy()
    wrong[np.flatnonzero(wrong == processor.tokens((1, MERGE, MERGE))[-1])[0]] = 1
    with refuses(DataError, "image 0", "side by side"):
        given_images.of_prompts([wrong.tolist()], [contents])
    # a client sends the text alone
    counts = [len(processor.tokens(image.grid)) for image in sample.images]
    starts = np.flatnonzero(sample.ids == processor.image_token)[
        np.cumsum([0, *(processor.num_features(image.grid) for image in sample.images[:-1])])
    ]
    is_text = np.ones(len(sample.ids), np.bool_)
    for start, count in zip(starts, counts, strict=True):
        is_text[start : start + count] = False
    sent = [
        SentImage(image.content, count, int(is_text[:start].sum()))
        for image, count, start in zip(sample.images, counts, starts, strict=True)
    ]
    (written,) = written_out({"the prompt": Interleaved(sample.ids[is_text], sent)}, given_images)
    assert written.tolist() == sample.ids.tolist()
    assert written.dtype == sample.ids.dtype


def test_what_transformers_would_read_otherwise_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture(random.Random(1)))
    image = {"type": "image", "path": "a.png"}
    asked = {"messages": [{"role": "user", "content": [image]}, {"role": "assistant", "content": "A cat."}]}
    assert isinstance(encoder_of(folder)[0].encode(asked, tmp_path), TokenizedSample)
    with refuses(DataError, "data.images.min_pixels"):
        encoder_of(folder, max_pixels=100)[0].encode(asked, tmp_path)
    for name, changed in {"spatial_merge_size=1": SAID | {"spatial_merge_size": 1}, "patch_size=16": {}}.items():
        (tmp_path / name).mkdir()
        for file in folder.iterdir():
            (tmp_path / name / file.name).write_bytes(file.read_bytes())
        (tmp_path / name / "processor_config.json").write_text(json.dumps(changed))
        with refuses(DataError, name, "model.vision"):
            encoder_of(tmp_path / name)
    (tmp_path / name / "processor_config.json").write_text(json.dumps(SAID | {"image_end_token": "[STOP]"}))
    with refuses(DataError, "[STOP]"):
        encoder_of(tmp_path / name)


class RowsEncoder(PartsEncoder):
    """Encoder of `PARTS` whose images have a token after each row."""

    def encode(self, record: dict[str, Any], folder: Path = HERE) -> TokenizedSample:
        """Encodes one record."""
        plain = super().encode(record, folder)
        return TokenizedSample(*with_features(*self._once(plain), plain.images, self._processor), images=plain.images)

    def _once(self, sample: TokenizedSample) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Keeps one token of each image, as a template writes it."""
        is_image = sample.ids == self._processor.image_token
        kept = ~is_image | np.append(True, ~is_image[:-1])
        return sample.ids[kept], sample.loss_weights[kept]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    parts=PARTS,
    seq_length=st.integers(21, 30),
    too_long=st.sampled_from(["end", "start", "split"]),
    is_pair=st.booleans(),
)
def test_no_cut_parts_an_image_from_its_last_token(
    parts: list[Part],
    seq_length: int,
    too_long: TooLong,
    is_pair: bool,
    folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    _, processor = encoder_of(folder)
    is_pair &= too_long != "split"  # a pair is never split
    cache = cache_of(tmp_path_factory.mktemp("rows"), [[*parts, 1]] * (1 + is_pair), processor, RowsEncoder)
    limit = RowLimit(seq_length, too_long, processor)
    found = PreferenceDataset(cache, range(1), limit, "pairs") if is_pair else SftDataset(cache, range(1), limit)
    end = processor.tokens((1, MERGE, MERGE))[-1]
    for number in range(len(found)):
        sample = found.sample(0, number)
        grids = np.empty((0, 3)) if sample.images is None else sample.images.grids
        assert int((sample.tokens == end).sum()) == len(grids)
        num_features = int((sample.tokens == processor.image_token).sum())
        assert num_features == grids.prod(axis=1).sum() // MERGE**2
        if sample.images is not None:
            assert sample.images.places.max() == num_features - 1
            assert sample.images.axes.tolist() == [[token] * 3 for token in range(len(sample.tokens))]
