"""Random tokens for runs without data."""

import numpy as np

from mtrain.data.sources import MockSamples


def test_a_sample_is_a_function_of_seed_and_number() -> None:
    one, again, other = MockSamples(1, 16, 50), MockSamples(1, 16, 50), MockSamples(2, 16, 50)
    one.sample(3)
    assert np.array_equal(one.sample(7).tokens, again.sample(7).tokens)
    assert not np.array_equal(one.sample(7).tokens, one.sample(8).tokens)
    assert not np.array_equal(one.sample(7).tokens, other.sample(7).tokens)
    assert not np.array_equal(one.sample(7).tokens, MockSamples(1, 16, 50, size=8).sample(7).tokens)


def test_tokens_are_even_over_the_vocabulary_and_labels_are_shifted() -> None:
    rows = [MockSamples(1, 100, 10).sample(g) for g in range(100)]
    counts = np.bincount(np.concatenate([row.tokens for row in rows]), minlength=10)
    assert len(counts) == 10
    assert ((counts - 1000) ** 2 / 1000).sum() < 9 + 5 * np.sqrt(18)
    assert all(np.array_equal(row.tokens[1:], row.labels[:-1]) for row in rows)
    assert all(row.mask.sum() == 100 for row in rows)
