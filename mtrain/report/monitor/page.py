"""HTML report of a run, as one self-contained file."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from markupsafe import Markup

from mtrain.config.changes import flat_keys
from mtrain.config.schema.loss import MAIN_TERM
from mtrain.report.metrics.record import StepRecord, ValidRecord
from mtrain.report.metrics.shown import as_duration, as_size
from mtrain.report.monitor.history import RunHistory, read_history
from mtrain.report.monitor.state import RunState
from mtrain.report.pages.charts import Curve, history_chart
from mtrain.report.pages.html import render, write_page
from mtrain.runs.events import EventKind
from mtrain.runs.folder import RunFolder
from mtrain.runs.goodput import goodput_of, read_starts

_MOST_PATHS = 3


def identity_of(run: RunHistory) -> dict[str, str]:
    """Returns the head of the page, without what the run's files do not tell."""
    keys = flat_keys(run.config) if run.config else {}
    found = {"model": _model(keys), "data": _data(keys), "devices": _devices(run.environment)}
    return {name: text for name, text in found.items() if text}


def _model(keys: Mapping[str, Any]) -> str:
    origin = keys.get("model.hf") or keys.get("checkpoint.initialize_from")
    layers, width, words = (keys.get(f"model.{name}") for name in ("num_layers", "hidden_size", "vocab_size"))
    parts = [f"from {origin}"] if origin else []
    if layers and width and words:
        parts.append(f"{layers} layers of width {width:,}, {words:,} tokens in the vocabulary")
    if keys.get("model.experts.num_experts"):
        parts.append(f"{keys['model.experts.num_experts']} experts, {keys.get('model.experts.top_k')} for a token")
    if keys.get("adapter.rank"):
        parts.append(f"{keys.get('adapter.kind')} of rank {keys['adapter.rank']}")
    return "; ".join(parts)


def _data(keys: Mapping[str, Any]) -> str:
    if "data.kind" not in keys:
        return ""
    paths = [str(source["path"]) for source in keys.get("data.train") or [] if "path" in source]
    parts = [str(keys["data.kind"])]
    if paths:
        more = f" and {len(paths) - _MOST_PATHS} more" if len(paths) > _MOST_PATHS else ""
        parts.append(", ".join(PurePath(path).name for path in paths[:_MOST_PATHS]) + more)
    if keys.get("data.seq_length") and keys.get("train.global_batch_size"):
        unit = "packed rows" if keys.get("data.packing.batch") == "rows" else "samples"
        parts.append(f"{keys['train.global_batch_size']:,} {unit} of up to {keys['data.seq_length']:,} tokens a step")
    return "; ".join(parts)


def _devices(environment: Mapping[str, str]) -> str:
    ranks, device = environment.get("world_size"), environment.get("device")
    if not ranks or not device:
        return ""
    processor = environment.get("gpu", "").removeprefix("none, ")
    kind = f"CPU ({processor})" if device == "cpu" else processor or device
    layout = environment.get("layout")
    return f"{ranks} x {kind}" + (f", {layout}" if layout else "")


_TRAINING, _VALIDATION = "training", "validation"
_WIDE = 30.0
"""Ratio of a norm's largest to its smallest value above which its axis is logarithmic."""
_MAX_ROWS = 300
_MAX_ANSWERS = 60
"""Most answers that are shown, the latest ones."""
_GIB = 2**30


class HistoryLine(NamedTuple):
    """One line of the list of events."""

    time: str
    """Time for people; empty if unknown."""
    step: int
    kind: str
    text: str


def write_run_page(run: Path, page: Path) -> None:
    """Writes the report of a run, in one move."""
    write_page(page, run_page(read_history(run, time.time())))


def run_page(run: RunHistory) -> str:
    """Makes the page: state, numbers, curves, starts, events, ranks, configuration, in this order."""
    lines = list(_lines(run))
    figures = [(title, [(axis, chart)]) for title, axis, chart in _figures(run)]
    return render(
        "run.html",
        run=run,
        word=str(run.status.standing.state).upper(),
        is_good=run.status.standing.state not in (RunState.FAILED, RunState.SILENT),
        headline=_headline(run),
        notes=_notes(run),
        identity=identity_of(run),
        facts=_facts(run),
        answers=run.answers[-_MAX_ANSWERS:],
        curves=_legend(run),
        figures=figures,
        has_marks=bool(_marks(run)),
        lines=lines[-_MAX_ROWS:],
        num_left_out=max(0, len(lines) - _MAX_ROWS),
        beats=run.beats[:_MAX_ROWS],
        clock=_clock,
        as_duration=as_duration,
        as_size=as_size,
    )


def _headline(run: RunHistory) -> str:
    status = run.status
    of = "" if status.num_steps is None else f" of {status.num_steps:,}"
    return f"{status.name}: step {status.step:,}{of}"


def _notes(run: RunHistory) -> list[str]:
    keys = flat_keys(run.config) if run.config else {}
    tags = keys.get("run.tags") or []
    reported = (
        run.status.standing.reason,
        keys.get("run.notes"),
        f"Tags: {', '.join(map(str, tags))}." if tags else "",
    )
    return [str(note) for note in reported if note]


def _facts(run: RunHistory) -> dict[str, str]:
    status, steps, passes = run.status, run.curves.steps, run.curves.comparable_passes
    facts: dict[str, str] = {}
    updated = [step for step in steps if not step.empty]
    if updated:
        facts["loss"] = f"{updated[-1].loss:.4f} at step {updated[-1].step}"
    if passes:
        best = min(passes, key=lambda each: each.valid_loss)
        facts["validation loss"] = f"{passes[-1].valid_loss:.4f}, best {best.valid_loss:.4f} at step {best.step}"
    seconds, tokens = sum(step.seconds for step in steps), sum(step.tokens for step in steps)
    if seconds > 0:
        facts["trained"] = (
            f"{tokens:,} tokens of text in {as_duration(seconds)} of steps, {tokens / seconds:,.0f} a second"
        )
    if run.starts:
        wall_s, repeated = sum(start.seconds for start in run.starts), sum(start.num_repeated for start in run.starts)
        facts["starts"] = f"{len(run.starts)} over {as_duration(wall_s)} of wall time; {repeated} steps made again"
    if (goodput := goodput_of(read_starts(RunFolder(status.folder).starts))) is not None:
        facts["goodput"] = goodput.lines()[0].removeprefix("goodput ")
    memory = [step.memory_bytes for step in steps if step.memory_bytes is not None]
    if memory or status.memory_bytes is not None:
        facts["memory"] = f"{as_size(max([*memory, status.memory_bytes or 0]))} on one rank at most"
    if status.standing.state in (RunState.RUNNING, RunState.SAVING):
        facts["remaining"] = as_duration(status.eta_s)
    counts = {"skipped steps": sum(s.skipped is not None for s in steps), "empty steps": sum(s.empty for s in steps)}
    facts |= {name: str(count) for name, count in counts.items() if count}
    saves = [event for event in run.events if event.kind is EventKind.SAVE]
    if saves:
        taken = [float(s) for event in saves if isinstance(s := event.facts.get("seconds"), int | float)]
        slowest = f", the slowest in {max(taken):.1f} s" if taken else ""
        facts["saves"] = f"{len(saves)}{slowest}"
    if status.last_checkpoint is not None:
        facts["newest checkpoint"] = f"step {status.last_checkpoint}"
    return facts


def _marks(run: RunHistory) -> list[int]:
    """Returns the steps after which a later start resumed."""
    return sorted({start.resumed_step for start in run.starts[1:] if start.resumed_step})


def _legend(run: RunHistory) -> list[Curve]:
    """Returns the legend of curves that share a picture; empty if none do."""
    names = [_TRAINING, *_set_names(run.curves.passes)]
    return [Curve(name, name, slot, ()) for slot, name in enumerate(names)] if len(names) > 1 else []


def _set_names(passes: Sequence[ValidRecord]) -> list[str]:
    """Returns the names of the validation sets in the legend."""
    if not passes:
        return []
    names = dict.fromkeys(name for record in passes for name in record.valid_sets)
    return [f"{_VALIDATION}: {name}" for name in names] or [_VALIDATION]


def _figures(run: RunHistory) -> Iterator[tuple[str, str, Markup]]:
    """Yields title, caption of the axis, and picture of everything that the run has recorded."""
    marks, steps = _marks(run), run.curves.steps
    for title, axis, curves in _quantities(run):
        drawn = [curve for curve in curves if curve.points]
        if not drawn:
            continue
        values = [value for curve in drawn for _, value in curve.points]
        low, high = min(values), max(values)
        is_log = title == "gradient norm" and low > 0 and math.isfinite(high) and high / low > _WIDE
        words = f"{title} by step, from {steps[0].step if steps else 0} to {run.status.step}"
        yield title, f"{axis}, by step{', logarithmic' * is_log}", history_chart(words, drawn, marks, is_log=is_log)


def _quantities(run: RunHistory) -> Iterator[tuple[str, str, list[Curve]]]:
    updated = [step for step in run.curves.steps if not step.empty]
    yield "loss", "nats", [_of(updated, lambda s: s.loss), *_validation_curves(run.curves.passes)]
    for source in dict.fromkeys(source for step in updated for source in step.sources):
        found = [(step.step, step.sources[source].loss) for step in updated if source in step.sources]
        yield f"loss on {source}", "nats, in training", [Curve(_TRAINING, _TRAINING, 0, tuple(found))]
    terms = dict.fromkeys(term for step in updated for term in step.terms if term != MAIN_TERM)
    for term in terms:
        first = (_set_names(run.curves.passes) or [_VALIDATION])[0]
        passes = Curve(first, first, 1, tuple(_of_term(run.curves.passes, term)), stands_out=True)
        training = Curve(_TRAINING, _TRAINING, 0, tuple(_of_term(updated, term)))
        yield f"loss of {term}", "without its coefficient", [training, passes]
    every = run.curves.steps
    yield "learning rate", "of the update", [_of(every, lambda s: s.lr)]
    yield "gradient norm", "L2, before clipping", [_of(updated, lambda s: s.grad_norm)]
    yield "denominator", "sum of shares", [_of(every, lambda s: s.denominator)]
    for term in terms:
        found = [(step.step, step.terms[term].denominator) for step in every if term in step.terms]
        yield f"denominator of {term}", "sum of shares", [Curve(_TRAINING, _TRAINING, 0, tuple(found))]
    yield "tokens of text", "a step", [_of(every, lambda s: s.tokens)]
    yield "tokens in the loss", "a step", [_of(every, lambda s: s.loss_tokens)]
    yield "padding", "tokens a step", [_of(every, lambda s: s.padding_tokens or None)]
    yield "tokens/s", "tokens of text a second", [_of(every, lambda s: s.tokens_per_second)]
    yield "mfu", "model FLOPs utilisation, %", [_of(every, lambda s: None if s.mfu is None else 100 * s.mfu)]
    yield "time", "seconds a step", [_of(every, lambda s: s.seconds)]
    yield (
        "memory",
        "GiB of the first rank",
        [_of(every, lambda s: None if s.memory_bytes is None else s.memory_bytes / _GIB)],
    )
    yield "loss scale", "fp16", [_of(every, lambda s: s.loss_scale)]


def _of_term(records: Sequence[StepRecord | ValidRecord], term: str) -> Iterator[tuple[int, float]]:
    """Yields step and mean of a term, if it has a denominator."""
    for record in records:
        if term in record.terms and record.terms[term].denominator:
            yield record.step, record.terms[term].loss


def _of(steps: Sequence[StepRecord], value: Callable[[StepRecord], float | None]) -> Curve:
    found = ((step.step, value(step)) for step in steps)
    return Curve(_TRAINING, _TRAINING, 0, tuple((step, float(each)) for step, each in found if each is not None))


def _validation_curves(passes: Sequence[ValidRecord]) -> list[Curve]:
    """Returns the validation curves: one for each set, or a single one if sets have no names."""
    curves = []
    for slot, label in enumerate(_set_names(passes), start=1):
        name = label.removeprefix(f"{_VALIDATION}: ")
        losses = [
            (each.step, each.valid_sets[name].loss if each.valid_sets else each.valid_loss)
            for each in passes
            if name in each.valid_sets or label == _VALIDATION
        ]
        curves.append(Curve(label, label, slot, tuple(losses), stands_out=True))
    return curves


def _lines(run: RunHistory) -> Iterator[HistoryLine]:
    """Yields all events but saves, by time if it is known, else first."""
    reported = [
        (event.time_s, HistoryLine(_clock(event.time_s), event.step, str(event.kind), _said(event.text, event.rank)))
        for event in run.events
        if event.kind is not EventKind.SAVE
    ]
    reported += [
        (step.time_s or 0.0, HistoryLine(_clock(step.time_s), step.step, "skipped step", step.skipped))
        for step in run.curves.steps
        if step.skipped is not None
    ]
    changed = [HistoryLine("", change.step, "change", f"from here on {change}") for change in run.curves.changes]
    yield from changed
    yield from (line for _, line in sorted(reported, key=lambda each: each[0]))


def _said(text: str, rank: int) -> str:
    return f"rank {rank}: {text}" if text and rank else text


def _clock(time_s: float | None) -> str:
    return "" if time_s is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_s))
