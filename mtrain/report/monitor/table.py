"""Output of `mtrain status`: a block of lines for one run, one row per run for several."""

import time
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mtrain.report.metrics.shown import as_duration, as_line, as_size, clock, side_terms, step_numbers
from mtrain.report.monitor.status import RunState, RunStatus

_COLOURS = {
    RunState.STARTING: "cyan",
    RunState.RUNNING: "green",
    RunState.SAVING: "green",
    RunState.STOPPED: "yellow",
    RunState.FINISHED: "bold",
    RunState.FAILED: "bold red",
    RunState.SILENT: "bold red",
    RunState.UNKNOWN: "dim",
}
_HEADINGS = ("run", "state", "step", "eta", "loss", "valid_loss", "tokens/s", "memory", "ranks", "checkpoint", "alarms")
_LEAST = ("memory", "tokens/s", "valid_loss", "ranks", "checkpoint", "loss", "eta")
"""Columns that a narrow terminal drops, in this order; it keeps run, state, step and alarms."""
_FOLDED_WIDTH = {"run": 16, "state": 12, "alarms": 16}
"""Readable width, in characters, of columns whose texts are folded."""
_MAX_RANKS = 8
_ENDED = (RunState.FINISHED, RunState.FAILED, RunState.STOPPED)


def status_view(statuses: Sequence[RunStatus], width: int | None) -> RenderableType:
    """Formats one run as a block of lines, several as a table; `width` None: the output is not a terminal."""
    return _block(statuses[0]) if len(statuses) == 1 else _table(statuses, width)


def _block(status: RunStatus) -> Group:
    lines = [Text.assemble((status.name, "bold"), f"  {status.folder}")]
    lines += [Text(f"{name:<11}").append(value) for name, value in _lines(status, time.time()).items()]
    lines += [Text(f"{'alarm':<11}").append(alarm, "red") for alarm in status.alarms]
    lines += [Text(line, "red") for line in status.summary.splitlines()]
    return Group(*lines)


def _lines(status: RunStatus, now_s: float) -> dict[str, Text]:
    standing, has_ended = status.standing, status.standing.state in _ENDED
    state = Text(str(standing), _COLOURS[standing.state])
    if standing.since_s is not None and (has_ended or standing.state in (RunState.SILENT, RunState.UNKNOWN)):
        since = f" since {clock(standing.since_s)} UTC" if standing.state is RunState.SILENT else ""
        state.append(f"{since}, {_ago(standing.since_s, now_s)}", "")
    lines = {"state": state, "step": Text(_step(status))}
    if not has_ended:
        lines["step"].append(f"  eta {as_duration(status.eta_s)}")
        if status.last is not None and status.last.time_s is not None:
            lines["step"].append(f"  last step {_ago(status.last.time_s, now_s)}")
    if status.last is not None:
        lines["numbers"] = Text(as_line(step_numbers(status.last)))
        if status.last.sources:
            losses = {name: f"{term.loss:.4f}" for name, term in status.last.sources.items()}
            lines["sources"] = Text(as_line(losses))
    if (last := status.last_pass) is not None:
        sets = {name: f"{term.loss:.4f}" for name, term in last.valid_sets.items()}
        numbers = {"valid_loss": f"{last.valid_loss:.4f}", **sets, **side_terms(last)}
        lines["validation"] = Text(f"step {last.step}  {as_line(numbers)}")
    if status.world_size:
        beating = "" if has_ended else f"{status.num_beating} of "
        lines["ranks"] = Text(f"{beating}{status.world_size}{'' if has_ended else ' beat'}")
        if standing.silent_ranks:
            lines["ranks"].append(f"; silent: {_listed(standing.silent_ranks)}", "red")
    if status.memory_bytes is not None:
        lines["memory"] = Text(f"{as_size(status.memory_bytes)} on the rank that needs most")
    saved = "none" if status.last_checkpoint is None else f"step {status.last_checkpoint}"
    if status.saved_s is not None:
        saved += f", {_ago(status.saved_s, now_s)}"
    lines["checkpoint"] = Text(saved)
    if status.goodput is not None and status.goodput.wall_s > 0:
        share, counts = status.goodput.lines()
        lines["goodput"] = Text(f"{share.removeprefix('goodput ')}; {counts}")
    if status.num_starts > 1:
        lines["starts"] = Text(str(status.num_starts))
    return lines


def _table(statuses: Sequence[RunStatus], width: int | None) -> Table:
    table = Table(pad_edge=False)
    if width is None:
        table.box = None
    rows = [dict(zip(_HEADINGS, _row(status), strict=True)) for status in statuses]
    headings = _HEADINGS if width is None else _fitting(rows, width)
    for heading in headings:
        folded = _FOLDED_WIDTH.get(heading)
        widest = max(len(row[heading]) for row in rows) if rows else 0
        table.add_column(
            heading,
            justify="right" if folded is None else "left",
            no_wrap=folded is None,
            overflow="fold",
            min_width=None if folded is None or width is None else min(folded, widest),
        )
    for row in rows:
        table.add_row(*(row[heading] for heading in headings))
    return table


def _fitting(rows: Sequence[dict[str, Text]], width: int) -> list[str]:
    """Returns the columns that fit a terminal; drops those in _LEAST one by one."""
    widths = {heading: max([len(heading), *(len(row[heading]) for row in rows)]) for heading in _HEADINGS}
    needed = {heading: min(size, _FOLDED_WIDTH.get(heading, size)) + len(" | ") for heading, size in widths.items()}
    for heading in _LEAST:
        if sum(needed.values()) <= width:
            break
        del needed[heading]
    return list(needed)


def _row(status: RunStatus) -> list[Text]:
    last, standing = status.last, status.standing
    numbers = {} if last is None else step_numbers(last)
    has_ended = standing.state in _ENDED
    memory = "" if status.memory_bytes is None else as_size(status.memory_bytes)
    state = Text(str(standing), _COLOURS[standing.state])
    if standing.state is RunState.SILENT and standing.since_s is not None:
        state.append(f" since {clock(standing.since_s)} UTC")
    alarms = [*([f"silent: {_listed(standing.silent_ranks)}"] if standing.silent_ranks else []), *status.alarms[-1:]]
    return [
        Text(status.name),
        state,
        Text(_step(status)),
        Text("" if has_ended or last is None else as_duration(status.eta_s)),
        Text(numbers.get("loss", "")),
        Text("" if status.last_pass is None else f"{status.last_pass.valid_loss:.4f}"),
        Text(numbers.get("tokens/s", "")),
        Text(memory or numbers.get("memory", "")),
        Text("" if has_ended or not status.world_size else f"{status.num_beating}/{status.world_size}"),
        Text("" if status.last_checkpoint is None else str(status.last_checkpoint)),
        Text("; ".join(alarms), "red"),
    ]


def _step(status: RunStatus) -> str:
    return f"{status.step}/{'?' if status.num_steps is None else status.num_steps}"


def _listed(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - _MAX_RANKS} more" if len(ranks) > _MAX_RANKS else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:_MAX_RANKS]))}{more}"


def _ago(time_s: float, now_s: float) -> str:
    return f"{as_duration(max(0.0, now_s - time_s))} ago"
