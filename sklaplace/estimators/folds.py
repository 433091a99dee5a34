"""Folds: models trained on the other folds, scored under many priors.

Neither the trained network nor its curvature depends on the prior. So each fold
trains once and linearises its held-out samples once, for all prior precisions:

    score(δ) = mean over folds k of mean over samples n of fold k of
               log p(yₙ | xₙ, samples of the other folds, δ).

Unknown observation noise is chosen for each prior precision, as the maximum over σ of
the log-likelihood of the held-out samples of all folds together.
"""

import inspect
import math
from collections.abc import Iterator
from numbers import Real
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from sklearn.utils import _safe_indexing, gen_batches
from torch import Tensor

from sklaplace.core import progress
from sklaplace.estimators.glm_outputs import LinearisationCache
from sklaplace.estimators.laplace_fit import LaplaceFit
from sklaplace.estimators.options import LaplaceOptions
from sklaplace.estimators.samples import Samples
from sklaplace.networks.data import is_opaque, take_rows
from sklaplace.posterior.tuning.problem import require_linear_model

# Smallest noise, as a fraction of the targets' standard deviation, and the tolerance
# of its logarithm.
SMALLEST_NOISE = 1e-6
NOISE_TOLERANCE = 1e-3
# Half the width of the first interval for log σ under the next prior precision.
NOISE_STEP = 0.3

Params = dict[str, float]
AllRows = tuple[Any, np.ndarray, np.ndarray | None]  # X, y, weights


class Fold:
    """A model that was trained on the other folds, and the samples that were not.

    Parameters
    ----------
    trained : TrainedModel
        The model with its curvature, and as yet without a posterior.
    held_out : tuple of inputs, targets and weights
        Of this fold.
    in_pieces : bool
        Whether samples are linearised piece by piece where the linearisation of all
        would need much memory.
    """

    def __init__(
        self, trained: "TrainedModel", held_out: AllRows, *, in_pieces: bool = False
    ) -> None:
        self.model, self.options, self.fit = trained
        self.X, self.y, self.weights = held_out
        self.in_pieces = in_pieces and self.fit.network.spec.layout.head is None
        with self.fit.evaluation():
            self.template, self.linear_model = self.model._solver(self.options).untuned(
                self.fit
            )
        self._start: Tensor | None = None
        self.model._cache = LinearisationCache()
        self.model._novelty = self.fit.novelty

    def under(self, params: Params) -> Any:
        """Return the model under other hyperparameters, as if it was fitted so."""
        model, h = self.model, self.template.hyperparameters
        units = {"sigma_noise": model._targets.noise_unit}
        tensors = {
            name: torch.full_like(getattr(h, name), value / units.get(name, 1.0))
            for name, value in params.items()
        }
        posterior = self.template.replace(**tensors)
        if self.options.refine is True:
            with self.fit.evaluation():
                posterior = require_linear_model(self.linear_model).refit(
                    posterior, self._start
                )
            self._start = posterior.mean
        vars(model).update(params)
        model._set_fitted(self.options, self.fit.network, posterior)
        return model

    def scores(self, candidates: list[Params], scorer: Any) -> list[float]:
        """Return scores of candidates: the mean log-likelihood without a scorer."""
        if scorer is not None:
            options = {}
            if self.weights is not None and _takes_weights(scorer):
                options = {"sample_weight": self.weights}
            return [
                _number(scorer(self.under(params), self.X, self.y, **options))
                for params in candidates
            ]
        totals, n_rows = np.zeros(len(candidates)), 0.0
        for X, y, weights in self._pieces():
            totals += [self._total(params, X, y, weights) for params in candidates]
            n_rows += weights.sum()
        return list(totals / n_rows)

    def log_likelihood(self, params: Params) -> float:
        """Return the log-likelihood of all held-out samples, in nats."""
        return self._total(params, self.X, self.y, self._row_weights())

    def targets_and_residuals(self) -> tuple[np.ndarray, np.ndarray]:
        """Return targets and residuals of the network as trained, (n, c) each."""
        self.model._set_fitted(self.options, self.fit.network, self.template)
        mean, _ = self.model.latent_mean_and_variance(self.X)
        targets = self.y.reshape(mean.shape).astype(np.float64)
        return targets, targets - mean

    def _total(
        self, params: Params, X: Any, y: np.ndarray, weights: np.ndarray
    ) -> float:
        return float(weights @ self.under(params)._log_proba_of(X, y))

    def _row_weights(self) -> np.ndarray:
        return np.ones(len(self.y)) if self.weights is None else self.weights

    def _pieces(self) -> Iterator[tuple[Any, np.ndarray, np.ndarray]]:
        """Yield held-out samples: all, or as many at a time as are linearised."""
        model, weights = self.model, self._row_weights()
        if not self.in_pieces:
            yield self.X, self.y, weights
            return
        with_covariance = not model._score(self.fit.network.spec.likelihood).diagonal
        fitting = self.fit.network.spec.batch_size(with_covariance=with_covariance)
        for rows in gen_batches(len(self.y), model.batch_size or fitting):
            model._cache = LinearisationCache()
            indices = np.arange(len(self.y))[rows]
            yield _take(self.X, indices), self.y[rows], weights[rows]


def _take(X: Any, rows: np.ndarray) -> Any:
    return take_rows(X, rows) if is_opaque(X) else _safe_indexing(X, rows)


def _takes_weights(scorer: Any) -> bool:
    """Whether a scorer takes sample weights."""
    known = getattr(scorer, "_accept_sample_weight", None)
    if known is not None:
        return bool(known())
    return "sample_weight" in inspect.signature(scorer).parameters


def _number(score: Any) -> float:
    """Return a score as a float; raises if it is no number."""
    if not isinstance(score, (Real, np.number)):
        raise ValueError(
            f"scoring returned {score!r}, which is no number. Use one scorer that "
            "returns a number, the higher the better."
        )
    return float(score)


# A model, its options, and its trained network with the curvature of some samples.
TrainedModel = tuple[Any, LaplaceOptions, LaplaceFit]


def trained(model: Any, samples: Samples) -> TrainedModel:
    """Return a model with its curvature over some samples."""
    options = model._check_options()
    return model, options, model._train_and_accumulate(options, samples).stored()


def trained_and_scored(
    model: Any,
    samples: Samples,
    held_out: AllRows,
    candidates: list[Params],
    scorer: Any,
) -> list[float]:
    """Return the scores of one fold, of which nothing else is kept."""
    fold = Fold(trained(model, samples), held_out, in_pieces=scorer is None)
    return fold.scores(candidates, scorer)


def with_noise(folds: list[Fold], candidates: list[Params]) -> list[Params]:
    """Return candidates with the σ that maximises the held-out log-likelihood."""
    bounds = _noise_bounds(folds)
    chosen: list[Params] = []
    near = None
    for candidate in progress.tracked(candidates, "prior path", len(candidates)):
        near = _best_noise(folds, candidate, bounds, near)
        chosen.append({**candidate, "sigma_noise": math.exp(near)})
    return chosen


def _best_noise(
    folds: list[Fold],
    candidate: Params,
    bounds: tuple[float, float],
    near: float | None,
) -> float:
    """Return log σ within bounds, near a guess if there is a maximum there."""

    def loss(log_sigma: float) -> float:
        params = {**candidate, "sigma_noise": math.exp(log_sigma)}
        return -sum(fold.log_likelihood(params) for fold in folds)

    def search(low: float, high: float) -> float:
        settings = {"method": "bounded", "options": {"xatol": NOISE_TOLERANCE}}
        return float(minimize_scalar(loss, bounds=(low, high), **settings).x)

    if near is not None:
        low, high = max(bounds[0], near - NOISE_STEP), min(bounds[1], near + NOISE_STEP)
        found = search(low, high)
        if min(found - low, high - found) > 2 * NOISE_TOLERANCE:
            return found
    return search(*bounds)


def _noise_bounds(folds: list[Fold]) -> tuple[float, float]:
    """Return the bounds of log σ, from targets and residuals."""
    parts = [np.hstack(fold.targets_and_residuals()) for fold in folds]
    values = np.concatenate(parts)
    n_targets = values.shape[1] // 2
    std = math.sqrt(values[:, :n_targets].var(0).mean())
    high = 2 * max(math.sqrt((values**2).mean(0).max()), 1e-100)
    return math.log(max(SMALLEST_NOISE * std, 1e-12 * high)), math.log(high)


def rows_of(rows: AllRows, indices: np.ndarray) -> AllRows:
    """Return some of the samples, with their targets and weights."""
    X, y, weights = rows
    return _take(X, indices), y[indices], None if weights is None else weights[indices]
