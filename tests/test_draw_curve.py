"""scripts/draw_curve.py: the picture and the page, from hand-written curves and from summarise_load.py's own JSON."""

from __future__ import annotations

import json
import os
import re
import runpy
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


def level(c: int, tokens: float, ttft: float = 0.2, tpot: float = 0.02) -> dict[str, Any]:
    return {
        "c": c,
        "requests": 40,
        "completed": 40,
        "output_tokens_per_s": tokens,
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
    doc: dict[str, Any] = {
        "kind": "curve",
        "label": label,
        "settings": {"engine": "sim", "server_slots": 20, "host": None},
        "slo": {"ttft_s": 2.0, "tpot_s": 0.1},
        "levels": [
            level(c, tokens, 0.1 * c, (20 + 1.5 * c) / 1000)
            for c, tokens in ((1, 46.5), (5, 181.8), (10, 285.7), (20, 400.0))
        ],
        "fit": {"a_ms": 20.0, "b_ms": 1.5, "r2": 1.0, "levels": [1, 5, 10, 20], "ceiling_tokens_per_s": 666.7},
        "knee": {"between": [5, 10]},
        "operating_point": 20,
        "readings": [{"code": "x", "evidence": "a < b & more", "try": "fewer"}],
        "check": {"pass": 1, "warn": 0, "fail": 0, "findings": [{"status": "PASS", "rule": "r", "message": "m"}]},
    }
    return {**doc, **changes}


def draw(doc: Any, tmp_path: Path) -> tuple[ET.Element, str]:
    source = tmp_path / "curve.json"
    source.write_text(json.dumps(doc))
    command = [sys.executable, str(ROOT / "scripts" / "draw_curve.py"), str(source)]
    command += ["--svg", str(tmp_path / "out.svg"), "--html", str(tmp_path / "out.html")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return ET.parse(tmp_path / "out.svg").getroot(), (tmp_path / "out.html").read_text()


def words(picture: ET.Element) -> list[str]:
    return [element.text or "" for element in picture.iter(f"{SVG}text")]


def marks(picture: ET.Element, css: str) -> list[ET.Element]:
    return [e for e in picture.iter() if set(css.split()) <= set((e.get("class") or "").split())]


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


def test_points_stand_where_their_figures_say(tmp_path: Path) -> None:
    picture, _ = draw(curve(), tmp_path)
    dots = [e for e in marks(picture, "mark first") if "hollow" not in str(e.get("class")) and e.tag == f"{SVG}circle"]
    throughput = [(float(e.get("cx", "")), float(e.get("cy", ""))) for e in dots[:4]]
    (x1, y1), (x5, y5), _, (x20, y20) = throughput
    assert (x5 - x1) / (x20 - x1) == pytest.approx(4 / 19, abs=0.01)
    assert (y1 - y5) / (y1 - y20) == pytest.approx((181.8 - 46.5) / (400.0 - 46.5), abs=0.01)


def test_knee_operating_point_and_ceiling_are_marked(tmp_path: Path) -> None:
    picture, _ = draw(curve(), tmp_path)
    assert len(marks(picture, "band")) == 1
    ring = marks(picture, "ring")
    assert len(ring) == 1
    assert "ceiling 1/b = 666.7 tok/s (above this frame)" in words(picture)
    assert {"knee", "operating point"} <= set(words(picture))


def test_a_ceiling_inside_the_frame_is_a_line(tmp_path: Path) -> None:
    fit = {"a_ms": 20.0, "b_ms": 1.5, "ceiling_tokens_per_s": 390.0, "levels": [1, 5]}
    picture, _ = draw(curve(fit=fit), tmp_path)
    assert len(marks(picture, "limit")) == 1


def test_without_knee_fit_and_operating_point_nothing_is_invented(tmp_path: Path) -> None:
    picture, page = draw(curve(fit=None, knee={"between": None}, operating_point=None), tmp_path)
    assert not marks(picture, "band") and not marks(picture, "ring") and not marks(picture, "model")
    assert "operating point: none" in page and "knee: not reached" in page and "no ceiling implied" in page


def test_text_alternative_names_every_level(tmp_path: Path) -> None:
    picture, _ = draw(curve(), tmp_path)
    description = picture.findtext(f"{SVG}desc") or ""
    assert "181.8 tok/s at c=5" in description and "knee between c=5 and c=10" in description
    assert picture.get("role") == "img"
    assert {picture.find(f"{SVG}{tag}").get("id") for tag in ("title", "desc")} == set(  # type: ignore[union-attr]
        picture.get("aria-labelledby", "").split()
    )


def test_two_labels_differ_in_shape_and_colour(tmp_path: Path) -> None:
    doc = {"kind": "compare", "a": curve("one"), "b": curve("two"), "notes": ["engine differs: x and y"]}
    picture, page = draw(doc, tmp_path)
    assert {e.tag for e in marks(picture, "mark first")} == {f"{SVG}circle"}
    assert {e.tag for e in marks(picture, "mark second")} == {f"{SVG}rect"}
    assert "engine differs: x and y" in page


def test_everything_drawn_stays_inside_the_picture(tmp_path: Path) -> None:
    picture, _ = draw(curve(label="a-label-that-goes-on-for-very-much-longer-than-any-legend"), tmp_path)
    width, height = (float(picture.get(side, "")) for side in ("width", "height"))
    for element in picture.iter():
        for key, limit in (("x", width), ("cx", width), ("x2", width), ("y", height), ("cy", height), ("y2", height)):
            value = element.get(key)
            assert value is None or -0.5 <= float(value) <= limit + 0.5, (element.tag, element.attrib)


def test_repeats_draw_their_range(tmp_path: Path) -> None:
    doc = curve()
    doc["levels"][1]["ranges"] = {"output_tokens_per_s": [170.0, 190.0]}
    picture, _ = draw(doc, tmp_path)
    assert len(marks(picture, "range")) == 1


def test_page_is_well_formed_and_fetches_nothing(tmp_path: Path) -> None:
    _, page = draw(curve(), tmp_path)
    nesting = Nesting()
    nesting.feed(page)
    assert not nesting.open and "script" not in nesting.seen
    ET.fromstring(page.partition("\n")[2])
    assert not re.search(r"(?:src|href)=|url\(|@import", page)
    assert "a &lt; b &amp; more" in page
    assert "prefers-color-scheme: dark" in page and "@media print" in page


@pytest.mark.parametrize("doc", [[], {}, {"kind": "curve", "label": "x", "levels": []}, {"kind": "check"}, 3])
def test_other_json_is_refused_in_one_line(doc: Any, tmp_path: Path) -> None:
    source = tmp_path / "x.json"
    source.write_text(json.dumps(doc))
    command = [sys.executable, str(ROOT / "scripts" / "draw_curve.py"), str(source), "--svg", str(tmp_path / "x.svg")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and done.stderr.startswith("draw_curve.py: ")
    assert not (tmp_path / "x.svg").exists()


def test_version_and_an_interrupt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(ROOT / "scripts" / "draw_curve.py"))["main"]
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0 and re.fullmatch(r"draw_curve.py \d+\.\d+\.\d+\n", capsys.readouterr().out)

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("json.loads", interrupt)
    assert main(["--svg", "x.svg", str(ROOT / "README.md")]) == 130 and capsys.readouterr() == ("", "")


@pytest.mark.parametrize("redirect", ["2>&-", "2>/dev/full"])
def test_bad_input_ends_with_2_where_nothing_can_be_said(tmp_path: Path, redirect: str) -> None:
    if "full" in redirect and not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    command = f"exec '{sys.executable}' '{ROOT / 'scripts' / 'draw_curve.py'}' nowhere --svg x.svg {redirect}"
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, b"")


def test_a_pipe_and_a_folder_are_refused_and_no_reader_is_waited_for(tmp_path: Path) -> None:
    source = tmp_path / "curve.json"
    source.write_text(json.dumps(curve()))
    os.mkfifo(tmp_path / "pipe")
    command = [sys.executable, str(ROOT / "scripts" / "draw_curve.py"), str(source)]
    for option, target in (("--svg", tmp_path / "pipe"), ("--html", tmp_path / "pipe"), ("--svg", tmp_path)):
        done = subprocess.run([*command, option, str(target)], capture_output=True, text=True, timeout=60)
        assert done.returncode == 2 and "not a file" in done.stderr and done.stderr.count("\n") == 1
    for stream in ("/dev/null", "/dev/stdout"):
        done = subprocess.run([*command, "--svg", stream], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "") and ("<svg" in done.stdout) == (stream == "/dev/stdout")


def test_a_full_disk_loses_no_picture(tmp_path: Path) -> None:
    """A limit on the size of files stands for the full disk. What a picture had, its link and its mode, it keeps."""
    source, old, new, link = (tmp_path / name for name in ("curve.json", "old.svg", "new.svg", "link.svg"))
    source.write_text(json.dumps(curve()))
    old.write_text("the old picture")
    old.chmod(0o640)
    link.symlink_to(old)
    draw = f"trap '' XFSZ; '{sys.executable}' '{ROOT / 'scripts' / 'draw_curve.py'}' curve.json --svg"
    for target in ("old.svg", "new.svg"):
        done = subprocess.run(
            ["sh", "-c", f"ulimit -f 1; {draw} {target}"], cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 2 and "cannot be written" in done.stderr, done
    assert old.read_text() == "the old picture" and not new.exists()
    assert subprocess.run(["sh", "-c", f"{draw} link.svg"], cwd=tmp_path, timeout=60).returncode == 0
    assert "<svg" in old.read_text() and link.is_symlink() and old.stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in tmp_path.iterdir()) == ["curve.json", "link.svg", "old.svg"]
