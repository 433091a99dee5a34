"""Targets: what training needs to know of targets, of classes or of numbers."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike
from skorch import NeuralNet
from skorch.dataset import Dataset
from torch import Tensor
from torch.utils.data import Subset

from sklaplace.core.serialise import worker_state
from sklaplace.likelihoods import Likelihood
from sklaplace.networks.data import TrainingData


class Targets(ABC):
    """Targets in fit: `ClassTargets` or `NumberTargets`."""

    likelihoods: ClassVar[tuple[type, ...]]
    """Types of likelihoods that such targets can have."""
    example_net: ClassVar[str]
    """A skorch net around a torch module, ``{}``, for messages."""
    stratify = False
    """Whether samples are held out class by class."""
    n_outputs: Any
    """Number of classes or target columns."""

    def __getstate__(self) -> dict[str, Any]:
        return worker_state(vars(self), ["net"])

    @abstractmethod
    def encode(self, y: ArrayLike, name: str = "y") -> np.ndarray:
        """Return targets as the criterion takes them."""

    @abstractmethod
    def adapt(self, likelihood: Likelihood) -> Likelihood:
        """Return the likelihood for the shape of the targets."""

    @abstractmethod
    def default_net(self, data: TrainingData) -> NeuralNet:
        """Return the default skorch net."""

    def sample_weight(self, y: np.ndarray) -> np.ndarray | None:
        """Return weights (n,) that encoded targets have by themselves, or None."""
        return None

    @property
    def noise_unit(self) -> float:
        """Noise in the units of ``y`` over that which the likelihood takes."""
        return 1.0

    def restored_outputs(
        self, likelihood: Any, mean: Tensor, cov: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return mean (b, q·c) and covariance of outputs in the units of ``y``."""
        return mean, cov

    def check_net(self, net: NeuralNet) -> None:  # noqa: B027
        """Raise for a net that cannot be trained on such targets."""

    def check_values(self, net: NeuralNet, y: np.ndarray) -> None:  # noqa: B027
        """Raise for encoded targets that the criterion does not take."""

    def check_held_out(self, dataset: Dataset, held_out: Dataset | None) -> None:  # noqa: B027
        """Raise for a ``train_split`` whose targets are not encoded alike."""


def brings_targets(dataset: Dataset, held_out: Dataset | None) -> bool:
    """Whether a ``train_split`` holds out samples that are not of the dataset."""
    dataset, held_out = _whole(dataset), _whole(held_out)
    return held_out is not None and held_out is not dataset


def _whole(dataset: Any) -> Any:
    """Return the dataset of a subset."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset
