"""Newton's method for a regularised, convex loss over the weights of a head.

Steps come from conjugate gradients, which need products with the curvature alone;
far from the minimum they are cut short (Dembo, Eisenstat and Steihaug 1982, "Inexact
Newton methods").
"""

import warnings
from collections.abc import Callable
from typing import Protocol

import torch
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor

from sklaplace.core.linalg import conjugate_gradients, solve_psd

Operator = Callable[[Tensor], Tensor]

# The method ends by one more step once the loss can fall by no more than this share
# of itself: what that step then leaves is at the level of rounding.
ROUNDING = 1e-13
GRADIENT_TOLERANCE = 1e-6
MAX_STEPS = 200
# The share of a step that conjugate gradients may leave out, in the norm of the
# preconditioner: far from the minimum, and close to it. A step reduces what the loss
# can fall by to the square of that share, so that more is wasted work.
FORCING = 0.1, 1e-5
# Where the curvature is small enough to be written out, conjugate gradients that need
# many iterations are given up for its Cholesky factor.
MAX_DENSE = 1500
MAX_CG = 500
MAX_CG_IF_DENSE = 200
# iterations that take longer than a new preconditioner
STALE = 30
# a gradient below this is none
SMALLEST = torch.finfo(torch.float64).tiny


class Regularised(Protocol):
    """A convex loss of outputs that are affine in the weights, and a prior."""

    @property
    def dtype(self) -> torch.dtype:
        """In which products with the curvature are quick."""

    def objective(
        self, theta: Tensor, rho: Tensor, prior_mean: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Regularised loss, its gradient (P,), and the outputs (N, c)."""

    def curvature_at(self, f: Tensor, rho: Tensor, dtype: torch.dtype) -> Operator:
        """``v -> (H + diag ρ) v``."""

    def dense_curvature_at(self, f: Tensor, rho: Tensor) -> Tensor:
        """``H + diag ρ``, (P, P)."""

    def preconditioner_at(self, f: Tensor, rho: Tensor, dtype: torch.dtype) -> Operator:
        """``v -> (H + diag ρ)⁻¹ v``, roughly."""


def minimum(
    head: Regularised, rho: Tensor, mean: Tensor, start: Tensor, tolerance: float
) -> Tensor:
    """Weights (P,) of the least regularised loss.

    Parameters
    ----------
    head : Regularised
        The loss and its derivatives.
    rho : Tensor of shape (P,)
        Prior precisions in units of the loss.
    mean : Tensor of shape (P,)
        Prior mean.
    start : Tensor of shape (P,)
        Where to begin.
    tolerance : float
        Share of itself that the loss may still lack before the last step.

    Warns
    -----
    ConvergenceWarning
        If rounding stops the descent before the gradient is small.
    """
    theta = start
    value, gradient, f = head.objective(theta, rho, mean)
    # a loss that is small altogether, in the unit of its targets, is no zero
    unit = min(1.0, max(float(value), SMALLEST))
    steps = _Steps(head, rho)
    for _ in range(MAX_STEPS):
        step, has_arrived = steps.at(f, gradient)
        # half of this, the Newton decrement, is what the loss can still fall by
        share = float(-(gradient @ step)) / (unit + float(value))
        if share <= tolerance:
            if has_arrived:
                return theta + step
            break
        steps.refine(share)
        trial = _descend(head, theta, step, (value, gradient), rho, mean)
        if trial is None:
            break
        theta, (value, gradient, f) = trial
    if not gradient.abs().max() <= GRADIENT_TOLERANCE * max(unit, float(value)):
        warnings.warn(
            "The weights could not be refitted to full precision; gradient "
            f"{float(gradient.abs().max()):.1e}. A larger prior_precision, or "
            "features of similar size, would help.",
            ConvergenceWarning,
            stacklevel=2,
        )
    return theta


class _Steps:
    """Newton steps, with a preconditioner that is kept while it serves."""

    def __init__(self, head: Regularised, rho: Tensor) -> None:
        self._head, self._rho = head, rho
        self._dtype = head.dtype
        self._precision = FORCING[0]
        self._precondition: Operator | None = None
        self._is_dense = False

    def refine(self, share: float) -> None:
        """Ask for better steps, the less the loss can still fall."""
        self._precision = min(FORCING[0], max(FORCING[1], share**0.5))

    def at(self, f: Tensor, gradient: Tensor) -> tuple[Tensor, bool]:
        """``-(H + diag ρ)⁻¹ gradient``, (P,), roughly, and whether it is that."""
        if not self._is_dense:
            step, has_arrived = self._iterated(f, gradient)
            if not has_arrived and self._dtype != torch.float64:
                # what single precision cannot tell apart, or hold
                self._dtype = torch.float64
                step, has_arrived = self._iterated(f, gradient)
            self._is_dense = not has_arrived and len(self._rho) <= MAX_DENSE
        if self._is_dense:
            dense = self._head.dense_curvature_at(f, self._rho)
            return -solve_psd(dense, gradient), True
        return step, has_arrived

    def _iterated(self, f: Tensor, gradient: Tensor) -> tuple[Tensor, bool]:
        """The same by conjugate gradients, and whether they have arrived."""
        head, rho, dtype = self._head, self._rho, self._dtype
        if self._precondition is None:
            self._precondition = head.preconditioner_at(f, rho, dtype)
        # the unit of the gradient may be beyond what float32 holds
        size = gradient.abs().max().clamp(min=SMALLEST)
        step, n_iterations = conjugate_gradients(
            head.curvature_at(f, rho, dtype),
            self._precondition,
            (-gradient / size).to(dtype),
            MAX_CG_IF_DENSE if len(rho) <= MAX_DENSE else MAX_CG,
            self._precision,
        )
        if n_iterations is None or n_iterations > STALE:
            self._precondition = None
        return step.double() * size, n_iterations is not None


def _descend(
    head: Regularised,
    theta: Tensor,
    step: Tensor,
    now: tuple[Tensor, Tensor],
    rho: Tensor,
    mean: Tensor,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]] | None:
    """The first of ever shorter steps that descends (Armijo); None if none does."""
    value, gradient = now
    slope = gradient @ step
    noise = 1e-14 * value.abs()  # rounding hides decreases close to the minimum
    for halvings in range(40):
        size = 0.5**halvings
        trial = head.objective(theta + size * step, rho, mean)
        if trial[0] <= value + 1e-4 * size * slope + noise:
            return theta + size * step, trial
    return None
