"""Curvature of the loss in the selected weights of a network.

A `Layout` lists the selected weights. A `Jacobian` of the outputs has one `Block` of
unmultiplied factors per parameter tensor. A `Curvature` defines the square root of the
loss's Hessian in the outputs that multiplies the Jacobian. Accumulators sum the
curvature over batches, and a structure stores and factorises a part of it.
"""

from sklaplace.curvature.ggn import CURVATURES
from sklaplace.curvature.priors import PRIOR_STRUCTURES
from sklaplace.curvature.structures import STRUCTURES
from sklaplace.curvature.subsets import SUBSETS

__all__ = ["CURVATURES", "PRIOR_STRUCTURES", "STRUCTURES", "SUBSETS"]
