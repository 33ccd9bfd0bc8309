"""Files: atomic writes, hashes, CSV for people, and the workspace that holds a run.

A file is written to a temporary name beside its target, flushed and renamed, so that a full disk or a killed
process leaves the former file whole. No pickle is read or written anywhere.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import hashlib
import io
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar

from pydantic import BaseModel, ValidationError

from ragbuild.core.errors import InputRefused, RagbuildError, UsageError

R = TypeVar("R", bound=BaseModel)


def cache_dir(name: str = "") -> Path:
    """The user's private cache folder (``RAGBUILD_CACHE_DIR`` moves it); made when missing, mode 0700."""
    base = os.environ.get("RAGBUILD_CACHE_DIR") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "ragbuild"
    )
    folder = Path(base) / name
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise RagbuildError(
            f"the cache folder {folder} cannot be made ({error.strerror}); set RAGBUILD_CACHE_DIR to one that can"
        ) from error
    return folder


@contextmanager
def atomic(path: str | Path, mode: str = "wb") -> Iterator[IO[Any]]:
    """Open a temporary file beside `path`; on success flush, sync and rename it, on failure remove it."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        options = {} if "b" in mode else {"encoding": "utf-8", "newline": ""}
        with os.fdopen(fd, mode, **options) as handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        if os.path.exists(name):
            os.unlink(name)
        raise


def write_bytes(path: str | Path, data: bytes) -> None:
    """Write a file whole or not at all."""
    with atomic(path) as handle:
        handle.write(data)


def write_text(path: str | Path, text: str) -> None:
    """Write UTF-8 text whole or not at all."""
    write_bytes(path, text.encode("utf-8"))


def append_line(path: Path, line: bytes) -> None:
    """Add a line and sync it. Former lines stay as they are; one that a crash cut short is closed by a line end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as handle:
        if handle.tell():
            handle.seek(-1, os.SEEK_END)
            line = line if handle.read(1) == b"\n" else b"\n" + line
        handle.write(line + b"\n")
        handle.flush()
        os.fsync(handle.fileno())


def whole_lines(path: Path | None, model: type[R]) -> Iterator[R]:
    """The records that `append_line` kept, one a line; a line torn by a crash is left out, and so is a missing file."""
    for line in path.read_bytes().split(b"\n") if path is not None and path.is_file() else ():
        with contextlib.suppress(ValidationError):
            yield model.model_validate_json(line)


def write_json(path: str | Path, data: Any) -> None:
    """Records, lists of records and plain data as UTF-8 JSON; NaN is refused."""
    write_text(path, json.dumps(_plain(data), ensure_ascii=False, indent=1, allow_nan=False) + "\n")


def write_records(path: str | Path, records: Iterable[BaseModel]) -> None:
    """A JSON list, one record a line: readable by any JSON reader, and by people in a diff."""
    with atomic(path) as handle:
        handle.write(b"[")
        for i, record in enumerate(records):
            handle.write((b",\n" if i else b"\n") + record.model_dump_json().encode())
        handle.write(b"\n]\n")


def read_json(path: str | Path) -> Any:
    """Data of a JSON file. Raises InputRefused when it is missing or broken."""
    path = Path(path)
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise InputRefused(f"{path} is missing; run the step that writes it first") from None
    except UnicodeDecodeError as error:
        raise InputRefused(f"{path} is not UTF-8 ({error.reason} at byte {error.start}); save it as UTF-8") from error
    except ValueError as error:
        raise InputRefused(
            f"{path} is not valid JSON ({error}); correct it, or where a step made it, remove it and run its step again"
        ) from error


def read_records(path: str | Path, model: type[R]) -> list[R]:
    """A JSON list of records; a bad row is named by its number and its fields."""
    rows = read_json(path)
    if not isinstance(rows, list):
        raise InputRefused(f"{path}: expected a JSON list of {model.__name__}, got {type(rows).__name__}")
    out = []
    for number, row in enumerate(rows, 1):
        try:
            out.append(model.model_validate(row))
        except ValidationError as error:
            raise InputRefused(f"{path}, row {number}: not a valid {model.__name__}: {error_fields(error)}") from None
    return out


def iter_records(path: str | Path, model: type[R]) -> Iterator[R]:
    """The records of a file that `write_records` wrote, one at a time, so that a large file is never held whole."""
    number = 0
    try:
        with open(path, encoding="utf-8") as handle:
            for line in handle:
                row = line.strip().rstrip(",")
                if row not in ("[", "]", "[]", ""):
                    number += 1
                    yield model.model_validate_json(row)
    except FileNotFoundError:
        raise InputRefused(f"{path} is missing; run the step that writes it first") from None
    except UnicodeDecodeError as error:
        raise InputRefused(f"{path}, after row {number}: not UTF-8 ({error.reason}); build again") from None
    except ValidationError as error:
        raise InputRefused(f"{path}, row {number}: not a valid {model.__name__}: {error_fields(error)}") from None


def error_fields(error: ValidationError) -> str:
    """What is wrong with a record, field by field, in one line."""
    return "; ".join(": ".join(filter(None, (".".join(map(str, e["loc"])), e["msg"]))) for e in error.errors())


def _plain(data: Any) -> Any:
    if isinstance(data, BaseModel):
        return data.model_dump(mode="json")
    if isinstance(data, Mapping):
        return {str(k): _plain(v) for k, v in data.items()}
    if isinstance(data, (list, tuple, set, frozenset)):
        return [_plain(v) for v in (sorted(data) if isinstance(data, (set, frozenset)) else data)]
    if hasattr(data, "item") and not isinstance(data, (str, bytes)):  # numpy scalars
        return data.item()
    return data


_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")  # with these a spreadsheet begins a formula


def write_csv(path: str | Path, rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """CSV that a spreadsheet opens rightly: UTF-8 with BOM, cells that would run as a formula quoted."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(columns), lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    for row in rows:
        cells = {key: str(row.get(key, "")).replace("\r\n", "\n").replace("\r", "\n") for key in columns}
        writer.writerow({key: _no_formula(cell) for key, cell in cells.items()})
    write_bytes(path, b"\xef\xbb\xbf" + buffer.getvalue().encode("utf-8"))


def read_csv(path: str | Path, required: Sequence[str] = ()) -> list[dict[str, str]]:
    """Rows of a CSV in UTF-8 (with or without BOM) or GB18030; a missing column is named.

    Raises InputRefused when the file is unreadable or lacks a required column.
    """
    path = Path(path)
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise InputRefused(f"{path} cannot be read: {error}") from error
    for encoding in ("utf-8-sig", "gb18030"):
        try:
            text = raw.decode(encoding)
            break
        except UnicodeDecodeError:
            continue
    else:
        raise InputRefused(f"{path} is neither UTF-8 nor GB18030; save it as 'CSV UTF-8'")
    reader = csv.DictReader(io.StringIO(text, newline=None))  # line ends of any system
    try:
        missing = [c for c in required if c not in (reader.fieldnames or ())]
        if missing:
            raise InputRefused(f"{path} lacks the column(s) {', '.join(missing)}; it has {reader.fieldnames}")
        return [{k: _no_formula(v or "", undo=True).strip() for k, v in row.items() if k is not None} for row in reader]
    except csv.Error as error:
        raise InputRefused(f"{path}, after line {reader.line_num}: not a CSV file ({error})") from error


def _no_formula(text: str, undo: bool = False) -> str:
    if not text.lstrip("'").startswith(_FORMULA):
        return text
    if undo:
        return text.removeprefix("'")
    return "'" + text


def sha256(data: bytes | str) -> str:
    """Hash of bytes, or of a text's UTF-8, in hex."""
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


def hash_path(path: str | Path) -> str:
    """Hash of a file's bytes, or of a folder's relative names and bytes (links are not followed)."""
    path = Path(path)
    if not path.exists():
        return "missing"
    if path.is_file():
        with path.open("rb") as handle:
            return hashlib.file_digest(handle, "sha256").hexdigest()
    digest = hashlib.sha256()
    for file in walk(path):
        try:
            content = hash_path(file)
        except PermissionError:  # the step that reads it says so, and goes on with the others
            content = "unreadable"
        name = file.relative_to(path).as_posix().encode("utf-8", "surrogateescape")
        digest.update(name + b"\0" + content.encode() + b"\n")
    return digest.hexdigest()


def walk(folder: str | Path) -> list[Path]:
    """Files below `folder`, sorted by relative path. Links are left out: they may lead outside."""
    folder, out = Path(folder), []
    for root, dirs, files in os.walk(folder, followlinks=False):
        dirs[:] = sorted(d for d in dirs if not os.path.islink(os.path.join(root, d)) and not d.startswith("."))
        out += [Path(root, f) for f in files if not f.startswith(".") and not os.path.islink(os.path.join(root, f))]
    return sorted(out, key=lambda p: p.relative_to(folder).as_posix())


_NO_LINKS = (errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


def link(source: Path, target: Path) -> None:
    """A hard link, or a copy where the file system has none. For files that are replaced, never written in place."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        shutil.copy2(source, target)


def link_tree(source: Path, target: Path, skip: Sequence[str] = ()) -> None:
    """Make the folder `target` of links to the files of `source`."""
    target.mkdir(parents=True)
    for file in source.iterdir():
        if file.name not in skip:
            link(file, target / file.name)


def inside(base: str | Path, relative: str) -> Path:
    """`base / relative`, refused when it would lie outside of `base`."""
    base = Path(base).resolve()
    target = (base / relative).resolve()
    if not target.is_relative_to(base):
        raise UsageError(f"'{relative}' leads outside of {base}")
    return target


class Workspace:
    """The folder of one run; knows where each file of DESIGN's workspace lies. Paths inside are relative."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)

    def path(self, relative: str) -> Path:
        return inside(self.root, relative)

    def exists(self, relative: str) -> bool:
        return self.path(relative).exists()

    @property
    def indexes(self) -> Path:
        return self.path("indexes")

    def report(self, name: str, data: Any) -> Path:
        """Write ``reports/<name>.json`` and return its path."""
        target = self.path(f"reports/{name}.json")
        write_json(target, data)
        return target

    def __repr__(self) -> str:
        return f"Workspace({str(self.root)!r})"


def repository() -> Path:
    """The checkout that holds notebooks/, data/ and outputs/: the current folder's, else the package's own."""
    for folder in (Path.cwd(), *Path.cwd().parents):
        if (folder / "notebooks").is_dir() and (folder / "ragbuild").is_dir():
            return folder
    return Path(__file__).resolve().parents[2]
