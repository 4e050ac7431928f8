"""The book in a browser: every page in light, dark and on a narrow screen, offline, by keyboard, for screen readers."""

import functools
import http.server
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import execute
import pytest

ROOT = Path(__file__).resolve().parents[1]
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PLACES = ("/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",)
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]

MODES = {
    "light": {"viewport": {"width": 1280, "height": 900}, "color_scheme": "light"},
    "dark": {"viewport": {"width": 1280, "height": 900}, "color_scheme": "dark"},
    "narrow": {"viewport": {"width": 360, "height": 780}, "color_scheme": "light"},
}

ALLOWED = {
    ("region", ".sidebar-primary-items__start > .sidebar-primary-item:nth-child(1)"):
        "the theme sets the book's title above the sidebar's navigation landmark",
}
"""What the theme breaks and this book cannot mend: rule and place, with the reason."""

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]


def find_chromium() -> str | None:
    """A Chromium that is installed: named by KVBOOK_CHROMIUM, on the path, or in its usual place on macOS."""
    named = os.environ.get("KVBOOK_CHROMIUM")
    found = [named] if named else [shutil.which(name) for name in NAMES] + [p for p in PLACES if Path(p).exists()]
    return next(filter(None, found), None)


@pytest.fixture(scope="session")
def browser() -> Iterator:
    """A running Chromium; without one the browser tests are skipped."""
    path = find_chromium()
    if path is None:
        pytest.skip("no Chromium here: install one, or name it in KVBOOK_CHROMIUM")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield running
        running.close()


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files and prints nothing."""

    def log_message(self, *arguments) -> None:
        """Print nothing."""


def serve(folder: Path) -> Iterator[str]:
    """Serve a folder on this machine; yields its address."""
    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="session")
def book_address(built_book) -> Iterator[str]:
    yield from serve(built_book)


@pytest.fixture(scope="session")
def small_address(small_book) -> Iterator[str]:
    yield from serve(small_book)


class Tab:
    """One page of the browser that notes errors of its console and requests that leave the book."""

    def __init__(self, browser, home: str, mode: str = "light"):
        self.context = browser.new_context(**MODES[mode], reduced_motion="reduce")
        self.page = self.context.new_page()
        self.home, self.troubles = home, []
        self.page.on("console", lambda m: self.troubles.append(f"{m.type}: {m.text}") if m.type == "error" else None)
        self.page.on("pageerror", lambda error: self.troubles.append(f"exception: {error}"))
        self.page.on("request", self.note_outside)
        self.page.on("response", lambda r: self.troubles.append(f"{r.status}: {r.url}") if r.status >= 400 else None)
        self.page.on("requestfailed", lambda r: self.troubles.append(f"failed: {r.url} {r.failure}"))

    def note_outside(self, request) -> None:
        if not request.url.startswith((self.home, "data:", "blob:")):
            self.troubles.append(f"outside request: {request.url}")

    def open(self, name: str):
        """Open a page of the book and wait until it is at rest; returns the playwright page."""
        self.page.goto(self.home + name, wait_until="load")
        self.page.wait_for_function(
            "() => [...document.querySelectorAll('[data-kv-figure]')].every((f) => f.dataset.kvState)"
            " && (!window.MathJax?.startup?.promise || window.MathJax.startup.promise.then(() => true))"
        )
        return self.page

    def __enter__(self) -> "Tab":
        return self

    def __exit__(self, *error) -> None:
        self.context.close()


def page_names() -> list[str]:
    """Every page of the book, from its sources, and the search page."""
    prose = sorted(p.stem for p in (ROOT / "book").glob("*.md"))
    return [f"book/{n}.html" for n in prose] + [f"nbs/{p.stem}.html" for p in execute.all_notebooks()] + ["search.html"]


OVERFLOW = """() => {
  const wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  return wide > 0 ? [wide, ...[...document.querySelectorAll("main *")]
    .filter((e) => e.getBoundingClientRect().right > innerWidth + 1).slice(0, 5)
    .map((e) => `${e.tagName}.${e.className}: ${e.textContent.trim().slice(0, 60)}`)] : [];
}"""

AXE = """async () => {
  const found = await axe.run(document, { resultTypes: ["violations"], preload: false });
  return found.violations.flatMap((v) => v.nodes.map((n) => [v.id, n.target.join(" "), n.failureSummary]));
}"""


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", page_names())
def test_a_page_is_sound(browser, book_address, name, mode):
    with Tab(browser, book_address, mode) as tab:
        page = tab.open(name)
        assert page.evaluate(OVERFLOW) == []
        assert page.evaluate("document.documentElement.dataset.theme") == ("dark" if mode == "dark" else "light")
        if mode != "narrow":
            page.add_script_tag(path=ROOT / "_build" / "vendor" / "axe-core" / "axe.min.js")
            assert [v for v in page.evaluate(AXE) if (v[0], v[1]) not in ALLOWED] == []
        assert tab.troubles == []


def test_every_built_page_is_visited(built_book):
    built = {p.relative_to(built_book).as_posix() for p in built_book.rglob("*.html")}
    plain = {n for n in built if not n.startswith(("_static", "_modules")) and n not in ("index.html", "genindex.html",
                                                                                        "py-modindex.html")}
    assert plain == set(page_names())


def test_the_landing_page_fits_one_narrow_screen(browser, book_address):
    with Tab(browser, book_address, "narrow") as tab:
        page = tab.open("book/index.html")
        assert page.evaluate("document.querySelector('.kv-chapters').getBoundingClientRect().bottom") <= 780


def shown(figure) -> str:
    """What a figure shows, to a reader and to a screen reader."""
    return figure.evaluate(
        "(f) => f.innerText + [...f.querySelectorAll('*')].map((e) => [...e.attributes].map((a) => a.value)).join()"
    )


def operate_by_keyboard(page, figure) -> None:
    """Move every slider of a figure by the arrow keys, and press its buttons by the space bar."""
    sliders = figure.locator("input[type=range]")
    for number in range(sliders.count()):
        slider = sliders.nth(number)
        slider.focus()
        value, before = slider.input_value(), shown(figure)
        page.keyboard.press("ArrowRight")
        if slider.input_value() == value:
            page.keyboard.press("ArrowLeft")
        assert slider.input_value() != value
        assert shown(figure) != before
    buttons = figure.locator("button:enabled")
    for number in range(buttons.count()):
        buttons.nth(number).focus()
        page.keyboard.press("Space")
    assert sliders.count() + buttons.count() + figure.locator("select, input").count() > 0


def figure_pages(folder: Path) -> list[str]:
    """The pages of a book that hold interactive figures."""
    return [p.relative_to(folder).as_posix() for p in sorted(folder.rglob("nbs/*.html"))
            if "data-kv-figure=" in p.read_text(encoding="utf-8")]


@pytest.mark.parametrize("scheme", ["http", "file"])
def test_the_figures_of_the_book_work_by_keyboard(browser, built_book, book_address, scheme):
    home = book_address if scheme == "http" else built_book.resolve().as_uri() + "/"
    names = figure_pages(built_book)
    assert names
    for name in names:
        with Tab(browser, home) as tab:
            page = tab.open(name)
            figures = page.locator("[data-kv-figure]")
            for number in range(figures.count()):
                figure = figures.nth(number)
                assert figure.get_attribute("data-kv-state") == "live"
                operate_by_keyboard(page, figure)
            assert tab.troubles == []


@pytest.mark.parametrize("scheme", ["http", "file"])
def test_a_figure_comes_alive_and_a_broken_one_stays_still(browser, small_book, small_address, scheme):
    home = small_address if scheme == "http" else small_book.resolve().as_uri() + "/"
    with Tab(browser, home) as tab:
        page = tab.open("nbs/01_sample.html")
        live = page.locator("[data-kv-figure=two_loops]")
        still = page.locator("[data-kv-figure=no_such_script]")
        assert live.get_attribute("data-kv-state") == "live"
        assert live.locator(".kv-mount").evaluate_all("(all) => all.map((e) => e.checkVisibility())") == [True, False]
        operate_by_keyboard(page, live)
        assert still.get_attribute("data-kv-state") == "still"
        assert still.get_by_text("The still frame.").is_visible()
        assert [t for t in tab.troubles if "no_such_script" not in t and "Failed to load resource" not in t] == []


def test_without_scripts_the_still_frame_shows(browser, small_address):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(small_address + "nbs/01_sample.html")
    assert page.locator("[data-kv-figure=two_loops] .kv-mount").is_visible()
    live = page.locator(".cell.tag_live").nth(1)
    assert live.get_by_text("table.fork()").is_visible()
    assert live.get_by_text("[2, 2, 2]").is_visible()
    assert live.locator("button").count() == 0
    context.close()


class LiveCell:
    """A live cell of the small book's page, as a reader uses it."""

    def __init__(self, page, number: int):
        self.page, self.cell = page, page.locator(".cell.tag_live").nth(number)
        self.area, self.status = self.cell.locator("textarea"), self.cell.locator("output")

    def button(self, name: str):
        return self.cell.get_by_role("button", name=name)

    def output(self) -> str:
        """What it has said in this page, once nothing runs any more."""
        self.page.wait_for_function("() => !document.querySelector('.kv-busy')", timeout=60_000)
        return self.cell.locator(".kv-ran").text_content().strip()

    def run(self, source: str) -> str:
        """Edit it, run it by the keyboard, and wait for what it says."""
        self.area.fill(source)
        self.area.press("Control+Enter")
        return self.output()


ALL_OF_CONTROL = """import importlib, pkgutil, kvbook.control
[importlib.import_module(f"kvbook.control.{m.name}").__name__ for m in pkgutil.iter_modules(kvbook.control.__path__)]"""


def test_a_live_cell_runs_is_edited_fails_and_is_stopped(browser, small_address):
    with Tab(browser, small_address) as tab:
        asked = []
        tab.page.on("request", lambda request: asked.append(request.url.rpartition("/")[2]))
        page = tab.open("nbs/01_sample.html")
        first, second = LiveCell(page, 0), LiveCell(page, 1)
        assert not [name for name in asked if "worker" in name or "pyodide" in name]
        second.button("Run").click()                                      # runs the first before itself
        assert (second.output(), first.output()) == ("[2, 2, 2]", "blocks [1, 2, 3]")
        assert {"pyodide.asm.wasm", "python_stdlib.zip", "kvbook.zip"} <= set(asked)
        modules = sorted(p.stem for p in (ROOT / "kvbook" / "control").glob("[!_]*.py"))
        assert second.run(ALL_OF_CONTROL) == str([f"kvbook.control.{name}" for name in modules])
        error = second.run("names = [1, 2]\nprint('before')\nnames[2]").splitlines()
        assert error[:3] == ["before", "Traceback (most recent call last):", '  File "cell 2", line 3, in <module>']
        assert error[-1] == "IndexError: list index out of range"
        second.area.fill("while True:\n    print('on and on')")
        second.button("Run").click()
        second.cell.get_by_text("only the first 20,000 characters are shown").wait_for()
        second.button("Stop").press("Enter")
        assert second.status.inner_text() == "Stopped. The next run starts afresh."
        assert second.button("Run").evaluate("(button) => button === document.activeElement")
        assert second.run("pool.num_used") == "3"                         # the first cell has run anew
        second.button("Reset").click()
        assert second.output() == ""
        assert second.cell.get_by_text("[2, 2, 2]").is_visible()
        assert [t for t in tab.troubles if "no_such_script" not in t and "Failed to load resource" not in t] == []


def test_a_live_cell_is_edited_by_keyboard_and_lets_it_out(browser, small_address):
    with Tab(browser, small_address) as tab:
        page = tab.open("nbs/01_sample.html")
        cell = LiveCell(page, 1)
        cell.area.fill("")
        for key in ("if x:", "Enter", "y", "Enter", "Shift+Tab", "z", "Control+a", "Tab"):
            (page.keyboard.press if "Tab" in key or "+" in key or key == "Enter" else page.keyboard.type)(key)
        assert cell.area.input_value() == "    if x:\n        y\n    z"
        page.keyboard.press("Shift+Tab")
        page.keyboard.press("ArrowRight")
        page.keyboard.press("Tab")
        assert cell.area.input_value() == "if x:\n    y\nz   "
        page.keyboard.press("Control+z")
        assert cell.area.input_value() == "if x:\n    y\nz"
        assert cell.cell.get_by_text("Esc, then Tab, leaves the cell").is_visible()
        page.keyboard.press("Escape")
        page.keyboard.press("Tab")
        assert not cell.area.evaluate("(area) => area === document.activeElement")
        assert cell.area.input_value() == cell.cell.locator(".cell_input pre").text_content().rstrip("\n")


def test_from_disk_a_live_cell_says_how_to_run_it(browser, small_book):
    with Tab(browser, small_book.resolve().as_uri() + "/") as tab:
        page = tab.open("nbs/01_sample.html")
        cell = page.locator(".cell.tag_live").nth(1)
        assert cell.get_by_text("This runs when the book is served: make serve").is_visible()
        assert cell.locator("textarea, button:not(.copybtn)").count() == 0
        assert cell.get_by_text("[2, 2, 2]").is_visible()


@pytest.mark.parametrize("scheme", ["http", "file"])
def test_search_works_offline(browser, built_book, book_address, scheme):
    home = book_address if scheme == "http" else built_book.resolve().as_uri() + "/"
    with Tab(browser, home) as tab:
        page = tab.open("search.html?q=roofline")
        page.wait_for_selector("#search-results ul.search li a")
        links = page.locator("#search-results ul.search li a").evaluate_all("(a) => a.map((x) => x.href)")
        assert any(link.startswith(home + "book/glossary.html") for link in links)
        assert tab.troubles == []


@pytest.mark.parametrize("mode", ["light", "narrow"])
def test_there_is_one_search_field(browser, book_address, mode):
    with Tab(browser, book_address, mode) as tab:
        page = tab.open("book/notation.html")
        fields = page.locator("input[type=search]:visible, .search-button:visible, .search-button-field:visible")
        assert fields.count() == 1


def test_the_icons_are_drawn(browser, book_address):
    with Tab(browser, book_address) as tab:
        page = tab.open("book/glossary.html")
        page.wait_for_selector("svg.fa-bars", state="attached")
        icons = page.locator("svg.svg-inline--fa:visible path")
        drawn = icons.evaluate_all("(all) => all.map((e) => e.getBBox().width)")
        assert len(drawn) >= 3
        assert min(drawn) > 0


def test_mathematics_is_set(browser, book_address):
    with Tab(browser, book_address) as tab:
        page = tab.open("book/notation.html")
        assert page.locator("mjx-container").count() > 10
        loaded = page.evaluate("document.fonts.ready.then(() => [...document.fonts].filter((f) => f.status == 'loaded')"
                               ".map((f) => f.family))")
        assert any("MJX" in family for family in loaded)
        assert any("Source Serif 4" in family for family in loaded)


def test_a_folded_solution_opens_by_keyboard(browser, small_address):
    with Tab(browser, small_address) as tab:
        page = tab.open("nbs/01_sample.html")
        solution = page.locator(".solution")
        answer = solution.get_by_text("the solution is 2")
        assert not answer.is_visible()
        solution.get_by_role("button", name="Toggle hidden content").focus()
        page.keyboard.press("Enter")
        assert answer.is_visible()
