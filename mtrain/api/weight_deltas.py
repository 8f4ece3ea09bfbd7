"""Changes of a distributed model's weights since they were last sent, for an inference engine."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mtrain.api.hf_tensors import HfTensors, need_group
from mtrain.core.ranks.init import on_first_rank
from mtrain.hf.io.broadcast import send_bytes
from mtrain.hf.io.weight_delta import Change, Part, weights_fingerprint


class WeightDeltas:
    """Sends weights as changes from one sync to the next; every method is collective.

    The tensors of the last sync stay in host memory, each on one rank: a copy of the model in the dtype that is sent,
    divided over all ranks. A rank gathers its share, compares it, and sends the changes.
    """

    def __init__(self, plan: Callable[[], HfTensors], bucket_bytes: int, device: torch.device) -> None:
        """`plan` plans the tensors of the current weights."""
        names = [uuid.uuid4().hex]
        dist.broadcast_object_list(names, src=0)
        self._plan, self._bucket_bytes, self._device, self._session = plan, bucket_bytes, device, names[0]
        self.sync = 0
        """Number of the last sync with changes."""
        self._held: dict[str, Tensor] = {}
        self._fingerprints: dict[str, str] = {}
        self._is_interrupted = True

    def parts(self, everywhere: bool = False, full: bool = False) -> Iterator[Tensor]:
        """Yields the changes since the last sync, as [bytes] uint8 on the CPU, for `WeightCopy.apply`; nothing without
        changes.

        Every rank must iterate to the end, and must not call another method of the engine meanwhile. The first sync has
        all weights, and so has one after an interrupted one. Costs the gathers of `named_hf_tensors` to one rank each,
        and for each bucket one all-gather of a number and one message.

        Args:
            everywhere: Whether every rank gets the parts; if not, only rank 0 does, and others iterate over nothing.
            full: Whether to send all weights; it is enough that one rank says so.
        """
        asked = torch.tensor(int(full or self._is_interrupted), device=self._device)
        dist.all_reduce(asked, op=dist.ReduceOp.MAX)
        is_full, self._is_interrupted, has_changed = bool(asked.item()), True, False
        if is_full:
            self._held, self._fingerprints = {}, {}
        head = Part(self._session, self.sync + 1, is_full)
        for named in self._plan().by_rank(self._bucket_bytes):
            changes = self._changes(named)
            own = head._replace(changes=changes).encoded() if changes else torch.empty(0, dtype=torch.uint8)
            for part in self._delivered(own, everywhere):
                has_changed = True
                if part is not None:
                    self._fingerprints |= {each.name: each.fingerprint for each in Part.decoded(part).changes}
                    yield part
        if has_changed:
            self.sync += 1
            if everywhere or dist.get_rank() == 0:
                yield head._replace(weights=weights_fingerprint(self._fingerprints)).encoded()
        self._is_interrupted = False

    def broadcast(self, group: dist.ProcessGroup | None, full: bool = False) -> int:
        """Sends the changes since the last sync to other processes, which call `WeightCopy.receive`.

        Args:
            group: Group of rank 0 and the receivers on rank 0, with a backend that sends from the engine's device; it
                need not be part of the default process group. None on the other ranks.
            full: Whether to send all weights, as a receiver may request; it is enough that one rank says so.

        Returns:
            Number of bytes that this rank sent.

        Raises:
            ConfigError: Rank 0 has no group.
            DataError: No Hugging Face family can describe the model.
        """
        on_first_rank(lambda: need_group(group))
        num_bytes = 0
        for part in self.parts(full=full):
            assert group is not None, "only rank 0 gets parts"
            send_bytes(part, group, self._device)
            num_bytes += part.numel()
        if group is not None and dist.get_rank() == 0:
            send_bytes(torch.empty(0, dtype=torch.uint8), group, self._device)  # the end
        return num_bytes

    def _changes(self, named: Sequence[tuple[str, Tensor]]) -> list[Change]:
        """Compares tensors with those of the last sync, and keeps them for the next."""
        found = []
        for name, tensor in named:
            change = Change.between(name, self._held.get(name), tensor)
            if change is not None:
                found.append(change)
                if name not in self._held:
                    self._held[name] = change.values.view(change.kind.shape)
        return found

    def _delivered(self, own: Tensor, everywhere: bool) -> Iterator[Tensor | None]:
        """Yields each rank's part if there is one, or None on ranks that do not get it."""
        rank, count = dist.get_rank(), dist.get_world_size()
        lengths = [torch.zeros(1, dtype=torch.int64, device=self._device) for _ in range(count)]
        dist.all_gather(lengths, torch.tensor([own.numel()], device=self._device))
        for owner, length in enumerate(int(each.item()) for each in lengths):
            if length == 0:
                continue
            is_mine, is_wanted = owner == rank, everywhere or rank == 0
            part = None
            if is_mine or is_wanted:
                part = own.to(self._device) if is_mine else own.new_empty(length, device=self._device)
            if part is not None and everywhere:
                dist.broadcast(part, src=owner)
            elif part is not None and owner != 0:
                dist.send(part, dst=0) if is_mine else dist.recv(part, src=owner)
            yield part.cpu() if part is not None and is_wanted else None
