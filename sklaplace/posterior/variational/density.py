"""The density posterior: a network as unnormalised density.

``w = μ + σ z`` where ``z ∈ [−4, 4]`` has a density in proportion to ``p(z)``. At G
nodes ``z_j``, ``p_j = exp(−z_j²/2 + Σ_k v_k φ_k(z_j))`` with Gaussian basis functions
``φ_k``; between them, ``p`` is linear. The normaliser ``∫ p = Σ_j W_j p_j`` is exact,
and the inverse of the distribution function ``F`` solves a quadratic equation. The
gradient of a draw is implicit: ``dz/dp_j = −(W_j(z) − u W_j)/p(z)`` with ``u = F(z)``,
where ``W_j(z)`` integrates the hat function of node j up to ``z``. In deeper networks,
``v`` weights the last of the layers ``φ^l = tanh(φ^{l−1} A^l + c^l)`` at the nodes,
with ``A`` and ``c`` shared by all weights.
"""

import math
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sklaplace.core.checks import check_count
from sklaplace.posterior.variational.base import LocationScale, spread, sum_draws

# Half the width of the support, and default sizes of grid and network.
EDGE, N_NODES, N_UNITS, N_LAYERS = 4.0, 16, 6, 1
# Largest centre and largest width of the basis functions.
_OUTERMOST, _WIDTH = 2.5, 1.0
# Added to p, relative to its largest value: no draw has a density of zero.
_FLOOR = 1e-7


class Density(LocationScale):
    """A learned density for each weight, on four scales around its location.

    The most flexible, with up to three modes, and exact but for the entropy, which is
    estimated from draws; and the most expensive. The support is ``μ ± 4 σ``.
    Experimental: on small problems it was not better than the Gaussian beyond the
    variation among seeds.

    Read more in the :doc:`User Guide </user_guide/weight_posteriors>`.

    Parameters
    ----------
    location : Tensor of shape (P,)
        Initial means and medians.
    scale : Tensor of shape (P,)
        Initial standard deviations, positive.
    bound : float, default=3.0
        Ignored: the support follows location and scale.
    n_units : int, default=6
        Units of each hidden layer of the network, K.
    n_layers : int, default=1
        Hidden layers. The first has fixed basis functions, further ones are learned.
    n_nodes : int, default=16
        Nodes of the grid, G, four or more. Finer shapes than the distance between them
        cannot be learned.

    Raises
    ------
    ValueError
        If shapes, numbers or the bound are not valid; see `WeightPosterior`.
    TypeError
        If a tensor is not of floating point.

    See Also
    --------
    WeightPosterior : What all families have.
    Quantile : Cheaper.

    Notes
    -----
    ``2 + K`` parameters per weight: ``μ``, ``σ`` and the heights ``v_k``, in nats. The
    first layer has K Gaussian basis functions with centres from −2.5 to 2.5, their
    width the distance between them, but at most one; all weights share them.
    O((G K + s) P) time and O((G + s) P) memory for s draws. Draws have first
    derivatives only. In one dimension no Markov chain is needed, nor would it have a
    pathwise gradient.

    References
    ----------
    Figurnov, Mohamed, Mnih (2018), "Implicit reparameterization gradients", NeurIPS.

    Examples
    --------
    >>> import torch
    >>> from sklaplace.posterior.variational import Density
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
    basis: Tensor
    weights: Tensor

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

    def _start_shape(self, like: Tensor, **sizes: Any) -> None:
        k, n_further = sizes["n_units"], sizes["n_layers"] - 1
        self.n_nodes = int(sizes["n_nodes"])
        nodes = spread(self.n_nodes, EDGE).unsqueeze(-1)
        width = min(_WIDTH, 2 * _OUTERMOST / max(1, k - 1))
        basis = (-((nodes - spread(k, _OUTERMOST)) / width).square() / 2).exp()
        basis = torch.cat([basis, -nodes.square() / 2], 1)
        self.register_buffer("basis", basis.to(like), persistent=False)  # (G, K + 1)
        weights = _integrals_of_hats(nodes[:, 0])
        self.register_buffer("weights", weights.to(like), persistent=False)  # (3, G)
        self.heights = nn.Parameter(like.new_zeros(k, len(like)))
        mixing = torch.eye(k).to(like)
        self.mixing = nn.ParameterList(mixing.clone() for _ in range(n_further))
        self.offsets = nn.ParameterList(like.new_zeros(k) for _ in range(n_further))

    def median(self) -> Tensor:
        """Medians, (P,)."""
        return self.transform(torch.full_like(self.location, 0.5).unsqueeze(0))[0][0]

    def _standard(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        inputs = (self._nodes(), noise)
        place, log_p = _InverseDistribution.apply(*inputs)  # type: ignore[no-untyped-call]
        return place * self._step - EDGE, log_p

    def _standard_log_prob(self, z: Tensor) -> Tensor:
        inside = z.abs() <= EDGE
        place = (torch.where(inside, z, 0.0) + EDGE) / self._step
        index = _segment(place.detach(), self.n_nodes)
        p = self._nodes() + _FLOOR
        flat = index.reshape(-1, p.shape[1])
        left, right = (p.gather(0, flat + k).reshape(z.shape) for k in (0, 1))
        log_p = (left + (right - left) * (place - index)).log()
        log_p = log_p - (self.weights[0] @ p).log()
        return log_p.masked_fill(~inside, -math.inf)

    @property
    def _step(self) -> float:
        """Distance between two nodes."""
        return 2 * EDGE / (self.n_nodes - 1)

    def _nodes(self) -> Tensor:
        """Density at the nodes, relative to the largest, less the floor, (G, P)."""
        units = self.basis[:, :-1]
        for mixing, offsets in zip(self.mixing, self.offsets, strict=True):
            units = torch.addmm(offsets, units, mixing).tanh()
        log_p = torch.addmm(self.basis[:, -1:], units, self.heights)
        return log_p.sub_(log_p.detach().amax(0)).exp_()

    def _moments(self) -> tuple[Tensor, Tensor]:
        mass, first, second = self.weights @ (self._nodes() + _FLOOR)
        return first / mass, second / mass - (first / mass).square()


def _integrals_of_hats(nodes: Tensor) -> Tensor:
    """Integrals of the hat functions times 1, ``z`` and ``z²``, (3, G).

    By Simpson's rule on each segment, which is exact for polynomials of degree three.
    """
    middles = (nodes[1:] + nodes[:-1]) / 2
    ends, halves = (torch.stack([x**n for n in range(3)]) for x in (nodes, middles))
    weights = 2 * ends
    weights[:, [0, -1]] /= 2
    weights[:, 1:] += 2 * halves
    weights[:, :-1] += 2 * halves
    return weights * ((nodes[1] - nodes[0]) / 6)


class _InverseDistribution(torch.autograd.Function):
    """``(p, u) -> (F⁻¹(u), log p(F⁻¹(u))/∫p)``, in steps Δ from the first node.

    By autograd the posterior keeps 64 numbers per weight for the backward pass, not 23,
    and a training step takes 7 times as long as with Gaussians, not 4 times.
    """

    @staticmethod
    def forward(ctx: Any, p: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        index, excess, mass = _search(p, u)
        left = p.gather(0, index)
        rise = p.gather(0, index + 1).sub_(left)
        left.add_(_FLOOR)
        # left τ + rise τ²/2 = excess, and the density there
        density = left.square().addcmul_(rise, excess, value=2)
        density = density.clamp_(min=_FLOOR**2).sqrt_()
        place = excess.mul_(2).div_(left.add_(density)).clamp_(max=1).add_(index)
        ctx.save_for_backward(u, mass, place, rise, density)
        ctx.n_nodes = len(p)
        return place, density.log().sub_((mass * (2 * EDGE / (len(p) - 1))).log_())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_place: Tensor, grad_log: Tensor) -> tuple[Tensor, None]:
        u, mass, place, rise, density = ctx.saved_tensors
        at_point = grad_log / density
        # γ/2: gradient in z, by way of log p(z) as well, over 2 p(z)
        pull = torch.addcmul(grad_place, at_point, rise).div_(density).div_(2)
        total = sum_draws(pull * u).sub(sum_draws(grad_log) / mass.mul(2))
        return _grad_nodes(pull, total, place, at_point, ctx.n_nodes), None


def _segment(place: Tensor, n_nodes: int) -> Tensor:
    """Index of the node left of each place, at most G − 2."""
    return place.long().clamp_(max=n_nodes - 2)


def _search(p: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Segment where ``F(z) = u`` and mass beyond its left end, (s, P), and ``∫ p``.

    Masses are in units of Δ. Node by node: a table of partial sums would take as much
    memory as the density.
    """
    mass = p[1:-1].sum(0).add_(p[0] + p[-1], alpha=0.5).add_((len(p) - 1) * _FLOOR)
    target = u * mass
    index, below, passed = (torch.zeros_like(u) for _ in range(3))
    cumulative, area = torch.zeros_like(mass), torch.empty_like(mass)
    for left, right in pairwise(p[:-1]):
        torch.add(left, right, out=area).mul_(0.5).add_(_FLOOR)
        # as numbers: vectorised, unlike operations on booleans
        torch.le(cumulative.add_(area), target, out=passed)
        index += passed
        below.addcmul_(passed, area)
    return index.long(), target.sub_(below).clamp_(min=0), mass


def _grad_nodes(
    pull: Tensor, total: Tensor, place: Tensor, at_point: Tensor, n_nodes: int
) -> Tensor:
    """Gradient at the nodes, (G, P), from those of draws (s, P).

    Of each draw: ``γ (u W_j − W_j(z))`` from the implicit gradient, and ``hat_j(z)/p``
    from the density at the draw, where ``total`` is half the sum of ``γ u − g/∫p``.
    """
    index, other = _segment(place, n_nodes), torch.empty_like(total)
    part = place - index
    grad = pull.new_zeros(n_nodes, pull.shape[1]).scatter_add_(0, index, pull)
    grad[-1] = total
    for row in reversed(grad[1:-1].unbind()):
        # a draw in the segment right of a node has half the node's hat behind it
        torch.sub(total, row, out=other)
        torch.add(total, other, out=row)
        total, other = other, total
    grad[0] = total
    square, ramp = part.square(), at_point * part
    grad.scatter_add_(0, index, pull * (square - 2 * part) + (at_point - ramp))
    grad.scatter_add_(0, index + 1, ramp.addcmul_(pull, square, value=-1))
    return grad
