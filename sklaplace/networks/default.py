"""The default networks: small tables, no setting, one deterministic recipe.

With standardised inputs ``z = (x - center) / scale / sqrt(features)`` the network is
one hidden layer beside a linear path, both read by one linear head,

    f(x) = B [gain / sqrt(H) * tanh(A z + a), z] + b,

and its weights minimise, with ``lambda = strength * noise``,

    sum_n w_n loss_n + lambda / 2 * (||A||^2 + ||a||^2 + ||B||^2).

``noise`` is the share of the target variance that a linear model on the untrained
features leaves unexplained, by its evidence (MacKay 1992). So clean data are fitted
closely and noisy data are not, without a validation set.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from skorch import NeuralNetClassifier, NeuralNetRegressor
from torch import nn

Array = NDArray[np.float64]

# Enough for tables of a few thousand rows. 64 units predicted no better and needed
# more iterations for the same fit.
HIDDEN_UNITS = 32

# tanh has a mean square of about 1/2 at initialisation, so that with this gain the
# hidden features carry twice the variance of the linear ones: one common penalty is a
# fair prior over both. A gain of 1 is stiff, one of 4 over-fits linear data.
HIDDEN_GAIN = 2.0

# Rounding errors (rows in another order) grow by a factor of about 1.3 per iteration of
# L-BFGS: this many keep them near 1e-11 and almost always below 1e-7, where hundreds
# would end in another minimum. The first iterations do most of the work: 15 more
# changed the log loss of ten small tables by at most 0.02.
MAX_ITERATIONS = 35

# Well above rounding in float64: below it the line search compares noise with noise.
GRADIENT_TOLERANCE = 1e-7

# Half the squared error plus noise / 2 * ||weights||^2 is the negative log posterior
# under a standard normal prior, in units of the noise. The prior needs no other scale.
REGRESSION_STRENGTH = 1.0

# Cross-entropy carries its own noise model, so that this factor is empirical. The log
# loss of most small tables hardly changes between 0.2 and 0.5; but 0.2 over-fits pure
# noise, and 0.5 is too flat where a curved border separates the classes.
CLASSIFICATION_STRENGTH = 0.3

# Evidence cannot tell noise from curvature below one per cent of the variance, and a
# vanishing penalty would leave the weights undetermined.
MIN_NOISE = 0.01

FULL_BATCH = {
    "max_epochs": 1,
    "batch_size": -1,
    "train_split": None,
    "callbacks": "disable",
    "verbose": 0,
}

# The fixed point of the evidence is reached to a few digits, which is all it is for.
EVIDENCE_ITERATIONS = 50


class TabularNetwork(nn.Module):
    """Standardise, one tanh layer beside a linear path, one linear head.

    All quantities that depend on the units of the data are buffers, so that the weights
    do not depend on them. The head is the last layer with weights; what follows it is
    a fixed affine map to the units of the targets.

    Parameters
    ----------
    center, scale : ndarray of shape (n_features,)
        Subtracted from the inputs, and what they are then divided by.
    n_outputs : int
        Number of outputs: logits or regression targets.
    target_center, target_scale : ndarray of shape (n_outputs,), optional
        Affine map after the head. None leaves the outputs of the head as they are.
    hidden_units : int
        Width of the hidden layer.

    Notes
    -----
    A pass costs O(b (features + n_outputs) hidden_units + b features n_outputs). The
    weights are float64 and drawn from torch's global generator.
    """

    center: torch.Tensor
    scale: torch.Tensor
    target_center: torch.Tensor
    target_scale: torch.Tensor

    def __init__(
        self,
        center: Array,
        scale: Array,
        n_outputs: int,
        target_center: Array | None = None,
        target_scale: Array | None = None,
        hidden_units: int = HIDDEN_UNITS,
    ) -> None:
        super().__init__()
        n_features = len(center)
        if target_center is None:
            target_center = np.zeros(n_outputs)
        if target_scale is None:
            target_scale = np.ones(n_outputs)
        self.register_buffer("center", _tensor(center))
        self.register_buffer("scale", _tensor(scale))
        self.register_buffer("target_center", _tensor(target_center))
        self.register_buffer("target_scale", _tensor(target_scale))
        self.hidden = nn.Linear(n_features, hidden_units, dtype=torch.float64)
        self.head = nn.Linear(hidden_units + n_features, n_outputs, dtype=torch.float64)
        nn.init.normal_(self.hidden.weight)
        nn.init.normal_(self.hidden.bias)
        # Training starts from a constant prediction; the random hidden weights are
        # what tells the units apart.
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def features(self, X: torch.Tensor) -> torch.Tensor:
        """Inputs of the head: hidden activations, then scaled inputs.

        Parameters
        ----------
        X : Tensor of shape (b, n_features)
            Inputs in their own units.

        Returns
        -------
        Tensor of shape (b, hidden_units + n_features)
            Initially the squares of a row sum to about two, and to one.
        """
        z = (X - self.center) / self.scale / self.hidden.in_features**0.5
        gain = HIDDEN_GAIN / self.hidden.out_features**0.5
        return torch.cat([gain * torch.tanh(self.hidden(z)), z], dim=1)

    def forward(self, X: torch.Tensor) -> torch.Tensor:
        """Outputs in the units of the targets, or logits.

        Parameters
        ----------
        X : Tensor of shape (b, n_features)
            Inputs in their own units.

        Returns
        -------
        Tensor of shape (b, n_outputs)
            Logits, or targets in their own units.
        """
        head: torch.Tensor = self.head(self.features(X))
        return self.target_center + self.target_scale * head

    def squared_norm(self) -> torch.Tensor:
        """Sum of squares of all weights but the head's bias.

        Returns
        -------
        Tensor of shape ()
            Dimensionless. The bias of the head is the base rate, which is not shrunk.
        """
        kept = (self.hidden.weight, self.hidden.bias, self.head.weight)
        return torch.stack([weight.square().sum() for weight in kept]).sum()


class PenalisedClassifier(NeuralNetClassifier):
    """Classifier whose loss is the criterion plus a multiple of the squared weights.

    Parameters
    ----------
    module : type of nn.Module
        Its instances have ``squared_norm()``.
    *args, **kwargs
        As for `skorch.NeuralNetClassifier`.
    penalty : float
        What ``squared_norm()`` is multiplied by.
    """

    def __init__(
        self, module: type[nn.Module], *args: Any, penalty: float = 0.0, **kwargs: Any
    ) -> None:
        self.penalty = penalty
        super().__init__(module, *args, **kwargs)

    def get_loss(
        self, y_pred: torch.Tensor, y_true: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Criterion, in nats, plus penalty; one value per row if unreduced.

        Parameters
        ----------
        y_pred : Tensor of shape (b, n_outputs)
            Logits.
        y_true : Tensor of shape (b,)
            Encoded classes.
        *args, **kwargs
            As for skorch's own method.

        Returns
        -------
        Tensor of shape () or (b,)
            The penalty is added to every entry, so that any weighted mean has it once.
        """
        loss: torch.Tensor = super().get_loss(y_pred, y_true, *args, **kwargs)
        return loss + self.penalty * self.module_.squared_norm()


class PenalisedRegressor(NeuralNetRegressor):
    """Regressor whose loss is taken in standardised units and carries a penalty.

    Targets in different units count equally, and the fit does not depend on the units.

    Parameters
    ----------
    module : type of nn.Module
        Its instances have ``squared_norm()`` and ``target_scale``.
    *args, **kwargs
        As for `skorch.NeuralNetRegressor`.
    penalty : float
        What ``squared_norm()`` is multiplied by.
    """

    def __init__(
        self, module: type[nn.Module], *args: Any, penalty: float = 0.0, **kwargs: Any
    ) -> None:
        self.penalty = penalty
        super().__init__(module, *args, **kwargs)

    def get_loss(
        self, y_pred: torch.Tensor, y_true: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Criterion in standardised units plus penalty; one value per row if unreduced.

        Parameters
        ----------
        y_pred, y_true : Tensor of shape (b, n_outputs)
            Predictions and targets in their own units.
        *args, **kwargs
            As for skorch's own method.

        Returns
        -------
        Tensor of shape () or (b, n_outputs)
            The penalty is added to every entry, so that any weighted mean has it once.
        """
        center, scale = self.module_.target_center, self.module_.target_scale
        y_pred, y_true = (y_pred - center) / scale, (y_true - center) / scale
        loss: torch.Tensor = super().get_loss(y_pred, y_true, *args, **kwargs)
        return loss + self.penalty * self.module_.squared_norm()


def default_classifier(
    X: Array,
    y: NDArray[np.integer[Any]],
    sample_weight: Array | None,
    n_classes: int,
) -> PenalisedClassifier:
    """Unfitted default network for classification.

    Prefer a network of your own for images, text and sequences, or where hundreds of
    thousands of rows deserve more capacity.

    Parameters
    ----------
    X : ndarray of shape (n_samples, n_features)
        Training inputs, float64; they fix the standardisation and the penalty.
    y : ndarray of shape (n_samples,)
        Classes encoded as 0 .. n_classes - 1.
    sample_weight : ndarray of shape (n_samples,) or None
        Weights, not negative. A weight counts repetitions of its row.
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
    about `MAX_ITERATIONS` forward and backward passes over all rows.

    References
    ----------
    MacKay, D. J. C. (1992). Bayesian interpolation. Neural Computation 4,
    section 4.
    """
    Y = np.eye(n_classes)[y]
    return penalised_classifier(X, Y, sample_weight, nn.CrossEntropyLoss)


def default_multilabel(
    X: Array, Y: Array, sample_weight: Array | None
) -> PenalisedClassifier:
    """Unfitted default network for labels that are zero or one, several per row.

    Parameters
    ----------
    X : ndarray of shape (n_samples, n_features)
        Training inputs, float64; they fix the standardisation and the penalty.
    Y : ndarray of shape (n_samples, n_labels)
        Zeros and ones.
    sample_weight : ndarray of shape (n_samples,) or None
        Weights, not negative. A weight counts repetitions of its row.

    Returns
    -------
    PenalisedClassifier
        As that of `default_classifier`, with `torch.nn.BCEWithLogitsLoss`.
    """
    # the criterion is a mean over labels, too
    share = 1 / Y.shape[1]
    Y = Y.astype(np.float64)
    return penalised_classifier(X, Y, sample_weight, nn.BCEWithLogitsLoss, share)


def penalised_classifier(
    X: Array,
    Y: Array,
    sample_weight: Array | None,
    criterion: type[nn.Module],
    share: float = 1.0,
    module: type[nn.Module] = TabularNetwork,
) -> PenalisedClassifier:
    """Unfitted default network for zeros and ones.

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
    share : float, default=1.0
        Share of the loss of a row, summed over columns, in the criterion.
    module : type of nn.Module
        `TabularNetwork`, or one that takes its arguments and has ``squared_norm()``.

    Returns
    -------
    PenalisedClassifier
        The network is initialised and trained by ``fit``.
    """
    X, Y, weight = _used_rows(X, Y, sample_weight)
    constants = _constants(X, weight)
    noise = _noise_share(X, Y, weight, constants)
    penalty = share * CLASSIFICATION_STRENGTH * noise / (2 * weight.sum())
    return PenalisedClassifier(
        module,
        criterion=criterion,
        penalty=penalty,
        module__n_outputs=Y.shape[1],
        **constants,
        **_training(),
    )


def default_regressor(
    X: Array, Y: Array, sample_weight: Array | None
) -> PenalisedRegressor:
    """Unfitted default network for regression.

    Prefer a network of your own for images, text and sequences, or where hundreds of
    thousands of rows deserve more capacity.

    Parameters
    ----------
    X : ndarray of shape (n_samples, n_features)
        Training inputs, float64; they fix the standardisation and the penalty.
    Y : ndarray of shape (n_samples, n_outputs)
        Training targets, float64, in any units.
    sample_weight : ndarray of shape (n_samples,) or None
        Weights, not negative. A weight counts repetitions of its row.

    Returns
    -------
    PenalisedRegressor
        With `torch.nn.MSELoss`. The network is initialised and trained by ``fit``, from
        torch's global generator.

    Notes
    -----
    The factory costs O(n p min(n, p)) for p = features + hidden units; ``fit`` costs
    about `MAX_ITERATIONS` forward and backward passes over all rows.

    References
    ----------
    MacKay, D. J. C. (1992). Bayesian interpolation. Neural Computation 4,
    section 4.
    """
    X, Y, weight = _used_rows(X, Y, sample_weight)
    constants = _constants(X, weight)
    noise = _noise_share(X, Y, weight, constants)
    # MSELoss is twice the loss above, and a mean over rows and outputs.
    penalty = REGRESSION_STRENGTH * noise / (weight.sum() * Y.shape[1])
    target_center, target_scale = _center_and_scale(Y, weight)
    return PenalisedRegressor(
        TabularNetwork,
        criterion=nn.MSELoss,
        penalty=penalty,
        module__n_outputs=Y.shape[1],
        module__target_center=target_center,
        module__target_scale=target_scale,
        **constants,
        **_training(),
    )


def _training() -> dict[str, Any]:
    """Return the settings of skorch for one silent full-batch run of L-BFGS."""
    return {
        "optimizer": torch.optim.LBFGS,
        "optimizer__max_iter": MAX_ITERATIONS,
        "optimizer__max_eval": 4 * MAX_ITERATIONS,
        "optimizer__tolerance_grad": GRADIENT_TOLERANCE,
        # Small changes of the loss are no reason to stop; small gradients are.
        "optimizer__tolerance_change": 0.0,
        "optimizer__history_size": 20,
        "optimizer__line_search_fn": "strong_wolfe",
        "lr": 1.0,
        **FULL_BATCH,
    }


def _tensor(values: Array) -> torch.Tensor:
    """Copy to a float64 tensor."""
    return torch.tensor(np.asarray(values), dtype=torch.float64)


def _used_rows(
    X: Array, y: NDArray[Any], sample_weight: Array | None
) -> tuple[Array, NDArray[Any], Array]:
    """Drop the rows of weight zero, which shall leave no trace."""
    if sample_weight is None:
        return X, y, np.ones(len(X))
    used = sample_weight > 0
    return X[used], y[used], sample_weight[used].astype(np.float64)


def _constants(X: Array, weight: Array) -> dict[str, Array]:
    """Return the standardisation of the inputs as parameters of the module."""
    center, scale = _center_and_scale(X, weight)
    return {"module__center": center, "module__scale": scale}


def _center_and_scale(values: Array, weight: Array) -> tuple[Array, Array]:
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


def _noise_share(
    X: Array, Y: Array, weight: Array, constants: dict[str, Array]
) -> float:
    """Noise variance of a linear model on untrained features; Y has variance 1."""
    center, scale = _center_and_scale(Y, weight)
    Y = (Y - center) / scale
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        # the same features for every order of the rows
        torch.default_generator.manual_seed(0)
        network = TabularNetwork(
            constants["module__center"], constants["module__scale"], n_outputs=1
        )
        features = network.features(torch.from_numpy(X)).numpy()
    features = features - np.average(features, axis=0, weights=weight)
    root = np.sqrt(weight)[:, None]
    curvature, projection = _spectrum(root * features, root * Y)
    total = weight @ Y**2
    noise = _evidence_noise(curvature, projection, total, weight.sum())
    varying = noise[total > 0]
    # Constant targets have nothing to learn, and say nothing about the others.
    return float(np.clip(varying.mean(), MIN_NOISE, 1.0)) if varying.size else 1.0


def _spectrum(features: Array, Y: Array) -> tuple[Array, Array]:
    """Eigenvalues of F'F and squares of Q'F'Y, from the smaller Gram matrix."""
    n_rows, n_columns = features.shape
    if n_rows > n_columns:
        eigenvalues, vectors = np.linalg.eigh(features.T @ features)
        return eigenvalues.clip(0), (vectors.T @ (features.T @ Y)) ** 2
    eigenvalues, vectors = np.linalg.eigh(features @ features.T)
    eigenvalues = eigenvalues.clip(0)
    return eigenvalues, eigenvalues[:, None] * (vectors.T @ Y) ** 2


def _evidence_noise(
    curvature: Array, projection: Array, total: Array, n_samples: float
) -> Array:
    """Noise variance per output by MacKay's fixed point; (p,), (p, c), (c,) -> (c,)."""
    # MacKay (1992), section 4: gamma well-determined directions share ||w||^2, and the
    # other n - gamma share the residuals.
    e = curvature[:, None]  # (p, 1)
    noise, precision = np.full(len(total), 0.5), np.ones(len(total))
    for _ in range(EVIDENCE_ITERATIONS):
        ridge = precision * noise
        gamma = (e / (e + ridge)).sum(axis=0)
        norm = (projection / (e + ridge) ** 2).sum(axis=0)
        explained = (projection * (e + 2 * ridge) / (e + ridge) ** 2).sum(axis=0)
        residual = (total - explained).clip(0)
        # The bounds matter for constant targets and for more directions than rows.
        precision = (gamma / norm.clip(1e-12)).clip(1e-6, 1e6)
        noise = (residual / (n_samples - gamma).clip(1e-12)).clip(1e-6, 1.0)
    return noise
