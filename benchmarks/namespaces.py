# SPDX-License-Identifier: Apache-2.0
"""Hosts for tests and benchmarks of several nodes: network namespaces, joined by a bridge in a further one.

The namespaces have no names. The kernel removes them, with their links, once the process that made them and
all processes in them have ended, however they end.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import threading
from pathlib import Path
from types import TracebackType

INTERFACE = "eth0"  # of each host
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET


def unavailable() -> str:
    """Return why this process cannot make hosts; "" if it can."""
    if os.geteuid() != 0:
        return "only root can make network namespaces"
    for tool, package in (("ip", "iproute2"), ("nsenter", "util-linux")):
        if not shutil.which(tool):
            return f"{tool} is not installed (Debian: {package})"
    try:
        Network(1).close()
    except OSError as error:
        return f"network namespaces are not available here: {error}"
    return ""


def enter(namespace: str) -> None:
    """Move this thread, and threads that it starts, into a network namespace."""
    descriptor = os.open(namespace, os.O_RDONLY)
    try:
        _must(ctypes.CDLL(None, use_errno=True).setns(descriptor, _NEW_NETWORK))
    finally:
        os.close(descriptor)


class Network:
    """Hosts on one bridge. Each has the interface eth0, and a loopback interface of its own."""

    def __init__(self, hosts: int) -> None:
        self._namespaces: list[int] = []  # the bridge's, then one of each host
        try:
            for _ in range(1 + hosts):
                self._namespaces.append(_new_namespace())
            self._ip(0, "link add bridge type bridge", "link set bridge up")
            for host, address in enumerate(self.addresses):
                place = self.path(host)
                self._ip(
                    0,
                    f"link add host{host} type veth peer name {INTERFACE} netns {place}",
                    f"link set host{host} master bridge up",
                )
                own = f"addr add {address}/24 dev {INTERFACE}"
                self._ip(1 + host, own, f"link set {INTERFACE} up", "link set lo up")
        except BaseException:
            self.close()
            raise

    @property
    def addresses(self) -> list[str]:
        return [f"10.77.0.{number}" for number in range(1, len(self._namespaces))]

    def path(self, host: int) -> str:
        """Return a host's namespace, for `enter` and nsenter; valid while this process has the network."""
        return self._path(1 + host)

    def command(self, host: int, *command: str) -> list[str]:
        """Return the command line that runs a command on a host."""
        return ["nsenter", f"--net={self.path(host)}", *command]

    def cut(self, host: int) -> None:
        """Cut a host's cable: it has no carrier any more, and what is sent to it is lost."""
        self._ip(0, f"link set host{host} down")

    def restore(self, host: int) -> None:
        self._ip(0, f"link set host{host} up")

    def delay(self, text: str) -> None:
        """Delay each packet by a time such as "1ms", on the way to each host.

        Raises:
            RuntimeError: tc or the kernel lacks netem.
        """
        self._shape(f"delay packets by {text}", "netem", "delay", text)

    def limit(self, rate: str) -> None:
        """Limit the way to each host to a rate such as "10gbit", in bits per second.

        Raises:
            RuntimeError: tc or the kernel lacks tbf.
        """
        self._shape(f"limit the rate to {rate}", "tbf", "rate", rate, "burst", "1mb", "latency", "100ms")

    def _shape(self, what: str, kind: str, *arguments: str) -> None:
        if not shutil.which("tc"):
            raise RuntimeError(f"to {what} needs tc (Debian: iproute2)")
        for host in range(len(self.addresses)):
            command = ["nsenter", f"--net={self._path(0)}", "tc", "qdisc", "add", "dev", f"host{host}"]
            done = subprocess.run([*command, "root", kind, *arguments], capture_output=True, text=True)
            if done.returncode != 0:
                raise RuntimeError(f"tc cannot {what} (kernel module sch_{kind}): {done.stderr}")

    def close(self) -> None:
        while self._namespaces:
            os.close(self._namespaces.pop())

    def __enter__(self) -> Network:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _path(self, index: int) -> str:
        return f"/proc/{os.getpid()}/fd/{self._namespaces[index]}"

    def _ip(self, index: int, *commands: str) -> None:
        command = ["nsenter", f"--net={self._path(index)}", "ip", "-batch", "-"]
        done = subprocess.run(command, input="\n".join(commands), capture_output=True, text=True)
        if done.returncode != 0:
            raise OSError(f"ip: {done.stderr.strip()}")


def _new_namespace() -> int:
    """Make a network namespace; return the descriptor that keeps it."""
    made: list[int | OSError] = []

    def make() -> None:
        try:
            _must(ctypes.CDLL(None, use_errno=True).unshare(_NEW_NETWORK))
            made.append(os.open(Path("/proc/thread-self/ns/net"), os.O_RDONLY))
        except OSError as error:
            made.append(error)

    thread = threading.Thread(target=make)  # only this thread leaves the network of the process
    thread.start()
    thread.join()
    if isinstance(made[0], OSError):
        raise made[0]
    return made[0]


def _must(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
