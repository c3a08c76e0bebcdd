#!/usr/bin/env bash
# cleanup.sh - check what is still served, check the notebook, stop the lab's servers, and say what is left.
#
#   bash scripts/cleanup.sh
#   bash scripts/cleanup.sh --keep-running
#
# In the lab's working folder. First, each server that still answers must answer one fresh request. Then
# summarise_load.py --check on labbook.md. Then the servers that the launchers started from this folder are
# stopped, by the process ids in their *.pid files and only where that process is what the launcher started, and
# the container on track S; then the ports must be free. What is not as it should be is said, and the rest is done
# all the same. Nothing measured is removed: notebook, logs, crosscheck/ and lab.env stay. Running it again is
# harmless.
#
#   --keep-running   stop nothing: check only
#
# From the environment: LABBOOK [labbook.md], CONTAINER_NAME [vllm-lab], DOCKER [docker],
# LLAMA_PORT [8080], VLLM_PORT [8000], MLX_PORT [8081], KEEP_GOING=1, PYTHON [python3].
# Exit: 1 when something is not as predicted, 2 for a wrong setting.
set -euo pipefail
here="$(CDPATH=''; f="$0"; while [ -L "$f" ]; do cd -P -- "$(dirname -- "$f")"; f="$(readlink -- "${f##*/}")"; done
  cd -P -- "$(dirname -- "$f")" && pwd)" # also through a symbolic link
# shellcheck source=lib.sh
. "$here/lib.sh"
# shellcheck source=servers.sh
. "$here/servers.sh"

keep_running=0
case "${1:-}" in
-h | --help) usage; exit 0 ;;
--keep-running) keep_running=1 ;;
'') ;;
*) die "unknown argument '$1'" ;;
esac

need_python
LABBOOK="${LABBOOK:-labbook.md}"
CONTAINER_NAME="${CONTAINER_NAME:-vllm-lab}"
DOCKER="${DOCKER:-docker}"
LLAMA_PORT="${LLAMA_PORT:-8080}"
VLLM_PORT="${VLLM_PORT:-8000}"
MLX_PORT="${MLX_PORT:-8081}"
need_port LLAMA_PORT "$LLAMA_PORT"
need_port VLLM_PORT "$VLLM_PORT"
need_port MLX_PORT "$MLX_PORT"
[ ! -f lab.env ] || load_lab_env HOST_DESC

faults=0

# fault WHAT ADVICE - said at once; the rest is done all the same, and the exit status tells.
fault() {
  faults=$((faults + 1))
  printf '%s: NOT AS PREDICTED: %s\n    what to do: %s\n' "$SCRIPT_NAME" "$1" "$2" >&2
}

# fresh_request NAME PORT MODEL - a server that took the load must still answer.
fresh_request() {
  port_answers 127.0.0.1 "$2" || { say "  $1, port $2: not running"; return 0; }
  say "  port $2, where $1 listens: something answers; one fresh request:"
  program load_test.py --base-url "http://127.0.0.1:$2/v1" --model "$3" --probe ||
    fault "what answers on port $2 did not answer a fresh request" "where it is $1, read its log: a server that the load broke is a result to write down"
}

# stop_by_pidfile FILE WORD - stop the process in FILE if its command line holds WORD; else only say so.
stop_by_pidfile() {
  local pid command
  [ -f "$1" ] || return 0
  pid="$(tr -d '[:space:]' <"$1")"
  case "$pid" in
  '' | *[!0-9]*) say "  $1 holds no process id: left alone"; return 0 ;;
  esac
  command="$(ps -ww -p "$pid" -o command= 2>/dev/null || true)"
  case "$command" in
  '') say "  $1: process $pid has ended already" ;;
  *"$2"*)
    say "  stopping process $pid: $2"
    kill "$pid" || true
    ends_within "$pid" "${STOP_SECONDS:-60}" || {
      fault "process $pid still runs after ${STOP_SECONDS:-60} s" "look at it with: ps -ww -p $pid"
      return 0
    }
    ;;
  *) say "  $1: process $pid is something else by now: left alone"; return 0 ;;
  esac
  rm -f "$1"
}

say "cleanup.sh in $PWD"
step "is the service there, and does it answer a fresh request?"
fresh_request llama-server "$LLAMA_PORT" local-chat
fresh_request vLLM "$VLLM_PORT" local-chat
fresh_request mlx_lm.server "$MLX_PORT" "${MLX_MODEL:-unknown}"

step "the notebook"
checked=0
if [ -f "$LABBOOK" ]; then
  show_command python3 summarise_load.py --labbook "$LABBOOK" --check
  program summarise_load.py --labbook "$LABBOOK" --check || checked=$?
else
  say "  there is no $LABBOOK here"
fi

if [ "$keep_running" -eq 0 ]; then
  step "stopping"
  for pidfile in ./*.pid; do
    case "$pidfile" in
    *llama*) stop_by_pidfile "$pidfile" llama-server ;;
    *mlx*) stop_by_pidfile "$pidfile" mlx_lm ;;
    *vllm*) stop_by_pidfile "$pidfile" vllm ;;
    esac
  done
  if [ -n "${VLLM_IMAGE:-}" ] && "$DOCKER" container inspect "$CONTAINER_NAME" >/dev/null 2>&1; then
    say "  stopping container $CONTAINER_NAME"
    "$DOCKER" stop "$CONTAINER_NAME" >/dev/null || fault "the container '$CONTAINER_NAME' did not stop" "docker rm -f $CONTAINER_NAME"
  fi
  for port in "$LLAMA_PORT" "$VLLM_PORT" "$MLX_PORT"; do
    if port_answers 127.0.0.1 "$port"; then
      fault "port $port still answers" "a server that was not started from this folder: stop it in its own terminal"
    else
      say "  port $port is free"
    fi
  done
fi

step "what stays in $PWD"
for kept in "$LABBOOK" lab.env ./*.log crosscheck; do
  [ ! -e "$kept" ] || say "  ${kept#./}"
done
[ "$checked" -eq 0 ] ||
  fault "the notebook's check says FAIL, or could not run" "each FAIL line names its label and level: measure that again, then run this again"
[ "$faults" -eq 0 ] || [ "${KEEP_GOING:-0}" = 1 ] || exit 1
