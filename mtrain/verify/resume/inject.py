"""Known faults of resuming, planted while a run resumes to show that the check finds them.

Each occurred in a real trainer. Only `mtrain verify resume --inject NAME` plants one.
"""

from __future__ import annotations

from mtrain.verify.planted.fault import Fault

CRASH = "crash"
"""Axis of the case that resumes after a killed rank."""


RESUME_FAULTS = (
    Fault("run-step-off-by-one", "goes on one step later than it stopped, so that a batch is left out", None),
    Fault("samples-restarted", "reads the data from the first sample again", None),
    Fault(
        "learning-rate-restarted",
        "counts the steps of the learning rate from the start of this process",
        None,
        lambda config: config.optimizer.decay != "none" or config.optimizer.warmup_steps > 0,
        "a learning rate that changes: another optimizer.schedule than constant, or a warm-up",
    ),
    Fault("moments-not-restored", "begins with moments of 0", None),
    Fault("adam-step-off-by-one", "counts one update too many in Adam's bias correction", None),
    Fault("adam-step-shared", "lets all parameters advance one counter, as Megatron-Core does after a load", None),
    Fault(
        "main-weights-rounded",
        "makes the float32 main weights from the half-precision ones",
        None,
        lambda config: config.train.precision != "fp32",
        "train.precision=bf16 or fp16",
    ),
    Fault("stale-shard", "leaves the last rank's part of one tensor as it was before the load", None),
    Fault(
        "loss-scale-restarted",
        "begins with the initial loss scale",
        None,
        lambda config: config.train.precision == "fp16",
        "train.precision=fp16",
    ),
    Fault(
        "random-states-not-restored",
        "seeds the generators of dropout anew",
        None,
        lambda config: bool(config.dropout_keys),
        "model.attention_dropout or model.hidden_dropout above 0",
    ),
    Fault("records-kept", "leaves the records of steps that a crash has lost in metrics.jsonl", CRASH),
)
"""Faults in the order of counters, data, optimizer, randomness, records."""

RESUME_NAMES = tuple(fault.name for fault in RESUME_FAULTS)
