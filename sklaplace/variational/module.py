"""Stochastic module: a network whose weights are drawn in each training pass.

The weights ``w ~ q`` form one vector (P,), which `torch.func.functional_call` puts into
the network. Buffers, and parameters that do not require gradients, are not random.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from sklaplace.core.budget import batch_rows
from sklaplace.core.checks import as_generator
from sklaplace.core.random import RandomState
from sklaplace.curvature.layout import BlockSpec, Layout
from sklaplace.networks.forward import first_tensor, read_logits, recorded_outputs
from sklaplace.variational.base import WeightPosterior
from sklaplace.variational.divergence import divergence, exact_divergence
from sklaplace.variational.priors import WeightPrior

__all__ = ["VariationalPosterior"]

# Initial standard deviations, as a fraction of the root mean square of each tensor. The
# fraction is small enough to preserve the network's signal.
INITIAL_FRACTION = 0.1


def random_weights(module: nn.Module) -> Layout:
    """Return the layout of parameters that require gradients, one block per tensor.

    The layout has the order and shapes of the parameters in one vector of weights.
    Raise ValueError if there are none, or if their sizes or gradients are unsuitable.
    """
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    lazy = [name for name, p in named if nn.parameter.is_lazy(p)]
    if lazy:
        raise ValueError(
            f"{lazy[0]!r} has no size before the first batch. Replace lazy layers with "
            "layers of fixed sizes."
        )
    sparse = [m for m in module.modules() if getattr(m, "sparse", False)]
    if sparse:
        raise ValueError(
            f"{type(sparse[0]).__name__} has sparse=True, but sparse gradients are not "
            "supported. Use sparse=False."
        )
    if not named:
        raise ValueError(
            "The network has no parameters that require gradients, so no weights would "
            "be random. Set requires_grad of some parameters to True."
        )
    return Layout(tuple(BlockSpec(name, tuple(p.shape)) for name, p in named))


def initial_scales(values: Sequence[Tensor]) -> Tensor:
    """Return positive initial standard deviations (P,) for tensors of weights.

    They are a fraction of each tensor's root mean square. A tensor of zeros, such as an
    initial bias, has the root mean square of all weights instead, or one if this is
    also zero.
    """
    flat = [value.reshape(-1) for value in values]
    of_all_weights = _root_mean_square(torch.cat(flat)) or 1.0
    # one number per tensor
    scales = [INITIAL_FRACTION * (_root_mean_square(x) or of_all_weights) for x in flat]
    return torch.cat([torch.full_like(x, s) for x, s in zip(flat, scales, strict=True)])


def _root_mean_square(x: Tensor) -> float:
    return float(x.square().mean().sqrt()) if x.numel() else 0.0


class StochasticModule(nn.Module):
    """Network that draws weights in training and uses their medians in evaluation.

    Parameters
    ----------
    base : nn.Module
        The network. The random parameters of this network no longer require gradients.
    layout : Layout
        Layout of the random weights.
    posterior : WeightPosterior
        Distribution of the random weights.

    Attributes
    ----------
    logit_layer : str or None
        Name of the submodule whose outputs are the logits; None if the network returns
        the logits.
    drawn : tuple of Tensor
        Weights (1, P) of the last training pass, and their log densities.
    noise_variance : Tensor of shape (), or (c,) in training
        Estimated variance of each column's observation noise. The tensor is a
        buffer and is therefore restored together with the weights of an earlier epoch.
    """

    noise_variance: Tensor

    def __init__(
        self, base: nn.Module, layout: Layout, posterior: WeightPosterior
    ) -> None:
        super().__init__()
        # torch.compile also uses this name, so `unwrapped` finds the network
        self._orig_mod = base
        self.posterior, self.layout = posterior, layout
        self.logit_layer: str | None = None
        self.probability_map = "log"
        self.register_buffer("noise_variance", torch.zeros((), dtype=torch.float64))
        self.drawn: tuple[Tensor, Tensor] | None = None
        self._logits: list[Tensor] = []
        # the vector of drawn weights has one dtype, but the parameters may have several
        parameters = dict(base.named_parameters())
        names = [block.name for block in layout.blocks]
        self._dtypes = {name: parameters[name].dtype for name in names}
        for name in names:
            parameters[name].requires_grad_(False)  # the posterior is trained instead

    def forward(self, *args: object, **kwargs: object) -> object:
        """Return the network's outputs under drawn weights, or under their medians.

        The outputs of the logit layer, if any, are kept for `outputs`.
        """
        if self.training:
            self.drawn = self.posterior.sample()
            weights = self.drawn[0][0]  # of the only draw; drawn[1] has log densities
        else:
            weights = self.posterior.median()
        values = self.layout.unflatten(weights)  # tensors by name of the parameter
        values = {name: w.to(self._dtypes[name]) for name, w in values.items()}
        if self.logit_layer is None:
            return functional_call(self._orig_mod, values, args, kwargs)
        # one output for each call of the logit layer
        with recorded_outputs(self._orig_mod, [self.logit_layer]) as recorded:
            returned = functional_call(self._orig_mod, values, args, kwargs)
        self._logits = recorded.get(self.logit_layer, [])
        return returned

    def outputs(self, returned: object) -> Tensor:
        """Return the logits of the last pass, given what this pass returned.

        Without a logit layer, the first returned tensor has the logits. With a logit
        layer, this tensor has probabilities, and the logits are those of the layer if
        they agree with the probabilities; see `read_logits`.
        """
        output = first_tensor(returned)
        if self.logit_layer is None:
            return output
        return read_logits(output, self._logits, self.probability_map)

    def __getstate__(self) -> dict[str, object]:
        """Return the attributes to copy or pickle, without the last pass's graph."""
        return self.__dict__ | {"drawn": None, "_logits": []}

    @torch.no_grad()
    def at_medians(self) -> nn.Module:
        """Return the network itself, with the medians as trainable weights."""
        parameters = dict(self._orig_mod.named_parameters())
        for name, value in self.layout.unflatten(self.posterior.median()).items():
            parameters[name].copy_(value).requires_grad_(True)
        return self._orig_mod


@dataclass(frozen=True)
class VariationalPosterior:
    """Learned mean-field posterior over the weights of a network.

    Read more in the :doc:`User Guide </research/weight_posteriors>`.

    Parameters
    ----------
    distribution : WeightPosterior
        Distribution of P weights.
    prior : WeightPrior
        Prior of each weight.
    layout : Layout
        Names and shapes of the weights.

    See Also
    --------
    sklaplace.variational.WeightPosterior : Class of ``distribution``.
    sklaplace.VariationalClassifier : Fits this posterior.

    Examples
    --------
    >>> import torch
    >>> from sklearn.datasets import load_iris
    >>> from skorch import NeuralNetClassifier
    >>> from sklaplace import VariationalClassifier
    >>> X, y = load_iris(return_X_y=True)
    >>> net = NeuralNetClassifier(
    ...     torch.nn.Linear,
    ...     module__in_features=4,
    ...     module__out_features=3,
    ...     criterion=torch.nn.CrossEntropyLoss,
    ...     max_epochs=1,
    ...     verbose=0,
    ... )
    >>> posterior = VariationalClassifier(net, random_state=0).fit(X, y).posterior_
    >>> posterior
    VariationalPosterior(gaussian over 15 weights, GaussianPrior(scale=1.0))
    """

    distribution: WeightPosterior
    prior: WeightPrior
    layout: Layout

    def __repr__(self) -> str:
        """Return a one-line summary without tensors."""
        weights = f"{self.distribution.name} over {self.layout.n_parameters:,} weights"
        return f"VariationalPosterior({weights}, {self.prior})"

    @torch.no_grad()
    def sample(
        self, n: int = 1, random_state: RandomState | torch.Generator = 0
    ) -> Tensor:
        """Draw weights from the posterior.

        Parameters
        ----------
        n : int, default=1
            Number of draws.
        random_state : int, RandomState, torch.Generator or None, default=0
            Source of randomness. If None, each call returns different draws.

        Returns
        -------
        Tensor of shape (n, P)
            Draws, float64.

        See Also
        --------
        sklaplace.variational.WeightPosterior.sample :
            Draws with their log densities.

        Notes
        -----
        Weights are drawn in chunks, because the densities and noise of all draws would
        take up several times the memory of the draws.

        Examples
        --------
        >>> import torch
        >>> from sklearn.datasets import load_iris
        >>> from skorch import NeuralNetClassifier
        >>> from sklaplace import VariationalClassifier
        >>> X, y = load_iris(return_X_y=True)
        >>> net = NeuralNetClassifier(
        ...     torch.nn.Linear,
        ...     module__in_features=4,
        ...     module__out_features=3,
        ...     criterion=torch.nn.CrossEntropyLoss,
        ...     max_epochs=1,
        ...     verbose=0,
        ... )
        >>> posterior = VariationalClassifier(net, random_state=0).fit(X, y).posterior_
        >>> posterior.sample(2, random_state=0).shape
        torch.Size([2, 15])
        """
        generator = as_generator(random_state)
        location = self.distribution.median()
        drawn = location.new_empty((n, len(location)), dtype=torch.float64)
        # noise, weights, log densities and their terms take about 32 bytes per weight
        for chunk in drawn.split(batch_rows(4 * 8 * len(location))):
            chunk.copy_(self.distribution.sample(len(chunk), generator)[0])
        return drawn

    @property
    @torch.no_grad()
    def mean(self) -> Tensor:
        """Means of the weights, (P,), float64.

        See Also
        --------
        variance : Variances of the weights.

        Examples
        --------
        >>> import torch
        >>> from sklearn.datasets import load_iris
        >>> from skorch import NeuralNetClassifier
        >>> from sklaplace import VariationalClassifier
        >>> X, y = load_iris(return_X_y=True)
        >>> net = NeuralNetClassifier(
        ...     torch.nn.Linear,
        ...     module__in_features=4,
        ...     module__out_features=3,
        ...     criterion=torch.nn.CrossEntropyLoss,
        ...     max_epochs=1,
        ...     verbose=0,
        ... )
        >>> posterior = VariationalClassifier(net, random_state=0).fit(X, y).posterior_
        >>> posterior.mean.shape
        torch.Size([15])
        """
        return self.distribution.mean().double()

    @torch.no_grad()
    def variance(self) -> Tensor:
        """Return the variances of the weights.

        Returns
        -------
        Tensor of shape (P,)
            Variances, float64.

        See Also
        --------
        mean : Means of the weights.

        Examples
        --------
        >>> import torch
        >>> from sklearn.datasets import load_iris
        >>> from skorch import NeuralNetClassifier
        >>> from sklaplace import VariationalClassifier
        >>> X, y = load_iris(return_X_y=True)
        >>> net = NeuralNetClassifier(
        ...     torch.nn.Linear,
        ...     module__in_features=4,
        ...     module__out_features=3,
        ...     criterion=torch.nn.CrossEntropyLoss,
        ...     max_epochs=1,
        ...     verbose=0,
        ... )
        >>> posterior = VariationalClassifier(net, random_state=0).fit(X, y).posterior_
        >>> bool((posterior.variance() > 0).all())
        True
        """
        return self.distribution.variance().double()

    @torch.no_grad()
    def log_prob(self, w: Tensor) -> Tensor:
        """Return the log density of each weight.

        Parameters
        ----------
        w : Tensor of shape (..., P)
            Weights.

        Returns
        -------
        Tensor of shape (..., P)
            Log densities in nats, without gradients.

        See Also
        --------
        sklaplace.variational.WeightPosterior.log_prob : With gradients.

        Examples
        --------
        >>> import torch
        >>> from sklearn.datasets import load_iris
        >>> from skorch import NeuralNetClassifier
        >>> from sklaplace import VariationalClassifier
        >>> X, y = load_iris(return_X_y=True)
        >>> net = NeuralNetClassifier(
        ...     torch.nn.Linear,
        ...     module__in_features=4,
        ...     module__out_features=3,
        ...     criterion=torch.nn.CrossEntropyLoss,
        ...     max_epochs=1,
        ...     verbose=0,
        ... )
        >>> posterior = VariationalClassifier(net, random_state=0).fit(X, y).posterior_
        >>> posterior.log_prob(posterior.mean.float()).shape
        torch.Size([15])
        """
        return self.distribution.log_prob(w)

    @torch.no_grad()
    def kl(self, n_samples: int, generator: torch.Generator) -> Tensor:
        """Return the Kullback-Leibler divergence ``KL(posterior ‖ prior)``.

        Parameters
        ----------
        n_samples : int
            Number of draws if there is no closed form.
        generator : torch.Generator
            Source of randomness for the draws.

        Returns
        -------
        Tensor of shape ()
            Divergence in nats, float64.

        See Also
        --------
        sklaplace.variational.WeightPosterior.closed_form : Entropies.

        Examples
        --------
        >>> import torch
        >>> from sklearn.datasets import load_iris
        >>> from skorch import NeuralNetClassifier
        >>> from sklaplace import VariationalClassifier
        >>> X, y = load_iris(return_X_y=True)
        >>> net = NeuralNetClassifier(
        ...     torch.nn.Linear,
        ...     module__in_features=4,
        ...     module__out_features=3,
        ...     criterion=torch.nn.CrossEntropyLoss,
        ...     max_epochs=1,
        ...     verbose=0,
        ... )
        >>> posterior = VariationalClassifier(net, random_state=0).fit(X, y).posterior_
        >>> bool(posterior.kl(20, torch.Generator().manual_seed(0)) > 0)
        True
        """
        kl = exact_divergence(self.distribution, self.prior)
        if kl is None:  # the mean over draws
            w, log_q = self.distribution.sample(n_samples, generator)
            kl = divergence(self.distribution, self.prior, w, log_q)
        return kl.double()
