"""Text Gantt: the compute streams of the last step as lines of letters, for terminals without pictures."""

from __future__ import annotations

from simulator.plan import TaskKind
from simulator.timeline.timeline import RankTrack, Timeline

GLYPHS = {
    TaskKind.F: "F",
    TaskKind.B: "B",
    TaskKind.BI: "I",
    TaskKind.BW: "W",
    TaskKind.R: "R",
    TaskKind.NORM: "N",
    TaskKind.UPDATE: "U",
}
COMMUNICATION = "="
IDLE = "."
LEGEND = (
    "F forward  B backward  I its inputs  W its weights  R recompute  N norm",
    "U update  = communication  . idle  small letters: less than half of the time",
)
FAINT = 8
"""Less than an eighth of a column is not drawn."""


def text_gantt(timeline: Timeline, *, width: int = 100) -> str:
    """Return one line of at most `width` characters per rank and a legend with what is drawn.

    A column shows what its compute stream did longest in that slice of the last step, in small letters where
    that is less than half of it; idle columns show whether any communication was on the wire.
    """
    begin, end = timeline.window_ns
    names = [f"rank {track.rank}" for track in timeline.tracks]
    margin = max(map(len, names))
    width = max(1, width - margin - len(" ||"))
    lines = [
        f"{name:>{margin}} |{_line(track, begin, end, width=width)}|"
        for name, track in zip(names, timeline.tracks, strict=True)
    ]
    scale = f"{'':>{margin}}  0{format_duration(end - begin):>{width - 1}}"
    return "\n".join([*lines, scale, *LEGEND])


def format_duration(time_ns: int) -> str:
    """Return a duration for people: 1.234 s, 12.3 ms, 45.6 us, 7 ns."""
    for unit_ns, unit in ((1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "us")):
        if time_ns >= unit_ns:
            return f"{time_ns / unit_ns:.4g} {unit}"
    return f"{time_ns} ns"


def _line(track: RankTrack, begin: int, end: int, *, width: int) -> str:
    shares: list[dict[str, int]] = [{} for _ in range(width)]
    kinds = track.kinds[track.task].tolist()
    for kind, start, stop in zip(kinds, track.start_ns.tolist(), track.end_ns.tolist(), strict=True):
        if stop > begin and start < end:
            glyph = GLYPHS.get(TaskKind(kind), COMMUNICATION)
            part = (max(start, begin) - begin, min(stop, end) - begin)
            _paint(shares, glyph, part, span=end - begin)
    return "".join(_glyph(share, span=end - begin) for share in shares)


def _paint(shares: list[dict[str, int]], glyph: str, part: tuple[int, int], *, span: int) -> None:
    """Add what every column holds of `part`; times are multiplied by the width to stay whole."""
    width = len(shares)
    start, stop = part
    for column in range(start * width // span, min((stop * width - 1) // span + 1, width)):
        covered = min(stop * width, (column + 1) * span) - max(start * width, column * span)
        shares[column][glyph] = shares[column].get(glyph, 0) + covered


def _glyph(share: dict[str, int], *, span: int) -> str:
    """Return what fills at least half of a column: compute, else communication, else a little compute."""
    compute = {glyph: part for glyph, part in share.items() if glyph != COMMUNICATION}
    busy, most = sum(compute.values()), max(compute, key=lambda glyph: compute[glyph], default=IDLE)
    if 2 * busy >= span:
        return most
    if FAINT * busy >= span and 2 * share.get(COMMUNICATION, 0) < span:
        return most.lower()
    return COMMUNICATION if 2 * share.get(COMMUNICATION, 0) >= span else IDLE
