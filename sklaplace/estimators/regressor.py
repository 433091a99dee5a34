"""LaplaceRegressor: predictions with standard deviations, intervals and samples."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np

from sklaplace.core.linalg import plain
from sklaplace.curvature.ggn import CURVATURES
from sklaplace.estimators.fitting.laplace_fit import HeldOutScore, LaplaceSolver
from sklaplace.estimators.laplace import BaseLaplace
from sklaplace.estimators.options.given_net import inner_net, is_frozen
from sklaplace.estimators.options.laplace import LaplaceOptions
from sklaplace.estimators.probabilistic_regressor import ProbabilisticRegressor
from sklaplace.estimators.targets.numbers import (
    check_normalize_y,
    geometric_mean,
    has_noise,
)
from sklaplace.likelihoods import Gaussian, RegressionLikelihood
from sklaplace.networks.trained import TrainedNetwork
from sklaplace.posterior.gaussian import GaussianPosterior


@dataclass(eq=False, repr=False, kw_only=True)
class LaplaceRegressor(BaseLaplace, ProbabilisticRegressor):
    """Laplace approximation of a skorch regressor.

    The posterior over (some of) the weights of the network is a Gaussian around their
    trained values. With Gaussian observation noise, predictions have standard
    deviations and intervals that widen away from the training data.

    Read more in the :doc:`User Guide </user_guide/regression>`.

    Parameters
    ----------
    estimator : skorch net, FrozenEstimator or None, default=None
        The network. A skorch net is cloned and trained in ``fit``; a
        ``sklearn.frozen.FrozenEstimator`` around a trained net keeps its weights; None
        uses a small network for tabular data.
    likelihood : object or None, default=None
        Likelihood of the targets given the outputs, for a criterion without a built-in
        one; see `sklaplace.likelihoods`. None uses that of the criterion.
    subset_of_weights : {"last_layer", "all", "trainable", "subnetwork"} or list of \
            str, default="last_layer"
        Weights that are treated as random: those of the last layers, all, those with
        ``requires_grad``, single ones, or parameters by name (or by that of a module
        that contains them).
    subset_params : dict, default=None
        Options of the subset. ``subnetwork`` takes ``n_weights`` (100), and ``by``
        (``"magnitude"``, ``"swag"``, ``"variance"``, ``"random"``), the score that
        selects them after training; ``by="swag"`` takes ``n_snapshots`` (100),
        ``steps_per_snapshot`` (1) and ``lr`` (0.01), the iterates of gradient descent
        whose variances are the scores. Or ``indices``, their indices in the flattened
        network.
    hessian_structure : {"kron", "diag", "full", "lowrank", "gp", "nystrom", \
            "variational"}, default="kron"
        Structure of the Hessian approximation. ``full`` takes memory quadratic in the
        number of weights, ``lowrank`` that of ``rank`` networks.
    structure_params : dict, default=None
        Options of the structure. ``kron`` takes ``weight_sharing`` (``"expand"`` or
        ``"reduce"``); ``lowrank`` takes ``rank`` (100), the number of eigenvectors, and
        ``tolerance`` (1e-12), the fraction of the largest eigenvalue below which they
        are dropped; ``gp``, ``nystrom`` and ``variational`` take ``n_points`` (100),
        the number of inducing points.
    curvature : {"ggn", "ggn_mc", "ef", "hessian", "identity"}, default="ggn"
        Approximation of the Hessian: the generalised Gauss-Newton matrix, its
        Monte-Carlo estimate from targets that the network draws, the empirical Fisher
        matrix, the Hessian itself (``full``, and small networks, only), or products of
        the Jacobian alone, whatever the loss.
    curvature_params : dict, default=None
        Options of the curvature. ``ggn_mc`` takes ``n_draws`` (10).
    prior_precision : float, array or {"auto", "validation", "marglik"}, default="auto"
        Inverse prior variance of the weights. ``"marglik"`` maximises the marginal
        likelihood of the training data, ``"validation"`` the score of samples that the
        network did not see. ``"auto"`` is the second where there are such samples; else
        predictions near the data stay the network's own, with a warning. The samples
        are taken from ``X_val``, else from what the net's ``train_split`` holds out,
        else from ``validation_fraction``. With few samples, ``"auto"`` trains a network
        without each fold of them. A frozen net is never trained.
    prior_structure : {"scalar", "layerwise", "diag"}, default="scalar"
        One precision for all weights, one per parameter tensor (not for ``nystrom`` and
        ``variational``), or one per weight (for ``full``, ``lowrank`` and ``diag``).
    prior_mean : float or array of shape (P,), default=0.0
        Prior mean of the weights.
    prior : GaussianPosterior or None, default=None
        ``posterior_`` of an estimator that was fitted to an earlier task, around a
        network with the same weights: that Gaussian is then the prior, in place of
        ``prior_precision``, ``prior_structure`` and ``prior_mean``, which stay at their
        defaults, and nothing is tuned; ``sigma_noise`` must be a number or an array.
        Outputs are matched by their number. Exact for ``full`` and ``diag``; see the
        user guide on the others, of which ``gp`` and ``lowrank`` are refused.
    refine : bool or "auto", default="auto"
        Whether the weights are refitted to the maximum a posteriori of the linearised
        network under the prior; predictions then use them, the network keeps its own.
        ``"auto"`` leaves that to the tuner for a last layer, and is False where
        nothing is tuned, other weights are selected, or the loss is not convex in the
        outputs. Under True these other weights need ``pred_type="glm"``, and losses
        that are not convex are refused, and so is ``prior``.
    residual : float or {"auto", "none"}, default="auto"
        Variance of a Gaussian process that is added to the outputs, and grows with the
        distance from the training samples until predictions there are uncertain: its
        variance, in units of that of the noise, at a distance that 99 % of the samples
        do not exceed. ``"auto"`` is 0.5 with ``prior_precision="auto"``, and otherwise
        ``"none"``, under which the weights alone are random. Outputs then vary by at
        most about twice the standard deviation of ``y``. Networks without features, see
        `score_samples`, have none, nor have likelihoods other than the normal one with
        a noise level. See the :ref:`User Guide <far>`.
    temperature : float, default=1.0
        Divides the log-likelihood in the posterior; values below one sharpen it.
    validation_fraction : float, default=0.2
        Fraction of the samples to hold out for tuning, from a net that is trained here
        and holds out none itself, if there are at least 50 distinct samples; 100 with
        ``prior_precision="auto"``, which has networks of folds for fewer.
    pred_type : {"glm", "nn"}, default="glm"
        Predictive distribution: that of the linearised network, or of the network under
        ``n_samples`` draws of the weights. Tuning uses the first.
    n_samples : int, default=100
        Draws of ``pred_type="nn"`` and of ``sample_y``; the linearised predictive
        distribution needs none.
    batch_size : int or None, default=None
        Samples per batch for curvature and prediction; None fits them into a fixed
        memory budget. Results do not depend on it.
    n_shards : int or None, default=None
        Parts that the training samples are divided into, in whole batches: the
        curvature is summed within each, and then over all, in order. None is one for
        every four batches, and at most 32. Only the last digits depend on it.
    n_jobs : int or None, default=None
        Workers that compute shards, and batches of predictions, by joblib: processes,
        or what ``joblib.parallel_config`` says, such as ``"dask"``. Each uses one
        thread, and results are the same to the last bit for every number, 1 included,
        and every backend. None computes here, on as many threads as torch uses; -1 is
        one worker per core.
    distributed : bool, default=False
        Whether all processes of the default group of ``torch.distributed`` fit
        together, each on a part of the shards. All are given the same data and
        parameters, and get the same posterior.
    memory : None, str, path or joblib.Memory, default=None
        Cache of the trained network and its curvature, so that a grid search over
        prior, noise, temperature or link trains once per fold. Needs a
        ``random_state``. An edit of your module trains anew, an edit of a function
        that the module calls does not: clear the folder then. Loading from the folder
        can run any code, as with pickle: use a folder that you alone may write to.
    random_state : int, RandomState or None, default=None
        Seeds training, the held-out samples and the draws. None differs every time.
        The global generators are never touched.
    verbose : int, default=0
        As for `LaplaceClassifier`.
    sigma_noise : float, array or {"auto", "validation", "marglik"}, default="auto"
        Standard deviation of the observation noise; only for nets with ``MSELoss``,
        whose criterion leaves it open. A number is that of all outputs, an array has
        one for each column of ``y``. A name tunes it together with ``prior_precision``,
        with a level for each column: in proportion to residuals on held-out samples, or
        that of the largest evidence; see the user guide. Where both are names other
        than ``"auto"`` they must be the same, but for ``"validation"`` under
        ``prior_precision="marglik"``. With that prior, ``"auto"`` uses held-out
        samples where there are any.
    normalize_y : bool, default=False
        Whether the network is trained on targets from which their mean is subtracted,
        and that are divided by their standard deviation, column by column. All results,
        and a ``sigma_noise`` that is given, stay in the units of ``y``; what the net
        itself returns, its history, and ``posterior_`` are those of the normalised
        targets. Mean and standard deviation are those of all samples given to ``fit``
        (held-out ones of ``train_split`` and ``validation_fraction`` included, those of
        ``X_val`` not), with their weights. Not for frozen nets, counts and ``prior``.
        The default network does so by itself.

    Attributes
    ----------
    estimator_ : skorch net
        The trained network; a copy where it was frozen.
    posterior_ : GaussianPosterior
        Gaussian over the selected weights.
    sigma_noise_ : float or ndarray of shape (n_outputs,)
        Standard deviation of the observation noise in use; one where there is none.
    sigma_scaling_ : ndarray of shape (n_outputs,)
        Factors of standard deviations, one each unless `recalibrate` was called.
    n_features_in_ : int
        Number of features (of the second axis), for array input.
    feature_names_in_ : ndarray of str
        Column names, for data frames with string columns.
    n_iter_ : int
        Epochs the network was trained for.
    prior_precision_ : float or ndarray
        Prior precision in use.
    temperature_ : float
        Temperature in use: ``temperature`` unless `tune` chose another.
    log_marginal_likelihood_value_ : float
        Laplace approximation of the log marginal likelihood, in nats, of ``y`` in its
        units.

    See Also
    --------
    LaplaceClassifier : Laplace approximation of a skorch classifier.
    LaplaceRegressorCV : Prior precision and noise by cross-validation.

    Notes
    -----
    For a network that is linear in the selected weights the posterior is exact.
    Noise that is tuned on training data is too small where the network overfits, so
    that held-out samples are preferred, and ``fit`` warns without them.
    References as for `LaplaceClassifier`.

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

    sigma_noise: Any = "auto"
    normalize_y: bool = False

    # --------------------------------------------------------------------- fit
    def _check_options(self) -> LaplaceOptions:
        options = super()._check_options()
        check_normalize_y(self.normalize_y, is_frozen(self.estimator))
        if self.prior is not None and self.normalize_y:
            raise ValueError(
                "normalize_y=True cannot be used with prior: each task has units of "
                "its own, in which the weights mean something else. Use "
                "normalize_y=False."
            )
        options = replace(options, sigma_noise=self._resolved_noise())
        if self.prior is not None and isinstance(options.sigma_noise, str):
            raise ValueError(
                f"sigma_noise={self.sigma_noise!r} cannot be chosen under the "
                "posterior of an earlier task. Use a number or an array, such as the "
                "sigma_noise_ of the model that was fitted to it."
            )
        values = self.prior_precision, options.sigma_noise
        names = {value for value in values if isinstance(value, str)} - {"auto"}
        if len(names) > 1 and values != ("marglik", "validation"):
            raise ValueError(
                f"prior_precision={self.prior_precision!r} and sigma_noise="
                f"{self.sigma_noise!r} name two tuners, but both are chosen "
                "together. Use the same name for both, or sigma_noise='auto'."
            )
        noise = options.sigma_noise
        is_free = isinstance(noise, str) and noise != "marglik"
        is_of_second_order = CURVATURES[self.curvature].order > 1
        if is_of_second_order and is_free and options.refine is True:
            raise ValueError(
                f"refine=True cannot be used with curvature={self.curvature!r} where "
                "the noise is chosen on held-out rows. Use sigma_noise='marglik' or a "
                "number, or refine=False, or curvature='ggn'."
            )
        return options

    def _resolved_noise(self) -> Any:
        """Return one number or the name of a tuner; one if there is no noise."""
        if np.ndim(self.sigma_noise):
            return geometric_mean(np.asarray(self.sigma_noise, dtype=float))
        if not isinstance(self.sigma_noise, str):
            return self.sigma_noise
        # without noise nothing is tuned, and no samples are held out
        is_noisy = has_noise(self.likelihood, inner_net(self.estimator))
        return self.sigma_noise if is_noisy else 1.0

    def _solver(self, options: LaplaceOptions) -> LaplaceSolver:
        noise = options.sigma_noise
        if not isinstance(noise, str):
            noise = noise / self._targets.noise_unit
        return super()._solver(replace(options, sigma_noise=noise))

    def _likelihood_settings(self) -> Any:
        adapted = self._targets.adapt(Gaussian())
        # several columns get noise levels in proportion where these are tuned
        is_tuned = self._targets.n_outputs > 1 and isinstance(self.sigma_noise, str)
        return self.likelihood, cast(Gaussian, adapted).relative, is_tuned

    def _score(self, likelihood: RegressionLikelihood) -> HeldOutScore:
        if likelihood.has_noise:  # tuned with the prior
            return HeldOutScore()
        return HeldOutScore(log_density=partial(likelihood.log_density, noise=1.0))

    def _set_fitted(
        self,
        options: LaplaceOptions,
        network: TrainedNetwork,
        posterior: GaussianPosterior,
    ) -> None:
        super()._set_fitted(options, network, posterior)
        self._set_noise(plain(posterior.hyperparameters.sigma_noise))

    @property
    def _noise(self) -> float:
        return float(self.posterior_.hyperparameters.sigma_noise)

    def partial_fit(
        self, X: Any, y: Any, sample_weight: Any = None
    ) -> "LaplaceRegressor":
        """Add samples to the posterior; the network keeps its weights.

        The result is that of one fit on all samples around the same weights, prior,
        noise and temperature, whatever the order. Before any fit, this is ``fit``.

        Parameters
        ----------
        X : array-like of shape (n, ...), dict of arrays, or torch Dataset
            New samples.
        y : array-like of shape (n,) or (n, n_outputs)
            Their targets.
        sample_weight : array-like of shape (n,), optional
            Non-negative weights of the samples, as in fit.

        Returns
        -------
        object
            The estimator.

        Raises
        ------
        ValueError
            If the samples do not fit the earlier ones; the estimator is then unchanged.

        See Also
        --------
        fit : Trains the network, too.
        tune : Chooses prior and noise anew.

        Notes
        -----
        One pass over the new samples. Prior and noise are not tuned again, and the
        network is not trained: ``learning_curve(exploit_incremental_learning=True)``,
        which calls this method, is flat.

        Examples
        --------
        >>> from sklearn.datasets import load_diabetes
        >>> from sklaplace import LaplaceRegressor
        >>> X, y = load_diabetes(return_X_y=True)
        >>> model = LaplaceRegressor(random_state=0).fit(X[::2], y[::2])
        >>> before = model.latent_mean_and_variance(X[:1])[1]
        >>> bool(model.partial_fit(X, y).latent_mean_and_variance(X[:1])[1] < before)
        True
        """
        if hasattr(self, "posterior_"):
            return cast(LaplaceRegressor, self._add_samples(X, y, sample_weight))
        return cast(LaplaceRegressor, self.fit(X, y, sample_weight))
