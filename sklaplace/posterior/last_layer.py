"""LastLayerModel: a linear model in the last layer's weights.

If the network's outputs are an affine map of the last layer's outputs, the
linearisation ``f(θ) = f* + J (θ - θ*)`` is exact. ``J`` then depends only on the
features, which are the inputs of the last layer.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from sklaplace.core.budget import BUDGET, batch_rows
from sklaplace.core.linalg import symmetric_eigh
from sklaplace.core.parallel import cached_property
from sklaplace.curvature.accumulation import ObservedRows
from sklaplace.curvature.ggn import GGN, Curvature
from sklaplace.curvature.jacobian import Jacobian, head_inputs
from sklaplace.curvature.layout import Layout
from sklaplace.curvature.rows import HeadBlock, LayerRows
from sklaplace.curvature.shared import IdentityMap
from sklaplace.curvature.structures import Accumulator, Structure
from sklaplace.curvature.structures.kron import (
    MAX_DENSE_WIDTH,
    Factor,
    Kron,
    KronAccumulator,
    KronLayer,
    Moment,
)
from sklaplace.curvature.structures.root import lower_inverse
from sklaplace.likelihoods.output_hessian import OutputHessian
from sklaplace.posterior.gaussian import GaussianPosterior
from sklaplace.posterior.linear_model import LabelledOutputs, LinearModel, Operator

# Number of evenly spaced samples per feature for each block of the preconditioner. More
# samples take longer and save hardly any iterations.
SAMPLES_PER_INPUT = 8


@dataclass(frozen=True)
class LastLayerModel(LinearModel):
    """Linear model of the last layer, on the features of the training data.

    Attributes
    ----------
    features : Tensor of shape (N, i)
        Inputs of the last layer, float64.
    head_map : Tensor of shape (c, o), or IdentityMap
        Jacobian of the network's outputs with respect to the last layer's outputs. All
        samples have the same Jacobian.
    """

    features: Tensor
    head_map: Tensor | IdentityMap

    @property
    def _has_bias(self) -> bool:
        return len(self.layout.blocks) > 1

    @cached_property
    def _map(self) -> Tensor | None:
        """``head_map``, or None for the identity."""
        m = self.head_map
        if isinstance(m, IdentityMap):
            return None
        return None if torch.equal(m, torch.eye(*m.shape).to(m)) else m

    @cached_property
    def _in_own_dtype(self) -> "LastLayerModel":
        """Copy of the model in the network's dtype."""
        names = "features", "head_map", "sample_weight"
        return replace(self, **{k: getattr(self, k).to(self.dtype) for k in names})

    def products(self, dtype: torch.dtype) -> tuple[Operator, Operator]:
        """Return ``v -> J v`` and ``u -> Jᵀ u``, computed from the features."""
        model = self if dtype == torch.float64 else self._in_own_dtype
        return model.forward, model.backward

    def forward(self, direction: Tensor) -> Tensor:
        """Return ``J direction``, (N, c)."""
        hidden = self._layer_outputs(direction)
        return hidden if self._map is None else hidden @ self._map.T

    def _layer_outputs(self, direction: Tensor) -> Tensor:
        """Return the layer's outputs (N, o) with the weights ``direction``."""
        weight, *bias = self.layout.split(direction)
        # o x N is faster than N x o, because there are few outputs and many samples
        hidden = (weight.reshape(-1, self.features.shape[1]) @ self.features.T).T
        return hidden + bias[0] if bias else hidden

    def backward(self, cotangent: Tensor) -> Tensor:
        """Return ``Jᵀ cotangent`` (P,) for a cotangent (N, c)."""
        return self._weight_gradients(
            cotangent if self._map is None else cotangent @ self._map
        )

    def _weight_gradients(self, hidden: Tensor) -> Tensor:
        """Backpropagate gradients (N, o) from the layer's outputs to weights (P,)."""
        weight = (hidden.T @ self.features).flatten()
        return torch.cat([weight, hidden.sum(0)]) if self._has_bias else weight

    def jacobians_at(
        self, f: Tensor, curvature: Curvature, accumulator: Accumulator
    ) -> Iterator[Jacobian]:
        """Yield Jacobian rows from features and the loss Hessian at outputs ``f``.

        Each batch has as many samples as the accumulator can process in the budget of
        memory. The rows ``SᵀJ``, for the loss Hessian ``S Sᵀ``, are stored as the
        Hessian, the features and the map from the layer's to the network's outputs.
        """
        # float64 numbers per sample
        elements = accumulator.row_elements(self.layout, f.shape[1])
        n_rows = batch_rows(8 * (elements + self.features.shape[1]))
        for start in range(0, len(f), n_rows):
            rows = slice(start, start + n_rows)
            targets, weights = self.targets[rows], self.sample_weight[rows]
            keys = self.keys[rows]
            hessian = curvature(self.likelihood, f[rows], targets, weights, keys)
            inputs = head_inputs(self.layout, self.features[rows])
            layer = LayerRows(tuple(HeadBlock(hessian, self._map, a) for a in inputs))
            yield Jacobian([layer], weights, keys=keys)

    @cached_property
    def _input_factors(self) -> tuple[tuple[Factor, Tensor], ...]:
        """Kronecker factor of each tensor's inputs, and the number of averaged samples.

        The tensors are the weight and any bias. The factors do not depend on the
        weights, so they are computed only once.
        """
        weights, device = self.sample_weight, self.features.device
        inputs = head_inputs(self.layout, self.features)
        moments = [Moment.of_inputs(a, weights, device) for a in inputs]
        return tuple((moment.mean(), moment.n) for moment in moments)

    def _kron(self, f: Tensor, curvature: Curvature) -> Kron:
        """Return the Kronecker-factored curvature at outputs ``f``.

        Only the factor of the layer's outputs depends on ``f``.
        """
        hessian = curvature(
            self.likelihood, f, self.targets, self.sample_weight, self.keys
        )
        outputs = Moment.of_outputs(HeadBlock(hessian, self._map)).factor()
        inputs, counts = zip(*self._input_factors, strict=True)
        return Kron(self.layout, (KronLayer(outputs, inputs, counts),))

    def structure_at(self, f: Tensor) -> Structure:
        """Return the curvature at outputs ``f``, reusing factors of the inputs."""
        if isinstance(self.accumulator(self.layout), KronAccumulator):
            return self._kron(f, self.curvature)
        return super().structure_at(f)

    # ------------------------------------------------------------- preconditioners
    # Operators on rows act on weights (o, i): one row per output, with the bias last.
    def preconditioner_at(self, f: Tensor, rho: Tensor, dtype: torch.dtype) -> Operator:
        """Return ``v -> M⁻¹ v``, where ``M ≈ H + diag ρ`` has one block per output.

        The curvatures of outputs differ by orders of magnitude if some classes are
        better separated than others. Prior precisions may differ just as widely. Blocks
        that are too large are replaced by their dual form with inner products of
        samples, if there are fewer samples than features. The last resort is a
        Kronecker product, which needs less memory but cannot represent the differences.
        """
        blocks = self._blockwise(f, rho, dtype)
        if blocks is not None:
            return self._on_vectors(blocks, rho, dtype)
        n, i = self.features.shape
        # the dual form is smaller for fewer samples than features, but may be too large
        dual = self._dual_blockwise(f, rho) if n < i else None
        operator = self._kron_operator(f, rho, dtype) if dual is None else dual

        def solve(rows: Tensor) -> Tensor:  # the operator on (o, i) instead of (P,)
            return self.by_output(operator(self.from_outputs(rows)))

        return self._on_vectors(solve, rho, dtype)

    def _kron_operator(self, f: Tensor, rho: Tensor, dtype: torch.dtype) -> Operator:
        """Return the inverse of a Kronecker-factored ``H`` plus the mean of ``ρ``."""
        kron = self._kron(f, GGN)
        eigenvalues = (kron.eigenvalues + rho.mean()).to(dtype)
        return lambda v: kron.from_basis(kron.to_basis(v) / eigenvalues)

    def quick_preconditioner_at(
        self, f: Tensor, rho: Tensor, dtype: torch.dtype
    ) -> Operator | None:
        """Return ``v -> M⁻¹ v``, where ``M`` is diagonal in the inputs' eigenbasis.

        In this basis, ``M`` is the diagonal of ``H + ρ`` (EKFAC: George et al. 2018,
        "Fast approximate natural gradient descent in a Kronecker-factored eigenbasis").
        All weights must have the same precision ``ρ``. The basis is computed once. The
        diagonal is computed as a matrix product over a subsample. The result is None if
        precisions differ, if there are fewer samples than features, or if the subsample
        is too large.
        """
        n, i = self.features.shape
        low, high = rho.aminmax()
        # the subsample has SAMPLES_PER_INPUT times as many samples as inputs
        is_small = _fit_budget(SAMPLES_PER_INPUT, i + self._has_bias)
        if n < i or low != high or not is_small:
            return None
        basis, squares = self._input_eigenbasis
        curvatures = self._layer_curvatures(f, self._stride).to(squares)
        ratio = n / len(squares)  # from the subsample to all samples
        diagonal = ((curvatures.T @ squares).double() * ratio + low).to(dtype)
        basis = basis.to(dtype)
        return self._on_vectors(
            lambda rows: (rows @ basis / diagonal) @ basis.T, rho, dtype
        )

    def _on_vectors(self, solve: Operator, rho: Tensor, dtype: torch.dtype) -> Operator:
        """Convert an approximate inverse on rows (o, i) to one on weights (P,)."""
        on_rows = self._exact_on_class_means(solve, rho, dtype)
        return lambda v: self.from_outputs(on_rows(self.by_output(v)))

    def _exact_on_class_means(
        self, solve: Operator, rho: Tensor, dtype: torch.dtype
    ) -> Operator:
        """Divide means over classes by the prior precision, and solve for deviations.

        ``solve`` approximates ``(H + diag ρ)⁻¹`` on weights (o, i), one row per output
        of the layer. A softmax ignores a constant that is added to all logits, so ``H``
        is zero in directions that change the weights of all classes equally. With one
        preconditioner block per output, each direction in which ``H`` is zero would
        require one iteration. If all classes have the same prior precisions, means and
        deviations do not mix. Otherwise, or without a softmax, ``solve`` is returned
        unchanged.
        """
        if self._map is not None or not self.likelihood.is_shift_invariant:
            return solve
        groups = self.likelihood.n_blocks, -1
        # (blocks, classes, i): each block of classes has its own softmax
        precisions = self.by_output(rho).unflatten(0, groups)
        common = precisions[:, :1].to(dtype)
        # a prior below the rounding errors of the gradient has no effect
        is_lost = common.min() < torch.finfo(dtype).eps * self._largest_curvature
        if is_lost or not (precisions == precisions[:, :1]).all():
            return solve

        def separated(rows: Tensor) -> Tensor:
            grouped = rows.unflatten(0, groups)
            means = grouped.mean(1, keepdim=True)
            solved = solve((grouped - means).flatten(0, 1)).unflatten(0, groups)
            # also remove the means that `solve` adds to the deviations
            means = means / common - solved.mean(1, keepdim=True)
            return (solved + means).flatten(0, 1)

        return separated

    @cached_property
    def _largest_curvature(self) -> float:
        """Curvature of the loss along one weight, for two equally probable classes."""
        return float(self.sample_weight @ self.features.square().mean(1)) / 4

    @property
    def _stride(self) -> int:
        """Stride between the samples used for preconditioners."""
        n, i = self.features.shape
        return max(1, n // (SAMPLES_PER_INPUT * (i + self._has_bias)))

    def _inputs_of_subsample(self, dtype: torch.dtype) -> Tensor:
        """Return inputs (n, i) of evenly spaced samples, with a column for any bias."""
        subsample = self.features[:: self._stride].to(dtype)
        return pad(subsample, (0, int(self._has_bias)), value=1.0)

    @cached_property
    def _input_eigenbasis(self) -> tuple[Tensor, Tensor]:
        """Eigenbasis (i, i) of the inputs, and squared inputs (n, i) in this basis."""
        inputs = self._inputs_of_subsample(self.dtype)
        basis = symmetric_eigh(inputs.T @ inputs)[1].to(inputs)
        return basis, (inputs @ basis) ** 2

    def _layer_curvatures(self, f: Tensor, stride: int = 1) -> Tensor:
        """Return the loss curvature (n, o) in the layer's outputs, for some samples."""
        targets, weights = self.targets[::stride], self.sample_weight[::stride]
        hessian = GGN(self.likelihood, f[::stride], targets, weights)
        return hessian.diagonals(self._map)

    def _blockwise(self, f: Tensor, rho: Tensor, dtype: torch.dtype) -> Operator | None:
        """Return the inverse of the diagonal blocks of ``H + diag ρ``, one per output.

        The blocks are computed on a subsample, and the inverse acts on weights (o, i).
        The block of an output is ``Σ λ a aᵀ + diag ρ``, with the inputs ``a`` (i,) of
        each sample and the curvature ``λ`` of its loss in the output. Return None if
        the blocks are too large, or singular due to rounding. The computation takes
        O(o·i³) time and memory for o·i² numbers.
        """
        curvatures = self._layer_curvatures(f, self._stride)
        (n, i), o = self.features.shape, curvatures.shape[1]
        i += self._has_bias  # one more input
        if not _fit_budget(o, i):
            return None
        inputs = self._inputs_of_subsample(dtype)
        # the subsample represents all n samples
        scaled = curvatures.to(inputs) * (n / len(inputs))
        # Xᵀ Λ X of each output, (i, i), for its curvatures (n, 1) of the samples
        grams = [inputs.T @ (inputs * column) for column in scaled.T.unsqueeze(2)]
        blocks = torch.stack(grams).double()
        blocks.diagonal(dim1=1, dim2=2).add_(self.by_output(rho))
        lower, failed = torch.linalg.cholesky_ex(blocks)
        if failed.any():
            return None
        inverses = torch.cholesky_inverse(lower).to(dtype)
        # a row times a symmetric matrix is faster than the matrix times a column
        return lambda rows: (rows.unsqueeze(1) @ inverses).squeeze(1)

    def _dual_blockwise(self, f: Tensor, rho: Tensor) -> Operator | None:
        """Return the inverse of the blocks of all outputs, by Woodbury's identity.

        The blocks are computed on all samples, and the inverse acts on weights (P,).
        The block of an output is ``Xᵀ S² X + D``, with inputs ``X`` (N, i), roots ``S``
        of the samples' curvatures in this output, and ``D = diag ρ``. Its inverse is
        ``D⁻¹ - D⁻¹ Xᵀ S (I + S X D⁻¹ Xᵀ S)⁻¹ S X D⁻¹``, so that only matrices (N, N)
        are factorised. Return None if they are too large, or singular due to rounding.
        The computation takes O(o·N²·(N + i)) time and memory for o·N² numbers.
        """
        roots = self._layer_curvatures(f).sqrt()
        n, o = roots.shape
        i = self.features.shape[1]
        if not _fit_budget(o, n):
            return None
        grams: list[Tensor] = []
        precisions = self.by_output(rho)
        for k, row in enumerate(precisions):
            # adjacent outputs with equal precisions share X D⁻¹ Xᵀ
            if k == 0 or not torch.equal(row, precisions[k - 1]):
                products = (self.features / row[:i]) @ self.features.T
                products += (1 / row[i:]).sum()  # for any bias
            grams.append(products)
        # I + S X D⁻¹ Xᵀ S of each output, (o, N, N)
        blocks = torch.stack(grams).mul_(roots.T.unsqueeze(1))
        blocks.mul_(roots.T.unsqueeze(2))
        blocks.diagonal(dim1=1, dim2=2).add_(1)
        lower, failed = torch.linalg.cholesky_ex(blocks)
        if failed.any():
            return None
        # under a weak prior, the inverse factor is more precise than the inverse
        inverses = lower_inverse(lower)

        def apply(v: Tensor) -> Tensor:
            # rho is in float64, and so is all that follows: the difference below would
            # be a rounding error in float32, in which v may be
            scaled = v / rho
            # S (L Lᵀ)⁻¹ S X D⁻¹ v, as (N, o)
            columns = inverses @ (self._layer_outputs(scaled) * roots).T.unsqueeze(2)
            hidden = (inverses.mT @ columns).squeeze(2).T * roots
            return (scaled - self._weight_gradients(hidden) / rho).to(v.dtype)

        return apply

    def by_output(self, v: Tensor) -> Tensor:
        """Arrange weights (P,) in rows (o, i), one per output, with any bias last."""
        weight, *bias = self.layout.split(v)
        weight = weight.reshape(self.layout.blocks[0].factor_shape)
        return torch.cat([weight, bias[0].unsqueeze(1)], 1) if bias else weight

    def from_outputs(self, rows: Tensor) -> Tensor:
        """Invert `by_output`: return weights (P,)."""
        pieces = [rows[:, :-1].flatten(), rows[:, -1]]
        return torch.cat(pieces) if self._has_bias else rows.flatten()


def refit_bytes(layout: Layout, n_rows: int, n_outputs: int) -> int:
    """Return the number of bytes needed to refit a last layer on ``n_rows`` samples."""
    i = layout.blocks[0].factor_shape[1]
    # inputs in float64 and in the network's dtype, of at most eight bytes; outputs,
    # gradients and intermediate results of a step, about six float64 arrays (n, c)
    per_row = 16 * i + 6 * 8 * n_outputs
    # few samples need no matrix (i, i), but inner products of samples
    is_dual = n_rows < i and _fit_budget(n_outputs, n_rows)
    # (i, i): a factor, its eigenvectors and the workspace to compute them, unless the
    # factor is diagonal
    width = 0 if is_dual or i > MAX_DENSE_WIDTH else i
    # weights, gradient, direction and its product with the curvature
    return per_row * n_rows + 3 * 8 * width**2 + 4 * 8 * layout.n_parameters


def _fit_budget(n_blocks: int, size: int) -> bool:
    """Return whether matrices, their factors and inverses fit in the memory budget."""
    return 3 * 8 * n_blocks * size**2 <= BUDGET


class LastLayerRecorder:
    """Recorder of data for a `LastLayerModel` during curvature accumulation.

    Parameters
    ----------
    head_map : Tensor of shape (c, o), IdentityMap or None
        Jacobian of the network's outputs with respect to the last layer's outputs, if
        the Jacobians of a few samples are equal; otherwise None. Recording stops at the
        first sample with a different Jacobian.
    """

    def __init__(self, head_map: Tensor | IdentityMap | None) -> None:
        self.head_map = head_map
        self.features: list[Tensor] = []
        self.outputs: list[LabelledOutputs] = []

    @property
    def is_linear(self) -> bool:
        """Whether the outputs are affine in the weights for all recorded samples."""
        return self.head_map is not None and bool(self.outputs)

    def add(self, rows: ObservedRows) -> None:
        """Record the samples of a batch, unless their rows contradict ``head_map``.

        ``head_map`` is the Jacobian of the network's outputs with respect to the last
        layer's outputs, assumed to be the same for all samples. If the rows of a sample
        show another Jacobian, no linear model exists. All samples are then dropped,
        ``head_map`` becomes None, and nothing is recorded any more.

        A batch may come in parts with some columns of the rows each. All parts are
        checked, and the first one is recorded.
        """
        if self.head_map is None:
            return
        f, jacobian = rows.f, rows.jacobian
        block = jacobian.layers[0].first
        # rows of a `HeadBlock` have been computed with head_map
        if not block.is_from_head and not self._agrees(block.g, rows.hessian, jacobian):
            self._stop()
        elif not jacobian.first_column:  # once per sample, not for every part
            ones = torch.ones(len(f), device=f.device)
            weights = ones if rows.weights is None else rows.weights
            # keys are missing if neither random draws nor points depend on them
            no_keys = torch.zeros(len(f), dtype=torch.long)
            keys = no_keys if rows.keys is None else rows.keys
            self.features.append(block.a.squeeze(1))
            self.outputs.append(LabelledOutputs(f, rows.targets, weights, keys))

    def merge(self, other: "LastLayerRecorder") -> None:
        """Append another recorder's samples; drop all if a recorder has stopped.

        A recorder stops, with ``head_map`` None, if the outputs are not affine in the
        last layer's weights.
        """
        if self.head_map is None or other.head_map is None:
            self._stop()
        else:
            self.features += other.features
            self.outputs += other.outputs

    def _stop(self) -> None:
        """Drop all samples, and record no more."""
        self.head_map, self.features, self.outputs = None, [], []

    def _agrees(self, g: Tensor, hessian: OutputHessian, jacobian: Jacobian) -> bool:
        """Return whether the head map ``M`` explains gradients ``g = SᵀM``.

        ``g`` has the shape (b, k, 1, o). ``S Sᵀ`` is the loss Hessian in the outputs.
        Only ``g v = Sᵀ (M v)`` is checked, for one vector ``v`` (o,). This costs 1/c as
        much as checking all entries. The batch may have only k of the columns of ``S``.
        """
        m = self.head_map
        assert m is not None
        # not constant: the Hessian of a softmax maps constants to zero
        v = torch.linspace(1, 2, m.shape[1], device=g.device).double()
        columns = hessian.factor().double()[..., jacobian.first_column :]
        mapped = v if isinstance(m, IdentityMap) else m @ v.to(m)
        expected = columns[..., : jacobian.n_columns].mT @ mapped
        difference = g.squeeze(2).double() @ v - expected
        # far above rounding errors of float32, and far below other Jacobians
        return bool(difference.abs().max() <= 1e-4 * expected.abs().max())

    def build(
        self,
        template: GaussianPosterior,
        curvature: Curvature,
        accumulator: Callable[[Layout], Accumulator],
    ) -> LastLayerModel | None:
        """Build the linear model, or return None if the outputs are not affine.

        ``template`` is the posterior with the model's layout, weights and likelihood.
        """
        if not self.is_linear:
            return None
        features = torch.cat(self.features).double()
        fields = {"features": features, "head_map": self.head_map}
        model = LastLayerModel.of_batches(
            template, self.outputs, curvature, accumulator, **fields
        )
        # by column, as `_layer_outputs` returns them; mixed layouts are slow
        return replace(model, outputs=model.outputs.mT.contiguous().mT)
