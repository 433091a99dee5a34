"""LaplaceOptions: constructor values, checked once and resolved.

Values are checked against the registries and each other before any training; what
depends on the layers of the network is checked as soon as they are known, with the
network still untrained.
"""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from inspect import signature
from itertools import zip_longest
from typing import Any, Literal

import numpy as np
import torch
from sklearn.base import is_classifier

from sklaplace.core.budget import KEPT_BUDGET, require_bytes
from sklaplace.core.checks import (
    check_batch_size,
    check_count,
    check_fraction,
    check_option,
    check_params,
    check_positive,
    check_seed,
    listed,
)
from sklaplace.curvature.ggn import CURVATURES, Curvature
from sklaplace.curvature.layout import BlockSpec, Layout
from sklaplace.curvature.priors import PRIOR_STRUCTURES
from sklaplace.curvature.structures import STRUCTURES, Accumulator
from sklaplace.curvature.subnetwork import SCORES
from sklaplace.curvature.subsets import CRITERION, SUBSETS
from sklaplace.estimators.options.given_net import check_net
from sklaplace.estimators.options.workers import check_workers
from sklaplace.estimators.predicting.glm_outputs import OUTPUT_MODELS
from sklaplace.likelihoods import (
    ClassificationLikelihood,
    Gaussian,
    RegressionLikelihood,
)
from sklaplace.posterior.gaussian import GaussianPosterior
from sklaplace.posterior.last_layer import refit_bytes
from sklaplace.posterior.residual import RESIDUALS, VARIANCE
from sklaplace.posterior.tuning import TUNERS

# Vectors of as many float64 numbers as weights, beside the structure: mean,
# eigenvalues, variances and what they are computed from.
WEIGHT_COPIES = 5


PARAMS = "subset_params", "structure_params", "curvature_params"


@dataclass(frozen=True)
class LaplaceOptions:
    """Constructor values of a Laplace approximation, checked.

    Attributes are those parameters of `LaplaceClassifier` and `LaplaceRegressor` that
    decide on training, curvature and tuning. ``refine`` is True, False or "auto";
    ``sigma_noise`` is one number, or the name of a tuner.
    """

    likelihood: Any
    subset_of_weights: str | list[str]
    subset_params: dict[str, Any]
    hessian_structure: str
    structure_params: dict[str, Any]
    curvature: str
    curvature_params: dict[str, Any]
    prior_precision: Any
    prior_structure: str
    prior_mean: Any
    prior: GaussianPosterior | None
    refine: bool | Literal["auto"]
    residual: Any
    temperature: float
    validation_fraction: float
    pred_type: str
    batch_size: int | None
    n_shards: int | None
    n_jobs: int | None
    distributed: bool
    sigma_noise: Any = 1.0

    @classmethod
    def of(cls, model: Any) -> "LaplaceOptions":
        """Return the options of an estimator; raises for values that are not valid."""
        check_common(model)
        check_count("n_samples", model.n_samples)
        _check_laplace(model)
        names = {field.name for field in fields(cls)} - {"sigma_noise"}
        values = {name: getattr(model, name) for name in names}
        for name in (*PARAMS, "subset_of_weights"):
            values[name] = copy.deepcopy(values[name] or {})
        # numpy's booleans are not True or False
        values["refine"] = "auto" if model.refine == "auto" else bool(model.refine)
        return cls(**values)

    @property
    def free_prior(self) -> bool:
        """Whether the prior precision is tuned."""
        return self.prior is None and isinstance(self.prior_precision, str)

    @property
    def free_noise(self) -> bool:
        """Whether the noise is tuned, if the likelihood has any."""
        return self.prior is None and isinstance(self.sigma_noise, str)

    @property
    def tuner(self) -> str | None:
        """Name of the tuner: the more specific one, where two are given; or None."""
        values = [self.prior_precision] * self.free_prior
        values += [self.sigma_noise] * self.free_noise
        return min(values, key=lambda name: name == "auto", default=None)

    def residual_variance(self, residual: Any) -> float:
        """Return the variance of a residual, zero where there is none."""
        is_on = self.free_prior and self.prior_precision == "auto"
        return {"auto": VARIANCE * is_on, "none": 0.0}.get(residual, residual)

    @property
    def noise_on_held_out(self) -> bool:
        """Whether noise is tuned on held-out samples where there are any."""
        return self.free_noise and self.sigma_noise != "marglik"

    @property
    def tunes_on_held_out(self) -> bool:
        """Whether held-out samples are used where there are any."""
        return self.tuner in ("auto", "validation") or self.noise_on_held_out

    @property
    def holds_out(self) -> bool:
        """Whether samples are held out from a net that does not do so itself."""
        is_marglik = self.free_prior and self.prior_precision == "marglik"
        only_if_there = is_marglik and self.sigma_noise != "validation"
        return self.tunes_on_held_out and not only_if_there

    @property
    def uses_folds(self) -> bool:
        """Whether folds are held out where samples are too few for anything else."""
        names = self.prior_precision, self.sigma_noise
        asks = any(isinstance(n, str) and n == "validation" for n in names)
        return self.tunes_on_held_out and not asks

    @property
    def may_refit(self) -> bool:
        """Whether the last layer may be refitted under the prior."""
        return self.refine is True or (self.refine == "auto" and self.tuner is not None)

    def refits(self, spec: Any, n_samples: int) -> bool:
        """Return whether a last layer may be refitted on so many samples.

        By default it is not on more samples than a fixed amount of memory takes.
        """
        if spec.head_map is None or not self.may_refit:
            return False
        needed = refit_bytes(spec.layout, n_samples, spec.n_outputs)
        return self.refine is True or needed <= KEPT_BUDGET

    def configured_curvature(self, seed: int) -> Curvature:
        """Return the curvature with its options."""
        return CURVATURES[self.curvature].configured(self.curvature_params, seed)

    def accumulator(self, layout: Layout) -> Accumulator:
        """Return an empty accumulator of the structure."""
        return STRUCTURES[self.hessian_structure][0](layout, **self.structure_params)

    def row_elements(self, spec: Any) -> int:
        """Return the float64 numbers that the structure computes for each sample."""
        kind, given = STRUCTURES[self.hessian_structure][0], self.structure_params
        return kind.row_elements(spec.layout, spec.n_outputs, **given)

    def curvature_settings(self) -> dict[str, Any]:
        """Return the options that decide which curvature is kept, and how."""
        names = "subset_of_weights", "hessian_structure", "curvature"
        return {name: getattr(self, name) for name in (*names, *PARAMS)}


def sibling(model: Any) -> str:
    """Return the name of the estimator for the other kind of targets."""
    name = type(model).__name__
    kinds = ("Classifier", "Regressor")
    own, other = kinds if is_classifier(model) else kinds[::-1]
    return name.replace(own, other) if own in name else f"Laplace{other}"


def check_common(model: Any) -> None:
    """Raise for parameters of all estimators that are not valid."""
    check_net(model)
    _check_likelihood(model)
    if not isinstance(model.verbose, (bool, np.bool_)):
        check_count("verbose", model.verbose, smallest=0)
    check_seed("random_state", model.random_state)
    check_batch_size(model.batch_size)


def _check_laplace(model: Any) -> None:
    """Raise for parameters of a Laplace approximation that are not valid."""
    registries: dict[str, Iterable[str]] = {
        "hessian_structure": STRUCTURES,
        "curvature": CURVATURES,
        "prior_structure": PRIOR_STRUCTURES,
        "pred_type": OUTPUT_MODELS,
    }
    for name, registry in registries.items():
        check_option(name, getattr(model, name), registry)
    check_positive("residual", model.residual, RESIDUALS)
    check_subset(model.subset_of_weights, model.subset_params)
    _check_params(model)
    check_workers(model.n_jobs, model.n_shards, model.distributed, model.memory)
    _check_prior(model)
    _check_earlier(model)
    check_positive("temperature", model.temperature)
    _check_refine(model)
    check_fraction(
        "validation_fraction",
        model.validation_fraction,
        "Choose a share of the rows, such as 0.2.",
    )


def _check_likelihood(model: Any) -> None:
    """Raise for a likelihood that lacks methods, or is of the other kind of targets."""
    given = model.likelihood
    if given is None:
        return
    has_labels = is_classifier(model)
    protocol: Any = ClassificationLikelihood if has_labels else RegressionLikelihood
    names = {name for kind in protocol.__mro__ for name in _members(kind)}
    missing = sorted(name for name in names if not hasattr(given, name))
    if isinstance(given, type) or missing:
        lacks = f"; it lacks {listed(missing[:5])}" if missing else ""
        raise TypeError(
            f"likelihood={given!r} is no likelihood{lacks}. Pass an instance of a "
            f"class derived from sklaplace.likelihoods.{protocol.__name__}, or None "
            "for that of the criterion."
        )
    if given.has_noise and not isinstance(given, Gaussian):
        raise ValueError(
            f"likelihood={given!r} has has_noise=True, but only normal noise can be "
            "chosen here. Keep has_noise=False, and the noise within the likelihood."
        )
    if has_labels != given.is_classification:
        raise ValueError(
            f"likelihood={given!r} has targets of another kind. Use {sibling(model)}."
        )


def _members(kind: type) -> set[str]:
    """Return the public names of a class."""
    found = {*vars(kind), *vars(kind).get("__annotations__", {})}
    return {name for name in found if not name.startswith("_")}


def check_subset(subset: Any, params: Any, known: Mapping[str, Any] = SUBSETS) -> None:
    """Raise for what is neither a key of the registry nor a list of names."""
    if isinstance(subset, (list, tuple)):
        if not subset or not all(isinstance(name, str) for name in subset):
            raise ValueError(
                f"subset_of_weights={subset!r} is not a list of names. Use names of "
                "parameters or modules, as in module.named_parameters(), or one of "
                f"{listed(known)}."
            )
        check_params("subset_params", params, {}, "a list of names")
        return
    check_option("subset_of_weights", subset, known)
    of, checks = f"subset_of_weights={subset!r}", known[subset].checks
    given = params if isinstance(params, Mapping) else {}
    if "by" in checks:
        by = given.get("by", CRITERION)
        check_option("subset_params['by']", by, SCORES)
        of, checks = f"{of} with by={by!r}", {**checks, **SCORES[by].checks}
    check_params("subset_params", params, checks, of)
    if "indices" in given and len(given) > 1:
        raise ValueError(
            "subset_params has 'indices' and others, which they make void. Leave out "
            f"{listed(set(given) - {'indices'})}, or the indices."
        )


def _check_params(model: Any) -> None:
    """Raise for options of structure and curvature, or a pair, that are not valid."""
    accumulator, _ = STRUCTURES[model.hessian_structure]
    curvature = CURVATURES[model.curvature]
    of = f"hessian_structure={model.hessian_structure!r}"
    check_params("structure_params", model.structure_params, accumulator.checks, of)
    of = f"curvature={model.curvature!r}"
    check_params("curvature_params", model.curvature_params, curvature.checks, of)
    if curvature.is_exact and not accumulator.takes_matrices:
        able = [name for name, (kind, _) in STRUCTURES.items() if kind.takes_matrices]
        raise ValueError(
            f"curvature={model.curvature!r} cannot be used with hessian_structure="
            f"{model.hessian_structure!r}. Choose hessian_structure={listed(able)}, or "
            "curvature='ggn'."
        )


def check_prior_structure(prior_structure: str, hessian_structure: str) -> None:
    """Raise for a prior that the structure of the Hessian does not support."""
    _, structure = STRUCTURES[hessian_structure]
    if prior_structure not in structure.priors:
        raise ValueError(
            f"prior_structure={prior_structure!r} cannot be used with "
            f"hessian_structure={hessian_structure!r}. Choose one of "
            f"{listed(structure.priors)}, or another hessian_structure."
        )


def _check_prior(model: Any) -> None:
    check_prior_structure(model.prior_structure, model.hessian_structure)
    check_positive("prior_precision", model.prior_precision, TUNERS, scalar=False)
    try:
        mean = np.asarray(model.prior_mean, dtype=float)
    except (TypeError, ValueError):
        mean = np.array(np.nan)
    if not np.isfinite(mean).all():
        raise ValueError(
            f"prior_mean={model.prior_mean!r} is not finite. Use one number, or one "
            "per selected weight."
        )


def _check_earlier(model: Any) -> None:
    """Raise for an earlier posterior that does not match the other parameters."""
    earlier = model.prior
    if earlier is None:
        return
    check_posterior("prior", earlier)
    defaults = signature(type(model)).parameters
    names = "prior_precision", "prior_structure", "prior_mean"
    plain = {name: defaults[name].default for name in names}
    given = [k for k, v in plain.items() if not np.array_equal(getattr(model, k), v)]
    if given:
        raise ValueError(
            f"{listed(given)} and prior are both given, but an earlier posterior "
            "replaces them. Leave one of them out."
        )
    if not isinstance(model.refine, str) and model.refine:
        raise ValueError(
            "refine=True cannot be used with prior. Train the network with the "
            "callback PriorTraining, or use refine='auto'."
        )
    _check_earlier_structure(model, earlier)
    if model.subset_of_weights == "subnetwork" and (
        "indices" not in (model.subset_params or {})
    ):
        raise ValueError(
            "subset_of_weights='subnetwork' would choose other weights than those of "
            "prior. Give them as subset_params={'indices': ...}."
        )


def check_posterior(name: str, value: Any) -> None:
    """Raise for what is no posterior."""
    if not isinstance(value, GaussianPosterior):
        raise TypeError(
            f"{name} is of type {type(value).__name__}. Pass the posterior_ of an "
            "estimator that was fitted to an earlier task."
        )


def _check_earlier_structure(model: Any, earlier: GaussianPosterior) -> None:
    """Raise for structures whose curvatures are not additive."""
    name, kind = model.hessian_structure, earlier.structure.kind
    adding = [k for k, (_, structure) in STRUCTURES.items() if structure.is_additive]
    if name not in adding:
        raise ValueError(
            f"hessian_structure={name!r} cannot be used with prior: truncated "
            "curvatures, and those of a few points alone, do not add up. Choose one "
            f"of {listed(adding)}."
        )
    if kind != name:
        raise ValueError(
            f"hessian_structure={name!r}, but prior has {kind!r}. Use the same for "
            "all tasks."
        )


def check_earlier_layout(
    earlier: GaussianPosterior | None, layout: Layout, name: str = "prior"
) -> None:
    """Raise for an earlier posterior over other weights, naming the first."""
    if earlier is None:
        return
    blocks = earlier.layout.blocks
    for old, new in zip_longest(blocks, layout.blocks):
        if old is None or new is None or not _are_same_weights(old, new):
            raise ValueError(
                f"{name} is over other weights: it has {_shown_block(old)} where the "
                f"selected subset has {_shown_block(new)}. Use the posterior_ of a "
                "network with the same layers, and the same subset_of_weights."
            )


def _are_same_weights(old: BlockSpec, new: BlockSpec) -> bool:
    if old.indices is None or new.indices is None:
        return old == new and old.indices is new.indices
    return old == new and torch.equal(old.indices.cpu(), new.indices.cpu())


def _shown_block(block: BlockSpec | None) -> str:
    if block is None:
        return "none"
    part = "" if block.indices is None else f"{block.size} weights of "
    return f"{part}{block.name!r} {block.shape}"


def _check_refine(model: Any) -> None:
    value = model.refine
    is_flag = isinstance(value, (bool, np.bool_))
    if not is_flag and not (isinstance(value, str) and value == "auto"):
        raise ValueError(
            f"refine={value!r} is not known. Choose True, False or 'auto'."
        )


def check_shapes(model: Any, layout: Layout) -> None:
    """Raise for a prior whose shapes do not match the layers."""
    check_prior_shape(model.prior_precision, model.prior_structure, layout)
    p = layout.n_parameters
    if np.shape(model.prior_mean) not in ((), (p,)):
        raise ValueError(
            f"prior_mean has shape {np.shape(model.prior_mean)}. Use one number, or "
            f"one per selected weight: shape ({p},)."
        )


def check_structure_bytes(
    model: Any, layout: Layout, device: torch.device, n_rows: int, n_columns: int
) -> None:
    """Raise if the structure of the Hessian does not fit into memory.

    ``n_rows`` is that of the Jacobian of the training data, ``n_columns`` the number of
    outputs of each sample.
    """
    p = layout.n_parameters
    name = model.hessian_structure
    accumulator, _ = STRUCTURES[name]
    cheaper = {"diag": "use fewer weights", "kron": "use 'diag'"}
    advice = cheaper.get(name, "use 'kron' or 'diag'")
    if model.subset_of_weights != "last_layer":
        advice += ", or subset_of_weights='last_layer'"
    # the exact Hessian is computed as a matrix
    n = None if CURVATURES[model.curvature].is_exact else n_rows
    options = model.structure_params or {}
    needed = accumulator.n_bytes(layout, n, n_columns=n_columns, **options)
    subject = f"hessian_structure={name!r} over {p:,} parameters"
    require_bytes(needed + 8 * WEIGHT_COPIES * p, device, subject, advice)


def check_prior_shape(value: Any, prior_structure: str, layout: Layout) -> None:
    """Raise for a prior precision whose shape is not that of its structure."""
    expected = PRIOR_STRUCTURES[prior_structure](layout)
    shape = np.shape(value)
    if isinstance(value, str) or shape in ((), expected):
        return
    fitting = [k for k, size in PRIOR_STRUCTURES.items() if size(layout) == shape]
    wanted = f"one number or shape {expected}" if expected else "one number"
    hint = f" This shape fits prior_structure={fitting[0]!r}." if fitting else ""
    raise ValueError(
        f"prior_precision has shape {shape}, but prior_structure={prior_structure!r} "
        f"needs {wanted}. The selected subset has {len(layout.blocks)} parameter "
        f"tensors with {layout.n_parameters:,} weights.{hint}"
    )
