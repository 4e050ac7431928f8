"""Costs against brute-force counting, and the roofline against its definition."""
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbook.control.config import KNOWN_MODELS, CacheSpec
from kvbook.lab.hardware import (
    DEVICES,
    Device,
    available_bytes,
    measure_device,
    median_seconds,
    roofline_seconds,
    step_cost,
)

SMOL = KNOWN_MODELS["SmolLM2-135M"]
loads_strategy = st.lists(st.integers(1, 30).flatmap(lambda new: st.tuples(st.just(new), st.integers(new, 60))),
                          min_size=1, max_size=5)


@given(loads=loads_strategy, kv_dtype=st.sampled_from(["bfloat16", "int8", "int4"]))
def test_a_step_is_counted_as_it_is_computed(loads, kv_dtype):
    cost = step_cost(SMOL, loads, kv_dtype=kv_dtype)
    matrices = [(576, 576), (576, 192), (576, 192), (576, 576), (576, 1536), (576, 1536), (1536, 576)]
    tokens = sum(new for new, _ in loads)
    linear = 30 * sum(2 * a * b * tokens for a, b in matrices) + 2 * 576 * 49_152 * len(loads)
    pairs = sum(1 for new, total in loads for row in range(new) for key in range(total) if key <= total - new + row)
    assert cost.linear_flop == linear
    assert cost.attention_flop == 30 * 9 * pairs * (2 * 64 + 2 * 64)
    assert cost.weight_bytes == 2 * (30 * sum(a * b for a, b in matrices) + 576 * 49_152)
    per_token = CacheSpec.of(SMOL, kv_dtype).bytes_per_token
    assert cost.kv_bytes == per_token * (tokens + sum(total for _, total in loads))
    assert cost.intensity == (cost.linear_flop + cost.attention_flop) / (cost.weight_bytes + cost.kv_bytes)


@pytest.mark.parametrize("load", [(0, 5), (6, 5), (-1, 3)])
def test_impossible_loads_are_refused(load):
    with pytest.raises(ValueError, match="impossible"):
        step_cost(SMOL, [load])


def test_the_roofline_is_the_slower_of_two():
    device = Device("toy", 10**9, 100.0, {"bfloat16": 1000.0})
    cost = step_cost(SMOL, [(1, 1)])
    assert device.ridge() == 10 and device.ridge_tokens() == 10
    assert roofline_seconds(cost, device) == cost.bytes / 100
    long = step_cost(SMOL, [(512, 512)])
    assert roofline_seconds(long, device) == long.flop / 1000
    with pytest.raises(ValueError, match=r"toy has no peak for 'fp8_e4m3'; known: bfloat16"):
        device.ridge("fp8_e4m3")
    with pytest.raises(ValueError, match="no peak"):
        roofline_seconds(cost, device, "int8")


def test_ridges_are_those_of_the_data_sheets():
    ridges = {"A100 80 GB SXM": 153, "H100 SXM": 295, "H200": 206, "B200": 281, "L4": 403, "RTX 4090": 164,
              "MI300X": 247}
    assert {name: round(device.ridge_tokens()) for name, device in DEVICES.items()} == ridges
    assert round(DEVICES["H100 SXM"].ridge("fp8_e4m3")) == 591
    assert all(device.source for device in DEVICES.values())


def test_measuring_returns_positive_ceilings():
    device = measure_device(dtype="float32", megabytes=4, size=64)
    assert device.bandwidth_bytes_per_s > 0 and device.flop_per_s["float32"] > 0
    assert available_bytes() > 0 and device.memory_bytes > 0


def test_the_median_leaves_out_the_first_run():
    calls = []
    median_seconds(lambda: calls.append(1), repeats=3)
    assert len(calls) == 4
