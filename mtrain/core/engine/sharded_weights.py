"""Weights, gradients and optimizer state that the ranks of DP x CP divide (ZeRO-3); see layers/divided_weights.py.

The shards are the main weights, in float32, and nothing is copied after an update.
"""

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.utils import get_model_config
from torch import Tensor, nn

from mtrain.config.schema.train import AdamWSection, MuonSection, TrainSection
from mtrain.core.engine.sharded_model import FlatSlice, config_overrides, optimizer_config
from mtrain.core.layers.divided_weights import Divided, divide_weights, free_gathered
from mtrain.core.layers.language_model import LanguageModel
from mtrain.core.layers.sharded_parameters import gathered_rows
from mtrain.core.ranks.groups import Groups


class ShardedWeights:
    """The `ShardedModel` whose weights are divided."""

    def __init__(
        self,
        train: TrainSection,
        optimizer: AdamWSection | MuonSection,
        groups: Groups,
        computes_in: torch.dtype,
        chunks: Sequence[LanguageModel],
    ) -> None:
        """Divides the weights of the chunks; `computes_in` is their dtype."""
        self._train, self._section, self._groups = train, optimizer, groups
        self._chunks = chunks
        self._facades: list[Any] = [_Facade(chunk, divide_weights(chunk, groups, computes_in)) for chunk in chunks]

    @property
    def _learning(self) -> Iterator[Divided]:
        for facade in self._facades:
            yield from (each for each in facade.divided if each.main.requires_grad)

    @property
    def chunks(self) -> Sequence[nn.Module]:
        return self._chunks

    @property
    def is_divided(self) -> bool:
        return True

    def optimizer(self) -> MegatronOptimizer:
        # shards are float32 in every precision, so the optimizer needs no copies; that of fp16 scales the loss
        train = self._train.model_copy(update={} if self._train.precision == "fp16" else {"precision": "fp32"})
        translated = optimizer_config(self._section, train, _Facade.ddp_config)
        inner = get_megatron_optimizer(
            translated,
            self._facades,
            config_overrides=config_overrides(self._section, translated),
            use_gloo_process_groups=False,
            pg_collection=self._groups.collection,
        )
        self.take_weights(inner)
        return inner

    @torch.no_grad()
    def take_weights(self, inner: MegatronOptimizer) -> None:
        for each in self._learning:
            each.main.copy_(each.main.to(each.stand_in.dtype))

    def slices(self, part: Any) -> Iterator[FlatSlice]:
        stand_ins = {id(each.main): each.stand_in for each in self._learning}
        for main in part.get_parameters():
            stand_in: Any = stand_ins[id(main)]
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
            each.main.main_grad = _gradient(each)
        # sums those of replicas over TP
        finalize_model_grads(self._facades, None, pg_collection=groups.collection)

    def scale_gradients(self, factor: Tensor | float) -> None:
        for gradient in self.gradient_buffers():
            gradient.mul_(factor)

    def local_gradients(self) -> Iterator[tuple[Tensor, Tensor]]:
        # each layer's backward pass sums over ranks, so one rank's own gradients never exist for all parameters
        yield from ()

    def whole_gradients(self) -> dict[Tensor, Tensor]:
        return {each.stand_in: gathered_rows(each.stand_in, _gradient(each)) for each in self._learning}

    def gradient_buffers(self) -> Iterator[Tensor]:
        yield from (_gradient(each) for each in self._learning)

    def gather_parameters(self) -> None:
        free_gathered(self._chunks)

    def gather_in_forward(self) -> None:
        self.gather_parameters()

    def release(self) -> None:
        for chunk in self._chunks:
            get_model_config(chunk).grad_scale_func = None


def _gradient(divided: Divided) -> Tensor:
    """Returns the summed gradient of the rows that this rank holds; zeros if nothing in the step has used the
    parameter."""
    if divided.parameter.grad is None:
        divided.parameter.grad = torch.zeros_like(divided.parameter)
    gradient: Tensor = divided.parameter.grad.to_local()
    return gradient


class _Facade(nn.Module):
    """The shards of a chunk as parameters of a module, for megatron-core's optimizer and its sums of gradients."""

    ddp_config = DistributedDataParallelConfig()

    def __init__(self, chunk: LanguageModel, divided: Sequence[Divided]) -> None:
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
