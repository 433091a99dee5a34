"""Callbacks that train a skorch net under a prior: `MarglikTraining`, `PriorTraining`.

`MarglikTraining` maximises the evidence over the prior precision and the noise during
training. `PriorTraining` uses the posterior of an earlier task as the prior.
"""

import math
import warnings
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from typing import Any, ClassVar

import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils._param_validation import validate_parameter_constraints
from skorch import NeuralNet
from torch import Tensor

from sklaplace.core.budget import move
from sklaplace.core.checks import warn_user
from sklaplace.core.linalg import plain
from sklaplace.curvature import priors
from sklaplace.curvature.accumulation import accumulate
from sklaplace.curvature.ggn import CURVATURES
from sklaplace.curvature.layout import Layout
from sklaplace.curvature.network import NetworkSpec
from sklaplace.curvature.subsets import SUBSETS
from sklaplace.estimators.fitting.untuned import at_weights, initial_hyperparameters
from sklaplace.estimators.options import laplace as options
from sklaplace.estimators.options.constraints import (
    COUNT,
    POSITIVE,
    POSITIVE_ARRAY,
    Constraints,
    Number,
    constraints_of,
    one_of,
    option,
)
from sklaplace.estimators.options.parameters import LaplaceParameters
from sklaplace.estimators.training.prior_callback import PriorCallback
from sklaplace.networks.outputs import unwrapped
from sklaplace.networks.trained import TrainedNetwork, device_of
from sklaplace.posterior.gaussian import GaussianPosterior, Hyperparameters
from sklaplace.posterior.tuning.evidence import marglik


@dataclass(frozen=True)
class _Best:
    """The epoch with the highest evidence so far."""

    value: float
    epoch: int
    hyperparameters: Hyperparameters
    state: dict[str, Any]


@dataclass(eq=False)
class MarglikTraining(PriorCallback):
    """Callback that maximises the evidence over prior precision and noise.

    The net is trained with a Gaussian prior over its weights. At the end of an epoch,
    the callback updates ``log prior_precision`` and ``log sigma_noise`` to increase the
    log marginal likelihood. After training, the network has the weights of the epoch
    with the highest evidence. Use this callback to replace hand-tuned weight decay, or
    to train on all samples without holding any out. See Notes for the cost.

    Read more in the :ref:`User Guide <training>`.

    Parameters
    ----------
    subset_of_weights : {"all", "last_layer", "trainable"} or list of str, \
            default="all"
        Weights with a prior. Weights that are not selected are trained without a prior.
    hessian_structure : {"kron", "diag", "full", "lowrank", "gp", "nystrom", \
            "variational"}, default="kron"
        Structure of the Hessian approximation. ``nystrom`` and ``variational`` require
        ``prior_structure="scalar"``.
    curvature : {"ggn", "ggn_mc", "ef", "identity"}, default="ggn"
        Approximation of the Hessian.
    prior_precision : float or array, default=1.0
        Initial prior precision.
    prior_structure : {"layerwise", "scalar", "diag"}, default="layerwise"
        One precision per parameter tensor, one for all weights, or one per weight (only
        for ``full``, ``lowrank`` and ``diag``).
    sigma_noise : float, default=1.0
        Initial standard deviation of the noise, in units of the targets. Only for the
        mean squared error.
    temperature : float, default=1.0
        Divisor of the log-likelihood.
    n_burnin : int, default=0
        Number of epochs before the first update.
    every : int, default=1
        Number of epochs from one update to the next.
    damping : float, default=0.5
        Fraction by which each step towards the maximum of the evidence is shortened on
        the log scale, because the weights have not yet converged under the new prior.

    Attributes
    ----------
    prior_precision_ : float or ndarray
        Prior precision of the epoch with the highest evidence.
    sigma_noise_ : float
        Standard deviation of the noise in the epoch with the highest evidence.
    log_marginal_likelihood_ : float
        Log marginal likelihood in the epoch with the highest evidence, in nats.
    best_epoch_ : int
        Epoch with the highest evidence, counted from one.
    precisions_ : dict of str to float
        Geometric mean of the prior precision over the entries of each parameter tensor.

    Raises
    ------
    ValueError, TypeError
        If a setting, the criterion or the optimizer is not supported. The error is
        raised before the first step.

    Warns
    -----
    UserWarning
        If the loss of the net's validation samples, if any, is higher after the
        training than before the first update. The comparison costs up to three passes
        over these samples.

    See Also
    --------
    sklaplace.LaplaceClassifier : Maximises the evidence after training with
        ``prior_precision="marglik"``.

    Notes
    -----
    Each update requires one pass over the training data, with k backpropagated columns
    per sample (k = c - 1 for c classes), and one decomposition of the Hessian
    approximation. The update runs in evaluation mode, and changes neither the network's
    buffers nor the global random state. The callback records
    ``log_marginal_likelihood`` in the net's history (nan in epochs without an update).
    ``train_loss`` in the history is the value of the criterion without the prior.
    Optimizers that compare loss values, such as L-BFGS with a line search, are not
    supported, because the loss does not contain the prior. Place callbacks that clip
    gradients after this one.

    References
    ----------
    Immer, Bauer, Fortuin, Rätsch, Khan (2021), "Scalable marginal likelihood
    estimation for model selection in deep learning", Algorithm 1. MacKay (1992), "A
    practical Bayesian framework for backpropagation networks".

    Examples
    --------
    >>> import torch
    >>> from sklearn.datasets import load_iris
    >>> from skorch import NeuralNetClassifier
    >>> from sklaplace import MarglikTraining
    >>> X, y = load_iris(return_X_y=True)
    >>> callback = MarglikTraining(prior_structure="scalar")
    >>> net = NeuralNetClassifier(
    ...     torch.nn.Linear, module__in_features=4, module__out_features=3,
    ...     criterion=torch.nn.CrossEntropyLoss, lr=0.1, max_epochs=5, verbose=0,
    ...     train_split=None, callbacks=[callback],
    ... ).fit(X.astype("float32"), y)
    >>> len(net.history[:, "log_marginal_likelihood"])
    5
    >>> bool(callback.prior_precision_ > 0)
    True
    """

    _advice: ClassVar[str] = (
        "Use hessian_structure='kron', subset_of_weights='last_layer', or weight decay "
        "instead of the callback, and tune the prior on held-out samples."
    )
    subset_of_weights: str | list[str] = "all"
    hessian_structure: str = "kron"
    curvature: str = "ggn"
    prior_precision: Any = option(1.0, POSITIVE_ARRAY)
    prior_structure: str = "layerwise"
    sigma_noise: float = option(1.0, POSITIVE)
    temperature: float = 1.0
    n_burnin: int = option(0, Number(Integral, 0, None, closed="left"))
    every: int = option(1, COUNT)
    damping: float = option(0.5, Number(Real, 0, 1, closed="left"))

    def _check_settings(self) -> None:
        """Raise an error for invalid parameters.

        The constraints are those of the estimators, with the changes for this class.
        """
        constraints: Constraints = {
            **constraints_of(LaplaceParameters),
            **constraints_of(type(self)),
            # fewer values than in the estimators: a subnetwork is selected after
            # training, and an exact Hessian can be indefinite during training
            "subset_of_weights": [one_of({*SUBSETS} - {"subnetwork"}), list, tuple],
            "curvature": [
                one_of({k for k, kind in CURVATURES.items() if not kind.is_exact})
            ],
        }
        validate_parameter_constraints(constraints, vars(self), type(self).__name__)
        # parameters that are valid one by one can be incompatible
        self._options.check_structure()
        options.check_subset(self.subset_of_weights, {})  # the callback has no options

    @property
    def _options(self) -> options.LaplaceOptions:
        """Options of the approximation: those of the callback, and default values."""
        names = {f.name for f in fields(options.LaplaceOptions)} & vars(self).keys()
        values: dict[str, Any] = {name: getattr(self, name) for name in names}
        values |= {name: {} for name in options.PARAMS}  # ``..._params``, all default
        # the training needs neither a refit of the last layer nor a residual variance
        return options.LaplaceOptions(**values, refine=False, residual="none")

    def _subset(self, net: NeuralNet) -> Any:
        return self.subset_of_weights

    def _begin(self, net: NeuralNet, spec: NetworkSpec, n_rows: int) -> Layout:
        """Start the state of a training, and return the layout of weights with a prior.

        ``n_rows`` is the number of training samples, on which the memory can depend.
        Raise an error for parameters that do not fit the network.
        """
        settings, layout = self._options, spec.layout
        network = TrainedNetwork(net, spec)
        options.check_prior_shape(self.prior_precision, self.prior_structure, layout)
        settings.check_bytes(spec, network.device, n_rows)
        self.hyperparameters_ = initial_hyperparameters(settings, network)
        self.epoch_ = 0
        self.best_: _Best | None = None
        return layout

    def _prior_gradient(self, theta: Tensor) -> Tensor:
        """Return the gradient (P,) of the negative log-prior."""
        h = self.hyperparameters_
        delta = priors.expand(h.prior_precision, self.training_.layout)
        return priors.Independent(delta, h.prior_mean).gradient(theta)

    def _loss_scale(self) -> Tensor:
        """Return the factor of the loss in the negative log-posterior, ()."""
        h = self.hyperparameters_
        return self.training_.spec.likelihood.scale(h.sigma_noise) / h.temperature

    def on_epoch_end(self, net: NeuralNet, **kw: object) -> None:
        """Update the hyperparameters if an update is due, and store the best epoch.

        The best epoch has the highest evidence. Its weights are loaded at the end. An
        update is due in the first epoch after ``n_burnin``, and then in each
        ``every``-th epoch.
        """
        self.epoch_ += 1
        n_since_first_update = self.epoch_ - self.n_burnin - 1
        if n_since_first_update < 0 or n_since_first_update % self.every:
            net.history.record("log_marginal_likelihood", float("nan"))
            return
        # `on_train_end` of the base class compares them with the losses after training
        if n_since_first_update == 0:
            self.before_ = self._held_out_losses(net)
        posterior = self._updated(self._posterior(net))
        value = float(posterior.log_marginal_likelihood())
        self.hyperparameters_ = h = posterior.hyperparameters
        # the evidence is that of this epoch's weights under the updated prior
        is_best = self.best_ is None or value > self.best_.value
        if is_best:
            state = {k: v.clone() for k, v in net.module_.state_dict().items()}
            self.best_ = _Best(value, self.epoch_, h, state)
        net.history.record("log_marginal_likelihood", value)
        # skorch's printed log and checkpoints use the suffix "_best"
        net.history.record("log_marginal_likelihood_best", is_best)

    def on_train_end(
        self, net: NeuralNet, X: Any = None, y: Any = None, **kw: object
    ) -> None:
        """Load the weights of the epoch with the highest evidence into the module.

        Set the fitted attributes from this epoch. Without any update, warn, and keep
        the final weights and the initial hyperparameters.
        """
        best = self.best_
        if best is None:
            warn_user(
                f"The training ended after {self.epoch_} epochs, before the evidence "
                "was maximised. Train longer, or lower n_burnin."
            )
            state, h = net.module_.state_dict(), self.hyperparameters_
            best = _Best(float("nan"), self.epoch_, h, state)
        net.module_.load_state_dict(best.state)
        self.log_marginal_likelihood_, self.best_epoch_ = best.value, best.epoch
        self.prior_precision_ = plain(best.hyperparameters.prior_precision)
        self.sigma_noise_ = plain(best.hyperparameters.sigma_noise)
        layout = self.training_.layout
        # one precision per weight, grouped by parameter tensor
        logs = priors.expand(best.hyperparameters.prior_precision, layout).log()
        logs_of_blocks = zip(layout.blocks, layout.split(logs), strict=True)
        self.precisions_ = {b.name: math.exp(log.mean()) for b, log in logs_of_blocks}
        # last, because it deletes the state of the training
        super().on_train_end(net, X=X, y=y, **kw)

    def _posterior(self, net: NeuralNet) -> GaussianPosterior:
        """Return the posterior at the current weights and hyperparameters.

        The curvature and the loss are summed in one pass over the training data. The
        sums are decomposed once, so that any prior can be evaluated.
        """
        spec, settings = self.training_.spec, self._options
        network, curvature = TrainedNetwork(net, spec), settings.configured_curvature
        sums = accumulate(
            network,
            [self.training_.dataset],
            curvature,
            settings.accumulator(spec.layout),
            batch_size=spec.batch_size(row_elements=settings.row_elements(spec)),
        )
        structure, h = sums.accumulator.decompose(), self.hyperparameters_
        return at_weights(network, structure, sums.data_fit, h, curvature.order)

    def _updated(self, posterior: GaussianPosterior) -> GaussianPosterior:
        """Return the posterior after a damped log-scale step towards the maximum.

        The maximum is that of the evidence over prior precision and noise.
        """
        # a rough optimum is enough: the weights change in the next epoch
        with warnings.catch_warnings(action="ignore", category=ConvergenceWarning):
            best = marglik(posterior).hyperparameters
        current = posterior.hyperparameters

        def damped(name: str) -> Tensor:
            """Return the value between the optimum (damping 0) and the current one."""
            optimum: Tensor = getattr(best, name).log()
            return optimum.lerp(getattr(current, name).log(), self.damping).exp()

        return posterior.replace(
            prior_precision=damped("prior_precision"), sigma_noise=damped("sigma_noise")
        )


@dataclass(eq=False)
class PriorTraining(PriorCallback):
    """Callback that trains a net with an earlier task's posterior as its prior.

    Training starts at the mean of the earlier posterior. The callback adds the gradient
    of the negative log-prior to the gradient of every batch. Use this callback for a
    new task if the data of earlier tasks are no longer available (continual learning).
    `sklaplace.LaplaceClassifier` and `sklaplace.LaplaceRegressor` accept the same
    posterior as ``prior=``, and compute the posterior for the next task.

    Read more in the :ref:`User Guide <prior-task>`.

    Parameters
    ----------
    prior : GaussianPosterior
        ``posterior_`` of an estimator fitted to the earlier task, whose network has the
        same layers. Weights outside the posterior are trained without a prior, which
        can harm predictions for the earlier task. Fit the earlier estimator with
        ``subset_of_weights="all"``.
    sigma_noise : float or None, default=None
        Standard deviation of the noise, for the mean squared error. If None, use the
        noise of the earlier task.
    temperature : float, default=1.0
        Divisor of the log-likelihood of the new data. Values above one give the prior
        more weight.

    Raises
    ------
    ValueError, TypeError
        If the network lacks weights of the posterior, or if a setting, the criterion or
        the optimizer is not supported. The error is raised before the first step.

    Warns
    -----
    UserWarning
        If the loss of the net's validation samples, if any, is higher after the
        training than before. The comparison costs two passes over these samples.

    See Also
    --------
    MarglikTraining : Tunes an isotropic or diagonal prior during training.

    Notes
    -----
    Each training step multiplies a vector by the earlier posterior precision. This
    product costs O(P²) for ``full``, a few products with the Kronecker factors for
    ``kron``, and O(P) for ``diag``. No (P, P) matrix is formed. ``diag`` corresponds to
    elastic weight consolidation (Kirkpatrick et al.) with one penalty for all earlier
    tasks (Huszár). The negative log-prior has the curvature of the loss summed over all
    earlier samples, so plain gradient descent requires smaller steps. Optimizers that
    compare loss values are not supported.

    References
    ----------
    Kirkpatrick et al. (2017), "Overcoming catastrophic forgetting in neural networks".
    Ritter, Botev, Barber (2018), "Online structured Laplace approximations for
    overcoming catastrophic forgetting". Huszár (2018), "Note on the quadratic penalties
    in elastic weight consolidation".

    Examples
    --------
    >>> import torch
    >>> from sklearn.datasets import load_iris
    >>> from skorch import NeuralNetClassifier
    >>> from sklaplace import LaplaceClassifier, PriorTraining
    >>> X, y = load_iris(return_X_y=True)
    >>> X = (X - X.mean(axis=0)) / X.std(axis=0)
    >>> net = NeuralNetClassifier(
    ...     torch.nn.Linear,
    ...     module__in_features=4,
    ...     module__out_features=3,
    ...     criterion=torch.nn.CrossEntropyLoss,
    ...     lr=0.1,
    ...     max_epochs=50,
    ...     verbose=0,
    ...     train_split=None,
    ... )
    >>> first = LaplaceClassifier(net, prior_precision=1.0, random_state=0)
    >>> earlier = first.fit(X[::2], y[::2]).posterior_
    >>> net = net.set_params(callbacks=[PriorTraining(earlier)])
    >>> second = LaplaceClassifier(net, prior=earlier, random_state=0)
    >>> bool(second.fit(X[1::2], y[1::2]).score(X, y) > 0.8)
    True
    """

    _advice: ClassVar[str] = (
        "Train longer, or use a lower temperature, which gives the data more weight."
    )

    prior: Any
    sigma_noise: float | None = None
    temperature: float = 1.0

    def _check_settings(self) -> None:
        """Raise an error for invalid parameters."""
        constraints: Constraints = {
            "prior": [GaussianPosterior],
            "sigma_noise": [POSITIVE, None],
            "temperature": [POSITIVE],
        }
        validate_parameter_constraints(constraints, vars(self), type(self).__name__)

    def _subset(self, net: NeuralNet) -> Any:
        """Return the names of the weights that the earlier posterior covers.

        Raise ValueError if the network lacks them, or has them in other shapes.
        """
        # blocks of a layout are parameter tensors: give those of the earlier layout the
        # shapes of the network's parameters, and compare both layouts
        named, layout = unwrapped(net.module_).named_parameters(), self.prior.layout
        shapes = {name: tuple(parameter.shape) for name, parameter in named}
        present = [block for block in layout.blocks if block.name in shapes]
        # a name that the network lacks shortens the layout, so the comparison fails
        blocks = tuple(replace(block, shape=shapes[block.name]) for block in present)
        options.check_earlier_layout(self.prior, replace(layout, blocks=blocks))
        return [block.name for block in layout.blocks]

    def _begin(self, net: NeuralNet, spec: NetworkSpec, n_rows: int) -> Layout:
        """Start at the earlier mean, and return the layout of its weights."""
        self.earlier_ = move(self.prior.as_prior(), device_of(net))
        layout = self.earlier_.layout
        layout.write(self.earlier_.mean, unwrapped(net.module_))  # in place
        return layout

    def _prior_gradient(self, theta: Tensor) -> Tensor:
        return self.earlier_.gradient(theta)

    def _loss_scale(self) -> Tensor:
        """Return the factor of the loss in the negative log-posterior, ().

        Without ``sigma_noise``, the noise is that of the earlier posterior.
        """
        sigma, mean = self.sigma_noise, self.earlier_.mean
        noise = self.prior.hyperparameters.sigma_noise if sigma is None else sigma
        noise = torch.as_tensor(noise, dtype=torch.float64, device=mean.device)
        return self.training_.spec.likelihood.scale(noise) / self.temperature
