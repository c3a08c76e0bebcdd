# shellcheck shell=bash
# steps.sh - what the lab's steps share: how a step begins and ends, its loads, and what is checked after each.
# Sourced after lib.sh and servers.sh. No figure is judged here: load_test.py measures, summarise_load.py --check
# judges, serving_arithmetic.py predicts.

# ------------------------------------------------------------------------------------------------------------
# How a step begins and ends
# ------------------------------------------------------------------------------------------------------------

SCRATCH=""
CHILD_PID=""
INTERRUPTED=0
REPEAT=""

# begin_step - a private folder in SCRATCH, and whatever happens from here on, nothing is left running.
begin_step() {
  trap finish_step EXIT
  trap 'INTERRUPTED=1; exit 130' INT
  trap 'exit 143' TERM
  trap 'exit 129' HUP
  SCRATCH="$(mktemp -d "${TMPDIR:-/tmp}/load-lab.XXXXXX")" || die "cannot make a temporary folder" 1
}

# repeat_with ARG... - from here on a failure says that this script with these arguments repeats the part alone.
repeat_with() {
  local word
  REPEAT="bash $SCRIPTS_WORD/$SCRIPT_NAME"
  for word in "$@"; do
    REPEAT="$REPEAT $(shell_word "$word")"
  done
}

# attended COMMAND... - run it in the background and wait, so that bash acts on a signal at once, not only when the
# command has ended by itself. A command, not a function: CHILD_PID must be its own.
attended() {
  local status=0
  "$@" &
  CHILD_PID=$!
  wait "$CHILD_PID" || status=$?
  CHILD_PID=""
  return "$status"
}

# finish_step - end what runs, remove the folder, and say how to go on from a failure.
finish_step() {
  local status=$?
  trap '' INT TERM HUP
  if [ -n "$CHILD_PID" ]; then
    # A Ctrl-C in the terminal has reached the load too: it writes down what it has, and needs no second one.
    [ "$INTERRUPTED" -eq 1 ] && ends_within "$CHILD_PID" 5 || kill "$CHILD_PID" 2>/dev/null || true
    wait "$CHILD_PID" 2>/dev/null || true
  fi
  stop_server
  [ -z "$SCRATCH" ] || rm -rf "$SCRATCH"
  [ "$status" -eq 0 ] || [ -z "$REPEAT" ] || {
    [ "$status" -ne 130 ] || printf '%s: interrupted; what was measured until then is in %s\n' "$SCRIPT_NAME" "${LABBOOK:-the folder}" >&2
    printf '    this part alone, again: %s\n' "$REPEAT" >&2
  }
}

# need_server PORT LAUNCHER - the server of the other terminal must be there.
need_server() {
  port_answers 127.0.0.1 "$1" ||
    stop_here "nothing answers on port $1" "start the server in the other terminal and wait until it is ready: bash $SCRIPTS_WORD/$2"
}

# ------------------------------------------------------------------------------------------------------------
# Loads and what they left
# ------------------------------------------------------------------------------------------------------------

# shown_program NAME ARG... - run one of the three programs, its command shown first.
shown_program() {
  local name="$1"
  show_command python3 "$@"
  shift
  attended "$PYTHON" "$ROOT_DIR/$name" "$@"
}

# probe_endpoint PORT MODEL - one request by hand: the figures that every level divides by must be there.
probe_endpoint() {
  shown_program load_test.py --base-url "http://127.0.0.1:$1/v1" --model "$2" --wait-ready "${READY_SECONDS:-600}" --probe ||
    stop_here "the endpoint did not answer one request as it should" \
      "refused: a wrong port, or still loading; 404: a wrong model name; no tokens: a wrong template; see the server's log"
}

# run_load LABEL ARG... - one load, then the check of what it left under its label.
run_load() {
  local label="$1" status=0
  shift
  shown_program load_test.py --labbook "$LABBOOK" --label "$label" "$@" || status=$?
  [ "$status" -ne 130 ] || exit 130
  [ "$status" -eq 0 ] ||
    stop_here "the load did not run to its end (exit status $status)" \
      "connect: a wrong port, or a server that has stopped; no_tokens: a wrong model name or template; a context error: the prefix sets need 4,096 tokens per sequence; else the server's log"
  shown_program summarise_load.py --labbook "$LABBOOK" --check --label "$label" ||
    stop_here "$label is not as it should be" "each FAIL line above says what; mend it and measure again, the notebook stays as it is"
}

# run_summary ARG... - show and run summarise_load.py.
run_summary() {
  shown_program summarise_load.py --labbook "$LABBOOK" "$@" ||
    stop_here "summarise_load.py found something at fault (exit status $?)" "read its line above; the notebook stays as it is"
}

# has_label LABEL - has the notebook measured levels of it?
has_label() {
  [ -f "$LABBOOK" ] && program summarise_load.py --labbook "$LABBOOK" --label "$1" >/dev/null 2>&1
}

# ------------------------------------------------------------------------------------------------------------
# Models and logs
# ------------------------------------------------------------------------------------------------------------

# gguf_quant FILE - how its weights are stored: LLAMA_QUANT where that is set, else what the file says of itself.
gguf_quant() {
  if [ -n "${LLAMA_QUANT:-}" ]; then
    printf '%s\n' "$LLAMA_QUANT"
  else
    { program serving_arithmetic.py --gguf "$1" --json 2>/dev/null || true; } | json_value model.quant
  fi
}

# gib BYTES - in GiB, as serving_arithmetic.py wants it.
gib() { awk -v bytes="$1" 'BEGIN { printf "%.12g", bytes / 1073741824 }'; }

# check_log ENGINE LOG SLOTS CTX TYPE [BYTES [FLAG...]] - the prediction beside what the engine says it allocated;
# BYTES is the size that vLLM's cache was given, where it was given one.
check_log() {
  local engine="$1" log="$2" slots="$3" ctx="$4" type="$5" bytes="${6:-}" described status=0
  shift $(($# < 6 ? $# : 6))
  if [ "$engine" = vllm ]; then
    described=(--config "$(vllm_folder)/config.json" --block-size "${VLLM_BLOCK_SIZE:-16}")
    [ -z "$bytes" ] || described=("${described[@]}" --available-kv "$(gib "$bytes")")
  else
    described=(--gguf "${GGUF:-}")
    [ "${CPU_EXPECTED:-0}" != 1 ] || described=("${described[@]}" --cpu-expected)
  fi
  shown_program serving_arithmetic.py --check-log "$log" "$@" "${described[@]}" \
    --slots "$slots" --ctx "$ctx" --kv-type "$type" || status=$?
  case "$status" in
  0) ;;
  1)
    stop_here "the log does not agree with the prediction" \
      "the line above says where: another configuration than meant (compare what the launcher printed with lab.env), or a CPU build (where that is meant: CPU_EXPECTED=1)"
    ;;
  *) stop_here "the log could not be compared with the prediction" "the line above says why: lab.env must name the model, and the log must be the server's" ;;
  esac
}
