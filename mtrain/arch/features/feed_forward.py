"""Feed-forward parts: dense ones, and a router with experts."""

from collections.abc import Iterator
from typing import Any, final

from mtrain.arch.features.feature import (
    SMALL_HEAD_DIM,
    AdaptedMatrix,
    LayerPart,
    Parameters,
    SmallRun,
    hidden_local,
    multiple_from,
    norm_elements,
    required,
)
from mtrain.arch.layout import Layout
from mtrain.config.schema.experts import ExpertsSection
from mtrain.config.schema.model import ModelSection


@final
class DenseFeedForward(LayerPart):
    """Two projections, three with a gate."""

    def is_in(self, model: ModelSection, layer: int) -> bool:
        return model.has_dense(layer)

    def parameters(self, model: ModelSection) -> Parameters:
        return _network(model, model.ffn_hidden_size)

    def matrix_elements(self, model: ModelSection) -> int:
        return _num_matrices(model) * model.hidden_size * model.ffn_hidden_size

    def kept_elements(self, model: ModelSection, layout: Layout) -> int:
        """Counts the elements between the projections."""
        return _num_saved_widths(model) * model.ffn_hidden_size // layout.tp

    def inner_elements(self, model: ModelSection, layout: Layout) -> int:
        return model.ffn_hidden_size // layout.tp

    def adapted(self, model: ModelSection) -> Iterator[AdaptedMatrix]:
        return _adapted(model, "mlp", model.ffn_hidden_size)

    def spared_elements(self, model: ModelSection, layout: Layout, targets: frozenset[str], on_gpu: bool) -> int:
        """Counts the input of the second projection, which is saved only for the gradient of its weight."""
        return 0 if "fc2" in targets else model.ffn_hidden_size // layout.tp

    def segments(self, model: ModelSection, linear: str, num_rows: int) -> tuple[int, ...]:
        return _segments(model, linear, num_rows)

    def module_elements(self, model: ModelSection, layout: Layout) -> dict[str, int]:
        return {"mlp": self.kept_elements(model, layout)}


@final
class ExpertFeedForward(LayerPart):
    """Router, experts and shared experts."""

    def is_in(self, model: ModelSection, layer: int) -> bool:
        return model.has_experts(layer)

    def needs_certificate(self, model: ModelSection) -> str | None:
        return None if model.experts is None else "model.experts"

    def parameters(self, model: ModelSection) -> Parameters:
        experts = required(model.experts)
        one = _network(model, experts.ffn_hidden_size)
        all_experts = Parameters(
            experts=experts.num_experts * one.divided, whole_experts=experts.num_experts * one.replicated
        )
        shared = _network(model, experts.shared_ffn_hidden_size) if experts.shared_ffn_hidden_size else Parameters()
        return router_parameters(model) + all_experts + shared + Parameters(replicated=_gate_elements(model))

    def matrices(self, model: ModelSection) -> Parameters:
        experts, of_column = required(model.experts), _num_matrices(model) * model.hidden_size
        return Parameters(
            divided=of_column * experts.shared_ffn_hidden_size,
            experts=of_column * experts.num_experts * experts.ffn_hidden_size,
        )

    def matrix_elements(self, model: ModelSection) -> int:
        experts = required(model.experts)
        width = experts.top_k * experts.ffn_hidden_size + experts.shared_ffn_hidden_size
        return model.hidden_size * (_num_matrices(model) * width + experts.num_experts) + _gate_elements(model)

    def kept_elements(self, model: ModelSection, layout: Layout) -> int:
        """Counts inputs and outputs of experts, a row for each expert of a token, or for each place of a capacity."""
        return sum(self._activation_elements(model, layout))

    def inner_elements(self, model: ModelSection, layout: Layout) -> int:
        experts = required(model.experts)
        routed = experts.rows_per_token * experts.ffn_hidden_size
        return (int(routed) + experts.shared_ffn_hidden_size) // layout.tp

    def axes(self, model: ModelSection) -> dict[str, int]:
        """Letters: E experts, e feed-forward width of an expert, t width of all shared experts together."""
        experts = required(model.experts)
        return {"E": experts.num_experts, "e": experts.ffn_hidden_size, "t": experts.shared_ffn_hidden_size}

    def adapted(self, model: ModelSection) -> Iterator[AdaptedMatrix]:
        """Yields the matrices of all experts; gate and up share their A, as in PEFT's format for experts."""
        experts, hidden = required(model.experts), model.hidden_size
        inner = experts.ffn_hidden_size
        sizes = {"fc1": (2 * inner if model.is_gated else inner, hidden), "fc2": (hidden, inner)}
        for name, (rows, columns) in sizes.items():
            yield AdaptedMatrix(
                f"mlp.experts.linear_{name}",
                "experts",
                rows,
                columns,
                num_experts=experts.num_experts,
                num_chosen=experts.top_k,
            )
        if experts.shared_ffn_hidden_size:
            yield from _adapted(model, "mlp.shared_experts", experts.shared_ffn_hidden_size)

    def segments(self, model: ModelSection, linear: str, num_rows: int) -> tuple[int, ...]:
        return _segments(model, linear, num_rows)

    def module_elements(self, model: ModelSection, layout: Layout) -> dict[str, int]:
        routed, shared = self._activation_elements(model, layout)
        return {"moe": routed + shared, "shared_experts": shared}

    def _activation_elements(self, model: ModelSection, layout: Layout) -> tuple[int, int]:
        """Returns the elements per token that routed experts save, and those that shared experts save."""
        experts, num = required(model.experts), _num_saved_widths(model)
        routed = int(experts.rows_per_token * (2 * layout.etp * model.hidden_size + num * experts.ffn_hidden_size))
        # the gate saves the output that it multiplies
        shared = num * experts.shared_ffn_hidden_size + _gate_elements(model)
        return routed // layout.tp, shared // layout.tp

    def shrunk(self, model: ModelSection, small: SmallRun) -> dict[str, Any]:
        """Makes experts few and small; keeps the kind of routing, and lets every layout divide the experts."""
        if model.experts is None:
            return {}
        experts = model.experts
        kind = {"top_k": min(experts.top_k, 2), "num_experts": 4} | _few_groups(experts)
        least, parts = max(kind["num_experts"], 2 * kind["top_k"]), [small.ep, kind.get("num_groups", 1)]
        changed = {
            **kind,
            "num_experts": multiple_from(least, parts),
            "ffn_hidden_size": multiple_from(2 * SMALL_HEAD_DIM, [small.etp]),
            "shared_ffn_hidden_size": (
                multiple_from(3 * SMALL_HEAD_DIM, [small.tp]) if experts.shared_ffn_hidden_size else 0
            ),
            "first_dense_layers": min(experts.first_dense_layers, 1),
            "every": min(experts.every, 2),
        }
        return {"experts": experts.model_dump() | changed}


@final
class BranchNorms(LayerPart):
    """Norms before and after the shared and the routed experts, and the router's scales."""

    torch_only = "model.experts.branch_norms=true"
    num_hidden_norms = 4

    def is_in(self, model: ModelSection, layer: int) -> bool:
        return model.has_branches(layer)

    def parameters(self, model: ModelSection) -> Parameters:
        """Counts the norms, the scale vector of the router's input, and one scale per expert."""
        return super().parameters(model) + Parameters(
            replicated=model.hidden_size + required(model.experts).num_experts
        )

    def norms(self, model: ModelSection) -> Parameters:
        return Parameters(replicated=4 * norm_elements(model, model.hidden_size))

    def kept_elements(self, model: ModelSection, layout: Layout) -> int:
        """Counts the outputs of the first norms, the inputs of the last ones, and the router's normalised input."""
        return 5 * hidden_local(model, layout)

    def narrow_tensors(self, model: ModelSection, layout: Layout) -> tuple[int, ...]:
        return (hidden_local(model, layout),) * 5


def _adapted(model: ModelSection, module: str, width: int) -> Iterator[AdaptedMatrix]:
    for part in ("gate_proj", "up_proj") if model.is_gated else ("up_proj",):
        yield AdaptedMatrix(f"{module}.linear_fc1", part, width, model.hidden_size)
    yield AdaptedMatrix(f"{module}.linear_fc2", "fc2", model.hidden_size, width, is_row_parallel=True)


def _segments(model: ModelSection, linear: str, num_rows: int) -> tuple[int, ...]:
    # all gate rows precede all up rows, on a rank and in the global tensor at any tp
    return (num_rows // 2, num_rows // 2) if linear == "linear_fc1" and model.is_gated else ()


def _num_saved_widths(model: ModelSection) -> int:
    """Returns the saved elements per token in multiples of the width. Our SwiGLU saves the projection, the activated
    half and the product; for other activations autograd also saves the halves."""
    if model.activation == "swiglu":
        return 4
    return 5 if model.is_gated else 2


def router_parameters(model: ModelSection) -> Parameters:
    """Counts the router's parameters: a row, and possibly a bias, per expert."""
    experts = required(model.experts)
    return Parameters(replicated=experts.num_experts * (model.hidden_size + experts.router_bias))


def _gate_elements(model: ModelSection) -> int:
    """Counts the parameters of the shared experts' gate, and the elements of the output that it multiplies."""
    return model.hidden_size if required(model.experts).shared_gate else 0


def _few_groups(experts: ExpertsSection) -> dict[str, int]:
    """Returns keys for few groups, ranked as the user's groups, with enough experts; empty without groups."""
    if experts.num_groups is None or experts.group_top_k is None:
        return {}
    num_groups, group_top_k = min(experts.num_groups, 4), min(experts.group_top_k, 2)
    score = {} if experts.group_score_top_k is None else {"group_score_top_k": min(2, experts.group_score_top_k)}
    # up to 3, so that group_score_top_k=2 does not happen to equal the default, top_k / group_top_k
    per_group = min(3 if score else 2, experts.top_k // experts.group_top_k)
    sizes = {"num_groups": num_groups, "group_top_k": group_top_k, "top_k": group_top_k * per_group}
    return sizes | score | {"num_experts": num_groups * max(2, per_group)}


def _network(model: ModelSection, width: int) -> Parameters:
    first = width * (2 if model.is_gated else 1)
    biases = Parameters(divided=first, replicated=model.hidden_size) if model.linear_bias else Parameters()
    return Parameters(divided=model.hidden_size * (first + width)) + biases


def _num_matrices(model: ModelSection) -> int:
    return 3 if model.is_gated else 2
