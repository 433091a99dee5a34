"""Rows: every operation that is timed, with its targets."""

from dataclasses import dataclass, replace

from benchmarks.operations import Case

N_CLASSES = 10
# Peak MiB over network and data, whatever the number of weights.
SMALL_PEAK = 150.0
# Factors of the 1,000-class head in float64, which stay: 512² + 1000², or 512·1000.
KRON_FACTORS, DIAG_FACTORS = 9.6, 3.9

UNITS = {
    "f_fit": "f",
    "f_predict": "f",
    "fb_fit": "fb",
    "train": "net.fit",
    "train_folds": "(5 net.fit)",
}


@dataclass(frozen=True)
class Row:
    """An operation and what it may cost."""

    case: Case
    name: str
    unit: str  # operation of plain torch that it is measured in
    limit: float | None = None  # largest multiple of the unit
    speedup: float | None = None  # smallest quotient of laplace-torch's time and ours
    memory: float | None = None  # largest peak, in MiB over network and data
    evaluations: int | None = None  # at most, of the evidence
    has_peer: bool = True  # laplace-torch can do the same
    is_heavy: bool = False  # left out of a quick run: large even at its smallest

    @property
    def title(self) -> str:
        """Workload, subset, structure and operation."""
        if self.case.workload == "digits":
            return f"digits {self.name}"
        return f"{self.case} {self.name}"

    def quick(self) -> "Row":
        """The same on tiny sizes, for which no target is meant."""
        case = replace(self.case, is_quick=True)
        return Row(case, self.name, self.unit, has_peer=self.has_peer)


def _fits(
    case: Case,
    unit: str,
    limit: float | None,
    speedup: float | None,
    memory: float | None = None,
    *,
    is_heavy: bool = False,
) -> list[Row]:
    """A fit and, where factors wait for the first question, a fit with them.

    laplace-torch factorises when it fits: that is what it is compared with.
    """
    if case.structure != "kron":
        return [Row(case, "fit", unit, limit, speedup, memory, is_heavy=is_heavy)]
    return [
        Row(case, "fit", unit, limit, None, memory, has_peer=False, is_heavy=is_heavy),
        Row(case, "fit_ready", unit, None, speedup, memory, is_heavy=is_heavy),
    ]


def _last_layer() -> list[Row]:
    rows = []
    speedups = {"kron": 75.0, "diag": 10.0, "full": 10.0}
    for structure, speedup in speedups.items():
        w2, w3, w4 = (
            Case(name, "last_layer", structure) for name in ("W2", "W3", "W4-256")
        )
        # a full fit is bound by its matrix products, not by passes
        limits = (None, None) if structure == "full" else (1.0, 1.1)
        rows += [
            *_fits(w2, "fb_fit", limits[0], 4, SMALL_PEAK),
            Row(w2, "predict", "f_predict", 2, speedup, SMALL_PEAK),
            *_fits(w3, "fb_fit", limits[0], None, SMALL_PEAK),
            Row(w3, "predict", "f_predict", 2, None, SMALL_PEAK),
            *_fits(w4, "f_fit", limits[1], 2),
            Row(w4, "predict", "f_predict", 1.1),
        ]
    return rows


def _many_classes() -> list[Row]:
    rows = []
    for structure, factors in (("kron", KRON_FACTORS), ("diag", DIAG_FACTORS)):
        case = Case("W5", "last_layer", structure)
        peak = 100 + factors
        rows += [
            *_fits(case, "f_fit", 6, None, peak),
            Row(case, "predict", "f_predict", 6, None, peak),
        ]
    return rows


def _all_weights() -> list[Row]:
    rows = []
    speedups = {("W2", "kron"): 240.0, ("W2", "diag"): 100.0}
    speedups |= {("W3", "kron"): 20.0, ("W3", "diag"): 20.0}
    for structure, share in (("kron", 0.7), ("diag", 0.6)):
        for name in ("W2", "W3", "W4-16"):
            case = Case(name, "all", structure)
            is_deep = name == "W4-16"
            per_class = 1.0 if is_deep and structure == "kron" else share
            fit_peak = None if is_deep else SMALL_PEAK
            fit_speedup = 1.9 if structure == "kron" else 2.0
            speedup = speedups.get((name, structure))
            limits = per_class * N_CLASSES, 2.0 * N_CLASSES
            rows += [
                *_fits(case, "fb_fit", limits[0], fit_speedup, fit_peak),
                Row(case, "predict", "f_predict", limits[1], speedup, SMALL_PEAK),
            ]
    wide = Case("W4", "all", "kron")
    return [*rows, *_fits(wide, "fb_fit", None, 1.9, 8 * 1024, is_heavy=True)]


def _full() -> list[Row]:
    classes, one = Case("W2-full", "all", "full"), Case("W1", "all", "full")
    return [
        Row(classes, "fit", "fb_fit", None, 4),
        Row(classes, "predict", "f_predict", None, 20),
        Row(one, "fit", "fb_fit", None, 1),
        Row(one, "predict", "f_predict", None, 1),
    ]


def _tuning() -> list[Row]:
    rows = []
    for case, speedup in (
        (Case("W2", "last_layer", "kron"), 95.0),
        (Case("W2", "all", "kron"), 30.0),
        (Case("W2-full", "all", "full"), 50.0),
    ):
        rows += [
            Row(case, "tune", "fb_fit", None, speedup, evaluations=10),
            Row(case, "fit_tune", "fb_fit"),
        ]
    return rows


def _training() -> list[Row]:
    case = Case("digits")
    return [
        Row(case, "train", "train", 1.05, has_peer=False),
        Row(case, "grid", "train_folds", 1.2, has_peer=False),
        Row(case, "bare_grid", "train_folds", None, has_peer=False),
        Row(case, "cross_validate", "train_folds", 1.2, has_peer=False),
    ]


ROWS = [
    *_last_layer(),
    *_many_classes(),
    *_all_weights(),
    *_full(),
    *_tuning(),
    *_training(),
]
