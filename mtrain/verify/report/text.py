"""Compared quantities, and the texts in which the reports of the checks differ."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

_QUANTITIES = {
    "collective": ("collectives", "elements of {name}"),
    "counters": ("counters", "counter {name}"),
    "samples": ("samples", "{name} of the samples"),
    "lr": ("learning rate", "learning rate"),
    "denominator": ("denominator", "denominator of term {name}"),
    "loss": ("loss", "loss of term {name}"),
    "layer_output": ("output of a layer", "output of the layer"),
    "input_gradient": ("gradient of its input", "gradient of the layer's input"),
    "gradient": ("gradients", "gradient of {name}"),
    "grad_norm": ("gradient norm", "gradient norm"),
    "update": ("updated weights", "updated weights of {name}"),
    "rounding": ("rounding of float32", "{name} in float32"),
    "weights": ("weights", "weights of {name}"),
    "param": ("main weights", "main weights of {name}"),
    "exp_avg": ("first moments", "first moment of {name}"),
    "exp_avg_sq": ("second moments", "second moment of {name}"),
    "random": ("random states", "random state {name}"),
    "records": ("records", "{name} in metrics.jsonl"),
    "files": ("checkpoint files", "{name} of the last checkpoint"),
}
TITLES = {kind: title for kind, (title, _) in _QUANTITIES.items()}
"""Names of all kinds of quantities, in the order of computation."""

BEFORE_FORWARD = ("collective", "samples", "lr")
"""Kinds that do not depend on the model's computation."""

TENSOR_KINDS = ("gradient", "update", "weights", "param", "exp_avg", "exp_avg_sq")
"""Kinds whose names are parameters."""

IN_WORDS = {kind: words for kind, (_, words) in _QUANTITIES.items()}


@dataclass(frozen=True)
class ReportText:
    """Texts of one check."""

    verb: str
    """Command `mtrain verify VERB`, which writes VERB.json and VERB.html."""
    noun: str
    """Word for one compared thing: layout, case."""
    columns: Mapping[str, tuple[str, ...]]
    """Kinds in each column of the table, by heading."""
    maps: tuple[str, ...]
    """Kinds drawn as heat maps."""
    shows_tolerances: bool
    """Whether one tolerance applies to a whole column."""
    agreement: str
    disagreement: str
    """Text after the number of failures, such as `2 of 7 `."""
    headline: str
    """Headline if all pass, with `{count}`."""
    failed_headline: str
    """Headline if some fail, with `{failed}` and `{count}`."""
    caption: str
    length: str
    """Sentence about the length of the runs, with `{steps}`."""
    compared: str
    curves: str
    tensors: str
    everything: str
    """Diagnosis if one process also fails."""
    times: str = ""
    """Sentence about the lines of measured times; empty if the report has none."""
    undecided: str = "every layout that ran fails, and none of them was one process: the cause is open"
    """Diagnosis if nothing passes and no layout was one process; empty if the axes are not a layout's."""

    @property
    def json_name(self) -> str:
        """Returns the file name of the data."""
        return f"{self.verb}.json"

    @property
    def page_name(self) -> str:
        """Returns the file name of the page."""
        return f"{self.verb}.html"

    def agreed_before(self, kind: str, compared: Collection[str]) -> str:
        """Says which compared kinds agree before this one, the first that deviates in a step."""
        order = list(TITLES)
        earlier = [earlier_kind for earlier_kind in order[: order.index(kind)] if earlier_kind in compared]
        names = [_PLURALS.get(name, name) for name, kinds in self.columns.items() if {*kinds} & {*earlier}]
        if not names:
            return ""
        listed = names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]
        return f"; {listed} agree"


_PLURALS = {
    "lr": "learning rates",
    "denominator": "denominators",
    "loss": "losses",
    "gradient": "gradients",
    "grad_norm": "their norm",
}


def _curves(band: str, runs: str) -> str:
    return (
        f"Above: the values. The broad grey band is {band}; on it the {runs} take turns in a striped line, so that "
        "equal curves stay visible. Failing ones have filled markers and separate lines."
    )


PARITY = ReportText(
    verb="parity",
    noun="layout",
    columns={
        kind: (kind,)
        for kind in ("samples", "lr", "denominator", "loss", "gradient", "grad_norm", "update", "rounding")
    },
    maps=("gradient", "update"),
    shows_tolerances=True,
    agreement="layouts are the run of one process",
    disagreement="layouts are not the run of one process",
    headline="All {count} layouts are the same run as the reference, as far as rounding can tell.",
    failed_headline="{failed} of {count} layouts are not the same run as the reference.",
    caption="Worst deviation from one process in float64",
    length="Every layout ran {steps} steps.",
    compared=(
        "Worst relative deviation from the exact value over all steps. The reference is one process with one batch in "
        "float64 at the same weights."
    ),
    curves=_curves("the reference", "layouts")
    + (
        " After a wrong update they diverge. Below: the relative deviation from the exact value of each step, which "
        "is taken at the weights that the layout had (gradient norms: from that of the layout's own gradients); "
        "layouts side by side."
    ),
    tensors=(
        "Each square is the worst step of one tensor in one layout, in units of its tolerance; tensors are in forward "
        "order. A cross marks a deviation that rounding cannot explain."
    ),
    everything="every layout fails, even one process with one microbatch: the layout is not at fault",
)

_OF_A_RUN = {
    "denominator": ("denominator",),
    "loss": ("loss",),
    "gradient": ("gradient", "grad_norm"),
    "weights": ("update", "weights", "param"),
    "moments": ("exp_avg", "exp_avg_sq"),
    "random": ("random",),
}
"""Columns of checks that also compare the state of runs."""

RESUME = ReportText(
    verb="resume",
    noun="case",
    columns={
        "counters": ("counters",),
        "samples": ("samples",),
        "lr": ("lr",),
        **_OF_A_RUN,
        "records": ("records",),
    },
    maps=("weights", "param", "exp_avg", "exp_avg_sq"),
    shows_tolerances=False,
    agreement="resumed runs are the straight run",
    disagreement="resumed runs are not the straight run",
    headline="All {count} resumed runs are the run that never stopped.",
    failed_headline="{failed} of {count} resumed runs are not the run that never stopped.",
    caption="Worst deviation from the run that never stopped",
    length="The straight run has {steps} steps.",
    compared=(
        "On the layout that saved, everything is compared bit by bit with the straight run: the state right after "
        "loading and after every step, the samples, the records. On another layout the loaded state is compared bit "
        "by bit with the files, samples, learning rates and counters must be the same, and every step is compared "
        "with its exact values in float64 at its initial weights, within the tolerances below."
    ),
    curves=_curves("the straight run", "resumed runs") + " Below: the relative deviation.",
    tensors=(
        "Each square is the worst step of one tensor in one case: 0, or deviating. Tensors are in forward order. A "
        "cross marks a deviation that must not occur."
    ),
    everything="resuming changes the run, even on the layout that saved",
    undecided="",
)

PREEMPT = ReportText(
    verb="preempt",
    noun="stop",
    columns={
        "lr": ("lr",),
        "denominator": ("denominator",),
        "loss": ("loss",),
        "gradient": ("grad_norm",),
        "records": ("records",),
        "checkpoint": ("files",),
    },
    maps=(),
    shows_tolerances=False,
    agreement="stops cost the run nothing",
    disagreement="stops changed or lost the run",
    headline="The run was stopped {count} times by a signal and equals the uninterrupted run.",
    failed_headline="{failed} of {count} stops changed or lost the run.",
    caption="After each stop, the deviation from the uninterrupted run; seconds from the signal to the end",
    length="The run has {steps} steps.",
    compared=(
        "One run was started repeatedly by the real launcher and stopped by a real signal, each time in another "
        "phase. It must leave the REQUEUE marker, exit with 0, and resume bit for bit: the record of each step and "
        "every file of the last checkpoint are compared. Seconds are from the signal to the end of the ranks."
    ),
    curves=(
        "Above: the values. The broad grey band is the uninterrupted run; on it are the steps after each stop. Below: "
        "the relative deviation."
    ),
    tensors="",
    everything="stopping changes the run wherever it happens",
    undecided="",
)

HF = ReportText(
    verb="hf",
    noun="layout",
    columns={kind: (kind,) for kind in ("denominator", "loss", "grad_norm")},
    maps=(),
    shows_tolerances=True,
    agreement="layouts are the run of transformers",
    disagreement="layouts are not the run of transformers",
    headline="All {count} layouts are the run of transformers, from the same weights on the same data.",
    failed_headline="{failed} of {count} layouts are not the run of transformers.",
    caption="Worst deviation from transformers in float32",
    length="Every run has {steps} steps.",
    compared=(
        "Worst relative deviation over all steps. Both sides start from the same weights and continue independently: "
        "a deviation in one step carries over to the next."
    ),
    curves=_curves("transformers", "layouts") + " Below: the relative deviation.",
    tensors="",
    everything="every layout fails, even one process: the layout is not at fault",
)

BACKEND = ReportText(
    verb="backend",
    noun="layer",
    columns={"output": ("layer_output",), "input gradient": ("input_gradient",), "gradients": ("gradient",)},
    maps=("gradient",),
    shows_tolerances=False,
    agreement="layers of candidates compute what ours do",
    disagreement="layers of candidates do not compute what ours do",
    headline="All {count} layers of candidates compute what ours do, as far as rounding can tell.",
    failed_headline="{failed} of {count} layers of candidates do not compute what ours do.",
    caption="Worst error of a candidate's layers from float64",
    length="Every layer ran forward and backward once, and was timed against ours.",
    compared=(
        "Errors of output, gradient of the input and gradients of the weights, relative to the exact tensor from the "
        "reference in float64. The worse of root mean square and largest element is shown, in units of its "
        "tolerance, which follows from the error of our torch layers on the same weights and inputs."
    ),
    curves="",
    tensors=(
        "Each square is one gradient of one candidate's layer, in units of its tolerance. A cross marks a deviation "
        "that rounding cannot explain."
    ),
    everything="every layer fails",
    times="Forward and backward pass of one layer; the median of passes that alternate with our torch layers.",
    undecided="",
)

MACHINE = ReportText(
    verb="machine",
    noun="check",
    columns={
        "collectives": ("collective",),
        "samples": ("samples", "lr", "counters", "records"),
        **_OF_A_RUN,
        "rounding": ("rounding",),
    },
    maps=(),
    shows_tolerances=False,
    agreement="checks pass on this machine",
    disagreement="checks fail on this machine",
    headline="All {count} checks of collectives, layouts and resuming pass on this machine.",
    failed_headline="{failed} of {count} checks fail on this machine.",
    caption="Worst deviation from sums on the host, one process, and a run that never stopped",
    length="Every layout ran {steps} steps.",
    compared=(
        "Collectives of whole numbers must be exact: the table shows the share of elements that differ from the "
        "host's result. Small copies of models were trained in float32 on every layout and compared with one process "
        "in float64, as `mtrain verify parity` does, and stopped and resumed on other layouts, as `mtrain verify "
        "resume` does."
    ),
    curves="",
    tensors="",
    everything="every layout fails, even one process: the layout is not at fault",
    undecided="",
    times="Collectives over all ranks, then links that are slower than others. A slow link fails no check.",
)
