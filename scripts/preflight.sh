#!/usr/bin/env bash
# preflight.sh - is everything there that the lab needs? It only looks: nothing is started or changed.
#
#   bash scripts/preflight.sh
#
# In the lab's working folder, with the lab.env that lab-env.sh wrote. It looks at Python, the model files and their
# sizes, the disk, llama-server and the GPU that it sees, the second engine, the ports 8080, 8000 and 8081, and
# the free memory against the predicted weights and pool of each engine (they run one at a time). One line each:
# "ok", "FAIL", or "note" for what does not stop the lab (on track X the second engine may be missing).
# All lines are shown, and what to do below each FAIL, so that one round mends everything.
#
# From the environment: CTX [4096], MODELS_DIR [~/models], LLAMA_PORT [8080], VLLM_PORT [8000], MLX_PORT [8081],
# DOCKER [docker], KEEP_GOING=1 (exit status 0 all the same), PYTHON [python3].
# Exit: 1 after a FAIL, 2 for a wrong setting.
set -euo pipefail
here="$(CDPATH=''; f="$0"; while [ -L "$f" ]; do cd -P -- "$(dirname -- "$f")"; f="$(readlink -- "${f##*/}")"; done
  cd -P -- "$(dirname -- "$f")" && pwd)" # also through a symbolic link
# shellcheck source=lib.sh
. "$here/lib.sh"
# shellcheck source=servers.sh
. "$here/servers.sh"
# shellcheck source=models.sh
. "$here/models.sh"

case "${1:-}" in
-h | --help) usage; exit 0 ;;
'') ;;
*) die "unknown argument '$1'" ;;
esac

need_python
load_lab_env TRACK MEMORY_GB GGUF LLAMA_BIN SLOTS KV_TYPE
CTX="${CTX:-4096}"
MODELS_DIR="${MODELS_DIR:-$HOME/models}"
LLAMA_PORT="${LLAMA_PORT:-8080}"
VLLM_PORT="${VLLM_PORT:-8000}"
MLX_PORT="${MLX_PORT:-8081}"
DOCKER="${DOCKER:-docker}"
need_number CTX "$CTX"
need_number SLOTS "$SLOTS"

first_fail=""
first_advice=""

pass() { printf '  %-5s %-16s %s\n' ok "$1" "$2"; }
note() { printf '  %-5s %-16s %s\n' note "$1" "$2"; }

# fail NAME WHAT ADVICE
fail() {
  printf '  %-5s %-16s %s\n' FAIL "$1" "$2"
  printf '  %-5s %-16s what to do: %s\n' '' '' "$3"
  [ -n "$first_fail" ] || { first_fail="$1: $2" first_advice="$3"; }
}

# missing NAME WHAT ADVICE - of the second engine: on track X it may not run at all.
missing() {
  if [ "$TRACK" = X ]; then
    note "$1" "$2; where vLLM does not run, say so in the notebook"
  else
    fail "$@"
  fi
}

to_fetch=0 # bytes of models that are not here yet

# look_at_model NAME PATH REPORT - a file or a checkpoint's folder; REPORT is fail or missing.
look_at_model() {
  local fault known
  fault="$(model_fault "$2")"
  known="$(known_bytes "$2")"
  if [ -n "$fault" ]; then
    [ -e "$2" ] || to_fetch=$((to_fetch + known))
    "$3" "$1" "$fault" "bash $SCRIPTS_WORD/fetch-models.sh, or set its place in lab.env"
  elif [ "$known" -eq 0 ]; then
    pass "$1" "$(with_commas "$(bytes_in "$2")") bytes in '$2' (not one of the lab's own models: no size to compare with)"
  else
    pass "$1" "$(with_commas "$(bytes_in "$2")") bytes in '$2'"
  fi
}

# free_memory_gib - what an engine could take now, or nothing where that is not known: what llama-server sees free on
# the device (X, whose GPU may take only a part of the machine's memory), the GPU's free memory (N), the machine's.
free_memory_gib() {
  case "$TRACK" in
  X) printf '%s\n' "$devices" | sed -n 's/.*[ (]\([0-9]*\) MiB free.*/\1/p' | awk 'NR == 1 { printf "%.2f", $1 / 1024 }' ;;
  N) nvidia-smi --query-gpu=memory.free --format=csv,noheader,nounits 2>/dev/null |
    awk 'NR == 1 && $1 ~ /^[0-9]+$/ { printf "%.2f", $1 / 1024 }' || true ;;
  *)
    if [ -r /proc/meminfo ]; then
      awk '$1 == "MemAvailable:" { printf "%.2f", $2 / 1048576 }' /proc/meminfo
    else
      vm_stat 2>/dev/null | awk '
        /page size of/ { for (i = 1; i <= NF; i++) if ($i ~ /^[0-9]+$/) page = $i }
        /^Pages (free|inactive|speculative|purgeable):/ { sub(/\.$/, "", $NF); pages += $NF }
        END { if (page) printf "%.2f", pages * page / 1073741824 }' || true
    fi
    ;;
  esac
}

# look_at_memory NAME REPORT ADVICE ARG... - do weights and pool, as predicted with ARG..., fit the free memory?
look_at_memory() {
  local name="$1" report="$2" advice="$3" answer fits
  shift 3
  if [ -z "$free" ]; then
    note "$name" "not known how much is free here: read what the engine logs"
    return
  elif ! answer="$(program serving_arithmetic.py "$@" --ctx "$CTX" --memory "$free" --json 2>&1)"; then
    note "$name" "not known whether it fits: $(tail -n 1 <<<"$answer")"
    return
  fi
  fits="$(json_value memory.0.fits <<<"$answer") $(json_value memory.0.weights_counted <<<"$answer")"
  answer="$(json_value memory.0.needed_gib <<<"$answer" | awk '{ printf "%.2f", $1 }') GiB"
  case "$fits" in
  "true true") pass "$name" "$answer of weights and pool, $free GiB free, the rest is for buffers and everything else" ;;
  "false true") "$report" "$name" "$answer of weights and pool, $free GiB free" "$advice" ;;
  "false false") "$report" "$name" "$answer for the pool alone, $free GiB free" "$advice" ;;
  *) note "$name" "not known whether it fits: the size of the weights is not known ($free GiB free)" ;;
  esac
}

devices=""
say "preflight.sh for track $TRACK, $MEMORY_GB GB, in $PWD (it only looks)"

pass python "$("$PYTHON" -c 'import platform; print(platform.python_version())')"

# llama-server and its model
llama_server="$LLAMA_BIN"
[ ! -d "$llama_server" ] || llama_server="${llama_server%/}/llama-server"
if [ -f "$llama_server" ] && [ -x "$llama_server" ]; then
  version="$("$llama_server" --version 2>&1 </dev/null | sed -n 's/^version: *//p' | head -n 1)" || version=""
  pass llama-server "version ${version:-unknown} in '$llama_server'"
  [ "${LLAMA_VERSION:-}" = "$version" ] || note llama-server "lab.env says version ${LLAMA_VERSION:-unknown}: run lab-env.sh again"
  devices="$("$llama_server" --list-devices 2>/dev/null </dev/null | sed -n '/^Available devices/,$p' | sed '1d;s/^ *//')" || devices=""
  case "$devices" in
  '' | '(none)') fail "GPU" "llama-server sees none: it is a CPU build" "build it with CUDA (S, N), Vulkan (X) or Metal (M); its log would say: offloaded 0/37 layers" ;;
  *) pass "GPU" "$(printf '%s\n' "$devices" | head -n 1)" ;;
  esac
else
  fail llama-server "there is no executable '$llama_server'" "build llama.cpp, or set LLAMA_BIN in lab.env"
fi
look_at_model "GGUF" "$GGUF" fail

# the second engine and its model
if [ "$TRACK" = M ]; then
  look_at_model "MLX model" "${MLX_MODEL:-}" missing
  python="$(mlx_python)" || python=""
  version="$(mlx_version)"
  case "${version:-unknown}" in
  unknown) missing mlx-lm "'${python:-python3}' has no mlx-lm" "install it: pip install mlx-lm, in the environment that MLX_VENV names" ;;
  *) pass mlx-lm "version $version in '$python'" ;;
  esac
elif [ -n "${VLLM_IMAGE:-}" ]; then
  look_at_model "vLLM model" "$(vllm_folder)" missing
  if ! command -v "$DOCKER" >/dev/null 2>&1; then
    missing container "there is no '$DOCKER'" "install it, or set DOCKER"
  elif "$DOCKER" image inspect "$VLLM_IMAGE" >/dev/null 2>&1; then
    pass container "image $VLLM_IMAGE"
  else
    missing container "there is no image $VLLM_IMAGE, or docker does not answer" "docker pull $VLLM_IMAGE"
  fi
else
  look_at_model "vLLM model" "$(vllm_folder)" missing
  vllm="${VLLM_VENV:-$HOME/vllm/.venv}/bin/vllm"
  [ -x "$vllm" ] || vllm="$(command -v vllm || true)"
  if [ -n "$vllm" ]; then
    pass vLLM "'$vllm'"
  else
    missing vLLM "there is no vllm in '${VLLM_VENV:-$HOME/vllm/.venv}', nor on PATH" "install vLLM, or set VLLM_VENV in lab.env"
  fi
fi

# disk: what is still to be downloaded, and a GiB for logs and records
fault="$(disk_fault "$MODELS_DIR" "$to_fetch")"
if [ -z "$fault" ]; then
  pass disk "enough for what is still to come, $(with_commas "$to_fetch") bytes, and a GiB of logs and records"
else
  fail disk "$fault" "free some, or put the models on another disk and set their places in lab.env"
fi

for port in "$LLAMA_PORT" "$VLLM_PORT" "$MLX_PORT"; do
  if port_answers 127.0.0.1 "$port"; then
    fail "port $port" "something answers there already" "stop it (cleanup.sh stops the lab's own servers): one server at a time"
  else
    pass "port $port" "free"
  fi
done

# memory: one server at a time, each against what is free now
free="$(free_memory_gib)"
[ ! -f "$GGUF" ] || look_at_memory "memory, llama" fail \
  "free memory (stop the other server), or take the eight-bit tier: lab-env.sh with a smaller MEMORY_GB, or fewer slots" \
  --gguf "$GGUF" --slots "$SLOTS" --kv-type "$KV_TYPE"
if [ "$TRACK" != M ] && [ -f "$(vllm_folder)/config.json" ]; then
  look_at_memory "memory, vLLM" missing \
    "free memory (stop the other server), or give vLLM's cache fewer bytes: VLLM_KV_BYTES in lab.env" \
    --config "$(vllm_folder)/config.json" --slots 20 --kv-type "$VLLM_KV_DTYPE"
fi

if [ -n "$first_fail" ]; then
  stop_here "$first_fail" "$first_advice"
else
  say "next, in the other terminal: MODEL=\"\$GGUF\" CACHE_TYPE=\"\$KV_TYPE\" bash $SCRIPTS_WORD/serve-llama-parallel.sh"
fi
