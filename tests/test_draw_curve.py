"""scripts/draw_curve.py: the picture and the page of curve documents, and how a browser shows the page."""

from __future__ import annotations

import html
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
SVG = "{http://www.w3.org/2000/svg}"
VOID = {"meta", "br", "hr", "img", "link", "input"}
PROGRAM = runpy.run_path(str(ROOT / "scripts" / "draw_curve.py"))


AT_NONE: dict[str, Any] = {"levels": [], "values": {}}  # of a statement


def level(c: int, tokens: float, ttft: float = 0.2, tpot: float = 0.02) -> dict[str, Any]:
    return {
        "c": c,
        "runs": 1,
        "left_out": None,
        "interrupted": False,
        "meets_objective": True,
        "server_slots": 20,
        "slo": {"ttft_s": 2.0, "tpot_s": 0.1},
        "requests": 40,
        "completed": 40,
        "output_tokens_per_s": tokens,
        "decode_bound_output_tokens_per_s": tokens,
        "requests_per_s": tokens / 128,
        "goodput_requests_per_s": tokens / 128,
        "mean_in_flight": float(c),
        "cached_tokens_mean": None,
        "scaling": 1.0,
        "ttft_s": {"p50": ttft, "p90": 2 * ttft},
        "tpot_s": {"p50": tpot, "p90": 1.5 * tpot},
    }


def curve(label: str = "worked-example", **changes: Any) -> dict[str, Any]:
    """The worked example a = 20 ms, b = 1.5 ms."""
    document: dict[str, Any] = {
        "kind": "curve",
        "label": label,
        "answer": {"text": "Up to 20 requests at once stay inside the SLO", "c": 20},
        "settings": {"engine": "sim", "server_slots": None, "host": None},
        "slo": {"ttft_s": 2.0, "tpot_s": 0.1},
        "levels": [
            level(c, tokens, 0.1 * c, (20 + 1.5 * c) / 1000)
            for c, tokens in ((1, 46.5), (5, 181.8), (10, 285.7), (20, 400.0))
        ],
        "fit": {
            "a_ms": 20.0,
            "b_ms": 1.5,
            "largest_residual": 0.0,
            "b_interval_ms": [1.4, 1.6],
            "levels": [1, 5, 10, 20],
            "ceiling_tokens_per_s": 666.7,
            "ceiling_note": "extrapolated, measured 1 to 20",
            "c_at_slo": 53.3,
            "c_at_slo_note": None,
        },
        "knee": {"between": [5, 10], "per_repeat": []},
        "operating_point": 20,
        "statements": [{"code": "x", "status": "READING", "text": "a < b & more", "advice": "fewer", **AT_NONE}],
        "check": {"pass": 1, "warn": 0, "fail": 0, "statements": [{"status": "PASS", "code": "r", "text": "m"}]},
    }
    return {**document, **changes}


def compare(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    ratio = {"a": 400.0, "b": 200.0, "ratio": 0.5, "low": 0.48, "high": 0.53, "different": True}
    rows = [{"c": 20, "output_tokens_per_s": ratio}]
    rows.append({"c": 1, "output_tokens_per_s": {**ratio, "low": None, "high": None, "different": None}})
    return {
        "kind": "compare",
        "a": a,
        "b": b,
        "levels": rows,
        "statements": [{"text": "engine differs: x and y"}, {"text": "at c=20: different"}],
    }


def draw(document: Any, tmp_path: Path) -> tuple[ET.Element, str]:
    source = tmp_path / "curve.json"
    source.write_text(json.dumps(document))
    command = [sys.executable, str(ROOT / "scripts" / "draw_curve.py"), str(source)]
    command += ["--svg", str(tmp_path / "out.svg"), "--html", str(tmp_path / "out.html")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return ET.parse(tmp_path / "out.svg").getroot(), (tmp_path / "out.html").read_text("utf-8")


def words(picture: ET.Element) -> list[str]:
    return [element.text or "" for element in picture.iter(f"{SVG}text")]


def marks(picture: ET.Element, css: str) -> list[ET.Element]:
    """The drawn elements that have all these classes; their entries in the legend, drawn first, left out."""
    found = [e for e in picture.iter() if set(css.split()) <= set((e.get("class") or "").split())]
    return found[1:]


def moves(path: ET.Element) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"[ML](\S+) (\S+)", path.get("d", ""))]


class Nesting(HTMLParser):
    """Fails where a tag is not closed by its own end tag."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


# ---------------------------------------------------------------- the picture


def test_points_stand_where_their_figures_say(tmp_path: Path) -> None:
    picture, _ = draw(curve(), tmp_path)
    dots = [e for e in marks(picture, "mark first") if "hollow" not in str(e.get("class"))]
    (x1, y1), (x5, y5), _, (x20, y20) = [(float(e.get("cx", "")), float(e.get("cy", ""))) for e in dots[:4]]
    assert (x5 - x1) / (x20 - x1) == pytest.approx(4 / 19, abs=0.01)
    assert (y1 - y5) / (y1 - y20) == pytest.approx((181.8 - 46.5) / (400.0 - 46.5), abs=0.01)


@pytest.mark.parametrize(("slots", "at_20"), [(None, 400.0), (20, 400.0), (10, 285.7), (64, 400.0)])
def test_the_decode_bound_curve_ends_at_the_slots(tmp_path: Path, slots: int | None, at_20: float) -> None:
    """Only min(c, slots) requests decode together. The measured points tell the scale."""
    picture, _ = draw(curve(settings={"server_slots": slots}), tmp_path)
    paths = {e.get("class"): moves(e) for e in reversed(list(picture.iter(f"{SVG}path")))}
    (first, *_, last), ((x1, y1), *_, (x20, y20)) = paths["line first model"], paths["line first"]
    assert (first[0], last[0]) == (x1, x20)
    assert 46.5 + (y1 - last[1]) / (y1 - y20) * (400.0 - 46.5) == pytest.approx(at_20, abs=1)


def test_a_fit_that_misses_its_levels_draws_no_curve(tmp_path: Path) -> None:
    picture, page = draw(curve(fit={**curve()["fit"], "largest_residual": 1.22}), tmp_path)
    assert not [e for e in picture.iter() if "model" in e.get("class", "")] and "<figcaption>" not in page


def test_knee_operating_point_and_ceiling_are_marked(tmp_path: Path) -> None:
    picture, _ = draw(curve(), tmp_path)
    assert len(marks(picture, "band")) == 1 and len(marks(picture, "ring")) == 1
    assert not marks(picture, "limit first")
    expected = {"ceiling 1/b = 666.7 tok/s (above)", "knee between c=5 and c=10", "operating point c=20"}
    assert expected <= set(words(picture))


def test_a_ceiling_inside_the_frame_is_a_line(tmp_path: Path) -> None:
    fit = {**curve()["fit"], "ceiling_tokens_per_s": 390.0}
    picture, _ = draw(curve(fit=fit), tmp_path)
    assert len(marks(picture, "limit first")) == 1 and "ceiling 1/b = 390.0 tok/s" in words(picture)


def test_without_knee_fit_and_operating_point_nothing_is_invented(tmp_path: Path) -> None:
    levels = [{**level(c, 100.0), "decode_bound_output_tokens_per_s": None} for c in (1, 5)]
    document = curve(
        fit=None, knee={"between": None, "per_repeat": []}, operating_point=None, answer=None, levels=levels
    )
    picture, page = draw(document, tmp_path)
    assert not any(e.get("class", "").startswith(("band", "ring", "line first model")) for e in picture.iter())
    assert "operating point: none" in page and "knee: not reached up to c=5" in page and "not enough points" in page
    assert "ceiling" not in re.sub(r"(?s)<h2>Method.*", "", page) and "decode-bound" not in page


@pytest.mark.parametrize(("steady", "drawn"), [(420.0, True), (405.0, False), (None, False)])
def test_the_steady_state_is_drawn_where_it_differs(tmp_path: Path, steady: float | None, drawn: bool) -> None:
    document = curve()
    document["levels"][-1]["steady_output_tokens_per_s"] = steady
    picture, page = draw(document, tmp_path)
    assert ("steady state" in words(picture)) == drawn
    assert ('<th scope="col">steady state</th>' in page) == (steady is not None)


def test_a_count_that_no_line_holds_and_one_level_alone(tmp_path: Path) -> None:
    alone = [{**level(5, 100.0), "completed": None}]
    picture, page = draw(curve(levels=alone, knee={"between": None}), tmp_path)
    assert "<td>?/40</td>" in page
    assert "knee: not enough points" in (picture.findtext(f"{SVG}desc") or ""), (
        "one level cannot show that none is there"
    )


def test_text_alternative_names_every_level(tmp_path: Path) -> None:
    picture, page = draw(curve(), tmp_path)
    description = picture.findtext(f"{SVG}desc") or ""
    assert "181.8 tok/s at c=5" in description and "knee: between c=5 and c=10" in description
    assert picture.get("role") == "img"
    identifiers = re.findall(r'id="([^"]*)"', page)
    assert len(identifiers) == len(set(identifiers)) == 4
    for labelled in re.findall(r'aria-labelledby="([^"]*)"', page):
        assert set(labelled.split()) <= set(identifiers)


def test_two_labels_differ_in_shape_and_colour(tmp_path: Path) -> None:
    picture, _ = draw(compare(curve("one"), curve("two")), tmp_path)
    assert {e.tag for e in marks(picture, "mark first")} == {f"{SVG}circle"}
    assert {e.tag for e in marks(picture, "mark second")} == {f"{SVG}rect"}
    assert {"one p50", "two p90"} <= set(words(picture))


def test_everything_drawn_stays_inside_the_picture(tmp_path: Path) -> None:
    picture, _ = draw(curve(label="a-label-that-goes-on-" * 20), tmp_path)
    width, height = (float(picture.get(side, "")) for side in ("width", "height"))
    for element in picture.iter():
        for key, limit in (("x", width), ("cx", width), ("x2", width), ("y", height), ("cy", height), ("y2", height)):
            value = element.get(key)
            assert value is None or -0.5 <= float(value) <= limit + 0.5, (element.tag, element.attrib)


def test_repeats_draw_their_range(tmp_path: Path) -> None:
    document = curve()
    document["levels"][1]["ranges"] = {"output_tokens_per_s": [170.0, 190.0]}
    picture, _ = draw(document, tmp_path)
    assert [e.get("class") for e in picture.iter() if "range" in e.get("class", "")] == ["range first"]


# ---------------------------------------------------------------- the page


def test_the_answer_comes_first_then_the_picture_then_the_tables(tmp_path: Path) -> None:
    gpu = {"name": "H200", "power_w_mean": 412.4, "temperature_c_max": 61.0, "tokens_per_joule": 1.234}
    document = curve()
    document["levels"][0]["gpu"] = gpu
    _, page = draw(document, tmp_path)
    order = [
        "<h1",
        "Up to 20 requests at once",
        "<svg",
        "Levels of",
        "GPU of",
        "Reading of",
        "Settings",
        "Check",
        "Method",
    ]
    places = [page.index(one) for one in order]
    assert places == sorted(places)
    assert all(cell in page for cell in ("H200", "<td>412</td>", "<td>61</td>", "<td>1.234</td>"))
    assert "SM clock" not in page, "a column that no level has is left out"
    assert "TPOT p50 ~ 20.00 ms + 1.500 ms x c" in page, "in the analyser's words"
    assert "ceiling 666.7 tok/s (1/b; extrapolated, measured 1 to 20)" in page and "met at c = 53.3</li>" in page


def test_a_comparison_says_the_ratio_with_its_interval_and_verdict(tmp_path: Path) -> None:
    _, page = draw(compare(curve("one"), curve("two")), tmp_path)
    assert all(f"<td>{cell}</td>" in page for cell in ("400.0", "200.0", "0.50", "0.48", "0.53"))
    assert page.count("different") == 1 and "<li>engine differs: x and y</li>" in page, (
        "the verdicts are the analyser's"
    )
    assert "one: Up to 20 requests" in page and "two: Up to 20 requests" in page


@pytest.mark.parametrize("label", ["plain", "<b>&\"'", "\x1b[31m \x00 \ud800 \u202e", "\u8ca0\u8377" * 30])
def test_page_is_well_formed_and_fetches_nothing(tmp_path: Path, label: str) -> None:
    _, page = draw(curve(label), tmp_path)
    nesting = Nesting()
    nesting.feed(page)
    assert not nesting.open and "script" not in nesting.seen
    ET.fromstring(page.partition("\n")[2])
    assert not re.search(r"(?:src|href)=|url\(|@import", page)
    assert "a &lt; b &amp; more" in page and "Try: fewer" in page
    assert "prefers-color-scheme: dark" in page and "@media print" in page


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
QUIET = ("gpu", "quic", "background-networking", "component-update", "sync")
OPTIONS = ["--headless", "--no-sandbox", "--no-first-run", "--hide-scrollbars", *(f"--disable-{it}" for it in QUIET)]
LISTENER = "<script>var faults = []; addEventListener('error', event => faults.push(String(event.message)))</script>"
MEASURE = """
const near = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
const dot = (x, y) => ({left: x - 0.5, right: x + 0.5, top: y - 0.5, bottom: y + 0.5});
function measure(frame) {
  const page = frame.contentDocument, root = page.documentElement, clashes = [];
  const svg = [...page.querySelectorAll('svg')].filter(one => one.getBoundingClientRect().width);
  const labels = [...svg[0].querySelectorAll('text')].map(one => [one.textContent, one.getBoundingClientRect()]);
  const shapes = [...svg[0].querySelectorAll('path, line')].flatMap(one => {
    const to = one.getScreenCTM(), steps = Math.ceil(one.getTotalLength());
    return [...Array(steps + 1).keys()].map(step => {
      const at = one.getPointAtLength(step).matrixTransform(to);
      return [one.getAttribute('class'), dot(at.x, at.y)];
    });
  });
  for (const one of svg[0].querySelectorAll('circle, rect:not(.paper)'))
    shapes.push([one.getAttribute('class'), one.getBoundingClientRect()]);
  const paper = svg[0].getBoundingClientRect();
  labels.forEach(([words, box], index) => {
    for (const [other, there] of [...labels.slice(index + 1), ...shapes])
      if (near(box, there)) clashes.push(words + ' / ' + other);
    if (box.left < paper.left || box.right > paper.right) clashes.push(words + ' / edge');
  });
  const fetched = frame.contentWindow.performance.getEntriesByType('resource').map(one => one.name);
  return {pictures: svg.length, labels: labels.length, shapes: shapes.length, clashes: [...new Set(clashes)], fetched,
    faults: frame.contentWindow.faults, scale: paper.width / svg[0].viewBox.baseVal.width,
    sideways: root.scrollWidth - root.clientWidth};
}
addEventListener('load', () => {
  const found = [...document.querySelectorAll('iframe')].map(measure);
  document.getElementById('found').textContent = JSON.stringify(found);
});
"""


def measured_in_browser(pages: list[tuple[int, str]], folder: Path) -> list[dict[str, Any]]:
    """What a browser makes of each page in a frame so many pixels wide."""
    frames = "".join(
        f'<iframe style="width: {width}px; height: 900px" srcdoc="{html.escape(text)}"></iframe>'
        for width, text in ((width, text.replace("<head>", f"<head>{LISTENER}")) for width, text in pages)
    )
    path = folder / "frames.html"
    path.write_text(
        f'<!DOCTYPE html><meta charset="utf-8"><pre id="found"></pre>{frames}<script>{MEASURE}</script>', "utf-8"
    )
    command = [str(BROWSER), *OPTIONS, "--dump-dom", f"--user-data-dir={folder / 'profile'}", path.as_uri()]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=240)
    found = re.search(r'<pre id="found">(.+?)</pre>', done.stdout)
    assert found, done.stderr[-2000:]
    return list(json.loads(html.unescape(found.group(1))))


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here (Debian: apt-get install chromium)")
def test_a_browser_shows_every_label_clear_of_the_others_and_of_the_lines(tmp_path: Path) -> None:
    """At a phone's and at a desktop's width: no script error, nothing fetched, no label on another or on a line."""
    many = curve(
        "many", levels=[level(c, 30.0 * c, 0.001 * c) for c in (1, 2, 3, 4, 5, 6, 8, 12, 16, 32, 64, 128, 250, 256)]
    )
    many["levels"][3]["steady_output_tokens_per_s"] = 500.0
    inside = curve(
        "ceiling-inside", fit={**curve()["fit"], "ceiling_tokens_per_s": 395.0}, slo={"ttft_s": 2, "tpot_s": 0.07}
    )
    documents = [
        curve(),
        inside,
        many,
        compare(curve("\u8ca0\u8377" * 30), inside),
        curve(fit=None, levels=[level(7, 0.0)]),
    ]
    texts = [PROGRAM["page"](document) for document in documents]
    spoiled = texts[0].replace(">operating point c=20</text>", ' dx="-40">operating point c=20</text>')
    *good, bad = measured_in_browser(
        [(width, text) for text in texts for width in (400, 1200)] + [(1200, spoiled)], tmp_path
    )
    for one in good:
        assert one["clashes"] == [] and one["faults"] == [] and one["fetched"] == [] and one["sideways"] <= 0
        assert one["pictures"] == 1 and one["labels"] > 15 and one["shapes"] > 500
        assert 0.95 <= one["scale"] <= 1.1, "a label keeps its size"
    assert bad["clashes"], "the measure sees a label that was moved onto its line"


# ---------------------------------------------------------------- input and output


@pytest.mark.parametrize(
    "document",
    [
        [],
        {},
        {"kind": "curve", "label": "x", "levels": []},
        {"kind": "check"},
        {"kind": "compare"},
        {"kind": "curve", "label": "x", "levels": [{"c": 1}]},
        3,
    ],
)
def test_other_json_is_refused_in_one_line(document: Any, tmp_path: Path) -> None:
    source = tmp_path / "x.json"
    source.write_text(json.dumps(document))
    command = [sys.executable, str(ROOT / "scripts" / "draw_curve.py"), str(source)]
    command += ["--svg", str(tmp_path / "x.svg"), "--html", str(tmp_path / "x.html")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and done.stderr.startswith("draw_curve.py: ")
    assert not (tmp_path / "x.svg").exists() and not (tmp_path / "x.html").exists()


def test_version_and_an_interrupt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    main = PROGRAM["main"]
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0 and re.fullmatch(r"draw_curve.py \d+\.\d+\.\d+\n", capsys.readouterr().out)

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("json.loads", interrupt)
    assert main(["--svg", "x.svg", str(ROOT / "README.md")]) == 130 and capsys.readouterr() == ("", "")


def test_a_pipe_and_a_folder_are_refused_and_no_reader_is_waited_for(tmp_path: Path) -> None:
    source = tmp_path / "curve.json"
    source.write_text(json.dumps(curve()))
    os.mkfifo(tmp_path / "pipe")
    command = [sys.executable, str(ROOT / "scripts" / "draw_curve.py"), str(source)]
    for option, target in (("--svg", tmp_path / "pipe"), ("--html", tmp_path / "pipe"), ("--svg", tmp_path)):
        done = subprocess.run([*command, option, str(target)], capture_output=True, text=True, timeout=60)
        assert done.returncode == 2 and "cannot be written" in done.stderr and done.stderr.count("\n") == 1
    for stream in ("/dev/null", "/dev/stdout"):
        done = subprocess.run([*command, "--svg", stream], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "") and ("<svg" in done.stdout) == (stream == "/dev/stdout")


@pytest.mark.parametrize("arguments", [["nowhere", "--svg", "x.svg"], [], ["--no-such-option"]])
def test_bad_arguments_are_one_line(tmp_path: Path, arguments: list[str]) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "draw_curve.py"), *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.startswith("draw_curve.py: ") and done.stderr.count("\n") == 1
