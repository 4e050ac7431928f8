"""Windows: the rolling buffer against the mask, sinks against a cache that really evicts, Mistral and Gemma 2."""
from dataclasses import replace

import pytest
import test_model
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_model import random_peer

from kvbook.compute.attention import attend
from kvbook.compute.checkpoint import load
from kvbook.compute.model import Batch, NoCache, Transformer, apply_rope
from kvbook.compute.windows import (
    FAMILIES,
    WINDOWED_MODELS,
    Gemma2Config,
    MistralConfig,
    RollingCache,
    sink_attention,
)
from kvbook.control.config import CacheSpec, LayerSpec, ModelConfig, layer_groups

PEERS = {"MistralForCausalLM": "MistralConfig", "Gemma2ForCausalLM": "Gemma2Config"}
WINDOW = 13                                                  # the prompts below have 1, 23 and 90 tokens
OPTIONS = {
    "MistralForCausalLM": {"sliding_window": WINDOW},
    "Gemma2ForCausalLM": {"sliding_window": WINDOW, "attn_implementation": "eager", "query_pre_attn_scalar": 20,
                          "attn_logit_softcapping": 0.5, "final_logit_softcapping": 0.7},
}


@pytest.fixture
def peer(tmp_path, monkeypatch):
    """Makes a random transformers model with sharp attention in `tmp_path`, and the same model as loaded here."""
    def make(architecture, heads, kv_heads, head_dim, **more):
        monkeypatch.setitem(test_model.FAMILIES, architecture, PEERS[architecture])
        peer = random_peer(tmp_path, architecture, heads, kv_heads, head_dim, **(OPTIONS[architecture] | more))
        with torch.no_grad():
            for name, parameter in peer.named_parameters():
                if "q_proj" in name or "k_proj" in name:
                    parameter.mul_(6)                        # scores of about 1: windows and caps must be felt
        peer.save_pretrained(tmp_path)
        return peer, load(str(tmp_path), dtype="float32", families=FAMILIES).model
    return make


@pytest.fixture
def prompts():
    torch.manual_seed(3)
    return [torch.randint(0, 197, (n,)).tolist() for n in (1, 23, 90)]


@torch.inference_mode()
def our_logits(model, prompts, cache=None):
    batch = Batch.build(prompts, [0] * len(prompts), [[i] for i in range(len(prompts))], 128)
    cache = cache or NoCache(model.specs, attend)
    return model.logits(model(batch.token_ids, batch.positions, cache.view(batch)))


@torch.inference_mode()
def their_logits(peer, prompts):
    return torch.cat([peer(torch.tensor([p])).logits[0] for p in prompts])


def apart(ours, theirs):
    """Largest difference, relative to the largest logit."""
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


# Families against transformers


@pytest.mark.parametrize("shape", [(9, 3, 64), (5, 1, 80), (7, 7, 96), (6, 2, 128)])
@pytest.mark.parametrize("architecture", PEERS)
def test_logits_equal_transformers(peer, prompts, architecture, shape):
    theirs, ours = peer(architecture, *shape)
    expected = their_logits(theirs, prompts)
    assert apart(our_logits(ours, prompts), expected) < 1e-4
    assert apart(our_logits(ours, prompts, RollingCache(ours.specs, 3, 96, torch.float32)), expected) < 1e-4
    assert ours.config.num_params() == theirs.num_parameters()


@pytest.mark.parametrize(("architecture", "changes"), [
    ("MistralForCausalLM", {"window": None}), ("MistralForCausalLM", {"window": WINDOW + 1}),
    ("Gemma2ForCausalLM", {"window": None}), ("Gemma2ForCausalLM", {"window": WINDOW}),
    ("Gemma2ForCausalLM", {"softcap": None}), ("Gemma2ForCausalLM", {"scale": 64 ** -0.5}),
])
def test_a_wrong_layer_spec_would_be_noticed(peer, prompts, architecture, changes):
    """What the comparison above relies on: each of these numbers moves the logits far beyond its tolerance."""
    theirs, ours = peer(architecture, 4, 2, 64)
    wrong = NoCache([replace(spec, **changes) for spec in ours.specs], attend)
    assert apart(our_logits(ours, prompts, wrong), their_logits(theirs, prompts)) > 5e-4


@pytest.mark.parametrize("more", [
    {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}, {"attention_bias": True},
    {"attn_logit_softcapping": None, "final_logit_softcapping": None}, {"tie_word_embeddings": False},
])
def test_gemma2_options_equal_transformers(peer, prompts, more):
    theirs, ours = peer("Gemma2ForCausalLM", 4, 2, 64, **more)
    assert apart(our_logits(ours, prompts), their_logits(theirs, prompts)) < 1e-4


def test_mistral_without_a_window_equals_transformers(peer, prompts):
    theirs, ours = peer("MistralForCausalLM", 4, 2, 64, sliding_window=None)
    assert {spec.window for spec in ours.specs} == {None}
    assert apart(our_logits(ours, prompts), their_logits(theirs, prompts)) < 1e-4


def test_decoding_equals_transformers(peer, prompts):
    """One token at a time through the rolling buffer: the logits of the whole prompt at once."""
    theirs, ours = peer("Gemma2ForCausalLM", 4, 2, 64)
    cache, prompt = RollingCache(ours.specs, 1, 40, torch.float32), prompts[2][:40]
    steps = [our_logits_at(ours, cache, prompt[i:i + 1], i) for i in range(40)]
    assert apart(torch.cat(steps), their_logits(theirs, [prompt])) < 1e-4


@torch.inference_mode()
def our_logits_at(model, cache, tokens, start, row=0):
    batch = Batch.build([tokens], [start], [[row]], 1024)
    return model.logits(model(batch.token_ids, batch.positions, cache.view(batch)))


def test_the_embedding_scale_is_rounded_as_the_weights_are():
    """sqrt(3584) is 60 in bfloat16, and checkpoints were trained with 60."""
    from transformers.models.gemma2.modeling_gemma2 import Gemma2TextScaledWordEmbedding

    class Through(torch.nn.Module):
        def __init__(self, config, layer):
            super().__init__()

        def forward(self, x, rope, cache):
            return x

    config = Gemma2Config("gemma2", 1, 3584, 2, 1, 8, 8, 11, 64, windows=(None,), tie_word_embeddings=True,
                          embedding_scale=3584 ** 0.5)
    ids, theirs = torch.arange(11), Gemma2TextScaledWordEmbedding(11, 3584, 0, 3584 ** 0.5)
    for dtype in (torch.bfloat16, torch.float32):
        model = Transformer(config, Through).to(dtype)
        theirs.weight.data = model.embed_tokens.weight.data
        assert torch.equal(model(ids, ids, None, taps=(0,))[1][0], theirs(ids))


# Configurations


HF_MISTRAL = {"architectures": ["MistralForCausalLM"], "num_hidden_layers": 2, "hidden_size": 64,
              "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 99,
              "max_position_embeddings": 128, "sliding_window": 16}
HF_GEMMA2 = {**HF_MISTRAL, "architectures": ["Gemma2ForCausalLM"]}


def test_gemma2_fields_that_old_files_leave_out():
    config = Gemma2Config.from_hf(HF_GEMMA2)
    assert config.windows == (16, None)                      # the first layer is local
    assert config.tie_word_embeddings and config.head_dim == 256
    assert (config.final_softcap, config.attention_softcap, config.embedding_scale) == (30, 50, 8)
    assert [spec.scale for spec in config.layer_specs()] == [1 / 16] * 2


@pytest.mark.parametrize(("read", "changes", "words"), [
    (MistralConfig.from_hf, {"sliding_window": 0}, ["sliding_window=0", "positive integer"]),
    (MistralConfig.from_hf, {"sliding_window": 2.5}, ["sliding_window=2.5"]),
    (MistralConfig.from_hf, {"hidden_act": "gelu"}, ["hidden_act='gelu'", "silu"]),
    (MistralConfig.from_hf, {"architectures": ["LlamaForCausalLM"]}, ["LlamaForCausalLM", "MistralForCausalLM"]),
    (Gemma2Config.from_hf, {"hidden_activation": "silu"}, ["hidden_activation='silu'", "gelu_pytorch_tanh"]),
    (Gemma2Config.from_hf, {"layer_types": ["full_attention"]}, ["1 entries", "num_layers=2"]),
    (Gemma2Config.from_hf, {"layer_types": ["full_attention", "chunked"]}, ["chunked", "sliding_attention"]),
    (Gemma2Config.from_hf, {"use_bidirectional_attention": True}, ["use_bidirectional_attention"]),
    (Gemma2Config.from_hf, {"sliding_window": -1}, ["sliding_window=-1"]),
    (Gemma2Config.from_hf, {"query_pre_attn_scalar": 0}, ["'query_pre_attn_scalar'", "got 0"]),
    (Gemma2Config.from_hf, {"attn_logit_softcapping": -2.0}, ["'attention_softcap'", "-2.0"]),
    (Gemma2Config.from_hf, {"final_logit_softcapping": "high"}, ["'final_softcap'", "'high'"]),
])
def test_impossible_fields_are_refused_by_name(read, changes, words):
    config = {**(HF_MISTRAL if read == MistralConfig.from_hf else HF_GEMMA2), **changes}
    if "architectures" not in changes:
        read({key: value for key, value in config.items() if key not in changes})   # without them it is accepted
    with pytest.raises(ValueError) as error:
        read(config)
    assert all(word in str(error.value) for word in words)


# The rolling buffer


def dense(q, k, v, spec):
    """Attention in words, with row i seeing keys max(0, i − W + 1) … i."""
    out = torch.empty(len(q), spec.num_heads, spec.value_dim, dtype=q.dtype)
    for i in range(len(q)):
        first = 0 if spec.window is None else max(0, i - spec.window + 1)
        for head in range(spec.num_heads):
            kv_head = head // (spec.num_heads // spec.num_kv_heads)
            weights = torch.softmax(k[first:i + 1, kv_head] @ q[i, head] * spec.scale, 0)
            out[i, head] = weights @ v[first:i + 1, kv_head]
    return out


def in_chunks(cache, q, k, v, sizes, row=0):
    parts, start = [], 0
    for size in sizes:
        batch, rows = Batch.build([[0] * size], [start], [[row]], 1024), slice(start, start + size)
        parts.append(cache.view(batch).attend(0, q[rows], k[rows], None if v is None else v[rows]))
        start += size
    return torch.cat(parts)


@pytest.mark.parametrize("window", [1, 2, 3, 5, 8])
def test_rolling_equals_masked_in_chunks_of_every_size(window):
    spec = LayerSpec(6, 2, 8, 12, 0.35, window=window)
    for length in {max(window - 1, 1), window, window + 1, 2 * window}:
        q, k, v = (torch.randn(length, heads, dim, dtype=torch.float64) for heads, dim in ((6, 8), (2, 8), (2, 12)))
        expected = dense(q, k, v, spec)
        for chunk in range(1, length + 1):
            sizes = [min(chunk, length - start) for start in range(0, length, chunk)]
            out = in_chunks(RollingCache([spec], 2, 64, torch.float64), q, k, v, sizes, row=1)
            assert torch.allclose(out, expected, atol=1e-12), (window, length, chunk)


@settings(max_examples=60, deadline=None)
@given(window=st.one_of(st.none(), st.integers(1, 12)), group=st.integers(1, 5), kv_heads=st.integers(1, 3),
       sizes=st.lists(st.integers(1, 15), min_size=1, max_size=6), softcap=st.one_of(st.none(), st.just(0.8)),
       in_key=st.booleans(), dtype=st.sampled_from([torch.float64, torch.bfloat16]))
def test_rolling_equals_masked_however_cut(window, group, kv_heads, sizes, softcap, in_key, dtype):
    """Any chunks, any GQA ratio, soft-caps, values inside keys; in 16 bits too, since new rows are rounded first."""
    spec = LayerSpec(group * kv_heads, kv_heads, 8, 6, 0.4, window, softcap, value_in_key=in_key)
    length = sum(sizes)
    q = torch.randn(length, spec.num_heads, 8, dtype=torch.float64)
    k = torch.randn(length, kv_heads, 8, dtype=torch.float64)
    v = None if in_key else torch.randn(length, kv_heads, 6, dtype=torch.float64)
    out = in_chunks(RollingCache([spec], 1, length, dtype), q, k, v, sizes)
    stored_k = k.to(dtype).double()
    stored_v = stored_k[..., :6] if in_key else v.to(dtype).double()
    assert torch.allclose(out, attend(q, stored_k, stored_v, spec), atol=1e-12)


@pytest.fixture(scope="module")
def tiny():
    torch.manual_seed(4)
    config = Gemma2Config("gemma2", 4, 40, 5, 1, 8, 64, 61, 96, windows=(6, None, 3, 6), query_pre_attn_scalar=4,
                          embedding_scale=40 ** 0.5, attention_softcap=2.0, final_softcap=9.0, tie_word_embeddings=True)
    return Transformer(config, FAMILIES["Gemma2ForCausalLM"][1]).eval()


@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=4), chunks=st.data())
def test_a_batch_of_requests_rolls_as_if_alone(tiny, lengths, chunks):
    """Interleaved layers, requests of different age in one step: the logits of each request alone, masked."""
    prompts = [torch.randint(0, 61, (n,)).tolist() for n in lengths]
    cache, done = RollingCache(tiny.specs, len(prompts), 20, torch.float32), [0] * len(prompts)
    got = [[] for _ in prompts]
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        active = [i for i, n in enumerate(lengths) if done[i] < n]
        counts = [chunks.draw(st.integers(1, lengths[i] - done[i])) for i in active]
        step = [prompts[i][done[i]:done[i] + c] for i, c in zip(active, counts, strict=True)]
        batch = Batch.build(step, [done[i] for i in active], [[i] for i in active], 1024)
        with torch.inference_mode():
            logits = tiny.logits(tiny(batch.token_ids, batch.positions, cache.view(batch)))
        for i, count, rows in zip(active, counts, logits.split(counts), strict=True):
            got[i].append(rows)
            done[i] += count
    for prompt, parts in zip(prompts, got, strict=True):
        assert torch.allclose(torch.cat(parts), our_logits(tiny, [prompt]), atol=1e-4)


def test_a_slot_holds_the_newest_position_of_its_class():
    spec = LayerSpec(1, 1, 2, 2, 1.0, window=4)
    cache = RollingCache([spec], 1, 64, torch.float32)
    k = torch.arange(11.0)[:, None, None].expand(11, 1, 2)
    in_chunks(cache, torch.zeros(11, 1, 2), k, k, [3, 6, 2])
    assert cache.keys[0][0, :, 0, 0].tolist() == [8, 9, 10, 7]


def test_windows_bound_the_bytes_and_full_layers_the_length():
    local, full = LayerSpec(4, 2, 8, 8, 1.0, window=16), LayerSpec(4, 2, 8, 8, 1.0)
    rolling = RollingCache([local, local], 3, 10_000)
    assert rolling.num_bytes == 3 * 2 * 16 * 2 * (8 + 8) * 2
    rolling.view(Batch.build([[1]], [99_999], [[0]], 100_000))                     # no layer has to keep all of it
    for specs, capacity in (([local, full], 100), ([local], 10)):                # a short buffer cannot serve a window
        cache = RollingCache(specs, 1, capacity)
        cache.view(Batch.build([[1]], [capacity - 1], [[0]], 1024))
        with pytest.raises(ValueError, match=rf"{capacity + 1} tokens .* capacity={capacity}"):
            cache.view(Batch.build([[1]], [capacity], [[0]], 1024))


@pytest.mark.parametrize("name", WINDOWED_MODELS)
@pytest.mark.parametrize("num_tokens", [100, 4_096, 5_000, 32_768])
def test_the_buffer_reserves_what_the_cache_spec_says(name, num_tokens):
    specs = WINDOWED_MODELS[name].layer_specs()
    exact = CacheSpec(tuple(layer_groups(specs)), block_size=1).bytes_per_request(num_tokens)
    assert RollingCache(specs, 1, num_tokens, device="meta").num_bytes == exact


def test_bytes_of_known_models():
    mistral, gemma2 = (CacheSpec.of(config) for config in WINDOWED_MODELS.values())
    assert mistral.bytes_per_request(8_192) == mistral.bytes_per_request(131_072) == 4_096 * 131_072
    assert gemma2.bytes_per_token == 2 * 42 * 8 * 256 * 2
    assert gemma2.bytes_per_request(8_192) == 0.75 * 8_192 * gemma2.bytes_per_token
    assert [config.num_params() for config in WINDOWED_MODELS.values()] == [7_241_732_096, 9_241_705_984]


@pytest.mark.parametrize(("window", "num_layers"), [(1, 4), (2, 3), (4, 3), (5, 2)])
def test_reach_is_one_window_a_layer(window, num_layers):
    config = MistralConfig("mistral", num_layers, 32, 4, 2, 8, 48, 31, 64, sliding_window=window)
    torch.manual_seed(5)
    model, length = Transformer(config).eval().double(), 18
    tokens = torch.randint(0, 31, (length,)).tolist()
    changed = [[*tokens[:i], (tokens[i] + 1) % 31, *tokens[i + 1:]] for i in range(length)]
    last = our_logits(model, [tokens])[-1]
    heard = [i for i, other in enumerate(changed) if not torch.equal(our_logits(model, [other])[-1], last)]
    assert heard == list(range(length - (num_layers * (window - 1) + 1), length))


# Sinks


def evicting_cache(q, k, v, spec, num_sinks, speed):
    """What StreamingLLM does: unturned keys in a list that evicts; positions are places in the list, anew each step."""
    turn = lambda x, places: apply_rope(x, *(f(places[:, None, None] * speed) for f in (torch.cos, torch.sin)))
    kept, outputs = [], []
    for i in range(len(q)):
        kept.append(i)
        if len(kept) > spec.window:
            del kept[num_sinks]
        places = torch.arange(len(kept))
        outputs.append(dense(torch.cat((torch.zeros(len(kept) - 1, *q.shape[1:]), turn(q[i:i + 1], places[-1:]))),
                             turn(k[kept], places), v[kept], replace(spec, window=None))[-1])
    return torch.stack(outputs), kept


@settings(max_examples=25, deadline=None)
@given(num_sinks=st.integers(0, 4), more=st.integers(1, 8), length=st.integers(1, 30), group=st.integers(1, 3))
def test_sinks_equal_a_cache_that_evicts(num_sinks, more, length, group):
    spec = LayerSpec(2 * group, 2, 8, 8, 0.5, window=num_sinks + more)
    speed = 10_000.0 ** -(torch.arange(0, 8, 2) / 8)
    q, k, v = torch.randn(length, 2 * group, 8), torch.randn(length, 2, 8), torch.randn(length, 2, 8)
    expected, kept = evicting_cache(q, k, v, spec, num_sinks, speed)
    assert len(kept) <= spec.window
    angles = torch.arange(length)[:, None, None] * speed
    turned_q, turned_k = (apply_rope(x, angles.cos(), angles.sin()) for x in (q, k))
    attention = sink_attention(num_sinks, speed)
    assert torch.allclose(attention(turned_q, turned_k, v, spec), expected, atol=1e-4)
    if num_sinks == 0:
        assert torch.allclose(attend(turned_q, turned_k, v, spec), expected, atol=1e-4)


def test_sinks_need_room():
    spec = LayerSpec(2, 2, 8, 8, 0.5, window=4)
    x = torch.randn(6, 2, 8)
    for window in (4, None):
        with pytest.raises(ValueError, match=f"window={window} .*num_sinks=4"):
            sink_attention(4, torch.ones(4))(x, x, x, replace(spec, window=window))


def test_families_without_windows_are_not_touched():
    assert not set(FAMILIES) & {"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
    llama = ModelConfig("llama", 2, 40, 5, 1, 8, 64, 61, 96)
    assert MistralConfig("mistral", 2, 40, 5, 1, 8, 64, 61, 96).num_params() == llama.num_params()
