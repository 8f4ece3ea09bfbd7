"""The model that data-parallel ranks share: how gradients are summed, and how weights reach a forward pass.

`ShardedModel` hides how a data-parallel engine works; schedules, steps, optimizer and checkpoints use nothing else.
`DataParallel` uses megatron-core's DistributedDataParallel, whose distributed optimizer divides main weights and
moments over the replicas.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from megatron.core.optimizer.optimizer_config import ParamKey
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import get_model_config
from torch import Tensor, nn

from mtrain.arch.layout import Layout
from mtrain.config import Config
from mtrain.config.schema.train import AdamWSection, MuonSection, TrainSection
from mtrain.core.layers.build import unwrap
from mtrain.core.layers.divided_weights import free_gathered
from mtrain.core.layers.transformer_config import DTYPES, HALF_PRECISION, SMALLEST_LOSS_SCALE
from mtrain.core.ranks.groups import Groups


class FlatSlice(NamedTuple):
    """The part of a model parameter that this rank updates."""

    parameter: Tensor
    """Model parameter on this tensor-parallel rank."""
    main: Tensor
    """Float32 main weights of the inner optimizer, [end - start] or in the shape of the parameter."""
    start: int
    """Index of the first element in the flattened parameter."""
    end: int

    def set_main(self, whole: Tensor) -> None:
        """Copies this part's main weights from those of the whole parameter, a tensor of its shape."""
        # a distributed optimizer has a flat range of the parameter, regardless of rows
        part = whole.flatten()[self.start : self.end].view(self.main.shape)
        if part.data_ptr() != self.main.data_ptr():  # float32 parameters are their own main weights
            self.main.copy_(part)


class ShardedModel(Protocol):
    """This rank's chunks, with the gradients and weights that it shares with other data-parallel ranks.

    Gradients are sums, never means, in float32 between backward passes. Those of experts are summed over the replicas
    of the experts, all others over DP x CP.
    """

    @property
    def chunks(self) -> Sequence[nn.Module]:
        """Model chunks as the schedules call them, one for each virtual pipeline stage."""

    @property
    def is_divided(self) -> bool:
        """Whether replicas update different parts of the weights, so that each has only the gradients of its part."""

    def optimizer(self) -> MegatronOptimizer:
        """Builds AdamW for the weights that this rank updates; its `.grad` are views of the gradients here."""

    def take_weights(self, inner: MegatronOptimizer) -> None:
        """Copies the weights that compute, which were set from outside, into the main weights."""

    def slices(self, part: Any) -> Iterator[FlatSlice]:
        """Yields the slices that this rank updates by one of the `chained_optimizers` of the optimizer."""

    def zero_grad(self) -> None:
        """Sets all gradients to 0, before the first backward pass of a step."""

    def no_sync(self, chunk: nn.Module) -> AbstractContextManager[None]:
        """Keeps the gradients of backward passes inside the block on this rank; a later pass or call reduces them."""

    def start_grad_sync(self, chunk: nn.Module, *unused: object) -> None:
        """Starts the reduction of a chunk's gradients if it overlaps the backward pass."""

    def finish_grad_sync(self, groups: Groups) -> None:
        """Completes the reduction of all gradients, including those of replicas over TP and of tied tables."""

    def scale_gradients(self, factor: Tensor | float) -> None:
        """Multiplies all gradients in place, without a host synchronization."""

    def local_gradients(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields trained parameters with this rank's summand of their gradients, before the reduction, as views."""

    def whole_gradients(self) -> dict[Tensor, Tensor]:
        """Gathers the reduced gradients by parameter, in the parameters' shapes. Collective; for comparisons."""

    def gradient_buffers(self) -> Iterator[Tensor]:
        """Yields the memory of all gradients on this rank, in as few tensors as possible."""

    def gather_parameters(self) -> None:
        """Completes the weights for a forward pass now. Collective after an update, otherwise free."""

    def gather_in_forward(self) -> None:
        """Lets the next forward pass gather the updated weights, if the run overlaps the two; after each update."""

    def release(self) -> None:
        """Breaks reference cycles, so that the memory of chunks that are no longer trained can be freed."""


class DataParallel:
    """Whole weights on every rank; gradients in megatron-core's buckets, which it reduces bucket by bucket."""

    def __init__(
        self,
        config: Config,
        groups: Groups,
        translated: TransformerConfig,
        chunks: Sequence[nn.Module],
        in_float64: bool = False,
    ) -> None:
        """Moves the trained parameters of the chunks into buffers; `translated` holds megatron-core's callbacks."""
        self._config, self._groups = config, groups
        self._settings = ddp_config(config, groups.layout)
        self._settings.grad_reduce_in_fp32 = not in_float64
        # Any: some of its methods have no types
        self._chunks: list[Any] = [
            DistributedDataParallel(
                config=translated,
                ddp_config=self._settings,
                module=chunk,
                disable_bucketing=index > 0,  # as in Megatron-LM: only the first chunk's gradients come in buckets
                pg_collection=groups.collection,
            )
            for index, chunk in enumerate(chunks)
        ]
        if self._settings.overlap_param_gather:
            # its hooks are in place already, and would gather weights that are complete before the first update
            self._remove_hooks(gathers=False)

    @property
    def chunks(self) -> Sequence[nn.Module]:
        return self._chunks

    @property
    def is_divided(self) -> bool:
        return self._settings.use_distributed_optimizer

    def optimizer(self) -> MegatronOptimizer:
        translated = optimizer_config(self._config.optimizer, self._config.train, self._settings)
        return get_megatron_optimizer(
            translated,
            self._chunks,
            config_overrides=config_overrides(self._config.optimizer, translated),
            # these groups would serve checkpoints in megatron-core's own forms, which are not used
            use_gloo_process_groups=False,
            pg_collection=self._groups.collection,
        )

    def take_weights(self, inner: MegatronOptimizer) -> None:
        inner.reload_model_params()

    def slices(self, part: Any) -> Iterator[FlatSlice]:
        if self.is_divided:
            # gbuf_ranges: a list of buffers, each {dtypes: buckets}; param_map has only what this rank updates of a
            # bucket.
            for buckets in (ranges for buffer in part.gbuf_ranges for ranges in buffer.values()):
                for parameter, place in (item for bucket in buckets for item in bucket["param_map"].items()):
                    group, order = part.model_param_group_index_map[parameter]
                    main = part.optimizer.param_groups[group]["params"][order]
                    # "param" counts elements inside the parameter; its siblings count in the padded buffer, which
                    # changes with dp.
                    yield FlatSlice(parameter, main, place["param"].start, place["param"].end)
        elif isinstance(part, Float16OptimizerWithFloat16Params):
            # half-precision parameters have a float32 copy; float32 ones are their own main weights
            groups = zip(part.float16_groups, part.fp32_from_float16_groups)
            pairs = [pair for halves, mains in groups for pair in zip(halves, mains)]
            pairs += [(parameter, parameter) for group in part.fp32_from_fp32_groups for parameter in group]
            yield from (FlatSlice(parameter, main, 0, parameter.numel()) for parameter, main in pairs)
        else:
            parameters = part.get_parameters()
            yield from (FlatSlice(parameter, parameter, 0, parameter.numel()) for parameter in parameters)

    def zero_grad(self) -> None:
        for chunk in self._chunks:
            chunk.zero_grad_buffer()

    def no_sync(self, chunk: Any) -> AbstractContextManager[None]:
        # marks the buckets as not on their last microbatch, so backward hooks only add
        return chunk.no_sync()

    def start_grad_sync(self, chunk: Any, *unused: object) -> None:
        # finish_grad_sync asserts that a reduction was started where it overlaps; without overlap it runs one itself
        if self._settings.overlap_grad_reduce:
            chunk.start_grad_sync()

    def finish_grad_sync(self, groups: Groups) -> None:
        # None: no token count of megatron-core, hence neither its broadcast and all-reduce of it nor its division
        finalize_model_grads(self._chunks, None, pg_collection=groups.collection)

    def scale_gradients(self, factor: Tensor | float) -> None:
        for chunk in self._chunks:  # one multiplication per buffer, padding included
            chunk.scale_gradients(factor)

    def local_gradients(self) -> Iterator[tuple[Tensor, Tensor]]:
        for chunk in self._chunks:
            for parameter in chunk.parameters():
                if parameter.requires_grad:
                    yield parameter, parameter.main_grad

    def whole_gradients(self) -> dict[Tensor, Tensor]:
        if self.is_divided:  # else every rank has the whole sum already
            for chunk in self._chunks:
                _complete_gradients(chunk)
        return dict(self.local_gradients())

    def gradient_buffers(self) -> Iterator[Tensor]:
        for chunk in self._chunks:
            yield from (buffer.grad_data for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers))

    @property
    def _gathers_in_forward(self) -> bool:
        # the hooks themselves are the state: no second flag that could disagree
        return bool(self._chunks[0].remove_forward_pre_hook_handles)

    def gather_parameters(self) -> None:
        free_gathered(map(unwrap, self._chunks))  # of a frozen base that is divided
        if self._gathers_in_forward:
            self._remove_hooks(gathers=True)

    def gather_in_forward(self) -> None:
        if self._settings.overlap_param_gather and not self._gathers_in_forward:
            for chunk in self._chunks:  # all: one without hooks would compute with weights that have not arrived
                chunk.enable_forward_pre_hook()

    def _remove_hooks(self, gathers: bool) -> None:
        for chunk in self._chunks:
            chunk.disable_forward_pre_hook(param_sync=gathers)

    def release(self) -> None:
        for chunk in self._chunks:
            # Nodes of autograd hold the chunk by their hooks. megatron-core keeps them here, and the distributed
            # optimizer by its views of parameters in fp32: cycles through C++, which Python's collector does not see.
            chunk.grad_accs.clear()
            get_model_config(chunk).grad_scale_func = None


def _complete_gradients(chunk: Any) -> None:
    """Gathers the parts of each bucket: one all-gather over DP x CP, for experts over their own replicas."""
    for bucket_group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
        group = bucket_group.intra_distributed_optimizer_instance_group
        for bucket in bucket_group.buckets:
            # buckets are padded to a multiple of the ranks, so parts are equal; cloned, or input and output overlap
            own = bucket.grad_data.chunk(group.size())[group.rank()].clone()
            dist.all_gather_into_tensor(bucket.grad_data, own, group=group)


def ddp_config(config: Config, layout: Layout) -> DistributedDataParallelConfig:
    """Configures gradient buckets: always summed in float32, never averaged."""
    train = config.train
    # Ranks of tp are replicas of each other for experts alone. A single replica would only copy gradients and weights.
    has_replicas = layout.dp * layout.cp > 1 or (config.model.experts is not None and layout.edp > 1)
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,  # sums over microbatches and ranks would lose bits in half precision
        overlap_grad_reduce=train.overlap_grad_reduce,
        overlap_param_gather=train.overlap_param_gather,
        use_distributed_optimizer=train.distributed_optimizer and (has_replicas or train.overlap_param_gather),
        average_in_collective=False,  # a mean over ranks would divide before the one division
    )


def config_overrides(section: AdamWSection | MuonSection, translated: OptimizerConfig) -> dict[ParamKey, Any]:
    """Returns the options of parameters that differ from those of the others, as factors."""
    # Empty and not None, for which megatron-core would take its standard overrides: no decay of vectors and biases.
    overrides = {} if section.decay_norms_and_biases else get_standard_config_overrides(translated)
    # the vision tower marks its parameters by the names of these keys
    return overrides | {ParamKey(attr=key): {"lr_mult": lr / section.lr} for key, lr in section.lr_of_parts.items()}


def optimizer_config(
    section: AdamWSection | MuonSection, train: TrainSection, ddp: DistributedDataParallelConfig
) -> OptimizerConfig:
    """Configures AdamW with decoupled weight decay; the learning rate is set at every step."""
    return OptimizerConfig(
        optimizer="adam",  # with Muon too, which updates only the matrices
        lr=section.lr,  # replaced before every update, like weight_decay
        min_lr=section.min_lr,
        weight_decay=section.weight_decay,
        adam_beta1=section.beta1,
        adam_beta2=section.beta2,
        adam_eps=section.epsilon,
        decoupled_weight_decay=True,
        clip_grad=section.clip_grad,
        **HALF_PRECISION[train.precision],
        params_dtype=DTYPES[train.precision],
        initial_loss_scale=train.initial_loss_scale,
        min_loss_scale=SMALLEST_LOSS_SCALE,
        loss_scale_window=1000,
        hysteresis=2,
        use_distributed_optimizer=ddp.use_distributed_optimizer,
        overlap_param_gather=ddp.overlap_param_gather,
        log_num_zeros_in_grad=False,
    )
