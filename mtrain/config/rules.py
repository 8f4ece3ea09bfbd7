"""Rules between sections for any world size; `mtrain/arch/layout.py` has the rules that depend on it.

Each function yields a message for every broken rule: what was given, what is needed, what to change.
"""

from collections.abc import Iterator, Sequence
from typing import Literal

from mtrain.base.spelling import counted
from mtrain.config.derived import PREFERENCE_FORMATS, compared, layout_dependent_keys, row_width
from mtrain.config.extras import ROUTED_EXPERTS, key_and_sizes
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
from mtrain.config.schema.train import COMPILED, EvalSection, OptimizerSection, TrainSection, ValidSection


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
            f"layout.first_stage_layers={layout.first_stage_layers} and "
            f"layout.last_stage_layers={layout.last_stage_layers} leave {middle_layers} of "
            f"model.num_layers={counted(model.num_layers, 'layer')} for the other {num_middle} of the {stages}, which "
            "does not divide evenly; change them or use layout.stage_layers"
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
