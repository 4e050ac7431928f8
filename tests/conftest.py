"""What the tests share: settings, the order in which they run, and the built book."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from hypothesis import settings
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from kvbook.lab.session import limit_thread_spin

limit_thread_spin()                                   # before any test loads torch
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:         # each of several workers has its share of the cores
    workers = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "book" / "_ext"))

settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")

LAST = ("test_notebooks", "test_live", "test_book", "test_browser")
"""Each of these needs what the one before it leaves in the execution cache or in ``_build``."""


def has_gpu() -> bool:
    """Whether torch finds a GPU."""
    import torch

    return torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run quick tests first, and skip what this machine or this run cannot do."""
    items.sort(key=lambda item: LAST.index(item.path.stem) + 1 if item.path.stem in LAST else
               -1 if item.get_closest_marker("xdist_group") else 0)     # what keeps one worker busy for long goes first
    if os.environ.get("KVBOOK_TEST") != "all":
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="slow: runs in `make test-all`"))
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and not has_gpu():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="torch finds no GPU"))


@pytest.fixture(scope="session")
def built_book() -> Path:
    """The folder of the built book, brought up to date as `make book` does it."""
    import build_book
    import execute
    import notebooks

    try:
        build_book.build()
    except (build_book.BuildError, execute.NotebookError, notebooks.DirectiveError) as error:
        pytest.fail(str(error), pytrace=False)
    return build_book.HTML


FIGURE = """
from kvbook.lab.figures import Figure, two_loops
two_loops({"prompt": 2, "steps": 3, "uncached": [2, 3, 4], "cached": [2, 1, 1], "kv_bytes_per_token": 23040})
"""

BROKEN_FIGURE = """
Figure("no_such_script", {}, "A caption.", "A figure whose script is missing.", "<p>The still frame.</p>")
"""


def sample_cells() -> list:
    """Cells that use every directive that shows on a page."""
    return [
        new_markdown_cell("# Fewer heads\n\nSee {numref}`fig-probe` and {eq}`eq-sum`.\n\n$$n(n+1)/2$$ (eq-sum)"),
        new_code_cell("#| hide\nsecret_word = 'unseen'"),
        new_code_cell("#| default_exp lab.sample"),
        new_code_cell("#| export\ndef double(number):\n    return 2 * number"),
        new_code_cell("#| echo: false\nprint('only the output', double(21))"),
        new_code_cell("#| code-fold: true\n#| code-summary: How it is made\nprint('below a fold')"),
        new_code_cell("#| eval: false\nraise SystemError('never runs')"),
        new_code_cell("#| gpu\nraise SystemError('no GPU here')"),
        new_code_cell("#| live\nfrom kvbook.control.paging import BlockPool, BlockTable\n\npool = BlockPool(4)\n"
                      "table = BlockTable(pool, block_size=4)\ntable.append(10)\nprint('blocks', table.blocks)"),
        new_code_cell("#| live\ntwin = table.fork()\n[pool.refcount(block) for block in twin.blocks]"),
        new_code_cell("#| label: fig-probe\n#| fig-cap: Without a cache the work grows." + FIGURE),
        new_code_cell("#| echo: false" + BROKEN_FIGURE),
        new_markdown_cell(":::{exercise} predict\n:label: ex-one\nHow many people fit?\n:::"),
        new_code_cell("print('not yet')"),
        new_markdown_cell("```{solution-start} ex-one\n:class: dropdown\n```\nTwo."),
        new_code_cell("print('the solution is', 2)"),
        new_markdown_cell("```{solution-end}\n```"),
    ]


TOC = """format: jb-book
root: book/index
parts:
  - caption: Begin
    chapters:
      - file: nbs/00_begin
  - caption: Chapters
    numbered: 1
    chapters:
      - file: nbs/01_sample
        sections:
          - file: nbs/01a_companion
      - file: nbs/02_next
"""


@pytest.fixture(scope="session")
def small_book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny book with the real configuration and extension; the folder of its pages."""
    import vendor

    assert vendor.main() == 0
    root = tmp_path_factory.mktemp("small_book")
    (root / "nbs").mkdir()
    shutil.copy(ROOT / "_config.yml", root)
    shutil.copytree(ROOT / "book", root / "book", ignore=shutil.ignore_patterns("__pycache__", "*.md"))
    (root / "book" / "index.md").write_text("# A small book\n\nWords to find: *palimpsest*.\n")
    (root / "book" / "_toc.yml").write_text(TOC)
    equation = "\n\n$$x = 1$$ (eq-{})\n\nEquation {{eq}}`eq-{}`."
    pages = {
        "00_begin": [new_markdown_cell("# Two walls" + equation.format("begin", "begin"))],
        "01_sample": sample_cells(),
        "01a_companion": [new_markdown_cell("# A companion" + equation.format("companion", "companion"))],
        "02_next": [new_markdown_cell("# Fewer bits" + equation.format("next", "next"))],
    }
    for name, cells in pages.items():
        nbformat.write(new_notebook(cells=cells), root / "nbs" / f"{name}.ipynb")
    command = [Path(sys.executable).parent / "jupyter-book", "build", ".", "--toc", "book/_toc.yml", "-W", "-n"]
    environment = {**os.environ, "KVBOOK_BUILDING": "1"}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-6000:]
    return root / "_build" / "html"
