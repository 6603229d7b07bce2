"""The HTML report of an exploration: what it says against the rows themselves, and that it answers in a real browser."""

from __future__ import annotations

import json
import re
from functools import cache, partial
from html import unescape
from itertools import combinations
from pathlib import Path

import command_line
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from headless import Page

from flashsim.model.gpu import GPU, load_gpu
from flashsim.model.schedules import get_schedule
from flashsim.sim.explore import Row, Sweep, candidate, explore, loss
from flashsim.sim.findings import heat_map, pareto
from flashsim.sim.space import parse_space
from flashsim.sim.sweep_file import Record, SweepFile, read_record
from flashsim.sim.workers import local
from flashsim.validate.report_sweep import report_sweep
from flashsim.validate.sweep_chart import Scale

H100, FA2 = load_gpu("h100"), get_schedule("fa2")
PROBLEM = {"batch": 1, "heads": 16, "seqlen": 2048, "head_dim": 64, "causal": False, "dtype": "bf16", "pass": "fwd"}
GRID = ("block_kv=32:128:32", "warps=2,4", "block_q=64,100", "registers=none,168")


def sweep_of(*texts: str, gpu: GPU = H100) -> Sweep:
    return Sweep(schedule=FA2, gpu=gpu, problem=PROBLEM, space=parse_space(texts, FA2, gpu), clock="boost")


@cache
def rows_of(*texts: str) -> tuple[Row, ...]:
    with local(1) as workers:
        return tuple(sorted(explore(sweep_of(*texts), workers), key=candidate))


def file_of(folder: Path, *texts: str, gpu: GPU = H100, rows: int | None = None) -> Path:
    """A sweep file with the first ``rows`` of its rows (None: all)."""
    sweep = sweep_of(*texts, gpu=gpu)
    path = folder / f"sweep{len(list(folder.iterdir()))}.parquet"
    file = SweepFile(path=path, sweep=sweep, planned=sweep.size, command="flashsim explore fa2 <it>")
    assert file.save(rows_of(*texts)[:rows])
    return file.path


def page_of(folder: Path, *texts: str, rows: int | None = None) -> tuple[str, Record]:
    record = read_record(file_of(folder, *texts, rows=rows))
    return report_sweep(record, command="flashsim report --sweep <it>"), record


def text_of(page: str) -> str:
    bare = re.sub(r"<(style|script)>.*?</\1>", "", page, flags=re.DOTALL)
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", bare)).split())


run, sentence = (partial(each, "report") for each in (command_line.run, command_line.sentence))


# --- the record ---


def test_a_record_is_the_sweep_of_its_file(tmp_path: Path) -> None:
    sweep, record = sweep_of(*GRID), read_record(file_of(tmp_path, *GRID))
    assert record.identity() == json.loads(json.dumps(sweep.identity()))
    assert (record.names, record.size, record.objective, record.complete) == (sweep.names, sweep.size, sweep.objective, True)
    assert record.rows == rows_of(*GRID)
    assert read_record(file_of(tmp_path, "seqlen=128,256")).objective == "tflops"


@pytest.mark.parametrize("key", ["flashsim.sweep", "flashsim.space", "flashsim.planned", "flashsim.digest"])
def test_a_file_that_lacks_a_part_is_refused(tmp_path: Path, key: str) -> None:
    path = file_of(tmp_path, "warps=2,4")
    table = pq.read_table(path)
    kept = {name: value for name, value in table.schema.metadata.items() if name != key.encode()}
    pq.write_table(table.replace_schema_metadata(kept), path)
    with pytest.raises(ValueError, match=r"it, or it was changed$|is no sweep of flashsim: give --sweep a file that"):
        read_record(path)


def test_a_row_that_ran_without_results_is_refused(tmp_path: Path) -> None:
    path = file_of(tmp_path, "warps=2,4")
    table = pq.read_table(path)
    place = table.column_names.index("ms")
    pq.write_table(table.set_column(place, table.field("ms"), pa.array([None] * len(table), pa.float64())), path)
    with pytest.raises(ValueError, match="has a candidate 0 that cannot be"):
        read_record(path)


# --- what the page says ---


def test_the_page_holds_the_whole_sweep_and_fetches_nothing(tmp_path: Path) -> None:
    page, record = page_of(tmp_path, *GRID)
    sections = re.findall(r'<section id="(\w+)"', page)
    assert sections == ["best", "pareto", "fields", "maps", "reasons", "candidates", "numbers", "made"]
    assert [link for link in re.findall(r'href="#(\w+)"', page) if link != "main"] == sections
    assert not re.search(r"\b(src|srcset)=|https?://", page)
    said = text_of(page)
    assert "Which block_kv, warps, block_q and 1 more make fa2 fastest on NVIDIA H100 SXM5 80 GB for batch 1, heads 16" in said
    assert "Again: flashsim explore fa2 <it>" in said
    assert "This page: flashsim report --sweep <it>" in said
    assert "numbers (digest" in said
    assert str(record.rows[0]["ms"])[:4] in said


def test_every_candidate_is_counted_once(tmp_path: Path) -> None:
    page, record = page_of(tmp_path, *GRID)
    ran = sum(row["status"] == "ok" for row in record.rows)
    table = page[page.index('<section id="candidates"') : page.index('<section id="numbers"')]
    numbers = [int(number) for number in re.findall(r'<th scope="row">(\d+)</th>', table)]
    assert sorted(numbers) == [row["candidate"] for row in record.rows if row["status"] == "ok"]
    assert [row["ms"] for number in numbers for row in [record.rows[number]]] == sorted(
        row["ms"] for row in record.rows if row["status"] == "ok"
    )
    reasons = page[page.index('<section id="reasons"') : page.index('<section id="candidates"')]
    counts = [int(n) for n in re.findall(r'<tr><td class="n">(\d+)</td>', reasons)]
    assert sum(counts) == len(record.rows) - ran > 0
    assert "block_q must be a multiple of 16" in reasons
    fields = page[page.index('<section id="fields"') : page.index('<section id="maps"')]
    shares = re.findall(r">(\d+) of (\d+)</td>", fields)
    assert sum(int(all_) for _, all_ in shares) == len(record.names) * len(record.rows)


def test_the_front_is_what_nothing_beats(tmp_path: Path) -> None:
    """Against all pairs, for the tables and the dots: no row of the front is beaten, and every other is matched or beaten."""
    page, record = page_of(tmp_path, *GRID)
    ran = [row for row in record.rows if row["status"] == "ok"]
    front = {row["candidate"] for row in pareto(record.objective, ran)}

    def costs(row: Row) -> tuple[float, int, int]:
        return loss(record.objective, row), row["registers_per_thread"], row["smem_bytes_per_cta"]

    for row in ran:
        better = [o for o in ran if costs(o) != costs(row) and all(a <= b for a, b in zip(costs(o), costs(row), strict=True))]
        equal = [o for o in ran if costs(o) == costs(row) and o["candidate"] < row["candidate"]]
        assert (row["candidate"] in front) is not bool(better or equal)
    for chart in re.findall(r'<g class="front">(.*?)</g>', page):
        assert {int(number) for number in re.findall(r'data-info="#(\d+) ', chart)} == front


def test_maps_are_those_of_every_pair(tmp_path: Path) -> None:
    page, record = page_of(tmp_path, *GRID)
    found = re.findall(r'<figure class="map" data-x="([^"]+)" data-y="([^"]+)"( hidden)?>(.*?)</figure>', page)
    assert sorted(tuple(sorted(pair[:2])) for pair in found) == sorted(tuple(sorted(p)) for p in combinations(record.names, 2))
    assert sum(not hidden for _, _, hidden, _ in found) == 1
    for x, y, _, body in found:
        heat = heat_map(record, record.rows, x, y)
        cells = re.findall(r'<td class="(\w+)">([^<]*)</td>', body)
        assert [text for _, text in cells] == ["-" if v is None else f"{v:.1f}" for row in heat["cells"] for v in row]
        assert all((kind == "none") is (text == "-") for kind, text in cells)
        assert ("h0", "0.0") in cells


def test_only_costs_that_vary_are_drawn(tmp_path: Path) -> None:
    page, record = page_of(tmp_path, "block_kv=32:128:32", "registers=168")
    assert len({row["smem_bytes_per_cta"] for row in record.rows}) > 1
    charts = re.findall(r'<figure class="scatter"><figcaption class="caption">([^<]*)<', page)
    assert charts == ["Time over SMEM a CTA"]
    assert "All candidates that ran have the same registers a thread (168)." in text_of(page)
    page, _ = page_of(tmp_path, "deferred_divide", "registers=168")
    assert 'class="scatter"' not in page
    assert "have the same registers a thread (168) and SMEM a CTA (" in text_of(page)


def test_candidates_say_where_their_counts_come_from(tmp_path: Path) -> None:
    """Of FA2's tiles one was read from a binary; the table says which, and a note that the others were not."""
    page, record = page_of(tmp_path, "block_kv=64,128", "block_q=64,128", "warps=4")
    origins = {row["candidate"]: row["counts_from"] for row in record.rows if row["status"] == "ok"}
    assert set(origins.values()) == {"binary", "derived"}
    table = page[page.index('<section id="candidates"') :]
    told = re.findall(r'<tr><th scope="row">(\d+)</th>.*?<td>(binary|derived|ideal)</td><td class="words">', table)
    assert {int(number): origin for number, origin in told} == origins
    assert "instruction counts are of 2 kinds" in text_of(page)
    page, _ = page_of(tmp_path, "block_kv=64,128", "counts=ideal", "warps=4")
    assert "instruction counts are of" not in page


def test_an_unfinished_sweep_and_a_changed_chip_say_so(tmp_path: Path) -> None:
    page, record = page_of(tmp_path, *GRID, rows=9)
    assert not record.complete
    assert "The sweep is unfinished" in page
    assert "23 not simulated yet" in text_of(page)
    odd = H100.replace_number("pipe.ex2", 4)
    path = file_of(tmp_path, "warps=2,4", gpu=odd)
    page = report_sweep(read_record(path))
    assert "other than in a chip file here: set by hand, or changed since" in page
    assert '<section id="numbers"' not in page


def test_one_field_makes_a_page_without_a_map(tmp_path: Path) -> None:
    page, _ = page_of(tmp_path, "warps=2,4")
    assert '<section id="maps"' not in page
    assert '<section id="reasons"' not in page
    assert "Which warps make fa2 fastest" in page


def test_sizes_are_ranked_by_rate(tmp_path: Path) -> None:
    page, record = page_of(tmp_path, "seqlen=256,2048", "block_kv=64,128")
    best = max(record.rows, key=lambda row: row["tflops"])
    assert f"<strong>seqlen={best['seqlen']} block_kv={best['block_kv']}</strong>" in page
    assert "TFLOP/s over SMEM a CTA" in page


@pytest.mark.parametrize(
    ("values", "log"), [([0.1, 0.2, 0.25], False), ([1.0, 900.0], True), ([3.0, 3.0], False), ([168.0, 255.0], False)]
)
def test_scales_keep_values_inside_and_in_order(values: list[float], log: bool) -> None:
    scale = Scale(values, 10, 110, log=True)
    assert scale.log is log
    places = [scale.at(value) for value in values]
    assert all(10 <= place <= 110 for place in places)
    assert places == sorted(places)
    ticks = scale.ticks()
    assert ticks
    assert all(min(values) - 1e-9 <= tick <= max(values) + 1e-9 for tick in ticks)


@pytest.mark.parametrize(("kib", "steps"), [((32, 96), 16), ((48, 208), 32), ((100, 101), 0.25)])
def test_sizes_of_memory_have_ticks_a_power_of_two_apart(kib: tuple[int, int], steps: float) -> None:
    ticks = [tick / 1024 for tick in Scale([1024.0 * n for n in kib], 10, 110, log=False, binary=True).ticks()]
    assert len(ticks) > 2
    assert {b - a for a, b in zip(ticks, ticks[1:], strict=False)} == {steps}
    assert all(tick % steps == 0 for tick in ticks)


# --- the command ---


def test_report_writes_the_page_of_a_file(tmp_path: Path) -> None:
    out = tmp_path / "sweep.html"
    done = run("--sweep", str(file_of(tmp_path, *GRID)), "-o", str(out))
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith(f"{out}: 0.")
    assert '<section id="pareto"' in out.read_text()


def test_bad_input_is_one_sentence(tmp_path: Path) -> None:
    out, path = str(tmp_path / "o.html"), file_of(tmp_path, "warps=2,4")
    assert "report lacks a SCHEDULE, --gpu, --batch, --heads, --seqlen, --head-dim: give what" in sentence("-o", out)
    assert "report lacks --head-dim: give what to predict, or --sweep FILE" in sentence(
        "fa2", "--gpu", "h100", "--batch", "1", "--heads", "1", "--seqlen", "64", "-o", out
    )
    assert "report got fa2 beside --sweep" in sentence("fa2", "--sweep", str(path), "-o", out)
    assert "report got --head-dim beside --sweep" in sentence("--sweep", str(path), "--head-dim", "64", "-o", out)
    absent = tmp_path / "no.parquet"
    assert sentence("--sweep", str(absent), "-o", out).endswith(
        f"cannot read {absent}: no such file or directory; give --sweep a file that explore -o wrote"
    )
    (tmp_path / "text").write_text("text")
    assert "not a Parquet file" in sentence("--sweep", str(tmp_path / "text"), "-o", out)
    none = file_of(tmp_path, "block_q=100,200")
    assert "nothing to report: none of the 2 candidates ran, the first because" in sentence("--sweep", str(none), "-o", out)
    assert not Path(out).exists()


# --- in a browser ---


@pytest.mark.browser
def test_dots_maps_and_tables_answer(browser: Page, tmp_path: Path) -> None:
    page, record = page_of(tmp_path, *GRID)
    file = tmp_path / "out.html"
    file.write_text(page)
    browser.open(file.as_uri())
    best = min((row for row in record.rows if row["status"] == "ok"), key=lambda row: row["ms"])

    browser.click(".front circle")
    said = browser.js("document.querySelector('.readout').textContent")
    assert re.match(r"#\d+ block_kv=\d+ warps=\d .* ms, .* TFLOP/s", said)
    assert browser.js("document.querySelectorAll('.scatter circle.on').length") >= 2  # in both charts
    x, y = browser.middle(".front circle")
    browser.mouse("Moved", x + 1, y)
    assert browser.js("document.getElementById('tip').innerText").startswith("#")

    shown = "[...document.querySelectorAll('.map')].filter((m) => !m.hidden).map((m) => [m.dataset.x, m.dataset.y])"
    grid = "[...document.querySelector('.map:not([hidden]) table').rows].map((r) => [...r.cells].map((c) => c.textContent))"
    for x_name, y_name in (("warps", "registers"), ("registers", "warps"), ("block_kv", "block_q")):
        for i, value in enumerate((x_name, y_name)):
            browser.js(
                f"(s => {{ s.value = {json.dumps(value)}; s.dispatchEvent(new Event('change')); }})"
                f"(document.querySelectorAll('.choose select')[{i}])"
            )
        assert browser.js(shown) == [[x_name, y_name]]
        heat = heat_map(record, record.rows, x_name, y_name)
        expected = [[("-" if v is None else f"{v:.1f}") for v in row] for row in heat["cells"]]
        assert [row[1:] for row in browser.js(grid)[1:]] == expected

    column = "[...document.querySelectorAll('#candidates tbody tr')].map((r) => Number(r.cells[0].textContent))"
    browser.click("#candidates th:first-child button")
    assert browser.js(column) == sorted(browser.js(column))
    browser.click("#candidates th:first-child button")
    assert browser.js(column) == sorted(browser.js(column), reverse=True)
    smem = "[...document.querySelectorAll('#candidates thead th')].findIndex((h) => h.textContent === 'SMEM') + 1"
    browser.click(f"#candidates th:nth-child({browser.js(smem)}) button")
    kept = {row["candidate"]: row["smem_bytes_per_cta"] for row in record.rows}
    sizes = [kept[number] for number in browser.js(column)]
    assert sizes == sorted(sizes)
    browser.click("#candidates [type=search]")
    browser.call("Input.insertText", text=f"{best['ms']:.4g}")
    browser.settle()
    rows = "[...document.querySelectorAll('#candidates tbody tr')]"
    visible = f"{rows}.filter((r) => !r.hidden).map((r) => +r.cells[0].textContent)"
    assert best["candidate"] in browser.js(visible)
    assert len(browser.js(visible)) < len(sizes)
    assert browser.problems == []
    assert browser.requests == [file.as_uri()]


@pytest.mark.browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_it_fits_narrow_and_wide_pages_in_light_and_dark(browser: Page, tmp_path: Path, dark: bool) -> None:
    file = tmp_path / "out.html"
    file.write_text(page_of(tmp_path, *GRID)[0])
    for width in (1280, 390):
        browser.fits(file.as_uri(), width=width, dark=dark, texts=".scatter text")
    assert browser.problems == []
