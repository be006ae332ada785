"""The sharing of recent planned steps, which decides which of the next steps to plan."""

from collections import deque

from vllm_relay import metrics
from vllm_relay.ops.planning.device_plan import DevicePlan
from vllm_relay.plan import SharingStats

# While nothing is shared, one step of so many is planned, to find out whether that has changed.
PROBE_STEPS = 8
# A plan's numbers decide over the step built so many later. By then the device is done with it, and
# all ranks of a tensor parallel group decide alike: replaying different graphs, they would read
# each other's buffers.
HEARD_AFTER = 2


class SharingHistory:
    """Numbers of the planned steps of one builder.

    Attributes:
        step: number of the step that is being built, from 1.
        shared: the last planned step that the host has heard of had a group. saved: KV token
            reads per layer that its groups saved.
    """

    def __init__(self) -> None:
        self.step = 0
        self.shared = False
        self.saved = 0
        self._unplanned = self._beside_prefills = 0
        # Planned steps not heard of: number of the step, number of the plan.
        self._pending: deque[tuple[int, int]] = deque()

    def begin_step(self, plan: DevicePlan | None) -> None:
        """Read the numbers of the newest plan that is old enough."""
        self.step += 1
        while plan and self._pending and self._pending[0][0] <= self.step - HEARD_AFTER:
            last: SharingStats = plan.report(self._pending.popleft()[1])[0]
            self.shared, self.saved = last.groups > 0, last.tokens_saved
            metrics.log_sharing(last)

    def is_due(self) -> bool:
        """True if a step that can run without a plan is to be planned nevertheless."""
        self._unplanned = 0 if self.shared else self._unplanned + 1
        return self.shared or self._unplanned % PROBE_STEPS == 1

    def is_due_beside_prefills(self) -> bool:
        """`is_due` for a step with a prefill; those of other steps do not wait for it."""
        self._beside_prefills += 1
        return not self.shared and self._beside_prefills % PROBE_STEPS == 0

    def add(self, plan: DevicePlan) -> None:
        """Expect the numbers of this step, the last that the plan was made for."""
        self._pending.append((self.step, plan.updates - 1))
