"""`paceline run --hosts`: one launcher on each host, over ssh, as one run. Does not import torch.

1. Check all hosts at once: does ssh connect without a prompt, do the directory, the script and the interpreter exist,
   do the versions match? Nothing starts until all hosts pass.
2. Start `paceline run --nnodes N --node-rank i` on each host. The rendezvous is on the first host, at a free port.
3. Show the hosts' output, each line prefixed with its host. Send heartbeats to each host: without them, the host ends
   its ranks.
4. When one host fails, the launchers report it to each other and all end. A host that has not ended after
   OTHERS_SECONDS is ordered to end.

The ssh client runs a program on the host (paceline/on_host.py), which reads from a pipe of this launcher. When this
launcher dies for any reason, the pipe closes, and the host ends its ranks.
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
    HostRendezvous,
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
ANSWER_SECONDS = 60.0  # for a host to answer the check: loading Python from a network disk may be slow
OTHERS_SECONDS = 10.0  # between the failure of one host and the order to the other hosts to end
END_SECONDS = 12.0  # for a host to carry out that order
_MOST_LINES = 50  # stderr lines to keep per host
_CLOSE_SECONDS = 2.0  # for the connection to close after the end of the run: a leftover process may keep it open
_MARK = MARK.encode()


@dataclass(frozen=True)
class Job:
    """The job for the hosts.

    Attributes:
        script, module, args: as for `paceline run`.
        nproc: as typed; None: not given.
        options: further options of `paceline run`, as typed.
        rendezvous: the rendezvous of the hosts.
        version: Paceline's version on this machine.
        grace: as for launcher.run.
        secret: the secret shared by the hosts' launchers, sent through ssh. None: they need no secret.
    """

    script: str
    module: bool
    args: Sequence[str]
    nproc: str | None
    options: Sequence[str]
    rendezvous: HostRendezvous
    version: str
    grace: float | None = None
    secret: str | None = field(default=None, repr=False)


def run_on_hosts(job: Job, options: HostOptions) -> int:
    """Run the job on the hosts and wait until all have ended. Return the exit code.

    Raises:
        LaunchError: the job cannot start.
    """
    text = ""
    if options.hostfile is not None:
        try:
            with open_plain(options.hostfile) as file:
                text = file.read(_MOST_HOSTFILE_BYTES).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise LaunchError(
                f"--hostfile {options.hostfile} cannot be read: {error}. Give a text file with one host per line."
            ) from None
    hosts = read_hosts(options.hosts, options.hostfile, text)
    nproc = counts(hosts, job.nproc)
    least = job.rendezvous.check(len(hosts))
    variables = passed_variables(os.environ, options.env)
    here = ["@" not in host.name and is_local(host.name) for host in hosts]  # a name with a user always uses ssh
    if sum(here) > 1:
        names = " and ".join(host.name for host, local in zip(hosts, here) if local)
        raise LaunchError(f"--hosts: {names} refer to this machine. Give it once, with the number of processes.")
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
                machines = run.machines_to_rejoin(least) if job.rendezvous.may_move else []
                if not machines:
                    return run.exit_code
                run.wait_for_the_lost(machines)
        except Stopped as stopped:
            return stopped.report()
        except BrokenPipeError:  # the reader of our output has ended (`| head`): exit like a process killed by SIGPIPE
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 128 + signal.SIGPIPE


@dataclass(frozen=True)
class _Machine:
    """One host of a run, its number of processes (as typed), and whether it is this machine."""

    host: Host
    nproc: str
    here: bool


class _Remote:
    """One host, and the ssh connection to its program (paceline/on_host.py).

    Attributes:
        answer: the host's reply to the check; None: not yet received.
        code: the exit code of `paceline run` on the host; None: not yet received.
        ordered_to_end: whether this launcher ordered the host to end.
        said: the last lines of the host's stderr, including unshown lines from before the run.
        closed_by: when this launcher closes the connection, by time.monotonic.
    """

    def __init__(self, machine: _Machine, command: Sequence[str]) -> None:
        self.machine, self.name = machine, machine.host.name
        self.answer: Answer | None = None
        self.code: int | None = None
        self.ordered_to_end = False
        self.said: list[str] = []
        self.closed_by = float("inf")
        self._began = False
        pipe = subprocess.PIPE
        try:  # in a separate session, so that Ctrl-C at the terminal reaches only this launcher, which forwards it
            self.client = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
        except OSError as error:
            raise LaunchError(
                f"{command[0]} cannot be run: {error.strerror}. Give another interpreter with --python."
            ) from None
        assert self.client.stdin is not None
        assert self.client.stdout is not None
        assert self.client.stderr is not None
        self._input = self.client.stdin.fileno()
        self.streams = {self.client.stdout: sys.stdout, self.client.stderr: sys.stderr}
        self._parts = dict.fromkeys(self.streams, b"")  # the last, incomplete line

    def request(self, what: Mapping[str, Any]) -> None:
        self._began = self.answer is not None
        with contextlib.suppress(BrokenPipeError), open(self._input, "wb", closefd=False) as file:
            file.write(f"{json.dumps(what)}\n".encode())

    def send(self, text: str) -> None:
        """Send a line to the host. Drop it if the run has ended, or if the pipe is full (a network failure)."""
        os.set_blocking(self._input, False)
        with contextlib.suppress(OSError):
            os.write(self._input, f"{text}\n".encode())

    def read(self, stream: IO[bytes]) -> bool:
        """Read and handle the available data of a stream. Return False at the end of the stream."""
        data = os.read(stream.fileno(), 65536)
        *lines, rest = (self._parts[stream] + data).split(b"\n")
        self._parts[stream] = rest
        target = self.streams[stream]
        for line in lines if data else filter(None, [rest]):
            shown, mark, message = line.partition(_MARK)
            if mark:
                self._receive(json.loads(message))
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

    def _receive(self, message: dict[str, Any]) -> None:
        if "exit" in message:
            self.code = message["exit"]
            self.closed_by = time.monotonic() + _CLOSE_SECONDS
        else:
            self.answer = Answer(**message)

    @property
    def ended(self) -> bool:
        return not self.streams

    @property
    def last(self) -> str:
        """The last line of the host's stderr, or ""."""
        return next((line for line in reversed(self.said) if line.strip()), "")

    def close(self) -> None:
        """End the ssh client and its child processes, such as a ProxyCommand. This ends the input of the host's run."""
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
    """The hosts of a run: check them, start them, and watch them until all have ended.

    Args:
        least: the minimum number of machines.
        variables: environment variables for the hosts.
        interrupts: Ctrl-C and SIGTERM.
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
        self.exit_code = 1  # of the run, valid after its end
        self._job, self._options, self._least, self._variables = job, options, least, variables
        self._python = options.python or sys.executable
        self._interrupts, self._most_lost = interrupts, len(machines) - least
        self._noticed = False  # whether "notice" was sent to the hosts (see _beat)
        self._lost: dict[_Remote, float] = {}  # hosts lost without an exit code -> time
        self._ended: list[tuple[str, int | None]] = []  # (host, exit code) of hosts that ended without an order
        self._failed_at: float | None = None  # when too many hosts had failed
        self._ordered_at: float | None = None  # when the others were ordered to end
        self._beat_at, self._beaten = 0.0, ""  # time and content of the last heartbeat
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
        """Wait up to `seconds` for output of the hosts, and handle it. Close connections that are due (closed_by)."""
        for key, _ in self._selector.select(seconds):
            if not key.data.read(key.fileobj):
                self._selector.unregister(key.fileobj)
        for remote in self._remotes:
            if not remote.ended and time.monotonic() > remote.closed_by:
                for stream in list(remote.streams):
                    self._selector.unregister(stream)
                remote.close()

    def ask(self) -> list[Answer]:
        """Check all hosts and return their answers. Raises LaunchError with the problems of all hosts."""
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
                last = f" (it printed: {remote.last})" if remote.last else ""
                manual = f"ssh {host.name} {self._python} -V"
                faults.append(f"host {host.name}: no answer for {ANSWER_SECONDS:.0f} s{last}. Does `{manual}` work?")
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
            place = job.rendezvous.options(number, reached, answers[0].port, self._least)
            words = ["run", *job.options, "--nproc", remote.machine.nproc, *place]
            what = {
                "environ": self._variables,
                "arguments": [*words, *(["-m"] if job.module else []), job.script, *job.args],
                "address": reached[number] if several else "",
                "secret": job.secret if several else None,
            }
            remote.request(what)

    def watch(self) -> None:
        """Watch the hosts until all have ended. Raises Stopped if a signal has ended the run."""
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
                f"paceline: {', '.join(self._unreached)} did not answer the request to stop. The processes there end "
                f"{SILENT_SECONDS:.0f} s after the last heartbeat from this machine.\n"
            )
        self._interrupts.check()
        lost = sum(code != 0 for _, code in self._ended)
        if any(code == RESUMABLE for _, code in self._ended):
            self.exit_code = RESUMABLE
        elif lost <= self._most_lost and len(self._ended) == len(self._remotes) and lost < len(self._remotes):
            self.exit_code = 0
        else:
            self.exit_code = exit_code(self._ended)

    # --- loss of the rendezvous host

    @property
    def _rendezvous_host(self) -> _Remote:
        return self._remotes[0]

    def machines_to_rejoin(self, least: int) -> list[_Machine]:
        """Return the machines that can continue with a new rendezvous host.

        The list is empty unless the rendezvous host is lost, no host has finished, and at least `least` machines are
        left.
        """
        left = [remote.machine for remote in self._remotes if remote not in self._lost]
        if self._rendezvous_host not in self._lost or len(left) < least or any(code == 0 for _, code in self._ended):
            return []
        return left

    def wait_for_the_lost(self, left: Sequence[_Machine]) -> None:
        """Wait until the ranks on lost hosts must have ended, so that two runs cannot write the same checkpoints.

        Raises Stopped.
        """
        names = ", ".join(machine.host.name for machine in left)
        say(f"paceline: {self._rendezvous_host.name} was the rendezvous host. {names} will continue without it.\n")
        unsure = {
            remote.name: when for remote, when in self._lost.items() if not remote.machine.here
        }  # ssh ends in the same way if only the connection breaks
        ends = max(unsure.values()) + SILENT_SECONDS + STOP_SECONDS if unsure else 0.0
        if unsure:
            say(
                f"paceline: {', '.join(unsure)} may still be running. Waiting up to "
                f"{ends - time.monotonic():.0f} s for the ranks there to end.\n"
            )
        self._interrupts.deferred = False
        while True:
            self._interrupts.check()
            if time.monotonic() > ends:
                return
            time.sleep(0.1)

    def _note(self, remote: _Remote, now: float) -> None:
        """Record that a host has ended, and report it if it failed."""
        name = remote.name
        if remote.ordered_to_end:
            if remote.code is None:
                self._unreached.append(name)
            return
        self._ended.append((name, remote.code))
        failed = [host for host, code in self._ended if code not in (0, RESUMABLE)]
        if remote.code in (0, RESUMABLE):  # RESUMABLE: all hosts have saved, and the first reports the path
            return
        if remote.code is None:
            self._lost[remote] = now
            last = f" Last line of its stderr: {remote.last}" if remote.last else ""
            say(f"paceline: host {name} is lost: its launcher was killed, or the connection broke.{last}\n")
        elif remote.code != 2 or len(failed) == 1:
            say(f"paceline: host {name} ended with exit code {remote.code}.\n")
        if remote is self._rendezvous_host and remote.code is None and self._most_lost:
            self._failed_at = now - OTHERS_SECONDS  # the others cannot continue, and might wait for it to return
        elif len(failed) > self._most_lost and self._failed_at is None:
            self._failed_at = now

    def _beat(self, running: Sequence[_Remote], now: float) -> None:
        """Send a heartbeat when due.

        A heartbeat is usually "alive". After a signal that asks the run to save a checkpoint and end (stop_request.py),
        it is "save": sent at once, and then repeated, because the first may arrive before the workers run.

        If the user set no grace period, SIGTERM is sent as "notice", and each host decides what to do. "notice" is sent
        only once: before the workers run it ends the run, and a second would abort the shutdown.
        """
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
        """After a failure or a signal, wait for the other hosts to end, then order them to end, finally disconnect."""
        signum = self._interrupts.due
        if signum is None and (self._failed_at is None or now - self._failed_at < OTHERS_SECONDS):
            return
        if self._ordered_at is None:
            self._ordered_at = now
            for remote in running:
                remote.ordered_to_end = True
                remote.send(f"stop {int(signum or signal.SIGTERM)}")
        elif now - self._ordered_at > END_SECONDS or self._interrupts.impatient:
            for remote in running:
                remote.closed_by = 0.0
