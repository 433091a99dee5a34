"""MCDropoutClassifier and MCDropoutRegressor: networks with units left out at random.

Dropout goes on in prediction. A draw is one choice of units to leave out, the same for
all rows, so that it is a function of the rows (a network with some of its weights at
zero), and neither batches nor the order of rows matter.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sklaplace.estimators.output_model import OutputModel
from sklaplace.estimators.probabilistic_classifier import ProbabilisticClassifier
from sklaplace.estimators.probabilistic_regressor import ProbabilisticRegressor
from sklaplace.estimators.sampling import BaseSampling
from sklaplace.estimators.trainer import Trainer
from sklaplace.networks.data import TrainingData
from sklaplace.networks.default import with_dropout
from sklaplace.networks.forward import Forward
from sklaplace.networks.outputs import OutputSpec, as_forward


# ---------------------------------------------------------------------------- masks
def _scaled(x: Tensor, kept: Tensor, p: float) -> Tensor:
    """Units left out are zero; others make up for them."""
    return x * kept / (1 - p) if p < 1 else torch.zeros_like(x)


def _alpha(x: Tensor, kept: Tensor, p: float) -> Tensor:
    """Units left out have SELU's lowest value; mean and variance are kept.

    Klambauer, Unterthiner, Mayr and Hochreiter (2017), "Self-normalizing neural
    networks", section 3.
    """
    lowest = -1.7580993408473766
    if p == 1:
        return torch.zeros_like(x)
    a = float(((1 - p) * (1 + p * lowest**2)) ** -0.5)
    return a * torch.where(kept > 0, x, torch.full_like(x, lowest)) - a * p * lowest


# layer -> (axes of a unit's own, those after the batch's, where all have the same; what
# becomes of its units)
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
    """Layers that leave units out with positive probability."""
    found: list[Any] = [m for m in module.modules() if isinstance(m, tuple(DROPOUTS))]
    return [layer for layer in found if layer.p > 0]


@contextmanager
def left_out(module: nn.Module, generator: torch.Generator) -> Iterator[None]:
    """Leave the same units of all rows out; in evaluation mode."""

    def drop(layer: Any, _inputs: Any, x: Tensor) -> Tensor:
        kind = next(kind for kind in DROPOUTS if isinstance(layer, kind))
        by_channel, mask = DROPOUTS[kind]
        shape = [*x.shape[1:2], *[1] * (x.ndim - 2)] if by_channel else x.shape[1:]
        kept = torch.rand(shape, generator=generator) >= layer.p
        return mask(x, kept.to(x), layer.p)

    handles = [layer.register_forward_hook(drop) for layer in dropout_layers(module)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def mc_dropout_outputs(forward: Forward, x: Any, seeds: list[int]) -> Tensor:
    """Outputs (b, c, s) of a frozen network under one choice of units per seed."""
    found = []
    with torch.no_grad():
        for seed in seeds:
            generator = torch.Generator().manual_seed(seed)
            with left_out(forward.module, generator):
                found.append(forward(x).double())
    return torch.stack(found, -1)


# ----------------------------------------------------------------------- estimators
@dataclass(frozen=True)
class DropoutDraws(OutputModel):
    """Outputs of the network under drawn dropout masks."""

    def draws(self, forward: Forward, x: Any) -> Tensor:
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

    def infer_spec(self, net: Any, dataset: Any, *, is_trained: bool) -> OutputSpec:
        """Return the meaning of a net's outputs; raises without dropout layers."""
        if not dropout_layers(as_forward(net).module):
            known = ", ".join(kind.__name__ for kind in DROPOUTS)
            raise ValueError(
                "The network has no dropout layer with p > 0, so that all draws would "
                f"be the same. Use one of {known} from torch.nn as a layer of its own; "
                "torch.nn.functional.dropout, and dropout within attention and "
                "recurrent layers, cannot be drawn here."
            )
        return super().infer_spec(net, dataset, is_trained=is_trained)


@dataclass(eq=False, repr=False, kw_only=True)
class BaseDropout(BaseSampling):
    """Parameters and outputs that both estimators share."""

    n_samples: int = 100

    _trainer_kind = DropoutTrainer

    def _output_model(self) -> OutputModel:
        return DropoutDraws(self.n_samples, self._seed)


@dataclass(eq=False, repr=False, kw_only=True)
class MCDropoutClassifier(BaseDropout, ProbabilisticClassifier):
    """Class probabilities of a skorch net whose dropout goes on in prediction.

    For comparison with `LaplaceClassifier`: it needs no training beyond the network's,
    but a network with dropout, and its uncertainty is set by the dropout rates.

    Parameters
    ----------
    estimator : skorch net, FrozenEstimator or None, default=None
        The network, with dropout layers. A skorch net is cloned and trained in ``fit``;
        a ``sklearn.frozen.FrozenEstimator`` around a net keeps its weights; None makes
        a small network that suits tables.
    likelihood : object or None, default=None
        Of the targets given the outputs, where the criterion is none of those that are
        known; see `sklaplace.likelihoods`. None takes that of the criterion.
    class_weight : dict, "balanced" or None, default=None
        Weights of the classes, by label, which multiply ``sample_weight``:
        ``"balanced"`` gives all classes the same in total.
    dirichlet_approx : {"projection", "bridge", "bridge_norm", \
            "bridge_norm_published"}, default="projection"
        How the Gaussian of the drawn logits becomes a Dirichlet distribution.
    n_samples : int, default=100
        Draws that predictions are averaged over; the same in each call.
    batch_size : int or None, default=None
        Rows per batch for prediction; None fits them into a fixed memory budget.
        Results do not depend on it. The net has its own for training.
    random_state : int, RandomState or None, default=None
        Seeds training, the rows held out and the draws. None differs every time.
        The global generators are never touched.
    verbose : int, default=0
        Print one line after fitting if positive.

    Attributes
    ----------
    estimator_ : skorch net
        The trained network; a copy where it was frozen.
    classes_ : ndarray of shape (K,)
        Class labels; for a matrix of labels the numbers of its columns.
    n_features_in_ : int
        Number of features (of the second axis), for array input.
    feature_names_in_ : ndarray of str
        Column names, for data frames with string columns.
    n_iter_ : int
        Epochs the network was trained for.

    See Also
    --------
    LaplaceClassifier : A posterior around trained weights.

    Notes
    -----
    Prediction takes ``n_samples`` forward passes. Layers of `torch.nn` such as
    ``Dropout`` and ``Dropout2d`` are drawn; `torch.nn.functional.dropout`, and dropout
    within attention and recurrent layers, are not. A draw leaves the same units of all
    rows out, where rows are the first axis of what a layer gets. How far draws differ
    is set by the rates and does not shrink with more rows.

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
    """Predictions with bands of a skorch net whose dropout goes on in prediction.

    For comparison with `LaplaceRegressor`; see `MCDropoutClassifier`.

    Parameters
    ----------
    estimator : skorch net, FrozenEstimator or None, default=None
        The network, with dropout layers. A skorch net is cloned and trained in ``fit``;
        a ``sklearn.frozen.FrozenEstimator`` around a net keeps its weights; None makes
        a small network that suits tables.
    likelihood : object or None, default=None
        Of the targets given the outputs, where the criterion is none of those that are
        known; see `sklaplace.likelihoods`. None takes that of the criterion.
    sigma_noise : float, array or "auto", default="auto"
        Standard deviation of the observation noise, one for all outputs; only for nets
        with ``MSELoss``, whose criterion leaves it open. An array has one for each
        column of ``y``. ``"auto"`` takes the one under which held-out targets are most
        probable: those of ``y_val``, else of the net's ``train_split``, else of
        ``validation_fraction``, else, where rows are few or the net is frozen, the
        training targets.
    validation_fraction : float, default=0.2
        Share of rows to hold out for the noise, from a net that is trained here and
        holds nothing out itself, if there are at least 50 distinct rows.
    n_samples : int, default=100
        Draws that predictions are averaged over; the same in each call.
    batch_size : int or None, default=None
        Rows per batch for prediction; None fits them into a fixed memory budget.
        Results do not depend on it. The net has its own for training.
    random_state : int, RandomState or None, default=None
        Seeds training, the rows held out and the draws. None differs every time.
        The global generators are never touched.
    verbose : int, default=0
        Print one line after fitting if positive.

    Attributes
    ----------
    estimator_ : skorch net
        The trained network; a copy where it was frozen.
    sigma_noise_ : float or ndarray of shape (n_outputs,)
        Standard deviation of the observation noise in use; one where there is none.
    sigma_scaling_ : ndarray of shape (n_outputs,)
        Factors of standard deviations, one each unless `recalibrate` was called.
    n_features_in_ : int
        Number of features (of the second axis), for array input.
    feature_names_in_ : ndarray of str
        Column names, for data frames with string columns.
    n_iter_ : int
        Epochs the network was trained for.

    See Also
    --------
    LaplaceRegressor : A posterior around trained weights.

    Notes
    -----
    Prediction takes ``n_samples`` forward passes. Layers of `torch.nn` such as
    ``Dropout`` and ``Dropout2d`` are drawn; `torch.nn.functional.dropout`, and dropout
    within attention and recurrent layers, are not. A draw leaves the same units of all
    rows out, where rows are the first axis of what a layer gets. How far draws differ
    is set by the rates and does not shrink with more rows.

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
