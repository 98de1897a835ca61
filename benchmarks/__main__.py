"""`python -m benchmarks`: run, print, write. Exit status 1 only if a measurement went wrong."""

import argparse
import fnmatch
import gc
import json
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from . import chart, fleet, report
from .client import WrongAnswer
from .deadline import SECONDS_PER_ROUND, deadline
from .measurements import MEASUREMENTS, Measurement
from .reference import find_reference
from .rounds import NOISE, Result, blame, take_turns
from .server import Command, WebSocketServer
from .workloads import Effort, check_content
from .yardsticks import BINARY_TARGET, Yardsticks, measure_yardsticks

HERE = Path(__file__).parent
HOMES = Path("~/.cache/exec-server").expanduser()
"""Where the reference gets an empty home: below /tmp it skips a part of its start."""
YARDSTICKS = "binary"
"""The name under which `--only` knows the yardsticks and the binary frames."""
FLEET = "fleet"
"""The name of the measurement of many environments on one rendezvous."""
QUICK_FLEET = 50

ROUNDS, QUICK_ROUNDS = 11, 2
QUICK = Effort(
    seconds=0.15,
    samples=4,
    calls=4000,
    spawns=64,
    pipe_bytes=64 << 20,
    terminal_bytes=16 << 20,
    bytes_of_each=8 << 20,
    file_bytes=16 << 20,
    download_bytes=128 << 20,
)


def main() -> int:
    """Parse, measure, report."""
    names = [row.name for measurement in MEASUREMENTS for row in measurement.rows] + [YARDSTICKS, FLEET]
    options = parse(names)
    wanted = [m for m in MEASUREMENTS if any(chosen(row.name, options.only) for row in m.rows)]
    with_yardsticks, with_fleet = chosen(YARDSTICKS, options.only), chosen(FLEET, options.only)
    if not wanted and not with_yardsticks and not with_fleet:
        print(f"no measurement is called {' or '.join(options.only)}; there are {', '.join(names)}")
        return 1
    reference_argv = shlex.split(options.reference) or [find_reference(), "exec-server"]
    # A terminated benchmark takes its servers along: unwind instead of dying.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    gc.disable()
    HOMES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=HOMES) as home:
        ours = Command("ours", shlex.split(options.ours), home)
        reference = Command("reference", reference_argv, home)
        try:
            servers = {command.name: command.version() for command in (ours, reference)}
            for command in (ours, reference):
                check(command)
        except (WrongAnswer, OSError, subprocess.SubprocessError) as error:
            print(f"cannot begin: {error}", ours.complaints(), reference.complaints(), sep="\n")
            return 1
        print(f"ours: {servers['ours']}\nreference: {servers['reference']}\n")
        effort = QUICK if options.quick else Effort()
        results, failures = measure(wanted, ours, reference, effort)
        yardsticks = None
        if with_yardsticks:
            try:
                yardsticks = measure_yardsticks(ours, effort, QUICK_ROUNDS if options.quick else ROUNDS)
            except (WrongAnswer, OSError, subprocess.SubprocessError) as error:
                failures.append(f"{YARDSTICKS}: {error}")
        many = None
        if with_fleet:
            try:
                many = fleet.measure_fleet(*((QUICK_FLEET, QUICK_FLEET) if options.quick else ()))
            except (WrongAnswer, OSError, subprocess.SubprocessError) as error:
                failures.append(f"{FLEET}: {error}")
        say(results, yardsticks, many, failures, effort)
    output = options.output or (HERE if not options.quick and not options.only else None)
    if output is None:
        print("\nNot a full run, nothing written; --output DIR writes it there.")
    elif failures:
        print("\nNothing written.")
    else:
        write(output, results, yardsticks, many, servers, effort)
    return 1 if failures else 0


def parse(names: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Our server and the reference, side by side.",
        epilog=f"Names: {', '.join(names)}.",
    )
    parser.add_argument(
        "--quick", action="store_true", help="few short rounds: a smoke test, not a measurement"
    )
    parser.add_argument(
        "--only",
        metavar="NAME",
        action="append",
        default=[],
        help="this measurement only; may be repeated, may be a pattern like 'echo*'",
    )
    parser.add_argument(
        "--ours",
        metavar="CMD",
        default=shlex.quote(str(Path(sys.executable).parent / "exec-server")),
        help="command of our server, without --listen",
    )
    parser.add_argument("--reference", metavar="CMD", default="", help="command of the reference, likewise")
    parser.add_argument(
        "--output",
        metavar="DIR",
        type=Path,
        help="where results.json and results.svg go; benchmarks/ for a full run",
    )
    return parser.parse_args()


def chosen(name: str, only: Sequence[str]) -> bool:
    """Whether `--only` lets it through."""
    return not only or any(fnmatch.fnmatch(name, pattern) for pattern in only)


def check(command: Command) -> None:
    """The content of output is right on both transports, before anything is timed."""
    with deadline(SECONDS_PER_ROUND), blame(command):
        with WebSocketServer(command) as server, server.connect() as client:
            check_content(client)
        with command.over_stdio() as client:
            check_content(client)


def measure(
    wanted: Sequence[Measurement], ours: Command, reference: Command, effort: Effort
) -> tuple[list[Result], list[str]]:
    """All results, and what went wrong."""
    results: list[Result] = []
    failures: list[str] = []
    for measurement in wanted:
        name = measurement.rows[0].name
        rounds = QUICK_ROUNDS if effort is QUICK else measurement.rounds or ROUNDS
        began = time.perf_counter()
        try:
            found = take_turns(measurement, ours, reference, effort, rounds)
        except (WrongAnswer, OSError, subprocess.SubprocessError) as error:
            failures.append(f"{name}: {error}\n{ours.complaints()}{reference.complaints()}")
            print(f"  {name:22} FAILED  {error}", flush=True)
            continue
        finally:
            gc.collect()
        results += found
        ratios = ", ".join(report.format_ratio(result.ratio) for result in found)
        print(f"  {name:22} {ratios}  ({rounds} rounds, {time.perf_counter() - began:.0f} s)", flush=True)
    return results, failures


def say(
    results: Sequence[Result],
    yardsticks: Yardsticks | None,
    many: fleet.Fleet | None,
    failures: Sequence[str],
    effort: Effort,
) -> None:
    """The table, the yardsticks, the notes, and what is missed or wrong."""
    if results:
        print(f"\n{report.table(results)}")
    if yardsticks is not None:
        print("", *report.yardstick_lines(yardsticks), sep="\n")
    if many is not None:
        print("", *fleet.lines(many), sep="\n")
    print("", *(f"- {note}" for note in report.notes(effort)), sep="\n")
    missed = [
        f"{result.row.name} ({report.format_ratio(result.ratio)} of {result.row.target:.3g}x)"
        for result in results
        if result.met is False
    ]
    fraction = yardsticks.binary_fraction if yardsticks is not None else None
    if fraction is not None and fraction < BINARY_TARGET:
        missed.append(f"{YARDSTICKS} ({fraction:.2f} of {BINARY_TARGET} of a bare read loop)")
    print(f"\nTargets missed: {', '.join(missed) or 'none'}")
    if noisy := [result.row.name for result in results if result.noisy]:
        print(f"Noisy, the quartiles of the rounds are more than {NOISE}x apart: {', '.join(noisy)}")
    for failure in failures:
        print(f"\nWRONG: {failure}")


def write(
    output: Path,
    results: Sequence[Result],
    yardsticks: Yardsticks | None,
    many: fleet.Fleet | None,
    servers: dict[str, str],
    effort: Effort,
) -> None:
    """`results.json` and `results.svg`."""
    output.mkdir(parents=True, exist_ok=True)
    numbers = report.as_json(results, yardsticks, servers, effort)
    if many is not None:
        numbers["fleet"] = fleet.as_json(many)
    text = json.dumps(numbers, indent=1, ensure_ascii=False)
    (output / "results.json").write_text(text + "\n")
    (output / "results.svg").write_text(chart.draw(results))
    print(f"\nWritten: {output / 'results.json'}, {output / 'results.svg'}")


if __name__ == "__main__":
    sys.exit(main())
