"""LaplaceOptions: constructor parameters, checked and resolved.

`LaplaceParameters` declares the valid values of each parameter. This module checks
combinations of values before training. Checks that depend on the layers of the network
run as soon as these layers are known, but still before training.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from sklaplace.core.budget import KEPT_BUDGET, require_bytes
from sklaplace.core.checks import check_option, check_params, listed, plain
from sklaplace.curvature.ggn import CURVATURES, Curvature
from sklaplace.curvature.layout import BlockSpec, Layout
from sklaplace.curvature.network import NetworkSpec
from sklaplace.curvature.priors import PRIOR_STRUCTURES, group_indices, structure_name
from sklaplace.curvature.structures import STRUCTURES, Accumulator
from sklaplace.curvature.subnetwork import SCORE_CHECKS, SCORES
from sklaplace.curvature.subsets import CRITERION, SUBSET_CHECKS, SUBSETS
from sklaplace.data.dataset import Batches
from sklaplace.data.streams import Samples
from sklaplace.estimators.options.parameters import LaplaceParameters
from sklaplace.likelihoods import (
    ClassificationLikelihood,
    Gaussian,
    Likelihood,
    RegressionLikelihood,
)
from sklaplace.networks.trained import TrainedNetwork
from sklaplace.novelty.residual import VARIANCE
from sklaplace.posterior.gaussian import GaussianPosterior
from sklaplace.posterior.last_layer import refit_bytes

# Number of float64 vectors with one entry per weight, in addition to the curvature:
# mean, eigenvalues, variances and intermediate results.
WEIGHT_COPIES = 5

PARAMS = "subset_params", "structure_params", "curvature_params"
# Largest difference between a prior precision matrix and its transpose, as a fraction
# of the largest entry.
ASYMMETRY = 1e-6
# an earlier posterior replaces these parameters, which must have default values
REPLACED = "prior_precision", "prior_structure", "prior_mean"


@dataclass(eq=False, kw_only=True)
class LaplaceOptions(LaplaceParameters):
    """Validated constructor parameters of a Laplace approximation.

    The parameters ``..._params`` are mappings, ``refine`` is True, False or "auto", and
    ``sigma_noise`` is the name of a tuner, or a number in the units of the likelihood.
    ``seed`` is the seed of random curvatures.
    """

    likelihood: Likelihood | None = None
    batch_size: int | None = None
    sigma_noise: str | float = 1.0
    seed: int = 0

    @classmethod
    def of(
        cls, values: Mapping[str, Any], defaults: Mapping[str, ArrayLike]
    ) -> "LaplaceOptions":
        """Return the options, or raise an error for incompatible values.

        Parameters
        ----------
        values : mapping
            Values of all attributes except ``sigma_noise`` and ``seed``, each valid
            under its constraint.
        defaults : mapping
            Default values of the parameters that an earlier posterior replaces.
        """
        # copies do not change if the user changes a dict or list after fit
        copied = {k: copy.deepcopy(values[k] or {}) for k in PARAMS}
        subset = copy.deepcopy(values["subset_of_weights"])
        # NumPy booleans are not identical to True and False
        refine = "auto" if values["refine"] == "auto" else bool(values["refine"])
        resolved = {**values, **copied, "subset_of_weights": subset, "refine": refine}
        options = cls(**plain(resolved))
        check_subset(options.subset_of_weights, options.subset_params)
        options.check_structure()
        if options.prior is not None:
            options.check_prior(defaults)
        return options

    def check_structure(self) -> None:
        """Raise an error if structure and curvature are invalid or incompatible.

        A name of a structure stands for two classes: the accumulator sums the curvature
        over batches, and the structure is its decomposition. Each ``checks`` has a
        function for the value of each option.
        """
        accumulator, structure = STRUCTURES[self.hessian_structure]
        params, curvature = self.structure_params, CURVATURES[self.curvature]
        owner = f"hessian_structure={self.hessian_structure!r}"
        check_params("structure_params", params, accumulator.checks, owner)
        if structure_name(self.prior_structure) not in structure.priors:
            raise ValueError(
                f"prior_structure={self.prior_structure!r} cannot be used with "
                f"{owner}. Choose one of {listed(structure.priors)}, or another "
                "hessian_structure."
            )
        owner = f"curvature={self.curvature!r}"
        check_params("curvature_params", self.curvature_params, curvature.checks, owner)
        # an exact Hessian is a matrix, not a sum of products of Jacobian rows
        if self.is_exact and not accumulator.takes_matrices:
            able = [k for k, (kind, _) in STRUCTURES.items() if kind.takes_matrices]
            raise ValueError(
                f"{owner} cannot be used with hessian_structure="
                f"{self.hessian_structure!r}. Choose hessian_structure={listed(able)}, "
                "or curvature='ggn'."
            )

    def check_prior(self, defaults: Mapping[str, ArrayLike]) -> None:
        """Raise an error if parameters conflict with an earlier posterior or matrix.

        ``prior`` is an earlier posterior, or a prior precision matrix. ``defaults``
        contains the default values of the parameters that it replaces. These must be
        unchanged, so that users see which value counts.
        """
        earlier = self.prior if isinstance(self.prior, GaussianPosterior) else None
        kind_of_prior = "an earlier posterior" if earlier else "a matrix"
        # a matrix replaces the precision, but not the mean
        replaced = [
            name
            for name, default in defaults.items()
            if (earlier or name != "prior_mean")
            and not np.array_equal(getattr(self, name), default)
        ]
        if replaced:
            raise ValueError(
                f"{listed(replaced)} and prior are both given, but {kind_of_prior} "
                "replaces the former. Leave one of them out."
            )
        if self.refine is True:
            # the callback requires a posterior, to which fit converts a matrix
            argument = "prior" if earlier else "posterior_.earlier"
            raise ValueError(
                "refine=True cannot be used with prior. Train the network with the "
                f"callback PriorTraining({argument}), or use refine='auto'."
            )
        chosen = self.hessian_structure
        # the precision of an earlier posterior is added to the curvature, which only
        # these structures support
        additive = [
            k for k, (_, structure) in STRUCTURES.items() if structure.is_additive
        ]
        if not earlier and chosen != "full":
            raise ValueError(
                f"hessian_structure={chosen!r} does not support a prior precision "
                "matrix. Use hessian_structure='full'."
            )
        if earlier and (chosen not in additive or chosen != earlier.structure.name):
            raise ValueError(
                f"hessian_structure={chosen!r} cannot be used with a prior of "
                f"structure {earlier.structure.name!r}. Use one of {listed(additive)} "
                "for all tasks."
            )
        # the posterior or matrix belongs to certain weights, known before training
        if self.selects_weights:
            raise ValueError(
                "subset_of_weights='subnetwork' may select other weights than prior's. "
                "Pass their indices as subset_params={'indices': ...}."
            )

    @property
    def selects_weights(self) -> bool:
        """Whether individual weights are selected after training."""
        # a list of names never equals a string
        is_subnetwork = self.subset_of_weights == "subnetwork"
        return is_subnetwork and "indices" not in self.subset_params

    @property
    def is_exact(self) -> bool:
        """Whether the curvature is the exact Hessian matrix."""
        return CURVATURES[self.curvature].is_exact

    @property
    def free_prior(self) -> bool:
        """Whether the prior precision is tuned."""
        return self.prior is None and isinstance(self.prior_precision, str)

    @property
    def free_noise(self) -> bool:
        """Whether the noise level is tuned, if the likelihood has a noise level."""
        return self.prior is None and isinstance(self.sigma_noise, str)

    @property
    def tuner(self) -> str | None:
        """Name of the tuner, or None. An explicit name overrides ``'auto'``.

        Either hyperparameter can name the tuner. With ``prior``, nothing is tuned.
        """
        values = [self.prior_precision, self.sigma_noise]
        names = [v for v in values if isinstance(v, str) and self.prior is None]
        # False sorts before True, so explicit names come first
        return min(names, key=lambda name: name == "auto", default=None)

    @property
    def residual_variance(self) -> float:
        """Variance of the residual, or zero if there is no residual."""
        if not isinstance(self.residual, str):
            return float(np.asarray(self.residual).item())
        return VARIANCE if self.residual == "auto" and self.prior is None else 0.0

    @property
    def maximises_evidence(self) -> bool:
        """Whether the prior precision maximises the evidence."""
        return self.free_prior and self.tuner == "marglik"

    @property
    def noise_on_held_out(self) -> bool:
        """Whether the noise level is tuned on any available held-out samples."""
        return self.free_noise and self.sigma_noise != "marglik"

    @property
    def tunes_on_held_out(self) -> bool:
        """Whether tuning uses any available held-out samples."""
        return self.tuner not in (None, "marglik") or self.noise_on_held_out

    @property
    def uses_held_out(self) -> bool:
        """Whether held-out samples are used if the net or the user provides them.

        Without tuning, they choose between the trained and the refitted last layer, and
        the steepness of the residual (how fast this extra variance grows far from the
        data). With the evidence, they show whether maximising it harms predictions.
        """
        chooses_refit = self.refine == "auto" and self.prior is None
        has_residual = self.residual_variance > 0
        tunes = self.tunes_on_held_out or self.maximises_evidence
        return tunes or chooses_refit or has_residual

    @property
    def holds_out(self) -> bool:
        """Whether to hold out samples if the net itself does not hold out any.

        With the evidence, the noise is tuned on held-out samples only if there are any,
        unless it is to be tuned by validation.
        """
        needs_none = self.maximises_evidence and self.sigma_noise != "validation"
        return self.tunes_on_held_out and not needs_none

    @property
    def uses_folds(self) -> bool:
        """Whether to use folds if there are too few samples to hold some out.

        ``"validation"`` asks for one set of held-out samples.
        """
        is_single_set = "validation" in (self.tuner, self.sigma_noise)
        return self.tunes_on_held_out and not is_single_set

    @property
    def may_refit(self) -> bool:
        """Whether the last layer may be refitted under the prior."""
        return self.refine is True or (self.refine == "auto" and self.prior is None)

    def refits(self, spec: NetworkSpec, n_samples: int) -> bool:
        """Return whether the last layer may be refitted on ``n_samples`` samples.

        A refit needs ``head_map``, the derivative of the network's outputs with respect
        to those of the last layer. It is None unless all samples share it and the loss
        is convex. Unless ``refine`` is True, the refit must fit into a fixed amount of
        memory.
        """
        if spec.head_map is None or not self.may_refit:
            return False
        needed = refit_bytes(spec.layout, n_samples, spec.n_outputs)
        return self.refine is True or needed <= KEPT_BUDGET

    @property
    def configured_curvature(self) -> Curvature:
        """The curvature, configured with its options and the seed."""
        return CURVATURES[self.curvature].configured(self.curvature_params, self.seed)

    def accumulator(self, layout: Layout) -> Accumulator:
        """Return an empty accumulator for the Hessian structure."""
        return STRUCTURES[self.hessian_structure][0](layout, **self.structure_params)

    def row_elements(self, spec: NetworkSpec) -> int:
        """Return how many float64 values the structure stores per sample of a batch."""
        kind, params = STRUCTURES[self.hessian_structure][0], self.structure_params
        return kind.row_elements(spec.layout, spec.n_outputs, **params)

    def batches(
        self,
        network: TrainedNetwork,
        dataset: Samples,
        *,
        with_covariance: bool = False,
    ) -> Batches:
        """Return batches of a dataset for the passes of a fit.

        Without a given ``batch_size``, the memory per sample determines the size:
        ``row_elements`` numbers of the structure and, ``with_covariance``, a covariance
        of the outputs.
        """
        return network.batches(
            dataset,
            self.batch_size,
            row_elements=self.row_elements(network.spec),
            with_covariance=with_covariance,
        )

    def check_bytes(self, spec: NetworkSpec, device: torch.device, n: int) -> None:
        """Raise ValueError if the structure for n samples does not fit into memory.

        The required memory also includes `WEIGHT_COPIES` vectors of all P weights. The
        message advises on what takes less memory.
        """
        name, p = self.hessian_structure, spec.layout.n_parameters
        accumulator, _ = STRUCTURES[name]
        # with few Jacobian rows (one per sample and output), "full" can store them
        # instead of a matrix (P, P), but an exact Hessian or a prior matrix is one
        is_dense = self.is_exact or not isinstance(self.prior, GaussianPosterior | None)
        n_rows = None if is_dense else n * spec.n_outputs
        options = {"n_columns": spec.n_outputs, **self.structure_params}
        needed = accumulator.n_bytes(spec.layout, n_rows, **options)
        cheaper = {"diag": "use fewer weights", "kron": "use 'diag'"}
        advice = cheaper.get(name, "use 'kron' or 'diag'")
        if self.subset_of_weights != "last_layer":
            advice += ", or subset_of_weights='last_layer'"
        subject = f"hessian_structure={name!r} over {p:,} parameters"
        # eight bytes per float64 number
        require_bytes(needed + 8 * WEIGHT_COPIES * p, device, subject, advice)

    def curvature_settings(self) -> dict[str, Any]:
        """Return the options that determine the weights, structure and curvature."""
        names = "subset_of_weights", "hessian_structure", "curvature"
        return {name: getattr(self, name) for name in (*names, *PARAMS)}


def sibling(name: str, is_classifier: bool) -> str:
    """Return the name of the estimator for the other kind of targets.

    For a name with neither "Classifier" nor "Regressor", such as that of a ranker,
    return the name of a Laplace estimator.
    """
    suffixes = ("Classifier", "Regressor")
    suffix, other = suffixes if is_classifier else suffixes[::-1]
    return name.replace(suffix, other) if suffix in name else f"Laplace{other}"


def check_likelihood(given: Any, is_classification: bool, other: str) -> None:
    """Raise an error for the wrong class of likelihood, or noise that is not normal.

    ``given`` is the parameter of the estimator; None stands for the likelihood of the
    criterion. ``other`` is the name of the estimator for the other kind of targets.
    """
    base = ClassificationLikelihood if is_classification else RegressionLikelihood
    if given is not None and not isinstance(given, base):
        raise TypeError(
            f"likelihood={given!r} is not an instance of a subclass of "
            f"sklaplace.likelihoods.{base.__name__}. Pass an instance, or None for the "
            f"likelihood of the criterion, or use {other}."
        )
    if given is not None and given.has_noise and not isinstance(given, Gaussian):
        raise ValueError(
            f"likelihood={given!r} has has_noise=True, but only normal noise can be "
            "estimated. Set has_noise=False, and fix the noise within the likelihood."
        )


def check_subset(subset: str | list[str], params: Mapping[str, Any]) -> None:
    """Raise an error for list entries that are not names, or for invalid options.

    ``params`` are the options of a subset, which depend on its name. Each criterion
    ``by`` that selects a subnetwork adds options of its own.
    """
    if not isinstance(subset, str):
        # an empty list would select nothing
        if not subset or not all(isinstance(name, str) for name in subset):
            raise ValueError(
                f"subset_of_weights={subset!r} is not a list of names. Use names of "
                "parameters or modules, as in module.named_parameters(), or one of "
                f"{listed(SUBSETS)}."
            )
        check_params("subset_params", params, {}, "a list of names")  # accepts none
        return
    owner, checks = f"subset_of_weights={subset!r}", SUBSET_CHECKS.get(subset, {})
    if "by" in checks:  # only a subnetwork has a criterion
        by = params.get("by", CRITERION)
        check_option("subset_params['by']", by, SCORES)
        owner += f" with by={by!r}"
        checks = {**checks, **SCORE_CHECKS.get(by, {})}
    check_params("subset_params", params, checks, owner)
    if "indices" in params and len(params) > 1:
        raise ValueError(
            "subset_params has 'indices', so the other options have no effect. Leave "
            f"out {listed(set(params) - {'indices'})}, or the indices."
        )


def check_earlier_layout(earlier: GaussianPosterior, layout: Layout) -> None:
    """Raise ValueError if an earlier posterior does not cover the selected weights.

    The blocks of a layout are its parameter tensors, with names and shapes. They are
    compared in pairs; the message shows the first pair that differs.
    """
    # if one layout has more blocks, None stands for each missing block of the other
    for old, new in zip_longest(earlier.layout.blocks, layout.blocks):
        # `!=` between blocks leaves out the indices of selected weights
        if old != new or _indices(old) != _indices(new):
            before, now = (
                f"{b.size} weights of {b.name!r} {b.shape}" if b else "none"
                for b in (old, new)
            )
            raise ValueError(
                f"prior covers other weights: it has {before}, but the selected subset "
                f"has {now}. Use the same layers and subset_of_weights."
            )


def check_prior_matrix(matrix: ArrayLike, layout: Layout) -> None:
    """Raise ValueError if a matrix is not a precision matrix of the weights.

    Such a matrix has the shape (P, P) for P weights, and is symmetric and positive
    definite.
    """
    values, p = torch.tensor(np.asarray(matrix, dtype=float)), layout.n_parameters
    if values.shape != (p, p):
        problem = f"has shape {tuple(values.shape)}"
    elif (values - values.T).abs().max() > ASYMMETRY * values.abs().max():
        problem = "is not symmetric"
    elif torch.linalg.cholesky_ex(values).info:  # not zero if it has no factor
        problem = "is not positive definite"
    else:
        return
    raise ValueError(
        f"prior is a matrix that {problem}. Pass the inverse of the prior covariance "
        f"of the {p:,} selected weights, of shape ({p}, {p}), in the order of "
        "posterior_.mean."
    )


def _indices(block: BlockSpec) -> list[int] | None:
    return None if block.indices is None else block.indices.tolist()


def check_prior_shape(
    value: str | ArrayLike, prior_structure: str | Sequence[str], layout: Layout
) -> None:
    """Raise ValueError if the prior precision has the wrong shape for its structure.

    A number, an array with one entry and the name of a tuner suit all structures. The
    message names a structure for the given shape, if there is one.
    """
    groups = group_indices(prior_structure, layout)  # None unless a list of groups
    # each entry of `PRIOR_STRUCTURES` is a function from a layout to a shape
    shape_of_name = PRIOR_STRUCTURES[structure_name(prior_structure)](layout)
    # a list has one precision per group
    expected = shape_of_name if groups is None else (len(prior_structure),)
    shape = np.shape(value)
    if isinstance(value, str) or shape in ((), (1,), expected):
        return
    # the structures for which the given shape would be right
    fitting = [k for k, size in PRIOR_STRUCTURES.items() if size(layout) == shape]
    wanted = f"one number or shape {expected}" if expected else "one number"
    hint = f" This shape fits prior_structure={fitting[0]!r}." if fitting else ""
    if shape == 2 * (layout.n_parameters,):  # a matrix (P, P)
        hint = " Pass a prior precision matrix as prior=."
    raise ValueError(
        f"prior_precision has shape {shape}, but prior_structure={prior_structure!r} "
        f"needs {wanted}. The selected subset has {len(layout.blocks)} parameter "
        f"tensors with {layout.n_parameters:,} weights.{hint}"
    )
