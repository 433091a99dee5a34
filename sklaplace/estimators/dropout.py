"""MCDropoutClassifier and MCDropoutRegressor: Monte Carlo dropout.

Dropout stays active in prediction. A draw is one dropout mask, the same for all
samples, so that it is a function of the samples (a network with some of its units at
zero), and neither batches nor the order of samples matter.
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
    """Set dropped units to zero, and scale the others by ``1 / (1 - p)``."""
    return x * kept / (1 - p) if p < 1 else torch.zeros_like(x)


def _alpha(x: Tensor, kept: Tensor, p: float) -> Tensor:
    """Set dropped units to SELU's lowest value; mean and variance are kept.

    Klambauer, Unterthiner, Mayr and Hochreiter (2017), "Self-normalizing neural
    networks", section 3.
    """
    lowest = -1.7580993408473766
    if p == 1:
        return torch.zeros_like(x)
    a = float(((1 - p) * (1 + p * lowest**2)) ** -0.5)
    return a * torch.where(kept > 0, x, torch.full_like(x, lowest)) - a * p * lowest


# layer -> (whether a mask is drawn per channel, rather than per unit; the function
# (x, mask, p) that applies it)
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
    """Drop the same units of all samples, in a network in evaluation mode."""

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
    """Return outputs (b, c, s) of a frozen network under one mask per seed."""
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
    """Draws of a network's outputs under drawn dropout masks."""

    def draws(self, forward: Forward, x: Batch) -> Tensor:
        """Return outputs (b, c, s), one mask for each draw."""
        self.check_draws()
        generator = np.random.default_rng(self.seed)
        seeds = generator.integers(2**63, size=self.n_samples).tolist()
        return mc_dropout_outputs(forward, x, seeds)


class DropoutTrainer(Trainer):
    """Trains networks that have dropout layers."""

    def new_net(self, data: TrainingData) -> Any:
        """Return the net to train; the default net gets dropout layers."""
        net = super().new_net(data)
        return with_dropout(net) if self.estimator is None else net

    def infer_spec(
        self, net: NeuralNet, dataset: Any, *, is_trained: bool
    ) -> OutputSpec:
        """Return the meaning of a net's outputs; raises without dropout layers."""
        spec = super().infer_spec(net, dataset, is_trained=is_trained)
        if not dropout_layers(as_forward(net).module):
            known = ", ".join(kind.__name__ for kind in DROPOUTS)
            raise ValueError(
                "The network has no dropout layer with p > 0, so that all draws would "
                f"be the same. Use one of {known} from torch.nn as a layer of its own; "
                "torch.nn.functional.dropout, and dropout within attention and "
                "recurrent layers, cannot be drawn here."
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
    """Class probabilities of a skorch net by Monte Carlo dropout.

    Dropout stays active in prediction, and probabilities are averaged over drawn
    masks. A baseline for `LaplaceClassifier`: it needs no training beyond the
    network's, but a network with dropout layers, and its variance is set by the dropout
    rates and does not decrease with more training samples.

    Read more in the :doc:`User Guide </other_methods>`.

    Parameters
    ----------
    estimator : skorch net, FrozenEstimator or None, default=None
        The network, with dropout layers. A skorch net is cloned and trained in ``fit``;
        a ``sklearn.frozen.FrozenEstimator`` around a net keeps its weights; None makes
        a small network for tabular data.
    n_samples : int, default=100
        Number of masks that predictions are averaged over; the same ones in each call.
    likelihood, class_weight, dirichlet_approx, batch_size, random_state, verbose
        As for `LaplaceClassifier`.

    Attributes
    ----------
    estimator_, classes_, n_features_in_, feature_names_in_, n_iter_
        As for `LaplaceClassifier`.

    See Also
    --------
    LaplaceClassifier : A posterior around trained weights.
    MCDropoutRegressor : For real-valued targets.

    Notes
    -----
    Prediction takes ``n_samples`` forward passes. Masks are drawn for layers of
    `torch.nn`, such as ``Dropout`` and ``Dropout2d``, but not for
    `torch.nn.functional.dropout`, nor within attention and recurrent layers. A mask is
    the same for all samples, which are the first axis of a layer's input.

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

    class_weight: dict[Any, float] | str | None = None
    dirichlet_approx: str = "projection"


@dataclass(eq=False, repr=False, kw_only=True)
class MCDropoutRegressor(BaseDropout, ProbabilisticRegressor):
    """Predictions with intervals of a skorch net by Monte Carlo dropout.

    The counterpart of `MCDropoutClassifier` for real-valued targets; see there for when
    to prefer it.

    Read more in the :doc:`User Guide </other_methods>`.

    Parameters
    ----------
    estimator : skorch net, FrozenEstimator or None, default=None
        As for `MCDropoutClassifier`.
    sigma_noise : float, array or "auto", default="auto"
        Standard deviation of the observation noise, in units of the targets: one for
        all outputs, or an array with one for each column of ``y``. Only for nets with
        ``MSELoss``, whose criterion does not determine it. ``"auto"`` maximises the
        likelihood of held-out targets: those of ``y_val``, else of the net's
        ``train_split``, else of ``validation_fraction``; without any, for a frozen net
        or fewer than 50 distinct samples, that of the training targets.
    validation_fraction : float, default=0.2
        Fraction of the samples to hold out for the noise, if the net is trained in
        ``fit``, holds out none itself, and there are at least 50 distinct samples.
    normalize_y : bool, default=False
        As for `LaplaceRegressor`.
    n_samples : int, default=100
        Number of masks, two or more; the same ones in each call.
    likelihood, batch_size, random_state, verbose
        As for `LaplaceRegressor`.

    Attributes
    ----------
    sigma_noise_ : float or ndarray of shape (n_outputs,)
        Standard deviation of the observation noise in use; one for criteria without it.
    estimator_, sigma_scaling_, n_features_in_, feature_names_in_, n_iter_
        As for `LaplaceRegressor`.

    See Also
    --------
    LaplaceRegressor : A posterior around trained weights.
    MCDropoutClassifier : For class labels.

    Notes
    -----
    Prediction takes ``n_samples`` forward passes. Masks are drawn for layers of
    `torch.nn`, such as ``Dropout`` and ``Dropout2d``, but not for
    `torch.nn.functional.dropout`, nor within attention and recurrent layers. A mask is
    the same for all samples, which are the first axis of a layer's input.

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

    sigma_noise: Any = "auto"
    validation_fraction: float = 0.2
    normalize_y: bool = False
