"""Rules between sections for any world size; `mtrain/arch/layout.py` has the rules that depend on it.

Each function yields a message for every broken rule: what was given, what is needed, what to change.
"""

from collections.abc import Iterator, Sequence
from typing import Literal, assert_never

from mtrain.config.derived import PREFERENCE_FORMATS, compared, layout_dependent_keys, row_width
from mtrain.config.extras import ROUTED_EXPERTS, key_and_sizes
from mtrain.config.known_issues import sizes_of_attention
from mtrain.config.schema.data import AnyData, FilesSection, SftSection
from mtrain.config.schema.layout import LayoutSection
from mtrain.config.schema.loss import (
    HEAD_LOSSES,
    LOSS_FUNCTIONS,
    NUMBER_LOSSES,
    PREFERENCE_LOSSES,
    LossSection,
)
from mtrain.config.schema.model import ModelSection
from mtrain.config.schema.run import CheckpointSection
from mtrain.config.schema.sections import Sections
from mtrain.config.schema.train import COMPILED, EvalSection, Fp8Recipe, OptimizerSection, TrainSection, ValidSection
from mtrain.config.schema.vision import VisionSection


def steps(train: TrainSection, optimizer: OptimizerSection) -> Iterator[str]:
    """Checks that the warm-up, and the decay of wsd, fit into the run."""
    if train.num_steps == 0:
        return  # the start has not derived it from train.num_epochs yet
    if optimizer.warmup_steps >= train.num_steps:
        yield (
            f"optimizer.warmup_steps={optimizer.warmup_steps} must be below train.num_steps={train.num_steps}; "
            "shorten the warm-up or lengthen the run"
        )
        return
    decay_steps = 1 if optimizer.decay_steps is None else optimizer.decay_steps
    if optimizer.decay == "at_end" and optimizer.warmup_steps + decay_steps > train.num_steps:
        yield (
            f"optimizer.warmup_steps={optimizer.warmup_steps} and optimizer.decay_steps={optimizer.decay_steps} do not "
            f"fit into train.num_steps={train.num_steps} together; shorten one of them or lengthen the run"
        )


def added_tokens(model: ModelSection, checkpoint: CheckpointSection) -> Iterator[str]:
    """Checks that the weights come from a Hugging Face folder, whose tables can get new rows."""
    start = checkpoint.initialize_from
    if (model.add_tokens or model.add_special_tokens) and start is not None:
        yield (
            f"model.add_tokens and model.add_special_tokens add rows to the tables of a Hugging Face folder, but "
            f"checkpoint.initialize_from={start} gives the weights; name the folder as model.hf, or export the "
            "checkpoint with mtrain convert export"
        )


def validation(valid: ValidSection, data: AnyData) -> Iterator[str]:
    """Checks that validation, if enabled, has samples."""
    is_on = valid.interval_steps > 0 or valid.at_start or valid.at_end
    if is_on and isinstance(data, FilesSection) and not data.valid and (data.split is None or data.split[1] == 0):
        yield (
            "valid enables validation, but has no samples; set data.valid, give data.split a second share above 0, or "
            "turn valid.interval_steps, valid.at_start and valid.at_end off"
        )


def judging(evaluation: EvalSection, valid: ValidSection, data: AnyData) -> Iterator[str]:
    """Checks that valid.metric names something that the run evaluates."""
    of_tasks, name = valid.metric is not None and "/" in valid.metric, valid.metric
    sets = data.valid_sets if isinstance(data, FilesSection) else {}
    if of_tasks and not evaluation.tasks:
        yield f"valid.metric={name} is a metric of a task, but no tasks are evaluated; set eval.tasks, or remove it"
    elif not of_tasks and name is not None and name not in (sets or {"valid": ()}):
        yield (
            f"valid.metric={name} is neither a set of data.valid ({', '.join(sets or ['valid'])}) nor task/metric; "
            "name one of them"
        )
    if valid.patience is not None and not of_tasks and not valid.interval_steps:
        yield (
            f"valid.patience={valid.patience} counts validations, but valid.interval_steps=0; set valid.interval_steps"
        )


def prompts(evaluation: EvalSection, valid: ValidSection, model: ModelSection, data: AnyData) -> Iterator[str]:
    """Checks that prompts and tasks have a schedule and a tokenizer, and prompts layers that can generate."""
    key = "eval.prompts" if evaluation.has_prompts else "eval.tasks"
    if not (evaluation.has_prompts or evaluation.tasks):
        return
    if evaluation.interval_steps is None and not (valid.interval_steps or valid.at_start or valid.at_end):
        yield (
            f"{key} are never answered, since the run does not validate; set eval.interval_steps, or turn validation on"
        )
    if data.tokenizer is None:
        yield f"{key} are texts, but data.tokenizer is not set; name the tokenizer, or remove {key}"
    if not evaluation.has_prompts:
        return
    if model.backend == "te":
        yield "eval.prompts need layers that can generate, but model.backend=te; set model.backend=torch"
    if model.has_transformer_engine_experts:
        yield (
            "eval.prompts need layers that can generate, but model.experts.implementation=te needs "
            "TransformerEngine's; remove one of the two"
        )
    if model.experts is not None and model.experts.capacity_factor is not None:
        yield (
            f"eval.prompts cannot be answered with model.experts.capacity_factor={model.experts.capacity_factor}, "
            "which drops tokens depending on the rest of the batch; remove the prompts or the capacity"
        )


def tensor_parallel(model: ModelSection, layout: LayoutSection) -> Iterator[str]:
    """Checks that tp divides heads and FFN columns, and for Ulysses that cp divides a rank's heads."""
    for key, size in model.sizes_over_tp.items():
        if size % layout.tp:
            yield f"{key}={size} must be a multiple of layout.tp={layout.tp}; change one of them"
    if layout.cp_comm == "ulysses" and layout.cp > 1 and model.num_attention_heads % (layout.tp * layout.cp):
        yield (
            f"model.num_attention_heads={model.num_attention_heads} must be a multiple of layout.tp={layout.tp} x "
            f"layout.cp={layout.cp} for layout.cp_comm=ulysses; change one of them or set layout.cp_comm to allgather"
        )


def pipeline(model: ModelSection, layout: LayoutSection) -> Iterator[str]:
    """Checks that the layers fit `layout.stage_layers`, or divide evenly over the stages."""
    if layout.pp == 1:
        return
    stages = f"layout.pp={layout.pp} x layout.vpp={layout.vpp} stages"
    if layout.stage_layers is not None:
        if sum(layout.stage_layers) != model.num_layers:
            yield (
                f"layout.stage_layers={list(layout.stage_layers)} adds up to {sum(layout.stage_layers)}, but "
                f"model.num_layers={model.num_layers}; fix the list"
            )
        return
    ends = [count for count in (layout.first_stage_layers, layout.last_stage_layers) if count is not None]
    num_middle = layout.pp * layout.vpp - len(ends)
    middle_layers = model.num_layers - sum(ends)
    if num_middle:
        is_even = middle_layers % num_middle == 0 and middle_layers > 0
    else:
        is_even = middle_layers == 0
    if is_even:
        return
    if not ends:
        yield (
            f"model.num_layers={model.num_layers} must be a multiple of the {stages}; change one of them, or set "
            "layout.first_stage_layers, layout.last_stage_layers or layout.stage_layers"
        )
    else:
        yield (
            f"layout.first_stage_layers={layout.first_stage_layers} and layout.last_stage_layers="
            f"{layout.last_stage_layers} leave {middle_layers} of model.num_layers={model.num_layers} layers for the "
            f"other {num_middle} of the {stages}, which does not divide evenly; change them or use "
            "layout.stage_layers"
        )


def packing(train: TrainSection, data: AnyData) -> Iterator[str]:
    """Checks `train.tokens_per_micro_batch`, the width of packed rows."""
    width = train.tokens_per_micro_batch
    if width is None:
        return
    if data.packing is None:
        yield (
            f"train.tokens_per_micro_batch={width} is the width of packed rows, but data.packing is not given; set "
            "data.packing.batch=sequences, or remove train.tokens_per_micro_batch"
        )
    if width < data.seq_length:
        yield (
            f"train.tokens_per_micro_batch={width} must be at least data.seq_length={data.seq_length}, since a row "
            "must hold any sample; raise one or lower the other"
        )
    if train.micro_batch_size > 1:
        yield (
            f"train.tokens_per_micro_batch={width} makes one row a microbatch, but train.micro_batch_size="
            f"{train.micro_batch_size}; remove one of the two"
        )


def sequence(layout: LayoutSection, train: TrainSection, data: AnyData) -> Iterator[str]:
    """Checks that a row divides into 2 x cp chunks, and a rank's part over tp with sequence parallelism."""
    factors = ["2 x layout.cp" if layout.cp > 1 else "", "layout.tp (layout.sp=true)" if layout.sp else ""]
    divisor = (2 * layout.cp if layout.cp > 1 else 1) * (layout.tp if layout.sp else 1)
    width = row_width(train, data)
    if width % divisor:
        key = "data.seq_length" if train.tokens_per_micro_batch is None else "train.tokens_per_micro_batch"
        yield (
            f"{key}={width} must be a multiple of {divisor} = {' x '.join(filter(None, factors))}; "
            "change it or the layout"
        )


def experts(model: ModelSection, layout: LayoutSection) -> Iterator[str]:
    """Checks that experts divide over ep and each expert over etp, and that tp comes with sequence parallelism."""
    if model.experts is None:
        if layout.ep > 1 or layout.etp > 1:
            yield f"layout.ep={layout.ep} and layout.etp={layout.etp} need model.experts; set both to 1"
        return
    if model.experts.num_experts % layout.ep:
        yield (
            f"model.experts.num_experts={model.experts.num_experts} must be a multiple of layout.ep={layout.ep}; "
            "change one of them"
        )
    if model.experts.ffn_hidden_size % layout.etp:
        yield (
            f"model.experts.ffn_hidden_size={model.experts.ffn_hidden_size} must be a multiple of layout.etp="
            f"{layout.etp}; change one of them"
        )
    if model.linear_bias and layout.etp > 1:
        yield (
            f"layout.etp={layout.etp} cannot divide experts with biases (model.linear_bias=true), which each part "
            "would add; set layout.etp to 1 and raise layout.ep"
        )
    if model.linear_bias and model.experts.shared_ffn_hidden_size:
        yield (
            f"model.experts.shared_ffn_hidden_size={model.experts.shared_ffn_hidden_size} and model.linear_bias=true: "
            "megatron-core's shared experts have no biases; turn one of them off"
        )
    if model.experts.shared_ffn_hidden_size % layout.tp:
        yield (
            f"model.experts.shared_ffn_hidden_size={model.experts.shared_ffn_hidden_size} must be a multiple of "
            f"layout.tp={layout.tp}; change one of them"
        )
    if layout.tp > 1 and not layout.sp:
        yield f"model.experts with layout.tp={layout.tp} needs layout.sp=true; turn it on or set layout.tp to 1"
    if model.layer_pattern is None and not any(model.has_experts(layer) for layer in range(model.num_layers)):
        yield (
            f"model.experts.first_dense_layers={model.experts.first_dense_layers} leaves no layer of model.num_layers="
            f"{model.num_layers} for experts; lower it or remove model.experts"
        )


def recompute(train: TrainSection, model: ModelSection) -> Iterator[str]:
    """Checks that the modules to recompute exist, and that megatron-core can recompute them."""
    layers = [model.has_experts(layer) for layer in range(model.num_layers)]
    modules, key = train.recompute_modules or (), "train.recompute_modules"
    if "mlp" in modules and not any(model.has_dense(layer) for layer in range(model.num_layers)):
        yield f"{key} names mlp, but every layer of the model has experts; name moe in its place"
    for name in sorted({"moe", "shared_experts"} & set(modules)):
        if not any(layers):
            yield f"{key} names {name}, but the model has no experts; remove it"
        elif name == "shared_experts" and model.experts is not None and not model.experts.shared_ffn_hidden_size:
            yield f"{key} names shared_experts, but model.experts.shared_ffn_hidden_size=0; remove it"
    if train.recompute_layers is not None and any(layers):
        yield (
            f"train.recompute_layers={train.recompute_layers} cannot be combined with model.experts: megatron-core "
            "passes no padding mask to layers that are not recomputed, so their routers would count padding; remove "
            "it, or set train.recompute=selective with recompute_modules=[core_attn, moe]"
        )


def compiled(train: TrainSection, dropout_keys: Sequence[str]) -> Iterator[str]:
    """Checks that compiled layers would compute the same as uncompiled ones."""
    key = f"train.compile={train.compile}"
    if train.compile in COMPILED and train.offload_layers is not None:
        yield (
            f"{key} cannot be combined with train.offload_layers, since graphs hide the activations to offload; turn "
            "one of the two off"
        )
    if train.compile != "layers":  # regions draw no random numbers and wait for no parameters
        return
    for name in dropout_keys:
        if name != "model.attention_dropout":  # attention dropout stays outside the graphs
            yield (
                f"{key} cannot be combined with {name}, since a compiled layer draws other numbers; turn one of the "
                "two off"
            )
    if train.overlap_param_gather:
        yield (
            f"{key} cannot be combined with train.overlap_param_gather=true, which waits for parameters inside a "
            "layer; turn one of the two off"
        )


def deterministic(train: TrainSection, model: ModelSection) -> Iterator[str]:
    """Checks that no option in use may add in a different order the next time."""
    if not train.deterministic:
        return
    key = "train.deterministic=true"
    if train.compile in COMPILED:
        yield (
            f"{key} cannot be combined with train.compile={train.compile}, since torch may choose kernels by timing "
            "them; turn one of the two off"
        )
    if model.megatron.get("deterministic_mode") is False:
        yield f"{key} sets model.megatron.deterministic_mode, which is false here; remove it"


def multi_token(model: ModelSection, loss: LossSection, data: AnyData) -> Iterator[str]:
    """Checks that each depth has its own term and a token to predict."""
    if model.mtp_depths == 0:
        return
    if loss.denominator == "measured":
        yield (
            f"model.mtp_depths={model.mtp_depths} adds terms that are scaled before the backward pass, but "
            "loss.denominator=measured is known only after the forward pass; set it to planned, or model.mtp_depths "
            "to 0"
        )
    if model.mtp_depths >= data.seq_length:
        yield (
            f"model.mtp_depths={model.mtp_depths} must be below data.seq_length={data.seq_length}, since a row has no "
            "token further ahead; lower one or raise the other"
        )


def preferences(config: Sections) -> Iterator[str]:
    """Checks that preference losses get answers to compare, and the same model in both passes of a step."""
    loss, data, name = config.loss, config.data, f"loss.function={config.loss.function}"
    if isinstance(data, SftSection) and loss.function in LOSS_FUNCTIONS:
        available, needed = PREFERENCE_FORMATS.get(data.format), compared(loss, data)
        if loss.preference is None and available is not None:
            yield (
                f"data.format={data.format} is for losses that compare answers, but {name} does not; set loss.function "
                f"to {' or '.join(_functions_of(available))}, or another data.format"
            )
        elif loss.preference is not None and data.format != "auto" and available != needed:
            yield f"{name} compares {needed}, but data.format={data.format} has none; set it to auto"
    if compared(loss, data) is None:
        if loss.reference is not None:
            yield (f"loss.reference={loss.reference} is for comparing answers, but {name} compares none; remove it")
        return
    if loss.reference is not None and config.model.hf is None and config.checkpoint.initialize_from is None:
        yield (
            f"loss.reference={loss.reference} is given, but the run begins from random weights; name the model to "
            "finetune by model.hf or checkpoint.initialize_from"
        )
    if isinstance(data, SftSection) and data.too_long == "split":
        yield f"data.too_long=split makes pieces that cannot be compared under {name}; set it to end, start or drop"
    if data.extras:
        yield (
            f"data.extras={list(data.extras)} belong to the tokens of one answer, but {name} compares several answers; "
            "remove data.extras"
        )
    for key in config.dropout_keys:
        yield (f"{key} is above 0, but {name} runs the model twice per step, and both passes must agree; set it to 0")
    if config.model.mtp_depths:
        yield (
            f"model.mtp_depths={config.model.mtp_depths} would learn to predict rejected answers under {name}; set it "
            "to 0"
        )
    if data.packing is not None and data.packing.batch == "rows":
        yield (
            f"data.packing.batch=rows divides samples into steps by rows, which could split a pair, but {name} "
            "compares whole pairs; set it to sequences"
        )


def heads(config: Sections) -> Iterator[str]:
    """Checks that a head has a loss that reads it, and that nothing else needs predicted tokens."""
    loss, head, name = config.loss, config.model.head, f"loss.function={config.loss.function}"
    if head is None:
        if loss.function in HEAD_LOSSES:
            needed = "the number of classes" if loss.function == "classification" else "1"
            yield f"{name} needs a head, but model.num_labels is not set; set it to {needed}"
        return
    key, labels = str(head), head.rows
    if loss.function in LOSS_FUNCTIONS and loss.function not in HEAD_LOSSES:
        yield (
            f"{key} is a head, which predicts no tokens, but {name} does; set loss.function to "
            f"{' or '.join(sorted(HEAD_LOSSES))}, or remove model.num_labels"
        )
    if compared(loss, config.data) is not None and labels != 1:
        yield f"{key}, but {name} compares one number of each answer; set model.num_labels to 1"
    elif compared(loss, config.data) == "answers":
        yield f"{key} judges pairs, but data.format=unpaired_preference has single answers; set it to preference"
    elif loss.function in NUMBER_LOSSES and labels != 1:
        yield f"{key}, but {name} compares one number of each sequence; set model.num_labels to 1"
    elif loss.function == "classification" and labels == 1:
        yield f"{key} is one class, which every sequence would have; set it to their number"
    if loss.side_terms or loss.teacher is not None:
        yield f"loss.side_terms and loss.teacher need predicted tokens, but {key} predicts none; remove them"
    if config.eval.has_prompts or config.eval.tasks:
        yield f"eval.prompts and eval.tasks need predicted tokens, but {key} predicts none; remove them"
    if isinstance(config.data, SftSection) and config.data.too_long == "split":
        yield f"data.too_long=split would judge parts of a sequence under {key}; set it to end, start or drop"
    if isinstance(config.data, FilesSection) and not isinstance(config.data, SftSection):
        yield f"{key} judges sequences of records, but data.kind={config.data.kind} has none; set data.kind=sft"


def images(config: Sections) -> Iterator[str]:
    """Checks that no unsupported feature is combined with a vision tower."""
    vision, train = config.model.vision, config.train
    if vision is None:
        return
    unable = {
        "layout.shard=weights": config.layout.shard == "weights",
        f"train.compile={train.compile}": train.compile in COMPILED,
        f"train.fp8={train.fp8}": train.fp8 is not None,
        f"train.offload_layers={train.offload_layers}": train.offload_layers is not None,
        "train.overlap_param_gather=true": train.overlap_param_gather,
        "loss.teacher": config.loss.teacher is not None,
        f"loss.function={config.loss.function}": compared(config.loss, config.data) is not None,
        "eval.prompts": config.eval.has_prompts,
        "model.backend=te": config.model.backend == "te",
    }
    for name in (name for name, holds in unable.items() if holds):
        yield f"{name} cannot be combined with model.vision; remove one of them"
    if vision.deepstack:
        yield from _deepstack(len(vision.deepstack), config)
    if vision.freeze_language_model:
        yield from _frozen_language_model(vision, config)
    if config.adapter is not None and not vision.is_frozen:
        yield (
            "adapter trains the language model only, but model.vision.freeze_tower=false or freeze_projector=false "
            "trains the tower; set both to true, or remove adapter"
        )
    if config.optimizer.kind == "muon" and not vision.is_frozen:
        yield (
            "optimizer.kind=muon updates matrices of the language model, but model.vision.freeze_tower=false or "
            "freeze_projector=false trains the tower; set both to true, or use optimizer.kind=adamw"
        )


def _frozen_language_model(vision: VisionSection, config: Sections) -> Iterator[str]:
    """Checks that something is trained besides a frozen language model, and that nothing moves a part of it."""
    key = "model.vision.freeze_language_model=true"
    if vision.is_frozen and config.adapter is None:
        yield (
            f"{key} leaves nothing to train, since the tower and the projector are frozen as well; set "
            "model.vision.freeze_projector=false or freeze_tower=false, or add an adapter"
        )
    if config.adapter is not None and config.adapter.modules_to_save:
        yield (
            f"adapter.modules_to_save={list(config.adapter.modules_to_save)} trains parts of the language model, but "
            f"{key}; remove one of them"
        )
    experts = config.model.experts
    # adapters refuse it as well
    if config.adapter is None and experts is not None and experts.bias_update_rate > 0:
        yield (
            f"model.experts.bias_update_rate={experts.bias_update_rate} moves a part of the language model, but {key}; "
            "set bias_update_rate to 0"
        )


def _deepstack(num_deep: int, config: Sections) -> Iterator[str]:
    """Checks that the first pipeline stage has the layers after which features are added."""
    model, layout, train = config.model, config.layout, config.train
    if layout.stage_layers is not None:
        first = layout.stage_layers[0]
    elif layout.first_stage_layers is not None:
        first = layout.first_stage_layers
    else:
        first = model.num_layers // (layout.pp * layout.vpp)
    if first < num_deep:
        yield (
            f"model.vision.deepstack adds features after the first {num_deep} layers, but the first pipeline stage has "
            f"{first}; lower layout.pp or layout.vpp, or set layout.first_stage_layers"
        )
    if train.recompute == "full":
        yield (
            "train.recompute=full cannot be combined with model.vision.deepstack, whose features are added between "
            "layers; use selective"
        )


def replayed_choices(model: ModelSection, data: AnyData) -> Iterator[str]:
    """Checks that the routed experts in records match the model's layers, and that routers can use them."""
    sizes = dict(map(key_and_sizes, data.extras)).get(ROUTED_EXPERTS)
    if sizes is None:
        return
    key, experts = f"data.extras names {ROUTED_EXPERTS}", model.experts
    if experts is None:
        yield f"{key}, but the model has no experts (model.experts); remove it"
        return
    if sizes != (model.num_layers, experts.top_k):
        entry = f"{ROUTED_EXPERTS}:{'x'.join(map(str, sizes))}" if sizes else ROUTED_EXPERTS
        yield (
            f"data.extras names {entry}, but model.num_layers={model.num_layers} (including dense ones) and "
            f"model.experts.top_k={experts.top_k}; write {ROUTED_EXPERTS}:{model.num_layers}x{experts.top_k}"
        )
    if experts.capacity_factor is not None:
        yield (
            f"{key}, but model.experts.capacity_factor={experts.capacity_factor} drops tokens, so that a choice cannot "
            "be replayed; set capacity_factor=null, or remove it"
        )
    if model.head is not None:
        yield f"{key}, but records with a label for {model.head} have no extras; remove it"


def _functions_of(compares: Literal["pairs", "answers"]) -> list[str]:
    return [name for name, form in PREFERENCE_LOSSES.items() if form.compares == compares]


def layout_dependent(model: ModelSection, loss: LossSection) -> Iterator[str]:
    """Checks that layout-dependent keys are permitted."""
    if loss.allow_layout_dependent:
        return
    for key in layout_dependent_keys(model, loss):
        yield (
            f"{key} is set, but its effect depends on the layout by definition; remove it (see "
            "loss.router.sequence_balance_coefficient and model.experts.bias_update_rate), or set "
            "loss.allow_layout_dependent=true and give up the promise"
        )


def router_losses(model: ModelSection, loss: LossSection) -> Iterator[str]:
    """Checks that router losses have routers."""
    enabled = [name for name, value in loss.router.model_dump().items() if value > 0]
    if enabled and model.experts is None:
        yield f"loss.router.{enabled[0]} is set, but the model has no experts; remove it or set model.experts"


def products_in_8_bits(config: Sections) -> Iterator[str]:
    """Checks sizes and options of `train.fp8`."""
    train = config.train
    if train.fp8 is None:
        if train.fp8_recipe is not None:
            yield (
                f"train.fp8_recipe={train.fp8_recipe} scales products in fp8, but train.fp8 is not set; set it to "
                "hybrid or e4m3"
            )
        return
    key = f"train.fp8={train.fp8}"
    if train.fp8_recipe == "delayed":
        yield (
            "train.fp8_recipe=delayed scales by the largest elements of earlier steps, which checkpoints do not "
            "contain, so a resumed run would differ; set it to tensorwise, blockwise or mxfp8"
        )
    yield from _own_products_in_8_bits(config, key) if config.has_own_fp8 else _its_products_in_8_bits(train, key)
    yield from _unaligned(config, key)


def _its_products_in_8_bits(train: TrainSection, key: str) -> Iterator[str]:
    """Checks options that TransformerEngine's layers cannot follow in 8 bits."""
    if train.fp8_recipe == "rowwise":
        yield (
            "train.fp8_recipe=rowwise is of our own layers; set model.backend=torch, or choose tensorwise, blockwise "
            "or mxfp8"
        )
    if train.device == "cpu":
        yield f"{key} needs a GPU, but train.device=cpu; set train.device=cuda, or remove train.fp8"
    if train.precision != "bf16":
        yield f"{key} computes everything but products in bf16, but train.precision={train.precision}; set it to bf16"
    left_out = {"compile": train.compile in COMPILED, "offload_layers": train.offload_layers is not None}
    for name in (name for name, holds in left_out.items() if holds):
        yield (
            f"{key} needs TransformerEngine's layers, which train.{name}={getattr(train, name)} excludes; remove one "
            "of the two"
        )


def _own_products_in_8_bits(config: Sections, key: str) -> Iterator[str]:
    """Checks options that our own layers cannot follow in 8 bits."""
    train, model = config.train, config.model
    if train.fp8_recipe in ("tensorwise", "mxfp8"):
        yield (
            f"train.fp8_recipe={train.fp8_recipe} needs TransformerEngine's layers, but model.backend=torch; choose "
            "rowwise or blockwise, whose scales no layout changes, or set model.backend=auto"
        )
    unable = {
        "train.precision=fp16": train.precision == "fp16",
        "train.compile=layers": train.compile == "layers",
        "adapter": config.adapter is not None,
        "model.delta_net": model.delta_net is not None,
        "model.layer_pattern": model.layer_pattern is not None,
        "model.global_attention": model.global_attention is not None,
    }
    for name in (name for name, holds in unable.items() if holds):
        yield f"{key} in our own layers (model.backend=torch) cannot be combined with {name}; remove one of the two"


def _unaligned(config: Sections, key: str) -> Iterator[str]:
    """Yields a message for each size on a rank that an 8-bit product does not support."""
    model, layout, train = config.model, config.layout, config.train
    columns, rows = _multiples(config.fp8_recipe)
    sizes = {
        "model.hidden_size": model.hidden_size,
        **sizes_of_attention(model, layout.tp),
        "model.ffn_hidden_size / layout.tp": model.ffn_hidden_size // layout.tp,
    }
    if model.experts is not None:
        if not config.has_own_fp8:  # ours multiply routed experts in the run's precision
            sizes["model.experts.ffn_hidden_size / layout.etp"] = model.experts.ffn_hidden_size // layout.etp
        sizes["model.experts.shared_ffn_hidden_size / layout.tp"] = model.experts.shared_ffn_hidden_size // layout.tp
    for name, size in sizes.items():
        if size % columns:
            yield (
                f"{key} needs {name}={size} to be a multiple of {columns}, as its kernels require; change it, "
                "or remove train.fp8"
            )
    tokens = train.micro_batch_size * config.row_width // layout.cp
    if tokens % rows and not config.has_own_fp8:  # ours add rows of zeros
        yield (
            f"{key} needs a multiple of {rows} tokens in a rank's microbatch, but train.micro_batch_size x row width / "
            f"layout.cp={tokens}; change one of them, or remove train.fp8"
        )


def _multiples(recipe: Fp8Recipe) -> tuple[int, int]:
    """Returns the numbers that columns and tokens must be multiples of.

    Source: TransformerEngine 2.9, assert_dim_for_fp8_exec and the block sizes of its recipes.
    """
    match recipe:
        case "delayed" | "tensorwise" | "rowwise":
            return 16, 8
        case "mxfp8":
            return 32, 32
        case "blockwise":
            return 128, 128
        case _:
            assert_never(recipe)
