"""Roots ``R`` (n, P) of the curvature ``H = RᵀR``, in float64, and products with them.

Products use ``D = diag δ``, or ``D = I`` if the prior precision is None.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sklaplace.core.serialise import FieldsOnly
from sklaplace.curvature import priors
from sklaplace.curvature.jacobian import Jacobian
from sklaplace.curvature.layout import Layout
from sklaplace.curvature.structures.base import cache_last_call


def identity(like: Tensor) -> Tensor:
    """Return ``I`` (n, n), in the dtype and on the device of a tensor (..., n)."""
    return torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)


def lower_inverse(lower: Tensor) -> Tensor:
    """Return ``L⁻¹`` of lower triangular ``L`` (..., n, n)."""
    return torch.linalg.solve_triangular(lower, identity(lower), upper=False)


@dataclass(frozen=True)
class DenseRoot(FieldsOnly):
    """``R`` as a matrix.

    Attributes
    ----------
    layout : Layout
        The selected parameters.
    rows : Tensor of shape (n, P)
        The matrix.
    """

    layout: Layout
    rows: Tensor

    @property
    def n_rows(self) -> int:
        """Number n of rows."""
        return len(self.rows)

    def trace(self) -> Tensor:
        """Return ``tr RᵀR``, ()."""
        return (self.rows**2).sum()

    def dense(self) -> Tensor:
        """Return ``R`` itself, (n, P)."""
        return self.rows

    def matmul(self, weights: Tensor) -> Tensor:
        """Return ``R w``, (s, n), for each row ``w`` of (s, P)."""
        return weights @ self.rows.T

    def rmatmul(self, coefficients: Tensor) -> Tensor:
        """Return ``Rᵀ c``, (s, P), for each row ``c`` of (s, n)."""
        return coefficients @ self.rows

    def gram(self, delta: Tensor | None = None) -> Tensor:
        """Return ``R D⁻¹ Rᵀ``, (n, n), with ``D = diag δ``, or ``D = I`` for None."""
        rows = self.rows
        if delta is not None:
            rows = rows * priors.expand(delta, self.layout).rsqrt()
        return rows @ rows.T

    def cross(self, jacobian: Jacobian, delta: Tensor | None = None) -> Tensor:
        """Return ``J D⁻¹ Rᵀ``, (b, c, n), for a Jacobian in float64."""
        return jacobian.matmul(self.rows.T if delta is None else self._over(delta))

    @cache_last_call
    def _over(self, delta: Tensor) -> Tensor:
        """Return ``D⁻¹ Rᵀ``, (P, n)."""
        return (self.rows / priors.expand(delta, self.layout)).T.contiguous()

    def solved(self, lower: Tensor) -> "DenseRoot":
        """Return ``L⁻¹ R`` for a lower triangular ``L`` (n, n)."""
        rows = torch.linalg.solve_triangular(lower, self.rows, upper=False)
        return DenseRoot(self.layout, rows)

    def scaled(self, factor: Tensor) -> "DenseRoot":
        """Return the root of ``factor·H``."""
        return DenseRoot(self.layout, factor.sqrt() * self.rows)


@dataclass(frozen=True)
class PointRoot:
    """Root ``R = F SᵀJ`` of some points, whose Jacobian is in factored form.

    Attributes
    ----------
    layout : Layout
        The selected parameters.
    jacobians : tuple of Jacobian
        ``SᵀJ``, (m, P) in total, float64, with hashes of the samples.
    factor : Tensor of shape (n, m) or None
        ``F``. None means the identity.
    """

    layout: Layout
    jacobians: tuple[Jacobian, ...]
    factor: Tensor | None = None

    def __deepcopy__(self, _memo: object) -> "PointRoot":
        """Return the root itself, which never changes."""
        return self

    @property
    def n_rows(self) -> int:
        """Number n of rows."""
        return sum(self._sizes) if self.factor is None else len(self.factor)

    def trace(self) -> Tensor:
        """Return ``tr RᵀR``, ()."""
        if self.factor is not None:
            return self.gram().trace()
        # without a factor, squared norms of rows are enough: variances of the rows if
        # all weights have the variance one
        ones = self.jacobians[0].gradients()[0].new_ones(self.layout.n_parameters)
        traces = [point.variance(ones).sum() for point in self.jacobians]
        return torch.stack(traces).sum()

    @property
    def _sizes(self) -> list[int]:
        return [point.n_samples * point.n_columns for point in self.jacobians]

    def _factored(self, products: Tensor) -> Tensor:
        """Return ``products Fᵀ``, (..., n), for products (..., m)."""
        return products if self.factor is None else products @ self.factor.T

    def dense(self) -> Tensor:
        """Return ``R`` as a matrix, (n, P)."""
        rows = torch.cat([point.dense().flatten(0, 1) for point in self.jacobians])
        return self._factored(rows.T).T

    def matmul(self, weights: Tensor) -> Tensor:
        """Return ``R w``, (s, n), for each row ``w`` of (s, P)."""
        products = [point.matmul(weights.T).flatten(0, 1) for point in self.jacobians]
        return self._factored(torch.cat(products).T)

    def rmatmul(self, coefficients: Tensor) -> Tensor:
        """Return ``Rᵀ c = (SᵀJ)ᵀ Fᵀ c``, (s, P), for each row ``c`` of (s, n)."""
        if self.factor is not None:
            coefficients = coefficients @ self.factor  # (s, m)
        pairs = zip(self.jacobians, coefficients.T.split(self._sizes), strict=True)
        terms = [  # w: one row per sample and column of S
            rows.rmatmul(w.unflatten(0, (rows.n_samples, rows.n_columns)))
            for rows, w in pairs
        ]
        return sum(terms[1:], terms[0]).T  # from (P, s)

    def gram(self, delta: Tensor | None = None) -> Tensor:
        """Return ``R D⁻¹ Rᵀ``, (n, n)."""
        products = [self.cross(point, delta).flatten(0, 1) for point in self.jacobians]
        return self._factored(torch.cat(products).T).T

    def cross(self, jacobian: Jacobian, delta: Tensor | None = None) -> Tensor:
        """Return ``J D⁻¹ Rᵀ``, (b, c, n), for a scalar or layerwise prior.

        ``D = diag δ``, or ``D = I`` if ``delta`` is None. Neither ``J`` nor ``R`` is
        made dense: the kernel multiplies the factors of their rows.
        """
        # prior variance of each parameter tensor, (L,)
        variances = jacobian.gradients()[0].new_ones(()) if delta is None else 1 / delta
        variances = variances.expand(len(self.layout.blocks))
        kernels = [jacobian.kernel(point, variances) for point in self.jacobians]
        return self._factored(torch.cat([k.flatten(2) for k in kernels], -1))

    def solved(self, lower: Tensor) -> "PointRoot":
        """Return ``L⁻¹ R``."""
        inverse = lower_inverse(lower)
        factor = inverse if self.factor is None else inverse @ self.factor
        return replace(self, factor=factor)

    def scaled(self, factor: Tensor) -> "PointRoot":
        """Return the root of ``factor·H``."""
        jacobians = tuple(point.times(factor.sqrt()) for point in self.jacobians)
        return replace(self, jacobians=jacobians)


Root = DenseRoot | PointRoot
