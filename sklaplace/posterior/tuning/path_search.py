"""Search along a path of prior precisions for the best score on held-out samples."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from torch import Tensor

from sklaplace.core.newton import ROUNDING
from sklaplace.posterior.tuning.candidate import Candidate, implied_variance, scored
from sklaplace.posterior.tuning.problem import TuningProblem

# A refitted model is preferred if it increases the total log-likelihood of the held-out
# samples by this many nats ("strong" evidence: Kass and Raftery 1995). The margin is
# about the logarithm of the number of candidates, because the best of many scores is
# too optimistic.
MARGIN = 3.0
# Largest number of held-out targets for which `MARGIN` applies in regression.
USUAL = 30
# Relative precision of the loss in refits: along the path, around the best point, and
# if all refits are precise.
COARSE, FINE, EXACT = 2e-1, 1e-2, 1e-9
# Stride of the first search among expensive points.
STRIDE = 4
# Index of the first refit. At this point, the prior variance of the outputs is one, or
# the noise is as large as the residuals.
MIDDLE = 8


def best_unrefitted(problem: TuningProblem, path: list[Tensor]) -> Candidate:
    """Return the best candidate on the path that keeps the network's weights.

    The path contains ratios ``ρ = δ/scale``, starting with the strongest prior. The
    best candidate has the lowest score, a negative log-likelihood of held-out samples.

    If class probabilities are expensive to compute, the score is assumed to have a
    single minimum. Every fourth point is scored first, then the points around the best
    one. The weakest priors are the most expensive, and are skipped once the score
    rises. If every pass would linearise the data again, a single pass scores all
    points.
    """
    is_cheap = problem.score.log_proba is None or problem.score.is_cheap
    # batches that are not in memory are linearised at every pass
    is_stream = not all(isinstance(part.validation, list) for part in problem.parts)
    candidates: dict[int, Candidate] = {}  # by index on the path

    def best_of(indices: Iterable[int]) -> int:
        """Score new points, add them to the candidates, and return the best index."""
        new = [i for i in indices if i in range(len(path)) and i not in candidates]
        scores = scored(problem, [path[i] for i in new])
        candidates.update(zip(new, scores, strict=True))
        return _best(candidates)

    if is_cheap or is_stream:
        return candidates[best_of(range(len(path)))]
    # every fourth point up to the first one beyond MIDDLE, where the prior variance of
    # the outputs is one
    best = best_of(range(0, MIDDLE + STRIDE + 1, STRIDE))
    # unless the score has risen clearly by the last point, score weaker priors, too
    if not candidates[max(candidates)].score > candidates[best].score + MARGIN:
        best = best_of(range(0, len(path), STRIDE))
    # the points between the best one and its neighbours
    return candidates[best_of(range(best - STRIDE + 1, best + STRIDE))]


def best_refitted(
    problem: TuningProblem, path: list[Tensor], below: float = math.inf
) -> Candidate | None:
    """Return the best candidate on the path with a refitted model.

    Return None if ``below`` is finite and no score is lower than ``below``.

    A coarse search along the path finds the best point. If its score is less than
    ``below + MARGIN``, the best point and its neighbour on the better side are refitted
    precisely and compared. All refits are precise if there is noise, because a single
    model determines the noise level. Several prior precisions also require precise
    refits, because the models then differ more.

    In regression, the result has the strongest prior that is not clearly worse than the
    best prior. Held-out samples do not show how much outputs vary far from the data.
    Under a weak prior, outputs far from the data vary a lot.
    """
    posterior = problem.posterior
    is_exact = posterior.likelihood.has_noise or posterior.prior_precision.ndim > 0
    coarse, fine = (EXACT, EXACT) if is_exact else (COARSE, FINE)
    candidates: dict[int, Candidate] = {}  # by index on the path
    # each new candidate determines where the search continues
    for index in _search_order(candidates, len(path)):
        start = candidates[_best(candidates)] if candidates else None
        candidates[index] = refitted(problem, path[index], start, coarse)
    best = _best(candidates)
    if candidates[best].score - MARGIN < below:
        sides = [index for index in candidates if abs(index - best) == 2]
        # the minimum of a parabola through three scores is on the side of the lower one
        better_side = min(sides, key=lambda i: candidates[i].score, default=best)
        nearest, start = {best, (best + better_side) // 2}, candidates[best]
        candidates = {i: refitted(problem, path[i], start, fine) for i in nearest}
        best = _best(candidates)
    chosen = candidates[best]
    # without a limit, the score may be infinite, about which the caller raises an error
    if chosen.score >= below and below < math.inf:
        return None
    if problem.score.log_proba is None and problem.free_prior:
        # score differences grow with the square root of the number of targets
        highest = chosen.score + MARGIN * max(1.0, chosen.n_targets / USUAL) ** 0.5
        for ratio in reversed(path[:best]):  # ever stronger priors
            stronger = refitted(problem, ratio, chosen, fine)
            if not stronger.score <= highest:  # worse, or NaN
                break
            chosen = stronger
    return chosen


def _search_order(candidates: Mapping[int, Candidate], n_points: int) -> Iterator[int]:
    """Yield the indices of points on a path to score, until the best is found.

    The search starts at the middle of the path and moves in both directions, in steps
    of two points, as long as the score improves. Between two steps, the caller adds the
    point to ``candidates``.
    """
    middle = min(MIDDLE, n_points - 1)
    # both neighbours, so that the caller knows the better direction
    initial = middle, middle + 2, middle - 2
    yield from (index for index in initial if index in range(n_points))
    for stride in (2, -2):
        best = _best(candidates)
        while (index := best + stride) in range(n_points) and index not in candidates:
            yield index
            if _best(candidates) == best:
                break
            best = index


def _best(candidates: Mapping[int, Candidate]) -> int:
    return min(candidates, key=lambda index: candidates[index].score)


def refitted(
    problem: TuningProblem,
    ratio: Tensor,
    start: Candidate | None,
    tolerance: float = ROUNDING,
) -> Candidate:
    """Return the candidate with models refitted at a ratio ``ρ = δ/scale``.

    Refits start at another candidate or at the network's weights. A fixed prior leaves
    only the noise level to satisfy the ratio. If the problem has folds, the model of
    each fold is refitted, and the score is that of all folds together.
    """
    refits = []
    starts = start.refitted if start else [part.posterior for part in problem.parts]
    for part, posterior in zip(problem.parts, starts, strict=True):
        if part.free_prior:
            template = posterior.replace(prior_precision=ratio * posterior.scale)
        else:
            noise = implied_variance(posterior, ratio).sqrt()
            template = posterior.replace(sigma_noise=noise)
        refit = part.model.refit(template, tolerance=tolerance)
        refits.append(replace(part, posterior=refit))
    problem = replace(problem, folds=tuple(refits)) if problem.folds else refits[0]
    (candidate,) = scored(problem, [ratio])  # one ratio, one candidate
    return replace(candidate, refitted=tuple(part.posterior for part in refits))
