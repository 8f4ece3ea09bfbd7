"""Attention kernels that return the log-sum-exp: numbers on a CPU, and arguments of the kernels on GPUs."""

import math

import pytest
import torch

from mtrain.core.layers.attention.ring import attend, attend_backward, kernel_of

BATCH, HEADS, GROUPS, QUERIES, KEYS = 2, 4, 2, 6, 10


@pytest.mark.parametrize(("is_causal", "keys"), [(False, KEYS), (True, QUERIES)])
def test_a_cpu_gives_outputs_logarithms_and_gradients(is_causal: bool, keys: int) -> None:
    torch.manual_seed(0)
    query = torch.randn(BATCH, HEADS, QUERIES, 5, dtype=torch.float64, requires_grad=True)
    key, value = (torch.randn(BATCH, GROUPS, keys, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    gradient = torch.randn_like(query)
    shared = [part.repeat_interleave(HEADS // GROUPS, dim=1) for part in (key, value)]
    scores = 0.3 * query @ shared[0].transpose(2, 3)
    if is_causal:
        scores = scores.masked_fill(torch.ones(QUERIES, keys).triu(1).bool(), -math.inf)
    exact = scores.softmax(-1) @ shared[1]
    gradients = torch.autograd.grad(exact, [query, key, value], gradient)
    with torch.no_grad():
        found = attend(query, key, value, 0.3, is_causal)
        parts = attend_backward(gradient, (query, key, value), found, 0.3, is_causal)
    torch.testing.assert_close(found.output, exact.detach())
    torch.testing.assert_close(found.exponents, scores.detach().logsumexp(-1))
    for part, whole in zip(parts, gradients, strict=True):
        torch.testing.assert_close(part, whole)


@pytest.mark.parametrize("dim", [16, 20])
@pytest.mark.parametrize(("dtype", "kernel"), [(torch.bfloat16, "flash"), (torch.float32, "efficient")])
def test_kernels_of_gpus_take_these_arguments(dtype: torch.dtype, kernel: str, dim: int) -> None:
    """torch's own description of the results judges them, as no GPU is needed for it."""
    query = torch.empty(BATCH, HEADS, QUERIES, dim, dtype=dtype, device="meta")
    key, value = (torch.empty(BATCH, GROUPS, KEYS, dim, dtype=dtype, device="meta") for _ in range(2))
    assert kernel_of(query) == kernel
    found = attend(query, key, value, 0.3, is_causal=False)
    assert found.output.shape == query.shape
    assert found.exponents.shape == query.shape[:3]
    assert found.exponents.dtype == torch.float32
    parts = attend_backward(torch.empty_like(query), (query, key, value), found, 0.3, is_causal=False)
    for part, given in zip(parts, (query, key, value), strict=True):
        assert (part.shape, part.dtype, part.device) == (given.shape, given.dtype, given.device)
