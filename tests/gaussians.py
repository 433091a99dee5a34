"""Gaussians over logits, and slow reference computations."""

import torch
from cases import DOUBLE, generator

from sklaplace.core.random import sobol_normals
from sklaplace.dirichlet.logits import centre


def _wide(A, n):
    """Return diagonal covariances with n wide classes, as without training rows."""
    variances = torch.full_like(A[:, 0], 0.01)
    variances[:, :n] = 1
    return torch.diag_embed(variances)


# covariances (b, K, K) of variances about one, from normal numbers (b, K, K)
KINDS = {
    "wishart": lambda A: A @ A.mT / A.shape[-1],
    "diagonal": lambda A: torch.diag_embed((1.5 * A[:, 0]).exp()),
    "low rank": lambda A: (
        A[..., :2] @ A[..., :2].mT / 2 + 0.01 * torch.eye(A.shape[-1])
    ),
    "isotropic": lambda A: torch.diag_embed(torch.ones_like(A[:, 0])),
    "one wide": lambda A: _wide(A, 1),
    "two wide": lambda A: _wide(A, 2),
}


def gaussian(rows, n_classes, kind="wishart", sd=1.0, dtype=DOUBLE, seed=0):
    """Return means (b, K) and covariances (b, K, K)."""
    source, shape = generator(seed), (rows, n_classes, n_classes)
    A = torch.randn(shape, generator=source, dtype=DOUBLE)
    mean = 2 * torch.randn(shape[:2], generator=source, dtype=DOUBLE)
    return mean.to(dtype), (sd**2 * KINDS[kind](A)).to(dtype)


def arrays(*args, **options):
    """Return the means and covariances as numpy arrays."""
    return [tensor.numpy() for tensor in gaussian(*args, **options)]


def second_order(mean, cov):
    """Return the gap to first order: half the variance of a logit under p.

    The gap is ``½ tr(Σ (diag p − ppᵀ))``, half the trace of Σ times the Hessian of
    logsumexp.
    """
    p = mean.double().softmax(-1)
    own = (p * cov.diagonal(dim1=-2, dim2=-1)).sum(-1)
    return (own - torch.einsum("bi,bij,bj->b", p, cov.double(), p)) / 2


def sampled_gap(mean, cov, n_points):
    """Return ``E[logsumexp] − logsumexp`` of each row, and its standard error.

    The estimate uses mirrored points on another root of the covariance. The known
    error of a quadratic function is subtracted.
    """
    mean, cov = centre(mean, cov)
    values, vectors = torch.linalg.eigh(cov)  # the first is that of all ones
    root = (vectors * values.clamp(min=0).sqrt().unsqueeze(-2))[..., 1:]
    # the first points are the most even: for the largest eigenvalues
    root = root.flip(-1)
    points = sobol_normals(2 * n_points, mean.shape[-1] - 1, 0)[:n_points]
    found = []
    for m, F, expected in zip(
        mean.log_softmax(-1), root, second_order(mean, cov), strict=True
    ):
        p, moves = m.exp(), F @ points.mT
        middle = m.unsqueeze(-1)
        gaps = ((middle + moves).logsumexp(0) + (middle - moves).logsumexp(0)) / 2
        quadratic = (p @ moves**2 - (p @ moves) ** 2) / 2
        both = torch.stack([gaps, quadratic]).cov()
        rest = gaps - both[0, 1] / both[1, 1] * (quadratic - expected)
        found.append(torch.stack([rest.mean(), rest.std() / n_points**0.5]))
    return torch.stack(found, -1)


def assert_slope(value, rtol, atol):
    """Check the derivative of a function at zero against a difference quotient."""
    at = torch.zeros((), dtype=DOUBLE, requires_grad=True)
    (slope,) = torch.autograd.grad(value(at), at)
    step = 1e-5
    with torch.no_grad():
        expected = (value(step) - value(-step)) / (2 * step)
    torch.testing.assert_close(slope, expected, rtol=rtol, atol=atol)
