"""The model against transformers, its caches against each other, and what it refuses."""
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbook.compute.checkpoint import load
from kvbook.compute.model import (
    Batch,
    ContiguousCache,
    NoCache,
    Transformer,
    causal_attention,
    generate,
    greedy_steps,
)
from kvbook.control.config import LayerSpec, ModelConfig

FAMILIES = {"LlamaForCausalLM": "LlamaConfig", "Qwen2ForCausalLM": "Qwen2Config", "Qwen3ForCausalLM": "Qwen3Config"}
ROPES = {
    "plain": None,
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}


def random_peer(folder, architecture, heads, kv_heads, head_dim, rope="plain", **more):
    """A small random transformers model, saved to `folder`; returns it in eval mode."""
    import transformers

    torch.manual_seed(heads * 1000 + head_dim)
    parameters = {"rope_theta": 10_000.0, **(ROPES[rope] or {"rope_type": "default"})}
    config = getattr(transformers, FAMILIES[architecture])(
        hidden_size=heads * 32, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim,
        num_hidden_layers=3, intermediate_size=112, vocab_size=197, max_position_embeddings=256,
        rope_parameters=parameters, rms_norm_eps=1e-6, **more)
    peer = getattr(transformers, architecture)(config).eval()
    with torch.no_grad():
        for name, parameter in peer.named_parameters():      # initial zeros and ones would hide a lost bias or norm
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    peer.save_pretrained(folder)
    tokenizer = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return peer


CASES = [(architecture, *shape) for architecture in FAMILIES for shape in ((9, 3, 64), (5, 1, 80), (7, 7, 96))]
CASES += [("LlamaForCausalLM", 6, 2, 128), ("Qwen3ForCausalLM", 4, 2, 128)]


def compare(folder, peer):
    model = load(str(folder), dtype="float32").model
    prompts = [torch.randint(0, 197, (n,)).tolist() for n in (1, 23, 90)]
    batch = Batch.build(prompts, [0] * 3, [[0], [1], [2]], 128)
    with torch.inference_mode():
        ours = model.logits(model(batch.token_ids, batch.positions, NoCache(model.specs).view(batch)))
        theirs = torch.cat([peer(torch.tensor([p])).logits[0] for p in prompts])
    worst = (ours - theirs).abs().max() / theirs.abs().max()
    assert worst < 1e-4, worst


@pytest.mark.parametrize(("architecture", "heads", "kv_heads", "head_dim"), CASES)
def test_logits_equal_transformers(tmp_path, architecture, heads, kv_heads, head_dim):
    compare(tmp_path, random_peer(tmp_path, architecture, heads, kv_heads, head_dim))


@pytest.mark.parametrize("rope", [name for name in ROPES if name != "plain"])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_context_scaling_equals_transformers(tmp_path, architecture, rope):
    compare(tmp_path, random_peer(tmp_path, architecture, 4, 2, 64, rope))


@pytest.mark.parametrize("more", [{"attention_bias": True, "mlp_bias": True}, {"tie_word_embeddings": True}])
def test_llama_options_equal_transformers(tmp_path, more):
    compare(tmp_path, random_peer(tmp_path, "LlamaForCausalLM", 4, 2, 64, **more))


def test_parameters_are_counted_in_closed_form(tmp_path):
    for i, (architecture, *shape) in enumerate(CASES):
        folder = tmp_path / str(i)
        peer = random_peer(folder, architecture, *shape)
        config = ModelConfig.from_hf(json.loads((folder / "config.json").read_text()))
        assert config.num_params() == peer.num_parameters()


TINY = ModelConfig("llama", 2, 40, 5, 1, 8, 64, 61, 96, eos_token_ids=(3,))


@pytest.fixture(scope="module")
def tiny():
    torch.manual_seed(1)
    model = Transformer(TINY).eval()
    for parameter in model.parameters():
        parameter.data *= 2.5                               # sharper, so that answers vary
    return model


prompts_strategy = st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=20), min_size=1, max_size=5)


@settings(max_examples=40, deadline=None)
@given(prompts=prompts_strategy, n=st.integers(1, 12))
def test_loops_agree_and_count(tiny, prompts, n):
    """With a cache and without, alone and batched: the same tokens; the counts are the closed forms."""
    cached, uncached = generate(tiny, prompts, n), generate(tiny, prompts, n, use_cache=False)
    alone = [generate(tiny, [prompt], n)[0] for prompt in prompts]
    for prompt, a, b, c in zip(prompts, cached, uncached, alone, strict=True):
        assert a.token_ids == b.token_ids == c.token_ids
        assert a.finish_reason == b.finish_reason == c.finish_reason
        m, k = len(prompt), len(a.token_ids)
        assert a.num_computed_tokens == m + k - 1
        assert b.num_computed_tokens == k * m + k * (k - 1) // 2
        assert k == n or a.token_ids[-1] == 3
        assert (a.finish_reason == "stop") == (a.token_ids[-1] == 3)


@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6), lengths=st.data())
def test_chunks_of_any_size_give_the_same_hidden_states(tiny, sizes, lengths):
    """A prompt computed in chunks through the contiguous cache equals the prompt computed whole."""
    tokens = lengths.draw(st.lists(st.integers(0, 60), min_size=sum(sizes), max_size=sum(sizes)))
    whole = Batch.build([tokens], [0], [[0]], 64)
    cache, parts, start = ContiguousCache(tiny.specs, 3, 64, torch.float32), [], 0
    with torch.inference_mode():
        expected = tiny(whole.token_ids, whole.positions, NoCache(tiny.specs).view(whole))
        for size in sizes:
            batch = Batch.build([tokens[start:start + size]], [start], [[2]], 64)
            parts.append(tiny(batch.token_ids, batch.positions, cache.view(batch)))
            start += size
    assert torch.allclose(torch.cat(parts), expected, atol=1e-4)


@settings(max_examples=60, deadline=None)
@given(group=st.integers(1, 7), kv_heads=st.integers(1, 4), new=st.integers(1, 9), old=st.integers(0, 9))
def test_causal_attention_in_words(group, kv_heads, new, old):
    q, k, v = torch.randn(new, group * kv_heads, 16), torch.randn(old + new, kv_heads, 16), \
        torch.randn(old + new, kv_heads, 24)
    out = causal_attention(q, k, v, LayerSpec(group * kv_heads, kv_heads, 16, 24, 0.3))
    for i in range(new):
        for head in range(group * kv_heads):
            seen = old + i + 1
            weights = torch.softmax(k[:seen, head // group] @ q[i, head] * 0.3, 0)
            assert torch.allclose(out[i, head], weights @ v[:seen, head // group], atol=1e-5)


def test_a_batch_has_no_padding():
    batch = Batch.build([[1, 2, 3], [4], [5, 6]], [0, 6, 1], [[0], [2], [5]], 8)
    assert batch.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert batch.positions.tolist() == [0, 1, 2, 6, 1, 2]
    assert batch.cu_seqlens_q.tolist() == [0, 3, 4, 6] and batch.cu_seqlens_q.dtype == torch.int32
    assert batch.seq_lens.tolist() == [3, 7, 3]
    assert batch.slot_mapping.tolist() == [[0, 1, 2, 22, 41, 42]] and batch.slot_mapping.dtype == torch.int64
    assert batch.logits_at.tolist() == [2, 3, 5]
    paged = Batch.build([[9, 9, 9]], [3], [[7, 4]], 4)
    assert paged.slot_mapping.tolist() == [[7 * 4 + 3, 4 * 4, 4 * 4 + 1]]


def test_neighbours_in_a_batch_do_not_leak(tiny):
    """Changing one request of a step changes no other request's answer, in memory neither."""
    mine = [7, 8, 9, 10]
    answers = {tuple(generate(tiny, [other, mine, other], 8)[1].token_ids) for other in ([1], [2, 4], [60] * 15)}
    assert len(answers) == 1


def test_taps_are_the_streams_of_layers(tiny):
    batch = Batch.build([[4, 5, 6]], [0], [[0]], 8)
    view = NoCache(tiny.specs).view(batch)
    hidden, (first, last) = tiny(batch.token_ids, batch.positions, view, taps=(0, 1))
    assert torch.equal(hidden, tiny(batch.token_ids, batch.positions, view))
    assert torch.equal(tiny.norm(last), hidden) and not torch.equal(first, last)


@pytest.mark.parametrize(("prompts", "options", "words"), [
    ([[]], {}, ["prompt 0", "empty"]),
    ([[1], [61]], {}, ["prompt 1", "61", "60"]),
    ([[-1]], {}, ["-1"]),
    ([["a"]], {}, ["'a'"]),
    ([[1]], {"max_tokens": 0}, ["max_tokens=0"]),
    ([[1]], {"max_tokens": 2.5}, ["max_tokens=2.5"]),
    ([[1] * 96], {}, ["96 tokens", "max_model_len is 96"]),
    ([[1] * 9], {"max_model_len": 9}, ["9 tokens", "max_model_len is 9"]),
    ([[1]], {"max_model_len": 97}, ["max_model_len=97", "96"]),
])
def test_what_cannot_run_is_refused_by_name(tiny, prompts, options, words):
    with pytest.raises(ValueError) as error:
        greedy_steps(tiny, prompts, **options)              # at the call, before the first step
    assert all(word in str(error.value) for word in words)


def test_the_length_limit_is_met_exactly(tiny):
    for limit in (5, 6, 9):
        run, = generate(tiny, [[5, 6, 7, 8]], 50, max_model_len=limit, stop_token_ids=())
        assert run.finish_reason == "length" and len(run.token_ids) == limit - 4


def test_stop_tokens_are_the_last_token(tiny):
    free, = generate(tiny, [[5, 6]], 10, stop_token_ids=())
    stop = free.token_ids[4]
    run, = generate(tiny, [[5, 6]], 10, stop_token_ids=[stop])
    assert run.finish_reason == "stop"
    assert run.token_ids == free.token_ids[:free.token_ids.index(stop) + 1]


def test_one_broken_request_leaves_the_others_alone(tiny):
    """A token whose embedding is not a number ends its own request with "error" and no other (the head is untied)."""
    good, = generate(tiny, [[7, 8, 9]], 6, stop_token_ids=())
    saved = tiny.embed_tokens.weight.data[50].clone()
    try:
        tiny.embed_tokens.weight.data[50] = float("nan")
        bad, other = generate(tiny, [[50, 8], [7, 8, 9]], 6, stop_token_ids=())
    finally:
        tiny.embed_tokens.weight.data[50] = saved
    assert bad.finish_reason == "error" and bad.token_ids == []
    assert other.finish_reason == "length" and other.token_ids == good.token_ids


def test_no_prompts_no_answers(tiny):
    assert generate(tiny, [], 4) == []


@pytest.mark.parametrize(("prompts", "options", "words"), [
    ([[True]], {}, "True"), ([[1.0]], {}, r"1\.0"), ([1, 2], {}, "sequence of sequences"), (None, {}, "prompts"),
    ([[1]], {"max_tokens": True}, "max_tokens=True"), ([[1]], {"max_model_len": 8.0}, r"max_model_len=8\.0"),
    ([[1]], {"stop_token_ids": 5}, "stop_token_ids=5"), ([[1]], {"stop_token_ids": ["5"]}, "stop_token_ids"),
])
def test_odd_kinds_are_named(tiny, prompts, options, words):
    with pytest.raises(ValueError, match=words):
        greedy_steps(tiny, prompts, **options)


def test_generators_arrays_and_tensors_are_prompts(tiny):
    expected = [run.token_ids for run in generate(tiny, [[5, 6], [5, 6]], 4)]
    for prompts in (([5, 6] for _ in range(2)), torch.tensor([[5, 6]] * 2), [np.array([5, 6]), iter([5, 6])]):
        assert [run.token_ids for run in generate(tiny, prompts, 4)] == expected


def test_a_cache_that_cannot_fit_is_refused_before_it_is_made(tiny, monkeypatch):
    import kvbook.lab.hardware

    needed = 3 * 12 * 2 * 2 * 1 * 8 * 4              # prompts × tokens × layers × (K, V) × heads × dim × 4 bytes
    for free, fits in ((needed, True), (needed - 1, False)):
        monkeypatch.setattr(kvbook.lab.hardware, "available_bytes", lambda device, free=free: free)
        if fits:
            assert len(generate(tiny, [[1, 2]] * 3, 10)) == 3
        else:
            with pytest.raises(ValueError, match=rf"3 prompts × 12 tokens .* needs {needed:,} bytes"):
                greedy_steps(tiny, [[1, 2]] * 3, 10)
