"""Discrete choices of layers, which a batch can name and layers then replay.

There is one kind so far, the experts of tokens. A choice has the form that vLLM and SGLang return: [tokens, layers, k]
integers, a row for each token that was read (the last token of a rollout never is), and every layer of the model;
values for layers that do not choose are ignored. `Microbatch.choices` carries it, cut for context parallelism like
every field; `router_marks` hands it to the layers, recomputed ones included; `RecordedChoices` records and gathers it.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mtrain.base.errors import ConfigError
from mtrain.config.extras import ROUTED_EXPERTS
from mtrain.config.schema.experts import ExpertsSection
from mtrain.config.schema.model import ModelSection
from mtrain.core.batch.numbers import listed

Chosen = NDArray[np.int32]
"""[tokens, layers, k]: the choice of each token and layer; -1 where the layer chooses."""
_TOKENS_AT_A_TIME = 2**12
"""Tokens that are checked together; a cache may be larger than memory."""
MAKERS = "vLLM (enable_return_routed_experts), SGLang (return_routed_experts) and Engine.generate return this form"


def choice_shapes(model: ModelSection) -> dict[str, tuple[int, int]]:
    """Returns [layers, k] of each choice that some layer of the model makes, by its name."""
    return {} if model.experts is None else {ROUTED_EXPERTS: (model.num_layers, model.experts.top_k)}


def choosing_layers(model: ModelSection) -> NDArray[np.bool_]:
    """Says which layers choose, [layers]."""
    return np.array([model.has_experts(layer) for layer in range(model.num_layers)])


def open_choice(num_tokens: int, shape: tuple[int, ...]) -> Chosen:
    """Returns the choice of tokens for which nobody has named one."""
    return np.full((num_tokens, *shape), -1, np.int32)


def checked_experts(given: Any, num_tokens: int, model: ModelSection, name: str) -> Chosen:
    """Checks the experts of a sequence; returns those of the tokens that are read, [num_tokens - 1, layers, top_k].

    Raises:
        ConfigError: The model cannot replay a choice.
        ValueError: The value is no choice of this model's experts.
    """
    shape = replayable(model, f"{name} has {ROUTED_EXPERTS}")
    values, width = shaped_experts(given, num_tokens, shape, name), math.prod(shape)
    fault = expert_fault(values.reshape(-1, width), range(width), model)
    if fault is not None:
        raise ValueError(f"{name}: {ROUTED_EXPERTS} of token {fault.token} {fault.why}")
    found, layers = open_choice(num_tokens - 1, shape), choosing_layers(model)
    # what stands in a dense layer means nothing: vLLM writes 0
    found[:, layers] = values[:, layers]
    return found


def shaped_experts(given: Any, num_tokens: int, shape: tuple[int, ...], name: str) -> NDArray[Any]:
    """Checks that there are integers of each token that is read; returns these, [num_tokens - 1, layers, top_k].

    Raises:
        ValueError: The value has another shape than [tokens, *shape], or other numbers.
    """
    values = _integers(given, f"{name}: {ROUTED_EXPERTS}")
    if values.size == 0 and num_tokens == 1:
        return np.empty((0, *shape), np.int32)
    if values.shape not in ((num_tokens - 1, *shape), (num_tokens, *shape)):
        raise ValueError(
            f"{name} has {num_tokens} tokens, but {ROUTED_EXPERTS} of shape {list(values.shape)}; give [tokens, "
            f"layers, k] = [{num_tokens - 1}, {shape[0]}, {shape[1]}]: one row for each token but the last (or for "
            f"each: the last is not used), all layers of the model, dense ones too (model.num_layers), and "
            f"model.experts.top_k; {MAKERS}"
        )
    return values[: num_tokens - 1]


class ExpertFault(NamedTuple):
    """The first token whose experts the model does not have."""

    token: int
    why: str


def expert_fault(numbers: NDArray[Any], places: Sequence[int], model: ModelSection) -> ExpertFault | None:
    """Says what is wrong with numbers as experts of a model, whose columns by layer are `places`; None where nothing
    is."""
    assert model.experts is not None, "only a model with experts reads them"
    layers, shape = choosing_layers(model), choice_shapes(model)[ROUTED_EXPERTS]
    for start in range(0, len(numbers), _TOKENS_AT_A_TIME):
        part = numbers[start : start + _TOKENS_AT_A_TIME, places].reshape(-1, *shape)
        for is_bad, why in _faults(part, layers, model.experts):
            if is_bad.any():
                token, layer = map(int, np.argwhere(is_bad)[0])
                named = part[token, layer].astype(int).tolist()
                return ExpertFault(start + token, f"in layer {layer} are {named}, but {why}")
    return None


def replayable(model: ModelSection, what: str) -> tuple[int, int]:
    """Returns [layers, top_k] of a model that can take experts from outside, and report its own.

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


def _integers(given: Any, name: str) -> NDArray[Any]:
    if isinstance(given, np.ma.MaskedArray):
        given = listed(given, name)  # an array of numbers would lose the mask
    try:
        # a tensor may be on a GPU; `listed` says what torch cannot read
        values = np.asarray(given.detach().cpu() if hasattr(given, "detach") else given)
    except RuntimeError:
        values = np.asarray(listed(given, name))
    except (TypeError, ValueError) as fault:
        raise ValueError(f"{name} is not made of rows of equal lengths ({fault}); {MAKERS}") from None
    if values.dtype.kind not in "iu" and values.size:
        raise ValueError(f"{name} are of dtype {values.dtype}, but must be integers, the numbers of experts; {MAKERS}")
    return values


def _faults(
    values: NDArray[Any], layers: NDArray[np.bool_], section: ExpertsSection
) -> Iterator[tuple[NDArray[np.bool_], str]]:
    """Yields [tokens, layers] bool where something is wrong, and what."""
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
