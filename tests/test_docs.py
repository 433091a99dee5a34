"""The Python code of README and guide runs as printed; lists are complete."""

import ast
import io
import re
import runpy
import sys
import textwrap
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch

import sklaplace

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [
    page
    for page in sorted((ROOT / "docs").rglob("*.rst"))
    if {"auto_examples", "generated"}.isdisjoint(page.parts)
    and page.stem not in {"index", "text"}  # tests/clients runs the page on text
    and "code-block:: python" in page.read_text(encoding="utf-8")
]
MARKDOWN = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
RST = re.compile(r"^\.\. code-block:: python\n\n((?:   .*\n|\n)+)", re.MULTILINE)
# the blocks after examples, which show what they print
PRINTED = re.compile(r"^```python\n.*?^```\n\n^```\n(.*?)^```", re.DOTALL | re.M)


def run(page, pattern):
    """Run the Python blocks of a page in one namespace; return their output."""
    blocks = pattern.findall(page.read_text(encoding="utf-8"))
    assert blocks, f"{page.name} has no Python block."
    namespace = {"__name__": page.stem}
    printed = io.StringIO()
    with redirect_stdout(printed):
        for block in blocks:
            code = compile(textwrap.dedent(block), page.name, "exec")
            exec(code, namespace)
    return printed.getvalue()


@pytest.mark.usefixtures("rng_untouched")
def test_the_readme_prints_what_it_says():
    text = README.read_text(encoding="utf-8")
    assert run(README, MARKDOWN) == "".join(PRINTED.findall(text))


def test_the_first_command_has_the_code_of_the_readme():
    block = MARKDOWN.findall(README.read_text(encoding="utf-8"))[0]
    _, code = block.split("\n\n", 1)  # without imports
    assert code in (ROOT / "examples" / "plot_quickstart.py").read_text("utf-8")


@pytest.mark.slow
def test_the_first_command_prints_the_figures_of_the_readme(monkeypatch, tmp_path):
    """Regression test: it printed another table, and a picture with equal titles."""
    plt = pytest.importorskip("matplotlib.pyplot")
    text = README.read_text(encoding="utf-8")
    (example,) = re.findall(r"python (examples/\S+\.py)", text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plt, "show", lambda: None)
    printed, n_threads = io.StringIO(), torch.get_num_threads()
    try:
        with redirect_stdout(printed):
            found = runpy.run_path(str(ROOT / example))
    finally:
        torch.set_num_threads(n_threads)
        plt.close("all")
    assert printed.getvalue().startswith(PRINTED.findall(text)[0])
    assert (tmp_path / "quickstart.png").exists()
    alone, laplace = (ax.get_title().split()[-1] for ax in found["axes"])
    assert float(laplace) < 0.9 * float(alone)
    falls = " from {:.2f} to {:.2f}".format(*found["all_nlls"].mean(axis=0))
    assert falls in " ".join(text.split())


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_run_from_top_to_bottom(page):
    run(page, RST)
    blocks = RST.findall(page.read_text(encoding="utf-8"))
    assert len(blocks) == page.read_text().count("code-block:: python")


@pytest.mark.parametrize(
    "script", ["walk.py", pytest.param("combinations.py", marks=pytest.mark.slow)]
)
def test_generated_pages_are_what_happens(script, monkeypatch):
    monkeypatch.setattr(sys, "argv", [script, "--check"])
    runpy.run_path(str(ROOT / "docs" / script), run_name="__main__")


def sentences(node):
    """Return the literal text of a call's message, with … for variable parts."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(
            sentences(part) if isinstance(part, ast.Constant) else "…"
            for part in node.values
        )
    return ""


def warnings_of(tree):
    """Yield the messages of all warnings in a module, including named messages."""
    named = {
        target.id: sentences(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            function = ast.unparse(node.func)
            if function in {"warn_user", "warnings.warn"}:
                given = node.args[0]
                given = given.func.value if isinstance(given, ast.Call) else given
                yield (
                    named[given.id] if isinstance(given, ast.Name) else sentences(given)
                )


def test_every_warning_is_explained():
    faq = (ROOT / "docs" / "user_guide" / "faq.rst").read_text(encoding="utf-8")
    words = " ".join(faq.replace("*", "").split())
    found = [
        message
        for path in sorted(Path(sklaplace.__file__).parent.rglob("*.py"))
        for message in warnings_of(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert len(found) > 25
    for message in found:
        # the first words that do not vary
        pieces = [piece.split() for piece in re.split("[….:;,]", message)]
        start = next(piece for piece in pieces if len(piece) > 2)
        assert " ".join(start[:6]) in words, message
