"""Selection: a prior precision by cross-validation, for one training per fold.

As `RidgeCV` is to `Ridge`: `LaplaceClassifierCV` to `LaplaceClassifier`, and
`LaplaceRegressorCV` to `LaplaceRegressor`.
"""

import copy
import warnings
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from scipy.stats import rankdata
from sklearn.base import is_classifier
from sklearn.metrics import brier_score_loss, check_scoring, log_loss
from sklearn.model_selection import check_cv
from sklearn.utils import indexable
from sklearn.utils.parallel import Parallel, delayed
from sklearn.utils.validation import _check_method_params, _check_sample_weight

from sklaplace.core.cache import check_memory
from sklaplace.core.checks import check_n_jobs, check_positive, listed
from sklaplace.core.random import private_rng
from sklaplace.estimators.classifier import LaplaceClassifier
from sklaplace.estimators.folds import (
    AllRows,
    Fold,
    Params,
    rows_of,
    trained,
    trained_and_scored,
    with_noise,
)
from sklaplace.estimators.laplace import BaseLaplace
from sklaplace.estimators.regressor import LaplaceRegressor
from sklaplace.estimators.samples import Samples, encode_samples, unchanged_on_error
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

    # -------------------------------------------------------------------- models
    def model(self, **params: Any) -> Any:
        """Return the plain estimator with some parameters, the others as given."""
        given = self.estimator.get_params(deep=False)
        names = set(self.plain._get_param_names()) & set(given)
        settings = {name: given[name] for name in names}
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
            params["sigma_noise"] = 1.0 if isinstance(noise, str) else noise
        return params

    # -------------------------------------------------------------------- checks
    def check(self, samples: Samples) -> tuple[AllRows, list[Split], Any]:
        """Return samples, splits and scorer, after all checks without a network."""
        estimator = self.estimator
        model = self.model(**self.first_params(), verbose=estimator.verbose)
        model._check_options()
        check_memory(estimator.memory)
        check_n_jobs(estimator.n_jobs)
        scorer = self._scorer(model)
        encode_samples(model, samples)
        if is_classifier(model) and not model._targets.target_type.is_single:
            _check_scores_columns(scorer)
        rows = _scored_rows(model, _indexable(model, samples))
        splits = self._splits(*rows[:2])
        for number, split in enumerate(splits):
            _check_split(model, number, split, *rows[1:])
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
        cv = check_cv(self.estimator.cv, y, classifier=is_classifier(self.estimator))
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
        if not splits:
            raise ValueError("cv has no splits. Give at least one pair (train, test).")
        return splits

    # -------------------------------------------------------------------- search
    def run(self, samples: Samples) -> tuple[dict[str, Any], AllRows, int]:
        """Return ``cv_results_``, the samples that were scored, and the folds."""
        rows, splits, scorer = self.check(samples)
        jobs = []
        for train, test in splits:
            params = _check_method_params(rows[1], samples.fit_params, indices=train)
            part = Samples(*rows_of(rows, train), None, None, params, samples.classes)
            jobs.append((self.model(**self.first_params()), part, rows_of(rows, test)))
        candidates = [{"prior_precision": value} for value in self.grid]
        candidates, scores = self._scores(jobs, candidates, scorer)
        return _results(candidates, np.array(scores).T), rows, len(splits)

    def _scores(
        self, jobs: list[Any], candidates: list[Params], scorer: Any
    ) -> tuple[list[Params], list[list[float]]]:
        """Return candidates, and their scores in each fold."""
        parallel = Parallel(n_jobs=self.estimator.n_jobs)
        if not self.chooses_noise:  # nothing is kept of a fold
            scores = parallel(
                delayed(trained_and_scored)(*job, candidates, scorer) for job in jobs
            )
            return candidates, list(scores)
        fitted = parallel(delayed(trained)(*job[:2]) for job in jobs)
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
        weights = _check_sample_weight(weights, np.empty((len(y), 1)), dtype=np.float64)
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
        warnings.warn(
            f"Some scores are not finite, and count as the worst: {mean}.",
            UserWarning,
            stacklevel=3,
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


def _fit_search(
    self: Any, X: Any, y: Any, sample_weight: Any = None, **fit_params: Any
) -> Any:
    """Choose the prior precision by cross-validation, then fit all rows with it.

    Parameters
    ----------
    X : array-like of shape (n, ...), dict of arrays, or torch Dataset
        Training rows, as for the estimator without ``CV``.
    y : array-like of shape (n,) or (n, n_outputs)
        Targets; class labels of any kind for a classifier.
    sample_weight : array-like of shape (n,), optional
        Non-negative weights of the rows, in training and in scores. A scorer
        gets them if it takes them; the mean over folds is not weighted.
    **fit_params : dict
        Passed to the ``fit`` of the skorch net; of arrays with n entries each
        fold gets its own.

    Returns
    -------
    self : object
        The fitted estimator.

    Raises
    ------
    ValueError, TypeError
        If an option, the data or the network cannot be right, or no prior
        precision has a finite score; the estimator, the network and the data
        are then as they were.

    Notes
    -----
    Costs one training of the network per fold and one on all rows, each with
    one pass for the curvature, and one pass over the held-out rows of each
    fold. Prior precisions add what follows from these: for k outputs and P
    weights O(n k P) each, a refit of the last layer with ``refine=True``, and
    about ten times as much where the noise is chosen, too.
    """
    held_out = {"X_val", "y_val"} & set(fit_params)
    if held_out:
        raise TypeError(
            f"fit got {listed(held_out)}, but here folds are held out. Leave them out, "
            f"or use {type(self).__name__.removesuffix('CV')}, which tunes on such "
            "rows."
        )
    return self._fit(Samples(X, y, sample_weight, None, None, fit_params))


_fit_search.__name__ = "fit"


def _search(estimator: Any, plain: type[BaseLaplace], samples: Samples) -> Any:
    """Search, then fit the plain estimator with the best prior, and take its state."""
    with unchanged_on_error(estimator):
        search = PriorSearch(estimator, plain)
        results, rows, n_splits = search.run(samples)
        best = int(results["rank_test_score"].argmin())
        params = results["params"][best]
        model = search.model(**params, random_state=estimator.random_state)
        model._fit(replace(samples, sample_weight=rows[2]))
        for name in ("n_features_in_", "feature_names_in_"):
            vars(estimator).pop(name, None)
        parameters = set(model.get_params(deep=False))
        fitted = {k: v for k, v in vars(model).items() if k not in parameters}
        vars(estimator).update(fitted)
        estimator.cv_results_, estimator.n_splits_ = results, n_splits
        estimator.best_index_ = best
        estimator.best_score_ = float(results["mean_test_score"][best])
    if estimator.verbose:
        tried = f"{len(results['params'])} tried in {n_splits} folds"
        score = f"score {estimator.best_score_:.4g}"
        print(f"[{type(estimator).__name__}] {estimator._summary()}, {tried}, {score}")  # noqa: T201
    return estimator


@dataclass(eq=False, repr=False, kw_only=True)
class LaplaceClassifierCV(LaplaceClassifier):
    """`LaplaceClassifier` whose prior precision is chosen by cross-validation.

    Makes the choice that ``GridSearchCV`` over ``prior_precision`` would make, but
    trains the network once per fold in place of once per fold and prior precision.
    Prefer it where there are too few rows to set any aside; `LaplaceClassifier`
    tunes on one set of held-out rows at the price of one training.

    Parameters
    ----------
    estimator : skorch net, FrozenEstimator or None, default=None
        The network, as for `LaplaceClassifier`. A frozen one is not trained: its
        folds are those of the curvature only, so that it must have learned from
        other rows than these. From the same rows its scores are those of training.
    prior_precisions : array-like of shape (G,) or None, default=None
        Prior precisions to try. None is 20 values from 1e-3 to 1e3, evenly spaced
        in their logarithms. If the best is the first or the last, try more.
    cv : int, splitter, iterable or None, default=None
        Folds, as everywhere in scikit-learn: None is five, stratified by class. For
        groups give the list of ``splitter.split(X, y, groups)``. All classes must
        be among the rows that each fold trains on.
    scoring : str, callable or None, default=None
        What a prior precision is judged by, the higher the better. None is the mean
        log-probability of the held-out labels: ``"neg_log_loss"``, but finite for
        all predictions and with weights, and right for several labels per row, where
        that one is refused. Scores of the labels alone (``"accuracy"``) hardly tell
        prior precisions apart.
    likelihood, subset_of_weights, subset_params, hessian_structure, \
            structure_params, curvature, curvature_params, prior_structure, \
            prior_mean, refine, temperature, class_weight, pred_type, link_approx, \
            dirichlet_approx, n_samples, batch_size
        As for `LaplaceClassifier`. Under a ``prior_structure`` other than
        ``"scalar"`` all precisions are the same. ``refine=True`` refits the last
        layer under every prior precision; ``"auto"`` is False.
    memory : None, str, path or joblib.Memory, default=None
        Where networks and their curvature are kept, those of the folds among them,
        so that further fits, also by ``GridSearchCV``, train none of them again.
        Needs a ``random_state``.
    n_jobs : int or None, default=None
        Processes to train folds in; None is one unless in a
        ``joblib.parallel_config``, -1 one per core.
    random_state : int, RandomState or None, default=None
        Seeds training and draws: of each fold, and of the last fit, as it would
        seed a `LaplaceClassifier`. None differs every time.
    verbose : int, default=0
        Print one line after fitting if positive.

    Attributes
    ----------
    prior_precision_ : float or ndarray
        The best prior precision.
    best_score_ : float
        Its score, the mean over folds.
    best_index_ : int
        Where it is in ``prior_precisions``.
    cv_results_ : dict
        As that of ``GridSearchCV``: ``"param_prior_precision"``, ``"params"``,
        ``"split0_test_score"`` and so on, ``"mean_test_score"``,
        ``"std_test_score"``, ``"rank_test_score"``.
    n_splits_ : int
        Number of folds.
    estimator_, posterior_, classes_, n_features_in_, feature_names_in_, n_iter_, \
            log_marginal_likelihood_value_
        As for `LaplaceClassifier`, of the fit on all rows.

    See Also
    --------
    LaplaceClassifier : Takes the prior precision, or chooses it without folds.

    Notes
    -----
    With F folds and G prior precisions: F + 1 trainings and passes for the
    curvature, F passes over held-out rows, and G times the algebra that follows.
    A scorer keeps the linearised rows of a fold in memory, and with
    ``subset_of_weights="all"`` these are large; ``scoring=None`` keeps a batch.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from sklaplace import LaplaceClassifierCV
    >>> X, y = load_iris(return_X_y=True)
    >>> model = LaplaceClassifierCV(
    ...     prior_precisions=[0.01, 0.1, 1.0, 10.0], cv=3, random_state=0
    ... ).fit(X, y)
    >>> model.cv_results_["mean_test_score"].shape
    (4,)
    >>> model.prior_precision_ in model.prior_precisions
    True
    >>> model.predict_proba(X[:2]).shape
    (2, 3)
    """

    prior_precisions: Any = None
    cv: Any = None
    scoring: Any = None
    n_jobs: int | None = None
    # chosen by the search: not parameters here
    prior_precision: Any = field(default="auto", init=False)
    prior: Any = field(default=None, init=False)
    validation_fraction: float = field(default=0.2, init=False)

    fit = _fit_search

    def _fit(self, samples: Samples) -> Any:
        return _search(self, LaplaceClassifier, samples)


@dataclass(eq=False, repr=False, kw_only=True)
class LaplaceRegressorCV(LaplaceRegressor):
    """`LaplaceRegressor` whose prior precision is chosen by cross-validation.

    Makes the choice that ``GridSearchCV`` over ``prior_precision`` would make, but
    trains the network once per fold in place of once per fold and prior precision.
    The noise can be chosen with it, on rows that no network has seen. Prefer it
    where there are too few rows to set any aside; `LaplaceRegressor` tunes on one
    set of held-out rows at the price of one training.

    Parameters
    ----------
    estimator : skorch net, FrozenEstimator or None, default=None
        The network, as for `LaplaceRegressor`. A frozen one is not trained: its
        folds are those of the curvature only, so that it must have learned from
        other rows than these. From the same rows its scores are those of training.
    prior_precisions : array-like of shape (G,) or None, default=None
        Prior precisions to try. None is 20 values from 1e-3 to 1e3, evenly spaced
        in their logarithms. If the best is the first or the last, try more: they
        depend on the units of y.
    cv : int, splitter, iterable or None, default=None
        Folds, as everywhere in scikit-learn: None is five. For groups give the list
        of ``splitter.split(X, y, groups)``.
    scoring : str, callable or None, default=None
        What a prior precision is judged by, the higher the better. None is the mean
        log-density of the held-out targets, noise included, in nats per row. Scores
        of the mean alone (``"r2"``) cannot tell prior precisions apart unless
        ``refine=True``.
    likelihood, subset_of_weights, subset_params, hessian_structure, \
            structure_params, curvature, curvature_params, prior_structure, \
            prior_mean, refine, temperature, pred_type, n_samples, batch_size
        As for `LaplaceRegressor`. Under a ``prior_structure`` other than
        ``"scalar"`` all precisions are the same. ``refine=True`` refits the last
        layer under every prior precision; ``"auto"`` is False.
    sigma_noise : float or "auto", default="auto"
        Standard deviation of the observation noise, one for all outputs. ``"auto"``
        chooses one with each prior precision: that under which the held-out rows
        of all folds together are most probable, whatever ``scoring`` is.
    memory : None, str, path or joblib.Memory, default=None
        Where networks and their curvature are kept, those of the folds among them,
        so that further fits, also by ``GridSearchCV``, train none of them again.
        Needs a ``random_state``.
    n_jobs : int or None, default=None
        Processes to train folds in; None is one unless in a
        ``joblib.parallel_config``, -1 one per core.
    random_state : int, RandomState or None, default=None
        Seeds training: of each fold, and of the last fit, as it would seed a
        `LaplaceRegressor`. None differs every time.
    verbose : int, default=0
        Print one line after fitting if positive.

    Attributes
    ----------
    prior_precision_ : float or ndarray
        The best prior precision.
    sigma_noise_ : float
        Standard deviation of the observation noise: as given, or chosen with the
        best prior precision.
    best_score_ : float
        Its score, the mean over folds.
    best_index_ : int
        Where it is in ``prior_precisions``.
    cv_results_ : dict
        As that of ``GridSearchCV``: ``"param_prior_precision"``, ``"params"``,
        ``"split0_test_score"`` and so on, ``"mean_test_score"``,
        ``"std_test_score"``, ``"rank_test_score"``. Where the noise is chosen,
        ``"param_sigma_noise"`` has it, and so have the ``"params"``.
    n_splits_ : int
        Number of folds.
    estimator_, posterior_, n_features_in_, feature_names_in_, n_iter_, \
            log_marginal_likelihood_value_
        As for `LaplaceRegressor`, of the fit on all rows.

    See Also
    --------
    LaplaceRegressor : Takes prior precision and noise, or chooses them without folds.

    Notes
    -----
    With F folds and G prior precisions: F + 1 trainings and passes for the
    curvature, F passes over held-out rows, and G times the algebra that follows;
    with ``sigma_noise="auto"`` about 10 G times, and all folds are kept in memory
    until it is chosen. So are the linearised rows of a fold with a scorer.

    Residuals of training rows would say too little noise for an over-trained
    network. Those of held-out rows have noise and uncertainty of the weights in
    them, which prior precision and noise share in the way that explains them best:
    among pairs (δ, σ) the log-density of the pooled rows is maximised over σ > 0
    and the δ to try. One number for all rows makes little optimism, 1/(2 n) nats
    per row.

    Examples
    --------
    >>> from sklearn.datasets import load_diabetes
    >>> from sklaplace import LaplaceRegressorCV
    >>> X, y = load_diabetes(return_X_y=True)
    >>> model = LaplaceRegressorCV(
    ...     prior_precisions=[0.01, 0.1, 1.0, 10.0], cv=3, random_state=0
    ... ).fit(X, y)
    >>> model.prior_precision_ in model.prior_precisions
    True
    >>> bool(45 < model.sigma_noise_ < 65)
    True
    >>> mean, std = model.predict(X[:2], return_std=True)
    >>> mean.shape, std.shape
    ((2,), (2,))
    """

    prior_precisions: Any = None
    cv: Any = None
    scoring: Any = None
    n_jobs: int | None = None
    # chosen by the search: not parameters here
    prior_precision: Any = field(default="auto", init=False)
    prior: Any = field(default=None, init=False)
    validation_fraction: float = field(default=0.2, init=False)

    fit = _fit_search

    def _fit(self, samples: Samples) -> Any:
        return _search(self, LaplaceRegressor, samples)
