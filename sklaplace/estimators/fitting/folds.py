"""Folds: models trained on the other folds, scored under many priors.

Neither the trained network nor its curvature depends on the prior. So each fold
trains once and linearises its held-out samples once, for all prior precisions:

    score(δ) = mean over folds k of mean over samples n of fold k of
               log p(yₙ | xₙ, samples of the other folds, δ).

For each prior precision, unknown observation noise σ is chosen to maximise the
log-likelihood of the held-out samples of all folds together.
"""

import inspect
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from sklearn.utils import _safe_indexing, gen_batches
from torch import Tensor

from sklaplace.core import progress
from sklaplace.core.checks import naming
from sklaplace.estimators.fitting.laplace_fit import LaplaceFit
from sklaplace.estimators.predicting.glm_outputs import LinearisationCache
from sklaplace.estimators.training.samples import Samples
from sklaplace.networks.data import TrainingData, is_opaque, take_rows
from sklaplace.posterior.tuning.problem import require_linear_model

# Smallest noise, as a fraction of the targets' standard deviation, and the tolerance
# for the logarithm of the noise.
SMALLEST_NOISE = 1e-6
NOISE_TOLERANCE = 1e-3
# Half the width of the first search interval for log σ at the next prior precision.
NOISE_STEP = 0.3

Params = dict[str, float]


def select(data: TrainingData, rows: np.ndarray) -> TrainingData:
    """Select samples in their original form, with targets and weights."""
    weights = None if data.sample_weight is None else data.sample_weight[rows]
    take = take_rows if is_opaque(data.X) else _safe_indexing
    return TrainingData(take(data.X, rows), data.y[rows], weights)


@dataclass
class Fold:
    """A model trained on the other folds, and the held-out samples of this fold.

    Attributes
    ----------
    model : LaplaceClassifier or LaplaceRegressor
        The model to train.
    samples : Samples
        Samples of the other folds.
    held_out : TrainingData
        Samples of this fold, as passed to ``fit``.
    """

    model: Any
    samples: Samples
    held_out: TrainingData

    def trained(self) -> "Fold":
        """Train the model and accumulate its curvature, maybe in another process."""
        self.options = self.model._check_options()
        fit = self.model._train_and_accumulate(self.options, self.samples)
        self.fit: LaplaceFit = fit.stored()
        solver = self.model._solver(self.options)
        with self.fit.evaluation():
            self.template, self.linear_model = solver.untuned(self.fit)
        self._start: Tensor | None = None
        self.model._cache = LinearisationCache()
        self.model._novelty = self.fit.novelty
        return self

    def trained_scores(self, candidates: list[Params], scorer: object) -> list[float]:
        """Train, return the scores of the fold, and keep nothing else."""
        return self.trained().scores(candidates, scorer, in_pieces=True)

    def under(self, params: Params) -> Any:
        """Return the model as if it had been fitted with the given hyperparameters."""
        h = self.template.hyperparameters
        units = {"sigma_noise": self.model._targets.noise_unit}
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
        # `set_params` would read all parameters of the net
        self.model.__dict__.update(params)
        self.model._set_fitted(self.options, self.fit.network, posterior)
        return self.model

    def scores(
        self, candidates: list[Params], scorer: Any, *, in_pieces: bool = False
    ) -> list[float]:
        """Return the scores of candidates; without a scorer, mean log-likelihoods.

        With ``in_pieces``, log-likelihoods are computed piece by piece if linearising
        all samples at once would need much memory.
        """
        data = self.held_out
        if scorer is not None:
            options = {}
            if data.sample_weight is not None and _takes_weights(scorer):
                options = {"sample_weight": data.sample_weight}
            with naming(scoring="scoring"):
                return [
                    float(scorer(self.under(params), data.X, data.y, **options))
                    for params in candidates
                ]
        totals = np.zeros(len(candidates))
        for piece in self._pieces() if in_pieces else [data]:
            totals += [self.log_likelihood(params, piece) for params in candidates]
        return list(totals / _row_weights(data).sum())

    def log_likelihood(self, params: Params, data: TrainingData) -> float:
        """Return the log-likelihood of some held-out samples, in nats."""
        return float(
            _row_weights(data) @ self.under(params)._log_proba_of(data.X, data.y)
        )

    def targets_and_residuals(self) -> tuple[np.ndarray, np.ndarray]:
        """Return targets and residuals of the trained network, (n, c) each."""
        self.model._set_fitted(self.options, self.fit.network, self.template)
        mean, _ = self.model.latent_mean_and_variance(self.held_out.X)
        targets = self.held_out.y.reshape(mean.shape).astype(np.float64)
        return targets, targets - mean

    def _pieces(self) -> Iterator[TrainingData]:
        """Yield the held-out samples in pieces that are linearised together."""
        data, spec = self.held_out, self.fit.network.spec
        if spec.layout.head is not None:
            yield data
            return
        with_covariance = not self.model._score(spec.likelihood).diagonal
        n_rows = self.model.batch_size or spec.batch_size(
            with_covariance=with_covariance
        )
        for rows in gen_batches(len(data.y), n_rows):
            self.model._cache = LinearisationCache()
            yield select(data, np.arange(len(data.y))[rows])


def _row_weights(data: TrainingData) -> np.ndarray:
    """Return the sample weights, or ones if no weights are given."""
    return np.ones(len(data.y)) if data.sample_weight is None else data.sample_weight


def _takes_weights(scorer: Any) -> bool:
    """Return whether a scorer takes sample weights."""
    if hasattr(scorer, "_accept_sample_weight"):
        return bool(scorer._accept_sample_weight())
    return "sample_weight" in inspect.signature(scorer).parameters


def with_noise(folds: list[Fold], candidates: list[Params]) -> list[Params]:
    """Add to each candidate the σ that maximises the held-out log-likelihood."""
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
    """Return log σ within bounds, near a guess if a maximum is there."""

    def loss(log_sigma: float) -> float:
        params = {**candidate, "sigma_noise": math.exp(log_sigma)}
        return -sum(fold.log_likelihood(params, fold.held_out) for fold in folds)

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
