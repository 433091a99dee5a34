"""Stochastic gradient descent that starts from trained weights.

Each step is ``θ ← θ - lr (∇ℓ(θ) + λ θ)`` with a constant learning rate. ``ℓ`` is the
net's own loss on a random batch, and ``λ`` is the weight decay of its optimizer. The
iterates spread around the minimum along flat directions of the loss (Maddox et al.
2019, "A simple baseline for Bayesian uncertainty in deep learning").
"""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from skorch import NeuralNet
from torch import Tensor
from torch.utils.data import Dataset, Subset

from sklaplace.core import progress
from sklaplace.core.checks import Check, check_count, check_positive
from sklaplace.core.random import counter_uniforms, row_hash
from sklaplace.curvature.layout import Layout
from sklaplace.data.dataset import Batches, first_rows
from sklaplace.data.streams import Samples, require_choice
from sklaplace.networks.forward import first_tensor
from sklaplace.networks.outputs import as_forward
from sklaplace.networks.training import copied, logits_alone, weighted_loss

# Maximum mean fraction of the training samples in a batch. With nearly all samples, the
# gradient would have almost no noise.
MAX_BATCH_FRACTION = 0.1
# Number of samples to hash at a time.
HASH_BATCH_SIZE = 1024


@dataclass(frozen=True)
class Schedule:
    """Number and size of the steps, and number of collected iterates (snapshots).

    Attributes
    ----------
    n_snapshots : int
        Number of iterates to collect.
    steps_per_snapshot : int
        Number of steps between snapshots.
    lr : float
        Constant learning rate.
    """

    n_snapshots: int = 100
    steps_per_snapshot: int = 1
    lr: float = 0.01


SCHEDULE_CHECKS: Mapping[str, Check] = {
    "n_snapshots": partial(check_count, smallest=2),  # for a variance
    "steps_per_snapshot": check_count,
    "lr": check_positive,
}


@dataclass(frozen=True)
class Descent:
    """Stochastic gradient descent from the weights of a trained net.

    The network is in evaluation mode, as it is for predictions. Batch normalisation
    therefore uses its running statistics, and dropout is inactive.

    Attributes
    ----------
    net : skorch.NeuralNet
        Trained net. It is copied, not modified.
    dataset : Dataset
        Training samples, with or without weights.
    weight_decay : mapping of str to float
        Weight decay by parameter name; zero for parameters without an entry.
    seed : int
        Seed of the batches. The batch drawn in each step depends on this seed and on
        hashes of the inputs, but not on the order of samples. The mean batch size is
        the net's ``batch_size``, but at most a tenth of the number of samples.
    """

    net: NeuralNet
    dataset: Samples
    weight_decay: Mapping[str, float]
    seed: int

    def iterates(self, layout: Layout, schedule: Schedule) -> Iterator[Tensor]:
        """Yield the selected weights of each snapshot, (P,), in float64.

        In each step, a sample is in the batch if its random number is below the
        fraction of samples that a batch contains on average. A step with an empty batch
        leaves the weights unchanged. Only the selected parameters are trained. The net
        is copied, since the steps change its weights in place.
        """
        net = copied(self.net)
        module = as_forward(net).module.eval().requires_grad_(False)
        parameters = dict(module.named_parameters())
        leaves = [parameters[block.name].requires_grad_() for block in layout.blocks]
        decays = [self.weight_decay.get(block.name, 0.0) for block in layout.blocks]
        batches = Batches(self.net, self.dataset, HASH_BATCH_SIZE)
        keys = torch.cat([row_hash(x) for x, _, _ in batches])  # one hash per sample
        fraction = self._fraction(len(keys))
        # transformers return several outputs, but a criterion takes one tensor
        with logits_alone(net, first_rows(net, self.dataset)):
            for step in range(schedule.n_snapshots * schedule.steps_per_snapshot):
                # one random number per sample, new in each step
                uniforms = counter_uniforms(keys, 1, self.seed + step)[:, 0]
                drawn = (uniforms < fraction).nonzero()[:, 0].tolist()
                if drawn:
                    gradients = self._gradients(net, drawn, leaves)
                    steps = zip(leaves, gradients, decays, strict=True)
                    with torch.no_grad():
                        for leaf, g, decay in steps:
                            leaf -= schedule.lr * (g + decay * leaf)
                if (step + 1) % schedule.steps_per_snapshot == 0:
                    yield layout.read(module)

    def moments(
        self, layout: Layout, schedule: Schedule, max_rank: int = 0
    ) -> "WeightMoments":
        """Return moments of the selected weights over the snapshots of `iterates`.

        ``max_rank`` is the number of last snapshots whose deviations from the mean are
        kept; see `WeightMoments`.
        """
        start = layout.read(as_forward(self.net).module)
        moments = WeightMoments(start, max_rank)
        iterates = self.iterates(layout, schedule)
        for weights in progress.tracked(iterates, "snapshots", schedule.n_snapshots):
            moments.update(weights)
        return moments

    def _fraction(self, n_samples: int) -> float:
        """Return the fraction of all samples that a batch contains on average."""
        options = self.net.get_params_for("iterator_train")
        fraction = options.get("batch_size", self.net.batch_size) / n_samples
        # a batch size of -1 means all samples
        return min(MAX_BATCH_FRACTION, fraction) if fraction > 0 else MAX_BATCH_FRACTION

    def _gradients(
        self, net: NeuralNet, drawn: list[int], leaves: list[Tensor]
    ) -> tuple[Tensor, ...]:
        """Return the gradients of the mean loss over the drawn samples.

        ``drawn`` contains the indices of the samples. The mean is weighted by sample
        weights, if any. There is one gradient per leaf, zero for unused leaves.
        """
        require_choice(self.dataset)  # raises an error for streams
        subset = Subset(cast(Dataset[object], self.dataset), drawn)
        x, y, w = next(iter(Batches(net, subset, len(drawn))))
        with torch.enable_grad():
            returned = net.infer(x)
            y = _matching(y, first_tensor(returned))
            compute_loss = partial(net.get_loss, returned, y, X=x, training=True)
            if w is None:
                loss = compute_loss()
            else:
                # division by the mean weight of the batch makes a weighted mean
                loss = weighted_loss(net.criterion_, compute_loss, y, w, w.mean())
            return torch.autograd.grad(loss, leaves, materialize_grads=True)


def _matching(y: Any, outputs: Tensor) -> Any:
    """Reshape real-valued targets to match the outputs, (b,) or (b, 1).

    A criterion would broadcast shapes (b,) and (b, 1) to (b, b).
    """
    is_real = isinstance(y, Tensor) and y.is_floating_point()
    if is_real and y.numel() == outputs.numel():
        return y.reshape(outputs.shape)
    return y


def weight_decays(net: NeuralNet) -> dict[str, float]:
    """Return the weight decay of the net's optimizer for each parameter, by name.

    Parameters that the optimizer does not train have no weight decay. All are zero if
    the net has no optimizer.
    """
    groups = getattr(getattr(net, "optimizer_", None), "param_groups", [])
    decays = {
        p: float(group.get("weight_decay") or 0.0)
        for group in groups
        for p in group["params"]
    }
    named = as_forward(net).module.named_parameters()
    return {name: decays.get(p, 0.0) for name, p in named}


class WeightMoments:
    """Running moments of weights, in float64.

    Summing differences from ``start`` avoids cancellation.

    Parameters
    ----------
    start : Tensor of shape (P,)
        A vector close to all weight vectors.
    max_rank : int, default=0
        Number of deviations to keep.

    Attributes
    ----------
    n : int
        Number of weight vectors.
    deviations : deque of Tensor of shape (P,)
        Differences of the last ``max_rank`` vectors from the running mean that includes
        them.
    """

    def __init__(self, start: Tensor, max_rank: int = 0) -> None:
        self.n = 0
        self.deviations: deque[Tensor] = deque(maxlen=max_rank)
        self._start = start
        self._shift = torch.zeros_like(start)
        self._squares = torch.zeros_like(start)

    def update(self, weights: Tensor) -> None:
        """Add a weight vector (P,) to the mean, the variance and the deviations.

        The mean is stored as its difference from ``start``. The variance is stored as
        the sum of squared deviations from the mean, by Welford's update.
        """
        moved = weights - self._start
        from_old_mean = moved - self._shift
        self.n += 1
        self._shift = self._shift + from_old_mean / self.n
        from_new_mean = moved - self._shift
        # Welford (1962), "Note on a method for calculating corrected sums of squares"
        self._squares = self._squares + from_old_mean * from_new_mean
        self.deviations.append(from_new_mean)

    @property
    def mean(self) -> Tensor:
        """Mean of the vectors, (P,)."""
        return self._start + self._shift

    @property
    def variance(self) -> Tensor:
        """Variances of the weights, with the divisor ``n``, (P,)."""
        return self._squares / self.n
