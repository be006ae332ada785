"""The choice between full CUDA graphs with relay and without, on vLLM's runner V2.

`compat.capture_plain_graphs` captures every full graph twice. A step for which nothing was shared
when the host last heard of it replays vLLM's own graph. Both graphs are right for a planned step;
for a step that was not planned only vLLM's own is.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm_relay import compat, metrics
from vllm_relay.patching import TargetMoved


class FullGraphs:
    """Which full graphs this process has, and which of the two a step replays.

    Attributes:
        capturing_plain: True while graphs without relay are captured.
        have_both: every full graph exists without relay, too: a step need not be planned then.
    """

    def __init__(self) -> None:
        # The builders that plan, by their layers: vLLM makes trial builders before the final ones.
        self._builders: weakref.WeakValueDictionary[tuple[str, ...], Any] = (
            weakref.WeakValueDictionary()
        )
        self.capturing_plain = self.have_both = False

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

    def wanted(self) -> bool:
        """True if a builder plans, so that graphs without relay differ from those with it."""
        return bool(self._builders)

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
