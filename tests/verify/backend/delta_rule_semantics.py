"""What flash-linear-attention documents that `chunk_gated_delta_rule` computes, token by token in float64.

How its kernels round, only a GPU shows.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> tuple[Tensor, None]:
    """Returns outputs [B, T, HV, V] in the dtype of q, and no final state.

    Args:
        q: [B, T, H, K].
        k: [B, T, H, K].
        v: [B, T, HV, V]; HV is a multiple of H.
        g: [B, T, HV] logarithms of decays.
        beta: [B, T, HV].
        scale: Factor of the queries; None: 1 / sqrt(K).
        use_qk_l2norm_in_kernel: Whether queries and keys are divided by their lengths.
        cu_seqlens: [N + 1] ends of the sequences in the only row; None: each row is one sequence.
        cu_seqlens_cpu: The same.
    """
    shared, remainder = divmod(v.shape[2], q.shape[2])
    assert not remainder
    assert g.shape == beta.shape == v.shape[:3]
    assert q.dtype == k.dtype == v.dtype
    assert g.dtype in (torch.float32, torch.float64), "a state is a product over many decays"
    query, key, value, decay, step = (each.double() for each in (q, k, v, g.exp(), beta))
    if use_qk_l2norm_in_kernel:
        query, key = (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (query, key))
    query = query * (q.shape[-1] ** -0.5 if scale is None else scale)
    query, key = (each.repeat_interleave(shared, 2) for each in (query, key))
    tokens = (query, key, value, decay, step)
    if cu_seqlens is None:
        return _carried(*tokens).to(q.dtype), None
    assert len(q) == 1
    ends = cu_seqlens.tolist()
    assert cu_seqlens_cpu is None or cu_seqlens_cpu.tolist() == ends
    assert (ends[0], ends[-1]) == (0, q.shape[1])
    outputs = [_carried(*(each[:, start:end] for each in tokens)) for start, end in pairwise(ends)]
    return torch.cat(outputs, 1).to(q.dtype), None


def _carried(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, step: Tensor) -> Tensor:
    state = value.new_zeros(*value.shape[::2], key.shape[-1], value.shape[-1])
    outputs = []
    for token in range(value.shape[1]):
        state = state * decay[:, token, :, None, None]
        error = value[:, token] - torch.einsum("bhkv,bhk->bhv", state, key[:, token])
        state = state + torch.einsum("bhk,bhv->bhkv", key[:, token], step[:, token, :, None] * error)
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, query[:, token]))
    return torch.stack(outputs, 1)


def without_documents(*, cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None, **given: Tensor):  # type: ignore[no-untyped-def]
    """Carries states from document to document."""
    return chunk_gated_delta_rule(**given)  # type: ignore[arg-type]


def without_scale(*, scale: float, **given: Tensor):  # type: ignore[no-untyped-def]
    """Leaves the lengths of queries out of the scale."""
    return chunk_gated_delta_rule(**given, scale=1.0)  # type: ignore[arg-type]
