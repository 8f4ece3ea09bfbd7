"""Random runs for the property search: layout x model x loss x masks x packing, as hypothesis draws them."""

from __future__ import annotations

from typing import Any, get_args

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from mtrain.config.schema.loss import NORM_AGGREGATIONS, Aggregation
from tests.parity.cases import Case
from tests.parity.draws_of_models import Kind, architectures, every_kind
from tests.parity.search import Place, Row, Trial

AXES = ("tp", "pp", "cp", "dp")
MAX_RANKS = 8
MAX_ROWS = 24
"""Largest number of samples in a step."""
MAX_SEQ = 48


@st.composite
def trials(draw: DrawFn, axis: str, max_ranks: int | None = None, kinds: SearchStrategy[Kind] | None = None) -> Trial:
    """Draws legal runs that are parallel along `axis`; shrinking tends to few ranks, rows and loss tokens.

    Args:
        draw: Function that hypothesis passes.
        axis: One of AXES, or "ep", or "ring": cp, whose ranks pass keys and values on.
        max_ranks: Largest number of ranks; by default MAX_RANKS, but most often half of them.
        kinds: Kinds of models; by default all.
    """
    kind = draw(every_kind() if kinds is None else kinds)
    is_ring = axis == "ring"
    kind = kind._replace(
        has_experts=kind.has_experts or axis == "ep",
        is_latent=kind.is_latent and not is_ring,
        has_wide_heads=kind.has_wide_heads and not is_ring,
    )
    degrees = draw(layouts(axis, max_ranks or draw(st.sampled_from([4, 4, 4, MAX_RANKS])), kind))
    shape = draw(architectures(degrees, kind))
    micro_batch_size = draw(st.sampled_from([1, 2, 3]))
    most = max(1, MAX_ROWS // (degrees["dp"] * micro_batch_size))
    if degrees.get("vpp", 1) > 1:
        num_microbatches = degrees["pp"] * draw(st.integers(1, max(1, most // degrees["pp"])))
    else:
        num_microbatches = draw(st.integers(1, min(most, 6)))
    num_rows = degrees["dp"] * micro_batch_size * num_microbatches
    unit = 2 * degrees["cp"] * (degrees["tp"] if degrees.get("sp", False) else 1)
    shortest = kind.mtp_depths // unit + 1  # no depth reaches beyond the row
    seq = unit * draw(st.integers(shortest, max(shortest, MAX_SEQ // unit)))
    masks = draw(st.sampled_from([rows(seq), rows(seq), sparse_rows(seq)]))
    steps = draw(st.lists(st.tuples(*[masks] * num_rows), min_size=1, max_size=2).map(tuple))
    # a ring only supports plain attention
    isolated = degrees.get("cp_comm") != "ring" and draw(st.booleans())
    data = {"data__seq_length": seq, "data__isolate_documents": isolated}
    return Trial(
        Case(degrees, micro_batch_size),
        steps,
        {**shape, **data, **draw(losses(kind)), **draw(engines())},
        seed=draw(st.integers(0, 2**16)),
    )


@st.composite
def layouts(draw: DrawFn, axis: str, max_ranks: int, kind: Kind) -> dict[str, Any]:
    """Draws keys of `Case.layout`: at least 2 along `axis`, at most `max_ranks` ranks; degrees of 3 too."""
    first = draw(st.sampled_from(["dp", "tp", "cp"])) if axis == "ep" else "cp" if axis == "ring" else axis
    degrees: dict[str, Any] = {first: draw(st.integers(2, min(4, max_ranks)))}
    left = max_ranks // degrees[first]
    for other in draw(st.permutations([name for name in AXES if name != first])):
        degrees[other] = draw(st.integers(1, min(4, left)))
        left //= degrees[other]
    if degrees["tp"] > 1:
        degrees["sp"] = kind.has_experts or draw(st.booleans())
    if degrees["cp"] > 1:
        several = ["allgather", "ulysses", *([] if kind.is_latent or kind.has_wide_heads else ["ring"])]
        degrees["cp_comm"] = "ring" if axis == "ring" else draw(st.sampled_from(several))
    if degrees["pp"] > 1:
        degrees["vpp"] = draw(st.sampled_from([1, 1, 2, 3]))
        stages = degrees["pp"] * degrees["vpp"]
        layers = st.integers(1, 2) if stages <= 4 else st.just(1)
        degrees["stage_layers"] = draw(st.lists(layers, min_size=stages, max_size=stages).map(tuple))
    if kind.has_experts:
        stage = degrees["tp"] * degrees["cp"] * degrees["dp"]
        degrees["ep"] = draw(st.sampled_from([n for n in divisors(stage) if n > 1 or axis != "ep"]))
        degrees["etp"] = 1 if kind.linear_bias else draw(st.sampled_from(divisors(stage // degrees["ep"])))
    return degrees


def divisors(number: int) -> list[int]:
    """Lists the divisors of a number, from 1 to the number itself."""
    return [each for each in range(1, number + 1) if number % each == 0]


@st.composite
def losses(draw: DrawFn, kind: Kind) -> dict[str, Any]:
    """Draws the main term and up to two side terms, each with its own aggregation, and those of routers and depths."""
    main = draw(terms())
    names = draw(st.sampled_from([(), ("z",), ("again",), ("z", "again")]))
    side_terms = {name: draw(terms()) | {"coefficient": draw(st.sampled_from([0.3, 0.05, 1.0]))} for name in names}
    if "z" in side_terms:
        side_terms["z"]["function"] = "z_loss"
    loss: dict[str, Any] = {f"loss__{key}": value for key, value in main.items()} | {"loss__side_terms": side_terms}
    if kind.has_experts:
        strength = st.sampled_from([0.0, 0.01, 0.5])
        loss["loss__router"] = {"z_coefficient": draw(strength), "sequence_balance_coefficient": draw(strength)}
    return loss | {"loss__mtp_coefficient": draw(st.sampled_from([0.1, 0.7, 0.0])) if kind.mtp_depths else 0.1}


@st.composite
def terms(draw: DrawFn) -> dict[str, Any]:
    """Draws an aggregation, its constant and the rule for empty sequences."""
    term: dict[str, Any] = {"aggregation": draw(st.sampled_from(get_args(Aggregation)))}
    if term["aggregation"] in NORM_AGGREGATIONS:
        term["norm_length"] = draw(st.sampled_from([1, 20, 4096]))
    if term["aggregation"] == "seq-mean-token-power":
        term["length_power"] = draw(st.sampled_from([0.25, 0.5, 0.9]))
    return term | {"empty_sequences": draw(st.sampled_from(["exclude", "include"]))}


@st.composite
def engines(draw: DrawFn) -> dict[str, Any]:
    """Draws options that may change the order of the work, but not its result."""
    overlap = draw(st.sampled_from(["none", "reduce", "both"]))
    return {
        "train__distributed_optimizer": True if overlap == "both" else draw(st.booleans()),
        "train__overlap_grad_reduce": overlap != "none",
        "train__overlap_param_gather": overlap == "both",
        "train__recompute": draw(st.sampled_from(["none", "selective", "full"])),
    }


def rows(seq: int) -> SearchStrategy[Row]:
    """Draws rows, from fully masked to without a mask."""
    return st.builds(
        Row,
        loss_tokens=st.one_of(st.just(0), st.just(1), st.integers(0, seq), st.just(seq)),
        place=st.sampled_from(get_args(Place)),
        is_fractional=st.booleans(),
        weight=st.sampled_from([1.0, 1.0, 1.0, 2.0, 0.0, 0.1, 1 / 3, 1e-6, 1e4]),
        edges=st.lists(st.integers(1, max(1, seq - 1)), max_size=4, unique=True).map(lambda x: tuple(sorted(x))),
        padding=st.one_of(st.just(0), st.just(0), st.integers(0, seq - 1)),
    )


def sparse_rows(seq: int) -> SearchStrategy[Row]:
    """Draws rows that are almost all fully masked, so that whole microbatches and ranks have no loss token."""
    few = st.builds(Row, loss_tokens=st.integers(0, min(3, seq)), place=st.sampled_from(get_args(Place)))
    return st.one_of(st.just(Row()), st.just(Row()), few)
