"""Engine with images: log-probabilities, answers and policy losses are those of transformers in float64."""

from __future__ import annotations

import base64
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from mtrain import Datum
from mtrain.arch.layout import Layout
from mtrain.config import Config
from mtrain.hf.schema.description import with_architecture
from mtrain.training.sampling.params import SamplingParams
from tests.data.images.cases import image_token, judge_of, picture
from tests.data.images.models import loaded, write_model
from tests.messages import check_message
from tests.parity.image_models import Kind
from tests.pool import Pool
from tests.training.images import engine_ranks

NEW = 5
TRAINED = {"freeze_tower": False, "freeze_projector": False}
SAMPLING = SamplingParams(max_new_tokens=NEW, seed=3)
LR = 1e-3


class Question(NamedTuple):
    """Prompt in both forms."""

    ids: list[int]
    images: list[Any]
    """Values for `Datum.images`."""
    inputs: dict[str, Any]
    """What transformers reads besides ids."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[Kind, Path]:
    kinds: tuple[Kind, ...] = ("dense", "experts")
    return {kind: write_model(tmp_path_factory.mktemp(kind), kind) for kind in kinds}


@cache
def questions(folder: Path) -> list[Question]:
    """Asks about no, one and two images, each given in another way."""
    draw, judge, found = random.Random(8), judge_of(folder), []
    for number in range(4):
        contents = [picture(draw, size=(8 * draw.randint(3, 6), 8 * draw.randint(2, 5))) for _ in range(number % 3)]
        paths = [folder / f"{number}-{index}.png" for index in range(len(contents))]
        for path, content in zip(paths, contents):
            path.write_bytes(content)
        parts: list[dict[str, Any]] = [{"type": "text", "text": f"number {number}?"}]
        parts[draw.randint(0, 1) : 1] = [{"type": "image", "path": str(path)} for path in paths]
        messages = [{"role": "user", "content": parts}]
        how = {"tokenize": True, "return_dict": True, "return_tensors": "pt", "add_generation_prompt": True}
        inputs = dict(judge.apply_chat_template(messages, **how))
        ids = inputs.pop("input_ids")[0].tolist()
        forms = [*contents[:1], *({"base64": base64.b64encode(each).decode()} for each in contents[1:])]
        seen = {name: each for name, each in inputs.items() if name in ("pixel_values", "image_grid_thw")}
        found.append(Question(ids, forms if number < 3 else [str(path) for path in paths], seen))
    return found


def config_of(folder: Path, layout: Layout, **sections: Any) -> Config:
    content = {
        "run": {"dir": str(folder / "run")},
        "model": {"hf": str(folder), "vision": TRAINED},
        "train": {"global_batch_size": 4, "micro_batch_size": 2, "num_steps": 4, "precision": "fp32"},
        "optimizer": {"lr": LR, "schedule": "constant", "weight_decay": 0.0, "clip_grad": 1e9},
        "layout": {"tp": layout.tp, "sp": layout.sp, "cp": layout.cp, "pp": layout.pp, "ep": layout.ep},
        "data": {"kind": "mock", "seq_length": 64},
        **sections,
    }
    return Config.model_validate(with_architecture(content))


def inputs_of(is_image: Tensor, question: Question) -> dict[str, Tensor]:
    """Returns what transformers reads besides ids; `is_image` marks tokens of images, [1, tokens]."""
    seen = {name: each.double() if each.is_floating_point() else each for name, each in question.inputs.items()}
    return {"mm_token_type_ids": is_image.int(), **seen}


def log_probs(model: Any, ids: Sequence[int], question: Question, token: int) -> Tensor:
    """Computes the log-probability of each token but the first by transformers."""
    whole = torch.tensor([list(ids)])
    logits: Tensor = model(input_ids=whole, **inputs_of(whole == token, question), use_cache=False).logits[0]
    return logits[:-1].log_softmax(-1).gather(-1, whole[0, 1:, None])[:, 0]


LAYOUTS: list[tuple[Kind, Layout]] = [
    ("dense", Layout()),
    ("dense", Layout(tp=2, sp=True)),
    ("dense", Layout(cp=2)),
    ("dense", Layout(pp=2)),
    ("experts", Layout(dp=2, ep=2)),
]


@pytest.mark.parametrize(("kind", "layout"), LAYOUTS, ids=["one rank", "tp2-sp", "cp2", "pp2", "dp2-ep2 of experts"])
def test_a_step_of_a_policy_on_images_is_that_of_transformers(
    pool: Pool, folders: dict[Kind, Path], kind: Kind, layout: Layout
) -> None:
    """Answers are drawn, scored and trained with PPO's loss; experts are replayed from the pass that drew them."""
    folder = folders[kind]
    asked, token = questions(folder), image_token(folder)
    config = config_of(folder, layout)
    rng = np.random.default_rng(2)
    advantages = rng.normal(size=len(asked)).tolist()
    shifts = [rng.normal(0, 0.2, NEW).tolist() for _ in asked]
    given = [(each.ids, each.images) for each in asked]
    found = pool.run(
        engine_ranks.step_of_policy, layout, config, given, SAMPLING, advantages, shifts, kind == "experts"
    )
    step = found[0]
    assert all(each.answers == step.answers for each in found)
    model = loaded(folder, kind)
    texts = [[*each.ids, *answer] for each, (answer, _) in zip(asked, step.answers, strict=True)]
    theirs = [log_probs(model, ids, each, token) for ids, each in zip(texts, asked, strict=True)]
    total = torch.zeros((), dtype=torch.float64)
    for scored, (_, drawn), exact, before, advantage, shift in zip(
        step.before, step.answers, theirs, step.before, advantages, shifts, strict=True
    ):
        np.testing.assert_allclose(scored, exact.detach(), rtol=0, atol=1e-5)
        np.testing.assert_allclose(scored[-NEW:], drawn, rtol=0, atol=1e-5)
        ratio = (exact[-NEW:] - (torch.tensor(before[-NEW:]).double() + torch.tensor(shift))).exp()
        total = total - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum() / (NEW * len(asked))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    total.backward()
    norm = torch.stack([each.grad.norm() for each in model.parameters() if each.grad is not None]).norm()
    assert model.model.visual.patch_embed.proj.weight.grad.abs().max() > 0
    assert step.loss == pytest.approx(total.item(), abs=1e-5)
    assert step.grad_norm == pytest.approx(float(norm), rel=1e-4)
    if kind == "experts":
        return  # the oracle would route anew
    optimizer.step()
    for scored, ids, each in zip(step.after, texts, asked, strict=True):
        exact = log_probs(model, ids, each, token).detach()
        np.testing.assert_allclose(scored, exact, rtol=0, atol=2e-4)


@pytest.mark.parametrize("is_before", [False, True], ids=["after", "before"])
def test_an_image_token_that_the_model_drew_is_text(pool: Pool, folders: dict[Kind, Path], is_before: bool) -> None:
    folder = folders["dense"]
    asked, token = questions(folder)[1], image_token(folder)
    # transformers wants an image for the token, but not for another one with the same embedding
    other = 0
    assert other not in asked.ids
    parts = [(asked.ids, 0.0), ([7, other, 8], 1.0)]
    renamed = [id_ for ids, _ in (reversed(parts) if is_before else parts) for id_ in ids]
    weights = [weight for ids, weight in (reversed(parts) if is_before else parts) for _ in ids]
    ids = [token if id_ == other else id_ for id_ in renamed]
    config = config_of(folder, Layout())
    (scored,) = pool.run(engine_ranks.scored, Layout(), config, [Datum(ids, weights, images=asked.images)])[0]
    model = loaded(folder)
    model.model.language_model.embed_tokens.weight.data[other] = model.model.language_model.embed_tokens.weight[token]
    whole = torch.tensor([renamed])
    logits = model(input_ids=whole, **inputs_of(whole == token, asked)).logits[0].detach()
    exact = logits[:-1].log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
    np.testing.assert_allclose(scored, exact, rtol=0, atol=1e-5)


def test_images_that_do_not_fit_are_refused(pool: Pool, folders: dict[Kind, Path]) -> None:
    folder = folders["dense"]
    one, token = questions(folder)[1], image_token(folder)
    first = one.ids.index(token)
    between = [*one.ids[: first + 1], 7, *one.ids[first + 1 :]]
    short = [*one.ids[:first], *one.ids[first + 1 :]]
    cases: list[tuple[Datum, tuple[str, ...]]] = [
        (Datum(one.ids), ("image token", "0 image(s)")),
        (Datum(short, images=one.images), ("image token", "1 image(s)")),
        (Datum([*one.ids, token], images=one.images), ("image token",)),
        (Datum(between, images=one.images), ("side by side", "image 0")),
        (Datum(one.ids, images=[b"nothing"]), ("sample 0: image 0", "cannot be read")),
        (Datum(one.ids, images=["nowhere.png"]), ("image 0", "nowhere.png")),
        (Datum(one.ids, images=[{"url": "https://a.b/c.png"}]), ("downloaded",)),
        (Datum(one.ids, images=[7]), ("int",)),
        (Datum(one.ids, images=b"x"), ("bytes", "list")),
    ]
    prompts: list[tuple[Any, Any, tuple[str, ...]]] = [
        ([one.ids], None, ("prompt 0", "image token")),
        ([one.ids, one.ids], [one.images], ("1 prompt", "2 prompts")),
        ([one.ids], [[*one.images, *one.images]], ("2 image(s)",)),
    ]
    config = config_of(folder, Layout())
    found = pool.run(
        engine_ranks.refusals, Layout(), config, [datum for datum, _ in cases], [each[:2] for each in prompts]
    )[0]
    for message, facts in zip(found, [facts for _, facts in cases] + [facts for *_, facts in prompts], strict=True):
        check_message(message)
        assert all(fact in message for fact in facts), message


def test_a_model_of_text_reads_no_image(pool: Pool, folders: dict[Kind, Path]) -> None:
    folder = folders["dense"]
    config = config_of(folder, Layout(), model={"hf": str(folder)})
    one = questions(folder)[1]
    (message, _) = pool.run(
        engine_ranks.refusals, Layout(), config, [Datum(one.ids, images=one.images)], [([one.ids], [one.images])]
    )[0]
    check_message(message)
    assert "model.vision" in message
