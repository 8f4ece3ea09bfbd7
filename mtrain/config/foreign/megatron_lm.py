"""Arguments of Megatron-LM's `pretrain_gpt.py` as a configuration."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from mtrain.base.errors import ConfigError
from mtrain.base.spelling import meant
from mtrain.config.foreign.megatron_arguments import (
    BALANCE,
    DELTA_NET,
    EXPERTS,
    LATENT_ATTENTION,
    REFUSED,
    SAME_VALUE,
    SWITCHES,
    TRANSLATED,
    WITH_DEFAULTS,
    WITHOUT_EFFECT,
)
from mtrain.config.foreign.translation import Translation, scalar, shares

_ROPE = ("rope", "yarn")
_KNOWN_BY_THEIR_FILES = {"HuggingFaceTokenizer", "SentencePieceTokenizer", "Llama2Tokenizer", "NullTokenizer"}
_RECOMPUTED = {"core_attn", "mlp", "moe", "shared_experts"}


def from_megatron_lm(arguments: Sequence[str]) -> Translation:
    """Translates the arguments of a start of Megatron-LM.

    Args:
        arguments: Arguments as a shell passes them; what stands before the first argument of Megatron-LM, such as
            `torchrun ... pretrain_gpt.py`, is left out.

    Raises:
        ConfigError: Something is no argument of Megatron-LM, or has no value.
    """
    given = _given(arguments)
    found = Translation("Megatron-LM")
    found.without_effect += [f"--{name}" for name in given if name in WITHOUT_EFFECT]
    found.lost += [
        f"{' '.join([f'--{name}', *given[name]])}: it changes what is trained, and nothing here corresponds"
        for name in given
        if name in REFUSED
    ]
    _Megatron(given, found).translate()
    return found


def _given(arguments: Sequence[str]) -> dict[str, list[str]]:
    """Returns the values of each argument; those without a value have none."""
    scripts = [number for number, text in enumerate(arguments) if text.endswith(".py")]
    given: dict[str, list[str]] = {}
    values: list[str] | None = None
    for text in arguments[scripts[-1] + 1 if scripts else 0 :]:
        if text.startswith("--"):
            name, separator, value = text[2:].partition("=")
            values = given[_known(name)] = [value] if separator else []
        elif values is None:
            raise ConfigError(f"{text}: an argument of Megatron-LM begins with --; remove what comes before it")
        else:
            values.append(text)
    return given


def _known(name: str) -> str:
    every = TRANSLATED | REFUSED | WITHOUT_EFFECT
    if name in every:
        return name
    near = meant(name, every)
    hint = f"did you mean --{near}?" if near else "remove it"
    raise ConfigError(f"--{name} is no argument of Megatron-LM (August 2026); {hint}")


class _Megatron:
    """Arguments that were given, and the translation they become."""

    def __init__(self, given: Mapping[str, list[str]], found: Translation) -> None:
        self._given, self._found = given, found
        self._read: set[str] = set()

    def translate(self) -> None:
        """Puts every argument under its key, and the defaults of Megatron-LM that differ from ours."""
        self._simple()
        self._model()
        self._rope()
        self._experts()
        self._layout()
        self._steps()
        self._schedule()
        self._precision()
        self._recomputation()
        self._data()
        self._places()
        if not self._is_on("calculate-per-token-loss"):
            self._found.notes.append(
                "Megatron-LM averages the means of microbatches and data-parallel ranks unless it has "
                "--calculate-per-token-loss; loss.aggregation=token-mean is that mean, under every layout"
            )
        self._found.lost += [
            f"{' '.join([f'--{name}', *values])}: nothing takes it with the other arguments that are given"
            for name, values in self._given.items()
            if name in TRANSLATED and name not in self._read
        ]

    def _values(self, name: str) -> list[str] | None:
        self._read.add(name)
        return self._given.get(name)

    def _text(self, name: str) -> str | None:
        values = self._values(name)
        if values is not None and len(values) != 1:
            raise ConfigError(f"--{name} needs one value, but has {len(values)}; fix it")
        return None if values is None else values[0]

    def _value(self, name: str, default: Any = None) -> Any:
        text = self._text(name)
        return default if text is None else scalar(text)

    def _number(self, name: str, default: int | None = None) -> int | None:
        value = self._value(name, default)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise ConfigError(f"--{name} needs a whole number, but has {value!r}; fix it")
        return value

    def _degree(self, name: str) -> int:
        """Returns a number that parts are divided by; 1 where it is not given."""
        found = self._number(name, 1)
        if found is None or found < 1:
            raise ConfigError(f"--{name} is {found}, but must be at least 1; fix it")
        return found

    def _is_on(self, name: str) -> bool:
        return self._values(name) is not None

    def _put(self, name: str, key: str, default: Any = None) -> None:
        """Puts a value that is given, else the default of Megatron-LM, which is None where ours is the same."""
        origin = f"--{name}" if name in self._given else f"Megatron-LM's default of --{name}"
        self._found.put(key, self._value(name, default), origin)

    def _lost(self, name: str, why: str) -> None:
        self._found.lost.append(f"--{name} {' '.join(self._values(name) or [])}: {why}")

    def _simple(self) -> None:
        for name, key in SAME_VALUE.items():
            if key:
                self._put(name, key)
        for name, (key, default) in WITH_DEFAULTS.items():
            self._put(name, key, default)
        for name, key in SWITCHES.items():
            if self._is_on(name):
                self._found.put(key, True, f"--{name}")
        if self._number("tensor-model-parallel-size", 1) == 1 and self._found.content.get("layout", {}).pop("sp", None):
            self._found.without_effect.append("--sequence-parallel")  # Megatron-LM ignores it with tp 1

    def _model(self) -> None:
        put, hidden = self._found.put, self._number("hidden-size")
        gated = self._is_on("swiglu")
        if self._is_on("ffn-hidden-size"):
            self._put("ffn-hidden-size", "model.ffn_hidden_size")
        elif hidden is not None:
            size = int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden
            put("model.ffn_hidden_size", size, "Megatron-LM's default of --ffn-hidden-size")
        if self._is_on("group-query-attention"):
            self._put("num-query-groups", "model.num_query_groups", 1)
        norm = self._value("normalization", "LayerNorm")
        put("model.norm", str(norm).lower(), "--normalization, LayerNorm where it is not given")
        bias = not self._is_on("disable-bias-linear")
        is_unfused, is_tanh = self._is_on("no-bias-gelu-fusion"), self._is_on("openai-gelu")
        if is_tanh and bias and not is_unfused:
            self._found.without_effect.append("--openai-gelu")
        if is_unfused and (gated or is_tanh or not bias):
            self._found.without_effect.append("--no-bias-gelu-fusion")
        put("model.linear_bias", bias, "true in Megatron-LM without --disable-bias-linear")
        plain = "gelu_tanh" if (bias and not is_unfused) or is_tanh else "gelu"
        put(
            "model.activation", "swiglu" if gated else plain, "--swiglu" if gated else "GELU, fused with its bias: tanh"
        )
        tied = not self._is_on("untie-embeddings-and-output-weights")
        put("model.tied_embeddings", tied, "true in Megatron-LM without --untie-embeddings-and-output-weights")
        if self._value("softmax-type", "vanilla") == "learnable":
            put("model.attention_sinks", True, "--softmax-type learnable")
        elif self._is_on("softmax-type") and self._value("softmax-type") != "vanilla":
            self._lost("softmax-type", "attention has its softmax, or learned sinks")
        self._window()
        if self._is_on("multi-latent-attention"):
            for name, (key, default) in LATENT_ATTENTION.items():
                self._put(name, key, default)
        if self._value("experimental-attention-variant") == "gated_delta_net":
            for name, (key, default) in DELTA_NET.items():
                self._put(name, key, default)
        elif self._is_on("experimental-attention-variant"):
            self._lost("experimental-attention-variant", "only gated_delta_net is known here")
        if self._value("transformer-impl") == "local":
            put("model.backend", "torch", "--transformer-impl local")
        self._put("mtp-loss-scaling-factor", "loss.mtp_coefficient")

    def _window(self) -> None:
        given = self._text("window-size")
        sides = re.fullmatch(r"\(?\s*(-?\d+)\s*,\s*(-?\d+)\s*\)?", given or "")
        if given is None:
            return
        if sides is None or int(sides[2]) != 0 or int(sides[1]) < 0:
            self._lost("window-size", "a window has so many tokens to the left and 0 to the right")
            return
        self._found.put("model.sliding_window", int(sides[1]) + 1, "--window-size, and the token itself")
        every = self._value("window-attn-skip-freq")
        if isinstance(every, int):
            self._put("window-attn-skip-freq", "model.global_attention_every")
        elif every is not None:
            self._lost("window-attn-skip-freq", "model.global_attention_every is a number")

    def _rope(self) -> None:
        kind = self._value("position-embedding-type", "learned_absolute")
        if self._is_on("use-rotary-position-embeddings"):
            if kind == "rope":
                self._found.without_effect.append("--use-rotary-position-embeddings")
            kind = "rope"
        is_rotary = kind in _ROPE or self._is_on("multi-latent-attention")
        if self._is_on("max-position-embeddings") and is_rotary:
            self._found.without_effect.append("--max-position-embeddings")
        elif self._is_on("max-position-embeddings"):
            self._lost("max-position-embeddings", "there is no table of positions here")
        if not is_rotary:
            self._found.lost.append(
                f"--position-embedding-type {kind}, Megatron-LM's default: positions are rotary here"
            )
        self._put("rotary-base", "model.rope.base")
        self._put("rotary-percent", "model.rope.partial")
        if self._is_on("use-rope-scaling"):
            self._found.put("model.rope.scaling", "llama3", "--use-rope-scaling")
            self._put("rope-scaling-factor", "model.rope.factor", 8.0)
        elif self._is_on("rotary-seq-len-interpolation-factor"):
            self._found.put("model.rope.scaling", "linear", "--rotary-seq-len-interpolation-factor")
            self._put("rotary-seq-len-interpolation-factor", "model.rope.factor")
        elif kind == "yarn" or self._value("rotary-scaling-factor", 1.0) != 1.0:
            self._found.put("model.rope.scaling", "yarn", f"--position-embedding-type {kind}")
            self._put("rotary-scaling-factor", "model.rope.factor")
            self._put("yarn-original-max-position-embeddings", "model.rope.original_max_positions")
            self._put("yarn-beta-fast", "model.rope.beta_fast")
            self._put("yarn-beta-slow", "model.rope.beta_slow")
            self._put("mscale", "model.rope.mscale")
            self._put("mscale-all-dim", "model.rope.mscale_all_dim")

    def _experts(self) -> None:
        if not self._is_on("num-experts"):
            return
        for name, (key, default) in EXPERTS.items():
            self._put(name, key, default)
        put, ffn = self._found.put, self._found.content.get("model", {}).get("ffn_hidden_size")
        self._put("moe-ffn-hidden-size", "model.experts.ffn_hidden_size", ffn)
        for name, key in (("moe-shared-expert-gate", "shared_gate"), ("moe-router-pre-softmax", "pre_softmax")):
            if self._is_on(name):
                put(f"model.experts.{key}", True, f"--{name}")
        if self._is_on("moe-router-enable-expert-bias"):
            put("model.experts.expert_bias", True, "--moe-router-enable-expert-bias")
            self._put("moe-router-bias-update-rate", "model.experts.bias_update_rate", 1e-3)
        dispatcher = self._value("moe-token-dispatcher-type", "allgather")
        name = "alltoall" if dispatcher == "flex" else dispatcher
        put("model.experts.dispatcher", name, "--moe-token-dispatcher-type, allgather where it is not given")
        self._layers_with_experts()
        self._balance()

    def _layers_with_experts(self) -> None:
        given = self._text("moe-layer-freq")
        pattern = re.fullmatch(r"\(?\[0\]\s*\*\s*(\d+)\s*\+\s*\[1\]\s*\*\s*\d+\)?", (given or "").replace(" ", ""))
        if given is not None and given.isdigit():
            self._put("moe-layer-freq", "model.experts.every")
        elif pattern is not None:
            self._found.put("model.experts.first_dense_layers", int(pattern[1]), "--moe-layer-freq")
        elif given is not None:
            self._lost("moe-layer-freq", "layers with experts are every so many, or all after the first so many")

    def _balance(self) -> None:
        kinds = self._values("moe-router-load-balancing-type") or ["aux_loss"]
        coefficients = [scalar(text) for text in self._values("moe-aux-loss-coeff") or []]
        if len(coefficients) > len(kinds) or any(kind not in BALANCE for kind, _ in zip(kinds, coefficients)):
            self._lost("moe-aux-loss-coeff", f"each one is of one of {', '.join(BALANCE)}")
        for kind, coefficient in zip(kinds, coefficients):
            if kind in BALANCE and coefficient:
                self._found.put(BALANCE[kind], coefficient, f"--moe-aux-loss-coeff of {kind}")
                if kind != "seq_aux_loss":
                    self._found.put("loss.allow_layout_dependent", True, f"{kind} depends on the layout by definition")
        if any(kind not in (*BALANCE, "none") for kind in kinds):
            self._lost("moe-router-load-balancing-type", f"known are {', '.join(BALANCE)} and none")

    def _layout(self) -> None:
        put, tp = self._found.put, self._degree("tensor-model-parallel-size")
        if self._is_on("num-experts") and (tp > 1 or self._is_on("expert-tensor-parallel-size")):
            self._put("expert-tensor-parallel-size", "layout.etp", tp)
        layers = self._number("num-layers")
        if self._is_on("num-layers-per-virtual-pipeline-stage") and layers is not None:
            stages = layers // self._degree("pipeline-model-parallel-size")
            each = self._degree("num-layers-per-virtual-pipeline-stage")
            put("layout.vpp", stages // each, "--num-layers-per-virtual-pipeline-stage")
            if self._is_on("num-virtual-stages-per-pipeline-rank"):
                self._lost("num-virtual-stages-per-pipeline-rank", "the layers of a stage are given, too; keep one")
        if self._degree("context-parallel-size") > 1:
            ways = {"p2p": "ring", "all_gather": "allgather", "a2a": "ulysses"}
            kinds = set(self._values("cp-comm-type") or ["p2p"])
            if len(kinds) == 1 and kinds <= ways.keys():
                put("layout.cp_comm", ways[kinds.pop()], "--cp-comm-type, p2p where it is not given")
            else:
                self._lost("cp-comm-type", f"one of {', '.join(ways)} for all layers is known")

    def _steps(self) -> None:
        size = self._number("global-batch-size")
        if self._is_on("train-samples") and self._is_on("train-iters"):
            self._lost("train-iters", "--train-samples is given, too; keep one")
        for name, key in (
            ("train-samples", "train.num_steps"),
            ("lr-decay-samples", "optimizer.decay_steps"),
            ("lr-warmup-samples", "optimizer.warmup_steps"),
        ):
            samples = self._number(name)
            if samples is not None and size:
                self._found.put(key, -(-samples // size), f"--{name} / --global-batch-size")
            elif samples is not None:
                self._lost(name, f"{key} counts steps; give --global-batch-size, too")

    def _schedule(self) -> None:
        put, style = self._found.put, str(self._value("lr-decay-style", "linear"))
        known = {"constant": "constant", "linear": "linear", "cosine": "cosine", "WSD": "wsd"}
        if style in known:
            put("optimizer.schedule", known[style], "--lr-decay-style, linear where it is not given")
        else:
            self._lost("lr-decay-style", f"known are {', '.join(known)}")
        if style == "WSD":
            self._found.content["optimizer"].pop("decay_steps", None)  # where all decay ends is the end of the run here
            samples, size = self._number("lr-wsd-decay-samples"), self._number("global-batch-size")
            self._put("lr-wsd-decay-iters", "optimizer.decay_steps")
            if samples is not None and size:
                put("optimizer.decay_steps", -(-samples // size), "--lr-wsd-decay-samples / --global-batch-size")
            if self._value("lr-wsd-decay-style", "exponential") != "linear":
                self._found.lost.append(
                    "--lr-wsd-decay-style exponential, Megatron-LM's default: wsd falls linearly here"
                )
        fraction = self._value("lr-warmup-fraction")
        if fraction is not None:
            steps = self._found.content["optimizer"].get("decay_steps") if style != "WSD" else None
            if steps is None:
                put("optimizer.warmup_ratio", fraction, "--lr-warmup-fraction")
            else:
                put("optimizer.warmup_steps", math.ceil(Fraction(str(fraction)) * steps), "--lr-warmup-fraction")
        kind = self._value("optimizer", "adam")
        if kind != "adam":
            self._lost("optimizer", "only adam, which is AdamW, is translated; optimizer.kind=muon has keys of its own")

    def _precision(self) -> None:
        put = self._found.put
        chosen = next((name for name in ("bf16", "fp16") if self._is_on(name)), None)
        put("train.precision", chosen or "fp32", f"--{chosen}" if chosen else "neither --bf16 nor --fp16")
        if chosen == "fp16":
            self._put("initial-loss-scale", "train.initial_loss_scale", 2.0**32)
        self._put("fp8-format", "train.fp8")
        if self._is_on("fp8-format") and self._value("fp8-recipe", "delayed") == "delayed":
            self._found.lost.append("--fp8-recipe delayed, Megatron-LM's default: its scales are in no checkpoint here")
        elif self._is_on("fp8-format"):
            self._put("fp8-recipe", "train.fp8_recipe")
        put(
            "train.distributed_optimizer",
            self._is_on("use-distributed-optimizer"),
            "whether --use-distributed-optimizer is given",
        )
        minutes = self._number("distributed-timeout-minutes")
        put(
            "train.process_group_timeout_s",
            None if minutes is None else 60 * minutes,
            "--distributed-timeout-minutes",
        )

    def _recomputation(self) -> None:
        put, kind = self._found.put, self._value("recompute-granularity")
        if self._is_on("recompute-activations"):
            if self._is_on("recompute-granularity"):
                self._lost("recompute-granularity", "--recompute-activations, which is given, too, means selective")
            kind = "selective"
        put("train.recompute", kind, "--recompute-granularity")
        if kind == "full" and self._value("recompute-method") == "block":
            self._put("recompute-num-layers", "train.recompute_layers")
        elif kind == "full" and self._is_on("recompute-num-layers"):  # layers that are recomputed at one time
            self._found.without_effect.append("--recompute-num-layers")
        modules = self._values("recompute-modules") if kind == "selective" else None
        if modules is not None:
            put("train.recompute_modules", [each for each in modules if each in _RECOMPUTED], "--recompute-modules")
            if others := [each for each in modules if each not in _RECOMPUTED]:
                self._found.lost.append(f"--recompute-modules {' '.join(others)}: not recomputed here; memory only")

    def _data(self) -> None:
        put, sources = self._found.put, self._found.content.setdefault("data", {})
        if self._is_on("tokenizer-type") and self._value("tokenizer-type") in _KNOWN_BY_THEIR_FILES:
            self._found.without_effect.append("--tokenizer-type")
        elif self._is_on("tokenizer-type"):
            self._lost(
                "tokenizer-type", "data.tokenizer is a sentencepiece .model, a tokenizer.json or a folder with one"
            )
        if self._is_on("mock-data"):
            put("data.kind", "mock", "--mock-data")
            return
        put(
            "data.kind",
            "sft" if self._is_on("sft") else "indexed",
            "--sft" if self._is_on("sft") else ".bin/.idx pairs",
        )
        names = {"data-path": "train", "train-data-path": "train", "valid-data-path": "valid", "test-data-path": "test"}
        if self._is_on("data-path") and self._is_on("train-data-path"):
            self._lost("data-path", "--train-data-path is given, too; keep one")
        for name, part in names.items():
            if self._is_on(name):
                put(f"data.{part}", _blend(self._values(name) or []), f"--{name}")
        if self._is_on("data-path") and not sources.get("valid"):
            put("data.split", shares(str(self._text("split") or "969,30,1")), "--split, 969,30,1 where it is not given")
        reset = [self._is_on(f"reset-{name}") for name in ("position-ids", "attention-mask")]
        if all(reset):
            put("data.isolate_documents", True, "--reset-position-ids and --reset-attention-mask")
        elif any(reset):
            self._found.lost.append("one of --reset-position-ids and --reset-attention-mask alone: documents have both")
        self._validation(sources)

    def _validation(self, data: Mapping[str, Any]) -> None:
        count, size = self._number("eval-iters", 100), self._number("global-batch-size")
        if not (data.get("valid") or data.get("split", [0, 0])[1]):
            self._found.without_effect += [f"--{name}" for name in ("eval-interval", "eval-iters") if self._is_on(name)]
            return
        if count == 0:
            self._put("eval-iters", "valid.interval_steps")
            self._read.add("eval-interval")
            return
        self._put("eval-interval", "valid.interval_steps", 1000)
        if size is None:
            self._lost("eval-iters", "valid.max_samples counts samples; give --global-batch-size, too")
        else:
            self._found.put("valid.max_samples", (count or 0) * size, "--eval-iters, or 100, x --global-batch-size")

    def _places(self) -> None:
        put, load = self._found.put, self._text("load")
        other = load if load != self._text("save") else None
        origin = self._text("pretrained-checkpoint") or other
        if other != origin and other is not None:
            self._lost("load", "a run begins from --pretrained-checkpoint and goes on from its own folder")
        put("checkpoint.initialize_from", origin, "--pretrained-checkpoint, or --load of another folder")
        if origin is not None and not self._is_on("finetune"):
            self._found.notes.append(
                f"a run folder goes on by itself; {origin} gives the weights alone, without optimizer and step"
            )
        name = "persistent-save-interval" if self._is_on("persistent-save-interval") else "save-interval"
        self._put(name, "checkpoint.interval_steps")
        if self._is_on(name) and not self._is_on("save-retain-interval"):
            self._put(name, "checkpoint.keep_every_steps")
            self._found.origins["checkpoint.keep_every_steps"] = "Megatron-LM keeps every checkpoint"
        put("checkpoint.async_save", self._is_on("async-save"), "whether --async-save is given")
        put("metrics.tensorboard", self._is_on("tensorboard-dir"), "whether --tensorboard-dir is given")
        if self._is_on("wandb-project"):
            put("metrics.trackers", ["wandb"], "--wandb-project")
            self._put("wandb-project", "metrics.project")
        if self._is_on("profile"):
            steps = [self._number(f"profile-step-{name}", default) for name, default in (("start", 10), ("end", 12))]
            put("metrics.profile_steps", steps, "--profile-step-start, --profile-step-end")
            ranks = [int(each) for each in self._values("profile-ranks") or []]
            put("metrics.profile_ranks", ranks or None, "--profile-ranks")


def _blend(words: Sequence[str]) -> list[dict[str, Any]]:
    """Reads `[WEIGHT PATH]...` or `PATH...`."""
    if len(words) > 1 and len(words) % 2 == 0 and all(isinstance(scalar(each), int | float) for each in words[::2]):
        return [{"path": path, "weight": float(weight)} for weight, path in zip(words[::2], words[1::2])]
    return [{"path": path} for path in words]
