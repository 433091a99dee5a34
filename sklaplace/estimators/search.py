"""LaplaceClassifierCV, LaplaceRegressorCV: the prior precision by cross-validation.

As `RidgeCV` is to `Ridge`, but with one training of the network per fold, whatever the
number of prior precisions.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from sklaplace.estimators.classifier import LaplaceClassifier
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
    """`LaplaceClassifier` whose prior precision is chosen by cross-validation.

    Makes the choice that ``GridSearchCV`` over ``prior_precision`` would make, but
    trains the network once per fold in place of once per fold and prior precision.
    Prefer it where there are too few samples to hold any out; `LaplaceClassifier`
    tunes on one set of held-out samples with one training.

    Read more in the :doc:`User Guide </user_guide/search>`.

    Parameters
    ----------
    estimator : skorch net, FrozenEstimator or None, default=None
        The network, as for `LaplaceClassifier`. A frozen one is not trained: its
        folds are those of the curvature only, so that it must have been trained on
        other samples. On the same samples, scores are those of the training data.
    prior_precisions : array-like of shape (G,) or None, default=None
        Prior precisions to try. None is 20 values from 1e-3 to 1e3, evenly spaced
        in their logarithms. If the best is the first or the last, try more.
    cv : int, splitter, iterable or None, default=None
        Folds, as everywhere in scikit-learn: None is five, stratified by class. For
        groups give the list of ``splitter.split(X, y, groups)``. All classes must
        be among the training samples of each fold.
    scoring : str, callable or None, default=None
        What a prior precision is judged by, the higher the better. None is the mean
        log-probability of the held-out labels: ``"neg_log_loss"``, but finite for
        all predictions and with weights, and valid for several labels per sample, where
        that one is refused. Scores of the labels alone (``"accuracy"``) hardly depend
        on the prior precision.
    likelihood, subset_of_weights, subset_params, hessian_structure, \
            structure_params, curvature, curvature_params, prior_structure, \
            prior_mean, refine, residual, temperature, class_weight, pred_type, \
            link_approx, dirichlet_approx, n_samples, batch_size, n_shards, distributed
        As for `LaplaceClassifier`. Under a ``prior_structure`` other than
        ``"scalar"`` all precisions are the same. ``refine=True`` refits the
        selected weights under every prior precision; ``"auto"`` is False.
    memory : None, str, path or joblib.Memory, default=None
        Where networks and their curvature are kept, those of the folds among them,
        so that further fits, also by ``GridSearchCV``, train none of them again.
        Needs a ``random_state``, and a folder that you alone may write to; see
        `LaplaceClassifier`.
    n_jobs : int or None, default=None
        Processes to train folds in, and to predict; None is one unless in a
        ``joblib.parallel_config``, -1 one per core.
    random_state : int, RandomState or None, default=None
        Seeds training and draws: of each fold, and of the last fit, as it would
        seed a `LaplaceClassifier`. None differs every time.
    verbose : int, default=0
        As for `LaplaceClassifier`; the folds are one phase.

    Attributes
    ----------
    prior_precision_ : float or ndarray
        The best prior precision. `tune` changes it, but not ``best_score_``,
        ``best_index_`` and ``cv_results_``, which describe the search.
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
            temperature_, log_marginal_likelihood_value_
        As for `LaplaceClassifier`, of the fit on all samples.

    See Also
    --------
    LaplaceClassifier : Takes the prior precision, or chooses it without folds.

    Notes
    -----
    With F folds and G prior precisions: F + 1 trainings and passes for the
    curvature, F passes over held-out samples, and G times the algebra that follows.
    A scorer keeps the Jacobians of a fold in memory, and with
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

    def fit(
        self, X: Any, y: Any = None, sample_weight: Any = None, **fit_params: Any
    ) -> "LaplaceClassifierCV":
        """Choose the prior precision by cross-validation, then fit all samples with it.

        Parameters
        ----------
        X : array-like of shape (n, ...), dict of arrays, or torch Dataset
            Training samples, as for the estimator without ``CV``.
        y : array-like of shape (n,) or (n, n_outputs)
            Targets; class labels of any type for a classifier.
        sample_weight : array-like of shape (n,), optional
            Non-negative weights of the samples, in training and in scores; they are
            counts, as for the estimator without ``CV``. A scorer
            gets them if it takes them; the mean over folds is not weighted.
        **fit_params : dict
            Passed to the ``fit`` of the skorch net; of arrays with n entries each
            fold gets its own.

        Returns
        -------
        object
            The fitted estimator.

        Raises
        ------
        ValueError, TypeError
            If an option, the data or the network is not valid, or no prior
            precision has a finite score; the estimator, the network and the data
            are then unchanged.

        See Also
        --------
        LaplaceClassifier.fit : With one prior precision, or one that is tuned.

        Notes
        -----
        Costs one training of the network per fold and one on all samples, each with
        one pass for the curvature, and one pass over the held-out samples of each
        fold. Prior precisions add what follows from these: for k outputs and P
        weights O(n k P) each, a refit of the last layer with ``refine=True``, and
        about ten times as much where the noise is chosen, too.

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
        return self._fit(Samples(X, y, sample_weight, fit_params=fit_params))

    def _fit(self, samples: Samples) -> Any:
        return PriorSearch(self, LaplaceClassifier).fit(samples)


@dataclass(eq=False, repr=False, kw_only=True)
class LaplaceRegressorCV(LaplaceRegressor):
    """`LaplaceRegressor` whose prior precision is chosen by cross-validation.

    Makes the choice that ``GridSearchCV`` over ``prior_precision`` would make, but
    trains the network once per fold in place of once per fold and prior precision.
    The noise can be chosen with it, on samples that no network has seen. Prefer it
    where there are too few samples to hold any out; `LaplaceRegressor` tunes on one
    set of held-out samples with one training.

    Read more in the :doc:`User Guide </user_guide/search>`.

    Parameters
    ----------
    estimator : skorch net, FrozenEstimator or None, default=None
        The network, as for `LaplaceRegressor`. A frozen one is not trained: its
        folds are those of the curvature only, so that it must have been trained on
        other samples. On the same samples, scores are those of the training data.
    prior_precisions : array-like of shape (G,) or None, default=None
        Prior precisions to try. None is 20 values from 1e-3 to 1e3, evenly spaced
        in their logarithms. If the best is the first or the last, try more: they
        depend on the units of y.
    cv : int, splitter, iterable or None, default=None
        Folds, as everywhere in scikit-learn: None is five. For groups give the list
        of ``splitter.split(X, y, groups)``.
    scoring : str, callable or None, default=None
        What a prior precision is judged by, the higher the better. None is the mean
        log-density of the held-out targets, noise included, in nats per sample. Scores
        of the mean alone (``"r2"``) do not depend on the prior precision unless
        ``refine=True``.
    likelihood, subset_of_weights, subset_params, hessian_structure, \
            structure_params, curvature, curvature_params, prior_structure, \
            prior_mean, refine, residual, temperature, pred_type, n_samples, \
            batch_size, n_shards, distributed
        As for `LaplaceRegressor`. Under a ``prior_structure`` other than
        ``"scalar"`` all precisions are the same. ``refine=True`` refits the
        selected weights under every prior precision; ``"auto"`` is False.
    sigma_noise : float or "auto", default="auto"
        Standard deviation of the observation noise, one for all outputs. ``"auto"``
        chooses one with each prior precision: that under which the held-out samples
        of all folds together are most probable, whatever ``scoring`` is. It is shared
        by all columns of ``y``, also where their residuals differ: `LaplaceRegressor`
        chooses a level for each, and so does `tune` after the search.
    normalize_y : bool, default=False
        As for `LaplaceRegressor`, by mean and standard deviation of the samples that a
        fold trains on. The noise that is chosen is then the geometric mean of levels
        in proportion to the standard deviations of the columns of ``y``.
    memory : None, str, path or joblib.Memory, default=None
        Where networks and their curvature are kept, those of the folds among them,
        so that further fits, also by ``GridSearchCV``, train none of them again.
        Needs a ``random_state``, and a folder that you alone may write to; see
        `LaplaceRegressor`.
    n_jobs : int or None, default=None
        Processes to train folds in, and to predict; None is one unless in a
        ``joblib.parallel_config``, -1 one per core.
    random_state : int, RandomState or None, default=None
        Seeds training: of each fold, and of the last fit, as it would seed a
        `LaplaceRegressor`. None differs every time.
    verbose : int, default=0
        As for `LaplaceClassifier`; the folds are one phase.

    Attributes
    ----------
    prior_precision_ : float or ndarray
        The best prior precision. `tune` changes it, but not ``best_score_``,
        ``best_index_`` and ``cv_results_``, which describe the search.
    sigma_noise_ : float or ndarray of shape (n_outputs,)
        Standard deviation of the observation noise: as given, or chosen with the
        best prior precision; one for each of several columns with ``normalize_y``.
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
    estimator_, posterior_, n_features_in_, feature_names_in_, n_iter_, temperature_, \
            log_marginal_likelihood_value_
        As for `LaplaceRegressor`, of the fit on all samples.

    See Also
    --------
    LaplaceRegressor : Takes prior precision and noise, or chooses them without folds.

    Notes
    -----
    With F folds and G prior precisions: F + 1 trainings and passes for the
    curvature, F passes over held-out samples, and G times the algebra that follows;
    with ``sigma_noise="auto"`` about 10 G times, and all folds are kept in memory
    until it is chosen. So are the Jacobians of a fold with a scorer.

    Residuals of training samples would underestimate the noise of a network that
    overfits. Those of held-out samples contain noise and weight uncertainty; the
    log-density of the pooled held-out samples is maximised over σ > 0 and the prior
    precisions to try. The optimism of one fitted number is 1/(2 n) nats per sample.

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

    _parameter_constraints: ClassVar[Constraints] = {
        **CONSTRAINTS,
        "sigma_noise": [AUTO, POSITIVE],
    }

    def fit(
        self, X: Any, y: Any = None, sample_weight: Any = None, **fit_params: Any
    ) -> "LaplaceRegressorCV":
        """Choose the prior precision by cross-validation, then fit all samples with it.

        Parameters
        ----------
        X, y, sample_weight, **fit_params
            As for `LaplaceClassifierCV.fit`.

        Returns
        -------
        object
            The fitted estimator.

        See Also
        --------
        LaplaceRegressor.fit : With one prior precision, or one that is tuned.

        Examples
        --------
        >>> from sklearn.datasets import load_diabetes
        >>> from sklaplace import LaplaceRegressorCV
        >>> X, y = load_diabetes(return_X_y=True)
        >>> model = LaplaceRegressorCV(
        ...     prior_precisions=[0.1, 10.0], cv=2, random_state=0
        ... )
        >>> model.fit(X, y).n_splits_
        2
        """
        return self._fit(Samples(X, y, sample_weight, fit_params=fit_params))

    def _fit(self, samples: Samples) -> Any:
        return PriorSearch(self, LaplaceRegressor).fit(samples)
