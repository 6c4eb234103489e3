"""Colours of pictures: the palette of Okabe and Ito, which colour-blind readers can tell apart."""

from __future__ import annotations

from collections.abc import Sequence

from rockplan.reports.timeline import CALLER, OTHERS, BlockRow

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
FILLS = ("#BFDDF2", "#FBE3B0", "#B9E4D6", "#EFD3E2", "#D5ECFA", "#F6C9B0", "#FAF5B8", "#E2E2E2")
RUN_COLOURS = {
    "forward": "#0072B2",
    "again": "#E69F00",
    "backward": "#009E73",
    "copy": "#CC79A7",
}
RUN_LABELS = {
    "forward": "forward",
    "again": "forward again",
    "backward": "backward",
    "copy": "copy to or from the host",
}
KEPT_COLOUR = "#8FD3BC"


def run_labels(rows: Sequence[BlockRow]) -> dict[str, str]:
    """Of the kinds of run in `rows`."""
    kinds = {kind for row in rows for _, _, kind in row.runs}
    return {kind: label for kind, label in RUN_LABELS.items() if kind in kinds}


def group_colours(groups: Sequence[str]) -> dict[str, str]:
    """Return a colour for each group, in order of first appearance; grey for the caller and
    others."""
    named = [g for g in dict.fromkeys(groups) if g not in (CALLER, OTHERS)]
    colours = {g: COLOURS[i % len(COLOURS)] for i, g in enumerate(named)}
    return {**colours, CALLER: "#9A9A9A", OTHERS: "#C8C8C8"}
