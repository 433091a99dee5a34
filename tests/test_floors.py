"""The oldest tested releases are the oldest releases in pyproject.toml."""

import subprocess
import sys
from pathlib import Path

CI = Path(__file__).parents[1] / ".ci"


def test_constraints_are_written_from_pyproject():
    command = [sys.executable, CI / "floors.py"]
    written = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (CI / "floors.txt").read_text() == written.stdout, (
        "Write them anew: python .ci/floors.py > .ci/floors.txt"
    )
