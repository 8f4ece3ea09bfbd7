"""Aggregations against their definitions."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtrain.config.schema.loss import NORM_AGGREGATIONS, Aggregation, TermSection
from mtrain.core.loss.aggregation import aggregate

NAMES: list[Aggregation] = [
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
    "token-sum-norm",
    "seq-mean-token-sqrt",
    "seq-mean-token-power",
    "sum",
]
COUNTS = st.one_of(st.just(0.0), st.floats(0.01, 10))
SEQUENCES = st.lists(st.tuples(st.lists(COUNTS, min_size=4, max_size=4), COUNTS), min_size=1, max_size=5)
NORM_LENGTH = 7
POWER = 0.3


def term(name: Aggregation, empty: str = "exclude") -> TermSection:
    length = {"norm_length": NORM_LENGTH} if name in NORM_AGGREGATIONS else {}
    power = {"length_power": POWER} if name == "seq-mean-token-power" else {}
    return TermSection.model_validate({"aggregation": name, "empty_sequences": empty, **length, **power})


def defined(name: Aggregation, empty: str, sequences: list[tuple[list[float], float]]) -> tuple[list[float], float]:
    """Computes token factors and denominator, written out from the definitions: v, w and n of each sequence."""
    factors: list[float] = []
    denominator = 0.0
    for w, v in sequences:
        n = sum(w)
        counts = v if n > 0 or empty == "include" else 0.0
        match name:
            case "token-mean":
                factors += [v * x for x in w]
                denominator += v * n
            case "seq-mean-token-sum":
                factors += [v * x for x in w]
                denominator += counts
            case "seq-mean-token-mean":
                factors += [v * x / n if n else 0.0 for x in w]
                denominator += counts
            case "seq-mean-token-sum-norm":
                factors += [v * x / NORM_LENGTH for x in w]
                denominator += counts
            case "token-sum-norm":
                factors += [v * x / NORM_LENGTH for x in w]
                denominator = 1.0
            case "seq-mean-token-sqrt":
                factors += [v * x / math.sqrt(n) if n else 0.0 for x in w]
                denominator += v * math.sqrt(n)
            case "seq-mean-token-power":
                factors += [v * x / math.exp(POWER * math.log(n)) if n else 0.0 for x in w]
                denominator += v * n / math.exp(POWER * math.log(n)) if n else 0.0
            case "sum":
                factors += [v * x for x in w]
                denominator = 1.0
    return factors, denominator


@pytest.mark.parametrize("empty", ["exclude", "include"])
@pytest.mark.parametrize("name", NAMES)
@given(sequences=SEQUENCES)
def test_sums_over_a_batch_are_the_definition(
    name: Aggregation, empty: str, sequences: list[tuple[list[float], float]]
) -> None:
    found = [
        aggregate(np.array(mask), weight, term(name, empty), is_first_in_step=slot == 0)
        for slot, (mask, weight) in enumerate(sequences)
    ]
    factors, denominator = defined(name, empty, sequences)
    assert np.concatenate([one.weights for one in found]) == pytest.approx(factors, rel=1e-6)
    assert math.fsum(np.concatenate([one.denominator_weights for one in found])) == pytest.approx(
        denominator, rel=1e-12
    )


@pytest.mark.parametrize("name", NAMES)
@given(mask=st.lists(COUNTS, min_size=4, max_size=4), weight=COUNTS, padding=st.integers(0, 6))
def test_padding_changes_nothing(name: Aggregation, mask: list[float], weight: float, padding: int) -> None:
    short = aggregate(np.array(mask), weight, term(name), is_first_in_step=True)
    long = aggregate(np.array(mask + [0.0] * padding), weight, term(name), is_first_in_step=True)
    assert np.array_equal(long.weights[:4], short.weights)
    assert not long.weights[4:].any()
    assert np.array_equal(long.denominator_weights[:4], short.denominator_weights)
    assert not long.denominator_weights[4:].any()


@pytest.mark.parametrize("name", NAMES)
def test_counts_are_exact(name: Aggregation) -> None:
    """Masks of 0 and 1 and sample weights of 1 give integer denominators where the definition is a count."""
    masks = np.random.default_rng(0).integers(0, 2, (64, 1000)).astype(np.float64)
    shares = [aggregate(mask, 1.0, term(name), slot == 0).denominator_weights for slot, mask in enumerate(masks)]
    total = float(np.sum(shares))
    expected = {"token-mean": masks.sum(), "token-sum-norm": 1.0, "sum": 1.0}.get(name, 64.0)
    if name == "seq-mean-token-sqrt":
        assert total == pytest.approx(np.sqrt(masks.sum(1)).sum(), rel=1e-14)
    elif name == "seq-mean-token-power":
        assert total == pytest.approx((masks.sum(1) ** (1 - POWER)).sum(), rel=1e-14)
    else:
        assert total == expected


def test_whole_sequences_are_owned_by_their_first_token() -> None:
    mask = np.array([0.0, 0.0, 1.0, 1.0])
    assert aggregate(mask, 2.0, term("seq-mean-token-mean"), False).denominator_weights.tolist() == [2.0, 0.0, 0.0, 0.0]
    assert aggregate(mask, 2.0, term("sum"), True).denominator_weights.tolist() == [1.0, 0.0, 0.0, 0.0]
    assert aggregate(mask, 2.0, term("sum"), False).denominator_weights.tolist() == [0.0, 0.0, 0.0, 0.0]
    assert aggregate(mask, 2.0, term("token-mean"), False).denominator_weights.tolist() == [0.0, 0.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("power", "same"), [(0.5, "seq-mean-token-sqrt"), (1e-12, "token-mean"), (1 - 1e-12, "seq-mean-token-mean")]
)
@given(sequences=SEQUENCES)
def test_a_power_lies_between_the_means_of_tokens_and_of_sequences(
    power: float, same: Aggregation, sequences: list[tuple[list[float], float]]
) -> None:
    powered = TermSection(aggregation="seq-mean-token-power", length_power=power)
    for mask, weight in sequences:
        found, expected = (aggregate(np.array(mask), weight, each, False) for each in (powered, term(same)))
        assert found.weights == pytest.approx(expected.weights, rel=1e-6)
        assert math.fsum(found.denominator_weights) == pytest.approx(math.fsum(expected.denominator_weights), rel=1e-9)


def test_types_are_those_of_the_pair() -> None:
    found = aggregate(np.array([1.0, 0.0]), 0.1, term("token-mean"), False)
    assert (found.weights.dtype.name, found.denominator_weights.dtype.name) == ("float32", "float64")
    assert found.denominator_weights[0] == 0.1  # not rounded to float32
