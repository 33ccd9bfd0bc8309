"""The main pipeline behind the service: what may be asked, and the version of the workspace that answers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from ragbuild.core.config import Config, stored_config
from ragbuild.core.errors import RagbuildError
from ragbuild.index.filters import Filter
from ragbuild.index.versions import IndexVersion, current_version
from ragbuild.models.embedders import Embedder
from ragbuild.online.pipeline import Pipeline

_log = logging.getLogger("ragbuild.service")
_Value = Annotated[str, Field(min_length=1, max_length=200)]
_Values = Annotated[list[_Value], Field(min_length=1, max_length=20)]


class Filters(BaseModel):
    """Only documents with one of these values."""

    model_config = ConfigDict(extra="forbid")

    product_model: _Values | None = None
    doc_version: _Values | None = None
    doc_type: _Values | None = None
    kb: _Values | None = None
    tag: _Values | None = None


class Question(BaseModel):
    """A question to the documents of the workspace. `old`: let older (legacy) versions in."""

    model_config = ConfigDict(extra="forbid")

    query: str = Field(min_length=1, max_length=2000, pattern=r"\S")
    filters: Filters = Filters()
    old: bool = Field(default=False, strict=True)

    @property
    def where(self) -> Filter:
        """The filter of the pipeline."""
        given = {name: tuple(values) for name, values in self.filters.model_dump(exclude_none=True).items()}
        return Filter(status=("active", "legacy") if self.old else ("active",), **given)


class Search(Question):
    """A question whose chunks are wanted. `top`: how many."""

    top: int = Field(default=10, ge=1, le=50, strict=True)


class Latest:
    """The pipeline of the version that ``CURRENT`` names: opened once, and again when it names another.

    While the next one is opened, and where it can't be, the former goes on answering. `overrides`: dotted keys over the
    workspace's own configuration. Calling it raises InputRefused while there is no version that can be read.
    """

    def __init__(
        self, workspace: Path, overrides: Mapping[str, Any] | None = None, embedder: Embedder | None = None
    ) -> None:
        self.workspace, self._overrides, self._embedder = Path(workspace), overrides or {}, embedder
        self._pipeline: Pipeline | None = None
        self._seen: tuple[Any, ...] = ()
        self._lock = threading.Lock()

    @property
    def name(self) -> str | None:
        """The version in use; None before the first is open."""
        return self._pipeline.version.name if self._pipeline else None

    def _config(self, root: Path) -> Config:
        return stored_config(root).with_overrides(self._overrides)

    @property
    def threads(self) -> int:
        """How many questions to work on at once: one where all work is done here, since threads of Python would only
        hinder each other; several where most of the time a model elsewhere is waited for."""
        try:
            config = self._config(self.workspace)
        except RagbuildError:
            return 1
        elsewhere = config.generate.generator == "openai" or config.rewrite.use_llm or config.route.use_llm
        return 8 if elsewhere else 1

    def __call__(self) -> Pipeline:
        seen = self._look()
        if seen != self._seen and self._lock.acquire(blocking=self._pipeline is None):
            try:
                if seen != self._seen:
                    self._pipeline, self._seen = self._open(), seen
            except (RagbuildError, OSError) as error:
                if self._pipeline is None:
                    raise
                self._seen = seen  # asked again when CURRENT changes again
                _log.warning("%s stays in use; what is published now can't be opened: %s", self.name, error)
            finally:
                self._lock.release()
        assert self._pipeline is not None
        return self._pipeline

    def _look(self) -> tuple[Any, ...]:
        """Another value when another version is published, also one of the same name by a fresh build."""
        try:
            root = self.workspace.resolve()  # outputs/latest may point elsewhere by now
            name = current_version(root / "indexes")
            stat = (root / "indexes" / str(name) / "version.json").stat()
            return root, name, stat.st_ino, stat.st_mtime_ns
        except (RagbuildError, OSError):
            return (None,)

    def _open(self) -> Pipeline:
        root = self.workspace.resolve()
        version = IndexVersion(root / "indexes")
        config = self._config(root)
        name, embedder = version.manifest["embedder"]["name"], self._embedder
        if self._pipeline is not None and self._pipeline.embedder.name == name:
            embedder = self._pipeline.embedder  # its model is loaded already
        pipeline = Pipeline(version, config, embedder)
        version.tokenizer("预热 warm")  # what is made on first use is made now: the words of Chinese, the model
        pipeline.embedder.encode_queries(["预热 warm"])
        _ = pipeline.rewriter, pipeline.router, pipeline.retriever, pipeline.reranker, pipeline.generator
        return pipeline
