from types import SimpleNamespace

import pytest

from sklaplace.core import budget

MIB = 2**20


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Return fake files with memory limits; the machine has 1 GiB of free memory."""
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    monkeypatch.setattr(budget, "PROC", proc)
    monkeypatch.setattr(budget, "CGROUPS", groups)

    def write(path, text):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    write(proc / "meminfo", f"MemTotal: 9 kB\nMemAvailable: {1024 * 1024} kB\n")
    return SimpleNamespace(
        enters=lambda lines: write(proc / "self" / "cgroup", lines),
        writes=lambda name, text: write(groups / name, f"{text}\n"),
    )


def test_no_control_groups(machine):
    assert budget.free_cpu_bytes() == 1024 * MIB


def test_version_2(machine):
    """The file cache counts as free memory, because the system can release it."""
    machine.enters("0::/user/job\n")
    machine.writes("user/job/memory.max", 500 * MIB)
    machine.writes("user/job/memory.current", 200 * MIB)
    machine.writes("user/job/memory.stat", f"anon 7\ninactive_file {50 * MIB}")
    assert budget.free_cpu_bytes() == 350 * MIB


@pytest.mark.parametrize("text", ["max", "", "?"])
def test_groups_without_a_limit(text, machine):
    machine.enters("0::/job\n")
    machine.writes("job/memory.max", text)
    assert budget.free_cpu_bytes() == 1024 * MIB


def test_the_smallest_of_all_limits_counts(machine):
    """The limits of parent groups and of the machine also apply."""
    machine.enters("0::/pod/container\n")
    for name, limit in {"pod": 300, "pod/container": 2000}.items():
        machine.writes(f"{name}/memory.max", limit * MIB)
        machine.writes(f"{name}/memory.current", 100 * MIB)
        machine.writes(f"{name}/memory.stat", "inactive_file 0")
    assert budget.free_cpu_bytes() == 200 * MIB


def test_a_container_that_shows_its_own_group_only(machine):
    """The path belongs to the host; the limit is in the root folder of all groups."""
    machine.enters("0::/../../host/path\n1:memory:/docker/abc\n")
    machine.writes("memory.max", 250 * MIB)
    machine.writes("memory.current", 50 * MIB)
    machine.writes("memory.stat", "inactive_file 0")
    assert budget.free_cpu_bytes() == 200 * MIB
    machine.writes("memory.current", 400 * MIB)
    assert budget.free_cpu_bytes() == 0
