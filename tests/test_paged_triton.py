"""The Triton kernels against the reference over gathered, decoded rows, and against the codecs' bytes.

Without a GPU they are interpreted, for which TRITON_INTERPRET must be set before Triton is first imported. The
interpreter gets bfloat16 products wrong: queries are float32 or float16 there. Where a GPU is, everything here runs on
it, and is what `make gpu` runs. What the compiler makes of the kernels is read in a process of its own.
"""
# ruff: noqa: E402

import functools
import json
import os
import random
import re
import subprocess
import sys
import warnings
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"
triton = pytest.importorskip("triton", reason="Triton is not installed (it has wheels for Linux only)")

from kernel_cases import (
    FORMATS,
    HEAD_SIZES,
    HEADS,
    NAN_FORMATS,
    SOFTCAPS,
    WINDOWS,
    assert_a_broken_row_stays_alone,
    assert_contradictions_are_refused,
    assert_offsets_have_64_bits,
    build,
    fixed_scale,
    hard_vectors,
    loads_of,
    pairwise,
    poisoned,
    same_bytes,
    step,
    tree,
)
from kernel_cases import compare as compare_on_cpu

from kvbook.compute.attention import attend
from kvbook.compute.kv_cache import LayerPages, gathered_attention, write
from kvbook.compute.model import Batch
from kvbook.compute.quantization import Stored, kv_codec
from kvbook.control.config import LayerSpec
from kvbook.kernels import paged_triton
from kvbook.kernels.paged_triton import CHIPS, PARTS, chip_of, decode, part_of, plan, variant

pytestmark = [pytest.mark.xdist_group("triton"), *([pytest.mark.gpu] if GPU else []),
              pytest.mark.filterwarnings("error::RuntimeWarning")]               # NumPy's: it interprets
ROOT, DEVICE = Path(__file__).resolve().parents[1], "cuda" if GPU else "cpu"
ALL = os.environ.get("KVBOOK_TEST") == "all"
BLOCK_SIZES, KINDS, DTYPES = [1, 7, 16, 32, 128, 256], ["decode", "prefill", "mixed"], [torch.float32, torch.float16]
GRID = pairwise(FORMATS, HEADS, HEAD_SIZES, BLOCK_SIZES, WINDOWS, SOFTCAPS, KINDS, DTYPES)
if ALL:                                       # 129,600 cases would take nine hours: every eightieth or so, at random
    GRID = random.Random(0).sample(GRID, 1600)


def on(x, device=DEVICE):
    """The same on a device: a tensor, or pages, a batch, a list with tensors in them."""
    if torch.is_tensor(x):
        return x.to(device)
    if isinstance(x, LayerPages):
        return x._replace(keys=on(x.keys, device), values=on(x.values, device))
    if isinstance(x, Stored):
        return Stored(*(on(t, device) for t in x))
    if isinstance(x, Batch):
        tensors = {field.name: on(getattr(x, field.name), device) for field in fields(x) if field.init}
        return replace(x, **tensors)
    return x


def paged_attention(*arguments):
    """The kernel, where the kernels run; the result on the CPU."""
    return paged_triton.paged_attention(*map(on, arguments)).cpu()


def paged_write(pages, k, v, slots):
    """The kernel, where the kernels run; what it wrote on the CPU."""
    there = on(pages)
    paged_triton.paged_write(there, *map(on, (k, v, slots)))
    for mine, its in zip(pages[:2], there[:2], strict=True):
        for a, b in zip(mine or (), its or (), strict=True):
            a.copy_(b)


def copy_blocks(tensors, pairs):
    """The kernel, where the kernels run; what it copied on the CPU."""
    there = [on(t) for t in tensors]
    paged_triton.copy_blocks(there, pairs)
    for a, b in zip(tensors, there, strict=True):
        a.copy_(b)


compare = functools.partial(compare_on_cpu, paged_attention)


def test_the_kernels_run_where_they_should():
    """Triton was imported first by somebody else, without the variable, if this fails on a machine without a GPU."""
    assert (type(paged_triton.attend_kernel).__name__ == "InterpretedFunction") != GPU


def loads(kind, block_size):
    """Requests around a page's edges; few rows unless all is asked for, since an interpreted program takes 10 ms."""
    if ALL:
        return loads_of(kind, block_size)
    if kind == "decode":
        return [(1, 1), (1, block_size), (1, 2 * block_size + 3)]
    if kind == "prefill":
        return [(3, 3), (min(9, block_size + 1),) * 2, (5, block_size + 5)]
    return [(1, block_size + 1), (min(4, block_size), block_size), (3, 2 * block_size + 3)]


@pytest.mark.parametrize(("name", "heads", "head_dim", "block_size", "window", "softcap", "kind", "dtype"), GRID)
def test_grid(name, heads, head_dim, block_size, window, softcap, kind, dtype):
    if name == "int4" and head_dim % 32:
        head_dim = 96
    compare(name, LayerSpec(*heads, head_dim, head_dim, head_dim ** -0.5, window, softcap), block_size,
            loads(kind, block_size), dtype=dtype)


@pytest.mark.parametrize("name", FORMATS if ALL else ["bfloat16", "fp8_e4m3", "int8", "int4"])
@pytest.mark.parametrize(("heads", "kind"), [(16, "mixed"), (128, "decode")])
def test_absorbed_latent(name, heads, kind):
    spec = LayerSpec(heads, 1, 576, 512, 192 ** -0.5, value_in_key=True)
    compare(name, spec, 16, [(1, 40), (2, 17)] if kind == "mixed" else [(1, 17)])


def test_vectors_of_other_sizes():
    compare("bfloat16", LayerSpec(4, 4, 96, 64, 96 ** -0.5), 8, loads_of("mixed", 8))
    compare("int8", LayerSpec(16, 1, 64, 32, 0.125, value_in_key=True), 8, loads_of("mixed", 8))


@pytest.mark.parametrize(("name", "heads", "n"), pairwise(["bfloat16", "int8", "int4"], [(9, 3), (4, 1)],
                                                          [511, 513, 1100]))
def test_parts_of_a_long_memory(name, heads, n):
    compare(name, LayerSpec(*heads, 64, 64, 0.125), 16, [(1, n), (1, 3), (5, n)])


@pytest.mark.parametrize("window", [None, 700])
def test_parts_of_chunks_and_windows(window):
    compare("bfloat16", LayerSpec(6, 1, 64, 64, 0.125, window), 16, [(1, 1100), (12, 1100), (45, 45)])


def test_parts_grow_with_very_long_memories(monkeypatch):
    monkeypatch.setattr("kvbook.kernels.paged_triton.PARTS", 2)                   # two parts of 1,024 keys
    compare("bfloat16", LayerSpec(2, 1, 64, 64, 0.125), 64, [(1, 1700), (1, 5)])


@pytest.mark.parametrize(("name", "window", "heads"), pairwise(["float32", "fp8_e4m3", "int8", "int4"], [None, 3, 20],
                                                               [(9, 3), (7, 1)]))
def test_trees(name, window, heads):
    wide, deep = tree([-1, 0, 0, 1, 1, 2, 2, 6]), tree([-1, *range(63)])
    compare(name, LayerSpec(*heads, 64, 64, 0.125, window), 8,
            [(8, 30), (1, 17), (64, 600 if ALL else 90), (4, 4), (3, 9)],
            [wide, [-1], deep, tree([-1, -1, 0, 1]), [-1, -1, -1]])


def test_long_trees_in_parts_and_latents():
    wide = tree([-1, 0, 0, 1, 1, 2, 2, 6])
    compare("bfloat16", LayerSpec(4, 1, 64, 64, 0.125), 16, [(8, 1100)], [wide])
    compare("bfloat16", LayerSpec(4, 1, 576, 512, 0.07, value_in_key=True), 16, [(8, 20)], [wide])


def test_a_broken_branch_breaks_no_other_tile():
    """A new row that is not a number, on a branch that no row of another tile sees."""
    spec, masks = LayerSpec(16, 1, 64, 64, 0.125), tree([-1, 0, 0, 0, 0, 1, 1, 1])
    pages, table, _ = build("float32", spec, 16, [24])
    pages.values.payload[table[0, 1], :, 4] = torch.nan                              # key 20: new row 4
    out = paged_attention(torch.randn(8, 16, 64), pages, step(table, [(8, 24)], torch.tensor(masks)), table, spec)
    assert out[:4].isfinite().all() and out[4].isnan().all()                         # rows 4 to 7 are the other tile


def test_batch_mates_change_no_bit():
    spec, lengths = LayerSpec(9, 3, 64, 64, 0.125), [1100, 40, 600]
    pages, table, _ = build("bfloat16", spec, 16, lengths)
    q = torch.randn(3, 9, 64)
    whole = paged_attention(q, pages, step(table, [(1, n) for n in lengths]), table, spec)
    for r, n in enumerate(lengths):
        mine = table[r:r + 1]
        assert torch.equal(paged_attention(q[r:r + 1], pages, step(mine, [(1, n)]), mine, spec)[0], whole[r])


def test_captured_launches_have_room_to_spare(monkeypatch):
    """Where a graph is captured nothing is known on the host: the largest possible numbers are launched."""
    monkeypatch.setattr("kvbook.kernels.paged_triton._capturing", lambda device: True)
    for window in (None, 600):
        spec, loads = LayerSpec(4, 1, 64, 64, 0.125, window), [(1, 1100), (3, 1000), (1, 2), (20, 20)]
        compare("bfloat16", spec, 32, loads)
        _, made = items_of(loads, spec, window)
        true, most = made.totals.tolist(), made.sizes
        assert all(a <= b for a, b in zip(true, most, strict=True)) and true != list(most)


def items_of(loads, spec, window=None):
    """Items (request, tokens, first row, first key, last key) of a batch, single and chunked, and its plan."""
    width = max(n for _, n in loads)
    table = torch.zeros(len(loads), -(-width // 16), dtype=torch.int32, device=DEVICE)
    rows = sum(new for new, _ in loads)
    form = variant(CHIPS["sm_90"], spec, "bfloat16", torch.bfloat16, 16, False)
    made = plan(on(step(table, loads)), rows, table, 16, window, form.step, part_of(spec), form.limit)
    items = torch.cat([made.single[:made.sizes[0]], made.chunked[:made.sizes[1]]])
    return items[:, [0, 1, 3, 4, 5]].tolist(), made


def test_one_long_request_is_shared_out():
    """One 32k request beside 63 short ones: no item reads more than 1,024 keys, and all keys are read once."""
    items, made = items_of([(1, 32_768)] + [(1, 500)] * 63, LayerSpec(32, 8, 128, 128, 0.1))
    assert max(last - first for *_, first, last in items) == 32_768 // PARTS
    assert sum(last - first for *_, first, last in items) == 32_768 + 63 * 500
    assert made.sizes == (PARTS + 63, 0, PARTS, 1)


def test_a_chunk_is_split_until_it_fills_the_chip():
    spec = LayerSpec(32, 8, 128, 128, 0.1)                                           # 32 new rows and 8 heads a tile
    for new, most in ((5, 32), (64, 16), (256, 4), (2048, 1)):
        items, _ = items_of([(new, 32_768)], spec)
        assert len(items) <= max(32, -(-new // 32)) and len({first for *_, first, _ in items}) == most


def test_plan_covers_every_row_and_key_once(monkeypatch):
    monkeypatch.setattr("kvbook.kernels.paged_triton.REQUESTS", 4)
    spec, loads = LayerSpec(9, 3, 64, 64, 0.1), [(1, 1), (1, 5000), (7, 3000), (300, 4000), (2, 2),
                                                (300, 300), (1, 900)]
    for window in (None, 1, 100, 3000):
        items, made = items_of(loads, spec, window)
        seen = {}
        for request, tokens, row, first, last in items:
            for r in range(row, row + tokens):
                seen[request, r] = seen.get((request, r), 0) + max(0, last - first)
        for request, (new, n) in enumerate(loads):
            for r in range(new):
                last = n - new + r + 1
                tile = r // 42 * 42                                                  # its window begins with its tile
                assert seen[request, r] == min(n, last - r + min(new, tile + 42) - 1) - max(
                    0, n - new + tile - (window or n) + 1)
        assert made.sizes[2] == sum(t * p for _, _, t, p in _of_each_request(made))


def _of_each_request(made):
    """First merge of each request that is in parts."""
    merges = made.merges[:made.sizes[3]].tolist()
    return [m for i, m in enumerate(merges) if i == 0 or m[1] - merges[i - 1][1] != 1 or m[2:] != merges[i - 1][2:]]


@pytest.mark.parametrize("name", NAN_FORMATS)
def test_a_broken_row_breaks_its_request_only(name):
    assert_a_broken_row_stays_alone(paged_attention, name)


def test_refusals():
    pages, _, _ = build("bfloat16", LayerSpec(3, 1, 64, 64, 0.125), 16, [70])
    with pytest.raises(ValueError, match="float64"):
        paged_write(pages, torch.randn(1, 1, 64).double(), torch.randn(1, 1, 64), torch.tensor([16]))
    assert_contradictions_are_refused(paged_attention, paged_write)
    with pytest.raises(ValueError, match="72"):
        variant(chip_of(torch.device("cpu")), LayerSpec(3, 1, 72, 72, 0.1), "bfloat16", torch.float32, 16, True)


def test_the_teaching_form():
    spec, lengths = LayerSpec(6, 2, 64, 64, 0.125), [5, 40, 16]
    pages, table, memories = build("float32", spec, 16, lengths)
    q = torch.randn(3, 6, 64)
    tensors = q, pages.keys.payload, pages.values.payload, table, torch.tensor(lengths).int()
    got = decode(*map(on, tensors), spec.scale).cpu()
    torch.testing.assert_close(got, torch.cat([attend(q[i:i + 1], *m, spec) for i, m in enumerate(memories)]))


@pytest.mark.parametrize(("name", "dtype", "scale", "dim"), pairwise(
    FORMATS, [torch.float32, torch.bfloat16, torch.float16], ["none", "channels", "number"], [64, 96]))
def test_write_stores_the_bytes_of_encode(name, dtype, scale, dim):
    num_kv, block_size = 3, 16
    k = hard_vectors(num_kv, dim).to(dtype)
    fixed = [{"none": 0.05 if name == "int8_static" else None, "channels": fixed_scale(name, num_kv, dim, i),
              "number": None if fixed_scale(name, 1, 1, 0) is None else 0.7}[scale] for i in range(2)]
    codecs = [kv_codec(name, one) for one in fixed]
    num_blocks = -(-len(k) // block_size) + 2
    stores = [poisoned(codec, (num_blocks + 1, num_kv, block_size), dim) for codec in codecs]
    twin = LayerPages(*(Stored(*(t.clone() for t in store)) for store in stores), *codecs)
    slots = torch.randperm(num_blocks * block_size, generator=torch.Generator().manual_seed(2))[:len(k)] + block_size
    slots[::7] = -1
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):          # of values that are broken
        paged_write(LayerPages(*stores, *codecs), k, k.flip(0), slots)
    write(twin, k, k.flip(0), slots)
    for store, want in zip(stores, twin[:2], strict=True):
        assert all(same_bytes(*pair) for pair in zip(store, want, strict=True))


@pytest.mark.parametrize("name", ["bfloat16", "int8", "int4"])
def test_write_without_values_and_from_a_view(name):
    codec = kv_codec(name)
    store, twin = (poisoned(codec, (4, 1, 8), 576) for _ in range(2))
    k = torch.randn(5, 1, 600)[..., :576]
    assert not k.is_contiguous()
    paged_write(LayerPages(store, None, codec, codec), k, None, torch.arange(8, 13))
    write(LayerPages(twin, None, codec, codec), k, None, torch.arange(8, 13))
    assert all(same_bytes(*pair) for pair in zip(store, twin, strict=True))


def test_blocks_are_copied_in_order():
    tensors = [torch.randn(9, 2, 3, 40), torch.randn(9, 5).half(), torch.randint(0, 255, (9, 3), dtype=torch.uint8),
               torch.empty(9, 2, 0)]
    want = [t.clone() for t in tensors]
    pairs = [(1, 2), (2, 3), (8, 2), (0, 1), (3, 8)]
    for t in want:
        for source, target in pairs:
            t[target] = t[source]
    copy_blocks(tensors, pairs)
    assert all(torch.equal(a, b) for a, b in zip(tensors, want, strict=True))
    copy_blocks(tensors, [])


def test_offsets_beyond_32_bits():
    assert_offsets_have_64_bits(paged_attention, paged_write, copy_blocks)


# On a GPU: what the interpreter cannot do


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "heads", "head_dim", "block_size", "window", "kind"), pairwise(
    FORMATS, [(32, 8), (9, 3), (16, 1), (4, 4)], HEAD_SIZES, [1, 16, 128], [None, 40], ["decode", "prefill", "mixed"]))
def test_bfloat16_queries(name, heads, head_dim, block_size, window, kind):
    if name == "int4" and head_dim % 32:
        head_dim = 96
    compare(name, LayerSpec(*heads, head_dim, head_dim, head_dim ** -0.5, window), block_size,
            loads_of(kind, block_size), dtype=torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["bfloat16", "fp8_e4m3", "int8", "int4"])
@pytest.mark.parametrize("kind", ["decode", "mixed"])
def test_bfloat16_latents_and_long_memories(name, kind):
    latent = LayerSpec(128, 1, 576, 512, 192 ** -0.5, value_in_key=True)
    compare(name, latent, 16, loads_of(kind, 16), dtype=torch.bfloat16)
    compare(name, LayerSpec(32, 8, 128, 128, 0.1), 16, [(1, 5000), (1, 3), (300, 2000)], dtype=torch.bfloat16)


@pytest.mark.gpu
def test_a_replayed_graph_sees_the_new_numbers():
    spec = LayerSpec(32, 8, 128, 128, 0.1)
    pages, table, _ = build("bfloat16", spec, 16, [1100, 900])
    q, there, table = on(torch.randn(2, 32, 128).bfloat16()), on(pages), on(table)
    batch = on(step(table.cpu(), [(1, 700), (1, 20)]))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        paged_triton.paged_attention(q, there, on(step(table.cpu(), [(1, 1000), (1, 900)])), table, spec)   # compiles
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = paged_triton.paged_attention(q, there, batch, table, spec)
    for lengths in ([700, 20], [1100, 900], [1, 513]):
        batch.seq_lens.copy_(torch.tensor(lengths))
        graph.replay()
        want = paged_triton.paged_attention(q, there, on(step(table.cpu(), [(1, n) for n in lengths])), table, spec)
        assert torch.equal(out, want)


# What the compiler makes of them


@functools.cache
def compiled(*arguments):
    """Records of benchmarks/gpu_binaries.py, by description, and what it found broken."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, ROOT / "benchmarks" / "gpu_binaries.py", "--json", *arguments],
                          capture_output=True, text=True, env=environment)
    assert done.stdout, done.stderr
    return json.loads(done.stdout), done.returncode, done.stderr


@pytest.mark.timeout(1200)
def test_binaries_keep_what_is_promised():
    records, status, message = compiled(*([] if ALL else ["--quick"]))
    assert status == 0, message
    assert len(records) == (33 * len(CHIPS) if ALL else 6)
    assert all(r["spills"] == 0 and r["stack"] == 0 and r["shared"] <= r["limit"] for r in records)
    attention = [r for r in records if r["form"] in ("decode", "chunk")]
    assert {r["chip"] for r in attention} == set(CHIPS)
    assert all(r["tensor"] for r in attention)
    assert all(r["wide"] == 1 for r in attention
               if r["model"] != "DeepSeek-V3" and (r["chip"], r["kv"]) != ("gfx942", "int4"))


def test_chunks_use_each_chips_own_tensor_cores():
    records = {(r["chip"], r["form"]): r["tensor"] for r in compiled(*([] if ALL else ["--quick"]))[0]
               if r["form"] == "chunk" and r["kv"] == "bfloat16"}
    assert "HGMMA" in records["sm_90", "chunk"]
    assert "UTCHMMA" in records["sm_100", "chunk"]


def test_narrow_loads_are_seen():
    """Pointers that may lie anywhere force the compiler to fetch keys and values in small pieces."""
    script = ("import sys; sys.path.insert(0, 'benchmarks'); from gpu_binaries import *\n"
              "for chip in 'sm_90', 'gfx942':\n"
              "  where = paged_triton.CHIPS[chip]\n"
              "  form = paged_triton.variant(where, SPECS['Llama 3 8B'], 'bfloat16', torch.bfloat16, 16, True)\n"
              "  for bytes in 4, 16:\n"
              "    types = attend_types('bfloat16', torch.bfloat16)\n"
              "    made, _ = build(paged_triton.attend_kernel, types, form.constants, where, form.num_warps,\n"
              "                    form.num_stages, bytes)\n"
              "    print(wide_share(made, read(made, where)['loads'], form.num_warps * lanes(where), 'bf16'))")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    narrow, wide, narrow_too, wide_too = map(float, done.stdout.split())
    assert narrow == narrow_too == 0 and wide == wide_too == 1


def test_a_broken_promise_is_told():
    script = ("import sys; sys.path.insert(0, 'benchmarks'); from gpu_binaries import *\n"
              "good = dict(chip='sm_90', model='Llama 3 8B', kv='int8', form='chunk', spills=0, stack=0, shared=1,"
              " limit=2, tensor={'HMMA': 1}, wide=1)\n"
              "bad = dict(spills=1), dict(stack=8), dict(shared=3), dict(tensor={}), dict(wide=0.99)\n"
              "print(broken_promise(good), *(broken_promise(good | one) is not None for one in bad))")
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split() == ["None", *["True"] * 5], done.stderr


def test_the_gpu_script_can_be_rehearsed():
    """What `make gpu` runs, at tiny sizes through the interpreter: every group is reached, every variant is right."""
    environment = {name: value for name, value in os.environ.items() if name != "KVBOOK_RUN"}
    done = subprocess.run([sys.executable, ROOT / "benchmarks" / "gpu_kernels.py", "--rehearse"], capture_output=True,
                          text=True, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    right, all_of_them = re.search(r"(\d+) of (\d+) variants right", done.stdout).groups()
    assert right == all_of_them and int(right) >= 20
    assert "tokens equal" in done.stdout and "error:" not in done.stdout.lower()
    assert done.stdout.index("Goals") > done.stdout.index("tokens equal")


# The page


def test_the_page_runs_to_its_end_without_triton():
    script = ("import json, sys\n"
              "sys.modules['triton'] = None\n"                  # importing it fails
              "names = {'__name__': '__main__'}\n"
              "for cell in json.load(open('nbs/03b_paged_triton.ipynb'))['cells']:\n"
              "    if cell['cell_type'] == 'code':\n"
              "        exec(''.join(line for line in cell['source'] if '%pip' not in line), names)\n"
              "print('the end')")
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Triton is not installed here" in done.stdout and done.stdout.endswith("the end\n")


@pytest.mark.parametrize("scales", [(0.05, "channels"), ("channels", 0.05)])
@pytest.mark.parametrize("name", ["int8_static", "fp8_e4m3", "int4"])
def test_keys_and_values_with_scales_of_different_kinds(name, scales):
    made = [0.5 + torch.rand(1, 64) if scale == "channels" else scale for scale in scales]
    codecs = [kv_codec(name, scale) for scale in made]
    stores = [codec.empty((4, 2, 8), 64) for codec in codecs]
    twin = LayerPages(*(Stored(*(t.clone() for t in store)) for store in stores), *codecs)
    k, v, slots = torch.randn(9, 2, 64), torch.randn(9, 2, 64), torch.arange(8, 17)
    mine = on(LayerPages(*stores, *codecs))
    paged_triton.paged_write(mine, on(k), on(v), on(slots))
    write(twin, k, v, slots)
    for store, want in zip(mine[:2], twin[:2], strict=True):
        assert all(torch.equal(a.cpu().view(torch.uint8), b.view(torch.uint8))
                   for a, b in zip(store, want, strict=True))


def test_requests_without_rows_beside_a_chunk():
    """As many rows as requests, and yet not one row each."""
    compare("float32", LayerSpec(8, 1, 32, 32, 0.2), 16, [(0, 1), (0, 1), (0, 1), (4, 700)])


@pytest.mark.parametrize("name", ["fp8_e4m3_token", "fp8_e5m2_token", "int8"])
def test_small_values_survive_half_precision(name):
    spec = LayerSpec(4, 2, 32, 32, 0.2)
    pages, table, memories = build(name, spec, 16, [64])
    small = 1e-3 * memories[0][1]
    at = torch.arange(64)
    where = table[0].long()[at // 16], slice(None), at % 16
    rows = pages.value_codec.encode(small)
    pages.values.payload[where], pages.values.scales[where] = rows
    q = torch.randn(1, 4, 32).half()
    got = paged_attention(q, pages, step(table, [(1, 64)]), table, spec).float()
    want = attend(q, memories[0][0], pages.value_codec.decode(rows), spec).float()
    assert (got - want).norm() < 2e-3 * want.norm()


def test_nobody_asks_or_sees():
    spec = LayerSpec(4, 2, 32, 32, 0.2)
    pages, table, _ = build("float32", spec, 16, [20])
    assert paged_attention(torch.randn(0, 4, 32), pages, step(table, [(0, 20)]), table, spec).shape == (0, 4, 32)
    with pytest.raises(ValueError, match="heads and sizes"):
        paged_attention(torch.randn(1, 4, 16), pages, step(table, [(1, 20)]), table, spec)


def test_a_slot_beyond_the_pool_is_not_written():
    pages, _, _ = build("int8", LayerSpec(2, 2, 64, 64, 0.125), 16, [40])
    whole = [t.clone() for store in pages[:2] for t in store]
    k = torch.randn(2, 2, 64)
    paged_write(pages, k, k, torch.tensor([pages.num_slots, 1 << 40]))
    assert all(same_bytes(*pair) for pair in zip(whole, [t for store in pages[:2] for t in store], strict=True))


def test_tensors_that_are_cut_out_of_others():
    """Every second element, and 32-bit slots: what a caller may well have."""
    spec, loads = LayerSpec(4, 1, 64, 64, 0.125), [(3, 700), (8, 30)]
    pages, table, _ = build("bfloat16", spec, 16, [n for _, n in loads])
    batch = step(table, loads, torch.tensor([*tree([-1, 0, 0]), *tree([-1, 0, 0, 1, 1, 2, 2, 6])]))
    q, holes = torch.randn(11, 4, 64), lambda t: t.repeat_interleave(2, -1)[..., ::2]
    other = replace(batch, **{name: holes(getattr(batch, name)) for name in ("cu_seqlens_q", "seq_lens", "tree_mask")})
    assert not other.tree_mask.is_contiguous()
    assert torch.equal(paged_attention(q, pages, batch, table, spec),
                       paged_attention(holes(q), pages, other, holes(table), spec))
    k, slots = torch.randn(3, 1, 64), torch.tensor([16, 40, 17])
    paged_write(pages, k, k, slots)
    want = [t.clone() for store in pages[:2] for t in store]
    paged_write(pages, holes(k), holes(k), holes(slots.int()))
    assert all(same_bytes(*pair) for pair in zip(want, [t for store in pages[:2] for t in store], strict=True))


def test_a_plan_is_made_anew_when_lengths_are_replaced():
    spec = LayerSpec(4, 1, 64, 64, 0.125)
    pages, table, memories = build("bfloat16", spec, 16, [700])
    q, batch = torch.randn(1, 4, 64), step(table, [(1, 700)])
    for n in (700, 20, 650):
        batch.seq_lens = torch.tensor([n], dtype=torch.int32)
        got = paged_attention(q, pages, batch, table, spec)
        torch.testing.assert_close(got, attend(q, *(x[:n] for x in memories[0]), spec), rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize("cap", [1.0, 1e3, 1e6])
def test_soft_caps_of_all_sizes(cap):
    """A large cap leaves scores as they are; a quotient that computes it must not lose their digits."""
    compare("float32", LayerSpec(4, 2, 64, 64, 0.125, softcap=cap), 16, [(1, 40), (5, 33)])


def test_copies_that_are_refused():
    copy_blocks([torch.empty(9, 2, 0)], [(1, 2)])                                    # nothing to copy
    whole = torch.randn(9, 2)
    kept = whole.clone()
    for tensors, pairs, error in (([whole], [(1, 9)], ValueError), ([whole], [(-1, 2)], ValueError),
                                  ([whole], [(1, 2, 3)], ValueError), ([whole], [(1.5, 2)], TypeError),
                                  ([whole, torch.randn(4, 2)], [(1, 5)], ValueError),
                                  ([whole.T], [(0, 1)], ValueError)):
        with pytest.raises(error):
            copy_blocks(tensors, pairs)
    assert torch.equal(whole, kept)


def test_an_odd_address_is_copied_in_smaller_pieces():
    whole = torch.arange(100, dtype=torch.uint8)
    pages = whole[2:].view(-1)[:96].view(6, 16)
    want = pages.clone()
    want[3] = want[1]
    copy_blocks([pages], torch.tensor([(1, 3)]))
    assert torch.equal(pages, want)


@pytest.mark.parametrize("name", ["int8_static", "fp8_e4m3", "fp8_e5m2", "int4"])
def test_channel_scales_do_not_overflow_half_precision(name):
    codec = kv_codec(name, torch.full((1, 64), 40.0) + torch.rand(1, 64))
    pages = LayerPages(codec.empty((3, 1, 16), 64), codec.empty((3, 1, 16), 64), codec, codec)
    k, table = torch.randn(10, 1, 64) * 1e-3, torch.tensor([[1]], dtype=torch.int32)
    write(pages, k, torch.randn(10, 1, 64) * 100, torch.arange(10) + 16)
    q, batch, spec = torch.full((1, 4, 64), 17000.0).half(), step(table, [(1, 10)]), LayerSpec(4, 1, 64, 64, 0.125)
    got = paged_attention(q, pages, batch, table, spec)
    want = gathered_attention(q, pages, batch, table, spec)
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


def test_a_scale_that_is_replaced_counts_at_once():
    spec = LayerSpec(4, 1, 64, 64, 0.125)
    pages, table, _ = build("fp8_e4m3", spec, 16, [40])
    codec = kv_codec("fp8_e4m3", torch.tensor(0.5))
    pages, q, batch = pages._replace(key_codec=codec, value_codec=codec), torch.randn(1, 4, 64), step(table, [(1, 40)])
    before = paged_attention(q, pages, batch, table, spec)
    codec.scale = torch.tensor(0.1)
    after = paged_attention(q, pages, batch, table, spec)
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, gathered_attention(q, pages, batch, table, spec), rtol=1e-5, atol=3e-6)


def test_scores_of_minus_infinity():
    """The first tile's keys weigh nothing; a tile whose scores are all minus infinity must not leave a trace."""
    codec, spec, table = kv_codec("float32"), LayerSpec(4, 1, 64, 64, 1.0), torch.arange(1, 11, dtype=torch.int32)[None]
    pages = LayerPages(codec.empty((11, 1, 16), 64), codec.empty((11, 1, 16), 64), codec, codec)
    k = torch.randn(150, 1, 64)
    k[:70] = -3e37
    write(pages, k, torch.randn(150, 1, 64), torch.arange(150) + 16)
    q, batch = torch.full((1, 4, 64), 10.0), step(table, [(1, 150)])
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
        got = paged_attention(q, pages, batch, table, spec)
    torch.testing.assert_close(got, gathered_attention(q, pages, batch, table, spec), rtol=1e-4, atol=1e-4)
