"""Worker extension of `bench_planning.py`: times the plan of each step."""

import time
from dataclasses import replace
from typing import Any

from vllm_relay.sharing import Costs
from vllm_relay.sharing.cost_store import SHIPPED, find_costs


def costs_that_pay() -> Costs:
    """Shipped costs with far slower kernels without groups, and free copies: every group pays."""
    costs = find_costs(16, 16, 128, files=[SHIPPED]).costs
    slow = {"stock": costs.stock.times(20), "context": costs.context.times(20)}
    return replace(costs, **slow, copy=0.0)


class PlanningWorker:
    """vLLM's ``worker_extension_cls``."""

    def time_plans(self, keep: bool) -> None:
        """Time the plan and the whole of every step from now on.

        Groups are chosen by predicted time, by costs with which they all pay.

        Args:
            keep: False: choose anew in every step, as if each changed the batch.
        """
        from vllm_relay.backend.packed_cache import PackedCache
        from vllm_relay.backend.step_planner import StepPlanner
        from vllm_relay.sharing import planner

        planner.KEEP_STEPS = 64 if keep else 0
        for groups in self.model_runner.attn_groups:
            for group in groups:
                builder = group.get_metadata_builder()
                block_size = builder.kv_cache_spec.block_size
                (impl, *_) = builder._impls
                builder.planner = StepPlanner(
                    {impl.shape: costs_that_pay()}, block_size, 3, PackedCache(1, 2**62)
                )
        if hasattr(self, "_plans"):
            self._plans.clear()
            self._steps.clear()
            return
        self._plans: list[tuple[int, float, bool]] = []
        self._steps: list[float] = []
        plan, execute = StepPlanner.plan, self.model_runner.execute_model

        def timed_plan(planner: Any, common: Any) -> Any:
            begun = time.perf_counter()
            planned = plan(planner, common)
            taken = time.perf_counter() - begun
            shared = any(found.stats.groups for found in planned.values())
            self._plans.append((common.num_reqs, taken, shared))
            return planned

        def timed_execute(*args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter()
            done = execute(*args, **kwargs)
            self._steps.append(time.perf_counter() - begun)
            return done

        StepPlanner.plan = timed_plan
        self.model_runner.execute_model = timed_execute

    def timed_plans(self) -> tuple[list[tuple[int, float, bool]], list[float]]:
        """(rows, seconds, whether relayed) of each plan, and seconds of each step."""
        return self._plans, self._steps
