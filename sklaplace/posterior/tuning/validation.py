"""Validation: the prior precision and noise that predict held-out rows best.

A path of prior precisions is scored on rows that the network did not see, with the
network's own head and with the head that is most probable under each of them.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from sklaplace.curvature import priors
from sklaplace.curvature.structures import projected
from sklaplace.likelihoods import ClassificationLikelihood
from sklaplace.posterior.gaussian import GaussianPosterior
from sklaplace.posterior.predictive import linearised_mean
from sklaplace.posterior.tuning.evidence import marglik
from sklaplace.posterior.tuning.task import (
    SMALLEST,
    LinearisedBatch,
    TuningProblem,
    clamped,
    require_head,
)

# A head is exchanged only for one that raises the log-likelihood of the held-out
# rows by this many nats in total: about the logarithm of the number of candidates,
# the best of which is lucky ("strong" evidence: Kass and Raftery 1995).
MARGIN = 3.0
# share of itself that the loss of a refitted head may still lack along the path
PATH_TOLERANCE = 1e-5
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


def tune_on_validation(task: TuningProblem) -> GaussianPosterior:
    """Best score on held-out rows along a path of prior precisions.

    Log loss for classification, Gaussian negative log-likelihood for regression,
    for the network's own head and, unless ``refine`` is False, for the head that
    is refitted at each point of the path. With ``refine="auto"`` the refitted head
    is taken if it makes the held-out rows ``exp(MARGIN)`` times as probable: fewer
    rows than a hundred mistake luck for skill otherwise.

    A layerwise or diagonal prior keeps the proportions that maximise the
    evidence; the path is over their common factor.

    With noise and a curvature of order two, a point of the path does not tell what the
    head is refitted to: then the head is kept.
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
    if task.refine is True or (task.refine == "auto" and _may_refit(task)):
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


def _may_refit(task: TuningProblem) -> bool:
    """Whether a ratio alone says how the head is to be refitted."""
    has_order = task.posterior.curvature_order == 1
    return task.head is not None and (has_order or not task.free_noise)


def _finished(chosen: "_Candidate", task: TuningProblem) -> "_Candidate":
    """The chosen candidate with its head, if refitted, refitted to full precision."""
    if not chosen.posterior.is_refitted:
        return chosen
    posterior = require_head(task.head).refit(chosen.posterior)
    return replace(chosen, posterior=posterior)


def _best(candidates: list["_Candidate"]) -> "_Candidate | None":
    finite = [c for c in candidates if math.isfinite(c.score)]
    return min(finite, key=lambda c: c.score, default=None)


def _widened(chosen: "_Candidate", task: TuningProblem) -> GaussianPosterior:
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
        sigma_noise=clamped(posterior.hyperparameters.sigma_noise * widening)
    )
    return wider.replace(prior_precision=ratio * wider.scale)


def _path(task: TuningProblem) -> list[Tensor]:
    """Ratios ``ρ = δ/scale`` to visit, from the strongest prior to the weakest."""
    posterior = task.posterior
    delta = posterior.prior_precision
    if task.free_prior and delta.ndim:
        delta = marglik(posterior, free_noise=task.free_noise).prior_precision
    if not task.free_prior:
        return _noise_path(task)
    shape = delta / delta.log().mean().exp()
    spread = 1 / priors.expand(shape, posterior.layout)
    total, n = 0.0, 0.0
    for rows in _rows(task):
        prior_variance = rows.jacobian.double().variance(spread)
        total += float(rows.weights.double() @ prior_variance.mean(1))
        n += float(rows.weights.sum())
    return [shape * max(total / n, 1e-30) / variance for variance in PATH]


def _noise_path(task: TuningProblem) -> list[Tensor]:
    """Ratios under a fixed prior: from noise levels around the held-out residuals."""
    h = task.posterior.hyperparameters
    if not task.free_noise:
        return [h.prior_precision / task.posterior.scale]
    squares, n = 0.0, 0.0
    for rows in _rows(task):
        mean = linearised_mean(task.posterior, rows.f, rows.jacobian)
        losses = ((mean - rows.targets) ** 2).mean(1)
        squares += float(rows.weights.double() @ losses)
        n += float(rows.weights.sum())
    residual = max(squares / n, SMALLEST) ** 0.5
    order = task.posterior.curvature_order
    scales = [1 / level ** (2 * order) for level in residual * NOISE_PATH]
    return [h.prior_precision * h.temperature / scale for scale in scales]


def _rows(task: TuningProblem) -> Iterator[LinearisedBatch]:
    assert task.validation is not None
    return iter(task.validation)


def _scored(task: TuningProblem, path: list[Tensor]) -> list[_Candidate]:
    """One candidate per point of the path, the head kept: one pass over the rows."""
    scorers = [_Scorer(task, ratio) for ratio in path]
    for rows in _rows(task):
        mean = linearised_mean(task.posterior, rows.f, rows.jacobian)
        n_blocks = 1 if task.diagonal else task.posterior.likelihood.n_blocks
        projection = projected(task.posterior.structure, rows.jacobian, n_blocks)
        for scorer in scorers:
            scorer.add(mean, task.spread(projection, scorer.ratio), rows)
    return [scorer.candidate(task.posterior) for scorer in scorers]


def _scored_kept(task: TuningProblem, path: list[Tensor]) -> list[_Candidate]:
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


def _scored_refitted(task: TuningProblem, path: list[Tensor]) -> list[_Candidate]:
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


def _refitted(
    task: TuningProblem, start: GaussianPosterior, ratio: Tensor
) -> _Candidate:
    """The head refitted under one ratio, from where another refit ended."""
    if task.free_prior:
        template = start.replace(prior_precision=ratio * start.scale)
    else:
        template = start.replace(sigma_noise=_implied_variance(start, ratio).sqrt())
    posterior = require_head(task.head).refit(template, tolerance=PATH_TOLERANCE)
    return _scored(replace(task, posterior=posterior), [ratio])[0]


def _implied_variance(posterior: GaussianPosterior, ratio: Tensor) -> Tensor:
    """σ² from ``ρ = δ/scale`` under a fixed prior, ()."""
    h = posterior.hyperparameters
    inverse_scale = (ratio / h.prior_precision).mean() / h.temperature
    variance: Tensor = inverse_scale ** (1 / posterior.curvature_order)
    return variance


class _Scorer:
    """Score of one ratio ``ρ = δ/scale`` on held-out rows, batch by batch.

    With ``u = J (H + ρ)⁻¹ Jᵀ`` the functional covariance is ``u/scale``. For
    Gaussian noise ``scale = 1/(σ²T)``, so that the predictive variance
    ``σ²(1 + T u)`` is proportional to σ², whose best value has a closed form. For a
    curvature of order two it is ``σ²(1 + T σ² u)``, and a search finds σ².
    """

    def __init__(self, task: TuningProblem, ratio: Tensor) -> None:
        self.task, self.ratio = task, ratio
        self._losses: list[Tensor] = []
        self._weights: list[Tensor] = []
        self._spreads: list[Tensor] = []

    def add(self, mean: Tensor, u: Tensor, rows: LinearisedBatch) -> None:
        """Take the unscaled predictive of one batch."""
        h = self.task.posterior.hyperparameters
        self._weights.append(rows.weights.double())
        if self.task.log_density is not None:
            variance = u / self.task.posterior.scale
            targets = rows.targets.double()
            self._losses.append(-self.task.log_density(mean, variance, targets))
            return
        if self.task.log_proba is None:
            self._losses.append((mean - rows.targets) ** 2)
            self._spreads.append(h.temperature * u)
            return
        log_proba = self.task.log_proba(mean, u / self.task.posterior.scale)
        likelihood = cast(ClassificationLikelihood, self.task.posterior.likelihood)
        self._losses.append(likelihood.log_loss(log_proba, rows.targets))

    def candidate(self, posterior: GaussianPosterior) -> _Candidate:
        """The posterior at this point of the path, with its score."""
        losses, weights = torch.cat(self._losses), torch.cat(self._weights)
        n_rows = float(weights.sum())
        weights = weights / n_rows
        if not posterior.likelihood.has_noise:
            chosen = posterior.replace(prior_precision=self.ratio * posterior.scale)
            return _Candidate(chosen, float(weights @ losses), n_rows, 1)
        values = losses, torch.cat(self._spreads), weights
        variance = self._noise_variance(posterior, *values)
        chosen = posterior.replace(sigma_noise=clamped(variance.sqrt()))
        if self.task.free_prior:
            chosen = chosen.replace(prior_precision=self.ratio * chosen.scale)
        score = float(self._nll(posterior, variance, *values))
        return _Candidate(chosen, score, n_rows, losses.shape[1])

    def _nll(
        self,
        posterior: GaussianPosterior,
        variance: Tensor,
        losses: Tensor,
        spreads: Tensor,
        weights: Tensor,
    ) -> Tensor:
        """Gaussian negative log-likelihood of a row, ()."""
        power = posterior.curvature_order
        # of several noise levels only the common factor is ever open
        ratios = getattr(posterior.likelihood, "relative", None) or (1.0,)
        squares = losses.new_tensor(ratios) ** 2
        total = variance * squares + variance**power * spreads
        return weights @ ((losses / total + (2 * math.pi * total).log()) / 2).sum(1)

    def _noise_variance(
        self,
        posterior: GaussianPosterior,
        losses: Tensor,
        spreads: Tensor,
        weights: Tensor,
    ) -> Tensor:
        """σ² that is fixed, implied by a fixed prior, or best on these rows."""
        if not self.task.free_noise:
            return posterior.hyperparameters.sigma_noise**2
        if not self.task.free_prior:
            return _implied_variance(posterior, self.ratio)
        scaled = losses / (1 + spreads)
        best = (weights @ scaled.mean(1)).clamp(min=SMALLEST)
        if posterior.curvature_order == 1:
            return best

        def score(log_variance: float) -> float:
            variance = torch.full_like(best, math.exp(log_variance))
            return float(self._nll(posterior, variance, losses, spreads, weights))

        upper = float((weights @ losses.mean(1)).clamp(min=SMALLEST).log())
        found = minimize_scalar(score, bounds=(upper - 30, upper + 1), method="bounded")
        return torch.full_like(best, math.exp(found.x))
