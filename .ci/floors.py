"""Print the oldest releases that pyproject.toml allows as pip constraints.

python .ci/floors.py > .ci/floors.txt
pip install -e ".[test]" -c .ci/floors.txt
"""

import re
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


def floors(pyproject=PYPROJECT):
    """Return lines such as ``torch==2.6`` for the package and its tests."""
    project = tomllib.loads(pyproject.read_text())["project"]
    needed = project["dependencies"] + project["optional-dependencies"]["test"]
    found = [re.match(r"([\w-]+)>=([\w.]+)", line) for line in needed]
    return [f"{name}=={release}" for name, release in (m.groups() for m in found)]


if __name__ == "__main__":
    print("\n".join(sorted(floors())))
