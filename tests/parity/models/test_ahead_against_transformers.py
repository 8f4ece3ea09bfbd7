"""The prediction further ahead of Qwen3-Next and Qwen3.5 from the folder to the run.

Oracle: layers of transformers in float64, joined as vLLM 0.11 joins them (models/qwen3_next_mtp.py): the norms of the
embedding of the next token and of the final hidden state, one projection of both, a layer with attention, a norm, and
the model's own head.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mtrain.arch.layout import Layout
from mtrain.convert.importing import import_hf
from mtrain.hf.schema.description import described_model
from tests.hf import hf_ranks
from tests.hf.ahead import COMMON, CONFIGS, draw_own, drawn, saved
from tests.parity import ranks
from tests.parity.batches import SEQ, VOCAB, three_steps
from tests.parity.cases import Case, case
from tests.parity.compare import Deviation, at_night, relative, without_padding, worst
from tests.pool import Pool

ALONE = case(8)
CASES = [ALONE, case(8, tp=2, sp=True, pp=2), case(4, cp=2, dp=2)]
RUNS = [(name, each) for name in CONFIGS for each in CASES]
BY_DAY = [("qwen3.5", CASES[1])]  # depths with experts: test_families.py
COEFFICIENT = 0.3


def normed(hidden: Tensor, weight: Tensor) -> Tensor:
    """Returns hidden states under a norm whose weight is stored minus 1."""
    return hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + COMMON["rms_norm_eps"]) * (1 + weight)


def losses(main: Any, other: Any, own: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Returns the mean losses of the next token and of the one after it."""
    batch = three_steps()[0]
    tokens, labels, mask = (
        torch.tensor(np.stack([getattr(sample, kind) for sample in batch])) for kind in ("tokens", "labels", "mask")
    )
    hidden = main.model(tokens).last_hidden_state
    first = F.cross_entropy(main.lm_head(hidden)[mask > 0], labels[mask > 0])
    # the last position has no token two ahead, and causal layers keep it from the others
    embedded = main.model.embed_tokens(tokens.roll(-1, dims=1))
    both = [normed(embedded, own["pre_fc_norm_embedding"]), normed(hidden, own["pre_fc_norm_hidden"])]
    joined = torch.cat(both, dim=-1) @ own["fc"].T
    positions = torch.arange(SEQ)[None]
    output = other.model.layers[-1](
        joined,
        position_embeddings=main.model.rotary_emb(joined, positions),
        attention_mask=torch.full((1, 1, SEQ, SEQ), -torch.inf, dtype=torch.float64).triu(1),
    )
    output = output[0] if isinstance(output, tuple) else output
    ahead = mask[:, 1:] > 0
    logits = main.lm_head(normed(output, own["norm"]))[:, :-1]
    return first, F.cross_entropy(logits[ahead], labels[:, 1:][ahead])


@pytest.mark.parametrize(
    ("name", "each"),
    [run if run in BY_DAY else at_night(*run) for run in RUNS],
    ids=[f"{name}-{each}" for name, each in RUNS],
)
def test_both_predictions_train_as_in_transformers(pool: Pool, name: str, each: Case, tmp_path: Path) -> None:
    described = CONFIGS[name](COMMON | {"attn_implementation": "eager", "experts_implementation": "eager"})
    main, other, own = drawn(described, 1), drawn(described, 2), draw_own()
    saved(tmp_path / "weights", main, other, own)
    main, other = main.double(), other.double()
    exact = {key: value.double().requires_grad_() for key, value in own.items()}
    first, second = losses(main, other, exact)
    (first + COEFFICIENT * second).backward()
    # the gradients as a folder of the same form
    for model in (main, other):
        for parameter in model.parameters():
            parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    saved(
        tmp_path / "gradients", main, other, {key: value.grad for key, value in exact.items() if value.grad is not None}
    )

    read = described_model(tmp_path / "weights", depths=1)
    knobs = {f"model__{key}": value for key, value in read.model_dump(exclude={"vocab_multiple"}).items()}
    config = each.config(**knobs, loss__mtp_coefficient=COEFFICIENT)
    arrays = {}
    for kind in ("weights", "gradients"):
        import_hf(tmp_path / kind, tmp_path / f"our-{kind}", None, num_workers=1, depths=1)
        padded = pool.run(hf_ranks.weights, Layout(), tmp_path / f"our-{kind}", ALONE.config(**knobs))[0]
        arrays[kind] = without_padding(padded, VOCAB)
    found = pool.run(ranks.train, each.resolved(config), config, arrays["weights"], three_steps()[:1])[0]
    (step,) = found.steps
    main_loss, ahead_loss = (step.terms[term].mean for term in ("main", "mtp_1"))
    norm = float(np.sqrt(sum((value.astype(np.float64) ** 2).sum() for value in arrays["gradients"].values())))
    Deviation(
        max(relative(main_loss, first.item()), relative(ahead_loss, second.item())),
        relative(step.grad_norm, norm),
        worst(step.gradients, arrays["gradients"], config),
        weights=0.0,
    ).assert_below()
