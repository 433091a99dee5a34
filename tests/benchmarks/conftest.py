"""Settings shared by all benchmarks."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """Compute on one thread, so that times and their ratios are stable."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n_threads)


@pytest.fixture
def shown(request):
    """Print the measurements of a test; run with `-n 0 -s` to see them."""

    def show(**values):
        found = ", ".join(f"{name} {value:.2f}" for name, value in values.items())
        print(f"\n{request.node.name}: {found}")  # noqa: T201

    return show
