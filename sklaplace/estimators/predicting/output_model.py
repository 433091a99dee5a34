"""OutputModel: the distribution of a network's outputs for new samples.

A model draws weights, dropout masks or networks. Each draw yields outputs. For a
linearised network with a Gaussian posterior over weights, the outputs are Gaussian with
closed-form moments. `BatchedOutputs` evaluates models with and without closed forms,
batch by batch.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sklaplace.core import progress
from sklaplace.core.budget import require_bytes
from sklaplace.core.checks import check_count
from sklaplace.core.linalg import all_finite
from sklaplace.core.parallel import (
    cached_property,
    n_workers,
    one_thread,
    ordered_map,
)
from sklaplace.core.trees import Batch, Inputs
from sklaplace.curvature.features import FeatureRecorder
from sklaplace.data.dataset import Batches, count_rows
from sklaplace.likelihoods.base import loss_weights_or_ones, losses_by_output
from sklaplace.networks.forward import Forward
from sklaplace.networks.outputs import OutputSpec
from sklaplace.networks.shards import shards_of, subset
from sklaplace.networks.trained import TrainedNetwork
from sklaplace.posterior.predictive import WeightDistribution, moments, network_draws


@dataclass(frozen=True)
class OutputModel(ABC):
    """Draws of a network's outputs, and the Gaussian with the same moments.

    Attributes
    ----------
    n_samples : int
        Number of draws.
    seed : int
        Seed of the draws. All samples and calls use the same seed.
    """

    n_samples: int
    seed: int

    @property
    def is_gaussian(self) -> bool:
        """Whether the outputs are Gaussian with known moments, without draws."""
        return False

    @abstractmethod
    def draws(self, forward: Forward, x: Batch) -> Tensor:
        """Return joint draws of a batch's outputs, (b, c, s), float64."""

    def gaussian(
        self,
        forward: Forward,
        x: Batch,
        *,
        n_blocks: int,
        diagonal: bool,
        centred: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return means (b, c), and covariances (b, c, c) or variances (b, c).

        Parameters
        ----------
        forward : Forward
            Network, inside ``forward.frozen()``.
        x : batch
            Batch of b samples.
        n_blocks : int
            Number of blocks of outputs. Covariances are computed only within blocks.
        diagonal : bool
            Whether to return variances instead of covariances.
        centred : bool
            Whether to subtract the mean over outputs, which a softmax ignores.
        """
        drawn = self.draws(forward, x)
        return moments(drawn, n_blocks=n_blocks, diagonal=diagonal, centred=centred)

    def redrawn(self, n_samples: int, seed: int) -> "OutputModel":
        """Return a copy of the model with new draws."""
        return replace(self, n_samples=n_samples, seed=seed)

    def check_variance(self) -> None:
        """Raise ValueError if there is only one draw, which has no variance."""
        if self.n_samples == 1:
            raise ValueError("n_samples=1 has no variance. Use 2 or more, such as 100.")

    def joint(
        self, outputs: "BatchedOutputs", X: Inputs, across_outputs: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the means (n, c) and covariances between samples, from draws.

        The covariances have the shape (n, n, c) or, ``across_outputs``, (n·c, n·c).
        """
        self.check_variance()
        # the draws of an output, and intermediate results
        require_joint(outputs, X, across_outputs, 3 * self.n_samples)
        draws = torch.from_numpy(outputs.map_draws(X)[0])  # (n, c, s)
        # `moments` returns covariances along axis 1: all values, or samples per output
        batches = draws.flatten(0, 1)[None] if across_outputs else draws.movedim(1, 0)
        _, cov = moments(batches, diagonal=False, centred=False)
        return draws.mean(-1), cov[0] if across_outputs else cov.movedim(0, -1)


@dataclass(frozen=True)
class WeightDraws(OutputModel):
    """Outputs of the network with weights drawn from a distribution.

    Attributes
    ----------
    posterior : WeightDistribution
        Distribution of the weights.
    """

    posterior: WeightDistribution

    @cached_property
    def weights(self) -> Tensor:
        """Drawn weights (s, P). Raises ValueError if they do not fit into memory."""
        require_draws(self.n_samples, self.posterior.layout.n_parameters)
        generator = torch.Generator().manual_seed(self.seed)
        return self.posterior.sample(self.n_samples, generator)

    def draws(self, forward: Forward, x: Batch) -> Tensor:
        """Return outputs (b, c, s) of the network with the drawn weights."""
        return network_draws(self.posterior, forward, x, self.weights)


@dataclass(frozen=True)
class PointOutputs(OutputModel):
    """Outputs of the network with its current weights, treated as a single draw."""

    def draws(self, forward: Forward, x: Batch) -> Tensor:
        """Return outputs (b, c, 1)."""
        with torch.no_grad():
            return forward(x).double().unsqueeze(-1)


def unchanged(values: Tensor) -> Tensor:
    """Return the argument."""
    return values


def as_pair(mean: Tensor, cov: Tensor) -> tuple[Tensor, Tensor]:
    """Return the arguments."""
    return mean, cov


# more than one shard per worker, so that faster workers can process more shards
SHARDS_PER_WORKER = 4


@dataclass(frozen=True)
class BatchedOutputs:
    """Outputs of a trained network for any number of samples.

    Attributes
    ----------
    network : TrainedNetwork
        Trained network.
    model : OutputModel
        Distribution of the network's outputs.
    batch_size : int or None
        Number of samples per batch. If None, choose a number that fits into the memory
        budget.
    row_elements : int
        Number of float64 values computed per sample.
    n_jobs : int or None
        Number of workers; see `ordered_map`.
    name, verbose
        Name of the estimator, and its ``verbose``; see `progress.reporting`.
    in_worker : bool
        Whether this object is in a worker. A worker does not start further workers.
    """

    network: TrainedNetwork
    model: OutputModel
    batch_size: int | None = None
    row_elements: int = 0
    n_jobs: int | None = None
    name: str = ""
    verbose: Any = 0
    in_worker: bool = False

    # ------------------------------------------------------------------- Gaussians
    def map_gaussian(
        self,
        X: Inputs,
        function: Callable[..., tuple[Tensor, ...]],
        *,
        diagonal: bool,
        centred: bool = False,
        n_leading: int = 0,
    ) -> list[np.ndarray]:
        """Apply a function to each sample's Gaussian over outputs.

        Parameters
        ----------
        X : inputs
            Checked and cast inputs.
        function : callable
            Function of the means (b, c), and of the covariances (b, c, c) or, if
            ``diagonal``, the variances (b, c). Returns tensors (b, ...).
        diagonal, centred : bool
            See `OutputModel.gaussian`.
        n_leading : int
            If positive, the function has two more arguments: the indices (b, m) of the
            m outputs with the largest means, and the covariances (b, m, m) among these
            outputs, from which the mean over all outputs is subtracted. The model must
            have `GLMOutputs.covariance_among`.

        Returns
        -------
        list of ndarray of shape (n, ...)
            Values of the function for all samples.
        """
        if not diagonal:
            check_covariances(self.network.spec)
        # the batch size leaves memory for these
        needs: dict[str, Any] = {
            "with_covariance": not diagonal,
            # covariances among m outputs take as much memory as m draws
            "n_draws": self._n_draws() + n_leading,
        }
        if self._takes_workers:
            of_shard = partial(
                BatchedOutputs.map_gaussian,
                function=function,
                diagonal=diagonal,
                centred=centred,
                n_leading=n_leading,
            )
            return self._in_workers(of_shard, X, **needs)
        results = []
        with self.evaluation(X, **needs) as (forward, batches):
            for x, _, _ in batches:
                mean, cov = self.model.gaussian(
                    forward,
                    x,
                    n_blocks=self.network.spec.likelihood.n_blocks,
                    diagonal=diagonal,
                    centred=centred,
                )
                mean, cov = require_finite(mean, cov)
                among: tuple[Tensor, ...] = ()
                if n_leading:
                    model: Any = self.model
                    leading = mean.topk(n_leading).indices
                    among = leading, model.covariance_among(forward, x, leading)
                results.append(function(mean, cov, *among))
        return joined(results)

    def latent(
        self, X: Inputs, full_cov: bool = False, function: Any = as_pair
    ) -> list[np.ndarray]:
        """Return means (n, c), and variances (n, c) or covariances (n, c, c).

        With ``function``, return the function's values, which have the same shapes.
        """
        if full_cov:
            n, c = count_rows(X), self.network.spec.n_outputs
            # float64 covariances, and a copy
            require_bytes(
                2 * 8 * n * self.network.spec.covariance_size,
                "cpu",
                f"full_cov=True for {n:,} rows of {c:,} outputs",
                "use full_cov=False, or fewer rows at a time",
            )
        return self.map_gaussian(X, function, diagonal=not full_cov)

    def map_predictions(
        self, X: Inputs, function: Callable[..., tuple[Tensor, ...]]
    ) -> list[np.ndarray]:
        """Return means and variances (n, c), and the values of a function of batches.

        The arguments of the function are the features (or None), inputs, means and
        variances. It returns a tuple of tensors (b, ...).
        """
        needs = {"n_draws": self._n_draws()}
        if self._takes_workers:
            of_shard = partial(BatchedOutputs.map_predictions, function=function)
            return self._in_workers(of_shard, X, **needs)
        layers, results = self.network.spec.feature_layers, []
        with self.evaluation(X, **needs) as (forward, batches):
            for x, _, _ in batches:
                with FeatureRecorder(forward, layers) as recorder, torch.no_grad():
                    # draws use other weights, so that features need their own pass
                    if not self.model.is_gaussian:
                        forward(x)
                    mean, variance = self.variances(forward, x)
                    features = recorder.take(len(mean))
                values = function(features, x, mean, variance)
                results.append((mean, variance, *values))
        return joined(results)

    def _n_draws(self) -> int:
        """Return the number of draws for moments; raise an error for a single draw."""
        if self.model.is_gaussian:
            return 0
        self.model.check_variance()
        return self.model.n_samples

    def variances(self, forward: Forward, x: Batch) -> tuple[Tensor, Tensor]:
        """Return finite means and variances (b, c) of a batch, or raise ValueError."""
        mean, variance = self.model.gaussian(
            forward, x, n_blocks=1, diagonal=True, centred=False
        )
        return require_finite(mean, variance)

    def map_features(
        self, X: Inputs, function: Callable[[Tensor | None, Tensor, Any], Tensor]
    ) -> list[np.ndarray]:
        """Return the values of a function of features, outputs and inputs, in a list.

        The features (or None) and outputs of each batch are those of the trained
        network. The list contains one array (n, ...).
        """
        if self._takes_workers:
            of_shard = partial(BatchedOutputs.map_features, function=function)
            return self._in_workers(of_shard, X)
        layers, results = self.network.spec.feature_layers, []
        with self.evaluation(X) as (forward, batches):
            for x, _, _ in batches:
                with FeatureRecorder(forward, layers) as recorder, torch.no_grad():
                    f = forward(x)
                    require_finite(f, f)
                    results.append((function(recorder.take(len(f)), f, x),))
        return joined(results)

    def joint(
        self, X: Inputs, across_outputs: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return means (n, c), and covariances between samples, (n, n, c), per output.

        With ``across_outputs``, the covariance has the shape (n·c, n·c), and the
        outputs of a sample are adjacent.
        """
        mean, cov = self.model.joint(self, X, across_outputs)
        return mean.cpu().numpy(), cov.cpu().numpy()

    # ----------------------------------------------------------------------- draws
    def map_draws(
        self, X: Inputs, function: Callable[[Tensor], Tensor] = unchanged
    ) -> list[np.ndarray]:
        """Return the values of a function of the draws (b, c, s), in a list.

        The list contains one array (n, ...).
        """
        needs = {"n_draws": self.model.n_samples}
        if self._takes_workers:
            of_shard = partial(BatchedOutputs.map_draws, function=function)
            return self._in_workers(of_shard, X, **needs)
        with self.evaluation(X, **needs) as (forward, batches):
            draws = (self.model.draws(forward, x) for x, _, _ in batches)
            return joined([(function(of_batch),) for of_batch in draws])

    def sample(self, X: Inputs, n_samples: int, seed: int) -> np.ndarray:
        """Return joint draws of the outputs, (n, c, s)."""
        n_samples = check_count("n_samples", n_samples)
        n_values = count_rows(X) * self.network.spec.n_outputs
        require_bytes(
            16 * n_samples * n_values,  # float64, and a copy
            "cpu",
            f"n_samples={n_samples:,} draws of {n_values:,} outputs",
            "draw fewer at a time, each time with a different random_state",
        )
        redrawn = replace(self, model=self.model.redrawn(n_samples, seed))
        return redrawn.map_draws(X)[0]

    def draws_of(self, dataset: object) -> Iterator[tuple[Tensor, Any, Tensor | None]]:
        """Yield draws (b, c, s), targets and weights of each batch of a dataset.

        The caller must freeze the network.
        """
        forward = self.network.forward()
        for x, y, weights in self.batches_of(dataset, n_draws=self.model.n_samples):
            yield self.model.draws(forward, x), y, weights

    def gaussians_of(self, dataset: object) -> Iterator[tuple[Any, Any, Any, Any]]:
        """Yield inputs, moments, targets and weights of each batch.

        The moments are a pair: means (b, c) and variances (b, c). The caller must
        freeze the network.
        """
        forward = self.network.forward()
        for x, y, weights in self.batches_of(dataset, n_draws=self._n_draws()):
            yield x, self.variances(forward, x), y, weights

    def losses_of(self, dataset: object) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Yield losses (b, c, s), weights (b,) and the number of targets per sample.

        The losses are those of `losses_by_output`, for s draws; there is one loss per
        output if the loss is a sum over outputs, and c is 1 otherwise. The caller must
        freeze the network.
        """
        likelihood = self.network.spec.likelihood
        for draws, y, w in self.draws_of(dataset):
            # targets and weights depend only on the format of the outputs
            targets = likelihood.targets(y, draws[..., 0])
            losses_of_draws = [
                losses_by_output(likelihood, f, targets) for f in draws.unbind(-1)
            ]
            losses = torch.stack(losses_of_draws, -1)
            weights = loss_weights_or_ones(likelihood, targets, w, draws[..., 0])
            weights = weights.to(losses)
            yield losses, weights, likelihood.n_targets(draws.shape[1])

    # --------------------------------------------------------------------- batches
    @property
    def _takes_workers(self) -> bool:
        """Whether to divide samples among workers."""
        return not self.in_worker and n_workers(self.n_jobs) > 0

    def _in_workers(
        self,
        function: Callable[["BatchedOutputs", Any], list[np.ndarray]],
        X: Inputs,
        **needs: Any,
    ) -> list[np.ndarray]:
        """Return the arrays of a method of this class, computed by workers.

        ``function`` receives a copy of this object and a shard of the dataset. All
        shards have batches of the same size as without workers. ``needs`` contains
        arguments of `batches_of`.
        """
        dataset, workers = self._dataset(X), n_workers(self.n_jobs)
        batch_size = self.batches_of(dataset, **needs).batch_size
        in_worker = replace(self, batch_size=batch_size, verbose=0, in_worker=True)
        of_shard = partial(function, in_worker)
        n_shards = SHARDS_PER_WORKER * workers if workers > 1 else 1
        shards = shards_of(dataset, batch_size, n_shards)
        if len(shards) > 1:
            with one_thread():
                # The first batch is computed here, so that workers receive the values
                # that the posterior caches between batches.
                of_shard(subset(dataset, slice(0, 1)))
        with progress.reporting(self.name, self.verbose):
            results = ordered_map(
                of_shard, shards, n_jobs=self.n_jobs, label="predictions"
            )
            # one list of arrays per shard, joined array by array
            return [np.concatenate(pieces) for pieces in zip(*results, strict=True)]

    def _dataset(self, X: Inputs) -> Any:
        """Return the dataset of the inputs; a worker already receives a dataset."""
        count_rows(X)  # raises for streams
        # a worker receives a part of the dataset
        return X if self.in_worker else self.network.net.get_dataset(X)

    @contextmanager
    def evaluation(self, X: Inputs, **needs: object) -> Iterator[tuple[Forward, Any]]:
        """Yield the network in evaluation mode, and batches of inputs or a dataset.

        A batch is a tuple of inputs, targets and weights. ``needs`` contains arguments
        of `batches_of`.

        The modes and hooks of the network are restored, even after an error.
        """
        batches = self.batches_of(self._dataset(X), **needs)
        forward = self.network.forward()
        with progress.reporting(self.name, self.verbose), forward.frozen():
            yield forward, progress.tracked(batches, "predictions", len(batches))

    def batches_of(self, dataset: Any, **needs: Any) -> Batches:
        """Return the batches of a dataset.

        ``needs`` contains arguments of `TrainedNetwork.batches`, which say whether a
        batch needs memory for covariances or draws.
        """
        return self.network.batches(
            dataset, self.batch_size, row_elements=self.row_elements, **needs
        )


def joined(parts: Sequence[tuple[Tensor, ...]]) -> list[np.ndarray]:
    """Concatenate the tensors of batches into arrays on the CPU."""
    # concatenate copies, because a single batch may share memory with a cache
    return [torch.cat(pieces).cpu().numpy() for pieces in zip(*parts, strict=True)]


def check_covariances(spec: OutputSpec) -> None:
    """Raise ValueError if the covariance of one sample does not fit into memory."""
    require_bytes(
        4 * 8 * spec.covariance_size,  # float64, with intermediate results
        "cpu",
        f"a covariance between {spec.n_outputs:,} outputs",
        "use link_approx='probit' and dirichlet_approx='bridge', which only need "
        "variances",
    )


def require_draws(n_samples: int, n_weights: int) -> None:
    """Raise ValueError if draws of weights do not fit into memory."""
    require_bytes(
        8 * n_samples * 3 * n_weights,  # float64, with intermediate results
        "cpu",
        f"n_samples={n_samples:,} draws of {n_weights:,} weights",
        "set a smaller n_samples. If you call a sample method, draw fewer at a time, "
        "each time with a different random_state",
    )


def require_joint(
    outputs: BatchedOutputs, X: Inputs, across_outputs: bool, n_factors: int
) -> None:
    """Raise ValueError if a joint covariance does not fit into memory.

    ``n_factors`` is the number of additional values in memory per output of a sample,
    such as draws or rows of a Jacobian, from which the covariance is computed.
    """
    n, c = count_rows(X), outputs.network.spec.n_outputs
    n_rows = n * c if across_outputs else n
    require_bytes(
        8 * n * c * (2 * n_rows + n_factors),  # float64; covariance and a copy
        "cpu",
        f"the joint covariance of {n:,} samples of {c:,} outputs",
        "pass fewer samples at a time; for variances of single samples, use "
        "return_std=True, or latent_mean_and_variance(X) without joint=True",
    )


def require_finite(mean: Tensor, cov: Tensor) -> tuple[Tensor, Tensor]:
    """Return the Gaussian over outputs; raise ValueError if it is not finite."""
    if all_finite(mean) and all_finite(cov):
        return mean, cov
    raise ValueError(
        "The network's outputs are not finite for some rows of X. Look for values "
        "far beyond the training data."
    )
