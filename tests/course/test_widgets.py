"""The sliders: what they show is the sweep's; the YAML; and a real browser that moves one."""

from __future__ import annotations

import xml.etree.ElementTree as xml
from pathlib import Path

import numpy as np
import pytest
import yaml

from ragbuild.core.config import load_config
from ragbuild.core.errors import UsageError
from ragbuild.core.records import EvalPair, GroundSpan
from ragbuild.core.store import write_records
from ragbuild.course.page import serving
from ragbuild.course.widgets import TuningPanel, svg_lines
from ragbuild.evaluate.sweep import Setting, Sweep
from ragbuild.evaluate.tuning import TuningCorpus, open_corpus
from ragbuild.index.staging import write_version
from ragbuild.index.versions import IndexVersion
from ragbuild.online.pipeline import Pipeline
from tests.conftest import FakeEmbedder, make_chunks, make_document

WORDS = "gateway port timeout backup restore radius realm token seat licence cluster node fan power cable".split()


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Sweep]:
    """A workspace of 30 documents with its questions, and its sweep in the cache (the embedder is no model)."""
    root, chunks, documents, pairs = tmp_path_factory.mktemp("tune"), [], [], []
    for i in range(30):
        document = make_document(f"doc{i:02d}")
        texts = [
            f"{WORDS[(i + j) % 15]} {WORDS[(i * j) % 15]} {WORDS[(i // 2 + 3 * j) % 15]} {i} {j}." for j in range(3)
        ]
        made = make_chunks(texts, document)
        documents.append(document)
        chunks += made
        query = f"<b>{WORDS[i % 15]}</b> and the {WORDS[(i + 5) % 15]}" if i % 3 else f"{WORDS[i % 15]} {WORDS[i // 2]}"
        start, end = made[1].span
        pairs.append(EvalPair(
            pair_id=f"q{i}", query=query, gt_spans=(GroundSpan(doc_key=document.key, start=start, end=end),),
            gt_answer=texts[0], query_type="factual", gen_source="single_chunk", language="en",
        ))  # fmt: skip
    (root / "corpus").mkdir()
    overrides = {"tune.corpus": "own", "tune.top_n": [3, 5, 9, 30], "corpus.dir": str(root / "corpus")}
    config, embedder = load_config(overrides=overrides), FakeEmbedder()
    (root / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    write_records(root / "eval_set.json", pairs)
    write_version(
        root / "indexes", chunks, documents, [], config=config, encode=embedder.encode_documents,
        embedder={"name": "fake", "dim": 64},
    )  # fmt: skip
    opened = open_corpus(config, root)
    pipeline = Pipeline(IndexVersion(root / "indexes"), config, embedder)
    return root, TuningCorpus("own", pipeline, opened.cases, opened.key).sweep(lambda text: None)


def test_moving_a_slider_shows_the_sweep_s_figures(workspace: tuple[Path, Sweep]):
    root, sweep = workspace
    panel = TuningPanel(sweep, root)
    first, second = sweep.recommend()
    mine = sweep.of("tuning")
    assert 0 < mine.sum() < len(mine)
    assert (panel.top_n.value, panel.top_m.value) == (first.value, second.value), "it opens at what is recommended"
    assert first.value <= len(sweep.arrays["parents"]) and first.value <= 9, "a tenth of 90 children"
    for setting in (Setting(5, 1), Setting(30, 4, 10), Setting(3, 9, 60, ("dense",)), Setting(9, 2, 200, ("lexical",))):
        panel.top_n.value, panel.top_m.value, panel.rrf_k.value = setting.top_n, setting.top_m, setting.rrf_k
        panel.routes.value = setting.routes[0] if len(setting.routes) == 1 else "both"
        assert panel.setting == setting
        shown = {
            "recall": sweep.recall(setting)[mine].mean(),
            "parents": sweep.parent_recall(setting, [setting.top_m])[0, mine].mean(),
        }
        shown["tokens"] = sweep.context_tokens(setting, [setting.top_m])[0, mine].mean()
        assert panel.figures["test"] == pytest.approx(sweep.recall(setting)[~mine].mean())
        assert {k: panel.figures[k] for k in shown} == pytest.approx(shown)
        assert (
            f">{shown['recall']:.3f}</b>" in panel.shown.value and f">{shown['parents']:.3f}</b>" in panel.shown.value
        )
        flips = sweep.flips(sweep.setting(), setting, "tuning")
        assert f"'figure-lost'>{sum(r['now'] == 'lost' for r in flips)}</b>" in panel.shown.value


def test_questions_are_shown_as_text(workspace: tuple[Path, Sweep]):
    panel = TuningPanel(workspace[1], workspace[0])
    panel.routes.value, panel.top_n.value, panel.top_m.value = "dense", 3, 1
    assert "&lt;b&gt;" in panel.shown.value and "<b>" not in panel.shown.value.replace("<b class", "")


def test_the_button_writes_what_the_build_takes(workspace: tuple[Path, Sweep]):
    root, sweep = workspace
    panel = TuningPanel(sweep, root)
    panel.top_n.value, panel.top_m.value, panel.routes.value = 5, 3, "lexical"
    panel.write.click()
    config = load_config(file=root / "tuned_by_hand.yaml")
    assert (config.retrieve.top_n, config.rerank.top_m, config.retrieve.routes) == (5, 3, ("lexical",))
    assert "tuned_by_hand.yaml" in panel.note.value


def test_a_plot_is_well_formed_and_marks_the_chosen_point():
    text = svg_lines("a < b & c", [20, 50, 200], {"fused": ([0.5, 0.75, 1.0], "#009E73")}, 50, "Top-N")
    drawn = xml.fromstring(text)
    space = "{http://www.w3.org/2000/svg}"
    line, dot = drawn.find(f"{space}polyline"), drawn.find(f"{space}circle")
    assert line is not None and dot is not None
    points = [tuple(map(float, p.split(","))) for p in line.attrib["points"].split()]
    # 0.5 to 1.0 over 180 px from y = 28, three values evenly over 340 px from x = 40
    assert points == [(40.0, 208.0), (210.0, 118.0), (380.0, 28.0)]
    assert (float(dot.attrib["cx"]), float(dot.attrib["cy"])) == points[1]
    flat = svg_lines("", [1], {"one": ([0.5], "#000000")}, 1, "")
    assert not np.isnan(
        [float(v) for v in xml.fromstring(flat).find(f"{space}polyline").attrib["points"].split(",")]
    ).any()


def test_a_taken_port_is_refused(workspace: tuple[Path, Sweep]):
    import socket

    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(UsageError, match="taken"), serving(workspace[0], other.getsockname()[1]):
            pass


def test_in_a_browser_a_slider_moves_and_the_number_changes(workspace: tuple[Path, Sweep], browser):
    """The page that `ragbuild tune` opens, in a real browser."""
    root, sweep = workspace
    with serving(root) as address, browser.new_page() as page:
        outside: list[str] = []

        def note(request):  # Voilà's template names a CDN: the page's policy keeps the browser from asking it
            if not request.url.startswith(("http://127.0.0.1:", "data:", "blob:")) and request.failure != "csp":
                outside.append(request.url)

        page.on("requestfinished", note)
        page.on("requestfailed", note)
        refused = page.goto(address.split("?")[0])
        assert refused is not None and "login" in page.url, "without its token the page is not given"
        page.goto(address)
        recall = page.locator(".figure-recall")
        recall.wait_for(timeout=60_000)
        first, _ = sweep.recommend()
        mine = sweep.of("tuning")
        opened = sweep.recall(sweep.setting(top_n=first.value))[mine].mean()
        assert recall.inner_text() == f"{opened:.3f}"
        handle = page.locator(".noUi-handle").first
        handle.focus()
        for _ in range(3):  # as far to the left as it goes
            handle.press("ArrowLeft")
        least = f"{sweep.recall(sweep.setting(top_n=3))[mine].mean():.3f}"
        page.wait_for_function("value => document.querySelector('.figure-recall').innerText === value", arg=least)
        assert least != f"{opened:.3f}"
        page.get_by_role("button", name="write YAML").click()
        page.get_by_text("written:").wait_for()
        assert load_config(file=root / "tuned_by_hand.yaml").retrieve.top_n == 3
        assert "this workspace" in page.locator(".widget-html").first.inner_text(), "it says what it is about"
        assert outside == [], "nothing is fetched from outside"
