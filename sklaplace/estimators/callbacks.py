"""Callbacks: the prior as a part of the training of a skorch net.

A criterion is a loss without a prior. Here the gradient of
``½ (θ - μ₀)ᵀ P₀ (θ - μ₀)`` is added to that of every batch, in the unit of the
criterion, so that the weights end where the Laplace approximation expects them: at a
maximum of the posterior.
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from skorch.callbacks import Callback
from skorch.dataset import unpack_data
from torch import Tensor, nn
from torch.utils.data import Subset

from sklaplace.core.budget import move
from sklaplace.core.checks import check_count, check_option, check_positive, check_share
from sklaplace.curvature import priors
from sklaplace.curvature.ggn import CURVATURES, accumulate
from sklaplace.curvature.layout import Layout
from sklaplace.curvature.network import NetworkSpec, infer_network_spec
from sklaplace.curvature.priors import PRIOR_STRUCTURES
from sklaplace.curvature.structures import STRUCTURES
from sklaplace.curvature.subsets import SUBSETS
from sklaplace.estimators.base import plain
from sklaplace.estimators.outputs import device_of
from sklaplace.estimators.settings import (
    check_earlier_layout,
    check_layout,
    check_posterior,
    check_prior_structure,
    check_subset,
)
from sklaplace.likelihoods import CRITERIA, weighted
from sklaplace.networks.data import Batches, first_rows
from sklaplace.networks.outputs import as_forward, raw_outputs, unwrapped
from sklaplace.networks.training import batch_weights, private_rng
from sklaplace.posterior.gaussian import GaussianPosterior, Hyperparameters
from sklaplace.posterior.tuning.evidence import marglik

_LIKELIHOODS = tuple({type(likelihood) for likelihood, _ in CRITERIA.values()})


# ------------------------------------------------------------ unit of the criterion
def criterion_unit(net: Any, inspected: NetworkSpec, y: Any, n_rows: int) -> Tensor:
    """What a criterion makes of one nat per unit of `Likelihood.scale`, ().

    The criterion of a batch is ``u · Σ w · loss`` plus what ignores outputs. A batch
    of b rows stands for all N, so that the criterion's estimate for all of them is
    ``unit · Σ w · loss`` with ``unit = u b / N``.

    Parameters
    ----------
    net : skorch.NeuralNet
        In training; its ``get_loss`` is asked.
    inspected : NetworkSpec
        The same net as the Laplace part sees it.
    y : Tensor
        Targets of a batch, as the criterion takes them.
    n_rows : int
        Number N of training rows.

    Notes
    -----
    ``u`` is what the gradient of the criterion in the outputs is times that of the
    likelihood, at any outputs: ``1/b`` for cross-entropies, ``2/(b c)`` for the mean
    squared error of c columns, whatever reduction, class and sample weights say.
    """
    n = len(y)
    dtype = next(net.module_.parameters()).dtype
    with torch.enable_grad():
        # anywhere but at the targets, where gradients vanish
        f = torch.full((n, inspected.n_outputs), 0.37, dtype=dtype, device=y.device)
        f = (f + torch.linspace(0, 1, f.shape[1]).to(f)).requires_grad_()
        loss = net.get_loss(_as_module(inspected, f, y), y, training=True)
        (found,) = torch.autograd.grad(loss, f)
    expected = _gradient(inspected, f.detach().double(), y, batch_weights(net))
    square = (expected**2).sum()
    ratio = (found.double() * expected).sum() / square
    # a batch whose targets all weigh nothing tells no unit, and takes no step
    return torch.where(square > 0, ratio, torch.zeros_like(ratio)) * (n / n_rows)


def _gradient(
    inspected: NetworkSpec, f: Tensor, y: Tensor, weights: Tensor | None
) -> Tensor:
    """Gradient of ``Σ w · loss`` in the outputs, (b, c)."""
    likelihood = inspected.likelihood
    targets = likelihood.targets(y, f)
    gradient = likelihood.gradient(f, targets)
    w = weighted(likelihood, targets, None if weights is None else weights.to(f))
    return gradient if w is None else gradient * w.unsqueeze(-1)


def _as_module(inspected: NetworkSpec, f: Tensor, y: Tensor) -> Tensor:
    """Outputs (b, c) as the module would return them."""
    if inspected.output_map != "identity" or inspected.logit_layer is not None:
        f = f.softmax(-1) if f.shape[1] > 1 else f.sigmoid()
    is_like_targets = y.is_floating_point() and y.numel() == f.numel()
    return f.reshape(y.shape) if is_like_targets else f


def add_to_gradients(layout: Layout, module: nn.Module, values: Tensor) -> None:
    """Add ``values`` (P,) to the gradients of the selected weights, in place.

    Parameters that are not trained stay without.
    """
    own = dict(module.named_parameters())
    for block, piece in zip(layout.blocks, layout.split(values), strict=True):
        parameter = own[block.name]
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        flat = piece.to(parameter)
        if block.indices is not None:
            places = block.indices.to(flat.device)
            flat = flat.new_zeros(parameter.numel()).index_put((places,), flat)
        parameter.grad += flat.reshape(parameter.shape)


# ----------------------------------------------------------------- shared machinery
@dataclass
class _Running:
    """What is known once the training has begun.

    Attributes
    ----------
    inspected : NetworkSpec
        The net as the Laplace part sees it.
    layout : Layout
        The weights that have the prior.
    rows : Dataset
        Those that it is trained on.
    """

    inspected: NetworkSpec
    layout: Layout
    rows: Any


class PriorCallback(Callback, ABC):  # type: ignore[misc]
    """Adds the gradient of a Gaussian prior to every batch; not for direct use."""

    def on_train_begin(self, net: Any, X: Any = None, y: Any = None, **kw: Any) -> None:
        """Refuse settings that cannot be right; forget an earlier training."""
        for name in [name for name in vars(self) if name.endswith("_")]:
            delattr(self, name)
        self._check_settings()

    def on_epoch_begin(
        self, net: Any, dataset_train: Any = None, dataset_valid: Any = None, **kw: Any
    ) -> None:
        """Before the first step: find out what the network means."""
        if hasattr(self, "running_"):
            return
        with private_rng(None, device_of(net)):
            x, subset = first_rows(net, dataset_train), self._subset(net)
            adapted = partial(_adapted, raw_outputs(net, x))
            options: dict[str, Any] = {"is_trained": False, "adapted": adapted}
            inspected = infer_network_spec(
                net, x, subset, _LIKELIHOODS, None, **options
            )
            _check_labels(net, dataset_train, inspected)
            layout = self._begin(net, inspected, len(dataset_train))
            _check_optimizer(net, layout)
            _check_single(net, layout)
        self.running_ = _Running(inspected, layout, dataset_train)

    def on_grad_computed(
        self, net: Any, named_parameters: Any, batch: Any = None, **kw: Any
    ) -> None:
        """Add the prior's gradient to that of the criterion."""
        running, module = self.running_, unwrapped(net.module_)
        _, y = unpack_data(batch)
        y = torch.as_tensor(y, device=device_of(net))
        unit = criterion_unit(net, running.inspected, y, len(running.rows))
        slope = self._prior_gradient(running.layout.read(module))
        add_to_gradients(running.layout, module, unit / self._loss_scale() * slope)

    def on_train_end(self, net: Any, X: Any = None, y: Any = None, **kw: Any) -> None:
        """Forget what belongs to the training only."""
        self.__dict__.pop("running_", None)

    @abstractmethod
    def _check_settings(self) -> None:
        """Refuse settings that cannot be right."""

    @abstractmethod
    def _subset(self, net: Any) -> Any:
        """Weights that have the prior, as `infer_network_spec` takes them."""

    @abstractmethod
    def _begin(self, net: Any, inspected: NetworkSpec, n_rows: int) -> Layout:
        """Get ready for the first step; the weights that have the prior."""

    @abstractmethod
    def _prior_gradient(self, theta: Tensor) -> Tensor:
        """``P₀ (θ - μ₀)``, (P,)."""

    @abstractmethod
    def _loss_scale(self) -> Tensor:
        """Factor of the loss in the negative log-posterior, ()."""


def _adapted(raw: Tensor, likelihood: Any) -> Any:
    """The likelihood for as many outputs as the module gives."""
    if raw.ndim > 2:
        raise ValueError(
            f"The network gives maps, of shape {tuple(raw.shape[1:])} per row, which "
            "cannot be trained under a prior here. Train it without the callback, and "
            "tune the prior afterwards, in LaplaceClassifier."
        )
    has_columns = raw.ndim == 2 and raw.shape[1] > 1
    is_of_one = likelihood.noun == "class" and not likelihood.is_shift_invariant
    return likelihood.of_labels() if has_columns and is_of_one else likelihood


def _check_labels(net: Any, rows: Any, inspected: NetworkSpec) -> None:
    """Refuse rows that the criterion ignores, and the curvature would not."""
    if inspected.likelihood.noun != "class":
        return
    batches = Batches(net, rows, inspected.batch_size())
    if any(bool((torch.as_tensor(y) < 0).any()) for y in _targets(rows, batches)):
        raise ValueError(
            "Some labels are negative, as of rows that the criterion ignores. Leave "
            "these rows out, or train the net within LaplaceClassifier, which does."
        )


def _targets(rows: Any, batches: Batches) -> Iterator[Any]:
    """Targets of a dataset; its rows are not read where it has them as an array."""
    picked = np.arange(len(rows))
    while isinstance(rows, Subset):
        rows, picked = rows.dataset, np.asarray(rows.indices)[picked]
    y = getattr(rows, "y", None)
    if isinstance(y, np.ndarray):
        yield y[picked]
    else:
        yield from (y for _, y, _ in batches)


def _check_single(net: Any, layout: Layout) -> None:
    """Refuse a second callback with a prior over the same weights."""
    for _, other in net.callbacks_:
        running = vars(other).get("running_")
        if isinstance(running, _Running) and _overlap(layout, running.layout):
            raise ValueError(
                f"{type(other).__name__} among the callbacks has a prior over the same "
                "weights already. Weights have one: leave one of the callbacks out, or "
                "select other weights."
            )


def _overlap(one: Layout, other: Layout) -> bool:
    """Whether two layouts have a weight in common."""
    known = {block.name: block.indices for block in other.blocks}
    for block in one.blocks:
        if block.name not in known:
            continue
        indices = known[block.name]
        if block.indices is None or indices is None:
            return True
        if bool(torch.isin(block.indices, indices).any()):
            return True
    return False


def _check_optimizer(net: Any, layout: Layout) -> None:
    """Refuse a second prior over the same weights, and steps by losses without one."""
    own = dict(unwrapped(net.module_).named_parameters())
    selected = {id(own[block.name]) for block in layout.blocks}
    for group in net.optimizer_.param_groups:
        if group.get("line_search_fn"):
            raise ValueError(
                f"The optimizer has line_search_fn={group['line_search_fn']!r}, which "
                "compares losses without the prior. Set optimizer__line_search_fn=None."
            )
        decay = group.get("weight_decay", 0)
        if decay and selected & {id(p) for p in group["params"]}:
            raise ValueError(
                f"The optimizer has weight_decay={decay}, a second prior beside that "
                "of the callback. Set optimizer__weight_decay=0."
            )


# ------------------------------------------------------------- evidence in training
class MarglikTraining(PriorCallback):
    """Chooses prior precision and noise by the evidence, while the net is trained.

    The net is trained under its prior, and the prior follows the network: at the end
    of an epoch the marginal likelihood is raised in ``log prior_precision`` and
    ``log sigma_noise``. In the end the network has the weights of the epoch with the
    highest evidence. Prefer it to weight decay chosen by hand, and where all rows
    are wanted for training; see Notes for its cost.

    Parameters
    ----------
    subset_of_weights : {"all", "last_layer", "trainable"} or list of str, \
            default="all"
        Weights that have the prior; all others are trained without one.
    hessian_structure : {"kron", "diag", "full", "lowrank", "gp", "nystrom", \
            "variational"}, default="kron"
        Part of the curvature that is kept; ``nystrom`` and ``variational`` with
        ``prior_structure="scalar"`` only.
    curvature : {"ggn", "ggn_mc", "ef"}, default="ggn"
        Approximation of the Hessian.
    prior_precision : float or array, default=1.0
        Where the prior precision starts.
    prior_structure : {"layerwise", "scalar", "diag"}, default="layerwise"
        One precision per parameter tensor, one for all, or one per weight (not for
        ``kron``).
    sigma_noise : float, default=1.0
        Where the standard deviation of the noise starts, in units of the targets;
        for the mean squared error only.
    temperature : float, default=1.0
        Divides the log-likelihood.
    n_burnin : int, default=0
        Epochs before the first update.
    every : int, default=1
        Epochs from one update to the next.
    damping : float, default=0.5
        Share of the step to the maximum, in logarithms, that is not taken: the
        maximum belongs to weights that are yet to follow.

    Attributes
    ----------
    prior_precision_ : float or ndarray
        Of the epoch with the highest evidence.
    sigma_noise_ : float
        Likewise.
    log_marginal_likelihood_ : float
        Its evidence, in nats.
    best_epoch_ : int
        Its number, from one.

    Raises
    ------
    ValueError, TypeError
        Before the first step, if a setting, the criterion or the optimizer cannot be
        right.

    See Also
    --------
    sklaplace.LaplaceClassifier : With ``prior_precision="marglik"``, the same after
        the training.

    Notes
    -----
    Each update costs one pass over the training rows with k backward columns per row
    (k = c - 1 for c classes), and a decomposition of the structure. It runs in
    evaluation mode, leaves buffers and the global random state alone, and records
    ``log_marginal_likelihood`` in the net's history (nan in epochs without an
    update). ``train_loss`` there is the criterion without the prior. Optimizers that
    compare values of the loss, such as L-BFGS with a line search, do not see the
    prior and are refused. Callbacks that clip gradients come after this one.

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

    prior_mean: ClassVar[float] = 0.0
    structure_params: ClassVar[None] = None

    def __init__(
        self,
        subset_of_weights: str | list[str] = "all",
        hessian_structure: str = "kron",
        curvature: str = "ggn",
        prior_precision: Any = 1.0,
        prior_structure: str = "layerwise",
        sigma_noise: float = 1.0,
        temperature: float = 1.0,
        n_burnin: int = 0,
        every: int = 1,
        damping: float = 0.5,
    ) -> None:
        self.subset_of_weights = subset_of_weights
        self.hessian_structure = hessian_structure
        self.curvature = curvature
        self.prior_precision = prior_precision
        self.prior_structure = prior_structure
        self.sigma_noise = sigma_noise
        self.temperature = temperature
        self.n_burnin = n_burnin
        self.every = every
        self.damping = damping

    # ------------------------------------------------------------------ the training
    def _check_settings(self) -> None:
        check_option("hessian_structure", self.hessian_structure, STRUCTURES)
        curvatures = [name for name, kind in CURVATURES.items() if not kind.is_exact]
        check_option("curvature", self.curvature, curvatures)
        check_option("prior_structure", self.prior_structure, PRIOR_STRUCTURES)
        check_prior_structure(self.prior_structure, self.hessian_structure)
        # single weights are chosen by a training that is over
        subsets = {k: v for k, v in SUBSETS.items() if k != "subnetwork"}
        check_subset(self.subset_of_weights, None, subsets)
        check_positive("prior_precision", self.prior_precision, scalar=False)
        check_positive("sigma_noise", self.sigma_noise)
        check_positive("temperature", self.temperature)
        check_count("n_burnin", self.n_burnin, smallest=0)
        check_count("every", self.every)
        check_share("damping", self.damping, "Choose one such as 0.5.")

    def _subset(self, net: Any) -> Any:
        return self.subset_of_weights

    def _begin(self, net: Any, inspected: NetworkSpec, n_rows: int) -> Layout:
        layout, device = inspected.layout, device_of(net)
        n_columns = inspected.n_outputs
        check_layout(self, layout, device, n_rows * n_columns, n_columns)

        def number(value: Any) -> Tensor:
            return torch.as_tensor(value, dtype=torch.float64, device=device)

        shape = PRIOR_STRUCTURES[self.prior_structure](layout)
        self.hyperparameters_ = Hyperparameters(
            prior_precision=number(self.prior_precision).expand(shape).clone(),
            prior_mean=number(self.prior_mean),
            sigma_noise=number(self.sigma_noise),
            temperature=number(self.temperature),
        )
        self.epoch_ = 0
        self.best_: _Best | None = None
        return layout

    def _prior_gradient(self, theta: Tensor) -> Tensor:
        h = self.hyperparameters_
        delta = priors.expand(h.prior_precision, self.running_.layout)
        return priors.Independent(delta, h.prior_mean).gradient(theta)

    def _loss_scale(self) -> Tensor:
        h = self.hyperparameters_
        return self.running_.inspected.likelihood.scale(h.sigma_noise) / h.temperature

    def on_epoch_end(self, net: Any, **kw: Any) -> None:
        """Raise the evidence where that is due; note the best epoch."""
        self.epoch_ += 1
        since = self.epoch_ - self.n_burnin - 1
        if since < 0 or since % self.every:
            net.history.record("log_marginal_likelihood", float("nan"))
            return
        posterior = self._ascended(self._posterior(net))
        value = float(posterior.log_marginal_likelihood())
        self.hyperparameters_ = posterior.hyperparameters
        is_best = self.best_ is None or value > self.best_.value
        if is_best:
            state = {k: v.clone() for k, v in net.module_.state_dict().items()}
            h = self.hyperparameters_
            self.best_ = _Best(value, self.epoch_, h, state)
        net.history.record("log_marginal_likelihood", value)
        net.history.record("log_marginal_likelihood_best", is_best)

    def on_train_end(self, net: Any, X: Any = None, y: Any = None, **kw: Any) -> None:
        """Put the weights with the highest evidence into the module."""
        super().on_train_end(net, X=X, y=y, **kw)
        best = self.__dict__.pop("best_", None)
        h = self.__dict__.pop("hyperparameters_", None)
        epochs = self.__dict__.pop("epoch_", 0)
        if best is None:
            warnings.warn(
                f"The training ended after {epochs} epochs, before the evidence was "
                f"asked for, at n_burnin={self.n_burnin}. Train longer, or lower "
                "n_burnin.",
                UserWarning,
                stacklevel=2,
            )
            best = _Best(float("nan"), epochs, h, net.module_.state_dict())
        net.module_.load_state_dict(best.state)
        self.log_marginal_likelihood_, self.best_epoch_ = best.value, best.epoch
        if best.hyperparameters is not None:
            self.prior_precision_ = plain(best.hyperparameters.prior_precision)
            self.sigma_noise_ = plain(best.hyperparameters.sigma_noise)

    # ------------------------------------------------------------------- the evidence
    def _posterior(self, net: Any) -> GaussianPosterior:
        """The posterior at the weights as they are, under the prior as it is."""
        inspected, rows = self.running_.inspected, self.running_.rows
        forward = as_forward(net, inspected.output_map, inspected.logit_layer)
        layout, curvature = inspected.layout, CURVATURES[self.curvature]
        accumulator = STRUCTURES[self.hessian_structure][0](layout)
        elements = accumulator.row_elements(layout, inspected.n_outputs)
        batches = Batches(net, rows, inspected.batch_size(row_elements=elements))
        with private_rng(None, device_of(net)), forward.frozen():
            data_fit = accumulate(
                forward,
                batches,
                inspected.likelihood,
                curvature.configured({}, seed=0),
                accumulator,
            )
        weights = layout.read(forward.module)
        return GaussianPosterior(
            mean=weights,
            weights=weights,
            structure=accumulator.decompose(),
            layout=layout,
            likelihood=inspected.likelihood,
            data_fit=data_fit,
            hyperparameters=self.hyperparameters_,
            curvature_order=curvature.order,
        )

    def _ascended(self, posterior: GaussianPosterior) -> GaussianPosterior:
        """A damped step, in logarithms, to the highest evidence at these weights."""
        with warnings.catch_warnings():
            # the weights move on before the last digit would matter
            warnings.simplefilter("ignore", ConvergenceWarning)
            best = marglik(posterior).hyperparameters
        here, mix = posterior.hyperparameters, partial(_between, share=self.damping)
        return posterior.replace(
            prior_precision=mix(best.prior_precision, here.prior_precision),
            sigma_noise=mix(best.sigma_noise, here.sigma_noise),
        )


@dataclass(frozen=True)
class _Best:
    """The epoch with the highest evidence so far."""

    value: float
    epoch: int
    hyperparameters: Hyperparameters | None
    state: dict[str, Any]


def _between(there: Tensor, here: Tensor, share: float) -> Tensor:
    """``there`` to ``here``, by a share of the way, in logarithms."""
    return there.log().lerp(here.log(), share).exp()


# ------------------------------------------------------- the posterior of another task
class PriorTraining(PriorCallback):
    """Trains a net under the posterior of an earlier task, so that it is not forgotten.

    The training starts at the mean of that posterior and adds its gradient to that of
    every batch. Prefer it to plain training on new rows where the old ones are gone.
    `sklaplace.LaplaceClassifier` and `sklaplace.LaplaceRegressor` take the same
    posterior as ``prior=``, and give the one for the next task.

    Parameters
    ----------
    prior : GaussianPosterior
        ``posterior_`` of an estimator that was fitted to the earlier task, around a
        network with the same layers. Weights that it is not over are trained freely,
        and may take the earlier task along: use ``subset_of_weights="all"`` there.
    sigma_noise : float or None, default=None
        Standard deviation of the noise, for the mean squared error; None is that of
        the earlier task.
    temperature : float, default=1.0
        Divides the log-likelihood of the new rows; above one holds on more firmly.

    Raises
    ------
    ValueError, TypeError
        Before the first step, if the posterior is over other weights, or a setting,
        the criterion or the optimizer cannot be right.

    See Also
    --------
    MarglikTraining : A prior of its own, chosen during training.

    Notes
    -----
    Each step costs a product with the earlier precision: O(P²) for ``full``, a few
    products with the factors for ``kron``, O(P) for ``diag``; no (P, P) is written
    out. With ``diag`` this is elastic weight consolidation (Kirkpatrick et al.) with
    one penalty for all earlier tasks (Huszár). Every training starts at the mean anew.
    The prior is as steep as the loss of all earlier rows: plain gradient descent needs
    smaller steps. Optimizers that compare values of the loss are refused.

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

    def __init__(
        self, prior: Any, sigma_noise: float | None = None, temperature: float = 1.0
    ) -> None:
        self.prior = prior
        self.sigma_noise = sigma_noise
        self.temperature = temperature

    def _check_settings(self) -> None:
        check_posterior("prior", self.prior)
        if self.sigma_noise is not None:
            check_positive("sigma_noise", self.sigma_noise)
        check_positive("temperature", self.temperature)

    def _subset(self, net: Any) -> Any:
        own = dict(unwrapped(net.module_).named_parameters())
        layout = self.prior.layout
        # what the module has under these names, if anything
        found = [
            replace(block, shape=tuple(own[block.name].shape))
            for block in layout.blocks
            if block.name in own
        ]
        check_earlier_layout(self.prior, replace(layout, blocks=tuple(found)))
        return [block.name for block in layout.blocks]

    def _begin(self, net: Any, inspected: NetworkSpec, n_rows: int) -> Layout:
        module = unwrapped(net.module_)
        self.earlier_ = move(self.prior.as_prior(), device_of(net))
        layout: Layout = self.earlier_.layout
        own = dict(module.named_parameters())
        with torch.no_grad():
            for name, value in layout.unflatten(self.earlier_.mean, module).items():
                own[name].copy_(value)
        return layout

    def _prior_gradient(self, theta: Tensor) -> Tensor:
        slope: Tensor = self.earlier_.gradient(theta)
        return slope

    def _loss_scale(self) -> Tensor:
        noise = self.prior.hyperparameters.sigma_noise
        if self.sigma_noise is not None:
            noise = torch.as_tensor(self.sigma_noise, dtype=torch.float64)
        likelihood = self.running_.inspected.likelihood
        scale = likelihood.scale(noise.to(self.earlier_.mean.device))
        return scale / self.temperature

    def on_train_end(self, net: Any, X: Any = None, y: Any = None, **kw: Any) -> None:
        """Forget what belongs to the training only."""
        super().on_train_end(net, X=X, y=y, **kw)
        self.__dict__.pop("earlier_", None)
