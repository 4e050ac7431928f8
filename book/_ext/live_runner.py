"""Runs the live cells of a page as Jupyter would: in the reader's browser, and in the tests.

The build puts this file beside ``kvbook.control`` in the archive that the browser's Python imports from, so it needs
the standard library alone.
"""

import ast
import io
import linecache
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout

OUTPUT_LIMIT = 20_000
"""Characters that a cell may print in one run; an endless loop that prints must not fill the reader's page."""


class Screen(io.TextIOBase):
    """Where a cell prints: passes on whole lines, up to a limit.

    Args:
        say: takes each piece of text.
        limit: characters in all.
    """

    def __init__(self, say: Callable[[str], None], limit: int = OUTPUT_LIMIT):
        self.say, self.limit = say, limit
        self.num_left, self.pending = limit, ""

    def write(self, text: str) -> int:
        """Take some text; lines are kept back until they end or grow long."""
        self.pending += text
        if "\n" in text or len(self.pending) > 1000:
            self.flush()
        return len(text)

    def flush(self) -> None:
        """Pass on what was kept back, as far as the limit allows."""
        text, self.pending = self.pending, ""
        if not text or self.num_left < 0:
            return
        self.say(text[:self.num_left])
        self.num_left -= len(text)
        if self.num_left < 0:
            self.say(f"\n… only the first {self.limit:,} characters are shown\n")


class Cells:
    """The cells of one page: they share their names, as in one notebook."""

    def __init__(self):
        self.names = {"__name__": "__main__"}
        self.files: set[str] = set()

    def run(self, name: str, source: str, say: Callable[[str, str], None]) -> bool:
        """Run one cell.

        Args:
            name: what tracebacks call the cell.
            source: its code.
            say: takes a kind and a text: "out" for what is printed, "value" for the last expression's repr, unless
                that is None or ends in a semicolon, and "error" for a traceback.

        Returns:
            Whether it ran to its end.
        """
        self.files.add(name)
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        screen = Screen(lambda text: say("out", text))
        try:
            with redirect_stdout(screen), redirect_stderr(screen):
                value = self._evaluate(name, source)
                shown = "" if value is None else repr(value)
        except BaseException as error:  # a cell may raise SystemExit, too, and Python goes on
            screen.flush()
            say("error", self.own_traceback(error))
            return False
        screen.flush()
        if shown:
            Screen(lambda text: say("value", text)).write(f"{shown}\n")
        return True

    def _evaluate(self, name: str, source: str) -> object:
        """Execute the statements; return the value of the last one if it is an expression."""
        tree, last = ast.parse(source, name), None
        if tree.body and isinstance(tree.body[-1], ast.Expr) and not source.rstrip().endswith(";"):
            last = ast.Expression(tree.body.pop().value)
        exec(compile(tree, name, "exec"), self.names)
        return last and eval(compile(last, name, "eval"), self.names)

    def own_traceback(self, error: BaseException) -> str:
        """A traceback in Python's own form, with the lines of cells only."""
        shown = traceback.TracebackException.from_exception(error)
        todo = [shown]
        while todo:
            part = todo.pop()
            part.stack[:] = [frame for frame in part.stack if frame.filename in self.files]
            todo += filter(None, (part.__cause__, part.__context__))
        return "".join(shown.format() if shown.stack else shown.format_exception_only())
