"""Loaded by every Python that the shared build starts: notes which files of the run it opens."""

import os
import sys

_log = os.environ.get("RAGBUILD_TEST_AUDIT")
if _log:
    _run = os.environ["RAGBUILD_TEST_RUN"]
    _busy = False

    def _hook(event, arguments):
        global _busy
        if event != "open" or _busy or not isinstance(arguments[0], (str, bytes)):
            return
        path = os.fsdecode(arguments[0])
        if path.startswith(_run) or path.endswith(".ipynb"):
            _busy = True
            try:
                writing = bool(arguments[2] & (os.O_WRONLY | os.O_RDWR)) if isinstance(arguments[2], int) else False
                with open(f"{_log}/{os.getpid()}.txt", "a", encoding="utf-8") as handle:
                    handle.write(f"{'w' if writing else 'r'}\t{path}\n")
            finally:
                _busy = False

    sys.addaudithook(_hook)
