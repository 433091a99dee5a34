"""Scopes of progress output: phases, progress bars, threads, failures."""

import re
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from sklaplace.core import progress

TIME = r"(under 0\.1 s|\d+\.\d s|\d+ min \d+ s|\d+ h \d+ min)"


@pytest.fixture
def bars(monkeypatch):
    """Return fake tqdm bars that record their calls."""
    made = []

    class Bar:
        def __init__(self, total, desc, leave):
            self.total, self.desc, self.leave = total, desc, leave
            self.n, self.n_closed = 0, 0
            assert not any(bar.n_closed == 0 for bar in made), "two bars at a time"
            made.append(self)

        def update(self):
            assert not self.n_closed
            self.n += 1

        def close(self):
            self.n_closed += 1

    monkeypatch.setitem(sys.modules, "tqdm.auto", SimpleNamespace(tqdm=Bar))
    return made


def fails(*_):
    raise RuntimeError("a failure")


class TestPhases:
    @pytest.mark.parametrize("verbose", [0, False, np.False_, None, "loud"])
    def test_silent(self, verbose, capsys):
        """Invalid values print nothing; a later check raises the error."""
        with progress.reporting("Name", verbose), progress.phase("train"):
            progress.line("a line")
        progress.line("outside of all scopes")
        assert capsys.readouterr() == ("", "")

    @pytest.mark.parametrize("verbose", [1, True, np.True_, np.int64(2)])
    def test_names_and_times(self, verbose, capsys):
        with progress.reporting("Name", verbose):
            progress.line("a line")
            with progress.phase("train"):
                pass
        first, second = capsys.readouterr().out.splitlines()
        assert first == "[Name] a line"
        assert re.fullmatch(rf"\[Name\] train: {TIME}", second)

    def test_phases_within_a_phase_are_parts_of_it(self, capsys):
        with progress.reporting("Name", 1):
            with progress.phase("folds"):
                for _ in range(3):
                    with progress.phase("train"):
                        progress.line("a line")
            with progress.phase("tune"):
                pass
        assert re.findall(r"\] (\w+):", capsys.readouterr().out) == ["folds", "tune"]

    def test_a_failed_phase_is_not_printed_and_the_next_one_is(self, capsys):
        with progress.reporting("Name", 1):
            with pytest.raises(RuntimeError), progress.phase("train"):
                fails()
            with progress.phase("tune"):
                pass
        assert re.findall(r"\] (\w+):", capsys.readouterr().out) == ["tune"]

    def test_the_scope_around_goes_on(self, capsys):
        """The outer scope resumes even if the inner scope fails."""
        with progress.reporting("Outer", 1):
            with pytest.raises(RuntimeError), progress.reporting("Inner", 0):
                fails()
            progress.line("here")
        assert capsys.readouterr().out == "[Outer] here\n"


class TestTimes:
    SECONDS = np.concatenate([np.geomspace(1e-9, 1e6, 4001), [59.94, 59.96, 3599.6]])

    def test_value(self):
        """The printed time is off by at most half of its smallest unit."""
        units = {"s": 1, "min": 60, "h": 3600}
        for seconds in self.SECONDS:
            found = re.findall(
                r"([\d.]+) (s|min|h)", text := progress.duration(seconds)
            )
            read = sum(float(number) * units[unit] for number, unit in found)
            size = 0.05 if "." in text else units[found[-1][1]]
            assert abs(read - seconds) <= size + 0.1 * text.startswith("under")


class TestBars:
    def test_counts_all_items_and_leaves_nothing(self, bars):
        with progress.reporting("Name", 2):
            assert list(progress.tracked(iter("abc"), "letters", 3)) == ["a", "b", "c"]
        (bar,) = bars
        assert (bar.total, bar.n, bar.n_closed, bar.leave) == (3, 3, 1, False)
        assert bar.desc == "[Name] letters"

    def test_one_at_a_time(self, bars):
        """A nested loop shows no bar, unless the outer loop has only one step."""
        with progress.reporting("Name", 2):
            for _ in progress.tracked("ab", "outer", 2):
                list(progress.tracked("abc", "inner", 3))
            for _ in progress.tracked("a", "single", 1):
                list(progress.tracked("abc", "inner", 3))
        assert [(bar.desc[7:], bar.n) for bar in bars] == [("outer", 2), ("inner", 3)]

    def test_closed_where_a_loop_fails(self, bars):
        """The bar closes, although the exception keeps the loop's generator alive."""

        @progress.phase("train")
        def loop():
            for item in progress.tracked("abc", "letters", 3):
                fails(item)

        with progress.reporting("Name", 2):
            with pytest.raises(RuntimeError) as caught:
                loop()
            assert caught.tb is not None
            assert bars[0].n_closed == 1
            list(progress.tracked("ab", "more", 2))
        assert [bar.n_closed for bar in bars] == [1, 1]


class TestElsewhere:
    def test_other_threads_are_silent(self, capsys, bars):
        def work():
            progress.line("from a thread")
            list(progress.tracked("abc", "letters", 3))

        with progress.reporting("Name", 2):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            progress.line("from here")
        assert capsys.readouterr().out == "[Name] from here\n"
        assert bars == []
