"""Leader and followers: only the first rank runs lm-eval, and all ranks make each of its calls of the model."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from mtrain.base.errors import MtrainError
from mtrain.core.ranks.init import with_the_slowest
from mtrain.training.tasks.model import Drawing, LogLikelihood, ScoredRow, TaskModel

Result = TypeVar("Result")


class _Leader:
    """`TaskModel` of the first rank, which makes the other ranks repeat each call."""

    def __init__(self, model: TaskModel) -> None:
        self._model = model
        self.fault: Exception | None = None
        """Error of a call, which the other ranks have raised as well."""

    def log_likelihoods(self, rows: Sequence[ScoredRow]) -> list[LogLikelihood]:
        return self._together(self._model.log_likelihoods, rows)

    def answers(self, prompts: Sequence[Sequence[int]], drawing: Drawing) -> list[list[int]]:
        return self._together(self._model.answers, prompts, drawing)

    def _together(self, method: Callable[..., Result], *arguments: Any) -> Result:
        _broadcast((method.__name__, arguments))
        try:
            return method(*arguments)
        except Exception as error:
            self.fault = error
            raise


def led(model: TaskModel, action: Callable[[_Leader], Result]) -> Result:
    """Runs `action` on the first rank; all ranks make its calls of the model. Collective over the world.

    Other ranks wait for the next call without a timeout.

    Returns:
        Result of the action, on every rank.

    Raises:
        MtrainError: The action raised it; every rank raises it.
    """
    if dist.get_rank() != 0:
        return _follow(model)  # type: ignore[no-any-return]
    leader, result, fault = _Leader(model), None, None
    try:
        result = action(leader)
    except Exception as error:
        if leader.fault is not None:  # lm-eval may have wrapped it in another error
            raise leader.fault from None
        if not isinstance(error, MtrainError):
            raise
        fault = error
        fault.on_every_rank = True
    _broadcast(("end", (result, fault)))
    if fault is not None:
        raise fault
    return result  # type: ignore[return-value]


def _follow(model: TaskModel) -> Any:
    """Makes the calls of the first rank until its action ends; returns its result."""
    while True:
        name, arguments = _broadcast(None)
        if name == "end":
            result, fault = arguments
            if fault is not None:
                raise fault
            return result
        getattr(model, name)(*arguments)


def _broadcast(call: Any) -> Any:
    """Sends a call from the first rank to all others, and returns it."""
    # the first rank may load data or compute metrics for longer than the timeout of a collective
    with_the_slowest(lambda: None)
    calls = [call]
    dist.broadcast_object_list(calls, src=0)
    return calls[0]
