"""Training steps against plain transformers and its Trainer: `python tools/bench/peers/pretrain.py`.

- "mtrain": `mtrain.Engine`, forward_backward and optim_step, rows made from token ids included.
- "loop": a usual training loop: LlamaForCausalLM (or Mixtral, Qwen3.5, Nemotron-H) with SDPA, clipping, fused AdamW.
- "trainer": transformers.Trainer with the same model and optimizer; needs accelerate.
- "fsdp": with a layout of sharded weights, the loop with each layer sharded by torch's fully_shard.

All start from the same weights, see the same tokens with the same hyper-parameters and are compared step by step: a
loss that differs by more than 1e-5 ends the run. Rounds of all contenders alternate in one process; figures are user +
system seconds a step, as ratios of medians and of the least. Several ranks (`torchrun --nproc-per-node 2
tools/bench/peers/pretrain.py --layout tp2`): seconds of the slowest rank, against DistributedDataParallel. A rank has
the same work in one pass of either: under tensor parallelism twice the rows, half of each layer. `--memory NAME` runs
one contender alone, for the most memory that its process takes.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from sys import path as import_path
from typing import Annotated, Any, NamedTuple

import torch
import torch.distributed as dist
import typer
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

if __name__ == "__main__":
    import_path.insert(0, str(Path(__file__).parents[3]))

from mtrain import Datum, Engine, load_config

BETAS, EPSILON, WEIGHT_DECAY, LR, CLIP = (0.9, 0.95), 1e-8, 0.1, 1e-4, 1.0
MOST_DIFFERENCE = 1e-5
"""Largest relative difference of losses."""
LAYOUTS = {"single": "{}", "tp2": "{tp: 2}", "tp2sp": "{tp: 2, sp: true}", "dp2": "{}", "dp4": "{}"}
LAYOUTS |= dict.fromkeys(("dp2-weights", "dp4-weights"), "{shard: weights}")


class Round(NamedTuple):
    """Measurement of one round of a contender."""

    seconds: float
    """Processor time (user + system) of all threads of this process, for one step."""
    losses: list[float]
    """Losses of the whole batch, one per step."""


Contender = Callable[[Sequence[Tensor]], Round]
"""Function that trains on batches [rows, seq + 1], one per step."""


class Shape(NamedTuple):
    """Sizes of the model and its batch."""

    hidden: int
    layers: int
    ffn: int
    vocab: int
    experts: int
    """Number of experts; 0 is a dense model, as Llama; else as Mixtral, two experts per token."""
    hybrid: bool
    """Whether three of four layers are gated delta nets, as in Qwen3.5 (dense)."""
    mamba: bool
    """Whether layers are in turn Mamba-2, a network, Mamba-2 and attention, as in Nemotron-H (dense)."""
    seq: int
    rows: int
    """Number of rows in a step, over all ranks."""
    micro: int
    """Number of rows in one forward pass; under tensor parallelism, a rank's share of them."""


def hf_model(shape: Shape) -> Any:
    """Builds a model of transformers, always the same."""
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        MixtralConfig,
        MixtralForCausalLM,
        NemotronHConfig,
        NemotronHForCausalLM,
        Qwen3_5ForCausalLM,
        Qwen3_5TextConfig,
    )

    heads = shape.hidden // 64
    sizes: dict[str, Any] = {
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "intermediate_size": shape.ffn,
        "vocab_size": shape.vocab,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 2),
        "max_position_embeddings": shape.seq,
        "attn_implementation": "sdpa",
        "use_cache": False,
    }
    torch.manual_seed(0)
    if shape.experts:
        mixtral = MixtralConfig(**sizes, num_local_experts=shape.experts, num_experts_per_tok=2)
        return MixtralForCausalLM(mixtral)
    if shape.hybrid:
        widths = {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "head_dim": 64}
        numbers = {"linear_num_key_heads": max(1, heads // 2), "linear_num_value_heads": heads}
        return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**sizes, **widths, **numbers))
    if shape.mamba:
        kinds = ["linear_attention", "mlp", "linear_attention", "full_attention"]
        blocks = [kinds[number % len(kinds)] for number in range(shape.layers)]
        states = {"ssm_state_size": 64, "mamba_num_heads": 2 * heads, "mamba_head_dim": 64, "n_groups": 1}
        return NemotronHForCausalLM(NemotronHConfig(**sizes, **states, head_dim=64, layers_block_type=blocks))
    return LlamaForCausalLM(LlamaConfig(**sizes))


def adamw(model: Any) -> torch.optim.Optimizer:
    """Makes torch's fused AdamW; norms decay, too, as in all contenders."""
    options: dict[str, Any] = {"lr": LR, "betas": BETAS, "eps": EPSILON, "weight_decay": WEIGHT_DECAY}
    return torch.optim.AdamW(model.parameters(), fused=True, **options)


def hf_inputs(rows: Tensor) -> dict[str, Tensor]:
    """Makes the arguments of a transformers model; the labels are not shifted a second time."""
    labels = rows[:, 1:].contiguous()
    return {"input_ids": rows[:, :-1].contiguous(), "labels": labels, "shift_labels": labels}


def engine_contender(folder: str, shape: Shape, layout: str, overrides: Sequence[str]) -> tuple[Engine, Contender]:
    """Builds our contender from a folder of transformers."""
    # both ranks share each row: a pass of as many rows as the loop's would be half the work, with as many messages
    micro = shape.micro * (2 if layout.startswith("tp2") else 1)
    settings = [
        f"model.hf={folder}",
        f"run.dir={folder}/run",
        f"layout={LAYOUTS[layout]}",
        f"train={{global_batch_size: {shape.rows}, micro_batch_size: {micro}, num_steps: 1000000}}",
        "train.precision=fp32",
        "train.device=cpu",
        f"optimizer={{lr: {LR}, beta1: {BETAS[0]}, beta2: {BETAS[1]}, epsilon: {EPSILON}, clip_grad: {CLIP}}}",
        f"optimizer.weight_decay={WEIGHT_DECAY}",
        "optimizer.decay_norms_and_biases=true",
        "optimizer.schedule=constant",
        f"data={{kind: mock, seq_length: {shape.seq}}}",
        *overrides,
    ]
    engine = Engine(load_config([], settings))

    def run(batches: Sequence[Tensor]) -> Round:
        start, losses = time.process_time(), []
        for rows in batches:
            engine.forward_backward([Datum(row) for row in rows.numpy()])
            losses.append(engine.optim_step().loss)
        return Round((time.process_time() - start) / len(batches), losses)

    return engine, run


def loop_contender(folder: str, shape: Shape, *, shards: bool = False) -> Contender:
    """Builds a loop over microbatches, each weighted by its share of the step; `shards` divides layers by FSDP."""
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").train()
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    if shards:
        for module in (*model.model.layers, model):
            fully_shard(module, mesh=init_device_mesh("cpu", (ranks,)))
    trained = torch.nn.parallel.DistributedDataParallel(model) if ranks > 1 and not shards else model
    optimizer, size = adamw(model), shape.micro
    passes = shape.rows // size // ranks

    def step(rows: Tensor) -> float:
        optimizer.zero_grad(set_to_none=True)
        total = torch.zeros(())
        # of each pass, rank r takes the r-th part
        for number in range(passes):
            own = rows[(number * ranks + rank) * size :][:size]
            loss = trained(**hf_inputs(own)).loss / passes
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        if ranks > 1:
            dist.all_reduce(total)
        return total.item() / ranks

    def run(batches: Sequence[Tensor]) -> Round:
        start = time.process_time()
        losses = [step(rows) for rows in batches]
        return Round((time.process_time() - start) / len(batches), losses)

    return run


def trainer_contender(folder: str, shape: Shape) -> Contender:
    """Builds transformers.Trainer; its time runs from the beginning of the first step to the end of the last one."""
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    class Clock(TrainerCallback):  # type: ignore[misc]
        first = last = 0.0

        def on_step_begin(self, args: Any, state: Any, control: Any, **options: Any) -> None:
            self.first = self.first or time.process_time()

        def on_step_end(self, args: Any, state: Any, control: Any, **options: Any) -> None:
            self.last = time.process_time()

    class Keeping(Trainer):  # type: ignore[misc]
        """Trainer that keeps its losses: logs round them to four digits."""

        found: list[Tensor]

        def training_step(self, *args: Any, **options: Any) -> Tensor:
            loss: Tensor = super().training_step(*args, **options)
            self.found.append(loss)
            return loss

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").train()
    optimizer, passes = adamw(model), shape.rows // shape.micro
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)

    def run(batches: Sequence[Tensor]) -> Round:
        arguments = TrainingArguments(
            output_dir=f"{folder}/trainer",
            per_device_train_batch_size=shape.micro,
            gradient_accumulation_steps=passes,
            max_steps=len(batches),
            max_grad_norm=CLIP,
            train_sampling_strategy="sequential",
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
            remove_unused_columns=False,
            dataloader_pin_memory=False,
        )
        data = [row for rows in batches for row in rows]
        clock = Clock()
        trainer = Keeping(
            model,
            arguments,
            train_dataset=data,
            data_collator=lambda given: hf_inputs(torch.stack(given)),
            optimizers=(optimizer, schedule),
            callbacks=[clock],
        )
        trainer.found = []
        trainer.train()
        sums = torch.stack(trainer.found).view(len(batches), passes).sum(1)
        return Round((clock.last - clock.first) / len(batches), sums.tolist())

    return run


def drawn(shape: Shape, steps: int, number: int) -> list[Tensor]:
    """Draws the batches of one round."""
    generator = torch.Generator().manual_seed(number + 1)
    return [torch.randint(shape.vocab, (shape.rows, shape.seq + 1), generator=generator) for _ in range(steps)]


def slowest(seconds: float) -> float:
    """Returns the largest value over all ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return seconds
    most = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return most.item()


def check_losses(rounds: dict[str, Round]) -> float:
    """Returns the largest relative difference to ours; raises where it is too large."""
    ours = rounds["mtrain"].losses
    worst = 0.0
    for name, other in rounds.items():
        for one, two in zip(ours, other.losses, strict=True):
            worst = max(worst, abs(one - two) / abs(two))
            if worst > MOST_DIFFERENCE:
                raise SystemExit(f"losses differ: mtrain {one!r}, {name} {two!r}; what is compared is not the same")
    return worst


def measured(contenders: dict[str, Contender], shape: Shape, steps: int, rounds: int) -> dict[str, Any]:
    """Measures rounds of all contenders in turn; the first one warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    worst = 0.0
    for number in range(rounds + 1):
        found = {name: run(drawn(shape, steps, number)) for name, run in contenders.items()}
        worst = max(worst, check_losses(found))
        for name, one in found.items():
            seconds[name].append(slowest(one.seconds))
    kept = {name: each[1:] for name, each in seconds.items()}
    ours = kept["mtrain"]
    ratios = {
        name: {
            "median": statistics.median(each) / statistics.median(ours),
            "best": min(each) / min(ours),
        }
        for name, each in kept.items()
        if name != "mtrain"
    }
    return {
        "cpu_seconds_per_step": {name: statistics.median(each) for name, each in kept.items()},
        "speed_over": ratios,
        "largest_loss_difference": worst,
    }


def profiled(contenders: dict[str, Contender], shape: Shape, steps: int, lines: int = 45) -> None:
    """Prints milliseconds of self time by operation and step, ours next to the loop's."""
    found: dict[str, dict[str, tuple[float, int]]] = {}
    other = "fsdp" if "fsdp" in contenders else "loop"
    for name in ("mtrain", other):
        contenders[name](drawn(shape, 1, 0))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as watched:
            contenders[name](drawn(shape, steps, 1))
        events = watched.key_averages()
        found[name] = {each.key: (each.self_cpu_time_total / 1e3 / steps, each.count // steps) for each in events}
    ours, theirs = found["mtrain"], found[other]
    nothing = (0.0, 0)
    typer.echo(f"{'ms a step':60}{'mtrain':>10}{'calls':>8}{other:>10}{'calls':>8}")
    sums = [sum(time for time, _ in each.values()) for each in (ours, theirs)]
    typer.echo(f"{'all':60}{sums[0]:10.1f}{'':8}{sums[1]:10.1f}")
    names = sorted(
        ours.keys() | theirs.keys(), key=lambda key: -max(ours.get(key, nothing)[0], theirs.get(key, nothing)[0])
    )
    for key in names[:lines]:
        (one, calls), (two, others) = ours.get(key, nothing), theirs.get(key, nothing)
        typer.echo(f"{key[:58]:60}{one:10.1f}{calls:8}{two:10.1f}{others:8}")


def print_memory(name: str, folder: str, shape: Shape, layout: str, overrides: Sequence[str]) -> None:
    """Prints how much the process of the rank that takes most grows while it builds one contender and trains."""
    begin = process_mib("VmRSS")
    with ExitStack() as stack:
        if name == "mtrain":
            engine, run = engine_contender(folder, shape, layout, overrides)
            stack.enter_context(engine)
        else:
            dist.init_process_group("gloo")
            stack.callback(dist.destroy_process_group)
            run = loop_contender(folder, shape, shards=name == "fsdp")
        for number in range(2):
            run(drawn(shape, 2, number))
        most = slowest(process_mib("VmHWM") - begin)
    if engine_rank() == 0:
        typer.echo(f"| {name}, {layout} | {most:.0f} MiB |")


def process_mib(name: str) -> float:
    """Returns a size of this process in MiB: VmRSS now, VmHWM at most so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


def main(
    hidden: Annotated[int, typer.Option(help="width; heads have 64")] = 256,
    layers: Annotated[int, typer.Option(help="of the model")] = 4,
    ffn: Annotated[int, typer.Option(help="width of the feed-forward part, or of an expert")] = 704,
    vocab: Annotated[int, typer.Option(help="words")] = 8192,
    experts: Annotated[int, typer.Option(help="0: dense; else as Mixtral, two a token")] = 0,
    hybrid: Annotated[bool, typer.Option(help="gated delta nets in three of four layers, as Qwen3.5")] = False,
    mamba: Annotated[bool, typer.Option(help="Mamba-2 in every second layer, as Nemotron-H")] = False,
    seq: Annotated[int, typer.Option(help="tokens of a row")] = 512,
    rows: Annotated[int, typer.Option(help="of a step")] = 4,
    micro: Annotated[int, typer.Option(help="rows of a forward pass, of a rank's share under tp2")] = 2,
    steps: Annotated[int, typer.Option(help="of a round")] = 2,
    rounds: Annotated[int, typer.Option(help="of all contenders")] = 9,
    layout: Annotated[
        str, typer.Option(help=f"{', '.join(LAYOUTS)}: all but the first under torchrun, with as many ranks")
    ] = "single",
    trainer: Annotated[bool, typer.Option(help="with the Trainer too; one rank")] = True,
    memory: Annotated[str | None, typer.Option(help="mtrain, loop or fsdp: its most memory instead")] = None,
    profile: Annotated[bool, typer.Option(help="print self times by operation instead")] = False,
    setting: Annotated[
        list[str] | None, typer.Option(help="of our configuration, such as loss.chunk_tokens=whole")
    ] = None,
) -> None:
    """Prints a line of JSON and a row of a Markdown table."""
    torch.set_num_threads(1)
    if (experts > 0) + hybrid + mamba > 1:
        raise typer.BadParameter("--experts, --hybrid and --mamba are three kinds of model: give one of them")
    shape = Shape(hidden, layers, ffn, vocab, experts, hybrid, mamba, seq, rows, micro)
    # one folder for all ranks of torchrun
    folder = os.path.join(tempfile.gettempdir(), f"bench-pretrain-{os.environ.get('MASTER_PORT', os.getpid())}")
    if int(os.environ.get("RANK", "0")) == 0:
        hf_model(shape).save_pretrained(folder + ".new")
        os.rename(folder + ".new", folder)
    while not os.path.isdir(folder):
        time.sleep(0.1)
    if memory is not None:
        print_memory(memory, folder, shape, layout, setting or [])
        return
    engine, ours = engine_contender(folder, shape, layout, setting or [])
    with engine:
        contenders = {"mtrain": ours, "loop": loop_contender(folder, shape)}
        if layout.endswith("weights"):
            contenders["fsdp"] = loop_contender(folder, shape, shards=True)
        if trainer and layout == "single":
            contenders["trainer"] = trainer_contender(folder, shape)
        if profile:
            profiled(contenders, shape, steps)
            return
        found = measured(contenders, shape, steps, rounds)
    if engine_rank() == 0:
        typer.echo(json.dumps({"shape": shape._asdict(), "layout": layout, **found}))
        kind = f"{experts} experts" if experts else "hybrid" if hybrid else "mamba" if mamba else "dense"
        cells = [f"{name}: {each['median']:.3f} ({each['best']:.3f})" for name, each in found["speed_over"].items()]
        typer.echo(f"| {kind}, {layout}, {rows} x {seq} tokens a step | " + " | ".join(cells) + " |")


def engine_rank() -> int:
    """Returns the rank under torchrun; 0 without it."""
    return int(os.environ.get("RANK", "0"))


if __name__ == "__main__":
    typer.run(main)
