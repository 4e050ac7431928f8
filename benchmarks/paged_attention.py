"""Decode attention over pages on this CPU, beside what could be used instead: `make bench` runs it.

The shapes are the default model's: 9 query heads, 3 key-value heads of 64. Every comparison is one interleaved run;
five layers or more take turns, as in a model, so that no cache holds what is asked for. Numbers are ratios of
medians: shares of the bandwidth at which one long array is read with the same threads, or speeds beside another's.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from tqdm import tqdm

from kvbook.compute.checkpoint import load
from kvbook.compute.kv_cache import GATHER, LayerPages, PagedKVCache, gathered_attention, kernels_for
from kvbook.compute.model import Batch, ContiguousCache
from kvbook.compute.quantization import kv_codec
from kvbook.control.config import KV_FORMATS, CacheSpec, LayerSpec, layer_groups
from kvbook.kernels.paged_cpu import paged_attention
from kvbook.lab.hardware import interleaved_seconds
from kvbook.lab.recorded import describe_hardware, hardware_line

SPEC = LayerSpec(num_heads=9, num_kv_heads=3, head_dim=64, value_dim=64, scale=64**-0.5)
REPEATS = 11
BYTES_IN_TURN = 256 * 2**20
"""Pages of all layers together; several times what a cache of this class of machines holds."""


class Layers:
    """Layers of pages with random rows, and a decode step that reads them.

    Args:
        lengths: tokens in memory, for each request.
        kv_dtype: name of a format.
        block_size: tokens in a page.
        shuffled: whether the pages of a request lie anywhere, or one behind the other.
    """

    def __init__(self, lengths: list[int], kv_dtype: str = "bfloat16", block_size: int = 16, shuffled: bool = True):
        draw = torch.Generator().manual_seed(0)
        counts = [-(-n // block_size) for n in lengths]
        order = (torch.randperm(sum(counts), generator=draw) if shuffled else torch.arange(sum(counts))) + 1
        self.codec = kv_codec(kv_dtype, 0.05 if kv_dtype == "int8_static" else None)
        group = CacheSpec(tuple(layer_groups([SPEC])), kv_dtype, block_size)
        self.bytes_per_layer = sum(lengths) * group.bytes_per_token
        first = LayerPages(*(self._random(sum(counts) + 1, block_size, draw) for _ in range(2)), self.codec, self.codec)
        self.pages = [first, *(self._copy(first) for _ in range(max(5, -(-BYTES_IN_TURN // self.bytes_per_layer)) - 1))]
        self.batch = Batch.build([[0]] * len(lengths), [n - 1 for n in lengths],
                                 [table.tolist() for table in order.split(counts)], block_size)
        self.q = torch.randn(len(lengths), SPEC.num_heads, SPEC.head_dim, generator=draw)

    def _random(self, num_pages: int, block_size: int, draw: torch.Generator):
        stored = self.codec.empty((num_pages, SPEC.num_kv_heads, block_size), SPEC.head_dim)
        for low in range(0, num_pages, 1024):
            rows = torch.randn(min(1024, num_pages - low), *stored.payload.shape[1:3], SPEC.head_dim, generator=draw)
            for whole, part in zip(stored, self.codec.encode(rows), strict=True):
                whole[low : low + 1024] = part
        return stored

    @staticmethod
    def _copy(pages: LayerPages) -> LayerPages:
        return pages._replace(**{name: type(stored)(*(t.clone() for t in stored))
                                 for name, stored in (("keys", pages.keys), ("values", pages.values))})

    def run(self, attention: Callable = paged_attention) -> None:
        """One decode step's attention in every layer."""
        for pages in self.pages:
            attention(self.q, pages, self.batch, self.batch.block_table[0], SPEC)

    def seconds_of_one(self, seconds: list[float]) -> float:
        """Median for one layer, from samples of `run`."""
        return statistics.median(seconds) / len(self.pages)


def measured(runs: Mapping[str, Layers | Callable], kernels: Mapping[str, Callable] | None = None) -> dict[str, dict]:
    """Time runs in turns, with a long read between them.

    Returns:
        for each, median seconds of one layer, the share of the read bandwidth, and the samples of both.
    """
    long = torch.ones(BYTES_IN_TURN // 4)
    kernels = kernels or {}
    calls = {name: functools.partial(layers.run, kernels.get(name, paged_attention)) for name, layers in runs.items()}
    seconds = interleaved_seconds({"read": long.sum, **calls}, REPEATS)
    bandwidth = BYTES_IN_TURN / statistics.median(seconds["read"])
    one = {name: layers.seconds_of_one(seconds[name]) for name, layers in runs.items()}
    return {name: {"seconds": one[name], "share": layers.bytes_per_layer / one[name] / bandwidth,
                   "samples": {"read": seconds["read"], "layers": seconds[name]}} for name, layers in runs.items()}


def goal() -> dict[str, dict]:
    """32 requests of 2,048 tokens in bfloat16."""
    return measured({"32 × 2,048 bfloat16": Layers([2048] * 32)})


def formats() -> dict[str, dict]:
    """8 requests of 8,192 tokens in every format; each beside bfloat16."""
    found = {}
    for name in KV_FORMATS:
        pair = measured({"bfloat16": Layers([8192] * 8), name: Layers([8192] * 8, name)})
        found[name] = pair[name] | {"speed": pair["bfloat16"]["seconds"] / pair[name]["seconds"]}
    return found


def layouts() -> dict[str, dict]:
    """The same kernel over one piece a request, over pages in order, and over pages anywhere."""
    found = measured({"one piece": Layers([2048] * 32, block_size=2048, shuffled=False),
                      **{f"pages of {size}": Layers([2048] * 32, block_size=size) for size in (128, 16, 8, 1)},
                      "pages of 16 in order": Layers([2048] * 32, shuffled=False)})
    one_piece = found["one piece"]["seconds"]
    return {name: entry | {"slower": entry["seconds"] / one_piece - 1} for name, entry in found.items()}


def gathered_sdpa(q, pages: LayerPages, batch: Batch, table, spec: LayerSpec):
    """What torch offers over pages: gather a request's rows, then its fused attention."""
    out = []
    for r, num_tokens in enumerate(batch.seq_lens.tolist()):
        blocks = table[r].long()
        k, v = (stored.payload[blocks].transpose(0, 1).flatten(1, 2)[None, :, :num_tokens] for stored in pages[:2])
        rows = q[r].unflatten(0, (spec.num_kv_heads, -1)).to(k.dtype)[None]
        out.append(F.scaled_dot_product_attention(rows, k, v, scale=spec.scale).flatten(1, 2))
    return torch.cat(out)


def contiguous_sdpa(q, pages: LayerPages, batch: Batch, table, spec: LayerSpec):
    """Torch's fused attention where no page is: pages of one piece a request, in order, all of one length."""
    k, v = (stored.payload[1:] for stored in pages[:2])
    rows = q.unflatten(1, (spec.num_kv_heads, -1)).to(k.dtype)
    return F.scaled_dot_product_attention(rows, k, v, scale=spec.scale).flatten(1, 2)


def peers() -> dict[str, dict]:
    """What people would use instead, on the same machine."""
    runs = {"this kernel": Layers([2048] * 8), "gather, then torch's attention": Layers([2048] * 8),
            "torch's attention, one piece": Layers([2048] * 8, block_size=2048, shuffled=False),
            "gather, then the reference": Layers([2048] * 8)}
    found = measured(runs, {"gather, then torch's attention": gathered_sdpa,
                            "torch's attention, one piece": contiguous_sdpa,
                            "gather, then the reference": gathered_attention})
    ours = found["this kernel"]["seconds"]
    return {name: entry | {"speed": ours / entry["seconds"]} for name, entry in found.items()}


def batches() -> dict[str, dict]:
    """One long request, many, and a long one beside many short."""
    cases = {"1 × 2,048": [2048], "1 × 32,768": [32_768], "4 × 8,192": [8192] * 4, "64 × 512": [512] * 64,
             "1 × 32,768 beside 63 × 512": [32_768] + [512] * 63}
    found = {}
    for name, lengths in cases.items():
        found |= measured({name: Layers(lengths)})
    return found


def model() -> dict[str, dict]:
    """One decode step of the whole default model, 16 requests of 1,024 tokens, beside chapter 0's contiguous cache."""
    model, _ = load(dtype="bfloat16")
    people, length = 16, 1024
    tables = torch.randperm(people * length // 16, generator=torch.Generator().manual_seed(0)).view(people, -1) + 1
    contiguous = ContiguousCache(model.specs, people, length)
    steps = {"contiguous, chapter 0": (contiguous, length, [[r] for r in range(people)])}
    for name, kv_dtype, kernels in (("pages, this kernel", "bfloat16", kernels_for(model.dtype)),
                                    ("pages, this kernel, int8", "int8", kernels_for(model.dtype)),
                                    ("pages, gathered", "bfloat16", GATHER)):
        cache = PagedKVCache(model.specs, num_blocks=tables.numel(), kv_dtype=kv_dtype, kernels=kernels)
        steps[name] = cache, 16, tables.tolist()
    runs = {}
    for name, (cache, block_size, rows) in steps.items():
        batch = Batch.build([[5]] * people, [length - 1] * people, rows, block_size)
        runs[name] = functools.partial(model, batch.token_ids, batch.positions, cache.view(batch))
    with torch.inference_mode():
        seconds = {name: statistics.median(times) for name, times in interleaved_seconds(runs, REPEATS).items()}
    base, *_ = seconds.values()
    return {name: {"seconds": each, "speed": base / each} for name, each in seconds.items()}


GROUPS = {"goal": goal, "formats": formats, "layouts": layouts, "peers": peers, "batches": batches, "model": model}


def check() -> None:
    """All that is timed says the same."""
    for block_size, attention in ((16, gathered_sdpa), (40, contiguous_sdpa)):
        layers = Layers([40, 40], block_size=block_size, shuffled=False)
        pages, table = layers.pages[0], layers.batch.block_table[0]
        want = gathered_attention(layers.q, pages, layers.batch, table, SPEC)
        for kernel in (paged_attention, attention):
            got = kernel(layers.q, pages, layers.batch, table, SPEC)
            torch.testing.assert_close(got.float(), want, atol=2e-2, rtol=2e-2)


def measure() -> dict[str, dict[str, dict]]:
    """Everything, as numbers: group → case → seconds of a layer, share of the read bandwidth, and more."""
    check()
    return {name: run() for name, run in tqdm(GROUPS.items(), desc="paged attention", unit="group")}


def main() -> None:
    """Print the tables."""
    print(hardware_line(describe_hardware()), f"· {torch.get_num_threads()} threads")
    for group, cases in measure().items():
        print(f"\n{GROUPS[group].__doc__.splitlines()[0]}")
        for name, entry in cases.items():
            more = "".join(f"  {text} {entry[key]:{how}}" for key, text, how in (
                ("speed", "speed ×", ".2f"), ("slower", "slower by", ".0%")) if key in entry)
            share = f"{entry['share']:6.1%} of the read bandwidth" if "share" in entry else ""
            print(f"  {name:32} {share}{more}")


if __name__ == "__main__":
    main()
