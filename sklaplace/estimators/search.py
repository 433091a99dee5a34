"""LaplaceClassifierCV, LaplaceRegressorCV: prior precision by cross-validation.

These classes extend the Laplace estimators as `RidgeCV` extends `Ridge`. The network is
trained once per fold, regardless of the number of prior precisions.
"""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike

from sklaplace.core.checks import listed
from sklaplace.core.trees import Inputs
from sklaplace.estimators.classifier import LaplaceClassifier
from sklaplace.estimators.fitting.cross_validation import (
    CrossValidation,
    cv_results,
    score_of,
)
from sklaplace.estimators.fitting.laplace_fit import LaplaceFit
from sklaplace.estimators.options.constraints import POSITIVE, Finite, one_of, option
from sklaplace.estimators.options.laplace import LaplaceOptions
from sklaplace.estimators.regressor import LaplaceRegressor
from sklaplace.estimators.training.laplace import LaplaceTrainer
from sklaplace.estimators.training.samples import Samples
from sklaplace.networks.net_checks import check_sampler
from sklaplace.networks.trained import TrainedNetwork
from sklaplace.posterior.gaussian import GaussianPosterior
from sklaplace.posterior.tuning import Tuner
from sklaplace.posterior.tuning.grid import score_grid
from sklaplace.posterior.tuning.problem import TuningProblem

# Prior precisions that are tried by default.
GRID = np.logspace(-3, 3, 20)


@dataclass(eq=False, repr=False, kw_only=True)
class PriorSearch:
    """Choice of the prior precision by cross-validation; a mixin for estimators."""

    prior_precisions: Any = option(
        None, Finite("an array of positive numbers", 0, [1]), None
    )
    cv: Any = None
    scoring: Any = option(None, str, callable, None)
    # chosen by the search, not parameters
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
        The network is trained once on all samples and once per fold, each time followed
        by one pass for the curvature. The held-out samples of each fold require one
        more pass. For k outputs and P weights, each prior precision adds O(n k P), plus
        a refit of the selected weights in each fold unless ``refine=False``. Choosing
        the noise multiplies the first cost by about 50, and the second by about 15.

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
        samples = Samples(X, y, sample_weight, groups, fit_params=fit_params)
        with self._reported():
            return self._fit(samples)

    def _fit(self: Any, samples: Samples) -> Any:
        """Fit without held-out samples, which the cross-validation selects.

        Unlike in other estimators, ``fit`` has no arguments for such samples, so they
        arrive in ``fit_params``. The networks of the folds are trained, too, so Ctrl-C
        raises an error (``is_part``).
        """
        held_out = {"X_val", "y_val", "groups_val"} & set(samples.fit_params)
        if held_out:
            without_search = type(self).__name__.removesuffix("CV")
            raise TypeError(
                f"fit got {listed(held_out)}, but cv selects the held-out rows. Leave "
                f"them out, or use {without_search}, which tunes on these rows."
            )
        return super()._fit(replace(samples, is_part=True))  # type: ignore[misc]

    def _cross_validation(self: Any, samples: Samples) -> CrossValidation:
        """Return the cross-validation that chooses the prior precision."""
        # a sampler chooses rows by position, and positions in folds differ
        check_sampler(self.estimator)
        return CrossValidation.of(
            samples, self._targets, cv=self.cv, scoring=self.scoring, owner=self
        )

    def _trainer(self, options: LaplaceOptions) -> LaplaceTrainer:
        # the folds replace a single set of held-out samples
        trainer: LaplaceTrainer = super()._trainer(options)  # type: ignore[misc]
        return replace(trainer, validation_fraction=None)

    def _grid_tuner(
        self: Any,
        options: LaplaceOptions,
        validation: CrossValidation,
        fit: LaplaceFit,
    ) -> Tuner:
        """Return the tuner, which chooses the prior precision with the best score.

        The tuner is a function of a `TuningProblem` (posteriors and held-out samples of
        all folds). It scores a grid, with one point per prior precision, on the folds.
        It returns the posterior of the best point, and sets the attributes with the
        results of the search. ``fit`` contains the networks of the folds.
        """
        precisions = self.prior_precisions
        grid = [float(value) for value in (GRID if precisions is None else precisions)]
        scorer = validation.scorer
        # without a scorer, `score_grid` uses the likelihood of the linearised network
        # without a residual, so all other predictions need a scorer
        is_linearised = self.pred_type == "glm" and isinstance(self.residual, str)
        if scorer is None and not is_linearised:
            scorer = type(self)._log_likelihood

        def fold_score(fold: int, posterior: GaussianPosterior) -> float:
            """Return the scorer's score of a fold's network under a posterior."""
            network, novelty = fit.folds[fold].network, fit.folds[fold].novelty
            model = self._fitted_copy(options, network, posterior)
            model._novelty = novelty  # of the fold's network, for the residual
            return score_of(scorer, model, validation.scored(fold))

        def tuner(problem: TuningProblem) -> GaussianPosterior:
            """Set the results of the search; return the posterior of the best point."""
            # None selects the mean log-likelihood as the score
            score = None if scorer is None else fold_score
            points = score_grid(problem, grid, score)
            params = [{"prior_precision": value} for value in grid]
            if problem.free_noise:  # each prior precision has its own best noise
                for entry, point in zip(params, points, strict=True):
                    model = self._fitted_copy(options, fit.network, point.posterior)
                    entry["sigma_noise"] = model.sigma_noise_
            scores = np.array([point.scores for point in points])  # (points, folds)
            if scorer is None:  # densities of y instead of normalised targets
                unit = self._targets.noise_unit
                scores -= self._targets.n_outputs * np.log(unit)
            results = cv_results(params, scores)
            # the first of the best points, because the best rank is 1
            index = int(results["rank_test_score"].argmin())
            self.n_splits_, self.cv_results_ = len(fit.folds), results
            self.best_index_ = index
            self.best_score_ = float(results["mean_test_score"][index])
            best = points[index]
            # so far, only the weights of the folds' networks are refitted
            if best.is_refitted:
                return problem.model.refit(best.posterior)
            return best.posterior

        return tuner

    def _log_likelihood(
        self: Any, X: Inputs, y: np.ndarray, sample_weight: np.ndarray | None = None
    ) -> float:
        """Return the mean log-likelihood of predictions, as a scorer."""
        return float(np.average(self._log_proba_of(X, y), weights=sample_weight))

    def _fitted_copy(
        self,
        options: LaplaceOptions,
        network: TrainedNetwork,
        posterior: GaussianPosterior,
    ) -> Any:
        """Return a copy of the estimator as fitted with a network and a posterior.

        The parameters ``prior_precision`` and ``sigma_noise`` of the copy have the
        values of the posterior, as if the user had given them.
        """
        # ``clone`` would drop fitted attributes, such as the encoding of y
        model: Any = object.__new__(type(self))
        # scorers call the copy many times, so it reports nothing and starts no workers
        vars(model).update(vars(self), n_jobs=None, verbose=0)
        model._set_fitted(options, network, posterior)
        model.prior_precision = model.prior_precision_
        if hasattr(model, "sigma_noise_"):
            model.sigma_noise = model.sigma_noise_
        return model


@dataclass(eq=False, repr=False, kw_only=True)
class LaplaceClassifierCV(PriorSearch, LaplaceClassifier):
    """`LaplaceClassifier` with built-in cross-validation of the prior precision.

    The search corresponds to ``GridSearchCV`` over ``prior_precision``, but the network
    is trained only once per fold, instead of once per fold and prior precision. Prefer
    this estimator if there are too few samples to hold some out. If there are
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
        finite for all predictions, uses the weights of samples and classes, and
        supports several labels per sample. Scores of predicted labels (``"accuracy"``)
        hardly depend on the prior precision. A callable receives a copy of this
        estimator, fitted without the fold.
    likelihood, subset_of_weights, subset_params, hessian_structure, \
            structure_params, curvature, curvature_params, prior_structure, \
            prior_mean, refine, residual, temperature, class_weight, pred_type, \
            link_approx, dirichlet_approx, n_samples, batch_size
        As in `LaplaceClassifier`. With a ``prior_structure`` other than ``"scalar"``,
        all precisions have the same value. ``refine=True`` refits the selected weights
        under each prior precision. ``"auto"`` refits a last layer under a prior
        precision if the log-likelihood of all held-out samples then increases by more
        than 3 nats in total. With ``residual="auto"``, the default score does not
        include the residual, which hardly changes predictions near the data.
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
        As in `LaplaceClassifier`. The network of a fold prints nothing.

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
    subsequent linear algebra. The passes over held-out samples are also repeated G
    times if their Jacobians take more than 512 MiB in total, as is possible with
    ``subset_of_weights="all"``. If ``scoring`` or a number as ``residual`` is given, or
    with ``pred_type="nn"``, each prior precision requires predictions for the held-out
    samples of each fold.

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

    # scores are those of predictions
    _tunes_in_single: ClassVar[bool] = False


@dataclass(eq=False, repr=False, kw_only=True)
class LaplaceRegressorCV(PriorSearch, LaplaceRegressor):
    """`LaplaceRegressor` with built-in cross-validation of the prior precision.

    The search corresponds to ``GridSearchCV`` over ``prior_precision``, but the network
    is trained only once per fold, instead of once per fold and prior precision. The
    search can also choose the noise from held-out samples. Prefer this estimator if
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
        predicted means (``"r2"``) depend on the prior precision only if weights are
        refitted. A callable receives a copy of this estimator, fitted without the fold.
    likelihood, subset_of_weights, subset_params, hessian_structure, \
            structure_params, curvature, curvature_params, prior_structure, \
            prior_mean, refine, residual, temperature, pred_type, n_samples, \
            batch_size
        As in `LaplaceRegressor`. With a ``prior_structure`` other than ``"scalar"``,
        all precisions have the same value. ``refine=True`` refits the selected weights
        under each prior precision. ``"auto"`` refits a last layer under a prior
        precision if the log-likelihood of all held-out samples then increases by more
        than 3 nats in total. With ``residual="auto"``, the default score does not
        include the residual, which hardly changes predictions near the data.
    sigma_noise : float or "auto", default="auto"
        Standard deviation of the observation noise, equal for all inputs. ``"auto"``
        chooses the noise for each prior precision by maximising the likelihood of the
        held-out samples of all folds together, regardless of ``scoring``. Each column
        of ``y`` has its own noise level, proportional to the root mean square of its
        held-out residuals.
    normalize_y : bool, default=False
        As in `LaplaceRegressor`. All folds use the mean and standard deviation of all
        samples, and so does the default network with several columns.
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
        As in `LaplaceClassifier`. The network of a fold prints nothing.

    Attributes
    ----------
    prior_precision_ : float or ndarray
        The best prior precision. `tune` changes this value, but not ``best_score_``,
        ``best_index_`` and ``cv_results_``, which describe the search.
    sigma_noise_ : float or ndarray of shape (n_outputs,)
        Standard deviation of the observation noise, either given, or chosen together
        with the best prior precision.
    best_score_ : float
        Mean score of the best prior precision over the folds.
    best_index_ : int
        Index of the best prior precision in ``prior_precisions``.
    cv_results_ : dict
        Results in the format of ``GridSearchCV``: ``"param_prior_precision"``,
        ``"params"``, ``"split0_test_score"`` and so on, ``"mean_test_score"``,
        ``"std_test_score"``, ``"rank_test_score"``. If the search also chooses the
        noise, ``"params"`` and ``"param_sigma_noise"``, of shape (G,) or
        (G, n_outputs), contain the noise levels.
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
    subsequent linear algebra. With ``sigma_noise="auto"``, about 50 noise levels are
    compared for each prior precision. The passes over held-out samples are also
    repeated if their Jacobians take more than 512 MiB in total, as is possible with
    ``subset_of_weights="all"``. If ``scoring`` or a number as ``residual`` is given, or
    with ``pred_type="nn"``, each prior precision requires predictions for the held-out
    samples of each fold.

    Residuals of training samples underestimate the noise if the network overfits.
    Held-out residuals contain both noise and weight uncertainty. The search therefore
    maximises the log-density of the pooled held-out samples over the given prior
    precisions and over σ, between 1/16 of the root mean square of the network's
    held-out residuals and twice this value. Because one number is fitted to the
    held-out samples, the scores are optimistic by 1/(2 n) nats per sample.

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

    sigma_noise: Any = option("auto", one_of({"auto"}), POSITIVE)

    # the noise is constant, and chosen together with the prior precision
    _models_noise = False
