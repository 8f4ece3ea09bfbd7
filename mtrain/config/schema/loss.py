"""`loss.*`: the objective, and its denominators."""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, Field, model_validator

from mtrain.config.schema import bounds
from mtrain.config.schema.section import Section

MAIN_TERM = "main"
"""Name of the term that `loss.function` computes; its mean is the logged loss. Side terms have their own names."""

Aggregation = Literal[
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
    "token-sum-norm",
    "seq-mean-token-sqrt",
    "seq-mean-token-power",
    "sum",
]

NORM_AGGREGATIONS = ("seq-mean-token-sum-norm", "token-sum-norm")
"""Aggregations that divide by a constant length."""

_LEGAL_OPTIONS = {
    "label_smoothing": "a number from 0 to below 1",
    "temperature": "a number above 0",
    "direction": "forward or reverse",
    "k": "a whole number above 0",
    "remainder": "bucket or drop",
    "clip_low": "a number from 0 to 1",
    "clip_high": "a number of at least 0",
    "dual_clip": "a number above 1, or null",
    "rollout_cap": "a number above 0, or null",
    "rollout_floor": "a number above 0, or null",
    "rollout_correction": "token-truncate, token-mask, sequence-truncate, sequence-mask or sequence-mean-mask",
    "old_logprobs": "true or false",
    "estimator": "k1, k2 or k3",
    "beta": "a number above 0",
    "gamma": "a number of at least 0",
    "nll_coefficient": "a number of at least 0",
    "desirable_weight": "a number of at least 0",
    "undesirable_weight": "a number of at least 0",
    "kl": "true or false",
    "center_rewards_coefficient": "a number of at least 0",
}
"""Option of this package's loss functions -> its legal values; other functions check their own options."""
_IS_LEGAL: dict[str, Callable[[Any], bool]] = {
    "a number from 0 to below 1": lambda value: _is_number(value) and 0 <= value < 1,
    "a number from 0 to 1": lambda value: value is None or (_is_number(value) and 0 <= value <= 1),
    "a number above 0": lambda value: _is_number(value) and 0 < value < math.inf,
    "a number above 0, or null": lambda value: value is None or (_is_number(value) and 0 < value < math.inf),
    "a number above 1, or null": lambda value: value is None or (_is_number(value) and 1 < value < math.inf),
    "a number of at least 0": lambda value: _is_number(value) and 0 <= value < math.inf,
    "a whole number above 0": lambda value: _is_number(value) and isinstance(value, int) and value > 0,
    "true or false": lambda value: isinstance(value, bool),
}


def _is_legal(value: object, needed: str) -> bool:
    """Says whether a value matches a description: a key of _IS_LEGAL, or a list of names."""
    return _IS_LEGAL[needed](value) if needed in _IS_LEGAL else value in re.split(", | or ", needed)


class PreferenceForm(NamedTuple):
    """Properties of a preference loss that a configuration needs."""

    path: str
    """Function as `package.module:name`."""
    compares: Literal["pairs", "answers"]
    """pairs: a chosen and a rejected answer. answers: answers that are judged separately, wanted or not."""
    aggregation: Aggregation
    """Default aggregation, which turns the log-probabilities of an answer's tokens into its score."""


PREFERENCE_LOSSES = {
    "dpo": PreferenceForm("mtrain.core.loss.preference.losses:dpo_loss", "pairs", "seq-mean-token-sum"),
    "ipo": PreferenceForm("mtrain.core.loss.preference.losses:ipo_loss", "pairs", "seq-mean-token-mean"),
    "kto": PreferenceForm("mtrain.core.loss.preference.losses:kto_loss", "answers", "seq-mean-token-sum"),
    "orpo": PreferenceForm("mtrain.core.loss.preference.losses:orpo_loss", "pairs", "seq-mean-token-mean"),
    "simpo": PreferenceForm("mtrain.core.loss.preference.losses:simpo_loss", "pairs", "seq-mean-token-mean"),
    "reward_model": PreferenceForm(
        "mtrain.core.loss.preference.losses:reward_model_loss", "pairs", "seq-mean-token-sum"
    ),
}
"""Preference loss in the configuration -> its properties."""
SCORE_AGGREGATIONS: tuple[Aggregation, ...] = ("seq-mean-token-sum", "seq-mean-token-mean")
"""Aggregations of preference losses: a mean over groups, whose scores are sums or means over tokens."""

LOSS_FUNCTIONS = {
    "next_token": "mtrain.core.loss.functions.likelihood:next_token_loss",
    "z_loss": "mtrain.core.loss.functions.likelihood:z_loss",
    "entropy": "mtrain.core.loss.functions.likelihood:entropy_loss",
    "distillation": "mtrain.core.loss.functions.divergence:distillation_loss",
    "topk_distillation": "mtrain.core.loss.functions.divergence:top_k_distillation_loss",
    "ppo": "mtrain.core.loss.functions.policy:ppo_loss",
    "gspo": "mtrain.core.loss.functions.policy:gspo_loss",
    "cispo": "mtrain.core.loss.functions.policy:cispo_loss",
    "kl": "mtrain.core.loss.functions.divergence:kl_loss",
    "dft": "mtrain.core.loss.functions.likelihood:dft_loss",
    "classification": "mtrain.core.loss.functions.heads:classification_loss",
    "regression": "mtrain.core.loss.functions.heads:regression_loss",
    **{name: form.path for name, form in PREFERENCE_LOSSES.items()},
}
"""Loss function in the configuration -> `package.module:name` in this package. Runs store the short name, so a function
may move to another module."""

REFERENCE_LOSSES = frozenset({"dpo", "ipo", "kto"})
"""Loss functions that compare the model with a reference model."""
HEAD_LOSSES = frozenset({"reward_model", "classification", "regression"})
"""Loss functions that judge sequences by a head (`model.num_labels`); all others predict tokens."""
CONSUMING_LOSSES = frozenset({"next_token", "dft"})
"""Loss functions that read logits by a single cross entropy, whose gradient may overwrite them."""
NUMBER_LOSSES = frozenset({"regression"})
"""Loss functions of a head with real-valued labels, which travel as the extra LABEL."""
LABEL = "label"

_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def depth_term(depth: int) -> str:
    """Returns the name of an MTP depth's term, counted from 1."""
    return f"mtp_{depth}"


def wrong_options(options: Mapping[str, Any]) -> list[str]:
    """Returns a message for each illegal option of this package's loss functions."""
    wrong = [
        f"options.{name}={value!r} must be {_LEGAL_OPTIONS[name]}; fix it"
        for name, value in options.items()
        if name in _LEGAL_OPTIONS and not _is_legal(value, _LEGAL_OPTIONS[name])
    ]
    cap, floor = options.get("rollout_cap"), options.get("rollout_floor")
    if "rollout_correction" in options and cap is None and floor is None:
        wrong.append("options.rollout_correction needs a bound; set options.rollout_cap or options.rollout_floor")
    elif not wrong and cap is not None and floor is not None and floor > cap:
        wrong.append(f"options.rollout_floor={floor} is above options.rollout_cap={cap}; lower it")
    return wrong


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_chunk_tokens(value: object) -> object:
    """Refuses wrong words and numbers with one message; true would otherwise pass as 1."""
    if value in ("auto", "whole") or (_is_number(value) and isinstance(value, int) and value > 0):
        return value
    shown = bounds.shown(value) if isinstance(value, int) else repr(value)
    raise ValueError(f"auto, whole or a number of tokens above 0 is needed, but {shown} was given")


ChunkTokens = Annotated[Literal["auto", "whole"] | int, BeforeValidator(_check_chunk_tokens)]


class TermSection(Section):
    """One term of the objective: coefficient x numerator / denominator."""

    function: str = "next_token"
    """Function that computes the term: one of LOSS_FUNCTIONS, or `package.module:name` of your own function
    (TermInputs, **options) -> LossPair."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the function, by name."""
    aggregation: Aggregation = "token-mean"
    """How tokens and sequences are weighted in the term, and its denominator (docs/explanation/objective.md)."""
    norm_length: int | None = Field(None, gt=0)
    """Constant L of the -norm aggregations, in tokens; null with any other aggregation."""
    length_power: float | None = Field(None, gt=0, lt=1)
    """Constant p of seq-mean-token-power: near 0 it is token-mean, near 1 seq-mean-token-mean; null with any other
    aggregation."""
    empty_sequences: Literal["exclude", "include"] = "exclude"
    """Whether a sequence without loss tokens counts in the denominator of the seq-mean aggregations."""

    @model_validator(mode="before")
    @classmethod
    def set_preference_aggregation(cls, content: Any) -> Any:
        """Sets the default aggregation of a preference loss, from its paper."""
        if not isinstance(content, Mapping) or content.get("aggregation") is not None:
            return content
        function = content.get("function")
        form = PREFERENCE_LOSSES.get(function) if isinstance(function, str) else None
        return content if form is None else {**content, "aggregation": form.aggregation}

    def broken_rules(self) -> Iterator[str]:
        is_ours = self.function.startswith("mtrain.")
        if self.function in LOSS_FUNCTIONS:
            yield from wrong_options(self.options)
        elif is_ours or not _FUNCTION.fullmatch(self.function):
            yield (
                f"function={self.function!r} is not known; choose {', '.join(LOSS_FUNCTIONS)}, or name your own "
                "function as package.module:name"
            )
        divides = self.aggregation in NORM_AGGREGATIONS
        if divides and self.norm_length is None:
            yield f"norm_length is not given, but aggregation={self.aggregation} divides by it; set it, in tokens"
        elif not divides and self.norm_length is not None:
            yield (
                f"norm_length={self.norm_length} is not used by aggregation={self.aggregation}; remove it, or choose "
                f"{' or '.join(NORM_AGGREGATIONS)}"
            )
        has_power = self.aggregation == "seq-mean-token-power"
        if has_power and self.length_power is None:
            yield (
                "length_power is not given, but aggregation=seq-mean-token-power divides by the length to that power; "
                "set it, between 0 and 1"
            )
        elif not has_power and self.length_power is not None:
            yield (
                f"length_power={self.length_power} is not used by aggregation={self.aggregation}; remove it, or choose "
                "seq-mean-token-power"
            )


class SideTermSection(TermSection):
    """A term in addition to the main one."""

    coefficient: float = 1.0
    """Factor of the term in the objective."""


class TeacherSection(Section):
    """A frozen model whose distribution the distillation terms compare with.

    It only runs forward passes, on the microbatches of the step, under the same layout and in the same precision. Its
    run folder, or the model.yaml of an import, describes it; its vocabulary must equal the trained model's. An uneven
    split of layers (layout.stage_layers and the like) needs a teacher with as many layers as the trained model. With
    model.vision it reads the images through its own tower, of the same kind and the same patches.

    Without a pipeline it sees each microbatch just before the model does, and nothing is stored. With layout.pp > 1 it
    runs through the pipeline before the model, and the last stage stores its hidden states for all microbatches of the
    step: num_microbatches x micro_batch_size x seq_length / cp x (teacher's hidden_size) numbers in the run's
    precision, divided by tp with layout.sp. Fewer microbatches per step (more data parallelism) need less memory.
    """

    checkpoint: Annotated[str, bounds.PATH] = Field(min_length=1)
    """Path of a run folder (its newest checkpoint), a checkpoint directory inside one, or an import from Hugging
    Face."""


class RouterLossSection(Section):
    """Losses on the routers of a model with experts, summed over its layers; 0 turns one off.

    Padding never counts, and the loss mask has no effect.
    """

    z_coefficient: float = Field(0.0, ge=0)
    """Coefficient of the mean over all tokens of the squared log-sum-exp of a router's logits."""
    sequence_balance_coefficient: float = Field(0.0, ge=0)
    """Coefficient of the mean over sequences of the balancing loss of each sequence."""
    microbatch_balance_coefficient: float = Field(0.0, ge=0)
    """Coefficient of the balancing loss of each microbatch. It depends on the layout by definition, so it needs
    loss.allow_layout_dependent."""
    global_balance_coefficient: float = Field(0.0, ge=0)
    """Coefficient of the balancing loss on running counts. It depends on the layout by definition, so it needs
    loss.allow_layout_dependent."""

    @property
    def coefficients(self) -> dict[str, float]:
        """Returns the coefficients above 0 by the name of the term (`router_z` and so on)."""
        terms = {f"router_{name.removesuffix('_coefficient')}": value for name, value in self.model_dump().items()}
        return {term: value for term, value in terms.items() if value > 0}


class LossSection(TermSection):
    """The main term, and the side terms by name."""

    denominator: Literal["planned", "measured"] = "planned"
    """Source of the denominators. planned: the masks, before the forward pass; checked against the measured ones.
    measured: the loss function computes the denominator from model outputs; excludes side terms."""
    side_terms: dict[str, SideTermSection] = Field(default_factory=dict)
    """Terms in addition to the main one, by name."""
    teacher: TeacherSection | None = None
    """Teacher of the distillation terms; null: no teacher."""
    reference: Annotated[str | None, bounds.PATH] = Field(None, min_length=1)
    """Reference model of dpo, ipo and kto, with the run's architecture: a Hugging Face folder, an import, a run folder
    or a checkpoint; or an adapter: a PEFT folder on the run's frozen model, or a run of adapters on its own frozen
    model. null: the model that the run starts from, with the adapter of adapter.path. Its scores are computed before
    the first step and stored with the token cache, for all runs with the same reference weights."""
    router: RouterLossSection = RouterLossSection()
    """Losses on the routers of a model with experts."""
    mtp_coefficient: float = Field(0.1, ge=0)
    """Weight of the mean loss over all multi-token prediction (MTP) depths (mtp_loss_scaling_factor). The losses are
    cross entropies, aggregated as the main term, each with its own denominator."""
    chunk_tokens: ChunkTokens = "auto"
    """Largest number of a microbatch's tokens whose logits exist at once; output layer and loss then run together, one
    chunk of tokens at a time, and tokens that no term counts get no logits. A number needs loss functions that look at
    one token at a time (`mtrain.per_token`), as this package's own do. auto: if the functions permit it, chunks of 4096
    tokens on a GPU (fewer, but at least 1024, if those have more than 2^29 logits on a rank); on a CPU, chunks of 2^21
    logits if those are at least 256 tokens, otherwise 1024 tokens; a chunk given in tokens grows to 2^26 logits if it
    has fewer. Smaller microbatches whose tokens all count stay whole. whole: logits of all tokens at once."""
    allow_layout_dependent: bool = False
    """Whether keys with a layout-dependent effect are permitted; all reports of the run then say so."""

    @property
    def preference(self) -> PreferenceForm | None:
        """Properties of the main term's preference loss; None for other losses and for a user's own function."""
        return PREFERENCE_LOSSES.get(self.function)

    def broken_rules(self) -> Iterator[str]:
        yield from super().broken_rules()
        yield from self._broken_rules_of_preferences()
        yield from self._broken_rules_of_side_terms()

    def _broken_rules_of_preferences(self) -> Iterator[str]:
        if self.preference is not None:
            demand = f"cannot be combined with function={self.function}, which is a mean over groups; set"
            if self.aggregation not in SCORE_AGGREGATIONS:
                scores = f"{' or '.join(SCORE_AGGREGATIONS)}: the sum or mean of an answer's tokens is its score"
                yield f"aggregation={self.aggregation} {demand} {scores}"
            if self.empty_sequences != "exclude":
                reason = "a group with an empty answer has no information"
                yield f"empty_sequences={self.empty_sequences} {demand} exclude: {reason}"
            if self.denominator != "planned":
                yield f"denominator={self.denominator} {demand} planned: it is the sum of the groups' weights"
        if self.reference is not None and self.function in LOSS_FUNCTIONS and self.function not in REFERENCE_LOSSES:
            yield (
                f"reference={self.reference} is not used by function={self.function}; remove it, or choose "
                f"{' or '.join(sorted(REFERENCE_LOSSES))}"
            )
        wrong = next((name for name, term in self.side_terms.items() if term.function in PREFERENCE_LOSSES), None)
        if wrong is not None:
            yield (
                f"side_terms.{wrong}.function={self.side_terms[wrong].function} compares groups of sequences, which "
                "only the main term can do; make it loss.function, and the current one a side term"
            )

    def _broken_rules_of_side_terms(self) -> Iterator[str]:
        sides = [*self.side_terms, *self.router.coefficients]
        if self.denominator == "measured" and sides:
            yield (
                "denominator=measured is known only after the forward pass, but side terms are scaled before the "
                f"backward pass ({', '.join(sides)}); set it to planned, or remove the side terms"
            )
        router_names = [name for name in self.side_terms if name.startswith("router_")]
        if MAIN_TERM in self.side_terms:
            yield "side_terms.main has the name of the main term; choose another name"
        elif router_names:
            yield f"side_terms.{router_names[0]} has a name reserved for router losses; choose another name"
        if depth_names := [name for name in self.side_terms if re.fullmatch(r"mtp_\d+", name)]:
            yield f"side_terms.{depth_names[0]} has a name reserved for multi-token prediction; choose another name"


def own_functions(section: LossSection) -> list[str]:
    """Returns the names of the user's own loss functions."""
    terms = [section, *section.side_terms.values()]
    return list(dict.fromkeys(term.function for term in terms if term.function not in LOSS_FUNCTIONS))
