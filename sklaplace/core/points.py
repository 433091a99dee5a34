"""Points that stand for a standard normal distribution in many dimensions."""

from functools import lru_cache

import torch
from torch import Tensor


def sobol_normals(n_samples: int, dim: int, seed: int) -> Tensor:
    """Standard-normal points that cover space more evenly than random ones.

    Parameters
    ----------
    n_samples : int
        Number of points, at least one. A power of two covers best.
    dim : int
        Number of dimensions.
    seed : int
        Seed of the scrambling. The global random state is not touched.

    Returns
    -------
    Tensor of shape (n_samples, dim)
        Scrambled Sobol points through the normal quantile, float64. The second
        half mirrors the first, so that odd moments vanish for even
        ``n_samples``; from twice as many points as dimensions on, second moments are
        one, too.

    Raises
    ------
    ValueError
        If ``n_samples`` is not positive.

    Notes
    -----
    O(n_samples · dim). Sobol sequences are tabulated up to 21,201 dimensions;
    beyond these, the points are independent normal draws (mirrored as well).

    References
    ----------
    Owen (1998), "Scrambling Sobol and Niederreiter-Xing points", Journal of
    Complexity 14(4).
    """
    if n_samples < 1:
        raise ValueError(f"n_samples={n_samples} gives no draws. Use at least 1.")
    half = (n_samples + 1) // 2
    if dim > torch.quasirandom.SobolEngine.MAXDIM:
        generator = torch.Generator().manual_seed(seed)
        points = torch.randn(half, dim, generator=generator, dtype=torch.float64)
    else:
        engine = torch.quasirandom.SobolEngine(dim, scramble=True, seed=seed)
        # Points are multiples of 2⁻³⁰, and 0 and 1 have infinite quantiles.
        uniform = engine.draw(half, dtype=torch.float64).clamp(2**-31, 1 - 2**-31)
        points = torch.special.ndtri(uniform)
    if half >= dim:
        points = _whitened(points)
    return torch.cat([points, -points])[:n_samples]


def _whitened(points: Tensor) -> Tensor:
    """Points (s, d), d <= s, with second moments of exactly one."""
    root = torch.linalg.cholesky(points.mT @ points / len(points))
    whitened: Tensor = torch.linalg.solve_triangular(root, points.mT, upper=False)
    return whitened.mT


# for the same points in every call; not to be written to
cached_sobol_normals = lru_cache(maxsize=8)(sobol_normals)
