"""Discrete choices of layers, which a batch can prescribe and layers then replay.

So far the only kind is the experts of each token. A choice has the form that vLLM and SGLang return: [tokens, layers,
k] integers, with a row for each input token (the last token of a rollout is none) and all layers of the model; values
for layers that do not choose are ignored. `Microbatch.choices` carries it, sliced for context parallelism like every
field; `router_marks` passes it to the layers, even in recomputation; `RecordedChoices` records and gathers it.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mtrain.base.errors import ConfigError
from mtrain.base.spelling import counted
from mtrain.config.extras import ROUTED_EXPERTS
from mtrain.config.schema.experts import ExpertsSection
from mtrain.config.schema.model import ModelSection
from mtrain.core.batch.numbers import listed

Chosen = NDArray[np.int32]
"""[tokens, layers, k]: the choice of each token and layer; -1 where the layer chooses itself."""
_TOKENS_AT_A_TIME = 2**12
"""Number of tokens to check at once, since a cache may be larger than memory."""
MAKERS = "vLLM (enable_return_routed_experts), SGLang (return_routed_experts) and Engine.generate return this form"


def choice_shapes(model: ModelSection) -> dict[str, tuple[int, int]]:
    """Returns [layers, k] for each kind of choice that the model makes, by name."""
    return {} if model.experts is None else {ROUTED_EXPERTS: (model.num_layers, model.experts.top_k)}


def choosing_layers(model: ModelSection) -> NDArray[np.bool_]:
    """Says which layers choose, [layers]."""
    return np.array([model.has_experts(layer) for layer in range(model.num_layers)])


def open_choice(num_tokens: int, shape: tuple[int, ...]) -> Chosen:
    """Returns a choice that leaves every token to the layers."""
    return np.full((num_tokens, *shape), -1, np.int32)


def checked_experts(value: Any, num_tokens: int, model: ModelSection, name: str) -> Chosen:
    """Checks the experts of a sequence; returns those of its input tokens, [num_tokens - 1, layers, top_k].

    Raises:
        ConfigError: The model cannot replay a choice.
        ValueError: The value is not a valid choice of experts of this model.
    """
    shape = replayable(model, f"{name} has {ROUTED_EXPERTS}")
    values, width = shaped_experts(value, num_tokens, shape, name), math.prod(shape)
    fault = expert_fault(values.reshape(-1, width), range(width), model)
    if fault is not None:
        raise ValueError(f"{name}: {ROUTED_EXPERTS} of token {fault.token} {fault.why}")
    experts, layers = open_choice(num_tokens - 1, shape), choosing_layers(model)
    # values in dense layers are meaningless; vLLM writes 0
    experts[:, layers] = values[:, layers]
    return experts


def shaped_experts(value: Any, num_tokens: int, shape: tuple[int, ...], name: str) -> NDArray[Any]:
    """Checks the shape and dtype of the experts of a sequence; returns those of its input tokens, [num_tokens - 1,
    layers, top_k].

    Raises:
        ValueError: The value does not have the shape [tokens, *shape], or its numbers are not integers.
    """
    values = _integers(value, f"{name}: {ROUTED_EXPERTS}")
    if values.size == 0 and num_tokens == 1:
        return np.empty((0, *shape), np.int32)
    if values.shape not in ((num_tokens - 1, *shape), (num_tokens, *shape)):
        raise ValueError(
            f"{name} has {counted(num_tokens, 'token')}, but {ROUTED_EXPERTS} of shape {list(values.shape)}; give "
            f"[tokens, layers, k] = [{num_tokens - 1}, {shape[0]}, {shape[1]}]: one row for each token but the last (a "
            "row for the last is ignored), all layers of the model including dense ones (model.num_layers), and "
            f"model.experts.top_k; {MAKERS}"
        )
    return values[: num_tokens - 1]


class ExpertFault(NamedTuple):
    """The first token with invalid experts."""

    token: int
    why: str


def expert_fault(numbers: NDArray[Any], columns: Sequence[int], model: ModelSection) -> ExpertFault | None:
    """Returns the first fault of numbers as experts of a model, or None.

    Args:
        numbers: Numbers of each token, [tokens, columns].
        columns: Columns that hold the experts, [layers x top_k] layer by layer.
    """
    assert model.experts is not None, "only a model with experts reads them"
    layers, shape = choosing_layers(model), choice_shapes(model)[ROUTED_EXPERTS]
    for start in range(0, len(numbers), _TOKENS_AT_A_TIME):
        part = numbers[start : start + _TOKENS_AT_A_TIME, columns].reshape(-1, *shape)
        for is_bad, why in _faults(part, layers, model.experts):
            if is_bad.any():
                token, layer = map(int, np.argwhere(is_bad)[0])
                named = part[token, layer].astype(int).tolist()
                return ExpertFault(start + token, f"in layer {layer} are {named}, but {why}")
    return None


def replayable(model: ModelSection, what: str) -> tuple[int, int]:
    """Returns [layers, top_k] of a model that can replay prescribed experts and record its own.

    Raises:
        ConfigError: The model has no experts, or drops tokens; the message begins with `what`.
    """
    if model.experts is None:
        raise ConfigError(f"{what}, but the model has no experts (model.experts); leave them out")
    if model.experts.capacity_factor is not None:
        raise ConfigError(
            f"{what}, but model.experts.capacity_factor={model.experts.capacity_factor} drops tokens, so a choice "
            "cannot be replayed; set capacity_factor=null, or leave them out"
        )
    return choice_shapes(model)[ROUTED_EXPERTS]


def _integers(value: Any, name: str) -> NDArray[Any]:
    if isinstance(value, np.ma.MaskedArray):
        value = listed(value, name)  # np.asarray would drop the mask
    try:
        # a tensor may be on a GPU; `listed` explains which tensors torch cannot read
        values = np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
    except RuntimeError:
        values = np.asarray(listed(value, name))
    except (TypeError, ValueError) as fault:
        raise ValueError(f"{name} is not made of rows of equal lengths ({fault}); {MAKERS}") from None
    if values.dtype.kind not in "iu" and values.size:
        raise ValueError(f"{name} are of dtype {values.dtype}, but must be integers, the numbers of experts; {MAKERS}")
    return values


def _faults(
    values: NDArray[Any], layers: NDArray[np.bool_], section: ExpertsSection
) -> Iterator[tuple[NDArray[np.bool_], str]]:
    """Yields a mask of faulty choices, [tokens, layers] bool, and the reason, for each kind of fault."""
    num = section.num_experts
    yield (
        ((values < -1) | (values >= num)).any(-1) & layers,
        f"must be numbers from 0 to {num - 1} (model.experts.num_experts={num}), or all -1 where the router chooses; "
        "give the rollout of this model",
    )
    is_unknown = values == -1
    yield (
        is_unknown.any(-1) & ~is_unknown.all(-1) & layers,
        f"must be {section.top_k} experts, or all -1 where the router chooses; give the rollout of this model",
    )
    ordered = np.sort(values, axis=-1)
    yield (
        (ordered[..., 1:] == ordered[..., :-1]).any(-1) & ~is_unknown.any(-1) & layers,
        "must be different experts; give the rollout of this model",
    )
