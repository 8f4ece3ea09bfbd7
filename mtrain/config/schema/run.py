"""`run.*`, `checkpoint.*`, `metrics.*` and `watch.*`: what a run leaves behind, and who watches it."""

from typing import Annotated, Literal

from pydantic import Field

from mtrain.config.schema import bounds
from mtrain.config.schema.section import Section, rule


class RunSection(Section):
    """The run folder."""

    dir: Annotated[str, bounds.PATH] = Field(min_length=1)
    """Holds config.yaml, metrics.jsonl, checkpoints/ and logs/."""
    name: str | None = Field(None, min_length=1, max_length=120)
    """What people call the run, in tables, on pages and in trackers; the folder's name where it is left out."""
    notes: str = Field("", max_length=10_000)
    """Why it was started, for people."""
    tags: tuple[Annotated[str, Field(min_length=1, max_length=64)], ...] = Field((), max_length=50)
    """Words by which trackers find it."""


class CheckpointSection(Section):
    """Saving, resuming and starting from other weights."""

    interval_steps: int = Field(0, ge=0)
    """0: only at the end and on a signal."""
    at_end: bool = True
    keep_last: int = Field(2, gt=0)
    keep_every_steps: int | None = Field(None, gt=0)
    """Checkpoints at multiples of this are never deleted."""
    keep_best: int = Field(0, ge=0)
    """So many with the lowest validation loss are not deleted either; those saved at a step that was validated."""
    async_save: bool = True
    """Training goes on from a copy in host memory, as large as a rank's state; false: it waits for the disk."""
    save_timeout_s: Annotated[int, bounds.SECONDS] = Field(1800, gt=0)
    """A save that is not finished by then has failed."""
    on_save_failure: Literal["continue", "stop"] = "continue"
    """continue: a line says so, and the next save tries again; the last one of a run must succeed in any case."""
    export_hf_every_steps: int = Field(0, ge=0)
    """Checkpoints at multiples of this become folders of Hugging Face, in exports/ of the run folder; 0: none. A
    multiple of interval_steps, since exports are made from checkpoints."""
    self_test: bool = False
    """Save, load and compare everything once before the first step, and print the time and memory that it takes."""
    resume: Literal["auto", "never"] = "auto"
    """auto continues from the newest good checkpoint of the run folder; never refuses a run folder that has one."""
    allow_changed: tuple[str, ...] = ()
    """Keys, such as [optimizer.lr, data.train], that this start may give other values than the checkpoint that it goes
    on from was saved with; a section means every key in it that can change. What changed is recorded with its step."""
    initialize_from: Annotated[str | None, bounds.PATH] = Field(None, min_length=1)
    """A checkpoint directory, or a run folder (its newest one), whose weights this run starts from; optimizer, step
    and data order start anew. Of Megatron-LM or Megatron-Bridge (torch_dist): an iteration, or its parent."""

    @rule
    def exports_are_made_from_checkpoints(self) -> str | None:
        every, interval = self.export_hf_every_steps, self.interval_steps
        if every == 0 or (interval > 0 and every % interval == 0):
            return None
        return (
            f"export_hf_every_steps={every} must be a multiple of interval_steps={interval}, since exports are made "
            "from checkpoints; change one of them"
        )


class MetricsSection(Section):
    """Where step records go beside metrics.jsonl."""

    console_interval_steps: int = Field(1, gt=0)
    tensorboard: bool = True
    trackers: tuple[Literal["wandb", "mlflow", "trackio"], ...] = ()
    """Get the numbers of every step from a thread that training never waits for; `pip install 'mtrain[wandb]'` and so
    on. Where they write is said by their own variables, such as WANDB_MODE, MLFLOW_TRACKING_URI, TRACKIO_SPACE_ID."""
    profile_steps: tuple[Annotated[int, Field(gt=0)], Annotated[int, Field(gt=0)]] | None = None
    """First and last step that are profiled, such as [10, 12]: profile/ in the run folder gets a trace for Perfetto or
    chrome://tracing, a table of the operations that take longest, and on GPUs a snapshot of memory. A trace holds every
    operation, so a few steps are enough."""
    profile_ranks: tuple[Annotated[int, Field(ge=0)], ...] = (0,)
    """Whose steps are profiled."""
    project: str = Field("mtrain", min_length=1, max_length=120)
    """Under which trackers file the run; its name, notes and tags are those of `run`."""
    data_ledger: bool = True
    """ledger/ in the run folder says which samples each step has trained (`mtrain inspect data RUN`)."""

    @rule
    def profiled_steps_are_in_order(self) -> str | None:
        if self.profile_steps is None or self.profile_steps[0] <= self.profile_steps[1]:
            return None
        first, last = self.profile_steps
        return f"profile_steps=[{first}, {last}] must name the first and the last step; swap them"


class WatchSection(Section):
    """The watchdog of each node, which ends a run in which a rank hangs, and says which."""

    enabled: bool = True
    """A process of its own on each node; it waits train.process_group_timeout_s in a step."""
    start_timeout_s: Annotated[int, bounds.SECONDS] = Field(3600, gt=0)
    """How long a rank may do nothing that can be seen until its first step is done: while programs load, data are built
    and kernels are compiled."""
    slow_rank_percent: float = Field(25.0, ge=0)
    """A rank is slow whose own work, without waiting for others, takes so much longer than the median of its pipeline
    stage; 0 turns the comparison off. On GPUs the host's own work: data, Python, launches."""
    slow_rank_windows: int = Field(3, gt=0)
    """In so many windows of window_steps, one after the other, before it is named."""
    window_steps: int = Field(50, gt=0)
    """Steps whose mean is compared."""
