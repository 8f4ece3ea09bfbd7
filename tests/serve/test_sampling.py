"""What answers have besides tokens: texts that end them, and the likeliest tokens, on every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinker import types
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import BPE

from mtrain.base.errors import DataError
from mtrain.serve.asked import BaseModel, asked_of
from mtrain.serve.bodies import SampleBody
from mtrain.serve.likeliest import ends_with
from mtrain.tokenizer import load_tokenizer
from tests.messages import refuses
from tests.parity.cases import Case
from tests.parity.compare import at_night
from tests.pool import Pool
from tests.serve.oracle import Oracle
from tests.serve.service import running, session
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


def test_a_text_needs_a_tokenizer() -> None:
    body = {"sampling_session_id": "s", "seq_id": 0, "prompt": {"chunks": [{"tokens": [1]}]}}
    base = BaseModel("base", 32, frozenset({7}))
    asked = SampleBody.model_validate({**body, "sampling_params": {"stop": ["a"]}})
    with refuses(DataError, "no tokenizer"):
        asked_of(asked, base)
    for stop, texts, ids in [
        (["a"], ("a",), {7}),
        ("b", ("b",), {7}),
        (None, (), {7}),
        ([], (), set()),
        ([3], (), {3}),
    ]:
        given = SampleBody.model_validate({**body, "sampling_params": {"stop": stop}})
        found = asked_of(given, BaseModel("base", 32, frozenset({7}), has_tokenizer=True))
        assert (found.stop_texts, set(found.sampling.stop_token_ids)) == (texts, ids)
