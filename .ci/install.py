"""Make the virtual environment and install the pinned set into it. `make` runs this with any Python 3.11 to 3.13.

Usage: install.py FOLDER. Uses the standard library only, since nothing is there yet. Does nothing when pyproject.toml,
constraints.txt and the place are those of the last complete installation; makes the environment anew when the last one
was killed or its Python is gone.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PROBE_S = 5.0
OLDEST, NEWEST = (3, 11), (3, 13)


def main(folder: str) -> int:
    if not OLDEST <= sys.version_info[:2] <= NEWEST:
        return _fail(f"Python {sys.version.split()[0]} at {sys.executable} is not one of 3.11 to 3.13")
    venv = ROOT / folder
    python, done, begun = venv / "bin" / "python", venv / ".installed", venv / ".installing"
    wanted = fingerprint(venv)
    if _works(python) and done.is_file() and done.read_text() == wanted:
        return 0
    if begun.exists() or not _works(python):
        print(f"making {folder} with Python {sys.version.split()[0]}", flush=True)
        try:
            _run(sys.executable, "-m", "venv", "--clear", str(venv))
        except subprocess.CalledProcessError:
            shutil.rmtree(venv, ignore_errors=True)
            return _fail(f"{sys.executable} cannot make an environment; on Debian: apt-get install python3-venv")
    done.unlink(missing_ok=True)
    begun.touch()
    try:
        install_torch(python)
        print("installing the pinned set of constraints.txt (a few minutes the first time)", flush=True)
        _pip(python, "-c", "constraints.txt", "-e", ".[test,postgres]")
    except subprocess.CalledProcessError as error:
        if error.returncode > 0:  # pip gave up in good order; killed, it may leave half a package
            begun.unlink()
        return _fail(f"pip ended with {error.returncode}; what it says stands above. `make venv` tries again")
    done.write_text(wanted)
    begun.unlink()
    print(f"{folder} is ready", flush=True)
    return 0


def fingerprint(venv: Path) -> str:
    """What an installation depends on: the two files, and where it stands (its scripts name the place)."""
    files = [(ROOT / name).read_bytes() for name in ("pyproject.toml", "constraints.txt")]
    return hashlib.sha256(b"\0".join([*files, str(venv).encode()])).hexdigest()


def install_torch(python: Path) -> None:
    """torch first and alone: anything else would take a CUDA build of several gigabytes along.

    On Linux without an NVIDIA card from PyTorch's own index of CPU wheels, or from TORCH_INDEX_URL; where that does not
    answer or lacks the release, from wherever pip is set up to look.
    """
    version = pinned("torch")
    if _installed(python, "torch") == version:
        return
    index = os.environ.get("TORCH_INDEX_URL") or (CPU_INDEX if sys.platform == "linux" and not has_nvidia() else "")
    if index and answers(index):
        print(f"installing torch {version} from {index}", flush=True)
        try:
            _pip(python, "--no-deps", "--index-url", index, f"torch=={version}")
            return
        except subprocess.CalledProcessError:
            print(f"{index} does not have it", flush=True)
    elif index:
        print(f"{index} does not answer within {PROBE_S:.0f} s", flush=True)
    print(f"installing torch {version} from pip's own index", flush=True)
    _pip(python, "-c", "constraints.txt", f"torch=={version}")


def pinned(name: str) -> str:
    """The version of `name` in constraints.txt."""
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    match = re.search(rf"^{re.escape(name)}==([^\s;]+)", text, re.MULTILINE)
    if match is None:
        raise SystemExit(f"constraints.txt pins no {name}")
    return match[1]


def has_nvidia() -> bool:
    """Is there an NVIDIA card with its driver?"""
    if Path("/proc/driver/nvidia/version").exists():
        return True
    tool = shutil.which("nvidia-smi")
    return bool(tool) and subprocess.run([tool, "-L"], capture_output=True, check=False).returncode == 0


def answers(index: str, seconds: float = PROBE_S) -> bool:
    """Does the index serve its page on torch? In a thread, since a name look-up knows no time limit."""
    found: list[bool] = []

    def ask() -> None:
        try:
            with urllib.request.urlopen(f"{index.rstrip('/')}/torch/", timeout=seconds) as page:
                found.append(page.status == 200)
        except (OSError, ValueError):
            found.append(False)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return found == [True]


def _works(python: Path) -> bool:
    """A Python of a supported version with pip: a half-made environment has none."""
    probe = f"import pip, sys; sys.exit(not {OLDEST} <= sys.version_info[:2] <= {NEWEST})"
    return python.exists() and subprocess.run([python, "-c", probe], capture_output=True, check=False).returncode == 0


def _installed(python: Path, name: str) -> str:
    """Version without its local part (``2.13.0+cpu`` is 2.13.0); empty when it is not there."""
    code = f"import importlib.metadata as m; print(m.version({name!r}).partition('+')[0])"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=False).stdout.strip()


def _pip(python: Path, *arguments: str) -> None:
    quiet = () if sys.stdout.isatty() else ("-q",)
    _run(str(python), "-m", "pip", "install", "--disable-pip-version-check", *quiet, *arguments)


def _run(*command: str) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "PIP_USER")}
    subprocess.run(command, check=True, cwd=ROOT, env=environment)


def _fail(message: str) -> int:
    print(f"install: {message}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else ".venv"))
