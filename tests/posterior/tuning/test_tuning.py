import pytest
import torch
from tuning_problems import fit, held_out, tuning_problem

from sklaplace.posterior.tuning import TUNERS
from sklaplace.posterior.tuning.evidence import marglik, marglik_refitted
from sklaplace.posterior.tuning.validation import tune_on_validation

pytestmark = pytest.mark.usefixtures("rng_untouched")


# ------------------------------------------------------------------------ tuners
def test_auto_prefers_held_out_rows():
    fitted = fit("Categorical")
    held = held_out(fitted)
    problem = tuning_problem(fitted, validation=held.rows)
    found, expected = TUNERS["auto"](problem), tune_on_validation(problem)
    assert torch.equal(found.prior_precision, expected.prior_precision)
    assert torch.equal(found.mean, expected.mean)


def test_auto_without_rows_keeps_the_network():
    """The weights have almost no uncertainty, and the noise is the given noise."""
    for name, words in {
        "Categorical": "unchanged",
        "Gaussian": "noise is estimated",
    }.items():
        noise = torch.tensor(0.7, dtype=torch.float64)
        problem = tuning_problem(fit(name), seen_noise=noise)
        with pytest.warns(UserWarning, match=f"the network's predictions.*{words}"):
            found = TUNERS["auto"](problem)
        assert torch.equal(found.mean, problem.posterior.weights)
        variance = 1 / found.prior_precision
        expected = 1e-6 * problem.posterior.weights.square().mean()
        torch.testing.assert_close(variance, expected.double(), check_device=False)
        if name == "Gaussian":
            assert found.hyperparameters.sigma_noise == 0.7


def test_auto_without_rows_maximises_the_evidence_of_what_was_asked_for():
    problem = tuning_problem(fit("Categorical"), refine=True)
    with pytest.warns(UserWarning, match="evidence of the refitted weights"):
        found = TUNERS["auto"](problem)
    assert torch.equal(found.mean, marglik_refitted(problem).mean)
    problem = tuning_problem(fit("Gaussian"), free_prior=False)
    with pytest.warns(UserWarning, match="sigma_noise is estimated from training"):
        found = TUNERS["auto"](problem)
    assert found.prior_precision == problem.posterior.prior_precision


def test_marglik_keeps_the_weights_where_it_must():
    fitted = fit("Categorical")
    kept = TUNERS["marglik"](tuning_problem(fitted, refine=False))
    assert not kept.is_refitted
    assert torch.equal(kept.prior_precision, marglik(fitted.posterior).prior_precision)
    assert not TUNERS["marglik"](tuning_problem(fitted, linear_model=None)).is_refitted
    assert TUNERS["marglik"](tuning_problem(fitted)).is_refitted
