"""The steps of `.ci/run` as sessions of nox.

Run two of them by ``nox -f .ci/noxfile.py -s lint types``.
"""

import re
from pathlib import Path

import nox

SCRIPT = Path(__file__).with_name("run")
(STEPS,) = re.findall(r"^STEPS=\((.+)\)$", SCRIPT.read_text(encoding="utf-8"), re.M)


def add_session(step: str) -> None:
    """Add a session that runs a step; the script makes its own environment."""

    @nox.session(name=step, venv_backend="none")
    def run(session: nox.Session) -> None:
        session.run("bash", str(SCRIPT), step, external=True)


for name in STEPS.split():
    add_session(name)
