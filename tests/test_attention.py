"""The reference attention against an explicit one, its merge, its masks, and the twins of the default model."""
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbook.compute.attention import attend, merge_attention, reference_attention, visible, with_kv_heads
from kvbook.compute.checkpoint import load
from kvbook.compute.model import Batch, NoCache, Transformer, causal_attention, generate
from kvbook.control.config import CacheSpec, LayerSpec, ModelConfig


def explicit(q, k, v, spec, seen):
    """Row by row, head by head, with Python's own arithmetic for the weights."""
    out = torch.zeros(len(q), q.shape[1], v.shape[2])
    for i in range(len(q)):
        for head in range(q.shape[1]):
            kv_head = head // (q.shape[1] // k.shape[1])
            columns = [j for j in range(len(k)) if seen[i][j]]
            scores = [float(q[i, head] @ k[j, kv_head]) * spec.scale for j in columns]
            if spec.softcap:
                scores = [spec.softcap * math.tanh(s / spec.softcap) for s in scores]
            top = max(scores, default=0)
            weights = [math.exp(s - top) for s in scores]
            for j, weight in zip(columns, weights, strict=True):
                out[i, head] += weight / sum(weights) * v[j, kv_head]
    return out


@settings(max_examples=60)
@given(group=st.sampled_from([1, 2, 3, 5, 6, 7]), kv_heads=st.integers(1, 3), new=st.integers(1, 6),
       old=st.integers(0, 9), window=st.one_of(st.none(), st.integers(1, 12)),
       softcap=st.one_of(st.none(), st.floats(0.5, 20)))
def test_attend_is_the_explicit_sum(group, kv_heads, new, old, window, softcap):
    torch.manual_seed(new * 100 + old)
    spec = LayerSpec(group * kv_heads, kv_heads, 8, 12, 0.4, window=window, softcap=softcap)
    q, k = torch.randn(new, spec.num_heads, 8), torch.randn(old + new, kv_heads, 8)
    v = torch.randn(old + new, kv_heads, 12)
    seen = [[max(0, old + i - (window or 10**6) + 1) <= j <= old + i for j in range(old + new)] for i in range(new)]
    assert visible(new, old + new, window).tolist() == seen
    assert torch.allclose(attend(q, k, v, spec), explicit(q, k, v, spec, seen), atol=1e-5)


def random_tree(data, size):
    """Parents of a random tree: row 0 is the root, each later row hangs on an earlier one."""
    return [-1, *[data.draw(st.integers(0, i - 1)) for i in range(1, size)]]


@settings(max_examples=60)
@given(data=st.data(), size=st.integers(1, 12), old=st.integers(0, 8), window=st.one_of(st.none(), st.integers(1, 9)))
def test_tree_masks_equal_attention_along_each_branch(data, size, old, window):
    """A tree row sees what it would see if its branch stood alone behind the past."""
    torch.manual_seed(size * 10 + old)
    parents = random_tree(data, size)
    branches = []
    for i in range(size):
        branch, j = [], i
        while j >= 0:
            branch, j = [j, *branch], parents[j]
        branches.append(branch)
    mask = torch.tensor([sum(1 << j for j in branch) for branch in branches])
    spec = LayerSpec(4, 2, 8, 8, 0.5, window=window)
    q, k, v = torch.randn(size, 4, 8), torch.randn(old + size, 2, 8), torch.randn(old + size, 2, 8)
    out = attend(q, k, v, spec, tree_mask=mask)
    for i, branch in enumerate(branches):
        rows = [*range(old), *[old + j for j in branch]]
        alone = attend(q[branch], k[rows], v[rows], spec)
        assert torch.allclose(out[i], alone[-1], atol=1e-5)


def test_ordinary_rows_may_stand_beside_a_tree():
    mask = torch.tensor([-1, -1, 0b0100, 0b1100])
    assert visible(4, 5, None, mask).tolist() == [[True, True, False, False, False], [True, True, True, False, False],
                                                  [True, False, False, True, False], [True, False, False, True, True]]


def test_impossible_trees_are_refused():
    with pytest.raises(ValueError, match="see itself"):
        visible(2, 2, None, torch.tensor([1, 1]))
    with pytest.raises(ValueError, match="65 rows is too large"):
        visible(65, 65, None, torch.tensor([-1] * 64 + [1]))
    assert visible(65, 65, None, torch.tensor([-1] * 65)).equal(visible(65, 65))
    last = torch.tensor([-1] * 63 + [-(1 << 63)])                    # bit 63 of an int64 is its sign
    assert visible(64, 64, None, last)[63].nonzero().flatten().tolist() == [63]


@settings(max_examples=60)
@given(cuts=st.lists(st.integers(0, 20), max_size=5), seed=st.integers(0, 9))
def test_parts_merge_to_the_whole(cuts, seed):
    """Any cutting, empty parts included; the empty part is the identity."""
    torch.manual_seed(seed)
    spec = LayerSpec(6, 2, 8, 8, 0.5)
    q, k, v = torch.randn(1, 6, 8), torch.randn(20, 2, 8), torch.randn(20, 2, 8)
    out, lse = attend(q, k, v, spec, return_lse=True)
    bounds = [0, *sorted(cuts), 20]
    empty = torch.zeros(1, 6, 8), torch.full((1, 6), float("-inf"))
    parts = [attend(q, k[a:b], v[a:b], spec, return_lse=True) if b > a else empty
             for a, b in itertools.pairwise(bounds)]
    merged, merged_lse = merge_attention(parts)
    assert torch.allclose(merged, out, atol=1e-5) and torch.allclose(merged_lse, lse, atol=1e-5)
    assert torch.allclose(merge_attention([merge_attention(parts[:2]), *parts[2:]])[0], out, atol=1e-5)
    assert torch.equal(merge_attention([empty, empty])[0], empty[0])
    assert torch.equal(merge_attention([empty, empty])[1], empty[1])


def test_garbage_outside_the_window_never_reaches_the_output():
    spec = LayerSpec(4, 2, 8, 8, 0.5, window=3)
    q, k, v = torch.randn(2, 4, 8), torch.randn(9, 2, 8), torch.randn(9, 2, 8)
    clean = attend(q, k, v, spec)
    k[:5], v[:5] = float("nan"), float("nan")
    assert torch.equal(attend(q, k, v, spec), clean)


def test_the_flat_batch_is_each_request_alone():
    spec = LayerSpec(6, 3, 8, 8, 0.5, window=4)
    q, k, v = torch.randn(6, 6, 8), torch.randn(16, 3, 8), torch.randn(16, 3, 8)
    mask = torch.tensor([-1, -1, 1, 3, 5, -1])
    out, lse = reference_attention(q, k, v, [0, 2, 5, 6], [0, 7, 11, 16], spec, mask, return_lse=True)
    for a, b, c, d in ((0, 2, 0, 7), (2, 5, 7, 11), (5, 6, 11, 16)):
        alone = attend(q[a:b], k[c:d], v[c:d], spec, mask[a:b], return_lse=True)
        assert torch.equal(out[a:b], alone[0]) and torch.equal(lse[a:b], alone[1])


def test_a_value_that_is_part_of_the_key():
    spec = LayerSpec(4, 1, 12, 8, 0.5, value_in_key=True)
    q, k = torch.randn(3, 4, 12), torch.randn(7, 1, 12)
    out = reference_attention(q, k, None, [0, 3], [0, 7], spec)
    assert torch.equal(out, attend(q, k, k[..., :8], spec))


TINY = ModelConfig("llama", 2, 40, 6, 2, 8, 64, 61, 96)


def test_the_reference_serves_the_plain_loop():
    torch.manual_seed(3)
    model, prompts = Transformer(TINY).eval(), [[5, 6, 7], [8] * 11]
    expected = [run.token_ids for run in generate(model, prompts, 9, stop_token_ids=())]
    for use_cache in (False, True):
        runs = generate(model, prompts, 9, stop_token_ids=(), use_cache=use_cache, attention=attend)
        assert [run.token_ids for run in runs] == expected
    q, k, v = torch.randn(3, 6, 8), torch.randn(8, 2, 8), torch.randn(8, 2, 8)
    assert torch.allclose(attend(q, k, v, model.specs[0]), causal_attention(q, k, v, model.specs[0]), atol=1e-5)


def logits_of(model, tokens):
    batch = Batch.build([tokens], [0], [[0]], 512)
    with torch.inference_mode():
        return model.logits(model(batch.token_ids, batch.positions, NoCache(model.specs).view(batch)))


def test_the_multi_head_twin_is_exact_and_three_times_as_dear():
    model, tokenizer = load(dtype="float32")
    twin, tokens = with_kv_heads(model, 9), tokenizer.encode("The reading room is open from six in the evening.")
    assert torch.allclose(logits_of(twin, tokens), logits_of(model, tokens), atol=1e-3)
    assert CacheSpec.of(twin.config).bytes_per_token == 3 * CacheSpec.of(model.config).bytes_per_token
    assert generate(twin, [tokens], 16)[0].token_ids == generate(model, [tokens], 16)[0].token_ids
    shared = dict(model.named_parameters())
    changed = {name for name, p in twin.named_parameters() if p is not shared[name]}
    assert all(".k_proj" in name or ".v_proj" in name for name in changed) and len(changed) == 60


def test_the_multi_query_version_averages():
    torch.manual_seed(0)
    model = Transformer(TINY).eval()
    single = with_kv_heads(model, 1)
    heads = model.layers[1].self_attn.k_proj.weight.unflatten(0, (2, 8))
    assert torch.allclose(single.layers[1].self_attn.k_proj.weight, heads.mean(0))
    assert single.config.num_kv_heads == 1 and single.specs[0].num_kv_heads == 1
    same = with_kv_heads(model, 2)
    assert torch.equal(logits_of(same, [1, 2, 3]), logits_of(model, [1, 2, 3]))
    for number in (4, 5):
        with pytest.raises(ValueError, match=f"num_kv_heads={number}"):
            with_kv_heads(model, number)
