"""Data sets: samples with targets and sample weights, their batches and dtypes.

Estimators validate array-likes. Tuples, torch datasets and dicts of arrays reach skorch
unchanged. The skorch net's own validation loader creates the batches.
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Real
from typing import Any, cast

import numpy as np
import torch
from scipy.sparse import issparse
from sklearn.base import clone
from sklearn.utils.validation import _check_method_params
from skorch import NeuralNet
from skorch.dataset import Dataset, get_len, unpack_data
from skorch.helper import SliceDict
from skorch.utils import multi_indexing, to_tensor
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, default_collate

from sklaplace.core.random import private_rng
from sklaplace.core.trees import leaves, mapped
from sklaplace.data.arrays import as_array, as_numbers, check_finite, detached
from sklaplace.data.stored import StoredArray
from sklaplace.data.streams import (
    RowStream,
    Samples,
    is_stream,
    require_choice,
    some_of,
)

Batch = tuple[Any, Any, Tensor | None]
# Loader options that leave out, repeat or permute samples. For evaluation, each sample
# must occur exactly once, in order.
_CHOOSING_OPTIONS = {"shuffle", "drop_last", "sampler", "batch_sampler"}
# If a loader has only these options, its batches are slices of the arrays.
_SLICING_OPTIONS = {"batch_size", "num_workers", "pin_memory"}


class RowDataset(Dataset):
    """Inputs of another dataset, with targets and sample weights from arrays.

    Items are ``(X, y)``, or ``(X, (y, weight))`` with sample weights.
    """

    def __init__(
        self, dataset: Samples, y: np.ndarray, weights: np.ndarray | None
    ) -> None:
        # skorch's callbacks read X and y
        super().__init__(getattr(dataset, "X", dataset), y, length=len(y))
        self.dataset, self.weights = dataset, weights

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[object, object]:
        """Return the inputs and the target of a sample, and its weight if any."""
        X, _ = unpack_data(self.dataset[index])  # raises if the item has no y
        y, weights = self.y[index], self.weights
        return X, y if weights is None else (y, weights[index])


def sample_weights(dataset: object) -> np.ndarray | None:
    """Return the sample weights (n,) of a dataset or subset, or None."""
    if isinstance(dataset, Subset):
        weights = sample_weights(dataset.dataset)
        indices = np.asarray(dataset.indices, dtype=int)
        return None if weights is None else weights[indices]
    if isinstance(dataset, RowDataset | RowStream):
        return dataset.weights
    return None


def collate_weighted(
    collate: Callable[[list[Any]], Any], items: list[Any]
) -> tuple[Any, Any]:
    """Collate items ``X, (y, weight)``, with the loader's ``collate`` for X and y."""
    X, y = unpack_data(collate([(X, y) for X, (y, _) in items]))
    return X, (y, default_collate([weight for *_, (_, weight) in items]))


@dataclass(frozen=True)
class Batches:
    """Batches ``(x, y, weights)`` of a dataset, in order, as a reusable iterable.

    Attributes
    ----------
    net : skorch.NeuralNet
        Net with ``iterator_valid`` and its options. Options that leave out or permute
        samples are ignored.
    dataset : Dataset
        Samples, with or without sample weights.
    batch_size : int
        Samples per batch.
    """

    net: NeuralNet
    dataset: Samples
    batch_size: int

    def __iter__(self) -> Iterator[Batch]:
        """Yield inputs, targets and weights, sliced from arrays where possible."""
        options = self.net.get_params_for("iterator_valid")
        options = {k: v for k, v in options.items() if k not in _CHOOSING_OPTIONS}
        is_plain = self.net.iterator_valid is DataLoader
        can_slice = is_plain and options.keys() <= _SLICING_OPTIONS
        arrays = _arrays(self.dataset) if can_slice else None
        batches = self._sliced(arrays) if arrays else self._loaded(options)
        for x, y, w in batches:
            yield self._on_device(x), self._on_device(y), self._on_device(w)

    def __len__(self) -> int:
        return math.ceil(len(self.dataset) / self.batch_size)

    def _sliced(self, arrays: "_Arrays") -> Iterator[Batch]:
        """Yield batches of arrays without a loop over samples."""
        for start in range(0, len(self.dataset), self.batch_size):
            yield _selected(arrays, slice(start, start + self.batch_size))

    def _loaded(self, options: dict[str, object]) -> Iterator[Batch]:
        """Yield the batches of the skorch net's loader.

        A loader that does not yield each sample once raises an error. The number of
        samples left also ends a loader that never stops.
        """
        options["batch_size"] = self.batch_size
        loader = self.net.iterator_valid(self.dataset, **options)
        if isinstance(loader, DataLoader):  # otherwise it uses the global generator
            loader.generator = torch.Generator()
        is_weighted = sample_weights(self.dataset) is not None
        if is_weighted:
            loader.collate_fn = partial(collate_weighted, loader.collate_fn)
        n_left = len(self.dataset)  # negative if there are too many
        for batch in loader:
            x, y = unpack_data(batch)
            # y first, because the length of packed sequences is not the number of rows
            # and the first value with an axis, because scalars have no length
            n_left -= next(len(v) for v in leaves((y, x)) if np.ndim(v))
            if n_left < 0:
                break
            # with weights, y is a pair of targets and weights
            yield (x, *y) if is_weighted else (x, y, None)
        if n_left:
            n_samples = len(self.dataset)
            count = "more than" if n_left < 0 else f"{n_samples - n_left} of"
            raise ValueError(
                f"iterator_valid={type(loader).__name__} yields {count} {n_samples} "
                "samples. Use a loader that yields each sample once, in order."
            )

    def _on_device(self, value: object) -> Any:
        """Move a part of a batch to the network's device, as tensors."""
        if value is None:
            return None
        # device=None means the device of the module
        device = self.net.device or next(self.net.module_.parameters()).device
        try:
            return to_tensor(value, device=device)
        except TypeError as error:  # strings
            raise TypeError(
                f"A batch cannot be converted to tensors: {error}. Leave out columns "
                "of strings. An IterableDataset must yield (x, y)."
            ) from error


# inputs, targets and weights, each with the row index of every sample in the dataset
_Arrays = list[tuple[np.ndarray | StoredArray | None, np.ndarray]]


def _arrays(dataset: Any) -> _Arrays | None:
    """Return the arrays of a dataset, or None for a dataset with custom code.

    A subset, or a dataset with other targets, refers to the arrays of the dataset
    inside it. Only its row indices, or its targets and weights, are its own.
    """
    if type(dataset) is Dataset:
        X, y, rows = dataset.X, dataset.y, np.arange(len(dataset))
        is_array = isinstance(X, np.ndarray | StoredArray)
        if not (is_array and isinstance(y, np.ndarray | None)):
            return None
        # skorch's datasets have no sample weights
        return [(X, rows), (y, rows), (None, rows)]
    inner = _arrays(dataset.dataset) if type(dataset) in (Subset, RowDataset) else None
    if inner is None:
        return None
    if isinstance(dataset, Subset):
        indices = np.asarray(dataset.indices, dtype=int)
        return [(values, rows[indices]) for values, rows in inner]
    # a RowDataset, with its own targets and weights
    inputs, rows = inner[0], np.arange(len(dataset))
    return [inputs, (dataset.y, rows), (dataset.weights, rows)]


def _selected(arrays: _Arrays, samples: slice | list[int]) -> Batch:
    """Return inputs, targets and weights of some samples as contiguous tensors."""
    # indexing by an array copies, so in-place layers do not change user data
    x, y, weights = (
        None if v is None else torch.from_numpy(np.ascontiguousarray(v[rows[samples]]))
        for v, rows in arrays
    )
    return x, y, weights


class ArrayRows(torch.utils.data.Dataset[Any]):
    """Samples of arrays, of which a loader reads one batch at a time.

    Parameters
    ----------
    arrays : list of pairs
        Inputs, targets and weights; see `_arrays`.
    """

    def __init__(self, arrays: _Arrays) -> None:
        self.arrays = arrays

    @classmethod
    def of(cls, dataset: Samples) -> "ArrayRows | None":
        """Return the samples, or None for other data than arrays of numbers."""
        arrays = _arrays(dataset)
        values = [v for v, _ in arrays or [] if v is not None]
        # a dataset without targets has only inputs
        are_numbers = all(
            isinstance(v, np.ndarray) and v.dtype.kind in "biuf" and v.dtype.isnative
            for v in values
        )
        return cls(arrays) if arrays and len(values) > 1 and are_numbers else None

    def __getitems__(self, indices: Iterable[int]) -> list[Any]:
        """Return a batch of inputs and targets; weights form a pair with the targets.

        torch's loaders call this method instead of ``__getitem__``.
        """
        X, y, weights = _selected(self.arrays, list(indices))
        return [X, y if weights is None else (y, weights)]


class ArrayLoader(DataLoader[Any]):
    """torch's loader, which reads a batch of arrays at once.

    Usually, the samples of a batch are read one by one and then stacked. This takes
    longer than training a small network on them. The batches are the same.
    """

    @staticmethod
    def of(loader: Any) -> Any:
        """Return a loader that reads batches at once if it is torch's own loader."""
        if type(loader) is DataLoader:
            loader.__class__ = ArrayLoader
        return loader

    def __iter__(self) -> Any:
        """Yield the batches of `DataLoader`, with the same random numbers."""
        collate: Any = self.collate_fn
        if isinstance(collate, partial) and collate.func is collate_weighted:
            (collate,) = collate.args
        in_batches = not self.num_workers and self.batch_sampler is not None
        is_default = in_batches and collate is default_collate
        rows = ArrayRows.of(cast(Samples, self.dataset)) if is_default else None
        if rows is None:
            return super().__iter__()
        loader = copy.copy(self)
        # not by assignment, which torch refuses for the dataset
        vars(loader).update(dataset=rows, collate_fn=_whole_batch)
        return DataLoader.__iter__(loader)


def _whole_batch(batch: list[Any]) -> list[Any]:
    return batch


def first_rows(net: NeuralNet, dataset: Samples, n: int = 3) -> Any:
    """Return the inputs of the first n samples of a dataset as one batch."""
    # the length of a stream may be unknown
    n = n if is_stream(dataset) else min(n, len(dataset))
    first = some_of(dataset, list(range(n)))
    return next(iter(Batches(net, first, n)))[0]  # without targets and weights


# Maximum number of samples for inferring the outputs of a network.
N_SPREAD = 16


def spread_rows(net: NeuralNet, dataset: Samples) -> Any:
    """Return a few inputs, spread over a dataset and including the first sample."""
    n = min(N_SPREAD, len(dataset))
    rows = np.linspace(0, len(dataset) - 1, n).round().astype(int)
    # every fourth row first, so that the first few rows are spread, too
    order = sorted(range(n), key=lambda place: place % 4)
    # the inputs of a single batch
    return next(iter(Batches(net, some_of(dataset, rows[order].tolist()), n)))[0]


def take_rows(X: Any, indices: Any) -> Any:
    """Select samples of any data that skorch can index, including torch datasets.

    Stored arrays are not read.
    """
    require_choice(X)
    if _is_dataset(X):
        return Subset(X, indices.tolist())
    return X.part(indices) if isinstance(X, StoredArray) else multi_indexing(X, indices)


@dataclass(frozen=True)
class TrainingData:
    """Samples encoded for the network.

    Attributes
    ----------
    X, y, sample_weight, groups
        Training samples. Weights and groups are optional.
    validation : TrainingData or None
        Held-out samples that the network is not trained on.
    fit_params : dict
        Arguments for ``fit`` of the skorch net.
    """

    X: Any
    y: np.ndarray
    sample_weight: np.ndarray | None
    groups: np.ndarray | None = None
    validation: "TrainingData | None" = None
    fit_params: dict[str, Any] = field(default_factory=dict)

    def take(
        self, rows: np.ndarray, take: Callable[..., Any] = take_rows
    ) -> "TrainingData":
        """Select training samples; ``take(X, rows)`` selects their inputs."""
        weights, groups = self.sample_weight, self.groups
        return TrainingData(
            take(self.X, rows),
            self.y[rows],
            None if weights is None else weights[rows],
            None if groups is None else groups[rows],
        )

    def split(self, train: np.ndarray, held_out: np.ndarray) -> "TrainingData":
        """Return training samples at some positions, with others held out.

        Arguments of ``fit`` with one entry per sample are split, too.
        """
        return replace(
            self.take(train),
            validation=self.take(held_out),
            fit_params=_check_method_params(self.y, self.fit_params, indices=train),
        )

    def weighted(self, sample_weight: np.ndarray) -> "TrainingData":
        """Set sample weights, and drop samples with zero weight."""
        is_weighted = sample_weight != 0
        if not is_weighted.any():
            raise ValueError(
                "The criterion ignores all labels of y, or their class_weight or "
                "sample_weight is zero. Pass some rows with other labels."
            )
        data = replace(self, sample_weight=sample_weight)
        return data if is_weighted.all() else data.take(np.flatnonzero(is_weighted))

    def dataset(self, net: NeuralNet) -> Samples:
        """Return the skorch net's dataset, including any sample weights."""
        dataset = net.get_dataset(self.X, self.y)
        # skorch ignores y if X is a dataset
        if self.sample_weight is None and not _is_dataset(self.X):
            return dataset
        kind = RowStream if is_stream(dataset) else RowDataset
        return kind(dataset, self.y, self.sample_weight)


def _is_dataset(X: object) -> bool:
    return isinstance(X, torch.utils.data.Dataset)


def is_opaque(X: object) -> bool:
    """Return whether X is a dict, dataset or tuple, which skorch receives unchanged.

    As in scikit-learn, a tuple of tuples of numbers counts as an array.
    """
    if isinstance(X, tuple) and all(isinstance(row, tuple) for row in X):
        return not isinstance(next(leaves(X), None), Real)
    is_known = _is_dataset(X) or isinstance(X, (Mapping, tuple, SliceDict))
    return is_known and not issparse(X)  # scipy's DOK format is a dict


def as_given(X: object, dtype: np.dtype) -> Any:
    """Prepare data that reaches skorch without validation.

    Tensors are detached, because a second backward pass through their graph would fail.
    Indices of subsets become integers. Mappings, such as the output of a tokenizer,
    become dicts of arrays. Floats in lists are converted to the dtype of the network.

    Raises
    ------
    ValueError
        If a subset has a boolean mask, if the arrays of a mapping have different
        numbers of samples, or if the lists of a mapping have different lengths.
    """
    if isinstance(X, Mapping):
        X = _as_dict(X, dtype)
    if not is_stream(X):
        count_rows(X)  # raises for empty data
    if type(X) in (dict, tuple, SliceDict):
        return mapped(detached, X)
    return _with_integer_indices(X)


def _as_dict(X: Mapping[str, Any], dtype: np.dtype) -> dict[str, Any]:
    """Return a dict of arrays, with lists converted to arrays."""
    # a dict without lists stays the same object
    if not isinstance(X, dict) or any(isinstance(v, list) for v in X.values()):
        X = {key: _as_array(key, value, dtype) for key, value in X.items()}
    # skorch only counts the samples of `input_ids`
    lengths = {key: get_len(value) for key, value in X.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(
            f"X has arrays of different numbers of rows: {lengths}. Pass one row per "
            "sample in each array."
        )
    return X


def _as_array(key: object, value: object, dtype: np.dtype) -> Any:
    """Convert a list among the inputs to an array, with real numbers of ``dtype``."""
    if not isinstance(value, list):
        return value
    array = as_array(value, f"X[{key!r}]")  # raises if sequences are not padded
    return array.astype(dtype) if array.dtype.kind == "f" else array


def _with_integer_indices(X: object) -> Any:
    """Convert the indices of a subset to integers; skorch does not accept tensors."""
    if type(X) is not Subset:
        return X
    indices = np.asarray(X.indices)
    if indices.size and indices.dtype.kind not in "iu":
        raise ValueError(
            f"X is a Subset with indices of dtype {indices.dtype}. Pass integers. For "
            "a boolean mask, use Subset(dataset, numpy.flatnonzero(mask))."
        )
    return Subset(_with_integer_indices(X.dataset), indices.astype(int).tolist())


def count_rows(X: Any) -> int:
    """Return the number of samples; raise ValueError for empty data."""
    if is_stream(X):
        raise ValueError(
            "X is an IterableDataset, so its number of samples is unknown. Call this "
            "method for each batch of a torch.utils.data.DataLoader."
        )
    n = len(X) if _is_dataset(X) else get_len(X)
    if n == 0:
        raise ValueError("X has 0 rows. Pass at least one.")
    return int(n)


@dataclass(frozen=True)
class InputType:
    """Dtype of a network's weights, and whether the network embeds integers.

    Attributes
    ----------
    dtype : numpy.dtype
        Dtype of the first floating-point parameter.
    keeps_integers : bool
        Whether integer inputs stay integers, as embedding layers require.
    """

    dtype: np.dtype
    keeps_integers: bool

    def inputs(self, X: np.ndarray, name: str = "X") -> np.ndarray:
        """Convert inputs to the network's dtype, or to int64 for an embedding."""
        X = as_numbers(X, name)
        if self.keeps_integers and X.dtype.kind in "iu":
            return X.astype(np.int64)
        return self.floats(X, name)

    def floats(self, values: np.ndarray, name: str) -> np.ndarray:
        """Cast values to the network's dtype; raise ValueError if not finite.

        Writable values of this dtype are not copied, because `Batches` copies each
        batch. Tensors cannot share the memory of read-only arrays, so these are copied.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            cast = np.require(values, self.dtype, "W")
            total = cast.sum()  # finite only if all values are finite
        if not (np.isfinite(total) or np.isfinite(cast).all()):
            check_finite(values, name)  # otherwise only the cast is not finite
            raise ValueError(
                f"{name} has values up to {np.abs(values).max():.0e}, too large for "
                f"{self.dtype}, the dtype of the network. Scale {name} "
                "(StandardScaler in a Pipeline), or use a float64 network."
            )
        return cast


def input_type(net: NeuralNet) -> InputType:
    """Return the `InputType` of a skorch net, or of the default network for None."""
    if net is None:
        return InputType(np.dtype(np.float64), False)
    module = module_of(net)
    floating = [p.dtype for p in module.parameters() if p.is_floating_point()]
    # the first dtype, or float32 without floating-point parameters
    name = str([*floating, torch.float32][0]).removeprefix("torch.")
    embeddings = nn.Embedding | nn.EmbeddingBag
    embeds = any(isinstance(m, embeddings) for m in module.modules())
    # numpy has no bfloat16, but float32 represents all bfloat16 values
    return InputType(np.dtype(name if hasattr(np, name) else "float32"), embeds)


def module_of(net: NeuralNet) -> nn.Module:
    """Return the module of a net, or an empty one if its sizes depend on data.

    For a net that is not initialised, a clone is initialised on the CPU.
    """
    module = getattr(net, "module_", net.module)
    if isinstance(module, nn.Module):
        return module
    net = clone(net)
    # callbacks could print or write files
    net.verbose, net.callbacks, net.device = 0, "disable", "cpu"
    with private_rng(0):  # keeps the state of torch's generators
        try:
            return net.initialize().module_
        except (TypeError, ValueError, RuntimeError):
            return nn.Module()  # a callback sets its sizes at the start of training
