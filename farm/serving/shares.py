"""How clients share what the service has a limited number of, so that none of them takes it all.

Start reading at `Places`. A client is a token, or an address where there are no tokens.
"""

from __future__ import annotations

from collections import Counter


def is_within_share(held: float, wanted: float, held_by_all: float, limit: float) -> bool:
    """Return whether a client that holds `held` of `limit` may hold `wanted` more.

    A client leaves as much free as it holds: one alone gets half, n busy ones get 1/(n + 1) each, and whoever comes
    next finds a place.
    """
    return not wanted or held + 2 * wanted <= limit - held_by_all + 1


class Places:
    """A number of places of one process. Not for threads.

    Args:
        limit: Places in all.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._held: Counter[str] = Counter()

    def take(self, client: str, n: int = 1, most: int | None = None) -> bool:
        """Take n places for a client, unless they are beyond its share, or beyond `most`."""
        held = self._held[client]
        if not is_within_share(held, n, self._held.total(), self.limit) or (most is not None and held + n > most):
            return False
        self._held[client] += n
        return True

    def hold(self, client: str) -> None:
        """Take one place, also beyond the client's share: for a request that had it before."""
        self._held[client] += 1

    def give_back(self, client: str, n: int = 1) -> None:
        """Give n places back."""
        self._held[client] -= n
        if not self._held[client]:
            del self._held[client]
