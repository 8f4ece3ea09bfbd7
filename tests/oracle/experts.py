"""Layers of experts, token by token from their definitions, in float64."""

import math

import torch
from torch import Tensor

from mtrain.config.schema.experts import ExpertsSection
from mtrain.config.schema.model import ModelSection
from tests.oracle import routers
from tests.oracle.activations import GATED, activate

Shapes = dict[str, tuple[int, ...]]
Parameters = dict[str, Tensor]


def has_experts(model: ModelSection, layer: int) -> bool:
    """Says whether layer `layer`, counted from 0, has experts: every n-th after the first dense ones."""
    section = model.experts
    if section is None or layer < section.first_dense_layers:
        return False
    return (layer - section.first_dense_layers) % section.every == 0


def is_buffer(name: str) -> bool:
    """Says whether a tensor belongs to the model's state without being trained: it has no gradient."""
    return name.endswith(".expert_bias")


def expert_shapes(name: str, model: ModelSection) -> Shapes:
    """Lists the parameters of the layer `name`, such as `decoder.layers.1.mlp`, with the bias of the choice."""
    section = model.experts
    assert section is not None
    hidden, count = model.hidden_size, section.num_experts
    shapes: Shapes = {f"{name}.router.weight": (count, hidden)}
    if section.router_bias:
        shapes[f"{name}.router.bias"] = (count,)
    if section.expert_bias:
        shapes[f"{name}.router.expert_bias"] = (count,)
    for expert in range(count):
        shapes |= _network(f"{name}.experts.{expert}", section.ffn_hidden_size, model)
    if section.shared_ffn_hidden_size:
        shapes |= _network(f"{name}.shared_experts", section.shared_ffn_hidden_size, model)
    return shapes


def _network(name: str, size: int, model: ModelSection) -> Shapes:
    rows = size * (2 if model.activation in GATED else 1)
    shapes: Shapes = {f"{name}.linear_fc1.weight": (rows, model.hidden_size)}
    shapes[f"{name}.linear_fc2.weight"] = (model.hidden_size, size)
    if model.linear_bias:
        shapes |= {f"{name}.linear_fc1.bias": (rows,), f"{name}.linear_fc2.bias": (model.hidden_size,)}
    return shapes


def experts(parameters: Parameters, name: str, model: ModelSection, x: Tensor) -> Tensor:
    """Computes the layer's output: [..., hidden] -> the same."""
    section = model.experts
    assert section is not None
    tokens = x.reshape(-1, x.shape[-1])
    weights = routing(parameters, f"{name}.router", section, tokens)
    logits = router_logits(parameters, f"{name}.router", tokens)
    routers.note(f"{name}.router", logits.reshape(*x.shape[:-1], -1), (weights != 0).reshape(*x.shape[:-1], -1))
    every = [_run(parameters, f"{name}.experts.{expert}", model, tokens) for expert in range(section.num_experts)]
    output = torch.einsum("te,teh->th", weights, torch.stack(every, dim=1))
    if section.shared_ffn_hidden_size:
        output = output + _run(parameters, f"{name}.shared_experts", model, tokens)
    return output.view(x.shape)


def _run(parameters: Parameters, name: str, model: ModelSection, x: Tensor) -> Tensor:
    def linear(which: str, value: Tensor) -> Tensor:
        product = value @ parameters[f"{name}.{which}.weight"].T
        return product + parameters[f"{name}.{which}.bias"] if model.linear_bias else product

    return linear("linear_fc2", activate(model.activation, linear("linear_fc1", x)))


def routing(parameters: Parameters, name: str, section: ExpertsSection, tokens: Tensor) -> Tensor:
    """Returns [tokens, num_experts]: the weight of each expert; 0 for those that the token is not sent to."""
    logits = router_logits(parameters, name, tokens)
    ranking = _ranking(logits, parameters.get(f"{name}.expert_bias"), section)
    routers.note_margin(ranking, _margin(ranking.detach(), section))
    outside = ~_best(ranking, section)
    if section.score == "sigmoid":
        scores = logits.sigmoid().masked_fill(outside, 0.0)
        weights = scores / scores.sum(-1, keepdim=True) if section.top_k > 1 else scores
    elif section.pre_softmax:
        weights = logits.softmax(-1).masked_fill(outside, 0.0)
    else:
        weights = logits.masked_fill(outside, -math.inf).softmax(-1)
    return weights * section.scaling_factor


def router_logits(parameters: Parameters, name: str, tokens: Tensor) -> Tensor:
    """Returns the router's logits, [tokens, num_experts]."""
    logits = tokens @ parameters[f"{name}.weight"].T
    return logits + parameters[f"{name}.bias"] if f"{name}.bias" in parameters else logits


def _ranking(logits: Tensor, expert_bias: Tensor | None, section: ExpertsSection) -> Tensor:
    """Returns the values by which a token's experts are ordered."""
    softmax = logits.softmax(-1) if section.pre_softmax else logits
    scores = logits.sigmoid() if section.score == "sigmoid" else softmax
    return scores if expert_bias is None else scores + expert_bias


def _best(ranking: Tensor, section: ExpertsSection) -> Tensor:
    """Returns [tokens, num_experts] bool: the experts of each token."""
    return _open(ranking, section) & _highest(_closed_out(ranking, section), section.top_k)


def _open(ranking: Tensor, section: ExpertsSection) -> Tensor:
    """Returns the experts of the groups that a token may choose from."""
    if section.num_groups is None or section.group_top_k is None:
        return torch.ones_like(ranking, dtype=torch.bool)
    return _highest(_group_scores(ranking, section), section.group_top_k).repeat_interleave(
        section.num_experts // section.num_groups, dim=1
    )


def _group_scores(ranking: Tensor, section: ExpertsSection) -> Tensor:
    assert section.num_groups is not None
    assert section.group_top_k is not None
    members = ranking.view(len(ranking), section.num_groups, -1).sort(-1, descending=True).values
    best = section.top_k // section.group_top_k if section.group_score_top_k is None else section.group_score_top_k
    return members[..., :best].sum(-1)


def _closed_out(ranking: Tensor, section: ExpertsSection) -> Tensor:
    return ranking.masked_fill(~_open(ranking, section), -math.inf)


def _highest(values: Tensor, count: int) -> Tensor:
    """Marks the `count` highest of each row."""
    return values >= values.sort(-1, descending=True).values[:, count - 1 : count]


def _margin(ranking: Tensor, section: ExpertsSection) -> float:
    """Returns the smallest distance, over tokens, between the last chosen value and the first that is not, of
    experts and of groups."""
    distances = [routers.distance(_closed_out(ranking, section), section.top_k)]
    if section.num_groups is not None and section.group_top_k is not None:
        distances.append(routers.distance(_group_scores(ranking, section), section.group_top_k))
    return min(distances)
