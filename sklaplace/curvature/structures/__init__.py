"""Structures: which part of the curvature ``H`` is kept. Here is the registry."""

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
