"""The built book holds together: links, numbers, weight, nothing from outside; and its machinery does what it says."""

import gzip
import os
import re
import shutil
import tarfile
import types
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

import build_book
import kvbook_ext
import pytest
import static_figures
import vendor
from docutils import nodes

ROOT = Path(__file__).resolve().parents[1]
PAGE_LIMIT_BYTES = 1_000_000
LOADING = {("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src"), ("video", "src"), ("audio", "src"),
           ("object", "data"), ("embed", "src"), ("form", "action")}


class Page(HTMLParser):
    """What one page refers to and what it can be referred to by."""

    def __init__(self, path: Path):
        super().__init__()
        self.path, self.ids, self.links, self.loaded, self.duplicates = path, set(), [], [], []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        for name in {given.get("id"), given.get("name") if tag == "a" else None} - {None}:
            if name in self.ids:
                self.duplicates.append(name)
            self.ids.add(name)
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        if tag == "link" and given.get("rel") not in ("canonical", "author", "prev", "next", "index", "search"):
            self.loaded.append(given["href"])
        self.loaded += [given[name] for name in given if (tag, name) in LOADING and given[name]]


@cache
def read_page(path: Path) -> Page:
    return Page(path)


@pytest.fixture(scope="session")
def pages(built_book) -> dict[str, Page]:
    """The pages of the book by name; the copied sources of modules are left out."""
    found = {p.relative_to(built_book).as_posix(): p for p in built_book.rglob("*.html")}
    return {name: read_page(p) for name, p in found.items() if not name.startswith(("_static", "_modules"))}


def local_target(page: Path, reference: str) -> tuple[Path, str]:
    """The file and the anchor that a reference in a page leads to."""
    address, anchor = urldefrag(reference)
    path = unquote(urlsplit(address).path)
    return (page.parent / path).resolve() if path else page, unquote(anchor)


def is_outside(reference: str) -> bool:
    return bool(urlsplit(reference).scheme or urlsplit(reference).netloc) and not reference.startswith("data:")


def test_every_internal_link_leads_somewhere(pages):
    broken = []
    for name, page in pages.items():
        for reference in page.links:
            if is_outside(reference):
                continue
            target, anchor = local_target(page.path, reference)
            if not target.is_file():
                broken.append(f"{name}: {reference}")
            elif anchor and target.suffix == ".html" and anchor not in read_page(target).ids:
                broken.append(f"{name}: {reference} (no such anchor)")
    assert broken == []
    assert sum(len(page.links) for page in pages.values()) > 100


def test_everything_that_a_page_loads_is_part_of_the_book(pages):
    assert [f"{n}: {r}" for n, page in pages.items() for r in page.loaded if is_outside(r)] == []
    missing = [f"{n}: {r}" for n, page in pages.items() for r in page.loaded
               if not r.startswith("data:") and not local_target(page.path, r)[0].exists()]
    assert missing == []


def test_style_sheets_load_nothing_from_outside(built_book):
    sheets = list((built_book / "_static").rglob("*.css"))
    assert sheets
    pattern = re.compile(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//")
    assert [sheet.name for sheet in sheets if pattern.search(sheet.read_text(encoding="utf-8"))] == []


def test_ids_are_unique(pages):
    assert {name: page.duplicates for name, page in pages.items() if page.duplicates} == {}


@cache
def compressed_bytes(path: Path) -> int:
    data = path.read_bytes()
    return len(data) if path.suffix in (".woff2", ".png", ".jpg") else len(gzip.compress(data))


def test_pages_are_light(pages):
    weights = {}
    for name, page in pages.items():
        parts = {local_target(page.path, r)[0] for r in page.loaded if not r.startswith("data:")}
        weights[name] = compressed_bytes(page.path) + sum(map(compressed_bytes, parts))
    assert {name: weight for name, weight in weights.items() if weight > PAGE_LIMIT_BYTES} == {}


def test_pages_show_no_path_of_the_machine_that_built_them(pages):
    places = [str(ROOT), str(Path.home()) + os.sep]
    found = [f"{name}: {place}" for name, page in pages.items() for place in places
             if place in page.path.read_text(encoding="utf-8")]
    assert found == []


def test_the_contents_list_every_notebook():
    listed = set(re.findall(r"^\s*- file: nbs/(\S+)", (ROOT / "book" / "_toc.yml").read_text(), re.MULTILINE))
    assert listed == {p.stem for p in (ROOT / "nbs").glob("*.ipynb")}


def captions(page: Page) -> list[str]:
    """The numbers of the figures, tables and exercises of a page, in the order of the page."""
    text = page.path.read_text(encoding="utf-8")
    return re.findall(r'class="caption-number">\D+?([\w.]+) ?</span>', text)


def test_figures_carry_the_number_of_their_chapter(pages):
    numbered = 0
    for name, page in pages.items():
        if label := kvbook_ext.chapter_label(name.removesuffix(".html")):
            found = captions(page)
            numbered += len(found)
            assert all(number.startswith(f"{label}.") for number in found), (name, found)
    assert numbered > 0


def test_the_landing_page_shows_the_computed_strip(pages):
    from kvbook.lab import desk

    html = pages["book/index.html"].path.read_text(encoding="utf-8")
    strip = html.partition('<ol class="kv-strip"')[2].partition("</ol>")[0]
    assert re.findall(r"<b>(\d+)</b>", strip) == [str(row["people"]) for row in desk.strip()]
    assert strip.count("to come") == sum(not row["built"] for row in desk.strip())
    chapters = html.partition('<ol class="kv-chapters">')[2].partition("</ol>")[0]
    assert re.findall(r"<i>(\d)</i>", chapters) == [str(n) for n in range(9)]


def test_every_module_has_its_place_in_the_reference(pages):
    names = [m for group in kvbook_ext.package_modules(ROOT / "kvbook").values() for m in group]
    text = pages["book/api.html"].path.read_text(encoding="utf-8")
    assert len(names) > 5
    assert [name for name in names if f'id="module-{name}"' not in text] == []


def test_a_built_book_is_not_built_again(built_book):
    before = (built_book / build_book.STAMP).stat().st_mtime_ns
    assert build_book.is_current()
    assert build_book.build() is False
    assert (built_book / build_book.STAMP).stat().st_mtime_ns == before


def test_any_change_of_a_source_makes_the_book_stale(tmp_path):
    for name in ("_config.yml", "requirements.txt"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("book/page.md", "nbs/01.ipynb", "kvbook/a.py", "kvbook/lab/static/a.js", "book/_static/vendor/x.js"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("before")
    seen = {build_book.fingerprint(tmp_path)}
    for name in ("book/page.md", "nbs/01.ipynb", "kvbook/a.py", "kvbook/lab/static/a.js", "_config.yml"):
        (tmp_path / name).write_text("after")
        seen.add(build_book.fingerprint(tmp_path))
    assert len(seen) == 6
    (tmp_path / "book/_static/vendor/x.js").write_text("after")
    assert build_book.fingerprint(tmp_path) in seen


# A small book with every directive


@pytest.fixture(scope="session")
def sample(small_book) -> str:
    return (small_book / "nbs" / "01_sample.html").read_text(encoding="utf-8")


def test_directives_show_on_the_page(sample):
    assert "secret_word" not in sample
    assert "default_exp" not in sample
    assert "#|" not in sample
    assert "only the output 42" in re.sub(r"<[^>]+>", "", sample)
    assert "only the output" not in re.findall(r'<div class="cell_input[^>]*>.*?</div>', sample, re.DOTALL)[1]
    assert "How it is made" in sample
    assert "tag_kv-export" in sample
    assert sample.count("never runs") == 1  # the code alone, no traceback


def test_a_figure_is_numbered_and_referred_to(sample):
    assert re.search(r'<a class="reference internal" href="#fig-probe"><span class="std std-numref">Fig\. 1\.1', sample)
    assert re.search(r'<figure[^>]*id="fig-probe"', sample)
    assert "Without a cache the work grows." in sample


def test_pages_files_and_numbers_agree(small_book):
    for name, number in (("00_begin", "0.1"), ("01_sample", "1.1"), ("01a_companion", "1.2"), ("02_next", "2.1")):
        page = (small_book / "nbs" / f"{name}.html").read_text(encoding="utf-8")
        assert f'<span class="eqno">({number})' in page, name
    sidebar = (small_book / "book" / "index.html").read_text(encoding="utf-8")
    titles = [re.sub(r"\s+", " ", t).strip() for t in re.findall(r'href="\.\./nbs/[^"]*">([^<]*)</a>', sidebar)]
    assert titles[:4] == ["Two walls", "1. Fewer heads", "A companion", "2. Fewer bits"]


def test_a_solution_is_folded_with_its_code_and_output(sample):
    solution = sample.partition('class="solution dropdown admonition"')[2]
    assert solution
    inside = solution.partition("</section>")[0]
    assert "the solution is 2" in re.sub(r"<[^>]+>", "", inside)
    assert "the solution is" not in sample.partition('class="solution dropdown admonition"')[0]


def test_pages_carry_no_thebe(small_book):
    for path in small_book.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        assert "THEBE_JS_URL" not in text
        assert "sphinx-thebe" not in text


# Parts of the machinery


def test_renumbering_counts_on_over_companions():
    numbers = {
        "nbs/03_paged_attention": {"figure": {"a": (1,), "b": (2,)}, "table": {"t": (1,)}},
        "nbs/03a_kv_cache": {"figure": {"c": (3,)}},
        "nbs/91_figures": {"figure": {"d": (4,)}},
        "book/notation": {"displaymath": {"e": (9,)}},
    }
    kvbook_ext.renumber(numbers)
    assert numbers == {
        "nbs/03_paged_attention": {"figure": {"a": ("3", 1), "b": ("3", 2)}, "table": {"t": ("3", 1)}},
        "nbs/03a_kv_cache": {"figure": {"c": ("3", 3)}},
        "nbs/91_figures": {"figure": {"d": ("B", 1)}},
        "book/notation": {"displaymath": {"e": (1,)}},
    }


def test_kernels_are_documented():
    def kernel(pointer, block):
        """Adds one."""

    jit_function = type("JITFunction", (), {"__module__": "triton.runtime.jit", "__doc__": None})
    wrapped = jit_function()
    wrapped.fn = kernel
    documenter = kvbook_ext.TritonDocumenter
    assert documenter.can_document_member(wrapped, "kernel", False, None)
    assert not documenter.can_document_member(kernel, "kernel", False, None)
    assert kvbook_ext.keep_kernels(None, "module", "kernel", wrapped, True, None) is False
    kernel.__doc__ = None
    assert kvbook_ext.keep_kernels(None, "module", "kernel", wrapped, True, None) is None


def test_the_reference_finds_new_modules(tmp_path):
    for name in ("control/b.py", "control/a.py", "lab/c.py", "engine.py", "_modidx.py", "control/__init__.py"):
        (tmp_path / "kvbook" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "kvbook" / name).touch()
    assert kvbook_ext.package_modules(tmp_path / "kvbook") == {
        "control": ["kvbook.control.a", "kvbook.control.b"], "lab": ["kvbook.lab.c"], "": ["kvbook.engine"]
    }
    assert ".. automodule:: kvbook.engine" in kvbook_ext.api_markdown(tmp_path / "kvbook")


def test_evidence_is_shown_as_a_sentence_shows_it():
    record = {"name": "sweep", "result": {"medians": [12345, 0.123456, "bf16"]}}
    shown = [kvbook_ext.evidence_value(record, f"medians.{i}") for i in range(3)]
    assert shown == ["12,345", "0.1235", "bf16"]
    for path in ("medians.3", "means", "medians.x", "medians.0.y"):
        with pytest.raises(KeyError, match="sweep has nothing at"):
            kvbook_ext.evidence_value(record, path)


def test_the_strip_marks_what_is_to_come():
    rows = [{"chapter": 0, "title": "A < B", "people": 0, "built": True},
            {"chapter": 4, "title": "Later", "people": 110, "built": False}]
    html = kvbook_ext.strip_html(rows)
    assert "A &lt; B" in html
    assert html.count("<li") == 2
    assert html.count("to come") == 1
    assert "to come" in html.partition("Later")[2]


def test_icons_that_no_page_uses_are_left_out():
    script = 'var a={bars:[1,2,[],"f0c9","M0"],"file-pdf":[1,2,[3,"x"],"f1",["M1","M2"]],xmark:[1,2,[],"f00d","M3"]};'
    kept = kvbook_ext.keep_icons(script, {"file-pdf"})
    assert kept == 'var a={"file-pdf":[1,2,[3,"x"],"f1",["M1","M2"]],};'


def test_folds_of_the_sidebar_get_names():
    html = '<a class="x" href="a.html">Two walls</a><details open="open"><summary><span></span></summary></details>'
    assert '<summary aria-label="Pages of Two walls"><span>' in kvbook_ext.name_sidebar_folds(html)


def test_thebe_is_dropped_and_the_rest_stays():
    def script(name, body=None):
        return types.SimpleNamespace(filename=name, attributes={"body": body} if body else {})

    context = {"script_files": [script("doctools.js"), script("sphinx-thebe.js"), script(None, "var THEBE_JS_URL = 1")],
               "css_files": []}
    kvbook_ext.drop_thebe(None, "page", "page.html", context, None)
    assert [s.filename for s in context["script_files"]] == ["doctools.js"]


def test_bodies_of_exercises_lose_their_common_id():
    document = nodes.document(None, None)
    document += [nodes.section(ids=["exercise-content"]), nodes.section(ids=["kept"])]
    kvbook_ext.drop_repeated_ids(None, document, "page")
    assert [section["ids"] for section in document.findall(nodes.section)] == [[], ["kept"]]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("export { x };\nexport default {};", "accepted are exports of declarations"),
        ("import d3 from './d3.js';\nexport default {};", "and no imports"),
        ("const x = 1;", "has 0 lines"),
        ("export default 1;\nexport default 2;", "has 2 lines"),
    ],
)
def test_a_figure_script_that_cannot_be_wrapped_is_refused(source, message):
    with pytest.raises(static_figures.FigureScriptError, match=message):
        static_figures.classic_script("bad", source)


def test_a_figure_script_registers_itself():
    module = "export function f() {}\nexport const g = 1;\nexport default { f };\n"
    script = static_figures.classic_script("two", module)
    assert "export" not in script
    assert "__figure.default = { f };" in script
    assert '(window.kvFigures ??= {})["two"] = __figure.default;' in script


def npm_package(folder: Path, files: dict[str, str]) -> Path:
    """A package file as npm packs it."""
    for name, text in files.items():
        (folder / "package" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "package" / name).write_text(text)
    with tarfile.open(folder / "made.tgz", "w:gz") as tar:
        tar.add(folder / "package", "package")
    return folder / "made.tgz"


@pytest.fixture
def fake_npm(tmp_path, monkeypatch):
    """An npm that hands out one package file, and counts how often it is asked."""
    made = npm_package(tmp_path / "made" if (tmp_path / "made").mkdir() is None else tmp_path,
                       {"a.js": "a", "deep/b.js": "b", "deep/c/d.js": "d"})
    calls = tmp_path / "calls"
    script = tmp_path / "npm"
    script.write_text(f"#!/bin/sh\necho called >> {calls}\ncp {made} x.tgz\n")
    script.chmod(0o755)
    monkeypatch.setattr(vendor, "npm_command", lambda: [str(script)])
    package = vendor.Package("made@1.0.0", vendor.digest(made), "vendor/made", {"a.js": "one.js", "deep/": "two/"})
    return types.SimpleNamespace(package=package, root=tmp_path / "root", calls=calls, script=script)


def test_libraries_are_fetched_once(fake_npm):
    assert vendor.fetch(fake_npm.package, fake_npm.root) is True
    assert vendor.fetch(fake_npm.package, fake_npm.root) is False
    assert fake_npm.calls.read_text().split() == ["called"]
    folder = fake_npm.root / "vendor" / "made"
    found = {p.relative_to(folder).as_posix(): p.read_text() for p in folder.rglob("*.js")}
    assert found == {"one.js": "a", "two/b.js": "b", "two/c/d.js": "d"}
    assert [p.name for p in folder.parent.iterdir()] == ["made"]


def test_a_library_that_is_not_the_pinned_one_is_not_kept(fake_npm):
    vendor.fetch(fake_npm.package, fake_npm.root)
    other = vendor.Package("made@1.0.1", "x" * 86 + "==", "vendor/made", {"a.js": "one.js"})
    with pytest.raises(vendor.VendorError, match="not the pinned"):
        vendor.fetch(other, fake_npm.root)
    assert (fake_npm.root / "vendor" / "made" / "one.js").read_text() == "a"


def test_a_failing_npm_says_why(fake_npm):
    fake_npm.script.write_text("#!/bin/sh\necho 'network is unreachable' >&2\nexit 7\n")
    with pytest.raises(vendor.VendorError, match=r"could not fetch made@1.0.0 with npm \(exit 7\): network is unreach"):
        vendor.fetch(fake_npm.package, fake_npm.root)
    assert not (fake_npm.root / "vendor" / "made").exists()


def test_without_a_system_npm_the_one_in_the_wheel_starts(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    import subprocess

    done = subprocess.run([*vendor.npm_command(), "--version"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"\d+\.\d+\.\d+", done.stdout.strip())
