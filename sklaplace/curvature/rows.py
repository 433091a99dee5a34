"""Jacobian rows of the parameters of one layer, stored as two factors.

For a parameter tensor of a Linear or convolution layer, the rows are ``Σᵣ g ⊗ a``. The
factors are layer inputs ``a`` (b, r, i) and gradients ``g`` (b, k, r, o) of the
network's outputs with respect to the layer's outputs. Sums and products of rows are
computed from the factors. `LayerRows` contains the rows that share ``g``.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from sklaplace.core.linalg import gram, group_rows
from sklaplace.core.parallel import cached_property
from sklaplace.curvature.patches import Inputs, contracted, mean_input, unfolded
from sklaplace.likelihoods.output_hessian import OutputHessian

# maximum number of elements of a temporary array
CHUNK_ELEMENTS = 2**22
# limit for arrays that are reused immediately and should stay in the caches
DENSE_CHUNK_ELEMENTS = 2**19
# limit for arrays that are small compared with their inputs
PRODUCT_CHUNK_ELEMENTS = 2**16


@dataclass(frozen=True)
class OuterProducts:
    """Products ``Rᵀ R'`` of the rows R and R' of two blocks at one position.

    The product of a sample is ``outputs ⊗ (left rightᵀ)``, with these attributes.

    Attributes
    ----------
    outputs : Tensor of shape (b, o, o')
        ``Σₖ g g'ᵀ`` of each sample.
    left, right : Tensor of shape (b, i) or (b, i')
        Inputs of both blocks.
    """

    outputs: Tensor
    left: Tensor
    right: Tensor


class BaseBlock:
    """Jacobian rows ``Σᵣ g ⊗ a`` of one parameter tensor.

    Attributes
    ----------
    g : Tensor of shape (b, k, r, o) or (1, k, 1, o)
        Gradients of k outputs, or of k combinations of outputs, at r positions. If all
        samples share the gradients, the first axis has length one.
    a : Tensor or Patches of shape (b, r, i), or None
        Layer inputs. None means ``a ≡ 1`` and r = 1.
    n_groups : int
        Number of groups in the layer. Each group has its own factors.
    """

    g: Tensor
    a: Inputs | None
    n_groups: int = 1
    is_from_head: bool = False
    """Whether a `Head`, verified for each sample, determines the rows."""

    def with_factors(self, g: Tensor, a: Inputs | None) -> "Block":
        """Build rows for the same parameters from other factors ``g`` and ``a``."""
        return Block(g, a)

    def __len__(self) -> int:
        """Return the number of samples, or one if all samples share the rows."""
        return len(self.g) if self.a is None else self.a.shape[0]

    @property
    def n_columns(self) -> int:
        """Number k of rows per sample."""
        return self.g.shape[1]

    @property
    def n_outputs(self) -> int:
        """Number o of layer outputs, or p if the block has no inputs."""
        return self.g.shape[-1]

    @property
    def n_parameters(self) -> int:
        """Length p of a row."""
        return self.n_outputs * (1 if self.a is None else self.a.shape[-1])

    @property
    def device(self) -> torch.device:
        """Device of the rows."""
        return self.g.device

    @property
    def gradients(self) -> Any:
        """``g``, or an object that defines ``g`` without forming the tensor."""
        return self.g

    @property
    def inputs(self) -> Tensor:
        """Dense layer inputs, (b, r, i), or ones for a bias."""
        a = self.a
        return self.g.new_ones(len(self.g), 1, 1) if a is None else unfolded(a)

    @property
    def has_one_position(self) -> bool:
        """Whether the layer uses its weights at only one position."""
        return self.a is None or self.a.shape[1] == 1

    def dense(self) -> Tensor:
        """Return dense rows, (b, k, p)."""
        if self.a is None:
            return self.g.squeeze(2)
        # sum over positions r, with one row per pair of column and output
        outputs = self.g.movedim(2, -1)  # (b, k, o, r)
        rows = contracted(self.a, outputs.flatten(1, 2))  # (b, k·o, i)
        return rows.unflatten(1, outputs.shape[1:3]).flatten(2)

    @property
    def _chunk_length(self) -> int:
        """Number of samples whose dense rows fit into the caches."""
        sample_elements = max(1, self.n_columns * self.n_parameters)
        return max(1, DENSE_CHUNK_ELEMENTS // sample_elements)

    def dense_chunks(self) -> Iterator[Tensor]:
        """Yield the dense rows of a few samples at a time, to fit into the caches."""
        n = self._chunk_length
        for start in range(0, len(self), n):
            yield self.take(slice(start, start + n)).dense()

    def merge_positions(self) -> "BaseBlock":
        """Replace all positions by one, with the sum of ``g`` and the mean of ``a``."""
        if self.a is None or self.has_one_position:
            return self
        return self.with_factors(self.g.sum(2, keepdim=True), mean_input(self.a))

    def double(self) -> "BaseBlock":
        """Convert the rows to float64."""
        return self.with_factors(
            self.gradients.double(), None if self.a is None else self.a.double()
        )

    def take(self, indices: Tensor | slice) -> "BaseBlock":
        """Return the rows of the samples with the given indices (n,)."""
        g = self.g.expand(len(self), -1, -1, -1)[indices]
        return self.with_factors(g, None if self.a is None else self.a[indices])

    def padded(self, n_positions: int) -> "BaseBlock":
        """Zero-pad the factors to the given number of positions."""
        missing = n_positions - self.g.shape[2]
        if self.a is None or not missing:
            return self
        # the last axis is not padded; zeros follow on the axis before, the positions
        g, a = (nn.functional.pad(t, (0, 0, 0, missing)) for t in (self.g, self.inputs))
        return self.with_factors(g, a)

    def compressed(self) -> "BaseBlock":
        """Return dense rows if these need less memory than the factors.

        A block with one position is unchanged, because its factors are cheaper to use.
        """
        if self.a is None or self.has_one_position:
            return self
        n_factors = self.g.numel() + self.a.numel()
        is_shorter = len(self) * self.n_columns * self.n_parameters < n_factors
        return Block(self.dense().unsqueeze(2)) if is_shorter else self

    @property
    def _diagonals(self) -> Tensor:
        """Diagonal of ``Σ g gᵀ`` over columns and positions, (b, o)."""
        return (self.g**2).sum((1, 2))

    def output_squares(self) -> Tensor:
        """Diagonal (o,) of ``Σ g gᵀ`` over samples, columns and positions."""
        return self._diagonals.sum(0)

    def squares(self) -> Tensor:
        """Sum squared rows over b and k, (p,); in float64 for several positions.

        At one position, a squared entry is ``g² a²``, so no dense rows are needed. The
        entries at several positions are sums over positions.
        """
        if not self.has_one_position:
            chunks = self.dense_chunks()
            return total([(rows**2).sum((0, 1)).double() for rows in chunks])
        return (self._diagonals.T @ self.inputs.squeeze(1) ** 2).flatten()

    def gram(self, v: Tensor) -> Tensor:
        """Return ``rows · diag(v) · rowsᵀ`` for ``v`` (p,), as (b, k, k)."""
        return torch.cat([(rows * v) @ rows.mT for rows in self.dense_chunks()])

    def variance(self, v: Tensor) -> Tensor:
        """Return the diagonal of `gram`, (b, k)."""
        return torch.cat([(rows * rows) @ v for rows in self.dense_chunks()])

    def output_variances(self, matrix: Tensor) -> Tensor:
        """Return variances ``Σᵢ a² v`` of the layer's outputs, (b, o), at one position.

        ``matrix`` (o, i) holds the variances ``v`` of independent weights.
        """
        if self.a is None:
            return matrix.T
        return self.inputs.squeeze(1) ** 2 @ matrix.T

    def coefficient_variances(self, v: Tensor) -> Tensor:
        """Return ``Σₒ g² v``, (k, i), for variances ``v`` (p,) of independent weights.

        These are the variances of each input's coefficient in each of the k network
        outputs. All samples must share ``g``.
        """
        return (self.g**2)[0, :, 0] @ v.reshape(self.n_outputs, -1)

    def propagated_variances(self, v: Tensor) -> Tensor:
        """Return variances ``Σₒ g² v`` of k network outputs, (b, k), at one position.

        ``v`` (b, o) are the variances of independent layer outputs. If all samples
        share the gradients ``g``, one matrix product is enough.
        """
        if len(self.g) == 1:  # shared by all samples
            return v @ (self.g**2)[0, :, 0].T
        g = self.g.squeeze(2)
        # a few samples at a time, so that the products stay in the caches
        n = max(1, PRODUCT_CHUNK_ELEMENTS // g[0].numel())
        pairs = zip(g.split(n), v.expand(len(g), -1).split(n), strict=True)
        return torch.cat([(w.unsqueeze(1) * rows**2).sum(-1) for rows, w in pairs])

    def matmul(self, v: Tensor) -> Tensor:
        """Return ``rows @ v`` for ``v`` (p, q), as (b, k, q).

        Dense rows are formed for a bias, for one row per sample and for several
        positions. Otherwise, inputs and gradients are multiplied one after the other.
        """
        if self.a is None or self.n_columns == 1 or not self.has_one_position:
            return torch.cat([rows @ v for rows in self.dense_chunks()])
        # inputs first: b·p·q operations, whatever k is, with an array (b, o, q) between
        matrices = v.unflatten(0, (self.g.shape[-1], -1))  # (o, i, q)
        g, inputs = self.g.squeeze(2), self.inputs.squeeze(1)
        if v.shape[1] == 1:  # one matrix product instead of o products with vectors
            outputs = inputs @ matrices.squeeze(2).T  # (b, o)
            if len(g) == 1:  # shared by all samples
                return (outputs @ g[0].T).unsqueeze(2)
            return g @ outputs.unsqueeze(2)
        # samples at a time, so that this array has at most CHUNK_ELEMENTS elements
        n = max(1, CHUNK_ELEMENTS // max(1, len(matrices) * v.shape[1]))
        pairs = zip(g.expand(len(self), -1, -1).split(n), inputs.split(n), strict=True)
        return torch.cat([g @ (a @ matrices).transpose(0, 1) for g, a in pairs])

    def rmatmul(self, w: Tensor) -> Tensor:
        """Return ``Σ rowsᵀ w`` over b and k for ``w`` (b, k, q), as (p, q).

        Dense rows are formed only for several positions. The samples are processed a
        few at a time, and their products are added.
        """
        if self.a is None:  # the rows are `g`, perhaps shared by all samples
            g = self.g.squeeze(2).expand(len(w), -1, -1)
            return g.flatten(0, 1).T @ w.flatten(0, 1)
        product = self.g.new_zeros(self.n_parameters, w.shape[2])
        if not self.has_one_position:
            chunks = zip(self.dense_chunks(), w.split(self._chunk_length), strict=True)
            for rows, columns in chunks:
                product += rows.flatten(0, 1).T @ columns.flatten(0, 1)
            return product
        matrix = product.unflatten(0, (self.n_outputs, -1))  # a view, (o, i, q)
        # samples at a time, so that `outputs` has at most CHUNK_ELEMENTS elements
        n = max(1, CHUNK_ELEMENTS // max(1, self.n_outputs * w.shape[2]))
        g = self.g.squeeze(2).expand(len(w), -1, -1)
        factors = (tensor.split(n) for tensor in (g, self.inputs.squeeze(1), w))
        for g, a, columns in zip(*factors, strict=True):
            outputs = g.mT @ columns  # (b, o, q)
            # with samples last, one product sums over the samples
            matrix += (outputs.flatten(1).T @ a).unflatten(0, outputs.shape[1:]).mT
        return product

    def products(self, other: "BaseBlock") -> Tensor:
        """Return the products with all rows of another block, (b, k, b', k')."""
        mine = self.dense()
        # the rows of the other block are formed for a few samples at a time
        chunks = other.dense_chunks()
        return torch.cat([torch.tensordot(mine, c, ([2], [2])) for c in chunks], 2)

    def output_moment(self) -> Tensor:
        """Return ``Σ g gᵀ`` over samples, columns and positions, (o, o)."""
        return gram(self.g.flatten(0, 2))

    def outer_products(self, other: "BaseBlock") -> OuterProducts | None:
        """Return products with another block of the same samples, summed over columns.

        Return None for several positions, where rows are sums over positions, or if
        neither block has inputs, where a product of all rows needs less memory.
        """
        if not (self.has_one_position and other.has_one_position):
            return None
        if self.a is None and other.a is None:
            return None
        outputs = self.g.squeeze(2).mT @ other.g.squeeze(2)  # (b, o, o')
        left, right = self.inputs.squeeze(1), other.inputs.squeeze(1)
        return OuterProducts(outputs, left, right)


@dataclass(frozen=True)
class Block(BaseBlock):
    """Rows stored as two factors; see `BaseBlock`."""

    g: Tensor
    a: Inputs | None = None

    def select(self, indices: Tensor) -> "Block":
        """Return dense rows (b, k, n) for the n parameters with the given indices.

        The parameter with index ``m`` of a weight (o, i) belongs to output ``m // i``
        and to input ``m % i``.
        """
        indices = indices.to(self.g.device)
        if self.a is None or not self.has_one_position:
            chunks = [rows[..., indices] for rows in self.dense_chunks()]
            return Block(torch.cat(chunks).unsqueeze(2))
        i = self.a.shape[-1]
        outputs = self.g.squeeze(2)[..., indices // i]  # (b, k, n)
        inputs = self.inputs.squeeze(1)[:, indices % i]  # (b, n)
        return Block((outputs * inputs.unsqueeze(1)).unsqueeze(2))

    def rotate(self, inputs: Tensor | None) -> "Block":
        """Multiply the inputs by a basis (i, i), or keep them if it is None.

        A bias has no inputs. Patches store the basis until they are unfolded.
        """
        if inputs is None or self.a is None:
            return self
        if isinstance(self.a, Tensor):
            return Block(self.g, self.a @ inputs)
        return Block(self.g, replace(self.a, basis=inputs))


@dataclass(frozen=True)
class GroupedBlock(Block):
    """Rows of a convolution with G groups, each with its own outputs and inputs.

    Dense rows omit the zeros between groups, so p = G·o·i.

    Attributes
    ----------
    g : Tensor of shape (b, k, r, G·o)
        Gradients, group by group.
    a : Tensor or Patches of shape (b, r, G·i)
        Inputs, group by group.
    n_groups : int
        Number G of groups.
    basis : Tensor of shape (G, i, i) or None
        One matrix per group, which multiplies the inputs of the group. None means the
        identity.
    """

    n_groups: int = 1
    basis: Tensor | None = None
    has_one_position = False  # products would mix the groups' outputs and inputs

    def with_factors(self, g: Tensor, a: Inputs | None) -> Block:
        """Build rows for the same parameters from other factors ``g`` and ``a``."""
        return replace(self, g=g, a=a)

    @property
    def n_parameters(self) -> int:
        """Length p of a row."""
        return super().n_parameters // self.n_groups

    @property
    def gradients_of_groups(self) -> Tensor:
        """Gradients of each group, (b, k, r, G, o)."""
        return self.g.unflatten(-1, (self.n_groups, -1))

    def dense(self) -> Tensor:
        """Return dense rows, (b, k, p)."""
        inputs = self.inputs.unflatten(-1, (self.n_groups, -1))
        return group_rows(self.gradients_of_groups, inputs, self.basis).flatten(2)

    def output_moment(self) -> Tensor:
        """Return ``Σ g gᵀ`` of each group, (G, o, o)."""
        rows = self.gradients_of_groups.flatten(0, 2).transpose(0, 1)
        return rows.mT @ rows

    def rotate(self, inputs: Tensor | None) -> Block:
        """Rotate inputs into the bases (G, i, i) of the groups."""
        return replace(self, basis=inputs)


@dataclass(frozen=True)
class HeadBlock(BaseBlock):
    """Rows ``SᵀM ⊗ a`` of a last layer, computed from ``Λ = S Sᵀ`` where possible.

    Sums over samples depend on ``S`` only through ``Λ``. Other products require
    ``SᵀM``.

    Attributes
    ----------
    hessian : OutputHessian
        ``Λ`` of each sample.
    matrix : Tensor of shape (c, o) or None
        ``M``, the Jacobian of the network's outputs with respect to the layer's
        outputs. None means the identity.
    a : Tensor of shape (b, 1, i) or None
        Layer inputs. None means ``a ≡ 1``.
    """

    hessian: OutputHessian
    matrix: Tensor | None
    a: Tensor | None = None
    is_from_head = True

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.hessian.n_samples

    @property
    def n_columns(self) -> int:
        """Number k of rows per sample."""
        return self.hessian.n_columns

    @property
    def n_outputs(self) -> int:
        """Number of outputs of the layer, ``o``."""
        return self.hessian.n_outputs if self.matrix is None else self.matrix.shape[1]

    @cached_property
    def g(self) -> Tensor:
        """Dense ``SᵀM``, (b, k, 1, o)."""
        return self.hessian.rows(self.matrix).unsqueeze(2)

    @cached_property
    def _diagonals(self) -> Tensor:
        """Diagonal of ``MᵀΛM`` for each sample, (b, o)."""
        return self.hessian.diagonals(self.matrix)

    def double(self) -> "HeadBlock":
        """Convert the rows to float64."""
        matrix, a = (None if t is None else t.double() for t in (self.matrix, self.a))
        return HeadBlock(self.hessian.double(), matrix, a)

    def squares(self) -> Tensor:
        """Sum squared rows over b and k, (p,), in float64."""
        return self._diagonals.double().sum(0) if self.a is None else super().squares()

    @property
    def device(self) -> torch.device:
        """Device of the rows, found without computing the rows."""
        return (self.g if self.a is None else self.a).device

    def layer_outputs(self, v: Tensor) -> Tensor:
        """Return layer outputs for weights ``v`` (p, q), as (b, o, q).

        The outputs of a bias are the same for all samples, (1, o, q).
        """
        matrices = v.reshape(self.n_outputs, -1, v.shape[1])  # (o, i, q)
        if self.a is None:
            return matrices.transpose(0, 1)
        # inputs (b, i) times matrices: (o, b, q) -> (b, o, q)
        return (self.a.squeeze(1) @ matrices).transpose(0, 1)

    def weight_gradients(self, outputs: Tensor) -> Tensor:
        """Map gradients of layer outputs (b, o, q) to gradients of weights (p, q)."""
        if self.a is None:
            return outputs.sum(0)
        products = outputs.flatten(1).T @ self.a.squeeze(1)  # (o·q, i)
        return products.unflatten(0, outputs.shape[1:]).mT.flatten(0, 1)

    def output_moment(self) -> Tensor:
        """Return ``Σ MᵀΛM`` over samples, (o, o)."""
        return self.hessian.moment(self.matrix)

    def outer_products(self, other: BaseBlock) -> OuterProducts:
        """Return products with another block of the same layer, from ``MᵀΛM``.

        The inputs of a bias are ones, (b, 1).
        """
        outputs = self.hessian.matrices(self.matrix)
        left, right = (
            outputs.new_ones(len(outputs), 1) if a is None else unfolded(a).squeeze(1)
            for a in (self.a, other.a)
        )
        return OuterProducts(outputs, left, right)


@dataclass(frozen=True)
class LayerRows:
    """Rows of the parameter tensors of one layer that share output gradients ``g``.

    These are the weight and the bias of a layer that uses its weights at one position.
    Otherwise, each parameter tensor has rows of its own.

    Attributes
    ----------
    blocks : tuple of Block, or of another `BaseBlock`
        Rows of each parameter tensor, with the same ``g``.
    """

    blocks: tuple[Any, ...]

    @property
    def first(self) -> Any:
        """Rows of the first parameter tensor."""
        return self.blocks[0]

    @property
    def n_parameters(self) -> int:
        """Length of the rows of all tensors together."""
        return sum(block.n_parameters for block in self.blocks)

    def accepts(self, block: BaseBlock) -> bool:
        """Return whether a block has the same ``g``, so that it can be added."""
        return self.first.has_one_position and block.g is self.first.g

    def split(self) -> "list[LayerRows]":
        """Separate the parameter tensors."""
        return [LayerRows((block,)) for block in self.blocks]

    def map_factors(
        self,
        function_of_gradients: Callable[[Tensor], Tensor],
        function_of_inputs: Callable[[Inputs], Inputs] = lambda a: a,
    ) -> "LayerRows":
        """Apply one function to the shared ``g``, and one to each ``a``."""
        inputs = [None if b.a is None else function_of_inputs(b.a) for b in self.blocks]
        return self.with_factors(function_of_gradients(self.first.g), inputs)

    def with_factors(self, g: Any, inputs: Iterable[Inputs | None]) -> "LayerRows":
        """Build rows for the same parameters from other factors."""
        pairs = zip(self.blocks, inputs, strict=True)
        return LayerRows(tuple(block.with_factors(g, a) for block, a in pairs))

    def map_blocks(self, function: Callable[[Any], Any]) -> "LayerRows":
        """Apply a function to the rows of each parameter tensor."""
        return LayerRows(tuple(function(block) for block in self.blocks))

    def gram(self, v: Tensor) -> Tensor:
        """Return ``rows · diag(v) · rowsᵀ`` for ``v`` (p,), as (b, k, k).

        At one position, two rows with entries ``g a`` and ``g' a`` have the product
        ``Σ g g' a² v``. The inputs therefore enter only through the sums ``Σ a² v``
        over the inputs of each layer output, (b, o).
        """
        if not self.first.has_one_position:
            return self.first.gram(v)
        g = self.first.g.squeeze(2)
        return (g * self._output_variances(v).unsqueeze(1)) @ g.mT

    def variance(self, v: Tensor) -> Tensor:
        """Return the diagonal of `gram`, (b, k)."""
        if not self.first.has_one_position:
            return self.first.variance(v)
        return self.first.propagated_variances(self._output_variances(v))

    def _output_variances(self, v: Tensor) -> Tensor:
        """Sum the `BaseBlock.output_variances` of all tensors, (b, o)."""
        pairs = with_entries(self.blocks, v)
        return total([b.output_variances(x.reshape(b.n_outputs, -1)) for b, x in pairs])

    def kernel(self, other: "LayerRows", factors: Tensor) -> Tensor:
        """Multiply rows (b, k) by rows (b', k') of the same parameters.

        The products of each tensor are multiplied by one of the ``factors`` (n,), and
        the sum over tensors is returned, (b, k, b', k'). At one position, the products
        are ``(g · g') (a · a')``, with the same ``g`` for all tensors. Otherwise, the
        layer has only one tensor.
        """
        if not (self.first.has_one_position and other.first.has_one_position):
            return self.first.products(other.first) * factors
        tensors = zip(self.blocks, other.blocks, factors, strict=True)
        input_products = [
            (mine.inputs.squeeze(1) @ theirs.inputs.squeeze(1).T) * factor
            for mine, theirs, factor in tensors
        ]
        sum_of_inputs = total(input_products)[:, None, :, None]
        g, other_g = self.first.g.squeeze(2), other.first.g.squeeze(2)
        return torch.einsum("nko,mlo->nkml", g, other_g) * sum_of_inputs


def with_entries(layers: Iterable[Any], v: Tensor) -> Iterator[tuple[Any, Tensor]]:
    """Yield the rows of each layer or tensor with their entries of ``v`` (P, ...)."""
    start = 0
    for rows in layers:
        end = start + rows.n_parameters
        yield rows, v[start:end]
        start = end


def variance(layers: Iterable[LayerRows], v: Tensor) -> Tensor:
    """Sum `LayerRows.variance` over layers, (b, k), for ``v`` (P,)."""
    return total([layer.variance(piece) for layer, piece in with_entries(layers, v)])


def total(terms: list[Tensor]) -> Tensor:
    """Add terms (b, ...); a term (1, ...), as of a bias, is that of all samples."""
    return sum(terms[1:], terms[0])


def aligned(*sequences: Sequence[Any]) -> tuple[Sequence[Any], ...]:
    """Return lists of layers in which equal places hold the same parameter tensors.

    Each list holds all parameters, such as the rows of a batch or Kronecker factors. A
    weight and its bias share an entry only if their layer has one position. Lists that
    differ in this are all split into one entry per parameter tensor; others are
    returned unchanged.
    """
    # for each sequence, the parameter tensors of each layer
    tensors = [[layer.split() for layer in layers] for layers in sequences]
    if len({tuple(map(len, layers)) for layers in tensors}) == 1:
        return sequences
    return tuple([rows for layer in layers for rows in layer] for layers in tensors)
