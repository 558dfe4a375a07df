"""`paceline run --hosts`: one launcher on each host, over ssh, as one run. No torch.

1. Ask all hosts at once: can ssh enter without a question, are the directory, the script and the interpreter there, are
   the versions alike? Nothing starts before all have answered well.
2. Start `paceline run --nnodes N --node-rank i` on each. They meet at the first host, at a port that it found free.
3. Show what they print, each line with its host before it. Send each a sign of life: one that hears none ends its part.
4. When one fails, the launchers tell each other and all end. One that has not ended after OTHERS_SECONDS is told to.

The client of ssh has the program on the host (paceline/on_host.py) at its other end, and a pipe of ours as its input.
When this launcher dies, however that dies, the pipe closes, and the host ends its part.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import IO, Any

from paceline.config import open_plain
from paceline.errors import LaunchError
from paceline.launcher.checks import is_local
from paceline.launcher.hosts import (
    BEAT_SECONDS,
    MARK,
    SILENT_SECONDS,
    STOP_SECONDS,
    Answer,
    Host,
    HostOptions,
    Meeting,
    addresses,
    counts,
    disagreements,
    exit_code,
    passed_variables,
    read_hosts,
    refusal,
    ssh_command,
)
from paceline.launcher.interrupts import Interrupts, Stopped
from paceline.launcher.output import say
from paceline.world import NOTICE_SECONDS, RESUMABLE

_MOST_HOSTFILE_BYTES = 2**24
ANSWER_SECONDS = 60.0  # for a host to be asked: a Python from a slow network disk takes its time
OTHERS_SECONDS = 10.0  # between the failure of one host and an order to the others to end
END_SECONDS = 12.0  # for a host to carry out that order
_CLOSE_SECONDS = 2.0  # for the connection to close when the run there has ended: a process left behind keeps it open
_MARK = MARK.encode()


@dataclass(frozen=True)
class Job:
    """What is run on the hosts.

    Attributes:
        script, module, args: as for `paceline run`.
        nproc: as typed; None: not given.
        options: further options of `paceline run`, as typed.
        meeting: how the hosts meet.
        version: of Paceline.
        grace: as for launcher.run.
        secret: that the launchers of the hosts share. It travels in ssh's pipe. None: they need none.
    """

    script: str
    module: bool
    args: Sequence[str]
    nproc: str | None
    options: Sequence[str]
    meeting: Meeting
    version: str
    grace: float | None = None
    secret: str | None = field(default=None, repr=False)


def run_on_hosts(job: Job, options: HostOptions) -> int:
    """Run the job on the hosts and wait until all have ended. Returns the exit code. Raises LaunchError where it cannot
    start."""
    text = ""
    if options.hostfile is not None:
        try:
            with open_plain(options.hostfile) as file:
                text = file.read(_MOST_HOSTFILE_BYTES).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise LaunchError(
                f"--hostfile {options.hostfile} cannot be read: {error}. Name a text file with a host in each line."
            ) from None
    hosts = read_hosts(options.hosts, options.hostfile, text)
    nproc = counts(hosts, job.nproc)
    least = job.meeting.check(len(hosts))
    variables = passed_variables(os.environ, options.env)
    here = ["@" not in host.name and is_local(host.name) for host in hosts]  # a name with a user is left to ssh
    if sum(here) > 1:
        names = " and ".join(host.name for host, local in zip(hosts, here) if local)
        raise LaunchError(f"--hosts: {names} are this machine. Name it once, with the number of processes.")
    if not all(here) and shutil.which("ssh") is None:
        raise LaunchError(
            "--hosts: there is no `ssh` on this machine. On Debian and Ubuntu: apt install openssh-client"
        )
    machines = [_Machine(*one) for one in zip(hosts, nproc, here)]
    request = {"probe": False, "directory": os.getcwd(), "environ": variables}
    grace = NOTICE_SECONDS if job.grace is None else job.grace or None
    with Interrupts(stoppable=True, grace=grace) as interrupts:
        try:
            while True:
                watch = _run_once(job, options, machines, least, request, interrupts)
                machines = watch.machines_to_meet_again(least) if job.meeting.may_move else []
                if not machines:
                    return watch.exit_code
                watch.wait_for_the_lost(machines)
        except Stopped as stopped:
            return stopped.report()
        except BrokenPipeError:  # who read our output has gone, as `| head`: as a program that SIGPIPE ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 128 + signal.SIGPIPE


@dataclass(frozen=True)
class _Machine:
    """One host of a run: how many processes (as typed) run there, and whether it is this machine."""

    host: Host
    nproc: str
    here: bool


def _run_once(
    job: Job,
    options: HostOptions,
    machines: Sequence[_Machine],
    least: int,
    request: Mapping[str, Any],
    interrupts: Interrupts,
) -> _Watch:
    """Ask the hosts, start the job on them, and wait until all have ended. Raises LaunchError where it cannot start."""
    hosts, here = [machine.host for machine in machines], [machine.here for machine in machines]
    commands = [_command(machine, options) for machine in machines]
    asked = {**request, "probe": True, "script": job.script, "module": job.module}
    answers = _ask(hosts, commands, asked, options, job.version)
    reached = addresses(answers, here)
    remotes: list[_Remote] = []
    try:
        for number, machine in enumerate(machines):
            place = job.meeting.options(number, reached, answers[0].port, least)
            words = ["run", *job.options, "--nproc", machine.nproc, *place]
            arguments = [*words, *(["-m"] if job.module else []), job.script, *job.args]
            address = reached[number] if len(machines) > 1 else ""
            what = {**request, "arguments": arguments, "address": address}
            if job.secret is not None and len(machines) > 1:
                what["secret"] = job.secret
            remotes.append(_Remote(machine, commands[number], what))
        interrupts.deferred = True
        watch = _Watch(remotes, interrupts, most_lost=len(machines) - least, hosts_decide=job.grace is None)
        watch.run()
        return watch
    finally:
        for remote in remotes:
            remote.close()


def _command(machine: _Machine, options: HostOptions) -> list[str]:
    python = options.python or sys.executable
    if machine.here:
        return [python, "-m", "paceline.on_host"]
    return ssh_command(machine.host, options, python, os.environ.get("PYTHONPATH"))


# ---------------------------------------------------------------- asking


def _ask(
    hosts: Sequence[Host],
    commands: Sequence[Sequence[str]],
    request: Mapping[str, Any],
    options: HostOptions,
    version: str,
) -> list[Answer]:
    """What each host answers. Raises LaunchError with all that keeps the run from starting, of all hosts."""
    python = options.python or sys.executable
    clients = [_popen(command) for command in commands]
    try:
        line = f"{json.dumps(request)}\n".encode()
        with ThreadPoolExecutor(len(clients)) as pool:
            try:
                said = list(pool.map(lambda client: _converse(client, line), clients))
            except BaseException:
                for client in clients:
                    _kill(client)  # or else the pool's threads would be waited for
                raise
    finally:
        for client in clients:
            _kill(client)
            client.wait()
    faults, answers = [], {}
    for host, client, (output, error) in zip(hosts, clients, said):
        _, mark, text = output.rpartition(MARK)
        if mark:
            answers[host] = Answer(**json.loads(text.splitlines()[0]))
        elif client.returncode is not None and client.returncode >= 0:
            faults.append(refusal(host, client.returncode, error, options, python, version))
        else:
            last = f" (it said: {error.strip().splitlines()[-1]})" if error.strip() else ""
            by_hand = f"ssh {host.name} {python} -V"
            faults.append(f"host {host.name}: no answer for {ANSWER_SECONDS:.0f} s{last}. Does `{by_hand}` work?")
    faults += disagreements(answers, version)
    if faults:
        raise LaunchError("Nothing was started.\n" + "\n".join(faults))
    return list(answers.values())


def _converse(client: subprocess.Popen[bytes], line: bytes) -> tuple[str, str]:
    """(stdout, stderr) of a client that is told one line. Empty, where it takes too long."""
    try:
        output, error = client.communicate(line, timeout=ANSWER_SECONDS)
    except subprocess.TimeoutExpired:
        _kill(client)
        output, error = client.communicate()
    return output.decode(errors="replace"), error.decode(errors="replace")


def _popen(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """In a session of its own, so that a Ctrl-C at the terminal reaches only this launcher, which passes it on."""
    pipe = subprocess.PIPE
    try:
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
    except OSError as error:
        raise LaunchError(f"{command[0]} cannot be run: {error.strerror}. Name another with --python.") from None


def _kill(client: subprocess.Popen[bytes]) -> None:
    """With what it has started, such as a ProxyCommand, which would hold its streams open."""
    if client.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(client.pid, signal.SIGKILL)


# ---------------------------------------------------------------- running


class _Remote:
    """The run on one host: ssh's client, and what came from it."""

    def __init__(self, machine: _Machine, command: Sequence[str], request: Mapping[str, Any]) -> None:
        self.machine, self.host = machine, machine.host
        self.code: int | None = None  # of `paceline run` there, once it has told it
        self.told = False  # was it told to end?
        self.last = ""  # the last line on stderr
        self.closed_by: float | None = None  # when the connection is closed from here
        self.client = _popen(command)
        assert self.client.stdin is not None
        assert self.client.stdout is not None
        assert self.client.stderr is not None
        self._input = self.client.stdin
        self.streams = {self.client.stdout: sys.stdout, self.client.stderr: sys.stderr}
        self._parts = dict.fromkeys(self.streams, b"")  # of a line whose end has not come
        with contextlib.suppress(BrokenPipeError):  # it has failed already
            self._input.write(f"{json.dumps(request)}\n".encode())
            self._input.flush()
        os.set_blocking(self._input.fileno(), False)

    def send(self, text: str) -> None:
        with contextlib.suppress(OSError):  # it has ended; or its pipe is full, since the network is cut
            os.write(self._input.fileno(), f"{text}\n".encode())

    def read(self, stream: IO[bytes]) -> bool:
        """Show what has come on a stream. Returns whether more may come."""
        data = os.read(stream.fileno(), 65536)
        *lines, rest = (self._parts[stream] + data).split(b"\n")
        if not data and rest:
            lines, rest = [*lines, rest], b""
        self._parts[stream] = rest
        target = self.streams[stream]
        for line in lines:
            shown, mark, told = line.partition(_MARK)
            if mark:
                self.code = json.loads(told)["exit"]
                self.closed_by = time.monotonic() + _CLOSE_SECONDS
                if not shown:
                    continue
            text = shown.decode(errors="replace").rstrip("\r")
            if target is sys.stderr and text.strip():
                self.last = text
            target.write(f"[{self.host.name}] {text}\n")
        target.flush()
        if not data:
            del self.streams[stream]
        return bool(data)

    @property
    def ended(self) -> bool:
        return not self.streams

    @property
    def is_surely_gone(self) -> bool:
        """Has the run there ended? It was a child of this process. ssh ends alike where the connection breaks and where
        the program at its other end is killed."""
        return self.machine.here

    def hang_up(self) -> None:
        """End the client of ssh. The host's part, if it still runs, sees its input end."""
        with contextlib.suppress(OSError):
            self._input.close()
        if self.client.poll() is None:
            self.client.terminate()

    def close(self) -> None:
        self.hang_up()
        try:
            self.client.wait(timeout=2.0)
        except subprocess.TimeoutExpired:
            _kill(self.client)
            self.client.wait()
        for stream in (self.client.stdout, self.client.stderr):
            if stream is not None:
                stream.close()


class _Watch:
    """The hosts of a run, until all have ended.

    Args:
        remotes: the hosts.
        interrupts: whether Ctrl-C or SIGTERM came.
        most_lost: how many may fail while the others go on.
        hosts_decide: does each host decide whether SIGTERM asks it to save a checkpoint?
    """

    def __init__(
        self, remotes: Sequence[_Remote], interrupts: Interrupts, most_lost: int, hosts_decide: bool = False
    ) -> None:
        self.exit_code = 1  # of the run, once it has ended
        self._remotes, self._interrupts, self._most_lost = remotes, interrupts, most_lost
        self._hosts_decide = hosts_decide
        self._noticed = False  # have the hosts heard of SIGTERM, where they decide?
        self._lost: dict[_Remote, float] = {}  # hosts whose launcher has gone without a word, and when
        self._ended: list[tuple[str, int | None]] = []  # (host, exit code) of those that ended without being told
        self._failed_at: float | None = None  # when too many had failed
        self._told_at: float | None = None  # when the others were told to end
        self._beat_at, self._beaten = 0.0, ""  # when the hosts last heard from here, and what
        self._unreached: list[str] = []

    def run(self) -> None:
        """Until all have ended. Raises Stopped when a signal has ended the run."""
        with selectors.DefaultSelector() as selector:
            for remote in self._remotes:
                for stream in remote.streams:
                    selector.register(stream, selectors.EVENT_READ, remote)
            running = list(self._remotes)
            while running:
                for key, _ in selector.select(0.1):
                    if not key.data.read(key.fileobj):
                        selector.unregister(key.fileobj)
                now = time.monotonic()
                for remote in running:
                    if remote.closed_by is not None and now > remote.closed_by and not remote.ended:
                        self._leave(selector, remote)
                for remote in [remote for remote in running if remote.ended]:
                    running.remove(remote)
                    self._note(remote, now)
                self._beat(running, now)
                self._end_others(running, now)
        if self._unreached:
            say(
                f"paceline: {', '.join(self._unreached)} did not answer when told to end. What runs there ends by "
                f"itself, {SILENT_SECONDS:.0f} s after it last heard from here.\n"
            )
        self._interrupts.check()
        lost = sum(code != 0 for _, code in self._ended)
        if any(code == RESUMABLE for _, code in self._ended):
            self.exit_code = RESUMABLE
        elif lost <= self._most_lost and len(self._ended) == len(self._remotes) and lost < len(self._remotes):
            self.exit_code = 0
        else:
            self.exit_code = exit_code(self._ended)

    # --- when the host is lost that kept the rendezvous

    @property
    def _keeper(self) -> _Remote:
        return self._remotes[0]

    def machines_to_meet_again(self, least: int) -> list[_Machine]:
        """The machines that are left, where the one that kept the rendezvous is lost, no other has ended its part, and
        `least` are enough; or else none."""
        left = [remote.machine for remote in self._remotes if remote not in self._lost]
        if self._keeper not in self._lost or len(left) < least or any(code == 0 for _, code in self._ended):
            return []
        return left

    def wait_for_the_lost(self, left: Sequence[_Machine]) -> None:
        """Until nothing can run any more on the lost hosts: a second run beside the first would write into the same
        checkpoints. Raises Stopped."""
        names = ", ".join(machine.host.name for machine in left)
        say(f"paceline: {self._keeper.host.name} kept the rendezvous. {names} will meet again without it.\n")
        unsure = {remote.host.name: when for remote, when in self._lost.items() if not remote.is_surely_gone}
        ends = max(unsure.values()) + SILENT_SECONDS + STOP_SECONDS if unsure else 0.0
        if unsure:
            say(
                f"paceline: {', '.join(unsure)} may only be cut off. What runs there ends by itself within "
                f"{ends - time.monotonic():.0f} s, and is waited for.\n"
            )
        self._interrupts.deferred = False
        while True:
            self._interrupts.check()
            if time.monotonic() > ends:
                return
            time.sleep(0.1)

    def _leave(self, selector: selectors.BaseSelector, remote: _Remote) -> None:
        """Stop reading from a host: it has ended, or does not end."""
        for stream in list(remote.streams):
            selector.unregister(stream)
        remote.streams.clear()
        remote.hang_up()

    def _note(self, remote: _Remote, now: float) -> None:
        """A host has ended: say so if it failed."""
        name = remote.host.name
        if remote.told:
            if remote.code is None:
                self._unreached.append(name)
            return
        self._ended.append((name, remote.code))
        failed = [host for host, code in self._ended if code not in (0, RESUMABLE)]
        if remote.code in (0, RESUMABLE):  # all of them have saved, and the first says where
            return
        if remote.code is None:
            self._lost[remote] = now
            last = f" The last line on its stderr: {remote.last}" if remote.last else ""
            say(f"paceline: host {name} is lost: its launcher was killed, or the connection broke.{last}\n")
        elif remote.code != 2 or len(failed) == 1:
            say(f"paceline: host {name} ended with exit code {remote.code}.\n")
        if remote is self._keeper and remote.code is None and self._most_lost:
            self._failed_at = now - OTHERS_SECONDS  # the others cannot go on, and might wait for it to come back
        elif len(failed) > self._most_lost and self._failed_at is None:
            self._failed_at = now

    def _beat(self, running: Sequence[_Remote], now: float) -> None:
        """A sign of life. After a signal that asks the run to save a checkpoint and end (stop_request.py) it says that,
        at once, and each time: the first one may come too early there. SIGTERM that the hosts decide on is passed on
        once: one that comes early ends the run there, and a second would hurry its end."""
        asked = self._interrupts.asked
        if asked == signal.SIGTERM and self._hosts_decide:
            word = "alive" if self._noticed else "notice"
            self._noticed = True
        else:
            word = "alive" if asked is None else "save"
        if now - self._beat_at >= BEAT_SECONDS or word != self._beaten:
            self._beat_at, self._beaten = now, word
            for remote in running:
                remote.send(word)

    def _end_others(self, running: Sequence[_Remote], now: float) -> None:
        """After a failure, or a signal: let the others end, tell them to, and in the end leave them."""
        signum = self._interrupts.due
        if signum is None and (self._failed_at is None or now - self._failed_at < OTHERS_SECONDS):
            return
        if self._told_at is None:
            self._told_at = now
            for remote in running:
                remote.told = True
                remote.send(f"stop {int(signum or signal.SIGTERM)}")
        elif now - self._told_at > END_SECONDS or self._interrupts.impatient:
            for remote in running:
                remote.closed_by = 0.0
