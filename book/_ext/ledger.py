"""The ledger page: every claim of the source text with its verdict, and with the value that a notebook found for it.

``{ledger}`` joins two things: the entries of ``book/claims.toml``, and the records that ``claim(...)`` left in the
outputs of the executed notebooks, which it takes from the execution cache. The page is whole without a script;
``kv-ledger.js`` adds the filters.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path

from docutils import nodes
from nbformat import NotebookNode
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

sys.path.insert(0, str(Path(__file__).resolve().parent))
import execute
import notebooks

from kvbook.lab.claims import CLAIM_MIME, VERDICTS, Claim, claim_anchor, format_number, format_quantity, load_claims

logger = logging.getLogger(__name__)

TITLES = {
    "P": "Introduction",
    "9": "Chapter 9: fewer and smaller keys and values",
    "10": "Chapter 10: fewer bits",
    "11": "Chapter 11: pages",
    "12": "Chapter 12: shared prefixes",
    "13": "Chapter 13: continuous batching",
    "14": "Chapter 14: preemption",
    "15": "Chapter 15: speculative decoding",
}
"""The chapters of the source text, in our words."""


@dataclass(frozen=True)
class Found:
    """What a notebook found for one claim.

    Attributes:
        docname: the page that shows it, for instance ``nbs/90_claims``.
        value: as the claim's output records it: a number, true or false, or named numbers.
        within: whether it lay inside the band.
    """

    docname: str
    value: float | bool | dict[str, float]
    within: bool | None


# What the notebooks found


def claims_in(notebook: NotebookNode, docname: str) -> dict[str, Found]:
    """The claims among the outputs of an executed notebook, by key."""
    found = {}
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            if record := output.get("data", {}).get(CLAIM_MIME):
                found[record["key"]] = Found(docname, record["value"], record["within"])
    return found


def found_values(docnames: Iterable[str]) -> dict[str, Found]:
    """The claims among the stored outputs of the notebooks of the book.

    Args:
        docnames: the pages of the book; notebooks that are none of them are left out.

    Returns:
        Key → value and place. A notebook without stored outputs adds nothing.
    """
    found: dict[str, Found] = {}
    for path in execute.all_notebooks():
        if f"nbs/{path.stem}" in docnames and (executed := execute.stored(notebooks.read(path))):
            found |= claims_in(executed, f"nbs/{path.stem}")
    return found


# The page


def chapter_of(key: str) -> str:
    """The chapter of the source text that a claim comes from: ``"9.1.12"`` gives ``"9"``."""
    return key.partition(".")[0]


def in_order(keys: Iterable[str]) -> list[str]:
    """Keys in the order of the source text, its introduction first.

    >>> in_order(["15.0.1", "9.1.12", "9.1.2", "P.1"])
    ['P.1', '9.1.2', '9.1.12', '15.0.1']
    """
    return sorted(keys, key=lambda key: [int(part) if part.isdigit() else 0 for part in key.split(".")])


def band_text(claim: Claim) -> str:
    """How far a value may be from the expected one, as a reader says it."""
    if claim.band == "exact":
        return "none"
    ((kind, width),) = claim.band.items()
    return f"± {width * 100:.3g} %" if kind == "relative" else f"± {format_number(width)}"


def values_html(claim: Claim, found: Found | None) -> str:
    """The value found here beside the expected one; one line for each named number."""
    if claim.expected is None:
        return ""
    expected = claim.expected if isinstance(claim.expected, dict) else {"": claim.expected}
    value = found.value if found and isinstance(found.value, dict) else {"": found.value} if found else {}
    lines = []
    for name, number in expected.items():
        here = f"<b>{escape(format_quantity(value[name], claim.unit))}</b>" if name in value else "no value"
        label = f"{escape(name)}: " if name else ""
        lines.append(f"<li>{label}{here} here; expected {escape(format_quantity(number, claim.unit))}</li>")
    outside = " Outside the expected band here." if found and found.within is False else ""
    note = f'<p class="kv-band">Allowed difference: {band_text(claim)}.{outside}</p>'
    return f'<ul class="kv-values">{"".join(lines)}</ul>{note}'


def entry_html(claim: Claim, found: Found | None, address: Callable[[str], str]) -> str:
    """One claim as a list item.

    Args:
        claim: the ledger's entry.
        found: what a notebook found, or None.
        address: gives the relative address of a page.
    """
    place = "cited; no cell"
    if found:
        page = found.docname.rpartition("/")[2]
        place = f'<a href="{address(found.docname)}#{claim_anchor(claim.key)}">{claim.kind} in <code>{page}</code></a>'
    reason = claim.reason[0].upper() + claim.reason[1:]
    return (
        f'<li class="kv-entry kv-{claim.verdict}" id="ledger-{claim.key.lower().replace(".", "-")}" '
        f'data-verdict="{claim.verdict}" data-chapter="{chapter_of(claim.key)}">'
        f'<p class="kv-entry-head"><span class="kv-key">{claim.key}</span> '
        f'<span class="kv-verdict">{claim.verdict}</span> <span class="kv-place">{place}</span></p>'
        f'<p class="kv-statement"><q>{escape(claim.statement)}</q></p>{values_html(claim, found)}'
        f"<p>{escape(reason)}</p>"
        f'<p class="kv-source">{escape(claim.source)}</p></li>'
    )


def counts_html(claims: Iterable[Claim]) -> str:
    """How many claims have each verdict."""
    counts = Counter(claim.verdict for claim in claims)
    items = "".join(f'<li class="kv-{v}"><b>{counts[v]}</b> {v}</li>' for v in VERDICTS)
    return f'<ul class="kv-counts" aria-label="Claims by verdict">{items}</ul>'


def select_html(name: str, label: str, options: Mapping[str, str]) -> str:
    """One labelled choice, which begins with all."""
    choices = "".join(f'<option value="{value}">{escape(text)}</option>' for value, text in options.items())
    return f'<label>{label} <select name="{name}"><option value="">all</option>{choices}</select></label>'


def ledger_html(claims: Mapping[str, Claim], found: Mapping[str, Found], address: Callable[[str], str]) -> str:
    """The whole ledger: counts, filters (which a script shows), and the claims by chapter.

    Args:
        claims: the entries by key.
        found: what the notebooks found, by key.
        address: gives the relative address of a page.
    """
    keys = in_order(claims)
    chapters = {c: TITLES.get(c, f"Chapter {c}") for c in dict.fromkeys(map(chapter_of, keys))}
    total = f"{len(keys)} of {len(keys)} claims"
    parts = [
        f'<div class="kv-ledger">{counts_html(claims.values())}',
        '<form class="kv-filters" aria-label="Filter the claims" hidden>',
        select_html("verdict", "Verdict", {verdict: verdict for verdict in VERDICTS}),
        select_html("chapter", "Chapter", {c: title.removeprefix("Chapter ") for c, title in chapters.items()}),
        f'<button type="reset">Show all</button><output aria-live="polite">{total}</output></form>',
    ]
    for chapter, title in chapters.items():
        entries = [entry_html(claims[k], found.get(k), address) for k in keys if chapter_of(k) == chapter]
        parts.append(f'<section class="kv-ledger-chapter"><h2 id="ledger-chapter-{chapter.lower()}">{escape(title)}'
                     f'</h2><ul class="kv-entries">{"".join(entries)}</ul></section>')
    return "".join(parts) + "</div>"


class Ledger(SphinxDirective):
    """``{ledger}``: all claims, with counts by verdict, filters, and a link to the cell of each value."""

    def run(self) -> list[nodes.Node]:
        """Join the entries with the stored outputs; a value that no notebook computes is a warning."""
        path = notebooks.ROOT / "book" / "claims.toml"
        self.env.note_dependency(str(path))
        claims, found = load_claims(path), found_values(self.env.found_docs)
        for key in in_order(key for key, claim in claims.items() if claim.kind != "cited" and key not in found):
            logger.warning("ledger: no executed notebook has a value for claim %s", key, location=self.get_location())
        docname, builder = self.env.docname, self.env.app.builder
        html = ledger_html(claims, found, lambda page: builder.get_relative_uri(docname, page))
        script = "../" * docname.count("/") + "_static/kv-ledger.js"
        return [nodes.raw("", f'{html}<script defer src="{script}"></script>', format="html")]


def setup(app: Sphinx) -> dict:
    """Register the directive; Sphinx calls this."""
    app.add_directive("ledger", Ledger)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
