#!/usr/bin/env bash
# admission.sh - vLLM's two limits: how many sequences it admits, and how much memory its cache gets.
#
#   bash scripts/admission.sh [PART...] [-- FLAG...]
#   bash scripts/admission.sh
#   bash scripts/admission.sh fractions -- --enforce-eager
#
# Parts (all of them, if none is named), each with a server started and stopped here, so the port must be free:
#   seqs8      at most 8 sequences at once and 20 requests in flight, the queue sampled: 8 running, 12 waiting,
#              almost all of the pool idle. Label vllm-seqs8, compared with vllm-baseline where that is recorded
#   fractions  lab.env's MEM_FRACTION_A, then B: the pool predicted from the memory that each log says is available
#              for the cache, against the tokens that it prints, and the shift between the two
# Records go to labbook.md in the current folder, which holds lab.env as well. Logs stay as vllm-seqs8.log,
# vllm-fraction-a.log and vllm-fraction-b.log. Flags after -- go to vLLM. On track S the container is started,
# elsewhere the vLLM of VLLM_VENV.
#
# The first thing not as predicted stops it, says what to do and how to repeat that part alone. Running it again
# measures again.
#
# From the environment: PORT [8000], LABBOOK [labbook.md], CTX [4096], KEEP_GOING=1 (go on after what was not as
# predicted), PYTHON [python3], and what the launcher reads.
# Exit: 1 when something is not as predicted, 2 for a wrong setting, 130 after Ctrl-C.
set -euo pipefail
here="$(CDPATH=''; f="$0"; while [ -L "$f" ]; do cd -P -- "$(dirname -- "$f")"; f="$(readlink -- "${f##*/}")"; done
  cd -P -- "$(dirname -- "$f")" && pwd)" # also through a symbolic link
# shellcheck source=lib.sh
. "$here/lib.sh"
# shellcheck source=servers.sh
. "$here/servers.sh"
# shellcheck source=steps.sh
. "$here/steps.sh"

parts=""
while [ $# -gt 0 ]; do
  case "$1" in
  -h | --help) usage; exit 0 ;;
  seqs8 | fractions) parts="$parts $1" ;;
  --) shift; break ;;
  *) die "unknown part '$1': seqs8 or fractions; vLLM's own flags after --" ;;
  esac
  shift
done
parts="${parts:- seqs8 fractions} "

need_python
load_lab_env HOST_DESC VLLM_MODEL VLLM_QUANT VLLM_KV_DTYPE VLLM_KV_BYTES MEM_FRACTION_A MEM_FRACTION_B
PORT="${PORT:-8000}"
CTX="${CTX:-4096}"
LABBOOK="${LABBOOK:-labbook.md}"
need_port PORT "$PORT"
need_number CTX "$CTX"
need_fraction MEM_FRACTION_A "$MEM_FRACTION_A"
need_fraction MEM_FRACTION_B "$MEM_FRACTION_B"

launcher="$(vllm_launcher)"
[ -z "${VLLM_IMAGE:-}" ] || export IMAGE="$VLLM_IMAGE"
export MODEL="$VLLM_MODEL" KV_DTYPE="$VLLM_KV_DTYPE" PORT CTX
wanted() { case "$parts" in *" $1 "*) return 0 ;; *) return 1 ;; esac; }

begin_step
say "admission.sh:${parts}with $launcher on port $PORT, records in $LABBOOK"
refuse_busy_port 127.0.0.1 "$PORT"

# ------------------------------------------------------------------------------------------------------------
# seqs8: a queue in front of an idle pool
# ------------------------------------------------------------------------------------------------------------

# saw WHAT PEAK PREDICTED ADVICE - a peak of the queue, as sampled from the server.
saw() {
  say "  $1: ${2:-not sampled}, predicted $3"
  [ "$2" = "$3" ] || stop_here "at most ${2:-none that could be sampled} of the requests were seen $1, predicted $3" "$4"
}

if wanted seqs8; then
  repeat_with seqs8 ${1:+-- "$@"}
  step "vllm-seqs8: at most 8 sequences at once, 20 requests in flight"
  say "predicted: 8 running, 12 waiting, almost all of the pool idle; a longer TTFT, a shorter TPOT than the baseline's"
  log=./vllm-seqs8.log
  MAX_SEQS=8 KV_BYTES="$VLLM_KV_BYTES" LOGFILE="$log" PIDFILE=./vllm-seqs8.pid start_server "$PORT" "$log" "$launcher" \
    -- "$@"
  check_log vllm "$log" 8 "$CTX" "$KV_DTYPE" "$VLLM_KV_BYTES"
  run_load vllm-seqs8 --base-url "http://127.0.0.1:$PORT/v1" --model local-chat --engine vllm \
    --engine-version "$(server_says "$PORT" /version version)" --host-desc "$HOST_DESC" --quant "$VLLM_QUANT" \
    --context-length "$CTX" --server-slots 8 --prompt-set mixed --concurrency 20 --requests 80 --max-tokens 128 \
    --sample 0.5 --wait-ready "${READY_SECONDS:-600}"
  stop_server
  rm -f ./vllm-seqs8.pid
  seen="$SCRATCH/seqs8.json"
  program summarise_load.py --labbook "$LABBOOK" --label vllm-seqs8 --json >"$seen" 2>/dev/null || true
  saw running "$(json_value levels.0.server.peak_running <"$seen")" 8 "compare --max-num-seqs in the log with 8"
  saw waiting "$(json_value levels.0.server.peak_waiting <"$seen")" 12 "look at http://127.0.0.1:$PORT/metrics by hand, or send more requests"
  say "  most of the pool in use: $(json_value levels.0.server.peak_cache_usage <"$seen") of 1"
  if has_label vllm-baseline; then
    run_summary --compare vllm-baseline vllm-seqs8
  else
    say "  not compared: there is no vllm-baseline in '$LABBOOK'"
  fi
  say "write down: running, waiting and the share of the pool in use, beside the predicted"
fi

# ------------------------------------------------------------------------------------------------------------
# fractions: the pool is what is left after weights and buffers
# ------------------------------------------------------------------------------------------------------------

if wanted fractions; then
  repeat_with fractions ${1:+-- "$@"}
  for letter in a b; do
    [ "$letter" = a ] && fraction="$MEM_FRACTION_A" || fraction="$MEM_FRACTION_B"
    step "memory fraction $fraction"
    log="./vllm-fraction-$letter.log"
    MAX_SEQS=20 KV_BYTES="" MEM_FRACTION="$fraction" LOGFILE="$log" PIDFILE="./vllm-fraction-$letter.pid" \
      start_server "$PORT" "$log" "$launcher" -- "$@"
    stop_server
    rm -f "./vllm-fraction-$letter.pid"
  done
  step "both pools, and the shift that the two fractions should give"
  check_log vllm "./vllm-fraction-a.log" 20 "$CTX" "$KV_DTYPE" "" ./vllm-fraction-b.log --fractions "$MEM_FRACTION_A,$MEM_FRACTION_B"
  say "write down: the tokens in the pool at each fraction, and predicted and logged shift"
fi

step "done"
say "next: bash $SCRIPTS_WORD/cleanup.sh"
