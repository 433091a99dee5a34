"""Tuning: the choice of the prior precision, the noise and the weights.

A tuner is a function ``(TuningProblem) -> GaussianPosterior``. ``marglik`` maximises
the evidence. ``validation`` scores the predictive distribution on held-out samples.
``auto`` also scores held-out samples if there are any. Without held-out samples,
``auto`` leaves the network's predictions near the data unchanged. At weights that do
not minimise the regularised loss, the evidence favours a prior that is far too weak.
"""

from collections.abc import Callable

from sklaplace.core.checks import warn_user
from sklaplace.posterior.gaussian import GaussianPosterior
from sklaplace.posterior.tuning.comparison import compare_with_network
from sklaplace.posterior.tuning.evidence import maximise_evidence
from sklaplace.posterior.tuning.levels import maximise_with_levels
from sklaplace.posterior.tuning.problem import TuningProblem, clamped
from sklaplace.posterior.tuning.validation import tune_on_validation

Tuner = Callable[[TuningProblem], GaussianPosterior]

# Ratio of the prior's standard deviation to the root mean square of the weights, if
# there are no held-out samples. The resulting uncertainty hardly changes predictions.
RELATIVE_STD = 1e-3


def auto(problem: TuningProblem) -> GaussianPosterior:
    """Tune on held-out samples; without them, keep the predictions and warn.

    A prior precision learned during training is kept, with the network's weights, and
    only a free noise level is tuned. Without held-out samples, the evidence is
    maximised if ``refine`` is True or if only the noise is free. A warning then states
    that training samples chose the result. If a learned prior is kept, held-out samples
    are used to warn if the network alone predicts them better.
    """
    if problem.learned is not None:
        # fixed, and learned for the network's weights, so these are not refitted
        problem = problem.with_fixed_prior(problem.learned, refine=False)
        if not problem.free_noise:
            compare_with_network(problem, problem.posterior)
            return problem.posterior
    if problem.has_held_out:
        posterior = tune_on_validation(problem)
        if problem.learned is not None:
            compare_with_network(problem, posterior)
        return posterior
    if problem.free_prior and problem.refine is not True:
        return network_alone(problem)
    if problem.free_prior:
        warn_user(
            "There are no held-out samples, so 'auto' maximises the evidence of the "
            "refitted weights. Their predictions can be worse than the network's. Pass "
            "X_val and y_val to fit."
        )
    else:
        warn_user(_NOISE_OF_TRAINING)
    return maximise_with_levels(problem)


def network_alone(problem: TuningProblem) -> GaussianPosterior:
    """Return a posterior that leaves the network's predictions unchanged.

    The prior's standard deviation is `RELATIVE_STD` times the root mean square of the
    weights, so small that the posterior hardly differs from the network. A free noise
    level is ``seen_noise``, the network's noise level on the training samples. A
    warning states this choice.
    """
    # the text is empty if the noise is not free
    remark = ", and sigma_noise is estimated from training samples" * problem.free_noise
    warn_user(
        "There are no held-out samples, so 'auto' leaves the network's predictions "
        f"near the data unchanged{remark}. To tune the uncertainty near the data, pass "
        "X_val and y_val to fit."
    )
    posterior = problem.posterior
    if problem.free_noise and problem.seen_noise is not None:
        posterior = posterior.replace(sigma_noise=clamped(problem.seen_noise))
    mean_square = posterior.weights.double().square().mean()
    precision = clamped(1 / (RELATIVE_STD**2 * mean_square))
    return posterior.replace(
        prior_precision=precision.expand(posterior.prior_precision.shape).clone()
    )


_NOISE_OF_TRAINING = (
    "sigma_noise is estimated from training samples, because there are no held-out "
    "samples. Intervals will be too narrow if the network overfits. Pass X_val and "
    "y_val to fit."
)


def by_evidence(problem: TuningProblem) -> GaussianPosterior:
    """Choose the prior by the evidence, and noise and refit on any held-out samples.

    The choice of a refit is whether the posterior mean is that of the refitted linear
    model, or the network's weights. If the evidence also chooses the noise, held-out
    samples choose nothing. They are always used to warn if the network alone predicts
    them better.
    """
    noise_on_held_out = problem.free_noise and problem.noise_on_held_out
    noise_by_evidence = problem.free_noise and not problem.noise_on_held_out
    if noise_by_evidence or not problem.has_held_out:  # the evidence chooses all
        if noise_on_held_out:
            warn_user(_NOISE_OF_TRAINING)
        posterior = maximise_with_levels(problem)
    else:
        posterior = maximise_evidence(problem)
        if noise_on_held_out or problem.refine == "auto":
            # keep the prior, and let held-out samples choose the rest
            delta = posterior.prior_precision
            fixed_prior = problem.with_fixed_prior(delta, refine=problem.refine)
            posterior = tune_on_validation(fixed_prior)
    compare_with_network(problem, posterior)
    return posterior


TUNERS: dict[str, Tuner] = {
    "auto": auto,
    "marglik": by_evidence,
    "validation": tune_on_validation,
}
