#!/usr/bin/env bash
# serve-vllm-native.sh - start vLLM in the foreground with every setting on the command line.
#
#   bash scripts/serve-vllm-native.sh
#   MODEL="$VLLM_MODEL" KV_DTYPE="$VLLM_KV_DTYPE" KV_BYTES="$VLLM_KV_BYTES" bash scripts/serve-vllm-native.sh
#   MAX_SEQS=8 bash scripts/serve-vllm-native.sh -- --enforce-eager
#
# Settings, from the environment:
#   MODEL           folder with config.json, or a repository id [~/models/Qwen/Qwen3-8B-AWQ]
#   SERVED_NAME     the name that requests send as their model [local-chat]
#   HOST, PORT      where it listens [127.0.0.1, 8000]; other hosts get a warning: there is no password
#   CTX             tokens of context for each sequence (--max-model-len) [4096]
#   MAX_SEQS        sequences in one batch (--max-num-seqs) [20]
#   KV_BYTES        size of the cache in bytes (--kv-cache-memory-bytes); empty: MEM_FRACTION decides []
#   MEM_FRACTION    share of the memory for everything (--gpu-memory-utilization) [0.90]
#   KV_DTYPE        auto, fp8, ... (--kv-cache-dtype) [auto]
#   PREFIX_CACHING  on or off [on]
#   TP_SIZE         GPUs to spread over (--tensor-parallel-size) [1]
#   VLLM_VENV       virtual environment with vLLM [~/vllm/.venv]; without one, the vllm on PATH
#   LOGFILE         copy of what it prints, new at each start [./vllm-server.log]
#   PIDFILE         the server's own process id [./vllm-server.pid]
#
# Flags after -- go to vLLM unchanged. All of its flags: vllm serve --help=all
# Prints the settings, then stays in the foreground; Ctrl-C stops it. Exit: 2 for a wrong setting, 1 for a busy
# port, otherwise vLLM's own.
set -euo pipefail
here="$(CDPATH=''; f="$0"; while [ -L "$f" ]; do cd -P -- "$(dirname -- "$f")"; f="$(readlink -- "${f##*/}")"; done
  cd -P -- "$(dirname -- "$f")" && pwd)" # also through a symbolic link
# shellcheck source=lib.sh
. "$here/lib.sh"
# shellcheck source=servers.sh
. "$here/servers.sh"

launcher_arguments "vLLM's" "$@"
[ "${1:-}" != -- ] || shift

MODEL="${MODEL:-$HOME/models/Qwen/Qwen3-8B-AWQ}"
HOST="${HOST:-127.0.0.1}"
VLLM_VENV="${VLLM_VENV:-$HOME/vllm/.venv}"
# shellcheck source=vllm.sh
. "$here/vllm.sh"

repository='^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*$'
if [ -d "$MODEL" ]; then
  [ -f "$MODEL/config.json" ] || die "there is no config.json in MODEL '$MODEL': is the download complete?"
elif ! [[ "$MODEL" =~ $repository ]]; then
  die "there is no folder MODEL '$MODEL': set MODEL to a folder with config.json or a repository id such as Qwen/Qwen3-8B, or fetch the lab's: bash $SCRIPTS_WORD/fetch-models.sh"
fi
if [ -x "$VLLM_VENV/bin/vllm" ]; then
  vllm="$VLLM_VENV/bin/vllm"
  PATH="$VLLM_VENV/bin:$PATH" # vLLM calls tools of its own environment, such as ninja, by name
  export PATH
else
  vllm="$(command -v vllm)" || die "cannot find vllm, neither in '$VLLM_VENV/bin' nor on PATH: set VLLM_VENV to its environment"
fi
refuse_busy_port "$HOST" "$PORT"
warn_if_exposed "$HOST"
open_log "$LOGFILE" "$PIDFILE"

command=("$vllm" serve "$MODEL" --served-model-name "$SERVED_NAME" --host "$HOST" --port "$PORT" "${vllm_flags[@]}" "$@")

say "vLLM, natively"
show "vllm" "$vllm"
show "model" "$MODEL, served as $SERVED_NAME"
show "address" "http://$HOST:$PORT/v1"
show_vllm_settings
show_command "${command[@]}"

copy_output "$LOGFILE"
exec "${command[@]}"
