"""`train.*`, `optimizer.*` and `valid.*`: how long, how large, how fast."""

from typing import Annotated, Literal, assert_never

from pydantic import Field, Tag

from mtrain.config.schema import bounds
from mtrain.config.schema.section import Section, by_kind, rule

Device = Literal["auto", "cpu", "cuda"]
"""auto: this rank's GPU where there is one, else the CPU."""
Precision = Literal["fp32", "bf16", "fp16"]
"""What weights and activations are held in; gradients are summed in fp32."""
Fp8Format = Literal["hybrid", "e4m3"]
"""hybrid: e5m2 for gradients, which has more range, and e4m3 for the rest."""
Fp8Recipe = Literal["delayed", "tensorwise", "blockwise", "mxfp8"]
"""What shares a scale: a tensor (by its elements now, or by those of earlier steps), or blocks of it."""
Schedule = Literal["constant", "linear", "cosine", "wsd"]
"""How the learning rate goes on after the warm-up."""
BadStepAction = Literal["stop", "skip", "rollback"]
"""What becomes of a step whose gradient must not be applied."""


class SpikeSection(Section):
    """When a loss or a gradient norm is far above those before it, and what follows.

    Of the latest `window_steps` updates the median m and the spread s = 1.4826 x the median distance from m are taken
    (for normally distributed values s is the standard deviation), s being at least 1 % of m. A step spikes where its
    loss or its gradient norm is above m + deviations x s. It is judged before its gradient is applied, and only once
    as many updates were made; a step that spiked does not enter the window.
    """

    action: BadStepAction
    """As train.on_nonfinite."""
    window_steps: int = Field(64, ge=8, le=1024)
    """Updates that a step is compared with."""
    loss_deviations: float | None = Field(12.0, gt=0)
    """Of the main term's loss; null: it is not compared."""
    grad_norm_deviations: float | None = Field(50.0, gt=0)
    """Of the gradient's norm before clipping, whose values spread more; null: it is not compared."""

    @rule
    def something_is_compared(self) -> str | None:
        if self.loss_deviations is not None or self.grad_norm_deviations is not None:
            return None
        return "loss_deviations and grad_norm_deviations are both null, so nothing is compared; set one, or no on_spike"


class TrainSection(Section):
    """The run's length, batch, precision and schedule options."""

    global_batch_size: Annotated[int, bounds.BATCH] = Field(gt=0)
    """Samples in one optimizer step, over all data-parallel ranks; packed rows with data.packing.batch=rows."""
    micro_batch_size: Annotated[int, bounds.BATCH] = Field(1, gt=0)
    """Samples in one forward pass of one data-parallel rank; rows of samples with data.packing."""
    tokens_per_micro_batch: Annotated[int | None, bounds.POSITIONS] = Field(None, gt=1)
    """With data.packing: positions of a row, and one row a forward pass. By default rows have data.seq_length."""
    num_steps: Annotated[int, bounds.STEPS] = Field(gt=0)
    """Optimizer steps of the whole run, resumed ones included."""
    seed: Annotated[int, bounds.SEED] = Field(1234, ge=0)
    device: Device = "auto"
    precision: Precision = "bf16"
    """bf16 and fp16 keep fp32 main weights."""
    fp8: Fp8Format | None = None
    """Products of TransformerEngine's layers in 8 bits, on GPUs that have them; layouts then agree to the rounding of
    fp8 alone."""
    fp8_recipe: Fp8Recipe | None = None
    """tensorwise where it is not given; delayed is refused."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations computed again in backward: none, those of recompute_modules, or whole layers."""
    recompute_modules: tuple[Literal["core_attn", "mlp", "moe", "shared_experts"], ...] | None = None
    """selective only: core_attn (scores and their product with the values), mlp (dense feed-forward parts), moe (router
    and experts), shared_experts; core_attn alone where it is not given."""
    recompute_layers: int | None = Field(None, gt=0)
    """full only: so many layers of each virtual pipeline stage, from its first on, keep their input alone; the others
    keep everything. All layers where it is not given."""
    offload_layers: int | None = Field(None, gt=0)
    """What backward needs of so many layers of each virtual pipeline stage, from its first on (of all where there are
    fewer), lies in pinned memory of the host between their two passes. Of none where it is not given."""
    offload_optimizer: bool = False
    """AdamW's moments lie in pinned memory of the host between updates; the device computes updates as it does without,
    on some parameters after the other."""
    compile: Literal["none", "layers"] = "none"
    """layers: torch.compile of each transformer layer, without what the layout adds to it (collectives, pipelines,
    recomputation, dispatch to experts, documents); where nothing can be compiled the run goes on as it is written."""
    distributed_optimizer: bool = True
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    process_group_timeout_s: Annotated[int, bounds.SECONDS] = Field(600, gt=0)
    initial_loss_scale: float = Field(2.0**16, ge=1)
    """fp16 only; dynamic from there."""
    max_skipped_steps: int = Field(100, gt=0)
    """fp16 only: so many overflows in a row, or two at the smallest loss scale (1), end the run with exit code 4."""

    on_nonfinite: BadStepAction = "stop"
    """A loss or gradient that is nan, inf or beyond float32: stop ends the run with exit code 4; skip leaves the step
    out, as if its batch were not there; rollback goes back to the newest good checkpoint and leaves the batch out."""
    on_spike: SpikeSection | None = None
    """What to do where a loss or gradient norm jumps; by default it is not looked for."""
    rollback_margin_steps: int = Field(0, ge=0, le=10_000)
    """rollback: so many batches before and behind the bad one are left out, too."""
    max_bad_steps: int = Field(10, gt=0, le=1000)
    """skip, rollback: more bad steps than this in 1000 end the run with exit code 4; batches of the margin not
    counted."""
    check_replicas_every_steps: int = Field(100, ge=0)
    """Ranks that hold the same weights or optimizer state compare their bits every so many steps, and before every
    save; a difference ends the run with exit code 4. 0: never."""

    @rule
    def gathering_parameters_needs_its_conditions(self) -> str | None:
        missing = [name for name in ("distributed_optimizer", "overlap_grad_reduce") if not getattr(self, name)]
        if not self.overlap_param_gather or not missing:
            return None
        return (
            f"overlap_param_gather=true needs distributed_optimizer and overlap_grad_reduce, but "
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} false; turn on what is missing"
        )

    @rule
    def recomputed_modules_are_a_selection(self) -> str | None:
        modules = self.recompute_modules
        if modules is None:
            return None
        if self.recompute != "selective":
            return (
                f"recompute_modules={list(modules)} needs recompute=selective, but recompute={self.recompute}; set it, "
                "or remove recompute_modules"
            )
        if not modules or len(set(modules)) < len(modules):
            return f"recompute_modules={list(modules)} must name at least one module, and each once; change it"
        if {"moe", "shared_experts"} <= set(modules):
            return "recompute_modules names shared_experts beside moe, of which they are a part; remove shared_experts"
        return None

    @rule
    def recomputed_layers_are_whole(self) -> str | None:
        if self.recompute_layers is None or self.recompute == "full":
            return None
        return (
            f"recompute_layers={self.recompute_layers} needs recompute=full, but recompute={self.recompute}; set it, "
            "or remove recompute_layers"
        )


class OptimizerSection(Section):
    """What all optimizers have: decoupled weight decay, and the learning rate as a pure function of the step."""

    kind: str
    """Which optimizer; each kind is a section of its own with the keys that only it has."""
    lr: float = Field(gt=0)
    min_lr: float = Field(0.0, ge=0)
    weight_decay: float = Field(0.1, ge=0)
    decay_norms_and_biases: bool = False
    clip_grad: float = Field(1.0, ge=0)
    """Largest global norm of the normalised gradient; 0 turns clipping off."""
    schedule: Schedule = "cosine"
    warmup_steps: int = Field(0, ge=0)
    decay_steps: int | None = Field(None, gt=0)
    """linear, cosine: the step at which min_lr is reached (by default train.num_steps). wsd: length of the final decay
    (by default a tenth of train.num_steps)."""
    schedule_convention: Literal["megatron", "one_ahead"] = "megatron"
    """megatron: an update's rate follows from the updates completed before it, as in Megatron-LM and transformers.
    one_ahead: from those completed with it, as runs begun before this key was there keep it."""

    @rule
    def the_rate_falls(self) -> str | None:
        if self.min_lr <= self.lr:
            return None
        return f"min_lr={self.min_lr} must not be above lr={self.lr}; lower it"

    @property
    def decay(self) -> Literal["none", "from_warmup", "at_end"]:
        """Where in the run the schedule lowers the rate. from_warmup: up to the step decay_steps; at_end: in the last
        decay_steps updates. Whatever depends on the schedule's shape asks this, so a new one says it here alone."""
        match self.schedule:
            case "constant":
                return "none"
            case "linear" | "cosine":
                return "from_warmup"
            case "wsd":
                return "at_end"
            case _:
                assert_never(self.schedule)

    @rule
    def decay_follows_warmup(self) -> str | None:
        if not (self.decay == "from_warmup" and self.decay_steps is not None and self.decay_steps <= self.warmup_steps):
            return None
        return (
            f"decay_steps={self.decay_steps} is the step at which min_lr is reached and must be above "
            f"warmup_steps={self.warmup_steps}; raise it or shorten the warm-up"
        )


class AdamWConstants(OptimizerSection):
    """Of kinds that update all parameters, or some, by AdamW."""

    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    epsilon: float = Field(1e-8, gt=0)

    @rule
    def updates_are_in_float32(self) -> str | None:
        """AdamW hands torch lr / (1 - beta1), in the first step, and lr x weight_decay as float32."""
        if max(self.lr / (1 - self.beta1), self.lr * self.weight_decay) <= bounds.FLOAT32_LARGEST:
            return None
        return (
            f"lr={self.lr} gives factors lr / (1 - beta1) and lr x weight_decay beyond float32 "
            f"({bounds.FLOAT32_LARGEST:.3g}), with beta1={self.beta1} and weight_decay={self.weight_decay}; lower it"
        )


class AdamWSection(AdamWConstants):
    """AdamW with decoupled weight decay for all parameters; what a configuration without `kind` means."""

    kind: Literal["adamw"] = "adamw"


class MuonSection(AdamWConstants):
    """Muon for matrices, AdamW for embeddings, output layer, routers, norms and biases, at one learning rate."""

    kind: Literal["muon"]
    momentum: float = Field(0.95, ge=0, lt=1)
    """Of the moving mean of a matrix's gradients."""
    nesterov: bool = True
    newton_schulz_steps: int = Field(5, ge=1, le=20)
    """Iterations that bring all singular values of an update near 1."""
    update_rms: float = Field(0.2, gt=0, le=100)
    """A matrix moves by lr x update_rms x sqrt(max(rows, columns)) in each singular direction: its elements by about
    lr x update_rms, as under AdamW, so that learning rates carry over."""


AnyOptimizer = Annotated[
    Annotated[AdamWSection, Tag("adamw")] | Annotated[MuonSection, Tag("muon")],
    by_kind("adamw"),
]


class ValidSection(Section):
    """Validation over exactly the samples of the set."""

    interval_steps: int = Field(0, ge=0)
    """0: only as asked for by at_start and at_end."""
    at_start: bool = False
    at_end: bool = False
    max_samples: Annotated[int | None, bounds.SAMPLES] = Field(None, gt=0)
    """Only the first so many samples of the set."""
