"""Small configuration with the structure of the user's, where everything that a layout could break is kept.

Kept: query heads per key/value head, norms, biases, activation, rotary scaling, ties, window, recompute, distributed
optimizer and overlaps, aggregation and side terms, documents, momenta and decay of the optimizer. Reduced: layers (at
least one per pipeline stage), sizes, sequence, batch. Moved to where they act: bounds and constants that the small
model would not reach (`reach`). Precision is float32, where rounding cannot hide a fault.
"""

import glob
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, assert_never

from mtrain.arch import padded_vocab_size
from mtrain.arch.activations import tokens_at_once
from mtrain.arch.features import FEATURES, SmallRun
from mtrain.arch.features.feature import SMALL_HEAD_DIM, multiple_from
from mtrain.base.errors import ConfigError
from mtrain.base.spelling import counted
from mtrain.config import Config
from mtrain.config.derived import layout_dependent_keys
from mtrain.config.extras import ROUTED_EXPERTS
from mtrain.config.schema.adapter import AdapterSection
from mtrain.config.schema.data import AnyData, FilesSection, IndexedSection, MockSection, SftSection, SourceSection
from mtrain.config.schema.model import ModelSection
from mtrain.config.schema.sections import Sections
from mtrain.config.schema.train import Compiled, OptimizerSection
from mtrain.config.schema.vision import VisionSection
from mtrain.verify.core.layouts import Trial
from mtrain.verify.core.reach import epsilon_factor, loss_keys, model_keys, optimizer_keys, section_keys

VOCAB_SIZE = 97
"""Vocabulary size of random tokens: prime, so that every layout pads the table."""
FOLDED_VOCAB_SIZE = 997
"""Modulus of the user's token ids if there are too many: larger tables would take minutes."""
SEQ_LENGTH = 32
BATCH_SIZE = 16
FEW_SAMPLES = 4
"""Samples per step in checks that stop and resume; `verify parity` checks sums over microbatches."""
CHUNK_TOKENS = 20
"""Tokens per chunk that split even the smallest microbatch unevenly."""
_MAX_VOCAB = 16384
"""Largest vocabulary kept for the user's data."""
_MIN_HIDDEN = 32
_MAX_HEADS_PER_GROUP = 8
_MAX_RANK = 3
"""Largest rank of adapters: odd, and different from all other sizes."""
_MOST_FEATURES = 6
"""Area of the largest image, in features."""
_MAX_WIDTH = 4
"""Largest width of packed rows, in full samples."""


@dataclass(frozen=True)
class Shrunk:
    """Small one-process configuration, with its changes."""

    config: Config
    changes: tuple[str, ...]
    """Changes as lines, such as `model.hidden_size: 4096 -> 64`."""
    reads_files: bool
    """Whether samples come from the user's files; if not, tokens are random."""


def shrink(
    config: Config, trials: Sequence[Trial], seq_length: int = SEQ_LENGTH, batch_size: int = BATCH_SIZE
) -> Shrunk:
    """Returns a small configuration on which the trials are comparable, and possible if the user's structure allows it.

    `seq_length` and `batch_size` (samples of a step) are raised to multiples that the trials need.
    """
    refuse_incomparable(config)
    overrides = in_float32(config.model)
    if config.data.packing is not None:
        # the reference knows the samples of a step only if a step counts samples, not rows
        overrides["data"] = {"packing": {"batch": "sequences"}}
    overrides |= {"optimizer": optimizer_keys(config.optimizer), "loss": loss_keys(config.loss)}
    return small(config, trials, seq_length, overrides, batch_size)


def in_float32(model: ModelSection) -> dict[str, dict[str, Any]]:
    """Returns the changes, by section and key, for float32, which TransformerEngine's layers do not compute."""
    changed: dict[str, dict[str, Any]] = {"train": {"precision": "fp32", "fp8": None, "fp8_recipe": None}}
    if model.backend == "te":
        changed["model"] = {"backend": "auto"}
    if model.experts is not None and model.has_transformer_engine_experts:
        experts = model.experts.model_copy(update={"implementation": "auto"})
        changed["model"] = {**changed.get("model", {}), "experts": experts.model_dump()}
    return changed


def small(
    config: Config,
    trials: Sequence[Trial],
    seq_length: int,
    overrides: Mapping[str, Mapping[str, Any]],
    batch_size: int = BATCH_SIZE,
    reads_images: bool = False,
) -> Shrunk:
    """Returns the small configuration with the user's precision, dropout and schedule; see `shrink`.

    `overrides` are further changes, by section and key. With `reads_images` a small tower has the user's patches, and
    reads the user's images; otherwise the samples of a model with a tower are random.
    """
    vision = config.model.vision
    reads = reads_files(config.data) and (vision is None or reads_images)
    length = multiple_from(seq_length, [2 * trial.cp * (trial.tp if trial.sp else 1) for trial in trials])
    batch = multiple_from(batch_size, [trial.batch_divisor for trial in trials])
    content = config.model_dump()
    content["model"] |= _model(config, trials, length, reads)
    content["adapter"] = None if config.adapter is None else _adapter(config.adapter)
    content["layout"] = {}
    content["train"] |= {"global_batch_size": batch, "micro_batch_size": batch, "compile": _compilation(config)}
    content["train"]["fp8_recipe"] = None  # others need wider sizes than small models have
    if config.train.tokens_per_micro_batch is not None:
        ratio = min(_MAX_WIDTH, config.row_width // config.data.seq_length)
        content["train"] |= {"micro_batch_size": 1, "tokens_per_micro_batch": ratio * length}
    content["data"] = _data(config.data, reads) | {"seq_length": length, "prefetch_steps": 0}
    if reads and vision is not None and isinstance(config.data, SftSection):
        content["model"]["vision"] |= {"patch_size": vision.patch_size}
        content["data"]["images"] |= _small_images(config.data, config.model, vision)
    content["loss"] |= {"chunk_tokens": _chunk_tokens(config)}
    for section in ("valid", "eval", "checkpoint", "metrics"):  # they do not affect a step, and contain paths
        content[section] = {}
    for section, values in overrides.items():
        content[section] |= values
    changed = Config.model_validate(content)
    return Shrunk(changed, tuple(_changes(config, changed)), reads)


def _compilation(config: Sections) -> Compiled:
    """Returns what the run compiles on this machine: a check covers the layers that the run uses. With `auto` on a CPU
    nothing, since every rank would compile longer than a small model runs."""
    if config.train.compile != "auto":
        return config.train.compile
    if config.train.device == "cpu":
        return "none"
    import torch  # here: configurations for a CPU are shrunk without it

    from mtrain.core.layers.compiled import choose_compilation

    return choose_compilation(config, torch.device("cuda"))[0] if torch.cuda.is_available() else "none"


def small_schedule(optimizer: OptimizerSection, warmup_steps: int, final_steps: int) -> dict[str, int | None]:
    """Returns `optimizer.*` keys that fit the user's schedule into a few steps.

    `final_steps` is the length of a decay at the end of the run; other decays last from the warm-up to the end.
    """
    return {"warmup_steps": warmup_steps, "decay_steps": final_steps if optimizer.decay == "at_end" else None}


def has_files(data: AnyData) -> bool:
    """Says whether the training data and tokenizer exist on this machine."""
    if isinstance(data, MockSection) or (data.tokenizer is not None and not Path(data.tokenizer).exists()):
        return False
    return _exist(data, data.all_sources)


def has_valid_files(data: IndexedSection | SftSection) -> bool:
    """Says whether the files of all validation sets exist on this machine."""
    return _exist(data, [source for sources in data.valid_sets.values() for source in sources])


def _exist(data: IndexedSection | SftSection, sources: Sequence[SourceSection]) -> bool:
    match data:
        case IndexedSection():
            return all(Path(f"{source.path}.idx").exists() for source in sources)
        case SftSection():  # a source may be a pattern
            return all(glob.glob(source.path) or Path(source.path).exists() for source in sources)
        case _:
            assert_never(data)


def reads_files(data: AnyData) -> bool:
    """Says whether samples come from the user's files; extras of files are meaningless for the small model."""
    return has_files(data) and not data.extras


def replay_notes(data: AnyData, progress: Callable[[str], None]) -> tuple[str, ...]:
    """Reports that a check does not replay the experts in the user's data, if any; returns the line for its report."""
    if not data.choices:
        return ()
    note = (
        f"data.extras: {ROUTED_EXPERTS} are not replayed in this check, every router chooses; mtrain verify parity "
        "checks a replay"
    )
    progress(note)
    return (note,)


def refuse_incomparable(config: Config) -> None:
    """Refuses a configuration whose runs differ by definition."""
    if keys := config.dropout_keys:
        raise ConfigError(
            f"with {' and '.join(keys)} above 0, every layout and micro-batch size draws other numbers, so no two of "
            f"them can be compared; add {' '.join(f'{key}=0' for key in keys)} to the command"
        )
    keys = layout_dependent_keys(config.model, config.loss)
    if keys:
        raise ConfigError(
            f"{', '.join(keys)} changes with the layout by definition, so that no two layouts can be compared; set it "
            "to its default for the verification"
        )


def _model(config: Config, trials: Sequence[Trial], seq_length: int, reads_files: bool) -> dict[str, Any]:
    model = config.model
    groups, heads = _heads(model, trials)
    tp, ep, etp = (math.lcm(*[getattr(trial, axis) for trial in trials]) for axis in ("tp", "ep", "etp"))
    hidden = max(_MIN_HIDDEN, heads * SMALL_HEAD_DIM)
    is_own_width = model.head_dim is not None and model.head_dim * model.num_attention_heads != model.hidden_size
    needs_head_dim = is_own_width or heads * SMALL_HEAD_DIM != hidden
    width = max(1.0, min(4.0, model.ffn_hidden_size / model.hidden_size))
    num_layers = _num_layers(model, trials)
    head_dim = SMALL_HEAD_DIM if needs_head_dim else None
    small_run = SmallRun(
        tp, ep, etp, config.data.seq_length, seq_length, num_layers, groups, head_dim, epsilon_factor(model)
    )
    return {
        "hf": None,
        "num_layers": num_layers,
        "num_attention_heads": heads,
        "num_query_groups": None,
        "head_dim": None,
        "hidden_size": hidden + 2 * SMALL_HEAD_DIM if is_own_width else hidden,
        "ffn_hidden_size": multiple_from(round(hidden * width), [tp, SMALL_HEAD_DIM]),
        "vocab_size": _vocab_size(model, reads_files),
        "vocab_multiple": model.vocab_multiple if reads_files else min(model.vocab_multiple, 8),
        **model_keys(model),
        **_of_features(model, small_run),
    }


def _adapter(adapter: AdapterSection) -> dict[str, Any]:
    rank = min(adapter.rank, _MAX_RANK)
    scale = adapter.model_copy(update={"rank": rank, "alpha": 1.0}).scale
    small: dict[str, Any] = {"rank": rank, "alpha": adapter.scale / scale, "path": None}
    if adapter.rank_pattern or adapter.alpha_pattern:
        ranks = {part: min(adapter.rank_of(part), _MAX_RANK) for part in sorted(adapter.parts)}
        ones = adapter.model_copy(update={"rank_pattern": ranks, "alpha_pattern": dict.fromkeys(ranks, 1.0)})
        alphas = {part: adapter.scale_of(part) / ones.scale_of(part) for part in ranks}
        small |= {"rank_pattern": ranks, "alpha_pattern": alphas}
    return adapter.model_dump() | small


def _chunk_tokens(config: Config) -> str | int:
    """Returns a small chunk size if the user's run, unlike a small one, would need chunks of logits."""
    layout = config.layout
    tokens = config.train.micro_batch_size * config.row_width // layout.cp
    vocab_local = padded_vocab_size(config.model, layout.tp) // layout.tp
    is_cut = tokens_at_once(config, tokens, vocab_local) < tokens
    return CHUNK_TOKENS if is_cut else config.loss.chunk_tokens


def _of_features(model: ModelSection, small_run: SmallRun) -> dict[str, Any]:
    sections = {key: value for feature in FEATURES for key, value in feature.shrunk(model, small_run).items()}
    size = round(SMALL_HEAD_DIM * sections.get("rope", {"partial": 1.0})["partial"])
    size = sections.get("mla", {}).get("qk_rope_head_dim", size)
    for section, keys in section_keys(model, size).items():
        if keys:
            sections[section] = sections.get(section, getattr(model, section).model_dump()) | keys
    return sections


def _vocab_size(model: ModelSection, reads_files: bool) -> int:
    if not reads_files:
        return min(VOCAB_SIZE, model.vocab_size)
    return model.vocab_size if model.vocab_size <= _MAX_VOCAB else FOLDED_VOCAB_SIZE


def _heads(model: ModelSection, trials: Sequence[Trial]) -> tuple[int, int]:
    """Returns the smallest numbers of key/value and query heads, in the user's ratio, that every trial can split."""
    ratio = model.num_attention_heads // model.query_groups
    while ratio > _MAX_HEADS_PER_GROUP:
        ratio = next(smaller for smaller in range(ratio // 2, 0, -1) if ratio % smaller == 0)
    shared = [trial.tp * trial.cp for trial in trials if trial.cp_comm == "ulysses" and trial.cp > 1]
    if model.query_groups == 1:
        return 1, multiple_from(ratio, shared)
    # TransformerEngine exchanges whole key/value heads; ours are repeated
    whole = shared if model.backend == "te" else []
    groups = multiple_from(2, [*(trial.tp for trial in trials), *whole])
    step = groups
    while any(groups * ratio % divisor for divisor in shared):
        groups += step
    return groups, groups * ratio


def _num_layers(model: ModelSection, trials: Sequence[Trial]) -> int:
    even = [trial.num_stages for trial in trials if trial.stage_shares is None]
    uneven = [2 * trial.num_stages for trial in trials if trial.stage_shares is not None]
    patterns = [feature.num_layers_at_least(model) for feature in FEATURES]
    return multiple_from(max([min(2, model.num_layers), *patterns, *uneven]), even)


def _data(data: AnyData, reads_files: bool) -> dict[str, Any]:
    if not reads_files:
        packing = None if data.packing is None else data.packing.model_dump()
        return {"kind": "mock", "isolate_documents": data.isolate_documents, "packing": packing}
    match data:
        case SftSection():
            return data.model_dump() | _training_only(data) | {"too_long": "end"}
        case IndexedSection():
            return data.model_dump() | _training_only(data)
        case MockSection():
            return data.model_dump()
        case _:
            assert_never(data)


def _small_images(data: SftSection, model: ModelSection, vision: VisionSection) -> dict[str, int]:
    """Returns limits by which an image takes few tokens, if the processor has limits."""
    from mtrain.data.encoding.compared import image_processor  # here: it loads readers, which few copies need

    processor = image_processor(data, model)
    if processor is None or not processor.limits_areas:
        return {}
    feature = (vision.merge_size * vision.patch_size) ** 2
    return {"min_pixels": feature, "max_pixels": _MOST_FEATURES * feature}


def _training_only(data: FilesSection) -> dict[str, Any]:
    """Drops separate held-out sets, and starts the blends of a curriculum one step apart: a check has few steps."""
    near = [blend.model_copy(update={"from_step": number}) for number, blend in enumerate(data.curriculum, start=1)]
    only = {"curriculum": [blend.model_dump() for blend in near]}
    return only | ({"valid": (), "test": ()} if data.split is None else {})


def _changes(before: Sections, after: Sections) -> Iterator[str]:
    old, new = before.model_dump(), after.model_dump()
    for section in ("model", "adapter", "train", "optimizer", "data", "loss"):
        for key, value in (old[section] or {}).items():
            if key in new[section] and new[section][key] != value:  # another kind of data may lack the key
                folded = key == "vocab_size" and after.data.kind != "mock"
                remark = f" (token ids modulo {after.model.vocab_size})" if folded else ""
                yield f"{section}.{key}: {_shown(key, value)} -> {_shown(key, new[section][key])}{remark}"


def _shown(key: str, value: Any) -> str:
    if key == "curriculum" and value:
        return f"blends from step {', '.join(str(blend['from_step'] + 1) for blend in value)}"
    return counted(len(value), "source") if isinstance(value, list | tuple) and value else str(value)
