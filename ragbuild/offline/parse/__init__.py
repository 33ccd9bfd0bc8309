"""Documents to Markdown: a parser for each format, chosen by content, and the fields of each document."""

from ragbuild.offline.parse.base import DocumentParser, ParsedDocument, ParsedImage, ParseOptions, safe_name
from ragbuild.offline.parse.corpus import CorpusResult, ParsedEntry, load_parsed, parse_corpus, parse_file, write_parsed

__all__ = [
    "CorpusResult", "DocumentParser", "ParseOptions", "ParsedDocument", "ParsedEntry", "ParsedImage",
    "load_parsed", "parse_corpus", "parse_file", "safe_name", "write_parsed",
]  # fmt: skip
