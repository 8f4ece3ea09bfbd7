"""Speed of a step, and its needs: MFU, tokens per second, memory, the longest kernels."""

from __future__ import annotations

import functools
import gc
import math
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile

from mtrain import Datum, Engine, arch
from mtrain.arch.layout import Layout
from mtrain.base.tensor_slice import TensorSlice
from mtrain.checkpoint.format.fingerprint import hash_of
from mtrain.config import Config
from mtrain.core.engine.training_state import local_state
from mtrain.core.layers.layer_spec import has_transformer_engine
from mtrain.core.layers.offload import activations
from mtrain.core.ranks.groups import Groups
from tools.bench.one_gpu.contenders import Build, Contender, one_rank, ours, reference, stock
from tools.bench.one_gpu.correctness import need, texts
from tools.bench.one_gpu.host_reads import host_reads
from tools.bench.one_gpu.padded import padded_loop
from tools.bench.one_gpu.shapes import (
    EIGHT_B,
    EXPERTS,
    HYBRID,
    ONE_B,
    TINY,
    TINY_EXPERTS,
    TINY_HYBRID,
    TINY_WINDOWS,
    WINDOWS,
    Bench,
    Model,
    config_of,
    speed_config,
)
from tools.bench.parts.experts import Size, measure

KERNELS = {
    "attention": "flash|fmha|sdpa|attention|attn",
    "products": "gemm|nvjet|cutlass|xmma|matmul|aten::mm|aten::bmm|aten::addmm|aten::_grouped_mm|grouped",
    "optimizer": "multi_tensor|adam",
    "collectives": "nccl|gloo|c10d",
    "copies": "memcpy|memset|copy_|aten::copy",
    "compiled regions": "triton_|cpp_fused|compiledfxgraph|compiledfunction",
}
"""Classes of kernels by parts of their names, looked for in this order; all others are elementwise ones and sums."""
BYTES_A_PARAMETER = 20
"""Number of bytes per parameter for weights, gradients and optimizer, in any contender."""


class PartlyFailedError(Exception):
    """A contender failed; the results of the others are kept."""

    def __init__(self, message: str, found: dict[str, Any]) -> None:
        super().__init__(message)
        self.found = found


def products(bench: Bench) -> dict[str, Any]:
    """Measures FLOP/s of one large product in bf16: the device's rate under its power limit, next to its data sheet."""
    size, repeats = (256, 3) if bench.is_tiny else (8192, 30)
    one, two = (torch.randn(size, size, device=bench.torch_device, dtype=torch.bfloat16) for _ in range(2))
    one @ two
    seconds = _seconds(bench, lambda: [one @ two for _ in range(repeats)])
    peak = arch.peak_flops(bench.device_name, "bf16")
    rate = 2 * size**3 * repeats / seconds
    return {"TFLOP/s": rate / 1e12, "peak TFLOP/s": None if peak is None else peak / 1e12}


def dense_1b(bench: Bench) -> dict[str, Any]:
    """Compares contenders on Llama 3.2 1B."""
    config = speed_config(bench, TINY if bench.is_tiny else ONE_B, 4096, 2)
    return _compared(
        bench, config, _own_builds(bench) | {"megatron-core local": stock, "compiled reference": reference}
    )


def dense_8b(bench: Bench) -> dict[str, Any]:
    """Compares contenders on eight layers of Llama 3.1 8B."""
    config = speed_config(bench, TINY if bench.is_tiny else EIGHT_B, 4096, 1)
    return _compared(bench, config, {"mtrain": ours, "megatron-core local": stock, "compiled reference": reference})


def experts(bench: Bench) -> dict[str, Any]:
    """Compares contenders on a model with 64 experts, 8 per token."""
    config = speed_config(bench, TINY_EXPERTS if bench.is_tiny else EXPERTS, 4096, 1)
    return _compared(bench, config, _own_builds(bench) | {"megatron-core local": stock})


def fp8(bench: Bench) -> dict[str, Any]:
    """Compares our layers in bf16 and in fp8 on Llama 3.2 1B, all with regions; a CPU emulates one recipe."""
    compiled = {"compile": "regions" if bench.device == "cuda" or bench.compiles_tiny else "none"}
    changes: dict[str, dict[str, dict[str, Any]]] = {"mtrain": {"train": compiled}}
    for recipe in ("rowwise", "blockwise") if bench.device == "cuda" else ("rowwise",):
        of_run = {"model": {"backend": "torch"}, "train": compiled | {"fp8": "hybrid", "fp8_recipe": recipe}}
        changes[f"mtrain, fp8 {recipe}"] = of_run
    config = speed_config(bench, TINY if bench.is_tiny else ONE_B, 4096, 2)
    return _compared(bench, config, {name: functools.partial(_changed, changed) for name, changed in changes.items()})


def experts_apart(bench: Bench) -> dict[str, Any]:
    """Measures the sorting of tokens and the products of a layer of experts, each forward and backward."""
    model = TINY_EXPERTS if bench.is_tiny else EXPERTS
    section, tokens = model["experts"], 128 if bench.is_tiny else 4096
    size = Size(section["num_experts"], model["hidden_size"], section["ffn_hidden_size"], tokens * section["top_k"])
    return measure(size, torch.bfloat16, bench.torch_device, bench.rounds, section["top_k"])._asdict()


def hybrid(bench: Bench) -> dict[str, Any]:
    """Compares our builds on eight layers of delta nets and attention."""
    return _compared(bench, speed_config(bench, TINY_HYBRID if bench.is_tiny else HYBRID, 4096, 1), _own_builds(bench))


def _own_builds(bench: Bench) -> dict[str, Build]:
    """Lists our layers as written, and with what can be turned on here; regions on a CPU only if asked for."""
    apart: dict[str, dict[str, Any]] = {"model": {"megatron": {"gradient_accumulation_fusion": False}}}
    changes: dict[str, dict[str, dict[str, Any]]] = {"mtrain, weight gradients added apart": apart}
    if bench.device == "cuda" or bench.compiles_tiny:
        changes["mtrain, regions"] = {"train": {"compile": "regions"}}
    if bench.device == "cuda" and has_transformer_engine():
        changes["mtrain, TransformerEngine"] = {"model": {"backend": "te"}}
    builds: dict[str, Build] = {name: functools.partial(_changed, changed) for name, changed in changes.items()}
    return {"mtrain": ours} | builds


def _changed(changes: dict[str, dict[str, Any]], bench: Bench, config: Config, groups: Groups) -> Contender:
    sections = {name: getattr(config, name).model_copy(update=values) for name, values in changes.items()}
    return ours(bench, config.model_copy(update=sections), groups)


def windows(bench: Bench) -> dict[str, Any]:
    """Compares windows of 1,024 of 8,192 tokens in three layers of four with the same model without windows."""
    config = speed_config(bench, TINY_WINDOWS if bench.is_tiny else WINDOWS, 8192, 1)
    everything = config.model.model_copy(update={"sliding_window": None, "global_attention_every": None})

    def without(bench: Bench, config: Config, groups: Groups) -> Contender:
        return ours(bench, config.model_copy(update={"model": everything}), groups)

    return _compared(bench, config, {"mtrain": ours, "mtrain without windows": without})


def finetuning(bench: Bench) -> dict[str, Any]:
    """Measures supervised tokens per second of conversations of log-normal lengths: packed, and padded to the longest
    of 8."""
    model, seq, width, count = (TINY, 64, 128, 16) if bench.is_tiny else (ONE_B, 4096, 8192, 64)
    changes = {"train__tokens_per_micro_batch": width, "data__packing": {}, "data__isolate_documents": True}
    config = config_of(
        bench, model, train__precision="bf16", train__global_batch_size=count, data__seq_length=seq, **changes
    )
    data = texts(count, seq, model["vocab_size"], log_normal=True)
    supervised = sum(sum(list(datum.weights or ())[1:]) for datum in data)
    with Engine(config) as engine:

        def packed() -> None:
            engine.forward_backward(data)
            engine.optim_step()

        packed()
        found = {"packed": [_seconds(bench, packed) for _ in range(bench.rounds)]}
    _free(bench)
    padded = padded_loop(bench, model, data)
    padded()
    found["padded to the longest"] = [_seconds(bench, padded) for _ in range(bench.rounds)]
    rates = {name: supervised / statistics.median(seconds) for name, seconds in found.items()}
    return {"supervised tokens/s": rates, "packed is faster by": rates["packed"] / rates["padded to the longest"]}


def waits(bench: Bench) -> dict[str, Any]:
    """Lists where the host waits for the device in the third step of training, by file and line."""
    models: dict[str, tuple[Model, dict[str, Any]]] = {
        "dense": (TINY, {}),
        "experts": (TINY_EXPERTS, {}),
        "experts with a capacity": (
            TINY_EXPERTS | {"experts": TINY_EXPERTS["experts"] | {"capacity_factor": 1.25}},
            {"loss__allow_layout_dependent": True},
        ),
        "packed": (TINY, {"data__packing": {}, "data__isolate_documents": True}),
    }
    found: dict[str, Any] = {}
    for name, (model, changes) in models.items():
        config = config_of(bench, model, train__precision="bf16", **changes)
        with one_rank(bench) as groups:
            contender = ours(bench, config, groups)
            for _ in range(2):
                contender.step()
            found[name] = dict(host_reads(bench, contender.step))
        _free(bench)
    return found


def on_the_host(bench: Bench) -> dict[str, Any]:
    """Measures what train.offload_layers and train.offload_optimizer cost and save; small models must give the same
    bits."""
    model = TINY if bench.is_tiny else ONE_B
    ways: dict[str, dict[str, Any]] = {
        "kept": {},
        "activations": {"train__offload_layers": model["num_layers"] - 1},
        "moments": {"train__offload_optimizer": True},
    }
    small: dict[str, list[float]] = {}
    # layers that move do not add their gradients themselves, which rounds otherwise
    apart = TINY | {"megatron": {"gradient_accumulation_fusion": False}}
    with mock.patch.object(activations, "SMALLEST_MOVED_BYTES", 1):
        for name, changes in ways.items():
            with one_rank(bench) as groups:
                contender = ours(bench, config_of(bench, apart, train__precision="bf16", **changes), groups)
                small[name] = [contender.step() for _ in range(5)]
    need(all(each == small["kept"] for each in small.values()), f"losses of five steps differ: {small}")
    found: dict[str, Any] = {}
    for name, changes in ways.items():
        config = speed_config(bench, model, 4096, 2, **changes)
        with one_rank(bench) as groups:
            contender, times = ours(bench, config, groups), Times([], [])
            contender.step()
            if bench.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            for _ in range(2):
                times.add(bench, contender)
            peak = torch.cuda.max_memory_allocated() if bench.device == "cuda" else None
            del contender
        _free(bench)
        estimate = arch.memory_per_rank(config, Layout(), 0)
        found[name] = {
            "forward and backward s": min(times.accumulate),
            "update s": min(times.update),
            "loss": times.loss,
            "peak bytes": peak,
            "estimated bytes": estimate.total_bytes,
            "estimated bytes on the host": estimate.host_bytes,
        }
    return found


def deterministic_runs(bench: Bench) -> dict[str, Any]:
    """Trains the same steps twice with train.deterministic, which must give the same bits, and once without, and
    measures both."""
    few = {"num_layers": 4, "vocab_size": 32000}
    cases: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "dense": (TINY if bench.is_tiny else ONE_B | few, {}),
        "experts": (TINY_EXPERTS if bench.is_tiny else EXPERTS | few, {}),
        "documents": (
            TINY if bench.is_tiny else ONE_B | few,
            {"data__packing": {}, "data__isolate_documents": True},
        ),
    }
    found: dict[str, Any] = {}
    for name, (model, changes) in cases.items():
        seq = 64 if bench.is_tiny else 4096
        data = texts(8, seq, model["vocab_size"], log_normal=True)
        given = {"train__precision": "bf16", "train__global_batch_size": 8, "data__seq_length": seq, **changes}
        # first: its variables have to be there before CUDA starts, and stay for the one without
        one, other, free = (
            _trained(bench, config_of(bench, model, train__deterministic=is_on, **given), data)
            for is_on in (True, True, False)
        )
        differing = [key for key in one.bits if one.bits[key] != other.bits[key]]
        need(
            not differing,
            f"{name}: two deterministic runs differ in {len(differing)} of {len(one.bits)}: {differing[:5]}",
        )
        seconds = min(one.seconds, other.seconds)
        found[name] = {
            "compared": len(one.bits),
            "s": seconds,
            "s without": free.seconds,
            "slower by": seconds / free.seconds,
            "a run without has the same bits": one.bits == free.bits,
        }
    return found


class Trained(NamedTuple):
    """What a run has come to."""

    bits: dict[str, float]
    """Losses, gradient norms and digests of weights and moments, by name."""
    seconds: float
    """Seconds of the last step."""


def _trained(bench: Bench, config: Config, data: Sequence[Datum]) -> Trained:
    """Makes three steps from the beginning and measures the last one."""
    bits: dict[str, float] = {}
    with Engine(config) as engine:

        def step() -> None:
            engine.forward_backward(data)
            result = engine.optim_step()
            bits[f"loss {result.step}"], bits[f"norm {result.step}"] = result.loss, result.grad_norm

        step()
        step()
        seconds = _seconds(bench, step)
        for held in local_state(engine._built().model):
            count = held.shard.data.numel()
            digest = hash_of(held.shard.key, held.shard.data, TensorSlice((0,), (count,)), (count,))
            bits[f"{held.shard.key} {held.shard.at.offset}"] = int(digest)
    _free(bench)
    return Trained(bits, seconds)


def _compared(bench: Bench, config: Config, builds: Mapping[str, Build]) -> dict[str, Any]:
    """Compares contenders on one GPU: in turn step by step where they fit together, else one after the other."""
    found: dict[str, Any] = {}
    with one_rank(bench) as groups:
        for of_run in _runs(bench, config, builds):
            found |= _measured(bench, config, groups, of_run)
            _free(bench)
    for name, each in found.items():
        if name != "mtrain" and "step s" in each and "step s" in found["mtrain"]:
            each["mtrain is faster by"] = each["step s"] / found["mtrain"]["step s"]
    failed = [f"{name}: {each['failed']}" for name, each in found.items() if "failed" in each]
    if failed:
        raise PartlyFailedError("; ".join(failed), found)
    return found


def _runs(bench: Bench, config: Config, builds: Mapping[str, Build]) -> list[dict[str, Build]]:
    """Groups the contenders that are in memory together."""
    together = BYTES_A_PARAMETER * arch.num_parameters(config.model) * len(builds)
    if bench.device == "cpu" or together < 0.5 * torch.cuda.get_device_properties(0).total_memory:
        return [dict(builds)]
    return [{name: build} for name, build in builds.items()]


def _measured(bench: Bench, config: Config, groups: Groups, builds: Mapping[str, Build]) -> dict[str, Any]:
    """Measures rounds in turn; a contender that fails is reported with the reason, and the others go on."""
    found: dict[str, dict[str, Any]] = {name: {} for name in builds}
    held: dict[str, Contender] = {}
    own_bytes: dict[str, int] = {}
    for name, build in builds.items():

        def prepare(name: str = name, build: Build = build) -> None:
            before = _allocated(bench)
            contender = build(bench, config, groups)
            for _ in range(3):  # allocates the optimizer's state, compiles, and once more for another number of rows
                contender.step()
            held[name], own_bytes[name] = contender, _allocated(bench) - before
            found[name]["notes"] = contender.notes

        _attempt(found, name, prepare)
    times = {name: Times([], []) for name in held}
    for _ in range(bench.rounds):
        for name, contender in held.items():
            _attempt(found, name, functools.partial(times[name].add, bench, contender))
    for name, contender in held.items():

        def describe(name: str = name, contender: Contender = contender) -> None:
            found[name] |= _figures(bench, config, times[name]) | _needs(bench, contender, own_bytes[name])

        _attempt(found, name, describe)
    if "mtrain" in held:
        peak = found["mtrain"].get("peak bytes")
        estimate = arch.memory_per_rank(config, Layout(), 0).total_bytes
        found["mtrain"] |= {"estimated bytes": estimate, "peak / estimate": None if peak is None else peak / estimate}
    return found


@dataclass
class Times:
    """Seconds of each round."""

    accumulate: list[float]
    update: list[float]
    loss: float = math.nan

    def add(self, bench: Bench, contender: Contender) -> None:
        """Measures one more step."""
        first = _seconds(bench, contender.accumulate)
        second = _seconds(bench, lambda: setattr(self, "loss", contender.update()))
        self.accumulate.append(first)
        self.update.append(second)


def _attempt(found: dict[str, dict[str, Any]], name: str, action: Callable[[], Any]) -> None:
    """Runs an action, unless this contender has failed before."""
    if "failed" in found[name]:
        return
    try:
        action()
    except Exception as error:  # whatever a contender raises, the others are still measured
        reason = next(iter(str(error).splitlines()), "")
        found[name] = {"failed": f"{type(error).__name__}: {reason[:300]}"}


def _figures(bench: Bench, config: Config, times: Times) -> dict[str, Any]:
    """Computes figures from the medians; adds the best step."""
    steps = [first + second for first, second in zip(times.accumulate, times.update, strict=True)]
    tokens = config.train.global_batch_size * config.data.seq_length
    seconds, peak = statistics.median(steps), arch.peak_flops(bench.device_name, "bf16")
    flops = arch.run_flops_per_token(config) * tokens
    return {
        "step s": seconds,
        "best step s": min(steps),
        "update s": statistics.median(times.update),
        "tokens/s": tokens / seconds,
        "TFLOP/s": flops / seconds / 1e12,
        "MFU": None if peak is None else arch.mfu(flops, seconds, peak),
        "loss": times.loss,
    }


def _needs(bench: Bench, contender: Contender, own_bytes: int) -> dict[str, Any]:
    """Measures peak memory of a step, without what other contenders hold, and where the time of its kernels goes."""
    peak = None
    if bench.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        others = torch.cuda.memory_allocated() - own_bytes
        contender.step()
        peak = torch.cuda.max_memory_allocated() - others
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if bench.device == "cuda" else [])]
    start = time.perf_counter()
    with profile(activities=kinds) as watched:
        contender.step()
        bench.synchronize()
    wall_us = 1e6 * (time.perf_counter() - start)
    times = {
        each.key: each.self_device_time_total if bench.device == "cuda" else each.self_cpu_time_total
        for each in watched.key_averages()
    }
    total = sum(times.values()) or 1
    longest = sorted(times, key=lambda key: -times[key])[:10]
    return {
        "peak bytes": peak,
        "share of kernels": _classes(times),
        "kernels / time of a profiled step": total / wall_us,
        "top 10 kernels": {key[:100]: times[key] / total for key in longest},
    }


def _classes(times: Mapping[str, float]) -> dict[str, float]:
    """Returns the share of each class of kernels in their time, the largest first."""
    sums = dict.fromkeys([*KERNELS, "elementwise and sums"], 0.0)
    for name, seconds in times.items():
        kind = next((kind for kind, parts in KERNELS.items() if re.search(parts, name.lower())), "elementwise and sums")
        sums[kind] += seconds
    total = sum(sums.values()) or 1
    return {kind: sums[kind] / total for kind in sorted(sums, key=lambda kind: -sums[kind])}


def _seconds(bench: Bench, call: Callable[[], Any]) -> float:
    bench.synchronize()
    start = time.perf_counter()
    call()
    bench.synchronize()
    return time.perf_counter() - start


def _allocated(bench: Bench) -> int:
    """Returns the allocated bytes; 0 on a CPU, where nobody counts them."""
    return torch.cuda.memory_allocated() if bench.device == "cuda" else 0


def _free(bench: Bench) -> None:
    gc.collect()
    if bench.device == "cuda":
        torch.cuda.empty_cache()
