"""Reads block-scaled, low-precision weights as bfloat16.

In FP8, the format of DeepSeek-V3, `W_scale_inv` has a scale for each block of 128 x 128 numbers of W. For MXFP4, the
format of GPT-OSS, see `mxfp4`.
"""

from typing import Any, TypeAlias

import torch
from torch import Tensor

from mtrain.base.errors import DataError
from mtrain.base.tensor_slice import Sizes
from mtrain.hf.io.folder import HfFolder
from mtrain.hf.io.mxfp4 import FORMAT, Mxfp4, is_mxfp4
from mtrain.hf.schema.tower import TEXT
from mtrain.hf.schema.values import shown

SCALE_SUFFIX = "_scale_inv"
_BLOCK_SIZE = "weight_block_size"
_FP8 = torch.float8_e4m3fn
_ON_LOAD = ("load_in_4bit", "load_in_8bit")
_COMPRESSED = "compressed-tensors"
_DEQUANTISED = (
    ", as transformers makes it: from_pretrained(DIR, quantization_config=CompressedTensorsConfig(dequantize=True)), "
    "then save_pretrained"
)
PLAIN_NUMBERS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Supported dtypes; integers and unscaled FP8 encode other numbers."""


class Dequantised:
    """A folder's weights, with scaled ones as bfloat16, one tensor at a time."""

    def __init__(self, folder: HfFolder) -> None:
        """Checks the format, and that each scaled weight has its scales."""
        quantization = folder.config[FORMAT]
        method, block = (
            quantization.get(name) if isinstance(quantization, dict) else quantization
            for name in ("quant_method", _BLOCK_SIZE)
        )
        # codes of another format, read as plain numbers, would be wrong without an error
        if method != "fp8":
            raise _unread(folder, quantization)
        sizes = block if isinstance(block, list) else []
        if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
            raise DataError(
                f"{folder.path}: weights in {shown(method)} with {_BLOCK_SIZE}={shown(block)} are not supported; use "
                "weights in bfloat16, in fp8 with a two-dimensional block size, or in mxfp4"
            )
        self._folder, (self._rows, self._columns) = folder, sizes
        self._names = {name for name in folder.names() if not name.endswith(SCALE_SUFFIX)}
        # checks everything now, from the headers alone, so that an import does not fail in the middle
        for name in sorted(folder.names()):
            self._check(name)

    def names(self) -> set[str]:
        """Returns the names of all tensors except scales."""
        return self._names

    def facts(self, name: str) -> tuple[torch.dtype, Sizes]:
        """Returns a tensor's dtype and shape after scaling."""
        dtype, shape = self._folder.facts(name)
        return (torch.bfloat16 if dtype == _FP8 else dtype), shape

    def tensor(self, name: str) -> Tensor:
        """Returns a tensor; computes a scaled one at each call, in float32, one row of blocks at a time."""
        stored = self._folder.tensor(name)
        if stored.dtype != _FP8:
            return stored
        # [rows of blocks, columns of blocks]
        scales = self._folder.tensor(name + SCALE_SUFFIX).float()
        result = torch.empty(stored.shape, dtype=torch.bfloat16)
        # a row of blocks at a time, so that the float32 temporary is block_rows x columns, not the whole matrix
        for number, start in enumerate(range(0, stored.shape[0], self._rows)):
            rows = stored[start : start + self._rows].float()
            # the last block may be partial
            factors = scales[number].repeat_interleave(self._columns)[: stored.shape[1]]
            # multiplies in float32 and rounds once, since bf16 factors would lose digits of the scale
            result[start : start + self._rows] = (rows * factors).bfloat16()
        return result

    def expect(self, name: str) -> None:
        """Asks the system to read ahead a tensor's stored bytes, except the small scales."""
        self._folder.expect(name)

    def _check(self, name: str) -> None:
        dtype, shape = self._folder.facts(name)
        if dtype == _FP8:
            # rounds up, because a partial block at the edge has its own scale
            scales_shape = tuple(-(-size // block) for size, block in zip(shape, (self._rows, self._columns)))
            scales = name + SCALE_SUFFIX
            actual_shape = self._folder.facts(scales)[1] if scales in self._folder.names() else None
            if len(shape) != 2 or actual_shape != scales_shape:
                raise DataError(
                    f"{self._folder.path}: {name} of shape {list(shape)} needs {scales} of shape {list(scales_shape)}, "
                    f"but {'has none' if actual_shape is None else f'has {list(actual_shape)}'}"
                )
        elif name.endswith(SCALE_SUFFIX):
            scaled = name.removesuffix(SCALE_SUFFIX)
            # scales of a tensor that is not FP8 mean that somebody has replaced one of the two
            if scaled not in self._folder.names() or self._folder.facts(scaled)[0] != _FP8:
                raise DataError(f"{self._folder.path}: {name} has no fp8 tensor to scale; download the folder again")


Weights: TypeAlias = HfFolder | Dequantised | Mxfp4
"""Tensors by name, whose dtypes and shapes are known without reading them."""


def plain_weights(folder: HfFolder) -> Weights:
    """Opens the weights as plain floating-point numbers."""
    quantization, text = folder.config.get(FORMAT), folder.config.get(TEXT)
    nested = text.get(FORMAT) if isinstance(text, dict) else None
    if nested and not _quantises_nothing(nested, folder):
        raise _unread(folder, nested)
    if not quantization or _quantises_nothing(quantization, folder):
        return folder
    return Mxfp4(folder) if is_mxfp4(folder.config) else Dequantised(folder)


def _unread(folder: HfFolder, quantization: object) -> DataError:
    method, form = (
        (quantization.get("quant_method"), quantization.get("format"))
        if isinstance(quantization, dict)
        else (quantization, None)
    )
    quantised = f"weights quantised by {shown(method)}{'' if form is None else f' (format={shown(form)})'}"
    # not for models with images, since transformers 5.24 saves Kimi-K2.5 under other names
    how = _DEQUANTISED if method == _COMPRESSED and TEXT not in folder.config else ""
    return DataError(f"{folder.path}: {quantised} are not supported; use this model in bfloat16{how}")


def _quantises_nothing(quantization: object, folder: HfFolder) -> bool:
    """Returns whether all tensors are plain numbers, as when every module is excluded from quantisation.

    transformers 5.24 then uses them unchanged, in any format but bitsandbytes, which quantises them while loading.
    """
    on_load = isinstance(quantization, dict) and any(quantization.get(name) for name in _ON_LOAD)
    return not on_load and not any(
        name.endswith(SCALE_SUFFIX) or folder.facts(name)[0] not in PLAIN_NUMBERS for name in folder.names()
    )


def plain_config(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the config.json of the plain weights, without the field that makes transformers look for scales."""
    return {name: value for name, value in config.items() if name != FORMAT or not value}
