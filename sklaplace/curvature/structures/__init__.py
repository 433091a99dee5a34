"""Structures of the curvature ``H``: the registry of which part of it is kept.

An accumulator sums ``H`` over batches and decomposes to a structure; under a prior
precision a structure has a posterior precision ``P = scale·H + diag δ``. `base` lists
what each of them provides; a new one is two classes and a line in ``STRUCTURES``.
"""

from sklaplace.curvature.structures.base import (
    Accumulator,
    Precision,
    Projection,
    Structure,
    projected,
)
from sklaplace.curvature.structures.diag import Diag, DiagAccumulator
from sklaplace.curvature.structures.full import Full, FullAccumulator
from sklaplace.curvature.structures.function_space import (
    FunctionSpace,
    Nystrom,
    NystromAccumulator,
    PointsAccumulator,
    Variational,
    VariationalAccumulator,
)
from sklaplace.curvature.structures.kron import Kron, KronAccumulator
from sklaplace.curvature.structures.lowrank import LowRank, LowRankAccumulator

# name -> (accumulator while fitting, frozen factorisation afterwards)
STRUCTURES: dict[str, tuple[type[Accumulator], type[Structure]]] = {
    "diag": (DiagAccumulator, Diag),
    "full": (FullAccumulator, Full),
    "gp": (PointsAccumulator, FunctionSpace),
    "kron": (KronAccumulator, Kron),
    "lowrank": (LowRankAccumulator, LowRank),
    "nystrom": (NystromAccumulator, Nystrom),
    "variational": (VariationalAccumulator, Variational),
}

__all__ = [
    "STRUCTURES",
    "Accumulator",
    "Precision",
    "Projection",
    "Structure",
    "projected",
]
