"""config.json decides what the weights compute: for any content, we read it as transformers does, or report an error.

Each field of each family is changed in turn. Where the same tensors still load in transformers, the oracle computes the
model that we read, and its logits have to equal those of transformers; otherwise an import would prove the bytes of a
function that differs.
"""

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
import transformers

from mtrain.base.errors import DataError
from mtrain.config.schema.model import ModelSection
from mtrain.hf.schema.inert import INERT
from mtrain.hf.schema.registry import CHANGES_THE_FUNCTION, FAMILIES, family_of, unknown_fields
from tests.fault_table import Notice
from tests.hf.folders import CONFIGS, TOWERS, class_of
from tests.hf.folders import content_of as base
from tests.hf.megatron_names import from_huggingface
from tests.reference import logits_of

NAMES = [name for name in [*CONFIGS, *TOWERS] if name not in ("llama-biased", "llama-tied", "deepseek-direct-queries")]
ROPES: list[dict[str, Any]] = [
    {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}},
    {"rope_parameters": {"rope_type": "linear", "rope_theta": 77.0, "factor": 3.0, "mscale_all_dim": 2.0}},
    {"rope_parameters": None, "rope_theta": 77.0},
    {"rope_parameters": None},
    {"rope_theta": 77.0},
    {"rope_scaling": {"rope_type": "linear", "factor": 3.0}},
    {"rope_local_base_freq": 33.0},
    {"partial_rotary_factor": 0.5},
    {"partial_rotary_factor": 0},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0, "partial_rotary_factor": 0}},
    {"rope_parameters": 0},
    {"rotary_dim": 4},
    {"rotary_dim": 0},
    {"rotary_dim": 4, "partial_rotary_factor": 0.5},
    {"rotary_dim": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 77.0}},
    {"rope_scaling": {"rope_type": "linear", "factor": 3.0, "partial_rotary_factor": 0.5}, "rope_parameters": None},
    {"original_max_position_embeddings": 17},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0, "mrope_section": [2, 1, 1]}},
]
OTHERS: list[dict[str, Any]] = [
    {"is_causal": False},
    {"head_dim": 24},
    {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    {"layer_types": ["sliding_attention"] * 3, "sliding_window": 3},
    {"sliding_window": 3},
    {"sliding_window": 3, "use_sliding_window": True},
    {"sliding_window": 3, "use_sliding_window": True, "max_window_layers": 1},
    {"sliding_window": 3, "use_sliding_window": True, "max_window_layers": 1, "layer_types": None},
    {"sliding_window_pattern": 2, "layer_types": None},
    {"_sliding_window_pattern": 2, "layer_types": None},
    {"experts_per_token": 1},
    {"num_experts": 2},
    {"n_group": 3, "topk_group": 1, "num_experts_per_tok": 2},
    {"n_group": 3, "topk_group": 2, "num_experts_per_tok": 2},
    {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 3},
    {"rms_norm_eps": 0.1},
    {"num_experts_per_tok": 1},
    {"num_experts_per_tok": 1, "norm_topk_prob": False},
    {"num_experts_per_tok": 1, "norm_topk_prob": True},
    {"first_k_dense_replace": 0},
    {"first_k_dense_replace": 3},
    {"mlp_layer_types": ["dense", "sparse", "sparse"]},
    {"mlp_layer_types": ["sparse", "sparse", "dense"]},
    {"mlp_layer_types": None},
    {"mlp_only_layers": [1]},
    {"no_rope_layers": [0, 1, 1]},
    {"no_rope_layers": [1, 1, 1]},
    {"no_rope_layers": [0, 0, 0]},
    {"no_rope_layers": None, "no_rope_layer_interval": 3},
    {"no_rope_layers": None, "no_rope_layer_interval": 2, "layer_types": None, "use_sliding_window": True},
    {"sliding_window": 3, "use_sliding_window": True, "layer_types": ["sliding_attention"] * 3},
    {"sliding_window": 3, "layer_types": ["full_attention"] * 3},
]
HYBRID: list[dict[str, Any]] = [
    {"layer_types": ["linear_attention", "linear_attention", "full_attention"]},
    {"layer_types": ["full_attention", "linear_attention", "linear_attention"]},
    {"layer_types": ["linear_attention"] * 3},
    {"layer_types": None, "full_attention_interval": 2},
    {"layer_types": None, "full_attention_interval": 3},
    {"layer_types": None, "full_attention_interval": 1},
    {"full_attention_interval": 3},
    {"attn_output_gate": False},
    {"mamba_ssm_dtype": "bfloat16"},
]
NEMOTRON: list[dict[str, Any]] = [
    {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]},
    {"layers_block_type": ["mamba", "moe", "attention", "mlp", "mamba"]},
    {"layers_block_type": None, "hybrid_override_pattern": "ME*-M"},
    {"layers_block_type": None, "hybrid_override_pattern": "ME*-M", "num_hidden_layers": 5},
    {"hybrid_override_pattern": "ME*-M"},
    {"hybrid_override_pattern": "MEM-M"},
    {"layers_block_type": None},
    {"num_hidden_layers": 4},
    {"time_step_limit": [0.0, 0.1]},
    {"time_step_min": 0.0},
    {"mamba_dt_min": 0.5},
    {"mamba_n_groups": 1},
    {"mamba_conv_bias": False},
    {"mamba_d_conv": 3},
    {"mamba_expand": 3},
    {"num_nextn_predict_layers": 1},
    {"mtp_layers_block_type": ["mlp"]},
]
_WINDOWED = {"rope_type": "default", "rope_theta": 90.0}
_TURNED_IN_PART = {"rope_type": "proportional", "rope_theta": 300.0, "partial_rotary_factor": 0.5}
_WIDE = {"head_dim": 32, "num_key_value_heads": 1}
GEMMA4: list[dict[str, Any]] = [
    *(
        {"rope_parameters": {"sliding_attention": windowed, "full_attention": wide}}
        for windowed, wide in [
            (_WINDOWED, _TURNED_IN_PART),
            (_WINDOWED | {"partial_rotary_factor": 0.5}, _TURNED_IN_PART),
            (_TURNED_IN_PART, _TURNED_IN_PART),
            (_WINDOWED, _TURNED_IN_PART | {"factor": 3.0}),
            (_WINDOWED, _TURNED_IN_PART | {"partial_rotary_factor": 0.3}),
            (_WINDOWED, _TURNED_IN_PART | {"partial_rotary_factor": None}),
            (_WINDOWED, {"rope_type": "proportional", "rope_theta": 300.0}),
            (_WINDOWED, {"rope_type": "linear", "rope_theta": 300.0, "factor": 3.0}),
            (_WINDOWED, {"rope_type": "default", "rope_theta": 300.0}),
            (_WINDOWED, {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5}),
            (_WINDOWED, {"rope_type": "default"}),
            (_WINDOWED | {"rope_theta": None}, _TURNED_IN_PART),
        ]
    ),
    {"rope_parameters": {"full_attention": _TURNED_IN_PART}},
    {"rope_parameters": None},
    {"per_layer_config": None, "global_head_dim": 32, "num_global_key_value_heads": 1},
    {"per_layer_config": None, "global_head_dim": 32},
    {"per_layer_config": None},
    {"per_layer_config": None, "global_head_dim": 32, "num_global_key_value_heads": 0},
    {"global_head_dim": 16},
    {"num_global_key_value_heads": 2},
    {"per_layer_config": {"1": _WIDE}},
    {"per_layer_config": {"1": _WIDE, "2": _WIDE}},
    {"per_layer_config": {"2": {"head_dim": 32}}},
    {"per_layer_config": {"2": {"num_key_value_heads": 1}}},
    {"per_layer_config": {"2": _WIDE | {"intermediate_size": 32}}},
    {"per_layer_config": {"2": _WIDE | {"intermediate_size": 16}}},
    {"layer_types": None, "per_layer_config": {}},
    {"layer_types": ["sliding_attention", "full_attention", "full_attention"]},
    {"layer_types": ["sliding_attention"] * 3},
    {"layer_types": ["full_attention"] * 3, "per_layer_config": dict.fromkeys("012", _WIDE)},
    {"use_bidirectional_attention": "all"},
    {"use_bidirectional_attention": "vision"},
    {"final_logit_softcapping": None},
    {"hidden_size_per_layer_input": 8},
    {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 8},
    {"num_kv_shared_layers": 1},
    {"use_double_wide_mlp": True},
    {"num_experts": 4, "top_k_experts": 2},
    {"enable_moe_block": False},
    {"enable_moe_block": None},
    {"num_experts": None},
    {"top_k_experts": None},
    {"top_k_experts": 1},
    {"top_k_experts": 7},
    {"moe_intermediate_size": None},
]
TOKENS = torch.arange(24)[None] * 7 % 57


def mutations(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields configs with every field changed in turn, then with fields that are not in the file."""
    for name, value in config.items():
        match value:
            case bool():
                yield {name: not value}
            case int():
                yield from ({name: value + 1}, {name: 2 * value}, {name: max(1, value // 2)})
            case float():
                yield from ({name: 1.5 * value + 0.1}, {name: value / 2})
            case None:
                yield from ({name: 3}, {name: 0.5})
            case str():
                yield {name: "relu" if value == "gelu" else "gelu"}
            case [int() | float(), *_]:
                yield {name: [2 * each for each in value]}
    yield from ROPES
    yield from OTHERS
    if "linear_num_key_heads" in config:
        yield from HYBRID
    if "ssm_state_size" in config:
        yield from NEMOTRON
    if "attention_k_eq_v" in config:
        yield from GEMMA4
    parameters = config.get("rope_parameters", {})
    for name, value in ({} if "attention_k_eq_v" in config else parameters).items():
        if isinstance(value, float | int) and not isinstance(value, bool):
            yield {"rope_parameters": parameters | {name: 2 * value}}
        yield {"rope_parameters": {key: each for key, each in parameters.items() if key != name}}


def mutations_of(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields configs with every field changed in turn; in a model of images and text, those of text, and all others."""
    if "text_config" not in config:
        yield from mutations(config)
        return
    for part in nested(config):
        yield from ({part: config[part] | mutation} for mutation in mutations(config[part]))
        yield from ({part: without(config[part], name)} for name in config[part])
    yield from mutations(config)
    yield from (
        {"tie_word_embeddings": tied, "text_config": config["text_config"] | {"tie_word_embeddings": other}}
        for tied in (True, False)
        for other in (True, False)
    )


def nested(config: dict[str, Any]) -> list[str]:
    """Returns the names of the parts: of text, of images, of sound."""
    return [part for part in ("text_config", "vision_config", "audio_config") if part in config]


def without(fields: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key != name}


def as_text(state: dict[str, Any]) -> dict[str, Any]:
    """Names the tensors of a text model inside another as those of a text model alone."""
    return {name.replace("model.language_model.", "model."): value for name, value in state.items()}


class Answer(NamedTuple):
    """Results of transformers."""

    logits: torch.Tensor
    state: dict[str, Any]
    """Tensors with which it computed: tied ones are one."""


def answered(config: dict[str, Any], state: dict[str, Any]) -> Answer | None:
    """Asks transformers; None where it refuses the configuration or the tensors."""
    try:
        read = transformers.AutoConfig.for_model(**copy.deepcopy(config))
        read._attn_implementation = "eager"
        read._experts_implementation = "eager"
        model = class_of(read).from_config(read, dtype=torch.float64).double()
        model.load_state_dict(state)
        with torch.no_grad():
            return Answer(model.eval()(TOKENS).logits.double(), model.state_dict())
    except Exception:  # a type, a shape, a missing key: such a folder computes nothing in transformers
        return None


def ours(config: dict[str, Any]) -> ModelSection | None:
    """Reads the model; None where it is refused."""
    try:
        family = family_of(config)
        return family.model(family.as_held(config, ()))
    except DataError:
        return None


LIKE_OTHERS = (
    *("mistral", "ministral3", "qwen2", "mixtral", "qwen2-moe", "qwen3-moe-unnormalised"),
    *("olmo2", "olmo2-grouped", "qwen3-moe", "olmo3", "smollm3", "smollm3-windowed"),
    *("qwen3", "gemma3", "gemma4", "phi3", "glm4-moe-lite", "glm4-moe"),
    *("qwen3-next", "qwen3.5-moe"),
    *TOWERS,
)
"""Models nearly all of whose fields are read as those of llama, qwen3.5 (norms of heads), gpt-oss (experts),
gemma4-experts (windows), deepseek (its experts) and minimax (heads that rotate in part); fields around a text tower:
tests/hf/schema/test_config.py."""


@pytest.mark.parametrize(
    ("name", "every"),  # every third field by day: most are those of several families
    [
        *(pytest.param(name, 3, id=name) for name in NAMES if name not in LIKE_OTHERS),
        *(pytest.param(name, 1, id=f"{name}, all", marks=pytest.mark.nightly) for name in NAMES),
    ],
)
def test_what_is_read_computes_what_transformers_computes(name: str, every: int) -> None:
    config = base(name)
    torch.manual_seed(1)
    # float64 everywhere: a part that asks for float32 by itself, such as DeepSeek's router, stays in it otherwise
    made = (CONFIGS | TOWERS)[name]()
    model = class_of(made).from_config(made, dtype=torch.float64).double()
    with torch.no_grad():
        for value in model.state_dict().values():
            value.copy_(torch.randn(value.shape) * 0.3)
    state = model.state_dict()
    right, known = answered(config, state), ours(config)
    assert right is not None
    num_changed, num_accepted, wrong = 0, 0, []
    for mutation in [{}, *list(mutations_of(config))[::every]]:
        read = ours(config | mutation)
        if read is None and num_changed >= 5:  # refused, whatever transformers makes of it
            continue
        theirs = answered(config | mutation, state)
        if theirs is None:
            continue
        num_changed += not torch.allclose(theirs.logits, right.logits, rtol=0.0, atol=1e-4)
        if read is None:
            continue
        num_accepted += 1
        is_known = mutation and read == known and torch.equal(theirs.logits, right.logits)
        if not is_known:  # same tensors: the oracle has already judged the unchanged model
            exact = logits_of(from_huggingface(as_text(theirs.state), read), read, TOKENS)
            if not torch.allclose(exact, theirs.logits, rtol=0.0, atol=1e-4):
                wrong.append(mutation)
    assert num_changed >= 5, "the mutations change nothing"
    assert num_accepted >= 5, "everything is refused"
    assert not wrong


def test_every_family_and_every_field_is_changed() -> None:
    contents = {name: base(name) for name in NAMES}
    families = [family_of(content) for content in contents.values()]
    assert [name for name, family in FAMILIES.items() if family not in families] == ["kimi_k2"]  # DeepSeek-V3's alias
    for name, content in contents.items():
        changes = list(mutations_of(content))
        for part in (None, *nested(content)):
            fields, changed = (
                (content, changes) if part is None else (content[part], [c.get(part, {}) for c in changes])
            )
            kept = {each for each, value in fields.items() if all(c.get(each, value) == value for c in changed)}
            assert kept <= INERT, f"{part} of {name}"


@pytest.mark.parametrize("name", NAMES)
def test_every_field_of_transformers_is_in_the_tables(name: str) -> None:
    config = (CONFIGS | TOWERS)[name]()
    family = family_of(base(name))
    for part, (_, said, known) in zip([config, config.get_text_config()], family.parts(base(name))):
        fields = {field.name for field in dataclasses.fields(part)} | said.keys()
        mapped = set(part.attribute_map)  # other names of fields that are read
        assert fields - mapped <= known | INERT | CHANGES_THE_FUNCTION
    generation = transformers.GenerationConfig._get_default_generation_params()
    assert generation.keys() <= INERT


_GROWTH = {"factor": 4.0, "llama_4_scaling_beta": 0.1}
FOREIGN: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0 is not supported in a llama model"),
    ("llama", {"sliding_window": 128}, "sliding_window=128 is not supported in a llama model"),
    ("mistral", {"layer_types": ["full_attention"] * 3}, "layer_types="),
    ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1 is not supported"),
    ("qwen2", {"per_layer_config": {"0": {"hidden_size": 3}}}, "per_layer_config="),
    ("qwen3-moe", {"layer_types": ["full_attention"] * 3}, "layer_types="),
    (
        "glm4-moe-lite",
        {"mlp_layer_types": ["dense", "sparse", "dense"]},
        "mlp_layer_types=['dense', 'sparse', 'dense']",
    ),
    ("glm4-moe-lite", {"first_k_dense_replace": 1}, "first_k_dense_replace=1 contradicts mlp_layer_types"),
    ("phi3", {"resid_pdrop": 0.1}, "resid_pdrop=0.1 is not supported"),
    ("phi3", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "rope_type=longrope is not supported"),
    ("phi3", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "rope_type=yarn is not"),
    ("qwen3.5", {"layer_types": ["linear_attention"] * 3}, "layers none of 3 have full_attention"),
    ("qwen3.5", {"layer_types": ["sliding_attention"] * 3}, "layer_types must list full_attention or linear_attention"),
    ("qwen3.5", {"layer_types": None, "full_attention_interval": 0}, "full_attention_interval=0 must be above 0"),
    ("qwen3.5", {"attn_output_gate": False}, "attn_output_gate=False is not supported"),
    ("nemotron-h", {"layers_block_type": ["moe", "conv"]}, "layers_block_type=['moe', 'conv'] must list"),
    ("nemotron-h", {"hybrid_override_pattern": "MEM-M"}, "hybrid_override_pattern has 5 layers ('MEM-M')"),
    ("nemotron-h", {"hybrid_override_pattern": "ME*-X"}, "hybrid_override_pattern='ME*-X' must have one of"),
    ("nemotron-h", {"num_hidden_layers": 4}, "num_hidden_layers=4, which contradict each other"),
    ("nemotron-h", {"moe_latent_size": 8}, "moe_latent_size=8 is not supported"),
    ("nemotron-h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act='silu' is not supported"),
    ("nemotron-h", {"use_bias": True}, "use_bias=True is not supported"),
    ("nemotron-h", {"attention_bias": True}, "attention_bias=True is not supported"),
    ("nemotron-h", {"mlp_bias": True}, "mlp_bias=True is not supported"),
    ("nemotron-h", {"tie_word_embeddings": True}, "tie_word_embeddings=True is not supported"),
    ("qwen3-next", {"mlp_only_layers": [0]}, "mlp_only_layers=[0] is not supported"),
    ("gemma4", {"layer_types": ["full_attention"] * 3}, "layer_types without sliding_attention"),
    ("gemma4", {"attention_k_eq_v": False}, "attention_k_eq_v=False (value projections in wide layers)"),
    ("gemma4", {"hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input=256 is not supported"),
    ("gemma4", {"num_kv_shared_layers": 1}, "num_kv_shared_layers=1 is not supported"),
    ("gemma4", {"enable_moe_block": True}, "num_experts is null, but an integer is needed"),
    ("gemma4-experts", {"top_k_experts": 1}, "top_k=1 with a softmax over the chosen experts"),
    ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all' is not supported"),
    (
        "gemma4",
        {"per_layer_config": {"1": _WIDE}},
        "per_layer_config must have exactly the layers of full_attention, 2",
    ),
    ("gemma4", {"per_layer_config": 3}, "per_layer_config=3"),
    ("gemma4", {"global_head_dim": 64}, "head_dim=32 in per_layer_config contradicts global_head_dim=64"),
    (
        "gemma4",
        {"rope_parameters": {"full_attention": _WINDOWED}},
        "full_attention and sliding_attention with an object",
    ),
    (
        "gemma4",
        {"rope_parameters": {"full_attention": _TURNED_IN_PART, "sliding_attention": _TURNED_IN_PART}},
        "rope_type='proportional' of sliding_attention",
    ),
    (
        "gemma4",
        {"rope_parameters": {"full_attention": _WINDOWED | {"factor": 2.0}, "sliding_attention": _WINDOWED}},
        "factor=2.0 in the rotary parameters of full_attention",
    ),
    ("llama", {"rope_parameters": _TURNED_IN_PART}, "rope_type=proportional is not supported"),
    ("ministral3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "but yarn is needed"),
    (
        "ministral3",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
        "llama_4_scaling_beta is missing, but a number is needed",
    ),
    ("mistral", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, **_GROWTH}}, "llama_4_scaling_beta=0.1"),
    ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers=[1, 0] must list 1, or 0"),
    ("llama", {"no_rope_layers": [1, 0, 1]}, "no_rope_layers=[1, 0, 1] is not supported in a llama model"),
    ("deepseek", {"head_dim": 16}, "head_dim=16 contradicts qk_rope_head_dim=4"),
    ("deepseek", {"num_key_value_heads": 2}, "num_key_value_heads=2 contradicts num_attention_heads=4"),
    ("gpt-oss", {"num_experts": 2}, "num_local_experts=3 contradicts num_experts=2, its other name"),
    ("gpt-oss", {"is_causal": False}, "is_causal must be true"),
    ("qwen3", {"rope_theta": 5.0}, "rope_parameters has rope_theta=1000000.0, but config.json has rope_theta=5.0"),
    (
        "llama",
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        "rope_parameters has rope_type='llama3', but rope_scaling has rope_type='linear'",
    ),
    ("gemma3", {"rope_theta": 5.0}, "rope_parameters has rope_theta=1000000.0, but config.json has rope_theta=5.0"),
    ("gemma3", {"rope_local_base_freq": 5.0}, "has rope_theta=10000.0, but config.json has rope_theta=5.0"),
    ("gemma3", {"rope_parameters": {"rope_theta": 5.0}}, "rope_parameters must have full_attention and sliding_atten"),
]


@pytest.mark.fault(
    "folders",
    "a config.json with a field that changes the function, or two that contradict each other",
    happens="refused by name before anything is read",
    exit_code=3,
)
@pytest.mark.parametrize(
    ("name", "changes", "reported"), FOREIGN, ids=[f"{name}-{next(iter(c))}" for name, c, _ in FOREIGN]
)
def test_what_is_not_computed_is_refused_by_name(
    name: str, changes: dict[str, Any], reported: str, notice: Notice
) -> None:
    config = base(name) | changes
    with notice, pytest.raises(DataError) as refused:
        family_of(config).model(config)
    assert reported in str(refused.value)
    assert refused.value.exit_code == notice.exit_code


def test_what_says_the_same_twice_is_read() -> None:
    qwen = base("qwen3")
    said = dict(qwen["rope_parameters"])
    again = qwen | {"rope_theta": said.pop("rope_theta"), "rope_scaling": said}
    assert ours(again) == ours(qwen)
    assert ours(base("gpt-oss") | {"num_experts": 3, "experts_per_token": 2}) == ours(base("gpt-oss"))


TYPES: list[tuple[dict[str, Any], str]] = [
    ({"hidden_size": "64"}, "hidden_size='64' is a string, but an integer is needed"),
    ({"num_hidden_layers": True}, "num_hidden_layers=True is true or false, but an integer is needed"),
    ({"vocab_size": 57.0}, "vocab_size=57.0 is a number, but an integer is needed"),
    ({"rms_norm_eps": "1e-6"}, "rms_norm_eps='1e-6' is a string, but a number is needed"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan is a number, but a number is needed"),
    ({"tie_word_embeddings": 1}, "tie_word_embeddings=1 is an integer, but true or false is needed"),
    ({"attention_bias": "false"}, "attention_bias='false' is a string, but true or false is needed"),
    ({"num_attention_heads": None}, "num_attention_heads is null, but an integer is needed"),
    ({"head_dim": [16]}, "head_dim=[16] is a list, but an integer is needed"),
    ({"rope_parameters": "default"}, "rope_parameters='default' is a string, but an object is needed"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": "1e4"}}, "rope_theta='1e4' is a string, but a number"),
    ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1.0, "factor": True}}, "factor=True is true or false"),
    ({"rope_parameters": {"rope_type": ["linear"], "rope_theta": 1.0}}, "rope_type=['linear'] is a list, but a string"),
    (
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "original_max_position_embeddings": 0}},
        "rope.original_max_positions: input should be greater than 0",
    ),
    ({"model_type": ["llama"]}, "model_type=['llama'] is not supported"),
]


@pytest.mark.fault(
    "folders",
    'a value of another type in config.json ("64", true, 64.0 for an integer)',
    happens="the field, its value and the needed type are named",
    exit_code=3,
)
@pytest.mark.parametrize(("changes", "reported"), TYPES, ids=[f"{n}-{next(iter(c))}" for n, (c, _) in enumerate(TYPES)])
def test_a_value_of_another_type_is_refused(changes: dict[str, Any], reported: str, notice: Notice) -> None:
    config = base("llama") | changes
    with notice, pytest.raises(DataError) as refused:
        family_of(config).model(config)
    assert reported in str(refused.value)
    assert refused.value.exit_code == notice.exit_code


def test_fields_of_tomorrow_are_kept_and_named() -> None:
    config = base("llama") | {"a_field_of_tomorrow": {"x": 1}, "another": None, "use_mrope": False}
    family = family_of(config)
    assert family.config(family.model(config), config) == config
    assert unknown_fields(config) == ["a_field_of_tomorrow"]
