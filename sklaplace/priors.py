"""Gaussian priors over the selected parameters: ``N(prior_mean, diag(δ)⁻¹)``.

``δ``, the prior precision, is one number (``scalar``), one per parameter tensor
(``layerwise``) or one per parameter (``diag``).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from sklaplace.layouts import Layout

# prior structure -> shape of the prior precision
PRIOR_STRUCTURES: dict[str, Callable[[Layout], tuple[int, ...]]] = {
    "scalar": lambda layout: (),
    "layerwise": lambda layout: (len(layout.blocks),),
    "diag": lambda layout: (layout.n_parameters,),
}


def structure_of(prior_precision: Tensor, layout: Layout) -> str:
    """Name of the prior structure that has this shape; the coarsest if several."""
    shape = tuple(prior_precision.shape)
    return next(k for k, size in PRIOR_STRUCTURES.items() if size(layout) == shape)


def expand(prior_precision: Tensor, layout: Layout) -> Tensor:
    """Prior precision per parameter, (P,), from (), (L,) or (P,).

    Differentiable; the precision of a block is repeated over its parameters.
    """
    if structure_of(prior_precision, layout) == "layerwise":
        sizes = torch.tensor(layout.sizes, device=prior_precision.device)
        return prior_precision.repeat_interleave(sizes, output_size=layout.n_parameters)
    return prior_precision.expand(layout.n_parameters)
