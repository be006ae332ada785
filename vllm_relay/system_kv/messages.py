"""Messages between the connector in the scheduler and those in the workers."""

from dataclasses import dataclass, field
from uuid import uuid4

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from vllm_relay.system_kv.placement import Placement


@dataclass(frozen=True, kw_only=True)
class Save:
    """Write a prefix's blocks to a file of this name; ``hot_at`` orders it among the files."""

    name: str
    token_ids: tuple[int, ...]
    block_ids: tuple[int, ...]
    hot_at: float


@dataclass(frozen=True, kw_only=True)
class Orders:
    """The scheduler's message of one step.

    ``key``: its name, unlike that of any other message. ``drop``: the blocks of the last `Save` are
    no longer held. ``compare``: the weights may be others. ``at_once``: no request waits for this
    step.
    """

    key: str = field(default_factory=lambda: uuid4().hex)
    save: Save | None = None
    drop: bool = False
    compare: bool = False
    at_once: bool = False


@dataclass(frozen=True, kw_only=True)
class Report:
    """A worker's answer to the message ``key``: ``what`` is done, of a file, or the problem.

    ``what``: "copied" (the blocks are needed no longer), "saved" or "compared".
    """

    key: str
    what: str
    name: str = ""
    problem: str | None = None


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Message from the scheduler to the workers.

    ``rewrite``: the reset after which to write the blocks again. ``released``: they are no longer
    pinned. ``orders``: to save hot prefixes.
    """

    rewrite: int | None = None
    released: bool = False
    orders: Orders | None = None


@dataclass
class WorkerMetadata(KVConnectorWorkerMetadata):
    """Message from the workers.

    ``reset``: the one after which the blocks are written again; ``problem``: why they may not be
    used. ``reports``: of hot prefixes that are saved. ``warm``: seal and blocks of the remembered
    files that were written at start.
    """

    reset: int | None = None
    problem: str | None = None
    reports: list[Report] = field(default_factory=list)
    warm: frozenset[tuple[str, Placement]] = frozenset()

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "WorkerMetadata":
        assert isinstance(other, WorkerMetadata) and other.reset == self.reset
        reports = self.reports + other.reports
        problem = self.problem or other.problem
        return WorkerMetadata(self.reset, problem, reports, self.warm & other.warm)


class Answers:
    """The reports of all workers of an engine, taken together; ``workers``: how many there are."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        # By what is done: the key of the newest message, and how many have answered it.
        self._counts: dict[str, tuple[str, int]] = {}

    def complete(self, report: Report) -> bool:
        """True if a report stands for all workers: it is the last one's, or tells a problem."""
        if report.problem is not None or report.what == "saved":  # by the first worker alone
            return True
        key, count = self._counts.get(report.what, ("", 0))
        count = count + 1 if key == report.key else 1
        self._counts[report.what] = report.key, count
        return count == self._workers
