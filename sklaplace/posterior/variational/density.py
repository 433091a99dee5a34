"""The density posterior: a small network as unnormalised density.

``w = μ + σ z`` where ``z ∈ [−4, 4]`` has a density in proportion to ``p(z)``. At G
nodes ``z_j``, ``p_j = exp(−z_j²/2 + Σ_k v_k φ_k(z_j))`` with bumps ``φ_k``; between
them, ``p`` is linear. Then ``∫ p = Σ_j W_j p_j``, and the inverse of the distribution
function ``F`` solves a quadratic equation. The gradient of a draw is implicit:
``dz/dp_j = −(W_j(z) − u W_j)/p(z)`` with ``u = F(z)``, where ``W_j(z)`` integrates the
hat function of node j up to ``z``.
"""

import math
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sklaplace.posterior.variational.base import (
    WeightPosterior,
    draw,
    inverse_softplus,
    positive,
    total,
    uniform_noise,
)

EDGE, N_NODES, N_BUMPS = 4.0, 16, 6
_STEP = 2 * EDGE / (N_NODES - 1)
_OUTERMOST = 2.5
# What p is raised by, relative to its largest value: no draw has a density of zero.
_FLOOR = 1e-7


class Density(WeightPosterior):
    """A density of learned shape for each weight, on four scales around its location.

    The most flexible, with up to three peaks of any height and everything exact but the
    entropy; and the most expensive. Its tails end at ``μ ± 4 σ``. Experimental: on
    small problems it was not better than the Gaussian beyond what another seed changes.

    Parameters
    ----------
    location : Tensor of shape (P,)
        Means and medians to start with.
    scale : Tensor of shape (P,)
        Standard deviations to start with, positive.
    bound : float, default=3.0
        Ignored: the range follows location and scale.

    Raises
    ------
    ValueError
        If shapes, numbers or the bound do not fit; see `WeightPosterior`.
    TypeError
        If a tensor is not of floating point.

    Notes
    -----
    Eight parameters per weight: ``μ``, ``σ`` and the heights ``v_k``, in nats, of six
    Gaussian bumps of unit width from −2.5 to 2.5, which all weights share. Sixteen
    nodes: O((16 + s) P) time and memory for s draws. Draws have first derivatives only.
    No Markov chain is needed in one dimension, nor would it give a gradient.

    References
    ----------
    Figurnov, Mohamed, Mnih (2018), "Implicit reparameterization gradients", NeurIPS.
    """

    name: ClassVar[str] = "density"
    basis: Tensor
    weights: Tensor

    def __init__(self, location: Tensor, scale: Tensor, bound: float = 3.0) -> None:
        super().__init__(location, scale, bound)
        start = location.detach()
        nodes = torch.linspace(-EDGE, EDGE, N_NODES, dtype=torch.float64)
        centres = torch.linspace(-_OUTERMOST, _OUTERMOST, N_BUMPS, dtype=torch.float64)
        bumps = (-(nodes.unsqueeze(-1) - centres).square() / 2).exp()
        basis = torch.cat([bumps, -nodes.unsqueeze(-1).square() / 2], 1)
        self.register_buffer("basis", basis.to(start), persistent=False)  # (G, K + 1)
        weights = _integrals_of_hats(nodes)
        self.register_buffer("weights", weights.to(start), persistent=False)  # (3, G)
        self.location = nn.Parameter(start.clone())
        self.heights = nn.Parameter(start.new_zeros(N_BUMPS, len(start)))
        with torch.no_grad():
            sigma = scale / self._standard_moments()[1].sqrt()
        self.raw_scale = nn.Parameter(inverse_softplus(sigma).to(start))

    def sample(
        self, n: int = 1, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Draws (s, P) and their log densities (s, P); see `WeightPosterior.sample`."""
        return self._quantile(uniform_noise(n, self.location, generator))

    def log_prob(self, w: Tensor) -> Tensor:
        """Log density of weights (..., P), in nats; −inf beyond ``μ ± 4 σ``."""
        scale = positive(self.raw_scale)
        z = (w - self.location) / scale
        inside = z.abs() <= EDGE
        place = (torch.where(inside, z, 0.0) + EDGE) / _STEP
        index = place.detach().floor().clamp(0, N_NODES - 2)
        p = self._nodes()
        rows = index.long().reshape(-1, p.shape[1])
        left, right = (p.gather(0, rows + k).reshape(z.shape) for k in (0, 1))
        log_p = (left + (right - left) * (place - index)).log()
        log_q = log_p - (self.weights[0] @ p).log() - scale.log()
        return log_q.masked_fill(~inside, -math.inf)

    def median(self) -> Tensor:
        """Medians, (P,)."""
        w, _ = self._quantile(torch.full_like(self.location, 0.5).unsqueeze(0))
        return w.squeeze(0)

    def mean(self) -> Tensor:
        """Means, (P,)."""
        return self.location + positive(self.raw_scale) * self._standard_moments()[0]

    def variance(self) -> Tensor:
        """Variances, (P,)."""
        return positive(self.raw_scale).square() * self._standard_moments()[1]

    def second_moment(self) -> Tensor:
        """``E[w²]``, (P,)."""
        mean, variance = self._standard_moments()
        scale = positive(self.raw_scale)
        return (self.location + scale * mean).square() + scale.square() * variance

    def _quantile(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Weights below which the mass is ``u``, and their log densities, (s, P)."""
        shape = (self.heights, self.basis)
        return draw(_Draw, self.location, self.raw_scale, *shape, u)

    def _nodes(self) -> Tensor:
        return _exponentials(self.heights, self.basis) + _FLOOR

    def _standard_moments(self) -> tuple[Tensor, Tensor]:
        """Mean and variance of ``z``, (P,) each."""
        mass, first, second = self.weights @ self._nodes()
        mean = first / mass
        return mean, second / mass - mean.square()


def _integrals_of_hats(nodes: Tensor) -> Tensor:
    """Integrals of the hat functions times 1, ``z`` and ``z²``, (3, G)."""
    inner = (
        torch.stack([torch.ones_like(nodes), nodes, nodes.square() + _STEP**2 / 6])
        * _STEP
    )
    # half a hat next to an edge: ∫ t (1 − t/Δ) = Δ²/6, ∫ t² (1 − t/Δ) = Δ³/12
    edge, lean = EDGE, _STEP / 3
    second = edge**2 - 2 * edge * lean + _STEP**2 / 6
    inner[:, 0] = inner.new_tensor([1, lean - edge, second]) * (_STEP / 2)
    inner[:, -1] = inner.new_tensor([1, edge - lean, second]) * (_STEP / 2)
    return inner


def _exponentials(heights: Tensor, basis: Tensor) -> Tensor:
    """Density at the nodes, relative to the largest, (G, P)."""
    log_p = torch.addmm(basis[:, -1:], basis[:, :-1], heights)
    return log_p.sub_(log_p.detach().amax(0)).exp_()


class _Draw(torch.autograd.Function):
    """``(μ, ρ, v, basis, u) -> (w, log q)`` by the inverse distribution function."""

    @staticmethod
    def forward(
        ctx: Any,
        location: Tensor,
        raw_scale: Tensor,
        heights: Tensor,
        basis: Tensor,
        u: Tensor,
    ) -> tuple[Tensor, Tensor]:
        scale = positive(raw_scale)
        bare = _exponentials(heights, basis)
        index, excess, mass = _segment(bare, u)
        left = bare.gather(0, index)
        rise = bare.gather(0, index + 1).sub_(left)
        left.add_(_FLOOR)
        # left τ + rise τ²/2 = excess, and the density there
        density = left.square().addcmul_(rise, excess, value=2)
        density = density.clamp_(min=_FLOOR**2).sqrt_()
        part = excess.mul_(2).div_(left.add_(density)).clamp_(max=1)
        z = (index + part).mul_(_STEP).sub_(EDGE)
        log_q = density.log().sub_(mass.log().add_(scale.log()))
        raw = (raw_scale, basis, u)
        ctx.save_for_backward(*raw, scale, bare, mass, index, rise, density, part)
        return torch.addcmul(location, scale, z), log_q

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_w: Tensor, grad_log_q: Tensor) -> tuple[Any, ...]:
        raw_scale, basis, u, *saved = ctx.saved_tensors
        scale, bare, mass, index, rise, density, part = saved
        z = (index + part).mul_(_STEP).sub_(EDGE)
        by_log_q = total(grad_log_q)
        by_scale = total(z.mul_(grad_w)).sub(by_log_q / scale)
        # with the derivative of softplus
        by_raw_scale = by_scale.mul_(torch.sigmoid(raw_scale))
        at_point = grad_log_q / density
        # γ: gradient in z, by way of log p(z) as well, over p(z)
        pull = torch.addcmul(grad_w * scale, at_point, rise, value=1 / _STEP)
        pull.div_(density)
        everywhere = total(pull * u).sub(by_log_q / mass)
        grad_p = _spread(pull, everywhere, index, part, at_point)
        heights = basis[:, :-1].mT @ grad_p.mul_(bare)
        return grad_w.sum(0), by_raw_scale, heights, None, None


def _segment(bare: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where ``F(z) = u``: segment (s, P), mass beyond its left end over Δ, and ``∫ p``.

    Node by node: a table of partial sums would take as much memory as the density.
    """
    mass = torch.zeros_like(bare[0])
    for j, row in enumerate(bare):
        mass.add_(row, alpha=_STEP / 2 if j in (0, N_NODES - 1) else _STEP)
    mass.add_(2 * EDGE * _FLOOR)
    target = u * mass
    index, below = torch.zeros_like(u), torch.zeros_like(u)
    reached, area = torch.zeros_like(mass), torch.empty_like(mass)
    passed = torch.empty_like(u)
    for left, right in pairwise(bare[:-1]):
        torch.add(left, right, out=area).mul_(_STEP / 2).add_(_STEP * _FLOOR)
        # as numbers: vectorised, unlike what is done with booleans
        torch.le(reached.add_(area), target, out=passed)
        index += passed
        below.addcmul_(passed, area)
    excess = target.sub_(below).div_(_STEP).clamp_(min=0)
    return index.long(), excess, mass


def _spread(
    pull: Tensor, everywhere: Tensor, index: Tensor, part: Tensor, at_point: Tensor
) -> Tensor:
    """Gradient at the nodes, (G, P), from what draws (s, P) ask for.

    Of each draw: ``γ (u W_j − W_j(z))`` from the implicit gradient, and ``hat_j(z)/p``
    from the density at the draw, where ``everywhere`` is the sum of ``γ u − g/∫p``.
    """
    pull = pull * (_STEP / 2)
    ahead = everywhere * (_STEP / 2)
    grad = pull.new_zeros(N_NODES, pull.shape[1])
    grad.scatter_add_(0, index, pull)
    other = torch.empty_like(ahead)
    grad[-1] = ahead
    for row in reversed(grad[1:-1].unbind()):
        # a draw in the segment right of a node has half the node's hat behind it
        torch.sub(ahead, row, out=other)
        torch.add(ahead, other, out=row)
        ahead, other = other, ahead
    grad[0] = ahead
    square = part.square()
    ramp = at_point * part
    grad.scatter_add_(0, index, pull * (square - 2 * part) + (at_point - ramp))
    grad.scatter_add_(0, index + 1, ramp.addcmul_(pull, square, value=-1))
    return grad
