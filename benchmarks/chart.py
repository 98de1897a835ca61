"""The ratios as a picture: horizontal bars on a logarithmic scale, a mark where each target is."""

import math
import statistics
from collections.abc import Sequence
from xml.sax.saxutils import escape

from .report import format_ratio, format_value
from .rounds import Result

__all__ = ["draw"]

TITLE = "exec-server against codex exec-server 0.166.0"
WIDTH, LEFT, RIGHT = 940, 210, 210
"""The bars are drawn between LEFT and WIDTH - RIGHT."""
VALUES = WIDTH - RIGHT + 32
TOP, ROW, BAR = 74, 26, 14

STYLE = """
  .page { fill: #ffffff; } .text { fill: #1f2328; } .quiet { fill: #59636e; }
  .grid { stroke: #d9dee3; } .one { stroke: #59636e; } .target { stroke: #1f2328; }
  .met { fill: #2f81f7; } .missed { fill: #d9730d; } .free { fill: #8c959f; }
  text { font: 12px system-ui, sans-serif; } .title { font-size: 15px; font-weight: 600; }
  .head { font-weight: 600; } .value { font-size: 11px; }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117; } .text { fill: #e6edf3; } .quiet { fill: #9198a1; }
    .grid { stroke: #2a313a; } .one { stroke: #9198a1; } .target { stroke: #f0f6fc; }
  }
"""
"""The page brings its own background, so that it is readable whatever it is put on."""


def draw(results: Sequence[Result]) -> str:
    """An SVG document."""
    shown = [*(result.ratio for result in results), *(r.row.target for r in results if r.row.target), 1.0]
    low, high = math.floor(math.log10(min(shown))), math.ceil(math.log10(max(shown) * 1.4))

    def x(ratio: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (math.log10(ratio) - low) / (high - low)

    groups = {
        name: [result for result in results if result.row.transport == name]
        for name in ("WebSocket", "stdio", "relay")
    }
    body: list[str] = []
    y = TOP
    for name, members in groups.items():
        if not members:
            continue
        body.append(f'<text class="text head" x="16" y="{y + 17}">{name}</text>')
        y += ROW
        for result in members:
            body += _bar(result, y, x(1.0), x(result.ratio), result.row.target and x(result.row.target))
            y += ROW
        y += 8
    height = y + 16
    grid = [
        f'<line class="{"one" if power == 0 else "grid"}" x1="{x(10.0**power):.1f}" y1="{TOP - 6}" '
        f'x2="{x(10.0**power):.1f}" y2="{height - 16}"/>'
        f'<text class="quiet" x="{x(10.0**power):.1f}" y="{TOP - 12}" text-anchor="middle">'
        f"{10.0**power:g}x</text>"
        for power in range(low, high + 1)
    ]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" role="img" aria-label="exec-server against the reference, ratios">'
    )
    explained = "How many times better ours is, logarithmic. Vertical mark: target."
    return "\n".join(
        [
            head,
            f"<style>{STYLE}</style>",
            f'<rect class="page" width="{WIDTH}" height="{height}" rx="8"/>',
            f'<text class="text title" x="16" y="26">{TITLE}</text>',
            f'<text class="quiet" x="16" y="44">{explained}</text>',
            f'<text class="quiet" x="{VALUES}" y="{TOP - 12}">ours / reference</text>',
            *_legend(),
            *grid,
            *body,
            "</svg>\n",
        ]
    )


def _legend() -> list[str]:
    parts: list[str] = []
    for at, (kind, text) in enumerate(
        (("met", "target met"), ("missed", "target missed"), ("free", "no target"))
    ):
        left = WIDTH - 348 + at * 114
        parts.append(f'<rect class="{kind}" x="{left}" y="17" width="10" height="10" rx="2"/>')
        parts.append(f'<text class="quiet" x="{left + 15}" y="26">{text}</text>')
    return parts


def _bar(result: Result, y: int, one: float, end: float, target: float | None) -> list[str]:
    row = result.row
    kind = {None: "free", True: "met", False: "missed"}[result.met]
    middle = y + ROW / 2
    ours, reference = (
        format_value(statistics.median(side), row.unit) for side in (result.ours, result.reference)
    )
    left, width = min(one, end), max(abs(end - one), 1.5)
    values = escape(f"{ours} / {reference}")
    parts = [
        f'<text class="text" x="28" y="{middle + 4}">{escape(row.title)}</text>',
        f'<rect class="{kind}" x="{left:.1f}" y="{middle - BAR / 2}" width="{width:.1f}" height="{BAR}"/>',
        f'<text class="quiet value" x="{VALUES}" y="{middle + 4}">{values}</text>',
    ]
    label = max(end, one)
    if target is not None:
        parts.append(
            f'<line class="target" x1="{target:.1f}" y1="{middle - 10}" x2="{target:.1f}" y2="{middle + 10}" '
            'stroke-width="2"/>'
        )
        if label - 4 <= target <= label + 44:
            label = target
    parts.append(
        f'<text class="text value" x="{label + 6:.1f}" y="{middle + 4}">{format_ratio(result.ratio)}</text>'
    )
    return parts
