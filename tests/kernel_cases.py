"""Cases that every attention kernel must pass: poisoned pages, mixed loads, trees, and the reference."""

import itertools
import os
from collections.abc import Callable, Sequence

import torch

from kvbook.compute.attention import attend
from kvbook.compute.kv_cache import LayerPages
from kvbook.compute.model import Batch
from kvbook.compute.quantization import FloatCodec, Stored, kv_codec, stored_dims
from kvbook.control.config import KV_FORMATS, LayerSpec

FORMATS = sorted(KV_FORMATS)
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
