"""Key-value formats: every code, proven error bounds, token-local bytes, folded scales, and caches that hold them."""

import math
from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbook.compute.attention import attend
from kvbook.compute.mla import DeepseekConfig, DeepseekLayer
from kvbook.compute.model import Batch, ContiguousCache, NoCache, Transformer
from kvbook.compute.quantization import (
    QuantizedCache,
    Stored,
    int8_attention,
    kv_codec,
    observe_kv,
    static_scales,
)
from kvbook.control.config import KV_FORMATS, LayerSpec, ModelConfig

PLAIN = ("float32", "bfloat16", "float16")
FP8 = {"fp8_e4m3": (4, 3, torch.float8_e4m3fn), "fp8_e5m2": (5, 2, torch.float8_e5m2)}  # exponent, mantissa bits, twin
FIXED = (*FP8, "int8_static")
PER_TOKEN = ("fp8_e4m3_token", "fp8_e5m2_token", "int8")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FLOAT16_MAX = 65_504.0
DIMS = (32, 64, 96, 128, 256)


def codec_of(name, scale=None):
    """The format's codec; a scale of 0.03 where the format insists on one."""
    return kv_codec(name, 0.03 if name == "int8_static" and scale is None else scale)


def bits(stored):
    """What is stored, as integers: equal means equal byte for byte, not-a-numbers included."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return [t.contiguous().view(kinds[t.element_size()]) for t in stored]


def same_bytes(a, b):
    return all(torch.equal(x, y) for x, y in zip(bits(a), bits(b), strict=True))


def pick(stored, index):
    return Stored(*(t[index] for t in stored))


def mixed(shape, seed, dtype=torch.float32, low=-6, high=3):
    """Random numbers of magnitudes 10^low to 10^high, side by side in one vector; finite in `dtype`."""
    random = torch.Generator().manual_seed(seed)
    sizes = 10 ** (low + (high - low) * torch.rand(shape, generator=random, dtype=torch.float64))
    x = sizes * torch.randn(shape, generator=random, dtype=torch.float64)
    return x.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)


# Every code


def fp8_value(code, exponent_bits, mantissa_bits):
    """What an 8-bit code means, from its sign, exponent and mantissa."""
    sign, exponent = -1.0 if code & 128 else 1.0, code >> mantissa_bits & (1 << exponent_bits) - 1
    fraction, bias = (code & (1 << mantissa_bits) - 1) / 2**mantissa_bits, 2 ** (exponent_bits - 1) - 1
    if exponent_bits == 5 and exponent == 31:                    # e5m2 keeps IEEE's infinities, e4m3fn has none
        return math.nan if fraction else sign * math.inf
    if exponent_bits == 4 and code & 127 == 127:
        return math.nan
    if exponent == 0:
        return sign * fraction * 2.0 ** (1 - bias)
    return sign * (1 + fraction) * 2.0 ** (exponent - bias)


def fp8_grid(name):
    """The finite codes' values from 0 up, float64; the place in the list is the code."""
    exponent_bits, mantissa_bits, _ = FP8[name]
    values = [fp8_value(code, exponent_bits, mantissa_bits) for code in range(128)]
    return torch.tensor([v for v in values if math.isfinite(v)], dtype=torch.float64)


def fp8_code(name, x):
    """The code of the nearest value, the even code at ties, the largest beyond it; x float64, finite."""
    grid, size = fp8_grid(name), x.abs()
    above = torch.searchsorted(grid, size).clamp(max=len(grid) - 1)
    below = (above - 1).clamp(min=0)
    to_above, to_below = grid[above] - size, size - grid[below]
    even = torch.where(above % 2 == 0, above, below)
    code = torch.where(to_above < to_below, above, torch.where(to_below < to_above, below, even))
    return torch.where(size >= grid[-1], len(grid) - 1, code) + 128 * x.signbit()


def neighbours(x):
    """float32 x and the float32 numbers beside each."""
    up, down = (torch.full_like(x, sign * math.inf) for sign in (1, -1))
    return torch.cat((x, torch.nextafter(x, up), torch.nextafter(x, down)))


def all_numbers(dtype):
    """Every finite number of a 16-bit type."""
    numbers = torch.arange(-2**15, 2**15).to(torch.int16).view(dtype)
    return numbers[numbers.isfinite()]


@pytest.mark.parametrize("name", FP8)
def test_every_fp8_code_is_what_its_bits_say(name):
    exponent_bits, mantissa_bits, twin = FP8[name]
    codes = torch.arange(256).to(torch.uint8)
    expected = torch.tensor([fp8_value(c, exponent_bits, mantissa_bits) for c in range(256)])
    for per_token in (False, True):
        codec = codec_of(name + "_token" * per_token)
        stored = Stored(codes[:, None], torch.ones(256, int(per_token), dtype=torch.float16))
        decoded = codec.decode(stored)[:, 0]
        assert torch.equal(decoded.view(torch.int32)[expected.isfinite()],      # as bits: -0 is not 0
                           expected.view(torch.int32)[expected.isfinite()])
        assert torch.equal(decoded.isfinite(), expected.isfinite())
        assert decoded.allclose(codes.view(twin).float(), rtol=0, atol=0, equal_nan=True)
        assert torch.equal(codec.broken(stored), ~expected.isfinite())
    back = kv_codec(name).encode(expected[:, None]).payload[:, 0]
    assert torch.equal(back[expected.isfinite()], codes[expected.isfinite()])
    assert not kv_codec(name).decode(Stored(back[~expected.isfinite()], torch.ones(0))).isfinite().any()


def test_the_fp8_grids_are_the_published_ones():
    e4m3, e5m2 = fp8_grid("fp8_e4m3"), fp8_grid("fp8_e5m2")
    assert (e4m3[-1], e4m3[1], 2 * len(e4m3) - 1) == (448, 2**-9, 253)          # ±0 is one value
    assert (e5m2[-1], e5m2[1], 2 * len(e5m2) - 1) == (57_344, 2**-16, 247)


@pytest.mark.parametrize("name", FP8)
def test_fp8_rounds_to_the_nearest_and_ties_to_even(name):
    """Every value, every midpoint and their neighbours, every 16-bit number, and a million others."""
    grid, random = fp8_grid(name), torch.Generator().manual_seed(0)
    middles = torch.cat(((grid[1:] + grid[:-1]) / 2, grid[-1:] * 17 / 16, grid[-1:] * 9 / 8)).float()
    dense = torch.randint(0, 0x7F80_0000, (1_000_000,), generator=random).int().view(torch.float32)
    groups = [neighbours(torch.cat((grid.float(), middles))), dense, torch.tensor([0.0, 3.4028235e38, 1e-45])]
    groups = [sign * x for x in groups for sign in (1, -1)] + [all_numbers(d) for d in (torch.float16, torch.bfloat16)]
    for x in groups:
        codes = kv_codec(name).encode(x[:, None]).payload[:, 0]
        assert torch.equal(codes, fp8_code(name, x.double()).to(torch.uint8))
        inside = x.abs() <= grid[-1]
        assert torch.equal(codes[inside], x[inside].to(FP8[name][2]).view(torch.uint8))


BOUNDARIES = (            # a number, and what comes back: e4m3, e5m2, int8 with a scale of 1, of 1/256
    (0.0, 0.0, 0.0, 0.0, 0.0),
    (-0.0, -0.0, -0.0, 0.0, 0.0),
    (1e-8, 0.0, 0.0, 0.0, 0.0),
    (0.05, 0.05078125, 0.046875, 0.0, 13 / 256),
    (300.0, 288.0, 320.0, 127.0, 127 / 256),
    (447.0, 448.0, 448.0, 127.0, 127 / 256),
    (448.0, 448.0, 448.0, 127.0, 127 / 256),
    (449.0, 448.0, 448.0, 127.0, 127 / 256),
    (1e4, 448.0, 10_240.0, 127.0, 127 / 256),
    (-1e4, -448.0, -10_240.0, -127.0, -127 / 256),
    (2.0**-9, 2.0**-9, 2.0**-9, 0.0, 0.0),
    (2.0**-10, 0.0, 2.0**-10, 0.0, 0.0),
    (3 * 2.0**-10, 2.0**-8, 3 * 2.0**-10, 0.0, 1 / 256),
    (2.0**-16, 0.0, 2.0**-16, 0.0, 0.0),
    (2.0**-17, 0.0, 0.0, 0.0, 0.0),
    (1.5 * 2.0**-16, 0.0, 2.0**-15, 0.0, 0.0),
    (-2.0**-24, -0.0, -0.0, 0.0, 0.0),
    (57_344.0, 448.0, 57_344.0, 127.0, 127 / 256),
    (65_504.0, 448.0, 57_344.0, 127.0, 127 / 256),
    (3.3895314e38, 448.0, 57_344.0, 127.0, 127 / 256),
    (-3.4028235e38, -448.0, -57_344.0, -127.0, -127 / 256),
    (1e-45, 0.0, 0.0, 0.0, 0.0),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_boundaries(dtype):
    x, *expectations = torch.tensor(BOUNDARIES, dtype=torch.float64).T
    codecs = (kv_codec("fp8_e4m3"), kv_codec("fp8_e5m2"), kv_codec("int8_static", 1.0),
              kv_codec("int8_static", 1 / 256))
    for codec, expected in zip(codecs, expectations, strict=True):
        decoded = codec.decode(codec.encode(x.to(dtype)[:, None]), torch.float64)[:, 0]
        assert torch.equal(decoded, expected)
        assert codec.format.name == "int8_static" or torch.equal(decoded.signbit(), expected.signbit())


def test_every_int8_byte():
    codes = torch.arange(-128, 128).to(torch.int8)[:, None]
    none, half = torch.zeros(256, 0, dtype=torch.float16), torch.full((256, 1), 0.5, dtype=torch.float16)
    for codec, scales, factor in ((kv_codec("int8_static", 0.25), none, 0.25), (kv_codec("int8"), half, 0.5)):
        decoded = codec.decode(Stored(codes, scales))
        assert torch.equal(decoded[1:], codes[1:].float() * factor)
        assert decoded[0].isnan().all() and codec.broken(Stored(codes, scales)).tolist() == [True] + [False] * 255
    for scale in (0.25, 0.03, 1e-7, 1e20):
        codec = kv_codec("int8_static", scale)
        assert torch.equal(codec.encode(codec.decode(Stored(codes, none))).payload, codes)


def test_int8_rounds_to_the_nearest_and_ties_to_even():
    middles = neighbours(torch.arange(-140, 140) + 0.5)
    codes = kv_codec("int8_static", 1.0).encode(middles[:, None]).payload[:, 0]
    expected = [min(127, max(-127, round(value))) for value in middles.tolist()]      # Python rounds half to even
    assert codes.tolist() == expected


def test_every_int4_byte():
    """Low halves are channels 0…31, high halves 32…63, each group with its own step and smallest value."""
    payload = torch.arange(256).to(torch.uint8)[:, None].repeat(1, 32)
    payload[:, 5], payload[:, 9] = 0x0F, 0xF0                     # so that both groups hold their smallest and largest
    scales = torch.tensor([0.5, -3.0, 0.125, 7.0], dtype=torch.float16).repeat(256, 1)
    codec, expected = kv_codec("int4"), torch.empty(256, 64)
    for row, byte in enumerate(range(256)):
        for channel in range(32):
            byte_here = {5: 0x0F, 9: 0xF0}.get(channel, byte)
            expected[row, channel] = (byte_here % 16) * 0.5 - 3.0
            expected[row, channel + 32] = (byte_here // 16) * 0.125 + 7.0
    assert torch.equal(codec.decode(Stored(payload, scales)), expected)
    assert same_bytes(codec.encode(expected), Stored(payload, scales))


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_sixteen_bit_formats_keep_every_number(name):
    dtype, codec = getattr(torch, name), kv_codec(name)
    x = all_numbers(dtype)[:, None]
    assert torch.equal(bits(codec.encode(x))[0], x.view(torch.int16))
    assert torch.equal(codec.decode(codec.encode(x.double()), dtype).view(torch.int16), x.view(torch.int16))


# Proven bounds
#
# Round to nearest with p significant bits errs by at most |x| 2^-p (half a unit in the last place), or by half the
# smallest subnormal, whichever is larger; beyond the largest number the error is the distance to it. A scale s
# multiplies all three. int8 and int4 round to the nearest multiple of their step: half a step. The scales are float16
# rounded up, so the largest element of a vector does not exceed s · largest, up to one float32 rounding of
# amax / largest; only a scale at float16's end, 65,504, leaves elements beyond, and those saturate.
# Quotients are taken in float32 (float64 for float64 input, but fp8 conversion passes through float32), which moves x
# by at most 2^-24 |x| (twice for int4: difference and quotient, hence 2^-23 of x - smallest) before it is rounded.

FLOATS = {"float32": (24, 2.0**-150, torch.finfo(torch.float32).max), "float16": (11, 2.0**-25, FLOAT16_MAX),
          "bfloat16": (8, 2.0**-134, torch.finfo(torch.bfloat16).max),
          "fp8_e4m3": (4, 2.0**-10, 448.0), "fp8_e5m2": (3, 2.0**-17, 57_344.0)}


def beyond(x, low, high):
    return (x - high).clamp(min=0) + (low - x).clamp(min=0)


def error_bound(codec, x, stored):
    """The largest proven error of each element; x float64 [..., dim]."""
    name = codec.format.name.removesuffix("_token").removesuffix("_static")
    if name == "int4":
        step, low = stored.scales.double().unflatten(-1, (-1, 2)).repeat_interleave(32, -2).unbind(-1)
        return step / 2 + beyond(x, low, low + 15 * step) + (x - low).abs() * 2**-22
    scale = torch.ones(()).double()
    if name not in PLAIN:
        scale = stored.scales.double() if codec.scale is None else codec.scale.double()
    if name == "int8":
        return scale / 2 + beyond(x, -127 * scale, 127 * scale) + x.abs() * 2**-23
    bits, smallest, largest = FLOATS[name]
    edge = largest * scale
    rounding = torch.maximum(x.abs().minimum(edge) * 2.0**-bits, smallest * scale)
    return rounding + beyond(x, -edge, edge) + x.abs() * 2**-23


def assert_scales_are_tight(codec, x, stored):
    """Token scales reach the largest element, and are the smallest float16 that do."""
    if codec.format.name in PER_TOKEN:
        scale, needed = stored.scales.double(), x.abs().amax(-1, keepdim=True) / codec.largest
    elif codec.format.name == "int4":
        groups, (scale, low) = x.unflatten(-1, (-1, 32)), stored.scales.double().unflatten(-1, (-1, 2)).unbind(-1)
        assert bool(((low <= groups.amin(-1)) | (low == -FLOAT16_MAX)).all())
        needed = (groups.amax(-1) - low) / 15
    else:
        return
    slack = 2.0**-22
    assert bool(((scale >= needed * (1 - slack)) | (scale == FLOAT16_MAX)).all())
    before = torch.nextafter(scale.half(), torch.tensor(-math.inf).half()).double()
    assert bool(((before < needed * (1 + slack)) | (scale == 0)).all())


@st.composite
def vectors(draw, dims=None):
    """Finite vectors of any leading shape and dtype: wild magnitudes beside each other, and chosen numbers."""
    leading = draw(st.lists(st.integers(0, 4), max_size=3))
    dtype, seed = draw(st.sampled_from(DTYPES)), draw(st.integers(0, 2**20))
    dim = draw(st.sampled_from(dims or (*DIMS, 1, 3, 7, 33, 80)))
    low, high = sorted(draw(st.tuples(st.integers(-30, 30), st.integers(-30, 30))))
    x = mixed((*leading, dim), seed, dtype, low, high)
    tiny, most = torch.finfo(dtype).smallest_normal, torch.finfo(dtype).max
    chosen = st.one_of(st.sampled_from((0.0, -0.0, tiny, tiny / 4, most, -most, FLOAT16_MAX, 448.0, 449.0)),
                       st.floats(-float(most), float(most)))
    chosen = torch.tensor(draw(st.lists(chosen, min_size=1, max_size=6)), dtype=torch.float64)
    random = torch.Generator().manual_seed(seed)
    where = torch.rand(x.shape, generator=random) < draw(st.sampled_from((0, 0.1, 1)))
    others = chosen[torch.randint(len(chosen), x.shape, generator=random)].clamp(-most, most).to(dtype)
    x = torch.where(where, others, x)
    return draw(st.sampled_from((x, x.abs(), -x.abs())))               # int4's smallest value may lie above 0


def check_bounds(codec, x):
    stored, wide = codec.encode(x), x.double()
    error = (codec.decode(stored, torch.float64) - wide).abs()
    bound = error_bound(codec, wide, stored)
    assert bool((error <= bound).all()), (x, (error - bound).max())
    assert_scales_are_tight(codec, wide, stored)
    assert not codec.broken(stored).any()
    assert codec.decode(stored, x.dtype).isfinite().all()         # never an infinity from a finite number
    assert stored.payload.shape[:-1] == stored.scales.shape[:-1] == x.shape[:-1]


@settings(max_examples=120)
@given(x=vectors(), name=st.sampled_from([n for n in KV_FORMATS if n != "int4"]))
def test_errors_stay_within_the_proven_bounds(x, name):
    check_bounds(codec_of(name), x)


@settings(max_examples=60)
@given(x=vectors(DIMS))
def test_int4_errors_stay_within_half_a_step(x):
    check_bounds(kv_codec("int4"), x)


@settings(max_examples=40)
@given(centre=st.floats(1e-6, 1e5), spread=st.floats(1e-6, 10), sign=st.sampled_from((-1, 1)), seed=st.integers(0, 999),
       dtype=st.sampled_from(DTYPES))
def test_int4_groups_far_from_zero(centre, spread, sign, seed, dtype):
    """The smallest value is rounded down to float16 on either side of 0, and the step reaches from there."""
    random = torch.Generator().manual_seed(seed)
    x = sign * centre * (1 + spread * torch.rand(20, 64, generator=random, dtype=torch.float64))
    check_bounds(kv_codec("int4"), x.clamp(-FLOAT16_MAX, FLOAT16_MAX).to(dtype))


@settings(max_examples=60)
@given(x=vectors(), name=st.sampled_from(FIXED), exponent=st.integers(-45, 38))
def test_any_fixed_scale_keeps_the_bounds(x, name, exponent):
    """Also scales so small that the quotient overflows, and so large that the product does."""
    codec = kv_codec(name, 10.0**exponent)
    decoded, wide = codec.decode(codec.encode(x), torch.float64), x.double()
    bound = error_bound(codec, wide, codec.encode(x))
    bound += torch.maximum(wide.abs(), codec.scale.double()) * 2**-22           # float32's own subnormals lose bits
    assert bool(((decoded - wide).abs() <= bound).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", KV_FORMATS)
def test_the_largest_numbers_of_every_dtype_stay_finite(name, dtype):
    most = torch.finfo(dtype).max
    x = torch.zeros(4, 64, dtype=dtype)
    x[0, 0], x[1, 0], x[1, 1], x[2], x[3] = most, most, -most, most, -most
    check_bounds(codec_of(name), x)


@pytest.mark.parametrize("name", ["int8", "fp8_e4m3_token", "fp8_e5m2_token"])
def test_vectors_beyond_float16_scales_saturate(name):
    codec = kv_codec(name)
    edge = FLOAT16_MAX * codec.largest
    x = torch.tensor([[edge, 0.0], [2 * edge, -3 * edge]])
    stored = codec.encode(x)
    assert stored.scales.flatten().tolist() == [FLOAT16_MAX] * 2
    assert codec.decode(stored, torch.float64).tolist() == [[edge, 0.0], [edge, -edge]]


def test_int8_by_hand():
    stored = kv_codec("int8").encode(torch.tensor([[127.0, -63.5, 0.4, 0.6, 0.0], [0.0] * 5]))
    assert stored.payload.tolist() == [[127, -64, 0, 1, 0], [0] * 5] and stored.scales.tolist() == [[1.0], [0.0]]


@settings(max_examples=40)
@given(x=vectors(DIMS), name=st.sampled_from([*PER_TOKEN, "int4"]))
def test_decoding_in_float32_loses_nothing(x, name):
    """Codes of at most 8 bits times scales of 11 are exact in float32; int4 adds once more, and rounds once."""
    codec = kv_codec(name)
    stored = codec.encode(x)
    narrow, wide = codec.decode(stored).double(), codec.decode(stored, torch.float64)
    assert torch.equal(narrow, wide if name != "int4" else wide.float().double())


# Bytes that belong to their token


@settings(max_examples=60)
@given(name=st.sampled_from(list(KV_FORMATS)), cuts=st.lists(st.integers(0, 17), max_size=5), seed=st.integers(0, 999),
       dtype=st.sampled_from(DTYPES), dim=st.sampled_from((32, 64, 96)))
def test_chunks_encode_to_the_same_bytes(name, cuts, seed, dtype, dim):
    x, codec, bounds = mixed((17, 3, dim), seed, dtype), codec_of(name), [0, *sorted(cuts), 17]
    whole = codec.encode(x)
    parts = [codec.encode(x[a:b]) for a, b in pairwise(bounds)]
    assert same_bytes(whole, Stored(*(torch.cat(t) for t in zip(*parts, strict=True))))
    assert same_bytes(whole, codec.encode(x.transpose(0, 1).contiguous().transpose(0, 1)))       # strides mean nothing
    lonely = [codec.encode(x[t, h].clone()) for t in range(17) for h in range(3)]
    assert same_bytes(Stored(*(t.flatten(0, 1) for t in whole)),
                      Stored(*(torch.stack(t) for t in zip(*lonely, strict=True))))


@settings(max_examples=40)
@given(name=st.sampled_from(list(KV_FORMATS)), seed=st.integers(0, 999), dtype=st.sampled_from(DTYPES),
       poison=st.sampled_from((0.0, 1e4, math.nan, math.inf, -math.inf)), token=st.integers(0, 8),
       head=st.integers(0, 1))
def test_a_row_depends_on_itself_alone(name, seed, dtype, poison, token, head):
    codec, x = codec_of(name), mixed((9, 2, 64), seed, dtype)
    before, changed = codec.encode(x), x.clone()
    changed[token, head, seed % 64] = poison
    after, others = codec.encode(changed), torch.ones(9, 2, dtype=torch.bool)
    others[token, head] = False
    assert same_bytes(pick(before, others), pick(after, others))
    broken = ~others if not math.isfinite(poison) else torch.zeros_like(others)
    assert torch.equal(codec.broken(after), broken)
    assert torch.equal(~codec.decode(after).isfinite().all(-1), broken)


@pytest.mark.parametrize("name", KV_FORMATS)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_what_is_not_a_number_comes_back_as_not_a_number(name, poison):
    x = mixed((3, 64), 0)
    x[1] = poison
    codec = codec_of(name)
    decoded = codec.decode(codec.encode(x))
    assert decoded[1].isnan().all() and decoded[[0, 2]].isfinite().all()


@settings(max_examples=40)
@given(name=st.sampled_from(list(KV_FORMATS)), seed=st.integers(0, 999),
       order=st.lists(st.integers(0, 10), min_size=1, max_size=20))
def test_payload_and_scales_travel_together(name, seed, order):
    codec, x, order = codec_of(name), mixed((11, 3, 64), seed), torch.tensor(order)
    stored = codec.encode(x)
    decoded = codec.decode(stored)
    moves = [lambda t: t[2:7], lambda t: t[1::3], lambda t: t.index_select(0, order), lambda t: t[:, [2, 0]],
             lambda t: t.clone(), lambda t: torch.cat((t[5:], t[:5])), lambda t: t.permute(1, 0, 2),
             lambda t: t[:, 1:2].expand(-1, 3, -1), lambda t: t.flip(0)]
    for move in moves:
        assert torch.equal(codec.decode(Stored(*map(move, stored))), move(decoded))
    kept = codec.empty((2, 16, 3), 64)
    for place, rows in zip(kept, stored, strict=True):
        place.flatten(0, 1)[order + 17] = rows[order]
    assert torch.equal(codec.decode(pick(kept, 1))[order + 1], decoded[order])


@pytest.mark.parametrize("name", KV_FORMATS)
@pytest.mark.parametrize("dim", [*DIMS, 1, 33])
def test_bytes_are_what_the_format_says(name, dim):
    codec = codec_of(name)
    if name == "int4" and dim % 32:
        for refused in (lambda: codec.empty((2,), dim), lambda: codec.encode(torch.zeros(2, dim))):
            with pytest.raises(ValueError, match=rf"int4.*multiple of 32.*{dim}"):
                refused()
        return
    room, stored = codec.empty((5, 3), dim), codec.encode(torch.randn(5, 3, dim))
    for tensors in (room, stored):
        assert sum(t.numel() * t.element_size() for t in tensors) == 15 * KV_FORMATS[name].vector_bytes(dim)
    assert [(t.shape, t.dtype) for t in room] == [(t.shape, t.dtype) for t in stored]
    assert room.scales.dtype == torch.float16 and not codec.decode(room).any()
    spec = LayerSpec(6, 3, dim, dim, 1.0)
    cache = QuantizedCache([spec] * 2, 4, 7, name, scales=[(codec.scale, codec.scale)] * 2 if name in FIXED else None)
    assert cache.num_bytes == 4 * 7 * 2 * spec.bytes_per_token(name)


# Fixed scales


def fixed_scales(dim):
    """A scale of every shape that a codec takes for 3 heads."""
    return {"number": 0.07, "tensor": torch.tensor([[0.07]]), "head": torch.tensor([[0.02], [0.3], [1.5]]),
            "channel": mixed((3, dim), 5, low=-1, high=0).abs() + 0.01, "shared": torch.linspace(0.01, 1, dim)}


@pytest.mark.parametrize("per", fixed_scales(32))
@pytest.mark.parametrize("name", FIXED)
def test_fixed_scales_for_each_tensor_head_or_channel(name, per):
    scale = fixed_scales(32)[per]
    codec, x = kv_codec(name, scale), torch.randn(9, 3, 32, generator=torch.Generator().manual_seed(1))
    stored, wide = codec.encode(x), torch.as_tensor(scale).expand(3, 32)
    one = kv_codec(name, 1.0)
    assert stored.scales.shape == (9, 3, 0) and same_bytes(stored, one.encode(x / wide))
    assert torch.equal(codec.decode(stored), one.decode(stored) * wide)
    check_bounds(codec, x)


def test_int4_takes_scales_that_tame_known_channels():
    """A channel thirty times the others, and a scale that says so: the others keep their steps."""
    x = torch.randn(64, 2, 64, generator=torch.Generator().manual_seed(2))
    x[:, 1, 7] *= 30
    scale = torch.ones(2, 64)
    scale[1, 7] = 30
    plain, tamed = kv_codec("int4"), kv_codec("int4", scale)
    assert same_bytes(tamed.encode(x), plain.encode(x / scale))
    assert torch.equal(tamed.decode(tamed.encode(x)), plain.decode(plain.encode(x / scale)) * scale)
    others = torch.arange(64) != 7
    error = [(codec.decode(codec.encode(x)) - x)[:, 1, others].pow(2).mean() for codec in (plain, tamed)]
    assert error[1] < error[0] / 10


# Folded scales


@settings(max_examples=60)
@given(name=st.sampled_from(list(KV_FORMATS)), heads=st.sampled_from(((1, 1), (3, 3), (2, 1), (3, 4), (1, 5))),
       dims=st.sampled_from(((32, 32), (64, 96), (96, 64), (128, 32))), new=st.integers(1, 4), seen=st.integers(1, 20),
       per=st.sampled_from(("number", "tensor", "head", "channel", "shared")), seed=st.integers(0, 999))
def test_folded_scales_give_the_decoded_scores_and_sums(name, heads, dims, new, seen, per, seed):
    (num_kv, group), random = heads, torch.Generator().manual_seed(seed)
    normal = partial(torch.randn, generator=random, dtype=torch.float64)
    scales = [None, None]
    if name in (*FIXED, "int4"):
        scales = [s if isinstance(s, float) else s if s.dim() == 1 else s[:num_kv]
                  for s in (fixed_scales(dim)[per] for dim in dims)]
    keys, values = (kv_codec(name, scale) for scale in scales)
    q, weights = normal(new, num_kv, group, dims[0]), normal(num_kv, group, new, seen).softmax(-1)
    k, v = keys.encode(mixed((seen, num_kv, dims[0]), seed)), values.encode(mixed((seen, num_kv, dims[1]), seed + 1))
    decoded = torch.einsum("tngd,snd->ngts", q, keys.decode(k, torch.float64))
    largest = torch.einsum("tngd,snd->ngts", q.abs(), keys.decode(k, torch.float64).abs())
    folded = keys.scores(q, k)
    assert folded.shape == (num_kv, group, new, seen) and folded.dtype == torch.float64
    # int4 adds codes and the smallest value apart, and these may cancel: relative to them, not to their sum
    offsets = 4096.0 if name == "int4" else 0.0
    assert bool(((folded - decoded).abs() <= 1e-12 * (largest + offsets)).all())
    decoded = torch.einsum("ngts,snd->tngd", weights, values.decode(v, torch.float64))
    mixed_values = values.mix(weights, v)
    assert mixed_values.shape == (new, num_kv, group, dims[1])
    assert bool(((mixed_values - decoded).abs() <= 1e-12 * (decoded.abs() + 4096)).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", KV_FORMATS)
def test_folded_scales_work_in_the_dtype_of_a_model(name, dtype):
    """Codes reach 57,344 and sums more; neither may overflow where the decoded product does not."""
    random = torch.Generator().manual_seed(3)
    q, k = torch.randn(2, 2, 3, 64, generator=random) * 8, torch.randn(9, 2, 64, generator=random) * 3
    codec = kv_codec(name, torch.full((2, 64), 0.1)) if name in (*FIXED, "int4") else kv_codec(name)
    stored, weights = codec.encode(k), torch.rand(2, 3, 2, 9, generator=random).softmax(-1)
    scores = codec.scores(q.to(dtype), stored).float()
    decoded = torch.einsum("tngd,snd->ngts", q.to(dtype).float(), codec.decode(stored))
    largest = torch.einsum("tngd,snd->ngts", q.abs(), codec.decode(stored).abs())
    eps = torch.finfo(dtype).eps
    assert bool(((scores - decoded).abs() <= 4 * eps * (largest + 500)).all())
    out = codec.mix(weights.to(dtype), stored).float()
    decoded = torch.einsum("ngts,snd->tngd", weights.to(dtype).float(), codec.decode(stored))
    assert bool(((out - decoded).abs() <= 16 * eps * (decoded.abs() + 10)).all())


# Products of integers
#
# Let e = scale · s_q / 2 · max ‖k‖₁ with s_q the query's step: no score moves by more than e, so no weight by a factor
# outside exp(±2e), and the sum of the weights' changes is at most exp(2e) - 1. Rounding the weights, scaled by the
# values' scales c, moves each by at most half of max(w c) exp(2e) / 127, times the value's integer n. A step may be
# rounded up to float16 (a factor 1 + 2^-10). Together:
# |error| <= (exp(2e) - 1) max|v| + max(w c) exp(2e) / 254 · (1 + 2^-10) · Σ|n|, and float32's own rounding.


def integer_case(num_new, num_seen, heads, dim, seed, sharpness=1.0, size=1.0):
    """Queries, encoded keys and values, and their layer."""
    (num_kv, group), random = heads, torch.Generator().manual_seed(seed)
    q = torch.randn(num_new, num_kv * group, dim, generator=random) * sharpness
    keys, values = (kv_codec("int8").encode(torch.randn(num_seen, num_kv, dim, generator=random) * s)
                    for s in (1.0, size))
    return q, keys, values, LayerSpec(num_kv * group, num_kv, dim, dim, dim ** -0.5)


def integer_bound(q, keys, values, spec):
    """The largest proven error of int8_attention, [Tq, num_heads, 1], from the exact weights."""
    codec, num_kv = kv_codec("int8"), spec.num_kv_heads
    k, v = (codec.decode(x, torch.float64) for x in (keys, values))
    queries = q.double().unflatten(1, (num_kv, -1))
    scores = torch.einsum("tngd,snd->ngts", queries, k) * spec.scale
    hidden = torch.ones(len(q), len(k), dtype=torch.bool).triu(len(k) - len(q) + 1)
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
    grown = 1 + 2.0**-10
    step = queries.abs().amax(-1).permute(1, 2, 0) / 127 * grown                          # [n_kv, group, Tq]
    moved = torch.exp(spec.scale * step * k.abs().sum(-1).amax(0)[:, None, None])         # exp(2e)
    heaviest = (weights * values.scales[..., 0].double().T[:, None, None]).amax(-1)
    integers = values.payload.double().abs().sum(0).amax(-1)[:, None, None]
    bound = (moved - 1) * v.abs().amax((0, 2))[:, None, None] + heaviest * moved / 254 * grown * integers
    return bound.permute(2, 0, 1).flatten(1)[..., None], v.abs().max()


@settings(max_examples=60)
@given(new=st.integers(1, 5), before=st.integers(0, 40), heads=st.sampled_from(((1, 1), (3, 3), (2, 4), (1, 5))),
       dim=st.sampled_from((8, 32, 64, 96)), seed=st.integers(0, 9999), sharpness=st.sampled_from((0.01, 1.0, 5.0)),
       size=st.sampled_from((1e-3, 1.0, 100.0)))
def test_integer_attention_stays_within_its_bound(new, before, heads, dim, seed, sharpness, size):
    q, keys, values, spec = integer_case(new, new + before, heads, dim, seed, sharpness, size)
    codec = kv_codec("int8")
    exact = attend(q.double(), codec.decode(keys, torch.float64), codec.decode(values, torch.float64), spec)
    out, (bound, largest) = int8_attention(q, keys, values, spec), integer_bound(q, keys, values, spec)
    assert out.dtype == torch.float32 and out.shape == exact.shape
    assert bool(((out - exact).abs() <= bound + largest * 1e-5).all())
    if sharpness < 5:
        assert (out - exact).norm() < 0.05 * exact.norm()                 # what the bound allows is far from met


def test_integer_attention_bound_is_not_empty():
    """The bound is a statement: well below the size of what it bounds."""
    q, keys, values, spec = integer_case(3, 200, (2, 2), 64, 1)
    (bound, _), largest = integer_bound(q, keys, values, spec), kv_codec("int8").decode(values).abs().max()
    assert bound.max() < 0.3 * largest


@pytest.mark.parametrize("num_seen", [4_096, 20_000])
def test_integer_attention_keeps_small_weights_of_long_texts(num_seen):
    """Weights of 1/20,000 times scales of small values lie below what float16 can say."""
    q, keys, values, spec = integer_case(1, num_seen, (1, 1), 32, 0, sharpness=0.1, size=0.01)
    values = kv_codec("int8").encode(kv_codec("int8").decode(values) + 0.02)
    exact = attend(q, *(kv_codec("int8").decode(x) for x in (keys, values)), spec)
    assert (int8_attention(q, keys, values, spec) - exact).norm() < 2e-3 * exact.norm()


@settings(max_examples=30)
@given(log_seen=st.integers(0, 6), group=st.integers(1, 4), seed=st.integers(0, 999), shift=st.integers(-6, 6))
def test_integer_attention_is_exact_where_nothing_is_rounded(log_seen, group, seed, shift):
    """Queries that are codes times a power of two, equal keys (so equal weights 2^-n), scales of 127 · 2^-n."""
    num_seen, random = 2**log_seen, torch.Generator().manual_seed(seed)
    codes = lambda *shape: torch.randint(-127, 128, shape, generator=random).float()
    q, k, v = codes(1, 2 * group, 32), codes(1, 2, 32).expand(num_seen, -1, -1).clone(), codes(num_seen, 2, 32)
    for x in (q, k, v):
        x[..., 0] = 127
    q, k, v = q * 2.0**shift, k * 2.0**-5, v * 127 * 2.0**-8
    keys, values, spec = kv_codec("int8").encode(k), kv_codec("int8").encode(v), LayerSpec(2 * group, 2, 32, 32, 0.125)
    assert torch.equal(kv_codec("int8").decode(values), v)
    expected = v.double().mean(0).repeat_interleave(group, 0)[None].float()
    assert torch.equal(int8_attention(q, keys, values, spec), expected)


@pytest.mark.parametrize("more", [{"window": 4}, {"softcap": 30.0}])
def test_integer_attention_refuses_what_it_does_not_compute(more):
    q, keys, values, _ = integer_case(1, 9, (1, 2), 32, 0)
    with pytest.raises(ValueError, match=r"window|softcap|soft-cap"):
        int8_attention(q, keys, values, LayerSpec(2, 1, 32, 32, 0.125, **more))


# What is refused


def test_unknown_formats_are_named_with_the_known_ones():
    with pytest.raises(ValueError, match=r"int3.*" + ".*".join(KV_FORMATS)):
        kv_codec("int3")
    with pytest.raises(ValueError, match=r"int3.*fp8_e4m3"):
        QuantizedCache([LayerSpec(1, 1, 32, 32, 1.0)], 1, 4, "int3")


def test_a_group_that_does_not_divide_is_refused_when_built():
    for key, value in ((48, 48), (64, 48), (48, 64)):
        with pytest.raises(ValueError, match=r"int4.*multiple of 32.*48"):
            QuantizedCache([LayerSpec(1, 1, 64, 64, 1.0), LayerSpec(2, 1, key, value, 1.0)], 1, 4, "int4")


def test_scales_are_refused_or_required():
    for name in (*PLAIN, *PER_TOKEN):
        with pytest.raises(ValueError, match=f"{name}.*no fixed scale"):
            kv_codec(name, 1.0)
    spec = LayerSpec(1, 1, 32, 32, 1.0)
    for build in (lambda: kv_codec("int8_static"), lambda: QuantizedCache([spec], 1, 4, "int8_static")):
        with pytest.raises(ValueError, match=r"int8_static.*needs a scale.*static_scales"):
            build()
    with pytest.raises(ValueError, match="scales: 1 pairs for 2 layers"):
        QuantizedCache([spec] * 2, 1, 4, "int8_static", scales=[(1.0, 1.0)])


@pytest.mark.parametrize("name", [*FIXED, "int4"])
@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf, 1e-50, torch.tensor([[1.0], [0.0]]),
                                   torch.tensor([1.0, math.nan])])
def test_scales_that_are_no_sizes_are_refused(name, scale):
    with pytest.raises(ValueError, match=r"scale=.*finite and above 0"):
        kv_codec(name, scale)


def test_static_scales_refuses_other_units_and_formats():
    observed = [(torch.ones(3, 2, 32),) * 3]
    with pytest.raises(ValueError, match="per='token' is unknown; known: tensor, head, channel"):
        static_scales(observed, "int8_static", per="token")
    for name in (*PLAIN, *PER_TOKEN):
        with pytest.raises(ValueError, match=f"{name}.*no fixed scale"):
            static_scales(observed, name)
    with pytest.raises(ValueError, match=r"int3.*known"):
        static_scales(observed, "int3")


# The cache that holds codes

TINY = ModelConfig("llama", 2, 48, 6, 2, 32, 64, 61, 96, eos_token_ids=(3,))
LATENT = DeepseekConfig("deepseek_v3", num_layers=2, hidden_size=48, num_heads=5, num_kv_heads=5, head_dim=24,
                        intermediate_size=64, vocab_size=61, max_position_embeddings=96, kv_lora_rank=52,
                        q_lora_rank=16, qk_nope_head_dim=12, qk_rope_head_dim=12, v_head_dim=20, first_dense=2)


def random_model(config, seed, dtype=torch.float64):
    """A model with random weights, sharpened so that answers vary."""
    torch.manual_seed(seed)
    model = Transformer(config, DeepseekLayer) if isinstance(config, DeepseekConfig) else Transformer(config)
    for parameter in model.parameters():
        parameter.data *= 2.5
    return model.to(dtype).eval()


@pytest.fixture(scope="module")
def models():
    return {(config.architecture, seed): random_model(config, seed) for config in (TINY, LATENT) for seed in (0, 1)}


def tokens_of(seed, *lengths):
    random = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 61, (n,), generator=random).tolist() for n in lengths]


def cache_for(model, name, num_requests=1, capacity=48):
    scales = None
    if name in FIXED:
        scales = static_scales(observe_kv(model, tokens_of(99, 40)[0]), name)
    return QuantizedCache(model.specs, num_requests, capacity, name, scales=scales)


@torch.inference_mode()
def step(model, cache, tokens, starts, rows):
    """Feed new tokens of some requests; returns the logits of each request's last row."""
    batch = Batch.build(tokens, starts, [[row] for row in rows], getattr(cache, "capacity", 48))
    return model.logits(model(batch.token_ids, batch.positions, cache.view(batch))[batch.logits_at])


def greedy(model, cache, prompts, num_tokens, rows=None, chunk=None):
    """Greedy answers; `chunk()` is the most tokens a request feeds in one step, all by default."""
    sequences, known = [list(p) for p in prompts], [0] * len(prompts)
    rows, ends = rows or list(range(len(prompts))), [len(p) + num_tokens for p in prompts]
    while live := [i for i in range(len(prompts)) if len(sequences[i]) < ends[i]]:
        stops = [min(len(sequences[i]), known[i] + (chunk() if chunk else 96)) for i in live]
        logits = step(model, cache, [sequences[i][known[i]:stop] for i, stop in zip(live, stops, strict=True)],
                      [known[i] for i in live], [rows[i] for i in live])
        for i, stop, row in zip(live, stops, logits, strict=True):
            known[i] = stop
            if stop == len(sequences[i]):
                sequences[i].append(int(row.argmax()))
    return [s[len(p):] for s, p in zip(sequences, prompts, strict=True)]


def cold(model, name, prompts, num_tokens=8):
    """Each prompt alone, in a cache of its own, in one chunk."""
    return [greedy(model, cache_for(model, name), [prompt], num_tokens)[0] for prompt in prompts]


@pytest.mark.parametrize("name", KV_FORMATS)
@pytest.mark.parametrize("key", [("llama", 0), ("llama", 1), ("deepseek_v3", 0)])
def test_chunks_batches_and_used_rows_answer_as_the_cold_run(models, name, key):
    model, prompts = models[key], tokens_of(key[1] + 7, 1, 17, 6, 30)
    expected, random = cold(model, name, prompts), torch.Generator().manual_seed(key[1])
    assert len({tuple(answer) for answer in expected}) == 4
    cache = cache_for(model, name, 5)
    assert greedy(model, cache, prompts, 8) == expected                                 # ragged, one chunk each
    for layer in cache.layers:
        for stored in layer:
            for tensor in stored:                            # the worst that an earlier request can leave behind
                tensor.view(torch.uint8).fill_(255)
    one = lambda: 1
    assert greedy(model, cache, prompts, 8, [4, 2, 0, 3], one) == expected              # token by token
    some = lambda: int(torch.randint(1, 9, (1,), generator=random))
    assert greedy(model, cache, prompts, 8, [1, 0, 3, 4], some) == expected             # chunks, over used rows


def test_formats_differ_where_they_should(models):
    """The comparison above would see a format that is not used: hidden states are those of rounded memories."""
    model, prompt = models["llama", 0], tokens_of(5, 20)
    logits = {name: step(model, cache_for(model, name), prompt, [0], [0]) for name in KV_FORMATS}
    exact = step(model, NoCache(model.specs, attend), prompt, [0], [0])
    error = {name: float((x - exact).norm() / exact.norm()) for name, x in logits.items()}
    assert len(set(error.values())) == len(KV_FORMATS) and 0 < error["float32"] < 1e-5
    assert error["float16"] < error["bfloat16"] < error["int8"] < error["fp8_e4m3_token"] < error["fp8_e5m2_token"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("config", [TINY, LATENT])
def test_32_bits_equal_the_contiguous_cache(config, dtype):
    model, prompts = random_model(config, 2, dtype), tokens_of(2, 3, 19)
    ours = QuantizedCache(model.specs, 2, 48, "float32")
    twin = ContiguousCache(model.specs, 2, 48, torch.float32, attention=attend)
    assert ours.num_bytes == twin.num_bytes
    for tokens, starts in ((prompts, [0, 0]), ([[5], [6]], [3, 19]), ([[7, 8, 9], [1]], [4, 20])):
        assert torch.equal(*(step(model, cache, tokens, starts, [1, 0]) for cache in (ours, twin)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", KV_FORMATS)
def test_models_of_16_bits_take_every_format(name, dtype):
    model = random_model(TINY, 3, dtype)
    cache = cache_for(model, name, 2)
    assert step(model, cache, tokens_of(3, 9, 4), [0, 0], [0, 1]).isfinite().all()
    cache.check(0, 9)
    cache.check(1, 4)


def test_the_attention_of_a_cache_can_be_chosen(models):
    model, calls = models["llama", 0], []

    def note(q, k, v, spec):
        calls.append((len(q), len(k), k.dtype, v.dtype))
        return attend(q, k, v, spec)

    cache = QuantizedCache(model.specs, 2, 48, "int8", attention=note)
    step(model, cache, tokens_of(1, 5, 3), [0, 0], [1, 0])
    assert calls == [(5, 5, torch.float32, torch.float32), (3, 3, torch.float32, torch.float32)] * 2


@pytest.mark.parametrize("name", KV_FORMATS)
def test_a_latent_is_stored_once(models, name):
    model = models["deepseek_v3", 0]
    cache = cache_for(model, name, 3, 10)
    assert [len(layer) for layer in cache.layers] == [1, 1]
    assert cache.num_bytes == 3 * 10 * sum(spec.bytes_per_token(name) for spec in model.specs)
    assert cache.num_bytes == 3 * 10 * 2 * KV_FORMATS[name].vector_bytes(64)


class Poisoned:
    """A cache's view that spoils one element of what one layer is about to store."""

    def __init__(self, cache, part, value):
        self.cache, self.part, self.value, self.specs, self.capacity = cache, part, value, cache.specs, cache.capacity

    def view(self, batch):
        self.inner = self.cache.view(batch)
        return self

    def attend(self, layer, q, k, v):
        if layer == 1:
            spoilt = [k.clone(), None if v is None else v.clone()]
            spoilt[self.part][2, -1, 5] = self.value                                    # row 2: the first request's
            k, v = spoilt
        return self.inner.attend(layer, q, k, v)


@pytest.mark.parametrize("name", KV_FORMATS)
@pytest.mark.parametrize(("part", "value"), [(0, math.nan), (1, math.inf), (0, -math.inf)])
def test_a_poisoned_request_leaves_the_others_bit_identical(models, name, part, value):
    model, prompts = models["llama", 1], tokens_of(4, 6, 9)
    clean, spoilt = cache_for(model, name, 2), cache_for(model, name, 2)
    for cache, wrapped in ((clean, clean), (spoilt, Poisoned(spoilt, part, value))):
        cache.first = step(model, wrapped, prompts, [0, 0], [0, 1])
        cache.second = step(model, cache, [[9], [8]], [6, 9], [0, 1])
    assert torch.equal(clean.first[1], spoilt.first[1]) and torch.equal(clean.second[1], spoilt.second[1])
    assert not spoilt.second[0].isfinite().all() and clean.second.isfinite().all()
    for index, layers in enumerate(zip(clean.layers, spoilt.layers, strict=True)):
        for place, (a, b) in enumerate(zip(*layers, strict=True)):
            others = torch.ones(2, 48, 2, dtype=torch.bool)
            if (index, place) == (1, part):
                others[0, 2, -1] = False                     # the spoilt row; layer 1 is the last that stores
            assert same_bytes(pick(a, others), pick(b, others))
    clean.check(0, 7)
    spoilt.check(1, 10)
    spoilt.check(0, 2)                                                                  # the rows before it
    where = f"{('key', 'value')[part]} of position 2, layer 1, head 1"
    with pytest.raises(ValueError, match=f"request 0: 1 stored rows are not numbers; the first is the {where}"):
        spoilt.check(0, 7)


def test_check_counts_rows_and_reads_latents(models):
    cache = cache_for(models["deepseek_v3", 0], "int8", 2)
    cache.layers[0][0].scales[1, 4:6] = math.nan
    cache.check(0, 48)
    cache.check(1, 4)
    with pytest.raises(ValueError, match=r"request 1: 2 stored rows .* key of position 4, layer 0, head 0"):
        cache.check(1, 48)


# What a model asks and remembers


@pytest.mark.parametrize("key", [("llama", 0), ("deepseek_v3", 0)])
def test_observed_keys_and_values_are_those_a_cache_stores(models, key):
    model, tokens = models[key], tokens_of(6, 15)[0]
    observed, cache = observe_kv(model, tokens), cache_for(model, "float32")
    step(model, cache, [tokens], [0], [0])
    assert len(observed) == len(model.specs)
    for (q, k, v), layer, spec in zip(observed, cache.layers, model.specs, strict=True):
        assert q.shape == (15, spec.num_heads, spec.head_dim) and {t.dtype for t in (q, k, v)} == {torch.float32}
        assert torch.allclose(k, layer[0].payload[0, :15], atol=1e-5)
        stored = layer[0].payload[0, :15, :, :spec.value_dim] if spec.value_in_key else layer[1].payload[0, :15]
        assert torch.allclose(v, stored, atol=1e-5)


@pytest.mark.parametrize("name", [*FIXED, "int4"])
@pytest.mark.parametrize("per", ["tensor", "head", "channel"])
def test_static_scales_make_the_largest_observed_the_largest_number(name, per):
    observed = [tuple(mixed((7, heads, 32), seed, low=-1, high=1) for heads in (4, 2, 2)) for seed in (1, 2)]
    largest = {"fp8_e4m3": 448, "fp8_e5m2": 57_344, "int8_static": 127, "int4": 15}[name]
    scales = static_scales(observed, name, per)
    for (_, *tensors), pair in zip(observed, scales, strict=True):
        for x, scale in zip(tensors, pair, strict=True):
            expected = {"tensor": x.abs().max(), "head": x.abs().amax((0, 2))[:, None], "channel": x.abs().amax(0)}[per]
            assert torch.equal(scale.expand(2, 32), (expected / largest).expand(2, 32))
            codec = kv_codec(name, scale)
            if name != "int4":
                largest_code = codec.decode(codec.encode(x)).abs().max()
                assert torch.isclose(largest_code, x.abs().max(), rtol=1e-6)
    silent = static_scales([(torch.zeros(3, 2, 32),) * 3], name, per)[0][0]
    assert bool((silent > 0).all()) and kv_codec(name, silent).decode(kv_codec(name, silent).encode(
        torch.full((1, 2, 32), 1e30))).isfinite().all()      # a channel silent when observed saturates later
