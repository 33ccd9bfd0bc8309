"""Taking in documents, on both databases: what becomes of each, what is encoded, what is searched afterwards."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from ragbuild.core.errors import GateFailed, InputRefused, UsageError
from ragbuild.core.records import index_text
from ragbuild.index.filters import EVERYTHING, Filter
from ragbuild.index.versions import IndexVersion, version_names
from ragbuild.knowledge import ingest as module
from ragbuild.knowledge import snapshot, triage
from ragbuild.knowledge.ingest import check_overrides, ingest, preview, raise_if_fell
from ragbuild.knowledge.registry import Registry
from tests.conftest import FakeEmbedder
from tests.knowledge.workspaces import (
    ARRIVALS,
    CHOICES,
    DOCUMENTS,
    ENGINES,
    QUERIES,
    answer,
    config_of,
    fresh,
    install,
    paper,
    picture,
    portal,
    published,
    put,
    state,
    take,
)

CONFIG = config_of()


def fates(result) -> dict[str, tuple[str, str, str]]:
    return {f.doc_source: (f.outcome, f.decision, f.decided_by) for f in result.fates}


def registered(workspace: Path) -> dict[str, str]:
    """Key to status, in the version in use."""
    return {d.key: d.status for d in state(workspace)["registered"]}


def chunks_of(workspace: Path, key: str):
    return [c for c in state(workspace)["children"] if c.doc_key == key]


# --- the decisions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_one_arrival_of_each_kind(tmp_path, tmp_path_factory, database, engine: str):
    config, workspace = config_of(engine), fresh(tmp_path_factory, tmp_path / "workspace", engine)
    before = {q: answer(workspace, q, config).text for q in QUERIES}
    result = take(workspace, put(tmp_path / "new", ARRIVALS), config, choices=CHOICES, by="Ada")
    assert fates(result) == {
        "admin-5.md": ("taken", "legacy", "Ada"),
        "portal-5.zh.md": ("taken", "replace", "Ada"),
        "install-lg700.md": ("taken", "parallel", "policy"),
        "backup.md": ("taken", "correction", "policy"),
        "tunnel.zh.md": ("taken", "parallel", "policy"),
        "channel-special.zh.md": ("waiting", "expert", ""),
        "fan.txt": ("unchanged", "", ""),
    }
    assert (result.version, result.former, result.published, result.notes) == ("v0002", "v0001", True, [])
    assert registered(workspace) == {
        "manuals/admin/v3/all": "legacy",
        "manuals/admin/v4/all": "legacy",
        "manuals/admin/v5/all": "active",
        "manuals/portal/v4/all": "superseded",
        "manuals/portal/v5/all": "active",
        "manuals/install/v1/LG-500": "active",
        "manuals/install/v1/LG-700": "active",
        "support/backup/v2/all": "active",
        "manuals/channel/v1/all": "active",
        "manuals/tunnel/v1/all": "active",
        "default/fan/unversioned/all": "active",
    }
    assert {c.status for c in chunks_of(workspace, "manuals/admin/v4/all")} == {"legacy"}
    assert chunks_of(workspace, "manuals/portal/v4/all") == []
    assert "45 days" in chunks_of(workspace, "support/backup/v2/all")[0].content
    assert state(workspace)["queue"] == ["manuals/channel/特别版/all"]
    after = {q: answer(workspace, q, config).text for q in QUERIES}
    for query, old, new in (
        (QUERIES[0], "15 minutes", "20 minutes"), (QUERIES[1], "4 位", "6 位"), (QUERIES[3], "30 days", "45 days"),
        (QUERIES[4], "12 kg", "12 kg"), (QUERIES[5], "8443", "8443"), (QUERIES[6], "without tools", "without tools"),
    ):  # fmt: skip
        assert old in before[query] and new in after[query], query
    assert "21 kg" in answer(workspace, "The weight of the LG-700", config).text
    made = IndexVersion(workspace / "indexes").made
    assert made["command"] == "ingest" and made["why"] == str(tmp_path / "new") and made["run"]


def test_history_names_who_decided_and_why(tmp_path, workspace):
    take(
        workspace,
        put(tmp_path / "new", {"a.md": ARRIVALS["admin-5.md"]}),
        CONFIG,
        choices={"admin": "legacy"},
        by="Ada",
    )
    registry = Registry.open(workspace)
    rows = [h for h in registry.history() if h.version == 2]
    assert {(h.key, h.from_status, h.to_status, h.decision, h.decided_by) for h in rows} == {
        ("manuals/admin/v4/all", "active", "legacy", "legacy", "Ada"),
        ("manuals/admin/v5/all", None, "active", "legacy", "Ada"),
    }
    assert all("chosen for this run; the machine suggested legacy: newer than v4" in h.reason for h in rows)
    built, taken = registry.runs()
    assert (built.command, built.outcome, taken.command, taken.outcome) == ("build", "published", "ingest", "published")
    assert rows[0].run_id == taken.id and (taken.base, taken.target) == (1, 2)
    assert [d.doc_version for d in registry.chain("manuals/admin/v5/all", 2)] == ["v5", "v4", "v3"]
    assert registry.chain("manuals/admin/v5/all", 1) == []
    registry.close()


def test_legacy_is_hidden_by_default_found_on_request_and_marked(tmp_path, workspace):
    take(workspace, put(tmp_path / "new", {"a.md": ARRIVALS["admin-5.md"]}), CONFIG, choices={"*": "legacy"})
    now = answer(workspace, "How long is the idle timeout of a session?", CONFIG)
    assert "20 minutes" in now.text and {c.status for c in now.citations} == {"active"}
    for question in ("idle timeout of a session in the previous version", "旧版 idle timeout session"):
        asked = answer(workspace, question, CONFIG).text.splitlines()
        marked = "[{}, older version; the current one is v5] The idle timeout of a session is {} minutes."
        assert [line.rpartition(" ^")[0] for line in sorted(asked)] == [
            "The idle timeout of a session is 20 minutes.", marked.format("v3", 10), marked.format("v4", 15),
        ], question  # fmt: skip
    by_option = answer(workspace, "How long is the idle timeout of a session?", CONFIG, doc_version=("v4",))
    assert "15 minutes" in by_option.text and "older version" in by_option.text
    version = IndexVersion(workspace / "indexes")
    default = version.allowed(Filter())
    hidden = {c.doc_key for c in version.children(np.flatnonzero(~default))}
    assert hidden == {"manuals/admin/v3/all", "manuals/admin/v4/all"}
    assert version.allowed(EVERYTHING) is None


def test_a_folder_with_a_chain_of_two_new_versions(tmp_path, workspace):
    """The newest is read first by its name; the one that it supersedes is decided about first."""
    new = {
        "0-newest.md": portal("v6", 8, supersedes="manuals/portal/v5/all", effective_date="2027-01-01"),
        "9-older.md": ARRIVALS["portal-5.zh.md"],
    }
    result = take(workspace, put(tmp_path / "new", new), CONFIG, choices={"portal": "replace"})
    assert {f.doc_source: f.decision for f in result.fates} == {"0-newest.md": "replace", "9-older.md": "replace"}
    held = registered(workspace)
    assert {k: v for k, v in held.items() if "portal" in k} == {
        "manuals/portal/v4/all": "superseded",
        "manuals/portal/v5/all": "superseded",
        "manuals/portal/v6/all": "active",
    }
    assert "8 位" in answer(workspace, "短信验证码为几位数字", CONFIG).text
    registry = Registry.open(workspace)
    assert [d.doc_version for d in registry.chain("manuals/portal/v6/all", 2)] == ["v6", "v5", "v4"]
    registry.close()
    assert {c.doc_version for c in state(workspace)["children"] if c.doc_id == "portal"} == {"v6"}


def test_two_versions_of_a_new_document_at_once(tmp_path, workspace):
    new = {"b.md": install("LG-900", 30, "v2", supersedes="manuals/install/v1/LG-900"), "a.md": install("LG-900", 29)}
    source = put(tmp_path / "new", new)
    with pytest.raises(InputRefused, match=r"'legacy' makes no sense here \(no registered version serves one of"):
        take(workspace, source, CONFIG, choices={"install": "legacy"})
    ruling = triage.Ruling(doc_id="install", doc_version="v2", decision="legacy", decided_by="Lin")
    result = take(workspace, source, CONFIG, rulings=[ruling])
    assert fates(result) == {"a.md": ("taken", "parallel", "policy"), "b.md": ("taken", "legacy", "Lin")}
    held = registered(workspace)
    assert held["manuals/install/v1/LG-900"] == "legacy" and held["manuals/install/v2/LG-900"] == "active"
    assert held["manuals/install/v1/LG-500"] == "active", "no model in common"


# --- nothing twice ----------------------------------------------------------------------------------------------------


def test_the_same_again_makes_no_version(tmp_path, workspace):
    source = put(tmp_path / "new", ARRIVALS)
    take(workspace, source, CONFIG, choices=CHOICES)
    before, files = state(workspace), published(workspace)
    for options in ({}, {"choices": CHOICES}):
        again = take(workspace, source, CONFIG, **options)
        assert (again.version, again.published) == ("v0002", False)
        assert all("so the choice" in n and "changes nothing" in n for n in again.notes)
        assert len(again.notes) == len(options.get("choices", {}))
        assert {f.outcome for f in again.fates} == {"unchanged", "waiting"}
        assert state(workspace) == before and published(workspace) == files
    one = take(workspace, source / "admin-5.md", CONFIG)
    assert fates(one) == {"admin-5.md": ("unchanged", "", "")} and not one.published
    registry = Registry.open(workspace)
    assert [r.outcome for r in registry.runs()] == ["published", "published", "unchanged", "unchanged", "unchanged"]
    registry.close()


def test_the_corpus_itself_again_is_no_change(tmp_path, workspace):
    result = take(workspace, put(tmp_path / "source", DOCUMENTS), CONFIG)
    assert {f.outcome for f in result.fates} == {"unchanged"} and not result.published
    assert version_names(workspace / "indexes") == ["v0001"]


def test_a_file_given_twice_is_taken_once(tmp_path, workspace):
    source = put(tmp_path / "new", {"b.md": install("LG-700", 21), "c.md": install("LG-700", 21)})
    result = take(workspace, [source / "b.md", source / "b.md"], CONFIG)
    assert result.count("taken") == 1 and result.count("refused") == 0
    result = take(workspace, [source / "c.md", source], CONFIG)
    assert not result.published and len(chunks_of(workspace, "manuals/install/v1/LG-700")) == 1
    other = put(tmp_path / "other", {"d.md": install("LG-800", 9), "e.md": install("LG-800", 9) + "\nMore.\n"})
    result = take(workspace, other, CONFIG)
    (refused,) = [f for f in result.fates if f.outcome == "refused"]
    assert "the same key manuals/install/v1/LG-800 as 'd.md'" in refused.reason
    assert registered(workspace)["manuals/install/v1/LG-800"] == "active"


def test_two_folders_with_the_same_document(tmp_path, workspace):
    sources = [put(tmp_path / name, {"b.md": install("LG-700", 21)}) for name in ("one", "two")]
    result = take(workspace, sources, CONFIG)
    assert result.count("taken") == 1 and len(chunks_of(workspace, "manuals/install/v1/LG-700")) == 1
    more = [put(tmp_path / n, {"b.md": install("LG-800", kg)}) for n, kg in (("three", 8), ("four", 9))]
    result = take(workspace, more, CONFIG)
    (refused,) = [f for f in result.fates if f.outcome == "refused"]
    assert "the same key manuals/install/v1/LG-800 as a document of another folder" in refused.reason
    assert "8 kg" in "".join(c.content for c in chunks_of(workspace, "manuals/install/v1/LG-800"))


# --- the queue --------------------------------------------------------------------------------------------------------


def test_what_waits_for_an_expert_stays_queued_until_it_is_decided(tmp_path, workspace):
    source = put(tmp_path / "new", {"c.md": ARRIVALS["channel-special.zh.md"]})
    key = "manuals/channel/特别版/all"
    result = take(workspace, source, CONFIG)
    assert fates(result) == {"c.md": ("waiting", "expert", "")} and not result.published
    registry = Registry.open(workspace)
    (waits,) = registry.queued()
    assert waits.key == key and "cannot be ordered" in waits.reason and waits.signals["version_order"]
    assert key not in registered(workspace)
    take(workspace, source, CONFIG)
    assert registry.queued()[0].since == waits.since
    result = take(workspace, source, CONFIG, choices={"channel": "legacy"}, by="Lin")
    assert result.published and registry.queued() == []
    registry.close()
    assert registered(workspace)["manuals/channel/v1/all"] == "legacy" and registered(workspace)[key] == "active"
    assert "9443" in answer(workspace, "特别版的端口是多少", CONFIG).text


def test_decisions_csv_decides_and_stale_rows_are_said(tmp_path, workspace):
    source = put(tmp_path / "new", {"p.md": ARRIVALS["portal-5.zh.md"]})
    rulings = [
        triage.Ruling(doc_id="portal", doc_version="v5", decision="replace", decided_by="Lin", reason="per release"),
        triage.Ruling(doc_id="gone", doc_version="v1", decision="legacy"),
    ]
    result = take(workspace, source, CONFIG, rulings=rulings)
    assert fates(result) == {"p.md": ("taken", "replace", "Lin")} and result.fates[0].reason == "per release"
    assert result.notes == ["decisions.csv: gone v1 is about no document here"]


def test_unattended_policy_may_allow_more(tmp_path, workspace):
    source = put(tmp_path / "new", {"p.md": ARRIVALS["portal-5.zh.md"]})
    assert fates(take(workspace, source, CONFIG))["p.md"] == ("waiting", "replace", "")
    allowed = config_of(**{"knowledge.unattended": ["replace"]})
    assert fates(take(workspace, source, allowed))["p.md"] == ("taken", "replace", "policy")
    assert state(workspace)["queue"] == []


# --- bad input --------------------------------------------------------------------------------------------------------

BAD = {
    "junk.md": bytes([0, 1, 2, 255, 254, 250]) * 50,
    "empty.md": "",
    "blank.txt": " \n\t\n",
    "headings.md": "# Title\n\n## Nothing below\n",
    "picture.png": b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 4,
    "comment.md": "<!-- nobody reads this -->\n",
    "broken.md": "---\ndoc_id: x\nstatus: unknown\n---\n\nText.\n",
}  # fmt: skip


def test_what_cannot_be_read_is_reported_and_the_others_go_in(tmp_path, workspace):
    source = put(tmp_path / "new", BAD | {"install-lg700.md": ARRIVALS["install-lg700.md"]})
    result = take(workspace, source, CONFIG)
    told = {f.doc_source: f.reason for f in result.fates if f.outcome == "refused"}
    assert told.keys() == BAD.keys() and all(told.values())
    assert result.published and registered(workspace)["manuals/install/v1/LG-700"] == "active"
    (tmp_path / "new" / "install-lg700.md").unlink()
    before = published(workspace)
    with pytest.raises(InputRefused, match=r"none of the documents could be taken in; .*\n  blank.txt: the file is"):
        take(workspace, source, CONFIG)
    assert published(workspace) == before and state(workspace)["version"] == "v0002"


def test_a_document_without_a_chunk_is_refused_and_does_nothing(tmp_path, workspace, monkeypatch):
    """Its decision is not carried out either: the version that it would have replaced stays."""
    real = module.chunk_document

    def chunk(document, *arguments, **options):
        made = real(document, *arguments, **options)
        if document.doc_version == "v5":
            refused = [{"doc_source": document.doc_source, "span": (0, 1), "reason": "no page"}]
            return type(made)([], refused, made.stats)
        return made

    monkeypatch.setattr(module, "chunk_document", chunk)
    new = {n: ARRIVALS[n] for n in ("portal-5.zh.md", "install-lg700.md")}
    new["portal-6.md"] = portal("v6", 8, supersedes="manuals/portal/v5/all", effective_date="2027-01-01")
    source = put(tmp_path / "new", new)
    result = take(workspace, source, CONFIG, choices={"portal": "replace"})
    bad = next(f for f in result.fates if f.doc_source == "portal-5.zh.md")
    assert bad.outcome == "refused" and "no text to chunk" in bad.reason and "no page" in bad.reason
    assert result.published and len(result.fates) == 3
    held = registered(workspace)
    assert held["manuals/install/v1/LG-700"] == "active" and "manuals/portal/v5/all" not in held
    assert held["manuals/portal/v4/all"] == "superseded" and held["manuals/portal/v6/all"] == "active"
    before = published(workspace)
    with pytest.raises(InputRefused, match=r"could be taken in.*\n  portal-5.zh.md: holds no text to chunk; no page"):
        take(workspace, source / "portal-5.zh.md", CONFIG, choices={"portal": "replace"})
    assert published(workspace) == before


def test_a_choice_that_makes_no_sense_is_refused_and_says_what_would(tmp_path, workspace):
    source = put(tmp_path / "new", {n: ARRIVALS[n] for n in ("install-lg700.md", "portal-5.zh.md")})
    result = take(workspace, source, CONFIG, choices={"install": "replace", "portal": "replace"})
    (refused,) = [f for f in result.fates if f.outcome == "refused"]
    assert "choose unchanged or parallel" in refused.reason and result.published
    assert "manuals/install/v1/LG-700" not in registered(workspace)


def test_wrong_arguments(tmp_path, workspace):
    source, before = put(tmp_path / "new", {"a.md": ARRIVALS["admin-5.md"]}), published(workspace)
    with pytest.raises(UsageError, match="missing is not there; give documents"):
        take(workspace, tmp_path / "missing", CONFIG)
    with pytest.raises(UsageError, match="--decision names nobody, but the documents that changed are: admin"):
        take(workspace, source, CONFIG, choices={"nobody": "legacy"})
    with pytest.raises(UsageError, match="the index was encoded with 'fake', and embedder.name is 'use'"):
        ingest(workspace, [source], config_of(**{"embedder.name": "use"}))
    with pytest.raises(UsageError, match=r"chunk.child_tokens, lexical.stem cannot be changed .* rebuild"):
        check_overrides(["chunk.child_tokens", "knowledge.keep_versions", "lexical.stem"])
    with pytest.raises(InputRefused, match="no index in"):
        take(tmp_path / "nothing", source, CONFIG)
    assert published(workspace) == before and state(workspace)["version"] == "v0001"


def test_an_index_encoded_with_another_model_is_not_added_to(tmp_path, workspace):
    source = put(tmp_path / "new", {"a.md": ARRIVALS["install-lg700.md"]})
    other = FakeEmbedder()
    other.name = "other"
    with pytest.raises(UsageError, match="the index was encoded with 'fake', and embedder.name is 'other'"):
        take(workspace, source, CONFIG, embedder=other)


# --- what is encoded, cut again, and left -----------------------------------------------------------------------------


@pytest.fixture
def counted(tmp_path, tmp_path_factory, database, monkeypatch) -> tuple[Path, FakeEmbedder]:
    """A workspace with an empty cache of vectors, and the embedder that counts."""
    workspace, vectors = fresh(tmp_path_factory, tmp_path / "workspace"), tmp_path / "vectors"
    vectors.mkdir()
    real = module.VectorCache
    monkeypatch.setattr(module, "VectorCache", lambda embedder: real(embedder, vectors))
    return workspace, FakeEmbedder()


def texts_of(workspace: Path, keys: Sequence[str]) -> set[str]:
    from ragbuild.core.records import index_text

    return {index_text(c) for c in state(workspace)["children"] if c.doc_key in keys}


def test_only_what_is_new_or_changed_is_encoded(tmp_path, counted):
    """A status that changes, a term that cuts old chunks anew: both go with the vectors that there are."""
    workspace, embedder = counted
    before = state(workspace)
    result = take(workspace, put(tmp_path / "new", ARRIVALS), CONFIG, choices=CHOICES, embedder=embedder)
    entered = [f.key for f in result.fates if f.outcome == "taken"]
    assert set(embedder.encoded) == texts_of(workspace, entered) and len(embedder.encoded) == 8
    after = state(workspace)
    rows = {c.chunk_id: i for i, c in enumerate(after["children"])}
    old = np.frombuffer(before["vectors"], np.float32).reshape(-1, 64)
    new = np.frombuffer(after["vectors"], np.float32).reshape(-1, 64)
    stayed = [(i, rows[c.chunk_id]) for i, c in enumerate(before["children"]) if c.chunk_id in rows]
    assert len(stayed) == len(before["children"]) - 2 - 2, "the replaced and the corrected have left"
    assert all((old[i] == new[j]).all() for i, j in stayed)
    embedder.encoded.clear()
    assert not take(workspace, tmp_path / "new", CONFIG, embedder=embedder).published and embedder.encoded == []


def test_a_new_term_cuts_old_chunks_anew(tmp_path, workspace):
    old = chunks_of(workspace, "manuals/channel/v1/all")
    before = state(workspace)
    tokens = dict(zip([c.chunk_id for c in before["children"]], before["tokens"], strict=True))
    port = next(c for c in old if "8443" in c.content)
    assert "岚关安全通道" not in tokens[port.chunk_id]
    result = take(workspace, put(tmp_path / "new", {"t.md": ARRIVALS["tunnel.zh.md"]}), CONFIG)
    after = state(workspace)
    cut = dict(zip([c.chunk_id for c in after["children"]], after["tokens"], strict=True))
    added = after["terms"][len(before["terms"]) :]
    assert "岚关安全通道" in {form for e in added for form in e.forms} and result.new_terms
    assert after["terms"][: len(before["terms"])] == before["terms"], "the dictionary only grows"
    assert "岚关安全通道" in cut[port.chunk_id]
    others = [c.chunk_id for c in before["children"] if "岚关" not in c.content]
    assert others and all(cut[i] == tokens[i] for i in others)
    version = IndexVersion(workspace / "indexes")
    held = [version.children(np.array([r]))[0].chunk_id for r in version.lexical.rows_with("岚关安全通道")]
    assert port.chunk_id in held and len(held) == len(set(held)) >= 2
    assert [version.tokenizer(c.content) for c in [port]], "queries are cut with the same dictionary"


def test_terms_are_left_alone_where_the_configuration_says_so(tmp_path, workspace):
    source = put(tmp_path / "new", {"t.md": ARRIVALS["tunnel.zh.md"]})
    result = take(workspace, source, config_of(**{"knowledge.append_terms": False}))
    assert (
        result.published
        and result.new_terms == []
        and state(workspace)["terms"] == IndexVersion(workspace / "indexes", "v0001").entries
    )


def test_pictures_come_and_leave_with_their_document(tmp_path, workspace):
    indexes = workspace / "indexes"
    config = config_of(**{"knowledge.keep_versions": 1})
    first = paper(f"Text before.\n\n{picture(1)}\n\n{picture(2)}\n\nText after.", "pics", "v1", "Pictures")
    take(workspace, put(tmp_path / "a", {"p.md": first}), config)
    kept = state(workspace)["kept"]["manuals/pics/v1/all"]
    images = {n: h for n, h in kept.items() if n.startswith("images/")}
    assert len(images) == 2 and all((indexes / "files" / h).read_bytes().startswith(b"PNG") for h in images.values())
    assert {i for c in chunks_of(workspace, "manuals/pics/v1/all") for i in c.image_ids} == {
        Path(n).stem for n in images
    }
    second = first.replace(picture(1), "").replace("v1", "v2").replace("Text before", "Text")
    second = second.replace("title:", "supersedes: manuals/pics/v1/all\ntitle:")
    take(workspace, put(tmp_path / "b", {"p.md": second}), config, choices={"pics": "replace"})
    after = state(workspace)["kept"]
    assert "manuals/pics/v1/all" not in after and len(after["manuals/pics/v2/all"]) == 3
    shared = {h for n, h in after["manuals/pics/v2/all"].items() if n.startswith("images/")}
    assert shared < set(images.values()) and {p.name for p in (indexes / "files").iterdir()}.isdisjoint(
        set(images.values()) - shared
    )
    assert version_names(indexes) == ["v0003"], "one is kept, as the configuration says"


def test_a_correction_of_the_fields_alone(tmp_path, workspace):
    """The file is the same, its sidecar says something else now: a correction, and the chunks carry it."""
    source = put(
        tmp_path / "new", {"fan.txt": DOCUMENTS["fan.txt"], "documents.csv": "doc_source,doc_type\nfan.txt,faq\n"}
    )
    result = take(workspace, source, CONFIG)
    assert fates(result) == {"fan.txt": ("taken", "correction", "policy")}
    assert {c.doc_type for c in chunks_of(workspace, "default/fan/unversioned/all")} == {"faq"}
    assert not take(workspace, source, CONFIG).published


# --- the gate ---------------------------------------------------------------------------------------------------------


def test_a_version_that_falls_is_not_published(tmp_path, workspace, monkeypatch):
    from ragbuild.evaluate.regression import Regression

    before, files = state(workspace), published(workspace)
    fell = Regression(passed=False, said="recall@5 1.0000 -> 0.5000")
    source = put(tmp_path / "new", ARRIVALS)
    with monkeypatch.context() as patched:
        patched.setattr(module, "regression", lambda *_, **__: fell)
        result = take(workspace, source, CONFIG, choices=CHOICES, regress=True, command="sync")
    assert (result.version, result.tried, result.published) == ("v0001", "v0002", False)
    with pytest.raises(GateFailed, match=r"v0002 was made and not published; v0001 stays in use. recall@5 1.0000"):
        raise_if_fell(result)
    after = state(workspace)
    assert {k: v for k, v in after.items() if k not in ("history", "queue")} == {
        k: v for k, v in before.items() if k not in ("history", "queue")
    } | {"registered": after["registered"]}
    assert published(workspace) == files
    assert [d.key for d in after["registered"]] == [d.key for d in after["documents"]]
    registry = Registry.open(workspace)
    assert (registry.runs()[-1].outcome, registry.runs()[-1].note) == (
        "failed",
        "regression: recall@5 1.0000 -> 0.5000",
    )
    registry.close()
    assert take(workspace, source, CONFIG, choices=CHOICES, regress=True).version == "v0002"


def test_a_preview_writes_nothing(tmp_path, workspace):
    source, before = put(tmp_path / "new", ARRIVALS), published(workspace)
    result = preview(workspace, [source], CONFIG, choices=CHOICES)
    assert {f.outcome for f in result.fates} == {"taken", "waiting", "unchanged"} and not result.published
    assert published(workspace) == before and {p.name for p in workspace.iterdir()} == {"indexes", "config.yaml"}
    take(workspace, source, CONFIG, choices=CHOICES)
    again = preview(workspace, [source], CONFIG)
    assert {f.outcome for f in again.fates} == {"waiting", "unchanged"}


def test_registry_and_chunks_that_disagree_are_found(tmp_path, workspace):
    take(workspace, put(tmp_path / "new", ARRIVALS), CONFIG, choices=CHOICES)
    assert snapshot.check(workspace, deep=True) == []
    file = next((workspace / "indexes" / "files").iterdir())
    shutil.copy(file, tmp_path / "copy")
    file.write_bytes(file.read_bytes() + b"x")
    (row,) = snapshot.check(workspace, deep=True)
    assert row["field"] == "file" and str(file) in row["chunks"]
    shutil.copy(tmp_path / "copy", file)
    assert snapshot.check(workspace, deep=True) == []


def test_a_build_after_documents_were_taken_in_is_adopted(tmp_path, tmp_path_factory, database):
    """The registry then holds the corpus that was built, and says so in its history."""
    workspace = fresh(tmp_path_factory, tmp_path / "workspace")
    take(workspace, put(tmp_path / "new", ARRIVALS), CONFIG, choices=CHOICES)
    other = fresh(tmp_path_factory, tmp_path / "other")
    version = IndexVersion(other / "indexes")
    from ragbuild.index.staging import write_version

    chunks = [c for p in version.all_parents() for c in (p, *version.children(version.rows_of(p.child_ids)))]
    name = write_version(
        workspace / "indexes", chunks, version.documents, version.entries, config=CONFIG,
        encode=FakeEmbedder().encode_documents, embedder={"name": "fake", "dim": 64}, prompt=version.prompt,
        kept={k: {n: version.indexes / "files" / h for n, h in names.items()} for k, names in version.kept.items()},
    )  # fmt: skip
    assert name == "v0003"
    result = take(workspace, tmp_path / "new" / "install-lg700.md", CONFIG)
    assert result.version == "v0004" and registered(workspace).keys() >= {
        "manuals/install/v1/LG-700", "manuals/portal/v4/all"
    }  # fmt: skip
    registry = Registry.open(workspace)
    assert {r.command for r in registry.runs()} == {"build", "ingest"}
    assert "manuals/portal/v5/all" not in {d.key for d in registry.documents(3)}
    registry.close()


def test_two_folders_with_files_of_one_name(tmp_path, workspace):
    """Each document keeps its own text: a rebuild reads it."""
    one = put(tmp_path / "one", {"guide.md": paper("## A\n\nThe first text.", "one", "v1", "One")})
    two = put(tmp_path / "two", {"guide.md": paper("## A\n\nThe second text.", "two", "v1", "Two")})
    take(workspace, [one, two], config_of())
    version = IndexVersion(workspace / "indexes")
    for doc_id, word in (("one", "first"), ("two", "second")):
        assert word in (version.markdown(f"manuals/{doc_id}/v1/all") or ""), doc_id


def test_documents_are_cut_as_the_index_was_whatever_the_configuration_says(tmp_path, workspace):
    take(workspace, put(tmp_path / "new", {"portal-5.zh.md": ARRIVALS["portal-5.zh.md"]}),
         config_of(**{"lexical.tokenizer": "char"}), choices={"portal": "replace"})  # fmt: skip
    version = IndexVersion(workspace / "indexes")
    rows = version.rows_of_document(next(d for d in version.documents if d.key == "manuals/portal/v5/all"))
    chunks, tokens = version.children_and_tokens(rows)
    assert tokens == [version.tokenizer(index_text(c)) for c in chunks]
