"""`adapter.*`: low-rank adapters of a frozen model, in the words of PEFT."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar, assert_never

from pydantic import Field, Tag, field_validator

from mtrain.config.schema import bounds
from mtrain.config.schema.section import Section, by_kind

Target = Literal[
    "qkv",
    "q_proj",
    "k_proj",
    "v_proj",
    "qkv_proj",
    "q_a_proj",
    "q_b_proj",
    "kv_a_proj",
    "kv_b_proj",
    "in_proj",
    "in_proj_qkv",
    "in_proj_z",
    "in_proj_b",
    "in_proj_a",
    "in_proj_qkvz",
    "in_proj_ba",
    "in_proj_zxbcdt",
    "proj",
    "out_proj",
    "fc1",
    "gate_proj",
    "up_proj",
    "gate_up_proj",
    "fc2",
    "experts",
    "embedding",
    "output",
]
ALL_LINEAR: Literal["all-linear"] = "all-linear"
"""PEFT's name for every linear layer except the output layer; `Config` replaces it with the model's targets
(`mtrain/config/adapters.py`)."""
LATENT_PARTS: tuple[Target, ...] = ("q_a_proj", "q_b_proj", "kv_a_proj", "kv_b_proj")
"""Projections of latent attention: down to the query latent and the key/value latent, and up from them."""
DELTA_NET_PARTS: tuple[Target, ...] = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
"""Input projections of a delta net: queries, keys and values; output gates; steps; decays."""
JOINED: Mapping[Target, tuple[Target, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Target with one adapter pair for several parts, which some model families store as one projection -> the parts."""
PARTS: tuple[Target, ...] = (
    *("q_proj", "k_proj", "v_proj", *LATENT_PARTS, *DELTA_NET_PARTS, "in_proj_zxbcdt", "proj", "out_proj"),
    *("gate_proj", "up_proj", "fc2", "experts", "embedding", "output", *JOINED),
)
"""Targets with their own pair of matrices. in_proj_zxbcdt is the input projection of Mamba-2; experts has one pair for
each of the two projections of every expert."""
GROUPS: Mapping[str, tuple[str, ...]] = {
    "qkv": ("q_proj", "k_proj", "v_proj", *LATENT_PARTS),
    "in_proj": (*DELTA_NET_PARTS, "in_proj_zxbcdt"),
    "fc1": ("gate_proj", "up_proj"),
    ALL_LINEAR: (
        *("q_proj", "k_proj", "v_proj", *LATENT_PARTS, "proj"),
        *(*DELTA_NET_PARTS, "in_proj_zxbcdt", "out_proj", "gate_proj", "up_proj", "fc2"),
    ),
}
"""Target that names several parts -> the parts; a model may lack some of them."""
SYNONYMS: Mapping[str, Target] = {
    "linear_qkv": "qkv",
    "linear_q_proj": "q_proj",
    "linear_q_down_proj": "q_a_proj",
    "linear_q_up_proj": "q_b_proj",
    "linear_kv_down_proj": "kv_a_proj",
    "kv_a_proj_with_mqa": "kv_a_proj",
    "linear_kv_up_proj": "kv_b_proj",
    "linear_proj": "proj",
    "o_proj": "proj",
    "linear_fc1": "fc1",
    "linear_fc2": "fc2",
    "down_proj": "fc2",
    "embed_tokens": "embedding",
    "lm_head": "output",
    "output_layer": "output",
}
"""Target in PEFT (module names of Llama and DeepSeek) or Megatron-Bridge -> ours."""
Saved = Literal["embedding", "output", "norms", "head"]
SAVED_SYNONYMS: Mapping[str, Saved] = {
    "embed_tokens": "embedding",
    "lm_head": "output",
    "output_layer": "output",
    "norm": "norms",
    "score": "head",
    "classifier": "head",
}
"""Fully trained module in PEFT or Megatron-Bridge -> ours."""
_OF_TOWER = frozenset(("visual", "merger", "deepstack_merger_list", "vision_tower", "multi_modal_projector"))
"""Modules of vision towers in transformers."""


def names_in_tower(names: Iterable[object]) -> list[str]:
    """Returns the names of modules of a vision tower in transformers, or of their tensors, among some names."""
    return [name for name in names if isinstance(name, str) and not _OF_TOWER.isdisjoint(name.split("."))]


Number = TypeVar("Number", int, float)


def _part_value(pattern: Mapping[Any, Number], part: str, default: Number) -> Number:
    """Returns the value of a part; the part's name takes precedence over its group's."""
    if part in pattern:
        return pattern[part]
    groups = (pattern[group] for group, parts in GROUPS.items() if part in parts and group in pattern)
    return next(groups, default)


class AdapterSection(Section):
    """Pairs of matrices A [rank, inputs] and B [outputs, rank] added to frozen matrices: W x + scale B A x."""

    kind: str
    """Kind of the adapter: lora (the default) or dora."""
    rank: Annotated[int, bounds.WIDTH] = Field(8, gt=0)
    """Rows of A and columns of B."""
    alpha: float = Field(16.0, gt=0)
    """Numerator of the scale."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Probability of dropping an input of A; 0: no dropout. Above 0, another layout or micro-batch size draws different
    numbers."""
    scaling: Literal["standard", "rslora"] = "standard"
    """Rule of the scale: alpha / rank, or alpha / sqrt(rank) (rsLoRA, arXiv 2312.03732)."""
    targets: tuple[Literal[Target, "all-linear"], ...] = (ALL_LINEAR,)
    """Modules that get adapters. all-linear, the default: every linear layer of the model except the output layer; may
    be combined with other names, such as experts. docs/training/lora.md says what each name means in PEFT and in
    Megatron-Bridge."""
    rank_pattern: dict[Target, Annotated[int, bounds.WIDTH, Field(gt=0)]] = Field({})
    """Ranks of individual targets in all layers, instead of rank."""
    alpha_pattern: dict[Target, Annotated[float, Field(gt=0)]] = Field({})
    """Alphas of individual targets in all layers, instead of alpha."""

    modules_to_save: tuple[Saved, ...] = ()
    """Modules that are fully trained and saved with the adapters, as in PEFT: embedding (embed_tokens), output
    (lm_head), norms (norm, all norms of the model), head. With model.tied_embeddings, embedding means both tables; the
    head of model.num_labels is always fully trained."""

    base_dtype: Literal["bf16"] | None = None
    """Precision of frozen weights. bf16: frozen projections and tables of a float32 run are stored in bfloat16, which
    halves their memory, and converted for each product; tables in modules_to_save are not. null: train.precision."""

    path: Annotated[str | None, bounds.PATH] = Field(None, min_length=1)
    """Path of a PEFT folder (adapter_config.json and adapter_model.safetensors) whose values the run starts from; null:
    new adapters. Losses with a reference model compare with this adapter as it was at the first start."""

    @field_validator("targets", mode="before")
    @classmethod
    def translate_targets(cls, value: object) -> object:
        """Replaces names of PEFT and Megatron-Bridge with ours; leaves unknown names for validation to refuse."""
        if value == ALL_LINEAR:
            return (ALL_LINEAR,)
        if not isinstance(value, list | tuple):
            return value
        if of_tower := names_in_tower(value):
            raise ValueError(
                f"names {', '.join(of_tower)}, a part of the vision tower, but adapters are on the language model; set "
                "model.vision.freeze_tower=false to train the tower in full, and freeze_projector=false its projector"
            )
        targets = [SYNONYMS.get(name, name) if isinstance(name, str) else name for name in value]
        if all(isinstance(target, str) for target in targets):
            targets = list(dict.fromkeys(targets))
        return tuple(targets)

    @field_validator("modules_to_save", mode="before")
    @classmethod
    def translate_saved_modules(cls, value: object) -> object:
        """Replaces names of PEFT and Megatron-Bridge with ours; PEFT's null means no module."""
        if value is None:
            return ()
        if not isinstance(value, list | tuple) or not all(isinstance(path, str) for path in value):
            return value
        if of_tower := names_in_tower(value):
            raise ValueError(
                f"names {', '.join(of_tower)}, a part of the vision tower; set model.vision.freeze_projector=false to "
                "train its projector in full, and model.vision.freeze_tower=false to train the rest of it"
            )
        # PEFT writes the full path of a module that it adds itself
        names = [path.rpartition(".")[2] for path in value]
        return tuple(dict.fromkeys(SAVED_SYNONYMS.get(name, name) for name in names))

    @field_validator("rank_pattern", "alpha_pattern", mode="before")
    @classmethod
    def translate_patterns(cls, value: object) -> object:
        """Replaces names of PEFT and Megatron-Bridge with ours."""
        if not isinstance(value, Mapping):
            return value
        if layered := [name for name in value if isinstance(name, str) and re.search(r"[.^*\\]", name)]:
            raise ValueError(
                f"names {', '.join(layered)}, but all layers have the same ranks here; name targets, such as q_proj"
            )
        return {SYNONYMS.get(name, name) if isinstance(name, str) else name: number for name, number in value.items()}

    def broken_rules(self) -> Iterator[str]:
        patterns: tuple[tuple[str, Mapping[Target, float]], ...]
        patterns = (("rank_pattern", self.rank_pattern), ("alpha_pattern", self.alpha_pattern))
        for name, pattern in patterns:
            if missing := [target for target in pattern if self.parts.isdisjoint(GROUPS.get(target, (target,)))]:
                yield f"{name}={', '.join(missing)} is not in targets; add it to targets, or remove it"
                break
        if not self.targets:
            yield "targets is empty, so nothing would be trained; name at least one"
        for target, parts in JOINED.items():
            if target in self.parts and (repeated := sorted(self.parts.intersection(parts))):
                yield (
                    f"targets={target} is one pair for {', '.join(parts)}, but {', '.join(repeated)} is also named; "
                    "remove one of them"
                )
                break
        if repeated := [module for module in self.modules_to_save if module in self.parts]:
            yield (
                f"modules_to_save={', '.join(repeated)} is trained in full and also in targets; remove it from one of "
                "them"
            )

    def pair_of(self, part: str) -> str:
        """Returns the target that holds a part's pair: the part itself, or a target that joins several parts."""
        return next((target for target, parts in JOINED.items() if part in parts and target in self.parts), part)

    def rank_of(self, part: str) -> int:
        """Returns the rank of a part."""
        return _part_value(self.rank_pattern, part, self.rank)

    def alpha_of(self, part: str) -> float:
        """Returns the alpha of a part."""
        return _part_value(self.alpha_pattern, part, self.alpha)

    def scale_of(self, part: str) -> float:
        """Returns the factor of a part's B A."""
        return self._scale(self.alpha_of(part), self.rank_of(part))

    @property
    def scale(self) -> float:
        """Factor of B A without patterns."""
        return self._scale(self.alpha, self.rank)

    def _scale(self, alpha: float, rank: int) -> float:
        match self.scaling:
            case "standard":
                return alpha / rank
            case "rslora":
                return alpha / math.sqrt(rank)
            case _:
                assert_never(self.scaling)

    @property
    def parts(self) -> frozenset[str]:
        """Targets with groups spelled out; a group may include parts that the model lacks."""
        return frozenset(part for target in self.targets for part in GROUPS.get(target, (target,)))

    @property
    def has_magnitudes(self) -> bool:
        """Whether a trained vector replaces the row norms of each adapted matrix."""
        return False


class LoraSection(AdapterSection):
    """LoRA, arXiv 2106.09685."""

    kind: Literal["lora"] = "lora"


class DoraSection(AdapterSection):
    """DoRA, arXiv 2402.09353: rows of W + scale B A are scaled to trained lengths; no gradient flows through their
    norms."""

    kind: Literal["dora"]

    @property
    def has_magnitudes(self) -> bool:
        return True

    def broken_rules(self) -> Iterator[str]:
        yield from super().broken_rules()
        if self.dropout > 0:
            yield (
                f"dropout={self.dropout} with kind=dora would have to drop inputs of the frozen matrices as well; set "
                "it to 0, or kind=lora"
            )
        if wrong := sorted({"experts", "embedding", "output"} & self.parts):
            yield (
                f"targets={', '.join(wrong)} cannot have kind=dora: PEFT has no form for experts, and rows of tables "
                "(embedding, output) may be padding; remove them, or use kind=lora"
            )


AnyAdapter = Annotated[Annotated[LoraSection, Tag("lora")] | Annotated[DoraSection, Tag("dora")], by_kind("lora")]
