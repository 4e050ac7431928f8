"""Pool, tables and reservations: no block in two states, no token where it does not belong, no change on failure."""
import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from kvbook.control.paging import (
    BlockPool,
    BlockTable,
    BuddyAllocator,
    OutOfBlocks,
    PagedMemory,
    Resident,
    StaticReservation,
    next_power_of_two,
    simulate,
)


def state(pool, *tables):
    """All that a failed call must leave alone."""
    return copy.deepcopy((vars(pool), [(t.blocks, t.num_tokens) for t in tables]))


# The pool


def test_a_block_goes_from_free_to_referenced_to_evictable_and_back():
    pool = BlockPool(3)
    a, b = pool.allocate(2)
    assert (pool.num_free, pool.num_used, pool.num_evictable) == (1, 2, 0)
    assert {a, b} <= {1, 2, 3} and a != b and pool.refcount(a) == 1
    pool.mark_cached([a])
    pool.free([a, b])
    assert (pool.num_free, pool.num_used, pool.num_evictable) == (2, 0, 1)
    pool.share([a])
    assert (pool.num_free, pool.num_used, pool.num_evictable) == (2, 1, 0) and pool.is_cached(a)
    pool.free([a])
    pool.uncache([a])
    assert pool.num_free == 3 and not pool.is_cached(a)
    pool.check([])


def test_uncaching_a_referenced_block_leaves_it_referenced():
    pool = BlockPool(1)
    blocks = pool.allocate(1)
    pool.mark_cached(blocks)
    pool.uncache(blocks)
    assert pool.refcount(blocks[0]) == 1
    pool.free(blocks)
    assert pool.num_free == 1


def test_evictable_blocks_are_not_allocated():
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    pool.mark_cached(blocks)
    pool.free(blocks)
    with pytest.raises(OutOfBlocks, match="1 wanted, 0 free") as caught:
        pool.allocate(1)
    assert (caught.value.wanted, caught.value.free) == (1, 0) and isinstance(caught.value, RuntimeError)


@pytest.mark.parametrize(("method", "blocks", "complaint"), [
    ("free", [0], "block 0 cannot be held; accepted: 1 to 5"),
    ("free", [1, 6], "block 6"),
    ("free", [1, 1, 1], "block 1 has no reference left"),       # held twice
    ("free", [2, 2], "block 2 has no reference left"),
    ("free", [1, 4], "block 4 has no reference left"),          # free
    ("free", [1, 3], "block 3 has no reference left"),          # evictable
    ("share", [1, 0], "block 0"),
    ("share", [1, 4], "block 4 is free"),
    ("share", [3, -1], "block -1"),
    ("mark_cached", [1, 4], "block 4 is free or marked"),
    ("mark_cached", [1, 3], "block 3 is free or marked"),
    ("mark_cached", [1, 1], "block 1 is free or marked"),
    ("mark_cached", [0], "block 0"),
    ("uncache", [3, 1], "block 1 is not marked"),
    ("uncache", [3, 3], "block 3 is not marked"),
    ("uncache", [0], "block 0"),
    ("refcount", 0, "block 0"),
    ("refcount", 6, "block 6"),
    ("allocate", -1, "count=-1"),
])
def test_a_wrong_call_is_refused_before_anything_changes(method, blocks, complaint):
    pool = BlockPool(5)
    assert pool.allocate(3) == [1, 2, 3]
    pool.share([1])
    pool.mark_cached([3])
    pool.free([3])
    before = state(pool)
    with pytest.raises(ValueError, match=complaint):
        getattr(pool, method)(blocks)
    assert state(pool) == before


def test_allocate_gives_all_or_nothing():
    pool = BlockPool(4)
    pool.allocate(2)
    before = state(pool)
    with pytest.raises(OutOfBlocks, match="3 wanted, 2 free"):
        pool.allocate(3)
    assert state(pool) == before and len(pool.allocate(2)) == 2 and pool.allocate(0) == []


def test_a_pool_of_nothing_is_refused():
    with pytest.raises(ValueError, match="num_blocks=0"):
        BlockPool(0)


@pytest.mark.parametrize(("spoil", "invariant_name"), [
    (lambda pool: pool._free.append(1), "I1: block 1"),
    (lambda pool: pool._free.remove(4), "I1: block 4 is in 0"),
    (lambda pool: pool._free.append(0), "I1: block 0"),
    (lambda pool: pool._cached.discard(3), "I1: evictable"),
    (lambda pool: pool._refcounts.__setitem__(2, 2), "I2: block 2 has refcount 2, and is held 1 times"),
])
def test_check_notices(spoil, invariant_name):
    pool = BlockPool(5)
    pool.allocate(3)
    pool.mark_cached([3])
    pool.free([3])
    pool.check([1, 2])
    spoil(pool)
    with pytest.raises(AssertionError, match=invariant_name):
        pool.check([1, 2])


def test_check_notices_a_table_whose_block_is_free():
    pool = BlockPool(2)
    with pytest.raises(AssertionError, match="I4: block 2"):
        pool.check([2])


# Tables


def make_table(num_blocks=8, block_size=4, tokens=0, window=None):
    pool = BlockPool(num_blocks)
    table = BlockTable(pool, block_size, window)
    table.append(tokens)
    return pool, table


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
@given(lengths=st.lists(st.integers(0, 20), max_size=8))
@settings(max_examples=30, deadline=None)
def test_a_table_wastes_less_than_a_block_and_a_slot_is_block_times_size_plus_offset(block_size, lengths):
    _, table = make_table(200, block_size)
    for count in lengths:
        assert table.append(count) == []
        assert 0 <= len(table.blocks) * block_size - table.num_tokens < block_size
    n = sum(lengths)
    assert table.num_tokens == n
    slots = table.slots(0, n)
    assert len(set(slots)) == n
    assert all((slot // block_size, slot % block_size) == (table.blocks[p // block_size], p % block_size)
               for p, slot in enumerate(slots))
    assert table.slots(n // 2, n - n // 2) == slots[n // 2:]


def test_a_fork_shares_all_and_the_first_to_write_copies_the_tail():
    pool, a = make_table(tokens=6)
    b = a.fork()
    assert b.blocks == a.blocks and b.num_tokens == 6 and pool.num_used == 2
    old = a.blocks[1]
    copies = a.append(1)
    assert copies == [(old, a.blocks[1])] and a.blocks[1] != old and b.blocks[1] == old
    assert a.blocks[0] == b.blocks[0] and pool.refcount(old) == 1
    assert b.append(1) == [] and b.blocks[1] == old             # the last holder keeps the original
    a.free()
    assert b.free() and pool.num_free == 8
    assert b.free() == [] and b.num_tokens == 0                 # an empty table has nothing to drop twice


def test_a_full_shared_tail_needs_no_copy():
    pool, a = make_table(tokens=8)
    b = a.fork()
    assert a.append(1) == [] and a.blocks[:2] == b.blocks and pool.num_used == 3


def test_growing_and_copying_count_together():
    pool, a = make_table(num_blocks=3, tokens=6)
    b = a.fork()
    before = state(pool, a, b)
    with pytest.raises(OutOfBlocks, match="2 wanted, 1 free"):
        b.append(3)                                             # one copy, one new block
    assert state(pool, a, b) == before
    assert len(b.append(2)) == 1


def test_a_cached_block_is_copied_before_it_is_written_and_stays_evictable():
    pool, table = make_table(tokens=8)
    old = table.blocks[1]
    pool.mark_cached([old])
    assert table.prepare_write(7, 1) == [(old, table.blocks[1])]
    assert table.blocks[1] != old and pool.num_evictable == 1 and table.num_tokens == 8


def test_rewriting_copies_only_the_blocks_that_it_touches():
    pool, a = make_table(tokens=16)
    b = a.fork()
    assert [source for source, _ in b.prepare_write(5, 4)] == a.blocks[1:3]
    assert b.blocks[0] == a.blocks[0] and b.blocks[3] == a.blocks[3] and b.num_tokens == 16
    assert b.prepare_write(0, 0) == [] and b.prepare_write(16, 0) == []
    pool.check(a.blocks + b.blocks)


@pytest.mark.parametrize(("call", "complaint"), [
    (lambda t: t.append(-1), "-1 tokens"),
    (lambda t: t.prepare_write(-1, 1), "position -1"),
    (lambda t: t.prepare_write(21, 1), "position 21"),
    (lambda t: t.prepare_write(11, 1), "entry 2 was released"),
    (lambda t: t.slots(11, 2), "entry 2 was released"),
    (lambda t: t.slots(19, 2), "outside"),
    (lambda t: t.slots(-1, 1), "outside"),
    (lambda t: t.truncate(21), "num_tokens=21"),
    (lambda t: t.truncate(-1), "num_tokens=-1"),
    (lambda t: t.truncate(15), "entry 2 was released"),          # position 15 sees 11, which entry 2 held
    (lambda t: t.release_window(21), "num_accepted=21"),
    (lambda t: t.release_window(-1), "num_accepted=-1"),
    (lambda t: t.adopt([], 0), "adopted"),
    (lambda t: BlockTable(t.pool, 4).adopt([4], 5), "1 blocks for 5 tokens"),
    (lambda t: BlockTable(t.pool, 4).adopt([8], 4), "block 8 is free"),
])
def test_a_wrong_request_to_a_table_changes_nothing(call, complaint):
    pool, table = make_table(tokens=20, window=5)
    table.release_window(18)
    assert [bool(b) for b in table.blocks] == [False, False, False, True, True]
    before = state(pool, table)
    with pytest.raises(ValueError, match=complaint):
        call(table)
    assert state(pool, table) == before


@pytest.mark.parametrize(("block_size", "window"), [(0, None), (4, 0)])
def test_sizes_below_one_are_refused(block_size, window):
    with pytest.raises(ValueError, match="must be at least 1"):
        BlockTable(BlockPool(1), block_size, window)


@pytest.mark.parametrize("block_size", [1, 2, 5])
@pytest.mark.parametrize("window", [1, 2, 4, 5, 9])
def test_a_window_keeps_what_the_next_token_sees_and_no_block_more(block_size, window):
    for n in range(30):
        pool, table = make_table(40, block_size, n, window)
        dropped = table.release_window()
        needed = {p // block_size for p in range(max(0, n - window + 1), n)}
        kept = {i for i, block in enumerate(table.blocks) if block}
        extra = {n // block_size} if n % block_size else set()  # the tail that the next token is written to
        assert kept == needed | extra
        assert len(dropped) + len(kept) == len(table.blocks) and pool.num_used == len(kept)
        assert table.release_window() == []


def test_drafts_do_not_move_the_window():
    pool, table = make_table(tokens=12, window=4)
    table.append(6)                                             # drafts
    assert len(table.release_window(12)) == 2                   # position 12 sees [9, 12]
    dropped = table.truncate(12)
    assert len(dropped) == 2 and table.num_tokens == 12 and table.append(1) == []
    assert pool.num_used == 2


@pytest.mark.parametrize("kept", range(12))
def test_truncating_keeps_the_blocks_that_are_partly_full(kept):
    pool, table = make_table(tokens=11)
    blocks = list(table.blocks)
    assert table.truncate(kept) == blocks[-(-kept // 4):]
    assert table.blocks == blocks[:-(-kept // 4)] and table.num_tokens == kept
    pool.check(table.blocks)


def test_truncating_to_nothing_is_allowed_behind_a_window():
    pool, table = make_table(tokens=20, window=4)
    table.release_window()
    table.truncate(0)
    assert pool.num_free == 8 and table.blocks == []


def test_a_table_behind_a_window_can_be_forked_and_adopted():
    pool, table = make_table(tokens=20, window=4)
    table.release_window()
    twin = table.fork()
    assert twin.blocks == table.blocks and twin.window == 4
    pool.check([b for t in (table, twin) for b in t.blocks if b])
    assert not {b for b in twin.free() if b == 0} and pool.num_used == 1


# Contents: what the tables promise, seen through what is stored


class PoolAndTables(RuleBasedStateMachine):
    """Random lives of tables over a tiny pool, beside a memory of tokens that is changed only as the tables say."""

    tables = Bundle("tables")
    block_size, window, num_blocks = 3, None, 10

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(self.num_blocks)
        self.memory = {}                                        # slot → token
        self.expected = {}                                      # table → its tokens
        self.index = {}                                         # cached block → what it must keep
        self.transfers = []                                     # blocks on their way somewhere
        self.next_token = 0

    def fresh(self, count):
        self.next_token += count
        return list(range(self.next_token - count, self.next_token))

    def attempt(self, call):
        """Run a call; where memory does not suffice, see that nothing has changed."""
        before = state(self.pool, *self.expected)
        try:
            return call()
        except OutOfBlocks as error:
            assert error.wanted > error.free == self.pool.num_free
            assert state(self.pool, *self.expected) == before
            return None

    def write(self, table, first, tokens):
        copies = self.attempt(lambda: table.prepare_write(first, len(tokens)))
        if copies is None:
            return False
        for source, target in copies:
            for offset in range(self.block_size):
                self.memory[target * self.block_size + offset] = self.memory.get(source * self.block_size + offset)
        self.memory.update(zip(table.slots(first, len(tokens)), tokens, strict=True))
        self.expected[table][first:first + len(tokens)] = tokens
        return True

    def new(self, table):
        self.expected[table] = []
        return table

    few = precondition(lambda self: len(self.expected) < 5)     # so that tables grow before memory is exhausted

    @few
    @rule(target=tables, count=st.integers(0, 15))
    def begin(self, count):
        table = self.new(BlockTable(self.pool, self.block_size, self.window))
        self.write(table, 0, self.fresh(count))
        return table

    @rule(table=tables, count=st.integers(0, 8))
    def append(self, table, count):
        self.write(table, table.num_tokens, self.fresh(count))

    @rule(table=tables, data=st.data())
    def rewrite(self, table, data):
        held = [i for i, block in enumerate(table.blocks) if block]
        if held:
            first = data.draw(st.integers(held[0] * self.block_size, table.num_tokens))
            self.write(table, first, self.fresh(data.draw(st.integers(0, 5))))

    @few
    @rule(target=tables, table=tables)
    def fork(self, table):
        twin = table.fork()
        self.expected[twin] = list(self.expected[table])
        return twin

    @rule(table=tables, data=st.data())
    def truncate(self, table, data):
        kept = data.draw(st.integers(0, table.num_tokens))
        seen = range(max(0, kept - self.window + 1) if self.window else 0, kept)
        if all(table.blocks[p // self.block_size] for p in seen):
            table.truncate(kept)
            del self.expected[table][kept:]
        else:
            with pytest.raises(ValueError, match="was released"):
                table.truncate(kept)

    @rule(table=tables, data=st.data())
    def release_window(self, table, data):
        drafts = data.draw(st.integers(0, min(2, table.num_tokens)))
        accepted, before = table.num_tokens - drafts, list(table.blocks)
        dropped = table.release_window(accepted)
        passed = 0 if self.window is None else max(0, accepted - self.window + 1) // self.block_size
        assert table.blocks == [0] * passed + before[passed:] and dropped == [b for b in before[:passed] if b]

    @rule(table=consumes(tables))
    def free(self, table):
        table.free()
        assert table.blocks == [] and table.num_tokens == 0
        del self.expected[table]

    @rule(table=tables)
    def cache(self, table):
        """The index keeps full blocks, as when a request commits them."""
        for i, block in enumerate(table.blocks[:table.num_tokens // self.block_size]):
            if block and block not in self.index:
                self.pool.mark_cached([block])
                self.index[block] = self.expected[table][i * self.block_size:(i + 1) * self.block_size]

    @precondition(lambda self: self.index)
    @rule(data=st.data())
    def uncache(self, data):
        block = data.draw(st.sampled_from(sorted(self.index)))
        self.pool.uncache([block])
        del self.index[block]

    @few
    @precondition(lambda self: self.index)
    @rule(target=tables, data=st.data())
    def hit(self, data):
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.index)), unique=True, min_size=1, max_size=3))
        table = self.new(BlockTable(self.pool, self.block_size, self.window))
        table.adopt(blocks, len(blocks) * self.block_size)
        self.expected[table] = [token for block in blocks for token in self.index[block]]
        return table

    @precondition(lambda self: any(any(t.blocks) for t in self.expected))
    @rule(data=st.data())
    def begin_transfer(self, data):
        block = data.draw(st.sampled_from(sorted({b for t in self.expected for b in t.blocks if b})))
        self.pool.share([block])
        self.transfers.append(block)

    @precondition(lambda self: self.transfers)
    @rule()
    def end_transfer(self):
        self.pool.free([self.transfers.pop()])

    @rule()
    def exhaust(self):
        free = self.pool.num_free
        assert self.attempt(lambda: self.pool.allocate(free + 1)) is None
        blocks = self.pool.allocate(free)
        for block in blocks:
            for offset in range(self.block_size):
                self.memory[block * self.block_size + offset] = "garbage"
        assert self.pool.num_free == 0
        self.pool.free(blocks)

    @rule(data=st.data())
    def free_too_often(self, data):
        """Blocks listed once more than they are held, among others: refused, and so are the others."""
        held = [b for t in self.expected for b in t.blocks if b] + self.transfers
        block = data.draw(st.integers(0, self.num_blocks))
        self.refused(lambda: self.pool.free(held[:1] + [block] * (held.count(block) + 1)), block)

    @rule(data=st.data())
    def share_what_nobody_has(self, data):
        held = [b for t in self.expected for b in t.blocks if b] + self.transfers
        blocks = [b for b in range(self.num_blocks + 1) if b not in held and b not in self.index]
        block = data.draw(st.sampled_from(blocks))
        self.refused(lambda: self.pool.share([*held[:1], block]), block)

    def refused(self, call, block):
        before = state(self.pool, *self.expected)
        with pytest.raises(ValueError, match=f"block {block} " if block else "block 0 cannot be held"):
            call()
        assert state(self.pool, *self.expected) == before

    @invariant()
    def the_pool_adds_up(self):
        self.pool.check([b for t in self.expected for b in t.blocks if b] + self.transfers)       # I1 to I4

    @invariant()
    def counts_are_those_of_the_model(self):
        """As `check`, but without believing the pool's own containers."""
        held = {b for t in self.expected for b in t.blocks if b} | set(self.transfers)
        assert self.pool.num_used == len(held)
        assert self.pool.num_evictable == len(self.index.keys() - held)
        assert self.pool.num_free == self.num_blocks - len(held | self.index.keys())

    @invariant()
    def every_table_reads_its_own_tokens(self):
        size = self.block_size
        for table, tokens in self.expected.items():
            assert (table.num_tokens, table.window) == (len(tokens), self.window)
            assert len(table.blocks) == -(-len(tokens) // size)
            seen = [(p, self.memory[table.blocks[p // size] * size + p % size]) for p in range(len(tokens))
                    if table.blocks[p // size]]
            assert seen == [(p, tokens[p]) for p, _ in seen]
            unseen = len(tokens) - len(seen)
            assert unseen == 0 or (self.window and unseen <= max(0, len(tokens) - self.window + 1))

    @invariant()
    def the_index_keeps_what_it_was_given(self):
        size = self.block_size
        for block, tokens in self.index.items():
            assert [self.memory[block * size + offset] for offset in range(size)] == tokens

    def teardown(self):
        for table in self.expected:
            table.free()
        for block in self.transfers:
            self.pool.free([block])
        self.pool.check([])
        assert self.pool.num_used == 0                                                            # I5
        self.pool.uncache(list(self.index))
        assert self.pool.num_free == self.num_blocks


class PoolAndWindows(PoolAndTables):
    """The same with a window."""

    block_size, window, num_blocks = 2, 5, 14


TestPoolAndTables = PoolAndTables.TestCase
TestPoolAndWindows = PoolAndWindows.TestCase
TestPoolAndTables.settings = TestPoolAndWindows.settings = settings(max_examples=100, stateful_step_count=40,
                                                                   deadline=None)


# Reservations


@given(orders=st.lists(st.tuples(st.booleans(), st.integers(1, 70)), max_size=60))
@settings(max_examples=200, deadline=None)
def test_buddies_never_overlap_are_aligned_and_merge_back_to_one(orders):
    buddies, taken = BuddyAllocator(64), {}
    for take, number in orders:
        if take:
            before = copy.deepcopy(vars(buddies))
            try:
                start = buddies.allocate(number)
            except OutOfBlocks as error:
                assert error.wanted > error.free == buddies.largest_free and vars(buddies) == before
                aligned = range(0, 64, error.wanted)            # each place of that size is taken
                assert number > 64 or all(any(a < s + n and s < a + error.wanted for s, n in taken.items())
                                          for a in aligned)
                continue
            size = buddies.size_of(start)
            assert size == next_power_of_two(number) and start % size == 0 and start + size <= 64
            assert all(start + size <= s or s + n <= start for s, n in taken.items())
            taken[start] = size
        elif taken:
            start = sorted(taken)[number % len(taken)]
            buddies.free(start)
            del taken[start]
        assert buddies.num_free == 64 - sum(taken.values())
    for start in taken:
        buddies.free(start)
    assert buddies.largest_free == 64 and buddies.allocate(64) == 0


def test_buddies_take_the_smallest_chunk_that_fits():
    buddies = BuddyAllocator(16)
    assert [buddies.allocate(n) for n in (3, 5, 1, 1)] == [0, 8, 4, 5]      # 5 alone is free, and a pair at 6
    buddies.free(5)
    assert (buddies.largest_free, buddies.num_free) == (2, 3)
    with pytest.raises(OutOfBlocks, match="4 wanted, 2 free"):
        buddies.allocate(3)                                     # 3 slots are free, but not in one piece
    buddies.free(4)
    assert buddies.largest_free == 4


@pytest.mark.parametrize(("call", "complaint"), [
    (lambda: BuddyAllocator(12), "num_slots=12 must be a power of two"),
    (lambda: BuddyAllocator(0), "num_slots=0"),
    (lambda: BuddyAllocator(8).allocate(0), "num_slots=0"),
    (lambda: BuddyAllocator(8).free(0), "starts at 0"),
    (lambda: StaticReservation(8, "guess"), "policy='guess' is unknown; accepted: maximum, power of two, oracle"),
    (lambda: StaticReservation(8, "oracle", 4).admit(Resident(3, 2)), "5 tokens is over limit=4"),
])
def test_wrong_reservations_are_refused(call, complaint):
    with pytest.raises(ValueError, match=complaint):
        call()


def test_a_chunk_is_not_freed_twice():
    buddies = BuddyAllocator(8)
    start = buddies.allocate(2)
    buddies.free(start)
    with pytest.raises(ValueError, match="starts at 0"):
        buddies.free(start)


@pytest.mark.parametrize(("n", "power"), [(1, 1), (2, 2), (3, 4), (64, 64), (65, 128)])
def test_next_power_of_two(n, power):
    assert next_power_of_two(n) == power


@pytest.mark.parametrize(("policy", "slots"), [("maximum", 64), ("power of two", 32), ("oracle", 16)])
def test_what_each_policy_reserves(policy, slots):
    memory = StaticReservation(128, policy, limit=64)
    request = Resident(prompt=7, output=9)                      # 64; 7 + 16 = 23 → 32; 16
    request.place = memory.admit(request)
    assert memory.held(request) == slots


def test_shares_of_a_case_that_can_be_counted_by_hand():
    """Two of 6 + 2 tokens fill 32 slots in chunks of 16; a third waits through both of their steps."""
    found = simulate(StaticReservation(32, "maximum", 16), [(6, 2)] * 3)
    # steps 1 and 2: 7 and 8 tokens each, 1 and 0 still to come; the third, alone, keeps nobody waiting
    assert (found.used, found.reserved, found.internal, found.external) == pytest.approx((15 / 32, 1 / 32, 0.5, 0))
    assert (found.people, found.steps, found.restarts, found.waste) == (2, 2, 0, pytest.approx(17 / 32))


def test_pieces_too_small_are_external():
    found = simulate(StaticReservation(8, "oracle", 8), [(1, 1), (4, 4)])
    assert (found.used, found.external, found.people) == (2 / 8, 6 / 8, 1)


def test_pages_put_the_latest_out_and_lose_no_token():
    memory = PagedMemory(16, 4)
    found = simulate(memory, [(3, 8), (3, 8), (3, 1)])
    # 4 blocks: at 8 tokens each both are full, the second leaves at the first's ninth
    assert found.restarts == 1 and memory.pool.num_free == 4
    assert found.used + found.reserved + found.internal + found.external == pytest.approx(1)


@given(lengths=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=30, max_size=60),
       kind=st.sampled_from(["maximum", "power of two", "oracle", 1, 4, 16]))
@settings(max_examples=60, deadline=None)
def test_every_simulation_ends_with_an_empty_memory_and_shares_of_one(lengths, kind):
    memory = StaticReservation(64, kind, 64) if isinstance(kind, str) else PagedMemory(64, kind)
    found = simulate(memory, lengths)
    shares = (found.used, found.reserved, found.internal, found.external)
    assert sum(shares) == pytest.approx(1) and min(shares) >= -1e-12 and 0 <= found.waste < 1
    assert (memory.buddies.num_free == 64) if isinstance(kind, str) else (memory.pool.num_used == 0)
    if isinstance(kind, int):
        assert found.waste <= (kind - 1) / kind
    else:
        assert found.restarts == 0
    if kind == "maximum":
        assert found.people == 1


def test_one_size_for_all_leaves_nothing_outside():
    lengths = [(1 + i % 7, 1 + i % 5) for i in range(60)]
    assert simulate(StaticReservation(128, "maximum", 16), lengths).external == 0
    assert simulate(StaticReservation(128, "oracle", 16), lengths).external > 0


@pytest.mark.parametrize(("workload", "error"), [([(1, 1)], ValueError), ([(60, 10), (1, 1)], OutOfBlocks)])
def test_a_workload_that_fits_at_once_or_never_is_refused(workload, error):
    with pytest.raises(error):
        simulate(PagedMemory(64, 16), workload)
