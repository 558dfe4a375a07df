"""Threads that hash and sync files while the writer continues."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from types import TracebackType
from typing import TypeVar

T = TypeVar("T")


class HelperThreads:
    """A context with `count` threads. Leaving it waits for all submitted tasks.

    Unlike the pools of concurrent.futures, these threads accept work while the interpreter exits: a background save may
    still be running, and the interpreter waits for it.
    """

    def __init__(self, count: int, name: str) -> None:
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()  # None ends a thread
        self._threads: list[threading.Thread] = []
        for number in range(count):
            thread = threading.Thread(target=self._work, name=f"{name}_{number}")
            try:
                thread.start()
            except RuntimeError:  # at the exit of Python 3.12.0 and 3.12.1, or too many threads: `submit` does the work
                break
            self._threads.append(thread)

    def submit(self, function: Callable[..., T], *arguments: object) -> Future[T]:
        """Call the function in a thread, or in this thread if no thread could be started."""
        future: Future[T] = Future()

        def task() -> None:
            try:
                future.set_result(function(*arguments))
            except Exception as error:
                future.set_exception(error)

        if self._threads:
            self._tasks.put(task)
        else:
            task()
        return future

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()

    def __enter__(self) -> HelperThreads:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()
