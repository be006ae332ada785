"""Two full CUDA graphs per batch shape on vLLM's runner V2: one with relay and one without.

A graph cannot know what its batches will share, and kernels that return at once still cost a few
microseconds per layer. So every full graph is captured twice, and a step for which nothing was
shared when the host last heard of it replays vLLM's own. Both are right for every step that was
planned; for one that was not, only vLLM's own is. Not yet run on a GPU.
"""

import functools
import weakref
from typing import Any

# The builders that plan, by their layers: vLLM makes builders for a try before those that serve.
_builders: "weakref.WeakValueDictionary[tuple[str, ...], Any]" = weakref.WeakValueDictionary()
_plain = False
_both = False


def follow(builder: Any) -> None:
    """Take a builder into account instead of an earlier one of the same layers.

    It has ``layer_names`` and, of its last step, ``planned`` and ``shared``.
    """
    global _both
    # Its graphs are yet to be captured, and runner V1 captures one set.
    _both = False
    _builders[tuple(sorted(builder.layer_names))] = builder


def capturing_plain() -> bool:
    """Whether graphs without relay are being captured."""
    return _plain


def have_both() -> bool:
    """Whether every full graph exists without relay, too: then a step need not be planned."""
    return _both


def _with_relay() -> bool:
    """Whether this step can and should replay the graph with relay.

    It reads the plans of all builders, so each has to be of this step.
    """
    builders = list(_builders.values())
    return all(b.planned for b in builders) and any(b.shared for b in builders)


def wrap(manager: Any) -> None:
    """Let vLLM's ``CudaGraphManager`` (v1/worker/gpu/cudagraph_utils.py) capture and choose.

    Idempotent.

    Raises:
        AttributeError: the class is not what vLLM 0.26 to 0.33 have.
    """
    stock_capture, stock_run = manager.capture, manager.run_fullgraph
    if hasattr(stock_capture, "_vllm_relay"):
        return

    @functools.wraps(stock_capture)
    def capture(self: Any, *args: Any, **kwargs: Any) -> Any:
        global _plain, _both
        self._relay_plain_graphs = {}
        result = stock_capture(self, *args, **kwargs)
        full = {mode: descs for mode, descs in self._capture_descs.items() if mode.name == "FULL"}
        # While vLLM measures what graphs cost, it counts them.
        profiling = getattr(self, "_max_full_descs_to_capture", None) is not None
        if not _builders or not full or profiling:
            return result
        with_relay, all_descs = self.graphs, self._capture_descs
        self.graphs, self._capture_descs = {}, full
        _plain = True
        try:
            stock_capture(self, *args, **kwargs)
            self._relay_plain_graphs, _both = self.graphs, True
        finally:
            _plain = False
            self.graphs, self._capture_descs = with_relay, all_descs
        return result

    @functools.wraps(stock_run)
    def run_fullgraph(self: Any, desc: Any, *args: Any, **kwargs: Any) -> Any:
        plain = getattr(self, "_relay_plain_graphs", {})
        if desc not in plain or _with_relay():
            return stock_run(self, desc, *args, **kwargs)
        with_relay, self.graphs = self.graphs, plain
        try:
            return stock_run(self, desc, *args, **kwargs)
        finally:
            self.graphs = with_relay

    capture._vllm_relay = True  # type: ignore[attr-defined]
    manager.capture, manager.run_fullgraph = capture, run_fullgraph
