"""Zero-index recall: the notes of a folder that fit a piece of key content best, read and encoded in one call.

No index file, no vector store, no language model. Markdown is split at headings of level 2 and deeper, plain text at
paragraphs; one `encode_documents` call, one matrix product, one ranking. ``SKILL.md`` beside this module tells coding
agents how to call it. Contract: one line of UTF-8 JSON on stdout and nothing else,

    {"matches": [{"id": …, "source": …, "text": …}]}     exit code 0, best first
    {"error": CODE, "message": …}                        the exit code of `CODES`
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragbuild.core.errors import DocumentRefused, MissingResource, RagbuildError
from ragbuild.core.store import sha256

if TYPE_CHECKING:
    import numpy as np

    from ragbuild.models.embedders import Embedder

DEFAULT_MODEL = "Qwen/Qwen3-Embedding-0.6B"
SUFFIXES = (".md", ".txt")
CODES = {  # error code -> exit code
    "BAD_ARGUMENT": 2,  # unknown, missing or repeated argument, no query, top_n below 1, neither .md, .txt nor a folder
    "PATH_NOT_FOUND": 4,  # not there, or may not be read
    "EMPTY_CORPUS": 4,  # no .md or .txt file with text in it
    "ENCODING_ERROR": 4,  # a file is neither UTF-8, UTF-16 with a byte order mark, nor Chinese in GB18030
    "MODEL_ERROR": 5,  # the model is not on this machine, or failed
    "DEPENDENCY_ERROR": 5,  # a Python package that the model needs is not installed
}
_CODE = re.compile(r"(?<![A-Za-z0-9-])[A-Z][A-Z0-9]{0,9}(?:-[A-Z0-9]{1,10}){0,3}-\d{2,6}(?![A-Za-z0-9])")
_BREAK = r"(?:\r\n?|\n)"
_FRONT = re.compile(  # keys and values; a rule at the top of a document is none
    rf"---[ \t]*{_BREAK}(?=[^\s:#][^\r\n:]*:)(?:(?!##)[^\r\n]*{_BREAK})*?(?:---|\.\.\.)[ \t]*(?:{_BREAK}|\Z)"
)
_LINE = re.compile(rf"[^\r\n]*{_BREAK}|[^\r\n]+\Z")
_EMPTY_LINES = re.compile(rf"{_BREAK}(?:[ \t\u3000]*+{_BREAK})+")
_LEADING_CODE = re.compile(rf"[\s\[【(（]*({_CODE.pattern})")


class RecallError(RagbuildError):
    """A failure of the contract: `code` is a key of `CODES`, which gives the exit code."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code, self.exit_code = code, CODES[code]


@dataclass(frozen=True, slots=True)
class Entry:
    """A candidate: the code of its heading or a hash of its text; the absolute path of its file; its original text."""

    id: str
    source: str
    text: str


def split_markdown(text: str) -> list[tuple[int, int, str]]:
    """(start, end, heading) of the entries, which together are the text. Each begins at a level-2 or deeper heading
    (CommonMark's, so none in a code fence, a list or a quotation); what stands before the first, front matter included,
    is one too, and its heading is that of level 1."""
    from markdown_it import MarkdownIt

    front = _FRONT.match(text)
    offset = front.end() if front else 0
    starts = [offset + m.start() for m in _LINE.finditer(text[offset:])]
    tokens = MarkdownIt("commonmark").disable(["inline", "reference"]).parse(text[offset:])
    cuts = [(0, "")]
    for token, content in pairwise(tokens):
        if token.type != "heading_open" or token.level or token.map is None:
            continue
        if token.tag != "h1":
            cuts.append((starts[token.map[0]], content.content))
        elif cuts == [(0, "")]:
            cuts = [(0, content.content)]
    return _spans(cuts, len(text))


def split_text(text: str) -> list[tuple[int, int, str]]:
    """(start, end, heading) of the paragraphs, which empty lines divide; the heading is a code at the start, or empty.
    Each span includes the empty lines after it."""
    starts = [0, *(m.end() for m in _EMPTY_LINES.finditer(text))]
    codes = [_LEADING_CODE.match(text, start) for start in starts]
    return _spans([(at, code[1] if code else "") for at, code in zip(starts, codes, strict=True)], len(text))


def _spans(cuts: list[tuple[int, str]], end: int) -> list[tuple[int, int, str]]:
    return [(a, b, heading) for (a, heading), (b, _) in pairwise([*cuts, (end, "")]) if a < b]


def read_entries(source: str | Path) -> list[Entry]:
    """The candidates of one ``.md`` or ``.txt`` file or of all such files below a folder, in the order of paths.

    Links below the folder are not followed, hidden files and folders (``.git``) are left out, and of equal texts only
    the first is kept. Ids are unique. Raises RecallError.
    """
    if not str(source).strip():
        raise RecallError("BAD_ARGUMENT", "no path was given; name a .md or .txt file or a folder of them")
    try:
        path = Path(source).expanduser().resolve(strict=True)
        files = [path] if path.is_file() and path.suffix.lower() in SUFFIXES else _walk(path) if path.is_dir() else None
        if files is None:
            raise RecallError("BAD_ARGUMENT", f"'{source}' is neither a .md nor a .txt file nor a folder of them")
        found = [(file, _decode(file, file.read_bytes())) for file in files]
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, an unknown ~user; a NUL in a path
        why = getattr(error, "strerror", None) or error
        raise RecallError("PATH_NOT_FOUND", f"{getattr(error, 'filename', None) or source}: {why}") from error
    entries: dict[str, Entry] = {}  # by id
    texts: set[str] = set()
    for file, content in found:
        split = split_markdown if file.suffix.lower() == ".md" else split_text
        for start, end, heading in split(content):
            text = re.sub(r"\A(?:[^\S\r\n]*+[\r\n])+", "", content[start:end]).rstrip()
            if text and text not in texts:
                texts.add(text)
                code = _CODE.search(heading)
                name = code.group() if code else "note"
                name = name if code and name not in entries else f"{name}-{sha256(text)[:12]}"
                entries[name] = Entry(name, str(file), text)
    if not entries:
        raise RecallError("EMPTY_CORPUS", f"{source} holds no .md or .txt file with text in it")
    return list(entries.values())


def _walk(folder: Path) -> list[Path]:
    """The files of a folder by relative path. A folder that can't be read is an error: nothing is left out silently."""

    def stop(error: OSError) -> None:
        raise error

    out: list[Path] = []
    for root, folders, names in os.walk(folder, onerror=stop):  # os.walk does not enter links
        folders[:] = [name for name in folders if not name.startswith(".")]
        files = [Path(root, n) for n in names if not n.startswith(".") and n.lower().endswith(SUFFIXES)]
        out += [file for file in files if file.is_file() and not file.is_symlink()]  # no pipes either
    return sorted(out, key=lambda file: file.relative_to(folder).parts)


def _decode(file: Path, data: bytes) -> str:
    encoding = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    try:
        with contextlib.suppress(UnicodeDecodeError):
            text = data.decode(encoding)
            if "\0" not in text:
                return text
        text = data.decode("gb18030")
        from ragbuild.offline.parse.base import decode  # almost any bytes decode as GB18030: what does the parser say?

        with contextlib.suppress(DocumentRefused):
            if "\0" not in text and decode(data).split() == text.split():
                return text
    except UnicodeDecodeError:
        pass
    raise RecallError("ENCODING_ERROR", f"{file} is neither UTF-8 nor GB18030 text; save it as UTF-8, or move it away")


def rank(documents: np.ndarray, query: np.ndarray, top_n: int) -> list[int]:
    """Rows of `documents` (n, dim) by cosine with `query` (dim,), best first, equal ones in their order. Unit vectors:
    one matrix product."""
    import numpy as np

    return [int(row) for row in np.argsort(-(documents @ query), kind="stable")[:top_n]]


def recall(
    source: str | Path, query: str, top_n: int = 1, model: str = DEFAULT_MODEL, embedder: Embedder | None = None
) -> list[Entry]:
    """The `top_n` entries of `source` that fit `query` best. `model`: ``use-multilingual``, ``minilm``, a hub id that
    is on this machine, or a folder; `embedder` goes before it. Raises RecallError."""
    query = query.encode("utf-8", "replace").decode().strip()  # bytes of the command line that are no text
    if not query:
        raise RecallError("BAD_ARGUMENT", "the query is empty; give the key content in one to three sentences")
    if not model:
        raise RecallError("BAD_ARGUMENT", "the model has no name")
    if top_n < 1:
        raise RecallError("BAD_ARGUMENT", f"top_n must be at least 1, got {top_n}")
    entries = read_entries(source)  # before the model, which takes seconds to load
    try:
        embedder = embedder or _load(model)
        documents = embedder.encode_documents([entry.text for entry in entries])
        question = embedder.encode_queries([query])[0]
        import numpy as np

        if not (np.isfinite(documents).all() and np.isfinite(question).all()):
            raise ValueError("it returned NaN or infinity; its weights are damaged")
    except Exception as error:  # whatever a model's library raises
        missing = isinstance(error, ImportError) or isinstance(error.__cause__, ImportError)
        code = "DEPENDENCY_ERROR" if missing else "MODEL_ERROR"
        raise RecallError(code, f"model '{getattr(embedder, 'name', model)}': {error}") from error
    return [entries[row] for row in rank(documents, question, top_n)]


def _load(model: str) -> Embedder:
    from ragbuild.core.config import EmbedderConfig
    from ragbuild.models.embedders import PACKAGED, load_embedder, model_path

    try:  # a hub id becomes its folder here: given the id, transformers asks the hub even with local_files_only
        where = model if model in PACKAGED else model_path("embedder", model, local_files_only=True)
    except MissingResource as error:
        get = f"'hf download {model}' gets it once; or name a folder that holds one, or use-multilingual or minilm"
        raise MissingResource(f"it is not on this machine, and nothing is downloaded while recalling; {get}") from error
    return load_embedder(where, EmbedderConfig(local_files_only=True))


class _Once(argparse.Action):
    """An option that may be given once: of two paths none is guessed."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if getattr(namespace, f"_{self.dest}", False):
            parser.error(f"{option_string} was given twice")
        setattr(namespace, f"_{self.dest}", True)
        setattr(namespace, self.dest, values)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:  # argparse would write to stderr and exit
        raise RecallError("BAD_ARGUMENT", message)


def _parser() -> _Parser:
    codes = ", ".join(f"{code} {exit_code}" for code, exit_code in CODES.items())
    parser = _Parser("recall", description=f"Notes that fit a query best. Exit codes: {codes}.", allow_abbrev=False)
    add = parser.add_argument
    add("--source", required=True, metavar="PATH", action=_Once, help="a .md or .txt file, or a folder of them")
    add("--query", metavar="TEXT", action=_Once, help="key content in one to three sentences")
    add("--top-n", metavar="N", type=int, default=1, action=_Once, help="how many entries (default 1)")
    add("--model", metavar="ID_OR_DIR", default=DEFAULT_MODEL, action=_Once,
        help=f"use-multilingual, minilm, a hub id on this machine or a folder (default {DEFAULT_MODEL})")  # fmt: skip
    add("--dry-run", action="store_true", help='only {"candidates": […]}, in the order of paths, without a model')
    add("--json", action="store_true", help="the default: output is always JSON")
    return parser


def answer(arguments: Sequence[str]) -> tuple[dict[str, Any], int]:
    """(what goes to stdout, exit code) for the command's arguments."""
    try:
        args = _parser().parse_args(arguments)
        if args.dry_run:
            return {"candidates": [asdict(entry) for entry in read_entries(args.source)]}, 0
        if args.query is None:
            raise RecallError("BAD_ARGUMENT", "the following arguments are required: --query")
        return {"matches": [asdict(entry) for entry in recall(args.source, args.query, args.top_n, args.model)]}, 0
    except RecallError as error:
        return {"error": error.code, "message": str(error)}, error.exit_code


@contextlib.contextmanager
def _only_stderr() -> Iterator[None]:
    """What anything prints meanwhile, a C library too, goes to stderr."""
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, write its JSON, return its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if {"-h", "--help"} & set(arguments):
        print(_parser().format_help())
        return 0
    with _only_stderr():
        result, exit_code = answer(arguments)
    # a name that is no Unicode (a lone surrogate) becomes its JSON escape
    line = json.dumps(result, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
    sys.stdout.buffer.write(line)
    sys.stdout.flush()
    if sys.stdout is sys.__stdout__:
        os.dup2(2, 1)  # what a library prints when the program ends
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
