"""Stand-ins for the engines and tools that the lab's scripts start, and a folder to run the scripts in.

Every path has a space in it. A stand-in writes its arguments down, one JSON list a line, and then behaves as its
settings in the environment say. The engines' stand-ins serve through scripts/simulated_engine.py, under the
process id that the launcher's `exec` gave them, so that the scripts meet a real server.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

BASH = shutil.which("bash") or "bash"

# Variables that the scripts read: none may leak in from the machine that runs the tests.
SETTINGS = """
ALIAS BASH_ENV CACHE_RAM CACHE_TYPE CDPATH CONTAINER_NAME CPU_EXPECTED CTX CTX_PER_SLOT DECODE_CONCURRENCY DEVICE
DOCKER GGUF HF HOST HOST_DESC IMAGE KEEP_GOING KV_BYTES KV_DTYPE KV_UNIFIED LABBOOK LAYERS LIMIT_PERCENT LLAMA_BIN
LLAMA_PORT LLAMA_QUANT LLAMA_VENV LLAMA_VERSION LOGFILE MAX_SEQS MEMORY_GB MEM_FRACTION MEM_FRACTION_A MEM_FRACTION_B
MLX_MODEL MLX_PORT MLX_QUANT MLX_VENV MODEL MODELS_DIR NGL OUT PAIRS PART PIDFILE PORT PREFIX_CACHING
PROMPT_CACHE_SIZE PROMPT_CONCURRENCY PYTHON READY_SECONDS SERVED_NAME SLOTS STOP_SECONDS THREADS TP_SIZE TRACK
VLLM_BLOCK_SIZE VLLM_IMAGE VLLM_KV_BYTES VLLM_KV_DTYPE VLLM_MODEL VLLM_PORT VLLM_QUANT VLLM_VENV
"""

# What each stand-in starts with: its own name and arguments go to the record.
RECORD = """\
#!{python}
import json, os, sys
with open({record!r}, "a") as record:
    record.write(json.dumps([{name!r}, *sys.argv[1:]]) + "\\n")
args = sys.argv[1:]

def option(name, default=None):
    return args[args.index(name) + 1] if name in args else default

def end_as_told():
    if "ENDS" in os.environ:
        print("the server speaks, pid", os.getpid(), flush=True)
        sys.exit(int(os.environ["ENDS"]))

def serve(*flags):
    engine = [{python!r}, {engine!r}, "--port", option("--port"), "--model", "local-chat", *flags]
    os.execv({python!r}, engine + os.environ.get("ENGINE_FLAGS", "--a-ms 1 --b-ms 0.05").split())
"""

LLAMA_SERVER = """\
if args == ["--version"]:
    print("version: 11434 (abcdef)", file=sys.stderr)
    sys.exit()
if args == ["--list-devices"]:
    print("Available devices:\\n  " + os.environ.get("DEVICE", "CUDA0: NVIDIA Test (24564 MiB, 24000 MiB free)"))
    sys.exit()
if args == ["--help"]:
    print(os.environ.get("LLAMA_HELP", "--kv-unified, --no-kv-unified"))
    sys.exit()
slots = int(option("--parallel")) if option("--parallel") != "-1" else 4
with open(option("--log-file"), "w") as log:
    log.write("load_tensors: offloaded 37/37 layers to GPU\\nllama_kv_cache: size = 11520.00 MiB\\n")
    log.write("srv load_model: initializing, n_slots = %d, n_ctx_slot = 512, kv_unified = 'true'\\n" % slots)
end_as_told()
if "LLAMA_DIES" in os.environ:
    sys.exit(os.environ["LLAMA_DIES"])
serve("--dialect", "llama", "--slots", str(slots), "--context", str(int(option("--ctx-size")) // slots))
"""

VLLM = """\
if args == ["--version"]:
    print("0.28.0")
elif args[:2] == ["bench", "serve"]:
    speed = float(os.environ.get("BENCH_SPEED", "1"))
    tpot_ms = float(os.environ.get("BENCH_TPOT_MS", 30.0 / speed))
    runs = sum(json.loads(line)[1:3] == ["bench", "serve"] for line in open(os.environ["RECORD"]))
    rate = 615.0 * speed + runs / 10
    result = {{"date": "20261207-120000", "num_prompts": 80, "max_concurrency": 20, "request_rate": "inf", "failed": 0,
              "completed": int(os.environ.get("BENCH_COMPLETED", "80")), "duration": 10240 / rate,
              "total_input_tokens": 80 * (int(option("--random-input-len")) + 9), "total_output_tokens": 10240,
              "request_throughput": rate / 128, "output_throughput": rate}}
    for name, ms in (("ttft", 180.0), ("tpot", tpot_ms), ("itl", tpot_ms), ("e2el", 180.0 + 127 * tpot_ms)):
        result.update({{"%s_%s_ms" % (which, name): ms for which in ("mean", "median", "p50", "p90")}})
    if "BENCH_FAILS" in os.environ:
        sys.exit("the bench broke")
    os.makedirs(option("--result-dir"), exist_ok=True)
    with open(os.path.join(option("--result-dir"), option("--result-filename")), "w") as text:
        json.dump(result, text)
else:
    print("GPU KV cache size: 81,920 tokens, Maximum concurrency for 4,096 tokens per request: 20.00x", flush=True)
    if "VLLM_DIES" in os.environ:
        sys.exit(os.environ["VLLM_DIES"])
    end_as_told()
    serve("--dialect", "vllm", "--slots", option("--max-num-seqs"), "--context", option("--max-model-len"))
"""

DOCKER = """\
if args[:2] == ["image", "inspect"]:
    sys.exit("NO_IMAGE" in os.environ)
if args[:2] == ["container", "inspect"]:
    sys.exit("CONTAINER_EXISTS" not in os.environ)
if args[0] == "run":
    end_as_told()
    sys.exit("the container ended")
if args[0] == "exec":
    where = args.index("vllm")
    os.execvp("vllm", args[where:])
if args[0] == "cp":
    import shutil
    shutil.copy(args[1].split(":", 1)[1], args[2])
"""

MLX_PYTHON = """\
if args[0] == "-c":
    print("0.32.2" if 'print(version("mlx-lm"))' in args[1] else "mlx-lm 0.32.2 mlx 0.32.4")
else:
    end_as_told()
    engine = [{python!r}, {engine!r}, "--port", option("--port"), "--model", option("--model"), "--slots", "32"]
    os.execv({python!r}, engine + ["--cache", "pool", "--a-ms", "1", "--b-ms", "0.05"])
"""

NVIDIA_SMI = """\
facts = {{"memory.total": os.environ.get("GPU_MIB", "24564"), "memory.free": os.environ.get("GPU_FREE_MIB", "24000"),
         "name": "NVIDIA Test GPU"}}
query = [arg for arg in args if arg.startswith("--query-gpu=")][0].split("=", 1)[1]
print(facts[query])
"""

# Hugging Face's command: a sparse file, or a folder with a config, of the size in BYTES.
HF = """\
if "HF_BREAKS" in os.environ:
    sys.exit("the connection was lost")
file = args[2] if not args[2].startswith("--") else "weights"
os.makedirs(option("--local-dir"), exist_ok=True)
with open(os.path.join(option("--local-dir"), "config.json"), "w") as text:
    text.write("{{}}")
with open(os.path.join(option("--local-dir"), file), "wb") as stream:
    stream.write(b"GGUF")
    stream.truncate(int(os.environ["BYTES"]))
"""

# Stand-ins for the three programs, for tests of what the scripts ask of them and do with their answers.
FAKE_PROGRAM = """\
for entry in os.environ.get("ANSWERS", "").split(";"):
    words, _, answer = entry.partition("=>")
    if words and all(word in sys.argv for word in words.split()):
        status, _, path = answer.partition(",")
        if path and "--prompt-set" in args:  # a load: its record goes to the notebook
            with open(option("--labbook"), "a") as notebook:
                notebook.write(open(path).read())
        elif path:
            sys.stdout.write(open(path).read())
        sys.exit(int(status))
"""

STAND_INS = {
    "llama-server": LLAMA_SERVER,
    "vllm": VLLM,
    "docker": DOCKER,
    "hf": HF,
    "nvidia-smi": NVIDIA_SMI,
}
PROGRAMS = ("load_test.py", "summarise_load.py", "serving_arithmetic.py")


class Lab:
    """A copy of the scripts, a working folder, a home with models in it, and stand-ins on PATH."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root = root
        self.home = folder / "a home"
        self.work = folder / "the work"
        self.repository = folder / "the lab"
        self.bin = folder / "stand ins"
        self.record = folder / "record.jsonl"
        for path in (self.home, self.work, self.repository, self.bin):
            path.mkdir()
        shutil.copytree(root / "scripts", self.repository / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
        for name in PROGRAMS:
            self.fake(name)
        for name, text in STAND_INS.items():
            self.stand_in(self.bin / name, text)
        inherited = {name: value for name, value in os.environ.items() if name not in SETTINGS.split()}
        self.environment = {
            **inherited,
            "HOME": str(self.home),
            "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}",
            "PYTHON": sys.executable,
            "RECORD": str(self.record),
            "STOP_SECONDS": "100",
            "READY_SECONDS": "250",
        }

    def stand_in(self, path: Path, text: str) -> None:
        """An executable at `path` that writes its arguments down and goes on with `text`."""
        engine = str(self.root / "scripts" / "simulated_engine.py")
        facts = {"python": sys.executable, "record": str(self.record), "name": path.name, "engine": engine}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text((RECORD + text).format(**facts), encoding="utf-8")
        path.chmod(0o755)

    def fake(self, program: str) -> None:
        """Replace one of the three programs in the copied repository by a stand-in."""
        self.stand_in(self.repository / program, FAKE_PROGRAM)

    def real(self, *programs: str) -> None:
        """Put the real programs where their stand-ins were."""
        for program in programs:
            shutil.copy(self.root / program, self.repository / program)

    def gguf(self, size: int, magic: bytes = b"GGUF") -> Path:
        """The lab's own GGUF file, sparse, of this size."""
        path = self.home / "models" / "unsloth" / "Qwen3-8B-GGUF" / "Qwen3-8B-Q4_K_M.gguf"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as stream:
            stream.write(magic)
            stream.truncate(size)
        return path

    def model(self, name: str, **sizes: int) -> Path:
        """A checkpoint's folder below the home's models, with config.json and sparse files of these sizes."""
        folder = self.home / "models" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text("{}", encoding="utf-8")
        for file, size in sizes.items():
            with (folder / file).open("wb") as stream:
                stream.truncate(size)
        return folder

    def run(self, script: str, *args: str, **settings: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [BASH, str(self.repository / "scripts" / script), *args],
            cwd=self.work,
            env={**self.environment, **settings},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            timeout=280,  # a net: no test may fail by the machine's load
        )

    def start(self, script: str, *args: str, **settings: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [BASH, str(self.repository / "scripts" / script), *args],
            cwd=self.work,
            env={**self.environment, **settings},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            start_new_session=True,  # a group of its own, as a terminal's foreground job has
            # Where the tests themselves run in the background, SIGINT is ignored, and bash cannot trap it then.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def calls(self, name: str) -> list[list[str]]:
        """The arguments of each call of a stand-in, in order."""
        if not self.record.exists():
            return []
        lines = map(json.loads, self.record.read_text(encoding="utf-8").splitlines())
        return [line[1:] for line in lines if line[0] == name]

    def write_env(self, **values: object) -> None:
        """A lab.env of these values and nothing else."""
        lines = [f"export {name}='{value}'\n" for name, value in values.items()]
        (self.work / "lab.env").write_text("".join(lines), encoding="utf-8")
