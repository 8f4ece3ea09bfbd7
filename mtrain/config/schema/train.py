"""`train.*`, `optimizer.*`, `valid.*` and `eval.*`: length, batch, precision, schedule and evaluation of a run."""

from collections.abc import Iterator, Sequence
from typing import Annotated, ClassVar, Literal, assert_never

from pydantic import Field, Tag

from mtrain.config.schema import bounds
from mtrain.config.schema.section import Section, by_kind

Device = Literal["auto", "cpu", "cuda"]
"""Device of a rank. auto: this rank's GPU if there is one, else the CPU."""
Precision = Literal["fp32", "bf16", "fp16"]
"""Precision of weights and activations; gradients are summed in fp32."""
Fp8Format = Literal["hybrid", "e4m3"]
"""Formats of fp8. hybrid: e5m2 for gradients, which has more range, and e4m3 for the rest."""
Fp8Recipe = Literal["delayed", "tensorwise", "rowwise", "blockwise", "mxfp8"]
"""How elements share a scale: a tensor (by its current elements, or those of earlier steps), its rows, or blocks."""
Compiled = Literal["none", "regions", "layers"]
"""What torch.compile compiles."""
Compilation = Literal["auto", Compiled]
"""`Compiled`, or auto: the fastest on the machine."""
COMPILED: tuple[Compilation, ...] = ("regions", "layers")
"""Values that ask for compilation on any machine."""
Schedule = Literal["constant", "linear", "cosine", "wsd"]
"""Shape of the learning rate after the warm-up."""
BadStepAction = Literal["stop", "skip", "rollback"]
"""Treatment of a step whose gradient must not be applied."""


class SpikeSection(Section):
    """Detection of a loss or gradient norm far above earlier ones, and the reaction.

    Over the latest `window_steps` updates, m is the median and s = 1.4826 x the median distance from m (the standard
    deviation for normally distributed values), at least 1 % of m. A step spikes if its loss or gradient norm is above m
    + deviations x s. Steps are judged before their gradient is applied, and only after window_steps updates; a step
    that spiked does not enter the window.
    """

    action: BadStepAction
    """Treatment of a step that spikes: stop, skip or rollback, as for train.on_nonfinite."""
    window_steps: int = Field(64, ge=8, le=1024)
    """Number of earlier updates that a step is compared with."""
    loss_deviations: float | None = Field(12.0, gt=0)
    """Multiple of s above the median at which the main term's loss spikes; null: the loss is not compared."""
    grad_norm_deviations: float | None = Field(50.0, gt=0)
    """Multiple of s above the median at which the gradient norm before clipping spikes; larger because norms vary more.
    null: the norm is not compared."""

    def broken_rules(self) -> Iterator[str]:
        if self.loss_deviations is None and self.grad_norm_deviations is None:
            yield (
                "loss_deviations and grad_norm_deviations are both null, so nothing is compared; set one, or remove "
                "on_spike"
            )


class TrainSection(Section):
    """The run's length, batch, precision and schedule options."""

    asked_for: ClassVar[tuple[str, ...]] = ("num_steps",)

    global_batch_size: Annotated[int, bounds.BATCH] = Field(gt=0)
    """Samples, or packed rows with data.packing.batch=rows, in one optimizer step, over all data-parallel ranks."""
    micro_batch_size: Annotated[int, bounds.BATCH] = Field(1, gt=0)
    """Samples, or packed rows with data.packing, in one forward pass of one data-parallel rank."""
    tokens_per_micro_batch: Annotated[int | None, bounds.POSITIONS] = Field(None, gt=1)
    """Positions in a packed row, with one row per forward pass; data.packing only. null: data.seq_length."""
    num_steps: Annotated[int, bounds.STEPS] = Field(0, ge=0)
    """Number of optimizer steps in the whole run, across restarts. 0: follows from num_epochs."""
    num_epochs: float | None = Field(None, gt=0, le=1_000_000)
    """Passes over the training samples, instead of num_steps; may be a fraction. The start counts the samples and
    records num_steps. null: num_steps is given."""
    seed: Annotated[int, bounds.SEED] = Field(1234, ge=0)
    """Seed of initial weights, of dropout, and, without data.seed, of the order of samples."""
    device: Device = "auto"
    """Device of each rank."""
    precision: Precision = "bf16"
    """Precision of weights and activations; bf16 and fp16 keep fp32 main weights."""
    fp8: Fp8Format | None = None
    """Format of 8-bit matrix products. model.backend=torch: in our own layers, by scales that no layout changes.
    Otherwise in TransformerEngine's, on GPUs that support them; layouts then agree only to the rounding of fp8. null:
    no 8-bit products."""
    fp8_recipe: Fp8Recipe | None = None
    """How products in fp8 are scaled. Our own layers have rowwise (null: this) and blockwise, TransformerEngine's
    tensorwise (null: this), blockwise and mxfp8. delayed is refused."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations that the backward pass recomputes: none, those of recompute_modules, or whole layers, those of a
    trained vision tower included."""
    recompute_modules: tuple[Literal["core_attn", "mlp", "moe", "shared_experts"], ...] | None = None
    """Modules to recompute: core_attn (scores and their product with the values), mlp (dense feed-forward parts), moe
    (router and experts), shared_experts; null: core_attn only. selective only."""
    recompute_layers: int | None = Field(None, gt=0)
    """Number of layers of each virtual pipeline stage, from its first, that keep only their input; the others keep all
    activations. null: all layers. All layers of a vision tower are recomputed in any case. full only."""
    offload_layers: int | None = Field(None, gt=0)
    """Number of layers of each virtual pipeline stage, from its first (all if it has fewer), whose activations stay in
    pinned host memory between forward and backward pass. null: none."""
    offload_optimizer: bool = False
    """Whether AdamW's moments stay in pinned host memory between updates; the device computes the same updates, a few
    parameters at a time."""
    deterministic: bool = False
    """Whether a GPU adds in the same order every time, so that a run repeats bit for bit on the same GPU, versions and
    layout; slower. Environment variables of NCCL, cuBLAS and TransformerEngine must not contradict it. CPUs always add
    in the same order."""
    compile: Compilation = "auto"
    """What torch.compile compiles. regions: norms, activations and rotations, each on its own. layers: each transformer
    layer, without what the layout adds to it (collectives, pipelines, recomputation, dispatch to experts, documents).
    auto: regions, on a GPU if `mtrain verify backend` found them right and faster there, on a CPU if the run is long
    enough to make up for the time of compiling. If nothing can be compiled, the run continues uncompiled."""
    distributed_optimizer: bool = True
    """Whether the DP x CP ranks divide the optimizer's state."""
    overlap_grad_reduce: bool = False
    """Whether gradient reductions overlap with the backward pass."""
    overlap_param_gather: bool = False
    """Whether updated parameters are gathered during the next forward pass; needs distributed_optimizer and
    overlap_grad_reduce."""
    process_group_timeout_s: Annotated[int, bounds.SECONDS] = Field(600, gt=0)
    """Time in seconds after which an unfinished collective ends the run."""
    initial_loss_scale: float = Field(2.0**16, ge=1)
    """Loss scale of the first step, dynamic afterwards; fp16 only."""
    max_skipped_steps: int = Field(100, gt=0)
    """Number of consecutive overflows (2 at the smallest loss scale, 1) that end the run with exit code 4; fp16
    only."""

    on_nonfinite: BadStepAction = "stop"
    """Reaction to a loss or gradient that is nan, inf or beyond float32: stop ends the run with exit code 4; skip
    leaves the step out, as if its batch did not exist; rollback returns to the newest good checkpoint and leaves the
    batch out."""
    on_spike: SpikeSection | None = None
    """Detection of spikes in the loss or gradient norm, and the reaction; null: spikes are not detected."""
    rollback_margin_steps: int = Field(0, ge=0, le=10_000)
    """Number of batches before, and of batches after, the bad one to leave out as well; rollback only."""
    max_bad_steps: int = Field(10, gt=0, le=1000)
    """Bad steps in 1000 above which the run ends with exit code 4; batches of the margin do not count. skip and
    rollback only."""
    check_replicas_every_steps: int = Field(100, ge=0)
    """Steps between bitwise comparisons of ranks that hold the same weights or optimizer state; every save also
    compares them. A difference ends the run with exit code 4. 0: never."""

    def broken_rules(self) -> Iterator[str]:
        if self.num_epochs is None and self.num_steps == 0:
            yield "num_steps: no value is given; set it, or num_epochs"
        elif self.num_epochs is not None and self.num_steps > 0:
            yield (
                f"num_epochs={self.num_epochs:g} and num_steps={self.num_steps} both give the length of the run; "
                "remove one of them (num_steps=0 overrides an earlier file)"
            )
        missing = [name for name in ("distributed_optimizer", "overlap_grad_reduce") if not getattr(self, name)]
        if self.overlap_param_gather and missing:
            yield (
                f"overlap_param_gather=true needs distributed_optimizer and overlap_grad_reduce, but "
                f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} false; set both to true"
            )
        if self.recompute_modules is not None:
            yield from self._broken_rules_of_modules(self.recompute_modules)
        if self.recompute_layers is not None and self.recompute != "full":
            yield (
                f"recompute_layers={self.recompute_layers} needs recompute=full, but recompute={self.recompute}; set "
                "it, or remove recompute_layers"
            )

    def _broken_rules_of_modules(self, modules: Sequence[str]) -> Iterator[str]:
        if self.recompute != "selective":
            yield (
                f"recompute_modules={list(modules)} needs recompute=selective, but recompute={self.recompute}; set it, "
                "or remove recompute_modules"
            )
        elif not modules or len(set(modules)) < len(modules):
            yield f"recompute_modules={list(modules)} must name at least one module, each once; change it"
        elif {"moe", "shared_experts"} <= set(modules):
            yield "recompute_modules names shared_experts and moe, which includes them; remove shared_experts"


class OptimizerSection(Section):
    """Keys of every optimizer: decoupled weight decay, and the learning rate as a pure function of the step."""

    kind: str
    """Kind of the optimizer; each kind is a section with additional keys."""
    lr: float = Field(gt=0)
    """Largest learning rate, at the end of the warm-up."""
    min_lr: float = Field(0.0, ge=0)
    """Learning rate at the end of the decay."""
    tower_lr: float | None = Field(None, gt=0)
    """Largest learning rate of the vision tower (vit_lr). Warm-up and decay scale it like lr: tower_lr / lr is the same
    at every step. null: lr."""
    projector_lr: float | None = Field(None, gt=0)
    """Largest learning rate of the projector (aligner_lr), scaled like tower_lr. null: lr."""
    weight_decay: float = Field(0.1, ge=0)
    """Coefficient of the decoupled weight decay."""
    decay_norms_and_biases: bool = False
    """Whether norms and biases decay as well."""
    clip_grad: float = Field(1.0, ge=0)
    """Largest global norm of the gradient, after division by the denominator; 0 turns clipping off."""
    schedule: Schedule = "cosine"
    """Shape of the learning rate after the warm-up."""
    warmup_steps: int = Field(0, ge=0)
    """Updates of the warm-up; 0: none."""
    warmup_ratio: float | None = Field(None, ge=0, lt=1)
    """Length of the warm-up as a share of train.num_steps, instead of warmup_steps; rounded up to whole steps and
    recorded as warmup_steps. null: warmup_steps."""
    decay_steps: int | None = Field(None, gt=0)
    """End or length of the decay. linear, cosine: the step at which min_lr is reached (null: train.num_steps). wsd:
    steps of the final decay (null: a tenth of train.num_steps)."""
    schedule_convention: Literal["megatron", "one_ahead"] = "megatron"
    """Number of updates from which an update's rate follows. megatron: the updates before it, as in Megatron-LM and
    transformers. one_ahead: also the update itself, as in runs begun before this key existed."""

    @property
    def decay(self) -> Literal["none", "from_warmup", "at_end"]:
        """Part of the run in which the schedule lowers the rate. from_warmup: up to the step decay_steps; at_end: in
        the last decay_steps updates. All code that depends on the schedule's shape reads this property, so a new
        schedule defines its shape only here."""
        match self.schedule:
            case "constant":
                return "none"
            case "linear" | "cosine":
                return "from_warmup"
            case "wsd":
                return "at_end"
            case _:
                assert_never(self.schedule)

    @property
    def lr_of_parts(self) -> dict[str, float]:
        """Learning rates of parts that have one of their own, by key."""
        rates = {"tower_lr": self.tower_lr, "projector_lr": self.projector_lr}
        return {key: rate for key, rate in rates.items() if rate is not None}

    def broken_rules(self) -> Iterator[str]:
        if self.min_lr > self.lr:
            yield f"min_lr={self.min_lr} must not be above lr={self.lr}; lower it"
        if self.warmup_ratio is not None and self.warmup_steps:
            yield (
                f"warmup_ratio={self.warmup_ratio} and warmup_steps={self.warmup_steps} both give the length of the "
                "warm-up; remove one of them"
            )
        if self.decay == "from_warmup" and self.decay_steps is not None and self.decay_steps <= self.warmup_steps:
            yield (
                f"decay_steps={self.decay_steps} is the step at which min_lr is reached and must be above "
                f"warmup_steps={self.warmup_steps}; raise it or shorten the warm-up"
            )


class AdamWConstants(OptimizerSection):
    """Keys of optimizers that use AdamW for all or some parameters."""

    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay rate of the moving mean of gradients."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """Decay rate of the moving mean of squared gradients."""
    epsilon: float = Field(1e-8, gt=0)
    """Number added to the square root of the second moment."""

    def broken_rules(self) -> Iterator[str]:
        yield from super().broken_rules()
        for key, rate in {"lr": self.lr, **self.lr_of_parts}.items():
            # AdamW passes both to torch as float32; the first step divides by 1 - beta1
            if max(rate / (1 - self.beta1), rate * self.weight_decay) > bounds.FLOAT32_LARGEST:
                yield (
                    f"{key}={rate} gives factors {key} / (1 - beta1) and {key} x weight_decay beyond float32 "
                    f"({bounds.FLOAT32_LARGEST:.3g}), with beta1={self.beta1} and weight_decay={self.weight_decay}; "
                    "lower it"
                )


class AdamWSection(AdamWConstants):
    """AdamW with decoupled weight decay for all parameters; the default kind."""

    kind: Literal["adamw"] = "adamw"


class MuonSection(AdamWConstants):
    """Muon for matrices; AdamW for embeddings, output layer, routers, norms and biases, and for patch embeddings and
    positions of a vision tower; one learning rate for both."""

    kind: Literal["muon"]
    momentum: float = Field(0.95, ge=0, lt=1)
    """Decay rate of the moving mean of a matrix's gradients."""
    nesterov: bool = True
    """Whether the momentum looks one step ahead (Nesterov)."""
    newton_schulz_steps: int = Field(5, ge=1, le=20)
    """Number of Newton-Schulz iterations, which bring all singular values of an update near 1."""
    update_rms: float = Field(0.2, gt=0, le=100)
    """Root mean square of an update's elements, as a share of lr: a matrix moves by lr x update_rms x sqrt(max(rows,
    columns)) in each singular direction, so its elements move by about lr x update_rms, as under AdamW, and learning
    rates carry over."""


AnyOptimizer = Annotated[
    Annotated[AdamWSection, Tag("adamw")] | Annotated[MuonSection, Tag("muon")],
    by_kind("adamw"),
]


class ValidSection(Section):
    """Validation, which evaluates each sample of a set exactly once; choice of the best checkpoints; early stopping."""

    interval_steps: int = Field(0, ge=0)
    """Steps between two validations; 0: validation only by at_start and at_end."""
    at_start: bool = False
    """Whether the run validates before its first step."""
    at_end: bool = False
    """Whether the run validates after its last step."""
    max_samples: Annotated[int | None, bounds.SAMPLES] = Field(None, gt=0)
    """Number of samples to evaluate, from the first; null: the whole set."""
    metric: str | None = Field(None, min_length=1)
    """Number that decides the best checkpoints and early stopping: the loss of a set of data.valid, by its name, or
    `task/metric` of eval.tasks, such as `arc_easy/acc_norm`. null: the loss of the first set."""
    patience: int | None = Field(None, gt=0)
    """Number of results of `metric` in a row without an improvement after which the run saves a checkpoint and ends;
    null: the run makes all steps."""
    min_improvement: float = Field(0.0, ge=0)
    """Improvement on the best result, in units of `metric`, that a result must exceed to reset `patience`."""

    def broken_rules(self) -> Iterator[str]:
        if self.min_improvement > 0 and self.patience is None:
            yield f"min_improvement={self.min_improvement} is for early stopping; set patience, or remove it"


class EvalSection(Section):
    """Prompts and tasks that the model answers during training. Answers to prompts go to samples.jsonl in the run
    folder, metrics of tasks to metrics.jsonl.

    They do not change the training by a single bit.
    """

    tasks: tuple[Annotated[str, Field(min_length=1)], ...] = Field((), max_length=1000)
    """Tasks of lm-eval, such as [arc_easy, my_task]: names, groups, tags or patterns (docs/training/tasks.md)."""
    include_path: Annotated[str | None, bounds.PATH] = Field(None, min_length=1)
    """Folder with YAML files of your own tasks; null: only lm-eval's."""
    num_fewshot: int | None = Field(None, ge=0, le=1000)
    """Number of solved examples before each question; null: each task's own number."""
    limit: int | None = Field(None, gt=0)
    """Number of questions of each task, from the first; null: all."""
    apply_chat_template: bool = False
    """Whether questions are sent as user messages, with the run's chat template."""
    fewshot_as_multiturn: bool | None = None
    """Whether solved examples are turns of the conversation, rather than part of the question; null: if
    apply_chat_template is true, as in lm-eval."""
    system_instruction: str | None = Field(None, min_length=1)
    """Text before the description of a task: the system's message if apply_chat_template is true; null: none."""
    prompts: tuple[Annotated[str, Field(min_length=1)], ...] = Field((), max_length=1000)
    """Texts to continue, or user messages."""
    prompts_file: Annotated[str | None, bounds.PATH] = Field(None, min_length=1)
    """Path of a file with further prompts: one per line; in a .jsonl file, objects with `prompt` or `messages`. null:
    no file."""
    chat: bool | None = None
    """Whether the run's chat template writes each text as a user message; null: if the run has a template."""
    interval_steps: Annotated[int | None, bounds.STEPS] = Field(None, gt=0)
    """Steps between two evaluations of prompts and tasks; null: whenever the run validates, as `valid` says."""
    max_new_tokens: Annotated[int, bounds.POSITIONS] = Field(64, gt=0)
    """Largest number of tokens in an answer, which ends earlier at the end token."""
    temperature: float = Field(0.0, ge=0)
    """Divisor of the logits; 0 takes the likeliest token."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Total probability of the likeliest tokens to sample from; 1 samples from all."""
    top_k: Annotated[int, bounds.VOCABULARY] = Field(0, ge=0)
    """Number of the likeliest tokens to sample from; 0 samples from all."""
    seed: Annotated[int, bounds.SEED] = Field(0, ge=0)
    """Seed of sampling; the same numbers are drawn at every step."""

    @property
    def has_prompts(self) -> bool:
        """Whether any prompts are given."""
        return bool(self.prompts) or self.prompts_file is not None

    def broken_rules(self) -> Iterator[str]:
        if self.interval_steps is not None and not (self.has_prompts or self.tasks):
            yield (
                f"interval_steps={self.interval_steps}, but neither prompts nor tasks are given; set eval.prompts, "
                "eval.prompts_file or eval.tasks"
            )
        if self.fewshot_as_multiturn and not self.apply_chat_template:
            yield "fewshot_as_multiturn=true needs a chat template; set apply_chat_template=true, or remove it"
        options = {"include_path": self.include_path, "num_fewshot": self.num_fewshot, "limit": self.limit}
        options |= {"fewshot_as_multiturn": self.fewshot_as_multiturn, "system_instruction": self.system_instruction}
        if not self.tasks and (given := [name for name, value in options.items() if value is not None]):
            yield f"{given[0]}={options[given[0]]} is for tasks, but none are given; set eval.tasks, or remove it"
