"""The fake model: pages give exactly the cold tokens, and every planted fault of paging is heard."""
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbook.control.fake import (
    FakeExecutor,
    FakeKV,
    PagedText,
    Step,
    StepRows,
    cold_next,
    cold_tokens,
    digest,
    first_visible,
    run_step,
)
from kvbook.control.paging import BlockPool, OutOfBlocks

VOCAB = 50_000            # large: two different hashes hardly ever say the same


def make(num_blocks=40, block_size=4, windows=(None,), vocab_size=VOCAB):
    executor = FakeExecutor(vocab_size, windows)
    executor.allocate(num_blocks, block_size)
    new_text = lambda name, prompt, pool: PagedText(name, prompt, pool, block_size, windows)
    return executor, BlockPool(num_blocks), new_text


# The hash and the memory


def test_the_hash_is_the_same_everywhere_and_order_counts():
    assert digest([1, 2, 3]) == 0xB4FB5A8DE61ABA77
    assert len({digest([1, 2]), digest([2, 1]), digest([1]), digest([1, 2, 0]), digest([])}) == 5
    assert 0 <= digest([2**64 - 1]) < 2**64


def test_memory_holds_what_was_written_and_garbage_elsewhere():
    kv = FakeKV(3, 2)
    assert len(set(kv.rows)) == len(kv.rows) == 8
    garbage = list(kv.rows)
    kv.write([6, -1, 3], [60, 61, 30])
    assert kv.read([3, 1], range(4)) == [60, garbage[7], garbage[2], 30]
    kv.copy_blocks([(3, 2), (2, 1)])                            # in order: the second carries on what the first brought
    assert kv.read([1], [0, 1]) == [60, garbage[7]]
    assert kv.read([0], [0]) == [garbage[0]]


@pytest.mark.parametrize(("call", "complaint"), [
    (lambda kv: kv.write([4, 1], [0, 0]), "slot 1 cannot be written; accepted: -1, or 2 to 7"),
    (lambda kv: kv.write([4, 8], [0, 0]), "slot 8"),
    (lambda kv: kv.write([4, -2], [0, 0]), "slot -2"),
    (lambda kv: kv.copy_blocks([(0, 1)]), "block 0 cannot be copied; accepted: 1 to 3"),
    (lambda kv: kv.copy_blocks([(1, 4)]), "block 4"),
])
def test_pages_that_no_table_may_use_are_refused(call, complaint):
    kv = FakeKV(3, 2)
    before = list(kv.rows)
    with pytest.raises(ValueError, match=complaint):
        call(kv)
    assert kv.rows == before


@pytest.mark.parametrize(("position", "window", "first"), [(5, None, 0), (5, 1, 5), (5, 3, 3), (1, 3, 0), (2, 3, 0)])
def test_a_window_counts_the_token_itself(position, window, first):
    assert first_visible(position, window) == first


# The executor


def test_it_says_what_the_definition_says():
    executor, _, _ = make(block_size=2)
    a = digest([0, 7, 0])
    b = digest([0, 8, 1, a])
    rows = StepRows("x", 0, [7, 8], [[3]])
    assert executor.execute(Step([rows])).sampled == {"x": [digest([a, b]) % VOCAB]}
    assert executor.kv.read([3], [0, 1]) == [a, b]
    assert cold_next([7, 8], VOCAB) == digest([a, b]) % VOCAB


def test_a_window_limits_what_a_row_and_the_next_token_see():
    rows = [digest([0, 5, 0])]
    for position, token in ((1, 6), (2, 7), (3, 8)):
        rows.append(digest([0, token, position, rows[-1]]))
    assert cold_next([5, 6, 7, 8], VOCAB, (2,)) == digest(rows[-2:]) % VOCAB
    assert cold_next([5, 6], VOCAB, (1,)) == digest([digest([0, 6, 1])]) % VOCAB


def test_rows_that_are_not_wanted_say_nothing_and_a_script_is_followed_to_its_end():
    executor = FakeExecutor(VOCAB, script={"x": [11, 12]})
    executor.allocate(4, 4)
    said, tokens = [], [1]
    assert executor.execute(Step([StepRows("x", 0, [1], [[1]], wanted=False)])).sampled == {}
    for _ in range(3):
        [token] = executor.execute(Step([StepRows("x", len(tokens) - 1, tokens[-1:], [[1]])])).sampled["x"]
        said.append(token)
        tokens.append(token)
    assert said == [11, 12, cold_next([1, 11, 12], VOCAB)]


@pytest.mark.parametrize(("call", "error", "complaint"), [
    (lambda: FakeExecutor(0), ValueError, "vocab_size=0"),
    (lambda: FakeExecutor(5).execute(Step([])), RuntimeError, "no memory yet"),
    (lambda: make()[0].execute(Step([StepRows("x", 0, [1], [[1], [2]])])), ValueError, "x: 2 tables; accepted: 1"),
    (lambda: PagedText("x", [], BlockPool(1), 4), ValueError, "prompt is empty"),
])
def test_wrong_calls_are_refused(call, error, complaint):
    with pytest.raises(error, match=complaint):
        call()


# Pages against the cold twin


@pytest.mark.parametrize("windows", [(None,), (3,), (1,), (None, 5), (4, None, 4)])
@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("chunk", [1, 2, 100])
def test_pages_say_the_cold_tokens(windows, block_size, chunk):
    executor, pool, text = make(150, block_size, windows)
    prompts = ([1, 2, 3, 4, 5], [1, 2], [9] * 11)
    texts = [text(str(i), prompt, pool) for i, prompt in enumerate(prompts)]
    while any(len(t.token_ids) < len(p) + 9 for t, p in zip(texts, prompts, strict=True)):
        run_step(executor, texts, chunk)
    for t, prompt in zip(texts, prompts, strict=True):
        assert t.token_ids[len(prompt):][:9] == cold_tokens(prompt, 9, VOCAB, windows)
        t.free()
    assert pool.num_free == 150


def test_all_groups_get_their_blocks_or_none():
    _, pool, text = make(3, 4, (None, 3))
    a = text("a", [1] * 5, pool)
    before = (list(pool._free), [list(t.blocks) for t in a.tables])
    with pytest.raises(OutOfBlocks, match="4 wanted, 3 free"):
        a.plan(5)
    assert (list(pool._free), [list(t.blocks) for t in a.tables]) == before


class Desk:
    """Texts over one tiny pool, each step of which is held against the cold twin."""

    def __init__(self, block_size, windows, num_blocks=30, executor=None):
        self.windows, self.texts, self.forks = windows, [], 0
        self.executor, self.pool, self.new_text = make(num_blocks, block_size, windows)
        if executor:
            self.executor.__class__ = executor

    def begin(self, length, seed):
        self.texts.append(self.new_text(f"t{len(self.texts)}{self.forks}{seed}",
                                        [digest([seed, i]) % VOCAB for i in range(length)], self.pool))

    def step(self, chosen, chunk):
        texts = [t for i, t in enumerate(self.texts) if i in chosen] or self.texts[:1]
        needed = sum(table.blocks_needed(t.num_computed, min(chunk, len(t.token_ids) - t.num_computed))
                     for t in texts for table in t.tables)
        if needed > self.pool.num_free:
            self.free(0)
            return
        lengths = [len(t.token_ids) for t in texts]
        run_step(self.executor, texts, chunk)
        for text, length in zip(texts, lengths, strict=True):
            if len(text.token_ids) > length:
                assert text.token_ids[-1] == cold_next(text.token_ids[:-1], VOCAB, self.windows), text.request_id

    def fork(self, which, token):
        """The twin says something else next, so that it must not write where its parent does."""
        parent = self.texts[which % len(self.texts)]
        twin = parent.fork(f"f{self.forks}")
        self.forks += 1
        if twin.num_computed < len(twin.token_ids):
            twin.token_ids[-1] = token
        self.texts.append(twin)

    def draft(self, which, drafts):
        """Guesses are written behind the text and taken back, all of them wrong."""
        text = self.texts[which % len(self.texts)]
        end = len(text.token_ids)
        text.token_ids += drafts
        try:
            rows, copies = text.plan(2**30)
        except OutOfBlocks:
            del text.token_ids[end:]
            return
        self.executor.execute(Step([rows], copies))
        del text.token_ids[end:]
        text.num_computed = end - 1
        for table in text.tables:
            table.release_window(end - 1)       # by what stays, not by the guesses
            table.truncate(end - 1)             # the last token itself is computed again, with what it says next

    def free(self, which):
        if self.texts:
            self.texts.pop(which % len(self.texts)).free()

    def check(self):
        self.pool.check([b for t in self.texts for table in t.tables for b in table.blocks if b])


OPERATIONS = st.one_of(
    st.tuples(st.just("begin"), st.integers(1, 9), st.integers(0, 3)),
    st.tuples(st.just("step"), st.sets(st.integers(0, 5)), st.integers(1, 9)),
    st.tuples(st.just("step"), st.just(set(range(9))), st.just(100)),
    st.tuples(st.just("fork"), st.integers(0, 5), st.integers(0, VOCAB - 1)),
    st.tuples(st.just("draft"), st.integers(0, 5), st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5)),
    st.tuples(st.just("free"), st.integers(0, 5)),
)


@given(operations=st.lists(OPERATIONS, min_size=5, max_size=40), block_size=st.sampled_from([1, 2, 3, 5]),
       windows=st.sampled_from([(None,), (3,), (None, 4)]))
@settings(max_examples=150, deadline=None)
def test_random_lives_say_the_cold_tokens(operations, block_size, windows):
    desk = Desk(block_size, windows, num_blocks=24)
    for name, *arguments in operations:
        if name in ("begin", "free") or desk.texts:
            getattr(desk, name)(*arguments)
        desk.check()
    while desk.texts:
        desk.free(0)
    assert desk.pool.num_free == 24


# Planted faults: each must be heard


class SkipsCopies(FakeExecutor):
    def execute(self, step):
        return super().execute(Step(step.rows))


class CopiesLate(FakeExecutor):
    """Rows first, then copies."""

    def execute(self, step):
        result = super().execute(Step(step.rows))
        self.kv.copy_blocks(step.copies)
        return result


class CopiesBackwards(FakeExecutor):
    def execute(self, step):
        return super().execute(Step(step.rows, step.copies[::-1]))


class CopiesAtOnce(FakeExecutor):
    """All sources are read before any destination is written: wrong for chains."""

    def execute(self, step):
        kv, size = self.kv, self.kv.block_size
        pages = [kv.rows[source * size:(source + 1) * size] for source, _ in step.copies]
        for (_, target), page in zip(step.copies, pages, strict=True):
            kv.rows[target * size:(target + 1) * size] = page
        return super().execute(Step(step.rows))


class CopiesOneRowLess(FakeExecutor):
    def execute(self, step):
        size = self.kv.block_size
        kept = [self.kv.rows[target * size] for _, target in step.copies]
        self.kv.copy_blocks(step.copies)
        for (_, target), row in zip(step.copies, kept, strict=True):
            self.kv.rows[target * size] = row
        return super().execute(Step(step.rows))


class WritesOneSlotOn(FakeExecutor):
    def execute(self, step):
        write = self.kv.write
        self.kv.write = lambda slots, rows: write([s // 4 * 4 + (s + 1) % 4 for s in slots], rows)
        return super().execute(step)


def changed_tables(step, change):
    """The step with other pages for what was written before it."""
    old = lambda r, t: [*change(list(t[:r.first // 4])), *t[r.first // 4:]]
    return Step([StepRows(r.request_id, r.first, r.token_ids, [old(r, t) for t in r.tables], r.wanted)
                 for r in step.rows], step.copies)


class SwapsEntries(FakeExecutor):
    """The first two pages of a table change places after they were written."""

    def execute(self, step):
        swap = lambda t: [t[1], t[0], *t[2:]] if len(t) > 1 else t
        return super().execute(changed_tables(step, swap))


class ReadsAForeignPage(FakeExecutor):
    def execute(self, step):
        foreign = lambda t: [t[0] % self.kv.num_blocks + 1, *t[1:]] if t else t
        return super().execute(changed_tables(step, foreign))


class ReleasesEarly(FakeExecutor):
    """The oldest page of a table that is still there is null already."""

    def execute(self, step):
        def early(table):
            first = next((i for i, block in enumerate(table) if block), None)
            return [0 if i == first else block for i, block in enumerate(table)]
        return super().execute(changed_tables(step, early))


class SeesOneMore(FakeExecutor):
    """A window that does not count the token itself."""

    def execute(self, step):
        self.windows = tuple(None if w is None else w + 1 for w in (None, 6))
        return super().execute(step)


class KeepsStalePages(FakeExecutor):
    """Every third write is lost: the slot keeps what somebody left there."""

    def execute(self, step):
        write, calls = FakeKV.write, []
        def lossy(slots, rows):
            calls.append(slots)
            if len(calls) % 3:
                write(self.kv, slots, rows)
        self.kv.write = lossy
        return super().execute(step)


def eventful_life(executor=None):
    """Prompts in chunks, forks at every offset of a page (two in a row, too), windows that pass, drafts, reuse."""
    desk = Desk(4, (None, 6), num_blocks=60, executor=executor)
    desk.begin(7, seed=1)
    desk.begin(10, seed=2)
    everybody = set(range(9))
    desk.step(everybody, 5)
    desk.step(everybody, 5)
    for i in range(5):
        desk.step(everybody, 100)
        desk.fork(0, token=100 + i)             # the twin …
        desk.fork(len(desk.texts) - 1, token=200 + i)        # … and the twin's twin write in the same step
        desk.step(everybody, 100)
        desk.draft(1, [7, 7, 7])
        desk.step(everybody, 100)
        desk.free(2)
        desk.free(2)
        desk.begin(5, seed=3 + i)
        desk.step(everybody, 100)
        desk.free(2)
        desk.check()
    # a chain of copies in one step: c's tail is copied from b's, which is copied from a's
    a = desk.texts[0]
    while a.num_computed % 4 != 2:
        desk.step({0}, 100)
    b = a.fork("b")
    b.token_ids[-1] = 300
    rows_b, copies_b = b.plan(1)
    c = b.fork("c")
    c.token_ids[-1], c.num_computed = 301, b.num_computed
    copies_c = [pair for table in c.tables for pair in table.prepare_write(c.num_computed, 1)]
    rows_c = StepRows("c", c.num_computed, [301], [tuple(t.blocks) for t in c.tables])
    assert {target for _, target in copies_b} & {source for source, _ in copies_c}
    said = desk.executor.execute(Step([rows_b, rows_c], copies_b + copies_c)).sampled
    assert said["b"] == [cold_next(b.token_ids, VOCAB, (None, 6))]
    assert said["c"] == [cold_next(c.token_ids, VOCAB, (None, 6))]


def test_an_eventful_life_without_a_fault():
    eventful_life()


@pytest.mark.parametrize("fault", [SkipsCopies, CopiesLate, CopiesBackwards, CopiesAtOnce, CopiesOneRowLess,
                                   WritesOneSlotOn, SwapsEntries, ReadsAForeignPage, ReleasesEarly, SeesOneMore,
                                   KeepsStalePages])
def test_a_fault_of_the_executor_is_heard(fault):
    with pytest.raises(AssertionError):
        eventful_life(fault)
