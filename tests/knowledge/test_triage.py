"""Triage: the order of versions, what the machine suggests and why, what a decision does, the expert's table."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragbuild.core.errors import InputRefused
from ragbuild.core.records import Document
from ragbuild.knowledge.triage import (
    RISKY,
    SAFE,
    Ruling,
    compare_versions,
    in_order,
    overlap,
    read_decisions,
    resolve,
    ruling_for,
    suggest,
    unattended,
    unmatched,
    write_decisions,
)
from tests.conftest import make_document

SIGNALS = {
    "doc_id", "content_hash", "version_order", "product_model", "effective_date", "supersedes", "status",
}  # fmt: skip


def guide(version: str = "v4.2", doc_id: str = "portal-guide", **fields: object) -> Document:
    """A version of a guide; its text is its own unless told."""
    text = f"{doc_id} {version} {fields.get('product_model')}"
    return make_document(doc_id, **({"doc_version": version, "content_hash": text, "kb": "manuals"} | fields))


# ---------------------------------------------------------------------------------------------------- versions
OLDER_AND_NEWER = [
    ("v2.9", "v2.10"), ("4.2", "4.2.1"), ("v4.2", "V5.0"), ("4.2 beta", "4.2 rc"), ("4.2-rc.1", "4.2-rc.2"),
    ("4.2 beta 2", "v4.2"), ("v4.2", "4.3 beta"), ("4.2测试版", "4.2正式版"), ("2026-03", "2026-11"),
    ("2026年3月", "2026年11月"), ("2025-12-31", "2026年1月1日"), ("20251231", "2026-01-01"), ("202512", "2026年1月"),
    ("2023版", "2024版"), ("2024", "2025版"), ("2024版", "2025-03"), ("November 2025", "March 2026"),
    ("15 March 2026", "2026-03-16"), ("11/2025", "03/2026"), ("Rev. B", "Rev. C"), ("Rev B", "revision c"),
    ("B", "Rev. C"), ("B版", "C版"), ("修订版B", "Rev. C"), ("Rev. Z", "Rev. AA"), ("Rev. 9", "Rev. 10"),
    ("第二版", "第3版"), ("2nd edition", "3rd Edition"), ("SB-2025-11", "SB-2026-03"), ("KB9", "KB10"),
    ("V100R001C00", "V100R002C10"), ("ｖ４．２", "v4.3"), ("2024.1", "2024.1.2"), ("4.2-lite", "4.3-lite"),
]  # fmt: skip
SAME = [
    ("v4.2", "4.2"), ("4.2", "4.2.0"), ("版本4.2", "Version 4.2"), ("2026年3月", "2026-03"), ("2024版", "2024"),
    ("rev c", "Rev. C"), ("特别版", "特别版"), ("unversioned", "Unversioned"), ("2026-3-1", "1 March 2026"),
]  # fmt: skip
NOT_ORDERED = [
    ("特别版", "SB-2026-03"), ("v4.2", "Rev. C"), ("v4.2", "2026-03"), ("2026", "2026-03"), ("unversioned", "v1"),
    ("4.2", "4.2-lite"), ("4.2-lite", "4.3-pro"), ("Rev. 3", "Rev. C"), ("04.03.2026", "05.03.2026"), ("", "v1"),
    ("4.2b1", "4.2"), ("第3版", "v4.2"), ("9" * 5000, "v1"), ("final", "draft"),
]  # fmt: skip


@pytest.mark.parametrize(("older", "newer"), OLDER_AND_NEWER)
def test_the_older_comes_before_the_newer(older, newer):
    assert (compare_versions(older, newer), compare_versions(newer, older)) == (-1, 1)


@pytest.mark.parametrize(("a", "b"), SAME)
def test_two_spellings_of_one_version(a, b):
    assert compare_versions(a, b) == compare_versions(b, a) == 0


@pytest.mark.parametrize(("a", "b"), NOT_ORDERED)
def test_what_cannot_be_ordered_is_not(a, b):
    assert compare_versions(a, b) is compare_versions(b, a) is None


_small = st.integers(0, 12)
_year, _month, _day = st.integers(1990, 2030), st.integers(1, 12), st.integers(1, 28)
KINDS = [
    st.tuples(st.sampled_from(["", "v", "版本"]), st.lists(_small, min_size=1, max_size=4), st.sampled_from(
        ["", " beta", "-rc1", "-rc2", " alpha", "测试版"])).map(lambda t: t[0] + ".".join(map(str, t[1])) + t[2]),
    st.one_of(
        st.builds("{:04d}-{:02d}".format, _year, _month), st.builds("{}年{}月".format, _year, _month),
        st.builds("{:04d}{:02d}{:02d}".format, _year, _month, _day), st.builds("{}版".format, _year),
        st.builds("{}/{}/{}".format, _year, _month, _day),
    ),
    st.builds("{}{}".format, st.sampled_from(["Rev. ", "修订版"]), st.text("ABCxyz", min_size=1, max_size=2)),
    st.builds("SB-{}-{:02d}".format, _year, _month),
]  # fmt: skip
anything = st.one_of(*KINDS, st.text(max_size=12))
three_of_a_kind = st.sampled_from(KINDS).flatmap(lambda kind: st.tuples(kind, kind, kind))


@given(anything, anything)
def test_comparing_is_antisymmetric(a, b):
    forth, back = compare_versions(a, b), compare_versions(b, a)
    assert forth == (None if back is None else -back)
    assert compare_versions(a, a) == 0


@given(three_of_a_kind)
def test_comparing_is_transitive(versions):
    a, b, c = versions
    ab, bc = compare_versions(a, b), compare_versions(b, c)
    if ab is not None and bc is not None and ab * bc >= 0:
        assert compare_versions(a, c) == (ab or bc)


# ---------------------------------------------------------------------------------------------------- suggestions
OLD = guide("v3.4", status="legacy", effective_date="2024-05-14")
NOW = guide("v4.2", supersedes=OLD.key, effective_date="2026-02-10")
NEXT = guide("v5.0", supersedes=NOW.key, effective_date="2026-09-01")


def test_same_key():
    assert suggest(NOW, [NOW]).decision == "unchanged"
    legacy = NOW.model_copy(update={"status": "legacy", "supersedes": None, "doc_source": "other/place.md"})
    assert suggest(NOW, [legacy]).decision == "unchanged", "what triage once made of it is not asked again"
    corrected = suggest(NOW.model_copy(update={"content_hash": "other"}), [NOW, OLD])
    assert (corrected.decision, corrected.others) == ("correction", (NOW.key,))
    renamed = suggest(NOW.model_copy(update={"title": "门户指南", "effective_date": "2026-02-11"}), [NOW, OLD])
    assert renamed.decision == "correction"
    assert "(title, effective_date)" in renamed.reason
    demoted = suggest(NOW.model_copy(update={"status": "legacy"}), [NOW, OLD])
    assert demoted.decision == "expert"
    assert "its own status now is legacy" in demoted.reason


def test_the_same_text_twice():
    copy = guide("v5.0", content_hash=NOW.content_hash)
    suggestion = suggest(copy, [OLD, NOW])
    assert (suggestion.decision, suggestion.others) == ("expert", (NOW.key,))
    assert "the same text under two versions" in suggestion.reason
    moved = suggest(guide("v4.2", "handbook", content_hash=NOW.content_hash), [OLD, NOW])
    assert "the same text under two documents" in moved.reason


def test_parallel():
    assert suggest(guide("v1", "new"), [OLD, NOW]).decision == "parallel"
    rack = guide("v4.2", "rack", product_model=["LG-500", "LG-900"])
    other_model = suggest(guide("v5.0", "rack", product_model=["LG-700"]), [rack])
    assert (other_model.decision, other_model.others) == ("parallel", ())
    assert suggest(guide("v5.0", kb="lab"), [OLD, NOW]).decision == "parallel", "another knowledge base"
    first_current = suggest(NOW, [OLD])
    assert (first_current.decision, first_current.newer) == ("parallel", True), "nothing current is concerned"
    assert suggest(OLD, []).decision == suggest(guide("v3.0", status="superseded"), [OLD]).decision == "parallel"


def test_a_newer_version():
    replace = suggest(NEXT.model_copy(update={"effective_date": None}), [NOW])
    assert (replace.decision, replace.others, replace.newer) == ("replace", (NOW.key,), True)
    dated = suggest(NEXT.model_copy(update={"supersedes": None}), [NOW])
    assert dated.decision == "replace"
    assert "effective_date confirms" in dated.reason
    legacy = suggest(NEXT, [OLD, NOW])
    assert legacy.decision == "legacy"
    assert "v3.4 is legacy" in legacy.reason
    dates = {"effective_date": "2026-01-01"}
    two = [guide("v4.2", product_model=["LG-500"], **dates), guide("v4.1", product_model=["LG-900"], **dates)]
    both = suggest(guide("v5.0", effective_date="2026-09-01"), two)
    assert (both.decision, both.others) == ("replace", tuple(sorted(d.key for d in two)))


@pytest.mark.parametrize(
    ("arriving", "known", "reason"),
    [
        (guide("特别版"), [guide("SB-2026-03")], "cannot be ordered against SB-2026-03"),
        (guide("4.2"), [guide("v4.2")], "the same version under another key"),
        (guide("v4.2", product_model=["LG-200"]), [guide("v4.2")], "the same version under another key"),
        (guide("v5.0", supersedes=NOW.key, effective_date="2025-01-01"), [NOW], "its effective_date is earlier"),
        (guide("v4.0", effective_date="2026-05-01"), [NOW], "its effective_date is later"),
        (guide("v4.0", supersedes=NOW.key), [NOW], "which is newer by its version"),
        (guide("v5.0", supersedes="manuals/other/v1/all"), [NOW], "which is not registered"),
        (guide("v5.0", supersedes=guide("v1", "other").key), [NOW, guide("v1", "other")], "another document"),
        (guide("v5.0", "new", supersedes="manuals/new/v4/all"), [NOW], "which is not registered"),
        (guide("v5.0", supersedes="manuals/portal-guide/v5.0/all"), [NOW], "the document itself"),
        (guide("v5.0", supersedes=guide("A").key), [guide("A"), NOW], "cannot be ordered against A"),
        (guide("v5.0", supersedes=OLD.key, effective_date="2026-09-01"), [OLD, NOW], "history already"),
        (guide("v5.0", effective_date="2026-02-10"), [NOW], "no effective_date confirms it"),
        (guide("v4.0"), [NOW], "arrives late"),
        (guide("v4.0"), [OLD, guide("v4.1", status="legacy")], "no version is current"),
        (guide("v4.1"), [guide("v4.0"), guide("v4.2")], "older than some and newer than others"),
        (guide("v5.0", status="legacy", supersedes=NOW.key), [NOW], "but its own status is legacy"),
        (guide("v5.0", product_model=["LG-500"], supersedes=NOW.key), [NOW], "not for every model"),
        (
            guide("v5.0", product_model=["LG-5"], supersedes=guide("v4", product_model=["LG-9"]).key),
            [guide("v4", product_model=["LG-9"])],
            "serves none of its models",
        ),
    ],
)
def test_what_needs_an_expert(arriving, known, reason):
    suggestion = suggest(arriving, known)
    assert suggestion.decision == "expert"
    assert reason in suggestion.reason
    assert not unattended(suggestion, ("expert", *SAFE, *RISKY))


def test_a_correction_with_a_bad_link_needs_an_expert():
    known = [OLD, NOW, NEXT]
    bad = NOW.model_copy(update={"content_hash": "other", "supersedes": NEXT.key})
    assert suggest(bad, known).decision == "expert"
    effects = resolve(suggest(bad, known), "correction", known)
    assert effects.document.supersedes == OLD.key, "no circle: the registered link stays"


def test_an_unattended_run_takes_what_takes_nothing_away():
    late = suggest(guide("v4.0", status="legacy"), [NOW])
    assert (late.decision, late.newer, late.policy) == ("legacy", False, "late_legacy")
    gone = suggest(guide("v4.0", status="superseded"), [NOW])
    assert (gone.decision, gone.policy) == ("legacy", "legacy")
    assert unattended(suggest(NOW, [NOW])) and unattended(suggest(guide("v1", "new"), [NOW])) and unattended(late)
    assert not unattended(gone) and not unattended(suggest(NEXT, [NOW])) and not unattended(suggest(NEXT, [OLD, NOW]))
    assert unattended(suggest(NEXT, [NOW]), (*SAFE, "replace"))
    assert not unattended(late, ("parallel",))


def test_arrivals_come_after_what_they_supersede():
    assert in_order([NEXT, NOW, OLD]) == [OLD, NOW, NEXT]
    circle = [guide("v1", supersedes=guide("v2").key), guide("v2", supersedes=guide("v1").key)]
    assert in_order(circle[::-1]) == circle


# ---------------------------------------------------------------------------------------------------- effects
def test_replace_and_legacy():
    suggestion = suggest(NEXT, [OLD, NOW])
    replace = resolve(suggestion, "replace", [OLD, NOW])
    assert replace.document == NEXT
    assert replace.changed == (NOW.model_copy(update={"status": "superseded"}),), "legacy ones are never taken out"
    assert replace.leave == (NOW.key,)
    legacy = resolve(suggestion, "legacy", [OLD, NOW])
    assert (legacy.changed, legacy.leave) == ((NOW.model_copy(update={"status": "legacy"}),), ())
    unlinked = resolve(suggest(guide("v5.0"), [OLD, NOW]), "legacy", [OLD, NOW])
    assert unlinked.document.supersedes == NOW.key, "the chain is kept"
    skipping = NEXT.model_copy(update={"supersedes": OLD.key})
    assert resolve(suggest(skipping, [OLD, NOW]), "replace", [OLD, NOW]).document.supersedes == NOW.key
    models = [guide("v4.2", product_model=["LG-500"]), guide("v4.2", product_model=["LG-900"])]
    newer = guide("v5.0", product_model=["lg-500"], effective_date="2026-09-01")
    assert resolve(suggest(newer, models), "replace", models).leave == (models[0].key,), "the other model keeps its own"


def test_an_expert_says_that_an_unordered_one_replaces():
    bulletin = guide("SB-2026-03", "sb-fan", product_model=["LG-500"])
    special = guide("特别版", "sb-fan", product_model=["LG-500"])
    suggestion = suggest(special, [bulletin])
    assert resolve(suggestion, "replace", [bulletin]).leave == (bulletin.key,)
    assert resolve(suggestion, "parallel", [bulletin]).document == special
    kept = resolve(suggestion, "legacy", [bulletin], newer=False)
    assert (kept.document.status, kept.changed) == ("legacy", ())


def test_an_older_one_that_arrives_late():
    late = guide("v4.0")
    suggestion = suggest(late, [NOW])
    assert resolve(suggestion, "legacy", [NOW]).document == late.model_copy(update={"status": "legacy"})
    out = resolve(suggestion, "replace", [NOW])
    assert (out.document, out.leave) == (None, ())
    assert out.changed == (late.model_copy(update={"status": "superseded"}),), "recorded, so that it is not asked again"
    history = resolve(suggest(guide("v1", "new", status="superseded"), []), "parallel", [])
    assert history.document is None and history.changed[0].status == "superseded"


def test_correction_keeps_what_triage_made_of_it():
    registered = NOW.model_copy(update={"status": "legacy"})
    arriving = NOW.model_copy(update={"content_hash": "other", "supersedes": None})
    effects = resolve(suggest(arriving, [OLD, registered]), "correction", [OLD, registered])
    assert effects.document == registered.model_copy(update={"content_hash": "other"})
    assert (effects.changed, effects.leave) == ((), (NOW.key,))
    gone = NOW.model_copy(update={"status": "superseded"})
    effects = resolve(suggest(arriving, [OLD, gone]), "correction", [OLD, gone])
    assert (effects.document, effects.changed[0].content_hash) == (None, "other")
    demoted = NOW.model_copy(update={"status": "legacy"})
    effects = resolve(suggest(demoted, [OLD, NOW]), "legacy", [OLD, NOW])
    assert (effects.document, effects.leave) == (demoted, (NOW.key,))
    assert resolve(suggest(demoted, [OLD, NOW]), "correction", [OLD, NOW]).document == NOW


def test_a_link_to_nothing_is_dropped():
    arriving = guide("v1", "new", supersedes="manuals/new/v0/all")
    assert resolve(suggest(arriving, []), "parallel", []).document.supersedes is None


@pytest.mark.parametrize(
    ("arriving", "known", "chosen", "fitting"),
    [
        (NOW, [NOW], "replace", "choose unchanged"),
        (guide("v1", "new"), [NOW], "replace", "choose unchanged or parallel"),
        (guide("v5.0"), [OLD], "legacy", "choose unchanged or parallel"),
        (NOW.model_copy(update={"content_hash": "other"}), [OLD, NOW], "parallel", "choose unchanged or correction"),
        (NEXT, [NOW], "correction", "choose unchanged or parallel or replace or legacy"),
        (guide("特别版"), [NOW], "expert", "choose unchanged or parallel or replace or legacy"),
    ],
)
def test_a_choice_without_sense_is_refused(arriving, known, chosen, fitting):
    with pytest.raises(InputRefused, match=fitting):
        resolve(suggest(arriving, known), chosen, known)


# ---------------------------------------------------------------------------------------------------- properties
_models = st.sampled_from([("all",), ("LG-200",), ("LG-500",), ("LG-500", "LG-900"), ("LG-900",)])
_keys = [guide(v, product_model=m).key for v in ("v3.4", "v5.0") for m in (("all",), ("LG-500",))]
documents = st.builds(
    lambda doc_id, version, **fields: guide(version, doc_id, **fields),
    st.sampled_from(["portal-guide", "portal-guide", "other"]),
    st.sampled_from(["v3.4", "v4.2", "v5.0", "5.0", "特别版", "2026-03"]),
    product_model=_models,
    status=st.sampled_from(["active", "active", "legacy", "superseded"]),
    effective_date=st.sampled_from([None, "2024-05-14", "2026-02-10", "2026-09-01"]),
    supersedes=st.sampled_from([None, None, "manuals/gone/v1/all", *_keys]),
    content_hash=st.sampled_from("abcdefghijklmnop"),
)


@st.composite
def registries(draw: st.DrawFn) -> list[Document]:
    """Registered documents; no two current ones of a document serve a common model, as triage leaves them."""
    kept: list[Document] = []
    for document in draw(st.lists(documents, max_size=6, unique_by=lambda d: d.key)):
        if document.status != "active" or not any(clash(document, other) for other in kept):
            kept.append(document)
    return kept


def clash(a: Document, b: Document) -> bool:
    return a.status == b.status == "active" and (a.kb, a.doc_id) == (b.kb, b.doc_id) and overlap(a, b)


@given(documents, registries())
def test_every_suggestion_says_why(arriving, known):
    suggestion = suggest(arriving, known)
    assert suggestion.reason and set(suggestion.signals) == SIGNALS and all(suggestion.signals.values())
    assert set(suggestion.others) <= {d.key for d in known}
    assert suggest(arriving, known[::-1]) == suggestion, "the order of the registry says nothing"
    if suggestion.decision in ("replace", "legacy"):
        about = [d for d in known if d.key in suggestion.others]
        assert about and all(overlap(arriving, d) and d.doc_id == arriving.doc_id for d in about)


@given(documents, registries(), st.sampled_from(["suggested", "replace", "legacy", "parallel", "correction"]))
def test_no_decision_leaves_two_current_versions(arriving, known, chosen):
    suggestion = suggest(arriving, known)
    chosen = suggestion.decision if chosen == "suggested" else chosen
    try:
        effects = resolve(suggestion, chosen, known)
    except InputRefused:
        assert chosen != suggestion.decision or chosen == "expert", "what is suggested can be done"
        return
    after = {d.key: d for d in [*known, *effects.changed, *([effects.document] if effects.document else [])]}
    if chosen in ("replace", "legacy"):
        assert not any(clash(a, b) for a, b in combinations(after.values(), 2))
    assert all(d.status != "legacy" or after[d.key].status == "legacy" for d in known), "legacy stays legacy"
    entered = after.get(arriving.key)
    if entered is not None and chosen != "unchanged":
        kept = next((d for d in known if d.key == arriving.key), None)
        assert entered.supersedes in after or entered.supersedes == (kept.supersedes if kept else None)
        again = suggest(arriving, list(after.values()))
        assert again.decision in ("unchanged", "expert") or kept, "a second run finds nothing to do"
        copied = any(d.content_hash == arriving.content_hash for d in known)
        demoted = arriving.status != "active" and entered.status == "active"
        assert again.decision == "unchanged" or demoted or copied


# ---------------------------------------------------------------------------------------------------- decisions.csv
def test_the_experts_table_goes_round(tmp_path):
    path = tmp_path / "decisions.csv"
    waiting = [suggest(NEXT, [OLD, NOW]), suggest(guide("特别版", "sb-fan", product_model=["LG-500", "LG-9"]), [])]
    write_decisions(path, waiting)
    assert path.read_bytes().startswith(b"\xef\xbb\xbf")
    assert read_decisions(path) == [], "the machine's suggestion is no decision"
    ruling = Ruling(doc_id="portal-guide", doc_version="5.0", decision="replace", decided_by="李工", reason="旧版作废")
    write_decisions(path, waiting, [ruling])
    assert read_decisions(path) == [ruling]
    assert ruling_for(waiting[0], [ruling]) == ruling, "v5.0 is 5.0, any model"
    assert ruling_for(waiting[1], [ruling]) is None
    write_decisions(path, waiting, [ruling.model_copy(update={"decision": "legacy"})])
    assert [r.decision for r in read_decisions(path)] == ["legacy"], "the last word"
    assert "LG-500;LG-9" in path.read_text(encoding="utf-8")
    write_decisions(path, [])
    assert [r.doc_id for r in read_decisions(path)] == ["portal-guide"], "a ruling is never lost"


def test_gb18030_and_the_more_special_ruling(tmp_path):
    path = tmp_path / "decisions.csv"
    text = "doc_id,doc_version,product_model,decision,decided_by,reason\n"
    text += "通告,特别版,,parallel,张工,两者都有效\n通告,特别版,LG-9；LG-500,LEGACY,,\n没有,v1,,replace,,\n,,,,,\n"
    path.write_bytes(text.encode("gb18030"))
    rulings = read_decisions(path)
    special = suggest(guide("特别版", "通告", product_model=["LG-500", "LG-9"]), [])
    assert ruling_for(special, rulings).decision == "legacy"
    assert ruling_for(suggest(guide("特别版", "通告"), []), rulings).decided_by == "张工"
    assert [r.doc_id for r in unmatched(rulings, [special.document, guide("特别版", "通告")])] == ["没有"]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("portal-guide,v5.0,,delete,,", "row 3: decision: .*'delete'"),
        ("portal-guide,v5.0,,expert,,", "row 3: decision: .*'expert'"),
        (",v5.0,,replace,,", "row 3: doc_id"),
        ("admin-guide,v5.0,,legacy,,", "row 3: 'legacy' for admin-guide v5.0, but row 2 says 'replace'"),
    ],
)
def test_a_bad_row_is_named(tmp_path, row, said):
    path = tmp_path / "decisions.csv"
    path.write_text(
        f"doc_id,doc_version,product_model,decision,decided_by,reason\nadmin-guide,v5.0,,replace,,\n{row}\n",
        encoding="utf-8",
    )
    with pytest.raises(InputRefused, match=said):
        read_decisions(path)
