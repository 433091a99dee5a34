"""Density posterior: a network represents an unnormalised density.

A weight is ``w = μ + σ z``, where ``z ∈ [−4, 4]`` has a density proportional to
``p(z)``. At G nodes ``z_j``, ``p_j = exp(−z_j²/2 + Σ_k v_k φ_k(z_j))`` with Gaussian
basis functions ``φ_k``. Between the nodes, ``p`` is linear. The trapezoidal rule
normalises ``p`` exactly. To draw a weight, the distribution function is inverted by
solving a quadratic equation. Deeper networks have layers
``φ^l = tanh(φ^{l−1} A^l + c^l)`` at the nodes, and ``v`` contains the coefficients of
the last layer. All weights share ``A`` and ``c``.
"""

import math
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from sklaplace.core.checks import check_count
from sklaplace.variational.base import LocationScale, spread

# Half the width of the support, and default sizes of the grid and the network.
EDGE, N_NODES, N_UNITS, N_LAYERS = 4.0, 16, 6, 1
# Largest centre and largest width of the basis functions.
_OUTERMOST, _WIDTH = 2.5, 1.0
# Fraction of the largest p that is added to p, so that no draw has zero density.
_FLOOR = 1e-7


class Density(LocationScale):
    """Learned density for each weight, within four scales of its location.

    This is the most flexible and most expensive family, with up to three modes. The
    support is ``μ ± 4 σ``. The entropy is estimated from draws. The family is
    experimental: on small problems, differences from the Gaussian family were no larger
    than differences between seeds.

    Read more in the :doc:`User Guide </research/weight_posteriors>`.

    Parameters
    ----------
    location : Tensor of shape (P,)
        Initial means and medians.
    scale : Tensor of shape (P,)
        Initial standard deviations, positive.
    bound : float, default=3.0
        Ignored, because location and scale determine the support.
    n_units : int, default=6
        Number of units per hidden layer, K.
    n_layers : int, default=1
        Number of hidden layers. The first layer has fixed basis functions; the others
        are learned.
    n_nodes : int, default=16
        Number of grid nodes, G, at least four. Details finer than the distance between
        nodes cannot be learned.

    Raises
    ------
    ValueError
        If shapes, numbers or the bound are invalid; see `WeightPosterior`.

    See Also
    --------
    WeightPosterior : Interface of all families.
    Quantile : Cheaper family.

    Notes
    -----
    Each weight has ``2 + K`` parameters: ``μ``, ``σ`` and the heights ``v_k``, in nats.
    The first layer has K Gaussian basis functions with centres from −2.5 to 2.5. The
    width of a basis function is the distance between centres, but at most one. All
    weights share these basis functions. Drawing s samples takes O((G K + s) P) time and
    O((G + s) P) memory. Log densities at s other points take O(s G P) memory. A
    training step for 85,000 weights takes nine times as long as with Gaussians.

    Examples
    --------
    >>> import torch
    >>> from sklaplace.variational import Density
    >>> q = Density(torch.zeros(3), torch.full((3,), 0.1))
    >>> q.sample(5, torch.Generator().manual_seed(0))[0].shape
    torch.Size([5, 3])
    """

    name: ClassVar[str] = "density"
    checks: ClassVar = {
        "n_units": check_count,
        "n_layers": check_count,
        "n_nodes": partial(check_count, smallest=4),
    }
    _noise = staticmethod(torch.rand)
    nodes: Tensor
    basis: Tensor

    def __init__(
        self,
        location: Tensor,
        scale: Tensor,
        bound: float = 3.0,
        *,
        n_units: int = N_UNITS,
        n_layers: int = N_LAYERS,
        n_nodes: int = N_NODES,
    ) -> None:
        sizes = {"n_units": n_units, "n_layers": n_layers, "n_nodes": n_nodes}
        super().__init__(location, scale, bound, **sizes)

    def _init_z(self, like: Tensor, **sizes: int) -> None:
        """Create the parameters of a density that is normal at first.

        ``like`` (P,) determines the dtype and device. ``sizes`` has the three options
        of the constructor.
        """
        k, n_further = sizes["n_units"], sizes["n_layers"] - 1
        nodes = spread(sizes["n_nodes"], EDGE).unsqueeze(-1)
        # distance between nodes, which divide the support evenly
        self._step = 2 * EDGE / (sizes["n_nodes"] - 1)
        # the distance between centres, at most `_WIDTH`; one centre has no distance
        width = min(_WIDTH, 2 * _OUTERMOST / max(1, k - 1))
        basis = (-((nodes - spread(k, _OUTERMOST)) / width).square() / 2).exp()
        # not in the state dict, because the constructor computes them anew
        self.register_buffer("nodes", nodes.to(like), persistent=False)  # (G, 1)
        self.register_buffer("basis", basis.to(like), persistent=False)  # (G, K)
        # without heights, the density is normal for any further layers
        self.heights = nn.Parameter(like.new_zeros(k, len(like)))
        # each unit of a further layer is at first the tanh of one unit below it
        mixing = torch.eye(k).to(like)
        self.mixing = nn.ParameterList(mixing.clone() for _ in range(n_further))
        self.offsets = nn.ParameterList(like.new_zeros(k) for _ in range(n_further))

    def median(self) -> Tensor:
        """Return the medians, (P,)."""
        # the draw for uniform noise of 1/2, without its log density
        return self.transform(torch.full_like(self.location, 0.5).unsqueeze(0))[0][0]

    def _transform_z(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return draws of ``z`` and log densities, (s, P) each, from uniform noise.

        A draw is the point at which the distribution function equals the noise. First,
        the nodes to its left and right are found. Then, a quadratic equation determines
        the distance ``τ`` from the left node.
        """
        p = self._density_at_nodes()
        # the distribution function at the nodes, (G, P)
        F = pad(torch.cumulative_trapezoid(p, dx=self._step, dim=0), (0, 0, 1, 0))
        # The left node. Only inner nodes are counted, so it has a right neighbour.
        index = (F[1:-1].unsqueeze(1) < noise).sum(0)  # (s, P)
        # densities at the nodes on both sides, (s, P) each
        left, right = p.gather(0, index), p.gather(0, index + 1)
        # the density at distance τ from the left node is left + slope τ, and the
        # probability in between is excess = left τ + slope τ²/2
        excess = (noise - F.gather(0, index)).clamp(min=0)
        slope = (right - left) / self._step
        # Squaring the density gives left² + 2 slope excess. Rounding can reduce it
        # below the floor of p, which is `_FLOOR` divided by an integral of at most
        # 2 EDGE, because the largest p is one before the division.
        squared_density = left.square() + 2 * slope * excess
        density = squared_density.clamp(min=(_FLOOR / (2 * EDGE)) ** 2).sqrt()
        # this form of the solution τ also holds for a slope of zero
        distance = (2 * excess / (left + density)).clamp(max=self._step)
        return self.nodes[index, 0] + distance, density.log()

    def _log_prob_z(self, z: Tensor) -> Tensor:
        """Return log densities of ``z`` (..., P), in nats; −inf outside the support."""
        p, inside = self._density_at_nodes(), z.abs() <= EDGE
        # p is a sum of hat functions around the nodes, (..., P, G)
        distances = (z.unsqueeze(-1) - self.nodes[:, 0]).abs()
        hats = (1 - distances / self._step).clamp(min=0)
        density = torch.einsum("...pg,gp->...p", hats, p)
        # log 0 would have a gradient of nan, even though it is masked
        return density.where(inside, 1.0).log().masked_fill(~inside, -math.inf)

    def _density_at_nodes(self) -> Tensor:
        """Return the normalised density at the nodes, (G, P)."""
        units = self.basis  # (G, K), as in every layer
        for mixing, offsets in zip(self.mixing, self.offsets, strict=True):
            units = (units @ mixing + offsets).tanh()
        log_p = units @ self.heights - self.nodes.square() / 2
        # the largest value prevents overflow, and cancels in the quotient
        p = (log_p - log_p.detach().amax(0)).exp() + _FLOOR
        return p / torch.trapezoid(p, dx=self._step, dim=0)

    def _moments(self) -> tuple[Tensor, Tensor]:
        """Return the mean and variance of ``z``, (P,) each."""
        p = self._density_at_nodes()
        # The density is linear between nodes, so integrands have degree three at most.
        # Two-point Gauss quadrature is exact for them. The two points between adjacent
        # nodes have the relative positions ``fractions``, 1/2 ± 1/√12, and half the
        # weight each.
        fractions = 0.5 + self.nodes.new_tensor([[[-1.0]], [[1.0]]]) / math.sqrt(12)
        z, density = (
            torch.lerp(values[:-1], values[1:], fractions).flatten(0, 1)
            for values in (self.nodes, p)
        )  # (2 G - 2, 1) and (2 G - 2, P)
        mass = density * (self._step / 2)
        mean = (mass * z).sum(0)
        return mean, (mass * (z - mean).square()).sum(0)
