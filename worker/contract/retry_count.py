"""How many retries this process has scheduled. Beside `retry.py`, since that loads botocore, which a local run never needs."""

from __future__ import annotations

import threading


class _Retries:
    """Counted by whichever thread."""

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()

    def add(self) -> None:
        with self._lock:
            self.count += 1


retries = _Retries()
