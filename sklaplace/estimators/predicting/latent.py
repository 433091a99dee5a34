"""Latent values: outputs in the user's terms, joint over samples and outputs.

A classifier has class logits. A regressor has noise-free targets in the units of
``y``.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from sklaplace.core.checks import as_seed
from sklaplace.core.random import RandomState
from sklaplace.core.trees import Inputs
from sklaplace.estimators.predicting.output_model import BatchedOutputs

# affine map from the outputs (m, c) of samples to their latent values (m, ...)
Latent = Callable[[Tensor], Tensor]


def joint_moments(
    outputs: BatchedOutputs, X: Inputs, latent: Latent
) -> tuple[np.ndarray, np.ndarray]:
    """Return mean (n, ...) and covariance (n·L, n·L) of L latent values per sample."""
    mean, cov = map(torch.as_tensor, outputs.joint(X, across_outputs=True))
    n_outputs = mean.shape[1]
    offset = latent(torch.zeros_like(mean[:1]))

    def on_last_axis(matrix: Tensor) -> Tensor:
        """Apply the linear part of the map to rows (m, n·c); return (m, n·L)."""
        return (latent(matrix.reshape(-1, n_outputs)) - offset).reshape(len(matrix), -1)

    half = on_last_axis(cov)
    return latent(mean).numpy(), on_last_axis(half.mT).numpy()


def joint_draws(
    outputs: BatchedOutputs,
    X: Inputs,
    n_samples: int,
    random_state: RandomState,
    latent: Latent,
) -> np.ndarray:
    """Return draws (n, ..., n_samples) of the latent values."""
    seed = as_seed("random_state", random_state)
    draws = torch.as_tensor(outputs.sample(X, n_samples, seed)).mT  # (n, s, c)
    values = latent(draws.reshape(-1, draws.shape[-1]))
    return values.reshape(*draws.shape[:2], *values.shape[1:]).movedim(1, -1).numpy()


def check_one(**asked: bool) -> None:
    """Raise ValueError if more than one kind of variance is requested."""
    names = [name for name, is_asked in asked.items() if is_asked]
    if len(names) > 1:
        raise ValueError(
            f"{' and '.join(names)} cannot both be True. Use {names[-1]}, which "
            "includes the other."
        )
