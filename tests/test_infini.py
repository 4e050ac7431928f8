"""Infini-attention: the functions of the study's page against explicit sums over everything ever read."""

import ast
import json
import types
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from IPython.core.inputtransformer2 import TransformerManager
from torch.nn import functional as F

PAGE = Path(__file__).resolve().parents[1] / "nbs" / "01b_infini.ipynb"
DEFINITIONS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
RULES = ("linear", "delta")


def definitions(path: Path) -> types.SimpleNamespace:
    """The imports, functions and classes of a notebook's cells, without the rest of the cells."""
    space = {"__name__": "page"}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code" and not source.startswith("#| hide"):
            tree = ast.parse(TransformerManager().transform_cell(source))
            tree.body = [node for node in tree.body if isinstance(node, DEFINITIONS)]
            exec(compile(tree, path.name, "exec"), space)
    return types.SimpleNamespace(**space)


@pytest.fixture(scope="module")
def page() -> types.SimpleNamespace:
    return definitions(PAGE)


def elu_plus_one(x: float) -> float:
    return x + 1 if x > 0 else torch.tensor(x, dtype=torch.float64).exp().item()


def explicit(q, k, v, gate, segment_length, rule):
    """One head, token by token and number by number: q, k [T, d_k], v [T, d_v], gate a number; no positions."""
    phi = lambda row: torch.tensor([elu_plus_one(x) for x in row.tolist()], dtype=torch.float64)
    share = 1 / (1 + torch.exp(torch.tensor(-gate, dtype=torch.float64)))
    stored, rows = [], []          # stored: (features of the key, value or correction) of all earlier segments

    def read(row):
        weights = [(phi(row) * features).sum() for features, _ in stored]
        return sum(w * value for w, (_, value) in zip(weights, stored, strict=True)) / sum(weights) if stored else 0

    for start in range(0, len(q), segment_length):
        stop = min(start + segment_length, len(q))
        for t in range(start, stop):
            scores = torch.stack([q[t] @ k[j] / q.shape[1] ** 0.5 for j in range(start, t + 1)])
            local = scores.softmax(0) @ v[start:t + 1]
            rows.append(share * read(q[t]) + (1 - share) * local)
        stored = stored + [(phi(k[j]), v[j] - read(k[j]) if rule == "delta" else v[j]) for j in range(start, stop)]
    return torch.stack(rows)


@pytest.mark.parametrize("rule", RULES)
@given(tokens=st.integers(1, 13), segment_length=st.integers(1, 7), gate=st.floats(-4, 4), seed=st.integers(0, 99))
def test_the_layer_is_the_explicit_sum(page, rule, tokens, segment_length, gate, seed):
    random = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, tokens, width, generator=random, dtype=torch.float64) for width in (4, 4, 3))
    gates = torch.tensor([gate, -gate], dtype=torch.float64)
    output, _ = page.infini_attention(q, k, v, gates, segment_length, rule=rule)
    for head in range(2):
        slow = explicit(q[head], k[head], v[head], gates[head].item(), segment_length, rule)
        torch.testing.assert_close(output[head], slow, rtol=1e-9, atol=1e-9)


@given(x=st.floats(-30, 30))
def test_features_are_elu_plus_one_and_never_negative(page, x):
    found = page.sigma(torch.tensor(x, dtype=torch.float64)).item()
    assert found == pytest.approx(elu_plus_one(x), rel=1e-9, abs=1e-15)
    assert found >= 0


def test_an_empty_memory_answers_with_zeros_and_so_does_one_whose_features_are_all_zero(page):
    empty = page.empty_memory(2, 4, 3)
    assert torch.equal(page.retrieve(empty, torch.randn(2, 5, 4)), torch.zeros(2, 5, 3))
    written = page.update(empty, torch.randn(2, 5, 4), torch.randn(2, 5, 3))
    assert torch.equal(page.retrieve(written, torch.full((2, 1, 4), -200.0)), torch.zeros(2, 1, 3))
    assert page.retrieve(written, torch.randn(2, 1, 4)).abs().min() > 0


@pytest.mark.parametrize("rule", RULES)
def test_the_first_segment_is_local_attention_less_the_gate(page, rule):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 5, 8) for _ in range(3))
    gate = torch.tensor([0.0, 1.5])
    output, _ = page.infini_attention(q, k, v, gate, 5, page.rotate, rule)
    local = F.scaled_dot_product_attention(page.rotate(q, 0), page.rotate(k, 0), v, is_causal=True)
    torch.testing.assert_close(output, (1 - torch.sigmoid(gate))[:, None, None] * local)


def test_a_segment_reads_before_it_writes(page):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 8, 4) for _ in range(3))
    only_memory = torch.tensor([200.0])
    before, _ = page.infini_attention(q, k, v, only_memory, 4)
    k2, v2 = k.clone(), v.clone()
    k2[:, 4:], v2[:, 4:] = 7, 7          # the second segment's own pairs
    after, _ = page.infini_attention(q, k2, v2, only_memory, 4)
    torch.testing.assert_close(after, before)
    v2[:, 3] += 1                        # a pair of the first segment
    later, _ = page.infini_attention(q, k2, v2, only_memory, 4)
    assert (later - before)[:, 4:].abs().min() > 0


def test_positions_reach_the_local_part_and_never_the_memory(page):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 9, 8) for _ in range(3))
    gate = torch.tensor([0.3])
    plain, bare = page.infini_attention(q, k, v, gate, 4)
    rotated, memory = page.infini_attention(q, k, v, gate, 4, page.rotate)
    assert all(map(torch.equal, memory, bare))
    assert not torch.allclose(plain, rotated, atol=1e-3)


def test_a_rotation_depends_on_distance_alone(page):
    torch.manual_seed(0)
    q, k = torch.randn(1, 6, 8), torch.randn(1, 6, 8)
    scores = [page.rotate(q, start) @ page.rotate(k, start).transpose(1, 2) for start in (0, 37)]
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rule", RULES)
def test_the_memory_left_is_all_that_the_next_segment_needs(page, rule):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 12, 4, dtype=torch.float64) for _ in range(3))
    only_memory = torch.full((1,), 200.0, dtype=torch.float64)
    whole, _ = page.infini_attention(q, k, v, only_memory, 3, rule=rule)
    _, memory = page.infini_attention(q[:, :9], k[:, :9], v[:, :9], only_memory, 3, rule=rule)
    torch.testing.assert_close(page.retrieve(memory, q[:, 9:]), whole[:, 9:])


@pytest.mark.parametrize("num_tokens", [1, 255, 256, 257, 1024])
def test_the_memory_is_constant_in_the_length(page, num_tokens):
    x = torch.zeros(1, num_tokens, 128)
    _, memory = page.infini_attention(x, x, x, torch.zeros(1), 256)
    assert sum(part.numel() for part in memory) == 128 * 128 + 128 == 16_512


@given(st.integers(1, 16), st.integers(0, 9))
def test_no_rule_beats_the_bound_on_average_and_separate_keys_reach_it(page, per_slot, seed):
    random = torch.Generator().manual_seed(seed)
    dim, n = 8, 8 * per_slot
    keys = torch.full((1, n, dim), -20.0)
    keys[0, torch.arange(n), torch.arange(n) % dim] = 0
    v = torch.randn(1, n, 400, generator=random)
    answers = page.retrieve(page.update(page.empty_memory(1, dim, 400), keys, v), keys)
    error = ((answers - v).square().sum() / v.square().sum()).item()
    assert error == pytest.approx(1 - dim / n, abs=0.02)
    torch.manual_seed(seed)
    keys = torch.randn(1, n, dim)
    for rule in RULES:
        answers = page.retrieve(page.update(page.empty_memory(1, dim, 400), keys, v, rule), keys)
        assert ((answers - v).square().sum() / v.square().sum()).item() > 1 - dim / n - 0.02


def test_the_delta_rule_halves_a_pair_written_in_two_segments_and_the_linear_rule_does_not(page):
    torch.manual_seed(0)
    k, v = torch.randn(1, 1, 16), torch.randn(1, 1, 16)
    answers = {}
    for rule in RULES:
        memory = page.empty_memory(1, 16, 16)
        for _ in range(5):
            memory = page.update(memory, k, v, rule)
        answers[rule] = page.retrieve(memory, k)
    torch.testing.assert_close(answers["linear"], v)
    torch.testing.assert_close(answers["delta"], v / 2)
