"""Registry of Hessian approximations, which store parts of the curvature ``H``.

An accumulator sums ``H`` over batches and decomposes the sum into a structure.
Together, a structure and a prior precision determine a posterior precision
``P = scale·H + diag δ``. `base` defines the interfaces. To add a structure, write two
classes and add a line to ``STRUCTURES``.
"""

from sklaplace.curvature.structures import diag, full, function_space, kron, lowrank
from sklaplace.curvature.structures.base import (
    Accumulator,
    Precision,
    Projection,
    Structure,
    projected,
)

# name -> (accumulator while fitting, frozen factorisation afterwards)
STRUCTURES: dict[str, tuple[type[Accumulator], type[Structure]]] = {
    "diag": (diag.DiagAccumulator, diag.Diag),
    "full": (full.FullAccumulator, full.Full),
    "gp": (function_space.PointsAccumulator, function_space.FunctionSpace),
    "kron": (kron.KronAccumulator, kron.Kron),
    "lowrank": (lowrank.LowRankAccumulator, lowrank.LowRank),
    "nystrom": (function_space.NystromAccumulator, function_space.Nystrom),
    "variational": (function_space.VariationalAccumulator, function_space.Variational),
}

__all__ = [
    "STRUCTURES",
    "Accumulator",
    "Precision",
    "Projection",
    "Structure",
    "projected",
]
