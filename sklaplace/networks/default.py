"""The default networks: for small tables, without settings, trained deterministically.

The weights of a `TabularNetwork` minimise, with ``lambda = strength * noise``,

    sum_n w_n loss_n + lambda / 2 * (||A||^2 + ||a||^2 + ||B||^2).

``noise`` is the fraction of the target variance that a linear model on the untrained
features leaves unexplained, at the maximum of its evidence (MacKay 1992). So the
regularisation follows the noise in the data, without a validation set.
"""

from typing import Any

import numpy as np
import torch
from skorch import NeuralNet, NeuralNetClassifier, NeuralNetRegressor
from torch import Tensor, nn

from sklaplace.networks.optimizer import CosineAdam
from sklaplace.networks.tabular import Array, DropoutNetwork, TabularNetwork

# Rounding errors (samples in another order) grow by a factor of about 1.3 per iteration
# of L-BFGS: this many keep them near 1e-11 and almost always below 1e-7, where hundreds
# would end in another minimum. The first iterations do most of the work: 15 more
# changed the log loss of ten small tables by at most 0.02.
MAX_ITERATIONS = 35

# Well above rounding in float64, below which the line search compares noise with noise.
GRADIENT_TOLERANCE = 1e-7

# Half the squared error plus noise / 2 * ||weights||^2 is the negative log posterior
# under a standard normal prior, in units of the noise. The prior needs no other scale.
REGRESSION_STRENGTH = 1.0

# Cross-entropy includes its own noise model, so that this factor is empirical. The log
# loss of most small tables hardly changes between 0.2 and 0.5; but 0.2 overfits pure
# noise, and 0.5 underfits a curved decision boundary.
CLASSIFICATION_STRENGTH = 0.3

# Below one per cent of the variance, evidence cannot distinguish noise from
# nonlinearity, and a vanishing penalty would leave the weights undetermined.
MIN_NOISE = 0.01

# The fixed point of the evidence is needed to a few digits only.
EVIDENCE_ITERATIONS = 50

# Gradients under sampled weights or dropout masks need more and smaller steps.
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
    # Only small gradients end the training, not small changes of the loss.
    "optimizer__tolerance_change": 0.0,
    "optimizer__history_size": 20,
    "optimizer__line_search_fn": "strong_wolfe",
}
# L-BFGS compares losses, which differ from step to step under sampled weights.
_ADAM: dict[str, Any] = {
    **_FULL_BATCH,
    "optimizer": CosineAdam,
    "lr": STOCHASTIC_RATE,
    "optimizer__n_steps": STOCHASTIC_STEPS,
}


# ------------------------------------------------------------------------------- nets
class PenalisedNet(NeuralNet):
    """Net whose loss is the criterion plus ``penalty * module.squared_norm()``.

    Parameters
    ----------
    module : type of nn.Module
        Its instances have ``squared_norm()``.
    *args, **kwargs
        As for `skorch.NeuralNet`.
    penalty : float
        Factor of the squared norm.
    """

    def __init__(
        self,
        module: type[nn.Module],
        *args: object,
        penalty: float = 0.0,
        **kwargs: object,
    ) -> None:
        self.penalty = penalty
        super().__init__(module, *args, **kwargs)

    def get_loss(
        self, y_pred: Tensor, y_true: Tensor, *args: object, **kwargs: object
    ) -> Tensor:
        """Criterion plus penalty, (), or (b, ...) if unreduced.

        The penalty is added to every entry, so that any weighted mean has it once.
        """
        loss = super().get_loss(y_pred, y_true, *args, **kwargs)
        return loss + self.penalty * self.module_.squared_norm()


class PenalisedClassifier(PenalisedNet, NeuralNetClassifier):
    """Classifier with a penalty; parameters as for `PenalisedNet`."""


class PenalisedRegressor(PenalisedNet, NeuralNetRegressor):
    """Regressor with a penalty, and a loss in standardised units of the targets.

    Targets in different units count equally, and the fit does not depend on the units.
    Parameters as for `PenalisedNet`; the module has ``target_center`` and
    ``target_scale``.
    """

    def get_loss(
        self, y_pred: Tensor, y_true: Tensor, *args: object, **kwargs: object
    ) -> Tensor:
        """Criterion in standardised units plus penalty, as for `PenalisedNet`."""
        center, scale = self.module_.target_center, self.module_.target_scale
        y_pred, y_true = (y_pred - center) / scale, (y_true - center) / scale
        return super().get_loss(y_pred, y_true, *args, **kwargs)


# -------------------------------------------------------------------------- factories
def default_classifier(
    X: object, y: np.ndarray, sample_weight: Array | None, n_classes: int
) -> PenalisedClassifier:
    """Unfitted default network for classification.

    Prefer a network of your own for images, text and sequences, or where hundreds of
    thousands of samples deserve more capacity.

    Parameters
    ----------
    X : ndarray of shape (n_samples, n_features)
        Training inputs, float64; they fix the standardisation and the penalty.
    y : ndarray of shape (n_samples,)
        Classes encoded as 0 .. n_classes - 1.
    sample_weight : ndarray of shape (n_samples,) or None
        Weights, not negative. A weight counts repetitions of its sample.
    n_classes : int
        Number of outputs (logits).

    Returns
    -------
    PenalisedClassifier
        With `torch.nn.CrossEntropyLoss`. The network is initialised and trained by
        ``fit``, from torch's global generator.

    Notes
    -----
    The factory costs O(n p min(n, p)) for p = features + hidden units; ``fit`` costs
    about `MAX_ITERATIONS` forward and backward passes over all samples.

    References
    ----------
    MacKay, D. J. C. (1992). Bayesian interpolation. Neural Computation 4,
    section 4.
    """
    Y = np.eye(n_classes)[y]
    return penalised_classifier(X, Y, sample_weight, nn.CrossEntropyLoss)


def default_multilabel(
    X: object, Y: Array, sample_weight: Array | None
) -> PenalisedClassifier:
    """Unfitted default network for binary labels Y (n_samples, n_labels).

    As `default_classifier`, with `torch.nn.BCEWithLogitsLoss`.
    """
    criterion, factor = nn.BCEWithLogitsLoss, 1 / Y.shape[1]  # a mean over labels, too
    return penalised_classifier(X, Y.astype(float), sample_weight, criterion, factor)


def penalised_classifier(
    X: object,
    Y: Array,
    sample_weight: Array | None,
    criterion: type[nn.Module],
    factor: float = 1.0,
    module: type[nn.Module] = TabularNetwork,
) -> PenalisedClassifier:
    """Unfitted default network for targets that are zeros and ones.

    Parameters
    ----------
    X : ndarray of shape (n_samples, n_features)
        Inputs that fix the standardisation and the penalty.
    Y : ndarray of shape (n_samples, n_outputs)
        Zeros and ones.
    sample_weight : ndarray of shape (n_samples,) or None
        Weights, not negative.
    criterion : type of nn.Module
        Of one logit for each column.
    factor : float, default=1.0
        Factor of a sample's loss, summed over columns, in the criterion.
    module : type of nn.Module
        `TabularNetwork`, or one that takes its arguments and has ``squared_norm()``.

    Returns
    -------
    PenalisedClassifier
        The network is initialised and trained by ``fit``.
    """
    Y, weight, noise, settings = _prepared(X, Y, sample_weight)
    penalty = factor * CLASSIFICATION_STRENGTH * noise / (2 * weight.sum())
    return PenalisedClassifier(module, criterion=criterion, penalty=penalty, **settings)


def default_regressor(
    X: object, Y: Array, sample_weight: Array | None
) -> PenalisedRegressor:
    """Unfitted default network for regression targets Y (n_samples, n_outputs).

    As `default_classifier`, with `torch.nn.MSELoss`; targets may have any units.
    """
    Y, weight, noise, settings = _prepared(X, Y, sample_weight)
    target_center, target_scale = center_and_scale(Y, weight)
    return PenalisedRegressor(
        TabularNetwork,
        criterion=nn.MSELoss,
        # MSELoss is twice the loss above, and a mean over samples and outputs.
        penalty=REGRESSION_STRENGTH * noise / (weight.sum() * Y.shape[1]),
        module__target_center=target_center,
        module__target_scale=target_scale,
        **settings,
    )


# ------------------------------------------------------- variants for other estimators
def is_penalised(net: NeuralNet) -> bool:
    """Whether a net is one of the default networks, whose loss has a penalty."""
    return isinstance(net, PenalisedNet)


def without_penalty(net: PenalisedNet) -> NeuralNet:
    """Unfitted default network without its penalty, trained by `CosineAdam`."""
    is_regressor = isinstance(net, PenalisedRegressor)
    kind = NeuralNetRegressor if is_regressor else NeuralNetClassifier
    return kind(**_architecture(net), **_ADAM)


def with_dropout(net: PenalisedNet) -> PenalisedNet:
    """Unfitted default network with dropout and penalty, trained by `CosineAdam`."""
    settings = _architecture(net) | {"module": DropoutNetwork}
    return type(net)(**settings, penalty=net.penalty, **_ADAM)


def _architecture(net: NeuralNet) -> dict[str, Any]:
    """Parameters of a net that determine its module and its criterion."""
    return {
        name: value
        for name, value in net.get_params(deep=False).items()
        if name in ("module", "criterion") or name.startswith("module__")
    }


# ------------------------------------------------------------------------------- data
def require_array(X: object) -> np.ndarray:
    """Return an array; raise for inputs that no default network takes."""
    if isinstance(X, np.ndarray):
        return X
    raise ValueError(
        f"X is of type {type(X).__name__}, and estimator=None is a network for "
        "arrays. Pass an array, or a skorch net."
    )


def _prepared(
    X: object, Y: np.ndarray, weight: Array | None
) -> tuple[np.ndarray, Array, float, dict[str, Any]]:
    """Targets and weights that are not zero, the noise, and common settings."""
    X = require_array(X)
    if X.ndim != 2:
        raise ValueError(
            f"X has shape {X.shape}, and estimator=None is a network for tables, "
            "(n, n_features). Use X.reshape(len(X), -1), or pass a skorch net."
        )
    weight = np.ones(len(X)) if weight is None else weight.astype(np.float64)
    X, Y, weight = X[weight > 0], Y[weight > 0], weight[weight > 0]
    center, scale = center_and_scale(X, weight)
    noise = _noise_fraction(X, Y, weight, center, scale)
    module = {"center": center, "scale": scale, "n_outputs": Y.shape[1]}
    settings = {f"module__{name}": value for name, value in module.items()}
    return Y, weight, noise, settings | _LBFGS


def center_and_scale(values: Array, weight: Array) -> tuple[Array, Array]:
    """Weighted mean and standard deviation per column; scale 1 where constant."""
    # Divided by the largest value nothing overflows, and without the first row
    # constant columns are exactly zero.
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
def _noise_fraction(
    X: Array, Y: Array, weight: Array, center: Array, scale: Array
) -> float:
    """Noise variance over target variance, of a linear model on untrained features."""
    target_center, target_scale = center_and_scale(Y, weight)
    Y = (Y - target_center) / target_scale
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        # a fixed seed: the features depend on nothing but the inputs
        torch.default_generator.manual_seed(0)
        network = TabularNetwork(center, scale, n_outputs=1)
        features = network.features(torch.from_numpy(X)).numpy()
    features = features - np.average(features, axis=0, weights=weight)
    root = np.sqrt(weight)[:, None]
    eigenvalues, projections = _spectrum(root * features, root * Y)
    total = weight @ Y**2
    noise = _evidence_noise(eigenvalues, projections, total, weight.sum())
    varying = noise[total > 0]
    # Constant targets carry no information about the noise of the others.
    return float(np.clip(varying.mean(), MIN_NOISE, 1.0)) if varying.size else 1.0


def _spectrum(features: Array, Y: Array) -> tuple[Array, Array]:
    """Eigenvalues of F'F and squares of Q'F'Y, from the smaller Gram matrix."""
    if len(features) > features.shape[1]:
        eigenvalues, vectors = np.linalg.eigh(features.T @ features)
        return eigenvalues.clip(0), (vectors.T @ (features.T @ Y)) ** 2
    eigenvalues, vectors = np.linalg.eigh(features @ features.T)
    eigenvalues = eigenvalues.clip(0)
    return eigenvalues, eigenvalues[:, None] * (vectors.T @ Y) ** 2


def _evidence_noise(
    eigenvalues: Array, projections: Array, total: Array, n_samples: float
) -> Array:
    """Noise variance (c,) of each output, by MacKay's fixed point.

    Parameters
    ----------
    eigenvalues : ndarray of shape (p,)
        Of F'F = Q diag(e) Q', for features F (n, p).
    projections : ndarray of shape (p, c)
        Squares of Q'F'Y.
    total : ndarray of shape (c,)
        Sums of squares of the targets Y.
    n_samples : float
        Sum of the weights.
    """
    # MacKay (1992), section 4: ||w||^2 belongs to gamma well-determined parameters, the
    # residuals to the other n - gamma degrees of freedom.
    e = eigenvalues[:, None]  # (p, 1)
    noise, precision = np.full(len(total), 0.5), np.ones(len(total))
    for _ in range(EVIDENCE_ITERATIONS):
        ridge = precision * noise
        gamma = (e / (e + ridge)).sum(axis=0)
        norm = (projections / (e + ridge) ** 2).sum(axis=0)
        explained = (projections * (e + 2 * ridge) / (e + ridge) ** 2).sum(axis=0)
        residual = (total - explained).clip(0)
        # The bounds matter for constant targets and for more directions than samples.
        precision = (gamma / norm.clip(1e-12)).clip(1e-6, 1e6)
        noise = (residual / (n_samples - gamma).clip(1e-12)).clip(1e-6, 1.0)
    return noise
