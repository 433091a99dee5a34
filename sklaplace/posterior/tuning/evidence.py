"""Evidence: the prior precision and noise that maximise the marginal likelihood.

At the network's weights, Newton's method in ``(log δ, log σ)`` finds the maximum. For
the refitted linear model, MacKay's fixed point is ``δ = γ / ‖θ(δ) - μ₀‖²`` and
``σ² = ‖r‖² / (T (n - γ))`` (MacKay 1992, "Bayesian interpolation", section 4).
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy import ndarray
from scipy.optimize import minimize
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor
from torch.autograd import grad

from sklaplace.core.checks import warn_user
from sklaplace.core.newton import ROUNDING
from sklaplace.core.parallel import cached_property
from sklaplace.curvature import priors
from sklaplace.posterior.gaussian import GaussianPosterior, Hyperparameters
from sklaplace.posterior.tuning.problem import SMALLEST, TuningProblem, clamped

__all__ = ["marglik"]

# Bounds on log δ and log σ around typical values; see `NegativeEvidence`.
LOG_BOUND = 20.0
# Largest number of hyperparameters for Newton's method. L-BFGS handles larger numbers.
MAX_NEWTON_SIZE = 32
MAX_EVALUATIONS = 100
# Newton's method ends when a step in log δ and log σ is shorter than this.
STEP_TOLERANCE = 1e-6
MAX_FIXED_POINT = 100
# Bounds on the relative tolerance of refits for a single prior precision, far from the
# fixed point. The tolerance is (d / 10)² if the last change in log δ was d. Near the
# fixed point, and for the returned model, the tolerance is `ROUNDING`.
COARSEST, FINEST = 1e-3, 1e-7
FIXED_POINT_TOLERANCE = 3e-5
# Smallest ratio of the noise of a refitted linear model to the targets' standard
# deviation. A model that interpolates the training data would have zero noise.
SMALLEST_NOISE_TO_SPREAD = 1e-4


def maximise_evidence(problem: TuningProblem) -> GaussianPosterior:
    """Maximise the evidence, for the refitted linear model or at the network's weights.

    ``refine`` says whether to refit the model that is linear in the weights. The
    network's weights are used if ``refine`` is False, or if ``refine`` is "auto" and
    there is no linear model.
    """
    structure, refine = problem.posterior.structure, problem.refine
    if structure.evidence_is_biased_up:
        warn_user(
            f"hessian_structure={structure.name!r} ignores curvature that its points "
            "cannot represent. This biases the evidence upwards, so prior_precision "
            "will be too small. Use more points, prior_precision='validation', or "
            "hessian_structure='variational', whose evidence is a lower bound.",
        )
    if refine is True or (refine == "auto" and problem.linear_model is not None):
        return marglik_refitted(problem)
    return marglik(problem.posterior, problem.free_prior, problem.free_noise)


# ------------------------------------------------------ at the network's weights
def marglik(
    posterior: GaussianPosterior, free_prior: bool = True, free_noise: bool = True
) -> GaussianPosterior:
    """Maximise the evidence at the posterior's mean (empirical Bayes).

    Read more in the :doc:`User Guide </user_guide/prior>`.

    Parameters
    ----------
    posterior : GaussianPosterior
        Initial posterior. The search starts at the noise level of this posterior and
        keeps the ratios between its prior precisions.
    free_prior, free_noise : bool, default=True
        Whether to optimise the prior precision and the noise. ``free_noise`` is ignored
        if the likelihood has no noise.

    Returns
    -------
    GaussianPosterior
        Posterior with the best hyperparameters and the same curvature and mean.

    Warns
    -----
    ConvergenceWarning
        If the optimisation did not converge.

    See Also
    --------
    sklaplace.LaplaceClassifier : Uses this function for ``prior_precision="marglik"``.
    sklaplace.LaplaceClassifier.tune : Tune a fitted estimator.

    Notes
    -----
    Newton's method in the logarithms of the hyperparameters rarely needs more than ten
    evaluations. Each evaluation takes O(P) time, or O(P³) time for ``full`` with
    several prior precisions. Eigenvalues are computed once. The result is unreliable at
    weights trained under a different prior; see `LinearModel`.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from sklaplace import LaplaceClassifier
    >>> from sklaplace.posterior.tuning.evidence import marglik
    >>> X, y = load_iris(return_X_y=True)
    >>> model = LaplaceClassifier(prior_precision=1.0, random_state=0).fit(X, y)
    >>> best = marglik(model.posterior_)
    >>> bool(best.log_marginal_likelihood() > model.log_marginal_likelihood())
    True
    """
    free_noise = free_noise and posterior.likelihood.has_noise
    if not (free_prior or free_noise):
        return posterior
    objective = NegativeEvidence(posterior, free_prior, free_noise)
    start = objective.logs(objective.start().hyperparameters).cpu().numpy()
    method = _newton if len(start) <= MAX_NEWTON_SIZE else _lbfgs
    best, converged = method(objective, start.clip(-LOG_BOUND, LOG_BOUND))
    if not converged:
        warn_user(
            "The evidence was not maximised to full precision, so prior_precision may "
            "not be optimal. prior_precision='validation' does not need this maximum.",
            ConvergenceWarning,
        )
    return objective.at(best)


@dataclass(frozen=True)
class NegativeEvidence:
    """Negative log evidence as a function of the logarithms of free hyperparameters.

    The coordinates ``v`` are ``log(h / h₀)`` for each free hyperparameter ``h`` (δ or
    σ), with a typical value ``h₀`` for the data set. The bounds of ``v`` therefore do
    not depend on the unit of the targets.
    """

    posterior: GaussianPosterior
    free_prior: bool
    free_noise: bool

    @cached_property
    def _typical(self) -> Tensor:
        """Logarithms (n,) of typical values of the free hyperparameters."""
        h = self.posterior.hyperparameters
        delta = _typical_precision(self.posterior).expand_as(h.prior_precision)
        return self._free_logs(replace(h, prior_precision=delta))

    def _free_logs(self, h: Hyperparameters) -> Tensor:
        """Return the logarithms (n,) of the free hyperparameters."""
        delta = priors.by_group(h.prior_precision, h.groups)
        # lists times bools: empty for fixed hyperparameters
        logs = [delta.log().reshape(-1)] * self.free_prior
        return torch.cat(logs + [h.sigma_noise.log().reshape(1)] * self.free_noise)

    def logs(self, h: Hyperparameters) -> Tensor:
        """Return the coordinates (n,) of hyperparameters."""
        return self._free_logs(h) - self._typical

    def hyperparameters(self, v: ndarray | Tensor) -> Hyperparameters:
        """Return the hyperparameters at coordinates ``v``; fixed ones are unchanged.

        ``v`` (n,) are logarithms of the free hyperparameters divided by typical values.
        """
        values = (torch.as_tensor(v).to(self._typical) + self._typical).exp()
        h = self.posterior.hyperparameters
        if self.free_prior:  # one value per group, then any noise level
            # free_noise counts as one value or none
            delta = values[: len(values) - self.free_noise]
            delta = priors.by_tensor(delta, h.groups).reshape(h.prior_precision.shape)
            h = replace(h, prior_precision=delta)
        return replace(h, sigma_noise=values[-1]) if self.free_noise else h

    def at(self, v: ndarray | Tensor) -> GaussianPosterior:
        """Return the posterior under the hyperparameters at ``v``."""
        return self.posterior.replace(**vars(self.hyperparameters(v)))

    def start(self) -> GaussianPosterior:
        """Return the posterior after a single MacKay update, starting at γ = P/2.

        The update is ``δ = γ / ‖θ - μ₀‖²`` for each group of weights. The effective
        number γ of parameters is taken to be half the number of weights. The update is
        kept within a factor ``exp(10)`` of a typical prior precision, because
        ``θ - μ₀`` may vanish in a group.
        """
        posterior = self.posterior
        if not self.free_prior:
            return posterior
        gamma = _sum_by_precision(posterior, torch.full_like(posterior.mean, 0.5))
        low, high = (_typical_precision(posterior) * math.exp(k) for k in (-10, 10))
        delta = torch.clamp(gamma / _scatter_by_precision(posterior), low, high)
        return posterior.replace(prior_precision=delta)

    def derivatives(self, v: ndarray) -> tuple[float, ndarray, ndarray]:
        """Return the value, the gradient (n,) and the Hessian (n, n) at ``v`` (n,).

        A closed form is used if the log-determinant follows from eigenvalues of ``H``.
        Otherwise, all derivatives are computed by automatic differentiation. ``v`` are
        the logarithms of the n free hyperparameters divided by typical values.
        """
        posterior = self.posterior
        if posterior.prior_precision.ndim == 0 and posterior.structure.is_spectral:
            return self._spectral_derivatives(v)
        with torch.enable_grad():
            point = torch.tensor(v, requires_grad=True)
            value = -self.at(point).log_marginal_likelihood()
            (gradient,) = grad(value, point, create_graph=True)
            rows = [grad(entry, point, retain_graph=True)[0] for entry in gradient]
        return value.item(), gradient.detach().numpy(), torch.stack(rows).numpy()

    def _spectral_derivatives(self, v: ndarray) -> tuple[float, ndarray, ndarray]:
        """Return the derivatives for a scalar prior precision, in closed form.

        With eigenvalues ``k = scale·e``, ``w = k / (k + δ)`` and ``u = 1 - w``, the
        log-determinant has first derivatives ``Σu`` in log δ and ``Σw`` in log scale,
        and second derivatives ``±Σuw`` (MacKay 1992, "Bayesian interpolation", section
        4). The scale is proportional to ``σ^(-2·order)``. Derivatives are computed for
        ``(log δ, log σ)`` and then reduced to the free hyperparameters.
        """
        p = self.at(v)
        order, delta = p.curvature_order, p.prior_precision
        # half the sum of squared residuals over σ²T
        n, loss = float(p.data_fit.n_targets), float(p.data_fit.loss * p.loss_scale)
        scatter = float(p.scatter())
        u = delta / (p.scale * p.structure.eigenvalues + delta)
        sum_w, sum_uw = len(u) - float(u.sum()), float((u * (1 - u)).sum())
        # Σ log u = log det diag δ - log det P
        value = (scatter - float(u.log().sum())) / 2 - float(p.log_likelihood())
        gradient = np.array([scatter - sum_w, 2 * n - 4 * loss - 2 * order * sum_w]) / 2
        mixed, in_noise = order * sum_uw, 4 * loss + 2 * order**2 * sum_uw
        hessian = np.array([[(sum_uw + scatter) / 2, mixed], [mixed, in_noise]])
        # index 0 is log δ, and index 1 is log σ; the bools count as 0 or 1
        free = slice(not self.free_prior, 1 + self.free_noise)
        return value, gradient[free], hessian[free, free]


def _typical_precision(posterior: GaussianPosterior) -> Tensor:
    """Return a scalar prior precision typical of the weights, ().

    The value is MacKay's update ``γ / ‖θ - μ₀‖²`` with γ = P/2 effective parameters. If
    the weights equal the prior mean, the value is the mean curvature instead, or one
    without curvature.
    """
    scatter = ((posterior.mean - posterior.hyperparameters.prior_mean) ** 2).sum()
    if scatter > SMALLEST:
        return clamped(len(posterior.mean) / 2 / scatter)
    curvature = posterior.scale * posterior.structure.eigenvalues.mean()
    return clamped(curvature) if curvature > SMALLEST else torch.ones_like(scatter)


def _newton(objective: NegativeEvidence, v: ndarray) -> tuple[ndarray, bool]:
    """Minimise by Newton's method with absolute eigenvalues, short steps and bounds.

    Return the last point (n,), and whether the method has converged.

    Absolute eigenvalues make every step a descent direction, even at saddle points or
    if the curvature is negative. Steps that do not decrease the value are halved, up to
    30 times, which leaves 1e-9 of a step. ``v`` (n,) is the initial point, in the
    coordinates of `NegativeEvidence`.
    """
    value, gradient, hessian = objective.derivatives(v)
    for _ in range(MAX_EVALUATIONS):
        # coordinates at a bound, from which a descent would leave the bounds
        at_bound = (np.abs(v) >= LOG_BOUND) & (gradient * np.sign(v) < 0)
        step = _newton_step(np.where(at_bound, 0, gradient), hessian, at_bound)
        size = float(np.abs(step).max())
        if size <= STEP_TOLERANCE:
            return v, True
        for _ in range(30):
            trial = (v + step).clip(-LOG_BOUND, LOG_BOUND)
            derivatives = objective.derivatives(trial)  # (value, gradient, Hessian)
            if derivatives[0] <= value + 1e-12 * abs(value):  # no increase but rounding
                break
            step = step / 2
        else:
            # converged if the step was short: rounding then hides the decrease
            return v, size <= math.sqrt(STEP_TOLERANCE)
        v, (value, gradient, hessian) = trial, derivatives
    return v, False


def _newton_step(gradient: ndarray, hessian: ndarray, at_bound: ndarray) -> ndarray:
    """Return a descent step, limited to three in each logarithm and zero at bounds.

    Coordinates ``at_bound`` (n,) are removed from the Hessian, and their gradient is
    already zero. A longer step would trust the quadratic model over factors above
    ``exp(3)``.
    """
    values, vectors = np.linalg.eigh(hessian * np.outer(~at_bound, ~at_bound))
    # a floor prevents division by zero, even if all eigenvalues are zero
    sizes = np.abs(values).clip(1e-8 * max(np.abs(values).max(), 1e-300))
    step = -vectors @ ((vectors.T @ gradient) / sizes)
    return step * (3 / max(3, np.abs(step).max()))


def _lbfgs(objective: NegativeEvidence, v: ndarray) -> tuple[ndarray, bool]:
    """Minimise by bounded L-BFGS, for one precision per weight or many layers.

    Return the last point (n,), and whether the method has converged. Unlike Newton's
    method, L-BFGS needs no Hessian.
    """

    def evaluate(x: ndarray) -> tuple[float, ndarray]:
        with torch.enable_grad():
            point = torch.tensor(x, requires_grad=True)
            value = -objective.at(point).log_marginal_likelihood()
            (gradient,) = grad(value, point)
        return value.item(), gradient.numpy()

    # many cheap iterations, and tolerances near the rounding errors of the value
    options = {"maxiter": 1000, "maxfun": 2000, "ftol": 1e-13, "gtol": 1e-6}
    bounds = [(-LOG_BOUND, LOG_BOUND)] * len(v)
    result = minimize(evaluate, v, jac=True, bounds=bounds, options=options)
    return result.x, result.status == 0  # zero means convergence


# ------------------------------------------------- at the refitted linear model
def marglik_refitted(problem: TuningProblem) -> GaussianPosterior:
    """Maximise the evidence of the linear model, which is refitted under each prior.

    At the maximum, MacKay's updates of the hyperparameters leave them unchanged. Each
    round refits the model, computes these updates at the refitted weights, and moves
    towards the fixed point by a secant step or a plain update. Refits are coarse far
    from the fixed point. If the fixed point is not reached, the best posterior of the
    last rounds is refitted precisely and returned, with a warning.
    """
    model, posterior = problem.model, problem.posterior
    if not (problem.free_prior or problem.free_noise):
        return model.refit(posterior)
    evidence = NegativeEvidence(posterior, problem.free_prior, problem.free_noise)
    start = evidence.start()
    # coupled precisions need more steps if the first refits are imprecise
    is_single = len(evidence.logs(start.hyperparameters)) == 1
    tolerance = COARSEST if is_single else ROUNDING
    best = posterior = model.refit(start, tolerance=tolerance)
    history: list[Tensor] = []  # (point, update), each (2, n), in logarithms
    for n_round in range(1, MAX_FIXED_POINT + 1):
        point = evidence.logs(posterior.hyperparameters)
        update = evidence.logs(_mackay(posterior, problem)).clamp(-LOG_BOUND, LOG_BOUND)
        change = float((update - point).abs().max())
        if change < FIXED_POINT_TOLERANCE and tolerance == ROUNDING:
            return posterior
        history.append(torch.stack([point, update]))
        v = _accelerated(history) if _may_accelerate(history) else update
        if tolerance > ROUNDING:
            # weights should err by a tenth of the change; the loss at its minimum is
            # quadratic in the error of the weights
            tolerance = min(tolerance, (change / 10) ** 2)
            if tolerance < FINEST:
                tolerance = ROUNDING
                history.clear()  # signs of small changes may be wrong
        # all hyperparameters by name, of which the fixed ones do not change
        template = posterior.replace(**vars(evidence.hyperparameters(v)))
        posterior = model.refit(template, tolerance=tolerance)
        # comparing costs a log-determinant, and most searches end long before
        if n_round > MAX_FIXED_POINT // 3:
            best = max(best, posterior, key=GaussianPosterior.log_marginal_likelihood)
    warn_user(
        "The fixed point of the evidence was not reached, so prior_precision is the "
        "best value found. prior_precision='validation' needs no fixed point.",
        ConvergenceWarning,
    )
    return model.refit(best)


def _mackay(posterior: GaussianPosterior, problem: TuningProblem) -> Hyperparameters:
    """Return MacKay's updates of the prior precision and the noise.

    These are ``δ = γ / ‖θ - μ₀‖²`` and ``σ² = ‖r‖² / (T (n - γ))``, with the effective
    number of parameters ``γ`` and the residuals ``r`` of n targets. If a bound replaces
    the log-determinant, its ``trace_correction`` enters both updates.
    """
    h = posterior.hyperparameters
    delta, order = h.prior_precision, posterior.curvature_order
    gammas = _effective_parameters(posterior)  # of each weight, or their sum
    gamma = _sum_by_precision(posterior, gammas)
    trace_correction = posterior.precision.trace_correction()
    if problem.free_prior:
        scatter = _scatter_by_precision(posterior)
        # solves δ² scatter = δ γ + c, where c = δ trace_correction is independent of δ
        root = (gamma**2 + 4 * scatter * delta * trace_correction).sqrt()
        h = replace(h, prior_precision=clamped((gamma + root) / (2 * scatter)))
    if problem.free_noise:
        n, residual = posterior.data_fit.n_targets, 2 * posterior.data_fit.loss
        squares = residual / h.temperature + order * trace_correction * h.sigma_noise**2
        # n - γ targets are left to determine the noise; γ = n if every target is
        # interpolated: keep a tenth of a target
        variance = squares / (n - order * gammas.sum()).clamp(min=0.1)
        floor = SMALLEST_NOISE_TO_SPREAD**2 * problem.model.target_variance()
        h = replace(h, sigma_noise=clamped(torch.maximum(variance, floor).sqrt()))
    return h


def _effective_parameters(posterior: GaussianPosterior) -> Tensor:
    """Return MacKay's γ of each weight (P,), or the sum if δ is a single number."""
    if posterior.prior_precision.ndim == 0:
        return posterior.precision.effective_dimension()
    gamma = posterior.precision.effective_parameters()
    # smaller values are rounding errors of one minus a number near one
    return gamma.masked_fill(gamma < 1e-12, 0)


def _may_accelerate(history: list[Tensor]) -> bool:
    """Return whether to take a secant step; always true for one hyperparameter.

    With several hyperparameters, secant and plain steps alternate (Steffensen), because
    coupled secant steps can cycle, unlike plain steps. After 30 rounds without
    convergence, secant steps become rarer. ``history`` contains one tensor (2, n) per
    round, for n hyperparameters.
    """
    n_rounds, n_values = len(history), history[0].shape[1]
    return n_values == 1 or n_rounds % (2 if n_rounds <= 30 else 4) == 0


def _accelerated(history: list[Tensor]) -> Tensor:
    """Return the next point, by a secant step from pairs (point, update), (2, n) each.

    The step solves ``update = point`` along the line through the last two pairs. For a
    single hyperparameter, earlier points bracket the fixed point, because the update is
    larger than the point on one side of it and smaller on the other side. Bisection
    replaces steps that leave the bracket.
    """
    point, update = history[-1].unbind()
    if len(history) == 1:
        return update
    last_point, last_update = history[-2].unbind()
    # a slope of zero, for a plain update, if the last two points are equal
    slope = ((update - last_update) / (point - last_point)).nan_to_num(0.0, 0.0, 0.0)
    # slopes near one would make the step arbitrarily long; slopes below minus one, and
    # steps above a factor exp(3), come from points too far apart for a line
    step = ((update - point) / (1 - slope.clamp(-1, 0.99))).clamp(-3, 3)
    target = (point + step).clamp(-LOG_BOUND, LOG_BOUND)
    if len(point) > 1:
        return target
    # v is a point, and image is its update
    low = max([float(v) for v, image in history if image > v], default=-LOG_BOUND)
    high = min([float(v) for v, image in history if image < v], default=LOG_BOUND)
    # imprecise refits may make the bracket empty
    is_inside = low < float(target) < high or low >= high
    return target if is_inside else torch.full_like(target, (low + high) / 2)


def _sum_by_precision(posterior: GaussianPosterior, values: Tensor) -> Tensor:
    """Sum values (P,) over the weights that share a prior precision.

    The result has the shape of the prior precision: (), (P,), or (L,) with the sum of
    a group of parameter tensors for each of its tensors.
    """
    shape = posterior.prior_precision.shape
    if not shape:  # one for all weights; the values may already be their sum
        return values.sum()
    if shape == values.shape:  # one per weight
        return values
    # one per parameter tensor
    sums = torch.stack([piece.sum() for piece in posterior.layout.split(values)])
    groups = posterior.hyperparameters.groups
    return sums if groups is None else priors.group_sums(sums, groups)


def _scatter_by_precision(posterior: GaussianPosterior) -> Tensor:
    """Return ``‖θ - μ₀‖²`` for each prior precision, above zero for divisions."""
    squares = (posterior.mean - posterior.hyperparameters.prior_mean) ** 2
    return _sum_by_precision(posterior, squares).clamp(min=SMALLEST)
