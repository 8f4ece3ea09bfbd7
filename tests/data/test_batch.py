"""Fields of a batch are listed once: code that handles all of them forgets none."""

from dataclasses import fields, replace

import torch
from torch import Tensor

from mtrain.core.batch.batch import (
    DOCUMENT_STARTS,
    IMAGE_AHEAD,
    IMAGE_ENDS,
    IMAGE_PARTS,
    FieldPath,
    Microbatch,
    MtpTargets,
)
from mtrain.core.batch.collate import RowForm
from mtrain.core.batch.images import MicrobatchImages

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


IMAGES: dict[FieldPath, Tensor] = {
    ("images", "pixels"): torch.arange(6.0).view(2, 3),
    ("images", "grids"): torch.tensor([[1, 1, 2]]),
    ("images", "places"): rows(torch.int64) - 1,
    ("images", "axes"): rows(torch.int64).unsqueeze(-1).repeat(1, 1, 3),
    IMAGE_AHEAD: (rows(torch.int64) - 1).unsqueeze(-1),
    IMAGE_ENDS: rows(torch.int32),
}


def full() -> Microbatch:
    """Builds a batch with every field filled."""
    return replace(
        Microbatch.of({path: rows(dtype) for path, dtype in FIELDS.items()} | IMAGES),
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
    assert {path[1] for path in tensors if path[0] == "images"} == {field.name for field in fields(MicrobatchImages)}
    of_images = {path: each.dtype for path, each in IMAGES.items()}
    assert {path: each.dtype for path, each in tensors.items()} == FIELDS | of_images


def test_taking_apart_and_putting_together_changes_nothing() -> None:
    for batch in (
        full(),
        replace(full(), document_starts=None, is_padding=None, sequence_ids=None, sources=None, mtp=(), images=None),
    ):
        again = Microbatch.of(batch.tensors())
        assert again.tensors().keys() == batch.tensors().keys()
        assert all(torch.equal(each, batch.tensors()[path]) for path, each in again.tensors().items())


def test_a_change_reaches_all_but_the_edges_of_documents_and_whole_images() -> None:
    batch, before = full().map(lambda each: each[:, 1:]), full().tensors()
    whole = {path for path, each in batch.tensors().items() if torch.equal(each, before[path])}
    assert whole == {DOCUMENT_STARTS, *IMAGE_PARTS, IMAGE_ENDS}
    assert all(each.shape[:2] == (2, 3) for path, each in batch.tensors().items() if path not in whole)
    assert (batch.num_padding_tokens, batch.num_loss_tokens) == (3, 5)
    assert batch.num_sequences == 8, "counted before rows were cut"


def test_a_smaller_vocabulary_folds_ids_and_nothing_else() -> None:
    before, after = full().tensors(), full().with_vocabulary(5).tensors()
    changed = {path for path in before if not torch.equal(before[path], after[path])}
    ids = {(name,) for name in ("tokens", "labels")} | {("mtp", d, n) for d in "01" for n in ("tokens", "labels")}
    assert changed == ids
    assert all(int(after[path].max()) == 4 for path in ids)
