"""Check `mtrain verify backend`: compares the layers that a configuration could use with ours, and certifies them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mtrain.arch.layout import Layout
from mtrain.base.certificate import Certificate, Comparison, certificates
from mtrain.base.errors import ConfigError, MachineError
from mtrain.base.spelling import counted
from mtrain.config import Config
from mtrain.config.schema.sections import Sections
from mtrain.core.layers.certified import layers_of, machine_of
from mtrain.verify.backend.candidates import CANDIDATES, MISSING_GRADIENT, NO_CANDIDATES, Candidate
from mtrain.verify.backend.cases import NUM_ROWS, Case, cases_of, few_layers, length_of
from mtrain.verify.backend.errors import MEASURES, TensorError, tolerances
from mtrain.verify.backend.worker import BackendJob, CaseResult, compare
from mtrain.verify.core.ranks import Pool, attempted
from mtrain.verify.core.result import BackendReport, Deviation, LayoutResult, badness, encoded, summary
from mtrain.verify.parity import Progress, Request, device_for
from mtrain.verify.planted.inject import BACKEND_FAULTS, chosen

PRELOADED = ("mtrain.verify.backend.worker",)
TIMEOUT_S = 600
_REPEATS = {"cuda": 10, "cpu": 3}
_CPU_TOKENS = 512
"""Largest number of timed tokens on a CPU."""


@dataclass(frozen=True)
class Certified:
    """Report for people and certificate for runs."""

    report: BackendReport
    certificate: Certificate


def verify_backend(
    config: Config,
    request: Request,
    progress: Progress,
    pool: Pool | None = None,
    candidates: Sequence[Candidate] = CANDIDATES,
) -> Certified:
    """Runs the check; see `verify_parity`. `candidates` are compared if no fault is planted."""
    device, num_devices = device_for(config.train, max_ranks=config.layout.cp)
    if num_devices < config.layout.cp:
        raise ConfigError(
            f"layout.cp={config.layout.cp} needs as many GPUs to compare attention, but this machine has "
            f"{num_devices}; add layout.cp=1 to certify the layers of runs without it"
        )
    if request.fault is not None:
        chosen(request.fault, config, (), BACKEND_FAULTS)
        candidates = [MISSING_GRADIENT]
    few = few_layers(config, length_of(config.layout.cp, config.row_width))
    shape = config.train.micro_batch_size, config.row_width
    if device == "cpu":
        step = 2 * config.layout.cp
        shape = 1, max(step, min(config.row_width, _CPU_TOKENS) // step * step)
    check = _Comparisons(few, cases_of(config), shape, pool or Pool(device, PRELOADED, TIMEOUT_S), progress)
    outcomes = {candidate.name: check.of(candidate) for candidate in candidates}
    compared = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, Comparison)}
    absent = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, str)}
    if not compared:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in absent.items())
        raise MachineError(f"this machine has no other layers to compare with ours ({reasons})")
    machine, origin = machine_of(torch.device(device)), request.origin(device)
    origin["environment"] |= machine
    report = BackendReport(
        **origin,
        config=few.model_dump(mode="json"),
        changes=(),
        data=f"random hidden states, {NUM_ROWS} rows of {counted(few.data.seq_length, 'token')}",
        num_steps=1,
        tolerances=tolerances(few.train),
        tensors=tuple(dict.fromkeys(deviation.name for result in check.results for deviation in result.deviations)),
        reference=LayoutResult("float64", {}, 1, 0.0),
        layouts=tuple(check.results),
        times=tuple(check.times),
        left_out={**absent, **NO_CANDIDATES},
    )
    return Certified(report, Certificate(report.created, machine, layers_of(config), compared))


def known_certificate(config: Sections, folder: Path) -> str:
    """Returns the file name of the certificate of these layers on this machine; empty if none exists."""
    device, _ = device_for(config.train, max_ranks=1)
    layers, machine = layers_of(config), machine_of(torch.device(device))
    for certificate in certificates(folder):
        if (certificate.layers, certificate.machine) == (layers, machine):
            return certificate.name
    return ""


@dataclass
class _Comparisons:
    config: Config
    cases: Sequence[Case]
    timed_shape: tuple[int, int]
    pool: Pool
    progress: Progress
    results: list[LayoutResult] = field(default_factory=list)
    times: list[str] = field(default_factory=list)

    @property
    def _layout(self) -> Layout:
        return Layout(cp=self.config.layout.cp, cp_comm=self.config.layout.cp_comm)

    def of(self, candidate: Candidate) -> Comparison | str:
        """Compares one candidate; returns the reason if it cannot be built here."""
        job = BackendJob(self.config, candidate, self.cases, self.timed_shape, _REPEATS[self.pool.device])
        ranks: list[Any] = []

        def find() -> dict[str, Any]:
            ranks.extend(self.pool.run(compare, self._layout, job))
            return {}

        whole = attempted(candidate.name, {}, self._layout.world_size, find)
        if whole.error is not None:
            self._add(whole)
            return Comparison(False, 0.0, 0.0, error=whole.error)
        if isinstance(ranks[0], str):
            self.progress(f"{candidate.name}: left out ({ranks[0]})")
            return ranks[0]
        seconds = whole.seconds / len(self.cases)
        results = [_worst_of_ranks([rank[number] for rank in ranks]) for number in range(len(self.cases))]
        for case, result in zip(self.cases, results, strict=True):
            name, deviations = f"{candidate.name}: {case.name}", tuple(_deviations(result.errors))
            self._add(LayoutResult(name, {}, self._layout.world_size, seconds, deviations=deviations))
            self.times.append(f"{name}: {result.ms:.3g} ms, torch layers {result.own_ms:.3g} ms")
        weighed = list(zip(self.cases, results, strict=True))
        return Comparison(
            passed=all(error.passed for result in results for error in result.errors),
            ms=sum(case.num_layers * result.ms for case, result in weighed),
            own_ms=sum(case.num_layers * result.own_ms for case, result in weighed),
            cases=tuple(self._case_record(case, result) for case, result in weighed),
        )

    def _add(self, result: LayoutResult) -> None:
        self.results.append(result)
        self.progress(summary(result))

    def _case_record(self, case: Case, result: CaseResult) -> dict[str, Any]:
        return {
            "case": case.name,
            "num_layers": case.num_layers,
            "shape": [NUM_ROWS, self.config.data.seq_length, self.config.model.hidden_size],
            "timed_shape": [*self.timed_shape, self.config.model.hidden_size],
            "ms": result.ms,
            "own_ms": result.own_ms,
            "errors": [encoded({**error._asdict(), "passed": error.passed}) for error in result.errors],
        }


def _worst_of_ranks(ranks: Sequence[CaseResult]) -> CaseResult:
    """Keeps the worst rank of each tensor and the slowest time."""
    by_tensor = zip(*(rank.errors for rank in ranks))
    worst = [max(errors, key=lambda error: badness(_deviation(error))) for errors in by_tensor]
    return CaseResult(worst, max(rank.ms for rank in ranks), max(rank.own_ms for rank in ranks))


def _deviations(errors: Sequence[TensorError]) -> list[Deviation]:
    """Keeps the worse measure of each tensor, in units of its tolerance."""
    count = len(MEASURES)
    pairs = (errors[start : start + count] for start in range(0, len(errors), count))
    return [max((_deviation(error) for error in pair), key=badness) for pair in pairs]


def _deviation(error: TensorError) -> Deviation:
    # an infinite error of our own layers would let every candidate pass
    tolerance = error.tolerance if error.passed or error.candidate > error.tolerance else 0.0
    return Deviation(error.kind, error.name, 1, error.candidate, tolerance)
