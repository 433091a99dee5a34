"""Samples: inputs, targets and weights, checked and cast for the network.

Arrays are validated as in scikit-learn. Dicts of arrays and torch datasets are passed
to skorch unchanged.
"""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, cast

import numpy as np
from scipy.sparse import issparse
from sklearn.base import BaseEstimator
from sklearn.utils import _safe_indexing, check_random_state
from sklearn.utils.validation import (
    _check_sample_weight,
    check_array,
    check_consistent_length,
    validate_data,
)
from skorch import NeuralNet
from skorch.helper import SliceDataset
from torch import Tensor, nn
from torch.utils.data import DataLoader

from sklaplace.core.checks import check_arrays, naming, warn_user
from sklaplace.core.trees import leaves, mapped
from sklaplace.data.arrays import as_array, as_labels, check_columns, detached
from sklaplace.data.dataset import (
    InputType,
    TrainingData,
    as_given,
    count_rows,
    input_type,
    is_opaque,
    take_rows,
)
from sklaplace.data.stored import StoredArray, is_stored
from sklaplace.data.streams import is_stream
from sklaplace.data.table import Table, is_frame
from sklaplace.estimators.targets.base import Targets
from sklaplace.estimators.training.trainer import check_applicable

# A mean of the positive weights below this number or above its inverse triggers a
# warning.
SMALLEST_MEAN_WEIGHT = 0.1


@dataclass(frozen=True)
class Samples:
    """Arguments of ``fit``, as passed by the user.

    Attributes
    ----------
    X, y, sample_weight, groups
        Training samples.
    X_val, y_val, groups_val
        Held-out samples that the network is not trained on, or None.
    fit_params : dict
        Arguments for ``fit`` of the skorch net.
    classes : ndarray or None
        All classes, including classes that do not occur in ``y``.
    is_part : bool
        Whether this is one of several fits. If True, Ctrl-C raises an error.
    """

    X: Any
    y: Any
    sample_weight: Any = None
    groups: Any = None
    _: KW_ONLY
    X_val: Any = None
    y_val: Any = None
    groups_val: Any = None
    fit_params: dict[str, Any] = field(default_factory=dict)
    classes: np.ndarray | None = None
    is_part: bool = False

    def check_held_out(self) -> None:
        """Raise ValueError if held-out samples are incomplete."""
        if (self.X_val is None) != (self.y_val is None):
            missing = "y_val" if self.y_val is None else "X_val"
            raise ValueError(
                f"{missing} is missing. Pass both X_val and y_val, or neither."
            )
        if self.X_val is None and self.groups_val is not None:
            raise ValueError("groups_val has no samples. Pass X_val and y_val, too.")


def select(data: TrainingData, rows: np.ndarray) -> TrainingData:
    """Select samples in their original form, with their targets and weights."""
    return data.take(rows, select_inputs)


def select_inputs(X: Any, rows: np.ndarray) -> Any:
    """Select samples in their original form."""
    return take_rows(X, rows) if is_opaque(X) else _safe_indexing(X, rows)


def warn_of_seen_groups(seen: np.ndarray | None, held_out: np.ndarray | None) -> None:
    """Warn if held-out samples may belong to groups of training samples.

    ``seen`` and ``held_out`` are the groups of the training and held-out samples, if
    the user passed any.
    """
    if seen is not None and (held_out is None or np.isin(held_out, seen).any()):
        warn_user(
            "fit received groups, but groups_val is missing or has groups of X, so the "
            "uncertainty may be too small for new groups. Hold out whole groups, and "
            "pass groups_val."
        )


def warn_of_other_ranges(X: Any, X_val: Any) -> None:
    """Warn if held-out and training samples seem to have different units.

    Different units are assumed if the median of a held-out column is outside the range
    of the training column by more than half the width of this range, which is rare for
    samples from the same distribution. Only tables are compared.
    """
    if not all(isinstance(x, np.ndarray) and x.ndim == 2 for x in (X, X_val)):
        return
    low, high, middle = X.min(axis=0), X.max(axis=0), np.median(X_val, axis=0)
    margin = (high - low) / 2
    is_off = (middle < low - margin) | (middle > high + margin)
    if is_off.any():
        warn_user(
            f"The median of {is_off.sum()} of {len(margin)} columns of X_val is far "
            "outside the range of X. A Pipeline transforms X_val only with "
            "Pipeline(steps, transform_input=['X_val'])."
        )


def weighted_data(
    targets: Targets,
    X: Any,
    y: Any,
    sample_weight: np.ndarray | None,
    groups: np.ndarray | None = None,
    name: str = "y",
) -> TrainingData:
    """Return encoded samples and weights, without samples of zero weight.

    A weight is the product of the sample weight and of the weight that the targets
    imply, such as zero for ignored labels.

    Parameters
    ----------
    targets : Targets
        Encoder of ``y``.
    X, y
        Checked samples.
    sample_weight : ndarray of shape (n,) or None
        Sample weights from `as_weights`.
    groups : ndarray of shape (n,) or None
        Groups of the samples.
    name : str
        Name of the targets for messages.
    """
    data = TrainingData(X, targets.encode(y, name), None, groups)
    weights = targets.sample_weight(data.y)  # None if all are one
    if sample_weight is not None:
        weights = sample_weight if weights is None else sample_weight * weights
    return data if weights is None else data.weighted(weights)


@naming(sample_weight="sample_weight")
def as_weights(sample_weight: Any, n: int) -> np.ndarray | None:
    """Return n sample weights as float64; raise an error if they are not numbers."""
    if sample_weight is None:
        return None
    check_arrays(sample_weight=sample_weight)
    weights = _check_sample_weight(
        detached(sample_weight),
        np.empty((n, 1)),  # in place of X, of which only the length matters
        dtype=np.float64,
        ensure_non_negative=True,
    )
    if not weights.any():
        raise ValueError("Sample weights must contain at least one non-zero number.")
    return cast(np.ndarray, weights)


def as_groups(groups: Any, n: int, name: str = "groups") -> np.ndarray | None:
    """Return the group labels of n samples; raise ValueError for missing labels."""
    if groups is None:
        return None
    labels = as_labels(groups, name)
    if labels.shape != (n,):
        raise ValueError(f"{name} has shape {labels.shape}. Pass one per row: ({n},).")
    return labels


def warn_of_weight_scale(sample_weight: Any) -> None:
    """Warn about weights with a mean far from one, unless they are whole numbers.

    The warning is shown only once, because AdaBoost fits its estimator many times with
    such weights.
    """
    if sample_weight is None:
        return
    weights = as_array(detached(sample_weight), "sample_weight")
    if weights.dtype.kind != "f" or not np.isfinite(weights).all():
        return  # weights are counts, or are rejected later
    weights = weights[weights > 0]
    if (weights == np.round(weights)).all():
        return  # counts stored as floats
    mean = float(weights.mean())
    if not SMALLEST_MEAN_WEIGHT <= mean <= 1 / SMALLEST_MEAN_WEIGHT:
        warn_user(
            f"The mean of sample_weight is {mean:.2g}, but weights are interpreted as "
            f"counts. Divide them by their mean, unless {len(weights):,} samples "
            f"should count as {weights.sum():.3g}.",
            once=True,
        )


@dataclass(frozen=True)
class InputForm(InputType):
    """Dtype of the inputs, and their keys or number of axes in ``fit``.

    Attributes
    ----------
    n_axes : int or None
        Number of axes of the inputs in ``fit``. None before ``fit``, or if only the
        network can check the inputs.
    keys : frozenset of str or None
        Keys of the inputs in ``fit``, if they were a dict. Many networks ignore missing
        or unknown keys.
    takes_arrays : bool
        Whether all inputs are read into memory, which the default network requires.
    table : Table or None
        Encoding of data frames for the default network, if it was fitted to a data
        frame.
    """

    n_axes: int | None = None
    keys: frozenset[str] | None = None
    takes_arrays: bool = False
    table: Table | None = None

    @classmethod
    @naming(X="X")
    def of(cls, net: NeuralNet, X: Any) -> "InputForm":
        """Return the input form for a skorch net, or for the default net."""
        table = Table.of(X) if net is None and is_frame(X) else None
        return cls(**vars(input_type(net)), takes_arrays=net is None, table=table)

    def seen(self, X: Any) -> "InputForm":
        """Return a copy with the keys or number of axes of the training inputs."""
        keys = frozenset(X) if isinstance(X, dict) else None
        return replace(self, keys=keys, n_axes=None if is_opaque(X) else len(X.shape))

    @naming(X="X", y="y")
    def check_samples(
        self, owner: BaseEstimator, X: Any, y: Any, *, reset: bool, allow_nd: bool
    ) -> tuple[Any, Any]:
        """Return checked and cast inputs, and checked targets.

        Parameters
        ----------
        owner : BaseEstimator
            Estimator that stores the number and names of features for scikit-learn.
        X, y
            Samples as passed by the user.
        reset : bool
            Whether the samples are training samples.
        allow_nd : bool
            Whether targets may have more than two axes.
        """
        check_arrays(X=X, y=y)
        X = self._checked(owner, X, reset=reset)
        y = _as_targets(y, allow_nd=allow_nd or is_opaque(X))
        if not is_opaque(X):
            check_consistent_length(X, y)
            return X, y
        # the length of a stream is checked while it is read
        n_rows = len(y) if is_stream(X) else count_rows(X)
        if n_rows != len(y):
            raise ValueError(
                f"X has {n_rows} rows, but y has {len(y)}. Pass one target per row."
            )
        # an earlier fit to arrays may have set these, which do not apply to such inputs
        for name in ("n_features_in_", "feature_names_in_") if reset else ():
            vars(owner).pop(name, None)
        return X, y

    @naming(X="X")
    def check_inputs(self, owner: BaseEstimator, X: Any, net: NeuralNet) -> Any:
        """Return checked and cast inputs for predictions of a trained net."""
        X = self._checked(owner, X, reset=False)
        count_rows(X)  # raises for streams
        if self.keys and isinstance(X, dict) and self.keys != X.keys():
            raise ValueError(
                f"X has keys {sorted(X)}. Pass the keys {sorted(self.keys)} of fit."
            )
        if is_opaque(X) or self.n_axes is None:  # only the net can check them
            check_applicable(net, X)
        return X

    def _checked(self, owner: BaseEstimator, X: Any, *, reset: bool) -> Any:
        """Return checked inputs, cast unless only the network can read them."""
        check_loader(X)
        check_arrays(X=X)
        if is_opaque(X):
            return as_given(X, self.dtype)
        return self._cast(owner, X, reset=reset)

    def _cast(
        self, owner: BaseEstimator, X: Any, *, reset: bool
    ) -> np.ndarray | StoredArray:
        """Return checked array-like inputs in the dtype of the network.

        A table encodes data frames, and a `StoredArray` is cast when it is read. All
        other inputs become arrays. Checks follow the order of the conversions.
        `validate_data` also sets or checks the names and number of features of
        ``owner``; ``reset`` says which.
        """
        options = {"accept_sparse": "csr", "dtype": None, "ensure_all_finite": False}
        if self.table is not None and is_frame(X):
            validate_data(owner, X, reset=reset, skip_check_array=True)
            return self.table.encoded(X)
        # columns that were not all numeric in ``fit`` must be encoded
        if self.table is not None and not self.table.is_plain:
            raise TypeError(
                f"X is of type {type(X).__name__}, but fit received a data frame with "
                "strings, categories or missing values. Pass a data frame with the "
                "same columns."
            )
        if issparse(X):
            X = check_array(X, **options)  # to a format that supports slices
        if is_stored(X):
            return self._stored(owner, X, reset=reset)
        check_columns(X, "X")
        # only the first entry of a sequence is read, which can be long
        is_sequence = isinstance(X, Sequence) or getattr(X, "ndim", 0) == 1
        if is_sequence and isinstance(next(iter(X), None), str):
            raise TypeError(
                "X has one string per row. Convert texts to numbers (TfidfVectorizer "
                "in a Pipeline), or pass the dict of arrays of a tokenizer."
            )
        X = np.asarray(X) if isinstance(X, SliceDataset) else detached(X)
        # scikit-learn would mistake another axis for another number of features, but it
        # explains vectors better
        if getattr(X, "ndim", 0) > 1:
            self._check_axes(X)
        # values are checked after the cast, which turns None and "nan" into NaN
        X = validate_data(owner, X, reset=reset, allow_nd=True, **options)
        X = X.toarray() if issparse(X) else X  # from a frame with sparse columns
        self._check_axes(X)
        return self.inputs(X)

    def _stored(
        self, owner: BaseEstimator, X: Any, *, reset: bool
    ) -> np.ndarray | StoredArray:
        """Return stored inputs that are cast when read, and check training inputs.

        For the default network, training inputs are read into memory instead.
        """
        if X.ndim < 2:
            raise ValueError(
                f"X has the shape {X.shape}. Pass an array of shape (n, ...), with one "
                "row per sample."
            )
        self._check_axes(X)
        inputs = StoredArray(X, self.inputs)
        count_rows(inputs)  # raises if there are none
        # sets or checks the number of features of `owner`
        validate_data(owner, X, reset=reset, skip_check_array=True)
        if reset and self.takes_arrays:
            return np.asarray(inputs)
        # reading a block raises for non-finite values; new inputs are read only once
        for _ in inputs.blocks() if reset else ():
            pass
        return inputs

    def _check_axes(self, X: Any) -> None:
        """Raise ValueError if the number of axes differs from that in ``fit``."""
        if self.n_axes is not None and X.ndim != self.n_axes:
            raise ValueError(
                f"X has shape {tuple(X.shape)} with {X.ndim} axes, but had "
                f"{self.n_axes} in fit. Pass samples of the same shape as in fit."
            )

    def cast_tensors(self, x: Any, module: nn.Module) -> Any:
        """Cast tensors to the dtype of a trained module, in a differentiable way.

        Raise an error if an input is not a tensor with at least one row. Integers are
        kept if the module takes them, as an embedding does.
        """
        tensors = [] if issparse(x) else list(leaves(x))
        if not tensors or not all(isinstance(tensor, Tensor) for tensor in tensors):
            raise TypeError(
                f"x is of type {type(x).__name__}, but predictive needs tensors. Use "
                "torch.as_tensor(x), or latent_mean_and_variance for arrays."
            )
        if any(tensor.ndim == 0 or len(tensor) == 0 for tensor in tensors):
            raise ValueError("x has no rows. Pass a tensor with at least one row.")
        dtype = next(p.dtype for p in module.parameters() if p.is_floating_point())

        def cast(leaf: Tensor) -> Tensor:
            is_kept = self.keeps_integers and not leaf.is_floating_point()
            return leaf if is_kept else leaf.to(dtype)

        return mapped(cast, x)


def check_loader(X: Any, method: str = "fit") -> None:
    """Raise TypeError for a DataLoader or a Hugging Face dataset.

    The message says what to pass to ``method`` instead. Hugging Face streams are
    accepted.
    """
    # the type is read from its attributes, because datasets is not imported here
    if hasattr(X, "with_format") and not is_stream(X):
        raise TypeError(
            f"X is a Hugging Face {type(X).__name__}. Pass the arguments of forward "
            "as arrays: X = dataset.select_columns(['input_ids', 'attention_mask'])"
            ".with_format('numpy')[:] and y = dataset['label']. If X is a DatasetDict, "
            "select one split first."
        )
    if isinstance(X, DataLoader):
        raise TypeError(
            f"X is a DataLoader. Pass its dataset to {method}, with all targets in an "
            f"array: {method}(loader.dataset, targets). Pass batch_size to this "
            "estimator. For predictions, call the method for each batch of the loader."
        )


def _as_targets(y: Any, *, allow_nd: bool) -> Any:
    """Return targets as an array or sparse matrix, without checking their values."""
    options: dict[str, Any] = {"ensure_2d": False, "ensure_all_finite": False}
    options |= {"accept_sparse": "csr", "allow_nd": allow_nd, "input_name": "y"}
    # scikit-learn would convert pandas' nullable integers and booleans to floats
    dtypes: Any = getattr(y, "dtypes", getattr(y, "dtype", None))
    # kinds of numpy: i, u and b are signed and unsigned integers and booleans
    dtype_kinds = [getattr(dtype, "kind", "") for dtype in np.atleast_1d(dtypes)]
    y = np.asarray(y) if {*dtype_kinds} <= {*"iub"} and not issparse(y) else detached(y)
    return check_array(y, dtype=None, **options)


def draw_seed(random_state: Any) -> int:
    """Draw a seed from ``random_state``, never from the global generator."""
    if random_state is None:  # use entropy from the operating system
        random_state = np.random.RandomState()
    return int(check_random_state(random_state).randint(np.iinfo(np.int32).max))
