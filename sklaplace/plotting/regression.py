"""Means and standard deviations of a regressor with one target."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.exceptions import NotFittedError


def mean_and_std(regressor: Any, X: Any) -> tuple[NDArray[Any], NDArray[Any]]:
    """Predict means (n,) and standard deviations (n,)."""
    try:
        mean, std = regressor.predict(X, return_std=True)
    except NotFittedError:  # an AttributeError, too
        raise
    except (AttributeError, TypeError) as error:
        raise TypeError(
            f"{type(regressor).__name__} does not predict standard deviations. Pass a "
            "fitted regressor whose predict takes return_std=True."
        ) from error
    mean, std = np.asarray(mean), np.asarray(std)
    if mean.size != len(mean):
        raise ValueError(
            f"The regressor predicts {mean.shape[1]} targets, but one can be plotted. "
            "Fit one target, or create a display of each from its mean and std."
        )
    return mean.ravel(), std.ravel()
