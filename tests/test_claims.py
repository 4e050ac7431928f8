"""The ledger of claims: the file, the values held against it, and the line that a reader sees."""
import ast
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from IPython.core.inputtransformer2 import TransformerManager

from kvbook.lab import claims as module
from kvbook.lab.claims import (
    CLAIM_MIME,
    Claim,
    ClaimResult,
    OutsideBandError,
    UnknownClaimError,
    claim,
    format_quantity,
    load_claims,
)

ROOT = Path(__file__).resolve().parents[1]
CHAPTER_ZERO = {"P.1", "P.2", "P.3", "P.4", "15.0.1", "15.0.2", "15.0.3", "15.2.1", "15.2.2", "15.2.3"}
GOOD = {"statement": "All is one", "kind": "computed", "expected": 1.5, "band": {"relative": 0.1}, "unit": "×",
        "verdict": "right", "reason": "it is.", "source": "Somebody"}


def toml(fields):
    """Write one claim; JSON's texts, numbers and booleans are TOML's, its objects need ``=``."""
    def value(item):
        if isinstance(item, dict):
            return "{" + ", ".join(f"{json.dumps(name)} = {value(part)}" for name, part in item.items()) + "}"
        return json.dumps(item)
    return "".join(f"{name} = {value(item)}\n" for name, item in fields.items())


@pytest.fixture
def ledger(tmp_path, monkeypatch):
    """Make a ledger of the tables that a test gives, and make it the book's."""
    monkeypatch.setenv("KVBOOK_BOOK", str(tmp_path))

    def write(**tables):
        text = "".join(f'["{key.replace("_", ".")}"]\n{toml(fields)}\n' for key, fields in tables.items())
        (tmp_path / "claims.toml").write_text(text, encoding="utf-8")
        return tmp_path / "claims.toml"
    return write


def claims_in(node):
    """Yield the keys passed to ``claim`` under a syntax node; not under ``try``, where an error is shown on purpose."""
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "claim":
        yield node.args[0].value
    if not isinstance(node, ast.Try):
        for child in ast.iter_child_nodes(node):
            yield from claims_in(child)


def calls_in(path):
    """Return the keys that a notebook's own cells (not the exported ones) pass to ``claim``."""
    keys = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] != "code" or source.startswith("#| export"):
            continue
        keys += claims_in(ast.parse(TransformerManager().transform_cell(source)))
    return keys


def test_every_value_in_the_ledger_has_one_cell_and_cited_claims_have_none():
    called = sorted(key for path in (ROOT / "nbs").glob("*.ipynb") for key in calls_in(path))
    expected = sorted(key for key, entry in load_claims(ROOT / "book" / "claims.toml").items() if entry.kind != "cited")
    assert called == expected


def test_chapter_zero_is_in_the_ledger():
    assert load_claims(ROOT / "book" / "claims.toml").keys() >= CHAPTER_ZERO


def test_a_claim_round_trips(ledger):
    [(key, entry)] = load_claims(ledger(P_1=GOOD)).items()
    assert key == "P.1"
    assert entry == Claim("P.1", **GOOD)


@pytest.mark.parametrize(("field", "value"), [
    ("verdict", "rihgt"), ("kind", "guessed"), ("statement", ""), ("statement", 3), ("reason", " "), ("source", 1),
    ("unit", 5), ("timed", "yes"), ("expected", "1.5"), ("expected", {}), ("expected", {"a": "b"}),
    ("band", 0.1), ("band", "loose"), ("band", {"relative": -1}), ("band", {"relative": 0.1, "absolute": 1}),
    ("band", {"about": 0.1}), ("verdit", "right")])
def test_a_bad_field_is_named_with_its_key(ledger, field, value):
    path = ledger(P_1=GOOD, P_2={**GOOD, field: value})
    with pytest.raises(ValueError, match=rf"claim P\.2: .*{field}.*accepted"):
        load_claims(path)


@pytest.mark.parametrize("field", GOOD)
def test_a_missing_field_is_named_with_its_key(ledger, field):
    path = ledger(P_1={name: value for name, value in GOOD.items() if name != field})
    with pytest.raises(ValueError, match=rf"claim P\.1: missing .*{field}"):
        load_claims(path)


def test_a_cited_claim_needs_no_value(ledger):
    cited = {name: GOOD[name] for name in ("statement", "verdict", "reason", "source")} | {"kind": "cited"}
    assert load_claims(ledger(P_1=cited))["P.1"].expected is None
    with pytest.raises(ValueError, match=r"P\.1 is cited"):
        claim("P.1", 1)


def test_only_measured_claims_are_timed(ledger):
    with pytest.raises(ValueError, match=r"P\.1: timed is true and kind is 'computed'"):
        load_claims(ledger(P_1={**GOOD, "timed": True}))


@pytest.mark.parametrize("text", ['[9.1.12]\nstatement = "unquoted"\n', '["nine"]\n', 'P = 1\n'])
def test_a_key_that_is_none_is_named(tmp_path, text):
    (tmp_path / "claims.toml").write_text(text)
    with pytest.raises(ValueError, match="quoted key"):
        load_claims(tmp_path / "claims.toml")


def test_a_broken_file_and_an_absent_one(tmp_path, monkeypatch):
    (tmp_path / "claims.toml").write_text("[[")
    with pytest.raises(ValueError, match="is no TOML"):
        load_claims(tmp_path / "claims.toml")
    monkeypatch.setattr(module, "find_book", lambda: None)
    with pytest.raises(FileNotFoundError, match="KVBOOK_BOOK"):
        load_claims()


@pytest.mark.parametrize("value", [1.5, 1.36, 1.64, np.float32(1.5), torch.tensor(1.5), np.float64(1.5)])
def test_a_value_inside_its_band_is_accepted(ledger, value):
    ledger(P_1=GOOD)
    assert claim("P.1", value).within


@pytest.mark.parametrize("kind", ["computed", "measured"])
@pytest.mark.parametrize("value", [1.3, 1.7, float("nan"), float("inf")])
def test_a_value_outside_its_band_raises_with_key_value_and_band(ledger, kind, value):
    ledger(P_1={**GOOD, "kind": kind})
    with pytest.raises(OutsideBandError, match=rf"claim P\.1: {value} .*relative.*0\.1.*1\.5"):
        claim("P.1", value)


def test_a_timed_value_outside_its_band_only_says_so(ledger):
    ledger(P_1={**GOOD, "kind": "measured", "timed": True})
    result = claim("P.1", 9)
    assert result.within is False
    assert repr(result) == '"All is one": 9× (outside the expected band here). Right: it is.'


def test_exact_and_absolute_bands(ledger):
    ledger(P_1={**GOOD, "expected": 64, "band": "exact"}, P_2={**GOOD, "expected": 64, "band": {"absolute": 2}})
    assert claim("P.1", 64).within
    assert claim("P.2", 66).within
    with pytest.raises(OutsideBandError):
        claim("P.1", 64.001)
    with pytest.raises(OutsideBandError):
        claim("P.2", 66.1)


def test_named_values_are_all_compared(ledger):
    ledger(P_1={**GOOD, "expected": {"a": 1, "b": 100}})
    assert repr(claim("P.1", {"b": 105, "a": 1})) == '"All is one": 105× (b); 1× (a) here. Right: it is.'
    with pytest.raises(OutsideBandError):
        claim("P.1", {"a": 1, "b": 111})


@pytest.mark.parametrize(("expected", "value"), [
    ({"a": 1}, {"b": 1}), ({"a": 1}, 1), (1, {"a": 1}), (True, 1), (1, True)])
def test_a_value_of_another_shape_is_refused(ledger, expected, value):
    ledger(P_1={**GOOD, "expected": expected})
    with pytest.raises(ValueError, match=r"claim P\.1: value is .*accepted"):
        claim("P.1", value)


@pytest.mark.parametrize("value", ["1.5", None, [1.5], np.zeros(2), torch.zeros(2), {"a": "b"}])
def test_what_is_no_number_is_refused(ledger, value):
    ledger(P_1=GOOD)
    with pytest.raises(ValueError, match=r"claim P\.1: value is .*accepted: a number"):
        claim("P.1", value)


def test_an_unknown_key_names_the_nearest(ledger):
    ledger(P_1=GOOD, P_2=GOOD, **{"15_2_1": GOOD})
    with pytest.raises(UnknownClaimError, match=r"no claim '15\.2\.l' in claims\.toml; the nearest: 15\.2\.1"):
        claim("15.2.l", 1)


def test_without_a_ledger_the_value_is_still_shown(monkeypatch):
    monkeypatch.setattr(module, "find_book", lambda: None)
    result = claim("9.1.12", {"bytes": 3})
    assert repr(result) == "Claim 9.1.12: 3 (bytes) here. (The ledger, book/claims.toml, is not on this machine.)"
    assert result.within is None
    assert "3 (bytes) here" in result._repr_mimebundle_()["text/html"]


def test_the_line_of_the_design():
    entry = Claim("9.1.12", "A million tokens cost 8.06 TB", "computed", "wrong", "KB of 1,000 and of 1,024 mixed.",
                  "x", 8.2575e12, {"relative": 0.001}, "B")
    value = 2 * 126 * 128 * 128 * 2 * 10**6
    assert repr(ClaimResult("9.1.12", value, entry, entry.is_within(value))) == (
        '"A million tokens cost 8.06 TB": 8.26 TB here. Wrong: KB of 1,000 and of 1,024 mixed.')


def test_three_faces_of_a_result(ledger):
    ledger(**{"9_1_12": {**GOOD, "statement": "1 < 2 & more", "verdict": "wrong"}})
    bundle = claim("9.1.12", 1.5)._repr_mimebundle_()
    assert bundle.keys() == {"text/plain", "text/html", CLAIM_MIME}
    assert bundle["text/plain"] == '"1 < 2 & more": 1.5× here. Wrong: it is.'
    assert bundle["text/html"].startswith('<p class="kv-claim kv-wrong" id="claim-9-1-12">')
    assert "1 &lt; 2 &amp; more" in bundle["text/html"]
    assert json.loads(json.dumps(bundle[CLAIM_MIME])) == {
        "key": "9.1.12", "value": 1.5, "expected": 1.5, "within": True, "verdict": "wrong"}


@pytest.mark.parametrize(("value", "unit", "text"), [
    (0, "B", "0 B"), (516, "B", "516 B"), (999.6, "B", "1 kB"), (516_096, "B", "516 kB"), (64.512e9, "B", "64.5 GB"),
    (8.2575e12, "B", "8.26 TB"), (5.1e15, "B", "5,100 TB"), (1.626, "×", "1.63×"), (12, "%", "12%"),
    (0.5, "FLOP/B", "0.5 FLOP/B"), (23_040, "tokens", "23,040 tokens"), (1234.5, "", "1,234"), (True, "", "holds"),
    (False, "B", "does not hold")])
def test_quantities_are_written_as_people_say_them(value, unit, text):
    assert format_quantity(value, unit) == text


@given(st.floats(1, 1e15), st.floats(1e-6, 0.5), st.floats(-0.99, 0.99))
def test_a_relative_band_holds_what_is_inside_and_nothing_else(expected, relative, where):
    entry = Claim("P.1", **{**GOOD, "expected": expected, "band": {"relative": relative}})
    assert entry.is_within(expected * (1 + relative * where))
    assert not entry.is_within(expected * (1 + 1.01 * relative))
    assert not entry.is_within(expected * (1 - 1.01 * relative))
