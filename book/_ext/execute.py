"""Run the notebooks whose stored outputs no longer hold.

Usage: ``python book/_ext/execute.py [name …]`` with names such as ``00_two_walls``; without names, all of them.
The tests and the book both come here, and the outputs land in one execution cache, so no notebook runs twice. Each
is stored when it is done: an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from pathlib import Path

from filelock import FileLock
from jupyter_cache import get_cache
from jupyter_cache.base import CacheBundleIn
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode
from nbformat.reader import NotJSONError

sys.path.insert(0, str(Path(__file__).resolve().parent))
import notebooks

ROOT = notebooks.ROOT
CACHE = ROOT / "_build" / ".jupyter_cache"
KERNEL_LOG = ROOT / "_build" / "kernels.log"
"""What the kernels' processes print of themselves, as opposed to what cells print."""
CELL_TIMEOUT_S = 900
QUIET = {"KVBOOK_BUILDING": "1", "TQDM_DISABLE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
"""What the kernels see besides the environment: no progress bars while the book is built."""

ANSI = re.compile(r"\x1b\[[0-9;]*m")


class NotebookError(RuntimeError):
    """A notebook did not run to its end."""


def all_notebooks(root: Path = ROOT) -> list[Path]:
    """The notebooks of the book, in order."""
    return sorted(p for p in (root / "nbs").glob("*.ipynb") if not p.name.startswith(("_", ".")))


def stored(notebook: NotebookNode, cache_path: Path = CACHE) -> NotebookNode | None:
    """A stamped notebook with its stored outputs, or None where the cache has none that hold.

    Args:
        notebook: as ``notebooks.read`` gives it.
        cache_path: the folder of the cache.

    Returns:
        A notebook with outputs; ``metadata["execution_seconds"]`` says how long it ran when it was stored.
    """
    cache = get_cache(str(cache_path))
    try:
        record = cache.match_cache_notebook(notebook)
        _, merged = cache.merge_match_into_notebook(notebook)
    except (KeyError, NotJSONError):  # no record, or one whose file was not written to its end
        return None
    merged.metadata["execution_seconds"] = record.data["execution_seconds"]
    return merged


def store(notebook: NotebookNode, name: str, seconds: float, cache_path: Path) -> None:
    """Put a notebook that has run into the cache, in the place of what an interrupted run may have left there."""
    cache = get_cache(str(cache_path))
    _, entry = cache.create_hashed_notebook(notebook)
    shutil.rmtree(cache.path / "executed" / entry, ignore_errors=True)
    bundle = CacheBundleIn(notebook, name, data={"execution_seconds": seconds})
    cache.cache_notebook_bundle(bundle, check_validity=False, overwrite=True)


def failure(notebook: NotebookNode, name: str, error: Exception) -> NotebookError:
    """Say which cell of a notebook failed, with its code and its traceback."""
    for number, cell in enumerate(notebook.cells):
        for output in cell.get("outputs", ()):
            if output.output_type == "error":
                trace = ANSI.sub("", "\n".join(output.traceback))
                return NotebookError(f"{name}, cell {number} ({cell.id}) failed:\n\n{cell.source}\n\n{trace}")
    return NotebookError(f"{name} did not finish: {ANSI.sub('', str(error))}")


def kernel_environment() -> dict[str, str]:
    """The environment of the kernels: quiet, and with this Python's commands first on the path."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return {**os.environ, **QUIET, "PATH": path}


def run(notebook: NotebookNode, name: str, folder: Path) -> float:
    """Run a translated notebook in a fresh kernel, outputs in place.

    Args:
        notebook: as ``notebooks.read`` gives it.
        name: what to call it in messages.
        folder: where its kernel runs.

    Returns:
        Seconds, the start of the kernel included.

    Raises:
        NotebookError: a cell raised, ran longer than its limit, or killed the kernel.
        KeyboardInterrupt: the run was interrupted; the kernel is stopped.
    """
    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_S,
        kernel_name="python3",
        coalesce_streams=True,
        record_timing=False,  # the cache matches cell metadata too, so running must not add any
        resources={"metadata": {"path": str(folder)}},
    )
    start = time.perf_counter()
    with KERNEL_LOG.open("a", encoding="utf-8") as log:
        try:
            client.execute(env=kernel_environment(), stdout=log, stderr=log)
        except (CellExecutionError, CellTimeoutError, DeadKernelError, AssertionError) as error:
            # nbclient takes the interrupt itself, stops the kernel, and then trips over the stopped kernel.
            if hasattr(client, "_async_cleanup_kernel_future"):
                raise KeyboardInterrupt from None
            raise failure(notebook, name, error) from None
    return time.perf_counter() - start


def execute(path: Path, cache_path: Path = CACHE, root: Path = ROOT) -> tuple[NotebookNode, bool]:
    """Make sure that a notebook's outputs are in the cache.

    Args:
        path: the notebook's file.
        cache_path: the folder of the cache.
        root: the repository.

    Returns:
        The notebook with outputs, and whether it had to run.

    Raises:
        NotebookError: the notebook failed; nothing of it is stored.
    """
    cache_path.mkdir(parents=True, exist_ok=True)
    with FileLock(cache_path / f"{path.stem}.lock"):
        notebook = notebooks.read(path, root=root)
        if (found := stored(notebook, cache_path)) is not None:
            return found, False
        seconds = run(notebook, path.name, path.parent)
        store(notebook, str(path.relative_to(root)), seconds, cache_path)
        notebook.metadata["execution_seconds"] = seconds
        return notebook, True


def execute_all(paths: list[Path]) -> None:
    """Bring some notebooks' outputs up to date, with one line of progress each.

    Raises:
        NotebookError: the first failure.
    """
    for number, path in enumerate(paths, 1):
        print(f"  [{number}/{len(paths)}] {path.stem:<28}", end="", flush=True)
        try:
            notebook, ran = execute(path)
        except BaseException:
            print("stopped", flush=True)
            raise
        print(f"{notebook.metadata['execution_seconds']:6.1f} s" if ran else "  cached", flush=True)


def chosen(names: list[str]) -> list[Path]:
    """The notebooks with these names, or all of them.

    Raises:
        NotebookError: a name that is no notebook's.
    """
    known = {p.stem: p for p in all_notebooks()}
    if missing := [n for n in names if n not in known]:
        raise NotebookError(f"no notebook named {', '.join(missing)}; there are {', '.join(known) or 'none'}")
    return [known[n] for n in names] if names else list(known.values())


def main(names: list[str]) -> int:
    """Run what is stale; 0 when everything has outputs, 1 with a message on a failure, 130 on an interrupt."""
    try:
        execute_all(chosen(names))
    except NotebookError as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; what is done is stored, and the next run goes on from here", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
