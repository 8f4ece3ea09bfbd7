"""Names and shapes of a model's tensors in forward order."""

from collections.abc import Iterator

from mtrain.config.schema.model import ModelSection
from mtrain.verify.reference.model.attention import kind_of
from mtrain.verify.reference.model.attention_kind import Shape, linear_shapes, norm_shapes
from mtrain.verify.reference.model.experts import EXPERT_SCALE, GATE, INPUT_SCALE
from mtrain.verify.reference.model.images import TOWER, tower_of

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
EXPERT_BIAS = "router.expert_bias"
"""Suffix of tensors that are in the model's state but have no gradient."""
LAYER_SCALAR = ".scalar"
"""Suffix of factors of a layer's output, which have no gradient either."""
UNTRAINED = (EXPERT_BIAS, LAYER_SCALAR)


def has_experts(model: ModelSection, layer: int) -> bool:
    """Says whether this layer has experts: by its letter in the pattern, or every n-th layer after the dense ones."""
    if model.layer_pattern is not None:
        return model.layer_pattern[layer] == "E"
    section = model.experts
    if section is None or layer < section.first_dense_layers:
        return False
    return (layer - section.first_dense_layers) % section.every == 0


def has_branches(model: ModelSection, layer: int) -> bool:
    """Says whether shared and chosen experts of this layer have separate norms."""
    return has_experts(model, layer) and model.experts is not None and model.experts.branch_norms


def has_network(model: ModelSection, layer: int) -> bool:
    """Says whether this layer has a feed-forward part, dense or with experts."""
    return model.layer_pattern is None or model.layer_pattern[layer] in "-E"


def layers(model: ModelSection) -> dict[str, int]:
    """Returns the number of each transformer layer by name; an MTP layer has the number of a layer of its kind."""
    decoder = {f"decoder.layers.{number}": number for number in range(model.num_layers)}
    ahead = {f"mtp.layers.{depth}.transformer_layer": layer for depth, layer in enumerate(model.layers_ahead)}
    return decoder | ahead


def shapes_of(model: ModelSection) -> dict[str, Shape]:
    """Returns the shapes of all tensors by name, tables without vocabulary padding."""
    return dict(_tensors(model))


def _tensors(model: ModelSection) -> Iterator[tuple[str, Shape]]:
    hidden, table = model.hidden_size, (model.vocab_size, model.hidden_size)
    yield EMBEDDING, table
    if model.vision is not None:
        for name, tensor in tower_of(model).state_dict().items():  # buffers too, which files hold
            yield f"{TOWER}{name}", tuple(tensor.shape)
    for name, number in layers(model).items():
        depth = name.removesuffix(".transformer_layer")
        if depth != name:
            yield from norm_shapes(f"{depth}.enorm", hidden, model)
            yield from norm_shapes(f"{depth}.hnorm", hidden, model)
            yield f"{depth}.eh_proj.weight", (hidden, 2 * hidden)
        yield from _layer(name, number, model)
        if depth != name:
            yield from norm_shapes(f"{depth}.final_layernorm", hidden, model)
        elif number == model.num_layers - 1:
            yield from norm_shapes("decoder.final_layernorm", hidden, model)
    if not model.tied_embeddings:
        yield OUTPUT, table


def _layer(name: str, number: int, model: ModelSection) -> Iterator[tuple[str, Shape]]:
    hidden, kind = model.hidden_size, kind_of(model, number)
    if kind is not None:
        if not model.post_norm:
            yield from norm_shapes(f"{name}.input_layernorm", hidden, model)
        yield from kind.shapes(f"{name}.self_attention", model)
    if not has_network(model, number):
        return
    if model.sandwich_norm or model.post_norm:
        yield from norm_shapes(f"{name}.post_self_attn_layernorm", hidden, model)
    if not model.post_norm and not has_branches(model, number):
        yield from norm_shapes(f"{name}.pre_mlp_layernorm", hidden, model)
    if has_experts(model, number):
        yield from _experts(f"{name}.mlp", model)
    else:
        yield from _network(f"{name}.mlp", model.ffn_hidden_size, model)
    if model.sandwich_norm or model.post_norm:
        yield from norm_shapes(f"{name}.post_mlp_layernorm", hidden, model)
    if model.layer_scalar:
        yield f"{name}{LAYER_SCALAR}", (1,)


def _network(name: str, size: int, model: ModelSection) -> Iterator[tuple[str, Shape]]:
    first = 2 * size if model.is_gated else size
    yield from linear_shapes(f"{name}.linear_fc1", first, model.hidden_size, model.linear_bias)
    yield from linear_shapes(f"{name}.linear_fc2", model.hidden_size, size, model.linear_bias)


def _experts(name: str, model: ModelSection) -> Iterator[tuple[str, Shape]]:
    section = model.experts
    assert section is not None
    yield from linear_shapes(f"{name}.router", section.num_experts, model.hidden_size, section.router_bias)
    if section.expert_bias:
        yield f"{name}.{EXPERT_BIAS}", (section.num_experts,)
    if section.branch_norms:
        yield f"{name}.{INPUT_SCALE}", (model.hidden_size,)
        yield f"{name}.{EXPERT_SCALE}", (section.num_experts,)
        for branch in ("shared", "routed"):
            yield from norm_shapes(f"{name}.{branch}_input_norm", model.hidden_size, model)
            yield from norm_shapes(f"{name}.{branch}_output_norm", model.hidden_size, model)
    for expert in range(section.num_experts):
        yield from _network(f"{name}.experts.{expert}", section.ffn_hidden_size, model)
    if section.shared_ffn_hidden_size:
        yield from _network(f"{name}.shared_experts", section.shared_ffn_hidden_size, model)
    if section.shared_gate:
        yield f"{name}.{GATE}", (1, model.hidden_size)
