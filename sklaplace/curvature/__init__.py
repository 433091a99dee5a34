"""Curvature of the loss with respect to the selected weights of a network.

A `Layout` lists the selected weights. A `Jacobian` stores one `Block` per parameter
tensor, as two factors, and one `LayerRows` for the blocks of a layer. A `Curvature`
defines the matrix that multiplies the Jacobian, a square root of the Hessian of the
loss with respect to the outputs. An accumulator sums the curvature over batches. A
structure stores and factorises an approximation of the sum.
"""

from sklaplace.curvature.ggn import CURVATURES
from sklaplace.curvature.priors import PRIOR_STRUCTURES
from sklaplace.curvature.structures import STRUCTURES
from sklaplace.curvature.subsets import SUBSETS

__all__ = ["CURVATURES", "PRIOR_STRUCTURES", "STRUCTURES", "SUBSETS"]
