"""Phi-3 and Phi-4: Llama with queries, keys and values in one tensor, and gate and up in another."""

from __future__ import annotations

from mtrain.hf.schema.config import Field, Required, Rope, heads
from mtrain.hf.schema.families.common import (
    ACTIVATION,
    KEY,
    NORMS,
    THEIRS,
    VOCABULARY,
    by_group,
    common,
    in_layer,
)
from mtrain.hf.schema.family import Family
from mtrain.hf.schema.table import Rule, TensorPattern

# the whole as a region: rows of an adapter's B also have this order
_QKV = TensorPattern(f"{THEIRS}self_attn.qkv_proj.weight", "", region="(G s d) h", pieces=by_group("weight", " h"))
PHI3 = Family(
    "phi3",
    "Phi3ForCausalLM",
    (
        *common(norm_epsilon=1e-5),
        *ACTIVATION,
        *heads(),
        Field("sliding_window", "sliding_window"),
        # dropout on what attention and the feed-forward part add, which transformers draws in training
        Required("resid_pdrop", 0.0, 0.0),
        Required("embd_pdrop", 0.0, 0.0),
        # any other type is read as longrope, or refused
        Rope(is_scaled=False),
    ),
    (
        *VOCABULARY,
        *NORMS,
        Rule(f"{KEY}self_attention.linear_qkv.weight", "(G s d) h", (_QKV,)),
        in_layer("self_attention.linear_proj.weight", "self_attn.o_proj.weight", "h (H d)"),
        Rule(
            f"{KEY}mlp.linear_fc1.weight",
            "(c f) h",
            (TensorPattern(f"{THEIRS}mlp.gate_up_proj.weight", "(c f) h"),),
        ),
        in_layer("mlp.linear_fc2.weight", "mlp.down_proj.weight", "h f"),
    ),
)
