"""The README is true: its commands exist and run, its Python runs, its picture is the computed one."""
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_python_runs_as_it_stands(tmp_path):
    block, = blocks("python")
    assert len([line for line in block.splitlines() if line.strip()]) <= 10
    done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    *answer, last = done.stdout.strip().splitlines()
    assert last == "23,040 bytes of KV cache a token" and len(" ".join(answer)) > 40


def test_every_command_is_a_target():
    console, = blocks("console")
    commands = [line[2:].split("#")[0].split() for line in console.splitlines()]
    assert ["make", "book"] in commands and ["make", "test"] in commands
    named = {target for command in commands for target in command[1:]} | set(re.findall(r"`make ([\w-]+)`", README))
    makefile = (ROOT / "Makefile").read_text()
    for target in named:
        assert re.search(rf"^{target}:.*## ", makefile, re.MULTILINE), target


def test_help_lists_every_documented_target():
    listed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for target in ("book", "test", "hello", "serve", "gpu", "bench", "test-all", "clean"):
        assert f"make {target}" in listed


@pytest.mark.skipif(not (ROOT / ".venv" / ".kvbook-installed").exists(), reason="the environment was not made by make")
def test_make_hello_runs():
    done = subprocess.run(["make", "hello"], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and "such conversations fit" in done.stdout


def test_the_verbs_named_exist():
    for verb in re.findall(r"`kvbook (\w+)", README):
        command = [Path(sys.executable).with_name("kvbook"), verb, "--help"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0 and f"usage: kvbook {verb}" in done.stdout


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_links_and_paths_exist(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", text):
        assert (ROOT / target).exists(), target
    for path in re.findall(r"`((?:nbs|book|kvbook|tests)/[\w./-]*)`", text):
        assert (ROOT / path).exists(), path


def test_the_picture_is_the_computed_strip():
    from kvbook.lab.desk import strip, strip_svg

    picture = (ROOT / "book" / "_static" / "strip.svg").read_text(encoding="utf-8")
    assert picture == strip_svg(strip())
