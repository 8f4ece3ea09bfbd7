"""Translation of arguments of Megatron-LM's `pretrain_gpt.py`, listed in tables/megatron_lm.toml."""

import math
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from mtrain.base.spelling import counted
from mtrain.config.foreign.megatron_arguments import TABLE, Arguments, read_arguments
from mtrain.config.foreign.sharding import put_shard
from mtrain.config.foreign.trainers import BALANCE, permit_layout_dependent, recomputed_modules
from mtrain.config.foreign.translation import Translation
from mtrain.config.foreign.values import scalar, shares, stages_of

_ROPE = ("rope", "yarn")
_KNOWN_BY_THEIR_FILES = {"HuggingFaceTokenizer", "SentencePieceTokenizer", "Llama2Tokenizer", "NullTokenizer"}


def from_megatron_lm(arguments: Sequence[str]) -> Translation:
    """Translates arguments of Megatron-LM; `Translation.checked` checks the result.

    Args:
        arguments: Arguments as a shell passes them; a launcher before them, such as `torchrun ... pretrain_gpt.py`, is
            skipped.
    """
    config = Translation("Megatron-LM")
    run = read_arguments(config, arguments)
    for put in (_simple, _model, _rope, _experts, _layout, _steps, _schedule, _precision, _sharding, _recomputation):
        put(run)
    _data(run)
    _paths(run)
    if not run.is_given("calculate-per-token-loss"):
        config.notes.append(
            "Megatron-LM averages the means of microbatches and data-parallel ranks unless it has "
            "--calculate-per-token-loss; loss.aggregation=token-mean is the mean over all tokens, on any layout"
        )
    run.report_unread()
    return config


def _simple(run: Arguments) -> None:
    if run.number("cpu-offloading-num-layers", 0):
        run.put("cpu-offloading-num-layers", "train.offload_layers")
    run.put_all("rows")
    for name, key in TABLE["switches"].items():
        run.switch(name, key)
    if run.number("tensor-model-parallel-size", 1) == 1:
        run.config.drop("layout.sp")  # Megatron-LM then ignores it


def _model(run: Arguments) -> None:
    hidden, gated = run.number("hidden-size"), run.is_given("swiglu")
    ffn = None
    if hidden is not None:
        ffn = int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden
    run.put("ffn-hidden-size", "model.ffn_hidden_size", ffn)
    if run.is_given("group-query-attention"):
        run.put("num-query-groups", "model.num_query_groups", 1)
    run.put_value("model.norm", str(run.value("normalization", "LayerNorm")).lower(), "normalization")
    _activation(run, gated)
    tied = not run.is_given("untie-embeddings-and-output-weights")
    run.put_value("model.tied_embeddings", tied, "untie-embeddings-and-output-weights")
    if run.value("softmax-type", "vanilla") == "learnable":
        run.put_value("model.attention_sinks", True, "softmax-type")
    elif run.value("softmax-type", "vanilla") != "vanilla":
        run.lost("softmax-type", "attention has a plain softmax or learned sinks here")
    _window(run)
    _attention(run)
    if run.value("transformer-impl") == "local":
        run.put_value("model.backend", "torch", "transformer-impl")
    run.put("mtp-loss-scaling-factor", "loss.mtp_coefficient")


def _activation(run: Arguments, gated: bool) -> None:
    bias, fused = "disable-bias-linear", "no-bias-gelu-fusion"
    has_bias, is_unfused, is_tanh = not run.is_given(bias), run.is_given(fused), run.is_given("openai-gelu")
    run.put_value("model.linear_bias", has_bias, bias)
    if gated:
        run.put_value("model.activation", "swiglu", "swiglu")
    elif is_tanh:
        run.put_value("model.activation", "gelu_tanh", "openai-gelu")
    elif has_bias and not is_unfused:  # Megatron-LM's fused kernel of bias and GELU
        run.put_value("model.activation", "gelu_tanh", fused)
    else:
        run.put_value("model.activation", "gelu", *(name for name in (bias, fused) if run.is_given(name)))
    used = run.config.origins["model.activation"]
    run.unused(*(name for name in ("openai-gelu", fused) if f"--{name}" not in used))


def _attention(run: Arguments) -> None:
    if run.is_given("multi-latent-attention"):
        run.put_all("latent_attention")
        run.config.drop("model.head_dim")  # latent attention has its own sizes in Megatron-LM
        if run.is_given("qk-layernorm"):
            run.config.origins["model.mla.kv_lora_rank"] += "; --qk-layernorm normalises latents, as always here"
            run.config.content["model"].pop("qk_norm")
            run.config.origins.pop("model.qk_norm")
        else:
            run.config.lost.append(
                "--multi-latent-attention without --qk-layernorm: Megatron-LM then does not normalise latents, but "
                "they are always normalised here"
            )
    kind = run.value("experimental-attention-variant")
    if kind in ("gdn", "gated_delta_net"):
        run.put_all("delta_net")
    elif kind is not None:
        run.lost("experimental-attention-variant", "only gated_delta_net (gdn) is supported here")


def _window(run: Arguments) -> None:
    text = run.text("window-size")
    sides = re.fullmatch(r"\(?\s*(-?\d+)\s*,\s*(-?\d+)\s*\)?", text or "")
    if text is None:
        return
    if sides is None or int(sides[2]) != 0 or int(sides[1]) < 0:
        run.lost("window-size", "a window here has tokens to the left and 0 to the right, as in 4096,0")
        return
    run.config.put("model.sliding_window", int(sides[1]) + 1, "--window-size, and the token itself")
    every = run.value("window-attn-skip-freq")
    if isinstance(every, int):
        run.put("window-attn-skip-freq", "model.global_attention_every")
    elif every is not None:
        run.lost("window-attn-skip-freq", "model.global_attention_every is a number")


def _rope(run: Arguments) -> None:
    kind = run.value("position-embedding-type", "learned_absolute")
    if run.is_given("use-rotary-position-embeddings"):
        run.unused(*(["use-rotary-position-embeddings"] if kind == "rope" else []))
        kind = "rope"
    is_rotary = kind in _ROPE or run.is_given("multi-latent-attention")
    if is_rotary:
        run.unused("max-position-embeddings")
    else:
        run.lost("max-position-embeddings", "no table of positions exists here")
        run.config.lost.append(f"{run.origin('position-embedding-type')}, {kind}: positions are rotary here")
    run.put_all("rope")
    is_latent = run.is_given("multi-latent-attention")
    if run.is_given("use-rope-scaling"):
        run.put_value("model.rope.scaling", "llama3", "use-rope-scaling")
        run.put("rope-scaling-factor", "model.rope.factor", 8.0)
    elif run.is_given("rotary-seq-len-interpolation-factor"):
        run.put_value("model.rope.scaling", "linear", "rotary-seq-len-interpolation-factor")
        run.put("rotary-seq-len-interpolation-factor", "model.rope.factor")
    elif kind == "yarn" or (is_latent and run.value("rotary-scaling-factor", 1.0) != 1.0):
        _yarn(run, is_latent)


def _yarn(run: Arguments, is_latent: bool) -> None:
    run.put_value("model.rope.scaling", "yarn", "rotary-scaling-factor" if is_latent else "position-embedding-type")
    run.put("rotary-scaling-factor", "model.rope.factor", 1.0)
    if is_latent:
        run.config.put("model.rope.original_max_positions", 4096, "Megatron-LM's default in latent attention")
    else:
        run.put_all("yarn")
    scale, whole = run.value("mscale", 1.0), run.value("mscale-all-dim", 0.0)
    factor = run.value("rotary-scaling-factor", 1.0)
    if not all(isinstance(number, int | float) for number in (scale, whole, factor)):
        run.refuse("--mscale, --mscale-all-dim and --rotary-scaling-factor need numbers; fix them")
    elif whole:
        run.put("mscale", "model.rope.mscale", 1.0)
        run.put("mscale-all-dim", "model.rope.mscale_all_dim")
    elif scale != 1:
        factor = 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0
        run.put_value("model.rope.attention_factor", factor, "mscale")
    else:
        run.unused("mscale")


def _experts(run: Arguments) -> None:
    if not run.is_given("num-experts"):
        return
    run.put_all("experts")
    put, ffn = run.put_value, run.config.get("model.ffn_hidden_size")
    run.put("moe-ffn-hidden-size", "model.experts.ffn_hidden_size", ffn)
    run.switch("moe-shared-expert-gate", "model.experts.shared_gate")
    run.switch("moe-router-pre-softmax", "model.experts.pre_softmax")
    if run.is_given("moe-router-enable-expert-bias"):
        put("model.experts.expert_bias", True, "moe-router-enable-expert-bias")
        run.put("moe-router-bias-update-rate", "model.experts.bias_update_rate", 1e-3)
    dispatcher = run.value("moe-token-dispatcher-type", "allgather")
    name = "alltoall" if dispatcher == "flex" else dispatcher
    put("model.experts.dispatcher", name, "moe-token-dispatcher-type")
    _layers_with_experts(run)
    _balance(run)
    permit_layout_dependent(run.config)


def _layers_with_experts(run: Arguments) -> None:
    text = run.text("moe-layer-freq")
    pattern = re.fullmatch(r"\(?\[0\]\s*\*\s*(\d+)\s*\+\s*\[1\]\s*\*\s*\d+\)?", (text or "").replace(" ", ""))
    if text is not None and text.isdigit():
        run.put("moe-layer-freq", "model.experts.every")
    elif pattern is not None:
        run.config.put("model.experts.first_dense_layers", int(pattern[1]), "--moe-layer-freq")
    elif text is not None:
        run.lost("moe-layer-freq", "layers with experts are every n-th layer, or all layers after the first n here")


def _balance(run: Arguments) -> None:
    kinds = run.values("moe-router-load-balancing-type") or ["aux_loss"]
    coefficients = [scalar(text) for text in run.values("moe-aux-loss-coeff") or []]
    if not all(isinstance(number, int | float) for number in coefficients):
        run.refuse(f"--moe-aux-loss-coeff {' '.join(map(str, coefficients))}: numbers are needed; fix it")
        return
    if len(coefficients) > len(kinds) or any(kind not in BALANCE for kind, _ in zip(kinds, coefficients)):
        run.lost("moe-aux-loss-coeff", f"each coefficient belongs to one of {', '.join(BALANCE)}")
    for kind, coefficient in zip(kinds, coefficients):
        if kind in BALANCE and coefficient:
            run.config.put(BALANCE[kind], coefficient, f"--moe-aux-loss-coeff of {kind}")
    if any(kind not in (*BALANCE, "none") for kind in kinds):
        run.lost("moe-router-load-balancing-type", f"only {', '.join(BALANCE)} and none are translated")


def _layout(run: Arguments) -> None:
    put, tp = run.put_value, run.degree("tensor-model-parallel-size")
    if run.is_given("num-experts") and (tp > 1 or run.is_given("expert-tensor-parallel-size")):
        run.put("expert-tensor-parallel-size", "layout.etp", tp)
    layers, per_stage = run.number("num-layers"), "num-layers-per-virtual-pipeline-stage"
    if run.is_given(per_stage) and layers is not None:
        stages = layers // run.degree("pipeline-model-parallel-size")
        num_layers = run.number(per_stage)
        put("layout.vpp", stages // num_layers if num_layers else 0, per_stage)
        run.lost("num-virtual-stages-per-pipeline-rank", "the layers of a stage are also given; keep one")
    if (text := run.text("pipeline-model-parallel-layout")) is not None:
        _stages(run, text)
    if run.degree("context-parallel-size") > 1 and run.is_given("cp-comm-type"):
        ways = {"p2p": "ring", "all_gather": "allgather", "a2a": "ulysses"}
        kinds = set(run.values("cp-comm-type") or [])
        if len(kinds) == 1 and kinds <= ways.keys():
            put("layout.cp_comm", ways[kinds.pop()], "cp-comm-type")
        else:
            run.lost("cp-comm-type", f"only one of {', '.join(ways)}, for all layers, is translated")


def _steps(run: Arguments) -> None:
    size = run.number("global-batch-size")
    if run.is_given("train-samples"):
        run.lost("train-iters", "--train-samples is also given; keep one")
    for name, key in (
        ("train-samples", "train.num_steps"),
        ("lr-decay-samples", "optimizer.decay_steps"),
        ("lr-warmup-samples", "optimizer.warmup_steps"),
    ):
        samples = run.number(name)
        if samples is not None and size:
            run.config.put(key, -(-samples // size), f"--{name} / --global-batch-size")
        elif samples is not None:
            run.lost(name, f"{key} counts steps; also give --global-batch-size")


def _schedule(run: Arguments) -> None:
    put, style = run.put_value, str(run.value("lr-decay-style", "linear"))
    known = {"constant": "constant", "linear": "linear", "cosine": "cosine", "WSD": "wsd"}
    if style in known:
        put("optimizer.schedule", known[style], "lr-decay-style")
    else:
        run.lost("lr-decay-style", f"only {', '.join(known)} are translated")
    if style == "WSD":
        run.config.content["optimizer"].pop("decay_steps", None)  # here wsd always decays until the end of the run
        samples, size = run.number("lr-wsd-decay-samples"), run.number("global-batch-size")
        run.put("lr-wsd-decay-iters", "optimizer.decay_steps")
        if samples is not None and size:
            put("optimizer.decay_steps", -(-samples // size), "lr-wsd-decay-samples", "global-batch-size")
        if (fall := run.value("lr-wsd-decay-style", "exponential")) != "linear":
            run.config.lost.append(f"{run.origin('lr-wsd-decay-style')}, {fall}: wsd falls linearly here")
    fraction = run.value("lr-warmup-fraction")
    if fraction is not None and not isinstance(fraction, int | float):
        run.refuse(f"--lr-warmup-fraction {fraction}: a number is needed; fix it")
    elif fraction is not None:
        steps = run.config.content["optimizer"].get("decay_steps") if style != "WSD" else None
        if steps is None:
            put("optimizer.warmup_ratio", fraction, "lr-warmup-fraction")
        else:
            put("optimizer.warmup_steps", math.ceil(Fraction(str(fraction)) * steps), "lr-warmup-fraction")
    kind = run.value("optimizer", "adam")
    if kind != "adam":
        run.lost("optimizer", "only adam, which is AdamW, is translated; optimizer.kind=muon has its own keys")


def _precision(run: Arguments) -> None:
    put = run.put_value
    kinds = [name for name in ("bf16", "fp16") if run.is_given(name)]
    chosen = kinds[0] if kinds else "fp32"
    if len(kinds) > 1:
        run.refuse("--bf16 and --fp16 exclude each other; keep one")
    put("train.precision", chosen, "bf16", "fp16")
    if chosen == "fp16":
        run.put("initial-loss-scale", "train.initial_loss_scale", 2.0**32)
    run.put("fp8-format", "train.fp8")
    if run.is_given("fp8-format") and run.value("fp8-recipe", "delayed") == "delayed":
        run.config.lost.append(f"{run.origin('fp8-recipe')}, delayed: checkpoints here do not contain its scales")
    elif run.is_given("fp8-format"):
        run.put("fp8-recipe", "train.fp8_recipe")
    minutes = run.number("distributed-timeout-minutes", 10)
    put("train.process_group_timeout_s", 60 * (minutes or 0), "distributed-timeout-minutes")


def _sharding(run: Arguments) -> None:
    """Sets what data-parallel ranks divide; those of FSDP need no distributed optimizer in addition."""
    names = ("use-torch-fsdp2", "use-megatron-fsdp", "data-parallel-sharding-strategy")
    is_whole = run.is_given(names[0])
    if run.is_given(names[1]):
        is_whole |= run.value(names[2], "no_shard") == "optim_grads_params"
    if is_whole:
        put_shard(run.config, run.origin(*names), is_whole=True)
    usual = ("use-distributed-optimizer", *(names if run.is_given(names[1]) else ()))
    run.put_value("train.distributed_optimizer", is_whole or run.is_given(usual[0]), *usual)


def _recomputation(run: Arguments) -> None:
    put, kind = run.put_value, run.value("recompute-granularity")
    if run.is_given("recompute-activations"):
        run.lost("recompute-granularity", "--recompute-activations, which is also given, means selective")
        kind = "selective"
    put("train.recompute", kind, "recompute-activations", "recompute-granularity")
    if kind == "full" and run.value("recompute-method") == "block":
        run.put("recompute-num-layers", "train.recompute_layers")
    elif kind == "full":  # the number of layers per checkpoint, which only affects memory
        run.unused("recompute-num-layers")
    modules = run.values("recompute-modules") if kind == "selective" else None
    if modules is not None:
        recomputed_modules(run.config, modules, "--recompute-modules")


def _stages(run: Arguments, text: str) -> None:
    """Sets the layers of each stage of a layout such as `Ett|(tt|)*6ttL`."""
    name = "pipeline-model-parallel-layout"
    counts, ranks = stages_of(text), run.degree("pipeline-model-parallel-size")
    if counts is None or len(counts) % ranks:
        run.refuse(
            f"--{name} {text}: layout.stage_layers is the number of layers of each stage, at least one, with the "
            "embedding in the first and the rest in the last, and their number is a multiple of "
            f"{counted(ranks, 'rank')}; divide the layers so"
        )
        return
    run.put_value("layout.stage_layers", counts, name)
    run.put_value("layout.vpp", len(counts) // ranks, name)


def _data(run: Arguments) -> None:
    put, sources = run.put_value, run.config.content.setdefault("data", {})
    if run.value("tokenizer-type") in _KNOWN_BY_THEIR_FILES:
        run.unused("tokenizer-type")
    else:
        run.lost("tokenizer-type", "data.tokenizer is a sentencepiece .model, a tokenizer.json or a folder with one")
    if run.is_given("mock-data"):
        put("data.kind", "mock", "mock-data")
        return
    put("data.kind", "sft" if run.is_given("sft") else "indexed", "sft")
    names = {"data-path": "train", "train-data-path": "train", "valid-data-path": "valid", "test-data-path": "test"}
    if run.is_given("train-data-path"):
        run.lost("data-path", "--train-data-path is also given; keep one")
    for name, part in names.items():
        if run.is_given(name):
            put(f"data.{part}", _blend(run.values(name) or []), name)
    if run.is_given("data-path") and not sources.get("valid"):
        text = run.text("split") or "969,30,1"
        try:
            put("data.split", shares(text), "split")
        except (ValueError, ArithmeticError):
            run.refuse(f"--split {text}: three numbers separated by commas are needed; fix it")
    reset = [run.is_given(f"reset-{name}") for name in ("position-ids", "attention-mask")]
    if run.is_given("sft"):
        run.unused("reset-position-ids", "reset-attention-mask")  # its samples are separate anyway
    elif all(reset):
        put("data.isolate_documents", True, "reset-position-ids", "reset-attention-mask")
    elif any(reset):
        run.config.lost.append(
            "only one of --reset-position-ids and --reset-attention-mask: data.isolate_documents does both"
        )
    if run.is_given("perform-rl-step"):
        run.refuse("--perform-rl-step: rollouts need a loop in Python; see docs/training/rl.md")
    _validation(run, sources)


def _validation(run: Arguments, data: Mapping[str, Any]) -> None:
    count, size = run.number("eval-iters", 100), run.number("global-batch-size")
    if not (data.get("valid") or data.get("split", [0, 0])[1]):
        run.unused("eval-interval", "eval-iters")
        return
    if count == 0:
        run.put("eval-iters", "valid.interval_steps")
        run.values("eval-interval")  # read, without effect
        return
    run.put("eval-interval", "valid.interval_steps", 1000)
    if size is None:
        text = " ".join(run.values("eval-iters") or [])
        run.config.lost.append(f"--eval-iters {text}: valid.max_samples counts samples; also give --global-batch-size")
    else:
        run.put_value("valid.max_samples", (count or 0) * size, "eval-iters")


def _paths(run: Arguments) -> None:
    put, load = run.put_value, run.text("load")
    other = load if load != run.text("save") else None
    origin = run.text("pretrained-checkpoint") or other
    if other != origin and other is not None:
        run.lost("load", "a run starts from --pretrained-checkpoint and resumes from its own folder")
    put("checkpoint.initialize_from", origin, "pretrained-checkpoint", "load")
    if origin is not None and not run.is_given("finetune"):
        run.config.notes.append(
            f"a run resumes from its own folder; {origin} only gives the weights, without optimizer and step"
        )
    name = "persistent-save-interval" if run.is_given("persistent-save-interval") else "save-interval"
    run.put(name, "checkpoint.interval_steps")
    if run.is_given(name) and not run.is_given("save-retain-interval"):
        run.put(name, "checkpoint.keep_every_steps")
        run.config.origins["checkpoint.keep_every_steps"] = "Megatron-LM keeps every checkpoint"
    put("checkpoint.async_save", run.is_given("async-save"), "async-save")
    put("metrics.tensorboard", run.is_given("tensorboard-dir"), "tensorboard-dir")
    if run.is_given("wandb-project"):
        put("metrics.trackers", ["wandb"], "wandb-project")
        run.put("wandb-project", "metrics.project")
    if run.is_given("profile"):
        steps = [run.number(f"profile-step-{name}", default) for name, default in (("start", 10), ("end", 12))]
        put("metrics.profile_steps", steps, "profile-step-start", "profile-step-end")
        ranks = [scalar(rank) for rank in run.values("profile-ranks") or []]
        put("metrics.profile_ranks", ranks or None, "profile-ranks")


def _blend(words: Sequence[str]) -> list[dict[str, Any]]:
    """Reads `[WEIGHT PATH]...` or `PATH...`."""
    if len(words) > 1 and len(words) % 2 == 0 and all(isinstance(scalar(word), int | float) for word in words[::2]):
        return [{"path": path, "weight": float(weight)} for weight, path in zip(words[::2], words[1::2])]
    return [{"path": path} for path in words]
