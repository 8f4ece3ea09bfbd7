"""Rotates queries and keys by their angles, in megatron-core's self-attention.

megatron-core itself computes cosine and sine of all angles anew in every layer. On a CPU the result has the positions
of a head contiguous in memory, since attention reads one head at a time, and rows a power of two apart would collide in
the cache.
"""

from typing import Any, NamedTuple

import torch
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from torch import Tensor
from torch.autograd.function import once_differentiable

from mtrain.core.kernels import region
from mtrain.core.layers.attention.rotary import angle_parts


class Rotations(NamedTuple):
    """Cosine and sine of angles with two equal halves, times a factor; both [seq, batch or 1, 1, 2 r], in the dtype of
    the heads."""

    cosine: Tensor
    sine: Tensor


def rotations_of(angles: Tensor, dtype: torch.dtype, factor: float = 1.0) -> Rotations:
    """Computes cosine and sine, times a factor and in the dtype of the heads, of [seq, batch or 1, 1, 2 r] float32
    radians; once for all layers of a microbatch, which get the same tensor of angles."""
    # cached on the tensor itself, which all layers receive and which lives as long as the microbatch
    known: Rotations | None = getattr(angles, "known_rotations", None)
    if known is None or known.cosine.dtype != dtype:
        cosine, sine = angles.cos(), angles.sin()
        if factor != 1:
            cosine, sine = cosine * factor, sine * factor
        known = Rotations(cosine.to(dtype), sine.to(dtype))
        angles.known_rotations = known  # type: ignore[attr-defined]
    return known


def rotated_as_rounded(heads: Tensor, rotations: Rotations) -> Tensor:
    """Rotates like `rotated`, but by the operations of megatron-core and transformers, which round each product."""
    size = rotations.cosine.shape[-1]
    rotary, unrotated = heads[..., :size], heads[..., size:]
    first, second = rotary.chunk(2, dim=-1)
    rotary = rotary * rotations.cosine + torch.cat((-second, first), dim=-1) * rotations.sine
    return torch.cat((rotary, unrotated), dim=-1) if unrotated.shape[-1] else rotary


@region(activations=1)
def rotated(heads: Tensor, rotations: Rotations) -> Tensor:
    """Rotates dimensions i and i + r of the first 2 r of each head; heads are [seq, batch, heads, head_dim].

    Takes one new tensor and three passes in forward, and the same in backward; saves only the rotations, which all
    heads share. megatron-core's rope_utils.py, `_apply_rotary_pos_emb_bshd`, takes seven passes and five tensors.
    """
    if torch.compiler.is_compiling():
        output = rotated_as_rounded(heads, rotations)
        if heads.device.type == "cpu":  # the memory order of `_heads_first`
            output = output.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3)
        return output
    return _Rotation.apply(heads, *rotations)  # type: ignore[no-untyped-call]


@region(activations=1)
def split_and_rotated(mixed: Tensor, rotations: Rotations) -> tuple[Tensor, Tensor, Tensor]:
    """Splits the output of a projection, [seq, batch, groups, n + 2, head_dim], into n queries, a key and a value for
    each group, and rotates queries and keys like `rotated`.

    Writes each part once, where attention reads it, and each gradient once, where the projection reads it;
    megatron-core copies the queries before the rotation, and concatenates the gradients in backward.

    Returns:
        Queries, [seq, batch, groups * n, head_dim], keys and values, both [seq, batch, groups, head_dim].
    """
    if torch.compiler.is_compiling():
        query, key, value = mixed[..., :-2, :].flatten(2, 3), mixed[..., -2, :], mixed[..., -1, :]
        return rotated(query, rotations), rotated(key, rotations), value.clone()
    return _SplitRotation.apply(mixed, *rotations)  # type: ignore[no-untyped-call]


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        output = _heads_first(heads, heads.shape[2])
        _rotate(heads, cosine, sine, 1.0, output)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cosine, sine = ctx.saved_tensors
        output = torch.empty(gradient.shape, dtype=gradient.dtype, device=gradient.device)
        _rotate(gradient, cosine, sine, -1.0, output)  # the transpose of a rotation is its inverse
        return output, None, None


class _SplitRotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mixed: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cosine, sine)
        groups, num_queries = mixed.shape[2], mixed.shape[3] - 2
        query, key, value = (_heads_first(mixed, heads) for heads in (groups * num_queries, groups, groups))
        _rotate(mixed[..., :-2, :], cosine.unsqueeze(3), sine.unsqueeze(3), 1.0, _by_group(query, groups))
        _rotate(mixed[..., -2, :], cosine, sine, 1.0, key)
        value.copy_(mixed[..., -1, :])
        return query, key, value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, None, None]:
        cosine, sine = ctx.saved_tensors
        seq, batch, groups, size = key.shape
        num_queries = query.shape[2] // groups
        mixed = torch.empty(seq, batch, groups, num_queries + 2, size, dtype=key.dtype, device=key.device)
        _rotate(_by_group(query, groups), cosine.unsqueeze(3), sine.unsqueeze(3), -1.0, mixed[..., :-2, :])
        _rotate(key, cosine, sine, -1.0, mixed[..., -2, :])
        mixed[..., -1, :] = value
        return mixed, None, None


def _by_group(query: Tensor, groups: int) -> Tensor:
    """Views [seq, batch, groups * n, head_dim] as [seq, batch, groups, n, head_dim]."""
    return query.view(*query.shape[:2], groups, -1, query.shape[-1])


def _heads_first(like: Tensor, num_heads: int) -> Tensor:
    """Allocates [seq, batch, num_heads, head_dim] with the positions of a head contiguous in memory."""
    seq, batch, size = *like.shape[:2], like.shape[-1]
    return torch.empty(batch, num_heads, seq, size, dtype=like.dtype, device=like.device).permute(2, 0, 1, 3)


def _rotate(heads: Tensor, cosine: Tensor, sine: Tensor, sign: float, output: Tensor) -> None:
    """Rotates by the angles times the sign, into `output`."""
    size = cosine.shape[-1] // 2
    first, second, sine = heads[..., :size], heads[..., size : 2 * size], sine[..., :size]
    # the whole rotary part at once, since each half is only half as long a range of memory
    torch.mul(heads[..., : 2 * size], cosine, out=output[..., : 2 * size])
    output[..., :size].addcmul_(second, sine, value=-sign)
    output[..., size : 2 * size].addcmul_(first, sine, value=sign)
    if heads.shape[-1] > 2 * size:
        output[..., 2 * size :].copy_(heads[..., 2 * size :])


def _is_exact(heads: Tensor) -> bool:
    """Says whether `rotated` may be used; half precision needs the rounding of megatron-core and transformers."""
    return heads.device.type == "cpu" and heads.dtype.itemsize >= 4


def is_rotated(attention: SelfAttention) -> bool:
    """Says whether a layer rotates its queries and keys."""
    without = attention.config.no_rope_freq
    return not (without and without[attention.layer_number - 1])


def with_rotation_factor(heads: Tensor, size: int, factor: float) -> Tensor:
    """Multiplies the first `size` dimensions of heads, which rotate next, by the factor of cosine and sine."""
    return torch.cat((heads[..., :size] * factor, heads[..., size:]), dim=-1)


class RotatingAttention(SelfAttention):
    """Grouped-query self-attention that rotates queries and keys itself."""

    compiles_regions = False

    _angles: Tensor | None = None
    """Angles of the current call; None if queries and keys are not rotated here."""
    rotation_factor = 1.0
    """Factor of cosine and sine."""
    rotary_size = 0
    """Number of dimensions of a head that rotate."""

    def forward(
        self, hidden_states: Tensor, *arguments: Any, rotary_pos_emb: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attends like megatron-core's module, with its arguments.

        Angles are [seq_local, batch or 1, 1, 2 r] in radians, float32, the second half equal to the first.
        """
        if torch.compiler.is_compiling():  # the compiler fuses megatron-core's rotation
            return super().forward(hidden_states, *arguments, rotary_pos_emb=rotary_pos_emb, **options)
        self._angles = rotary_pos_emb if is_rotated(self) else None
        try:
            output = super().forward(hidden_states, *arguments, rotary_pos_emb=None, **options)
        finally:
            self._angles = None
        return output

    def get_query_key_value_tensors(self, hidden_states: Tensor, *arguments: Any, **options: Any) -> tuple[Tensor, ...]:
        """Returns the result of megatron-core's method, rotated if `forward` has deferred that to this method."""
        if self._angles is None:
            query, key, *further = super().get_query_key_value_tensors(hidden_states, *arguments, **options)
            if torch.compiler.is_compiling() and is_rotated(self) and self.rotation_factor != 1:
                # megatron-core rotates next, without a factor
                query, key = (
                    with_rotation_factor(heads, self.rotary_size, self.rotation_factor) for heads in (query, key)
                )
            return query, key, *further
        is_taken = self.compiles_regions or _is_exact(hidden_states)
        if is_taken and self._is_plainly_split:
            mixed, _ = self.linear_qkv(hidden_states)
            shape = self.num_query_groups_per_partition, -1, self.hidden_size_per_attention_head
            rotations = rotations_of(self._angles, mixed.dtype, self.rotation_factor)
            split = split_and_rotated.compiled_if(self.compiles_regions)
            return split(mixed.view(*mixed.shape[:2], *shape), rotations)
        query, key, *further = super().get_query_key_value_tensors(hidden_states, *arguments, **options)
        return *self.rotated_here(query, key), *further

    def rotated_here(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Rotates queries and keys if `forward` has deferred that to this module."""
        if self._angles is None:
            return query, key
        rotations = rotations_of(self._angles, query.dtype, self.rotation_factor)
        if self.compiles_regions or _is_exact(query):
            rotate = rotated.compiled_if(self.compiles_regions)
            return rotate(query, rotations), rotate(key, rotations)
        return rotated_as_rounded(query, rotations), rotated_as_rounded(key, rotations)

    def _apply_output_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """Multiplies [seq, batch, heads_local * head_dim] by the sigmoid of a gate, in at least float32."""
        wide = torch.promote_types(x.dtype, torch.float32)
        return (x * gate.reshape(x.shape).to(wide).sigmoid()).to(x.dtype)

    @property
    def _is_plainly_split(self) -> bool:
        """Says whether the projection yields just this rank's queries, keys and values, and rotation comes next."""
        norms = self.q_layernorm, self.k_layernorm
        has_own_groups = self.config.num_query_groups >= self.world_size
        is_gated = self.config.attention_output_gate
        return has_own_groups and not is_gated and all(norm is None or isinstance(norm, IdentityOp) for norm in norms)


class TemperedAttention(RotatingAttention):
    """Self-attention that multiplies each query, after its rotation, by a factor that grows with the position."""

    _factor: Tensor | None = None
    """Factor of the current call, [seq, batch or 1, 1, 1]."""

    def forward(
        self, hidden_states: Tensor, *arguments: Any, rotary_pos_emb: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attends like `RotatingAttention`, which describes the arguments; the angles come from a TemperedRotary."""
        assert rotary_pos_emb is not None
        angles, self._factor = angle_parts(rotary_pos_emb, -1)
        try:
            return super().forward(hidden_states, *arguments, rotary_pos_emb=angles, **options)
        finally:
            self._factor = None

    def get_query_key_value_tensors(self, hidden_states: Tensor, *arguments: Any, **options: Any) -> tuple[Tensor, ...]:
        """Returns the result of `RotatingAttention`, with queries multiplied by their factor."""
        assert self._factor is not None
        query, *further = super().get_query_key_value_tensors(hidden_states, *arguments, **options)
        return query * self._factor.to(query.dtype), *further
