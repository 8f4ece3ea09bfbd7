"""Known faults, each planted in one place on the ranks of a layout to show that the check finds it.

Each occurred in a real trainer. The reference never has one, and only `--inject NAME` plants one. `TESTS` lists the
faults that only tests plant.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from mtrain.base.errors import ConfigError
from mtrain.base.spelling import meant
from mtrain.config import Config


@dataclass(frozen=True)
class Fault:
    """Known fault and the conditions under which it shows."""

    name: str
    text: str
    axis: str | None = None
    """Axis that the layout must use; None: one process with one microbatch shows the fault."""
    condition: Callable[[Config], bool] = lambda config: True
    condition_text: str = ""


FAULTS = (
    Fault("microbatch-means", "averages the means of the microbatches", "microbatches"),
    Fault("tp-counts-again", "adds up the denominator once for each tensor-parallel rank", "tp"),
    Fault("sp-norms-not-reduced", "does not sum the norms' gradients over the sequence-parallel ranks", "sp"),
    Fault(
        "tied-gradient-missed",
        "does not sum the gradients of the tied tables between the first and the last stage",
        "pp",
        lambda config: config.model.tied_embeddings,
        "model.tied_embeddings=true",
    ),
    Fault("positions-not-zigzag", "numbers positions as if each rank held one piece of the row", "cp"),
    Fault(
        "document-boundary-crossed",
        "lets attention see the documents packed before",
        None,
        lambda config: config.data.isolate_documents,
        "data.isolate_documents=true or data.packing",
    ),
)
"""Faults of `verify parity` and `verify hf`, one for each axis."""
RESUME_FAULTS = (Fault("moments-not-restored", "begins with moments of 0"),)
PREEMPT_FAULTS = (Fault("record-lost", "loses the last record that was written before the stop"),)
DROPPED_ELEMENT = Fault("dropped-element", "loses the last element of each all-gather")
WRONG_SUM = Fault("wrong-sum", "adds 1 to a sum on the last rank of each group")
SLOW_LINK = Fault("slow-link", "delays messages from rank 0 to rank 1, which is shown and fails nothing")
MACHINE_FAULTS = (DROPPED_ELEMENT, WRONG_SUM, SLOW_LINK)
BACKEND_FAULTS = (Fault("missing-gradient", "gives the projection of the attention's output no gradient"),)

TESTS = {
    "planted/test_inject.py::test_every_fault_is_found_and_named": (
        "dp-means cp-counts-again dp-size-in-denominator cp-scaled-loss dropped-microbatch "
        "labels-shifted-after-slicing keys-in-rank-order hops-left-out clip-before-normalisation clamped-denominator "
        "epsilon-in-denominator totals-in-half gradients-in-half "
        "int32-weights dp-rank-not-reduced dropout-left-on vocabulary-padding-in-softmax local-side-term-denominators "
        "norms-decayed norms-counted-per-tp-rank full-width-norm-by-tp-rank state-across-documents "
        "state-dropped-at-parts decay-in-half-precision router-losses-shared-out expert-loads-per-rank "
        "experts-left-out-of-norm depths-divided-by-main matrices-by-tp-rank matrices-fused"
    ),
    "planted/test_shared_faults.py::test_what_every_layout_shares_is_found": (
        "last-token-masked masked-tokens-counted token-weights-squared sample-weights-ignored padding-counted "
        "padding-by-token-id attention-ends-at-pad-id pad-id-hidden-from-routers loads-of-the-next-layer "
        "labels-shifted-twice extras-not-shifted datum-weights-shifted datum-extras-shifted record-weights-shifted "
        "record-extras-shifted sample-read-twice positions-not-restarted row-counted-as-sequence "
        "label-of-the-next-sample router-balance-by-row tokens-ahead-across-documents sequence-mean-plus-one "
        "square-root-left-out norm-length-off empty-sequences-confused side-terms-divided-by-main "
        "smoothing-with-padding chunk-gradient-dropped window-off-by-one rope-base-off rotary-of-whole-heads "
        "queries-of-one-temperature softmax-scale-off norm-epsilon-off router-losses-times-top-k "
        "expert-scaling-ignored bias-correction-missing decay-not-times-rate rate-one-step-late warmup-off-by-one"
    ),
    "parity/test_adapters.py::test_every_fault_of_adapters_is_found": (
        "adapter-gradient-times-tp adapter-gradient-not-reduced adapter-scale-dropped magnitude-by-tp-rank "
        "frozen-weights-decayed saved-module-times-tp"
    ),
    "resume/test_run.py::test_every_fault_of_resuming_is_found_and_named": (
        "run-step-off-by-one samples-restarted learning-rate-restarted adam-step-off-by-one adam-step-shared "
        "main-weights-rounded stale-shard loss-scale-restarted random-states-not-restored records-kept"
    ),
    "preempt/test_run.py::test_what_a_stop_may_spoil_is_found": "record-repeated rate-changed",
    "backend/test_run.py::test_wrong_layers_fail": "document-boundary dropped-window bf16-sums",
}
"""Tests below tests/verify, with the faults that they plant."""


def chosen(name: str, config: Config, axes: Iterable[str], faults: Sequence[Fault] = FAULTS) -> Fault:
    """Returns the fault of this name.

    Raises:
        ConfigError: The fault is unknown or a test, or cannot show with these axes of layouts and this shrunk
            configuration.
    """
    known = {fault.name: fault for fault in faults}
    fault = known.get(name)
    if fault is None:
        raise _unknown_fault(name, list(known))
    if fault.axis is not None and fault.axis not in axes:
        raise ConfigError(
            f"--inject {name} cannot show: it needs a layout that uses {fault.axis}; set it in the configuration or "
            "name one with --layouts"
        )
    if not fault.condition(config):
        raise ConfigError(f"--inject {name} cannot show: it needs {fault.condition_text}; set it")
    return fault


def _unknown_fault(name: str, names: Sequence[str]) -> ConfigError:
    for test, planted in TESTS.items():
        if name in planted.split():
            return ConfigError(
                f"--inject {name}: this fault is now planted only by a test, tests/verify/{test}; choose one of "
                f"{', '.join(names)}"
            )
    near = meant(name, names)
    hint = f"did you mean {near}?" if near else "see --list-injections"
    return ConfigError(f"--inject {name}: there is no such fault; {hint}")
