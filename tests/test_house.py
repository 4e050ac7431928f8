"""The rules of the house: one source, floors without circles, clean code, an import that changes nothing."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import kvbook_ext
import pytest

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
SOURCES = sorted(p for p in (ROOT / "kvbook").rglob("*.py") if p.name != "_modidx.py")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def run(command: list, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess:
    """Run a command with captured output."""
    env = {**os.environ, "PWD": str(cwd), **environment}
    return subprocess.run(list(map(str, command)), cwd=cwd, env=env, capture_output=True, text=True)


def copy_tree(target: Path, *names: str) -> None:
    """Copy files and folders of the repository, without what tools leave in them."""
    litter = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints", "*.egg-info")
    for name in names:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target / name, ignore=litter)
        else:
            shutil.copy(ROOT / name, target / name)


# One source


def contents(root: Path) -> dict[str, bytes]:
    """The notebooks and modules under a folder, by name."""
    paths = [p for d in ("kvbook", "nbs") for p in (root / d).rglob("*") if p.suffix in (".py", ".ipynb")]
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in paths}


def stale_files(tmp_path: Path) -> list[str]:
    """What exporting and cleaning a copy of the repository changes."""
    before = contents(tmp_path)
    for command in ("nbdev_export", "nbdev_clean"):
        done = run([BIN / command], tmp_path)
        assert done.returncode == 0, done.stderr
    after = contents(tmp_path)
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


def test_modules_are_what_the_notebooks_export_and_notebooks_are_clean(tmp_path):
    copy_tree(tmp_path, "kvbook", "nbs", "settings.ini")
    assert stale_files(tmp_path) == []


def test_an_edited_module_and_a_stored_output_are_noticed(tmp_path):
    copy_tree(tmp_path, "kvbook", "nbs", "settings.ini")
    module = tmp_path / "kvbook" / "control" / "config.py"
    module.write_text(module.read_text() + "\nextra = 1\n")
    path = tmp_path / "nbs" / "00a_model.ipynb"
    notebook = json.loads(path.read_text())
    notebook["cells"][0]["metadata"] = {"tags": ["left-over"]}
    path.write_text(json.dumps(notebook))
    assert stale_files(tmp_path) == ["kvbook/control/config.py", "nbs/00a_model.ipynb"]


def test_every_module_comes_from_a_notebook():
    exported = set()
    for path in (ROOT / "nbs").glob("*.ipynb"):
        for cell in json.loads(path.read_text())["cells"]:
            exported |= set(re.findall(r"^#\s*\|\s*default_exp\s+([\w.]+)", "".join(cell["source"]), re.MULTILINE))
    modules = {p.relative_to(ROOT / "kvbook").with_suffix("").as_posix().replace("/", ".") for p in SOURCES
               if p.name != "__init__.py"}
    assert modules == exported


# Floors


ROOF = ("kvbook.cli", "kvbook.server")


def floors(root: Path) -> list[list[str]]:
    """The modules of the package by chapter, highest floor first: the roof, chapters 8 to 0, the appendix."""
    by_floor: dict[int, list[str]] = {}
    for path in sorted((root / "nbs").glob("*.ipynb")):
        text = "".join("".join(c["source"]) + "\n" for c in json.loads(path.read_text())["cells"])
        for name in re.findall(r"^#\s*\|\s*default_exp\s+([\w.]+)", text, re.MULTILINE):
            module = f"kvbook.{name}"
            number = int(path.name[:2])
            floor = 100 if module in ROOF else -1 if number >= kvbook_ext.APPENDIX else number
            by_floor.setdefault(floor, []).append(module)
    return [by_floor[floor] for floor in sorted(by_floor, reverse=True)]


def import_contracts(root: Path) -> str:
    """The contracts of import-linter that hold DESIGN's rules 1 and 2."""
    layers = "\n".join("    " + " : ".join(modules) for modules in floors(root))
    packages = {p.parent.name for p in (root / "kvbook").glob("*/__init__.py")}
    heavy = "\n".join(f"    kvbook.{name}" for name in sorted(packages - {"control"}))
    return f"""[importlinter]
root_package = kvbook
include_external_packages = True

[importlinter:contract:floors]
name = A module imports only from its own or an earlier chapter
type = layers
layers =
{layers}

[importlinter:contract:control]
name = The control plane is pure standard library
type = forbidden
source_modules =
    kvbook.control
forbidden_modules =
{heavy}
    torch
    numpy
"""


def check_imports(root: Path, tmp_path: Path) -> subprocess.CompletedProcess:
    """Run import-linter on the package under ``root``."""
    config = tmp_path / "contracts.ini"
    config.write_text(import_contracts(root))
    return run([BIN / "lint-imports", "--config", config, "--no-cache"], root, PYTHONPATH=str(root))


def test_no_module_imports_from_a_later_floor(tmp_path):
    done = check_imports(ROOT, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("kvbook/control/config.py", "import torch"),
        ("kvbook/control/config.py", "def late():\n    from kvbook.compute import model"),
        ("kvbook/lab/session.py", "from kvbook.control import config"),
    ],
)
def test_a_wrong_import_is_noticed(tmp_path, module, line):
    copy_tree(tmp_path, "kvbook", "nbs")
    (tmp_path / module).write_text((ROOT / module).read_text() + "\n" + line + "\n")
    done = check_imports(tmp_path, tmp_path)
    assert done.returncode == 1
    assert "BROKEN" in done.stdout


def outside_imports(path: Path) -> set[str]:
    """The top-level names of what a module imports, wherever the import stands; its own package left out."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(node.module.split(".")[0])
    return found - {"kvbook"}


def test_control_needs_only_the_standard_library():
    modules = [p for p in SOURCES if p.parent.name == "control"]
    assert len(modules) > 1
    for path in modules:
        assert outside_imports(path) <= sys.stdlib_module_names, path


# Clean code


def test_ruff_finds_nothing():
    done = run([BIN / "ruff", "check", "--no-cache", "kvbook", "tests", "book/_ext", "nbs"])
    assert done.returncode == 0, done.stdout


def functions() -> list[tuple[str, ast.FunctionDef]]:
    """Every function of the package with its place; kernels are measured by other rules."""
    return [
        (f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", node)
        for path in SOURCES
        if "kernels" not in path.parts
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, FUNCTIONS)
    ]


def code_lines(node: ast.AST) -> int:
    """Lines of a function, its docstring not counted."""
    body = node.body
    docstring = body[0] if ast.get_docstring(node) is not None else None
    return node.end_lineno - node.lineno + 1 - (docstring.end_lineno - docstring.lineno + 1 if docstring else 0)


def test_functions_are_short():
    sizes = {where: code_lines(node) for where, node in functions()}
    assert [where for where, size in sizes.items() if size > 60] == []
    long = [where for where, size in sizes.items() if size > 25]
    assert len(long) <= 0.1 * len(sizes), long


def test_every_public_name_has_a_docstring():
    missing = []
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
        for scope in (tree, *classes):
            public = [n for n in scope.body if isinstance(n, (*FUNCTIONS, ast.ClassDef)) and not n.name.startswith("_")]
            missing += [f"{path.relative_to(ROOT)}:{n.lineno} {n.name}" for n in public if not ast.get_docstring(n)]
    assert missing == []


def test_no_cell_shown_whole_is_over_60_lines():
    long = []
    for path in (ROOT / "nbs").glob("*.ipynb"):
        for cell in json.loads(path.read_text())["cells"]:
            source = "".join(cell["source"])
            folded = re.search(r"^#\s*\|\s*(code-fold:\s*true|hide\b|echo:\s*false)", source, re.MULTILINE)
            if cell["cell_type"] == "code" and not folded and len(source.splitlines()) > 60:
                long.append(f"{path.name} {cell['id']}")
    assert long == []


def tracked_files() -> list[Path]:
    """The files that are or would be committed."""
    listed = run(["git", "ls-files", "--cached", "--others", "--exclude-standard"])
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def test_nothing_names_this_machine_or_a_package_index():
    index_hosts = [".".join(parts) for parts in (("pypi", "org"), ("pythonhosted", "org"), ("npmjs", "org"))]
    options = ["".join(parts) for parts in (("index", "-url"), ('"resol', 'ved":'))]
    homes = [f"{folder}/" for folder in (ROOT.parent, Path.home()) if len(folder.parts) > 1]
    found = []
    for path in tracked_files():
        if path.suffix in (".py", ".md", ".ipynb", ".ini", ".toml", ".txt", ".yml", ".js", ".css", ""):
            text = path.read_text(encoding="utf-8", errors="replace")
            found += [f"{path.relative_to(ROOT)}: {word}" for word in index_hosts + options + homes if word in text]
    assert found == []


def test_a_wheel_lists_lower_bounds_only():
    requirements = [line for line in (ROOT / "settings.ini").read_text().splitlines() if "requirements =" in line]
    assert len(requirements) == 3
    for line in requirements:
        for requirement in line.partition(" = ")[2].split():
            assert re.fullmatch(r"[\w-]+>=[\d.]+(;sys_platform==\"linux\")?", requirement), requirement


# Importing


def test_importing_changes_nothing_in_the_process():
    code = (
        "import os, sys, threading\n"
        "before = dict(os.environ), threading.active_count(), list(sys.path)\n"
        "import kvbook\n"
        "assert (dict(os.environ), threading.active_count(), list(sys.path)) == before\n"
        "heavy = {'torch', 'numpy', 'matplotlib', 'triton', 'numba', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = run([sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def wheel(tmp_path_factory) -> Path:
    """The unpacked wheel, built from a copy of the tree."""
    source = tmp_path_factory.mktemp("source")
    copy_tree(source, "kvbook", "settings.ini", "setup.py", "pyproject.toml", "README.md", "LICENSE")
    done = run([sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", source / "out", "."],
               source)
    assert done.returncode == 0, done.stderr
    (built,) = (source / "out").glob("*.whl")
    zipfile.ZipFile(built).extractall(source / "unpacked")
    return source / "unpacked"


WITHOUT = """
import importlib, pkgutil, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"triton", "numba", "matplotlib", "fastapi", "ipywidgets", "anywidget"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
import kvbook
assert kvbook.__file__.startswith(sys.argv[1]), kvbook.__file__
modules = [m.name for m in pkgutil.walk_packages(kvbook.__path__, "kvbook.")]
for name in modules:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:                # only a kernel may need its compiler
        assert name.startswith("kvbook.kernels.") and error.name in {"triton", "numba"}, (name, error)
import kvbook.compute.kv_cache as kv_cache, torch
assert kv_cache.kernels_for(torch.float32) is kv_cache.GATHER
print(len(modules))
"""


def test_the_wheel_imports_without_its_optional_libraries(wheel, tmp_path):
    done = run([sys.executable, "-c", WITHOUT, wheel], tmp_path, PYTHONPATH=str(wheel))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= len(SOURCES) - 1  # all but kvbook/__init__.py


def test_the_wheel_carries_the_figures(wheel):
    packed = {p.name for p in (wheel / "kvbook" / "lab" / "static").glob("*")}
    assert packed == {p.name for p in (ROOT / "kvbook" / "lab" / "static").glob("*.[jc]s*")}
    assert packed
