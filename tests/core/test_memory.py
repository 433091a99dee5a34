import os
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest

from sklaplace.core import budget

MIB = 2**20


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Files that a process reads its limits from; 1 GiB is free on the machine."""
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
    """Files that are only cached can be given back."""
    machine.enters("0::/user/job\n")
    machine.writes("user/job/memory.max", 500 * MIB)
    machine.writes("user/job/memory.current", 200 * MIB)
    assert budget.free_cpu_bytes() == 300 * MIB
    machine.writes("user/job/memory.stat", f"anon 7\ninactive_file {50 * MIB}")
    assert budget.free_cpu_bytes() == 350 * MIB


def test_version_1(machine):
    machine.enters("8:pids:/\n4:cpu,memory:/job\n0::/\n")
    machine.writes("memory/job/memory.limit_in_bytes", 400 * MIB)
    machine.writes("memory/job/memory.usage_in_bytes", 100 * MIB)
    machine.writes("memory/job/memory.stat", f"total_inactive_file {MIB}")
    assert budget.free_cpu_bytes() == 301 * MIB


@pytest.mark.parametrize("text", ["max", "9223372036854771712", "", "?"])
@pytest.mark.parametrize("group", ["0::/job", "4:memory:/job"])
def test_groups_without_a_limit(group, text, machine):
    machine.enters(group)
    machine.writes("job/memory.max", text)
    machine.writes("memory/job/memory.limit_in_bytes", text)
    assert budget.free_cpu_bytes() == 1024 * MIB


def test_the_smallest_of_all_limits_counts(machine):
    """That of a group above holds too, as does that of the machine."""
    machine.enters("0::/pod/container\n")
    for name, limit in {"pod": 300, "pod/container": 2000}.items():
        machine.writes(f"{name}/memory.max", limit * MIB)
        machine.writes(f"{name}/memory.current", 100 * MIB)
    assert budget.free_cpu_bytes() == 200 * MIB


def test_a_container_that_shows_its_own_group_only(machine):
    """The path is one of the host; the limit is in the folder of all groups."""
    machine.enters("0::/../../host/path\n1:memory:/docker/abc\n")
    machine.writes("memory.max", 250 * MIB)
    machine.writes("memory.current", 50 * MIB)
    assert budget.free_cpu_bytes() == 200 * MIB
    machine.writes("memory.current", 400 * MIB)
    assert budget.free_cpu_bytes() == 0


@pytest.mark.slow
def test_limit_of_the_address_space():
    """In a process of its own, as a limit once lowered stays."""
    pytest.importorskip("resource")
    if not os.path.exists("/proc/self/statm"):
        pytest.skip("the size of a process is not known")
    code = """
    import resource, torch
    from sklaplace.core.budget import free_bytes, require_bytes
    pages = int(open("/proc/self/statm").read().split()[0])
    limit = pages * resource.getpagesize() + 200 * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    free = free_bytes(torch.device("cpu"))
    assert 0 < free <= 200 * 2**20, free
    try:
        require_bytes(2**28, "cpu", "this", "use less")
    except ValueError as error:
        assert "MiB are free; use less" in str(error)
    else:
        raise AssertionError
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)
