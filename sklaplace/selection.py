"""Selection: a prior precision by cross-validation, for one training per fold.

Neither the trained network nor its curvature depends on the prior. So each fold
trains once and linearises its held-out rows once, and every prior precision is
asked of the same posterior:

    score(δ) = mean over folds k of mean over rows n of fold k of
               log p(yₙ | xₙ, rows of the other folds, δ).

Targets with noise of unknown size get the noise with each prior precision, as the
maximum over σ of the log-likelihood of the held-out rows of all folds together.
"""

import copy
import inspect
import math
import warnings
from collections.abc import Iterator
from numbers import Integral, Real
from typing import Any, ClassVar

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from scipy.stats import rankdata
from sklearn.base import is_classifier
from sklearn.metrics import check_scoring
from sklearn.model_selection import check_cv
from sklearn.utils import _safe_indexing, column_or_1d, gen_batches, indexable
from sklearn.utils.parallel import Parallel, delayed
from sklearn.utils.validation import _check_method_params, _check_sample_weight
from torch import Tensor

from sklaplace.base import BaseLaplace, Curved, unchanged_on_error
from sklaplace.caching import check_memory
from sklaplace.classifier import LaplaceClassifier
from sklaplace.data import is_opaque
from sklaplace.options import check_positive, listed
from sklaplace.prediction import ProjectedRows
from sklaplace.regressor import LaplaceRegressor
from sklaplace.training import private_rng, take_rows
from sklaplace.tuning import require_head

GRID = np.logspace(-3, 3, 20)
# Noise to look for, as a share of the targets' standard deviation, and the share of
# itself that may be left to find.
SMALLEST_NOISE = 1e-6
NOISE_TOLERANCE = 1e-3
# Under the next prior precision log σ is first looked for no further away than this.
NOISE_STEP = 0.3

Params = dict[str, float]
AllRows = tuple[Any, np.ndarray, np.ndarray | None]  # X, y, weights


class _Fold:
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
        curved: Curved,
        held_out: AllRows,
        *,
        in_pieces: bool = False,
    ) -> None:
        self.model, self.curved = model, curved
        self.X, self.y, self.weights = held_out
        self.in_pieces = in_pieces and model.subset_of_weights != "last_layer"
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
                posterior = require_head(self.head).refit(posterior, self._start)
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
        proba = model.predict_proba(X)[np.arange(len(y)), model._encoder.transform(y)]
        return np.log(np.maximum(proba, np.finfo(np.float64).tiny))
    mean, variance = model._mean_and_variance(X)
    squares = (y.reshape(mean.shape) - mean) ** 2
    return -(squares / variance + np.log(2 * math.pi * variance)).sum(1) / 2


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


def _trained(model: Any, rows: AllRows, fit_params: Any) -> tuple[Any, Curved]:
    """A model and its curvature over some rows."""
    curved = model._curve(*rows, None, None, fit_params)
    return model, curved.stored()


def _trained_and_scored(
    model: Any,
    rows: AllRows,
    fit_params: Any,
    held_out: AllRows,
    candidates: list[Params],
    scorer: Any,
) -> list[float]:
    """Scores of one fold; nothing else is kept of it."""
    model, curved = _trained(model, rows, fit_params)
    fold = _Fold(model, curved, held_out, in_pieces=scorer is None)
    return fold.scores(candidates, scorer)


def _with_noise(folds: list[_Fold], candidates: list[Params]) -> list[Params]:
    """Each candidate with the σ that makes all held-out rows most probable."""
    bounds = _noise_bounds(folds)
    chosen: list[Params] = []
    near = None
    for candidate in candidates:
        near = _best_noise(folds, candidate, bounds, near)
        chosen.append({**candidate, "sigma_noise": math.exp(near)})
    return chosen


def _best_noise(
    folds: list[_Fold],
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


def _noise_bounds(folds: list[_Fold]) -> tuple[float, float]:
    """Range of log σ for the targets and what the networks make of them."""
    parts = [np.hstack(fold.targets_and_residuals()) for fold in folds]
    values = np.concatenate(parts)
    n_targets = values.shape[1] // 2
    spread = math.sqrt(values[:, :n_targets].var(0).mean())
    high = 2 * max(math.sqrt((values**2).mean(0).max()), 1e-100)
    return math.log(max(SMALLEST_NOISE * spread, 1e-12 * high)), math.log(high)


# ------------------------------------------------------------------- estimators
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
        return self._plain(**{**settings, "verbose": 0, **params})

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
        _check_n_jobs(self.n_jobs)
        self._scorer(model)
        model._check_data(X, y, sample_weight, None, None)
        rows = self._indexable(X, y, sample_weight)
        splits = self._splits(*rows[:2])
        for number, split in enumerate(splits):
            self._check_split(model, number, split, *rows[1:])
        return rows, splits

    def _indexable(self, X: Any, y: Any, sample_weight: Any) -> AllRows:
        """Checked rows as they are cut into folds; they are checked again there."""
        y = np.asarray(y)
        if is_classifier(self):
            y = column_or_1d(y)
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
                _rows_of(rows, train),
                _check_method_params(rows[1], fit_params, indices=train),
                _rows_of(rows, test),
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
            delayed(_trained_and_scored)(*job, candidates, scorer) for job in jobs
        )
        return candidates, list(scores)


def _rows_of(rows: AllRows, indices: np.ndarray) -> AllRows:
    X, y, weights = rows
    return _take(X, indices), y[indices], None if weights is None else weights[indices]


def _check_n_jobs(n_jobs: Any) -> None:
    is_integer = isinstance(n_jobs, Integral) and not isinstance(n_jobs, bool)
    if n_jobs is not None and (not is_integer or n_jobs == 0):
        raise ValueError(
            f"n_jobs={n_jobs!r} is not a number of processes. Choose None, a positive "
            "integer, or -1 for one per core."
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
        all predictions and with weights. Scores of the labels alone
        (``"accuracy"``) hardly tell prior precisions apart.
    subset_of_weights, hessian_structure, curvature, prior_structure, prior_mean, \
            refine, temperature, pred_type, link_approx, n_samples, batch_size
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
        subset_of_weights: str = "last_layer",
        hessian_structure: str = "kron",
        curvature: str = "ggn",
        prior_structure: str = "scalar",
        prior_mean: Any = 0.0,
        refine: Any = "auto",
        temperature: float = 1.0,
        pred_type: str = "glm",
        link_approx: str = "auto",
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
        self.subset_of_weights = subset_of_weights
        self.hessian_structure = hessian_structure
        self.curvature = curvature
        self.prior_structure = prior_structure
        self.prior_mean = prior_mean
        self.refine = refine
        self.temperature = temperature
        self.pred_type = pred_type
        self.link_approx = link_approx
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
    subset_of_weights, hessian_structure, curvature, prior_structure, prior_mean, \
            refine, temperature, pred_type, n_samples, batch_size
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
        subset_of_weights: str = "last_layer",
        hessian_structure: str = "kron",
        curvature: str = "ggn",
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
        self.subset_of_weights = subset_of_weights
        self.hessian_structure = hessian_structure
        self.curvature = curvature
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
        trained = Parallel(n_jobs=self.n_jobs)(
            delayed(_trained)(*job[:3]) for job in jobs
        )
        folds = [
            _Fold(model, curved, job[3])
            for (model, curved), job in zip(trained, jobs, strict=True)
        ]
        chosen = _with_noise(folds, candidates)
        return chosen, [fold.scores(chosen, scorer) for fold in folds]
