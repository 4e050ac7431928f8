"""Make the JavaScript of the interactive figures loadable from a folder as well as from a server.

A figure's code is an ECMAScript module in anywidget's form (``export default { render }``), which notebooks load as it
is. Browsers refuse modules from a page opened from disk, so for the pages each becomes a classic script that hands its
default export to ``kv-figures.js`` under the figure's name.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from kvbook.lab import figures

DEFAULT = re.compile(r"^export default ", re.MULTILINE)
NAMED = re.compile(r"^export (?=(async )?(function|const|let|class)\b)", re.MULTILINE)
MODULE_SYNTAX = re.compile(r"^(import|export)\b.*", re.MULTILINE)


class FigureScriptError(ValueError):
    """A figure's module uses more of the module syntax than can be wrapped."""


def classic_script(name: str, module: str) -> str:
    """Wrap a figure's module into a script that registers itself.

    Args:
        name: the figure's name.
        module: an ECMAScript module without imports, with one ``export default`` at the start of a line; other
            exports stand before the function, class or constant that they name.

    Returns:
        The text of a classic script, which sets ``window.kvFigures[name]``.

    Raises:
        FigureScriptError: the module imports something, or exports in another way.
    """
    body, count = DEFAULT.subn("__figure.default = ", NAMED.sub("", module))
    if count != 1:
        raise FigureScriptError(f"{name}.js has {count} lines that begin with 'export default'; accepted is one")
    if rest := MODULE_SYNTAX.search(body):
        raise FigureScriptError(f"{name}.js has {rest.group()!r}; accepted are exports of declarations, and no imports")
    return (
        '(() => {\n"use strict";\nconst __figure = {};\n'
        f"{body.rstrip()}\n"
        f"(window.kvFigures ??= {{}})[{json.dumps(name)}] = __figure.default;\n}})();\n"
    )


def write_scripts(target: Path) -> list[str]:
    """Write the scripts and style sheets of all figures for the pages.

    Args:
        target: the folder that receives them.

    Returns:
        The names of the style sheets, in order.

    Raises:
        FigureScriptError: as ``classic_script`` says.
    """
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(figures.STATIC.glob("*.js")):
        if DEFAULT.search(path.read_text(encoding="utf-8")):  # others are shared parts, which esm_source puts in
            script = classic_script(path.stem, figures.esm_source(path.stem))
            (target / path.name).write_text(script, encoding="utf-8")
    sheets = sorted(figures.STATIC.glob("*.css"))
    for path in sheets:
        (target / path.name).write_bytes(path.read_bytes())
    return [path.name for path in sheets]
