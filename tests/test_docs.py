"""README.md and labbook.md are true: commands, options, files, field tables, and the output that is shown.

A fenced block that follows the line ``<!-- run -->`` is run: each ``$ `` line is a command, the lines after it are
what it prints (standard output and error together), and a line ``...`` stands for any lines. ``<!-- run: exit 1 -->``
names another exit status than 0. The commands run in a folder of their own that holds links to the repository.

After a program's words have changed, this writes what it prints now into the blocks, to be read before it is committed:

  python3 tests/test_docs.py --update
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
LABBOOK = ROOT / "labbook.md"
PROGRAMS = ("load_test.py", "summarise_load.py", "serving_arithmetic.py")
SCRIPTS = tuple(
    sorted(f"scripts/{path.name}" for path in (ROOT / "scripts").iterdir() if path.suffix in (".py", ".sh"))
)
NOT_RUN_ALONE = ("scripts/lib.sh",)

# Flags of other people's programs that the text names: llama-server, vLLM, mlx_lm.server, ssh, pytest.
FOREIGN_OPTIONS = {
    "--cache-ram",
    "--cache-type-k",
    "--cache-type-v",
    "--ctx-size",
    "--enable-prompt-tokens-details",
    "--gpu-memory-utilization",
    "--ignore-eos",
    "--kv-cache-dtype",
    "--kv-cache-memory-bytes",
    "--kv-unified",
    "--max-model-len",
    "--max-num-batched-tokens",
    "--max-num-seqs",
    "--parallel",
    "--save-result",
    "--threads-http",
    "--ubatch-size",
}

# Files that the commands make, so that they are not in the repository.
MADE_FILES = {
    "a.md",
    "anna.md",
    "bert.md",
    "b.md",
    "config.json",
    "curve.html",
    "curve.svg",
    "lab.env",
    "one.md",
    "prompts.txt",
    "requests.jsonl",
    "sim.md",
    "slots.md",
    "two.json",
    "two.md",
    "vllm-result.json",
}


# ---------------------------------------------------------------- reading Markdown


class Block(NamedTuple):
    """A fenced block: the line number of its opening fence, its language, its lines, and the exit status that its
    commands end with, or None where it is not to be run."""

    line: int
    language: str
    lines: tuple[str, ...]
    status: int | None


class Command(NamedTuple):
    """A command of a block and the output that is shown for it."""

    text: str
    shown: tuple[str, ...]


RUN_MARK = re.compile(r"<!-- run(?:: exit (\d+))? -->\Z")


def blocks_of(path: Path) -> list[Block]:
    """Every fenced block of a Markdown file."""
    blocks: list[Block] = []
    inside: list[str] | None = None
    start, language, status = 0, "", None
    before = ""
    for number, line in enumerate(path.read_text("utf-8").split("\n"), 1):
        if inside is None and line.startswith("```"):
            mark = RUN_MARK.match(before)
            status = int(mark.group(1) or 0) if mark else None
            start, language, inside = number, line[3:].strip(), []
        elif line.rstrip() == "```" and inside is not None:
            blocks.append(Block(start, language, tuple(inside), status))
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
            text, shown = commands[-1]
            commands[-1] = (f"{text}\n{line}", shown)
        elif block.language == "console" and line.startswith("$ "):
            commands.append((line[2:], []))
        elif block.language == "sh":
            commands.append((line, []))
            line = line.partition(" # ")[0]
        else:
            assert commands, f"line {block.line}: output stands before the first command: {line!r}"
            commands[-1][1].append(line)
            continue
        going_on = line.endswith("\\")
    return [Command(text, tuple(shown)) for text, shown in commands if text and not text.startswith("#")]


def prose_of(path: Path) -> str:
    """The text outside of fenced blocks."""
    kept, inside = [], False
    for line in path.read_text("utf-8").split("\n"):
        if line.startswith("```"):
            inside = not inside
        elif not inside:
            kept.append(line)
    return "\n".join(kept)


def table_under(heading: str) -> list[list[str]]:
    """The cells of the first table under a heading of the README, without its two head lines."""
    lines = README.read_text("utf-8").split("\n")
    at = next((n for n, line in enumerate(lines) if re.fullmatch(r"#+ " + re.escape(heading), line)), None)
    assert at is not None, f"README has no heading {heading!r}"
    rows: list[list[str]] = []
    for line in lines[at + 1 :]:
        if line.startswith("|"):
            cells = re.split(r"(?<!\\)\|", line.strip().strip("|"))
            rows.append([cell.replace("\\|", "|").strip() for cell in cells])
        elif rows or line.startswith("#"):
            break
    assert len(rows) > 2, f"README has no table under {heading!r}"
    return rows[2:]


def code_spans(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", text)


def simple_commands(text: str) -> Iterator[list[str]]:
    """The words of each simple command in a shell command line."""
    lexer = shlex.shlex(text.replace("\\\n", " "), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lexer.commenters = "#"
    words: list[str] = []
    for word in lexer:
        if set(word) <= set("|&;()"):
            yield words
            words = []
        else:
            words.append(word)
    yield words


class Invocation(NamedTuple):
    """A program of this repository as a command line calls it."""

    name: str
    settings: tuple[str, ...]
    options: tuple[str, ...]


def invocations(path: Path) -> list[Invocation]:
    """Every call of a program or script of this repository in the blocks of a file."""
    found = []
    for block in blocks_of(path):
        for command in commands_of(block):
            for words in simple_commands(command.text):
                named = [n for n, word in enumerate(words) if word in PROGRAMS or re.match(r"(scripts|tests)/\S", word)]
                if not named or any(word in ("jq", "cat", "grep", "ls") for word in words[: named[0]]):
                    continue
                at = named[0]
                rest = words[at + 1 :]
                rest = rest[: rest.index("--")] if "--" in rest else rest
                settings = tuple(word.partition("=")[0] for word in words[:at] if re.match(r"[A-Z_]+=", word))
                options = tuple(word.partition("=")[0] for word in rest if word.startswith("--"))
                found.append(Invocation(words[at], settings, options))
    return found


OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*(?![\w])")


def help_of(name: str, cache: dict[str, str] = {}) -> str:  # noqa: B006 - one run per program is enough
    """What a program or script prints for --help."""
    if name not in cache:
        program = [sys.executable] if name.endswith(".py") else ["bash"]
        done = subprocess.run(
            [*program, str(ROOT / name), "--help"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            env={**os.environ, "COLUMNS": "120", "PYTHONIOENCODING": "utf-8"},
            timeout=60,
        )
        assert done.returncode == 0, f"{name} --help ends with {done.returncode}: {done.stderr}"
        assert len(done.stdout.splitlines()) >= 3, f"{name} --help says next to nothing"
        cache[name] = done.stdout
    return cache[name]


def load_program(name: str) -> ModuleType:
    """One of the three programs as a module."""
    spec = importlib.util.spec_from_file_location(f"docs_{Path(name).stem}", ROOT / name)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


# ---------------------------------------------------------------- commands, options and files


def test_every_option_of_a_command_is_in_that_programs_help() -> None:
    wrong = []
    for path in (README, LABBOOK):
        for call in invocations(path):
            known = {*OPTION.findall(help_of(call.name)), "--help"}
            wrong += [f"{path.name}: {call.name} has no {option}" for option in call.options if option not in known]
            wrong += [
                f"{path.name}: {call.name} --help does not name the setting {setting}"
                for setting in call.settings
                if not re.search(rf"\b{setting}\b", help_of(call.name))
            ]
    assert not wrong


@pytest.mark.parametrize("name", [*PROGRAMS, "scripts/simulated_engine.py", "scripts/draw_curve.py"])
def test_every_option_of_a_program_is_in_the_readme(name: str) -> None:
    text = README.read_text("utf-8")
    undocumented = set(OPTION.findall(help_of(name))) - FOREIGN_OPTIONS - set(OPTION.findall(text)) - {"--help"}
    assert not undocumented


@pytest.mark.parametrize("path", [README, LABBOOK], ids=lambda path: path.name)
def test_every_option_named_anywhere_exists(path: Path) -> None:
    known = {*FOREIGN_OPTIONS, "--help", "--update", *OPTION.findall(help_of("tests/engines/run.sh"))}
    for name in (*PROGRAMS, *(script for script in SCRIPTS if script not in NOT_RUN_ALONE)):
        known |= set(OPTION.findall(help_of(name)))
    named = set()
    for span in code_spans(prose_of(path)):
        named |= set(OPTION.findall(span))
    assert sorted(named - known) == []


@pytest.mark.parametrize("name", [*PROGRAMS, *(script for script in SCRIPTS if script not in NOT_RUN_ALONE)])
def test_every_program_answers_help_and_stands_in_the_readme(name: str) -> None:
    assert help_of(name)
    assert name in README.read_text("utf-8")


@pytest.mark.parametrize("path", [README, LABBOOK], ids=lambda path: path.name)
def test_every_file_named_exists(path: Path) -> None:
    text = path.read_text("utf-8")
    named = set(re.findall(r"(?<![\w./~-])(?:scripts|tests|\.ci)/[\w./-]*\w", text))
    for span in code_spans(prose_of(path)):
        if re.fullmatch(r"[\w.-]+\.(py|sh|md|toml|jsonl|json|svg|html|env)", span):
            named.add(span)
    missing = sorted(n for n in named - MADE_FILES if not (ROOT / n).exists() and not (ROOT / "scripts" / n).exists())
    assert not missing


def test_links_lead_somewhere() -> None:
    text = README.read_text("utf-8")
    headings = re.findall(r"^#+ (.*)$", prose_of(README), re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("#"):
            assert target[1:] in anchors, f"no heading for {target}"
        elif "://" not in target:
            assert (ROOT / target).exists(), f"no file {target}"


def test_the_option_table_has_the_defaults_of_the_program() -> None:
    parser = load_program("load_test.py").build_parser()
    actions = {name: action for action in parser._actions for name in action.option_strings if name.startswith("--")}
    del actions["--help"], actions["--version"]
    table = {row[0].strip("`").split()[0]: row[1] for row in table_under("Options of load_test.py")}
    assert set(table) == set(actions)
    for name, shown in table.items():
        default = actions[name].default
        if shown.startswith("`"):
            wanted = shown.strip("`")
            same = str(default) == wanted or (not isinstance(default, str) and default == float_or_none(wanted))
            assert same or (name == "--prompt-set" and default is None and wanted == "mixed"), f"{name}: {default!r}"
        else:
            assert default in (None, False, []) or default == {}, f"{name} has the default {default!r}"


def float_or_none(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def test_nothing_names_a_machines_own_paths() -> None:
    for path in (README, LABBOOK):
        found = re.findall(r"(?<![\w.])/(?:home|root|Users|work|opt|mnt)/[^\s`]*", path.read_text("utf-8"))
        assert not found, f"{path.name}: {found}"


# ---------------------------------------------------------------- field tables

STATISTICS = {"p50", "p90", "p95", "p99", "mean", "min", "max"}
OPEN_OBJECTS = {"errors", "extra_body", "finish_reasons", "timings", "token_counts", "ttft_split_s", "tpot_fit_ms"}


def field_names(record: Mapping[str, Any]) -> set[str]:
    """The fields of a record as the README's tables name them: `client.cpu_fraction`, but `ttft_s` as a whole."""
    names = set()
    for key, value in record.items():
        whole = not isinstance(value, dict) or key in OPEN_OBJECTS or set(value) <= STATISTICS
        names |= {key} if whole else {f"{key}.{inner}" for inner in value}
    return names


def table_fields(heading: str) -> set[str]:
    names = [span for row in table_under(heading) for span in code_spans(row[0])]
    assert len(names) == len(set(names)), f"a field stands twice under {heading!r}"
    return set(names)


class Measured(NamedTuple):
    """Real records: level, recovery and curve-summary lines, and raw records."""

    levels: list[dict[str, Any]]
    recoveries: list[dict[str, Any]]
    summaries: list[dict[str, Any]]
    raw: list[dict[str, Any]]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """One short run against the simulated engine, watched, with everything recorded that can be."""
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
        run(
            folder,
            *("load_test.py", "--base-url", base_url, "--concurrency", "1,2", "--requests", "4", "--max-tokens", "8"),
            *("--sample", "0.02", "--recovery-check", "--raw", "raw.jsonl", "--label", "docs"),
        )
        run(folder, "summarise_load.py", "--label", "docs", "--record")
    finally:
        engine.terminate()
        engine.communicate(timeout=20)
    lines = [json.loads(line) for line in (folder / "labbook.md").read_text("utf-8").splitlines()]
    return Measured(
        [line for line in lines if "record" not in line],
        [line for line in lines if line.get("record") == "recovery"],
        [line for line in lines if line.get("record") == "curve-summary"],
        [json.loads(line) for line in (folder / "raw.jsonl").read_text("utf-8").splitlines()],
    )


def run(folder: Path, name: str, *args: str) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / name), *args],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_table_of_the_level_record_names_its_fields(measured: Measured) -> None:
    record = measured.levels[0]
    assert record["server"] is not None and record["ttft_split_s"] is not None
    assert set(record["ttft_s"]) == STATISTICS == set(code_spans(statistics_sentence())) - {"null"}
    assert table_fields("The level record") == field_names(record)


def statistics_sentence() -> str:
    """The README's sentence that says what a field of the kind `statistics` holds."""
    found = re.search(r"\*statistics\*\s+is\s+an\s+object\s+of\s+([^.]*)\.", prose_of(README))
    assert found is not None
    return found.group(1)


def test_the_table_of_the_raw_record_names_its_fields(measured: Measured) -> None:
    assert measured.raw[0]["timings"]
    assert table_fields("The raw record") == field_names(measured.raw[0])


def test_the_table_of_the_other_lines_names_their_fields(measured: Measured) -> None:
    table = {row[0].strip("`"): set(code_spans(row[1])) for row in table_under("The other lines")}
    assert table == {
        "curve-summary": field_names(measured.summaries[0]),
        "recovery": field_names(measured.recoveries[0]),
    }


# ---------------------------------------------------------------- the output that is shown


def runnable() -> list[Block]:
    return [block for path in (README, LABBOOK) for block in blocks_of(path) if block.status is not None]


def workplace(folder: Path) -> dict[str, str]:
    """Fill a folder with links to the repository; returns the environment in which a reader's commands run there."""
    for entry in ROOT.iterdir():
        if not entry.name.startswith(".") and entry != LABBOOK:
            (folder / entry.name).symlink_to(entry)
    shutil.copy(LABBOOK, folder)  # commands may append to it
    shims = folder / ".bin"
    shims.mkdir()
    python = shims / "python3"
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("LOADTEST_", "GIT_"))}
    path = f"{shims}{os.pathsep}{environment.get('PATH', os.defpath)}"
    return {**environment, "PATH": path, "PYTHONIOENCODING": "utf-8", "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "120"}


def printed_by(command: str, folder: Path, environment: Mapping[str, str]) -> tuple[list[str], int]:
    """The lines that a command prints, and its exit status."""
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        timeout=120,
    )
    return [line.rstrip() for line in done.stdout.rstrip("\n").split("\n")] if done.stdout else [], done.returncode


def agrees(shown: Sequence[str], printed: Sequence[str]) -> bool:
    """Whether the lines shown are those printed; ``...`` stands for any lines.

    >>> agrees(["a", "...", "d"], ["a", "b", "c", "d"]), agrees(["a", "..."], ["b"]), agrees(["a"], ["a", "b"])
    (True, False, False)
    """
    pattern = "".join(r"(?:.*\n)*" if line == "..." else re.escape(line.rstrip()) + r"\n" for line in shown)
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in printed)) is not None


@pytest.mark.parametrize("block", runnable(), ids=lambda block: f"line{block.line}")
def test_commands_print_what_is_shown(block: Block, tmp_path: Path) -> None:
    commands = commands_of(block)
    assert commands, "a block that is to be run holds no command"
    environment = workplace(tmp_path)
    for command in commands:
        printed, status = printed_by(command.text, tmp_path, environment)
        assert status == block.status, f"{command.text}: exit status {status}: {printed}"
        if not agrees(command.shown, printed):
            assert list(command.shown) == printed, f"{command.text} prints something else (see --update above)"


def test_something_is_run() -> None:
    assert len(runnable()) >= 5


def test_the_notebook_as_shipped_lacks_everything_and_holds_no_record(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "summarise_load.py"), "--labbook", str(LABBOOK), "--check", "--json"],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        timeout=60,
    )
    assert done.returncode == 1 and not done.stderr
    failed = re.findall(r'"rule": "([\w-]+)",\s*"status": "FAIL"', done.stdout)
    assert set(failed) == {"sweep", "prefix-pair", "shared-cached", "unique-cached"}
    assert "damaged" not in failed


# ---------------------------------------------------------------- what an audit catches


def audited_fields(row: Sequence[str]) -> list[str]:
    return code_spans(row[0])


def leaves_of(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], float]]:
    """Each number under a field, with the keys that lead to it."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves_of(inner, (*path, key))
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield path, value


def alterations(record: Mapping[str, Any], name: str, factors: Sequence[float]) -> Iterator[dict[str, Any]]:
    """Copies of a record with one number under a field altered; a count moves by at least one, and not below 0."""
    for path, value in leaves_of(record[name], (name,)):
        for factor in factors:
            altered: dict[str, Any] = json.loads(json.dumps(record))
            inner: Any = altered
            for key in path[:-1]:
                inner = inner[key]
            changed: float = value * factor
            if isinstance(value, int):
                changed = max(value + 1, round(changed)) if factor > 1 else min(value - 1, round(changed))
                changed = value + 1 if changed < 0 else changed
            elif changed == value:
                changed = 0.5
            inner[path[-1]] = changed
            yield altered


def is_caught(program: ModuleType, folder: Path, records: Sequence[Mapping[str, Any]], *more: str) -> bool:
    """Whether the check of a notebook of these records fails in `consistent` or in `raw`."""
    notebook = folder / "altered.md"
    notebook.write_text("".join(json.dumps(record, sort_keys=True) + "\n" for record in records), "utf-8")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
        program.main(["--labbook", str(notebook), "--check", "--json", *more])
    found = json.loads(printed.getvalue())["findings"]
    return any(one["status"] == "FAIL" and one["rule"] in ("consistent", "raw") for one in found)


def test_the_table_of_alterations_is_true(measured: Measured, tmp_path: Path) -> None:
    """Its cells "always" and "never": on the walk's highest level by arithmetic, on a short run with its raw file."""
    program = load_program("summarise_load.py")
    walk = (ROOT / "tests" / "data" / "walk" / "sim.md").read_text("utf-8")
    lines = [json.loads(line) for line in walk.splitlines() if line.startswith("{")]
    level = next(line for line in lines if line["concurrency"] == 20)
    raw = tmp_path / "raw.jsonl"
    raw.write_text("".join(json.dumps(request) + "\n" for request in measured.raw), "utf-8")
    with_raw = ("--raw", str(raw))
    assert not is_caught(program, tmp_path, [level]) and not is_caught(program, tmp_path, measured.levels, *with_raw)
    wrong = []
    for row in table_under("What an audit catches"):
        for name in audited_fields(row):
            for column, factors in ((1, (1.01, 0.99)), (2, (2.0, 0.5))):
                if row[column] in ("always", "never"):
                    found = {is_caught(program, tmp_path, [one]) for one in alterations(level, name, factors)}
                    if found - {row[column] == "always"}:
                        wrong.append(f"{name}, column {column}: not {row[column]}")
            if row[3] in ("always", "never"):
                first, second = measured.levels
                found = {
                    is_caught(program, tmp_path, [first, one], *with_raw) for one in alterations(second, name, (1.01,))
                }
                if found - {row[3] == "always"}:
                    wrong.append(f"{name}, with --raw: not {row[3]}")
    assert not wrong


# ---------------------------------------------------------------- pictures

PICTURES = {
    "tests/data/walk/first.svg": ("walk/sim.md", "--label", "first"),
    "tests/data/walk/two.svg": ("walk/two.md", "--compare", "server-a", "server-b"),
    "tests/data/engines/vllm.svg": ("engines/labbook.md", "--label", "vllm-baseline"),
    "tests/data/engines/llama-mlx.svg": ("engines/labbook.md", "--compare", "llama-baseline", "mlx-baseline"),
}


def drawn(picture: str, folder: Path) -> bytes:
    """A picture of the gallery as the programs draw it now."""
    notebook, *what = PICTURES[picture]
    data = subprocess.run(
        [sys.executable, str(ROOT / "summarise_load.py"), "--labbook", f"tests/data/{notebook}", *what, "--json"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        timeout=60,
    ).stdout
    target = folder / "drawn.svg"
    draw = [sys.executable, str(ROOT / "scripts" / "draw_curve.py"), "--svg", str(target)]
    subprocess.run(draw, input=data, check=True, stdout=subprocess.DEVNULL, timeout=60)
    return target.read_bytes()


@pytest.mark.parametrize("picture", PICTURES)
def test_the_gallery_shows_what_is_drawn_now(picture: str, tmp_path: Path) -> None:
    assert picture in README.read_text("utf-8")
    assert (ROOT / picture).read_bytes() == drawn(picture, tmp_path), "draw it again: tests/test_docs.py --update"


# ---------------------------------------------------------------- --update


def update() -> None:
    """Write what the commands print now into the blocks of both files. A block with ``...`` is only reported."""
    for path in (README, LABBOOK):
        lines = path.read_text("utf-8").split("\n")
        for block in reversed([block for block in blocks_of(path) if block.status is not None]):
            with tempfile.TemporaryDirectory() as name:
                folder, fresh, same = Path(name), [], True
                environment = workplace(folder)
                for command in commands_of(block):
                    printed, _ = printed_by(command.text, folder, environment)
                    same = same and agrees(command.shown, printed)
                    fresh += [*f"$ {command.text}".split("\n"), *printed]
            if same:
                continue
            print(
                f"{path.name}, line {block.line}: {'differs: edit it by hand' if '...' in block.lines else 'updated'}"
            )
            if "..." not in block.lines:
                lines[block.line : block.line + len(block.lines)] = fresh
        path.write_text("\n".join(lines), "utf-8")
    with tempfile.TemporaryDirectory() as name:
        for picture in PICTURES:
            (ROOT / picture).write_bytes(drawn(picture, Path(name)))


if __name__ == "__main__":
    if sys.argv[1:] == ["--update"]:
        update()
    else:
        print(__doc__)
        sys.exit(0 if sys.argv[1:] == ["--help"] else 2)
