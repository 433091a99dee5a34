"""Structures of the curvature ``H``: the registry of which part of it is kept.

An accumulator sums ``H`` over batches and decomposes to a structure; under a prior
precision a structure has a posterior precision ``P = scale·H + diag δ``. `base` lists
what each of them provides; a new one is two classes and a line in ``STRUCTURES``.
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
