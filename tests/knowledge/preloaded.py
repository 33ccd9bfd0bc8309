"""What the fork server imports before any test's process is made of it: once, and no thread is started."""

from __future__ import annotations

import importlib

from ragbuild.core.text import make_tokenizer
from tests.knowledge import workspaces

for name in ("faiss", "filelock", "pandas", "psycopg", "rank_bm25", "rapidfuzz.fuzz", "sentencepiece", "tantivy"):
    importlib.import_module(name)
make_tokenizer("jieba", workspaces.TERMS, True, False)("单点登录")
