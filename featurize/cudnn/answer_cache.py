"""Keeps cuDNN's answers on disk, for all processes of this user: an answer never changes.

Start reading at `AnswerCache`. A cache that cannot be opened or read is as none.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from featurize.cudnn.signature import ConvolutionSignature, OracleAnswer, answer_of

_BUSY_S = 5.0
_AT_ONCE = 500  # parameters of one statement; SQLite allows at least 999
_TABLE = """CREATE TABLE IF NOT EXISTS answers (
    asked TEXT NOT NULL, signature TEXT NOT NULL, answer TEXT NOT NULL, PRIMARY KEY (asked, signature)
) WITHOUT ROWID"""


def cache_path() -> Path:
    """Return the user's own file: `$XDG_CACHE_HOME/gpufarm/cudnn.sqlite`, else under `~/.cache`."""
    given = os.environ.get("XDG_CACHE_HOME")
    return (Path(given) if given else Path("~/.cache").expanduser()) / "gpufarm" / "cudnn.sqlite"


class AnswerCache:
    """A file of answers. `asked` is all that an answer depends on besides its signature: cuDNN's version, the device
    and how PyTorch searches."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self, asked: str, signatures: Iterable[ConvolutionSignature]) -> dict[ConvolutionSignature, OracleAnswer]:
        """Return the answers that are known, by signature."""
        by_text = {signature.to_text(): signature for signature in signatures}
        texts = list(by_text)
        answers: dict[ConvolutionSignature, OracleAnswer] = {}
        if not self.path.is_file():
            return answers
        with contextlib.suppress(sqlite3.Error, OSError), self._opened() as database:
            for start in range(0, len(texts), _AT_ONCE):
                some = texts[start : start + _AT_ONCE]
                places = ",".join("?" * len(some))
                rows = database.execute(
                    f"SELECT signature, answer FROM answers WHERE asked = ? AND signature IN ({places})", (asked, *some)
                )
                for text, answer in rows:
                    with contextlib.suppress(ValueError):  # a row that is none is asked anew
                        answers[by_text[text]] = answer_of(json.loads(answer))
        return answers

    def has_any(self, asked: str) -> bool:
        """Return whether an answer is known for any signature."""
        if self.path.is_file():
            with contextlib.suppress(sqlite3.Error, OSError), self._opened() as database:
                return (
                    database.execute("SELECT 1 FROM answers WHERE asked = ? LIMIT 1", (asked,)).fetchone() is not None
                )
        return False

    def write(self, asked: str, answers: Mapping[ConvolutionSignature, OracleAnswer]) -> None:
        """Keep answers. Of two processes that write the same one, the later one's stays."""
        rows = [(asked, signature.to_text(), answer.to_json()) for signature, answer in answers.items()]
        with contextlib.suppress(sqlite3.Error, OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self._opened() as database:
                database.execute(_TABLE)
                database.executemany("INSERT OR REPLACE INTO answers VALUES (?, ?, ?)", rows)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        database = sqlite3.connect(self.path, timeout=_BUSY_S)
        try:
            with database:  # one transaction
                yield database
        finally:
            database.close()
