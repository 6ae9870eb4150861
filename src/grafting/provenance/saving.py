"""When a running job saves itself, when it stops, and from where it goes on.

A resumable part of a job runs in `with job.saving.section():` and asks after every step whether it is `due`.
Only there are SIGTERM, SIGINT, SIGHUP and the signal of choice caught: they are remembered, the job saves itself
after the step and leaves with status 75. Elsewhere signals keep their default effect.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from grafting.provenance.resume import Log, State, States

#: Exit status of a job that has saved itself and wants to be run again (EX_TEMPFAIL of sysexits.h).
STATUS = 75
#: What `due` answers.
NOT_YET, SAVE, STOP = 0, 1, 2
#: A slow disk, in bytes per second: what a save is expected to take before one was measured.
SLOW_DISK = 250e6


class Stopped(BaseException):
    """The job has saved itself and leaves; no fault, so nothing that handles faults may catch it."""


@dataclass(frozen=True)
class Settings:
    """The section `saving` of the configuration, which documents the keys, and its key `tracking`; all that a job
    is told beside its spec. None switches a reason off."""

    seconds: float | None = 60.0
    steps: int | None = None
    share: float = 0.02
    signal: str | None = None
    budget_seconds: float | None = None
    tracking: str | None = None


def _nothing() -> dict[str, Any]:
    return {}


class Saver:
    """Saves states and finished pieces of one job below `folder`; without a folder it keeps nothing.

    account() gives what the job has cost so far, carry(account) adds it to a job that goes on, so that a
    resumed job's record counts what the sessions before it did. `started` is the job's start on the monotonic
    clock, from which the time budget counts.
    """

    def __init__(
        self,
        folder: Path | None = None,
        settings: Settings | None = None,
        say: Callable[[str], None] = print,
        code: str = "",
        account: Callable[[], dict[str, Any]] = _nothing,
        carry: Callable[[dict[str, Any]], object] = lambda account: None,
        started: float | None = None,
    ) -> None:
        self.folder, self.settings, self.say, self._code = folder, settings or Settings(), say, code
        self._account, self._carry = account, carry
        self._started = time.monotonic() if started is None else started
        self._checked = self._saved = time.monotonic()
        self._took = 0.0  # seconds of a save
        self._steps = 0  # since the last save
        self._reason: str | None = None  # why the job is to stop
        self._state: State | None = None
        self._looked = folder is None  # whether the states on the disk were looked at: only those of earlier runs count
        self._states = None if folder is None else States(folder / "states", say, code)
        self._log: Log | None = None
        self._found: dict[tuple[str, str], Any] = {}
        self._before: dict[str, Any] = {}

    # ---- when -----------------------------------------------------------------------------------
    @contextmanager
    def section(self) -> Iterator[None]:
        """While it lasts, a signal that would end the job lets it save itself first.

        A job that leaves stays deaf to further ones: a Ctrl-C reaches it twice, and its status is to be 75.
        """
        if self.folder is None:
            yield
            return
        wanted = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
        if self.settings.signal is not None:
            wanted.add(getattr(signal, f"SIG{self.settings.signal}"))
        earlier = {}
        try:
            for number in sorted(wanted):
                # one that is ignored (nohup) stays so
                if signal.getsignal(number) != signal.SIG_IGN:
                    earlier[number] = signal.signal(number, self._catch)
        except ValueError:
            pass  # not the main thread: nobody sends it signals
        self._checked = time.monotonic()
        leaves = False
        try:
            yield
        except Stopped:
            leaves = True
            raise
        finally:
            # ignored, not caught: Python takes its handlers away before the process has ended
            for number, handler in earlier.items():
                signal.signal(number, signal.SIG_IGN if leaves else signal.SIG_DFL if handler is None else handler)

    def _catch(self, number: int, _frame: object) -> None:
        self._reason = self._reason or signal.Signals(number).name

    def expect(self, nbytes: int) -> None:
        """A state has about this size: what a save takes, until one was measured."""
        self._took = self._took or nbytes / SLOW_DISK

    def due(self) -> int:
        """To be asked when a step is done: NOT_YET, SAVE or STOP.

        The interval in seconds is stretched where saving would take more than `share` of the time; the one in
        steps is not. The budget is exhausted when the next step and a save no longer fit into it.
        """
        if self.folder is None:
            return NOT_YET
        settings, now = self.settings, time.monotonic()
        pace, self._checked = now - self._checked, now
        self._steps += 1
        budget = settings.budget_seconds
        if budget is not None and now - self._started + self._took + pace >= budget:
            self._reason = self._reason or f"its time budget of {budget:g} s"
        if self._reason is not None:
            return STOP
        if settings.steps is not None and self._steps >= settings.steps:
            return SAVE
        if settings.seconds is not None and now - self._saved >= max(settings.seconds, self._took / settings.share):
            return SAVE
        return NOT_YET

    def leave(self, where: str) -> NoReturn:
        """End the job after a save; `where` says how far it is."""
        reason = self._reason or "another process of the job"
        raise Stopped(f"stopped by {reason}, saved at {where}; run again to go on from there")

    def _write(self, write: Callable[[], None], must: bool) -> None:
        start = time.monotonic()
        try:
            write()
        except OSError as error:
            if must:
                raise
            # training is worth more than a state: an older one is still there, and the next save may fit
            self.say(f"warning: could not save ({error.strerror or error}); going on without")
        self._saved = time.monotonic()
        self._took, self._steps = self._saved - start, 0

    # ---- states: work that goes on from the last step ------------------------------------------------
    def keep(self, **facts: Any) -> None:
        """Facts that every following state carries as `facts["before"]`: what earlier parts of the job found."""
        self._before = facts

    def save(self, tensors: dict[str, Any], facts: dict[str, Any], *, must: bool, write: bool = True) -> None:
        """Save a state. `must`: raise OSError where the disk does not take it, instead of a warning. `write`
        False: another process writes it; only the clock is set."""
        if self._states is None:
            return
        whole = {**facts, "before": self._before, "account": self._account()}
        self._write((lambda: self._states.write(tensors, whole)) if write else (lambda: None), must)

    def peek(self) -> State | None:
        """The state from which this run is to go on, if there is one that was not taken yet."""
        if not self._looked:
            self._looked, self._state = True, self._states.read()
        return self._state

    def take(self) -> State | None:
        """`peek`, once: what it cost to get there is added to the job's cost."""
        state, self._state = self.peek(), None
        if state is not None:
            self._carry(state.facts["account"])
        return state

    def forget(self) -> None:
        """Drop all states: start from the beginning."""
        self._state = None
        if self._states is not None:
            self._states.clear()

    # ---- pieces: work that goes on after the last finished one ---------------------------------------
    def part(self, name: str) -> Part:
        """The pieces of one part of the job; names tell parts apart."""
        if self.folder is not None and self._log is None:
            self._log = Log(self.folder / "finished.jsonl", self.say, self._code)
            self._found = {(entry["part"], entry["piece"]): entry["value"] for entry in self._log.entries}
            if self._log.entries:
                self.say(f"going on after {len(self._log.entries)} finished pieces")
                self._carry(self._log.entries[-1]["account"])
        return Part(self, name)

    def _add(self, part: str, piece: str, value: Any, where: str) -> None:
        if self._log is None:
            return
        self._log.add({"part": part, "piece": piece, "value": value, "account": self._account()})
        due = self.due()
        if due != NOT_YET:
            self._write(self._log.flush, must=due == STOP)
        if due == STOP:
            self.leave(where)


class Part:
    """Finished pieces of one part of a job, by their names."""

    def __init__(self, saver: Saver, name: str) -> None:
        self._saver, self._name = saver, name

    def get(self, piece: str) -> Any | None:
        """The value of a piece that an interrupted run has finished, else None."""
        return self._saver._found.get((self._name, piece))

    def add(self, piece: str, value: Any, where: str) -> None:
        """A piece is finished; its value is JSON. It is written when it is time, and on a stop, which ends the
        job here (`Stopped`); `where` tells the person how far it is."""
        self._saver._add(self._name, piece, value, where)
