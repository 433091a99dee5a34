"""Blocks: rows of the Jacobian that belong to one parameter tensor, unmultiplied.

For a parameter tensor of a Linear or convolution layer they are ``Σᵣ g ⊗ a``: layer
inputs ``a`` (b, r, i) times gradients ``g`` (b, k, r, o) of the outputs in what the
layer puts out. Whoever asks gets sums and products of rows without the rows.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from sklaplace.core.linalg import gram
from sklaplace.curvature.patches import Inputs, Patches, mean_input, unfolded
from sklaplace.likelihoods.output_hessian import OutputHessian

# elements of a temporary array that is allowed without cutting it into rows
CHUNK_ELEMENTS = 2**22
# the same where the array is read once more at once: it should stay in the caches
DENSE_ELEMENTS = 2**19
# the same where the array is small beside what it is made of
CACHED_ELEMENTS = 2**16


@dataclass(frozen=True)
class Block:
    """Rows of the Jacobian that belong to one parameter tensor.

    Attributes
    ----------
    g : Tensor of shape (b, k, r, o) or (1, k, 1, o)
        Gradients of the k outputs (or combinations of them) at r positions; one
        entry for all rows where they are the same.
    a : Tensor or Patches of shape (b, r, i), or None
        Layer inputs. None stands for ``a ≡ 1``; then r = 1.
    """

    g: Tensor
    a: Inputs | None = None

    def __len__(self) -> int:
        """Rows of the batch; one where all are alike."""
        return len(self.g) if self.a is None else self.a.shape[0]

    @property
    def n_columns(self) -> int:
        """Rows k for each row of the batch."""
        return self.g.shape[1]

    @property
    def n_parameters(self) -> int:
        """Length p of a row."""
        return self.g.shape[-1] * (1 if self.a is None else self.a.shape[-1])

    @property
    def _inputs(self) -> Tensor:
        """Layer inputs written out, (b, r, i); ones for a bias."""
        if self.a is None:
            return self.g.new_ones(len(self.g), 1, 1)
        return unfolded(self.a)

    @property
    def _has_one_position(self) -> bool:
        return self.a is None or self.a.shape[1] == 1

    def dense(self) -> Tensor:
        """Rows written out, (b, k, p)."""
        if self.a is None:
            return self.g.squeeze(2)
        k, o = self.g.shape[1], self.g.shape[-1]
        outputs = self.g.movedim(2, -1).flatten(1, 2)  # (b, k·o, r)
        summed = (
            self.a.contracted(outputs)
            if isinstance(self.a, Patches)
            else outputs @ self.a
        )
        rows: Tensor = summed.unflatten(1, (k, o)).flatten(2)
        return rows

    def double(self) -> "Block":
        """The same in float64."""
        return Block(self.g.double(), None if self.a is None else self.a.double())

    def reduced(self) -> "Block":
        """One position for all: the sum of ``g``, and the mean of ``a``."""
        if self._has_one_position:
            return self
        assert self.a is not None
        return Block(self.g.sum(2, keepdim=True), mean_input(self.a))

    def _pieces(self) -> Iterator[Tensor]:
        """Dense rows in groups that are small enough for fast memory."""
        assert self.a is not None
        b, k = len(self), self.n_columns
        n_rows = max(1, DENSE_ELEMENTS // max(1, k * self.n_parameters))
        for start in range(0, b, n_rows):
            rows = slice(start, start + n_rows)
            g = self.g if len(self.g) == 1 else self.g[rows]
            yield Block(g, self.a[rows]).dense()

    # -------------------------------------------------------- asked when fitting
    @property
    def n_outputs(self) -> int:
        """Outputs o of the layer, or p where there are no inputs."""
        return self.g.shape[-1]

    @property
    def outputs(self) -> Tensor:
        """What the moment of the outputs is made of: blocks may share it."""
        return self.g

    def squares(self) -> Tensor:
        """Sum of squared rows over b and k, (p,), float64."""
        if not self._has_one_position:
            return torch.stack(
                [(piece**2).sum((0, 1)).double() for piece in self._pieces()]
            ).sum(0)
        weights = (self.g.squeeze(2) ** 2).sum(1)  # (b, o)
        return (weights.T @ self._inputs.squeeze(1) ** 2).flatten().double()

    def output_moment(self) -> Tensor:
        """``Σ g gᵀ`` over rows, columns and positions, (o, o)."""
        return gram(self.g.flatten(0, 2))

    def output_squares(self) -> Tensor:
        """Its diagonal, (o,)."""
        return (self.g**2).sum((0, 1, 2))

    def grams(self, other: "Block") -> tuple[Tensor, Tensor, Tensor] | None:
        """``Σₖ g gᵀ`` (b, o, o') with another block, and both layers' inputs (b, i).

        None where there are several positions, so that rows are no such products.
        """
        if not (self._has_one_position and other._has_one_position):
            return None
        outputs = self.g.squeeze(2).mT @ other.g.squeeze(2)
        return outputs, self._inputs.squeeze(1), other._inputs.squeeze(1)

    # ------------------------------------------------------ asked when predicting
    def gram(self, v: Tensor) -> Tensor:
        """``rows · diag(v) · rowsᵀ`` for ``v`` (p,), as (b, k, k)."""
        if self._has_one_position:
            return weighted_gram(self.g, self._weigh_outputs(v))
        return torch.cat([(piece * v) @ piece.mT for piece in self._pieces()])

    def variance(self, v: Tensor) -> Tensor:
        """Diagonal of `gram`, (b, k)."""
        if self._has_one_position:
            return _weighted_squares(self.g, self._weigh_outputs(v))
        return torch.cat([(piece * piece) @ v for piece in self._pieces()])

    def _weigh_outputs(self, v: Tensor) -> Tensor:
        """``a² v`` for each output of the layer, (b, o)."""
        matrix = v.reshape(self.g.shape[-1], -1)
        if self.a is None:
            return matrix.T
        return self._inputs.squeeze(1) ** 2 @ matrix.T

    def matmul(self, v: Tensor) -> Tensor:
        """``rows @ v`` for ``v`` (p, q), as (b, k, q)."""
        if self.a is None:
            return self.g.squeeze(2) @ v
        if self.n_columns == 1 or not self._has_one_position:
            return torch.cat([piece @ v for piece in self._pieces()])
        # inputs first: b·p·q operations whatever k, and (b, o, q) in between
        matrices = v.reshape(self.g.shape[-1], -1, v.shape[1])  # (o, i, q)
        g, inputs = self.g.squeeze(2), self._inputs.squeeze(1)
        if v.shape[1] == 1:  # one product in place of o with vectors
            return g @ (inputs @ matrices.squeeze(2).T).unsqueeze(2)
        n_rows = max(1, CHUNK_ELEMENTS // max(1, len(matrices) * v.shape[1]))
        found = []
        for start in range(0, len(inputs), n_rows):
            rows = slice(start, start + n_rows)
            reached = inputs[rows] @ matrices  # (o, b, q)
            found.append((g if len(g) == 1 else g[rows]) @ reached.transpose(0, 1))
        return torch.cat(found)

    def rmatmul(self, w: Tensor) -> Tensor:
        """``Σ rowsᵀ w`` over b and k for ``w`` (b, k, q), as (p, q)."""
        q = w.shape[2]
        if self.a is None:
            g = self.g.squeeze(2).expand(len(w), -1, -1)
            summed: Tensor = g.flatten(0, 1).T @ w.flatten(0, 1)
            return summed
        found = self.g.new_zeros(self.n_parameters, q)
        if not self._has_one_position:
            start = 0
            for piece in self._pieces():
                some = w[start : start + len(piece)]
                found += piece.flatten(0, 1).T @ some.flatten(0, 1)
                start += len(piece)
            return found
        g, inputs = self.g.squeeze(2), self._inputs.squeeze(1)
        n_rows = max(1, CHUNK_ELEMENTS // max(1, g.shape[-1] * q))
        matrix = found.view(g.shape[-1], -1, q)
        for start in range(0, len(inputs), n_rows):
            rows = slice(start, start + n_rows)
            some = g if len(g) == 1 else g[rows]
            reached = some.mT @ w[rows]  # (b, o, q)
            # rows last: one product sums over them
            matrix += (
                (reached.flatten(1).T @ inputs[rows]).unflatten(0, reached.shape[1:]).mT
            )
        return found

    def select(self, indices: Tensor) -> "Block":
        """The rows of some parameters, dense, by their places in a row."""
        indices = indices.to(self.g.device)
        if self.a is None:
            return Block(self.g[..., indices])
        if not self._has_one_position:
            pieces = [piece[..., indices] for piece in self._pieces()]
            return Block(torch.cat(pieces).unsqueeze(2))
        i = self.a.shape[-1]
        outputs = self.g.squeeze(2)[..., indices // i]  # (b, k, p)
        inputs = self._inputs.squeeze(1)[:, indices % i]  # (b, p)
        return Block((outputs * inputs.unsqueeze(1)).unsqueeze(2))

    def products(self, other: "Block") -> Tensor:
        """Products with all rows of another block, (b, k, b', k')."""
        here = self.dense()
        pieces = [other.dense()] if other.a is None else list(other._pieces())
        return torch.cat([torch.tensordot(here, p, ([2], [2])) for p in pieces], 2)

    def input_products(self, other: "Block") -> Tensor:
        """Products of layer inputs with those of another block, (b, b')."""
        return self._inputs.squeeze(1) @ other._inputs.squeeze(1).T

    def rotate(self, outputs: Tensor | None, inputs: Tensor | None) -> "Block":
        """Rows in the basis ``outputs ⊗ inputs``; None leaves a side alone."""
        g = self.g if outputs is None else self.g @ outputs
        if inputs is None or self.a is None:
            return Block(g, self.a)
        if isinstance(self.a, Patches):
            return Block(g, replace(self.a, basis=inputs))
        return Block(g, self.a @ inputs)


def weighted_gram(g: Tensor, per_output: Tensor) -> Tensor:
    """``g · diag(per_output) · gᵀ``, (b, k, k)."""
    g = g.squeeze(2)
    return (g * per_output.unsqueeze(1)) @ g.mT


def _weighted_squares(g: Tensor, per_output: Tensor) -> Tensor:
    """Its diagonal, (b, k)."""
    if len(g) == 1:
        return per_output @ (g**2)[0, :, 0].T
    g = g.squeeze(2)
    # a few rows at a time, so that what is multiplied stays in the caches
    n_rows = max(1, CACHED_ELEMENTS // g[0].numel())
    pairs = zip(
        g.split(n_rows), per_output.expand(len(g), -1).split(n_rows), strict=True
    )
    return torch.cat([(w.unsqueeze(1) * some**2).sum(-1) for some, w in pairs])


def variances(blocks: Iterable[Block], pieces: Iterable[Tensor]) -> Tensor:
    """Sum over blocks of their `Block.variance`, (b, k)."""
    return summed(blocks, pieces, Block.variance, _weighted_squares)


def spread_of_inputs(g: Tensor, v: Tensor) -> Tensor:
    """What squared layer inputs are multiplied by in `Block.variance`, (k, i).

    For gradients ``g`` (1, k, 1, o) that all rows share and ``v`` (o·i,).
    """
    return (g**2)[0, :, 0] @ v.reshape(g.shape[-1], -1)


def variance_of_inputs(a: Inputs | None, spread: Tensor) -> Tensor:
    """`Block.variance` of inputs (b, 1, i), or of a bias, by `spread_of_inputs`."""
    return spread.T if a is None else unfolded(a).squeeze(1) ** 2 @ spread.T


def summed(
    blocks: Iterable[Block],
    pieces: Iterable[Tensor],
    ask: Callable[[Block, Tensor], Tensor],
    weigh: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Sum over blocks of ``ask(block, piece)``.

    Weight and bias of a layer share output gradients: their weights for each
    output, with which ``weigh`` sums products, are added first.
    """
    parts: list[Tensor] = []
    shared: tuple[Tensor, Tensor] | None = None
    for block, piece in zip(blocks, pieces, strict=True):
        if not block._has_one_position:
            parts.append(ask(block, piece))
            continue
        per_output = block._weigh_outputs(piece)
        if shared is not None and shared[0] is block.g:
            shared = block.g, shared[1] + per_output
            continue
        if shared is not None:
            parts.append(weigh(*shared))
        shared = block.g, per_output
    if shared is not None:
        parts.append(weigh(*shared))
    # blocks of a bias may have one entry for all rows
    total: Tensor = sum(parts[1:], parts[0])
    return total


def kernel(
    blocks: Iterable[Block], others: Iterable[Block], factors: Iterable[Tensor]
) -> Tensor:
    """Products of rows with rows (b', k') of the same parameters, (b, k, b', k').

    Those of each block are multiplied by its factor, (). Rows with one position are
    not written out: ``(g · g') (a · a')``, in which weight and bias of a layer share
    the products of output gradients.
    """
    parts: list[Tensor] = []
    shared: tuple[Tensor, Tensor, Tensor] | None = None
    for mine, theirs, factor in zip(blocks, others, factors, strict=True):
        if not (mine._has_one_position and theirs._has_one_position):
            parts.append(mine.products(theirs) * factor)
            continue
        inputs = mine.input_products(theirs) * factor
        if shared is not None and shared[0] is mine.g and shared[1] is theirs.g:
            shared = mine.g, theirs.g, shared[2] + inputs
            continue
        if shared is not None:
            parts.append(_outer(*shared))
        shared = mine.g, theirs.g, inputs
    if shared is not None:
        parts.append(_outer(*shared))
    total: Tensor = sum(parts[1:], parts[0])
    return total


def _outer(g: Tensor, others: Tensor, inputs: Tensor) -> Tensor:
    """``(gₙₖ · g'ₘₗ) inputsₙₘ`` of output gradients with one position."""
    outputs = torch.einsum("nko,mlo->nkml", g.squeeze(2), others.squeeze(2))
    return outputs * inputs[:, None, :, None]


@dataclass(frozen=True)
class HeadBlock:
    """Rows ``SᵀM ⊗ a`` of a last layer, whose ``S`` is not written out.

    Only the questions of fitting have an answer here, in closed form where there is
    one; `Block` has the others.

    Attributes
    ----------
    hessian : OutputHessian
        ``Λ = S Sᵀ`` of each row.
    matrix : Tensor of shape (c, o) or None
        ``M``, gradient of the outputs in what the layer puts out; None: identity.
    a : Tensor of shape (b, 1, i) or None
        Layer inputs. None stands for ``a ≡ 1``.
    """

    hessian: OutputHessian
    matrix: Tensor | None
    a: Tensor | None = None

    def __len__(self) -> int:
        """Rows of the batch."""
        return self.hessian.n_rows

    @property
    def n_columns(self) -> int:
        """Rows k for each row of the batch."""
        return self.hessian.n_columns

    @cached_property
    def g(self) -> Tensor:
        """``SᵀM`` written out, (b, k, 1, o); where there is no other way."""
        return self.hessian.rows(self.matrix).unsqueeze(2)

    @property
    def n_outputs(self) -> int:
        """Outputs o of the layer."""
        return self.hessian.n_outputs if self.matrix is None else self.matrix.shape[1]

    @property
    def n_parameters(self) -> int:
        """Length p of a row."""
        return self.n_outputs * (1 if self.a is None else self.a.shape[-1])

    @property
    def outputs(self) -> OutputHessian:
        """What the moment of the outputs is made of: weight and bias share it."""
        return self.hessian

    @cached_property
    def _diagonals(self) -> Tensor:
        """Diagonal of ``MᵀΛM`` for each row, (b, o)."""
        return self.hessian.diagonals(self.matrix)

    def reduced(self) -> "HeadBlock":
        """What it is: there is one position."""
        return self

    def double(self) -> "HeadBlock":
        """The same in float64."""
        matrix, a = (None if t is None else t.double() for t in (self.matrix, self.a))
        return HeadBlock(self.hessian.double(), matrix, a)

    def dense(self) -> Tensor:
        """Rows written out, (b, k, p)."""
        return Block(self.g, self.a).dense()

    def matmul(self, v: Tensor) -> Tensor:
        """``rows @ v`` for ``v`` (p, q), as (b, k, q)."""
        return Block(self.g, self.a).matmul(v)

    def rmatmul(self, w: Tensor) -> Tensor:
        """``Σ rowsᵀ w`` over b and k for ``w`` (b, k, q), as (p, q)."""
        return Block(self.g, self.a).rmatmul(w)

    def squares(self) -> Tensor:
        """Sum of squared rows over b and k, (p,), float64."""
        weights = self._diagonals
        if self.a is None:
            return weights.double().sum(0)
        return (weights.T @ self.a.squeeze(1) ** 2).flatten().double()

    def output_moment(self) -> Tensor:
        """``Σ MᵀΛM`` over rows, (o, o)."""
        return self.hessian.moment(self.matrix)

    def output_squares(self) -> Tensor:
        """Its diagonal, (o,)."""
        return self._diagonals.sum(0)

    def grams(self, other: "HeadBlock") -> tuple[Tensor, Tensor, Tensor]:
        """``MᵀΛM`` (b, o, o), and inputs (b, i) of this block and of another."""
        outputs = self.hessian.grams(self.matrix)
        here, there = (
            outputs.new_ones(len(outputs), 1) if block.a is None else block.a.squeeze(1)
            for block in (self, other)
        )
        return outputs, here, there
