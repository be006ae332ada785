"""What `bench_planning.py` runs inside the engine's worker: a clock around each step's plan."""

import time
from typing import Any


class PlanningWorker:
    """vLLM's ``worker_extension_cls``."""

    def time_plans(self) -> None:
        """Time the plan and the whole of every step from now on."""
        from vllm_relay.backend.cpu import RelayMetadataBuilder

        self._plans: list[tuple[int, float, bool]] = []
        self._steps: list[float] = []
        plan, execute = RelayMetadataBuilder._plan_step, self.model_runner.execute_model

        def timed_plan(builder: Any, common: Any) -> Any:
            begun = time.perf_counter()
            step = plan(builder, common)
            taken = time.perf_counter() - begun
            self._plans.append((common.num_reqs, taken, step is not None))
            return step

        def timed_execute(*args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter()
            done = execute(*args, **kwargs)
            self._steps.append(time.perf_counter() - begun)
            return done

        RelayMetadataBuilder._plan_step = timed_plan
        self.model_runner.execute_model = timed_execute

    def timed_plans(self) -> tuple[list[tuple[int, float, bool]], list[float]]:
        """(rows, seconds, whether relayed) of each plan, and seconds of each step."""
        return self._plans, self._steps
