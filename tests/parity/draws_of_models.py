"""Random small models for the property search: attention, feed-forward parts and depths in all combinations."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

BASE = 300.0
"""Base of the rotary embedding: low enough that positions of a short row differ in every pair."""


class Kind(NamedTuple):
    """Properties of a model that matter for layouts and losses."""

    has_experts: bool = False
    is_latent: bool = False
    has_delta_nets: bool = False
    has_wide_heads: bool = False
    linear_bias: bool = False
    mtp_depths: int = 0


PLAIN: SearchStrategy[Kind] = st.booleans().map(lambda linear_bias: Kind(linear_bias=linear_bias))


@st.composite
def every_kind(draw: DrawFn) -> Kind:
    """Draws each part alone and in combination."""
    is_latent, has_experts = draw(st.sampled_from([False, False, True])), draw(st.booleans())
    if not is_latent and draw(st.sampled_from([False, False, True])):
        return Kind(has_experts=has_experts, has_wide_heads=True)
    return Kind(
        has_experts=has_experts,
        is_latent=is_latent,
        has_delta_nets=not is_latent and draw(st.booleans()),
        linear_bias=not is_latent and draw(st.booleans()),
        mtp_depths=draw(st.sampled_from([0, 0, 1, 2])),
    )


@st.composite
def architectures(draw: DrawFn, degrees: dict[str, Any], kind: Kind) -> dict[str, Any]:
    """Draws a small model whose heads, columns and layers divide over the layout, with odd sizes elsewhere."""
    num_layers = sum(degrees.get("stage_layers", ())) or draw(st.sampled_from([1, 2, 3]))
    shape = {
        "num_layers": num_layers,
        "hidden_size": 12 * draw(st.sampled_from([1, 2])),
        "ffn_hidden_size": degrees["tp"] * draw(st.sampled_from([5, 12])),
        "vocab_size": draw(st.sampled_from([17, 61, 64])),
        "vocab_multiple": draw(st.sampled_from([1, 5, 24])),
        "tied_embeddings": draw(st.booleans()),
        "scale_embeddings": draw(st.booleans()),
        "linear_bias": kind.linear_bias,
        "norm": draw(st.sampled_from(["rmsnorm", "layernorm"])),
        "zero_centered_norm": draw(st.booleans()),
        **draw(st.sampled_from([{}, {"sandwich_norm": True}, {"post_norm": True}])),
        "activation": draw(st.sampled_from(["swiglu", "gelu", "gelu_tanh", "geglu_tanh", "swiglu_clamped"])),
        "mtp_depths": kind.mtp_depths,
        **draw(attention_of(degrees, kind)),
        "logit_softcap": draw(st.sampled_from([None, None, 3.0])),
        "delta_net": draw(delta_net(degrees, kind, num_layers)) if kind.has_delta_nets else None,
        # the norm after a delta net divides a document's first outputs, which may be near 0, by sqrt(epsilon) at least
        "norm_epsilon": 1e-2 if kind.has_delta_nets else 1e-5,
        "experts": draw(experts(degrees, kind, num_layers)) if kind.has_experts else None,
    }
    if shape.get("qk_norm") and not (shape["attention_gate"] or kind.has_wide_heads) and shape["norm"] == "rmsnorm":
        shape["qk_norm_width"] = draw(st.sampled_from(["head", "full"]))
    has_heads = not kind.is_latent and shape.get("qk_norm_width") != "full"
    shape["value_norm"] = has_heads and shape["norm"] == "rmsnorm" and draw(st.booleans())
    shape["layer_scalar"] = shape.get("sandwich_norm", False) and draw(st.booleans())
    return {f"model__{name}": value for name, value in shape.items()}


def attention_of(degrees: dict[str, Any], kind: Kind) -> SearchStrategy[dict[str, Any]]:
    """Returns the strategy of the kind's attention."""
    if kind.has_wide_heads:
        return wide_heads(degrees)
    return latent_attention(degrees) if kind.is_latent else grouped_attention(degrees, kind.has_delta_nets)


@st.composite
def wide_heads(draw: DrawFn, degrees: dict[str, Any]) -> dict[str, Any]:
    """Draws layers without a window whose heads differ in size and in number of groups, some rotated in part."""
    attention = draw(grouped_attention(degrees, has_delta_nets=False))
    heads, tp = attention["num_attention_heads"], degrees["tp"]
    groups = [number for number in range(tp, heads + 1, tp) if heads % number == 0]
    partly = {"scaling": "proportional", "partial": 0.5, "factor": draw(st.sampled_from([1.0, 3.0])), "base": BASE}
    rope = draw(st.sampled_from([attention["rope"], partly])) | {"local_base": 20.0}
    return attention | {
        "qkv_bias": False,
        "attention_gate": False,
        "attention_sinks": False,
        "rope": rope,
        "sliding_window": draw(st.sampled_from([1, 5])),
        "global_attention_every": draw(st.sampled_from([2, 3])),
        "global_attention": {
            "head_dim": draw(st.sampled_from([4, 10])),
            "num_query_groups": draw(st.sampled_from(groups)),
        },
    }


@st.composite
def grouped_attention(draw: DrawFn, degrees: dict[str, Any], has_delta_nets: bool) -> dict[str, Any]:
    """Draws heads, windows (not next to delta nets), sinks and norms of queries and keys."""
    tp = degrees["tp"]
    groups = tp * draw(st.sampled_from([1, 2]))
    is_ring = degrees.get("cp_comm") == "ring"
    window = None if is_ring or has_delta_nets else draw(st.sampled_from([None, None, 1, 5]))
    attention: dict[str, Any] = {
        "num_attention_heads": groups * rounded(degrees, groups // tp, draw(st.sampled_from([1, 2, 3]))),
        "num_query_groups": groups,
        "head_dim": draw(st.sampled_from([4, 6])),
        "qkv_bias": draw(st.booleans()),
        "qk_norm": draw(st.booleans()),
        "attention_gate": draw(st.booleans()),
        "attention_sinks": not is_ring and draw(st.booleans()),
        "query_scalar": draw(st.sampled_from([None, None, 9.0])),
        "rope": draw(scaled_ropes()),
        "sliding_window": window,
    }
    if window is not None:
        attention["global_attention_every"] = draw(st.sampled_from([None, 2]))
        attention["rope"]["local_base"] = draw(st.sampled_from([None, 20.0]))
    return attention


@st.composite
def delta_net(draw: DrawFn, degrees: dict[str, Any], kind: Kind, num_layers: int) -> dict[str, Any] | None:
    """Draws sizes that differ, in all layers or in some; the last one has attention where depths follow it."""
    every = [n for n in (2, 3, 4) if kind.mtp_depths == 0 or num_layers % n == 0]
    if not every:
        return None
    key_heads = degrees["tp"] * draw(st.sampled_from([1, 2, 4]))
    return {
        "num_key_heads": key_heads,
        "num_value_heads": key_heads * draw(st.sampled_from([1, 2])),
        "key_head_dim": draw(st.sampled_from([6, 8])),
        "value_head_dim": draw(st.sampled_from([5, 8])),
        "conv_kernel": draw(st.sampled_from([2, 4])),
        "full_attention_every": draw(st.sampled_from(every)),
    }


@st.composite
def latent_attention(draw: DrawFn, degrees: dict[str, Any]) -> dict[str, Any]:
    """Draws ranks and sizes of heads that differ."""
    return {
        "num_attention_heads": degrees["tp"] * rounded(degrees, 1, draw(st.sampled_from([1, 2, 3]))),
        "num_query_groups": None,
        "mla": {
            "q_lora_rank": draw(st.sampled_from([None, 7])),
            "kv_lora_rank": draw(st.sampled_from([5, 8])),
            "qk_nope_head_dim": draw(st.sampled_from([3, 6])),
            "qk_rope_head_dim": draw(st.sampled_from([2, 4])),
            "v_head_dim": draw(st.sampled_from([3, 7])),
        },
        "rope": draw(scaled_ropes()) | {"interleaved": draw(st.booleans())},
    }


def rounded(degrees: dict[str, Any], others: int, heads: int) -> int:
    """Rounds `heads` up to a multiple whose product with `others` divides over cp, where that is needed."""
    if degrees.get("cp_comm") != "ulysses":
        return heads
    cp: int = degrees["cp"]
    return heads * (cp // math.gcd(others * heads, cp))


@st.composite
def scaled_ropes(draw: DrawFn) -> dict[str, Any]:
    """Draws bases and every scaling, over contexts so short that all bands occur."""
    scaling = draw(st.sampled_from(["none", "none", "linear", "llama3", "yarn"]))
    rope: dict[str, Any] = {"base": BASE, "scaling": scaling}
    if scaling != "none":
        rope |= {"factor": 4.0, "original_max_positions": 16}
    if scaling == "yarn":
        rope |= {"beta_fast": 4.0, "truncate": draw(st.booleans())}
        rope |= draw(st.sampled_from([{}, {"mscale": 0.7, "mscale_all_dim": 1.2}, {"attention_factor": 1.3}]))
    return rope


@st.composite
def experts(draw: DrawFn, degrees: dict[str, Any], kind: Kind, num_layers: int) -> dict[str, Any]:
    """Draws routers of every score, with biases and groups; experts that divide over ep and etp; shared and dense
    ones."""
    ep, etp, tp = degrees["ep"], degrees["etp"], degrees["tp"]
    count = ep * draw(st.sampled_from([n for n in (1, 2, 3) if 2 <= n * ep <= 12]))
    score = draw(st.sampled_from(["softmax", "sigmoid"]))
    pre_softmax = score == "softmax" and draw(st.booleans())
    least = 2 if score == "softmax" and not pre_softmax else 1
    top_k = draw(st.integers(least, max(least, min(count, 4))))
    has_bias = draw(st.booleans())
    shared = 0 if kind.linear_bias else tp * draw(st.sampled_from([0, 4]))
    has_gate = shared > 0 and draw(st.booleans())
    return {
        "num_experts": count,
        "top_k": top_k,
        "ffn_hidden_size": etp * draw(st.sampled_from([3, 8])),
        "shared_ffn_hidden_size": shared,
        "shared_gate": has_gate,
        "branch_norms": shared > 0 and not has_gate and draw(st.booleans()),
        "first_dense_layers": draw(st.integers(0, min(1, num_layers - 1))),
        "every": draw(st.sampled_from([1, 1, 2])),
        "score": score,
        "pre_softmax": pre_softmax,
        "scaling_factor": draw(st.sampled_from([1.0, 2.5])),
        "router_bias": draw(st.booleans()),
        "expert_bias": has_bias,
        "bias_update_rate": draw(st.sampled_from([0.0, 0.01])) if has_bias else 0.0,
        "dispatcher": draw(st.sampled_from(["alltoall", "allgather"])),
        "implementation": draw(st.sampled_from(["auto", "sequential"])),
        **draw(st.sampled_from(groups_of(count, top_k))),
    }


def groups_of(count: int, top_k: int) -> list[dict[str, int | None]]:
    """Lists the legal groups of experts, including none."""
    shapes = [(num, top) for num in range(2, count + 1) for top in range(1, num + 1)]
    legal = [(num, top) for num, top in shapes if count % num == 0 == top_k % top and top_k <= top * (count // num)]
    pairs: list[tuple[int | None, int | None]] = [(None, None), *legal]
    return [{"num_groups": num, "group_top_k": top} for num, top in pairs]
