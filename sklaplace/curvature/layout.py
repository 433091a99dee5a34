"""Layout of the selected parameters and their layers.

The selected parameters are flattened in row-major order and concatenated into one
vector of length P, in the order of ``module.parameters()``. A ``layerwise`` quantity
has one entry per block, that is, per parameter tensor.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sklaplace.core.parallel import cached_property
from sklaplace.core.serialise import FieldsOnly
from sklaplace.curvature.shared import IdentityMap, SharedColumns

# Maximum number of parameters that an error message names.
MAX_LISTED = 12


@dataclass(frozen=True)
class BlockSpec:
    """One parameter tensor.

    Attributes
    ----------
    name : str
        Name in ``module.named_parameters()``.
    shape : tuple of int
        Shape of the parameter.
    layer : str or None
        Layer whose inputs and output gradients are the factors of the Jacobian rows.
        None means dense rows.
    is_bias : bool
        Whether the layer adds the parameter instead of multiplying by it.
    one_by_one : bool
        Whether to compute dense rows sample by sample, because ``torch.func.vmap``
        fails or returns wrong rows.
    n_groups : int
        Number G of convolution groups, each with its own factors.
    indices : Tensor of shape (p,) or None
        Indices of the selected entries of the flattened parameter. None means all
        entries.
    """

    name: str
    shape: tuple[int, ...]
    layer: str | None = None
    is_bias: bool = False
    one_by_one: bool = False
    n_groups: int = 1
    indices: Tensor | None = field(default=None, compare=False, repr=False)

    @property
    def size(self) -> int:
        """Number of parameters p in the block."""
        return math.prod(self.shape) if self.indices is None else len(self.indices)

    @property
    def factor_shape(self) -> tuple[int, int]:
        """Shape ``(o, i)`` of the block as a matrix, where i = 1 without inputs.

        For several groups, ``(o, i)`` is the shape of one group.
        """
        if self.layer is None or self.is_bias or self.indices is not None:
            return self.size, 1
        return self.shape[0] // self.n_groups, self.size // self.shape[0]


@dataclass(frozen=True)
class Head(FieldsOnly):
    """Affine map from the outputs of a Linear layer to the network's outputs.

    All samples share the map.

    Attributes
    ----------
    matrix : Tensor of shape (c, o), or IdentityMap
        Jacobian of the network's outputs with respect to the layer's outputs.
    offset : Tensor of shape (c,)
        The network's outputs if all outputs of the layer are zero.
    """

    matrix: Tensor | IdentityMap = field(repr=False)
    offset: Tensor = field(repr=False)

    @cached_property
    def is_identity(self) -> bool:
        """Whether the layer's outputs are the network's outputs."""
        if isinstance(self.matrix, IdentityMap):
            return True
        identity = torch.eye(*self.matrix.shape).to(self.matrix)
        return torch.equal(self.matrix, identity) and not self.offset.any()

    @cached_property
    def _cache(self) -> dict[object, Tensor | SharedColumns]:
        return {}

    def shared_gradients(self, centring: Any, f: Tensor) -> Tensor | SharedColumns:
        """Return gradients ``SᵀM`` of k network outputs in layer outputs, (1, k, 1, o).

        All samples share them. ``M`` is the ``matrix`` of the head. ``S`` is the matrix
        that ``centring``, a `Centring`, returns for outputs ``f`` (b, c), or the
        identity if it is None. Gradients are computed once for each `Centring` and
        dtype.
        """
        key = centring, f.dtype, f.device
        if key not in self._cache:
            self._cache[key] = self._compute_gradients(centring, f)
        return self._cache[key]

    def _compute_gradients(self, centring: Any, f: Tensor) -> Tensor | SharedColumns:
        """Compute `shared_gradients`, in the dtype of the outputs ``f``.

        For an `IdentityMap`, ``SᵀM`` is ``S``, which is not formed.
        """
        if isinstance(self.matrix, IdentityMap):
            # zero groups of outputs to centre mean no centring
            n_blocks = 0 if centring is None else centring.n_blocks
            return SharedColumns(self.matrix.n, n_blocks, f.new_zeros(()))
        matrix = self.matrix.to(f)
        g = matrix if centring is None else centring(f).T @ matrix
        return g.reshape(1, len(g), 1, -1)

    def fits(self, hidden: Tensor, f: Tensor) -> bool:
        """Return whether the head maps layer outputs (b, o) to ``f`` up to rounding.

        The outputs of an identity must be equal without rounding.
        """
        if isinstance(self.matrix, IdentityMap) or self.is_identity:
            return torch.equal(hidden, f)
        matrix, offset = self.matrix.to(f), self.offset.to(f)
        # rounding errors are relative to the sizes of the terms, not of their sum
        size = hidden.abs() @ matrix.T.abs() + offset.abs()
        # 32 errors: twice the 16 that `_head_with_offset` in `subsets` sets to zero
        allowed = 32 * torch.finfo(f.dtype).eps * size
        return bool(((hidden @ matrix.T + offset - f).abs() <= allowed).all())


@dataclass(frozen=True)
class Layout(FieldsOnly):
    """The selected parameters, in order.

    Attributes
    ----------
    blocks : tuple of BlockSpec
        One block per parameter tensor.
    head : Head or None
        Head to which all blocks belong, if any. The Jacobian of a head is computed
        without automatic differentiation.
    rounding : float
        Relative rounding error of the layers' outputs, if known.
    is_separable : bool
        Whether all parameters belong to one layer, and each output of this layer
        affects only one output of the network.
    counts_uses : bool
        Whether the uses of the layers' parameters are counted in each batch. False if
        the outputs have no autograd graph.
    called : tuple of str or None
        Layers with parameters that the network may call. None means all layers.
    """

    blocks: tuple[BlockSpec, ...]
    head: Head | None = None
    rounding: float = field(default=0.0, compare=False)
    is_separable: bool = field(default=False, compare=False)
    counts_uses: bool = field(default=False, compare=False)
    called: tuple[str, ...] | None = field(default=None, compare=False)

    def __deepcopy__(self, _memo: object) -> "Layout":
        """Return the layout itself, which never changes."""
        return self

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of parameters of each block."""
        return tuple(block.size for block in self.blocks)

    @property
    def n_parameters(self) -> int:
        """P, the number of selected parameters."""
        return sum(self.sizes)

    @property
    def layers(self) -> list[str]:
        """Names of the layers of all blocks, without duplicates."""
        return list(dict.fromkeys(b.layer for b in self.blocks if b.layer is not None))

    def split(self, vector: Tensor) -> list[Tensor]:
        """Split the last axis, of length P, into one piece per block."""
        return list(vector.split(self.sizes, dim=-1))

    def expand_outputs(self, values: Tensor) -> Tensor:
        """Expand values per output of a layer, (o,), to values per weight, (P,)."""
        n = len(values)
        # weights (o, i) are flattened output by output, so a value is repeated i times
        return torch.cat([values.repeat_interleave(s // n) for s in self.sizes])

    def read(self, module: nn.Module) -> Tensor:
        """Copy the current values of the selected parameters to float64, (P,)."""
        values = dict(module.named_parameters())
        return self.flatten(values[b.name].detach().double() for b in self.blocks)

    def write(self, vector: Tensor, module: nn.Module) -> None:
        """Set the selected parameters of a module from a vector (P,)."""
        parameters = dict(module.named_parameters())
        with torch.no_grad():
            for name, value in self.unflatten(vector, module).items():
                parameters[name].copy_(value)

    def flatten(self, pieces: Iterable[Tensor]) -> Tensor:
        """Join the selected entries of parameters (..., *shape) into shape (..., P).

        ``pieces`` contains one tensor per block, with the shape of the whole parameter
        after any leading axes.
        """
        selected = []
        for block, piece in zip(self.blocks, pieces, strict=True):
            n_axes, indices = len(block.shape), block.indices
            # a parameter of shape () has one entry
            entries = piece.flatten(-n_axes) if n_axes else piece.unsqueeze(-1)
            if indices is not None:
                entries = entries[..., indices.to(entries.device)]
            selected.append(entries)
        return torch.cat(selected, -1)

    def unflatten(
        self, vector: Tensor, module: nn.Module | None = None
    ) -> dict[str, Tensor]:
        """Split a vector (P,) into parameters in their original shapes, by name.

        Entries that are not selected are copied from ``module``, which is needed only
        if some blocks have ``indices``. The result is differentiable with respect to
        the vector.
        """
        current = dict(module.named_parameters()) if module is not None else {}
        parameters = {}
        for block, piece in zip(self.blocks, self.split(vector), strict=True):
            if block.indices is not None:
                flat = current[block.name].detach().reshape(-1).to(piece)
                piece = flat.index_put((block.indices.to(flat.device),), piece)
            parameters[block.name] = piece.reshape(block.shape)
        return parameters


def contains(name: str, other: str) -> bool:
    """Return whether ``name`` equals ``other`` or names a module that contains it."""
    return name in ("", other) or other.startswith(f"{name}.")
