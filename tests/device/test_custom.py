from itertools import count
from pathlib import Path

import pytest
from torch import nn

from latecomer.device.models import build_model
from latecomer.errors import BadInput

SOURCE = """
from torch import nn

def by_name(num_classes, input_shape, depth=1):
    assert depth == 1
    return nn.Linear(input_shape[0], num_classes)

def by_position(shape, classes):
    return nn.Linear(shape[0], classes)

def one_name(*, num_classes):
    return nn.Linear(4, num_classes)

def nothing(depth=1, bias=True):
    assert depth == 1
    return nn.Linear(4, 3)

def narrow(input_shape, num_classes, width=1.0):
    hidden = int(8 * width)
    return nn.Sequential(nn.Linear(4, hidden), nn.Linear(hidden, num_classes))

class Net(nn.Linear):
    def __init__(self):
        super().__init__(4, 3)

def too_many(a, b, c):
    return None

def broken():
    raise RuntimeError("out of cheese\\nand more")

def wrong():
    return 3

number = 3
"""

names = (f"nets_of_test_{number}" for number in count())


@pytest.fixture
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = next(names)
    (tmp_path / f"{name}.py").write_text(SOURCE)
    (tmp_path / f"{name}_bad.py").write_text("import no_such_thing_at_all")
    monkeypatch.chdir(tmp_path)
    return name


@pytest.mark.parametrize(
    "callable_name", ["by_name", "by_position", "one_name", "nothing", "narrow", "Net"]
)
def test_a_model_from_the_current_directory(nets: str, callable_name: str) -> None:
    assert isinstance(build_model(f"{nets}:{callable_name}", (4,), 3), nn.Module)


def test_a_number_of_channels_called_width_is_left_alone() -> None:
    def wide(width: int = 7) -> nn.Module:
        return nn.Linear(4, width)

    assert build_model(wide, (4,), 3).out_features == 7
    with pytest.raises(BadInput, match="takes width="):
        build_model(wide, (4,), 3, width=0.5)


def test_width_reaches_a_callable_that_takes_it(nets: str) -> None:
    narrow = build_model(f"{nets}:narrow", (4,), 3, width=0.5)
    assert next(narrow.parameters()).shape == (4, 4)
    with pytest.raises(BadInput, match="takes width="):
        build_model(f"{nets}:by_name", (4,), 3, width=0.5)


@pytest.mark.parametrize(
    ("suffix", "words"),
    [
        (":", "module:callable"),
        (":absent", "has no 'absent'"),
        (":number", "non-callable 'number'"),
        (":too_many", "needs a, b, c"),
        (":broken", "out of cheese"),
        (":wrong", "gave a int"),
        ("_absent:Net", "cannot import"),
        ("_bad:Net", "no_such_thing_at_all"),
    ],
)
def test_errors_are_one_line(nets: str, suffix: str, words: str) -> None:
    with pytest.raises(BadInput) as caught:
        build_model(nets + suffix, (4,), 3)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
