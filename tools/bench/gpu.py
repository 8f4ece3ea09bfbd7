"""Tests correctness and speed on one GPU: `python tools/bench/gpu.py --output FOLDER`, in less than nine minutes.

It needs torch and the package's requirements, but no TransformerEngine. First it measures the speed of training next to
stock megatron-core and a compiled program in plain PyTorch, then it checks numbers; report.json and report.md have
both. Sections run one after the other, each in a process of its own with a time limit of its own, so that one that
fails, hangs or runs out of memory does not affect the others; the exit code is 1 where any did. `--device cpu --tiny`
runs the same sections on small shapes, to try the program itself: its speeds mean nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from tools.bench.one_gpu import correctness, speed
from tools.bench.one_gpu.report import markdown
from tools.bench.one_gpu.shapes import Bench

DEADLINE_S = 530
"""Time limit of all sections together; sections that have not begun by then are reported as left out."""
PATIENCE_ON_CPU = 10
"""Factor of all time limits on a CPU, since nobody measures there."""


@dataclass(frozen=True)
class Section:
    """One question to the device."""

    run: Callable[[Bench], dict[str, Any]]
    seconds: int
    """Time limit of the section."""
    right_if: str
    """What its findings must be for the section to have been worth its time."""


_FASTER = "no contender but mtrain's own is faster than mtrain, and peak / estimate is within 0.98 to 1.02"
SECTIONS = {
    "products": Section(speed.products, 50, "above 0.75 of the peak; every MFU below is read beside it"),
    "1B": Section(speed.dense_1b, 150, f"{_FASTER}; MFU of the fastest above 45 %; most time in products"),
    "experts": Section(speed.experts, 90, f"{_FASTER}; MFU above 28 %"),
    "experts apart": Section(speed.experts_apart, 40, "grouped products take most; a capacity costs what it adds"),
    "fp8": Section(speed.fp8, 90, "rowwise and blockwise are faster than bf16, by 10 % and more"),
    "8B, 8 layers": Section(speed.dense_8b, 100, _FASTER),
    "hybrid": Section(speed.hybrid, 90, "regions faster than without: norms centred on zero cast eagerly otherwise"),
    "packed finetuning": Section(speed.finetuning, 60, "packed is faster than padded to the longest"),
    "windows": Section(speed.windows, 60, "with windows faster than without"),
    "fp32 against float64": Section(correctness.against_float64, 70, "within 1e-5 of the judge; passed says so"),
    "waits of the host": Section(speed.waits, 60, "one wait a step, for the totals"),
    "attention kernels": Section(correctness.attention_kernels, 60, "flash attention in every bf16 case"),
    "grouped product": Section(
        correctness.grouped_product, 50, "passed: empty experts and memory of NaN change nothing"
    ),
    "deterministic runs": Section(speed.deterministic_runs, 90, "passed: the same bits twice"),
    "verify backend": Section(correctness.certified, 150, "regions and fp8 pass; they are faster than torch's layers"),
    "verify parity, regions": Section(correctness.verified("parity", "train.compile=regions"), 100, "PASS twice"),
    "verify parity": Section(correctness.verified("parity"), 100, "PASS twice"),
    "resume with dropout": Section(correctness.resumed_with_dropout, 80, "passed: the same bits"),
    "on the host": Section(speed.on_the_host, 80, "passed: the same losses; peak bytes fall as estimated"),
    "verify resume": Section(correctness.verified("resume"), 100, "PASS twice"),
}
"""Sections in their order: what decides most about speed comes first, then numbers that a CPU cannot show."""


def answer_of(section: Section, bench: Bench) -> dict[str, Any]:
    """Runs a section in this process and returns its findings, or why it failed."""
    start = time.perf_counter()
    try:
        found: dict[str, Any] = {"passed": True, "found": section.run(bench)}
    except Exception as error:  # reported, and the next section follows
        found = {"passed": False, "error": f"{type(error).__name__}: {error}", "found": getattr(error, "found", {})}
        traceback.print_exc()
    return found | {"seconds": round(time.perf_counter() - start, 1)}


def answer_apart(name: str, bench: Bench, seconds: float, folder: Path) -> dict[str, Any]:
    """Runs a section in a process of its own; its output goes to the folder."""
    path, log = folder / "section.json", folder / f"{name.replace(' ', '_').replace(',', '')}.log"
    path.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--only", name, "--device", bench.device, "--output", str(folder)]
    start = time.perf_counter()
    with log.open("w") as said:
        options: dict[str, Any] = {"stdout": said, "stderr": subprocess.STDOUT, "start_new_session": True}
        flags = ["--tiny"] * bench.is_tiny + ["--compile"] * bench.compiles_tiny
        process = subprocess.Popen(command + flags, env=correctness.from_here(), **options)
        try:
            code: int | None = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)  # with the ranks and commands that it has started
            process.wait()
            code = None
    if path.exists():
        answer: dict[str, Any] = json.loads(path.read_text())
        path.unlink()
        return answer
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    reason = f"stopped after {seconds:.0f} s" if code is None else f"ended with exit code {code}"
    error = f"{reason}: {lines[-1][:300]}" if lines else reason
    return {"passed": False, "error": error, "found": {}, "seconds": round(time.perf_counter() - start, 1)}


def machine(bench: Bench) -> dict[str, Any]:
    """Describes the machine that the numbers were measured on."""
    return {
        "device": bench.device_name,
        "torch": torch.__version__,
        "CUDA": torch.version.cuda,
        "python": sys.version.split()[0],
        "tiny": bench.is_tiny,
    }


def main(
    output: Annotated[Path, typer.Option(help="folder of report.json, report.md and logs")],
    device: Annotated[str, typer.Option(help="cuda or cpu")] = "cuda",
    tiny: Annotated[bool, typer.Option("--tiny", help="small shapes, to try the program itself")] = False,
    compile_: Annotated[bool, typer.Option("--compile", help="with --tiny: compile the reference, too")] = False,
    sections: Annotated[str, typer.Option(help="names between semicolons; by default all")] = "",
    only: Annotated[str, typer.Option(hidden=True, help="one, in this process")] = "",
) -> None:
    """Runs the sections; exit code 1 where one fails."""
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        print(f"--device {device}: needs cpu, or cuda where torch sees a GPU, which it does not here")
        raise typer.Exit(2)
    bench = Bench("cuda" if device == "cuda" else "cpu", tiny, compile_)
    wanted = [each.strip() for each in sections.split(";") if each.strip()] or [only] * bool(only) or list(SECTIONS)
    if unknown := [each for each in wanted if each not in SECTIONS]:
        print(f"--sections {'; '.join(unknown)}: not known; choose from {'; '.join(SECTIONS)}")
        raise typer.Exit(2)
    output.mkdir(parents=True, exist_ok=True)
    if only:
        (output / "section.json").write_text(json.dumps(answer_of(SECTIONS[only], bench)))
        return
    patience = PATIENCE_ON_CPU if bench.device == "cpu" else 1
    start, answers = time.perf_counter(), {}
    for name in wanted:
        left = DEADLINE_S * patience - (time.perf_counter() - start)
        answers[name] = (
            answer_apart(name, bench, min(SECTIONS[name].seconds * patience, left), output)
            if left > 5
            else {"passed": False, "error": "left out: the time of all sections is up", "found": {}, "seconds": 0.0}
        )
        answers[name]["right if"] = SECTIONS[name].right_if
        print(f"{name}: {'passed' if answers[name]['passed'] else answers[name]['error']}", flush=True)
        report = {"machine": machine(bench), "sections": answers, "seconds": round(time.perf_counter() - start)}
        # after each one, so that a machine that goes away leaves what was found
        (output / "report.json").write_text(json.dumps(report, indent=1))
        (output / "report.md").write_text(markdown(report))
    raise typer.Exit(0 if all(each["passed"] for each in answers.values()) else 1)


if __name__ == "__main__":
    typer.run(main)
