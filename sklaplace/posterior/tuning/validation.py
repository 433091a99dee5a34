"""Validation: the prior precision and noise with the best score on held-out data.

A path of prior precisions is scored with the network's own weights and with the linear
model's most probable weights under each of them.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from sklaplace.core.warn import warn_user
from sklaplace.curvature import priors
from sklaplace.curvature.structures import projected
from sklaplace.likelihoods import ClassificationLikelihood
from sklaplace.posterior.gaussian import GaussianPosterior
from sklaplace.posterior.predictive import linearised_mean
from sklaplace.posterior.tuning.evidence import marglik
from sklaplace.posterior.tuning.problem import LinearisedBatch, TuningProblem, clamped

# The refitted model is preferred only if it raises the log-likelihood of the held-out
# data by this many nats in total: about the logarithm of the number of candidates, the
# best of which is too optimistic ("strong" evidence: Kass and Raftery 1995).
MARGIN = 3.0
# Relative precision of the loss of models that are refitted along the path: of all that
# are tried, of those that may be the best, and where all are precise, see `_is_exact`.
COARSE_TOLERANCE, FINE_TOLERANCE, EXACT_TOLERANCE = 1e-1, 1e-2, 1e-9
# How far a score of the first precision may be from that of the second: relative to it.
UNSURE = 0.02
# largest number of models that are refitted to the second precision
MAX_PRECISE = 2
# nats by which a score has to be worse to be out of the question
CLOSE = 0.5
# stride of a first search along the path, and the index at which refitting starts: a
# prior under which outputs have unit variance, or noise as large as the residuals
COARSE = 4
MIDDLE = 8
# Prior variances of the outputs along the path: from a prior that changes no
# prediction to one that leaves everything to the data.
PATH = 10.0 ** np.arange(-4, 6.01, 0.5)
# Predictions whose loss is at least this fraction of that of equal probabilities tell
# nothing.
UNIFORM = 0.99
# Fewer held-out values than this do not lower σ below that of the training data.
FEW = 10
# Noise levels along the path under a fixed prior, as multiples of the held-out residual
# of the network itself, in descending order.
NOISE_PATH = 2.0 ** np.arange(1, -4.01, -0.125)


@dataclass(frozen=True)
class _Candidate:
    """A posterior with the negative log-likelihood of the held-out data, in nats.

    ``score`` is infinite where it is not a number; ``n_targets`` counts values.
    ``refitted`` are the posteriors of all parts of the problem if they were refitted.
    """

    posterior: GaussianPosterior
    score: float
    n_targets: float
    refitted: tuple[GaussianPosterior, ...] = ()


def tune_on_validation(problem: TuningProblem) -> GaussianPosterior:
    """Best score on held-out data along a path of prior precisions.

    Log loss for classification, Gaussian negative log-likelihood for regression,
    at the network's weights and, unless ``refine`` is False, at the weights of the
    linear model refitted at each point of the path. With ``refine="auto"`` the refitted
    model is chosen if it makes the held-out data ``exp(MARGIN)`` times as probable:
    smaller gains are within the noise of a hundred samples. In regression a refitted
    model has the strongest prior that is not worse by as much.

    A layerwise or diagonal prior keeps the proportions that maximise the
    evidence; the path is over their common factor.

    With noise and a curvature of order two, a point of the path does not determine the
    refitted model: then the network's weights are kept.
    """
    path = _path(problem)
    search = _best_refitted if problem.refine is True else _best_kept
    chosen = search(problem, path)
    # noise and a curvature of order two: δ/scale does not determine a refitted model
    is_ambiguous = problem.posterior.curvature_order > 1 and problem.free_noise
    everything = problem, *problem.folds
    has_model = all(part.linear_model is not None for part in everything)
    if problem.refine == "auto" and has_model and not is_ambiguous:
        refitted = _best_refitted(problem, path, below := chosen.score - MARGIN)
        chosen = refitted if refitted.score < below else chosen
    if chosen.refitted and problem.log_proba is None and problem.free_prior:
        chosen = _with_strongest_prior(problem, path, chosen)
    if not math.isfinite(chosen.score):
        raise ValueError(
            "No prior precision gives a finite score on the held-out rows: the "
            "network's outputs there are too large or not numbers. Scale the inputs "
            "or lower the learning rate."
        )
    _warn_of_equal_probabilities(problem, chosen)
    posterior = chosen.posterior
    if chosen.refitted:  # to full precision
        posterior = problem.model.refit(posterior)
    both_free = problem.free_noise and problem.free_prior
    return _widened(posterior, chosen.n_targets) if both_free else posterior


def _widened(posterior: GaussianPosterior, n: float) -> GaussianPosterior:
    """Posterior with σ corrected for its estimation from ``n`` held-out values.

    Three quantities are fitted: prior precision, σ and kept or refitted weights. The
    unbiased variance is ``n/(n - 3)`` times the fitted one, and the Student t
    distribution of a new value has ``ν/(ν - 2)`` times that, ν = n - 3: ``n/(n - 5)``
    in all, which fewer than six values leave undefined. Few values may also agree by
    chance: then σ is at least that of the training data.
    """
    n = max(n, 6.0)
    sigma = posterior.hyperparameters.sigma_noise
    if n < FEW:
        fit = posterior.data_fit
        sigma = torch.maximum(sigma, (2 * fit.loss / fit.n_targets).sqrt())
    sigma = sigma * math.sqrt(n / (n - 5))
    wider = posterior.replace(sigma_noise=clamped(sigma))
    ratio = posterior.prior_precision / posterior.scale
    return wider.replace(prior_precision=ratio * wider.scale)


def _warn_of_equal_probabilities(problem: TuningProblem, chosen: _Candidate) -> None:
    """Warn where classes of held-out data are predicted as badly as with none.

    Not for data that would be linearised once more.
    """
    is_class = problem.log_proba is not None
    if not (is_class and problem.is_given and isinstance(problem.validation, list)):
        return
    loss = problem.posterior.likelihood.loss
    total = 0.0
    for batch in problem.validation:
        losses = loss(torch.zeros_like(batch.f), batch.targets).double()
        total += float(batch.weights.double() @ losses)
    if chosen.score >= UNIFORM * total:
        warn_user(
            "Under no prior precision are the held-out rows predicted better than by "
            "equal probabilities of all classes, which predictions are close to now. "
            "Either the network has learned nothing that holds for them, or they were "
            "prepared otherwise than X and y. A Pipeline does not transform X_val "
            "unless it is named: Pipeline(steps, transform_input=['X_val'])."
        )


# ---------------------------------------------------------------------- the path
def _path(problem: TuningProblem) -> list[Tensor]:
    """Ratios ``ρ = δ/scale`` to score, from the strongest prior to the weakest."""
    if not problem.free_prior:
        return _noise_path(problem)
    posterior = problem.posterior
    delta = posterior.prior_precision
    if delta.ndim:
        delta = marglik(posterior, free_noise=problem.free_noise).prior_precision
    shape = delta / delta.log().mean().exp()

    def output_variance(part: TuningProblem, batch: LinearisedBatch) -> Tensor:
        prior_variances = 1 / priors.expand(shape, part.posterior.layout)
        return batch.jacobian.double().variance(prior_variances)

    size = _held_out_mean(problem, output_variance).clamp(min=1e-30)
    return [shape * size / variance for variance in PATH]


def _noise_path(problem: TuningProblem) -> list[Tensor]:
    """Ratios under a fixed prior, for noise levels around the held-out residuals."""
    posterior, h = problem.posterior, problem.posterior.hyperparameters
    if not problem.free_noise:
        return [h.prior_precision / posterior.scale]

    def squares(part: TuningProblem, batch: LinearisedBatch) -> Tensor:
        mean = linearised_mean(part.posterior, batch.f, batch.jacobian)
        return (mean - batch.targets) ** 2 / _relative_variances(problem, mean)

    residual = float(clamped(_held_out_mean(problem, squares)).sqrt())
    powers = (residual * NOISE_PATH) ** (2 * posterior.curvature_order)
    return [h.prior_precision * h.temperature * power for power in powers]


def _held_out_mean(
    problem: TuningProblem, values: Callable[[TuningProblem, LinearisedBatch], Tensor]
) -> Tensor:
    """Weighted mean over held-out data and outputs of ``values`` (b, c), ()."""
    pairs = problem.batches()
    batches = [(b.weights.double(), values(part, b).mean(1)) for part, b in pairs]
    weights, means = map(torch.cat, zip(*batches, strict=True))
    return weights @ means / weights.sum()


# ------------------------------------------------------------ search on the path
def _best_kept(problem: TuningProblem, path: list[Tensor]) -> _Candidate:
    """Best candidate with the network's weights.

    Where probabilities make a point expensive, every fourth point is scored, then those
    around the best. Data that are linearised anew in every pass are passed once.
    """
    is_cheap = problem.log_proba is None or problem.is_cheap
    is_stream = not all(isinstance(part.validation, list) for part in problem.parts)
    if is_cheap or is_stream or len(path) < 2 * COARSE:
        return min(_scored(problem, path), key=lambda candidate: candidate.score)
    candidates: dict[int, _Candidate] = {}

    def visit(indices: Iterable[int]) -> None:
        new = [i for i in indices if 0 <= i < len(path) and i not in candidates]
        found = _scored(problem, [path[i] for i in new])
        candidates.update(zip(new, found, strict=True))

    visit(range(0, len(path), COARSE))
    for stride in (COARSE // 2, COARSE // 4):
        best = _best_index(candidates)
        visit([best - stride, best + stride])
    return candidates[_best_index(candidates)]


def _best_refitted(
    problem: TuningProblem, path: list[Tensor], below: float = math.inf
) -> _Candidate:
    """Best candidate with the refitted model, or some if none has a score ``below``.

    Models are refitted to the precision that it takes to compare them: first all that
    are tried to a low one, then the best.
    """
    candidates = _explored(problem, path, below)
    if (clear := _clear_winner(candidates, below)) is not None:
        return clear
    is_precise = set(candidates) if _is_exact(problem) else set()
    change = 0.0  # of scores by precision
    while True:
        best = candidates[_best_index(candidates)]
        if len(is_precise) >= MAX_PRECISE or best.score - _unsure(best) > below:
            return best
        limit = best.score + CLOSE + change / 2
        close = {i: c for i, c in candidates.items() if c.score <= limit}
        if not (rivals := {i: close[i] for i in close.keys() - is_precise}):
            return best
        index = _best_index(rivals)
        found = _refitted(problem, rivals[index].refitted, path[index], FINE_TOLERANCE)
        change = max(change, abs(found.score - rivals[index].score))
        candidates[index] = found
        is_precise.add(index)


def _clear_winner(candidates: dict[int, _Candidate], below: float) -> _Candidate | None:
    """The best candidate if no higher precision can change the choice of it."""
    best, *others = sorted(candidates.values(), key=lambda candidate: candidate.score)
    limit = best.score + _unsure(best)
    is_first = all(candidate.score > limit for candidate in others)
    return best if is_first and limit < below else None


def _is_exact(problem: TuningProblem) -> bool:
    """Whether all models are refitted to a high precision.

    With noise, whose level is then that of one of them; and with several precisions,
    for which models differ more.
    """
    has_noise = problem.posterior.likelihood.has_noise
    return has_noise or problem.posterior.prior_precision.ndim > 0


def _unsure(candidate: _Candidate) -> float:
    """How much a score may fall at a higher precision, in nats."""
    return 1 + UNSURE * abs(candidate.score)


def _explored(
    problem: TuningProblem, path: list[Tensor], below: float
) -> dict[int, _Candidate]:
    """Candidates at the best index of the path and around it, of the first precision.

    Steps of two points from the middle of the path, where prior and data have equal
    weight, as long as the score improves; each model starts at the best one so far.
    Then the neighbours of the best, where a parabola through it and the two points
    around it does not rise steeply, and may reach ``below``. They start halfway.
    """
    candidates: dict[int, _Candidate] = {}

    def visit(index: int, *starts: Iterable[GaussianPosterior]) -> None:
        if 0 <= index < len(path) and index not in candidates:
            start = map(_between, zip(*starts, strict=True))
            ratio = path[index]
            candidates[index] = _refitted(problem, start, ratio, COARSE_TOLERANCE)

    visit(min(MIDDLE, len(path) - 1), [part.posterior for part in problem.parts])
    for stride in (2, -2):
        while True:
            best = _best_index(candidates)
            visit(best + stride, candidates[best].refitted)
            if _best_index(candidates) == best:
                break
    best = _best_index(candidates)
    for stride in _promising(candidates, best, below):
        ends = [candidates[i] for i in (best, best + 2 * stride) if i in candidates]
        visit(best + stride, *(end.refitted for end in ends))
    return candidates


def _promising(
    candidates: dict[int, _Candidate], best: int, below: float
) -> tuple[int, ...]:
    """Which neighbours of the best index may have a better score: 1, -1, or both."""
    scores = [candidates[i].score for i in (best - 2, best + 2) if i in candidates]
    if len(scores) < 2 or not all(map(math.isfinite, scores)):
        return 1, -1
    now = candidates[best]
    # the parabola at the neighbours is now.score + convexity ± slope
    slope = (scores[1] - scores[0]) / 4
    convexity = (sum(scores) - 2 * now.score) / 8
    if now.score - abs(slope) - _unsure(now) > below:
        return ()
    rise = max(convexity / 2, CLOSE - convexity)
    return tuple(stride for stride in (1, -1) if stride * slope <= rise)


def _between(posteriors: tuple[GaussianPosterior, ...]) -> GaussianPosterior:
    """The first posterior, at the average of the means of all."""
    mean = torch.stack([posterior.mean for posterior in posteriors]).mean(0)
    return replace(posteriors[0], mean=mean)


def _with_strongest_prior(
    problem: TuningProblem, path: list[Tensor], best: _Candidate
) -> _Candidate:
    """Refitted model with the strongest prior that is not clearly worse than the best.

    Held-out data do not show how far outputs reach where there are no data; under a
    weak prior that is far.
    """
    highest = best.score + MARGIN
    ratio = best.posterior.prior_precision / best.posterior.scale
    index = int(np.argmin([(r / ratio).log().abs().max() for r in path]))
    while index:
        index -= 1
        stronger = _refitted(problem, best.refitted, path[index], FINE_TOLERANCE)
        if stronger.score > highest:
            break
        best = stronger
    return best


def _refitted(
    problem: TuningProblem,
    starts: Iterable[GaussianPosterior],
    ratio: Tensor,
    tolerance: float,
) -> _Candidate:
    """Candidate with models refitted under one ratio, from other refits' means."""

    def refit(part: TuningProblem, start: GaussianPosterior) -> TuningProblem:
        if part.free_prior:
            template = start.replace(prior_precision=ratio * start.scale)
        else:
            template = start.replace(sigma_noise=_implied_variance(start, ratio).sqrt())
        precision = EXACT_TOLERANCE if _is_exact(problem) else tolerance
        posterior = part.model.refit(template, tolerance=precision)
        return replace(part, posterior=posterior)

    parts = tuple(map(refit, problem.parts, starts))
    problem = replace(problem, folds=parts) if problem.folds else parts[0]
    (candidate,) = _scored(problem, [ratio])
    return replace(candidate, refitted=tuple(part.posterior for part in parts))


def _best_index(candidates: dict[int, _Candidate]) -> int:
    return min(candidates, key=lambda index: candidates[index].score)


# ---------------------------------------------------------------------- the score
def _scored(problem: TuningProblem, path: list[Tensor]) -> list[_Candidate]:
    """A candidate per ratio, all with the same weights: one pass over the data."""
    posterior = problem.posterior
    n_blocks = 1 if problem.diagonal else posterior.likelihood.n_blocks
    scores: list[list[tuple[Tensor, ...]]] = [[] for _ in path]
    for part, batch in problem.batches():
        mean = linearised_mean(part.posterior, batch.f, batch.jacobian)
        projection = projected(part.posterior.structure, batch.jacobian, n_blocks)
        for ratio, parts in zip(path, scores, strict=True):
            u = part.output_covariance(projection, ratio)
            parts.append((batch.weights.double(), *_losses(problem, mean, u, batch)))
    return [
        _candidate(problem, ratio, *map(torch.cat, zip(*parts, strict=True)))
        for ratio, parts in zip(path, scores, strict=True)
    ]


def _implied_variance(posterior: GaussianPosterior, ratio: Tensor) -> Tensor:
    """σ² from ``ρ = δ/scale`` under a fixed prior, ()."""
    h = posterior.hyperparameters
    inverse_scale = (ratio / h.prior_precision).mean() / h.temperature
    return inverse_scale ** (1 / posterior.curvature_order)


def _relative_variances(problem: TuningProblem, values: Tensor) -> Tensor:
    """``r²`` of noise levels ``σ r``, (c,) or (1,), of which only σ is tuned."""
    ratios = getattr(problem.posterior.likelihood, "relative", None) or (1.0,)
    return values.new_tensor(ratios) ** 2


def _losses(
    problem: TuningProblem, mean: Tensor, u: Tensor, batch: LinearisedBatch
) -> tuple[Tensor, ...]:
    """Losses (b,) of a batch, or squared residuals (b, c) and variances (b, c).

    With ``u = J (H + ρ)⁻¹ Jᵀ``, ``ρ = δ/scale``, the functional covariance is
    ``u/scale``. For Gaussian noise ``scale = 1/(σ²T)``, so that the predictive variance
    ``σ²(1 + T u)`` is proportional to σ², whose best value has a closed form. For a
    curvature of order two it is ``σ²(1 + T σ² u)``, and a search finds σ².
    """
    posterior = problem.posterior
    if problem.log_density is not None:
        targets = batch.targets.double()
        return (-problem.log_density(mean, u / posterior.scale, targets),)
    if problem.log_proba is not None:
        log_proba = problem.log_proba(mean, u / posterior.scale)
        likelihood = cast(ClassificationLikelihood, posterior.likelihood)
        return (likelihood.log_loss(log_proba, batch.targets),)
    return (mean - batch.targets) ** 2, posterior.hyperparameters.temperature * u


def _candidate(
    problem: TuningProblem, ratio: Tensor, weights: Tensor, *losses: Tensor
) -> _Candidate:
    """The posterior at a ratio ``ρ = δ/scale``, with its score on held-out data."""
    posterior, n_rows = problem.posterior, float(weights.sum())
    weights = weights / n_rows
    if posterior.likelihood.has_noise:
        squares, variances = losses
        relative = _relative_variances(problem, squares)
        nll = _GaussianNLL(posterior, weights, squares, variances, relative)
        if not problem.free_noise:
            variance = posterior.hyperparameters.sigma_noise**2
        elif not problem.free_prior:
            variance = _implied_variance(posterior, ratio)
        else:
            variance = nll.best_variance()
        score = float(nll(variance)) * n_rows
        posterior = posterior.replace(sigma_noise=clamped(variance.sqrt()))
    else:
        score = float(weights @ losses[0]) * n_rows
    if problem.free_prior or not posterior.likelihood.has_noise:
        posterior = posterior.replace(prior_precision=ratio * posterior.scale)
    n_targets = n_rows * posterior.likelihood.n_targets(losses[0].shape[-1])
    return _Candidate(posterior, score if math.isfinite(score) else math.inf, n_targets)


@dataclass(frozen=True)
class _GaussianNLL:
    """Mean Gaussian negative log-likelihood as a function of σ².

    Attributes
    ----------
    posterior : GaussianPosterior
        Its likelihood and order of the curvature are used.
    weights : Tensor of shape (n,)
        Sample weights that sum to one.
    squares : Tensor of shape (n, c)
        Squared residuals.
    variances : Tensor of shape (n, c)
        Variances of the outputs in units of ``σ^(2·order)``.
    relative : Tensor of shape (c,) or (1,)
        Variances of the columns' noise over their common factor.
    """

    posterior: GaussianPosterior
    weights: Tensor
    squares: Tensor
    variances: Tensor
    relative: Tensor

    def __call__(self, variance: Tensor) -> Tensor:
        """Score at σ², ()."""
        order = self.posterior.curvature_order
        total = variance * self.relative + variance**order * self.variances
        nll = (self.squares / total + (2 * math.pi * total).log()) / 2
        return self.weights @ nll.sum(1)

    def best_variance(self) -> Tensor:
        """σ² of the best score under a given ratio ``δ/scale``, ()."""
        scaled = self.squares / (self.relative + self.variances)
        best = clamped(self.weights @ scaled.mean(1))
        if self.posterior.curvature_order == 1:
            return best

        def score(log_variance: float) -> float:
            return float(self(torch.full_like(best, math.exp(log_variance))))

        squares = (self.squares / self.relative).mean(1)
        upper = float(clamped(self.weights @ squares).log())
        found = minimize_scalar(score, bounds=(upper - 30, upper + 1), method="bounded")
        return torch.full_like(best, math.exp(found.x))
