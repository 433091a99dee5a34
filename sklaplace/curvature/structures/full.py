"""Full structure, the matrix ``H`` (P, P), factorised in O(P³)."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from sklaplace.core.linalg import all_finite, gram, symmetric_eigh
from sklaplace.core.parallel import cached_property
from sklaplace.curvature.jacobian import Jacobian
from sklaplace.curvature.layout import Layout
from sklaplace.curvature.rows import BaseBlock, Block, LayerRows
from sklaplace.curvature.structures import base
from sklaplace.curvature.structures.dual import Dual
from sklaplace.curvature.structures.root import DenseRoot, lower_inverse

# If the ratio of rows of ``SᵀJ`` to parameters is below this fraction, the rows are
# kept instead of ``H``.
MAX_ROWS_PER_PARAMETER = 0.5
# Maximum ratio of the norm of ``scale·H`` to the smallest prior precision at which
# float32 Jacobians are multiplied in float32. The relative error of variances is eps
# times the root of the ratio.
MAX_FLOAT32_CONDITION = 1e6
# Maximum ratio at which covariances of a float32 last layer are quadratic forms of its
# inputs, in float64. The relative error of the smallest variances is eps times the
# ratio, which is less than the error due to rounded inputs.
MAX_FORM_CONDITION = 1e10
# Number of samples whose products of inputs stay in the caches.
SAMPLES_PER_CHUNK = 256
# Negative eigenvalues below this fraction of the largest eigenvalue count as rounding
# errors in double precision.
MAX_NEGATIVE_EIGENVALUE = 1e-10
INDEFINITE = (
    "The exact Hessian is not positive definite under this prior precision: its "
    "smallest eigenvalue is {:.3g}, so the weights do not minimise the loss. Use "
    "curvature='ggn', which is always positive definite, or a larger prior_precision, "
    "such as the weight decay used to train the network."
)


@dataclass(frozen=True)
class Full(base.Diagonalised):
    """Full matrix ``H``.

    `eigh` and the Cholesky factor of ``P`` cost O(P³) each, and are computed when first
    needed.

    Attributes
    ----------
    hessian : Tensor of shape (P, P)
        ``H``, float64.
    is_semidefinite : bool
        Whether negative eigenvalues of ``H`` are only rounding errors. If they are not,
        the prior must make ``P`` positive definite.
    """

    hessian: Tensor
    is_semidefinite: bool = True
    name = "full"
    priors = frozenset({"scalar", "layerwise", "diag"})

    @cached_property
    def eigh(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues (P,) and eigenvectors (P, P) of ``H``."""
        if self.is_semidefinite:
            return symmetric_eigh(self.hessian)
        return tuple(torch.linalg.eigh(self.hessian))

    @cached_property
    def eigenvalues(self) -> Tensor:
        """Eigenvalues of ``H``, (P,), ascending."""
        # eigenvalues alone are cheaper, unless `eigh` has been computed and cached
        if "eigh" in self.__dict__:
            return self.eigh[0]
        eigenvalues = torch.linalg.eigvalsh(self.hessian)
        return eigenvalues.clamp(min=0) if self.is_semidefinite else eigenvalues

    def rotated_layers(self, jacobian: Jacobian) -> Iterator[LayerRows]:
        """Yield ``J Q`` as dense rows."""
        rows = jacobian.matmul(self.eigh[1].to(jacobian.dtype))
        yield LayerRows((Block(rows.unsqueeze(2)),))

    def times_basis(self, w: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Return ``w F(Q)`` for each row of ``w`` (..., P); ``F`` is ``function``."""
        return w @ function(self.eigh[1])

    def trace(self) -> Tensor:
        """Return ``tr H``, ()."""
        return self.hessian.trace()

    def hessian_diagonal(self) -> Tensor:
        """Return the diagonal of ``H``, (P,)."""
        return self.hessian.diagonal()

    def dense(self) -> Tensor:
        """Return ``H``, (P, P)."""
        return self.hessian

    def scaled(self, factor: Tensor) -> "Full":
        """Return the structure of ``factor·H``."""
        return Full(self.layout, factor * self.hessian, self.is_semidefinite)

    def with_output_factors(self, factors: Tensor) -> "Full":
        """Return the structure of ``D H D``."""
        d = self.layout.expand_outputs(factors)
        return Full(self.layout, d[:, None] * self.hessian * d, self.is_semidefinite)

    def product(self, vector: Tensor) -> Tensor:
        """Return ``H v``, (P,)."""
        return self.hessian @ vector

    def add_to(self, accumulator: base.Accumulator) -> None:
        """Put the matrix into an empty accumulator."""
        accumulator.add_matrix(self.hessian, is_semidefinite=self.is_semidefinite)

    def precision(self, prior_precision: Tensor, scale: Tensor) -> "FullPrecision":
        """Return ``P = scale·H + diag δ``, as a Cholesky factor or in an eigenbasis."""
        return FullPrecision(self, prior_precision, scale)


class FullPrecision(base.Precision):
    """``P = scale·H + diag δ``, represented by its Cholesky factor.

    Under a scalar prior, samples use the symmetric root, in the eigenbasis of ``H``.
    """

    structure: Full

    @cached_property
    def in_eigenbasis(self) -> base.EigenPrecision | None:
        """The same precision under a scalar prior, in the eigenbasis of ``H``."""
        if self.prior_precision.ndim:
            return None
        return base.EigenPrecision(self.structure, self.prior_precision, self.scale)

    def _cholesky(self) -> Tensor:
        """Return the lower triangular ``L`` (P, P) with ``L Lᵀ = P``.

        If ``H`` has negative eigenvalues that the prior does not outweigh, raise
        ValueError. If only rounding makes ``P`` indefinite, compute ``L`` from a root
        of ``P``, without ``P`` itself.
        """
        # symmetrised, so that gradients are symmetric as well
        precision = self.scale * self.structure.hessian + self.delta.diag()
        lower, failed = torch.linalg.cholesky_ex((precision + precision.T) / 2)
        if failed and not self.structure.is_semidefinite:
            lowest = self.scale * self.structure.eigenvalues[0]
            raise ValueError(INDEFINITE.format(float(lowest)))
        if failed:
            # The prior precision is below the rounding error of H. The QR decomposition
            # of [√(scale·e) Qᵀ; √δ] avoids P, and keeps posterior variances no larger
            # than prior variances.
            values, vectors = self.structure.eigh
            root = (vectors * (self.scale * values).sqrt()).T
            lower = torch.linalg.qr(torch.cat([root, self.delta.sqrt().diag()])).R.T
            # QR may return negative diagonal entries, whose logarithm is undefined
            lower = lower * lower.diagonal().sign()
        return lower

    @cached_property
    def _root(self) -> Tensor:
        """``F = L⁻ᵀ`` (P, P), upper triangular, ``F Fᵀ = P⁻¹``."""
        return lower_inverse(self._cholesky()).T

    @cached_property
    def _condition(self) -> float:
        """Ratio of the norm of ``scale·H`` to the smallest prior precision."""
        size = self.scale * self.structure.hessian.norm()
        return float((size / self.prior_precision.min()).item())

    @base.cache_last_call
    def _narrow_root(self, dtype: torch.dtype) -> Tensor:
        """Convert ``F`` to a dtype."""
        return self._root.to(dtype)

    def logdet(self) -> Tensor:
        """Return ``2 Σ log diag L``, ()."""
        asks_gradient = self.prior_precision.requires_grad or self.scale.requires_grad
        # a Taylor series costs less than derivatives of L, but takes H as constant
        if asks_gradient and not self.structure.hessian.requires_grad:
            return self._expanded_logdet()
        return 2 * self._cholesky().diagonal().log().sum()

    def _expanded_logdet(self) -> Tensor:
        """Return `logdet` as a Taylor series whose first two derivatives are exact.

        For ``C = P⁻¹``, the gradient with respect to ``δ`` is ``diag C``, and the
        Hessian is ``-C²`` entry by entry. Multiplying both ``δ`` and ``scale`` by a
        factor multiplies ``P`` by this factor. A change in ``scale`` is therefore such
        a factor and an opposite change in ``δ``.
        """
        lower = self._cholesky().detach()
        cov = torch.cholesky_inverse(lower)
        # one and zero, with derivatives; the value is that of the detached log det P
        factor = self.scale / self.scale.detach()
        step = self.delta / factor - self.delta.detach()
        value = 2 * lower.diagonal().log().sum() + len(step) * factor.log()
        return value + step @ (cov.diagonal() - cov**2 @ step / 2)

    def solve(self, vector: Tensor) -> Tensor:
        """Return ``F Fᵀ v``, (P,)."""
        return self._root @ (self._root.T @ vector)

    def variance(self) -> Tensor:
        """Return the diagonal of ``F Fᵀ``, (P,)."""
        return (self._root**2).sum(1)

    def effective_dimension(self) -> Tensor:
        """Return ``γ = P - δ tr P⁻¹`` under a scalar prior, ()."""
        variances = self.variance()
        return len(variances) - self.prior_precision * variances.sum()

    def sample(self, noise: Tensor) -> Tensor:
        """Return ``F ε``, or ``P^(-1/2) ε`` under a scalar prior, (s, P)."""
        eigen = self.in_eigenbasis
        return noise @ self._root.T if eigen is None else eigen.sample(noise)

    def whiten(self, jacobian: Jacobian) -> Tensor:
        """Return ``J F``, (b, c, P)."""
        return jacobian.double().matmul(self._root)

    def _narrow_whiten(self, jacobian: Jacobian) -> Tensor:
        """Return ``J F`` with ``F Fᵀ = P⁻¹``, (b, c, P).

        The dtype is that of ``J`` if products in this dtype are precise enough and do
        not overflow, and float64 otherwise.
        """
        if jacobian.dtype != torch.float64 and self._condition <= MAX_FLOAT32_CONDITION:
            rows = jacobian.matmul(self._narrow_root(jacobian.dtype))
            if all_finite(rows):  # no overflow
                return rows
        return self.whiten(jacobian)

    def functional_covariance(self, jacobian: Jacobian) -> Tensor:
        """Return ``(J F)(J F)ᵀ``, (b, c, c), with ``F Fᵀ = P⁻¹``.

        In a float32 last layer, all samples share the output gradients. Covariances are
        then quadratic forms of the inputs, which are faster. They lose more digits, so
        ``P`` must be well conditioned.
        """
        # a last layer in single precision
        is_single = jacobian.samples_share_gradients and jacobian.dtype == torch.float32
        if is_single and self._condition <= MAX_FORM_CONDITION:
            n = jacobian.n_columns
            # of all pairs of outputs, (b, n(n + 1)/2), put into symmetric matrices
            forms = self._quadratic_forms(jacobian, slice(None))
            return forms[:, _triangle_indices(n, forms)].unflatten(1, (n, n))
        rows = self._narrow_whiten(jacobian)
        return (rows @ rows.mT).double()

    def covariance_of_rows(self, rows: Tensor) -> Tensor:
        """Return ``(J F)(J F)ᵀ`` of a dense ``J``, (b, c, c)."""
        whitened = rows @ self._root
        return whitened @ whitened.mT

    def functional_variance(self, jacobian: Jacobian) -> Tensor:
        """Return the diagonal of ``(J F)(J F)ᵀ``, (b, c), with ``F Fᵀ = P⁻¹``.

        If all samples share the output gradients, the variances are quadratic forms of
        the inputs.
        """
        if not jacobian.samples_share_gradients:
            rows = self._narrow_whiten(jacobian)
            return (rows * rows).sum(-1).double()
        # positions 0, 2, 5, ... of the pairs of an output with itself, in the lower
        # triangle counted row by row
        diagonal = torch.arange(1, jacobian.n_columns + 1).cumsum(0) - 1
        # sums may cancel to negative rounding errors
        return self._quadratic_forms(jacobian, diagonal).clamp(min=0)

    def _quadratic_forms(self, jacobian: Jacobian, pairs: slice | Tensor) -> Tensor:
        """Return covariances ``aᵀ C a`` of n pairs of outputs for each sample, (b, n).

        ``a`` (i,) are a sample's inputs of the last layer, whose output gradients all
        samples share. ``C`` (i, i) belongs to a pair of outputs; see
        `_input_covariances`. ``pairs`` selects some of the pairs. Samples are processed
        in chunks, whose products stay in the caches.
        """
        covariances = self._input_covariances(jacobian.layers[0].first.g)[:, pairs]
        # one product for all pairs: (b, i) @ (i, n·i)
        joined, shape = covariances.flatten(1), covariances.shape[1:]
        chunks = jacobian.features().double().split(SAMPLES_PER_CHUNK)
        # (b, n, i) for each chunk: the entries of C a times those of a
        terms = ((a @ joined).unflatten(1, shape).mul_(a[:, None]) for a in chunks)
        return torch.cat([terms_of_chunk.sum(-1) for terms_of_chunk in terms])

    @base.cache_last_call
    def _input_covariances(self, g: Tensor) -> Tensor:
        """Return the matrices ``C`` of all pairs of outputs, (i, k(k + 1)/2, i).

        With inputs ``a``, output k of the network is ``Σₒᵢ gₖₒ Wₒᵢ aᵢ``. The matrix of
        two outputs contains the covariances of their coefficients ``Σₒ gₖₒ Wₒᵢ``, so
        ``aᵀ C a`` is the covariance of the outputs. All samples share ``g``, and each
        pair of outputs occurs once. With these matrices, a sample takes i² operations
        per pair, or P²/2 for all pairs.
        """
        outputs = g.double().reshape(g.shape[1], -1)  # (k, o)
        # root of P⁻¹, split into weight and any bias; roots (o, i, P) and (o, 1, P)
        by_tensor = self._root.split(self.structure.layout.sizes)
        roots = [root.unflatten(0, (len(outputs.T), -1)) for root in by_tensor]
        coefficients = [torch.einsum("ko,oip->kip", outputs, root) for root in roots]
        rows = torch.cat(coefficients, 1)  # (k, i or i + 1, P)
        products = gram(rows.flatten(0, 1).T).reshape(*rows.shape[:2], *rows.shape[:2])
        # products (k, i, k, i): covariances of all coefficients of all outputs
        k, other = torch.tril_indices(len(rows), len(rows), device=rows.device)
        return products[k, :, other].transpose(0, 1).contiguous()


class FullAccumulator(base.Accumulator):
    """Sum of ``(SᵀJ)ᵀ SᵀJ``, block by block.

    The rows ``SᵀJ`` are stored until there are too many of them for the dual form.
    """

    takes_matrices = True

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        self.hessian: Tensor | None = None  # updated in place, lower triangle only
        self.jacobians: list[Jacobian] = []
        self.is_semidefinite = True

    @classmethod
    def n_bytes(cls, layout: Layout, n_rows: int | None = None, **_: object) -> int:
        """Return the bytes of ``H`` and four temporary matrices, or of the dual form.

        The dual form is used for few rows. It stores the matrix ``R`` of rows, scaled
        and solved copies of ``R``, and ``R Rᵀ``.
        """
        p = layout.n_parameters
        if n_rows is not None and n_rows < MAX_ROWS_PER_PARAMETER * p:
            return 4 * 8 * n_rows * (p + n_rows)  # at most four of each, float64
        return 5 * 8 * p**2

    @classmethod
    def row_elements(cls, layout: Layout, n_columns: int, **_: object) -> int:
        """Count the numbers in two copies of a sample's dense rows, or in its products.

        Products are ``g gᵀ`` (o, o) of the output gradients and ``a aᵀ`` (i, i) of the
        inputs, which need more memory in wide layers. Rows of a last layer are never
        made dense, so only its products count.
        """
        shapes = [block.factor_shape for block in layout.blocks]
        n_products = max(o for o, _ in shapes) ** 2 + max(i for _, i in shapes) ** 2
        if layout.head is not None:
            return n_products
        return max(2 * n_columns * layout.n_parameters, n_products)

    def update(self, jacobian: Jacobian) -> None:
        """Add the products of one batch."""
        self.jacobians.append(jacobian)
        self._sum_rows_if_many()

    def add_matrix(self, hessian: Tensor, *, is_semidefinite: bool = False) -> None:
        """Add a symmetric matrix (P, P)."""
        self.is_semidefinite &= is_semidefinite
        self._stored_sum(hessian.device).add_(hessian)

    def merge(self, other: Self) -> None:
        """Add the sum ``H`` and the not yet summed rows of another accumulator."""
        self.is_semidefinite &= other.is_semidefinite
        self.jacobians += other.jacobians
        if other.hessian is not None:
            self._stored_sum(other.hessian.device).add_(other.hessian)  # in place
        self._sum_rows_if_many()

    def decompose(self) -> base.Structure:
        """Return ``H``, or its root if the root has few rows; neither is factorised.

        The sum does not exist as long as there are few rows. These are then the root.
        """
        if self.hessian is None:
            dense = [jacobian.dense().flatten(0, 1) for jacobian in self.jacobians]
            rows = torch.cat(dense)
            return Dual(self.layout, DenseRoot(self.layout, rows.double()))
        hessian = self.hessian.tril() + self.hessian.tril(-1).T
        # indefinite summands may have a semidefinite sum
        return Full(self.layout, hessian, self.is_semidefinite or _is_psd(hessian))

    def _stored_sum(self, device: torch.device) -> Tensor:
        """Return the stored float64 sum (P, P), to be updated in place.

        It is created with zeros before the first addition.
        """
        if self.hessian is None:
            size = self.layout.n_parameters, self.layout.n_parameters
            self.hessian = torch.zeros(size, dtype=torch.float64, device=device)
        return self.hessian

    def _sum_rows_if_many(self) -> None:
        """Add products of the stored rows to the sum, once these need less memory.

        The rows are then dropped. From then on, each batch is added to the sum at once.
        """
        n_rows = sum(rows.n_samples * rows.n_columns for rows in self.jacobians)
        fraction = n_rows / self.layout.n_parameters
        if self.hessian is None and fraction < MAX_ROWS_PER_PARAMETER:
            return
        for jacobian in self.jacobians:
            # rounding of float32 products would make eigenvalues negative
            tensors = jacobian.double().tensors()
            strips = self._stored_sum(jacobian.device).split(self.layout.sizes)
            for i, (left, strip) in enumerate(zip(tensors, strips, strict=True)):
                # only the lower triangle of H is stored
                blocks = strip.split(self.layout.sizes, 1)[: i + 1]
                for right, block in zip(tensors[: i + 1], blocks, strict=True):
                    _add_products(block, left, right)
        self.jacobians = []


def _is_psd(hessian: Tensor) -> bool:
    """Return whether rounding can explain all negative eigenvalues."""
    eigenvalues = torch.linalg.eigvalsh(hessian)
    return bool(eigenvalues[0] >= -MAX_NEGATIVE_EIGENVALUE * eigenvalues[-1].abs())


def _add_products(total: Tensor, left: BaseBlock, right: BaseBlock) -> None:
    """Add ``Σ leftᵀ right`` (p, p') to ``total``, for rows of two parameter tensors.

    The sum is over samples and columns of ``S``, for rows ``SᵀJ``. For layers with one
    position, the products are summed over the k columns first: ``(Σₖ g gᵀ) ⊗ (a aᵀ)``
    then takes 2·b·p·p' operations instead of 2·b·k·p·p'. For the product of rows with
    themselves, only the lower triangle is added, which halves the number of operations.
    """
    products = left.outer_products(right)
    if products is None:
        rows, columns = (block.dense().flatten(0, 1) for block in (left, right))
        total.addmm_(rows.T, columns)
        return
    # one strip of rows (i, p') for each output o of the left tensor
    for o, strip in enumerate(total.split(products.left.shape[1])):
        n_outputs = o + 1 if left is right else None
        gradients = products.outputs[:, o, :n_outputs]  # (b, o')
        columns = (gradients.unsqueeze(2) * products.right.unsqueeze(1)).flatten(1)
        strip[:, : columns.shape[1]].addmm_(products.left.T, columns)


def _triangle_indices(n: int, like: Tensor) -> Tensor:
    """Return the lower-triangle index of each entry of an (n, n) matrix, (n²,)."""
    index = torch.arange(n, device=like.device)
    low, high = index.minimum(index[:, None]), index.maximum(index[:, None])
    return (high * (high + 1) // 2 + low).flatten()
