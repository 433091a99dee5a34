"""PriorSearch: prior precision by cross-validation, with one training run per fold.

Neither the trained network nor its curvature depends on the prior. Each fold therefore
requires only one training run, and one linearisation at its held-out samples, for all
prior precisions:

    score(δ) = mean over folds k of mean over samples n of fold k of
               log p(yₙ | xₙ, samples of the other folds, δ).

For each prior precision, an unknown observation noise σ is chosen to maximise the
log-likelihood of the held-out samples of all folds.
"""

import copy
import inspect
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from scipy.stats import rankdata
from sklearn.base import BaseEstimator, is_classifier
from sklearn.dummy import DummyClassifier, DummyRegressor
from sklearn.metrics import brier_score_loss, check_scoring, log_loss
from sklearn.model_selection import GroupKFold, KFold, StratifiedGroupKFold, check_cv
from sklearn.utils import gen_batches, indexable
from sklearn.utils.validation import _check_method_params
from torch import Tensor

from sklaplace.core import progress
from sklaplace.core.cache import check_memory
from sklaplace.core.checks import listed, naming, warn_user
from sklaplace.core.parallel import in_parallel
from sklaplace.core.random import RandomState, private_rng
from sklaplace.estimators.fitting.laplace_fit import LaplaceFit
from sklaplace.estimators.fitting.members import encode
from sklaplace.estimators.predicting.glm_outputs import LinearisationCache
from sklaplace.estimators.training.samples import Samples, as_groups, as_weights, select
from sklaplace.networks.data import TrainingData, is_opaque
from sklaplace.networks.net_checks import check_sampler, whole_batches
from sklaplace.networks.split import hash_folds, sample_keys
from sklaplace.posterior.residual import steepnesses

# Smallest noise, as a fraction of the targets' standard deviation, and tolerance for
# the logarithm of the noise.
SMALLEST_NOISE = 1e-6
NOISE_TOLERANCE = 1e-3
# Half the width of the first search interval of log σ for the next prior precision.
NOISE_STEP = 0.3

Params = dict[str, float]


@dataclass
class Fold:
    """Model trained on the other folds, and the held-out samples of this fold.

    Attributes
    ----------
    model : LaplaceClassifier or LaplaceRegressor
        Model to train.
    samples : Samples
        Samples of the other folds.
    held_out : TrainingData
        Samples of this fold, as passed to ``fit``.
    """

    model: Any
    samples: Samples
    held_out: TrainingData

    def trained(self) -> "Fold":
        """Train the model and accumulate its curvature, in any process."""
        self.options = self.model._check_options()
        fit = self.model._train_and_accumulate(self.options, self.samples)
        self.fit: LaplaceFit = fit.stored()
        solver = self.model._solver(self.options)
        with self.fit.evaluation():
            self.template, self.linear_model = solver.untuned(self.fit)
        self._start: Tensor | None = None
        self.model._cache = LinearisationCache()
        self.model._novelty = self.fit.novelty
        self.model.residual_steepness_ = steepnesses(self.template.likelihood)[-1]
        return self

    def trained_scores(self, candidates: list[Params], scorer: object) -> list[float]:
        """Train the model, and return only the scores of the fold."""
        return self.trained().scores(candidates, scorer, in_pieces=True)

    def under(self, params: Params) -> Any:
        """Return the model that a fit with the given hyperparameters would produce."""
        h = self.template.hyperparameters
        units = {"sigma_noise": self.model._targets.noise_unit}
        tensors = {
            name: torch.full_like(getattr(h, name), value / units.get(name, 1.0))
            for name, value in params.items()
        }
        posterior = self.template.replace(**tensors)
        if self.options.refine is True:
            assert self.linear_model is not None
            with self.fit.evaluation():
                posterior = self.linear_model.refit(posterior, self._start)
            self._start = posterior.mean
        # `set_params` would read all parameters of the skorch net
        self.model.__dict__.update(params)
        self.model._set_fitted(self.options, self.fit.network, posterior)
        return self.model

    def scores(
        self, candidates: list[Params], scorer: Any, *, in_pieces: bool = False
    ) -> list[float]:
        """Return the scores of candidates: mean log-likelihoods if there is no scorer.

        With ``in_pieces``, the held-out samples are processed in several pieces if
        linearising all of them at once would require a lot of memory.
        """
        data = self.held_out
        if scorer is not None:
            options = {}
            if data.sample_weight is not None and _takes_weights(scorer):
                options = {"sample_weight": data.sample_weight}
            return [
                _number(scorer(self.under(params), data.X, data.y, **options))
                for params in candidates
            ]
        totals = np.zeros(len(candidates))
        for piece in self._pieces() if in_pieces else [data]:
            totals += [self.log_likelihood(params, piece) for params in candidates]
        return list(totals / _row_weights(data).sum())

    def log_likelihood(self, params: Params, data: TrainingData) -> float:
        """Return the log-likelihood of held-out samples, in nats."""
        return float(
            _row_weights(data) @ self.under(params)._log_proba_of(data.X, data.y)
        )

    def targets_and_residuals(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the targets and the residuals of the trained network, (n, c) each."""
        self.model._set_fitted(self.options, self.fit.network, self.template)
        mean, _ = self.model.latent_mean_and_variance(self.held_out.X)
        targets = self.held_out.y.reshape(mean.shape).astype(np.float64)
        return targets, targets - mean

    def _pieces(self) -> Iterator[TrainingData]:
        """Yield the held-out samples in pieces that are each linearised in one pass."""
        data, spec = self.held_out, self.fit.network.spec
        if spec.layout.head is not None:
            yield data
            return
        with_covariance = not self.model._score(spec.likelihood).diagonal
        n_rows = self.model.batch_size or spec.batch_size(
            with_covariance=with_covariance
        )
        for rows in gen_batches(len(data.y), int(n_rows)):
            self.model._cache = LinearisationCache()
            yield select(data, np.arange(len(data.y))[rows])


def _row_weights(data: TrainingData) -> np.ndarray:
    """Return the sample weights, or ones if there are no weights."""
    return np.ones(len(data.y)) if data.sample_weight is None else data.sample_weight


def _number(score: Any) -> float:
    """Convert a score to float; raise an error if it is not a number."""
    try:
        return float(score)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"scoring returned {score!r}, which is not a number. Use one scorer that "
            "returns a float."
        ) from error


def _takes_weights(scorer: Any) -> bool:
    """Return whether a scorer accepts sample weights."""
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
    """Return the best log σ within bounds, searching near a guess first."""

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
    """Return the bounds for log σ, from the targets and residuals."""
    parts = [np.hstack(fold.targets_and_residuals()) for fold in folds]
    values = np.concatenate(parts)
    n_targets = values.shape[1] // 2
    std = math.sqrt(values[:, :n_targets].var(0).min())
    high = 2 * max(math.sqrt((values**2).mean(0).max()), 1e-100)
    return math.log(max(SMALLEST_NOISE * std, 1e-12 * high)), math.log(high)


GRID = np.logspace(-3, 3, 20)

Split = tuple[np.ndarray, np.ndarray]  # indices of training and of scored samples


class PriorSearch:
    """Search over prior precisions for one estimator.

    Parameters
    ----------
    estimator : LaplaceClassifierCV or LaplaceRegressorCV
        Estimator with the parameters of the search.
    plain : type
        Class to fit on each fold: `LaplaceClassifier` or `LaplaceRegressor`.
    """

    def __init__(self, estimator: BaseEstimator, plain: type) -> None:
        self.estimator, self.plain = estimator, plain
        self.chooses_noise = isinstance(getattr(estimator, "sigma_noise", None), str)
        # noise levels of the target columns; the search covers their geometric mean
        self.noise_proportions: Any = 1.0
        # plain estimator for checks, later fitted with the best prior precision
        self.model: Any = None

    def fit(self, samples: Samples) -> Any:
        """Search, fit the plain estimator with the best prior, and copy its state."""
        estimator = self.estimator
        if held_out := {"X_val", "y_val", "groups_val"} & set(samples.fit_params):
            raise TypeError(
                f"fit got {listed(held_out)}, but cv selects the held-out rows. Leave "
                f"them out, or use {self.plain.__name__}, which tunes on these rows."
            )
        results, estimator.n_splits_ = self._searched(samples)
        best = int(results["rank_test_score"].argmin())
        self.model = self._model(results["params"][best], estimator.random_state)
        self.model._fit(replace(samples, is_part=True))
        for name in ("n_features_in_", "feature_names_in_"):
            vars(estimator).pop(name, None)
        parameters, fitted = self.model.get_params(deep=False), vars(self.model)
        vars(estimator).update({k: v for k, v in fitted.items() if k not in parameters})
        estimator.cv_results_, estimator.best_index_ = results, best
        estimator.best_score_ = float(results["mean_test_score"][best])
        return estimator

    def _model(
        self, chosen: Params, random_state: RandomState, verbose: int = 0
    ) -> Any:
        """Return the plain estimator with given hyperparameters."""
        if "sigma_noise" in chosen:
            levels = chosen["sigma_noise"] * self.noise_proportions
            chosen = {**chosen, "sigma_noise": levels}
        own = self.plain().get_params(deep=False)
        given = self.estimator.get_params(deep=False)
        settings = {name: given[name] for name in own if name in given}
        # jobs are used for the folds instead
        settings |= {"n_jobs": None, "random_state": random_state, "verbose": verbose}
        return self.plain(**settings | chosen)

    def _unfitted(self, verbose: int = 0) -> Any:
        """Return the unfitted model of a fold, with the estimator's seed."""
        first = {"prior_precision": self._grid[0]}
        if self.chooses_noise:
            first["sigma_noise"] = 1.0
        return self._model(first, copy.deepcopy(self.estimator.random_state), verbose)

    @property
    def _grid(self) -> list[float]:
        """Return the prior precisions to try."""
        given = self.estimator.prior_precisions
        return [float(value) for value in (GRID if given is None else given)]

    # -------------------------------------------------------------------- search
    def _searched(self, samples: Samples) -> tuple[dict[str, Any], int]:
        """Return ``cv_results_`` and the number of folds."""
        data, splits, scorer = self._checked(samples)
        folds = []
        check_sampler(self.estimator.estimator)
        for train, test in splits:
            train = whole_batches(self.estimator.estimator, train)
            params = _check_method_params(data.X, samples.fit_params, indices=train)
            part = select(data, train)
            own = Samples(
                **vars(part), fit_params=params, classes=samples.classes, is_part=True
            )
            folds.append(Fold(self._unfitted(), own, select(data, test)))
        candidates: list[Params] = [{"prior_precision": value} for value in self._grid]
        candidates, scores = self._scores(folds, candidates, scorer)
        return _results(candidates, np.array(scores).T), len(splits)

    def _scores(
        self, folds: list[Fold], candidates: list[Params], scorer: object
    ) -> tuple[list[Params], list[list[float]]]:
        """Return candidates and their scores on each fold."""
        n_jobs = self.estimator.n_jobs
        with progress.phase("folds"):
            if not self.chooses_noise:  # keep only the scores of each fold
                given = [(fold, candidates, scorer) for fold in folds]
                scores = in_parallel(Fold.trained_scores, given, n_jobs, "folds")
                return candidates, scores
            folds = in_parallel(
                Fold.trained, [(fold,) for fold in folds], n_jobs, "folds"
            )
        with progress.phase("tune"):
            if folds[0].template.likelihood.has_noise:
                candidates = with_noise(folds, candidates)
            return candidates, [fold.scores(candidates, scorer) for fold in folds]

    # -------------------------------------------------------------------- checks
    def _checked(self, samples: Samples) -> tuple[TrainingData, list[Split], Any]:
        """Return samples, splits and scorer, after the checks that need no network."""
        estimator = self.estimator
        estimator._validate_params()
        self.model = self._unfitted(estimator.verbose)
        self.model._check_options()
        check_memory(estimator.memory)
        scoring = estimator.scoring
        scorer = None if scoring is None else check_scoring(self.model, scoring)
        encode(self.model, samples)
        if self.chooses_noise:
            self.noise_proportions = self.model._targets.noise_proportions
        X, y = samples.X, self.model._targets.check(samples.y)
        weights = samples.sample_weight
        data = TrainingData(
            X if is_opaque(X) else indexable(X)[0],
            y,
            None if weights is None else as_weights(weights, len(y)),
            as_groups(samples.groups, len(y)),
        )
        splits = self._splits(self.model._targets, data)
        if is_classifier(self.model) and not self.model._targets.target_type.is_single:
            _check_scores_columns(scorer)
        elif isinstance(scoring, str):
            _check_score(estimator, scorer, y, splits[0])
        return data, splits, scorer

    def _splits(self, targets: Any, data: TrainingData) -> list[Split]:
        """Return the indices of each fold's training samples and scored samples."""
        by_class = is_classifier(self.estimator)
        known = np.arange(len(data.y))
        if by_class:  # labels that the criterion ignores have no score
            ignored = targets.is_ignored(data.y).reshape(len(known), -1).all(1)
            known = known[~ignored]
        part = select(data, known)
        cv = _splitter(self.estimator.cv, part, by_class)
        try:
            with private_rng(None):
                X = known.reshape(-1, 1) if is_opaque(part.X) else part.X
                pairs = cv.split(X, part.y, part.groups)
                splits = [(known[a], known[b]) for a, b in pairs]
        except (IndexError, TypeError, ValueError) as error:
            advice = (
                "Use fewer folds, leave out classes of y with few samples, or pass "
                "pairs (train, test) of row indices."
            )
            if part.groups is None and "group" in f"{cv}{error}".lower():
                advice = "Pass groups= to fit, with the group of each row."
            raise ValueError(
                f"cv={self.estimator.cv!r} cannot split {len(known)} samples: "
                f"{str(error).rstrip('.')}. {advice}"
            ) from error
        if not splits:
            raise ValueError("cv has no splits. Pass at least one pair (train, test).")
        for number, split in enumerate(splits):
            _check_split(number, split, data.sample_weight)
            if by_class and len(lacking := targets.missing_classes(data.y[split[0]])):
                raise ValueError(
                    f"Split {number} of cv has no rows of the classes "
                    f"{lacking[:5].tolist()} to train on. {_advice(data, lacking)}, or "
                    "leave these classes out."
                )
        return splits


def _splitter(cv: Any, data: TrainingData, by_class: bool) -> Any:
    """Return the splitter for a value of ``cv`` and samples, which may have groups."""
    has_number, has_groups = isinstance(cv, Integral | None), data.groups is not None
    if cv is None and not (has_groups or by_class):
        cv = hash_folds(sample_keys(data.X, data.y, 0, None), data.y, 5, stratify=False)
    with naming(cv="cv"):
        cv = check_cv(cv, data.y, classifier=by_class)
    if not (has_groups and has_number):
        return cv
    kind = GroupKFold if isinstance(cv, KFold) else StratifiedGroupKFold
    return kind(cv.n_splits)


def _advice(data: TrainingData, lacking: np.ndarray) -> str:
    """Return what to do about classes that are missing from a part of the samples."""
    noun = "row" if data.groups is None else "group"
    rows = np.isin(data.y, lacking).reshape(len(data.y), -1).any(1)
    units = np.arange(len(data.y)) if data.groups is None else data.groups
    if len(np.unique(units[rows])) <= len(lacking):
        return f"A class needs more than one {noun}. Pass more {noun}s"
    return "Use shuffled or stratified folds (StratifiedKFold)"


def _check_split(number: int, split: Split, weights: np.ndarray | None) -> None:
    """Raise ValueError if a fold has no samples to train on or to score."""
    for name, rows in zip(("train on", "score"), split, strict=True):
        if not len(rows) or (weights is not None and not weights[rows].any()):
            raise ValueError(
                f"Split {number} of cv has no rows to {name} with positive weight. "
                "Use fewer folds, or pass other splits."
            )


def _check_score(searched: Any, scorer: Any, y: np.ndarray, split: Split) -> None:
    """Score constant predictions before training; raise an error if scoring fails."""
    kind = DummyClassifier if is_classifier(searched) else DummyRegressor
    train, test = (np.zeros((len(rows), 1)) for rows in split)
    with warnings.catch_warnings(action="ignore"):
        try:
            scorer(kind().fit(train, y[split[0]]), test, y[split[1]])
        except (TypeError, ValueError, AttributeError) as error:
            reason = str(error).replace(kind.__name__, type(searched).__name__)
            raise ValueError(
                f"scoring={searched.scoring!r} cannot score these targets: "
                f"{reason.rstrip('.')}. Use another score, or scoring=None."
            ) from error


def _check_scores_columns(scorer: object) -> None:
    """Raise ValueError for scores that mistake several labels for one-hot classes."""
    score = getattr(scorer, "_score_func", None)
    if score in (log_loss, brier_score_loss):
        raise ValueError(
            f"scoring with {score.__name__} treats the columns of y as classes of a "
            "single label. Use scoring=None, the log-likelihood of all labels."
        )


def _results(candidates: list[Params], scores: np.ndarray) -> dict[str, Any]:
    """Return ``cv_results_`` as in scikit-learn, from scores (candidates, folds)."""
    mean = scores.mean(1)
    is_finite = np.isfinite(mean)
    if not is_finite.any():
        raise ValueError(
            f"No prior precision has a finite score: {mean}. Check what scoring "
            "returns for rows of a fold, or use scoring=None."
        )
    if not is_finite.all():
        warn_user(f"Some scores are not finite, and count as the worst: {mean}.")
    with np.errstate(invalid="ignore"):
        std = scores.std(1)
    columns = {
        f"param_{name}": np.array([params[name] for params in candidates])
        for name in candidates[0]
    }
    ranks = rankdata(-np.where(is_finite, mean, -np.inf), method="min")
    return {
        **columns,
        "params": candidates,
        **{f"split{k}_test_score": column for k, column in enumerate(scores.T)},
        "mean_test_score": mean,
        "std_test_score": std,
        "rank_test_score": ranks.astype(np.int32),
    }
