from pathlib import Path

import numpy as np
import pytest

from latecomer.data.dataset import SourceOptions
from latecomer.data.sources import load_dataset
from latecomer.data.uci_har import FEATURES, SAMPLES, SIGNALS
from latecomer.errors import BadInput

NAMES = ("WALKING", "WALKING_UPSTAIRS", "WALKING_DOWNSTAIRS", "SITTING", "STANDING", "LAYING")


def spelled(values: np.ndarray, end: str) -> str:
    """As in the published files: `  2.8858451e-001 -2.0294171e-002`."""
    rows = []
    for row in values:
        numbers = (f"{value: .7e}" for value in row)
        rows.append(" ".join(n.replace("e-0", "e-00").replace("e+0", "e+00") for n in numbers))
    return end.join(rows) + end


def write(folder: Path, rows: dict[str, int], end: str = "\n") -> dict[str, np.ndarray]:
    root = folder / "UCI HAR Dataset"
    root.mkdir()
    names = end.join(f"{i + 1} {name}" for i, name in enumerate(NAMES)) + end
    (root / "activity_labels.txt").write_text(names, newline="")
    rng = np.random.default_rng(0)
    made = {}
    for split, n in rows.items():
        signals = root / split / "Inertial Signals"
        signals.mkdir(parents=True)
        x = made[f"x_{split}"] = rng.uniform(-1, 1, (n, FEATURES)).astype(np.float32)
        (root / split / f"X_{split}.txt").write_text(spelled(x, end), newline="")
        for what, values in (("y", np.arange(n) % 6 + 1), ("subject", np.arange(n) // 3 + 1)):
            text = end.join(map(str, values)) + end
            (root / split / f"{what}_{split}.txt").write_text(text, newline="")
        for signal in SIGNALS:
            wave = made[f"{signal}_{split}"] = rng.normal(size=(n, SAMPLES)).astype(np.float32)
            (signals / f"{signal}_{split}.txt").write_text(spelled(wave, end), newline="")
    return made


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_features(tmp_path: Path, end: str) -> None:
    made = write(tmp_path, {"train": 12, "test": 6}, end)
    data = load_dataset("uci-har", str(tmp_path))
    expected = np.concatenate([made["x_train"], made["x_test"]])
    np.testing.assert_allclose(data.x, expected, rtol=1e-6)
    assert data.class_names == NAMES
    assert data.y.tolist() == [i % 6 for i in range(12)] + list(range(6))
    assert data.subject is not None
    assert data.subject.tolist()[:4] == [1, 1, 1, 2]
    assert data.test is not None
    assert data.test.sum() == 6
    assert data.notes == (
        "UCI HAR: 12 training and 6 test rows; the published files have 7352 and 2947",
    )


def test_inertial_windows(tmp_path: Path) -> None:
    made = write(tmp_path, {"train": 6, "test": 6})
    data = load_dataset(
        "uci-har", str(tmp_path / "UCI HAR Dataset"), SourceOptions(variant="inertial")
    )
    assert data.x.shape == (12, SAMPLES, 9)
    np.testing.assert_allclose(data.x[:6, :, 3], made["body_gyro_x_train"], rtol=1e-6)


def cut_last_row(path: Path) -> None:
    path.write_text(path.read_text()[:-200])


def drop_last_row(path: Path) -> None:
    path.write_text("\n".join(path.read_text().splitlines()[:-1]) + "\n")


def label_nine(path: Path) -> None:
    path.write_text("9\n" + path.read_text())


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("train/X_train.txt", cut_last_row, "row 6 has fewer than 561 numbers; is the file trunc"),
        ("train/X_train.txt", drop_last_row, "X has 5 rows and y has 6"),
        ("train/X_train.txt", Path.unlink, "X_train.txt: no such file"),
        ("test/y_test.txt", label_nine, "row 1 is 9; allowed are 1 to 6"),
        ("test/subject_test.txt", drop_last_row, "subject has 5 rows and y has 6"),
        ("activity_labels.txt", Path.unlink, "expected the folder of UCI HAR"),
        ("activity_labels.txt", label_nine, "numbered from 1"),
    ],
)
def test_damaged_files(tmp_path: Path, name: str, damage: object, message: str) -> None:
    write(tmp_path, {"train": 6, "test": 6})
    damage(tmp_path / "UCI HAR Dataset" / name)  # type: ignore[operator]
    with pytest.raises(BadInput, match=message):
        load_dataset("uci-har", str(tmp_path))


def test_signals_of_different_length(tmp_path: Path) -> None:
    write(tmp_path, {"train": 6, "test": 6})
    drop_last_row(
        tmp_path / "UCI HAR Dataset" / "train" / "Inertial Signals" / "body_acc_x_train.txt"
    )
    with pytest.raises(BadInput, match="differ in length"):
        load_dataset("uci-har", str(tmp_path), SourceOptions(variant="inertial"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (SourceOptions(variant="inertia"), "did you mean 'inertial'"),
        (SourceOptions(sensors=("hand",)), "'uci-har' has no option data.sensors; allowed: data.v"),
    ],
)
def test_options(tmp_path: Path, options: SourceOptions, message: str) -> None:
    write(tmp_path, {"train": 6, "test": 6})
    with pytest.raises(BadInput, match=message):
        load_dataset("uci-har", str(tmp_path), options)
