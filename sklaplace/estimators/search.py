"""Selection: a prior precision by cross-validation, for one training per fold.

As `RidgeCV` is to `Ridge`: `LaplaceClassifierCV` to `LaplaceClassifier`, and
`LaplaceRegressorCV` to `LaplaceRegressor`.
"""

import copy
import warnings
from typing import Any, ClassVar

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
from sklaplace.estimators.base import BaseLaplace
from sklaplace.estimators.classifier import LaplaceClassifier
from sklaplace.estimators.fitting import unchanged_on_error
from sklaplace.estimators.folds import (
    AllRows,
    Fold,
    Params,
    rows_of,
    trained,
    trained_and_scored,
    with_noise,
)
from sklaplace.estimators.regressor import LaplaceRegressor
from sklaplace.networks.data import is_opaque

GRID = np.logspace(-3, 3, 20)


class _PriorSearch(BaseLaplace):
    """What both estimators share: the search; predictions are those of ``_plain``."""

    _plain: ClassVar[type[BaseLaplace]]
    cv: Any
    scoring: Any
    n_jobs: Any
    prior_precisions: Any

    def fit(
        self, X: Any, y: Any, sample_weight: Any = None, **fit_params: Any
    ) -> "_PriorSearch":
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
        with unchanged_on_error(self):
            rows, splits = self._checked_rows(X, y, sample_weight, fit_params)
            candidates, scores = self._search(rows, splits, fit_params)
            results = _results(candidates, np.array(scores).T)
            best = int(results["rank_test_score"].argmin())
            model = self._model(**candidates[best], random_state=self.random_state)
            model.fit(X, y, rows[2], **fit_params)
            self._become(model)
            self.cv_results_, self.n_splits_ = results, len(splits)
            self.best_index_ = best
            self.best_score_ = float(results["mean_test_score"][best])
        if self.verbose:
            print(f"[{type(self).__name__}] {self._summary()}")  # noqa: T201
        return self

    def _summary(self) -> str:
        """What was fitted, in one line."""
        tried = f"{len(self.cv_results_['params'])} tried in {self.n_splits_} folds"
        return f"{super()._summary()}, {tried}, score {self.best_score_:.4g}"

    def _model(self, **params: Any) -> Any:
        """The estimator for one prior precision, with the settings of this one."""
        own = self.get_params(deep=False)
        names = set(self._plain._get_param_names()) & set(own)
        settings = {name: own[name] for name in names}
        # each fold is seeded as the estimator alone would be
        settings["random_state"] = copy.deepcopy(self.random_state)
        model = self._plain(**{**settings, "verbose": 0, **params})
        if "_announced" in vars(self):  # classes of a first partial_fit
            model._announced = self._announced
        return model

    def _check_parameters(self) -> None:
        self._model(**self._first())._check_parameters()

    def _become(self, model: Any) -> None:
        """Become the fitted model, as far as predictions go."""
        for name in ("n_features_in_", "feature_names_in_"):
            self.__dict__.pop(name, None)
        params = set(model.get_params(deep=False))
        found = {k: v for k, v in vars(model).items() if k not in params}
        self.__dict__.update(found)

    # --------------------------------------------------------------- fit: checks
    def _grid(self) -> list[float]:
        """Prior precisions to try."""
        if self.prior_precisions is None:
            return [float(value) for value in GRID]
        check_positive("prior_precisions", self.prior_precisions, scalar=False)
        values = np.asarray(self.prior_precisions, dtype=np.float64)
        if values.ndim != 1:
            raise ValueError(
                f"prior_precisions has shape {values.shape}, not one axis. Choose a "
                "list of positive numbers, each one prior precision to try."
            )
        return [float(value) for value in values]

    def _first(self) -> Params:
        """Values that stand for those to be chosen, of a model before its fit."""
        return {"prior_precision": self._grid()[0]}

    def _checked_rows(
        self, X: Any, y: Any, sample_weight: Any, fit_params: dict[str, Any]
    ) -> tuple[AllRows, list[Any]]:
        """Rows and splits, after all checks that need no network."""
        held_out = {"X_val", "y_val"} & set(fit_params)
        if held_out:
            raise TypeError(
                f"fit got {listed(held_out)}, but here folds are held out. Leave "
                f"them out, or use {self._plain.__name__}, which tunes on such rows."
            )
        model = self._model(**self._first(), verbose=self.verbose)
        model._check_parameters()
        check_memory(self.memory)
        check_n_jobs(self.n_jobs)
        scorer = self._scorer(model)
        model._check_data(X, y, sample_weight, None, None)
        if is_classifier(self) and not model._labelling.is_single:
            _check_scores_columns(scorer)
        rows = self._without_ignored(model, self._indexable(model, X, y, sample_weight))
        splits = self._splits(*rows[:2])
        for number, split in enumerate(splits):
            self._check_split(model, number, split, *rows[1:])
        return rows, splits

    def _without_ignored(self, model: Any, rows: AllRows) -> AllRows:
        """Rows whose labels the criterion does not ignore: no fold could score them."""
        if not is_classifier(self):
            return rows
        ignored = model._is_ignored(rows[1]).reshape(len(rows[1]), -1).all(1)
        return rows_of(rows, np.flatnonzero(~ignored)) if ignored.any() else rows

    def _indexable(self, model: Any, X: Any, y: Any, sample_weight: Any) -> AllRows:
        """Checked rows as they are cut into folds; they are checked again there."""
        y = model._labels(y) if is_classifier(self) else np.asarray(y)
        if not is_opaque(X):
            (X,) = indexable(X)
        if sample_weight is not None:
            rows = np.empty((len(y), 1))
            sample_weight = _check_sample_weight(sample_weight, rows, dtype=np.float64)
        return X, y, sample_weight

    def _scorer(self, model: Any) -> Any:
        """None for the log-likelihood."""
        if self.scoring is None:
            return None
        if not (isinstance(self.scoring, str) or callable(self.scoring)):
            raise ValueError(
                f"scoring={self.scoring!r} is not one score. Choose the name of a "
                "scorer, a callable scorer(estimator, X, y), or None."
            )
        return check_scoring(model, self.scoring)

    def _splits(self, X: Any, y: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """Indices of rows to train on and of rows held out, of each fold."""
        cv = check_cv(self.cv, y, classifier=is_classifier(self))
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

    def _check_split(
        self,
        model: Any,
        number: int,
        split: tuple[np.ndarray, np.ndarray],
        y: np.ndarray,
        weights: np.ndarray | None,
    ) -> None:
        """Refuse folds that cannot be trained on or scored."""
        for name, rows in zip(("train on", "score"), split, strict=True):
            if not len(rows) or (weights is not None and not weights[rows].any()):
                raise ValueError(
                    f"Split {number} of cv has no rows to {name}, or none of positive "
                    "weight. Use fewer folds, or splits of your own."
                )

    # --------------------------------------------------------------- fit: search
    def _search(
        self,
        rows: AllRows,
        splits: list[tuple[np.ndarray, np.ndarray]],
        fit_params: dict[str, Any],
    ) -> tuple[list[Params], list[list[float]]]:
        """Candidates, and their scores in each fold."""
        jobs = [
            (
                self._model(**self._first()),
                rows_of(rows, train),
                _check_method_params(rows[1], fit_params, indices=train),
                rows_of(rows, test),
            )
            for train, test in splits
        ]
        candidates = [{"prior_precision": value} for value in self._grid()]
        return self._scored(jobs, candidates, self._scorer(jobs[0][0]))

    def _scored(
        self, jobs: list[Any], candidates: list[Params], scorer: Any
    ) -> tuple[list[Params], list[list[float]]]:
        """The same for the jobs of the folds; nothing is kept of a fold."""
        scores = Parallel(n_jobs=self.n_jobs)(
            delayed(trained_and_scored)(*job, candidates, scorer) for job in jobs
        )
        return candidates, list(scores)


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


class LaplaceClassifierCV(_PriorSearch, LaplaceClassifier):
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

    _plain = LaplaceClassifier

    def __init__(
        self,
        estimator: Any = None,
        *,
        prior_precisions: Any = None,
        cv: Any = None,
        scoring: Any = None,
        likelihood: Any = None,
        subset_of_weights: str | list[str] = "last_layer",
        subset_params: dict[str, Any] | None = None,
        hessian_structure: str = "kron",
        structure_params: dict[str, Any] | None = None,
        curvature: str = "ggn",
        curvature_params: dict[str, Any] | None = None,
        prior_structure: str = "scalar",
        prior_mean: Any = 0.0,
        refine: Any = "auto",
        temperature: float = 1.0,
        class_weight: dict[Any, float] | str | None = None,
        pred_type: str = "glm",
        link_approx: str = "auto",
        dirichlet_approx: str = "projection",
        n_samples: int = 100,
        batch_size: int | None = None,
        memory: Any = None,
        n_jobs: int | None = None,
        random_state: Any = None,
        verbose: int = 0,
    ) -> None:
        self.estimator = estimator
        self.prior_precisions = prior_precisions
        self.cv = cv
        self.scoring = scoring
        self.likelihood = likelihood
        self.subset_of_weights = subset_of_weights
        self.subset_params = subset_params
        self.hessian_structure = hessian_structure
        self.structure_params = structure_params
        self.curvature = curvature
        self.curvature_params = curvature_params
        self.prior_structure = prior_structure
        self.prior_mean = prior_mean
        self.refine = refine
        self.temperature = temperature
        self.class_weight = class_weight
        self.pred_type = pred_type
        self.link_approx = link_approx
        self.dirichlet_approx = dirichlet_approx
        self.n_samples = n_samples
        self.batch_size = batch_size
        self.memory = memory
        self.n_jobs = n_jobs
        self.random_state = random_state
        self.verbose = verbose

    def _check_split(
        self, model: Any, number: int, split: Any, y: np.ndarray, weights: Any
    ) -> None:
        super()._check_split(model, number, split, y, weights)
        missing = np.setdiff1d(model.classes_, model._classes_of(y[split[0]]))
        if len(missing):
            raise ValueError(
                f"Split {number} of cv has no rows of the classes "
                f"{missing[:5].tolist()} to train on. Use fewer folds, stratified "
                "ones (StratifiedKFold), or leave out classes with so few rows."
            )


class LaplaceRegressorCV(_PriorSearch, LaplaceRegressor):
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

    _plain = LaplaceRegressor

    def __init__(
        self,
        estimator: Any = None,
        *,
        prior_precisions: Any = None,
        cv: Any = None,
        scoring: Any = None,
        likelihood: Any = None,
        subset_of_weights: str | list[str] = "last_layer",
        subset_params: dict[str, Any] | None = None,
        hessian_structure: str = "kron",
        structure_params: dict[str, Any] | None = None,
        curvature: str = "ggn",
        curvature_params: dict[str, Any] | None = None,
        prior_structure: str = "scalar",
        prior_mean: Any = 0.0,
        refine: Any = "auto",
        temperature: float = 1.0,
        pred_type: str = "glm",
        sigma_noise: Any = "auto",
        n_samples: int = 100,
        batch_size: int | None = None,
        memory: Any = None,
        n_jobs: int | None = None,
        random_state: Any = None,
        verbose: int = 0,
    ) -> None:
        self.estimator = estimator
        self.prior_precisions = prior_precisions
        self.cv = cv
        self.scoring = scoring
        self.likelihood = likelihood
        self.subset_of_weights = subset_of_weights
        self.subset_params = subset_params
        self.hessian_structure = hessian_structure
        self.structure_params = structure_params
        self.curvature = curvature
        self.curvature_params = curvature_params
        self.prior_structure = prior_structure
        self.prior_mean = prior_mean
        self.refine = refine
        self.temperature = temperature
        self.pred_type = pred_type
        self.sigma_noise = sigma_noise
        self.n_samples = n_samples
        self.batch_size = batch_size
        self.memory = memory
        self.n_jobs = n_jobs
        self.random_state = random_state
        self.verbose = verbose

    def _first(self) -> Params:
        check_positive("sigma_noise", self.sigma_noise, ["auto"])
        noise = 1.0 if isinstance(self.sigma_noise, str) else self.sigma_noise
        return {**super()._first(), "sigma_noise": noise}

    def _scored(
        self, jobs: list[Any], candidates: list[Params], scorer: Any
    ) -> tuple[list[Params], list[list[float]]]:
        if not isinstance(self.sigma_noise, str):
            return super()._scored(jobs, candidates, scorer)
        fitted = Parallel(n_jobs=self.n_jobs)(
            delayed(trained)(*job[:3]) for job in jobs
        )
        folds = [
            Fold(model, curved, job[3])
            for (model, curved), job in zip(fitted, jobs, strict=True)
        ]
        if not folds[0].template.likelihood.has_noise:
            return candidates, [fold.scores(candidates, scorer) for fold in folds]
        chosen = with_noise(folds, candidates)
        return chosen, [fold.scores(chosen, scorer) for fold in folds]
