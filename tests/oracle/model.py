"""A decoder-only transformer as plain float64 functions of a dictionary of parameters.

It shares no code with mtrain or megatron-core, only the names and shapes of the parameters, which are those of the
whole model on one process. One call sees documents of equal length; nothing is padded and nothing is packed.
"""

import math

import torch
from torch import Tensor

from mtrain.config.schema.model import ModelSection, RopeSection
from tests.oracle import latent_attention
from tests.oracle.activations import GATED, activate
from tests.oracle.experts import expert_shapes, experts, has_experts

Parameters = dict[str, Tensor]


def parameter_shapes(model: ModelSection, padded_vocab_size: int | None = None) -> dict[str, tuple[int, ...]]:
    """Lists every parameter of the model: megatron-core's name -> global shape.

    Args:
        model: Section of the architecture.
        padded_vocab_size: Number of rows of the embedding table; None means the number of real tokens.
    """
    rows = model.vocab_size if padded_vocab_size is None else padded_vocab_size
    hidden = model.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (rows, hidden)}
    layers = {f"decoder.layers.{i}": i for i in range(model.num_layers)}
    depths = [f"mtp.layers.{k}" for k in range(model.mtp_depths)]
    for layer, i in (layers | {f"{depth}.transformer_layer": model.num_layers - 1 for depth in depths}).items():
        fc1 = model.ffn_hidden_size * (2 if model.activation in GATED else 1)
        if not model.post_norm:
            shapes |= _norm_shapes(f"{layer}.input_layernorm", hidden, model)
        any_bias = model.linear_bias
        shapes |= _attention_shapes(f"{layer}.self_attention", model)
        if model.sandwich_norm or model.post_norm:
            shapes |= _norm_shapes(f"{layer}.post_self_attn_layernorm", hidden, model)
            shapes |= _norm_shapes(f"{layer}.post_mlp_layernorm", hidden, model)
        if not model.post_norm:
            shapes |= _norm_shapes(f"{layer}.pre_mlp_layernorm", hidden, model)
        if has_experts(model, i):
            shapes |= expert_shapes(f"{layer}.mlp", model)
            continue
        shapes |= _linear_shapes(f"{layer}.mlp.linear_fc1", fc1, hidden, any_bias)
        shapes |= _linear_shapes(f"{layer}.mlp.linear_fc2", hidden, model.ffn_hidden_size, any_bias)
    shapes |= _norm_shapes("decoder.final_layernorm", hidden, model)
    for depth in depths:
        for norm in ("enorm", "hnorm", "final_layernorm"):
            shapes |= _norm_shapes(f"{depth}.{norm}", hidden, model)
        shapes[f"{depth}.eh_proj.weight"] = (hidden, 2 * hidden)
    if not model.tied_embeddings:
        shapes["output_layer.weight"] = (rows, hidden)
    return shapes


def random_parameters(model: ModelSection, seed: int, padded_vocab_size: int | None = None) -> Parameters:
    """Draws every entry of the parameters, biases and norms too, so that no term of a gradient is 0 by accident."""
    generator = torch.Generator().manual_seed(seed)
    shapes = parameter_shapes(model, padded_vocab_size)
    drawn = {name: torch.randn(shape, dtype=torch.float64, generator=generator) for name, shape in shapes.items()}
    return {
        name: _neutral(model) + 0.1 * value if "norm" in name and name.endswith("weight") else 0.2 * value
        for name, value in drawn.items()
    }


def logits_of(parameters: Parameters, model: ModelSection, tokens: Tensor) -> Tensor:
    """Computes the logits of documents of equal length, each on its own.

    Args:
        parameters: Parameters in float64, with global shapes and exactly the names of `parameter_shapes`.
        model: Section of the architecture; dropout is taken to be off.
        tokens: Token ids, [num_documents, length] int64.

    Returns:
        [num_documents, length, vocab_size] float64; rows of the table beyond the vocabulary are left out.
    """
    expected = parameter_shapes(model, padded_vocab_size=parameters["embedding.word_embeddings.weight"].shape[0])
    given = {name: tuple(value.shape) for name, value in parameters.items()}
    assert given == expected, f"parameters differ from the model's: {dict(given.items() ^ expected.items())}"
    return head(parameters, model, hidden_of(parameters, model, tokens))


def hidden_of(parameters: Parameters, model: ModelSection, tokens: Tensor) -> Tensor:
    """Computes the output layer's input, after the final norm: [num_documents, length, hidden]."""
    hidden = embed(parameters, model, tokens)
    for i in range(model.num_layers):
        hidden = transformer_layer(parameters, f"decoder.layers.{i}", model, i, hidden)
    return norm(parameters, "decoder.final_layernorm", model, hidden)


def embed(parameters: Parameters, model: ModelSection, tokens: Tensor) -> Tensor:
    """Computes the first layer's input: [..., hidden] of tokens [...]."""
    hidden = parameters["embedding.word_embeddings.weight"][tokens]
    return hidden * math.sqrt(model.hidden_size) if model.scale_embeddings else hidden


def head(parameters: Parameters, model: ModelSection, hidden: Tensor) -> Tensor:
    """Computes logits [..., vocab_size] of hidden states [..., hidden] after a final norm."""
    table = parameters["embedding.word_embeddings.weight" if model.tied_embeddings else "output_layer.weight"]
    return hidden @ table[: model.vocab_size].T


def transformer_layer(parameters: Parameters, name: str, model: ModelSection, i: int, hidden: Tensor) -> Tensor:
    """Computes the layer `name`, of the kind of layer i (from 0): [documents, length, hidden] -> the same."""
    x = hidden if model.post_norm else norm(parameters, f"{name}.input_layernorm", model, hidden)
    attended = _attention(parameters, f"{name}.self_attention", model, i, x)
    hidden = hidden + _norm_after(parameters, f"{name}.post_self_attn_layernorm", model, attended)
    x = hidden if model.post_norm else norm(parameters, f"{name}.pre_mlp_layernorm", model, hidden)
    transformed = (experts if has_experts(model, i) else _mlp)(parameters, f"{name}.mlp", model, x)
    return hidden + _norm_after(parameters, f"{name}.post_mlp_layernorm", model, transformed)


def _attention_shapes(name: str, model: ModelSection) -> dict[str, tuple[int, ...]]:
    if model.mla is not None:
        return latent_attention.shapes(name, model)
    hidden, head = model.hidden_size, model.head_size
    rows, columns = (model.num_attention_heads + 2 * model.query_groups) * head, model.num_attention_heads * head
    shapes = _linear_shapes(f"{name}.linear_qkv", rows, hidden, model.linear_bias or model.qkv_bias)
    if model.qk_norm:
        widths = (columns, model.query_groups * head) if model.qk_norm_width == "full" else (head, head)
        for kind, width in zip("qk", widths, strict=True):
            shapes |= _norm_shapes(f"{name}.{kind}_layernorm", width, model)
    if model.attention_sinks:
        shapes[f"{name}.core_attention.softmax_offset"] = (model.num_attention_heads,)
    return shapes | _linear_shapes(f"{name}.linear_proj", hidden, columns, model.linear_bias)


def _norm_shapes(name: str, size: int, model: ModelSection) -> dict[str, tuple[int, ...]]:
    weight: dict[str, tuple[int, ...]] = {f"{name}.weight": (size,)}
    return weight | {f"{name}.bias": (size,)} if model.norm == "layernorm" else weight


def _linear_shapes(name: str, rows: int, columns: int, bias: bool) -> dict[str, tuple[int, ...]]:
    weight: dict[str, tuple[int, ...]] = {f"{name}.weight": (rows, columns)}
    return weight | {f"{name}.bias": (rows,)} if bias else weight


def norm(parameters: Parameters, name: str, model: ModelSection, x: Tensor) -> Tensor:
    """Applies RMSNorm or LayerNorm over the last axis."""
    if model.norm == "layernorm":
        x = x - x.mean(-1, keepdim=True)
    factor = parameters[f"{name}.weight"] + (1.0 - _neutral(model))
    scaled = x / torch.sqrt(x.square().mean(-1, keepdim=True) + model.norm_epsilon) * factor
    return scaled + parameters[f"{name}.bias"] if model.norm == "layernorm" else scaled


def _neutral(model: ModelSection) -> float:
    """Returns the weight with which a norm scales by 1."""
    return 0.0 if model.zero_centered_norm else 1.0


def _norm_after(parameters: Parameters, name: str, model: ModelSection, x: Tensor) -> Tensor:
    """Applies the norm after a part of a layer, where the model has one."""
    return norm(parameters, name, model, x) if model.sandwich_norm or model.post_norm else x


def _linear(parameters: Parameters, name: str, x: Tensor) -> Tensor:
    product = x @ parameters[f"{name}.weight"].T
    return product + parameters[f"{name}.bias"] if f"{name}.bias" in parameters else product


def _attention(parameters: Parameters, name: str, model: ModelSection, layer_index: int, x: Tensor) -> Tensor:
    """Computes causal grouped-query attention, written out: [documents, length, hidden] -> the same."""
    if model.mla is not None:
        return latent_attention.attention(parameters, name, model, x, lambda part: _rotated(part, model))
    documents, length, _ = x.shape
    groups, head = model.query_groups, model.head_size
    queries_per_group = model.num_attention_heads // groups
    qkv = _linear(parameters, f"{name}.linear_qkv", x).view(documents, length, groups, queries_per_group + 2, head)
    query, key, value = qkv[..., :-2, :], qkv[..., -2, :].unsqueeze(3), qkv[..., -1, :].unsqueeze(3)
    if model.qk_norm:
        query = _head_norm(parameters, f"{name}.q_layernorm", model, query)
        key = _head_norm(parameters, f"{name}.k_layernorm", model, key)
    window = None if _sees_everything(model, layer_index) else model.sliding_window
    rope = model.rope
    if window is not None and rope.local_base is not None:
        rope = RopeSection(base=rope.local_base)
    if _is_rotated(model, layer_index):
        query, key = rotate(query, rope), rotate(key, rope)
    scores = torch.einsum("dqghe,dkgoe->dghqk", query, key) / math.sqrt(model.query_scalar or head)
    scores = scores.masked_fill(~_visible(length, window), -math.inf)
    if model.attention_sinks:  # one more column, without a value
        sinks = parameters[f"{name}.core_attention.softmax_offset"].view(1, groups, queries_per_group, 1, 1)
        scores = torch.cat([scores, sinks.expand(documents, -1, -1, length, 1)], dim=-1)
    probabilities = scores.softmax(-1)[..., :length]
    context = torch.einsum("dghqk,dkgoe->dqghe", probabilities, value)
    return _linear(
        parameters, f"{name}.linear_proj", context.reshape(documents, length, model.num_attention_heads * head)
    )


def _head_norm(parameters: Parameters, name: str, model: ModelSection, heads: Tensor) -> Tensor:
    """Applies the norm of [documents, length, groups, heads, size]: to each head, or to all as one vector."""
    if model.qk_norm_width == "full":
        return norm(parameters, name, model, heads.reshape(*heads.shape[:2], -1)).reshape(heads.shape)
    return norm(parameters, name, model, heads)


def _rotated(part: Tensor, model: ModelSection) -> Tensor:
    """Applies `rotate` to [documents, length, heads, size]."""
    return rotate(part.unsqueeze(3), model.rope).squeeze(3)


def _sees_everything(model: ModelSection, layer_index: int) -> bool:
    """Says whether the layer (counted from 0) is one of every n-th that have no sliding window."""
    return model.global_attention_every is not None and (layer_index + 1) % model.global_attention_every == 0


def _is_rotated(model: ModelSection, layer_index: int) -> bool:
    """Says whether layer `layer_index` (from 0) rotates: not every n-th for no_rope_freq = n, nor those marked 1."""
    pattern = model.megatron.get("no_rope_freq")
    if isinstance(pattern, list):
        return not pattern[layer_index]
    return pattern is None or (layer_index + 1) % pattern != 0


def _visible(length: int, window: int | None) -> Tensor:
    """Returns [length, length] bool: query i sees key j where 0 <= i - j < window."""
    distance = torch.arange(length).unsqueeze(1) - torch.arange(length).unsqueeze(0)
    return (distance >= 0) & (distance < (length if window is None else window))


def _mlp(parameters: Parameters, name: str, model: ModelSection, x: Tensor) -> Tensor:
    projected = _linear(parameters, f"{name}.linear_fc1", x)
    return _linear(parameters, f"{name}.linear_fc2", activate(model.activation, projected))


def rotate(x: Tensor, rope: RopeSection) -> Tensor:
    """Rotates the pairs (i, i + head_dim / 2) by position x frequency, as complex numbers.

    Args:
        x: Vectors [documents, length, groups, heads, head_dim]; positions count from 0.
        rope: Section with base and scaling.
    """
    length, half = x.shape[1], x.shape[-1] // 2
    angles = torch.outer(torch.arange(length, dtype=torch.float64), _frequencies(rope, 2 * half)).view(
        length, 1, 1, half
    )
    rotations = torch.polar(torch.full_like(angles, _magnitude(rope)), angles)
    rotated = torch.complex(x[..., :half].contiguous(), x[..., half:].contiguous()) * rotations
    return torch.cat([rotated.real, rotated.imag], dim=-1)


def _frequencies(rope: RopeSection, head_dim: int) -> Tensor:
    """Returns [head_dim / 2] radians per position, one dimension pair at a time from the papers' formulas."""
    return torch.tensor([_frequency(rope, head_dim, i) for i in range(head_dim // 2)], dtype=torch.float64)


def _frequency(rope: RopeSection, head_dim: int, pair: int) -> float:
    theta = math.pow(rope.base, -2.0 * pair / head_dim)
    turns = rope.original_max_positions * theta / (2 * math.pi)  # over the original context
    match rope.scaling:
        case "none":
            kept = 1.0
        case "linear":
            kept = 0.0
        case "llama3":
            kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        case "yarn":
            # the ramp is linear in the pair's index between the pairs that rotate beta_fast and beta_slow times
            first, last = (_pair_of_turns(beta, rope, head_dim) for beta in (rope.beta_fast, rope.beta_slow))
            if rope.truncate:
                first, last = math.floor(first), math.ceil(last)
            first, last = max(first, 0), min(last, head_dim - 1)
            kept = 1.0 - (pair - first) / (last - first if last != first else 0.001)
    kept = min(max(kept, 0.0), 1.0)
    return theta * (kept + (1.0 - kept) / rope.factor)


def _pair_of_turns(turns: float, rope: RopeSection, head_dim: int) -> float:
    """Solves original_max_positions x base^(-2 pair / head_dim) = 2 pi turns for the pair."""
    return head_dim / 2 * math.log(rope.original_max_positions / (2 * math.pi * turns), rope.base)


def _magnitude(rope: RopeSection) -> float:
    """Returns the factor of cos and sin."""
    if rope.scaling != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    above, below = (1.0, 0.0) if rope.mscale is None else (rope.mscale, rope.mscale_all_dim or 0.0)
    return (1.0 + 0.1 * above * math.log(rope.factor)) / (1.0 + 0.1 * below * math.log(rope.factor))
