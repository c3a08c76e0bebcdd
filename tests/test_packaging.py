"""What a student downloads, what `pip install .` gives, and what lies at the top of the repository."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from conftest import RunProgram

PROGRAMS = ("load_test.py", "summarise_load.py", "serving_arithmetic.py")
COMMANDS = ("load-test", "summarise-load", "serving-arithmetic")
TOP_LEVEL = {*PROGRAMS, "scripts", "tests", "labbook.md", "README.md", "pyproject.toml", "LICENSE"}


@pytest.fixture(scope="module")
def tool_version(root: Path) -> str:
    match = re.search(r'^TOOL_VERSION(?:: \w+)? = "([^"]+)"$', (root / "load_test.py").read_text("utf-8"), re.MULTILINE)
    assert match, "load_test.py defines TOOL_VERSION as a plain string"
    return match.group(1)


@pytest.fixture(scope="module")
def wheel(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy: a build leaves files beside its sources."""
    pytest.importorskip("setuptools", minversion="77")
    source = tmp_path_factory.mktemp("source")
    for name in (*PROGRAMS, "pyproject.toml", "README.md", "LICENSE", "labbook.md"):
        shutil.copy(root / name, source)
    for folder in ("scripts", "tests"):
        shutil.copytree(root / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    out = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(out), str(source))
    (built,) = out.iterdir()
    return built


def pip(*args: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet", *args]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_wheel_holds_the_three_programs_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == set(PROGRAMS)


def test_the_wheel_says_what_the_project_is(wheel: Path, tool_version: str) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(metadata).decode("utf-8").split("\n\n", 1)[0].splitlines()
    assert "Name: llm-load-lab" in lines
    assert f"Version: {tool_version}" in lines
    assert "Requires-Python: >=3.9" in lines
    assert "License-Expression: MIT" in lines
    assert not [line for line in lines if line.startswith("Requires-Dist")], "no third-party package at run time"


def test_the_console_commands_run(wheel: Path, tmp_path: Path, tool_version: str) -> None:
    pip("install", "--no-deps", "--no-index", "--target", str(tmp_path), str(wheel))
    for command in COMMANDS:
        done = subprocess.run(
            [str(tmp_path / "bin" / command), "--version"],
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        assert tool_version in done.stdout


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_program_states_the_same_version(program: str, run_program: RunProgram, tool_version: str) -> None:
    done = run_program(program, "--version")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [program, tool_version]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_copied_alone_into_an_empty_folder_answers_help(program: str, root: Path, tmp_path: Path) -> None:
    shutil.copy(root / program, tmp_path)
    done = subprocess.run(
        [sys.executable, "-I", program, "--help"],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.lower().startswith("usage:")
    assert sorted(path.name for path in tmp_path.iterdir()) == [program], "help leaves nothing behind"


def test_nothing_else_lies_at_the_top_of_the_repository(root: Path) -> None:
    listing = subprocess.run(
        ["git", "-C", str(root), "ls-files"], stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8"
    )
    if listing.returncode != 0:
        pytest.skip("not a git checkout")
    top = {line.split("/", 1)[0] for line in listing.stdout.splitlines()}
    assert {name for name in top - TOP_LEVEL if not name.startswith(".")} == set()


def test_pytest_takes_the_doctests_of_the_programs_and_not_load_test_as_a_test_file(
    pytestconfig: pytest.Config,
) -> None:
    assert pytestconfig.getini("python_files") == ["test_*.py"]
    assert set(PROGRAMS) <= set(pytestconfig.getini("testpaths"))
    assert pytestconfig.getoption("doctestmodules")
