"""Recipes are short, and run without a warning that they do not need."""

import pytest

from examples import FOLDER, run_example

RECIPES = sorted(path.name for path in FOLDER.glob("recipes/plot_*.py"))
# the client that a recipe is about
CLIENTS = {
    "plot_save_and_load.py": "skops",
    "plot_transformer.py": "transformers",
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_short(name):
    text = (FOLDER / "recipes" / name).read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 60


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
