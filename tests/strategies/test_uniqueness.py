"""The gate: hand-worked distances."""

import pytest
import torch

from latecomer.core.messages import Contribution, Task, TrainSpec, Update
from latecomer.core.store import ModelStore
from latecomer.strategies.parts.uniqueness import MAX_PEERS, Peers, is_unique, sketch

EAST, NORTH, UP = torch.eye(3)


@pytest.mark.parametrize(
    ("late", "mean", "nearest"),
    [
        (EAST, False, False),  # 0 and 1 from its peers, who are 1 apart
        (-EAST, True, True),  # 2 and 1
        (UP, False, True),  # 1 and 1: not further than they are, but nobody is near
    ],
)
def test_rules(late, mean, nearest):
    peers = torch.stack([EAST, NORTH])
    assert is_unique(late, peers, "mean") is mean
    assert is_unique(late, peers, "nearest") is nearest
    assert is_unique(late, peers, "off")


def test_a_twin_among_strangers_is_unique_by_the_mean_only():
    """Three peers of one kind and one like the late update."""
    near = torch.tensor([0.0, 1.0, 0.0])
    peers = torch.stack([EAST, EAST, EAST, near])
    # Among them: six pairs, three at 0 and three at 1: 0.5. The late one: (1 + 1 + 1 + 0) / 4.
    assert is_unique(NORTH, peers, "mean")
    assert not is_unique(NORTH, peers, "nearest")


def test_fewer_than_two_peers_tell_nothing():
    assert is_unique(EAST, EAST[None], "mean")


def test_a_sketch_keeps_cosines():
    rng = torch.Generator().manual_seed(0)
    a, noise = torch.randn(2, 20_000, generator=rng)
    for mix in (0.0, 0.5, 1.0, 2.0):
        b = a + mix * noise
        exact = torch.nn.functional.cosine_similarity(a, b, dim=0)
        assert (sketch(a) @ sketch(b)).item() == pytest.approx(exact.item(), abs=0.12)
    assert sketch(torch.zeros(5)).tolist() == [0.0] * 512


class View:
    def __init__(self):
        self.store = ModelStore(torch.zeros(4))


def late(version, delta):
    task = Task(0, 0, 0, "main", version, TrainSpec(), torch.zeros(4))
    return Contribution(task, Update(0, delta, 1), torch.zeros(4), delta, "main", 0)


def test_peers_are_those_of_the_same_model_or_the_latest():
    peers, view = Peers(), View()
    east, north = torch.tensor([1.0, 0, 0, 0]), torch.tensor([0.0, 1, 0, 0])
    for version, delta in [(1, east), (1, east), (2, north)]:
        peers.add(late(version, delta), view)
    assert torch.equal(peers.of(late(1, north)), torch.stack([sketch(east)] * 2))
    assert len(peers.of(late(2, north))) == 3  # one alone tells nothing
    restored = Peers()
    restored.restore(peers.state())
    assert torch.equal(restored.of(late(1, north)), peers.of(late(1, north)))


def test_memory_of_peers_is_bounded():
    peers, view = Peers(), View()
    for version in range(10 * MAX_PEERS):
        peers.add(late(version, torch.ones(4)), view)
    assert len(peers.state()["of_version"]) <= MAX_PEERS + 1
