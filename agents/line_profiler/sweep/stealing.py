"""Who measures what next: a queue that is dealt out by estimated cost, and from which idle workers steal.

Estimates are wrong; stealing is what makes up for it. An item whose worker died goes to whoever asks next.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence


class StealingQueue:
    """Items are numbers from 0. Dear ones first: a dear one begun last is what everybody would wait for."""

    def __init__(self, costs: Sequence[float], workers: int) -> None:
        self.costs = costs
        self.own: list[deque[int]] = [deque() for _ in range(workers)]
        self.left = [0.0] * workers  # estimated cost of what each still has
        self.lost: deque[int] = deque()
        self.stolen = 0
        for item in sorted(range(len(costs)), key=lambda i: -costs[i]):
            worker = min(range(workers), key=self.left.__getitem__)
            self.own[worker].append(item)
            self.left[worker] += costs[item]

    def take(self, worker: int) -> int | None:
        """The worker's next item; from the one with the most left when its own are gone; None when none are."""
        if self.lost:
            return self.lost.popleft()
        victim = worker
        if not self.own[worker]:
            victim = max(range(len(self.own)), key=lambda other: (bool(self.own[other]), self.left[other]))
            if not self.own[victim]:
                return None
            self.stolen += 1
        item = self.own[victim].popleft()
        self.left[victim] -= self.costs[item]
        return item

    def give_back(self, item: int) -> None:
        """Its worker died: it is the next to be taken."""
        self.lost.append(item)


def busy_share(durations: Sequence[float], estimates: Sequence[float], workers: int) -> float:
    """Share of the workers' time until the last item ends that is spent on items, were these their durations.

    Deterministic: the workers of the queue above, on a simulated clock.
    """
    queue = StealingQueue(estimates, workers)
    clock = [(0.0, worker) for worker in range(workers)]
    ends = 0.0
    while clock:
        now, worker = heapq.heappop(clock)
        item = queue.take(worker)
        if item is not None:
            ends = max(ends, now + durations[item])
            heapq.heappush(clock, (now + durations[item], worker))
    return sum(durations) / (workers * ends) if ends else 1.0
