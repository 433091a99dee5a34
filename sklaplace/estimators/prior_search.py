"""PriorSearch: a prior precision by cross-validation, for one training per fold."""

import copy
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
from scipy.stats import rankdata
from sklearn.base import is_classifier
from sklearn.dummy import DummyClassifier, DummyRegressor
from sklearn.metrics import brier_score_loss, check_scoring, log_loss
from sklearn.model_selection import check_cv
from sklearn.utils import indexable
from sklearn.utils.validation import _check_method_params

from sklaplace.core import progress
from sklaplace.core.cache import check_memory
from sklaplace.core.checks import check_n_jobs, check_positive, listed, naming
from sklaplace.core.parallel import in_parallel
from sklaplace.core.random import private_rng
from sklaplace.core.warn import warn_user
from sklaplace.estimators.folds import (
    AllRows,
    Fold,
    Params,
    rows_of,
    trained,
    trained_and_scored,
    with_noise,
)
from sklaplace.estimators.given_net import note_new_weights
from sklaplace.estimators.laplace import BaseLaplace
from sklaplace.estimators.samples import (
    Samples,
    as_weights,
    encode_samples,
    unchanged_on_error,
)
from sklaplace.estimators.summary import reporting_for
from sklaplace.networks.data import is_opaque

GRID = np.logspace(-3, 3, 20)

Split = tuple[np.ndarray, np.ndarray]  # indices to train on, indices to score


class PriorSearch:
    """A search over prior precisions for one estimator and one set of samples.

    Parameters
    ----------
    estimator : LaplaceClassifierCV or LaplaceRegressorCV
        The estimator with the search's parameters.
    plain : type
        The estimator that each fold fits: `LaplaceClassifier` or `LaplaceRegressor`.
    """

    def __init__(self, estimator: Any, plain: type[BaseLaplace]) -> None:
        self.estimator, self.plain = estimator, plain
        # of the target columns, of which the geometric mean is searched
        self._noise_proportions: Any = 1.0

    # -------------------------------------------------------------------- models
    def model(self, **params: Any) -> Any:
        """Return the plain estimator with some parameters, the others as given."""
        given = self.estimator.get_params(deep=False)
        names = set(self.plain._get_param_names()) & set(given)
        settings = {name: given[name] for name in names}
        settings["n_jobs"] = None  # folds are the jobs
        # each fold is seeded as the estimator alone would be
        settings["random_state"] = copy.deepcopy(self.estimator.random_state)
        return self.plain(**{**settings, "verbose": 0, **params})

    @property
    def grid(self) -> list[float]:
        """Prior precisions to try."""
        given = self.estimator.prior_precisions
        if given is None:
            return [float(value) for value in GRID]
        check_positive("prior_precisions", given, scalar=False)
        values = np.asarray(given, dtype=np.float64)
        if values.ndim != 1:
            raise ValueError(
                f"prior_precisions has shape {values.shape}, not one axis. Choose a "
                "list of positive numbers, each one prior precision to try."
            )
        return [float(value) for value in values]

    @property
    def chooses_noise(self) -> bool:
        """Whether the noise is chosen with each prior precision."""
        return isinstance(getattr(self.estimator, "sigma_noise", None), str)

    def first_params(self) -> Params:
        """Return values in place of those to be chosen, of a model before its fit."""
        params = {"prior_precision": self.grid[0]}
        if hasattr(self.estimator, "sigma_noise"):
            noise = self.estimator.sigma_noise
            check_positive("sigma_noise", noise, ["auto"])
            chosen = isinstance(noise, str)
            params["sigma_noise"] = self._noise_proportions if chosen else noise
        return params

    # -------------------------------------------------------------------- checks
    def check(self, samples: Samples) -> tuple[AllRows, list[Split], Any]:
        """Return samples, splits and scorer, after all checks without a network."""
        estimator = self.estimator
        model = self.model(**self.first_params(), verbose=estimator.verbose)
        model._check_options()
        note_new_weights(model)
        check_memory(estimator.memory)
        check_n_jobs(estimator.n_jobs)
        scorer = self._scorer(model)
        encode_samples(model, samples)
        if self.chooses_noise:
            self._noise_proportions = model._targets.noise_proportions
        if is_classifier(model) and not model._targets.target_type.is_single:
            _check_scores_columns(scorer)
        rows = _scored_rows(model, _indexable(model, samples))
        splits = self._splits(*rows[:2])
        for number, split in enumerate(splits):
            _check_split(model, number, split, *rows[1:])
        is_plain = not is_classifier(model) or model._targets.target_type.is_single
        if isinstance(estimator.scoring, str) and is_plain:
            _check_score(estimator, scorer, rows[1], splits[0])
        return rows, splits, scorer

    def _scorer(self, model: Any) -> Any:
        """Return the scorer; None is the log-likelihood."""
        scoring = self.estimator.scoring
        if scoring is None:
            return None
        if not (isinstance(scoring, str) or callable(scoring)):
            raise ValueError(
                f"scoring={scoring!r} is not one score. Choose the name of a "
                "scorer, a callable scorer(estimator, X, y), or None."
            )
        return check_scoring(model, scoring)

    def _splits(self, X: Any, y: np.ndarray) -> list[Split]:
        """Return indices of samples to train on and to score, for each fold."""
        with naming(cv="cv"):
            by_class = is_classifier(self.estimator)
            cv = check_cv(self.estimator.cv, y, classifier=by_class)
        every = np.arange(len(y))
        rows = every.reshape(-1, 1) if is_opaque(X) else X
        try:
            with private_rng(None):
                found = list(cv.split(rows, y))
            splits = [(every[train], every[test]) for train, test in found]
        except (IndexError, TypeError) as error:
            raise ValueError(
                f"cv has splits that are no pairs of row indices ({error}). Give "
                "pairs (train, test) of integers below the number of rows."
            ) from error
        except ValueError as error:
            raise ValueError(
                f"cv={self.estimator.cv!r} cannot split {len(y)} samples: "
                f"{str(error).rstrip('.')}. Use fewer folds, or leave out classes of "
                "y with few samples."
            ) from error
        if not splits:
            raise ValueError("cv has no splits. Give at least one pair (train, test).")
        return splits

    # -------------------------------------------------------------------- search
    def fit(self, samples: Samples) -> Any:
        """Search, fit the plain estimator with the best prior, and take its state."""
        estimator = self.estimator
        held_out = {"X_val", "y_val"} & set(samples.fit_params)
        if held_out:
            raise TypeError(
                f"fit got {listed(held_out)}, but here folds are held out. Leave them "
                f"out, or use {self.plain.__name__}, which tunes on such rows."
            )
        with reporting_for(estimator):
            with unchanged_on_error(estimator):
                self._fit(samples)
            if estimator.verbose:
                progress.line(estimator._summary())
        return estimator

    def _fit(self, samples: Samples) -> None:
        """Search, and set the fitted attributes."""
        estimator = self.estimator
        results, weights, n_splits = self.run(samples)
        best = int(results["rank_test_score"].argmin())
        params = results["params"][best]
        if "sigma_noise" in params:
            levels = params["sigma_noise"] * self._noise_proportions
            params = {**params, "sigma_noise": levels}
        model = self.model(**params, random_state=estimator.random_state)
        model._fit(replace(samples, sample_weight=weights, is_part=True))
        for name in ("n_features_in_", "feature_names_in_"):
            vars(estimator).pop(name, None)
        parameters = set(model.get_params(deep=False))
        fitted = {k: v for k, v in vars(model).items() if k not in parameters}
        vars(estimator).update(fitted)
        estimator.cv_results_, estimator.n_splits_ = results, n_splits
        estimator.best_index_ = best
        estimator.best_score_ = float(results["mean_test_score"][best])

    def run(self, samples: Samples) -> tuple[dict[str, Any], Any, int]:
        """Return ``cv_results_``, checked sample weights, and the number of folds."""
        rows, splits, scorer = self.check(samples)
        jobs = []
        for train, test in splits:
            params = _check_method_params(rows[1], samples.fit_params, indices=train)
            given = *rows_of(rows, train), None, None, params
            part = Samples(*given, samples.classes, is_part=True)
            jobs.append((self.model(**self.first_params()), part, rows_of(rows, test)))
        candidates = [{"prior_precision": value} for value in self.grid]
        candidates, scores = self._scores(jobs, candidates, scorer)
        return _results(candidates, np.array(scores).T), rows[2], len(splits)

    def _scores(
        self, jobs: list[Any], candidates: list[Params], scorer: Any
    ) -> tuple[list[Params], list[list[float]]]:
        """Return candidates, and their scores in each fold."""
        n_jobs = self.estimator.n_jobs
        if not self.chooses_noise:  # nothing is kept of a fold
            given = [(*job, candidates, scorer) for job in jobs]
            with progress.phase("folds"):
                return candidates, in_parallel(
                    trained_and_scored, given, n_jobs, "folds"
                )
        with progress.phase("folds"):
            fitted = in_parallel(trained, [job[:2] for job in jobs], n_jobs, "folds")
        with progress.phase("tune"):
            folds = [
                Fold(found, held_out)
                for found, (*_, held_out) in zip(fitted, jobs, strict=True)
            ]
            if folds[0].template.likelihood.has_noise:
                candidates = with_noise(folds, candidates)
            return candidates, [fold.scores(candidates, scorer) for fold in folds]


def _scored_rows(model: Any, rows: AllRows) -> AllRows:
    """Return samples whose labels the criterion does not ignore: others have no score.

    Numbers are all kept.
    """
    if not is_classifier(model):
        return rows
    ignored = model._targets.is_ignored(rows[1]).reshape(len(rows[1]), -1).all(1)
    return rows_of(rows, np.flatnonzero(~ignored)) if ignored.any() else rows


def _indexable(model: Any, samples: Samples) -> AllRows:
    """Return checked samples as they are split; they are checked again there."""
    X, weights = samples.X, samples.sample_weight
    y = model._targets.check(samples.y)
    if not is_opaque(X):
        (X,) = indexable(X)
    if weights is not None:
        weights = as_weights(weights, len(y))
    return X, y, weights


def _check_split(
    model: Any, number: int, split: Split, y: np.ndarray, weights: np.ndarray | None
) -> None:
    """Raise for folds that cannot be trained on or scored."""
    for name, rows in zip(("train on", "score"), split, strict=True):
        if not len(rows) or (weights is not None and not weights[rows].any()):
            raise ValueError(
                f"Split {number} of cv has no rows to {name}, or none of positive "
                "weight. Use fewer folds, or splits of your own."
            )
    if not is_classifier(model):
        return
    missing = model._targets.missing_classes(y[split[0]])
    if len(missing):
        raise ValueError(
            f"Split {number} of cv has no rows of the classes "
            f"{missing[:5].tolist()} to train on. Use fewer folds, stratified "
            "ones (StratifiedKFold), or leave out classes with so few rows."
        )


def _check_score(estimator: Any, scorer: Any, y: np.ndarray, split: Split) -> None:
    """Raise for a score that fails for constant predictions, before any training."""
    kind = DummyClassifier if is_classifier(estimator) else DummyRegressor
    train, test = (np.zeros((len(rows), 1)) for rows in split)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        warnings.simplefilter("ignore", RuntimeWarning)
        try:
            scorer(kind().fit(train, y[split[0]]), test, y[split[1]])
        except (TypeError, ValueError, AttributeError) as error:
            reason = str(error).replace(kind.__name__, type(estimator).__name__)
            raise ValueError(
                f"scoring={estimator.scoring!r} cannot score these targets: "
                f"{reason.rstrip('.')}. Use another score, or scoring=None."
            ) from error


def _check_scores_columns(scorer: Any) -> None:
    """Refuse scores that take several labels per row for one, written out."""
    score = getattr(scorer, "_score_func", None)
    if score in (log_loss, brier_score_loss):
        raise ValueError(
            f"scoring with {score.__name__} takes columns of y for the classes of one "
            "label per row, and y has several labels. Use scoring=None, the "
            "log-likelihood of all labels."
        )


def _results(candidates: list[Params], scores: np.ndarray) -> dict[str, Any]:
    """As scikit-learn's searches have it, from scores (candidates, folds)."""
    mean = scores.mean(1)
    is_finite = np.isfinite(mean)
    if not is_finite.any():
        raise ValueError(
            f"No prior precision has a finite score: {mean}. Look at what scoring "
            "returns for rows of a fold, or use scoring=None."
        )
    if not is_finite.all():
        warn_user(
            f"Some scores are not finite, and count as the worst: {mean}.",
        )
    with np.errstate(invalid="ignore"):
        std = scores.std(1)
    columns = {
        f"param_{name}": np.array([params[name] for params in candidates])
        for name in candidates[0]
    }
    folds = {f"split{k}_test_score": column for k, column in enumerate(scores.T)}
    ranked = np.where(is_finite, mean, -np.inf)
    return {
        **columns,
        "params": candidates,
        **folds,
        "mean_test_score": mean,
        "std_test_score": std,
        "rank_test_score": rankdata(-ranked, method="min").astype(np.int32),
    }
