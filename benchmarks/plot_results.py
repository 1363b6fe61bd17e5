"""Draw the published figures: ``python benchmarks/plot_results.py`` reads results/published.json, writes an SVG.

    --results FILE    figures with machine and command            benchmarks/results/published.json
    --out FILE        the picture                                 docs/pictures/results.svg

Plain SVG with text as text, readable on light and dark pages. Imports nothing that is not in Python.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[1]
WIDTH, LABEL, BAR, ROW = 900, 150, 200, 26

STYLE = """<style>
  text { font-family: system-ui, "Segoe UI", "DejaVu Sans", Helvetica, sans-serif; font-size: 13px; fill: #1f2328 }
  .page { fill: #ffffff } .bold { font-weight: 600 } .small { font-size: 11.5px; fill: #57606a }
  .end { text-anchor: end } .ours { fill: #2f6fb3 } .peer { fill: #b7bfc8 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .page { fill: #0d1117 } .small { fill: #a4adb8 }
    .ours { fill: #6aa9ec } .peer { fill: #57606a }
  }
</style>"""


def main() -> None:
    """Read the figures and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks/results/published.json")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/pictures/results.svg")
    options = parser.parse_args()
    options.out.write_text(draw(json.loads(options.results.read_text())))


def draw(results: dict[str, Any]) -> str:
    """Return the picture: one panel of horizontal bars for each measured quantity, lower is better."""
    panels = results["panels"]
    height = 92 + ROW * max(len(panel["rows"]) for panel in panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">',
        f"<title>{escape(' · '.join(panel['title'] for panel in panels))}</title>",
        STYLE,
        f'<rect class="page" width="{WIDTH}" height="{height}" rx="8"/>',
    ]
    for number, panel in enumerate(panels):
        parts += _panel(panel, left=20 + number * WIDTH // len(panels), machine=results["machines"][panel["machine"]])
    return "\n".join([*parts, "</svg>", ""])


def _panel(panel: dict[str, Any], *, left: int, machine: str) -> list[str]:
    most = max(row["value"] for row in panel["rows"])
    parts = [
        f'<text x="{left}" y="28" class="bold">{escape(panel["title"])}, {panel["unit"]}</text>',
        f'<text x="{left}" y="46" class="small">{escape(panel["work"])}</text>',
        f'<text x="{left}" y="62" class="small">{escape(machine)}; shorter is better</text>',
    ]
    for index, row in enumerate(panel["rows"]):
        top = 76 + index * ROW
        width = round(BAR * row["value"] / most)
        kind = "ours" if row.get("ours") else "peer"
        parts += [
            f'<text x="{left + LABEL - 8}" y="{top + 14}" class="end">{escape(row["name"])}</text>',
            f'<rect x="{left + LABEL}" y="{top}" width="{width}" height="18" rx="2" class="{kind}"/>',
            f'<text x="{left + LABEL + width + 6}" y="{top + 14}">{row["value"]:,}</text>',
        ]
    return parts


if __name__ == "__main__":
    main()
