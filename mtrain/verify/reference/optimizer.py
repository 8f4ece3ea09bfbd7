"""AdamW and Muon in float64 from their definitions, with the scale of their float32 rounding.

Muon updates matrices, AdamW all other tensors. With G the clipped gradient of a matrix of R rows and C columns, m its
moving mean, and mu the momentum:

    m <- mu m + (1 - mu) G        U = (1 - mu) G + mu m, or m without Nesterov
    X <- U / |U|                  |U|: the root of the sum of squares; 0 for 0
    X <- a X + b (X X^T) X + c (X X^T)^2 X    newton_schulz_steps times, a = 3.4445, b = -4.7750, c = 2.0315
    W <- W - lr (rms sqrt(max(R, C)) X + decay W)

Matrices are the model's, not the file's: queries, keys and values, gate and up projections, and the parts of latent
attention with and without positions, are separate. In a vision tower, patch embeddings are a convolution, not a matrix.

Sources: Jordan et al. 2024, kellerjordan.github.io/posts/muon. Scale and decay: Liu et al. 2025, arXiv 2502.16982,
equations 2 to 4. Matrices of latent attention: DeepSeek-V2, arXiv 2405.04434, equations 9 to 16.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, assert_never

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mtrain.config import Config
from mtrain.config.schema.model import ModelSection
from mtrain.config.schema.train import AdamWConstants, AdamWSection, MuonSection
from mtrain.verify.reference.model.attention import kinds_of
from mtrain.verify.reference.model.experts import GATE
from mtrain.verify.reference.model.images import PROJECTOR, TOWER

Arrays = dict[str, NDArray[Any]]

_CLIPPING_OFFSET = 1e-6
"""Added to the norm that divides clip_grad, as in torch and Megatron-LM."""


class Updated(NamedTuple):
    """Weights after one step."""

    weights: Arrays
    scales: Arrays
    """Size of each element's float32 sum: |w| + lr x (moving mean of |gradient|) / (sqrt(v) + epsilon)."""


class Moments(NamedTuple):
    """State of Adam after some updates."""

    num_updates: int
    first: Arrays
    second: Arrays


class AdamW:
    """AdamW with clipping by a global norm that the caller gives.

    Source: Loshchilov and Hutter 2019, algorithm 2, with the decay times the learning rate.
    """

    def __init__(self, section: AdamWConstants, start: Moments = Moments(0, {}, {})) -> None:  # noqa: B008
        self._section = section
        self._num_updates = start.num_updates
        self._first = {name: np.asarray(value, np.float64) for name, value in start.first.items()}
        self._second = {name: np.asarray(value, np.float64) for name, value in start.second.items()}
        self._magnitude = {name: np.abs(value) for name, value in self._first.items()}

    def updated(self, weights: Mapping[str, Any], gradients: Mapping[str, Any], grad_norm: float, lr: float) -> Updated:
        """Clips the normalised gradients by their global norm `grad_norm`, and updates all tensors that have one."""
        self._num_updates += 1
        factor = clipping_factor(self._section.clip_grad, grad_norm)
        new: Arrays = {}
        scales: Arrays = {}
        for name, gradient in gradients.items():
            value, clipped = np.asarray(weights[name], np.float64), np.asarray(gradient, np.float64) * factor
            new[name], scales[name] = self._step(name, value, clipped, lr)
        return Updated(new, scales)

    def _step(
        self, name: str, value: NDArray[Any], gradient: NDArray[Any], lr: float
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        lr *= share_of_rate(name, self._section)
        beta1, beta2, step = self._section.beta1, self._section.beta2, self._num_updates
        self._first[name] = beta1 * self._first.get(name, 0.0) + (1 - beta1) * gradient
        self._magnitude[name] = beta1 * self._magnitude.get(name, 0.0) + (1 - beta1) * np.abs(gradient)
        self._second[name] = beta2 * self._second.get(name, 0.0) + (1 - beta2) * gradient**2
        divisor = np.sqrt(self._second[name] / (1 - beta2**step)) + self._section.epsilon
        decays = value.ndim > 1 or self._section.decay_norms_and_biases
        decay = self._section.weight_decay if decays else 0.0
        new = value - lr * (self._first[name] / (1 - beta1**step) / divisor + decay * value)
        return new, np.abs(value) + lr * self._magnitude[name] / (1 - beta1**step) / divisor


def share_of_rate(name: str, section: AdamWConstants) -> float:
    """Returns the learning rate of a tensor, as a share of that of the language model."""
    own = None
    if name.startswith(TOWER):
        own = section.projector_lr if name.startswith(PROJECTOR) else section.tower_lr
    return 1.0 if own is None else own / section.lr


def clipping_factor(clip_grad: float, grad_norm: float) -> float:
    """Returns the factor that clips gradients of this global norm; 1 if clip_grad = 0."""
    return min(1.0, clip_grad / (grad_norm + _CLIPPING_OFFSET)) if clip_grad > 0 else 1.0


_A, _B, _C = 3.4445, -4.7750, 2.0315
_UNIT_ROUNDOFF = 2.0**-24
_TABLES = ("embedding.word_embeddings.weight", "output_layer.weight")
_POSITIONS = ("pos_embed.weight", "position_embedding.weight")


class ExactMuon:
    """Muon for matrices, AdamW for all other tensors."""

    def __init__(self, section: MuonSection, model: ModelSection, start: Moments = Moments(0, {}, {})) -> None:  # noqa: B008
        """Begins in state `start`; its `first` includes the moving means of matrices. `model` splits fused tensors."""
        self._section, self._model = section, model
        self._adamw = AdamW(section, start)
        matrices = {name: torch.from_numpy(value) for name, value in start.first.items() if _is_matrix(name, value)}
        self._means = {name: value.double() for name, value in matrices.items()}
        self._rounded = {name: value.float() for name, value in matrices.items()}

    def updated(self, weights: Mapping[str, Any], gradients: Mapping[str, Any], grad_norm: float, lr: float) -> Updated:
        """Updates all tensors that have a gradient; see `AdamW.updated`."""
        by_adamw = {name: value for name, value in gradients.items() if not _is_matrix(name, value)}
        new, scales = self._adamw.updated(weights, by_adamw, grad_norm, lr)
        factor = clipping_factor(self._section.clip_grad, grad_norm)
        for name in gradients.keys() - by_adamw.keys():
            gradient = torch.from_numpy(np.asarray(gradients[name], np.float64)) * factor
            new[name], scales[name] = self._step(name, np.asarray(weights[name], np.float64), gradient, lr)
        return Updated(new, scales)

    def _step(self, name: str, value: NDArray[Any], gradient: Tensor, lr: float) -> tuple[NDArray[Any], NDArray[Any]]:
        """Returns new weights and the size of their float32 sums; `lr` is that of the language model.

        Each iteration amplifies rounding by up to 3.4445 in directions of small singular values, so the size is
        measured: the distance of a float32 computation, over the unit roundoff, is added to the largest element.
        """
        lr *= share_of_rate(name, self._section)
        exact = self._direction(self._means, name, gradient)
        single = self._direction(self._rounded, name, gradient.float())
        update, size = torch.empty_like(exact), torch.empty_like(exact)
        for rows in matrices(name, len(exact), self._model):
            scale = self._section.update_rms * math.sqrt(max(len(rows), exact.shape[1]))
            update[rows] = scale * self._orthogonalized(exact[rows])
            rounding = (scale * self._orthogonalized(single[rows]).double() - update[rows]).abs().max()
            size[rows] = update[rows].abs().max() + rounding / _UNIT_ROUNDOFF
        new = value - lr * (update.numpy() + self._section.weight_decay * value)
        return new, np.abs(value) + lr * size.numpy()

    def _direction(self, means: dict[str, Tensor], name: str, gradient: Tensor) -> Tensor:
        mu = self._section.momentum
        means[name] = mu * means.get(name, torch.zeros_like(gradient)) + (1 - mu) * gradient
        return (1 - mu) * gradient + mu * means[name] if self._section.nesterov else means[name]

    def _orthogonalized(self, matrix: Tensor) -> Tensor:
        size = matrix.square().sum().sqrt()
        x = matrix / size if size > 0 else torch.zeros_like(matrix)
        for _ in range(self._section.newton_schulz_steps):
            if len(x) <= x.shape[1]:
                gram = x @ x.T
                x = _A * x + _B * gram @ x + _C * gram @ (gram @ x)
            else:
                gram = x.T @ x
                x = _A * x + _B * x @ gram + _C * (x @ gram) @ gram
        return x


def _is_matrix(name: str, value: NDArray[Any]) -> bool:
    """Says whether Muon updates a tensor; AdamW updates tables and routers, which have a row per token, position or
    expert."""
    return value.ndim == 2 and name not in _TABLES and not name.endswith(("router.weight", GATE, *_POSITIONS))


def matrices(name: str, num_rows: int, model: ModelSection) -> list[Tensor]:
    """Returns the row numbers of each matrix in a tensor."""
    rows = torch.arange(num_rows)
    if name.startswith(TOWER):
        return list(rows.chunk(3)) if name.endswith(".qkv.weight") else [rows]
    module = name.removesuffix(".weight").rpartition(".")[2]
    if module == "linear_fc1" and model.is_gated:
        return list(rows.chunk(2))
    return max((kind.matrices(module, rows, model) for kind in kinds_of(model)), key=len, default=[rows])


def exact_optimizer(config: Config, start: Moments = Moments(0, {}, {})) -> AdamW | ExactMuon:  # noqa: B008
    """Makes the float64 optimizer of a configuration, in the state `start`."""
    match config.optimizer:
        case AdamWSection():
            return AdamW(config.optimizer, start)
        case MuonSection():
            return ExactMuon(config.optimizer, config.model, start)
        case _:
            assert_never(config.optimizer)
