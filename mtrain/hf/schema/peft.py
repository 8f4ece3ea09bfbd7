"""Describes adapters as PEFT does: names of tensors, and adapter_config.json.

In PEFT, experts are parameters (`target_parameters`) instead of modules: a pair of matrices has all experts of a
projection, and the second parameter of a module wraps the first.

Source: peft 0.21.2, tuners/lora/layer.py (Linear, Embedding, ParamWrapper), utils/save_and_load.py.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from mtrain.arch.adapters import HEAD, in_layer, is_norm, learned_matrices, model_parts, tables
from mtrain.arch.features.feature import AdaptedMatrix
from mtrain.arch.features.outside import KEY, PROJECTOR, is_trained
from mtrain.base.errors import DataError
from mtrain.base.tensor_slice import Sizes
from mtrain.config.adapters import all_linear_in
from mtrain.config.schema.adapter import ALL_LINEAR, JOINED, SAVED_SYNONYMS, AdapterSection
from mtrain.config.schema.bounds import can_be_a_path
from mtrain.config.schema.model import ModelSection
from mtrain.config.towers import description_of
from mtrain.hf.schema.family import Family, axis_sizes
from mtrain.hf.schema.files import ADAPTER_NAME
from mtrain.hf.schema.registry import family_of, template_at
from mtrain.hf.schema.table import JoinedArrangement, Rule, order_in_region
from mtrain.hf.schema.table import shape as shape_of

CONFIG_NAME, TENSORS_NAME = ADAPTER_NAME, "adapter_model.safetensors"
# a PeftModel contains a LoraModel (base_model), which contains the transformers model (model)
_ROOT = "base_model.model."
_KINDS = ("lora_a", "lora_b", "magnitude")
_OF_LINEAR = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "magnitude": "lora_magnitude_vector"}
_WHOLE = "whole"
"""Kind of a fully trained tensor (`modules_to_save`)."""
_OF_EMBEDDING = {"lora_a": "lora_embedding_A", "lora_b": "lora_embedding_B"}
_EXPERTS = {"mlp.experts.linear_fc1": "base_layer.", "mlp.experts.linear_fc2": ""}
"""Projection -> prefix of its pair's name, since PEFT wraps gate_up_proj first, and down_proj around it."""
_PARAMETERS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
_REDIRECTED = ("deepseek_v3", "glm4_moe", "glm4_moe_lite", "kimi_k2", "qwen3_moe", "qwen3_next")
"""Families in which PEFT redirects the modules of `_NETWORK` to the experts' parameters.

Source: peft 0.21.2 and transformers 5.24, utils/transformers_weight_conversion.py, `_convert_peft_config_moe`.
"""
_NETWORK = ("gate_proj", "up_proj", "down_proj")
_INTERLEAVED = ("gpt_oss",)
"""Families whose experts interleave gate and up, where we have all gates first."""
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {"bias": ("none",), "init_lora_weights": (True, False, "gaussian")}
"""PEFT setting -> non-empty values that do not affect a saved adapter."""
_NAMES = """auto_mapping base_model_name_or_path ensure_weight_tying inference_mode lora_dropout megatron_core
peft_version qalora_group_size revision runtime_config target_modules target_parameters task_type"""
_UNREAD = frozenset(_NAMES.split())
"""Settings that do not affect the tensors' meaning, or that the tensors reveal."""
_OURS = frozenset(
    ("peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "modules_to_save")
)


class PeftTensor(NamedTuple):
    name: str
    key: str
    """Our global name, with `{E}` if PEFT has all experts in one tensor."""
    shape: Sizes
    kind: str
    """lora_a, lora_b or magnitude, or `whole` for a module that is saved whole."""
    matrix: AdaptedMatrix
    is_interleaved: bool = False
    """Whether PEFT interleaves the rows of gate and up."""
    order: JoinedArrangement | None = None
    """Order of the rows in PEFT; None if it is ours."""


def with_fused_targets(content: Any) -> Any:
    """Adds projections that are fused in the weights' family to the adapter target all-linear."""
    further = all_linear_in(content)
    if further is None:
        return content

    def path(section: str, key: str) -> str | None:
        keys = content.get(section)
        value = keys.get(key) if isinstance(keys, Mapping) else None
        return value if isinstance(value, str) and can_be_a_path(value) else None

    template = template_at(path("model", "hf"), path("checkpoint", "initialize_from"))
    names = [] if template is None else [part.name for rule in family_of(template).rules for part in rule.parts]
    fused = [target for target in JOINED if any(name.endswith(f".{target}.weight") for name in names)]
    return {**content, "adapter": {**content["adapter"], "targets": [ALL_LINEAR, *fused, *further]}}


def tensors(family: Family, model: ModelSection, adapter: AdapterSection) -> Iterator[PeftTensor]:
    """Yields every tensor of an adapter, in the order of the model."""
    yield from _learned_whole(family, model, adapter)
    for matrix in tables(model, adapter):
        rules = _rules(family, model, f"{matrix.linear}.weight", -1)
        if not rules:
            raise DataError(
                f"this {family.model_type} model has no separate {matrix.linear} to adapt; change adapter.targets"
            )
        name = _module(family, rules[0], 0)
        yield from _pair(matrix, adapter, f"{_ROOT}{name}", matrix.linear)
    for layer in range(model.num_layers):
        for matrix in in_layer(model, adapter, layer):
            ours = f"decoder.layers.{layer}.{matrix.linear}"
            if matrix.num_experts:
                if model.has_branches(layer):
                    raise DataError(
                        f"mtrain does not know PEFT's form for experts of {family.model_type} models; merge the "
                        "adapter into the weights"
                    )
                if not model.is_gated:
                    raise DataError(
                        f"mtrain does not know PEFT's form for experts without a gate ({family.model_type}); merge the "
                        "adapter into the weights"
                    )
                yield from _of_experts(family, matrix, adapter, layer)
                continue
            if matrix.part == "out_proj" and model.mamba is not None:
                raise DataError(
                    f"PEFT refuses adapters of out_proj in {family.model_type} models, whose kernels read the weight "
                    "directly; merge the adapter into the weights"
                )
            matching = _rules(family, model, f"decoder.layers.*.{matrix.linear}.weight", layer)
            if not matching:
                raise DataError(
                    f"PEFT cannot express an adapter of {matrix.linear} in {family.model_type} models; merge it into "
                    "the weights"
                )
            (rule,) = matching
            index = _index_in_rule(matrix, rule, len(model_parts(model, matrix.linear)))
            if index is None:
                modules = ", ".join(
                    _module(family, rule, number).rpartition(".")[2] for number in range(len(rule.parts))
                )
                raise DataError(
                    f"PEFT cannot express an adapter of {matrix.part} in {family.model_type} models, which have "
                    f"{modules} instead; name these in adapter.targets, or merge the adapter into the weights"
                )
            for tensor in _pair(matrix, adapter, f"{_ROOT}{_module(family, rule, index).format(L=layer)}", ours):
                # the rows of B, and the only axis of magnitudes, are outputs
                columns = {"lora_b": adapter.rank_of(matrix.part), "magnitude": 1}.get(tensor.kind)
                yield (
                    tensor
                    if columns is None
                    else tensor._replace(order=order_in_region(rule.parts[index], axis_sizes(model) | {"h": columns}))
                )


def _learned_whole(family: Family, model: ModelSection, adapter: AdapterSection) -> Iterator[PeftTensor]:
    for key in sorted(learned_matrices(model, adapter)):
        rows = model.vocab_size if key != HEAD else model.output.rows
        matrix = AdaptedMatrix(key.removesuffix(".weight"), _WHOLE, rows, model.hidden_size, is_replicated=True)
        (rule,) = _rules(family, model, key, -1)
        shape = (matrix.rows, matrix.columns)
        whole = PeftTensor(f"{_ROOT}{_module(family, rule, 0)}.weight", key, shape, _WHOLE, matrix)
        yield whole
        if key != HEAD and model.output.is_tied:  # PEFT saves and needs a tied table under both names
            yield whole._replace(name=f"{_ROOT}lm_head.weight")
    for layer in (-1, *range(model.num_layers)) if "norms" in adapter.modules_to_save else ():
        for rule in family.rules:
            if not is_norm(rule.key) or ("*" in rule.key) == (layer < 0) or not rule.when(model, layer):
                continue
            key, sizes = rule.key.replace("*", str(layer)), shape_of(rule.axes, axis_sizes(model))
            assert [part.axes for part in rule.parts] == [rule.axes], "a norm has the same order in every program"
            matrix = AdaptedMatrix(key.rpartition(".")[0], _WHOLE, sizes[0], 1)
            name, _, kind = rule.parts[0].name.format(L=layer).rpartition(".")
            module = name if family.renamed is None else name.replace(*family.renamed, 1)
            yield PeftTensor(f"{_ROOT}{module}.{kind}", key, sizes, _WHOLE, matrix)
    for path, tensor in _in_tower(family, model).items():
        if tensor.is_trained:
            matrix = AdaptedMatrix(path, _WHOLE, tensor.shape[0], 1)
            yield PeftTensor(f"{_ROOT}{path}", KEY + tensor.name, tensor.shape, _WHOLE, matrix)


class _TowerTensor(NamedTuple):
    name: str
    """Name in our tower, without KEY."""
    shape: Sizes
    is_trained: bool


def _in_tower(family: Family, model: ModelSection) -> dict[str, _TowerTensor]:
    """Returns path in transformers' model -> tensor of the vision tower; empty without a tower.

    Raises:
        DataError: A part of the tower is trained, but the family has no tower.
    """
    vision = model.vision
    if vision is None or (vision.is_frozen and family.tower is None):
        return {}
    described = family.for_vision(True).tower
    assert described is not None, "for_vision refuses others"
    assert described.trained is not None, "for_vision refuses others"
    shapes = description_of(vision).shapes(vision, model.hidden_size)
    tensors = (_TowerTensor(name, shape, is_trained(vision, name)) for name, shape in shapes.items())
    return {described.vision_path(tensor.name): tensor for tensor in tensors}


def _tower_modules(family: Family, model: ModelSection) -> Iterator[str]:
    """Yields, for each trained tensor of the vision tower, the outermost module that PEFT can save whole: it contains
    no frozen tensor, and is not a list of modules."""
    paths = {path: tensor.is_trained for path, tensor in _in_tower(family, model).items()}
    frozen = [path for path in paths if not paths[path]]
    for path in (path for path in paths if paths[path]):
        # `model` contains the language model as well
        yield next(
            module
            for module in _modules_around(path)[1:]
            if not path.removeprefix(f"{module}.").partition(".")[0].isdigit()
            and not any(other.startswith(f"{module}.") for other in frozen)
        )


def _modules_around(path: str) -> list[str]:
    """Returns the paths of the modules that contain a parameter, the outermost first."""
    names = path.split(".")
    return [".".join(names[:count]) for count in range(1, len(names))]


def _rules(family: Family, model: ModelSection, key: str, layer: int) -> list[Rule]:
    """Returns the rules of a tensor that apply to the model, at most one."""
    return [rule for rule in family.rules if rule.key == key and rule.when(model, layer)]


def _index_in_rule(matrix: AdaptedMatrix, rule: Rule, num_parts: int) -> int | None:
    """Returns a part's index among the tensors of a fused projection; None if they do not match the adapter's pairs."""
    if matrix.part in JOINED:
        names = [part.name.removesuffix(".weight").rpartition(".")[2] for part in rule.parts]
        return names.index(matrix.part) if matrix.part in names else None
    if len(rule.parts) < num_parts:
        return None
    # up is the last tensor, and the only one without a gate
    order = {"q_proj": 0, "k_proj": 1, "v_proj": 2, "gate_proj": 0, "up_proj": len(rule.parts) - 1}
    order |= {"in_proj_qkv": 0, "in_proj_z": 1, "in_proj_b": 2, "in_proj_a": 3}
    return order.get(matrix.part, 0)


def _module(family: Family, rule: Rule, index: int) -> str:
    name = rule.parts[index].name.removesuffix(".weight")
    return name if family.renamed is None else name.replace(*family.renamed, 1)


def _pair(matrix: AdaptedMatrix, adapter: AdapterSection, module: str, ours: str) -> Iterator[PeftTensor]:
    is_table, rank = matrix.part == "embedding", adapter.rank_of(matrix.part)
    shapes = {
        "lora_a": (rank, matrix.columns),
        "lora_b": (matrix.rows, rank),
        "magnitude": (matrix.rows,),
    }
    for kind in _KINDS[: 3 if adapter.has_magnitudes else 2]:
        # an embedding's pair consists of parameters, a projection's of linear layers with weights
        name = (_OF_EMBEDDING if is_table else _OF_LINEAR)[kind]
        yield PeftTensor(f"{module}.{name}", f"{ours}_adapter.{matrix.part}_{kind}", shapes[kind], kind, matrix)


def _of_experts(family: Family, matrix: AdaptedMatrix, adapter: AdapterSection, layer: int) -> Iterator[PeftTensor]:
    linear = matrix.linear.removeprefix("mlp.experts.")
    module = f"{_ROOT}{family.base}layers.{layer}.mlp.experts.{_EXPERTS[matrix.linear]}"
    # PEFT joins the pairs of all experts into one pair of this rank
    count = adapter.rank_of(matrix.part) * matrix.num_experts
    for kind, shape in (("lora_a", (count, matrix.columns)), ("lora_b", (matrix.rows, count))):
        ours = f"decoder.layers.{layer}.mlp.experts.{{E}}.{linear}_adapter.{kind}"
        mixed = family.model_type in _INTERLEAVED and linear == "linear_fc1" and kind == "lora_b"
        yield PeftTensor(f"{module}{_OF_LINEAR[kind]}", ours, shape, kind, matrix, mixed)


def config_of(family: Family, model: ModelSection, adapter: AdapterSection, base: str | None) -> dict[str, Any]:
    """Builds the content of adapter_config.json; `base` is the path or name of the frozen model for PEFT."""
    # experts are parameters in PEFT, listed in target_parameters
    named = list(tensors(family, model, adapter))
    names = [tensor.name for tensor in named if not tensor.matrix.num_experts and tensor.kind != _WHOLE]
    saved = [_saved_as(tensor) for tensor in named if tensor.kind == _WHOLE and not tensor.key.startswith(KEY)]
    saved += _tower_modules(family, model)
    modules = dict.fromkeys(_module_of(name) for name in names)
    redirected = [name for name in modules if _is_redirected(family, name)]
    if redirected and adapter.has_magnitudes:
        raise DataError(
            f"PEFT adapts {redirected[0]} in {family.model_type} models as a parameter, but supports DoRA only for "
            "modules; merge the adapter into the weights"
        )
    # the last part of a name means the module in every layer, and in a model with images also in their layers
    targets: list[str] | str = sorted({name.rpartition(".")[2] for name in modules if name not in redirected})
    if family.tower is not None:
        targets = rf"(model\.language_model\.(.*\.)?)?({'|'.join(targets)})"
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if model.output.head_rows else "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapter.rank,
        # an int in PEFT, which also accepts a float
        "lora_alpha": _whole(adapter.alpha),
        "rank_pattern": {} if not adapter.rank_pattern else _pattern(family, named, adapter.rank_of),
        "alpha_pattern": {}
        if not adapter.alpha_pattern
        else _pattern(family, named, lambda part: _whole(adapter.alpha_of(part))),
        # PEFT refuses dropout if a parameter is adapted
        "lora_dropout": 0.0 if redirected else adapter.dropout,
        "use_rslora": adapter.scaling == "rslora",
        "use_dora": adapter.has_magnitudes,
        "target_modules": targets,
        "bias": "none",
        # true for modules with transposed weights, such as GPT-2's Conv1D
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": list(dict.fromkeys(saved)) or None,
    }
    if _is_tied(model, adapter):
        config["ensure_weight_tying"] = True
    # PEFT does not redirect a module's weight that is listed as a parameter
    parameters = sorted({f"{'.'.join(name.split('.')[-2:])}.weight" for name in redirected})
    if "experts" in adapter.parts or parameters:
        config["target_parameters"] = [*(_PARAMETERS if "experts" in adapter.parts else ()), *parameters]
    return config


def _saved_as(tensor: PeftTensor) -> str:
    """Returns the path suffix with which PEFT finds a module that is saved whole; for a norm the full path, because
    many names end in "norm"."""
    path = tensor.name.removeprefix(_ROOT).rpartition(".")[0]
    return path if is_norm(tensor.key) else path.rpartition(".")[2]


def _is_redirected(family: Family, module: str) -> bool:
    return family.model_type in _REDIRECTED and module.rpartition(".")[2] in _NETWORK


def _is_tied(model: ModelSection, adapter: AdapterSection) -> bool:
    return model.output.is_tied and "embedding" in adapter.modules_to_save


def _whole(alpha: float) -> float | int:
    return alpha if alpha % 1 else int(alpha)


def _pattern(family: Family, named: Sequence[PeftTensor], value_of: Callable[[str], float]) -> dict[str, float]:
    """Returns path suffix -> value; at most one suffix matches each path, because PEFT uses the first match in the
    order of names."""
    values, has_experts = {}, any(tensor.matrix.num_experts for tensor in named)
    for tensor in (tensor for tensor in named if tensor.kind == "lora_a"):
        last = path_in_model(tensor).rpartition(".")[2]
        alone = r"(?<!mlp\.experts\.)" if has_experts and last == "down_proj" else ""
        weight = r"(\.weight)?" if _is_redirected(family, path_in_model(tensor)) else ""
        key = rf"mlp\.experts\.{last}" if tensor.matrix.num_experts else f"{alone}{last}{weight}"
        values[key] = value_of(tensor.matrix.part)
    return values


def path_in_model(tensor: PeftTensor) -> str:
    """Returns the path of the module, or of the experts' parameter, that a pair adapts, for PEFT's patterns."""
    if not tensor.matrix.num_experts:
        return _module_of(tensor.name)
    parameter = _PARAMETERS[list(_EXPERTS).index(tensor.matrix.linear)]
    head, _, _ = tensor.name.removeprefix(_ROOT).partition("mlp.experts")
    return f"{head}{parameter}"


def _differing_numbers(config: Mapping[str, Any], named: Iterable[PeftTensor], adapter: AdapterSection) -> list[str]:
    patterns = (config.get("rank_pattern"), config.get("alpha_pattern"), adapter.rank_pattern, adapter.alpha_pattern)
    lines: dict[tuple[str, str], str] = {}
    for tensor in (tensor for tensor in named if tensor.kind == "lora_a"):
        path, part = path_in_model(tensor), tensor.matrix.part
        suffix = f" of {path}" if any(patterns) else ""
        rank, alpha = rank_and_alpha(config, path)
        if rank != adapter.rank_of(part):
            lines.setdefault(("r", part), f"r={rank}{suffix}, but adapter.rank={adapter.rank_of(part)}")
        if alpha != adapter.alpha_of(part):
            lines.setdefault(
                ("alpha", part), f"lora_alpha={alpha}{suffix}, but adapter.alpha={adapter.alpha_of(part):g}"
            )
    return list(dict.fromkeys(lines.values()))


def rank_and_alpha(config: Mapping[str, Any], path: str) -> tuple[Any, Any]:
    """Returns a module's rank and alpha, from the first pattern that matches the end of its path, as in PEFT.

    Source: peft 0.21.2, utils/other.py, get_pattern_key.
    """
    numbers = []
    for key, default in (("rank_pattern", config.get("r")), ("alpha_pattern", config.get("lora_alpha"))):
        patterns = config.get(key) or {}
        try:
            first = next((pattern for pattern in patterns if re.match(rf"(.*\.)?({pattern})$", path)), None)
        except re.error as fault:
            raise DataError(
                f"{key} in {CONFIG_NAME} contains an invalid regular expression: {fault}; correct it"
            ) from None
        numbers.append(default if first is None else patterns[first])
    return numbers[0], numbers[1]


def _module_of(name: str) -> str:
    for ending in (*_OF_LINEAR.values(), *_OF_EMBEDDING.values()):
        if name.endswith(ending):
            return name.removesuffix(f".{ending}").removeprefix(_ROOT)
    raise AssertionError(name)


def differences(config: Mapping[str, Any], family: Family, model: ModelSection, adapter: AdapterSection) -> list[str]:
    """Describes each difference between a file and the run, and each setting that we cannot express."""
    lines = []
    if config.get("peft_type") != "LORA":
        return [f"peft_type={config.get('peft_type')!r}, but LORA is needed"]
    for key in ("rank_pattern", "alpha_pattern"):
        if not isinstance(config.get(key) or {}, dict):
            return [f"{key}={config[key]!r}, but an object is needed"]
    lines += _differing_numbers(config, tensors(family, model, adapter), adapter)
    switches: dict[str, tuple[Any, str]] = {
        "use_rslora": (adapter.scaling == "rslora", f"adapter.scaling={adapter.scaling}"),
        "use_dora": (adapter.has_magnitudes, f"adapter.kind={adapter.kind}"),
    }
    for key, (expected, ours) in switches.items():
        # older versions of PEFT had neither use_rslora nor use_dora
        if config.get(key, False) != expected:
            lines.append(f"{key}={config.get(key, False)}, but {ours}")
    lines += _differing_modules(config, family, model, adapter)
    for key, value in config.items():
        # an unknown setting may change the meaning of the tensors, unless it is off
        is_plain = value in (None, False, {}, [], "") or value in _NEUTRAL.get(key, ())
        if key not in _OURS | _UNREAD and not is_plain:
            lines.append(f"{key}={value!r}, which mtrain does not support")
    return lines


def _differing_modules(
    config: Mapping[str, Any], family: Family, model: ModelSection, adapter: AdapterSection
) -> Iterator[str]:
    """Describes differences in modules that are saved whole, and in the tying of tables."""
    yield from _differing_tower(config, family, model)
    theirs = saved_modules(config, family, model)
    ours = set(adapter.modules_to_save) - {"head"}
    if _is_tied(model, adapter):  # both names mean the same table
        ours, theirs = ours - {"output"}, {"embedding" if name == "output" else name for name in theirs}
    if model.output.is_new:
        theirs -= {"head"}  # PEFT always saves the modules score and classifier of such a model
    if ours != theirs:
        listing = ", ".join(adapter.modules_to_save) or "empty"
        yield f"modules_to_save={config.get('modules_to_save')}, but adapter.modules_to_save is {listing}"
    elif _is_tied(model, adapter) and not config.get("ensure_weight_tying"):
        yield (
            "ensure_weight_tying is not set, so its embeddings and output layer differ, but "
            "model.tied_embeddings=true makes them one table"
        )


def _differing_tower(config: Mapping[str, Any], family: Family, model: ModelSection) -> Iterator[str]:
    """Describes a difference in the parts of the vision tower that are saved whole."""
    tower, theirs = _in_tower(family, model), _saved_in_tower(config, family, model)
    if model.vision is None or theirs == [path for path, tensor in tower.items() if tensor.is_trained]:
        return
    needed = freezes(config, family, model)
    trained = model.vision.model_copy(update=needed)
    missing = [path for path, tensor in tower.items() if is_trained(trained, tensor.name) and path not in theirs]
    saved = f"modules_to_save={config.get('modules_to_save')}"
    if missing:
        yield (
            f"{saved} is a part of the vision tower or of its projector, which mtrain trains as a whole; it lacks "
            f"{missing[0]}" + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
        )
    else:
        others = {key: value for key, value in needed.items() if getattr(model.vision, key) != value}
        yield f"{saved} needs {', '.join(f'model.vision.{key}={str(value).lower()}' for key, value in others.items())}"


def freezes(config: Mapping[str, Any], family: Family, model: ModelSection) -> dict[str, bool]:
    """Returns the keys of `model.vision` that freeze what a file does not save whole."""
    tower = _in_tower(family, model)
    is_projector = [tower[path].name.startswith(PROJECTOR) for path in _saved_in_tower(config, family, model)]
    return {"freeze_tower": all(is_projector), "freeze_projector": not any(is_projector)}


def _saved_in_tower(config: Mapping[str, Any], family: Family, model: ModelSection) -> list[str]:
    """Returns the paths of the vision tower's tensors that a file saves whole; empty for a model without a tower."""
    return [path for path in _in_tower(family, model) if any(_is_inside(path, name) for name in _listed(config))]


def _is_inside(path: str, name: str) -> bool:
    """Says whether a parameter of the vision tower is in a module whose path ends with a name, as PEFT finds modules;
    names of modules of the language model do not count."""
    is_text = name.rpartition(".")[2] in SAVED_SYNONYMS
    return not is_text and any(around.endswith(name) for around in _modules_around(path))


def saved_modules(config: Mapping[str, Any], family: Family, model: ModelSection) -> set[str]:
    """Returns the modules outside the vision tower that a file saves whole, tables under our names and others under
    their last part."""
    paths = _in_tower(family, model)
    names = [name for name in _listed(config) if not any(_is_inside(path, name) for path in paths)]
    last = [name.rpartition(".")[2] for name in names]
    return {"norms" if "norm" in name else SAVED_SYNONYMS.get(name, name) for name in last}


def _listed(config: Mapping[str, Any]) -> Sequence[str]:
    modules = config.get("modules_to_save") or ()
    if not isinstance(modules, list | tuple) or not all(isinstance(name, str) for name in modules):
        raise DataError(f"modules_to_save in {CONFIG_NAME} is {modules!r}, but must be a list of names; correct it")
    return modules
