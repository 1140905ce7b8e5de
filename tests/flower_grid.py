"""The used part of Flower's `Grid`, in one process."""

import threading

from flwr.app import Context, Error, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity


class ThreadGrid:
    """The used part of Flower's `Grid`; nodes are threads that call a ClientApp."""

    def __init__(self, app, nodes):
        # What Flower's own processes set before an app runs.
        TaskIdentity._run_id = TaskIdentity._node_id = TaskIdentity._task_id = 1
        self.app, self.nodes = app, nodes
        self.replies, self.lock, self.count = {}, threading.Lock(), 0
        self.down, self.working = False, threading.Lock()

    def get_node_ids(self):
        return list(self.nodes)

    def push_messages(self, messages):
        if self.down:
            raise ConnectionError("the SuperLink is away")
        for message in messages:
            self.count += 1
            message.metadata.__dict__["_message_id"] = f"m{self.count}"
            threading.Thread(target=self._work, args=(message,), daemon=True).start()
        return [message.metadata.message_id for message in messages]

    def _work(self, message):
        node = message.metadata.dst_node_id
        context = Context(1, node, self.nodes[node], RecordDict(), {})
        try:
            # One at a time, as in processes of their own: a network is built by a global seed.
            with self.working:
                reply = self.app(message, context)
        except Exception as error:
            reply = Message(Error(2, f"Traceback\n  {error}"), reply_to=message)
        if reply is not None:
            with self.lock:
                self.replies[message.metadata.message_id] = reply

    def pull_messages(self, numbers):
        if self.down:
            raise ConnectionError("the SuperLink is away")
        with self.lock:
            return [self.replies.pop(n) for n in numbers if n in self.replies]
