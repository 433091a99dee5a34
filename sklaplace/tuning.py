"""Tuning: choose prior precision and noise, and whether to refit the last layer.

Three ways, all ``(Task) -> GaussianPosterior``:

* ``marglik``: maximise the evidence. At the network's own weights by Newton's
  method in ``(log δ, log σ)``; at the refitted head by MacKay's fixed point
  ``δ = γ / ‖θ(δ) - μ₀‖²``, ``σ² = ‖r‖² / (T (n - γ))`` (MacKay 1992, "Bayesian
  interpolation", section 4).
* ``validation``: score the predictive on rows that the network did not see.
* ``auto``: the second where there are such rows, else the first.

Evidence at weights that are no minimum of the regularised loss prefers far too
weak a prior, and training residuals of an over-trained network say nothing about
the noise; hence the order of ``auto``.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import numpy as np
import torch
from scipy.optimize import minimize
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor

from sklaplace import priors
from sklaplace.heads import LinearHead
from sklaplace.jacobians import Jacobian
from sklaplace.posterior import GaussianPosterior, Hyperparameters
from sklaplace.predictive import linearised_mean
from sklaplace.structures import Projection

Found = TypeVar("Found")

# Bounds of log δ and log σ around the units that the data set, see `_units`.
LOG_BOUND = 20.0
# Bounds of δ and σ themselves: their products stay numbers.
SMALLEST, LARGEST = math.exp(-100), math.exp(100)
# largest number of hyperparameters that Newton's method takes; L-BFGS above
MAX_NEWTON_SIZE = 32
MAX_EVALUATIONS = 100
# length of the last Newton step in log δ and log σ
STEP_TOLERANCE = 1e-6
MAX_FIXED_POINT = 100
FIXED_POINT_TOLERANCE = 3e-5
# A head is exchanged only for one that raises the log-likelihood of the held-out
# rows by this many nats in total: about the logarithm of the number of candidates,
# the best of which is lucky ("strong" evidence: Kass and Raftery 1995).
MARGIN = 3.0
# share of itself that the loss of a refitted head may still lack along the path
PATH_TOLERANCE = 1e-5
# σ that training rows can ask for, as a share of the targets' spread: a head that
# fits all of them would have none.
SMALLEST_NOISE = 1e-4
# points of the path that a first look passes over, and where refitting begins: a
# prior under which outputs have unit variance, or noise as large as the residuals
COARSE = 4
MIDDLE = 8
# Prior variances of the outputs that the validation path visits: from
# one that changes no prediction to one that leaves all to the data.
PATH = 10.0 ** np.arange(-4, 6.01, 0.5)
# The path of noise levels under a fixed prior, as multiples of the held-out residual
# of the network's own head, from the largest to the smallest.
NOISE_PATH = 2.0 ** np.arange(1, -4.01, -0.125)


@dataclass(frozen=True)
class Rows:
    """One batch of held-out rows: outputs, their Jacobian, targets, weights."""

    f: Tensor
    jacobian: Jacobian
    targets: Tensor
    weights: Tensor


@dataclass(frozen=True)
class Task:
    """What there is to tune, and with what.

    Attributes
    ----------
    posterior : GaussianPosterior
        At the network's own weights, with initial hyperparameters.
    head : LinearHead or None
        Training rows as the last layer sees them; None where it is not linear
        or not the selected subset.
    validation : iterable of Rows or None
        Rows that the network did not see.
    log_proba : callable or None
        ``(mean (b, c), cov (b, c, c)) -> (b, K)`` log class probabilities; None
        for regression.
    diagonal : bool
        Whether ``log_proba`` takes variances (b, c) in place of covariances.
    free_prior, free_noise : bool
        Whether prior precision and noise are to be chosen.
    refine : bool or "auto"
        Whether the head is refitted under the prior; "auto" lets the tuner say.
    """

    posterior: GaussianPosterior
    head: LinearHead | None
    validation: Iterable[Rows] | None
    log_proba: Callable[[Tensor, Tensor], Tensor] | None
    free_prior: bool
    free_noise: bool
    refine: bool | Literal["auto"]
    diagonal: bool = False

    def spread(self, projection: Projection, ratio: Tensor) -> Tensor:
        """Covariance of held-out outputs under ``H + ratio``, or its diagonal."""
        one = torch.ones_like(self.posterior.scale)
        if self.diagonal or self.log_proba is None:
            return projection.variance(ratio, one)
        return projection.covariance(ratio, one)


# ------------------------------------------------------------------- evidence
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

    units = _units(start, free_prior, free_noise)

    def build(v: Tensor) -> Hyperparameters:
        return _with_logs(start.hyperparameters, v + units, free_prior, free_noise)

    def objective(v: Tensor) -> Tensor:
        return -start.log_marginal_likelihood(build(v))

    first = _logs(start.hyperparameters, free_prior, free_noise)
    best = _minimise(objective, first - units)
    return replace(start, hyperparameters=build(best))


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
        return _clamped(len(posterior.mean) / 2 / scatter)
    curvature = posterior.scale * posterior.structure.eigenvalues.mean()
    return _clamped(curvature) if curvature > SMALLEST else torch.ones_like(scatter)


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


def _minimise(objective: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    method = _newton if len(start) <= MAX_NEWTON_SIZE else _lbfgs
    best, converged = method(objective, start.clamp(-LOG_BOUND, LOG_BOUND))
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
    objective: Callable[[Tensor], Tensor], v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Value, gradient and Hessian at ``v``."""
    with torch.enable_grad():
        v = v.detach().requires_grad_()
        value = objective(v)
        (gradient,) = torch.autograd.grad(value, v, create_graph=True)
        rows = [
            torch.autograd.grad(entry, v, retain_graph=True)[0] for entry in gradient
        ]
    return value.detach(), gradient.detach(), torch.stack(rows)


def _newton(objective: Callable[[Tensor], Tensor], v: Tensor) -> tuple[Tensor, bool]:
    """Newton's method with absolute eigenvalues, short steps and bounds.

    Saddles and regions of negative curvature repel, since the sign of each
    eigenvalue is dropped; steps that do not descend are halved.
    """
    value, gradient, hessian = _derivatives(objective, v)
    for _ in range(MAX_EVALUATIONS):
        at_bound = (v.abs() >= LOG_BOUND) & (gradient * v.sign() < 0)
        step = _newton_step(gradient.masked_fill(at_bound, 0), hessian, at_bound)
        size = float(step.abs().max())
        if size <= STEP_TOLERANCE:
            return v, True
        for _ in range(30):
            trial = (v + step).clamp(-LOG_BOUND, LOG_BOUND)
            found = _derivatives(objective, trial)
            if found[0] <= value + 1e-12 * value.abs():
                break
            step = step / 2
        else:
            # short steps that only rounding keeps from descending are the end
            return v, size <= math.sqrt(STEP_TOLERANCE)
        v, (value, gradient, hessian) = trial, found
    return v, False


def _newton_step(gradient: Tensor, hessian: Tensor, at_bound: Tensor) -> Tensor:
    """Descent step of at most three units in any logarithm, zero at bounds."""
    hessian = hessian.clone()
    hessian[at_bound, :] = 0
    hessian[:, at_bound] = 0
    values, vectors = torch.linalg.eigh(hessian)
    floor = 1e-8 * values.abs().max().clamp(min=1e-300)
    step: Tensor = -vectors @ ((vectors.T @ gradient) / values.abs().clamp(min=floor))
    return step * (3 / step.abs().max().clamp(min=3))


def _lbfgs(objective: Callable[[Tensor], Tensor], v: Tensor) -> tuple[Tensor, bool]:
    """Bounded L-BFGS for one precision per parameter or many layers."""

    def evaluate(x: np.ndarray) -> tuple[float, np.ndarray]:
        with torch.enable_grad():
            point = torch.as_tensor(x, dtype=v.dtype, device=v.device).requires_grad_()
            value = objective(point)
            (gradient,) = torch.autograd.grad(value, point)
        return float(value.detach()), gradient.cpu().numpy()

    result = minimize(
        evaluate,
        v.cpu().numpy(),
        jac=True,
        method="L-BFGS-B",
        bounds=[(-LOG_BOUND, LOG_BOUND)] * len(v),
        options={"maxiter": 1000, "maxfun": 2000, "ftol": 1e-13, "gtol": 1e-6},
    )
    return torch.as_tensor(result.x, dtype=v.dtype, device=v.device), result.status == 0


# ------------------------------------------------------ evidence, refitted head
def marglik_refitted(task: Task) -> GaussianPosterior:
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
    warnings.warn(
        "The fixed point of the evidence was not reached; prior_precision is close "
        "to it. prior_precision='validation' needs none.",
        ConvergenceWarning,
        stacklevel=2,
    )
    return posterior


def _mackay(posterior: GaussianPosterior, task: Task) -> Hyperparameters:
    """MacKay's updates of prior precision and noise."""
    h = posterior.hyperparameters
    delta = h.prior_precision
    gamma = _determined(posterior)
    if task.free_prior:
        scatter = _group_scatter(posterior, delta)
        h = replace(h, prior_precision=_clamped(gamma / scatter))
    if task.free_noise:
        n, residual = posterior.data_fit.n_targets, 2 * posterior.data_fit.loss
        # γ reaches n only where every target is fitted; keep a tenth of a row
        variance = residual / h.temperature / (n - gamma.sum()).clamp(min=0.1)
        floor = SMALLEST_NOISE**2 * require_head(task.head).target_variance()
        h = replace(h, sigma_noise=_clamped(torch.maximum(variance, floor).sqrt()))
    return h


def _determined(posterior: GaussianPosterior) -> Tensor:
    """MacKay's γ of the weights that share a prior precision, shaped like it."""
    delta, scale = posterior.prior_precision, posterior.scale
    if delta.ndim == 0:
        return posterior.structure.effective_dimension(delta, scale)
    gamma = posterior.structure.effective_parameters(delta, scale)
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


def _clamped(value: Tensor) -> Tensor:
    return value.clamp(SMALLEST, LARGEST)


# ------------------------------------------------------------- validation path
@dataclass(frozen=True)
class _Candidate:
    """A posterior and its mean score on held-out rows, in nats; lower is better."""

    posterior: GaussianPosterior
    score: float
    n_rows: float
    n_outputs: int

    @property
    def total(self) -> float:
        """Negative log-likelihood of all held-out rows."""
        return self.score * self.n_rows


def validation(task: Task) -> GaussianPosterior:
    """Best score on held-out rows along a path of prior precisions.

    Log loss for classification, Gaussian negative log-likelihood for regression,
    for the network's own head and, unless ``refine`` is False, for the head that
    is refitted at each point of the path. With ``refine="auto"`` the refitted head
    is taken if it makes the held-out rows ``exp(MARGIN)`` times as probable: fewer
    rows than a hundred mistake luck for skill otherwise.

    A layerwise or diagonal prior keeps the proportions that maximise the
    evidence; the path is over their common factor.
    """
    if task.validation is None:
        raise ValueError(
            "prior_precision='validation' needs rows that the network did not see, "
            "and there are none. Pass X_val and y_val to fit, give the network a "
            "train_split, or use prior_precision='marglik'."
        )
    path = _path(task)
    kept = refitted = None
    if task.refine is not True:
        kept = _best(_scored_kept(task, path))
    if task.refine is True or (task.refine == "auto" and task.head is not None):
        refitted = _best(_scored_refitted(task, path))
    chosen = kept or refitted
    if kept and refitted and refitted.total < kept.total - MARGIN:
        chosen = refitted
    if chosen is None:
        raise ValueError(
            "No prior precision gives a finite score on the held-out rows: the "
            "network's outputs there are too large or not numbers. Scale the inputs "
            "or lower the learning rate."
        )
    return _widened(_finished(chosen, task), task)


def _finished(chosen: "_Candidate", task: Task) -> "_Candidate":
    """The chosen candidate with its head, if refitted, refitted to full precision."""
    if not chosen.posterior.is_refitted:
        return chosen
    posterior = require_head(task.head).refit(chosen.posterior)
    return replace(chosen, posterior=posterior)


def _best(candidates: list["_Candidate"]) -> "_Candidate | None":
    finite = [c for c in candidates if math.isfinite(c.score)]
    return min(finite, key=lambda c: c.score, default=None)


def _widened(chosen: "_Candidate", task: Task) -> GaussianPosterior:
    """The chosen posterior, with noise that owns up to its own uncertainty.

    Prior precision, σ and the choice of head were fitted to the n held-out values.
    The unbiased variance is ``n/(n - 3)`` times the fitted one, and the Student t
    that a new value follows has ``ν/(ν - 2)`` times that, ν = n - 3: ``n/(n - 5)``
    in all.
    """
    posterior = chosen.posterior
    if not (task.free_noise and task.free_prior):
        return posterior
    n = chosen.n_rows * posterior.likelihood.n_targets(chosen.n_outputs)
    widening = math.sqrt(n / max(n - 5, 1.0))
    ratio = posterior.prior_precision / posterior.scale
    wider = posterior.replace(
        sigma_noise=_clamped(posterior.hyperparameters.sigma_noise * widening)
    )
    return wider.replace(prior_precision=ratio * wider.scale)


def _path(task: Task) -> list[Tensor]:
    """Ratios ``ρ = δ/scale`` to visit, from the strongest prior to the weakest."""
    posterior = task.posterior
    delta = posterior.prior_precision
    if task.free_prior and delta.ndim:
        delta = marglik(posterior, free_noise=task.free_noise).prior_precision
    if not task.free_prior:
        return _noise_path(task)
    shape = delta / delta.log().mean().exp()
    spread = 1 / priors.expand(shape, posterior.layout)
    total, n = 0.0, 0
    for rows in _rows(task):
        prior_variance = rows.jacobian.double().variance(spread)
        total, n = total + float(prior_variance.sum()), n + rows.f.numel()
    return [shape * max(total / n, 1e-30) / variance for variance in PATH]


def _noise_path(task: Task) -> list[Tensor]:
    """Ratios under a fixed prior: from noise levels around the held-out residuals."""
    h = task.posterior.hyperparameters
    if not task.free_noise:
        return [h.prior_precision / task.posterior.scale]
    squares, n = 0.0, 0
    for rows in _rows(task):
        mean = linearised_mean(task.posterior, rows.f, rows.jacobian)
        squares, n = (
            squares + float(((mean - rows.targets) ** 2).sum()),
            n + mean.numel(),
        )
    residual = max(squares / n, SMALLEST) ** 0.5
    levels = residual * NOISE_PATH
    return [h.prior_precision * h.temperature * level**2 for level in levels]


def _rows(task: Task) -> Iterator[Rows]:
    assert task.validation is not None
    return iter(task.validation)


def _scored(task: Task, path: list[Tensor]) -> list[_Candidate]:
    """One candidate per point of the path, the head kept: one pass over the rows."""
    scorers = [_Scorer(task, ratio) for ratio in path]
    for rows in _rows(task):
        mean = linearised_mean(task.posterior, rows.f, rows.jacobian)
        projection = task.posterior.structure.project(rows.jacobian)
        for scorer in scorers:
            scorer.add(mean, task.spread(projection, scorer.ratio), rows)
    return [scorer.candidate(task.posterior) for scorer in scorers]


def _scored_kept(task: Task, path: list[Tensor]) -> list[_Candidate]:
    """The same; where a point is dear, every fourth, then around the best of them.

    That is where covariances are made. Rows that are made anew on each pass are
    passed once, with all points.
    """
    is_cheap = task.log_proba is None or task.diagonal
    is_stream = not isinstance(task.validation, list)
    if is_cheap or is_stream or len(path) < 2 * COARSE:
        return _scored(task, path)
    candidates: dict[int, _Candidate] = {}

    def visit(indices: Iterable[int]) -> None:
        new = [i for i in indices if 0 <= i < len(path) and i not in candidates]
        found = _scored(task, [path[i] for i in new])
        candidates.update(zip(new, found, strict=True))

    visit(range(0, len(path), COARSE))
    stride = COARSE // 2
    while stride:
        best = _best_index(candidates)
        visit([best - stride, best + stride])
        stride //= 2
    return list(candidates.values())


def _scored_refitted(task: Task, path: list[Tensor]) -> list[_Candidate]:
    """The same with the head refitted at each point, from where the last ended.

    Uphill by two points at a time from the middle of the path, where prior and data
    weigh alike, until both sides are worse; then the neighbours of the best.
    """
    candidates: dict[int, _Candidate] = {}

    def visit(index: int, start: GaussianPosterior) -> None:
        if 0 <= index < len(path) and index not in candidates:
            candidates[index] = _refitted(task, start, path[index])

    best = min(MIDDLE, len(path) - 1)
    visit(best, task.posterior)
    for stride in (2, 1):
        for direction in (stride, -stride):
            while True:
                best = _best_index(candidates)
                visit(best + direction, candidates[best].posterior)
                if stride == 1 or _best_index(candidates) == best:
                    break
    return list(candidates.values())


def _best_index(candidates: dict[int, _Candidate]) -> int:
    """Where the score is lowest; what is no number is highest."""

    def score(index: int) -> float:
        found = candidates[index].score
        return found if math.isfinite(found) else math.inf

    return min(candidates, key=score)


def _refitted(task: Task, start: GaussianPosterior, ratio: Tensor) -> _Candidate:
    """The head refitted under one ratio, from where another refit ended."""
    if task.free_prior:
        template = start.replace(prior_precision=ratio * start.scale)
    else:
        h = start.hyperparameters
        variance = (ratio / h.prior_precision).mean() / h.temperature
        template = start.replace(sigma_noise=variance.sqrt())
    posterior = require_head(task.head).refit(template, tolerance=PATH_TOLERANCE)
    return _scored(replace(task, posterior=posterior), [ratio])[0]


class _Scorer:
    """Score of one ratio ``ρ = δ/scale`` on held-out rows, batch by batch.

    With ``u = J (H + ρ)⁻¹ Jᵀ`` the functional covariance is ``u/scale``. For
    Gaussian noise ``scale = 1/(σ²T)``, so that the predictive variance
    ``σ²(1 + T u)`` is proportional to σ², whose best value has a closed form.
    """

    def __init__(self, task: Task, ratio: Tensor) -> None:
        self.task, self.ratio = task, ratio
        self._losses: list[Tensor] = []
        self._weights: list[Tensor] = []
        self._spreads: list[Tensor] = []

    def add(self, mean: Tensor, u: Tensor, rows: Rows) -> None:
        """Take the unscaled predictive of one batch."""
        h = self.task.posterior.hyperparameters
        self._weights.append(rows.weights.double())
        if self.task.log_proba is None:
            self._losses.append((mean - rows.targets) ** 2)
            self._spreads.append(1 + h.temperature * u)
            return
        log_proba = self.task.log_proba(mean, u / self.task.posterior.scale)
        labels = rows.targets.reshape(-1, 1).long()
        self._losses.append(-log_proba.gather(1, labels).squeeze(1))

    def candidate(self, posterior: GaussianPosterior) -> _Candidate:
        """The posterior at this point of the path, with its score."""
        losses, weights = torch.cat(self._losses), torch.cat(self._weights)
        n_rows = float(weights.sum())
        weights = weights / n_rows
        if not posterior.likelihood.has_noise:
            chosen = posterior.replace(prior_precision=self.ratio * posterior.scale)
            return _Candidate(chosen, float(weights @ losses), n_rows, 1)
        spreads = torch.cat(self._spreads)
        variance = self._noise_variance(posterior, losses / spreads, weights)
        nll = (
            losses / spreads / variance + (2 * math.pi * variance * spreads).log()
        ) / 2
        chosen = posterior.replace(sigma_noise=_clamped(variance.sqrt()))
        if self.task.free_prior:
            chosen = chosen.replace(prior_precision=self.ratio * chosen.scale)
        return _Candidate(chosen, float(weights @ nll.sum(1)), n_rows, nll.shape[1])

    def _noise_variance(
        self, posterior: GaussianPosterior, scaled: Tensor, weights: Tensor
    ) -> Tensor:
        """σ² that is fixed, implied by a fixed prior, or best on these rows."""
        h = posterior.hyperparameters
        if not self.task.free_noise:
            return h.sigma_noise**2
        if not self.task.free_prior:
            ratio = (self.ratio / h.prior_precision).mean()
            return ratio / h.temperature
        return (weights @ scaled.mean(1)).clamp(min=SMALLEST)


# ------------------------------------------------------------------------ auto
def evidence(task: Task) -> GaussianPosterior:
    """Evidence at the refitted head, or as it stands where ``refine`` is False."""
    if task.refine is False or (task.refine == "auto" and task.head is None):
        return marglik(
            task.posterior, free_prior=task.free_prior, free_noise=task.free_noise
        )
    return marglik_refitted(task)


def auto(task: Task) -> GaussianPosterior:
    """Held-out rows where there are some, else evidence, saying what it risks."""
    if task.validation is not None:
        return validation(task)
    if task.head is None or task.refine is False:
        warnings.warn(
            "There are no rows that the network did not see, so 'auto' maximises the "
            "evidence at the network's own weights, which can make predictions worse "
            "than the network's. Pass X_val and y_val to fit.",
            UserWarning,
            stacklevel=2,
        )
    elif task.free_noise:
        warnings.warn(
            "sigma_noise comes from the training rows, because there are no rows "
            "that the network did not see; intervals will be too narrow if the "
            "network is over-trained. Pass X_val and y_val to fit.",
            UserWarning,
            stacklevel=2,
        )
    return evidence(task)


def require_head(head: Found | None) -> Found:
    """The head, or an error that says what ``refine`` needs."""
    if head is None:
        raise ValueError(
            "refine=True needs outputs that are linear in the selected weights. Use "
            "subset_of_weights='last_layer' with a network that ends in a Linear "
            "layer, or refine=False."
        )
    return head


TUNERS: dict[str, Callable[[Task], GaussianPosterior]] = {
    "auto": auto,
    "marglik": evidence,
    "validation": validation,
}
