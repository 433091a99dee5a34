"""Versions: printed, and in the citation."""

import re
from pathlib import Path

import skorch
import torch

import sklaplace


def test_versions_are_printed_once_each(capsys):
    sklaplace.show_versions()
    printed, errors = capsys.readouterr()
    for module in (sklaplace, skorch, torch):
        line = f"{module.__name__}: {module.__version__}"
        assert len(re.findall(rf"^ *{re.escape(line)}$", printed, re.M)) == 1
    assert "sklearn: " in printed  # of scikit-learn's function
    assert errors == ""


def test_the_citation_names_the_version():
    citation = (Path(__file__).parents[2] / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {sklaplace.__version__}\n" in citation
