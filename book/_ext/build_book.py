"""Build the book into ``_build/html``, if anything that it is made of has changed.

Usage: ``python book/_ext/build_book.py``; with ``--is-current`` it only says by its exit status whether the book is
up to date. `make book`, the tests and CI all build through here: browser libraries,
then the notebooks whose outputs are stale, then a strict Jupyter Book build in which every warning, unresolved
reference and failing cell is an error. The pages appear by one rename after the build has passed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from filelock import FileLock

sys.path.insert(0, str(Path(__file__).resolve().parent))
import execute
import notebooks
import vendor

ROOT = notebooks.ROOT
BUILD = ROOT / "_build"
HTML = BUILD / "html"
STAGE = BUILD / "stage"
STAMP = ".kvbook-build"
COMMAND = ("build", ".", "--toc", "book/_toc.yml", "--path-output", str(STAGE), "--all", "-W", "-n", "--keep-going")


class BuildError(RuntimeError):
    """The strict build did not pass."""


def input_files(root: Path = ROOT) -> list[Path]:
    """Every file that the pages are made of."""
    found = [root / "_config.yml", root / "requirements.txt"]
    for folder, suffixes in (("book", ()), ("nbs", (".ipynb",)), ("kvbook", (".py", ".js", ".css"))):
        for path in (root / folder).rglob("*"):
            parts = path.relative_to(root).parts
            hidden = any(part.startswith(".") or part in ("__pycache__", "vendor") for part in parts)
            if path.is_file() and not hidden and (not suffixes or path.suffix in suffixes):
                found.append(path)
    return found


def fingerprint(root: Path = ROOT) -> str:
    """A hash of what the pages are made of, of the pinned browser libraries and of KVBOOK_RUN."""
    return " ".join([notebooks.content_hash(input_files(root), root), *sorted(notebooks.run_flags())])


def is_current(root: Path = ROOT) -> bool:
    """Whether ``_build/html`` holds the book as the files stand."""
    stamp = root / "_build" / "html" / STAMP
    return stamp.exists() and stamp.read_text(encoding="utf-8") == fingerprint(root)


def build_pages() -> None:
    """Run the strict build into ``_build/stage`` and put its pages in place.

    Raises:
        BuildError: Jupyter Book found an error or gave a warning; the messages are on stderr.
    """
    mark = fingerprint()
    shutil.rmtree(STAGE, ignore_errors=True)
    STAGE.mkdir(parents=True)
    environment = {**os.environ, **execute.QUIET, "PYTHONUNBUFFERED": "1"}
    log = BUILD / "book.log"
    with log.open("w", encoding="utf-8") as out:
        command = [str(Path(sys.executable).parent / "jupyter-book"), *COMMAND]
        code = subprocess.run(command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.PIPE, text=True)
    if code.returncode:
        messages = execute.ANSI.sub("", code.stderr).partition("Traceback (most recent call last)")[0].strip()
        raise BuildError(f"the strict book build failed; its log is {log.relative_to(ROOT)}\n{messages or code.stderr}")
    pages = STAGE / "_build" / "html"
    (pages / STAMP).write_text(mark, encoding="utf-8")
    shutil.rmtree(HTML, ignore_errors=True)
    os.replace(pages, HTML)


def build() -> bool:
    """Bring the book up to date.

    Returns:
        Whether there was anything to do.

    Raises:
        BuildError: a library is missing, or the strict build failed.
        execute.NotebookError: a notebook failed.
    """
    BUILD.mkdir(exist_ok=True)
    with FileLock(BUILD / "book.lock"):
        if vendor.main():
            raise BuildError("the book needs its browser libraries")
        if is_current():
            return False
        print("Running the notebooks whose outputs are stale:", flush=True)
        execute.execute_all(execute.all_notebooks())
        print("Setting the pages …", flush=True)
        start = time.perf_counter()
        build_pages()
        print(f"  {time.perf_counter() - start:.1f} s", flush=True)
        return True


def main() -> int:
    """Build; 0 when the book is there, 1 with a message on a failure, 130 on an interrupt."""
    if sys.argv[1:] == ["--is-current"]:
        return 0 if is_current() else 1
    try:
        print("The book is built." if build() else "The book is up to date.")
    except (BuildError, execute.NotebookError, notebooks.DirectiveError) as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; what is done is stored, and the next run goes on from here", file=sys.stderr)
        return 130
    print(f"Open {HTML.relative_to(ROOT)}/index.html, or run `make serve`.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
