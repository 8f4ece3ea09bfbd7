"""Pages of docs/reference, written from the code by `python -m tests.docs.reference`; a test compares.

Configuration (mtrain/config/schema), the command line (typer), run folder, checkpoint format, metrics and exit codes.
"""

import dataclasses
import inspect
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import typer
import yaml

from mtrain.base import errors
from mtrain.checkpoint.store.manifest import CheckpointInfo, FileInfo, Manifest, TrainingState
from mtrain.cli.arguments import EXAMPLES as EXAMPLES_OF_VERBS
from mtrain.cli.main import VERBS, app
from mtrain.config.keys import Key, described_keys
from mtrain.report.metrics.record import OF_THE_MACHINE, ChangeRecord, StepRecord, TaskRecord, TermRecord, ValidRecord
from mtrain.runs.folder import RunFolder
from tests.paths import CONFIGS, DOCS

FOLDER = DOCS / "reference"
COMMAND = "python -m tests.docs.reference"
EXAMPLES = Path(__file__).with_name("examples.yaml")


def heading(title: str, source: str) -> str:
    return f"# {title}\n\n<!-- Written by `{COMMAND}` from {source}; a test compares. Change that, not this page. -->\n"


def values_in_configs() -> dict[str, Any]:
    """Returns the first value of each key in the shipped configurations."""
    found: dict[str, Any] = {}

    def collect(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for name, each in value.items():
                collect(f"{prefix}.{name}" if prefix else name, each)
        else:
            found.setdefault(prefix, value)

    for path in sorted(CONFIGS.glob("*/*.yaml")):
        collect("", yaml.safe_load(path.read_text()) or {})
    return found


def as_yaml(value: Any) -> str:
    """Writes a value as it stands after the `=` of an override."""
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    if isinstance(value, (list, tuple, Mapping)):
        return json.dumps(value).replace('"', "").replace(", ", ",")
    return str(value)


def example_of(key: Key, by_hand: Mapping[str, Any], shipped: Mapping[str, Any]) -> str:
    """Returns a value to show: by hand, of the shipped configurations, or another one than the default.

    Raises:
        LookupError: There is none.
    """
    if key.name in by_hand:
        return as_yaml(by_hand[key.name])
    if key.name in shipped:
        return as_yaml(shipped[key.name])
    if key.type == "true or false":
        return as_yaml(not key.default)
    choices = [each for each in key.type.split(" | ") if re.fullmatch(r"[\w-]+", each)]
    for choice in choices:
        if choice not in (key.default, "integer", "number", "text", "null"):
            return choice
    raise LookupError(f"{key.name} has no example; add one to {EXAMPLES}")


def examples() -> dict[str, str]:
    """Returns the example of each key that is no section."""
    by_hand, shipped = yaml.safe_load(EXAMPLES.read_text()), values_in_configs()
    return {key.name: example_of(key, by_hand, shipped) for key in described_keys() if not key.is_section}


def facts(key: Key) -> str:
    """Returns type, default and unit of a key, in one line."""
    kinds = f"; {key.name.partition('.')[0]} of kind {', '.join(key.kinds)} only" if key.kinds else ""
    unit = f", in {key.unit}" if key.unit not in ("", "path") else ", a path" if key.unit else ""
    shown = "as below" if key.is_section and key.default is not None else f"`{as_yaml(key.default) or repr('')}`"
    return f"*{key.type}*{unit}; {'**required**' if key.is_required else f'default {shown}'}{kinds}"


def configuration() -> str:
    shown, lines = examples(), []
    for key in described_keys():
        level = "##" if "." not in key.name else "###"
        lines.append(f"\n{level} `{key.name}`\n\n{facts(key)}\n\n{linked(key.text)}")
        if key.name in shown:
            value = shown[key.name]
            inside_list = "[]" in key.name
            line = f"{key.name.rpartition('.')[2]}: {value}" if inside_list else f"{key.name}={value}"
            lines.append(f"\n```text\n{line}\n```")
    intro = """
Every key of a run. Keys stand in YAML files, which are merged left to right, or on the command line as
`section.key=value`, where the value is YAML. Unknown keys, values of another type and broken rules are reported all
at once, before a rank starts. `[]` stands for each element of a list, NAME for a name of your own. What several keys
say together: `mtrain check CONFIG...`. In Python: [Configuration](../api/config.md).
"""
    return heading("Configuration", "the docstrings of mtrain/config/schema") + intro + "\n".join(lines) + "\n"


def linked(text: str) -> str:
    """Turns pages that a docstring names by their path into links."""
    return re.sub(r"docs/((?:[\w-]+/)?([\w-]+)\.md)", lambda found: f"[{found[2]}]({_from_reference(found[1])})", text)


def _from_reference(page: str) -> str:
    """Returns the path from docs/reference to a page of docs."""
    folder, _, name = page.rpartition("/")
    return name if folder == "reference" else f"../{page}"


def commands() -> Iterator[tuple[str, Any]]:
    """Yields each verb, and each verb of a verb, with what typer has made of it."""

    def below(names: tuple[str, ...], command: Any) -> Iterator[tuple[str, Any]]:
        if not hasattr(command, "commands"):
            yield " ".join(names), command
            return
        for name in command.commands:
            yield from below((*names, name), command.get_command(None, name))

    root: Any = typer.main.get_command(app)
    for verbs in VERBS.values():
        for name in verbs:
            yield from below((name,), root.get_command(None, name))


def rows_of(command: Any, name: str) -> Iterator[str]:
    """Yields a row of the table for each argument and option, as its help says them."""
    context = command.make_context(name, [], resilient_parsing=True)
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None and parameter.name != "help":
            given, meaning = (re.sub(r"\s*\|\s*", " or ", re.sub(r"\s+", " ", text)) for text in record)
            yield f"| `{given}` | {meaning} |"


def command_line() -> str:
    lines = []
    for group, verbs in VERBS.items():
        lines.append(f"\n## {group}\n")
        for name, command in commands():
            if name.split()[0] not in verbs:
                continue
            text = linked(inspect.cleandoc(command.help or ""))
            lines += [f"\n### `mtrain {name}`\n", text, f"\n```sh\n{EXAMPLES_OF_VERBS[name]}\n```\n"]
            rows = list(rows_of(command, name))
            lines += ["| argument | meaning |", "|---|---|", *rows] if rows else []
    intro = """
`mtrain VERB --help` says the same. CONFIG... are YAML files, merged left to right, then individual values as
[`section.key=value`](configuration.md). What a verb's end means: [exit codes](exit-codes.md).
"""
    return heading("Command line", "the verbs of mtrain/cli") + intro + "\n".join(lines) + "\n"


RECORDS = {
    "step": (StepRecord, 'One optimizer step: a line of `metrics.jsonl` with `"kind": "step"`.'),
    "valid": (
        ValidRecord,
        "One pass over the validation sets; all numbers but `seconds` and `valid_sets` are of the first set.",
    ),
    "tasks": (TaskRecord, "One evaluation of the tasks in `eval.tasks`."),
    "change": (ChangeRecord, "A key that a start has changed, as `checkpoint.allow_changed` permits."),
    "term": (TermRecord, "A value of `terms`, `sources` and `valid_sets`."),
}
"""Kind of a record -> its class and what it is."""
WITHOUT_TEXT = {
    "numerator": "Weighted sum of the term over the global batch.",
    "denominator": "What the numerator was divided by.",
    "lr": "Learning rate of the update.",
    "samples": "Number of samples of the first set.",
    "seconds": "Wall time, in seconds.",
    "new": "New value as JSON; null where the key is gone.",
    "size_bytes": "Size of the file.",
    "format": "Number of this form of the file.",
    "consumed_samples": "Number of samples that training has read.",
    "layout": "Layout that saved it.",
}
"""Fields whose names say what they are in the code."""


def rows_of_fields(record: type, names: Iterable[str]) -> str:
    """Returns a table of fields with the text below each in its class, or in one that it extends."""
    found: dict[str, str] = {}
    for owner in reversed(record.__mro__[:-1]):
        if owner.__module__.startswith("mtrain."):
            texts = re.findall(
                r'^    (\w+): [^\n]+\n    """(.*?)"""', inspect.getsource(owner), re.MULTILINE | re.DOTALL
            )
            found |= {name: " ".join(text.split()) for name, text in texts}
    lines = ["| field | meaning |", "|---|---|"]
    for name in names:
        text = linked(found.get(name) or WITHOUT_TEXT[name]).replace("None ", "null ").replace("|", "\\|")
        lines.append(f"| `{name}` | {text} |")
    return "\n".join(lines)


def metrics() -> str:
    lines = []
    for kind, (record, meaning) in RECORDS.items():
        table = rows_of_fields(record, [each.name for each in dataclasses.fields(record)])
        lines.append(f"\n## `{kind}`\n\n{meaning}\n\n{table}")
    of_the_machine = ", ".join(f"`{name}`" for name in OF_THE_MACHINE)
    intro = f"""
`metrics.jsonl` of a [run folder](run-folder.md) has one JSON object a line, in full precision; `kind` says which of
these it is. Numbers that are not finite are the texts `"NaN"`, `"Infinity"` and `"-Infinity"`. Fields that depend on
the machine and its speed: {of_the_machine}; all others are the same in every repetition of a run on one layout ([bit
for bit](../weights/checkpoints.md#bit-for-bit)), and to rounding on another.
"""
    return heading("Metrics", "mtrain/report/metrics/record.py") + intro + "\n".join(lines) + "\n"


WRITTEN_BY_OTHERS = {
    "failures/": "Records and stacks of ranks that failed, a folder per start "
    "([Surviving faults](../machines/survive.md)).",
    "failure.txt": "Summary of the latest failure, for people; `failure.json` has it for programs.",
    "trackers.json": "Ids of the run at its trackers ([Trackers](../machines/seeing.md#trackers)).",
    "submissions/": "What `mtrain launch slurm` has submitted ([On Slurm](../machines/slurm.md)).",
    "service.json": "Address, model and Slurm job of [a service](../training/serve.md).",
    "service.key": "Key of a service that `mtrain launch slurm --serve` has submitted.",
    "served/": "Checkpoints that clients of a service have asked for, by training run and name.",
    "report.html": "The page of `mtrain report`.",
    "parity/": "Reports of `mtrain verify`; likewise `resume/`, `preempt/`, `hf/` and `backend/`.",
}
"""Name in a run folder that `RunFolder` does not know -> what it is."""


def run_folder() -> str:
    parts = re.findall(
        r'^    \w+ = _Inside\("(.+?)"\)\n    """(.*?)"""', inspect.getsource(RunFolder), re.MULTILINE | re.DOTALL
    )
    rows = {f"{place}/" if text.startswith("Folder") else place: " ".join(text.split()) for place, text in parts}
    rows |= WRITTEN_BY_OTHERS
    lines = [f"| `{name}` | {rows[name]} |" for name in sorted(rows, key=lambda name: name.strip("."))]
    intro = """
What lies in `run.dir`. One run at a time writes there ([exit code 6](exit-codes.md) otherwise), and only its first
rank, but for `logs/`, `ledger/`, `heartbeats/` and checkpoints. Files that a run has no use for are absent. It may be
moved and copied while nothing runs in it.

| name | content |
|---|---|
"""
    more = """
Fields of `metrics.jsonl`: [Metrics](metrics.md). A folder below `checkpoints/`: [Checkpoint
format](checkpoint-format.md).
"""
    return heading("Run folder", "mtrain/runs/folder.py") + intro + "\n".join(lines) + "\n" + more


def checkpoint_format() -> str:
    manifest = rows_of_fields(Manifest, [*CheckpointInfo.model_fields, "format", "files"])
    files, state = (rows_of_fields(each, each.model_fields) for each in (FileInfo, TrainingState))
    page = f"""
A checkpoint is a folder `checkpoints/step_00000010/` of a [run folder](run-folder.md), or what `mtrain convert
import` makes. Tensors are stored as Megatron-Core's `torch_dist` format stores them (torch.distributed.checkpoint):
global tensors in slices, so any layout loads them. What the program does with it:
[Checkpoints](../weights/checkpoints.md). `mtrain inspect` shows one, `examples/read_checkpoint.py` reads one in Python.

| file | content |
|---|---|
| `__0_0.distcp`, `__1_0.distcp`, ... | slices of tensors, one file a rank |
| `.metadata` | where each slice lies |
| `common.pt`, `metadata.json` | what Megatron-Core asks for |
| `training_state.json` | counters, below |
| `config.yaml` | the configuration that saved it; of an import `model.yaml` |
| `hf/` | of an import: config.json, tokenizer and templates of the folder that it came from |
| `mtrain.json` | the manifest, below; written last, so that its presence means that the checkpoint is complete |

## `mtrain.json`

JSON; its last line is the SHA-256 of all bytes before it. A program that does not know the `format` does not touch
the checkpoint.

{manifest}

Each of `files` has:

{files}

## `training_state.json`

{state}
"""
    return heading("Checkpoint format", "mtrain/checkpoint") + page


def exit_codes() -> str:
    found: dict[int, str] = {}
    for error in vars(errors).values():
        if inspect.isclass(error) and issubclass(error, errors.MtrainError) and "exit_code" in vars(error):
            found[error.exit_code] = (inspect.getdoc(error) or "").partition("\n")[0]
    done = "Done; or stopped early on a signal, with a checkpoint and the marker `REQUEUE` in the run folder."
    rows = {
        0: done,
        **found,
        75: "Stopped on a signal, from `mtrain launch torchrun` and from jobs: start the run again.",
    }
    rows[1] = (
        "A comparison found a difference (`compare`, `verify`, `inspect diff`); of other verbs than `verify` also a "
        "fault of the program itself: its traceback is worth a bug report."
    )
    page = heading("Exit codes", "mtrain/base/errors.py")
    page += "\nThe last line on standard error says what was given, what is needed and what to change.\n"
    page += "\n| code | meaning | more |\n|---|---|---|\n"
    for code in sorted(rows):
        page += f"| {code} | {rows[code]} | {MORE.get(code, '')} |\n"
    return page


MORE = {
    0: "[Stopping](../machines/stopping.md)",
    2: "[Configuration](configuration.md), [what to do](../when-it-fails.md)",
    3: "[what to do](../when-it-fails.md)",
    4: "[Bad steps](../training/bad-steps.md)",
    5: "[Surviving faults](../machines/survive.md)",
    6: "[what to do](../when-it-fails.md)",
    7: "[what to do](../when-it-fails.md)",
    8: "[what to do](../when-it-fails.md)",
    75: "[Kubernetes, torchrun](../machines/kubernetes.md)",
}
"""Exit code -> page that says more."""
PAGES = {
    "configuration.md": configuration,
    "cli.md": command_line,
    "run-folder.md": run_folder,
    "checkpoint-format.md": checkpoint_format,
    "metrics.md": metrics,
    "exit-codes.md": exit_codes,
}
"""File of each page -> what writes it."""


def words_of(line: str) -> list[str]:
    """Returns the words of an example after `mtrain`."""
    program, *words = shlex.split(line)
    assert program == "mtrain", line
    return words


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, write in PAGES.items():
        (FOLDER / name).write_text(write())
