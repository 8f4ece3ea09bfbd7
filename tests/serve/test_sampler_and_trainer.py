"""KL between sampler and trainer of a service, as rl_numerics_check of tinker_cookbook measures it, on every layout."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from tinker import types

from tests.parity.cases import Case
from tests.parity.compare import at_night
from tests.parity.expert_models import MIXTRAL
from tests.paths import ROOT
from tests.pool import Pool
from tests.serve.service import datum, running, sequences, session
from tests.serve.test_clients import ADAM, LAYOUTS, VOCAB, batch, named

PROMPTS = sequences(7, (4, 11, 2, 17), VOCAB)
ROW = re.compile(r"^\| (one rank|[a-z]+2(?: of experts)?) \| (0|< [0-9e-]+) \| (0|< [0-9e-]+) \|$", re.MULTILINE)


def promised() -> dict[str, list[float]]:
    """Returns, of the table of docs/training/serve.md, the largest KL of scored and of drawn tokens for each layout."""
    page = (ROOT / "docs" / "training" / "serve.md").read_text()
    return {name: [float(each.removeprefix("< ")) for each in bounds] for name, *bounds in ROW.findall(page)}


def row_of(one: Case) -> str:
    return {"one": "one rank", "dp2-ep2": "ep2 of experts"}.get(named(one), named(one))


def test_the_table_has_every_layout() -> None:
    assert promised().keys() == {row_of(one) for one in LAYOUTS}


@pytest.mark.waits
# by day the one that splits tokens; the others take the same way
@pytest.mark.parametrize("one", [*map(at_night, LAYOUTS[:3]), LAYOUTS[3], *map(at_night, LAYOUTS[4:])], ids=named)
def test_sampler_and_trainer_differ_by_no_more_than_the_table_says(pool: Pool, tmp_path: Path, one: Case) -> None:
    """Compares answers drawn token by token, and whole texts that are scored, with a forward pass of the trainer."""
    config = one.config(**MIXTRAL if "ep" in one.layout else {})
    with running(pool, one, config, tmp_path / "base") as address, session(address) as service:
        client = service.create_lora_training_client("base", rank=4, seed=5).result()
        client.forward_backward(batch(1), "cross_entropy")
        client.optim_step(types.AdamParams(**ADAM)).result()
        sampler = client.save_weights_and_get_sampling_client().result()
        sampling = types.SamplingParams(max_tokens=10, seed=3)
        asked = [sampler.sample(types.ModelInput.from_ints(each), 4, sampling) for each in PROMPTS]
        answers = [(prompt, each) for prompt, found in zip(PROMPTS, asked) for each in found.result().sequences]
        texts = [[*prompt, *each.tokens] for prompt, each in answers]
        scored = [sampler.compute_logprobs(types.ModelInput.from_ints(each)) for each in texts]
        trained = client.forward([datum(each, {}) for each in texts], "cross_entropy").result()
        own = [each["logprobs"].to_numpy() for each in trained.loss_fn_outputs]
        drawn = np.concatenate(
            [np.array(each.logprobs) - mine[-len(each.tokens) :] for (_, each), mine in zip(answers, own, strict=True)]
        )
        whole = np.concatenate(
            [np.array(each.result()[1:]) - mine for each, mine in zip(scored, own, strict=True)], dtype=np.float64
        )
    assert len(drawn) > 100
    for found, most in zip((whole, drawn), promised()[row_of(one)], strict=True):
        assert abs(found).max() <= most
