"""Matplotlib figures as SVG that lies inside a page: its colours, dark mode and letters."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable
from typing import Any

from markupsafe import Markup, escape
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Stand-ins that become variables of the page's style, so that a chart is right on light and dark.
INK, MUTED, LINE = "#000001", "#000002", "#000003"
MIDDLE, TAIL, TOP, BAD, PLANTED = "#000004", "#000005", "#000006", "#000007", "#000008"
_VARIABLES = {
    INK: "ink",
    MUTED: "muted",
    LINE: "line",
    MIDDLE: "middle",
    TAIL: "tail",
    TOP: "top",
    BAD: "bad",
    PLANTED: "planted",
}
_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "regista",
    "text.parse_math": False,
    "text.usetex": False,
    "font.size": 8.5,
    "axes.edgecolor": LINE,
    "axes.labelcolor": MUTED,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.formatter.useoffset": False,
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "text.color": INK,
    "legend.frameon": False,
    "legend.labelcolor": MUTED,
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.6,
    "lines.solid_capstyle": "round",
}


def chart(
    draw: Callable[[list[Axes]], None],
    *,
    name: str,
    description: str,
    size: tuple[float, float] = (5.4, 3.3),
    heights: tuple[float, ...] = (1.0,),
    below: float = 0.45,
) -> Markup:
    """Draw a chart and give it as inline SVG.

    Args:
        draw: Gets the axes, from top to bottom, with a common x axis.
        name: Unique on the page; ids begin with it.
        description: For those who do not see it.
        size: (width, height) in inches at 72 dots.
        heights: Relative heights of the axes.
        below: Room for what stands below the lowest axis, in inches.
    """
    with rc_context(_SETTINGS), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # letters that the measuring font lacks; the browser has its own
        figure = Figure(figsize=size)
        left, right, top = 0.68 / size[0], 1 - 0.08 / size[0], 1 - 0.3 / size[1]
        figure.subplots_adjust(left=left, right=right, top=top, bottom=below / size[1], hspace=0.12)
        figure.patch.set_visible(False)
        axes = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights).ravel()
        for each in axes:
            each.patch.set_visible(False)
        draw(list(axes))
        stream = io.StringIO()
        figure.savefig(stream, format="svg", metadata={"Date": None})
    return _inline(stream.getvalue(), name, description)


def legend(axes: Axes, columns: int = 4) -> None:
    """A legend in one line above the axes."""
    axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=columns, handlelength=1.4, columnspacing=1.2)


def _inline(text: str, name: str, description: str) -> Markup:
    """Strip what belongs to a file, make ids unique and colours variable."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\s+xmlns(:\w+)?="[^"]*"', "", text)
    text = text.replace("xlink:href", "href")
    text = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', text)
    text = re.sub(r'"#(?=\w)', f'"#{name}-', text)
    text = re.sub(r"url\(#", f"url(#{name}-", text)
    text = re.sub(r"#00000[1-8]", lambda found: f"var(--{_VARIABLES[found.group()]})", text)
    view = re.search(r'viewBox="[^"]*"', text)
    body = text[text.index(">") + 1 :]
    head = f'<svg class="chart" {view.group() if view else ""} role="img" aria-label="{escape(description)}">'
    return Markup(head + body)  # noqa: S704  matplotlib escapes its texts
