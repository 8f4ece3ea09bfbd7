"""`run.*`, `checkpoint.*`, `metrics.*` and `watch.*`: the files of a run, and its watchdog."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from mtrain.config.schema import bounds
from mtrain.config.schema.section import Section

TrackerName = Literal["wandb", "mlflow", "trackio", "swanlab", "comet_ml", "aim"]
"""Import name of a tracker."""


class RunSection(Section):
    """The run folder."""

    dir: Annotated[str, bounds.PATH] = Field(min_length=1)
    """Path of the run folder, which holds config.yaml, metrics.jsonl, checkpoints/ and logs/."""
    name: str | None = Field(None, min_length=1, max_length=120)
    """Name of the run in tables, on pages and in trackers; null: the name of the folder."""
    notes: str = Field("", max_length=10_000)
    """Reason for the run, for people."""
    tags: tuple[Annotated[str, Field(min_length=1, max_length=64)], ...] = Field((), max_length=50)
    """Words to find the run by in trackers."""


class CheckpointSection(Section):
    """Saving, resuming and starting from other weights."""

    interval_steps: int = Field(0, ge=0)
    """Steps between two checkpoints; 0: only at the end and on a signal."""
    at_end: bool = True
    """Whether a checkpoint is saved after the last step."""
    keep_last: int = Field(2, gt=0)
    """Number of newest checkpoints to keep; older ones are deleted."""
    keep_every_steps: int | None = Field(None, gt=0)
    """Interval of checkpoints that are never deleted: those at multiples of this step count; null: none."""
    keep_best: int = Field(0, ge=0)
    """Number of checkpoints with the best value of valid.metric, by default the lowest validation loss, to keep as
    well, among those saved at a validated step; 0: none. Losses over different samples or of different loss functions
    cannot be compared: after a start that changes these, this many are kept for each kind of loss."""
    async_save: bool = True
    """Whether training continues while a checkpoint is written from a copy in host memory, as large as a rank's state;
    false: it waits for the disk."""
    save_timeout_s: Annotated[int, bounds.SECONDS] = Field(1800, gt=0)
    """Time in seconds after which an unfinished save has failed."""
    on_save_failure: Literal["continue", "stop"] = "continue"
    """Reaction to a failed save. continue: the failure is logged and the next save tries again, but the last save of a
    run must succeed. stop: the run ends."""
    export_hf_every_steps: int = Field(0, ge=0)
    """Steps between exports of checkpoints to Hugging Face folders, in exports/ of the run folder; 0: none. Must be a
    multiple of interval_steps."""
    self_test: bool = False
    """Whether the run saves, loads and compares its state once before the first step, and reports time and memory."""
    resume: Literal["auto", "never"] = "auto"
    """Treatment of a run folder with checkpoints: auto continues from the newest good one; never refuses the folder."""
    allow_changed: tuple[str, ...] = ()
    """Keys, such as [optimizer.lr, data.train], that this start may change from the checkpoint that it continues; a
    section means all its keys that can change. Changes are recorded with their step."""
    initialize_from: Annotated[str | None, bounds.PATH] = Field(None, min_length=1)
    """Path of a checkpoint, or of a run folder (its newest checkpoint), whose weights this run starts from; optimizer,
    step and data order start over. For a checkpoint of Megatron-LM or Megatron-Bridge (torch_dist): the folder of an
    iteration, or its parent. null: weights start random or come from model.hf."""

    def broken_rules(self) -> Iterator[str]:
        every, interval = self.export_hf_every_steps, self.interval_steps
        if every and (interval == 0 or every % interval):
            yield (
                f"export_hf_every_steps={every} must be a multiple of interval_steps={interval}, since exports are "
                "made from checkpoints; change one of them"
            )


class MetricsSection(Section):
    """Outputs for step records in addition to metrics.jsonl, profiles and the data ledger."""

    console_interval_steps: int = Field(1, gt=0)
    """Steps between two lines on the console."""
    tensorboard: bool = True
    """Whether step records are also written for TensorBoard."""
    trackers: tuple[TrackerName, ...] = ()
    """Trackers that receive the numbers of every step, from a thread that training never waits for; install them with
    `pip install 'mtrain[wandb]'` and so on. Their own environment variables, such as WANDB_MODE, MLFLOW_TRACKING_URI
    and TRACKIO_SPACE_ID, decide where they write."""
    profile_steps: tuple[Annotated[int, Field(gt=0)], Annotated[int, Field(gt=0)]] | None = None
    """First and last step to profile, such as [10, 12]: profile/ in the run folder gets a trace for Perfetto or
    chrome://tracing, a table of the slowest operations, and on GPUs a memory snapshot. A trace holds every operation,
    so a few steps are enough. null: no step is profiled."""
    profile_ranks: tuple[Annotated[int, Field(ge=0)], ...] = (0,)
    """Ranks whose steps are profiled."""
    project: str = Field("mtrain", min_length=1, max_length=120)
    """Project of the run in trackers; name, notes and tags come from `run`."""
    data_ledger: bool = True
    """Whether ledger/ in the run folder records the samples of each trained step (`mtrain inspect data RUN`)."""

    def broken_rules(self) -> Iterator[str]:
        if self.profile_steps is not None and self.profile_steps[0] > self.profile_steps[1]:
            first, last = self.profile_steps
            yield f"profile_steps=[{first}, {last}] must name the first and the last step; swap them"


class WatchSection(Section):
    """The watchdog of each node: it ends a run when a rank hangs, and names the rank."""

    enabled: bool = True
    """Whether the watchdog runs: a separate process on each node that ends the run if a step makes no progress for
    train.process_group_timeout_s."""
    start_timeout_s: Annotated[int, bounds.SECONDS] = Field(3600, gt=0)
    """Time in seconds without a sign of work from a rank that the watchdog tolerates before the first step is done:
    while programs load, data are built and kernels are compiled."""
    slow_rank_percent: float = Field(25.0, ge=0)
    """Percentage above the median of its pipeline stage at which a rank counts as slow, by the time of its own work
    without waiting for other ranks; 0 turns the comparison off. On GPUs this is the host's work: data, Python,
    launches."""
    slow_rank_windows: int = Field(3, gt=0)
    """Consecutive windows of window_steps steps in which a rank must be slow before it is reported."""
    window_steps: int = Field(50, gt=0)
    """Number of steps in a window, whose mean time is compared."""
