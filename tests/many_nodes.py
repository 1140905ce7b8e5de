"""Many light devices in one process: to a SuperLink each is a node of its own.

A SuperNode and its client take some 500 MB. Here every node is a thread with a connection, a
heartbeat and an `Agent` of its own, and torch is loaded once. It uses private
parts of Flower, so it is for tests only.

    python many_nodes.py ADDRESS NODES FOLDER HIDDEN SLOWEST
"""

import random
import sys
import threading
import time
from functools import partial
from pathlib import Path

import torch
from flwr.app import Message
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import (
    inflate_object_from_contents,
    pull_objects,
    push_object_contents_from_iterable,
)
from flwr.supernode.fleet_http_connection import http_request_response

from latecomer.device.flat import flat_model
from latecomer.engines.agent import Agent
from latecomer.engines.flower import from_records, to_records

IDLE = 1.0  # seconds between two polls
ONE_AT_A_TIME = threading.Lock()


class LightNode:
    """One device that replies to every message after `delay` seconds."""

    def __init__(self, number: int, address: str, folder: Path, hidden: int, delay: float) -> None:
        self.address, self.delay = address, delay
        data = torch.Generator().manual_seed(number)
        x = torch.randn(16, 8, generator=data)
        y = (x[:, 0] > 0).long()
        name = f"device-{number}"
        self.agent = Agent(
            name, flat_model("mlp", (8,), 2, (hidden,)), lambda: (x, y), folder / name
        )

    def run(self) -> None:
        """A SuperNode ends when the SuperLink answers with an error; its supervisor starts it."""
        while True:
            self._live()
            print(f"{self.agent.name}: starts again", flush=True)
            time.sleep(IDLE)

    def _live(self) -> None:
        with http_request_response(self.address, True) as connection:
            _, receive, send, _, _, pull, push, confirm = connection
            while True:
                found = receive()
                if found is None:
                    time.sleep(IDLE * random.uniform(0.8, 1.2))
                    continue
                try:
                    self._perform(found, send, pull, push, confirm)
                except Exception as error:
                    print(f"{self.agent.name}: {type(error).__name__} {error}", flush=True)

    def _perform(self, found, send, pull, push, confirm) -> None:
        head, tree = found
        run, number = head.metadata.run_id, head.metadata.message_id
        wanted = [one.object_id for one in iterate_object_tree(tree)]
        contents = pull_objects(wanted, pull_object_fn=partial(pull, run))
        confirm(run, number)
        message = inflate_object_from_contents(number, contents)
        message.metadata.__dict__["_message_id"] = number
        with ONE_AT_A_TIME:
            if message.metadata.message_type == "query":
                answer = self.agent.introduce()
            else:
                answer = self.agent.answer(from_records(message.content))
        if message.metadata.message_type == "train":
            time.sleep(self.delay * random.uniform(0.5, 1.5))
        reply = Message(to_records(answer), reply_to=message)
        with no_object_id_recompute():
            reply.metadata.__dict__["_message_id"] = reply.object_id
            objects = get_all_nested_objects(reply)
            missing, session = send(reply, get_object_tree(reply), self.delay)
            push_object_contents_from_iterable(
                [(key, one.deflate()) for key, one in objects.items() if key in missing],
                push_object_fn=partial(push, run, session),
            )


def main(address: str, nodes: str, folder: str, hidden: str, slowest: str) -> None:
    torch.set_num_threads(1)
    for number in range(int(nodes)):
        delay = float(slowest) * (number + 1) / int(nodes)
        node = LightNode(number, address, Path(folder), int(hidden), delay)
        threading.Thread(target=node.run, name=node.agent.name, daemon=True).start()
    while True:
        time.sleep(60.0)


if __name__ == "__main__":
    main(*sys.argv[1:])
