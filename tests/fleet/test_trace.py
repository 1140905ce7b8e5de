"""Traces: what the columns mean, and one line for every bad file."""

from math import inf
from pathlib import Path

import pytest

from latecomer.errors import BadInput
from latecomer.fleet.profile import DeviceProfile
from latecomer.fleet.trace import read_trace


def write(folder: Path, text: str) -> str:
    path = folder / "trace.csv"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_missing_columns_and_empty_cells_take_the_defaults(tmp_path: Path) -> None:
    path = write(tmp_path, "device,seconds_per_task,up\n0,3,\n1,,250\n\n2\n")
    assert read_trace(path)[0] == (
        DeviceProfile(seconds_per_task=3),
        DeviceProfile(up=250),
        DeviceProfile(),
    )


def test_every_column_is_read(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "group,device,seconds_per_example,seconds_per_task,down,up,latency,jitter,dropout,crash,"
        "restart_seconds,detect_seconds,period,window_start,window_end\n"
        "pi, 0 ,0.5,2,inf,9,0.1,0.2,0.01,0.02,5,6,100,90,120\n",
    )
    assert read_trace(path)[0] == (
        DeviceProfile(0.5, 2, inf, 9, 0.1, 0.2, ((90, 120),), 100, 0.01, 0.02, 5, 6, "pi"),
    )


def test_rows_of_one_device_add_windows_in_any_order_of_ids(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "\ufeffdevice,up,period,window_start,window_end\n1,5,,0,10\n0,7,,,\n1,,50,20,30\n1,5.0,,,\n",
    )
    assert read_trace(path)[0] == (
        DeviceProfile(up=7),
        DeviceProfile(up=5, period=50, windows=((0, 10), (20, 30))),
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "empty; a header"),
        ("\n\n", "empty; a header"),
        ("device,up\n", "no devices"),
        ("up\n5\n", "column 'device' is missing"),
        ("device,lattency\n0,1\n", "column 'lattency' is unknown; did you mean 'latency'?"),
        ("device,qqq\n0,1\n", "column 'qqq' is unknown (allowed: device, "),
        ("device,up,up\n0,1,2\n", "column 'up' occurs twice"),
        ("device\nx\n", "row 2, column device = 'x': allowed is a whole number from 0"),
        ("device\n0\n1.0\n", "row 3, column device = '1.0'"),
        ("device\n-1\n", "row 2, column device = '-1'"),
        ("device,up\n,5\n", "row 2, column device = ''"),
        ("device\n0\n2\n", "column device: 1 is missing; the 2 ids must be 0 to 1"),
        ("device\n1\n", "column device: 0 is missing; the 1 ids must be 0 to 0"),
        ("device,up\n0,fast\n", "row 2, column up = 'fast': allowed is a number"),
        ("device,up\n0,0\n", "row 2, column up = 0.0: allowed is above 0"),
        ("device,latency\n0,1\n\n1,-2\n", "row 4, column latency = -2.0: allowed is 0 or more"),
        ("device,latency\n0,nan\n", "row 2, column latency = nan"),
        ("device,crash\n0,2\n", "row 2, column crash = 2.0: allowed is 0 to 1"),
        ("device,up\n0,1,2\n", "row 2: 3 cells; allowed are at most 2"),
        ("device,window_start,window_end\n0,5,5\n", "row 2, column window_end = 5.0: allowed"),
        ("device,window_start,window_end\n0,7,5\n", "row 2, column window_end = 5.0: allowed"),
        ("device,window_start,window_end\n0,-7,5\n", "row 2, column window_start = -7.0"),
        ("device,window_start,window_end\n0,7,\n", "row 2, column window_end = '': allowed is a"),
        ("device,window_start\n0,7\n", "row 2, column window_end = ''"),
        ("device,period,window_start,window_end\n0,50,60,70\n", "row 2, column window_start = 60"),
        ("device,up\n0,5\n0,6\n", "row 3, column up = '6': an earlier row of this device has 5"),
        ("device,group\n0,a\n0,b\n", "row 3, column group = 'b': an earlier row"),
        ('device,group\n0,"a\n', "not a CSV file"),
    ],
)
def test_a_bad_file_is_refused_in_one_line(tmp_path: Path, text: str, words: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(BadInput) as caught:
        read_trace(path)
    message = str(caught.value)
    assert words in message
    assert path in message
    assert "\n" not in message


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"fleet.path = .*No such file"):
        read_trace(str(tmp_path / "none.csv"))
    with pytest.raises(BadInput, match=r"fleet.path = .*a folder needs a file"):
        read_trace(str(tmp_path))
    with pytest.raises(BadInput, match="needs the path of a CSV file"):
        read_trace("")
    binary = tmp_path / "binary.csv"
    binary.write_bytes(b"device\n\xff\xfe\n")
    with pytest.raises(BadInput, match="not a CSV file in UTF-8"):
        read_trace(str(binary))
