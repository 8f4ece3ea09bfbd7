"""Record of a step that was just made."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import psutil
import torch
from mtrain.training.faults.trial import StepOutcome

from mtrain.arch import Work, flops_of_step, mfu, peak_flops
from mtrain.config.schema.loss import MAIN_TERM
from mtrain.core.engine.loss_reduction import StepTotals
from mtrain.core.engine.optimizer import Update
from mtrain.report.metrics.record import StepRecord
from mtrain.training.build import Run
from mtrain.training.evaluate import term_records


def record_of(run: Run, done: int, made: StepOutcome, lr: float, seconds: float) -> StepRecord:
    """Returns the record of a step, applied or not; `done` steps are done, this one included."""
    if made.totals is None:
        return StepRecord(
            step=done,
            loss=0.0,
            denominator=0.0,
            grad_norm=0.0,
            lr=lr,
            tokens=0,
            seconds=seconds,
            tokens_per_second=0.0,
            empty=True,
            skipped=made.refused,
            layout_dependent=run.model.config.is_layout_dependent,
            time_s=time.time(),
        )
    record = step_record(run, done, made.totals, made.update, lr, seconds)
    if made.refused is None:
        return record
    norm = made.totals.grad_norm  # what was judged
    return replace(record, skipped=made.refused, grad_norm=math.nan if norm is None else norm)


def step_record(
    run: Run, done: int, totals: StepTotals, update: Update | None, lr: float, seconds: float
) -> StepRecord:
    """Returns the record of a step that was computed: applied, empty, or overflowed; `done` as for `record_of`."""
    counts, tokens = totals.tokens, totals.num_text_tokens
    work = Work(tokens, counts.pairs, counts.window_pairs, counts.outputs)
    flops = flops_of_step(run.model.config.model, work, run.model.config.adapter, run.objective.preference is not None)
    by_source = zip(run.model.config.data.source_names, totals.sources)
    is_half = run.model.config.train.precision == "fp16"
    return StepRecord(
        step=done,
        loss=totals.loss,
        objective=totals.objective,
        denominator=totals.terms[MAIN_TERM].denominator,
        grad_norm=0.0 if update is None else update.grad_norm,
        lr=lr,
        tokens=tokens,
        seconds=seconds,
        tokens_per_second=tokens / seconds,
        padding_tokens=counts.padding,
        loss_tokens=counts.loss,
        flops=flops,
        terms=term_records(totals.terms),
        diagnostics=totals.diagnostics,
        sources=term_records({name: each for name, each in by_source if each.denominator}),
        empty=totals.is_empty,
        skipped="fp16 overflow" if update is not None and update.overflowed else None,
        loss_scale=run.model.optimizer.loss_scale() if is_half else None,
        mfu=_mfu(run, flops, seconds),
        layout_dependent=run.model.config.is_layout_dependent,
        memory_bytes=_memory_bytes(run.model.groups.device),
        time_s=time.time(),
    )


def _memory_bytes(device: torch.device) -> int | None:
    """Returns the peak memory on a GPU since the last call, or resident memory on a CPU; None if unknown."""
    if device.type != "cuda":
        try:
            return int(psutil.Process().memory_info().rss)
        except OSError:  # no file descriptor is left: a mere statistic must not end a run
            return None
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return peak


def _mfu(run: Run, flops: float, seconds: float) -> float | None:
    """Returns the model FLOPs utilisation per GPU; None on CPUs and on GPUs of unknown peak."""
    if run.model.groups.device.type != "cuda":
        return None
    peak = peak_flops(torch.cuda.get_device_name(run.model.groups.device), run.model.config.train.precision)
    return None if peak is None else mfu(flops, seconds, peak * run.model.groups.layout.world_size)
