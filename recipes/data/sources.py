"""Rows of a data set: a local jsonl, json or parquet file, a folder of them, or a name on the Hugging Face hub."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.errors import DataError

ARITHMETIC_DIR = Path(__file__).parent / "arithmetic"
ARITHMETIC = "arithmetic"
_LOCAL_SUFFIXES = (".jsonl", ".json", ".parquet")


@dataclass(frozen=True)
class Row:
    """One row and where it stands, for messages: ``file:line`` or ``name[split] row n``."""

    fields: Mapping[str, Any]
    where: str


def _shorten(text: str, limit: int = 80) -> str:
    text = text.strip()
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _jsonl_rows(path: Path) -> Iterator[Row]:
    with open(path, "rb") as file:
        for number, raw in enumerate(file, start=1):
            where = f"{path}:{number}"
            try:
                text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise DataError(
                    f"byte {error.start + 1} is not UTF-8 ({error.reason})", where=where, fix="Save the file as UTF-8."
                ) from None
            if not text.strip():
                continue
            try:
                fields = json.loads(text)
                if "\\ud" in text.lower():  # half of a surrogate pair is JSON, but no text that a tokenizer takes
                    json.dumps(fields, ensure_ascii=False).encode()
            except json.JSONDecodeError as error:
                raise DataError(
                    f"not JSON at column {error.colno}: {error.msg}; the line is {_shorten(text)!r}",
                    where=where,
                    fix="Repair or remove the line.",
                ) from None
            except (ValueError, RecursionError) as error:
                raise DataError(
                    f"cannot be used: {_shorten(str(error))}", where=where, fix="Repair or remove the line."
                ) from None
            if not isinstance(fields, dict):
                raise DataError(
                    f"a JSON {type(fields).__name__}, an object is needed",
                    where=where,
                    fix='Write one object a line: {"prompt": ..., "label": ...}.',
                )
            yield Row(fields, where)


def _json_rows(path: Path) -> Iterator[Row]:
    text = path.read_bytes().decode("utf-8", errors="replace").lstrip("\ufeff \t\r\n")
    if not text.startswith("["):
        yield from _jsonl_rows(path)
        return
    try:
        items = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"not JSON: {error.msg}", where=f"{path}:{error.lineno}", fix="Repair the file.") from None
    for number, fields in enumerate(items):
        where = f"{path} item {number}"
        if not isinstance(fields, dict):
            raise DataError(f"a JSON {type(fields).__name__}, an object is needed", where=where)
        yield Row(fields, where)


def _datasets_rows(name: str, split: str, files: Sequence[Path] = ()) -> Iterator[Row]:
    """Rows that the ``datasets`` library reads: parquet files, or a hub name (a local mirror of it included)."""
    import datasets

    try:
        if files:
            paths = [str(f) for f in files]
            data = datasets.load_dataset("parquet", data_files={"train": paths}, split="train")
        else:
            data = datasets.load_dataset(name, split=split)
    except Exception as error:  # noqa: BLE001 - the library raises many types; each becomes one readable message
        if files:
            raise DataError(
                f"cannot be read as parquet: {_shorten(str(error), 200)}", where=name, fix="Check the file."
            ) from error
        raise DataError(
            f"cannot load split {split!r} from the hub: {type(error).__name__}: {_shorten(str(error), 200)}",
            where=f"data.path={name}",
            fix="Check the name, the split and the network, or download it and give the file's path.",
        ) from error
    for number, fields in enumerate(data):
        yield Row(dict(fields), f"{name}[{split}] row {number}")


def _looks_local(path: str) -> bool:
    return Path(path).suffix in _LOCAL_SUFFIXES or path.startswith(("/", "./", "../", "~")) or Path(path).exists()


def read_rows(path: str, *, split: str = "train", limit: int | None = None) -> list[Row]:
    """The rows of ``path`` in file order.

    Args:
        path: a ``.jsonl``, ``.json`` (an array, or one object a line) or ``.parquet`` file, a folder (its files whose
            name starts with ``split``, else all of them, in name order), ``arithmetic`` for the set that ships with
            this package, or a hub name such as ``BytedTsinghua-SIA/DAPO-Math-17k``.
        split: split of a hub data set or file-name prefix in a folder.
        limit: keep the first rows only.

    Raises:
        DataError: a missing file, a broken line (with file, line number and reason), an unknown format, no rows.
    """
    rows: list[Row] = []
    for row in _iterate(path, split):
        if limit is not None and len(rows) >= limit:
            break
        rows.append(row)
    if not rows:
        raise DataError("no rows", where=f"data.path={path}", fix="The file is empty; check data.path and data.split.")
    return rows


def _iterate(path: str, split: str) -> Iterator[Row]:
    if path == ARITHMETIC:
        file = ARITHMETIC_DIR / f"{split}.jsonl"
        if not file.is_file():
            known = ", ".join(sorted(f.stem for f in ARITHMETIC_DIR.glob("*.jsonl")))
            raise DataError(f"no split {split!r}", where="data.split", fix=f"The arithmetic set has: {known}.")
        yield from _jsonl_rows(file)
        return
    if not _looks_local(path):
        yield from _datasets_rows(path, split)
        return
    local = Path(path).expanduser()
    if not local.exists():
        raise DataError("no such file or folder", where=f"data.path={path}", fix=f"Looked for {local.absolute()}.")
    files = [local]
    if local.is_dir():
        found = sorted(f for f in local.iterdir() if f.suffix in _LOCAL_SUFFIXES)
        files = [f for f in found if f.name.startswith(split)] or found
        if not files:
            raise DataError(
                f"no file ends in {', '.join(_LOCAL_SUFFIXES)}", where=f"data.path={path}", fix="Check the folder."
            )
    for file in files:
        if file.suffix == ".jsonl":
            yield from _jsonl_rows(file)
        elif file.suffix == ".json":
            yield from _json_rows(file)
        elif file.suffix == ".parquet":
            yield from _datasets_rows(str(file), split, [file])
        else:
            raise DataError(
                f"unknown format {file.suffix!r}",
                where=f"data.path={path}",
                fix=f"Use one of {', '.join(_LOCAL_SUFFIXES)}.",
            )


def lookup(row: Row, key: str, *, setting: str) -> Any:
    """The value under a key such as ``reward_model.ground_truth`` (a literal key of that name wins).

    Raises:
        DataError: the field does not exist; the message lists those that do.
    """
    if key in row.fields:
        return row.fields[key]
    value: Any = row.fields
    for part in key.split("."):
        if isinstance(value, str) and value.lstrip().startswith("{"):
            try:  # some exports keep nested fields as JSON text
                value = json.loads(value)
            except json.JSONDecodeError:
                value = None
        if not isinstance(value, Mapping) or part not in value:
            found = ", ".join(sorted(_field_names(row.fields))) or "no field at all"
            raise DataError(f"no field {key!r}; found {found}", where=row.where, fix=f"Set {setting} to one of them.")
        value = value[part]
    return value


def _field_names(fields: Mapping[str, Any], prefix: str = "", depth: int = 0) -> Iterator[str]:
    for key, value in fields.items():
        if isinstance(value, Mapping) and value and depth < 2:
            yield from _field_names(value, f"{prefix}{key}.", depth + 1)
        else:
            yield prefix + key
