"""Layer inputs (b, r, i) at r positions: the input factors of Jacobian rows.

For a convolution, these inputs are overlapping patches of the image. `Patches` stores
the images and unfolds them only when needed, a few samples at a time.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from sklaplace.core.budget import CACHE
from sklaplace.core.linalg import gram
from sklaplace.core.parallel import cached_property


@dataclass(frozen=True)
class Patches:
    """Patches (b, r, i) of images, unfolded only when needed.

    Attributes
    ----------
    image : Tensor of shape (b, channels, *axes)
        Padded images.
    kernel, stride, dilation : tuple of int
        One entry per axis.
    basis : Tensor of shape (i, i) or None
        Matrix that multiplies the unfolded patches. None means the identity.
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
        # n entries, kernel length k, stride s, dilation d: a kernel spans d·(k - 1) + 1
        # entries, and one position follows for each stride that is left
        return tuple((n - d * (k - 1) - 1) // s + 1 for n, k, s, d in axes)

    @property
    def shape(self) -> torch.Size:
        """``(b, r, i)``."""
        i = self.image.shape[1] * torch.Size(self.kernel).numel()
        return torch.Size((len(self.image), torch.Size(self.positions).numel(), i))

    def numel(self) -> int:
        """Return the number of elements of the image."""
        return self.image.numel()

    def __getitem__(self, samples: slice | Tensor) -> "Patches":
        """Return the patches of the samples with the given indices."""
        return replace(self, image=self.image[samples])

    def scaled(self, factors: Tensor) -> "Patches":
        """Multiply the patches of each sample by one factor per sample, (b,)."""
        shape = -1, *[1] * (self.image.ndim - 1)
        return replace(self, image=self.image * factors.to(self.image).reshape(shape))

    def double(self) -> "Patches":
        """Convert the patches to float64."""
        basis = None if self.basis is None else self.basis.double()
        return replace(self, image=self.image.double(), basis=basis)

    def unfold(self) -> Tensor:
        """Return the patches as a tensor, (b, r, i).

        Each patch is flattened in the order of a convolution's weight: channels first,
        then the axes of the kernel.
        """
        x, n_axes = self.image, len(self.kernel)
        axes = zip(self.kernel, self.stride, self.dilation, strict=True)
        for axis, (kernel, stride, dilation) in enumerate(axes, 2):
            # a window has the extent of the dilated kernel, which skips entries
            x = x.unfold(axis, dilation * (kernel - 1) + 1, stride)[..., ::dilation]
        # (b, channels, *positions, *kernel) -> (b, *positions, channels, *kernel)
        x = x.movedim(1, 1 + n_axes)
        rows = x.reshape(len(x), -1, x.shape[1 + n_axes :].numel())
        return rows if self.basis is None else rows @ self.basis

    def chunks(self) -> Iterator[Tensor]:
        """Yield unfolded patches of a few samples at a time, to fit into the caches."""
        b, r, i = self.shape
        # a quarter of the caches, which also hold the results
        n = max(1, CACHE // 4 // max(1, r * i * self.image.element_size()))
        for start in range(0, b, n):
            yield self[start : start + n].unfold()


Inputs = Tensor | Patches


def unfolded(a: Inputs) -> Tensor:
    """Return inputs as a tensor, (b, r, i)."""
    return a.unfold() if isinstance(a, Patches) else a


def _chunks(a: Inputs) -> Iterable[Tensor]:
    """Return inputs as tensors; only a few samples are unfolded at a time."""
    return a.chunks() if isinstance(a, Patches) else [a]


def contracted(a: Inputs, factors: Tensor) -> Tensor:
    """Return weighted sums ``Σᵣ factorᵣ aᵣ`` of inputs over positions, (b, n, i).

    ``factors`` (b, n, r) has one factor per sum and position. Patches are multiplied by
    their basis before or after they are summed over positions, whichever is cheaper.
    The basis multiplies r rows per sample before the sum, and n rows after it.
    """
    if isinstance(a, Tensor) or a.basis is None or a.shape[1] <= factors.shape[1]:
        return factors @ unfolded(a)
    return (factors @ replace(a, basis=None).unfold()) @ a.basis


def mean_input(a: Inputs) -> Tensor:
    """Return the mean over positions, (b, 1, i)."""
    return torch.cat([chunk.mean(1, keepdim=True) for chunk in _chunks(a)])


def joined_inputs(parts: list[Any]) -> Inputs | None:
    """Concatenate the inputs of several batches, or return None for a bias.

    Patches stay folded if all batches have images of the same size.
    """
    if parts[0] is None:
        return None
    # the shape of a sample's image; None for a batch of tensors
    shapes = {p.image.shape[1:] if isinstance(p, Patches) else None for p in parts}
    if len(shapes) == 1 and None not in shapes:
        return replace(parts[0], image=torch.cat([part.image for part in parts]))
    return torch.cat([*map(unfolded, parts)])


def second_moment(a: Inputs, weights: Tensor | None) -> Tensor:
    """Return ``Σ w a aᵀ`` over samples and positions, (i, i)."""
    chunks = _chunks(_scaled(a, weights))
    return reduce(Tensor.add_, (gram(chunk.flatten(0, 1)) for chunk in chunks))


def grouped_moment(a: Inputs, weights: Tensor | None, n_groups: int) -> Tensor:
    """Return the `second_moment` of each of G consecutive groups, (G, i, i).

    The inputs are (b, r, G·i). The sums are in float64.
    """
    # zero until the first chunk, which sets the device and the shape
    total = torch.zeros((), dtype=torch.float64)
    for chunk in _chunks(_scaled(a, weights)):
        # (b, r, G·i) -> (G, b·r, i)
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
    """Return whether the rows of a layer's parameters have the form ``Σᵣ g ⊗ a``.

    For a grouped convolution, the rows of each group have this form.
    """
    is_replaced = "forward" in vars(module)
    return type(module) in LAYER_INPUTS and not is_replaced
