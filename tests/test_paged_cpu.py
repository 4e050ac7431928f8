"""The Numba kernels against the reference over gathered, decoded rows, and against the codecs' bytes."""

import os
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from kernel_cases import (
    BLOCK_SIZES,
    FORMATS,
    HEAD_SIZES,
    HEADS,
    KINDS,
    NAN_FORMATS,
    SOFTCAPS,
    WINDOWS,
    assert_a_broken_row_stays_alone,
    assert_contradictions_are_refused,
    assert_offsets_have_64_bits,
    build,
    compare,
    fixed_scale,
    hard_vectors,
    loads_of,
    pairwise,
    poisoned,
    same_bytes,
    step,
    tree,
)

from kvbook.compute.kv_cache import GATHER, LayerPages, kernels_for, write
from kvbook.compute.quantization import Stored, kv_codec
from kvbook.control.config import LayerSpec
from kvbook.kernels.paged_cpu import LOG2E, _cap, _plan, paged_attention, paged_write

pytestmark = pytest.mark.xdist_group("numba")        # each variant is compiled once, by one worker
ALL = os.environ.get("KVBOOK_TEST") == "all"
GRID = pairwise(FORMATS, HEADS, HEAD_SIZES, BLOCK_SIZES, WINDOWS, SOFTCAPS, KINDS)


@pytest.mark.parametrize(("name", "heads", "head_dim", "block_size", "window", "softcap", "kind"), GRID)
def test_grid(name, heads, head_dim, block_size, window, softcap, kind):
    if name == "int4" and head_dim % 32:
        head_dim = 96
    if not ALL and name != "bfloat16":                    # each format and small group is compiled: here few of them
        heads = {(4, 4): (8, 2), (4, 2): (16, 1), (9, 3): (6, 1)}.get(heads, heads)
    compare(paged_attention, name, LayerSpec(*heads, head_dim, head_dim, head_dim ** -0.5, window, softcap), block_size,
            loads_of(kind, block_size))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", ["decode", "mixed"])
def test_absorbed_latent(name, kind):
    spec = LayerSpec(16, 1, 576, 512, 192 ** -0.5, value_in_key=True)
    compare(paged_attention, name, spec, 16, loads_of(kind, 16))


@pytest.mark.parametrize("name", ["bfloat16", "int4"])
@pytest.mark.parametrize("sizes", [(96, 64), (64, 96), (64, 128), (128, 64)])
@pytest.mark.parametrize("kind", ["decode", "mixed"])
def test_values_of_another_size(name, sizes, kind):
    compare(paged_attention, name, LayerSpec(4, 1, *sizes, 0.1), 8, loads_of(kind, 8))


@pytest.mark.parametrize("sizes", [(128, 64), (128, 128), (576, 512)])
def test_latent_vectors_read_by_few_heads(sizes):
    """Four bits lie in halves of the whole vector, whatever part of it is the value."""
    compare(paged_attention, "int4", LayerSpec(4, 1, *sizes, 0.07, value_in_key=True), 16, loads_of("decode", 16))


@pytest.mark.parametrize("name", ["bfloat16", "int8", "int4"])
@pytest.mark.parametrize("heads", [(9, 3), (8, 2)])
@pytest.mark.parametrize("n", [1023, 1024, 1025, 2100])
def test_parts_of_a_long_memory(name, heads, n):
    if not ALL and name == "int4":
        heads = (8, 2)
    compare(paged_attention, name, LayerSpec(*heads, 64, 64, 0.125), 16, [(1, n), (1, 3), (5, n), (1, n // 2)])


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int8", "int4", "fp8_e4m3"])
@pytest.mark.parametrize("window", [None, 3, 20])
@pytest.mark.parametrize("heads", [(9, 3), (7, 1)])
def test_trees(name, window, heads):
    wide, deep = tree([-1, 0, 0, 1, 1, 2, 2, 6]), tree([-1, *range(63)])
    if not ALL and name in ("fp8_e4m3", "int4"):
        heads = (7, 1)
    compare(paged_attention, name, LayerSpec(*heads, 64, 64, 0.125, window), 8,
            [(8, 30), (1, 17), (64, 600), (4, 4), (3, 9)], [wide, [-1], deep, tree([-1, -1, 0, 1]), [-1, -1, -1]])


@pytest.mark.parametrize("window", [None, 100])
def test_long_chunks(window):
    compare(paged_attention, "bfloat16", LayerSpec(9, 3, 64, 64, 0.125, window), 16, [(300, 700), (1, 900), (90, 90)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_queries(dtype):
    compare(paged_attention, "bfloat16", LayerSpec(9, 3, 64, 64, 0.125), 16, [(1, 40), (5, 33)], dtype=dtype)


def test_batch_mates_and_threads_change_no_bit():
    spec, lengths = LayerSpec(9, 3, 64, 64, 0.125), [1500, 40, 700]
    pages, table, _ = build("bfloat16", spec, 16, lengths)
    q, threads = torch.randn(3, 9, 64), torch.get_num_threads()
    whole = paged_attention(q, pages, step(table, [(1, n) for n in lengths]), table, spec)
    for r, n in enumerate(lengths):
        mine = table[r:r + 1]
        assert torch.equal(paged_attention(q[r:r + 1], pages, step(mine, [(1, n)]), mine, spec)[0], whole[r])
    try:
        for torch_threads in (1, 2):
            torch.set_num_threads(torch_threads)
            assert torch.equal(paged_attention(q, pages, step(table, [(1, n) for n in lengths]), table, spec), whole)
    finally:
        torch.set_num_threads(threads)


def test_one_long_request_is_shared_out():
    """One 32k request beside 63 short ones: no thread gets more than its share and one part."""
    bounds, lengths = torch.arange(65).int(), torch.tensor([32_768] + [50] * 63).int()
    empty = torch.empty(0, dtype=torch.int64).numpy()
    _, _, parts, begins, _ = _plan(bounds.numpy(), lengths.numpy(), empty, 1 << 40, 3, 3, 8)
    keys = [int(sum(parts[begins[w]:begins[w + 1], 2] - parts[begins[w]:begins[w + 1], 1])) for w in range(8)]
    assert sum(keys) == 3 * int(lengths.sum())
    assert max(keys) <= sum(keys) / 8 + 1024


@pytest.mark.parametrize("name", NAN_FORMATS)
def test_a_broken_row_breaks_its_request_only(name):
    assert_a_broken_row_stays_alone(paged_attention, name)


def test_refusals():
    spec = LayerSpec(3, 1, 64, 64, 0.125)
    pages, table, _ = build("bfloat16", spec, 16, [70])
    one, two = step(table, [(1, 70)]), step(table, [(2, 70)], torch.tensor([1, 1]))
    for q, batch, message in ((torch.randn(1, 3, 32), one, "shape"), (torch.randn(2, 3, 64), two, "itself")):
        with pytest.raises(ValueError, match=message):
            paged_attention(q, pages, batch, table, spec)
    assert_contradictions_are_refused(paged_attention, paged_write)


def test_a_refused_write_changes_nothing():
    pages, _, _ = build("bfloat16", LayerSpec(3, 1, 64, 64, 0.125), 16, [70])
    before = [t.clone() for store in pages[:2] for t in store]
    row, slot = torch.randn(1, 1, 64), torch.tensor([16])
    beyond = torch.tensor([pages.keys.payload.shape[0] * 16])
    for k, v, slots, message in ((row.double(), row, slot, "float64"), (row, row.double(), slot, "float64"),
                                 (row, row, beyond, "below")):
        with pytest.raises(ValueError, match=message):
            paged_write(pages, k, v, slots)
    assert all(same_bytes(*pair) for pair in zip(before, [t for store in pages[:2] for t in store], strict=True))


@pytest.mark.parametrize("softcap", [1.0, 50.0, 5e4])
def test_soft_caps_are_as_exact_near_zero_as_far_away(softcap):
    x = torch.cat([torch.logspace(-6, 1.5, 400), -torch.logspace(-6, 1.5, 400)]) * softcap
    mine = x.numpy().copy()
    _cap(mine, len(mine), np.float32(softcap))
    want = softcap * torch.tanh(x.double() / softcap) * LOG2E
    torch.testing.assert_close(torch.from_numpy(mine).double(), want, rtol=1e-6, atol=0)


def test_what_the_kernels_lack_is_gathered():
    assert kernels_for(torch.float32).name == kernels_for(torch.bfloat16).name == "numba"
    assert kernels_for(torch.float64) is GATHER
    assert kernels_for(torch.float32, "cuda").name == ("triton" if find_spec("triton") else "gather")
    assert kernels_for(torch.float64, "cuda") is GATHER


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("scaled", [False, True])
def test_write_stores_the_bytes_of_encode(name, dtype, scaled):
    num_kv, dim, block_size = 3, 64, 16
    k = hard_vectors(num_kv, dim).to(dtype)
    codecs = [kv_codec(name, fixed_scale(name, num_kv, dim, i) if scaled else 0.05 if name == "int8_static" else None)
              for i in range(2)]
    num_blocks = -(-len(k) // block_size) + 2
    stores = [poisoned(codec, (num_blocks + 1, num_kv, block_size), dim) for codec in codecs]
    twin = LayerPages(*(Stored(*(t.clone() for t in store)) for store in stores), *codecs)
    slots = torch.randperm(num_blocks * block_size, generator=torch.Generator().manual_seed(2))[:len(k)] + block_size
    slots[::7] = -1
    paged_write(LayerPages(*stores, *codecs), k, k.flip(0), slots)
    write(twin, k, k.flip(0), slots)
    for store, want in zip(stores, twin[:2], strict=True):
        assert all(same_bytes(*pair) for pair in zip(store, want, strict=True))


def test_write_without_values():
    codec = kv_codec("bfloat16")
    store, k = poisoned(codec, (4, 1, 8), 576), torch.randn(5, 1, 576)
    paged_write(LayerPages(store, None, codec, codec), k, None, torch.arange(8, 13))
    assert torch.equal(store.payload[1, 0, :5], k[:, 0].bfloat16())


def test_a_latent_layer_has_a_codec_for_what_is_not_there():
    """`PagedKVCache` gives every layer two codecs; without values the second is not asked."""
    spec = LayerSpec(16, 1, 64, 32, 0.125, value_in_key=True)
    compare(paged_attention, "int8", spec, 8, loads_of("mixed", 8))


def test_offsets_beyond_32_bits():
    assert_offsets_have_64_bits(paged_attention, paged_write, GATHER.copy)
