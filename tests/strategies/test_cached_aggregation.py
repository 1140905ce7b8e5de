"""Hand-worked roll calls, and what is kept of whom."""

from dataclasses import replace

import pytest
import torch

from commands import sends
from latecomer.core.messages import (
    Arrived,
    Contribution,
    Failed,
    Joined,
    Left,
    Note,
    TrainSpec,
    Update,
)
from latecomer.core.server import Server
from latecomer.core.strategy import Strategy
from latecomer.core.submodel import Submodel
from latecomer.strategies.latecomer.cached_aggregation import (
    WEIGHT_CAP,
    CachedAggregation,
    CachedUpdate,
    corrected,
    noise_aware_weight,
    position_along,
    remaining,
    rms_of,
    signal_share,
    stepped,
)
from latecomer.strategies.parts.weighting import by_examples

FIRST = Submodel("first", torch.tensor([0]))


def answer(task, *delta, examples=1, noise=0.0):
    return Arrived(task.device, Update(task.id, torch.tensor(delta), examples, noise_std=noise))


def begun(devices, share=1.0, step=1.0, clip=0.0, fade=0.0, lead=0.0, reach=0.0, place=0.0, at=0.0):
    merge = CachedAggregation(share, step, clip, fade, lead, reach, place)
    strategy = Strategy(weigh=by_examples(), merge=merge)
    server = Server(torch.tensor([at]), strategy, TrainSpec())
    return server, *sends(server.handle(*map(Joined, range(devices))))


def head(server):
    return server.store.head_params().tolist()


def word(*delta, weight=1.0, submodel=None):
    vector = torch.tensor(delta)
    size = float(vector.norm()) / len(delta) ** 0.5
    return CachedUpdate(vector, submodel, weight, 0, size, begin=0.0)


def test_all_have_a_word_in_every_commit():
    server, one, two = begun(2, share=0.5)
    (one,) = sends(server.handle(answer(one, 2.0)))
    assert head(server) == [1.0]  # half a turn: 0.5 * 2
    sends(server.handle(answer(two, 4.0)))
    assert head(server) == [2.5]  # 0.5 * (2 + 4) / 2
    server.handle(answer(one, 0.0))
    assert head(server) == [3.5]  # 0.5 * (0 + 4) / 2: the last word of each


@pytest.mark.parametrize(
    ("lead", "third"),
    [
        (0.0, 0.5 * (0 + 4) / 2),  # the last word of each
        (1.0, 0.5 * ((2 + 4) / 2 + (0 - 2))),  # the other will have changed its mind as much
        (0.75, 0.5 * ((2 + 4) / 2 + 0.75 * (0 - 2))),
    ],
)
def test_those_who_have_just_spoken_lead(lead, third):
    server, one, two = begun(2, share=0.5, lead=lead)
    (one,) = sends(server.handle(answer(one, 2.0)))
    sends(server.handle(answer(two, 4.0)))
    assert head(server) == [2.5]  # first words are no change
    server.handle(answer(one, 0.0))
    assert head(server) == pytest.approx([2.5 + third])


def test_where_all_speak_nobody_leads():
    """Then the mean of the words has the whole change already."""
    heads = []
    for lead in (1.0, 0.0):
        server, *tasks = begun(2, share=1.0, lead=lead)
        for words in ((2.0, 4.0), (1.0, -3.0)):
            tasks = sends(server.handle(*(answer(t, w) for t, w in zip(tasks, words, strict=True))))
        assert server.store.commits == 2
        heads.append(head(server))
    assert heads[0] == heads[1] == [3.0 - 1.0]


def test_only_words_that_were_heard_have_a_share():
    """One of ten devices has spoken, twice: its change is the whole change of the mean."""
    server, one, *_ = begun(10, share=0.1, lead=1.0)
    (one,) = sends(server.handle(answer(one, 2.0)))
    server.handle(answer(one, 1.0))
    assert head(server) == pytest.approx([0.1 * 2 + 0.1 * 1])


def test_a_change_is_made_of_shortened_words():
    others = [word(1.0)] * 3
    now = word(50.0)
    found = corrected(torch.zeros(1), [(word(1.0), now)], [now, *others], 1.0, 1.0, clip=2.0)
    assert found.tolist() == [0.75]  # (2 - 1), of which a quarter is in the mean
    found = corrected(torch.zeros(1), [(word(1.0), now)], [now, *others], 1.0, 0.5, clip=0.0)
    assert found.tolist() == [0.5 * 0.75 * 49.0]


def test_a_change_counts_where_it_was_trained():
    narrow, wide = word(4.0, submodel=FIRST), word(1.0, 1.0)
    changes = [(word(1.0, submodel=FIRST), narrow), (word(0.0, 0.0), wide)]
    silent = word(0.0, submodel=FIRST)
    found = corrected(torch.zeros(2), changes, [narrow, wide, silent], 1.0, 1.0, 0.0)
    # A third of the first coordinate is of one who did not speak; of the second all spoke.
    assert found.tolist() == pytest.approx([(3 + 1) / 2 / 3, 0.0])


def test_nobody_who_leads_weighs_more_than_ten_times_the_usual():
    loud, usual = word(1.0, weight=1e9), [word(0.0)] * 3
    changes = [(word(0.0, weight=1e9), loud), (usual[0], usual[0])]
    found = corrected(torch.zeros(1), changes, [loud, *usual], 1.0, 1.0, 0.0)
    share = (WEIGHT_CAP + 1) / (WEIGHT_CAP + 3)
    assert found.tolist() == pytest.approx([(1 - share) * WEIGHT_CAP / (WEIGHT_CAP + 1)])


def test_where_all_say_the_same_a_turn_goes_no_further_than_a_part_of_a_word():
    server, one, two = begun(2, share=0.5, step=2.0, reach=0.25)
    sends(server.handle(answer(one, 4.0)))
    assert head(server) == [0.5]  # half a turn: half of a quarter of 4, not the whole of it
    server.handle(answer(two, 4.0))
    assert head(server) == [1.0]


def test_what_the_model_has_gone_of_the_way_of_a_word_is_not_said_again():
    server, one, two = begun(2, share=0.5, step=1.0, place=1.0, at=3.0)
    sends(server.handle(answer(one, 4.0)))
    assert head(server) == [3.0 + 2.0]  # it was said of this model: half a turn
    server.handle(answer(two, 4.0))
    # Both are half fulfilled, also the second, that was said of the model at 3.
    assert head(server) == [5.0 + 0.5 * 2.0]


def test_what_leads_is_a_change_of_words_as_they_were_said():
    server, one, _ = begun(2, share=0.5, step=1.0, lead=1.0, place=1.0)
    (one,) = sends(server.handle(answer(one, 4.0)))
    assert head(server) == [2.0]
    server.handle(answer(one, 2.0))
    # It alone has spoken, all of its word is left, and nothing of it is missing in the mean.
    assert head(server) == [2.0 + 0.5 * 2.0]
    others, was, now = [word(4.0)] * 3, word(4.0), word(2.0)
    found = corrected(torch.zeros(1), [(was, now)], [now, *others], 1.0, 1.0, 0.0)
    assert found.tolist() == [0.75 * -2.0]  # at any head


def test_what_is_left_of_a_word():
    whole = word(3.0, 4.0)
    beside, half, past, back = [4.0, -3.0], [1.5, 2.0], [6.0, 8.0], [-3.0, -4.0]
    for at, left in ((beside, 1.0), (half, 0.5), (past, 0.0), (back, 1.0)):
        assert remaining(whole, torch.tensor(at), 1.0) == pytest.approx(left)
    assert remaining(whole, torch.tensor(half), 0.4) == pytest.approx(0.8)
    assert remaining(whole, torch.tensor(past), 0.0) == 1.0
    later = replace(whole, begin=0.25)
    assert remaining(later, torch.tensor(half), 1.0) == pytest.approx(0.75)
    part = word(4.0, submodel=FIRST)
    assert remaining(part, torch.tensor([1.0, 9.0]), 1.0) == 0.75  # of the part that it carries
    assert remaining(word(0.0, 0.0), torch.tensor(half), 1.0) == 1.0  # of nothing all is left


def test_the_way_does_not_hang_on_where_a_tensor_lies():
    numbers = torch.Generator().manual_seed(1)
    params, delta = torch.randn(2, 100_003, generator=numbers)
    room = torch.empty(100_004)
    moved = room[1:].copy_(params)
    size = rms_of(delta, delta.numel())
    assert position_along(delta, size, params) == position_along(delta, size, moved)
    near = position_along(delta, size, 1e4 + params) - position_along(
        delta, size, 1e4 + params - 0.5 * delta
    )
    assert near == pytest.approx(0.5, abs=1e-3)


def test_who_is_fulfilled_still_has_a_share_in_the_mean():
    done, open_ = word(1.0, 0.0), word(0.0, 4.0)
    found = stepped(torch.tensor([1.0, 1.0]), [done, open_], 1.0, 0.0, place=1.0)
    assert found.tolist() == [1.0, 1.0 + 0.75 * 4 / 2]
    assert stepped(torch.tensor([1.0, 1.0]), [done, open_], 1.0, 0.0).tolist() == [1.5, 3.0]


def test_words_mean_a_place_the_model_comes_to_rest_at():
    """Said again and again as directions they carry it on for ever."""
    places = {}
    for place in (0.0, 1.0):
        at, words = torch.zeros(1), [word(1.0), word(1.0)]
        for _ in range(50):
            at = stepped(at, words, 0.5, 0.0, place)
        places[place] = at.item()
    assert places == {0.0: 25.0, 1.0: pytest.approx(1.0)}


def test_words_of_another_lineage_have_no_way_to_go():
    server, task = begun(1, place=0.4)
    merge, store = server.strategy.merge, server.store
    base, update = torch.tensor([7.0]), Update(task.id, task.params, 1)
    moved = Contribution(task, update, base, task.params, "main", 0)
    assert merge._base(moved, server) is base  # of a repaired one not what was sent
    store.fork("main", "other")
    assert merge._base(replace(moved, lineage="other"), server) is None
    store.absorb("main", "other")
    merged_params = replace(moved, task=replace(task, lineage="other"))
    assert merge._base(merged_params, server) is base


def test_a_union_forgets_who_spoke_of_the_other_model():
    merge = CachedAggregation(1.0, 1.0, 0.0, place=0.4)
    merge._words = {"main": {0: word(1.0)}, "gone": {1: word(2.0)}}
    merge.on_absorb("main", "gone")
    assert list(merge._words) == ["main"]
    assert merge._words["main"][0].begin == 0.0


def test_a_stand_in_means_a_place_too():
    server, task = begun(1, place=1.0)
    base, delta = torch.tensor([8.0]), torch.tensor([2.0])
    surrogates = Contribution(task, Update(task.id, delta, 1), base, delta, "main", 0)
    merge = server.strategy.merge
    merge.surrogates = lambda lineage, fresh, view: [surrogates]
    merge._words["main"] = {}
    assert merge._renew("main", 1.0, server) == 1
    assert merge._words["main"][0].begin == 4.0  # 8 is four times the word


def test_with_directions_no_way_is_kept():
    server, one = begun(1, reach=0.3)
    server.handle(answer(one, 1.0))
    (known,) = server.strategy.merge._words["main"].values()
    assert known.begin is None


def test_how_much_of_a_word_is_not_noise():
    def share(size, noise=0.0, epsilon=0.0):
        return signal_share(size, Update(0, torch.zeros(1), 1, noise_std=noise, epsilon=epsilon))

    assert share(5.0, 3.0) == pytest.approx(16 / 25)
    assert share(5.0) == share(0.0) == 1.0
    assert share(5.0, 5.0) == share(5.0, 9.0) == share(0.0, 1.0) == 0.0
    assert share(5.0, epsilon=1.0) == 0.0  # noise of an unknown amount, after Adam


def test_what_is_noise_is_heard_once_for_all_commits_of_a_turn():
    assert noise_aware_weight(1.0, 10.0) == 1.0
    assert noise_aware_weight(0.0, 10.0) == 10.0
    server, one, two = begun(2, share=0.5)
    (one,) = sends(server.handle(answer(one, 5.0, noise=4.0)))
    assert head(server) == [2.5]  # half a turn of the only word, which is new
    server.handle(answer(two, 10.0, noise=6.0))
    # Of the older one 9/25 is more than noise; of the new one 9/25 is heard twice.
    second = 0.5 * (0.36 * 5 + (0.64 + 2 * 0.36) * 10) / 2
    assert head(server) == pytest.approx([2.5 + second])
    server.handle(answer(one, 3.0, noise=9.0))
    assert head(server) == pytest.approx([2.5 + second + 0.5 * (2 * 3 + 0.64 * 10) / 2])


@pytest.mark.parametrize("loud", [0, 1])
def test_who_adds_no_noise_counts_no_more_than_who_does(loud):
    """Over a turn, with one of three silent about its noise."""
    found = []
    for noise in (0.0, 9.0):
        server, *tasks = begun(3, share=1 / 3)
        for turn in range(20):
            for device in range(3):
                says = 1.0 if device == loud else 0.0
                given = answer(tasks[device], says, noise=0.0 if device == 0 else noise)
                (tasks[device],) = sends(server.handle(given))
            if turn == 9:
                half = head(server)[0]
        found.append(head(server)[0] - half)
    assert found[0] == pytest.approx(10 / 3)
    assert found[1] == pytest.approx(10 / 3)


def test_those_who_speak_lead_as_far_as_words_are_more_than_noise():
    server, one, two, three = begun(3, share=1 / 3, lead=1.0)
    for task in (one, two, three):
        again = sends(server.handle(answer(task, 5.0, noise=4.0)))
        one = again[0] if task is one else one
    before = head(server)[0]
    server.handle(answer(one, 10.0, noise=6.0))
    called_for = (0.36 * 5 * 2 + (0.64 + 3 * 0.36) * 10) / 3
    # The median share of signal is 0.36, of which a third is in the mean.
    assert head(server)[0] - before == pytest.approx((called_for + (0.36 - 1 / 3) * 5) / 3)


def test_steps_are_not_shortened_for_what_is_not_repeated():
    for noise, second in ((9.0, 4.0), (2.0**0.5, 4.0 * (1 - 7 / 8 * 7 / 8)), (0.0, 4.0 / 8)):
        server, one, two = begun(2, share=0.5, step=2.0, reach=0.25)
        sends(server.handle(answer(one, 4.0, noise=noise)))
        first = head(server)[0]
        server.handle(answer(two, 4.0, noise=noise))
        assert head(server)[0] - first == pytest.approx(second)


def test_a_few_who_claim_noise_do_not_lengthen_the_steps_of_all():
    heads = []
    for noise in (0.0, 9.0):
        server, *tasks = begun(3, share=1.0, step=2.0, reach=0.25)
        answers = [answer(t, 4.0, noise=noise if t.device == 0 else 0.0) for t in tasks]
        server.handle(*answers)
        heads.append(head(server))
    assert heads[0] == heads[1] == [1.0]


def test_old_noise_does_not_move_what_only_others_have_trained():
    narrow = word(4.0, submodel=FIRST)
    wide = [replace(word(5.0, 5.0), signal=0.01)] * 3
    found = stepped(torch.zeros(2), [narrow, *wide], 0.2, 0.0, voices=[1.0, 0.01, 0.01, 0.01])
    assert found.tolist() == pytest.approx([0.2 * (4 + 0.15) / 4, 0.2 * 0.05])


def test_where_words_cancel_out_nothing_is_held_back():
    server, one, two = begun(2, share=1.0, step=1.0, reach=0.25)
    server.handle(answer(one, 4.0), answer(two, -3.0))
    assert head(server) == [0.5]  # a quarter of the usual word would be 0.875


def test_those_who_lead_are_shortened_by_as_much():
    """One says 4, then 2, the other 4: the mean would move by 3, and reach is a quarter of 3."""
    server, one, two = begun(2, share=0.5, step=2.0, lead=1.0, reach=0.25)
    (one,) = sends(server.handle(answer(one, 4.0)))
    sends(server.handle(answer(two, 4.0)))
    assert head(server) == [1.0]
    server.handle(answer(one, 2.0))
    mean, more = (2 + 4) / 2, 0.5 * (2 - 4)
    assert head(server) == pytest.approx([1.0 + 0.25 * 3 / (2 * mean) * (mean + more)])


def test_who_says_nothing_does_not_hold_the_others_up():
    server, *tasks = begun(3, share=1.0, reach=0.3)
    server.handle(*(answer(t, w) for t, w in zip(tasks, (0.0, 0.0, 3.0), strict=True)))
    assert head(server) == [1.0]


def test_words_weigh_by_examples_and_the_step_is_per_turn():
    server, one, two = begun(2, share=1.0, step=0.5)
    server.handle(answer(one, 4.0, examples=3), answer(two, 8.0, examples=1))
    assert head(server) == [0.5 * (3 * 4.0 + 8.0) / 4]


def test_the_step_never_exceeds_the_mean():
    server, one = begun(1, step=5.0)
    server.handle(answer(one, 2.0))
    assert head(server) == [2.0]


def test_a_device_that_speaks_twice_counts_with_its_last_word():
    server, one, _two, *_ = begun(4, share=0.5, step=2.0)
    (one,) = sends(server.handle(answer(one, 100.0)))
    server.handle(answer(one, 2.0))
    assert head(server) == [1.0]  # one of four spoke: 2 * 1/4 of a step of 2


def test_share_0_commits_at_every_arrival():
    server, one, _two = begun(2, share=0.0, step=2.0)
    server.handle(answer(one, 2.0))
    assert head(server) == [2.0]
    assert server.store.commits == 1


def test_a_shout_is_shortened_to_twice_the_usual_size():
    words = [word(1.0), word(1.0), word(50.0)]
    assert stepped(torch.zeros(1), words, 1.0, clip=2.0).tolist() == pytest.approx([4 / 3])
    assert stepped(torch.zeros(1), words, 1.0, clip=0.0).tolist() == pytest.approx([52 / 3])


def test_nobody_weighs_more_than_ten_times_the_usual():
    words = [word(0.0), word(0.0), word(1.0, weight=1e9)]
    assert stepped(torch.zeros(1), words, 1.0, 0.0).tolist() == pytest.approx(
        [WEIGHT_CAP / (2 + WEIGHT_CAP)]
    )


def test_coordinates_are_averaged_over_those_who_trained_them():
    words = [word(2.0, 2.0), word(4.0, submodel=FIRST)]
    assert stepped(torch.zeros(2), words, 1.0, 0.0).tolist() == [3.0, 2.0]
    narrow = [word(4.0, submodel=FIRST)]
    assert stepped(torch.tensor([0.0, 7.0]), narrow, 0.5, 0.0).tolist() == [2.0, 7.0]


def test_who_is_gone_is_forgotten_after_three_turns():
    server, one, two = begun(2, share=0.5)
    server.handle(answer(two, 4.0), Left(1))
    merge, lengths = server.strategy.merge, []
    for _ in range(8):
        (one,) = sends(server.handle(answer(one, 0.0)))
        lengths.append(len(merge._words["main"]))
    assert lengths[0] == 2
    assert lengths[-1] == 1


def test_who_is_at_work_is_not_forgotten():
    server, one, two = begun(2, share=0.5)
    sends(server.handle(answer(two, 4.0)))  # and is sent another task
    for _ in range(20):
        (one,) = sends(server.handle(answer(one, 0.0)))
    assert len(server.strategy.merge._words["main"]) == 2


def test_a_lost_device_does_not_hold_the_others_up():
    server, one, two, three = begun(3, share=1.0)
    server.handle(Failed(three.id, "lost"))
    commands = server.handle(answer(one, 2.0), answer(two, 4.0))
    assert [c for c in commands if isinstance(c, Note) and c.kind == "commit"]


def test_what_was_heard_long_ago_counts_less():
    """A turn is two commits, so that after four the word of the other is two turns old."""
    server, one, two = begun(2, share=0.5, fade=1.0)
    sends(server.handle(answer(two, 4.0)))  # 0.5 * 4
    for _ in range(4):
        (one,) = sends(server.handle(answer(one, 0.0)))
    ages = [1, 1, 3 / 2, 2]  # a half, 1, 1.5 and 2 turns: up to one it counts in full
    expected = 2.0 + sum(0.5 * (4 / age) / (1 / age + 1) for age in ages)
    assert head(server) == pytest.approx([expected])
