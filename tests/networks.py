"""Ray nodes in network, pid and mount namespaces of their own on this machine, joined by a bridge.

For raylane they are machines that share no memory, no pids and no abstract sockets. Needs root and iproute2.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests import certificates
from tests.process_tools import parents

ROOT = Path(__file__).parents[1]
NODES = ("head", "one", "two", "three")
"""Names of the nodes of `Hosts`, which are resources too."""
DONE = "said: done"
RAY = Path(sys.executable).parent / "ray"
DRIVER_LIMIT_S = 480
"""Seconds after which a driver is killed. On an idle machine the longest takes 110."""


def refused() -> str | None:
    """Return the reason why this machine cannot create such namespaces; None if it can."""
    name = f"rlt{secrets.token_hex(3)}"
    try:
        subprocess.run(["ip", "netns", "add", name], check=True, capture_output=True, text=True)
        try:
            inside = ["ip", "netns", "exec", name, *UNSHARE, "true"]
            subprocess.run(inside, check=True, capture_output=True, text=True)
            link = ["ip", "link", "add", f"{name}v", "type", "veth", "peer", "name", "eth0", "netns", name]
            subprocess.run(link, check=True, capture_output=True, text=True)
            bridge = ["ip", "link", "add", f"{name}b", "type", "bridge"]
            subprocess.run(bridge, check=True, capture_output=True, text=True)
        finally:
            subprocess.run(["ip", "link", "del", f"{name}b"], check=False, capture_output=True)
            subprocess.run(["ip", "link", "del", f"{name}v"], check=False, capture_output=True)
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
    except FileNotFoundError as error:
        return f"no such program: {error.filename}"
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {error.stderr.strip()}"
    return None


UNSHARE = ("unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child")


class Network:
    """Bridge and the namespaces on it. `addresses` are those of the namespaces, in order."""

    def __init__(self, count: int) -> None:
        self.tag = f"rl{secrets.token_hex(3)}"
        subnet = f"10.213.{secrets.randbelow(250)}"
        self.names = [f"{self.tag}n{i}" for i in range(count)]
        self.addresses = [f"{subnet}.{i + 1}" for i in range(count)]
        self.processes: list[subprocess.Popen[str]] = []
        self.environment = {
            "RAY_AUTH_MODE": "token",  # newer Rays ask for one by default, older ones do not know it
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "PYTHONUNBUFFERED": "1",
            # In /tmp/ray, which each namespace has to itself: a file there with the address of a node started last
            # would make other programs on this machine connect to that node.
            "RAY_TMPDIR": "/tmp",
        }

    def make(self) -> None:
        self._ip("link", "add", f"{self.tag}b", "type", "bridge")
        self._ip("link", "set", f"{self.tag}b", "up")
        for name, address in zip(self.names, self.addresses, strict=True):
            self._ip("netns", "add", name)
            self._ip("link", "add", f"{name}v", "type", "veth", "peer", "name", "eth0", "netns", name)
            self._ip("link", "set", f"{name}v", "master", f"{self.tag}b", "up")
            self._ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            self._ip("-n", name, "link", "set", "eth0", "up")
            self._ip("-n", name, "link", "set", "lo", "up")

    def _ip(self, *words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True, text=True)

    def plug(self, index: int, *, connected: bool) -> None:
        """Disconnect a namespace's cable, or connect it again."""
        self._ip("link", "set", f"{self.names[index]}v", "up" if connected else "down")

    def start(self, index: int, script: str) -> subprocess.Popen[str]:
        """Run a shell script in a namespace, with a pid namespace and a /tmp/ray of its own. It ends with the test."""
        shell = f"set -e; mkdir -p /tmp/ray; mount -t tmpfs raylane /tmp/ray; {script}"
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.names[index], *UNSHARE, "sh", "-c", shell],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # Ray must use the /tmp/ray of the namespace: elsewhere it would leave the address of this cluster behind.
            env={**os.environ, "RAY_TMPDIR": "/tmp", **self.environment},
        )
        self.processes.append(process)
        return process

    def close(self) -> None:
        for process in self.processes:
            process.kill()  # --kill-child ends the first process of the namespace, and with it all others
            process.wait(30)
            close_streams(process)
        for name in self.names:
            subprocess.run(["ip", "link", "del", f"{name}v"], check=False, capture_output=True)
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", f"{self.tag}b"], check=False, capture_output=True)


class Weather:
    """Requests of the driver; everything happens on the cable of the second node."""

    def __init__(self, net: Network) -> None:
        self._net = net
        self.skipped: dict[str, str] = {}
        """Actions that were not possible, with the reason."""

    def do(self, wanted: str) -> None:
        name = self._net.names[1]
        if wanted in ("cut", "restore"):
            self._net.plug(1, connected=wanted == "restore")
            return
        # In both directions: this end sends to the node, and the other one for it.
        for where in ([], ["ip", "netns", "exec", name]):
            device = f"{name}v" if not where else "eth0"
            subprocess.run([*where, "tc", "qdisc", "del", "dev", device, "root"], check=False, capture_output=True)
            size = "1280" if wanted == "small packets" else "1500"
            subprocess.run([*where, "ip", "link", "set", device, "mtu", size], check=True, capture_output=True)
            rule = {
                "gigabit": "tbf rate 1gbit burst 1mb latency 50ms",
                "slow": "tbf rate 200mbit burst 256kbit latency 50ms",
                "throttle": "tbf rate 80mbit burst 64kbit latency 50ms",
                "lose": "netem loss 2% delay 5ms 2ms",
            }.get(wanted)
            if rule is not None:
                words = [*where, "tc", "qdisc", "add", "dev", device, "root", *rule.split()]
                done = subprocess.run(words, check=False, capture_output=True, text=True)
                if done.returncode:
                    self.skipped[wanted] = done.stderr.strip()

    def until_done(self, driver: subprocess.Popen[str]) -> str:
        """Do what a driver asks for until it is done, has ended, or is killed after the limit; return what it said."""
        heard: list[str] = []

        def end() -> None:
            heard.append(f"killed, as it was not done after {DRIVER_LIMIT_S} s")
            kill_group(driver)

        timer = threading.Timer(DRIVER_LIMIT_S, end)
        timer.start()
        assert driver.stdout is not None
        assert driver.stdin is not None
        for line in driver.stdout:
            heard.append(line.rstrip())
            if line.startswith("ask: "):
                self.do(line.removeprefix("ask: ").strip())
                driver.stdin.write("done\n")
                driver.stdin.flush()
            if DONE in line:
                break
        timer.cancel()
        return "\n".join(heard)


def ray_node(address: str, head: str | None, resource: str) -> str:
    """Return shell words that start a Ray node of two CPUs in the background, as the head if `head` is None."""
    role = "--head --port=6399 --include-dashboard=false" if head is None else f"--address={head}:6399"
    return (
        f"{RAY} start {role} --node-ip-address={address} --num-cpus=2 --object-store-memory=80000000 "
        f"--resources='{{\"{resource}\": 1}}' --disable-usage-stats"
    )


class Hosts:
    """Four Ray nodes, each with a /dev/shm of its own and a resource of its name, for one driver after the other."""

    def __init__(self, authority: Path | None) -> None:
        """Make the namespaces and start the nodes, with TLS if there is a folder for an authority."""
        self.net = Network(len(NODES))
        try:
            self.net.make()
            if authority is not None:
                made = certificates.make_authority(authority / "authority")
                self.net.environment |= certificates.make_certificate(made, authority / "node", *self.net.addresses)
            self._nodes = [self._start(index) for index in range(len(NODES))]
            for process in self._nodes:
                assert process.stdout is not None
                printed = ""
                while "node is up" not in (line := process.stdout.readline()):
                    printed += line
                    assert line, f"a Ray node did not start: {printed}"
        except BaseException:
            self.net.close()
            raise

    def _start(self, index: int) -> subprocess.Popen[str]:
        head, address, resource = self.net.addresses[0], self.net.addresses[index], NODES[index]
        start = ray_node(address, head if index else None, resource)
        # The head may take its time: another node is started again until it has found the head.
        start = f"until {start} >/dev/null 2>&1; do sleep 0.2; done" if index else f"{start} >/dev/null"
        return self.net.start(
            index, f"mount -t tmpfs raylane /dev/shm; {self._prepare()}; {start}; echo node is up; cat"
        )

    @staticmethod
    def _prepare() -> str:
        return f"cd {ROOT}; export PYTHONPATH={ROOT}/src:{ROOT}"

    def run(self, node: str, script: str) -> subprocess.Popen[str]:
        """Run a shell script in the namespaces of a node, in a process group of its own."""
        outer = self._nodes[NODES.index(node)].pid
        first = next(pid for pid, parent in parents().items() if parent == outer)  # the first of the pid namespace
        return subprocess.Popen(
            ["nsenter", f"--target={first}", "--net", "--mount", "--pid", "sh", "-c", f"set -e; {script}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **self.net.environment},
            start_new_session=True,
        )

    def drive(self, module: str, *words: str) -> tuple[str, dict[str, str]]:
        """Run a driver, a module, on the head, with the head's address and other words; for at most DRIVER_LIMIT_S.

        Return what it printed, and the changes of the cable that were not possible, with the reason. After a driver
        that was not done the nodes are not used again.
        """
        weather = Weather(self.net)
        begin = f"{self._prepare()}; exec {sys.executable} -m {module} {self.net.addresses[0]}"
        driver = self.run("head", f"{begin} {' '.join(words)}")
        text = ""
        try:
            text = weather.until_done(driver)
            if DONE in text:
                driver.wait(60)
        finally:
            if driver.poll() is None:
                kill_group(driver)
            close_streams(driver)
            if DONE not in text:
                close_shared()
        return text, weather.skipped


def close_streams(process: subprocess.Popen[str]) -> None:
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()


def kill_group(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(30)


_shared: dict[bool, Hosts] = {}
"""Nodes that tests of this process share, by whether they use TLS."""


def shared(*, secured: bool, folder: Path) -> Hosts:
    """Return the nodes that tests share; start them on first use. Skips the test where there are no namespaces."""
    if secured not in _shared:
        why = refused()
        if why is not None:
            pytest.skip(f"namespaces cannot be made here: {why}")
        close_shared()  # eight nodes at once would be too much for a small machine
        _shared[secured] = Hosts(folder if secured else None)
    return _shared[secured]


def close_shared() -> None:
    """End the nodes that tests share, if there are any."""
    while _shared:
        _shared.popitem()[1].net.close()
