"""The state of the optimizer, parameter by parameter, for any optimizer and sharding.

megatron-core 0.16.1 has a format for any layout (`fully_reshardable`), but it is not exact, so the state is read and
set here. Its faults:

- it finds parameters by their position in the padded gradient buffer, in a tensor without the padding between buckets,
  so the state of all but the first bucket is shifted (distrib_optimizer.py::get_parameter_state_dp_zero);
- after a load all parameters share one `step` tensor, which each of them advances;
- loading visits torch Adam's `step`, which was not saved, and writes into leaf tensors outside no_grad;
- loading into an optimizer that has not made a step fails an assertion.

The float32 main weights are saved with the moments; half-precision weights are only their rounding.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer
from torch import Tensor

from mtrain.core.engine.sharded_model import FlatSlice, ShardedModel
from mtrain.core.state.loss_scaler import LossScaler

MAIN = "param"
"""Name of the float32 main weights among the states of a parameter; the same as in megatron-core."""
_FIRST, _SECOND = "exp_avg", "exp_avg_sq"
# names in the checkpoint format; changing one would make older checkpoints unreadable
MOMENTS = (_FIRST, _SECOND)
STATES = (MAIN, *MOMENTS)
"""Names of a parameter's states in the optimizer, each float32 and of the parameter's shape. Muon has only the first
moment, no second one and no count of updates."""


class OptimizerState:
    """State of a megatron-core optimizer on this rank, for whichever part of the weights the rank updates."""

    def __init__(self, inner: MegatronOptimizer, sharded: ShardedModel) -> None:
        self._inner, self._slices = inner, sharded.slices

    def flat_slices(self) -> list[FlatSlice]:
        """Returns all slices that this rank updates."""
        return [flat_slice for part in self._parts() for flat_slice in self._slices(part)]

    def flat_slice_states(self) -> Iterator[tuple[FlatSlice, dict[str, Tensor]]]:
        """Yields all slices that this rank updates, with the optimizer's own state tensors, [end - start], by name.

        If moments are on the host (train.offload_optimizer), the host waits for the last update.
        """
        for part in self._parts():
            if any(moment.is_cuda != main.is_cuda for main, moment in _first_moments(part)):
                torch.cuda.current_stream().synchronize()  # on which the update ends with the copies to the host
            for flat_slice in self._slices(part):
                yield flat_slice, _states(part, flat_slice.main)

    def momenta(self, has_momentum: Callable[[Tensor], bool]) -> Iterator[tuple[FlatSlice, Tensor]]:
        """Gives parameters a momentum of zeros instead of Adam's state, before the first update; yields the slices of
        these that this rank updates, with their momentum, [end - start]."""
        for part in self._parts():
            for flat_slice in self._slices(part):
                if has_momentum(flat_slice.parameter):
                    momentum = torch.zeros_like(flat_slice.main, requires_grad=False)
                    # under Adam's name: saved and loaded like any first moment; Adam never sees a gradient of these
                    part.optimizer.state[flat_slice.main] = {_FIRST: momentum}
                    yield flat_slice, momentum

    def mains_by_part(self) -> Iterator[tuple[Any, list[Tensor]]]:
        """Yields each inner optimizer that updates something on this rank, with the main weights that it updates."""
        for part in self._parts():
            yield part, [flat_slice.main for flat_slice in self._slices(part)]

    def fuse(self) -> None:
        """Makes torch's AdamW update a whole group in one pass over memory, on CPUs and GPUs; call it before the first
        update.

        The last bit of some weights differs from the unfused form, since products are rounded in another order.
        """
        for part in self._parts():
            if _steps_by_parameter(part):  # the others are fused already
                # a key of each group: `step` reads it there, and groups may have been replaced since construction
                for group in part.optimizer.param_groups:
                    group["fused"], group["foreach"] = True, False

    def set_adam_step(self, adam_step: int) -> None:
        """Sets Adam's count of updates, which each parameter keeps for itself."""
        for part in self._parts():
            if _steps_by_parameter(part):
                for main in (flat_slice.main for flat_slice in self._slices(part)):
                    state = part.optimizer.state[main]
                    if not _is_momentum_alone(state):
                        # a tensor for each: a shared one would advance once for every parameter in one update
                        state["step"] = _count(adam_step, main)
            else:
                for group in _counting_groups(part):
                    group["step"] = adam_step

    @torch.no_grad()
    def set_main_weights(self, whole: Mapping[Tensor, Tensor]) -> None:
        """Sets the float32 main weights of some parameters from tensors of their shapes, and nothing else."""
        for flat_slice in self.flat_slices():
            if flat_slice.parameter in whole:
                flat_slice.set_main(whole[flat_slice.parameter])

    def adam_step(self) -> int:
        """Returns the number of Adam's updates, which is below the number of steps if fp16 overflowed or batches were
        empty.

        One all-reduce over the world, since a rank may have no part of any parameter.
        """
        steps = {0}  # for a rank that holds nothing, or before the first update
        for part in self._parts():
            if _steps_by_parameter(part):
                states = part.optimizer.state.values()
                counts = [state["step"] for state in states if not _is_momentum_alone(state)]
                steps |= set(map(int, torch.stack(counts).tolist())) if counts else set()  # the host waits once for all
            else:
                steps |= {int(group.get("step", 0)) for group in _counting_groups(part)}
        assert len(steps) <= 2, f"parameters were updated {sorted(steps)} times"
        # MAX, since such ranks report 0; all that hold something agree, as every update steps all parameters
        most = torch.tensor([max(steps)], dtype=torch.int64, device=torch.cuda.current_device())
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return int(most)

    def loss_scaler(self) -> LossScaler | None:
        """Returns the loss scale and its counters; None in precisions without one."""
        first = self._inner.chained_optimizers[0]  # any will do: `Optimizer._move_scales` moves all scales together
        if isinstance(first, FP32Optimizer) or first.grad_scaler is None:
            return None
        state = first.grad_scaler.state_dict()
        return LossScaler(
            scale=float(state["scale"]),
            growth_tracker=state["growth_tracker"],
            hysteresis_tracker=state["hysteresis_tracker"],
        )

    def set_loss_scaler(self, saved: LossScaler | None) -> None:
        """Sets a saved loss scale; None only in precisions without one."""
        assert (self.loss_scaler() is None) == (saved is None)
        if saved is not None:
            for part in self._inner.chained_optimizers:
                # megatron-core calls .cuda() on the scale: it has to be a tensor [1], the counters plain numbers
                part.grad_scaler.load_state_dict({**saved.model_dump(), "scale": torch.tensor([saved.scale])})

    def _parts(self) -> list[Any]:
        """Returns the inner optimizers that update something on this rank. A stage may train no dense parameter; with
        adapters only on experts, no stage does."""
        return [part for part in self._inner.chained_optimizers if not part.is_stub_optimizer]


def give_moments(part: Any, main: Tensor, moments: Mapping[str, Tensor]) -> None:
    """Sets moments of zeros, by the names in MOMENTS, in place of those that Adam would make at its first update."""
    state = part.optimizer.state[main]
    if _steps_by_parameter(part):
        # torch's Adam takes a state that is not empty for complete
        state["step"] = _count(0, main)
    state.update(moments)


class GroupCounts:
    """Update counts of a fused Adam, one per group. Fused Adams count calls, and an update may make several."""

    def __init__(self, part: Any) -> None:
        # torch's Adam counts per parameter, which leaves nothing to do here
        self._groups = [] if _steps_by_parameter(part) else _counting_groups(part)
        self._before = [int(group.get("step", 0)) for group in self._groups]

    def restore(self) -> None:
        """Restores the counts before each of the calls."""
        for group, count in zip(self._groups, self._before, strict=True):
            group["step"] = count

    def advance(self) -> None:
        """Advances the counts after the last call, which may have skipped some of the groups."""
        for group, count in zip(self._groups, self._before, strict=True):
            group["step"] = count + 1


def _first_moments(part: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields main weights with their first moments, for parameters that have moments."""
    for main, state in part.optimizer.state.items():
        if _FIRST in state:
            yield main, state[_FIRST]


def _steps_by_parameter(part: MegatronOptimizer) -> bool:
    """Says whether the optimizer counts updates per parameter, like torch, or per group, like the fused Adams of
    TransformerEngine and apex."""
    return isinstance(part.optimizer, torch.optim.Adam | torch.optim.AdamW)


def _counting_groups(part: MegatronOptimizer) -> list[dict[str, Any]]:
    """Returns the groups whose count a fused Adam advances. It skips groups without elements on this rank, for example
    norms if this rank's part of the buffer lies in a table."""
    return [group for group in part.optimizer.param_groups if group["params"]]


def _count(updates: int, main: Tensor) -> Tensor:
    """Makes the update count of a parameter on the device of its main weights, where the fused AdamW needs it."""
    return torch.full((), updates, dtype=torch.float32, device=main.device)


def _states(part: MegatronOptimizer, main: Tensor) -> dict[str, Tensor]:
    """Returns the state tensors of one flat slice; makes moments of zeros if the parameter was never updated."""
    state: dict[str, Any] = part.optimizer.state[main]
    if not state:
        give_moments(part, main, {name: torch.zeros_like(main, requires_grad=False) for name in MOMENTS})
    return {MAIN: main} | {name: state[name] for name in STATES if name in state}


def _is_momentum_alone(state: Mapping[str, Any]) -> bool:
    return _FIRST in state and _SECOND not in state
