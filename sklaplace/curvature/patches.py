"""Layer inputs (b, r, i) at r positions: the input factors of Jacobian rows.

For a convolution, the inputs are overlapping patches of the image. `Patches` stores the
image and unfolds it only where necessary. The second moment ``Σ a aᵀ`` (i, i) of the
patches is computed from the autocorrelation of the image.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from sklaplace.core.budget import CACHE
from sklaplace.core.linalg import gram

# The autocorrelation is faster if the products that it avoids, (samples · positions ·
# i²), cost more than its small products, whose number grows with the cube of the kernel
# size.
MIN_PRODUCTS = 2**28
USUAL_KERNEL = 9


@dataclass(frozen=True)
class Patches:
    """Patches (b, r, i) of images, unfolded only where necessary.

    Attributes
    ----------
    image : Tensor of shape (b, channels, *axes)
        Padded images.
    kernel, stride, dilation : tuple of int
        One entry per axis.
    basis : Tensor of shape (i, i) or None
        Matrix that multiplies the unfolded patches; None: the identity.
    """

    image: Tensor
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    basis: Tensor | None = None

    @cached_property
    def positions(self) -> tuple[int, ...]:
        """Number of positions along each axis."""
        sizes = self.image.shape[2:]
        axes = zip(sizes, self.kernel, self.stride, self.dilation, strict=True)
        return tuple((n - d * (k - 1) - 1) // s + 1 for n, k, s, d in axes)

    @property
    def shape(self) -> torch.Size:
        """``(b, r, i)``."""
        i = self.image.shape[1] * torch.Size(self.kernel).numel()
        return torch.Size((len(self.image), torch.Size(self.positions).numel(), i))

    def __len__(self) -> int:
        return len(self.image)

    def numel(self) -> int:
        """Return the number of elements of the image."""
        return self.image.numel()

    def __getitem__(self, some: slice | Tensor) -> "Patches":
        """Return the patches of some samples."""
        return replace(self, image=self.image[some])

    def scaled(self, factors: Tensor) -> "Patches":
        """Multiply the patches of each sample by its factor (b,)."""
        shape = -1, *[1] * (self.image.ndim - 1)
        return replace(self, image=self.image * factors.to(self.image).reshape(shape))

    def double(self) -> "Patches":
        """Convert the patches to float64."""
        basis = None if self.basis is None else self.basis.double()
        return replace(self, image=self.image.double(), basis=basis)

    def unfold(self) -> Tensor:
        """Return the patches as a tensor, (b, r, i)."""
        x, n_axes = self.image, len(self.kernel)
        axes = zip(self.kernel, self.stride, self.dilation, strict=True)
        for axis, (kernel, stride, dilation) in enumerate(axes, 2):
            x = x.unfold(axis, dilation * (kernel - 1) + 1, stride)[..., ::dilation]
        # (b, channels, *positions, *kernel) -> (b, *positions, channels, *kernel)
        x = x.movedim(1, 1 + n_axes)
        rows = x.reshape(len(x), -1, x.shape[1 + n_axes :].numel())
        return rows if self.basis is None else rows @ self.basis

    def moment(self) -> Tensor:
        """Return ``Σ a aᵀ`` over samples and positions, (i, i)."""
        if self._has_fast_moment():
            return _Autocorrelation(self.image, self.kernel).moment()
        total = self.image.new_zeros(self.shape[2], self.shape[2])
        for chunk in self.chunks():
            total += gram(chunk.flatten(0, 1))
        return total

    def chunks(self) -> Iterator[Tensor]:
        """Yield unfolded patches of a few samples, which fit into the caches."""
        b, r, i = self.shape
        n = max(1, CACHE // 4 // max(1, r * i * self.image.element_size()))
        for start in range(0, b, n):
            yield self[start : start + n].unfold()

    def _has_fast_moment(self) -> bool:
        """Return whether the autocorrelation is applicable and faster."""
        b, r, i = self.shape
        axes = zip(self.positions, self.kernel, strict=True)
        overhead = (torch.Size(self.kernel).numel() / USUAL_KERNEL) ** 3
        return (
            len(self.kernel) == 2
            and self.stride == self.dilation == (1, 1)
            and self.kernel != (1, 1)
            and all(2 * k <= n for n, k in axes)
            and b * r * i**2 >= MIN_PRODUCTS * overhead
        )


class _Autocorrelation:
    """``Σ a aᵀ`` over all patches of images, without unfolding them.

    The block of ``Σ a aᵀ`` for kernel offsets ``d`` and ``e`` is the correlation
    ``Σ_q x[q] x[q + e - d]`` over ``q`` in a window at ``d``. Over the whole image,
    the correlation depends only on ``e - d``. Hence ``(2k-1)²`` correlations, half of
    them by symmetry, replace ``k⁴`` blocks. The few rows and columns at the border
    outside a window are subtracted exactly.
    """

    def __init__(self, image: Tensor, kernel: tuple[int, ...]) -> None:
        self.kernel = kernel
        self.channels, *self.sizes = image.shape[1:]
        # zeros between rows and images: a shift beyond the image reads zeros
        x = nn.functional.pad(image, (0, kernel[1] - 1, 0, kernel[0] - 1))
        self.padded = x.transpose(0, 1).contiguous()  # (channels, b, height, width)
        # nonzero rows and columns of the image that some window omits
        self.borders = []
        for axis, n, k in zip((2, 3), self.sizes, kernel, strict=True):
            ends = *range(k - 1), *range(n - k + 1, n)
            self.borders.append([at for at in ends if image.select(axis, at).any()])

    def moment(self) -> Tensor:
        """Compute the blocks of all pairs of offsets, (channels · k, channels · k)."""
        ky, kx = self.kernel
        c, n = self.channels, ky * kx
        blocks = self.padded.new_empty(c, n, c, n)
        rows, columns = ([None, *border] for border in self.borders)
        for shift in product(range(ky), range(-kx + 1, kx)):
            if shift < (0, 0):  # one of each pair ±shift is enough
                continue
            sums = {at: self._correlation(shift, *at) for at in product(rows, columns)}
            for offset in product(range(ky), range(kx)):
                ey, ex = offset[0] + shift[0], offset[1] + shift[1]
                if not (0 <= ey < ky and 0 <= ex < kx):
                    continue
                ys, xs = (self._omitted(offset[axis], axis) for axis in (0, 1))
                block = sums[None, None] - sum(sums[y, None] for y in ys)
                block = block - sum(sums[None, x] for x in xs)
                block = block + sum(sums[at] for at in product(ys, xs))
                d, e = offset[0] * kx + offset[1], ey * kx + ex
                blocks[:, d, :, e] = block
                blocks[:, e, :, d] = block.T
        return blocks.reshape(c * n, c * n)

    def _omitted(self, offset: int, axis: int) -> list[int]:
        """Return rows or columns in ``borders`` that the window at an offset omits."""
        window = range(offset, offset + self.sizes[axis] - self.kernel[axis] + 1)
        return [place for place in self.borders[axis] if place not in window]

    def _correlation(
        self, shift: tuple[int, int], y: int | None, x: int | None
    ) -> Tensor:
        """Return ``Σ_q x[q] x[q + shift]``, (channels, channels).

        The sum is over the whole image, or over ``q`` in row ``y`` and in column ``x``
        if given.
        """
        if y is None and x is None:
            flat = self.padded.flatten(1)
            step = shift[0] * self.padded.shape[-1] + shift[1]
            return flat[:, : flat.shape[1] - step] @ flat[:, step:].T
        here = there = self.padded
        for axis, at, step, n in zip((2, 3), (y, x), shift, self.sizes, strict=True):
            start, stop = (0, n) if at is None else (at, at + 1)
            start = max(start, -step)  # no pixels before the image
            length = max(0, stop - start)
            here = here.narrow(axis, start, length)
            there = there.narrow(axis, start + step, length)
        return here.flatten(1) @ there.flatten(1).T


Inputs = Tensor | Patches


def unfolded(a: Inputs) -> Tensor:
    """Return inputs as a tensor, (b, r, i)."""
    return a.unfold() if isinstance(a, Patches) else a


def _chunks(a: Inputs) -> Iterable[Tensor]:
    """Return inputs as tensors; patches come a few samples at a time."""
    return a.chunks() if isinstance(a, Patches) else [a]


def contracted(a: Inputs, outputs: Tensor) -> Tensor:
    """Return ``Σᵣ outputs ⊗ a`` for ``outputs`` (b, n, r), as (b, n, i).

    Patches are multiplied by their basis before or after the sum over positions,
    whichever costs less.
    """
    if isinstance(a, Tensor) or a.basis is None or a.shape[1] <= outputs.shape[1]:
        return outputs @ unfolded(a)
    return (outputs @ replace(a, basis=None).unfold()) @ a.basis


def mean_input(a: Inputs) -> Tensor:
    """Return the mean over positions, (b, 1, i)."""
    return torch.cat([chunk.mean(1, keepdim=True) for chunk in _chunks(a)])


def joined_inputs(parts: list[Any]) -> Inputs:
    """Concatenate the inputs of several batches."""
    shapes = {p.image.shape[1:] if isinstance(p, Patches) else None for p in parts}
    if len(shapes) == 1 and None not in shapes:
        return replace(parts[0], image=torch.cat([part.image for part in parts]))
    return torch.cat([*map(unfolded, parts)])


def second_moment(a: Inputs, weights: Tensor | None) -> Tensor:
    """Return ``Σ w a aᵀ`` over samples and positions, (i, i)."""
    a = _scaled(a, weights)
    return a.moment() if isinstance(a, Patches) else gram(a.flatten(0, 1))


def grouped_moment(a: Inputs, weights: Tensor | None, n_groups: int) -> Tensor:
    """Return the `second_moment` of each of G consecutive groups, (G, i, i)."""
    total = torch.zeros((), dtype=torch.float64)
    for chunk in _chunks(_scaled(a, weights)):
        rows = chunk.flatten(0, 1).unflatten(1, (n_groups, -1)).transpose(0, 1)
        total = total.to(rows.device) + (rows.mT @ rows).double()
    return total


def scaled_rows(a: Inputs, weights: Tensor | None) -> Tensor:
    """Return ``√w a`` of all samples and positions, (b·r, i)."""
    return unfolded(_scaled(a, weights)).flatten(0, 1)


def second_diagonal(a: Inputs, weights: Tensor | None) -> Tensor:
    """Return the diagonal of `second_moment`, (i,)."""
    chunks = _chunks(_scaled(a, weights))
    return torch.stack([(chunk**2).sum((0, 1)) for chunk in chunks]).sum(0)


def _scaled(a: Inputs, weights: Tensor | None) -> Inputs:
    """Multiply the inputs of each sample by the square root of its weight."""
    if weights is None:
        return a
    roots = weights.sqrt()
    return a.scaled(roots) if isinstance(a, Patches) else a * roots.to(a)[:, None, None]


# ---------------------------------------------------------------- layer kinds
def _conv_inputs(module: Any, x: Tensor) -> Patches:
    """Return the patches that a convolution multiplies by its weight."""
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    x = nn.functional.pad(x, module._reversed_padding_repeated_twice, mode=mode)
    return Patches(x, module.kernel_size, module.stride, module.dilation)


# type of layer -> its inputs as (b, r, i)
LAYER_INPUTS: dict[type[nn.Module], Callable[[Any, Tensor], Inputs]] = {
    # all axes between the first and the last are positions
    nn.Linear: lambda _layer, x: x.reshape(len(x), -1, x.shape[-1]),
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), _conv_inputs),
}


def has_layer_form(module: nn.Module) -> bool:
    """Return whether rows of a layer's parameters have the form ``Σᵣ g ⊗ a``.

    For a grouped convolution, the rows of each group have this form.
    """
    is_replaced = "forward" in vars(module)
    return type(module) in LAYER_INPUTS and not is_replaced
