"""Known faults, each planted in one place on the ranks of a layout to show that the check finds it.

Each occurred in a real trainer. The reference never has one. Only `--inject NAME` plants one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mtrain.arch import padded_vocab_size
from mtrain.base.errors import ConfigError
from mtrain.base.spelling import meant
from mtrain.config import Config
from mtrain.config.schema.model import RECURRENT
from mtrain.verify.planted.fault import Fault, side_terms_differ
from mtrain.verify.planted.shared_inject import SHARED_FAULTS

_RECURRENT = " or ".join(f"model.{key}" for key in RECURRENT)


LAYOUT_FAULTS = (
    Fault("microbatch-means", "averages the means of the microbatches", "microbatches"),
    Fault("dp-means", "averages the token means of the data-parallel ranks", "dp"),
    Fault("cp-counts-again", "adds up the denominator once for each context-parallel rank", "cp"),
    Fault("tp-counts-again", "adds up the denominator once for each tensor-parallel rank", "tp"),
    Fault("dp-size-in-denominator", "multiplies the loss by dp_size where gradients are summed, not averaged", "dp"),
    Fault("cp-scaled-loss", "multiplies the loss by cp, as a two-part loss of Megatron-Core is", "cp"),
    Fault("sp-norms-not-reduced", "does not sum the norms' gradients over the sequence-parallel ranks", "sp"),
    Fault(
        "tied-gradient-missed",
        "does not sum the gradients of the tied tables between the first and the last stage",
        "pp",
        lambda config: config.model.tied_embeddings,
        "model.tied_embeddings=true",
    ),
    Fault("dropped-microbatch", "loses the last of several microbatches", "microbatches"),
    Fault("labels-shifted-after-slicing", "shifts labels after the rows are cut over context parallelism", "cp"),
    Fault("positions-not-zigzag", "numbers positions as if each rank held one piece of the row", "cp"),
    Fault("keys-in-rank-order", "takes keys in the order of the ranks for keys in the order of the row", "cp"),
    Fault(
        "hops-left-out",
        "attends to the keys of a rank's own chunks alone, as a ring without hops does",
        "ring",
    ),
    Fault(
        "document-boundary-crossed",
        "lets attention see the documents packed before",
        None,
        lambda config: config.data.isolate_documents,
        "data.isolate_documents=true or data.packing",
    ),
    Fault(
        "clip-before-normalisation",
        "clips the sum of gradients before it is divided",
        None,
        lambda config: config.optimizer.clip_grad > 0,
        "optimizer.clip_grad > 0",
    ),
    Fault("clamped-denominator", "takes clamp(min=1) of each microbatch's denominator", "microbatches", shown_by=3),
    Fault("epsilon-in-denominator", "adds 1e-8 to each microbatch's denominator", None),
    Fault(
        "int32-weights",
        "counts loss tokens in int32, as Megatron-Core does, so that weights lose their fraction",
        None,
        shown_by=2,
    ),
    Fault("dp-rank-not-reduced", "leaves one data-parallel rank's gradients out of the sum", "dp"),
    Fault("dropout-left-on", "trains with a hidden dropout of 0.1 that the configuration does not have", None),
    Fault(
        "vocabulary-padding-in-softmax",
        "gives the padding of the vocabulary probability",
        None,
        lambda config: padded_vocab_size(config.model, 1) > config.model.vocab_size,
        "a model.vocab_size that is not a multiple of model.vocab_multiple",
    ),
    Fault(
        "local-side-term-denominators",
        "scales side terms by the denominators of one data-parallel rank",
        "dp",
        side_terms_differ,
        "a side term with another aggregation than the main term",
    ),
    Fault(
        "norms-decayed",
        "applies weight decay to norms and biases",
        None,
        lambda config: config.optimizer.weight_decay > 0 and not config.optimizer.decay_norms_and_biases,
        "optimizer.weight_decay > 0 and optimizer.decay_norms_and_biases=false",
    ),
    Fault(
        "norms-counted-per-tp-rank", "counts replicated gradients once for each tensor-parallel rank in the norm", "tp"
    ),
    Fault(
        "full-width-norm-by-tp-rank",
        "norms queries and keys by the mean square of the heads that one tensor-parallel rank holds",
        "tp",
        lambda config: config.model.qk_norm and config.model.qk_norm_width == "full",
        "model.qk_norm_width=full",
    ),
    Fault(
        "state-across-documents",
        "lets delta nets and Mamba-2 carry states over the documents of a row, and their convolution see those before",
        None,
        lambda config: bool(config.model.recurrent) and config.data.isolate_documents,
        f"{_RECURRENT}, and data.isolate_documents=true or data.packing",
    ),
    Fault(
        "state-dropped-at-parts",
        "begins the part of a row that a context-parallel rank holds with an empty state",
        "cp",
        lambda config: bool(config.model.recurrent),
        _RECURRENT,
    ),
    Fault(
        "decay-in-half-precision",
        "rounds the decays of delta nets and Mamba-2 to bfloat16",
        None,
        lambda config: bool(config.model.recurrent),
        _RECURRENT,
    ),
    Fault(
        "router-losses-shared-out",
        "divides losses of routers by tp x cp, as Megatron-Core does",
        "cp",
        lambda config: bool(config.loss.router.coefficients),
        "a coefficient of loss.router above 0",
    ),
    Fault(
        "expert-loads-per-rank",
        "moves the biases of the choice by the load that one rank sees",
        "dp",
        lambda config: config.model.experts is not None and config.model.experts.bias_update_rate > 0,
        "model.experts.bias_update_rate > 0",
        shown_by=2,
    ),
    Fault(
        "experts-left-out-of-norm", "takes the experts of one expert-parallel rank alone into the gradient norm", "ep"
    ),
    Fault(
        "depths-divided-by-main",
        "divides the losses of further tokens by the loss tokens of the main term, as Megatron-Core does",
        None,
        lambda config: config.model.num_predictions > 1,
        "model.mtp_depths > 0",
    ),
    Fault(
        "matrices-by-tp-rank",
        "orthogonalizes the part of a matrix that a tensor-parallel rank holds by itself",
        "tp",
        lambda config: config.optimizer.kind == "muon",
        "optimizer.kind=muon",
    ),
    Fault(
        "matrices-fused",
        "orthogonalizes queries, keys and values, or gate and up, as one matrix",
        None,
        lambda config: config.optimizer.kind == "muon",
        "optimizer.kind=muon",
    ),
)
"""Faults in the order of loss, layout, data, engine."""


ADAPTER_FAULTS = (
    Fault(
        "adapter-gradient-times-tp",
        "sums the gradient of a replicated A's output tp times over the tensor-parallel ranks",
        "tp",
        lambda config: config.adapter is not None,
        "adapter",
    ),
    Fault(
        "adapter-gradient-not-reduced",
        "does not sum gradients of an adapter's replicated matrices over the sequence-parallel ranks",
        "sp",
        lambda config: config.adapter is not None,
        "adapter",
    ),
    Fault(
        "adapter-scale-dropped",
        "leaves alpha / rank out",
        None,
        lambda config: (
            config.adapter is not None and any(config.adapter.scale_of(each) != 1 for each in config.adapter.parts)
        ),
        "adapter with alpha / rank (rslora: alpha / sqrt(rank)) other than 1",
    ),
    Fault(
        "magnitude-by-tp-rank",
        "takes the norms of rows over the columns that one tensor-parallel rank holds",
        "tp",
        lambda config: (
            config.adapter is not None
            and config.adapter.has_magnitudes
            and bool(config.adapter.parts & {"proj", "fc2"})
        ),
        "adapter.kind=dora with proj or fc2 among its targets",
    ),
    Fault(
        "frozen-weights-decayed",
        "lets weight decay shrink the frozen model",
        None,
        lambda config: config.adapter is not None,
        "adapter",
    ),
    Fault(
        "saved-module-times-tp",
        "adds up the gradients of what learns whole tp times over the tensor-parallel ranks",
        "tp",
        lambda config: config.adapter is not None and bool(config.adapter.modules_to_save),
        "adapter.modules_to_save",
    ),
)

FAULTS = (*LAYOUT_FAULTS, *ADAPTER_FAULTS, *SHARED_FAULTS)

NAMES = tuple(fault.name for fault in FAULTS)


def chosen(name: str, config: Config, axes: Iterable[str], faults: Sequence[Fault] = FAULTS) -> Fault:
    """Returns the fault of this name.

    Raises:
        ConfigError: The fault is unknown, or cannot show with these axes of layouts and this shrunk configuration.
    """
    fault = next((each for each in faults if each.name == name), None)
    if fault is None:
        near = meant(name, [each.name for each in faults])
        hint = f"did you mean {near}?" if near else "see --list-injections"
        raise ConfigError(f"--inject {name}: there is no such fault; {hint}")
    if fault.axis is not None and fault.axis not in axes:
        raise ConfigError(
            f"--inject {name} cannot show: it needs a layout that uses {fault.axis}; set it in the configuration or "
            "name one with --layouts"
        )
    if not fault.condition(config):
        raise ConfigError(f"--inject {name} cannot show: it needs {fault.condition_text}; set it")
    return fault
