"""Predictions of consecutive samples, with one block in memory at a time."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator
from torch.utils.data import DataLoader, IterableDataset

from sklaplace.core.checks import check_count
from sklaplace.core.trees import Inputs
from sklaplace.networks.data import check_converted, count_rows, take_rows
from sklaplace.networks.stored import StoredArray, is_stored


def iter_predictions(
    estimator: BaseEstimator,
    X: Inputs,
    method: str = "predict_proba",
    *,
    block_size: int = 10_000,
    **params: object,
) -> Iterator[Any]:
    """Iterate over predictions of consecutive samples, block by block.

    Use this function for streams of samples, or if the results do not fit into memory.
    Write the results of each block to their destination, and then discard them. The
    predictions are the same as those for all samples at once.

    Read more in the :doc:`User Guide </large_data>`.

    Parameters
    ----------
    estimator : estimator
        Fitted estimator, from this package or scikit-learn, such as a Pipeline.
    X : array-like, dict of arrays, torch Dataset, IterableDataset or DataLoader
        Samples. Arrays, including memory maps and zarr arrays, are read one block at a
        time. Items of an IterableDataset and batches of a DataLoader are ``x`` or
        ``(x, y)``. Each batch of a DataLoader is one block.
    method : str, default="predict_proba"
        Name of the method to call for each block.
    block_size : int, default=10_000
        Number of samples per block. The last block can be smaller.
    **params : dict
        Keyword arguments for the method.

    Returns
    -------
    iterator
        Iterator over the method's results, one per block.

    Yields
    ------
    result : object
        Return value of the method for a block.

    Raises
    ------
    AttributeError
        If the estimator does not have the method.
    ValueError
        If ``block_size`` is not a positive integer.

    See Also
    --------
    sklaplace.LaplaceClassifier.predict_top_k : Most probable of many classes.

    Notes
    -----
    The function calls the method once per block. If the estimator's ``n_jobs`` is set,
    the predictions within each block are computed in parallel.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn.datasets import load_iris
    >>> from sklaplace import LaplaceClassifier, iter_predictions
    >>> X, y = load_iris(return_X_y=True)
    >>> clf = LaplaceClassifier(random_state=0).fit(X, y)
    >>> proba = np.empty((150, 3))  # or numpy.lib.format.open_memmap(...)
    >>> start = 0
    >>> for block in iter_predictions(clf, X, block_size=64):
    ...     proba[start : start + len(block)] = block
    ...     start += len(block)
    >>> start
    150
    """
    block_size = check_count("block_size", block_size)
    function = getattr(estimator, method)
    return (function(block, **params) for block in _blocks(X, block_size))


def _blocks(X: Inputs, size: int) -> Iterator[Any]:
    """Yield consecutive samples, ``size`` at a time, without their targets."""
    if isinstance(X, IterableDataset):
        yield from _blocks(DataLoader(X, batch_size=size), size)
        return
    if isinstance(X, DataLoader):
        for batch in X:
            yield batch[0] if isinstance(batch, (list, tuple)) else batch
        return
    check_converted(X)
    if isinstance(X, list):  # skorch would read a list of samples as several arrays
        X = np.asarray(X)
    if is_stored(X):
        X = StoredArray(X, np.asarray)
    n = count_rows(X)
    for start in range(0, n, size):
        block = take_rows(X, np.arange(start, min(start + size, n)))
        yield block.read() if isinstance(block, StoredArray) else block
