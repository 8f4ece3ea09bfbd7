"""Only tokens that some term counts get logits, in the order of the hidden states."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mtrain.arch.activations import chunk_tokens, tokens_at_once
from mtrain.config import Config
from mtrain.config.schema.loss import LossSection
from mtrain.core.batch.batch import Microbatch
from mtrain.core.batch.collate import RowForm, collate, loss_terms
from mtrain.core.batch.zigzag import slice_for_context_parallel
from mtrain.core.step.loss import terms_by_distribution, true_positions, weighed
from tests.config.samples import config
from tests.parity.batches import SEQ, three_steps

SECTION = LossSection.model_validate(
    {"side_terms": {"z": {"function": "z_loss", "aggregation": "seq-mean-token-sum", "empty_sequences": "include"}}}
)


def microbatch(mtp_depths: int = 2) -> Microbatch:
    samples = three_steps()[0][:4]
    return collate(
        [[sample] for sample in samples], RowForm(SEQ, loss_terms(SECTION), num_predictions=1 + mtp_depths), None
    )


def test_main_terms_share_one_distribution_and_every_depth_has_its_own() -> None:
    assert terms_by_distribution(microbatch()) == [["main", "z"], ["mtp_1"], ["mtp_2"]]
    assert terms_by_distribution(microbatch(0)) == [["main", "z"]]


def test_a_token_counts_by_a_weight_or_by_a_share_of_any_term() -> None:
    """Every sequence has a share in the z-loss at one token, with or without a weight; the second has no weights."""
    batch = microbatch()
    masks = np.stack([sample.mask for sample in three_steps()[0][:4]]) > 0
    assert masks.sum(1).tolist() == [32, 0, 1, 30]
    main, z = (weighed(batch, [term]).numpy() for term in ("main", "z"))
    assert np.array_equal(main, masks)
    assert (z & masks).sum() == masks.sum()
    assert (z & ~masks).sum(1).tolist() == [0, 1, 1, 0]
    assert np.array_equal(weighed(batch, ["main", "z"]).numpy(), main | z)
    ahead = weighed(batch, ["mtp_1"]).numpy()
    assert np.array_equal(ahead[:, :-1], masks[:, 1:])
    assert not ahead[:, -1].any()


@pytest.mark.parametrize("cp", [2, 4])
def test_context_parallel_ranks_hold_every_counted_token_once(cp: int) -> None:
    batch = microbatch()
    terms = ["main", "z"]
    parts = [weighed(slice_for_context_parallel(batch, cp, rank), terms).sum() for rank in range(cp)]
    assert sum(int(part) for part in parts) == int(weighed(batch, terms).sum())


@given(st.integers(1, 4), st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_true_positions_are_those_of_nonzero_in_the_order_of_hidden_states(batch: int, seq: int, seed: int) -> None:
    mask = torch.rand(batch, seq, generator=torch.Generator().manual_seed(seed)) < 0.5
    (expected,) = mask.t().reshape(-1).nonzero(as_tuple=True)
    assert torch.equal(true_positions(mask, int(mask.sum())), expected)


def cut(value: str | int, vocab_size: int = 32_000, **changes: object) -> Config:
    return config(model__vocab_size=vocab_size, loss__chunk_tokens=value, **changes)


@pytest.mark.parametrize(
    ("value", "vocab_local", "on_cpu", "expected"),
    [
        ("whole", 1000, False, None),
        ("whole", 1000, True, None),
        (77, 1000, False, 77),
        (77, 1000, True, 77),
        ("auto", 128_256, False, 4096),
        ("auto", 2**18, False, 2048),
        ("auto", 2**18 + 1, False, 2047),
        ("auto", 2**20, False, 1024),
        ("auto", 8192, True, 256),
        ("auto", 8193, True, 2**26 // 8193),
        ("auto", 128_256, True, 1024),
        ("auto", 16_384, False, 4096),
        ("auto", 8192, False, 8192),
        ("auto", 4096, True, 512),
        ("auto", 1, False, 2**26),
    ],
)
def test_automatic_chunks_are_larger_on_a_gpu_and_have_a_bound_in_bytes(
    value: str | int, vocab_local: int, on_cpu: bool, expected: int | None
) -> None:
    assert chunk_tokens(cut(value).loss, vocab_local, on_cpu) == expected


def test_functions_of_the_users_own_count_as_needing_whole_logits() -> None:
    assert tokens_at_once(cut("auto"), 8192, 128_256) == 4096
    assert tokens_at_once(cut("auto", train__device="cpu"), 8192, 128_256) == 1024
    assert tokens_at_once(cut("auto", loss__function="my.losses:own"), 8192, 128_256) == 8192
    assert tokens_at_once(cut(64, loss__function="my.losses:own"), 8192, 128_256) == 64
    assert tokens_at_once(cut("whole"), 8192, 128_256) == 8192
    assert tokens_at_once(cut("auto"), 900, 128_256) == 900
