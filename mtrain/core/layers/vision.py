"""Vision tower on the first pipeline stage: transformers' own module, whose features replace embeddings.

Ranks that see the same rows share the work: each encodes some of the images, with about as many patches as the other
ranks, and an all-gather gives all features to all of them. In the backward pass the gradient of a feature is summed
over these ranks, so gradients of the tower are sums over all ranks, like those of other replicated parameters.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, assert_never

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from mtrain.arch.features.outside import PROJECTOR, is_trained
from mtrain.base.errors import ConfigError
from mtrain.config.schema.vision import VISION, VisionSection
from mtrain.config.towers import description_of
from mtrain.core.batch.images import MicrobatchImages
from mtrain.core.layers.attention.key_source import CachedPass, Remembering
from mtrain.core.layers.own_parameters import ShardedOffsets
from mtrain.core.ranks.groups import Groups, to_device


class PlacedFeatures(NamedTuple):
    """Features at the positions of a rank, [positions, batch, hidden] each; 0 for text."""

    embedded: Tensor
    """Embeddings, with features in the place of those of images."""
    deep: Tensor | None = None
    """What is added after each of the first layers of the language model, [layers, positions, batch, hidden]; None
    without DeepStack, and for a microbatch of text."""
    ahead: Sequence[Tensor] = ()
    """What replaces the embedding of the token that each MTP depth reads; empty for a microbatch of text."""


class VisionTower(MegatronModule, Remembering):
    """Encodes images, and replaces embeddings by their features."""

    def __init__(self, section: VisionSection, hidden_size: int, config: TransformerConfig, groups: Groups) -> None:
        super().__init__(config=config)
        self._section, self._per_feature = section, section.patches_per_feature
        self._hidden_size, self._width = hidden_size, hidden_size * (1 + len(section.deepstack))
        self._device, self._tp = groups.device, groups.tp
        # without sequence parallelism, ranks of TP see the same tokens and do the same work
        self._in_training = groups.collection.tp_cp if config.sequence_parallel else groups.cp
        self._in_generation = groups.tp if config.sequence_parallel else None
        self._sharing: dist.ProcessGroup | None = self._in_training
        self.tower = built_tower(section, hidden_size, config.layernorm_epsilon)
        if config.recompute_granularity == "full" and not section.freeze_tower:
            recompute_layers(self.tower)
        self.to(config.params_dtype)
        for name, parameter in self.tower.named_parameters():
            # marked by the key of its learning rate
            setattr(parameter, "projector_lr" if name.startswith(PROJECTOR) else "tower_lr", True)
            # each rank of TP then encodes other images, so finalize_model_grads must sum the gradients
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.freeze_parts()

    def freeze_parts(self) -> None:
        """Freezes the parameters that are not trained, and no others."""
        for name, parameter in self.tower.named_parameters():
            parameter.requires_grad_(is_trained(self._section, name))

    def forward(
        self, embedded: Tensor, images: MicrobatchImages | None, places: Tensor | None, ahead: Tensor | None
    ) -> PlacedFeatures:
        """Replaces embeddings by features.

        Args:
            embedded: Embeddings of this rank's positions, [positions, batch, hidden].
            images: Images of the microbatch; None for text.
            places: Feature at each of these positions, [batch, positions]; -1 for text. None for text.
            ahead: Feature of the token that each MTP depth reads there, [batch, positions, depths]; -1 for text. None
                if no depth runs.
        """
        if images is None or places is None:
            return PlacedFeatures(self._connected(embedded))
        features = self._features(images).to(embedded.dtype)
        # the first row is for text and gets no gradient
        table = torch.cat((features.new_zeros(1, self._width), features))
        # contiguous, since the next stage receives a contiguous tensor
        numbers = places.t().contiguous() + 1
        rows = functional.embedding(numbers, table, padding_idx=0)
        rows = rows.view(*numbers.shape, -1, self._hidden_size).movedim(2, 0)
        embedded = torch.where((numbers > 0).unsqueeze(-1), rows[0], embedded).contiguous()
        deep = rows[1:] if len(rows) > 1 else None
        if ahead is None:
            return PlacedFeatures(embedded, deep)
        of_depths = functional.embedding(ahead.transpose(0, 1) + 1, table[:, : self._hidden_size], padding_idx=0)
        return PlacedFeatures(embedded, deep, list(of_depths.unbind(2)))

    def remember(self, reading: CachedPass | None) -> None:
        """Shares the work in generation only with ranks that read the same prompts, which those of CP do not."""
        self._sharing = self._in_training if reading is None else self._in_generation

    def _features(self, images: MicrobatchImages) -> Tensor:
        """Returns the features of all images, [features, hidden x (1 + deeper layers)]. Collective over the ranks that
        share the work."""
        patches = images.grids.prod(dim=1).tolist()
        group = self._sharing
        shares = divided(patches, 1 if group is None else group.size())
        share = shares[0 if group is None else group.rank()]
        if share:
            features = self._encoded(images, patches, share)
        else:
            dtype = next(self.tower.parameters()).dtype
            features = self._connected(torch.zeros(0, self._width, dtype=dtype, device=self._device))
        if group is None or len(shares) == 1:
            return features
        counts = [patch_count // self._per_feature for patch_count in patches]
        longest = max(sum(counts[image] for image in numbers) for numbers in shares)
        padded = functional.pad(features, (0, 0, 0, longest - len(features)))
        gathered = gather_from_sequence_parallel_region(padded, group=group)
        rows: dict[int, range] = {}
        for rank, numbers in enumerate(shares):
            begin = rank * longest
            for image in numbers:
                rows[image] = range(begin, begin + counts[image])
                begin += counts[image]
        order = torch.tensor([row for image in range(len(counts)) for row in rows[image]])
        return gathered[to_device(order, self._device)]

    def _encoded(self, images: MicrobatchImages, patches: list[int], share: list[int]) -> Tensor:
        """Returns the features of the images in `share`, one image after another."""
        pixels_of = torch.split(images.pixels, patches)
        pixels = to_device(torch.cat([pixels_of[image] for image in share]), self._device)
        grids = to_device(images.grids[share], self._device)
        output = self.tower(pixels, grid_thw=grids)
        return torch.cat((output.pooler_output, *output.deepstack_features), dim=1)

    def _connected(self, values: Tensor) -> Tensor:
        """Connects the values to all trained parameters, whose gradients become 0, so that a rank without images takes
        part in the collectives of the gradients."""
        trained = [parameter for parameter in self.tower.parameters() if parameter.requires_grad]
        if not trained or not torch.is_grad_enabled():
            return values
        connected: Tensor = _Connected.apply(values, *trained)  # type: ignore[no-untyped-call]
        return connected

    def _apply(self, fn: Any, recurse: bool = True) -> "VisionTower":
        # the tower's rotary frequencies are buffers, which must keep their precision when parameters are rounded
        exact = dict(self.named_buffers())
        super()._apply(fn, recurse)
        for name, buffer in exact.items():
            holder, _, last = name.rpartition(".")
            moved = getattr(self.get_submodule(holder), last)
            setattr(self.get_submodule(holder), last, buffer.to(moved.device))
        return self

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: ShardedOffsets = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Describes all parameters for checkpoints, under their names in transformers."""
        assert metadata is not None, "megatron-core passes it to every layer"
        described: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            dict(self.tower.named_parameters()),
            prefix,
            {},
            sharded_offsets,
            tp_group=self._tp,
            dp_cp_group=metadata["dp_cp_group"],
        )
        return described


def divided(patches: list[int], num_ranks: int) -> list[list[int]]:
    """Assigns images to ranks, the largest first, each to the rank with the fewest patches so far.

    Returns:
        Numbers of each rank's images, ascending.
    """
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for image in sorted(range(len(patches)), key=lambda image: -patches[image]):
        rank = loads.index(min(loads))
        shares[rank].append(image)
        loads[rank] += patches[image]
    return [sorted(share) for share in shares]


def recompute_layers(tower: nn.Module) -> None:
    """Makes the layers of a tower keep only their input, and compute the rest again in the backward pass."""
    from transformers.modeling_layers import GradientCheckpointingLayer  # imported by the tower already

    for layer in tower.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            # by the method alone, which renames no parameter; towers have no dropout, so no random state either
            again = functools.partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
            setattr(layer, "forward", again)  # noqa: B010 mypy refuses an assignment to a method


class _Connected(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(*parameters)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return (*gradients, *(torch.zeros_like(parameter) for parameter in ctx.saved_tensors))


def built_tower(section: VisionSection, hidden_size: int, norm_epsilon: float) -> nn.Module:
    """Builds transformers' tower in float32 on the CPU, with biases of 0 and norms of 1.

    Args:
        section: Sizes of the tower.
        hidden_size: Width of the language model.
        norm_epsilon: Epsilon of the language model's norms, which the projector of Mistral 3 takes.

    Raises:
        ConfigError: transformers is not installed, or too old.
    """
    try:
        from transformers.initialization import no_init_weights

        config = description_of(section).written(section, hidden_size, norm_epsilon)
        with no_init_weights():
            match section.kind:
                case "qwen3_vl":
                    tower = _qwen3_vl(config)
                case "gemma3":
                    tower = _Gemma3(section, config)
                case "mistral3":
                    tower = _Mistral3(section, config)
                case "gemma4":
                    tower = _Gemma4(config)
                case _:
                    assert_never(section.kind)
    except ImportError as fault:
        raise ConfigError(
            f"model.vision needs the vision tower of Hugging Face transformers, which cannot be imported ({fault}); "
            "run pip install 'mtrain[vision]'"
        ) from fault
    for module in tower.modules():
        if isinstance(module, nn.LayerNorm):
            module.reset_parameters()
        elif isinstance(getattr(module, "bias", None), nn.Parameter):
            nn.init.zeros_(module.bias)  # type: ignore[arg-type]
    return tower


def _qwen3_vl(config: Mapping[str, Any]) -> nn.Module:
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    # the tower of Qwen3.5 is this one without deepstack
    return _built(Qwen3VLVisionModel, Qwen3VLVisionConfig(**config[VISION]))


def _built(tower: Any, config: Any) -> Any:
    return tower._from_config(config, dtype=torch.float32)


class TowerOutput(NamedTuple):
    """Output of a tower, with the names of transformers."""

    pooler_output: Tensor
    """Features, [features, hidden]."""
    deepstack_features: tuple[Tensor, ...] = ()


class _Gemma3(nn.Module):
    """SigLIP and the projector of Gemma 3, both modules of transformers."""

    def __init__(self, section: VisionSection, fields: Mapping[str, Any]) -> None:
        super().__init__()
        from transformers.models.gemma3.configuration_gemma3 import Gemma3Config
        from transformers.models.gemma3.modeling_gemma3 import Gemma3MultiModalProjector
        from transformers.models.siglip.modeling_siglip import SiglipVisionModel

        config, side = Gemma3Config(**fields), math.isqrt(section.num_positions)
        self._shape = (side, side, section.num_channels, section.patch_size, section.patch_size)
        self.vision_tower = _built(SiglipVisionModel, config.vision_config)
        self.multi_modal_projector = Gemma3MultiModalProjector(config)
        nn.init.zeros_(self.multi_modal_projector.mm_soft_emb_norm.weight)  # the norm multiplies by 1 + weight

    def forward(self, pixels: Tensor, grid_thw: Tensor) -> TowerOutput:
        """Returns the features of images from their patches, [patches, elements], row by row."""
        # [images, rows, columns, channels, height, width] of patches to images, [images, channels, height, width]
        patches = pixels.to(self.vision_tower.dtype).view(len(grid_thw), *self._shape)
        images = patches.permute(0, 3, 1, 4, 2, 5).flatten(2, 3).flatten(3, 4)
        hidden = self.vision_tower(pixel_values=images).last_hidden_state
        return TowerOutput(self.multi_modal_projector(hidden).flatten(0, 1))


class _Mistral3(nn.Module):
    """Pixtral and the projector of Mistral 3, both modules of transformers."""

    def __init__(self, section: VisionSection, fields: Mapping[str, Any]) -> None:
        super().__init__()
        from transformers.models.mistral3.configuration_mistral3 import Mistral3Config
        from transformers.models.mistral3.modeling_mistral3 import Mistral3MultiModalProjector
        from transformers.models.pixtral.modeling_pixtral import PixtralVisionModel

        config = Mistral3Config(**fields)
        self._shape = (section.num_channels, section.patch_size, section.patch_size)
        self.vision_tower = _built(PixtralVisionModel, config.vision_config)
        self.multi_modal_projector = Mistral3MultiModalProjector(config)

    def forward(self, pixels: Tensor, grid_thw: Tensor) -> TowerOutput:
        """Returns the features of images from their patches, [patches, elements], row by row."""
        grids, features = grid_thw.tolist(), []
        _, height, width = self._shape
        # one image at a time, since transformers would compute all scores between patches of different images
        for patches, (_, rows, columns) in zip(torch.split(pixels, grid_thw.prod(dim=1).tolist()), grids):
            # [rows, columns, channels, height, width] of patches to [channels, height, width] of the image
            image = patches.view(rows, columns, *self._shape).permute(2, 0, 3, 1, 4).flatten(3, 4).flatten(1, 2)
            sizes = [(rows * height, columns * width)]
            hidden = self.vision_tower(pixel_values=image[None], image_sizes=sizes).last_hidden_state
            features.append(self.multi_modal_projector(hidden.squeeze(0), sizes))
        return TowerOutput(torch.cat(features))


class _Gemma4(nn.Module):
    """The tower of Gemma 4 and its projection, both modules of transformers."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__()
        from transformers.models.gemma4.configuration_gemma4 import Gemma4Config
        from transformers.models.gemma4.modeling_gemma4 import Gemma4MultimodalEmbedder, Gemma4VisionModel

        config = Gemma4Config(**fields)
        self.vision_tower = _built(Gemma4VisionModel, config.vision_config)
        self.embed_vision = Gemma4MultimodalEmbedder(config.vision_config, config.text_config)
        nn.init.ones_(self.vision_tower.patch_embedder.position_embedding_table)
        if config.vision_config.standardize:  # buffers there; as parameters they are saved like all other weights
            for name, value in (("std_bias", 0.0), ("std_scale", 1.0)):
                shape = self.vision_tower._buffers.pop(name).shape
                setattr(self.vision_tower, name, nn.Parameter(torch.full(shape, value), requires_grad=False))

    def forward(self, pixels: Tensor, grid_thw: Tensor) -> TowerOutput:
        """Returns the features of images from their patches, [patches, elements], row by row."""
        features = []
        # one image at a time, since transformers would pad each to the largest
        for patches, (_, _, columns) in zip(torch.split(pixels, grid_thw.prod(dim=1).tolist()), grid_thw.tolist()):
            numbers = torch.arange(len(patches), device=pixels.device)
            positions = torch.stack((numbers % columns, numbers // columns), dim=-1)
            hidden = self.vision_tower(pixel_values=patches[None], pixel_position_ids=positions[None])
            features.append(self.embed_vision(hidden.last_hidden_state))
        return TowerOutput(torch.cat(features))
