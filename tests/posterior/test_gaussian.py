import math
import pickle
from dataclasses import fields, is_dataclass, replace

import pytest
import references
import torch
from cases import generator, normal
from contracts import STRUCTURES_AND_PRIORS, assert_equal, problem

every_prior = pytest.mark.parametrize(("name", "prior"), STRUCTURES_AND_PRIORS)
every_likelihood = pytest.mark.parametrize("likelihood", references.LIKELIHOODS)

pytestmark = [pytest.mark.numerical, pytest.mark.usefixtures("rng_untouched")]


def reference_evidence(found, posterior, h):
    """Compute the evidence by the formula, with dense matrices."""
    f = found.forward(found.x).detach()
    log_prob = references.log_likelihood(found.likelihood, f, found.y, h.sigma_noise)
    # The temperature divides the loss, not the normaliser of the noise.
    n = len(f) * found.likelihood.n_targets(f.shape[1])
    normalizer = n * found.likelihood.log_normalizer(h.sigma_noise)
    log_lik = (log_prob.sum() + normalizer) / h.temperature - normalizer
    scale = found.likelihood.scale(h.sigma_noise) / h.temperature
    delta = references.expand(h.prior_precision, found.layout)
    H = posterior.structure.dense()
    return references.evidence(
        H, posterior.mean, log_lik, delta, scale, h.prior_mean.expand(len(delta))
    )


@every_prior
@every_likelihood
@pytest.mark.parametrize("case", ["mlp", "conv_called_twice", "norms"])
def test_evidence_is_that_of_the_formula(case, likelihood, name, prior):
    found = problem(case, likelihood)
    posterior = found.posterior(name, prior)
    h = posterior.hyperparameters
    expected = reference_evidence(found, posterior, h)
    assert_equal(posterior.log_marginal_likelihood(), expected)
    other = posterior.replace(
        prior_precision=3 * h.prior_precision,
        prior_mean=normal(found.layout.n_parameters),
        sigma_noise=2 * h.sigma_noise,
        temperature=h.temperature / 2,
    )
    expected = reference_evidence(found, posterior, other.hyperparameters)
    assert_equal(other.log_marginal_likelihood(), expected)


def test_draws_with_an_integer_are_those_of_a_generator_with_that_seed(rng_untouched):
    posterior = problem("mlp").posterior("kron", "scalar")
    draws = posterior.sample(5, generator(3))
    assert torch.equal(posterior.sample(5, random_state=3), draws)
    assert torch.equal(posterior.sample(1), posterior.sample())
    assert not torch.equal(posterior.sample(5, None), posterior.sample(5, None))


def test_a_precision_matrix_beyond_the_memory_is_refused(little_memory):
    posterior = problem("mlp").posterior("kron", "scalar")
    p = posterior.layout.n_parameters
    little_memory(8 * p**2)
    with pytest.raises(ValueError, match=rf"of {p:,} weights needs .*use variance"):
        posterior.precision_matrix()


@every_prior
def test_copies_answer_alike(name, prior):
    found = problem("mlp")
    posterior = found.posterior(name, prior)
    asked = found.posterior(name, prior)
    asked.log_marginal_likelihood()  # fills caches
    jacobian = found.jacobian()

    def answers(posterior):
        yield posterior.precision.functional_covariance(jacobian)
        yield posterior.sample(3, generator(0))
        yield posterior.log_marginal_likelihood()

    for copy in (
        pickle.loads(pickle.dumps(posterior)),
        pickle.loads(pickle.dumps(asked)),
        posterior.to("cpu"),
        asked.to(torch.device("cpu")),
    ):
        assert copy.layout == posterior.layout
        assert copy.likelihood == posterior.likelihood
        for answer, expected in zip(answers(copy), answers(posterior), strict=True):
            assert_equal(answer, expected, 1e-14)


def tensors(value):
    """Yield every tensor in nested fields and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple):
        for entry in value:
            yield from tensors(entry)
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors(getattr(value, field.name))


@every_prior
def test_to_moves_every_tensor(name, prior):
    """The meta device has no values, so no tensor can stay behind unnoticed."""
    posterior = problem("mlp").posterior(name, prior)
    moved = posterior.to("meta")
    assert all(tensor.is_meta for tensor in tensors(moved))
    assert len(list(tensors(moved))) == len(list(tensors(posterior)))
    assert moved.structure.dense().is_meta
    assert moved.layout == posterior.layout


def test_temperature_scales_the_curvature_at_question_time():
    posterior = problem("mlp", "Gaussian").posterior("full")
    h = posterior.hyperparameters
    colder = posterior.replace(temperature=h.temperature / 4)
    less_noisy = posterior.replace(sigma_noise=h.sigma_noise / 2)
    assert_equal(colder.precision_matrix(), less_noisy.precision_matrix(), 1e-14)
    n_targets = posterior.data_fit.n_targets
    difference = less_noisy.log_likelihood() - colder.log_likelihood()
    assert_equal(difference, n_targets * math.log(2), 1e-12)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("mlp", ""),
        ("norms", ", 4 of 8 tensors without a layer form"),
        ("lstm", ", 4 of 6 tensors without a layer form"),
    ],
)
def test_repr_tells_what_has_no_kronecker_form(case, words):
    shown = repr(problem(case).posterior("kron"))
    assert shown.startswith("GaussianPosterior(Kron over ")
    assert shown.endswith(f"{words})")
    assert ("layer form" in shown) == bool(words)


def test_draws_are_around_the_mean_and_not_the_networks_weights():
    """If the last layer was refitted, the two differ."""
    posterior = problem("mlp").posterior("kron")
    shift = torch.linspace(0, 1, len(posterior.mean), dtype=torch.float64)
    refitted = replace(posterior, mean=posterior.mean + shift)
    draws = [p.sample(3, generator(1)) for p in (posterior, refitted)]
    assert_equal(draws[1] - draws[0], shift.expand(3, -1))
