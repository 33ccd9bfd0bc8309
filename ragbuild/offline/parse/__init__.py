"""Documents to Markdown: a parser for each format, chosen by content, and the fields of each document."""

from ragbuild.offline.parse.base import DocumentParser, ParsedDocument, ParsedImage, ParseOptions, safe_name
from ragbuild.offline.parse.corpus import (
    CorpusResult,
    ParsedEntry,
    image_ids_of,
    kept_files,
    load_parsed,
    parse_corpus,
    parse_file,
    pictures_of,
    read_kept,
    write_parsed,
)  # fmt: skip

__all__ = [
    "CorpusResult", "DocumentParser", "ParseOptions", "ParsedDocument", "ParsedEntry", "ParsedImage", "image_ids_of",
    "kept_files", "load_parsed", "parse_corpus", "parse_file", "pictures_of", "read_kept", "safe_name", "write_parsed",
]  # fmt: skip
