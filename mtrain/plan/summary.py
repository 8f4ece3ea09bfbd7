"""Output of `mtrain check`: the layout, the batch, and the cost of a step."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mtrain import arch
from mtrain.arch.layout import Layout, most_microbatches
from mtrain.config import Config, adapters, known_issues
from mtrain.config.derived import data_phases
from mtrain.config.schema.train import TrainSection

_GIB, _MIB = 2**30, 2**20
_COLUMNS = ("pp rank", "layers", "parameters", "weights", "gradients", "optimizer", "activations", "update", "total")
_HOST_COLUMN = ("pinned on the host",)
"""Column that is added if activations or moments move to the host."""


def plan_lines(config: Config, world_size: int, notes_on_folder: Sequence[str] = ()) -> list[str]:
    summary = _Summary(config, Layout.from_config(config, world_size))
    notes = [*known_issues.notes(config), *adapters.notes(config), *notes_on_folder]
    lines = [f"{name:<18}{value}" for name, value in summary.facts().items()]
    lines += [f"note: {note}" for note in notes]
    lines += ["", "Memory of a rank, GiB (activations and update do not coincide)"]
    rows = [_COLUMNS + (_HOST_COLUMN if _moves_to_host(config.train) else ()), *summary.memory_of_stages()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return lines + ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


class _Summary(NamedTuple):
    """Facts of a configuration and its layout."""

    config: Config
    layout: Layout

    def facts(self) -> dict[str, str]:
        """Returns the printed facts of layout, batch and model, by name."""
        config, layout = self.config, self.layout
        train, model = config.train, config.model
        at_most = "" if config.data.packing is None else "at most "
        sequences = config.sequences_per_step
        tokens = sequences * (config.row_width if config.steps_count_rows else config.data.seq_length)
        flops = arch.run_flops_per_token(config)
        padded = f"{arch.num_padded_parameters(model, layout.tp):,} with the vocabulary padded"
        parameters = f"{arch.num_parameters(model):,} ({padded})"
        if model.experts is not None:
            parameters += f", {arch.num_active_parameters(model):,} for each token"
        if config.adapter is not None:
            trained = arch.num_adapter_parameters(model, config.adapter)
            parameters += (
                f"; frozen, with {trained:,} trained ones of adapters ({trained / arch.num_parameters(model):.2%})"
            )
        of_adapter = {}
        if config.adapter is not None:
            most = max(arch.memory_per_rank(config, layout, pp_rank).adapter_bytes for pp_rank in range(layout.pp))
            state = "weights, gradients and the optimizer's state"
            of_adapter["each adapter"] = f"{most / _MIB:.3f} MiB of a rank: {state}"
        passed = ", ".join(f"{name}={value}" for name, value in model.megatron.items())
        return {
            "layout": f"{layout} on {layout.world_size} ranks",
            "batch": f"{train.global_batch_size} {'packed rows' if config.steps_count_rows else 'samples'} = "
            f"{self._rows()} x dp {layout.dp}",
            "tokens per step": f"{at_most}{tokens:,}",
            "tokens of the run": f"{at_most}{tokens * train.num_steps:,}"
            if train.num_steps
            else f"those of {train.num_epochs:g} epochs, not counted without files",
            "parameters": parameters,
            **of_adapter,
            "FLOPs per token": f"{flops:.4e}",
            "FLOPs per step": f"{at_most}{flops * tokens:.4e}",
            **{f"data, phase {number}": str(each) for number, each in enumerate(data_phases(config.data), start=1)},
        } | ({"passed to megatron": f"{passed} (each proven by tests/parity; no other field passes)"} if passed else {})

    def _rows(self) -> str:
        config, layout = self.config, self.layout
        microbatches = f"{most_microbatches(config, layout)} microbatches x {config.train.micro_batch_size}"
        if config.data.packing is None:
            return microbatches
        at_most = "" if config.steps_count_rows else "at most "
        return f"{at_most}{microbatches} packed rows of {config.row_width}"

    def memory_of_stages(self) -> Iterator[tuple[str, ...]]:
        """Yields one row for each pipeline rank, under _COLUMNS and _HOST_COLUMN."""
        config, layout = self.config, self.layout
        num_layers = config.model.num_layers
        for pp_rank in range(layout.pp):
            memory = arch.memory_per_rank(config, layout, pp_rank)
            bytes_of = (
                memory.weights_bytes,
                memory.gradients_bytes,
                memory.optimizer_bytes,
                memory.activations_bytes,
                memory.update_bytes,
                memory.total_bytes,
                *([memory.host_bytes] if _moves_to_host(config.train) else []),
            )
            yield (
                str(pp_rank),
                str(len(layout.layers_of_rank(num_layers, pp_rank))),
                f"{arch.parameters_on_rank(config.model, layout, pp_rank).total:,}",
                *(f"{count / _GIB:.3f}" for count in bytes_of),
            )


def _moves_to_host(train: TrainSection) -> bool:
    return bool(train.offload_layers) or train.offload_optimizer
