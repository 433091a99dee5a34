"""Recipes and the tutorial run without warnings, and recipes are short."""

import pytest

from examples import FOLDER, run_example

RECIPES = sorted(path.name for path in FOLDER.glob("recipes/plot_*.py"))
# the client that a recipe is about
CLIENTS = {
    "plot_save_and_load.py": "skops",
    "plot_transformer.py": "transformers",
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:FigureCanvasAgg is non-interactive")
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_draws_one_picture(name):
    plt = pytest.importorskip("matplotlib.pyplot")
    if name in CLIENTS:
        pytest.importorskip(CLIENTS[name])
    plt.close("all")
    try:
        run_example(f"recipes/{name}")
        assert len(plt.get_fignums()) == 1
    finally:
        plt.close("all")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:FigureCanvasAgg is non-interactive")
def test_the_tutorial_runs_in_an_empty_folder(tmp_path, monkeypatch):
    plt = pytest.importorskip("matplotlib.pyplot")
    pytest.importorskip("pandas")
    monkeypatch.chdir(tmp_path)
    plt.close("all")
    try:
        names, printed = run_example("plot_tutorial.py")
        assert len(plt.get_fignums()) <= 2
    finally:
        plt.close("all")
    assert not list(tmp_path.iterdir())
    assert printed.count("flagged: True") == 3
    assert names["served"](names["rows"][:5])[2].shape == (5, 2)
