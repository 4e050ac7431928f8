"""The handbook desk: the committed file is what the code makes, and counting it equals running it."""
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbook.compute.checkpoint import locate, read_gguf, tokenizer_from_gguf
from kvbook.control.config import KNOWN_MODELS
from kvbook.lab.desk import (
    BOX_BYTES,
    DeskTurn,
    Scoreboard,
    desk_turns,
    load_turns,
    logbook,
    save_turns,
    score_multi_head_twin,
    score_two_walls,
    seats_paged,
    seats_reserved,
    serve_in_groups,
    strip,
)

FILE = Path(__file__).parents[1] / "book" / "desk.jsonl"
SMOL = KNOWN_MODELS["SmolLM2-135M"]


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_from_gguf(read_gguf(locate())[0])


def test_the_committed_file_is_what_the_code_makes(tokenizer):
    assert load_turns(FILE) == desk_turns(tokenizer)


def test_the_afternoon_is_as_described(tokenizer):
    turns = load_turns(FILE)
    assert len(turns) == 32 and {turn.person for turn in turns} == set(range(16))
    handbooks = {turn.token_ids[:400] for turn in turns if turn.turn == 0}
    assert len(handbooks) == 1                                       # shared by all, and not one token more
    assert len({turn.token_ids[:404] for turn in turns if turn.turn == 0}) > 1
    for first, second in zip(turns[:16], turns[16:], strict=True):
        total = sum(len(turn.token_ids) + turn.max_tokens for turn in (first, second))
        assert total == (4_704 if first.person == 7 else 704)
        assert 50 <= first.max_tokens <= 210 and 50 <= second.max_tokens <= 210


def test_turns_are_the_chat_template_s_own_text(tokenizer):
    """Turn 0 is exactly what the template renders; turn 1 continues it without a gap."""
    from kvbook.lab.desk import HANDBOOK, QUESTIONS

    first, second = load_turns(FILE)[3], load_turns(FILE)[19]
    messages = [{"role": "system", "content": HANDBOOK}, {"role": "user", "content": QUESTIONS[3][0]}]
    assert list(first.token_ids) == tokenizer.chat(messages)
    answer = tokenizer.encode("Two euros.")
    whole = tokenizer.render_chat([*messages, {"role": "assistant", "content": "Two euros."},
                                   {"role": "user", "content": QUESTIONS[3][1]}])
    assert tokenizer.backend.decode([*first.token_ids, *answer, *second.token_ids], skip_special_tokens=False) == whole


def test_the_strip():
    assert [row["people"] for row in strip()] == [0, 2, 4, 24, 48, 110]
    assert [row["projected"] for row in strip()] == [14, 59, 117, 692, 1_364, 3_158]
    assert [row["built"] for row in strip() if row["chapter"] == 0] == [True]


def test_seats_agree_with_filling_the_box_one_by_one():
    pages, people, free = BOX_BYTES // (16 * 23_040), 0, 0
    free = pages
    while free >= 44:
        free, people = free - 44, people + 1
    assert seats_paged(SMOL, "bfloat16", BOX_BYTES) == people == 24
    assert seats_reserved(SMOL, "bfloat16", BOX_BYTES, limit=2_048) == 8


@settings(max_examples=60)
@given(lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.integers(1, 9)),
                        min_size=1, max_size=6), seats=st.integers(1, 8))
def test_counting_equals_serving(lengths, seats):
    """A second implementation, token by token: every request delivers its tokens, in seats, in order."""
    turns = [DeskTurn(i, 0, (0,) * p1, 0, a1) for i, (p1, a1, _, _) in enumerate(lengths)]
    turns += [DeskTurn(i, 1, (0,) * p2, 0, a2) for i, (_, _, p2, a2) in enumerate(lengths)]
    counts = serve_in_groups(turns, seats)
    assert counts.delivered == sum(a1 + a2 for _, a1, _, a2 in lengths)
    prompts = sum(p1 + (p1 + a1 + p2) for p1, a1, p2, _ in lengths)
    assert counts.computed == prompts + counts.delivered - 2 * len(lengths)
    assert all(load for load in counts.loads) and len(counts.loads) <= counts.steps
    assert all(len(load) <= seats for load in counts.loads)
    assert sum(len(load) for load in counts.loads) == counts.delivered
    assert counts.steps >= max(a1 + a2 for _, a1, _, a2 in lengths)
    if seats == 1:
        assert counts.steps == counts.delivered
        assert counts.longest_stall <= counts.delivered


def test_nobody_can_be_served_without_seats():
    with pytest.raises(ValueError, match="seats=0"):
        serve_in_groups([], 0)


def test_the_first_row():
    row = score_two_walls(load_turns(FILE))
    assert (row.people, row.bytes_per_token, row.projected) == (2, 23_040, 59)
    assert row.counts.delivered == sum(turn.max_tokens for turn in load_turns(FILE))
    assert row.counts.steps >= row.counts.delivered / 2                # two seats deliver two tokens a step at most
    text, html = repr(Scoreboard([row])), Scoreboard([row])._repr_html_()
    assert "23,040" in text and "<td>23,040</td>" in html


def test_the_multi_head_twin_serves_nobody():
    row = score_multi_head_twin()
    assert (row.bytes_per_token, row.people, row.projected, row.counts) == (69_120, 0, 14, None)
    assert "never served" in repr(Scoreboard([row]))


def test_files_round_trip_and_damage_is_named(tmp_path):
    turns = [DeskTurn(0, 0, (1, 2), 1, 3)]
    save_turns(turns, tmp_path / "x.jsonl")
    assert load_turns(tmp_path / "x.jsonl") == turns
    (tmp_path / "x.jsonl").write_text((tmp_path / "x.jsonl").read_text() + '{"person": 1}\n')
    with pytest.raises(ValueError, match=r"x\.jsonl, line 2: not a request"):
        load_turns(tmp_path / "x.jsonl")


def test_the_logbook_is_the_same_everywhere():
    lines = logbook(500).splitlines()
    assert len(lines) == 500 and lines[0].startswith("Night 1, 18:00.") and len(set(lines)) > 400
