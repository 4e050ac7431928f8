"""The data files of chapter 2: closed-book facts and prompts for greedy decoding."""

import json
import re
from pathlib import Path

import pytest

BOOK = Path(__file__).resolve().parents[1] / "book"


def rows(name):
    """Parse a file of one JSON object a line; bytes that are no UTF-8 raise."""
    text = (BOOK / name).read_bytes().decode("utf-8")
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize(("name", "count", "fields"),
                         [("facts.jsonl", 200, {"prompt", "answer"}), ("prompts.jsonl", 50, {"prompt"})])
def test_every_line_has_its_fields_and_no_prompt_comes_twice(name, count, fields):
    found = rows(name)
    assert len(found) == count
    for row in found:
        assert row.keys() == fields
        assert all(isinstance(value, str) and value and value == value.strip() for value in row.values()), row
    assert len({row["prompt"].casefold() for row in found}) == count


def test_a_fact_does_not_give_its_answer_away():
    for row in rows("facts.jsonl"):
        answer = rf"(?<!\w){re.escape(row['answer'].casefold())}(?!\w)"
        assert not re.search(answer, row["prompt"].casefold()), row


def test_an_answer_is_short_and_the_last_of_its_sentence():
    for row in rows("facts.jsonl"):
        assert 1 <= len(row["answer"].split()) <= 3, row
        assert row["answer"][-1].isalnum(), row
        assert row["prompt"][-1].isalnum() or row["prompt"][-1] == ",", row


def test_the_facts_are_not_all_of_one_kind():
    facts = rows("facts.jsonl")
    assert len({row["answer"].casefold() for row in facts}) > 150
    assert sum("capital" in row["prompt"] for row in facts) < 50


def test_prompts_have_five_to_sixty_words():
    for row in rows("prompts.jsonl"):
        assert 5 <= len(row["prompt"].split()) <= 60, row
