import numpy as np

from latecomer.data.exclusive_classes import ExclusiveClasses

LABELS = np.array([0, 1, 1, 0, 1, 2, 0, 2, 2])
SHARES = [np.array([0, 1, 2]), np.array([3, 4, 5]), np.array([6, 7, 8])]


def test_a_class_is_removed_from_devices_that_are_not_holders() -> None:
    seen = []

    def most(counts: np.ndarray) -> list[int]:
        seen.append(counts.tolist())
        return [0]

    left, holders = ExclusiveClasses((1,), most).restrict(SHARES, LABELS, 3)
    assert holders == (0,)
    assert seen == [[[1, 2, 0], [1, 1, 1], [1, 0, 2]]]
    assert [share.tolist() for share in left] == [[0, 1, 2], [3, 5], [6, 7, 8]]


def test_a_device_may_lose_all_its_examples() -> None:
    left, _ = ExclusiveClasses((0, 2), lambda counts: (0, 1)).restrict(SHARES, LABELS, 3)
    assert [share.tolist() for share in left] == [[0, 1, 2], [3, 4, 5], []]


def test_held_out_devices_are_no_holders_and_keep_their_rows() -> None:
    exclusive = ExclusiveClasses((1,), lambda counts: [int(counts[:, 1].argmax())])
    left, holders = exclusive.restrict(SHARES, LABELS, 3, held_out=[0])
    assert holders == (1,)
    assert [share.tolist() for share in left] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
