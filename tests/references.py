"""Slow dense implementations by plain automatic differentiation, in float64.

They share no code with the package. Jacobians come from one backward pass per row and
output. Hessians of the loss come from two backward passes through
``torch.distributions``. Posterior and evidence use dense matrices.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from cases import generator, normal
from torch import Tensor, distributions, nn
from torch.distributions import Distribution

from sklaplace import likelihoods
from sklaplace.core.trees import tree_rows
from sklaplace.curvature.layout import Layout
from sklaplace.likelihoods import CRITERIA, Likelihood
from sklaplace.networks.forward import Forward

# of several labels per row, which the criterion alone does not tell
SEVERAL: list[Likelihood] = [
    likelihoods.Bernoulli().multilabel(),
    likelihoods.Categorical().dense((2,)),
]
# one instance of each likelihood that a criterion leads to, by name
LIKELIHOODS: dict[str, Likelihood] = {
    type(likelihood).__name__: likelihood
    for likelihood in [*(known for known, _ in CRITERIA.values()), *SEVERAL]
}


# those under which a head can be refitted
CONVEX = [name for name, likelihood in LIKELIHOODS.items() if likelihood.is_convex]


# ------------------------------------------------------------------ likelihoods
@dataclass(frozen=True)
class Reference:
    """A likelihood written with ``torch.distributions``."""

    n_outputs: int
    targets: Callable[[int], Tensor]
    distribution: Callable[[Tensor, Tensor], Distribution]


def _labels(n_classes: int, *columns: int) -> Callable[[int], Tensor]:
    return lambda n: torch.randint(n_classes, (n, *columns), generator=generator(3))


def _floats(n_classes: int, *columns: int) -> Callable[[int], Tensor]:
    return lambda n: _labels(n_classes, *columns)(n).double()


def _numbers(columns: int) -> Callable[[int], Tensor]:
    return lambda n: normal(n, columns, seed=3)


def _categorical(f: Tensor, _: Tensor) -> Distribution:
    return distributions.Categorical(logits=f)


def _two_positions(f: Tensor, _: Tensor) -> Distribution:
    return distributions.Categorical(logits=f.unflatten(-1, (2, 2)))


def _bernoulli(f: Tensor, _: Tensor) -> Distribution:
    return distributions.Bernoulli(logits=f)


def _poisson(f: Tensor, _: Tensor) -> Distribution:
    return distributions.Poisson(f.exp())


def _heteroscedastic(f: Tensor, _: Tensor) -> Distribution:
    mean, log_variance = f.chunk(2, -1)
    return distributions.Normal(mean, (log_variance / 2).exp())


REFERENCES: dict[type, Reference] = {
    likelihoods.Categorical: Reference(3, _labels(3), _categorical),
    likelihoods.Bernoulli: Reference(1, _floats(2, 1), _bernoulli),
    likelihoods.MultilabelBernoulli: Reference(3, _floats(2, 3), _bernoulli),
    likelihoods.CategoricalMap: Reference(4, _labels(2, 2), _two_positions),
    likelihoods.Gaussian: Reference(2, _numbers(2), distributions.Normal),
    likelihoods.Poisson: Reference(2, _floats(4, 2), _poisson),
    likelihoods.HeteroscedasticGaussian: Reference(2, _numbers(1), _heteroscedastic),
}


def reference(likelihood: Likelihood) -> Reference:
    return REFERENCES[type(likelihood)]


def log_likelihood(likelihood: Any, f: Tensor, y: Tensor, sigma: Tensor) -> Tensor:
    """Return the log-likelihood of each row, (b,)."""
    log_prob = reference(likelihood).distribution(f, sigma).log_prob(y)
    return log_prob.reshape(len(f), -1).sum(1)


def loss_hessian(likelihood: Likelihood, f: Tensor, y: Tensor) -> Tensor:
    """Return the Hessian (b, c, c) of the negative log-likelihood without noise in f.

    If the Hessian depends on the targets, return its mean over two targets, one
    standard deviation to either side. These have the same first and second moments.
    """
    one = torch.ones((), dtype=f.dtype)
    if isinstance(likelihood, likelihoods.HeteroscedasticGaussian):
        known = reference(likelihood).distribution(f, one)
        sides = (known.mean + sign * known.stddev for sign in (1, -1))
        return sum(_hessian_at(likelihood, f, side) for side in sides) / 2
    return _hessian_at(likelihood, f, y)


def _hessian_at(likelihood: Likelihood, f: Tensor, y: Tensor) -> Tensor:
    one = torch.ones((), dtype=f.dtype)

    def loss(row: Tensor, target: Tensor) -> Tensor:
        return -log_likelihood(likelihood, row[None], target[None], one).sum()

    hessian, pairs = torch.autograd.functional.hessian, zip(f, y, strict=True)
    return torch.stack([hessian(lambda v, t=t: loss(v, t), row) for row, t in pairs])


# ------------------------------------------------------------------- Jacobians
@contextmanager
def requiring_grad(parameters: list[nn.Parameter]) -> Iterator[None]:
    for parameter in parameters:
        parameter.requires_grad_()
    try:
        with torch.enable_grad():
            yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(False)


def n_rows(x: Any) -> int:
    return n_rows(next(iter(x.values()))) if isinstance(x, dict) else len(x)


def row(x: Any, n: int) -> Any:
    return tree_rows(x, slice(n, n + 1))


def jacobian(forward: Forward, x: Any, layout: Layout) -> Tensor:
    """Return the Jacobian of every output in every selected parameter, (b, c, P)."""
    named = dict(forward.module.named_parameters())
    leaves = [named[block.name] for block in layout.blocks]
    found = []
    for n in range(n_rows(x)):
        with requiring_grad(leaves):
            f = forward(row(x, n))[0]
            kept = {"retain_graph": True, "materialize_grads": True}
            rows = [torch.autograd.grad(output, leaves, **kept) for output in f]
        found.append(torch.stack([selected(r, layout) for r in rows]))
    return torch.stack(found)


def selected(gradients: Any, layout: Layout) -> Tensor:
    """Return the selected entries of gradients, concatenated, (P,)."""
    pieces = []
    for gradient, block in zip(gradients, layout.blocks, strict=True):
        places = slice(None) if block.indices is None else block.indices
        pieces.append(gradient.flatten()[places])
    return torch.cat(pieces)


# ------------------------------------------------------------------- curvature
@dataclass(frozen=True)
class Curvature:
    """The parts of every structure.

    They are ``J`` (b, c, P) and ``L`` (b, c, c), the weighted Hessians of the loss in
    the outputs.
    """

    forward: Forward
    x: Any
    layout: Layout
    J: Tensor
    L: Tensor
    weights: Tensor


def curvature(
    forward: Forward,
    x: Any,
    layout: Layout,
    likelihood: Likelihood,
    y: Tensor,
    weights: Tensor | None = None,
) -> Curvature:
    """Return the exact curvature of the likelihood; the default weight is one."""
    f = forward(x).detach()
    w = torch.ones(len(f), dtype=f.dtype) if weights is None else weights
    hessians = loss_hessian(likelihood, f, y) * w.reshape(-1, 1, 1)
    return Curvature(forward, x, layout, jacobian(forward, x, layout), hessians, w)


def full(parts: Curvature) -> Tensor:
    """Return the generalised Gauss-Newton matrix, (P, P)."""
    return torch.einsum("ncp,ncd,ndq->pq", parts.J, parts.L, parts.J)


def diag(parts: Curvature) -> Tensor:
    """Return the diagonal of the generalised Gauss-Newton matrix, (P, P)."""
    return full(parts).diagonal().diag()


def kron(parts: Curvature, reduces: bool = False) -> Tensor:
    """Return KFAC: ``B ⊗ A`` per weight tensor, with other blocks exact."""
    exact = full(parts)
    blocks, start = [], 0
    for spec in parts.layout.blocks:
        rows = slice(start, start + spec.size)
        if spec.layer is None or spec.is_bias or spec.indices is not None:
            blocks.append(exact[rows, rows])
        else:
            blocks.append(_kfac(parts, spec.layer, reduces))
        start += spec.size
    return torch.block_diag(*blocks)


def _kfac(parts: Curvature, name: str, reduces: bool = False) -> Tensor:
    """Return ``B = Σ Gᵀ L G`` over positions, and the mean ``A`` of ``a aᵀ``."""
    layer = parts.forward.module.get_submodule(name)
    n_groups = getattr(layer, "groups", 1)
    sums = [(0.0, 0.0)] * n_groups
    n_positions = 0.0
    for n, (L, w) in enumerate(zip(parts.L, parts.weights, strict=True)):
        a, G = _layer(parts.forward, row(parts.x, n), name)  # (r, i), (c, r, o)
        if reduces:  # positions become one
            a, G = a.mean(0, keepdim=True), G.sum(1, keepdim=True)
        for k, (B, A) in enumerate(sums):
            g, b = G.chunk(n_groups, -1)[k], a.chunk(n_groups, -1)[k]
            B = B + torch.einsum("cro,cd,drj->oj", g, L, g)
            sums[k] = B, A + w * b.T @ b
        n_positions = n_positions + w * len(a)
    return torch.block_diag(*(torch.kron(B, A / n_positions) for B, A in sums))


def _layer(forward: Forward, x: Any, name: str) -> tuple[Tensor, Tensor]:
    """Return one row's layer inputs (r, i) and output gradients (c, r, o).

    Zeros added to the outputs receive the gradients.
    """
    layer, inputs, zeros = forward.module.get_submodule(name), [], []

    def perturb(_layer: nn.Module, args: Any, output: Tensor) -> Tensor:
        inputs.append(_patches(layer, args[0].detach().clone()))
        zeros.append(torch.zeros_like(output, requires_grad=True))
        return output + zeros[-1]

    handle = layer.register_forward_hook(perturb, prepend=True)
    with torch.enable_grad():
        f = forward(x)[0]
    handle.remove()
    gradients = [torch.autograd.grad(out, zeros, retain_graph=True) for out in f]
    is_linear = isinstance(layer, nn.Linear)
    G = [
        torch.cat([_channels_last(g[0], is_linear) for g in of_calls])
        for of_calls in gradients
    ]
    return torch.cat(inputs), torch.stack(G)


def _channels_last(g: Tensor, is_linear: bool) -> Tensor:
    return g.reshape(-1, g.shape[-1]) if is_linear else g.flatten(1).T


def _patches(layer: Any, x: Tensor) -> Tensor:
    """Return one row's patches (r, i), by a convolution with the identity."""
    if isinstance(layer, nn.Linear):
        return x.reshape(-1, x.shape[-1])
    size = layer.weight[0].numel()
    identity = torch.eye(size, dtype=x.dtype).reshape(size, *layer.weight.shape[1:])
    # every group has patches of its own
    weight = identity.repeat(layer.groups, *[1] * (identity.ndim - 1))
    return layer._conv_forward(x, weight, None)[0].flatten(1).T


# structure -> H as it keeps it, (P, P)
STRUCTURES: dict[str, Callable[[Curvature], Tensor]] = {
    "diag": diag,
    "full": full,
    "kron": kron,
    # of a rank that is enough
    "gp": full,
    "nystrom": full,
    "variational": full,
    "lowrank": full,
}


# ------------------------------------------------------------------- posterior
def expand(prior_precision: Tensor, layout: Layout) -> Tensor:
    """Return the prior precision of every weight, (P,)."""
    if prior_precision.ndim == 0:
        return prior_precision.repeat(layout.n_parameters)
    if len(prior_precision) == layout.n_parameters:
        return prior_precision
    pairs = zip(prior_precision, layout.sizes, strict=True)
    return torch.cat([delta.expand(size) for delta, size in pairs])


def evidence(
    H: Tensor,
    mean: Tensor,
    log_lik: Tensor,
    delta: Tensor,
    scale: Tensor,
    prior_mean: Tensor,
) -> Tensor:
    """Return the Laplace evidence: log joint + P/2 log 2π - ½ log det."""
    prior = distributions.Normal(prior_mean, delta.rsqrt())
    log_joint = log_lik + prior.log_prob(mean).sum()
    logdet = torch.logdet(scale * H + delta.diag())
    return log_joint + len(mean) / 2 * math.log(2 * math.pi) - logdet / 2


def gradient_rows(outputs: Tensor, parameters: Any) -> Tensor:
    """Return concatenated gradients of each output, (*outputs.shape, P)."""
    leaves = list(parameters)
    keep = {"retain_graph": True, "materialize_grads": True}
    rows = [torch.autograd.grad(f, leaves, **keep) for f in outputs.flatten()]
    flat = [torch.cat([g.flatten() for g in row]) for row in rows]
    return torch.stack(flat).reshape(*outputs.shape, -1)
