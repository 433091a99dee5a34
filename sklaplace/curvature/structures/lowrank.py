"""Low-rank structure with the leading eigenvectors of ``H``, from a sketch of ``H``.

The sketch ``Y = HΩ``, with a fixed random ``Ω`` (P, q), is a sum over the rows of
``SᵀJ``, which are never stored as a dense matrix. Sketches of batches and shards can be
added. The Nyström approximation ``H ≈ Y (ΩᵀY)⁻¹ Yᵀ`` is exact if the rank of ``H`` is
at most q.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from sklaplace.core.checks import check_below_one, check_count
from sklaplace.core.parallel import cached_property, one_thread
from sklaplace.curvature.jacobian import Jacobian
from sklaplace.curvature.layout import Layout
from sklaplace.curvature.structures.base import Accumulator, SumAccumulator
from sklaplace.curvature.structures.dual import Dual
from sklaplace.curvature.structures.root import DenseRoot, identity
from sklaplace.curvature.structures.rounding import check_finite

RANK = 100
# Eigenvectors with eigenvalues below this fraction of the largest one are dropped. The
# fraction is close to the rounding error of a sketch in double precision.
TOLERANCE = 1e-12
# Additional columns of the sketch, beyond the rank (Halko, Martinsson and Tropp 2011,
# section 4.2, recommend five or ten).
OVERSAMPLING = 10


@dataclass(frozen=True)
class LowRank(Dual):
    """Leading eigenvectors, with ``H ≈ U diag(e) Uᵀ`` and the root ``√e Uᵀ``.

    In all other directions, the posterior equals the prior.

    Attributes
    ----------
    sketch : Tensor of shape (P, q)
        Sketch ``HΩ``, to which more batches can be added.
    """

    sketch: Tensor
    name = "lowrank"
    # truncation may have dropped leading directions of the sum
    is_additive = False

    def scaled(self, factor: Tensor) -> "LowRank":
        """Return the structure of ``factor·H``."""
        return LowRank(self.layout, self.root.scaled(factor), factor * self.sketch)

    def with_output_factors(self, factors: Tensor) -> None:
        """Return None, because the sketch does not determine ``D H D Ω``."""

    def rounding(self, eps: float) -> float:
        """Return zero, because eigenvalues at the level of rounding are dropped."""
        return 0.0

    def add_to(self, accumulator: Accumulator) -> None:
        """Put the sketch into an empty accumulator."""
        assert isinstance(accumulator, LowRankAccumulator)
        accumulator.sums = self.sketch.clone()

    @cached_property
    def eigh(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues (n,) and eigenvectors (n, n) of ``R Rᵀ = diag(e)``."""
        values = (self.root.rows**2).sum(1)
        return values, identity(values)

    @cached_property
    def eigenvalues(self) -> Tensor:
        """Eigenvalues of ``H``, (P,), ascending; dropped eigenvalues are zero."""
        values = self.eigh[0].flip(0)
        return functional.pad(values, (self.layout.n_parameters - len(values), 0))


@dataclass(eq=False)
class _RandomBasis:
    """Orthonormal ``Ω`` (P, q), computed when first needed.

    Attributes
    ----------
    p, q : int
        Numbers of rows and columns; at most P columns are used.
    """

    p: int
    q: int
    _omega: Tensor | None = None

    def __call__(self, device: torch.device) -> Tensor:
        """Return ``Ω`` on a device; the values are the same on all devices.

        A fixed seed makes it depend only on its size, so it is stored nowhere else.
        """
        if self._omega is None:
            generator = torch.Generator().manual_seed(0)
            size = self.p, min(self.p, self.q)
            noise = torch.randn(size, dtype=torch.float64, generator=generator)
            # sketches can be added only if Ω is the same in all processes
            with one_thread():  # more threads would change the rounding errors
                self._omega = torch.linalg.qr(noise.to(device)).Q
        return self._omega.to(device)

    def __deepcopy__(self, _memo: object) -> "_RandomBasis":
        """Return the basis itself, because ``Ω`` depends only on its size."""
        return self

    def __getstate__(self) -> dict[str, object]:
        """Return the state without ``Ω``, which can be recomputed from its size."""
        return {**vars(self), "_omega": None}


class LowRankAccumulator(SumAccumulator):
    """Sketch ``HΩ``, stored together with ``Ω`` as 2·P·q numbers, for q = rank + 10.

    Parameters
    ----------
    layout : Layout
        The selected parameters.
    rank : int
        Maximum number of eigenvectors to keep.
    tolerance : float
        Eigenvectors with eigenvalues below this fraction of the largest one are
        dropped.

    Notes
    -----
    For Linear layers, each of a sample's k rows takes ``4·P·q`` operations, and fewer
    if the products can be computed from the factors of the rows.

    References
    ----------
    Tropp, Yurtsever, Udell, Cevher (2017), "Fixed-rank approximation of a
    positive-semidefinite matrix from streaming data", Algorithm 3.
    """

    checks: ClassVar = {"rank": check_count, "tolerance": check_below_one}

    def __init__(
        self, layout: Layout, rank: int = RANK, tolerance: float = TOLERANCE
    ) -> None:
        super().__init__(layout)
        self.rank, self.tolerance = rank, tolerance
        self.omega = _RandomBasis(layout.n_parameters, rank + OVERSAMPLING)

    @classmethod
    def n_bytes(
        cls,
        layout: Layout,
        n_rows: int | None = None,
        rank: int = RANK,
        **_: object,
    ) -> int:
        """Return three times the bytes of the sketch and ``Ω``, to cover factors.

        Both are float64 matrices (P, q), with some columns more than the rank.
        """
        p = layout.n_parameters
        # 3 · 2 matrices
        return 6 * 8 * p * min(p, rank + OVERSAMPLING)

    @classmethod
    def row_elements(
        cls, layout: Layout, n_columns: int, rank: int = RANK, **_: object
    ) -> int:
        """Count the numbers in products of a sample's gradients with ``Ω`` (P, q).

        These are q numbers for each row, and for each output of the widest layer.
        """
        widest = max(o for o, _ in (block.factor_shape for block in layout.blocks))
        return (n_columns + widest) * (rank + OVERSAMPLING)

    def update(self, jacobian: Jacobian) -> None:
        """Add ``(SᵀJ)ᵀ (SᵀJ Ω)`` of one batch."""
        # rounding errors of float32 would count as directions
        rows = jacobian.double()
        self._add(rows.normal_product(self.omega(rows.device)))

    def decompose(self) -> LowRank:
        """Return the leading eigenvectors of the Nyström approximation.

        At most ``rank`` eigenvectors are kept, and none with an eigenvalue at the level
        of rounding errors. The sketch is stored, too, to add more batches later.
        """
        assert self.sums is not None  # the sketch HΩ
        values, vectors = _nystrom(self.sums, self.omega(self.sums.device))
        largest = float(values[0]) if len(values) else 0.0
        is_large = values[: self.rank] > self.tolerance * largest
        # R = diag(e)^½ Qᵀ, so that RᵀR is the approximation
        rows = (values.sqrt() * vectors)[:, : self.rank][:, is_large].T
        return LowRank(self.layout, DenseRoot(self.layout, rows), self.sums.clone())


def _nystrom(sketch: Tensor, omega: Tensor) -> tuple[Tensor, Tensor]:
    """Return descending eigenvalues, and eigenvectors (P, q), of ``Y (ΩᵀY)⁻¹ Yᵀ``.

    ``Y`` is the sketch ``HΩ``. With ``ΩᵀY = L Lᵀ``, the result is ``F Fᵀ`` for
    ``F = Y L⁻ᵀ``, so an SVD of ``F`` yields eigenvalues and eigenvectors. A sketch of
    ``H + shift·I`` is used instead, which keeps the inner matrix ``ΩᵀY`` positive
    definite despite rounding. The shift is later subtracted from the eigenvalues.
    """
    size = torch.linalg.matrix_norm(sketch)
    check_finite(size)
    if size == 0:  # H = 0 has no eigenvectors to keep
        return sketch.new_zeros(0), sketch[:, :0]
    # about the rounding error of the sketch
    shift = len(sketch) ** 0.5 * torch.finfo(sketch.dtype).eps * size
    shifted = sketch + shift * omega
    inner = omega.T @ shifted
    # symmetrised, because rounding makes the product slightly asymmetric
    root = torch.linalg.cholesky((inner + inner.T) / 2)
    factor = torch.linalg.solve_triangular(root, shifted.T, upper=False).T
    vectors, singular, _ = torch.linalg.svd(factor, full_matrices=False)
    return (singular**2 - shift).clamp(min=0), vectors
