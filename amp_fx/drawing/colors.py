"""Colours of pictures."""

from __future__ import annotations

COLORS = {
    "bfloat16": "#a6cee3",
    "float16": "#cab2d6",
    "float32": "#fdd9a0",
    "float64": "#f4a6a0",
}
"""Fill by the dtype that a box runs in."""

OTHER = "#e4e4e4"
"""Fill of what runs in integers, booleans or other dtypes."""

HEAT = ("#f4f4f4", "#fff3c4", "#ffdf80", "#ffb84d", "#ff8534", "#e5412d")
"""Fill by a strength from 0 to 5, of a report of accuracy."""

ALARM = "#b00020"
"""The line around what overflows."""

INK = "#333333"
CAST = "#c0392b"
KEPT = "#1b7f5c"
FAINT = "#999999"
