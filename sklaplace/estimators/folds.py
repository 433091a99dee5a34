"""Folds: models that have learned from the other folds, asked under many priors.

Neither the trained network nor its curvature depends on the prior. So each fold
trains once and linearises its held-out rows once, and every prior precision is
asked of the same posterior:

    score(δ) = mean over folds k of mean over rows n of fold k of
               log p(yₙ | xₙ, rows of the other folds, δ).

Targets with noise of unknown size get the noise with each prior precision, as the
maximum over σ of the log-likelihood of the held-out rows of all folds together.
"""

import inspect
import math
from collections.abc import Iterator
from numbers import Real
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from sklearn.base import is_classifier
from sklearn.utils import _safe_indexing, gen_batches
from torch import Tensor

from sklaplace.estimators.base import LaplaceFit
from sklaplace.estimators.prediction import ProjectedRows
from sklaplace.networks.data import is_opaque
from sklaplace.networks.training import take_rows
from sklaplace.posterior.tuning.task import require_linear_model

# Noise to look for, as a share of the targets' standard deviation, and the share of
# itself that may be left to find.
SMALLEST_NOISE = 1e-6
NOISE_TOLERANCE = 1e-3
# Under the next prior precision log σ is first looked for no further away than this.
NOISE_STEP = 0.3

Params = dict[str, float]
AllRows = tuple[Any, np.ndarray, np.ndarray | None]  # X, y, weights


class Fold:
    """A model that has learned from the other folds, and the rows that it has not.

    Parameters
    ----------
    model : LaplaceClassifier or LaplaceRegressor
        With the curvature ``curved``, and as yet without a posterior.
    held_out : tuple of rows, targets and weights
        Of this fold.
    in_pieces : bool
        Whether rows are linearised piece by piece, and forgotten again, where the
        linearisation of all would need much memory.
    """

    def __init__(
        self,
        model: Any,
        curved: LaplaceFit,
        held_out: AllRows,
        *,
        in_pieces: bool = False,
    ) -> None:
        self.model, self.curved = model, curved
        self.X, self.y, self.weights = held_out
        self.in_pieces = in_pieces and curved.network.inspected.layout.head is None
        with model._asked(curved):
            self.template, self.head = model._initial(curved)
        self._start: Tensor | None = None
        model._projected_rows = ProjectedRows()

    def under(self, params: Params) -> Any:
        """The model under other hyperparameters, as if it had been fitted so."""
        model, h = self.model, self.template.hyperparameters
        tensors = {
            name: torch.full_like(getattr(h, name), value)
            for name, value in params.items()
        }
        posterior = self.template.replace(**tensors)
        if model._refine() is True:
            with model._asked(self.curved):
                posterior = require_linear_model(self.head).refit(
                    posterior, self._start
                )
            self._start = posterior.mean
        vars(model).update(params)
        model._publish(self.curved, posterior)
        return model

    def scores(self, candidates: list[Params], scorer: Any) -> list[float]:
        """Score of each candidate; the mean log-likelihood if ``scorer`` is None."""
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
        """Log-likelihood of all held-out rows, in nats."""
        return self._total(params, self.X, self.y, self._row_weights())

    def targets_and_residuals(self) -> tuple[np.ndarray, np.ndarray]:
        """Targets and what the network, its head as it is, lacks of them, (n, c)."""
        self.model._publish(self.curved, self.template)
        mean, _ = self.model.latent_mean_and_variance(self.X)
        targets = self.y.reshape(mean.shape).astype(np.float64)
        return targets, targets - mean

    def _total(
        self, params: Params, X: Any, y: np.ndarray, weights: np.ndarray
    ) -> float:
        return float(weights @ _log_densities(self.under(params), X, y))

    def _row_weights(self) -> np.ndarray:
        return np.ones(len(self.y)) if self.weights is None else self.weights

    def _pieces(self) -> Iterator[tuple[Any, np.ndarray, np.ndarray]]:
        """Held-out rows: all, or as many at a time as are linearised at once."""
        model, weights = self.model, self._row_weights()
        if not self.in_pieces:
            yield self.X, self.y, weights
            return
        needs_covariance = not model._needs_variances_only()
        fitting = self.curved.network.inspected.batch_size(
            with_covariance=needs_covariance
        )
        for rows in gen_batches(len(self.y), model.batch_size or fitting):
            model._projected_rows = ProjectedRows()
            indices = np.arange(len(self.y))[rows]
            yield _take(self.X, indices), self.y[rows], weights[rows]


def _log_densities(model: Any, X: Any, y: np.ndarray) -> np.ndarray:
    """Log-probability, or log density, of each target; finite."""
    if is_classifier(model):
        found: np.ndarray = model._log_proba_of(X, y)
        return found
    mean, variance = model._latent(X)
    likelihood, noise = model._likelihood(), model._noise()
    targets = y.reshape(len(mean), -1).astype(np.float64)
    densities: Tensor = likelihood.log_density(
        *map(torch.as_tensor, (mean, variance, targets)), noise
    )
    return densities.numpy()


def _take(X: Any, rows: np.ndarray) -> Any:
    return take_rows(X, rows) if is_opaque(X) else _safe_indexing(X, rows)


def _takes_weights(scorer: Any) -> bool:
    """Whether a scorer can weigh rows."""
    known = getattr(scorer, "_accept_sample_weight", None)
    if known is not None:
        return bool(known())
    return "sample_weight" in inspect.signature(scorer).parameters


def _number(score: Any) -> float:
    """What a scorer has returned, if it is a score."""
    if not isinstance(score, (Real, np.number)):
        raise ValueError(
            f"scoring returned {score!r}, which is no number. Use one scorer that "
            "returns a number, the higher the better."
        )
    return float(score)


def trained(model: Any, rows: AllRows, fit_params: Any) -> tuple[Any, LaplaceFit]:
    """A model and its curvature over some rows."""
    curved = model._curve(*rows, None, None, fit_params)
    return model, curved.stored()


def trained_and_scored(
    model: Any,
    rows: AllRows,
    fit_params: Any,
    held_out: AllRows,
    candidates: list[Params],
    scorer: Any,
) -> list[float]:
    """Scores of one fold; nothing else is kept of it."""
    model, curved = trained(model, rows, fit_params)
    fold = Fold(model, curved, held_out, in_pieces=scorer is None)
    return fold.scores(candidates, scorer)


def with_noise(folds: list[Fold], candidates: list[Params]) -> list[Params]:
    """Each candidate with the σ that makes all held-out rows most probable."""
    bounds = _noise_bounds(folds)
    chosen: list[Params] = []
    near = None
    for candidate in candidates:
        near = _best_noise(folds, candidate, bounds, near)
        chosen.append({**candidate, "sigma_noise": math.exp(near)})
    return chosen


def _best_noise(
    folds: list[Fold],
    candidate: Params,
    bounds: tuple[float, float],
    near: float | None,
) -> float:
    """Logarithm of σ within bounds; if there is one near a guess, that."""

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
    """Range of log σ for the targets and what the networks make of them."""
    parts = [np.hstack(fold.targets_and_residuals()) for fold in folds]
    values = np.concatenate(parts)
    n_targets = values.shape[1] // 2
    spread = math.sqrt(values[:, :n_targets].var(0).mean())
    high = 2 * max(math.sqrt((values**2).mean(0).max()), 1e-100)
    return math.log(max(SMALLEST_NOISE * spread, 1e-12 * high)), math.log(high)


def rows_of(rows: AllRows, indices: np.ndarray) -> AllRows:
    """Some of the rows, with their targets and weights."""
    X, y, weights = rows
    return _take(X, indices), y[indices], None if weights is None else weights[indices]
