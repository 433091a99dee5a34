"""Training: the fit of a skorch net, with what skorch itself does not offer.

For the time of one ``fit`` the net can have sample weights, a check of the data
before the first step, and a record of the train/validation split. The weighted loss
of a batch is ``Σ w · loss / (b · mean(w))``, with the mean over all training data.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from dis import opmap
from functools import partial
from typing import Any

import numpy as np
import torch
from skorch import NeuralNet
from skorch.dataset import unpack_data
from skorch.utils import to_tensor
from torch import Tensor, nn
from torch.utils.data import DataLoader

from sklaplace.core.checks import naming
from sklaplace.core.random import private_rng
from sklaplace.likelihoods import CRITERIA
from sklaplace.networks.data import collate_weighted, sample_weights, with_targets
from sklaplace.networks.forward import computed_tensors, first_tensor
from sklaplace.networks.outputs import as_forward, unwrapped
from sklaplace.networks.streams import Samples

# Methods of a skorch net that get the module's outputs.
_STEPS = "train_step", "train_step_single", "validation_step"


def train(
    net: NeuralNet,
    X: object,
    y: np.ndarray,
    weights: np.ndarray | None,
    check: Callable[[Samples, Samples | None], None],
    changes: tuple[type, ...] = (),
    /,
    **fit_params: object,
) -> tuple[Samples, Samples | None]:
    """Fit a skorch net in place; return its training and its validation data.

    Parameters
    ----------
    net : skorch.NeuralNet
        A clone of the user's net.
    X, y : data
        As skorch takes them. Where X is a dataset, y replaces its targets.
    weights : ndarray of shape (n,) or None
        Sample weights.
    check : callable
        Called before the first step with the dataset and its validation part or None;
        may raise.
    changes : tuple of types
        Mixins that precede the net's own class during the training.

    Returns
    -------
    train, valid : Dataset, Dataset or None
    """
    state = _TrainingState(X, check=check)
    if weights is not None or isinstance(X, torch.utils.data.Dataset):
        state.dataset = with_targets(net.get_dataset(X, y), y, weights)
        changes = (*changes, _WeightedTraining)
    try:
        with _training_class(net, state, changes):
            net.fit(X, y, **fit_params)
    except (TypeError, ValueError):
        if state.has_begun:
            raise
        with naming(estimator="estimator"):  # its initialisation
            raise
    return state.parts or (state.dataset or net.get_dataset(X, y), None)


@contextmanager
def logits_alone(net: NeuralNet, x: object) -> Iterator[None]:
    """Let the module of a net return the logits of its outputs, as losses take them.

    For outputs with logits among others, as transformers return, and for tuples, see
    `first_tensor`; skorch's nets, its criteria and its scoring callbacks take tensors.
    A net with a ``get_loss`` of its own gets what the module returns. ``x`` are a few
    samples.
    """
    with ExitStack() as hooks:
        if not _overrides(net, "get_loss") and _takes_logits(net, x):
            hook = net.module_.register_forward_hook(_logits)
            hooks.enter_context(hook)
        yield


def _overrides(net: NeuralNet, *names: str) -> bool:
    """Whether a class of the user's defines one of these methods."""
    owners = [k.__module__ for k in type(net).__mro__ if vars(k).keys() & set(names)]
    return not all(owner.startswith(("skorch.", "sklaplace.")) for owner in owners)


def _takes_logits(net: NeuralNet, x: object) -> bool:
    """Whether outputs are no tensor, which the criterion takes.

    skorch hands tuples on, which another criterion, or a step of the user's, may take.
    """
    forward = as_forward(net)
    with forward.frozen():
        outputs = forward.returned(x)
    if isinstance(outputs, tuple):
        takes_tensor = type(unwrapped(net.criterion_)) in CRITERIA
        return takes_tensor and not _overrides(net, *_STEPS)
    return not isinstance(outputs, Tensor)


def _logits(_module: nn.Module, _args: object, outputs: object) -> Tensor:
    return first_tensor(outputs)


@dataclass
class _TrainingState:
    """Data of a training, and sample weights of the current batch and their mean.

    ``dataset`` takes the place of X, and ``parts`` are its training and its validation
    part, once they are split.
    """

    X: object = None
    dataset: Samples | None = None
    check: Callable[[Samples, Samples | None], None] | None = None
    has_begun: bool = False
    parts: tuple[Samples, Samples | None] | None = None
    weights: Tensor | None = None
    mean_weight: float = 1.0


@contextmanager
def _training_class(
    net: NeuralNet, state: _TrainingState, changes: tuple[type, ...]
) -> Iterator[None]:
    """Put mixins before the class of a net.

    A class, since every attribute of a skorch net becomes a parameter.
    """
    original = type(net)
    names = "__qualname__", "__module__"
    attributes: dict[str, object] = {name: getattr(original, name) for name in names}
    attributes |= {"_original": original, "_training_state": state}
    bases = (_ForTraining, *changes, original)
    net.__class__ = type(original.__name__, bases, attributes)
    try:
        yield
    finally:
        net.__class__ = original


class _ForTraining:
    """Mixin of nets that have another class during their training."""

    _original: type
    _training_state: _TrainingState

    def __reduce_ex__(self, protocol: Any) -> tuple[object, ...]:
        # callbacks that pickle the net store one of the user's class
        return object.__new__, (self._original,), self.__getstate__()

    def get_dataset(self, X: object, y: object = None) -> Samples:
        state = self._training_state
        if X is state.X and state.dataset is not None:
            return state.dataset
        return super().get_dataset(X, y)  # type: ignore[misc]

    def get_split_datasets(
        self, X: object, y: object = None, **params: object
    ) -> tuple[Samples, Samples | None]:
        # Once the net and all callbacks are initialised, just before the first step.
        state, split = self._training_state, super().get_split_datasets  # type: ignore[misc]
        state.has_begun = True
        state.dataset = dataset = self.get_dataset(X, y)
        try:
            parts = split(X, y, **params)
        except ValueError as error:
            raise ValueError(
                f"The train_split of estimator cannot split {len(dataset)} samples: "
                f"{str(error).rstrip('.')}. Use fewer splits, such as ValidSplit(2), "
                "or train_split=None."
            ) from error
        if state.check is not None:
            with private_rng(None):
                state.check(dataset, parts[1])
        state.parts = parts
        return parts


def noting_interrupts(note: Callable[[], None]) -> type:
    """Return a mixin of nets that call ``note`` when Ctrl-C ends their training.

    skorch ends the training without an exception, as if all epochs were done.
    """

    class NotingInterrupts:
        def fit_loop(self, *args: object, **kwargs: object) -> NeuralNet:
            try:
                return super().fit_loop(*args, **kwargs)  # type: ignore[misc]
            except KeyboardInterrupt as error:
                if not _is_stop(error):
                    note()
                raise

    return NotingInterrupts


def _is_stop(error: KeyboardInterrupt) -> bool:
    """Whether a callback has raised an exception to stop early, as `EarlyStopping`.

    Ctrl-C during a callback raises the same exception, but by no ``raise`` statement.
    """
    # Limit: a handler of SIGINT that is written in Python has such a statement, so that
    # Ctrl-C during a callback counts as a stop.
    names, trace = set[str](), error.__traceback__
    while trace is not None:
        code, last = trace.tb_frame.f_code, trace.tb_lasti
        names.add(code.co_name)
        trace = trace.tb_next
    return "notify" in names and code.co_code[last] == opmap["RAISE_VARARGS"]


def batch_weights(net: NeuralNet) -> Tensor | None:
    """Sample weights (b,) of the batch that a net is being trained on, if any."""
    return getattr(net, "_training_state", _TrainingState()).weights


def mean_weight(net: NeuralNet) -> float:
    """Mean sample weight of the data that a net is being trained or validated on."""
    return getattr(net, "_training_state", _TrainingState()).mean_weight


class _WeightedTraining:
    """Mixin of nets that train on a given dataset, with its sample weights."""

    _training_state: _TrainingState
    criterion_: nn.Module
    device: str | torch.device | None

    def get_iterator(self, dataset: Samples, training: bool = False) -> Any:
        loader = super().get_iterator(dataset, training=training)  # type: ignore[misc]
        weights = sample_weights(dataset)
        if weights is not None:
            loader.collate_fn = partial(collate_weighted, loader.collate_fn)
        return _UnweightedLoader(loader, self._training_state, weights)

    def get_loss(
        self, y_pred: Tensor, y_true: Tensor, *args: object, **kw: object
    ) -> Tensor:
        state = self._training_state
        loss_of = super().get_loss  # type: ignore[misc]
        if state.weights is None:
            return loss_of(y_pred, y_true, *args, **kw)
        weights = to_tensor(state.weights, device=self.device)
        compute = partial(loss_of, y_pred, y_true, *args, **kw)
        return weighted_loss(
            self.criterion_, compute, y_true, weights, state.mean_weight
        )


def weighted_loss(
    criterion: Any,
    compute: Callable[[], Tensor],
    y: Tensor,
    weights: Tensor,
    mean_weight: float | Tensor,
) -> Tensor:
    """Weighted loss of a batch, (), in the reduction of the criterion.

    Parameters
    ----------
    criterion : nn.Module
        Its reduction is changed, and restored.
    compute : callable
        Computes the loss by the criterion.
    y : Tensor
        Targets.
    weights : Tensor of shape (b,)
        Sample weights.
    mean_weight : float or Tensor of shape ()
        Their mean over all training data.
    """
    criterion = unwrapped(criterion)  # torch.compile wraps criteria, too
    reduction = criterion.reduction
    criterion.reduction = "none"
    try:
        loss = compute()
    finally:
        criterion.reduction = reduction
    weights = weights.to(loss)
    weighted: Tensor = weights * loss.reshape(len(weights), -1).mean(1)
    if reduction == "sum":
        return weighted.sum() * (loss.numel() / len(weights))
    class_weights = _class_weights(criterion, y, weighted)
    return weighted.mean() / mean_weight / class_weights.mean()


def _class_weights(criterion: nn.Module, y: Tensor, losses: Tensor) -> Tensor:
    """Class weights (b,) of labels, whose sum torch divides a mean of losses by."""
    if not isinstance(criterion, nn.CrossEntropyLoss | nn.NLLLoss):
        return torch.ones_like(losses)
    labelled, weight = (y >= 0).to(losses), criterion.weight
    if weight is None:
        return labelled
    return labelled * weight[y.clamp(min=0).to(weight.device)].to(losses)


class _UnweightedLoader:
    """A loader that yields ``(X, y)`` and stores the weights in a `_TrainingState`."""

    def __init__(
        self,
        loader: DataLoader[object],
        state: _TrainingState,
        weights: np.ndarray | None,
    ) -> None:
        self.loader, self.state = loader, state
        self.mean_weight = None if weights is None else float(weights.mean())

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[tuple[object, object]]:
        for batch in self.loader:
            X, y = unpack_data(batch)
            self.state.weights = None
            if self.mean_weight is not None:
                y, self.state.weights = y
                self.state.mean_weight = self.mean_weight
            yield X, y


def copied(net: NeuralNet) -> NeuralNet:
    """Copy of a skorch net with its own modules; all other attributes are shared.

    ``copy.deepcopy`` of a skorch net goes through pickle, which refuses modules
    that were defined inside a function.
    """
    twin = object.__new__(type(net))
    memo: dict[int, object] = {}
    for name, value in vars(net).items():
        is_module = isinstance(value, nn.Module) and name.endswith("_")
        if is_module:
            # torch does not copy tensors with a graph, which hooks may have left
            tensors = (tensor for _, _, tensor in computed_tensors(value.modules()))
            memo |= {id(tensor): tensor.detach().clone() for tensor in tensors}
            value = copy.deepcopy(value, memo)
        twin.__dict__[name] = value
    return twin
