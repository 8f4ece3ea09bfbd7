"""Weights as changes since the last sync, and a receiver's copy of them.

A sync consists of parts, each with the changes of some tensors; the last part also has the fingerprint of all weights.
A part is bytes: the SHA-256 of a description, the description's length, the description in JSON with a fingerprint per
tensor, then positions and values of the changed elements. Needs only torch and numpy, so that a receiver loads neither
Megatron-Core nor a configuration.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mtrain.base.errors import DataError
from mtrain.hf.io.broadcast import ALIGNMENT, TensorKind, buffer_bytes, receive_bytes, views

_VERSION = 1
_DIGEST_BYTES, _BEFORE_TEXT = 32, 40
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WIDTHS = ("uint8", "uint16", "uint32", "uint64")
_NO_POSITIONS = torch.empty(0, dtype=torch.uint8)
_ASK = "ask the trainer for all weights (full=True)"


class Change(NamedTuple):
    name: str
    kind: TensorKind
    form: str
    """Encoding of `positions`: "mask" is a bit per element, an integer type such as "uint16" the gaps between changed
    elements, and "whole" nothing, because `values` has all elements."""
    positions: Tensor
    """[bytes] uint8."""
    values: Tensor
    """[changed] in the tensor's dtype."""
    fingerprint: str
    """Fingerprint of the whole tensor after the change."""

    @classmethod
    def between(cls, name: str, old: Tensor | None, new: Tensor) -> Change | None:
        """Returns the bitwise changes of a tensor in their shortest form; None without changes.

        Args:
            old: Earlier tensor on the CPU, which is overwritten with `new`; None if the receiver has none.
            new: Current tensor, on any device.
        """
        kind, flat = TensorKind(new.dtype, tuple(new.shape)), new.flatten()
        if old is None:
            values = flat.cpu()
            return cls(name, kind, "whole", _NO_POSITIONS, values, fingerprint_of(values))
        bits = _BITS[new.element_size()]  # bits, not numbers: -0 is not 0, and nan is itself
        changed = flat.view(bits) != old.to(new.device).flatten().view(bits)
        if not changed.any():
            return None
        old.copy_(new)
        form, positions = _packed(changed.cpu().numpy())
        values = flat.view(bits)[changed].view(new.dtype).cpu()  # as bits, because torch cannot index every dtype
        if positions.nbytes + values.nbytes >= new.nbytes:
            form, positions, values = "whole", _NO_POSITIONS, old.flatten()
        return cls(name, kind, form, positions, values, fingerprint_of(old))

    def applied(self, old: Tensor | None) -> Tensor | None:
        """Returns a new tensor with the change applied; None if the change does not fit."""
        if self.form == "whole":
            return self.values.view(self.kind.shape).clone()
        if old is None or TensorKind(old.dtype, tuple(old.shape)) != self.kind:
            return None
        packed = self.positions.numpy()
        if self.form == "mask":
            positions = np.flatnonzero(np.unpackbits(packed, count=old.numel()))
        else:
            positions = packed.view(self.form).cumsum(dtype=np.int64)
        if len(positions) != len(self.values) or not 0 <= positions[-1] < old.numel():
            return None
        new, bits = old.clone(), _BITS[old.element_size()]
        new.view(-1).view(bits)[torch.from_numpy(positions)] = self.values.view(bits)
        return new


class Part(NamedTuple):
    session: str
    """Random name of the sender's session."""
    sync: int
    is_full: bool
    """Whether the sync has all elements of all tensors, and needs no earlier state."""
    changes: Sequence[Change] = ()
    weights: str | None = None
    """Fingerprint of all weights after the sync; None except in the last part."""

    def encoded(self) -> Tensor:
        """Returns the part as [bytes] uint8 on the CPU."""
        tensors = [tensor for change in self.changes for tensor in (change.positions, change.values)]
        kinds = [TensorKind(item.dtype, tuple(item.shape)) for item in tensors]
        changes = [
            {
                "name": change.name,
                "dtype": str(change.kind.dtype).removeprefix("torch."),
                "shape": change.kind.shape,
                "form": change.form,
                "sizes": (change.positions.numel(), change.values.numel()),
                "fingerprint": change.fingerprint,
            }
            for change in self.changes
        ]
        text = json.dumps({"version": _VERSION, **self._asdict(), "changes": changes}).encode()
        text += b" " * (-(_BEFORE_TEXT + len(text)) % ALIGNMENT)
        begin = _BEFORE_TEXT + len(text)
        buffer = torch.zeros(begin + buffer_bytes(kinds), dtype=torch.uint8)
        buffer[_DIGEST_BYTES:begin] = _bytes(len(text).to_bytes(8, "little") + text)
        for source, view in zip(tensors, views(buffer[begin:], kinds), strict=True):
            view.copy_(source)
        buffer[:_DIGEST_BYTES] = _bytes(hashlib.sha256(text).digest())
        return buffer

    @classmethod
    def decoded(cls, content: Tensor) -> Part:
        """Reads a part; its tensors are views of the bytes.

        Raises:
            DataError: The bytes are damaged, or the sender uses another version of the protocol.
        """
        content = content.cpu()
        begin = _BEFORE_TEXT + int.from_bytes(content[_DIGEST_BYTES:_BEFORE_TEXT].numpy().tobytes(), "little")
        text = content[_BEFORE_TEXT:begin].numpy().tobytes()
        if content[:_DIGEST_BYTES].numpy().tobytes() != hashlib.sha256(text).digest():
            raise DataError(_damaged("its description", content))
        head = json.loads(text)
        if head["version"] != _VERSION:
            raise DataError(
                f"the sender describes changes in version {head['version']}, but version {_VERSION} is needed; install "
                "the same version of mtrain on both sides"
            )
        dtypes = [getattr(torch, entry["dtype"]) for entry in head["changes"]]
        kinds = [
            TensorKind(kind, (size,))
            for dtype, entry in zip(dtypes, head["changes"], strict=True)
            for kind, size in zip((torch.uint8, dtype), entry["sizes"], strict=True)
        ]
        if content.numel() - begin != buffer_bytes(kinds):
            raise DataError(_damaged(f"its length, which must be {begin + buffer_bytes(kinds)} bytes,", content))
        tensors = iter(views(content[begin:], kinds))
        changes = [
            Change(
                entry["name"],
                TensorKind(dtype, tuple(entry["shape"])),
                entry["form"],
                next(tensors),
                next(tensors),
                entry["fingerprint"],
            )
            for dtype, entry in zip(dtypes, head["changes"], strict=True)
        ]
        return cls(head["session"], head["sync"], head["is_full"], changes, head["weights"])


class WeightCopy:
    """Copy of a trainer's weights that the parts of `Engine.weight_deltas` keep up to date.

    Lives in the process of an inference engine. Compares the SHA-256 of every changed tensor, and after each sync that
    of all tensors, with the trainer's.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        """Tensors by Hugging Face name, on the CPU."""
        self.sync = 0
        """Last complete sync; 0 before the first."""
        self._session = ""
        self._open: int | None = None
        self._is_sound = False
        self._fingerprints: dict[str, str] = {}

    def apply(self, part: Tensor) -> list[tuple[str, Tensor]]:
        """Applies a part, and returns the changed tensors, whole and newly allocated.

        Args:
            part: [bytes] uint8 from `WeightDeltas.parts`, in any order except that a sync's last part comes last.

        Raises:
            DataError: The part is damaged or belongs to another sync than the next, or an earlier part was lost. Every
                tensor that has changed still matches a fingerprint of the trainer.
        """
        decoded = Part.decoded(part)
        self._begin(decoded)
        for update in decoded.changes:
            new = update.applied(self.tensors.get(update.name))
            if new is None or fingerprint_of(new) != update.fingerprint:
                raise DataError(
                    f"{update.name} does not have the trainer's fingerprint after weight sync {decoded.sync}, so the "
                    f"part or this copy is damaged; send the part again, or {_ASK}"
                )
            self.tensors[update.name], self._fingerprints[update.name] = new, update.fingerprint
        if decoded.weights is not None:
            self._end(decoded)
        return [(change.name, self.tensors[change.name]) for change in decoded.changes]

    def receive(
        self, group: dist.ProcessGroup, source: int = 0, device: torch.device | str = "cpu"
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors that `WeightDeltas.broadcast` changes, as (name, whole tensor).

        Args:
            source: Rank of the sender in the group.
            device: Device on which the group receives: "cuda" with NCCL.

        Raises:
            DataError: See `apply`; raised once all parts are received, so that the group stays usable.
        """
        refused: DataError | None = None
        while (part := receive_bytes(group, source, device)).numel():
            if refused is None:
                try:
                    changed = self.apply(part)
                except DataError as error:
                    refused = error
                else:
                    yield from changed
        if refused is not None:
            raise refused

    def _begin(self, part: Part) -> None:
        """Refuses a part of any sync but the next; a full sync may come at any time, but not twice."""
        is_other = part.session != self._session
        if part.is_full and (is_other or part.sync > self.sync):
            if (part.session, part.sync, True) != (self._session, self._open, self._is_sound):
                self.tensors, self._fingerprints = {}, {}
            self._session, self._open, self._is_sound = part.session, part.sync, True
            if is_other:
                self.sync = 0
            return
        awaited = self.sync + 1 if self._open is None else self._open
        if is_other or not self._is_sound or part.sync != awaited:
            if is_other:
                reason = "it comes from another sender"
            elif self._is_sound:
                reason = f"sync {awaited} of this sender is next"
            else:
                reason = "the sync before it is incomplete"
            raise DataError(f"a part of weight sync {part.sync} cannot be applied, because {reason}; {_ASK}")
        self._open = part.sync

    def _end(self, part: Part) -> None:
        fingerprint = weights_fingerprint(self._fingerprints)
        if fingerprint != part.weights:
            self._is_sound = False
            raise DataError(
                f"the weights have fingerprint {fingerprint[:16]} after weight sync {part.sync}, but the trainer's "
                f"have {str(part.weights)[:16]}: a part was lost; {_ASK}"
            )
        self.sync, self._open = part.sync, None


def fingerprint_of(tensor: Tensor) -> str:
    """Returns the SHA-256, in hex, of a tensor's bytes on the CPU."""
    return hashlib.sha256(tensor.contiguous().flatten().view(torch.uint8).numpy().data).hexdigest()


def weights_fingerprint(fingerprints: Mapping[str, str]) -> str:
    """Returns the fingerprint of many tensors from their names and fingerprints."""
    return hashlib.sha256(json.dumps(sorted(fingerprints.items())).encode()).hexdigest()


def _packed(changed: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> tuple[str, Tensor]:
    """Returns the form and the [bytes] of changed positions, as a mask or gaps, whichever is shorter."""
    gaps = np.diff(np.flatnonzero(changed), prepend=0)
    width = next(candidate for candidate in _WIDTHS if gaps.max() <= np.iinfo(candidate).max)
    if len(gaps) * np.dtype(width).itemsize < -(-len(changed) // 8):
        return width, torch.from_numpy(gaps.astype(width).view(np.uint8))
    return "mask", torch.from_numpy(np.packbits(changed))


def _damaged(what: str, content: Tensor) -> str:
    size = content.numel()
    return f"a part of a weight sync with {size} bytes is damaged: {what} differs from the sender's; send it again"


def _bytes(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
