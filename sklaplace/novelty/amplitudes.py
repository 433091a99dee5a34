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
            Number of blocks of outputs.
        centred : bool
            Whether the mean of each block is subtracted from the outputs. All outputs
            then have the same amplitude.
        """
        if cov.ndim == 2:
            k = cov.shape[1] // n_blocks  # outputs per block
            added = relative.unsqueeze(1) * self.variances
            # centring k independent values removes 1/k of their variance
            cov = cov + added * (1 - 1 / k if centred else 1)
            return cov if self.bounds is None else cov / (1 + cov / self.bounds)
        # covariance (c, c) of the residual for a relative variance of one; it is (K, K)
        # within blocks, as all class logits have the same amplitude
        unit_cov = torch.eye(cov.shape[-1]).to(cov) * self.variances
        if centred:
            unit_cov = unit_cov - unit_cov.mean(-1, keepdim=True)
        cov = cov + relative.view(-1, *[1] * (cov.ndim - 1)) * unit_cov
        return _bounded(cov, self.bounds)

    def added_jointly(
        self, cov: Tensor, rows: Tensor, c: int, across_outputs: bool
    ) -> Tensor:
        """Return covariances between samples with the residual added.

        Bounds shrink the sum.

        Parameters
        ----------
        cov : Tensor of shape (n, n, c), or (..., n·c, n·c) if ``across_outputs``
            Covariances without the residual. The outputs of a sample are adjacent.
        rows : Tensor of shape (..., n, p)
            Rows from `Residual.rows`.
        c : int
            Number of outputs.
        across_outputs : bool
            Whether ``cov`` includes covariances between outputs.
        """
        relative, variances = rows @ rows.mT, self.variances.expand(c)
        # bounds apply to the last two axes, which must be those of samples
        if not across_outputs:
            bounds = None if self.bounds is None else self.bounds.unsqueeze(-1)
            cov = cov.movedim(-1, 0) + relative * variances.view(-1, 1, 1)
            return _bounded(cov, bounds).movedim(0, -1)
        bounds = None if self.bounds is None else self.bounds.repeat(rows.shape[-2])
        added = torch.einsum("...nm,kl->...nkml", relative, variances.diag())
        # (..., n, c, n, c) to (..., n·c, n·c)
        return _bounded(cov + added.flatten(-4, -3).flatten(-2), bounds)

    def drawn(self, rows: Tensor, c: int, n_samples: int, seed: int) -> Tensor:
        """Return joint draws (b, c, s) of the residual for rows (b, p).

        All batches with the same seed use the same directions, so draws are joint.
        """
        # random directions ω_k of all outputs and draws, (p, c·s)
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
