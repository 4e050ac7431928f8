"""Bytes come from one place, and that place agrees with arithmetic and with what is allocated."""
import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvbook.compute.model import ContiguousCache
from kvbook.control.config import (
    KNOWN_MODELS,
    KV_FORMATS,
    CacheSpec,
    LayerSpec,
    ModelConfig,
    kv_format,
    layer_groups,
)

SMOL = KNOWN_MODELS["SmolLM2-135M"]


@pytest.mark.parametrize(("model", "kv_dtype", "num_bytes"), [
    ("SmolLM2-135M", "bfloat16", 23_040), ("SmolLM2-135M", "int8", 11_880), ("SmolLM2-135M", "int4", 7_200),
    ("SmolLM2-135M", "fp8_e4m3", 11_520), ("SmolLM2-135M", "float32", 46_080),
    ("Llama-3-8B", "bfloat16", 131_072), ("Llama-3-70B", "bfloat16", 327_680), ("Llama-3.1-405B", "bfloat16", 516_096),
])
def test_bytes_per_token(model, kv_dtype, num_bytes):
    assert CacheSpec.of(KNOWN_MODELS[model], kv_dtype).bytes_per_token == num_bytes


def test_parameter_counts_are_the_published_ones():
    billions = {"Llama-2-7B": 6.74, "Llama-2-70B": 68.98, "Llama-3-8B": 8.03, "Llama-3-70B": 70.55,
                "Llama-3.1-405B": 405.85, "Qwen2.5-7B": 7.62, "Qwen3-8B": 8.19, "Qwen3-32B": 32.76}
    assert {name: round(KNOWN_MODELS[name].num_params() / 1e9, 2) for name in billions} == billions


@given(rows=st.integers(1, 3), capacity=st.integers(1, 9), layers=st.integers(1, 4), heads=st.integers(1, 3),
       dim=st.sampled_from([2, 64, 80]), dtype=st.sampled_from(["float32", "bfloat16", "float16"]))
def test_what_is_promised_is_what_is_allocated(rows, capacity, layers, heads, dim, dtype):
    config = dataclasses.replace(SMOL, num_layers=layers, num_heads=2 * heads, num_kv_heads=heads, head_dim=dim)
    cache = ContiguousCache(config.layer_specs(), rows, capacity, getattr(torch, dtype))
    assert cache.num_bytes == rows * capacity * CacheSpec.of(config, dtype).bytes_per_token


@given(tokens=st.integers(0, 200), block=st.integers(1, 40), window=st.one_of(st.none(), st.integers(1, 64)))
def test_pages_hold_exactly_what_can_be_seen(tokens, block, window):
    """The pages counted are those that hold a position which the next token's window, or anybody's, still needs."""
    spec = LayerSpec(2, 1, 8, 8, 1.0, window=window)
    cache = CacheSpec(tuple(layer_groups([spec, spec])), "bfloat16", block)
    needed = range(max(0, tokens - window) if window else 0, tokens)
    assert cache.pages_per_request(tokens) == len({position // block for position in needed})
    assert cache.bytes_per_request(tokens) == cache.pages_per_request(tokens) * cache.bytes_per_page


def test_groups_are_of_equal_size_and_cover_each_layer_once():
    full, local = LayerSpec(4, 2, 8, 8, 1.0), LayerSpec(4, 2, 8, 8, 1.0, window=16)
    groups = layer_groups([local, local, full] * 3 + [local])
    assert sorted(layer for group in groups for layer in group.layers) == list(range(10))
    assert {group.size for group in groups} == {3} and len(groups) == 4
    assert all(1 <= len(group.layers) <= group.size for group in groups)
    cache = CacheSpec(tuple(groups), "bfloat16", 16)
    assert cache.bytes_per_page == 16 * 3 * full.bytes_per_token("bfloat16")
    assert cache.bytes_per_token == 10 * full.bytes_per_token("bfloat16")


def test_groups_that_differ_in_bytes_are_refused():
    with pytest.raises(ValueError, match=r"differ in bytes per token \(\[64, 128\]"):
        layer_groups([LayerSpec(4, 2, 8, 8, 1.0), LayerSpec(4, 4, 8, 8, 1.0)])


def test_latent_layers_store_no_value():
    latent = LayerSpec(16, 1, 576, 512, 192 ** -0.5, value_in_key=True)
    assert latent.bytes_per_token("bfloat16") == 576 * 2


def test_unknown_formats_and_sizes_that_do_not_fit():
    with pytest.raises(ValueError, match=r"kv_dtype='int3' is unknown; known formats: float32, .*int4"):
        kv_format("int3")
    with pytest.raises(ValueError, match="multiple of 32 elements, got 80"):
        CacheSpec.of(dataclasses.replace(SMOL, head_dim=80), "int4")
    with pytest.raises(ValueError, match="block_size=0"):
        CacheSpec.of(SMOL, block_size=0)


@pytest.mark.parametrize(("field", "value"), [("num_layers", 0), ("vocab_size", None), ("hidden_size", 1.5),
                                              ("num_kv_heads", True), ("head_dim", 63)])
def test_impossible_fields_are_named(field, value):
    with pytest.raises(ValueError, match=rf"{field}.*{value}|{field}={value}"):
        dataclasses.replace(SMOL, **{field: value})


def test_both_spellings_of_a_config():
    """Hugging Face moved rope_theta and renamed torch_dtype; both spellings mean the same."""
    base = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
            "intermediate_size": 96, "vocab_size": 100, "max_position_embeddings": 128, "eos_token_id": [2, 7]}
    scaling = {"rope_type": "linear", "factor": 2.0}
    old = ModelConfig.from_hf(base | {"rope_theta": 5e5, "rope_scaling": scaling, "torch_dtype": "float16"})
    new = ModelConfig.from_hf(base | {"rope_parameters": {"rope_theta": 5e5, **scaling}, "dtype": "float16"})
    assert vars(old) == vars(new)
    assert old.num_kv_heads == 4 and old.head_dim == 16 and old.eos_token_ids == (2, 7)


def test_every_format_has_a_price_for_the_default_model():
    prices = {name: CacheSpec.of(SMOL, name).bytes_per_token for name in KV_FORMATS}
    assert sorted(prices, key=prices.get)[0] == "int4" and max(prices.values()) == prices["float32"]


@pytest.mark.parametrize(("field", "value"), [
    ("num_heads", 0), ("num_heads", 5), ("num_heads", 4.0), ("num_heads", True), ("head_dim", None), ("window", 0),
    ("window", -1), ("window", 2.5), ("window", True), ("softcap", 0.0), ("softcap", -1.0), ("softcap", float("inf")),
    ("softcap", float("nan")), ("scale", float("nan")), ("scale", None), ("scale", "x"), ("value_dim", 9)])
def test_impossible_layers_are_refused(field, value):
    fields = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "value_dim": 8, "scale": 1.0, "value_in_key": True}
    LayerSpec(**fields)
    with pytest.raises(ValueError, match=field):
        LayerSpec(**fields | {field: value})
