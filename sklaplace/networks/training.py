"""Training: fit a skorch net with sample weights, and with checks that skorch lacks.

During one ``fit``, a net uses sample weights, checks the data before the first step,
and records the train/validation split. The weighted loss of a batch is
``Σ w · loss / (b · mean(w))``, where the mean is over all training data.
"""

import copy
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any

import numpy as np
import torch
from skorch import NeuralNet
from skorch.dataset import unpack_data
from skorch.utils import to_tensor
from torch import Tensor, nn
from torch.utils.data import DataLoader

from sklaplace.core.random import private_rng
from sklaplace.data.dataset import (
    ArrayLoader,
    TrainingData,
    collate_weighted,
    first_rows,
    sample_weights,
)
from sklaplace.data.streams import Samples
from sklaplace.likelihoods import CRITERIA
from sklaplace.networks.forward import computed_tensors, first_tensor, with_attributes
from sklaplace.networks.outputs import as_forward, unwrapped

# Methods of a skorch net that receive the module's outputs.
_STEPS = "train_step", "train_step_single", "validation_step"


@dataclass
class TrainingRun:
    """Data sets of a training run, and sample weights of the current batch.

    Attributes
    ----------
    X : object
        Inputs of the training.
    dataset : Dataset or None
        Data set that replaces the inputs.
    check : callable or None
        Function of the data set and of the validation part (or None). The function is
        called on the initialised net before the first step, and may raise an error.
    hooks : ExitStack
        Hooks of the net's module, which are removed after the training.
    datasets : tuple of Dataset, or None
        Training and validation data, once the data set is split.
    weights : Tensor of shape (b,) or None
        Sample weights of the current batch.
    mean_weight : float
        Mean sample weight in the data set of the current batch.
    ctrl_c, stop : KeyboardInterrupt or None
        Errors that the last Ctrl-C raised, and a callback that stops the training.
    is_interrupted : bool
        Whether an error other than ``stop`` ended the training. skorch then returns as
        if all epochs were complete.
    """

    X: object = None
    dataset: Samples | None = None
    check: Callable[[Samples, Samples | None], None] | None = None
    hooks: ExitStack = field(default_factory=ExitStack)
    datasets: Any = None
    weights: Tensor | None = None
    mean_weight: float = 1.0
    ctrl_c: KeyboardInterrupt | None = None
    stop: KeyboardInterrupt | None = None
    is_interrupted: bool = False

    @contextmanager
    def noting_stop(self) -> Iterator[None]:
        """Store the error that a callback raises; Ctrl-C during a callback is none."""
        try:
            yield
        except KeyboardInterrupt as error:
            if error is not self.ctrl_c:
                self.stop = error
            raise

    @contextmanager
    def noting_interrupt(self) -> Iterator[None]:
        """Note an error that ends the training, unless a callback raised it."""
        try:
            yield
        except KeyboardInterrupt as error:
            self.is_interrupted = error is not self.stop
            raise


@contextmanager
def training_run(
    net: NeuralNet,
    data: TrainingData,
    check: Callable[[Samples, Samples | None], None] | None = None,
    mixins: tuple[type, ...] = (),
) -> Iterator[TrainingRun]:
    """Prepare a skorch net for one call of ``net.fit(data.X, data.y)``.

    Meanwhile, the net's class is a subclass of its own class, with mixins that replace
    the data, check it and weight the loss. Afterwards, the net has its own class again,
    and ``datasets`` of the run are its training and validation data.

    Parameters
    ----------
    net : skorch.NeuralNet
        A clone of the user's net.
    data : TrainingData
        Samples in any form that skorch accepts. If X is a dataset, y replaces the
        targets of the dataset.
    check : callable, optional
        See `TrainingRun`.
    mixins : tuple of types
        Mixins that precede the net's class during training.
    """
    run = TrainingRun(data.X, check=check)
    if data.sample_weight is not None or isinstance(data.X, torch.utils.data.Dataset):
        run.dataset = data.dataset(net)
        mixins = (*mixins, _WeightedTraining)
    original = type(net)
    # the subclass keeps the names of the class, for messages
    names = "__qualname__", "__module__"
    attributes: dict[str, object] = {name: getattr(original, name) for name in names}
    # class attributes, because skorch turns attributes of a net into parameters
    attributes |= {"_original": original, "_training_run": run}
    attributes["notify"] = run.noting_stop()(original.notify)
    attributes["fit_loop"] = run.noting_interrupt()(original.fit_loop)
    bases = (_ForTraining, *mixins, _BatchedReading, original)
    net.__class__ = type(original.__name__, bases, attributes)
    try:
        with run.hooks:
            yield run
    finally:
        net.__class__ = original
    # without a split, for instance in a custom fit loop, all samples are training data
    run.datasets = run.datasets or (run.dataset or data.dataset(net), None)


@contextmanager
def logits_alone(net: NeuralNet, x: object) -> Iterator[None]:
    """Make a net's module return only its logits.

    skorch's nets, criteria and scoring callbacks expect tensors, but transformers
    return several outputs. `first_tensor` selects the logits. A net with a custom
    ``get_loss`` receives the module's outputs unchanged. ``x`` is a batch of a few
    samples.
    """
    with ExitStack() as hooks:
        if not _overrides(net, "get_loss") and _takes_logits(net, x):
            hook = net.module_.register_forward_hook(_logits)
            hooks.enter_context(hook)
        yield


def _overrides(net: NeuralNet, *names: str) -> bool:
    """Return whether a user-defined class overrides one of the methods."""
    # modules of the classes, including bases, that define a method
    owners = [k.__module__ for k in type(net).__mro__ if vars(k).keys() & set(names)]
    return not all(owner.startswith(("skorch.", "sklaplace.")) for owner in owners)


def _takes_logits(net: NeuralNet, x: object) -> bool:
    """Return whether the criterion expects a tensor but the outputs are not tensors.

    skorch passes tuples unchanged, so custom criteria or training steps can use them.
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


class _ForTraining:
    """Mixin for nets whose class is changed during training."""

    _original: type
    _training_run: TrainingRun

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        # callbacks that pickle the net store the user's class
        return object.__new__, (self._original,), self.__getstate__()

    def get_dataset(self, X: object, y: object = None) -> Samples:
        """Return the dataset of the training run in place of its X."""
        run = self._training_run
        if X is run.X and run.dataset is not None:
            return run.dataset
        return super().get_dataset(X, y)  # type: ignore[misc]

    def get_split_datasets(
        self, X: object, y: object = None, **params: object
    ) -> tuple[Samples, Samples | None]:
        """Split the data, check both parts, and store them for the caller.

        From then on, until the end of the training, the module returns only its logits;
        see `logits_alone`. skorch calls this method after initialisation, just before
        the first step.
        """
        run, split = self._training_run, super().get_split_datasets  # type: ignore[misc]
        # from here on, every call of get_dataset with this X returns the same object
        run.dataset = dataset = self.get_dataset(X, y)
        try:
            datasets = split(X, y, **params)
        except ValueError as error:
            if _overrides(self, "get_split_datasets"):  # not an error of train_split
                raise
            raise ValueError(
                f"The train_split of estimator cannot split {len(dataset)} samples: "
                f"{str(error).rstrip('.')}. Use fewer splits, such as ValidSplit(2), "
                "or train_split=None."
            ) from error
        with private_rng(None):  # the checks do not change the training
            if run.check is not None:
                run.check(dataset, datasets[1])
            x = first_rows(self, dataset)
            run.hooks.enter_context(logits_alone(self, x))
        run.datasets = datasets
        return datasets


@contextmanager
def noting_ctrl_c(run: TrainingRun) -> Iterator[None]:
    """Store the errors that Ctrl-C raises meanwhile in ``run.ctrl_c``.

    A callback that stops the training raises the same kind of error, so the signal's
    handler is replaced by one that also stores its error. Python raises it in the main
    thread only, and other threads cannot replace handlers. A process that ignores
    Ctrl-C has no callable handler.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(
        handler
    ):
        yield
        return

    def noting_handler(number: int, frame: FrameType | None) -> None:
        try:
            handler(number, frame)
        except KeyboardInterrupt as error:
            run.ctrl_c = error
            raise

    signal.signal(signal.SIGINT, noting_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def _current_run(net: NeuralNet) -> TrainingRun:
    """Return the training run of a net, or an empty one outside of `training_run`."""
    return getattr(net, "_training_run", TrainingRun())


def batch_weights(net: NeuralNet) -> Tensor | None:
    """Return the sample weights (b,) of the current training batch, or None."""
    return _current_run(net).weights


@contextmanager
def weights_of_rows(net: NeuralNet, rows: Tensor | slice) -> Iterator[None]:
    """Restrict the sample weights of the current batch, if any, to some rows."""
    run = _current_run(net)
    weights = run.weights
    try:
        run.weights = None if weights is None else weights[rows]
        yield
    finally:
        run.weights = weights


def mean_weight(net: NeuralNet) -> float:
    """Return the mean sample weight of the current training or validation data."""
    return _current_run(net).mean_weight


class _WeightedTraining:
    """Mixin for nets that train on a given dataset with sample weights."""

    _training_run: TrainingRun
    criterion_: nn.Module
    device: str | torch.device | None

    def get_iterator(self, dataset: Samples, training: bool = False) -> Any:
        """Return batches whose sample weights are set aside for the loss."""
        loader = super().get_iterator(dataset, training=training)  # type: ignore[misc]
        weights = sample_weights(dataset)
        if weights is not None:  # items are X, (y, weight)
            loader.collate_fn = partial(collate_weighted, loader.collate_fn)
        return _UnweightedLoader(loader, self._training_run, weights)

    def get_loss(
        self, y_pred: Tensor, y_true: Tensor, *args: object, **kw: object
    ) -> Tensor:
        """Return the loss, weighted if the current batch has weights."""
        run = self._training_run
        loss_of = super().get_loss  # type: ignore[misc]
        if run.weights is None:  # also for a validation set without weights
            return loss_of(y_pred, y_true, *args, **kw)
        weights = to_tensor(run.weights, device=self.device)
        # called by `weighted_loss` after it has changed the criterion's reduction
        compute = partial(loss_of, y_pred, y_true, *args, **kw)
        return weighted_loss(self.criterion_, compute, y_true, weights, run.mean_weight)


class _BatchedReading:
    """Mixin for nets whose loaders read batches of arrays at once."""

    def get_iterator(self, dataset: Samples, training: bool = False) -> Any:
        """Return skorch's loader, with batches that are equal bit by bit."""
        loader = super().get_iterator(dataset, training=training)  # type: ignore[misc]
        return ArrayLoader.of(loader)


def weighted_loss(
    criterion: Any,
    compute: Callable[[], Tensor],
    y: Tensor,
    weights: Tensor,
    mean_weight: float | Tensor,
) -> Tensor:
    """Compute the weighted loss of a batch, (), with the criterion's reduction.

    The criterion returns one loss per target, (b, ...). With the reduction "sum", the
    result is the weighted sum of all losses. Otherwise, it is the mean over samples and
    targets of weights times losses, divided by the mean weight. If the criterion has
    class weights, the mean is also divided by their mean over the batch, as in torch.

    Parameters
    ----------
    criterion : nn.Module
        Criterion, whose reduction is temporarily changed.
    compute : callable
        Function that computes the loss by calling the criterion.
    y : Tensor
        Targets.
    weights : Tensor of shape (b,)
        Sample weights.
    mean_weight : float or Tensor of shape ()
        Mean sample weight over all training data.
    """
    criterion = unwrapped(criterion)  # torch.compile also wraps criteria
    if (reduction := getattr(criterion, "reduction", None)) is None:
        raise ValueError(
            f"sample_weight requires a loss per sample. {type(criterion).__name__} "
            "must have an attribute reduction, and return all losses if it is 'none'."
        )
    criterion.reduction = "none"
    try:
        loss = compute()
    finally:
        criterion.reduction = reduction
    weights = weights.to(loss)
    weighted: Tensor = weights * loss.reshape(len(weights), -1).mean(1)  # (b,)
    if reduction == "sum":  # number of targets per sample times mean over targets
        return weighted.sum() * (loss.numel() / len(weights))
    # the losses already include the class weights
    class_weights = _class_weights(criterion, y, weighted)
    return weighted.mean() / mean_weight / class_weights.mean()


def _class_weights(criterion: nn.Module, y: Tensor, losses: Tensor) -> Tensor:
    """Return class weights (b,) of labels; torch divides a mean loss by their sum.

    Negative labels are ignored, so their weight is zero. Other criteria have no class
    weights, which is equivalent to ones.
    """
    if not isinstance(criterion, nn.CrossEntropyLoss | nn.NLLLoss):
        return torch.ones_like(losses)
    is_labelled, weight = (y >= 0).to(losses), criterion.weight
    if weight is None:
        return is_labelled
    # zero stands for negative labels, which are no indices
    return is_labelled * weight[y.clamp(min=0).to(weight.device)].to(losses)


class _UnweightedLoader:
    """Loader that yields ``(X, y)`` and stores the weights in a `TrainingRun`."""

    def __init__(
        self,
        loader: DataLoader[object],
        run: TrainingRun,
        weights: np.ndarray | None,
    ) -> None:
        self.loader, self.run = loader, run
        self.mean_weight = None if weights is None else float(weights.mean())

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[tuple[object, object]]:
        """Yield inputs and targets; store the weights of the batch for the loss."""
        for batch in self.loader:
            X, y = unpack_data(batch)
            self.run.weights = None
            if self.mean_weight is not None:  # see `collate_weighted`
                y, self.run.weights = y
                self.run.mean_weight = self.mean_weight
            yield X, y


def copied(net: NeuralNet) -> NeuralNet:
    """Copy a skorch net and its modules; share all other attributes.

    ``copy.deepcopy`` uses pickle for skorch nets, and pickle fails for modules defined
    inside a function.
    """
    memo: dict[int, object] = {}
    modules: dict[str, object] = {}
    for name, value in vars(net).items():
        if isinstance(value, nn.Module) and name.endswith("_"):  # fitted attributes
            # hooks may have stored tensors with a graph, which torch cannot copy;
            # deepcopy takes the copies of these tensors from memo
            tensors = (tensor for _, _, tensor in computed_tensors(value.modules()))
            memo |= {id(tensor): tensor.detach().clone() for tensor in tensors}
            modules[name] = copy.deepcopy(value, memo)
    return with_attributes(net, **modules)
