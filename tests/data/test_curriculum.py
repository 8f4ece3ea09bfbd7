"""Blends by ranges of steps: order of samples, epochs that stay whole across phases, and fingerprints."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrain.config import Config
from mtrain.core.batch.order import BlendPhase, BlendPhases, SampleOrder
from mtrain.data.loader import StepLoader
from mtrain.data.shown import as_text
from mtrain.data.steps import fingerprint_until, has_phases
from tests.data.test_loader import assert_same, global_batch
from tests.data.test_packed_loader import Sequences, sequences

NUM_SOURCES = 4
BLEND = st.dictionaries(st.integers(0, NUM_SOURCES - 1), st.integers(1, 9), min_size=1)
LENGTHS = st.lists(st.integers(1, 50), max_size=3)


@st.composite
def drawn_phases(draw: st.DrawFn) -> list[BlendPhase]:
    lengths = draw(LENGTHS)
    blends = [draw(BLEND) for _ in range(len(lengths) + 1)]
    firsts = np.cumsum([0, *lengths]).tolist()
    return [BlendPhase(first, tuple(blend), tuple(map(float, blend.values()))) for first, blend in zip(firsts, blends)]


def turns_by_definition(phases: Sequence[BlendPhase], count: int) -> list[int]:
    """Returns the source of each sample, dealt one by one with fractions as Tijdeman (1980) defines it, anew in each
    phase."""
    found: list[int] = []
    ends = [*(phase.first for phase in phases[1:]), count]
    for phase, end in zip(phases, ends):
        shares = [Fraction(weight) / Fraction(sum(phase.weights)) for weight in phase.weights]
        slack = Fraction(1, max(1, 2 * len(shares) - 2))
        dealt = [0] * len(shares)
        for turn in range(1, end - phase.first + 1):
            ahead = [share * turn - had < slack for share, had in zip(shares, dealt)]
            due = [math.floor((had + 1 - slack) / share) for share, had in zip(shares, dealt)]
            chosen = min((one for one in range(len(shares)) if not ahead[one]), key=lambda one: (due[one], one))
            dealt[chosen] += 1
            found.append(phase.sources[chosen])
    return found[:count]


@settings(max_examples=30, deadline=None)
@given(phases=drawn_phases())
def test_samples_are_dealt_as_the_definition_says_and_numbered_without_gaps(phases: list[BlendPhase]) -> None:
    count = phases[-1].first + 60
    dealer, seen = BlendPhases(phases, NUM_SOURCES), Counter[int]()
    places = [dealer.locate(n) for n in range(count)]
    assert [place.source for place in places] == turns_by_definition(phases, count)
    for place in places:
        assert place.number == seen[place.source], "it goes on where the phase before left it"
        seen[place.source] += 1
    sources, numbers = dealer.locate_all(np.arange(count))
    assert list(zip(sources.tolist(), numbers.tolist())) == [tuple(place) for place in places]


@settings(max_examples=25, deadline=None)
@given(phases=drawn_phases(), start=st.integers(0, 10**13))
def test_shares_hold_far_from_the_last_border(phases: list[BlendPhase], start: int) -> None:
    dealer, last = BlendPhases(phases, NUM_SOURCES), phases[-1]
    first = dict.fromkeys(range(NUM_SOURCES), 0)
    for place in (dealer.locate(n) for n in range(last.first)):
        first[place.source] += 1
    for n in range(last.first + start, last.first + start + 20):
        place = dealer.locate(n)
        share = dict(zip(last.sources, last.weights))[place.source] / sum(last.weights)
        assert abs(place.number - first[place.source] - (n - last.first) * share) <= 1


@settings(max_examples=25, deadline=None)
@given(phases=drawn_phases(), sizes=st.lists(st.integers(1, 40), min_size=NUM_SOURCES, max_size=NUM_SOURCES))
def test_each_epoch_is_whole_whatever_borders_lie_in_it(phases: list[BlendPhase], sizes: list[int]) -> None:
    order = SampleOrder(11, BlendPhases(phases, NUM_SOURCES), sizes)
    by_epoch: dict[tuple[int, int], list[int]] = {}
    last: dict[int, int] = {}
    for place in (order.locate(g) for g in range(phases[-1].first + 90)):
        by_epoch.setdefault((place.source, place.epoch), []).append(place.index)
        assert last.get(place.source, 0) <= place.epoch
        last[place.source] = place.epoch
    for (source, epoch), indices in by_epoch.items():
        assert len(set(indices)) == len(indices)
        assert epoch == last[source] or sorted(indices) == list(range(sizes[source]))


def test_a_later_phase_moves_no_sample_before_it() -> None:
    first, second = BlendPhase(0, (0, 1), (2.0, 1.0)), BlendPhase(30, (1, 2), (1.0, 1.0))
    one, both = BlendPhases([first], 1 + 1), BlendPhases([first, second, BlendPhase(70, (0,), (1.0,))], 3)
    assert [one.locate(n) for n in range(30)] == [both.locate(n) for n in range(30)]
    assert [both.locate(n).source for n in range(70, 75)] == [0] * 5
    # the second period of the first blend, of which 20 are already dealt
    assert both.locate(70).number == 20


STEPS = 12


@pytest.fixture(params=["indexed", "sft", "packed"])
def config(
    request: pytest.FixtureRequest,
    make_config: Callable[..., Config],
    write_corpus: Callable[[str, Sequence[Sequence[int]]], str],
    word_tokenizer: Path,
    tmp_path: Path,
) -> Config:
    """Builds a configuration of three sources: the first two from the start, the last two from step 3 on, all from step
    7 on."""
    data: dict[str, Any] = {}
    if request.param == "indexed":
        paths = [write_corpus(name, [list(range(base, base + 30))] * 6) for name, base in CORPORA.items()]
    else:
        paths = [str(tmp_path / f"{name}.jsonl") for name in "abc"]
        for path, letter in zip(paths, "abc"):
            lines = [f'{{"prompt": "{letter}", "response": "{" d" * size}"}}\n' for size in range(1, 6) for _ in "xyz"]
            Path(path).write_text("".join(lines))
        data = {"kind": "sft", "tokenizer": str(word_tokenizer)}
        data |= {"packing": {}, "seq_length": 12} if request.param == "packed" else {}
    return make_config({**data, **blends(paths)})


CORPORA = {"a": 100, "b": 400, "c": 700}


def blends(paths: Sequence[str]) -> dict[str, Any]:
    a, b, c = paths
    later = [
        {"from_step": 3, "sources": [{"path": c, "weight": 3}, {"path": b}]},
        {"from_step": 7, "sources": [{"path": path} for path in paths]},
    ]
    return {"train": [{"path": a}, {"path": b}], "curriculum": later}


def sources_of(config: Config, step: int) -> Counter[int]:
    loader = StepLoader(config, 0, 1)
    return Counter(loader.stream.locate(int(number)).source for number in loader.steps.samples(step).numbers)


def test_each_step_reads_the_blend_that_holds_for_it(config: Config) -> None:
    assert [dict(sources_of(config, step)) for step in (0, 2)] == [{0: 4, 1: 4}] * 2
    assert [dict(sources_of(config, step)) for step in (3, 6)] == [{2: 6, 1: 2}] * 2
    assert sources_of(config, 7).keys() == {0, 1, 2}
    if config.data.kind == "indexed":
        tokens = global_batch(config, 1, 2, 3)["tokens"]
        assert sorted(Counter((tokens[:, 0] // 100 * 100).tolist()).items()) == [(400, 2), (700, 6)]


def held(config: Config, dp: int, step: int) -> Sequences:
    """Returns the samples of all ranks, wherever they lie."""
    found: Sequences = Counter()
    for rank in range(dp):
        found += sequences(StepLoader(config, rank, dp).batches(step))
    return found


@pytest.mark.parametrize(("dp", "micro_batch_size"), [(2, 1), (4, 2)])
def test_ranks_and_microbatches_change_nothing_at_a_border(config: Config, dp: int, micro_batch_size: int) -> None:
    train = config.train.model_copy(update={"micro_batch_size": micro_batch_size})
    for step in (2, 3, 6, 7, 8):
        if config.data.packing is None:
            assert_same(global_batch(config, dp, micro_batch_size, step), global_batch(config, 1, 2, step))
        else:
            assert held(config.model_copy(update={"train": train}), dp, step) == held(config, 1, step)


def test_reading_from_a_step_on_is_resuming_there(config: Config) -> None:
    straight = [StepLoader(config, 0, 1).batches(step) for step in range(9)]
    for start in (2, 3, 5, 7):
        with StepLoader(config, 0, 1).iterate(start) as batches:
            for step in range(start, 9):
                assert sequences(next(batches)) == sequences(straight[step]), step


def test_the_samples_of_an_epoch_come_once_across_borders(config: Config) -> None:
    loader = StepLoader(config, 0, 1)
    found = Counter(
        loader.stream.locate(int(number)) for step in range(STEPS) for number in loader.steps.samples(step).numbers
    )
    assert set(found.values()) == {1}
    sizes = [size for _, size in loader.stream.named_sizes]
    for source, size in enumerate(sizes):
        epochs = sorted({place.epoch for place in found if place.source == source})
        assert epochs == list(range(len(epochs)))
        whole = [sum(place.source == source and place.epoch == epoch for place in found) for epoch in epochs[:-1]]
        assert whole == [size] * len(whole)


def test_a_step_shows_its_phase(config: Config) -> None:
    loader = StepLoader(config, 0, 1)
    names = [source.path for source in config.data.all_sources]  # type: ignore[union-attr]
    assert as_text(loader.shown(3, 1)).startswith("Step 3 (phase 1 of the curriculum, from step 1 on: 0.5 ")
    assert f"from step 4 on: 0.75 {names[2]} + 0.25 {names[1]}): 1 of 8" in as_text(loader.shown(4, 1))
    assert "phase 3" in loader.shown(8, 1).phase
    assert [phase.from_step for phase in loader.start_entry(0).phases] == [0, 3, 7]


def test_fingerprints_are_equal_up_to_the_first_step_that_differs(config: Config) -> None:
    data = config.data
    later = data.curriculum  # type: ignore[union-attr]
    moved = later[1].model_copy(update={"from_step": 9})
    forms = {
        "all": later,
        "one": later[:1],
        "none": (),
        "moved": (later[0], moved),
        "earlier": (later[0].model_copy(update={"from_step": 2}), later[1]),
    }
    prints = {
        name: StepLoader(config.model_copy(update={"data": data.model_copy(update={"curriculum": form})}), 0, 1)
        for name, form in forms.items()
    }
    found = {name: loader.fingerprint for name, loader in prints.items()}
    assert len(set(found.values())) == len(forms)
    assert [has_phases(found[name]) for name in forms] == [True, True, False, True, True]

    def parting(one: str, other: str) -> int:
        """Counts the steps that read the same."""
        same = [fingerprint_until(found[one], step) == fingerprint_until(found[other], step) for step in range(STEPS)]
        assert all(before >= after for before, after in pairwise(same))
        return sum(same) - 1

    assert parting("all", "one") == parting("all", "moved") == 7
    assert parting("all", "none") == 3
    assert parting("all", "earlier") == 2
    for name, loader in prints.items():
        until = parting("all", name) if name != "all" else STEPS
        for step in range(until):
            assert [loader.stream.locate(int(n)) for n in loader.steps.samples(step).numbers] == [
                prints["all"].stream.locate(int(n)) for n in prints["all"].steps.samples(step).numbers
            ]
