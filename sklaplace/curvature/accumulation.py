"""Accumulate the curvature and loss of a trained network over samples.

`accumulate` is the only function that sums curvature over samples. The samples are
processed in parts, by the builtin ``map`` or by joblib workers.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import reduce
from operator import iadd
from typing import Any

import torch
from torch import Tensor

from sklaplace.core import progress
from sklaplace.core.linalg import all_finite
from sklaplace.core.random import private_rng, row_hash
from sklaplace.core.trees import Batch
from sklaplace.curvature.derivatives import exact_hessian
from sklaplace.curvature.ggn import Curvature
from sklaplace.curvature.jacobian import Jacobian, backpropagate_in_parts
from sklaplace.curvature.recorder import check_independent
from sklaplace.curvature.structures import Accumulator
from sklaplace.data.streams import Samples
from sklaplace.likelihoods.base import DataFit, Likelihood, loss_weights
from sklaplace.likelihoods.output_hessian import OutputHessian
from sklaplace.networks.forward import Forward
from sklaplace.networks.trained import TrainedNetwork


@dataclass(frozen=True)
class ObservedRows:
    """Rows ``SᵀJ`` of a batch, and the values that determine them.

    Attributes
    ----------
    f : Tensor of shape (b, c)
        Outputs.
    hessian : OutputHessian
        ``S Sᵀ``.
    jacobian : Jacobian
        Rows for all or only some of the columns of ``S``.
    targets : Tensor
        Targets from `Likelihood.targets`.
    weights : Tensor of shape (b,) or None
        Sample weights; None means ones.
    keys : Tensor of shape (b,) or None
        Hashes of the samples, if they are needed.
    """

    f: Tensor
    hessian: OutputHessian
    jacobian: Jacobian
    targets: Tensor
    weights: Tensor | None
    keys: Tensor | None


class Recorder(AbstractContextManager["Recorder"]):
    """Base class that records nothing; subclasses record statistics during a pass.

    Parameters
    ----------
    network : TrainedNetwork
        The network.
    forward : Forward
        The network as a function of a batch.

    Attributes
    ----------
    has_compared : bool
        Whether the outputs of a batch have been compared with those of a smaller batch.
    """

    has_compared = False

    def __init__(self, network: TrainedNetwork, forward: Forward) -> None: ...

    def __exit__(self, *_: object) -> None:
        """End the pass."""

    def observe(self, rows: ObservedRows) -> None:
        """Record rows. A batch may be recorded in several calls, column by column."""

    def observe_batch(
        self, x: Batch, f: Tensor, targets: Tensor, weights: Tensor | None
    ) -> None:
        """Record a whole batch with outputs (b, c), after its rows."""

    def result(self) -> Any:
        """Return the record (an object with a ``merge`` method) or None."""
        return None


@dataclass
class CurvatureSums:
    """Curvature and loss, summed over samples.

    Attributes
    ----------
    accumulator : Accumulator
        Sum of the curvature.
    data_fit : DataFit
        Sum of the loss.
    record : object or None
        Result of a `Recorder`.
    """

    accumulator: Accumulator
    data_fit: DataFit
    record: Any = None

    def __iadd__(self, other: "CurvatureSums") -> "CurvatureSums":
        """Add the sums over the samples that follow."""
        self.accumulator.merge(other.accumulator)
        self.data_fit = self.data_fit + other.data_fit
        if other.record is not None:
            self.record.merge(other.record)
        return self


def accumulate(
    network: TrainedNetwork,
    parts: Sequence[Samples],
    curvature: Curvature,
    accumulator: Accumulator,
    *,
    batch_size: int | None = None,
    recorder: Callable[[TrainedNetwork, Forward], Recorder] = Recorder,
    map: Callable[..., Iterable[CurvatureSums]] = map,  # noqa: A002 - like the builtin
) -> CurvatureSums:
    """Sum the curvature and the loss over samples.

    Each part is summed in one pass. Some structures need further passes, which start
    from the sums of the previous pass. Losses and records come from the first pass.

    Parameters
    ----------
    network : TrainedNetwork
        The trained network.
    parts : sequence of Dataset
        Parts of the samples. The sums over the parts are added in order.
    curvature : Curvature
        Curvature to sum.
    accumulator : Accumulator
        Empty accumulator of the structure, which is copied, not modified.
    batch_size : int or None
        Samples per batch.
    recorder : callable
        Creates the `Recorder` for one part from the network and its `Forward`.
    map : callable
        Called as ``map(function, parts)``; yields the results in the order of parts.

    Returns
    -------
    CurvatureSums

    Raises
    ------
    ValueError
        If an output is not finite.
    """
    first_pass = _Pass(network, curvature, accumulator, batch_size, recorder)
    sums = reduce(iadd, map(first_pass, parts))
    while sums.accumulator.needs_another_pass():
        # losses and records are complete; the base class of recorders records nothing
        next_pass = replace(first_pass, accumulator=sums.accumulator, recorder=Recorder)
        sums.accumulator = reduce(iadd, map(next_pass, parts)).accumulator
    return sums


@dataclass(frozen=True)
class _Pass:
    """A pass over the samples of one part; see `accumulate`."""

    network: TrainedNetwork
    curvature: Curvature
    accumulator: Accumulator
    batch_size: int | None
    recorder: Callable[[TrainedNetwork, Forward], Recorder]

    def __call__(self, samples: Samples) -> CurvatureSums:
        """Return the sums of curvature and loss over a dataset, and the record.

        Each batch is first added to the accumulator and passed to the recorder. Its
        loss is then computed from the same outputs. For a `Head`, the outputs of the
        first batch are also compared with those of a smaller batch, unless the recorder
        compares them.
        """
        # a copy, since the pass over each part starts from the same sums
        network, accumulator = self.network, copy.deepcopy(self.accumulator)
        batches = network.batches(samples, self.batch_size)
        likelihood = network.spec.likelihood
        forward, fits = network.forward(), list[DataFit]()
        # loaders and modules may draw random numbers, which a fixed seed determines
        with (
            private_rng(0, network.device),
            forward.frozen(),
            self.recorder(network, forward) as recorder,
        ):
            for x, y, w in progress.tracked(batches, "curvature", len(batches)):
                batch = _Batch(
                    forward, likelihood, self.curvature, accumulator, x, y, w
                )
                f = batch.add(recorder)
                recorder.observe_batch(x, f, batch.targets, batch.weights)
                layout = accumulator.layout
                if layout.head is not None and not fits and not recorder.has_compared:
                    # no fits, so this is the first batch. The rows of a head need only
                    # one forward pass, which does not show whether outputs depend on
                    # the other samples. Later batches are not compared, to save time.
                    check_independent(forward, x, f, layout.rounding)
                fits.append(batch.data_fit(f.double()))
            return CurvatureSums(accumulator, DataFit.total(fits), recorder.result())


@dataclass
class _Batch:
    """One batch, whose targets are set after the outputs are computed.

    ``y`` and ``sample_weight`` are the values from the data set. ``weights`` are the
    weights of the losses, or None for ones. ``keys`` are hashes of the samples.
    """

    forward: Forward
    likelihood: Likelihood
    curvature: Curvature
    accumulator: Accumulator
    x: Batch
    y: Tensor
    sample_weight: Tensor | None
    weights: Tensor | None = None
    keys: Tensor | None = None

    def add(self, recorder: Recorder) -> Tensor:
        """Add the curvature of the batch, and return its outputs (b, c).

        The curvature is ``Jᵀ S Sᵀ J``, for the roots ``S`` (b, c, k) of the curvature
        with respect to the outputs. The rows ``SᵀJ`` are computed for as many of the k
        columns at a time as fit into memory. Once the outputs are known,
        `_output_hessian` is called, which also sets the targets, the weights and the
        ``hessian``, ``S Sᵀ``. Curvature with second derivatives of the network has no
        rows and is added as a matrix.
        """
        layout = self.accumulator.layout
        # outputs are linear in the weights of a `Head`, so its Hessian has rows
        if self.curvature.is_exact and layout.head is None:
            return self._add_matrix()
        if self.curvature.is_random or self.accumulator.takes_keys:
            self.keys = row_hash(self.x)
        parts = backpropagate_in_parts(
            self.forward, self.x, layout, self._output_hessian
        )
        for f, jacobian in parts:  # all parts have the same outputs
            weights, keys = self.weights, self.keys
            self.accumulator.update(replace(jacobian, weights=weights, keys=keys))
            recorder.observe(
                ObservedRows(f, self.hessian, jacobian, self.targets, weights, keys)
            )
        return f

    def _add_matrix(self) -> Tensor:
        """Add the loss Hessian with respect to the weights; return outputs (b, c)."""
        with torch.no_grad():
            f: Tensor = self.forward(self.x)
        # the loss needs targets, and these may depend on the outputs
        self._set_targets(f)

        def loss(outputs: Tensor) -> Tensor:
            """Return the loss in the dtype of the outputs."""
            return self.data_fit(outputs).loss

        hessian = exact_hessian(self.forward, self.x, self.accumulator.layout, loss)
        self.accumulator.add_matrix(hessian)
        return f

    def _set_targets(self, f: Tensor) -> None:
        """Set the targets and the weights of the samples' losses.

        ``weights`` is None if all samples have weight one; ``sample_weights`` then
        contains ones. Raise ValueError if an output is not finite.
        """
        if not all_finite(f):
            raise ValueError(
                "The network's outputs are not finite for some training samples: its "
                "training has diverged. Lower the learning rate or scale the inputs."
            )
        self.targets = self.likelihood.targets(self.y, f)
        self.weights = loss_weights(self.likelihood, self.targets, self.sample_weight)
        ones = torch.ones(len(f), dtype=torch.float64, device=f.device)
        self.sample_weights = ones if self.weights is None else self.weights.double()

    def _output_hessian(self, f: Tensor) -> OutputHessian:
        """Return ``w S Sᵀ``, the Hessian of each sample's weighted loss in its outputs.

        Other curvatures than the Hessian have another ``S``. Also set the targets, the
        weights and the ``hessian`` for later steps.
        """
        self._set_targets(f)
        self.hessian = self.curvature(
            self.likelihood, f, self.targets, self.weights, self.keys
        )
        return self.hessian

    def _n_targets(self, f: Tensor) -> Tensor:
        """Return the weighted number of observed targets, (), float64.

        The likelihood returns one weight per label, (b, r), such as zero for a missing
        label, or None if all labels have weight one.
        """
        label_weights = self.likelihood.label_weights(self.targets)
        if label_weights is None:
            return self.sample_weights.sum() * self.likelihood.n_targets(f.shape[1])
        return self.sample_weights @ label_weights.sum(1)

    def data_fit(self, f: Tensor) -> DataFit:
        """Return the weighted loss for outputs ``f``, in their dtype, and its count.

        The count is the weighted number of targets. Real targets are converted to the
        dtype of the outputs, and class labels stay integers.
        """
        is_real = self.targets.is_floating_point()
        targets = self.targets.to(f.dtype) if is_real else self.targets
        weights, n_targets = self.sample_weights, self._n_targets(f)
        return DataFit.of(self.likelihood, f, targets, weights, n_targets)
