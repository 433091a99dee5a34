"""Training: run a skorch net without leaving a trace, and read data as it does.

What skorch lacks is added for the time of one ``fit`` and removed in any case:
sample weights, a look at the rows before the first step, the split that was made,
and a random state of one's own.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from threading import RLock
from typing import Any

import numpy as np
import torch
from skorch.dataset import Dataset, unpack_data
from skorch.utils import multi_indexing, to_tensor
from torch import Tensor
from torch.utils.data import DataLoader, Subset, default_collate

# ----------------------------------------------------------------- randomness
_ONE_THREAD = RLock()


@contextmanager
def private_rng(seed: int | None, device: Any = "cpu") -> Iterator[None]:
    """Run with seeded torch and numpy generators; put the global ones back.

    Parameters
    ----------
    seed : int or None
        None leaves the state as it is, and puts it back too.
    device : str or torch.device, default="cpu"
        Where the network is; its generator is treated likewise.

    Notes
    -----
    The generators, and the mode of a network, are shared by all threads: one at a
    time goes through here.
    """
    on_gpu = torch.device(device or "cpu").type == "cuda"
    if on_gpu:
        torch.cuda.init()
    devices = list(range(torch.cuda.device_count())) if on_gpu else []
    with _ONE_THREAD:
        numpy_state = np.random.get_state()  # noqa: NPY002
        try:
            with torch.random.fork_rng(devices=devices):
                if seed is not None:
                    # torch.manual_seed would seed devices that are not forked too
                    torch.default_generator.manual_seed(seed)
                    np.random.seed(seed)  # noqa: NPY002
                    if on_gpu:
                        torch.cuda.manual_seed_all(seed)
                yield
        finally:
            np.random.set_state(numpy_state)  # noqa: NPY002


# ----------------------------------------------------------------------- data
class RowDataset(Dataset):
    """Inputs of another dataset with targets, and weights, of one's own.

    Rows are ``(X, y)``, or ``(X, (y, weight))`` where there are weights.
    """

    def __init__(self, dataset: Any, y: np.ndarray, weights: np.ndarray | None) -> None:
        # skorch's callbacks look for X and y
        super().__init__(getattr(dataset, "X", dataset), y, length=len(y))
        self.dataset, self.weights = dataset, weights

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> Any:
        X, _ = self.dataset[index]
        if self.weights is None:
            return X, self.y[index]
        return X, (self.y[index], self.weights[index])


@dataclass(frozen=True)
class Batches:
    """Batches ``(x, y, weights)`` of a dataset, as often as asked.

    Attributes
    ----------
    net : skorch.NeuralNet
        Its ``iterator_valid`` and its options are used.
    dataset : Dataset
        With or without weights.
    batch_size : int
        Rows per batch.
    """

    net: Any
    dataset: Any
    batch_size: int

    def __iter__(self) -> Iterator[tuple[Any, Any, Tensor | None]]:
        arrays = _plain_arrays(self.net, self.dataset)
        if arrays is not None:
            yield from self._slices(arrays)
            return
        options = self.net.get_params_for("iterator_valid")
        options["batch_size"] = self.batch_size
        loader = self.net.iterator_valid(self.dataset, **options)
        weighted = _is_weighted(self.dataset)
        if weighted:
            loader.collate_fn = partial(_collate_weighted, loader.collate_fn)
        for batch in loader:
            X, y = unpack_data(batch)
            y, w = y if weighted else (y, None)
            yield self._on_device(X), self._on_device(y), self._on_device(w)

    def _slices(self, arrays: "_Arrays") -> Iterator[tuple[Any, Any, Tensor | None]]:
        """Batches cut from arrays: the same rows without a loop over each."""
        for start in range(0, len(arrays.rows), self.batch_size):
            batch = slice(start, start + self.batch_size)
            rows, target_rows = arrays.rows[batch], arrays.target_rows[batch]
            pieces = [
                None if v is None else torch.tensor(v[picked])
                for v, picked in (
                    (arrays.X, rows),
                    (arrays.y, target_rows),
                    (arrays.weights, target_rows),
                )
            ]
            x, target, w = (self._on_device(piece) for piece in pieces)
            yield x, target, w

    def _on_device(self, value: Any) -> Any:
        if value is None:
            return None
        device = self.net.device
        if device is None:  # legal, and means: wherever the module is
            device = next(self.net.module_.parameters()).device
        return to_tensor(value, device=device)


def _is_weighted(dataset: Any) -> bool:
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return isinstance(dataset, RowDataset) and dataset.weights is not None


@dataclass(frozen=True)
class _Arrays:
    """Rows of arrays; indexing by positions copies, so that no layer writes in them.

    ``rows`` are the positions in X, ``target_rows`` those in y and weights.
    """

    X: np.ndarray
    y: np.ndarray | None
    weights: np.ndarray | None
    rows: np.ndarray
    target_rows: np.ndarray


def _plain_arrays(net: Any, dataset: Any) -> _Arrays | None:
    """The arrays of a dataset that is nothing else; None for any other."""
    options = net.get_params_for("iterator_valid")
    if net.iterator_valid is not DataLoader or not set(options) <= {
        "batch_size",
        "num_workers",
        "pin_memory",
    }:
        return None
    if isinstance(dataset, Subset):
        inner = _plain_arrays(net, dataset.dataset)
        if inner is None:
            return None
        picked = np.asarray(dataset.indices, dtype=int)
        return replace(
            inner, rows=inner.rows[picked], target_rows=inner.target_rows[picked]
        )
    if isinstance(dataset, RowDataset):
        inner = _plain_arrays(net, dataset.dataset)
        if inner is None:
            return None
        every = np.arange(len(dataset))
        return replace(inner, y=dataset.y, weights=dataset.weights, target_rows=every)
    plain = type(dataset) is Dataset and isinstance(dataset.X, np.ndarray)
    if plain and (dataset.y is None or isinstance(dataset.y, np.ndarray)):
        every = np.arange(len(dataset.X))
        return _Arrays(dataset.X, dataset.y, None, every, every)
    return None


def _collate_weighted(collate: Callable[[list[Any]], Any], items: list[Any]) -> Any:
    """Collate rows as the net's loader would, and their weights beside them."""
    X, y = unpack_data(collate([(X, y) for X, (y, _) in items]))
    return X, (y, default_collate([weight for *_, (_, weight) in items]))


def first_rows(net: Any, dataset: Any, n: int = 3) -> Any:
    """Inputs of the first rows of a dataset, as one batch."""
    few = Subset(dataset, list(range(min(n, len(dataset)))))
    return next(iter(Batches(net, few, n)))[0]


# ------------------------------------------------------------------- training
class RecordingSplit:
    """A ``train_split`` that remembers what it did, and looks before it leaps.

    skorch calls it when the net is initialised, all callbacks have had their
    say and no step has been taken: the last moment to refuse.
    """

    def __init__(self, split: Any, check: Callable[[Any, Any], None]) -> None:
        self.split, self.check = split, check
        self.train: Any = None
        self.valid: Any = None

    def __call__(self, dataset: Any, y: Any = None, **params: Any) -> tuple[Any, Any]:
        """Split, check, remember."""
        if not self.split:
            train, valid = dataset, None
        elif y is None:
            train, valid = self.split(dataset, **params)
        else:
            train, valid = self.split(dataset, y, **params)
        with private_rng(None):
            self.check(dataset, valid)
        self.train, self.valid = train, valid
        return train, valid

    def __reduce__(self) -> Any:
        """Pickled by a callback, it is the split that it stands for."""
        return _itself, (self.split,)


def _itself(value: Any) -> Any:
    return value


def train(
    net: Any,
    X: Any,
    y: np.ndarray,
    weights: np.ndarray | None,
    check: Callable[[Any, Any], None],
    changes: tuple[type, ...] = (),
    /,
    **fit_params: Any,
) -> tuple[Any, Any]:
    """Fit a net of one's own; return the rows it learned from and those held out.

    Parameters
    ----------
    net : skorch.NeuralNet
        A clone; it is trained in place.
    X, y : data
        As skorch takes them. Where X is a dataset, y replaces its targets.
    weights : ndarray of shape (n,) or None
        Sample weights.
    check : callable
        Called before the first step with the dataset and what was held out of it;
        raises to refuse.
    changes : tuple of types
        Mixins that come before the net's own class for the time of training.

    Returns
    -------
    train, valid : Dataset, Dataset or None
    """
    original = net.train_split
    split = RecordingSplit(original, check)
    net.train_split = split
    rows = None
    if weights is not None or isinstance(X, torch.utils.data.Dataset):
        rows = RowDataset(net.get_dataset(X, y), y, weights)
    try:
        with _changed(net, X, rows, changes):
            net.fit(X, y, **fit_params)
    finally:
        net.train_split = original
    if split.train is None:  # a net with a splitting method of its own
        return rows or net.get_dataset(X, y), None
    return split.train, split.valid


@contextmanager
def _changed(
    net: Any, X: Any, rows: RowDataset | None, changes: tuple[type, ...]
) -> Iterator[None]:
    """Change what a net does; let it train on ``rows``, where it is given X.

    A class for the time of training, since every attribute of a skorch net
    becomes a parameter.
    """
    original = type(net)
    known: dict[str, Any] = {"_original": original}
    if rows is not None:
        changes = (*changes, _OnOwnRows)
        known["_job"] = _Job(X, rows)
    if not changes:
        yield
        return
    names = {"__qualname__": original.__qualname__, "__module__": original.__module__}
    bases = (_ForTraining, *changes, original)
    net.__class__ = type(original.__name__, bases, {**known, **names})
    try:
        yield
    finally:
        net.__class__ = original


class _ForTraining:
    """Mixin of nets that have another class for the time of training."""

    _original: type

    def __reduce_ex__(self, protocol: Any) -> Any:
        # callbacks that pickle the net get one of the user's class
        state: Any = self.__getstate__()
        return object.__new__, (self._original,), state


_OF_CLASSES = torch.nn.CrossEntropyLoss, torch.nn.NLLLoss


@dataclass
class _Job:
    """What `_OnOwnRows` works on, and the weights of the batch in hand."""

    X: Any
    rows: RowDataset
    weights: Tensor | None = None
    mean_weight: float = 1.0


def batch_weights(net: Any) -> Tensor | None:
    """Sample weights (b,) of the batch that a net is being trained on, if any."""
    job = getattr(net, "_job", None)
    return job.weights if isinstance(job, _Job) else None


def mean_weight(net: Any) -> float:
    """Mean sample weight of the rows that a net is being trained or validated on."""
    job = getattr(net, "_job", None)
    return job.mean_weight if isinstance(job, _Job) else 1.0


class _OnOwnRows:
    """Mixin before a skorch net: rows of a `_Job` for its X, weights in the loss.

    With weights the loss is ``Σ w·loss / Σ w``: the loader yields weights beside
    the targets; they are taken off before any callback sees the batch.
    """

    _job: _Job
    criterion_: Any
    device: Any

    def get_dataset(self, X: Any, y: Any = None) -> Any:
        if X is self._job.X:
            return self._job.rows
        return super().get_dataset(X, y)  # type: ignore[misc]

    def get_iterator(self, dataset: Any, training: bool = False) -> Any:
        loader = super().get_iterator(dataset, training=training)  # type: ignore[misc]
        if not _is_weighted(dataset):
            return _Unweighted(loader, self._job, None)
        loader.collate_fn = partial(_collate_weighted, loader.collate_fn)
        return _Unweighted(loader, self._job, _mean_weight(dataset))

    def get_loss(self, y_pred: Any, y_true: Any, *args: Any, **kw: Any) -> Any:
        loss_of = super().get_loss  # type: ignore[misc]
        if self._job.weights is None:
            return loss_of(y_pred, y_true, *args, **kw)
        # torch.compile wraps criteria, too
        criterion = getattr(self.criterion_, "_orig_mod", self.criterion_)
        reduction = criterion.reduction
        criterion.reduction = "none"
        try:
            loss = loss_of(y_pred, y_true, *args, **kw)
        finally:
            criterion.reduction = reduction
        weights = to_tensor(self._job.weights, device=self.device).to(loss)
        per_row = loss.reshape(len(weights), -1).mean(1)
        if reduction == "sum":
            return (per_row * weights).sum() * (loss.numel() / len(weights))
        of_classes = _class_weights(criterion, y_true, per_row)
        return (per_row * weights).mean() / self._job.mean_weight / of_classes.mean()


def _class_weights(criterion: Any, y: Any, losses: Tensor) -> Tensor:
    """Weights of labels, whose sum torch divides a mean of losses by."""
    if not isinstance(criterion, _OF_CLASSES):
        return torch.ones_like(losses)
    known = (y >= 0).to(losses)
    weight = getattr(criterion, "weight", None)
    if weight is None:
        return known
    return known * weight[y.clamp(min=0).to(weight.device)].to(losses)


def _mean_weight(dataset: Any) -> float:
    indices: Any = slice(None)
    while isinstance(dataset, Subset):
        parent, picked = dataset.dataset, np.asarray(dataset.indices)
        indices = picked if isinstance(indices, slice) else picked[indices]
        dataset = parent
    return float(np.mean(dataset.weights[indices]))


class _Unweighted:
    """A loader that yields ``(X, y)`` and shelves the weights, or that none came."""

    def __init__(self, loader: Any, job: _Job, mean_weight: float | None) -> None:
        self.loader, self.job, self.mean_weight = loader, job, mean_weight

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            X, y = unpack_data(batch)
            self.job.weights = None
            if self.mean_weight is not None:
                y, self.job.weights = y
                self.job.mean_weight = self.mean_weight
            yield X, y


def copied(net: Any) -> Any:
    """A net of its own weights; everything that does not change is shared.

    ``copy.deepcopy`` of a skorch net goes through pickle, which refuses modules
    that were defined inside a function.
    """
    twin = object.__new__(type(net))
    twin.__dict__.update(net.__dict__)
    for name in net.__dict__:
        if isinstance(net.__dict__[name], torch.nn.Module) and name.endswith("_"):
            twin.__dict__[name] = copy.deepcopy(net.__dict__[name])
    return twin


def take_rows(X: Any, indices: np.ndarray) -> Any:
    """Rows of whatever skorch indexes, datasets among it."""
    if isinstance(X, torch.utils.data.Dataset):
        return Subset(X, indices.tolist())
    return multi_indexing(X, indices)
