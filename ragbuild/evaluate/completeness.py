"""Does an index version hold the corpus at hand, whole and as its parts would be made today?

A sample of children is cut and encoded again, since a dense index that was shuffled or made by another model looks
perfectly well by counts and norms alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ragbuild.core.config import Config, ConfigView
from ragbuild.core.records import Chunk, index_text
from ragbuild.core.store import hash_path, sha256
from ragbuild.index.versions import IndexVersion
from ragbuild.models.embedders import Embedder, resolve_auto
from ragbuild.offline.prompts import load_prompt

SAMPLE = 16  # children, evenly spread, that are cut and encoded again
Row = dict[str, Any]


def grown(version: IndexVersion) -> bool:
    """Has this version taken in documents after the build? Then the build's files say nothing about it."""
    return version.manifest.get("made_by", "build") != "build"


def completeness(
    version: IndexVersion, chunks: Sequence[Chunk], embedder: Embedder, config: Config | ConfigView, dictionary: Path
) -> list[Row]:
    """One row a check: part (corpus, lexical, dense, version), check, expected, found, ok."""
    rows: list[Row] = []

    def check(part: str, what: str, expected: Any, found: Any, ok: bool | None = None) -> None:
        ok = expected == found if ok is None else bool(ok)
        rows.append({"part": part, "check": what, "expected": str(expected), "found": str(found), "ok": ok})

    manifest, n = version.manifest, len(version)
    held = [i.decode() for i in version.ids]
    for kind, ids in (("child", held), ("parent", [p.chunk_id for p in version.all_parents()])):
        want = {c.chunk_id for c in chunks if c.is_parent == (kind == "parent")}
        missing, other = len(want - set(ids)), len(set(ids) - want)
        found = f"{len(ids)} ({missing} missing, {other} of no chunk)"
        check("corpus", f"{kind} ids", len(want), found, not missing and not other and len(ids) == len(want))
    sample = np.unique(np.linspace(0, n - 1, SAMPLE).astype(int))
    records, tokens = version.children_and_tokens(sample)
    known = {c.chunk_id: c for c in chunks}
    check("corpus", "records of a sample as in the corpus", len(sample),
          sum(known.get(c.chunk_id) == c for c in records))  # fmt: skip
    check("lexical", "tokenizer", config.lexical.tokenizer, manifest["lexical"]["tokenizer"])
    check("lexical", "children in the index", n, version.lexical.n_documents)
    texts = [index_text(c) for c in records]
    check("lexical", "tokens of a sample, cut again", len(sample),
          sum(list(t) == version.tokenizer(text) for t, text in zip(tokens, texts, strict=True)))  # fmt: skip
    name, why = config.embedder.name, "configured"
    if name == "auto" and grown(version):  # other languages than the build's ask for a rebuild, but break nothing
        name, why = manifest["embedder"]["name"], "as built"
    elif name == "auto":
        name, why = resolve_auto(d.language for d in version.documents)
    taken = manifest["embedder"]["name"]
    check("dense", f"embedder ({why})", name, taken, name == taken == embedder.name)
    check("dense", "dimension", embedder.dim, manifest["embedder"]["dim"])
    check("dense", "vectors", n, len(version.dense))
    bad, zero, off, distinct = _vectors(version)
    check("dense", "vectors with NaN or infinity", 0, bad)
    check("dense", "vectors of zeros", 0, zero)
    check("dense", "vectors whose length is not 1", 0, off)
    check("dense", "distinct vectors (at least half of the children)", f"≥ {n / 2:.0f}", distinct, 2 * distinct >= n)
    fresh = embedder.encode_documents(texts)
    same = fresh.shape[1] == manifest["embedder"]["dim"]
    stored = np.nan_to_num(version.dense.vectors(sample), posinf=0, neginf=0)
    cosines = (fresh * stored).sum(axis=1) if same else np.zeros(len(sample))
    check("dense", f"{len(sample)} children encoded again: least cosine with the stored vector", "≥ 0.99",
          f"{cosines.min():.3f}", cosines.min() >= 0.99)  # fmt: skip
    hashes = manifest["hashes"]
    check("version", "dictionary is the workspace's", hash_path(dictionary)[:12], hashes["keyword_dict.json"][:12])
    prompt = sha256(load_prompt(config.generate.prompt).text)
    check("version", "prompt is the configured one", prompt[:12], hashes["prompt.md"][:12])
    return rows


def _vectors(version: IndexVersion) -> tuple[int, int, int, int]:
    """How many vectors are not finite, zero, of another length than 1; and how many differ."""
    bad, zero, off, seen = 0, 0, 0, set[int]()
    for start in range(0, len(version), 8192):
        block = version.dense.vectors(np.arange(start, min(len(version), start + 8192)))
        norms = np.linalg.norm(block, axis=1)
        bad += int((~np.isfinite(norms)).sum())
        zero += int((norms == 0).sum())
        off += int((np.isfinite(norms) & (norms > 0) & (np.abs(norms - 1) > 1e-3)).sum())
        seen.update(hash(row.tobytes()) for row in block)
    return bad, zero, off, len(seen)
