"""Properties are computed once, even with several threads and processes."""

import threading
from concurrent.futures import ThreadPoolExecutor

from shared import HANGS

from sklaplace.core.parallel import cached_property


class Slow:
    def __init__(self, started=None, ends=None):
        self.started, self.ends, self.calls = started, ends, 0

    @cached_property
    def value(self):
        """A value."""
        self.calls += 1
        if self.started:
            self.started.set()
            assert self.ends.wait(HANGS), "another instance waited"
        return 3


def test_it_is_computed_once():
    slow = Slow()
    assert (slow.value, slow.value, slow.calls) == (3, 3, 1)
    assert Slow.value.__doc__ == "A value."


def test_instances_do_not_wait_for_each_other():
    """Python 3.11 has one lock for all instances; a forked process never frees it."""
    started, ends = threading.Event(), threading.Event()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(lambda: Slow(started, ends).value)
        assert started.wait(HANGS)
        assert pool.submit(lambda: Slow().value).result(HANGS) == 3
        ends.set()
        assert first.result(HANGS) == 3
