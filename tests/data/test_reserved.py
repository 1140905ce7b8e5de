import numpy as np

from latecomer.data.reserved import Reserved

LABELS = np.array([0, 1, 1, 0, 1, 2, 0, 2, 2])
SHARES = [np.array([0, 1, 2]), np.array([3, 4, 5]), np.array([6, 7, 8])]


def test_others_than_its_holders_lose_a_class() -> None:
    seen = []

    def most(counts: np.ndarray) -> list[int]:
        seen.append(counts.tolist())
        return [0]

    left = Reserved((1,), most).leave(SHARES, LABELS)
    assert seen == [[[1, 2, 0], [1, 1, 1], [1, 0, 2]]]
    assert [share.tolist() for share in left] == [[0, 1, 2], [3, 5], [6, 7, 8]]


def test_several_classes_may_leave_nothing() -> None:
    left = Reserved((0, 2), lambda counts: (0, 1)).leave(SHARES, LABELS)
    assert [share.tolist() for share in left] == [[0, 1, 2], [3, 4, 5], []]
