"""Options of a job as Slurm has them: read back and compared, since a site's plugins may change any of them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from mtrain.launch.slurm.options import SlurmOptions, seconds_of

_MINUTE_S = 60
_MORE = {"reservation": "Reservation", "constraint": "Features", "comment": "Comment", "wckey": "WCKey"}
"""Further options of sbatch -> the name under which scontrol shows the same text."""


def differences(options: SlurmOptions, name: str, shown: str) -> list[str]:
    """Describes the options that differ, each by a part of a sentence with the job's value and the given one.

    Args:
        options: Options that were given.
        name: Name of the job that was given.
        shown: Output of `scontrol show job -o`.
    """
    return [
        f"{field}={known} instead of {wanted}"
        for field, wanted, known, is_same in _compared(options, name, _fields(shown))
        if known is not None and not is_same
    ]


def _compared(
    options: SlurmOptions, name: str, known: dict[str, str]
) -> Iterator[tuple[str, object, str | None, bool]]:
    """Yields (name in scontrol, given value, value of the job, whether they agree)."""
    counts = {
        "Requeue": 1,
        "NumNodes": options.nodes,
        "NumTasks": options.num_ranks,
        "NtasksPerN:B:S:C": options.ranks_per_node,
        "CPUs/Task": options.cpus_per_task,
    }
    for field, wanted in counts.items():
        if wanted is not None:
            number = re.match(r"\d+", known.get(field, ""))  # of 2-2 nodes, or 2:0:*:* tasks of a node
            yield field, wanted, known.get(field), number is None or int(number[0]) == wanted
    yield "JobName", name, known.get("JobName"), known.get("JobName") == name
    yield "ArrayJobId", "no array", known.get("ArrayJobId"), False
    if options.partition is not None:  # while it waits several may be named
        now = known.get("Partition", "").split(",")
        yield "Partition", options.partition, known.get("Partition"), set(now) <= set(options.partition.split(","))
    texts = {"Account": options.account, "QOS": options.qos}
    texts |= {_MORE[key]: value for key, _, value in (each.partition("=") for each in options.more) if key in _MORE}
    for field, text in texts.items():
        now_text = known.get(field, "")
        # without accounting Slurm knows no accounts; with it, it writes them in small letters
        yield field, text, known.get(field), text is None or now_text.casefold() in (text.casefold(), "(null)")
    if options.time is not None:
        limit = known.get("TimeLimit", "")
        yield "TimeLimit", options.time, known.get("TimeLimit"), _minutes(limit) == _minutes(options.time)
    for field, gpus in {"TresPerNode": options.gpus_per_node, "TresPerTask": options.gpus_per_task}.items():
        found = re.search(r"gpu(?::[^:,=\s]+)?[:=](\d+)", known.get(field, ""))
        if gpus is not None and found is not None:
            yield field, f"{gpus} GPUs", known.get(field), int(found[1]) == gpus


def _fields(shown: str) -> dict[str, str]:
    return dict(re.findall(r"(?:^|\s)([A-Z][\w/:]*)=(\S*)", shown))


def _minutes(text: str) -> float | None:
    """Converts a time limit to minutes, rounded up as Slurm does; None for no limit, and for a text that is no time."""
    seconds = seconds_of(text)
    return None if seconds is None else -(-seconds // _MINUTE_S)
