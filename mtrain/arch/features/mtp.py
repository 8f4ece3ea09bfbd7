"""Multi-token prediction (MTP): additional layers after the last one."""

from typing import Any, final

from mtrain.arch.features.feature import Feature, Parameters, SmallRun, norm_elements
from mtrain.config.schema.model import ModelSection

_MAX_SMALL_DEPTHS = 2


@final
class MultiTokenPrediction(Feature):
    """Depths that predict further tokens. Each joins two inputs with a projection, and has a layer like the model's
    last one and a norm."""

    def needs_torch_layers(self, model: ModelSection) -> str | None:
        if model.mtp_depths == 0 or model.global_attention_every is None:
            return None
        return "model.mtp_depths with model.global_attention_every"

    def shrunk(self, model: ModelSection, small: SmallRun) -> dict[str, Any]:
        return {"mtp_depths": min(model.mtp_depths, _MAX_SMALL_DEPTHS)}


def joint_parameters(model: ModelSection) -> Parameters:
    """Counts a depth's parameters outside its layer: norms of both inputs and the output, and the input projection."""
    return Parameters(divided=2 * model.hidden_size**2, replicated=3 * norm_elements(model, model.hidden_size))


def num_passed_features(model: ModelSection) -> int:
    """Counts the tensors, each as large as the hidden states, that stages of a pipeline pass on besides these: the
    features of images that depths read, since the first stage has the tower, and the last one the depths."""
    return 0 if model.vision is None else model.mtp_depths
