from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from latecomer.data.dataset import SourceOptions
from latecomer.data.frames import contents, read_csv
from latecomer.data.sources import load_dataset
from latecomer.errors import BadInput

TEXT = """id,age,city,member,who,label
1,30,Rome,true,a,walk
2,,Oslo,false,a,run
3,50,Rome,,b,walk
4,60,,true,b,
5,70,Oslo,true,c,run
"""


def write(folder: Path, text: str = TEXT, name: str = "t.csv") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def options(**given: Any) -> SourceOptions:
    return SourceOptions(**given)


def test_csv_with_text_and_gaps(tmp_path: Path) -> None:
    data = read_csv(write(tmp_path), options(subject="who", ignore=("id",)))
    nan = np.nan
    # age, city Oslo, city Rome, member
    np.testing.assert_array_equal(
        data.x, [[30, 0, 1, 1], [nan, 1, 0, 0], [50, 0, 1, nan], [70, 1, 0, 1]]
    )
    assert (data.class_names, data.y.tolist()) == (("run", "walk"), [1, 0, 1, 0])
    assert data.subject is not None
    assert data.subject.tolist() == ["a", "a", "b", "c"]
    assert data.notes == (
        "1 of 5 rows have no target and are dropped",
        "one column of 0 and 1 per text: city (2)",
    )


def test_columns_choose_the_inputs(tmp_path: Path) -> None:
    data = read_csv(write(tmp_path), options(columns=("age", "id")))
    assert data.x[0].tolist() == [30, 1]


@pytest.mark.parametrize(
    ("column", "kind", "shape"),
    [("1,2,3,1", "i", (4,)), ("1.0,2.5,3,1", "f", (4,)), ("1.0,2.0,3.0,1.0", "f", (4,))],
)
def test_the_type_of_the_target_is_kept(
    tmp_path: Path, column: str, kind: str, shape: tuple[int, ...]
) -> None:
    rows = "\n".join(f"{i},{value}" for i, value in enumerate(column.split(",")))
    data = read_csv(write(tmp_path, f"x,y\n{rows}\n"), options(target="y"))
    assert (data.y.dtype.kind, data.y.shape) == (kind, shape)


def test_integer_labels_with_gaps_stay_labels() -> None:
    table = pd.DataFrame({"x": [1.0, 2.0, 3.0], "label": [1.0, np.nan, 7.0]})
    found = contents(table, options(), "here")
    assert (found.y.dtype.kind, found.y.tolist()) == ("i", [1, 7])


def test_several_targets_are_numbers_with_gaps() -> None:
    table = pd.DataFrame({"x": [1.0, 2.0, 3.0], "a": [1, 0, 1], "b": [0.0, np.nan, 1.0]})
    found = contents(table, options(target=("a", "b")), "here")
    np.testing.assert_array_equal(found.y, [[1, 0], [0, np.nan], [1, 1]])
    assert found.target_names == ("a", "b")


def test_a_column_of_lists_holds_whole_examples() -> None:
    table = pd.DataFrame({"tokens": [[1, 2], [3, 4]], "next": [[2, 5], [4, 5]]})
    found = contents(table, options(target="next"), "here")
    assert (found.x.dtype.kind, found.x.tolist()) == ("i", [[1, 2], [3, 4]])
    assert found.y.tolist() == [[2, 5], [4, 5]]


def test_parquet_is_read_like_csv(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    path = write(tmp_path)
    table = pd.read_csv(path)
    table.to_parquet(tmp_path / "t.parquet")
    given = options(subject="who", ignore=("id",))
    one, other = read_csv(path, given), load_dataset("parquet", str(tmp_path / "t.parquet"), given)
    np.testing.assert_array_equal(one.x, other.x)
    np.testing.assert_array_equal(one.y, other.y)
    assert one.class_names == other.class_names
    (tmp_path / "bad.parquet").write_bytes(b"PAR1")
    with pytest.raises(BadInput, match=r"bad.parquet: cannot be read"):
        load_dataset("parquet", str(tmp_path / "bad.parquet"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"target": "lable"}, "no column 'lable' for data.target; did you mean 'label'"),
        ({"subject": "whom"}, "no column 'whom' for data.subject; did you mean 'who'"),
        ({"columns": ("ages",)}, "no column 'ages' for data.columns; did you mean 'age'"),
        ({"ignore": ("x",)}, r"no column 'x' for data.ignore \(columns: id, age, city"),
        ({"columns": ("label",)}, "no column is left for the inputs"),
        ({"target": ("label", "age")}, "target 'label' holds text"),
        ({"subject": "city"}, "1 rows have no 'city', which names their device"),
        ({"target": ()}, "data.target names no column"),
    ],
)
def test_bad_options(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    text = TEXT.replace("4,60,,true,b,", "4,60,,true,b,walk")
    with pytest.raises(BadInput, match=message) as caught:
        read_csv(write(tmp_path, text), options(**given))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,label\n1,x\n2,y,3\n", "cannot be read .*Expected 2 fields in line 3, saw 3"),
        ("", "the file is empty"),
        ("a,label\n", "the table has no rows"),
        ("a,label\n1,\n2,\n", "the target label is missing in every row"),
        ("a,label\n" + "".join(f"t{i},{i % 2}\n" for i in range(60)), "60 different texts"),
        ("a,label\n1,5\n2,5\n", "every label is 5"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(BadInput, match=message) as caught:
        read_csv(write(tmp_path, text), options())
    assert "\n" not in str(caught.value)
