"""Float64 passes over an answer; compares log-probabilities, hidden states and choices of experts with an engine's."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mtrain.base.errors import DataError
from mtrain.base.spelling import counted
from mtrain.training.sampling.generate import Model
from mtrain.verify.core.exact import tensors_of
from mtrain.verify.core.tolerances import amplified
from mtrain.verify.core.weights import Arrays
from mtrain.verify.reference.model.adapters import all_shapes, merged
from mtrain.verify.reference.model.modules import AS_DEFINED, ExpertChanges
from mtrain.verify.reference.model.transformer import Transformer
from mtrain.verify.reference.text import Text, rows_of
from mtrain.verify.rollout.records import Rollout

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Pass:
    """Forward pass over a prompt and its answer."""

    logits: Tensor
    """[2 + answer, vocab] float64. Row 1 + i predicts token i of the answer; the first and last row are the
    neighbouring positions, nan if they do not exist."""
    chosen: Mapping[str, Tensor]
    """Choices of each router by name, [tokens, experts] bool."""
    outputs: Mapping[str, Tensor]
    """Outputs by module, [tokens, columns] float64; may be empty."""


@dataclass(frozen=True)
class Spread:
    """Size of the differences between two log-probability computations, in nats."""

    worst: float
    rms: float

    @classmethod
    def of(cls, differences: Sequence[Tensor]) -> Spread:
        """Measures differences; nan was not computed and is skipped."""
        every = torch.cat([difference.flatten() for difference in differences])
        every = every[~every.isnan()]
        if not len(every):
            return cls(0.0, 0.0)
        return cls(float(every.abs().max()), float(every.square().mean().sqrt()))

    def allowed(self, floor: float) -> Spread:
        """Returns the largest differences that this measured rounding explains; `floor` is the rounding of logits."""
        return Spread(amplified(max(self.worst, floor)), amplified(max(self.rms, floor)))

    def within(self, allowed: Spread) -> bool:
        """Says whether rounding explains the differences; never for infinite ones."""
        return self.worst <= allowed.worst and self.rms <= allowed.rms


@dataclass(frozen=True)
class Passes:
    """Passes over an answer in float64 and in the engine's precision."""

    rollout: Rollout
    exact: Pass
    rounded: Pass

    def log_probs(self, passed: Pass) -> Tensor:
        """Returns the log-probability of each token of the answer in one of the passes, or in another one."""
        return log_probs(passed.logits, self.rollout.ids, self.rollout.temperature)


class Reference:
    """Model with given weights in float64."""

    def __init__(self, model: Model, weights: Arrays) -> None:
        """Converts the weights to float64 and merges adapters into them."""
        config = model.config
        self._model = config.model
        self._tensors = {torch.float64: merged(config, tensors_of(weights, all_shapes(config), _CPU))}

    @torch.no_grad()
    def run(
        self,
        prompt_ids: Sequence[int],
        ids: Sequence[int],
        dtype: torch.dtype = torch.float64,
        changes: ExpertChanges = AS_DEFINED,
        has_outputs: bool = False,
    ) -> Pass:
        """Computes the pass over a prompt (at least one id) and an answer, with weights and operations in `dtype`."""
        # one more token at the end, which no other token sees, makes the answer's last token an input
        text = np.array([*prompt_ids, *ids, 0], np.int64)
        rows = rows_of([Text(text, np.ones(len(text)))], len(text) - 1, self._model.vocab_size, _CPU)
        if dtype not in self._tensors:
            self._tensors[dtype] = {name: tensor.to(dtype) for name, tensor in self._tensors[torch.float64].items()}
        result = Transformer(self._model, self._tensors[dtype], changes).forward(rows, looks_ahead=False)
        logits = result.logits[0].double()
        nothing = torch.full_like(logits[:1], torch.nan)
        before = logits[len(prompt_ids) - 2 :] if len(prompt_ids) > 1 else torch.cat([nothing, logits])
        outputs = {name: output[0].double() for name, output in result.outputs.items()} if has_outputs else {}
        return Pass(before, {router.name: router.chosen[0] for router in result.seen}, outputs)

    def passes(
        self, rollout: Rollout, dtype: torch.dtype, changes: ExpertChanges = AS_DEFINED, has_outputs: bool = False
    ) -> Passes:
        """Computes the passes over a rollout in float64 and in another precision."""
        exact, rounded = (
            self.run(rollout.prompt_ids, rollout.ids, precision, changes, has_outputs)
            for precision in (torch.float64, dtype)
        )
        return Passes(rollout, exact, rounded)


def log_probs(logits: Tensor, ids: Sequence[int], temperature: float, shift: int = 0) -> Tensor:
    """Returns the log-probability of each token of an answer, float64, from logits as in `Pass`.

    `shift` is the number of positions by which logits are taken too late; 0 is right.
    """
    predicting = logits[1 + shift : 1 + shift + len(ids)] / temperature
    return predicting.log_softmax(-1).gather(-1, torch.tensor(ids).unsqueeze(-1)).squeeze(-1)


def replayed(rollout: Rollout, passed: Pass) -> dict[str, Tensor]:
    """Returns the engine's choices of experts by router of the reference, [1, tokens, experts] bool.

    The reference fills in unknown choices, such as those of the last token, which the engine did not read. Raises
    DataError if the routes belong to another model.
    """
    routes = torch.tensor(rollout.routes)
    choices = {}
    for name, exact in passed.chosen.items():
        layer = int(name.split(".")[2])  # decoder.layers.N.mlp.router
        count, num_experts = int(exact[0].sum()), exact.shape[-1]
        if routes.shape[1] <= layer or routes.shape[2] != count:
            raise DataError(
                f"{rollout.source}: routed_experts has {counted(routes.shape[1], 'layer')} with {routes.shape[2]} "
                f"experts, but the model has layer {layer} with top_k={count}; give a row for every layer of the model"
            )
        chosen, mixed = routes[:, layer], exact.clone()
        if int(chosen.max()) >= num_experts or int(chosen.min()) < -1:
            raise DataError(
                f"{rollout.source}: routed_experts names expert {int(chosen.max())}, but the model has {num_experts}, "
                "counted from 0; -1 is not known"
            )
        known = (chosen >= 0).all(-1)
        mixed[: len(routes)][known] = torch.zeros_like(exact[: len(routes)][known]).scatter(-1, chosen[known], True)
        choices[name] = mixed.unsqueeze(0)
    if not choices:
        raise DataError(f"{rollout.source}: has routed_experts, but the model has no experts; remove them")
    return choices


LIMIT = amplified(1.0)
"""Largest difference that rounding explains, in units of the measured one."""


def layer_differences(passes: Sequence[Passes]) -> Mapping[str, float]:
    """Returns the largest difference of each module's output in units of its rounding; above LIMIT it is a fault."""
    largest: dict[str, tuple[float, float]] = {}
    for answer in passes:
        for name in answer.exact.outputs:
            if name not in answer.rollout.hidden_states:
                continue
            states = torch.tensor(answer.rollout.hidden_states[name], dtype=torch.float64)
            exact = answer.exact.outputs[name][: len(states)]
            if states.shape != exact.shape:
                raise DataError(
                    f"{answer.rollout.source}: hidden_states[{name!r}] has {states.shape[-1]} columns, but the model "
                    f"has {exact.shape[-1]} there; give the output of this module"
                )
            difference = float((states - exact).abs().max())
            rounding = float((answer.rounded.outputs[name][: len(states)] - exact).abs().max())
            worst = largest.get(name, (0.0, 0.0))
            largest[name] = max(worst[0], difference), max(worst[1], rounding)
        known = answer.exact.outputs
        if unknown := [name for name in answer.rollout.hidden_states if name not in known]:
            shown = ", ".join(name for name in known if " " not in name or re.fullmatch(r"layer \d+", name))
            raise DataError(
                f"{answer.rollout.source}: hidden_states has {unknown[0]!r}, which is not a module of the model; name "
                f"one of {shown}"
            )
    return {
        name: difference / rounding if rounding else (math.inf if difference else 0.0)
        for name, (difference, rounding) in largest.items()
    }


def agreeing_routes(passes: Sequence[Passes]) -> str | None:
    """Counts the engine's choices of experts that equal the reference's, in words; None if it gave none."""
    routed = [answer for answer in passes if answer.rollout.routes is not None]
    if not routed:
        return None
    same = total = 0
    for answer in routed:
        assert answer.rollout.routes is not None
        length = len(answer.rollout.routes)
        for name, chosen in replayed(answer.rollout, answer.exact).items():
            engine, exact = chosen[0, :length], answer.exact.chosen[name][:length]
            same, total = same + int((engine == exact).all(-1).sum()), total + length
    return f"{same} of {total} choices of experts are those of float64"
