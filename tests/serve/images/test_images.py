"""Images of the SDK's clients: numbers are those of transformers, and no image blocks a client."""

from __future__ import annotations

import base64
import json
import random
import struct
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tinker
import torch
from tinker import RequestFailedError, types
from tinker.proto import tinker_public_pb2

from mtrain.base.errors import DataError
from mtrain.config import Config
from mtrain.hf.schema.description import with_architecture
from mtrain.serve.desk import Desk, FullError
from mtrain.serve.operations import Done, Sample, SampleBody
from mtrain.serve.protocol import read_batch
from mtrain.training.sampling.params import SamplingParams
from tests.data.images.cases import image_token, judge_of, picture
from tests.data.images.models import loaded, write_model
from tests.fault_table import Notice
from tests.messages import refuses
from tests.parity.cases import Case, case
from tests.parity.compare import at_night
from tests.pool import Pool
from tests.serve.service import running, session

NEW = 4
LAYOUTS = [case(), case(tp=2, sp=True), case(pp=2), case(cp=2)]


class Asked(NamedTuple):
    """A prompt of text and images."""

    chunks: list[Any]
    """Chunks of the SDK."""
    ids: list[int]
    inputs: dict[str, Any]
    """What transformers reads besides ids."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base") / "small"
    path.mkdir()
    return write_model(path)


def asked_of(folder: Path, num_images: int, seed: int, with_count: bool = True) -> Asked:
    draw, judge, token = random.Random(seed), judge_of(folder), image_token(folder)
    contents = [
        picture(draw, size=(8 * draw.randint(3, 6), 8 * draw.randint(2, 5)), format="PNG") for _ in range(num_images)
    ]
    parts: list[dict[str, Any]] = [{"type": "text", "text": f"number {seed}?"}]
    for number, content in enumerate(contents):
        path = folder / f"{seed}-{number}.png"
        path.write_bytes(content)
        parts.insert(draw.randint(0, len(parts)), {"type": "image", "path": str(path)})
    order = [Path(part["path"]).read_bytes() for part in parts if part["type"] == "image"]
    how = {"tokenize": True, "return_dict": True, "return_tensors": "pt", "add_generation_prompt": True}
    inputs = dict(judge.apply_chat_template([{"role": "user", "content": parts}], **how))
    ids = inputs["input_ids"][0].tolist()
    chunks: list[Any] = []
    left = iter(order)
    runs: list[list[int]] = []
    for id_ in ids:
        if runs and (runs[-1][-1] == token) == (id_ == token):
            runs[-1].append(id_)
        else:
            runs.append([id_])
    for run in runs:
        if run[0] == token:
            expected = len(run) if with_count else None
            chunks.append(types.ImageChunk(data=next(left), format="png", expected_tokens=expected))
        else:
            chunks.append(types.EncodedTextChunk(tokens=run))
    seen = {name: each for name, each in inputs.items() if name in ("pixel_values", "image_grid_thw")}
    return Asked(chunks, ids, seen)


def log_probs(folder: Path, asked: Asked, ids: list[int]) -> Any:
    """Computes the log-probabilities of the whole vocabulary at each place by transformers, in float64."""
    whole = torch.tensor([ids])
    seen = {name: each.double() if each.is_floating_point() else each for name, each in asked.inputs.items()}
    kinds = (whole == image_token(folder)).int()
    with torch.no_grad():
        return loaded(folder)(input_ids=whole, mm_token_type_ids=kinds, **seen).logits[0].log_softmax(-1)


def config_of(one: Case, folder: Path, **vision: Any) -> Config:
    content = one.config().model_dump(exclude={"model"}, exclude_unset=True)
    content["model"] = {"hf": str(folder), "vision": vision}
    content["data"] = {"kind": "mock", "seq_length": 64}
    return Config.model_validate(with_architecture(content))


def datum(asked: Asked) -> types.Datum:
    """Weighs the last tokens, which follow all images."""
    *first, last = asked.chunks
    chunks = [*first, types.EncodedTextChunk(tokens=last.tokens[:-1])]
    weights = np.zeros(len(asked.ids) - 1, np.float32)
    weights[-3:] = [1.0, 0.5, 2.0]
    return types.Datum(
        model_input=types.ModelInput(chunks=chunks),
        loss_fn_inputs={"target_tokens": np.array(asked.ids[1:]), "weights": weights},
    )


@pytest.mark.waits
@pytest.mark.parametrize("one", [at_night(LAYOUTS[0]), LAYOUTS[1], *map(at_night, LAYOUTS[2:])], ids=str)
def test_a_client_gets_the_numbers_of_transformers(pool: Pool, folder: Path, tmp_path: Path, one: Case) -> None:
    every = [asked_of(folder, 1, 1), asked_of(folder, 2, 2, with_count=False), asked_of(folder, 0, 3)]
    config = config_of(one, folder)
    with running(pool, one, config, tmp_path / "base") as address, session(address) as service:
        client = service.create_lora_training_client("small", rank=2, seed=3).result()
        done = client.forward_backward([datum(each) for each in every], "cross_entropy").result()
        sampler = client.save_weights_and_get_sampling_client().result()
        greedy = types.SamplingParams(max_tokens=NEW, temperature=0.0, seed=1, stop=[])
        inputs = [types.ModelInput(chunks=each.chunks) for each in every]
        answers = [sampler.sample(each, 2, greedy).result().sequences for each in inputs]
        scored = [sampler.compute_logprobs(each).result() for each in inputs]
        topk = sampler.sample(inputs[0], 1, greedy, include_prompt_logprobs=True, topk_prompt_logprobs=2).result()
        before = client.forward([datum(each) for each in every], "cross_entropy").result()
        assert client.optim_step(types.AdamParams(learning_rate=0.1)).result().metrics["grad_norm"] > 0
        after = client.forward([datum(each) for each in every], "cross_entropy").result()
    loss = 0.0
    for asked, output, both, score in zip(every, done.loss_fn_outputs, answers, scored, strict=True):
        theirs = log_probs(folder, asked, asked.ids)
        exact = theirs[:-1].gather(-1, torch.tensor(asked.ids[1:])[:, None])[:, 0]
        np.testing.assert_allclose(output["logprobs"].to_numpy(), exact, rtol=0, atol=1e-5)
        np.testing.assert_allclose(score[1:], exact, rtol=0, atol=1e-5)
        loss -= float((exact[-3:] * torch.tensor([1.0, 0.5, 2.0])).sum())
        assert both[0].tokens == both[1].tokens
        likely = log_probs(folder, asked, [*asked.ids, *both[0].tokens])[len(asked.ids) - 1 : -1]
        assert both[0].tokens == likely.argmax(-1).tolist()
        np.testing.assert_allclose(both[0].logprobs, likely.amax(-1), rtol=0, atol=1e-5)
    assert done.metrics["loss:sum"] == pytest.approx(loss, abs=1e-4)
    first = log_probs(folder, every[0], every[0].ids).topk(2)
    assert topk.topk_prompt_logprobs is not None
    for found, tokens in zip(topk.topk_prompt_logprobs[1:], first.indices[:-1].tolist(), strict=True):
        assert [token for token, _ in found] == tokens
    for one_of, other in zip(seen(before), seen(done), strict=True):
        assert one_of == pytest.approx(other, abs=1e-6)
    assert seen(after) != seen(before)


def seen(result: Any) -> list[list[float]]:
    return [each["logprobs"].to_numpy().tolist() for each in result.loss_fn_outputs]


def huge() -> bytes:
    """Returns the beginning of a PNG of 400 million pixels."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", 20_000, 20_000, 8, 2, 0, 0, 0)
    data = zlib.compress(bytes(1000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


@pytest.mark.fault(
    "clients",
    "an image that is damaged, too large, of another size than expected, or named by its location",
    happens="the call fails with the reason; the client's next calls run, and a step without that part is not made",
    exit_code=None,
)
@pytest.mark.waits
def test_no_image_blocks_a_client(pool: Pool, folder: Path, tmp_path: Path, notice: Notice) -> None:
    one, good = LAYOUTS[0], asked_of(folder, 1, 4)
    content, token = picture(random.Random(1), format="PNG"), image_token(folder)
    png: dict[str, Any] = {"format": "png"}
    wrong: list[tuple[list[Any], str]] = [
        ([types.ImageChunk(data=content[:100], **png)], "cannot be read"),
        ([types.ImageChunk(data=b"\x89PNG\r\n\x1a\n", **png)], "cannot be read"),
        ([types.ImageChunk(data=b"", **png)], "begin"),
        ([types.ImageChunk(data=content, format="jpeg")], "begin"),
        ([types.ImageChunk(data=huge(), **png)], "pixels"),
        ([types.ImageChunk(data=content, expected_tokens=1000, **png)], "expected_tokens=1000"),
        ([types.ImageChunk(data=content, expected_tokens=0, **png)], "expected_tokens=0"),
        ([types.EncodedTextChunk(tokens=[token]), types.ImageChunk(data=content, **png)], "image token"),
    ]
    pointer = types.ImageAssetPointerChunk(format="png", location="https://a.b/c.png", expected_tokens=4)
    errors = (tinker.APIStatusError, RequestFailedError)
    greedy = types.SamplingParams(max_tokens=2, temperature=0.0)
    with running(pool, one, config_of(one, folder), tmp_path / "base") as address, session(address) as service:
        client = service.create_lora_training_client("small", rank=2, seed=3).result()
        sampler = client.save_weights_and_get_sampling_client().result()
        before = client.forward([datum(good)], "cross_entropy").result()
        with notice:
            for chunks, reason in wrong:
                prompt = types.ModelInput(chunks=[*chunks, types.EncodedTextChunk(tokens=[1, 2])])
                data = types.Datum(model_input=prompt, loss_fn_inputs={"target_tokens": [1, 2]})
                with pytest.raises(errors, match=reason):
                    client.forward_backward([datum(good), data], "cross_entropy").result(60)
                with pytest.raises(RequestFailedError, match=reason):
                    client.optim_step(types.AdamParams()).result(60)  # half a batch
                with pytest.raises(errors, match=reason):
                    sampler.sample(prompt, 1, greedy).result(60)
            with pytest.raises(errors, match="location"):
                sampler.sample(types.ModelInput(chunks=[pointer]), 1, greedy).result(60)
        (found,) = seen(client.forward([datum(good)], "cross_entropy").result(60))
        assert found == pytest.approx(seen(before)[0], abs=1e-6)
        client.forward_backward([datum(good)], "cross_entropy")
        assert client.optim_step(types.AdamParams()).result(60).metrics["grad_norm"] > 0


def test_another_size_than_that_of_the_image_is_refused() -> None:
    """The SDK's message has a field for it, which no client of 0.38 sets."""
    sent = tinker_public_pb2.ForwardBackwardRequest(model_id="a", seq_id=1, loss_fn="cross_entropy")
    image = sent.data.add().model_input.add().image
    image.data, image.format = picture(random.Random(1), format="PNG"), "png"
    (read,) = read_batch(sent.SerializeToString()).data
    assert [(each.content, each.expected_tokens, each.before) for each in read.images] == [(image.data, None, 0)]
    image.override_dimensions.width = 4
    with refuses(DataError, "override_dimensions"):
        read_batch(sent.SerializeToString())


def test_prompts_with_images_wait_by_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtrain.serve.desk._MOST_BYTES", 3000)
    chunk = {"type": "image", "data": base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(1000)).decode(), "format": "png"}
    prompt = {"chunks": [chunk, {"type": "encoded_text", "tokens": [1]}]}
    sent = {"sampling_session_id": "a", "seq_id": 1, "prompt": prompt, "sampling_params": {}}
    sample = Sample(SampleBody.model_validate_json(json.dumps(sent)), SamplingParams(), ())
    desk = Desk(lambda request: None)
    first, _ = desk.submit(sample), desk.submit(sample)
    with pytest.raises(FullError):
        desk.submit(sample)
    desk.finish(first, Done(b""))
    desk.submit(sample)
