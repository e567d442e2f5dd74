"""The charts of a report: norms by block, histogram, attention by block, series of checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from regista.report.charts import BAD, INK, MIDDLE, MUTED, PLANTED, TAIL, TOP, chart, legend
from regista.report.entry import ModelEntry, items, mapping, numbers
from regista.report.formatting import figure, file_name, percent, round_number, shortened

Arrays = Mapping[str, np.ndarray]
_PERCENT = FuncFormatter(lambda value, _: percent(float(value)))
_SHADE = ListedColormap(np.array([[0.42, 0.52, 0.66, alpha] for alpha in np.linspace(0, 0.55, 64)]))


def onset_chart(entry: ModelEntry, arrays: Arrays, name: str) -> Markup | None:
    """Median, 99th percentile and maximum of the norms by block, and the share of outliers below."""
    curves = entry.curves
    lines = ((curves.largest, TOP, "maximum"), (curves.p99, TAIL, "99th percentile"), (curves.median, MIDDLE, "median"))
    if not any(value and value > 0 for curve, _, _ in lines for value in curve):
        return None
    shares = [share or 0.0 for share in curves.share]

    def draw(axes: list[Axes]) -> None:
        top = axes[0]
        _density(top, arrays)
        for curve, colour, label in lines:
            _line(top, [value if value and value > 0 else None for value in curve], colour, label)
        _log_axis(top, "y", "norm")
        drawn = [value for curve, _, _ in lines for value in curve if value and value > 0]
        top.set_ylim(min(drawn) / 1.3, max(drawn) * 1.3)
        top.grid(visible=True, axis="y")
        _mark_blocks(top, entry)
        legend(top)
        if len(axes) > 1:
            axes[1].bar(range(len(shares)), shares, color=BAD, width=0.62)
            axes[1].set_ylabel("outliers")
            axes[1].set_ylim(0, max(*shares, 0.001) * 1.15)
            axes[1].yaxis.set_major_locator(MaxNLocator(2))
            axes[1].yaxis.set_major_formatter(_PERCENT)
        axes[-1].set_xlabel("block")
        axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True, nbins=13))

    heights, size = ((3.4, 1.0), (5.4, 3.9)) if any(shares) else ((1.0,), (5.4, 3.3))
    words = f"Norms of patch tokens by block for {entry.model}"
    return chart(draw, name=name, description=words, size=size, heights=heights)


def histogram_chart(entry: ModelEntry, arrays: Arrays, name: str) -> Markup | None:
    """How many patch tokens have which norm at the outlier block, with the cutoff."""
    counts, edges, block = arrays.get("histogram_counts"), arrays.get("histogram_edges"), entry.shown_block
    if counts is None or edges is None or block is None or block >= len(counts) or not counts[block].any():
        return None
    bins = counts[block].astype(float)
    filled = np.flatnonzero(bins)
    centres = np.exp((np.log(edges[:-1]) + np.log(edges[1:])) / 2)
    above = centres >= (entry.cutoff if entry.cutoff is not None else np.inf)

    def draw(axes: list[Axes]) -> None:
        (only,) = axes
        for part, colour, label in ((~above, MIDDLE, "patch tokens"), (above, BAD, "outliers")):
            there = np.flatnonzero(part & (bins > 0))
            if there.size:
                widths = np.diff(edges)[there]
                only.bar(edges[there], bins[there], widths, align="edge", color=colour, label=label, linewidth=0)
        only.set_yscale("log")
        only.set_ylim(0.7, bins.max() * 2.5)
        only.yaxis.set_minor_locator(NullLocator())
        only.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        _log_axis(only, "x", f"norm after block {block}")
        ends = [edges[filled[0]], edges[filled[-1] + 1], *([] if entry.cutoff is None else [entry.cutoff])]
        only.set_xlim(min(ends) * 0.93, max(ends) * 1.07)
        only.set_ylabel("patch tokens")
        if entry.cutoff is not None:
            only.axvline(
                entry.cutoff, color=INK, linewidth=1.2, linestyle=(0, (4, 2)), label=f"cutoff {figure(entry.cutoff)}"
            )
        legend(only)

    words = f"Histogram of patch norms after block {block} for {entry.model}, logarithmic counts"
    return chart(draw, name=name, description=words)


def attention_chart(entry: ModelEntry, name: str) -> Markup | None:
    """Share of all attention that goes to patch sinks, CLS and registers, by block."""
    numbers_of_sink = entry.measures.get("attention_sink") or {}
    received = mapping(numbers_of_sink.get("received_by"))
    lines = [("patch sinks", numbers(numbers_of_sink.get("mass_by_block")), BAD)]
    labels = (("cls", "CLS", MIDDLE), ("registers", "registers, all together", TAIL))
    lines += [(label, numbers(items(received.get(key))), colour) for key, label, colour in labels]
    lines = [line for line in lines if any(value is not None for value in line[1])]
    if not lines:
        return None

    def draw(axes: list[Axes]) -> None:
        (only,) = axes
        for label, values, colour in lines:
            _line(only, values, colour, label)
        only.set_ylim(bottom=0)
        only.yaxis.set_major_formatter(_PERCENT)
        only.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=13))
        only.set_xlabel("block")
        only.set_ylabel("share of all attention")
        only.grid(visible=True, axis="y")
        legend(only)

    return chart(draw, name=name, description=f"Who receives attention, by block, for {entry.model}", size=(5.4, 3.0))


def series_chart(entries: Sequence[ModelEntry], name: str) -> Markup | None:
    """Share of outliers and their height along the checkpoints of one training run."""
    if len(entries) < 2:
        return None
    places = list(range(len(entries)))
    shares = [entry.share or 0.0 for entry in entries]
    ratios = [entry.ratio for entry in entries]
    labels = [shortened(label, 22) for label in checkpoint_labels(entries)]

    def draw(axes: list[Axes]) -> None:
        _line(axes[0], shares, BAD)
        axes[0].set_ylim(0, max(*shares, 0.001) * 1.15)
        axes[0].yaxis.set_major_formatter(_PERCENT)
        axes[0].set_ylabel("outliers")
        _line(axes[1], ratios, TOP)
        axes[1].axhline(1.0, color=MUTED, linewidth=0.8)
        axes[1].set_ylim(bottom=0)
        axes[1].set_ylabel("norm / median")
        for each in axes:
            each.grid(visible=True, axis="y")
        step = 1 + (len(places) - 1) // 12
        axes[-1].set_xticks(places[::step], labels[::step], rotation=35, ha="right", rotation_mode="anchor")
        axes[-1].set_xlim(-0.4, len(places) - 0.6)

    said = ", ".join(f"{label}: {percent(share)}" for label, share in zip(labels, shares, strict=True))
    return chart(
        draw,
        name=name,
        description=f"Share of outliers by checkpoint: {said}",
        size=(7.6, 4.3),
        heights=(1.4, 1.0),
        below=1.15,
    )


def checkpoint_labels(entries: Sequence[ModelEntry]) -> list[str]:
    """Names of checkpoints without what they have in common: timm/NAME@run/step-100.pth -> step-100.pth."""
    names = [entry.model.rpartition("@")[2] for entry in entries]
    short = [file_name(name) for name in names]
    return short if len(set(short)) == len(short) else names


def series_words(entries: Sequence[ModelEntry]) -> str:
    """When along a training run the outliers come."""
    for label, entry in zip(checkpoint_labels(entries), entries, strict=True):
        if "high-norm" in entry.kinds:
            return f"Outliers first appear at {label}."
    return "No checkpoint has outliers."


def _line(axes: Axes, values: Sequence[float | None], colour: str, label: str | None = None) -> None:
    """A line with dots through the values that there are, at 0, 1, 2 ..."""
    there = [(place, value) for place, value in enumerate(values) if value is not None]
    x, y = [place for place, _ in there], [value for _, value in there]
    axes.plot(x, y, color=colour, label=label, marker="o", markersize=3, clip_on=False)


def _density(axes: Axes, arrays: Arrays) -> None:
    """How many tokens have which norm at which block, as a shade behind the curves."""
    counts, edges = arrays.get("histogram_counts"), arrays.get("histogram_edges")
    if counts is None or edges is None or not (edges > 0).all():
        return
    shade = np.log1p(counts.T.astype(float))
    sides = np.arange(counts.shape[0] + 1) - 0.5
    axes.pcolormesh(sides, edges, shade, cmap=_SHADE, vmin=0, vmax=max(shade.max(), 1), rasterized=True, linewidth=0)


def _mark_blocks(axes: Axes, entry: ModelEntry) -> None:
    planted = None if entry.planted is None else entry.planted.block
    onset = entry.onset_block
    if planted is not None:
        label = f"planted: block {planted}" if planted != onset else f"planted and found: block {planted}"
        axes.axvline(planted, color=PLANTED, linewidth=1.4, linestyle=(0, (1, 1.5)), label=label, zorder=0)
    if onset is not None and onset != planted:
        axes.axvline(onset, color=BAD, linewidth=1.2, linestyle=(0, (4, 2)), label=f"onset: block {onset}", zorder=0)


def _log_axis(axes: Axes, which: str, label: str) -> None:
    axis = axes.yaxis if which == "y" else axes.xaxis
    (axes.set_yscale if which == "y" else axes.set_xscale)("log")
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: round_number(float(value))))
    axis.set_minor_locator(NullLocator())
    axis.set_label_text(label)
