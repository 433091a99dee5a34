"""Structures: which part of the curvature ``H`` is kept. Here is the registry."""

from sklaplace.structures.base import (
    Accumulator,
    Projection,
    Structure,
    projected,
)
from sklaplace.structures.diag import Diag, DiagAccumulator
from sklaplace.structures.full import Full, FullAccumulator
from sklaplace.structures.gp import FunctionSpace, PointsAccumulator
from sklaplace.structures.kron import Kron, KronAccumulator
from sklaplace.structures.lowrank import LowRank, LowRankAccumulator
from sklaplace.structures.nystrom import (
    Nystrom,
    NystromAccumulator,
    Variational,
    VariationalAccumulator,
)

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

__all__ = ["STRUCTURES", "Accumulator", "Projection", "Structure", "projected"]
