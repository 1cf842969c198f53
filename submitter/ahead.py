"""Work on a few items ahead of the one that is wanted, in threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def ahead(
    work: Callable[[Item], Result], items: Iterable[Item], count: int, *, is_slow: Callable[[Item], bool] | None = None
) -> Iterator[Result]:
    """The result of each item, in order, with so many under way at once.

    Those that are not slow are done when they are wanted, and start no thread.
    """
    remaining = iter(items)
    under_way: deque[Callable[[], Result]] = deque()
    # A thread starts with the first submit.
    pool = ThreadPoolExecutor(count)
    try:
        while True:
            for item in islice(remaining, count - len(under_way)):
                is_begun = is_slow is None or is_slow(item)
                under_way.append(pool.submit(work, item).result if is_begun else partial(work, item))
            if not under_way:
                return
            yield under_way.popleft()()
    finally:
        # No waiting: what was left unread is closed by the garbage collector, which may run in the middle of a thread's
        # start, and there a join never ends.
        pool.shutdown(wait=False, cancel_futures=True)
