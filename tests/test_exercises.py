"""Exercises: kind to readers, strict to their authors."""
import numpy as np
import pytest

from kvbook.lab.exercises import Exercise, ExerciseError

DOZEN = Exercise("0.predict", lambda answer: answer == 12, "count the eggs.", "ten and two.")


class Hostile:
    """An answer that raises whatever is done with it."""

    def __eq__(self, other):
        raise RuntimeError("no")

    def __bool__(self):
        raise RuntimeError("no")

    def __repr__(self):
        raise RuntimeError("no")

    __hash__ = None


def quits(*_):
    raise SystemExit(3)


@pytest.mark.parametrize(("answer", "line"), [
    (None, "not yet"), (..., "not yet"), (12, "right: ten and two."), (13, "not quite: count the eggs."),
    ("12", "not quite: count the eggs."), (np.array([12, 12]), "not quite: count the eggs."),
    (Hostile(), "not quite: count the eggs.")])
def test_a_reader_gets_one_line_and_never_an_exception(capsys, answer, line):
    assert DOZEN.check(answer) is None
    assert capsys.readouterr().out == line + "\n"


def test_without_an_answer_it_is_not_yet(capsys):
    DOZEN.check()
    assert capsys.readouterr().out == "not yet\n"


@pytest.mark.parametrize("answer", [quits, lambda: 1 / 0, 3, lambda: [][1]])
def test_an_answer_that_fails_when_it_is_called_is_only_not_right(capsys, answer):
    Exercise("0.repair", lambda function: function() == 1, "try again.").check(answer)
    assert capsys.readouterr().out == "not quite: try again.\n"


def test_an_interrupt_still_interrupts():
    def interrupt(_):
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        Exercise("0.slow", interrupt, "wait.").check(1)


def test_a_good_exercise_is_proven_through_the_readers_check(capsys):
    DOZEN.prove(12, wrong=[10, 13, None], starter=0)
    assert capsys.readouterr().out == "right: ten and two.\n"


@pytest.mark.parametrize(("exercise", "arguments", "message"), [
    (DOZEN, {"wrong": []}, "wrong is empty"),
    (DOZEN, {"wrong": [13, 12]}, "wrong answer 12 passes"),
    (DOZEN, {"wrong": [13], "starter": 12}, "starter 12 passes"),
    (DOZEN, {"wrong": [13], "solution": 11}, "solution 11 does not pass"),
    (Exercise("0.predict", lambda _: True, "never seen."), {"wrong": [13]}, "starter None passes"),
    (Exercise("0.predict", lambda answer: answer is ..., "never seen."), {"wrong": [13]}, "starter Ellipsis passes")])
def test_a_poor_exercise_does_not_get_into_the_book(exercise, arguments, message):
    with pytest.raises(ExerciseError, match=rf"exercise 0\.predict: .*{message}"):
        exercise.prove(**{"solution": 12, **arguments})
