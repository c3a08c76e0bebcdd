"""README.md and labbook.md are true: commands, options, files, links, field tables, and the output that is shown.

A fenced block that follows the line ``<!-- run -->`` is run: each ``$ `` line is a command, the lines after it are
what it prints (standard output and error together). The commands run in a folder of their own that holds links to the
repository and copies of the kept notebooks. When a program's words have changed, this prints them into the blocks and
draws the pictures again; read the difference before you commit it:

  python3 tests/test_docs.py --update
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
LABBOOK = ROOT / "labbook.md"
TEXTS = (README, LABBOOK)
PROGRAMS = ("load_test.py", "summarise_load.py", "serving_arithmetic.py")
# A script without a first line that names its interpreter is sourced by others, and no command of its own.
SCRIPTS = tuple(
    sorted(f"scripts/{path.name}" for path in (ROOT / "scripts").glob("*.*") if path.read_bytes()[:2] == b"#!")
)
KEPT_NOTEBOOKS = tuple((ROOT / "tests" / "data" / "walk").glob("*.md"))  # the texts call them sim.md and two.md

# Options of other people's programs that the texts name: llama-server's and vLLM's.
FOREIGN_OPTIONS = {"--ctx-size", "--enable-prompt-tokens-details", "--list-devices", "--parallel"}

# Files that the commands make, so that they are not in the repository.
MADE_FILES = {"lab.env", "sim.md", "slots.md", "two.md", "llama-server.log", "anna.md"}


# ---------------------------------------------------------------- reading Markdown


class Block(NamedTuple):
    """A fenced block: the line number of its opening fence, its language, its lines, and whether it is to be run."""

    line: int
    language: str
    lines: tuple[str, ...]
    run: bool


class Command(NamedTuple):
    """A command of a block and the output that is shown for it."""

    text: str
    shown: tuple[str, ...]


def blocks_of(path: Path) -> list[Block]:
    """Every fenced block of a Markdown file."""
    blocks: list[Block] = []
    inside: list[str] | None = None
    start, language, run, before = 0, "", False, ""
    for number, line in enumerate(path.read_text("utf-8").split("\n"), 1):
        if inside is None and line.startswith("```"):
            start, language, run, inside = number, line[3:].strip(), before == "<!-- run -->", []
        elif inside is not None and line == "```":
            blocks.append(Block(start, language, tuple(inside), run))
            inside = None
        elif inside is not None:
            inside.append(line)
        before = line.strip() or before
    assert inside is None, f"{path.name}: the block that starts at line {start} does not end"
    return blocks


def commands_of(block: Block) -> list[Command]:
    """The commands of a block: its ``$ `` lines in a console block, all lines in a shell block."""
    if block.language not in ("console", "sh"):
        return []
    commands: list[tuple[str, list[str]]] = []
    going_on = False
    for line in block.lines:
        if going_on:
            commands[-1] = (f"{commands[-1][0]}\n{line}", commands[-1][1])
        elif block.language == "sh" or line.startswith("$ "):
            commands.append((line.removeprefix("$ "), []))
        else:
            commands[-1][1].append(line)
            continue
        going_on = line.endswith("\\")
    return [Command(text, tuple(shown)) for text, shown in commands]


def prose_of(path: Path) -> str:
    """The text outside of fenced blocks."""
    return re.sub(r"(?ms)^```.*?^```$", "", path.read_text("utf-8"))


def code_spans(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", text)


def table_under(heading: str) -> list[list[str]]:
    """The cells of the first table under a heading of the README, without its two head lines."""
    after = README.read_text("utf-8").partition(f"# {heading}\n")[2]
    table = re.search(r"(?m)(?:^\|.*\n)+", after)
    assert table is not None, f"README has no table under {heading!r}"
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in table.group().splitlines()[2:]]


# ---------------------------------------------------------------- commands, options and files

OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*(?![\w])")
PROGRAM = re.compile(r"(?:load_test|summarise_load|serving_arithmetic)\.py|(?:scripts|tests)/[\w./-]+\.(?:py|sh)")


class Call(NamedTuple):
    """A program of this repository as a command line calls it: its name, the settings before it, its options."""

    name: str
    settings: tuple[str, ...]
    options: tuple[str, ...]


def calls(path: Path) -> Iterator[Call]:
    """Every call of a program or script of this repository in the blocks of a file."""
    for block in blocks_of(path):
        for command in commands_of(block):
            for part in re.split(r"[|;&]+", command.text.partition(" # ")[0].replace("\\\n", " ")):
                words = shlex.split(part)
                for at, word in enumerate(words):
                    if PROGRAM.fullmatch(word):
                        own = words[at : words.index("--")] if "--" in words else words[at:]
                        yield Call(
                            word,
                            tuple(before.partition("=")[0] for before in words[:at] if re.match(r"[A-Z_]+=", before)),
                            tuple(w.partition("=")[0] for w in own if w.startswith("--")),
                        )
                        break


def help_of(name: str, cache: dict[str, str] = {}) -> str:  # noqa: B006 - one run per program is enough
    """What a program or script prints for --help."""
    if name not in cache:
        done = subprocess.run(
            [sys.executable if name.endswith(".py") else "bash", str(ROOT / name), "--help"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            env={**os.environ, "COLUMNS": "120", "PYTHONIOENCODING": "utf-8"},
        )
        assert done.returncode == 0, f"{name} --help ends with {done.returncode}: {done.stderr}"
        cache[name] = done.stdout
    return cache[name]


def load_program(name: str) -> ModuleType:
    """One of the programs as a module."""
    spec = importlib.util.spec_from_file_location(f"docs_{Path(name).stem}", ROOT / name)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_every_option_of_a_command_is_in_that_programs_help(path: Path) -> None:
    found = list(calls(path))
    assert len(found) > 10
    wrong = []
    for call in found:
        text = help_of(call.name)
        known = {*OPTION.findall(text), "--help", *(["--update"] if call.name == "tests/test_docs.py" else [])}
        wrong += [f"{call.name} has no {option}" for option in call.options if option not in known]
        wrong += [f"{call.name} does not name {name}" for name in call.settings if not re.search(rf"\b{name}\b", text)]
    assert not wrong


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_every_option_named_in_the_prose_exists(path: Path) -> None:
    known = {*FOREIGN_OPTIONS, "--help"}.union(*(OPTION.findall(help_of(name)) for name in (*PROGRAMS, *SCRIPTS)))
    named = {option for span in code_spans(prose_of(path)) for option in OPTION.findall(span)}
    assert sorted(named - known) == []


@pytest.mark.parametrize("name", [*PROGRAMS, *SCRIPTS])
def test_every_program_explains_itself_and_is_named(name: str) -> None:
    assert len(help_of(name).splitlines()) >= 3
    assert any(name in path.read_text("utf-8") for path in TEXTS)


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_option_has_a_help_text(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The README lists no options: --help is where they are explained."""
    added: list[argparse.Action] = []
    container = argparse._ActionsContainer  # parsers and groups alike
    original = container._add_action

    def note(self: Any, action: argparse.Action) -> argparse.Action:
        added.append(action)
        return original(self, action)

    monkeypatch.setattr(container, "_add_action", note)
    with contextlib.suppress(SystemExit):
        load_program(name).main(["--help"])
    assert len(added) > 10
    assert not [action.option_strings for action in added if not action.help]


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_every_file_named_exists(path: Path) -> None:
    text = path.read_text("utf-8")
    named = set(re.findall(r"(?<![\w./~-])(?:scripts|tests|\.ci)/[\w./-]*\w", text))
    named |= {span for span in code_spans(prose_of(path)) if re.fullmatch(r"[\w.-]+\.(py|sh|md|toml|env|log)", span)}
    missing = sorted(n for n in named - MADE_FILES if not (ROOT / n).exists() and not (ROOT / "scripts" / n).exists())
    assert not missing


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    headings = re.findall(r"^#+ (.*)$", prose_of(path), re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text("utf-8")):
        if target.startswith("#"):
            assert target[1:] in anchors, f"no heading for {target}"
        elif "://" not in target:
            assert (ROOT / target).exists(), f"no file {target}"


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_nothing_names_a_machines_own_paths(path: Path) -> None:
    assert not re.findall(r"(?<![\w.])/(?:home|root|Users|work|opt|mnt)/[^\s`]*", path.read_text("utf-8"))


# ---------------------------------------------------------------- field tables

STATISTICS = {"p50", "p90", "p95", "p99", "mean", "min", "max"}
NESTED = ("client", "server", "gpu")  # objects whose fields stand in the table one by one


def field_names(record: Mapping[str, Any]) -> set[str]:
    """The fields of a record as the README's tables name them: `client.cpu_fraction`, but `ttft_s` as a whole."""
    names = set()
    for key, value in record.items():
        opened = key in NESTED and value is not None
        names |= {f"{key}.{inner}" for inner in value} if opened else {key}
    return names


def table_fields(heading: str) -> list[str]:
    """Every field that a table names, as often as it names it."""
    return sorted(span for row in table_under(heading) for span in code_spans(row[0]))


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """One line of each kind, from a short run against the simulated engine with everything recorded that can be."""
    folder = tmp_path_factory.mktemp("fields")
    engine = subprocess.Popen(
        [sys.executable, str(ROOT / "scripts" / "simulated_engine.py"), "--a-ms", "2", "--b-ms", "0.1"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        encoding="utf-8",
    )
    try:
        assert engine.stdout is not None
        base_url = engine.stdout.readline().split()[-1]  # "listening on http://127.0.0.1:PORT/v1"
        load = f"load_test.py --base-url {base_url} --label docs --concurrency 1,2 --requests 4 --max-tokens 8"
        for command in (
            f"{load} --sample 0.02 --recovery-check --raw raw.jsonl",
            "summarise_load.py --label docs --record",
        ):
            name, *args = command.split()
            done = subprocess.run(
                [sys.executable, str(ROOT / name), *args],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                encoding="utf-8",
            )
            assert done.returncode == 0, done.stdout + done.stderr
    finally:
        engine.terminate()
        engine.communicate()
    lines = [json.loads(line) for line in (folder / "labbook.md").read_text("utf-8").splitlines()]
    raw = json.loads((folder / "raw.jsonl").read_text("utf-8").splitlines()[0])
    return {"raw": raw, **{line.get("record", "level"): line for line in lines}}


def test_the_table_of_the_level_record_names_its_fields(measured: Mapping[str, Mapping[str, Any]]) -> None:
    assert measured["level"]["server"] is not None
    assert set(measured["level"]["ttft_s"]) == STATISTICS
    told = re.search(r"\*statistics\*\s+is\s+an\s+object\s+of\s+([^.]*)\.", prose_of(README))
    assert told is not None and set(code_spans(told.group(1))) - {"null"} == STATISTICS
    assert table_fields("The level record") == sorted(field_names(measured["level"]))


def test_the_table_of_the_raw_record_names_its_fields(measured: Mapping[str, Mapping[str, Any]]) -> None:
    assert table_fields("The raw record") == sorted(field_names(measured["raw"]))


def test_the_table_of_the_other_lines_names_their_own_fields(measured: Mapping[str, Mapping[str, Any]]) -> None:
    shared = field_names(measured["level"]) | {"record"}
    table = {row[0].strip("`"): set(code_spans(row[1])) for row in table_under("The other lines")}
    assert table == {kind: field_names(measured[kind]) - shared for kind in ("curve-summary", "recovery")}


# ---------------------------------------------------------------- the output that is shown


def runnable() -> list[tuple[Path, Block]]:
    return [(path, block) for path in TEXTS for block in blocks_of(path) if block.run]


def printed_by(commands: list[Command]) -> list[list[str]]:
    """The lines that each command of a block prints, in a folder as the reader has it by then."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for entry in ROOT.iterdir():
            if not entry.name.startswith(".") and entry != LABBOOK:
                (folder / entry.name).symlink_to(entry)
        for notebook in (LABBOOK, *KEPT_NOTEBOOKS):
            shutil.copy(notebook, folder)
        (folder / ".bin").mkdir()
        (folder / ".bin" / "python3").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
        (folder / ".bin" / "python3").chmod(0o755)
        environment = {key: value for key, value in os.environ.items() if not key.startswith("LOADTEST_")}
        environment.update(PATH=f"{folder}/.bin:{environment['PATH']}", PYTHONIOENCODING="utf-8", COLUMNS="120")
        printed = []
        for command in commands:
            done = subprocess.run(
                ["bash", "-c", command.text],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                encoding="utf-8",
            )
            assert done.returncode == 0, f"{command.text}: exit status {done.returncode}: {done.stdout}"
            printed.append([line.rstrip() for line in done.stdout.rstrip("\n").split("\n")])
        return printed


@pytest.mark.parametrize("block", [pytest.param(b, id=f"{p.name}-line{b.line}") for p, b in runnable()])
def test_commands_print_what_is_shown(block: Block) -> None:
    commands = commands_of(block)
    assert commands, "a block that is to be run holds no command"
    for command, printed in zip(commands, printed_by(commands)):
        assert list(command.shown) == printed, f"{command.text} prints something else (see --update above)"


def test_something_is_run() -> None:
    assert len(runnable()) >= 3


def test_the_notebook_as_shipped_lacks_everything_and_holds_no_record(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "summarise_load.py"), "--labbook", str(LABBOOK), "--check"],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
    )
    assert done.returncode == 1 and not done.stderr
    failed = re.findall(r"(?m)^FAIL +([\w-]+)", done.stdout)
    assert set(failed) == {"sweep", "prefix-pair", "shared-cached", "unique-cached"}


# ---------------------------------------------------------------- pictures

PICTURES = {
    "tests/data/walk/first.svg": ("walk/sim.md", "--label", "first"),
    "tests/data/engines/llama-mlx.svg": ("engines/labbook.md", "--compare", "llama-baseline", "mlx-baseline"),
}


def drawn(picture: str) -> bytes:
    """A picture as the programs draw it now."""
    notebook, *what = PICTURES[picture]
    data = subprocess.run(
        [sys.executable, str(ROOT / "summarise_load.py"), "--labbook", f"tests/data/{notebook}", *what, "--json"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "drawn.svg"
        draw = [sys.executable, str(ROOT / "scripts" / "draw_curve.py"), "--svg", str(target)]
        subprocess.run(draw, input=data, check=True, stdout=subprocess.DEVNULL)
        return target.read_bytes()


@pytest.mark.parametrize("picture", PICTURES)
def test_the_pictures_are_what_is_drawn_now(picture: str) -> None:
    assert any(picture in path.read_text("utf-8") for path in TEXTS)
    assert (ROOT / picture).read_bytes() == drawn(picture), "draw it again: tests/test_docs.py --update"


# ---------------------------------------------------------------- --update


def update() -> None:
    """Print into both files what their commands print now, and draw the pictures again."""
    for path in TEXTS:
        lines = path.read_text("utf-8").split("\n")
        for block in reversed([block for block in blocks_of(path) if block.run]):
            commands = commands_of(block)
            fresh: list[str] = []
            for command, printed in zip(commands, printed_by(commands)):
                fresh += [*f"$ {command.text}".split("\n"), *printed]
            lines[block.line : block.line + len(block.lines)] = fresh
        path.write_text("\n".join(lines), "utf-8")
    for picture in PICTURES:
        (ROOT / picture).write_bytes(drawn(picture))


if __name__ == "__main__":
    if sys.argv[1:] == ["--update"]:
        update()
    else:
        print(__doc__)
        sys.exit(0 if sys.argv[1:] == ["--help"] else 2)
