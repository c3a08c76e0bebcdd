# shellcheck shell=bash
# servers.sh - ports, launchers, and a server that a step starts and stops itself. Sourced after lib.sh.

# ------------------------------------------------------------------------------------------------------------
# Ports
# ------------------------------------------------------------------------------------------------------------

# bash_connects HOST PORT - by bash itself; says why it could not.
bash_connects() { (LC_ALL=C; exec 3<>"/dev/tcp/$1/$2") 2>&1; }

# port_answers HOST PORT - does anything accept a connection there?
port_answers() {
  local host="$1" said
  case "$host" in
  0.0.0.0 | '') host=127.0.0.1 ;;
  :: | '[::]') host=::1 ;;
  esac
  host="${host#[}"
  host="${host%]}"
  said="$(bash_connects "$host" "$2")" && return 0
  case "$said" in
  *"No such file"*) ;; # a bash that was built without /dev/tcp
  *) return 1 ;;
  esac
  if command -v "$PYTHON" >/dev/null 2>&1; then
    "$PYTHON" -c 'import socket, sys; socket.create_connection(sys.argv[1:], 5)' "$host" "$2" 2>/dev/null
  else # its status 7: it could not connect; with a server that is silent it runs into its time limit, 28
    local status=0
    case "$host" in *:*) host="[$host]" ;; esac
    curl --silent --max-time 2 "telnet://$host:$2" </dev/null >/dev/null 2>&1 || status=$?
    [ "$status" -eq 0 ] || [ "$status" -eq 28 ]
  fi
}

# server_says PORT PATH KEY - one value of the JSON that a server has at PATH; nothing where it has none.
server_says() {
  "$PYTHON" -c 'import sys, urllib.request
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
sys.stdout.buffer.write(opener.open("http://127.0.0.1:%s%s" % tuple(sys.argv[1:]), timeout=10).read())' "$1" "$2" 2>/dev/null |
    json_value "$3" || true
}

# ------------------------------------------------------------------------------------------------------------
# For the launchers
# ------------------------------------------------------------------------------------------------------------

# launcher_arguments WHOSE ARG... - what a launcher takes: --help, or -- and then WHOSE own flags.
launcher_arguments() {
  case "${2:-}" in
  -h | --help) usage; exit 0 ;;
  -- | '') ;;
  *) die "unknown argument '$2': settings come from the environment, $1 own flags after --" ;;
  esac
}

# warn_if_exposed HOST - none of these servers asks for a password.
warn_if_exposed() {
  case "$1" in
  localhost | 127.* | ::1 | '[::1]') return 0 ;;
  esac
  printf '%s: WARNING: HOST=%s is not the loopback address: anyone who reaches this machine can use the server,\n' \
    "$SCRIPT_NAME" "$1" >&2
  printf '    for the endpoint is unauthenticated. Keep HOST=127.0.0.1 and come in through: ssh -N -L PORT:127.0.0.1:PORT\n' >&2
}

# refuse_busy_port HOST PORT - one server at a time.
refuse_busy_port() {
  if port_answers "$1" "$2"; then
    die "port $2 already answers: stop the server that is there, or set PORT to another one" 1
  fi
}

# open_log FILE PIDFILE - a new log; PIDFILE gets this process's id, which is the server's own once the launcher has
# replaced itself with it.
open_log() {
  { : >"$1"; } 2>/dev/null || die "cannot write LOGFILE '$1'"
  { printf '%s\n' "$$" >"$2"; } 2>/dev/null || die "cannot write PIDFILE '$2'"
}

# copy_output FILE - from here on everything printed is copied to FILE. tee outlives a Ctrl-C (-i), so that the
# server's last words are not lost.
copy_output() { exec > >(exec tee -i "$1") 2>&1; }

# mlx_python - the interpreter that has mlx-lm: MLX_VENV's, or the python3 on PATH.
mlx_python() {
  local python="${MLX_VENV:-$HOME/mlx/.venv}/bin/python"
  [ -x "$python" ] || python="$(command -v python3)" || return 1
  printf '%s\n' "$python"
}

# mlx_version - mlx-lm's version, or 'unknown'.
mlx_version() {
  local python
  python="$(mlx_python)" && "$python" -c 'from importlib.metadata import version; print(version("mlx-lm"))' 2>/dev/null ||
    printf 'unknown\n'
}

# ------------------------------------------------------------------------------------------------------------
# A server started and stopped by a step
# ------------------------------------------------------------------------------------------------------------

SERVER_PID=""

# start_server PORT LOG LAUNCHER [ARG...] - start a launcher in the background (its settings come from the
# environment) and wait until the server says that it is ready. The launcher becomes the server, so SERVER_PID is
# the server's own. What it says goes to LOG.
start_server() {
  local port="$1" log="$2" launcher="$3" said
  shift 3
  said="$SCRATCH/launch.txt"
  bash "$SCRIPTS_DIR/$launcher" "$@" </dev/null >"$said" 2>&1 &
  SERVER_PID=$!
  if wait_ready "$port" "$SERVER_PID"; then
    say "  ready (pid $SERVER_PID)"
    return 0
  fi
  # A launcher that refuses has said why on its own output; a server that failed says it in its log.
  tail -n 15 "$said" >&2
  stop_server
  name_symptom "$said" "$log"
  exit 1
}

# wait_ready PORT PID - poll /health until it answers 200, the process is gone, or READY_SECONDS have passed.
wait_ready() {
  attended "$PYTHON" -c 'import http.client, os, sys, time, urllib.request

port, pid, limit_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
end = time.monotonic() + limit_s
while time.monotonic() < end:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        sys.exit("the server ended before it was ready")
    try:
        with opener.open("http://127.0.0.1:%s/health" % port, timeout=5) as answer:
            if answer.status == 200:
                sys.exit(0)
    except (OSError, http.client.HTTPException):
        pass
    time.sleep(0.25)
sys.exit("the server was not ready after %g s" % limit_s)' "$1" "$2" "${READY_SECONDS:-1800}"
}

# stop_server - stop what start_server started; harmless otherwise.
stop_server() {
  local pid="$SERVER_PID"
  [ -n "$pid" ] || return 0
  SERVER_PID=""
  kill "$pid" 2>/dev/null || true
  if ! ends_within "$pid" "${STOP_SECONDS:-60}"; then
    printf '%s: the server (pid %s) did not stop in %s s: ending it\n' "$SCRIPT_NAME" "$pid" "${STOP_SECONDS:-60}" >&2
    kill -9 "$pid" 2>/dev/null || true
  fi
  wait "$pid" 2>/dev/null || true
}

# ends_within PID SECONDS - wait for a process to end; false where it still runs after that time.
ends_within() {
  local left=$(($2 * 5))
  while kill -0 "$1" 2>/dev/null; do
    [ "$left" -gt 0 ] || return 1
    left=$((left - 1))
    sleep 0.2
  done
}

# name_symptom FILE... - what the last words of a server that did not start point at.
name_symptom() {
  local file text=""
  for file in "$@"; do
    [ -f "$file" ] && text="$text $(tail -n 200 "$file")"
  done
  case "$text" in
  *"already answers"* | *"must be"* | *"cannot find"* | *"there is no"*)
    stop_here "the launcher refused to start" "its last line above says which setting" ;;
  *"No available memory for the cache blocks"* | *"To serve at least one request"*)
    stop_here "vLLM found no room for the cache" "raise the memory fraction (on track X by 0.2), or set the cache's bytes (KV_BYTES)" ;;
  *"less than desired"*)
    stop_here "vLLM found less free memory than the fraction asks for" "lower the fraction or free memory: stop the other server first" ;;
  *fp8*[Nn]"ot supported"* | *[Ii]"nvalid"*fp8* | *[Uu]"nsupported"*fp8*)
    stop_here "the engine refused an fp8 cache" "KV_DTYPE=auto with the same bytes gives half the tokens (40,960, 10.00x): say in the notebook that the pools differ" ;;
  *"failed to allocate"* | *"out of memory"* | *"OutOfMemory"*)
    stop_here "weights and pool do not fit into memory" "take the eight-bit tier (lab-env.sh with a smaller MEMORY_GB) or fewer slots" ;;
  *)
    stop_here "the server did not become ready" "read its last lines above; an end right after the line with the KV size means that pool and weights do not fit" ;;
  esac
}
