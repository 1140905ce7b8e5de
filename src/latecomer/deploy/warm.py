"""Warm nodes: a SuperNode that asks more often, and a client that stays.

A stock SuperNode starts a new process for every message, which imports torch and reads the data
again, and sleeps 3 s between two questions. Here the process stays, and who has just been busy asks
again soon; an idle node asks as seldom as a stock one.

This is the only file that uses what Flower does not promise to keep: it knows the versions below,
and whoever calls it asks `is_known` first. It is run as a program, once for each half of a node.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from logging import ERROR, INFO
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flwr.clientapp import ClientApp

KNOWN = ("1.41",)
ACQUIRE = "/flwr.proto.Runtime/AcquireTask"
WAIT_FOR_REPLY = 0.05  # where a stock node sleeps 0.5 s
AWAY = 0.5
LONGEST_TRY = 120.0


def is_known(version: str) -> bool:
    """Whether warm nodes have been tested with this version of Flower."""
    return ".".join(version.split(".")[:2]) in KNOWN


class Haste:
    """Seconds to the next question: few after work, then more and more."""

    def __init__(self, shortest: float, longest: float, growth: float = 1.3) -> None:
        self.shortest, self.longest, self.growth = shortest, longest, growth
        self._next = shortest

    def worked(self) -> None:
        self._next = self.shortest

    def wait(self) -> float:
        now, self._next = self._next, min(self.longest, self._next * self.growth)
        return now


def supernode(arguments: Sequence[str]) -> None:
    """`flower-supernode` with other sleeps, which ends with its supervisor."""
    import flwr.supernode.start_client_internal as loop
    from flwr.supercore.app_utils import start_parent_process_monitor
    from flwr.supernode.cli.flower_supernode import flower_supernode

    haste = Haste(0.1, 3.0)

    def sleep(seconds: float) -> None:
        if seconds < 1.0:  # it waits for the client, so there is work
            haste.worked()
            time.sleep(WAIT_FOR_REPLY)
        else:
            time.sleep(haste.wait())

    vars(loop)["time"] = SimpleNamespace(sleep=sleep)
    vars(loop)["_pull_and_store_message"] = tidy(loop._pull_and_store_message)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--parent-pid", type=int)
    ours, theirs = parser.parse_known_args(arguments)
    if ours.parent_pid is not None:
        start_parent_process_monitor(ours.parent_pid)
    sys.argv = ["flower-supernode", *theirs]
    flower_supernode()


def tidy(receive: Callable[..., int | None]) -> Callable[..., int | None]:
    """How a SuperNode receives a message, without leftovers when the run ends meanwhile.

    Flower tidies up after an `Exception`, and the end of a run is none. A task that it leaves
    behind is answered in the end, if only with an error. The SuperNode, which does not look whose
    reply it is, takes that for the reply to a later message, and from then on every reply waits in
    the node for the next message to come.
    """
    from flwr.supercore.run import RunNotRunningException

    def failing(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*given: Any) -> Any:
            try:
                return call(*given)
            except RunNotRunningException:
                raise RuntimeError("the run is over") from None

        return called

    def received(
        state: Any, pull_object: Any, confirm_message_received: Any, **others: Any
    ) -> int | None:
        run = receive(
            state=state,
            pull_object=failing(pull_object),
            confirm_message_received=failing(confirm_message_received),
            **others,
        )
        if run is None:
            state.delete_messages()  # the client may have been quick, and have replied already
        return run

    return received


class Executor:
    """Takes task after task from its SuperNode and performs them in this process."""

    def __init__(self, address: str, parent: int | None, secret: str | None) -> None:
        """`secret` is the file with what the SuperNode knows its executor by."""
        self.address, self.parent, self.secret = address, parent, secret
        self.app: ClientApp | None = None
        self.fab = ""
        self.haste = Haste(0.03, 1.0)

    def run(self, token: str = "", fab: str = "") -> None:
        import httpx
        from flwr.supercore import log

        asking = self._client()
        log(INFO, "A warm client waits for work of the SuperNode at %s", self.address)
        while self.parent is None or os.getppid() == self.parent:
            try:
                token, fab = (token, fab) if token else self._acquire(asking)
            except httpx.HTTPError:
                time.sleep(AWAY)  # the SuperNode is being started
                continue
            if not token:
                time.sleep(self.haste.wait())
                continue
            if self.fab and fab != self.fab:
                self._begin_anew(token, fab)
            self._perform(token, fab)
            token = ""
            self.haste.worked()

    def _client(self, token: str = "") -> Any:
        """Asks the SuperNode; one that holds a token has an answer to bring, and keeps trying.

        A node that was stopped for a while resets the connections of that time.
        """
        import httpx
        from flwr.supercore.interceptors import (
            RuntimeTokenHttpInterceptor,
            RuntimeVersionHttpInterceptor,
            SuperExecAuthHttpInterceptor,
        )
        from flwr.supercore.retry import RetryInvoker, constant
        from flwr.supercore.runtime import RuntimeHttpClient

        parts: list[Any] = [RuntimeVersionHttpInterceptor(component_name="flwr-clientapp")]
        if token:
            parts.append(RuntimeTokenHttpInterceptor(token))
        elif self.secret is not None:
            known_by = Path(self.secret).read_bytes()
            parts.append(
                SuperExecAuthHttpInterceptor(master_secret=known_by, protected_methods=[ACQUIRE])
            )
        again = RetryInvoker(lambda: constant(AWAY), httpx.TransportError, None, LONGEST_TRY)
        return RuntimeHttpClient.from_server_address(
            server_address=self.address,
            insecure=True,
            root_certificates=None,
            interceptors=parts,
            retry_invoker=again if token else None,
        )

    def _acquire(self, asking: Any) -> tuple[str, str]:
        """A token for the next task and the app it is for; empty if there is no task."""
        from flwr.proto.runtime_pb2 import AcquireTaskRequest
        from flwr.supercore.constant import TaskType

        request = AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP])
        answer = asking.AcquireTask(request)
        if not (answer.HasField("task") and answer.token):
            return "", ""
        return answer.token, answer.task.fab_hash

    def _begin_anew(self, token: str, fab: str) -> None:
        """Another app, or another version of it: its modules may have the names of the old ones."""
        given = [] if self.parent is None else ["--parent-pid", str(self.parent)]
        if self.secret is not None:
            given += ["--secret-file", self.secret]
        command = [sys.executable, "-m", "latecomer.deploy.warm", "client", self.address, *given]
        os.execv(sys.executable, [*command, "--token", token, "--fab", fab])

    def _perform(self, token: str, fab: str) -> None:
        """One task, as Flower's own `run_clientapp` does it, but for the end of the process."""
        from flwr.app import Error, Message
        from flwr.supercore import log
        from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
        from flwr.supernode.runtime.run_clientapp import (
            pull_task_input,
            push_message,
            push_task_output,
        )

        client = self._client(token)
        heart = HeartbeatSender(make_task_heartbeat_fn_http(client))
        message = context = reply = None
        status, details = "failed", "the client could not be run"
        try:
            heart.start()
            message, context, run, archive = pull_task_input(client)
            if self.app is None:
                # Even if it fails: a mended app must not meet the modules of this one.
                self.fab = fab
                self.app = load(run, archive)
            reply = self.app(message=message, context=context)
            status, details = "completed", ""
        except (Exception, SystemExit) as error:  # a client that calls exit() must not end ours
            details = f"{type(error)}:<'{error}'>"
            if message is None:
                log(INFO, "a task came without its message, its run may be over: %s", error)
            else:
                log(ERROR, "the client raised an error", exc_info=error)
                reply = Message(Error(2, details), reply_to=message)
        try:
            if reply is not None and context is not None:
                push_message(client, reply, context)
            push_task_output(client=client, context=context, sub_status=status, details=details)
        except Exception as error:  # the run may be over, or the SuperNode gone
            log(ERROR, "the reply could not be handed over: %s", error)
        finally:
            if heart.is_running:
                heart.stop()
            client.close()


def load(run: Any, archive: Any) -> "ClientApp":
    """The app of the run, installed and imported."""
    from flwr.cli.install import install_from_fab
    from flwr.clientapp.utils import get_load_client_app_fn

    install_from_fab(archive.content, skip_prompt=True)
    find = get_load_client_app_fn(default_app_ref="", app_path=None, multi_app=True)
    return find(run.fab_id, run.fab_version, archive.hash_str)


def main(arguments: Sequence[str]) -> None:
    if arguments[:1] == ["supernode"]:
        supernode(arguments[1:])
        return
    parser = argparse.ArgumentParser(prog="latecomer.deploy.warm")
    parser.add_argument("half", choices=["client"])
    parser.add_argument("address")
    parser.add_argument("--parent-pid", type=int)
    parser.add_argument("--secret-file")
    parser.add_argument("--token", default="")
    parser.add_argument("--fab", default="")
    given = parser.parse_args(arguments)
    Executor(given.address, given.parent_pid, given.secret_file).run(given.token, given.fab)


if __name__ == "__main__":
    main(sys.argv[1:])
