"""Compiles transformer layers, or only their regions, with torch.compile.

Everything that depends on the layout stays outside of the graphs: collectives, schedules, recomputation, dispatch of
tokens to experts, splitting rows into documents. A layer without any of these is one graph. Layers of the same kind
share graphs.
"""

import contextlib
import logging
import sys
import warnings
from collections.abc import Sequence
from typing import assert_never

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerLayer
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from torch import Tensor, nn

from mtrain.arch.flops import run_flops_per_token
from mtrain.base.errors import MachineError
from mtrain.config import Config
from mtrain.config.schema.sections import Sections
from mtrain.config.schema.train import Compiled
from mtrain.core import kernels
from mtrain.core.layers.attention.recurrent.core import RecurrentCore
from mtrain.core.layers.attention.rotating import RotatingAttention, TemperedAttention
from mtrain.core.layers.certified import finding
from mtrain.core.layers.layer_spec import choose
from mtrain.core.layers.moe.layer import ExpertsLayer
from mtrain.core.ranks.groups import Groups
from mtrain.core.ranks.init import any_rank, on_all_ranks

_log = logging.getLogger(__name__)

_GRAPHS_OF_A_FUNCTION = 64
"""Most graphs per function, for several kinds of layers, training and validation; torch does not compile more."""

_WORTH_COMPILING = 3e13
"""FLOPs from which a run on CPUs compiles regions, which saves 1 to 3 s per 1e12 and starts 10 to 30 s later."""


def choose_compilation(config: Sections, device: torch.device) -> tuple[Compiled, str]:
    """Resolves `train.compile=auto` on this rank; returns the choice and, on a GPU, a note that explains it."""
    train = config.train
    if train.compile != "auto":
        return train.compile, ""
    if train.offload_layers is not None or train.deterministic or choose(config, device).backend == "te":
        return "none", ""
    if device.type == "cpu":
        tokens = train.num_steps * train.global_batch_size * config.data.seq_length
        return "regions" if tokens * run_flops_per_token(config) >= _WORTH_COMPILING else "none", ""
    certified = finding(config, device, "regions")
    if certified.comparison is None:
        cause = (
            f"the certificate {certified.certificate} is of {certified.differs}"
            if certified.certificate
            else "no certificate"
        )
        return "none", f"train.compile=auto compiles nothing: {cause}; `mtrain verify backend` measures this machine"
    is_taken = certified.comparison.passed and certified.comparison.is_faster
    times = f"{certified.comparison.ms:.3g} ms a pass, without {certified.comparison.own_ms:.3g} ms"
    return (
        "regions" if is_taken else "none",
        f"train.compile=auto compiles {'regions' if is_taken else 'nothing'} by the certificate "
        f"{certified.certificate} ({times if certified.comparison.passed else 'their results are wrong'})",
    )


def compile_layers(chunks: Sequence[nn.Module], config: Config, groups: Groups) -> None:
    """Makes the layers of a rank's chunks, or their regions, compile in their first forward pass (`train.compile`).

    Either all ranks compile or none, since compiled sums round differently and copies on TP ranks must keep the same
    bits. Notes give reasons, and name parts that stay uncompiled. Collective over the world.
    """
    choice, note = choose_compilation(config, groups.device)
    if note:
        _note(groups, note)
    # certificates are files, which may be missing on some nodes
    if config.train.compile == "auto" and groups.device.type == "cuda" and any_rank(choice == "none", groups.device):
        choice = "none"
    if choice == "none":
        return
    try:
        on_all_ranks(lambda: try_compiler(groups.device, choice))
    except MachineError as error:
        _note(groups, str(error))
        return
    _settle(groups, choice)
    for module in (module for chunk in chunks for module in chunk.modules()):
        match choice:
            case "regions":
                if hasattr(module, "compiles_regions"):
                    setattr(module, "compiles_regions", True)  # noqa: B010 modules have no such field
            case "layers":
                if isinstance(module, TransformerLayer):
                    _compile_layer(module, config, groups)
            case _:
                assert_never(choice)


def _compile_layer(layer: TransformerLayer, config: Sections, groups: Groups) -> None:
    for owner, name in _uncompiled_methods(layer, config, groups):
        setattr(owner, name, torch.compiler.disable(getattr(owner, name)))  # type: ignore[no-untyped-call]
    # by nn.Module.compile, which renames no parameter
    layer.compile(backend=kernels.BACKEND, dynamic=False)


def as_written() -> contextlib.AbstractContextManager[object]:
    """Turns compilation off inside the block, for passes with rows of many different lengths."""
    if "torch._dynamo" not in sys.modules:  # not imported, which saves seconds in runs that compile nothing
        return contextlib.nullcontext()
    return torch.compiler.set_stance("force_eager")


def _uncompiled_methods(layer: TransformerLayer, config: Sections, groups: Groups) -> list[tuple[nn.Module, str]]:
    """Returns the methods inside a layer that run uncompiled."""
    layout, attention, feed_forward = groups.layout, layer.self_attention, layer.mlp
    # checkpointed parts run again in backward, outside of the graphs, and must run the same way both times
    methods: list[tuple[nn.Module, str]] = []
    if isinstance(attention, SelfAttention):
        methods.append((attention, "_checkpointed_attention_forward"))
    if layer.recompute_mlp:
        methods.append((layer, "_forward_mlp"))
    elif isinstance(feed_forward, ExpertsLayer):  # shapes depend on the number of tokens of each expert
        methods.append((feed_forward, "forward"))
    is_divided = layout.tp > 1 or layout.cp > 1
    # e.g. latent attention and norms over heads of all ranks; TemperedAttention stores a tensor during its call
    if isinstance(attention, IdentityOp):
        pass  # a layer of one sublayer
    elif isinstance(attention, TemperedAttention) or (type(attention) is not RotatingAttention and is_divided):
        methods.append((attention, "forward"))
    elif (
        isinstance(attention.core_attention, RecurrentCore)  # a loop over the chunks of a row
        or layout.cp > 1
        or config.data.isolate_documents
        or config.model.attention_dropout
    ):
        methods.append((attention.core_attention, "forward"))
    if layout.tp > 1:
        linears = (ColumnParallelLinear, RowParallelLinear)
        methods += [(module, "forward") for module in layer.modules() if isinstance(module, linears)]
    return methods


def try_compiler(device: torch.device, choice: Compiled) -> None:
    """Compiles a small function, to verify that torch.compile works on this machine.

    Raises:
        MachineError: Forward or backward of the function cannot be compiled.
    """
    import torch._dynamo

    x = torch.ones(8, 8, device=device, requires_grad=True)
    torch.compiler.set_stance("default")  # an early import of megatron-core has turned compilation off
    try:
        with torch._dynamo.config.patch(suppress_errors=False):
            loss = torch.compile(_small, backend=kernels.BACKEND, dynamic=False)(x).sum()
            loss.backward()  # type: ignore[no-untyped-call]
    except Exception as error:  # compilers, linkers and drivers may raise anything
        raise MachineError(
            f"train.compile={choice} is ignored, since torch.compile does not work on this machine "
            f"({_reason(error)}); install a C++ compiler, and triton on a GPU, or set train.compile=none"
        ) from error


def _small(x: Tensor) -> Tensor:
    return torch.nn.functional.silu(x) * x.cos()


def _settle(groups: Groups, choice: Compiled) -> None:
    """Changes torch's settings for the whole process."""
    import torch._dynamo.config as dynamo
    import torch._functorch.config as functorch

    dynamo.recompile_limit = max(dynamo.recompile_limit, _GRAPHS_OF_A_FUNCTION)
    # an epsilon that differs between norms becomes a constant of two graphs, not an input, which would be rounded
    dynamo.specialize_float = True
    # megatron-core warns in the middle of a layer, which would split the graph
    dynamo.ignore_logging_functions.add(warnings.warn)
    # a part that cannot be compiled runs uncompiled; torch finds that out before any of the part has run
    dynamo.suppress_errors = functorch.force_non_lazy_backward_lowering = True
    logging.getLogger("torch._dynamo.convert_frame").addFilter(_NoteInPlaceOfTracebacks(groups, choice))


class _NoteInPlaceOfTracebacks(logging.Filter):
    """Reports once that a part of a layer is not compiled, instead of torch's traceback for each such part."""

    def __init__(self, groups: Groups, choice: Compiled) -> None:
        super().__init__()
        self._groups, self._choice, self._has_said = groups, choice, False

    def filter(self, record: logging.LogRecord) -> bool:
        """Drops the tracebacks, and lets all other records pass."""
        error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
        if error is None or record.levelno != logging.WARNING:
            return True
        if not self._has_said:
            self._has_said = True
            _note(
                self._groups,
                f"train.compile={self._choice} leaves a part of a layer uncompiled, which torch cannot compile "
                f"({_reason(error)})",
            )
        return False


def _reason(error: BaseException) -> str:
    cause = getattr(error, "inner_exception", error)  # torch wraps what a backend raised
    line = next((line.strip() for line in str(cause).splitlines() if line.strip()), "no message")
    return f"{type(cause).__name__}: {line}"


def _note(groups: Groups, text: str) -> None:
    if groups.rank == 0:
        _log.info(f"note: {text}")
