"""Translation of arguments of Megatron-LM's `pretrain_gpt.py`, listed in tables/megatron_lm.toml."""

import math
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from mtrain.base.spelling import meant
from mtrain.config.foreign.command_lines import after_launcher, is_variable, options
from mtrain.config.foreign.sharding import put_shard
from mtrain.config.foreign.trainers import BALANCE, permit_layout_dependent
from mtrain.config.foreign.translation import Translation
from mtrain.config.foreign.values import scalar, shares, stages_of
from mtrain.config.tables import table

_ROPE = ("rope", "yarn")
_KNOWN_BY_THEIR_FILES = {"HuggingFaceTokenizer", "SentencePieceTokenizer", "Llama2Tokenizer", "NullTokenizer"}
_RECOMPUTED = {"core_attn", "mlp", "moe", "shared_experts"}
TABLE = table("megatron_lm")
REFUSED, WITHOUT_EFFECT = frozenset(TABLE["refused"].split()), frozenset(TABLE["without_effect"].split())
FLAGS = frozenset((*TABLE["switches"], *TABLE["flags"].split()))
"""Translated arguments that take no value."""
_SECTIONS = ("rows", "latent_attention", "delta_net", "experts")
TRANSLATED = FLAGS.union(TABLE["read"].split(), *(TABLE[section] for section in _SECTIONS))
_EVERY = TRANSLATED | REFUSED | WITHOUT_EFFECT


def from_megatron_lm(arguments: Sequence[str]) -> Translation:
    """Translates arguments of Megatron-LM; `Translation.checked` checks the result.

    Args:
        arguments: Arguments as a shell passes them; a launcher before them, such as `torchrun ... pretrain_gpt.py`, is
            skipped.
    """
    config = Translation("Megatron-LM")
    arguments_by_name = _read_arguments(config, arguments)
    config.without_effect += [f"--{name}" for name in arguments_by_name if name in WITHOUT_EFFECT]
    config.lost += [
        f"{' '.join([f'--{name}', *arguments_by_name[name]])}: it changes training, and has no equivalent here"
        for name in arguments_by_name
        if name in REFUSED
    ]
    _Megatron(arguments_by_name, config).translate()
    config.given = tuple(f"--{name}" for name in arguments_by_name)
    return config


def _read_arguments(config: Translation, arguments: Sequence[str]) -> dict[str, list[str]]:
    """Returns argument -> its values, empty for flags; reports wrong arguments."""
    by_name, before = options(after_launcher(arguments)[1], str)
    for word in before:
        config.wrong.append(f"{word}: an argument of Megatron-LM begins with --; remove this word")
    for name, values in by_name.items():
        if name not in _EVERY:
            near = meant(name, _EVERY)
            hint = f"did you mean --{near}?" if near else "remove it"
            config.wrong.append(f"--{name} is not an argument of Megatron-LM (August 2026); {hint}")
        if variables := [value for value in values if is_variable(value)]:
            config.wrong.append(f"--{name} {' '.join(variables)}: this is a shell variable; write its value")
        if name in FLAGS and values:
            config.wrong.append(f"--{name} {' '.join(values)}: --{name} takes no value; remove it")
    return by_name


class _Megatron:
    def __init__(self, arguments: Mapping[str, list[str]], config: Translation) -> None:
        self._arguments, self._config = arguments, config
        self._read: set[str] = set()

    def _values(self, name: str) -> list[str] | None:
        self._read.add(name)
        return self._arguments.get(name)

    def _text(self, name: str) -> str | None:
        values = self._values(name)
        if values is None or len(values) == 1:
            return None if values is None else values[0]
        self._refuse(f"--{name} needs one value, but has {len(values)}; fix it")
        return None

    def _refuse(self, line: str) -> None:
        name = line.split()[0]
        if not any(earlier.split()[0] == name for earlier in self._config.wrong):  # one reason for each argument
            self._config.wrong.append(line)

    def _value(self, name: str, default: Any = None) -> Any:
        text = self._text(name)
        return default if text is None else scalar(text)

    def _number(self, name: str, default: int | None = None) -> int | None:
        value = self._value(name, default)
        if value is None or (isinstance(value, int) and not isinstance(value, bool)):
            return value
        self._refuse(f"--{name} needs a whole number, but has {value!r}; fix it")
        return default

    def _degree(self, name: str) -> int:
        """Returns a degree of parallelism; 1 if absent or illegal, which the rules of `layout` then report."""
        degree = self._number(name)
        return 1 if degree is None else max(1, degree)

    def _is_on(self, name: str) -> bool:
        return self._values(name) is not None

    def _origin(self, *names: str) -> str:
        explicit = [f"--{name}" for name in names if name in self._arguments]
        return ", ".join(explicit) if explicit else f"Megatron-LM's default of --{', --'.join(names)}"

    def _put(self, name: str, key: str, default: Any = None) -> None:
        """Sets `key` from an argument, otherwise from Megatron-LM's default, if any."""
        self._put_value(key, self._value(name, default), name)

    def _put_value(self, key: str, value: Any, *names: str) -> None:
        """Sets `key` to a value that follows from arguments, or refuses an illegal value."""
        try:
            self._config.put(key, value, self._origin(*names))
        except (ValueError, ArithmeticError):
            self._refuse(
                f"--{names[0]} {' '.join(self._values(names[0]) or [])} is not a value that Megatron-LM accepts; fix it"
            )

    def _put_all(self, section: str) -> None:
        """Sets the keys of a section of the table."""
        for name, row in TABLE[section].items():
            if isinstance(row, str):
                self._put(name, row)
            else:
                self._put(name, row["to"], row.get("default"))

    def _switch(self, name: str, key: str) -> None:
        if self._is_on(name):
            self._put_value(key, True, name)

    def _unused(self, *names: str) -> None:
        self._config.without_effect += [f"--{name}" for name in names if self._is_on(name)]

    def _lost(self, name: str, why: str) -> None:
        """Reports an argument without an equivalent, if it is given."""
        values = self._values(name)
        if values is not None:
            self._config.lost.append(f"--{name} {' '.join(values)}: {why}")

    def translate(self) -> None:
        """Sets the keys of all arguments and of Megatron-LM's defaults."""
        self._simple()
        self._model()
        self._rope()
        self._experts()
        self._layout()
        self._steps()
        self._schedule()
        self._precision()
        self._sharding()
        self._recomputation()
        self._data()
        self._paths()
        if not self._is_on("calculate-per-token-loss"):
            self._config.notes.append(
                "Megatron-LM averages the means of microbatches and data-parallel ranks unless it has "
                "--calculate-per-token-loss; loss.aggregation=token-mean is the mean over all tokens, on any layout"
            )
        self._config.lost += [
            f"{' '.join([f'--{name}', *values])}: no other argument uses it"
            for name, values in self._arguments.items()
            if name in TRANSLATED and name not in self._read
        ]

    def _simple(self) -> None:
        if self._number("cpu-offloading-num-layers", 0):
            self._put("cpu-offloading-num-layers", "train.offload_layers")
        self._put_all("rows")
        for name, key in TABLE["switches"].items():
            self._switch(name, key)
        if self._number("tensor-model-parallel-size", 1) == 1:
            self._config.drop("layout.sp")  # Megatron-LM then ignores it

    def _model(self) -> None:
        hidden, gated = self._number("hidden-size"), self._is_on("swiglu")
        ffn = None
        if hidden is not None:
            ffn = int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden
        self._put("ffn-hidden-size", "model.ffn_hidden_size", ffn)
        if self._is_on("group-query-attention"):
            self._put("num-query-groups", "model.num_query_groups", 1)
        self._put_value("model.norm", str(self._value("normalization", "LayerNorm")).lower(), "normalization")
        self._activation(gated)
        tied = not self._is_on("untie-embeddings-and-output-weights")
        self._put_value("model.tied_embeddings", tied, "untie-embeddings-and-output-weights")
        if self._value("softmax-type", "vanilla") == "learnable":
            self._put_value("model.attention_sinks", True, "softmax-type")
        elif self._value("softmax-type", "vanilla") != "vanilla":
            self._lost("softmax-type", "attention has a plain softmax or learned sinks here")
        self._window()
        self._attention()
        if self._value("transformer-impl") == "local":
            self._put_value("model.backend", "torch", "transformer-impl")
        self._put("mtp-loss-scaling-factor", "loss.mtp_coefficient")

    def _activation(self, gated: bool) -> None:
        bias, fused = "disable-bias-linear", "no-bias-gelu-fusion"
        has_bias, is_unfused, is_tanh = not self._is_on(bias), self._is_on(fused), self._is_on("openai-gelu")
        self._put_value("model.linear_bias", has_bias, bias)
        if gated:
            self._put_value("model.activation", "swiglu", "swiglu")
        elif is_tanh:
            self._put_value("model.activation", "gelu_tanh", "openai-gelu")
        elif has_bias and not is_unfused:  # Megatron-LM's fused kernel of bias and GELU
            self._put_value("model.activation", "gelu_tanh", fused)
        else:
            self._put_value("model.activation", "gelu", *(name for name in (bias, fused) if self._is_on(name)))
        used = self._config.origins["model.activation"]
        self._unused(*(name for name in ("openai-gelu", fused) if f"--{name}" not in used))

    def _attention(self) -> None:
        if self._is_on("multi-latent-attention"):
            self._put_all("latent_attention")
            self._config.drop("model.head_dim")  # latent attention has its own sizes in Megatron-LM
            if self._is_on("qk-layernorm"):
                self._config.origins["model.mla.kv_lora_rank"] += "; --qk-layernorm normalises latents, as always here"
                self._config.content["model"].pop("qk_norm")
                self._config.origins.pop("model.qk_norm")
            else:
                self._config.lost.append(
                    "--multi-latent-attention without --qk-layernorm: Megatron-LM then does not normalise latents, but "
                    "they are always normalised here"
                )
        kind = self._value("experimental-attention-variant")
        if kind in ("gdn", "gated_delta_net"):
            self._put_all("delta_net")
        elif kind is not None:
            self._lost("experimental-attention-variant", "only gated_delta_net (gdn) is supported here")

    def _window(self) -> None:
        text = self._text("window-size")
        sides = re.fullmatch(r"\(?\s*(-?\d+)\s*,\s*(-?\d+)\s*\)?", text or "")
        if text is None:
            return
        if sides is None or int(sides[2]) != 0 or int(sides[1]) < 0:
            self._lost("window-size", "a window here has tokens to the left and 0 to the right, as in 4096,0")
            return
        self._config.put("model.sliding_window", int(sides[1]) + 1, "--window-size, and the token itself")
        every = self._value("window-attn-skip-freq")
        if isinstance(every, int):
            self._put("window-attn-skip-freq", "model.global_attention_every")
        elif every is not None:
            self._lost("window-attn-skip-freq", "model.global_attention_every is a number")

    def _rope(self) -> None:
        kind = self._value("position-embedding-type", "learned_absolute")
        if self._is_on("use-rotary-position-embeddings"):
            self._unused(*(["use-rotary-position-embeddings"] if kind == "rope" else []))
            kind = "rope"
        is_rotary = kind in _ROPE or self._is_on("multi-latent-attention")
        if is_rotary:
            self._unused("max-position-embeddings")
        else:
            self._lost("max-position-embeddings", "no table of positions exists here")
            self._config.lost.append(f"{self._origin('position-embedding-type')}, {kind}: positions are rotary here")
        self._put("rotary-base", "model.rope.base", 10000)
        self._put("rotary-percent", "model.rope.partial", 1.0)
        is_latent = self._is_on("multi-latent-attention")
        if self._is_on("use-rope-scaling"):
            self._put_value("model.rope.scaling", "llama3", "use-rope-scaling")
            self._put("rope-scaling-factor", "model.rope.factor", 8.0)
        elif self._is_on("rotary-seq-len-interpolation-factor"):
            self._put_value("model.rope.scaling", "linear", "rotary-seq-len-interpolation-factor")
            self._put("rotary-seq-len-interpolation-factor", "model.rope.factor")
        elif kind == "yarn" or (is_latent and self._value("rotary-scaling-factor", 1.0) != 1.0):
            self._yarn(is_latent)

    def _yarn(self, is_latent: bool) -> None:
        self._put_value(
            "model.rope.scaling", "yarn", "rotary-scaling-factor" if is_latent else "position-embedding-type"
        )
        self._put("rotary-scaling-factor", "model.rope.factor", 1.0)
        length = "model.rope.original_max_positions"
        if is_latent:
            self._config.put(length, 4096, "Megatron-LM's default in latent attention")
        else:
            self._put("yarn-original-max-position-embeddings", length, 4096)
            self._put("yarn-beta-fast", "model.rope.beta_fast", 32.0)
            self._put("yarn-beta-slow", "model.rope.beta_slow", 1.0)
        scale, whole = self._value("mscale", 1.0), self._value("mscale-all-dim", 0.0)
        factor = self._value("rotary-scaling-factor", 1.0)
        if not all(isinstance(number, int | float) for number in (scale, whole, factor)):
            self._refuse("--mscale, --mscale-all-dim and --rotary-scaling-factor need numbers; fix them")
        elif whole:
            self._put("mscale", "model.rope.mscale", 1.0)
            self._put("mscale-all-dim", "model.rope.mscale_all_dim")
        elif scale != 1:
            factor = 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0
            self._put_value("model.rope.attention_factor", factor, "mscale")
        else:
            self._unused("mscale")

    def _experts(self) -> None:
        if not self._is_on("num-experts"):
            return
        self._put_all("experts")
        put, ffn = self._put_value, self._config.get("model.ffn_hidden_size")
        self._put("moe-ffn-hidden-size", "model.experts.ffn_hidden_size", ffn)
        self._switch("moe-shared-expert-gate", "model.experts.shared_gate")
        self._switch("moe-router-pre-softmax", "model.experts.pre_softmax")
        if self._is_on("moe-router-enable-expert-bias"):
            put("model.experts.expert_bias", True, "moe-router-enable-expert-bias")
            self._put("moe-router-bias-update-rate", "model.experts.bias_update_rate", 1e-3)
        dispatcher = self._value("moe-token-dispatcher-type", "allgather")
        name = "alltoall" if dispatcher == "flex" else dispatcher
        put("model.experts.dispatcher", name, "moe-token-dispatcher-type")
        self._layers_with_experts()
        self._balance()
        permit_layout_dependent(self._config)

    def _layers_with_experts(self) -> None:
        text = self._text("moe-layer-freq")
        pattern = re.fullmatch(r"\(?\[0\]\s*\*\s*(\d+)\s*\+\s*\[1\]\s*\*\s*\d+\)?", (text or "").replace(" ", ""))
        if text is not None and text.isdigit():
            self._put("moe-layer-freq", "model.experts.every")
        elif pattern is not None:
            self._config.put("model.experts.first_dense_layers", int(pattern[1]), "--moe-layer-freq")
        elif text is not None:
            self._lost(
                "moe-layer-freq", "layers with experts are every n-th layer, or all layers after the first n here"
            )

    def _balance(self) -> None:
        kinds = self._values("moe-router-load-balancing-type") or ["aux_loss"]
        coefficients = [scalar(text) for text in self._values("moe-aux-loss-coeff") or []]
        if not all(isinstance(number, int | float) for number in coefficients):
            self._refuse(f"--moe-aux-loss-coeff {' '.join(map(str, coefficients))}: numbers are needed; fix it")
            return
        if len(coefficients) > len(kinds) or any(kind not in BALANCE for kind, _ in zip(kinds, coefficients)):
            self._lost("moe-aux-loss-coeff", f"each coefficient belongs to one of {', '.join(BALANCE)}")
        for kind, coefficient in zip(kinds, coefficients):
            if kind in BALANCE and coefficient:
                self._config.put(BALANCE[kind], coefficient, f"--moe-aux-loss-coeff of {kind}")
        if any(kind not in (*BALANCE, "none") for kind in kinds):
            self._lost("moe-router-load-balancing-type", f"only {', '.join(BALANCE)} and none are translated")

    def _layout(self) -> None:
        put, tp = self._put_value, self._degree("tensor-model-parallel-size")
        if self._is_on("num-experts") and (tp > 1 or self._is_on("expert-tensor-parallel-size")):
            self._put("expert-tensor-parallel-size", "layout.etp", tp)
        layers = self._number("num-layers")
        if self._is_on("num-layers-per-virtual-pipeline-stage") and layers is not None:
            stages = layers // self._degree("pipeline-model-parallel-size")
            layers_per_stage = self._number("num-layers-per-virtual-pipeline-stage")
            put(
                "layout.vpp",
                stages // layers_per_stage if layers_per_stage else 0,
                "num-layers-per-virtual-pipeline-stage",
            )
            self._lost("num-virtual-stages-per-pipeline-rank", "the layers of a stage are also given; keep one")
        if (text := self._text("pipeline-model-parallel-layout")) is not None:
            self._stages(text)
        if self._degree("context-parallel-size") > 1 and self._is_on("cp-comm-type"):
            ways = {"p2p": "ring", "all_gather": "allgather", "a2a": "ulysses"}
            kinds = set(self._values("cp-comm-type") or [])
            if len(kinds) == 1 and kinds <= ways.keys():
                put("layout.cp_comm", ways[kinds.pop()], "cp-comm-type")
            else:
                self._lost("cp-comm-type", f"only one of {', '.join(ways)}, for all layers, is translated")

    def _steps(self) -> None:
        size = self._number("global-batch-size")
        if self._is_on("train-samples"):
            self._lost("train-iters", "--train-samples is also given; keep one")
        for name, key in (
            ("train-samples", "train.num_steps"),
            ("lr-decay-samples", "optimizer.decay_steps"),
            ("lr-warmup-samples", "optimizer.warmup_steps"),
        ):
            samples = self._number(name)
            if samples is not None and size:
                self._config.put(key, -(-samples // size), f"--{name} / --global-batch-size")
            elif samples is not None:
                self._lost(name, f"{key} counts steps; also give --global-batch-size")

    def _schedule(self) -> None:
        put, style = self._put_value, str(self._value("lr-decay-style", "linear"))
        known = {"constant": "constant", "linear": "linear", "cosine": "cosine", "WSD": "wsd"}
        if style in known:
            put("optimizer.schedule", known[style], "lr-decay-style")
        else:
            self._lost("lr-decay-style", f"only {', '.join(known)} are translated")
        if style == "WSD":
            self._config.content["optimizer"].pop(
                "decay_steps", None
            )  # here wsd always decays until the end of the run
            samples, size = self._number("lr-wsd-decay-samples"), self._number("global-batch-size")
            self._put("lr-wsd-decay-iters", "optimizer.decay_steps")
            if samples is not None and size:
                put("optimizer.decay_steps", -(-samples // size), "lr-wsd-decay-samples", "global-batch-size")
            if (fall := self._value("lr-wsd-decay-style", "exponential")) != "linear":
                self._config.lost.append(f"{self._origin('lr-wsd-decay-style')}, {fall}: wsd falls linearly here")
        fraction = self._value("lr-warmup-fraction")
        if fraction is not None and not isinstance(fraction, int | float):
            self._refuse(f"--lr-warmup-fraction {fraction}: a number is needed; fix it")
        elif fraction is not None:
            steps = self._config.content["optimizer"].get("decay_steps") if style != "WSD" else None
            if steps is None:
                put("optimizer.warmup_ratio", fraction, "lr-warmup-fraction")
            else:
                put("optimizer.warmup_steps", math.ceil(Fraction(str(fraction)) * steps), "lr-warmup-fraction")
        kind = self._value("optimizer", "adam")
        if kind != "adam":
            self._lost("optimizer", "only adam, which is AdamW, is translated; optimizer.kind=muon has its own keys")

    def _precision(self) -> None:
        put = self._put_value
        kinds = [name for name in ("bf16", "fp16") if self._is_on(name)]
        chosen = kinds[0] if kinds else "fp32"
        if len(kinds) > 1:
            self._refuse("--bf16 and --fp16 exclude each other; keep one")
        put("train.precision", chosen, "bf16", "fp16")
        if chosen == "fp16":
            self._put("initial-loss-scale", "train.initial_loss_scale", 2.0**32)
        self._put("fp8-format", "train.fp8")
        if self._is_on("fp8-format") and self._value("fp8-recipe", "delayed") == "delayed":
            self._config.lost.append(
                f"{self._origin('fp8-recipe')}, delayed: checkpoints here do not contain its scales"
            )
        elif self._is_on("fp8-format"):
            self._put("fp8-recipe", "train.fp8_recipe")
        minutes = self._number("distributed-timeout-minutes", 10)
        put("train.process_group_timeout_s", 60 * (minutes or 0), "distributed-timeout-minutes")

    def _sharding(self) -> None:
        """Sets what data-parallel ranks divide; those of FSDP need no distributed optimizer in addition."""
        names = ("use-torch-fsdp2", "use-megatron-fsdp", "data-parallel-sharding-strategy")
        is_whole = self._is_on(names[0])
        if self._is_on(names[1]):
            is_whole |= self._value(names[2], "no_shard") == "optim_grads_params"
        if is_whole:
            put_shard(self._config, self._origin(*names), is_whole=True)
        usual = ("use-distributed-optimizer", *(names if self._is_on(names[1]) else ()))
        self._put_value("train.distributed_optimizer", is_whole or self._is_on(usual[0]), *usual)

    def _recomputation(self) -> None:
        put, kind = self._put_value, self._value("recompute-granularity")
        if self._is_on("recompute-activations"):
            self._lost("recompute-granularity", "--recompute-activations, which is also given, means selective")
            kind = "selective"
        put("train.recompute", kind, "recompute-activations", "recompute-granularity")
        if kind == "full" and self._value("recompute-method") == "block":
            self._put("recompute-num-layers", "train.recompute_layers")
        elif kind == "full":  # the number of layers per checkpoint, which only affects memory
            self._unused("recompute-num-layers")
        modules = self._values("recompute-modules") if kind == "selective" else None
        if modules is not None:
            put("train.recompute_modules", [module for module in modules if module in _RECOMPUTED], "recompute-modules")
            if unsupported := [module for module in modules if module not in _RECOMPUTED]:
                self._config.lost.append(
                    f"--recompute-modules {' '.join(unsupported)}: not recomputed here; memory only"
                )

    def _stages(self, text: str) -> None:
        """Sets the layers of each stage of a layout such as `Ett|(tt|)*6ttL`."""
        name = "pipeline-model-parallel-layout"
        counts, ranks = stages_of(text), self._degree("pipeline-model-parallel-size")
        if counts is None or len(counts) % ranks:
            self._refuse(
                f"--{name} {text}: layout.stage_layers is the number of layers of each stage, at least one, with the "
                f"embedding in the first and the rest in the last, and their number is a multiple of {ranks} ranks; "
                "divide the layers so"
            )
            return
        self._put_value("layout.stage_layers", counts, name)
        self._put_value("layout.vpp", len(counts) // ranks, name)

    def _data(self) -> None:
        put, sources = self._put_value, self._config.content.setdefault("data", {})
        if self._value("tokenizer-type") in _KNOWN_BY_THEIR_FILES:
            self._unused("tokenizer-type")
        else:
            self._lost(
                "tokenizer-type", "data.tokenizer is a sentencepiece .model, a tokenizer.json or a folder with one"
            )
        if self._is_on("mock-data"):
            put("data.kind", "mock", "mock-data")
            return
        put("data.kind", "sft" if self._is_on("sft") else "indexed", "sft")
        names = {"data-path": "train", "train-data-path": "train", "valid-data-path": "valid", "test-data-path": "test"}
        if self._is_on("train-data-path"):
            self._lost("data-path", "--train-data-path is also given; keep one")
        for name, part in names.items():
            if self._is_on(name):
                put(f"data.{part}", _blend(self._values(name) or []), name)
        if self._is_on("data-path") and not sources.get("valid"):
            text = self._text("split") or "969,30,1"
            try:
                put("data.split", shares(text), "split")
            except (ValueError, ArithmeticError):
                self._refuse(f"--split {text}: three numbers separated by commas are needed; fix it")
        reset = [self._is_on(f"reset-{name}") for name in ("position-ids", "attention-mask")]
        if self._is_on("sft"):
            self._unused("reset-position-ids", "reset-attention-mask")  # its samples are separate anyway
        elif all(reset):
            put("data.isolate_documents", True, "reset-position-ids", "reset-attention-mask")
        elif any(reset):
            self._config.lost.append(
                "only one of --reset-position-ids and --reset-attention-mask: data.isolate_documents does both"
            )
        if self._is_on("perform-rl-step"):
            self._refuse("--perform-rl-step: rollouts need a loop in Python; see docs/training/rl.md")
        self._validation(sources)

    def _validation(self, data: Mapping[str, Any]) -> None:
        count, size = self._number("eval-iters", 100), self._number("global-batch-size")
        if not (data.get("valid") or data.get("split", [0, 0])[1]):
            self._unused("eval-interval", "eval-iters")
            return
        if count == 0:
            self._put("eval-iters", "valid.interval_steps")
            self._read.add("eval-interval")
            return
        self._put("eval-interval", "valid.interval_steps", 1000)
        if size is None:
            text = " ".join(self._values("eval-iters") or [])
            self._config.lost.append(
                f"--eval-iters {text}: valid.max_samples counts samples; also give --global-batch-size"
            )
        else:
            self._put_value("valid.max_samples", (count or 0) * size, "eval-iters")

    def _paths(self) -> None:
        put, load = self._put_value, self._text("load")
        other = load if load != self._text("save") else None
        origin = self._text("pretrained-checkpoint") or other
        if other != origin and other is not None:
            self._lost("load", "a run starts from --pretrained-checkpoint and resumes from its own folder")
        put("checkpoint.initialize_from", origin, "pretrained-checkpoint", "load")
        if origin is not None and not self._is_on("finetune"):
            self._config.notes.append(
                f"a run resumes from its own folder; {origin} only gives the weights, without optimizer and step"
            )
        name = "persistent-save-interval" if self._is_on("persistent-save-interval") else "save-interval"
        self._put(name, "checkpoint.interval_steps")
        if self._is_on(name) and not self._is_on("save-retain-interval"):
            self._put(name, "checkpoint.keep_every_steps")
            self._config.origins["checkpoint.keep_every_steps"] = "Megatron-LM keeps every checkpoint"
        put("checkpoint.async_save", self._is_on("async-save"), "async-save")
        put("metrics.tensorboard", self._is_on("tensorboard-dir"), "tensorboard-dir")
        if self._is_on("wandb-project"):
            put("metrics.trackers", ["wandb"], "wandb-project")
            self._put("wandb-project", "metrics.project")
        if self._is_on("profile"):
            steps = [self._number(f"profile-step-{name}", default) for name, default in (("start", 10), ("end", 12))]
            put("metrics.profile_steps", steps, "profile-step-start", "profile-step-end")
            ranks = [scalar(rank) for rank in self._values("profile-ranks") or []]
            put("metrics.profile_ranks", ranks or None, "profile-ranks")


def _blend(words: Sequence[str]) -> list[dict[str, Any]]:
    """Reads `[WEIGHT PATH]...` or `PATH...`."""
    if len(words) > 1 and len(words) % 2 == 0 and all(isinstance(scalar(word), int | float) for word in words[::2]):
        return [{"path": path, "weight": float(weight)} for weight, path in zip(words[::2], words[1::2])]
    return [{"path": path} for path in words]
