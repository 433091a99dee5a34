"""Inputs of layers as (b, r, i): what a weight is multiplied by, at r positions.

For a Linear layer these are its inputs; for a convolution they are the patches
that it sees, which overlap: `Patches` keeps the image and unfolds it when asked.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from sklaplace.core.budget import CACHE
from sklaplace.core.linalg import gram

# Autocorrelation pays where the products that it saves, (rows · positions · i²), are
# more than its many small ones cost, whose number grows with the cube of the kernel.
MIN_PRODUCTS = 2**28
USUAL_KERNEL = 9


@dataclass(frozen=True)
class Patches:
    """Patches (b, r, i) of images, unfolded only when they are asked for.

    Attributes
    ----------
    image : Tensor of shape (b, channels, *axes)
        Padded already.
    kernel, stride, dilation : tuple of int
        One entry per axis.
    basis : Tensor of shape (i, i) or None
        What patches are multiplied by once they are written out.
    """

    image: Tensor
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    basis: Tensor | None = None

    @cached_property
    def positions(self) -> tuple[int, ...]:
        """Number of positions along each axis."""
        axes = zip(
            self.image.shape[2:], self.kernel, self.stride, self.dilation, strict=True
        )
        return tuple((n - d * (k - 1) - 1) // s + 1 for n, k, s, d in axes)

    @property
    def shape(self) -> torch.Size:
        """``(b, r, i)``."""
        i = self.image.shape[1] * torch.Size(self.kernel).numel()
        return torch.Size((len(self.image), torch.Size(self.positions).numel(), i))

    def __len__(self) -> int:
        return len(self.image)

    def numel(self) -> int:
        """Elements that are kept: those of the image."""
        return self.image.numel()

    def __getitem__(self, rows: slice | Tensor) -> "Patches":
        """Patches of some rows."""
        return replace(self, image=self.image[rows])

    def scaled(self, factors: Tensor) -> "Patches":
        """Each row times a factor (b,)."""
        shape = -1, *[1] * (self.image.ndim - 1)
        return replace(self, image=self.image * factors.to(self.image).reshape(shape))

    def double(self) -> "Patches":
        """The same in float64."""
        basis = None if self.basis is None else self.basis.double()
        return replace(self, image=self.image.double(), basis=basis)

    def contracted(self, outputs: Tensor) -> Tensor:
        """``Σᵣ outputs ⊗ patches`` for ``outputs`` (b, n, r), as (b, n, i).

        The basis comes where it costs less: before the sum over positions, or
        after it.
        """
        if self.basis is None or self.shape[1] <= outputs.shape[1]:
            return outputs @ self.unfold()
        return (outputs @ replace(self, basis=None).unfold()) @ self.basis

    def unfold(self) -> Tensor:
        """Patches written out, (b, r, i)."""
        x, n_axes = self.image, len(self.kernel)
        for axis in range(n_axes):
            dilation, kernel = self.dilation[axis], self.kernel[axis]
            reach = dilation * (kernel - 1) + 1
            x = x.unfold(2 + axis, reach, self.stride[axis])[..., ::dilation]
        # (b, channels, *positions, *kernel) -> (b, *positions, channels, *kernel)
        x = x.movedim(1, 1 + n_axes)
        rows = x.reshape(len(x), -1, x.shape[1 + n_axes :].numel())
        return rows if self.basis is None else rows @ self.basis

    def moment(self) -> Tensor:
        """``Σ a aᵀ`` over rows and positions, (i, i)."""
        if self._overlap_evenly():
            return _Autocorrelation(self.image, self.kernel).moment()
        i = self.shape[2]
        total = self.image.new_zeros(i, i)
        for piece in self.pieces():
            total += gram(piece.unfold().flatten(0, 1))
        return total

    def pieces(self) -> Iterator["Patches"]:
        """Groups of rows whose patches fit into a share of the caches."""
        b, r, i = self.shape
        row_bytes = r * i * self.image.element_size()
        n_rows = max(1, CACHE // 4 // max(1, row_bytes))
        for start in range(0, b, n_rows):
            yield self[start : start + n_rows]

    def _overlap_evenly(self) -> bool:
        """Whether the autocorrelation form holds, and pays."""
        return (
            len(self.kernel) == 2
            and self.stride == self.dilation == (1, 1)
            and self.kernel != (1, 1)
            and all(
                2 * k <= n for n, k in zip(self.positions, self.kernel, strict=True)
            )
            and self._saves_enough()
        )

    def _saves_enough(self) -> bool:
        b, r, i = self.shape
        overhead = (torch.Size(self.kernel).numel() / USUAL_KERNEL) ** 3
        return b * r * i**2 >= MIN_PRODUCTS * overhead


class _Autocorrelation:
    """``Σ a aᵀ`` over all patches of images, without writing them out.

    The block of ``Σ a aᵀ`` for kernel offsets ``d`` and ``e`` is the correlation
    ``Σ_q x[q] x[q + e - d]`` over ``q`` in a window at ``d``. Over the whole image
    it depends on ``e - d`` only, so that ``(2k-1)²`` correlations, half of them by
    symmetry, stand for ``k⁴`` blocks; what lies outside a window, a few rows and
    columns at the border, is subtracted exactly.
    """

    def __init__(self, image: Tensor, kernel: tuple[int, ...]) -> None:
        self.kernel = kernel
        ky, kx = kernel
        self.channels, self.height, self.width = image.shape[1:]
        # zeros between rows and images: a shift leads from one into zeros
        x = nn.functional.pad(image, (0, kx - 1, 0, ky - 1))
        self.padded = x.transpose(0, 1).contiguous()  # (channels, b, height, width)
        # real rows and columns that some window leaves out, and that are not zero
        self.rows = self._left_out(image, 2, ky)
        self.columns = self._left_out(image, 3, kx)

    @staticmethod
    def _left_out(image: Tensor, axis: int, k: int) -> list[int]:
        n = image.shape[axis]
        border = [*range(k - 1), *range(n - k + 1, n)]
        return [i for i in border if image.select(axis, i).any()]

    def moment(self) -> Tensor:
        """Blocks of all pairs of offsets, (channels · k, channels · k)."""
        ky, kx = self.kernel
        c, n = self.channels, ky * kx
        blocks = self.padded.new_empty(c, n, c, n)
        for shift in self._shifts():
            whole = self._correlation(shift)
            rows = {y: self._strip(shift, y, None) for y in self.rows}
            columns = {x: self._strip(shift, None, x) for x in self.columns}
            corners = {
                (y, x): self._strip(shift, y, x)
                for y, x in product(self.rows, self.columns)
            }
            for dy, dx in product(range(ky), range(kx)):
                ey, ex = dy + shift[0], dx + shift[1]
                if not (0 <= ey < ky and 0 <= ex < kx):
                    continue
                ys, xs = self._outside(dy, 0), self._outside(dx, 1)
                block = whole - sum(rows[y] for y in ys) - sum(columns[x] for x in xs)
                block = block + sum(corners[pair] for pair in product(ys, xs))
                d, e = dy * kx + dx, ey * kx + ex
                blocks[:, d, :, e] = block
                blocks[:, e, :, d] = block.T
        return blocks.reshape(c * n, c * n)

    def _shifts(self) -> Iterator[tuple[int, int]]:
        """``e - d`` of one of each symmetric pair."""
        ky, kx = self.kernel
        for y, x in product(range(ky), range(-kx + 1, kx)):
            if (y, x) >= (0, 0):
                yield y, x

    def _outside(self, offset: int, axis: int) -> list[int]:
        """Listed rows or columns that the window at an offset leaves out."""
        listed = (self.rows, self.columns)[axis]
        n = (self.height, self.width)[axis] - self.kernel[axis] + 1
        return [i for i in listed if not offset <= i < offset + n]

    def _correlation(self, shift: tuple[int, int]) -> Tensor:
        """``Σ_q x[q] x[q + shift]`` over the whole image, (channels, channels)."""
        flat = self.padded.flatten(1)
        step = shift[0] * self.padded.shape[-1] + shift[1]
        n = flat.shape[1]
        if step >= 0:
            return flat[:, : n - step] @ flat[:, step:].T
        return flat[:, -step:] @ flat[:, : n + step].T

    def _strip(self, shift: tuple[int, int], y: int | None, x: int | None) -> Tensor:
        """The part of it where ``q`` is in row ``y``, in column ``x``, or both."""
        here = self.padded[:, :, : self.height, : self.width]
        there = self.padded
        dy, dx = shift
        if y is None:
            here, there = here[:, :, : self.height], there[:, :, dy : dy + self.height]
        else:
            here, there = here[:, :, y], there[:, :, y + dy]
        if x is None:
            ahead, back = max(dx, 0), max(-dx, 0)
            here = here[..., back:]
            there = there[..., ahead : ahead + self.width - back]
        elif x + dx < 0:
            return here.new_zeros(self.channels, self.channels)
        else:
            here, there = here[..., x], there[..., x + dx]
        return here.flatten(1) @ there.flatten(1).T


Inputs = Tensor | Patches


def unfolded(a: Inputs) -> Tensor:
    """Inputs written out, (b, r, i)."""
    return a.unfold() if isinstance(a, Patches) else a


def mean_input(a: Inputs) -> Tensor:
    """Mean over positions, (b, 1, i)."""
    pieces = a.pieces() if isinstance(a, Patches) else [a]
    return torch.cat([unfolded(piece).mean(1, keepdim=True) for piece in pieces])


def joined_inputs(parts: list[Inputs]) -> Inputs:
    """Inputs of several batches as those of one."""
    first = parts[0]
    if isinstance(first, Patches):
        images = [part.image for part in parts if isinstance(part, Patches)]
        return replace(first, image=torch.cat(images))
    return torch.cat([part for part in parts if isinstance(part, Tensor)])


def second_moment(a: Inputs, weights: Tensor | None) -> Tensor:
    """``Σ w a aᵀ`` over rows and positions, (i, i)."""
    a = _scaled(a, weights)
    if isinstance(a, Patches):
        return a.moment()
    return gram(a.flatten(0, 1))


def second_diagonal(a: Inputs, weights: Tensor | None) -> Tensor:
    """Its diagonal, (i,)."""
    a = _scaled(a, weights)
    pieces = a.pieces() if isinstance(a, Patches) else [a]
    parts = [(unfolded(piece) ** 2).sum((0, 1)) for piece in pieces]
    return torch.stack(parts).sum(0)


def _scaled(a: Inputs, weights: Tensor | None) -> Inputs:
    """Each row times the root of its weight."""
    if weights is None:
        return a
    roots = weights.sqrt()
    return a.scaled(roots) if isinstance(a, Patches) else a * roots.to(a)[:, None, None]


# ---------------------------------------------------------------- layer kinds
def _linear_inputs(module: nn.Module, x: Tensor) -> Tensor:
    """Inputs of a Linear layer: every axis between first and last is a position."""
    return x.reshape(len(x), -1, x.shape[-1])


def _conv_padding(module: Any) -> list[int]:
    """Padding at both ends of each axis, last axis first, as ``pad`` wants it."""
    both: list[int] = []
    for axis, kernel in reversed(list(enumerate(module.kernel_size))):
        reach = module.dilation[axis] * (kernel - 1)
        if module.padding == "same":
            both += [reach // 2, reach - reach // 2]
        elif module.padding == "valid":
            both += [0, 0]
        else:
            both += [module.padding[axis]] * 2
    return both


def _conv_inputs(module: Any, x: Tensor) -> Patches:
    """Patches that a convolution sees."""
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    x = nn.functional.pad(x, _conv_padding(module), mode=mode)
    return Patches(x, module.kernel_size, module.stride, module.dilation)


# layer kind -> its inputs as (b, r, i)
LAYER_INPUTS: dict[type[nn.Module], Callable[[Any, Tensor], Inputs]] = {
    nn.Linear: _linear_inputs,
    nn.Conv1d: _conv_inputs,
    nn.Conv2d: _conv_inputs,
    nn.Conv3d: _conv_inputs,
}


def has_layer_form(module: nn.Module) -> bool:
    """Whether rows of this layer's parameters have the form ``Σᵣ g ⊗ a``."""
    return type(module) in LAYER_INPUTS and getattr(module, "groups", 1) == 1
