"""Evidence: the prior precision and noise that make the training rows most probable.

At the network's own weights it is maximised by Newton's method in ``(log δ, log σ)``;
at the refitted head by MacKay's fixed point ``δ = γ / ‖θ(δ) - μ₀‖²``,
``σ² = ‖r‖² / (T (n - γ))`` (MacKay 1992, "Bayesian interpolation", section 4).
"""

import math
import warnings
from dataclasses import replace

import numpy as np
import torch
from scipy.optimize import minimize
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor

from sklaplace.curvature import priors
from sklaplace.posterior.gaussian import GaussianPosterior, Hyperparameters
from sklaplace.posterior.tuning.task import (
    SMALLEST,
    TuningProblem,
    clamped,
    require_head,
)

# Bounds of log δ and log σ around the units that the data set, see `_units`.
LOG_BOUND = 20.0
# largest number of hyperparameters that Newton's method takes; L-BFGS above
MAX_NEWTON_SIZE = 32
MAX_EVALUATIONS = 100
# length of the last Newton step in log δ and log σ
STEP_TOLERANCE = 1e-6
MAX_FIXED_POINT = 100
FIXED_POINT_TOLERANCE = 3e-5
# σ that training rows can ask for, as a share of the targets' spread: a head that
# fits all of them would have none.
SMALLEST_NOISE = 1e-4


def maximise_evidence(task: TuningProblem) -> GaussianPosterior:
    """Evidence at the refitted head, or as it stands where ``refine`` is False."""
    _warn_if_overstated(task.posterior)
    if task.refine is False or (task.refine == "auto" and task.head is None):
        return marglik(
            task.posterior, free_prior=task.free_prior, free_noise=task.free_noise
        )
    return marglik_refitted(task)


def _warn_if_overstated(posterior: GaussianPosterior) -> None:
    """Warn of curvature that is left out, which the evidence takes for a good fit."""
    structure = posterior.structure
    if structure.evidence_is_biased_up:
        warnings.warn(
            f"hessian_structure={structure.kind!r} leaves out what its points cannot "
            "tell, and the evidence grows by that: prior_precision will be too small. "
            "Use more points, prior_precision='validation', or hessian_structure="
            "'variational', whose evidence is a lower bound.",
            UserWarning,
            stacklevel=2,
        )


# ----------------------------------------------------- at the weights as they are
def marglik(
    posterior: GaussianPosterior, *, free_prior: bool = True, free_noise: bool = True
) -> GaussianPosterior:
    """Maximise the evidence at the posterior's own mean (empirical Bayes).

    Parameters
    ----------
    posterior : GaussianPosterior
        Its prior precision fixes the prior structure, its values are the start.
    free_prior, free_noise : bool, default=True
        What to choose. Noise counts only where the likelihood has some.

    Returns
    -------
    GaussianPosterior
        The same curvature and mean under the best hyperparameters.

    Warns
    -----
    ConvergenceWarning
        If the maximum was not found.

    Notes
    -----
    Newton's method in the logarithms, on eigenvalues that are computed once:
    O(P) and rarely more than ten evaluations. Not to be trusted at weights that
    were not trained under this very prior; see `LinearHead`.
    """
    free_noise = free_noise and posterior.likelihood.has_noise
    if not (free_prior or free_noise):
        return posterior
    start = (
        posterior.replace(prior_precision=_first_guess(posterior))
        if free_prior
        else posterior
    )

    is_scalar = start.prior_precision.ndim == 0 and start.structure.is_spectral
    kind = _ScalarEvidence if is_scalar else _Evidence
    objective = kind(start, free_prior, free_noise)
    first = _logs(start.hyperparameters, free_prior, free_noise)
    best = _minimise(objective, (first - objective.units).cpu().numpy())
    return replace(start, hyperparameters=objective.hyperparameters(best))


class _Evidence:
    """Negative log evidence in the logarithms of what is free, in units of their own.

    Attributes
    ----------
    units : Tensor of shape (n,)
        Logarithms at which ``v`` is zero.
    """

    def __init__(
        self, posterior: GaussianPosterior, free_prior: bool, free_noise: bool
    ) -> None:
        self.posterior, self._free = posterior, (free_prior, free_noise)
        self.units = _units(posterior, free_prior, free_noise)

    def hyperparameters(self, v: np.ndarray | Tensor) -> Hyperparameters:
        """Hyperparameters at a point."""
        logs = torch.as_tensor(v).to(self.units) + self.units
        return _with_logs(self.posterior.hyperparameters, logs, *self._free)

    def __call__(self, v: Tensor) -> Tensor:
        """Value at ``v``, (), differentiable."""
        return -self.posterior.log_marginal_likelihood(self.hyperparameters(v))

    def derivatives(self, v: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
        """Value, gradient and Hessian at ``v``, by automatic differentiation."""
        with torch.enable_grad():
            point = torch.as_tensor(v).to(self.units).requires_grad_()
            value = self(point)
            (gradient,) = torch.autograd.grad(value, point, create_graph=True)
            rows = [
                torch.autograd.grad(entry, point, retain_graph=True)[0]
                for entry in gradient
            ]
        hessian = torch.stack(rows).cpu().numpy()
        return float(value.detach()), gradient.detach().cpu().numpy(), hessian


class _ScalarEvidence(_Evidence):
    """The same for one prior precision, in closed form.

    With eigenvalues ``k = scale·e``, ``w = k / (k + δ)`` and ``u = 1 - w``, the
    logarithm of the determinant has the derivatives ``Σu`` in log δ and ``Σw`` in
    log scale, and second ones ``±Σuw`` (MacKay 1992, "Bayesian interpolation",
    section 4). Noise has ``scale = 1/(σ²T)``, or ``1/(σ⁴T)`` for a curvature of order
    two, and ``log σ`` for every target.
    """

    def __init__(
        self, posterior: GaussianPosterior, free_prior: bool, free_noise: bool
    ) -> None:
        super().__init__(posterior, free_prior, free_noise)
        h, fit = posterior.hyperparameters, posterior.data_fit
        self._eigenvalues = posterior.structure.eigenvalues.cpu().numpy()
        self._start = float(h.prior_precision), float(h.sigma_noise)
        self._scale = float(posterior.scale)
        self._scatter = float(((posterior.mean - h.prior_mean) ** 2).sum())
        self._loss_scale = float(posterior.loss_scale)
        self._order = posterior.curvature_order
        self._loss, self._n = float(fit.loss), float(fit.n_targets)
        normalizer = posterior.likelihood.log_normalizer(h.sigma_noise)
        self._normalizer = self._n * float(normalizer)
        self._origin = self.units.cpu().numpy()

    def derivatives(self, v: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
        """Value, gradient and Hessian at ``v``."""
        free_prior, free_noise = self._free
        delta, log_noise = self._start[0], 0.0
        logs = v + self._origin
        if free_prior:
            delta = math.exp(logs[0])
        if free_noise:  # relative to where it started
            log_noise = logs[-1] - math.log(self._start[1])
        order = self._order
        scale = self._scale * math.exp(-2 * order * log_noise)
        precision = scale * self._eigenvalues + delta
        u = delta / precision
        sum_u, sum_uw = u.sum(), (u * (1 - u)).sum()
        sum_w, scatter = len(u) - sum_u, delta * self._scatter
        loss = self._loss * self._loss_scale * math.exp(-2 * log_noise)
        logdet = np.log(precision).sum() - len(u) * math.log(delta)
        value = loss + self._normalizer + self._n * log_noise + (logdet + scatter) / 2
        gradient = [(scatter - sum_w) / 2, self._n - 2 * loss - order * sum_w]
        hessian = [
            [(sum_uw + scatter) / 2, order * sum_uw],
            [order * sum_uw, 4 * loss + 2 * order**2 * sum_uw],
        ]
        kept = [i for i, is_free in enumerate(self._free) if is_free]
        return (
            float(value),
            np.array(gradient)[kept],
            np.array(hessian)[np.ix_(kept, kept)],
        )


def _first_guess(posterior: GaussianPosterior) -> Tensor:
    """One step of MacKay's fixed point from the point where γ = P/2."""
    delta = posterior.prior_precision
    half = _group_sum(posterior, torch.full_like(posterior.mean, 0.5), delta)
    usual = _usual_precision(posterior)
    guess = half / _group_scatter(posterior, delta)
    return torch.clamp(guess, usual * math.exp(-10), usual * math.exp(10))


def _units(posterior: GaussianPosterior, free_prior: bool, free_noise: bool) -> Tensor:
    """Logarithms of the δ and σ that the scale of weights and residuals suggests.

    Bounds are set around these, so that the unit of the targets changes nothing.
    """
    h = posterior.hyperparameters
    delta = _usual_precision(posterior).expand_as(h.prior_precision)
    return _logs(replace(h, prior_precision=delta), free_prior, free_noise)


def _usual_precision(posterior: GaussianPosterior) -> Tensor:
    """A scalar precision of the order that the weights have, (), or the curvature."""
    scatter = ((posterior.mean - posterior.hyperparameters.prior_mean) ** 2).sum()
    if scatter > SMALLEST:
        return clamped(len(posterior.mean) / 2 / scatter)
    curvature = posterior.scale * posterior.structure.eigenvalues.mean()
    return clamped(curvature) if curvature > SMALLEST else torch.ones_like(scatter)


def _logs(h: Hyperparameters, free_prior: bool, free_noise: bool) -> Tensor:
    parts = [h.prior_precision.log().reshape(-1)] * free_prior
    return torch.cat(parts + [h.sigma_noise.log().reshape(1)] * free_noise)


def _with_logs(
    h: Hyperparameters, v: Tensor, free_prior: bool, free_noise: bool
) -> Hyperparameters:
    n = h.prior_precision.numel() * free_prior
    if free_prior:
        h = replace(h, prior_precision=v[:n].reshape(h.prior_precision.shape).exp())
    return replace(h, sigma_noise=v[n].exp()) if free_noise else h


def _minimise(objective: _Evidence, start: np.ndarray) -> np.ndarray:
    method = _newton if len(start) <= MAX_NEWTON_SIZE else _lbfgs
    best, converged = method(objective, start.clip(-LOG_BOUND, LOG_BOUND))
    if not converged:
        warnings.warn(
            "The evidence was not maximised to full precision; its value is valid, "
            "but a better prior_precision may exist. prior_precision='validation' "
            "needs no maximum of the evidence.",
            ConvergenceWarning,
            stacklevel=4,
        )
    return best


def _derivatives(
    objective: _Evidence, v: np.ndarray
) -> tuple[float, np.ndarray, np.ndarray]:
    """Value, gradient and Hessian at ``v``: one evaluation."""
    return objective.derivatives(v)


def _newton(objective: _Evidence, v: np.ndarray) -> tuple[np.ndarray, bool]:
    """Newton's method with absolute eigenvalues, short steps and bounds.

    Saddles and regions of negative curvature repel, since the sign of each
    eigenvalue is dropped; steps that do not descend are halved.
    """
    value, gradient, hessian = _derivatives(objective, v)
    for _ in range(MAX_EVALUATIONS):
        at_bound = (np.abs(v) >= LOG_BOUND) & (gradient * np.sign(v) < 0)
        step = _newton_step(np.where(at_bound, 0, gradient), hessian, at_bound)
        size = float(np.abs(step).max())
        if size <= STEP_TOLERANCE:
            return v, True
        for _ in range(30):
            trial = (v + step).clip(-LOG_BOUND, LOG_BOUND)
            found = _derivatives(objective, trial)
            if found[0] <= value + 1e-12 * abs(value):
                break
            step = step / 2
        else:
            # short steps that only rounding keeps from descending are the end
            return v, size <= math.sqrt(STEP_TOLERANCE)
        v, (value, gradient, hessian) = trial, found
    return v, False


def _newton_step(
    gradient: np.ndarray, hessian: np.ndarray, at_bound: np.ndarray
) -> np.ndarray:
    """Descent step of at most three units in any logarithm, zero at bounds."""
    inside = ~at_bound
    values, vectors = np.linalg.eigh(hessian * np.outer(inside, inside))
    sizes = np.abs(values)
    floor = 1e-8 * max(sizes.max(), 1e-300)
    step: np.ndarray = -vectors @ ((vectors.T @ gradient) / sizes.clip(floor))
    step *= 3 / max(3, np.abs(step).max())
    return step


def _lbfgs(objective: _Evidence, v: np.ndarray) -> tuple[np.ndarray, bool]:
    """Bounded L-BFGS for one precision per parameter or many layers."""

    def evaluate(x: np.ndarray) -> tuple[float, np.ndarray]:
        with torch.enable_grad():
            point = torch.as_tensor(x).to(objective.units).requires_grad_()
            value = objective(point)
            (gradient,) = torch.autograd.grad(value, point)
        return float(value.detach()), gradient.cpu().numpy()

    result = minimize(
        evaluate,
        v,
        jac=True,
        method="L-BFGS-B",
        bounds=[(-LOG_BOUND, LOG_BOUND)] * len(v),
        options={"maxiter": 1000, "maxfun": 2000, "ftol": 1e-13, "gtol": 1e-6},
    )
    return result.x, result.status == 0


# ---------------------------------------------------------- at the refitted head
def marglik_refitted(task: TuningProblem) -> GaussianPosterior:
    """Maximise the evidence at the head that is most probable under each prior."""
    head = require_head(task.head)
    posterior = task.posterior
    if not (task.free_prior or task.free_noise):
        return head.refit(posterior)
    if task.free_prior:
        posterior = posterior.replace(prior_precision=_first_guess(posterior))
    posterior = head.refit(posterior)
    free = task.free_prior, task.free_noise
    units = _units(task.posterior, *free)
    history: list[Tensor] = []
    best = posterior
    for _ in range(MAX_FIXED_POINT):
        now = _logs(posterior.hyperparameters, *free) - units
        then = _logs(_mackay(posterior, task), *free) - units
        then = then.clamp(-LOG_BOUND, LOG_BOUND)
        if (then - now).abs().max() < FIXED_POINT_TOLERANCE:
            return posterior
        history.append(torch.stack([now, then]))
        v = _accelerated(history) if _may_accelerate(history) else then
        h = _with_logs(posterior.hyperparameters, v + units, *free)
        posterior = head.refit(replace(posterior, hyperparameters=h))
        if len(history) > MAX_FIXED_POINT // 3:  # it may not be reached
            best = max(best, posterior, key=_value)
    warnings.warn(
        "The fixed point of the evidence was not reached; prior_precision has the "
        "highest evidence that was found. prior_precision='validation' needs none.",
        ConvergenceWarning,
        stacklevel=2,
    )
    return best


def _value(posterior: GaussianPosterior) -> float:
    return float(posterior.log_marginal_likelihood())


def _mackay(posterior: GaussianPosterior, task: TuningProblem) -> Hyperparameters:
    """MacKay's updates of prior precision and noise."""
    h = posterior.hyperparameters
    delta, order = h.prior_precision, posterior.curvature_order
    gamma = _determined(posterior)
    trace_correction = posterior.precision.trace_correction()
    if task.free_prior:
        scatter = _group_scatter(posterior, delta)
        # δ² scatter = δ γ + δ trace_correction, whose last term does not depend on δ
        root = (gamma**2 + 4 * scatter * delta * trace_correction).sqrt()
        h = replace(h, prior_precision=clamped((gamma + root) / (2 * scatter)))
    if task.free_noise:
        n, residual = posterior.data_fit.n_targets, 2 * posterior.data_fit.loss
        squares = residual / h.temperature + order * trace_correction * h.sigma_noise**2
        # γ reaches n only where every target is fitted; keep a tenth of a row
        variance = squares / (n - order * gamma.sum()).clamp(min=0.1)
        floor = SMALLEST_NOISE**2 * require_head(task.head).target_variance()
        h = replace(h, sigma_noise=clamped(torch.maximum(variance, floor).sqrt()))
    return h


def _determined(posterior: GaussianPosterior) -> Tensor:
    """MacKay's γ of the weights that share a prior precision, shaped like it."""
    delta = posterior.prior_precision
    if delta.ndim == 0:
        return posterior.precision.effective_dimension()
    gamma = posterior.precision.effective_parameters()
    gamma = gamma.masked_fill(gamma < 1e-12, 0)  # nothing but rounding
    return _group_sum(posterior, gamma, delta)


def _may_accelerate(history: list[Tensor]) -> bool:
    """Every step for one hyperparameter; in turn with plain steps for several.

    Secants of coupled hyperparameters can cycle, plain steps do not (Steffensen).
    """
    n = len(history)
    return history[0].shape[1] == 1 or n % (2 if n <= 30 else 4) == 0


def _accelerated(history: list[Tensor]) -> Tensor:
    """Next point from (point, image) pairs, (2, n) each, by secant steps.

    One hyperparameter alone is bracketed: its image lies above it on one side of
    the fixed point and below it on the other, and no step leaves the bracket.
    """
    now, then = history[-1].unbind()
    if len(history) == 1:
        return then
    before, image = history[-2].unbind()
    slope = ((then - image) / (now - before)).nan_to_num(0.0, 0.0, 0.0)
    step = ((then - now) / (1 - slope.clamp(-1, 0.99))).clamp(-3, 3)
    target = (now + step).clamp(-LOG_BOUND, LOG_BOUND)
    if len(now) > 1:
        return target
    low = max([float(p) for p, q in history if q > p], default=-LOG_BOUND)
    high = min([float(p) for p, q in history if q < p], default=LOG_BOUND)
    inside = low < float(target) < high or low >= high
    return target if inside else torch.full_like(target, (low + high) / 2)


def _group_sum(posterior: GaussianPosterior, values: Tensor, delta: Tensor) -> Tensor:
    """Sum of values (P,) over the weights that share a prior precision."""
    name = priors.structure_of(delta, posterior.layout)
    if name == "scalar":
        return values.sum()
    if name == "diag":
        return values
    return torch.stack([piece.sum() for piece in posterior.layout.split(values)])


def _group_scatter(posterior: GaussianPosterior, delta: Tensor) -> Tensor:
    """Squared distance to the prior mean over weights that share a precision."""
    squares = (posterior.mean - posterior.hyperparameters.prior_mean) ** 2
    return _group_sum(posterior, squares, delta).clamp(min=SMALLEST)
