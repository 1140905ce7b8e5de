from pathlib import Path

import numpy as np
import pytest

from latecomer.data.dataset import SourceOptions
from latecomer.data.pamap2 import ACTIVITIES
from latecomer.data.sources import load_dataset
from latecomer.errors import BadInput


def line(i: int, activity: int, heart: str = "NaN", width: int = 54) -> str:
    """Column k of row i holds i + k / 100, a NaN in the invalid orientation."""
    values = [f"{i + k / 100:.2f}" for k in range(54)]
    values[1], values[2], values[16] = str(activity), heart, "NaN"
    return " ".join(values[:width])


def write(folder: Path, subject: int, lines: list[str], part: str = "Protocol") -> Path:
    path = folder / "PAMAP2_Dataset" / part / f"subject{subject}.dat"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path


def two_subjects(folder: Path) -> None:
    stretches = [(0, 3), (1, 9), (0, 2), (4, 6), (12, 3)]
    activities = [activity for activity, n in stretches for _ in range(n)]
    hearts = {5: "100", 14: "120"}
    lines = [line(i, a, hearts.get(i, "NaN")) for i, a in enumerate(activities)]
    write(folder, 101, lines)
    write(folder, 102, [line(i, 4, "90") for i in range(8)])
    write(folder, 103, [line(i, 0, "90") for i in range(8)])
    write(folder, 101, [line(i, 9, "70") for i in range(4)], "Optional")


SHORT = SourceOptions(length=4, step=2)


def test_windows_of_one_activity(tmp_path: Path) -> None:
    two_subjects(tmp_path)
    data = load_dataset("pamap2", str(tmp_path), SHORT)
    assert data.x.shape == (3 + 2 + 3, 4, 31)
    assert data.class_names == ("lying", "walking")
    assert data.y.tolist() == [0] * 3 + [1] * 5
    assert data.subject is not None
    assert data.subject.tolist() == ["101"] * 5 + ["102"] * 3
    # The second window of lying begins 2 rows after the first, which follows 3 rows of nothing.
    assert data.x[1, 0, 1] == pytest.approx(5.03)
    assert data.notes == (
        "13 of 39 rows are in no window: no activity",
        "4 of 39 rows are in no window: the rest of a stretch, shorter than a window",
        "1 of 3 subjects have no window: 103",
    )


def test_the_heart_rate_is_held(tmp_path: Path) -> None:
    two_subjects(tmp_path)
    data = load_dataset("pamap2", str(tmp_path), SHORT)
    assert data.x[0, :, 0].tolist() == [100] * 4  # rows 3 to 6, the first beat is at 5
    assert data.x[3, :, 0].tolist() == [120] * 4  # rows 14 to 17


def test_choices(tmp_path: Path) -> None:
    two_subjects(tmp_path)
    options = SourceOptions("both", ("chest",), activities=(4, 9), length=4)
    data = load_dataset("pamap2", str(tmp_path / "PAMAP2_Dataset"), options)
    assert data.class_names == ("walking", "watching TV")
    assert data.x.shape[1:] == (4, 10)
    assert data.x[0, 0, 0] == pytest.approx(14.2)  # row 14, column 21 of the published table
    assert "12 of 43 rows are in no window: an activity not in data.activities" in data.notes


def test_no_orientation_and_no_saturated_acceleration(tmp_path: Path) -> None:
    two_subjects(tmp_path)
    data = load_dataset("pamap2", str(tmp_path), SourceOptions(sensors=("hand",), length=4, step=2))
    columns = np.round((data.x[0, 0] - data.x[0, 0, 0]) * 100).astype(int)
    assert columns.tolist() == [0, 1, 2, 3, 7, 8, 9, 10, 11, 12]
    assert not np.isnan(data.x).any()


def test_the_table_of_activities() -> None:
    assert len(ACTIVITIES) == 18
    assert list(ACTIVITIES) == sorted(ACTIVITIES)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (SourceOptions(variant="all"), "data.variant 'all' is unknown"),
        (SourceOptions(sensors=("wrist",)), "data.sensors 'wrist' is unknown"),
        (SourceOptions(activities=(8,)), "data.activities holds 8; allowed are 1, 2"),
        (SourceOptions(length=400), "no window of 400 samples"),
        (SourceOptions(length=4, step=-1), "must be 1 or more"),
        (SourceOptions(label="x"), "'pamap2' has no option data.label"),
    ],
)
def test_bad_options(tmp_path: Path, options: SourceOptions, message: str) -> None:
    two_subjects(tmp_path)
    with pytest.raises(BadInput, match=message):
        load_dataset("pamap2", str(tmp_path), options)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([line(0, 4), line(1, 4, width=20)], "last line has 20 values, expected 54; is it trunc"),
        ([line(0, 4) + " 1", line(1, 4) + " 1"], "last line has 55 values"),
        ([line(0, 8), line(1, 4)], "row 1 has the unknown activity 8"),
        ([line(0, 4), "x" + line(1, 4)], "cannot be read|number|no window"),
    ],
)
def test_damaged_files(tmp_path: Path, lines: list[str], message: str) -> None:
    write(tmp_path, 101, lines)
    with pytest.raises(BadInput, match=message):
        load_dataset("pamap2", str(tmp_path), SHORT)


def test_a_wrong_folder(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="there is no Protocol"):
        load_dataset("pamap2", str(tmp_path))
    (tmp_path / "Protocol").mkdir()
    with pytest.raises(BadInput, match=r"no subject10N\.dat"):
        load_dataset("pamap2", str(tmp_path))
