"""Pages of real keys and values: the tokens of a contiguous run, whatever the blocks, the format and the chunks."""
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbook.compute import mla, windows
from kvbook.compute.attention import attend
from kvbook.compute.checkpoint import load
from kvbook.compute.kv_cache import (
    GATHER,
    PagedKVCache,
    PagedModel,
    gather,
    gathered_attention,
    kernels_for,
    step_batch,
    write,
)
from kvbook.compute.model import Transformer, generate
from kvbook.compute.quantization import QuantizedCache, Stored, observe_kv, static_scales
from kvbook.control.config import KV_FORMATS, CacheSpec, LayerSpec, ModelConfig
from kvbook.control.fake import PagedText, StepRows, run_step
from kvbook.control.paging import BlockPool

pytestmark = pytest.mark.xdist_group("numba")        # each variant is compiled once, by one worker
COUNT = 9
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15], [20], [3, 1, 4, 1, 5]]


def llama():
    return Transformer(ModelConfig("llama", 2, 48, 6, 2, 32, 64, 61, 96, rope_theta=100.0))


def mistral():
    config = windows.MistralConfig("mistral", 2, 32, 4, 2, 32, 48, 61, 96, sliding_window=5)
    return Transformer(config, windows.FAMILIES["MistralForCausalLM"][1])


def gemma2():
    config = windows.Gemma2Config("gemma2", 4, 40, 5, 1, 32, 64, 61, 96, windows=(6, None, 6, None),
                                  query_pre_attn_scalar=4, tie_word_embeddings=True)
    return Transformer(config, windows.FAMILIES["Gemma2ForCausalLM"][1])


def latent():
    sizes = {"num_layers": 2, "hidden_size": 48, "num_heads": 5, "num_kv_heads": 5, "head_dim": 48,
             "intermediate_size": 64, "vocab_size": 61, "max_position_embeddings": 96, "kv_lora_rank": 32,
             "q_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 32, "v_head_dim": 20,
             "first_dense": 1, "num_experts": 6, "num_shared_experts": 1,
             "experts_per_token": 2, "moe_intermediate_size": 24, "num_groups": 3, "topk_groups": 2}
    config = mla.DeepseekConfig("deepseek_v3", **sizes, topk_method="noaux_tc", norm_topk_prob=True)
    return Transformer(config, mla.FAMILIES["DeepseekV3ForCausalLM"][1])


def made(make, seed=0):
    torch.manual_seed(seed)
    return make().double().eval()


def poisoned(cache):
    """Every byte that nobody wrote is something that must not be read."""
    for part in cache.stores:
        for store in part:
            store.scales.fill_(torch.nan)
            store.payload.fill_(torch.nan if store.payload.is_floating_point() else
                                -128 if store.payload.dtype == torch.int8 else 0x7F)
    return cache


def scales_of(model, kv_dtype):
    return static_scales(observe_kv(model, range(40)), kv_dtype) if kv_dtype == "int8_static" else None


def run_paged(model, prompts, kv_dtype, block_size, chunk, spare=0, together=True, kernels=GATHER):
    """Greedy tokens of all prompts through pages, with the pool checked after every step."""
    groups = CacheSpec.of(model.config, kv_dtype, block_size).groups
    sizes = [len(groups) * -(-(len(prompt) + COUNT) // block_size) for prompt in prompts]
    num_blocks = (sum(sizes) if together else max(sizes)) + spare
    cache = poisoned(PagedKVCache(model.specs, num_blocks=num_blocks, block_size=block_size, kv_dtype=kv_dtype,
                                  scales=scales_of(model, kv_dtype), kernels=kernels))
    pool, executor, answers = BlockPool(num_blocks), PagedModel(model, cache), []
    queues = [prompts] if together else [[prompt] for prompt in prompts]
    for queue in queues:
        texts = [PagedText(str(i), prompt, pool, block_size, [g.spec.window for g in groups])
                 for i, prompt in enumerate(queue)]
        while live := [t for t, p in zip(texts, queue, strict=True) if len(t.token_ids) < len(p) + COUNT]:
            run_step(executor, live, chunk)
            pool.check([b for text in texts for table in text.tables for b in table.blocks if b])
        answers += [text.token_ids[len(prompt):] for text, prompt in zip(texts, queue, strict=True)]
        for text in texts:
            text.free()                                     # the next queue finds pages full of stale rows
    assert pool.num_free == num_blocks
    return answers


def cold(model, prompts, kv_dtype):
    """One request at a time, one chunk, contiguous."""
    make = lambda n, capacity: QuantizedCache(model.specs, n, capacity, kv_dtype, scales=scales_of(model, kv_dtype))
    return [generate(model, [prompt], COUNT, stop_token_ids=(), make_cache=make)[0].token_ids for prompt in prompts]


@pytest.mark.parametrize("make", [llama, mistral, gemma2, latent])
@pytest.mark.parametrize(("block_size", "chunk", "together"),
                         [(1, 3, True), (7, 100, True), (16, 4, False), (128, 5, True)])
def test_pages_say_what_one_piece_says(make, block_size, chunk, together):
    model = made(make)
    assert run_paged(model, PROMPTS, "float32", block_size, chunk, together=together) == cold(model, PROMPTS, "float32")


@pytest.mark.parametrize("kv_dtype", KV_FORMATS)
@pytest.mark.parametrize("make", [llama, latent])
def test_every_format_composes_with_pages_chunks_and_batches(kv_dtype, make):
    model = made(make, seed=1)
    assert run_paged(model, PROMPTS, kv_dtype, 4, 3) == cold(model, PROMPTS, kv_dtype)


@pytest.mark.parametrize(("make", "kv_dtype"), [
    (llama, "float32"), (llama, "int8"), (gemma2, "int4"), (mistral, "bfloat16"), (gemma2, "int8"), (latent, "float32"),
    (latent, "fp8_e4m3_token")])
@pytest.mark.parametrize(("block_size", "chunk"), [(1, 3), (4, 100), (16, 5)])
def test_numba_reads_what_was_written(make, kv_dtype, block_size, chunk):
    model = made(make, seed=2).float()
    answers = run_paged(model, PROMPTS, kv_dtype, block_size, chunk, kernels=kernels_for(torch.float32))
    assert answers == cold(model, PROMPTS, kv_dtype)


@pytest.mark.parametrize(("kernels", "block_sizes"), [(GATHER, [7]), (kernels_for(torch.float32), [1, 7, 16, 128])],
                         ids=["gather", "numba"])
def test_the_default_model_says_the_same_from_pages_of_any_size(kernels, block_sizes):
    model, tokenizer = load(dtype="float32")
    prompts = [tokenizer.chat([{"role": "user", "content": question}]) for question in
               ("Why do libraries ask people to be quiet?", "What is a page?", "Name three rivers in Asia.")]
    want = [run.token_ids for run in generate(model, prompts, COUNT, stop_token_ids=())]
    for block_size in block_sizes:
        assert run_paged(model, prompts, "float32", block_size, chunk=20, kernels=kernels) == want, block_size


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2**16), st.sampled_from(["int8", "int4", "fp8_e4m3"]), st.integers(1, 9), st.integers(1, 12),
       st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=20), min_size=1, max_size=4))
def test_any_prompts_blocks_and_chunks(seed, kv_dtype, block_size, chunk, prompts):
    model = made(llama, seed)
    assert run_paged(model, prompts, kv_dtype, block_size, chunk, spare=seed % 3) == cold(model, prompts, kv_dtype)


@pytest.mark.parametrize("kv_dtype", ["float32", "int8", "int4"])
@pytest.mark.parametrize("make", [llama, gemma2])
def test_forks_share_until_they_write(kv_dtype, make):
    model = made(make)
    groups = CacheSpec.of(model.config, kv_dtype, 4).groups
    cache = poisoned(PagedKVCache(model.specs, num_blocks=60, block_size=4, kv_dtype=kv_dtype))
    pool, executor = BlockPool(60), PagedModel(model, cache)
    first = PagedText("0", PROMPTS[0][:10], pool, 4, [g.spec.window for g in groups])
    run_step(executor, [first])
    texts = [first, first.fork("1"), first.fork("2")]
    for token, text in zip((40, 41, 42), texts, strict=True):
        text.token_ids[-1] = token
    starts = [list(text.token_ids) for text in texts]
    for _ in range(COUNT):
        run_step(executor, texts)
        pool.check([b for text in texts for table in text.tables for b in table.blocks if b])
    assert [text.token_ids[len(s):] for text, s in zip(texts, starts, strict=True)] == cold(model, starts, kv_dtype)


def small(kv_dtype="int8", block_size=4, num_blocks=5, **more):
    spec = LayerSpec(num_heads=6, num_kv_heads=2, head_dim=32, value_dim=32, scale=0.2)
    return PagedKVCache([spec] * 2, num_blocks=num_blocks, block_size=block_size, kv_dtype=kv_dtype, **more), spec


@pytest.mark.parametrize("kv_dtype", KV_FORMATS)
def test_what_is_gathered_is_what_was_written_byte_for_byte(kv_dtype):
    cache, spec = small(kv_dtype, scales=[(0.1, 0.2)] * 2 if kv_dtype == "int8_static" else None)
    pages = poisoned(cache).pages[1]
    k, v = torch.randn(10, 2, 32), torch.randn(10, 2, 32)
    table = torch.tensor([3, 1, 5])
    slots = torch.tensor([int(table[p // 4]) * 4 + p % 4 for p in range(10)])
    write(pages, k[:6], v[:6], slots[:6])
    write(pages, k[6:], v[6:], slots[6:])
    for got, codec, x in zip(gather(pages, table, 10, spec), pages[2:], (k, v), strict=True):
        assert torch.equal(got, codec.decode(codec.encode(x)))
    for store, codec, x in zip(pages[:2], pages[2:], (k, v), strict=True):
        for stored, new in zip(store, codec.encode(x), strict=True):
            assert torch.equal(stored[slots // 4, :, slots % 4].view(torch.uint8), new.view(torch.uint8))


def test_a_slot_of_minus_one_writes_nothing():
    cache, _ = small()
    before = [Stored(*(t.clone() for t in store)) for store in cache.stores[0]]
    write(cache.pages[0], torch.randn(2, 2, 32), torch.randn(2, 2, 32), torch.tensor([-1, -1]))
    same = [torch.equal(a, b) for x, y in zip(before, cache.stores[0], strict=True) for a, b in zip(x, y, strict=True)]
    assert all(same)
    write(cache.pages[0], torch.randn(2, 2, 32), torch.randn(2, 2, 32), torch.tensor([-1, 7]))
    changed = (cache.stores[0][0].payload != before[0].payload).nonzero()[:, [0, 2]].unique(dim=0)
    assert changed.tolist() == [[1, 3]]


def test_copies_go_in_their_order():
    cache, _ = small("float32")
    for part in cache.stores:
        for store in part:
            store.payload.copy_(torch.arange(6.0)[:, None, None, None].expand_as(store.payload))
    cache.copy_blocks([(1, 2), (2, 3), (5, 1)])
    for part in cache.stores:
        for store in part:
            assert store.payload[:, 0, 0, 0].tolist() == [0, 5, 1, 1, 4, 5]


@pytest.mark.parametrize("kv_dtype", [name for name in KV_FORMATS if name != "int8_static"])
@pytest.mark.parametrize("block_size", [1, 7, 16])
def test_bytes_are_predicted(kv_dtype, block_size):
    cache, _ = small(kv_dtype, block_size, 9)
    assert cache.num_bytes == 10 * cache.spec.bytes_per_page
    budget = PagedKVCache(cache.specs, num_bytes=cache.num_bytes + cache.spec.bytes_per_page - 1, block_size=block_size,
                          kv_dtype=kv_dtype)
    assert budget.num_blocks == 9 and budget.num_bytes == cache.num_bytes


@pytest.mark.parametrize(("options", "complaint"), [
    ({}, "give num_blocks or num_bytes"), ({"num_blocks": 3, "num_bytes": 10**6}, "give num_blocks or num_bytes"),
    ({"num_blocks": 0}, "num_blocks=0: not one token fits; 1 pages and the null page are needed"),
    ({"num_bytes": 1000}, "num_bytes=1000: not one token fits"),
    ({"num_blocks": 3, "kv_dtype": "int3"}, "kv_dtype='int3' is unknown; known formats: float32"),
    ({"num_blocks": 3, "kv_dtype": "int8_static"}, "needs a scale"),
    ({"num_blocks": 3, "block_size": 0}, "block_size=0 must be an integer of at least 1"),
])
def test_what_cannot_be_allocated_is_refused_when_built(options, complaint):
    spec = LayerSpec(num_heads=6, num_kv_heads=2, head_dim=32, value_dim=32, scale=0.2)
    with pytest.raises(ValueError, match=complaint):
        PagedKVCache([spec] * 2, **options)


def test_layers_that_cannot_share_pages_are_refused():
    wide = LayerSpec(num_heads=6, num_kv_heads=2, head_dim=32, value_dim=32, scale=0.2)
    narrow = LayerSpec(num_heads=8, num_kv_heads=4, head_dim=16, value_dim=16, scale=0.2)
    with pytest.raises(ValueError, match="no page fits all groups"):
        PagedKVCache([wide, narrow], num_blocks=4)
    with pytest.raises(ValueError, match="multiple of 32"):
        PagedKVCache([narrow], num_blocks=4, kv_dtype="int4")


def test_every_group_reads_through_its_own_table():
    full = LayerSpec(num_heads=2, num_kv_heads=1, head_dim=8, value_dim=8, scale=0.3)
    near = LayerSpec(num_heads=2, num_kv_heads=1, head_dim=8, value_dim=8, scale=0.3, window=3)
    cache = PagedKVCache([full, near], num_blocks=6, block_size=2, kv_dtype="float32")
    rows = [StepRows("a", 0, [1, 2, 3, 4, 5], [[1, 2, 3], [4, 5, 6]])]
    batch = step_batch(rows, 2)
    assert batch.block_table.tolist() == [[[1, 2, 3]], [[4, 5, 6]]]
    assert batch.slot_mapping.tolist() == [[2, 3, 4, 5, 6], [8, 9, 10, 11, 12]]
    view = cache.view(batch)
    q, k, v = torch.randn(5, 2, 8), torch.randn(2, 5, 1, 8), torch.randn(2, 5, 1, 8)
    for layer, spec in enumerate((full, near)):
        assert torch.equal(view.attend(layer, q, k[layer], v[layer]), attend(q, k[layer], v[layer], spec))
    assert torch.equal(gather(cache.pages[0], batch.block_table[0, 0], 5, full)[0], k[0])      # layer 1 wrote elsewhere


def test_only_wanted_rows_have_logits():
    rows = [StepRows("a", 0, [1, 2], [[1]], wanted=False), StepRows("b", 3, [7], [[2]])]
    batch = step_batch(rows, 4)
    assert batch.logits_at.tolist() == [2] and batch.seq_lens.tolist() == [2, 4]
    assert batch.positions.tolist() == [0, 1, 3]


def test_trees_pass_through_to_the_reference():
    cache, spec = small("float32", 4, 5)
    k, v = torch.randn(7, 2, 32), torch.randn(7, 2, 32)
    batch = step_batch([StepRows("a", 0, [1] * 4, [[2, 4]])], 4)
    cache.view(batch).attend(0, torch.randn(4, 6, 32), k[:4], v[:4])
    batch = step_batch([StepRows("a", 4, [1] * 3, [[2, 4]])], 4)
    batch.tree_mask = torch.tensor([0b001, 0b011, 0b101])
    q = torch.randn(3, 6, 32)
    out = cache.view(batch).attend(0, q, k[4:], v[4:])
    assert torch.equal(out, attend(q, k, v, spec, batch.tree_mask))
    assert torch.equal(out, gathered_attention(q, cache.pages[0], batch, batch.block_table[0], spec))
