"""Warm nodes: a SuperNode with a shorter poll interval, and a permanent client process.

A stock SuperNode polls every 3 s and starts a new process for every message, which imports torch
and reads the data again. A warm node keeps one client process and polls often after work; an idle
one polls as rarely as a stock node.

Uses private parts of Flower, of the versions in KNOWN; callers check `is_known` first. Runs as a
program, once for each half of a node.
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
TOKEN_VARIABLE = "LATECOMER_TASK_TOKEN"
ACQUIRE = "/flwr.proto.Runtime/AcquireTask"
REPLY_SECONDS = 0.05  # between two looks for the client's reply; a stock node takes 0.5 s
RETRY_SECONDS = 0.5  # after a failed connection
MAX_RETRY_SECONDS = 120.0


def is_known(version: str) -> bool:
    """Whether warm nodes have been tested with this version of Flower."""
    return ".".join(version.split(".")[:2]) in KNOWN


class PollInterval:
    """Seconds to the next poll: `shortest` after work, then growing by `growth` to `longest`."""

    def __init__(self, shortest: float, longest: float, growth: float = 1.3) -> None:
        self.shortest, self.longest, self.growth = shortest, longest, growth
        self._next = shortest

    def reset(self) -> None:
        self._next = self.shortest

    def wait(self) -> float:
        now, self._next = self._next, min(self.longest, self._next * self.growth)
        return now


def supernode(arguments: Sequence[str]) -> None:
    """Run `flower-supernode` with other poll intervals, until its supervisor ends."""
    import flwr.supernode.start_client_internal as loop
    from flwr.supercore.app_utils import start_parent_process_monitor
    from flwr.supernode.cli.flower_supernode import flower_supernode

    interval = PollInterval(0.1, 3.0)

    def sleep(seconds: float) -> None:
        if seconds < 1.0:  # waiting for the client: there is work
            interval.reset()
            time.sleep(REPLY_SECONDS)
        else:
            time.sleep(interval.wait())

    vars(loop)["time"] = SimpleNamespace(sleep=sleep)
    vars(loop)["_pull_and_store_message"] = cleaning_up(loop._pull_and_store_message)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--parent-pid", type=int)
    ours, theirs = parser.parse_known_args(arguments)
    if ours.parent_pid is not None:
        start_parent_process_monitor(ours.parent_pid)
    sys.argv = ["flower-supernode", *theirs]
    flower_supernode()


def cleaning_up(receive: Callable[..., int | None]) -> Callable[..., int | None]:
    """The function that receives a message, made to clean up when the run ends meanwhile.

    Flower cleans up after an `Exception`, but the end of a run raises a `BaseException`. The task
    that is left over gets an error reply. The SuperNode does not check to which message a reply
    belongs, takes it for the reply to a later message, and from then on every reply stays in the
    node until the next message comes.
    """
    from flwr.supercore.run import RunNotRunningException

    def translating(call: Callable[..., Any]) -> Callable[..., Any]:
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
            pull_object=translating(pull_object),
            confirm_message_received=translating(confirm_message_received),
            **others,
        )
        if run is None:
            state.delete_messages()  # the client may already have replied
        return run

    return received


class Executor:
    """Takes tasks from its SuperNode, one after another, and runs them in this process.

    parent: pid of the supervisor, with which it ends.
    secret: file with the secret that authenticates it to the SuperNode.
    """

    def __init__(self, address: str, parent: int | None, secret: str | None) -> None:
        self.address, self.parent, self.secret = address, parent, secret
        self.app: ClientApp | None = None
        self.fab = ""
        self.interval = PollInterval(0.03, 1.0)

    def run(self, token: str = "", fab: str = "") -> None:
        import httpx
        from flwr.supercore import log

        asking = self._client()
        log(INFO, "A warm client waits for work of the SuperNode at %s", self.address)
        while self.parent is None or os.getppid() == self.parent:
            try:
                token, fab = (token, fab) if token else self._acquire(asking)
            except httpx.HTTPError:
                time.sleep(RETRY_SECONDS)  # the SuperNode is starting
                continue
            if not token:
                time.sleep(self.interval.wait())
                continue
            if self.fab and fab != self.fab:
                self._restart(token, fab)
            self._perform(token, fab)
            token = ""
            self.interval.reset()

    def _client(self, token: str = "") -> Any:
        """An HTTP client for the SuperNode; with a task's token, it retries failed connections.

        A SuperNode process that was stopped for a while resets its connections.
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
            secret = Path(self.secret).read_bytes()
            parts.append(
                SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=[ACQUIRE])
            )
        again = RetryInvoker(
            lambda: constant(RETRY_SECONDS), httpx.TransportError, None, MAX_RETRY_SECONDS
        )
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

    def _restart(self, token: str, fab: str) -> None:
        """Restart for another app or version, whose modules may have the names of loaded ones."""
        given = [] if self.parent is None else ["--parent-pid", str(self.parent)]
        if self.secret is not None:
            given += ["--secret-file", self.secret]
        command = [sys.executable, "-m", "latecomer.deploy.warm", "client", self.address, *given]
        # Not on the command line, which every user of the machine can read.
        environment = {**os.environ, TOKEN_VARIABLE: token}
        os.execve(sys.executable, [*command, "--fab", fab], environment)

    def _perform(self, token: str, fab: str) -> None:
        """Run one task as Flower's `run_clientapp` does, without the end of the process."""
        from flwr.app import Error, Message
        from flwr.supercore import log
        from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
        from flwr.supernode.runtime.run_clientapp import (
            pull_task_input,
            push_message,
            push_task_output,
        )

        client = self._client(token)
        heartbeat = HeartbeatSender(make_task_heartbeat_fn_http(client))
        message = context = reply = None
        status, details = "failed", "the client could not be run"
        try:
            heartbeat.start()
            message, context, run, archive = pull_task_input(client)
            if self.app is None:
                # Even if loading fails: a corrected app must not find the modules of this one.
                self.fab = fab
                self.app = load(run, archive)
            reply = self.app(message=message, context=context)
            self._delay(message, context)
            status, details = "completed", ""
        except (Exception, SystemExit) as error:  # also if the client calls exit()
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
        except Exception as error:  # the run may have ended, or the SuperNode
            log(ERROR, "the reply could not be handed over: %s", error)
        finally:
            if heartbeat.is_running:
                heartbeat.stop()
            client.close()

    def _delay(self, message: Any, context: Any) -> None:
        """Imitate a slow device: `delay` in the node-config, unless the app follows it itself."""
        is_task = str(message.metadata.message_type).partition(".")[0] == "train"
        if is_task and not getattr(self.app, "follows_delay", False):
            time.sleep(float(context.node_config.get("delay", 0.0)))


def load(run: Any, archive: Any) -> "ClientApp":
    """Install and import the ClientApp of a run."""
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
    parser.add_argument("--fab", default="")
    given = parser.parse_args(arguments)
    token = os.environ.pop(TOKEN_VARIABLE, "")
    Executor(given.address, given.parent_pid, given.secret_file).run(token, given.fab)


if __name__ == "__main__":
    main(sys.argv[1:])
