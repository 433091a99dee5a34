"""Inexact Newton method for a regularised, convex loss of a linear model.

Governing formula: ``θ ← θ - t (H + diag ρ)⁻¹ ∇L(θ)``. Backtracking selects the step
size t. The steps are computed by conjugate gradients, which need only products with the
curvature. Steps far from the minimum are less precise (Dembo, Eisenstat and Steihaug
1982, "Inexact Newton methods").
"""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor

from sklaplace.core.checks import warn_user
from sklaplace.core.linalg import conjugate_gradients, solve_psd

Operator = Callable[[Tensor], Tensor]
Loss = tuple[Tensor, Tensor, Tensor]  # value, gradient (P,) and outputs (N, c)

# Relative decrease of the loss below which one last step is made. The step leaves only
# rounding errors.
ROUNDING = 1e-13
GRADIENT_TOLERANCE = 1e-6
MAX_STEPS = 200
# Relative residual of conjugate gradients far from the minimum and close to it. A step
# multiplies the excess of the loss over its minimum by the square of the residual, so a
# smaller residual would be wasted.
FORCING = 0.1, 1e-5
# Excess of the loss that the last step may leave, relative to the tolerance. With the
# tolerance ROUNDING, weights have errors of 1e-8 posterior standard deviations.
LAST = 1e-6
# Maximum number of parameters for which the dense curvature replaces conjugate
# gradients that need many iterations.
MAX_DENSE = 1500
MAX_CG = 500
MAX_CG_IF_DENSE = 200
# iterations beyond which a new preconditioner is cheaper
STALE = 30
# maximum tolerance for which the loss is computed in float64 and the better
# preconditioner is worth its cost
PRECISE = 1e-3
# iterations with the quick preconditioner after which the better one is worth its cost
MANY = 100
# smallest unit of losses and gradients
SMALLEST = torch.finfo(torch.float64).tiny


class Regularised(Protocol):
    """A convex loss of outputs that are affine in the weights, plus a prior term.

    The Hessian of the loss is ``H``, and ``ρ`` (P,) are the prior precisions in units
    of the loss.
    """

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of products with the curvature."""

    def objective(
        self, theta: Tensor, rho: Tensor, prior_mean: Tensor, dtype: torch.dtype
    ) -> Loss:
        """Return the objective, its gradient (P,) and outputs (N, c) in ``dtype``."""

    def curvature_at(self, f: Tensor, rho: Tensor, dtype: torch.dtype) -> Operator:
        """Return the function ``v -> (H + diag ρ) v``."""

    def dense_curvature_at(self, f: Tensor, rho: Tensor) -> Tensor:
        """Return ``H + diag ρ``, (P, P)."""

    def preconditioner_at(self, f: Tensor, rho: Tensor, dtype: torch.dtype) -> Operator:
        """Return the function ``v -> M⁻¹ v`` for ``M ≈ H + diag ρ``."""

    def quick_preconditioner_at(
        self, f: Tensor, rho: Tensor, dtype: torch.dtype
    ) -> Operator | None:
        """Return a preconditioner that costs less than a product to build, or None."""


def minimum(
    problem: Regularised, rho: Tensor, mean: Tensor, start: Tensor, tolerance: float
) -> Tensor:
    """Return the weights (P,) that minimise the regularised loss.

    Each Newton step is halved until the loss decreases. The search ends with one full
    step when steps no longer decrease the loss noticeably, or without this step when
    rounding prevents any decrease. `_Steps` computes the steps by conjugate gradients,
    with a higher precision closer to the minimum.

    Parameters
    ----------
    problem : Regularised
        The loss and its derivatives.
    rho : Tensor of shape (P,)
        Prior precisions in units of the loss.
    mean : Tensor of shape (P,)
        Prior mean.
    start : Tensor of shape (P,)
        Initial weights.
    tolerance : float
        When the quadratic model predicts a relative decrease of the loss below this
        value, one last step is made. Steps are no more precise than the tolerance
        requires.

    Warns
    -----
    ConvergenceWarning
        If rounding stops the descent before the gradient vanishes.
    """
    dtype = problem.dtype if tolerance > PRECISE else torch.float64

    def objective(weights: Tensor) -> Loss:
        return problem.objective(weights, rho, mean, dtype)

    theta, (value, gradient, f) = start, objective(start)
    if not (value.isfinite() and gradient.isfinite().all()):
        # perhaps beyond the range of float32
        dtype = torch.float64
        value, gradient, f = objective(start)
    # Decreases are relative to the loss, plus one so that a loss close to zero does not
    # demand too much. A loss that begins below one sets a smaller unit than one, since
    # the unit of the targets may make all losses small.
    unit = min(1.0, max(float(value), SMALLEST))
    steps = _Steps(problem, rho, tolerance)
    for _ in range(MAX_STEPS):
        step, has_converged = steps.at(f, gradient)
        # twice the relative decrease that the quadratic model predicts
        decrease = float(-(gradient @ step)) / (unit + float(value))
        if decrease <= tolerance:
            if has_converged:
                return theta + step
            break  # an inexact last step could do harm
        steps.set_precision(decrease)
        trial = _backtrack(objective, theta, step, (value, gradient, f))
        if trial is None:
            break
        theta, (value, gradient, f) = trial
    if not gradient.abs().max() <= GRADIENT_TOLERANCE * max(unit, float(value)):
        warn_user(
            "The weights could not be refitted to full precision: the gradient is "
            f"{float(gradient.abs().max()):.1e}. Use a larger prior_precision, or "
            "scale the features to similar size.",
            ConvergenceWarning,
        )
    return theta


class _Steps:
    """Newton steps that reuse a preconditioner as long as few iterations suffice."""

    def __init__(self, model: Regularised, rho: Tensor, tolerance: float) -> None:
        self._model, self._rho = model, rho
        self._dtype, self._tolerance = model.dtype, tolerance
        # a residual of √tolerance leaves about the tolerance of the excess of the loss
        self._loosest = self._precision = max(FORCING[0], tolerance**0.5)
        self._precondition: Operator | None = None
        # the better preconditioner is worth its cost for precise results
        self._is_quick = tolerance > PRECISE
        self._is_dense = False

    def set_precision(self, decrease: float) -> None:
        """Set the precision of the next step from the loss decrease of the last step.

        After a step, a fraction of the possible decrease remains. This fraction is the
        square of the step's precision. Close to the minimum, the next step decreases
        the loss by this remainder, which may be far below the tolerance.
        """
        # not zero after underflow, since it is a divisor
        remainder = max(decrease * self._precision**2, SMALLEST)
        # as precise as the last step must be, if the next step is the last
        enough = (LAST * self._tolerance / remainder) ** 0.5
        # a residual proportional to the gradient's norm, as √decrease is, makes the
        # convergence quadratic (Dembo et al. 1982)
        precision = max(FORCING[1], decrease**0.5, enough)
        self._precision = min(self._loosest, precision)

    def at(self, f: Tensor, gradient: Tensor) -> tuple[Tensor, bool]:
        """Return ``-(H + diag ρ)⁻¹ gradient``, (P,), and whether it has converged.

        ``ρ`` are the prior precisions, and ``f`` are the outputs at which the curvature
        ``H`` of the loss is evaluated. Conjugate gradients are used in the problem's
        dtype and, if they fail, in float64. If they fail again and the matrix is small,
        this step and all later steps solve with the dense matrix.
        """
        if not self._is_dense:
            step, has_converged = self._step_by_cg(f, gradient)
            if not has_converged and self._dtype != torch.float64:
                # beyond the precision or range of float32
                self._dtype = torch.float64
                step, has_converged = self._step_by_cg(f, gradient)
            self._is_dense = not has_converged and len(self._rho) <= MAX_DENSE
        if self._is_dense:
            dense = self._model.dense_curvature_at(f, self._rho)
            return -solve_psd(dense, gradient), True
        return step, has_converged

    def _step_by_cg(self, f: Tensor, gradient: Tensor) -> tuple[Tensor, bool]:
        """Return a step by conjugate gradients, and whether the step has converged.

        The gradient is divided by its largest entry, and the step is multiplied by it.
        After many iterations, the preconditioner is renewed or replaced by a better one
        for the next step.
        """
        model, rho, dtype = self._model, self._rho, self._dtype
        precondition = self._preconditioner_at(f)
        # the gradient may be beyond the range of float32
        size = gradient.abs().max().clamp(min=SMALLEST)
        step, n_iterations = conjugate_gradients(
            model.curvature_at(f, rho, dtype),
            precondition,
            (-gradient / size).to(dtype),
            MAX_CG_IF_DENSE if len(rho) <= MAX_DENSE else MAX_CG,
            self._precision,
        )
        if n_iterations is None or n_iterations > STALE:
            # the curvature has changed too much; the next step builds a new one
            self._precondition = None
        if n_iterations is None or n_iterations > MANY:
            self._is_quick = False
        return step.double() * size, n_iterations is not None

    def _preconditioner_at(self, f: Tensor) -> Operator:
        """Return the quick preconditioner while it suffices, then the better one.

        The quick one is built for each step. The better one is kept for later steps.
        """
        model, rho, dtype = self._model, self._rho, self._dtype
        quick = model.quick_preconditioner_at(f, rho, dtype) if self._is_quick else None
        self._is_quick = quick is not None  # the problem may have none
        if quick is not None:
            return quick
        if self._precondition is None:
            self._precondition = model.preconditioner_at(f, rho, dtype)
        return self._precondition


def _backtrack(
    objective: Callable[[Tensor], Loss], theta: Tensor, step: Tensor, loss: Loss
) -> tuple[Tensor, Loss] | None:
    """Halve a step until the loss decreases; return the new weights and their loss.

    ``loss`` is the loss at the weights ``theta``. The decrease must be at least 1e-4 of
    the decrease predicted by the slope (Armijo's condition, with its usual constant).
    Return None if 40 sizes, down to about 1e-12 of the step, have no success.
    """
    value, slope = loss[0], loss[1] @ step  # loss[1] is the gradient
    # rounding errors of the loss, about 50 in float64, hide decreases near the minimum
    rounding = 1e-14 * value.abs()
    for size in (0.5**halvings for halvings in range(40)):
        trial = objective(theta + size * step)
        if trial[0] <= value + 1e-4 * size * slope + rounding:
            return theta + size * step, trial
    return None


Array = np.ndarray[Any, Any]


def mean(low: Array, high: Array) -> Array:
    """Return ``(low + high) / 2`` without overflow."""
    return low / 2 + high / 2


def first_where(
    is_reached: Callable[[Array], Array],
    low: Array,
    high: Array,
    middle: Callable[[Array, Array], Array] = mean,
) -> Array:
    """Find the smallest values at which a condition holds, by bisection.

    Parameters
    ----------
    is_reached : callable
        Returns whether the condition holds at each value, as a boolean array. If the
        condition holds at a value, it holds at all larger values.
    low, high : ndarray of one shape
        Values at which the condition fails and holds, respectively.
    middle : callable
        Returns values between two bounds, or a bound if no value lies between them.

    Returns
    -------
    ndarray
        Smallest values; NaN where ``high`` is NaN.

    Notes
    -----
    The search bisects all intervals at the same time. It stops when `middle` finds no
    value between any two bounds. If `middle` is the mean, the bounds are then
    neighbouring floating-point numbers.
    """
    while True:
        between = middle(low, high)
        if not ((low < between) & (between < high)).any():
            return high
        reached = is_reached(between)
        low, high = np.where(reached, low, between), np.where(reached, between, high)
