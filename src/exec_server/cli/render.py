"""`exec-server render [FILE]`: a run of an agent, made readable while it goes on."""

from __future__ import annotations

import io
import os
import signal
import sys
from typing import TYPE_CHECKING

import click

from .options import fail

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..events.minimal import Minimal, Options
    from ..events.model import Record

__all__ = ["render"]

FORMS = ("live", "full", "minimal", "markdown")


def _line_count(context: click.Context, option: click.Parameter, value: str) -> int | None:
    """A number of lines, or `all`."""
    del context, option
    if value == "all":
        return None
    if not value.isascii() or not value.isdigit():
        raise click.BadParameter(f"{value!r} is neither a number of lines nor `all`")
    return int(value)


@click.command()
@click.argument("file", required=False, metavar="[FILE]")
@click.option(
    "--as",
    "form",
    type=click.Choice(FORMS),
    help="How to show it; default: live on a terminal, full elsewhere.",
)
@click.option("--minimal", is_flag=True, help="Short for --as minimal.")
@click.option("--full", is_flag=True, help="Short for --as full.")
@click.option("--markdown", is_flag=True, help="Short for --as markdown.")
@click.option("--answer", is_flag=True, help="Only the final answer, when the turn has completed.")
@click.option("--split", is_flag=True, help="With --answer: progress in minimal form on stderr.")
@click.option(
    "--summary",
    is_flag=False,
    flag_value="json",
    default=None,
    metavar="[json]",
    help="One JSON object that says what happened.",
)
@click.option("--check", is_flag=True, help="Say where the stream breaks the rules of its producer.")
@click.option("--ours", is_flag=True, help="With --check: hold it to what exec-server itself promises.")
@click.option(
    "--output-lines",
    callback=_line_count,
    default="20",
    metavar="N|all",
    show_default=True,
    help="How much of a command's output to show, from its end.",
)
@click.option(
    "--reasoning",
    type=click.Choice(["first", "all", "none"]),
    default="first",
    show_default=True,
    help="How much of the model's reasoning.",
)
@click.option("--cwd", metavar="DIR", help="Show paths inside DIR relative to it.")
@click.option(
    "--width", type=click.IntRange(min=20), metavar="N", help="Columns (default: the terminal's, or 120)."
)
@click.option(
    "--colour",
    "--color",
    "colour",
    type=click.Choice(["auto", "always", "never"]),
    default="auto",
    show_default=True,
    help="NO_COLOR is honoured.",
)
@click.option(
    "--raw-output", is_flag=True, help="Pass a command's output to the terminal as it is. Trust it first."
)
@click.option("--no-fail", is_flag=True, help="End with 0 however the run ended.")
def render(
    file: str | None,
    form: str | None,
    minimal: bool,
    full: bool,
    markdown: bool,
    answer: bool,
    split: bool,
    summary: str | None,
    check: bool,
    ours: bool,
    output_lines: int | None,
    reasoning: str,
    cwd: str | None,
    width: int | None,
    colour: str,
    raw_output: bool,
    no_fail: bool,
) -> None:
    """Show the event stream of a run: `codex exec --json … | exec-server render`, or a FILE of it.

    Ends with 0 if the last turn completed, 1 if it failed, 3 if the stream ended before the turn did, and
    4 if there was no event at all.
    """
    if summary is not None and summary != "json":
        if file is not None:
            raise click.UsageError(
                f"--summary gives JSON of one FILE; {summary!r} and {file!r} are two,"
                " and no form but json is known"
            )
        file, summary = summary, "json"
    form = _form(form, {"minimal": minimal, "full": full, "markdown": markdown})
    if form is not None and (summary is not None or answer or check):
        raise click.UsageError(f"--summary, --answer and --check have no form; leave out {form}")
    if sum((summary is not None, answer, check)) > 1:
        raise click.UsageError("choose one of --summary, --answer and --check")
    if split and not answer:
        raise click.UsageError("--split goes with --answer")
    if ours and not check:
        raise click.UsageError("--ours goes with --check")
    fd = _open(file)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that knows only ASCII shows at least that
    from ..events.minimal import DEFAULT_COLUMNS, Options
    from ..events.reader import read_events
    from ..events.render import discard, is_live

    options = Options(
        columns=width or _terminal_columns() or DEFAULT_COLUMNS,
        cwd=None if cwd is None else os.path.abspath(cwd),
        output_lines=output_lines,
        reasoning=reasoning,
        raw_output=raw_output,
        timed=is_live(fd),
    )
    if options.timed:
        _outlive_the_first_interrupt()
    records = read_events(_blocks(fd, file))
    try:
        if check:
            code = _check(records, ours)
        elif summary is not None:
            code = _summary(records)
        elif answer:
            code = _answer(records, options, split)
        else:
            code = _show(records, options, form, colour)
    except KeyboardInterrupt:
        code = 130
    except OSError as error:
        discard(sys.stdout)  # what could not be written must not be tried again at the end
        fail(f"stdout: {error.strerror or error}")
    sys.exit(0 if no_fail and code in (1, 3, 4) else code)


def _form(form: str | None, short: dict[str, bool]) -> str | None:
    """The one form that was asked for."""
    asked = {name for name, given in short.items() if given} | ({form} if form is not None else set())
    if len(asked) > 1:
        raise click.UsageError(f"choose one form, not {' and '.join(sorted(asked))}")
    return next(iter(asked), None)


def _blocks(fd: int, file: str | None) -> Iterator[bytes]:
    """What is read; that it cannot be read is said with its name."""
    from ..events.render import blocks_of

    try:
        yield from blocks_of(fd)
    except OSError as error:
        fail(f"{file or 'stdin'}: {error.strerror or error}")


def _open(file: str | None) -> int:
    if file is None or file == "-":
        if file is None and sys.stdin.isatty():
            fail("nothing to show: pipe `codex exec --json …` into this command, or name a FILE", 2)
        return 0
    try:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        os.read(fd, 0)  # a directory opens, and says no only now
    except OSError as error:
        fail(f"{file}: {error.strerror or error}", 2)
    return fd


def _outlive_the_first_interrupt() -> None:
    """Ctrl-C goes to the producer as well. It will end, and how is worth reading; a second one ends us."""

    def first(number: int, frame: object) -> None:
        del number, frame
        signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGINT, first)


def _check(records: Iterator[Record], ours: bool) -> int:
    from ..events.check import check
    from ..events.printable import printable
    from ..events.render import EXIT_COMPLETED, EXIT_FAILED

    broken = 0
    for violation in check(records, ours=ours):
        click.echo(printable(str(violation)))
        broken += 1
    return EXIT_FAILED if broken else EXIT_COMPLETED


def _summary(records: Iterator[Record]) -> int:
    from ..events.reducer import Keep, Reducer
    from ..events.render import dump, exit_code
    from ..events.summary import summary_of

    reducer = Reducer(Keep.OUTLINE)
    for record in records:
        reducer.feed(record)
    click.echo(dump(summary_of(reducer)))
    return exit_code(reducer)


def _answer(records: Iterator[Record], options: Options, split: bool) -> int:
    from msgspec.structs import replace

    from ..events.minimal import Minimal
    from ..events.render import Sink, show_answer

    options = replace(options, without_answer=True)
    progress = Sink(sys.stderr, False) if split else None
    sink = Sink(sys.stdout, False)
    return show_answer(records, Minimal(options), sink, progress, to_people=sys.stdout.isatty())


def _show(records: Iterator[Record], options: Options, form: str | None, colour: str) -> int:
    from ..events.render import Sink, exit_code, show

    terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    coloured = colour == "always" or (colour == "auto" and terminal and not os.environ.get("NO_COLOR"))
    if terminal and form in (None, "live"):
        from ..events.live import LiveView

        with LiveView(options, sys.stdout, colour=coloured) as view:
            for record in records:
                view.feed(record)
            view.end()
        return exit_code(view.text.reducer)
    return show(records, _renderer(form, options), Sink(sys.stdout, coloured and form != "markdown"))


def _renderer(form: str | None, options: Options) -> Minimal:
    if form == "minimal":
        from ..events.minimal import Minimal

        return Minimal(options)
    if form == "markdown":
        from ..events.markdown import Markdown

        return Markdown(options)
    from ..events.full import Full

    return Full(options)


def _terminal_columns() -> int | None:
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or None
    except (OSError, ValueError):
        return None
