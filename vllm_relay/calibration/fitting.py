"""Constants of the cost model from times: a fit, how good it is, and what it holds for."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import vllm

from vllm_relay import __version__
from vllm_relay.sharing.cost_store import Constants

# Fewer rounds, or a larger median error, make a guess of a measurement.
LEAST_ROUNDS, MOST_ERROR = 2, 0.4


@dataclass(frozen=True)
class Measurement:
    """Constants of one head shape.

    Attributes:
        errors: by kernel, the median relative error of the fit; ``whole``: of steps with groups.
        rounds: times that each call was timed.
    """

    constants: Constants
    errors: dict[str, float]
    rounds: int

    @property
    def rough(self) -> bool:
        """True if the machine was too slow or too busy for a measurement to keep."""
        return self.rounds < LEAST_ROUNDS or max(self.errors.values()) > MOST_ERROR


def versions() -> str:
    """The versions that a measurement holds for."""
    return f"vllm-relay {__version__}, vLLM {vllm.__version__}"


def fit(
    work: Any, times: Iterable[float], of: Iterable[float] | None = None
) -> tuple[tuple[float, ...], float]:
    """Constants >= 0 with ``work @ constants`` about ``times``, and the median relative error.

    Least squares of the relative errors, none below zero: a launch does not give time back.

    Args:
        work: [measurements, constants]. times: seconds of each measurement. of: seconds that
            errors are relative to, where times are part of them.
    """
    work, taken = np.asarray(work, dtype=float), np.array(list(times))
    whole = taken if of is None else np.array(list(of))
    relative = work / whole[:, None]
    scale = np.abs(relative).max(axis=0)
    scale[scale == 0] = 1.0
    used = list(range(work.shape[1]))
    while True:
        # Constants that come out below zero leave one by one, the worst first.
        found = np.linalg.lstsq(relative[:, used] / scale[used], taken / whole, rcond=None)[0]
        if found.min() >= 0:
            break
        del used[int(found.argmin())]
    constants = np.zeros(work.shape[1])
    constants[used] = found / scale[used]
    error = float(np.median(np.abs(relative @ constants - taken / whole)))
    return tuple(float(x) for x in constants), error
