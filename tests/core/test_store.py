import pytest
import torch

from latecomer.core.messages import MAIN
from latecomer.core.store import ModelStore


def vector(value: float) -> torch.Tensor:
    return torch.full((3,), value)


def store_with(commits: int) -> ModelStore:
    store = ModelStore(vector(0))
    for number in range(1, commits + 1):
        store.commit(MAIN, vector(number))
    return store


def test_only_heads_and_pinned_versions_are_kept():
    store = ModelStore(vector(0))
    store.pin(0)
    store.commit(MAIN, vector(1))
    store.commit(MAIN, vector(2))
    assert store.versions == (0, 2)
    assert store.params(0)[0] == 0
    store.unpin(0)
    assert store.versions == (2,)


def test_a_version_pinned_twice_lives_until_both_are_done():
    store = ModelStore(vector(0))
    store.pin(0)
    store.pin(0)
    store.commit(MAIN, vector(1))
    store.unpin(0)
    assert store.pins(0) == 1
    store.unpin(0)
    assert store.pins(0) == 0
    assert store.versions == (1,)


def test_staleness_counts_commits_on_the_lineage_since_the_version():
    store = ModelStore(vector(0))
    store.pin(0)
    store.fork(MAIN, "b")
    store.commit(MAIN, vector(1))  # 1
    store.commit("b", vector(2))  # 2
    store.commit("b", vector(3))  # 3
    assert store.staleness(0, MAIN) == 1
    assert store.staleness(0, "b") == 2
    # Sent commit 1 of main, routed to b: b has moved twice since.
    assert store.staleness(1, "b") == 2
    assert store.staleness(3, "b") == 0


def test_a_fork_shares_its_parents_head_and_past():
    store = store_with(2)
    store.pin(2)
    store.commit(MAIN, vector(3))
    store.fork(MAIN, "b")
    assert store.head("b") == store.head(MAIN) == 3
    assert store.staleness(2, "b") == 1
    store.commit("b", vector(4))
    assert store.staleness(2, "b") == 2
    assert store.staleness(2, MAIN) == 1


def test_absorb_closes_a_lineage_and_redirects_it():
    store = ModelStore(vector(0))
    store.fork(MAIN, "b")
    store.fork(MAIN, "c")
    sent = store.commit("b", vector(1))
    store.pin(sent)
    store.absorb("c", "b")
    store.absorb(MAIN, "c")
    assert store.resolve("b") == MAIN
    assert store.lineages == (MAIN,)
    store.commit(MAIN, vector(2))
    assert store.staleness(sent, MAIN) == 1
    store.unpin(sent)
    assert store.versions == (2,)


def test_history_stays_short_when_nobody_is_late():
    store = ModelStore(vector(0))
    for number in range(5000):
        store.pin(store.head())
        store.commit(MAIN, vector(number))
        store.unpin(store.commits - 1)
    assert len(store.versions) == 1
    assert len(store.state()["history"][MAIN]) < 1024


def test_pruned_history_still_counts_for_the_oldest_open_task():
    store = ModelStore(vector(0))
    store.commit(MAIN, vector(1))
    store.pin(1)
    for number in range(3000):
        store.commit(MAIN, vector(number))
    assert store.staleness(1) == 3000
    store.pin(store.head())
    assert store.staleness(store.head()) == 0


def test_state_round_trip():
    store = store_with(3)
    store.pin(3)
    store.fork(MAIN, "b")
    store.commit("b", vector(9))
    twin = ModelStore(vector(0))
    twin.restore(store.state())
    assert twin.versions == store.versions
    assert twin.head("b") == store.head("b")
    assert twin.staleness(3, "b") == 1
    assert torch.equal(twin.head_params("b"), vector(9))
    # Version 3 is the head of main and pinned once, both before and after.
    for each in (store, twin):
        assert each.pins(3) == 1
        each.unpin(3)
        assert each.versions == (3, 4)
        assert each.commit(MAIN, vector(5)) == 5
        assert each.versions == (4, 5)


def test_a_restored_store_resolves_absorbed_lineages():
    store = ModelStore(vector(0))
    store.fork(MAIN, "b")
    store.absorb(MAIN, "b")
    twin = ModelStore(vector(1))
    twin.restore(store.state())
    assert twin.resolve("b") == MAIN
    assert "b" not in twin
    assert MAIN in twin


def test_lineage_names_are_used_once():
    store = ModelStore(vector(0))
    store.fork(MAIN, "b")
    with pytest.raises(ValueError, match="'b' exists already"):
        store.fork(MAIN, "b")
    with pytest.raises(ValueError, match="'main' cannot absorb itself"):
        store.absorb(MAIN, MAIN)
    store.absorb(MAIN, "b")
    with pytest.raises(ValueError, match="'b' exists already"):
        store.fork(MAIN, "b")
    assert store.lineages == (MAIN,)
    assert store.versions == (0,)
    store.commit(MAIN, vector(1))
    assert store.versions == (1,)


def test_a_version_is_kept_while_it_is_the_head_of_one_lineage():
    store = ModelStore(vector(0))
    store.fork(MAIN, "b")
    store.commit(MAIN, vector(1))
    assert store.versions == (0, 1)
    store.commit("b", vector(2))
    assert store.versions == (1, 2)
    assert store.pins(0) == store.pins(1) == 0
