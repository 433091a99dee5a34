"""Printed versions, and links from diagrams to the pages of estimators."""

import re
from pathlib import Path

import pytest
import skorch
import torch

import sklaplace

API = (Path(__file__).parents[2] / "docs" / "api.rst").read_text(encoding="utf-8")
ESTIMATORS = [name.rpartition(".")[2] for name in sklaplace.TRUSTED_TYPES]


def test_versions_are_printed_once_each(capsys):
    sklaplace.show_versions()
    printed, errors = capsys.readouterr()
    for module in (sklaplace, skorch, torch):
        line = f"{module.__name__}: {module.__version__}"
        assert len(re.findall(rf"^ *{re.escape(line)}$", printed, re.M)) == 1
    assert "sklearn: " in printed  # of scikit-learn's function
    assert errors == ""


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_diagram_links_to_the_page_of_the_estimator(name):
    kind = getattr(sklaplace, name)
    link = kind()._get_doc_link()
    assert f'href="{link}"' in kind()._repr_html_()
    # the name of the page that autosummary generates
    assert link.endswith(f"/generated/sklaplace.{name}.html")
    assert re.search(rf"^   {name}$", API, re.M)


def test_a_subclass_of_a_user_has_no_page():
    class Own(sklaplace.LaplaceClassifier):
        pass

    assert Own()._get_doc_link() == ""
