"""NoiseModel: noise that depends on the inputs, fitted to held-out residuals.

The model has three parts for each column of targets:

1. For residuals r, ``log |r|`` is modelled as a linear function of the features and
   of the moments of the prediction. The exponential of this function, times a factor,
   is the scale of the noise.
2. A forest predicts quantiles of residuals in units of this scale. The residuals
   include the uncertainty of the weights.
3. A correction of the quantile levels ensures the nominal coverage over all residuals.

Predicted means do not change, because the quantiles are centred.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sklaplace.core.parallel import one_blas_thread
from sklaplace.core.trees import Batch
from sklaplace.noise.column import ColumnNoise
from sklaplace.noise.residuals import Predictions, Residuals

Array = NDArray[np.float64]

# Minimum number of residuals for a noise model.
MIN_RESIDUALS = 30


@dataclass(frozen=True)
class NoiseModel:
    """Noise that depends on the inputs, relative to a constant level per column.

    Attributes
    ----------
    columns : sequence of ColumnNoise
        Noise of each column of targets.
    """

    columns: Sequence[ColumnNoise]

    @classmethod
    @one_blas_thread()
    def fit(cls, residuals: Residuals, levels: Array) -> "NoiseModel | None":
        """Fit a model to residuals, or return None if there are too few residuals.

        ``levels`` (c,) contains the standard deviations of constant noise.

        Notes
        -----
        For each column, fitting costs O(n k min(n, k)) for n residuals and k features,
        plus the fits of six forests.
        """
        if (
            len(residuals.values) < MIN_RESIDUALS
            or len(np.unique(residuals.keys)) < 2
            or not residuals.values.any(axis=0).all()
        ):
            return None
        return cls([ColumnNoise.fit(residuals, k, s) for k, s in enumerate(levels)])

    def of_batch(
        self, features: Tensor | None, x: Batch, mean: Tensor, variance: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the noise (b, c) relative to the levels, and quantiles (b, c, q).

        The arguments are the same as those of `Predictions.of`.
        """
        predictions = Predictions.of(features, x, mean, variance)
        on_cpu = {name: tensor.cpu() for name, tensor in vars(predictions).items()}
        return self.distributions(Predictions(**on_cpu))

    def distributions(self, predictions: Predictions) -> tuple[Tensor, Tensor]:
        """Return the noise (b, c) relative to the levels, and quantiles (b, c, q)."""
        pairs = [column.distribution(predictions) for column in self.columns]
        noise, quantiles = (torch.stack(v, 1) for v in zip(*pairs, strict=True))
        return noise, quantiles

    def standardised(self, quantiles: Array, scores: Array) -> Array:
        """Return standardised targets (n, c, s) for normal scores (n, c, s)."""
        values = [
            column.standardised(quantiles[:, k], scores[:, k])
            for k, column in enumerate(self.columns)
        ]
        return np.stack(values, axis=1)

    def scores(self, quantiles: Array, standardised: Array) -> Array:
        """Return the normal scores (n, c) of standardised targets (n, c)."""
        scores = [
            column.scores(quantiles[:, k], standardised[:, k])
            for k, column in enumerate(self.columns)
        ]
        return np.stack(scores, axis=1)
