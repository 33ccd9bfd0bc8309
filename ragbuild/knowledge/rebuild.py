"""The full rebuild: when it is recommended, and doing it into a new version while the old one answers.

Documents are chunked, cut and encoded again from the parsed text that the index keeps, so that no source file is
needed. It is never done silently: `triggers` says what speaks for it, a person or a scheduled command decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import fsum
from pathlib import Path
from typing import Any

import yaml

from ragbuild.core.config import Config, stored_config
from ragbuild.core.errors import InputRefused
from ragbuild.core.records import Chunk
from ragbuild.core.store import write_text
from ragbuild.core.text import TokenCounter
from ragbuild.evaluate.regression import recall_at_5
from ragbuild.index.staging import Content, stage_whole
from ragbuild.index.versions import FILES, IndexVersion, version_names
from ragbuild.knowledge.ingest import Result, passes
from ragbuild.knowledge.writer import Step, Writer
from ragbuild.models.embedders import Embedder, VectorCache, load_embedder, resolve_auto
from ragbuild.offline.chunk import Tagger, chunk_document
from ragbuild.offline.parse import image_ids_of, pictures_of, read_kept


def triggers(version: IndexVersion, config: Config, recall: Mapping[str, float] | None = None) -> list[dict[str, Any]]:
    """Each reason for a full rebuild: its present value, its limit, and whether it is reached.

    `recall`: recall@5 ``built`` (when the whole index was last made) and ``now``, where they were measured.
    """
    built, limits = version.manifest["built"], config.knowledge
    name = version.manifest["embedder"]["name"]
    wanted = name if config.embedder.name == "auto" else config.embedder.name
    growth = version.manifest["children"] / built["children"] - 1
    share = built["terms_changed"] / max(1, built["terms"])
    fall = recall["built"] - recall["now"] if recall else None
    rows = [
        ("corpus grew", growth, limits.rebuild_growth, f"{built['children']} chunks when built, now {len(version)}"),
        ("embedding model changed", float(wanted != name), 0.0, f"index: {name}; configured: {wanted}"),
        ("dictionary changed", share, limits.rebuild_dictionary, f"{built['terms_changed']} of {built['terms']} terms"),
        (
            "recall@5 fell", fall, limits.rebuild_recall,
            f"{recall['built']:.3f} then, {recall['now']:.3f} now, n = {recall['n']}"
            if recall else "not measured; --measure does it",
        ),
    ]  # fmt: skip
    return [
        {
            "trigger": what, "value": None if value is None else round(value, 4), "limit": limit,
            "recommended": value is not None and value > limit, "said": said,
        }
        for what, value, limit, said in rows
    ]  # fmt: skip


def recall_then_and_now(
    workspace: Path, version: IndexVersion, config: Config, expert: Path | None, measure: bool = False
) -> dict[str, float] | None:
    """Recall@5 when the whole index was last made (``built``) and of this version (``now``), over the `n` cases that
    `sync` measured both on; None where there are none. `measure`: measure what is missing, which takes a while."""
    then, now = version.made.get("recall_built"), version.made.get("recall")
    if measure:
        first = version.manifest["built"]["version"]
        if not then and first in version_names(version.indexes):
            then = recall_at_5(workspace, first, config, expert=expert)
        now = now or recall_at_5(workspace, version.name, config, expert=expert)
    both = sorted((then or {}).keys() & (now or {}).keys())
    if not both:
        return None
    return {
        "built": fsum(then[i] for i in both) / len(both), "now": fsum(now[i] for i in both) / len(both), "n": len(both),
    }  # fmt: skip


def rebuild(
    workspace: Path, config: Config, *, why: str = "", wait: float = 0.0, regress: bool = True,
    expert: Path | None = None, baseline: Path | None = None, embedder: Embedder | None = None,
    on_step: Step = lambda step: None,
) -> Result:  # fmt: skip
    """Make the whole index anew under `config`, into a new version; the old one answers until that is published.

    `regress`: publish only if no gated metric falls. Raises InputRefused where a document's parsed text was not kept.
    """
    with Writer(workspace, "rebuild", why=why, wait=wait, on_step=on_step) as writer:
        base = writer.base
        result = Result("rebuild", base.name, base.name, notes=writer.notes)
        name, reason = config.embedder.name, "named in the configuration"
        if name == "auto":
            name, reason = resolve_auto(d.language for d in base.documents)
        embedder = embedder or load_embedder(name, config.embedder)
        first = base.made.get("first_built_with") or built_with(stored_config(workspace))
        made = writer.made(built_with=built_with(config), first_built_with=first)
        content = Content(base.documents, base.entries, base.prompt, _kept(base), made)
        about = {"name": embedder.name, "dim": embedder.dim, "why": reason}
        tried = stage_whole(
            writer.indexes, _chunks(base, config, result), content, config=config, encode=VectorCache(embedder).encode,
            embedder=about,
        )  # fmt: skip
        on_step("version")
        if regress and not passes(writer, result, tried, config, expert, baseline, embedder):
            return result
        writer.publish(tried, config.knowledge.keep_versions)
        store_config(workspace, config)
        result.version, result.published = tried, True
        return result


def built_with(config: Config) -> dict[str, Any]:
    """The settings that belong to an index as it was built: they go back with it."""
    return {name: getattr(config, name).model_dump(mode="json") for name in ("chunk", "lexical", "dense", "embedder")}


def store_config(workspace: Path, config: Config) -> None:
    """Make this the workspace's configuration."""
    settings = yaml.safe_dump(config.model_dump(mode="json"), allow_unicode=True, sort_keys=False)
    write_text(workspace / "config.yaml", settings)


def _kept(base: IndexVersion) -> dict[str, dict[str, Path]]:
    missing = [d.key for d in base.documents if base.markdown(d.key) is None]
    if missing:
        raise InputRefused(
            f"the parsed text of {len(missing)} documents was not kept ({', '.join(missing[:3])}); build from the "
            "source files with 'ragbuild build --fresh'"
        )
    return {
        key: {name: base.indexes / FILES / digest for name, digest in names.items()}
        for key, names in base.kept.items()
    }  # fmt: skip


def _chunks(base: IndexVersion, config: Config, result: Result) -> Iterator[Chunk]:
    """The chunks of every document, one document at a time."""
    counter, tagger, kept = TokenCounter(config.chunk.tokenizer), Tagger(base.entries), _kept(base)
    for document in base.documents:
        parsed = read_kept(kept[document.key])
        made = chunk_document(
            document, parsed.markdown, parsed.page_of, config=config.chunk, counter=counter, tagger=tagger,
            image_ids=image_ids_of(pictures_of(document, parsed), document.key),
        )  # fmt: skip
        result.notes += [f"{r['doc_source']}: {r['reason']}" for r in made.refused]
        yield from made.chunks
