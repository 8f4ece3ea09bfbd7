"""Rows of docs/proof/performance.md: what is measured, by which command, and the targets."""

from __future__ import annotations

import re
from dataclasses import dataclass

NUMBER = r"(-?[\d.]+)"


def judged(figure: float, must: float, bold: float, is_more_better: bool) -> str:
    """Judges a figure: bold, met or missed."""
    sign = 1 if is_more_better else -1
    if sign * figure >= sign * bold:
        return "bold"
    return "met" if sign * figure >= sign * must else "missed"


@dataclass(frozen=True)
class Row:
    """One figure of the page."""

    name: str
    contender: str
    """Contender that the figure is a ratio to, or its unit."""
    must: float
    bold: float
    command: tuple[str, ...]
    """Script below tools/bench and its options; `{folder}` is an empty place. The first of several rows with the same
    command runs it."""
    pattern: str
    """Pattern that finds the figure in the output, in its only group; of several matches the worst counts."""
    small: tuple[str, ...] = ()
    """Options with which the command takes seconds, to try that it works; its figure means nothing then."""
    is_more_better: bool = True
    ranks: int = 1
    """Number of ranks; above 1 the command runs under torchrun."""

    def figure(self, output: str) -> float | None:
        """Returns the worst of the pattern's matches; None where there is none."""
        found = [float(each) for each in re.findall(self.pattern, output, re.MULTILINE)]
        return None if not found else min(found) if self.is_more_better else max(found)

    def verdict(self, figure: float) -> str:
        """Judges a figure: bold, met or missed."""
        return judged(figure, self.must, self.bold, self.is_more_better)


_PRETRAIN = ("peers/pretrain.py",)
_MIXTRAL = ("peers/pretrain.py", "--experts", "8", "--ffn", "352")
# 256: four heads in two groups, which two ranks can share
_TINY_PRETRAIN = ("--rounds", "1", "--steps", "1", "--hidden", "256", "--layers", "1", "--seq", "32", "--vocab", "256")
_TOKENIZE, _TINY_TOKENIZE = ("input/tokenizing.py",), ("--megabytes", "0.3", "--rounds", "1", "--vocab-size", "400")
_CONVERT, _TINY_CONVERT = ("convert.py", "{folder}"), ("--layers", "1", "--rounds", "1")
_SAVE, _TINY_SAVE = ("save.py",), ("--layers", "1", "--hidden", "64")
_PACKING, _TINY_PACKING = ("packing.py",), ("--count", "20000", "--others", "2000", "--rounds", "1")
_LOADING, _TINY_LOADING = ("input/loading.py",), ("--documents", "300", "--rows", "4", "--steps", "1", "--rounds", "1")
_TINY_WEIGHTS = ("--rows", "256", "--columns", "64", "--rounds", "1")
_START, _TINY_START = ("startup.py",), ("--rounds", "1")

ROWS = (
    Row(
        "training, dense: tokens per cpu-s",
        "plain transformers loop",
        1.0,
        1.15,
        _PRETRAIN,
        rf"loop: {NUMBER} \(",
        _TINY_PRETRAIN,
    ),
    Row(
        "training, dense: tokens per cpu-s",
        "transformers Trainer",
        1.05,
        1.2,
        _PRETRAIN,
        rf"trainer: {NUMBER} \(",
        _TINY_PRETRAIN,
    ),
    Row(
        "training, Mixtral's kind: tokens per cpu-s",
        "plain transformers loop",
        1.0,
        1.15,
        _MIXTRAL,
        rf"loop: {NUMBER} \(",
        _TINY_PRETRAIN,
    ),
    Row(
        "training, Qwen3.5's kind (hybrid): tokens per cpu-s",
        "plain transformers loop",
        1.0,
        1.15,
        (*_PRETRAIN, "--hybrid", "--no-trainer"),
        rf"loop: {NUMBER} \(",
        _TINY_PRETRAIN,
    ),
    Row(
        "training, Nemotron-H's kind (Mamba-2): tokens per cpu-s",
        "plain transformers loop",
        1.0,
        1.15,
        (*_PRETRAIN, "--mamba", "--no-trainer"),
        rf"loop: {NUMBER} \(",
        _TINY_PRETRAIN,
    ),
    Row(
        "training, tp2 a rank",
        "DistributedDataParallel",
        1.0,
        1.15,
        (*_PRETRAIN, "--layout", "tp2"),
        rf"loop: {NUMBER} \(",
        _TINY_PRETRAIN,
        ranks=2,
    ),
    Row(
        "training, dp2 a rank",
        "DistributedDataParallel",
        1.0,
        1.15,
        (*_PRETRAIN, "--layout", "dp2"),
        rf"loop: {NUMBER} \(",
        _TINY_PRETRAIN,
        ranks=2,
    ),
    *(
        Row(
            f"training, dp{ranks} a rank, weights sharded",
            other,
            must,
            bold,
            (*_PRETRAIN, "--layout", f"dp{ranks}-weights", "--rows", str(2 * ranks)),
            rf"{name}: {NUMBER} \(",
            _TINY_PRETRAIN,
            ranks=ranks,
        )
        for ranks in (2, 4)
        for name, other, must, bold in (
            ("loop", "DistributedDataParallel", 0.85, 1.0),  # which sends two thirds as much
            ("fsdp", "FSDP2 of a transformers loop", 1.0, 1.15),
        )
    ),
    Row(
        "finetuning, packed: trained tokens per cpu-s",
        "transformers, padded to the longest of 8",
        1.8,
        2.5,
        ("packed_training.py",),
        rf"^\| transformers, padded to the longest .*\| {NUMBER} \|$",
        ("--rounds", "1", "--batch", "8", "--seq-length", "128", "--row-width", "256"),
    ),
    Row(
        "output layer and loss in chunks: time",
        "whole logits",
        1.0,
        0.78,
        ("parts/output_layer.py",),
        rf"^chunks of 512 +[\d.]+ +{NUMBER} ",
        ("--tokens", "64", "--vocab", "512", "--hidden", "16", "--rounds", "1"),
        is_more_better=False,
    ),
    Row(
        "`mtrain --help`",
        "seconds",
        0.5,
        0.15,
        _START,
        rf"^\| mtrain --help \| {NUMBER} ",
        _TINY_START,
        is_more_better=False,
    ),
    Row(
        "`mtrain check`",
        "seconds",
        0.5,
        0.3,
        _START,
        rf"^\| mtrain check \| {NUMBER} ",
        _TINY_START,
        is_more_better=False,
    ),
    Row(
        "`mtrain tokenize`, start-up included: MB per cpu-s",
        "Megatron-LM's algorithm, 2 workers",
        2.5,
        25.0,
        _TOKENIZE,
        rf"^ours, 1 worker +[\d.]+ +[\d.]+ +{NUMBER}$",
        _TINY_TOKENIZE,
    ),
    Row(
        "`mtrain tokenize --fast`",
        "Megatron-LM's algorithm, 2 workers",
        2.5,
        25.0,
        _TOKENIZE,
        rf"^ours, 1 worker, --fast +[\d.]+ +[\d.]+ +{NUMBER}$",
        _TINY_TOKENIZE,
    ),
    Row(
        "packing 1M documents: samples per cpu-s",
        "best fit one by one, or TRL",
        10.0,
        40.0,
        _PACKING,
        rf"^\| 500 \| 4096 \|.*\({NUMBER}x\) \|$",
        _TINY_PACKING,
    ),
    Row(
        "imbalance of 64 ranks x 8 rows up to 32k",
        "largest over mean",
        1.03,
        1.012,
        _PACKING,
        rf"^\| \d+ \| (?:2048|4096|8192) \| [\d.]+ \| [\d.]+ \| {NUMBER} \|$",
        _TINY_PACKING,
        is_more_better=False,
    ),
    Row(
        "loss pairs: time added to a step",
        "megatron-core's normalisation",
        1.0,
        0.35,
        ("pairs.py",),
        rf"^\| [^|]+ \| \d \|(?: {NUMBER[1:-1]} \|){{4}} {NUMBER} \|",
        ("--rounds", "5", "--steps", "1"),
        is_more_better=False,
    ),
    Row(
        "batches of a corpus, one thread: M tokens per cpu-s",
        "ten times what a rank trains",
        1.0,
        3.0,
        _LOADING,
        rf"^ours +{NUMBER} ",
        _TINY_LOADING,
    ),
    Row(
        "batches of packed conversations: M tokens per cpu-s",
        "ten times what a rank trains",
        1.0,
        3.0,
        _LOADING,
        rf"^ours, packed +{NUMBER} ",
        _TINY_LOADING,
    ),
    Row(
        "initial weights, one thread: GB per cpu-s",
        "GB of float32",
        1.0,
        1.0,
        ("input/initial_weights.py",),
        rf"^ours, 1 thread +{NUMBER} ",
        _TINY_WEIGHTS,
    ),
    Row(
        "initial weights, all cores of a rank alone: GB/s",
        "GB of float32",
        1.0,
        2.0,
        ("input/initial_weights.py",),
        rf"^ours, \d+ threads +[\d.]+ +[\d.]+ +[\d.]+ +{NUMBER}$",
        _TINY_WEIGHTS,
    ),
    Row(
        "start from `model.hf`, a rank: GB/s",
        "plain read into float32 memory",
        0.6,
        0.9,
        ("input/hf_start.py", "{folder}"),
        rf"^\| tp.* {NUMBER} \|$",
        ("--layers", "2", "--rounds", "1"),
    ),
    Row(
        "import with proof, 2 workers: GB/s",
        "raw write + fsync",
        0.6,
        0.9,
        _CONVERT,
        rf"^import and proof, 2 workers +[\d.]+ +{NUMBER} ",
        _TINY_CONVERT,
    ),
    Row(
        "export with proof, 2 workers: GB/s",
        "raw write + fsync",
        0.6,
        0.9,
        _CONVERT,
        rf"^export and proof, 2 workers +[\d.]+ +{NUMBER} ",
        _TINY_CONVERT,
    ),
    Row(
        "checkpoint, 1, 2 and 4 ranks: GB/s",
        "raw write + fsync",
        0.6,
        0.9,
        _SAVE,
        rf"^\| \d \([^|]+ \| [\d.]+ \| [\d.]+ \| {NUMBER} \|",
        _TINY_SAVE,
    ),
    Row(
        "checkpoint: what training waits for",
        "memcpy",
        3.0,
        1.3,
        _SAVE,
        rf"^\| \d \([^|]+ \| [\d.]+ \| [\d.]+ \| [\d.]+ \| [\d.]+ \| {NUMBER} \|",
        _TINY_SAVE,
        is_more_better=False,
    ),
)


@dataclass(frozen=True)
class GpuRow:
    """Figure of the report of tools/bench/gpu.py."""

    name: str
    contender: str
    must: float
    bold: float
    path: tuple[str, ...]
    """Path into the findings of the sections."""
    is_more_better: bool = True

    def verdict(self, figure: float) -> str:
        """Judges a figure: bold, met or missed."""
        return judged(figure, self.must, self.bold, self.is_more_better)


GPU_ROWS = (
    GpuRow("1B, seq 4096: MFU", "data sheet", 0.45, 0.50, ("1B", "mtrain", "MFU")),
    GpuRow("1B: tokens/s", "compiled reference", 0.9, 0.98, ("1B", "compiled reference", "mtrain is faster by")),
    GpuRow("1B: tokens/s", "stock megatron-core", 2.5, 4.0, ("1B", "megatron-core local", "mtrain is faster by")),
    GpuRow("8B's layers: MFU", "data sheet", 0.50, 0.57, ("8B, 8 layers", "mtrain", "MFU")),
    GpuRow("1B: norm, division and update", "seconds", 0.015, 0.010, ("1B", "mtrain", "update s"), False),
    GpuRow("1B: peak memory", "estimate of `mtrain check`", 1.1, 1.0, ("1B", "mtrain", "peak / estimate"), False),
    GpuRow(
        "finetuning, packed: trained tokens/s",
        "padded to the longest of 8",
        1.8,
        2.5,
        ("packed finetuning", "packed is faster by"),
    ),
)
