"""Fixtures that every test file may use: the programs, a free port, and a running simulated engine."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Callable

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

# No test may fail because the machine is busy.
settings.register_profile("lab", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("lab")

# Programs run by hand or by a launcher, not tests: importing them for doctests would need the engines' packages.
collect_ignore_glob = ["engines/*.py", "bench_*.py"]

os.environ.pop("PYTHONUNBUFFERED", None)  # a student's streams are buffered, and so fail in other places

ENGINE_PACKAGES = ("gguf", "numpy", "tokenizers", "xllamacpp")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Without the engines' packages the tests that need them are left out, unless REQUIRE_ENGINES=1 forbids it."""
    if item.get_closest_marker("engine") and os.environ.get("REQUIRE_ENGINES") != "1":
        missing = [name for name in ENGINE_PACKAGES if importlib.util.find_spec(name) is None]
        if missing:
            pytest.skip(f"needs the packages of the `engines` group, not installed here: {', '.join(missing)}")


RunProgram = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's root."""
    return ROOT


@pytest.fixture
def free_port() -> int:
    """A TCP port on 127.0.0.1 that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# Programs whose main() reads files and prints: a call does what a process would, in a fiftieth of the time.
CALLED = ("summarise_load.py", "serving_arithmetic.py")


def call_main(name: str, args: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """A program's main() in this process, in that folder, as if it had been started."""
    module = importlib.import_module(name.removesuffix(".py"))
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    before = os.getcwd()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = module.main(args)
            except SystemExit as leaving:  # argparse: --help, --version
                code = leaving.code if isinstance(leaving.code, int) else 0
            except Exception:
                traceback.print_exc()
                code = 1
    finally:
        os.chdir(before)
    texts = [stream.buffer.getvalue().decode("utf-8") for stream in (out, err)]
    return subprocess.CompletedProcess([name, *args], code, *texts)


@pytest.fixture
def no_second_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """--wait-ready: the next try would come after any limit, so the first one decides, however long it took."""
    monkeypatch.setattr("load_test.RETRY_S", 1000.0)


@pytest.fixture
def run_program(tmp_path: Path) -> RunProgram:
    """``run_program("load_test.py", "--help")``: run a Python program of the repository under this interpreter,
    in the test's own folder, with no standard input, and return its ``CompletedProcess`` (text). The programs in
    CALLED are called, not started, unless the test needs an environment, an input or a time limit of its own.

    Keyword arguments: ``env`` (added to the environment), ``cwd``, ``input`` and ``timeout`` in seconds.
    """

    def run(
        name: str,
        *args: object,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        input: str | None = None,
        timeout: float | None = None,
    ) -> subprocess.CompletedProcess[str]:
        if name in CALLED and env is None and input is None and timeout is None:
            return call_main(name, [*map(str, args)], cwd or tmp_path)
        return subprocess.run(
            [sys.executable, str(ROOT / name), *map(str, args)],
            env={**os.environ, "PYTHONIOENCODING": "utf-8", **(env or {})},
            cwd=cwd or tmp_path,
            stdin=subprocess.DEVNULL if input is None else None,
            input=input,
            capture_output=True,
            encoding="utf-8",
            timeout=timeout or 240,
        )

    return run


class SimEngine:
    """A simulated engine in a process of its own, listening when the constructor returns."""

    def __init__(self, folder: Path, *args: object) -> None:
        self.log_path = folder / "requests.jsonl"
        self._stderr_path = folder / "stderr.txt"
        command = [sys.executable, str(ROOT / "scripts" / "simulated_engine.py"), "--log", str(self.log_path)]
        with self._stderr_path.open("w", encoding="utf-8") as stderr:
            self.process = subprocess.Popen(
                [*command, *map(str, args)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                encoding="utf-8",
            )
        assert self.process.stdout is not None
        greeting = self.process.stdout.readline()  # blocks until it listens, or until it has died
        match = re.search(r"listening on (http://\S+:(\d+)/v1)", greeting)
        if match is None:
            self.stop()
            pytest.fail(f"the simulated engine did not start: {greeting!r} {self.stderr()!r}")
        self.base_url = match.group(1)
        self.port = int(match.group(2))

    def stderr(self) -> str:
        return self._stderr_path.read_text(encoding="utf-8")

    def read_log(self) -> list[dict[str, Any]]:
        """The log lines written so far; a request's line comes when it has ended, so ``stop()`` first for all."""
        with self.log_path.open(encoding="utf-8") as lines:
            return [json.loads(line) for line in lines if line.endswith("\n")]

    def stop(self) -> int:
        """End it with SIGTERM (harmless when it has ended) and return its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
            pytest.fail("the simulated engine did not end within 20 s of SIGTERM")
        return int(self.process.returncode)


SimEngineFactory = Callable[..., SimEngine]


@pytest.fixture
def sim_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimEngineFactory]:
    """``sim_engine("--slots", 4)`` starts ``scripts/simulated_engine.py`` with these options on a free port.

    Each call starts one more; all are stopped at the end of the test.
    """
    with contextlib.ExitStack() as running:

        def start(*args: object) -> SimEngine:
            engine = SimEngine(tmp_path_factory.mktemp("sim"), *args)
            running.callback(engine.stop)
            return engine

        yield start
