"""From a network and data to the curvature of the loss in the selected weights.

A `Layout` lists these weights, a `Jacobian` of the outputs with respect to them has one
`Block` of unmultiplied factors per parameter tensor, and a `Curvature` says which
square root of the loss's Hessian in the outputs multiplies it. Accumulators sum the
curvature over batches, and a structure is the part of it that is kept, factorised.
"""

from sklaplace.curvature.ggn import CURVATURES
from sklaplace.curvature.priors import PRIOR_STRUCTURES
from sklaplace.curvature.structures import STRUCTURES
from sklaplace.curvature.subsets import SUBSETS

__all__ = ["CURVATURES", "PRIOR_STRUCTURES", "STRUCTURES", "SUBSETS"]
