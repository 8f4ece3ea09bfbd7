"""Nemotron-H and Nemotron 3: each layer is Mamba-2, attention without positions, a dense network, or experts."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, final

from mtrain.base.errors import DataError
from mtrain.base.spelling import counted
from mtrain.config.schema.model import ModelSection
from mtrain.hf.schema.config import Constant, Entry, Field, Required, heads, skipped_rotations
from mtrain.hf.schema.families.common import KEY, THEIRS, VOCABULARY, has_experts, has_shared_experts, in_layer
from mtrain.hf.schema.families.deepseek import DividedScores, Groups
from mtrain.hf.schema.family import Family
from mtrain.hf.schema.rope import ROPE_NAMES
from mtrain.hf.schema.table import Condition, Rule, TensorPattern, stretch
from mtrain.hf.schema.values import shown, value_of

_LISTED, _ALIAS, _LETTERS = "layers_block_type", "layer_types", "hybrid_override_pattern"
_WORDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_LETTER_OF = {word: letter for letter, word in _WORDS.items()} | {"mamba": "M", "attention": "*"}
_TOP_K = 2
_BASES = ("backbone.", "model.")


@final
class _Pattern(Entry):
    """The kind of each layer, as a list of words or as letters; older files have both, and the number of layers."""

    names = (_LISTED, _ALIAS, _LETTERS, "num_hidden_layers")

    def read(self, config: dict[str, Any]) -> dict[str, Any]:
        pattern = _pattern_of(config)
        return {"layer_pattern": pattern, "num_layers": len(pattern)}

    def write(self, config: dict[str, Any], model: ModelSection) -> dict[str, Any]:
        pattern = model.layer_pattern or ""
        lists: dict[str, Any] = {
            name: [_WORDS[letter] for letter in pattern] for name in (_LISTED, _ALIAS) if name in config
        }
        lists |= {name: pattern for name in (_LETTERS,) if name in config}
        return lists or {_LISTED: [_WORDS[letter] for letter in pattern]}


def _pattern_of(config: Mapping[str, Any]) -> str:
    """Returns a letter for each layer; refuses contradictory patterns."""
    patterns: dict[str, str] = {}
    for name in (_LISTED, _ALIAS):
        words = config.get(name)
        if words is None:
            continue
        if not isinstance(words, list) or not all(isinstance(word, str) and word in _LETTER_OF for word in words):
            raise DataError(
                f"config.json: {name}={shown(words)} must list {', '.join(_WORDS.values())} for each layer; correct "
                "the file"
            )
        patterns[name] = "".join(_LETTER_OF[word] for word in words)
    if config.get(_LETTERS) is not None:
        letters = config[_LETTERS]
        if not isinstance(letters, str) or not set(letters) <= set(_WORDS):
            raise DataError(
                f"config.json: {_LETTERS}={shown(letters)} must have one of the letters {', '.join(_WORDS)} for each "
                "layer; correct the file"
            )
        patterns[_LETTERS] = letters
    pattern = next(iter(patterns.values()), "ME*-")  # transformers' default
    number = value_of(dict(config), "num_hidden_layers", int, None)
    if len(set(patterns.values())) > 1 or not pattern or number not in (None, len(pattern)):
        listing = ", ".join(
            f"{name} has {counted(len(letters_of), 'layer')} ({shown(letters_of)})"
            for name, letters_of in patterns.items()
        )
        raise DataError(
            f"config.json: {listing or f'no list of layers means {pattern}'}, and "
            f"num_hidden_layers={shown(number)}, which contradict each other; correct the file"
        )
    return pattern


@final
@dataclass(frozen=True)
class _Where(Entry):
    """A field that matters only if the model has layers of one letter."""

    letter: str
    entry: Entry

    @property
    def names(self) -> tuple[str, ...]:
        return self.entry.names

    @property
    def part(self) -> str:
        return {"M": "mamba", "E": "experts"}[self.letter]

    @property
    def off(self) -> Mapping[str, Any]:
        return self.entry.off

    def sizes(self) -> Iterator[tuple[str, str]]:
        return self.entry.sizes()

    def read(self, config: dict[str, Any]) -> dict[str, Any]:
        return self.entry.read(config) if self.letter in _pattern_of(config) else {}

    def write(self, config: dict[str, Any], model: ModelSection) -> dict[str, Any]:
        return self.entry.write(config, model) if self.letter in (model.layer_pattern or "") else {}

    def older(self, config: dict[str, Any]) -> dict[str, Any]:
        return self.entry.older(config) if self.letter in _pattern_of(config) else {}

    def agrees(self, config: dict[str, Any], model: ModelSection) -> bool:
        return self.letter not in _pattern_of(config) or self.entry.agrees(config, model)


@final
class _NoPositions(Entry):
    """Attention never has positions, even if a file has rotary parameters."""

    names = ROPE_NAMES

    def read(self, config: dict[str, Any]) -> dict[str, Any]:
        return {"megatron.no_rope_freq": 1}

    def write(self, config: dict[str, Any], model: ModelSection) -> dict[str, Any]:
        return {}

    def agrees(self, config: dict[str, Any], model: ModelSection) -> bool:
        return all(skipped_rotations(model))


def _is(letter: str) -> Condition:
    return lambda model, layer: model.layer_pattern is not None and model.layer_pattern[layer] == letter


_ROWS = {"C": "x", "B": "x", "inputs": "r y", "gates": "r y", "steps": "r"}
"""Kind of a group's rows, in order -> axes whose product is their number; the first three kinds are convolved."""


def _pieces(axis: str, axes: str, *names: str) -> tuple[TensorPattern, ...]:
    """Returns the pieces of a tensor whose rows we order by group, and Hugging Face by kind."""
    return tuple(TensorPattern("", axes, stretch(axis, _ROWS, name)) for name in names)


def _named(rule: Rule) -> Rule:
    """Gives tensors their published names, which begin with `backbone.` instead of transformers' `model.`."""
    in_memory = (rule.parts, *rule.alternatives)
    published, *alternatives = [
        tuple(replace(part, name=part.name.replace(_BASES[1], _BASES[0], 1)) for part in parts) for parts in in_memory
    ]
    return replace(rule, parts=published, alternatives=(*alternatives, *in_memory))


def _of_mixer(key: str, name: str, axes: str, letter: str) -> Rule:
    return in_layer(key, f"mixer.{name}", axes).only(_is(letter))


def _norm(key: str, letter: str) -> Rule:
    return in_layer(key, "norm.weight", "h").only(_is(letter))


def _of_experts(linear: str, name: str, axes: str) -> Rule:
    # transformers 5 has all experts of a layer in one tensor
    together = (TensorPattern(f"{THEIRS}mixer.experts.{name}", f"E {axes}"),)
    alone = (TensorPattern(f"{THEIRS}mixer.experts.{{E}}.{name}.weight", axes),)
    key = f"{KEY}mlp.experts.experts.{linear}.weight"
    return Rule(key, f"E {axes}", alone, has_experts, alternatives=(together,))


_MIXER = "self_attention."
_ATTENTION = tuple(
    TensorPattern(f"{THEIRS}mixer.{name}_proj.weight", axes, {"s": slot})
    for name, axes, slot in (("q", "(G s d) h", slice(0, -2)), ("k", "(G d) h", -2), ("v", "(G d) h", -1))
)
_CONVOLVED = ("inputs", "B", "C")
_MAMBA = (
    _norm("input_layernorm.weight", "M"),
    Rule(
        f"{KEY}{_MIXER}in_proj.weight",
        "(K p) h",
        (
            TensorPattern(
                f"{THEIRS}mixer.in_proj.weight",
                "",
                # the whole tensor as a region, so that the rows of an adapter's B get the same order
                region="(K p) h",
                pieces=_pieces("p", "(K p) h", "gates", *_CONVOLVED, "steps"),
            ),
        ),
        _is("M"),
    ),
    Rule(
        f"{KEY}{_MIXER}conv1d.weight",
        "(K w) o i",
        (TensorPattern(f"{THEIRS}mixer.conv1d.weight", "", pieces=_pieces("w", "(K w) o i", *_CONVOLVED)),),
        _is("M"),
    ),
    Rule(
        f"{KEY}{_MIXER}conv1d.bias",
        "(K w)",
        (TensorPattern(f"{THEIRS}mixer.conv1d.bias", "", pieces=_pieces("w", "(K w)", *_CONVOLVED)),),
        _is("M"),
    ).only(lambda model, layer: model.mamba is not None and model.mamba.conv_bias),
    *(_of_mixer(_MIXER + name, name, "(K r)", "M") for name in ("dt_bias", "A_log", "D")),
    _of_mixer(f"{_MIXER}out_norm.weight", "norm.weight", "(K r y)", "M"),
    _of_mixer(f"{_MIXER}out_proj.weight", "out_proj.weight", "h (K r y)", "M"),
)
_LAYER = (
    *_MAMBA,
    _norm(f"{_MIXER}linear_qkv.layer_norm_weight", "*"),
    Rule(f"{KEY}{_MIXER}linear_qkv.weight", "(G s d) h", _ATTENTION, _is("*")),
    _of_mixer(f"{_MIXER}linear_proj.weight", "o_proj.weight", "h (H d)", "*"),
    _norm("mlp.linear_fc1.layer_norm_weight", "-"),
    _of_mixer("mlp.linear_fc1.weight", "up_proj.weight", "f h", "-"),
    _of_mixer("mlp.linear_fc2.weight", "down_proj.weight", "h f", "-"),
    _norm("pre_mlp_layernorm.weight", "E"),
    # transformers always stores these in float32
    replace(_of_mixer("mlp.router.weight", "gate.weight", "E h", "E"), keeps_dtype=True),
    replace(_of_mixer("mlp.router.expert_bias", "gate.e_score_correction_bias", "E", "E"), keeps_dtype=True),
    _of_experts("linear_fc1", "up_proj", "e h"),
    _of_experts("linear_fc2", "down_proj", "h e"),
    *(
        _of_mixer(f"mlp.shared_experts.{ours}.weight", f"shared_experts.{theirs}.weight", axes, "E").only(
            has_shared_experts
        )
        for ours, theirs, axes in (("linear_fc1", "up_proj", "t h"), ("linear_fc2", "down_proj", "h t"))
    ),
)
_NAMES = {"model.embed_tokens.weight": "model.embeddings.weight", "model.norm.weight": "model.norm_f.weight"}
_VOCABULARY = tuple(
    replace(rule, parts=tuple(replace(part, name=_NAMES.get(part.name, part.name)) for part in rule.parts))
    for rule in VOCABULARY
)
_OF_MAMBA: tuple[Entry, ...] = (
    Field("mamba_num_heads", "mamba.num_heads", 128),
    Field("mamba_head_dim", "mamba.head_dim", 64),
    Field("n_groups", "mamba.num_groups", 8, alias="mamba_n_groups"),
    Field("ssm_state_size", "mamba.state_dim", 128),
    Field("conv_kernel", "mamba.conv_kernel", 4, alias="mamba_d_conv"),
    Field("use_conv_bias", "mamba.conv_bias", True, alias="mamba_conv_bias"),
    # transformers bounds steps by it, and not by time_step_limit
    Field("time_step_min", "mamba.step_min", 0.001, alias="mamba_dt_min"),
    Required("mamba_hidden_act", "silu", "silu", ("swish",)),
    Required("use_bias", False, False),
)
_OF_EXPERTS: tuple[Entry, ...] = (
    Field("n_routed_experts", "experts.num_experts", 8, alias="num_local_experts"),
    Field("num_experts_per_tok", "experts.top_k", _TOP_K),
    Field("moe_intermediate_size", "experts.ffn_hidden_size", 7688),
    Field("moe_shared_expert_intermediate_size", "experts.shared_ffn_hidden_size", 7688),
    Field("routed_scaling_factor", "experts.scaling_factor", 1.0, without=1.0),
    Groups({"n_group": 1, "topk_group": 1, "num_experts_per_tok": _TOP_K}),
    DividedScores(_TOP_K),
    # experts that read a narrower projection of the hidden states, as in Nemotron 3 Super
    Required("moe_latent_size", None, None),
    Constant("experts.score", "sigmoid"),
    Constant("experts.expert_bias", True),
)
NEMOTRON_H = Family(
    "nemotron_h",
    "NemotronHForCausalLM",
    (
        _Pattern(),
        Field("hidden_size", "hidden_size", 4096),
        Field("intermediate_size", "ffn_hidden_size", 21504),
        Field("num_attention_heads", "num_attention_heads", 32),
        *heads(8, head_dim=128),
        Field("vocab_size", "vocab_size", 131072),
        Field("layer_norm_epsilon", "norm_epsilon", 1e-5),
        Field("initializer_range", "init_std", 0.02),
        Field("attention_dropout", "attention_dropout", 0.0),
        Required("tie_word_embeddings", False, False),
        Required("mlp_hidden_act", "relu2", "relu2"),
        Constant("activation", "relu2"),
        Required("attention_bias", False, False),
        Required("mlp_bias", False, False),
        Required("sliding_window", None, None),
        _NoPositions(),
        *(_Where("M", entry) for entry in _OF_MAMBA),
        *(_Where("E", entry) for entry in _OF_EXPERTS),
    ),
    tuple(_named(rule) for rule in (*_VOCABULARY, *_LAYER)),
    inert=(
        *("expand", "mamba_expand", "chunk_size", "mamba_chunk_size", "mamba_proj_bias", "mamba_ssm_cache_dtype"),
        # these concern initial weights, or a bound that transformers does not read
        *("time_step_max", "mamba_dt_max", "time_step_floor", "mamba_dt_init_floor"),
        *("time_step_limit", "mamba_dt_limit", "rescale_prenorm_residual"),
        *("use_mamba_kernels", "num_logits_to_keep", "residual_in_fp32", "hidden_dropout", "norm_eps", "rms_norm_eps"),
        *("n_shared_experts", "moe_shared_expert_overlap"),
        # MTP, which transformers does not read, either
        *("num_nextn_predict_layers", "mtp_layers_block_type", "mtp_hybrid_override_pattern"),
    ),
    carried_names=(r"mtp\..+",),
    renamed=_BASES,
)
