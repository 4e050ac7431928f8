"""Compile the Triton kernels for chips that are not here, and read what the compiler made of them.

    python benchmarks/gpu_binaries.py                 every kernel, for every chip: a table, some minutes
    python benchmarks/gpu_binaries.py --quick         the few that decide most, in seconds
    python benchmarks/gpu_binaries.py sm_90 decode    those whose description has all of these words
    python benchmarks/gpu_binaries.py --json          the records

It must run as a program of its own: in a process in which Triton interprets its kernels nothing can be compiled. The
status is 1 where a promise of `broken_promise` does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)                    # before Triton is imported

import torch

try:
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
except ModuleNotFoundError:
    print("Triton is not installed here (it has wheels for Linux only): nothing can be compiled.")
    sys.exit()

from kvbook.control.config import LayerSpec
from kvbook.kernels import paged_triton

SPECS = {
    "SmolLM2": LayerSpec(9, 3, 64, 64, 64 ** -0.5),
    "Llama 3 8B": LayerSpec(32, 8, 128, 128, 128 ** -0.5),
    "Llama 3 70B": LayerSpec(64, 8, 128, 128, 128 ** -0.5),
    "Gemma 2 window": LayerSpec(16, 8, 256, 256, 256 ** -0.5, 4096, 50.0),
    "Gemma 2": LayerSpec(16, 8, 256, 256, 256 ** -0.5, None, 50.0),
    "DeepSeek-V3": LayerSpec(128, 1, 576, 512, 192 ** -0.5, value_in_key=True),
}
"""Layers whose shapes are compiled, by model."""

QUICK = ("sm_80 Llama 3 8B bfloat16 decode", "sm_90 Llama 3 8B bfloat16 decode", "sm_90 Llama 3 8B bfloat16 chunk",
         "sm_90 DeepSeek-V3 bfloat16 decode", "sm_100 SmolLM2 bfloat16 chunk", "gfx942 Llama 3 8B bfloat16 decode")
"""Which kernels `--quick` compiles."""

_ELEMENTS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_PAYLOADS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int8": "i8", "int8_static": "i8"}


def build(kernel, types: dict[str, str], constants: dict, chip: paged_triton.Chip, num_warps: int, num_stages: int,
          alignment: int = 16):
    """Compile one kernel; nothing is known of numbers.

    Args:
        kernel: a `triton.jit` function.
        types: Triton's names of the types of its arguments; those that are not there are constants.
        constants: their values.
        chip: for which.
        num_warps, num_stages: as at a launch.
        alignment: of pointers, bytes; torch's have 16 and more.

    Returns:
        What Triton compiled, and how many seconds it took.
    """
    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    pointers = [i for i, name in enumerate(names) if signature[name].startswith("*")]
    aligned = {(i,): [["tt.divisibility", alignment]] for i in pointers}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()}, aligned)
    target = GPUTarget(chip.backend, chip.arch, lanes(chip))
    begin = time.perf_counter()
    compiled = triton.compile(source, target=target, options={"num_warps": num_warps, "num_stages": num_stages})
    return compiled, time.perf_counter() - begin


def lanes(chip: paged_triton.Chip) -> int:
    """Threads of a warp."""
    return 64 if chip.backend == "hip" else 32


def _dump(cubin: bytes, option: str) -> str:
    """What the tool in Triton's wheel says about a cubin."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        return subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout


def read_cuda(compiled) -> dict:
    """Registers, stack, spills, loads by width, and tensor-core instructions of a cubin."""
    cubin = compiled.asm["cubin"]
    usage = _dump(cubin, "--dump-resource-usage")
    ops = re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", _dump(cubin, "--dump-sass"), re.M)
    loads = Counter()
    for op in ops:
        head, *rest = op.split(".")
        if head in ("LDG", "LDGSTS"):
            loads[f"{head}.{next((w for w in ('128', '64', 'U16', 'U8', 'S16', 'S8') if w in rest), '32')}"] += 1
    heads = [op.split(".")[0] for op in ops]
    tensor = Counter(head for head in heads if re.fullmatch(r"HMMA|IMMA|QMMA|HGMMA|QGMMA|IGMMA|UTC\w*MMA", head))
    return {"registers": int(re.search(r"REG:(\d+)", usage)[1]), "stack": int(re.search(r"STACK:(\d+)", usage)[1]),
            "spills": sum(head in ("STL", "LDL") for head in heads), "loads": dict(loads), "tensor": dict(tensor),
            "instructions": len(ops)}


def read_hip(compiled) -> dict:
    """The same of an amdgcn assembly."""
    text = compiled.asm["amdgcn"]
    number = lambda name: int(re.search(rf"\.{name}:\s+(\d+)", text)[1])
    ops = re.findall(r"^\s+([a-z]\w+)\b", text, re.M)
    return {"registers": number("vgpr_count"), "stack": number("private_segment_fixed_size"),
            "spills": number("vgpr_spill_count") + sum(op.startswith("scratch_") for op in ops),
            "loads": dict(Counter(op for op in ops if re.match(r"(global|buffer)_load_", op))),
            "tensor": dict(Counter("v_mfma" for op in ops if op.startswith("v_mfma"))), "instructions": len(ops)}


def read(compiled, chip: paged_triton.Chip) -> dict:
    """What `read_cuda` or `read_hip` finds."""
    return read_cuda(compiled) if chip.backend == "cuda" else read_hip(compiled)


def wide_share(compiled, loads: dict[str, int], num_threads: int, payload: str) -> float:
    """Of the bytes of queries, keys and values that are loaded, the share that is fetched 16 at a time.

    Triton's own form of the program lists the tiles that are loaded; how many 16-byte loads a thread needs for them
    follows from their sizes. As many as that must be in the binary.

    Args:
        compiled: of `attend_kernel`.
        loads: by width, as `read_cuda` and `read_hip` find them.
        num_threads: of a program.
        payload: Triton's name of the type of stored elements.
    """
    tiles = re.findall(r"(?:tt\.load|async_copy_global_to_local) .*?: tensor<(\d+)x(\d+)x!tt\.ptr<(\w+)>",
                       compiled.asm["ttgir"])
    sizes = {"i8": 1, "u8": 1, "f16": 2, "bf16": 2, "f32": 4}
    scales = "f16" if payload in ("i8", "u8") else None                  # two-dimensional as well, for int4
    size = sum(int(m) * int(n) * sizes[kind] for m, n, kind in tiles if kind != scales)
    wide = sum(count for name, count in loads.items() if "128" in name or "dwordx4" in name)
    return min(1.0, wide * 16 * num_threads / size)


def programs_at_once(record: dict) -> int:
    """How many programs a multiprocessor holds: registers, shared memory and threads allow so many."""
    warps, registers = record["warps"], -(-record["registers"] // 8) * 8
    if record["chip"].startswith("gfx"):                                 # four units with 512 registers a lane each
        return min(4 * min(8, 512 // registers) // warps, record["limit"] // max(1, record["shared"]))
    return min(65_536 // (32 * warps * registers), (record["limit"] + 1024) // (record["shared"] + 1024), 64 // warps)


def attend_types(kv_dtype: str, dtype: torch.dtype) -> dict[str, str]:
    """Types of `attend_kernel`'s arguments for a format and queries of a dtype."""
    q, payload = "*" + _ELEMENTS[dtype], "*" + _PAYLOADS.get(kv_dtype, "u8")
    return {"q": q, "keys": payload, "key_scales": "*fp16", "values": payload, "value_scales": "*fp16",
            **dict.fromkeys(("key_factor", "value_factor", "mixed", "stats"), "*fp32"),
            **dict.fromkeys(("table", "items", "totals", "bounds"), "*i32"), "trees": "*i64", "out": q,
            **dict.fromkeys(("which", "table_stride", "window"), "i32"),
            **dict.fromkeys(("scale", "value_scale", "cap"), "fp32")}


def attend_record(chip: str, model: str, kv: str = "bfloat16", form: str = "decode", dtype: str = "bfloat16",
                  block_size: int = 16, tree: bool = False) -> dict:
    """What became of `attend_kernel` for one chip, shape and format.

    Args:
        chip: a name in `paged_triton.CHIPS`.
        model: a name in `SPECS`.
        kv: name of a format.
        form: "decode" or "chunk".
        dtype: of the queries.
        block_size: tokens in a page.
        tree: whether there are trees.
    """
    where, kind = paged_triton.CHIPS[chip], getattr(torch, dtype)
    chosen = paged_triton.variant(where, SPECS[model], kv, kind, block_size, form == "decode", tree=tree)
    compiled, seconds = build(paged_triton.attend_kernel, attend_types(kv, kind), chosen.constants, where,
                              chosen.num_warps, chosen.num_stages)
    found, payload = read(compiled, where), _PAYLOADS.get(kv, "u8")
    wide = wide_share(compiled, found["loads"], chosen.num_warps * lanes(where), payload)
    record = {"chip": chip, "model": model, "kv": kv, "form": form, "tile": [chosen.constants[k] for k in "MN"],
              "block_size": block_size, "tree": tree, "shared": compiled.metadata.shared, "limit": where.shared,
              "warps": chosen.num_warps, "seconds": seconds, "wide": wide, **found}
    return {**record, "at_once": programs_at_once(record)}


def _write(spec, kv):
    payload, kind = "*" + _PAYLOADS.get(kv, "u8"), paged_triton.KINDS.get(kv, "float").removesuffix("_static")
    types = {"k": "*bf16", "v": "*bf16", "keys": payload, "key_scales": "*fp16", "values": payload,
             "value_scales": "*fp16", "key_factor": "*fp32", "value_factor": "*fp32", "slots": "*i64",
             "key_number": "fp32", "value_number": "fp32",
             **dict.fromkeys(("num_rows", "num_slots", "k_stride", "v_stride"), "i32")}
    columns = triton.next_power_of_2(max(spec.head_dim, 32))
    rows = max(1, 4096 * 64 // columns ** 2 if kind == "int4" else 2048 // columns)
    return paged_triton.write_kernel, types, {
        "NUM_KV": spec.num_kv_heads, "DIM": spec.head_dim, "VALUE_DIM": spec.value_dim, "COLUMNS": columns,
        "VALUE_COLUMNS": triton.next_power_of_2(max(spec.value_dim, 32)), "BLOCK_SIZE": 16, "ROWS": rows,
        "FORMAT": kind, "LARGEST": 448.0, "CHANNELS": False, "TOKEN_SCALES": kv == "int8"}


def _merge(spec, kv):
    types = {"merges": "*i32", "totals": "*i32", "mixed": "*fp32", "stats": "*fp32", "out": "*bf16"}
    return paged_triton.merge_kernel, types, {
        "NUM_HEADS": spec.num_heads, "VALUE_DIM": spec.value_dim, "COLUMNS": triton.next_power_of_2(spec.value_dim),
        "MAX_PARTS": paged_triton.PARTS, "AT_ONCE": 8}


def _plan(spec, kv):
    types = {**dict.fromkeys(("bounds", "seq_lens", "single", "chunked", "merges", "totals"), "*i32"),
             "num_requests": "i32", "window": "i32"}
    return paged_triton.plan_kernel, types, {"STEP": 32, "PART": 512, "MAX_PARTS": paged_triton.PARTS, "LIMIT": 32,
                                             "TREE": False, "REQUESTS": paged_triton.REQUESTS}


def _copy(spec, kv):
    types = {"addresses": "*i64", "pairs": "*i64", "num_pairs": "i32", "page": "i32"}
    return paged_triton.copy_kernel, types, {"ELEMENT": tl.int64, "COUNT": 512}


def _teaching(spec, kv):
    types = {**dict.fromkeys(("q", "keys", "values", "out"), "*bf16"), "table": "*i32", "seq_lens": "*i32",
             "scale": "fp32", "max_blocks": "i32"}
    group = spec.num_heads // spec.num_kv_heads
    return paged_triton.decode_kernel, types, {"GROUP": group, "NUM_KV": spec.num_kv_heads, "BLOCK_SIZE": 16,
                                               "DIM": spec.head_dim, "ROWS": triton.next_power_of_2(group)}


OTHERS = {"write": _write, "merge": _merge, "plan": _plan, "copy": _copy, "teaching": _teaching}
"""Kernels around attention: what `build` needs of each, from a layer and a format."""


def other_record(chip: str, form: str, kv: str = "bfloat16", model: str = "Llama 3 8B") -> dict:
    """The same of one of `OTHERS`."""
    where = paged_triton.CHIPS[chip]
    compiled, seconds = build(*OTHERS[form](SPECS[model], kv), where, 4, 3)
    return {"chip": chip, "model": model, "kv": kv, "form": form, "shared": compiled.metadata.shared,
            "limit": where.shared, "seconds": seconds, **read(compiled, where)}


def cases() -> Iterator[dict]:
    """Everything that is compiled, as arguments of `attend_record` and `other_record`."""
    for chip in paged_triton.CHIPS:
        for form in ("decode", "chunk"):
            for model in SPECS:
                if (model, form) != ("Gemma 2 window", "decode"):       # in decode a window is the plan's business
                    yield {"chip": chip, "model": model, "kv": "bfloat16", "form": form}
            for kv in ("fp8_e4m3", "int8", "int4"):
                yield {"chip": chip, "model": "Llama 3 8B", "kv": kv, "form": form}
            yield {"chip": chip, "model": "DeepSeek-V3", "kv": "fp8_e4m3", "form": form}
            yield {"chip": chip, "model": "SmolLM2", "kv": "float32", "form": form, "dtype": "float32"}
            yield {"chip": chip, "model": "Llama 3 8B", "kv": "bfloat16", "form": form, "block_size": 128}
        yield {"chip": chip, "model": "Llama 3 8B", "kv": "bfloat16", "form": "chunk", "tree": True}
        for kv in ("bfloat16", "fp8_e4m3", "int8", "int4"):
            yield {"chip": chip, "model": "Llama 3 8B", "kv": kv, "form": "write"}
        for form, model in (("plan", "Llama 3 8B"), ("copy", "Llama 3 8B"), ("teaching", "Llama 3 8B"),
                            ("merge", "Llama 3 8B"), ("merge", "DeepSeek-V3")):
            yield {"chip": chip, "model": model, "kv": "bfloat16", "form": form}


def describe(case: dict) -> str:
    """A case in words; plain ones are chip, model, format, form."""
    more = [f"pages of {case['block_size']}" if case.get("block_size", 16) != 16 else "",
            "tree" if case.get("tree") else ""]
    return " ".join(filter(None, [case["chip"], case["model"], case["kv"], case["form"], *more]))


def broken_promise(record: dict) -> str | None:
    """What a kernel breaks of what is promised of all, or None.

    No spills and no stack; shared memory within the chip's limit; of attention, products on the tensor cores and all
    queries, keys and values loaded 16 bytes at a time. Two exceptions, where a tile is less than 16 bytes for each
    thread: of latents the 64 channels with positions (a ninth), and int4 on gfx942.
    """
    if record["spills"] or record["stack"]:
        return f"{record['spills']} spills, {record['stack']} B of stack"
    if record["shared"] > record["limit"]:
        return f"{record['shared']} bytes of shared memory, {record['limit']} there are"
    if record["form"] in OTHERS:
        return None
    if not record["tensor"]:
        return "no tensor-core instruction"
    least = 8 / 9 if record["model"] == "DeepSeek-V3" else 1
    if (record["chip"], record["kv"]) == ("gfx942", "int4"):
        least = 0.75
    if record["wide"] < least:
        return f"{record['wide']:.0%} of queries, keys and values are loaded 16 bytes at a time"
    return None


def line(record: dict) -> str:
    """A record as a line of the table."""
    counts = lambda found: " ".join(f"{name}:{n}" for name, n in sorted(found.items()))
    tile = "×".join(map(str, record.get("tile", ())))
    at_once = f"{record['at_once']} at once" if tile else ""
    return (f"{describe(record):52} {tile:7} {record['registers']:3} registers {record['spills']:2} spills "
            f"{record['shared']:7,} B shared {at_once:9} {record['seconds']:5.1f} s  "
            f"{record.get('wide', 1):4.0%} wide  {counts(record['tensor'])}  {counts(record['loads'])}")


def main() -> int:
    """Compile, print, and say what does not hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="compile only kernels whose description has all of these")
    parser.add_argument("--quick", action="store_true", help="compile only the few that decide most")
    parser.add_argument("--json", action="store_true", help="print the records")
    wanted = parser.parse_args()
    records, broken = [], []
    with tempfile.TemporaryDirectory() as folder:            # so that seconds are those of compiling
        triton.knobs.cache.dir = folder
        for case in cases():
            text = describe(case)
            if (text in QUICK or not wanted.quick) and all(f" {word} " in f" {text} " for word in wanted.words):
                record = other_record(**case) if case["form"] in OTHERS else attend_record(**case)
                records.append(record)
                if not wanted.json:
                    print(line(record), flush=True)
                if promise := broken_promise(record):
                    broken.append(f"{text}: {promise}")
    if wanted.json:
        print(json.dumps(records))
    print(f"{len(records)} kernels compiled, {len(broken)} break a promise", *broken, sep="\n", file=sys.stderr)
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
