"""The command, as a person uses it: in a process of its own, with real input."""
import os
import pty
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest

from kvbook import cli
from kvbook.compute.checkpoint import Loaded, locate, read_gguf, tokenizer_from_gguf
from kvbook.control.config import KV_FORMATS

COMMAND = [str(Path(sys.executable).with_name("kvbook"))]


def kvbook(*args, **options):
    return subprocess.run([*COMMAND, *args], capture_output=True, text=True, timeout=300, **options)


def test_generate_streams_an_answer():
    done = kvbook("generate", "What is the capital of France?", "--max-tokens", "20")
    assert done.returncode == 0 and "Paris" in done.stdout
    assert "of cache" in done.stderr                                # the figures do not mix with the answer


@pytest.mark.parametrize("weights", ["w4a16", "w8a8"])
def test_generate_from_packed_weights(weights):
    done = kvbook("generate", "What is the capital of France?", "--max-tokens", "20", "--weights", weights)
    assert done.returncode == 0 and len(done.stdout) > 20 and "of cache" in done.stderr
    assert weights == "w8a8" or "Paris" in done.stdout                # 8 bits for inputs cost this model its answer


@pytest.mark.parametrize("verb", [["generate", "x"], ["chat"], ["hello"]])
def test_weights_reach_the_loader(verb, monkeypatch):
    """Packed weights come from `load_packed`, with the other options; by default nothing is packed."""
    from kvbook.compute import checkpoint, weights

    calls = []

    def refuse(*args, **options):
        calls.append((args, options))
        raise ValueError("seen")

    monkeypatch.setattr(checkpoint, "load", lambda *args, **options: refuse("load", *args, **options))
    monkeypatch.setattr(weights, "load_packed", lambda *args, **options: refuse("load_packed", *args, **options))
    options = ["--model", "m", "--dtype", "float32"]
    for more in ([], ["--weights", "auto"], ["--weights", "w4a16"], ["--weights", "w8a8"]):
        assert cli.main([*verb, *options, *more]) == 2
    rest = {"device": "cpu", "dtype": "float32"}
    assert calls == [(("load", "m"), rest), (("load", "m"), rest),
                     (("load_packed", "m", "w4a16"), rest), (("load_packed", "m", "w8a8"), rest)]


def test_known_weights_are_those_that_can_be_packed():
    from kvbook.compute.weights import WEIGHT_FORMATS

    for weights in ("auto", *WEIGHT_FORMATS):
        assert cli.build_parser().parse_args(["hello", "--weights", weights]).weights == weights
    assert all(weights in kvbook("generate", "x", "--weights", "w3").stderr for weights in ("auto", *WEIGHT_FORMATS))


def test_generate_raw_continues_the_text():
    done = kvbook("generate", "1, 2, 3, 4, 5,", "--raw", "--max-tokens", "4")
    assert done.returncode == 0 and "6" in done.stdout


def test_hello_ends_with_one_line_about_the_cache():
    done = kvbook("hello", "--max-tokens", "8")
    assert done.returncode == 0
    last = done.stdout.strip().splitlines()[-1]
    assert "B = " in last and "such conversations fit" in last


def test_info_counts():
    done = kvbook("info", "default")
    assert done.returncode == 0
    assert "134,515,008" in done.stdout and "23,040 B a token" in done.stdout and "11,880 B a token" in done.stdout
    lines = [line for line in done.stdout.splitlines() if "KV in" in line]
    assert len(lines) == len(KV_FORMATS)
    assert len({line.index(" B a token") for line in lines}) == 1      # one column, whatever the formats are called
    assert all(f" {name} " in line for name, line in zip(KV_FORMATS, lines, strict=True))


@pytest.mark.parametrize(("args", "words"), [
    (["generate", ""], "prompt is empty"),
    (["generate", "x", "--model", "nope"], "neither a folder"),
    (["generate", "x", "--dtype", "int4"], "dtype='int4' is unknown"),
    (["generate", "word " * 9000], "max_model_len is 8192"),
    (["info", "nope"], "neither a folder"),
])
def test_what_cannot_run_is_one_line_and_status_2(args, words):
    done = kvbook(*args)
    assert done.returncode == 2 and words in done.stderr
    assert "Traceback" not in done.stderr and len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("args", [[], ["fly"], ["generate"], ["generate", "x", "--max-tokens", "0"],
                                  ["book", "--port", "x"], ["hello", "--weights", "int4"],
                                  ["info", "--weights", "w4a16"]])
def test_usage_errors(args):
    done = kvbook(*args)
    assert done.returncode == 2 and "usage: kvbook" in done.stderr and "Traceback" not in done.stderr


def test_chat_remembers_turns(monkeypatch, capsys):
    """The second prompt is the whole conversation, the first answer included."""
    tokenizer = tokenizer_from_gguf(read_gguf(locate())[0])
    monkeypatch.setattr(cli, "_load", lambda args: Loaded(None, tokenizer))
    asked, lines = [], iter(["My name is Ada.", "What is my name?", ""])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    monkeypatch.setattr(cli, "stream_answer", lambda loaded, prompt, n: (asked.append(list(prompt)) or "Noted.", None))
    assert cli.main(["chat", "--system", "Be brief."]) == 0
    conversation = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "My name is Ada."},
                    {"role": "assistant", "content": "Noted."}, {"role": "user", "content": "What is my name?"}]
    assert asked == [tokenizer.chat(conversation[:2]), tokenizer.chat(conversation)]


def test_output_may_be_cut_off():
    """`kvbook info | head -1` ends quietly."""
    done = subprocess.run(f"{COMMAND[0]} info default | head -n 1", shell=True, capture_output=True, text=True)
    assert done.stdout.startswith("default: llama") and done.stderr == ""


def test_chat_goes_on_after_a_question_that_is_too_long():
    done = kvbook("chat", "--max-tokens", "8", input="word " * 9000 + "\nHi.\n\n")
    assert done.returncode == 0 and "max_model_len is 8192" in done.stderr
    assert len(done.stdout.split("> ")[2].strip()) > 0              # the second question was answered


def test_ctrl_c_stops_the_answer_and_not_the_chat():
    """On a real terminal: interrupt a long answer, ask again, leave with an empty line."""
    master, slave = pty.openpty()
    process = subprocess.Popen([*COMMAND, "chat", "--max-tokens", "2000"], stdin=slave, stdout=slave, stderr=slave,
                               start_new_session=True, close_fds=True)
    os.close(slave)
    seen, closed = [], threading.Event()

    def watch():
        try:
            while chunk := os.read(master, 4096):
                seen.append(chunk.decode(errors="replace"))
        except OSError:
            pass
        closed.set()

    threading.Thread(target=watch, daemon=True).start()
    text = lambda: "".join(seen)

    def wait_for(condition, seconds=120):
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end and process.poll() is None, text()
            time.sleep(0.05)

    try:
        wait_for(lambda: "> " in text())
        os.write(master, b"Count from one to a thousand, in words.\n")
        wait_for(lambda: len(text().partition("in words.")[2].strip()) > 20)
        process.send_signal(signal.SIGINT)
        wait_for(lambda: ("…" in text() and text().rstrip("\r\n").endswith(">")) or text().endswith("> "))
        os.write(master, b"\n")
        assert process.wait(60) == 0
    finally:
        process.kill()
        os.close(master)
    assert "Traceback" not in text()


def test_book_serves_the_pages(tmp_path):
    pages = tmp_path / "_build" / "html"
    pages.mkdir(parents=True)
    (pages / "index.html").write_text("<p>the book</p>")
    (tmp_path / "book").mkdir()
    (tmp_path / "book" / "claims.toml").touch()
    env = {**os.environ, "KVBOOK_BOOK": str(tmp_path / "book")}
    server = subprocess.Popen([*COMMAND, "book"], stdout=subprocess.PIPE, text=True, env=env)
    try:
        line = server.stdout.readline()
        address = next(word for word in line.split() if word.startswith("http://127.0.0.1:"))
        assert urllib.request.urlopen(address).read() == b"<p>the book</p>"
        taken = address.rstrip("/").rpartition(":")[2]
        other = kvbook("book", "--port", taken, env=env)
        assert other.returncode == 2 and f"port {taken} cannot be used" in other.stderr
    finally:
        server.terminate()
        server.wait(20)


def test_book_without_pages_says_what_to_do(tmp_path):
    (tmp_path / "book").mkdir()
    done = kvbook("book", env={**os.environ, "KVBOOK_BOOK": str(tmp_path / "book")})
    assert done.returncode == 2 and "holds no claims.toml" in done.stderr
    (tmp_path / "book" / "claims.toml").touch()
    done = kvbook("book", env={**os.environ, "KVBOOK_BOOK": str(tmp_path / "book")})
    assert done.returncode == 2 and "make book" in done.stderr


def test_input_that_is_not_utf_8_does_not_end_the_chat():
    done = subprocess.run([*COMMAND, "chat", "--max-tokens", "4"], input=b"h\xff\nHi.\n\n", capture_output=True)
    assert done.returncode == 0 and b"Traceback" not in done.stderr


def test_devices_and_ports_that_are_not_there():
    for args in (["generate", "x", "--device", "cuda:9"], ["info", "--device", "nonsense"]):
        done = kvbook(*args)
        assert done.returncode == 2 and "device=" in done.stderr and "Traceback" not in done.stderr
    assert "65,535" in kvbook("book", "--port", "70000").stderr
