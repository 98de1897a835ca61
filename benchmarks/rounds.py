"""Running a measurement: the two servers take turns, so that what the machine does meanwhile hits both."""

import contextlib
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from .client import WrongAnswer
from .deadline import SECONDS_PER_ROUND, deadline
from .measurements import Measurement, Row
from .server import Command
from .workloads import Effort

__all__ = ["NOISE", "Result", "take_turns"]

NOISE = 1.4
"""Quartiles of the rounds that are further apart than this are worth a warning."""


@dataclass(frozen=True)
class Result:
    """A row and its numbers, one for each round."""

    row: Row
    ours: tuple[float, ...]
    reference: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """How many times better our median is."""
        return self.row.ratio(statistics.median(self.ours), statistics.median(self.reference))

    @property
    def met(self) -> bool | None:
        """Whether the target is reached; None when there is none."""
        return None if self.row.target is None else self.ratio >= self.row.target

    @property
    def noisy(self) -> bool:
        """Whether the rounds of either server differ so much that the median says little."""
        for side in (self.ours, self.reference):
            if len(side) < 2:
                continue  # one round differs from nothing
            low, _, high = statistics.quantiles(side, n=4, method="inclusive")
            if high > NOISE * low:
                return True
        return False


def take_turns(
    measurement: Measurement, ours: Command, reference: Command, effort: Effort, rounds: int
) -> list[Result]:
    """Every round on both servers, the one that begins changing from round to round."""
    numbers: dict[str, list[tuple[float, ...]]] = {ours.name: [], reference.name: []}
    with contextlib.ExitStack() as stack:
        servers = [(command, stack.enter_context(measurement.open(command))) for command in (ours, reference)]
        for _ in range(rounds):
            for command, one_round in servers:
                with deadline(SECONDS_PER_ROUND), blame(command):
                    numbers[command.name].append(one_round(effort))
            servers.reverse()
    return [
        Result(row, ours=of_ours, reference=of_reference)
        for row, of_ours, of_reference in zip(
            measurement.rows,
            zip(*numbers[ours.name], strict=True),
            zip(*numbers[reference.name], strict=True),
            strict=True,
        )
    ]


@contextlib.contextmanager
def blame(command: Command) -> Iterator[None]:
    """Whatever goes wrong, say on which server."""
    try:
        yield
    except Exception as error:
        what = str(error) if isinstance(error, WrongAnswer) else f"{type(error).__name__}: {error}"
        raise WrongAnswer(f"{command.name}: {what}") from error
