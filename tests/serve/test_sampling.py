"""What answers have besides tokens: texts that end them, and the likeliest tokens, on every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tinker import types
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import BPE
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from mtrain.base.errors import DataError
from mtrain.hf.tokenizer.tokenizer import load_tokenizer
from mtrain.serve.operations import SampleBody
from mtrain.serve.work import ends_with
from tests.messages import refuses
from tests.parity.cases import Case
from tests.parity.compare import at_night
from tests.pool import Pool
from tests.serve.oracle import Oracle
from tests.serve.service import running, served_model, session
from tests.serve.test_clients import LAYOUTS, VOCAB, named, saved

END = "<|end|>"
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ01234567"


def save_letters(folder: Path) -> Path:
    """Writes a tokenizer whose tokens are single letters, and one control token."""
    model = Tokenizer(BPE({letter: number for number, letter in enumerate(LETTERS)}, []))
    model.add_special_tokens([AddedToken(END, special=True)])
    model.decoder = Fuse()
    folder.mkdir()
    model.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "' + END + '"}')
    return folder


def check_draws(answer: Any, exact: torch.Tensor, temperature: float, top_k: int, top_p: float) -> None:
    """Compares log-probabilities with those of the distribution as transformers warps it."""
    warped = TemperatureLogitsWarper(temperature)(None, exact)
    warped = TopKLogitsWarper(top_k)(None, warped) if top_k else warped
    warped = TopPLogitsWarper(top_p)(None, warped) if top_p < 1 else warped
    drawn_from = warped.log_softmax(-1)
    expected = drawn_from.gather(-1, torch.tensor(answer.tokens)[:, None])[:, 0]
    np.testing.assert_allclose(answer.logprobs, expected.numpy(), rtol=0, atol=1e-5)
    for likeliest, values in zip(answer.topk_logprobs, drawn_from, strict=True):
        assert {token for token, _ in likeliest} == set(values.isfinite().nonzero()[:, 0].tolist())
        ours = [value for _, value in sorted(likeliest)]
        np.testing.assert_allclose(ours, values[values.isfinite()].numpy(), rtol=0, atol=1e-5)


def text_of(tokens: list[int]) -> str:
    return "".join([*LETTERS, END][each] for each in tokens)


@pytest.mark.waits
# tp2 has parts of the vocabulary on each rank; pp2 has logits on one of two
@pytest.mark.parametrize("one", [LAYOUTS[1], *map(at_night, LAYOUTS[2:5])], ids=named)
def test_texts_end_answers_and_likeliest_tokens_are_the_oracles(pool: Pool, tmp_path: Path, one: Case) -> None:
    config = one.config(data__tokenizer=str(save_letters(tmp_path / "letters")))
    prompt, size = [3, 4, 5, 60, 7], 3
    given = types.ModelInput.from_ints(prompt)
    with running(pool, one, config, tmp_path / "base") as address, session(address) as service:
        client = service.create_lora_training_client("base", rank=0).result()
        oracle = Oracle(config, saved(tmp_path / "base", client.save_state("start").result().path, config))
        sampler = client.save_weights_and_get_sampling_client().result()

        def asked(stop: Any, **more: Any) -> Any:
            return sampler.sample(given, 1, types.SamplingParams(max_tokens=12, seed=5, stop=stop), **more).result()

        found = asked([], include_prompt_logprobs=True, topk_prompt_logprobs=size, topk_sample_logprobs=size)
        tokens = found.sequences[0].tokens
        assert len(tokens) == 12
        (exact,) = oracle.distributions([[*prompt, *tokens]])
        best = exact.topk(size, dim=-1)
        assert found.topk_prompt_logprobs[0] is None
        likeliest = [*found.topk_prompt_logprobs[1:], *found.sequences[0].topk_logprobs]
        assert [[token for token, _ in each] for each in likeliest] == best.indices.tolist()
        ours = [[value for _, value in each] for each in likeliest]
        np.testing.assert_allclose(ours, best.values.detach().numpy(), rtol=0, atol=1e-5)

        for temperature, top_k, top_p in ((0.5, 0, 1.0), (1.7, 5, 1.0), (0.8, 0, 0.6)):
            rules = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
            sampling = types.SamplingParams(max_tokens=12, seed=5, stop=[], **rules)
            answer = sampler.sample(given, 1, sampling, topk_sample_logprobs=VOCAB).result().sequences[0]
            (values,) = oracle.distributions([[*prompt, *answer.tokens]])
            check_draws(answer, values[len(prompt) - 1 :].detach(), temperature, top_k, top_p)

        text = text_of(tokens)
        for stop in (text[4:7], ["none of it", text[4:7]]):
            answer = asked(stop).sequences[0]
            assert answer.tokens == tokens[: text.index(text[4:7]) + 3]
            assert answer.stop_reason == "stop"
        late = asked([text + "a"], topk_prompt_logprobs=VOCAB, include_prompt_logprobs=True)
        assert late.sequences[0].tokens == tokens
        assert late.sequences[0].stop_reason == "length"
        every = np.array([[value for _, value in sorted(each)] for each in late.topk_prompt_logprobs[1:]])
        np.testing.assert_allclose(every, exact[: len(prompt) - 1].detach().numpy(), rtol=0, atol=1e-5)


def test_a_text_is_found_where_its_last_token_is(tmp_path: Path) -> None:
    """Texts may hold control tokens, which count by their names."""
    letters = load_tokenizer(save_letters(tmp_path / "letters"))
    for ids, texts, wanted in [
        ([0, 1, 2], ["bc"], True),
        ([0, 1, 2], ["cb", "ac"], False),
        ([5, 60], [END], True),
        ([5, 60, 1], [f"f{END}b"], True),
        ([60, 1], [END + "c"], False),
    ]:
        assert ends_with(texts, letters, ids) == wanted, (ids, texts)


def test_an_answer_is_bounded_by_its_numbers() -> None:
    """What is asked for could else not be held: 1,024 answers of a long context with 128 likeliest tokens each."""
    body = {"sampling_session_id": "s", "seq_id": 0, "prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": {}}
    base = served_model(32768)
    base.sample(SampleBody.model_validate({**body, "num_samples": 1000}))
    for more in ({"num_samples": 1024, "topk_sample_logprobs": 128}, {"num_samples": 8, "topk_sample_logprobs": 128}):
        with refuses(DataError, "num_samples", "topk_sample_logprobs=128"):
            base.sample(SampleBody.model_validate({**body, **more}))
    last = {"prompt_logprobs": True, "prompt_logprobs_last_n": 1}
    with refuses(DataError, "prompt_logprobs_last_n=1"):
        base.sample(SampleBody.model_validate({**body, **last}))


def test_a_text_needs_a_tokenizer() -> None:
    body = {"sampling_session_id": "s", "seq_id": 0, "prompt": {"chunks": [{"tokens": [1]}]}}
    asked = SampleBody.model_validate({**body, "sampling_params": {"stop": ["a"]}})
    with refuses(DataError, "no tokenizer"):
        served_model().sample(asked)
    for stop, texts, ids in [
        (["a"], ("a",), {7}),
        ("b", ("b",), {7}),
        (None, (), {7}),
        ([], (), set()),
        ([3], (), {3}),
    ]:
        given = SampleBody.model_validate({**body, "sampling_params": {"stop": stop}})
        found = served_model(stops=[7], data__tokenizer="letters").sample(given)
        assert (found.stop_texts, set(found.sampling.stop_token_ids)) == (texts, ids)
