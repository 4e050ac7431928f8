"""The first cell of every notebook: packages, device, dtype, threads, seeds, plots."""
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from kvbook.lab import session, setup

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "nbs").glob("*.ipynb"))


def cells(path):
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def first_code(path):
    return next("".join(cell["source"]) for cell in cells(path) if cell["cell_type"] == "code")


@pytest.fixture
def requires(monkeypatch):
    """Make kvbook's own list of requirements what a test says, and forbid pip."""
    monkeypatch.setattr(session, "in_colab", lambda: False)
    monkeypatch.setattr(session.subprocess, "run", lambda *_, **__: pytest.fail("pip was called"))

    def be(*lines):
        monkeypatch.setattr(session.importlib.metadata, "requires", lambda _: list(lines))
    return be


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_notebook_begins_with_the_same_hidden_cell(path):
    assert first_code(path) == first_code(ROOT / "nbs" / "93_session.ipynb")
    assert first_code(path).startswith("#| hide\n")


def test_the_published_first_cell_is_the_real_one():
    prose = "\n".join("".join(cell["source"]) for cell in cells(ROOT / "nbs" / "93_session.ipynb")
                      if cell["cell_type"] == "markdown")
    assert first_code(ROOT / "nbs" / "93_session.ipynb").removeprefix("#| hide\n") in prose


def test_importing_the_lab_loads_only_the_standard_library_and_changes_nothing():
    script = ("import os, sys; before = dict(os.environ); import kvbook.lab; "
              "assert dict(os.environ) == before; "
              "print([name for name in ('torch', 'numpy', 'matplotlib', 'IPython', 'triton') if name in sys.modules])")
    assert subprocess.check_output([sys.executable, "-c", script], text=True).strip() == "[]"


@pytest.mark.parametrize(("version", "numbers"), [("2.13.0+cpu", (2, 13, 0)), ("1.0rc1", (1, 0)), ("", ())])
def test_version_tuple(version, numbers):
    assert session.version_tuple(version) == numbers


def test_unmet_requirements_looks_at_one_extra_and_at_lower_bounds():
    lines = ["numpy>=1.0", "numpy>=999", "absent-one", 'absent-two>=1; extra == "figures"',
             'absent-three>=3; sys_platform == "linux" and extra == "kernels"']
    assert session.unmet_requirements(lines) == ["numpy>=999", "absent-one"]
    assert session.unmet_requirements(lines, "figures") == ["absent-two>=1"]
    assert session.unmet_requirements(lines, "kernels") == ["absent-three>=3"]


def test_nothing_missing_calls_nothing(requires):
    requires("numpy>=1.0", 'matplotlib>=3; extra == "figures"')
    session.ensure_packages()


def test_a_missing_requirement_is_named_with_what_to_type(requires):
    requires("numpy", "absent-one>=2")
    with pytest.raises(ModuleNotFoundError, match=r"absent-one>=2.*pip install kvbook"):
        session.ensure_packages()
    with pytest.raises(ModuleNotFoundError, match="absent-one"):
        session.ensure_packages(install=False)


def test_a_missing_figure_package_is_only_a_warning(requires):
    requires("numpy", 'absent-two; extra == "figures"')
    with pytest.warns(UserWarning, match=r"absent-two.*kvbook\[figures\]"):
        session.ensure_packages()


@pytest.mark.parametrize("colab", [True, False])
def test_installing_takes_only_what_is_missing_and_holds_torch_where_it_is(requires, monkeypatch, colab):
    commands = []

    def run(command, check):
        commands.append((command, Path(command[command.index("--constraint") + 1]).read_text()))
        return subprocess.CompletedProcess(command, 0)

    requires("numpy", "torch", "absent-one>=2", 'absent-two; extra == "figures"', 'absent-three; extra == "kernels"')
    monkeypatch.setattr(session.subprocess, "run", run)
    monkeypatch.setattr(session, "in_colab", lambda: colab)
    session.ensure_packages(install=None if colab else True)
    [(command, constraints)] = commands
    assert command[:4] == [sys.executable, "-m", "pip", "install"]
    assert command[command.index("--constraint") + 2:] == ["absent-one>=2", "absent-two"]
    assert constraints == f"torch=={session.importlib.metadata.version('torch')}\n"


def test_torch_is_never_installed(requires):
    requires("torch>=999")
    with pytest.raises(RuntimeError, match="never installs it"):
        session.ensure_packages(install=True)


def test_a_failing_pip_is_reported(requires, monkeypatch):
    requires("absent-one")
    monkeypatch.setattr(session.subprocess, "run", lambda command, check: subprocess.CompletedProcess(command, 1))
    with pytest.raises(RuntimeError, match="could not install absent-one"):
        session.ensure_packages(install=True)


def test_without_metadata_there_is_nothing_to_check(monkeypatch):
    def absent(_):
        raise session.importlib.metadata.PackageNotFoundError("kvbook")
    monkeypatch.setattr(session.importlib.metadata, "requires", absent)
    session.ensure_packages()


def test_setup_returns_and_remembers_what_it_decided():
    made = setup(seed=3, dtype="float32", threads=1)
    assert made == session.Session("cuda" if torch.cuda.is_available() else "cpu", "float32", 1, 3)
    assert session.current() is made
    assert torch.get_num_threads() == 1


def test_the_seed_reaches_random_numpy_and_torch():
    def draw(seed):
        setup(seed=seed)
        return random.random(), np.random.rand(), torch.rand(1).item()

    first, again, other = draw(1), draw(1), draw(2)
    assert first == again
    assert all(a != b for a, b in zip(first, other, strict=True))


def test_auto_takes_a_format_that_the_device_multiplies_in():
    made = setup()
    assert made.dtype == session.choose_dtype(made.device)
    assert made.dtype in ("bfloat16", "float32")
    assert 1 <= made.threads == session.count_physical_cores() <= os.cpu_count()


@pytest.mark.parametrize(("flags", "fast"), [
    ("flags\t\t: fpu avx512f avx512_bf16 sse2", True), ("flags : amx_bf16", True), ("flags : avx512f", False),
    ("model name : avx512_bf16", False), ("", False)])
def test_fast_bf16_is_read_from_the_cpu_flags(tmp_path, flags, fast):
    (tmp_path / "cpuinfo").write_text(f"processor : 0\n{flags}\n")
    assert session.cpu_has_fast_bf16(str(tmp_path / "cpuinfo")) is fast
    assert session.cpu_has_fast_bf16(str(tmp_path / "absent")) is False


@pytest.mark.parametrize("dtype", ["int8", "bf16", "nn", ""])
def test_an_odd_dtype_is_refused(dtype):
    with pytest.raises(ValueError, match=f"dtype is '{dtype}'.*float32"):
        setup(dtype=dtype)


def test_too_few_threads_are_refused():
    with pytest.raises(ValueError, match="threads is 0"):
        setup(threads=0)


def test_current_before_setup_says_what_to_do(monkeypatch):
    monkeypatch.setattr(session, "_session", None)
    with pytest.raises(RuntimeError, match=r"kvbook\.lab\.setup"):
        session.current()


@pytest.mark.parametrize(("has_gpu", "imported", "interpreted"), [
    (False, False, "1"), (True, False, None), (False, True, None)])
def test_triton_is_interpreted_only_without_a_gpu_and_before_its_import(monkeypatch, has_gpu, imported, interpreted):
    monkeypatch.setenv("TRITON_INTERPRET", "remembered by monkeypatch")
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    if imported:
        monkeypatch.setitem(sys.modules, "triton", object())
    session.prepare_environment(has_gpu)
    assert os.environ.get("TRITON_INTERPRET") == interpreted


@pytest.mark.parametrize(("chosen", "spin"), [
    ({}, str(session.SPIN_COUNT)), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)])
def test_threads_spin_briefly_unless_the_user_chose_otherwise(monkeypatch, chosen, spin):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "remembered by monkeypatch")
        monkeypatch.delenv(name)
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    session.limit_thread_spin()
    assert os.environ.get("GOMP_SPINCOUNT") == spin
    assert os.environ.get("OMP_WAIT_POLICY") == chosen.get("OMP_WAIT_POLICY")


@pytest.mark.parametrize("call", ["kvbook.lab.setup()", "kvbook.cli.main(['info', 'no-such-model'])"])
def test_the_spin_is_set_before_torch_is_loaded(call):
    script = f"""if True:
        import os, sys
        class Watch:
            def find_spec(self, name, path=None, target=None):
                if name == "torch":
                    print("spin", os.environ.get("GOMP_SPINCOUNT"))
        sys.meta_path.insert(0, Watch())
        import kvbook.cli, kvbook.lab
        {call}
    """
    clean = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run([sys.executable, "-c", script], env=clean, capture_output=True, text=True)
    assert f"spin {session.SPIN_COUNT}\n" in done.stdout, done.stderr
    assert "spin None" not in done.stdout


@pytest.mark.parametrize("building", [True, False])
def test_progress_bars_are_off_only_while_the_book_is_built(monkeypatch, building):
    for name in ("KVBOOK_BUILDING", "TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS"):
        monkeypatch.setenv(name, "1")
        if name != "KVBOOK_BUILDING" or not building:
            monkeypatch.delenv(name)
    session.prepare_environment(has_gpu=True)
    assert os.environ.get("TQDM_DISABLE") == ("1" if building else None)


def test_plots_are_transparent_svg_without_a_box_around(tmp_path):
    import matplotlib
    with matplotlib.rc_context():
        matplotlib.use("svg")
        session.set_plot_style()
        import matplotlib.pyplot as plt
        figure, axes = plt.subplots()
        axes.plot([0, 1])
        figure.savefig(tmp_path / "plot.svg")
        plt.close(figure)
        assert not axes.spines["top"].get_visible()
        assert figure.get_facecolor()[3] == axes.get_facecolor()[3] == 0


@pytest.fixture
def outside(monkeypatch, tmp_path):
    monkeypatch.delenv("KVBOOK_BOOK", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_book_is_found_from_a_notebooks_folder(outside, monkeypatch):
    (outside / "book").mkdir()
    (outside / "book" / "claims.toml").touch()
    (outside / "nbs" / "deeper").mkdir(parents=True)
    monkeypatch.chdir(outside / "nbs" / "deeper")
    assert session.find_book().resolve() == (outside / "book").resolve()


def test_the_book_is_found_from_the_package(outside):
    assert session.find_book() == ROOT / "book"


def test_a_plain_wheel_has_no_book(outside, monkeypatch):
    spec = session.importlib.util.spec_from_file_location("kvbook", outside / "site" / "kvbook" / "__init__.py")
    monkeypatch.setattr(session.importlib.util, "find_spec", lambda _: spec)
    assert session.find_book() is None


def test_the_variable_names_the_book_or_is_an_error(outside, monkeypatch):
    monkeypatch.setenv("KVBOOK_BOOK", str(outside))
    with pytest.raises(FileNotFoundError, match=r"KVBOOK_BOOK is .*claims\.toml"):
        session.find_book()
    (outside / "claims.toml").touch()
    assert session.find_book() == outside
