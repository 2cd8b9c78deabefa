"""How the processes that answer reach the questions for traces: in the same folder, or through Ray Serve.

Start reading at `LocalQuestions`, whose methods do as those of `TraceStore`.
"""

from __future__ import annotations

import asyncio
from typing import Any

from farm.serving.trace_store import QuestionLimits, Traced, TraceStore


class LocalQuestions:
    """The questions of a service on one machine."""

    def __init__(self, store: TraceStore) -> None:
        self._store = store

    async def ask(self, key: str, question: str, client: str, limits: QuestionLimits) -> Traced | None:
        """Return the question's row, added where it is new; None where the client's share is used up."""
        return self._store.ask(key, question, client, limits)

    async def get(self, key: str) -> Traced | None:
        """Return the question's row, or None."""
        return self._store.get(key)

    async def forget(self, limits: QuestionLimits) -> None:
        """Delete old answers, and questions that nobody asks for."""
        await asyncio.to_thread(self._store.forget, limits)

    async def counts(self) -> dict[str, int]:
        """Return the number of questions by state."""
        return self._store.counts()

    async def pulse_age_s(self) -> float | None:
        """Return how long ago the pool of traces was alive; None where it never was."""
        return self._store.pulse_age_s()

    def close(self) -> None:
        """Give back what was opened."""
        self._store.close()


class RemoteQuestions(LocalQuestions):
    """The questions of a service on Ray Serve. handle: of the deployment `Traces`."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def ask(self, key: str, question: str, client: str, limits: QuestionLimits) -> Traced | None:
        return await self._handle.ask.remote(key, question, client, limits)

    async def get(self, key: str) -> Traced | None:
        return await self._handle.get.remote(key)

    async def forget(self, limits: QuestionLimits) -> None:
        await self._handle.forget.remote(limits)

    async def counts(self) -> dict[str, int]:
        return await self._handle.counts.remote()

    async def pulse_age_s(self) -> float | None:
        return await self._handle.pulse_age_s.remote()

    def close(self) -> None:
        """Leave the deployment open, which other replicas ask."""
