"""Amplitudes: variances of the residual of each output.

The variance of the residual of output k at a sample x is the amplitude ``s_k²`` times
the relative variance of the sample; see `sklaplace.novelty.residual`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Amplitudes:
    """Variances of the residual of c outputs, for a relative variance of one.

    Attributes
    ----------
    variances : Tensor of shape (c,) or (1,)
        ``s_k²``.
    bounds : Tensor of shape (c,) or None
        Upper bounds ``τ_k²`` of the total variances, or None without bounds.
    """

    variances: Tensor
    bounds: Tensor | None = None

    def added(
        self, cov: Tensor, relative: Tensor, n_blocks: int = 1, *, centred: bool = False
    ) -> Tensor:
        """Return variances or covariances with the residual of each sample added.

        The residuals of different outputs are independent. Bounds shrink the sum.

        Parameters
        ----------
        cov : Tensor of shape (b, c), (b, c, c) or (b, r, K, K)
            Variances, or covariances, of the outputs without the residual. The last
            shape is for r blocks of outputs.
        relative : Tensor of shape (b,)
            Relative variances of the samples.
        n_blocks : int
            Number r of blocks: one block of K logits per label, or one of all outputs.
        centred : bool
            Whether the mean of each block is subtracted from the outputs. All outputs
            then have the same amplitude.
        """
        if cov.ndim == 2:
            block_size = cov.shape[1] // n_blocks
            residual = relative.unsqueeze(1) * self.variances
            # centring K independent values removes 1/K of their variance
            cov = cov + residual * (1 - 1 / block_size if centred else 1)
            return cov if self.bounds is None else cov / (1 + cov / self.bounds)
        # covariance of the residual for a relative variance of one: (c, c), or (K, K)
        # for each block, because all class logits have the same amplitude
        unit_cov = torch.eye(cov.shape[-1]).to(cov) * self.variances
        if centred:
            unit_cov = unit_cov - unit_cov.mean(-1, keepdim=True)
        cov = cov + relative.view(-1, *[1] * (cov.ndim - 1)) * unit_cov
        return _bounded(cov, self.bounds)

    def added_among(self, cov: Tensor, relative: Tensor, n_outputs: int) -> Tensor:
        """Return covariances (b, m, m) of m of c centred logits, plus the residual.

        All logits have the same amplitude, and no bounds.
        """
        unit_cov = torch.eye(cov.shape[-1]).to(cov) - 1 / n_outputs
        return cov + relative.view(-1, 1, 1) * self.variances * unit_cov

    def added_jointly(
        self, cov: Tensor, rows: Tensor, c: int, across_outputs: bool
    ) -> Tensor:
        """Return covariances between n samples with those of the residual added.

        Residuals of different outputs are independent. For output k, their covariance
        between samples n and m is ``s_k²`` times the inner product of rows n and m.
        Bounds shrink the sum.

        Parameters
        ----------
        cov : Tensor of shape (n, n, c), or (..., n·c, n·c) if ``across_outputs``
            Covariances without the residual. The outputs of a sample are adjacent.
        rows : Tensor of shape (..., n, p)
            Vectors from `Residual.rows`, one per sample.
        c : int
            Number of outputs.
        across_outputs : bool
            Whether ``cov`` includes covariances between outputs.
        """
        relative, variances = rows @ rows.mT, self.variances.expand(c)
        if not across_outputs:
            # `_bounded` needs the axes of samples last: (c, n, n)
            cov = cov.movedim(-1, 0) + relative * variances.view(-1, 1, 1)
            bounds = None if self.bounds is None else self.bounds.unsqueeze(-1)
            return _bounded(cov, bounds).movedim(0, -1)
        # a diagonal matrix over outputs for each pair of samples, (..., n, c, n, c)
        residual = torch.einsum("...nm,kl->...nkml", relative, variances.diag())
        bounds = None if self.bounds is None else self.bounds.repeat(rows.shape[-2])
        return _bounded(cov + residual.flatten(-4, -3).flatten(-2), bounds)

    def drawn(self, rows: Tensor, c: int, n_samples: int, seed: int) -> Tensor:
        """Return s = ``n_samples`` joint draws (b, c, s) of the residual.

        ``rows`` (b, p) are vectors from `Residual.rows`. Their products with a standard
        normal vector ω have the covariances of the residual, divided by ``s_k²``. All
        batches with the same seed use the same vectors ω, so draws are joint.
        """
        # one vector ω for each output and draw, (p, c·s)
        generator = torch.Generator().manual_seed(seed)
        shape = rows.shape[1], c * n_samples
        normals = torch.randn(shape, generator=generator, dtype=torch.float64)
        draws = (rows @ normals.to(rows)).unflatten(1, (c, n_samples))
        return draws * self.variances.sqrt().unsqueeze(-1)

    def bounded_draws(self, draws: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Shrink draws (b, c, s), given their variances (b, c), to meet the bounds."""
        assert self.bounds is not None
        mean, shrink = mean.unsqueeze(-1), (1 + variance / self.bounds).rsqrt()
        return mean + (draws - mean) * shrink.unsqueeze(-1)


def _bounded(cov: Tensor, bounds: Tensor | None) -> Tensor:
    """Shrink covariances (..., q, q) so that the variances respect bounds (q,).

    A variance v with the bound τ² becomes v / (1 + v / τ²). Correlations are kept.
    """
    if bounds is None:
        return cov
    shrink = (1 + cov.diagonal(dim1=-2, dim2=-1) / bounds).rsqrt()
    return cov * shrink.unsqueeze(-1) * shrink.unsqueeze(-2)
