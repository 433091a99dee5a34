"""LaplaceClassifierCV, LaplaceRegressorCV: prior precision by cross-validation.

These classes extend the Laplace estimators as `RidgeCV` extends `Ridge`. The network is
trained once per fold, regardless of the number of prior precisions.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from numpy.typing import ArrayLike

from sklaplace.core.trees import Inputs
from sklaplace.estimators.classifier import LaplaceClassifier
from sklaplace.estimators.fitting.members import reported
from sklaplace.estimators.fitting.prior_search import PriorSearch
from sklaplace.estimators.options.constraints import (
    AUTO,
    CONSTRAINTS,
    POSITIVE,
    Constraints,
)
from sklaplace.estimators.regressor import LaplaceRegressor
from sklaplace.estimators.training.samples import Samples


@dataclass(eq=False, repr=False, kw_only=True)
class LaplaceClassifierCV(LaplaceClassifier):
    """`LaplaceClassifier` with built-in cross-validation of the prior precision.

    The search is equivalent to ``GridSearchCV`` over ``prior_precision``, but the
    network is trained only once per fold, instead of once per fold and prior precision.
    Prefer this estimator if there are too few samples to hold some out. If there are
    enough samples, `LaplaceClassifier` trains your net once, and tunes on a single set
    of held-out samples.

    Read more in the :doc:`User Guide </user_guide/pipelines>`.

    Parameters
    ----------
    estimator : skorch net, FrozenEstimator or None, default=None
        The network, as in `LaplaceClassifier`. A frozen network is not retrained; only
        its curvature is computed for each fold. The network must have been trained on
        other samples, because the scores would otherwise be training scores.
    prior_precisions : array-like of shape (G,) or None, default=None
        Prior precisions to try. If None, use 20 values from 1e-3 to 1e3, evenly spaced
        on a log scale. If the best value is the first or last, try a wider range.
    cv : int, splitter, iterable or None, default=None
        Folds, as in scikit-learn. If None, use five folds, stratified by class. The
        training samples of each fold must contain all classes.
    scoring : str, callable or None, default=None
        Score of a prior precision; higher is better. If None, use the mean
        log-probability of the held-out labels. Unlike ``"neg_log_loss"``, this score is
        finite for all predictions, uses the sample weights, and supports several labels
        per sample. Scores of predicted labels (``"accuracy"``) hardly depend on the
        prior precision.
    likelihood, subset_of_weights, subset_params, hessian_structure, \
            structure_params, curvature, curvature_params, prior_structure, \
            prior_mean, refine, residual, temperature, class_weight, pred_type, \
            link_approx, dirichlet_approx, n_samples, batch_size, n_shards
        As in `LaplaceClassifier`. With a ``prior_structure`` other than ``"scalar"``,
        all precisions have the same value. ``refine=True`` refits the selected weights
        for each prior precision, and ``"auto"`` means False.
    memory : None, str, path or joblib.Memory, default=None
        Cache of the networks and their curvature, including those of the folds. Later
        fits, also within ``GridSearchCV``, use the cache instead of training again.
        Requires a ``random_state``, and a folder that only you can write to; see
        :ref:`memory`.
    n_jobs : int or None, default=None
        Number of processes for training on the folds and for prediction. None means one
        process, unless in a ``joblib.parallel_config`` context. -1 means one process
        per core.
    random_state : int, RandomState or None, default=None
        Seed for training and draws in each fold and in the final fit. The final fit
        uses the seed in the same way as `LaplaceClassifier`. With None, results differ
        between fits.
    verbose : int, default=0
        As in `LaplaceClassifier`, with all folds reported as one phase.

    Attributes
    ----------
    prior_precision_ : float or ndarray
        The best prior precision. `tune` changes this value, but not ``best_score_``,
        ``best_index_`` and ``cv_results_``, which describe the search.
    best_score_ : float
        Mean score of the best prior precision over the folds.
    best_index_ : int
        Index of the best prior precision in ``prior_precisions``.
    cv_results_ : dict
        Results in the format of ``GridSearchCV``: ``"param_prior_precision"``,
        ``"params"``, ``"split0_test_score"`` and so on, ``"mean_test_score"``,
        ``"std_test_score"``, ``"rank_test_score"``.
    n_splits_ : int
        Number of folds.
    estimator_, posterior_, classes_, n_features_in_, feature_names_in_, n_iter_, \
            temperature_, log_marginal_likelihood_value_
        As in `LaplaceClassifier`, for the fit on all samples.

    See Also
    --------
    LaplaceClassifier : Uses a given or tuned prior precision.

    Notes
    -----
    With F folds and G prior precisions, ``fit`` requires F + 1 training runs and
    curvature passes, F passes over held-out samples, and G repetitions of the
    subsequent linear algebra. If ``scoring`` is given, the Jacobians of a fold are kept
    in memory; these are large with ``subset_of_weights="all"``. Otherwise, only the
    Jacobians of one batch are kept.

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
    # chosen by the search, not parameters of this class
    prior_precision: Any = field(default="auto", init=False)
    prior: Any = field(default=None, init=False)
    validation_fraction: float = field(default=0.2, init=False)

    def fit(
        self: Any,
        X: Inputs,
        y: ArrayLike | None = None,
        sample_weight: ArrayLike | None = None,
        *,
        groups: ArrayLike | None = None,
        **fit_params: object,
    ) -> Any:
        """Choose the prior precision by cross-validation, then fit on all samples.

        Parameters
        ----------
        X : array-like of shape (n, ...), dict of arrays, or torch Dataset
            Training samples, as in `LaplaceClassifier`.
        y : array-like of shape (n,) or (n, n_outputs)
            Targets. For a classifier, class labels of any type.
        sample_weight : array-like of shape (n,), optional
            Non-negative sample weights for training and scores. Weights are interpreted
            as counts, as in `LaplaceClassifier`. The weights are passed to ``scoring``
            if it accepts weights. The mean of the scores over folds is not weighted.
        groups : array-like of shape (n,), optional
            Group labels (strings or integers), such as patient IDs. The groups are
            passed to ``cv.split``. If ``cv`` is None or a number, all samples of a
            group are in the same fold, as with ``StratifiedGroupKFold`` or
            ``GroupKFold``.
        **fit_params : dict
            Arguments for the ``fit`` method of the skorch net. Arrays with n entries
            are split into folds.

        Returns
        -------
        object
            The fitted estimator.

        Raises
        ------
        ValueError, TypeError
            If an option, the data or the network is invalid, or if no prior precision
            has a finite score. The error leaves the estimator, the network and the data
            unchanged.

        See Also
        --------
        LaplaceClassifier.fit : Uses a given or tuned prior precision.
        LaplaceRegressor.fit : Uses a given or tuned prior precision.

        Notes
        -----
        The network is trained once per fold and once on all samples, each time followed
        by one pass for the curvature. The held-out samples of each fold require one
        more pass. For k outputs and P weights, each prior precision adds O(n k P), plus
        a refit of the selected weights with ``refine=True``. Choosing the noise
        multiplies this cost by about ten.

        Examples
        --------
        >>> from sklearn.datasets import load_iris
        >>> from sklaplace import LaplaceClassifierCV
        >>> X, y = load_iris(return_X_y=True)
        >>> model = LaplaceClassifierCV(
        ...     prior_precisions=[0.1, 10.0], cv=2, random_state=0
        ... )
        >>> model.fit(X, y).n_splits_
        2
        """
        with reported(self):
            samples = Samples(X, y, sample_weight, groups, fit_params=fit_params)
            return self._fit(samples)

    def _fit(self, samples: Samples) -> Any:
        return PriorSearch(self, LaplaceClassifier).fit(samples)


@dataclass(eq=False, repr=False, kw_only=True)
class LaplaceRegressorCV(LaplaceRegressor):
    """`LaplaceRegressor` with built-in cross-validation of the prior precision.

    The search is equivalent to ``GridSearchCV`` over ``prior_precision``, but the
    network is trained only once per fold, instead of once per fold and prior precision.
    The search can also choose the noise from held-out samples. Prefer this estimator if
    there are too few samples to hold some out. If there are enough samples,
    `LaplaceRegressor` trains your net once, and tunes on a single set of held-out
    samples.

    Read more in the :doc:`User Guide </user_guide/pipelines>`.

    Parameters
    ----------
    estimator : skorch net, FrozenEstimator or None, default=None
        The network, as in `LaplaceRegressor`. A frozen network is not retrained; only
        its curvature is computed for each fold. The network must have been trained on
        other samples, because the scores would otherwise be training scores.
    prior_precisions : array-like of shape (G,) or None, default=None
        Prior precisions to try. If None, use 20 values from 1e-3 to 1e3, evenly spaced
        on a log scale. If the best value is the first or last, try a wider range.
        Suitable values depend on the units of ``y``.
    cv : int, splitter, iterable or None, default=None
        Folds, as in scikit-learn. If None, use five folds that do not depend on the
        order of the rows. Copies of a row of an array are then in the same fold.
    scoring : str, callable or None, default=None
        Score of a prior precision; higher is better. If None, use the mean log-density
        of the held-out targets, including noise, in nats per sample. Scores of
        predicted means (``"r2"``) depend on the prior precision only with
        ``refine=True``.
    likelihood, subset_of_weights, subset_params, hessian_structure, \
            structure_params, curvature, curvature_params, prior_structure, \
            prior_mean, refine, residual, temperature, pred_type, n_samples, \
            batch_size, n_shards
        As in `LaplaceRegressor`. With a ``prior_structure`` other than ``"scalar"``,
        all precisions have the same value. ``refine=True`` refits the selected weights
        for each prior precision, and ``"auto"`` means False.
    sigma_noise : float or "auto", default="auto"
        Standard deviation of the observation noise, equal for all outputs. ``"auto"``
        chooses one noise level per prior precision by maximising the likelihood of the
        held-out samples of all folds together, regardless of ``scoring``. All columns
        of ``y`` share this level, even if their residuals differ. In contrast,
        `LaplaceRegressor` chooses one level per column, and so does `tune`. For the
        default network, the level is in units of the columns' standard deviations.
    normalize_y : bool, default=False
        As in `LaplaceRegressor`, with the mean and standard deviation of each fold's
        training samples. The chosen noise level is then the geometric mean of the noise
        levels of all columns, which are proportional to the standard deviations of the
        columns of ``y``.
    memory : None, str, path or joblib.Memory, default=None
        Cache of the networks and their curvature, including those of the folds. Later
        fits, also within ``GridSearchCV``, use the cache instead of training again.
        Requires a ``random_state``, and a folder that only you can write to; see
        :ref:`memory`.
    n_jobs : int or None, default=None
        Number of processes for training on the folds and for prediction. None means one
        process, unless in a ``joblib.parallel_config`` context. -1 means one process
        per core.
    random_state : int, RandomState or None, default=None
        Seed for training in each fold and in the final fit. The final fit uses the seed
        in the same way as `LaplaceRegressor`. With None, results differ between fits.
    verbose : int, default=0
        As in `LaplaceClassifier`, with all folds reported as one phase.

    Attributes
    ----------
    prior_precision_ : float or ndarray
        The best prior precision. `tune` changes this value, but not ``best_score_``,
        ``best_index_`` and ``cv_results_``, which describe the search.
    sigma_noise_ : float or ndarray of shape (n_outputs,)
        Standard deviation of the observation noise, either given, or chosen together
        with the best prior precision. There is one value per column if there are
        several columns, and ``normalize_y`` is True or the network is the default.
    best_score_ : float
        Mean score of the best prior precision over the folds.
    best_index_ : int
        Index of the best prior precision in ``prior_precisions``.
    cv_results_ : dict
        Results in the format of ``GridSearchCV``: ``"param_prior_precision"``,
        ``"params"``, ``"split0_test_score"`` and so on, ``"mean_test_score"``,
        ``"std_test_score"``, ``"rank_test_score"``. If the search also chooses the
        noise, ``"param_sigma_noise"`` and ``"params"`` contain the noise levels.
    n_splits_ : int
        Number of folds.
    estimator_, posterior_, n_features_in_, feature_names_in_, n_iter_, temperature_, \
            log_marginal_likelihood_value_
        As in `LaplaceRegressor`, for the fit on all samples.

    See Also
    --------
    LaplaceRegressor : Uses a given or tuned prior precision and noise.

    Notes
    -----
    With F folds and G prior precisions, ``fit`` requires F + 1 training runs and
    curvature passes, F passes over held-out samples, and G repetitions of the
    subsequent linear algebra. With ``sigma_noise="auto"``, the linear algebra is
    repeated about 10 G times, and all folds stay in memory until the noise is chosen.
    If ``scoring`` is given, the Jacobians of a fold are kept in memory, too.

    Residuals of training samples underestimate the noise if the network overfits.
    Held-out residuals contain both noise and weight uncertainty. The search therefore
    maximises the log-density of the pooled held-out samples over σ > 0 and the given
    prior precisions. Because one number is fitted to the held-out samples, the scores
    are optimistic by 1/(2 n) nats per sample.

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
    # chosen by the search, not parameters of this class
    prior_precision: Any = field(default="auto", init=False)
    prior: Any = field(default=None, init=False)
    validation_fraction: float = field(default=0.2, init=False)

    _parameter_constraints: ClassVar[Constraints] = {
        **CONSTRAINTS,
        "sigma_noise": [AUTO, POSITIVE],
    }

    fit = LaplaceClassifierCV.fit

    def _fit(self, samples: Samples) -> Any:
        return PriorSearch(self, LaplaceRegressor).fit(samples)
