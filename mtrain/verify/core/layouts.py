"""Layouts to compare: derived from the user's, or named on the command line."""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from pydantic import ValidationError

from mtrain.arch.layout import GIVEN_DEGREES, Layout
from mtrain.base.errors import ConfigError
from mtrain.base.spelling import counted
from mtrain.config import Config
from mtrain.config.known_issues import context_kinds
from mtrain.config.messages import readable
from mtrain.config.schema.layout import CpComm, LayoutSection

MAX_STAGES = 8
"""Largest number of (virtual) pipeline stages of a derived layout; each needs a layer."""

_AXES_OF_CP: dict[CpComm, dict[str, str]] = {"allgather": {}, "ulysses": {"cp_comm": "ulysses"}, "ring": {"ring": "on"}}
_DEGREES = ("tp", "pp", "vpp", "cp", "dp", "ep", "etp")
_TOKEN = re.compile(
    r"(?P<axis>vpp|etp|tp|pp|cp|dp|ep|mbs)(?P<number>\d+)|(?P<option>sp|ulysses|allgather|ring|weights)|\[(?P<stages>[\d+]+)\]|-"
)


@dataclass(frozen=True)
class Trial(Layout):
    """Layout to try on a model of any size."""

    micro_batch_size: int | None = 1
    """Samples per microbatch; None: a data-parallel rank's whole part of the global batch."""
    stage_shares: tuple[int, ...] | None = None
    """Relative numbers of layers of the (virtual) stages; None: equal numbers."""

    @property
    def batch_divisor(self) -> int:
        """Returns the number by which the global batch size must be divisible."""
        size = 1 if self.micro_batch_size is None else self.micro_batch_size
        return self.dp * size * (self.pp if self.vpp > 1 else 1)


@dataclass(frozen=True)
class Prepared:
    """Named trial that fits a model."""

    name: str
    axes: dict[str, str]
    config: Config
    layout: Layout


def _with_expert_ranks(trial: Trial) -> Trial:
    """Raises data parallelism until the expert ranks fit."""
    expert_ranks = trial.ep * trial.etp
    return replace(trial, dp=math.lcm(trial.dp, expert_ranks // math.gcd(expert_ranks, trial.tp * trial.cp)))


def _pipelines(section: LayoutSection, pp: int) -> Iterator[Trial]:
    yield Trial(pp=pp, micro_batch_size=2)
    shares = _user_shares(section)
    if shares is not None and pp == section.pp:
        yield Trial(pp=pp, vpp=section.vpp, micro_batch_size=2, stage_shares=shares)
    elif section.vpp > 1:
        pp = _divisor_below(pp, MAX_STAGES // 2)
        yield Trial(pp=pp, vpp=max(2, _divisor_below(section.vpp, MAX_STAGES // pp)), micro_batch_size=2)


def _user_shares(section: LayoutSection) -> tuple[int, ...] | None:
    """Returns the user's uneven stages as shares; None if even. An end whose layers are set counts 1, others 2."""
    num_stages = section.pp * section.vpp
    if num_stages > MAX_STAGES:
        return None
    if section.stage_layers is not None:
        return section.stage_layers if len(set(section.stage_layers)) > 1 else None
    if section.first_stage_layers is None and section.last_stage_layers is None:
        return None
    first, last = (1 if end is not None else 2 for end in (section.first_stage_layers, section.last_stage_layers))
    return (first, *[2] * (num_stages - 2), last) if num_stages > 2 or first != last else None


def _combined(trials: Sequence[Trial], max_ranks: int) -> Trial:
    joint = Trial(micro_batch_size=2)
    for trial in trials:
        changed = {name: value for name, value in vars(trial).items() if value != getattr(Trial(), name)}
        changed = {name: value for name, value in changed.items() if name not in ("micro_batch_size", "dp")}
        joint = replace(joint, **changed)
    return _limited(_with_expert_ranks(joint), max_ranks)


def _limited(trial: Trial, max_ranks: int) -> Trial:
    """Reduces the largest degree, never to 1, until the trial fits or no degree can shrink."""
    while trial.world_size > max_ranks:
        axis = max(("tp", "pp", "cp", "ep"), key=lambda name: getattr(trial, name))
        degree = getattr(trial, axis)
        if degree == 1:  # only expert tensor parallelism is left, which needs its ranks
            return trial
        smaller = _divisor_below(degree, degree - 1)
        if smaller == 1:
            return trial
        changes: dict[str, Any] = {axis: smaller, "dp": 1}
        if axis == "pp":
            changes["stage_shares"] = None
        trial = _with_expert_ranks(replace(trial, **changes))
    return trial


def _divisor_below(degree: int, limit: int) -> int:
    """Returns the largest divisor of `degree` up to `limit`."""
    return next(divisor for divisor in range(min(degree, limit), 0, -1) if degree % divisor == 0)


@dataclass(frozen=True)
class DerivedTrials:
    """Layouts derived from the user's."""

    config: Config
    max_ranks: int

    def derived(self) -> list[Trial]:
        """Returns the default layouts.

        Covers every degree above 1 of the user's layout, alone and combined, over micro-batch sizes and data
        parallelism, on at most `max_ranks` ranks; larger degrees are reduced to a divisor that fits.
        """
        max_ranks, parts = self.max_ranks, self._parts()
        trials = [Trial(micro_batch_size=None), Trial(micro_batch_size=1), Trial(micro_batch_size=4)]
        trials += [Trial(dp=2, micro_batch_size=None), Trial(dp=4, micro_batch_size=2)]
        for variants in parts.values():
            trials += variants
        fullest = {axis: variants[-1] for axis, variants in parts.items()}
        for count in range(2, len(fullest) + 1):
            trials += [_combined(group, max_ranks) for group in combinations(fullest.values(), count)]
        richest = list(fullest.values())
        if len(richest) > 1:
            richest.append(_combined(richest, max_ranks))
        smaller = [_limited(trial, max_ranks // 2) for trial in richest]
        trials += [replace(trial, dp=2 * trial.dp, micro_batch_size=2) for trial in smaller]
        return list(dict.fromkeys(trial for trial in trials if trial.world_size <= max_ranks))

    def full(self) -> Trial:
        """Returns the user's layout with all axes, on two data-parallel ranks if they fit."""
        max_ranks = self.max_ranks
        fullest = tuple(variants[-1] for variants in self._parts().values())
        joint = _combined(fullest, max_ranks)
        while joint.world_size > max_ranks:
            fullest = fullest[:-1]
            joint = _combined(fullest, max_ranks)
        return replace(joint, dp=2 * joint.dp) if 2 * joint.world_size <= max_ranks else joint

    def for_resume(self) -> list[Trial]:
        """Returns layouts to resume on: one process, each axis alone, tensor parallelism, data parallelism."""
        has_routers = self.config.model.experts is not None
        alone = {"tp": Trial(tp=2, sp=has_routers, micro_batch_size=2)}
        alone |= {axis: variants[-1] for axis, variants in self._parts().items()}
        trials = [Trial(micro_batch_size=None), *alone.values(), Trial(dp=4, micro_batch_size=1)]
        return [trial for trial in dict.fromkeys(trials) if trial.world_size <= self.max_ranks]

    def _parts(self) -> dict[str, list[Trial]]:
        """Returns, for each axis of the user's layout, trials with that axis alone, the fullest last."""
        config, section, max_ranks = self.config, self.config.layout, self.max_ranks
        tp, pp, cp = (_divisor_below(degree, max_ranks) for degree in (section.tp, section.pp, section.cp))
        parts: dict[str, list[Trial]] = {}
        if tp > 1:
            kinds_of_tp = [False] if config.model.experts is None else []  # routers need sp with tp
            parts["tp"] = [Trial(tp=tp, sp=sp, micro_batch_size=None) for sp in [*kinds_of_tp, *[True] * section.sp]]
        if pp > 1:
            parts["pp"] = list(_pipelines(section, _divisor_below(pp, MAX_STAGES)))
        if cp > 1:
            # the user's kind last
            kinds = sorted(context_kinds(config.model, config.data), key=lambda kind: kind == section.cp_comm)
            parts["cp"] = [Trial(cp=cp, cp_comm=kind, micro_batch_size=None) for kind in kinds]
        if section.ep > 1:
            ep = _divisor_below(section.ep, min(4, max_ranks))
            parts["ep"] = [_with_expert_ranks(Trial(ep=ep, micro_batch_size=None))]
        if section.etp > 1:
            etp = _divisor_below(section.etp, max_ranks)
            parts["etp"] = [_with_expert_ranks(Trial(etp=etp, micro_batch_size=None))]
        if section.shard == "weights":
            parts["shard"] = [Trial(dp=2, shard="weights", micro_batch_size=2)]
        return parts


def parse_trials(text: str, layout: LayoutSection, max_ranks: int) -> list[Trial]:
    """Parses `tp2cp2,pp4,...`: names as in reports (`tp2sp-pp2vpp2-cp2ulysses-dp1-mbs4`) or parts of them.

    Sizes not named are 1, including the microbatch; cp_comm defaults to the user's. The ConfigError has a line for each
    name that is invalid or needs more than `max_ranks` ranks.
    """
    trials, faults = [], []
    for name in filter(None, (part.strip() for part in text.split(","))):
        try:
            trials.append(_parsed(name, layout, max_ranks))
        except ConfigError as fault:
            faults.append(str(fault))
    if not trials and not faults:
        faults.append("--layouts names no layout; write for instance --layouts tp2,cp2,pp2dp2")
    if faults:
        raise ConfigError("\n".join(faults))
    return list(dict.fromkeys(trials))


def _parsed(name: str, layout: LayoutSection, max_ranks: int) -> Trial:
    fields = _fields(name)
    if "cp_comm" not in fields:
        fields["cp_comm"] = layout.cp_comm if fields.get("cp", 1) > 1 else "allgather"
    trial = Trial(**fields)
    if any(fields.get(name, 1) < 1 for name in (*_DEGREES, "micro_batch_size")):
        raise ConfigError(f"--layouts {name}: a degree is 0, but each must be at least 1; fix the name")
    if trial.world_size > max_ranks:
        raise ConfigError(
            f"--layouts {name} needs {counted(trial.world_size, 'rank')}, but --max-ranks is {max_ranks}; raise it or "
            "use smaller degrees"
        )
    _section(trial, trial.stage_shares, f"--layouts {name}")
    return trial


def _fields(name: str) -> dict[str, Any]:
    """Parses the fields of a name; raises ConfigError for an unknown part, a repeated field, or none."""
    fields: dict[str, Any] = {}
    position = 0
    while position < len(name):
        match = _TOKEN.match(name, position)
        if match is None:
            raise ConfigError(
                f"--layouts {name}: {name[position:]!r} is not known; a layout is made of tp2, sp, pp2, vpp2, [1+2], "
                "cp2, ulysses, allgather, ring, dp2, weights, ep2, etp2 and mbs2"
            )
        position = match.end()
        key, value = _meaning(match)
        if key in fields and key:
            raise ConfigError(f"--layouts {name}: {key} is given twice; keep one")
        fields[key] = value
    fields.pop("", None)
    if not fields:
        raise ConfigError(f"--layouts {name}: no degree is named; write for instance tp2cp2")
    return fields


def _meaning(match: re.Match[str]) -> tuple[str, Any]:
    """Returns a field and its value; an empty name for a dash."""
    if match["axis"]:
        return {"mbs": "micro_batch_size"}.get(match["axis"], match["axis"]), int(match["number"])
    if match["stages"]:
        return "stage_shares", tuple(int(count) for count in match["stages"].split("+") if count)
    match option := match["option"] or "":
        case "sp":
            return "sp", True
        case "weights":
            return "shard", "weights"
    return "cp_comm" if option else "", option


def prepared(trial: Trial, shrunk: Config) -> Prepared:
    """Returns the trial on the shrunk model.

    Raises:
        ConfigError: The model or the batch cannot be divided this way.
    """
    batch = shrunk.train.global_batch_size
    size = batch // trial.dp if trial.micro_batch_size is None else trial.micro_batch_size
    if shrunk.train.tokens_per_micro_batch is not None:
        size = 1  # the width of a row sets the tokens of a forward pass
    layers = shared_layers(shrunk.model.num_layers, trial.stage_shares)
    section = _section(trial, layers, "layout")
    content = shrunk.model_dump() | {"layout": section.model_dump()}
    content["train"]["micro_batch_size"] = size
    try:
        config = Config.model_validate(content)
        layout = Layout.from_config(config, trial.world_size)
    except (ValidationError, ConfigError) as fault:
        reason = str(fault) if isinstance(fault, ConfigError) else "\n".join(_lines(fault))
        raise ConfigError(f"the layout {_short(trial)} does not fit the model: {reason}") from None
    return Prepared(f"{layout}-mbs{size}", _axes(layout, batch // (layout.dp * size)), config, layout)


def fitting(trials: Iterable[Trial], shrunk: Config, are_named: bool) -> list[Prepared]:
    """Returns the trials on the shrunk model, without those that do not fit unless the user named them."""
    layouts = []
    for trial in trials:
        try:
            layouts.append(prepared(trial, shrunk))
        except ConfigError:  # derived, such as another cp_comm, and not named by the user
            if are_named:
                raise
    return layouts


def layout_of_config(config: Config, max_ranks: int) -> Prepared:
    """Returns the configuration's layout unchanged, on the fewest ranks that it can use, up to `max_ranks`."""
    fault: ConfigError | None = None
    for num_ranks in range(1, max_ranks + 1):
        try:
            layout = Layout.from_config(config, num_ranks)
        except ConfigError as refused:
            fault = refused
            continue
        size = config.train.micro_batch_size
        num_microbatches = layout.num_microbatches(config.train.global_batch_size, size)
        return Prepared(f"{layout}-mbs{size}", _axes(layout, num_microbatches), config, layout)
    raise ConfigError(
        f"the layout needs more than {counted(max_ranks, 'rank')} ({fault}); raise --max-ranks or name smaller ones "
        "with --layouts"
    )


def _section(trial: Trial, layers: tuple[int, ...] | None, prefix: str) -> LayoutSection:
    try:
        return LayoutSection(**{name: getattr(trial, name) for name in GIVEN_DEGREES}, stage_layers=layers)
    except ValidationError as error:
        raise ConfigError("\n".join(f"{prefix}: {line}" for line in _lines(error))) from None


def _lines(error: ValidationError) -> list[str]:
    return [line for detail in error.errors(include_url=False) for line in readable(detail)]


def _short(trial: Trial) -> str:
    names = [f"{axis}{getattr(trial, axis)}" for axis in _DEGREES if getattr(trial, axis) > 1]
    return "".join(names) or "of one process"


def _axes(layout: Layout, num_microbatches: int) -> dict[str, str]:
    used = {axis: str(getattr(layout, axis)) for axis in _DEGREES if getattr(layout, axis) > 1}
    if layout.sp:
        used["sp"] = "on"
    if layout.shard == "weights":
        used["shard"] = "weights"
    if layout.stage_layers is not None:
        used["stage_layers"] = "+".join(map(str, layout.stage_layers))
    if layout.cp > 1:
        used |= _AXES_OF_CP[layout.cp_comm]
    if num_microbatches > 1:
        used["microbatches"] = str(num_microbatches)
    return used


def shared_layers(num_layers: int, shares: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Distributes layers over stages in these shares, at least one each, unevenly if possible."""
    if shares is None:
        return None
    spare, total = num_layers - len(shares), sum(shares)
    assert spare >= 0, "the shrunk model has a layer for every stage"
    layers = [1 + spare * share // total for share in shares]
    largest_rest = sorted(range(len(shares)), key=lambda stage: -(spare * shares[stage] % total))
    for stage in largest_rest[: num_layers - sum(layers)]:
        layers[stage] += 1
    if len(set(layers)) == 1 and layers[0] > 1:
        layers[shares.index(min(shares))] -= 1
        layers[shares.index(max(shares))] += 1
    return tuple(layers)
