"""Latent values: outputs in the user's units, with covariances if requested.

Latent values are class logits for classifiers, and noise-free targets in the units of
``y`` for regressors.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from sklaplace.core.checks import as_seed
from sklaplace.core.random import RandomState
from sklaplace.core.trees import Inputs
from sklaplace.estimators.predicting.output_model import BatchedOutputs

# affine map from moments of outputs (m, c) to moments of latent values (m, ...)
Latent = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def moments(
    outputs: BatchedOutputs, X: Inputs, latent: Latent, full_cov: bool, joint: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return means (n, ...), and variances or covariances of the latent values.

    For L values per sample, joint covariances have the shape (n·L, n·L). If the map is
    ``A f + a``, they are ``A C Aᵀ`` for the covariances ``C`` of the outputs.
    """
    if not joint:
        mean, variance = outputs.latent(X, full_cov, latent)
        return mean, variance
    output_mean, cov = map(torch.as_tensor, outputs.joint(X, across_outputs=True))
    n_outputs = output_mean.shape[1]
    # `a`, the values for outputs of zero
    offset = values(latent, torch.zeros_like(output_mean[:1]))

    def on_last_axis(matrix: Tensor) -> Tensor:
        """Apply ``A`` to rows (m, n·c), and return (m, n·L)."""
        mapped = values(latent, matrix.reshape(-1, n_outputs))
        return (mapped - offset).reshape(len(matrix), -1)

    product = on_last_axis(cov)  # C Aᵀ
    return values(latent, output_mean).numpy(), on_last_axis(product.mT).numpy()


def values(latent: Latent, outputs: Tensor) -> Tensor:
    """Return the latent values (m, ...) of outputs (m, c)."""
    # the means of Gaussians without variance
    return latent(outputs, torch.zeros_like(outputs))[0]


def joint_draws(
    outputs: BatchedOutputs,
    X: Inputs,
    n_samples: int,
    random_state: RandomState,
    latent: Latent,
) -> np.ndarray:
    """Return draws (n, ..., n_samples) of the latent values.

    The draws of all samples are joint. ``random_state`` determines their seed.
    """
    seed = as_seed("random_state", random_state)
    draws = torch.as_tensor(outputs.sample(X, n_samples, seed)).mT  # (n, s, c)
    drawn = values(latent, draws.reshape(-1, draws.shape[-1]))  # (n·s, ...)
    return drawn.reshape(*draws.shape[:2], *drawn.shape[1:]).movedim(1, -1).numpy()


def check_one(**asked: bool) -> None:
    """Raise ValueError if more than one kind of variance is requested."""
    names = [name for name, is_asked in asked.items() if is_asked]
    if len(names) > 1:
        raise ValueError(
            f"{' and '.join(names)} cannot both be True. Use {names[-1]}, which "
            "includes the other."
        )
