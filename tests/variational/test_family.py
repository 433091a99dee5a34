"""Families of weight posteriors: names, classes, instances and errors."""

import math
import re

import pytest
import torch
from densities import BOUND, KINDS, LOCATION, SCALE, Logistic, generator, posterior

from sklaplace.variational import (
    POSTERIORS,
    GaussianPrior,
    Kumaraswamy,
    Quantile,
    UniformPrior,
    WeightPosterior,
)
from sklaplace.variational.family import PosteriorFamily

pytestmark = pytest.mark.usefixtures("rng_untouched")


def drawn(found):
    return found.sample(3, generator())[0]


@pytest.mark.parametrize("given", [*POSTERIORS, *KINDS.values()])
def test_a_class_and_its_name_start_at_the_same(given):
    family = PosteriorFamily(given, BOUND)
    family.check(GaussianPrior())
    found = family.start(LOCATION, SCALE)
    assert torch.equal(drawn(found), drawn(posterior(family.kind.name)))


def test_options_reach_the_constructor():
    family = PosteriorFamily(Logistic, options={"stretch": 4.0})
    family.check(GaussianPrior())
    found = family.start(LOCATION, SCALE)
    assert found.stretch == 4.0
    torch.testing.assert_close(found.variance().sqrt(), SCALE)
    sizes = {"n_units": 2, "n_layers": 3}
    found = PosteriorFamily("quantile", options=sizes).start(LOCATION, SCALE)
    assert found.raw_heights.shape == (2, len(LOCATION))
    assert len(found.offsets) == 2


@pytest.mark.parametrize("name", KINDS)
def test_an_instance_is_copied_and_starts_where_it_is(name):
    given = posterior(name, 0).requires_grad_(False)
    before = {k: v.clone() for k, v in given.state_dict().items()}
    family = PosteriorFamily(given)
    family.check(GaussianPrior())
    found = family.start(torch.zeros_like(LOCATION), SCALE)
    assert torch.equal(drawn(found), drawn(given))
    with torch.no_grad():
        for parameter in found.parameters():
            assert parameter.requires_grad
            parameter.add_(1)
    assert all(torch.equal(v, before[k]) for k, v in given.state_dict().items())
    single = family.start(LOCATION.float(), SCALE.float())
    assert {p.dtype for p in single.parameters()} == {torch.float32}


# What is refused before a network is known


class Unfinished(WeightPosterior):
    def transform(self, noise):
        return noise, noise


@pytest.mark.parametrize(
    ("family", "prior", "error", "words"),
    [
        (("gausian",), None, ValueError, ["'gaussian'", "an instance of Weight"]),
        ((3,), None, ValueError, ["posterior=3 is not known"]),
        ((dict,), None, ValueError, ["posterior=<class 'dict'> is not known"]),
        (("gaussian", 3.0, {"n_units": 2}), None, ValueError, ["It accepts none."]),
        (("gaussian", 3.0, [2]), None, TypeError, ["posterior_params is of type list"]),
        (
            ("quantile", 3.0, {"n_nodes": 9}),
            None,
            ValueError,
            ["'n_layers', 'n_units'"],
        ),
        (("quantile", 3.0, {"n_units": 0}), None, ValueError, ["['n_units']=0 is not"]),
        (("density", 3.0, {"n_nodes": 3}), None, ValueError, ["at least 4"]),
        ((Logistic, 3.0, {"stretch": -1}), None, ValueError, ["['stretch']=-1 is not"]),
        ((Logistic, 3.0, {"scale": 1}), None, ValueError, ["It accepts 'stretch'."]),
        ((Logistic, -1), None, ValueError, ["bound=-1 is not positive"]),
        (
            (Kumaraswamy(LOCATION, SCALE, 5.0),),
            UniformPrior(),
            ValueError,
            ["bound=5 exceeds"],
        ),
        (
            (posterior("gaussian"), 3.0, {"n_units": 2}),
            None,
            ValueError,
            ["'n_units'", "which an instance of 'gaussian' does not"],
        ),
    ],
)
def test_what_is_no_family(family, prior, error, words):
    with pytest.raises(error) as caught:
        PosteriorFamily(*family).check(prior or GaussianPrior())
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_constructors_check_their_sizes():
    with pytest.raises(ValueError, match="n_layers=0 is not an integer"):
        Quantile(LOCATION, SCALE, n_layers=0)


# Families of one's own that training could not use


def own(name, **methods):
    """Return a family with some overridden methods."""
    return type(name, (Logistic,), methods)


def transformed(change):
    """Return a ``transform`` with changed weights and log-densities."""
    return lambda q, noise: change(*Logistic.transform(q, noise))


def scaled_variance(factor):
    return lambda q: factor * Logistic.variance(q)


class Unseeded(Logistic):
    def noise(self, n, generator=None):
        source = torch.Generator()
        source.seed()
        return super().noise(n, source)


class Elsewhere(Logistic):
    def __init__(self, location, scale, bound=3.0):
        super().__init__(location + 1, scale, bound)


class WithoutBound(Logistic):
    def __init__(self, location, scale):
        super().__init__(location, scale)


FAULTY = [
    (
        own("LargeVariance", variance=scaled_variance(100)),
        r"'LargeVariance' has a variance 1e\+02 times as large",
    ),
    (
        own("SmallVariance", variance=scaled_variance(0.01)),
        "'SmallVariance' has a variance 0.01 times as large",
    ),
    (
        own("NoVariance", variance=lambda q: 1.0),
        r"variance of .* <class 'float'>, not \(4,\), torch\.float64",
    ),
    (
        own("OneMean", mean=lambda q: q.location.mean()),
        r"posterior='OneMean' has mean of shape \(\), .*not \(4,\)",
    ),
    (
        own("ComplexMedian", median=lambda q: q.location + 0j),
        r"median of .* torch\.complex128, not .* torch\.float64",
    ),
    (
        own("Total", transform=transformed(lambda w, log_q: (w, log_q.sum(-1)))),
        r"log densities of shape \(2,\), .*not \(2, 4\)",
    ),
    (
        own("Detached", transform=transformed(lambda *x: [y.detach() for y in x])),
        "posterior='Detached' has draws without gradients",
    ),
    (
        own("Infinite", transform=transformed(lambda w, log_q: (w / 0, log_q))),
        "draws or log densities that are not finite",
    ),
    (
        own("Off", log_prob=lambda q, w: Logistic.log_prob(q, w) + q.scale.log()),
        "has a log_prob .* nats away from sample's log_q",
    ),
    (Unseeded, "draws that do not follow the generator"),
    (Elsewhere, "medians that do not start at location, the network's weights"),
]


@pytest.mark.parametrize(("kind", "words"), FAULTY)
def test_faulty_families_are_refused(kind, words):
    with pytest.raises(ValueError, match=words):
        PosteriorFamily(kind).start(LOCATION, SCALE)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (WithoutBound, r"WithoutBound\.__init__\(\) got an unexpected .* 'bound'"),
        (Unfinished, "abstract class Unfinished .*log_prob"),
    ],
)
def test_incomplete_families_are_named(kind, words):
    with pytest.raises(TypeError, match=words):
        PosteriorFamily(kind).start(LOCATION, SCALE)


def test_an_infinite_variance_is_no_fault():
    assert (
        PosteriorFamily(own("Wide", variance=scaled_variance(math.inf)))
        .start(LOCATION, SCALE)
        .n_weights
        == 4
    )


def test_an_instance_for_other_weights_is_refused():
    message = re.escape("posterior is an instance for 4 weights, but 9 weights of")
    with pytest.raises(ValueError, match=message):
        PosteriorFamily(posterior("gaussian")).start(torch.zeros(9), torch.ones(9))
