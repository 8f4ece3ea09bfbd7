"""Multi-token prediction, one document at a time and without padding tokens.

Depth k of a document of n tokens has n - k positions: position i joins the output of depth k - 1 there with the
embedding of token i + k, and predicts the label of position i + k. Nothing is shifted in place, padded or masked.

Source: DeepSeek-V3 report (2024), section 2.2, equations 21 to 25, with the concatenation in the order of the published
weights: embedding first.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mtrain.config.schema.model import ModelSection
from tests.oracle import routers
from tests.oracle.model import Parameters, embed, head, hidden_of, norm, transformer_layer


class Depth(NamedTuple):
    """One depth of a sequence, document after document; both [number of its positions in all documents]."""

    losses: Tensor
    """Cross entropy in nats, finite where the weight is 0."""
    weights: Tensor
    """Weight of the label that each position predicts."""


class Further(NamedTuple):
    """Multi-token prediction of a sequence."""

    depths: list[Depth]
    routers: routers.Routers
    """What the routers of the depths see, document after document."""


def further(
    parameters: Parameters,
    model: ModelSection,
    documents: list[Tensor],
    targets: list[tuple[Tensor, ...]],
) -> Further:
    """Computes every depth of a sequence.

    Args:
        parameters: Parameters in float64, with global shapes.
        model: Section of the architecture.
        documents: Tokens [length] of each document.
        targets: Labels and weights [length] of each document.
    """
    if model.mtp_depths == 0:
        return Further([], {})
    by_document = [
        _document(parameters, model, tokens, *target) for tokens, target in zip(documents, targets, strict=True)
    ]
    names = dict.fromkeys(name for document in by_document for name in document.routers)
    return Further(
        [
            Depth(torch.cat([depth.losses for depth in depths]), torch.cat([depth.weights for depth in depths]))
            for depths in zip(*[document.depths for document in by_document], strict=True)
        ],
        {
            name: routers.Seen(
                *map(torch.cat, zip(*[each.routers[name] for each in by_document if name in each.routers], strict=True))
            )
            for name in names
        },
    )


def _document(parameters: Parameters, model: ModelSection, tokens: Tensor, labels: Tensor, weights: Tensor) -> Further:
    hidden = hidden_of(parameters, model, tokens.unsqueeze(0))
    found: list[Depth] = []
    seen: routers.Routers = {}
    for k in range(1, min(model.mtp_depths, len(tokens) - 1) + 1):
        with routers.recorded() as of_depth:
            hidden = _depth(parameters, f"mtp.layers.{k - 1}", model, hidden[:, : len(tokens) - k], tokens[k:])
        seen |= {name: routers.Seen(each.logits[0], each.chosen[0]) for name, each in of_depth.items()}
        kept = weights[k:]
        probabilities = head(parameters, model, hidden)[0].log_softmax(-1)
        targets = torch.where(kept > 0, labels[k:], 0)
        losses = -probabilities.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        found.append(Depth(torch.where(kept > 0, losses, 0.0), kept))
    nothing = Depth(weights[:0], weights[:0])
    return Further(found + [nothing] * (model.mtp_depths - len(found)), seen)


def _depth(parameters: Parameters, name: str, model: ModelSection, hidden: Tensor, tokens: Tensor) -> Tensor:
    """Maps [1, positions, hidden] of the depth before and the tokens [positions] ahead to [1, positions, hidden]."""
    embeddings = embed(parameters, model, tokens.unsqueeze(0))
    joined = torch.cat(
        [norm(parameters, f"{name}.enorm", model, embeddings), norm(parameters, f"{name}.hnorm", model, hidden)], dim=-1
    )
    projected = joined @ parameters[f"{name}.eh_proj.weight"].T
    output = transformer_layer(parameters, f"{name}.transformer_layer", model, model.num_layers - 1, projected)
    return norm(parameters, f"{name}.final_layernorm", model, output)
