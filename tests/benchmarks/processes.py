"""Processes: one per library, asked from outside and bounded in time and memory."""

import multiprocessing
import os
from typing import Any

from benchmarks import worker
from benchmarks.operations import NotOfferedError

START_SECONDS, GRACE_SECONDS = 120.0, 2.0


class FailedError(Exception):
    """An operation has raised, or has taken too much time or memory."""


class Process:
    """One library in a process of its own, started when asked, and again if lost.

    Its requests are bounded in wall time, and the whole process in memory.
    """

    def __init__(self, name: str, seconds: float, gibibytes: float) -> None:
        self.name, self.seconds = name, seconds
        self.max_bytes = int(gibibytes * 2**30)
        self._process: Any = None
        self._connection: Any = None

    def ask(self, method: str, *arguments: Any, seconds: float | None = None) -> Any:
        """Result of a method of ``worker.Jobs``."""
        if self._process is None:
            self._start()
        self._connection.send((method, arguments))
        return self._receive(seconds or self.seconds)

    def stop(self) -> None:
        """End the process, which may have a moment to tidy up."""
        if self._process is not None:
            self._connection.close()
            self._process.join(GRACE_SECONDS)
            self._process.kill()
            self._process.join()
            self._process = None

    def _start(self) -> None:
        os.environ.update(worker.ONE_THREAD)  # read when libraries are imported
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=worker.serve, args=(theirs, self.name, self.max_bytes), daemon=True
        )
        self._process.start()
        theirs.close()
        self._receive(START_SECONDS)

    def _receive(self, seconds: float) -> Any:
        try:
            if not self._connection.poll(seconds):
                self.stop()
                raise FailedError(f"> {seconds:.0f} s")
            status, value = self._connection.recv()
        except (EOFError, ConnectionError) as error:
            self.stop()
            raise FailedError("process died") from error
        if status == "not offered":
            raise NotOfferedError(value)
        if status == "failed":
            raise FailedError(_shortened(value))
        return value


def _shortened(message: str) -> str:
    memory = "MemoryError", "allocate memory", "DefaultCPUAllocator"
    if any(sign in message for sign in memory):
        return "out of memory"
    return message.splitlines()[0][:100]
