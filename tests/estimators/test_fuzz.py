"""Random configurations: each call returns finite numbers, or is refused in words."""

import pytest
from fuzzing import (
    ARGUMENTS,
    INPUTS,
    NETS,
    TARGETS,
    USUAL,
    USUAL_NETS,
    WEIGHTED,
    WEIGHTS,
    Call,
    Configuration,
    parameters,
    values,
    violations,
)
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

import sklaplace

N_CONFIGURATIONS = 2_400
N_PARTS = 8  # so that workers share them


# parts of a configuration that may be out of order, at most two at a time
PARTS = ["net", "params", "X", "y", "sample_weight", "validation", "calls"]


def names(usual, others, is_odd):
    """Names of what is usual, or of anything."""
    return st.sampled_from([*others] if is_odd else [*usual])


@st.composite
def calls(draw, method, odd):
    """A call whose data and arguments are in order, but for the odd parts."""
    arguments = {
        name: names([*known][:2], known, "arguments" in odd)
        for name, known in ARGUMENTS.get(method, {}).items()
    }
    return Call(
        method=method,
        X=draw(names(["good"], INPUTS, "X" in odd)),
        y=draw(names(["good"], TARGETS, "y" in odd)),
        sample_weight=draw(names(["None"], WEIGHTS, "sample_weight" in odd)),
        arguments=draw(st.fixed_dictionaries({}, optional=arguments)),
    )


@st.composite
def configurations(draw):
    estimator = draw(st.sampled_from(WEIGHTED))
    odd = draw(st.lists(st.sampled_from(PARTS), max_size=2, unique=True))
    known = {name: values(name) for name in parameters(estimator)}
    changed = draw(st.lists(st.sampled_from([*known]), max_size=4, unique=True))
    params = {
        name: draw(names(list(USUAL[name])[:3], known[name], "params" in odd))
        for name in changed
    }
    validation = st.sampled_from([*INPUTS, None]), st.sampled_from([*TARGETS, None])
    both = draw(st.booleans())
    usual = ("good", "good") if both else (None, None)
    X_val, y_val = draw(st.tuples(*validation)) if "validation" in odd else usual
    methods = [m for m in ARGUMENTS if hasattr(getattr(sklaplace, estimator), m)]
    chosen = draw(st.lists(st.sampled_from(methods), min_size=1, max_size=5))
    of_calls = st.sets(st.sampled_from(["X", "y", "sample_weight", "arguments"]))
    return Configuration(
        estimator=estimator,
        net=draw(names(USUAL_NETS, NETS, "net" in odd)),
        params=params,
        fit=draw(calls("fit", odd)),
        X_val=X_val,
        y_val=y_val,
        calls=tuple(
            draw(calls(m, draw(of_calls) if "calls" in odd else {"X"})) for m in chosen
        ),
    )


@pytest.mark.slow
@pytest.mark.parametrize("part", range(N_PARTS))
def test_every_configuration_works_or_is_refused(part):
    @seed(part)
    @settings(
        derandomize=False,
        max_examples=N_CONFIGURATIONS // N_PARTS,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(configurations())
    def check(configuration):
        assert violations(configuration) == []

    check()


@pytest.mark.parametrize("estimator", sorted({*WEIGHTED}))
def test_every_parameter_has_usual_values(estimator):
    assert {*parameters(estimator)} <= {*USUAL}
