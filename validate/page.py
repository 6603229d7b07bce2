"""What every HTML report is made of: one file with its style and script inside, tables, bars, and the numbers of a chip.

A page asks nothing of the network, so it works from a disk, in an e-mail and in ten years.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import metadata, resources
from pathlib import Path

from ..model.gpu import GPU
from ..sim.whole_file import write_whole

KINDS = {
    "datasheet": "the maker's documents",
    "measured": "a microbenchmark or a published measurement",
    "derived": "arithmetic on other numbers",
    "assumed": "a guess or the user's own value",
}
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def page(
    question: str,
    answer: str,
    links: Sequence[tuple[str, str]],
    body: str,
    *,
    scripts: Sequence[str],
    keep: str = "",
    style: str = "",
) -> str:
    """The file. ``answer`` and ``body`` are markup; ``links``: (id of a section, its name); ``keep``: words of the question that
    stay on one line; ``scripts``: files of this folder; ``style``: rules beside the common ones."""
    head = escape(question)
    if keep:
        head = head.replace(keep, f'<span class="whole">{keep}</span>')
    listed = "".join(f'<li><a href="#{where}">{escape(text)}</a></li>' for where, text in links)
    script = "".join(_file(name) for name in scripts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(question)}</title><style>{_file('page.css')}{style}</style></head><body>"
        f'<a class="skip" href="#main">Skip to the content</a><header><h1>{head}</h1><p class="answer">{answer}</p></header>'
        f'<nav aria-label="Sections"><ul>{listed}</ul></nav><main id="main">{body}</main>'
        '<footer>flashsim predicts; it measures nothing.</footer><div id="tip" role="tooltip" hidden></div>'
        f"<script>{script}</script></body></html>\n"
    )


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def write_page(text: str, path: Path) -> None:
    """Write the page, whole or not at all. Raises OSError."""
    write_whole(text, path)


def cards(shown: Iterable[tuple[str, str, str]]) -> str:
    """(name, value, what more there is to say) as a row of cards."""
    inside = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(more)}</small></dd></div>" for name, value, more in shown
    )
    return f'<dl class="cards">{inside}</dl>'


def table(caption: str, columns: Iterable[str], rows: Iterable[str]) -> str:
    """``columns``: a star marks those of numbers, an empty name the one of bars. The caption stays put when the table scrolls."""
    heads = []
    for i, column in enumerate(columns):
        kind = ' class="n"' if column[:1] == "*" else ' class="bar"' if i and not column else ""
        heads.append(f'<th scope="col"{kind}>{escape(column.removeprefix("*"))}</th>')
    title, name = (f'<p class="caption">{escape(caption)}</p>', f' aria-label="{escape(caption)}"') if caption else ("", "")
    inside = f"<table{name}><thead><tr>{''.join(heads)}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return f'<div class="table">{title}<div class="scroll">{inside}</div></div>'


def row(name: str, *cells: str, binds: bool = False) -> str:
    """Cells that begin with <td are markup, others numbers."""
    inside = "".join(cell if cell.startswith("<td") else f'<td class="n">{escape(cell)}</td>' for cell in cells)
    return f'<tr{" class=binds" if binds else ""}><th scope="row">{escape(name)}</th>{inside}</tr>'


def bar(share: float) -> str:
    return f'<td class="bar"><span><i style="width:{100 * min(1.0, max(0.0, share)):.1f}%"></i></span></td>'


def falling(shares: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(shares.items(), key=lambda item: -item[1])


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def size(n: float) -> str:
    """Bytes in words, three digits."""
    for unit in ("B", "kB", "MB", "GB"):
        if n < 1000:
            return f"{n:.0f} B" if unit == "B" else f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:.4g} TB"


def smem(n: float) -> str:
    """Shared memory, in the unit that it is given out in."""
    return f"{n / 1024:.4g} KiB"


def numbers(gpu: GPU) -> str:
    """A section with every number of a chip, its kind and source; words and kinds choose what is shown."""
    rows = []
    kinds = dict.fromkeys(KINDS, 0)
    for name, number in gpu.numbers():
        kinds[number.kind] = kinds.get(number.kind, 0) + 1
        rows.append(
            f'<tr data-kind="{escape(number.kind)}"><th scope="row"><code>{escape(name)}</code></th>'
            f'<td class="n">{float(number):.12g}</td><td>{escape(number.unit)}</td>'
            f'<td><span class="kind {escape(number.kind)}">{escape(number.kind)}</span></td><td>{escape(number.source)}</td></tr>'
        )
    boxes = "".join(
        f'<label><input type="checkbox" value="{kind}" checked> {kind} ({n}): {escape(KINDS.get(kind, ""))}</label>'
        for kind, n in kinds.items()
    )
    columns = ("number", "*value", "unit", "kind", "source")
    chip = f"{escape(gpu.full_name)}, {escape(gpu.architecture)}"
    return (
        f'<section id="numbers"><h2>Numbers of {escape(gpu.name)}</h2><p>{chip}: every'
        " number that the prediction may use, none of them fitted to a kernel.</p>"
        f"{filters('hbm, latency, microbench ...', boxes)}{table('', columns, rows)}</section>"
    )


def filters(example: str, boxes: str = "") -> str:
    """A field that keeps those rows of its section's table that have all of its words, and ``boxes`` of their kinds."""
    return (
        f'<div class="filters"><label>Find <input type="search" placeholder="{escape(example)}"></label>'
        f'{boxes}<span class="count note" aria-live="polite"></span></div>'
    )


def made(command: str, items: Iterable[str]) -> str:
    """The last section: version and command, then ``items`` in plain words."""
    again = [f"<li>Again: <code>{escape(command)}</code></li>"] if command else []
    version = f"<li>flashsim {escape(metadata.version('flashsim'))}</li>"
    listed = "".join((version, *again, *(f"<li>{escape(item)}</li>" for item in items)))
    return f'<section id="made"><h2>How this was made</h2><ul>{listed}</ul></section>'
