"""Correctness on this device: compared with a float64 program on the CPU, with itself, and by `mtrain verify`."""

from __future__ import annotations

import functools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from mtrain import Datum, Engine
from mtrain.config import Config
from mtrain.core.layers.moe.grouped_gemm import grouped, has_grouped, sequential
from tools.bench.one_gpu.reference import Llama
from tools.bench.one_gpu.shapes import ONE_B, TINY, TINY_EXPERTS, TINY_WINDOWS, Bench, Model, config_of

FP32_TOLERANCE = 1e-5
"""Relative tolerance of losses and gradient norms: float32 sums of some thousand numbers."""
HALF_TOLERANCE = 2e-2
"""Tolerance of grouped products in bf16 against one expert at a time, relative to the largest element."""


class WrongError(Exception):
    """A number differs from what it has to be."""


def need(holds: bool, message: str) -> None:
    """Raises where a condition does not hold.

    Raises:
        WrongError: The condition does not hold.
    """
    if not holds:
        raise WrongError(message)


def texts(count: int, seq_length: int, vocab: int, seed: int = 0, log_normal: bool = False) -> list[Datum]:
    """Draws sequences of several lengths, a third of each a prompt.

    Args:
        count: Number of sequences.
        seq_length: Length of the longest sequence.
        vocab: Number that all ids are below.
        seed: Seed of the draw.
        log_normal: Whether lengths are distributed as those of conversations; else evenly over the upper half.
    """
    generator = torch.Generator().manual_seed(seed)
    if log_normal:
        drawn = (seq_length / 8 * torch.randn(count, generator=generator).mul(0.9).exp()).long()
        lengths = drawn.clamp(8, seq_length).tolist()
    else:
        lengths = torch.randint(seq_length // 2, seq_length, (count,), generator=generator).tolist()
    return [
        Datum(
            torch.randint(vocab, (length + 1,), generator=generator).tolist(),
            [float(3 * place > length) for place in range(length + 1)],
        )
        for length in lengths
    ]


def against_float64(bench: Bench) -> dict[str, Any]:
    """Compares losses and gradient norms of two steps in fp32: dense, experts, windows, packed rows."""
    cases: dict[str, tuple[Model, dict[str, Any]]] = {
        "dense": (TINY, {}),
        "experts": (TINY_EXPERTS, {}),
        "windows": ({**TINY_WINDOWS, "global_attention_every": None}, {}),
        "packed": (TINY, {"data__packing": {}, "data__isolate_documents": True}),
    }
    found = {
        name: _largest_difference(config_of(bench, model, **changes), model) for name, (model, changes) in cases.items()
    }
    worst = max(found, key=lambda name: found[name])
    need(found[worst] <= FP32_TOLERANCE, f"{worst}: {found[worst]:.1e} from float64, more than {FP32_TOLERANCE:.0e}")
    return {"relative difference": found, "TF32 products": torch.backends.cuda.matmul.allow_tf32}


def _largest_difference(config: Config, model: Model) -> float:
    """Returns the largest relative difference in two steps between the engine and the judge on the same weights."""
    judge, worst = Llama(model).double(), 0.0
    with Engine(config) as engine:
        for step in range(2):
            batch = texts(4, config.data.seq_length, config.model.vocab_size, seed=step)
            judge.load_state_dict(
                {_plain_name(name): each.double().cpu() for name, each in engine.named_hf_tensors()}, strict=False
            )
            loss, norm = _judged(judge, batch)
            engine.forward_backward(batch)
            result = engine.optim_step()
            worst = max(worst, abs(result.loss / loss - 1), abs((result.grad_norm or 0.0) / norm - 1))
    return worst


def _plain_name(name: str) -> str:
    """Converts the name of a Mixtral tensor to that of `Mixture`."""
    name = name.replace("block_sparse_moe", "mlp")
    for theirs, ours in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
        name = name.replace(f".{theirs}.", f".{ours}.")
    return name


def _judged(judge: Llama, batch: Sequence[Datum]) -> tuple[float, float]:
    """Computes the loss and the norm of its gradient, for whole samples one after the other."""
    judge.zero_grad()
    total, weighed = 0.0, sum(sum(list(datum.weights or ())[1:]) for datum in batch)
    for datum in batch:
        ids, weights = torch.tensor(datum.input_ids), torch.tensor(datum.weights)
        labels = torch.where(weights > 0, ids, -100)
        loss = judge(ids[None, :-1], labels[None, 1:])
        torch.autograd.backward(loss)
        total += loss.item()
    norm = math.sqrt(sum(float(each.grad.square().sum()) for each in judge.parameters() if each.grad is not None))
    return total / weighed, norm / weighed


def attention_kernels(bench: Bench) -> dict[str, Any]:
    """Names the kernels that scaled_dot_product_attention and attention of documents use, as the profiler sees them."""
    seq, heads, groups, dim = (64, 4, 2, 16) if bench.is_tiny else (4096, 32, 8, 64)
    found = {}
    for name in ("float32", "bfloat16"):
        dtype, place = getattr(torch, name), bench.torch_device
        query = torch.randn(1, heads, seq, dim, device=place, dtype=dtype, requires_grad=True)
        key, value = (torch.randn(1, groups, seq, dim, device=place, dtype=dtype, requires_grad=True) for _ in range(2))

        def causal(query: Tensor = query, key: Tensor = key, value: Tensor = value) -> None:
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
            torch.autograd.backward(out.sum())

        found[f"causal, {name}"] = _kernels(bench, causal, "attention|sdp|flash|fmha|cudnn|softmax")
    models: dict[str, tuple[Model, dict[str, Any]]] = {
        "window": (TINY_WINDOWS, {}),
        "documents": (TINY, {"data__packing": {}, "data__isolate_documents": True}),
    }
    for name, (model, changes) in models.items():
        config = config_of(bench, model, train__precision="bf16", **changes)
        with Engine(config) as engine:
            batch = texts(4, config.data.seq_length, config.model.vocab_size)
            step = functools.partial(engine.forward_backward, batch)
            found[f"{name}, step in bf16"] = _kernels(bench, step, "attention|sdp|flash|fmha|cudnn")
    need(all(found.values()), f"no attention kernel was seen: {found}")
    return found


def _kernels(bench: Bench, call: Callable[[], Any], pattern: str) -> list[str]:
    """Names the kernels that ran on the device, the longest first."""
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if bench.device == "cuda" else [])]
    with profile(activities=kinds) as watched:
        call()
        bench.synchronize()
    events = [each for each in watched.key_averages() if re.search(pattern, each.key, re.IGNORECASE)]
    of_device = [each for each in events if bench.device == "cpu" or "cuda" in str(each.device_type).lower()]
    ordered = sorted(of_device, key=lambda each: -(each.self_device_time_total or each.self_cpu_time_total))
    return [each.key[:90] for each in ordered[:4]]


def grouped_product(bench: Bench) -> dict[str, Any]:
    """Compares a grouped product of experts, some without tokens, on memory full of NaN, with one expert at a time."""
    counts = {
        "even": [16, 16, 16, 16],
        "empty": [0, 40, 0, 24],
        "first and last empty": [0, 33, 31, 0],
        "one has all": [0, 0, 64, 0],
    }
    found: dict[str, Any] = {}
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        if not has_grouped(bench.torch_device.type, dtype):
            found[name] = "torch has no grouped product here; experts run one after the other"
            continue
        for case, numbers in counts.items():
            difference = _grouped_difference(bench, dtype, torch.tensor(numbers))
            bound = FP32_TOLERANCE if dtype == torch.float32 else HALF_TOLERANCE
            found[f"{name}, {case}"] = difference
            need(difference <= bound, f"grouped product in {name}, {case}: {difference:.1e} from one expert at a time")
    return found


def _grouped_difference(bench: Bench, dtype: torch.dtype, counts: Tensor) -> float:
    """Returns the largest difference of output and both gradients, relative to the largest element."""
    place, generator = bench.torch_device, torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(place, dtype).requires_grad_()

    tokens, weights = drawn(int(counts.sum()), 64), drawn(len(counts), 32, 64)
    given = torch.randn(int(counts.sum()), 32, generator=generator).to(place, dtype)

    def results(product: Callable[[Tensor, Tensor, Tensor], Tensor]) -> list[Tensor]:
        out = product(tokens, weights, counts)
        return [out, *torch.autograd.grad(out, [tokens, weights], given)]

    expected = results(sequential)
    # Freed NaN memory is handed out next: a kernel that leaves an empty expert's gradient unwritten shows it.
    for _ in range(8):
        for each in (*expected, tokens, weights):
            torch.full_like(each, math.nan)
    worst = 0.0
    for one, other in zip(expected, results(grouped), strict=True):
        difference = ((one - other).abs().max() / one.abs().max()).item()
        worst = max(worst, difference if math.isfinite(difference) else math.inf)
    return worst


def resumed_with_dropout(bench: Bench) -> dict[str, Any]:
    """Compares four steps of `mtrain train` with dropout to two, a stop and two more: losses and norms, bit for bit."""
    model = TINY | {"hidden_dropout": 0.1, "attention_dropout": 0.1}
    with tempfile.TemporaryDirectory() as folder:
        whole, stopped = (_run_folder(bench, model, Path(folder) / name) for name in ("whole", "stopped"))
        _mtrain("train", str(whole))
        _mtrain("train", str(stopped), "train.num_steps=2")
        _mtrain("train", str(stopped))
        one, other = (_losses(path.parent / "run" / "metrics.jsonl") for path in (whole, stopped))
    need(len(one) == 4, f"four steps were wanted, metrics.jsonl has {len(one)}")
    need(one == other, f"{one} without a stop, {other} with one")
    return {"steps": len(one), "identical": True}


def _run_folder(bench: Bench, model: Model, folder: Path) -> Path:
    """Writes the configuration of a short run, in JSON, which is YAML."""
    folder.mkdir()
    content = {
        "run": {"dir": str(folder / "run")},
        "model": {"backend": "torch", **model},
        "train": {"global_batch_size": 2, "num_steps": 4, "precision": "bf16", "device": bench.device},
        "optimizer": {"lr": 1e-3, "schedule": "constant"},
        "data": {"kind": "mock", "seq_length": 64},
        "checkpoint": {"interval_steps": 2},
    }
    path = folder / "config.yaml"
    path.write_text(json.dumps(content))
    return path


def _losses(path: Path) -> list[tuple[int, float, float]]:
    """Reads step, loss and gradient norm of each step."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [(each["step"], each["loss"], each["grad_norm"]) for each in records if "loss" in each]


def verified(verb: str, *keys: str) -> Callable[[Bench], dict[str, Any]]:
    """Makes a section that runs `mtrain verify VERB` with the torch backend and `keys`, dense and with experts."""

    def run(bench: Bench) -> dict[str, Any]:
        said = {}
        with tempfile.TemporaryDirectory() as folder:
            for name, model in (("dense", TINY), ("experts", TINY_EXPERTS)):
                path = _run_folder(bench, model, Path(folder) / name)
                lines = _mtrain(
                    "verify", verb, str(path), "train.precision=fp32", *keys, "--max-ranks", "1"
                ).splitlines()
                verdict = next((line for line in reversed(lines) if line.strip()), "")
                said[name] = verdict.split("; ")[0]  # without the report's files, which are removed
        return said

    return run


def certified(bench: Bench) -> dict[str, Any]:
    """Runs `mtrain verify backend` for layers of one document a row and of several, and reads both certificates."""
    model = TINY if bench.is_tiny else ONE_B
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        fp8 = ("model.backend=torch", "train.fp8=hybrid") if bench.device == "cuda" else ()
        cases: dict[str, tuple[str, ...]] = {"plain": (), "documents": ("data.isolate_documents=true",)}
        cases |= {f"fp8 {recipe}": (*fp8, f"train.fp8_recipe={recipe}") for recipe in ("rowwise", "blockwise") if fp8}
        for name, keys in cases.items():
            path, certificates = _run_folder(bench, model, Path(folder) / name), Path(folder) / name / "certificates"
            size = () if bench.is_tiny else ("data.seq_length=2048",)
            lines = _mtrain("verify", "backend", str(path), *keys, *size, "--certificates", str(certificates))
            content = [json.loads(each.read_text()) for each in certificates.glob("*.json")]
            found[name] = {
                "left out": [line for line in lines.splitlines() if "not compared" in line],
                **{key: _times_of(each) for one in content for key, each in one["candidates"].items()},
            }
    return found


def _times_of(comparison: dict[str, Any]) -> dict[str, Any]:
    return {key: comparison[key] for key in ("passed", "ms", "own_ms", "error") if comparison[key] is not None}


def from_here() -> dict[str, str]:
    """Returns an environment in which `mtrain` is this checkout's, installed or not."""
    before = os.environ.get("PYTHONPATH")
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[3]), *([before] if before else [])])}


def _mtrain(*arguments: str) -> str:
    """Runs a command in a process of its own and returns its output.

    Raises:
        WrongError: It ended with another exit code than 0; the message has the end of its output.
    """
    done = subprocess.run(
        [sys.executable, "-m", "mtrain", *arguments], capture_output=True, text=True, check=False, env=from_here()
    )
    said = done.stdout + done.stderr
    print(said)  # into the section's log: the message has the end of it
    need(done.returncode == 0, f"mtrain {' '.join(arguments)} ended with exit code {done.returncode}: {said[-900:]}")
    return done.stdout
