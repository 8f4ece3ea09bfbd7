"""Runs on blends that change at steps: resumed across phases on other ranks, and with other blends to come."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtrain.data.ledger import Ledger
from tests.fault_table import Notice
from tests.training.test_changed import manifest_changes, of_corpus, write_corpus
from tests.training.test_trainer import command, finished, numbers, records, start

__all__ = ["command", "start"]

CONSENT = "checkpoint.allow_changed=[data.curriculum]"


def curriculum(*blends: tuple[int, dict[Path, float]]) -> str:
    parts = [
        {"from_step": step, "sources": [{"path": str(path), "weight": weight} for path, weight in blend.items()]}
        for step, blend in blends
    ]
    return f"data.curriculum={json.dumps(parts)}"


@pytest.mark.fault(
    "input",
    "a blend of data.curriculum was changed that the run has already trained",
    happens="resuming is refused whatever checkpoint.allow_changed says; blends of steps to come change with consent",
    exit_code=3,
)
def test_a_run_goes_on_over_the_borders_of_its_curriculum(
    command: Callable[..., list[str]], start: Any, tmp_path: Path, notice: Notice
) -> None:
    a, b, c = (write_corpus(tmp_path / "here" / name, first) for name, first in (("a", 0), ("b", 20), ("c", 40)))
    late = (2, {b: 1.0, c: 1.0})
    whole, other = curriculum(late, (4, {c: 1.0})), curriculum(late, (4, {a: 1.0}), (5, {c: 3.0, a: 1.0}))
    data = of_corpus(a, b)
    assert finished(start(command(*data, whole, run="straight")))[0] == 0
    assert finished(start(command(*data, whole, "train.num_steps=1")))[0] == 0
    # two ranks across the first phase border, then one again across the second
    code, _, errors = finished(start(command(*data, whole, "train.num_steps=3", "train.micro_batch_size=1", ranks=2)))
    assert code == 0, errors
    code, output, errors = finished(start(command(*data, whole)))
    assert code == 0, errors
    ledgers = [Ledger(tmp_path / name / "ledger") for name in ("run", "straight")]
    assert [ledgers[0].step(step) for step in range(1, 7)] == [ledgers[1].step(step) for step in range(1, 7)]
    for one, two in zip(numbers(tmp_path / "run"), numbers(tmp_path / "straight"), strict=True):
        assert one == pytest.approx(two, rel=1e-5)

    inspect = [*command()[:3], "inspect", "data", str(tmp_path / "run")]
    code, output, errors = finished(start(inspect))
    assert code == 0, errors + output
    assert "phase 2, steps 3 to 4: 8 samples" in output
    assert f"  {b}: 4, 50.00% of them; 50.00% requested" in output
    assert f"  {c}: 8, 100.00% of them; 100.00% requested" in output
    assert "6 steps: each sample of an epoch once" in output
    assert f"phase 3 of the curriculum, from step 5 on: 1 {c}\n" in finished(start([*inspect, "--step", "5"]))[1]

    # three steps are done: the second phase border is yet to come
    begin = command(*data, whole, "train.num_steps=3", run="changed")
    assert finished(start(begin))[0] == 0
    code, _, errors = finished(start(command(*data, other, run="changed")))
    assert code == 6, errors
    assert "data.curriculum had other values" in errors
    past = curriculum((1, {b: 1.0, c: 1.0}), (4, {c: 1.0}))
    with notice:
        code, _, errors = finished(start(command(*data, past, CONSENT, run="changed")))
    assert code == notice.exit_code, errors
    assert "change the data of steps 1 to 3, which " in errors
    assert "as a blend of data.curriculum with from_step=3 or more" in errors
    code, output, errors = finished(start(command(*data, other, CONSENT, run="changed")))
    assert code == 0, errors
    assert "the data of all steps so far are unchanged" in output
    assert {change["key"] for change in manifest_changes(tmp_path / "changed", 6)} == {"data.curriculum"}
    assert records(tmp_path / "changed", "change")[0]["step"] == 3
    assert finished(start(command(*data, other, run="other")))[0] == 0
    ledgers = [Ledger(tmp_path / name / "ledger") for name in ("changed", "other")]
    assert [ledgers[0].step(step) for step in range(1, 7)] == [ledgers[1].step(step) for step in range(1, 7)]
    assert numbers(tmp_path / "changed") == numbers(tmp_path / "other"), "as if it had been so from the start"
    assert {each.lost for each in ledgers[0].epochs()} == {0}
    assert len(ledgers[0].epochs()) == len(ledgers[1].epochs()), "the same sources before and after the change"
