"""What the book needs from Sphinx beyond Jupyter Book: notebooks, figures, numbers, generated pages."""

from __future__ import annotations

import json
import math
import re
import sys
import zipfile
from html import escape
from importlib import import_module
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.ext.autodoc import FunctionDocumenter
from sphinx.util.docutils import SphinxDirective, SphinxRole

sys.path.insert(0, str(Path(__file__).resolve().parent))
import execute
import notebooks
import static_figures
import vendor

ROOT = notebooks.ROOT
API_PAGE, API_MARK = "book/api", "% modules\n"
NOTEBOOK = re.compile(r"^nbs/(\d\d)([a-z]?)_")
APPENDIX = 90
"""Notebooks from this number on are the appendix: their figures are numbered A.1, B.1 …"""
LIVE_RUNNER = Path(__file__).with_name("live_runner.py")


# Notebooks and generated sources


def on_source_read(app: Sphinx, docname: str, content: list[str]) -> None:
    """Translate the directives of a notebook and stamp its key; list the modules on the API page."""
    path = Path(app.env.doc2path(docname))
    if path.suffix == ".ipynb":
        content[0] = json.dumps(notebooks.read(path, content[0]))
    elif docname == API_PAGE:
        content[0] = content[0].replace(API_MARK, api_markdown(ROOT / notebooks.PACKAGE))


def package_modules(package: Path) -> dict[str, list[str]]:
    """The modules of the package, by floor: folder name (empty for the roof) → dotted module names."""
    floors: dict[str, list[str]] = {"control": [], "compute": [], "kernels": [], "lab": [], "": []}
    for path in sorted(package.rglob("*.py")):
        if not path.stem.startswith("_"):
            *folders, name = path.relative_to(package).with_suffix("").parts
            floors.setdefault("/".join(folders), []).append(".".join([package.name, *folders, name]))
    return {floor: names for floor, names in floors.items() if names}


def api_markdown(package: Path) -> str:
    """The MyST source of the API reference: a section a floor, a subsection a module, from the docstrings."""
    parts = []
    for floor, names in package_modules(package).items():
        title = f"{package.name}.{floor.replace('/', '.')}" if floor else "The doors"
        parts.append(f"## {title}\n")
        parts += [f"### {n}\n\n```{{eval-rst}}\n.. automodule:: {n}\n   :members:\n```\n" for n in names]
    return "\n".join(parts)


# Cells that the reader runs


def write_live_package(app: Sphinx) -> None:
    """Bring the archive that live cells import from into the built book."""
    target = Path(app.outdir) / "_static" / "live"
    target.mkdir(parents=True, exist_ok=True)
    live_package(target / "kvbook.zip")


def live_package(target: Path) -> None:
    """Write the archive: what runs the cells, and the standard-library modules of the package as exported."""
    package = Path(import_module(notebooks.PACKAGE).__file__).parent
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(LIVE_RUNNER, LIVE_RUNNER.name)
        for path in [package / "__init__.py", *sorted((package / "control").glob("*.py"))]:
            archive.write(path, path.relative_to(package.parent).as_posix())


def add_live_script(app: Sphinx, pagename: str, templatename: str, context: dict, doctree) -> None:
    """Give a page with live cells their script and style; the script learns how much Python will weigh."""
    if 'class="cell tag_live' in context.get("body", ""):
        python = Path(app.srcdir) / vendor.PAGES / "pyodide"
        megabytes = sum(path.stat().st_size for path in python.iterdir()) / 1e6
        app.add_css_file("kv-live.css")
        app.add_js_file("kv-live.js", defer="defer", **{"data-megabytes": f"{megabytes:.0f}"})


# Figures


def write_figure_scripts(app: Sphinx) -> None:
    """Bring the interactive figures' scripts and style sheets into the built book."""
    target = Path(app.outdir) / "_static" / "figures"
    for sheet in static_figures.write_scripts(target):
        app.add_css_file(f"figures/{sheet}")


def chapter_label(docname: str) -> str:
    """The number that the figures of a notebook carry: its chapter's, a letter in the appendix, else nothing.

    >>> chapter_label("nbs/03a_kv_cache"), chapter_label("nbs/91_figures"), chapter_label("book/glossary")
    ('3', 'B', '')
    """
    match = NOTEBOOK.match(docname)
    if not match:
        return ""
    number = int(match[1])
    return chr(ord("A") + number - APPENDIX) if number >= APPENDIX else str(number)


def renumber(fignumbers: dict[str, dict[str, dict[str, tuple]]]) -> None:
    """Number figures, tables, equations and exercises by the chapter in their notebook's file name, in place.

    Sphinx numbers by the parts of the contents, where chapter 0 has no number of its own. Here page, file and
    figure agree by construction; a companion goes on counting where its main page stopped, and a page that is no
    notebook counts for itself.

    Args:
        fignumbers: page → kind → id → number, in the order of the book, as Sphinx has assigned them.
    """
    counts: dict[tuple[str, str], int] = {}
    for docname, kinds in fignumbers.items():
        label = chapter_label(docname)
        for kind, numbers in kinds.items():
            for identifier in numbers:
                place = (label or docname, kind)
                counts[place] = counts.get(place, 0) + 1
                numbers[identifier] = (label, counts[place]) if label else (counts[place],)


def on_env_get_updated(app: Sphinx, env) -> list[str]:
    """Renumber after Sphinx has assigned its numbers; every page with numbers is written again."""
    renumber(env.toc_fignumbers)
    return list(env.toc_fignumbers)


def drop_repeated_ids(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Take off the ids that sphinx-exercise gives to the body of every exercise alike; ids are unique in a page."""
    for section in doctree.findall(nodes.section):
        section["ids"] = [i for i in section["ids"] if i not in ("exercise-content", "solution-content")]


# The API reference and Triton


class TritonDocumenter(FunctionDocumenter):
    """Documents the Python function inside a ``@triton.jit`` object, which autodoc would leave out."""

    objtype, directivetype = "tritonfunction", "function"
    priority = FunctionDocumenter.priority + 10

    @classmethod
    def can_document_member(cls, member, membername, isattr, parent) -> bool:
        """Whether the member is a kernel: an object of Triton's that wraps a function."""
        return type(member).__module__.split(".")[0] == "triton" and callable(getattr(member, "fn", None))

    def import_object(self, raiseerror: bool = False) -> bool:
        """Import the kernel and go on with its function."""
        found = super().import_object(raiseerror)
        if found and TritonDocumenter.can_document_member(self.object, "", False, None):
            self.object = self.object.fn
        return found


def keep_kernels(app, what, name, obj, skip, options) -> bool | None:
    """Keep documented kernels, whose wrapper has no docstring that autodoc would see."""
    if not name.startswith("_") and TritonDocumenter.can_document_member(obj, name, False, None) and obj.fn.__doc__:
        return False
    return None


# What the theme leaves to mend


def drop_thebe(app: Sphinx, pagename: str, templatename: str, context: dict, doctree) -> None:
    """Take Thebe's scripts out of a page: they are unused, added twice, and would load code from outside."""

    def is_thebe(script) -> bool:
        body = (getattr(script, "attributes", None) or {}).get("body") or ""
        return "THEBE_JS_URL" in body or "sphinx-thebe" in str(getattr(script, "filename", script) or "")

    context["script_files"][:] = [s for s in context["script_files"] if not is_thebe(s)]
    context["css_files"][:] = [s for s in context.get("css_files", ()) if not is_thebe(s)]


ICON = re.compile(r'"?(?P<name>[a-z0-9-]+)"?:\[\d+,\d+,\[[^\]]*\],"[0-9a-f]*",(?:"[^"]*"|\[[^\]]*\])\],?')


def keep_icons(script: str, names: set[str]) -> str:
    """Font Awesome's script without the icons that no page uses; with all of them it is half of a page's weight.

    Args:
        script: the theme's ``fontawesome.js``.
        names: the icons to keep, without their ``fa-``.
    """
    return ICON.sub(lambda match: match[0] if match["name"] in names else "", script)


def finish_pages(app: Sphinx, exception: Exception | None) -> None:
    """Mend what the theme and docutils leave in the finished files: unused icons, a role that no browser knows."""
    if exception or app.builder.name != "html":
        return
    out = Path(app.outdir)
    used: set[str] = set()
    icons = out / "_static" / "scripts" / "fontawesome.js"
    for path in [*out.rglob("*.html"), *icons.parent.glob("*.js")]:
        if path != icons:
            text = path.read_text(encoding="utf-8")
            used |= set(re.findall(r"\bfa-([a-z0-9-]+)", text))
            if (mended := text.replace('role="doc-biblioentry"', 'role="listitem"')) != text:
                path.write_text(mended, encoding="utf-8")
    icons.write_text(keep_icons(icons.read_text(encoding="utf-8"), used), encoding="utf-8")


FOLD = re.compile(r"(<a [^>]*>)(?P<title>[^<]*)(</a>\s*<details[^>]*>\s*)<summary>")


def name_sidebar_folds(html: str) -> str:
    """Give the buttons that unfold the companions in the sidebar a name for screen readers; the theme gives none."""
    return FOLD.sub(r'\1\g<title>\3<summary aria-label="Pages of \g<title>">', html)


def wrap_sidebar(app: Sphinx, pagename: str, templatename: str, context: dict, doctree) -> None:
    """Pass what the theme makes of the contents through ``name_sidebar_folds``."""
    if generate := context.get("generate_toctree_html"):
        context["generate_toctree_html"] = lambda *given, **named: name_sidebar_folds(str(generate(*given, **named)))


# The landing page and the statistics


def raw_html(text: str) -> list[nodes.Node]:
    """One node of HTML."""
    return [nodes.raw("", text, format="html")]


class Scoreboard(SphinxDirective):
    """``{scoreboard}``: how many people fit in the box, chapter by chapter, computed when the book is built."""

    def run(self) -> list[nodes.Node]:
        """Ask ``kvbook.lab.desk`` for the strip and draw it."""
        rows = import_module("kvbook.lab.desk").strip()
        return raw_html(strip_html(rows))


def strip_html(rows: list[dict]) -> str:
    """The strip as HTML: a list of numbers under bars on a logarithmic scale.

    Args:
        rows: dicts with ``chapter`` (int), ``title`` (str), ``people`` (int) and ``built`` (bool).

    Returns:
        An ordered list; rows whose chapter is not built are marked as to come, in words too.
    """
    top = max(math.log1p(row["people"]) for row in rows) or 1
    items = []
    for row in rows:
        height = 2 + 98 * math.log1p(row["people"]) / top
        state, note = ("built", "") if row["built"] else ("to-come", '<span class="kv-note">to come</span>')
        items.append(
            f'<li class="{state}"><span class="kv-bar" style="height:{height:.0f}%"></span><b>{row["people"]}</b>'
            f'<span class="kv-label">chapter {row["chapter"]}<span>: {escape(row["title"])}</span></span>{note}</li>'
        )
    return f'<ol class="kv-strip" aria-label="People who fit in the box">{"".join(items)}</ol>'


class Chapters(SphinxDirective):
    """``{chapters}``: the plan of the book, a line for each chapter: ``notebook | title | what it is about``."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        """Draw the list; a chapter whose notebook is part of the book is a link, another is marked as to come."""
        items = []
        for line in filter(None, map(str.strip, self.content)):
            docname, title, about = (part.strip() for part in line.split("|"))
            number = chapter_label(docname)
            text = f'<b>{escape(title)}</b> <span class="kv-about">{escape(about)}</span>'
            if docname in self.env.found_docs:
                uri = self.env.app.builder.get_relative_uri(self.env.docname, docname)
                items.append(f'<li value="{number}"><a href="{uri}"><i>{number}</i>{text}</a></li>')
            else:
                note = '<span class="kv-note">to come</span>'
                items.append(f'<li value="{number}" class="to-come"><i>{number}</i>{text} {note}</li>')
        return raw_html(f'<ol class="kv-chapters">{"".join(items)}</ol>')


def build_table(header: list[str], rows: list[list[nodes.Node | str]], classes: list[str]) -> nodes.table:
    """A table whose cells are texts or inline nodes."""

    def entries(cells: list[nodes.Node | str]) -> nodes.row:
        row = nodes.row()
        for cell in cells:
            paragraph = nodes.paragraph("", "", nodes.Text(cell) if isinstance(cell, str) else cell)
            row += nodes.entry("", paragraph)
        return row

    group = nodes.tgroup("", *[nodes.colspec(colwidth=1) for _ in header], cols=len(header))
    group += nodes.thead("", entries(header))
    group += nodes.tbody("", *[entries(cells) for cells in rows])
    return nodes.table("", group, classes=["colwidths-auto", *classes])


class ExecutionTimes(SphinxDirective):
    """``{execution-times}``: how long each notebook of the book ran when its stored outputs were made."""

    def run(self) -> list[nodes.Node]:
        """Read the times from the execution cache."""
        rows: list[list[nodes.Node | str]] = []
        total = 0.0
        for path in execute.all_notebooks():
            docname = f"nbs/{path.stem}"
            if docname not in self.env.found_docs:
                continue
            found = execute.stored(notebooks.read(path))
            seconds = found.metadata["execution_seconds"] if found else 0.0
            total += seconds
            uri = self.env.app.builder.get_relative_uri(self.env.docname, docname)
            link = nodes.reference("", path.stem, refuri=uri, internal=True)
            rows.append([link, f"{seconds:.1f}" if found else "runs during this build"])
        rows.append(["all", f"{total:.1f}"])
        return [build_table(["notebook", "seconds"], rows, ["kv-times"])]


class Evidence(SphinxDirective):
    """``{evidence}``: every recorded measurement, its machine and date, and whether its code has changed since."""

    def run(self) -> list[nodes.Node]:
        """List the records under ``book/evidence``."""
        records = import_module("kvbook.lab.recorded").evidence_records()
        if not records:
            return [nodes.paragraph("", "Nothing is recorded yet.")]
        rows: list[list[nodes.Node | str]] = [
            [r["name"], r["hardware"], r["date"], "older code" if r["stale"] else "as the code stands"] for r in records
        ]
        return [build_table(["name", "machine", "date", "state"], rows, ["kv-evidence"])]


def evidence_value(record: dict, path: str) -> str:
    """One number or text of a record's result, as a sentence shows it.

    Args:
        record: as ``kvbook.lab.recorded.load_evidence`` gives it.
        path: keys and indices joined by dots, for instance ``medians.0``.

    Returns:
        Whole numbers with thousands separators, others with four significant digits, anything else as it is.

    Raises:
        KeyError: the result has nothing at that path.
    """
    value = record["result"]
    for step in path.split("."):
        try:
            value = value[int(step)] if isinstance(value, list) else value[step]
        except (KeyError, IndexError, ValueError, TypeError):
            raise KeyError(f"the record {record['name']} has nothing at {path!r} (looked for {step!r})") from None
    return format(value, ",") if type(value) is int else format(value, ",.4g") if type(value) is float else str(value)


class EvidenceRole(SphinxRole):
    """``{evidence}`name:path```: a number of a recorded measurement; ``{evidence}`name```: its machine and date."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        """Read the record; a missing one, or a missing value, is an error of the build."""
        name, _, path = self.text.partition(":")
        recorded = import_module("kvbook.lab.recorded")
        try:
            record = recorded.load_evidence(name)
            if record is None:
                raise KeyError(f"no measurement is recorded as {name!r}")
            provenance = f"{recorded.hardware_line(record['hardware'])}, {record['date']}"
            return [nodes.Text(evidence_value(record, path) if path else provenance)], []
        except (KeyError, ValueError) as error:
            message = self.inliner.reporter.error(f"evidence: {error.args[0]}", line=self.lineno)
            return [self.inliner.problematic(self.rawtext, self.rawtext, message)], [message]


def setup(app: Sphinx) -> dict:
    """Register everything; Sphinx calls this."""
    app.setup_extension("sphinx.ext.autodoc")
    app.add_autodocumenter(TritonDocumenter)
    app.connect("autodoc-skip-member", keep_kernels)
    app.add_directive("scoreboard", Scoreboard)
    app.add_directive("chapters", Chapters)
    app.add_directive("execution-times", ExecutionTimes)
    app.add_directive("evidence", Evidence)
    app.add_role("evidence", EvidenceRole())
    app.connect("builder-inited", write_figure_scripts)
    app.connect("builder-inited", write_live_package)
    app.connect("source-read", on_source_read)
    app.connect("env-get-updated", on_env_get_updated, priority=900)
    app.connect("doctree-resolved", drop_repeated_ids)
    app.connect("html-page-context", add_live_script)
    app.connect("html-page-context", drop_thebe, priority=900)
    app.connect("build-finished", finish_pages)
    app.connect("html-page-context", wrap_sidebar, priority=900)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
