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
_MOST_LINES = 50  # of a host's stderr, that are kept
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
    grace = NOTICE_SECONDS if job.grace is None else job.grace or None
    with Interrupts(stoppable=True, grace=grace) as interrupts:
        try:
            while True:
                with _Run(job, options, machines, least, variables, interrupts) as run:
                    run.start(run.ask())
                    run.watch()
                machines = run.machines_to_meet_again(least) if job.meeting.may_move else []
                if not machines:
                    return run.exit_code
                run.wait_for_the_lost(machines)
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


class _Remote:
    """One host, and the program there (paceline/on_host.py) behind ssh.

    Attributes:
        answer: what the host said of itself; None: nothing yet.
        code: the exit code of `paceline run` there, once it has told it.
        told: was it told to end?
        said: lines on stderr; those that come before the run there begins are not shown.
        closed_by: when the connection is closed from here.
    """

    def __init__(self, machine: _Machine, command: Sequence[str]) -> None:
        self.machine, self.name = machine, machine.host.name
        self.answer: Answer | None = None
        self.code: int | None = None
        self.told = False
        self.said: list[str] = []
        self.closed_by = float("inf")
        self._began = False
        pipe = subprocess.PIPE
        try:  # in a session of its own: a Ctrl-C at the terminal reaches only this launcher, which passes it on
            self.client = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
        except OSError as error:
            raise LaunchError(f"{command[0]} cannot be run: {error.strerror}. Name another with --python.") from None
        assert self.client.stdin is not None
        assert self.client.stdout is not None
        assert self.client.stderr is not None
        self._input = self.client.stdin.fileno()
        self.streams = {self.client.stdout: sys.stdout, self.client.stderr: sys.stderr}
        self._parts = dict.fromkeys(self.streams, b"")  # of a line whose end has not come

    def request(self, what: Mapping[str, Any]) -> None:
        self._began = self.answer is not None
        with contextlib.suppress(BrokenPipeError), open(self._input, "wb", closefd=False) as file:
            file.write(f"{json.dumps(what)}\n".encode())

    def send(self, text: str) -> None:
        """To the run there. It has ended, where this fails; or its pipe is full, since the network is cut."""
        os.set_blocking(self._input, False)
        with contextlib.suppress(OSError):
            os.write(self._input, f"{text}\n".encode())

    def read(self, stream: IO[bytes]) -> bool:
        """Take what has come on a stream. Returns whether more may come."""
        data = os.read(stream.fileno(), 65536)
        *lines, rest = (self._parts[stream] + data).split(b"\n")
        self._parts[stream] = rest
        target = self.streams[stream]
        for line in lines if data else filter(None, [rest]):
            shown, mark, told = line.partition(_MARK)
            if mark:
                self._hear(json.loads(told))
            if mark and not shown:
                continue
            text = shown.decode(errors="replace").rstrip("\r")
            if target is sys.stderr:
                self.said.append(text)
                del self.said[:-_MOST_LINES]
            if self._began:
                target.write(f"[{self.name}] {text}\n")
        target.flush()
        if not data:
            del self.streams[stream]
        return bool(data)

    def _hear(self, told: dict[str, Any]) -> None:
        if "exit" in told:
            self.code = told["exit"]
            self.closed_by = time.monotonic() + _CLOSE_SECONDS
        else:
            self.answer = Answer(**told)

    @property
    def ended(self) -> bool:
        return not self.streams

    @property
    def last(self) -> str:
        """The last line on its stderr; "" where there is none."""
        return next((line for line in reversed(self.said) if line.strip()), "")

    def close(self) -> None:
        """End the client of ssh, with what it has started, such as a ProxyCommand. The host's part, if it still runs,
        sees its input end."""
        for stream in (self.client.stdin, self.client.stdout, self.client.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        self.streams.clear()
        if self.client.poll() is None:
            self.client.terminate()
        try:
            self.client.wait(timeout=2.0)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.client.pid, signal.SIGKILL)
            self.client.wait()


class _Run:
    """The hosts of a run: asked, then started, then watched until all have ended.

    Args:
        least: how many of the machines must stay.
        variables: of the environment, for the hosts.
        interrupts: whether Ctrl-C or SIGTERM came.
    """

    def __init__(
        self,
        job: Job,
        options: HostOptions,
        machines: Sequence[_Machine],
        least: int,
        variables: Mapping[str, str],
        interrupts: Interrupts,
    ) -> None:
        self.exit_code = 1  # of the run, once it has ended
        self._job, self._options, self._least, self._variables = job, options, least, variables
        self._python = options.python or sys.executable
        self._interrupts, self._most_lost = interrupts, len(machines) - least
        self._noticed = False  # have the hosts heard of SIGTERM, where they decide what it asks for?
        self._lost: dict[_Remote, float] = {}  # hosts whose launcher has gone without a word, and when
        self._ended: list[tuple[str, int | None]] = []  # (host, exit code) of those that ended without being told
        self._failed_at: float | None = None  # when too many had failed
        self._told_at: float | None = None  # when the others were told to end
        self._beat_at, self._beaten = 0.0, ""  # when the hosts last heard from here, and what
        self._unreached: list[str] = []
        self._selector = selectors.DefaultSelector()
        self._remotes: list[_Remote] = []
        try:
            for machine in machines:
                self._remotes.append(_Remote(machine, self._command(machine)))
                for stream in self._remotes[-1].streams:
                    self._selector.register(stream, selectors.EVENT_READ, self._remotes[-1])
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> _Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._selector.close()
        for remote in self._remotes:
            remote.close()

    def _command(self, machine: _Machine) -> list[str]:
        if machine.here:
            return [self._python, "-m", "paceline.on_host"]
        return ssh_command(machine.host, self._options, self._python, os.environ.get("PYTHONPATH"))

    def _read(self, seconds: float) -> None:
        """Take what comes from the hosts within this time, and stop reading from those that have ended."""
        for key, _ in self._selector.select(seconds):
            if not key.data.read(key.fileobj):
                self._selector.unregister(key.fileobj)
        for remote in self._remotes:
            if not remote.ended and time.monotonic() > remote.closed_by:
                for stream in list(remote.streams):
                    self._selector.unregister(stream)
                remote.close()

    def ask(self) -> list[Answer]:
        """What each host answers. Raises LaunchError with all that keeps the run from starting, of all hosts."""
        job = self._job
        for remote in self._remotes:
            remote.request({"directory": os.getcwd(), "script": job.script, "module": job.module})
        deadline = time.monotonic() + ANSWER_SECONDS
        while any(remote.answer is None and not remote.ended for remote in self._remotes):
            if time.monotonic() > deadline:
                break
            self._read(0.1)
        faults, answers = [], {}
        for remote in self._remotes:
            host, said = remote.machine.host, "\n".join(remote.said)
            if remote.answer is not None:
                answers[host] = remote.answer
            elif remote.ended:
                code = remote.client.wait()
                faults.append(refusal(host, code, said, self._options, self._python, job.version))
            else:
                last = f" (it said: {remote.last})" if remote.last else ""
                by_hand = f"ssh {host.name} {self._python} -V"
                faults.append(f"host {host.name}: no answer for {ANSWER_SECONDS:.0f} s{last}. Does `{by_hand}` work?")
        faults += disagreements(answers, job.version)
        if faults:
            raise LaunchError("Nothing was started.\n" + "\n".join(faults))
        return list(answers.values())

    def start(self, answers: Sequence[Answer]) -> None:
        """Start the job on the hosts."""
        job, several = self._job, len(self._remotes) > 1
        reached = addresses(answers, [remote.machine.here for remote in self._remotes])
        self._interrupts.deferred = True
        for number, remote in enumerate(self._remotes):
            place = job.meeting.options(number, reached, answers[0].port, self._least)
            words = ["run", *job.options, "--nproc", remote.machine.nproc, *place]
            what = {
                "environ": self._variables,
                "arguments": [*words, *(["-m"] if job.module else []), job.script, *job.args],
                "address": reached[number] if several else "",
                "secret": job.secret if several else None,
            }
            remote.request(what)

    def watch(self) -> None:
        """Until all have ended. Raises Stopped when a signal has ended the run."""
        running = list(self._remotes)
        while running:
            self._read(0.1)
            now = time.monotonic()
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
        say(f"paceline: {self._keeper.name} kept the rendezvous. {names} will meet again without it.\n")
        unsure = {
            remote.name: when for remote, when in self._lost.items() if not remote.machine.here
        }  # ssh ends alike where its connection breaks
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

    def _note(self, remote: _Remote, now: float) -> None:
        """A host has ended: say so if it failed."""
        name = remote.name
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
        if asked == signal.SIGTERM and self._job.grace is None:
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
