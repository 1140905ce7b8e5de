"""Numbers of the models that a task was sent, and copies of contributions."""

from dataclasses import asdict, replace

import pytest
import torch

from latecomer.core.messages import Contribution, Offer, Task, TrainSpec, Update, wire_bytes

OWN, OTHER, NEWER = (torch.full((3,), float(value)) for value in range(3))
PLAIN = Task(5, 2, 0, "main", 4, TrainSpec(), OWN)
OFFERED = replace(
    PLAIN,
    offers=(Offer("a", 6, OTHER), Offer("b", 7, NEWER)),
    broadcasts=(None, Offer("main", 9, NEWER)),
)


def test_the_default_program_is_sgd_without_options():
    program = {"local_epochs": 2, "batch_size": 32, "lr": 0.01, "momentum": 0.5, "clip_norm": 2}
    off = ("weight_decay", "prox", "clip", "balance", "lazy")
    program |= dict.fromkeys(off, 0.0) | {"optimizer": "sgd", "lr_scale": 1.0, "local_steps": 0}
    flags = ("last_layer_only", "feedback", "report_loss", "accumulate_residual", "report_shares")
    assert asdict(TrainSpec()) == program | dict.fromkeys(flags, False)


def test_versions_and_choices_of_a_task():
    assert PLAIN.versions == (4,)
    assert OFFERED.versions == (4, 6, 7, 9)
    assert [PLAIN.was_sent(choice) for choice in (-1, 0, 1)] == [False, True, False]
    sent = [OFFERED.was_sent(choice) for choice in range(-1, 6)]
    assert sent == [False, True, True, True, False, True, False]


def test_offers_are_numbered_from_1():
    assert [OFFERED.offer_of(lineage) for lineage in ("a", "b", "main")] == [1, 2, 0]
    assert OFFERED.bytes_down == 3 * 12  # the model and two offers of three floats
    assert PLAIN.bytes_down == wire_bytes(OWN) == 12


@pytest.mark.parametrize(
    ("choice", "lineage", "version", "params"),
    [(0, "main", 4, OWN), (1, "a", 6, OTHER), (2, "b", 7, NEWER), (4, "main", 9, NEWER)],
)
def test_a_task_as_if_one_model_had_been_sent(choice, lineage, version, params):
    task = OFFERED.chosen(choice)
    assert (task.lineage, task.version, task.id, task.device) == (lineage, version, 5, 2)
    assert task.params is params
    assert task.versions == (version,)


def test_a_model_that_was_not_kept_cannot_be_chosen():
    with pytest.raises(ValueError, match="task 5: model 3 was not kept"):
        OFFERED.chosen(3)
    assert PLAIN.chosen(0) is PLAIN
    only_broadcasts = replace(OFFERED, offers=())
    assert only_broadcasts.chosen(2).version == 9


def test_a_contribution_with_another_weight_or_base():
    update = Update(5, OTHER, 10)
    contribution = Contribution(PLAIN, update, OWN, OTHER, "a", 3, seconds=2.5)
    weighed = contribution.weighed(0.25)
    assert contribution.weight == 1.0
    assert asdict(replace(weighed, weight=1.0, task=0, update=0, base=0, delta=0)) == asdict(
        replace(contribution, task=0, update=0, base=0, delta=0)
    )
    assert (weighed.weight, weighed.base, weighed.delta) == (0.25, OWN, OTHER)
    rebased = weighed.rebase(OTHER, NEWER)
    assert (rebased.base, rebased.delta, rebased.staleness) == (OTHER, NEWER, 0)
    assert (rebased.weight, rebased.seconds, rebased.lineage) == (0.25, 2.5, "a")
