"""The sliders of `widgets.py` as a page of its own: Voilà on this machine only, behind a token."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import webbrowser
from collections.abc import Iterator
from pathlib import Path

from ragbuild.core.errors import InputRefused, MissingResource, UsageError
from ragbuild.core.store import write_json
from ragbuild.course.widgets import CHOSEN, open_panel

# Voilà's template links icons on a CDN; the page loads nothing that this machine did not send
_POLICY = "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; connect-src 'self' ws://127.0.0.1:*"


@contextlib.contextmanager
def serving(workspace: Path, port: int = 0, on: str = "") -> Iterator[str]:
    """Voilà on 127.0.0.1 with the panel of a workspace (`on`: see `open_panel`); gives the address, with a token that
    only it knows.

    `port` 0: any free one. Raises MissingResource without Voilà, UsageError when the port is taken, InputRefused when
    the page can't be made.
    """
    import nbformat

    if importlib.util.find_spec("voila") is None:
        raise MissingResource("pip install voila ipywidgets (the page of sliders)")
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            raise UsageError(f"port {port} is taken; give another with --port") from None
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        code = (
            f"from ragbuild.course.widgets import open_panel\nopen_panel({str(workspace.resolve())!r}, {on!r}).widget"
        )
        nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)]), f"{folder}/tune.ipynb")
        token = secrets.token_urlsafe(16)
        config = {
            "Voila": {
                "token": token, "ip": "127.0.0.1", "port": port, "port_retries": 0, "open_browser": False,
                "tornado_settings": {"headers": {"Content-Security-Policy": _POLICY}},
            },
            "VoilaConfiguration": {"show_tracebacks": True},
        }  # fmt: skip
        write_json(Path(folder) / "voila.json", config)  # a folder of mode 0700: the token is nobody else's to read
        environment = os.environ | {
            "JUPYTER_CONFIG_DIR": folder, "JUPYTER_RUNTIME_DIR": f"{folder}/runtime", "IPYTHONDIR": f"{folder}/ipython",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")])),
        }  # fmt: skip
        command = [sys.executable, "-m", "voila", f"{folder}/tune.ipynb", "--no-browser"]
        log = Path(folder) / "log"
        with log.open("wb") as out:
            process = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT, cwd=folder)
        try:
            _wait(process, f"http://127.0.0.1:{port}/voila/static/voila.js", log)
            yield f"http://127.0.0.1:{port}/?token={token}"
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(process: subprocess.Popen[bytes], address: str, log: Path, most_s: float = 60) -> None:
    end = time.monotonic() + most_s
    while process.poll() is None and time.monotonic() < end:
        try:
            urllib.request.urlopen(address, timeout=2).close()
            return
        except urllib.error.HTTPError:
            return
        except OSError:
            time.sleep(0.2)
    tail = log.read_text(encoding="utf-8", errors="replace")[-800:]
    raise InputRefused(f"the page did not start: {tail or 'no answer'}")


def tune(workspace: Path, port: int = 8866, open_browser: bool = True, on: str = "") -> None:
    """Open the sliders of a workspace as a page and keep it up until Ctrl-C or a polite kill. The sweep is made first,
    where it can say how far it is; see `serving` for what is raised."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that Voilà ends too
    on = str(Path(on).expanduser().resolve()) if on not in ("", "own", "python-docs") else on  # the page runs elsewhere
    open_panel(workspace, on)
    with serving(workspace, port, on) as address:
        print(f"{address}\nCtrl-C ends it; 'write YAML' writes {workspace / CHOSEN}", flush=True)
        if open_browser:
            webbrowser.open(address)
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                time.sleep(3600)
