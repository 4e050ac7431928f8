"""The Triton kernels on this GPU: whether they are right, and how near to the memory's bandwidth.

`make gpu` runs it. Bandwidths are shares of what a device copy reaches in turns with what is measured, bytes read and
bytes written both counted. Decode steps are replayed from graphs in which several times the L2 cache's bytes of pages
take turns; before every sample a long read passes through that cache. Times are medians of samples from device events.
Beside each stands the time that its bytes and FLOPs predict.

``--rehearse`` runs everything at tiny sizes on a CPU through Triton's interpreter; times mean nothing then.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

if "--rehearse" in sys.argv:                                     # before Triton is imported
    os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor

from kvbook.compute.checkpoint import DEFAULT_MODEL, cache_dir, load
from kvbook.compute.kv_cache import (
    GATHER,
    Kernels,
    LayerPages,
    PagedKVCache,
    PagedModel,
    gathered_attention,
    write,
)
from kvbook.compute.model import Batch, Transformer
from kvbook.compute.quantization import Stored, kv_codec, stored_dims
from kvbook.control.config import KNOWN_MODELS, LayerSpec
from kvbook.control.fake import Step, StepRows
from kvbook.lab.recorded import describe_hardware, describe_versions, hardware_line, load_evidence

Points = Iterator[tuple[str, Callable[[], dict]]]
BLOCK_SIZE = 16
SPECS = {"32/8": LayerSpec(32, 8, 128, 128, 128**-0.5), "9/3": LayerSpec(9, 3, 64, 64, 64**-0.5),
         "128/1": LayerSpec(128, 1, 128, 128, 128**-0.5),
         "MLA": LayerSpec(128, 1, 576, 512, 192**-0.5, value_in_key=True)}
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Of ‖out − reference‖ / ‖reference‖, by the type of the queries: what the products are taken in."""
PREFILL_REACH = 0.5
"""Share of the matrix units' rate that a kernel of this kind is expected to reach in chunks."""
FAMILIES = (["bfloat16", "float16", "fp8_e4m3", "int8", "int4"],
            ["float32", "fp8_e5m2", "fp8_e4m3_token", "fp8_e5m2_token", "int8_static"])


@dataclass(frozen=True)
class Sizes:
    """How large everything is; `TINY` is for rehearsals."""

    copy_bytes: int = 2**30
    matrix: int = 8192
    in_turn: int = 4                     # pages of all layers together, times the L2 cache
    most_layers: int = 320
    repeats: int = 9
    long: int = 3000
    correct: tuple[tuple[str, LayerSpec], ...] = (*SPECS.items(), *(
        (f"{d} wide", LayerSpec(8, 2, d, d, d**-0.5)) for d in (80, 96, 256)))
    formats: tuple[list[str], list[str]] = FAMILIES
    decode: tuple[str, ...] = tuple(SPECS)
    batches: tuple[int, ...] = (64, 16, 256, 1)
    contexts: tuple[int, ...] = (4096, 1024, 32_768)
    ratios: tuple[tuple[int, int], ...] = ((64, 4096), (64, 1024), (16, 4096), (256, 4096), (64, 32_768), (1, 32_768))
    chunks: tuple[tuple[str, int, int, int], ...] = (
        ("32/8", 1, 8192, 8192), ("32/8", 1, 2048, 8192), ("32/8", 8, 1024, 1024), ("32/8", 1, 512, 32_768),
        ("9/3", 1, 8192, 8192))          # heads, requests, new rows, rows in memory
    uneven: tuple[int, int, int] = (32_768, 500, 64)
    launches: tuple[tuple[int, int], ...] = ((1, 64), (8, 64), (8, 4096))
    model_layers: int = 30
    pairs: tuple[int, ...] = (512, 64, 1)
    rows: int = 32_768
    tokens: int = 24
    prompts: tuple[int, ...] = (200, 17, 64, 1)
    model: str | None = DEFAULT_MODEL


FULL = Sizes()
TINY = Sizes(
    copy_bytes=2**20, matrix=64, most_layers=2, repeats=2, long=70,
    correct=(("32/8", LayerSpec(4, 2, 32, 32, 0.2)), ("MLA", LayerSpec(16, 1, 48, 32, 0.2, value_in_key=True)),
             ("80 wide", LayerSpec(2, 1, 80, 80, 0.1))),
    formats=(["bfloat16", "int4"], ["fp8_e4m3_token"]), decode=("9/3",), batches=(1, 2), contexts=(64, 600),
    ratios=((1, 40),), chunks=(("9/3", 1, 20, 20), ("9/3", 2, 8, 40)), uneven=(600, 20, 3), launches=((1, 64),),
    model_layers=1, pairs=(2,), rows=16, tokens=2, prompts=(5,), model=None)


class Rig:
    """The device that is measured, its clocks as they are found, and what it reached at best.

    Args:
        device: "cuda"; or "cpu", where nothing is a measurement.
        sizes: how large everything is.
    """

    def __init__(self, device: str = "cuda", sizes: Sizes = FULL, ceilings: Mapping[str, float] | None = None):
        self.device, self.sizes = torch.device(device), sizes
        self.real = self.device.type == "cuda"
        self.dtype = torch.bfloat16 if self.real else torch.float16      # interpreted products of bfloat16 are wrong
        self.l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size if self.real else 2**14
        self.ceilings = dict(ceilings or {"copy": 4.3e12, "matrix": 780e12, "kernel": 3e-6})
        self.num_programs = torch.cuda.get_device_properties(0).multi_processor_count if self.real else 1
        self.flush = torch.ones(4 * self.l2_bytes // 8, dtype=torch.int64, device=self.device)
        self.source = torch.randint(0, 100, (sizes.copy_bytes,), dtype=torch.uint8, device=self.device)
        self.target = torch.empty_like(self.source)
        self.draw = torch.Generator(self.device).manual_seed(0)

    def wait(self) -> None:
        """Let the device finish."""
        if self.real:
            torch.cuda.synchronize()

    def randn(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Normal numbers on the device."""
        return torch.randn(*shape, generator=self.draw, device=self.device).to(dtype or self.dtype)

    def copy(self) -> None:
        """A device copy: the baseline of every bandwidth."""
        self.target.copy_(self.source)

    def free_bytes(self) -> int:
        """Memory that can be had."""
        if not self.real:
            return 2**30
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    def graph(self, run: Callable[[], object]) -> Callable[[], object]:
        """The launches of `run` as one launch; `run` has to build what is captured with it, for instance a batch."""
        run()                                                            # compiles
        if not self.real:
            return run
        self.wait()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph.replay

    def samples(self, runs: Mapping[str, Callable[[], object]]) -> dict[str, list[float]]:
        """Seconds of runs that take turns; the first round does not count.

        Before each sample a long read passes through the L2 cache, and leaves nothing in it that has to be written. It
        is repeated so that the device is still busy while the host launches what is timed.
        """
        seconds = {name: [] for name in runs}
        for _ in range(self.sizes.repeats + 1):
            for name, run in runs.items():
                for _ in range(8 if self.real else 1):
                    self.flush.sum()
                seconds[name].append(self._sample(run))
        return {name: times[1:] for name, times in seconds.items()}

    def _sample(self, run: Callable[[], object]) -> float:
        if not self.real:
            start = time.perf_counter()
            run()
            return time.perf_counter() - start
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def host_seconds(self, run: Callable[[], object]) -> list[float]:
        """Wall times of a run, from an idle device until it is idle again."""
        found = []
        for _ in range(self.sizes.repeats + 1):
            self.wait()
            start = time.perf_counter()
            run()
            self.wait()
            found.append(time.perf_counter() - start)
        return found[1:]


class Memory:
    """Pages with random rows for some layers, anywhere in one pool, and a step that reads them.

    Args:
        rig: where.
        spec: of every layer.
        kv_dtype: name of a format.
        loads: (new rows, rows in memory after the step) of each request.
        num_layers: as many as `Rig.sizes` asks for, if None.
    """

    def __init__(self, rig: Rig, spec: LayerSpec, kv_dtype: str, loads: Sequence[tuple[int, int]],
                 num_layers: int | None = None):
        self.rig, self.spec, self.loads, sizes = rig, spec, loads, rig.sizes
        self.bytes_per_layer = sum(n for _, n in loads) * spec.bytes_per_token(kv_dtype)
        wanted = -(-sizes.in_turn * rig.l2_bytes // self.bytes_per_layer)
        least = 4 if 4 * self.bytes_per_layer < 16 * sizes.copy_bytes else 1                # they share a plan
        self.num_layers = num_layers or min(sizes.most_layers, max(least, wanted))
        counts = [-(-n // BLOCK_SIZE) for _, n in loads]
        if (needed := self.num_layers * self.bytes_per_layer * 1.15 + 2**28) > (free := rig.free_bytes()):
            raise MemoryError(f"needs {needed / 2**30:.1f} GiB of {free / 2**30:.1f} free")
        self.codec = kv_codec(kv_dtype, 0.05 if kv_dtype == "int8_static" else None)
        num_pages = self.num_layers * sum(counts) + 1
        stores = [self._random(num_pages, dim) for dim in stored_dims(spec)]
        self.pages = LayerPages(stores[0], stores[1] if stores[1:] else None, self.codec, self.codec)
        ids = torch.randperm(num_pages - 1, generator=rig.draw, device=rig.device).int() + 1
        self.tables = torch.zeros(self.num_layers, len(loads), max(counts), dtype=torch.int32, device=rig.device)
        ids, low = ids.view(self.num_layers, -1), 0
        for r, count in enumerate(counts):
            self.tables[:, r, :count] = ids[:, low:low + count]
            low += count
        self.q = rig.randn(sum(new for new, _ in loads), spec.num_heads, spec.head_dim)

    def _random(self, num_pages: int, dim: int) -> Stored:
        shape = (self.spec.num_kv_heads, BLOCK_SIZE)
        some = self.codec.encode(self.rig.randn(min(512, num_pages), *shape, dim, dtype=torch.float32))
        stored = self.codec.empty((num_pages, *shape), dim, self.rig.device)
        for whole, part in zip(stored, some, strict=True):
            for low in range(0, num_pages, 512):
                whole[low:low + 512] = part[:num_pages - low]
        return stored

    def batch(self) -> Batch:
        """The step, with nothing planned yet."""
        return batch_of(self.loads, self.tables[0])

    def run(self, attention: Callable, plan_once: bool = False) -> Callable[[], None]:
        """The step's attention in every layer; a call plans once, or only the first call does."""
        batch = self.batch()

        def step() -> None:
            same = batch if plan_once else replace(batch)                # a plan is kept with its batch
            for table in self.tables:
                attention(self.q, self.pages, same, table, self.spec)
        return step

    def error(self, attention: Callable) -> float:
        """Of the first and the last request in the last layer: ‖out − reference‖ / ‖reference‖, at most 64 rows."""
        batch, table = self.batch(), self.tables[-1]
        out, bounds = attention(self.q, self.pages, batch, table, self.spec), batch.query_bounds
        worst = 0.0
        for r in {0, len(self.loads) - 1}:
            new, n = self.loads[r]
            some, last = min(new, 64), bounds[r + 1]
            one = batch_of([(some, n)], table[r:r + 1])
            want = gathered_attention(self.q[last - some:last].float(), self.pages, one, table[r:r + 1], self.spec)
            worst = max(worst, difference(out[last - some:last], want)[0])
        return worst


def batch_of(loads: Sequence[tuple[int, int]], table: Tensor, mask: Tensor | None = None) -> Batch:
    """A batch of (new rows, rows in memory after the step) a request; attention needs no more of it."""
    bounds = list(itertools.accumulate((new for new, _ in loads), initial=0))
    number = lambda values: torch.tensor(values, dtype=torch.int32, device=table.device)
    none = torch.empty(0, dtype=torch.int64, device=table.device)
    return Batch(none, none, number(bounds), number([n for _, n in loads]), table[None], none, none, mask)


def difference(got: Tensor, want: Tensor) -> tuple[float, float]:
    """‖got − want‖ / ‖want‖, and the largest difference of one element; infinite where something is no number."""
    gap, want = got.float() - want.float(), want.float()
    found = float(gap.norm() / want.norm()), float(gap.abs().max())
    return found if all(map(math.isfinite, found)) else (math.inf, math.inf)


def predicted_decode(rig: Rig, spec: LayerSpec, kv_dtype: str, lengths: Sequence[int], num_layers: int) -> dict:
    """The kernels' own formula, with what this device reaches; the plan is shared by the layers."""
    from kvbook.kernels import paged_triton

    return paged_triton.predicted_decode(
        spec, lengths, kv_dtype, chip=paged_triton.chip_of(rig.device), ceilings=rig.ceilings,
        processors=rig.num_programs, block_size=BLOCK_SIZE, kernels=1 / num_layers)


def predicted_prefill(spec: LayerSpec, requests: int, new: int, n: int, ceilings: Mapping[str, float]) -> dict:
    """Bytes, FLOPs and seconds of a chunk of `new` rows in a memory of `n`, for some equal requests, in 16 bits."""
    wide = spec.num_heads * (spec.head_dim + spec.value_dim)
    flop = 2 * requests * (new * n - new * (new - 1) // 2) * wide
    size = requests * (n * spec.bytes_per_token("bfloat16") + 2 * new * wide)
    seconds = max(size / ceilings["copy"], flop / (PREFILL_REACH * ceilings["matrix"]))
    return {"bytes": size, "flop": flop, "predicted_seconds": seconds}


# Groups. Each yields (name, what measures it); a point is a dict of numbers.


def ceilings(rig: Rig, sizes: Sizes) -> Points:
    """What this device reaches at best."""
    def measured() -> dict:
        a, b = (rig.randn(sizes.matrix, sizes.matrix) for _ in range(2))
        one, product = torch.zeros(1, device=rig.device), torch.empty_like(a)
        longs = rig.source[:len(rig.source) // 8 * 8].view(torch.int64)
        kernels = rig.graph(lambda: [one.add_(1) for _ in range(100)])
        found = rig.samples({"copy": rig.copy, "read": longs.sum, "matrix": lambda: torch.mm(a, b, out=product),
                             "kernel": kernels})
        middle = {name: statistics.median(times) for name, times in found.items()}
        rig.ceilings.update(copy=2 * rig.source.nbytes / middle["copy"], kernel=middle["kernel"] / 100,
                            matrix=2 * sizes.matrix**3 / middle["matrix"])
        return {"seconds": middle["copy"], "samples": found, "copy_bytes_per_s": rig.ceilings["copy"],
                "read_bytes_per_s": rig.source.nbytes / middle["read"], "flop_per_s": rig.ceilings["matrix"],
                "seconds_per_kernel": rig.ceilings["kernel"], "l2_bytes": rig.l2_bytes}
    yield "copy, matrix product, kernel of a graph", measured


def correctness(rig: Rig, sizes: Sizes) -> Points:
    """Every variant against float32 over the decoded pages, and the written bytes against the codec's."""
    (first, spec), *others = sizes.correct
    often, seldom = sizes.formats
    cases = [(first, spec, kv_dtype, kind) for kv_dtype in often
             for kind in ("mixed", "decode", "chunk", "tree", "window", "softcap", "channels")
             if kind != "channels" or kv_dtype in ("fp8_e4m3", "int4")]
    cases += [(first, spec, kv_dtype, kind) for kv_dtype in seldom
              for kind in ("mixed", *(["channels"] if kv_dtype == "int8_static" else []))]
    for name, other in others:
        cases += [(name, other, kv_dtype, "mixed") for kv_dtype in (often + seldom if other.value_in_key else often[:1])
                  if kv_dtype != "int4" or other.head_dim % 32 == 0]
        cases += [(name, other, often[0], kind) for kind in ("decode", "chunk", "tree") if other.value_in_key]
    for name, *case in sorted(cases, key=lambda case: case[3] != "mixed"):     # the widest first, should time run out
        yield f"{name} {case[1]} {case[2]}", lambda case=case: correct(rig, *case)


def correct(rig: Rig, spec: LayerSpec, kv_dtype: str, kind: str) -> dict:
    """One variant: rows are written into poisoned pages, and read."""
    from kvbook.kernels.paged_triton import paged_attention, paged_write

    dtype = {"float32": torch.float32, "float16": torch.float16}.get(kv_dtype, rig.dtype)
    loads = loads_of(kind, rig.sizes.long)
    spec = replace(spec, window=rig.sizes.long // 3 if kind == "window" else None,
                   softcap=2.0 if kind == "softcap" else None)
    counts = [-(-n // BLOCK_SIZE) for _, n in loads]
    codecs = [kv_codec(kv_dtype, fixed_scale(rig, kv_dtype, kind, spec.num_kv_heads, dim)) for dim in stored_dims(spec)]
    shape = (sum(counts) + 2, spec.num_kv_heads, BLOCK_SIZE)
    both = []
    for _ in range(2):
        stores = [poisoned(codec.empty(shape, dim, rig.device))
                  for codec, dim in zip(codecs, stored_dims(spec), strict=True)]
        both.append(LayerPages(stores[0], stores[1] if stores[1:] else None, codecs[0], codecs[-1]))
    ids = (torch.randperm(sum(counts), generator=rig.draw, device=rig.device) + 1).int().split(counts)
    table = torch.nn.utils.rnn.pad_sequence(list(ids), batch_first=True)
    at = torch.arange(max(n for _, n in loads), device=rig.device)
    slots = torch.cat([own.long()[at[:n] // BLOCK_SIZE] * BLOCK_SIZE + at[:n] % BLOCK_SIZE
                       for own, (_, n) in zip(ids, loads, strict=True)])
    k, v = (rig.randn(len(slots), spec.num_kv_heads, dim, dtype=dtype) for dim in (spec.head_dim, spec.value_dim))
    for pages, put in zip(both, (paged_write, write), strict=True):
        put(pages, k, None if spec.value_in_key else v, slots)
    differ = bytes_that_differ(*both)
    mask = None if kind != "tree" else torch.cat([tree(new) for new, _ in loads]).to(rig.device)
    batch = batch_of(loads, table, mask)
    q = rig.randn(sum(new for new, _ in loads), spec.num_heads, spec.head_dim, dtype=dtype)
    got = paged_attention(q, both[0], batch, table, spec)
    error, worst = difference(got, gathered_attention(q.float(), both[1], batch, table, spec))
    return {"error": error, "worst": worst, "tolerance": TOLERANCE[dtype], "bytes_differ": differ,
            "right": error <= TOLERANCE[dtype] and not differ, "queries": str(dtype).removeprefix("torch.")}


def bytes_that_differ(mine: LayerPages, its: LayerPages) -> int:
    """How many bytes of two layers' pages are not the same."""
    pairs = [pair for a, b in zip(mine[:2], its[:2], strict=True) if a is not None for pair in zip(a, b, strict=True)]
    return sum(int((a.view(torch.uint8) != b.view(torch.uint8)).sum()) for a, b in pairs if a.numel())


def loads_of(kind: str, long: int) -> list[tuple[int, int]]:
    """(New rows, rows in memory) of a few requests, one of them long."""
    return {"decode": [(1, 1), (1, long), (1, 17), (1, long // 5)], "chunk": [(20, 20), (long // 30, long), (5, 21)],
            "tree": [(8, long), (1, 17), (min(64, long), long), (3, 9)]}.get(
        kind, [(1, long), (long // 10, long // 10), (1, 33), (3, 40), (long // 40 + 1, long)])


def fixed_scale(rig: Rig, kv_dtype: str, kind: str, num_kv: int, dim: int) -> Tensor | float | None:
    """A fixed scale: one a channel where that is what is tried, a number where the format needs one."""
    if kind == "channels":
        scale = 0.5 + torch.rand(num_kv, dim, generator=rig.draw, device=rig.device)
        return scale * (0.03 if kv_dtype == "int8_static" else 1)
    return 0.03 if kv_dtype == "int8_static" else None


def poisoned(stored: Stored) -> Stored:
    """Every byte garbage: not a number where the format has one."""
    stored.scales.fill_(torch.nan)
    stored.payload.fill_(torch.nan if stored.payload.is_floating_point() else
                         -128 if stored.payload.dtype == torch.int8 else 0x7F)
    return stored


def tree(num_rows: int) -> Tensor:
    """Masks of a binary tree of guesses; a single row is an ordinary one."""
    masks = [1]
    for i in range(1, num_rows):
        masks.append(masks[(i - 1) // 2] | 1 << i)
    return torch.tensor([-1] if num_rows == 1 else [m - (1 << 64) if m >= 1 << 63 else m for m in masks])


def decode_point(rig: Rig, spec: LayerSpec, lengths: Sequence[int], *kv_dtypes: str) -> dict:
    """One decode step in some formats, in turns with a copy. The first format's numbers, and the others' speeds."""
    from kvbook.kernels.paged_triton import paged_attention

    memories = {name: Memory(rig, spec, name, [(1, n) for n in lengths]) for name in kv_dtypes}
    errors = {name: memory.error(paged_attention) for name, memory in memories.items()}
    runs = {name: rig.graph(memory.run(paged_attention)) for name, memory in memories.items()}
    found = rig.samples({"copy": rig.copy, **runs})
    name, *others = kv_dtypes
    one = {name: statistics.median(found[name]) / memory.num_layers for name, memory in memories.items()}
    bandwidth = 2 * rig.source.nbytes / statistics.median(found["copy"])
    cost = predicted_decode(rig, spec, name, lengths, memories[name].num_layers)
    kv_bytes = memories[name].bytes_per_layer
    bound = max(kv_bytes / bandwidth, cost["executed_flop"] / rig.ceilings["matrix"])
    return {"seconds": one[name], **cost, "kv_bytes": kv_bytes, "share": kv_bytes / one[name] / bandwidth,
            "of_bound": bound / one[name], "error": errors[name], "num_layers": memories[name].num_layers,
            "right": all(e <= TOLERANCE[rig.dtype] for e in errors.values()), "samples": found,
            **{f"speed_{other}": one[name] / one[other] for other in others},
            "others": {other: {
                "seconds": one[other], "share": memories[other].bytes_per_layer / one[other] / bandwidth,
                "speed": one[name] / one[other], "error": errors[other],
                "predicted_seconds": predicted_decode(rig, spec, other, lengths, memories[other].num_layers)
                ["predicted_seconds"]} for other in others}}


def decode(rig: Rig, sizes: Sizes) -> Points:
    """Decode, bfloat16: share of the bandwidth of a device copy."""
    grid = sorted(itertools.product(sizes.contexts, sizes.batches, sizes.decode),
                  key=lambda p: (p[:2] != (4096, 64), sizes.contexts.index(p[0])))      # the goals' points first
    for context, batch, heads in grid:
        yield (f"{heads} × {batch} × {context:,}",
               lambda h=heads, b=batch, c=context: decode_point(rig, SPECS[h], [c] * b, "bfloat16"))


def formats(rig: Rig, sizes: Sizes) -> Points:
    """Decode in other formats beside bfloat16, 32/8 heads."""
    spec = SPECS["32/8"] if rig.real else SPECS["9/3"]
    for batch, context in sizes.ratios:
        more = ("fp8_e4m3_token", "int8", "int4") if (batch, context) == sizes.ratios[0] else ()
        yield (f"{batch} × {context:,}", lambda b=batch, c=context, m=more:
               decode_point(rig, spec, [c] * b, "bfloat16", "fp8_e4m3", *m))


def prefill(rig: Rig, sizes: Sizes) -> Points:
    """Chunked prefill over pages beside torch's flash attention over contiguous rows."""
    for heads, requests, new, n in sizes.chunks:
        yield (f"{heads} × {requests}: {new:,} of {n:,}",
               lambda h=heads, r=requests, a=new, b=n: prefill_point(rig, SPECS[h], r, a, b))


def prefill_point(rig: Rig, spec: LayerSpec, requests: int, new: int, n: int) -> dict:
    """New rows of some equal requests. Torch's kernel gets keys and values repeated for every query head beforehand."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.bias import causal_lower_right

    from kvbook.kernels.paged_triton import paged_attention

    memory = Memory(rig, spec, "bfloat16", [(new, n)] * requests, num_layers=1)
    batch, table, h = memory.batch(), memory.tables[0], spec.num_heads
    q, k, v = (rig.randn(requests, h, rows, spec.head_dim) for rows in (new, n, n))
    flash = sdpa_kernel([SDPBackend.FLASH_ATTENTION]) if rig.real else contextlib.nullcontext()
    with flash:
        bias = causal_lower_right(new, n)
        runs = {"pages": lambda: paged_attention(memory.q, memory.pages, batch, table, spec),
                "flash": lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, bias, scale=spec.scale)}
        error = memory.error(paged_attention)
        found = rig.samples(runs)
    one = {name: statistics.median(times) for name, times in found.items()}
    cost = predicted_prefill(spec, requests, new, n, rig.ceilings)
    flop = cost["flop"]
    return {"seconds": one["pages"], **cost, "error": error,
            "right": error <= TOLERANCE[rig.dtype], "beside_flash": one["flash"] / one["pages"],
            "of_matrix": flop / one["pages"] / rig.ceilings["matrix"],
            "others": {"flash": {"seconds": one["flash"], "of_matrix": flop / one["flash"] / rig.ceilings["matrix"]}},
            "samples": found}


def mixed(rig: Rig, sizes: Sizes) -> Points:
    """One long request beside many short ones, and as many equal ones with as many tokens."""
    long, short, requests = sizes.uneven
    yield (f"{long:,} + {requests - 1} × {short:,}",
           lambda: mixed_point(rig, [long] + [short] * (requests - 1)))


def mixed_point(rig: Rig, lengths: Sequence[int]) -> dict:
    """A decode step of uneven requests in turns with an even one."""
    from kvbook.kernels.paged_triton import paged_attention

    spec = SPECS["32/8"] if rig.real else SPECS["9/3"]
    total, count = sum(lengths), len(lengths)
    even = [total // count + (r < total % count) for r in range(count)]
    memories = {"uneven": Memory(rig, spec, "bfloat16", [(1, n) for n in lengths]),
                "even": Memory(rig, spec, "bfloat16", [(1, n) for n in even])}
    runs = {name: rig.graph(memory.run(paged_attention)) for name, memory in memories.items()}
    eager = {f"{name}, eager": memory.run(paged_attention, plan_once=True) for name, memory in memories.items()}
    found = rig.samples({"copy": rig.copy, **runs, **eager})
    one = {name: statistics.median(times) / memories[name.split(",")[0]].num_layers
           for name, times in found.items() if name != "copy"}
    bandwidth = 2 * rig.source.nbytes / statistics.median(found["copy"])
    error = memories["uneven"].error(paged_attention)
    return {"seconds": one["uneven"],
            "predicted_seconds": predicted_decode(rig, spec, "bfloat16", lengths, 1)["predicted_seconds"],
            "share": memories["uneven"].bytes_per_layer / one["uneven"] / bandwidth, "error": error,
            "right": error <= TOLERANCE[rig.dtype],
            "others": {"balanced": {"seconds": one["even"], "predicted_seconds": predicted_decode(
                rig, spec, "bfloat16", even, 1)["predicted_seconds"]}},
            "beside_even": one["uneven"] / one["even"],
            "beside_even_eager": one["uneven, eager"] / one["even, eager"], "samples": found}


def launches(rig: Rig, sizes: Sizes) -> Points:
    """A layer's write and attention when there is little to do: launched one by one, and replayed from a graph."""
    for batch, context in sizes.launches:
        yield f"{batch} × {context:,}", lambda b=batch, c=context: launch_point(rig, [(1, c)] * b)


def launch_point(rig: Rig, loads: Sequence[tuple[int, int]]) -> dict:
    """Wall time of a layer of a step of `Sizes.model_layers` layers, from call to result."""
    from kvbook.kernels.paged_triton import paged_attention, paged_write

    spec, layers = SPECS["9/3"], rig.sizes.model_layers
    memory = Memory(rig, spec, "bfloat16", loads, layers)
    batch, k = memory.batch(), rig.randn(len(loads), spec.num_kv_heads, spec.head_dim)
    last = torch.tensor([n - 1 for _, n in loads], device=rig.device)
    who = torch.arange(len(loads), device=rig.device)
    slots = [table[who, last // BLOCK_SIZE].long() * BLOCK_SIZE + last % BLOCK_SIZE for table in memory.tables]

    def step(tables: Sequence[Tensor]) -> None:
        fresh = replace(batch)
        for table, where in zip(tables, slots, strict=True):
            paged_write(memory.pages, k, k, where)
            paged_attention(memory.q, memory.pages, fresh, table, spec)

    graph = rig.graph(lambda: step(memory.tables))
    one_table = [memory.tables[0]] * layers                              # as in a model: it is checked once a step
    found = {"eager": rig.host_seconds(lambda: step(one_table)), "graph": rig.host_seconds(graph)}
    one = {name: statistics.median(times) / layers for name, times in found.items()}
    cost = predicted_decode(rig, spec, "bfloat16", [n for _, n in loads], layers)
    return {"seconds": one["graph"], "predicted_seconds": cost["predicted_seconds"] + rig.ceilings["kernel"],
            "eager_seconds": one["eager"], "num_layers": layers, "samples": found}


def moves(rig: Rig, sizes: Sizes) -> Points:
    """Copies of pages, and the write: share of the bandwidth of a device copy."""
    for pairs in sizes.pairs:
        yield f"copy_blocks, {pairs} pages of {sizes.model_layers} layers", lambda p=pairs: copy_point(rig, p)
    for kv_dtype in sizes.formats[0]:
        yield f"paged_write, {sizes.rows:,} rows, {kv_dtype}", lambda d=kv_dtype: write_point(rig, d)


def copy_point(rig: Rig, pairs: int) -> dict:
    """Distinct pages of every layer, the launch and the list of pairs included."""
    from kvbook.kernels.paged_triton import copy_blocks

    shape = (2 * pairs + 1, 8, BLOCK_SIZE, 128)
    tensors = [rig.randn(*shape) for _ in range(2 * rig.sizes.model_layers)]
    order = (torch.randperm(2 * pairs, generator=torch.Generator().manual_seed(0)) + 1).view(-1, 2).tolist()
    found = rig.samples({"copy": rig.copy, "pages": lambda: copy_blocks(tensors, order)})
    right = all(bool((t[[a for a, _ in order]] == t[[b for _, b in order]]).all()) for t in tensors)
    size = 2 * pairs * tensors[0][0].nbytes * len(tensors)
    return bandwidth_point(rig, found, "pages", size, right)


def write_point(rig: Rig, kv_dtype: str) -> dict:
    """New rows of one layer into slots anywhere."""
    from kvbook.kernels.paged_triton import paged_write

    spec, count = SPECS["32/8"], rig.sizes.rows
    k, v = (rig.randn(count, spec.num_kv_heads, spec.head_dim) for _ in range(2))
    codec = kv_codec(kv_dtype)
    pages, twin = (LayerPages(*(codec.empty((count // BLOCK_SIZE + 1, spec.num_kv_heads, BLOCK_SIZE), spec.head_dim,
                                            rig.device) for _ in range(2)), codec, codec) for _ in range(2))
    slots = torch.randperm(count, generator=rig.draw, device=rig.device) + BLOCK_SIZE
    found = rig.samples({"copy": rig.copy, "write": rig.graph(lambda: paged_write(pages, k, v, slots))})
    write(twin, k, v, slots)
    right = not bytes_that_differ(pages, twin)
    size = k.nbytes + v.nbytes + count * spec.bytes_per_token(kv_dtype) + slots.nbytes
    return bandwidth_point(rig, found, "write", size, right)


def bandwidth_point(rig: Rig, found: dict[str, list[float]], name: str, size: float, right: bool) -> dict:
    """Seconds and share of the copy's bandwidth, from samples of both."""
    seconds, bandwidth = statistics.median(found[name]), 2 * rig.source.nbytes / statistics.median(found["copy"])
    return {"seconds": seconds, "predicted_seconds": size / rig.ceilings["copy"] + rig.ceilings["kernel"],
            "bytes": size, "share": size / seconds / bandwidth, "right": right, "samples": found}


def model(rig: Rig, sizes: Sizes) -> Points:
    """Whole models in float32: the same tokens as on the CPU."""
    if sizes.model and sorted(cache_dir().glob(f"{sizes.model}*.gguf")):
        yield sizes.model, lambda: model_point(rig, load(dtype="float32").model)
    elif sizes.model:
        yield sizes.model, lambda: {"skipped": f"its file is not in {cache_dir().name}, the cache folder"}
    config = KNOWN_MODELS["SmolLM2-135M"]
    few = config if rig.real else replace(config, num_layers=1, vocab_size=512)

    def drawn() -> Transformer:
        torch.manual_seed(0)
        return Transformer(few).eval()
    yield "SmolLM2-135M's shape, weights drawn at random", lambda: model_point(rig, drawn())


def model_point(rig: Rig, model: Transformer) -> dict:
    """Requests that come one a step, so that chunks and single rows mix; every prompt ends up in decode."""
    from kvbook.kernels.paged_triton import copy_blocks, paged_attention, paged_write

    want, _ = generated(model, GATHER, rig.sizes)
    there = copy.deepcopy(model).to(rig.device)
    got, seconds = generated(there, Kernels("triton", paged_write, paged_attention, copy_blocks), rig.sizes)
    same = sum(a == b for mine, its in zip(got, want, strict=True) for a, b in zip(mine, its, strict=True))
    total = sum(map(len, want))
    return {"seconds": statistics.median(seconds), "same_tokens": same, "tokens": total, "right": same == total,
            "samples": {"step": seconds}}


def generated(model: Transformer, kernels: Kernels, sizes: Sizes) -> tuple[list[list[int]], list[float]]:
    """Likeliest tokens after some prompts, and seconds of each step; before the second the first page moves."""
    draw = torch.Generator().manual_seed(1)
    known = [torch.randint(0, model.config.vocab_size, (n,), generator=draw).tolist() for n in sizes.prompts]
    width = -(-(max(sizes.prompts) + sizes.tokens) // BLOCK_SIZE)
    cache = PagedKVCache(model.specs, num_blocks=len(known) * width + 1, kv_dtype="float32", device=model.device,
                         kernels=kernels)
    runner, seconds = PagedModel(model, cache), []
    order = (torch.randperm(len(known) * width, generator=draw) + 1).view(len(known), width).tolist()
    done = [0] * len(known)
    spare = len(known) * width + 1
    for step in range(len(known) + sizes.tokens - 1):
        copies = [(order[0][0], spare)] if step == 1 else []
        order[0][0] = spare if step == 1 else order[0][0]
        rows = [StepRows(str(r), done[r], known[r][done[r]:], [order[r][:-(-len(known[r]) // BLOCK_SIZE)]])
                for r in range(len(known)) if r <= step < r + sizes.tokens]
        start = time.perf_counter()
        said = runner.execute(Step(rows, copies)).sampled                # its tokens are on the host: it has finished
        seconds.append(time.perf_counter() - start)
        for name, tokens in said.items():
            done[int(name)] = len(known[int(name)])
            known[int(name)] += tokens
    return [k[n:] for k, n in zip(known, sizes.prompts, strict=True)], seconds


GROUPS = {"ceilings": (ceilings, 20), "correctness": (correctness, 100), "decode": (decode, 80),
          "formats": (formats, 25), "prefill": (prefill, 25), "mixed": (mixed, 10), "launches": (launches, 10),
          "moves": (moves, 20), "model": (model, 40)}
"""What is measured, in this order, and after how many seconds no further point of a group is begun."""

GOALS = (
    ("decode, 64 × 4,096, heads 32/8: share of copy", "decode", "32/8 × 64 × 4,096", "share", 0.85, 1),
    ("fp8, 64 × 4,096: speed beside bfloat16", "formats", "64 × 4,096", "speed_fp8_e4m3", 1.7, 1),
    ("MLA decode, 64 × 4,096: share of the bound", "decode", "MLA × 64 × 4,096", "of_bound", 0.6, 1),
    ("prefill of 8,192 rows: speed beside flash", "prefill", "32/8 × 1: 8,192 of 8,192", "beside_flash", 0.8, 1),
    ("32,768 + 63 × 500: time beside balanced", "mixed", "32,768 + 63 × 500", "beside_even", 1.15, -1))
"""Text, group, point, figure, what is expected, and whether more (1) or less (-1) is better."""


# Running them.


def clean(value):
    """A value as JSON has it: numbers that are not finite become None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): clean(item) for key, item in value.items()}
    return [clean(item) for item in value] if isinstance(value, list | tuple) else value


def is_lost(rig: Rig) -> bool:
    """Whether an error has left the device unusable for this process."""
    try:
        rig.wait()
        torch.zeros(1, device=rig.device).item()
    except RuntimeError:
        return True
    return False


def run_group(rig: Rig, name: str, tell: Callable[[str], object], skip: int = 0) -> dict:
    """One group's points from number `skip` on. What fails is told and kept in the point's place; the rest goes on."""
    group, limit = GROUPS[name]
    tell(f"\n{group.__doc__.splitlines()[0]}")
    start, points = time.perf_counter(), {}
    for index, (point, measured) in enumerate(group(rig, rig.sizes)):
        if index < skip:
            continue
        begin = time.perf_counter()
        if begin - start > limit and rig.real:
            points[point] = {"skipped": f"the group's {limit} s are over"}
        else:
            points[point] = attempt(measured)
        points[point]["took_seconds"] = round(time.perf_counter() - begin, 3)
        tell(line(point, points[point]))
        if "failed" in points[point] and is_lost(rig):
            tell("  the device is lost for this process; another goes on")
            return {"points": points | apart(rig, name, tell, index + 1)["points"], "lost": True}
    return {"points": points, "seconds": round(time.perf_counter() - start, 1)}


def attempt(measured: Callable[[], dict]) -> dict:
    """A point, or why there is none."""
    try:
        with torch.inference_mode():
            return clean(measured())
    except MemoryError as error:
        return {"skipped": str(error)}
    except torch.OutOfMemoryError as error:
        return {"skipped": f"out of memory: {str(error).splitlines()[0][:120]}"}
    except Exception as error:
        text = next(iter(str(error).strip().splitlines()), "")
        return {"failed": f"{type(error).__name__}: {text[:300]}"}


def apart(rig: Rig, name: str, tell: Callable[[str], object], skip: int = 0) -> dict:
    """A group's points from number `skip` on, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        command = [sys.executable, str(Path(__file__).resolve()), "--only", name, "--skip", str(skip), "--json",
                   str(path), "--ceilings", json.dumps(rig.ceilings), *([] if rig.real else ["--rehearse"])]
        limit = GROUPS[name][1] + 60
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
            found = json.loads(path.read_text())["groups"][name]
            for text, entry in found["points"].items():
                tell(line(text, entry))
            return found
        except subprocess.TimeoutExpired:
            reason = f"no end after {limit} s"
        except (OSError, ValueError, KeyError):
            reason = (done.stderr.strip().splitlines() or ["no word of it"])[-1][:300]
        failed = {"failed": reason}
        tell(line(name, failed))
        return {"points": {f"{name}, in another process": failed}}


def measure(rig: Rig | None = None, only: Sequence[str] = (), skip: int = 0,
            tell: Callable[[str], object] | None = None, save: Path | None = None) -> dict:
    """Everything, as numbers that JSON can hold.

    Args:
        rig: the device; by default the GPU, at full sizes.
        only: groups; by default all.
        skip: points of the first group that are left out.
        tell: is given every line as soon as it is known; by default they are printed.
        save: where what is known is written after each group.

    Returns:
        ``groups`` (name → points → name → numbers, in seconds and bytes, samples included), ``ceilings``,
        ``hardware`` and ``versions``.
    """
    tell = tell or (lambda text: print(text, flush=True))
    rig, lost = rig or Rig(), False
    found = {"hardware": hardware_line(describe_hardware()), "versions": describe_versions(), "groups": {}}
    start = time.perf_counter()
    for number, name in enumerate(only or GROUPS):
        first = skip if number == 0 else 0
        found["groups"][name] = entry = apart(rig, name, tell, first) if lost else run_group(rig, name, tell, first)
        lost = lost or entry.get("lost", False)
        found |= {"ceilings": clean(rig.ceilings), "seconds": round(time.perf_counter() - start, 1)}
        if save:
            save.write_text(json.dumps(found, allow_nan=False, indent=1), encoding="utf-8")
    return found


# What is printed.

FIGURES = {"share": "{:6.1%} of copy", "of_bound": "{:6.1%} of the bound", "speed": "speed × {:.2f}",
           "beside_flash": "× {:.2f} flash's speed", "of_matrix": "{:.1%} of the matrix rate",
           "beside_even": "× {:.2f} the balanced time", "beside_even_eager": "(eager × {:.2f})",
           "copy_bytes_per_s": "copy {:,.0f} B/s", "read_bytes_per_s": "read {:,.0f} B/s",
           "flop_per_s": "{:,.0f} FLOP/s", "seconds_per_kernel": "{:.2e} s a kernel", "l2_bytes": "L2 {:,} B",
           "error": "error {:.1e}", "worst": "(largest {:.1e})", "bytes_differ": "{} bytes differ",
           "same_tokens": "{} tokens equal"}


def line(name: str, point: dict) -> str:
    """One point as a line."""
    for problem in ("skipped", "failed"):
        if problem in point:
            return f"  {name:40} {problem}: {point[problem]}"
    micro = lambda key: f"{point[key] * 1e6:10,.1f} µs" if point.get(key) is not None else " " * 13
    predicted = f"predicted {micro('predicted_seconds')}" if "predicted_seconds" in point else " " * 23
    times = f"{micro('seconds')} {predicted}" if "seconds" in point else ""
    eager = f"  eager {micro('eager_seconds')}" if "eager_seconds" in point else ""
    words = [how.format(point[key]) for key, how in FIGURES.items() if point.get(key) is not None]
    wrong = "" if point.get("right", True) else "  WRONG"
    lines = [f"  {name:40} {times}{eager}  {'  '.join(words)}{wrong}"]
    return "\n".join(lines + [line(f"    … {other}", its) for other, its in point.get("others", {}).items()])


def problems(found: dict) -> list[str]:
    """What failed or was wrong."""
    return [f"{group}: {name}: {point.get('failed', 'wrong')}" for group, entry in found["groups"].items()
            for name, point in entry["points"].items() if "failed" in point or not point.get("right", True)]


def table(found: dict) -> list[str]:
    """The lines to print last: every group in short, then the goals."""
    lines = [f"{found['hardware']} · torch {found['versions'].get('torch')} · triton {found['versions'].get('triton')} "
             f"· {found.get('seconds', 0):.0f} s"]
    for group, entry in found["groups"].items():
        lines.append(f"\n{GROUPS[group][0].__doc__.splitlines()[0]}")
        points = entry["points"]
        if group != "correctness":
            lines += [line(name, point) for name, point in points.items()]
            continue
        right = sum(point.get("right", False) for point in points.values())
        lines.append(f"  {right} of {len(points)} variants right")
        for queries in sorted({point["queries"] for point in points.values() if "queries" in point}):
            worst = max((p for p in points.items() if p[1].get("queries") == queries),
                        key=lambda p: math.inf if p[1]["error"] is None else p[1]["error"])
            lines.append(f"  {queries} queries, worst: {line(*worst).strip()}")
        lines += [line(name, point) for name, point in points.items() if not point.get("right", False)]
    lines.append("\nGoals")
    for text, group, name, figure, goal, sign in GOALS:
        value = found["groups"].get(group, {"points": {}})["points"].get(name, {}).get(figure)
        verdict = "not measured" if value is None else "met" if (value - goal) * sign >= 0 else \
            "outside the expected band"
        lines.append(f"  {text:45} {'at least' if sign > 0 else 'at most':8} {goal:.2f}  "
                     f"{'    –' if value is None else f'{value:5.2f}'}  {verdict}")
    return lines + [f"  problem: {text}" for text in problems(found)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, or take what is recorded, and print the table; 1 where something failed or was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=GROUPS, default=(), help="groups; by default all")
    parser.add_argument("--skip", type=int, default=0, help="points of the first group that are left out")
    parser.add_argument("--json", type=Path, help="where the numbers go, after each group")
    parser.add_argument("--recorded", metavar="NAME", help="print the table of what is recorded under this name")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes, on the CPU, interpreted")
    parser.add_argument("--ceilings", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.recorded:
        record = load_evidence(options.recorded)
        if record is None:
            print(f"Nothing is recorded as {options.recorded!r}.")
            return 0
        found = record["result"]
    elif options.rehearse or torch.cuda.is_available():
        rig = Rig("cpu", TINY, options.ceilings) if options.rehearse else Rig("cuda", FULL, options.ceilings)
        found = measure(rig, options.only, options.skip, save=options.json)
    else:
        print("torch finds no GPU here: there is nothing to measure.")
        return 0
    print("\n" + "\n".join(table(found)), flush=True)
    return int(bool(problems(found)))


if __name__ == "__main__":
    sys.exit(main())
