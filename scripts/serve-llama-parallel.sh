#!/usr/bin/env bash
# serve-llama-parallel.sh - start llama-server in the foreground with a fixed number of slots, every setting on
# the command line.
#
#   bash scripts/serve-llama-parallel.sh
#   SLOTS=8 CACHE_TYPE=q8_0 bash scripts/serve-llama-parallel.sh
#   SLOTS=-1 CTX_PER_SLOT=2048 MODEL=unsloth/Qwen3-0.6B-GGUF:Q8_0 bash scripts/serve-llama-parallel.sh
#
# Settings, from the environment:
#   MODEL         GGUF file [~/models/unsloth/Qwen3-8B-GGUF/Qwen3-8B-Q4_K_M.gguf], or a Hugging Face repository as
#                 USER/NAME or USER/NAME:QUANT, which llama-server downloads into its own cache (--hf-repo)
#   LLAMA_BIN     llama-server, or the folder that holds it [~/llama.cpp/build/bin, else the one on PATH]
#   ALIAS         the name that requests send as their model [local-chat]
#   HOST, PORT    where it listens [127.0.0.1, 8080]; other hosts get a warning: there is no password
#   SLOTS         requests served at once (--parallel); -1: llama-server decides, and gives its slots one shared
#                 cache [20]
#   CTX_PER_SLOT  tokens of context for each slot [4096]; --ctx-size is the total, slots times this. Where the cache
#                 is shared because of SLOTS=-1, this is the total, and each slot may use all of it
#   CACHE_TYPE    type of the cached keys and values: f16, q8_0, q4_0 ... [f16]
#   CACHE_RAM     host prompt cache in MiB, 0 for none, -1 for no limit [0]
#   NGL           layers to put on the GPU: a number, all, or auto (as many as fit) [999, which every build takes]
#   THREADS       CPU threads, at most as many as the machine has cores; empty: llama-server decides []
#   KV_UNIFIED    1: one cache shared by all slots, each of which may use all of it [0]
#   LOGFILE       copy of its log, new at each start [./llama-server.log]
#   PIDFILE       the server's own process id [./llama-server.pid]
#
# Flags after -- go to llama-server unchanged. All of its flags: llama-server --help
# Prints the settings, then stays in the foreground; once the model is loaded, one more line says what its log shows
# that it decided (layers on the GPU, slots, context, shared or not). Ctrl-C stops it. Exit: 2 for a wrong setting,
# 1 for a busy port, otherwise the server's own.
set -euo pipefail
here="$(CDPATH=''; f="$0"; while [ -L "$f" ]; do cd -P -- "$(dirname -- "$f")"; f="$(readlink -- "${f##*/}")"; done
  cd -P -- "$(dirname -- "$f")" && pwd)" # also through a symbolic link
# shellcheck source=lib.sh
. "$here/lib.sh"
# shellcheck source=servers.sh
. "$here/servers.sh"

launcher_arguments "the server's" "$@"
[ "${1:-}" != -- ] || shift

MODEL="${MODEL:-$HOME/models/unsloth/Qwen3-8B-GGUF/Qwen3-8B-Q4_K_M.gguf}"
LLAMA_BIN="${LLAMA_BIN:-}"
ALIAS="${ALIAS:-local-chat}"
HOST="${HOST:-127.0.0.1}"
PORT="${PORT:-8080}"
SLOTS="${SLOTS:-20}"
CTX_PER_SLOT="${CTX_PER_SLOT:-4096}"
CACHE_TYPE="${CACHE_TYPE:-f16}"
CACHE_RAM="${CACHE_RAM:-0}"
NGL="${NGL:-999}"
THREADS="${THREADS:-}"
KV_UNIFIED="${KV_UNIFIED:-0}"
LOGFILE="${LOGFILE:-./llama-server.log}"
PIDFILE="${PIDFILE:-./llama-server.pid}"

need_port PORT "$PORT"
[ "$SLOTS" = -1 ] || need_number SLOTS "$SLOTS"
need_number CTX_PER_SLOT "$CTX_PER_SLOT"
[ "$CACHE_RAM" = -1 ] || need_number CACHE_RAM "$CACHE_RAM" 0
[ "$NGL" = all ] || [ "$NGL" = auto ] || [[ "$NGL" =~ ^[0-9]+$ ]] || die "NGL must be a whole number, all or auto, not '$NGL'"
[ -z "$THREADS" ] || need_number THREADS "$THREADS"
[[ "$KV_UNIFIED" =~ ^[01]$ ]] || die "KV_UNIFIED must be 0 or 1, not '$KV_UNIFIED'"
[[ "$CACHE_TYPE" =~ ^[a-z0-9_]+$ ]] || die "CACHE_TYPE must be a type such as f16, q8_0 or q4_0, not '$CACHE_TYPE'"

server="$LLAMA_BIN"
if [ -z "$server" ]; then
  server="$HOME/llama.cpp/build/bin/llama-server"
  [ -x "$server" ] || server="$(command -v llama-server)" ||
    die "cannot find llama-server, neither in '$HOME/llama.cpp/build/bin' nor on PATH: build it, or set LLAMA_BIN"
elif [ -d "$server" ]; then
  server="${server%/}/llama-server"
fi
[ -f "$server" ] || die "there is no llama-server at '$server': set LLAMA_BIN to the binary or its folder"
[ -x "$server" ] || die "'$server' is not executable: chmod +x it, or set LLAMA_BIN to another"

repository='^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*(:[A-Za-z0-9._-]+)?$'
if [ ! -e "$MODEL" ] && [[ "$MODEL" =~ $repository ]] && [[ "$MODEL" != *.gguf ]]; then
  model=(--hf-repo "$MODEL")
else
  [ -f "$MODEL" ] || die "there is no file MODEL '$MODEL': set MODEL to a GGUF file, or fetch the lab's: bash $SCRIPTS_WORD/fetch-models.sh"
  [ -r "$MODEL" ] || die "MODEL '$MODEL' cannot be read: check its permissions"
  [ "$(head -c 4 "$MODEL" | tr -d '\0')" = GGUF ] ||
    die "MODEL '$MODEL' is not a GGUF file (it does not begin with GGUF): is the download complete?"
  model=(--model "$MODEL")
fi

refuse_busy_port "$HOST" "$PORT"
warn_if_exposed "$HOST"
open_log "$LOGFILE" "$PIDFILE"

cores="$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 0)"
[ -z "$THREADS" ] || [ "$cores" -eq 0 ] || [ "$THREADS" -le "$cores" ] ||
  printf '%s: WARNING: THREADS=%s on %s cores: more threads than cores is slower\n' "$SCRIPT_NAME" "$THREADS" "$cores" >&2

# Newer builds can be told not to share one cache, which they otherwise do where they choose the slots.
version="$("$server" --version 2>&1 </dev/null | sed -n 's/^version: *//p')" || true
optional=()
[ -z "$THREADS" ] || optional=(--threads "$THREADS")
if [ "$SLOTS" = -1 ]; then
  total_context="$CTX_PER_SLOT"
  slots="as many as llama-server decides"
  context="$total_context in total; what a slot sees, llama-server decides"
else
  total_context=$((10#$SLOTS * 10#$CTX_PER_SLOT)) # 10#: a leading zero does not make it octal
  slots="$SLOTS"
  context="$CTX_PER_SLOT for each slot, $total_context in total"
fi
if [ "$KV_UNIFIED" = 1 ]; then
  optional=(${optional[@]+"${optional[@]}"} --kv-unified)
  context="$context, one cache shared by all slots"
elif [ "$SLOTS" != -1 ]; then
  context="$context, each slot has its own"
  case "$("$server" --help 2>&1 </dev/null || true)" in
  *--no-kv-unified*) optional=(${optional[@]+"${optional[@]}"} --no-kv-unified) ;;
  esac
fi

# --log-file writes the log there and goes on showing it here. The empty-array form is for bash 3.2.
command=("$server" "${model[@]}" --alias "$ALIAS" --host "$HOST" --port "$PORT"
  --ctx-size "$total_context" --parallel "$SLOTS" --n-gpu-layers "$NGL"
  --cache-type-k "$CACHE_TYPE" --cache-type-v "$CACHE_TYPE" --cache-ram "$CACHE_RAM"
  --cont-batching --flash-attn on --metrics --jinja --slots --verbosity 4 --log-file "$LOGFILE"
  ${optional[@]+"${optional[@]}"} "$@")

say "llama-server"
show "binary" "$server"
show "version" "${version:-unknown}"
show "model" "$MODEL, served as $ALIAS"
show "address" "http://$HOST:$PORT/v1"
show "slots" "$slots"
show "context" "$context"
show "cache" "$CACHE_TYPE for keys and values, host prompt cache $CACHE_RAM MiB"
show "GPU layers" "$NGL"
show "CPU threads" "${THREADS:-as many as llama-server decides}"
show "log, pid file" "$LOGFILE, $PIDFILE"
show_command "${command[@]}"

# say_what_it_decided PID - one line from its log, as soon as it stands there; ends with the server (Z: it has ended,
# and whoever started it has not looked yet).
say_what_it_decided() {
  local line offloaded
  while [[ "$(ps -p "$1" -o stat= 2>/dev/null)" =~ ^[^Z] ]]; do
    line="$(sed -n 's/.*\(n_slots = .*\)/\1/p' "$LOGFILE" 2>/dev/null | head -n 1)"
    if [ -n "$line" ]; then
      offloaded="$(sed -n 's/.*\(offloaded [0-9/]* layers\).*/\1/p' "$LOGFILE" | head -n 1)"
      printf '\n  %-22s %s%s\n\n' "decided, says its log:" "$line" "${offloaded:+, $offloaded}"
      return
    fi
    sleep 0.2
  done
}
# Twice in the background: it is nobody's child then, and the server has none that it does not know of.
(say_what_it_decided "$$" </dev/null &)

exec "${command[@]}"
