"""Checks which layouts tools/bench/scaling.py measures, and what a row says. Nothing is timed."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import typer

from mtrain.arch.layout import Layout
from mtrain.config import Config
from mtrain.plan.search.cost import Workload, step_cost
from tests.messages import refuses
from tests.paths import DOCS
from tests.pool import Pool
from tests.tools.scaling_ranks import measured
from tools.bench.parts import machine
from tools.bench.scaling import AXES, HEAD, Row, Sent, Size, config_of, earlier, fitted, line, row_of, table

TINY = Size(hidden=32, layers=2, seq=16)


def test_every_axis_is_divided_over_all_ranks() -> None:
    for axis in AXES:
        for ranks in (1, 2, 4, 8):
            for kind in ("weak", "strong"):
                config = config_of(axis, ranks, kind, TINY)
                layout = Layout.from_config(config, ranks)
                found = {"tp": layout.tp, "pp": layout.pp, "vpp": layout.pp, "dp": layout.dp, "ep": layout.ep}
                assert found.get(axis, layout.cp) == ranks
                assert (layout.vpp == 2) == (axis == "vpp" and ranks > 1)
                assert axis[3:] == layout.cp_comm or not axis.startswith("cp-")
                assert config.train.global_batch_size == 8 * (ranks if kind == "weak" else 1)


def test_a_row_has_seconds_bytes_bubbles_and_a_prediction(pool: Pool) -> None:
    config = config_of("pp", 2, "strong", TINY)
    few = {"model": {"num_layers": 2}, "train": {"global_batch_size": 4}}
    content = config.model_dump()
    config = Config.model_validate({**content, **{name: {**content[name], **changed} for name, changed in few.items()}})
    layout = Layout.from_config(config, 2)
    found = pool.run(measured, layout, config)
    links, core = found[0][1], found[0][2]
    assert found[1][1] == links, "the slowest rank's"
    assert min(links.latency_s, links.bandwidth, core.product_flops, core.attention_flops) > 0
    of_machine = machine.cluster(core, links, machine.Fitted(1e9, 1e-5), TINY.hidden)
    row = row_of("pp", "strong", config, layout, [each for each, _, _ in found], of_machine)
    assert row.sent["pp send"] == Sent(4, 4 * 16 * 32 * 4 / 1e6)  # each microbatch forward, in float32
    assert row.bubble == pytest.approx(1 / 5)
    assert row.bubble_by_formula == pytest.approx(1 / 5)
    assert row.bubble_by_seconds is not None
    assert 0 < row.bubble_by_seconds < 1
    assert 0 < row.gloo_share < 1
    assert row.slowest_s is not None
    assert row.slowest_s >= row.cpu_s
    assert row.deviation == row.predicted_s / row.slowest_s > 0
    assert row.cpu_us_a_token == pytest.approx(2 * row.cpu_s / (4 * 16) * 1e6)
    assert sum(found[0][0].slot_s) < found[0][0].cpu_s


def test_the_page_has_the_columns_of_a_row() -> None:
    alone = Row("tp", 1, "weak", 0.2, 10.0, 0.01, {}, 0.2)
    row = Row("tp", 2, "strong", 0.1, 15.0, 0.25, {"tp all-gather": Sent(3, 1.5)}, 0.15)
    wanted = "| tp | 2 | strong | 100 | 1.50 | 25% | tp all-gather 3, 1.50 |  | 1.50 |"
    assert line(row, [alone, row]) == wanted
    assert "Predicted over measured, of several ranks: median 1.50, from 1.50 to 1.50." in table([alone, row], TINY, "")
    assert HEAD.splitlines()[0].count("|") == wanted.count("|")
    page = (DOCS / "proof" / "scaling.md").read_text()
    for axis in AXES:
        ranks = {int(cells[2]) for text in page.splitlines() if (cells := text.split("|"))[1:2] == [f" {axis} "]}
        assert ranks == {1, 2, 4, 8}


def test_rows_of_other_sizes_are_not_mixed(tmp_path: Path) -> None:
    path, row = tmp_path / "scaling.json", Row("tp", 2, "weak", 0.1, 15.0, 0.25, {"tp all-gather": Sent(3, 1.5)}, 0.15)
    assert earlier(path, TINY) == earlier(None, TINY) == []
    path.write_text(json.dumps({"size": asdict(TINY), "rows": [asdict(row)]}))
    assert earlier(path, TINY) == [row]
    with refuses(typer.BadParameter):
        earlier(path, Size())


def test_the_fitted_bandwidth_makes_the_prediction_right() -> None:
    assert machine.fitted(lambda bandwidth: 1 + 1e10 / bandwidth, 3.0) == pytest.approx(5e9)
    assert machine.fitted(lambda bandwidth: 1 + 1e10 / bandwidth, 0.5) == pytest.approx(1e13), "the nearest"


def test_predictions_for_one_rank_are_what_it_was_measured_to_need() -> None:
    core, large, small = machine.Core(1e11, 1e10), config_of("dp", 1, "weak", TINY), config_of("pp", 1, "weak", TINY)
    fit = fitted(core, TINY, large, 0.2, small, 0.5)
    alone = machine.cluster(core, machine.NOBODY, fit, TINY.hidden)
    assert [step_cost(Workload(config, Layout(), alone)).time.total for config in (large, small)] == pytest.approx(
        [0.2, 0.5]
    )
