"""Products of linear layers in fp8, whose codes no layout changes: `train.fp8` with `model.backend=torch`.

Numbers share a scale in groups along the contraction, so that the group of a token's number never has another token in
it: the whole row (rowwise), or 128 numbers of a token and 128 x 128 of a weight (blockwise). A scale is a power of two,
so that only the code is rounded. Where tensor parallelism divides the contraction, ranks exchange the largest elements
of rows, and config/combinations.py refuses blocks that a border of shards cuts. The gradient of a weight adds up
tokens, whose order and number in a microbatch follow from the layout: it is a product in the run's precision.

Sources: DeepSeek-V3, arXiv 2412.19437, section 3.3, for the blocks; torchao's recipe `rowwise_with_gw_hp` for rows.
"""

import inspect
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.layers import LinearWithGradAccumulationAndAsyncCommunication
from megatron.core.transformer import TransformerLayer
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from mtrain.base.errors import ConfigError
from mtrain.config.schema.sections import Sections
from mtrain.core.kernels import region

BLOCK = 128
"""Numbers of a token, or rows and columns of a weight, that share a scale in the recipe blockwise."""
_TOKENS = 16
"""Multiple of tokens that kernels take."""
_LARGEST_EXPONENT = {torch.float8_e4m3fn: 8, torch.float8_e5m2: 15}
"""Exponent of the largest number, 1.75 x 2^exponent in both formats."""
_ABOVE_1_75 = 0x1FFFFF
"""Added to the bits of a float32, it raises the exponent of every fraction above 1.75."""


class Recipe(NamedTuple):
    """Scales and formats of a run's products."""

    is_blockwise: bool
    gradients: torch.dtype
    """Format of gradients; everything else is e4m3."""

    @classmethod
    def of(cls, config: Sections) -> "Recipe | None":
        """Returns the recipe of our own layers; None without one."""
        if not config.has_own_fp8:
            return None
        gradients = torch.float8_e5m2 if config.train.fp8 == "hybrid" else torch.float8_e4m3fn
        return cls(config.fp8_recipe == "blockwise", gradients)


class Scaled(NamedTuple):
    """A matrix in fp8."""

    codes: Tensor
    """[rows, columns]."""
    scales: Tensor
    """[groups of rows, groups of columns] float32, powers of two that the codes are multiplied by."""


@region(activations=0)
def largest(numbers: Tensor, height: int, width: int) -> Tensor:
    """Returns the largest magnitude of each group: [rows, columns] -> [rows / height, columns / width] float32."""
    rows, columns = numbers.shape
    groups = numbers.view(rows // height, height, columns // width, width)
    return groups.abs().amax((1, 3)).to(torch.float32)


@region(activations=0)
def scaled(numbers: Tensor, magnitudes: Tensor, form: torch.dtype) -> Scaled:
    """Rounds numbers to the nearest codes, ties to even, by the smallest scales with which `magnitudes` fit the form.

    A group with an infinity or NaN becomes NaN.
    """
    exponents = ((magnitudes.view(torch.int32) + _ABOVE_1_75) >> 23) - _LARGEST_EXPONENT[form]
    # from the smallest normal number on, whose inverse is finite; NaN for infinities, which not all conversions keep
    scales = (exponents.clamp(min=1) << 23).view(torch.float32) + 0 * magnitudes
    codes = _grouped(numbers, scales) / scales.to(numbers.dtype)[:, None, :, None]
    return Scaled(codes.to(form).reshape(numbers.shape), scales)


def _grouped(matrix: Tensor, scales: Tensor) -> Tensor:
    """Returns [groups of rows, height, groups of columns, width]."""
    (rows, columns), (height, width) = scales.shape, matrix.shape
    return matrix.view(rows, height // rows, columns, width // columns)


def product(a: Tensor, b: Tensor, form: torch.dtype, is_blockwise: bool, group: Any, compiles: bool = False) -> Tensor:
    """Multiplies tokens [..., n] by a weight [n, rows] -> [..., rows], tokens in `form` and the weight in e4m3.

    `group` has the ranks among which n is divided; None where it is whole.
    """
    tokens, count = a.flatten(0, -2), a[..., 0].numel()
    if count % _TOKENS:
        tokens = functional.pad(tokens, (0, 0, 0, -count % _TOKENS))
    width, height = (BLOCK, BLOCK) if is_blockwise else (a.shape[-1], 1)
    measure, encode = largest.compiled_if(compiles), scaled.compiled_if(compiles)
    magnitudes = [measure(tokens, 1, width), measure(b.t(), height, width)]
    if not is_blockwise and group is not None and group.size() > 1:
        joint = torch.cat(magnitudes)
        dist.all_reduce(joint, dist.ReduceOp.MAX, group)
        magnitudes = list(torch.split(joint, [len(each) for each in magnitudes]))
    left, right = encode(tokens, magnitudes[0], form), encode(b.t(), magnitudes[1], torch.float8_e4m3fn)
    return multiplied(left, right, a.dtype)[:count].view(*a.shape[:-1], -1)


def multiplied(a: Scaled, b: Scaled, dtype: torch.dtype) -> Tensor:
    """Computes a x b^T, [rows of a, rows of b], from codes and scales; sums are in float32 at least.

    GPUs multiply codes; CPUs the numbers that these mean, which float32 holds exactly, as it does their products.
    """
    if a.codes.device.type == "cpu":
        return (_decoded(a, dtype) @ _decoded(b, dtype).t()).to(dtype)
    kinds = functional.ScalingType
    if len(b.scales) == len(b.codes):
        of_a, of_b, kind_a, kind_b = a.scales, b.scales.t(), kinds.RowWise, kinds.RowWise
    else:  # in the order of cuBLAS: scales of a by group of columns, those of b padded to multiples of four groups
        of_a = a.scales.t().contiguous().t()
        of_b = functional.pad(b.scales, (0, -b.scales.shape[1] % 4)).t()
        kind_a, kind_b = kinds.BlockWise1x128, kinds.BlockWise128x128
    return functional.scaled_mm(a.codes, b.codes.contiguous().t(), of_a, kind_a, of_b, kind_b, output_dtype=dtype)


def _decoded(matrix: Scaled, dtype: torch.dtype) -> Tensor:
    wide = torch.promote_types(dtype, torch.float32)
    numbers = _grouped(matrix.codes.to(wide), matrix.scales) * matrix.scales.to(wide)[:, None, :, None]
    return numbers.reshape(matrix.codes.shape)


class _FirstProduct(TorchFunctionMode):
    """Replaces the first matrix product inside the block."""

    def __init__(self, replacement: Any) -> None:
        super().__init__()
        self._replacement = replacement

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._replacement is not None and func in (torch.matmul, Tensor.matmul):
            func, self._replacement = self._replacement, None
        return func(*args, **(kwargs or {}))


def _in_fp8(linear: Any, recipe: Recipe, form: torch.dtype, is_divided: bool) -> _FirstProduct:
    group = linear.tp_group if is_divided else None
    return _FirstProduct(lambda a, b: product(a, b, form, recipe.is_blockwise, group, linear.compiles_regions))


class _Linear(LinearWithGradAccumulationAndAsyncCommunication):
    """megatron-core's linear layer, with its collectives and weight gradients; its first product forward is that of the
    inputs, and backward that of the output's gradient, each by the weight."""

    @staticmethod
    def forward(ctx: Any, linear: Any, recipe: Recipe, *arguments: Any) -> Tensor:
        ctx.linear, ctx.recipe, ctx.has_whole_inputs = linear, recipe, not isinstance(linear, RowParallelLinear)
        with _in_fp8(linear, recipe, torch.float8_e4m3fn, is_divided=not ctx.has_whole_inputs):
            output: Tensor = LinearWithGradAccumulationAndAsyncCommunication.forward(ctx, *arguments)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        with _in_fp8(ctx.linear, ctx.recipe, ctx.recipe.gradients, is_divided=ctx.has_whole_inputs):
            return None, None, *LinearWithGradAccumulationAndAsyncCommunication.backward(ctx, gradient)


_ARGUMENTS = tuple(inspect.signature(LinearWithGradAccumulationAndAsyncCommunication.forward).parameters)[1:]


def _applied(linear: nn.Module, recipe: Recipe, **given: Any) -> Any:
    return _Linear.apply(linear, recipe, *map(given.get, _ARGUMENTS))


def use_fp8(model: nn.Module, config: Sections, device: torch.device) -> None:
    """Lets the parallel linear layers inside a chunk's transformer layers multiply in fp8, if the run does.

    Raises:
        ConfigError: The GPU or this torch has no such product.
    """
    if (recipe := Recipe.of(config)) is None:
        return
    if (reason := lacking(config, device)) is not None:
        raise ConfigError(f"train.fp8={config.train.fp8} cannot be used: {reason}; remove it")
    for layer in (module for module in model.modules() if isinstance(module, TransformerLayer)):
        for linear in layer.modules():
            if isinstance(linear, ColumnParallelLinear | RowParallelLinear):
                multiply_in_fp8(linear, recipe)


def multiply_in_fp8(linear: Any, recipe: Recipe) -> None:
    """Lets a parallel linear layer multiply in fp8."""
    linear.compiles_regions, linear._forward_impl = False, partial(_applied, linear, recipe)


def lacking(config: Sections, device: torch.device) -> str | None:
    """Says what keeps our layers from fp8; None if nothing does."""
    if (recipe := Recipe.of(config)) is None:
        return "fp8 in our own layers is train.fp8 with model.backend=torch"
    if device.type == "cpu" or has_products(recipe, device.type, config.train.precision == "bf16"):
        return None
    return (
        f"torch.nn.functional.scaled_mm does not multiply on this GPU with train.fp8_recipe={config.fp8_recipe} and "
        f"train.precision={config.train.precision}"
    )


@cache
def has_products(recipe: Recipe, device: str, is_bf16: bool) -> bool:
    """Says whether torch has these products on this kind of device; tries small ones of integers, whose sums are exact
    in any order."""
    places = torch.arange(3 * BLOCK * 2 * BLOCK).view(3 * BLOCK, 2 * BLOCK)
    numbers = (places % 3 - 1) * (1 + places // BLOCK % 3)  # groups have different scales
    numbers = numbers.to(torch.bfloat16 if is_bf16 else torch.float32)
    tokens, weight = numbers[:_TOKENS], numbers[BLOCK:].t()
    try:
        return all(
            torch.equal(
                product(tokens.to(device), weight.to(device), form, recipe.is_blockwise, None).cpu(),
                product(tokens, weight, form, recipe.is_blockwise, None),
            )
            for form in {torch.float8_e4m3fn, recipe.gradients}
        )
    except (AttributeError, RuntimeError, ValueError):  # scaled_mm is of torch 2.10; kernels are of some GPUs
        return False
