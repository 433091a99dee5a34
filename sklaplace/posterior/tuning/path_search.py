"""Search along a path of prior precisions for the best score on held-out data."""

import math
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from sklaplace.core import progress
from sklaplace.posterior.gaussian import GaussianPosterior
from sklaplace.posterior.tuning.candidate import Candidate, implied_variance, scored
from sklaplace.posterior.tuning.problem import TuningProblem

# The refitted model is preferred only if it raises the log-likelihood of the held-out
# data by this many nats in total: about the logarithm of the number of candidates, the
# best of which is too optimistic ("strong" evidence: Kass and Raftery 1995).
MARGIN = 3.0
# Relative precision of the loss of models that are refitted along the path: of all that
# are tried, of those that may be the best, and where all are precise, see `_is_exact`.
COARSE_TOLERANCE, FINE_TOLERANCE, EXACT_TOLERANCE = 2e-1, 1e-2, 1e-9
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


def best_kept(problem: TuningProblem, path: list[Tensor]) -> Candidate:
    """Best candidate with the network's weights.

    Where probabilities make a point expensive, scores are taken to have one minimum:
    every fourth point but the ends is scored, then those around the best, in three
    passes over the data. Data that are linearised anew in every pass are passed once.
    """
    is_cheap = problem.log_proba is None or problem.is_cheap
    is_stream = not all(isinstance(part.validation, list) for part in problem.parts)
    if is_cheap or is_stream or len(path) < 2 * COARSE:
        return min(scored(problem, path), key=lambda candidate: candidate.score)
    candidates: dict[int, Candidate] = {}

    def visit(*indices: int) -> None:
        new = [i for i in indices if 0 <= i < len(path) and i not in candidates]
        found = scored(problem, [path[i] for i in new]) if new else []
        candidates.update(zip(new, found, strict=True))

    last = len(path) - 1
    visit(*range(COARSE, last, COARSE))
    if len({candidate.score for candidate in candidates.values()}) == 1:
        visit(0, last)  # all equal or infinite
    best = _best_index(candidates)
    ends = {min(candidates): best - COARSE, max(candidates): best + COARSE}
    half = COARSE // 2
    visit(best - half, best + half, ends.get(best, best))
    best = _best_index(candidates)
    visit(best - 1, best + 1)
    return candidates[_best_index(candidates)]


def best_refitted(
    problem: TuningProblem, path: list[Tensor], below: float = math.inf
) -> Candidate:
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


def _clear_winner(candidates: dict[int, Candidate], below: float) -> Candidate | None:
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


def _unsure(candidate: Candidate) -> float:
    """How much a score may fall at a higher precision, in nats."""
    return 1 + UNSURE * abs(candidate.score)


def _explored(
    problem: TuningProblem, path: list[Tensor], below: float
) -> dict[int, Candidate]:
    """Candidates at the best index of the path and around it, of the first precision.

    Steps of two points in both directions from the middle of the path, where prior and
    data have equal weight, as long as the score improves; each model starts at the
    best one so far.
    Then the neighbours of the best, where a parabola through it and the two points
    around it does not rise steeply, and may reach ``below``. They start halfway.
    """
    candidates: dict[int, Candidate] = {}

    def visit(index: int, *starts: Iterable[GaussianPosterior]) -> None:
        if 0 <= index < len(path) and index not in candidates:
            start = map(_between, zip(*starts, strict=True))
            ratio = path[index]
            candidates[index] = _refitted(problem, start, ratio, COARSE_TOLERANCE)

    middle = min(MIDDLE, len(path) - 1)
    visit(middle, [part.posterior for part in problem.parts])
    for stride in (2, -2):
        visit(middle + stride, candidates[middle].refitted)
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
    candidates: dict[int, Candidate], best: int, below: float
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


def with_strongest_prior(
    problem: TuningProblem, path: list[Tensor], best: Candidate
) -> Candidate:
    """Refitted model with the strongest prior that is not clearly worse than the best.

    Held-out data do not show how far outputs reach where there are no data; under a
    weak prior that is far.
    """
    highest = best.score + MARGIN
    ratio = best.posterior.prior_precision / best.posterior.scale
    index = int(np.argmin([float((r / ratio).log().abs().max()) for r in path]))
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
) -> Candidate:
    """Candidate with models refitted under one ratio, from other refits' means."""
    progress.count("prior path")

    def refit(part: TuningProblem, start: GaussianPosterior) -> TuningProblem:
        if part.free_prior:
            template = start.replace(prior_precision=ratio * start.scale)
        else:
            template = start.replace(sigma_noise=implied_variance(start, ratio).sqrt())
        precision = EXACT_TOLERANCE if _is_exact(problem) else tolerance
        posterior = part.model.refit(template, tolerance=precision)
        return replace(part, posterior=posterior)

    parts = tuple(map(refit, problem.parts, starts))
    problem = replace(problem, folds=parts) if problem.folds else parts[0]
    (candidate,) = scored(problem, [ratio])
    return replace(candidate, refitted=tuple(part.posterior for part in parts))


def _best_index(candidates: dict[int, Candidate]) -> int:
    return min(candidates, key=lambda index: candidates[index].score)
