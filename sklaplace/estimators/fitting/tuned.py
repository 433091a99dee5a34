"""Tuned posteriors of a `LaplaceFit`.

The posterior is ``N(mean, (scale · H + diag(prior_precision))⁻¹)``.
"""

from collections.abc import Collection, Iterable
from typing import cast

from torch import Tensor

from sklaplace.core import progress
from sklaplace.core.budget import KEPT_BUDGET
from sklaplace.core.checks import warn_user
from sklaplace.curvature import priors
from sklaplace.curvature.structures.rounding import check_finite
from sklaplace.estimators.fitting.laplace_fit import LaplaceFit, check_resolved
from sklaplace.estimators.fitting.noise import with_residual_noise
from sklaplace.estimators.fitting.untuned import (
    LinearisedSamples,
    check_definite,
    untuned,
)
from sklaplace.estimators.options.laplace import LaplaceOptions
from sklaplace.networks.outputs import as_forward
from sklaplace.networks.trained import TrainedNetwork
from sklaplace.noise.levels import root_mean_square, seen_noise
from sklaplace.posterior.gaussian import GaussianPosterior
from sklaplace.posterior.tuning import TUNERS, Tuner
from sklaplace.posterior.tuning.problem import (
    HeldOutScore,
    LinearisedBatch,
    TuningProblem,
)
from sklaplace.posterior.tuning.temperature import tune_temperature
from sklaplace.posterior.tuning.validation import tune_on_validation


def tuned_posterior(
    options: LaplaceOptions,
    fit: LaplaceFit,
    score: HeldOutScore,
    tuner: Tuner | None = None,
) -> GaussianPosterior:
    """Return the posterior for given or tuned hyperparameters.

    Its mean may be refitted. ``tuner`` replaces the tuner of the options.
    """
    check_finite(fit.structure.trace())
    has_noise = fit.network.spec.likelihood.has_noise
    with fit.evaluation():
        if options.free_prior or (options.free_noise and has_noise):
            with progress.phase("tune"):
                # A tuner that replaces that of the options repeats passes many times,
                # so held-out samples are stored. With a budget of zero, passes over
                # weights outside the last layer linearise them again.
                budget = KEPT_BUDGET if tuner else 0
                problem = tuning_problem(options, fit, score, budget)
                posterior = (tuner or TUNERS[cast(str, options.tuner)])(problem)
        else:
            posterior = _refitted(options, tuning_problem(options, fit, score))
    check_resolved(posterior, fit.network)
    return posterior


def _refitted(options: LaplaceOptions, problem: TuningProblem) -> GaussianPosterior:
    """Return the posterior for given hyperparameters, refitted if requested or better.

    With ``refine="auto"``, held-out samples decide between both means.
    """
    can_choose = problem.has_held_out and problem.linear_model is not None
    if options.refine is not True and not can_choose:
        return problem.posterior
    with progress.phase("refit"):
        if options.refine is True:
            return problem.model.refit(problem.posterior)
        # no hyperparameter is free, so held-out samples only decide whether to refit
        return tune_on_validation(problem)


def retuned_posterior(
    options: LaplaceOptions,
    posterior: GaussianPosterior,
    network: TrainedNetwork,
    score: HeldOutScore,
    free: Collection[str],
) -> GaussianPosterior:
    """Return a posterior with hyperparameters tuned again, but with the same mean.

    Parameters
    ----------
    options : LaplaceOptions
        Options of the approximation.
    posterior : GaussianPosterior
        Fitted posterior.
    network : TrainedNetwork
        Network of the posterior, with held-out samples for scoring if available.
        Without held-out samples, the evidence is maximised.
    score : HeldOutScore
        Score of held-out samples.
    free : collection of str
        Names of the hyperparameters to choose.
    """
    # unlike the other curvatures, the exact Hessian can have negative eigenvalues
    if options.is_exact:
        check_definite(posterior, is_tuned=True)
    with network.forward().frozen():
        held_out = linearised_held_out(options, network, score)
        if "sigma_noise" in free:  # sets the proportions of the levels
            posterior = with_residual_noise(posterior, held_out)
        problem = TuningProblem(
            posterior=posterior,
            linear_model=None,  # so that the weights are not refitted
            validation=held_out,
            free_prior="prior_precision" in free,
            free_noise="sigma_noise" in free,
            refine=False,
            score=score,
        )
        tuner = TUNERS["validation" if problem.has_held_out else "marglik"]
        # chosen on held-out samples, without which `check_evidence` raises before
        if "temperature" in free:
            tuner = tune_temperature
        posterior = tuner(problem)
    check_resolved(posterior, network)
    return posterior


def posterior_of_fold(
    options: LaplaceOptions, fold: LaplaceFit, posterior: GaussianPosterior
) -> GaussianPosterior:
    """Return the posterior of a fold's fit with the hyperparameters of the whole fit.

    The weights are refitted if those of ``posterior``, from the whole fit, are.
    """
    with fold.evaluation():
        fold_posterior, model = untuned(options, fold)
        fold_posterior = fold_posterior.replace(**vars(posterior.hyperparameters))
        if not posterior.is_refitted:
            return fold_posterior
        assert model is not None  # the refitted posterior has a linear model, too
        return model.refit(fold_posterior)


def tuning_problem(
    options: LaplaceOptions, fit: LaplaceFit, score: HeldOutScore, budget: float = 0
) -> TuningProblem:
    """Return the tuning problem of a fit, which contains those of its folds.

    Starting values from the training are a prior precision that a callback learned, and
    noise estimated from training samples; see `_learned_precision` and `_seen_noise`.
    ``budget`` is the number of bytes for storing linearised held-out samples outside
    the last layer. With zero, each pass linearises them again. Folds share the budget.
    """
    posterior, model = untuned(options, fit)
    fold_budget = budget / max(1, len(fit.folds))
    return TuningProblem(
        posterior=posterior,
        linear_model=model,
        validation=linearised_held_out(options, fit.network, score, budget),
        free_prior=options.free_prior,
        free_noise=options.free_noise and posterior.likelihood.has_noise,
        refine=options.refine,
        noise_on_held_out=options.noise_on_held_out,
        learned=_learned_precision(options, fit.network, posterior),
        seen_noise=_seen_noise(options, fit, posterior),
        score=score,
        folds=tuple(
            tuning_problem(options, fold, score, fold_budget) for fold in fit.folds
        ),
    )


def _seen_noise(
    options: LaplaceOptions, fit: LaplaceFit, posterior: GaussianPosterior
) -> Tensor | None:
    """Return the noise () estimated from training samples, or None if it is not needed.

    Only the tuner ``"auto"`` needs it, if there are no held-out samples. It is the root
    mean square residual. With novelty, `seen_noise` enlarges it by a function of the
    samples' leverages, because the network was fitted to these samples.
    """
    has_held_out = fit.network.held_out is not None or fit.folds
    is_used = options.tuner == "auto" and posterior.likelihood.has_noise
    if has_held_out or not is_used:
        return None
    if fit.novelty is None:
        return root_mean_square(fit.data_fit)
    module = as_forward(fit.network.net).module
    return seen_noise(
        fit.data_fit,
        mean_leverage=fit.novelty.mean_leverage(),
        target_variances=fit.novelty.target_variances / posterior.noise_proportions**2,
        # layers with a weight matrix
        n_layers=sum(p.ndim > 1 for p in module.parameters()),
    )


def _learned_precision(
    options: LaplaceOptions, network: TrainedNetwork, posterior: GaussianPosterior
) -> Tensor | None:
    """Return the prior precision that a training callback learned, or None.

    A callback counts only if it has learned a precision for every selected parameter.
    """
    names = [block.name for block in posterior.layout.blocks]
    for _, callback in getattr(network.net, "callbacks_", []):
        learned = getattr(callback, "precisions_", {})
        # without a free prior, the user's precision counts
        if options.free_prior and learned.keys() >= {*names}:
            values = posterior.mean.new_tensor([learned[name] for name in names])
            structure, layout = options.prior_structure, posterior.layout
            return priors.as_structure(values, structure, layout)
    return None


def linearised_held_out(
    options: LaplaceOptions,
    network: TrainedNetwork,
    score: HeldOutScore,
    budget: float = 0,
) -> Iterable[LinearisedBatch] | None:
    """Return linearised held-out samples, stored in memory for a last layer.

    For weights outside the last layer, the samples are stored if their Jacobians fit
    into ``budget`` bytes. Otherwise, or if memory is short, each pass over the samples
    linearises them again.
    """
    if network.held_out is None:
        return None
    batches = options.batches(
        network, network.held_out, with_covariance=not score.diagonal
    )
    samples = LinearisedSamples(network, batches, is_centred=score.is_centred)
    layout, n_outputs = network.spec.layout, network.spec.n_outputs
    # number of stored numbers per sample
    jacobian_size = n_outputs * layout.n_parameters
    if layout.head is not None:  # only the features of a last layer are stored
        jacobian_size = layout.blocks[0].factor_shape[1]
        budget = KEPT_BUDGET
    # 8 bytes per number; outputs, targets and gradients have `n_outputs` numbers each
    needed = 8 * len(network.held_out) * (jacobian_size + 3 * n_outputs)
    return list(samples) if needed <= budget else samples


def are_certain(posterior: GaussianPosterior) -> bool:
    """Return whether the prior leaves almost no uncertainty about the weights.

    In this case, the effective number of parameters (MacKay 1992) is less than one. An
    upper bound on this number is the trace of the curvature divided by the prior
    precision.
    """
    total_curvature = posterior.scale * posterior.structure.trace()
    return bool(total_curvature < posterior.prior_precision.min())


def warn_without_residual(
    posterior: GaussianPosterior, options: LaplaceOptions
) -> None:
    """Warn if a residual is requested or needed, but not available for this network.

    A residual is needed if the tuned weights are almost certain (`are_certain`), as
    uncertainty could then not grow with distance from the training samples.
    """
    if options.residual != "auto":
        warn_user(
            f"residual={options.residual} has no effect: the network has no features "
            "(see score_samples), or its likelihood has no unit for a residual. Use "
            "residual='none'."
        )
    elif options.prior_precision == "auto" and are_certain(posterior):
        warn_user(
            "Held-out rows are predicted best with no uncertainty in the weights "
            f"(prior precision {posterior.shown_precision()}), and this network has no "
            "residual. Use prior_precision='marglik' or a number."
        )
