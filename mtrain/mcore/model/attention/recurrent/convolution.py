"""Short causal convolution of each channel over the tokens of a document."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def causal_convolution(
    x: Tensor,
    weight: Tensor,
    document_starts: Tensor | None = None,
    state: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Convolves every channel and applies silu; what is before a token's document counts as 0.

    Args:
        x: [seq, batch, channels].
        weight: [channels, kernel]; the last column is that of the token itself.
        document_starts: [batch, seq] index at which each token's document starts, counted from the first one given;
            negative: before that. None: no document starts after the first token.
        state: [kernel - 1, batch, channels] inputs before the first token; None: 0.
        bias: [channels] added before silu; None: 0.

    Returns:
        Outputs in the shape and dtype of x, and the last kernel - 1 inputs.
    """
    seq, kernel = len(x), weight.shape[1]
    before = x.new_zeros(kernel - 1, *x.shape[1:]) if state is None else state
    inputs = torch.cat((before, x))
    # summed in float32, as kernels for half precision do
    taps = weight.to(torch.promote_types(weight.dtype, torch.float32)).unbind(1)
    total = x * taps[-1] if bias is None else torch.addcmul(bias.to(taps[-1].dtype), x, taps[-1])
    places = torch.arange(seq, device=x.device)
    for back in range(1, kernel):
        # masked after the product: backward then needs the inputs only, of which this is a view
        product = inputs[kernel - 1 - back : kernel - 1 - back + seq] * taps[kernel - 1 - back]
        if document_starts is not None:
            is_inside = document_starts.to(x.device) <= places - back
            product = torch.where(is_inside.T.unsqueeze(-1), product, 0)
        total = total + product
    return functional.silu(total.to(x.dtype)), inputs[seq:]
