"""Checkpoints on disk: damage is never loaded silently, and the one before is used instead."""

import random
import shutil
from pathlib import Path

import pytest
import torch

from latecomer.core.codec import encode
from latecomer.errors import BadInput
from latecomer.study.checkpoint import Checkpoints


def state_at(commits: int) -> dict:
    stream = torch.Generator().manual_seed(commits)
    return {"commits": commits, "head": torch.randn(200, generator=stream), "name": "main"}


def same(one: dict, other: dict) -> bool:
    (tree, tensors), (wanted, expected) = encode(one), encode(other)
    return tree == wanted and all(torch.equal(tensors[n], expected[n]) for n in expected)


def saved(folder: Path, count: int) -> Checkpoints:
    checkpoints = Checkpoints(folder)
    for commits in range(1, count + 1):
        checkpoints.save(state_at(commits), f"commits-{commits}")
    return checkpoints


def damage(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    match rng.choice(["flip", "cut", "zero", "append", "remove"]):
        case "flip":
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        case "cut":
            del content[rng.randrange(len(content)) :]
        case "zero":
            start = rng.randrange(len(content))
            content[start : start + 16] = bytes(len(content[start : start + 16]))
        case "append":
            content += b"x"
        case "remove":
            path.unlink()
            return
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("count", [1, 3])
def test_no_damage_is_loaded_silently(tmp_path, count):
    """100 random corruptions: the newest state, the one before with a reason, or one line."""
    rng, outcomes = random.Random(count), {"refused": 0, "before": 0, "unchanged": 0}
    saved(tmp_path / "whole", count)
    for number in range(100):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "whole", folder)
        newest = folder / f"commits-{count}"
        damage(rng.choice(sorted(newest.iterdir())), rng)
        checkpoints = Checkpoints(folder)
        try:
            found = checkpoints.load()
        except BadInput:
            outcomes["refused"] += 1
            continue
        if checkpoints.fallback:
            assert same(found, state_at(count - 1))
            outcomes["before"] += 1
        else:
            assert same(found, state_at(count))
            outcomes["unchanged"] += 1  # zeros over zeros, say
    assert outcomes["unchanged"] < 10
    assert outcomes["before" if count > 1 else "refused"] > 75


def test_the_newest_and_the_one_before_are_kept(tmp_path):
    saved(tmp_path, 4)
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == ["commits-3", "commits-4"]
    assert Checkpoints(tmp_path).load()["commits"] == 4


def test_without_a_checkpoint_there_is_none(tmp_path):
    assert Checkpoints(tmp_path).load() is None
