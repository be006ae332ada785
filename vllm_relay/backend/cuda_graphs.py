"""The choice between full CUDA graphs with relay and without, on vLLM's runner V2.

`compat.capture_plain_graphs` captures every full graph with relay in it a second time. A step for
which nothing was shared when the host last heard of it replays vLLM's own graph. Both graphs are
right for a planned step; for a step that was not planned only vLLM's own is.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vllm_relay import compat, metrics
from vllm_relay.patching import TargetMoved


class FullGraphs:
    """Which full graphs this process has, and which of the two a step replays.

    Attributes:
        capturing_plain: True while graphs without relay are captured.
        have_both: full graphs with relay exist without it, too: a step need not be planned then.
        with_relay: vLLM's descriptions of the graphs with relay of the last capture.
    """

    def __init__(self) -> None:
        # The builders that plan, by their layers: vLLM makes trial builders before the final ones.
        self._builders: weakref.WeakValueDictionary[tuple[str, ...], Any] = (
            weakref.WeakValueDictionary()
        )
        self.capturing_plain = self.have_both = False
        self.with_relay: set[Any] = set()
        self._running: Any = None

    def follow(self, builder: Any) -> None:
        """Take the plans of a builder into account; it replaces one of the same layers.

        Args:
            builder: has ``layer_names``, its ``history`` and, for its last step, ``planned`` and
                ``shared``.
        """
        # Its graphs are yet to be captured, and runner V1 captures one set.
        self.have_both = False
        self._builders[tuple(sorted(builder.layer_names))] = builder

    def add_plain(self) -> None:
        """Make runner V2 capture full graphs without relay, too; logged where it cannot."""
        try:
            compat.capture_plain_graphs(self)
        except TargetMoved as error:
            # Right without them, only slower where nothing is shared.
            metrics.say_once(f"full CUDA graphs are captured with relay only: {error}")

    def watched(self, create: Callable[..., Any]) -> Callable[..., Any]:
        """vLLM's ``CreateForwardFn``, which notes in `with_relay` what passes of it relay.

        A draft model's do not, nor do batches too small to save anything.
        """
        self.with_relay.clear()

        def create_watched(desc: Any, *args: Any, **kwargs: Any) -> Callable[..., Any]:
            forward = create(desc, *args, **kwargs)

            def run(mode: Any) -> None:
                self._running = desc
                try:
                    forward(mode)
                finally:
                    self._running = None

            return run

        return create_watched

    def note_relay(self) -> None:
        """Count the graph that is being captured, if any, among those with relay."""
        if self._running is not None:
            self.with_relay.add(self._running)

    @property
    def several(self) -> bool:
        """True if a graph with relay reads the plans of several builders."""
        return len(self._builders) > 1

    @property
    def sharing(self) -> bool:
        """True if a builder shared when it last heard of it: the others have to plan, too."""
        return any(builder.history.shared for builder in self._builders.values())

    @contextmanager
    def capture_plain(self) -> Iterator[None]:
        """Context in which graphs without relay are captured; afterwards both sets exist."""
        self.capturing_plain = True
        try:
            yield
            self.have_both = True
        finally:
            self.capturing_plain = False

    def relayed(self) -> bool:
        """True if this step can and should replay the graph with relay.

        The graph reads the plans of all builders, so each of them has to be of this step.
        """
        builders = list(self._builders.values())
        return all(b.planned for b in builders) and any(b.shared for b in builders)


graphs = FullGraphs()
