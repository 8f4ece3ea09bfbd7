"""The gated delta rule with the kernels of flash-linear-attention instead of ours.

They compute whole rows from empty states, in training; generation and the states of context parallelism use our code.
Decays, states and sums are float32. Unlike in our code, unit-length queries and keys, corrections and the inverse of a
chunk's system are rounded to the precision of the run; `mtrain verify backend` measures the error.

Source: fla-core 0.6.0, fla/ops/gated_delta_rule/chunk.py.
"""

import importlib
import math
import re
from collections.abc import Callable
from functools import cache, lru_cache, partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from mtrain.base.imports import fault_of
from mtrain.config.schema.sections import Sections
from mtrain.core.layers.attention.delta_net import DeltaNetCore
from mtrain.core.layers.attention.key_set import Run, documents_of
from mtrain.core.layers.attention.recurrent.chunks import Projected
from mtrain.core.ranks.groups import to_device

MODULE = "fla.ops.gated_delta_rule"
_MAX_HEAD = 256
"""Largest head size of queries and keys that the kernels support."""
_UNSOUND = (3, 4, 0), (3, 7, 1)
"""Releases of triton that compile the backward pass wrongly for Hopper: the oldest, and the first correct one. The
library raises an error with them, unless tilelang compiles the kernel.

Source: fla-core 0.6.0, fla/ops/common/chunk_o.py, chunk_bwd_dqkwg; its issue 640.
"""


def take_delta_rule(chunk: nn.Module) -> None:
    """Makes the delta nets of a chunk compute whole rows with flash-linear-attention."""
    kernel = importlib.import_module(MODULE).chunk_gated_delta_rule
    for module in chunk.modules():
        if isinstance(module, DeltaNetCore):
            module.rule = partial(outputs_of_rows, kernel)


def outputs_of_rows(kernel: Callable[..., Any], tokens: Projected, document_starts: Tensor | None) -> Tensor:
    """Applies the delta rule to whole rows by `chunk_gated_delta_rule`; `document_starts` as in `delta_rule`.

    Returns:
        [seq, batch, value_heads, value_dim], in the dtype of value.
    """
    seq, batch, _, key_dim = tokens.key.shape
    query, key, value, log_decay, beta = (part.transpose(0, 1) for part in tokens)
    options: dict[str, Tensor] = {}
    if document_starts is not None:
        # the kernel supports documents only in a batch of one row, so rows are concatenated
        query, key, value, log_decay, beta = (
            part.flatten(0, 1).unsqueeze(0) for part in (query, key, value, log_decay, beta)
        )
        on_host, on_device = _ends(documents_of(document_starts), seq, value.device)
        options = {"cu_seqlens": on_device, "cu_seqlens_cpu": on_host}
    output, _ = kernel(
        q=query,
        k=key,
        v=value,
        g=log_decay,
        beta=beta,
        scale=1 / math.sqrt(key_dim),
        # with the same epsilon as our code
        use_qk_l2norm_in_kernel=True,
        **options,
    )
    by_row: Tensor = output.reshape(batch, seq, *output.shape[2:])
    return by_row.transpose(0, 1)


# cached, since it is the same in every layer, and the kernels cache what they derive from the last tensor they saw
@lru_cache(maxsize=16)
def _ends(rows: tuple[tuple[Run, ...], ...], seq: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns 0 and the ends of documents in concatenated rows, [documents + 1] int64, on the host and the device."""
    ends = [row * seq + end for row, documents in enumerate(rows) for _, end in documents]
    on_host = torch.tensor([0, *ends])
    return on_host, to_device(on_host, device)


def lacking(device: torch.device) -> list[str]:
    """Returns the reasons why this machine cannot use flash-linear-attention under any configuration."""
    if device.type != "cuda":
        return ["there is no GPU"]
    if find_spec("fla") is None:
        return ["flash-linear-attention is not installed"]
    fault = _fault(torch.cuda.get_device_capability(device)[0])
    return [] if fault is None else [f"flash-linear-attention cannot be used ({fault})"]


@cache
def _fault(major: int) -> str | None:
    """Imports the library, and returns why it is unusable on a GPU of this major compute capability, or None."""
    if (fault := fault_of((MODULE,))) is not None:
        return fault
    version: str = importlib.import_module("triton").__version__
    is_unsound = _UNSOUND[0] <= tuple(map(int, re.findall(r"\d+", version)[:3])) < _UNSOUND[1]
    if major != 9 or not is_unsound or find_spec("tilelang") is not None:
        return None
    sound = ".".join(map(str, _UNSOUND[1]))
    return f"its gradients are wrong with triton {version} on this GPU; it needs {sound} or newer, or tilelang"


def unable(config: Sections) -> list[str]:
    """Returns the reasons why a configuration cannot use flash-linear-attention on any machine."""
    model, train, layout = config.model, config.train, config.layout
    net = model.delta_net
    if net is None:
        return ["no layer has a delta net"]
    exchanges_heads = layout.cp_comm == "ulysses" and net.num_key_heads // layout.tp % layout.cp == 0
    reasons = {
        "train.precision=fp32: its products of float32 are made in TF32": train.precision == "fp32",
        "train.deterministic=true: its kernels choose their tiles by timing them": train.deterministic,
        "train.compile=layers, which compiles only our layers": train.compile == "layers",
        f"train.offload_layers={train.offload_layers}, which offloads only our layers": (
            train.offload_layers is not None
        ),
        f"layout.cp={layout.cp} passes states from rank to rank, unless layout.cp_comm=ulysses divides the key heads": (
            layout.cp > 1 and not exchanges_heads
        ),
        f"model.delta_net.key_head_dim={net.key_head_dim}: its heads have at most {_MAX_HEAD} numbers": (
            net.key_head_dim > _MAX_HEAD
        ),
    }
    return [reason for reason, holds in reasons.items() if holds]
