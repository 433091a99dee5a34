"""Predictives: from the posterior over weights to a Gaussian over outputs.

The linearised predictive (``glm``) is exact for the linearised network:
``f(x) ~ N(f* + J (mean - weights), J Σ Jᵀ)`` (Immer, Korzepa and Bauer 2021,
"Improving predictions of Bayesian neural nets via local linearization").
"""

from typing import Any, Protocol

import torch
from torch import Tensor

from sklaplace.forward import Forward
from sklaplace.jacobians import Jacobian, backpropagate_in_parts, centring, joined
from sklaplace.posterior import GaussianPosterior


def linearised_mean(
    posterior: GaussianPosterior, f: Tensor, jacobian: Jacobian
) -> Tensor:
    """Mean of the linearised outputs, (b, c), float64.

    ``f`` and ``jacobian`` are those of the network's own weights.
    """
    if not posterior.is_refitted:
        return f.double()
    shift = (posterior.mean - posterior.weights).unsqueeze(-1)
    return f.double() + jacobian.matmul(shift.to(jacobian.dtype)).squeeze(-1)


def glm(
    posterior: GaussianPosterior,
    forward: Forward,
    x: Any,
    *,
    diagonal: bool = False,
    centred: bool = False,
) -> tuple[Tensor, Tensor]:
    """Mean (b, c) and covariance (b, c, c) of the linearised outputs, float64.

    Parameters
    ----------
    posterior : GaussianPosterior
        Over the weights of the network.
    forward : Forward
        The network, inside ``forward.frozen()``.
    x : Tensor, or dict, list or tuple of tensors
        One batch of b rows.
    diagonal : bool, default=False
        Return variances (b, c) in place of covariances, which then never exist.
    centred : bool, default=False
        Take the mean over outputs off each output, which a softmax does not see.
        It can be uncertain by orders of magnitude more than the rest.

    Notes
    -----
    Costs one forward pass and, unless only the last layer is random, c backward
    columns down to the selected weights.
    """
    cotangents = centring if centred else None
    parts = backpropagate_in_parts(forward, x, posterior.layout, cotangents)
    if not diagonal:
        parts = iter([joined(list(parts))])
    means, spreads = [], []
    for f, jacobian in parts:
        columns = f - f.mean(1, keepdim=True) if centred else f
        columns = columns[:, jacobian.first_column :][:, : jacobian.n_columns]
        means.append(linearised_mean(posterior, columns, jacobian))
        ask = (
            posterior.functional_variance
            if diagonal
            else posterior.functional_covariance
        )
        spreads.append(ask(jacobian))
    return torch.cat(means, 1), torch.cat(spreads, 1)


class Predictive(Protocol):
    """From posterior, network and rows to a Gaussian over outputs, as `glm`."""

    def __call__(
        self,
        posterior: GaussianPosterior,
        forward: Forward,
        x: Any,
        *,
        diagonal: bool = False,
        centred: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Mean, and covariance or variance."""


PREDICTIVES: dict[str, Predictive] = {"glm": glm}
