"""Words of general use (`general_words.txt`), by which the dictionary tells a name from a phrase."""

from __future__ import annotations

from importlib import resources

from ragbuild.core.text import STOPWORDS


def _sections() -> dict[str, frozenset[str]]:
    text = (resources.files("ragbuild.offline") / "general_words.txt").read_text(encoding="utf-8")
    out: dict[str, set[str]] = {}
    name = ""
    for line in text.splitlines():
        if line.startswith("["):
            name = line.strip("[]")
        elif not line.startswith("#"):
            out.setdefault(name, set()).update(line.split())
    return {name: frozenset(words) for name, words in out.items()}


_WORDS = _sections()
GENERAL = STOPWORDS | _WORDS["general"]
GENERAL_HAN = _WORDS["general_han"]
TOO_WIDE = _WORDS["too_wide"]
