"""Targets: the interface that class labels and regression targets share."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike
from skorch import NeuralNet
from skorch.dataset import Dataset
from torch import Tensor
from torch.utils.data import Subset

from sklaplace.data.dataset import TrainingData
from sklaplace.likelihoods import CRITERIA, Likelihood
from sklaplace.networks.default import Size


class Targets(ABC):
    """Base class of training targets: `ClassTargets` and `NumberTargets`."""

    likelihoods: ClassVar[tuple[type, ...]]
    """Likelihood classes that support these targets."""
    example_net: ClassVar[str]
    """Code of a skorch net with a torch module ``{}``, for messages."""
    stratify = False
    """Whether held-out samples are stratified by class."""
    n_outputs: Any
    """Number of classes or target columns."""

    @abstractmethod
    def encode(self, y: ArrayLike, name: str = "y") -> np.ndarray:
        """Convert targets to the form that the criterion expects."""

    @abstractmethod
    def adapt(self, likelihood: Likelihood) -> Likelihood:
        """Return the likelihood, adapted to the shape of the targets."""

    @abstractmethod
    def default_net(self, data: TrainingData, size: Size) -> NeuralNet:
        """Return the default skorch net of the given size."""

    def sample_weight(self, y: np.ndarray) -> np.ndarray | None:
        """Return the sample weights (n,) implied by encoded targets, or None."""
        return None

    @property
    def noise_unit(self) -> float:
        """Noise level in units of ``y``, divided by that of the likelihood."""
        return 1.0

    def restored_outputs(
        self, likelihood: Any, mean: Tensor, cov: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return means (b, q·c) and covariances of outputs in units of ``y``.

        There are b groups of q samples with a joint covariance, and c outputs of each
        sample. By default, outputs are in these units.
        """
        return mean, cov

    def check_net(self, net: NeuralNet) -> None:  # noqa: B027
        """Raise an error if a net cannot be trained on these targets."""

    def match(self, net: NeuralNet, y: np.ndarray) -> None:  # noqa: B027
        """Prepare the criterion of a copied net for encoded targets.

        Raise an error for targets that the criterion does not support.
        """

    @property
    @abstractmethod
    def are_plain(self) -> bool:
        """Whether the encoding leaves targets unchanged."""

    def check_held_out(self, dataset: Dataset, held_out: Dataset | None) -> None:
        """Raise ValueError if targets from ``train_split`` are not encoded.

        skorch's ``train_split`` can return samples that are not part of the training
        data. Their targets are as the user stored them, so the encoding must not change
        targets (``are_plain``).
        """
        if brings_targets(dataset, held_out) and not self.are_plain:
            raise ValueError(
                "train_split adds rows whose targets are not encoded. Number the "
                "classes from 0, use normalize_y=False, or pass X_val and y_val to fit."
            )


def criterion_of(net: NeuralNet) -> type:
    """Return the class of a net's criterion."""
    criterion = getattr(net, "criterion", None)
    return criterion if isinstance(criterion, type) else type(criterion)


def likelihood_of(net: NeuralNet) -> Any:
    """Return the likelihood implied by a net's criterion, or None if unknown."""
    return CRITERIA.get(criterion_of(net), (None, ""))[0]


def brings_targets(dataset: Dataset, held_out: Dataset | None) -> bool:
    """Return whether ``train_split`` holds out samples that are not in the dataset.

    Otherwise, it holds out none, or both are parts of the same dataset.
    """
    dataset, held_out = _whole(dataset), _whole(held_out)
    return held_out is not None and held_out is not dataset


def _whole(dataset: Any) -> Any:
    """Return the dataset from which a subset selects samples."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset
