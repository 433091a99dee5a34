"""LaplaceRegressor: predictions with standard deviations, intervals and samples."""

import warnings
from functools import partial
from typing import Any, ClassVar, cast

import numpy as np
from sklearn.base import RegressorMixin
from sklearn.utils.validation import check_is_fitted

from sklaplace.base import BaseLaplace, plain, unchanged_on_error
from sklaplace.curvature import CURVATURES
from sklaplace.data import TrainingData
from sklaplace.likelihoods import (
    CRITERIA,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    NumberLikelihood,
    Poisson,
)
from sklaplace.networks import default_regressor
from sklaplace.options import as_levels, as_seed, check_positive
from sklaplace.posterior import GaussianPosterior
from sklaplace.tuning import TUNERS


class LaplaceRegressor(RegressorMixin, BaseLaplace):
    """Predictions with standard deviations and intervals, from a skorch net.

    A Laplace approximation: a Gaussian over (some of) the network's weights around
    their trained values, and Gaussian observation noise. Bands widen away from the
    training rows.

    Parameters
    ----------
    estimator : skorch net, FrozenEstimator or None, default=None
        The network. A skorch net is cloned and trained in ``fit``; a
        ``sklearn.frozen.FrozenEstimator`` around a net keeps its weights; None
        makes a small network that suits tables.
    likelihood : object or None, default=None
        Of the targets given the outputs, where the criterion is none of those that are
        known; see `sklaplace.likelihoods`. None takes that of the criterion.
    subset_of_weights : {"last_layer", "all", "trainable", "subnetwork"} or list of \
            str, default="last_layer"
        Weights that are treated as random: those of the last layer, all, those with
        ``requires_grad``, single ones, or parameters by name (or by that of a module
        that contains them).
    subset_params : dict, default=None
        Options of the subset. ``subnetwork`` takes ``n_weights`` (100), and ``by``
        (``"magnitude"``, ``"swag"``, ``"variance"``, ``"random"``), which chooses them
        once the network has been trained; or ``indices``, their places in the
        flattened network.
    hessian_structure : {"kron", "diag", "full", "lowrank", "gp", "nystrom", \
            "variational"}, default="kron"
        Part of the curvature that is kept. ``full`` takes memory quadratic in the
        number of weights, ``lowrank`` that of ``rank`` networks.
    structure_params : dict, default=None
        Options of the structure. ``kron`` takes ``weight_sharing`` (``"expand"``, or
        ``"reduce"``), ``lowrank`` takes ``rank`` (100), the number of
        eigenvectors to keep, and ``tolerance`` (1e-12), the share of the largest
        eigenvalue below which they are dropped. ``gp``, ``nystrom`` and ``variational``
        take ``n_points`` (100), the number of rows that stand for all.
    curvature : {"ggn", "ggn_mc", "ef", "hessian"}, default="ggn"
        Approximation of the Hessian: the generalised Gauss-Newton matrix, the same
        by targets that the network draws, the empirical Fisher matrix, or the Hessian
        itself (``full``, and small networks, only).
    curvature_params : dict, default=None
        Options of the curvature. ``ggn_mc`` takes ``n_draws`` (10).
    prior_precision : float, array or {"auto", "validation", "marglik"}, default="auto"
        One over the prior variance of a weight. ``"marglik"`` maximises the
        evidence on training rows, ``"validation"`` the score on rows that the
        network did not see, ``"auto"`` is the second where there are such rows and
        the first otherwise. Rows are taken from ``X_val``, else from what the
        net's ``train_split`` holds out, else from ``validation_fraction``.
    prior_structure : {"scalar", "layerwise", "diag"}, default="scalar"
        One precision for all weights, one per parameter tensor, or one per weight
        (not for ``kron``).
    prior_mean : float or array of shape (P,), default=0.0
        Prior mean of the weights.
    prior : GaussianPosterior or None, default=None
        ``posterior_`` of an estimator that was fitted to an earlier task, around a
        network with the same weights: the prior is then that Gaussian, in place of
        ``prior_precision``, ``prior_structure`` and ``prior_mean``, which stay at their
        defaults, and nothing is tuned. Give ``sigma_noise`` a number. Outputs
        are matched by their number. Exact for ``full`` and ``diag``; see the guide on
        the others, of which ``gp`` and ``lowrank`` are refused.
    refine : bool or "auto", default="auto"
        Whether the weights are refitted to the most probable ones under the prior, of
        the linearised network; predictions then use them, the network keeps its own.
        ``"auto"`` leaves that to the tuner for the last layer, and is False where
        nothing is tuned, or more weights are selected.
    temperature : float, default=1.0
        Divides the log-likelihood in the posterior; below one sharpens it.
    validation_fraction : float, default=0.2
        Share of rows to hold out for tuning, from a net that is trained here and
        holds nothing out itself, if there are at least 50 distinct rows.
    pred_type : {"glm", "nn"}, default="glm"
        Predictive: the linearised network, or the network itself under ``n_samples``
        draws of the weights. What is tuned is tuned for the first.
    sigma_noise : float, array or {"auto", "validation", "marglik"}, default="auto"
        Standard deviation of the observation noise, one for all outputs; only for
        nets with ``MSELoss``, whose criterion leaves it open. An array has one for
        each column of ``y``. A name
        chooses it together with ``prior_precision``; where both are names other
        than ``"auto"`` they must be the same.
    n_samples : int, default=100
        Draws of predictives that sample; the linearised one needs none.
    batch_size : int or None, default=None
        Rows per batch for curvature and prediction; None fits them into a fixed
        memory budget. Results do not depend on it.
    memory : None, str, path or joblib.Memory, default=None
        Where the trained network and its curvature are kept, so that a grid search
        over prior, noise, temperature or link trains once per fold. Needs a
        ``random_state``.
    random_state : int, RandomState or None, default=None
        Seeds training, the rows held out and the draws. None differs every time.
        The global generators are never touched.
    verbose : int, default=0
        Print one line after fitting if positive.

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
    log_marginal_likelihood_value_ : float
        Laplace evidence of the training rows, in nats.

    See Also
    --------
    LaplaceClassifier : The same for classes.
    LaplaceRegressorCV : Prior precision and noise by cross-validation.

    Notes
    -----
    For a network that is linear in the selected weights the posterior is exact.
    Noise that is chosen on training rows is too small where the network is
    over-trained, so held-out rows are preferred, and ``fit`` warns without them.
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

    _likelihoods = (Gaussian, HeteroscedasticGaussian, Poisson)
    _stratify = False
    _target_options: ClassVar[dict[str, Any]] = {
        "multi_output": True,
        "y_numeric": True,
    }

    def __init__(
        self,
        estimator: Any = None,
        *,
        likelihood: Any = None,
        subset_of_weights: str | list[str] = "last_layer",
        subset_params: dict[str, Any] | None = None,
        hessian_structure: str = "kron",
        structure_params: dict[str, Any] | None = None,
        curvature: str = "ggn",
        curvature_params: dict[str, Any] | None = None,
        prior_precision: Any = "auto",
        prior_structure: str = "scalar",
        prior_mean: Any = 0.0,
        prior: Any = None,
        refine: Any = "auto",
        temperature: float = 1.0,
        validation_fraction: float = 0.2,
        pred_type: str = "glm",
        sigma_noise: Any = "auto",
        n_samples: int = 100,
        batch_size: int | None = None,
        memory: Any = None,
        random_state: Any = None,
        verbose: int = 0,
    ) -> None:
        self.estimator = estimator
        self.likelihood = likelihood
        self.subset_of_weights = subset_of_weights
        self.subset_params = subset_params
        self.hessian_structure = hessian_structure
        self.structure_params = structure_params
        self.curvature = curvature
        self.curvature_params = curvature_params
        self.prior_precision = prior_precision
        self.prior_structure = prior_structure
        self.prior_mean = prior_mean
        self.prior = prior
        self.refine = refine
        self.temperature = temperature
        self.validation_fraction = validation_fraction
        self.pred_type = pred_type
        self.sigma_noise = sigma_noise
        self.n_samples = n_samples
        self.batch_size = batch_size
        self.memory = memory
        self.random_state = random_state
        self.verbose = verbose

    # --------------------------------------------------------------------- fit
    def _check_parameters(self) -> None:
        super()._check_parameters()
        is_one = np.ndim(self.sigma_noise) == 0
        check_positive("sigma_noise", self.sigma_noise, TUNERS, scalar=is_one)
        if np.ndim(self.sigma_noise) > 1:
            raise ValueError(
                f"sigma_noise has shape {np.shape(self.sigma_noise)}. Pass one number, "
                "or one per column of y."
            )
        if self.prior is not None and isinstance(self._sigma_noise(), str):
            raise ValueError(
                f"sigma_noise={self.sigma_noise!r} cannot be chosen under the "
                "posterior of an earlier task. Use a number, such as the "
                "sigma_noise_ of the model that was fitted to it."
            )
        named = {name for name in self._tuners() if name != "auto"}
        if len(named) > 1:
            raise ValueError(
                f"prior_precision={self.prior_precision!r} and sigma_noise="
                f"{self.sigma_noise!r} name two tuners, but both are chosen "
                "together. Use the same name for both, or sigma_noise='auto'."
            )
        is_free = isinstance(self.sigma_noise, str) and self.sigma_noise != "marglik"
        is_of_second_order = CURVATURES[self.curvature].order > 1
        if is_of_second_order and is_free and self._refine() is True:
            raise ValueError(
                f"refine=True cannot be used with curvature={self.curvature!r} where "
                "the noise is chosen on held-out rows. Use sigma_noise='marglik' or a "
                "number, or refine=False, or curvature='ggn'."
            )

    def _sigma_noise(self) -> Any:
        if np.ndim(self.sigma_noise):
            return _geometric_mean(np.asarray(self.sigma_noise, dtype=float))
        if not isinstance(self.sigma_noise, str):
            return self.sigma_noise
        likelihood = self.likelihood or _likelihood_of(self._net())
        has_none = likelihood is not None and not likelihood.has_noise
        # nothing to tune, and no rows to hold out for it
        return 1.0 if has_none else self.sigma_noise

    def _relative_noise(self) -> tuple[float, ...] | None:
        """Noise of each output over their geometric mean, if there are several."""
        if np.ndim(self.sigma_noise) == 0:
            return None
        levels = np.asarray(self.sigma_noise, dtype=float)
        if len(levels) != self._n_targets:
            raise ValueError(
                f"sigma_noise has shape {levels.shape}, but y has {self._n_targets} "
                f"column{'s' if self._n_targets > 1 else ''}. Pass one number, or one "
                "for each column."
            )
        return tuple((levels / _geometric_mean(levels)).tolist())

    def _adapted(self, likelihood: Likelihood) -> Likelihood:
        relative = self._relative_noise()
        if relative is None or not isinstance(likelihood, Gaussian):
            return likelihood
        return Gaussian(relative)

    def _likelihood_settings(self) -> Any:
        return super()._likelihood_settings(), self._relative_noise()

    def _encode(self, y: Any, *, reset: bool, name: str = "y") -> np.ndarray:
        """Targets as (n, n_outputs), in the dtype of the network."""
        y = np.asarray(y)
        columns = y.reshape(len(y), -1)
        if reset:
            self._y_ndim, self._n_targets = y.ndim, columns.shape[1]
            if np.ndim(self.sigma_noise) == 0:
                _warn_of_unequal_scales(columns)
        elif columns.shape[1] != self._n_targets:
            raise ValueError(
                f"{name} has {columns.shape[1]} columns, but y has {self._n_targets} "
                "in fit. Pass the same targets in both."
            )
        if columns.dtype.kind not in "fiub":
            raise ValueError(
                f"y has entries of type {columns.dtype}; a regressor needs numbers. "
                "For labels use LaplaceClassifier."
            )
        return self._input_type.floats(columns, "y")

    def _n_outputs(self) -> int:
        return int(self._n_targets)

    def _default_net(self, data: TrainingData) -> Any:
        return default_regressor(data.X, data.y, data.sample_weight)

    def _log_proba(self, posterior: GaussianPosterior) -> None:
        return None

    def _log_density(self, posterior: GaussianPosterior) -> Any:
        likelihood = cast(NumberLikelihood, posterior.likelihood)
        if likelihood.has_noise:
            return None  # the noise is chosen, too
        return partial(likelihood.log_density, noise=1.0)

    def _check_targets(self, net: Any, y: np.ndarray) -> None:
        likelihood = self.likelihood or _likelihood_of(net)
        if likelihood is None:
            return  # refused by name soon
        likelihood.check_targets(y)
        given = self.sigma_noise
        if not (likelihood.has_noise or isinstance(given, str) or np.all(given == 1)):
            raise ValueError(
                f"sigma_noise={given!r} was given, but criterion="
                f"{type(net.criterion_).__name__} has no noise level. Leave it out."
            )

    def _publish(self, curved: Any, posterior: GaussianPosterior) -> None:
        super()._publish(curved, posterior)
        sigma = plain(posterior.hyperparameters.sigma_noise)
        relative = getattr(posterior.likelihood, "relative", None)
        self.sigma_noise_ = sigma if relative is None else sigma * np.array(relative)
        self.sigma_scaling_ = np.ones(self._n_targets)

    def partial_fit(
        self, X: Any, y: Any, sample_weight: Any = None
    ) -> "LaplaceRegressor":
        """Add rows to the posterior; the network keeps its weights.

        The result is that of one fit on all rows around the same weights, prior, noise
        and temperature, whatever the order. Before any fit, it is the first one.

        Parameters
        ----------
        X : array-like of shape (n, ...), dict of arrays, or torch Dataset
            New rows.
        y : array-like of shape (n,) or (n, n_outputs)
            Their targets.
        sample_weight : array-like of shape (n,), optional
            Non-negative weights of the rows.

        Returns
        -------
        self : object
            The estimator.

        Raises
        ------
        ValueError
            If the rows do not fit the earlier ones. The estimator is then as it was.

        Notes
        -----
        One pass over the new rows, as in ``fit``. Prior and noise are not tuned again.
        """
        if not hasattr(self, "posterior_"):
            return cast(LaplaceRegressor, self.fit(X, y, sample_weight))
        self._add_rows(X, y, sample_weight)
        return self

    def recalibrate(
        self, X: Any, y: Any, sample_weight: Any = None
    ) -> "LaplaceRegressor":
        """Scale predictive standard deviations to residuals of held-out rows.

        Each output's standard deviations, noise included, are multiplied by one number
        from then on: the root of the mean of ``(y - mean)² / variance``, under which
        these rows are most probable. Means stay. ``fit`` begins anew.

        Parameters
        ----------
        X : array-like of shape (n, ...), dict of arrays, or torch Dataset
            Rows that neither the network nor a tuner has seen.
        y : array-like of shape (n,) or (n, n_outputs)
            Their targets.
        sample_weight : array-like of shape (n,), optional
            Non-negative weights of the rows.

        Returns
        -------
        self : object
            The estimator, with ``sigma_scaling_``.

        Raises
        ------
        ValueError
            If the rows are fitted perfectly, or there are fewer than two.

        Notes
        -----
        One prediction. n rows tell the scale to a share of ``1/√(2n)``.

        References
        ----------
        Levi, Gispan, Giladi, Fetaya (2022), "Evaluating and calibrating uncertainty
        prediction in regression tasks", Sensors 22(15) (σ-scaling); offered by
        LaplaceRedux.jl as well.
        """
        check_is_fitted(self)
        if not self._likelihood().has_noise:
            raise ValueError(
                "recalibrate scales the noise of targets around their mean, which "
                f"{type(self._likelihood()).__name__} does not have. Use a net with "
                "criterion=torch.nn.MSELoss."
            )
        before = self.sigma_scaling_
        with unchanged_on_error(self):
            data = self._weighted(self._checked(X, y, reset=False), sample_weight)
            if len(data.y) < 2:
                raise ValueError(
                    f"{len(data.y)} row tells no scale. Pass a hundred or more."
                )
            self.sigma_scaling_ = np.ones_like(before)
            mean, variance = self._mean_and_variance(data.X)
            squares = (data.y - mean) ** 2 / variance
            scaling = np.sqrt(np.average(squares, axis=0, weights=data.sample_weight))
            if not (scaling > 0).all():
                raise ValueError(
                    "The targets equal the predictions, so that there is nothing to "
                    "scale to. Pass rows that were measured with noise."
                )
            self.sigma_scaling_ = scaling
        return self

    # ----------------------------------------------------------------- predict
    def _shaped(self, values: np.ndarray) -> np.ndarray:
        """Drop the axis of outputs, the second, where y had none."""
        return values[:, 0] if self._y_ndim == 1 else values

    def _likelihood(self) -> NumberLikelihood:
        return cast(NumberLikelihood, self._fitted_posterior().likelihood)

    def _noise(self) -> float:
        return float(self._fitted_posterior().hyperparameters.sigma_noise)

    def _mean_and_variance(self, X: Any) -> tuple[np.ndarray, np.ndarray]:
        """Mean and variance (n, t) of new targets, noise included."""
        likelihood = self._likelihood()
        mean, variance = self._latent(X)
        mean, variance = likelihood.moments(mean, variance, self._noise())
        return mean, variance * self.sigma_scaling_**2

    def predict(
        self, X: Any, return_std: bool = False, return_cov: bool = False
    ) -> Any:
        """Predictive mean, optionally with standard deviation or covariance.

        Parameters
        ----------
        X : array-like of shape (n, ...)
            Rows to predict.
        return_std : bool, default=False
            Also return standard deviations of new targets, noise included.
        return_cov : bool, default=False
            Also return their joint covariance across rows, noise included.

        Returns
        -------
        mean : ndarray of shape (n,) or (n, n_outputs)
        std : ndarray of the same shape
            Only with ``return_std``.
        cov : ndarray of shape (n, n) or (n, n, n_outputs)
            Only with ``return_cov``.

        Raises
        ------
        RuntimeError
            If both are asked for, as in scikit-learn's Gaussian processes.
        """
        if return_std and return_cov:
            raise RuntimeError(
                "return_std and return_cov cannot both be True. The diagonal of the "
                "covariance is the squared standard deviation."
            )
        if return_cov:
            mean, cov = self._joint(X)
            mean, cov = self._likelihood().joint_moments(mean, cov, self._noise())
            cov = cov * self.sigma_scaling_**2
            return self._shaped(mean), cov[..., 0] if self._y_ndim == 1 else cov
        mean, variance = self._mean_and_variance(X)
        if return_std:
            return self._shaped(mean), np.sqrt(self._shaped(variance))
        return self._shaped(mean)

    def predict_quantiles(self, X: Any, alpha: Any) -> np.ndarray:
        """Quantiles of the predictive distribution, noise included.

        Parameters
        ----------
        X : array-like of shape (n, ...)
            Rows to predict.
        alpha : float or array-like of shape (n_alpha,)
            Levels in (0, 1).

        Returns
        -------
        ndarray of shape (n,), (n, n_alpha) or with an axis of outputs after n
            The last axis is there if ``alpha`` has one.
        """
        levels = as_levels("alpha", alpha, "Choose a level, such as 0.95.")
        mean, variance = self._latent(X)
        arguments = mean, variance, self._noise(), levels
        values = self._likelihood().quantiles(*arguments)
        if (self.sigma_scaling_ != 1).any():
            scaling = self.sigma_scaling_[:, None]
            values = mean[..., None] + (values - mean[..., None]) * scaling
        values = self._shaped(values)
        return values if np.ndim(alpha) else values[..., 0]

    def predict_interval(self, X: Any, coverage: Any = 0.9) -> np.ndarray:
        """Central intervals that hold new targets with given probability.

        Parameters
        ----------
        X : array-like of shape (n, ...)
            Rows to predict.
        coverage : float or array-like of shape (n_levels,), default=0.9
            Probabilities in (0, 1).

        Returns
        -------
        ndarray of shape (n, 2) or (n, 2, n_levels)
            Lower and upper ends; an axis of outputs follows n where y has one.
        """
        levels = as_levels("coverage", coverage, "Choose a probability, such as 0.9.")
        tails = np.stack([(1 - levels) / 2, (1 + levels) / 2])  # (2, n_levels)
        values = self.predict_quantiles(X, tails.ravel())
        values = values.reshape(*values.shape[:-1], *tails.shape)
        return values if np.ndim(coverage) else values[..., 0]

    def sample_y(self, X: Any, n_samples: int = 1, random_state: Any = 0) -> np.ndarray:
        """Joint draws of new targets: each column is one function plus noise.

        Parameters
        ----------
        X : array-like of shape (n, ...)
            Rows to predict.
        n_samples : int, default=1
            Number of draws.
        random_state : int, RandomState or None, default=0
            Seeds the draws.

        Returns
        -------
        ndarray of shape (n, n_samples) or (n, n_outputs, n_samples)
        """
        outputs = self._sample_outputs(X, n_samples, random_state)
        generator = np.random.default_rng(as_seed("random_state", random_state))
        draws = self._likelihood().sample(outputs, self._noise(), generator)
        if (self.sigma_scaling_ != 1).any():
            mean = self._mean_and_variance(X)[0][..., None]
            draws = mean + (draws - mean) * self.sigma_scaling_[:, None]
        return self._shaped(draws)

    def latent_mean_and_variance(
        self, X: Any, full_cov: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """Mean and variance of the noise-free function.

        Parameters
        ----------
        X : array-like of shape (n, ...)
            Rows to predict.
        full_cov : bool, default=False
            Return the covariance between outputs, not their variances alone.

        Returns
        -------
        mean : ndarray of shape (n, n_outputs)
        variance : ndarray of shape (n, n_outputs) or (n, n_outputs, n_outputs)
        """
        mean, variance = self._moments(X, lambda m, v: (m, v), full_cov)
        return mean, variance

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        tags.target_tags.single_output = True
        return tags


def _geometric_mean(values: np.ndarray) -> float:
    return float(np.exp(np.log(values).mean()))


def _likelihood_of(net: Any) -> NumberLikelihood | None:
    """The likelihood that a net's criterion stands for; None for others."""
    criterion = getattr(net, "criterion", None)
    kind = criterion if isinstance(criterion, type) else type(criterion)
    likelihood, _ = CRITERIA.get(kind, (None, ""))
    is_known = isinstance(likelihood, LaplaceRegressor._likelihoods)
    return cast(NumberLikelihood, likelihood) if is_known else None


def _warn_of_unequal_scales(y: np.ndarray) -> None:
    """Warn of target columns whose spreads one noise level cannot serve."""
    spreads = y.std(axis=0) if y.dtype.kind in "fiub" else np.ones(1)
    spreads = spreads[spreads > 0]
    if len(spreads) > 1 and spreads.max() > 10 * spreads.min():
        warnings.warn(
            f"The columns of y have standard deviations from {spreads.min():.3g} to "
            f"{spreads.max():.3g}, but one noise level is shared by all of them. "
            "Divide each column of y by its standard deviation before fit, and "
            "multiply predictions and their deviations by it; or pass an array of "
            "sigma_noise.",
            UserWarning,
            stacklevel=2,
        )
