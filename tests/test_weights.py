"""Packed weights: what is kept of them, what the kernels make of it, whole models, and the file's own 4 bits."""
import copy
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from kvbook.compute.attention import attend
from kvbook.compute.checkpoint import load, locate, read_gguf
from kvbook.compute.mla import DeepseekConfig, DeepseekLayer, Router
from kvbook.compute.model import DecoderLayer, Transformer, generate
from kvbook.compute.weights import Int4Linear, Int8Embedding, Int8Linear, load_packed, pack_weights, packer, smoothing
from kvbook.compute.windows import Gemma2Config, Gemma2Layer, MistralConfig
from kvbook.control.config import ModelConfig
from kvbook.lab.quality import help_text, perplexity, text_logits

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Elsewhere(torch.Tensor):
    """A tensor that says it is not on a CPU."""

    device = property(lambda self: torch.device("cuda"))


def elsewhere(tensor):
    return tensor.as_subclass(Elsewhere)


def here(tensor):
    return tensor.detach().as_subclass(torch.Tensor)


def rounding(dtype):
    """Half a step of a dtype: of normal numbers as a share, and of the smallest in absolute terms."""
    info = torch.finfo(dtype)
    return info.eps / 2, info.smallest_normal * info.eps / 2


# ---- 4 bits

KINDS = ("random", "constant", "outlier", "far from zero", "zeros")


def planted(kind, rows, columns, magnitude, seed):
    torch.manual_seed(seed)
    weight = torch.randn(rows, columns).clamp(-4, 4)
    if kind == "constant":
        weight = torch.randn(rows, 1).clamp(-4, 4).expand(rows, columns)
    elif kind == "outlier":
        weight[:, 1] = 50
    elif kind == "far from zero":
        weight += 20
    elif kind == "zeros":
        weight = torch.zeros(rows, columns)
    return weight * magnitude


@settings(max_examples=120)
@given(kind=st.sampled_from(KINDS), rows=st.sampled_from((1, 15, 24, 48)), group=st.sampled_from((2, 16, 32, 64, 128)),
       num_groups=st.integers(1, 3), power=st.integers(-44, 37), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 99))
def test_a_decoded_4_bit_weight_is_within_half_a_step(kind, rows, group, num_groups, power, dtype, seed):
    """Half a step for the code; then the step and the group's middle are rounded to the dtype (the code takes at most
    8 steps from the middle), their product and the sum are rounded, and float32 found the step."""
    magnitude = 10.0 ** (max(-7, min(3, power)) if dtype == torch.float16 else power)
    weight = planted(kind, rows, group * num_groups, magnitude, seed)
    groups = weight.unflatten(1, (-1, group)).double()
    step, largest = (groups.amax(-1) - groups.amin(-1)) / 15, groups.abs().amax(-1)
    share, least = (a + b for a, b in zip(rounding(dtype), rounding(torch.float32), strict=True))
    bound = step * (0.5 + 16 * share) + 4 * largest * share + 24 * least
    layer = Int4Linear(weight, None, group, dtype)
    decoded = layer.weight
    assert decoded.shape == weight.shape and decoded.dtype == dtype
    error = (decoded.double().unflatten(1, (-1, group)) - groups).abs().amax(-1)
    assert (error <= bound).all()
    if kind == "random" and group >= 16 and abs(power) <= 3 and dtype != torch.float16:
        assert (error > step / 4).float().mean() > 0.9               # the bound is not idle


@settings(max_examples=60)
@given(rows=st.sampled_from((16, 48, 576)), group=st.sampled_from((32, 64, 128)), num_groups=st.integers(1, 5),
       tokens=st.sampled_from((0, 1, 2, 5, 16, 67)), dtype=st.sampled_from(DTYPES), biased=st.booleans(),
       seed=st.integers(0, 99))
def test_the_packed_kernel_is_a_product_with_the_decoded_weights(rows, group, num_groups, tokens, dtype, biased, seed):
    torch.manual_seed(seed)
    weight, columns = torch.randn(rows, group * num_groups), group * num_groups
    bias = torch.randn(rows).to(dtype) if biased else None
    packed, fallback = Int4Linear(weight, bias, group, dtype), Int4Linear(elsewhere(weight), bias, group, dtype)
    assert packed.native == (dtype == torch.bfloat16) and not fallback.native
    assert sum(p.numel() for n, p in packed.named_parameters() if n == "packed") == rows * columns // 2
    x = torch.randn(tokens, columns).to(dtype)
    decoded, share = packed.weight.double(), rounding(dtype)[0]
    reference = x.double() @ decoded.T + (0 if bias is None else bias.double())
    slack = x.double().abs() @ decoded.abs().T * (columns * 2.0 ** -24 + (dtype != torch.float32) * 2 * share)
    slack = slack + 2 * share * (reference.abs() + (0 if bias is None else bias.double().abs())) + 1e-30
    for y, more in ((packed(x), 1), (here(fallback(x)), 4)):          # in 16 bits the fallback rounds decoded weights
        assert y.shape == (tokens, rows) and y.dtype == dtype
        assert ((y.double() - reference).abs() <= more * slack).all()
    spread = torch.randn(2 * columns, 3).to(dtype)[::2].T             # neither dense nor in rows
    close = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(packed(spread), packed(spread.contiguous()), rtol=close, atol=1e-3)


def test_both_ways_decode_the_same_4_bits():
    torch.manual_seed(0)
    weight = torch.randn(48, 128)
    for group in (32, 64, 128):
        native, steps = Int4Linear(weight, None, group), weight.unflatten(1, (-1, group))
        close = (steps.amax() - steps.amin()).item() * 2.0 ** -7      # what bfloat16 may round between the two
        for rows, moved in ((15, weight[:15]), (48, elsewhere(weight))):
            other = Int4Linear(moved, None, group)
            assert native.native and not other.native
            assert torch.equal(native.scales[:, :rows], here(other.scales))
            torch.testing.assert_close(native.weight[:rows], here(other.weight), rtol=0, atol=close)
    small = Int4Linear(weight, None, 16, torch.float32)               # a group that torch's kernel does not know
    x = torch.randn(5, 128)
    assert not small.native
    torch.testing.assert_close(small(x), x @ small.weight.T)
    assert (small.weight - weight).abs().max() < (Int4Linear(weight, None, 128).weight - weight).abs().max()


@pytest.mark.parametrize("rows", [1, 16])
def test_ranges_of_a_few_of_the_smallest_numbers_stay_within_their_codes(rows):
    """22 of float32's smallest number make a step of 22 / 15, which is 1: the largest weight would be code 22."""
    weight = torch.arange(32).repeat(rows, 1).remainder(23) * torch.tensor(2.0 ** -149)
    decoded = Int4Linear(weight, None, 32, torch.float32).weight
    assert (decoded - weight).abs().max() <= 7 * torch.tensor(2.0 ** -149)
    weight = torch.arange(190).remainder(191).repeat(rows, 1) * torch.tensor(2.0 ** -149)
    decoded = Int8Linear(weight, None, torch.float32).weight
    assert (decoded >= 0).all() and (decoded <= weight).all()


@pytest.mark.parametrize("group", [0, 1, 3, 7, 64, 480, -32, 32.0, "32", None, True])
def test_groups_that_do_not_divide_name_the_layer(group):
    model = Transformer(ModelConfig("llama", 1, 96, 2, 1, 48, 96, 31, 32))
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.q_proj: group="):
        pack_weights(model, group=group)


# ---- 8 bits

def whole_numbers(rows, columns, seed):
    """int8 codes whose rows all reach 127, so that their scale is 1."""
    torch.manual_seed(seed)
    codes = torch.randint(-127, 128, (rows, columns))
    codes[:, seed % columns] = 127 if seed % 2 else -127
    return codes


@settings(max_examples=80)
@given(columns=st.sampled_from((1, 2, 31, 32, 33, 64, 576, 1000, 1024, 1500, 3104)), rows=st.integers(1, 20),
       tokens=st.sampled_from((0, 1, 2, 7, 33)), extreme=st.booleans(), seed=st.integers(0, 99))
def test_integer_products_are_exact(columns, rows, tokens, extreme, seed):
    w, x = whole_numbers(rows, columns, seed), whole_numbers(tokens, columns, seed + 1)
    if extreme:
        w, x = torch.full_like(w, 127), torch.full_like(x, -127)
    layer = Int8Linear(w.float(), None, torch.float32)
    assert torch.equal(layer.weight, w.float())
    expected = (x @ w.T).float()
    assert torch.equal(layer(x.float()), expected)
    assert torch.equal(here(layer(elsewhere(x.float()))), expected)


@settings(max_examples=80)
@given(columns=st.sampled_from((5, 32, 50, 576)), rows=st.integers(1, 20), tokens=st.sampled_from((0, 1, 3, 33)),
       dtype=st.sampled_from(DTYPES), biased=st.booleans(), power=st.integers(-3, 3), seed=st.integers(0, 99))
def test_rounding_to_8_bits_is_bounded(columns, rows, tokens, dtype, biased, power, seed):
    """Weights by half a scale; products of W8A8 by half a token's scale for each weight on top."""
    torch.manual_seed(seed)
    weight, x = torch.randn(rows, columns) * 10.0 ** power, torch.randn(tokens, columns).to(dtype)
    bias = torch.randn(rows).to(dtype) if biased else None
    share, least = (a + b for a, b in zip(rounding(dtype), rounding(torch.float32), strict=True))
    for int8_inputs in (False, True):
        layer = Int8Linear(weight, bias, dtype, int8_inputs)
        decoded = layer.weight.double()
        assert layer.weight.dtype == dtype and layer.packed.dtype == torch.int8
        scale = layer.scale.double()[:, None]
        bound = scale * 0.501 + 2 * share * weight.abs() + 127 * least
        assert ((decoded - weight).abs() <= bound).all()
        exact = x.double() @ (layer.packed.double() * scale).T
        slack = x.double().abs() @ (layer.packed.double() * scale).abs().T * (columns * 2.0 ** -24 + 4 * share)
        if int8_inputs:
            step = x.double().abs().amax(-1, keepdim=True) / 127
            slack = slack + 0.501 * step * (layer.packed.double() * scale).abs().sum(1)
        expected = exact + (0 if bias is None else bias.double())
        slack = slack + 2 * share * expected.abs() + (0 if bias is None else share * bias.double().abs()) + least
        for y in (layer(x), here(layer(elsewhere(x)))):
            assert y.shape == (tokens, rows) and y.dtype == dtype
            assert ((y.double() - expected).abs() <= slack).all()
    spread = torch.randn(2 * columns, 3).to(dtype)[::2].T
    assert torch.equal(layer(spread), layer(spread.contiguous()))


def test_weights_that_fit_a_rounded_scale_are_rounded_to_it():
    """In bfloat16 a scale is off by up to 1/256: codes of the exact scale would be off by half a code more."""
    torch.manual_seed(0)
    weight = torch.randn(64, 64)
    layer = Int8Linear(weight, None, torch.bfloat16, int8_inputs=False)
    scale = layer.scale.float()[:, None]
    assert ((layer.packed.float() * scale - weight).abs() <= scale * 0.5001).all()


LAYERS = {
    "w4a16": lambda w, dtype: Int4Linear(w, None, 32, dtype),
    "w4a16 decoded": lambda w, dtype: Int4Linear(w[:15], None, 32, dtype),
    "w8a16": lambda w, dtype: Int8Linear(w, None, dtype, int8_inputs=False),
    "w8a16 decoded": lambda w, dtype: Int8Linear(w[:, :33], None, dtype, int8_inputs=False),
    "w8a8": lambda w, dtype: Int8Linear(w, None, dtype),
    "w8a8 decoded": lambda w, dtype: Int8Linear(w[:, :33], None, dtype),
}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", LAYERS)
def test_a_broken_token_spoils_its_own_row_only(kind, dtype, bad):
    torch.manual_seed(0)
    layer = LAYERS[kind](torch.randn(32, 64), dtype)
    x = torch.randn(5, 33 if "decoded" in kind and "w8" in kind else 64).to(dtype)
    clean = layer(x)
    x[2, 7] = bad
    y = layer(x)
    assert not y[2].isfinite().any()
    assert torch.equal(y[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", LAYERS)
def test_rows_of_zeros(kind, dtype):
    torch.manual_seed(0)
    weight = torch.randn(32, 64)
    weight[3] = 0
    layer = LAYERS[kind](weight, dtype)
    x = torch.randn(5, 33 if "decoded" in kind and "w8" in kind else 64).to(dtype)
    x[1] = 0
    y = layer(x)
    assert (layer.weight[3] == 0).all() and (y[:, 3] == 0).all()
    assert (y[1] == 0).all() and y[0].count_nonzero() >= len(y[0]) - 1


@pytest.mark.parametrize("kind", ["w8a8", "w8a8 decoded"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_are_rounded_alone(kind, dtype):
    torch.manual_seed(0)
    columns = 3104 if kind == "w8a8" else 3099
    layer = Int8Linear(torch.randn(48, columns), torch.randn(48).to(dtype), dtype)
    assert layer.native == (kind == "w8a8")
    x = (torch.randn(40, columns) * torch.logspace(-3, 3, 40)[:, None]).to(dtype)
    together = layer(x)
    for i in range(len(x)):
        assert torch.equal(layer(x[i:i + 1])[0], together[i])


def test_smoothing_is_exact_where_nothing_is_rounded():
    """Powers of two move the outlier out of the inputs and lose nothing; without them the rest is rounded off."""
    w, x = whole_numbers(16, 64, 3), whole_numbers(9, 64, 4)
    smooth = 2.0 ** torch.randint(-9, 10, (64,))
    layer = Int8Linear(w / smooth, None, torch.float32, smooth=smooth)
    assert torch.equal(layer.weight, w / smooth)                      # undone
    inputs, expected = x * smooth, (x @ w.T).float()
    assert torch.equal(layer(inputs), expected)
    assert torch.equal(here(layer(elsewhere(inputs))), expected)
    plain = Int8Linear(w / smooth, None, torch.float32)
    assert (plain(inputs) - expected).abs().max() > 100
    with pytest.raises(ValueError, match="smooth needs int8_inputs=True"):
        Int8Linear(w / smooth, None, int8_inputs=False, smooth=smooth)


# ---- whole models

SIZES = {"num_layers": 2, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "intermediate_size": 96,
         "vocab_size": 61, "max_position_embeddings": 96}
LATENT = SIZES | {"num_kv_heads": 4, "head_dim": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 20, "qk_rope_head_dim": 12,
                  "v_head_dim": 16, "first_dense": 1, "num_experts": 4, "num_shared_experts": 1, "experts_per_token": 4,
                  "moe_intermediate_size": 32}
MODELS = {
    "llama": (ModelConfig("llama", **SIZES), DecoderLayer),
    "llama, tied, with biases": (ModelConfig("llama", **SIZES, tie_word_embeddings=True, qkv_bias=True,
                                             output_bias=True, mlp_bias=True), DecoderLayer),
    "qwen2": (ModelConfig("qwen2", **SIZES, qkv_bias=True), DecoderLayer),
    "qwen3": (ModelConfig("qwen3", **SIZES, qk_norm=True, tie_word_embeddings=True), DecoderLayer),
    "mistral": (MistralConfig("mistral", **SIZES, sliding_window=5), DecoderLayer),
    "gemma2": (Gemma2Config("gemma2", **SIZES, tie_word_embeddings=True, embedding_scale=8.0, final_softcap=3.0,
                            windows=(5, None), attention_softcap=2.0, query_pre_attn_scalar=16), Gemma2Layer),
    "deepseek v2": (DeepseekConfig(architecture="deepseek_v2", **LATENT), DeepseekLayer),
    "deepseek v3, unfolded": (DeepseekConfig(architecture="deepseek_v3", **LATENT, q_lora_rank=32, absorbed=False,
                                             topk_method="noaux_tc", num_groups=2, topk_groups=2,
                                             norm_topk_prob=True), DeepseekLayer),
}
TEXT = [int(i) for i in torch.randint(0, 61, (24,), generator=torch.Generator().manual_seed(5))]


def random_model(name, dtype=torch.float32):
    torch.manual_seed(11)
    config, layer = MODELS[name]
    model = Transformer(config, layer)
    for key, parameter in model.named_parameters():
        if "norm" in key or "bias" in key:
            parameter.data.add_(torch.randn_like(parameter) * 0.1)
        elif parameter.dim() == 2 and "embed" not in key:
            parameter.data.mul_(2)
    return model.requires_grad_(False).to(dtype).eval()


def logits_of(model, text=TEXT):
    return text_logits(model, text, attention=attend)


def decoded_twin(model, packed):
    """The model with what its packed weights say, in plain matrices."""
    twin = copy.deepcopy(model)
    for name, module in twin.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight = nn.Parameter(packed.get_submodule(name).weight, requires_grad=False)
    return twin


def relative(ours, theirs):
    return ((ours - theirs).norm() / theirs.norm()).item()


@pytest.mark.parametrize("name", MODELS)
def test_w4a16_models_are_those_of_their_decoded_weights(name):
    model = random_model(name)
    packed = pack_weights(model, "w4a16")
    assert any(isinstance(module, Int4Linear) for module in packed.modules())
    assert not any(type(module) is nn.Linear for module in packed.modules())
    logits, original = logits_of(packed), logits_of(model)
    assert relative(logits, logits_of(decoded_twin(model, packed))) < 1e-5
    assert 0.005 < relative(logits, original) < 0.35


@pytest.mark.parametrize("name", MODELS)
def test_w8a8_models_stay_close(name):
    model = random_model(name)
    packed = pack_weights(model, "w8a8")
    assert not any(type(module) in (nn.Linear, nn.Embedding, Int4Linear) for module in packed.modules())
    assert 1e-4 < relative(logits_of(packed), logits_of(model)) < 0.06


@pytest.mark.parametrize("weights", ["w4a16", "w8a8"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODELS)
def test_packing_leaves_the_model_as_it_was_and_generates(name, dtype, weights):
    model = random_model(name, dtype)
    before, kinds = {k: v.clone() for k, v in model.state_dict().items()}, [type(m) for m in model.modules()]
    logits = logits_of(model)
    packed = pack_weights(model, weights)
    assert packed.dtype == dtype and packed.device == model.device
    runs = generate(packed, [TEXT[:5], TEXT[5:6]], 4, stop_token_ids=(), attention=attend)
    assert [run.finish_reason for run in runs] == ["length"] * 2
    assert [len(run.token_ids) for run in runs] == [4, 4]
    assert kinds == [type(m) for m in model.modules()] and model.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(logits_of(model), logits)


@pytest.mark.parametrize("weights", ["w4a16", "w8a8"])
def test_routers_stay_as_they_are(weights):
    model = random_model("deepseek v3, unfolded")
    packed = pack_weights(model, weights)
    found, original = ([m for m in which.modules() if isinstance(m, Router)] for which in (packed, model))
    assert len(found) == 1
    for ours, theirs in zip(found, original, strict=True):
        assert torch.equal(theirs.weight, ours.weight)
        assert torch.equal(theirs.e_score_correction_bias, ours.e_score_correction_bias)


@pytest.mark.parametrize("weights", ["w4a16", "w8a8"])
def test_embeddings_share_memory_with_a_tied_head(weights):
    packed = pack_weights(random_model("qwen3"), weights)
    head, table = packed.lm_head, packed.embed_tokens
    assert isinstance(table, Int8Embedding) and isinstance(head, Int8Linear)
    assert head.int8_inputs == (weights == "w8a8")
    assert table.packed.data_ptr() == head.packed.data_ptr() and table.scale.data_ptr() == head.scale.data_ptr()
    assert torch.equal(table.weight, head.weight)
    ids = torch.tensor([0, 60, 7, 7])
    assert torch.equal(table(ids), table.weight[ids])
    untied = pack_weights(random_model("llama"), weights)
    assert untied.embed_tokens.packed.data_ptr() != untied.lm_head.packed.data_ptr()
    assert not torch.equal(untied.embed_tokens.weight, untied.lm_head.weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", [16, 32])
@pytest.mark.parametrize("name", ["llama", "llama, tied, with biases", "qwen2", "qwen3"])
def test_bytes_in_closed_form(name, group, dtype):
    config, model = MODELS[name][0], random_model(name, dtype)
    width, d, q, kv = dtype.itemsize, config.hidden_size, 64, 32
    ff, layers, vocab = config.intermediate_size, config.num_layers, config.vocab_size
    linear = d * q + 2 * d * kv + q * d + 3 * d * ff
    outputs = q + 2 * kv + d + 2 * ff + d
    biases = config.qkv_bias * (q + 2 * kv) + config.output_bias * d + config.mlp_bias * (2 * ff + d)
    norms = layers * (2 * d + config.qk_norm * 2 * config.head_dim) + d
    plain, tables = (norms + layers * biases) * width, 1 if config.tie_word_embeddings else 2
    assert model.num_weight_bytes == width * config.num_params()
    assert pack_weights(model, "w4a16", group=group).num_weight_bytes == (
        layers * (linear // 2 + linear // group * 2 * width) + tables * vocab * (d + width) + plain)
    assert pack_weights(model, "w8a8").num_weight_bytes == (
        layers * (linear + 4 * outputs) + tables * vocab * (d + 4) + plain)


def test_what_cannot_be_packed_is_refused():
    model = random_model("llama")
    for call in (lambda: pack_weights(model, "int3"), lambda: packer("int3", torch.float32),
                 lambda: load_packed("nowhere", "int3")):
        with pytest.raises(ValueError, match="weights='int3' is unknown; known: w4a16, w8a8"):
            call()
    for weights in ("w4a16", "w8a8"):
        with pytest.raises(ValueError, match="packed already"):
            pack_weights(pack_weights(model, weights))
    with pytest.raises(ValueError, match="smooth goes with weights='w8a8'; weights='w4a16'"):
        pack_weights(model, "w4a16", smooth=smoothing(model, TEXT))


# ---- smoothing

def with_outlier(name="llama", channel=7, factor=300.0):
    """A model whose first norm makes one channel large, and whose weights behind it make up for that."""
    model = random_model(name)
    layer = model.layers[0]
    layer.input_layernorm.weight[channel] *= factor
    for proj in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
        proj.weight[:, channel] /= factor
    return model


@pytest.mark.parametrize("strength", [0, 0.4, 1])
def test_divisors_in_closed_form(strength):
    """|X|ᵅ / |W|¹⁻ᵅ with the largest of each input channel."""
    model = with_outlier()
    found = smoothing(model, TEXT, strength)
    assert set(found) == {name for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    x = model.embed_tokens.weight[TEXT]
    x = x / (x.square().mean(-1, keepdim=True) + model.config.rms_norm_eps).sqrt()
    x = x * model.layers[0].input_layernorm.weight
    for proj in "qkv":
        weight = model.layers[0].self_attn.get_submodule(f"{proj}_proj").weight
        expected = x.abs().amax(0) ** strength / weight.abs().amax(0) ** (1 - strength)
        torch.testing.assert_close(found[f"layers.0.self_attn.{proj}_proj"], expected)
        if strength == 1:
            torch.testing.assert_close((x / expected).abs().amax(0), torch.ones(64))
        elif strength == 0:
            torch.testing.assert_close((weight * expected).abs().amax(0), torch.ones(64))


def test_smoothing_rescues_a_planted_outlier():
    model = with_outlier()
    reference, smooth = logits_of(model), smoothing(model, TEXT)
    plain, smoothed = (relative(logits_of(pack_weights(model, "w8a8", smooth=s)), reference) for s in (None, smooth))
    assert smoothed < 0.06 < plain / 3


def test_smoothing_of_heads_experts_and_tensors():
    untied, tied = smoothing(random_model("llama"), TEXT), smoothing(random_model("qwen3"), torch.tensor(TEXT))
    assert "lm_head" in untied and "lm_head" not in tied              # a tied head's codes are the embeddings' too
    model = random_model("deepseek v2")
    smooth = smoothing(model, TEXT)
    assert "layers.0.self_attn.kv_b_proj" not in smooth               # never called: its weights are read
    assert relative(logits_of(pack_weights(model, "w8a8", smooth=smooth)), logits_of(model)) < 0.06


def test_smoothing_removes_its_hooks_when_the_run_fails():
    model = random_model("llama")

    def broken(q, k, v, spec):
        raise OverflowError("no attention today")

    with pytest.raises(OverflowError):
        smoothing(model, TEXT, attention=broken)
    assert not any(module._forward_pre_hooks for module in model.modules())
    smoothing(model, TEXT)
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(("text", "strength", "words"), [
    (TEXT, -0.1, "strength=-0.1 must be from 0 to 1"), (TEXT, 1.1, "strength=1.1"), (TEXT, math.nan, "strength=nan"),
    ([], 0.4, "the text is empty"), ([61], 0.4, "the text holds token 61"),
])
def test_smoothing_refuses(text, strength, words):
    with pytest.raises(ValueError, match=words):
        smoothing(random_model("llama"), text, strength)


def test_packed_models_have_nothing_left_to_smooth():
    with pytest.raises(ValueError, match="no linear layers in floating point"):
        smoothing(pack_weights(random_model("llama")), TEXT)


# ---- checkpoints

def folder_of(model, architecture, folder):
    """A model as a Hugging Face folder."""
    config = model.config
    save_file({name if name.startswith("lm_head") else f"model.{name}": tensor.contiguous()
               for name, tensor in model.state_dict().items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({
        "architectures": [architecture], "num_hidden_layers": config.num_layers, "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim, "intermediate_size": config.intermediate_size, "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings, "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings}))
    tokenizer = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return str(folder)


def assert_same_weights(ours, theirs):
    ours, theirs = dict(ours.named_parameters()), dict(theirs.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        assert weight.dtype == theirs[name].dtype and torch.equal(weight, theirs[name]), name


@pytest.mark.parametrize("weights", ["w4a16", "w8a8"])
@pytest.mark.parametrize(("name", "architecture"), [("llama", "LlamaForCausalLM"), ("qwen2", "Qwen2ForCausalLM"),
                                                    ("qwen3", "Qwen3ForCausalLM")])
def test_folders_are_packed_as_loaded_models_are(tmp_path, name, architecture, weights):
    model = random_model(name)
    folder = folder_of(model, architecture, tmp_path)
    packed = load_packed(folder, weights, dtype="float32").model
    assert_same_weights(packed, pack_weights(model, weights))
    assert torch.equal(logits_of(packed), logits_of(pack_weights(model, weights)))
    assert load_packed(folder, weights, dtype="bfloat16").model.dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.q_proj: group=48"):
        load_packed(folder, "w4a16", group=48)


@pytest.fixture(scope="module")
def plain():
    return load(dtype="float32")


@pytest.fixture(scope="module")
def packed():
    return load_packed(dtype="float32").model


@pytest.mark.parametrize("weights", ["w4a16", "w8a8"])
def test_the_file_is_packed_as_the_loaded_model_is(plain, packed, weights):
    ours = packed if weights == "w4a16" else load_packed(weights=weights, dtype="float32").model
    assert_same_weights(ours, pack_weights(plain.model, weights))


LAYER_NAMES = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
               "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
               "mlp.down_proj": "ffn_down"}


def q4_1(data):
    """Codes [rows, columns], steps and smallest values [rows, columns / 32] of Q4_1 blocks of 20 bytes each."""
    blocks = data.reshape(len(data), -1, 20)
    step, low = (np.ascontiguousarray(blocks[..., i:i + 2]).view(np.float16)[..., 0].astype(np.float32) for i in (0, 2))
    nibbles = blocks[..., 4:]
    codes = np.concatenate([nibbles & 15, nibbles >> 4], -1)
    return [torch.from_numpy(np.array(a)) for a in (codes.reshape(len(data), -1), step, low)]


def codes_of(layer):
    """What the packed kernel reads where every step is 1 and every middle 8: the codes, exact in bfloat16."""
    twin = copy.deepcopy(layer)
    twin.scales = nn.Parameter(torch.ones_like(layer.scales, dtype=torch.bfloat16), requires_grad=False)
    twin.scales[..., 1] = 8
    return twin.weight.float()


def test_q4_1_tensors_get_their_own_codes_back(packed):
    _, tensors = read_gguf(locate())
    config, checked, of_kind = packed.config, 0, {n for n, t in tensors.items() if t.kind.name == "Q4_1"}
    half = config.head_dim // 2
    for index in range(config.num_layers):
        for ours, theirs in LAYER_NAMES.items():
            name = f"blk.{index}.{theirs}.weight"
            assert name in of_kind
            codes, step, low = q4_1(tensors[name].data)
            if theirs in ("attn_q", "attn_k"):                        # the file has rotary pairs side by side
                rows = torch.arange(len(codes))
                head, place = rows // config.head_dim, rows % config.head_dim
                order = head * config.head_dim + place % half * 2 + place // half
                codes, step, low = codes[order], step[order], low[order]
            layer = packed.get_submodule(f"layers.{index}.{ours}")
            our_step, middle = layer.scales.transpose(0, 1).unbind(-1)
            torch.testing.assert_close(our_step, step, rtol=1e-5, atol=1e-9)
            torch.testing.assert_close(middle, low + 8 * step, rtol=1e-5, atol=1e-8)
            assert torch.equal(codes_of(layer), codes.float()), name
            checked += 1
    assert checked == len(of_kind) == 7 * config.num_layers


def test_the_head_of_8_bits_is_rounded_once_more(plain, packed):
    """Q8_0 has a scale for 32 channels and the head one for a row: half of that one is the error."""
    assert read_gguf(locate())[1]["token_embd.weight"].kind.name == "Q8_0"
    theirs, head = plain.model.embed_tokens.weight, packed.lm_head
    torch.testing.assert_close(head.scale, theirs.abs().amax(1) / 127)
    assert ((packed.embed_tokens.weight - theirs).abs() <= head.scale[:, None] * 0.501).all()
    assert packed.embed_tokens.packed.data_ptr() == head.packed.data_ptr()


@pytest.fixture(scope="module")
def packed_16():
    return load_packed(dtype="bfloat16")


def test_perplexity_is_that_of_the_dequantized_weights(plain, packed_16):
    text = help_text(plain.tokenizer, 256)
    reference = perplexity(text_logits(plain.model, text), text)
    assert abs(perplexity(text_logits(packed_16.model, text), text) / reference - 1) < 0.01
    changed = copy.deepcopy(packed_16.model)                          # the measure notices weights that are not these
    changed.layers[3].mlp.down_proj.scales.mul_(1.5)
    assert perplexity(text_logits(changed, text), text) / reference > 1.01


def test_the_default_model_answers_from_packed_weights(packed_16):
    loaded = packed_16
    assert loaded.model.dtype == torch.bfloat16 and loaded.model.device.type == "cpu"
    prompt = loaded.tokenizer.chat([{"role": "user", "content": "What is the capital of France?"}])
    run, = generate(loaded.model, [prompt], 12)
    assert "Paris" in loaded.tokenizer.decode(run.token_ids)
