"""Every notebook runs from top to bottom, and its outputs are kept exactly as long as they hold."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import execute
import nbformat
import notebooks
import psutil
import pytest
from nbformat.v4 import new_code_cell, new_notebook

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("path", execute.all_notebooks(), ids=lambda path: path.stem)
@pytest.mark.timeout(1200)
def test_notebook_runs(path):
    notebook, _ = execute.execute(path)
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            assert output.output_type != "error", f"{path.name}, cell {cell.id}: {output.get('evalue')}"
            assert "Warning" not in output.get("text", ""), f"{path.name}, cell {cell.id}: {output.text}"


# Directives


def translated(source: str, flags: frozenset[str] = frozenset()):
    notebook = new_notebook(cells=[new_code_cell(source)])
    return notebooks.translate(notebook, "sample", flags).cells[0]


@pytest.mark.parametrize(
    ("source", "tags", "code"),
    [
        ("x = 1", [], "x = 1"),
        ("#| hide\nx = 1", ["remove-cell"], "x = 1"),
        ("#| include: false\nx = 1", ["remove-cell"], "x = 1"),
        ("#| default_exp lab.x", ["remove-cell"], ""),
        ("#| echo: false\nx", ["remove-input"], "x"),
        ("#| echo: true\nx", [], "x"),
        ("#| hide_input\nx", ["remove-input"], "x"),
        ("#|code-fold: true\nx", ["hide-input"], "x"),
        ("#| fold\n#| code-summary: All of it\nx", ["hide-cell"], "x"),
        ("#| wrap\nx", ["kv-wrap"], "x"),
        ("#| output: false\nx", ["remove-output"], "x"),
        ("#| eval: false\nx", ["skip-execution"], "x"),
        ("#| slow\nx", ["skip-execution"], "x"),
        ("#| export\n#| gpu\nx", ["skip-execution", "kv-export"], "x"),
        ("\n#| live\nx", ["live"], "x"),
        ("#| live\n#| wrap\nx", ["live", "kv-wrap"], "x"),
        ("x\n#| hide", [], "x\n#| hide"),
    ],
)
def test_directives_become_tags(source, tags, code):
    cell = translated(source)
    assert cell.metadata.get("tags", []) == tags
    assert cell.source == code


def test_optional_cells_run_where_asked_for():
    assert "tags" not in translated("#| slow\nx", frozenset({"slow"})).metadata
    both = translated("#| slow\n#| gpu\nx", frozenset({"slow"}))
    assert both.metadata.tags == ["skip-execution"]


def test_a_label_and_a_caption_make_a_figure():
    cell = translated('#| label: fig-a\n#| fig-cap: "Two fit: that\'s all."\n#| fig-alt: A line\nplot()')
    assert cell.metadata.mystnb == {"figure": {"name": "fig-a", "caption": "Two fit: that's all."},
                                    "image": {"alt": "A line"}}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("#| hyde\nx", "unknown directive 'hyde'"),
        ("#| echo: nope\nx", "'echo' is 'nope'"),
        ("#| label: fig-a\nx", "'label' needs 'fig-cap'"),
        ("#| fig-cap: Words.\nx", "'fig-cap' needs 'label'"),
        ("#| code-summary: Words\nx", "'code-summary' needs 'code-fold'"),
        ("#| label:\n#| fig-cap: Words\nx", "'label' is empty"),
        ("#| live\n#| hide\nx", "'hide' cannot stand beside 'live'"),
        ("#| live\n#| eval: false\nx", "'eval' cannot stand beside 'live'"),
    ],
)
def test_a_wrong_directive_names_its_cell(source, message):
    with pytest.raises(notebooks.DirectiveError, match=message) as raised:
        notebooks.translate(new_notebook(cells=[new_code_cell("x"), new_code_cell(source, id="c0ffee")]), "nb.ipynb")
    assert "nb.ipynb, cell 1 (c0ffee)" in str(raised.value)


def test_a_notebook_on_disk_is_not_touched(sandbox):
    before = sandbox.notebook.read_bytes()
    notebooks.read(sandbox.notebook, root=sandbox.root)
    assert sandbox.notebook.read_bytes() == before


# Keys


FILES = {
    "kvbook/__init__.py": "",
    "kvbook/cli.py": "",
    "kvbook/control/__init__.py": "",
    "kvbook/control/direct.py": "from . import relative\n",
    "kvbook/control/relative.py": "def late():\n    from kvbook.compute.inner import thing\n    return thing\n",
    "kvbook/control/unrelated.py": "",
    "kvbook/compute/__init__.py": "from .of_package import other\n",
    "kvbook/compute/inner.py": "import kvbook.control.direct\nthing = 1\n",
    "kvbook/compute/of_package.py": "other = 2\n",
    "kvbook/lab/__init__.py": "",
    "kvbook/lab/figures.py": "",
    "kvbook/lab/claims.py": "",
    "kvbook/lab/recorded.py": "",
    "kvbook/lab/static/probe.js": "",
    "book/claims.toml": "",
    "book/evidence/one.json": "{}",
}


class Sandbox:
    """A package of a few modules that import each other in every way, and a notebook that imports one of them."""

    def __init__(self, root: Path):
        self.root = root
        self.notebook = root / "nbs" / "01_sample.ipynb"
        for name, text in FILES.items():
            self.write(name, text)
        self.cells("from kvbook.control.direct import relative")

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def cells(self, *sources: str) -> None:
        self.notebook.parent.mkdir(exist_ok=True)
        cells = [new_code_cell(source, id=f"cell{number}") for number, source in enumerate(sources)]
        nbformat.write(new_notebook(cells=cells), self.notebook)

    def key(self) -> str:
        return notebooks.read(self.notebook, root=self.root).metadata.kernelspec["kvbook"]

    def execute(self):
        return execute.execute(self.notebook, self.root / "cache", self.root)


@pytest.fixture
def sandbox(tmp_path, monkeypatch):
    monkeypatch.delenv("KVBOOK_RUN", raising=False)
    return Sandbox(tmp_path)


def test_dependencies_are_transitive(sandbox):
    found = notebooks.dependencies(["from kvbook.control.direct import relative"], sandbox.root)
    assert set(found) == {
        "kvbook", "kvbook.control", "kvbook.control.direct", "kvbook.control.relative", "kvbook.compute",
        "kvbook.compute.inner", "kvbook.compute.of_package",
    }


@pytest.mark.parametrize(
    "source",
    ["import kvbook.cli", "from kvbook import cli", "!kvbook hello", "%timeit 1 + 1\nfrom kvbook.cli import *"],
)
def test_every_form_of_import_counts(sandbox, source):
    assert "kvbook.cli" in notebooks.dependencies([source], sandbox.root)


@pytest.mark.parametrize(
    "changed", ["kvbook/control/direct.py", "kvbook/control/relative.py", "kvbook/compute/inner.py",
                "kvbook/compute/of_package.py", "kvbook/__init__.py"]
)
def test_a_change_in_what_is_imported_changes_the_key(sandbox, changed):
    before = sandbox.key()
    sandbox.write(changed, FILES[changed] + "changed = True\n")
    assert sandbox.key() != before
    sandbox.write(changed, FILES[changed])
    assert sandbox.key() == before


@pytest.mark.parametrize("changed", ["kvbook/control/unrelated.py", "kvbook/cli.py", "kvbook/lab/static/probe.js",
                                     "book/claims.toml", "book/evidence/one.json"])
def test_an_unrelated_change_leaves_the_key(sandbox, changed):
    before = sandbox.key()
    sandbox.write(changed, FILES[changed] + " ")
    assert sandbox.key() == before


@pytest.mark.parametrize(
    ("module", "changed"),
    [("figures", "kvbook/lab/static/probe.js"), ("claims", "book/claims.toml"), ("recorded", "book/evidence/one.json")],
)
def test_data_counts_where_its_module_is_imported(sandbox, module, changed):
    sandbox.cells(f"import kvbook.lab.{module}")
    before = sandbox.key()
    sandbox.write(changed, FILES[changed] + " ")
    assert sandbox.key() != before


def test_what_runs_counts_and_prose_does_not(sandbox, monkeypatch):
    before = sandbox.key()
    sandbox.cells("#| eval: false\nfrom kvbook.control.direct import relative")
    assert sandbox.key() != before
    sandbox.cells("#| hide\nfrom kvbook.control.direct import relative")
    assert sandbox.key() == before
    monkeypatch.setenv("KVBOOK_RUN", "slow")
    assert sandbox.key() != before


# Running


def test_outputs_are_stored_and_found_again(sandbox):
    sandbox.cells("print(6 * 7)", "#| slow\nraise ValueError")
    notebook, ran = sandbox.execute()
    again, ran_again = sandbox.execute()
    assert (ran, ran_again) == (True, False)
    assert again.cells[0].outputs[0].text == notebook.cells[0].outputs[0].text == "42\n"
    assert again.cells[1].outputs == []
    assert again.metadata["execution_seconds"] == notebook.metadata["execution_seconds"] > 0


def test_what_a_cell_streams_is_one_output(sandbox):
    sandbox.cells("for word in ('Li', 'bra', 'ries\\n'):\n    print(word, end='', flush=True)")
    notebook, _ = sandbox.execute()
    assert [output.text for output in notebook.cells[0].outputs] == ["Libraries\n"]


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_text('{"cells": [')])
def test_a_half_written_entry_is_run_again(sandbox, damage):
    sandbox.cells("print(1)")
    sandbox.execute()
    (entry,) = (sandbox.root / "cache").rglob("base.ipynb")
    damage(entry)
    assert sandbox.execute()[1]
    assert not sandbox.execute()[1]


def test_a_failure_shows_the_cell_and_stores_nothing(sandbox):
    sandbox.cells("fine = 1", "number = 0\n1 / number")
    with pytest.raises(execute.NotebookError) as raised:
        sandbox.execute()
    message = str(raised.value)
    assert "01_sample.ipynb, cell 1 (cell1) failed" in message
    assert "number = 0\n1 / number" in message
    assert "ZeroDivisionError" in message
    assert "\x1b" not in message
    assert execute.stored(notebooks.read(sandbox.notebook, root=sandbox.root), sandbox.root / "cache") is None


EXECUTE = """
import sys
from pathlib import Path
extension, notebook, root = sys.argv[1:]
sys.path.insert(0, extension)
import execute
try:
    execute.execute(Path(notebook), Path(root) / "cache", Path(root))
except KeyboardInterrupt:
    print("interrupted")
"""


def test_an_interrupt_stops_the_kernel_and_stores_nothing(sandbox):
    started = sandbox.root / "nbs" / "started"
    sandbox.cells(
        f"import os, pathlib, time\npathlib.Path({str(started)!r}).write_text(str(os.getpid()))\ntime.sleep(60)"
    )
    command = [sys.executable, "-c", EXECUTE, str(ROOT / "book" / "_ext"), str(sandbox.notebook), str(sandbox.root)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    while process.poll() is None and not (started.exists() and started.read_text()):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[0] == "interrupted\n"
    assert not psutil.pid_exists(int(started.read_text()))
    assert execute.stored(notebooks.read(sandbox.notebook, root=sandbox.root), sandbox.root / "cache") is None


def test_kernels_know_that_the_book_is_built(sandbox):
    sandbox.cells("import os, shutil\nprint(os.environ['KVBOOK_BUILDING'], shutil.which('jupyter-book'))")
    notebook, _ = sandbox.execute()
    assert notebook.cells[0].outputs[0].text.split() == ["1", str(Path(sys.executable).parent / "jupyter-book")]


def test_an_unknown_name_is_refused():
    script = ROOT / "book" / "_ext" / "execute.py"
    done = subprocess.run([sys.executable, script, "no_such_notebook"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "no notebook named no_such_notebook" in done.stderr
