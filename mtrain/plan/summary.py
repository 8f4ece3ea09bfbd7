"""Output of `mtrain check`: the layout, the batch, and the cost of a step."""

from collections.abc import Sequence

from mtrain import arch
from mtrain.arch.activations import Activations
from mtrain.arch.layout import Layout, most_microbatches
from mtrain.base.spelling import counted
from mtrain.config import Config, adapters, known_issues
from mtrain.config.derived import data_phases

_GIB, _MIB = 2**30, 2**20
_COLUMNS = ("pp rank", "layers", "parameters", "weights", "gradients", "optimizer", "activations", "update", "total")
_HOST_COLUMN = ("pinned on the host",)
"""Additional column if activations or moments move to the host."""


def plan_lines(config: Config, world_size: int, notes_on_folder: Sequence[str] = ()) -> list[str]:
    layout = Layout.from_config(config, world_size)
    notes = [*known_issues.notes(config), *adapters.notes(config), *notes_on_folder]
    lines = [f"{name:<18}{value}" for name, value in _facts(config, layout).items()]
    lines += [f"note: {note}" for note in notes]
    lines += ["", "Memory of a rank, GiB (activations and update do not coincide)"]
    moves_to_host = bool(config.train.offload_layers) or config.train.offload_optimizer
    rows, num_layers = [_COLUMNS + (_HOST_COLUMN if moves_to_host else ())], config.model.num_layers
    for pp_rank in range(layout.pp):
        memory = arch.memory_per_rank(config, layout, pp_rank)
        names = ("weights", "gradients", "optimizer", "activations", "update", "total")
        sizes = [getattr(memory, f"{name}_bytes") for name in names]
        if moves_to_host:
            sizes.append(memory.host_bytes)
        layers = sum(len(layout.layers(num_layers, pp_rank, chunk)) for chunk in range(layout.vpp))
        parameters = arch.parameters_on_rank(config.model, layout, pp_rank).total
        gibs = (f"{size / _GIB:.3f}" for size in sizes)
        rows.append((str(pp_rank), str(layers), f"{parameters:,}", *gibs))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return lines + ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _facts(config: Config, layout: Layout) -> dict[str, str]:
    """Returns name -> printed fact about layout, batch and model."""
    train, model = config.train, config.model
    at_most = "" if config.data.packing is None else "at most "
    tokens = config.sequences_per_step * (config.row_width if config.steps_count_rows else config.data.seq_length)
    rows = str(train.micro_batch_size)
    if config.data.packing is not None:
        rows = f"{counted(train.micro_batch_size, 'packed row')} of {config.row_width}"
    microbatches = counted(most_microbatches(config, layout), "microbatch")
    size = counted(train.global_batch_size, "packed row" if config.steps_count_rows else "sample")
    facts = {
        "layout": f"{layout} on {counted(layout.world_size, 'rank')}",
        "batch": f"{size} = {'' if config.steps_count_rows else at_most}{microbatches} x {rows} x dp {layout.dp}",
        "tokens per step": f"{at_most}{tokens:,}",
        "tokens of the run": f"{at_most}{tokens * train.num_steps:,}",
    }
    if not train.num_steps:
        facts["tokens of the run"] = f"those of {train.num_epochs:g} epochs, not counted without files"
    num_parameters, padded = arch.num_parameters(model), arch.num_padded_parameters(model, layout.tp)
    facts["parameters"] = f"{num_parameters:,} ({padded:,} with the vocabulary padded)"
    if model.experts is not None:
        facts["parameters"] += f", {arch.num_active_parameters(model):,} for each token"
    if rates := config.optimizer.lr_of_parts:
        facts["learning rates"] = f"lr={config.optimizer.lr:g}, " + ", ".join(f"{k}={v:g}" for k, v in rates.items())
    if config.adapter is None and model.vision is not None:
        facts["parameters"] += f"; {arch.num_trained_parameters(model):,} of them are trained"
    if config.adapter is not None:
        trained = arch.num_adapter_parameters(model, config.adapter)
        share = trained / num_parameters
        facts["parameters"] += f"; frozen, with {trained:,} trained ones of adapters ({share:.2%})"
        most = max(arch.memory_per_rank(config, layout, pp_rank).adapter_bytes for pp_rank in range(layout.pp))
        state = "weights, gradients and the optimizer's state"
        facts["each adapter"] = f"{most / _MIB:.3f} MiB of a rank: {state}"
    flops = arch.run_flops_per_token(config)
    if (patches := Activations(config, layout).patches) > 0:
        facts["images"] = (
            f"at most {counted(patches, 'patch', ',')} of a microbatch on a rank, if all tokens are of images"
        )
    facts |= {"FLOPs per token": f"{flops:.4e}", "FLOPs per step": f"{at_most}{flops * tokens:.4e}"}
    facts |= {f"data, phase {number}": str(phase) for number, phase in enumerate(data_phases(config.data), start=1)}
    if model.megatron:
        fields = ", ".join(f"{name}={value}" for name, value in model.megatron.items())
        facts["passed to megatron"] = f"{fields} (each proven by tests/parity; no other field passes)"
    return facts
