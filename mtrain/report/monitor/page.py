"""History of a run over all of its starts, from its run folder, and its HTML report, one self-contained file."""

import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from markupsafe import Markup
from pydantic import ValidationError

from mtrain.arch import num_parameters
from mtrain.base.errors import DataError, RankLostError
from mtrain.base.files import disk_faults
from mtrain.base.heartbeat import Beat
from mtrain.base.spelling import counted
from mtrain.base.yaml_text import read_yaml
from mtrain.config.changes import flat_keys
from mtrain.config.renamed import current_names
from mtrain.config.schema.loss import MAIN_TERM
from mtrain.config.schema.model import ModelSection
from mtrain.hf.schema.registry import fitting_family
from mtrain.report.metrics.plot import Curves, load_curves
from mtrain.report.metrics.record import StepRecord, ValidRecord
from mtrain.report.metrics.shown import as_duration, as_size, clock
from mtrain.report.monitor.status import RunState, RunStatus, read_beats, read_status
from mtrain.report.pages.charts import Curve, history_chart
from mtrain.report.pages.html import render, write_page
from mtrain.runs.events import ENDS, EventKind, RunEvent, read_events
from mtrain.runs.folder import RunFolder

_MOST_PATHS = 3
_TRAINING, _VALIDATION = "training", "validation"
_WIDE = 30.0
"""Ratio of the largest to the smallest gradient norm above which the axis is logarithmic."""
_MAX_ROWS = 300
_MAX_ANSWERS = 60
_GIB = 2**30


@dataclass(frozen=True)
class StartOfHistory:
    began_s: float
    resumed_step: int | None
    """Completed updates when it began; None if it ended before that was known."""
    num_repeated: int
    """Updates of earlier starts that this start repeated."""
    last_step: int
    """Completed updates at its end, as far as known."""
    seconds: float
    """Wall time until its end or its last sign of life."""
    end: str
    layout: str
    num_ranks: int


class Answer(NamedTuple):
    step: int
    prompt: str
    answer: str


@dataclass(frozen=True)
class RunHistory:
    status: RunStatus
    curves: Curves
    events: Sequence[RunEvent]
    starts: Sequence[StartOfHistory]
    beats: Sequence[Beat]
    config: str
    """Configuration as YAML; empty if unknown."""
    environment: dict[str, str]
    answers: Sequence[Answer] = ()

    @property
    def keys(self) -> dict[str, Any]:
        """Values of the configuration by dotted key."""
        return flat_keys(self.config) if self.config else {}


def read_history(path: Path, now_s: float) -> RunHistory:
    """Reads a run folder, even while the run is in progress; `now_s` is Unix time.

    Raises:
        DataError: The folder holds no run or no step yet, or a file in it is damaged.
        MachineError: The folder cannot be read.
    """
    folder, status = RunFolder(path), read_status(path, now_s)
    events = read_events(folder.events)
    return RunHistory(
        status=status,
        curves=load_curves(path),
        events=events,
        starts=tuple(_starts(events, status, now_s)),
        beats=read_beats(folder.heartbeats),
        config=folder.saved_config() or "",
        environment=folder.saved_environment() or {},
        answers=tuple(_answers(folder.samples)),
    )


def _answers(path: Path) -> Iterator[Answer]:
    if not path.exists():
        return
    with disk_faults(f"read {path}"):
        lines = path.read_bytes().split(b"\n")[:-1]
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            prompt = record["prompt"]
            # the page shows only the last message of a conversation
            messages = prompt.get("messages", prompt.get("prompt")) if isinstance(prompt, dict) else prompt
            if isinstance(messages, list) and messages and isinstance(messages[-1], dict):
                messages = messages[-1].get("content")
            yield Answer(int(record["step"]), str(messages), str(record["answer"]))
        except (ValueError, TypeError, KeyError, RecursionError) as fault:
            raise DataError(f"{path}:{number} is not an answer to a prompt ({fault}); move the file away") from None


def _starts(events: Sequence[RunEvent], status: RunStatus, now_s: float) -> Iterator[StartOfHistory]:
    indices = [index for index, event in enumerate(events) if event.kind is EventKind.START]
    for first, after in itertools.zip_longest(indices, indices[1:]):
        of_start, later = events[first:after], [] if after is None else events[after:]
        resumed = next((event for event in of_start if event.kind is EventKind.RESUME), None)
        ends = [event for event in of_start if event.kind in ENDS]
        if ends:
            last = ends[-1]
            ended_s, end = last.time_s, _end(last)
        elif after is None:
            ended_s, end = now_s, str(status.standing)
        else:
            ended_s, end = of_start[-1].time_s, "no end is recorded: it was killed"
        # the next start that resumes has recorded the step that this one reached
        reached = next((event.facts.get("reached") for event in later if event.kind is EventKind.RESUME), None)
        steps = [event.step for event in of_start] + ([reached] if isinstance(reached, int) else [])
        yield StartOfHistory(
            began_s=of_start[0].time_s,
            resumed_step=None if resumed is None else resumed.step,
            num_repeated=0 if resumed is None else _number(resumed.facts.get("reached"), resumed.step) - resumed.step,
            last_step=max(status.step, *steps) if after is None else max(steps),
            seconds=ended_s - of_start[0].time_s,
            end=end,
            layout=str(of_start[0].facts.get("layout", "")),
            num_ranks=_number(of_start[0].facts.get("world_size"), 0),
        )


def _words(event: RunEvent) -> str:
    """Returns the description of an event without a text."""
    ranks, layout = event.facts.get("world_size"), event.facts.get("layout")
    if event.kind is EventKind.START:
        return ", ".join([*([counted(int(ranks), "rank")] if ranks else []), *([str(layout)] if layout else [])])
    return f"continues after step {event.step}" if event.kind is EventKind.RESUME and event.step else ""


def _end(event: RunEvent) -> str:
    """Returns how a start ended, in words."""
    if event.kind is EventKind.FINISH:
        return "finished"
    return f"failed: {event.text}" if event.kind is EventKind.FAILURE else event.text or "stopped"


def _left_with(beat: Beat) -> str:
    """Returns how a rank left, in words."""
    words = {None: "still there", "done": "finished its work", RankLostError.__name__: "lost another rank"}
    return words.get(beat.left_with, f"failed: {beat.left_with}")


def _number(value: object, otherwise: int) -> int:
    return value if isinstance(value, int) else otherwise


def write_run_page(run: Path, page: Path) -> None:
    """Writes the report of a run, in one move."""
    write_page(page, run_page(read_history(run, time.time())))


def run_page(run: RunHistory) -> str:
    """Makes the page: state, numbers, curves, starts, events, ranks, configuration, in this order."""
    status, keys = run.status, run.keys
    lines = list(_lines(run))
    tags = keys.get("run.tags") or []
    tagged = f"Tags: {', '.join(map(str, tags))}." if tags else ""
    notes = (status.standing.reason, keys.get("run.notes"), tagged, "All times are in UTC.")
    identity = {
        "model": _model(keys),
        "architecture": _architecture(run.config),
        "data": _data(keys),
        "devices": _devices(run.environment),
    }
    of = "" if status.num_steps is None else f" of {status.num_steps:,}"
    # only curves that share a picture need a legend
    names = [_TRAINING, *_set_names(run.curves.passes)]
    legend = [Curve(name, name, slot, ()) for slot, name in enumerate(names)] if len(names) > 1 else []
    return render(
        "run.html",
        run=run,
        word=str(status.standing.state).upper(),
        is_good=status.standing.state not in (RunState.FAILED, RunState.SILENT),
        headline=f"{status.name}: step {status.step:,}{of}",
        notes=[str(note) for note in notes if note],
        identity={name: text for name, text in identity.items() if text},
        facts=_facts(run),
        answers=run.answers[-_MAX_ANSWERS:],
        curves=legend,
        figures=[(title, [(axis, chart)]) for title, axis, chart in _figures(run)],
        has_marks=bool(_marks(run)),
        lines=lines[-_MAX_ROWS:],
        num_left_out=max(0, len(lines) - _MAX_ROWS),
        beats=[(beat, beat.place.replace("_", " and "), _left_with(beat)) for beat in run.beats[:_MAX_ROWS]],
        clock=clock,
        as_duration=as_duration,
        as_size=as_size,
    )


def _model(keys: Mapping[str, Any]) -> str:
    origin = keys.get("model.hf") or keys.get("checkpoint.initialize_from")
    layers, width, words = (keys.get(f"model.{name}") for name in ("num_layers", "hidden_size", "vocab_size"))
    parts = [f"from {origin}"] if origin else []
    if layers and width and words:
        parts.append(f"{counted(layers, 'layer')} of width {width:,}, {counted(words, 'token', ',')} in the vocabulary")
    if keys.get("model.experts.num_experts"):
        parts.append(f"{keys['model.experts.num_experts']} experts, {keys.get('model.experts.top_k')} for a token")
    if keys.get("adapter.rank"):
        parts.append(f"{keys.get('adapter.kind')} of rank {keys['adapter.rank']}")
    return "; ".join(parts)


def _architecture(config: str) -> str:
    """Returns the family's model_type in Hugging Face and the number of parameters; empty if unknown."""
    if not config:
        return ""
    content, _ = current_names(read_yaml(config).content, "config.yaml")
    try:
        model = ModelSection.model_validate(content.get("model"))
    except ValidationError:  # of a version whose keys had other meanings
        return ""
    with suppress(DataError):
        return f"{fitting_family(model).model_type}, {num_parameters(model):,} parameters"
    return f"of no family of Hugging Face, {num_parameters(model):,} parameters"


def _data(keys: Mapping[str, Any]) -> str:
    if "data.kind" not in keys:
        return ""
    paths = [str(source["path"]) for source in keys.get("data.train") or [] if "path" in source]
    parts = [str(keys["data.kind"])]
    if paths:
        more = f" and {len(paths) - _MOST_PATHS} more" if len(paths) > _MOST_PATHS else ""
        parts.append(", ".join(PurePath(path).name for path in paths[:_MOST_PATHS]) + more)
    if keys.get("data.seq_length") and keys.get("train.global_batch_size"):
        unit = "packed row" if keys.get("data.packing.batch") == "rows" else "sample"
        batch = counted(keys["train.global_batch_size"], unit, ",")
        parts.append(f"{batch} of up to {counted(keys['data.seq_length'], 'token', ',')} a step")
    return "; ".join(parts)


def _devices(environment: Mapping[str, str]) -> str:
    ranks, device = environment.get("world_size"), environment.get("device")
    if not ranks or not device:
        return ""
    processor = environment.get("gpu", "").removeprefix("none, ")
    kind = f"CPU ({processor})" if device == "cpu" else processor or device
    layout = environment.get("layout")
    return f"{ranks} x {kind}" + (f", {layout}" if layout else "")


def _facts(run: RunHistory) -> dict[str, str]:
    status, steps, passes = run.status, run.curves.steps, run.curves.comparable_passes
    facts: dict[str, str] = {}
    updated = [step for step in steps if not step.empty]
    if updated:
        facts["loss"] = f"{updated[-1].loss:.4f} at step {updated[-1].step}"
    if passes:
        best = min(passes, key=lambda record: record.valid_loss)
        facts["validation loss"] = f"{passes[-1].valid_loss:.4f}, best {best.valid_loss:.4f} at step {best.step}"
    seconds, tokens = sum(step.seconds for step in steps), sum(step.tokens for step in steps)
    if seconds > 0:
        facts["trained"] = (
            f"{counted(tokens, 'token', ',')} of text in {as_duration(seconds)} of steps, {tokens / seconds:,.0f} a "
            "second"
        )
    if run.starts:
        wall_s, repeated = sum(start.seconds for start in run.starts), sum(start.num_repeated for start in run.starts)
        facts["starts"] = (
            f"{len(run.starts)} over {as_duration(wall_s)} of wall time; {counted(repeated, 'step')} repeated"
        )
    if status.goodput is not None:
        facts["goodput"] = status.goodput.lines()[0].removeprefix("goodput ")
    memory = [step.memory_bytes for step in steps if step.memory_bytes is not None]
    if memory or status.memory_bytes is not None:
        facts["memory"] = f"{as_size(max([*memory, status.memory_bytes or 0]))} on one rank at most"
    if status.standing.state in (RunState.RUNNING, RunState.SAVING):
        facts["remaining"] = as_duration(status.eta_s)
    counts = {"skipped steps": sum(s.skipped is not None for s in steps), "empty steps": sum(s.empty for s in steps)}
    facts |= {name: str(count) for name, count in counts.items() if count}
    saves = [event for event in run.events if event.kind is EventKind.SAVE]
    if saves:
        known = (event.facts.get("seconds") for event in saves)
        save_seconds = [float(seconds) for seconds in known if isinstance(seconds, int | float)]
        slowest = f", the slowest in {max(save_seconds):.1f} s" if save_seconds else ""
        facts["saves"] = f"{len(saves)}{slowest}"
    if status.last_checkpoint is not None:
        facts["newest checkpoint"] = f"step {status.last_checkpoint}"
    return facts


def _marks(run: RunHistory) -> list[int]:
    """Returns the steps after which a later start resumed."""
    return sorted({start.resumed_step for start in run.starts[1:] if start.resumed_step})


def _set_names(passes: Sequence[ValidRecord]) -> list[str]:
    """Returns the names of the validation sets in the legend."""
    if not passes:
        return []
    names = dict.fromkeys(name for record in passes for name in record.valid_sets)
    return [f"{_VALIDATION}: {name}" for name in names] or [_VALIDATION]


def _figures(run: RunHistory) -> Iterator[tuple[str, str, Markup]]:
    """Yields title, caption of the axis, and picture of each quantity that the run has recorded."""
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
    every, passes = run.curves.steps, run.curves.passes
    updated = [step for step in every if not step.empty]
    yield "loss", "nats", [_curve(updated, lambda s: s.loss), *_validation_curves(passes)]
    for source in dict.fromkeys(source for step in updated for source in step.sources):
        losses = [(step.step, step.sources[source].loss) for step in updated if source in step.sources]
        yield f"loss on {source}", "nats, in training", [Curve(_TRAINING, _TRAINING, 0, tuple(losses))]
    terms = dict.fromkeys(term for step in updated for term in step.terms if term != MAIN_TERM)
    for term in terms:
        first = (_set_names(passes) or [_VALIDATION])[0]
        validation = Curve(first, first, 1, tuple(_term_points(passes, term)), stands_out=True)
        training = Curve(_TRAINING, _TRAINING, 0, tuple(_term_points(updated, term)))
        yield f"loss of {term}", "without its coefficient", [training, validation]
    yield "learning rate", "of the update", [_curve(every, lambda s: s.lr)]
    yield "gradient norm", "L2, before clipping", [_curve(updated, lambda s: s.grad_norm)]
    yield "denominator", "sum of shares", [_curve(every, lambda s: s.denominator)]
    for term in terms:
        sums = [(step.step, step.terms[term].denominator) for step in every if term in step.terms]
        yield f"denominator of {term}", "sum of shares", [Curve(_TRAINING, _TRAINING, 0, tuple(sums))]
    yield "tokens of text", "a step", [_curve(every, lambda s: s.tokens)]
    yield "tokens in the loss", "a step", [_curve(every, lambda s: s.loss_tokens)]
    yield "padding", "tokens a step", [_curve(every, lambda s: s.padding_tokens or None)]
    yield "tokens/s", "tokens of text a second", [_curve(every, lambda s: s.tokens_per_second)]
    yield "mfu", "model FLOPs utilisation, %", [_curve(every, lambda s: None if s.mfu is None else 100 * s.mfu)]
    yield "time", "seconds a step", [_curve(every, lambda s: s.seconds)]
    memory = _curve(every, lambda s: None if s.memory_bytes is None else s.memory_bytes / _GIB)
    yield "memory", "GiB of the first rank", [memory]
    yield "loss scale", "fp16", [_curve(every, lambda s: s.loss_scale)]


def _term_points(records: Sequence[StepRecord | ValidRecord], term: str) -> Iterator[tuple[int, float]]:
    """Yields step and mean of a term, if it has a denominator."""
    for record in records:
        if term in record.terms and record.terms[term].denominator:
            yield record.step, record.terms[term].loss


def _curve(steps: Sequence[StepRecord], value: Callable[[StepRecord], float | None]) -> Curve:
    values = ((step.step, value(step)) for step in steps)
    return Curve(_TRAINING, _TRAINING, 0, tuple((step, float(number)) for step, number in values if number is not None))


def _validation_curves(passes: Sequence[ValidRecord]) -> list[Curve]:
    """Returns the validation curves: one for each set, or a single one if sets have no names."""
    curves = []
    for slot, label in enumerate(_set_names(passes), start=1):
        name = label.removeprefix(f"{_VALIDATION}: ")
        losses = [
            (record.step, record.valid_sets[name].loss if record.valid_sets else record.valid_loss)
            for record in passes
            if name in record.valid_sets or label == _VALIDATION
        ]
        curves.append(Curve(label, label, slot, tuple(losses), stands_out=True))
    return curves


def _lines(run: RunHistory) -> Iterator[dict[str, Any]]:
    """Yields all events except saves, by time; those without a time come first."""
    for change in run.curves.changes:
        yield {"time": "", "step": change.step, "kind": "change", "text": f"from here on {change}"}
    reported: list[tuple[float | None, int, str, str]] = []
    for event in run.events:
        if event.kind is not EventKind.SAVE:
            text = f"rank {event.rank}: {event.text}" if event.text and event.rank else event.text or _words(event)
            reported.append((event.time_s, event.step, str(event.kind), text))
    reported += [(s.time_s, s.step, "skipped step", s.skipped) for s in run.curves.steps if s.skipped is not None]
    for time_s, step, kind, text in sorted(reported, key=lambda line: line[0] or 0.0):
        yield {"time": clock(time_s), "step": step, "kind": kind, "text": text}
