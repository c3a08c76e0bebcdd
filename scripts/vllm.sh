# shellcheck shell=bash
# vllm.sh - the settings of vLLM that both of its launchers take, their checks, and the flags they become. Sourced
# after lib.sh and servers.sh. The launchers add where vLLM runs and where its model lies.

SERVED_NAME="${SERVED_NAME:-local-chat}"
PORT="${PORT:-8000}"
CTX="${CTX:-4096}"
MAX_SEQS="${MAX_SEQS:-20}"
KV_BYTES="${KV_BYTES:-}"
MEM_FRACTION="${MEM_FRACTION:-0.90}"
KV_DTYPE="${KV_DTYPE:-auto}"
PREFIX_CACHING="${PREFIX_CACHING:-on}"
TP_SIZE="${TP_SIZE:-1}"
LOGFILE="${LOGFILE:-./vllm-server.log}"
PIDFILE="${PIDFILE:-./vllm-server.pid}"

need_port PORT "$PORT"
need_number CTX "$CTX"
need_number MAX_SEQS "$MAX_SEQS"
need_number TP_SIZE "$TP_SIZE"
if [ -n "$KV_BYTES" ]; then
  need_number KV_BYTES "$KV_BYTES"
  memory=(--kv-cache-memory-bytes "$KV_BYTES")
  cache="$KV_BYTES bytes, type $KV_DTYPE"
else
  need_fraction MEM_FRACTION "$MEM_FRACTION"
  memory=(--gpu-memory-utilization "$MEM_FRACTION")
  cache="what is left of a memory fraction of $MEM_FRACTION, type $KV_DTYPE"
fi
case "$PREFIX_CACHING" in
on) caching=--enable-prefix-caching ;;
off) caching=--no-enable-prefix-caching ;;
*) die "PREFIX_CACHING must be on or off, not '$PREFIX_CACHING'" ;;
esac

# shellcheck disable=SC2034  # the launchers use it
vllm_flags=(--max-model-len "$CTX" --max-num-seqs "$MAX_SEQS" "${memory[@]}" --kv-cache-dtype "$KV_DTYPE"
  "$caching" --tensor-parallel-size "$TP_SIZE" --enable-prompt-tokens-details)

# show_vllm_settings - as they will be.
show_vllm_settings() {
  show "context per sequence" "$CTX"
  show "sequences at once" "$MAX_SEQS"
  show "cache" "$cache"
  show "prefix caching" "$PREFIX_CACHING"
  show "tensor parallel" "$TP_SIZE"
  show "log, pid file" "$LOGFILE, $PIDFILE"
}
