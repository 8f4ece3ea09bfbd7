"""The cost model compared with published runs."""

from __future__ import annotations

import re

import pytest

from mtrain.arch.layout import Layout
from mtrain.plan.search.cost import Workload, step_cost, step_mfu
from mtrain.plan.search.hardware import GPUS, Cluster
from tests.paths import DOCS
from tests.plan.search.published import GROWING, MAXTEXT, RUNS, V6E, Published
from tools.bench.one_gpu.shapes import EXPERTS, ONE_B, Bench, speed_config

FACTOR = 1.3
"""Largest factor between prediction and publication, as docs/machines/planning.md states it."""
TYPICAL = 1.15


def predicted(run: Published) -> float:
    layout, cluster = Layout.from_config(run.config, run.num_gpus), Cluster(GPUS[run.gpu])
    return step_mfu(Workload(run.config, layout, cluster), step_cost(Workload(run.config, layout, cluster)).time.total)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.name} on {run.num_gpus}")
def test_the_predicted_utilisation_is_near_the_published_one(run: Published) -> None:
    assert run.mfu / FACTOR < predicted(run) < run.mfu * FACTOR


def test_most_are_much_nearer() -> None:
    ratios = [predicted(run) / run.mfu for run in RUNS]
    assert sum(1 / TYPICAL < ratio < TYPICAL for ratio in ratios) >= len(RUNS) - 2


def test_what_was_published_in_pairs_keeps_its_order() -> None:
    by_size = {run.num_gpus: predicted(run) for run in RUNS if run.name == "GPT-3 175B"}
    assert by_size[96] > by_size[4608], "strong scaling: a fixed batch over more GPUs"
    llama = {run.num_gpus: predicted(run) for run in RUNS if run.name == "Llama 3 405B"}
    assert llama[8192] > llama[16384], "half the microbatches, a larger bubble"


def test_the_documentation_shows_these_numbers() -> None:
    text = (DOCS / "machines" / "planning.md").read_text()
    rows = re.findall(r"^\| (.+?) \| (\d+) (\w+) \| ([\d.]+) % \| ([\d.]+) % \|", text, re.MULTILINE)
    found = [(name, int(num), gpu, float(mfu), float(ours)) for name, num, gpu, mfu, ours in rows]
    expected = [
        (run.name, run.num_gpus, run.gpu, round(100 * run.mfu, 1), round(100 * predicted(run), 1)) for run in RUNS
    ]
    assert found == expected


def test_every_deviation_is_that_of_its_row() -> None:
    text = (DOCS / "machines" / "planning.md").read_text()
    rows = re.findall(r"^\|.* \| ([\d.]+) % \| ([\d.]+) % \| ([+-]\d+) % \|", text, re.MULTILINE)
    assert len(rows) == len(RUNS) + len(MAXTEXT)
    for published, ours, deviation in rows:
        assert float(deviation) == round(100 * (float(ours) / float(published) - 1))


def test_the_documentation_shows_how_runs_grow() -> None:
    text = (DOCS / "machines" / "planning.md").read_text()
    found = re.findall(
        r"^\| Llama 3 \w+ \| (\d+) \| ([\w-]+) \| ([\d.]+) \| ([\d.]+) % \| ([\d.]+) % \|", text, re.MULTILINE
    )
    expected, shares = [], []
    for config, num in GROWING:
        layout, cluster = Layout.from_config(config, num), Cluster(GPUS["h100"])
        cost = step_cost(Workload(config, layout, cluster))
        shares.append(step_mfu(Workload(config, layout, cluster), cost.time.total))
        row = (f"{cost.time.total:.2f}", f"{100 * shares[-1]:.1f}", f"{100 * cost.bubble_share:.1f}")
        expected.append((str(num), str(layout), *row))
    assert found == expected
    assert shares[:3] == sorted(shares[:3], reverse=True), "a fixed batch over more GPUs"
    assert shares[3:] == sorted(shares[3:], reverse=True)


def test_maxtext_on_trillium_is_predicted_within_the_same_factor() -> None:
    """The chips are another vendor's, and nothing was fitted to them."""
    found = re.findall(
        r"^\| MaxText (.+?) \| ([\d.]+) % \| ([\d.]+) % \|",
        (DOCS / "machines" / "planning.md").read_text(),
        re.MULTILINE,
    )
    expected = []
    for run in MAXTEXT:
        layout = Layout.from_config(run.config, run.num_gpus)
        ours = step_mfu(Workload(run.config, layout, V6E), step_cost(Workload(run.config, layout, V6E)).time.total)
        assert run.mfu / FACTOR < ours < run.mfu * FACTOR
        expected.append((run.name, f"{100 * run.mfu:.1f}", f"{100 * ours:.1f}"))
    assert found == expected


def test_our_own_steps_on_an_h100_are_predicted_as_the_page_says() -> None:
    """The second column of docs/proof/performance.md is the median that was measured."""
    text = (DOCS / "proof" / "performance.md").read_text()
    rows = re.findall(r"^\| .+ \| [\d.]+ % \| ([\d.]+), best [\d.]+ \| ([\d.]+) \|", text, re.MULTILINE)
    bench, cluster = Bench("cpu", is_tiny=False), Cluster(GPUS["h100"])
    apart = {"megatron": {"gradient_accumulation_fusion": False}}  # weight gradients were fused in the second row alone
    for (model, micro_batch), (measured, on_page) in zip(
        ((ONE_B | apart, 2), (ONE_B, 2), (EXPERTS | apart, 1)), rows, strict=True
    ):
        config = speed_config(bench, model, 4096, micro_batch)
        seconds = step_cost(Workload(config, Layout.from_config(config, 1), cluster)).time.total
        assert f"{seconds:.3f}" == on_page
        assert 1 / TYPICAL < seconds / float(measured) < TYPICAL
