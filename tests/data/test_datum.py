"""Token ids and numbers that a program may give, and refusals of everything else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrain import DataError, Datum, GroupMember
from mtrain.core.batch.datum import sample_of
from mtrain.core.batch.numbers import token_ids
from tests.messages import refuses
from tests.parity.cases import SINGLE

VOCAB_SIZE = 61
IDS = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=12)
NO_IDS = st.one_of(
    st.floats(),
    st.booleans(),
    st.text(max_size=3),
    st.none(),
    st.integers(max_value=-1),
    st.integers(min_value=VOCAB_SIZE),
    st.lists(st.integers(0, 9), max_size=2),
    st.sampled_from(
        [
            np.float32(1),
            np.bool_(True),
            np.float64(2),
            torch.tensor(1.0),
            torch.tensor(True),
            torch.tensor([1]),
            1j,
            b"1",
        ]
    ),
)
CONTAINERS: dict[str, Any] = {
    "list": list,
    "tuple": tuple,
    "numpy": np.array,
    "int32": lambda ids: np.array(ids, np.int32),
    "uint8": lambda ids: np.array(ids, np.uint8),
    "uint64": lambda ids: np.array(ids, np.uint64),
    "objects": lambda ids: np.array(ids, object),
    "tensor": torch.tensor,
    "int16 tensor": lambda ids: torch.tensor(ids, dtype=torch.int16),
    "numbers of numpy": lambda ids: [np.int64(each) for each in ids],
    "numbers of torch": lambda ids: [torch.tensor(each) for each in ids],
}


def made(ids: Any, **more: Any) -> Any:
    return sample_of(Datum(ids, **more), "sample 4", SINGLE.config(model__vocab_size=VOCAB_SIZE))


@pytest.mark.parametrize("container", CONTAINERS)
@settings(max_examples=20, deadline=None)
@given(ids=IDS)
def test_whole_numbers_are_ids_in_any_container(container: str, ids: list[int]) -> None:
    sample = made(CONTAINERS[container](ids))
    assert [*sample.tokens.tolist(), *sample.labels.tolist()[-1:]] == (ids if len(ids) > 1 else [])


@settings(max_examples=200, deadline=None)
@given(ids=IDS, wrong=NO_IDS, data=st.data())
def test_what_is_no_id_is_refused_by_its_place(ids: list[int], wrong: object, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(ids) - 1))
    given_ids: list[Any] = [*ids[:place], wrong, *ids[place + 1 :]]
    for row in (given_ids, tuple(given_ids)):
        with pytest.raises(
            DataError, match=rf"^sample 4: input_ids\[{place}\] is .* from 0 to {VOCAB_SIZE - 1}"
        ) as caught:
            made(row)
        assert "\n" not in str(caught.value)
        with pytest.raises(ValueError, match=rf"^prompt 3\[{place}\] is "):
            token_ids(row, "prompt 3", VOCAB_SIZE)


@pytest.mark.parametrize(
    "wrong",
    [
        np.array([1.0, 2.0]),
        np.array([True, False]),
        torch.tensor([1.0, 2.0]),
        torch.tensor([1.0, 2.0], dtype=torch.bfloat16),
        torch.tensor([True, False]),
        [[1, 2]],
        torch.tensor([[1, 2]]),
        "12",
        {1, 2},
        {1: 2},
        7,
        None,
        torch.tensor(7),
        iter([1, 2]),
        torch.tensor([1, 2], device="meta"),
    ],
    ids=lambda wrong: type(wrong).__name__,  # the text of an iterator has its address, another one in each process
)
def test_what_is_no_row_of_ids_is_refused(wrong: Any) -> None:
    with refuses(DataError, "sample 4", "input_ids"):
        made(wrong)


def test_tensors_without_numbers_are_refused() -> None:
    nothing: Any = torch.ones(3, device="meta")
    with refuses(DataError, "sample 4: weights", "cannot be read"):
        made([1, 2, 3], weights=nothing)
    with refuses(DataError, "sample 4: extra 'a'", "cannot be read"):
        made([1, 2, 3], extras={"a": nothing})


@settings(max_examples=50, deadline=None)
@given(weights=st.lists(st.floats(0, 9, width=16), min_size=3, max_size=3))
def test_weights_and_extras_are_the_same_in_any_container(weights: list[float]) -> None:
    rows: list[Any] = [weights, np.array(weights), np.array(weights, np.float16), torch.tensor(weights)]
    rows += [
        torch.tensor(weights, dtype=torch.float64),
        [torch.tensor(each) for each in weights],
        np.array(weights, object),
    ]
    for row in rows:
        sample = made([1, 2, 3], weights=row, extras={"a": row, "b": row[1]})
        assert sample.mask.tolist() == weights[1:]
        assert sample.extras["a"].tolist() == weights[1:]
        assert sample.extras["b"].tolist() == [weights[1]] * 2
    half = made([1, 2, 3], weights=torch.tensor(weights, dtype=torch.bfloat16))
    assert half.mask.tolist() == torch.tensor(weights[1:]).bfloat16().tolist()


@pytest.mark.parametrize("wrong", ["1", None, b"1", 1j, [1.0], {}], ids=repr)
@settings(max_examples=10, deadline=None)
@given(place=st.integers(0, 2))
def test_a_number_that_is_none_is_refused_by_its_place(wrong: Any, place: int) -> None:
    row: list[Any] = [1.0, 0.5, 2.0]
    row[place] = wrong
    for more, name in (({"weights": row}, "weights"), ({"extras": {"a": row}}, "extra 'a'")):
        with pytest.raises(DataError, match=rf"^sample 4: {name}(\[{place}\] is | is not made of)"):
            made([1, 2, 3], **more)
    with pytest.raises(DataError, match=r"^sample 4: weight "):
        made([1, 2, 3], weight=wrong)
    with pytest.raises(DataError, match=r"^sample 4: member\.group is "):
        made([1, 2, 3], member=GroupMember(wrong, "chosen"))


def test_a_number_that_a_mask_hides_is_none() -> None:
    hidden: Any = np.ma.MaskedArray([1, 2, 3], [False, True, False])
    with refuses(DataError, "input_ids[1] is None"):
        made(hidden)
    with refuses(DataError, "weights[1] is None"):
        made([1, 2, 3], weights=hidden)


def test_a_gradient_is_not_dropped() -> None:
    row: Any = torch.ones(3, requires_grad=True)
    with refuses(DataError, "sample 4", "weights.detach"):
        made([1, 2, 3], weights=row)


@pytest.mark.parametrize("label", [1, np.int64(1), np.uint8(1), torch.tensor(1)], ids=repr)
def test_a_class_is_a_whole_number(label: Any) -> None:
    config = SINGLE.config(model__num_labels=3, loss__function="classification")
    assert sample_of(Datum([5, 6], label=label), "sample 4", config).labels.tolist() == [6, 1]
    for wrong in (float(label), True, "1", None, -1, 3, torch.tensor(1.0)):
        with refuses(DataError, "sample 4"):
            sample_of(Datum([5, 6], label=wrong), "sample 4", config)  # type: ignore[arg-type]


@pytest.mark.parametrize("label", [2, 2.0, np.float32(2), torch.tensor(2.0)], ids=repr)
def test_what_a_regression_aims_at_is_a_number(label: Any) -> None:
    config = SINGLE.config(model__num_labels=1, loss__function="regression")
    assert sample_of(Datum([5, 6], label=label), "sample 4", config).extras["label"].tolist() == [2.0, 2.0]
    for wrong in (True, "2", None, [2.0]):
        with refuses(DataError, "sample 4"):
            sample_of(Datum([5, 6], label=wrong), "sample 4", config)  # type: ignore[arg-type]


def test_the_refusal_says_what_to_do() -> None:
    with refuses(DataError, "sample 4", "input_ids[0]", "1.7", "model.vocab_size=61"):
        made([1.7, 2.9])
