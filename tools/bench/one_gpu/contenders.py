"""Contenders that train the same step: ours, stock megatron-core with its local spec, and the reference, compiled."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe import moe_utils
from torch import Tensor

from mtrain.arch.layout import Layout
from mtrain.config import Config
from mtrain.core.loss.objective import Objective
from mtrain.core.ranks.groups import Groups, opened_groups
from mtrain.core.ranks.init import joined_distributed
from mtrain.core.ranks.party import Purpose
from mtrain.data.loader import StepLoader
from mtrain.training.build import build_step
from tools.bench.one_gpu.reference import Llama
from tools.bench.one_gpu.shapes import Bench


@dataclass
class Contender:
    """Model that can train."""

    accumulate: Callable[[], None]
    """Zeroes gradients and runs forward and backward of a global batch."""
    update: Callable[[], float]
    """Normalises, computes the norm, clips and updates; returns the loss, for which the host waits."""
    notes: list[str] = field(default_factory=list)

    def step(self) -> float:
        """Runs a whole step and returns the loss."""
        self.accumulate()
        return self.update()


Build = Callable[[Bench, Config, Groups], Contender]


@contextlib.contextmanager
def one_rank(bench: Bench) -> Iterator[Groups]:
    """Opens process groups of a world of one rank."""
    purpose = Purpose("bench", Path(), {})
    with joined_distributed(bench.device, 600, purpose) as device, opened_groups(Layout(), device, 1234, 600) as groups:
        yield groups


def ours(bench: Bench, config: Config, groups: Groups) -> Contender:
    """Builds a step as `mtrain train` runs it; rows are read once."""
    built = build_step(config, groups, Objective.from_config(config.loss, config.model))
    batches, training = StepLoader(config, 0, 1).batches(0), built.training
    opened: list[Any] = []

    def accumulate() -> None:
        step = training.open()
        training.accumulate(step, batches, len(batches), training._objective, is_last=True)
        opened.append(step)

    def update() -> float:
        totals = training.reduce(opened.pop())
        training.update(totals, config.optimizer.lr)
        return totals.loss

    return Contender(accumulate, update)


def _stock_model(config: Config, groups: Groups) -> tuple[TransformerConfig, GPTModel]:
    """Builds megatron-core's own layers for the architecture of a configuration, in bf16."""
    model = config.model
    experts = model.experts
    of_experts: dict[str, Any] = {}
    if experts is not None:
        if not hasattr(moe_utils, "te_general_gemm"):
            # 0.16.1 reads this name, which is unbound where TransformerEngine cannot be imported
            moe_utils.te_general_gemm = None
        of_experts = {
            "num_moe_experts": experts.num_experts,
            "moe_router_topk": experts.top_k,
            "moe_ffn_hidden_size": experts.ffn_hidden_size,
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_load_balancing_type": "none",
        }
    translated = TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.query_groups,
        kv_channels=model.head_size,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        gradient_accumulation_fusion=False,
        calculate_per_token_loss=True,
        # without it the scores of all layers are kept, which 80 GB do not hold (measured on an H100)
        recompute_granularity="selective",
        recompute_modules=["core_attn"],
        **of_experts,
    )
    gpt = GPTModel(
        translated,
        get_gpt_layer_local_spec(None if experts is None else experts.num_experts, normalization="RMSNorm"),
        vocab_size=-(-model.vocab_size // 128) * 128,
        max_sequence_length=config.data.seq_length,
        share_embeddings_and_output_weights=model.tied_embeddings,
        position_embedding_type="rope",
        pg_collection=groups.collection,
    ).to(groups.device)
    return translated, gpt


def stock(bench: Bench, config: Config, groups: Groups) -> Contender:
    """Builds megatron-core as it is without TransformerEngine: local spec, its DDP, optimizer and normalisation.

    Microbatches have one row, and attention is computed again in backward: it materializes all scores.
    """
    seq, dtype = config.data.seq_length, torch.bfloat16
    translated, gpt = _stock_model(config, groups)
    wrapped = DistributedDataParallel(
        config=translated,
        ddp_config=DistributedDataParallelConfig(use_distributed_optimizer=True),
        module=Float16Module(translated, gpt),
        pg_collection=groups.collection,
    )
    options = OptimizerConfig(
        lr=config.optimizer.lr, weight_decay=0.1, clip_grad=1.0, bf16=True, params_dtype=dtype,
        use_distributed_optimizer=True,
    )  # fmt: skip
    optimizer = get_megatron_optimizer(
        options, [wrapped], use_gloo_process_groups=False, pg_collection=groups.collection
    )
    rows, count = drawn_rows(bench, config), config.train.global_batch_size
    positions, sums = torch.arange(seq, device=groups.device)[None], torch.zeros(1, device=groups.device)

    def accumulate() -> None:
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        sums.zero_()
        for row in range(count):
            losses = wrapped(rows[row : row + 1, :-1], positions, None, labels=rows[row : row + 1, 1:])
            loss = losses.float().sum()
            torch.autograd.backward(loss)
            sums.add_(loss.detach())

    def update() -> float:
        tokens = torch.tensor(count * seq, device=groups.device, dtype=torch.int32)
        finalize_model_grads([wrapped], tokens, pg_collection=groups.collection)
        optimizer.step()
        return sums.item() / (count * seq)

    return Contender(accumulate, update)


def reference(bench: Bench, config: Config, groups: Groups) -> Contender:
    """Builds plain PyTorch, compiled: fp32 weights, autocast, fused AdamW; eager where compiling fails."""
    sizes = config.model.model_dump(exclude_none=True)
    model = Llama(sizes).to(groups.device)
    decayed = [each for each in model.parameters() if each.ndim > 1]
    plain = [each for each in model.parameters() if each.ndim == 1]
    sets: list[dict[str, Any]] = [{"params": decayed}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(sets, lr=config.optimizer.lr, weight_decay=0.1, fused=True)
    forward, notes = _compiled(bench, model)
    rows, size = drawn_rows(bench, config), config.train.micro_batch_size
    sums = torch.zeros((), device=groups.device)
    weighed = rows.numel() - len(rows)

    def accumulate() -> None:
        optimizer.zero_grad()
        sums.zero_()
        for part in torch.split(rows, size):
            with torch.autocast(groups.device.type, torch.bfloat16):
                loss = forward(part[:, :-1], part[:, 1:]) / weighed
            torch.autograd.backward(loss)
            sums.add_(loss.detach())

    def update() -> float:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        return sums.item()

    return Contender(accumulate, update, notes)


def _compiled(bench: Bench, model: Llama) -> tuple[Callable[[Tensor, Tensor], Tensor], list[str]]:
    """Compiles the model and tries it on a row of a few tokens; returns it with notes for the report."""
    if bench.is_tiny and not bench.compiles_tiny:
        return model, ["not compiled: tiny"]
    compiled = torch.compile(model)
    tokens = torch.zeros(1, 128, dtype=torch.int64, device=bench.torch_device)
    try:
        with torch.autocast(bench.device, torch.bfloat16):
            torch.autograd.backward(compiled(tokens, tokens))
    except Exception as error:  # a missing compiler, a backend that gives up: the contender is then reported as eager
        torch._dynamo.reset()
        return model, [f"not compiled: {str(error).splitlines()[0][:200]}"]
    torch._dynamo.reset()  # else the next shape would be compiled for any length
    return torch.compile(model), ["compiled"]


def drawn_rows(bench: Bench, config: Config) -> Tensor:
    """Draws random tokens, [global batch, seq + 1]."""
    generator = torch.Generator().manual_seed(0)
    shape = (config.train.global_batch_size, config.data.seq_length + 1)
    return torch.randint(config.model.vocab_size, shape, generator=generator).to(bench.torch_device)
