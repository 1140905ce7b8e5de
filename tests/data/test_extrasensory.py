import gzip
from pathlib import Path

import numpy as np
import pytest

from latecomer.data.dataset import SourceOptions
from latecomer.data.extrasensory import COLUMNS, MAIN_ACTIVITIES, PAPER_SENSORS, SENSORS
from latecomer.data.sources import load_dataset
from latecomer.errors import BadInput

# How many columns the published files have of each sensor.
WIDTHS = {
    "raw_acc": 26,
    "proc_gyro": 26,
    "raw_magnet": 31,
    "watch_acceleration": 46,
    "watch_heading": 9,
    "location": 11,
    "location_quick_features": 6,
    "audio_naive": 26,
    "audio_properties": 2,
    "discrete": 26,
    "lf_measurements": 8,
    "discrete:time_of_day": 8,
}
FEATURES = [f"{block}:f{i}" for block, width in WIDTHS.items() for i in range(width)]
LABELS = [*MAIN_ACTIVITIES, "OR_indoors", *(f"OTHER_{i}" for i in range(44))]
HEADER = ["timestamp", *FEATURES, *(f"label:{name}" for name in LABELS), "label_source"]


def row(time: int, value: float, labels: dict[str, str], missing: str) -> list[str]:
    values = [labels.get(name, missing) for name in LABELS]
    return [str(time), *([str(value)] * (len(FEATURES) - 1)), missing, *values, "2"]


def write(folder: Path, user: str, rows: list[list[str]], header: list[str] = HEADER) -> Path:
    path = folder / f"{user}.features_labels.csv.gz"
    with gzip.open(path, "wt") as file:
        file.write("\n".join(",".join(line) for line in [header, *rows]) + "\n")
    return path


def two_users(folder: Path, missing: str = "nan") -> None:
    sitting, walking = {"SITTING": "1", "LYING_DOWN": "0"}, {"FIX_walking": "1"}
    write(
        folder,
        "B",
        [
            row(30, 3, walking, missing),
            row(10, 1, sitting, missing),
            row(20, 2, {"SITTING": "0"}, missing),
        ],
    )
    both = sitting | walking | {"OR_indoors": "1"}
    write(
        folder, "A", [row(1, 5, walking | {"OR_indoors": "0"}, missing), row(2, 6, both, missing)]
    )
    write(folder, "C", [row(1, 7, {}, missing)])


def test_the_layout_is_the_published_one() -> None:
    assert len(HEADER) == COLUMNS == 278
    assert len(LABELS) == 51
    assert sum(WIDTHS[SENSORS[sensor]] for sensor in PAPER_SENSORS) == 161


@pytest.mark.parametrize("missing", ["nan", ""])
def test_six_exclusive_labels(tmp_path: Path, missing: str) -> None:
    two_users(tmp_path, missing)
    data = load_dataset("extrasensory", str(tmp_path))
    assert data.class_names == MAIN_ACTIVITIES
    assert data.subject is not None
    assert data.subject.tolist() == ["A", "B", "B"]
    # In order of time, for any order in the file.
    assert data.x[:, 0].tolist() == [5, 1, 3]
    assert [data.class_names[label] for label in data.y] == [
        "FIX_walking",
        "SITTING",
        "FIX_walking",
    ]
    assert data.x.shape == (3, 161)
    assert data.notes == (
        "2 of 6 rows have no label and are dropped",
        "1 of 6 rows have several labels and are dropped",
        "1 of 3 users have no labelled row: C",
    )


def test_one_label_as_a_task(tmp_path: Path) -> None:
    two_users(tmp_path)
    data = load_dataset("extrasensory", str(tmp_path), SourceOptions(label="OR_indoors"))
    assert data.class_names == ("not OR_indoors", "OR_indoors")
    assert data.y.tolist() == [0, 1]


def test_all_labels_at_once(tmp_path: Path) -> None:
    two_users(tmp_path)
    data = load_dataset("extrasensory", str(tmp_path), SourceOptions(label="all"))
    assert data.class_names == tuple(LABELS)
    assert data.y.shape == (5, 51)
    assert data.subject is not None
    assert data.subject.tolist() == ["A", "A", "B", "B", "B"]
    walking, indoors = LABELS.index("FIX_walking"), LABELS.index("OR_indoors")
    np.testing.assert_array_equal(data.y[:, walking], [1, 1, np.nan, np.nan, 1])
    np.testing.assert_array_equal(data.y[:, indoors], [0, 1, np.nan, np.nan, np.nan])
    assert data.notes[0] == "1 of 6 rows have no label and are dropped"


def test_a_choice_of_sensors(tmp_path: Path) -> None:
    two_users(tmp_path)
    options = SourceOptions(sensors=("watch-compass", "time-of-day"))
    data = load_dataset("extrasensory", str(tmp_path), options)
    # The last feature has no value in any row.
    assert data.x.shape == (3, 9 + 8 - 1)
    assert any("1 features have no value" in note for note in data.notes)


def test_missing_values_stay_missing(tmp_path: Path) -> None:
    write(tmp_path, "A", [row(1, 1, {"SITTING": "1"}, ""), row(2, 2, {"BICYCLING": "1"}, "nan")])
    packed = (tmp_path / "A.features_labels.csv.gz").read_bytes()
    text = gzip.decompress(packed).decode().splitlines()
    fields = text[1].split(",")
    fields[1], fields[2] = "nan", ""
    write(tmp_path, "A", [fields, text[2].split(",")])
    data = load_dataset("extrasensory", str(tmp_path))
    assert np.isnan(data.x[0, :2]).all()
    assert not np.isnan(data.x[1]).any()


def test_bad_folders_and_files(tmp_path: Path) -> None:
    def complaint(options: SourceOptions | None = None) -> str:
        with pytest.raises(BadInput) as caught:
            load_dataset("extrasensory", str(tmp_path), options)
        return str(caught.value)

    assert "no file ends in .features_labels.csv.gz" in complaint()
    path = write(tmp_path, "A", [["1"] * 277], HEADER[:-1])
    assert "277 columns from 'timestamp'" in complaint()
    two_users(tmp_path)
    assert "did you mean 'gyroscope'" in complaint(SourceOptions(sensors=("gyroscop",)))
    assert "did you mean 'OR_indoors'" in complaint(SourceOptions(label="OR_indoor"))
    renamed = ["timestamp", *FEATURES, "label:STRANGE", *HEADER[227:]]
    write(tmp_path, "Z", [row(1, 1, {}, "")], renamed)
    assert "unknown column 'label:STRANGE'" in complaint()
    (tmp_path / "Z.features_labels.csv.gz").unlink()
    write(tmp_path, "A", [row(1, 1, {"SITTING": "2"}, "")])
    assert "neither 0, 1 nor missing" in complaint()
    write(tmp_path, "A", [["1", "high", *row(1, 1, {}, "")[2:]]])
    assert "'raw_acc:f0' holds text" in complaint()
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert "A.features_labels.csv.gz: cannot be read" in complaint()
    with pytest.raises(BadInput, match="is a file"):
        load_dataset("extrasensory", str(path))
