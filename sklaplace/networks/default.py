"""Default networks for tables, without settings and with deterministic training.

The weights of a `TabularNetwork` minimise, with ``lambda = strength * noise``,

    sum_n w_n loss_n + lambda / 2 * (||A||^2 + ||a||^2 + ||B||^2).

``noise`` is the fraction of the target variance that a linear model on the untrained
features leaves unexplained. This value maximises the evidence (the marginal likelihood)
of the model (MacKay 1992). The penalty therefore adapts to the noise in the data
without a validation set. `Size` holds all settings that depend on the number of
samples.
"""

import itertools
import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from skorch import NeuralNet, NeuralNetClassifier, NeuralNetRegressor
from skorch.dataset import unpack_data
from skorch.utils import to_tensor
from torch import Tensor, nn

from sklaplace.core.evidence import most_probable
from sklaplace.core.parallel import one_blas_thread
from sklaplace.data.dataset import TrainingData
from sklaplace.networks.optimizer import CosineAdam
from sklaplace.networks.tabular import (
    HIDDEN_UNITS,
    Array,
    DropoutNetwork,
    TabularNetwork,
    with_pieces,
)
from sklaplace.networks.training import weights_of_rows

# Rounding errors, for instance from a different order of the samples, grow by a factor
# of about 1.3 per iteration of L-BFGS. With this limit, differences are near 1e-11 and
# almost always below 1e-7. Hundreds of iterations would lead to a different minimum.
# The first iterations do most of the work: 15 more iterations changed the log loss of
# ten small tables by at most 0.02.
MAX_ITERATIONS = 35

# Well above the float64 rounding errors that make the line search meaningless.
GRADIENT_TOLERANCE = 1e-7

# Below one per cent of the variance, the evidence cannot distinguish noise from
# nonlinearity. A vanishing penalty would leave the weights undetermined.
MIN_NOISE = 0.01

# Stochastic gradients (sampled weights, dropout masks) require more, smaller steps.
STOCHASTIC_STEPS, STOCHASTIC_RATE = 500, 0.05

_FULL_BATCH: dict[str, Any] = {
    "max_epochs": 1,
    "batch_size": -1,
    "train_split": None,
    "callbacks": "disable",
    "verbose": 0,
}
_LBFGS: dict[str, Any] = {
    **_FULL_BATCH,
    "optimizer": torch.optim.LBFGS,
    "lr": 1.0,
    "optimizer__max_iter": MAX_ITERATIONS,
    "optimizer__max_eval": 4 * MAX_ITERATIONS,
    "optimizer__tolerance_grad": GRADIENT_TOLERANCE,
    # Training stops at small gradients, not when the loss changes little.
    "optimizer__tolerance_change": 0.0,
    "optimizer__history_size": 20,
    "optimizer__line_search_fn": "strong_wolfe",
}
# L-BFGS compares losses between steps, but sampled weights change the loss each time.
_ADAM: dict[str, Any] = {
    **_FULL_BATCH,
    "optimizer": CosineAdam,
    "lr": STOCHASTIC_RATE,
    "optimizer__n_steps": STOCHASTIC_STEPS,
    "optimizer__fused": True,
}


# After a few hundred full-batch steps of Adam, results for reordered samples differ by
# less than 1e-6. L-BFGS would require so many iterations for piecewise linear inputs
# that the results would differ more.
_LONG_ADAM: dict[str, Any] = {**_ADAM, "lr": 0.1, "optimizer__n_steps": 200}

# Each step uses at most 1,000 samples, so the cost does not grow with their number.
# On tables of 1,500 to 5,000 rows, fewer steps and smaller parts had worse scores.
_PARTS_ADAM: dict[str, Any] = {
    **_LONG_ADAM,
    "optimizer__n_steps": 400,
    "part_size": 1000,
}


@dataclass(frozen=True)
class Size:
    """Capacity, regularisation and training settings for a number of samples.

    Attributes
    ----------
    hidden_units : int
        Width of the hidden layer.
    n_pieces : int
        Maximum number of pieces per column; see `piecewise_linear`.
    regression_strength : float
        Factor of the penalty. With a factor of 1, half the squared error plus
        ``noise / 2 * ||weights||²`` is the negative log posterior under a standard
        normal prior, in units of the noise.
    classification_strength : float
        Factor of the penalty, chosen empirically because cross-entropy includes its own
        noise model. The log loss of most small tables hardly changes between factors of
        0.2 and 0.5. However, a factor of 0.2 overfits pure noise, and 0.5 underfits a
        curved decision boundary.
    training : dict
        Settings of the skorch net.
    """

    hidden_units: int = HIDDEN_UNITS
    n_pieces: int = 0
    regression_strength: float = 1.0
    classification_strength: float = 0.3
    training: dict[str, Any] = field(default_factory=lambda: _LBFGS)

    @staticmethod
    def of(n_samples: int) -> "Size":
        """Return the settings for a number of distinct samples."""
        if n_samples < MANY_ROWS:
            return SMALL
        return MEDIUM if n_samples < FULL_BATCH_ROWS else LARGE


# With at least this many distinct samples, piecewise linear inputs improve predictions
# on average. With these inputs, the penalty is larger, because the evidence describes
# only a linear model, and a network overfits more than a linear model.
MANY_ROWS = 500
# With at least this many distinct samples, steps use parts of them.
FULL_BATCH_ROWS = 2000
SMALL = Size()
MEDIUM = Size(64, 8, 3.0, 1.0, _LONG_ADAM)
LARGE = replace(MEDIUM, training=_PARTS_ADAM)
# Largest number of piecewise linear inputs, which limits the size of the last layer.
MAX_INPUTS = 1000


# ------------------------------------------------------------------------------- nets
@dataclass(frozen=True)
class Part:
    """Samples of a batch for one step of an optimizer.

    Attributes
    ----------
    rows : Tensor of int, or slice
        Positions of the samples in the batch.
    z : Tensor of shape (b, ...)
        Scaled inputs of the network.
    y : Tensor of shape (b, ...)
        Targets.
    relative_size : float
        Number of samples, relative to the mean over parts. The loss is a mean over
        samples, so that this factor makes steps unbiased.
    """

    rows: Tensor | slice
    z: Tensor
    y: Tensor
    relative_size: float


def part_indices(X: NDArray[Any], part_size: int) -> NDArray[np.integer]:
    """Return the index of each sample's part, (n,), counted from zero.

    Parts have at most ``part_size`` distinct inputs. Samples with the same inputs share
    a part. Neither the order of samples nor units matter: distinct inputs are sorted,
    and dealt out to the parts in turn.
    """
    rows = X.reshape(len(X), -1)
    # the rank of each sample's inputs among the sorted distinct inputs
    distinct, rank = np.unique(rows, axis=0, return_inverse=True)
    return rank % math.ceil(len(distinct) / part_size)


class PenalisedNet(NeuralNet):
    """Skorch net whose loss is the criterion plus ``penalty * module.squared_norm()``.

    Parameters
    ----------
    module : subclass of nn.Module
        Module class with the methods ``squared_norm()`` and ``scaled_inputs(X)``, whose
        result is the argument ``z`` of the module in training.
    *args, **kwargs
        Arguments of `skorch.NeuralNet`.
    penalty : float
        Coefficient of the squared norm.
    part_size : int or None
        Largest number of distinct inputs for each step of the optimizer. By default,
        each step uses the whole batch.
    """

    def __init__(
        self,
        module: type[nn.Module],
        *args: object,
        penalty: float = 0.0,
        part_size: int | None = None,
        **kwargs: object,
    ) -> None:
        self.penalty, self.part_size = penalty, part_size
        super().__init__(module, *args, **kwargs)

    def train_step(self, batch: Any, **fit_params: Any) -> Any:
        """Take the optimizer's steps on a batch, each on the next of its parts.

        For each step, the optimizer calls `train_step_single`, which takes the next
        part. After the last part, the first one follows again.
        """
        self._next_parts = itertools.cycle(self._parts(batch))
        try:
            return super().train_step(batch, **fit_params)
        finally:
            del self._next_parts  # it holds all samples

    def train_step_single(self, batch: Any, **fit_params: Any) -> dict[str, Tensor]:
        """Compute the loss of the next part of the batch, and its gradient.

        The batch in the arguments is ignored, because `train_step` has split it.
        """
        part = next(self._next_parts)
        self.module_.train()
        with weights_of_rows(self, part.rows):
            y_pred = self.infer({"z": part.z})
            loss = part.relative_size * self.get_loss(y_pred, part.y, training=True)
        loss.backward()
        return {"loss": loss, "y_pred": y_pred}

    def _parts(self, batch: Any) -> list[Part]:
        """Split a batch into parts, one for each step of the optimizer.

        Scaled inputs do not depend on weights, so they are computed only once.
        """
        X, y = unpack_data(batch)
        with torch.no_grad():
            z = self.module_.scaled_inputs(to_tensor(X, device=self.device))
        if self.part_size is None:
            return [Part(slice(None), z, y, 1.0)]
        part = part_indices(X.numpy(), self.part_size)
        n_parts = part.max() + 1
        rows_of_parts = [
            torch.from_numpy(np.flatnonzero(part == k)) for k in range(n_parts)
        ]
        return [Part(r, z[r], y[r], n_parts * len(r) / len(y)) for r in rows_of_parts]

    def get_loss(
        self, y_pred: Tensor, y_true: Tensor, *args: object, **kwargs: object
    ) -> Tensor:
        """Return the criterion plus the penalty, (), or (b, ...) without reduction.

        Without reduction, each entry includes the penalty, so that a weighted mean
        includes the penalty once.
        """
        loss = super().get_loss(y_pred, y_true, *args, **kwargs)
        return loss + self.penalty * self.module_.squared_norm()


class PenalisedClassifier(PenalisedNet, NeuralNetClassifier):
    """Classifier with a penalty and the parameters of `PenalisedNet`."""


class PenalisedRegressor(PenalisedNet, NeuralNetRegressor):
    """Regressor with a penalty and a loss in standardised units of the targets.

    All targets count equally, and the fit does not depend on their units. The net has
    the parameters of `PenalisedNet`. The module must have the attributes
    ``target_center`` and ``target_scale``.
    """

    def get_loss(
        self, y_pred: Tensor, y_true: Tensor, *args: object, **kwargs: object
    ) -> Tensor:
        """Return the criterion in standardised units plus the penalty."""
        center, scale = self.module_.target_center, self.module_.target_scale
        y_pred, y_true = (y_pred - center) / scale, (y_true - center) / scale
        return super().get_loss(y_pred, y_true, *args, **kwargs)


# -------------------------------------------------------------------------- factories
def default_classifier(
    data: TrainingData, size: Size, n_classes: int
) -> PenalisedClassifier:
    """Build the unfitted default network for classification.

    Prefer a custom network for images, text and sequences, and a larger custom network
    for hundreds of thousands of samples.

    Parameters
    ----------
    data : TrainingData
        Training inputs, float64, of shape (n_samples, n_features), which determine the
        standardisation and the penalty; classes encoded as 0 .. n_classes - 1; and
        optional sample weights. A weight is the number of repetitions of its sample.
    size : Size
        Capacity, regularisation and training.
    n_classes : int
        Number of outputs (logits).

    Returns
    -------
    PenalisedClassifier
        Net with `torch.nn.CrossEntropyLoss`. ``fit`` initialises and trains the
        network, and uses torch's global generator.

    Notes
    -----
    Building the net costs O(n p min(n, p)) for p = features + hidden units. ``fit``
    costs about `MAX_ITERATIONS` forward and backward passes over all samples. With at
    least `MANY_ROWS` samples, ``fit`` costs 200 passes, and each column has up to eight
    additional features. With at least `FULL_BATCH_ROWS` samples, ``fit`` costs 400
    passes over 1,000 of them.

    References
    ----------
    MacKay, D. J. C. (1992). Bayesian interpolation. Neural Computation 4,
    section 4.
    """
    one_hot = replace(data, y=np.eye(n_classes)[data.y])
    return penalised_classifier(one_hot, size, nn.CrossEntropyLoss)


def default_multilabel(data: TrainingData, size: Size) -> PenalisedClassifier:
    """Build the unfitted default network for binary labels y (n_samples, n_labels).

    Like `default_classifier`, but the criterion is `torch.nn.BCEWithLogitsLoss`.
    """
    factor = 1 / data.y.shape[1]  # the loss is a mean over labels as well as samples
    labels = replace(data, y=data.y.astype(float))
    return penalised_classifier(labels, size, nn.BCEWithLogitsLoss, factor)


def penalised_classifier(
    data: TrainingData,
    size: Size,
    criterion: type[nn.Module],
    factor: float = 1.0,
    module: type[nn.Module] = TabularNetwork,
) -> PenalisedClassifier:
    """Build the unfitted default network for 0/1 targets.

    Parameters
    ----------
    data : TrainingData
        Inputs that determine the standardisation and the penalty, 0/1 targets of shape
        (n_samples, n_outputs), and optional sample weights.
    size : Size
        Capacity, regularisation and training.
    criterion : subclass of nn.Module
        Loss for outputs with one logit per column.
    factor : float, default=1.0
        Factor by which the criterion scales the sum of a sample's losses over columns.
    module : subclass of nn.Module
        `TabularNetwork`, or a class with the same arguments and methods.

    Returns
    -------
    PenalisedClassifier
        Net whose ``fit`` initialises and trains the network.
    """
    _, weight, noise, settings = _targets_and_settings(data, size)
    # The module docstring has a sum over samples plus lambda / 2 times the squared
    # norm. The criterion is a mean, so lambda / 2 is divided by the weights' sum, too.
    penalty = factor * size.classification_strength * noise / (2 * weight.sum())
    return PenalisedClassifier(module, criterion=criterion, penalty=penalty, **settings)


def default_regressor(data: TrainingData, size: Size) -> PenalisedRegressor:
    """Build the unfitted default network for targets y (n_samples, n_outputs).

    Like `default_classifier`, but with `torch.nn.MSELoss` and targets in any units.
    """
    Y, weight, noise, settings = _targets_and_settings(data, size)
    target_center, target_scale = center_and_scale(Y, weight)
    return PenalisedRegressor(
        TabularNetwork,
        criterion=nn.MSELoss,
        # MSELoss is the mean over samples and targets, of twice the squared loss in the
        # module docstring. So lambda / 2 is doubled, and divided by their number.
        penalty=size.regression_strength * noise / (weight.sum() * Y.shape[1]),
        module__target_center=target_center,
        module__target_scale=target_scale,
        **settings,
    )


# ------------------------------------------------------- variants for other estimators
def without_penalty(net: PenalisedNet) -> NeuralNet:
    """Return the unfitted net without a penalty, for training with `CosineAdam`."""
    is_regressor = isinstance(net, PenalisedRegressor)
    kind = NeuralNetRegressor if is_regressor else NeuralNetClassifier
    return kind(**_architecture(net), **_ADAM)


def with_dropout(net: PenalisedNet) -> PenalisedNet:
    """Return the unfitted net with dropout, for training with `CosineAdam`."""
    settings = _architecture(net) | {"module": DropoutNetwork}
    return type(net)(**settings, penalty=net.penalty, part_size=net.part_size, **_ADAM)


def _architecture(net: NeuralNet) -> dict[str, Any]:
    """Return the parameters of a net that concern its module and criterion."""
    return {
        name: value
        for name, value in net.get_params(deep=False).items()
        if name in ("module", "criterion") or name.startswith("module__")
    }


# ------------------------------------------------------------------------------- data
def require_array(X: object) -> np.ndarray:
    """Return X if it is an array; default networks accept no other input."""
    if isinstance(X, np.ndarray):
        return X
    raise ValueError(
        f"X is of type {type(X).__name__}, but estimator=None builds a network for "
        "arrays. Pass an array, or a skorch net."
    )


def _targets_and_settings(
    data: TrainingData, size: Size
) -> tuple[np.ndarray, Array, float, dict[str, Any]]:
    """Return targets (n, c), weights (n,), the noise and parameters of the skorch net.

    Samples with zero weight are left out of the targets and weights. The noise is a
    fraction of the target variance; see the module docstring. The parameters determine
    the standardisation, the size of the network, and its training.
    """
    X, Y, weight = require_array(data.X), data.y, data.sample_weight
    if X.ndim != 2:
        raise ValueError(
            f"X has shape {X.shape}, but estimator=None builds a network for tables "
            "(n, n_features). Use X.reshape(len(X), -1), or pass a skorch net."
        )
    weight = np.ones(len(X)) if weight is None else weight.astype(np.float64)
    X, Y, weight = X[weight > 0], Y[weight > 0], weight[weight > 0]
    # the inputs of the network are the columns and their pieces, at most MAX_INPUTS
    n_pieces = min(size.n_pieces, MAX_INPUTS // X.shape[1] - 1)
    center, scale = center_and_scale(X, weight)
    # at most one piece per column means no pieces
    pieces = piecewise_linear((X - center) / scale, weight, max(n_pieces, 1))
    module: dict[str, Any] = {"center": center, "scale": scale, "pieces": pieces}
    module["hidden_units"] = size.hidden_units
    # the estimate uses a network of its own, with one output
    noise = _noise_fraction(X, Y, weight, module)
    module["n_outputs"] = Y.shape[1]
    settings = {f"module__{name}": value for name, value in module.items()}
    return Y, weight, noise, settings | size.training


def piecewise_linear(Z: Array, weight: Array, n_pieces: int) -> Array:
    """Return pieces between the quantiles of each column; see `with_pieces`.

    A linear model on the pieces of a column is a piecewise linear function of the
    column. The values of each piece are standardised over the samples.

    Parameters
    ----------
    Z : ndarray of shape (n, n_features)
        Standardised inputs.
    weight : ndarray of shape (n,)
        Positive sample weights. A weight is the number of repetitions of its sample.
    n_pieces : int
        Maximum number of pieces per column. Columns with fewer than three distinct
        quantiles have no pieces.

    Returns
    -------
    ndarray of shape (m, 5)
        Pieces, as `with_pieces` expects them.

    References
    ----------
    Gorishniy, Rubachev and Babenko (2022), "On embeddings for numerical features in
    tabular deep learning", eq. (1). Here, pieces are constant beyond the outer
    quantiles.
    """
    levels = np.linspace(0, 1, n_pieces + 1)
    # knots are weighted quantiles; numpy accepts weights only with this method
    rule: Any = {"weights": weight, "method": "inverted_cdf"}
    knots = [np.unique(np.quantile(z, levels, **rule)) for z in Z.T]
    # index of the column, start and length, for each interval between two knots
    spans_by_column = [
        np.column_stack([np.full(len(k) - 1, index), k[:-1], np.diff(k)])
        for index, k in enumerate(knots)
        if len(k) > 2
    ]
    spans = np.concatenate([np.empty((0, 3)), *spans_by_column])
    # pieces without standardisation: mean 0 and scale 1
    unscaled = np.column_stack([spans, np.zeros(len(spans)), np.ones(len(spans))])
    values = with_pieces(torch.from_numpy(Z), torch.from_numpy(unscaled)).numpy()
    # the pieces follow the inputs
    mean, scale = center_and_scale(values[:, Z.shape[1] :], weight)
    return np.column_stack([spans, mean, scale])


def center_and_scale(values: Array, weight: Array) -> tuple[Array, Array]:
    """Return the weighted mean and scale of each column, with scale 1 if constant."""
    # Dividing by the largest value avoids overflow. Subtracting the first row makes
    # constant columns exactly zero.
    largest = np.abs(values).max(axis=0)
    largest[largest == 0] = 1.0
    values = values / largest
    first = values[0]
    values = values - first
    mean = np.average(values, axis=0, weights=weight)
    variance = np.average((values - mean) ** 2, axis=0, weights=weight)
    scale = np.sqrt(variance) * largest
    scale[scale == 0] = 1.0
    return (first + mean) * largest, scale


# -------------------------------------------------------------------- noise by evidence
@one_blas_thread()
def _noise_fraction(X: Array, Y: Array, weight: Array, module: dict[str, Any]) -> float:
    """Estimate the noise as a fraction of the target variance, between 0 and 1.

    The targets are standardised, and a Bayesian linear model is fitted to the features
    of an untrained network. The result is the noise variance that maximises the
    evidence of this model, averaged over targets. ``module`` contains arguments of
    `TabularNetwork`, without ``n_outputs``.
    """
    target_center, target_scale = center_and_scale(Y, weight)
    Y = (Y - target_center) / target_scale
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        # with a fixed seed, the features depend only on the inputs; the head of the
        # network, which has one output, is not used
        torch.default_generator.manual_seed(0)
        network = TabularNetwork(**module, n_outputs=1)
        features = network.features(torch.from_numpy(X)).numpy()
    features = features - np.average(features, axis=0, weights=weight)
    # with these factors, sums of squares and products over samples are weighted
    root_weight = np.sqrt(weight)[:, None]
    eigenvalues, projections = _spectrum(root_weight * features, root_weight * Y)
    sum_of_squares = weight @ Y**2  # (c,)
    best = most_probable(eigenvalues, projections, sum_of_squares, weight.sum())
    varying = best.variance[sum_of_squares > 0]  # noise variances of the targets
    # Constant targets contain no information about the noise of other targets.
    return float(np.clip(varying.mean(), MIN_NOISE, 1.0)) if varying.size else 1.0


def _spectrum(features: Array, Y: Array) -> tuple[Array, Array]:
    """Return what the evidence of a linear model depends on, for features F (n, p).

    These are the eigenvalues of F'F, (k,), and the squares of Q'F'Y, (k, c), for its
    eigenvectors Q and the targets Y (n, c). Of F'F and FF', the smaller matrix is
    decomposed, k = min(n, p). Both have the same nonzero eigenvalues.
    """
    if len(features) > features.shape[1]:
        eigenvalues, vectors = np.linalg.eigh(features.T @ features)
        return eigenvalues.clip(0), (vectors.T @ (features.T @ Y)) ** 2
    eigenvalues, vectors = np.linalg.eigh(features @ features.T)
    eigenvalues = eigenvalues.clip(0)  # rounding errors can make zeros negative
    # With eigenvectors U and eigenvalues e of FF', the eigenvectors of F'F are
    # Q = F'U / sqrt(e), so Q'F'Y = sqrt(e) U'Y, whose squares are returned.
    return eigenvalues, eigenvalues[:, None] * (vectors.T @ Y) ** 2
