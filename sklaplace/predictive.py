"""Predictives: from the posterior over weights to a Gaussian over outputs.

The linearised predictive (``glm``) is exact for the linearised network:
``f(x) ~ N(f* + J (mean - weights), J Σ Jᵀ)`` (Immer, Korzepa and Bauer 2021,
"Improving predictions of Bayesian neural nets via local linearization").
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from sklaplace.forward import Forward
from sklaplace.jacobians import Jacobian, backpropagate_in_parts, centring, joined
from sklaplace.layouts import Layout
from sklaplace.posterior import GaussianPosterior
from sklaplace.structures import Projection


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


@dataclass
class Linearised:
    """One batch of rows, linearised at the network's weights: ready for questions.

    Attributes
    ----------
    f : Tensor of shape (b, k)
        Outputs that the Jacobian has rows for.
    jacobian : Jacobian
        k rows for each row of the batch.
    """

    f: Tensor
    jacobian: Jacobian
    _projection: Projection | None = None

    def gaussian(
        self, posterior: GaussianPosterior, *, diagonal: bool
    ) -> tuple[Tensor, Tensor]:
        """Mean (b, k) and covariance (b, k, k), or variances (b, k)."""
        mean = linearised_mean(posterior, self.f, self.jacobian)
        if diagonal:
            return mean, posterior.functional_variance(self.jacobian)
        return mean, posterior.functional_covariance(self.jacobian)

    def projected(
        self, posterior: GaussianPosterior, *, diagonal: bool
    ) -> tuple[Tensor, Tensor]:
        """The same for many prior precisions: rows are rotated into a basis once."""
        if self._projection is None or (
            self._projection.structure is not posterior.structure
        ):
            self._projection = posterior.structure.project(self.jacobian)
        mean = linearised_mean(posterior, self.f, self.jacobian)
        ask = self._projection.variance if diagonal else self._projection.covariance
        return mean, ask(posterior.prior_precision, posterior.scale)


def linearise(
    forward: Forward, x: Any, layout: Layout, *, diagonal: bool, centred: bool
) -> Iterator[Linearised]:
    """Rows of a batch, some outputs at a time if ``diagonal`` and they are many.

    ``centred`` takes the mean over outputs off each output.
    """
    cotangents = centring if centred else None
    parts = backpropagate_in_parts(forward, x, layout, cotangents)
    if not diagonal:
        parts = iter([joined(list(parts))])
    for f, jacobian in parts:
        outputs = f - f.mean(1, keepdim=True) if centred else f
        first = jacobian.first_column
        yield Linearised(outputs[:, first : first + jacobian.n_columns], jacobian)


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
    layout = posterior.layout
    parts = linearise(forward, x, layout, diagonal=diagonal, centred=centred)
    return side_by_side(part.gaussian(posterior, diagonal=diagonal) for part in parts)


def side_by_side(parts: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Means and variances of some outputs each, as those of all."""
    means, spreads = zip(*parts, strict=True)
    if len(means) == 1:
        return means[0], spreads[0]
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
