"""A SuperNode that receives a message while its run ends."""

import pytest

pytest.importorskip("flwr", reason="needs the extra 'flower'")

import flwr.supernode.start_client_internal as loop
from flwr.app import Message, RecordDict
from flwr.common.constant import Status
from flwr.supercore.constant import TaskType
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import Run, RunNotRunningException
from flwr.supernode.nodestate import NodeStateFactory

from latecomer.deploy.environment import flower_version
from latecomer.deploy.warm import cleaning_up, is_known
from latecomer.engines.flower_private import allow_messages, set_message_id

if not is_known(flower_version()):
    pytest.skip("warm nodes are for versions of Flower that are known", allow_module_level=True)

RUN, NODE = 7, 3


@pytest.fixture
def message():
    with allow_messages():
        message = Message(RecordDict(), NODE, "query")
    message.metadata.__dict__["_run_id"] = RUN
    set_message_id(message, message.object_id)
    return message


@pytest.fixture
def state():
    state = NodeStateFactory(ObjectStoreFactory()).state()
    state.set_node_id(NODE)
    state.store_run(Run.create_empty(RUN))
    return state


def over(*given):
    raise RunNotRunningException


def received(state, message, pull_object=None, confirm=lambda *given: None):
    whole = get_all_nested_objects(message)
    return cleaning_up(loop._pull_and_store_message)(
        state=state,
        object_store=state.object_store,
        node_config={},
        receive=lambda: (message, get_object_tree(message)),
        get_run=over,  # not called: the run is stored
        get_fab=over,
        pull_object=pull_object or (lambda run, number: whole[number].deflate()),
        confirm_message_received=confirm,
        trusted_entities=None,
    )


def unfinished(state):
    return [task.type for task in state.get_tasks() if task.status.status != Status.FINISHED]


def test_a_message_is_received(state, message):
    assert received(state, message) == RUN
    assert unfinished(state) == [TaskType.CLIENT_APP]
    assert [m.metadata.message_id for m in state.get_messages_legacy()] == [message.object_id]


def test_a_run_that_ends_meanwhile_leaves_nothing_that_is_answered_later(state, message):
    def answered_before(*given):
        with allow_messages():
            reply = Message(RecordDict(), reply_to=message)
        set_message_id(reply, reply.object_id)
        state.store_message(reply)
        over()

    for ending in ({"pull_object": over}, {"confirm": over}, {"confirm": answered_before}):
        assert received(state, message, **ending) is None
        assert not unfinished(state)
        assert not state.get_messages_legacy()
