"""Divergence ``KL(q ‖ p) = E_q[log q(w) − log p(w)]`` of the posterior from the prior.

The closed form is ``−Σ (entropy + E_q[log p])``, summed over weights. Otherwise, the
divergence is estimated by the mean of ``Σ (log q − log p)`` over draws.
"""

from torch import Tensor

from sklaplace.core.checks import listed
from sklaplace.variational.base import WeightPosterior
from sklaplace.variational.priors import PRIORS, WeightPrior


def divergence(
    posterior: WeightPosterior, prior: WeightPrior, w: Tensor, log_q: Tensor
) -> Tensor:
    """Return the divergence of a posterior from a prior, for training.

    The result is the closed form if it is cheaper than a draw, and an unbiased estimate
    otherwise. Reports, where precision matters more than speed, use `exact_divergence`.

    Parameters
    ----------
    posterior : WeightPosterior
        The distribution ``q``.
    prior : WeightPrior
        The distribution ``p``.
    w : Tensor of shape (s, P)
        Draws from the posterior.
    log_q : Tensor of shape (s, P)
        Log densities of the draws, from `WeightPosterior.sample`.

    Returns
    -------
    Tensor of shape ()
        ``KL(q ‖ p)`` summed over weights, in nats; differentiable.

    Notes
    -----
    The closed form takes O(P) time, and the estimate O(s P). The divergence is infinite
    if a draw is outside the prior's support. `check_support` rejects such pairs.

    References
    ----------
    Blundell, Cornebise, Kavukcuoglu, Wierstra (2015), "Weight uncertainty in neural
    networks", ICML, eq. (2).
    """
    if posterior.is_closed_form_cheap:
        exact = exact_divergence(posterior, prior)
        if exact is not None:
            return exact
    # summed over weights, and averaged over the draws
    return (log_q - prior.log_prob(w)).sum() / len(w)


def exact_divergence(posterior: WeightPosterior, prior: WeightPrior) -> Tensor | None:
    """Return the closed-form divergence of a posterior from a prior, if there is one.

    The closed form has no sampling noise, so it is used to report and compare models.
    For a Kumaraswamy posterior, the closed form takes ten times as long as a draw.

    Parameters
    ----------
    posterior : WeightPosterior
        The distribution ``q``.
    prior : WeightPrior
        The distribution ``p``; see `check_support`.

    Returns
    -------
    Tensor of shape () or None
        ``KL(q ‖ p)`` summed over weights, in nats; differentiable. None if the entropy
        or second moment of the posterior has no closed form, or if the prior's
        expectation is not a function of the second moment.
    """
    closed_form = posterior.closed_form()
    if closed_form is None:
        return None
    entropy, second_moment = closed_form
    expected = prior.expected_log_prob(second_moment)
    return None if expected is None else -(entropy + expected).sum()


def check_support(
    posterior: WeightPosterior | type[WeightPosterior], prior: WeightPrior
) -> None:
    """Raise ValueError if the support of the posterior exceeds the prior's support.

    Parameters
    ----------
    posterior : WeightPosterior or subclass of it
        The distribution ``q``. The bounds are compared only if the posterior is an
        instance.
    prior : WeightPrior
        The distribution ``p``.

    Raises
    ------
    ValueError
        If the prior is bounded, and the posterior is unbounded or has a larger bound.
    """
    if not prior.is_bounded:
        return
    unbounded = listed(name for name, kind in PRIORS.items() if not kind.is_bounded)
    if not posterior.is_bounded:
        raise ValueError(
            f"posterior={posterior.name!r} has no bounds, but prior={prior.name!r} is "
            "bounded, so their divergence is infinite. Choose posterior='kumaraswamy', "
            f"or one of {unbounded} as prior."
        )
    # a class receives the same bound as the prior, but an instance has its own
    if isinstance(posterior, WeightPosterior) and posterior.bound > prior.bound:
        raise ValueError(
            f"posterior={posterior.name!r} with bound={posterior.bound:g} exceeds "
            f"prior={prior.name!r} with bound={prior.bound:g}, so their divergence is "
            f"infinite. Choose a posterior with a bound of at most {prior.bound:g}, or "
            f"one of {unbounded} as prior."
        )
