"""VariationalClassifier and VariationalRegressor: posteriors that are learned.

Bayes by Backprop: in place of weights, a distribution of each weight is trained, by
gradients of the evidence lower bound.
"""

from typing import Any

import numpy as np

from sklaplace.estimators.backprop import BaseVariational
from sklaplace.estimators.columns import geometric_mean
from sklaplace.estimators.outputs import TrainedNetwork
from sklaplace.estimators.sampling import NoiseFromRows
from sklaplace.estimators.simplex import SimplexPredictor


class VariationalClassifier(SimplexPredictor, BaseVariational):
    """Class probabilities from a skorch net whose weights are distributions.

    Bayes by Backprop: the posterior is learned, not expanded around trained weights.
    Prefer `LaplaceClassifier` for a network that is trained already; this one where the
    distribution of the weights itself is of interest, or for comparison.

    Parameters
    ----------
    estimator : skorch net, FrozenEstimator or None, default=None
        The network. A skorch net is cloned, and its module's initialisation is where
        the distributions start; around a trained net, a
        ``sklearn.frozen.FrozenEstimator`` makes them start at its weights. None makes
        a small network that suits tables.
    likelihood : object or None, default=None
        Of the targets given the outputs, where the criterion is none of those that are
        known; see `sklaplace.likelihoods`. None takes that of the criterion.
    posterior : {"gaussian", "kumaraswamy", "quantile", "density"}, default="gaussian"
        Family of the distribution of each weight; all but the first are experimental.
    prior : {"gaussian", "scale_mixture", "uniform"}, default="gaussian"
        Distribution of each weight before the data.
    prior_scale : float, default=1.0
        Standard deviation of the prior, of its wide part for ``scale_mixture``.
    prior_params : dict, default=None
        Options of the prior. ``scale_mixture`` takes ``weight`` (0.5), the share of the
        wide part, and ``narrow`` (exp(-6)), the standard deviation of the narrow one.
    kl_weight : float, default=0.1
        Factor of the divergence from the prior. One is the Bayesian objective, which
        underfits where rows are few for the weights; below one the posterior is
        sharper than Bayes' rule says. ``elbo_`` is always that of one.
    kl_schedule : {"uniform", "blundell"}, default="uniform"
        How the divergence is shared among the batches of an epoch: equally, or half of
        it with the first, a quarter with the second, and so on.
    bound : float, default=3.0
        Largest magnitude of weights under ``posterior="kumaraswamy"`` and
        ``prior="uniform"``.
    class_weight : dict, "balanced" or None, default=None
        Weights of the classes, by label, which multiply ``sample_weight``:
        ``"balanced"`` gives all classes the same in total.
    dirichlet_approx : {"projection", "bridge", "bridge_norm", \
            "bridge_norm_published"}, default="projection"
        How the Gaussian of the drawn logits becomes a Dirichlet distribution.
    n_samples : int, default=100
        Draws of the weights that predictions are averaged over; the same in each call.
    batch_size : int or None, default=None
        Rows per batch for prediction; None fits them into a fixed memory budget.
        Results do not depend on it. The net has its own for training.
    random_state : int, RandomState or None, default=None
        Seeds initialisation, training and draws. None differs every time. The global
        generators are never touched.
    verbose : int, default=0
        Print one line after fitting if positive.

    Attributes
    ----------
    estimator_ : skorch net
        The net, its weights at the medians of their distributions. Its history has
        ``kl`` and ``elbo`` of each epoch.
    posterior_ : VariationalPosterior
        The distributions.
    elbo_ : float
        Evidence lower bound of the training rows in nats, the divergence with weight
        one: averaged over up to 20 draws.
    kl_ : float
        The divergence from the prior, in nats: exact for ``"gaussian"`` and
        ``"kumaraswamy"`` under priors other than the mixture, else by the same draws.
    classes_ : ndarray of shape (K,)
        Class labels; for a matrix of labels the numbers of its columns.
    n_features_in_ : int
        Number of features (of the second axis), for array input.
    feature_names_in_ : ndarray of str
        Column names, for data frames with string columns.
    n_iter_ : int
        Epochs the network was trained for.

    See Also
    --------
    VariationalRegressor : The same for numbers.
    LaplaceClassifier : A posterior around trained weights.

    Notes
    -----
    Every parameter that requires gradients has a distribution, independent of all
    others; others, and buffers, are not random. skorch's training loop runs as it is,
    with its callbacks, validation and device; ``train_loss`` in the history is the
    objective in nats per row, ``valid_loss`` the loss at the medians. Losses are those
    of the likelihood that belongs to the criterion.

    A step of training takes as long as that of the network, and up to several times as
    long where weights are many for the work on a batch; and distributions need more
    epochs until they stand still. Prediction takes ``n_samples`` forward passes. A
    Laplace approximation trains and predicts faster, around a network that is there
    already; the guide's comparison says who wins where.

    References
    ----------
    Blundell, Cornebise, Kavukcuoglu and Wierstra (2015), "Weight uncertainty in neural
    networks". Graves (2011), "Practical variational inference for neural networks".
    Wenzel et al. (2020), "How good is the Bayes posterior in deep neural networks
    really?", on weights of the divergence below one.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from sklaplace import VariationalClassifier
    >>> X, y = load_iris(return_X_y=True)
    >>> model = VariationalClassifier(random_state=0).fit(X, y)
    >>> model.predict_proba(X[:2]).shape
    (2, 3)
    >>> bool(model.score(X, y) > 0.9)
    True
    """

    def __init__(
        self,
        estimator: Any = None,
        *,
        likelihood: Any = None,
        posterior: str = "gaussian",
        prior: str = "gaussian",
        prior_scale: float = 1.0,
        prior_params: dict[str, Any] | None = None,
        kl_weight: float = 0.1,
        kl_schedule: str = "uniform",
        bound: float = 3.0,
        class_weight: dict[Any, float] | str | None = None,
        dirichlet_approx: str = "projection",
        n_samples: int = 100,
        batch_size: int | None = None,
        random_state: Any = None,
        verbose: int = 0,
    ) -> None:
        self.estimator = estimator
        self.likelihood = likelihood
        self.posterior = posterior
        self.prior = prior
        self.prior_scale = prior_scale
        self.prior_params = prior_params
        self.kl_weight = kl_weight
        self.kl_schedule = kl_schedule
        self.bound = bound
        self.class_weight = class_weight
        self.dirichlet_approx = dirichlet_approx
        self.n_samples = n_samples
        self.batch_size = batch_size
        self.random_state = random_state
        self.verbose = verbose

    def _check_parameters(self) -> None:
        super()._check_parameters()
        self._check_dirichlet()

    def _check_loss(self, loss: float) -> None:
        self._warn_if_guessing(loss)


class VariationalRegressor(NoiseFromRows, BaseVariational):
    """Predictions with bands from a skorch net whose weights are distributions.

    Bayes by Backprop: the posterior is learned, and the noise found on the way. Prefer
    `LaplaceRegressor` for a network that is trained already.

    Parameters
    ----------
    estimator : skorch net, FrozenEstimator or None, default=None
        The network. A skorch net is cloned, and its module's initialisation is where
        the distributions start; around a trained net, a
        ``sklearn.frozen.FrozenEstimator`` makes them start at its weights. None makes
        a small network that suits tables.
    likelihood : object or None, default=None
        Of the targets given the outputs, where the criterion is none of those that are
        known; see `sklaplace.likelihoods`. None takes that of the criterion.
    posterior : {"gaussian", "kumaraswamy", "quantile", "density"}, default="gaussian"
        Family of the distribution of each weight; all but the first are experimental.
    prior : {"gaussian", "scale_mixture", "uniform"}, default="gaussian"
        Distribution of each weight before the data.
    prior_scale : float, default=1.0
        Standard deviation of the prior, of its wide part for ``scale_mixture``.
    prior_params : dict, default=None
        Options of the prior. ``scale_mixture`` takes ``weight`` (0.5), the share of the
        wide part, and ``narrow`` (exp(-6)), the standard deviation of the narrow one.
    kl_weight : float, default=0.1
        Factor of the divergence from the prior. One is the Bayesian objective, which
        underfits where rows are few for the weights; below one the posterior is
        sharper than Bayes' rule says. ``elbo_`` is always that of one.
    kl_schedule : {"uniform", "blundell"}, default="uniform"
        How the divergence is shared among the batches of an epoch: equally, or half of
        it with the first, a quarter with the second, and so on.
    bound : float, default=3.0
        Largest magnitude of weights under ``posterior="kumaraswamy"`` and
        ``prior="uniform"``.
    sigma_noise : float, array or {"auto", "learned"}, default="auto"
        Standard deviation of the observation noise, one for all outputs; only for nets
        with ``MSELoss``, whose criterion leaves it open. An array has one for each
        column of ``y``. ``"learned"`` is the one that maximises the objective,
        ``"auto"`` is that of held-out rows, in training and afterwards: of ``X_val``,
        else of the net's ``train_split``, else of ``validation_fraction``; and
        ``"learned"`` without such rows.
    validation_fraction : float, default=0.2
        Share of rows to hold out for the noise, from a net that starts anew and holds
        nothing out itself, if there are at least 50 distinct rows.
    n_samples : int, default=100
        Draws of the weights that predictions are averaged over; the same in each call.
    batch_size : int or None, default=None
        Rows per batch for prediction; None fits them into a fixed memory budget.
        Results do not depend on it. The net has its own for training.
    random_state : int, RandomState or None, default=None
        Seeds initialisation, training and draws. None differs every time. The global
        generators are never touched.
    verbose : int, default=0
        Print one line after fitting if positive.

    Attributes
    ----------
    estimator_ : skorch net
        The net, its weights at the medians of their distributions. Its history has
        ``kl`` and ``elbo`` of each epoch.
    posterior_ : VariationalPosterior
        The distributions.
    elbo_ : float
        Evidence lower bound of the training rows in nats, the divergence with weight
        one: averaged over up to 20 draws, under the noise found in training.
    kl_ : float
        The divergence from the prior, in nats: exact for ``"gaussian"`` and
        ``"kumaraswamy"`` under priors other than the mixture, else by the same draws.
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

    See Also
    --------
    VariationalClassifier : The same for classes.
    LaplaceRegressor : A posterior around trained weights.

    Notes
    -----
    Every parameter that requires gradients has a distribution, independent of all
    others; others, and buffers, are not random. skorch's training loop runs as it is,
    with its callbacks, validation and device; ``train_loss`` in the history is the
    objective in nats per row, ``valid_loss`` the loss at the medians. Losses are those
    of the likelihood that belongs to the criterion.

    A step of training takes as long as that of the network, and up to several times as
    long where weights are many for the work on a batch; and distributions need more
    epochs until they stand still. Prediction takes ``n_samples`` forward passes. A
    Laplace approximation trains and predicts faster, around a network that is there
    already; the guide's comparison says who wins where.

    References
    ----------
    Blundell, Cornebise, Kavukcuoglu and Wierstra (2015), "Weight uncertainty in neural
    networks". Graves (2011), "Practical variational inference for neural networks".
    Wenzel et al. (2020), "How good is the Bayes posterior in deep neural networks
    really?", on weights of the divergence below one.

    Examples
    --------
    >>> from sklearn.datasets import load_diabetes
    >>> from sklaplace import VariationalRegressor
    >>> X, y = load_diabetes(return_X_y=True)
    >>> model = VariationalRegressor(random_state=0).fit(X, y)
    >>> mean, std = model.predict(X[:2], return_std=True)
    >>> mean.shape, std.shape
    ((2,), (2,))
    """

    _noise_names = ("auto", "learned")

    def __init__(
        self,
        estimator: Any = None,
        *,
        likelihood: Any = None,
        posterior: str = "gaussian",
        prior: str = "gaussian",
        prior_scale: float = 1.0,
        prior_params: dict[str, Any] | None = None,
        kl_weight: float = 0.1,
        kl_schedule: str = "uniform",
        bound: float = 3.0,
        sigma_noise: Any = "auto",
        validation_fraction: float = 0.2,
        n_samples: int = 100,
        batch_size: int | None = None,
        random_state: Any = None,
        verbose: int = 0,
    ) -> None:
        self.estimator = estimator
        self.likelihood = likelihood
        self.posterior = posterior
        self.prior = prior
        self.prior_scale = prior_scale
        self.prior_params = prior_params
        self.kl_weight = kl_weight
        self.kl_schedule = kl_schedule
        self.bound = bound
        self.sigma_noise = sigma_noise
        self.validation_fraction = validation_fraction
        self.n_samples = n_samples
        self.batch_size = batch_size
        self.random_state = random_state
        self.verbose = verbose

    def _tunes_on_rows(self) -> bool:
        return super()._tunes_on_rows() and self.sigma_noise == "auto"

    def _sigma(self) -> float | None:
        if isinstance(self.sigma_noise, str):
            return None
        return geometric_mean(np.atleast_1d(self.sigma_noise))

    def _chosen_noise(self, fitted: TrainedNetwork) -> float:
        if self.sigma_noise == "auto" and fitted.held_out is not None:
            return super()._chosen_noise(fitted)
        return self._noise_in_training
