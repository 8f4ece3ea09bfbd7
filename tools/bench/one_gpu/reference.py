"""Llama written by hand in plain PyTorch: the judge of our numbers in float64, and, compiled, of our speed.

It shares no code with the package. Parameters have Hugging Face's names, so weights that the engine exports fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROPE_BASE = 10000.0
"""Base of the rotary angles of queries and keys."""


class Attention(nn.Module):
    """Grouped-query attention with rotary position embedding, on scaled_dot_product_attention."""

    def __init__(self, model: Mapping[str, Any]) -> None:
        super().__init__()
        hidden, self.heads = model["hidden_size"], model["num_attention_heads"]
        self.groups = model.get("num_query_groups", self.heads)
        self.dim = model.get("head_dim", hidden // self.heads)
        self.q_proj = nn.Linear(hidden, self.heads * self.dim, bias=False)
        self.k_proj = nn.Linear(hidden, self.groups * self.dim, bias=False)
        self.v_proj = nn.Linear(hidden, self.groups * self.dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        """Computes [batch, seq, hidden]; cos, sin: [batch, 1, seq, dim]; mask: [batch, 1, seq, seq] bool, or None."""
        batch, seq, _ = x.shape
        q, k, v = (
            each.view(batch, seq, -1, self.dim).transpose(1, 2)
            for each in (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        )
        q, k = (each * cos + _turned(each) * sin for each in (q, k))
        out = F.scaled_dot_product_attention(
            q.to(v.dtype), k.to(v.dtype), v, mask, is_causal=mask is None, enable_gqa=self.groups != self.heads
        )
        projected: Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, seq, -1))
        return projected


def _turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


class FeedForward(nn.Module):
    """Feed-forward network with SwiGLU."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(hidden, ffn, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps [..., hidden] to the same shape."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Mixture(nn.Module):
    """Experts after a router whose softmax is over the chosen ones; computed one after the other."""

    def __init__(self, hidden: int, experts: Mapping[str, Any]) -> None:
        super().__init__()
        self.top_k = experts["top_k"]
        self.gate = nn.Linear(hidden, experts["num_experts"], bias=False)
        self.experts = nn.ModuleList(
            FeedForward(hidden, experts["ffn_hidden_size"]) for _ in range(experts["num_experts"])
        )

    def forward(self, x: Tensor) -> Tensor:
        """Maps [batch, seq, hidden] to the same shape."""
        tokens = x.flatten(0, 1)
        scores, chosen = self.gate(tokens).topk(self.top_k, dim=-1)
        weights, out = scores.softmax(-1), torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, places = (chosen == number).nonzero(as_tuple=True)
            out = out.index_add(0, rows, weights[rows, places, None] * expert(tokens[rows]))
        return out.view_as(x)


class Norm(nn.Module):
    """RMSNorm with a weight."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor) -> Tensor:
        """Normalizes [..., hidden]."""
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), 1e-5)


class Layer(nn.Module):
    """Attention and a feed-forward part, each after a norm."""

    def __init__(self, model: Mapping[str, Any], number: int) -> None:
        super().__init__()
        hidden, experts, every = model["hidden_size"], model.get("experts"), model.get("global_attention_every")
        self.input_layernorm, self.post_attention_layernorm = Norm(hidden), Norm(hidden)
        self.self_attn = Attention(model)
        self.mlp = FeedForward(hidden, model["ffn_hidden_size"]) if experts is None else Mixture(hidden, experts)
        window = model.get("sliding_window")
        self.window = None if window is None or (every and (number + 1) % every == 0) else int(window)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, masks: dict[int | None, Tensor | None]) -> Tensor:
        """Maps [batch, seq, hidden] to the same shape."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, masks[self.window])
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Llama(nn.Module):
    """Llama or Mixtral: embedding, layers, logits."""

    def __init__(self, model: Mapping[str, Any]) -> None:
        super().__init__()
        self.model: Any = nn.Module()
        self.model.embed_tokens = nn.Embedding(model["vocab_size"], model["hidden_size"])
        layers = [Layer(model, number) for number in range(model["num_layers"])]
        self.model.layers = nn.ModuleList(layers)
        self.model.norm = Norm(model["hidden_size"])
        self.lm_head = nn.Linear(model["hidden_size"], model["vocab_size"], bias=False)
        if model.get("tied_embeddings"):
            self.lm_head.weight = self.model.embed_tokens.weight
        for each in self.modules():
            if isinstance(each, nn.Linear | nn.Embedding):
                nn.init.normal_(each.weight, std=0.02)
        self.dim: int = layers[0].self_attn.dim
        self.windows: set[int | None] = {layer.window for layer in layers}

    def forward(self, tokens: Tensor, labels: Tensor, starts: Tensor | None = None) -> Tensor:
        """Sums the losses of all tokens, in nats.

        Args:
            tokens: [batch, seq] int64.
            labels: Labels, [batch, seq] int64; -100 is not counted.
            starts: Index at which the document of each token begins, [batch, seq] int64; None: each row is one
                document.
        """
        seq, device = tokens.shape[1], tokens.device
        places = torch.arange(seq, device=device)
        positions = places.expand_as(tokens) if starts is None else places - starts
        kind = torch.float64 if self.lm_head.weight.dtype == torch.float64 else torch.float32
        frequencies = ROPE_BASE ** (-torch.arange(0, self.dim, 2, device=device, dtype=kind) / self.dim)
        angles = (positions[:, None, :, None] * frequencies).repeat(1, 1, 1, 2)
        masks = {window: _mask(places, starts, window) for window in self.windows}
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x, angles.cos(), angles.sin(), masks)
        logits = self.lm_head(self.model.norm(x))
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100)


def _mask(places: Tensor, starts: Tensor | None, window: int | None) -> Tensor | None:
    """Makes the mask of the keys that a query sees, [batch or 1, 1, seq, seq] bool; None for a plain causal mask."""
    if starts is None and window is None:
        return None
    back = places[:, None] - places[None, :]
    seen = (back >= 0) & (back < window) if window is not None else back >= 0
    return seen[None, None] if starts is None else (seen & (places[None, None, :] >= starts[:, :, None]))[:, None]
