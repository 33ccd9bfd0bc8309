"""Workspaces to practise on: a copy that notebooks 31 and 32 may break, documents to deliver to it, and questions.

A corpus without a folder of arrivals gets three of its own, so that the notebooks run on any corpus.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from ragbuild.core.records import Document, EvalPair, GroundSpan
from ragbuild.core.store import link, read_records, write_text
from ragbuild.index.versions import IndexVersion
from ragbuild.knowledge.doc_versions import compare_versions
from ragbuild.knowledge.registry import Registry
from ragbuild.knowledge.triage import Ruling
from ragbuild.knowledge.writer import Writer

# a sentence that no document holds, the question for it, and what a right answer holds
FACTS = {
    "zh": [
        ("练习热线的号码是 4711。", "练习热线的号码是多少？", "4711"),
        ("练习设备的保修期为 37 个月。", "练习设备的保修期是多久？", "37 个月"),
        ("练习样品的编号是 QX-88。", "练习样品的编号是什么？", "QX-88"),
    ],
    "en": [
        ("The practice hotline has the number 4711.", "Which number has the practice hotline?", "4711"),
        ("The practice device has a warranty of 37 months.", "How long is the practice device's warranty?", "37"),
        ("The label of the practice sample is QX-88.", "What is the label of the practice sample?", "QX-88"),
    ],
}


def copied(source: Path, target: Path, more: Sequence[str] = ()) -> Path:
    """A workspace of its own at `target`, which is emptied first: the index files by hard links, since they are never
    written in place; config.yaml and the files named in `more` by copies.

    version.json is copied, too: readers hold it, and those of another workspace are no concern of this one.
    """

    def own(file: str, copy: str) -> None:
        if file.endswith("version.json"):
            shutil.copy2(file, copy)
        else:
            link(Path(file), Path(copy))

    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    shutil.copytree(source / "indexes", target / "indexes", copy_function=own)
    for name in ("config.yaml", *more):
        shutil.copy2(source / name, target / name)
    return target


def look(workspace: Path, why: str) -> list[str]:
    """Be the next command: register what was built, put right what the last one left, and return what it says."""
    with Writer(workspace, "look", why=why) as writer:
        writer.finish("unchanged")
    return list(writer.notes)


def listed(workspace: Path, version: int) -> dict[str, Document]:
    """The documents by key that the registry gives for a version of the index."""
    registry = Registry.open(workspace)
    try:
        return {d.key: d for d in registry.documents(version)}
    finally:
        registry.close()


def deliver(folder: Path, name: str, text: str, like: Document | None = None, **fields: Any) -> Path:
    """Write ``<name>.md``; its front matter says what the document is: `fields`, over those of the document `like`."""
    described = like.model_dump(mode="json", exclude={"doc_source", "content_hash", "status"}) if like else {}
    described = {key: value for key, value in {**described, **fields}.items() if value}
    head = yaml.safe_dump(described, allow_unicode=True, sort_keys=False)
    write_text(folder / f"{name}.md", f"---\n{head}---\n\n{text}\n")
    return folder / f"{name}.md"


def later(version: str) -> str:
    """A name for the version after this one: its last number counted up, else v2."""
    last = re.search(r"(\d+)(?=\D*$)", version)
    up = f"{version[: last.start()]}{int(last[1]) + 1}{version[last.end() :]}" if last else "v2"
    return up if compare_versions(up, version) == 1 else "v2"


def demonstration(folder: Path, version: IndexVersion) -> tuple[list[Ruling], list[dict[str, Any]]]:
    """Write three arrivals made from the corpus: a corrected copy, a higher version, and one never seen before.

    Each holds a fact. Returns the decision for the higher version (legacy) and a question for each fact, with what the
    answer must hold before and after the arrivals.
    """
    usable = [d for d in version.documents if d.status == "active" and version.markdown(d.key)]
    one, two = (usable or version.documents)[0], (usable or version.documents)[-1]
    facts = FACTS["zh" if one.language == "zh" else "en"]
    remarks = [f"\n\n# {question}\n\n{sentence}" for sentence, question, _ in facts]
    up, so_far = later(two.doc_version), remarks[0] if one == two else ""
    deliver(folder, "corrected", (version.markdown(one.key) or "") + remarks[0], one)
    newer = (version.markdown(two.key) or "") + so_far + remarks[1]
    deliver(folder, "newer", newer, two, doc_version=up, supersedes=two.key)
    unknown = {"doc_id": "practice-sample", "title": facts[2][1], "supersedes": None}
    deliver(folder, "unknown", remarks[2].strip(), one, **unknown)
    of = {"doc_id": two.doc_id, "doc_version": up, "product_model": two.product_model}
    ruling = Ruling(**of, decision="legacy", decided_by="the course", reason="for practice")
    wanted = [({"any": [], "not": [value]}, {"any": [value], "not": []}) for *_, value in facts]
    questions = [
        {"query": question, "about": "new", "before": before, "after": after}
        for (_, question, _), (before, after) in zip(facts, wanted, strict=True)
    ]
    return [ruling], questions


def practice_questions(eval_set: Path, version: IndexVersion, most: int = 60, least: int = 5) -> list[EvalPair]:
    """An evenly spread part of an eval set, at most `most` cases; where there are fewer than `least`, sentences of the
    corpus join them as questions, and are asked more than once where even these are too few.
    """
    pairs = read_records(eval_set, EvalPair)
    pairs = pairs[:: 1 + len(pairs) // most]
    active = [c for c in version.children(np.arange(min(40, len(version)))) if c.status == "active"]
    for i, c in enumerate(active[:10] if len(pairs) < least else []):
        sentence = max(re.split(r"[.!?。！？\n]+", c.content), key=len).strip()[:60]
        truth = (GroundSpan(doc_key=c.doc_key, start=c.span[0], end=c.span[1]),)
        pairs.append(
            EvalPair(
                pair_id=f"practice-{i}",
                query=sentence,
                gt_spans=truth,
                gt_answer=c.content,
                query_type="factual",
                gen_source="single_chunk",
                language=c.language,
            )
        )
    pairs = [p for p in pairs if any(character.isalnum() for character in p.query)]
    again = [p.model_copy(update={"pair_id": f"{p.pair_id}-{n}"}) for n in range(2, least + 1) for p in pairs]
    return pairs + (again[: least - len(pairs)] if len(pairs) < least else [])
