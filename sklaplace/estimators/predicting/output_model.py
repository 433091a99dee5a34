"""OutputModel: the distribution of a network's outputs for new samples.

Weights, dropout masks or networks are drawn, and each draw gives outputs; or, for the
linearised network under a Gaussian over weights, the outputs are Gaussian in closed
form. `BatchedOutputs` evaluates either, batch by batch.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sklaplace.core import progress
from sklaplace.core.budget import require_bytes
from sklaplace.core.checks import check_count
from sklaplace.core.linalg import all_finite
from sklaplace.core.parallel import n_workers, ordered_map, torch_threads
from sklaplace.curvature.features import FeatureRecorder
from sklaplace.likelihoods.base import weighted
from sklaplace.networks.data import Batches, count_rows
from sklaplace.networks.forward import Forward
from sklaplace.networks.outputs import OutputSpec
from sklaplace.networks.shards import Shards, cut
from sklaplace.networks.trained import TrainedNetwork
from sklaplace.posterior.predictive import WeightDistribution, moments, network_draws


@dataclass(frozen=True)
class OutputModel(ABC):
    """Draws of a network's outputs, and a Gaussian with their moments.

    Attributes
    ----------
    n_samples : int
        Number of draws.
    seed : int
        Seed of the draws: the same for all samples and all calls.
    """

    n_samples: int
    seed: int

    @property
    def is_gaussian(self) -> bool:
        """Whether outputs are Gaussian in closed form, so that no draws are needed."""
        return False

    @abstractmethod
    def draws(self, forward: Forward, x: Any) -> Tensor:
        """Return joint draws of the outputs of a batch, (b, c, s), float64."""

    def gaussian(
        self, forward: Forward, x: Any, *, n_blocks: int, diagonal: bool, centred: bool
    ) -> tuple[Tensor, Tensor]:
        """Return mean (b, c) and covariance (b, c, c), or variances (b, c).

        Parameters
        ----------
        forward : Forward
            The network, inside ``forward.frozen()``.
        x : batch
            b samples.
        n_blocks : int
            Blocks that the outputs fall into: covariances are those within blocks.
        diagonal : bool
            Return variances.
        centred : bool
            Subtract the mean over outputs, which a softmax is invariant to.
        """
        found = self.draws(forward, x)
        return moments(found, n_blocks=n_blocks, diagonal=diagonal, centred=centred)

    def redrawn(self, n_samples: int, seed: int) -> "OutputModel":
        """Return the same model with other draws."""
        return replace(self, n_samples=n_samples, seed=seed)

    def check_draws(self, smallest: int = 1) -> None:
        """Raise for a number of draws that is too small, or no number."""
        check_count("n_samples", self.n_samples, smallest)

    def check_variance(self) -> None:
        """Raise where a variance would be that of a single draw."""
        if self.n_samples == 1:
            raise ValueError(
                "n_samples=1 has no variance, and there is no other than that of the "
                "draws. Use 2 or more, such as 100."
            )

    def joint(
        self, outputs: "BatchedOutputs", X: Any, across_outputs: bool
    ) -> tuple[Tensor, Tensor]:
        """Return mean (n, c) and covariances, see `BatchedOutputs.joint`."""
        self.check_variance()
        require_joint(outputs, X, across_outputs, 3 * self.n_samples)
        draws = outputs.map_draws(X)
        # covariances are those within groups of values
        by_group = draws.flatten(0, 1)[None] if across_outputs else draws.movedim(1, 0)
        _, cov = moments(by_group, diagonal=False, centred=False)
        return draws.mean(-1), cov[0] if across_outputs else cov.movedim(0, -1)


@dataclass(frozen=True)
class WeightDraws(OutputModel):
    """Outputs of the network under weights drawn from a distribution.

    Attributes
    ----------
    posterior : WeightDistribution
        Distribution of the weights.
    """

    posterior: WeightDistribution

    @cached_property
    def weights(self) -> Tensor:
        """Weights (s, P), if they fit into memory."""
        self.check_draws()
        require_draws(self.n_samples, self.posterior.layout.n_parameters)
        generator = torch.Generator().manual_seed(self.seed)
        return self.posterior.sample(self.n_samples, generator)

    def draws(self, forward: Forward, x: Any) -> Tensor:
        """Return outputs (b, c, s) of the network under the drawn weights."""
        return network_draws(self.posterior, forward, x, self.weights)


@dataclass(frozen=True)
class PointOutputs(OutputModel):
    """Outputs of the network at its own weights, as a single draw."""

    def draws(self, forward: Forward, x: Any) -> Tensor:
        """Return outputs (b, c, 1)."""
        with torch.no_grad():
            return forward(x).double().unsqueeze(-1)


BatchFunction = Callable[[Forward, Any], tuple[Tensor, ...]]
# several, so that workers that are faster than others take more
SHARDS_PER_WORKER = 4


@dataclass(frozen=True)
class OutputPass:
    """A function of each batch, and of the network, for all samples of a dataset.

    Attributes
    ----------
    network : TrainedNetwork
        The network.
    function : callable
        Of the network as a function, which is frozen, and of a batch of b samples;
        returns tensors (b, ...).
    batch_size : int
        Samples per batch.
    """

    network: TrainedNetwork
    function: BatchFunction
    batch_size: int

    def __call__(self, samples: Any) -> list[Tensor]:
        """Return the tensors for all samples, on the CPU."""
        forward = self.network.forward()
        with forward.frozen():
            batches = self.network.batches(samples, self.batch_size)
            tracked = progress.tracked(batches, "predictions", len(batches))
            parts = [self.function(forward, x) for x, _, _ in tracked]
        # concatenation copies: a single batch may share memory with a cache
        return [torch.cat(pieces).cpu() for pieces in zip(*parts, strict=True)]

    def of_all(self, dataset: Any, n_jobs: int | None) -> list[Tensor]:
        """Return the tensors for all samples, computed in ``n_jobs`` workers."""
        workers = n_workers(n_jobs)
        n_shards = SHARDS_PER_WORKER * workers if workers > 1 else 1
        shards = Shards.of(dataset, self.batch_size, n_shards)
        if len(shards) > 1:
            with torch_threads(1):
                # here, so that the workers get what the posterior keeps from one batch
                # to the next
                self(cut(dataset, slice(0, 1)))
        parts = list(ordered_map(self, shards, n_jobs=n_jobs, label="predictions"))
        if len(parts) == 1:
            return parts[0]
        return [torch.cat(pieces) for pieces in zip(*parts, strict=True)]


@dataclass(frozen=True)
class BatchedOutputs:
    """Outputs of a trained network for samples of any number.

    Attributes
    ----------
    network : TrainedNetwork
        The network.
    model : OutputModel
        Distribution of its outputs.
    batch_size : int or None
        Samples per batch; None fits them into the memory budget.
    row_elements : int
        Float64 numbers that are computed for each sample.
    n_jobs : int or None
        Number of workers, see `ordered_map`.
    scope : tuple of str and int
        Name of the estimator and its ``verbose``, see `progress.reporting`.
    """

    network: TrainedNetwork
    model: OutputModel
    batch_size: int | None = None
    row_elements: int = 0
    n_jobs: int | None = None
    scope: tuple[str, Any] = ("", 0)

    def __post_init__(self) -> None:
        """Raise for values that are not valid, as they may be set after fit."""
        self.model.check_draws()

    # ------------------------------------------------------------------- Gaussians
    def map_gaussian(
        self,
        X: Any,
        function: Callable[[Tensor, Tensor], tuple[Tensor, ...]],
        *,
        diagonal: bool,
        centred: bool = False,
    ) -> list[np.ndarray]:
        """Return functions of each sample's Gaussian over outputs, for all samples.

        Parameters
        ----------
        X : inputs
            Checked and cast.
        function : callable
            Of mean (b, c) and covariance (b, c, c), or variances (b, c) if
            ``diagonal``; returns tensors (b, ...).
        diagonal, centred : bool
            See `OutputModel.gaussian`.
        """
        n_draws = 0
        if not self.model.is_gaussian:
            self.model.check_variance()
            n_draws = self.model.n_samples
        if not diagonal:
            check_covariances(self.network.spec)
        model: OutputModel = self.model
        options = {
            "n_blocks": self.network.spec.likelihood.n_blocks,
            "diagonal": diagonal,
            "centred": centred,
        }

        def of_batch(forward: Forward, x: Any) -> tuple[Tensor, ...]:
            return function(*require_finite(*model.gaussian(forward, x, **options)))

        sizes: dict[str, Any] = {"with_covariance": not diagonal, "n_draws": n_draws}
        return [part.numpy() for part in self._mapped(X, of_batch, **sizes)]

    def latent(
        self, X: Any, full_cov: bool = False, function: Any = lambda m, c: (m, c)
    ) -> list[np.ndarray]:
        """Return means (n, c) and variances (n, c), or covariances (n, c, c).

        Or a ``function`` of these that is of their sizes.
        """
        if full_cov:
            n, c = count_rows(X), self.network.spec.n_outputs
            require_bytes(
                2 * 8 * n * self.network.spec.covariance_size,
                "cpu",
                f"full_cov=True for {n:,} rows of {c:,} outputs",
                "use full_cov=False, or fewer rows at a time",
            )
        return self.map_gaussian(X, function, diagonal=not full_cov)

    def map_features(
        self, X: Any, function: Callable[[Tensor | None, Tensor, Any], Tensor]
    ) -> np.ndarray:
        """Return a function of features, outputs and inputs of the network as trained.

        See `FeatureRecorder`.
        """
        layers = self.network.spec.feature_layers

        def of_batch(forward: Forward, x: Any) -> tuple[Tensor, ...]:
            with FeatureRecorder(forward, layers) as recorder, torch.no_grad():
                f = forward(x)
                require_finite(f, f)
                return (function(recorder.take(len(f)), f, x),)

        return self._mapped(X, of_batch)[0].numpy()

    def joint(
        self, X: Any, across_outputs: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return mean (n, c) and covariance (n, n, c) of each output over samples.

        Or ``across_outputs`` as well, (n·c, n·c); outputs of a sample are adjacent.
        """
        mean, cov = self.model.joint(self, X, across_outputs)
        return mean.cpu().numpy(), cov.cpu().numpy()

    # ----------------------------------------------------------------------- draws
    def map_draws(
        self, X: Any, function: Callable[[Tensor], Tensor] = lambda draws: draws
    ) -> Tensor:
        """Return a function of the draws (b, c, s), for all samples."""
        model: OutputModel = self.model

        def of_batch(forward: Forward, x: Any) -> tuple[Tensor, ...]:
            return (function(model.draws(forward, x)),)

        return self._mapped(X, of_batch, n_draws=model.n_samples)[0]

    def sample(self, X: Any, n_samples: int, seed: int) -> np.ndarray:
        """Return joint draws of the outputs, (n, c, s)."""
        check_count("n_samples", n_samples)
        n_values = count_rows(X) * self.network.spec.n_outputs
        require_bytes(
            16 * n_samples * n_values,
            "cpu",
            f"n_samples={n_samples:,} draws of {n_values:,} outputs",
            "draw fewer at a time, each with a random_state of its own",
        )
        redrawn = replace(self, model=self.model.redrawn(n_samples, seed))
        return redrawn.map_draws(X).numpy()

    def draws_of(self, dataset: Any) -> Iterator[tuple[Tensor, Any, Tensor | None]]:
        """Yield draws (b, c, s), targets and weights of each batch of a dataset.

        The caller has frozen the network.
        """
        forward = self.network.forward()
        for x, y, weights in self._batches(dataset, n_draws=self.model.n_samples):
            yield self.model.draws(forward, x), y, weights

    def losses_of(self, dataset: Any) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Yield losses (b, s) under draws, weights (b,), targets per sample of batches.

        The caller has frozen the network.
        """
        likelihood = self.network.spec.likelihood
        for draws, y, w in self.draws_of(dataset):
            targets = likelihood.targets(y, draws[..., 0])
            of_draws = [likelihood.loss(f, targets) for f in draws.unbind(-1)]
            losses = torch.stack(of_draws, 1)
            w = weighted(likelihood, targets, w)
            weights = torch.ones_like(losses[:, 0]) if w is None else w.to(losses)
            yield losses, weights, likelihood.n_targets(draws.shape[1])

    # --------------------------------------------------------------------- batches
    def _mapped(self, X: Any, function: BatchFunction, **sizes: Any) -> list[Tensor]:
        """Return a function of each batch of X, for all samples, on the CPU."""
        count_rows(X)
        dataset = self.network.net.get_dataset(X)
        batch_size = self._batches(dataset, **sizes).batch_size
        work = OutputPass(self.network, function, batch_size)
        with progress.reporting(*self.scope):
            return work.of_all(dataset, self.n_jobs)

    @contextmanager
    def evaluation(
        self, dataset: Any, **sizes: Any
    ) -> Iterator[tuple[Forward, Batches]]:
        """The network in evaluation mode, and batches of a dataset.

        Modes and hooks are restored in any case.
        """
        batches = self._batches(dataset, **sizes)
        forward = self.network.forward()
        with forward.frozen():
            yield forward, batches

    def _batches(self, dataset: Any, **sizes: Any) -> Batches:
        return self.network.batches(
            dataset, self.batch_size, row_elements=self.row_elements, **sizes
        )


def check_covariances(spec: OutputSpec) -> None:
    """Raise if not even the covariance of one sample's outputs fits into memory."""
    require_bytes(
        4 * 8 * spec.covariance_size,
        "cpu",
        f"a covariance between {spec.n_outputs:,} outputs",
        "use link_approx='probit' and dirichlet_approx='bridge', which need variances "
        "alone",
    )


def require_draws(n_samples: int, n_weights: int) -> None:
    """Raise if draws of weights do not fit into memory."""
    require_bytes(
        8 * n_samples * 3 * n_weights,
        "cpu",
        f"n_samples={n_samples:,} draws of {n_weights:,} weights",
        "set a smaller n_samples; of samples, draw fewer at a time, each with a "
        "random_state of its own",
    )


def require_joint(
    outputs: BatchedOutputs, X: Any, across_outputs: bool, n_factors: int
) -> None:
    """Raise if a joint covariance, of ``n_factors`` factors, does not fit memory."""
    n, c = count_rows(X), outputs.network.spec.n_outputs
    n_rows = n * c if across_outputs else n
    require_bytes(
        8 * n * c * (2 * n_rows + n_factors),
        "cpu",
        f"the joint covariance of {n:,} samples of {c:,} outputs",
        "use return_std=True, or latent_mean_and_variance(X) without joint=True, for "
        "variances of single samples; or ask for fewer samples at a time",
    )


def require_finite(mean: Tensor, cov: Tensor) -> tuple[Tensor, Tensor]:
    """Return the Gaussian over outputs; raises if it is not finite."""
    if all_finite(mean) and all_finite(cov):
        return mean, cov
    raise ValueError(
        "The network's outputs are not finite for some rows of X. Look for values far "
        "beyond those it was trained on."
    )
