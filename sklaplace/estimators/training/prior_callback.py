"""PriorCallback: add the gradient of a Gaussian prior to the gradient of each batch.

A criterion is a loss without a prior. The callback adds the gradient of
``½ (θ - μ₀)ᵀ P₀ (θ - μ₀)``, at the scale of the criterion. The weights then converge to
a maximum of the posterior, around which the Laplace approximation is computed.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from skorch import NeuralNet
from skorch.callbacks import Callback
from skorch.dataset import unpack_data
from torch import Tensor, nn

from sklaplace.core.checks import warn_user
from sklaplace.core.random import private_rng
from sklaplace.curvature.layout import Layout
from sklaplace.curvature.network import NetworkSpec, infer_network_spec
from sklaplace.data.dataset import Batches, spread_rows
from sklaplace.likelihoods import CRITERIA
from sklaplace.likelihoods.base import loss_weights
from sklaplace.networks.net_checks import check_device
from sklaplace.networks.outputs import raw_outputs, takes_logarithm, unwrapped
from sklaplace.networks.trained import TrainedNetwork, device_of
from sklaplace.networks.training import batch_weights
from sklaplace.posterior.tuning.comparison import means_if_worse, network_losses

# attributes that are only needed during training
_OF_TRAINING = "training_", "before_", "best_", "earlier_", "epoch_", "hyperparameters_"


@dataclass(frozen=True)
class _Training:
    """State during training.

    Attributes
    ----------
    spec : NetworkSpec
        Specification of the network.
    layout : Layout
        Layout of the weights with a prior.
    dataset : Dataset
        Training data.
    held_out : Dataset or None
        Validation data of the net.
    """

    spec: NetworkSpec
    layout: Layout
    dataset: Any
    held_out: Any


class PriorCallback(Callback, ABC):
    """Base class of callbacks that train a net with a Gaussian prior.

    Subclasses are dataclasses whose fields are the settings. Each weight has only one
    prior, so two callbacks of a net must not select weights of the same parameter.
    """

    _advice: ClassVar[str]
    """What to do if the loss of the net's validation samples increases."""

    def on_train_begin(
        self, net: NeuralNet, X: Any = None, y: Any = None, **kw: Any
    ) -> None:
        """Check the settings, and delete attributes from earlier training.

        As in scikit-learn, attributes that training sets end with an underscore.
        """
        for name in [name for name in vars(self) if name.endswith("_")]:
            delattr(self, name)
        self._check_settings()
        check_device(net)

    def on_epoch_begin(
        self,
        net: NeuralNet,
        dataset_train: Any = None,
        dataset_valid: Any = None,
        **kw: Any,
    ) -> None:
        """Prepare before the first epoch, as skorch passes the data sets only here.

        Infer the network's specification, check it, and store the state of the training
        and the losses of validation samples before the first step.
        """
        if hasattr(self, "training_"):  # not the first epoch
            return
        # random numbers drawn here do not change those of the training
        with private_rng(None, device_of(net)):
            x = spread_rows(net, dataset_train)
            # `adapt` maps the criterion's likelihood to that of the module's outputs
            adapt, subset = partial(_adapted, raw_outputs(net, x)), self._subset(net)
            # likelihoods of all supported criteria
            allowed = tuple({type(likelihood) for likelihood, _ in CRITERIA.values()})
            spec = infer_network_spec(
                net, x, subset, allowed, n_targets=None, is_trained=False, adapted=adapt
            )
            _check_labels(net, dataset_train, spec)
            layout = self._begin(net, spec, len(dataset_train))
            check_optimizer(net, {block.name for block in layout.blocks})
            _check_single(net, layout)
            # the losses of ignored labels are unknown
            is_usable = dataset_valid and not _has_ignored(net, dataset_valid, spec)
            held_out = dataset_valid if is_usable else None
            self.training_ = _Training(spec, layout, dataset_train, held_out)
            self.before_ = self._held_out_losses(net)

    def on_grad_computed(
        self, net: NeuralNet, named_parameters: Any, batch: Any = None, **kw: Any
    ) -> None:
        """Add the prior's gradient, at the criterion's scale, to that of the criterion.

        The criterion is ``scale`` times the summed loss. The negative log-posterior is
        ``_loss_scale`` times the summed loss, plus the negative log-prior. The step
        follows the gradient of ``scale / _loss_scale`` times the negative
        log-posterior, so the prior's gradient has this factor.
        """
        training, module = self.training_, unwrapped(net.module_)
        # `unpack_data` returns inputs and targets
        y = torch.as_tensor(unpack_data(batch)[1], device=device_of(net))
        scale = criterion_scale(net, training.spec, y, len(training.dataset))
        gradient = self._prior_gradient(training.layout.read(module))
        add_to_gradients(training.layout, module, scale / self._loss_scale() * gradient)

    def on_train_end(
        self, net: NeuralNet, X: Any = None, y: Any = None, **kw: Any
    ) -> None:
        """Warn if the prior harmed predictions, and delete state of the training."""
        # losses and weights before training; missing if there was no epoch, and None
        # without validation samples
        before, means = vars(self).get("before_"), None
        if before is not None:
            (losses_before, _), (losses, weights) = before, self._held_out_losses(net)
            # None unless the mean loss has increased by more than its uncertainty
            means = means_if_worse(losses, losses_before, weights)
        if means is not None:  # (after, before)
            warn_user(
                f"{type(self).__name__} increased the mean loss of the net's held-out "
                f"samples from {means[1]:.3f} to {means[0]:.3f} nats. {self._advice}"
            )
        for name in _OF_TRAINING:
            self.__dict__.pop(name, None)

    def _held_out_losses(self, net: NeuralNet) -> Any:
        """Return losses (n,) and weights (n,) of validation samples.

        The losses are negative log-likelihoods at the net's current weights. Return
        None if there are no validation samples.
        """
        spec, held_out = self.training_.spec, self.training_.held_out
        if held_out is None:
            return None
        network = TrainedNetwork(net, spec)
        forward = network.forward()

        def outputs_and_targets() -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
            for x, y, w in network.batches(held_out):
                f = forward(x)
                yield f, spec.likelihood.targets(y, f), w

        with forward.frozen(), torch.no_grad():
            return network_losses(spec.likelihood, outputs_and_targets())

    @abstractmethod
    def _check_settings(self) -> None:
        """Raise an error for invalid settings."""

    @abstractmethod
    def _subset(self, net: NeuralNet) -> Any:
        """Return the weights with a prior, in the format of `infer_network_spec`."""

    @abstractmethod
    def _begin(self, net: NeuralNet, spec: NetworkSpec, n_rows: int) -> Layout:
        """Prepare for the first step, and return the layout of weights with a prior."""

    @abstractmethod
    def _prior_gradient(self, theta: Tensor) -> Tensor:
        """Return the gradient of the prior, ``P₀ (θ - μ₀)``, (P,)."""

    @abstractmethod
    def _loss_scale(self) -> Tensor:
        """Return the factor of the loss in the negative log-posterior, ()."""


def given_callbacks(net: NeuralNet) -> list[Callback | type[Callback]]:
    """Return the callbacks passed to a skorch net, without their names."""
    callbacks = getattr(net, "callbacks", None)
    entries = callbacks if isinstance(callbacks, list | tuple) else []
    return [entry[1] if isinstance(entry, tuple) else entry for entry in entries]


def refuse_callbacks(net: NeuralNet, *kinds: type[Callback]) -> None:
    """Raise ValueError if a net has callbacks of the given classes."""
    for callback in given_callbacks(net):
        if isinstance(callback, kinds):
            raise ValueError(
                f"The callback {type(callback).__name__} changes the training of "
                "parameters that are not trained here. Leave it out and use "
                "optimizer__weight_decay, or use LaplaceClassifier or LaplaceRegressor."
            )


# ----------------------------------------------------------------------- gradients
def criterion_scale(
    net: NeuralNet, spec: NetworkSpec, y: Tensor, n_rows: int
) -> Tensor:
    """Return the scale of the criterion relative to the loss summed over N samples.

    The criterion of a batch is ``u · Σ w · loss`` plus a constant. The weighted sum
    over a batch of b samples, multiplied by ``N / b``, estimates the sum over all N
    samples. The criterion is ``u b / N`` times this estimate.

    Parameters
    ----------
    net : skorch.NeuralNet
        Net during training. Its ``get_loss`` determines ``u``.
    spec : NetworkSpec
        Specification of the network.
    y : Tensor
        Targets of a batch, in the form that the criterion expects.
    n_rows : int
        Number N of training samples.

    Notes
    -----
    ``u`` is the gradient of the criterion with respect to the outputs, divided by the
    gradient of the likelihood's loss. All outputs have the same ratio: ``1/b`` for
    cross-entropies, ``2/(b c)`` for the mean squared error of c columns. ``u`` includes
    the reduction, class weights and sample weights.
    """
    n = len(y)
    dtype = next(net.module_.parameters()).dtype
    with torch.enable_grad():
        # `u` is the same at all outputs, so these are arbitrary, but unlikely to equal
        # targets, at which gradients are zero
        f = torch.full((n, spec.n_outputs), 0.37, dtype=dtype, device=y.device)
        f = (f + torch.linspace(0, 1, f.shape[1]).to(f)).requires_grad_()
        loss = net.get_loss(_module_outputs(net, spec, f, y), y, training=True)
        (criterion_gradient,) = torch.autograd.grad(loss, f)
    f = f.detach().double()
    # the likelihood's loss of each sample at the same outputs, with its weight
    likelihood, w = spec.likelihood, batch_weights(net)
    targets = likelihood.targets(y, f)
    loss_gradient = likelihood.gradient(f, targets)
    w = loss_weights(likelihood, targets, None if w is None else w.to(f))
    if w is not None:
        loss_gradient = loss_gradient * w.unsqueeze(-1)
    squared_norm = (loss_gradient**2).sum()
    # both gradients have the same direction
    ratio = (criterion_gradient.double() * loss_gradient).sum() / squared_norm
    # no step if all targets of the batch have zero weight
    return torch.where(squared_norm > 0, ratio, torch.zeros_like(ratio)) * (n / n_rows)


def _module_outputs(net: NeuralNet, spec: NetworkSpec, f: Tensor, y: Tensor) -> Tensor:
    """Convert outputs (b, c) to the format and shape of the module's outputs.

    The outputs are logits for classes. A module that applies a sigmoid or softmax
    itself returns probabilities, or log-probabilities for criteria that take them.
    """
    # either way, the module returns probabilities; see `OutputSpec`
    if spec.output_map != "identity" or spec.logit_layer is not None:
        # logits of a softmax are shift-invariant, unlike those of a sigmoid
        if not spec.likelihood.is_shift_invariant:
            f = f.sigmoid()
        else:
            f = f.softmax(-1) if takes_logarithm(net, f) else f.log_softmax(-1)
    # criteria of real targets would broadcast (b, 1) against (b,)
    is_like_targets = y.is_floating_point() and y.numel() == f.numel()
    return f.reshape(y.shape) if is_like_targets else f


def add_to_gradients(layout: Layout, module: nn.Module, values: Tensor) -> None:
    """Add ``values`` (P,) in place to the gradients of the selected weights.

    The P weights belong to parameters of the module, the blocks of the layout.
    Parameters that are not trained are skipped.
    """
    parameters = dict(module.named_parameters())
    for block, piece in zip(layout.blocks, layout.split(values), strict=True):
        parameter = parameters[block.name]
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        flat = piece.to(parameter)
        if block.indices is not None:  # only some elements are selected
            indices = block.indices.to(flat.device)
            flat = flat.new_zeros(parameter.numel()).index_put((indices,), flat)
        parameter.grad += flat.reshape(parameter.shape)


# -------------------------------------------------------------------------- checks
def _adapted(outputs: Tensor, likelihood: Any) -> Any:
    """Return the likelihood, adapted to the shape of the module's outputs.

    A Bernoulli likelihood becomes that of several labels if there are several columns.
    """
    if outputs.ndim > 2:
        raise ValueError(
            f"The network returns maps, of shape {tuple(outputs.shape[1:])} per row. "
            "Train it without the callback, and tune the prior in LaplaceClassifier."
        )
    # logits of a softmax are shift-invariant, unlike those of a sigmoid
    is_bernoulli = likelihood.noun == "class" and not likelihood.is_shift_invariant
    has_columns = outputs.ndim == 2 and outputs.shape[1] > 1
    return likelihood.multilabel() if has_columns and is_bernoulli else likelihood


def _has_ignored(net: NeuralNet, data: Any, spec: NetworkSpec) -> bool:
    """Return whether samples have labels that only the criterion would ignore.

    These labels are negative or the criterion's ``ignore_index``. The likelihood does
    not ignore them.
    """
    if spec.likelihood.noun != "class":
        return False
    batches = Batches(net, data, spec.batch_size())
    # without this attribute, only negative labels count
    ignored_label = getattr(unwrapped(net.criterion_), "ignore_index", -1)
    return any(bool(((y < 0) | (y == ignored_label)).any()) for _, y, _ in batches)


def _check_labels(net: NeuralNet, data: Any, spec: NetworkSpec) -> None:
    """Raise ValueError for labels that only the criterion would ignore."""
    if _has_ignored(net, data, spec):
        raise ValueError(
            "Some labels are negative or ignored by the criterion. Leave out rows to "
            "ignore, or train the net in LaplaceClassifier, which ignores these rows."
        )


def _check_single(net: NeuralNet, layout: Layout) -> None:
    """Raise ValueError if two callbacks define priors over the same parameters."""
    names = {block.name for block in layout.blocks}
    for _, callback in net.callbacks_:  # names and callbacks
        # `training_` of this callback is not yet set
        training = vars(callback).get("training_")
        if not isinstance(training, _Training):
            continue
        if names & {block.name for block in training.layout.blocks}:
            raise ValueError(
                f"{type(callback).__name__} among the callbacks has a prior over the "
                "same weights. Leave out one of the callbacks, or select other weights."
            )


def check_optimizer(net: NeuralNet, names: Collection[str] | None = None) -> None:
    """Raise ValueError for line searches, or weight decay of the named parameters.

    The criterion that a line search compares lacks the prior, and weight decay would be
    a second prior. Without ``names``, all parameters are checked.
    """
    parameters = dict(unwrapped(net.module_).named_parameters())
    selected = {id(p) for n, p in parameters.items() if names is None or n in names}
    for group in net.optimizer_.param_groups:
        if group.get("line_search_fn"):
            raise ValueError(
                f"The optimizer has line_search_fn={group['line_search_fn']!r}, which "
                "compares losses without the prior, or with different draws. Set "
                "optimizer__line_search_fn=None, or use torch.optim.Adam."
            )
        decay = group.get("weight_decay", 0)
        if decay and selected & {id(p) for p in group["params"]}:
            raise ValueError(
                f"The optimizer has weight_decay={decay}, a second prior. Set "
                "optimizer__weight_decay=0. The prior (prior_scale in variational "
                "estimators) already limits the size of the weights."
            )
