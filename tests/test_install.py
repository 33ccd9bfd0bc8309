"""What `make` runs before anything is installed: which Python, which index, and when there is nothing to do."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SPEC = importlib.util.spec_from_file_location("install", ROOT / ".ci" / "install.py")
install = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(install)


def test_pinned_reads_constraints(monkeypatch, tmp_path):
    monkeypatch.setattr(install, "ROOT", tmp_path)
    (tmp_path / "constraints.txt").write_text(
        "# torch==1\ntorchx==9\ntorch==2.13.0\nappnope==1.0.0 ; sys_platform == 'x'\n"
    )
    assert install.pinned("torch") == "2.13.0"
    assert install.pinned("appnope") == "1.0.0"
    with pytest.raises(SystemExit, match="pins no numpy"):
        install.pinned("numpy")


def test_an_index_that_answers(httpserver):
    httpserver.expect_request("/whl/torch/").respond_with_data("<html></html>")
    httpserver.expect_request("/empty/torch/").respond_with_data("", status=404)
    assert install.answers(httpserver.url_for("/whl/"))
    assert not install.answers(httpserver.url_for("/empty"))


def test_an_index_that_does_not_answer_in_time(httpserver):
    httpserver.expect_request("/whl/torch/").respond_with_handler(lambda _: time.sleep(1))
    started = time.perf_counter()
    assert not install.answers(httpserver.url_for("/whl"), seconds=0.2)
    assert time.perf_counter() - started < 1
    for wrong in ("http://127.0.0.1:9/whl", "no-address", "http://name.invalid/whl"):
        assert not install.answers(wrong, seconds=1)


@pytest.mark.parametrize("environment", [{}, {"TORCH_INDEX_URL": "http://other/whl"}])
def test_torch_comes_from_the_index_that_answers_else_from_pips_own(monkeypatch, environment):
    asked, calls = [], []
    monkeypatch.delenv("TORCH_INDEX_URL", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(install, "has_nvidia", lambda: False)
    monkeypatch.setattr(install, "_installed", lambda *_: "")
    monkeypatch.setattr(install, "_pip", lambda _, *arguments: calls.append(arguments))
    index = environment.get("TORCH_INDEX_URL", install.CPU_INDEX)
    wanted = f"torch=={install.pinned('torch')}"

    monkeypatch.setattr(install, "answers", lambda url: asked.append(url) or True)
    install.install_torch(Path("python"))
    assert (asked, calls) == ([index], [("--no-deps", "--index-url", index, wanted)])

    calls.clear()
    monkeypatch.setattr(install, "answers", lambda url: False)
    install.install_torch(Path("python"))
    assert calls == [("-c", "constraints.txt", wanted)]

    calls.clear()
    monkeypatch.setattr(install, "_installed", lambda *_: install.pinned("torch"))
    install.install_torch(Path("python"))
    assert calls == []


@pytest.mark.skipif(shutil.which("make") is None, reason="no make on this machine")
def test_make_takes_a_python_that_runs_not_one_that_is_only_named(tmp_path):
    (tmp_path / "python3.13").write_text("#!/bin/sh\necho 'command not found' >&2\nexit 127\n")
    (tmp_path / "python3.12").write_text("#!/bin/sh\nexit 1\n")  # says that its version is another
    (tmp_path / "python3.11").write_text("#!/bin/sh\nexit 0\n")
    for name in ("python3.13", "python3.12", "python3.11"):
        (tmp_path / name).chmod(0o755)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHON" and not key.startswith("MAKE")}
    environment["PATH"] = f"{tmp_path}:{environment['PATH']}"
    command = ["make", "--no-print-directory", "-n", "venv"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert f'python="{tmp_path}/python3.11"' in done.stdout

    none = subprocess.run(["make", "venv", "PYTHON="], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert none.returncode == 2
    assert "no Python 3.11, 3.12 or 3.13 found" in none.stderr
