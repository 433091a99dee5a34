"""Recipes and the tutorial run without warnings, and recipes are short."""

import numpy as np
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
def test_survival_is_recovered_from_censored_durations():
    """Bands contain the true curve only if the signs mark censored durations."""
    plt = pytest.importorskip("matplotlib.pyplot")
    names, _ = run_example("recipes/plot_survival.py")
    plt.close("all")
    assert "{:.0%}".format((names["y"] < 0).mean()) == "46%"  # as the text says
    truth = np.exp(-((names["t"] / np.exp(0.8)) ** names["shape"]))
    low, high = names["bands"]["with signs"]
    assert ((low < truth) & (truth < high)).all()
    assert (names["bands"]["without signs"][1] < truth).all()


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
