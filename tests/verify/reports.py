"""A parity report with everything in it, for tests."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

from pydantic import TypeAdapter

from mtrain.verify.core.result import (
    Deviation,
    Diagnosis,
    LayoutResult,
    ParityReport,
    Report,
    StepValues,
    Tolerance,
)

TENSORS = ("embedding.word_embeddings.weight", "decoder.layers.0.mlp.linear_fc1.weight", "output_layer.weight")


def read_back(kind: type[Report], text: str) -> Any:
    """Reads what `to_json` wrote; "inf" and "nan" become numbers."""
    return TypeAdapter(kind).validate_python(json.loads(text))


def step_values(step: int, grad_norm: float = 2.0) -> StepValues:
    """Builds a step of a loss with one side term."""
    means = {"main": 4.0 - 0.1 * step, "z": 20.0}
    counts = {"main": 100.0, "z": 100.0}
    return StepValues(step, 4.0, means, {name: 100 * mean for name, mean in means.items()}, counts, grad_norm)


def deviations(gradient: float = 1e-7) -> tuple[Deviation, ...]:
    """Builds deviations of two steps; the second step's last gradient deviates as given."""
    found = [Deviation("lr", "lr", 9, 1e-16, 1e-15)]
    for step in (1, 2):
        found += [Deviation("samples", name, step, 0.0, 0.0) for name in ("tokens", "labels")]
        found += [Deviation("denominator", term, step, 0.0, 0.0) for term in ("main", "z")]
        found += [Deviation("loss", term, step, 2e-8, 1e-6) for term in ("main", "z")]
        found += [Deviation("gradient", name, step, 1e-7, 1e-5) for name in TENSORS]
        found += [Deviation("grad_norm", "grad_norm", step, 3e-8, 1e-5)]
        found += [Deviation("update", name, step, 1e-8, 1e-6) for name in TENSORS]
    last = max(index for index, each in enumerate(found) if each.kind == "gradient")
    found[last] = Deviation("gradient", TENSORS[-1], 2, gradient, 1e-5)
    return tuple(found)


def layout_result(name: str, axes: dict[str, str], gradient: float = 1e-7) -> LayoutResult:
    """Builds two steps of one layout."""
    steps = (step_values(1), step_values(2))
    return LayoutResult(name, axes, 2, 1.5, steps, steps, deviations(gradient))


def report_in_float64() -> ParityReport:
    """Builds a report of a model that is judged in float64, with what float32 rounded."""
    found = report()
    rounded = [Deviation("rounding", name, 1, 3e-5, 8e-3) for name in ("loss main", *TENSORS)]
    layouts = tuple(replace(each, deviations=(*each.deviations, *rounded)) for each in found.layouts)
    return replace(found, precision="float64", layouts=layouts)


def report(gradient: float = 1e-7) -> ParityReport:
    """Builds a reference and three layouts; the second one's gradient deviates as given, nan and inf included."""
    steps = (step_values(1), step_values(2))
    failed = not gradient <= 1e-5
    diagnosis = Diagnosis(
        "cp", "tp1-pp1-cp2-dp1-mbs1", 2, "gradient", TENSORS[-1], gradient, 1e-5, "layer 0 mlp", ("one", "two")
    )
    refused = LayoutResult("tp1-pp2-cp1-dp1-mbs1", {"pp": "2"}, 2, 0.1, error="rank 0 raised")
    return ParityReport(
        created="2026-01-01T00:00:00+00:00",
        command="mtrain verify parity configs/model/tiny.yaml",
        environment={"torch": "2.13", "device": "cpu"},
        config={"model": {"num_layers": 2}},
        changes=("model.hidden_size: 4096 -> 64",),
        data="random tokens under random masks",
        num_steps=2,
        tolerances=tuple(Tolerance(kind, 1e-6, "u", {"u": 2.0**-24}, "relative") for kind in ("loss", "gradient")),
        tensors=TENSORS,
        reference=LayoutResult("reference", {}, 1, 0.5, steps, steps),
        layouts=(
            layout_result("tp2-pp1-cp1-dp1-mbs1", {"tp": "2"}),
            layout_result("tp1-pp1-cp2-dp1-mbs1", {"cp": "2"}, gradient),
            *([refused] if failed else []),
        ),
        injected="cp-scaled-loss" if failed and not math.isnan(gradient) else None,
        diagnosis=diagnosis if failed else None,
    )
