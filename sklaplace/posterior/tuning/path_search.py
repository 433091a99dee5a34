"""Search along a path of prior precisions for the best score on held-out data."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from sklaplace.posterior.gaussian import GaussianPosterior
from sklaplace.posterior.tuning.candidate import Candidate, implied_variance, scored
from sklaplace.posterior.tuning.problem import TuningProblem

# To be preferred, the refitted model must raise the total log-likelihood of the
# held-out data by this many nats, about the logarithm of the number of candidates: the
# best score is too optimistic ("strong" evidence: Kass and Raftery 1995).
MARGIN = 3.0
# Relative precision of the loss in refits along the path: for all models, for the best
# models, and for all models if they are sensitive; see `_Refits`.
COARSE_TOLERANCE, FINE_TOLERANCE, EXACT_TOLERANCE = 2e-1, 1e-2, 1e-9
# Largest relative difference between scores at the coarse and the fine tolerance.
UNSURE = 0.02
# Scores that are worse by more than this many nats are ruled out.
CLOSE = 0.5
# Stride of the first search along the path, and index of the first refit: the prior
# gives outputs unit variance there, or the noise is as large as the residuals.
COARSE = 4
MIDDLE = 8


def best_kept(problem: TuningProblem, path: list[Tensor]) -> Candidate:
    """Return the best candidate that keeps the network's weights.

    If class probabilities make points expensive, the score is assumed to have one
    minimum. The search scores every fourth point except the ends, then the points
    around the best, in three passes over the data. If every pass would linearise the
    data again, a single pass scores all points.
    """
    is_cheap = problem.log_proba is None or problem.is_cheap
    is_stream = not all(isinstance(part.validation, list) for part in problem.parts)
    if is_cheap or is_stream or len(path) < 2 * COARSE:
        return min(scored(problem, path), key=lambda candidate: candidate.score)
    candidates: dict[int, Candidate] = {}

    def visit(indices: Iterable[int]) -> int:
        new = [i for i in indices if i in range(len(path)) and i not in candidates]
        found = scored(problem, [path[i] for i in new]) if new else []
        candidates.update(zip(new, found, strict=True))
        return _best_index(candidates)

    best = visit(range(COARSE, len(path) - 1, COARSE))
    best = visit(best + step for step in (-COARSE, -2, 2, COARSE))
    return candidates[visit((best - 1, best + 1))]


def best_refitted(
    problem: TuningProblem, path: list[Tensor], below: float = math.inf
) -> Candidate | None:
    """Return the best candidate with a refitted model.

    None if no score is below a finite limit ``below``.

    In regression, the result has the strongest prior that is not clearly worse than the
    best. Held-out data do not show how much outputs vary where there are no data, and
    under a weak prior they vary a lot.
    """
    models = _Refits(problem, path)
    models.explore(below)
    best = models.candidates[index := models.best]
    if not models.is_exact and best.score - _unsure(best) <= below:
        index = models.refine()
        best = models.candidates[index]
    if best.score >= below and below < math.inf:
        return None
    if problem.log_proba is not None or not problem.free_prior:
        return best
    highest = best.score + MARGIN
    while index and models.at(index - 1, FINE_TOLERANCE, best).score <= highest:
        best = models.candidates[index := index - 1]
    return best


def _best_index(candidates: dict[int, Candidate]) -> int:
    return min(candidates, key=lambda index: candidates[index].score)


def _unsure(candidate: Candidate) -> float:
    """Return by how many nats a more precise refit may lower a score."""
    return 1 + UNSURE * abs(candidate.score)


@dataclass
class _Refits:
    """Candidates with refitted models, by their index on the path.

    All models are refitted to a high precision in two cases: with noise, because one
    model determines the noise level, and with several prior precisions, because models
    then differ more.
    """

    problem: TuningProblem
    path: list[Tensor]
    candidates: dict[int, Candidate] = field(default_factory=dict)

    @property
    def is_exact(self) -> bool:
        """Whether all models are refitted to a high precision."""
        posterior = self.problem.posterior
        return posterior.likelihood.has_noise or posterior.prior_precision.ndim > 0

    @property
    def best(self) -> int:
        """Index of the best candidate."""
        return _best_index(self.candidates)

    def at(self, index: int, tolerance: float, *starts: Candidate) -> Candidate:
        """Refit a model, starting halfway between others or from the network."""
        several: Iterable[tuple[GaussianPosterior, ...]]
        several = zip(*(start.refitted for start in starts), strict=True)
        if not starts:
            several = ((part.posterior,) for part in self.problem.parts)
        tolerance = EXACT_TOLERANCE if self.is_exact else tolerance
        between = map(_between, several)
        found = _refitted(self.problem, between, self.path[index], tolerance)
        self.candidates[index] = found
        return found

    def visit(self, index: int, *beyond: int) -> int:
        """Refit a new model and return the best index.

        The refit starts at the best model, or halfway between it and the model
        ``beyond``.
        """
        if index in range(len(self.path)) and index not in self.candidates:
            near = [self.best, *beyond] if self.candidates else []
            starts = [self.candidates[i] for i in near if i in self.candidates]
            self.at(index, COARSE_TOLERANCE, *starts)
        return self.best

    def explore(self, below: float) -> None:
        """Refit models at and around the best index of the path.

        The search starts at the middle of the path, where prior and data have equal
        weight. It moves by two points in both directions as long as the score improves.
        It then refits the neighbours of the best model, unless a parabola through the
        best score and the scores two points away rises steeply or cannot reach
        ``below``.
        """
        best = middle = self.visit(min(MIDDLE, len(self.path) - 1))
        for index in (middle + 2, middle - 2):
            self.visit(index)
        for stride in (2, -2):
            while (best := self.best) != self.visit(best + stride):
                pass
        low, high = (
            self.candidates[i].score if i in self.candidates else math.inf
            for i in (best - 2, best + 2)
        )
        now = self.candidates[best]
        # at the neighbours, the parabola is now.score + convexity ± slope
        slope, convexity = (high - low) / 4, (low + high - 2 * now.score) / 8
        rise = max(convexity / 2, CLOSE - convexity)
        if not now.score - abs(slope) - _unsure(now) > below:
            for stride in (1, -1):
                if not stride * slope > rise:
                    self.visit(best + stride, best + 2 * stride)

    def refine(self) -> int:
        """Refit the best model, and a close second, precisely; return the best index.

        If one model is clearly best, nothing is refitted. Scores that are compared have
        the same precision.
        """
        first, *others = sorted(self.candidates, key=lambda i: self.candidates[i].score)
        best = self.candidates[first]
        if not others or self.candidates[others[0]].score > best.score + _unsure(best):
            return first
        found, second = self.at(first, FINE_TOLERANCE, best), self.candidates[others[0]]
        change = abs(found.score - best.score)
        if second.score <= found.score + CLOSE + change / 2:
            self.at(others[0], FINE_TOLERANCE, second)
        return self.best


def _between(posteriors: tuple[GaussianPosterior, ...]) -> GaussianPosterior:
    """Return the first posterior, moved to the average of all means."""
    mean = torch.stack([posterior.mean for posterior in posteriors]).mean(0)
    return replace(posteriors[0], mean=mean)


def _refitted(
    problem: TuningProblem,
    starts: Iterable[GaussianPosterior],
    ratio: Tensor,
    tolerance: float,
) -> Candidate:
    """Return the candidate with models refitted at one ratio ``ρ = δ/scale``."""

    def refit(part: TuningProblem, start: GaussianPosterior) -> TuningProblem:
        if part.free_prior:
            template = start.replace(prior_precision=ratio * start.scale)
        else:
            template = start.replace(sigma_noise=implied_variance(start, ratio).sqrt())
        return replace(part, posterior=part.model.refit(template, tolerance=tolerance))

    parts = tuple(map(refit, problem.parts, starts))
    problem = replace(problem, folds=parts) if problem.folds else parts[0]
    (candidate,) = scored(problem, [ratio])
    return replace(candidate, refitted=tuple(part.posterior for part in parts))
