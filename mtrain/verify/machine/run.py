"""Check `mtrain verify machine`: collectives, layouts, resuming and links of one node, in one report to send.

Layouts and resuming are checked by `verify parity` and `verify resume`, on small copies of shipped models.
"""

import os
import re
import socket
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from mtrain.arch.layout import Layout
from mtrain.base.errors import ConfigError, MachineError
from mtrain.base.spelling import counted, meant
from mtrain.base.version import SHARED
from mtrain.config import Config
from mtrain.config.known_issues import context_kinds
from mtrain.config.schema.data import AnyData
from mtrain.config.schema.model import ModelSection
from mtrain.config.schema.train import TrainSection
from mtrain.core.layers.certified import machine_of
from mtrain.hf.configuration import load_config
from mtrain.plan.search.hardware import MeasuredLinks
from mtrain.verify.core.layouts import Trial, parse_trials, prepared
from mtrain.verify.core.ranks import Pool, attempted
from mtrain.verify.core.result import (
    Diagnosis,
    LayoutResult,
    MachineReport,
    Report,
    Tolerance,
    diagnosed,
    summary,
)
from mtrain.verify.core.shrink import shrink
from mtrain.verify.machine.collectives import MAX_RANKS, check_collectives, collective_deviations
from mtrain.verify.machine.links import LinksJob, link_lines, measured_links, time_links
from mtrain.verify.parity import PRELOADED as OF_PARITY
from mtrain.verify.parity import Progress, Request, device_for, verify_parity
from mtrain.verify.planted.inject import MACHINE_FAULTS, chosen
from mtrain.verify.resume.run import PRELOADED as OF_RESUME
from mtrain.verify.resume.run import verify_resume

PRELOADED = (*OF_PARITY, *OF_RESUME, "mtrain.verify.machine.links")
FAMILIES = (
    *("qwen3_30b_a3b", "llama3.2_1b", "gpt_oss_20b", "deepseek_v3", "gemma3_4b", "qwen3.5_9b"),
    "nemotron3_nano_30b_a3b",
)
"""Models that cover every kind of layer; --quick checks only the first, which is also resumed."""
_MODELS = SHARED / "configs" / "model"
_ON_CPUS, _ON_GPUS = 4, 8
"""Largest number of ranks by default."""
_BATCH_SIZE = 8
_MOST_FAILURES = 50
"""Largest number of failures of a check in the report."""
_EXACT = Tolerance("collective", 0.0, "0", {}, "Whole numbers are added exactly in every order.")
_RUN = (
    *("run.dir=machine", "train.precision=fp32", "train.num_steps=100", "train.global_batch_size=16"),
    *("train.micro_batch_size=1", "optimizer.lr=3e-4", "data.kind=mock", "data.seq_length=4096"),
)


@dataclass(frozen=True)
class MachineRequest:
    """Arguments of the command line."""

    device: str = "auto"
    ranks: int | None = None
    """None: one for each GPU, up to 8; 4 on CPUs."""
    families: str | None = None
    """Names of models, separated by commas."""
    quick: bool = False
    inject: str | None = None

    @property
    def command(self) -> str:
        """Returns the command without the folder of its report."""
        changed = {name: value for name, value in vars(self).items() if value != getattr(MachineRequest, name)}
        options = (f"--{name}" if value is True else f"--{name} {value}" for name, value in changed.items())
        return " ".join(["mtrain verify machine", *options])


def verify_machine(request: MachineRequest, progress: Progress, pool: Pool | None = None) -> MachineReport:
    """Runs the check, on its own ranks if `pool` is None; `progress` gets a line for each part."""
    names: tuple[str, ...] = FAMILIES[:1] if request.quick else FAMILIES
    if request.families is not None:
        names = tuple(dict.fromkeys(request.families.split(",")))
    configs = {name: family(name, request.device) for name in names}
    device, num_ranks = _ranks(request, configs[names[0]].train)
    if request.inject is not None:
        chosen(request.inject, configs[names[0]], (), MACHINE_FAULTS)
    origin = Request(None, 1, num_ranks, request.inject, request.command).origin(device)
    origin["environment"] |= machine_of(torch.device(device)) | _devices(device, num_ranks)
    check = MachineCheck(request, num_ranks, origin["created"], progress, pool or Pool(device, PRELOADED))
    check.collectives(collective_layouts(num_ranks))
    check.measure_links()
    for name, config in configs.items():
        check.parity(name, config)
    check.resume(names[0], configs[names[0]])
    return MachineReport(
        **origin,
        config={"device": device, "ranks": num_ranks, "models": list(names)},
        changes=(),
        data=f"whole numbers; random tokens for small copies of {', '.join(names)}",
        num_steps=check.num_steps,
        tolerances=tuple(check.tolerances.values()),
        tensors=(),
        reference=LayoutResult("the host, and one process", {}, 1, 0.0),
        layouts=tuple(check.results),
        diagnosis=check.diagnosis,
        times=() if check.links is None else tuple(link_lines(check.links)),
        left_out=check.left_out,
        links=check.links,
    )


def family(name: str, device: str) -> Config:
    """Returns a run of a shipped model in float32, on random tokens."""
    known = sorted(path.stem for path in _MODELS.glob("*.yaml"))
    if name not in known:
        near = meant(name, known)
        hint = f"did you mean {near}?" if near else f"choose from {', '.join(known)}"
        raise ConfigError(f"--families names {name!r}, but mtrain ships no such model; {hint}")
    return load_config(_MODELS / f"{name}.yaml", [*_RUN, f"train.device={device}"])


def _ranks(request: MachineRequest, train: TrainSection) -> tuple[str, int]:
    """Returns the device and the number of ranks; refuses a single GPU, which has no links."""
    device, _ = device_for(train, MAX_RANKS)
    if device == "cpu":
        return device, _ON_CPUS if request.ranks is None else request.ranks
    count, needed = torch.cuda.device_count(), 2 if request.ranks is None else request.ranks
    if count < needed:
        raise MachineError(
            f"{counted(needed, 'rank')} need as many GPUs, but torch sees {count}; give --ranks a smaller number, at "
            "least 2, or use --device cpu"
        )
    return device, min(count, _ON_GPUS) if request.ranks is None else request.ranks


def collective_layouts(num_ranks: int) -> Iterator[Layout]:
    """Yields layouts in which each kind of group spans all ranks, and some with several groups of a kind."""
    yield from (Layout(tp=num_ranks, sp=True), Layout(cp=num_ranks), Layout(pp=num_ranks))
    yield Layout(dp=num_ranks, ep=num_ranks)
    if num_ranks > 2 and num_ranks % 2 == 0:
        half = num_ranks // 2
        yield from (Layout(tp=2, sp=True, cp=half), Layout(tp=2, sp=True, dp=half, ep=2), Layout(pp=2, dp=half))


def layout_names(model: ModelSection, data: AnyData, num_ranks: int, is_quick: bool) -> Iterator[str]:
    """Yields names of layouts: each axis alone, on two ranks and on as many as possible, then axes together."""
    most = 1 << (num_ranks.bit_length() - 1)  # a power of two divides the heads and experts of every model
    has_experts = model.experts is not None
    for degree in (most,) if is_quick else sorted({2, most}):
        yield from (f"tp{degree}sp", f"pp{degree}", f"dp{degree}", *[f"ep{degree}dp{degree}"] * has_experts)
        kinds = context_kinds(model, data)
        yield from (f"cp{degree}{kind}" for kind in (kinds[:1] if is_quick else kinds))
    if most >= 4 and not is_quick:
        yield from (f"tp2sp-pp2-dp{most // 4}", f"tp2sp-cp2-dp{most // 4}")
        yield from [f"tp2sp-ep2-dp{most // 2}"] * has_experts


@dataclass
class MachineCheck:
    """The parts of a check, and their results."""

    request: MachineRequest
    num_ranks: int
    created: str
    progress: Progress
    pool: Pool
    results: list[LayoutResult] = field(default_factory=list)
    tolerances: dict[str, Tolerance] = field(default_factory=lambda: {"collective": _EXACT})
    """Largest tolerance of each kind over all models."""
    left_out: dict[str, str] = field(default_factory=dict)
    links: MeasuredLinks | None = None
    diagnosis: Diagnosis | None = None
    """Diagnosis of the first part that fails; a wrong collective makes later parts fail."""

    @property
    def num_steps(self) -> int:
        return 1 if self.request.quick else 2

    def collectives(self, layouts: Iterable[Layout]) -> None:
        """Compares every collective over the groups of each layout with sums on the host."""
        results = [self._collectives(layout) for layout in layouts]
        self._add(results, diagnosed(results, lambda result, step: None, MachineReport.text))

    def _collectives(self, layout: Layout) -> LayoutResult:
        sizes = (1, 1003, 65_536, *([] if self.pool.device == "cpu" or self.request.quick else [1_048_576]))

        def find() -> dict[str, Any]:
            ranks = self.pool.run(check_collectives, layout, sizes, self.request.inject)
            return {"deviations": tuple(collective_deviations(ranks))}

        degrees = {axis: getattr(layout, axis) for axis in ("tp", "pp", "cp", "dp", "ep")}
        axes = {axis: str(degree) for axis, degree in degrees.items() if degree > 1}
        result = attempted(f"collectives of {layout}", axes, layout.world_size, find)
        self.progress(summary(result))
        return result

    def measure_links(self) -> None:
        """Measures the links; a slow link is not a failure."""
        device = self.pool.device
        if device == "cpu":
            job = LinksJob((1 << 16, 1 << 20, 1 << 23), 3, 2, self.request.inject)
        else:
            job = LinksJob((1 << 18, 1 << 22, 1 << 25, 1 << 28), 3, 10, self.request.inject)

        def find() -> dict[str, Any]:
            name = device if device == "cpu" else torch.cuda.get_device_name(0)
            ranks = self.pool.run(time_links, Layout(dp=self.num_ranks), job)
            self.links = measured_links(ranks, job, self.created, name)
            return {}

        result = attempted("measured links", {}, self.num_ranks, find)
        self.progress(summary(result))
        self._add([result], None)

    def parity(self, name: str, config: Config) -> None:
        """Compares a small copy of a model on each layout that fits it with one process."""

        def run(show: Progress) -> Report:
            layouts = ",".join(self._fitting(name, config))
            request = Request(layouts, self.num_steps, self.num_ranks, None, self.request.command)
            return verify_parity(config, request, show, self.pool, _BATCH_SIZE)

        self._part(name, run)

    def _fitting(self, name: str, config: Config) -> Iterator[str]:
        """Yields the names of the layouts that fit a model; records the others in `left_out`."""
        names = list(layout_names(config.model, config.data, self.num_ranks, self.request.quick))
        trials = parse_trials(",".join(names), config.layout, self.num_ranks)
        small = shrink(config, [Trial(micro_batch_size=None), *trials], batch_size=_BATCH_SIZE).config
        for layout, trial in zip(names, trials, strict=True):
            try:
                prepared(trial, small)
            except ConfigError as refused:
                self.left_out[f"{name} on {layout}"] = redacted(str(refused))
            else:
                yield layout

    def resume(self, name: str, config: Config) -> None:
        """Stops a small copy of a run on tp2, and resumes it on other layouts."""
        layouts = "pp2" if self.request.quick else "pp2,cp2,dp2,mbs4"
        request = Request(layouts, 3, self.num_ranks, None, self.request.command, 2)
        saved = config.model_copy(update={"layout": config.layout.model_copy(update={"tp": 2, "sp": True})})
        self._part(f"resuming {name}", lambda show: verify_resume(saved, request, show, self.pool))

    def _part(self, name: str, run: Callable[[Progress], Report]) -> None:
        """Adds the results of another check, or the error that ended it."""
        reports: list[Report] = []

        def find() -> dict[str, Any]:
            reports.append(run(lambda line: self.progress(f"{name} {line}")))
            return {}

        whole = attempted(name, {}, self.num_ranks, find)
        if not reports:
            self.progress(summary(whole))
            self._add([whole], None)
        for report in reports:
            for tolerance in report.tolerances:
                known = self.tolerances.get(tolerance.kind, tolerance)
                self.tolerances[tolerance.kind] = max(known, tolerance, key=lambda item: item.value)
            results = [replace(result, name=f"{name} {result.name}") for result in report.layouts]
            self._add(results, report.diagnosis, name)

    def _add(self, results: Sequence[LayoutResult], diagnosis: Diagnosis | None, name: str = "") -> None:
        self.results += map(_shortened, results)
        if self.diagnosis is None and diagnosis is not None:
            lines = tuple(f"{name} {redacted(line)}".strip() for line in diagnosis.lines)
            self.diagnosis = replace(diagnosis, layout=f"{name} {diagnosis.layout}".strip(), lines=lines)


def _shortened(result: LayoutResult) -> LayoutResult:
    """Keeps the worst deviation of each kind and some failures; redacts messages."""
    first, failed = result.first_failure(), [deviation for deviation in result.deviations if not deviation.passed]
    worst = (result.worst(kind) for kind in dict.fromkeys(deviation.kind for deviation in result.deviations))
    error, trace = (None if text is None else redacted(text) for text in (result.error, result.trace))
    return replace(
        result,
        steps=(),
        expected=(),
        deviations=tuple(one for one in dict.fromkeys([first, *worst, *failed[:_MOST_FAILURES]]) if one is not None),
        guards=tuple(map(redacted, result.guards)),
        error=error,
        trace=trace,
    )


def _devices(device: str, num_ranks: int) -> dict[str, str]:
    """Returns processors, GPUs and the links between them."""
    devices = {"processors": str(len(os.sched_getaffinity(0)))}
    if device == "cpu":
        return devices
    for number in range(num_ranks):
        gpu = torch.cuda.get_device_properties(number)
        devices[f"GPU{number}"] = f"{gpu.name}, {gpu.total_memory >> 30} GiB"
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=60)
        devices |= topology(done.stdout, num_ranks)
    return devices


def topology(text: str, num_gpus: int) -> dict[str, str]:
    """Parses the output of `nvidia-smi topo -m`; returns the kinds of links from each GPU to all GPUs."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    rows = re.findall(r"^GPU(\d+)((?:[ \t]+[\w-]+)+)", plain, re.MULTILINE)
    return {f"links of GPU{number}": " ".join(kinds.split()[:num_gpus]) for number, kinds in rows}


_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
_SOURCE = r"(/\w+\.(?:py|cpp|cc|cu|h|hpp))?"
_PRIVATE = (
    (r"\b[a-z]\w*://[^\s\"'<>]+", "<address>"),
    (rf"([\"'])~?/[^\"'\n]*?{_SOURCE}\1", r"\1<path>\2\1"),
    (rf"(?<![\w<>.~])~?/(?=[\w.~@])[^\s\"'<>,;:()\[\]]*?{_SOURCE}(?=[\s\"'<>,;:()\[\]]|$)", r"<path>\1"),
    (r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?(?![\w.])", "<address>"),
    (r"(?<![\w:])(?:[0-9a-fA-F]{0,4}:){2,7}[0-9a-fA-F]{1,4}(?!\w)", "<address>"),
    (r"(?<![A-Za-z0-9])(?=[A-Za-z]*[0-9])(?=[0-9]*[A-Za-z])[A-Za-z0-9]{20,}", "<key>"),
)
"""Addresses, paths except the names of source files, and long keys, with their replacements."""


def redacted(text: str) -> str:
    """Removes paths, addresses, keys, and the names of host and user from a message."""
    for name, value in os.environ.items():
        if _SECRET.search(name) and len(value) >= 6:
            text = text.replace(value, "<key>")
    home = os.path.expanduser("~")
    for folder in sorted({home, os.getcwd()} - {"/"}, key=len, reverse=True):
        text = text.replace(folder, "/folder")  # their names may hold spaces
    for pattern, word in _PRIVATE:
        text = re.sub(pattern, word, text)
    names = {socket.gethostname(): "<host>", os.environ.get("HOSTNAME", ""): "<host>"}
    names |= dict.fromkeys((os.path.basename(home), os.environ.get("USER", "")), "<user>")
    for name, word in names.items():
        if (label := name.split(".")[0]) not in ("", "~", "localhost"):
            text = re.sub(rf"(?<![\w-]){re.escape(label)}(?:\.[\w-]+)*(?![\w-])", word, text)
    return text
