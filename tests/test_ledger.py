"""The ledger page: the claims of the file joined with what the notebooks found, and its filters in a browser."""

import json
import re
from collections import Counter
from pathlib import Path

import execute
import ledger
import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output
from test_browser import FLAGS, find_chromium

from kvbook.lab.claims import CLAIM_MIME, VERDICTS, Claim, claim_anchor, load_claims

ROOT = Path(__file__).resolve().parents[1]
CHAPTER_NINE = [f"9.{section}.{n}" for section, last in ((1, 16), (2, 6), (3, 10)) for n in range(1, last + 1)]


def entry(key: str, **changes) -> Claim:
    fields = {"statement": "All is one", "kind": "computed", "verdict": "right", "reason": "it is.",
              "source": "Somebody", "expected": 1.5, "band": {"relative": 0.001}, "unit": "×"}
    return Claim(key, **fields | changes)


CITED = {"kind": "cited", "expected": None, "band": "exact", "unit": ""}


# The entries of chapter 9


def test_every_claim_of_chapter_nine_is_there_in_the_order_of_the_text():
    keys = [key for key in load_claims(ROOT / "book" / "claims.toml") if key.startswith("9.")]
    assert keys == CHAPTER_NINE


def test_llama_3_405b_has_its_exact_bytes():
    claims = load_claims(ROOT / "book" / "claims.toml")
    per_token = {heads: 2 * 126 * heads * 128 * 2 for heads in (128, 8, 1)}
    assert claims["9.1.3"].expected == per_token[8] == 516_096
    assert claims["9.1.12"].expected == per_token[128] * 10**6
    assert claims["9.1.13"].expected["a million tokens"] == per_token[1] * 10**6
    assert claims["9.1.14"].expected["a million tokens"] == per_token[8] * 10**6
    assert {claims[f"9.1.{n}"].verdict for n in (12, 13, 14, 16)} == {"wrong"}


# What the notebooks found


def executed(*records: dict) -> nbformat.NotebookNode:
    """A notebook whose cells have claims among other outputs."""
    outputs = [new_output("display_data", {CLAIM_MIME: record, "text/plain": "x"}) for record in records]
    cells = [new_code_cell("print(1)", outputs=[new_output("stream", text="1\n")]),
             new_code_cell("claim()", outputs=outputs)]
    return new_notebook(cells=cells)


def record(key: str, value: object, within: bool = True) -> dict:
    return {"key": key, "value": value, "within": within, "expected": 1, "verdict": "right"}


def test_claims_are_found_among_outputs():
    notebook = nbformat.reads(nbformat.writes(executed(record("9.1.1", 3), record("P.1", {"b": 1, "a": 2}, False))), 4)
    found = ledger.claims_in(notebook, "nbs/01_x")
    assert found == {"9.1.1": ledger.Found("nbs/01_x", 3, True),
                     "P.1": ledger.Found("nbs/01_x", {"a": 2, "b": 1}, False)}


def test_only_pages_of_the_book_with_stored_outputs_count(monkeypatch, tmp_path):
    paths = [tmp_path / f"{name}.ipynb" for name in ("01_in", "02_out", "03_not_run")]
    stored = {"01_in": executed(record("1.1.1", 1)), "02_out": executed(record("2.1.1", 2)), "03_not_run": None}
    monkeypatch.setattr(execute, "all_notebooks", lambda: paths)
    monkeypatch.setattr(ledger.notebooks, "read", lambda path: path.stem)
    monkeypatch.setattr(execute, "stored", stored.get)
    assert list(ledger.found_values({"nbs/01_in", "nbs/03_not_run"})) == ["1.1.1"]


# The page's parts


def test_keys_stand_in_the_order_of_the_text():
    assert ledger.in_order(["15.0.1", "9.10.1", "10.1.1", "9.2.10", "9.2.9", "P.2", "P.10"]) == [
        "P.2", "P.10", "9.2.9", "9.2.10", "9.10.1", "10.1.1", "15.0.1"]


@pytest.mark.parametrize(("band", "text"), [
    ("exact", "none"), ({"relative": 0.001}, "± 0.1 %"), ({"relative": 0.0005}, "± 0.05 %"),
    ({"absolute": 0.03}, "± 0.03"), ({"absolute": 2}, "± 2")])
def test_a_band_is_said_as_people_say_it(band, text):
    assert ledger.band_text(entry("1.1.1", band=band)) == text


def test_a_value_stands_beside_the_expected_one():
    html = ledger.values_html(entry("9.1.12", expected=8.2575e12, unit="B"), ledger.Found("nbs/90", 8.258e12, True))
    assert "<b>8.26 TB</b> here; expected 8.26 TB" in html
    assert "± 0.1 %" in html
    assert "Outside" not in html


def test_named_values_keep_the_order_of_the_ledger():
    claim = entry("9.1.2", expected={"b": 1, "a": 2})
    html = ledger.values_html(claim, ledger.Found("nbs/90", {"a": 20, "b": 10}, False))
    assert re.findall(r"<li>(\w): <b>(\d+)×</b> here; expected (\d)×", html) == [("b", "10", "1"), ("a", "20", "2")]
    assert "Outside the expected band here." in html


def test_a_missing_value_says_so_and_a_cited_claim_has_none():
    assert "no value here; expected 1.5×" in ledger.values_html(entry("1.1.1"), None)
    assert ledger.values_html(entry("1.1.1", **CITED), None) == ""


def test_an_entry_links_to_its_cell_and_escapes_what_it_shows():
    claim = entry("9.1.12", statement="1 < 2 & more", reason="so & so.", source="A <b>", verdict="wrong")
    html = ledger.entry_html(claim, ledger.Found("nbs/90_claims", 1.5, True), lambda page: f"../{page}.html")
    assert f'href="../nbs/90_claims.html#{claim_anchor("9.1.12")}"' in html
    assert 'id="ledger-9-1-12" data-verdict="wrong" data-chapter="9"' in html
    for text in ("1 &lt; 2 &amp; more", "So &amp; so.", "A &lt;b&gt;"):
        assert text in html
    cited = ledger.entry_html(entry("9.1.5", **CITED), None, str)
    assert "href" not in cited
    assert "cited; no cell" in cited


def test_verdicts_are_counted():
    verdicts = {"P.1": "wrong", "9.1.1": "right", "9.1.2": "wrong"}
    claims = {key: entry(key, verdict=verdict) for key, verdict in verdicts.items()}
    html = ledger.ledger_html(claims, {}, str)
    counts = dict(re.findall(r'<li class="kv-(\w+)"><b>(\d+)</b>', html))
    assert counts == {"right": "1", "imprecise": "0", "outdated": "0", "wrong": "2", "opinion": "0"}
    assert re.findall(r'<h2 id="([\w-]+)"', html) == ["ledger-chapter-p", "ledger-chapter-9"]
    assert "3 of 3 claims" in html


def test_the_real_ledger_is_shown_whole():
    claims = load_claims(ROOT / "book" / "claims.toml")
    html = ledger.ledger_html(claims, {}, str)
    assert html.count('<li class="kv-entry ') == len(claims)
    assert sum(map(int, re.findall(r'<li class="kv-\w+"><b>(\d+)</b>', html))) == len(claims)
    assert set(map(ledger.chapter_of, claims)) <= set(ledger.TITLES)


# In a browser, from disk


@pytest.fixture(scope="module")
def page_file(tmp_path_factory) -> Path:
    """The real ledger on a bare page with the book's style and script."""
    claims = load_claims(ROOT / "book" / "claims.toml")
    body = ledger.ledger_html(claims, {}, lambda page: f"{page}.html")
    static = (ROOT / "book" / "_static").as_uri()
    path = tmp_path_factory.mktemp("ledger") / "page.html"
    path.write_text(
        f'<!doctype html><html lang="en" data-theme="light"><meta charset="utf-8"><title>Ledger</title>'
        f'<link rel="stylesheet" href="{static}/kvbook.css"><main class="bd-article"><h1>Ledger</h1>{body}</main>'
        f'<script defer src="{static}/kv-ledger.js"></script></html>', encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def chromium():
    found = find_chromium()
    if found is None:
        pytest.skip("no Chromium here: install one, or name it in KVBOOK_CHROMIUM")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=found, args=FLAGS)
        yield running
        running.close()


@pytest.fixture
def page(chromium, page_file):
    tab = chromium.new_page()
    tab.goto(page_file.as_uri())
    yield tab
    tab.close()


def visible_keys(page) -> list[str]:
    return page.locator(".kv-entry:visible .kv-key").all_text_contents()


@pytest.mark.browser
@pytest.mark.timeout(120)
def test_filters_show_what_they_say(page):
    claims = load_claims(ROOT / "book" / "claims.toml")
    for verdict in VERDICTS:
        for chapter in ("", "9", "15"):
            page.locator("select[name=verdict]").select_option(verdict)
            page.locator("select[name=chapter]").select_option(chapter)
            wanted = [key for key in ledger.in_order(claims) if claims[key].verdict == verdict
                      and chapter in ("", ledger.chapter_of(key))]
            assert visible_keys(page) == wanted
            assert page.locator(".kv-filters output").text_content() == f"{len(wanted)} of {len(claims)} claims"
            headings = Counter(ledger.chapter_of(key) for key in wanted)
            assert page.locator(".kv-ledger-chapter:visible").count() == len(headings)


@pytest.mark.browser
@pytest.mark.timeout(120)
def test_filters_work_by_keyboard_and_show_all_undoes_them(page):
    page.locator("select[name=verdict]").focus()
    page.keyboard.press("w")            # wrong
    page.wait_for_function("document.querySelector('.kv-filters output').value.split(' ')[0] !== "
                           "document.querySelector('.kv-filters output').value.split(' ')[2]")
    left = page.locator(".kv-entry:visible").evaluate_all("(all) => all.map((e) => e.dataset.verdict)")
    assert set(left) == {"wrong"}
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Show all"
    page.keyboard.press("Enter")
    page.wait_for_function("!document.querySelector('.kv-entry[hidden]')")


@pytest.mark.browser
@pytest.mark.timeout(120)
def test_a_link_to_a_claim_shows_it_whatever_the_filters_say(page):
    page.locator("select[name=verdict]").select_option("right")
    assert not page.locator("#ledger-9-1-12").is_visible()
    page.evaluate("location.hash = '#ledger-9-1-12'")
    page.locator("#ledger-9-1-12").wait_for(state="visible")


@pytest.mark.browser
@pytest.mark.timeout(120)
def test_without_a_script_all_is_shown_and_no_dead_filter(chromium, page_file):
    context = chromium.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(page_file.as_uri())
    assert len(visible_keys(page)) == len(load_claims(ROOT / "book" / "claims.toml"))
    assert not page.locator(".kv-filters").is_visible()
    context.close()


@pytest.mark.browser
@pytest.mark.timeout(120)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_ledger_fits_a_narrow_screen(chromium, page_file, theme):
    page = chromium.new_page(viewport={"width": 360, "height": 780})
    page.goto(page_file.as_uri())
    page.evaluate(f"document.documentElement.dataset.theme = {json.dumps(theme)}")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.close()
