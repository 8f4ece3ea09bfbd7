"""Random runs for the property search: layout x model x loss x masks x packing, as hypothesis draws them.

A trial is small numbers only, so that hypothesis can shrink it and a failing one can be pasted into a regression test.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from numpy.typing import NDArray

from mtrain.config import Config
from mtrain.config.loss import NORM_AGGREGATIONS, Aggregation
from mtrain.data.sample import Sample
from mtrain.lr import learning_rate
from tests.oracle.loss import Sequence
from tests.oracle.run import StepResult, oracle_steps
from tests.parity.batches import GlobalBatch
from tests.parity.cases import Case
from tests.parity.compare import Deviation, initial_parameters, relative, run_case, worst
from tests.parity.ranks import StepOutcome
from tests.pool import Pool

AXES = ("tp", "pp", "cp", "dp")
MAX_RANKS = 8
MAX_ROWS = 24
"""Samples of a step."""
MAX_SEQ = 48

Place = Literal["spread", "start", "end"]


@dataclass(frozen=True)
class Row:
    """One sample: how many loss tokens, where, and what they count."""

    loss_tokens: int = 0
    """At most the row's length; tokens before a document's edge lose theirs."""
    place: Place = "spread"
    is_fractional: bool = False
    """Whether its tokens have weights such as 0.3 in place of 1."""
    weight: float = 1.0
    """Of the sample."""
    edges: tuple[int, ...] = ()
    """Where documents begin, beside 0; read where documents are isolated."""


@dataclass(frozen=True)
class Trial:
    """One run to be compared with the oracle."""

    case: Case
    steps: tuple[tuple[Row, ...], ...]
    """The rows of each global batch, by slot."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Of the parity tests' base configuration, as `model__num_layers`."""
    seed: int = 0
    """Of tokens, of the places of spread loss tokens, and of fractional weights."""

    def settings(self) -> dict[str, Any]:
        """All changes of the base configuration, the batch size included."""
        return {**self.changes, "train__global_batch_size": len(self.steps[0])}

    def config(self) -> Config:
        """The configuration of the run."""
        return self.case.config(**self.settings())

    def batches(self) -> list[GlobalBatch]:
        """The samples of each step."""
        config, rng = self.config(), np.random.default_rng(self.seed)
        return [[sample(row, config, rng) for row in rows] for rows in self.steps]


def sample(row: Row, config: Config, rng: np.random.Generator) -> Sample:
    """Random tokens under the row's mask."""
    seq, isolated = config.data.seq_length, config.data.isolate_documents
    tokens = rng.integers(0, config.model.vocab_size, seq + 1)
    mask = places(row, seq, rng)
    starts = np.zeros(seq, np.int32)
    if row.is_fractional:
        mask *= rng.choice([1.0, 0.5, 0.125, 0.3], seq)
    if isolated:
        edges = [edge for edge in row.edges if edge < seq]
        starts[edges] = edges
        mask[[edge - 1 for edge in edges]] = 0.0  # no token is predicted across an edge
    return Sample(
        tokens=tokens[:-1],
        labels=np.where(mask > 0, tokens[1:], 0),
        mask=mask,
        weight=row.weight,
        document_starts=np.maximum.accumulate(starts) if isolated else None,
    )


def places(row: Row, seq: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """[seq] mask of ones where the row has loss tokens."""
    mask = np.zeros(seq)
    order = {"spread": rng.permutation(seq), "start": np.arange(seq), "end": np.arange(seq)[::-1]}
    mask[order[row.place][: row.loss_tokens]] = 1.0
    return mask


class Verdict(NamedTuple):
    """A trial against the oracle."""

    deviation: Deviation
    wrong_denominators: list[str]
    """One line each; empty where all are right."""


def judge(pool: Pool, trial: Trial) -> Verdict:
    """Runs a trial on its ranks and in one float64 process."""
    config, batches = trial.config(), trial.batches()
    outcome = run_case(pool, trial.case, batches, **trial.settings())
    exact = exact_steps(config, batches)
    pairs = list(zip(outcome.steps, exact, strict=True))
    weights = {name: value.numpy() for name, value in exact[-1].parameters.items()}
    gradients = [{name: value.numpy() for name, value in step.gradients.items()} for step in exact]
    found = Deviation(
        loss=max(relative(step.loss, reference.loss) for step, reference in pairs),
        grad_norm=max(relative(step.grad_norm, reference.grad_norm) for step, reference in pairs),
        gradient=max(worst(step.gradients, own, config) for (step, _), own in zip(pairs, gradients, strict=True)),
        weights=worst(outcome.parameters, weights, config),
    )
    wrong = [line for step, reference in pairs for line in wrong_denominators(step, reference, trial)]
    return Verdict(found, wrong)


def exact_steps(config: Config, batches: list[GlobalBatch]) -> list[StepResult]:
    """The same steps by one process in float64."""
    return oracle_steps(
        {name: torch.as_tensor(value) for name, value in initial_parameters(config).items()},
        config.model,
        config.loss,
        config.optimizer,
        [learning_rate(step, config.optimizer, config.train.num_steps) for step in range(len(batches))],
        [[Sequence.of_sample(one) for one in batch] for batch in batches],
    )


def wrong_denominators(found: StepOutcome, exact: StepResult, trial: Trial) -> list[str]:
    """Sums of whole numbers are equal outright; other sums to the rounding of as many float64 additions."""
    assert found.terms.keys() == exact.denominators.keys()
    rows = [row for rows in trial.steps for row in rows]
    tokens = len(rows) * trial.config().data.seq_length
    is_whole = all(row.weight.is_integer() and not row.is_fractional for row in rows)
    terms = {"main": trial.config().loss, **trial.config().loss.side_terms}
    lines = []
    for name, expected in exact.denominators.items():
        has_roots = terms[name].aggregation == "seq-mean-token-sqrt"
        bound = 0.0 if is_whole and not has_roots else tokens * 2.0**-53 * expected
        if abs(found.terms[name].denominator - expected) > bound:
            lines.append(f"{name}: {found.terms[name].denominator!r} instead of {expected!r}")
    return lines


@st.composite
def trials(draw: DrawFn, axis: str, max_ranks: int = MAX_RANKS) -> Trial:
    """Legal runs that are parallel along `axis`; shrinking goes towards few ranks, rows and loss tokens."""
    degrees = draw(layouts(axis, max_ranks))
    shape = draw(architectures(degrees))
    micro_batch_size = draw(st.sampled_from([1, 2, 3]))
    most = max(1, MAX_ROWS // (degrees["dp"] * micro_batch_size))
    if degrees.get("vpp", 1) > 1:
        num_microbatches = degrees["pp"] * draw(st.integers(1, max(1, most // degrees["pp"])))
    else:
        num_microbatches = draw(st.integers(1, min(most, 6)))
    num_rows = degrees["dp"] * micro_batch_size * num_microbatches
    unit = 2 * degrees["cp"] * (degrees["tp"] if degrees.get("sp", False) else 1)
    seq = unit * draw(st.integers(1, max(1, MAX_SEQ // unit)))
    masks = draw(st.sampled_from([rows(seq), rows(seq), sparse_rows(seq)]))
    steps = draw(st.lists(st.tuples(*[masks] * num_rows), min_size=1, max_size=2).map(tuple))
    data = {"data__seq_length": seq, "data__isolate_documents": draw(st.booleans())}
    return Trial(
        Case(degrees, micro_batch_size),
        steps,
        {**shape, **data, **draw(losses()), **draw(engines())},
        seed=draw(st.integers(0, 2**16)),
    )


@st.composite
def layouts(draw: DrawFn, axis: str, max_ranks: int) -> dict[str, Any]:
    """Keys of `Case.layout`: at least 2 along `axis`, at most `max_ranks` ranks; degrees of 3 too."""
    degrees: dict[str, Any] = {axis: draw(st.integers(2, min(4, max_ranks)))}
    left = max_ranks // degrees[axis]
    for other in draw(st.permutations([name for name in AXES if name != axis])):
        degrees[other] = draw(st.integers(1, min(4, left)))
        left //= degrees[other]
    if degrees["tp"] > 1:
        degrees["sp"] = draw(st.booleans())
    if degrees["cp"] > 1:
        degrees["cp_comm"] = draw(st.sampled_from(["allgather", "ulysses"]))
    if degrees["pp"] > 1:
        degrees["vpp"] = draw(st.sampled_from([1, 1, 2, 3]))
        stages = degrees["pp"] * degrees["vpp"]
        layers = st.integers(1, 2) if stages <= 4 else st.just(1)
        degrees["stage_layers"] = draw(st.lists(layers, min_size=stages, max_size=stages).map(tuple))
    return degrees


@st.composite
def architectures(draw: DrawFn, degrees: dict[str, Any]) -> dict[str, Any]:
    """A small model whose heads, columns and layers divide over the layout, with odd sizes elsewhere."""
    tp, cp = degrees["tp"], degrees["cp"]
    groups = tp * draw(st.sampled_from([1, 2]))
    queries = draw(st.sampled_from([1, 2, 3]))
    if degrees.get("cp_comm") == "ulysses":
        queries *= cp // math.gcd(groups // tp * queries, cp)
    window = draw(st.sampled_from([None, None, 1, 5]))
    return {
        "model__num_layers": sum(degrees.get("stage_layers", ())) or draw(st.sampled_from([1, 2, 3])),
        "model__hidden_size": 12 * draw(st.sampled_from([1, 2])),
        "model__head_dim": draw(st.sampled_from([4, 6])),
        "model__ffn_hidden_size": tp * draw(st.sampled_from([5, 12])),
        "model__num_attention_heads": groups * queries,
        "model__num_query_groups": groups,
        "model__vocab_size": draw(st.sampled_from([17, 61, 64])),
        "model__vocab_multiple": draw(st.sampled_from([1, 5, 24])),
        "model__tied_embeddings": draw(st.booleans()),
        "model__linear_bias": draw(st.booleans()),
        "model__norm": draw(st.sampled_from(["rmsnorm", "layernorm"])),
        "model__activation": draw(st.sampled_from(["swiglu", "gelu"])),
        "model__sliding_window": window,
    }


@st.composite
def losses(draw: DrawFn) -> dict[str, Any]:
    """The main term and up to two side terms, each with its own aggregation."""
    main = draw(terms())
    names = draw(st.sampled_from([(), ("z",), ("again",), ("z", "again")]))
    side_terms = {name: draw(terms()) | {"coefficient": draw(st.sampled_from([0.3, 0.05, 1.0]))} for name in names}
    if "z" in side_terms:
        side_terms["z"]["function"] = "mtrain.loss.z_loss:z_loss"
    return {f"loss__{key}": value for key, value in main.items()} | {"loss__side_terms": side_terms}


@st.composite
def terms(draw: DrawFn) -> dict[str, Any]:
    """Aggregation, its constant and the rule for empty sequences."""
    term: dict[str, Any] = {"aggregation": draw(st.sampled_from(get_args(Aggregation)))}
    if term["aggregation"] in NORM_AGGREGATIONS:
        term["norm_length"] = draw(st.sampled_from([1, 20, 4096]))
    return term | {"empty_sequences": draw(st.sampled_from(["exclude", "include"]))}


@st.composite
def engines(draw: DrawFn) -> dict[str, Any]:
    """What may change the order of the work, but not its result."""
    overlap = draw(st.sampled_from(["none", "reduce", "both"]))
    return {
        "train__distributed_optimizer": True if overlap == "both" else draw(st.booleans()),
        "train__overlap_grad_reduce": overlap != "none",
        "train__overlap_param_gather": overlap == "both",
        "train__recompute": draw(st.sampled_from(["none", "selective", "full"])),
    }


def rows(seq: int) -> SearchStrategy[Row]:
    """From fully masked to no mask at all."""
    return st.builds(
        Row,
        loss_tokens=st.one_of(st.just(0), st.just(1), st.integers(0, seq), st.just(seq)),
        place=st.sampled_from(get_args(Place)),
        is_fractional=st.booleans(),
        weight=st.sampled_from([1.0, 1.0, 1.0, 2.0, 0.0, 0.1, 1 / 3, 1e-6, 1e4]),
        edges=st.lists(st.integers(1, max(1, seq - 1)), max_size=4, unique=True).map(lambda x: tuple(sorted(x))),
    )


def sparse_rows(seq: int) -> SearchStrategy[Row]:
    """Almost all rows fully masked, so that whole microbatches and ranks have no loss token."""
    few = st.builds(Row, loss_tokens=st.integers(0, min(3, seq)), place=st.sampled_from(get_args(Place)))
    return st.one_of(st.just(Row()), st.just(Row()), few)
