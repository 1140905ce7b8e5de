"""`latecomer data`: what was loaded, in numbers that can be checked by hand."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from latecomer.errors import BadInput
from latecomer.study.config import parse
from latecomer.study.data_view import DataView, data_view, write_picture

X = np.arange(60, dtype=np.float32).reshape(30, 2)


def view(folder: Path, arrays: dict[str, Any], **tables: Any) -> DataView:
    np.savez(folder / "a.npz", **arrays)
    data = {"source": "npz", "path": str(folder / "a.npz"), "partition": "by-subject"}
    return data_view(parse({**tables, "data": {**data, **tables.get("data", {})}}))


def text(found: DataView) -> str:
    return "\n".join(found.lines())


def test_classes_devices_late_and_missing(tmp_path: Path) -> None:
    x = X.copy()
    x[0, 0] = np.nan
    arrays = {
        "x": x,
        "y": np.array(["walk"] * 12 + ["run"] * 18),
        "subject": np.array([1] * 10 + [2] * 15 + [3] * 5),
    }
    found = view(
        tmp_path,
        arrays,
        data={"augment": "base"},
        fleet={"late": {"classes": [1], "devices": 1, "delay": 5}},
    )
    assert found.row_names == ("run", "walk")
    assert found.counts.tolist() == [[0, 13, 5], [10, 2, 0]]
    assert found.late == (0,)
    shown = text(found)
    for part in (
        "examples   30",
        "inputs     (2) numbers",
        "missing    1 values of the inputs (1.67%)",
        "targets    2 classes",
        "devices    3 (by-subject), examples: min 5, median 10, max 15",
        "  0 late  " + "█" * 27 + " 10",
        "  1       " + "█" * 40 + " 15",
        "  walk  " + "█" * 27 + " 12",
        "  device 0: walk (10)",
    ):
        assert part in shown


@pytest.mark.parametrize(
    ("y", "loss", "wanted"),
    [
        (np.arange(30) / 10, "mse", ["numbers of shape (n): mean 1.45", "examples by target"]),
        (
            np.where(np.arange(60).reshape(30, 2) % 4 == 0, np.nan, 1.0),
            "binary-cross-entropy",
            ["2 labels: 100.0% of the known are 1, 25.0% missing", "examples with each label\n  0"],
        ),
        (np.arange(60).reshape(30, 2), "cross-entropy", ["(n, 2), 60 different tokens"]),
    ],
)
def test_other_targets(tmp_path: Path, y: Any, loss: str, wanted: list[str]) -> None:
    arrays = {"x": X, "y": y, "subject": np.arange(30) // 10}
    shown = text(view(tmp_path, arrays, objective={"loss": loss}))
    for part in wanted:
        assert part in shown


def test_many_devices_are_a_histogram_and_rare_classes_are_gone(tmp_path: Path) -> None:
    x = np.ones((100, 1), dtype=np.float32)
    arrays = {"x": x, "y": np.array([0] * 49 + [1] * 49 + [2] * 2), "subject": np.arange(100) // 2}
    found = view(tmp_path, arrays, data={"min_examples": 5})
    assert found.counts.sum(axis=1).tolist() == [49, 49]
    shown = text(found)
    assert "dropped: 2 (2)" in shown
    bars = shown.partition("examples of each device\n")[2].splitlines()
    assert [bar.split()[0] for bar in bars] == ["2"]
    assert bars[0].endswith(" 49 devices")


def test_bins_of_many_devices_do_not_overlap(tmp_path: Path) -> None:
    subject = np.repeat(np.arange(30), np.arange(1, 31))
    arrays = {"x": np.ones((len(subject), 1)), "y": np.arange(len(subject)) % 2}
    shown = text(view(tmp_path, {**arrays, "subject": subject}))
    bars = shown.partition("examples of each device\n")[2].splitlines()
    assert [bar.partition("█")[0].strip() for bar in bars] == [
        f"{n} to {n + 2}" for n in range(1, 31, 3)
    ]
    assert all(bar.endswith(" 3 devices") for bar in bars)


def test_stored_inputs_are_not_read(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X)
    np.save(tmp_path / "y.npy", np.arange(30) % 2)
    data = {"source": "npz", "path": str(tmp_path), "partition": "iid"}
    found = data_view(parse({"data": data, "fleet": {"devices": 3}}))
    assert "read by row when they are used" in text(found)


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    arrays = {"x": X, "y": np.arange(30) % 3, "subject": np.arange(30) // 10}
    late = {"late": {"classes": [1], "devices": 1, "delay": 5}}
    found = view(tmp_path, arrays, fleet=late)
    assert write_picture(found, tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(BadInput, match=r"a.jpg: must end in .png, .svg, .pdf"):
        write_picture(found, tmp_path / "a.jpg")
    with pytest.raises(BadInput, match="cannot be written"):
        write_picture(found, tmp_path / "no" / "a.png")
