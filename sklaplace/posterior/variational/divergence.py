"""The divergence ``KL(q ‖ p) = E_q[log q(w) − log p(w)]`` of posterior from prior.

In closed form it is ``−Σ (entropy + E_q[log p])`` over weights; otherwise it is
estimated by the mean of ``Σ (log q − log p)`` over draws.
"""

from torch import Tensor

from sklaplace.core.checks import listed
from sklaplace.posterior.variational.base import WeightPosterior
from sklaplace.posterior.variational.priors import PRIORS, WeightPrior


def divergence(
    posterior: WeightPosterior, prior: WeightPrior, w: Tensor, log_q: Tensor
) -> Tensor:
    """Divergence of a posterior from a prior, for training.

    The closed form if it is cheaper than a draw, and an unbiased estimate otherwise.
    Reports, where noise matters and time does not, use `exact_divergence`.

    Parameters
    ----------
    posterior : WeightPosterior
        The distribution ``q``.
    prior : WeightPrior
        The distribution ``p``.
    w : Tensor of shape (s, P)
        Draws from the posterior.
    log_q : Tensor of shape (s, P)
        Their log densities, as `WeightPosterior.sample` returns.

    Returns
    -------
    Tensor of shape ()
        ``KL(q ‖ p)`` summed over weights, in nats; differentiable.

    Notes
    -----
    O(P) time in closed form, O(s P) from draws. Infinite where a draw is outside of the
    support of the prior; `check_support` refuses such pairs.

    References
    ----------
    Blundell, Cornebise, Kavukcuoglu, Wierstra (2015), "Weight uncertainty in neural
    networks", ICML, eq. (2).
    """
    exact = (
        exact_divergence(posterior, prior) if posterior.is_closed_form_cheap else None
    )
    return (log_q - prior.log_prob(w)).sum() / len(w) if exact is None else exact


def exact_divergence(posterior: WeightPosterior, prior: WeightPrior) -> Tensor | None:
    """Divergence of a posterior from a prior in closed form, if there is one.

    Free of noise, for reports and for comparisons of models. For a Kumaraswamy
    posterior, the closed form takes ten times as long as a draw.

    Parameters
    ----------
    posterior : WeightPosterior
        The distribution ``q``.
    prior : WeightPrior
        The distribution ``p``; see `check_support`.

    Returns
    -------
    Tensor of shape () or None
        ``KL(q ‖ p)`` summed over weights, in nats; differentiable. None where the
        entropy or second moment of the posterior has no closed form, or the prior's
        expectation is not a function of the second moment.
    """
    if (closed_form := posterior.closed_form()) is None:
        return None
    entropy, second_moment = closed_form
    expected = prior.expected_log_prob(second_moment)
    return None if expected is None else -(entropy + expected).sum()


def check_support(
    posterior: WeightPosterior | type[WeightPosterior], prior: WeightPrior
) -> None:
    """Refuse a posterior whose support exceeds the prior's: KL would be infinite.

    Parameters
    ----------
    posterior : WeightPosterior or subclass of it
        The distribution ``q``. Bounds are compared for instances only.
    prior : WeightPrior
        The distribution ``p``.

    Raises
    ------
    ValueError
        If the prior is bounded and the posterior is not, or has a larger bound.
    """
    if not prior.is_bounded:
        return
    unbounded = listed(name for name, kind in PRIORS.items() if not kind.is_bounded)
    if not posterior.is_bounded:
        raise ValueError(
            f"posterior={posterior.name!r} has no bounds, but prior={prior.name!r} "
            "allows no weight beyond its own: their divergence is infinite. Choose "
            f"posterior='kumaraswamy', or prior as one of {unbounded}."
        )
    if isinstance(posterior, WeightPosterior) and posterior.bound > prior.bound:
        raise ValueError(
            f"posterior={posterior.name!r} with bound={posterior.bound:g} reaches "
            f"beyond prior={prior.name!r} with bound={prior.bound:g}: their divergence "
            f"is infinite. Choose a bound of the posterior up to {prior.bound:g}, or "
            f"prior as one of {unbounded}."
        )
