"""Evidence: measured where possible and asked for, loaded everywhere else, the same value either way."""
import getpass
import json
import re
import socket
import sys
from pathlib import Path

import numpy as np
import pytest

from kvbook.lab import recorded as module
from kvbook.lab.recorded import evidence_records, load_evidence, modules_hash, recorded

ROOT = Path(__file__).resolve().parents[1]
SAMPLES = {"seconds": (0.25, 0.5), "name": "é", "nested": [{"none": None, "yes": True}]}
AS_JSON = {"seconds": [0.25, 0.5], "name": "é", "nested": [{"none": None, "yes": True}]}


@pytest.fixture(autouse=True)
def book(tmp_path, monkeypatch):
    """A book of this test's own, and a module of its own to measure."""
    (tmp_path / "book").mkdir()
    (tmp_path / "book" / "claims.toml").touch()
    (tmp_path / "measured_module.py").write_text("# a comment\ndef f():\n    return 1\n")
    monkeypatch.setenv("KVBOOK_BOOK", str(tmp_path / "book"))
    monkeypatch.delenv("KVBOOK_RUN", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "measured_module", raising=False)
    return tmp_path / "book"


def never():
    pytest.fail("it ran although nobody asked")


def record(monkeypatch, fn=lambda: SAMPLES, needs="slow", name="trial"):
    monkeypatch.setenv("KVBOOK_RUN", needs)
    result = recorded(name, fn, needs=needs, modules=["measured_module"])
    monkeypatch.delenv("KVBOOK_RUN")
    return result


def load(name="trial", needs="slow"):
    return recorded(name, never, needs=needs, modules=["measured_module"])


def test_measured_and_loaded_values_are_equal_in_type_too(monkeypatch, capsys):
    measured = record(monkeypatch)
    assert measured == AS_JSON
    assert re.fullmatch(r"Measured on .+, \d{4}-\d\d-\d\d \(stored\)\.\n", capsys.readouterr().out)
    loaded = load()
    assert json.dumps(loaded) == json.dumps(measured)
    assert re.fullmatch(r"Recorded on .+, \d{4}-\d\d-\d\d\.\n", capsys.readouterr().out)


@pytest.mark.parametrize(("needs", "line"), [
    ("slow", "needs a run with KVBOOK_RUN=slow."), ("gpu", "needs a run with KVBOOK_RUN=gpu on a machine with a GPU.")])
def test_where_nothing_is_recorded_it_says_so_and_returns_none(capsys, needs, line):
    assert load(needs=needs) is None
    assert capsys.readouterr().out == f"Nothing is recorded as 'trial': it {line}\n"


@pytest.mark.parametrize(("asked", "needs", "gpu", "runs"), [
    ("gpu", "gpu", True, True), ("slow gpu", "gpu", True, True), ("slow,gpu", "slow", False, True),
    ("gpu", "gpu", False, False), ("slow", "gpu", True, False), ("gpu", "slow", True, False), ("", "slow", True, False),
    ("slower", "slow", True, False)])
def test_it_runs_only_where_asked_for_and_possible(monkeypatch, asked, needs, gpu, runs):
    monkeypatch.setattr(module, "has_gpu", lambda: gpu)
    monkeypatch.setattr(module, "describe_hardware", lambda: {"cpu": "c", "cores": 1, "gpus": ["g"]})
    monkeypatch.setenv("KVBOOK_RUN", asked)
    ran = []
    recorded("trial", lambda: ran.append(1), needs=needs, modules=["measured_module"])
    assert bool(ran) is runs


def test_a_record_says_what_is_needed_to_judge_it_and_nothing_of_a_person(monkeypatch, book):
    record(monkeypatch)
    text = (book / "evidence" / "trial.json").read_text(encoding="utf-8")
    stored = json.loads(text)
    assert stored["hardware"]["cores"] >= 1 and stored["hardware"]["cpu"]
    assert stored["versions"].keys() >= {"python", "torch"}
    assert stored["modules"] == ["measured_module"]
    assert stored["hash"] == modules_hash(["measured_module"])
    for private in (socket.gethostname(), str(Path.home()), str(book), getpass.getuser() + "@"):
        assert private not in text


def test_changed_code_is_older_code_but_a_comment_is_not(monkeypatch, book, capsys):
    record(monkeypatch)
    source = book.parent / "measured_module.py"
    source.write_text("# a better comment\n\ndef f():\n    # of reasons\n    return 1\n")
    load()
    assert "older code" not in capsys.readouterr().out
    assert [entry["stale"] for entry in evidence_records()] == [False]
    source.write_text("def f():\n    return 2\n")
    assert load() == AS_JSON
    assert ", by older code.\n" in capsys.readouterr().out
    assert [entry["stale"] for entry in evidence_records()] == [True]
    source.unlink()
    module.importlib.invalidate_caches()
    assert [entry["stale"] for entry in evidence_records()] == [True]


def test_the_hash_depends_on_names_and_order():
    one, other = "kvbook.lab.session", "measured_module"
    assert len({modules_hash([one]), modules_hash([other]), modules_hash([one, other]),
                modules_hash([other, one])}) == 4


@pytest.mark.parametrize(("value", "where"), [
    ({"a": [1, np.float64(2)]}, r"result\['a'\]\[1\] is a numpy.float64"), (float("nan"), "result is nan"),
    ({"a": {1: 2}}, r"result\['a'\] has the key 1"), ([{1, 2}], r"result\[0\] is a builtins.set"),
    (np.zeros(2), "result is a numpy.ndarray"), (float("inf"), "result is inf")])
def test_what_json_cannot_hold_is_named_and_nothing_is_stored(monkeypatch, book, value, where):
    with pytest.raises(ValueError, match=where):
        record(monkeypatch, fn=lambda: value)
    assert not (book / "evidence").exists()


@pytest.mark.parametrize("fault", [KeyboardInterrupt, OSError])
def test_an_interrupted_write_leaves_the_old_record(monkeypatch, book, fault):
    record(monkeypatch)
    before = (book / "evidence" / "trial.json").read_bytes()

    def dump(record, file, **_):
        file.write('{"half": ')
        raise fault

    monkeypatch.setattr(module.json, "dump", dump)
    with pytest.raises(fault):
        record(monkeypatch, fn=lambda: 2)
    assert [path.name for path in (book / "evidence").iterdir()] == ["trial.json"]
    assert (book / "evidence" / "trial.json").read_bytes() == before


def test_a_failing_measurement_leaves_the_old_record(monkeypatch):
    record(monkeypatch)
    with pytest.raises(ZeroDivisionError):
        record(monkeypatch, fn=lambda: 1 / 0)
    monkeypatch.delenv("KVBOOK_RUN")
    assert load() == AS_JSON


@pytest.mark.parametrize(("arguments", "message"), [
    ({"name": "../up"}, r"name is '\.\./up'"), ({"name": ""}, "name is ''"), ({"name": "Upper"}, "name is 'Upper'"),
    ({"needs": "tpu"}, "needs is 'tpu'; accepted: gpu, slow"), ({"modules": []}, r"modules is \[\]"),
    ({"modules": "kvbook"}, "modules is 'kvbook'"), ({"modules": ["no.such.module"]}, "names 'no.such.module'"),
    ({"modules": ["sys"]}, "names 'sys'")])
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        recorded(**{"name": "trial", "fn": never, "needs": "slow", "modules": ["measured_module"], **arguments})


@pytest.mark.parametrize(("damage", "message"), [
    (lambda stored: "{", r"evidence/trial\.json is no JSON"), (lambda stored: "[]", "holds no result"),
    (lambda stored: json.dumps({**stored, "hash": 3}), "hash is 3; accepted: a str"),
    (lambda stored: json.dumps({**stored, "hardware": {}}), "hardware lacks cores, cpu, gpus"),
    (lambda stored: json.dumps({name: stored[name] for name in stored if name != "date"}), "date is None")])
def test_a_damaged_record_is_named_with_what_to_do(monkeypatch, book, damage, message):
    record(monkeypatch)
    path = book / "evidence" / "trial.json"
    path.write_text(damage(json.loads(path.read_text())))
    for read in (load, evidence_records, lambda: load_evidence("trial")):
        with pytest.raises(ValueError, match=f"{message}.*record it again"):
            read()


def test_records_are_listed_by_name(monkeypatch):
    record(monkeypatch, name="b-second")
    record(monkeypatch, name="a_first")
    listed = evidence_records()
    assert [entry["name"] for entry in listed] == ["a_first", "b-second"]
    assert listed[0].keys() == {"name", "needs", "hardware", "date", "versions", "stale", "modules"}
    assert isinstance(listed[0]["hardware"], str)
    assert load_evidence("a_first")["result"] == AS_JSON
    assert load_evidence("absent") is None


def test_without_a_book_it_measures_but_stores_nothing(monkeypatch, capsys):
    monkeypatch.setattr(module, "find_book", lambda: None)
    assert record(monkeypatch) == AS_JSON
    assert "not stored" in capsys.readouterr().out
    assert load() is None
    assert evidence_records() == []


def test_hardware_in_one_line():
    cpu = {"cpu": "Some CPU", "cores": 1, "gpus": []}
    assert module.hardware_line(cpu) == "Some CPU, 1 core"
    assert module.hardware_line({**cpu, "gpus": ["A", "B"]}) == "A, B"


def test_the_books_own_evidence_can_be_read(monkeypatch):
    monkeypatch.setenv("KVBOOK_BOOK", str(ROOT / "book"))
    names = [entry["name"] for entry in evidence_records()]
    assert names == sorted(path.stem for path in (ROOT / "book" / "evidence").glob("*.json"))
