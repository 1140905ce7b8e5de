"""Tables with named columns: csv, parquet and pandas frames."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from latecomer.data.dataset import Dataset, SourceOptions, as_array
from latecomer.data.tables import read_table
from latecomer.errors import BadInput, did_you_mean

MAX_CATEGORIES = 50  # of a text column, which becomes one column of 0 and 1 per value
MAX_LISTED = 12


@dataclass(frozen=True, eq=False)
class TableContents:
    """The arrays of a table; `kept` marks its rows that have a target."""

    x: NDArray[Any]
    y: NDArray[Any]
    subject: NDArray[Any] | None
    target_names: tuple[str, ...]
    kept: NDArray[np.bool_]
    notes: tuple[str, ...]


def read_csv(path: Path, options: SourceOptions) -> Dataset:
    """The csv file at `path`, compressed or not; its first line names the columns."""
    return _read(
        path, options, lambda: pd.read_csv(path, dtype_backend="numpy_nullable", low_memory=False)
    )


def read_parquet(path: Path, options: SourceOptions) -> Dataset:
    """The parquet file (or folder of a partitioned one) at `path`; needs pyarrow."""
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise BadInput(
            "data.source = 'parquet' needs pyarrow: pip install 'latecomer[parquet]'"
        ) from None
    return _read(path, options, lambda: pd.read_parquet(path, dtype_backend="numpy_nullable"))


def _read(path: Path, options: SourceOptions, read: Callable[[], pd.DataFrame]) -> Dataset:
    found = contents(read_table(path, read), options, str(path))
    return Dataset(
        x=found.x,
        y=found.y,
        subject=found.subject,
        class_names=found.target_names,
        notes=found.notes,
        where=str(path),
    )


def contents(table: pd.DataFrame, options: SourceOptions, where: str) -> TableContents:
    """Inputs, targets and subjects of a table, by the columns that the options name.

    Rows without a target are left out. Inputs are all columns, or `options.columns`, except those
    of target and subject and `options.ignore`. A column of text becomes one column of 0 and 1 per
    value. A single column of lists holds whole examples.
    """
    if not len(table):
        raise BadInput(f"{where}: the table has no rows; expected one example per row")
    table = table.rename(columns=str)
    targets = [options.target] if isinstance(options.target, str) else list(options.target)
    for key, names in {
        "target": targets,
        "subject": [options.subject] if options.subject else [],
        "columns": options.columns,
        "ignore": options.ignore,
    }.items():
        _check_columns(where, f"data.{key}", names, list(table.columns))
    if not targets:
        raise BadInput(f"{where}: data.target names no column; name the one to predict")
    kept = table[targets].notna().any(axis=1).to_numpy()
    if not kept.any():
        raise BadInput(f"{where}: the target {', '.join(targets)} is missing in every row")
    rows = table[kept]
    left_out = {*targets, options.subject, *options.ignore}
    inputs = [name for name in options.columns or table.columns if name not in left_out]
    if not inputs:
        raise BadInput(f"{where}: no column is left for the inputs")
    x, notes = _inputs(where, rows, inputs)
    if dropped := int((~kept).sum()):
        notes = [f"{dropped} of {len(table)} rows have no target and are dropped", *notes]
    return TableContents(
        x=x,
        y=_targets(where, rows, targets, partly_missing=not kept.all()),
        subject=_subjects(where, rows, options.subject) if options.subject else None,
        target_names=tuple(targets) if len(targets) > 1 else (),
        kept=kept,
        notes=tuple(notes),
    )


def _check_columns(where: str, key: str, names: Iterable[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            more = len(known) - MAX_LISTED
            listed = ", ".join(known[:MAX_LISTED]) + (f" and {more} more" if more > 0 else "")
            raise BadInput(
                f"{where}: no column {name!r} for {key}{did_you_mean(name, known)}"
                f" (columns: {listed})"
            )


def _targets(
    where: str, rows: pd.DataFrame, names: Sequence[str], partly_missing: bool
) -> NDArray[Any]:
    if len(names) > 1:
        for name in names:
            if not _numeric(rows[name]):
                raise BadInput(f"{where}: target {name!r} holds text; several targets are numbers")
        return np.stack([_floats(rows[name]) for name in names], axis=1)
    values = rows[names[0]]
    if pd.api.types.is_bool_dtype(values) or pd.api.types.is_integer_dtype(values):
        return values.to_numpy(dtype=np.bool_ if pd.api.types.is_bool_dtype(values) else np.int64)
    if pd.api.types.is_float_dtype(values):
        floats = values.to_numpy(dtype=np.float64)
        # Integers with gaps are read as floats.
        whole = partly_missing and (floats == np.round(floats)).all()
        return floats.astype(np.int64) if whole else floats
    if _lists(values):
        return _stacked(where, "y", values)
    return values.astype(str).to_numpy(dtype=np.str_)


def _inputs(where: str, rows: pd.DataFrame, names: Sequence[str]) -> tuple[NDArray[Any], list[str]]:
    if len(names) == 1 and _lists(rows[names[0]]):
        return _stacked(where, "x", rows[names[0]]), []
    columns, encoded = [], []
    for name in names:
        values = rows[name]
        if _numeric(values):
            columns.append(_floats(values)[:, np.newaxis])
            continue
        if _lists(values) or pd.api.types.is_datetime64_any_dtype(values):
            kind = "lists" if _lists(values) else "times"
            raise BadInput(f"{where}: column {name!r} holds {kind}; leave it out with data.ignore")
        present = values.notna().to_numpy()
        text = values.astype(str).to_numpy(dtype=np.str_)
        categories = np.unique(text[present])
        if len(categories) > MAX_CATEGORIES:
            raise BadInput(
                f"{where}: column {name!r} has {len(categories)} different texts, allowed are"
                f" {MAX_CATEGORIES}; leave it out with data.ignore"
            )
        columns.append((text[:, np.newaxis] == categories) & present[:, np.newaxis])
        encoded.append(f"{name} ({len(categories)})")
    x = np.concatenate(columns, axis=1).astype(np.float32)
    observed = ~np.isnan(x).all(axis=0)
    notes = [f"one column of 0 and 1 per text: {', '.join(encoded)}"] if encoded else []
    if empty := int((~observed).sum()):
        notes.append(f"{empty} columns have no value in any row and are dropped")
    return x[:, observed], notes


def _subjects(where: str, rows: pd.DataFrame, name: str) -> NDArray[Any]:
    values = rows[name]
    if missing := int(values.isna().sum()):
        raise BadInput(f"{where}: {missing} rows have no {name!r}, which names their device")
    if pd.api.types.is_integer_dtype(values):
        return values.to_numpy(dtype=np.int64)
    return values.astype(str).to_numpy(dtype=np.str_)


def _numeric(values: "pd.Series[Any]") -> bool:
    return pd.api.types.is_numeric_dtype(values) or pd.api.types.is_bool_dtype(values)


def _floats(values: "pd.Series[Any]") -> NDArray[np.float32]:
    with np.errstate(over="ignore"):
        return values.to_numpy(dtype=np.float64, na_value=np.nan).astype(np.float32)


def _lists(values: "pd.Series[Any]") -> bool:
    """Whether the values are arrays or lists, by the first of them."""
    return len(values) > 0 and isinstance(values.iloc[0], list | tuple | np.ndarray)


def _stacked(where: str, name: str, values: "pd.Series[Any]") -> NDArray[Any]:
    # Arrays of arrays, as pyarrow returns nested lists, become plain lists first.
    return as_array(where, name, [np.asarray(value).tolist() for value in values])
