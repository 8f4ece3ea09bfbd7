"""Parameters of Hugging Face models, from Llama to DeepSeek and GPT-OSS, under megatron-core's names."""

from collections.abc import Mapping

import torch
from torch import Tensor

from mtrain.config.schema.model import ModelSection
from tests.reference import Parameters

_UNCHANGED = {
    "input_layernorm": "input_layernorm",
    "self_attn.q_norm": "self_attention.q_layernorm",
    "self_attn.k_norm": "self_attention.k_layernorm",
    "self_attn.o_proj": "self_attention.linear_proj",
    "self_attn.q_a_proj": "self_attention.linear_q_down_proj",
    "self_attn.q_a_layernorm": "self_attention.q_layernorm",
    "self_attn.q_b_proj": "self_attention.linear_q_up_proj",
    "self_attn.kv_a_proj_with_mqa": "self_attention.linear_kv_down_proj",
    "self_attn.kv_a_layernorm": "self_attention.kv_layernorm",
    "self_attn.kv_b_proj": "self_attention.linear_kv_up_proj",
    "post_attention_layernorm": "pre_mlp_layernorm",
    "mlp.down_proj": "mlp.linear_fc2",
    "mlp.c_fc": "mlp.linear_fc1",
    "mlp.c_proj": "mlp.linear_fc2",
}
_POST_NORMS = {
    "post_attention_layernorm": "post_self_attn_layernorm",
    "post_feedforward_layernorm": "post_mlp_layernorm",
}
_SANDWICH = {
    "post_attention_layernorm": "post_self_attn_layernorm",
    "pre_feedforward_layernorm": "pre_mlp_layernorm",
    "post_feedforward_layernorm": "post_mlp_layernorm",
}


def from_huggingface(state: Mapping[str, Tensor], model: ModelSection) -> Parameters:
    """Renames and fuses the tensors of a `...ForCausalLM.state_dict()`; dtype and values stay.

    Args:
        state: Tensors whose names start with `model.` or `lm_head.`.
        model: Our section of the same architecture.
    """
    if model.layer_pattern is not None:
        return _nemotron(state, model)
    parameters = {"embedding.word_embeddings.weight": state["model.embed_tokens.weight"]}
    for kind in ("weight", "bias"):
        if f"model.norm.{kind}" in state:
            parameters[f"decoder.final_layernorm.{kind}"] = state[f"model.norm.{kind}"]
    if not model.tied_embeddings:
        parameters["output_layer.weight"] = state["lm_head.weight"]
    for i in range(model.num_layers):
        theirs, ours = f"model.layers.{i}", f"decoder.layers.{i}"
        for kind in ("weight", "bias"):
            further = _SANDWICH if model.sandwich_norm else _POST_NORMS if model.post_norm else {}
            for their_name, our_name in {**_UNCHANGED, **further}.items():
                if f"{theirs}.{their_name}.{kind}" in state:
                    parameters[f"{ours}.{our_name}.{kind}"] = state[f"{theirs}.{their_name}.{kind}"]
            if f"{theirs}.self_attn.k_proj.{kind}" in state and model.attention(i) == "global":
                q, k = (state[f"{theirs}.self_attn.{name}_proj.{kind}"] for name in "qk")
                assert model.global_attention is not None
                groups = model.global_attention.num_query_groups
                parts = [part.view(groups, -1, *part.shape[1:]) for part in (q, k)]
                parameters[f"{ours}.self_attention.linear_qk.{kind}"] = torch.cat(parts, dim=1).flatten(0, 1)
            elif f"{theirs}.self_attn.k_proj.{kind}" in state:
                q, k, v = (state[f"{theirs}.self_attn.{name}_proj.{kind}"] for name in "qkv")
                if model.attention_gate:  # of each head first the query, then its gate
                    q = torch.stack(
                        q.unflatten(0, (model.query_groups, -1, 2, model.head_size)).unbind(2), dim=1
                    ).flatten(0, 3)
                parameters[f"{ours}.self_attention.linear_qkv.{kind}"] = _by_group(q, k, v, model)
        if f"{theirs}.linear_attn.out_proj.weight" in state:
            parameters |= _delta_net(state, f"{theirs}.linear_attn", f"{ours}.self_attention", model)
        if f"{theirs}.self_attn.qkv_proj.weight" in state:
            sizes = [number * model.head_size for number in (model.num_attention_heads, *[model.query_groups] * 2)]
            q, k, v = state[f"{theirs}.self_attn.qkv_proj.weight"].split(sizes)
            parameters[f"{ours}.self_attention.linear_qkv.weight"] = _by_group(q, k, v, model)
            parameters[f"{ours}.mlp.linear_fc1.weight"] = state[f"{theirs}.mlp.gate_up_proj.weight"]
        if f"{theirs}.self_attn.k_proj.weight" not in state and f"{theirs}.self_attn.q_proj.weight" in state:
            parameters[f"{ours}.self_attention.linear_q_proj.weight"] = state[f"{theirs}.self_attn.q_proj.weight"]
        if f"{theirs}.layer_scalar" in state:
            parameters[f"{ours}.scalar"] = state[f"{theirs}.layer_scalar"]
        if model.attention_sinks:
            parameters[f"{ours}.self_attention.core_attention.softmax_offset"] = state[f"{theirs}.self_attn.sinks"]
        if f"{theirs}.router.scale" in state:
            parameters |= _experts_next_to_a_network(state, theirs, f"{ours}.mlp")
            del parameters[f"{ours}.pre_mlp_layernorm.weight"], parameters[f"{ours}.mlp.linear_fc2.weight"]
        elif f"{theirs}.mlp.gate.weight" in state:
            parameters |= _experts(state, f"{theirs}.mlp", f"{ours}.mlp")
        elif f"{theirs}.mlp.experts.gate_up_proj_bias" in state:
            parameters |= _gpt_oss_experts(state, f"{theirs}.mlp", f"{ours}.mlp")
        elif f"{theirs}.mlp.gate_proj.weight" in state:
            gate_up = [state[f"{theirs}.mlp.{name}_proj.weight"] for name in ("gate", "up")]
            parameters[f"{ours}.mlp.linear_fc1.weight"] = torch.cat(gate_up)
    return {name: value.detach().clone() for name, value in parameters.items()}


def _experts(state: Mapping[str, Tensor], theirs: str, ours: str) -> Parameters:
    """Renames the router and the experts of a layer, which transformers keeps stacked."""
    found = {f"{ours}.router.weight": state[f"{theirs}.gate.weight"]}
    for holder in (f"{theirs}.gate", theirs):
        if f"{holder}.e_score_correction_bias" in state:
            found[f"{ours}.router.expert_bias"] = state[f"{holder}.e_score_correction_bias"]
    for shared in (f"{theirs}.shared_experts", f"{theirs}.shared_expert"):
        if f"{shared}.up_proj.weight" in state:
            gate_up = [state[f"{shared}.{name}_proj.weight"] for name in ("gate", "up")]
            found[f"{ours}.shared_experts.linear_fc1.weight"] = torch.cat(gate_up)
            found[f"{ours}.shared_experts.linear_fc2.weight"] = state[f"{shared}.down_proj.weight"]
    if f"{theirs}.shared_expert_gate.weight" in state:
        found[f"{ours}.shared_experts.gate_weight"] = state[f"{theirs}.shared_expert_gate.weight"]
    for their_name, our_name in {"gate_up_proj": "linear_fc1", "down_proj": "linear_fc2"}.items():
        for expert, weight in enumerate(state[f"{theirs}.experts.{their_name}"]):
            found[f"{ours}.experts.{expert}.{our_name}.weight"] = weight
    return found


def _experts_next_to_a_network(state: Mapping[str, Tensor], theirs: str, ours: str) -> Parameters:
    """Renames the two branches of a layer of Gemma 4, whose network is shared experts to us."""
    gate_up = [state[f"{theirs}.mlp.{name}_proj.weight"] for name in ("gate", "up")]
    found = {"shared_experts.linear_fc1.weight": torch.cat(gate_up)}
    names = {
        "mlp.down_proj.weight": "shared_experts.linear_fc2.weight",
        "pre_feedforward_layernorm.weight": "shared_input_norm.weight",
        "post_feedforward_layernorm_1.weight": "shared_output_norm.weight",
        "pre_feedforward_layernorm_2.weight": "routed_input_norm.weight",
        "post_feedforward_layernorm_2.weight": "routed_output_norm.weight",
        "router.proj.weight": "router.weight",
        "router.scale": "router.scale",
        "router.per_expert_scale": "router.per_expert_scale",
    }
    found |= {our_name: state[f"{theirs}.{their_name}"] for their_name, our_name in names.items()}
    for their_name, our_name in {"gate_up_proj": "linear_fc1", "down_proj": "linear_fc2"}.items():
        for expert, weight in enumerate(state[f"{theirs}.experts.{their_name}"]):
            found[f"experts.{expert}.{our_name}.weight"] = weight
    return {f"{ours}.{name}": each for name, each in found.items()}


def _delta_net(state: Mapping[str, Tensor], theirs: str, ours: str, model: ModelSection) -> Parameters:
    """Renames a gated delta net, and puts the rows of each key head together: query, key, values, gates, steps, decays;
    Qwen3-Next has them so in two matrices, Qwen3.5 in four whose heads follow each other."""
    net = model.delta_net
    assert net is not None
    sizes = [net.key_width, net.key_width, net.value_width]

    def by_head(*matrices: Tensor) -> Tensor:
        return torch.cat([each.view(net.num_key_heads, -1, *each.shape[1:]) for each in matrices], dim=1).flatten(0, 1)

    if f"{theirs}.in_proj_qkvz.weight" in state:
        of_net = by_head(state[f"{theirs}.in_proj_qkvz.weight"], state[f"{theirs}.in_proj_ba.weight"])
    else:
        others = [state[f"{theirs}.in_proj_{name}.weight"] for name in "zba"]
        of_net = by_head(*state[f"{theirs}.in_proj_qkv.weight"].split(sizes), *others)
    found = {"in_proj.weight": of_net, "conv1d.weight": by_head(*state[f"{theirs}.conv1d.weight"].split(sizes))}
    unchanged = {"A_log": "A_log", "dt_bias": "dt_bias", "norm.weight": "out_norm.weight"}
    for their_name, our_name in (unchanged | {"out_proj.weight": "out_proj.weight"}).items():
        found[our_name] = state[f"{theirs}.{their_name}"]
    return {f"{ours}.{name}": value for name, value in found.items()}


def _nemotron(state: Mapping[str, Tensor], model: ModelSection) -> Parameters:
    """Renames the tensors of Nemotron-H, whose layers have one norm and one mixer each."""
    found = {
        "embedding.word_embeddings.weight": state["model.embeddings.weight"],
        "decoder.final_layernorm.weight": state["model.norm_f.weight"],
        "output_layer.weight": state["lm_head.weight"],
    }
    for i, letter in enumerate(model.layer_pattern or ""):
        theirs, ours = f"model.layers.{i}.mixer", f"decoder.layers.{i}"
        norm = "input_layernorm" if letter in "M*" else "pre_mlp_layernorm"
        found[f"{ours}.{norm}.weight"] = state[f"model.layers.{i}.norm.weight"]
        mixer = {name.removeprefix(f"{theirs}."): each for name, each in state.items() if name.startswith(f"{theirs}.")}
        own: dict[str, Tensor] = {}
        match letter:
            case "M":
                own = _mamba(mixer, model)
            case "*":
                query, key, value = (mixer[f"{name}_proj.weight"] for name in "qkv")
                own = {
                    "linear_qkv.weight": _by_group(query, key, value, model),
                    "linear_proj.weight": mixer["o_proj.weight"],
                }
            case "-":
                own = {"linear_fc1.weight": mixer["up_proj.weight"], "linear_fc2.weight": mixer["down_proj.weight"]}
            case "E":
                own = {"router.weight": mixer["gate.weight"]}
                if "gate.e_score_correction_bias" in mixer:  # not among gradients
                    own["router.expert_bias"] = mixer["gate.e_score_correction_bias"]
                for their_name, our_name in {"up_proj": "linear_fc1", "down_proj": "linear_fc2"}.items():
                    own[f"shared_experts.{our_name}.weight"] = mixer[f"shared_experts.{their_name}.weight"]
                    for expert, weight in enumerate(mixer[f"experts.{their_name}"]):
                        own[f"experts.{expert}.{our_name}.weight"] = weight
        part = "self_attention" if letter in "M*" else "mlp"
        found |= {f"{ours}.{part}.{name}": each for name, each in own.items()}
    return {name: each.detach().clone() for name, each in found.items()}


def _mamba(mixer: Mapping[str, Tensor], model: ModelSection) -> Parameters:
    """Renames Mamba-2, and puts the rows of each group together: C, B, inputs, gates, steps; there each kind is of all
    groups."""
    mamba = model.mamba
    assert mamba is not None
    of_groups = mamba.num_groups * mamba.state_dim

    def by_group(*matrices: Tensor) -> Tensor:
        return torch.cat([each.view(mamba.num_groups, -1, *each.shape[1:]) for each in matrices], dim=1).flatten(0, 1)

    gate, inputs, b, c, step = mixer["in_proj.weight"].split(
        [mamba.width, mamba.width, of_groups, of_groups, mamba.num_heads]
    )
    found = {"in_proj.weight": by_group(c, b, inputs, gate, step)}
    for kind in ("weight", "bias"):
        inputs, b, c = mixer[f"conv1d.{kind}"].split([mamba.width, of_groups, of_groups])
        found[f"conv1d.{kind}"] = by_group(c, b, inputs)
    names = {"A_log": "A_log", "dt_bias": "dt_bias", "D": "D", "norm.weight": "out_norm.weight"}
    return found | {ours: mixer[theirs] for theirs, ours in (names | {"out_proj.weight": "out_proj.weight"}).items()}


def _gpt_oss_experts(state: Mapping[str, Tensor], theirs: str, ours: str) -> Parameters:
    """Renames router and experts of GPT-OSS, whose experts are stacked and transposed, with gate and up interleaved."""
    parameters = {f"{ours}.router.{kind}": state[f"{theirs}.router.{kind}"] for kind in ("weight", "bias")}
    experts = [state[f"{theirs}.experts.{name}"] for name in ("gate_up_proj", "gate_up_proj_bias")]
    experts += [state[f"{theirs}.experts.{name}"] for name in ("down_proj", "down_proj_bias")]
    for number, (gate_up, gate_up_bias, down, down_bias) in enumerate(zip(*experts, strict=True)):
        expert = f"{ours}.experts.{number}"
        parameters[f"{expert}.linear_fc1.weight"] = torch.cat([gate_up.T[::2], gate_up.T[1::2]])
        parameters[f"{expert}.linear_fc1.bias"] = torch.cat([gate_up_bias[::2], gate_up_bias[1::2]])
        parameters[f"{expert}.linear_fc2.weight"] = down.T
        parameters[f"{expert}.linear_fc2.bias"] = down_bias
    return parameters


def _by_group(query: Tensor, key: Tensor, value: Tensor, model: ModelSection) -> Tensor:
    """Returns the rows of one query group after another: its queries, its key, its value."""
    parts = [part.view(model.query_groups, -1, *part.shape[1:]) for part in (query, key, value)]
    return torch.cat(parts, dim=1).flatten(0, 1)
