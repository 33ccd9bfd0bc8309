"""Sedimentation: records without a word of the project, which a person's edits survive, and a template from them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from ragbuild.core.config import Config, load_config
from ragbuild.core.errors import UsageError
from ragbuild.core.store import write_json, write_text
from ragbuild.course.plan import plan_rows
from ragbuild.evaluate import ledger
from ragbuild.knowledge.registry import Change, Registry, Run
from ragbuild.knowledge.sediment import OPEN, carried_over, check_template, draft, edited, tellable
from ragbuild.offline.prompts import ELEMENTS, add_version, load_prompt
from tests.conftest import make_document

RECORDS = {
    "construction-workflow.md", "decision-log.md", "evaluation-template.md", "lessons-learned.md", "prompt-history.md",
    "prompt-skeleton.md", "template.yaml",
}  # fmt: skip
SETTINGS = {"retrieve.top_n": 30, "rerank.top_m": 12, "lexical.tokenizer": "char", "chunk.child_tokens": 128}
OWN = {"plan.domain": "Zorbix gateways", "corpus.dir": "zorbix/docs", "embedder.name": "/models/zorbix",
       "evaluate.dimensions": ["credibility", "zorbix_tone=Does it sound like Zorbix?"]}  # fmt: skip


def entry(config: Config, word: str, **scores: float) -> ledger.Entry:
    values = {f"expert/{name}": {f"{word}-1": value, f"{word}-2": value} for name, value in scores.items()}
    parts = {"fusion": config.retrieve.model_dump(mode="json"), "embedder": {"name": f"/models/{word}"},
             "prompt": {"version": "1.0", "text": word}}  # fmt: skip
    return ledger.new_entry("qdoca", config, values, corpus_hash="c", eval_sets={"expert": "h"}, components=parts,
                            workspace=word, label=word)  # fmt: skip


def workspace(root: Path, word: str = "zorbix", **overrides: object) -> Path:
    """A small cycle; whatever its project named holds `word`."""
    config = load_config(overrides=SETTINGS | OWN | overrides)
    write_text(root / "config.yaml", yaml.safe_dump(config.model_dump(mode="json")))
    first = entry(config, word, overall=0.5, zorbix_tone=0.25)
    second = entry(config.with_overrides({"retrieve.top_n": 40}), word, overall=0.5, zorbix_tone=0.25)
    write_json(root / "evaluation.json", {"entries": [first]})
    for run in (first, second):
        ledger.append(root / "ledger.jsonl", run)
    write_text(root / "documents.jsonl", f'{{"doc_id": "{word}"}}\n{{"doc_id": "{word}-2"}}\n')
    write_json(root / "keyword_dict.json", [{"standard_term": word, "kind": "product", "source": "expert"}])
    write_json(root / "eval_set.json", [{"query": f"What is {word}?", "query_type": "definitional"}])
    gate = {"name": "lexical_recall_at_50", "value": 0.625, "n": 8, "threshold": 0.8, "passed": False, "said": word}
    found = {"what": "forms that two entries claim", "found": 1, "of": 2, "examples": word}
    write_json(root / "offline_evaluation.json", {"gates": [gate], "dictionary": [found]})
    case = {"id": word, "query": word, "evidence": word, "got": word, "expected": word, "document": word}
    count = {"category": "prompt", "cases": 3, "example": word, "id": word}
    forks = [{"question": "credibility", "value": 0.9, "threshold": 0.8, "n": 4, "low": False},
             {"question": "zorbix tone", "value": 0.25, "threshold": 0.8, "n": 4, "low": True}]  # fmt: skip
    write_json(root / "bad_cases.json", {
        "bad_cases": [case], "forks": forks, "recommended": f"prompt, loop 2: of 3 bad cases low in {word}",
        "counts": [count | {"sub_category": "refusal"}, count | {"sub_category": "zorbix_tone"}],
        "rounds": [{"prompt": "1.0", "score": 0.5, "kept": "yes", "why": word}],
    })  # fmt: skip
    template = load_prompt("initial_prompt")
    add_version(root / "prompts", template, f"for {word}", f"{word} wanted it", "2026-11-30")
    said = template.elements["Goal"] + f"\n- Name {word}."
    text = template.text.replace(template.elements["Goal"], said).replace('version: "1.0"', 'version: "1.1"')
    add_version(root / "prompts", template.parse(text, "initial_prompt"), word, word, "2026-12-01")
    return root


def drafted(root: Path, target: Path, with_ledger: bool = True) -> dict[str, str]:
    paths = draft(root, root / "ledger.jsonl" if with_ledger else None, target)
    return {p.name: p.read_text(encoding="utf-8") for p in paths}


def test_the_records_hold_the_figures_and_places_for_a_person(tmp_path: Path) -> None:
    records = drafted(workspace(tmp_path / "run"), tmp_path / "out")
    assert set(records) == RECORDS
    assert "| documents | 2 |" in records["construction-workflow.md"]
    assert "| terms: product | 1 |" in records["construction-workflow.md"]
    log = records["decision-log.md"]
    assert "| lexical_recall_at_50 | 0.8 | 0.625 | 8 | FAILED |" in log
    assert "| retrieve.top_n | 50 | 30 |" in log and "| lexical.tokenizer | jieba | char |" in log
    assert "| ledger | fusion (top_n: 30 → 40) | expert/overall | 0 | no difference at n = 2 |  |" in log
    assert "| prompt | refusal | 3 | Answer Specification and an example: answer when" in records["lessons-learned.md"]
    assert "| own dimension | 0.25 | 0.8 | 4 | change: prompt, loop 2 |" in records["lessons-learned.md"]
    assert "| 1.1 | 2026-12-01 |" in records["prompt-history.md"] and "| Goal |" in records["prompt-history.md"]
    assert "| expert/overall | yes | 2 | 0 | 0.5 |  |" in records["evaluation-template.md"]
    for name in RECORDS - {"template.yaml"}:
        assert records[name].count(OPEN) >= 3 and re.search("[\u4e00-\u9fff]", records[name]), name
    assert [n for n in ELEMENTS if f"## {n}\n" in records["prompt-skeleton.md"]] == list(ELEMENTS)


def test_other_words_of_a_project_leave_the_records_as_they_are(tmp_path: Path) -> None:
    """Whatever the project is about, the same figures give the same records, byte for byte."""
    one = drafted(workspace(tmp_path / "one"), tmp_path / "a")
    other = {"plan.domain": "口腔诊所", "corpus.dir": "诊所", "embedder.name": "../牙科",
             "evaluate.dimensions": ["credibility", "bedside=亲切吗？"]}  # fmt: skip
    two = drafted(workspace(tmp_path / "two", "种植牙", **other), tmp_path / "b")
    lengths = r"\d+(?= characters)|(?<=\| )\d{3,4}(?= \|)"  # the words themselves are not of one length
    assert {n: re.sub(lengths + "|[0-9a-f]{64}", "", t) for n, t in one.items()} == {
        n: re.sub(lengths + "|[0-9a-f]{64}", "", t) for n, t in two.items()
    }
    assert not re.search("zorbix|gateways", "".join(one.values()), re.IGNORECASE)


def test_nothing_of_the_sample_corpus_gets_into_its_records(built, tmp_path: Path) -> None:
    text = "\n".join(drafted(built.run, tmp_path / "out", with_ledger=False).values()).lower()
    form = "\n".join(drafted(tmp_path, tmp_path / "empty", with_ledger=False).values())  # of no project at all
    form = (form + json.dumps(plan_rows(load_config()))).lower()  # the course's own steps are told by their names

    def read(name: str) -> list[dict]:
        return json.loads((built.run / name).read_text(encoding="utf-8"))

    documents = [json.loads(line) for line in (built.run / "documents.jsonl").read_text(encoding="utf-8").splitlines()]
    words = {d[key] for d in documents for key in ("doc_id", "title", "doc_source")}
    words |= {model for d in documents for model in d["product_model"]} | {p["query"] for p in read("eval_set.json")}
    words |= {case["query"] for case in read("bad_cases.json")["bad_cases"]}
    words |= {f for e in read("keyword_dict.json") for f in (e["standard_term"], e["abbreviation"], e["full_form"],
                                                             *e["colloquial"]) if f}  # fmt: skip
    found = {w for w in words if re.search(rf"(?<![a-z0-9]){re.escape(w.lower())}(?![a-z0-9])", text)}
    own = {w for w in found if w.lower() not in form}
    assert len(words) > 1000 and not own


def test_decisions_are_counted_and_nobody_is_named(tmp_path: Path, database: str | None) -> None:
    root = workspace(tmp_path / "run")
    old, new = (make_document("zorbix", doc_version=v, title="Zorbix") for v in ("v1", "v2"))
    out = old.model_copy(update={"status": "superseded"})
    registry = Registry.open(root)
    registry.begin(Run(id="r1", command="ingest", why="zorbix 2", who="me", host="here", pid=7, base=0, target=1,
                       started="2026-12-01T08:00:00+00:00"))  # fmt: skip
    registry.adopt([old], 1, "r1")
    for document, version, who in ((out, 2, "zorbix"), (new, 3, "policy")):
        change = Change(document=document, decision="replace", reason="Zorbix 2 is out", decided_by=who)
        registry.apply([change], version, "r1")
    registry.close()
    records = drafted(root, tmp_path / "out")
    assert "| replace | expert | active | superseded | 1 |" in records["decision-log.md"], "a person, whoever it was"
    assert "| replace | policy |  | active | 1 |" in records["decision-log.md"]
    assert "| build |" not in records["decision-log.md"] and "zorbix" not in "".join(records.values()).lower()


def test_what_a_person_edited_is_kept(tmp_path: Path) -> None:
    root, target, said = workspace(tmp_path / "run"), tmp_path / "out", []
    drafted(root, target)
    log = target / "decision-log.md"
    assert not edited(log)
    mine = log.read_text(encoding="utf-8").replace(f"{OPEN} why each was changed", "Because of the typing errors.")
    log.write_text(mine, encoding="utf-8")
    assert edited(log)
    again = draft(root, root / "ledger.jsonl", target, said.append)
    assert log not in again and len(again) == len(RECORDS) - 1, "the same draft once more says nothing new"
    assert said == ["decision-log.md was edited by a person and is kept; there is nothing new to say"]
    gate = {"name": "lexical_recall_at_50", "value": 0.875, "n": 8, "threshold": 0.8, "passed": True}
    write_json(root / "offline_evaluation.json", {"gates": [gate]})
    for _ in range(2):
        said.clear()
        again = draft(root, root / "ledger.jsonl", target, said.append)
        assert said == ["decision-log.md was edited by a person and is kept; the new draft is decision-log.new.md"]
    assert log.read_text(encoding="utf-8") == mine and target / "decision-log.new.md" in again
    assert "0.875" in (target / "decision-log.new.md").read_text(encoding="utf-8")
    (target / "decision-log.new.md").write_text("mine too", encoding="utf-8")
    assert target / "decision-log.new2.md" in draft(root, root / "ledger.jsonl", target)


def test_an_unfinished_cycle_is_drafted_as_well(tmp_path: Path) -> None:
    records = drafted(tmp_path, tmp_path / "out", with_ledger=False)
    assert set(records) == RECORDS and "Nothing was recorded. · 无记录。" in records["lessons-learned.md"]


def test_settings_travel_and_what_the_project_named_stays(tmp_path: Path) -> None:
    kept, left = carried_over(load_config("standard", overrides=SETTINGS | OWN))
    assert kept == SETTINGS and left == ["embedder.name", "evaluate.dimensions"], "plan and corpus are not spoken of"
    assert carried_over(load_config("qwen")) == ({}, []), "a profile's own models are no setting of the project"
    assert all(map(tellable, (1, 0.5, True, None, "char", ["lexical", "dense"], "BAAI/bge-m3")))
    assert not any(map(tellable, ("LG-500", ["lexical", "LG-500"], "ours/bge-lg500", {"a": 1})))
    records = drafted(workspace(tmp_path / "run"), tmp_path / "out")
    head = [line for line in records["template.yaml"].splitlines() if line.startswith("#")]
    assert any("embedder.name, evaluate.dimensions" in line for line in head)


def test_a_template_starts_the_next_build(tmp_path: Path) -> None:
    folder, mine = tmp_path / "out", tmp_path / "mine.yaml"
    drafted(workspace(tmp_path / "run", profile="standard"), folder)
    check_template(folder)
    mine.write_text("retrieve: {top_n: 64}\n", encoding="utf-8")
    config = load_config(None, mine, {"rerank.top_m": 5}, folder)
    assert (config.profile, config.lexical.tokenizer, config.chunk.child_tokens) == ("standard", "char", 128)
    assert config.retrieve.top_n == 64, "--config over the template"
    assert config.rerank.top_m == 5, "-p over both"
    assert config.generate.prompt == "initial_prompt" and config.embedder.name == "BAAI/bge-m3"
    assert load_config("offline", None, None, folder).profile == "offline", "--profile over the template's"


def test_a_template_takes_a_prompt_that_a_person_completed(tmp_path: Path) -> None:
    skeleton = drafted(workspace(tmp_path / "run"), tmp_path)["prompt-skeleton.md"]
    prompt = tmp_path / "prompt.md"
    goal = re.sub(f"{OPEN} goal.*", "Be right.", skeleton)
    prompt.write_text(goal, encoding="utf-8")
    with pytest.raises(UsageError, match="Identity, Function, Answer Specification, Prohibitions, Examples"):
        check_template(tmp_path)
    prompt.write_text(re.sub(f"{OPEN}.*", "Be right.", skeleton), encoding="utf-8")
    with pytest.raises(UsageError, match="shows no citation"):
        check_template(tmp_path)
    prompt.write_text(load_prompt("initial_prompt").text, encoding="utf-8")
    check_template(tmp_path)
    assert load_config(template=tmp_path).generate.prompt == str(prompt)
    with pytest.raises(UsageError, match=r"holds no template\.yaml"):
        check_template(tmp_path / "nowhere")
