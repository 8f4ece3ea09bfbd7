"""Weights, gradients and optimizer state that the ranks of DP x CP divide (ZeRO-3), by torch's fully_shard.

Each rank holds some rows of every parameter, in float32. Before a layer computes, its rows are gathered in the run's
precision; after its backward pass, gradients are summed over the ranks in float32, and each rank keeps those of its
rows. So the shards are the main weights, and nothing is copied after an update.

Embeddings and output layer stay gathered from the beginning of a forward pass to the end of its backward pass: the loss
multiplies by the table after the model's forward pass has ended, where fully_shard would no longer see its gradient.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.transformer import TransformerConfig, TransformerLayer
from megatron.core.utils import get_model_config
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from mtrain.base.errors import ConfigError
from mtrain.config.schema.train import AdamWSection, MuonSection, TrainSection
from mtrain.core.engine.sharded_model import FlatSlice, optimizer_config
from mtrain.core.layers.build import in_precision
from mtrain.core.layers.language_model import LanguageModel
from mtrain.core.layers.moe.experts import Experts
from mtrain.core.layers.mtp import Depth
from mtrain.core.layers.sharded_parameters import HeldRows, divide, stand_in_of
from mtrain.core.ranks.groups import Groups


class _Divided(NamedTuple):
    """A parameter in its three forms."""

    name: str
    parameter: Any
    """DTensor that fully_shard gathers from, and whose gradient it sums."""
    stand_in: nn.Parameter
    """Parameter of the whole shape, without memory; see `divide`."""
    main: Any
    """Rows that this rank updates: an ordinary parameter in the memory of the DTensor."""


class ShardedWeights:
    """The `ShardedModel` whose weights are divided."""

    def __init__(
        self,
        train: TrainSection,
        optimizer: AdamWSection | MuonSection,
        groups: Groups,
        translated: TransformerConfig,
        chunks: Sequence[LanguageModel],
    ) -> None:
        """Divides the weights of the chunks; `translated` holds megatron-core's callbacks for them."""
        self._train, self._section, self._groups = train, optimizer, groups
        self._chunks = chunks
        self._facades: list[Any] = []
        for chunk in chunks:
            in_precision(train, translated, chunk)  # rounds the weights, from which the shards are widened again
            self._facades.append(_Facade(chunk, _divided(chunk, groups, translated.params_dtype)))

    @property
    def _learning(self) -> Iterator[_Divided]:
        for facade in self._facades:
            yield from (each for each in facade.divided if each.main.requires_grad)

    @property
    def chunks(self) -> Sequence[nn.Module]:
        return self._chunks

    @property
    def is_divided(self) -> bool:
        return True

    def optimizer(self) -> MegatronOptimizer:
        with torch.no_grad():
            for each in self._learning:
                # as main weights start elsewhere: from the weights that compute
                each.main.copy_(each.main.to(each.stand_in.dtype))
        # shards are float32 whatever computes, so it is an optimizer without copies
        train = self._train.model_copy(update={"precision": "fp32"})
        translated = optimizer_config(self._section, train, _Facade.ddp_config)
        overrides = {} if self._section.decay_norms_and_biases else get_standard_config_overrides(translated)
        return get_megatron_optimizer(
            translated,
            self._facades,
            config_overrides=overrides,
            use_gloo_process_groups=False,
            pg_collection=self._groups.collection,
        )

    def slices(self, part: Any) -> Iterator[FlatSlice]:
        found = {id(each.main): each.stand_in for each in self._learning}
        for main in part.get_parameters():
            stand_in: Any = found[id(main)]
            yield FlatSlice(stand_in, main, stand_in.held.start, stand_in.held.end)

    def zero_grad(self) -> None:
        for each in self._learning:
            each.parameter.grad = each.main.main_grad = None

    def no_sync(self, chunk: nn.Module) -> AbstractContextManager[None]:
        # every backward pass reduces: whole gradients of a step would take the memory that the division saves
        return contextlib.nullcontext()

    def start_grad_sync(self, chunk: nn.Module, *unused: object) -> None:
        pass

    def finish_grad_sync(self, groups: Groups) -> None:
        for each in self._learning:
            gradient = each.parameter.grad  # None: nothing in the step has used the parameter
            each.main.main_grad = torch.zeros_like(each.main) if gradient is None else gradient.to_local()
        # sums those of replicas over TP
        finalize_model_grads(self._facades, None, pg_collection=groups.collection)

    def scale_gradients(self, factor: Tensor | float) -> None:
        for gradient in self.gradient_buffers():
            gradient.mul_(factor)

    def local_gradients(self) -> Iterator[tuple[Tensor, Tensor]]:
        # sums over ranks follow each layer's backward pass, so what a rank adds never exists for all parameters
        yield from ()

    def whole_gradients(self) -> dict[Tensor, Tensor]:
        return {
            each.stand_in: torch.zeros(each.stand_in.shape, device=each.main.device)
            if each.parameter.grad is None
            else each.parameter.grad.full_tensor()
            for each in self._learning
        }

    def gradient_buffers(self) -> Iterator[Tensor]:
        yield from (each.main.main_grad for each in self._learning)

    def gather_parameters(self) -> None:
        # what is still gathered is freed: it would be used again although others may change the shards now
        for module in (module for chunk in self._chunks for module in chunk.modules()):
            if isinstance(module, FSDPModule):
                module.reshard()

    def gather_in_forward(self) -> None:
        self.gather_parameters()

    def release(self) -> None:
        for chunk in self._chunks:
            get_model_config(chunk).grad_scale_func = None


class _Facade(nn.Module):
    """The shards of a chunk as parameters of a module, for megatron-core's optimizer and its sums of gradients."""

    ddp_config = DistributedDataParallelConfig()

    def __init__(self, chunk: LanguageModel, divided: Sequence[_Divided]) -> None:
        super().__init__()
        self.module, self.config, self.divided = chunk, chunk.config, divided

    def named_parameters(self, *unused: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the rows that this rank updates, by the names of their parameters."""
        yield from ((each.name, each.main) for each in self.divided if each.main.numel())

    @property
    def pre_process(self) -> bool:
        return self.module.pre_process

    @property
    def share_embeddings_and_output_weights(self) -> bool:
        return self.module.share_embeddings_and_output_weights

    def shared_embedding_or_output_weight(self) -> nn.Parameter | None:
        """Returns the rows of the table whose gradients two stages sum."""
        table = self.module.shared_embedding_or_output_weight()
        found: nn.Parameter | None = next((each.main for each in self.divided if each.parameter is table), None)
        return found

    def finish_grad_sync(self, *unused: Any, **options: Any) -> None:
        """Does nothing: gradients are summed over DP x CP in the backward pass."""


def _divided(chunk: LanguageModel, groups: Groups, computes_in: torch.dtype) -> list[_Divided]:
    """Divides the parameters of a chunk, which are of the dtype that computes."""
    stand_ins = {name: stand_in_of(parameter) for name, parameter in chunk.named_parameters()}
    if other := sorted(name for name, each in stand_ins.items() if each.dtype != computes_in):
        raise ConfigError(
            f"{other[0]} does not compute in the precision of the run, as layout.shard=weights needs; set "
            "layout.shard=optimizer"
        )
    widest = torch.promote_types(computes_in, torch.float32)
    policy = MixedPrecisionPolicy(
        param_dtype=None if computes_in == widest else computes_in,
        reduce_dtype=widest,
        cast_forward_inputs=False,  # angles stay in float32
    )
    kind = groups.device.type
    of_experts, of_others = (DeviceMesh.from_group(each, kind) for each in (groups.collection.expt_dp, groups.dp_cp))
    for module in _units(chunk):
        mesh = of_experts if isinstance(module, Experts) else of_others
        for parameter in module.parameters():
            if not isinstance(parameter, DTensor):
                parameter.data = parameter.data.to(widest)  # in one unit at a time
        # the model itself stays gathered: it has what the loss multiplies by
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=module is not chunk)
    for module in chunk.modules():
        if isinstance(module, FSDPModule):
            # Neither is recursive. Sums: gradients are divided once, by the denominator (core/engine/finalize.py).
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return [_with_rows(name, each, stand_ins[name], groups) for name, each in chunk.named_parameters()]


@torch.no_grad()
def _with_rows(name: str, parameter: Any, stand_in: Any, groups: Groups) -> _Divided:
    assert isinstance(parameter, DTensor), f"{name} is not divided"
    main: Any = nn.Parameter(parameter.to_local(), parameter.requires_grad)
    vars(main).update(vars(stand_in))  # marks of the gradient norm, and of sums over TP
    replicas = groups.replicas_of(stand_in)
    rows = -(-parameter.shape[0] // replicas.size())  # as torch.chunk divides them
    first = min(replicas.rank() * rows, parameter.shape[0])
    assert len(main) == min(rows, parameter.shape[0] - first), f"{name} is divided otherwise than by torch.chunk"
    divide(parameter, stand_in, HeldRows(main, first * math.prod(parameter.shape[1:])))
    return _Divided(name, parameter, stand_in, main)


def _units(chunk: LanguageModel) -> Iterator[nn.Module]:
    """Yields the modules whose parameters are gathered together, inner ones first; all are used inside their own
    forward pass."""
    for module in reversed(list(chunk.modules())):
        if isinstance(module, TransformerLayer | Depth | Experts):
            yield module
    if not chunk.share_embeddings_and_output_weights and hasattr(chunk, "embedding"):
        yield chunk.embedding
    # its own unit, although it has only a norm: the backward pass begins at its output, a tensor, also where layers
    # are recomputed in a backward pass of their own, which must not take itself for the end of the step
    yield chunk.decoder
    yield chunk
