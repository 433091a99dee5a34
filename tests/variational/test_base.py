import torch

from sklaplace.variational.base import inverse_softplus, positive


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
