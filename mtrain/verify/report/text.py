"""Compared quantities, and the texts in which the reports of the checks differ."""

import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

_QUANTITIES = {
    "collective": ("collectives", "share of wrong elements of {name}"),
    "counters": ("counters", "counter {name}"),
    "samples": ("samples", "{name} of the samples"),
    "lr": ("learning rate", "learning rate"),
    "denominator": ("denominator", "denominator of term {name}"),
    "log_prob": ("log-probabilities", "log-probability of {name}"),
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


class Count(int):
    """A number in a text, where `{count:layout is|layouts are}` becomes the words that agree with it."""

    def __format__(self, words: str) -> str:
        one, is_choice, several = words.partition("|")
        if not is_choice:
            return super().__format__(words)
        return one if self == 1 else several


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
    """Sentence if all pass, with `{count}`, a `Count`."""
    disagreement: str
    """Sentence if some fail, with `{failed}` and `{count}`."""
    headline: str
    """Sentence of the page if all pass, without full stop, with `{count}`."""
    caption: str
    length: str
    """Sentence about the length of the runs, with `{steps}`, a `Count`."""
    compared: str
    curves: str
    tensors: str
    everything: str
    """Diagnosis if one process also fails."""
    tolerances: str = (
        "A layout adds the same numbers in another order, so its results differ from the exact ones by rounding. Each "
        "tolerance bounds that rounding by the precision and the number of summands; none is tuned. A larger deviation "
        "is a fault."
    )
    """Sentences about the tolerances."""
    changed: str = "Changed to make it small"
    """Heading of the changes of the configuration."""
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
    "log_prob": "log-probabilities",
    "loss": "losses",
    "gradient": "gradients",
    "grad_norm": "their norm",
}


def _read_text(verb: str) -> ReportText:
    values = _TEXTS[verb]
    columns = {heading: tuple(kinds) for heading, kinds in values["columns"].items()}
    return ReportText(**{**values, "verb": verb, "columns": columns, "maps": tuple(values["maps"])})


_TEXTS = tomllib.loads(Path(__file__).with_name("texts.toml").read_text(encoding="utf-8"))
PARITY, RESUME, PREEMPT, HF, BACKEND, MACHINE = map(
    _read_text, ("parity", "resume", "preempt", "hf", "backend", "machine")
)
