"""Known faults that every layout shares, including one process with one microbatch.

Comparing layouts cannot find them; the reference does, because it shares no code with the trainer.
`mtrain.verify.planted.inject` explains and lists all faults.
"""

from __future__ import annotations

from collections.abc import Callable

from mtrain.config import Config
from mtrain.config.schema.loss import NORM_AGGREGATIONS
from mtrain.verify.planted.fault import Fault, side_terms_differ

POLICY_LOSSES = ("ppo", "gspo", "cispo", "kl")
"""Losses of `mtrain.verify.reference.policy`, repeated because that module imports torch."""


def _aggregates(*names: str) -> Callable[[Config], bool]:
    """Returns a condition: a term has one of these aggregations."""
    return lambda config: any(term.aggregation in names for term in (config.loss, *config.loss.side_terms.values()))


def _reads_extras(config: Config) -> bool:
    return any(term.function in POLICY_LOSSES for term in (config.loss, *config.loss.side_terms.values()))


_SEQUENCE_MEANS = ("seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")

SHARED_FAULTS = (
    Fault("last-token-masked", "leaves the last token of each document out of the loss", None),
    Fault("masked-tokens-counted", "gives every token of text the weight 1, masked ones too", None),
    Fault("token-weights-squared", "applies the weights of tokens twice", None, shown_by=2),
    Fault("sample-weights-ignored", "lets every sample count the same", None, shown_by=2),
    Fault("padding-counted", "counts padding as loss tokens", None),
    Fault("labels-shifted-twice", "predicts the token after the next one", None),
    Fault(
        "extras-not-shifted",
        "gives each token the advantage and the log-probabilities of the one before the predicted",
        None,
        _reads_extras,
        "a loss that reads extras, such as ppo",
    ),
    Fault("datum-weights-shifted", "gives each token of a Datum the weight of the one before it", None),
    Fault(
        "datum-extras-shifted",
        "gives each token of a Datum the extras of the one before it",
        None,
        _reads_extras,
        "a loss that reads extras, such as ppo",
    ),
    Fault("record-weights-shifted", "gives each token of a record the weight of the one before it", None),
    Fault(
        "record-extras-shifted",
        "gives each token of a record the extras of the one before it",
        None,
        _reads_extras,
        "a loss that reads extras, such as ppo",
    ),
    Fault(
        "sample-read-twice",
        "reads every second sample twice and the one after it never",
        None,
        lambda config: config.data.kind != "mock",
        "data from files",
    ),
    Fault(
        "positions-not-restarted",
        "counts positions over the row where documents are isolated",
        None,
        lambda config: config.data.isolate_documents,
        "data.isolate_documents=true or data.packing",
    ),
    Fault(
        "row-counted-as-sequence",
        "aggregates packed rows as if each were one sequence",
        None,
        lambda config: (
            config.data.packing is not None
            and any(term.aggregation.startswith("seq-mean") for term in (config.loss, *config.loss.side_terms.values()))
        ),
        "data.packing, and a term that is a mean over sequences",
    ),
    Fault(
        "label-of-the-next-sample",
        "lets the last token of a packed sample predict the first one of the next",
        None,
        lambda config: config.data.packing is not None,
        "data.packing",
    ),
    Fault(
        "router-balance-by-row",
        "balances the load of experts over packed rows, not over their sequences",
        None,
        lambda config: config.data.packing is not None and config.loss.router.sequence_balance_coefficient > 0,
        "data.packing and loss.router.sequence_balance_coefficient > 0",
    ),
    Fault(
        "tokens-ahead-across-documents",
        "predicts further tokens over the edge of a document",
        None,
        lambda config: config.model.num_predictions > 1 and config.data.isolate_documents,
        "model.mtp_depths > 0, and data.isolate_documents=true or data.packing",
    ),
    Fault(
        "sequence-mean-plus-one",
        "divides the loss of a sequence of n tokens by n + 1",
        None,
        _aggregates("seq-mean-token-mean"),
        "a term with aggregation=seq-mean-token-mean",
    ),
    Fault(
        "square-root-left-out",
        "divides by n where the aggregation says sqrt(n)",
        None,
        _aggregates("seq-mean-token-sqrt"),
        "a term with aggregation=seq-mean-token-sqrt",
    ),
    Fault(
        "norm-length-off",
        "divides by norm_length + 1",
        None,
        _aggregates(*NORM_AGGREGATIONS),
        "a term whose aggregation has a norm_length",
    ),
    Fault(
        "empty-sequences-confused",
        "counts sequences without loss tokens where they are excluded, and the other way round",
        None,
        _aggregates(*_SEQUENCE_MEANS),
        "a term that is a mean over sequences",
    ),
    Fault(
        "side-terms-divided-by-main",
        "divides side terms by the denominator of the main term",
        None,
        side_terms_differ,
        "a side term with another aggregation than the main term",
    ),
    Fault(
        "smoothing-with-padding",
        "smooths labels over the padded vocabulary",
        None,
        lambda config: bool(config.loss.options.get("label_smoothing")),
        "loss.options.label_smoothing > 0",
    ),
    Fault(
        "chunk-gradient-dropped",
        "leaves every second chunk of tokens out of the output table's gradient",
        None,
        lambda config: isinstance(config.loss.chunk_tokens, int),
        "a number as loss.chunk_tokens",
    ),
    Fault(
        "window-off-by-one",
        "lets attention see one token more than the window",
        None,
        lambda config: config.model.sliding_window is not None,
        "model.sliding_window",
    ),
    Fault("rope-base-off", "rotates by another base", None),
    Fault(
        "rotary-of-whole-heads",
        "rotates all dimensions of a head",
        None,
        lambda config: config.model.rope.partial < 1,
        "model.rope.partial < 1",
    ),
    Fault(
        "queries-of-one-temperature",
        "lets queries not grow with their position",
        None,
        lambda config: config.model.rope.attention_temperature > 0,
        "model.rope.attention_temperature",
    ),
    Fault("softmax-scale-off", "multiplies attention scores by another scale", None),
    Fault("norm-epsilon-off", "adds ten times the epsilon in norms", None),
    Fault(
        "router-losses-times-top-k",
        "multiplies the balancing loss by the number of choices",
        None,
        lambda config: config.loss.router.sequence_balance_coefficient > 0,
        "loss.router.sequence_balance_coefficient > 0",
    ),
    Fault(
        "expert-scaling-ignored",
        "leaves the factor of the chosen scores out",
        None,
        lambda config: config.model.experts is not None and config.model.experts.scaling_factor != 1,
        "model.experts.scaling_factor other than 1",
    ),
    Fault("bias-correction-missing", "leaves Adam's bias correction out", None),
    Fault(
        "decay-not-times-rate",
        "does not multiply weight decay by the learning rate",
        None,
        lambda config: config.optimizer.weight_decay > 0,
        "optimizer.weight_decay > 0",
    ),
    Fault(
        "rate-one-step-late",
        "gives each update the learning rate of the one before",
        None,
        lambda config: config.optimizer.warmup_steps > 0 or config.optimizer.decay != "none",
        "a schedule other than constant, or a warm-up",
        shown_by=2,
    ),
    Fault(
        "warmup-off-by-one",
        "warms up for one step more",
        None,
        lambda config: config.optimizer.warmup_steps > 0,
        "optimizer.warmup_steps > 0",
        shown_by=2,
    ),
)
"""Faults in the order of data, loss, model, optimizer."""
