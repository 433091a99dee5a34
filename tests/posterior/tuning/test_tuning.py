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


def test_auto_without_rows_refits():
    problem = tuning_problem(fit("Categorical"))
    with pytest.warns(UserWarning, match="evidence of a refitted last layer"):
        found = TUNERS["auto"](problem)
    expected = marglik_refitted(problem)
    assert torch.equal(found.mean, expected.mean)
    assert found.is_refitted


def test_auto_warns_without_held_out_rows():
    with pytest.warns(UserWarning, match="sigma_noise comes from the training rows"):
        TUNERS["auto"](tuning_problem(fit("Gaussian")))
    words = "maximises the evidence at the network's own"
    for options in ({"refine": False}, {"linear_model": None}):
        with pytest.warns(UserWarning, match=words):
            found = TUNERS["auto"](tuning_problem(fit("Categorical"), **options))
        assert not found.is_refitted


def test_marglik_keeps_the_weights_where_it_must():
    fitted = fit("Categorical")
    kept = TUNERS["marglik"](tuning_problem(fitted, refine=False))
    assert not kept.is_refitted
    assert torch.equal(kept.prior_precision, marglik(fitted.posterior).prior_precision)
    assert not TUNERS["marglik"](tuning_problem(fitted, linear_model=None)).is_refitted
    assert TUNERS["marglik"](tuning_problem(fitted)).is_refitted
