"""Writing index versions: a whole one from a stream of chunks, or one that shares with its base what did not change.

Both are staged first: complete, named by hash, and used by nobody until `publish` renames ``CURRENT``. Children are
deleted by marks; small segments are merged, and one with more than a tenth of its children deleted is written again.
What no version names is removed by `discard` (after a crash) and `prune`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc

from ragbuild.core.config import Config, ConfigView
from ragbuild.core.errors import InputRefused
from ragbuild.core.records import Chunk, Document, TermEntry, index_text
from ragbuild.core.store import hash_path, link, read_json, write_bytes, write_json, write_records, write_text
from ragbuild.core.text import LexicalTokenizer, make_tokenizer
from ragbuild.index.dense import build_graph
from ragbuild.index.filters import FIELDS
from ragbuild.index.lexical import TantivyIndex
from ragbuild.index.segments import Segment, SegmentWriter, seal
from ragbuild.index.versions import (
    FILES,
    LAYOUT,
    SEGMENTS,
    Encode,
    IndexVersion,
    current_version,
    publish,
    version_names,
)

BATCH = 1024  # children held in memory while an index is written
MAX_SEGMENTS = 8  # more are merged, the small ones at the end first
DELETED = 0.1  # beyond this share deleted, a segment is written again, and the lexical index made anew
Kept = Mapping[str, Mapping[str, Path]]  # document key -> name -> file: parsed text, page map, images


@dataclass(frozen=True)
class Added:
    """Chunks that enter a version, each parent before its children; tokens and vectors of the children, in order."""

    chunks: list[Chunk]
    tokens: list[list[str]]
    vectors: np.ndarray


@dataclass
class _Part:
    """A segment of the version in the making: its name, and which of its children are deleted."""

    name: str
    gone: np.ndarray
    hash: str

    @property
    def left(self) -> int:
        return int((~self.gone).sum())


@dataclass(frozen=True)
class Content:
    """What a version holds beside its chunks. `prompt` and `entries` belong to it as they are at this moment."""

    documents: Sequence[Document]
    entries: Sequence[TermEntry]
    prompt: str
    kept: Kept = field(default_factory=dict)  # of documents whose files are not in the base already
    made: Mapping[str, Any] = field(default_factory=dict)  # command, when, why, run


def write_version(
    indexes: Path,
    chunks: Iterable[Chunk],
    documents: Sequence[Document],
    entries: Sequence[TermEntry],
    *,
    config: Config | ConfigView,
    encode: Encode,
    embedder: dict[str, Any],
    prompt: str = "",
    kept: Kept | None = None,
    progress: Callable[[int], None] | None = None,
) -> str:
    """Make a new version from chunks (each parent before its children), streaming, and publish it.

    `encode`: texts to unit vectors (n, dim); `embedder`: at least name and dim, kept in the manifest.
    Returns the version's name. Raises InputRefused when there is no child to index.
    """
    made = {"command": "build", "when": datetime.now(UTC).isoformat(timespec="seconds")}
    content = Content(documents, entries, prompt, kept or {}, made)
    name = stage_whole(
        indexes, chunks, content, config=config, encode=encode, embedder=embedder, progress=progress
    )  # fmt: skip
    publish(indexes, name)
    return name


def stage_whole(
    indexes: Path,
    chunks: Iterable[Chunk],
    content: Content,
    *,
    config: Config | ConfigView,
    encode: Encode,
    embedder: dict[str, Any],
    progress: Callable[[int], None] | None = None,
) -> str:
    """Make a version of one new segment; see `write_version`."""
    name, folder = _begin(indexes)
    tokenizer = tokenizer_of(config, content.entries)
    new = indexes / SEGMENTS / _next_segment(indexes)
    with SegmentWriter(new, first_uid=0, dim=embedder["dim"]) as writer:
        for batch in _batches(chunks, BATCH):
            writer.add_parents([c for c in batch if c.is_parent])
            children = [c for c in batch if not c.is_parent]
            if children:
                texts = [index_text(c) for c in children]
                writer.add_children(children, [tokenizer(t) for t in texts], encode(texts))
            if progress:
                progress(writer.n_children)
    if not writer.n_children:
        raise InputRefused("there is no child chunk to index; see the report of the chunking step for what was refused")
    segment = Segment(new, embedder["dim"])
    counts = pc.value_counts(segment.keys["chunk_id"])
    twice = counts.filter(pc.greater(counts.field("counts"), 1))
    if len(twice):
        raise InputRefused(f"chunk {twice[0]['values']} stands {twice[0]['counts']} times; ids must be unique")
    _graph(segment, config)
    engine = _engine(config, writer.n_children)
    if engine == "tantivy":
        TantivyIndex.build(folder / "lexical", _lexical_rows([segment], [None]))
    manifest = {
        "layout": LAYOUT,
        "version": name,
        "made_by": content.made.get("command", "build"),
        "segments": [_entry(_Part(new.name, np.zeros(writer.n_children, bool), seal(new)))],
        "children": writer.n_children,
        "parents": writer.n_parents,
        "n_tokens": writer.n_tokens,
        "next_uid": writer.n_children,
        "documents": len(content.documents),
        "lexical": {**config.lexical.model_dump(mode="json"), "engine": engine, "deleted": 0},
        "embedder": embedder,
        "built": {
            "version": name, "children": writer.n_children, "terms": len(content.entries), "terms_changed": 0,
        },
    }  # fmt: skip
    return _finish(indexes, folder, manifest, content, {})


def stage_update(
    indexes: Path,
    base: IndexVersion,
    content: Content,
    *,
    config: Config | ConfigView,
    gone: np.ndarray,
    added: Sequence[Added],
    on_step: Callable[[str], None] = lambda step: None,
) -> str:
    """Make a version that is `base` without the children in rows `gone` (whole families) and with `added`.

    Nothing is encoded. The dictionary of `content` must be the one that `added` was cut with. Raises InputRefused when
    no child would be left, or a chunk would stand twice. `on_step` is told of each part as it is written.
    """
    name, folder = _begin(indexes)
    gone = np.unique(np.asarray(gone, np.int64))
    new = [c for a in added for c in a.chunks]
    children = [c for c in new if not c.is_parent]
    if len(base) - len(gone) + len(children) == 0:
        raise InputRefused("nothing would be left in the index; the version in use is kept")
    _refuse_twice(base, gone, [c.chunk_id for c in new])
    dim, manifest = base.manifest["embedder"]["dim"], {**base.manifest, "version": name}
    parts, there = _parts(base, gone), set(os.listdir(indexes / SEGMENTS))
    manifest["n_tokens"] -= sum(map(len, base.tokens(gone)))
    manifest["parents"] -= len(base.parents_of(gone))
    first = manifest["next_uid"]
    if children:
        where = indexes / SEGMENTS / _next_segment(indexes)
        with SegmentWriter(where, first, dim) as writer:
            for a in added:
                writer.add_parents([c for c in a.chunks if c.is_parent])
                own = [c for c in a.chunks if not c.is_parent]
                if own:
                    writer.add_children(own, a.tokens, a.vectors)
        _graph(Segment(where, dim), config)
        parts.append(_Part(where.name, np.zeros(writer.n_children, bool), seal(where)))
        manifest["n_tokens"] += writer.n_tokens
        manifest["parents"] += writer.n_parents
        manifest["next_uid"] += writer.n_children
    manifest["children"] = len(base) - len(gone) + len(children)
    on_step("chunks and vectors")
    lexical, former = {**manifest["lexical"]}, base.folder / "lexical"
    engine = lexical["engine"] if lexical["engine"] == "tantivy" else _engine(config, manifest["children"])
    lexical["deleted"] = lexical["deleted"] + len(gone) if engine == "tantivy" else 0
    if engine == "tantivy" and former.is_dir() and lexical["deleted"] <= DELETED * manifest["children"]:
        segment = [Segment(indexes / SEGMENTS / parts[-1].name, dim)] if children else []
        rows = _lexical_rows(segment, [None] * len(segment))
        TantivyIndex.update(former, folder / "lexical", map(int, base.uids(gone)), rows)
    elif engine == "tantivy":  # too many deleted ones still count, or the corpus has outgrown rank_bm25
        segments = [Segment(indexes / SEGMENTS / p.name, dim) for p in parts]
        TantivyIndex.build(folder / "lexical", _lexical_rows(segments, [~p.gone for p in parts]))
        lexical["deleted"] = 0
    on_step("lexical index")
    parts = _merged(indexes, parts, dim, config)
    for merged in set(os.listdir(indexes / SEGMENTS)) - there - {p.name for p in parts}:
        shutil.rmtree(indexes / SEGMENTS / merged)  # written a moment ago
    manifest |= {
        "made_by": content.made.get("command", "ingest"), "documents": len(content.documents),
        "lexical": lexical | {"engine": engine}, "segments": [_entry(p) for p in parts],
    }  # fmt: skip
    if content.entries is not base.entries:
        known = {e.model_dump_json(exclude={"count"}) for e in base.entries}
        changed = sum(e.model_dump_json(exclude={"count"}) not in known for e in content.entries)
        manifest["built"] = manifest["built"] | {"terms_changed": manifest["built"]["terms_changed"] + changed}
    for part in parts:
        if part.gone.any():
            write_bytes(folder / f"{part.name}.deleted", np.packbits(part.gone).tobytes())
    keys = {d.key for d in content.documents}
    held = {key: names for key, names in base.kept.items() if key in keys and key not in content.kept}
    return _finish(indexes, folder, manifest, content, held, base)


def stage_again(indexes: Path, former: IndexVersion, made: Mapping[str, Any]) -> str:
    """Make a version with the content of a former one (rollback): the same bytes under a new name."""
    name, folder = _begin(indexes)
    for file in former.folder.iterdir():
        if file.name == "lexical":
            TantivyIndex.share(file, folder / "lexical")
        elif file.name not in ("version.json", "made.json"):
            link(file, folder / file.name)
    write_json(
        folder / "version.json", {**former.manifest, "version": name, "made_by": made.get("command", "rollback")}
    )
    write_json(folder / "made.json", made)
    os.replace(folder, indexes / name)
    return name


def _begin(indexes: Path) -> tuple[str, Path]:
    """The name of the next version and an empty folder to make it in; what an earlier writer left is removed."""
    (indexes / SEGMENTS).mkdir(parents=True, exist_ok=True)
    (indexes / FILES).mkdir(exist_ok=True)
    for leftover in indexes.glob(".building-*"):
        shutil.rmtree(leftover)
    name = next_version(indexes)
    folder = indexes / f".building-{name}"
    folder.mkdir()
    return name, folder


def next_version(indexes: Path) -> str:
    """The name that the next version gets; none is given twice."""
    return f"v{max([int(v[1:]) for v in version_names(indexes)], default=0) + 1:04d}"


def _next_segment(indexes: Path) -> str:
    names = [int(p.name[1:]) for p in (indexes / SEGMENTS).glob("s*") if p.name[1:].isdigit()]
    return f"s{max(names, default=0) + 1:04d}"


def _finish(
    indexes: Path, folder: Path, manifest: dict[str, Any], content: Content,
    held: Mapping[str, Mapping[str, str]], base: IndexVersion | None = None,
) -> str:  # fmt: skip
    """Write what belongs to the version, name it all by hash, and give the folder its name."""
    kept = dict(held)
    for key, names in content.kept.items():
        kept[key] = {name: _keep(indexes / FILES, file) for name, file in names.items()}
    lines = json.dumps(kept, ensure_ascii=False, separators=(",\n", ": "))  # with indent= it is seven times slower
    write_text(folder / "kept.json", lines + "\n")
    write_text(folder / "documents.jsonl", "".join(d.model_dump_json() + "\n" for d in content.documents))
    if base is not None and content.entries is base.entries:
        link(base.folder / "keyword_dict.json", folder / "keyword_dict.json")
    else:
        write_records(folder / "keyword_dict.json", content.entries)
    write_text(folder / "prompt.md", content.prompt)
    manifest["hashes"] = {f.name: hash_path(f) for f in sorted(folder.iterdir()) if f.is_file()}
    former = base.manifest["lexical_files"] if base is not None else {}  # tantivy's segments never change
    manifest["lexical_files"] = {
        f.name: former[f.name] if f.name in former and f.suffix != ".json" else hash_path(f)
        for f in sorted((folder / "lexical").glob("*")) if f.suffix != ".lock"
    }  # fmt: skip
    write_json(folder / "version.json", manifest)
    write_json(folder / "made.json", content.made)
    os.replace(folder, indexes / manifest["version"])
    return manifest["version"]


def _keep(files: Path, file: Path) -> str:
    digest = hash_path(file)
    with contextlib.suppress(FileExistsError):
        link(file, files / digest)
    return digest


def _entry(part: _Part) -> dict[str, Any]:
    return {"name": part.name, "hash": part.hash, "children": len(part.gone), "deleted": int(part.gone.sum())}


def _engine(config: Config | ConfigView, children: int) -> str:
    engine = config.lexical.engine
    if engine == "auto":
        return "rank_bm25" if children <= config.lexical.rank_bm25_up_to else "tantivy"
    return engine


def _graph(segment: Segment, config: Config | ConfigView) -> None:
    if len(segment.vectors) > config.dense.hnsw_above:
        build_graph(segment.vectors, segment.folder / "hnsw.faiss", config.dense.hnsw_m)


def _refuse_twice(base: IndexVersion, gone: np.ndarray, ids: Sequence[str]) -> None:
    """Raises InputRefused for a new id that stands twice, or that a chunk has which stays."""
    staying = base.holds(ids, gone)
    twice = next((i for i in ids if ids.count(i) > 1), None) if len(set(ids)) < len(ids) else None
    if staying or twice:
        raise InputRefused(f"chunk {twice or staying[0]} would stand twice; the version in use is kept")


def _parts(base: IndexVersion, gone: np.ndarray) -> list[_Part]:
    """The segments of `base` with the rows `gone` marked as deleted; those without a child left are dropped."""
    masks, places, out, start = base.deleted(), base.places(gone), [], 0
    for entry, mask in zip(base.manifest["segments"], masks, strict=True):
        mask = mask.copy()
        mask[places[(places >= start) & (places < start + len(mask))] - start] = True
        start += len(mask)
        if not mask.all():
            out.append(_Part(entry["name"], mask, entry["hash"]))
    return out


def _merged(indexes: Path, parts: list[_Part], dim: int, config: Config | ConfigView) -> list[_Part]:
    """Write again what has too many deleted children, and put small segments at the end together when there are many.

    A run of neighbours is merged, so that the order of children stays: from the last one back, as long as the next is
    at most twice what there is (each child is moved a number of times that grows with the logarithm of their number).
    """
    out = [_rewritten(indexes, [p], dim, config) if p.gone.sum() > DELETED * len(p.gone) else p for p in parts]
    if len(out) > MAX_SEGMENTS:
        first, size = len(out) - 2, out[-1].left + out[-2].left
        while first > 0 and out[first - 1].left <= 2 * size:
            first -= 1
            size += out[first].left
        out[first:] = [_rewritten(indexes, out[first:], dim, config)]
    return out


def _rewritten(indexes: Path, parts: Sequence[_Part], dim: int, config: Config | ConfigView) -> _Part:
    """One new segment of the children that are left in `parts`, in their order."""
    where = indexes / SEGMENTS / _next_segment(indexes)
    with SegmentWriter(where, 0, dim) as writer:
        for part in parts:
            writer.copy(Segment(indexes / SEGMENTS / part.name, dim), ~part.gone)
    _graph(Segment(where, dim), config)
    return _Part(where.name, np.zeros(writer.n_children, bool), seal(where))


def discard(indexes: Path) -> list[str]:
    """Remove what was never published (after a crash); returns what it was, in words."""
    current, done = current_version(indexes), []
    for leftover in (*indexes.glob(".building-*"), *indexes.glob(".parsed-*"), *indexes.glob(".*.tmp")):
        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        done.append(f"removed {leftover.name}, which was half written")
    for name in version_names(indexes) if current else []:
        if int(name[1:]) > int(current[1:]):  # type: ignore[index]
            shutil.rmtree(indexes / name)
            done.append(f"removed version {name}, which was never published")
    if current and _sweep(indexes):
        done.append("removed segments and files that no version names")
    return done


def prune(indexes: Path, keep: int) -> list[str]:
    """Remove all but the last `keep` published versions, never the one in use nor one that a reader holds; returns
    their names. Segments and files go with the last version that names them."""
    current, removed = current_version(indexes), []
    names = [n for n in version_names(indexes) if current and int(n[1:]) <= int(current[1:])]
    for name in [n for n in names[:-keep] if n != current]:
        with (indexes / name / "version.json").open("rb") as hold:
            try:
                fcntl.flock(hold, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                continue  # somebody reads it
            gone = indexes / f".building-{name}"  # in one step, so that nobody meets half of it
            shutil.rmtree(gone, ignore_errors=True)
            os.replace(indexes / name, gone)
        shutil.rmtree(gone)
        removed.append(name)
    if removed:
        _sweep(indexes)
    return removed


def _sweep(indexes: Path) -> int:
    """Remove segments and files that no version names; returns how many."""
    segments, files = set(), set()
    for name in version_names(indexes):
        manifest = read_json(indexes / name / "version.json")
        if manifest.get("layout") != LAYOUT:
            continue
        segments |= {s["name"] for s in manifest["segments"]}
        kept = indexes / name / "kept.json"
        if not kept.is_file():
            return 0  # a damaged version: what it named is not known, so that nothing is removed until it is pruned
        files |= {h for names in read_json(kept).values() for h in names.values()}
    orphans = [p for p in (indexes / SEGMENTS).iterdir() if p.name not in segments]
    orphans += [p for p in (indexes / FILES).iterdir() if p.name not in files]
    for path in orphans:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return len(orphans)


def _batches(chunks: Iterable[Chunk], size: int) -> Iterator[list[Chunk]]:
    batch: list[Chunk] = []
    for chunk in chunks:
        batch.append(chunk)
        if len(batch) >= size:
            yield batch
            batch = []
    if batch:
        yield batch


def tokenizer_of(config: Config | ConfigView, entries: Sequence[TermEntry]) -> LexicalTokenizer:
    """The lexical tokenizer that the configuration asks for, on this dictionary."""
    lexical = config.lexical
    return make_tokenizer(lexical.tokenizer, entries, lexical.stem, lexical.char_bigrams)


def _lexical_rows(
    segments: Sequence[Segment], masks: Sequence[np.ndarray | None]
) -> Iterator[tuple[int, list[str], dict[str, list[str]]]]:
    """uid, tokens and filter fields of the children that the masks let through (None: all), a small batch at a time."""
    for segment, mask in zip(segments, masks, strict=True):
        number = 0
        for batch in segment.children.batches(["uid", "tokens", *FIELDS]):
            for row in batch.to_pylist():
                if mask is None or mask[number]:
                    fields = {f: row[f] if isinstance(row[f], list) else [row[f]] for f in FIELDS}
                    yield row["uid"], row["tokens"], fields
                number += 1
