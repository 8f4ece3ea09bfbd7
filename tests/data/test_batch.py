"""Fields of a batch are listed once: code that handles all of them forgets none."""

from dataclasses import fields, replace

import torch
from torch import Tensor

from mtrain.core.batch.batch import DOCUMENT_STARTS, Microbatch, MtpTargets
from mtrain.core.batch.collate import RowForm

TERMS = ("main", "tokens")
"""Names of terms, of which one equals the name of a field."""
FIELDS = RowForm(
    *(4, {}, True, True, True),
    num_predictions=3,
    with_sources=True,
    extras=("advantages", "weights"),
    choices={"routed_experts": (1, 1)},
).dtypes(TERMS)
"""Fields of a batch, with an extra that has the name of a field."""


def rows(dtype: torch.dtype) -> Tensor:
    return (torch.arange(8).view(2, 4) % (2 if dtype == torch.bool else 8)).to(dtype)


def full() -> Microbatch:
    """Builds a batch with every field filled."""
    return replace(
        Microbatch.of({path: rows(dtype) for path, dtype in FIELDS.items()}),
        num_padding_tokens=3,
        num_loss_tokens=5,
    )


def test_the_table_names_every_field() -> None:
    tensors = full().tensors()
    counted = {
        *("num_sequences", "num_padding_tokens", "num_loss_tokens"),
        *("num_pairs", "num_window_pairs", "num_output_rows", "members"),
    }
    assert {path[0] for path in tensors} == {field.name for field in fields(Microbatch)} - counted
    assert {path[2] for path in tensors if path[0] == "mtp"} == {field.name for field in fields(MtpTargets)}
    assert {path: each.dtype for path, each in tensors.items()} == FIELDS


def test_taking_apart_and_putting_together_changes_nothing() -> None:
    for batch in (
        full(),
        replace(full(), document_starts=None, is_padding=None, sequence_ids=None, sources=None, mtp=()),
    ):
        again = Microbatch.of(batch.tensors())
        assert again.tensors().keys() == batch.tensors().keys()
        assert all(torch.equal(each, batch.tensors()[path]) for path, each in again.tensors().items())


def test_a_change_reaches_all_but_the_edges_of_documents() -> None:
    batch = full().map(lambda each: each[:, 1:])
    assert {path for path, each in batch.tensors().items() if each.shape == (2, 4)} == {DOCUMENT_STARTS}
    assert (batch.num_padding_tokens, batch.num_loss_tokens) == (3, 5)
    assert batch.num_sequences == 8, "counted before rows were cut"


def test_a_smaller_vocabulary_folds_ids_and_nothing_else() -> None:
    before, after = full().tensors(), full().with_vocabulary(5).tensors()
    changed = {path for path in before if not torch.equal(before[path], after[path])}
    ids = {(name,) for name in ("tokens", "labels")} | {("mtp", d, n) for d in "01" for n in ("tokens", "labels")}
    assert changed == ids
    assert all(int(after[path].max()) == 4 for path in ids)
