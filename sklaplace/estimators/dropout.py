"""MCDropoutClassifier and MCDropoutRegressor: Monte Carlo dropout.

Dropout stays active during prediction. A draw is one dropout mask, shared by all
samples. Each draw is thus a function of the inputs (a network with some units set to
zero), and does not depend on batches or the order of samples.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from skorch import NeuralNet
from torch import Tensor, nn

from sklaplace.core import progress
from sklaplace.core.trees import Batch
from sklaplace.estimators.predicting.output_model import OutputModel
from sklaplace.estimators.probabilistic_classifier import ProbabilisticClassifier
from sklaplace.estimators.probabilistic_regressor import ProbabilisticRegressor
from sklaplace.estimators.sampling import BaseSampling
from sklaplace.estimators.training.trainer import Trainer
from sklaplace.networks.data import TrainingData
from sklaplace.networks.default import with_dropout
from sklaplace.networks.forward import Forward
from sklaplace.networks.outputs import OutputSpec, as_forward


# ---------------------------------------------------------------------------- masks
def _scaled(x: Tensor, kept: Tensor, p: float) -> Tensor:
    """Set dropped units to zero and scale the others by ``1 / (1 - p)``."""
    return x * kept / (1 - p) if p < 1 else torch.zeros_like(x)


def _alpha(x: Tensor, kept: Tensor, p: float) -> Tensor:
    """Set dropped units to SELU's lowest value, preserving mean and variance.

    Klambauer, Unterthiner, Mayr and Hochreiter (2017), "Self-normalizing neural
    networks", section 3.
    """
    lowest = -1.7580993408473766
    if p == 1:
        return torch.zeros_like(x)
    a = float(((1 - p) * (1 + p * lowest**2)) ** -0.5)
    return a * torch.where(kept > 0, x, torch.full_like(x, lowest)) - a * p * lowest


# layer -> (whether to mask channels instead of units, function (x, mask, p) that
# applies the mask)
Mask = Callable[[Tensor, Tensor, float], Tensor]
DROPOUTS: dict[type[nn.Module], tuple[bool, Mask]] = {
    nn.Dropout: (False, _scaled),
    nn.Dropout1d: (True, _scaled),
    nn.Dropout2d: (True, _scaled),
    nn.Dropout3d: (True, _scaled),
    nn.AlphaDropout: (False, _alpha),
    nn.FeatureAlphaDropout: (True, _alpha),
}


def dropout_layers(module: nn.Module) -> list[Any]:
    """Return the layers that drop units with positive probability."""
    found: list[Any] = [m for m in module.modules() if isinstance(m, tuple(DROPOUTS))]
    return [layer for layer in found if layer.p > 0]


@contextmanager
def drawn_mask(module: nn.Module, generator: torch.Generator) -> Iterator[None]:
    """Drop the same units for all samples, with the network in evaluation mode."""

    def drop(layer: Any, _inputs: Any, x: Tensor) -> Tensor:
        kind = next(kind for kind in DROPOUTS if isinstance(layer, kind))
        by_channel, mask = DROPOUTS[kind]
        shape = [*x.shape[1:2], *[1] * (x.ndim - 2)] if by_channel else x.shape[1:]
        kept = torch.rand(shape, generator=generator) >= layer.p
        return mask(x, kept.to(x), layer.p)

    with ExitStack() as hooks:
        for layer in dropout_layers(module):
            hooks.enter_context(layer.register_forward_hook(drop))
        yield


def mc_dropout_outputs(forward: Forward, x: Batch, seeds: list[int]) -> Tensor:
    """Return the outputs (b, c, s) of a frozen network, with one mask per seed."""
    found = []
    with torch.no_grad():
        for seed in progress.tracked(seeds, "draws", len(seeds)):
            generator = torch.Generator().manual_seed(seed)
            with drawn_mask(forward.module, generator):
                found.append(forward(x).double())
    return torch.stack(found, -1)


# ----------------------------------------------------------------------- estimators
@dataclass(frozen=True)
class DropoutDraws(OutputModel):
    """Outputs of a network under random dropout masks."""

    def draws(self, forward: Forward, x: Batch) -> Tensor:
        """Return the outputs (b, c, s), with one mask per draw."""
        generator = np.random.default_rng(self.seed)
        seeds = generator.integers(2**63, size=self.n_samples).tolist()
        return mc_dropout_outputs(forward, x, seeds)


class DropoutTrainer(Trainer):
    """Trainer of networks with dropout layers."""

    def new_net(self, data: TrainingData) -> Any:
        """Return the net to train, with dropout layers added to the default net."""
        net = super().new_net(data)
        return with_dropout(net) if self.estimator is None else net

    def infer_spec(
        self, net: NeuralNet, dataset: object, *, is_trained: bool
    ) -> OutputSpec:
        """Return the output specification; raise ValueError without dropout layers."""
        spec = super().infer_spec(net, dataset, is_trained=is_trained)
        if not dropout_layers(as_forward(net).module):
            known = ", ".join(kind.__name__ for kind in DROPOUTS)
            raise ValueError(
                f"The network has no dropout layer with p > 0. Use one of {known} from "
                "torch.nn. Functional dropout, and dropout within attention and "
                "recurrent layers, are not supported."
            )
        return spec


@dataclass(eq=False, repr=False, kw_only=True)
class BaseDropout(BaseSampling):
    """Parameters and outputs of `MCDropoutClassifier` and `MCDropoutRegressor`."""

    n_samples: int = 100

    _trainer_kind = DropoutTrainer

    def _output_model(self) -> OutputModel:
        return DropoutDraws(self.n_samples, self._seed)


@dataclass(eq=False, repr=False, kw_only=True)
class MCDropoutClassifier(BaseDropout, ProbabilisticClassifier):
    """Classifier with Monte Carlo dropout.

    Dropout stays active during prediction, and probabilities are averaged over random
    masks. This estimator is a baseline for `LaplaceClassifier`. Monte Carlo dropout
    needs no extra training, but requires a network with dropout layers. The dropout
    rates determine the variance, which does not decrease with more training samples.

    Read more in the :doc:`User Guide </user_guide/other_methods>`.

    Parameters
    ----------
    estimator : skorch net, FrozenEstimator or None, default=None
        The network, with dropout layers. A skorch net is cloned and trained in ``fit``.
        A trained net in a ``sklearn.frozen.FrozenEstimator`` keeps its weights. If
        None, use a small network for tabular data, including data frames.
    n_samples : int, default=100
        Number of masks that predictions are averaged over. Every call uses the same
        masks.
    likelihood, class_weight, dirichlet_approx, batch_size, random_state, verbose
        As in `LaplaceClassifier`.

    Attributes
    ----------
    estimator_, classes_, n_features_in_, feature_names_in_, n_iter_
        As in `LaplaceClassifier`.

    See Also
    --------
    LaplaceClassifier : Gaussian posterior around trained weights.
    MCDropoutRegressor : For real-valued targets.

    Notes
    -----
    Prediction requires ``n_samples`` forward passes. Masks apply to `torch.nn` layers
    such as ``Dropout`` and ``Dropout2d``, but not to `torch.nn.functional.dropout` or
    to dropout within attention and recurrent layers. All samples (the first axis of a
    layer's input) share the same mask.

    References
    ----------
    Gal and Ghahramani (2016), "Dropout as a Bayesian approximation: representing model
    uncertainty in deep learning".

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from sklaplace import MCDropoutClassifier
    >>> X, y = load_iris(return_X_y=True)
    >>> model = MCDropoutClassifier(random_state=0).fit(X, y)
    >>> model.predict_proba(X[:2]).shape
    (2, 3)
    """


@dataclass(eq=False, repr=False, kw_only=True)
class MCDropoutRegressor(BaseDropout, ProbabilisticRegressor):
    """Regressor with Monte Carlo dropout.

    The counterpart of `MCDropoutClassifier` for real-valued targets. See
    `MCDropoutClassifier` for when to use Monte Carlo dropout.

    Read more in the :doc:`User Guide </user_guide/other_methods>`.

    Parameters
    ----------
    estimator : skorch net, FrozenEstimator or None, default=None
        As in `MCDropoutClassifier`.
    sigma_noise : float, array or "auto", default="auto"
        Standard deviation of the observation noise, in units of ``y``, for nets with
        ``MSELoss``. An array has one value per column of ``y``. ``"auto"`` maximises
        the likelihood of held-out targets from ``y_val``, else from the net's
        ``train_split``, else from ``validation_fraction``. Without held-out targets (a
        frozen net, or fewer than 50 distinct samples), ``"auto"`` uses the training
        targets.
    validation_fraction : float, default=0.2
        Fraction of the samples to hold out for estimating the noise, if the net is
        trained in ``fit`` and holds out no samples itself, and if there are at least 50
        distinct samples.
    normalize_y : bool, default=False
        As in `LaplaceRegressor`.
    n_samples : int, default=100
        Number of masks, at least two. Every call uses the same masks.
    likelihood, batch_size, random_state, verbose
        As in `LaplaceRegressor`.

    Attributes
    ----------
    sigma_noise_ : float or ndarray of shape (n_outputs,)
        Standard deviation of the observation noise in use, or 1 for criteria without
        noise.
    estimator_, sigma_scaling_, n_features_in_, feature_names_in_, n_iter_
        As in `LaplaceRegressor`.

    See Also
    --------
    LaplaceRegressor : Gaussian posterior around trained weights.
    MCDropoutClassifier : For class labels.

    Notes
    -----
    Prediction requires ``n_samples`` forward passes. Masks apply to `torch.nn` layers
    such as ``Dropout`` and ``Dropout2d``, but not to `torch.nn.functional.dropout` or
    to dropout within attention and recurrent layers. All samples (the first axis of a
    layer's input) share the same mask.

    References
    ----------
    Gal and Ghahramani (2016), "Dropout as a Bayesian approximation: representing model
    uncertainty in deep learning".

    Examples
    --------
    >>> from sklearn.datasets import load_diabetes
    >>> from sklaplace import MCDropoutRegressor
    >>> X, y = load_diabetes(return_X_y=True)
    >>> model = MCDropoutRegressor(random_state=0).fit(X, y)
    >>> mean, std = model.predict(X[:2], return_std=True)
    >>> mean.shape, std.shape
    ((2,), (2,))
    """
