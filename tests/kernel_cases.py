"""Cases that every attention kernel must pass: poisoned pages, mixed loads, trees, and the reference."""

import itertools
import os
from collections.abc import Callable, Sequence

import pytest
import torch

from kvbook.compute.attention import attend
from kvbook.compute.kv_cache import LayerPages
from kvbook.compute.model import Batch
from kvbook.compute.quantization import FloatCodec, Stored, kv_codec, stored_dims
from kvbook.control.config import KV_FORMATS, LayerSpec

FORMATS = sorted(KV_FORMATS)
NAN_FORMATS = ["bfloat16", "float16", "fp8_e4m3", "fp8_e5m2_token", "int8", "int8_static", "int4"]
HEADS = [(4, 4), (4, 2), (9, 3), (8, 2), (5, 1), (6, 1), (14, 2), (16, 1), (48, 1)]
HEAD_SIZES, BLOCK_SIZES = [64, 80, 96, 128, 256], [1, 8, 16, 32, 128]
WINDOWS, SOFTCAPS, KINDS = [None, 1, 5, 40], [None, 5.0], ["decode", "prefill", "mixed"]


def poisoned(codec: FloatCodec, shape: Sequence[int], dim: int) -> Stored:
    """Pages in which every byte is garbage: not a number where the format has one."""
    stored = codec.empty(shape, dim)
    stored.scales.fill_(torch.nan)
    stored.payload.fill_(torch.nan if stored.payload.is_floating_point() else
                         -128 if stored.payload.dtype == torch.int8 else 0x7F)
    return stored


def fixed_scale(name: str, num_kv: int, dim: int, seed: int) -> torch.Tensor | None:
    """A fixed scale, for formats that take one."""
    draw = torch.Generator().manual_seed(seed)
    if name == "int8_static":
        return 0.02 + 0.03 * torch.rand(num_kv, dim, generator=draw)
    return 0.5 + torch.rand(num_kv, dim, generator=draw) if name in ("fp8_e4m3", "fp8_e5m2", "int4") else None


def build(name: str, spec: LayerSpec, block_size: int, lengths: Sequence[int], seed: int = 0):
    """Poisoned pages in which the requests' rows, and only these, are written.

    Returns:
        pages, table [R, max_blocks], and (k, v) of each request, decoded.
    """
    draw = torch.Generator().manual_seed(seed)
    counts = [-(-n // block_size) for n in lengths]
    ids = (torch.randperm(sum(counts) + 3, generator=draw) + 1)[:sum(counts)].split(counts)
    table = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    dims = stored_dims(spec)
    codecs = [kv_codec(name, fixed_scale(name, spec.num_kv_heads, dim, seed + i)) for i, dim in enumerate(dims)]
    stores = [poisoned(codec, (sum(counts) + 4, spec.num_kv_heads, block_size), dim)
              for codec, dim in zip(codecs, dims, strict=True)]
    memories = []
    for r, n in enumerate(lengths):
        table[r, :counts[r]] = ids[r]
        at = torch.arange(n)
        where = table[r].long()[at // block_size], slice(None), at % block_size
        rows = [codec.encode(torch.randn(n, spec.num_kv_heads, dim, generator=draw))
                for codec, dim in zip(codecs, dims, strict=True)]
        for store, row in zip(stores, rows, strict=True):
            store.payload[where], store.scales[where] = row
        k, *v = (codec.decode(row) for codec, row in zip(codecs, rows, strict=True))
        memories.append((k, v[0] if v else k[..., :spec.value_dim]))
    second = len(stores) - 1
    return LayerPages(stores[0], stores[1] if second else None, codecs[0], codecs[second]), table, memories


def step(table: torch.Tensor, loads: Sequence[tuple[int, int]], mask: torch.Tensor | None = None) -> Batch:
    """A batch of (new rows, tokens after the step) a request; attention needs no more of it."""
    bounds = torch.tensor(list(itertools.accumulate((new for new, _ in loads), initial=0)), dtype=torch.int32)
    none = torch.empty(0, dtype=torch.int64)
    seq_lens = torch.tensor([n for _, n in loads], dtype=torch.int32)
    return Batch(none, none, bounds, seq_lens, table[None], none, none, mask)


def release_passed(pages: LayerPages, table: torch.Tensor, loads: Sequence[tuple[int, int]], window: int,
                   block_size: int) -> None:
    """Give what the window has passed to nobody: poison it, and let the table say null."""
    for r, (new, n) in enumerate(loads):
        gone = max(0, n - new - window + 1) // block_size
        blocks = table[r, :gone].long()
        for tensor in [tensor for store in pages[:2] if store is not None for tensor in store]:
            tensor[blocks] = tensor[0].clone()
        table[r, :gone] = 0


def compare(attention: Callable, name: str, spec: LayerSpec, block_size: int, loads: Sequence[tuple[int, int]],
            trees: Sequence[Sequence[int]] | None = None, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
    """Assert that a kernel says what the reference says.

    Args:
        attention: as `kvbook.compute.kv_cache.gathered_attention`.
        loads: (new rows, tokens after the step) of each request.
        trees: masks of each request's new rows.
    """
    pages, table, memories = build(name, spec, block_size, [n for _, n in loads], seed)
    mask = None if trees is None else torch.cat([torch.tensor(m) for m in trees])
    batch = step(table, loads, mask)
    bounds = batch.query_bounds
    draw = torch.Generator().manual_seed(seed + 99)
    q = torch.randn(bounds[-1], spec.num_heads, spec.head_dim, generator=draw).to(dtype)
    if spec.window:
        release_passed(pages, table, loads, spec.window, block_size)
    got = attention(q, pages, batch, table, spec)
    want = torch.cat([attend(q[a:b], k, v, spec, None if mask is None else mask[a:b])
                      for (a, b), (k, v) in zip(itertools.pairwise(bounds), memories, strict=True)])
    assert got.dtype == dtype and got.shape == want.shape
    exact = dtype == torch.float32
    torch.testing.assert_close(got.float(), want.float(), rtol=1e-5 if exact else 1e-2,
                               atol=(3e-6 if exact else 1e-2) * max(1.0, float(want.float().abs().max())))


def loads_of(kind: str, block_size: int) -> list[tuple[int, int]]:
    """Requests of the lengths around a page's edges, all in one batch."""
    lengths = [1, max(1, block_size - 1), block_size, block_size + 1, 2 * block_size + 3]
    if kind == "decode":
        return [(1, n) for n in lengths]
    if kind == "prefill":
        return [(n, n) for n in lengths]
    new = [1, lengths[1], 1, min(7, lengths[3]), 3]
    return list(zip(new, lengths, strict=True))


def tree(parents: Sequence[int]) -> list[int]:
    """Masks of a tree of guesses: ``parents[i]`` is a row before i, or -1."""
    masks = []
    for i, parent in enumerate(parents):
        masks.append((masks[parent] if parent >= 0 else 0) | 1 << i)
    return [mask - (1 << 64) if mask >= 1 << 63 else mask for mask in masks]


def pairwise(*factors: Sequence) -> list[tuple]:
    """Few cases in which every pair of levels of any two factors occurs; all cases where the tests are run in full."""
    if os.environ.get("KVBOOK_TEST") == "all":
        return list(itertools.product(*factors))
    pairs = {(i, a, j, b) for i, j in itertools.combinations(range(len(factors)), 2)
             for a in range(len(factors[i])) for b in range(len(factors[j]))}
    draw, cases = torch.Generator().manual_seed(0), []
    while pairs:
        i, a, j, b = min(pairs)
        best = None
        for _ in range(30):
            case = [int(torch.randint(len(factor), (), generator=draw)) for factor in factors]
            case[i], case[j] = a, b
            found = {(x, case[x], y, case[y]) for x, y in itertools.combinations(range(len(factors)), 2)} & pairs
            if best is None or len(found) > len(best[1]):
                best = case, found
        pairs -= best[1]
        cases.append(tuple(factor[c] for factor, c in zip(factors, best[0], strict=True)))
    return cases


HARD = torch.tensor([0.0, -0.0, 1e-8, -1e-8, 6e-8, 1e-7, 2.0 ** -9, 2.0 ** -10, 1.5 * 2.0 ** -10, 2.0 ** -16,
                     3 * 2.0 ** -18, 0.0625, 1.0, 1.0625, 1.1875, -1.1875, 2.5, 3.5, 0.5, 447.9, 448.0, 464.0, 465.0,
                     57344.0, 61440.0, 65504.0, 65520.0, 1e6, -1e30, 3.4e38, -3.4e38, 1e-39])


def hard_vectors(num_kv, dim):
    """Ordinary, tiny, huge, awkward, equal, broken: [T, num_kv, dim]."""
    draw = torch.Generator().manual_seed(1)
    awkward = HARD.repeat(-(-dim // 32))[torch.stack([torch.randperm(dim, generator=draw) for _ in range(20 * num_kv)])]
    odd = torch.randn(3, num_kv, dim, generator=draw)
    odd[0, :, 5], odd[1, :, 40], odd[2, :, 63] = torch.inf, torch.nan, -torch.inf
    return torch.cat([torch.randn(40, num_kv, dim, generator=draw) * 3,
                      torch.randn(40, num_kv, dim, generator=draw) * torch.logspace(-12, 12, 40)[:, None, None],
                      awkward.view(20, num_kv, dim), torch.zeros(1, num_kv, dim), -torch.zeros(1, num_kv, dim),
                      torch.full((1, num_kv, dim), 5.0), torch.full((1, num_kv, dim), torch.nan),
                      torch.arange(num_kv * dim).view(1, num_kv, dim).float() / 2, odd])


def same_bytes(mine, its):
    """Equal bytes, except that which of the many NaNs it is is nobody's business."""
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32}[mine.element_size()]
    same = mine.view(bits) == its.view(bits)
    return bool((same | mine.isnan() & its.isnan() if mine.dtype.is_floating_point else same).all())


def assert_a_broken_row_stays_alone(attention: Callable, name: str) -> None:
    """A value that is not a number makes its own request's output so, and no other's."""
    spec = LayerSpec(4, 1, 64, 64, 0.125)
    pages, table, _ = build(name, spec, 16, [40, 40])
    bad = pages.value_codec.encode(torch.full((1, 64), torch.nan))
    pages.values.payload[table[0, 1], :, 3], pages.values.scales[table[0, 1], :, 3] = bad
    out = attention(torch.randn(2, 4, 64), pages, step(table, [(1, 40), (1, 40)]), table, spec)
    assert out[0].isnan().all() and out[1].isfinite().all()


def assert_offsets_have_64_bits(attention: Callable, write: Callable, copy: Callable) -> None:
    """Pages whose bytes lie behind 2**31 are written, copied and read like others; most of the pool is untouched."""
    spec, codec, block_size = LayerSpec(4, 1, 64, 64, 0.125), kv_codec("int8"), 16
    num_pages = 2**31 // (block_size * 64) + 8
    stores = [Stored(torch.empty(num_pages, 1, block_size, 64, dtype=torch.int8),
                     torch.empty(num_pages, 1, block_size, 1, dtype=torch.float16)) for _ in range(2)]
    far = LayerPages(*stores, codec, codec)
    near = LayerPages(*(codec.empty((8, 1, block_size), 64) for _ in "kv"), codec, codec)
    rows, q, out = torch.randn(2, 40, 1, 64), torch.randn(1, 4, 64), []
    for pages, last in ((far, num_pages - 1), (near, 7)):
        table = torch.tensor([[last, last - 2, last - 1]], dtype=torch.int32)
        at = torch.arange(40)
        write(pages, *rows, table[0].long()[at // block_size] * block_size + at % block_size)
        out.append(attention(q, pages, step(table, [(1, 40)]), table, spec))
        copy([t for store in pages[:2] for t in store], [(last, last - 4)])
        table[0, 0] = last - 4
        out.append(attention(q, pages, step(table, [(1, 40)]), table, spec))
    assert all(torch.equal(out[0], other) for other in out[1:])
    assert (num_pages - 1) * block_size * 64 >= 2**31


def assert_contradictions_are_refused(attention: Callable, write: Callable) -> None:
    """Arguments that do not fit each other: each is refused in words, and nothing is written."""
    spec = LayerSpec(3, 1, 64, 64, 0.125)
    pages, table, _ = build("bfloat16", spec, 16, [70])
    with pytest.raises(ValueError, match="float64"):
        attention(torch.randn(1, 3, 64).double(), pages, step(table, [(1, 70)]), table, spec)
    with pytest.raises(ValueError, match="65"):
        attention(torch.randn(65, 3, 64), pages, step(table, [(65, 70)], torch.ones(65).long()), table, spec)
    one, two = step(table, [(1, 70)]), torch.randn(2, 3, 64)
    holes = pages._replace(keys=Stored(*(torch.cat([t, t], -1)[..., :t.shape[-1]] for t in pages.keys)))
    masked = lambda *masks: step(table, [(2, 70)], torch.tensor(masks))
    other_values = pages._replace(value_codec=kv_codec("int8"))
    in_key = LayerSpec(3, 1, 64, 64, 0.125, value_in_key=True)
    for q, its_pages, batch, its_spec, message in (
            (torch.randn(1, 3, 32), pages, one, LayerSpec(3, 1, 32, 32, 0.1), "do not hold 1 heads of 32"),
            (torch.randn(1, 2, 64), pages, one, LayerSpec(2, 2, 64, 64, 0.1), "do not hold 2 heads"),
            (two[:1], pages, one, LayerSpec(3, 1, 64, 32, 0.1), "pages.values"),
            (two[:1], pages, one, in_key, "pages.values: there"),
            (two[:1], pages._replace(values=None), one, spec, "pages.values: missing"),
            (two[:1], other_values, one, spec, "keys in bfloat16, values in int8"),
            (two[:1], holes, one, spec, "pages.keys: not contiguous"),
            (two, pages, one, spec, "q of 2 rows"), (two[:0], pages, one, spec, "q of 0 rows"),
            (two[:1], pages, step(table, [(1, 0)]), spec, "at least the new rows"),
            (two[:1], pages, step(table, [(1, 81)]), spec, "at most the 80 tokens"),
            (two, pages, step(table, [(1, 70), (1, 70)]), spec, r"table: .* \(1, 5\); accepted: .* \(2, 5\)"),
            (two, pages, masked(1, 1), spec, "see itself"), (two, pages, masked(3, 2), spec, "sees a later one"),
            (two, pages, masked(1), spec, "one a row"), (two, pages, masked(1.0, 3.0), spec, "int64")):
        with pytest.raises(ValueError, match=message):
            attention(q, its_pages, batch, table, its_spec)
    for other, message in ((table[0], "table: "), (table.float(), "table: "), (table - 9, "pages from"),
                           (table + 9, "pages from")):
        with pytest.raises(ValueError, match=message):
            attention(two[:1], pages, one, other, spec)
    padded = torch.cat([table, torch.tensor([[-1, 10**6]], dtype=torch.int32)], 1)           # nobody looks there
    assert torch.equal(attention(two[:1], pages, one, padded, spec), attention(two[:1], pages, one, table, spec))
    row, slot, before = torch.randn(1, 1, 64), torch.tensor([16]), [t.clone() for store in pages[:2] for t in store]
    for k, v, slots, message in ((row, row, torch.tensor([16, 17]), r"slots \(2,\)"), (row, None, slot, "v: missing"),
                                 (row, torch.randn(2, 1, 64), slot, "v: "), (torch.randn(1, 1, 65), row, slot, "65"),
                                 (row, torch.randn(1, 2, 64), slot, "v: "), (row[0], row, slot, "k: "),
                                 (row, row, slot.float(), "slots: torch.float32")):
        with pytest.raises(ValueError, match=message):
            write(pages, k, v, slots)
    assert all(same_bytes(*pair) for pair in zip(before, [t for store in pages[:2] for t in store], strict=True))
