"""Who shares which KV blocks, and whether relaying pays. Pure NumPy: no torch, vLLM or kernels."""

from vllm_relay.sharing.cost import Costs, KernelCosts, StepShape, predict, predict_stock, reads
from vllm_relay.sharing.forest import Forest, Group, Level, Segment
from vllm_relay.sharing.plan import (
    HostPlan,
    blocks_of,
    context_of,
    largest_groups,
    make_plan,
    stats_of,
)
from vllm_relay.sharing.planner import Planner
from vllm_relay.sharing.policy import Choice, choose
from vllm_relay.sharing.trie import Trie, build_trie

__all__ = [
    "Choice",
    "Costs",
    "Forest",
    "Group",
    "HostPlan",
    "KernelCosts",
    "Level",
    "Planner",
    "Segment",
    "StepShape",
    "Trie",
    "blocks_of",
    "build_trie",
    "choose",
    "context_of",
    "largest_groups",
    "make_plan",
    "predict",
    "predict_stock",
    "reads",
    "stats_of",
]
