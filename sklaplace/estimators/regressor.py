"""LaplaceRegressor: predictions with standard deviations, intervals and samples."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import ArrayLike
from scipy.stats import norm

from sklaplace.core.checks import check_fraction
from sklaplace.core.trees import Inputs, mapped_tensors
from sklaplace.curvature.ggn import CURVATURES
from sklaplace.estimators.fitting.noise import held_out_rows
from sklaplace.estimators.laplace import BaseLaplace
from sklaplace.estimators.options.constraints import LEVELS, keys_and, one_of, option
from sklaplace.estimators.options.given_net import inner_net, is_frozen
from sklaplace.estimators.options.laplace import LaplaceOptions
from sklaplace.estimators.predicting.closed_forms import Interval, Numbers
from sklaplace.estimators.predicting.output_model import BatchedOutputs
from sklaplace.estimators.predicting.predictive_module import PredictiveModule
from sklaplace.estimators.probabilistic_regressor import ProbabilisticRegressor
from sklaplace.estimators.targets.numbers import (
    check_normalize_y,
    geometric_mean,
    has_noise,
)
from sklaplace.estimators.training.laplace import LaplaceTrainer
from sklaplace.likelihoods import Gaussian, RegressionLikelihood
from sklaplace.noise.model import NoiseModel
from sklaplace.noise.residuals import held_out_residuals
from sklaplace.posterior.tuning import TUNERS
from sklaplace.posterior.tuning.problem import HeldOutScore


@dataclass(eq=False, repr=False, kw_only=True)
class LaplaceRegressor(BaseLaplace, ProbabilisticRegressor):
    """Laplace approximation of a skorch regressor.

    The posterior over some or all of the network's weights is a Gaussian around their
    trained values. Standard deviations and intervals of predictions include Gaussian
    observation noise, and widen away from the training data.

    Read more in the :doc:`User Guide </user_guide/regression>`.

    Parameters
    ----------
    estimator : skorch net, FrozenEstimator or None, default=None
        The network. A skorch net is cloned and trained in ``fit``. A trained net in a
        ``sklearn.frozen.FrozenEstimator`` keeps its weights. If None, use a network for
        tabular data, including data frames, with piecewise linear inputs for 500 or
        more distinct samples; see :doc:`/user_guide/tables`.
    likelihood : object or None, default=None
        Likelihood of the targets given the outputs, for criteria without a built-in
        likelihood; see `sklaplace.likelihoods`. If None, use the likelihood of the
        criterion.
    subset_of_weights : {"last_layer", "all", "trainable", "subnetwork"} or list of \
            str, default="last_layer"
        Weights with a posterior: the last layer or layers, all weights, all weights
        that require gradients, individually selected weights, or parameters and modules
        by name; see :ref:`subset`.
    subset_params : dict, default=None
        Options of ``"subnetwork"``: either ``n_weights`` (100) and ``by``, the score
        that selects the weights after training (``"magnitude"``, ``"swag"``,
        ``"variance"`` or ``"random"``), or ``indices`` of weights in the flattened
        network. The options of ``"swag"`` are described in the :ref:`User Guide
        <subset>`.
    hessian_structure : {"kron", "diag", "full", "lowrank", "gp", "nystrom", \
            "variational"}, default="kron"
        Structure of the Hessian approximation; see :ref:`structure`. The memory for
        ``full`` is quadratic in the number of weights.
    structure_params : dict, default=None
        Options of the structure. ``kron`` accepts ``weight_sharing`` (``"expand"`` or
        ``"reduce"``). ``lowrank`` accepts ``rank`` (100), the number of eigenvectors,
        and ``tolerance`` (1e-12), the smallest eigenvalue to keep, relative to the
        largest. ``gp``, ``nystrom`` and ``variational`` accept ``n_points`` (100), the
        number of inducing points.
    curvature : {"ggn", "ggn_mc", "ef", "hessian", "identity"}, default="ggn"
        Approximation of the Hessian: the generalised Gauss-Newton matrix (GGN), a Monte
        Carlo estimate of the GGN, the empirical Fisher matrix, the exact Hessian (only
        for ``full`` and small networks), or ``JᵀJ`` with the Jacobian ``J``; see
        :ref:`curvature`.
    curvature_params : dict, default=None
        Options of the curvature. ``ggn_mc`` accepts ``n_draws`` (10), the number of
        draws.
    prior_precision : float, array or {"auto", "validation", "marglik"}, default="auto"
        Inverse prior variance of the weights. ``"marglik"`` maximises the marginal
        likelihood of the training data. ``"validation"`` maximises the score of
        held-out samples. ``"auto"`` also uses held-out samples. Without held-out
        samples, ``"auto"`` preserves the network's own predictions near the data, and
        issues a warning. With the default network, or with fewer than 1,000 samples and
        no ``X_val``, ``"auto"`` trains one network per cross-validation fold; see
        :ref:`validation-samples`.
    prior_structure : {"scalar", "layerwise", "diag"} or list of str, default="scalar"
        One precision for all weights, one per parameter tensor (not for ``nystrom`` and
        ``variational``), or one per weight (only for ``full``, ``lowrank`` and
        ``diag``). With a list of module or parameter names, there is one precision per
        name; see :ref:`prior-structure`.
    prior_mean : float or array of shape (P,), default=0.0
        Prior mean of the weights.
    prior : GaussianPosterior, array of shape (P, P) or None, default=None
        ``posterior_`` of an estimator fitted to an earlier task, whose network has the
        same layers; see :ref:`prior-task`. This posterior replaces ``prior_precision``,
        ``prior_structure`` and ``prior_mean``, which must have their default values. No
        hyperparameters are tuned. ``sigma_noise`` must be a number or an array. Not
        available for ``gp`` and ``lowrank``. An array is interpreted as a prior
        precision matrix, and requires ``hessian_structure="full"``.
    refine : bool or "auto", default="auto"
        Whether to refit the weights to the maximum a posteriori estimate of the
        linearised network; see :ref:`refine`. Only predictions use the refitted
        weights. With ``"auto"``, held-out samples decide whether to refit a last layer,
        for every ``prior_precision``. Without held-out samples, only ``"marglik"``
        refits. ``"auto"`` means False with ``prior``, if weights outside the last layer
        are selected, or if the loss is not convex in the outputs. True requires a
        convex loss, no ``prior``, and ``pred_type="glm"`` for weights outside the last
        layer.
    residual : float or {"auto", "none"}, default="auto"
        Variance s² of a Gaussian process that is added to the outputs, in units of the
        noise variance; see the :ref:`User Guide <far>`. At x, the variance is
        s² (0.01 / p(x))ᵃ, where p(x) is the share of samples from the data's
        distribution that are less similar to the training samples than x. For
        p(x) > 0.01, a is 2; otherwise, held-out samples choose a
        (``residual_steepness_``). ``"auto"`` means 0.5, or
        ``"none"`` with ``prior``. The residual requires a network with features and a
        normal likelihood with a noise level.
    temperature : float, default=1.0
        Divisor of the log-likelihood in the posterior. Values below one sharpen the
        posterior.
    validation_fraction : float, default=0.2
        Fraction of the samples to hold out for tuning, if the net is trained in ``fit``
        and holds out no samples itself, and if there are at least 50 distinct samples.
        ``prior_precision="auto"`` holds out samples only if you pass your own net and
        at least 100 samples (1,000 with ``sigma_noise="auto"``), and uses
        cross-validation otherwise.
    pred_type : {"glm", "nn"}, default="glm"
        Whether to predict with the linearised network (``"glm"``), or with the network
        under ``n_samples`` draws of the weights (``"nn"``). Tuning always uses
        ``"glm"``.
    n_samples : int, default=100
        Number of weight draws for ``pred_type="nn"``.
    batch_size : int or None, default=None
        Number of samples per batch for curvature and prediction. If None, limit batches
        to a fixed memory budget. Results do not depend on the batch size.
    n_jobs : int or None, default=None
        Number of joblib workers, each with one thread; see :doc:`/large_data`. If None,
        compute in the current process, with all of torch's threads, or with one thread
        for the default network. If -1, use one worker per core. Results are bitwise
        identical for all numbers of workers, including 1, and for all joblib backends.
    memory : None, str, path or joblib.Memory, default=None
        Cache of the trained network and its curvature, for grid searches that train
        only once per fold; see :ref:`memory`. Requires a ``random_state``. If you edit
        a function that the module calls, clear the folder. As with pickle, loading can
        run arbitrary code: use a folder that only you can write to.
    random_state : int, RandomState or None, default=None
        Seed for training, held-out samples and draws. With None, results differ between
        fits. The global random generators do not change.
    verbose : int, default=0
        As in `LaplaceClassifier`.
    sigma_noise : float, array or {"auto", "homoscedastic", "validation", "marglik"}, \
            default="auto"
        Standard deviation of the observation noise, for nets with ``MSELoss``; see
        :ref:`noise`. A single number applies to all outputs, and an array contains one
        value per column of ``y``. With a name, one noise level per column is tuned
        together with ``prior_precision``. With ``"auto"`` and at least 30 held-out
        residuals, the noise is heteroscedastic: its standard deviation and quantiles
        depend on the inputs. With all other values, the noise is normal and has a
        constant level. If ``sigma_noise`` and ``prior_precision`` are both names, they
        must be equal, unless one of them is ``"auto"``, or ``sigma_noise="validation"``
        is combined with ``prior_precision="marglik"``.
    normalize_y : bool, default=False
        Whether to centre each column of ``y`` and divide it by its standard deviation
        before training; see :ref:`normalize-y`. Results and ``sigma_noise`` remain in
        units of ``y``. The net's own outputs, its history and ``posterior_`` are in
        units of the normalised targets. Not supported for frozen nets, for counts, or
        together with ``prior``. The default network normalises a single column itself,
        and is always trained on normalised targets if there are several columns.

    Attributes
    ----------
    estimator_ : skorch net
        The trained network, or a copy of the frozen network.
    posterior_ : GaussianPosterior
        Gaussian over the selected weights.
    sigma_noise_ : float or ndarray of shape (n_outputs,)
        Standard deviation of constant observation noise, or 1 without noise. The
        standard deviation of heteroscedastic noise is expressed relative to
        ``sigma_noise_``.
    sigma_scaling_ : ndarray of shape (n_outputs,)
        Scaling factors for standard deviations, equal to one before `recalibrate`.
    n_features_in_ : int
        Number of features (size of the second axis); only for arrays.
    feature_names_in_ : ndarray of str
        Column names; only for data frames with string columns.
    n_iter_ : int
        Number of training epochs of the network.
    prior_precision_ : float or ndarray
        Prior precision in use. A given ``prior`` is stored in ``posterior_.earlier``.
    residual_steepness_ : float
        Power a of the residual's variance: the largest of 0.5, 0.75, 1 and 1.25
        whose log-likelihood of the held-out samples is at most 0.0025 nats per sample
        below the best, or with fewer than 100 samples, at most 0.25 nats in total.
        Without held-out samples, a is 1.25.
    temperature_ : float
        Temperature in use. The temperature in use differs from ``temperature`` only
        after `tune`.
    log_marginal_likelihood_value_ : float
        Laplace approximation of the log marginal likelihood in nats, for targets in
        units of ``y`` and constant noise.

    See Also
    --------
    LaplaceClassifier : Laplace approximation of a skorch classifier.
    LaplaceRegressorCV : Chooses prior precision and noise by cross-validation.

    Notes
    -----
    The posterior is exact if the noise is constant and the network is linear in the
    selected weights. A noise level that was tuned on training data is too small if the
    network overfits. ``fit`` therefore tunes the noise on held-out samples if possible,
    and warns if there are none. See `LaplaceClassifier` for references.

    Examples
    --------
    >>> from sklearn.datasets import load_diabetes
    >>> from sklaplace import LaplaceRegressor
    >>> X, y = load_diabetes(return_X_y=True)
    >>> model = LaplaceRegressor(random_state=0).fit(X, y)
    >>> mean, std = model.predict(X[:2], return_std=True)
    >>> mean.shape, std.shape
    ((2,), (2,))
    >>> model.predict_interval(X[:2], coverage=0.9).shape
    (2, 2)
    """

    sigma_noise: Any = option("auto", one_of(keys_and(TUNERS, "homoscedastic")), LEVELS)

    # --------------------------------------------------------------------- fit
    def _check_options(self) -> LaplaceOptions:
        """Return the options; raise an error for values that exclude each other.

        The noise of the options is one number, or the name of its tuner.
        """
        options = super()._check_options()
        check_normalize_y(self.normalize_y, is_frozen(self.estimator))
        if self.prior is not None and self.normalize_y:
            raise ValueError(
                "normalize_y=True cannot be used with prior, which is in the units of "
                "y. Use normalize_y=False."
            )
        options = replace(options, sigma_noise=self._resolved_noise())
        if self.prior is not None and isinstance(options.sigma_noise, str):
            raise ValueError(
                f"sigma_noise={self.sigma_noise!r} cannot be tuned with prior. Use a "
                "number or an array, such as sigma_noise_ of an earlier model."
            )
        # a hyperparameter that is a name is tuned by the method of this name
        values = self.prior_precision, options.sigma_noise
        names = {value for value in values if isinstance(value, str)} - {"auto"}
        # a prior by evidence and noise on held-out rows are the only mixed choice
        if len(names) > 1 and values != ("marglik", "validation"):
            raise ValueError(
                f"prior_precision={self.prior_precision!r} and "
                f"sigma_noise={self.sigma_noise!r} select different methods. Use the "
                "same method for both, or sigma_noise='auto'."
            )
        # on held-out rows, tuning varies the ratio of the prior precision to the scale
        # of the curvature. A refit depends on its ratio to the scale of the loss, whose
        # square is the scale of a curvature of second order
        noise = options.sigma_noise
        is_held_out = isinstance(noise, str) and noise != "marglik"
        is_of_second_order = CURVATURES[self.curvature].order > 1
        if is_of_second_order and is_held_out and options.refine is True:
            raise ValueError(
                f"refine=True cannot be used with curvature={self.curvature!r} and "
                "noise tuned on held-out rows. Use sigma_noise='marglik' or a number, "
                "refine=False, or curvature='ggn'."
            )
        return options

    def _resolved_noise(self) -> Any:
        """Return the noise level, the name of its tuner, or 1.0 without noise.

        The level of several columns is the geometric mean of their levels.
        """
        # several levels: their ratios are part of the likelihood; see `adapt`
        if np.ndim(self.sigma_noise):
            return geometric_mean(np.asarray(self.sigma_noise, dtype=float))
        if not isinstance(self.sigma_noise, str):
            return self.sigma_noise
        # without noise, do not tune and hold out no samples
        if not has_noise(self.likelihood, inner_net(self.estimator)):
            return 1.0
        # "homoscedastic" only switches off the noise model, not the tuning
        return "auto" if self.sigma_noise == "homoscedastic" else self.sigma_noise

    def _likelihood_settings(self) -> Any:
        """Return the settings by which the cache distinguishes likelihoods.

        These are the given likelihood, the given ratios of the noise levels of columns,
        and whether these ratios are estimated.
        """
        # only a Gaussian has ratios, so others are not adapted here
        adapted = self._targets.adapt(Gaussian())
        # tuned noise levels of several columns have fixed proportions
        is_tuned = self._targets.n_outputs > 1 and isinstance(self.sigma_noise, str)
        return self.likelihood, cast(Gaussian, adapted).relative, is_tuned

    def _score(
        self, likelihood: RegressionLikelihood, *, is_given: bool
    ) -> HeldOutScore:
        """Return the negative log-density of held-out targets as the score.

        ``is_given`` states that the user passed the samples.
        """
        score = super()._score(likelihood, is_given=is_given)
        if likelihood.has_noise:  # the default score includes the noise
            return score
        # a likelihood without a noise level ignores this argument
        log_density = partial(likelihood.log_density, noise=1.0)
        return replace(score, log_density=log_density)

    def _set_fitted(self, *fitted: Any) -> None:
        super()._set_fitted(*fitted)
        self._set_noise(self._noise)

    @property
    def _models_noise(self) -> bool:
        """Whether the noise can depend on the inputs."""
        depends = isinstance(self.sigma_noise, str) and self.sigma_noise == "auto"
        return depends and has_noise(self.likelihood, inner_net(self.estimator))

    def _trainer(self, options: LaplaceOptions) -> LaplaceTrainer:
        return replace(super()._trainer(options), models_noise=self._models_noise)

    def _fit_noise(self, outputs: list[BatchedOutputs]) -> None:
        """Fit the noise model to residuals of held-out samples, if there are any.

        Without a model, the noise is constant. ``outputs`` are those of the networks
        that have held-out samples.
        """
        self._noise_model = None
        if outputs and self._models_noise and isinstance(self._likelihood, Gaussian):
            # constant noise (c,), in units of which the model predicts the noise
            levels = self._noise * np.array(self._likelihood.relative or (1.0,))
            rows = held_out_rows(self._outputs(), outputs)
            residuals = held_out_residuals(rows, levels)
            self._noise_model = NoiseModel.fit(residuals, levels)

    @property
    def _noise(self) -> float:
        return float(self.posterior_.hyperparameters.sigma_noise)

    def to_module(self, coverage: float | None = 0.9) -> PredictiveModule:
        """Return a torch module that predicts without the estimator.

        ``torch.export`` and ``torch.onnx.export`` write the module to files that can be
        loaded without this package.

        Read more in :doc:`/user_guide/deployment`.

        Parameters
        ----------
        coverage : float or None, default=0.9
            Coverage of the interval. If None, only the mean and variance are predicted.

        Returns
        -------
        torch.nn.Module
            Differentiable module on the network's device. Its computations are in
            float64 from the last layer on. For b samples, the module returns the mean
            and variance of `latent_mean_and_variance`, (b, n_outputs), and the interval
            of `predict_interval`, (b, 2) or (b, n_outputs, 2).

        Raises
        ------
        ValueError
            If the predictions have no closed form. A closed form requires a posterior
            over a last Linear layer without parametrisations, a net without its own
            ``infer`` method, ``pred_type="glm"``, and a Gaussian likelihood for
            intervals.

        See Also
        --------
        predictive : Joint covariances with gradients, for all weights.

        Examples
        --------
        >>> import torch
        >>> from sklearn.datasets import load_diabetes
        >>> from sklaplace import LaplaceRegressor
        >>> X, y = load_diabetes(return_X_y=True)
        >>> model = LaplaceRegressor(prior_precision=1.0, random_state=0).fit(X, y)
        >>> mean, variance, interval = model.to_module()(torch.from_numpy(X[:3]))
        >>> interval.shape
        torch.Size([3, 2])
        """
        outputs, interval = self._outputs(), None
        if coverage is not None:
            hint = "Pass a number such as 0.9, or None."
            interval = self._interval(check_fraction("coverage", coverage, hint))
        # the affine map to units of y, from its values at the outputs 0 and 1 of one
        # sample; `_in_units` returns means and variances
        zero = torch.zeros(1, self.network_spec_.n_outputs, dtype=torch.float64)
        at_0, at_1 = (self._in_units(zero + n, zero)[0][0] for n in (0, 1))
        result = Numbers(at_0, at_1 - at_0, interval, self._targets.ndim > 1)
        return PredictiveModule.of(
            outputs,
            result,
            n_inputs=getattr(self, "n_features_in_", 0),
            diagonal=True,
            is_centred=False,
        )

    def _interval(self, coverage: float) -> Interval:
        """Return the interval with a given coverage as a function of predictions."""
        if not isinstance(self._likelihood, Gaussian):
            raise ValueError(
                f"Intervals of {type(self._likelihood).__name__} have no closed form. "
                "Use a Gaussian likelihood, or to_module(coverage=None)."
            )
        scores = norm.ppf([(1 - coverage) / 2, (1 + coverage) / 2])  # of both ends
        # numbers become tensors, and then buffers of the module
        as_tensor = partial(torch.tensor, dtype=torch.float64)
        model = mapped_tensors(as_tensor, self._noise_model, float)
        return Interval(
            self._noise * self.posterior_.noise_proportions.cpu(),
            torch.from_numpy(scores),
            torch.from_numpy(self.sigma_scaling_).double(),
            model,
            # the model's quantiles at the ends, computed once
            [column.at(scores) for column in model.columns] if model else [],
        )

    def partial_fit(
        self, X: Inputs, y: ArrayLike, sample_weight: ArrayLike | None = None
    ) -> "LaplaceRegressor":
        """Add samples to the posterior; the network keeps its weights.

        The result is the same as that of a single fit to all samples, in any order,
        with the same network weights, prior, noise and temperature. Before the first
        fit, this method is equivalent to ``fit``.

        Parameters
        ----------
        X : array-like of shape (n, ...), dict of arrays, or torch Dataset
            New samples.
        y : array-like of shape (n,) or (n, n_outputs)
            Targets of the samples.
        sample_weight : array-like of shape (n,), optional
            Non-negative sample weights, as in ``fit``.

        Returns
        -------
        object
            The estimator.

        Raises
        ------
        ValueError
            If the samples do not match earlier samples. The error leaves the estimator
            unchanged.

        See Also
        --------
        fit : Also trains the network.
        tune : Tunes prior and noise again.

        Notes
        -----
        This method requires one pass over the new samples. Neither the prior nor the
        noise is tuned again, and the network is not retrained. scikit-learn's
        ``learning_curve(exploit_incremental_learning=True)`` calls this method, so its
        learning curve is flat.

        Examples
        --------
        >>> from sklearn.datasets import load_diabetes
        >>> from sklaplace import LaplaceRegressor
        >>> X, y = load_diabetes(return_X_y=True)
        >>> model = LaplaceRegressor(prior_precision=1.0, random_state=0)
        >>> model = model.fit(X[::2], y[::2])
        >>> before = model.latent_mean_and_variance(X[:1])[1]
        >>> bool(model.partial_fit(X, y).latent_mean_and_variance(X[:1])[1] < before)
        True
        """
        if hasattr(self, "posterior_"):
            return cast(LaplaceRegressor, self._add_samples(X, y, sample_weight))
        return cast(LaplaceRegressor, self.fit(X, y, sample_weight))
