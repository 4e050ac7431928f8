"""Read a notebook as the book shows and runs it.

The notebooks carry their meaning in nbdev directives (``#| export``), which MyST-NB does not know. ``read`` returns
a copy in memory in which the directives have become the tags that MyST-NB and nbclient act on, and in which the
kernel's metadata holds a key: a hash of everything that the outputs depend on. The execution cache matches notebooks
by code and kernel metadata, so equal keys mean that the stored outputs still hold. Nothing on disk is changed.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import nbformat
from IPython.core.inputtransformer2 import TransformerManager
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "kvbook"

DIRECTIVE = re.compile(r"^\s*#\s*\|\s*(?P<name>[\w-]+)\s*:?\s*(?P<value>.*?)\s*$")
NBDEV = {"default_exp", "export", "exporti", "exports"}
FLAGS = {"fold", "hide", "hide_input", "live", "notest", "slow", "gpu", "wrap"}
BOOLEANS = {"include", "echo", "output", "eval", "code-fold"}
TEXTS = {"code-summary", "label", "fig-cap", "fig-alt"}
OPTIONAL = ("slow", "gpu", "notest")
"""Cells that run only where KVBOOK_RUN names one of these."""
BESIDE_LIVE = {"live", "wrap"}
"""What a cell that the reader runs may carry: it is on the page whole, and runs in every build."""


class DirectiveError(ValueError):
    """A directive that the book does not know, or whose value it cannot use."""


def run_flags() -> frozenset[str]:
    """The words of the environment variable KVBOOK_RUN: which optional cells to run."""
    return frozenset(os.environ.get("KVBOOK_RUN", "").replace(",", " ").split())


def split_directives(source: str) -> tuple[dict[str, str], str]:
    """Separate the leading ``#|`` lines of a cell from its code.

    Args:
        source: the text of a code cell.

    Returns:
        The directives, name → value (empty where there is none), and the code without them.
    """
    directives: dict[str, str] = {}
    lines = source.splitlines(keepends=True)
    while lines and (not lines[0].strip() or DIRECTIVE.match(lines[0])):
        if match := DIRECTIVE.match(lines.pop(0)):
            directives[match["name"]] = match["value"].strip("\"'") if match["name"] in TEXTS else match["value"]
    return directives, "".join(lines)


def check_directives(directives: dict[str, str], where: str) -> None:
    """Refuse what ``cell_metadata`` could not act on.

    Args:
        directives: name → value, as ``split_directives`` gives them.
        where: the notebook and cell, for the message.

    Raises:
        DirectiveError: an unknown directive, a value that is not true or false where one is wanted, a figure
            with only one of label and caption, a fold's title without a fold, or a live cell that is not shown or
            not run.
    """
    known = NBDEV | FLAGS | BOOLEANS | TEXTS
    for name, value in directives.items():
        if name not in known:
            raise DirectiveError(f"{where}: unknown directive '{name}'; known are {', '.join(sorted(known))}")
        if name in BOOLEANS and value.lower() not in ("true", "false"):
            raise DirectiveError(f"{where}: '{name}' is '{value}'; accepted are true and false")
        if name in TEXTS and not value:
            raise DirectiveError(f"{where}: '{name}' is empty; give it a text")
    for one, *others in (("label", "fig-cap"), ("fig-cap", "label"), ("fig-alt", "label"),
                         ("code-summary", "code-fold", "fold")):
        if one in directives and not directives.keys() & set(others):
            raise DirectiveError(f"{where}: '{one}' needs '{others[0]}' beside it")
    if "live" in directives and (others := directives.keys() - BESIDE_LIVE):
        raise DirectiveError(f"{where}: '{min(others)}' cannot stand beside 'live'; accepted is 'wrap'")


def is_false(directives: dict[str, str], name: str) -> bool:
    """Whether a boolean directive is given and false."""
    return directives.get(name, "").lower() == "false"


def cell_tags(directives: dict[str, str], code: str, flags: frozenset[str]) -> list[str]:
    """The tags that MyST-NB, nbclient and the style sheet act on.

    Args:
        directives: name → value of one cell.
        code: the cell without its directives.
        flags: which optional cells run.

    Returns:
        Tags, in a fixed order.
    """
    wanted = {
        "remove-cell": "hide" in directives or is_false(directives, "include") or not code.strip(),
        "remove-input": "hide_input" in directives or is_false(directives, "echo"),
        "hide-input": directives.get("code-fold", "").lower() == "true",
        "hide-cell": "fold" in directives,
        "remove-output": is_false(directives, "output"),
        "skip-execution": is_false(directives, "eval") or any(n in directives and n not in flags for n in OPTIONAL),
        "live": "live" in directives,
        "kv-wrap": "wrap" in directives,
        "kv-export": "export" in directives or "exports" in directives,
    }
    return [tag for tag, on in wanted.items() if on]


def cell_metadata(directives: dict[str, str], code: str, flags: frozenset[str]) -> dict:
    """The metadata of a cell on its page: tags, the figure that it makes, the title of its fold."""
    metadata: dict = {}
    if tags := cell_tags(directives, code, flags):
        metadata["tags"] = tags
    options: dict = {}
    if "label" in directives:
        options["figure"] = {"name": directives["label"], "caption": directives["fig-cap"]}
    if "fig-alt" in directives:
        options["image"] = {"alt": directives["fig-alt"]}
    if "code-summary" in directives:
        options |= {"code_prompt_show": directives["code-summary"], "code_prompt_hide": directives["code-summary"]}
    if options:
        metadata["mystnb"] = options
    return metadata


def translate(notebook: NotebookNode, name: str, flags: frozenset[str] = frozenset()) -> NotebookNode:
    """Turn the directives of a notebook into tags, in place.

    Args:
        notebook: an nbformat 4 notebook; its code cells lose their directive lines and old outputs.
        name: what to call the notebook in messages.
        flags: which optional cells run, of ``slow``, ``gpu`` and ``notest``.

    Returns:
        The same notebook.

    Raises:
        DirectiveError: as ``check_directives`` says.
    """
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type != "code":
            continue
        directives, code = split_directives(cell.source)
        check_directives(directives, f"{name}, cell {number} ({cell.get('id', 'no id')})")
        cell.source = code
        cell.metadata.update(cell_metadata(directives, code, flags))
        cell.outputs, cell.execution_count = [], None
    return notebook


# What the outputs of a notebook depend on


def module_file(name: str, root: Path) -> Path | None:
    """The file of a module of the package, or None if there is no such module."""
    path = root.joinpath(*name.split("."))
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if candidate.is_file():
            return candidate
    return None


def with_parents(name: str) -> list[str]:
    """A dotted module name and the packages that importing it also imports."""
    parts = name.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def imported_names(tree: ast.AST, module: str = "", is_package: bool = False) -> Iterator[str]:
    """Every dotted name that a syntax tree may import from the package, wherever in it the import stands.

    ``from a import b`` gives both ``a`` and ``a.b``, since ``b`` may be a module. A text that starts with the name
    of the package as a word of its own (``!kvbook hello``) runs the command line, and counts as importing it.

    Args:
        tree: the parsed code.
        module: the dotted name of the module that the code belongs to; empty for a notebook.
        is_package: whether that module is an ``__init__.py``.

    Yields:
        Dotted names, some of which may be no modules.
    """
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*base, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith(f"{PACKAGE} "):
            yield f"{PACKAGE}.cli"


def modules_of(names: Iterable[str], root: Path) -> dict[str, Path]:
    """The modules of the package among some dotted names, with their parent packages."""
    wanted = {part for name in names if name.split(".")[0] == PACKAGE for part in with_parents(name)}
    return {name: path for name in sorted(wanted) if (path := module_file(name, root))}


@cache
def direct_imports(name: str, path: Path, text: str, root: Path) -> tuple[tuple[str, Path], ...]:
    """The modules of the package that one module imports; cached by its text."""
    return tuple(modules_of(imported_names(ast.parse(text), name, path.name == "__init__.py"), root).items())


def dependencies(sources: Iterable[str], root: Path = ROOT) -> dict[str, Path]:
    """The modules of the package that some code imports, transitively.

    Args:
        sources: code of notebook cells; IPython's magics are allowed.
        root: the folder that holds the package.

    Returns:
        Dotted module name → file.
    """
    transform = TransformerManager().transform_cell
    trees = [ast.parse(transform(source)) for source in sources]
    todo = dict(modules_of((name for tree in trees for name in imported_names(tree)), root))
    found: dict[str, Path] = {}
    while todo:
        name, path = todo.popitem()
        found[name] = path
        new = direct_imports(name, path, path.read_text(encoding="utf-8"), root)
        todo.update((n, p) for n, p in new if n not in found)
    return found


def data_files(modules: Iterable[str], root: Path = ROOT) -> list[Path]:
    """The files beside the code that the outputs of a notebook also depend on, given the modules that it imports."""
    modules = set(modules)
    files: list[Path] = []
    if f"{PACKAGE}.lab.figures" in modules:
        files += [p for p in (root / PACKAGE / "lab" / "static").glob("*") if p.suffix in (".js", ".css")]
    if f"{PACKAGE}.lab.claims" in modules:
        files.append(root / "book" / "claims.toml")
    if f"{PACKAGE}.lab.recorded" in modules:
        files += (root / "book" / "evidence").glob("*.json")
    return sorted(p for p in files if p.is_file())


def content_hash(paths: Iterable[Path], root: Path = ROOT) -> str:
    """One hash over the names and the contents of files."""
    total = hashlib.sha256()
    for path in sorted(paths):
        total.update(path.relative_to(root).as_posix().encode() + b"\0")
        total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()


def key(notebook: NotebookNode, flags: frozenset[str] = frozenset(), root: Path = ROOT) -> str:
    """A hash of everything that the outputs of a translated notebook depend on.

    That is: the code that runs, the modules of the package that it imports (transitively), the data files of those
    modules, which optional cells run, the pinned requirements, and the minor version of Python.

    Args:
        notebook: a translated notebook.
        flags: which optional cells run.
        root: the repository.

    Returns:
        A hexadecimal hash.
    """
    cells = [c for c in notebook.cells if c.cell_type == "code"]
    modules = dependencies((c.source for c in cells), root)
    parts = [
        [[c.source, "skip-execution" in c.metadata.get("tags", ())] for c in cells],
        content_hash([*modules.values(), *data_files(modules, root), *root.glob("requirements.txt")], root),
        sorted(flags),
        sys.version_info[:2],
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def read(path: Path, text: str | None = None, root: Path = ROOT) -> NotebookNode:
    """A notebook as the book runs and shows it: translated, and stamped with its key.

    Args:
        path: the notebook's file.
        text: its contents, where they are at hand already.
        root: the repository.

    Returns:
        The notebook, in memory.

    Raises:
        DirectiveError: as ``check_directives`` says.
    """
    notebook = nbformat.reads(path.read_text(encoding="utf-8") if text is None else text, as_version=4)
    flags = run_flags()
    translate(notebook, path.name, flags)
    spec = {"name": "python3", "display_name": "Python 3", "language": "python", "kvbook": key(notebook, flags, root)}
    notebook.metadata["kernelspec"] = NotebookNode(spec)
    return notebook
