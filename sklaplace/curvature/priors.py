"""Gaussian priors over the selected parameters: ``N(prior_mean, diag(δ)⁻¹)``.

The prior precision ``δ`` is one number (``scalar``), one number per parameter tensor
(``layerwise``) or one number per parameter (``diag``). Groups of parameter tensors can
share one number. The posterior of an earlier task can replace such a prior.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sklaplace.core.checks import listed
from sklaplace.curvature.layout import MAX_LISTED, Layout, contains

# prior structure -> shape of the prior precision
PRIOR_STRUCTURES: dict[str, Callable[[Layout], tuple[int, ...]]] = {
    "scalar": lambda layout: (),
    "layerwise": lambda layout: (len(layout.blocks),),
    "diag": lambda layout: (layout.n_parameters,),
}


def expand(prior_precision: Tensor, layout: Layout) -> Tensor:
    """Expand a prior precision (), (L,) or (P,) to a differentiable tensor (P,)."""
    if prior_precision.shape == PRIOR_STRUCTURES["layerwise"](layout):
        sizes = torch.tensor(layout.sizes, device=prior_precision.device)
        return prior_precision.repeat_interleave(sizes, output_size=layout.n_parameters)
    return prior_precision.expand(layout.n_parameters)


def structure_name(structure: str | Sequence[str]) -> str:
    """Return the name of a prior structure, or "layerwise" for a list of groups."""
    return structure if isinstance(structure, str) else "layerwise"


def group_indices(
    structure: str | Sequence[str], layout: Layout, device: Any = "cpu"
) -> Tensor | None:
    """Return the group of each parameter tensor, (L,), or None if there are no groups.

    Groups exist only if ``structure`` is a list of names of parameters or modules. A
    group contains the selected parameters with its name or inside its module, and its
    index is its place in the list.

    Raises
    ------
    ValueError
        If a tensor is not in exactly one group, or if a group is empty.
    """
    if isinstance(structure, str):
        return None
    names = [block.name for block in layout.blocks]
    # for each parameter tensor, the indices of all groups that contain it
    memberships = {
        name: [k for k, group in enumerate(structure) if contains(group, name)]
        for name in names
    }
    not_in_one = [name for name, indices in memberships.items() if len(indices) != 1]
    used = {k for indices in memberships.values() for k in indices}
    empty = [group for k, group in enumerate(structure) if k not in used]
    if not_in_one or empty:
        fault = (
            f"names {listed(map(str, empty))}, which contains no selected parameter"
            if empty
            else f"does not contain {listed(not_in_one[:MAX_LISTED])} exactly once"
        )
        raise ValueError(
            f"prior_structure={list(structure)!r} {fault}. Name each selected "
            f"parameter, or a module that contains it: {listed(names[:MAX_LISTED])}. "
            "subset_of_weights='all' selects all parameters."
        )
    return torch.tensor([k for (k,) in memberships.values()], device=device)


def by_group(prior_precision: Tensor, groups: Tensor | None) -> Tensor:
    """Return the prior precision of each group, (G,), or the input without groups.

    ``groups`` is the group of each parameter tensor, (L,), from `group_indices`. All
    tensors of a group have the same precision, so that of the first tensor is read.
    """
    if groups is None:
        return prior_precision
    n, indices = int(groups.max()) + 1, groups.tolist()
    return prior_precision[[indices.index(k) for k in range(n)]]


def by_tensor(values: Tensor, groups: Tensor | None) -> Tensor:
    """Expand values per group, (G,), to values per tensor, (L,); keep scalars, ()."""
    return values if groups is None or not values.ndim else values[groups]


def group_sums(values: Tensor, groups: Tensor) -> Tensor:
    """Sum values (L,) over each group, and return the sum for each tensor, (L,)."""
    return torch.zeros_like(values).index_add(0, groups, values)[groups]


def as_structure(
    precisions: Tensor, structure: str | Sequence[str], layout: Layout
) -> Tensor:
    """Convert one prior precision per tensor, (L,), to a prior structure.

    The result is one number, (), for "scalar", (P,) for "diag", and (L,) for
    "layerwise" and for a list of groups. A precision shared by several tensors is the
    geometric mean over all their weights: tensors with more weights count more.
    """
    groups = group_indices(structure, layout, precisions.device)
    if groups is not None:
        sizes = torch.tensor(layout.sizes).to(precisions)
        sums_of_logs = group_sums(sizes * precisions.log(), groups)
        return (sums_of_logs / group_sums(sizes, groups)).exp()
    if structure == "layerwise":
        return precisions
    by_weight = expand(precisions, layout)
    return by_weight if structure == "diag" else by_weight.log().mean().exp()


@dataclass(frozen=True)
class Independent:
    """Differentiable Gaussian prior ``N(μ₀, diag(δ)⁻¹)`` over the selected parameters.

    Attributes
    ----------
    precision : Tensor of shape (P,)
        Inverse variances.
    mean : Tensor of shape () or (P,)
        Means of the weights.
    """

    precision: Tensor
    mean: Tensor

    def logdet(self) -> Tensor:
        """Return ``Σ log δ``, in nats."""
        return self.precision.log().sum()

    def quadratic_form(self, theta: Tensor) -> Tensor:
        """Return ``Σ δ (θ - μ₀)²``, ()."""
        return (self.precision * (theta - self.mean) ** 2).sum()

    def gradient(self, theta: Tensor) -> Tensor:
        """Return ``δ (θ - μ₀)``, (P,), the gradient of half the quadratic form."""
        return self.precision * (theta - self.mean)
