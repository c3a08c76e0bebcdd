# shellcheck shell=bash
# lib.sh - what every script begins with: its help, its messages, the checks of its settings, and the three programs.
#
# Sourced by all; does nothing by itself. servers.sh knows ports and servers, steps.sh the lab's steps, vllm.sh what
# both launchers of vLLM set, models.sh what the lab downloads. Everything runs under bash 3.2 (macOS) and with GNU
# or BSD tools. Exit status 2 means a wrong setting, 1 that something was not as predicted.

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
# shellcheck disable=SC2034  # the scripts use it
SCRIPTS_WORD="$(shell_word "$SCRIPTS_DIR")"

# ------------------------------------------------------------------------------------------------------------
# Messages
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

# ------------------------------------------------------------------------------------------------------------
# Settings
# ------------------------------------------------------------------------------------------------------------

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
# The programs and their answers
# ------------------------------------------------------------------------------------------------------------

# program NAME ARG... - run one of the three programs.
program() {
  local name="$1"
  shift
  "$PYTHON" "$ROOT_DIR/$name" "$@"
}

# json_value PATH - one value of the JSON on standard input, as in levels.0.tpot_s.p50; nothing where it is null,
# absent, or the input is no JSON.
json_value() {
  "$PYTHON" -c 'import json, sys
try:
    value = json.load(sys.stdin)
    for key in sys.argv[1].split("."):
        value = value[int(key)] if isinstance(value, list) else value[key]
except (ValueError, LookupError, TypeError):
    value = None
if value is not None:
    print(value if isinstance(value, str) else json.dumps(value))' "$1"
}

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

# vllm_folder - the checkpoint's folder on this machine; VLLM_MODEL is what the container sees on track S.
vllm_folder() {
  if [ -n "${VLLM_IMAGE:-}" ]; then
    printf '%s\n' "${MODELS_DIR:-$HOME/models}${VLLM_MODEL#/models}"
  else
    printf '%s\n' "$VLLM_MODEL"
  fi
}

# vllm_launcher - which of the two this track uses.
vllm_launcher() {
  if [ -n "${VLLM_IMAGE:-}" ]; then echo serve-vllm-container.sh; else echo serve-vllm-native.sh; fi
}
