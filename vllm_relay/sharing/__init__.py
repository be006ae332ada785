"""Who shares what, and whether it pays. Pure numpy: no torch, no vLLM, no kernels."""

from vllm_relay.sharing.cost import Costs, KernelCosts, StepShape, predict, predict_stock, reads
from vllm_relay.sharing.forest import Forest, Group, Level, Segment
from vllm_relay.sharing.plan import LevelPlan, RelayPlan, make_plan
from vllm_relay.sharing.search import Choice, Planner, choose, find_forest
from vllm_relay.sharing.trie import Trie, build_trie

__all__ = [
    "Choice",
    "Costs",
    "Forest",
    "Group",
    "KernelCosts",
    "Level",
    "LevelPlan",
    "Planner",
    "RelayPlan",
    "Segment",
    "StepShape",
    "Trie",
    "build_trie",
    "choose",
    "find_forest",
    "make_plan",
    "predict",
    "predict_stock",
    "reads",
]
