"""The divergence ``KL(q ‖ p) = E_q[log q(w) − log p(w)]`` from prior to posterior.

In closed form ``−Σ (entropy + E_q[log p])`` over weights, else the mean of
``Σ (log q − log p)`` over draws.
"""

from torch import Tensor

from sklaplace.variational.base import WeightPosterior
from sklaplace.variational.priors import PRIORS, WeightPrior


def exact_divergence(posterior, prior):
    entropy, second_moment = posterior.entropy(), posterior.second_moment()
    if entropy is None or second_moment is None:
        return None
    expected = prior.expected_log_prob(second_moment)
    if expected is None:
        return None
    return -(entropy + expected).sum()


def divergence(posterior, prior, w, log_q):
    if posterior.is_closed_form_cheap:
        exact = exact_divergence(posterior, prior)
        if exact is not None:
            return exact
    return (log_q - prior.log_prob(w)).sum() / len(w)
