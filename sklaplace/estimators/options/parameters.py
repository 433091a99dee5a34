"""LaplaceParameters: constructor parameters of the Laplace estimators."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sklaplace.curvature.ggn import CURVATURES
from sklaplace.curvature.priors import PRIOR_STRUCTURES
from sklaplace.curvature.structures import STRUCTURES
from sklaplace.curvature.subsets import SUBSETS
from sklaplace.estimators.options.constraints import (
    COUNT,
    FRACTION,
    MATRIX,
    POSITIVE,
    POSITIVE_ARRAY,
    WORKERS,
    Finite,
    one_of,
    option,
)
from sklaplace.estimators.predicting.glm_outputs import OUTPUT_MODELS
from sklaplace.novelty.residual import RESIDUALS
from sklaplace.posterior.gaussian import GaussianPosterior
from sklaplace.posterior.tuning import TUNERS


@dataclass(eq=False, repr=False, kw_only=True)
class LaplaceParameters:
    """Parameters of a Laplace approximation, with default values and constraints."""

    subset_of_weights: Any = option("last_layer", one_of(SUBSETS.keys()), list, tuple)
    subset_params: Any = option(None, Mapping, None)
    hessian_structure: str = option("kron", one_of(STRUCTURES.keys()))
    structure_params: Any = option(None, Mapping, None)
    curvature: str = option("ggn", one_of(CURVATURES.keys()))
    curvature_params: Any = option(None, Mapping, None)
    # a matrix raises an error that suggests ``prior``
    prior_precision: Any = option("auto", one_of(TUNERS.keys()), POSITIVE_ARRAY, MATRIX)
    prior_structure: Any = option(
        "scalar", one_of(PRIOR_STRUCTURES.keys()), list, tuple
    )
    prior_mean: Any = option(0.0, Finite("a finite number or array"))
    prior: Any = option(None, GaussianPosterior, MATRIX, None)
    refine: Any = option("auto", "boolean", one_of({"auto"}))
    residual: Any = option("auto", one_of(set(RESIDUALS)), POSITIVE)
    temperature: float = option(1.0, POSITIVE)
    validation_fraction: float = option(0.2, FRACTION)
    pred_type: str = option("glm", one_of(OUTPUT_MODELS.keys()))
    n_samples: int = option(100, COUNT)
    n_jobs: int | None = option(None, *WORKERS)
