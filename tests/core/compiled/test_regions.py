"""Compiled regions are the functions as they are written: values and gradients in float64, and in half precision."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from mtrain.core import kernels
from mtrain.core.kernels import Region
from mtrain.core.layers.attention.delta_net import normed_and_gated
from mtrain.core.layers.attention.mamba import gated_and_normed
from mtrain.core.layers.attention.mla import pairs_rotated
from mtrain.core.layers.attention.recurrent.core import causal_convolution
from mtrain.core.layers.attention.rotating import Rotations, rotated, split_and_rotated
from mtrain.core.layers.norm import layer_normed, rms_normed
from mtrain.core.layers.output_layer import softcapped
from mtrain.core.layers.swiglu import Activation, activated, weighted_activated
from mtrain.core.loss.vocab_parallel.cross_entropy import maximum_and_total, softmax_of_logits


class Case(NamedTuple):
    """A region with shapes of its tensors that have gradients, and its further arguments."""

    region: Region[Any, Any]
    shapes: tuple[tuple[int, ...], ...]
    further: tuple[Any, ...] = ()
    """Constants, and functions that make a tensor for a number of rows."""
    table: tuple[int, ...] = ()
    """Shape of cosine and sine, or of angles."""


def act(function: Callable[[Tensor], Tensor], is_gated: bool, limit: float | None = None, offset: float = 0.0) -> Any:
    return (Activation(function, is_gated, limit, offset),)


CASES = {
    "rms": Case(rms_normed, ((6, 2, 20), (20,)), (1e-5, False)),
    "rms centred on zero": Case(rms_normed, ((6, 2, 20), (20,)), (1e-6, True)),
    "layer": Case(layer_normed, ((6, 2, 20), (20,), (20,)), (1e-5, False)),
    "layer centred on zero": Case(layer_normed, ((6, 2, 20), (20,), (20,)), (1e-5, True)),
    "gated heads": Case(normed_and_gated, ((6, 2, 3, 8), (6, 2, 3, 8), (8,)), (1e-6,)),
    "gated groups": Case(gated_and_normed, ((6, 2, 24), (6, 2, 24), (24,)), (1e-5, 3)),
    "swiglu": Case(activated, ((6, 2, 22),), act(functional.silu, True)),
    "swiglu clamped": Case(activated, ((6, 2, 22),), act(functional.silu, True, 0.5, 1.0)),
    "squared relu": Case(activated, ((6, 2, 11),), act(lambda given: functional.relu(given).square(), False)),
    "experts": Case(weighted_activated, ((9, 22), (9, 1)), act(functional.silu, True)),
    "experts clamped": Case(weighted_activated, ((9, 22), (9, 1)), act(functional.gelu, True, 0.5, 1.0)),
    "rotation": Case(rotated, ((6, 2, 3, 8),), table=(6, 2, 1, 8)),
    "rotation of a part": Case(rotated, ((6, 2, 3, 8),), table=(6, 1, 1, 4)),
    "split": Case(split_and_rotated, ((6, 2, 2, 5, 8),), table=(6, 2, 1, 8)),
    "split, a part": Case(split_and_rotated, ((6, 2, 2, 3, 8),), table=(6, 1, 1, 6)),
    "pairs": Case(pairs_rotated, ((6, 2, 3, 8),), (1.3, False), (6, 1, 1, 8)),
    "pairs side by side": Case(pairs_rotated, ((6, 2, 3, 8),), (0.7, True), (6, 1, 1, 8)),
    "convolution": Case(causal_convolution, ((6, 2, 10), (3, 2, 10), (10, 4), (10,))),
    "convolution of documents": Case(
        causal_convolution,
        ((6, 2, 10), (3, 2, 10), (10, 4), (10,)),
        (lambda rows: torch.arange(rows).repeat(2, 1) // 4 * 4,),
    ),
    "capped logits": Case(softcapped, ((6, 2, 20),), (1.5,)),
    "largest logit and sum": Case(maximum_and_total, ((6, 2, 20),), (17,)),
    "gradient of logits": Case(
        softmax_of_logits,
        ((6, 2, 20), (6, 2), (6, 2), (6, 2)),
        (lambda rows: torch.arange(2 * rows).view(rows, 2) % 3 == 1, 17),
    ),
}


def drawn(case: Case, dtype: torch.dtype, seed: int = 0) -> tuple[list[Tensor], tuple[Any, ...]]:
    """Draws the tensors with gradients, and the further arguments with tables of angles before constants."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in case.shapes]
    further: tuple[Any, ...] = ()
    if case.table:
        half = torch.rand((*case.table[:-1], case.table[-1] // 2), generator=generator, dtype=torch.float64) * 6
        angles = torch.cat((half, half), -1)
        is_pairs = case.region is pairs_rotated
        further = (angles,) if is_pairs else (Rotations(angles.cos().to(dtype), angles.sin().to(dtype)),)
    made = (each(len(tensors[0])) if inspect.isfunction(each) else each for each in case.further)
    return [tensor.requires_grad_() for tensor in tensors], (*further, *made)


def results(function: Callable[..., Any], tensors: list[Tensor], further: tuple[Any, ...]) -> list[Tensor]:
    """Returns the outputs and the gradients of all tensors, for gradients of the outputs that are not constant."""
    outputs = function(*tensors, *further)
    outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
    weights = [torch.linspace(-1, 2, output.numel()).to(output.dtype).view(output.shape) for output in outputs]
    return [*outputs, *torch.autograd.grad(outputs, tensors, weights)]


@pytest.fixture(scope="module", autouse=True)
def _constants() -> Iterator[None]:
    import torch._dynamo.config as dynamo

    with dynamo.patch(specialize_float=True, recompile_limit=64, suppress_errors=False):
        yield


def with_rows(case: Case, num_rows: int) -> Case:
    """Changes the number of rows of the tensors that have as many as the first."""
    rows = case.shapes[0][0]
    shapes = tuple((num_rows, *shape[1:]) if shape[0] == rows else shape for shape in case.shapes)
    return case._replace(shapes=shapes, table=(num_rows, *case.table[1:]) if case.table else ())


BY_NIGHT = ("rms", "layer centred on zero", "swiglu", "squared relu", "experts", "rotation", "split", "pairs")
"""Cases of a region whose other case is compared by day, with a further branch."""


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] if name in BY_NIGHT else []) for name in CASES]
)
def test_a_compiled_region_is_the_function_in_float64(name: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs alone by day; the code that torch writes for them at night."""
    monkeypatch.setattr(kernels, "BACKEND", backend)
    # the second number of rows makes the graph dynamic; a rank may have no token of its experts, but has rows to rotate
    for num_rows in (6, 9) if CASES[name].table else (6, 9, 0):
        tensors, further = drawn(with_rows(CASES[name], num_rows), torch.float64)
        expected = results(CASES[name].region, tensors, further)
        found = results(CASES[name].region.compiled_if(True), tensors, further)
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
        # attention reads one head at a time
        assert num_rows == 0 or found[0].stride() == expected[0].stride()


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_as_near_to_float64_as_the_function(name: str, dtype: torch.dtype) -> None:
    tensors, further = drawn(CASES[name], dtype)
    wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
    wide_further = tuple(
        Rotations(*(table.double() for table in argument)) if isinstance(argument, Rotations) else argument
        for argument in further
    )
    exact = results(CASES[name].region, wide, wide_further)
    plain = results(CASES[name].region, tensors, further)
    found = results(CASES[name].region.compiled_if(True), tensors, further)
    for one, other, value in zip(found, plain, exact, strict=True):
        # fused, nothing is rounded in between: at most the rounding of the result more than the function itself
        rounding = torch.finfo(dtype).eps * value.abs().max()
        assert (one.double() - value).abs().max() <= (other.double() - value).abs().max() + rounding


@pytest.mark.nightly  # code of inductor, as above; by day test_compiled.py recomputes regions
@pytest.mark.parametrize("name", ["rms centred on zero", "split", "experts", "convolution"])
def test_a_pass_without_gradients_has_the_bits_of_training(name: str) -> None:
    """Recomputed layers run once without gradients and again in backward; inductor's code, which may differ."""
    tensors, further = drawn(CASES[name], torch.float32)
    trained = CASES[name].region.compiled_if(True)(*tensors, *further)
    with torch.no_grad():
        plain = [tensor.detach() for tensor in tensors]
        # activations have no gradient in that pass, parameters have
        count = CASES[name].region._activations
        again = CASES[name].region.compiled_if(True)(*plain[:count], *tensors[count:], *further)
    pairs = [(trained, again)] if isinstance(trained, Tensor) else list(zip(trained, again, strict=True))
    for one, other in pairs:
        torch.testing.assert_close(one.detach(), other, rtol=0, atol=0)
        assert not other.requires_grad
