#!/usr/bin/env bash
# serve-mlx.sh - start mlx_lm.server in the foreground with every setting on the command line.
#
#   bash scripts/serve-mlx.sh
#   MODEL="$MLX_MODEL" PORT=8081 bash scripts/serve-mlx.sh
#   PROMPT_CACHE_SIZE=20 bash scripts/serve-mlx.sh -- --log-level DEBUG
#
# Settings, from the environment:
#   MODEL               folder with config.json [~/models/mlx-community/Qwen3-8B-4bit]
#   HOST, PORT          where it listens [127.0.0.1, 8081]; other hosts get a warning: there is no password
#   PROMPT_CACHE_SIZE   finished caches kept for reuse, least recently used evicted [10]
#   DECODE_CONCURRENCY  sequences decoded together [32]
#   PROMPT_CONCURRENCY  prompts read together [8]
#   MLX_VENV            virtual environment with mlx-lm [~/mlx/.venv]; without one, the python3 on PATH
#   LOGFILE             copy of what it prints, new at each start [./mlx-server.log]
#   PIDFILE             the server's own process id [./mlx-server.pid]
#
# The server loads the model that a request names: requests must send the model's absolute path, which is printed.
# Flags after -- go to mlx_lm.server unchanged. All of its flags: mlx_lm.server --help
# Prints the settings, then stays in the foreground; Ctrl-C stops it. Exit: 2 for a wrong setting, 1 for a busy
# port, otherwise the server's own.
set -euo pipefail
here="$(CDPATH=''; f="$0"; while [ -L "$f" ]; do cd -P -- "$(dirname -- "$f")"; f="$(readlink -- "${f##*/}")"; done
  cd -P -- "$(dirname -- "$f")" && pwd)" # also through a symbolic link
# shellcheck source=lib.sh
. "$here/lib.sh"
# shellcheck source=servers.sh
. "$here/servers.sh"

launcher_arguments "the server's" "$@"
[ "${1:-}" != -- ] || shift

MODEL="${MODEL:-$HOME/models/mlx-community/Qwen3-8B-4bit}"
HOST="${HOST:-127.0.0.1}"
PORT="${PORT:-8081}"
PROMPT_CACHE_SIZE="${PROMPT_CACHE_SIZE:-10}"
DECODE_CONCURRENCY="${DECODE_CONCURRENCY:-32}"
PROMPT_CONCURRENCY="${PROMPT_CONCURRENCY:-8}"
LOGFILE="${LOGFILE:-./mlx-server.log}"
PIDFILE="${PIDFILE:-./mlx-server.pid}"

need_port PORT "$PORT"
need_number PROMPT_CACHE_SIZE "$PROMPT_CACHE_SIZE"
need_number DECODE_CONCURRENCY "$DECODE_CONCURRENCY"
need_number PROMPT_CONCURRENCY "$PROMPT_CONCURRENCY"
[ -d "$MODEL" ] || die "there is no folder MODEL '$MODEL': set MODEL to a folder with config.json, or fetch the lab's: bash $SCRIPTS_WORD/fetch-models.sh"
[ -f "$MODEL/config.json" ] || die "there is no config.json in MODEL '$MODEL': is the download complete?"
MODEL="$(CDPATH='' cd -- "$MODEL" && pwd)"

python="$(mlx_python)" || die "cannot find python3, neither in the environment MLX_VENV nor on PATH"
versions="$("$python" -c 'from importlib.metadata import version; print("mlx-lm", version("mlx-lm"), "mlx", version("mlx"))' 2>/dev/null)" ||
  die "'$python' has no mlx-lm: set MLX_VENV to the environment that has it, or: $(shell_word "$python") -m pip install mlx-lm"
refuse_busy_port "$HOST" "$PORT"
warn_if_exposed "$HOST"
open_log "$LOGFILE" "$PIDFILE"

command=("$python" -m mlx_lm server --model "$MODEL" --host "$HOST" --port "$PORT"
  --prompt-cache-size "$PROMPT_CACHE_SIZE" --decode-concurrency "$DECODE_CONCURRENCY"
  --prompt-concurrency "$PROMPT_CONCURRENCY" "$@")

say "mlx_lm.server"
show "versions" "$versions"
show "model" "$MODEL"
show "" "requests must send this absolute path as their model: it is what the server loads"
show "address" "http://$HOST:$PORT/v1"
show "caches kept" "$PROMPT_CACHE_SIZE"
show "decoded together" "$DECODE_CONCURRENCY"
show "prompts together" "$PROMPT_CONCURRENCY"
show "log, pid file" "$LOGFILE, $PIDFILE"
show_command "${command[@]}"

export PYTHONUNBUFFERED=1 # the log must show what happened when it happened
copy_output "$LOGFILE"
exec "${command[@]}"
