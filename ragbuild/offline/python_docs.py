"""A larger real corpus without a download: Markdown made of the docstrings of libraries installed with the project.

One document a class, or a module's functions (a long module in parts); functions and methods are its chapters, the
sections of their docstrings its sections. With it come questions that people wrote: in "See Also" an author says in
other words what *another* function is for. These sections are left out of the documents, and the place of each
question is the described function's own summary.
"""

from __future__ import annotations

import importlib
import inspect
import re
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import zip_longest
from pathlib import Path
from typing import Any

from ragbuild.core.config import ChunkConfig, CorpusConfig, ParseConfig
from ragbuild.core.errors import MissingResource
from ragbuild.core.records import EvalPair, GroundSpan
from ragbuild.core.store import sha256, write_records, write_text
from ragbuild.core.text import TokenCounter
from ragbuild.offline.chunk import chunk_document
from ragbuild.offline.parse.base import ParseOptions
from ragbuild.offline.parse.fields import resolve
from ragbuild.offline.parse.markdown import MarkdownParser
from ragbuild.offline.see_also import ROLE, key, questions, sections

# Library -> its package and public modules. Documents are taken from the libraries in turn, so that a small corpus has
# them all.
LIBRARIES = {
    "numpy": ("numpy", ". linalg fft random ma char polynomial testing"),
    "pandas": ("pandas", ". api.typing api.types api.extensions io.formats.style plotting tseries.offsets"),
    "scikit-learn": (
        "sklearn",
        "cluster covariance cross_decomposition datasets decomposition discriminant_analysis ensemble"
        " feature_extraction feature_selection gaussian_process impute inspection kernel_approximation linear_model"
        " manifold metrics mixture model_selection multiclass naive_bayes neighbors neural_network pipeline"
        " preprocessing random_projection semi_supervised svm tree utils",
    ),
    "scipy": (
        "scipy",
        "linalg signal stats optimize interpolate integrate ndimage sparse spatial cluster.hierarchy fft special",
    ),
    "matplotlib": (
        "matplotlib",
        "axes figure axis artist patches lines collections colors ticker text legend transforms image",
    ),
    "networkx": ("networkx", "."),
}
PART, SAMPLE = 20, 600  # functions in one document; questions at most
_CALL = re.compile(r"([\w.]{1,80}\([^\n]*\))(?: -> [^\n]*)?\n\s*")
_ITEMS = ("Parameters", "Other Parameters", "Returns", "Yields", "Raises", "Warns", "Attributes", "Methods")


@dataclass(frozen=True)
class _Item:
    """A public object with its docstring, dedented; `name` as one would import it."""

    name: str
    doc: str
    signature: str

    @property
    def opening(self) -> str:
        """The first paragraph, as the document has it."""
        return _plain(next(sections(self.doc))[1]).strip().split("\n\n")[0]

    @property
    def summary(self) -> str:
        """The first paragraph in one line."""
        return " ".join(self.opening.split())


@dataclass(frozen=True)
class _Page:
    """What becomes one document."""

    library: str
    doc_id: str
    title: str
    kind: str
    items: tuple[_Item, ...]


def installed() -> dict[str, str]:
    """Version by library, of those that are there."""
    out = {}
    for library in LIBRARIES:
        with suppress(PackageNotFoundError):
            out[library] = version(library)
    return out


def write_python_docs(out: Path, min_children: int = 5000, chunk: ChunkConfig | None = None) -> dict[str, Any]:
    """Write documents below `out` until they give at least `min_children` children (under these chunk settings), and
    ``eval_set.json`` with the questions about them, at most 600; the same libraries give the same files.

    Of each library the pages that most questions ask about come first. Returns documents, children, questions, versions
    by library, and how many descriptions were `dropped`, by reason. Raises MissingResource when no library is there.
    """
    chunk = chunk or ChunkConfig()
    versions = installed()
    pages = {library: _pages(library) for library in versions}
    if not pages:
        raise MissingResource(f"none of {', '.join(LIBRARIES)} is installed; pip install numpy pandas scikit-learn")
    items = {item.name: item for some in pages.values() for page in some for item in page.items}
    docs = {library: {i.name: i.doc for page in some for i in page.items} for library, some in pages.items()}
    asked, dropped = questions(docs, {name: item.summary for name, item in items.items()})
    for some in pages.values():
        some.sort(key=lambda page: -sum(len(asked[item.name]) for item in page.items))
    counter, children, pairs, texts = TokenCounter(chunk.tokenizer), 0, [], []
    for page in (p for turn in zip_longest(*pages.values()) for p in turn if p):
        if children >= min_children and texts:
            break
        path = out / page.library / f"{page.doc_id}.md"
        fields = {
            "doc_id": page.doc_id, "doc_version": versions[page.library], "kb": page.library, "doc_type": page.kind,
            "title": page.title, "language": "en",
        }  # fmt: skip
        head = "".join(f'{key}: "{value}"\n' for key, value in fields.items())
        write_text(path, f"---\n{head}---\n\n# {page.title}\n\n" + "\n\n".join(map(_chapter, page.items)) + "\n")
        parsed = MarkdownParser().parse(path, ParseOptions(page.doc_id, ParseConfig(), CorpusConfig()))
        document = resolve(path.relative_to(out).as_posix(), parsed, None, sha256(path.read_bytes()))[0]
        chunks = chunk_document(document, parsed.markdown, parsed.page_of, config=chunk, counter=counter)
        children += chunks.stats["children"]
        for item in page.items:
            chapter = max(0, parsed.markdown.find(f"\n## {item.name}\n"))
            start = parsed.markdown.find(item.opening, chapter)
            if start < 0:
                dropped["its function's summary was not found again"] += len(asked[item.name])
            else:
                span = GroundSpan(doc_key=document.key, start=start, end=start + len(item.opening))
                pairs += [(_pair(query, item, span), plain) for query, plain in asked[item.name]]
        texts.append(f" {key(parsed.markdown)} ")
    found = [pair for pair, plain in pairs if not any(f" {plain} " in text for text in texts)]
    dropped["stands in the documents word for word"] = len(pairs) - len(found)
    pairs = sorted(found, key=lambda pair: pair.pair_id)[:SAMPLE]
    write_records(out / "eval_set.json", pairs)
    made = {"documents": len(texts), "children": children, "questions": len(pairs)}
    return {**made, "versions": versions, "dropped": dict(dropped)}


def _pair(query: str, item: _Item, span: GroundSpan) -> EvalPair:
    return EvalPair(
        pair_id=f"docs-{sha256(f'{item.name} {query}')[:12]}", query=query, gt_spans=(span,), gt_pages=(1,),
        gt_answer=item.summary, gt_keywords=(item.name.rsplit(".", 1)[-1],), query_type="definitional",
        gen_source="single_chunk", language="en", generator="see-also",
    )  # fmt: skip


def _pages(library: str) -> list[_Page]:
    """All pages of a library."""
    found: dict[str, dict[str, list[_Item]]] = {"module": {}, "class": {}}
    seen: set[str] = set()  # docstrings that were inherited or come by two ways are written once
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        package, modules = LIBRARIES[library]
        for module in (package if m == "." else f"{package}.{m}" for m in modules.split()):
            content = importlib.import_module(module)
            for name in sorted(n for n in getattr(content, "__all__", dir(content)) if not n.startswith("_")):
                thing = vars(content).get(name)  # an experimental part would raise, or be imported, when asked for
                own = (getattr(thing, "__module__", None) or module).split(".")[0] == module.split(".")[0]
                if not own or not callable(thing) or (isinstance(thing, type) and issubclass(thing, BaseException)):
                    continue
                items = [i for i in _members(f"{module}.{name}", thing) if i.doc not in seen and not seen.add(i.doc)]
                if items and isinstance(thing, type):
                    found["class"][f"{module}.{name}"] = items
                elif items:
                    found["module"].setdefault(module, []).extend(items)
    pages = [[p for name in named for p in _parts(library, name, named[name], kind)] for kind, named in found.items()]
    places = [((i + 0.5) / len(some), n, page) for n, some in enumerate(pages) for i, page in enumerate(some)]
    return [page for *_, page in sorted(places, key=lambda p: p[:2])]  # each kind evenly over the whole length


def _parts(library: str, name: str, items: list[_Item], kind: str) -> Iterator[_Page]:
    """A module or class as one page, or as several with at most PART functions each."""
    for number, start in enumerate(range(0, len(items), PART), 1):
        part, suffix, title = tuple(items[start : start + PART]), "", name
        if len(items) > PART:
            first, last = (i.name.rsplit(".", 1)[-1] for i in (part[0], part[-1]))
            suffix, title = f"-{number}", f"{name}, {first} to {last}"
        yield _Page(library, f"{name}{suffix}", title, kind, part)


def _members(name: str, thing: Any) -> Iterator[_Item]:
    """The object itself, and a class's public methods and properties."""
    yield from _item(name, thing)
    if isinstance(thing, type):
        for attribute in sorted(n for n in dir(thing) if not n.startswith("_")):
            member = inspect.getattr_static(thing, attribute)
            yield from _item(f"{name}.{attribute}", getattr(member, "__func__", member))


def _item(name: str, thing: Any) -> Iterator[_Item]:
    if not (callable(thing) or isinstance(thing, property)):
        return
    doc = inspect.cleandoc(getattr(thing, "__doc__", None) or "")
    short = name.rsplit(".", 1)[-1]
    signature = ""
    while match := _CALL.match(doc):  # written by hand where there is no signature to read
        signature, doc = signature or match[1], doc[match.end() :]
    try:
        signature = signature or f"{short}{inspect.signature(thing)}"
    except (TypeError, ValueError):
        signature = short
    if len(doc) > 60 and re.match(r"\w", doc):
        yield _Item(name, re.sub(r" at 0x[0-9a-f]+", "", doc), re.sub(r" at 0x[0-9a-f]+|\s+", " ", signature)[:300])


def _chapter(item: _Item) -> str:
    """One function as Markdown, without See Also."""
    out = [f"## {item.name}", f"`{item.signature}`"]
    for title, text in sections(item.doc):
        if title.strip() != "See Also" and text.strip():
            text = _plain(text)
            out += [f"### {title.strip()}"] if title else []
            out.append(_listed(text) if title.strip() in _ITEMS else _fenced(text))
    return "\n\n".join(out)


def _plain(text: str) -> str:
    """Without the marks of reStructuredText that say nothing to a reader."""
    text = ROLE.sub(r"`\1`", text).replace("``", "`")
    text = re.sub(
        r"^[ \t]*\.\. (?:math|plot|index|only|code-block|ipython|currentmodule)::[^\n]*\n", "", text, flags=re.M
    )
    text = re.sub(r"^([ \t]*)\.\. (?:(\[\w+\])|([a-z]+)::)", lambda m: m[1] + (m[2] or f"{m[3]}:"), text, flags=re.M)
    return re.sub(r"^([ \t]*)(#+ )", r"\1\\\2", text, flags=re.M).strip("\n")


def _fenced(text: str) -> str:
    """Sessions and tables, which are made with spaces, as code."""
    blocks = re.split(r"\n[ \t]*\n", text)
    for i, block in enumerate(blocks):
        if re.search(r"^\s*(?:>>> |=+(?: +=+)+\s*$|\+[-=+]{3,}\+\s*$)", block, re.M):
            blocks[i] = f"```\n{inspect.cleandoc(block)}\n```"
    return "\n\n".join(blocks)


def _listed(text: str) -> str:
    """``name : type`` and its indented description as an item of a list."""
    lines = [f"- {line}" if re.match(r"\S", line) else f"  {line.strip()}".rstrip() for line in text.split("\n")]
    return "\n".join(lines)
