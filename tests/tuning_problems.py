"""Posteriors over a last layer with enough rows for tuning."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import contracts
import torch
from cases import CASES, DOUBLE, Case, generator, normal
from contracts import accumulate
from references import LIKELIHOODS
from torch import Tensor

from sklaplace.core.trees import tree_rows
from sklaplace.curvature.ggn import CURVATURES
from sklaplace.curvature.jacobian import backpropagate
from sklaplace.curvature.layout import Layout
from sklaplace.curvature.priors import PRIOR_STRUCTURES
from sklaplace.curvature.structures import STRUCTURES
from sklaplace.curvature.subsets import SUBSETS, common_layer_jacobian
from sklaplace.likelihoods import (
    CategoricalMap,
    HeteroscedasticGaussian,
    Likelihood,
    MultilabelBernoulli,
    Poisson,
)
from sklaplace.networks.forward import Forward
from sklaplace.posterior.gaussian import GaussianPosterior
from sklaplace.posterior.last_layer import LastLayerModel, LastLayerRecorder
from sklaplace.posterior.tuning.problem import (
    HeldOutScore,
    LinearisedBatch,
    TuningProblem,
)

N_ROWS = 60

WIDTHS = {
    "Categorical": 3,
    "Bernoulli": 1,
    "MultilabelBernoulli": 2,
    "CategoricalMap": 4,
    "Gaussian": 2,
    "Poisson": 2,
    "HeteroscedasticGaussian": 2,
}


@dataclass(frozen=True)
class Fitted:
    """A network with a posterior over the last layer or all weights."""

    forward: Forward
    x: Any
    y: Tensor
    weights: Tensor | None
    layout: Layout
    likelihood: Likelihood
    posterior: GaussianPosterior
    linear_model: LastLayerModel | None


DRAWN = HeteroscedasticGaussian | Poisson | MultilabelBernoulli | CategoricalMap


def sampled_targets(likelihood: Likelihood, f: Tensor, seed: int) -> Tensor:
    """Return noisy targets that depend on the outputs."""
    if isinstance(likelihood, DRAWN):
        u = torch.rand(*f.shape, dtype=DOUBLE, generator=generator(seed))
        return likelihood.draw(0.7 * f, u[:, : likelihood.n_draws(f.shape[1])])
    if likelihood.has_noise:
        return 0.7 * f + 0.5 * normal(*f.shape, seed=seed)
    p = likelihood.probabilities(f)
    # draws by torch.multinomial differ between its releases
    u = torch.rand(len(p), 1, dtype=DOUBLE, generator=generator(seed))
    y = (u > p.cumsum(1)[:, :-1]).sum(1, keepdim=True)
    return likelihood.targets(y, f)


def fit(
    likelihood: str = "Categorical",
    structure: str = "kron",
    prior: str = "scalar",
    *,
    case: str | Case = "mlp",
    subset: str = "last_layer",
    weights: Tensor | None = None,
    take: Tensor | None = None,
    curvature: str = "ggn",
    **hyperparameters: float | Tensor,
) -> Fitted:
    """Accumulate the curvature of ``N_ROWS`` rows, or of selected rows."""
    case = CASES[case] if isinstance(case, str) else case
    known, forward = LIKELIHOODS[likelihood], case.forward(WIDTHS[likelihood])
    x = case.rows(N_ROWS)
    y = sampled_targets(known, forward(x).detach(), seed=40)
    if take is not None:
        x, y = tree_rows(x, take), y[take]
    layout = SUBSETS[subset](forward, tree_rows(x, slice(4)))
    accumulator = STRUCTURES[structure][0](layout)
    recorder = LastLayerRecorder(head_map(forward, x, layout))
    batches = [
        (tree_rows(x, cut), y[cut], None if weights is None else weights[cut])
        for cut in (slice(0, 25), slice(25, None))
    ]
    kind = CURVATURES[curvature]
    data_fit = accumulate(forward, batches, known, kind, accumulator, recorder.add)
    network = layout.read(forward.module)
    values = contracts.hyperparameters(**{"sigma_noise": 0.7} | hyperparameters)
    delta = values.prior_precision.expand(PRIOR_STRUCTURES[prior](layout)).clone()
    posterior = GaussianPosterior(
        mean=network,
        weights=network,
        structure=accumulator.decompose(),
        layout=layout,
        likelihood=known,
        data_fit=data_fit,
        hyperparameters=replace(values, prior_precision=delta),
        curvature_order=kind.order,
    )
    model = recorder.build(posterior, kind, STRUCTURES[structure][0])
    return Fitted(forward, x, y, weights, layout, known, posterior, model)


def head_map(forward: Forward, x: Any, layout: Layout) -> Tensor | None:
    """Return the result of an inspection on a few rows."""
    _, jacobian = backpropagate(forward, tree_rows(x, slice(4)), layout)
    return common_layer_jacobian(layout, jacobian)


@dataclass(frozen=True)
class HeldOut:
    """Held-out rows in two batches, and as one batch."""

    rows: list[LinearisedBatch]
    x: Tensor
    f: Tensor
    J: Tensor
    y: Tensor
    weights: Tensor


def held_out(fitted: Fitted, n: int = 30, weights: Tensor | None = None) -> HeldOut:
    x = normal(n, *fitted.x.shape[1:], seed=50)
    y = sampled_targets(fitted.likelihood, fitted.forward(x).detach(), seed=51)
    w = torch.ones(n, dtype=DOUBLE) if weights is None else weights
    first, second, whole = (
        LinearisedBatch(
            *backpropagate(fitted.forward, x[cut], fitted.layout), y[cut], w[cut]
        )
        for cut in (slice(0, 7), slice(7, n), slice(n))
    )
    return HeldOut([first, second], x, whole.f, whole.jacobian.dense(), y, w)


def tuning_problem(fitted: Fitted, **options: Any) -> TuningProblem:
    """Return a problem, by default with all free and without held-out rows."""
    likelihood = fitted.likelihood
    has_noise, has_labels = likelihood.has_noise, likelihood.is_classification
    default = TuningProblem(
        posterior=fitted.posterior,
        linear_model=fitted.linear_model,
        validation=None,
        score=HeldOutScore(
            log_proba=log_proba(likelihood) if has_labels else None,
            log_density=None if has_labels or has_noise else log_density(likelihood),
            diagonal=not has_labels,
        ),
        free_prior=True,
        free_noise=has_noise,
        refine="auto",
    )
    return replace(default, **options)


def log_density(likelihood: Any) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return partial(likelihood.log_density, noise=1.0)


def log_proba(likelihood: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """Return log-probabilities by MacKay's probit, a simple link."""

    def link(mean: Tensor, cov: Tensor) -> Tensor:
        mean, cov = likelihood.class_logits(mean, cov)
        variances = cov.diagonal(dim1=1, dim2=2)
        return (mean / (1 + torch.pi / 8 * variances).sqrt()).log_softmax(-1)

    return link
