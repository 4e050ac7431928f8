"""Latent attention against transformers, its two forms against each other, and a GQA model cut to a latent."""
import json
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbook.compute.attention import attend
from kvbook.compute.checkpoint import load, read_config
from kvbook.compute.mla import (
    DEEPSEEK_MODELS,
    FAMILIES,
    DeepseekConfig,
    DeepseekLayer,
    MixtureOfExperts,
    Router,
    kv_directions,
    unfolding_attention,
    with_latent,
)
from kvbook.compute.model import Batch, ContiguousCache, FeedForward, NoCache, Transformer, generate
from kvbook.control.config import CacheSpec, ModelConfig

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1}
V2, V3 = "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"


def random_peer(folder, architecture, rope=None, **more):
    """A small random transformers model with biases, norms and router spread out, saved to `folder`."""
    import transformers

    torch.manual_seed(7)
    sizes = {
        "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 6, "num_hidden_layers": 3,
        "intermediate_size": 112, "vocab_size": 197, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
        "kv_lora_rank": 40, "q_lora_rank": 24, "qk_nope_head_dim": 20, "qk_rope_head_dim": 12, "v_head_dim": 28,
        "first_k_dense_replace": 1, "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3,
        "moe_intermediate_size": 36, "routed_scaling_factor": 1.7, "n_group": 4, "topk_group": 2,
        "rope_parameters": {"rope_theta": 10_000.0, **(rope or {"rope_type": "default"})},
    }
    config = getattr(transformers, architecture.replace("ForCausalLM", "Config"))(**sizes | more)
    peer = getattr(transformers, architecture)(config).eval()
    with torch.no_grad():
        for name, tensor in [*peer.named_parameters(), *peer.named_buffers()]:
            if name.endswith(("bias", "gate.weight")) or "norm" in name:
                tensor.add_(torch.randn_like(tensor) * 0.2)
            elif name.endswith(("weight", "experts.gate_up_proj", "experts.down_proj")):
                tensor.mul_(4)                             # sharper attention: a wrong scale or rotation must show
    peer.save_pretrained(folder)
    tokenizer = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return peer


@torch.inference_mode()
def logits_of(model, prompts, attention=None):
    batch = Batch.build(prompts, [0] * len(prompts), [[i] for i in range(len(prompts))], 256)
    cache = NoCache(model.specs, attention) if attention else NoCache(model.specs)
    return model.logits(model(batch.token_ids, batch.positions, cache.view(batch)))


def relative_error(model, peer):
    prompts = [torch.randint(0, 197, (n,)).tolist() for n in (1, 23, 90)]
    with torch.inference_mode():
        theirs = torch.cat([peer(torch.tensor([p])).logits[0] for p in prompts])
    return ((logits_of(model, prompts) - theirs).abs().max() / theirs.abs().max()).item()


CASES = {
    "v2-lite": (V2, None, {"q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1}),
    "v2": (V2, None, {"topk_method": "group_limited_greedy"}),
    "v2-no-groups": (V2, None, {"n_group": None, "topk_group": None}),
    "v2-dense": (V2, None, {"first_k_dense_replace": 3}),
    "v2-yarn": (V2, {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}, {}),
    "v2-yarn-uneven": (V2, {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}, {}),
    "v2-yarn-plain": (V2, YARN, {"attention_bias": True}),
    "v3": (V3, None, {}),
    "v3-direct-queries": (V3, None, {"q_lora_rank": None, "tie_word_embeddings": True}),
    "v3-all-experts": (V3, None, {"first_k_dense_replace": 0, "norm_topk_prob": False, "n_shared_experts": 1}),
    "v3-dense": (V3, None, {"first_k_dense_replace": 3}),
    "v3-one-group": (V3, None, {"n_group": 1, "topk_group": 1, "attention_bias": True}),
    "v3-yarn": (V3, {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}, {}),
    "v3-halves": (V3, None, {"rope_interleave": False}),
}


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(tmp_path, name):
    architecture, rope, more = CASES[name]
    peer = random_peer(tmp_path, architecture, rope, **more)
    model = load(str(tmp_path), dtype="float32", families=FAMILIES).model
    assert relative_error(model, peer) < 1e-4
    buffers = sum(b.numel() for n, b in peer.named_buffers() if n.endswith("e_score_correction_bias"))
    assert model.config.num_params() == peer.num_parameters() + buffers


@pytest.mark.parametrize("change", [
    {"rope_interleave": False}, {"rope_scaling": None}, {"routed_scaling": 1.0}, {"norm_topk_prob": False},
    {"experts_per_token": 2}, {"topk_groups": 4},
])
def test_the_comparison_notices_each_detail(tmp_path, change):
    """A model that differs from its peer in one number of its config must be told apart."""
    peer = random_peer(tmp_path, V3, {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0})
    model = load(str(tmp_path), dtype="float32", families=FAMILIES).model
    other = Transformer(replace(model.config, **change), DeepseekLayer).eval()
    other.load_state_dict(model.state_dict())
    assert relative_error(model, peer) < 1e-4 < 1e-3 < relative_error(other, peer)


SIZES = {"num_layers": 2, "hidden_size": 48, "num_heads": 5, "num_kv_heads": 5, "head_dim": 28, "intermediate_size": 64,
         "vocab_size": 61, "max_position_embeddings": 96, "kv_lora_rank": 32, "q_lora_rank": 16, "qk_nope_head_dim": 16,
         "qk_rope_head_dim": 12, "v_head_dim": 20, "first_dense": 1, "num_experts": 6, "num_shared_experts": 1,
         "experts_per_token": 2, "moe_intermediate_size": 24, "num_groups": 3, "topk_groups": 2}
TINY = DeepseekConfig("deepseek_v3", **SIZES, topk_method="noaux_tc", norm_topk_prob=True)


@pytest.fixture(scope="module")
def tiny():
    torch.manual_seed(3)
    return Transformer(TINY, DeepseekLayer).eval()


@settings(max_examples=25, deadline=None)
@given(heads=st.integers(1, 9), rank=st.integers(1, 40), nope=st.sampled_from((2, 16, 30)),
       rope=st.sampled_from((2, 8)), value=st.integers(1, 40), q_rank=st.sampled_from((None, 8)),
       seed=st.integers(0, 99))
def test_absorbed_equals_naive(heads, rank, nope, rope, value, q_rank, seed):
    torch.manual_seed(seed)
    config = replace(TINY, num_heads=heads, num_kv_heads=heads, kv_lora_rank=rank, qk_nope_head_dim=nope,
                     qk_rope_head_dim=rope, head_dim=nope + rope, v_head_dim=value, q_lora_rank=q_rank, first_dense=2)
    model = Transformer(config, DeepseekLayer).eval()
    naive = Transformer(replace(config, absorbed=False), DeepseekLayer).eval()
    naive.load_state_dict(model.state_dict())
    prompts = [torch.randint(0, 61, (n,)).tolist() for n in (1, 17)]
    assert torch.allclose(logits_of(model, prompts), logits_of(naive, prompts), atol=1e-5, rtol=1e-5)


@settings(max_examples=25, deadline=None)
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6), absorbed=st.booleans(), seed=st.integers(0, 99))
def test_chunks_of_any_size_give_the_same_hidden_states(tiny, sizes, absorbed, seed):
    model = Transformer(replace(TINY, absorbed=absorbed), DeepseekLayer).eval()
    model.load_state_dict(tiny.state_dict())
    tokens = torch.randint(0, 61, (sum(sizes),), generator=torch.Generator().manual_seed(seed)).tolist()
    whole = Batch.build([tokens], [0], [[0]], 64)
    cache, parts, start = ContiguousCache(model.specs, 3, 64, torch.float32), [], 0
    with torch.inference_mode():
        expected = model(whole.token_ids, whole.positions, NoCache(model.specs).view(whole))
        for size in sizes:
            batch = Batch.build([tokens[start:start + size]], [start], [[2]], 64)
            parts.append(model(batch.token_ids, batch.positions, cache.view(batch)))
            start += size
    assert torch.allclose(torch.cat(parts), expected, atol=1e-4)


def test_decoding_with_a_cache_equals_decoding_without(tiny):
    prompts = [[5, 6, 7], [8], [9, 10, 11, 12, 13]]
    cached, uncached = (generate(tiny, prompts, 12, use_cache=flag) for flag in (True, False))
    alone = [generate(tiny, [prompt], 12)[0] for prompt in prompts]
    assert [r.token_ids for r in cached] == [r.token_ids for r in uncached] == [r.token_ids for r in alone]
    assert len({tuple(r.token_ids) for r in cached}) == 3


def test_the_reference_attention_reads_the_latent(tiny):
    prompts = [[5, 6, 7], [8], list(range(40))]
    assert torch.allclose(logits_of(tiny, prompts, attend), logits_of(tiny, prompts), atol=1e-5)
    runs = [generate(tiny, prompts, 6, **more) for more in ({}, {"attention": attend})]
    assert [r.token_ids for r in runs[0]] == [r.token_ids for r in runs[1]]


def test_what_is_remembered_is_the_normed_latent_and_the_rotated_key(tiny):
    """Unit mean square in the first `kv_lora_rank` elements (the norm's weight is one); rotation keeps the length."""
    cache = ContiguousCache(tiny.specs, 1, 8, torch.float32)
    with torch.inference_mode():
        batch = Batch.build([[7, 7, 7, 7]], [0], [[0]], 8)
        tiny(batch.token_ids, batch.positions, cache.view(batch))
    stored = cache.keys[0][0, :4, 0]
    assert stored.shape == (4, TINY.kv_lora_rank + TINY.qk_rope_head_dim) and cache.values[0].numel() == 0
    latent, key = stored.split([TINY.kv_lora_rank, TINY.qk_rope_head_dim], 1)
    assert torch.allclose(latent.square().mean(1), torch.ones(4), atol=1e-3)
    assert torch.allclose(latent[0], latent[3], atol=1e-5)
    assert torch.allclose(key[0].norm(), key[3].norm(), atol=1e-4) and not torch.allclose(key[0], key[3], atol=1e-2)


@pytest.mark.parametrize(("name", "layers", "bytes_per_token", "billions", "active"), [
    ("DeepSeek-V2-Lite", 27, 31_104, 15.7, 2.5), ("DeepSeek-V2", 60, 69_120, 235.7, 20.9),
    ("DeepSeek-V3", 61, 70_272, 671.0, 36.6),
])
def test_published_models_by_their_numbers(name, layers, bytes_per_token, billions, active):
    config = DEEPSEEK_MODELS[name]
    assert CacheSpec.of(config).bytes_per_token == bytes_per_token == layers * (512 + 64) * 2
    assert round(config.num_params() / 1e9, 1) == billions
    assert round(config.num_matmul_params() / 1e9, 1) == active
    spec, = set(config.layer_specs())
    assert (spec.num_kv_heads, spec.head_dim, spec.value_dim, spec.value_in_key) == (1, 576, 512, True)
    m = 0.1 * (1.0 if name == "DeepSeek-V3" else 0.707) * math.log(40) + 1
    assert spec.scale == pytest.approx(192 ** -0.5 * m * m)
    assert config.rope_scaling["attention_factor"] == 1
    naive = CacheSpec.of(replace(config, absorbed=False)).bytes_per_token
    assert naive == layers * config.num_heads * (192 + 128) * 2


def test_allocated_bytes_are_the_specs(tiny):
    cache = ContiguousCache(tiny.specs, 3, 40, torch.bfloat16)
    assert cache.num_bytes == 3 * 40 * CacheSpec.of(TINY).bytes_per_token == 3 * 40 * 2 * (32 + 12) * 2


def test_weights_are_counted(tiny):
    assert TINY.num_params() == sum(p.numel() for p in tiny.parameters())
    used = [p for n, p in tiny.named_parameters() if p.dim() == 2 and "embed" not in n]
    idle = (TINY.num_experts - TINY.experts_per_token) * 3 * TINY.hidden_size * TINY.moe_intermediate_size
    assert TINY.num_matmul_params() == sum(p.numel() for p in used) - idle * (TINY.num_layers - TINY.first_dense)


def picked_in_words(config, logits, bias):
    """The experts and weights of one token, by sorting."""
    v3 = config.topk_method == "noaux_tc"
    total = sum(math.exp(x) for x in logits)
    scores = [1 / (1 + math.exp(-x)) if v3 else math.exp(x) / total for x in logits]
    rank = [s + b for s, b in zip(scores, bias, strict=True)] if v3 else scores
    size = config.num_experts // config.num_groups
    groups = [sorted(rank[g * size:(g + 1) * size], reverse=True) for g in range(config.num_groups)]
    worth = [sum(g[:2]) if v3 else g[0] for g in groups]
    best = sorted(range(len(groups)), key=lambda g: -worth[g])[:config.topk_groups]
    allowed = [e for e in range(config.num_experts) if config.topk_method == "greedy" or e // size in best]
    chosen = sorted(allowed, key=lambda e: -rank[e])[:config.experts_per_token]
    whole = sum(scores[e] for e in chosen) if config.norm_topk_prob else 1
    return {e: config.routed_scaling * scores[e] / whole for e in chosen}


@settings(max_examples=80, deadline=None)
@given(method=st.sampled_from(("greedy", "group_limited_greedy", "noaux_tc")), groups=st.sampled_from((1, 2, 4)),
       kept=st.integers(1, 4), k=st.integers(1, 4), norm=st.booleans(), seed=st.integers(0, 10_000))
def test_routing_in_words(method, groups, kept, k, norm, seed):
    kept = min(kept, groups)
    k = min(k, 12 // groups * kept)
    config = replace(TINY, num_experts=12, num_groups=groups, topk_groups=kept, experts_per_token=k, topk_method=method,
                     norm_topk_prob=norm and method == "noaux_tc", routed_scaling=2.5)
    torch.manual_seed(seed)
    router, logits = Router(config), torch.randn(5, 12)
    bias = torch.randn(12) if method == "noaux_tc" else torch.zeros(12)
    if method == "noaux_tc":
        router.e_score_correction_bias.data = bias
    weights, chosen = router.choose(logits)
    for row in range(5):
        got = dict(zip(chosen[row].tolist(), weights[row].tolist(), strict=True))
        expected = picked_in_words(config, logits[row].tolist(), bias.tolist())
        assert got.keys() == expected.keys()
        assert all(got[e] == pytest.approx(expected[e], rel=1e-4) for e in expected)


def test_experts_add_up_token_by_token(tiny):
    moe, x = tiny.layers[1].mlp, torch.randn(9, TINY.hidden_size)
    assert isinstance(moe, MixtureOfExperts) and isinstance(tiny.layers[0].mlp, FeedForward)
    with torch.inference_mode():
        weights, chosen = moe.gate(x)
        for row in range(9):
            expected = moe.shared_experts(x[row]) + sum(
                w * moe.experts[e](x[row]) for e, w in zip(chosen[row].tolist(), weights[row], strict=True))
            assert torch.allclose(moe(x)[row], expected, atol=1e-4)
    assert len(chosen.unique()) > TINY.experts_per_token


@pytest.mark.parametrize(("change", "words"), [
    ({"architectures": ["OtherForCausalLM"]}, ["OtherForCausalLM", V2, V3]),
    ({"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
    ({"topk_method": "random"}, ["topk_method", "random", "greedy"]),
    ({"scoring_func": "sigmoid"}, ["scoring_func", "sigmoid", "softmax"]),
    ({"norm_topk_prob": True}, ["norm_topk_prob", "True"]),
    ({"moe_layer_freq": 2}, ["moe_layer_freq", "2"]),
    ({"kv_lora_rank": None}, ["kv_lora_rank"]),
    ({"n_group": 3}, ["num_groups=3", "num_experts=8"]),
    ({"topk_method": "group_limited_greedy", "num_experts_per_tok": 5}, ["experts_per_token=5", "between 1 and 4"]),
    ({"qk_rope_head_dim": 13, "qk_nope_head_dim": 19}, ["qk_rope_head_dim=13", "even"]),
])
def test_what_cannot_run_is_refused_by_name(tmp_path, change, words):
    import transformers

    config = transformers.DeepseekV2Config(n_routed_experts=8, num_experts_per_tok=3, n_group=4, topk_group=2,
                                           moe_intermediate_size=36, architectures=[V2]).to_dict()
    write = lambda values: (tmp_path / "config.json").write_text(json.dumps(values))
    write(config)
    assert read_config(str(tmp_path), FAMILIES).num_experts == 8
    write(config | change)
    with pytest.raises(ValueError) as error:
        read_config(str(tmp_path), FAMILIES)
    assert all(word in str(error.value) for word in words), error.value


def test_old_spelling_of_yarn_is_read(tmp_path):
    """Configs on the hub write ``rope_scaling`` with ``type``; later ones ``rope_parameters`` with ``rope_type``."""
    import transformers

    config = transformers.DeepseekV3Config(architectures=[V3]).to_dict()
    config.pop("rope_parameters")
    scaling = {**YARN, "type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0}
    scaling.pop("rope_type")
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_scaling": scaling, "rope_theta": 10_000}))
    found = read_config(str(tmp_path), FAMILIES)
    assert found.scale == pytest.approx(192 ** -0.5 * (0.1 * math.log(4) + 1) ** 2)
    assert found.rope_scaling["attention_factor"] == 1 and found.rope_dim == 64


# A trained GQA model rewritten


GQA = ModelConfig("llama", 2, 40, 6, 2, 8, 64, 61, 96, rope_theta=100.0)
TEXT = [i * 7 % 61 for i in range(50)]


@pytest.fixture(scope="module")
def gqa():
    torch.manual_seed(5)
    return Transformer(GQA).requires_grad_(False).eval()


@pytest.mark.parametrize("token_ids", [None, TEXT])
def test_full_rank_is_exact(gqa, token_ids):
    twin = with_latent(gqa, 32, kv_directions(gqa, token_ids))
    prompts = [TEXT[:30], TEXT[10:11]]
    ours, reference = logits_of(twin, prompts, unfolding_attention(twin)), logits_of(gqa, prompts)
    assert (ours - reference).abs().max() / reference.abs().max() < 1e-4
    assert twin.lm_head.weight.data_ptr() == gqa.lm_head.weight.data_ptr()


def test_a_cut_latent_is_remembered_as_such(gqa):
    twin = with_latent(gqa, 20, kv_directions(gqa, TEXT))
    assert CacheSpec.of(twin.config).bytes_per_token == 2 * 20 * 2
    assert ContiguousCache(twin.specs, 1, 7, torch.bfloat16).num_bytes == 7 * 2 * 20 * 2
    runs = [generate(twin, [[1, 2, 3], [4]], 10, use_cache=flag, attention=unfolding_attention(twin))
            for flag in (True, False)]
    assert [r.token_ids for r in runs[0]] == [r.token_ids for r in runs[1]]


@pytest.mark.parametrize("rank", [5, 20, 31, 32])
def test_the_lost_energy_is_the_error(gqa, rank):
    """Mean square error of keys and values over the text, each against its own size, is the sum of the tail."""
    batch = Batch.build([TEXT], [0], [[0]], 64)
    inputs = []
    hook = gqa.layers[1].self_attn.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    gqa(batch.token_ids, batch.positions, NoCache(gqa.specs).view(batch))
    hook.remove()
    directions = kv_directions(gqa, TEXT)[1]
    twin = with_latent(gqa, rank, kv_directions(gqa, TEXT)).layers[1].self_attn
    error = 0.0
    for old, new in ((gqa.layers[1].self_attn.k_proj, twin.k_proj), (gqa.layers[1].self_attn.v_proj, twin.v_proj)):
        exact = old(inputs[0])
        error += ((new(twin.kv_a_proj(inputs[0])) - exact).square().sum() / exact.square().sum()).item()
    assert directions.energy.sum().item() == pytest.approx(2, rel=1e-4)
    assert error == pytest.approx(directions.energy[rank:].sum().item(), rel=1e-3, abs=1e-6)


def test_directions_of_a_text_fit_it_better_than_those_of_the_weights(gqa):
    reference = logits_of(gqa, [TEXT])
    errors = []
    for token_ids in (TEXT, None):
        twin = with_latent(gqa, 16, kv_directions(gqa, token_ids))
        errors.append((logits_of(twin, [TEXT], unfolding_attention(twin)) - reference).square().mean().item())
    assert 1e-6 < errors[0] < errors[1]


@pytest.mark.parametrize(("config", "rank", "words"), [
    (GQA, 0, ["rank=0", "1 and 32"]), (GQA, 33, ["rank=33", "1 and 32"]),
    (replace(GQA, qkv_bias=True), 8, ["biases"]), (replace(GQA, qk_norm=True), 8, ["norms"]), (TINY, 8, ["plain GQA"]),
])
def test_what_cannot_be_rewritten_is_refused(config, rank, words):
    model = Transformer(config, DeepseekLayer) if config is TINY else Transformer(config)
    with pytest.raises(ValueError) as error:
        with_latent(model, rank, [])
    assert all(word in str(error.value) for word in words)
