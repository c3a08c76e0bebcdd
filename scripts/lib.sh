# shellcheck shell=bash
# lib.sh - what the lab's scripts share. It is sourced by them and does nothing by itself.
#
# Everything here runs under bash 3.2 (macOS) and with GNU or BSD tools. Messages go to standard error with the
# script's name in front; exit status 2 means a wrong setting, 1 that something was not as predicted.

SCRIPTS_DIR="$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
ROOT_DIR="$(dirname -- "$SCRIPTS_DIR")"
SCRIPT_NAME="$(basename -- "$0")"
PYTHON="${PYTHON:-python3}"

# For ${text//$QUOTE/$QUOTED_QUOTE}: written out inside double quotes, bash 3.2 and 5 read it differently.
QUOTE="'"
QUOTED_QUOTE="'\\''"

# shell_word TEXT - as one word that can be pasted into a shell.
shell_word() {
  case "$1" in
  '' | *[!A-Za-z0-9_./:=,@%+-]*) printf "'%s'" "${1//$QUOTE/$QUOTED_QUOTE}" ;;
  *) printf '%s' "$1" ;;
  esac
}

# For hints: bash $SCRIPTS_WORD/sweep.sh
# shellcheck disable=SC2034  # the steps use it
SCRIPTS_WORD="$(shell_word "$SCRIPTS_DIR")"

# ------------------------------------------------------------------------------------------------------------
# Messages and settings
# ------------------------------------------------------------------------------------------------------------

# usage - print the header comment of the script that is running: it is the help text.
usage() {
  awk 'NR == 1 { next } /^#/ { sub(/^# ?/, ""); print; next } { exit }' "$0"
}

# die MESSAGE [STATUS] - one line on standard error, then the end. Status 2 unless given: a setting is wrong.
die() {
  printf '%s: %s\n' "$SCRIPT_NAME" "$1" >&2
  exit "${2:-2}"
}

# stop_here WHAT ADVICE - something is not as predicted: say what and what to do, and stop with status 1.
# KEEP_GOING=1 in the environment turns the stop into a remark.
stop_here() {
  printf '%s: NOT AS PREDICTED: %s\n' "$SCRIPT_NAME" "$1" >&2
  printf '    what to do: %s\n' "$2" >&2
  [ "${KEEP_GOING:-0}" = 1 ] || exit 1
  printf '    KEEP_GOING=1: going on all the same\n' >&2
}

say() { printf '%s\n' "$*"; }

# step TEXT - the heading of one step.
step() { printf '\n== %s\n' "$*"; }

# show NAME VALUE - one setting, aligned.
show() { printf '  %-22s %s\n' "$1" "$2"; }

# show_command WORD... - a command as it could be typed again.
show_command() {
  local word
  printf '  $'
  for word in "$@"; do
    printf ' %s' "$(shell_word "$word")"
  done
  printf '\n'
}

# launcher_arguments WHOSE ARG... - what a launcher takes: --help, or -- and then WHOSE own flags.
launcher_arguments() {
  case "${2:-}" in
  -h | --help) usage; exit 0 ;;
  -- | '') ;;
  *) die "unknown argument '$2': settings come from the environment, $1 own flags after --" ;;
  esac
}

# need COMMAND WHY - refuse when a command is missing.
need() { command -v "$1" >/dev/null 2>&1 || die "cannot find '$1', which is needed $2"; }

# need_number NAME VALUE [LOWEST] - refuse anything but a whole number of at least LOWEST (1).
need_number() {
  case "$2" in
  '' | *[!0-9]*) die "$1 must be a whole number, not '$2'" ;;
  esac
  # Seventeen digits fit the shell's integers with room to spare.
  [ "${#2}" -le 17 ] || die "$1 is too large: '$2'"
  [ "$2" -ge "${3:-1}" ] || die "$1 must be at least ${3:-1}, not '$2'"
}

# need_port NAME VALUE - refuse anything but a TCP port.
need_port() {
  need_number "$1" "$2"
  [ "$2" -le 65535 ] || die "$1 must be a port from 1 to 65535, not '$2'"
}

# need_fraction NAME VALUE - refuse anything but a decimal number above 0 and at most 1.
need_fraction() {
  local form='^(0?\.[0-9]+|1|1\.0+)$'
  [[ "$2" =~ $form ]] || die "$1 must be a fraction above 0 and at most 1, not '$2'"
  [[ "$2" =~ [1-9] ]] || die "$1 must be above 0, not '$2'"
}

need_python() {
  need "$PYTHON" "to run the load generator (PYTHON names another interpreter)"
  "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 9))' ||
    die "'$PYTHON' is older than Python 3.9: set PYTHON to a newer one"
}

# ------------------------------------------------------------------------------------------------------------
# Ports, processes and logs
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

# is_loopback HOST
is_loopback() {
  case "$1" in
  localhost | 127.* | ::1 | '[::1]') return 0 ;;
  *) return 1 ;;
  esac
}

# warn_if_exposed HOST - none of these servers asks for a password.
warn_if_exposed() {
  is_loopback "$1" && return 0
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

# log_to FILE PIDFILE - from here on everything printed is copied to FILE; PIDFILE gets this process's id, which
# is the server's own once the launcher has replaced itself with it. tee outlives a Ctrl-C (-i), so that the
# server's last words are not lost.
log_to() {
  : >"$1" || die "cannot write the log '$1'"
  printf '%s\n' "$$" >"$2" || die "cannot write the pid file '$2'"
  exec > >(exec tee -i "$1") 2>&1
}

# ------------------------------------------------------------------------------------------------------------
# The lab's steps: settings, programs, loads
# ------------------------------------------------------------------------------------------------------------

# load_lab_env NAME... - read ./lab.env and make sure that it sets these names.
load_lab_env() {
  local name
  [ -f lab.env ] || die "there is no lab.env in '$PWD': run 'bash $SCRIPTS_WORD/lab-env.sh TRACK' here first"
  # shellcheck source=/dev/null
  . ./lab.env
  for name in "$@"; do
    [ -n "${!name:-}" ] || die "lab.env does not set $name: this step is not for track ${TRACK:-unknown}, or the file is older"
  done
}

# in_notebook LABEL - is there a record of that label in LABBOOK?
in_notebook() {
  [ -f "$LABBOOK" ] && program summarise_load.py --labbook "$LABBOOK" --list 2>/dev/null | awk -v label="$1" \
    '$1 == label { found = 1 } END { exit !found }'
}

# gguf_quant FILE - how the weights are stored: LLAMA_QUANT where it is set, else what the file says of itself, else
# what its name says; nothing where none of them tells.
gguf_quant() {
  if [ -n "${LLAMA_QUANT:-}" ]; then
    printf '%s\n' "$LLAMA_QUANT"
    return 0
  fi
  { program serving_arithmetic.py --gguf "$1" --json 2>/dev/null || true; } | "$PYTHON" -c 'import json, re, sys
try:
    quant = json.load(sys.stdin)["model"]["quant"]
except (ValueError, KeyError, TypeError):
    quant = None
named = re.search(r"[-._](I?Q[0-9]\w*|B?F16|F32|MXFP4\w*)(-[0-9]{5}-of-[0-9]{5})?[.]gguf$", sys.argv[1], re.I)
print(quant or (named[1].upper() if named else ""))' "$1"
}

# program NAME ARG... - run one of the three programs.
program() {
  local name="$1"
  shift
  "$PYTHON" "$ROOT_DIR/$name" "$@"
}

# scratch_folder - make a private folder and name it in SCRATCH. clean_up removes it: set that as the EXIT trap.
scratch_folder() {
  SCRATCH="$(mktemp -d "${TMPDIR:-/tmp}/load-lab.XXXXXX")" || die "cannot make a temporary folder" 1
}

# run_load ARG... - show and run one load, and leave its level records in $SCRATCH/levels.jsonl.
run_load() {
  show_command python3 load_test.py "$@"
  program load_test.py --json "$@" >"$SCRATCH/levels.jsonl" || {
    stop_here "the load did not run to its end (exit status $?)" "$(load_advice "$(cat "$SCRATCH/levels.jsonl")")"
    return 0
  }
}

# run_summary ARG... - show and run summarise_load.py.
run_summary() {
  show_command python3 summarise_load.py "$@"
  program summarise_load.py "$@" ||
    stop_here "summarise_load.py found something at fault (exit status $?)" "read its line above; the notebook stays as it is"
}

# probe_endpoint PORT MODEL - one request by hand: the figures that every level divides by must be there.
probe_endpoint() {
  show_command python3 load_test.py --base-url "http://127.0.0.1:$1/v1" --model "$2" --wait-ready "${READY_SECONDS:-600}" --probe
  program load_test.py --base-url "http://127.0.0.1:$1/v1" --model "$2" --wait-ready "${READY_SECONDS:-600}" --probe ||
    stop_here "the endpoint did not answer one request as it should" \
      "refused: a wrong port, or still loading; 404: a wrong model name; no tokens: a wrong template; see the server's log"
}

# vllm_folder - the checkpoint's folder on this machine; VLLM_MODEL is what the container sees on track S.
vllm_folder() {
  if [ -n "${VLLM_IMAGE:-}" ]; then
    printf '%s\n' "${MODELS_DIR:-$HOME/models}${VLLM_MODEL#/models}"
  else
    printf '%s\n' "$VLLM_MODEL"
  fi
}

# check_log ENGINE LOG SLOTS CTX TYPE [BYTES] - the prediction beside what the engine says it allocated; BYTES is
# the size that vLLM's cache was given, where it was given one.
check_log() {
  local described=(--gguf "${GGUF:-}") sized=()
  if [ "$1" = vllm ]; then
    described=(--config "$(vllm_folder)/config.json" --block-size "${VLLM_BLOCK_SIZE:-16}")
    [ -z "${6:-}" ] || sized=(--available-kv "$(awk -v bytes="$6" 'BEGIN { printf "%.12g", bytes / 1073741824 }')")
  fi
  described=(--check-log "$2" "${described[@]}" --slots "$3" --ctx "$4" --kv-type "$5" ${sized[@]+"${sized[@]}"})
  show_command python3 serving_arithmetic.py "${described[@]}"
  program serving_arithmetic.py "${described[@]}" && return 0
  if [ "$1" = llama ]; then
    stop_here "llama-server allocated something else than predicted" \
      "it runs another configuration than intended: compare SLOTS, CTX_PER_SLOT and CACHE_TYPE in what the launcher printed with lab.env"
  else
    stop_here "vLLM made another pool than predicted" \
      "fewer tokens with the bytes set: another block size or cache type; half of them: auto where fp8 was predicted"
  fi
}

# check_server_log ENGINE CTX - check_log for the server of the other terminal, if its log lies here.
check_server_log() {
  case "$1" in
  llama)
    [ -f llama-server.log ] || return 0
    step "what llama-server allocated"
    if grep -q 'offloaded 0/' llama-server.log; then
      say "  note: offloaded 0 layers: this is a CPU build of llama-server"
    fi
    check_log llama llama-server.log "$SLOTS" "$2" "$KV_TYPE"
    ;;
  vllm)
    [ -f vllm-server.log ] && [ -f "$(vllm_folder)/config.json" ] || return 0
    step "what vLLM allocated"
    check_log vllm vllm-server.log "${MAX_SEQS:-20}" "$2" "$VLLM_KV_DTYPE" "$VLLM_KV_BYTES"
    ;;
  esac
}

# vllm_version PORT - what the server at that port says it is, or 'unknown'.
vllm_version() {
  "$PYTHON" -c 'import json, sys, urllib.request
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
print(json.load(opener.open("http://127.0.0.1:%s/version" % sys.argv[1], timeout=10))["version"])' "$1" 2>/dev/null ||
    printf 'unknown\n'
}

# mlx_python - the interpreter that has mlx-lm: MLX_VENV's, or the python3 on PATH.
mlx_python() {
  local python="${MLX_VENV:-$HOME/mlx/.venv}/bin/python"
  [ -x "$python" ] || python="$(command -v python3)" || return 1
  printf '%s\n' "$python"
}

# mlx_version - mlx-lm's version, or 'unknown'.
mlx_version() {
  local python
  python="$(mlx_python)" || return 0
  "$python" -c 'from importlib.metadata import version; print(version("mlx-lm"))' 2>/dev/null || printf 'unknown\n'
}

# load_advice RECORDS - what the error class in the records, or the server's own words there, point at. Every record
# has a field context_length and a context_per_slot, so "context" alone says nothing.
load_advice() {
  case "$1" in
  *'"connect"'*) printf '%s' "the connection was refused: a wrong port, a server that has stopped, or one still loading" ;;
  *'"no_tokens"'*) printf '%s' "nothing but no_tokens: a wrong model name or chat template; compare with what the server lists at /v1/models" ;;
  *exceed_context* | *'context size'* | *'context length'*)
    printf '%s' "a context error: the prefix sets need 4,096 tokens per sequence; read what the server says it gives each one" ;;
  *) printf '%s' "read the error above and the server's log" ;;
  esac
}

# check_levels LEAST_CACHED MOST_CACHED - the four checks on the levels that just ran, and the cached share of
# the prompt against limits in per cent ('-' for none): no failures, tokens from usage, every answer ended by its
# length, in flight close to the concurrency.
check_levels() {
  local findings="$SCRATCH/findings.txt" kind what advice stops=0
  "$PYTHON" - "$SCRATCH/levels.jsonl" "$1" "$2" >"$findings" <<'PYTHON'
import json, sys

path, least, most = sys.argv[1:]


def finding(kind, what, advice):
    print("\t".join((kind, what, advice)))


with open(path, encoding="utf-8") as lines:
    levels = [record for record in map(json.loads, lines) if "concurrency" in record]
if not levels:
    finding("stop", "the load left no level record", "read what load_test.py printed above")
for level in levels:
    c, done, failed = level["concurrency"], level["completed"], level["failed"]
    at = "c=%d: " % c
    if failed:
        finding("stop", at + "%d of %d requests failed: %s" % (failed, failed + done, level.get("first_error")),
                "no_tokens is a wrong model name or template; connect is a wrong port or a server still loading; a "
                "context error means fewer than 4,096 tokens per sequence")
    if level["token_counts"] != "usage":
        finding("stop", at + "tokens counted from %s, not from usage" % json.dumps(level["token_counts"]),
                "the figures divide by this count: use a server version that sends usage with streams")
    reasons = level.get("finish_reasons") or {}
    if done and set(reasons) != {"length"}:
        finding("note", at + "not every answer ran to its length: %s" % json.dumps(reasons),
                "shorter answers raise requests/s: compare tokens/s, not requests/s")
    server = level.get("server") or {}
    for ours, theirs in (("server_slots", "slots"), ("context_length", "context_per_slot")):
        if server.get(theirs) and level.get(ours) and server[theirs] != level[ours]:
            finding("stop", at + "the server says %s = %d, lab.env and CTX say %d" % (theirs, server[theirs], level[ours]),
                    "it runs another configuration than the record would claim: restart it with the settings of lab.env")
    flight = level.get("mean_in_flight")
    if c > 1 and flight is not None and flight < 0.75 * c:
        finding("stop", at + "%.1f requests in flight on average where about %d were meant" % (flight, c),
                "suspect the client: run it on a second machine through an SSH tunnel (ssh -N -L PORT:127.0.0.1:PORT)"
                ", or give the level more requests")
    cached, prompt = level.get("cached_tokens_mean"), level.get("prompt_tokens_mean")
    if "-" in (least, most) and least == most:
        continue
    if cached is None or not prompt:
        finding("stop" if least != "-" else "note", at + "the server reports no cached tokens",
                "on vLLM start it with --enable-prompt-tokens-details, as the launchers do")
        continue
    share = 100.0 * cached / prompt
    if least != "-" and share <= float(least):
        finding("stop", at + "%.1f %% of the prompt came from the cache, predicted above %s %%" % (share, least),
                "prefix caching is off, or something ahead of the preamble varies: one variable first line destroys "
                "all reuse")
    if most != "-" and share >= float(most):
        finding("stop", at + "%.1f %% of the control's prompt came from the cache, predicted below %s %%" % (share, most),
                "the control must share nothing: look for a repeated --seed")
rates = {level["concurrency"]: level.get("output_tokens_per_s") for level in levels}
if rates.get(10) and rates.get(20) and rates[20] < rates[10]:
    finding("note", "throughput at 20 (%.1f tok/s) is below that at 10 (%.1f)" % (rates[20], rates[10]),
            "past saturation; on vLLM the preemption counter confirms it")
PYTHON
  while IFS="$(printf '\t')" read -r kind what advice; do
    if [ "$kind" = stop ]; then
      stops=$((stops + 1))
      stop_here "$what" "$advice"
    else
      printf '  note: %s (%s)\n' "$what" "$advice"
    fi
  done <"$findings"
  [ "$stops" -gt 0 ] || say "  checked: no failures, tokens from usage, in flight close to the concurrency"
}

# ------------------------------------------------------------------------------------------------------------
# A server started and stopped by a step
# ------------------------------------------------------------------------------------------------------------

SERVER_PID=""
WAITER_PID="" # of wait_ready, while it waits

# stop_server - stop what start_server started; harmless otherwise.
stop_server() {
  local pid="$SERVER_PID" waited=0
  [ -n "$pid" ] || return 0
  SERVER_PID=""
  kill "$pid" 2>/dev/null || true
  while kill -0 "$pid" 2>/dev/null; do
    if [ "$waited" -ge $((${STOP_SECONDS:-60} * 5)) ]; then
      printf '%s: the server (pid %s) did not stop in %s s: ending it\n' "$SCRIPT_NAME" "$pid" "${STOP_SECONDS:-60}" >&2
      kill -9 "$pid" 2>/dev/null || true
      break
    fi
    sleep 0.2
    waited=$((waited + 1))
  done
  wait "$pid" 2>/dev/null || true
}

# clean_up - what the steps set as their EXIT trap.
clean_up() {
  [ -z "$WAITER_PID" ] || kill "$WAITER_PID" 2>/dev/null || true
  stop_server
  [ -z "${SCRATCH:-}" ] || rm -rf "$SCRATCH"
}

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
  server_symptom "$said" "$log"
  exit 1
}

# wait_ready PORT PID - poll /health until it answers 200, the process is gone, or READY_SECONDS have passed. In
# the background, so that bash acts on a signal at once; Ctrl-C ends the script with 130, and clean_up what runs.
wait_ready() {
  "$PYTHON" - "$1" "$2" "${READY_SECONDS:-1800}" <<'PYTHON' &
import http.client, os, sys, time, urllib.request

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
sys.exit("the server was not ready after %g s" % limit_s)
PYTHON
  local status=0
  WAITER_PID=$!
  wait "$WAITER_PID" || status=$?
  [ "$status" -ne 130 ] || exit 130
  WAITER_PID=""
  return "$status"
}

# server_symptom FILE... - name what the last words of a server that did not start point at.
server_symptom() {
  local file text=""
  for file in "$@"; do
    [ -f "$file" ] && text="$text $(tail -n 200 "$file")"
  done
  case "$text" in
  *"already answers"* | *"must be"* | *"cannot find"* | *"there is no"* | *"no container image"*)
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
