#!/usr/bin/env bash
# serve-llama-parallel.sh - start llama-server in the foreground with a fixed number of slots, every setting on
# the command line.
#
#   bash scripts/serve-llama-parallel.sh
#   SLOTS=8 CACHE_TYPE=q8_0 bash scripts/serve-llama-parallel.sh
#   bash scripts/serve-llama-parallel.sh -- --threads 8
#
# Settings, from the environment:
#   MODEL         GGUF file [~/models/unsloth/Qwen3-8B-GGUF/Qwen3-8B-Q4_K_M.gguf]
#   LLAMA_BIN     llama-server, or the folder that holds it [~/llama.cpp/build/bin, else the one on PATH]
#   ALIAS         the name that requests send as their model [local-chat]
#   HOST, PORT    where it listens [127.0.0.1, 8080]; other hosts get a warning: there is no password
#   SLOTS         requests served at once (--parallel) [20]
#   CTX_PER_SLOT  tokens of context for each slot [4096]; --ctx-size is the total, slots times this
#   CACHE_TYPE    type of the cached keys and values: f16, q8_0, q4_0 ... [f16]
#   CACHE_RAM     host prompt cache in MiB, 0 for none, -1 for no limit [0]
#   NGL           layers to put on the GPU [999]
#   KV_UNIFIED    1: one cache shared by all slots, each of which may use all of it [0]
#   LOGFILE       copy of its log, new at each start [./llama-server.log]
#   PIDFILE       the server's own process id [./llama-server.pid]
#
# Flags after -- go to llama-server unchanged. All of its flags: llama-server --help
# Prints the settings, then stays in the foreground; Ctrl-C stops it. Exit: 2 for a wrong setting, 1 for a busy
# port, otherwise the server's own.
set -euo pipefail
# shellcheck source=lib.sh
. "$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)/lib.sh"

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
KV_UNIFIED="${KV_UNIFIED:-0}"
LOGFILE="${LOGFILE:-./llama-server.log}"
PIDFILE="${PIDFILE:-./llama-server.pid}"

need_port PORT "$PORT"
need_number SLOTS "$SLOTS"
need_number CTX_PER_SLOT "$CTX_PER_SLOT"
[ "$CACHE_RAM" = -1 ] || need_number CACHE_RAM "$CACHE_RAM" 0
need_number NGL "$NGL" 0
[[ "$KV_UNIFIED" =~ ^[01]$ ]] || die "KV_UNIFIED must be 0 or 1, not '$KV_UNIFIED'"
[[ "$CACHE_TYPE" =~ ^[a-z0-9_]+$ ]] || die "CACHE_TYPE must be a type such as f16, q8_0 or q4_0, not '$CACHE_TYPE'"
total_context=$((10#$SLOTS * 10#$CTX_PER_SLOT)) # 10#: a leading zero does not make it octal

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

[ -f "$MODEL" ] || die "there is no file MODEL '$MODEL': set MODEL to a GGUF file"
[ -r "$MODEL" ] || die "MODEL '$MODEL' cannot be read: check its permissions"
[ "$(head -c 4 "$MODEL" | tr -d '\0')" = GGUF ] ||
  die "MODEL '$MODEL' is not a GGUF file (it does not begin with GGUF): is the download complete?"

refuse_busy_port "$HOST" "$PORT"
warn_if_exposed "$HOST"
{ : >"$LOGFILE"; } 2>/dev/null || die "cannot write LOGFILE '$LOGFILE'"
{ printf '%s\n' "$$" >"$PIDFILE"; } 2>/dev/null || die "cannot write PIDFILE '$PIDFILE'"

# Newer builds can be told not to share one cache, which they otherwise do where they choose the slots.
version="$("$server" --version 2>&1 </dev/null | sed -n 's/^version: *//p')" || true
kv_flag=()
if [ "$KV_UNIFIED" = 1 ]; then
  kv_flag=(--kv-unified)
  sharing="one cache shared by all slots"
else
  sharing="each slot has its own"
  case "$("$server" --help 2>&1 </dev/null || true)" in
  *--no-kv-unified*) kv_flag=(--no-kv-unified) ;;
  esac
fi

# --log-file writes the log there and goes on showing it here. The empty-array form is for bash 3.2.
command=("$server" --model "$MODEL" --alias "$ALIAS" --host "$HOST" --port "$PORT"
  --ctx-size "$total_context" --parallel "$SLOTS" --n-gpu-layers "$NGL"
  --cache-type-k "$CACHE_TYPE" --cache-type-v "$CACHE_TYPE" --cache-ram "$CACHE_RAM"
  --cont-batching --flash-attn on --metrics --jinja --slots --verbosity 4 --log-file "$LOGFILE"
  ${kv_flag[@]+"${kv_flag[@]}"} "$@")

say "llama-server"
show "binary" "$server"
show "version" "${version:-unknown}"
show "model" "$MODEL, served as $ALIAS"
show "address" "http://$HOST:$PORT/v1"
show "slots" "$SLOTS"
show "context per slot" "$CTX_PER_SLOT, $total_context in total, $sharing"
show "cache" "$CACHE_TYPE for keys and values, host prompt cache $CACHE_RAM MiB"
show "GPU layers" "$NGL"
show "log, pid file" "$LOGFILE, $PIDFILE"
show_command "${command[@]}"

exec "${command[@]}"
