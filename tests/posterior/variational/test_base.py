import torch

from sklaplace.posterior.variational.base import inverse_softplus, positive, sum_draws


def test_inverse_softplus_inverts():
    x = torch.logspace(-25, 3, 50, dtype=torch.float64)
    torch.testing.assert_close(positive(inverse_softplus(x)), x, rtol=1e-4, atol=0)
    # where 1e-30 is below rounding
    x = torch.logspace(-12, 3, 50, dtype=torch.float64)
    torch.testing.assert_close(positive(inverse_softplus(x)), x, rtol=1e-13, atol=0)


def test_positive_numbers_have_finite_logarithms():
    raw = torch.tensor([-1e30, -200.0, 0.0, 1e30], requires_grad=True)
    found = positive(raw)
    assert (found > 0).all()
    (100 * found.log().sum()).backward()
    assert raw.grad.isfinite().all()


def test_sum_draws():
    x = torch.arange(6.0).reshape(2, 3)
    assert torch.equal(sum_draws(x), x.sum(0))
    assert torch.equal(sum_draws(x[:1]), x[0])
