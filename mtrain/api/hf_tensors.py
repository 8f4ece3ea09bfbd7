"""Weights of a distributed model under Hugging Face's names and shapes, gathered a bucket at a time, and their changes.

Names, shapes and bits are those of an export, since the same tables define both. No disk is used.
"""

import itertools
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Literal, NamedTuple, TypeAlias, assert_never, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from mtrain.arch.adapters import is_learned_whole
from mtrain.base.errors import ConfigError
from mtrain.base.tensor_slice import TensorSlice
from mtrain.checkpoint.state.gather import WholeParameters
from mtrain.convert.adapters import peft_tensor
from mtrain.convert.merged import Merging, dtype_outside, slice_of, stacked_places
from mtrain.convert.origin import source_of_run
from mtrain.convert.target import exported_family
from mtrain.core.engine.rank_model import RankModel
from mtrain.core.layers.layer_spec import canonical_name, global_name
from mtrain.core.layers.transformer_config import DTYPES
from mtrain.core.ranks.init import on_all_ranks, on_first_rank
from mtrain.hf.io.broadcast import NamedKind, TensorKind, buffer_bytes, send_bytes, send_tensors
from mtrain.hf.io.weight_delta import Change, Part, weights_fingerprint
from mtrain.hf.schema import peft
from mtrain.hf.schema.family import Family
from mtrain.hf.schema.peft import PeftTensor
from mtrain.hf.schema.table import FilledSlice, stream_tensor

HfContent: TypeAlias = Literal["merged", "base", "adapter"]
"""Weights of a model with adapters: merged, the frozen model alone, or the adapters alone under PEFT's names. Without
adapters, merged and base are the same."""


class _Unit(NamedTuple):
    """Exported tensors that are computed from the same parameters."""

    sources: Sequence[str]
    """Global names of these parameters."""
    tensors: Sequence[NamedKind]
    make: Callable[[Mapping[str, Tensor]], Sequence[Tensor]]
    """Computes `tensors` from the whole parameters by name, in the order of `sources`."""

    @property
    def size_bytes(self) -> int:
        return sum(tensor.kind.size_bytes for tensor in self.tensors)


class HfTensors:
    """Exported tensors of a model."""

    def __init__(self, model: RankModel, content: HfContent, dtype: torch.dtype | None = None) -> None:
        """Plans the tensors; gathers none yet. Raises as `Engine.weight_deltas`, on all ranks.

        Collective over the world: two all-gathers of objects, and the gathering of the model's updated parameters.

        Args:
            dtype: Dtype for tensors in the run's precision; None: that precision.
        """
        if content not in get_args(HfContent):
            raise ValueError(f"content is {content!r}, but must be one of {', '.join(get_args(HfContent))}")
        if content == "adapter" and model.config.adapter is None:
            raise ConfigError(
                "content='adapter' needs a model with adapters, but the configuration has no adapter section"
            )
        model.sharded.gather_parameters()
        self._config, self._content, self._device = model.config, content, model.groups.device
        self._dtype = dtype
        self._whole = WholeParameters(model.chunks, model.groups)
        self._units = on_all_ranks(lambda: list(self._planned()))

    def stream(self, bucket_bytes: int, everywhere: bool) -> Iterator[tuple[str, Tensor]]:
        """Yields every tensor, gathered a bucket at a time; arguments as for `Engine.named_hf_tensors`.

        Collective over the world until the end of the iteration. Memory: about three times the larger of a bucket and
        the largest tensor.
        """
        for bucket in self._buckets(bucket_bytes):
            yield from self._exported(bucket, None if everywhere else 0)

    def by_rank(self, bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        """Yields every tensor on one rank, bucket i on rank i modulo the number of ranks; one bucket a rank at a time.

        Collective over the world until the end of the iteration. A tensor always goes to the same rank.
        """
        buckets, count = self._buckets(bucket_bytes), dist.get_world_size()
        for first in range(0, len(buckets), count):
            made = [list(self._exported(bucket, rank)) for rank, bucket in enumerate(buckets[first : first + count])]
            yield [tensor for tensors in made for tensor in tensors]  # empty for the buckets of other ranks

    def _exported(self, bucket: Sequence[_Unit], receiver: int | None) -> Iterator[tuple[str, Tensor]]:
        whole = self._whole.gather([name for unit in bucket for name in unit.sources], receiver)
        if whole is None:
            return
        for unit in bucket:
            parameters = {name: whole.pop(name) for name in unit.sources}  # freed when the next unit is made
            yield from zip([tensor.name for tensor in unit.tensors], unit.make(parameters), strict=True)

    def send(self, bucket_bytes: int, group: dist.ProcessGroup | None) -> int:
        """Sends all tensors to the other ranks of `group`; ranks without a group only help to gather them. Returns the
        number of bytes, on all ranks."""
        tensors = self.stream(bucket_bytes, everywhere=False)
        buckets = [[tensor for unit in bucket for tensor in unit.tensors] for bucket in self._buckets(bucket_bytes)]
        if group is not None:
            send_tensors(tensors, buckets, group, self._device)
        for _ in tensors:
            raise AssertionError("only rank 0 gets tensors, and it has sent them all")
        return sum(buffer_bytes([tensor.kind for tensor in bucket]) for bucket in buckets)

    def _buckets(self, bucket_bytes: int) -> list[list[_Unit]]:
        buckets: list[list[_Unit]] = [[]]
        filled = 0
        for unit in self._units:
            if buckets[-1] and filled + unit.size_bytes > bucket_bytes:
                buckets.append([])
                filled = 0
            buckets[-1].append(unit)
            filled += unit.size_bytes
        return buckets

    def _planned(self) -> Iterator[_Unit]:
        source = source_of_run(self._config)
        family = exported_family(source.model, source.origin)
        match self._content:
            case "adapter":
                yield from self._adapter_units(family)
            case "merged" | "base":
                # a matrix that is trained as a whole is not part of the frozen model
                adapter = self._config.adapter if self._content == "base" else None
                for filled in family.table(source.model).slices:
                    if adapter is None or not is_learned_whole(self._config.model, adapter, filled.key):
                        yield self._unit(filled)
            case _:
                assert_never(self._content)

    def _unit(self, filled: FilledSlice) -> _Unit:
        """Plans a slice of a global tensor, such as one layer's fused projection, and the tensors in it."""
        key, adapter = filled.key, self._config.adapter if self._content == "merged" else None
        names = {index: global_name(key, index) for index in stacked_places(key, filled.at)}
        merging = None if adapter is None else Merging(self._config, adapter)
        sources = [] if merging is None else [source for name in names.values() for source in merging.sources(name)]
        source_dtype = self._whole.kinds[next(iter(names.values()))].dtype
        if merging is not None:  # a frozen base may be stored in lower precision than the run computes in
            source_dtype = dtype_outside(key, DTYPES[self._config.train.precision])
        dtype = self._sent_as(key, source_dtype)
        axes = len(next(iter(names)))
        inner = TensorSlice.whole(filled.at.shape[axes:])

        def make(whole: Mapping[str, Tensor]) -> list[Tensor]:
            # without the rows that pad the vocabulary
            matrices = {index: inner.of(whole[name]) for index, name in names.items()}
            if merging is not None:
                matrices = {
                    index: merging.merged(names[index], matrix, whole.__getitem__).to(source_dtype)
                    for index, matrix in matrices.items()
                }

            def read(key: str, part: TensorSlice) -> Tensor:
                return slice_of(key, part, dtype, matrices.__getitem__)

            return [torch.cat(list(stream_tensor(tensor, key, read))).view(tensor.shape) for tensor in filled.tensors]

        tensors = [NamedKind(tensor.name, TensorKind(dtype, tensor.shape)) for tensor in filled.tensors]
        return _Unit([*names.values(), *sources], tensors, make)

    def _adapter_units(self, family: Family) -> Iterator[_Unit]:
        adapter = self._config.adapter
        assert adapter is not None, "`__init__` refuses None"
        # PEFT gives a tied table two names, one after the other
        for _, alike in itertools.groupby(peft.tensors(family, self._config.model, adapter), lambda tensor: tensor.key):
            tensor, *aliases = alike
            count = tensor.matrix.num_experts
            key = canonical_name(tensor.key)
            names = [key.replace("{E}", str(expert)) for expert in range(count)] if count else [key]
            dtype = self._sent_as(tensor.key, self._whole.kinds[names[0]].dtype)
            kinds = [NamedKind(same.name, TensorKind(dtype, tensor.shape)) for same in (tensor, *aliases)]
            yield _Unit(names, kinds, partial(_peft_tensors, tensor, kinds))

    def _sent_as(self, key: str, dtype: torch.dtype) -> torch.dtype:
        """Returns the dtype to export a tensor in, whose dtype in the run is `dtype`."""
        is_precision = dtype == DTYPES[self._config.train.precision]
        return dtype if self._dtype is None or not is_precision else dtype_outside(key, self._dtype)


def need_group(group: dist.ProcessGroup | None) -> None:
    if group is None:
        raise ConfigError("rank 0 sends the weights, but its group is None; pass a group of rank 0 and the receivers")


def _peft_tensors(target: PeftTensor, kinds: Sequence[NamedKind], whole: Mapping[str, Tensor]) -> list[Tensor]:
    parameters = list(whole.values())
    tensor = peft_tensor(target, torch.stack(parameters) if target.matrix.num_experts else parameters[0])
    return [tensor.to(kinds[0].kind.dtype)] * len(kinds)


class WeightDeltas:
    """Sends weights as changes from one sync to the next; every method is collective.

    The tensors of the last sync stay in host memory: a copy of the model in the dtype that is sent, divided over all
    ranks. Each rank gathers its share, compares it, and sends the changes.
    """

    def __init__(self, plan: Callable[[], HfTensors], bucket_bytes: int, device: torch.device) -> None:
        """`plan` returns the tensors of the current weights, not gathered yet."""
        names = [uuid.uuid4().hex]
        dist.broadcast_object_list(names, src=0)
        self._plan, self._bucket_bytes, self._device, self._session = plan, bucket_bytes, device, names[0]
        self.sync = 0
        """Number of the last sync with changes."""
        self._last_sent: dict[str, Tensor] = {}
        self._fingerprints: dict[str, str] = {}
        self._is_interrupted = True

    def parts(self, everywhere: bool = False, full: bool = False) -> Iterator[Tensor]:
        """Yields the changes since the last sync, if any, as [bytes] uint8 on the CPU, for `WeightCopy.apply`.

        Every rank must iterate to the end, and must not call another method of the engine meanwhile. The first sync has
        all weights, and so has the sync after an interrupted one. Each bucket costs the gather of `named_hf_tensors` to
        one rank, one all-gather of a number and one message.

        Args:
            everywhere: Whether every rank gets the parts; if not, only rank 0 does, and others iterate over nothing.
            full: Whether to send all weights; true on any rank applies to all.
        """
        wants_full = torch.tensor(int(full or self._is_interrupted), device=self._device)
        dist.all_reduce(wants_full, op=dist.ReduceOp.MAX)
        is_full, self._is_interrupted, has_changed = bool(wants_full.item()), True, False
        if is_full:
            self._last_sent, self._fingerprints = {}, {}
        head = Part(self._session, self.sync + 1, is_full)
        for named in self._plan().by_rank(self._bucket_bytes):
            changes = self._changes(named)
            payload = head._replace(changes=changes).encoded() if changes else torch.empty(0, dtype=torch.uint8)
            for part in self._delivered(payload, everywhere):
                has_changed = True
                if part is not None:
                    self._fingerprints |= {change.name: change.fingerprint for change in Part.decoded(part).changes}
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
            full: Whether to send all weights, as a receiver may request; true on any rank applies to all.

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
        changes = []
        for name, tensor in named:
            change = Change.between(name, self._last_sent.get(name), tensor)
            if change is not None:
                changes.append(change)
                if name not in self._last_sent:
                    self._last_sent[name] = change.values.view(change.kind.shape)
        return changes

    def _delivered(self, payload: Tensor, everywhere: bool) -> Iterator[Tensor | None]:
        """Yields the part of each rank that has one; None on ranks that do not receive it."""
        rank, count = dist.get_rank(), dist.get_world_size()
        lengths = [torch.zeros(1, dtype=torch.int64, device=self._device) for _ in range(count)]
        dist.all_gather(lengths, torch.tensor([payload.numel()], device=self._device))
        for owner, length in enumerate(int(size.item()) for size in lengths):
            if length == 0:
                continue
            is_mine, is_wanted = owner == rank, everywhere or rank == 0
            part = None
            if is_mine or is_wanted:
                part = payload.to(self._device) if is_mine else payload.new_empty(length, device=self._device)
            if part is not None and everywhere:
                dist.broadcast(part, src=owner)
            elif part is not None and owner != 0:
                dist.send(part, dst=0) if is_mine else dist.recv(part, src=owner)
            yield part.cpu() if part is not None and is_wanted else None
