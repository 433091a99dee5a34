"""ProbabilisticRegressor: means, standard deviations, quantiles and samples."""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, cast

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import RegressorMixin
from sklearn.utils.validation import check_is_fitted

from sklaplace.core.checks import as_levels, as_seed, check_option, naming
from sklaplace.core.random import RandomState
from sklaplace.core.trees import Inputs
from sklaplace.data.dataset import TrainingData, count_rows
from sklaplace.estimators.base import NetEstimator, without_class
from sklaplace.estimators.options.constraints import FRACTION, LEVELS, one_of, option
from sklaplace.estimators.options.given_net import is_frozen
from sklaplace.estimators.options.laplace import sibling
from sklaplace.estimators.predicting import latent
from sklaplace.estimators.predicting.conformal import Conformal, check_no_categories
from sklaplace.estimators.targets.numbers import NumberTargets
from sklaplace.estimators.training.samples import Samples
from sklaplace.likelihoods import RegressionLikelihood
from sklaplace.noise.model import NoiseModel


@dataclass(frozen=True)
class LatentTargets:
    """Distribution of targets, in the network's units.

    Attributes
    ----------
    mean, variance : ndarray of shape (n, c)
        Moments of the noise-free outputs.
    noise : float or ndarray of shape (n, c)
        Standard deviation of the noise, which depends on the inputs with a noise model.
    quantiles : ndarray of shape (n, c, q) or None
        Quantiles from the noise model, if there is one.
    """

    mean: np.ndarray
    variance: np.ndarray
    noise: Any
    quantiles: Any = None


@without_class
@dataclass(eq=False, repr=False, kw_only=True)
class ProbabilisticRegressor(RegressorMixin, NetEstimator):
    """Predictions of a regressor, from the distribution of its outputs.

    Subclasses implement `_fit` and `_outputs`, the distribution of outputs.
    """

    sigma_noise: Any = option("auto", one_of({"auto"}), LEVELS)
    validation_fraction: float = option(0.2, FRACTION)
    normalize_y: bool = option(False, "boolean")

    _targets_kind: ClassVar[type[NumberTargets]] = NumberTargets
    # set by estimators with heteroscedastic noise
    _noise_model = cast(NoiseModel | None, None)

    # ----------------------------------------------------------------- targets
    def _infer_targets(self, y: Any, samples: Samples) -> NumberTargets:
        """Return the shape, mean and standard deviation of the targets in ``fit``.

        The default network is trained on normalised targets if there are several
        columns.
        """
        # without a common unit, one noise level or prior would not suit all columns
        needs_common_unit = self.estimator is None and np.prod(y.shape[1:]) > 1
        self._targets = self._targets_kind.infer(
            y,
            self._input_type,
            self.likelihood,
            self.sigma_noise,
            sibling(type(self).__name__, is_classifier=False),
            sample_weight=samples.sample_weight,
            normalizes=bool(self.normalize_y) or needs_common_unit,
        )
        return self._targets

    def _check_loss(self, loss: float, data: TrainingData, rate: str = "") -> None:
        """Warn if the network has not learned targets whose scale is far from one."""
        net = self.estimator
        if net is not None and not is_frozen(net):
            self._targets.check_loss(self._likelihood, loss)

    # ------------------------------------------------------------ distributions
    @property
    def _likelihood(self) -> RegressionLikelihood:
        check_is_fitted(self)
        return cast(RegressionLikelihood, self.network_spec_.likelihood)

    @property
    def _noise(self) -> Any:
        """Standard deviation of the noise, in the likelihood's units, () or (c,)."""
        # the likelihood multiplies the noise of columns by these factors
        relative = np.array(getattr(self._likelihood, "relative", None) or 1.0)
        return self.sigma_noise_ / self._targets.scaling.scale / relative

    def _set_noise(self, sigma: Any) -> None:
        """Set ``sigma_noise_`` from the noise in the likelihood's units.

        The noise is one number or one level per column. ``sigma_noise_`` is in units of
        ``y``, and 1.0 without noise. Undo any recalibration, which refers to the
        earlier noise.
        """
        likelihood = self._likelihood
        # ratios between the noise levels of columns, if the likelihood has any
        relative = getattr(likelihood, "relative", None)
        self.sigma_noise_: Any = 1.0
        if likelihood.has_noise:
            levels = sigma if relative is None else sigma * np.array(relative)
            self.sigma_noise_ = levels * self._targets.scaling.scale
        self.sigma_scaling_ = np.ones(self._targets.n_outputs)

    def _latent(self, X: Inputs, *, is_checked: bool = False) -> LatentTargets:
        """Return the moments of the noise-free outputs, and the noise.

        A noise model adds quantiles, which describe the distribution of each target.
        If ``is_checked``, the inputs are already in the network's format.
        """
        X, outputs = X if is_checked else self._check_inputs(X), self._outputs()
        if self._noise_model is None:
            mean, variance = outputs.latent(X)
            return LatentTargets(mean, variance, self._noise)
        # the noise model returns factors (n, c) of the constant noise
        mean, variance, noise, quantiles = outputs.map_predictions(
            X, self._noise_model.of_batch
        )
        return LatentTargets(mean, variance, self._noise * noise, quantiles)

    def _moments(self, latent_targets: LatentTargets) -> tuple[np.ndarray, np.ndarray]:
        """Return mean and variance (n, c) of the targets, before recalibration."""
        return self._likelihood.moments(
            latent_targets.mean, latent_targets.variance, latent_targets.noise
        )

    def _from_normal(
        self, latent_targets: LatentTargets, values: np.ndarray
    ) -> np.ndarray:
        """Convert values (n, c, s) of normal targets to the predictive distribution.

        The values are s quantiles or draws, for n samples and c columns, of a normal
        distribution with the moments of ``latent_targets``. A noise model converts them
        to its own distribution. The factors from `recalibrate` then scale the
        deviations from the mean.
        """
        if self._is_normal:
            return values
        mean, variance = self._moments(latent_targets)
        center, std = mean[..., None], np.sqrt(variance)[..., None]
        deviations = values - center
        if self._noise_model is not None:
            # numbers of standard deviations: of the normal, then of the model
            deviations = std * self._noise_model.standardised(
                latent_targets.quantiles, deviations / std
            )
        return center + deviations * self.sigma_scaling_[:, None]

    def _at_scores(self, X: Inputs, scores: np.ndarray) -> np.ndarray:
        """Return the target values (n, c, s) at the given normal scores (c or 1, s).

        A normal score is the number of standard deviations from the mean of a normal
        distribution. `_from_normal` converts it for other distributions.
        """
        latent_targets = self._latent(X)
        mean, variance = self._moments(latent_targets)
        values = mean[..., None] + np.sqrt(variance)[..., None] * scores
        return self._targets.scaling.restored(self._from_normal(latent_targets, values))

    def _conformity(self, model: Any, X: Inputs, y: Any) -> np.ndarray:
        """Return conformity scores (n, c), which are larger for less likely targets."""
        return np.abs(model._normal_scores(X, y))

    def _normal_scores(self, X: Inputs, y: Any) -> np.ndarray:
        """Return the normal scores (n, c) of targets in the predictive distribution.

        A score is ``Φ⁻¹(F(y))`` for the predictive distribution function F.
        """
        data = self._new_data(X, y, None)
        latent_targets = self._latent(data.X, is_checked=True)
        mean, variance = self._moments(latent_targets)
        # the inverse of `_from_normal`; all values are in the network's units
        scores = (data.y.reshape(mean.shape) - mean) / np.sqrt(variance)
        scores = scores / self.sigma_scaling_
        if self._noise_model is not None:
            scores = self._noise_model.scores(latent_targets.quantiles, scores)
        return np.asarray(scores)

    @property
    def _is_normal(self) -> bool:
        """Whether the likelihood is used without a noise model and without scaling."""
        return self._noise_model is None and bool((self.sigma_scaling_ == 1).all())

    def _mean_and_variance(self, X: Inputs) -> tuple[np.ndarray, np.ndarray]:
        """Return mean and variance (n, n_outputs) of new targets, including noise."""
        mean, variance = self._moments(self._latent(X))
        scaling = self._targets.scaling
        variance = scaling.restored_variance(variance * self.sigma_scaling_**2)
        return scaling.restored(mean), variance

    def _log_proba_of(self, X: Inputs, y: np.ndarray) -> np.ndarray:
        """Return the log-density of each sample's targets in units of ``y``, (n,)."""
        latent_targets = self._latent(X)
        targets = y.reshape(len(latent_targets.mean), -1).astype(np.float64)
        targets = self._targets.scaling.normalized(targets)
        densities = self._likelihood.log_density(
            torch.as_tensor(latent_targets.mean),
            torch.as_tensor(latent_targets.variance),
            torch.as_tensor(targets),
            torch.as_tensor(np.asarray(latent_targets.noise)),
        )
        # the density of y is that of normalised targets, divided by the product of the
        # units of all columns; `noise_unit` is their geometric mean
        log_unit = targets.shape[1] * np.log(self._targets.noise_unit)
        return np.asarray(densities.numpy() - log_unit)

    # ------------------------------------------------------------- public methods
    def recalibrate(
        self, X: Inputs, y: ArrayLike, sample_weight: ArrayLike | None = None
    ) -> "ProbabilisticRegressor":
        """Scale predictive standard deviations to match held-out residuals.

        For each output, the standard deviations of predictions, including noise, are
        multiplied by one factor, the square root of the mean of
        ``(y - mean)² / variance``. This factor maximises the likelihood of the samples.
        The means do not change. ``fit`` resets the factor to one.

        Parameters
        ----------
        X : array-like of shape (n, ...), dict of arrays, or torch Dataset
            Held-out samples that were used neither for training nor for tuning.
        y : array-like of shape (n,) or (n, n_outputs)
            Targets of the samples.
        sample_weight : array-like of shape (n,), optional
            Non-negative sample weights.

        Returns
        -------
        object
            The estimator, with updated ``sigma_scaling_``.

        Raises
        ------
        ValueError
            If all residuals of a target are zero, or if there are fewer than two
            samples.

        See Also
        --------
        sklaplace.metrics.empirical_frequency : Shows whether to recalibrate.
        sklaplace.plotting.RegressionCalibrationDisplay : Calibration plot.

        Notes
        -----
        Recalibration requires one prediction for ``X``. The relative standard error of
        the factor is ``1/√(2n)``.

        References
        ----------
        Levi, Gispan, Giladi, Fetaya (2022), "Evaluating and calibrating uncertainty
        prediction in regression tasks", Sensors 22(15) (σ-scaling). LaplaceRedux.jl
        implements the same scaling.

        Examples
        --------
        >>> from sklearn.datasets import load_diabetes
        >>> from sklaplace import LaplaceRegressor
        >>> X, y = load_diabetes(return_X_y=True)
        >>> model = LaplaceRegressor(random_state=0).fit(X[100:], y[100:])
        >>> model.recalibrate(X[:100], y[:100]).sigma_scaling_.round(1)
        array([0.9])
        """
        check_is_fitted(self)
        if not self._likelihood.has_noise:
            raise ValueError(
                f"recalibrate scales noise, which {type(self._likelihood).__name__} "
                "does not have. Use a net with criterion=torch.nn.MSELoss."
            )
        data = self._new_data(X, y, sample_weight)
        if len(data.y) < 2:
            raise ValueError("1 row is too few to recalibrate. Pass 100 or more.")
        mean, variance = self._moments(self._latent(data.X, is_checked=True))
        # the variance is without the factor of an earlier call
        squares = (data.y - mean) ** 2 / variance
        scaling = np.sqrt(np.average(squares, axis=0, weights=data.sample_weight))
        if not (scaling > 0).all():
            raise ValueError(
                "y equals the predictions, so the noise cannot be estimated. Pass "
                "rows whose targets contain noise."
            )
        # conformity scores refer to the earlier standard deviations
        self.sigma_scaling_, self._conformal = scaling, None
        return self

    @naming(X="X", y="y", sample_weight="sample_weight")
    def score(
        self, X: Inputs, y: ArrayLike, sample_weight: ArrayLike | None = None
    ) -> float:
        """Return the coefficient of determination R² of `predict`.

        Parameters
        ----------
        X : array-like of shape (n, ...), dict of arrays, or torch Dataset
            Samples to predict.
        y : array-like of shape (n,) or (n, n_outputs)
            Targets of the samples.
        sample_weight : array-like of shape (n,), optional
            Sample weights.

        Returns
        -------
        float
            R², averaged over outputs; at most one.

        Raises
        ------
        ValueError, TypeError
            If y has missing values or non-numeric entries.

        See Also
        --------
        predict : The predicted means.
        sklaplace.metrics.gaussian_nll : Score of means and standard deviations.

        Examples
        --------
        >>> from sklearn.datasets import load_diabetes
        >>> from sklaplace import LaplaceRegressor
        >>> X, y = load_diabetes(return_X_y=True)
        >>> model = LaplaceRegressor(random_state=0).fit(X, y)
        >>> bool(0.4 < model.score(X, y) < 0.7)
        True
        """
        check_is_fitted(self)
        return float(super().score(X, self._targets.check(y), sample_weight))

    def predict(
        self,
        X: Inputs,
        return_std: bool = False,
        return_cov: bool = False,
        coverage: ArrayLike | None = None,
    ) -> Any:
        """Predict the mean, optionally with standard deviation, covariance or interval.

        Parameters
        ----------
        X : array-like of shape (n, ...)
            Samples to predict.
        return_std : bool, default=False
            Whether to also return standard deviations of new targets, including noise.
        return_cov : bool, default=False
            Whether to also return the joint covariance over samples, including noise.
        coverage : float or array-like of shape (n_coverages,), default=None
            If given, also return the intervals of `predict_interval` with this
            coverage. A ``Pipeline`` passes this parameter to its final estimator.

        Returns
        -------
        mean : ndarray of shape (n,) or (n, n_outputs)
            Means.
        std : ndarray of the same shape
            Standard deviations; only if ``return_std``.
        cov : ndarray of shape (n, n) or (n, n, n_outputs)
            Joint covariances; only if ``return_cov``.
        interval : ndarray of shape (n, 2), (n, 2, n_coverages) or with an axis of \
                outputs after n
            Intervals; only with ``coverage``.

        Raises
        ------
        ValueError
            If both ``return_std`` and ``return_cov`` are True.

        See Also
        --------
        predict_interval : Intervals for new targets.
        latent_mean_and_variance : Mean and variance without noise.
        sample_y : Draws of new targets.

        Examples
        --------
        >>> from sklearn.datasets import load_diabetes
        >>> from sklaplace import LaplaceRegressor
        >>> X, y = load_diabetes(return_X_y=True)
        >>> model = LaplaceRegressor(random_state=0).fit(X, y)
        >>> mean, std = model.predict(X[:2], return_std=True)
        >>> mean.shape, std.shape
        ((2,), (2,))
        """
        latent.check_one(return_std=return_std, return_cov=return_cov)
        if coverage is not None:
            if return_std or return_cov:
                raise ValueError(
                    "coverage cannot be used with return_std or return_cov. Call "
                    "predict separately for each."
                )
            return self.predict(X), self.predict_interval(X, coverage)
        if return_cov:
            mean, cov = self._outputs().joint(self._check_inputs(X))
            # a noise model has another noise for each sample
            noise = self._noise if self._noise_model is None else self._latent(X).noise
            mean, cov = self._likelihood.joint_moments(mean, cov, noise)
            scaling = self._targets.scaling
            mean = self._targets.drop_axis(scaling.restored(mean))
            cov = scaling.restored_variance(cov * self.sigma_scaling_**2)
            # (n, n) for targets (n,), otherwise (n, n, n_outputs)
            return mean, cov[..., 0] if self._targets.ndim == 1 else cov
        if not return_std:  # no noise model is needed, because it keeps the means
            mean, variance = self._outputs().latent(self._check_inputs(X))
            # the outputs' mean need not be that of the targets, such as of counts
            mean, _ = self._likelihood.moments(mean, variance, self._noise)
            return self._targets.drop_axis(self._targets.scaling.restored(mean))
        moments = self._mean_and_variance(X)
        mean, variance = map(self._targets.drop_axis, moments)
        return mean, np.sqrt(variance)

    def score_samples(self, X: Inputs) -> np.ndarray:
        """Return the negative epistemic variance, which is lower for unusual samples.

        Parameters
        ----------
        X : array-like of shape (n, ...)
            Samples to score.

        Returns
        -------
        ndarray of shape (n,)
            Negative variance of the outputs, averaged over columns of y. If the
            likelihood has a noise level ``sigma_noise_``, the variance is divided by
            the noise variance. Outputs that parametrise the noise are excluded.

        See Also
        --------
        latent_mean_and_variance : The variance before scaling.
        sklaplace.metrics.ood_auroc : How well the score detects out-of-distribution
            samples.

        Examples
        --------
        >>> from sklearn.datasets import load_diabetes
        >>> from sklaplace import DeepEnsembleRegressor
        >>> X, y = load_diabetes(return_X_y=True)
        >>> model = DeepEnsembleRegressor(n_estimators=2, random_state=0).fit(X, y)
        >>> model.score_samples(X[:3]).shape
        (3,)
        """
        _, variance = self._outputs().latent(self._check_inputs(X))
        # further outputs, if any, parametrise the noise
        variance = variance[:, : self._targets.n_outputs]
        variance = self._targets.scaling.restored_variance(variance)
        scaled = variance / np.square(self.sigma_noise_)
        return np.asarray(-scaled.mean(1))

    def predict_quantiles(self, X: Inputs, alpha: ArrayLike) -> np.ndarray:
        """Predict quantiles of the predictive distribution, including noise.

        Parameters
        ----------
        X : array-like of shape (n, ...)
            Samples to predict.
        alpha : float or array-like of shape (n_alpha,)
            Quantile levels in (0, 1).

        Returns
        -------
        ndarray of shape (n,), (n, n_alpha) or with an axis of outputs after n
            Quantiles. The last axis exists only if ``alpha`` is an array.

        See Also
        --------
        predict_interval : Central intervals.

        Examples
        --------
        >>> from sklearn.datasets import load_diabetes
        >>> from sklaplace import LaplaceRegressor
        >>> X, y = load_diabetes(return_X_y=True)
        >>> model = LaplaceRegressor(random_state=0).fit(X, y)
        >>> model.predict_quantiles(X[:2], [0.1, 0.5, 0.9]).shape
        (2, 3)
        """
        levels = as_levels("alpha", alpha, "Choose a level, such as 0.95.")
        latent_targets = self._latent(X)
        quantiles = self._likelihood.quantiles(
            latent_targets.mean,
            latent_targets.variance,
            latent_targets.noise,
            levels=levels,
        )
        values = self._from_normal(latent_targets, quantiles)
        values = self._targets.drop_axis(self._targets.scaling.restored(values))
        return values if np.ndim(alpha) else values[..., 0]

    def predict_interval(
        self,
        X: Inputs,
        coverage: ArrayLike = 0.9,
        *,
        method: str = "predictive",
        categories: ArrayLike | None = None,
    ) -> np.ndarray:
        """Predict central intervals that contain new targets with a given probability.

        Parameters
        ----------
        X : array-like of shape (n, ...)
            Samples to predict.
        coverage : float or array-like of shape (n_levels,), default=0.9
            Probabilities in (0, 1).
        method : {"predictive", "conformal", "joint"}, default="predictive"
            Intervals of the predictive distribution (``"predictive"``), or conformal
            intervals with guaranteed coverage for each output (``"conformal"``) or for
            all outputs of a sample together (``"joint"``). Conformal intervals require
            a call to `conformalize`.
        categories : array-like of shape (n,), optional
            Category of each sample, if `conformalize` received categories. Conformal
            intervals then have the coverage within each category.

        Returns
        -------
        ndarray of shape (n, 2) or (n, 2, n_levels)
            Lower and upper ends. If ``y`` has an axis of outputs, the result has the
            same axis after the axis of samples.

        Raises
        ------
        ValueError
            If conformity scores are missing, or too few for one of the coverages, or if
            categories are missing, unknown or of no use.

        See Also
        --------
        conformalize : Explains the guarantee.
        predict_quantiles : Quantiles at any level.
        sklaplace.metrics.interval_coverage : How often intervals contain the targets.

        Examples
        --------
        >>> from sklearn.datasets import load_diabetes
        >>> from sklaplace import LaplaceRegressor
        >>> X, y = load_diabetes(return_X_y=True)
        >>> model = LaplaceRegressor(random_state=0).fit(X, y)
        >>> low, high = model.predict_interval(X[:2], coverage=0.9).T
        >>> bool((low < high).all())
        True
        """
        levels = as_levels("coverage", coverage, "Choose a probability, such as 0.9.")
        check_option("method", method, ["predictive", "conformal", "joint"])
        if method != "predictive":

            def interval(conformal: Conformal, samples: Inputs) -> np.ndarray:
                conformal.require_bytes(count_rows(samples))
                # each model (of a fold, or this one) predicts ends at its own scores
                scores = conformal.signed_scores(levels, joint=method == "joint")
                pairs = zip(conformal.models or [self], scores, strict=True)
                ends = [model._at_scores(samples, signed) for model, signed in pairs]
                return conformal.interval(ends, levels)

            values = self._predict_conformal(X, categories, interval)
            values = self._targets.drop_axis(values)
            return values if np.ndim(coverage) else values[..., 0]
        check_no_categories(categories)
        tails = np.stack([(1 - levels) / 2, (1 + levels) / 2])  # (2, n_levels)
        # levels whose upper tail is rounded to one; the first raises the error
        for level in levels[tails[1] == 1].tolist():
            raise ValueError(
                f"coverage={level!r} is so close to 1 that the interval is infinite. "
                "Choose a smaller coverage, such as 0.9999."
            )
        values = self.predict_quantiles(X, tails.ravel())
        # the last axis contains all lower ends, and then all upper ends
        values = values.reshape(*values.shape[:-1], *tails.shape)
        return values if np.ndim(coverage) else values[..., 0]

    def sample_y(
        self, X: Inputs, n_samples: int = 1, random_state: RandomState = 0
    ) -> np.ndarray:
        """Draw new targets jointly over samples, as draws of the function plus noise.

        Parameters
        ----------
        X : array-like of shape (n, ...)
            Samples to predict.
        n_samples : int, default=1
            Number of draws.
        random_state : int, RandomState or None, default=0
            Seed of the draws.

        Returns
        -------
        ndarray of shape (n, n_samples) or (n, n_outputs, n_samples)
            Draws in units of ``y``.

        See Also
        --------
        sample_latent : Draws without noise.

        Examples
        --------
        >>> from sklearn.datasets import load_diabetes
        >>> from sklaplace import LaplaceRegressor
        >>> X, y = load_diabetes(return_X_y=True)
        >>> model = LaplaceRegressor(random_state=0).fit(X, y)
        >>> model.sample_y(X[:2], n_samples=5).shape
        (2, 5)
        """
        outputs, seed = self._outputs(), as_seed("random_state", random_state)
        draws = outputs.sample(self._check_inputs(X), n_samples, seed)
        # an integer seeds both generators; otherwise, the noise has a seed of its own
        generator = np.random.default_rng(as_seed("random_state", random_state))
        if self._is_normal:
            draws = self._likelihood.sample(draws, self._noise, generator=generator)
        else:  # add normal noise first, and then change its distribution
            latent_targets = self._latent(X)
            draws = self._likelihood.sample(
                draws, latent_targets.noise, generator=generator
            )
            draws = self._from_normal(latent_targets, draws)
        draws = self._targets.scaling.restored(draws)
        return self._targets.drop_axis(draws)

    def latent_mean_and_variance(
        self, X: Inputs, full_cov: bool = False, joint: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the mean and variance of the noise-free function.

        Parameters
        ----------
        X : array-like of shape (n, ...)
            Samples to predict.
        full_cov : bool, default=False
            Whether to return covariances between outputs, instead of only variances.
        joint : bool, default=False
            Whether to also return covariances between samples.

        Returns
        -------
        mean : ndarray of shape (n, n_outputs)
            Means.
        variance : ndarray of shape (n, n_outputs), (n, n_outputs, n_outputs) or, if \
                joint, (n·n_outputs, n·n_outputs)
            Variances or covariances. Joint covariances are in the order of
            ``mean.ravel()``.

        See Also
        --------
        predict : Predictions with noise.
        sample_latent : Draws from this distribution.

        Examples
        --------
        >>> from sklearn.datasets import load_diabetes
        >>> from sklaplace import LaplaceRegressor
        >>> X, y = load_diabetes(return_X_y=True)
        >>> model = LaplaceRegressor(random_state=0).fit(X, y)
        >>> mean, variance = model.latent_mean_and_variance(X[:2])
        >>> bool((variance[:, 0] < model.predict(X[:2], return_std=True)[1] ** 2).all())
        True
        """
        latent.check_one(full_cov=full_cov, joint=joint)
        outputs, X = self._outputs(), self._check_inputs(X)
        return latent.moments(outputs, X, self._in_units, full_cov, joint)

    def sample_latent(
        self, X: Inputs, n_samples: int = 1, random_state: RandomState = 0
    ) -> np.ndarray:
        """Draw the noise-free function, jointly over samples.

        Parameters
        ----------
        X : array-like of shape (n, ...)
            Samples to predict.
        n_samples : int, default=1
            Number of draws. Each draw is one function, evaluated at all samples.
        random_state : int, RandomState or None, default=0
            Seed of the draws.

        Returns
        -------
        ndarray of shape (n, n_outputs, n_samples)
            Draws without noise. In contrast, `sample_y` adds noise, and omits the axis
            of outputs if ``y`` has no such axis.

        See Also
        --------
        latent_mean_and_variance : Mean and variance of the draws.
        sample_y : Draws of new targets, with noise.

        Examples
        --------
        >>> from sklearn.datasets import load_diabetes
        >>> from sklaplace import LaplaceRegressor
        >>> X, y = load_diabetes(return_X_y=True)
        >>> model = LaplaceRegressor(random_state=0).fit(X, y)
        >>> model.sample_latent(X[:2], n_samples=5).shape
        (2, 1, 5)
        """
        outputs, X = self._outputs(), self._check_inputs(X)
        return latent.joint_draws(outputs, X, n_samples, random_state, self._in_units)

    @property
    def _in_units(self) -> latent.Latent:
        """Function that maps moments of the outputs to moments in units of ``y``."""
        return partial(self._targets.restored_outputs, self._likelihood)

    def __sklearn_tags__(self) -> Any:
        """Return scikit-learn's tags of regressors with several targets."""
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        tags.target_tags.single_output = True
        tags.input_tags.three_d_array = True
        tags.input_tags.sparse = True
        return tags
