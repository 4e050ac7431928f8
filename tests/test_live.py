"""Cells that the reader runs: each says the same alone in a bare Python as it did in its notebook."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import execute
import kvbook_ext
import live_runner
import pytest

ROOT = Path(__file__).resolve().parents[1]

ALONE = """
import json, sys
sys.path.insert(0, sys.argv[1])
import live_runner
cells, said = live_runner.Cells(), []
for number, source in enumerate(json.load(sys.stdin), 1):
    said.append([])
    cells.run(f"cell {number}", source, lambda *message: said[-1].append(message))
json.dump(said, sys.stdout)
"""


@pytest.fixture(scope="session")
def archive(tmp_path_factory) -> Path:
    """What the browser's Python imports from."""
    path = tmp_path_factory.mktemp("live") / "kvbook.zip"
    kvbook_ext.live_package(path)
    return path


def run_alone(archive: Path, sources: list[str]) -> list[list[list[str]]]:
    """Run cells in a Python that finds the standard library and the archive only; [kind, text] of all they say."""
    done = subprocess.run([sys.executable, "-I", "-S", "-c", ALONE, str(archive)], input=json.dumps(sources),
                          capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def recorded(cell) -> str:
    """What a cell's stored outputs show of text."""
    return "".join(o.text if o.output_type == "stream" else o.data["text/plain"] + "\n" for o in cell.outputs)


def live_pages() -> list[Path]:
    return [path for path in execute.all_notebooks() if '"#| live' in path.read_text(encoding="utf-8")]


@pytest.mark.timeout(1200)
def test_live_cells_say_alone_what_is_recorded(archive):
    for path in live_pages():
        cells = [c for c in execute.execute(path)[0].cells if "live" in c.metadata.get("tags", ())]
        for cell, said in zip(cells, run_alone(archive, [c.source for c in cells]), strict=True):
            assert "".join(text for _, text in said) == recorded(cell), f"{path.name}, cell {cell.id}"
            assert len(cell.source.splitlines()) <= 20, f"{path.name}, cell {cell.id} is long to edit in a page"


def test_a_cell_that_needs_the_rest_of_its_page_fails_alone(archive):
    sources = ["from kvbook.control.paging import BlockPool", "BlockPool(3).num_free", "plt.show()",
               "import torch", "from kvbook.compute.model import load"]
    (first, second, *others) = run_alone(archive, sources)
    assert (first, second) == ([], [["value", "3\n"]])
    assert [said[-1][1].splitlines()[-1] for said in others] == [
        "NameError: name 'plt' is not defined", "ModuleNotFoundError: No module named 'torch'",
        "ModuleNotFoundError: No module named 'kvbook.compute'"]


def test_the_archive_holds_the_modules_as_exported(archive):
    modules = [ROOT / "kvbook" / "__init__.py", *(ROOT / "kvbook" / "control").glob("*.py")]
    with zipfile.ZipFile(archive) as opened:
        assert {name: opened.read(name) for name in opened.namelist() if name != "live_runner.py"} == {
            path.relative_to(ROOT).as_posix(): path.read_bytes() for path in modules}


def test_only_pages_with_live_cells_load_their_script(small_book):
    users = [p.stem for p in small_book.rglob("*.html") if "kv-live.js" in p.read_text(encoding="utf-8")]
    assert users == ["01_sample"]
    assert not [p for p in small_book.rglob("*.html") if "pyodide" in p.read_text(encoding="utf-8")]


# Running a cell as Jupyter does


def said_by(*sources: str) -> list[tuple[str, str]]:
    """What the last of some cells says."""
    cells, said = live_runner.Cells(), []
    for number, source in enumerate(sources, 1):
        said.clear()
        cells.run(f"cell {number}", source, lambda *message: said.append(message))
    return said


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("", []),
        ("x = 1", []),
        ("1 + 1", [("value", "2\n")]),
        ("'text'", [("value", "'text'\n")]),
        ("print('a')\n{1: 'b'}", [("out", "a\n"), ("value", "{1: 'b'}\n")]),
        ("2;", []),
        ("None", []),
        ("print('a', end='')", [("out", "a")]),
        ("import sys\nprint('a', file=sys.stderr)", [("out", "a\n")]),
    ],
)
def test_prints_and_the_last_value_are_shown(source, said):
    assert said_by(source) == said


def test_cells_share_their_names():
    assert said_by("def f(x): return x + y", "y = 2", "f(1)") == [("value", "3\n")]


def test_a_traceback_shows_the_lines_of_cells_only():
    pool = "from kvbook.control.paging import BlockPool\ndef take(n):\n    return BlockPool(4).allocate(n)"
    [(kind, text)] = said_by(pool, "print('first', end='')\ntake(5)")[1:]
    assert kind == "error"
    assert [line.strip() for line in text.splitlines() if not set(line) <= set(" ^~")] == [
        "Traceback (most recent call last):", 'File "cell 2", line 2, in <module>', "take(5)",
        'File "cell 1", line 3, in take', "return BlockPool(4).allocate(n)",
        "kvbook.control.paging.OutOfBlocks: 5 wanted, 4 free"]


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("x = (", ['  File "cell 1", line 1', "    x = (", "        ^", "SyntaxError: '(' was never closed"]),
        ("raise SystemExit(3)", ["Traceback (most recent call last):", '  File "cell 1", line 1, in <module>',
                                 "    raise SystemExit(3)", "SystemExit: 3"]),
    ],
)
def test_nothing_a_cell_raises_ends_python(source, lines):
    [(kind, text)] = said_by(source)
    assert (kind, text.splitlines()) == ("error", lines)


@pytest.mark.parametrize("source", ["for i in range(10**4):\n    print('on and on')",
                                    "for i in range(10**5):\n    print('.', end='')", "list(range(10**5))"])
def test_endless_output_is_cut(source):
    text = "".join(text for _, text in said_by(source))
    assert live_runner.OUTPUT_LIMIT < len(text) < live_runner.OUTPUT_LIMIT + 100
    assert text.endswith("\n… only the first 20,000 characters are shown\n")
