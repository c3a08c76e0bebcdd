#!/usr/bin/env bash
# Start llama-server in the foreground with a fixed number of slots, every setting on its command line.
#
#   bash scripts/serve-llama-parallel.sh
#   SLOTS=8 CACHE_TYPE=q8_0 bash scripts/serve-llama-parallel.sh
#   bash scripts/serve-llama-parallel.sh -- --threads 8      # what follows -- goes to llama-server as it is
#
# Settings, from the environment:
#   MODEL         GGUF file   (default $HOME/models/unsloth/Qwen3-8B-GGUF/Qwen3-8B-Q4_K_M.gguf)
#   LLAMA_BIN     llama-server, or the folder that holds it
#                 (default $HOME/llama.cpp/build/bin, else the one on PATH)
#   ALIAS         local-chat    model name that the API shows
#   HOST          127.0.0.1     address to listen on; there is no password: stay on loopback
#   PORT          8080
#   SLOTS         20            requests served at once
#   CTX_PER_SLOT  4096          tokens of context for each; llama-server is given the total
#   CACHE_TYPE    f16           type of cached keys and values: f16, q8_0, q4_0 ...
#   CACHE_RAM     0             host prompt cache in MiB (0 none, -1 no limit)
#   NGL           999           layers to put on the GPU
#   KV_UNIFIED    0             1: one cache shared by all slots, each may use all of it
#   PIDFILE       ./llama-server.pid    the server's own process id
#   LOGFILE       ./llama-server.log    its log, which stays visible here too
#
# Stop it with Ctrl-C, or from elsewhere: kill "$(cat llama-server.pid)"
# Exit: 2 when something is missing or a setting is wrong; else llama-server's own status.
set -euo pipefail

die() {
  printf 'serve-llama-parallel: %s\n' "$*" >&2
  exit 2
}

usage() {
  sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
}

# A whole number from $2 to $3 in the variable named $1. Ten digits are beyond any setting here and near what
# the shell can count to; a leading 0 would be read as octal.
check_number() {
  local value=${!1}
  [[ $value =~ ^-?(0|[1-9][0-9]{0,8})$ ]] || die "$1=$value is not a whole number"
  [ "$value" -ge "$2" ] || die "$1=$value is too small: use $2 or more"
  [ "$value" -le "$3" ] || die "$1=$value is too large: use $3 or less"
}

# Whether something accepts connections at $1, port $2. Not every bash is built with /dev/tcp, hence last.
port_answers() {
  local status=0
  if command -v curl >/dev/null 2>&1; then
    case $1 in
      *:*) set -- "[$1]" "$2" ;;
    esac
    curl --silent --output /dev/null --noproxy '*' --max-time 3 "http://$1:$2/" || status=$?
    [ "$status" -ne 6 ] && [ "$status" -ne 7 ] # no such host, connection refused
  elif command -v python3 >/dev/null 2>&1; then
    python3 -c 'import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 3)' "$1" "$2" 2>/dev/null
  else
    (: >"/dev/tcp/$1/$2") 2>/dev/null
  fi
}

case ${1-} in
  -h | --help)
    usage
    exit 0
    ;;
  --) shift ;;
  "") ;;
  *) die "unknown argument $1: flags for llama-server go after --, settings into the environment (see --help)" ;;
esac

MODEL=${MODEL:-$HOME/models/unsloth/Qwen3-8B-GGUF/Qwen3-8B-Q4_K_M.gguf}
ALIAS=${ALIAS:-local-chat}
HOST=${HOST:-127.0.0.1}
PORT=${PORT:-8080}
SLOTS=${SLOTS:-20}
CTX_PER_SLOT=${CTX_PER_SLOT:-4096}
CACHE_TYPE=${CACHE_TYPE:-f16}
CACHE_RAM=${CACHE_RAM:-0}
NGL=${NGL:-999}
KV_UNIFIED=${KV_UNIFIED:-0}
PIDFILE=${PIDFILE:-./llama-server.pid}
LOGFILE=${LOGFILE:-./llama-server.log}

# The settings, before anything is touched.
check_number PORT 1 65535
check_number SLOTS 1 65536
check_number CTX_PER_SLOT 1 99999999
check_number CACHE_RAM -1 999999999
check_number NGL -1 999999999
check_number KV_UNIFIED 0 1
[[ $CACHE_TYPE =~ ^[a-z0-9_]+$ ]] || die "CACHE_TYPE=$CACHE_TYPE is not a cache type: use f16, q8_0, q4_0 ..."
total_context=$((SLOTS * CTX_PER_SLOT))

# The binary.
if [ -n "${LLAMA_BIN:-}" ]; then
  server=$LLAMA_BIN
  [ ! -d "$server" ] || server=${server%/}/llama-server
elif [ -x "$HOME/llama.cpp/build/bin/llama-server" ]; then
  server=$HOME/llama.cpp/build/bin/llama-server
else
  server=$(command -v llama-server) ||
    die "no llama-server in \$HOME/llama.cpp/build/bin or on PATH: build it, or set LLAMA_BIN to it or its folder"
fi
[ -f "$server" ] || die "no llama-server at $server: set LLAMA_BIN to the binary or its folder"
[ -x "$server" ] || die "$server is not executable: chmod +x it, or set LLAMA_BIN"

# The model.
[ -f "$MODEL" ] || die "no model file at $MODEL: set MODEL to a GGUF file"
[ -r "$MODEL" ] || die "$MODEL cannot be read: check its permissions"
[ "$(head -c 4 "$MODEL" | tr -d '\0')" = GGUF ] ||
  die "$MODEL is not a GGUF file (it does not begin with GGUF): an unfinished download, or a pointer file?"

# One server at a time.
case $HOST in
  0.0.0.0) probe_host=127.0.0.1 ;;
  ::) probe_host=::1 ;;
  *) probe_host=$HOST ;;
esac
if port_answers "$probe_host" "$PORT"; then
  die "something already answers on $probe_host port $PORT: stop that server first, or choose another PORT"
fi
if [ -f "$PIDFILE" ]; then
  old_pid=$(tr -dc '0-9' <"$PIDFILE")
  if [ -n "$old_pid" ] && ps -p "$old_pid" -o command= 2>/dev/null | grep -qi llama; then
    die "$PIDFILE names process $old_pid, a llama server that still runs: stop it first, or choose another PIDFILE"
  fi
fi
{ : >>"$LOGFILE"; } 2>/dev/null || die "cannot write LOGFILE $LOGFILE: choose another"
{ echo $$ >"$PIDFILE"; } 2>/dev/null || die "cannot write PIDFILE $PIDFILE: choose another"

# Newer builds share one cache by default where the number of slots is automatic, and can be told not to.
version=$("$server" --version 2>&1 </dev/null | sed -n '/^version:/{s/^version: *//p;q;}') || true
help=$("$server" --help 2>&1 </dev/null) || true
kv_flag=""
if [ "$KV_UNIFIED" -eq 1 ]; then
  kv_flag=--kv-unified
elif [[ $help == *--no-kv-unified* ]]; then
  kv_flag=--no-kv-unified
fi

set -- "$server" \
  --model "$MODEL" \
  --alias "$ALIAS" \
  --host "$HOST" \
  --port "$PORT" \
  --ctx-size "$total_context" \
  --parallel "$SLOTS" \
  --n-gpu-layers "$NGL" \
  --cache-type-k "$CACHE_TYPE" \
  --cache-type-v "$CACHE_TYPE" \
  --cache-ram "$CACHE_RAM" \
  --cont-batching \
  --flash-attn on \
  --metrics \
  --jinja \
  --slots \
  --verbosity 4 \
  --log-file "$LOGFILE" \
  ${kv_flag:+"$kv_flag"} \
  "$@"

cat <<EOF
llama-server   $server
version        ${version:-unknown}
model          $MODEL
served as      $ALIAS at http://$HOST:$PORT/v1
slots          $SLOTS, $CTX_PER_SLOT tokens each, $total_context in total$([ "$KV_UNIFIED" -eq 0 ] || echo ', one shared cache')
KV cache       $CACHE_TYPE for keys and values, host prompt cache $CACHE_RAM MiB
GPU layers     $NGL
pid file       $PIDFILE ($$)
log            $LOGFILE
EOF
printf 'command       '
printf ' %q' "$@"
printf '\n'
case $HOST in
  127.* | ::1 | localhost) ;;
  *) printf 'serve-llama-parallel: warning: %s is not a loopback address, and this endpoint asks for no password\n' "$HOST" >&2 ;;
esac

exec "$@"
