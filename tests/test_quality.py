"""Measures of quality: closed forms, torch's own functions and slow twins on tiny models, and what is refused."""
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from kvbook.compute.checkpoint import locate, read_gguf, tokenizer_from_gguf
from kvbook.compute.model import ContiguousCache, NoCache, Transformer, generate
from kvbook.control.config import ModelConfig
from kvbook.lab.quality import (
    agreement,
    closed_book_score,
    first_divergence,
    help_text,
    kl_divergence,
    known_facts,
    perplexity,
    text_logits,
)

TINY = ModelConfig("llama", num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=8,
                   intermediate_size=48, vocab_size=53, max_position_embeddings=64)
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Transformer(TINY).eval().requires_grad_(False)


class Letters:
    """A tokenizer whose tokens are letters; it begins every text with token 52."""

    vocab_size = 53

    def encode(self, text, add_special_tokens=True):
        return [52] * add_special_tokens + [ord(letter) % 52 for letter in text]


class Successor:
    """A model that knows one thing: the next token is the last one plus one, until it reaches `limit`."""

    config, specs, device, dtype = TINY, TINY.layer_specs(), torch.device("cpu"), torch.float32

    def __init__(self, limit=53):
        self.limit = limit

    def __call__(self, token_ids, positions, cache):
        return F.one_hot(torch.where(token_ids < self.limit, (token_ids + 1) % 53, 0), 53).float()

    def logits(self, hidden):
        return hidden


def tokens(count, seed=0):
    return torch.randint(0, 53, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


# Texts and logits


def test_help_text_takes_the_beginning_or_the_end():
    tokenizer = Letters()
    whole = help_text(tokenizer, 100_000)
    assert whole[0] == 52 and len(whole) == 100_000
    assert help_text(tokenizer, 7) == whole[:7]
    assert help_text(tokenizer, 5, last=True) == help_text(tokenizer, 9, last=True)[-5:] != whole[:5]


def test_help_text_is_what_the_default_tokenizer_makes_of_it():
    from pydoc_data.topics import topics

    tokenizer = tokenizer_from_gguf(read_gguf(locate())[0])
    assert topics["assert"].startswith(tokenizer.decode(help_text(tokenizer, 20)))


@pytest.mark.parametrize(("count", "message"), [(10**9, "num_tokens=1000000000, but"), (0, "num_tokens=0"),
                                                (2.5, "num_tokens=2.5")])
def test_help_text_refuses_what_it_does_not_have(count, message):
    with pytest.raises(ValueError, match=message):
        help_text(Letters(), count)


@settings(max_examples=20)
@given(length=st.integers(1, 30), chunk=st.integers(1, 31), spare=st.integers(0, 5), rows=st.integers(1, 3))
def test_chunks_through_a_cache_give_what_one_step_gives(length, chunk, spare, rows):
    torch.manual_seed(1)
    model = Transformer(TINY).double().eval().requires_grad_(False)
    text = tokens(length)
    cache = ContiguousCache(model.specs, rows, length + spare, torch.float64)
    whole, parts = text_logits(model, text), text_logits(model, text, cache=cache, chunk=chunk)
    assert whole.shape == (length, 53) and whole.dtype == torch.float32
    assert torch.allclose(whole, parts, **CLOSE)


def test_a_used_cache_is_used_again(model):
    cache = ContiguousCache(model.specs, 1, 20, torch.float32)
    text_logits(model, tokens(20, seed=1), cache=cache)
    assert torch.allclose(text_logits(model, tokens(12), cache=cache, chunk=5), text_logits(model, tokens(12)), **CLOSE)


def test_a_cache_that_rounds_is_noticed(model):
    rounding = ContiguousCache(model.specs, 1, 24, torch.float8_e4m3fn)
    assert kl_divergence(text_logits(model, tokens(24)), text_logits(model, tokens(24), cache=rounding)) > 1e-6


def test_attention_and_specs_reach_the_layers(model):
    asked = []

    def blind(q, k, v, spec):
        asked.append(spec)
        return torch.zeros_like(q)

    marks, texts = list("ab"), [[*tokens(5, seed), 3] for seed in (1, 2)]
    assert torch.equal(*(text_logits(model, text, attention=blind, specs=marks)[-1] for text in texts))
    assert asked == marks * 2
    assert not torch.equal(*(text_logits(model, text)[-1] for text in texts))


def test_a_tensor_is_a_text_too(model):
    assert torch.equal(text_logits(model, torch.tensor(tokens(6))), text_logits(model, tokens(6)))


@pytest.mark.parametrize(("text", "options", "message"), [
    ([], {}, "the text is empty"),
    ([1, 53], {}, "the text holds token 53"),
    ([1, -1], {}, "the text holds token -1"),
    ([1, 2], {"chunk": 1}, "chunk=1 needs a cache"),
    ([1, 2], {"chunk": 1, "cache": NoCache(TINY.layer_specs())}, "chunk=1 needs a cache"),
    ([1, 2], {"chunk": 0, "cache": ContiguousCache(TINY.layer_specs(), 1, 8)}, "chunk=0"),
    ([1] * 9, {"cache": ContiguousCache(TINY.layer_specs(), 1, 8)}, "capacity=8, but 9 tokens"),
    ([1] * 9, {"cache": ContiguousCache(TINY.layer_specs(), 2, 8)}, "capacity=8, but 9 tokens"),
    ([1], {"cache": ContiguousCache(TINY.layer_specs(), 1, 8), "specs": TINY.layer_specs()}, "specs and attention"),
    ([1], {"cache": ContiguousCache(TINY.layer_specs(), 1, 8), "attention": max}, "specs and attention"),
])
def test_text_logits_refuses(model, text, options, message):
    with pytest.raises(ValueError, match=message):
        text_logits(model, text, **options)


# Measures on logits


def test_perplexity_of_ignorance_is_the_vocabulary_and_of_certainty_one():
    text = tokens(10)
    assert perplexity(torch.zeros(10, 53), text) == pytest.approx(53, rel=1e-5)
    certain = 1e4 * F.one_hot(torch.tensor([*text[1:], 0]), 53).float()
    assert perplexity(certain, text) == 1
    assert perplexity(certain, [*text[:-1], (text[-1] + 1) % 53]) > 1e9


def test_perplexity_scores_next_tokens_and_only_the_last_ones_asked_for():
    logits, text = torch.randn(12, 53, generator=torch.Generator().manual_seed(0)), tokens(12)
    surprise = -logits.double().log_softmax(-1)[torch.arange(11), text[1:]]
    assert perplexity(logits, text) == pytest.approx(surprise.mean().exp().item(), rel=1e-5)
    for last in (1, 4, 11):
        assert perplexity(logits, text, last) == pytest.approx(surprise[-last:].mean().exp().item(), rel=1e-5)
    assert perplexity(logits.bfloat16(), torch.tensor(text)) == pytest.approx(perplexity(logits, text), rel=0.02)


@pytest.mark.parametrize(("logits", "text", "last", "message"), [
    (torch.zeros(1, 5), [1], None, "1 tokens has no next token"),
    (torch.zeros(0, 5), [], None, "0 tokens has no next token"),
    (torch.zeros(3, 5), [1, 2], None, r"shape \(3, 5\) do not fit a text of 2 tokens"),
    (torch.zeros(2), [1, 2], None, r"shape \(2,\) do not fit"),
    (torch.zeros(3, 5), [1, 2, 3], 3, "last=3"),
    (torch.zeros(3, 5), [1, 2, 3], 0, "last=0"),
    (torch.tensor([[0.0, 1.0], [0.0, float("nan")], [0.0, 0.0]]), [1, 0, 1], None, "row 1 are not numbers"),
])
def test_perplexity_refuses(logits, text, last, message):
    with pytest.raises(ValueError, match=message):
        perplexity(logits, text, last)


@given(seed=st.integers(0, 99), rows=st.integers(1, 150), spread=st.floats(0, 20))
def test_kl_is_torch_s_own_and_zero_only_for_equals(seed, rows, spread):
    ours, theirs = spread * torch.randn(2, rows, 53, generator=torch.Generator().manual_seed(seed)).double()
    log_p, log_q = ours.log_softmax(-1), theirs.log_softmax(-1)
    expected = F.kl_div(log_q, log_p, reduction="batchmean", log_target=True).item()
    assert kl_divergence(ours, theirs) == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert kl_divergence(ours, ours) == 0 == kl_divergence(ours, ours + 3.0) or spread > 0
    assert kl_divergence(ours, ours + 3.0) < 1e-12                                # a constant changes no probability
    assert kl_divergence(ours, theirs) > 0 or spread < 1e-6


def test_kl_in_closed_form_and_in_its_direction():
    fair, biased = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.9, 0.1]]).log()
    assert kl_divergence(fair, biased) == pytest.approx(0.5108, abs=1e-4)         # ½ ln(0.5/0.9) + ½ ln(0.5/0.1)
    assert kl_divergence(biased, fair) == pytest.approx(0.3681, abs=1e-4)


def test_kl_of_tokens_that_are_ruled_out():
    one, two = torch.tensor([[0.0, float("-inf")]]), torch.tensor([[0.0, 0.0]])
    assert kl_divergence(one, two) == pytest.approx(0.6931, abs=1e-4)
    assert kl_divergence(one, one) == 0
    assert kl_divergence(two, one) == float("inf")


def test_agreement_counts_rows_with_the_same_choice():
    ours = F.one_hot(torch.tensor([1, 2, 3, 4]), 6).float()
    assert agreement(ours, ours) == 1
    assert agreement(ours, 0.1 * ours + 5) == 1
    assert agreement(ours, F.one_hot(torch.tensor([1, 2, 0, 0]), 6).float()) == 0.5
    assert agreement(ours, -ours) == 0


@pytest.mark.parametrize("measure", [kl_divergence, agreement])
@pytest.mark.parametrize(("ours", "theirs", "message"), [
    (torch.zeros(3, 5), torch.zeros(2, 5), r"\(3, 5\) and \(2, 5\)"),
    (torch.zeros(5), torch.zeros(5), r"\(5,\) and \(5,\)"),
    (torch.zeros(0, 5), torch.zeros(0, 5), "cannot be compared"),
    (torch.zeros(2, 2), torch.tensor([[0.0, 0.0], [float("nan"), 0.0]]), "row 1 are not numbers"),
    (torch.tensor([[float("nan"), 0.0], [0.0, 0.0]]), torch.zeros(2, 2), "row 0 are not numbers"),
])
def test_comparisons_refuse(measure, ours, theirs, message):
    with pytest.raises(ValueError, match=message):
        measure(ours, theirs)


# Facts


def letters(*numbers):
    """A text that `Letters` turns into these tokens (its code is taken modulo 52)."""
    return "".join(chr(312 + number) for number in numbers)


PLANTED = [
    {"prompt": letters(40, 31), "answer": letters(33, 34)},     # " " is 32: 31 → 32, 33, 34, all successors
    {"prompt": letters(31), "answer": letters(33)},
    {"prompt": letters(31), "answer": letters(33, 34, 36)},     # the last token is wrong
    {"prompt": letters(30), "answer": letters(33, 34)},         # the space is wrong
    {"prompt": letters(31), "answer": letters(40, 34)},         # only a token in the middle is wrong
    {"prompt": letters(31), "answer": letters(*range(33, 45))},
]


@pytest.mark.parametrize("batch_size", [1, 2, 4, 6, 50])
def test_planted_answers_are_counted(batch_size):
    assert [ord(letter) % 52 for letter in letters(40, 31)] == [40, 31] and ord(" ") % 52 == 32
    known = known_facts(Successor(), Letters(), PLANTED, batch_size=batch_size)
    assert known == [True, True, False, False, False, True]
    assert closed_book_score(Successor(), Letters(), PLANTED, batch_size=batch_size) == 0.5
    assert known_facts(Successor(limit=36), Letters(), PLANTED, batch_size=batch_size) == [True, True, *[False] * 4]


class WithoutSpace(Letters):
    """Drops the space before an answer, which a random model would never say."""

    def encode(self, text, add_special_tokens=True):
        return super().encode(text.removeprefix(" "), add_special_tokens)


@pytest.mark.parametrize("cached", [False, True])
def test_teacher_forcing_finds_what_decoding_finds(model, cached):
    tokenizer, facts, expected = WithoutSpace(), [], []
    for seed in range(40):                                       # what the model says, or the same with one wrong token
        prompt = [token % 52 for token in tokens(3 + seed % 4, seed)]
        run, = generate(model, [[52, *prompt]], 4, stop_token_ids=(), use_cache=False)
        wrong = seed % 5
        answer = [(token + 1) % 52 if index == wrong else token for index, token in enumerate(run.token_ids)]
        if 52 not in run.token_ids:                              # no letter stands for 52
            facts.append({"prompt": letters(*prompt), "answer": letters(*answer)})
            expected.append(wrong == 4)
    assert set(expected) == {True, False} and len(facts) > 20
    cache = (lambda *size: ContiguousCache(model.specs, *size, torch.float32)) if cached else None
    assert known_facts(model, tokenizer, facts, make_cache=cache, batch_size=7) == expected


def test_a_cache_is_made_for_each_batch_and_used(model):
    made = []

    def make(num_requests, capacity):
        made.append((num_requests, capacity))
        return ContiguousCache(model.specs, num_requests, capacity, torch.float32)

    assert len(known_facts(model, Letters(), PLANTED, make_cache=make, batch_size=4)) == 6
    assert made == [(4, 1 + 1 + 3), (2, 1 + 1 + 12)]             # prompt with its first token, space and answer but one


@pytest.mark.parametrize(("facts", "options", "message"), [
    ([], {}, "facts is empty"),
    ([*PLANTED, {"prompt": "a"}], {}, "fact 6: answer=None"),
    ([{"prompt": " ", "answer": "b"}], {}, "fact 0: prompt=' '"),
    ([{"prompt": "a", "answer": ""}], {}, "fact 0: answer=''"),
    (PLANTED, {"batch_size": 0}, "batch_size=0"),
    (PLANTED, {"make_cache": lambda rows, _: ContiguousCache(TINY.layer_specs(), rows, 3)}, "capacity=3, but 14"),
    (PLANTED, {"make_cache": lambda *size: ContiguousCache(TINY.layer_specs(), *size), "attention": max}, "attention"),
])
def test_closed_book_refuses(model, facts, options, message):
    with pytest.raises(ValueError, match=message):
        closed_book_score(model, Letters(), facts, **options)


def test_damaged_weights_know_nothing_and_say_so():
    torch.manual_seed(0)
    damaged = Transformer(TINY).eval().requires_grad_(False)
    damaged.norm.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="not numbers"):
        known_facts(damaged, Letters(), PLANTED)


# Answers side by side


@pytest.mark.parametrize(("a", "b", "index"), [
    ([1, 2, 3], [1, 2, 3], 3), ([1, 2, 3], [1, 2, 4], 2), ([5], [6], 0), ([1, 2], [1, 2, 3], 2), ([], [1], 0),
    (torch.tensor([1, 2, 3]), [1, 9, 3], 1)])
def test_first_divergence(a, b, index):
    assert first_divergence(a, b) == index == first_divergence(b, a)
