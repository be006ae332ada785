"""Who shares what, and whether it pays. Pure numpy: no torch, no vLLM, no kernels."""

from vllm_relay.sharing.cost import select, tokens_saved
from vllm_relay.sharing.forest import Forest, Group, Level, Segment, find_forest
from vllm_relay.sharing.plan import LevelPlan, RelayPlan, make_plan

__all__ = [
    "Forest",
    "Group",
    "Level",
    "LevelPlan",
    "RelayPlan",
    "Segment",
    "find_forest",
    "make_plan",
    "select",
    "tokens_saved",
]
