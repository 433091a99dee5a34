"""StochasticModule: a network whose weights are drawn anew in each pass of training.

Weights live in one flat vector, with a distribution over it; the network itself is
called through `torch.func.functional_call` with whatever has been drawn. Buffers, and
parameters that do not require gradients, stay as they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from sklaplace.core.budget import batch_rows
from sklaplace.curvature.layout import BlockSpec, Layout
from sklaplace.networks.forward import first_tensor, recorded_outputs
from sklaplace.posterior.variational.base import WeightPosterior
from sklaplace.posterior.variational.divergence import divergence, exact_divergence
from sklaplace.posterior.variational.priors import WeightPrior

# Standard deviations to start with, as a share of the weights' root mean square in
# each tensor: the network keeps its signal, and learns how much noise it bears.
START_SHARE = 0.1


def random_weights(module: nn.Module) -> Layout:
    """The parameters of a module that require gradients, each tensor a block."""
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    lazy = [name for name, p in named if nn.parameter.is_lazy(p)]
    if lazy:
        raise ValueError(
            f"The parameter {lazy[0]!r} has no size before the first batch. Use layers "
            "with sizes in place of lazy ones."
        )
    sparse = [m for m in module.modules() if getattr(m, "sparse", False)]
    if sparse:
        raise ValueError(
            f"{type(sparse[0]).__name__} has sparse=True, whose gradients cannot reach "
            "the distributions. Use sparse=False."
        )
    if not named:
        raise ValueError(
            "The network has no parameters that require gradients, so that there is "
            "nothing to learn a distribution of. Set requires_grad of some."
        )
    return Layout(tuple(BlockSpec(name, tuple(p.shape)) for name, p in named))


def start_scales(values: Sequence[Tensor]) -> Tensor:
    """Standard deviations (P,) to start with, from tensors of weights."""
    flat = torch.cat([value.reshape(-1) for value in values])
    overall = float(flat.square().mean().sqrt()) or 1.0
    scales = []
    for value in values:
        own = float(value.square().mean().sqrt()) if value.numel() else 0.0
        scales.append(
            torch.full_like(value.reshape(-1), START_SHARE * (own or overall))
        )
    return torch.cat(scales)


class StochasticModule(nn.Module):
    """A network under drawn weights in training, under their medians otherwise.

    Parameters
    ----------
    base : nn.Module
        The network. Its parameters are replaced, and no longer require gradients.
    layout : Layout
        The weights that are random.
    posterior : WeightPosterior
        Their distribution.

    Attributes
    ----------
    logit_layer : str or None
        Name of a submodule whose outputs are kept in ``tapped``.
    drawn : tuple of Tensor
        Weights (1, P) of the last pass in training, and their log densities.
    square : Tensor of shape ()
        Square of the noise found in training: a buffer, so that callbacks which load
        the weights of an earlier epoch load its noise as well.
    """

    square: Tensor

    def __init__(
        self, base: nn.Module, layout: Layout, posterior: WeightPosterior
    ) -> None:
        super().__init__()
        # named as by torch.compile, so that whoever looks for the network finds it
        self._orig_mod = base
        self.posterior = posterior
        self.layout = layout
        self.logit_layer: str | None = None
        self.register_buffer("square", torch.zeros((), dtype=torch.float64))
        self.drawn: tuple[Tensor, Tensor] | None = None
        self.tapped: Tensor | None = None
        own = dict(base.named_parameters())
        self._dtypes = {block.name: own[block.name].dtype for block in layout.blocks}
        for block in layout.blocks:
            own[block.name].requires_grad_(False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the network returns."""
        if self.training:
            self.drawn = self.posterior.sample()
            weights = self.drawn[0][0]
        else:
            weights = self.posterior.median()
        values = {
            name: value.to(self._dtypes[name])
            for name, value in self.layout.unflatten(weights).items()
        }
        if self.logit_layer is None:
            return functional_call(self._orig_mod, values, args, kwargs)
        with recorded_outputs(self._orig_mod, [self.logit_layer]) as seen:
            returned = functional_call(self._orig_mod, values, args, kwargs)
        self.tapped = seen[self.logit_layer][-1]
        return returned

    def outputs(self, returned: Any) -> Tensor:
        """What is read of a pass: the logit_layer, or what the network returned."""
        if self.logit_layer is not None:
            assert self.tapped is not None
            return self.tapped
        return first_tensor(returned)

    def __getstate__(self) -> dict[str, Any]:
        """What is copied or stored: not the graph of the last pass."""
        return self.__dict__ | {"drawn": None, "tapped": None}

    def settled(self) -> nn.Module:
        """The network with the medians for its weights, as trainable as it was."""
        own = dict(self._orig_mod.named_parameters())
        with torch.no_grad():
            values = self.layout.unflatten(self.posterior.median())
            for name, value in values.items():
                own[name].copy_(value)
                own[name].requires_grad_(True)
        return self._orig_mod


@dataclass(frozen=True)
class VariationalPosterior:
    """Independent distributions of the weights, as they were learned.

    Attributes
    ----------
    distribution : WeightPosterior
        Over P weights.
    prior : WeightPrior
        Of each of them.
    layout : Layout
        Which they are.
    """

    distribution: WeightPosterior
    prior: WeightPrior
    layout: Layout

    def __repr__(self) -> str:
        """One line in place of all tensors."""
        return (
            f"VariationalPosterior({self.distribution.name} over "
            f"{self.layout.n_parameters:,} weights, {self.prior})"
        )

    @torch.no_grad()
    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        """``n`` draws of the weights, (n, P), float64.

        A few at a time: densities and noise of all would take several times as much
        memory as the draws.
        """
        location = self.distribution.median()
        drawn = location.new_empty((n, len(location)), dtype=torch.float64)
        for part in drawn.split(batch_rows(4 * 8 * len(location))):
            part.copy_(self.distribution.sample(len(part), generator)[0])
        return drawn

    @property
    @torch.no_grad()
    def mean(self) -> Tensor:
        """Means of the weights, (P,), float64."""
        return self.distribution.mean().double()

    @torch.no_grad()
    def variance(self) -> Tensor:
        """Variances of the weights, (P,), float64."""
        return self.distribution.variance().double()

    @torch.no_grad()
    def log_prob(self, w: Tensor) -> Tensor:
        """Log densities of weights (..., P), in nats."""
        return self.distribution.log_prob(w)

    @torch.no_grad()
    def kl(self, n_samples: int, generator: torch.Generator) -> Tensor:
        """``KL(posterior ‖ prior)`` in nats, (): exact, or by draws."""
        exact = exact_divergence(self.distribution, self.prior)
        if exact is not None:
            return exact.double()
        drawn = self.distribution.sample(n_samples, generator)
        return divergence(self.distribution, self.prior, *drawn).double()
